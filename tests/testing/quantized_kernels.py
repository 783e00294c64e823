"""Kernels of quantized inputs, right and wrong, in the signatures of their systems."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.make import make_changed

F = np.float32
E4M3 = ml_dtypes.float8_e4m3fn


def attend(q, k, v, scores, values, dtype, *, scale, causal, P=1.0, weights=None):
    """Return o of stored q, k and v, whose factors are (B, H)."""
    _, H, T, D = q.shape
    S, G = k.shape[2], H // k.shape[1] if k.shape[1] else 1
    scale = 1 / np.sqrt(max(D, 1)) if scale is None else scale
    k, v = (np.repeat(x.astype(F), G, axis=1) for x in (k, v))
    s = q.astype(F) @ k.swapaxes(-1, -2) * (F(scale) * scores)[..., None, None]
    hidden = np.arange(S) > np.arange(T)[:, None] + S - T if causal else np.zeros((T, S), bool)
    s = np.where(hidden, -np.inf, s)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    # As tensor cores' conversions do, it saturates.
    stored = p if weights is None else np.minimum(p * F(P), 448).astype(weights).astype(F) / F(P)
    terms = stored[..., None] * v[:, :, None]
    o = np.where(hidden[..., None], 0, terms).sum(-2) * values[..., None, None]
    return (o / np.where(total == 0, 1, total)).astype(dtype)


class Fp8:
    """FlashAttention 3's kernel: q, k, v and P in float8, factors (B, K)."""

    weights = E4M3
    factor = 256

    def __call__(
        self, q, k, v, softmax_scale=None, causal=False,
        q_descale=None, k_descale=None, v_descale=None,
    ):  # fmt: skip
        assert q.dtype == k.dtype == v.dtype == E4M3
        G = q.shape[1] // k.shape[1] if k.shape[1] else 1
        factors = q_descale, k_descale, v_descale
        scores, values = (self.heads(f(*factors), G) for f in (self.scores, self.values))
        options = {"scale": softmax_scale, "causal": causal, "P": self.factor}
        return attend(q, k, v, scores, values, ml_dtypes.bfloat16, **options, weights=self.weights)

    def heads(self, x, G):
        return np.repeat(x, G, axis=1)

    def scores(self, q, k, v):
        return q * k

    def values(self, q, k, v):
        return v


# P is multiplied by 2⁸ before it is stored, and not divided after.
WeightsStayLarge = make_changed(Fp8, "WeightsStayLarge", values=lambda self, q, k, v: v * F(256))
# P is multiplied by 2⁹, beyond the largest number: weights of more than 7/8 are cut.
WeightsOverflow = make_changed(Fp8, "WeightsOverflow", factor=512)

WRONG = tuple(
    make_changed(Fp8, name, cause, **{step: f})
    for name, cause, step, f in (
        ("IgnoresV", "v_descale is ignored: v is taken as it is stored",
         "values", lambda self, q, k, v: np.ones_like(v)),
        ("IgnoresQ", "q_descale is ignored: q is taken as it is stored",
         "scores", lambda self, q, k, v: k),
        ("KForV", "v is multiplied by k_descale, must be by v_descale",
         "values", lambda self, q, k, v: k),
        ("VForK", "k is multiplied by v_descale, must be by k_descale",
         "scores", lambda self, q, k, v: q * v),
        ("TwiceK", "k is multiplied by k_descale twice",
         "scores", lambda self, q, k, v: q * k * k),
        ("DividesV", "v is divided by v_descale, must be multiplied",
         "values", lambda self, q, k, v: 1 / v),
        ("FirstHead", "v_descale of the first head is taken for all",
         "values", lambda self, q, k, v: np.broadcast_to(v[:, :1], v.shape)),
        ("FirstSample", "k_descale of the first sample is taken for all",
         "scores", lambda self, q, k, v: q * np.broadcast_to(k[:1], k.shape)),
        ("OtherHeads",
         "query head h is given the factors of key head h % K, must be h // (H / K)",
         "heads", lambda self, x, G: np.tile(x, (1, G))),
    )
)  # fmt: skip
"""Each with the cause that a report must name."""
IgnoresV = WRONG[0]


def int8_cache(q, k, v, scale=None, causal=False, k_scale=1.0, v_scale=1.0):
    """Attend to keys and values of a cache in int8, a factor for each as a whole."""
    assert k.dtype == v.dtype == np.int8
    assert isinstance(k_scale, float)
    ones = np.ones(q.shape[:2], F)
    scores, values = F(k_scale) * ones, F(v_scale) * ones
    return attend(q, k, v, scores, values, q.dtype, scale=scale, causal=causal)


def one_factor(q, k, v, scale=None, causal=False, k_scale=1.0, v_scale=1.0):
    """The same, with the factor of k for v."""
    return int8_cache(q, k, v, scale, causal, k_scale, k_scale)


def blocks(q, k, v, scale=None, causal=False, q_factors=None, k_factors=None):
    """Attend with a factor for 4 rows of q and 8 of k in int8, as SageAttention's kernel has it."""
    assert (q.dtype, k.dtype, v.dtype) == (np.int8, np.int8, np.float16)
    T, S = q.shape[2], k.shape[2]
    rows = np.repeat(q_factors, 4, axis=-1)[..., :T, None].astype(F)
    keys = np.repeat(k_factors, 8, axis=-1)[..., :S, None].astype(F)
    one = np.ones(q.shape[:2], F)
    return attend(q * rows, k * keys, v, one, one, np.float16, scale=scale, causal=causal)


def first_block(q, k, v, scale=None, causal=False, q_factors=None, k_factors=None):
    """The same, with the factor of the first block of keys for all."""
    first = np.broadcast_to(k_factors[..., :1], k_factors.shape)
    return blocks(q, k, v, scale, causal, q_factors, first)


def packed(
    q, k, v, cu_seqlens_q, cu_seqlens_k, causal=False,
    q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    """Attend to packed sequences in float8, factors (B, K)."""
    o = np.zeros((*q.shape[:-1], v.shape[-1]), ml_dtypes.bfloat16)
    for b, (t, s) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_k[:-1], strict=True)):
        own = slice(t, cu_seqlens_q[b + 1]), slice(s, cu_seqlens_k[b + 1])
        one = [x[own[n > 0]].swapaxes(0, 1)[None] for n, x in enumerate((q, k, v))]
        factors = (x[b : b + 1] for x in (q_descale, k_descale, v_descale))
        o[own[0]] = Fp8()(*one, None, causal, *factors)[0].swapaxes(0, 1)
    return o


def packed_first(
    q, k, v, cu_seqlens_q, cu_seqlens_k, causal=False,
    q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    """The same, with the factors of the first sequence for all."""
    first = (np.broadcast_to(x[:1], x.shape) for x in (q_descale, k_descale, v_descale))
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, *first)
