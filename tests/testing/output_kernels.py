"""Kernels that return o in 8 bits, or take factors of tokens, right and wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.make import make_changed
from tests.testing.quantized_kernels import E4M3, F, attend

TOP = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def store(x, dtype):
    """Round to the nearest number of a format of 8 bits, and saturate."""
    top = TOP[np.dtype(dtype).name]
    bounded = np.clip(x, -top, top)
    return (np.rint(bounded) if np.dtype(dtype) == np.int8 else bounded).astype(dtype)


def cut(x, dtype):
    """Cut off instead of rounding: toward zero."""
    stored = store(x, dtype)
    if np.dtype(dtype) == np.int8:
        return np.trunc(np.clip(x, -127, 127)).astype(dtype)
    away = abs(stored.astype(F)) > abs(x)
    bits = stored.view(np.uint8)
    return np.where(away, bits - 1, bits).view(dtype)  # the next number nearer to 0


def wrap(x, dtype):
    """Store without saturation: what is beyond int8 wraps, beyond float8_e4m3fn is NaN."""
    if np.dtype(dtype) == np.int8:
        whole = np.rint(np.where(np.isfinite(x), x, 0)).astype(np.int64)
        return whole.astype(np.int8)
    return x.astype(dtype)


class Output:
    """float8 in and out: vLLM's kernel with its ``output_scale``, by which o is divided."""

    dtype = E4M3
    P, weights = 256, E4M3

    def __call__(
        self, q, k, v, scale=None, causal=False,
        q_scale=1.0, k_scale=1.0, v_scale=1.0, output_scale=1.0,
    ):  # fmt: skip
        ones = np.ones(q.shape[:2], F)
        scores, values = F(q_scale) * F(k_scale) * ones, F(v_scale) * ones
        options = {"scale": scale, "causal": causal, "P": self.P, "weights": self.weights}
        o = attend(q, k, v, scores, values, F, **options)
        return self.finish(o, F(output_scale), F(v_scale))

    def finish(self, o, factor, other):
        return store(o / factor, self.dtype)


OutputInInt8 = make_changed(Output, "OutputInInt8", dtype=np.int8, P=1.0, weights=None)
OutputInE5M2 = make_changed(Output, "OutputInE5M2", dtype=ml_dtypes.float8_e5m2)


class ByReciprocal(Output):
    """Another right one: o times a rounded reciprocal, stored in bfloat16 before."""

    def finish(self, o, factor, other):
        own = o.astype(ml_dtypes.bfloat16).astype(F)
        return store(own * (F(1) / factor), self.dtype)


class PlainOutput(Output):
    """q, k and v as they are, and o in float8."""

    def __call__(self, q, k, v, scale=None, causal=False, output_scale=1.0):
        return self.finish(plain(q, k, v, scale, causal), F(output_scale), None)


def plain(q, k, v, scale, causal):
    """Return o in float32 of q, k and v as they are."""
    one = np.ones(q.shape[:2], F)
    return attend(q, k, v, one, one, F, scale=scale, causal=causal)


IGNORED = "output_scale is ignored: o is stored as it is computed"
CUT_OFF = "o is cut off toward 0 when it is stored, must be rounded to nearest"
BEYOND = "o is not saturated: beyond ±{0} it must be ±{0}"
WRONG = tuple(
    make_changed(base, name, cause, finish=finish)
    for name, base, cause, finish in (
        ("Forgets", Output, IGNORED, lambda self, o, factor, other: store(o, self.dtype)),
        ("Multiplies", Output, "o is multiplied by output_scale, must be divided",
         lambda self, o, factor, other: store(o * factor, self.dtype)),
        ("OfV", Output, "o is divided by v_scale, must be by output_scale",
         lambda self, o, factor, other: store(o / other, self.dtype)),
        ("Cuts", PlainOutput, CUT_OFF,
         lambda self, o, factor, other: cut(o / factor, self.dtype)),
        ("Wraps", Output, BEYOND.format(448),
         lambda self, o, factor, other: wrap(o / factor, self.dtype)),
        ("ForgetsInInt8", OutputInInt8, IGNORED,
         lambda self, o, factor, other: store(o, self.dtype)),
        ("CutsInInt8", OutputInInt8, CUT_OFF,
         lambda self, o, factor, other: cut(o / factor, self.dtype)),
        ("WrapsInInt8", OutputInInt8, BEYOND.format(127),
         lambda self, o, factor, other: wrap(o / factor, self.dtype)),
    )
)  # fmt: skip
"""Each with the cause that a report must name."""
Forgets = WRONG[0]


