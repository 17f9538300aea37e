"""Device functions whose arithmetic every kernel shares: the merge of two partial results, tanh, and fp8 e4m3 codes.

All kernels are launched with `enable_fp_fusion=False`, so a multiply and an add are fused exactly where `tl.fma` says
so; that is what makes a merge give the same bits in every kernel.

A partial result is (m, l, acc), all float32: m the maximum of the scores, l the sum of the exponentials of (score - m),
acc the sum of V rows weighted by them. The identity is (-inf, 0, 0).

e4m3 is decoded and encoded with integer operations, because triton refuses the type below sm_89; both are exact, so
they agree bit for bit with the hardware's conversions.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

CELL_SIZE: tl.constexpr = tl.constexpr(128)  # KV tokens whose partial result is computed as one unit
RUN_CELLS: tl.constexpr = tl.constexpr(16)  # cells folded before the runs themselves are folded: 2,048 tokens


@triton.jit
def finite_max(m):
    """m with -inf replaced by 0, so that `x - m` is -inf and not NaN where nothing has been seen yet."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def merge(m_a, l_a, acc_a, m_b, l_b, acc_b, UNIT: tl.constexpr):
    """Merge partial b into partial a, the only merge formula of the package; the identity on a side changes nothing.

    m_a, l_a, m_b, l_b: [M] float32; acc_a, acc_b: [M, D] float32. m is in units of 1/UNIT bits: UNIT is 1.0 where
    scores carry a factor log2(e), LOG2E where they are natural. Returns the merged (m, l, acc).
    """
    m = tl.maximum(m_a, m_b)
    safe = finite_max(m)
    weight_a = tl.math.exp2((m_a - safe) * UNIT)
    weight_b = tl.math.exp2((m_b - safe) * UNIT)
    l = tl.fma(l_b, weight_b, l_a * weight_a)
    acc = tl.fma(acc_b, tl.broadcast_to(weight_b[:, None], acc_b.shape), acc_a * weight_a[:, None])
    return m, l, acc


@triton.jit
def tanh(x):
    """tanh by the odd rational minimax polynomial on |x| <= 7.9 (Eigen's `ptanh` coefficients), within a few ulp.

    The obvious formula by exponentials loses all relative accuracy near 0, where soft-capped scores live.
    """
    x = tl.minimum(tl.maximum(x, -7.90531110763549805), 7.90531110763549805)
    x2 = x * x
    p = tl.fma(x2, tl.full(x.shape, -2.76076847742355e-16, tl.float32), 2.00018790482477e-13)
    p = tl.fma(x2, p, tl.full(x.shape, -8.60467152213735e-11, tl.float32))
    p = tl.fma(x2, p, tl.full(x.shape, 5.12229709037114e-08, tl.float32))
    p = tl.fma(x2, p, tl.full(x.shape, 1.48572235717979e-05, tl.float32))
    p = tl.fma(x2, p, tl.full(x.shape, 6.37261928875436e-04, tl.float32))
    p = tl.fma(x2, p, tl.full(x.shape, 4.89352455891786e-03, tl.float32))
    d = tl.fma(x2, tl.full(x.shape, 1.19825839466702e-06, tl.float32), 1.18534705686654e-04)
    d = tl.fma(x2, d, tl.full(x.shape, 2.26843463243900e-03, tl.float32))
    d = tl.fma(x2, d, tl.full(x.shape, 4.89352518554385e-03, tl.float32))
    return x * p / d


@triton.jit
def decode_e4m3(code, DTYPE: tl.constexpr):
    """uint8 e4m3 codes -> values in DTYPE (float16, bfloat16 or float32), exactly; 0x7f and 0xff give NaN."""
    # The exponent and mantissa bits are moved where DTYPE has them; a power of two then corrects the bias, also for
    # subnormals. Sixteen bits wide where DTYPE is: half the registers.
    if tl.float32 == DTYPE:
        wide = code.to(tl.uint32)
        value = (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        wide = code.to(tl.uint16)
        if tl.float16 == DTYPE:
            value = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        else:
            value = (((wide & 0x7F) << 4) | ((wide & 0x80) << 8)).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)


@triton.jit
def encode_e4m3(x):
    """float32 -> uint8 e4m3 codes, rounded to nearest even and saturated at +-448; NaN gives 0x7f."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    is_nan = bits > 0x7F800000
    bits = tl.minimum(bits, 0x43E00000)  # 448.0
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2**14 makes the last mantissa bit 2**-9, the smallest subnormal: the hardware rounds.
    subnormal = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, subnormal, normal)  # 2**-6, the smallest normal
    return tl.where(is_nan, 0x7F, code | sign).to(tl.uint8)
