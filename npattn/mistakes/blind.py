"""Mistakes written from docs/semantics.md alone, by someone who had not seen the checks.

For every rule and every *Edge:* of it: what a programmer would plausibly get wrong, as little of
it as still breaks the rule. They try the judge on bugs that it was not tuned to, and the rules
that each names as its finders were written down before its first run. Since then one, which
crashed, was mended, six that the rules allow were dropped, and what was first missed has a rule or
draws of its own, which are named beside the others.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import TILE, Attention, Inputs, same_signature, within
from npattn.mistakes.register import mistake
from npattn.options import Window

__all__: list[str] = []

SMALLEST = float(np.finfo(np.float32).min)


def single(x: Array) -> Array:
    """x with the range of float32: a factor of 1e39 is inf, one of 1e−46 is 0."""
    return x.astype(np.float32).astype(np.float64)


# --- scores  [1]


@mistake("blind-scale-of-padded-size", "scale")
class ScaleOfPaddedSize(Attention):
    """The default scale is taken after D was padded to a multiple of 8."""

    def default_scale(self, H: int, D: int) -> float:
        return 1 / math.sqrt(-(-D // 8) * 8 or 1)


@mistake("blind-zero-scale-dq", "scale")
class ZeroScaleDq(Attention):
    """Backward takes a scale of 0 for none given, for dq alone."""

    def dq_scale(self, c: Inputs) -> float:
        return c.scale or self.default_scale(0, c.q.shape[-1])


@mistake("blind-negative-scale-dk", "scale")
class NegativeScaleDk(Attention):
    """√|scale| went into both q and k, and the sign of the scale is missing in dk."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return np.asarray(np.sign(c.scale) * super().dk(dx, c, seen))


class Pivoted(Attention):
    """Exponentials in the range of float32, about a number that is not the row's maximum."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        m = self.pivot(s, c, live)
        pivot = np.where(m == -np.inf, 0, m)
        e, e_sink = single(np.exp(s - pivot)), single(np.exp(c.sinks - pivot))
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return np.where(s == -np.inf, 0, e / safe), e_sink / safe, self.lse(pivot, total, e_sink)

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        return np.asarray(np.maximum(s.max(-1, keepdims=True, initial=-np.inf), c.sinks))


@mistake("blind-maximum-before-scale", "scale")
class MaximumBeforeScale(Pivoted):
    """The row's maximum is found before the scale: with a negative one it is the minimum."""

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        if c.scale >= 0:
            return super().pivot(s, c, live)
        low = np.where(live, s, np.inf).min(-1, keepdims=True, initial=np.inf)
        return np.maximum(np.where(low == np.inf, -np.inf, low), c.sinks)


@mistake("blind-packed-decode", "heads")
class PackedDecode(Attention):
    """One query: the heads that share keys are packed as queries, and aligned as queries too."""

    def visible(self, c: Inputs) -> Array:
        H, K = c.q.shape[-3], c.k.shape[-3]
        if c.q.shape[-2] != 1 or K in (0, H):
            return super().visible(c)
        S, G = c.k.shape[-2], H // K
        at = (np.arange(H) % G + S - G)[:, None, None]
        inside = within(np.arange(S) - at, self.sides(c))
        return inside if c.mask is None else inside & self.mask(c.mask, c)


# --- softcap  [2]


@mistake("blind-cap-slope-with-bias", "softcap")
class CapSlopeWithBias(Attention):
    """The slope of the cap is taken from the final scores, which hold the bias too."""

    def cap_slope(self, c: Inputs) -> Any:
        if c.softcap is None:
            return 1.0
        return 1 - ((self.cap(self.product(c), c) + self.bias(c)) / c.softcap) ** 2


@mistake("blind-cap-slope-without-scale", "softcap")
class CapSlopeWithoutScale(Attention):
    """The slope of the cap is taken at q·k instead of scale · q·k."""

    def cap_slope(self, c: Inputs) -> Any:
        return super().cap_slope(c._replace(scale=1.0))


@mistake("blind-cap-slope-by-exp", "softcap")
class CapSlopeByExp(Attention):
    """The slope of the cap is 4 e / (e + 1)² with e = exp(2 s / c): NaN where e overflows."""

    def cap_slope(self, c: Inputs) -> Any:
        if c.softcap is None:
            return 1.0
        e = single(np.exp(2 * self.product(c) / c.softcap))
        return 4 * e / (e + 1) ** 2


