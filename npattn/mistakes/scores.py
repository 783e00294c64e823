"""Mistakes in the scale, the softcap and the bias."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import change, mistake, one_result
from npattn.problem.arrays import Array, sum_to

# --- scale ---


change("scale-of-all-heads", "scale", "The default scale is 1/√(H·D) instead of 1/√D.",
       "karpathy/ng-video-lecture#6", step="s", where="H > 1",
       default_scale=lambda up, H, D: 1 / math.sqrt(H * D or 1))  # fmt: skip
change("scale-of-number-of-heads", "scale", "The default scale is 1/√H instead of 1/√D.",
       "tenstorrent/tt-metal#56789", step="s", where="D ≠ H",
       default_scale=lambda up, H, D: 1 / math.sqrt(H or 1))  # fmt: skip
change("scale-of-padded-size", "scale", "The default scale uses D rounded up to a multiple of 8.",
       "intel/ipex-llm#12619", step="s", where="D % 8 ≠ 0",
       default_scale=lambda up, H, D: 1 / math.sqrt(-(-D // 8) * 8 or 1))  # fmt: skip


@mistake("scale-of-values", "scale", step="s", where="D ≠ E")
class _ScaleOfValues(Attention):
    """The default scale is 1/√E instead of 1/√D."""

    def inputs(self, q: Array, k: Array, v: Array, *mask: Any, **options: Any) -> Inputs:
        if options.get("scale") is None:
            options["scale"] = 1 / math.sqrt(v.shape[-1] or 1)
        return super().inputs(q, k, v, *mask, **options)


change("scale-one", "scale", "The default scale is 1 instead of 1/√D.", step="s", where="D > 1",
       default_scale=lambda up, H, D: 1.0)  # fmt: skip
change("scale-twice", "scale", "The scale is applied twice: to q and to the scores.",
       "huggingface/transformers#38290", step="s", where="everywhere",
       product=lambda up, c: np.asarray(c.scale * up(c)))  # fmt: skip


@mistake("scale-ignored", "scale", "pytorch/pytorch#174049", step="s", where="scale")
class _ScaleIgnored(Attention):
    """The scale argument is ignored: the default 1/√D is always used."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        return c._replace(scale=self.default_scale(c.q.shape[-3], c.q.shape[-1]))


@mistake("scale-zero-is-none", "scale", step="s", where="scale")
class _ScaleZeroIsNone(Attention):
    """A scale of 0 is treated as not given."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        options["scale"] = options.get("scale") or None
        return super().inputs(*arrays, **options)


@mistake("scale-divides", "scale", step="s", where="scale")
class _ScaleDivides(Attention):
    """The scores are divided by the scale argument instead of multiplied."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        if options.get("scale") is not None:
            options["scale"] = float(np.divide(1.0, options["scale"]))
        return super().inputs(*arrays, **options)


@mistake("scale-ignored-with-softcap", "scale", step="s", where="scale and softcap")
class _ScaleIgnoredWithSoftcap(Attention):
    """The scale argument is ignored if there is a softcap."""

    def product(self, c: Inputs) -> Array:
        default = self.default_scale(c.q.shape[-3], c.q.shape[-1])
        return super().product(c if c.softcap is None else c._replace(scale=default))


@mistake("maximum-before-scale", "scale", step="nan", where="scale and contents")
class _MaximumBeforeScale(Attention):
    """The row maximum is found before the scale, so that a negative scale makes it the minimum."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        least = np.where(live, s, np.inf).min(-1, keepdims=True, initial=np.inf)
        wide = np.float64 if c.dtype == np.float64 else np.float32
        total = np.exp((lse - np.maximum(least, c.sinks)).astype(wide))
        lost = (total == np.inf) & (c.scale < 0)
        return np.where(lost & live, np.nan, p), p_sink, np.where(lost, np.inf, lse)


@mistake("scale-ignored-in-backward", "scale", step="s", where="backward: scale")
class _ScaleIgnoredInBackward(Attention):
    """Backward ignores the scale argument and uses 1/√D."""

    def recompute(self, c: Inputs) -> Inputs:
        return c._replace(scale=self.default_scale(c.q.shape[-3], c.q.shape[-1]))


# --- softcap ---


@mistake(
    "softcap-after-mask",
    "softcap",
    "ggml-org/llama.cpp#29034",
    step="visible",
    where="hidden keys and softcap",
)
class _SoftcapAfterMask(Attention):
    """The softcap is applied after the mask: hidden scores become −c and keep weight."""

    def final(self, x: Array, visible: Array, c: Inputs) -> Array:
        return self.cap(self.hide(x + c.bias, visible), c)


@mistake(
    "softcap-over-bias", "softcap", "emmtrix/emx-onnx-cgen#731", step="s", where="softcap and bias"
)
class _SoftcapOverBias(Attention):
    """The softcap is applied to score + bias instead of the score alone."""

    def final(self, x: Array, visible: Array, c: Inputs) -> Array:
        return self.hide(self.cap(x + c.bias, c), visible)


change("softcap-before-scale", "softcap", "The softcap is applied to q kᵀ before the scale.",
       step="s", where="softcap",
       product=lambda up, c: up(c if c.softcap is None else c._replace(scale=1.0)),
       cap=lambda up, x, c: x if c.softcap is None else c.scale * up(x, c))  # fmt: skip
change("softcap-not-multiplied", "softcap",
       "The softcap computes tanh(s/c) without multiplying by c.", step="s", where="softcap",
       cap=lambda up, x, c: x if c.softcap is None else up(x, c) / c.softcap)  # fmt: skip
change("softcap-clips", "softcap", "The softcap clips scores at ±c instead of c·tanh(s/c).",
       step="s", where="softcap", cap=lambda up, x, c:
           x if c.softcap is None else np.clip(x, -c.softcap, c.softcap))  # fmt: skip


@mistake("sink-capped", "sinks", step="p", where="softcap and sinks")
class _SinkCapped(Attention):
    """The softcap is also applied to the sinks."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        sinks = np.where(c.sinks == -np.inf, c.sinks, self.cap(c.sinks, c))
        return super().softmax(s, c._replace(sinks=sinks), live)