def cudnn(q, k, v, attn_scale=None, causal=False, scale_o=1.0):
    """Multiply o by ``scale_o``, as cuDNN does; q, k and v are as they are."""
    o = plain(q, k, v, attn_scale, causal)
    return store(o * F(scale_o), E4M3)


def cudnn_divides(q, k, v, attn_scale=None, causal=False, scale_o=1.0):
    """The same, but divided."""
    o = plain(q, k, v, attn_scale, causal)
    return store(o / F(scale_o), E4M3)


def of_heads(q, k, v, scale=None, causal=False, o_factors=None, o_step=None):
    """Divide o by a factor for each sample and head."""
    o = plain(q, k, v, scale, causal)
    return store(o / o_factors[..., None, None], E4M3)


def of_first_head(q, k, v, scale=None, causal=False, o_factors=None):
    """The same, with the factor of the first head for all."""
    first = np.broadcast_to(o_factors[:, :1], o_factors.shape)
    return of_heads(q, k, v, scale, causal, first)


def of_rows(q, k, v, scale=None, causal=False, o_factors=None):
    """Divide o by a factor for each token of each head."""
    o = plain(q, k, v, scale, causal)
    return store(o / o_factors[..., None], np.int8)


def of_first_row(q, k, v, scale=None, causal=False, o_factors=None):
    """The same, with the factor of the first token for all."""
    first = np.broadcast_to(o_factors[..., :1], o_factors.shape)
    return of_rows(q, k, v, scale, causal, first)


def of_blocks(q, k, v, scale=None, causal=False, o_factors=None):
    """Divide o by a factor for every 4 rows of each head."""
    o = plain(q, k, v, scale, causal)
    return store(o / np.repeat(o_factors, 4, -1)[..., : q.shape[2], None], np.int8)


# --- factors of tokens ---


class Tokens:
    """int8 keys and values of a cache, with a factor for each token of each key head."""

    def __call__(self, q, k, v, scale=None, causal=False, k_scales=None, v_scales=None):
        assert k.dtype == v.dtype == np.int8
        one = np.ones(q.shape[:2], F)
        of_k, of_v = self.factors(k_scales, v_scales)
        keys, values = k * of_k[..., None], v * of_v[..., None]
        return attend(q, keys, values, one, one, q.dtype, scale=scale, causal=causal)

    def factors(self, k, v):
        return k, v


WRONG_TOKENS = tuple(
    make_changed(Tokens, name, cause, factors=factors)
    for name, cause, factors in (
        ("TokenOfNeighbour", "k_scales of the token before is taken",
         lambda self, k, v: (np.roll(k, 1, -1), v)),
        ("VTokensForK", "k is multiplied by v_scales, must be by k_scales",
         lambda self, k, v: (v, v)),
        ("FirstToken", "v_scales of the first token is taken for all",
         lambda self, k, v: (k, np.broadcast_to(v[..., :1], v.shape))),
        ("IgnoresTokens", "v_scales is ignored: v is taken as it is stored",
         lambda self, k, v: (k, np.ones_like(v))),
        ("TokensOfFirstHead", "k_scales of the first head is taken for all",
         lambda self, k, v: (np.broadcast_to(k[:, :1], k.shape), v)),
    )
)  # fmt: skip


def paged(q, k_pages, v_pages, lengths, block_tables, scale=None, k_scales=None, v_scales=None):
    """Attend one query of each sequence to int8 pages, as the Pallas kernel for GPUs does."""
    o = np.zeros((*q.shape[:-1], v_pages.shape[-1]), q.dtype)
    for b, length in enumerate(lengths):
        own = block_tables[b]
        k, v, of_k, of_v = (
            x[own].reshape(-1, *x.shape[2:])[:length]
            for x in (k_pages, v_pages, k_scales, v_scales)
        )
        keys, values = (x.swapaxes(0, 1)[None] for x in (k * of_k[..., None], v * of_v[..., None]))
        one = np.ones((1, q.shape[2]), F)
        rows = q[b : b + 1].swapaxes(1, 2)
        found = attend(rows, keys, values, one, one, q.dtype, scale=scale, causal=False)
        o[b : b + 1] = found.swapaxes(1, 2)
    return o


def paged_of_slot(q, k_pages, v_pages, lengths, block_tables, scale=None, k_scales=None,
                  v_scales=None):  # fmt: skip
    """The same, with the factors of the first page for every page."""
    first = (np.broadcast_to(x[:1], x.shape) for x in (k_scales, v_scales))
    return paged(q, k_pages, v_pages, lengths, block_tables, scale, *first)
