"""Mutants: gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.problem import Array
from npattn.testing.mutants.attention import Attention, Call
from npattn.testing.mutants.register import mutant


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
