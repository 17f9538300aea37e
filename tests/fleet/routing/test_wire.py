"""The wire format, against bytes that msgspec makes of structs laid out as vLLM's are."""

from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")

from radixkv.cache.events import AllBlocksCleared, BlockRemoved, BlockStored  # noqa: E402
from radixkv.cache.tokens import pack  # noqa: E402
from radixkv.fleet.routing.wire import EventBatch, decode, encode  # noqa: E402


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def make_structs(array_like):
    """vLLM's three events: maps in 0.33, arrays some releases before."""

    def event(name, fields):
        return msgspec.defstruct(name, fields, omit_defaults=True, gc=False, tag=True, array_like=array_like)

    optional = [("extra_keys", list | None, None), ("group_idx", int | None, None)]
    kind = [] if array_like else [("kv_cache_spec_kind", str | None, None), ("locality", str | None, None)]
    stored = event(
        "BlockStored",
        [
            ("block_hashes", list),
            ("parent_block_hash", Any),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            *optional,
            *kind,
        ],
    )
    removed = event("BlockRemoved", [("block_hashes", list), ("medium", str | None), ("group_idx", int | None, None)])
    return stored, removed, event("AllBlocksCleared", [])


CASES = [  # ours, vLLM's extra keys
    (BlockStored((b"a" * 32, b"b" * 32), None, pack([1, 2, 3, 4]), 2, None, "GPU"), None),
    (BlockStored((7, 2**63), 5, pack([1, 2]), 1, None, None), None),
    (
        BlockStored((b"a",), b"p", pack([1, 2]), 2, None, "GPU", "x", ((("lora", "x", ""), ("cache_salt", "s")),)),
        [["x", "s"]],
    ),
    (
        BlockStored((b"a", b"b"), b"p", pack([1, 2]), 1, None, "GPU", None, ((("mm", "cat.png", -3),), None)),
        [[["cat.png", -3]], None],
    ),
    (  # a salt with the adapter's name, an adapter with a version, a salt that starts inside the block
        BlockStored(
            (b"a",),
            None,
            pack([1]),
            1,
            None,
            "GPU",
            "x",
            ((("lora", "x", "", 2), ("lora", "y", ""), ("cache_salt", "x", 3), ("cache_salt", "x")),),
        ),
        [[["lora", "x", "", 2], ["lora", "y", ""], ["cache_salt", "x", 3], "x"]],
    ),
]


@pytest.mark.parametrize("array_like", [False, True], ids=["maps", "arrays"])
@pytest.mark.parametrize("rank", [None, 3])
def test_bytes_are_those_of_vllms_structs(array_like, rank):
    stored, removed, cleared = make_structs(array_like)
    for event, keys in CASES:
        theirs = stored(
            list(event.block_hashes),
            event.parent_block_hash,
            [int.from_bytes(event.token_ids[i : i + 4], "little") for i in range(0, len(event.token_ids), 4)],
            event.block_size,
            None,
            event.medium,
            event.lora_name,
            keys,
        )
        payload = msgspec.msgpack.encode(
            Batch(1.5, [cleared(), theirs, removed([b"a", 9], "GPU"), removed([b"c"], None)], rank)
        )
        ours = EventBatch(
            1.5, (AllBlocksCleared(), event, BlockRemoved((b"a", 9), "GPU"), BlockRemoved((b"c",), None)), rank
        )
        assert decode(payload) == ours
        if not array_like:
            assert encode(ours) == payload
        assert decode(encode(ours)) == ours


def test_what_vllm_adds_is_passed_over():
    stored, removed, _ = make_structs(False)
    theirs = [
        stored([b"a"], None, [1], 1, None, "GPU", None, None, 0, "full_attention", "LOCAL"),
        stored([b"a"], None, [1], 1, None, "GPU", None, None, 1, "sliding_window", "LOCAL"),
        removed([b"a"], "GPU", 1),
    ]
    batch = decode(msgspec.msgpack.encode(Batch(0.0, theirs)))
    assert batch.events == (BlockStored((b"a",), None, pack([1]), 1, None, "GPU"),)


def test_an_adapter_without_extra_keys_is_told_by_its_name():
    stored, _, _ = make_structs(True)
    payload = msgspec.msgpack.encode([1.0, [stored([b"a"], None, [1, 2], 2, 4, "GPU", "pirate")]])
    (event,) = decode(payload).events
    assert (event.lora_id, event.extra_keys) == (4, ((("lora", "pirate", ""),),))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(3),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [{"type": "Nonsense"}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [b"a"], None, [1, 2], 1, None, None, None]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [b"a"], None, [-1], 1, None, None, None]]]),
    ],
)
def test_bytes_that_are_no_batch(payload):
    with pytest.raises(ValueError, match="payload: expected"):
        decode(payload)
