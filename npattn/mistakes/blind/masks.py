"""Mistakes in the mask, causal and the window."""

from __future__ import annotations

import numpy as np

from npattn.mistakes.attention import TILE, Attention, Inputs, within
from npattn.mistakes.register import change, mistake, one_result
from npattn.problem.arrays import Array
from npattn.problem.options import Window


@mistake("blind-mask-rank-3-as-batch", "mask", step="visible", where="b ≠ h and B = H and mask")
class MaskRank3AsBatch(Attention):
    """A mask (H, T, S) is read as (B, T, S) if B = H."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        lead = c.q.shape[:-3]
        return mask[:, None] if mask.ndim == 3 and lead == mask.shape[:1] else mask


@mistake("blind-mask-rank-2-as-padding", "mask", step="visible", where="b ≠ t and B = T and mask")
class MaskRank2AsPadding(Attention):
    """A mask (T, S) is read as a padding mask (B, S) if B = T."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        lead = c.q.shape[:-3]
        return mask[:, None, None] if mask.ndim == 2 and lead == mask.shape[:1] else mask


@mistake("blind-mask-of-group", "mask", step="visible", where="h % G ≠ 0 and mask")
class MaskOfGroup(Attention):
    """Query heads that share keys all use the mask of their first head."""

    def mask(self, mask: Array, c: Inputs) -> Array:
        H, K = c.q.shape[-3], c.k.shape[-3]
        if mask.ndim < 3 or mask.shape[-3] == 1 or K == 0:
            return mask
        G = H // K
        return np.asarray(np.take(mask, np.arange(H) // G * G, axis=-3))


change("blind-window-ignored-with-mask", "window", "The window is not applied if there is a mask.",
       step="visible", where="window and mask",
       sides=lambda up, c: up(c if c.mask is None else c._replace(window=None)))  # fmt: skip
change("blind-causal-offset-clamped", "causal",
       "The causal offset S − T is clamped at 0: with T > S the first query sees a key.",
       step="visible", where="T > S and causal or window",
       diagonal=lambda up, T, S: np.arange(T)[:, None] + max(S - T, 0))  # fmt: skip
change("blind-window-half-open-ignored", "window", "A window with None on one side is ignored.",
       step="visible", where="window", sides=lambda up, c:
           up(c._replace(window=None) if None in (c.window or ()) else c))  # fmt: skip


@mistake("blind-window-before-causal", "window", step="visible", where="causal and window")
class WindowBeforeCausal(Attention):
    """With causal, the right side of the window is kept instead of limited to 0."""

    def sides(self, c: Inputs) -> Window:
        left, right = c.window or (None, None)
        return left, 0 if c.causal and right is None else right


change("blind-window-left-falsy", "window", "A left window side of 0 is treated as None.",
       step="visible", where="window",
       sides=one_result(0, lambda left, c: left or None))  # fmt: skip


@mistake("blind-window-top-left", "window", step="visible", where="T ≠ S and window")
class WindowTopLeft(Attention):
    """Without causal, the window is aligned top-left."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        if c.causal or c.window is None:
            return super().visible(c)
        inside = within(np.arange(S) - np.arange(T)[:, None], self.sides(c))
        return inside if c.mask is None else inside & self.mask(c.mask, c)


@mistake("blind-window-in-int32", "window", step="visible", where="window")
class WindowInInt32(Attention):
    """Window ends are 32-bit sums: a side near 2³¹ wraps around and hides every key."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        at, (left, right) = self.diagonal(T, S), self.sides(c)
        first = np.zeros((T, 1)) if left is None else (at - left % 2**32).astype(np.int32)
        last = np.full((T, 1), S) if right is None else (at + right % 2**32).astype(np.int32)
        inside = (first <= np.arange(S)) & (np.arange(S) <= last)
        return inside if c.mask is None else inside & self.mask(c.mask, c)


@mistake(
    "blind-tile-ends-at-first-query",
    "window",
    step="visible",
    where="t % 16 > 0 and S > 16 and causal or window",
)
class TileEndsAtFirstQuery(Attention):
    """A tile of queries stops at the last key tile that its first query sees."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        right, inside = self.sides(c)[1], super().visible(c)
        if right is None:
            return inside
        first = self.diagonal(T, S)[np.arange(T) // TILE * TILE]
        return np.asarray(inside & (np.arange(S) < ((first + right) // TILE + 1) * TILE))
