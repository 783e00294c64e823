"""Mistakes in the scale, the softcap and the bias."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.masks import samples_as_heads
from npattn.mistakes.register import after, change, mistake, one_for_all, one_result, option
from npattn.mistakes.softmax import PivotedFloat32, as_float32
from npattn.problem.arrays import Array

SMALLEST = float(np.finfo(np.float32).min)


def default_scale(n: int) -> float:
    """Return 1/√n."""
    return 1 / math.sqrt(n or 1)


change("scale-of-all-heads", "scale", "The default scale is 1/√(H·D) instead of 1/√D.",
       "karpathy/ng-video-lecture#6", step="s", where="H > 1",
       default_scale=lambda up, H, D: default_scale(H * D))  # fmt: skip
change("scale-of-number-of-heads", "scale", "The default scale is 1/√H instead of 1/√D.",
       "tenstorrent/tt-metal#56789", step="s", where="D ≠ H",
       default_scale=lambda up, H, D: default_scale(H))  # fmt: skip
change("scale-of-padded-size", "scale", "The default scale uses D rounded up to a multiple of 8.",
       "intel/ipex-llm#12619", step="s", where="D % 8 ≠ 0",
       default_scale=lambda up, H, D: default_scale(-(-D // 8) * 8))  # fmt: skip


def with_scale_of(size: Callable[[Array, Array], int]) -> Callable[..., Inputs]:
    """Return a step in place of `inputs` whose default scale is 1/√n with the n of k and v."""

    def step(
        up: Callable[..., Inputs], q: Array, k: Array, v: Array, *mask: Any, **options: Any
    ) -> Inputs:
        if options.get("scale") is None:
            options["scale"] = default_scale(size(k, v))
        return up(q, k, v, *mask, **options)

    return step


change("scale-of-values", "scale", "The default scale is 1/√E instead of 1/√D.", step="s",
       where="D ≠ E", inputs=with_scale_of(lambda k, v: v.shape[-1]))  # fmt: skip
change("scale-of-number-of-keys", "scale", "The default scale is 1/√S instead of 1/√D.", step="s",
       where="D ≠ S", inputs=with_scale_of(lambda k, v: k.shape[-2]))  # fmt: skip
change("scale-one", "scale", "The default scale is 1 instead of 1/√D.", step="s", where="D > 1",
       default_scale=lambda up, H, D: 1.0)  # fmt: skip
change("scale-without-root", "scale", "The default scale is 1/D instead of 1/√D.", step="s",
       where="D > 1", default_scale=lambda up, H, D: 1 / (D or 1))  # fmt: skip
change("scale-twice", "scale", "The scale is applied twice: to q and to the scores.",
       "huggingface/transformers#38290", step="s", where="everywhere",
       product=lambda up, c: np.asarray(c.scale * up(c)))  # fmt: skip


def with_default_scale(c: Inputs) -> Inputs:
    """Return inputs with the default scale."""
    return c._replace(scale=default_scale(c.q.shape[-1]))


change("scale-ignored", "scale", "The scale argument is ignored: the default 1/√D is always used.",
       "pytorch/pytorch#174049", step="s", where="scale",
       inputs=after(with_default_scale))  # fmt: skip
change("scale-zero-is-none", "scale", "A scale of 0 is treated as not given.", step="s",
       where="scale", inputs=option("scale", lambda scale: scale or None))  # fmt: skip
change("scale-divides", "scale",
       "The scores are divided by the scale argument instead of multiplied.",
       step="s", where="scale",
       inputs=option("scale", lambda scale: float(np.divide(1.0, scale))))  # fmt: skip
change("scale-ignored-with-softcap", "scale",
       "The scale argument is ignored if there is a softcap.", step="s", where="scale and softcap",
       product=lambda up, c: up(c if c.softcap is None else with_default_scale(c)))  # fmt: skip
change("scale-ignored-in-backward", "scale",
       "Backward ignores the scale argument and uses 1/√D.", step="s", where="backward: scale",
       recompute=after(with_default_scale))  # fmt: skip
change("scale-sign-lost", "scale", "A negative scale is taken as positive.", step="s",
       where="scale", inputs=after(lambda c: c._replace(scale=abs(c.scale))))  # fmt: skip
change("scale-zero-in-dq", "scale", "Backward replaces a scale of 0 by the default, in dq only.",
       step="dq", where="scale",
       dq_scale=lambda up, c: up(c if c.scale else with_default_scale(c)))  # fmt: skip
change("scale-sign-lost-in-dk", "scale",
       "√|scale| multiplies both q and k, and dk lacks the sign of the scale.",
       step="dk", where="scale",
       dk=lambda up, dx, c, seen: np.asarray(np.sign(c.scale) * up(dx, c, seen)))  # fmt: skip


@mistake("maximum-before-scale", "scale", step="nan", where="scale and contents")
class _MaximumBeforeScale(PivotedFloat32):
    """The row maximum is found before the scale, so that a negative scale makes it the minimum."""

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        if c.scale >= 0:
            return super().pivot(s, c, live)
        low = np.where(live, s, np.inf).min(-1, keepdims=True, initial=np.inf)
        return np.maximum(np.where(low == np.inf, -np.inf, low), c.sinks)


change("softcap-after-mask", "softcap",
       "The softcap is applied after the mask: hidden scores become −c and keep weight.",
       "ggml-org/llama.cpp#29034", step="visible", where="hidden keys and softcap",
       final=lambda up, x, visible, c:
           up(np.where(visible, x, -np.inf), np.asarray(True), c))  # fmt: skip
change("softcap-over-bias", "softcap",
       "The softcap is applied to score + bias instead of the score alone.",
       "emmtrix/emx-onnx-cgen#731", step="s", where="softcap and bias",
       final=lambda up, x, visible, c:
           up(x + c.bias, visible, c._replace(bias=0.0)))  # fmt: skip
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
change("softcap-ignored", "softcap", "The softcap is ignored.", step="s", where="softcap",
       inputs=after(lambda c: c._replace(softcap=None)))  # fmt: skip
change("sink-capped", "sinks", "The softcap is also applied to the sinks.", step="p",
       where="softcap and sinks",
       inputs=after(lambda c: c if c.softcap is None else c._replace(sinks=np.where(
           c.sinks == -np.inf, c.sinks, c.softcap * np.tanh(c.sinks / c.softcap)))))  # fmt: skip
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


@mistake("softcap-slope-of-hidden", "softcap", "openxla/tokamax#1121", step="nan",
         where="hidden keys and softcap")  # fmt: skip
class _SoftcapSlopeOfHidden(Attention):
    """The derivative of the softcap is −inf at hidden scores, and 0 · inf is NaN."""

    def uncap(self, ds: Array, live: Array, c: Inputs) -> Array:
        slope = np.where(self.visible(c), self.cap_slope(c), -np.inf)
        return super().uncap(ds, live, c) if c.softcap is None else ds * slope


change("softcap-slope-without-scale", "softcap",
       "The derivative of the softcap is evaluated at q·k instead of scale · q·k.",
       step="ds", where="softcap", cap_slope=lambda up, c: up(c._replace(scale=1.0)))  # fmt: skip


@mistake("softcap-slope-by-exp", "softcap", step="nan", where="softcap and contents")
class _CapSlopeByExp(Attention):
    """The derivative of the softcap is 4e / (e + 1)², e = exp(2s/c): NaN if e overflows."""

    def cap_slope(self, c: Inputs) -> Any:
        if c.softcap is None:
            return 1.0
        e = as_float32(np.exp(2 * self.product(c) / c.softcap))
        return 4 * e / (e + 1) ** 2


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
change("bias-of-last-query", "bias", "The bias of the last query is used for all queries.",
       "Dao-AILab/flash-attention#540", step="s", where="t < T − 1 and bias",
       bias=after(one_for_all(-2, -1)))  # fmt: skip
change("bias-of-first-head", "bias", "The bias of the first head is used for all heads.", step="s",
       where="h ≥ 1 and bias", bias=after(one_for_all(-3)))  # fmt: skip
change("bias-of-first-sample", "bias", "The bias of the first sample is used for all samples.",
       step="s", where="b ≥ 1 and bias", bias=after(one_for_all(-4)))  # fmt: skip
change("bias-transposed", "bias", "A square bias is read with its query and key axes swapped.",
       step="s", where="T = S and bias",
       bias=after(lambda x: x.swapaxes(-1, -2)
           if np.ndim(x) and x.shape[-1] == x.shape[-2] else x))  # fmt: skip
change("bias-ignored", "bias", "The bias is ignored.", step="s", where="bias",
       bias=lambda up, c: 0.0)  # fmt: skip
change("bias-samples-as-heads", "bias", "A bias (B, 1, T, S) is read as (1, B, T, S) if B = H.",
       step="s", where="b ≠ h and B = H and bias",
       bias=lambda up, c: samples_as_heads(np.asarray(c.bias), c))  # fmt: skip
change("bias-ignored-in-backward", "bias", "Backward rebuilds the scores without the bias.",
       step="s", where="backward: bias", recompute=lambda up, c: c._replace(bias=0.0))  # fmt: skip
change("dbias-scaled", "bias", "dbias is multiplied by the scale.", step="dbias", where="bias",
       gradients=one_result(3, lambda ds, c, do, dlse, dw: c.scale * ds))  # fmt: skip
change("dbias-averaged", "bias", "dbias is averaged over the axes that broadcast, not summed.",
       step="dbias", where="bias",
       reduce_bias=lambda up, ds, shape:
           up(ds, shape) * (math.prod(shape) / max(ds.size, 1)))  # fmt: skip


@mistake("dbias-behind-softcap", "bias", step="dbias", where="bias and softcap")
class _DbiasBehindSoftcap(Attention):
    """dbias is multiplied by the derivative of the softcap."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, ds, ds_sink = super().gradients(c, do, dlse, dw)
        return dq, dk, dv, ds * self.cap_slope(c), ds_sink