change("softcap-ignored-in-backward", "softcap",
       "Backward rebuilds the scores without the softcap.", step="s", where="backward: softcap",
       recompute=lambda up, c: c._replace(softcap=None))  # fmt: skip
change("softcap-slope-forgotten", "softcap", "Backward ignores the derivative of the softcap.",
       step="ds", where="softcap", cap_slope=lambda up, c: 1.0)  # fmt: skip


@mistake("softcap-slope-of-capped", "softcap", step="ds", where="softcap")
class _SoftcapSlopeOfCapped(Attention):
    """The derivative of the softcap is evaluated at the capped score."""

    def cap_slope(self, c: Inputs) -> Any:
        capped = self.cap(self.product(c), c)
        return 1.0 if c.softcap is None else 1 - np.tanh(capped / c.softcap) ** 2


@mistake("softcap-slope-after-bias", "softcap", step="ds", where="softcap and bias")
class _SoftcapSlopeAfterBias(Attention):
    """The derivative of the softcap is 1 − (s/c)² with the bias included in s."""

    def cap_slope(self, c: Inputs) -> Any:
        s = self.cap(self.product(c), c) + c.bias
        return 1.0 if c.softcap is None else 1 - (s / c.softcap) ** 2


@mistake(
    "softcap-slope-of-hidden",
    "softcap",
    "openxla/tokamax#1121",
    step="nan",
    where="hidden keys and softcap",
)
class _SoftcapSlopeOfHidden(Attention):
    """The derivative of the softcap is −inf at hidden scores, and 0 · inf is NaN."""

    def uncap(self, ds: Array, live: Array, c: Inputs) -> Array:
        slope = np.where(self.visible(c), self.cap_slope(c), -np.inf)
        return super().uncap(ds, live, c) if c.softcap is None else ds * slope


# --- bias ---


change("bias-scaled", "bias", "The bias is multiplied by the scale.", step="s", where="bias",
       bias=lambda up, c: c.scale * c.bias)  # fmt: skip
change("bias-subtracted", "bias",
       "The finite bias has the wrong sign, as with distances in the wrong direction.",
       "meta-pytorch/attention-gym#86", step="s", where="bias",
       bias=lambda up, c: np.where(c.bias == -np.inf, c.bias, -np.asarray(c.bias)))  # fmt: skip
change("bias-ignored-when-causal", "bias", "The bias is ignored if causal is given.",
       "keras-team/keras#22097", step="s", where="bias and causal",
       bias=lambda up, c: 0.0 if c.causal else c.bias)  # fmt: skip
change("bias-minus-inf-lost", "bias", "Entries of −inf in the bias are taken as 0.",
       "pytorch/pytorch#92554", step="visible", where="bias and contents",
       bias=lambda up, c: np.where(c.bias == -np.inf, 0, c.bias))  # fmt: skip


@mistake(
    "bias-of-last-query",
    "bias",
    "Dao-AILab/flash-attention#540",
    step="s",
    where="t < T − 1 and bias",
)
class _BiasOfLastQuery(Attention):
    """The bias of the last query is used for all queries."""

    def bias(self, c: Inputs) -> Array | float:
        bias = np.asarray(c.bias)
        return bias[..., -1:, :] if bias.ndim else c.bias


@mistake("bias-samples-as-heads", "bias", step="s", where="b ≠ h and B = H and bias")
class _BiasSamplesAsHeads(Attention):
    """A bias (B, 1, T, S) is read as (1, B, T, S) if B = H."""

    def bias(self, c: Inputs) -> Array | float:
        bias = np.asarray(c.bias)
        fits = bias.ndim > 3 and bias.shape[-4:-2] == (c.q.shape[-3], 1)
        return bias.swapaxes(-3, -4) if fits else c.bias


change("bias-ignored-in-backward", "bias", "Backward rebuilds the scores without the bias.",
       step="s", where="backward: bias", recompute=lambda up, c: c._replace(bias=0.0))  # fmt: skip
change("dbias-scaled", "bias", "dbias is multiplied by the scale.", step="dbias", where="bias",
       gradients=one_result(3, lambda ds, c, do, dlse, dw: c.scale * ds))  # fmt: skip


@mistake("dbias-behind-softcap", "bias", step="dbias", where="bias and softcap")
class _DbiasBehindSoftcap(Attention):
    """dbias is multiplied by the derivative of the softcap."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, ds, ds_sink = super().gradients(c, do, dlse, dw)
        return dq, dk, dv, ds * self.cap_slope(c), ds_sink


@mistake("dbias-of-all-samples", "bias", step="dbias", where="B > 1 and bias")
class _DbiasOfAllSamples(Attention):
    """dbias of each batch entry is the sum over the whole batch."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        dbias = sum_to(ds, shape)
        own = len(shape) > 3
        return np.broadcast_to(dbias.sum(-4, keepdims=True), shape) if own else dbias
