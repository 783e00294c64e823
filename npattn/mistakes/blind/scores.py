"""Mistakes in the scale, the softcap and the bias."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs, within
from npattn.mistakes.blind.float32 import PivotedFloat32, as_float32
from npattn.mistakes.register import change, mistake
from npattn.problem.arrays import Array

SMALLEST = float(np.finfo(np.float32).min)

# --- scores  [1]


change("blind-scale-of-padded-size", "scale",
       "The default scale is computed after D is padded to a multiple of 8.",
       step="s", where="D % 8 ≠ 0",
       default_scale=lambda up, H, D: 1 / math.sqrt(-(-D // 8) * 8 or 1))  # fmt: skip


@mistake("blind-zero-scale-dq", "scale", step="dq", where="scale")
class ZeroScaleDq(Attention):
    """Backward replaces a scale of 0 by the default, in dq only."""

    def dq_scale(self, c: Inputs) -> float:
        return c.scale or self.default_scale(0, c.q.shape[-1])


change("blind-negative-scale-dk", "scale",
       "√|scale| multiplies both q and k, and dk lacks the sign of the scale.",
       step="dk", where="scale",
       dk=lambda up, dx, c, seen: np.asarray(np.sign(c.scale) * up(dx, c, seen)))  # fmt: skip


@mistake("blind-maximum-before-scale", "scale", step="nan", where="scale and contents")
class MaximumBeforeScale(PivotedFloat32):
    """The row maximum is that of the unscaled scores: the minimum if the scale is negative."""

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        if c.scale >= 0:
            return super().pivot(s, c, live)
        low = np.where(live, s, np.inf).min(-1, keepdims=True, initial=np.inf)
        return np.maximum(np.where(low == np.inf, -np.inf, low), c.sinks)


@mistake(
    "blind-packed-decode", "heads", step="visible", where="T = 1 and G > 1 and causal or window"
)
class PackedDecode(Attention):
    """For one query, heads that share keys are packed as queries, each at its own position."""

    def visible(self, c: Inputs) -> Array:
        H, K = c.q.shape[-3], c.k.shape[-3]
        if c.q.shape[-2] != 1 or K in (0, H):
            return super().visible(c)
        S, G = c.k.shape[-2], H // K
        at = (np.arange(H) % G + S - G)[:, None, None]
        inside = within(np.arange(S) - at, self.sides(c))
        return inside if c.mask is None else inside & self.mask(c.mask, c)


# --- softcap  [2]


@mistake("blind-cap-slope-with-bias", "softcap", step="ds", where="softcap and bias")
class CapSlopeWithBias(Attention):
    """The derivative of the softcap is computed from the final scores, bias included."""

    def cap_slope(self, c: Inputs) -> Any:
        if c.softcap is None:
            return 1.0
        return 1 - ((self.cap(self.product(c), c) + self.bias(c)) / c.softcap) ** 2


change("blind-cap-slope-without-scale", "softcap",
       "The derivative of the softcap is evaluated at q·k instead of scale · q·k.",
       step="ds", where="softcap", cap_slope=lambda up, c: up(c._replace(scale=1.0)))  # fmt: skip


@mistake("blind-cap-slope-by-exp", "softcap", step="nan", where="softcap and contents")
class CapSlopeByExp(Attention):
    """The derivative of the softcap is 4e / (e + 1)², e = exp(2s/c): NaN if e overflows."""

    def cap_slope(self, c: Inputs) -> Any:
        if c.softcap is None:
            return 1.0
        e = as_float32(np.exp(2 * self.product(c) / c.softcap))
        return 4 * e / (e + 1) ** 2


@mistake("blind-sink-capped", "softcap", step="p", where="softcap and sinks")
class SinkCapped(Attention):
    """The softcap caps the sinks too."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        if c.softcap is None:
            return c
        capped = c.softcap * np.tanh(c.sinks / c.softcap)
        return c._replace(sinks=np.where(np.isfinite(c.sinks), capped, c.sinks))


# --- bias  [4]


@mistake("blind-bias-far-below-hides", "bias", step="visible", where="contents")
class BiasFarBelowHides(Attention):
    """A score below −1e30 is treated as hidden, though it is finite."""

    def scores(self, c: Inputs) -> tuple[Array, Array]:
        s, live = super().scores(c)
        far = s < -1e30
        return np.where(far, -np.inf, s), live & ~far


change("blind-bias-minus-inf-clamped", "bias",
       "A bias of −inf is clamped to the least float: rows of only −inf give the mean, not 0.",
       step="p", where="rows that see no key and bias",
       bias=lambda up, c: np.maximum(c.bias, SMALLEST))  # fmt: skip


@mistake("blind-dbias-after-cap", "bias", step="dbias", where="bias and softcap")
class DbiasAfterCap(Attention):
    """dbias is taken after the derivative of the softcap, as dq and dk are."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, ds, ds_sink = super().gradients(c, do, dlse, dw)
        return dq, dk, dv, ds * self.cap_slope(c), ds_sink


change("blind-dbias-of-row-constant", "bias",
       "A bias that is constant along the keys gets no gradient, though lse depends on it.",
       step="dbias", where="bias", reduce_bias=lambda up, ds, shape:
           np.zeros(shape) if shape[-1] == 1 else up(ds, shape))  # fmt: skip
