"""A caller's mistake is a ValueError that names the argument; what is well formed but not built, says so."""

from __future__ import annotations

import pytest
import torch
from radixkv_kernels import UnsupportedImplementation, copy_blocks, merge_states, paged_attention, store_kv

from tests.kernels.problems import Shape, make

I32 = torch.int32


def good():
    problem = make(Shape(q_lens=(1, 3), seq_lens=(20, 40)))
    return {"q": problem.q, "k_cache": problem.k_cache, "v_cache": problem.v_cache, **problem.kwargs}


BAD = {
    "q": [
        lambda a: {"q": a["q"][0]},
        lambda a: {"q": a["q"].double()},
        lambda a: {"q": a["q"][:, :3]},  # 3 heads over 2 KV heads
    ],
    "k_cache": [
        lambda a: {"k_cache": a["k_cache"][0]},
        lambda a: {"k_cache": a["k_cache"].half()},
        lambda a: {"k_cache": a["k_cache"][..., :32]},
        lambda a: {"k_cache": torch.zeros(2, 4096, 2, 64), "v_cache": torch.zeros(2, 4096, 2, 64)},
    ],
    "v_cache": [lambda a: {"v_cache": a["v_cache"][:, :8]}, lambda a: {"v_cache": a["v_cache"].half()}],
    "block_table": [
        lambda a: {"block_table": None},
        lambda a: {"block_table": a["block_table"].float()},
        lambda a: {"block_table": torch.full_like(a["block_table"], 99)},
        lambda a: {"block_table": torch.full_like(a["block_table"], -1)},
        lambda a: {"kv_indptr": torch.tensor([0, 1, 2])},
    ],
    "seq_lens": [
        lambda a: {"seq_lens": None},
        lambda a: {"seq_lens": a["seq_lens"][:1]},
        lambda a: {"seq_lens": torch.tensor([-1, 40])},
        lambda a: {"seq_lens": torch.tensor([20, 4000])},
    ],
    "cu_seqlens_q": [
        lambda a: {"cu_seqlens_q": torch.tensor([0, 1])},
        lambda a: {"cu_seqlens_q": torch.tensor([1, 2, 4])},
        lambda a: {"cu_seqlens_q": torch.tensor([0, 3, 2])},
        lambda a: {"cu_seqlens_q": torch.tensor([0, 1, 9])},
    ],
    "window": [lambda a: {"window": 0}, lambda a: {"window": 1.5}],
    "softcap": [lambda a: {"softcap": 0.0}],
    "sinks": [lambda a: {"sinks": torch.zeros(3)}],
    "alibi_slopes": [lambda a: {"alibi_slopes": torch.zeros(2, 4)}],
    "k_scale": [lambda a: {"k_scale": torch.ones(3)}],
    "v_scale": [lambda a: {"v_scale": torch.ones(2, dtype=I32)}],
    "out": [lambda a: {"out": torch.zeros(4, 4, 63)}, lambda a: {"out": torch.zeros(4, 4, 64).half()}],
    "implementation": [lambda a: {"implementation": "cuda"}],
}


@pytest.mark.parametrize(("name", "index"), [(name, i) for name, changes in BAD.items() for i in range(len(changes))])
def test_the_message_names_the_argument(name, index):
    arguments = good()
    arguments.update(BAD[name][index](arguments))
    with pytest.raises(ValueError, match=f"^{name}: expected .* got "):
        paged_attention(**arguments)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("last_block_len", {"last_block_len": torch.tensor([17, 8])}),
        ("last_block_len", {"last_block_len": torch.tensor([0, 8])}),
        ("kv_indptr", {"kv_indptr": torch.tensor([1, 2, 5])}),
        ("kv_indptr", {"kv_indptr": torch.tensor([0, 2, 6])}),
        ("block_table", {"kv_indices": None}),
        ("seq_lens", {"seq_lens": torch.tensor([20, 40])}),
    ],
)
def test_ragged_lists(name, changes):
    problem = make(Shape(q_lens=(1, 3), seq_lens=(20, 40), ragged=True))
    problem.run()
    with pytest.raises(ValueError, match=f"^{name}: expected .* got "):
        problem.run(**changes)


def test_validate_false_skips_contents_and_true_is_the_default_on_the_cpu():
    problem = make(Shape(q_lens=(1,), seq_lens=(20,)))
    wrong = problem.kwargs["block_table"].clone()
    wrong[0, -1] = 77  # behind the sequence: not read
    assert torch.equal(problem.run(block_table=wrong)[0], problem.run(validate=False)[0])


def test_latent_caches_are_not_built():
    with pytest.raises(UnsupportedImplementation, match="head_dim 576"):
        make(Shape(q_lens=(1,), seq_lens=(3,), head_dim=576)).run()


def test_store_copy_merge():
    k_cache = torch.zeros(2, 4, 2, 8)
    k = torch.zeros(3, 2, 8)
    for name, arguments in {
        "k": (k[:, :1], k, k_cache, k_cache, torch.arange(3)),
        "v": (k, k[:2], k_cache, k_cache, torch.arange(3)),
        "slot_mapping": (k, k, k_cache, k_cache, torch.tensor([0, 1, 8])),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: expected .* got "):
            store_kv(*arguments)
    pair = torch.tensor([0]), torch.tensor([1])
    for name, arguments in {
        "src_blocks": (torch.tensor([2]), pair[1]),
        "dst_blocks": (pair[0], pair[0]),
        "num_tokens": (*pair, torch.tensor([5])),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: expected .* got "):
            copy_blocks(k_cache, k_cache, *arguments)
    with pytest.raises(ValueError, match=r"^dst_blocks: expected distinct"):
        copy_blocks(k_cache, k_cache, torch.tensor([0, 0]), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"^lses: expected "):
        merge_states(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3))
