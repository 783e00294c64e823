"""Mutants: scale, softcap, bias."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.problem import Array
from npattn.testing.mutants.attention import Attention, Call
from npattn.testing.mutants.register import mutant


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
