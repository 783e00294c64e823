"""Mistakes in the window."""

import numpy as np

from npattn.mistakes.attention import TILE, Attention, Inputs, within
from npattn.mistakes.register import change, mistake, one_result
from npattn.problem.arrays import Array

change("window-one-wider", "window", "The window reaches one key too far to the left.",
       "huggingface/transformers#39408", step="visible", where="window",
       sides=one_result(0, lambda n, c: None if n is None else n + 1))  # fmt: skip
change("window-one-narrower", "window", "The window ends one key too early on the left.",
       "NVIDIA/TransformerEngine#1212", step="visible", where="window",
       sides=one_result(0, lambda n, c: None if n is None else n - 1))  # fmt: skip
change("window-right-ignored", "window", "The right side of the window is ignored.",
       step="visible", where="window",
       sides=one_result(1, lambda x, c: 0 if c.causal else None))  # fmt: skip
change("window-left-ignored", "window", "The left side of the window is ignored.", step="visible",
       where="window", sides=one_result(0, lambda n, c: None))  # fmt: skip
change("window-one-wider-on-the-right", "window",
       "The window reaches one key too far to the right.", step="visible", where="window",
       sides=one_result(1, lambda x, c: x if c.causal or x is None else x + 1))  # fmt: skip
change("window-one-narrower-on-the-right", "window",
       "The window ends one key too early on the right.", step="visible", where="window",
       sides=one_result(1, lambda x, c: x if c.causal or x is None else x - 1))  # fmt: skip
change("window-ignored", "window", "The window is ignored.", step="visible", where="window",
       sides=lambda up, c: up(c._replace(window=None)))  # fmt: skip
change("window-symmetric", "window",
       "The left side of the window is used for the right side too.", step="visible",
       where="window", sides=lambda up, c:
           up(c) if c.causal or up(c)[0] is None else (up(c)[0], up(c)[0]))  # fmt: skip
change("window-exchanged", "window", "The left and right sides of the window are swapped.",
       step="visible", where="window", sides=lambda up, c:
           up(c if c.window is None else c._replace(window=c.window[::-1])))  # fmt: skip
change("window-ahead-without-causal", "window",
       "Without causal, the left side of the window reaches to the right instead.",
       "vllm-project/vllm#31406", step="visible", where="window", sides=lambda up, c:
           up(c) if c.causal or up(c)[0] is None else (0, up(c)[0]))  # fmt: skip
change("window-zero-is-none", "window",
       "A window side of 0 is treated as None (unlimited).", step="visible", where="window",
       sides=lambda up, c:
           up(c._replace(window=tuple(x or None for x in c.window or ()) or None)))  # fmt: skip


@mistake("window-start-negative", "window", step="visible", where="window")
class _WindowStartNegative(Attention):
    """A negative window start is an index from the end, as in Python slices."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        left_keys, _ = self.sides(c)
        start = self.diagonal(T, S) - (np.inf if left_keys is None else left_keys)
        return super().visible(c) & (np.arange(S) >= np.where(start < 0, start + S, start))


change("window-top-left", "window",
       "The window is aligned top-left, while causal is aligned bottom-right.", step="visible",
       where="T ≠ S and window",
       visible=lambda up, c: up(c._replace(window=None)) & within(
           np.arange(c.k.shape[-2]) - np.arange(c.q.shape[-2])[:, None],
           c.window or (None, None)))  # fmt: skip


@mistake("window-of-whole-tiles", "window", step="visible", where="window")
class _WindowOfWholeTiles(Attention):
    """The tile in which the window starts is visible as a whole."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        left_keys, right_keys = self.sides(c)
        begin = self.diagonal(T, S) - (left_keys or 0)
        open_left = super().visible(c._replace(window=(None, right_keys)))
        return open_left & (left_keys is None or np.arange(S) // TILE >= begin // TILE)


change("window-ignored-for-one-query", "window",
       "The window is ignored for a single query (decoding).", "karpathy/nanochat#452",
       step="visible", where="T = 1 and window",
       visible=lambda up, c: up(c._replace(window=None) if c.q.shape[-2] == 1 else c))  # fmt: skip
change("window-ignored-without-causal", "window", "The window is ignored without causal.",
       step="visible", where="window",
       visible=lambda up, c: up(c if c.causal else c._replace(window=None)))  # fmt: skip
change("window-ignored-with-mask", "window", "The window is ignored if a mask is given.",
       step="visible", where="window and mask",
       visible=lambda up, c: up(c if c.mask is None else c._replace(window=None)))  # fmt: skip
change("window-replaces-mask", "window", "The mask is ignored if a window is given.",
       "huggingface/transformers#31670", step="visible", where="mask and window",
       visible=lambda up, c: up(c if c.window is None else c._replace(mask=None)))  # fmt: skip
change("window-replaces-causal", "window", "Causal is ignored if a window is given.",
       step="visible", where="causal and window",
       visible=lambda up, c: up(c if c.window is None else c._replace(causal=False)))  # fmt: skip
change("window-ignored-in-backward", "window", "Backward rebuilds the weights without the window.",
       "meta-pytorch/MSLK#263", step="visible", where="backward: window",
       recompute=lambda up, c: c._replace(window=None))  # fmt: skip
change("window-mirrored-in-backward", "window",
       "Backward swaps the left and right sides of the window.",
       step="visible", where="backward: window", recompute=lambda up, c:
           c if c.window is None else c._replace(window=c.window[::-1]))  # fmt: skip
change("window-half-open-ignored", "window", "A window with None on one side is ignored.",
       step="visible", where="window", sides=lambda up, c:
           up(c._replace(window=None) if None in (c.window or ()) else c))  # fmt: skip
change("window-before-causal", "window",
       "With causal, the right side of the window is kept instead of limited to 0.", step="visible",
       where="causal and window",
       sides=lambda up, c:
           up(c._replace(causal=c.causal and (c.window or (None, None))[1] is None)))  # fmt: skip
change("window-left-falsy", "window", "A left window side of 0 is treated as None.",
       step="visible", where="window",
       sides=one_result(0, lambda n, c: n or None))  # fmt: skip


@mistake("window-top-left-without-causal", "window", step="visible", where="T ≠ S and window")
class _WindowTopLeftWithoutCausal(Attention):
    """Without causal, the window is aligned top-left."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        if c.causal or c.window is None:
            return super().visible(c)
        inside = within(np.arange(S) - np.arange(T)[:, None], self.sides(c))
        return inside if c.mask is None else inside & self.mask(c.mask, c)


@mistake("window-in-int32", "window", step="visible", where="window")
class _WindowInInt32(Attention):
    """Window ends are 32-bit sums: a side near 2³¹ wraps around and hides every key."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        at, (before, after) = self.diagonal(T, S), self.sides(c)
        first = np.zeros((T, 1)) if before is None else (at - before % 2**32).astype(np.int32)
        last = np.full((T, 1), S) if after is None else (at + after % 2**32).astype(np.int32)
        inside = (first <= np.arange(S)) & (np.arange(S) <= last)
        return inside if c.mask is None else inside & self.mask(c.mask, c)


@mistake("tile-ends-at-first-query", "window", step="visible",
         where="t % 16 > 0 and causal or window")  # fmt: skip
class _TileEndsAtFirstQuery(Attention):
    """A tile of queries stops at the last key tile that its first query sees."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        right_keys, inside = self.sides(c)[1], super().visible(c)
        if right_keys is None:
            return inside
        first = self.diagonal(T, S)[np.arange(T) // TILE * TILE]
        return np.asarray(inside & (np.arange(S) < ((first + right_keys) // TILE + 1) * TILE))
