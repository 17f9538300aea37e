"""The kernels alone: KV in blocks of 16, a prompt and then a decode, held against plain attention."""

import torch
from radixkv_kernels import paged_attention, store_kv

torch.manual_seed(0)
num_q_heads, num_kv_heads, head_dim, block_size = 8, 2, 64, 16
k_cache = torch.zeros(8, block_size, num_kv_heads, head_dim)
v_cache = torch.zeros_like(k_cache)
block_table = torch.tensor([[5, 1, 6]], dtype=torch.int32)  # one sequence, in blocks anywhere
k, v = torch.randn(2, 40, num_kv_heads, head_dim)
q = torch.randn(40, num_q_heads, head_dim)


def step(start: int, end: int) -> torch.Tensor:
    """Writes the KV of tokens start .. end, then attends from them to all tokens up to each."""
    positions = torch.arange(start, end)
    slots = block_table[0, positions // block_size].long() * block_size + positions % block_size
    store_kv(k[start:end], v[start:end], k_cache, v_cache, slots)
    return paged_attention(
        q[start:end],
        k_cache,
        v_cache,
        block_table=block_table,
        seq_lens=torch.tensor([end], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
    )


out = torch.cat([step(0, 39), step(39, 40)])  # 39 tokens of a prompt, then one more
heads = num_q_heads // num_kv_heads
whole = torch.nn.functional.scaled_dot_product_attention(
    q.transpose(0, 1), *(x.repeat_interleave(heads, dim=1).transpose(0, 1) for x in (k, v)), is_causal=True
).transpose(0, 1)
print(f"largest difference from plain attention: {(out - whole).abs().max():.1e}")
assert torch.allclose(out, whole, atol=1e-5)
