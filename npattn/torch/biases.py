"""Biases whose parameter is a tensor, differentiable by autograd; others are those of npattn.

A bias of a tensor is formed as one tensor (H, T, S). Without a gradient, an array in its place is
cheaper: then each tile is formed where it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from npattn import biases
from npattn.biases import Bias, dense, of
from npattn.errors import DtypeError
from npattn.problem.arrays import BiasLike
from npattn.problem.options import Alignment
from npattn.torch.tensors import short_name, to_tensor

__all__ = ["Bias", "TensorBias", "alibi", "dense", "of", "relative"]

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class TensorBias:
    """Sum of biases, one of which has a tensor for its parameter; accepted as ``bias=``.

    The other side of ``+`` may be a tensor, an array or a bias of `npattn.biases`.
    """

    terms: tuple[Any, ...]
    __array_ufunc__ = None  # array + bias is left to the bias

    def __add__(self, other: Any) -> TensorBias:
        return TensorBias((*self.terms, *getattr(other, "terms", (other,))))

    __radd__ = __add__

    def to_tensor(self, T: int, S: int, device: torch.device) -> Tensor:
        """Return the bias of T queries and S keys, which broadcasts against (H, T, S)."""
        total: Any = 0
        for term in self.terms:
            if isinstance(term, (_Alibi, _Relative)):
                term = term.to_tensor(T, S, device)
            elif isinstance(term, BiasLike):
                term = term.to_array(T, S)
            total = total + (term if isinstance(term, Tensor) else to_tensor(term, device))
        return total  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Alibi:
    slopes: Tensor
    alignment: Alignment

    def to_tensor(self, T: int, S: int, device: torch.device) -> Tensor:
        distance = biases.alibi(np.ones(1), alignment=self.alignment).to_array(T, S)
        return self.slopes[:, None, None] * to_tensor(distance, device)


@dataclass(frozen=True, eq=False)
class _Relative:
    table: Tensor
    options: dict[str, Any]

    def to_tensor(self, T: int, S: int, device: torch.device) -> Tensor:
        numbers = np.arange(float(len(self.table)))[:, None]
        buckets = biases.relative(numbers, **self.options).to_array(T, S)[0]
        return self.table[to_tensor(buckets, device).long()].movedim(-1, 0)


def alibi(
    slopes: Tensor | ArrayLike, *, alignment: Alignment = "bottom_right"
) -> Bias | TensorBias:
    """Bias that falls linearly with the distance of a key, as `npattn.biases.alibi`.

    Parameters
    ----------
    slopes : float tensor (H,), int or float array_like (H,)
        A tensor gets its gradient by autograd.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"

    Returns
    -------
    TensorBias, or Bias for what is no tensor

    Raises
    ------
    OptionError, DtypeError, ShapeError
        As of `npattn.biases.alibi`.
    """
    if not isinstance(slopes, Tensor):
        return biases.alibi(slopes, alignment=alignment)
    _check("slopes", slopes)
    biases.alibi(np.ones(tuple(slopes.shape)), alignment=alignment)  # checks it
    return TensorBias((_Alibi(slopes, alignment),))


def relative(
    table: Tensor | ArrayLike,
    *, max_distance: int = 128, bidirectional: bool = True, alignment: Alignment = "bottom_right",
) -> Bias | TensorBias:  # fmt: skip
    """Bias looked up by the distance of a key (T5), as `npattn.biases.relative`.

    Parameters
    ----------
    table : float tensor or array_like (num_buckets, H)
        A tensor gets its gradient by autograd.
    max_distance, bidirectional, alignment
        As of `npattn.biases.relative`.

    Returns
    -------
    TensorBias, or Bias for what is no tensor

    Raises
    ------
    OptionError, DtypeError, ShapeError
        As of `npattn.biases.relative`.
    """
    options: dict[str, Any] = {"max_distance": max_distance, "bidirectional": bidirectional}
    options |= {"alignment": alignment}
    if not isinstance(table, Tensor):
        return biases.relative(table, **options)
    _check("table", table)
    biases.relative(np.ones(tuple(table.shape)), **options)  # checks it
    return TensorBias((_Relative(table, options),))


def _check(name: str, parameter: Tensor) -> None:
    if not parameter.is_floating_point():
        raise DtypeError(f"{name} is {short_name(parameter.dtype)}, must be real and floating")