change("dbias-of-all-samples", "bias",
       "dbias of each batch entry is the sum over the whole batch.", step="dbias",
       where="B > 1 and bias",
       reduce_bias=lambda up, ds, shape: np.broadcast_to(
           up(ds, (*shape[:-4], 1, *shape[-3:]) if len(shape) > 3 else shape), shape))  # fmt: skip
change("bias-far-below-hides", "bias",
       "A score below −1e30 is treated as hidden, though it is finite.", step="visible",
       where="contents",
       scores=after(lambda x:
           (np.where(x[0] < -1e30, -np.inf, x[0]), x[1] & ~(x[0] < -1e30))))  # fmt: skip
change("bias-minus-inf-clamped", "bias",
       "A bias of −inf is clamped to the least float: rows of only −inf give the mean, not 0.",
       step="p", where="rows that see no key and bias",
       bias=lambda up, c: np.maximum(c.bias, SMALLEST))  # fmt: skip
change("dbias-of-row-constant", "bias",
       "A bias that is constant along the keys gets no gradient, though lse depends on it.",
       step="dbias", where="bias", reduce_bias=lambda up, ds, shape:
           np.zeros(shape) if shape[-1] == 1 else up(ds, shape))  # fmt: skip


# --- options that the path with weights leaves out ---

for _option, _step, _without in (
    ("mask", "visible", {"mask": None}),
    ("window", "visible", {"window": None}),
    ("bias", "s", {"bias": 0.0}),
    ("softcap", "s", {"softcap": None}),
    ("sinks", "p", {"sinks": np.full((1, 1, 1), -np.inf)}),
    ("dropout", "p", {"keep": 1.0}),
):
    change(f"{_option}-ignored-with-weights", _option,
           f"The {_option} {'are' if _option == 'sinks' else 'is'} ignored if the weights are "
           "requested.", step=_step, where=f"{_option} and weights",
           results=lambda up, c, without=_without:
               up(c._replace(**without) if c.returns_weights else c))  # fmt: skip
