"""Attention on this CPU: batches on a paged cache, the torch path, its peers, and how all of them are timed.

Peers are what a user would write in plain torch instead of the kernels. Each reads the same paged cache and is a
function of no arguments that returns [num_tokens, num_q_heads, head_dim]. Gathers go into buffers allocated once, and
the query heads of a group are folded into rows wherever that can be done.

Sides are timed in turns, beside a canary; a side that is wrong is not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from radixkv_kernels import TreePlan, paged_attention
from torch import Tensor

Peer = Callable[[], Tensor]


@dataclass(frozen=True)
class Batch:
    """Sequences of equal shape: q_len new tokens on a context of `context` tokens, new ones included."""

    q: Tensor
    """[num_seqs * q_len, num_q_heads, head_dim]"""
    k_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]"""
    v_cache: Tensor
    block_table: Tensor
    """[num_seqs, context // block_size] int64"""
    q_len: int
    context: int

    @property
    def num_seqs(self) -> int:
        return self.block_table.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[2]

    def folded_q(self) -> Tensor:
        """[num_seqs, num_kv_heads, q_len * group, head_dim], rows (token, head of the group)."""
        n, hk, d = self.num_seqs, self.num_kv_heads, self.q.shape[2]
        return self.q.view(n, self.q_len, hk, -1, d).transpose(1, 2).reshape(n, hk, -1, d)

    def unfold(self, out: Tensor) -> Tensor:
        """The inverse of `folded_q`, on outputs."""
        n, hk, _, d = out.shape
        return out.view(n, hk, self.q_len, -1, d).transpose(1, 2).reshape(self.q.shape)


