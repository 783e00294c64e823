"""The zoo: wrong implementations of attention, each a few lines over one that is right.

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
    D query/key size   E value size

`Attention` is the right one, in steps; a mutant overrides one of them. Its forward and backward
are made of the same steps, so that a mistake in a step is a consistent one, as in real code: the
rule that must fail is then the forward's. The judge is proven by them: the rule that a mutant
names in `killed_by` must fail it. Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from npattn.problem import Array, Window, sum_to

__all__ = ["MUTANTS", "Attention", "Mutant", "base", "base_backward"]


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation, and what must find it.

    Attributes
    ----------
    name, family : str
    sentence : str
        What is wrong.
    source : str
        The report of the bug, owner/repository#number, or "inferred".
    killed_by : tuple of str
        Rules of the judge; any of them must fail.
    forward, backward : callable
        An implementation under test, and its gradients.
    """

    name: str
    family: str
    sentence: str
    source: str
    killed_by: tuple[str, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]


MUTANTS: dict[str, Mutant] = {}


class Call(NamedTuple):
    """One call, as the steps see it: float64, with a head axis, defaults filled in."""

    q: Array  # (..., H, T, D) with all leading axes
    k: Array  # (..., K, S, D)
    v: Array  # (..., K, S, E)
    mask: Array | None
    causal: bool
    window: Window | None
    bias: Array | float
    scale: float
    softcap: float | None
    sinks: Array  # (H, 1, 1); no sink is a sink of −inf, which weighs nothing
    keep: Array | float  # dropout: 1 / (1 − rate) where kept, 0 where dropped
    dtype: np.dtype[Any]  # of q


