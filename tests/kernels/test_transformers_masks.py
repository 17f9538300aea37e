"""The attention function of the transformers integration under every mask that transformers can hand to it.

Random masks put together of what models use: causal or not, windows, chunks, packed sequences, bidirectional blocks,
padding on either side, free room behind (static caches), a few queries behind many keys (assisted decoding). Each is
computed as the mask says, or refused because a query sees keys with a gap between.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from radixkv_kernels import UnsupportedImplementation
from radixkv_kernels.integrations.transformers import attention_forward

MODULE = SimpleNamespace(is_causal=True)
HEADS, KV_HEADS, DIM = 4, 2, 16


@st.composite
def masks(draw):
    """[batch, 1, q_len, kv_len] bool."""
    n = draw(st.integers(1, 24))
    t = torch.arange(n)
    distance = t[:, None] - t
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        mask = distance >= 0 if draw(st.booleans()) else torch.ones(n, n, dtype=torch.bool)
        window = draw(st.none() | st.integers(1, n))
        if draw(st.booleans()):  # tokens of a block see each other: before the window cuts, or after
            first, size = draw(st.integers(0, n - 1)), draw(st.integers(1, n))
            block = (t >= first) & (t < first + size)
            whole = block[:, None] & block
            narrow = distance.abs() < (window or n)
            mask = mask | (whole & narrow if draw(st.booleans()) else whole)
        if window is not None:
            mask = mask & (distance < window)
            if draw(st.booleans()):
                mask = mask & (distance > -window)
        if draw(st.booleans()):  # chunks, or packed sequences
            part = t // draw(st.integers(1, n))
            mask = mask & (part[:, None] == part)
        padding, side = draw(st.integers(0, n)), draw(st.sampled_from(("left", "right", "none")))
        if side != "none":
            mask = mask & (t >= padding if side == "left" else t < n - padding)
        if draw(st.integers(0, 7)) == 0:  # a hole in the prompt
            mask = mask & (t != draw(st.integers(0, n - 1)))
        if draw(st.integers(0, 3)) == 0:  # anything that has no gap, in steps that are regular now and then
            step = st.sampled_from((0, 0, 0, 1, 1, 1, -1, 4))
            lo, hi = (torch.tensor([0, *(draw(step) for _ in range(n - 1))]).cumsum(0)[:, None] for _ in range(2))
            mask = (t >= lo) & (t < hi + draw(st.integers(0, 3)))
        rows.append(mask)
    mask = torch.stack(rows)[:, None]
    mask = mask[:, :, n - draw(st.integers(1, n)) :]
    return torch.nn.functional.pad(mask, (0, draw(st.sampled_from((0, 0, 1, 8)))))


FORMS = {
    "bool": lambda mask: mask,
    "-inf": lambda mask: torch.zeros(mask.shape).masked_fill(~mask, -torch.inf),
    "smallest": lambda mask: torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min),
    "smallest of half": lambda mask: torch.zeros(mask.shape, dtype=torch.float16).masked_fill(~mask, -65504.0),
    "of all heads": lambda mask: mask.expand(-1, HEADS, -1, -1),
}


def states(batch, q_len, kv_len, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, HEADS, q_len, DIM), (batch, KV_HEADS, kv_len, DIM), (batch, KV_HEADS, kv_len, DIM)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def plain(query, key, value, mask, sinks=None):
    """Float64, [batch, q_len, heads, dim]; 0 where no key is seen. And a bound of float32's roundoff around it."""
    q, k, v = query.double(), *(x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    x = q @ k.transpose(2, 3) * DIM**-0.5
    x = x.masked_fill(~mask, -torch.inf)
    columns = x.shape[3]
    if sinks is not None:
        x = torch.cat((x, sinks.double()[:, None, None].expand(*x.shape[:3], 1)), 3)
    out = (torch.softmax(x, 3)[..., :columns].nan_to_num() @ v).transpose(1, 2)
    # dim products a score; its error is that of exp; then sums over the keys
    largest = float((q.abs() @ k.abs().transpose(2, 3)).max()) * DIM**-0.5
    terms = 2 * (DIM + 4) * max(1.0, largest) + 2 * columns
    return out, terms * torch.finfo(torch.float32).eps * float(v.abs().max())


def has_gap(mask):
    """Whether some query sees keys a < c without some b between."""
    seen = [row.nonzero()[:, 0].tolist() for row in mask.reshape(-1, mask.shape[-1])]
    return any(keys and keys[-1] - keys[0] + 1 != len(keys) for keys in seen)


@settings(max_examples=400, deadline=None)
@given(masks(), st.sampled_from(sorted(FORMS)), st.booleans())
@torch.no_grad()
def test_any_mask_is_exact_or_refused(mask, form, with_sinks):
    batch, _, q_len, kv_len = mask.shape
    query, key, value = states(batch, q_len, kv_len)
    sinks = torch.linspace(-1, 2, HEADS) if with_sinks else None
    # what no query of a row sees is never read
    unseen = ~mask.any(2)[:, 0]
    for cache in (key, value):
        cache.transpose(1, 2)[unseen] = torch.nan
    if has_gap(mask):
        with pytest.raises(UnsupportedImplementation, match="gap"):
            attention_forward(MODULE, query, key, value, FORMS[form](mask), s_aux=sinks)
        return
    got, weights = attention_forward(MODULE, query, key, value, FORMS[form](mask), s_aux=sinks)
    want, bound = plain(query, key.nan_to_num(), value.nan_to_num(), mask, sinks)
    assert weights is None and got.dtype == query.dtype
    assert float((got - want).abs().max()) <= bound
    assert not got[~mask.any(3)[:, 0]].any()


@torch.no_grad()
def test_one_mask_for_the_batch_and_for_all_queries():
    query, key, value = states(3, 5, 7)
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0]).bool()[None, None, None]
    got, _ = attention_forward(MODULE, query, key, value, mask)
    want, bound = plain(query, key, value, mask.expand(3, 1, 5, 7))
    assert float((got - want).abs().max()) <= bound


