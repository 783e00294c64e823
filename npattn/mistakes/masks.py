"""Mistakes in causal and in the mask."""

from collections.abc import Callable

import numpy as np

from npattn.mistakes.attention import TILE, Attention, Inputs, within
from npattn.mistakes.register import after, change, mistake, one_for_all, one_result
from npattn.problem.arrays import Array

change("causal-top-left", "causal",
       "Causal is aligned top-left: query t sees keys up to t, not t + S − T.",
       "Dao-AILab/flash-attention#282", step="visible", where="T ≠ S and causal or window",
       diagonal=lambda up, T, S: np.arange(T)[:, None])  # fmt: skip
change("causal-strict", "causal", "Causal also hides the key on the diagonal.",
       step="visible", where="s − t = S − T and causal",
       sides=one_result(1, lambda right, c: -1 if c.causal else right))  # fmt: skip
change("causal-offset-unsigned", "causal",
       "With more queries than keys, the causal offset S − T is taken as 0.",
       step="visible", where="T > S and causal or window",
       diagonal=lambda up, T, S: up(T, max(T, S)))  # fmt: skip
change("causal-offset-never-positive", "causal",
       "With more keys than queries, the causal offset S − T is taken as 0.", step="visible",
       where="S > T and causal or window",
       diagonal=lambda up, T, S: up(T, min(T, S)))  # fmt: skip
change("diagonal-early", "causal", "The diagonal of causal and window is one key too early.",
       step="visible", where="causal or window",
       diagonal=lambda up, T, S: up(T, S) - 1)  # fmt: skip
change("diagonal-late", "causal", "The diagonal of causal and window is one key too late.",
       step="visible", where="causal or window",
       diagonal=lambda up, T, S: up(T, S) + 1)  # fmt: skip
change("causal-ignored", "causal", "Causal is ignored.", step="visible", where="causal",
       visible=lambda up, c: up(c._replace(causal=False)))  # fmt: skip
change("causal-always", "causal", "Keys behind the diagonal are hidden also without causal.",
       step="visible", where="s − t > S − T",
       visible=lambda up, c: up(c._replace(causal=True)))  # fmt: skip
