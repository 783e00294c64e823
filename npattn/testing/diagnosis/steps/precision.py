"""Steps whose inputs or results are rounded to a narrower dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.problem.arrays import Array
from npattn.testing.diagnosis.steps.step import overrides

TF32_BITS = 13
"""Last bits of the fraction of float32 that tf32 does not have."""


def _to_tf32(x: Array) -> Array:
    """Return float64 numbers rounded to tf32: to nearest, ties away from 0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    half = np.uint32(1 << (TF32_BITS - 1))
    whole = np.uint32(0xFFFFFFFF << TF32_BITS & 0xFFFFFFFF)
    rounded = ((bits + half) & whole).view(np.float32).astype(np.float64)
    return np.where(np.isfinite(x), rounded, x)


def _to_bfloat16(x: Array) -> Array:
    """Return float64 numbers rounded to bfloat16 by way of float32, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    rounded = ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isfinite(x), rounded.astype(np.float64), x)


def _through(dtype: Any) -> Any:
    return lambda x: np.asarray(x).astype(dtype).astype(np.float64)


ROUNDINGS: dict[str, tuple[str, Any]] = {
    "float32": ("precision of float64", _through(np.float32)),
    "tf32": ("precision", _to_tf32),
    "float16": ("precision", _through(np.float16)),
    "bfloat16": ("precision", _to_bfloat16),
}
"""Dtype → the problems on which a rounding to it is one, and the rounding."""


def _methods_that_round(rounding: Any) -> dict[str, dict[str, Any]]:
    """Return, by what is rounded, the methods that round it."""

    def read(self: Attention, x: Array) -> Array:
        return np.asarray(rounding(Attention.read(self, x)))

    def product(self: Attention, c: Inputs) -> Array:
        return np.asarray(rounding(Attention.product(self, c)))

    def final(self: Attention, x: Array, visible: Array, c: Inputs) -> Array:
        return np.asarray(rounding(Attention.final(self, x, visible, c)))

    def softmax(self: Attention, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = Attention.softmax(self, s, c, live)
        return rounding(p), p_sink, lse

    def masked_matmul(self: Attention, w: Array, x: Array, live: Array) -> Array:
        return Attention.masked_matmul(self, rounding(w), rounding(x), live)

    def lse(self: Attention, pivot: Array, total: Array, e_sink: Array) -> Array:
        return np.asarray(rounding(Attention.lse(self, pivot, total, e_sink)))

    return {
        "q, k and v are rounded": {"read": read},
        "q kᵀ is rounded": {"product": product},
        "the final scores are rounded": {"final": final},
        "the weights are rounded": {"softmax": softmax},
        "the factors of each product with v, dout, q and k are rounded": {
            "masked_matmul": masked_matmul
        },
        "lse is rounded": {"lse": lse},
    }


for _name, (_topic, _rounding) in ROUNDINGS.items():
    for _what, _methods in _methods_that_round(_rounding).items():
        overrides(_topic, f"{_what} to {_name}", **_methods)
