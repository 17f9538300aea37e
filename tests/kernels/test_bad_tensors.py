"""Any tensor argument of the kernels replaced by what callers should not pass: an error that names it, or the answer.

What is well formed all the same (another stride, an unused NaN) must give the very numbers of the well-formed call.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixkv_kernels import UnsupportedImplementation, copy_blocks, merge_states, paged_attention, store_kv

from tests.kernels.problems import Shape, make

FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
I32 = torch.int32


def attention():
    problem = make(Shape(q_lens=(1, 3), seq_lens=(20, 40)))
    return {"q": problem.q, "k_cache": problem.k_cache, "v_cache": problem.v_cache, **problem.kwargs}


def store():
    k = torch.randn(5, 2, 16)
    caches = {"k_cache": torch.randn(4, 8, 2, 16), "v_cache": torch.randn(4, 8, 2, 16)}
    return {"k": k, "v": k + 1, **caches, "slot_mapping": torch.tensor([3, -1, 31, 0, 9])}


def copy():
    caches = {"k_cache": torch.randn(4, 8, 2, 16), "v_cache": torch.randn(4, 8, 2, 16)}
    ids = {"src_blocks": torch.tensor([0, 1]), "dst_blocks": torch.tensor([2, 3]), "num_tokens": torch.tensor([8, 3])}
    return {**caches, **ids}


def merge():
    out = torch.randn(2, 3, 4, 16)
    return {"outs": out, "lses": torch.randn(2, 3, 4)}


CALLS = {"paged_attention": (paged_attention, attention), "store_kv": (store_kv, store)}
CALLS |= {"copy_blocks": (copy_blocks, copy), "merge_states": (merge_states, merge)}

# What gives the same numbers in another form.
EQUAL = {
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed twice": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t,
    "offset": lambda t: torch.cat([t[:1], t])[1:],
}
WRONG = {
    "none": lambda t: None,
    "a list": lambda t: t.tolist(),
    "a number": lambda t: 3,
    "numpy": lambda t: t.numpy() if t.dtype != torch.bfloat16 else None,
    "meta": lambda t: t.to("meta"),
    "empty": lambda t: t[:0],
    "a dimension more": lambda t: t[None],
    "a dimension less": lambda t: t[0] if t.dim() else t,
    "shorter": lambda t: t[:-1],
    "narrower": lambda t: t[..., :-1],
    "longer": lambda t: torch.cat([t, t]),
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "int8": lambda t: t.to(torch.int8),
    "bool": lambda t: t > 0,
    "complex": lambda t: t.to(torch.complex64),
    "sparse": lambda t: t.to_sparse(),
    "negative": lambda t: -t.abs() - 2,
    "huge": lambda t: torch.full_like(t, 2**31 - 1),
    "larger than that": lambda t: torch.full(t.shape, 2**62),
    "stride 0": lambda t: t[:1].expand_as(t),
    "requires grad": lambda t: t.float().clone().requires_grad_(),
}
MESSAGE = (ValueError, UnsupportedImplementation)


def result(call, arguments):
    """What a call returns and what it writes to, as one list."""
    out = call(**arguments)
    outs = [out] if isinstance(out, torch.Tensor) else list(out or ())
    return [tensor.clone() for tensor in (*outs, *(t for n, t in arguments.items() if n in ("k_cache", "v_cache")))]


def same(a, b):
    """Bit for bit; what may not be read is NaN in both."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("change", EQUAL)
def test_other_strides_give_the_same_numbers(name, change):
    call, make_arguments = CALLS[name]
    torch.manual_seed(0)
    plain = make_arguments()
    tensors = [key for key, value in plain.items() if isinstance(value, torch.Tensor)]
    wanted = result(call, {key: value.clone() if key in tensors else value for key, value in plain.items()})
    for key in tensors:
        changed = {other: value.clone() if other in tensors else value for other, value in plain.items()}
        changed[key] = EQUAL[change](changed[key])
        try:
            found = result(call, changed)
        except MESSAGE as error:
            assert key in str(error), (key, error)
            continue
        assert all(same(a, b) for a, b in zip(wanted, found, strict=True)), key


@pytest.mark.parametrize("name", CALLS)
@FUZZ
@given(data=st.data())
def test_wrong_tensors_are_refused_or_harmless(name, data):
    call, make_arguments = CALLS[name]
    torch.manual_seed(0)
    arguments = make_arguments()
    tensors = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
    key, how = data.draw(st.sampled_from(tensors)), data.draw(st.sampled_from(sorted(WRONG)))
    try:
        wrong = WRONG[how](arguments[key])
    except (RuntimeError, TypeError):
        return  # there is no such tensor
    if how == "stride 0" and name == "paged_attention" and key.endswith("cache"):
        return  # one block for all is fine, if that block is full
    arguments[key] = wrong
    before = {n: t.clone() for n, t in arguments.items() if n in ("k_cache", "v_cache") and isinstance(t, torch.Tensor)}
    try:
        out = call(**arguments)
    except MESSAGE as error:
        assert str(error)
        for cache, was in before.items():
            if was.device.type != "meta" and not was.is_sparse and not was.is_complex():
                assert same(arguments[cache], was), f"{key} {how}: refused, but {cache} was written"
        return
    outs = [out] if isinstance(out, torch.Tensor) else list(out or ())
    for tensor in outs:
        if name == "paged_attention":  # what is after cu_seqlens_q's end is padding, and its output not defined
            tensor = tensor[: int(arguments["cu_seqlens_q"][-1])]
        assert tensor.device.type == "cpu" and not tensor.isnan().any(), (key, how)
