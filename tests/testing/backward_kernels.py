"""Kernels of 8 bits with a backward: gradients of q, k and v as they are meant."""

from __future__ import annotations

import numpy as np

from tests.make import make_changed
from tests.testing.output_kernels import store
from tests.testing.quantized_kernels import E4M3, F, Fp8, attend


def gradients(dout, q, k, v, out, scale, causal):
    """Return dq, dk and dv of float32 arrays whose heads are not shared; D is from out."""
    T, S = q.shape[2], k.shape[2]
    scale = F(1 / np.sqrt(max(q.shape[3], 1)) if scale is None else scale)
    s = scale * q @ k.swapaxes(-1, -2)
    hidden = np.arange(S) > np.arange(T)[:, None] + S - T if causal else np.zeros((T, S), bool)
    s = np.where(hidden, -np.inf, s)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(top), 0, top))
    p = p / np.where(p.sum(-1, keepdims=True) == 0, 1, p.sum(-1, keepdims=True))
    dp = np.where(hidden, 0, dout @ v.swapaxes(-1, -2))
    ds = p * (dp - (dout * out).sum(-1, keepdims=True))
    ds = np.where(hidden, 0, ds)
    dv = p.swapaxes(-1, -2) @ dout
    return scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, dv


def fold(x, like):
    """Sum the heads that share a key head, and the samples that share keys."""
    (B, H), K = x.shape[:2], like.shape[1]
    summed = x.reshape(B, K, H // K if K else 0, *x.shape[2:]).sum(2)
    return summed.sum(0, keepdims=True) if like.shape[0] < B else summed


class Backward:
    """Backward of FlashAttention 3's forward in float8: factors (B, K), gradients in 16 bits."""

    def __call__(
        self, dout, q, k, v, *, out, softmax_scale=None, causal=False,
        q_descale=None, k_descale=None, v_descale=None,
    ):  # fmt: skip
        assert q.dtype == k.dtype == v.dtype == E4M3
        G = q.shape[1] // max(k.shape[1], 1)
        own = self.factors(q_descale, k_descale, v_descale)
        of_q, of_k, of_v = (np.repeat(x, G, 1)[..., None, None] for x in own)
        wide = (q.astype(F) * of_q, *(np.repeat(x.astype(F), G, 1) for x in (k, v)))
        wide = (wide[0], wide[1] * of_k, wide[2] * of_v)
        dq, dk, dv = gradients(dout.astype(F), *wide, out.astype(F), softmax_scale, causal)
        dq, dk, dv = self.finish(dq, dk, dv, of_q, of_k, of_v)
        return tuple(x.astype(dout.dtype) for x in (dq, fold(dk, k), fold(dv, v)))

    def factors(self, q, k, v):
        return q, k, v

    def finish(self, dq, dk, dv, q, k, v):
        return dq, dk, dv


# Gradients of the numbers of 8 bits are k_descale times those that are asked.
WRONG = tuple(
    make_changed(Backward, name, cause, **{step: f})
    for name, cause, step, f in (
        ("OfStored", "dk is multiplied by k_descale: it is that of k as it is stored",
         "finish", lambda self, dq, dk, dv, q, k, v: (dq, dk * k, dv)),
        ("OfStoredQ", "dq is multiplied by q_descale: it is that of q as it is stored",
         "finish", lambda self, dq, dk, dv, q, k, v: (dq * q, dk, dv)),
        ("Divided", "dv is divided by v_descale",
         "finish", lambda self, dq, dk, dv, q, k, v: (dq, dk, dv / v)),
        ("KForV", None, "factors", lambda self, q, k, v: (q, k, k)),  # where the forward is right
        ("IgnoresQ", None, "factors", lambda self, q, k, v: (np.ones_like(q), k, v)),
    )
)  # fmt: skip
"""Each with the cause that a report must name, if there is one."""
FORWARD = Fp8()


def forward_in_8_bits(
    q, k, v, scale=None, causal=False, q_scale=1.0, k_scale=1.0, v_scale=1.0, o_scale=1.0
):
    """o in float8 too, as TransformerEngine keeps it for its backward."""
    ones = np.ones(q.shape[:2], F)
    scores, values = F(q_scale) * F(k_scale) * ones, F(v_scale) * ones
    o = attend(q, k, v, scores, values, F, scale=scale, causal=causal, P=256, weights=E4M3)
    return store(o / F(o_scale), E4M3)


def backward_of_8_bits(
    dout, q, k, v, *, out, scale=None, causal=False,
    q_scale=1.0, k_scale=1.0, v_scale=1.0, o_scale=1.0,
):  # fmt: skip
    """D is from o in float8, times its factor."""
    assert out.dtype == E4M3
    G = q.shape[1] // max(k.shape[1], 1)
    wide = (q.astype(F) * F(q_scale), *(np.repeat(x.astype(F), G, 1) for x in (k, v)))
    wide = (wide[0], wide[1] * F(k_scale), wide[2] * F(v_scale))
    out = out.astype(F) * F(o_scale)
    dq, dk, dv = gradients(dout.astype(F), *wide, out, scale, causal)
    return tuple(x.astype(dout.dtype) for x in (dq, fold(dk, k), fold(dv, v)))


def backward_without_factor_of_o(
    dout, q, k, v, *, out, scale=None, causal=False, q_scale=1.0, k_scale=1.0, v_scale=1.0
):
    """The same, but D is from o as it is stored."""
    own = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    return backward_of_8_bits(dout, q, k, v, out=out, scale=scale, causal=causal, **own)
