"""Mutants: causal, window, mask."""

from __future__ import annotations

import numpy as np

from npattn.problem import Array, Window
from npattn.testing.mutants.attention import Attention, Call
from npattn.testing.mutants.register import mutant


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