class Attention:
    """Attention and its gradients in float64, rounded once at the end, in replaceable steps."""

    @np.errstate(all="ignore")  # hidden scores may be anything
    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None = None,
        *,
        causal: bool = False,
        window: Window | None = None,
        bias: Array | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        dropout_mask: Array | None = None,
        dropout_rate: float = 0.0,
        return_lse: bool = False,
        return_weights: bool = False,
    ) -> Any:
        """out, with (out, lse), (out, weights) or (out, lse, weights) where they are asked for."""
        arrays = (q, k, v, mask, bias, sinks, dropout_mask)
        call = self.call(arrays, causal, window, scale, softcap, dropout_rate)
        o, lse, p = self.results(call)
        wide = np.result_type(q.dtype, np.float32) if q.dtype.kind == "f" else np.float32
        found = [o.astype(self.out_dtype(q.dtype))]
        found += [lse.astype(wide)] if return_lse else []
        found += [p.astype(wide)] if return_weights else []
        found = [x[0] for x in found] if q.ndim == 2 else found
        return found[0] if len(found) == 1 else tuple(found)

    @np.errstate(all="ignore")
    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        *,
        out: Array,
        lse: Array | None,
        dlse: Array | None = None,
        dweights: Array | None = None,
        mask: Array | None = None,
        causal: bool = False,
        window: Window | None = None,
        bias: Array | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        dropout_mask: Array | None = None,
        dropout_rate: float = 0.0,
    ) -> dict[str, Array]:
        """Gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights, by name of the input."""
        arrays = (q, k, v, mask, bias, sinks, dropout_mask)
        call = self.call(arrays, causal, window, scale, softcap, dropout_rate)
        do = np.asarray(dout, np.float64).reshape(*call.q.shape[:-1], v.shape[-1])
        dl = 0.0 if dlse is None else np.asarray(dlse, np.float64).reshape(*call.q.shape[:-1], 1)
        dw = 0.0 if dweights is None else np.asarray(dweights, np.float64)
        dq, dk, dv, ds, ds_sink = self.gradients(self.recompute(call), do, dl, dw)
        wide = np.result_type(q.dtype, np.float32) if q.dtype.kind == "f" else np.float32
        grads = {"q": sum_to(dq, q.shape).astype(q.dtype)}
        grads["k"] = self.reduce(self.share_back(dk, call.k), k.shape).astype(k.dtype)
        grads["v"] = self.reduce(self.share_back(dv, call.v), v.shape).astype(v.dtype)
        if bias is not None:
            grads["bias"] = self.reduce_bias(ds, bias.shape).astype(wide)
        if sinks is not None:
            grads["sinks"] = sum_to(ds_sink, call.sinks.shape)[:, 0, 0].astype(wide)
        return grads

    # --- what comes in and goes out

    def call(
        self,
        arrays: tuple[Any, ...],
        causal: bool,
        window: Window | None,
        scale: float | None,
        softcap: float | None,
        dropout_rate: float,
    ) -> Call:
        given, mask, bias, sinks, dropout_mask = arrays[:3], *arrays[3:]
        q, k, v = (x if x.ndim > 2 else x[None] for x in map(self.read, given))
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        scale = self.default_scale(q.shape[-3], q.shape[-1]) if scale is None else scale
        sinks = np.full(q.shape[-3], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
        bias = 0.0 if bias is None else np.asarray(bias, np.float64)
        keep = 1.0 if dropout_mask is None else dropout_mask / (1 - dropout_rate)
        q = np.broadcast_to(q, (*lead, *q.shape[-3:]))
        dtype = given[0].dtype
        return Call(
            q, k, v, mask, causal, window, bias, scale, softcap, sinks[:, None, None], keep, dtype
        )

    def read(self, x: Array) -> Array:
        return np.array(x, np.float64)

    def default_scale(self, H: int, D: int) -> float:
        return 1 / math.sqrt(D or 1)

    def out_dtype(self, dtype: np.dtype[Any]) -> Any:
        return dtype

    def share(self, x: Array, H: int) -> Array:
        """(..., K, S, n) → (..., H, S, n): query head h uses key/value head h // (H / K).  [1]"""
        return np.repeat(x, H // max(x.shape[-3], 1), axis=-3)

    def share_back(self, dx: Array, x: Array) -> Array:
        """(..., H, S, n) → (..., K, S, n): the sum over the query heads that share a head.  [13]"""
        *lead, H, S, n = dx.shape
        K = x.shape[-3]
        return np.asarray(dx.reshape(*lead, K, H // max(K, 1), S, n).sum(-3))

    def reduce(self, dx: Array, shape: tuple[int, ...]) -> Array:
        return sum_to(dx, shape)

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        return sum_to(ds, shape)

    # --- forward

    def results(self, c: Call) -> tuple[Array, Array, Array]:
        """out, lse, weights."""
        s, live = self.scores(c)
        p, _, lse = self.softmax(s, c, live)
        o = self.see(p * c.keep, self.share(c.v, c.q.shape[-3]), live)
        return o, lse[..., 0], self.returned_weights(p, c)

    def returned_weights(self, p: Array, c: Call) -> Array:
        return p  # before dropout  [9]

    def product(self, c: Call) -> Array:
        return np.asarray(c.scale * (c.q @ self.share(c.k, c.q.shape[-3]).swapaxes(-1, -2)))

    def scores(self, c: Call) -> tuple[Array, Array]:
        """The final scores, −inf where hidden, and where they take part.  [1-7]"""
        visible = self.visible(c)
        s = self.final(self.product(c), visible, c)
        return s, np.broadcast_to(visible, s.shape) & (s != -np.inf)

    def final(self, x: Array, visible: Array, c: Call) -> Array:
        return self.hide(self.cap(x, c) + c.bias, visible)

    def cap(self, x: Array, c: Call) -> Array:
        return x if c.softcap is None else np.asarray(c.softcap * np.tanh(x / c.softcap))

    def hide(self, s: Array, visible: Array) -> Array:
        return np.where(visible, s, -np.inf)

    def diagonal(self, T: int, S: int) -> Array:
        """The key at which each query stands.  [6]"""
        return np.arange(T)[:, None] + (S - T)

    def sides(self, c: Call) -> Window:
        """How many keys a query sees to its left and right.  [6, 7]"""
        left, right = c.window or (None, None)
        return left, 0 if c.causal else right

    def visible(self, c: Call) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        beside = np.arange(S) - self.diagonal(T, S)  # (T, S)
        left, right = self.sides(c)
        visible = np.ones((T, S), bool) if c.mask is None else c.mask
        visible = visible if left is None else visible & (beside >= -left)
        return visible if right is None else visible & (beside <= right)

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        """p, what the sink takes, lse.  [8, 11]"""
        m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), c.sinks)
        pivot = np.where(m == -np.inf, 0, m)
        e = np.exp(s - pivot)
        e_sink = np.exp(c.sinks - pivot)
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        p = np.where(s == -np.inf, 0, e / safe)  # in a row of a NaN query too: 0 / NaN is NaN
        return p, e_sink / safe, self.lse(pivot, total, e_sink)

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return np.asarray(pivot + np.log(total))

    def see(self, w: Array, x: Array, live: Array) -> Array:
        """w @ x in which x counts only where it is live: 0 · NaN is NaN.  [10]"""
        finite = np.isfinite(x)
        touched = live.astype(np.float64) @ ~finite > 0
        return np.where(touched, np.nan, w @ np.where(finite, x, 0))

    # --- backward

    def recompute(self, c: Call) -> Call:
        """The call of which backward rebuilds the scores."""
        return c

    def gradients(self, c: Call, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        """dq, dk, dv with a head each, the gradient of the scores, and that of the sink."""
        H = c.q.shape[-3]
        k, v = self.share(c.k, H), self.share(c.v, H)
        s, live = self.scores(c)
        seen = live.swapaxes(-1, -2)
        p, p_sink, _ = self.softmax(s, c, live)

        dv = self.see((p * c.keep).swapaxes(-1, -2), do, seen)
        dp = np.where(live, self.undrop(do @ v.swapaxes(-1, -2), c) + dw, 0)
        delta = self.delta(p, dp) - self.use_dlse(dlse, live)
        ds = np.where(live, self.jacobian(p, dp, delta, c), 0)
        dx = np.where(live, ds * self.cap_slope(c), 0)
        dq = self.dq_scale(c) * self.see(dx, k, live)
        dk = self.dk(dx, c, seen)
        return dq, dk, dv, ds, self.ds_sink(p_sink, delta, dlse)

    def undrop(self, dp: Array, c: Call) -> Array:
        return dp * c.keep

    def delta(self, p: Array, dp: Array) -> Array:
        return np.asarray((p * dp).sum(-1, keepdims=True))

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return dlse

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Call) -> Array:
        return np.asarray(p * (dp - delta))

    def cap_slope(self, c: Call) -> Any:
        return 1.0 if c.softcap is None else 1 - np.tanh(self.product(c) / c.softcap) ** 2

    def dq_scale(self, c: Call) -> float:
        return c.scale

    def dk(self, dx: Array, c: Call, seen: Array) -> Array:
        return np.asarray(c.scale * self.see(dx.swapaxes(-1, -2), c.q, seen))

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return -p_sink * delta  # delta holds −dlse


base = Attention().forward
base_backward = Attention().backward


def mutant(
    name: str, family: str, killed_by: str, source: str = "inferred"
) -> Callable[[type[Attention]], type[Attention]]:
    """Put a class into the zoo; its docstring says what is wrong."""

    def register(cls: type[Attention]) -> type[Attention]:
        made, sentence = cls(), " ".join((cls.__doc__ or "").split())
        rules = tuple(killed_by.split())
        if name in MUTANTS:
            raise KeyError(f"{name} is twice in the zoo")
        MUTANTS[name] = Mutant(name, family, sentence, source, rules, made.forward, made.backward)
        return cls

    return register


# --- scale, softcap, bias -------------------------------------------------------------------------


@mutant("scale-of-all-heads", "scale", "agreement-o", "karpathy/ng-video-lecture#6")
class _ScaleOfAllHeads(Attention):
    """The default scale is 1/√(H·D), the size of all heads together."""

    def default_scale(self, H: int, D: int) -> float:
        return 1 / math.sqrt(H * D or 1)


@mutant("scale-twice", "scale", "agreement-o", "huggingface/transformers#38290")
class _ScaleTwice(Attention):
    """q is scaled, and then the scores once more."""

    def product(self, c: Call) -> Array:
        return np.asarray(c.scale * super().product(c))


@mutant("scale-of-padded-size", "scale", "agreement-o structure", "intel/ipex-llm#12619")
class _ScaleOfPaddedSize(Attention):
    """The default scale takes D rounded up to a multiple of 8."""

    def default_scale(self, H: int, D: int) -> float:
        return 1 / math.sqrt(-(-D // 8) * 8 or 1)


@mutant("softcap-after-mask", "softcap", "agreement-o hidden-finite", "ggml-org/llama.cpp#29034")
class _SoftcapAfterMask(Attention):
    """The softcap turns the −inf of hidden scores into −c, and they take weight."""

    def final(self, x: Array, visible: Array, c: Call) -> Array:
        return self.cap(self.hide(x + c.bias, visible), c)


@mutant("softcap-over-bias", "softcap", "agreement-o", "emmtrix/emx-onnx-cgen#731")
class _SoftcapOverBias(Attention):
    """The softcap is applied to score + bias."""

    def final(self, x: Array, visible: Array, c: Call) -> Array:
        return self.hide(self.cap(x + c.bias, c), visible)


@mutant("softcap-slope-forgotten", "softcap", "agreement-dq agreement-dk")
class _SoftcapSlopeForgotten(Attention):
    """The gradient passes the softcap as if it were not there."""

    def cap_slope(self, c: Call) -> Any:
        return 1.0


@mutant("bias-scaled", "bias", "agreement-o")
class _BiasScaled(Attention):
    """The bias is multiplied by the scale, as the scores are."""

    def final(self, x: Array, visible: Array, c: Call) -> Array:
        return self.hide(self.cap(x, c) + c.scale * c.bias, visible)


# --- causal, window, mask -------------------------------------------------------------------------


@mutant("causal-top-left", "causal", "agreement-o", "Dao-AILab/flash-attention#282")
class _CausalTopLeft(Attention):
    """Query t stands at key t, not at t + S − T."""

    def diagonal(self, T: int, S: int) -> Array:
        return np.arange(T)[:, None]


@mutant("causal-strict", "causal", "agreement-o")
class _CausalStrict(Attention):
    """A causal query does not see the key at which it stands."""

    def sides(self, c: Call) -> Window:
        left, right = super().sides(c)
        return left, -1 if c.causal else right


@mutant(
    "causal-backward-top-left",
    "causal",
    "agreement-dq agreement-dk agreement-dv",
    "xlite-dev/ffpa-attn#300",
)
class _CausalBackwardTopLeft(Attention):
    """Backward rebuilds the causal mask from the top left corner, forward from the bottom right."""

    def recompute(self, c: Call) -> Call:
        T, S = c.q.shape[-2], c.k.shape[-2]
        square = np.arange(S) <= np.arange(T)[:, None]
        mask = square if c.mask is None else c.mask & square
        return c._replace(causal=False, mask=mask) if c.causal else c


@mutant("window-one-wider", "window", "agreement-o", "huggingface/transformers#39408")
class _WindowOneWider(Attention):
    """The window reaches one key further to the left."""

    def sides(self, c: Call) -> Window:
        left, right = super().sides(c)
        return None if left is None else left + 1, right


@mutant("window-one-narrower", "window", "agreement-o", "NVIDIA/TransformerEngine#1212")
class _WindowOneNarrower(Attention):
    """The left end of the window is exclusive."""

    def sides(self, c: Call) -> Window:
        left, right = super().sides(c)
        return None if left is None else left - 1, right


@mutant(
    "window-ignored-in-backward",
    "window",
    "agreement-dq agreement-dk agreement-dv",
    "meta-pytorch/MSLK#263",
)
class _WindowIgnoredInBackward(Attention):
    """Backward rebuilds the weights without the window."""

    def recompute(self, c: Call) -> Call:
        return c._replace(window=None)


@mutant("mask-inverted", "mask", "agreement-o", "lucidrains/x-transformers#160")
class _MaskInverted(Attention):
    """True in the mask hides."""

    def visible(self, c: Call) -> Array:
        return super().visible(c if c.mask is None else c._replace(mask=~c.mask))


@mutant("mask-ignored-when-causal", "mask", "agreement-o", "AI-Hypercomputer/maxtext#878")
class _MaskIgnoredWhenCausal(Attention):
    """The mask is not read where causal is given."""

    def visible(self, c: Call) -> Array:
        return super().visible(c._replace(mask=None) if c.causal else c)


@mutant("causal-ignored-with-mask", "mask", "agreement-o", "keras-team/keras#23040")
class _CausalIgnoredWithMask(Attention):
    """causal is not read where a mask is given."""

    def visible(self, c: Call) -> Array:
        return super().visible(c if c.mask is None else c._replace(causal=False))


@mutant(
    "mask-after-softmax",
    "mask",
    "rows-sum-to-one agreement-o",
    "huggingface/pytorch-image-models#2236",
)
class _MaskAfterSoftmax(Attention):
    """Hidden weights are set to 0 after the softmax, and the rest is not normalised again."""

    def hide(self, s: Array, visible: Array) -> Array:
        return s

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.where(live, p, 0), p_sink, lse


@mutant("mask-added-as-number", "mask", "agreement-o", "HKUSTDial/flash-sparse-attention#146")
class _MaskAddedAsNumber(Attention):
    """The mask is added to the scores as 1 and 0, where 0 and −inf are meant."""

    def hide(self, s: Array, visible: Array) -> Array:
        return s + visible


# --- rows that see nothing, NaN -------------------------------------------------------------------


@mutant("empty-row-nan", "empty row", "empty-row", "pytorch/pytorch#103749")
class _EmptyRowNaN(Attention):
    """The softmax has no guard: −inf − −inf is NaN."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        empty = lse == -np.inf
        return np.where(empty, np.nan, p), p_sink, np.where(empty, np.nan, lse)


@mutant("empty-row-mean", "empty row", "empty-row", "NVIDIA/apex#1390")
class _EmptyRowMean(Attention):
    """A query that sees nothing gets the mean of all values."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.where(lse == -np.inf, 1 / max(s.shape[-1], 1), p), p_sink, lse


@mutant("hidden-score-finite", "empty row", "empty-row", "microsoft/onnxruntime#8549")
class _HiddenScoreFinite(Attention):
    """Hidden scores become −1e4, which is not small beside other small scores."""

    def hide(self, s: Array, visible: Array) -> Array:
        return np.where(visible, s, -1e4)


@mutant("empty-row-takes-dlse", "empty row", "empty-row")
class _EmptyRowTakesDlse(Attention):
    """The gradient of lse flows into all keys of a row that sees none, by equal weights."""

    def gradients(self, c: Call, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, ds, ds_sink = super().gradients(c, do, dlse, dw)
        _, live = self.scores(c)
        empty = ~live.any(-1, keepdims=True)
        return dq + np.where(empty, dlse, 0), dk, dv, ds, ds_sink


@mutant("nan-of-query-zeroed", "NaN", "nan-query", "pytorch/pytorch#141128")
class _NaNOfQueryZeroed(Attention):
    """The guard for rows that see nothing also turns the NaN of a query into 0."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.nan_to_num(p), p_sink, lse


@mutant("nan-leaks-through-additive-mask", "NaN", "hidden-nan-k", "deepbeepmeep/Wan2GP#1628")
class _NaNLeaksThroughAdditiveMask(Attention):
    """−inf is added to hidden scores, and NaN + −inf is NaN."""

    def hide(self, s: Array, visible: Array) -> Array:
        return np.where(np.isnan(s), s, np.where(visible, s, -np.inf))


@mutant("nan-leaks-through-zero-weight", "NaN", "hidden-nan-v")
class _NaNLeaksThroughZeroWeight(Attention):
    """Hidden values are multiplied by a weight of 0, and 0 · NaN is NaN."""

    def results(self, c: Call) -> tuple[Array, Array, Array]:
        _, lse, p = super().results(c)
        return p * c.keep @ self.share(c.v, c.q.shape[-3]), lse, p


@mutant("nan-leaks-into-gradients", "NaN", "nan-query hidden-nan-k", "tile-ai/tilelang#2461")
class _NaNLeaksIntoGradients(Attention):
    """Backward multiplies gradients of hidden scores, 0, by rows of q and k that are NaN."""

    def gradients(self, c: Call, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, *rest = super().gradients(c, do, dlse, dw)
        k = self.share(c.k, c.q.shape[-3])
        bad_q, bad_k = (np.isnan(x).any(-2, keepdims=True) for x in (c.q, k))
        return np.where(bad_k, np.nan, dq), np.where(bad_q, np.nan, dk), *rest


# --- softmax, lse, sinks --------------------------------------------------------------------------


@mutant(
    "softmax-over-queries",
    "softmax",
    "rows-sum-to-one agreement-o",
    "labmlai/annotated_deep_learning_paper_implementations#146",
)
class _SoftmaxOverQueries(Attention):
    """The weights of a key over all queries sum to 1, not those of a query over all keys."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        _, p_sink, lse = super().softmax(s, c, live)
        e = np.where(live, np.exp(s - s.max(-2, keepdims=True, initial=-np.inf)), 0)
        total = e.sum(-2, keepdims=True)
        return e / np.where(total == 0, 1, total), p_sink, lse


@mutant("no-max-subtracted", "softmax", "agreement-o", "pytorch/executorch#18407")
class _NoMaxSubtracted(Attention):
    """exp is taken of the scores as they are, in the dtype computed in, and overflows."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        wide = np.float64 if c.dtype == np.float64 else np.float32
        e, e_sink = (np.exp(x.astype(wide)).astype(np.float64) for x in (s, c.sinks))
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return e / safe, e_sink / safe, np.log(total)


@mutant("lse-base-2", "lse", "agreement-lse", "deepseek-ai/FlashMLA#106")
class _LseBase2(Attention):
    """lse is a logarithm to base 2."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return super().lse(pivot, total, e_sink) / math.log(2)


@mutant("lse-without-maximum", "lse", "agreement-lse")
class _LseWithoutMaximum(Attention):
    """lse is that of the scores after the maximum was subtracted."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return np.log(total)


@mutant("lse-without-sink", "sinks", "agreement-lse")
class _LseWithoutSink(Attention):
    """The sink takes weight, but is not in lse."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return super().lse(pivot, total - e_sink, e_sink)


@mutant("sink-scaled", "sinks", "agreement-o agreement-lse")
class _SinkScaled(Attention):
    """The sink is multiplied by the scale, as the scores are."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        sinks = np.where(c.sinks == -np.inf, c.sinks, c.scale * c.sinks)
        return super().softmax(s, c._replace(sinks=sinks), live)


@mutant("dsinks-without-dlse", "sinks", "agreement-dsinks", "Dao-AILab/flash-attention#2706")
class _DsinksWithoutDlse(Attention):
    """The gradient of lse does not reach the sinks."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return np.asarray(-p_sink * (delta + dlse))


@mutant("dsinks-zero", "sinks", "agreement-dsinks", "Dao-AILab/flash-attention#1973")
class _DsinksZero(Attention):
    """The sinks get no gradient."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return np.zeros_like(delta)


# --- heads ----------------------------------------------------------------------------------------


@mutant("heads-tiled", "heads", "agreement-o structure", "onnx/onnx#7274")
class _HeadsTiled(Attention):
    """Query head h uses key/value head h % K."""

    def share(self, x: Array, H: int) -> Array:
        K = x.shape[-3]
        return np.asarray(np.take(x, np.arange(H) % max(K, 1), axis=-3))


@mutant("heads-of-padded-group", "heads", "agreement-o structure", "ggml-org/llama.cpp#19115")
class _HeadsOfPaddedGroup(Attention):
    """Query head h uses key/value head h // G with G rounded up to a power of two."""

    def share(self, x: Array, H: int) -> Array:
        group = 1
        while group * x.shape[-3] < H:
            group *= 2
        return np.asarray(np.take(x, np.arange(H) // group, axis=-3))


@mutant("dk-of-first-head", "heads", "agreement-dk agreement-dv")
class _DkOfFirstHead(Attention):
    """dk and dv are those of the first query head of each group, not the sum over the group."""

    def share_back(self, dx: Array, x: Array) -> Array:
        K = x.shape[-3]
        return dx[..., :: dx.shape[-3] // max(K, 1) or 1, :, :]


# --- dropout --------------------------------------------------------------------------------------


@mutant(
    "dropped-weights-in-jacobian",
    "dropout",
    "agreement-dq agreement-dk",
    "aws-neuron/nki-samples#81",
)
class _DroppedWeightsInJacobian(Attention):
    """The Jacobian of the softmax takes the weights after dropout."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Call) -> Array:
        return np.asarray(p * c.keep * (dp - delta))


@mutant("dp-not-dropped", "dropout", "agreement-dq agreement-dk", "aws-neuron/nki-samples#81")
class _DpNotDropped(Attention):
    """The gradient of the weights is not dropped; dv stays right."""

    def undrop(self, dp: Array, c: Call) -> Array:
        return dp


@mutant("weights-after-dropout", "dropout", "agreement-weights", "pytorch/pytorch#42929")
class _WeightsAfterDropout(Attention):
    """The weights returned are those after dropout."""

    def returned_weights(self, p: Array, c: Call) -> Array:
        return p * c.keep


# --- gradients ------------------------------------------------------------------------------------


@mutant(
    "jacobian-without-rank-1-term",
    "gradient",
    "agreement-dq agreement-dk",
    "Dao-AILab/flash-attention#2481",
)
class _JacobianWithoutRank1Term(Attention):
    """The Jacobian of the softmax lacks −p pᵀ; dv stays right."""

    def delta(self, p: Array, dp: Array) -> Array:
        return np.zeros((*p.shape[:-1], 1))


@mutant("dlse-ignored", "gradient", "agreement-dq agreement-dk")
class _DlseIgnored(Attention):
    """The gradient of lse is not passed on."""

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return 0.0


@mutant("dq-unscaled", "gradient", "agreement-dq")
class _DqUnscaled(Attention):
    """dq lacks the scale."""

    def dq_scale(self, c: Call) -> float:
        return 1.0


@mutant("dk-of-base-2-query", "gradient", "agreement-dk")
class _DkOfBase2Query(Attention):
    """dk takes the query that was scaled by log₂ e for the sake of exp2."""

    def dk(self, dx: Array, c: Call, seen: Array) -> Array:
        return super().dk(dx, c, seen) / math.log(2)


@mutant(
    "dbias-last-writer-wins", "gradient", "agreement-dbias", "HKUSTDial/flash-sparse-attention#194"
)
class _DbiasLastWriterWins(Attention):
    """dbias is not summed over the axes along which bias broadcasts: the last one stays."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        found = np.zeros(shape)
        if ds.size:
            axes = (1,) * (ds.ndim - len(shape)) + shape
            last = tuple(slice(-1, None) if n == 1 else slice(None) for n in axes)
            found = ds[last].reshape(shape)
        return found


@mutant("dbias-zero", "gradient", "agreement-dbias", "jax-ml/jax#27184")
class _DbiasZero(Attention):
    """The bias gets no gradient."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape)


# --- memory, state, dtype -------------------------------------------------------------------------


@mutant("out-widened", "dtype", "shape-dtype")
class _OutWidened(Attention):
    """out comes in float32 whatever the inputs are, and in float64 for float32."""

    def out_dtype(self, dtype: np.dtype[Any]) -> Any:
        return np.float64 if dtype == np.float32 else np.float32


@mutant("input-changed", "memory", "inputs-unchanged")
class _InputChanged(Attention):
    """q is scaled in place."""

    def call(self, arrays: tuple[Any, ...], *options: Any) -> Call:
        call = super().call(arrays, *options)
        q = arrays[0]
        if q.flags.writeable:
            q *= np.asarray(call.scale, q.dtype)
        return call


@mutant("views-misread", "memory", "views", "pytorch/pytorch#181133")
class _ViewsMisread(Attention):
    """A transposed or expanded array is read in the order of its memory."""

    def read(self, x: Array) -> Array:
        order = np.argsort([-abs(stride) for stride in x.strides], kind="stable")
        in_memory = x.transpose(order) if min(x.shape, default=0) > 1 else x
        return super().read(in_memory).reshape(x.shape)


@mutant("state-kept", "memory", "repeatable nan-query", "flashinfer-ai/flashinfer#4270")
class _StateKept(Attention):
    """A second call with the shapes and options of the first returns what the first returned."""

    last: tuple[Any, Any] = (None, None)

    def results(self, c: Call) -> tuple[Array, Array, Array]:
        key = [(x.shape, x.dtype) if isinstance(x, np.ndarray) else x for x in c]
        if self.last[0] != key:
            self.last = key, super().results(c)
        found: tuple[Array, Array, Array] = self.last[1]
        return found


@mutant("result-changes", "memory", "repeatable", "Dao-AILab/flash-attention#359")
class _ResultChanges(Attention):
    """Every third call is off by 2⁻⁷, as a race would make it."""

    calls = 0

    def results(self, c: Call) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        self.calls += 1
        return (o if self.calls % 3 else o * (1 + 2.0**-7)), lse, p