@mistake("blind-sink-capped", "softcap")
class SinkCapped(Attention):
    """The softcap caps the sinks too."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        if c.softcap is None:
            return c
        capped = c.softcap * np.tanh(c.sinks / c.softcap)
        return c._replace(sinks=np.where(np.isfinite(c.sinks), capped, c.sinks))


# --- bias  [4]


@mistake("blind-bias-far-below-hides", "bias")
class BiasFarBelowHides(Attention):
    """A score below −1e30 is taken for hidden, though a finite one is a number like others."""

    def scores(self, c: Inputs) -> tuple[Array, Array]:
        s, live = super().scores(c)
        far = s < -1e30
        return np.where(far, -np.inf, s), live & ~far


@mistake("blind-bias-minus-inf-clamped", "bias")
class BiasMinusInfClamped(Attention):
    """A −inf bias becomes the smallest finite number: a row of them is the mean, not empty."""

    def bias(self, c: Inputs) -> Array | float:
        return np.maximum(c.bias, SMALLEST)


@mistake("blind-dbias-after-cap", "bias")
class DbiasAfterCap(Attention):
    """dbias is taken where dq and dk are, after the slope of the cap."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, ds, ds_sink = super().gradients(c, do, dlse, dw)
        return dq, dk, dv, ds * self.cap_slope(c), ds_sink


@mistake("blind-dbias-of-row-constant", "bias")
class DbiasOfRowConstant(Attention):
    """A bias that is constant along the keys gets no gradient: lse and sinks would feel it."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape) if shape[-1] == 1 else super().reduce_bias(ds, shape)


# --- mask, causal, window  [5-7, 14]


@mistake("blind-mask-rank-3-as-batch", "mask")
class MaskRank3AsBatch(Attention):
    """A mask (H, T, S) is taken for (B, T, S) where B is H."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        lead = c.q.shape[:-3]
        return mask[:, None] if mask.ndim == 3 and lead == mask.shape[:1] else mask


