"""Pairs of float64 whose sum is one number of about 106 bits, by error-free transformations.

A pair is ``(high, low)`` with ``|low| ≤ ulp(high) / 2``. Each function errs by a few units of 2⁻¹⁰⁴
of its result, as long as nothing overflows, and products are not below 2⁻⁹⁰⁰.
Source: Dekker 1971; Hida, Li and Bailey 2001.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn.problem.arrays import Array

UNIT = 2.0**-102
"""Bound of the relative error of a sum, a product or a quotient."""
EXP = 2.0**-100
"""Bound of the relative error of exp and expm1, and of the absolute error of log."""
SPLITTER = 2.0**27 + 1
# ln 2 in parts of 36 bits, and the rest.
LN2 = (0.6931471805582987, 1.6465949582866463e-12, 3.061840735977512e-24, 4.114010913513131e-35)
BLOCK = 2**16
"""Products of a matrix product that are held at a time: about what a cache of 2 MiB holds."""
HALVINGS = 9
TERMS = 11


class Pair(NamedTuple):
    """Unevaluated sum of two arrays."""

    high: Array
    low: Array

    @property
    def nearest(self) -> Array:
        """The nearest float64."""
        return np.asarray(self.high + self.low)

    def __neg__(self) -> Pair:
        return Pair(-self.high, -self.low)

    def plus(self, other: Pair | Array | float) -> Pair:
        """Return the sum."""
        b = as_pair(other)
        s, e = _two_sum(self.high, b.high)
        t, f = _two_sum(self.low, b.low)
        s, e = _fast_two_sum(s, e + t)
        return Pair(*_fast_two_sum(s, e + f))

    def minus(self, other: Pair | Array | float) -> Pair:
        """Return the difference."""
        return self.plus(-as_pair(other))

    def times(self, other: Pair | Array | float) -> Pair:
        """Return the product."""
        b = as_pair(other)
        p, e = _two_product(self.high, b.high)
        return Pair(*_fast_two_sum(p, e + (self.high * b.low + self.low * b.high)))

    def over(self, other: Pair | Array | float) -> Pair:
        """Return the quotient."""
        b = as_pair(other)
        first = self.high / b.high
        rest = self.minus(b.times(first))
        second = rest.high / b.high
        rest = rest.minus(b.times(second))
        q, e = _fast_two_sum(first, second)
        return Pair(*_fast_two_sum(q, e + rest.high / b.high))

    def times_power(self, power: Array | int) -> Pair:
        """Return the product with 2**power, exactly."""
        return Pair(np.ldexp(self.high, power), np.ldexp(self.low, power))

    def at(self, index: Any) -> Pair:
        """Return both parts at an index."""
        return Pair(self.high[index], self.low[index])


def as_pair(x: Pair | Array | float) -> Pair:
    """Return a number as a pair."""
    if isinstance(x, Pair):
        return x
    high = np.asarray(x, np.float64)
    return Pair(high, np.zeros_like(high))


def select(where: Array, x: Pair, other: Pair | float) -> Pair:
    """Return x where the condition holds, else the other."""
    b = as_pair(other)
    return Pair(np.where(where, x.high, b.high), np.where(where, x.low, b.low))


def total(x: Pair, axis: int) -> Pair:
    """Return the sum along an axis, which stays with size 1; halves are added to each other."""
    high, low = (np.moveaxis(part, axis, 0) for part in x)
    if not len(high):
        high = low = np.zeros((1, *high.shape[1:]))
    pair = Pair(high, low)
    while (n := len(pair.high)) > 1:
        half = n // 2
        summed = pair.at(slice(0, half)).plus(pair.at(slice(half, 2 * half)))
        if n % 2:
            summed = Pair(
                np.concatenate([summed.high, pair.high[-1:]]),
                np.concatenate([summed.low, pair.low[-1:]]),
            )
        pair = summed
    return Pair(*(np.moveaxis(part, 0, axis) for part in pair))


def dot(a: Pair, b: Pair) -> Pair:
    """Return the matrix product (..., M, N) @ (..., N, P), computed in blocks of N."""
    shape = np.broadcast_shapes(a.high.shape[:-2], b.high.shape[:-2])
    result = as_pair(np.zeros((*shape, a.high.shape[-2], b.high.shape[-1])))
    block = max(BLOCK // max(result.high.size, 1), 1)
    for n in range(0, a.high.shape[-1], block):
        rows, columns = np.s_[..., n : n + block, None], np.s_[..., None, n : n + block, :]
        terms = a.at(rows).times(b.at(columns))  # (..., M, block, P)
        result = result.plus(total(terms, -2).at(np.s_[..., 0, :]))
    return result


def expm1(x: Pair) -> Pair:
    """Return exp(x) − 1 for x from −∞ to 709."""
    k, e = _reduce(x)
    return select(k == 0, e, e.plus(1.0).times_power(k).minus(1.0))


def exp(x: Pair) -> Pair:
    """Return exp(x) for x from −∞ to 709; results below 2⁻¹⁰²² are less exact, down to 0."""
    k, e = _reduce(x)
    return e.plus(1.0).times_power(k)


def log(x: Pair) -> Pair:
    """Return the natural logarithm of positive x, by one correction of the float64 logarithm."""
    first = np.log(x.high)
    rest = x.times(exp(as_pair(-first))).minus(1.0)
    return as_pair(first).plus(rest.minus(rest.high**2 / 2))


def _reduce(x: Pair) -> tuple[Array, Pair]:
    """Return k and exp(x − k ln 2) − 1."""
    x = Pair(np.maximum(x.high, -800.0), np.where(x.high < -800, 0.0, x.low))
    k = np.rint(x.high / np.log(2.0))
    r = x
    for part in LN2:
        r = r.minus(Pair(*_two_product(k, np.asarray(part))))
    r = r.times_power(-HALVINGS)
    e = as_pair(0.0)
    for inverse in reversed(_INVERSES):  # Taylor: r (1 + r/2 (1 + r/3 (…)))
        e = r.times(inverse).times(e.plus(1.0))
    for _ in range(HALVINGS):  # exp(2r) − 1 = e (2 + e)
        e = e.times(e.plus(2.0))
    return k.astype(np.int64), e


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _fast_two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    s = a + b
    return s, b - (s - a)


def _split(a: Array) -> tuple[Array, Array]:
    c = SPLITTER * a
    high = c - (c - a)
    if not np.isfinite(high).all():  # from 2⁹⁹⁶ on: split a smaller number
        small = a * 2.0**-28
        c = SPLITTER * small
        high = np.where(np.isfinite(high), high, (c - (c - small)) * 2.0**28)
    return high, a - high


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    p = a * b
    (ah, al), (bh, bl) = _split(a), _split(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


_INVERSES = [as_pair(1.0).over(float(n)) for n in range(1, TERMS)]