@pytest.mark.parametrize("blind", [1, 2, 5])
@torch.no_grad()
def test_queries_before_the_first_key(blind):
    """They see nothing, and the first that sees a key sees key 0: no step tells the two apart."""
    query, key, value = states(2, 5, 5)
    mask = torch.ones(5, 5).tril(-blind).bool().expand(2, 1, 5, 5)
    got, _ = attention_forward(MODULE, query, key, value, mask)
    want, bound = plain(query, key, value, mask)
    assert float((got - want).abs().max()) <= bound and not got[:, :blind].any()


@torch.no_grad()
def test_a_padded_row_has_the_bits_it_has_alone():
    """Left padding, right padding, and free room behind."""
    query, key, value = states(3, 12, 12, seed=3)
    causal = torch.ones(12, 12).tril().bool()
    t = torch.arange(12)
    mask = torch.stack((causal & (t >= 5), causal & (t < 7), causal))[:, None]
    together, _ = attention_forward(MODULE, query, key, value, mask)
    for row, of in enumerate((slice(5, 12), slice(0, 7), slice(0, 12))):
        alone = [x[row : row + 1, :, of].clone() for x in (query, key, value)]
        got, _ = attention_forward(MODULE, *alone, causal[of, of][None, None])
        assert torch.equal(got[0], together[row, of])
    room = [torch.nn.functional.pad(x, (0, 0, 0, 9), value=torch.nan) for x in (key, value)]
    static, _ = attention_forward(MODULE, query, *room, torch.nn.functional.pad(mask, (0, 9)))
    assert torch.equal(static, together)


@torch.no_grad()
def test_without_a_mask():
    query, key, value = states(2, 6, 6)
    for causal in (True, False):
        mask = torch.ones(6, 6).tril().bool() if causal else torch.ones(6, 6).bool()
        for given_as in ({"is_causal": causal}, {}):
            module = SimpleNamespace(is_causal=causal)
            got, _ = attention_forward(module, query, key, value, None, **given_as)
            want, bound = plain(query, key, value, mask.expand(2, 1, 6, 6))
            assert float((got - want).abs().max()) <= bound
    one, bound = plain(query[:, :, -1:], key, value, torch.ones(2, 1, 1, 6).bool())
    assert float((attention_forward(MODULE, query[:, :, -1:], key, value, None)[0] - one).abs().max()) <= bound
    with pytest.raises(UnsupportedImplementation, match="attention_mask: expected a mask for 2 causal"):
        attention_forward(MODULE, query[:, :, -2:], key, value, None)


@torch.no_grad()
def test_what_is_refused_is_named():
    query, key, value = states(2, 3, 5)
    every = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    by_head = every.repeat(1, HEADS, 1, 1)
    by_head[:, 1, :, 4] = False
    for mask, told in (
        (by_head, "same for all heads"),
        (torch.full((2, 1, 3, 5), -0.5), "a bias of the scores"),
        (torch.full((2, 1, 3, 5), torch.nan), "a bias of the scores"),
        (torch.full((2, 1, 3, 5), 1.0), "a bias of the scores"),
        (every.long(), "bool or float"),
        (every[:, 0], "bool or float"),
        (every[..., :4], "bool or float"),
        (every[:, :, :2], "bool or float"),
        (every[..., :1], "bool or float"),
        (torch.ones(3, 1, 3, 5).bool(), "bool or float"),
    ):
        with pytest.raises(UnsupportedImplementation, match=f"attention_mask: .*{told}"):
            attention_forward(MODULE, query, key, value, mask)
    for name in ("position_bias", "output_attentions"):
        with pytest.raises(UnsupportedImplementation, match=name):
            attention_forward(MODULE, query, key, value, every, **{name: torch.ones(1)})
    for name, changed in (("key", (query, key.half(), value)), ("value", (query, key, value.double()))):
        with pytest.raises(ValueError, match=f"{name}: expected query's dtype"):
            attention_forward(MODULE, *changed, every)
