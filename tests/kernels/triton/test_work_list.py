"""The attention kernel on an explicit work list: rows of several sequences share an item, with the same bits."""

from __future__ import annotations

import pytest
import torch
from radixkv_kernels import paged_attention
from radixkv_kernels.triton_impl.attention_kernel import attention_kernel
from radixkv_kernels.triton_impl.config import Config
from radixkv_kernels.triton_impl.reduce_kernel import reduce_kernel
from radixkv_kernels.triton_impl.variants import tile_constants
from torch import Tensor

from tests.kernels.problems import Shape, make

pytestmark = pytest.mark.usefixtures("exact_interpreter")

GROUP, HEADS, DIM, BLOCK = 2, 2, 64, 16
LENGTHS = (300, 330, 390)
SHARED_CELLS = 2


def int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_programs", [1, 3])
def test_a_shared_prefix_as_one_item_gives_the_bits_of_three(dtype: torch.dtype, num_programs: int) -> None:
    sizes = {"num_q_heads": GROUP * HEADS, "num_kv_heads": HEADS, "head_dim": DIM, "block_size": BLOCK}
    call = make(Shape((1, 1, 1), LENGTHS, dtype=dtype, **sizes)).call
    shared_blocks = SHARED_CELLS * 128 // BLOCK
    call["block_table"][1:, :shared_blocks] = call["block_table"][0, :shared_blocks]
    plain, plain_lse = paged_attention(**call, implementation="triton")

    # The shared cells are one item of all rows; every later cell of the run is an item of its own sequence.
    items = [[0, 3 * GROUP, 0, SHARED_CELLS, 0]]
    partials = [[(row * GROUP, 0)] for row in range(3)]
    next_row = 3 * GROUP
    for row, length in enumerate(LENGTHS):
        for cell in range(SHARED_CELLS, -(-length // 128)):
            items.append([row * GROUP, GROUP, cell, cell + 1, next_row])
            partials[row].append((next_row, cell))
            next_row += GROUP
    flat = [partial for row in partials for partial in row]
    indptr = int32([0, *torch.tensor([len(row) for row in partials]).cumsum(0).tolist()])

    q, k_cache, v_cache = call["q"], call["k_cache"], call["v_cache"]
    acc = torch.full((HEADS, next_row, DIM), torch.nan)
    ml = torch.full((HEADS, next_row, 1, 2), torch.nan)
    out, lse = torch.full_like(plain, torch.nan), torch.full_like(plain_lse, torch.nan)
    config = Config(64, 128, 64, 4, 2, "tf32")
    rows = int32([0, 1, 2])
    lens, cu = call["seq_lens"], call["cu_seqlens_q"]
    attention_kernel[(num_programs, HEADS)](
        q, k_cache, v_cache, call["block_table"], lens, lens, cu, torch.ones(1), acc, ml,
        int32(items), int32([len(items)]), rows, rows,
        3, next_row, 1, 1, 0, DIM**-0.5, 1.0,
        *q.stride(), call["block_table"].stride(0), *k_cache.stride(), *v_cache.stride(), 0,
        GROUP=GROUP, BLOCK_SIZE=BLOCK, HEAD_DIM=DIM, V_HEAD_DIM=DIM, CAUSAL=True, WINDOW=False, SOFTCAP=False,
        FP8=False, INDPTR=False, WORK_LIST=True, **tile_constants(DIM, DIM, config),
    )  # fmt: skip
    reduce_kernel[(3, 1)](
        acc, ml, out, lse, lens, cu, acc, acc, int32([row for row, _ in flat]), indptr,
        int32([cell for _, cell in flat]), rows, 3, HEADS * GROUP, next_row, 1, 1, 0,
        *out.stride(), *lse.stride(), 0,
        GROUP=GROUP, V_HEAD_DIM=DIM, BLOCK_H=4, BLOCK_DV=DIM, V_SLICES=1, CAUSAL=True, WINDOW=False, SINKS=False,
        V_SCALE=False, LSE=True, WORK_LIST=True,
    )  # fmt: skip
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