@dataclass(frozen=True)
class Heads:
    """What a batch has in each dimension besides its tokens."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


def make_batch(
    heads: Heads, num_seqs: int, own: int, dtype: str, *, prefix: int = 0, q_len: int = 1, seed: int = 0
) -> Batch:
    """Sequences of `own` tokens behind `prefix` that all share; blocks at random, as a cache in use has them."""
    gen = torch.Generator().manual_seed(seed)
    num_shared, num_own = prefix // heads.block_size, own // heads.block_size
    total = num_shared + num_seqs * num_own
    ids = torch.randperm(total, generator=gen)
    table = torch.cat((ids[:num_shared].expand(num_seqs, -1), ids[num_shared:].view(num_seqs, num_own)), 1)
    shape = (total, heads.block_size, heads.num_kv_heads, heads.head_dim)
    kind = getattr(torch, dtype)
    k_cache, v_cache = (torch.randn(shape, generator=gen).to(kind) for _ in range(2))
    q = torch.randn(num_seqs * q_len, heads.num_q_heads, heads.head_dim, generator=gen).to(kind)
    return Batch(q, k_cache, v_cache, table.contiguous(), q_len, prefix + own)


def ours(batch: Batch, *, shared: bool = False) -> Peer:
    """The torch path; `shared` with a plan made beforehand, as one serves all layers."""
    table = batch.block_table.int()
    lens = torch.full((batch.num_seqs,), batch.context, dtype=torch.int32)
    cu = torch.arange(batch.num_seqs + 1, dtype=torch.int32) * batch.q_len
    plan = None
    if shared:
        plan = TreePlan.from_block_table(
            table,
            lens,
            cu,
            block_size=batch.k_cache.shape[1],
            num_q_heads=batch.q.shape[1],
            num_kv_heads=batch.num_kv_heads,
            kv_itemsize=batch.k_cache.itemsize,
        )

    def run() -> Tensor:
        out = paged_attention(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            block_table=table,
            seq_lens=lens,
            cu_seqlens_q=cu,
            plan=plan,
            implementation="torch",
        )
        assert isinstance(out, Tensor)
        return out

    return run


_FEWEST = 3
_WAIT_S = 0.3
"""For a quiet moment before a sample; then it is taken all the same, and counted apart."""


@dataclass(frozen=True)
class Timing:
    """How often, how long, by which clock."""

    samples: int = 15
    patience_s: float = 90.0
    canary_slack: float = 1.6
    clock: str = "wall"
    """"wall", all threads; or "cpu": CPU time of one thread, which a busy neighbour hardly changes."""


class Canary:
    """A product that takes under 0.5 ms on an idle machine."""

    def __init__(self, slack: float) -> None:
        self._a, self._b = torch.randn(8, 128, 256), torch.randn(8, 256, 128)
        self._slack = slack
        self.best_s = min(self.look() for _ in range(50))

    def look(self) -> float:
        """Seconds that one product takes now."""
        start = time.perf_counter()
        torch.bmm(self._a, self._b)
        return time.perf_counter() - start

    def quiet(self) -> bool:
        """Whether three in a row are about as fast as the fastest ever."""
        seen = [self.look() for _ in range(3)]
        self.best_s = min(self.best_s, *seen)
        return max(seen) <= self._slack * self.best_s


def errors_of(batch: Batch, sides: dict[str, Peer]) -> dict[str, float]:
    """Relative error of each against float64, on a few rows; raises where one is wrong."""
    errors = {}
    rows = [0, batch.q.shape[0] // 2, batch.q.shape[0] - 1]
    for name, side in sides.items():
        out, worst = side(), 0.0
        for row in rows:
            s, i = divmod(row, batch.q_len)
            n = batch.context - batch.q_len + i + 1
            k, v = (
                c[batch.block_table[s]].flatten(0, 1)[:n].double().repeat_interleave(batch.q.shape[1] // c.shape[2], 1)
                for c in (batch.k_cache, batch.v_cache)
            )
            x = torch.einsum("hd,nhd->hn", batch.q[row].double(), k) * batch.q.shape[2] ** -0.5
            want = torch.einsum("hn,nhd->hd", torch.softmax(x, 1), v)
            worst = max(worst, float((out[row].double() - want).norm() / want.norm()))
        limit = 1e-5 if batch.q.dtype == torch.float32 else 2e-2
        if not worst < limit:
            raise AssertionError(f"{name}: relative error {worst:.1e}, so its time means nothing")
        errors[name] = worst
    return errors


def time_sides(timing: Timing, sides: dict[str, Peer], canary: Canary) -> dict[str, tuple[list[float], bool]]:
    """Each side's samples in seconds, taken in turns, and whether they are the quiet ones.

    All samples of all sides where some side has fewer than _FEWEST quiet ones: sides compare under equal noise alone.
    """
    quiet: dict[str, list[float]] = {name: [] for name in sides}
    every: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + timing.patience_s
    clock = time.process_time if timing.clock == "cpu" else time.perf_counter
    while min(map(len, quiet.values())) < timing.samples and time.perf_counter() < end:
        for name, side in sides.items():
            give_up = min(end, time.perf_counter() + _WAIT_S)
            while not (before := timing.clock == "cpu" or canary.quiet()) and time.perf_counter() < give_up:
                time.sleep(0.05)
            start = clock()
            side()
            took = clock() - start
            every[name].append(took)
            if before and (timing.clock == "cpu" or canary.quiet()):
                quiet[name].append(took)
    enough = min(map(len, quiet.values())) >= min(_FEWEST, timing.samples)
    return {name: (quiet[name] if enough else every[name], enough) for name in sides}


def read_timing(options: argparse.ArgumentParser, arguments: Sequence[str] | None, *configs: Any) -> tuple[Any, Any]:
    """Adds the options of the clock, and reads all; returns them, and the full or the smoke config, timed so."""
    options.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time of one thread")
    options.add_argument("--patience", type=float, help="seconds a case may take")
    given = options.parse_args(arguments)
    config = configs[given.smoke]
    timing = replace(config.timing, clock=given.clock, patience_s=given.patience or config.timing.patience_s)
    return given, replace(config, timing=timing)


def start_clock(timing: Timing) -> Canary:
    """Returns the canary; clock "cpu" sets PyTorch to one thread."""
    if timing.clock == "cpu":
        torch.set_num_threads(1)
    return Canary(timing.canary_slack)


def result_name(name: str, timing: Timing) -> str:
    """An experiment's JSON; times of another clock have one of their own."""
    return f"{name}_cpu_clock" if timing.clock == "cpu" else name


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy far larger than the caches; the best of some."""
    source = torch.randn(64 << 20)
    target = torch.empty_like(source)
    best = min(_seconds(lambda: target.copy_(source)) for _ in range(8))
    return 2 * source.nbytes / best


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Gathered:
    """The sequences' KV as [num_seqs, num_kv_heads, context, head_dim], in buffers that are reused."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        flat = batch.k_cache.flatten(1)
        self._buffers = [flat.new_empty(batch.block_table.numel(), flat.shape[1]) for _ in range(2)]

    def __call__(self) -> tuple[Tensor, Tensor]:
        batch = self.batch
        shape = (batch.num_seqs, batch.context, batch.num_kv_heads, batch.q.shape[2])
        ids = batch.block_table.flatten()
        found = [
            torch.index_select(cache.flatten(1), 0, ids, out=buffer).view(shape).transpose(1, 2)
            for cache, buffer in zip((batch.k_cache, batch.v_cache), self._buffers, strict=True)
        ]
        return found[0], found[1]


