"""Sums and products as hardware computes them: in an order, each operation rounded to a format.

Arrays are added one at a time, so that the order is the one that is named; "blas" leaves it to
NumPy. `fit` is applied to the result of each operation: it may flush subnormals or truncate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Literal

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy, by name too
import numpy as np

from npattn.problem.arrays import Array, cast, round_to_odd

__all__ = ["Fit", "Order", "cast", "dot", "flush", "store_as", "sum_last", "truncate"]

Order = Literal["blas", "first", "last", "pairwise", "kahan"]
Fit = Callable[[Array], Array]


def dot(a: Array, b: Array, order: Order, block: int | None, fit: Fit) -> Array:
    """Return a @ b; with a block, products are summed in blocks of that many first."""
    if order == "blas":
        return fit(a @ b)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    zero = np.zeros((*lead, a.shape[-2], b.shape[-1]), a.dtype)
    return _fold(
        [fit(a[..., i, None] * b[..., None, i, :]) for i in range(a.shape[-1])],
        zero,
        order,
        block,
        fit,
    )


def sum_last(x: Array, order: Order, block: int | None, fit: Fit) -> Array:
    """Sum x along its last axis, which is kept."""
    if order == "blas":
        return fit(x.sum(-1, keepdims=True))
    zero = np.zeros((*x.shape[:-1], 1), x.dtype)
    return _fold([x[..., i : i + 1] for i in range(x.shape[-1])], zero, order, block, fit)


def _fold(terms: Sequence[Array], zero: Array, order: Order, block: int | None, fit: Fit) -> Array:
    if block is not None and len(terms) > block:
        blocks = [terms[i : i + block] for i in range(0, len(terms), block)]
        terms = [_fold(part, zero, order, None, fit) for part in blocks]
    if order == "pairwise":
        return _pairwise(terms, fit) if terms else zero
    if order == "kahan":
        return _kahan(terms, zero, fit)
    terms = terms[::-1] if order == "last" else terms
    return reduce(lambda total, term: fit(total + term), terms, zero)


def _pairwise(terms: Sequence[Array], fit: Fit) -> Array:
    while len(terms) > 1:
        odd = terms[len(terms) // 2 * 2 :]
        terms = [fit(x + y) for x, y in zip(terms[::2], terms[1::2], strict=False)] + list(odd)
    return terms[0]


def _kahan(terms: Sequence[Array], zero: Array, fit: Fit) -> Array:
    """Sum with compensation: the next term makes up for what an addition loses."""
    total, lost = zero, zero
    for term in terms:
        more = fit(term - lost)
        after = fit(total + more)
        # After an overflow or a NaN there is nothing to compensate.
        lost = np.where(np.isfinite(after), fit(fit(after - total) - more), 0)
        total = after
    return total


def flush(x: Array) -> Array:
    """Set results below the least normal number to 0."""
    return np.where(abs(x) < np.finfo(x.dtype).tiny, x.dtype.type(0), x)


def truncate(x: Array) -> Array:
    """Truncate float64 to float32, as some tensor cores add."""
    near = np.asarray(x.astype(np.float32))
    return np.where(abs(near) > abs(x), np.nextafter(near, np.float32(0)), near).astype(x.dtype)


def store_as(x: Array, format: str) -> Array:
    """Round x to a format and read it back."""
    if format == "tf32":
        return _tf32(round_to_odd(x)).astype(x.dtype)
    return cast(x, np.dtype(format)).astype(x.dtype)


def _tf32(x: Array) -> Array:
    """Round float32 to 10 bits of its fraction, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)