@mistake("blind-mask-rank-2-as-padding", "mask")
class MaskRank2AsPadding(Attention):
    """A mask (T, S) is taken for one of keys, (B, S), where B is T."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        lead = c.q.shape[:-3]
        return mask[:, None, None] if mask.ndim == 2 and lead == mask.shape[:1] else mask


@mistake("blind-mask-of-group", "mask")
class MaskOfGroup(Attention):
    """The heads that share keys share the mask of their first one."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        H, K = c.q.shape[-3], c.k.shape[-3]
        if mask.ndim < 3 or mask.shape[-3] == 1 or K == 0:
            return mask
        G = H // K
        return np.asarray(np.take(mask, np.arange(H) // G * G, axis=-3))


@mistake("blind-window-ignored-with-mask", "window")
class WindowIgnoredWithMask(Attention):
    """Where a mask is given, the window is not applied."""

    def sides(self, c: Inputs) -> Window:
        return super().sides(c if c.mask is None else c._replace(window=None))


@mistake("blind-causal-offset-clamped", "causal")
class CausalOffsetClamped(Attention):
    """S − T is clamped at 0, so that with T > S the first query sees a key."""

    def diagonal(self, T: int, S: int) -> Array:
        return np.arange(T)[:, None] + max(S - T, 0)


@mistake("blind-window-half-open-ignored", "window")
class WindowHalfOpenIgnored(Attention):
    """A window with None on one side is no window."""

    def sides(self, c: Inputs) -> Window:
        return super().sides(c._replace(window=None) if None in (c.window or ()) else c)


@mistake("blind-window-before-causal", "window")
class WindowBeforeCausal(Attention):
    """With causal the right side of the window is kept, instead of being at most 0."""

    def sides(self, c: Inputs) -> Window:
        left, right = c.window or (None, None)
        return left, 0 if c.causal and right is None else right


@mistake("blind-window-left-falsy", "window")
class WindowLeftFalsy(Attention):
    """A left side of 0 is taken for None."""

    def sides(self, c: Inputs) -> Window:
        left, right = super().sides(c)
        return left or None, right


@mistake("blind-window-top-left", "window")
class WindowTopLeft(Attention):
    """A window without causal is aligned to the first key."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        if c.causal or c.window is None:
            return super().visible(c)
        inside = within(np.arange(S) - np.arange(T)[:, None], self.sides(c))
        return inside if c.mask is None else inside & self.mask(c.mask, c)


@mistake("blind-window-in-int32", "window")
class WindowInInt32(Attention):
    """The ends of the window are 32-bit sums: a side near 2³¹ wraps, and hides every key."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        at, (left, right) = self.diagonal(T, S), self.sides(c)
        first = np.zeros((T, 1)) if left is None else (at - left % 2**32).astype(np.int32)
        last = np.full((T, 1), S) if right is None else (at + right % 2**32).astype(np.int32)
        inside = (first <= np.arange(S)) & (np.arange(S) <= last)
        return inside if c.mask is None else inside & self.mask(c.mask, c)


@mistake("blind-tile-ends-at-first-query", "window")
class TileEndsAtFirstQuery(Attention):
    """A tile of queries stops at the last tile of keys that its first query sees."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        right, inside = self.sides(c)[1], super().visible(c)
        if right is None:
            return inside
        first = self.diagonal(T, S)[np.arange(T) // TILE * TILE]
        return np.asarray(inside & (np.arange(S) < ((first + right) // TILE + 1) * TILE))


# --- softmax, rows that see nothing, sinks  [8]


@mistake("blind-sinks-by-group", "sinks")
class SinksByGroup(Attention):
    """The sinks are read as (G, K) though query heads are (K, G)."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        H, K = c.q.shape[-3], c.k.shape[-3]
        order = np.arange(H).reshape(H // max(K, 1), K).T.ravel()
        return c._replace(sinks=c.sinks[order])


@mistake("blind-sink-not-in-maximum", "sinks")
class SinkNotInMaximum(Pivoted):
    """The maximum leaves out the sink: one far above the scores overflows."""

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        return np.asarray(s.max(-1, keepdims=True, initial=-np.inf))


@mistake("blind-sink-minus-inf", "sinks")
class SinkMinusInf(Attention):
    """A row that sees nothing is NaN where a sink is given and is −inf."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        return c._replace(sinks=np.full(1, -np.inf)) if options.get("sinks") is None else c

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        given = c.sinks.ndim == 3
        broken = given & (c.sinks == -np.inf) & ~live.any(-1, keepdims=True)
        return np.where(broken, np.nan, p), p_sink, np.where(broken, np.nan, lse)


@mistake("blind-empty-row-lse-without-sink", "sinks", equivalent=True)
class EmptyRowLseWithoutSink(Attention):
    """A row that sees nothing has lse −inf where it should have its sink."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return p, p_sink, np.where(live.any(-1, keepdims=True), lse, -np.inf)


@mistake("blind-empty-row-dsinks", "sinks")
class EmptyRowDsinks(Attention):
    """Backward passes over rows that see nothing, whose sink should receive dlse."""

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return np.where(live.any(-1, keepdims=True), dlse, 0)


@mistake("blind-weights-without-sink", "sinks")
class WeightsWithoutSink(Attention):
    """The weights that are returned sum to 1 despite a sink."""

    def returned_weights(self, p: Array, c: Inputs) -> Array:
        total = p.sum(-1, keepdims=True)
        return np.asarray(p / np.where(total == 0, 1, total))


@mistake("blind-dsinks-without-dlse", "sinks")
class DsinksWithoutDlse(Attention):
    """dsinks receives what comes through o, and nothing from dlse."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return np.asarray(-p_sink * (delta + dlse))


@mistake("blind-dsinks-of-first-tile", "sinks")
class DsinksOfFirstTile(Attention):
    """dsinks sums the first tile of queries only."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return super().ds_sink(p_sink, delta, dlse)[..., :TILE, :]


@mistake("blind-maximum-of-padding", "softmax")
class MaximumOfPadding(Pivoted):
    """The last tile is padded by scores of 0, which the maximum counts and the sum does not."""

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        m = super().pivot(s, c, live)
        return np.maximum(m, 0) if s.shape[-1] % TILE else m


@mistake("blind-lse-epsilon", "empty", equivalent=True)
class LseEpsilon(Attention):
    """lse is log(sum + 1e-30): a number, not −inf, in a row that sees nothing."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return np.asarray(pivot + np.log(total + 1e-30))


# --- dropout  [9]


@mistake("blind-dropout-in-lse", "dropout", equivalent=True)
class DropoutInLse(Attention):
    """lse sums the weights that dropout keeps."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, _ = super().results(c)
        s, live = self.scores(c)
        p, p_sink, _ = self.softmax(s, c, live)
        kept = (p * (np.asarray(c.keep) != 0)).sum(-1) + p_sink[..., 0]
        lost = np.where(live.any(-1), np.log(kept), 0)
        return o, lse + lost, self.returned_weights(p, c)


@mistake("blind-rate-zero-backward", "dropout")
class RateZeroBackward(Attention):
    """With a rate of 0 backward leaves out dropout, and its mask with it."""

    def recompute(self, c: Inputs) -> Inputs:
        return c._replace(keep=1.0) if np.any(np.asarray(c.keep) == 1) else c


@mistake("blind-dweights-dropped", "dropout")
class DweightsDropped(Attention):
    """dweights goes back through dropout, though the weights returned are those before it."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        return super().gradients(c, do, dlse, dw * c.keep)


@mistake("blind-delta-dropped", "dropout")
class DeltaDropped(Attention):
    """The dropped weights multiply delta as well: ds = w (dp − delta)."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
        return np.asarray(p * dp - p * c.keep * delta)


@mistake("blind-dropped-row-dlse", "dropout")
class DroppedRowDlse(Attention):
    """A row whose weights were all dropped is passed over, and its lse has no gradient."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        _, live = self.scores(c)
        kept = (live & (np.asarray(c.keep) != 0)).any(-1, keepdims=True)
        empty = ~live.any(-1, keepdims=True)
        return super().gradients(c, do, np.where(kept | empty, dlse, 0), dw)


@mistake("blind-weights-path-without-dropout", "dropout")
class WeightsPathWithoutDropout(Attention):
    """The path that returns weights has no dropout in out."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        return super().results(c._replace(keep=1.0) if c.returns_weights else c)


# --- what is hidden does not matter  [10]


@mistake("blind-values-cleared-by-column", "hidden")
class ValuesClearedByColumn(Attention):
    """Values are cleared at keys that no query sees, not at those that one query does not."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        _, lse, p = super().results(c)
        s, live = self.scores(c)
        seen = np.broadcast_to(live.any(-2, keepdims=True), live.shape)
        w = self.softmax(s, c, live)[0] * c.keep
        return self.see(w, self.share(c.v, c.q.shape[-3]), seen), lse, p


@mistake("blind-hidden-inf", "hidden")
class HiddenInf(Attention):
    """NaN is cleared behind the mask, and inf is not."""

    def see(self, w: Array, x: Array, live: Array) -> Array:
        unknown = np.isnan(x)
        touched = live.astype(np.float64) @ unknown > 0
        return np.where(touched, np.nan, w @ np.where(unknown, 0, x))


@mistake("blind-delta-of-hidden-values", "hidden")
class DeltaOfHiddenValues(Attention):
    """delta sums p dp over hidden keys too: 0 · NaN where a hidden value is NaN."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dp = do @ self.share(c.v, c.q.shape[-3]).swapaxes(-1, -2)
        return super().gradients(c, do, dlse - (0 * dp).sum(-1, keepdims=True), dw)


@mistake("blind-dq-of-hidden-keys", "hidden")
class DqOfHiddenKeys(Attention):
    """dq = ds k as it stands: 0 · NaN where a hidden key is NaN."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, *others = super().gradients(c, do, dlse, dw)
        return dq + (0 * self.share(c.k, c.q.shape[-3])).sum(-2, keepdims=True), *others


@mistake("blind-dk-of-nan-query", "hidden")
class DkOfNanQuery(Attention):
    """dk = dsᵀ q as it stands: a NaN query reaches keys that it does not see."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return np.asarray(c.scale * (dx.swapaxes(-1, -2) @ c.q))


@mistake("blind-nan-spreads-over-columns", "hidden")
class NanSpreadsOverColumns(Attention):
    """A NaN in one column of a value that is seen makes every column of o NaN."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        return np.where(np.isnan(o).any(-1, keepdims=True), np.nan, o), lse, p


# --- sizes of 0  [12]


@mistake("blind-no-size-scale", "sizes")
class NoSizeScale(Attention):
    """With D = 0 the default scale is 1/√0, and the scores are inf · 0."""

    def default_scale(self, H: int, D: int) -> float:
        return super().default_scale(H, D) if D else math.inf


@mistake("blind-no-keys-sink", "sizes", equivalent=True)
class NoKeysSink(Attention):
    """With S = 0 lse is −inf, though there is a sink."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return p, p_sink, lse if s.shape[-1] else np.full_like(lse, -np.inf)


@mistake("blind-no-values-lse", "sizes")
class NoValuesLse(Attention):
    """With E = 0 there is nothing to compute, and lse and weights are 0."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        return (o, lse, p) if c.v.shape[-1] else (o, 0 * lse, 0 * p)


@mistake("blind-no-values-gradient", "sizes")
class NoValuesGradient(Attention):
    """With E = 0 every gradient is 0, though lse and weights have theirs."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        found = super().gradients(c, do, dlse, dw)
        return found if c.v.shape[-1] else tuple(np.zeros_like(x) for x in found)


@mistake("blind-no-queries-dk", "sizes")
class NoQueriesDk(Attention):
    """With T = 0 dk and dv are never written."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, *others = super().gradients(c, do, dlse, dw)
        if c.q.shape[-2] == 0:
            dk, dv = np.full_like(dk, np.nan), np.full_like(dv, np.nan)
        return dq, dk, dv, *others


# --- gradients  [13]


@mistake("blind-delta-without-dweights", "gradients")
class DeltaWithoutDweights(Attention):
    """delta is Σ do · o, which holds nothing of dweights."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        s, live = self.scores(c)
        p, _, _ = self.softmax(s, c, live)
        missing = (p * np.where(live, dw, 0)).sum(-1, keepdims=True)
        return super().gradients(c, do, dlse + missing, dw)


@mistake("blind-broadcast-last-wins", "gradients")
class BroadcastLastWins(Attention):
    """Where k or v is broadcast along the batch, the last gradient overwrites the others."""

    def reduce(self, dx: Array, shape: tuple[int, ...]) -> Array:
        if dx.size == 0:
            return super().reduce(dx, shape)
        full = (*(1,) * (dx.ndim - len(shape)), *shape)
        return np.asarray(dx[tuple(slice(-n, None) for n in full)].reshape(shape))


# --- shapes and dtypes  [14, 15]


@mistake("blind-batch-modulo", "shapes")
class BatchModulo(Attention):
    """Batch entry b of q takes entry b mod n of k and v, not that of broadcasting."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        lead = c.q.shape[:-3]
        return c._replace(k=self.tiled(c.k, lead), v=self.tiled(c.v, lead))

    def tiled(self, x: Array, lead: tuple[int, ...]) -> Array:
        count = math.prod(lead)
        if x.size == 0 or count == 0:
            return x
        flat = x.reshape(-1, *x.shape[-3:])
        return np.asarray(flat[np.arange(count) % len(flat)].reshape(*lead, *x.shape[-3:]))


@mistake("blind-rank-2-weights", "shapes")
class Rank2Weights(Attention):
    """The weights of inputs of rank 2 keep an axis of heads."""

    @same_signature(Attention.forward)
    def forward(self, q: Array, *args: Any, return_weights: bool = False, **options: Any) -> Any:
        found = super().forward(q, *args, return_weights=return_weights, **options)
        return (*found[:-1], found[-1][None]) if return_weights and q.ndim == 2 else found


@mistake("blind-float64-read-as-float32", "dtypes", dtypes=("float64",))
class Float64ReadAsFloat32(Attention):
    """Inputs of float64 are rounded to float32 as they are read."""

    def read(self, x: Array) -> Array:
        return single(np.asarray(x))


# --- state, and what the caller holds


@mistake("blind-cache-without-causal", "state")
class CacheWithoutCausal(Attention):
    """What is visible is kept by sizes and window, and causal is not in the key."""

    def __init__(self) -> None:
        self.kept: dict[Any, Array] = {}

    def visible(self, c: Inputs) -> Array:
        key = c.q.shape[-2], c.k.shape[-2], c.window
        inside = self.kept.setdefault(key, super().visible(c._replace(mask=None)))
        return inside if c.mask is None else inside & self.mask(c.mask, c)


@mistake("blind-bias-masked-in-place", "state")
class BiasMaskedInPlace(Attention):
    """The mask is written into the caller's bias, where that has room for it."""

    @same_signature(Attention.forward)
    def forward(
        self, q: Array, k: Array, v: Array, mask: Array | None = None, **options: Any
    ) -> Any:
        bias = options.get("bias")
        if bias is None or mask is None or not bias.flags.writeable:
            return super().forward(q, k, v, mask, **options)
        if np.broadcast_shapes(bias.shape, mask.shape) == bias.shape:
            np.copyto(bias, -np.inf, where=~mask)
        return super().forward(q, k, v, mask, **options)


@mistake("blind-values-in-memory-order", "state")
class ValuesInMemoryOrder(Attention):
    """v is read in the order in which it lies in memory."""

    def inputs(self, q: Array, k: Array, v: Array, *mask: Any, **options: Any) -> Inputs:
        v = np.ravel(v, order="K").reshape(v.shape)
        return super().inputs(q, k, v, *mask, **options)