def gather_sdpa(batch: Batch) -> Peer:
    """Decode: one gather, one scaled_dot_product_attention."""
    gather = Gathered(batch)
    return lambda: batch.unfold(F.scaled_dot_product_attention(batch.folded_q(), *gather()))


def gather_sdpa_by_sequence(batch: Batch) -> Peer:
    """Decode: the same, a sequence at a time, so that a gathered sequence is still in the cache when it is read."""
    one = Batch(batch.q[:1], batch.k_cache, batch.v_cache, batch.block_table[:1], 1, batch.context)
    gathers = [Gathered(one)]

    def run() -> Tensor:
        q, out = batch.folded_q(), []
        for s in range(batch.num_seqs):
            gathers[0].batch = Batch(
                batch.q[s : s + 1], batch.k_cache, batch.v_cache, batch.block_table[s : s + 1], 1, batch.context
            )
            out.append(F.scaled_dot_product_attention(q[s : s + 1], *gathers[0]()))
        return batch.unfold(torch.cat(out))

    return run


def indexed_sdpa(batch: Batch) -> Peer:
    """Decode as it is often written: index the cache by the block table, SDPA with enable_gqa."""
    shape = (batch.num_seqs, batch.context, batch.num_kv_heads, batch.q.shape[2])

    def run() -> Tensor:
        k, v = (c[batch.block_table].reshape(shape).transpose(1, 2) for c in (batch.k_cache, batch.v_cache))
        return F.scaled_dot_product_attention(batch.q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    return run


def flex(batch: Batch) -> Peer:
    """FlexAttention compiled, on gathered KV, with a causal block mask where there are several new tokens."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    gather = Gathered(batch)
    compiled = torch.compile(flex_attention, dynamic=False)
    offset = batch.context - batch.q_len
    mask = None
    if batch.q_len > 1:

        def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q + offset >= kv

        mask = create_block_mask(causal, None, None, batch.q_len, batch.context, device="cpu")

    def run() -> Tensor:
        q = batch.q.view(batch.num_seqs, batch.q_len, -1, batch.q.shape[2]).transpose(1, 2)
        out = compiled(q, *gather(), block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch.q.shape)

    return run


def masked_sdpa(batch: Batch) -> Peer:
    """Prefill: one gather, one scaled_dot_product_attention with a mask prepared beforehand."""
    gather = Gathered(batch)
    group = batch.q.shape[1] // batch.num_kv_heads
    position = torch.arange(batch.context - batch.q_len, batch.context).repeat_interleave(group)
    visible = torch.arange(batch.context) <= position[:, None]
    mask = torch.zeros(visible.shape, dtype=batch.q.dtype).masked_fill_(~visible, -torch.inf)
    return lambda: batch.unfold(F.scaled_dot_product_attention(batch.folded_q(), *gather(), attn_mask=mask))


def two_parts(batch: Batch) -> Peer:
    """Prefill: the cached part without a mask, the new part causal, merged by their log-sum-exp."""
    gather = Gathered(batch)
    cached = batch.context - batch.q_len
    group = batch.q.shape[1] // batch.num_kv_heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def run() -> Tensor:
        k, v = gather()
        n, hk, d = batch.num_seqs, batch.num_kv_heads, batch.q.shape[2]
        old, old_lse = flash(batch.folded_q(), k[:, :, :cached], v[:, :, :cached])
        heads = batch.q.view(n, batch.q_len, hk * group, d).transpose(1, 2)
        new_k, new_v = (x[:, :, cached:].repeat_interleave(group, 1) for x in (k, v))
        new, new_lse = flash(heads, new_k, new_v, 0.0, True)
        shape = (n, hk, batch.q_len, group)
        old, old_lse = old.view(*shape, d).transpose(2, 3), old_lse.view(shape).transpose(2, 3)
        new, new_lse = new.view(n, hk, group, batch.q_len, d), new_lse.view(n, hk, group, batch.q_len)
        weight = torch.sigmoid(new_lse - old_lse)[..., None]
        out = torch.lerp(old.float(), new.float(), weight).to(batch.q.dtype)
        return out.permute(0, 3, 1, 2, 4).reshape(batch.q.shape)

    return run
