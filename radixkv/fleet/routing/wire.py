"""Cache events as bytes: msgpack in the layout of vLLM's KV event batches, read and written.

vLLM 0.33 (`vllm/distributed/kv_events.py`) writes a batch as an array `[ts, events, data_parallel_rank]` and an event
as a map whose "type" is its name; fields that have a default are left out at it. Earlier versions wrote an event as an
array, its name first. `decode` reads both, and passes over fields that it does not know; `encode` writes the former.

vLLM publishes extra keys without their kind: an adapter's name, `[identifier, offset]` of media, a salt. So do we,
where that says it all; an adapter's path or version, and a place inside a block, need the tagged form of
`radixkv.cache.hashing.extra_keys`, whose first element is "lora" or "cache_salt". Needs msgspec (`radixkv[replicas]`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from radixkv.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from radixkv.cache.hashing import ExtraKeys
from radixkv.cache.tokens import pack, unpack

# In the order of vLLM's fields; ours are a prefix of them, but for those that describe kinds of attention.
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What changed in one cache in one step.

    Attributes:
        ts: seconds, of the publisher's clock; later batches have later times.
        events: in order.
        data_parallel_rank: of the publisher, where several share an address.
    """

    ts: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None


def encode(batch: EventBatch) -> bytes:
    """Returns a batch as msgpack. O(tokens)."""
    events = [_as_map(event) for event in batch.events]
    return _msgspec().msgpack.encode([batch.ts, events, batch.data_parallel_rank])


def decode(payload: bytes) -> EventBatch:
    """Reads a batch of ours or vLLM's.

    Events of cache groups other than the first (models that mix kinds of attention) are left out: blocks of two groups
    have equal hashes, and prefixes are found by the first.

    Raises:
        ValueError: the bytes are no such batch; names what was expected and what came.
    """
    msgspec = _msgspec()
    try:
        batch = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"payload: expected msgpack, got {error}") from None
    try:
        ts, events, *rest = batch
        found = tuple(event for raw in events if (event := _as_event(raw)) is not None)
        return EventBatch(float(ts), found, rest[0] if rest else None)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"payload: expected [ts, events, rank] as vLLM's KV event batches, got {error!r}") from None


def _as_map(event: Event) -> dict[str, Any]:
    """Fields without a default in vLLM are written whatever they are, those with one only where they differ."""
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": event.medium}
    fields = {
        "type": "BlockStored",
        "block_hashes": event.block_hashes,
        "parent_block_hash": event.parent_block_hash,
        "token_ids": unpack(event.token_ids).tolist(),
        "block_size": event.block_size,
        "lora_id": event.lora_id,
        "medium": event.medium,
        "lora_name": event.lora_name,
    }
    if event.extra_keys is not None:
        fields["extra_keys"] = [keys and [_untagged(key, i) for i, key in enumerate(keys)] for keys in event.extra_keys]
    return fields


def _as_event(raw: Any) -> Event | None:
    if isinstance(raw, Mapping):
        name = raw["type"]
        fields: Mapping[str, Any] = raw
    else:
        name, *values = raw
        fields = dict(zip(_FIELDS[name], values, strict=False))
    if name not in _FIELDS:
        raise ValueError(f"event: expected one of {', '.join(_FIELDS)}, got {name!r}")
    if fields.get("group_idx"):
        return None
    if name == "AllBlocksCleared":
        return AllBlocksCleared()
    block_hashes = tuple(fields["block_hashes"])
    if name == "BlockRemoved":
        return BlockRemoved(block_hashes, fields.get("medium"))
    lora_name, extra_keys = fields.get("lora_name"), fields.get("extra_keys")
    token_ids, block_size = pack(fields["token_ids"]), fields["block_size"]
    if len(unpack(token_ids)) != len(block_hashes) * block_size:
        raise ValueError(
            f"token_ids: expected {len(block_hashes)} blocks of {block_size}, got {len(fields['token_ids'])}"
        )
    return BlockStored(
        block_hashes=block_hashes,
        parent_block_hash=fields["parent_block_hash"],
        token_ids=token_ids,
        block_size=block_size,
        lora_id=fields.get("lora_id"),
        medium=fields.get("medium"),
        lora_name=lora_name,
        extra_keys=_tagged_keys(extra_keys, lora_name, len(block_hashes)),
    )


def _untagged(key: tuple[Any, ...], at: int) -> Any:
    kind, *rest = key
    if kind == "mm":
        return rest
    if kind == "cache_salt" and len(rest) == 1:
        return rest[0]
    if kind == "lora" and len(rest) == 2 and not rest[1] and not at:  # the first adapter is the event's lora_name
        return rest[0]
    return key


def _tagged_keys(raw: Sequence[Any] | None, lora_name: str | None, num_blocks: int) -> tuple[ExtraKeys, ...] | None:
    if raw is None:  # versions before extra_keys told the adapter alone
        return None if lora_name is None else ((("lora", lora_name, ""),),) * num_blocks
    if len(raw) != num_blocks:
        raise ValueError(f"extra_keys: expected one entry for each of {num_blocks} blocks, got {len(raw)}")
    return tuple(keys and _tagged(keys, lora_name) for keys in raw)


def _tagged(keys: Sequence[Any], lora_name: str | None) -> tuple[tuple[Any, ...], ...]:
    found: list[tuple[Any, ...]] = []
    for at, key in enumerate(keys):
        if isinstance(key, str):
            found.append(("lora", key, "") if key == lora_name and not at else ("cache_salt", key))
        elif isinstance(key, bytes):  # a digest of prompt embeddings
            found.append(("embeds", key))
        elif len(key) == 2 and isinstance(key[1], int):
            found.append(("mm", *key))
        else:
            found.append(tuple(key))
    return tuple(found)


def _msgspec() -> ModuleType:
    try:
        return import_module("msgspec")
    except ImportError as error:
        raise ImportError("events on a wire need msgspec: pip install 'radixkv[replicas]'") from error