change("causal-of-padded-lengths", "causal",
       "The causal offset S − T uses T and S rounded up to whole tiles.",
       step="visible", where="T % 16 ≠ S % 16 and causal or window", diagonal=lambda up, T, S:
           np.arange(T)[:, None] + TILE * (-(-S // TILE) - -(-T // TILE)))  # fmt: skip
change("causal-only-when-square", "causal",
       "Causal is ignored unless there are as many queries as keys.", "mlx-node/mlx-node#24",
       step="visible", where="T ≠ S and causal", visible=lambda up, c:
           up(c._replace(causal=c.causal and c.q.shape[-2] == c.k.shape[-2])))  # fmt: skip
change("causal-ignored-with-dropout", "causal", "Causal is ignored if there is a dropout mask.",
       "keras-team/keras#23038", step="visible", where="causal and dropout",
       visible=lambda up, c: up(c._replace(causal=c.causal and np.ndim(c.keep) == 0)))  # fmt: skip
change("causal-ignored-with-weights", "causal", "Causal is ignored if the weights are requested.",
       "keras-team/keras#23038", step="visible", where="causal and weights",
       visible=lambda up, c: up(c._replace(causal=c.causal and not c.returns_weights)))  # fmt: skip
change("causal-ignored-with-wide-window", "causal",
       "If the left side of the window is at least S, window and causal are both ignored.",
       "tlc-pack/libflash_attn#11", step="visible", where="window",
       sides=lambda up, c:
           up(c) if up(c)[0] is None or up(c)[0] < c.k.shape[-2] else (None, None))  # fmt: skip


@mistake("causal-added-as-number", "causal", "microsoft/onnxruntime#8549", step="p",
         where="rows that see no key and causal")  # fmt: skip
class _CausalAddedAsNumber(Attention):
    """Causal adds −1e4 to later keys, which get weight if the mask hides all others."""

    def visible(self, c: Inputs) -> Array:
        return super().visible(c._replace(causal=False))

    def final(self, x: Array, visible: Array, c: Inputs) -> Array:
        allowed = super().visible(c._replace(mask=None, window=None))
        return super().final(x, visible, c) + np.where(allowed, 0, -1e4)


@mistake("causal-before-scale", "causal", step="nan", where="causal and scale")
class _CausalBeforeScale(Attention):
    """With causal, scores are set to −inf before the scale; a scale ≤ 0 makes them +inf or NaN."""

    def final(self, x: Array, visible: Array, c: Inputs) -> Array:
        s = super().final(x, visible, c)
        return np.where(visible, s, c.scale * -np.inf) if c.causal else s

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.where(live, p, 0), p_sink, lse

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        """Return dk to which hidden positions of a lost row add 0 · NaN."""
        lost = np.isnan(dx).any(-1, keepdims=True)
        return super().dk(np.where(lost, np.nan, dx), c, seen)


@mistake("causal-alone-before-scale", "causal", step="nan", where="D = E and causal and scale")
class _CausalAloneBeforeScale(_CausalBeforeScale):
    """Causal alone, where E = D, sets −inf before the scale; a scale ≤ 0 makes it +inf or NaN."""

    def final(self, x: Array, visible: Array, c: Inputs) -> Array:
        alone = c.mask is None and isinstance(c.bias, float) and c.q.shape[-1] == c.v.shape[-1]
        return super().final(x, visible, c._replace(causal=c.causal and alone))


@mistake("causal-backward-top-left", "causal", "xlite-dev/ffpa-attn#300", step="visible",
         where="backward: T ≠ S and causal")  # fmt: skip
class _CausalBackwardTopLeft(Attention):
    """Backward aligns causal top-left, while forward aligns it bottom-right."""

    def recompute(self, c: Inputs) -> Inputs:
        T, S = c.q.shape[-2], c.k.shape[-2]
        square = np.arange(S) <= np.arange(T)[:, None]
        mask = square if c.mask is None else c.mask & square
        return c._replace(causal=False, mask=mask) if c.causal else c


change("causal-ignored-in-backward", "causal", "Backward ignores causal.",
       "triton-lang/triton#4541", step="visible", where="backward: causal",
       recompute=lambda up, c: c._replace(causal=False))  # fmt: skip
change("causal-always-in-backward", "causal", "Backward is always causal.",
       "triton-lang/triton#4541", step="visible", where="backward: s − t > S − T",
       recompute=lambda up, c: c._replace(causal=True))  # fmt: skip


change("mask-inverted", "mask", "True in the mask hides a key instead of showing it.",
       "lucidrains/x-transformers#160", step="visible", where="mask",
       mask=lambda up, mask, c: ~mask)  # fmt: skip
change("mask-without-effect", "mask", "The mask is ignored.", "lucidrains/flamingo-pytorch#10",
       step="visible", where="mask", visible=lambda up, c: up(c._replace(mask=None)))  # fmt: skip
change("mask-ignored-when-causal", "mask", "The mask is ignored if causal is given.",
       "AI-Hypercomputer/maxtext#878", step="visible", where="mask and causal",
       visible=lambda up, c: up(c._replace(mask=None) if c.causal else c))  # fmt: skip
change("mask-ignored-with-bias", "mask",
       "The mask is ignored if a bias is given, as when both share an argument.",
       step="visible", where="mask and bias",
       visible=lambda up, c: up(c if np.ndim(c.bias) == 0 else c._replace(mask=None)))  # fmt: skip
change("causal-ignored-with-mask", "mask", "Causal is ignored if a mask is given.",
       "keras-team/keras#23040", step="visible", where="causal and mask",
       visible=lambda up, c: up(c if c.mask is None else c._replace(causal=False)))  # fmt: skip


def _visible_by_any(up: Callable[[Inputs], Array], c: Inputs) -> Array:
    """Return the keys, (..., T, S), that the mask or causal allows; `up` returns those of both."""
    if c.mask is None or not c.causal:
        return up(c)
    return up(c._replace(mask=None)) | up(c._replace(causal=False))


change("mask-or-causal", "mask",
       "A key is visible if the mask or causal allows it, instead of both.",
       step="visible", where="causal and mask", visible=_visible_by_any)  # fmt: skip


@mistake("mask-after-softmax", "mask", "huggingface/pytorch-image-models#2236", step="p",
         where="mask or causal or window")  # fmt: skip
class _MaskAfterSoftmax(Attention):
    """The mask sets weights to 0 after the softmax, without normalising the others again."""

    def hide(self, s: Array, visible: Array) -> Array:
        return s

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.where(live, p, 0), p_sink, lse


change("mask-added-as-number", "mask",
       "The boolean mask is added to the scores as 1 and 0, instead of 0 and −inf.",
       "HKUSTDial/flash-sparse-attention#146", step="visible", where="hidden keys",
       hide=lambda up, s, visible: s if visible.all() else s + visible)  # fmt: skip
change("mask-multiplies-scores", "mask",
       "The mask multiplies the scores: a hidden score becomes 0 and keeps its weight.",
       step="visible", where="hidden keys",
       hide=lambda up, s, visible: np.where(visible, s, 0))  # fmt: skip
change("hidden-score-lowered", "mask",
       "1e4 is subtracted from hidden scores: a fully masked row sees every key.", step="p",
       where="rows that see no key",
       hide=lambda up, s, visible: s - np.where(visible, 0, 1e4))  # fmt: skip
change("first-key-lost", "mask", "The first key is never read.", step="visible", where="s = 0",
       visible=lambda up, c: up(c) & (np.arange(c.k.shape[-2]) > 0))  # fmt: skip
change("last-key-lost", "mask", "The last key is never read.", step="visible", where="s = S − 1",
       visible=lambda up, c: up(c) & (np.arange(c.k.shape[-2]) < c.k.shape[-2] - 1))  # fmt: skip
change("mask-as-length", "mask",
       "The mask is reduced to its number of True, taken as a number of leading keys.",
       "microsoft/onnxruntime#27885", step="visible", where="mask",
       mask=lambda up, mask, c: np.asarray(np.arange(c.k.shape[-2]) < np.broadcast_to(
           mask, (*mask.shape[:-1], c.k.shape[-2])).sum(-1, keepdims=True)))  # fmt: skip


@mistake("mask-of-whole-tiles", "mask", step="visible", where="mask")
class _MaskOfWholeTiles(Attention):
    """A tile of keys is visible as a whole if the mask shows any of its keys."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        S = c.k.shape[-2]
        each = np.broadcast_to(mask, (*mask.shape[:-1], S))
        tiles = np.logical_or.reduceat(each, np.arange(0, S, TILE), axis=-1)
        return np.repeat(tiles, TILE, axis=-1)[..., :S]


change("mask-of-first-sample", "mask", "The mask of the first batch entry is used for all.",
       step="visible", where="b ≥ 1 and mask",
       mask=after(one_for_all(-4)))  # fmt: skip
change("mask-of-first-head", "mask", "The mask of the first head is used for all heads.",
       step="visible", where="h ≥ 1 and mask",
       mask=after(one_for_all(-3)))  # fmt: skip
change("mask-of-last-query", "mask",
       "The mask of the last query is used for all queries, like a padding mask.",
       step="visible", where="t < T − 1 and mask",
       mask=after(one_for_all(-2, -1)))  # fmt: skip
change("mask-transposed", "mask", "A square mask is read with its query and key axes swapped.",
       step="visible", where="T = S and mask", mask=lambda up, mask, c:
           mask.swapaxes(-1, -2) if mask.shape[-2] == mask.shape[-1] else mask)  # fmt: skip


@mistake("mask-tiled-over-heads", "mask", "line/lighthouse#77", step="visible",
         where="B > 1 and mask")  # fmt: skip
class _MaskTiledOverHeads(Attention):
    """Masks of batch entries are tiled instead of repeated over the heads of (B · H, T, S)."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        if mask.ndim < 4 or mask.shape[-3] != 1:
            return mask
        B, H = mask.shape[-4], c.q.shape[-3]
        sample = np.arange(B * H).reshape(B, H) % max(B, 1)
        return np.asarray(mask[..., sample, 0, :, :])


def samples_as_heads(x: Array, c: Inputs) -> Array:
    """Return (B, 1, T, S) as (1, B, T, S) if B = H."""
    fits = x.ndim > 3 and x.shape[-4:-2] == (c.q.shape[-3], 1)
    return x.swapaxes(-3, -4) if fits else x


change("mask-samples-as-heads", "mask", "A mask (B, 1, T, S) is read as (1, B, T, S) if B = H.",
       step="visible", where="b ≠ h and B = H and mask",
       mask=lambda up, mask, c: samples_as_heads(mask, c))  # fmt: skip
change("mask-ignored-in-backward", "mask", "Backward rebuilds the weights without the mask.",
       "Dao-AILab/flash-attention#1947", step="visible", where="backward: mask",
       recompute=lambda up, c: c._replace(mask=None))  # fmt: skip
change("mask-rank-3-as-batch", "mask", "A mask (H, T, S) is read as (B, T, S) if B = H.",
       step="visible", where="b ≠ h and B = H and mask",
       mask=lambda up, mask, c: mask[:, None]
           if mask.ndim == 3 and c.q.shape[:-3] == mask.shape[:1] else mask)  # fmt: skip
change("mask-rank-2-as-padding", "mask",
       "A mask (T, S) is read as a padding mask (B, S) if B = T.", step="visible",
       where="b ≠ t and B = T and mask",
       mask=lambda up, mask, c: mask[:, None, None]
           if mask.ndim == 2 and c.q.shape[:-3] == mask.shape[:1] else mask)  # fmt: skip


@mistake("mask-of-group", "mask", step="visible", where="h % G ≠ 0 and mask")
class _MaskOfGroup(Attention):
    """Query heads that share keys all use the mask of their first head."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        H, K = c.q.shape[-3], c.k.shape[-3]
        if mask.ndim < 3 or mask.shape[-3] == 1 or K == 0:
            return mask
        G = H // K
        return np.asarray(np.take(mask, np.arange(H) // G * G, axis=-3))


@mistake("packed-decode", "heads", step="visible", where="T = 1 and G > 1 and causal or window")
class _PackedDecode(Attention):
    """For one query, heads that share keys are packed as queries, each at its own position."""

    def visible(self, c: Inputs) -> Array:
        H, K = c.q.shape[-3], c.k.shape[-3]
        if c.q.shape[-2] != 1 or K in (0, H):
            return super().visible(c)
        S, G = c.k.shape[-2], H // K
        at = (np.arange(H) % G + S - G)[:, None, None]
        inside = within(np.arange(S) - at, self.sides(c))
        return inside if c.mask is None else inside & self.mask(c.mask, c)
