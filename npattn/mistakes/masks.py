"""Mutants: causal, mask."""

from __future__ import annotations

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import TILE, Attention, Inputs
from npattn.mistakes.register import mistake
from npattn.options import Window

# --- causal ---


@mistake("causal-top-left", "causal", "Dao-AILab/flash-attention#282")
class _CausalTopLeft(Attention):
    """Query t stands at key t, not at t + S − T."""

    def diagonal(self, T: int, S: int) -> Array:
        return np.arange(T)[:, None]


@mistake("causal-strict", "causal")
class _CausalStrict(Attention):
    """A causal query does not see the key at which it stands."""

    def sides(self, c: Inputs) -> Window:
        left, right = super().sides(c)
        return left, -1 if c.causal else right


@mistake("causal-offset-unsigned", "causal")
class _CausalOffsetUnsigned(Attention):
    """Where there are more queries than keys, S − T counts as 0."""

    def diagonal(self, T: int, S: int) -> Array:
        return super().diagonal(T, max(T, S))


@mistake("causal-of-padded-lengths", "causal")
class _CausalOfPaddedLengths(Attention):
    """S − T is taken of T and S rounded up to whole tiles."""

    def diagonal(self, T: int, S: int) -> Array:
        return np.arange(T)[:, None] + TILE * (-(-S // TILE) - -(-T // TILE))


@mistake("causal-only-when-square", "causal", "mlx-node/mlx-node#24")
class _CausalOnlyWhenSquare(Attention):
    """causal is read only where there are as many queries as keys."""

    def visible(self, c: Inputs) -> Array:
        square = c.q.shape[-2] == c.k.shape[-2]
        return super().visible(c._replace(causal=c.causal and square))


@mistake("causal-ignored-with-dropout", "causal", "keras-team/keras#23038")
class _CausalIgnoredWithDropout(Attention):
    """The path that drops weights does not read causal."""

    def visible(self, c: Inputs) -> Array:
        return super().visible(c._replace(causal=c.causal and np.ndim(c.keep) == 0))


@mistake("causal-ignored-with-weights", "causal", "keras-team/keras#23038")
class _CausalIgnoredWithWeights(Attention):
    """The path that returns the weights does not read causal."""

    def visible(self, c: Inputs) -> Array:
        return super().visible(c._replace(causal=c.causal and not c.returns_weights))


@mistake("causal-ignored-with-wide-window", "causal", "tlc-pack/libflash_attn#11")
class _CausalIgnoredWithWideWindow(Attention):
    """A window as wide to the left as there are keys is dropped, and causal with it."""

    def sides(self, c: Inputs) -> Window:
        left, right = super().sides(c)
        wide = left is not None and left >= c.k.shape[-2]
        return (None, None) if wide else (left, right)


@mistake("causal-added-as-number", "causal", "microsoft/onnxruntime#8549")
class _CausalAddedAsNumber(Attention):
    """causal adds −1e4 to later keys, which are seen where the mask hides all others."""

    def visible(self, c: Inputs) -> Array:
        return super().visible(c._replace(causal=False))

    def final(self, x: Array, visible: Array, c: Inputs) -> Array:
        allowed = super().visible(c._replace(mask=None, window=None))
        return super().final(x, visible, c) + np.where(allowed, 0, -1e4)


@mistake("causal-before-scale", "causal")
class _CausalBeforeScale(Attention):
    """With causal, scores are hidden by −inf before the scale, which makes +inf or NaN of it where
    it is not positive."""

    def final(self, x: Array, visible: Array, c: Inputs) -> Array:
        s = super().final(x, visible, c)
        return np.where(visible, s, c.scale * -np.inf) if c.causal else s


@mistake("causal-backward-top-left", "causal", "xlite-dev/ffpa-attn#300")
class _CausalBackwardTopLeft(Attention):
    """Backward rebuilds the causal mask from the top left corner, forward from the bottom right."""

    def recompute(self, c: Inputs) -> Inputs:
        T, S = c.q.shape[-2], c.k.shape[-2]
        square = np.arange(S) <= np.arange(T)[:, None]
        mask = square if c.mask is None else c.mask & square
        return c._replace(causal=False, mask=mask) if c.causal else c


@mistake("causal-ignored-in-backward", "causal", "triton-lang/triton#4541")
class _CausalIgnoredInBackward(Attention):
    """Backward is never causal."""

    def recompute(self, c: Inputs) -> Inputs:
        return c._replace(causal=False)


@mistake("causal-always-in-backward", "causal", "triton-lang/triton#4541")
class _CausalAlwaysInBackward(Attention):
    """Backward is always causal."""

    def recompute(self, c: Inputs) -> Inputs:
        return c._replace(causal=True)


# --- mask ---


@mistake("mask-inverted", "mask", "lucidrains/x-transformers#160")
class _MaskInverted(Attention):
    """True in the mask hides."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        return ~mask


@mistake("mask-without-effect", "mask", "lucidrains/flamingo-pytorch#10")
class _MaskWithoutEffect(Attention):
    """The masked scores are a copy that nobody uses."""

    def visible(self, c: Inputs) -> Array:
        return super().visible(c._replace(mask=None))


@mistake("mask-ignored-when-causal", "mask", "AI-Hypercomputer/maxtext#878")
class _MaskIgnoredWhenCausal(Attention):
    """The mask is not read where causal is given."""

    def visible(self, c: Inputs) -> Array:
        return super().visible(c._replace(mask=None) if c.causal else c)


@mistake("mask-ignored-with-bias", "mask")
class _MaskIgnoredWithBias(Attention):
    """mask and bias share an argument, and the bias takes its place."""

    def visible(self, c: Inputs) -> Array:
        return super().visible(c if np.ndim(c.bias) == 0 else c._replace(mask=None))


@mistake("causal-ignored-with-mask", "mask", "keras-team/keras#23040")
class _CausalIgnoredWithMask(Attention):
    """causal is not read where a mask is given."""

    def visible(self, c: Inputs) -> Array:
        return super().visible(c if c.mask is None else c._replace(causal=False))


@mistake("mask-or-causal", "mask")
class _MaskOrCausal(Attention):
    """A query sees what the mask or causal allows, not what both allow."""

    def visible(self, c: Inputs) -> Array:
        if c.mask is None or not c.causal:
            return super().visible(c)
        return super().visible(c._replace(mask=None)) | super().visible(c._replace(causal=False))


@mistake("mask-after-softmax", "mask", "huggingface/pytorch-image-models#2236")
class _MaskAfterSoftmax(Attention):
    """Hidden weights are set to 0 after the softmax, and the rest is not normalised again."""

    def hide(self, s: Array, visible: Array) -> Array:
        return s

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.where(live, p, 0), p_sink, lse


@mistake("mask-added-as-number", "mask", "HKUSTDial/flash-sparse-attention#146")
class _MaskAddedAsNumber(Attention):
    """The mask is added to the scores as 1 and 0, where 0 and −inf are meant."""

    def hide(self, s: Array, visible: Array) -> Array:
        return s + visible


@mistake("mask-multiplies-scores", "mask")
class _MaskMultipliesScores(Attention):
    """Hidden scores are multiplied by 0, and a score of 0 has weight."""

    def hide(self, s: Array, visible: Array) -> Array:
        return np.where(visible, s, 0)


@mistake("mask-as-length", "mask", "microsoft/onnxruntime#27885")
class _MaskAsLength(Attention):
    """Of the mask only the number of its True is used, as the number of leading keys."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        S = c.k.shape[-2]
        each = np.broadcast_to(mask, (*mask.shape[:-1], S))
        return np.asarray(np.arange(S) < each.sum(-1, keepdims=True))


@mistake("mask-of-whole-tiles", "mask")
class _MaskOfWholeTiles(Attention):
    """A tile of keys of which the mask shows one is seen whole."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        S = c.k.shape[-2]
        each = np.broadcast_to(mask, (*mask.shape[:-1], S))
        tiles = np.logical_or.reduceat(each, np.arange(0, S, TILE), axis=-1)
        return np.repeat(tiles, TILE, axis=-1)[..., :S]


@mistake("mask-of-first-sample", "mask")
class _MaskOfFirstSample(Attention):
    """The mask of the first sample is used for all."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        return mask[..., :1, :, :, :] if mask.ndim > 3 else mask


@mistake("mask-of-first-head", "mask")
class _MaskOfFirstHead(Attention):
    """The mask of the first head is used for all."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        return mask[..., :1, :, :] if mask.ndim > 2 else mask


@mistake("mask-of-last-query", "mask")
class _MaskOfLastQuery(Attention):
    """The mask of the last query is used for all, as if it were a padding mask."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        return mask[..., -1:, :]


@mistake("mask-transposed", "mask")
class _MaskTransposed(Attention):
    """A square mask is read with queries and keys exchanged."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        square = mask.shape[-2] == mask.shape[-1]
        return mask.swapaxes(-1, -2) if square else mask


@mistake("mask-tiled-over-heads", "mask", "line/lighthouse#77")
class _MaskTiledOverHeads(Attention):
    """The masks of the samples are tiled, not repeated, over the heads of (B · H, T, S)."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        if mask.ndim < 4 or mask.shape[-3] != 1:
            return mask
        B, H = mask.shape[-4], c.q.shape[-3]
        sample = np.arange(B * H).reshape(B, H) % max(B, 1)
        return np.asarray(mask[..., sample, 0, :, :])


@mistake("mask-samples-as-heads", "mask")
class _MaskSamplesAsHeads(Attention):
    """A mask (B, 1, T, S) is read as (1, B, T, S) where there are B heads."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        fits = mask.ndim > 3 and mask.shape[-4:-2] == (c.q.shape[-3], 1)
        return mask.swapaxes(-3, -4) if fits else mask


@mistake("mask-ignored-in-backward", "mask", "Dao-AILab/flash-attention#1947")
class _MaskIgnoredInBackward(Attention):
    """Backward rebuilds the weights without the mask."""

    def recompute(self, c: Inputs) -> Inputs:
        return c._replace(mask=None)
