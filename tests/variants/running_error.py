"""Numbers with a first-order bound on their rounding error, carried through every operation.

    x ± u·e, u the unit roundoff        e of x y = e_x |y| + |x| e_y + |x y|, and so on

A sum of n products has n roundings, in whatever order it is added. Two computations of one formula
each keep within the bound of the formula, also if one multiplies three matrices from the other end:
the magnitudes |a| |b| |c| and the number of roundings are the same.
Source: Higham, "Accuracy and Stability of Numerical Algorithms", section 3.3.
"""

from __future__ import annotations

import numpy as np

LIBRARY = 2
"""Roundings of exp, log and tanh: NumPy's are within one unit in the last place, which is 2 u."""


class Bounded:
    """An array and the bound on its error, in unit roundoffs."""

    __array_ufunc__ = None

    def __init__(self, x, e=0.0):
        self.x = np.asarray(x, np.float64)
        self.e = np.broadcast_to(e, self.x.shape)

    def __getitem__(self, at):
        return Bounded(self.x[at], self.e[at])

    def __add__(self, other):
        other = wrap(other)
        total = self.x + other.x
        return Bounded(total, self.e + other.e + abs(total))

    def __neg__(self):
        return Bounded(-self.x, self.e)

    def __sub__(self, other):
        return self + -wrap(other)

    def __mul__(self, other):
        other = wrap(other)
        product = self.x * other.x
        return Bounded(product, self.e * abs(other.x) + abs(self.x) * other.e + abs(product))

    __rmul__ = __mul__

    def __truediv__(self, other):
        other = wrap(other)
        ratio = self.x / other.x
        return Bounded(ratio, self.e / abs(other.x) + abs(ratio / other.x) * other.e + abs(ratio))

    def __matmul__(self, other):
        other = wrap(other)
        a, b = abs(self.x), abs(other.x)
        e = self.e @ b + a @ other.e + self.x.shape[-1] * (a @ b)
        return Bounded(self.x @ other.x, e)

    @property
    def T(self):
        return Bounded(self.x.swapaxes(-1, -2), self.e.swapaxes(-1, -2))

    def sum(self, axis, keepdims=False):
        keep = {"axis": axis, "keepdims": keepdims}
        axes = (axis,) if isinstance(axis, int) else axis
        n = np.prod([self.x.shape[i] for i in axes])
        return Bounded(self.x.sum(**keep), self.e.sum(**keep) + n * abs(self.x).sum(**keep))

    def exp(self):
        y = np.exp(self.x)
        return Bounded(y, y * (self.e + LIBRARY))

    def log(self):
        y = np.log(self.x)
        return Bounded(y, self.e / self.x + LIBRARY * abs(y))

    def tanh(self):
        y = np.tanh(self.x)
        return Bounded(y, self.e + LIBRARY * abs(y))

    def where(self, condition):
        return Bounded(np.where(condition, self.x, 0), np.where(condition, self.e, 0))

    def sum_to(self, shape):
        """Sum over the axes along which an array of a shape was broadcast."""
        extra = self.x.ndim - len(shape)
        axes = tuple(
            i for i, n in enumerate(self.x.shape) if i < extra or shape[i - extra] == 1 != n
        )
        total = self.sum(axes, keepdims=True)
        return Bounded(total.x.reshape(shape), total.e.reshape(shape))


def wrap(x):
    return x if isinstance(x, Bounded) else Bounded(x)


def join(x, y):
    lead = np.broadcast_shapes(x.x.shape[:-1], y.x.shape[:-1])
    parts = zip(*([np.broadcast_to(a, (*lead, a.shape[-1])) for a in (b.x, b.e)] for b in (x, y)),
                strict=True)  # fmt: skip
    return Bounded(*(np.concatenate(part, -1) for part in parts))


def assert_within(name, got, exact, u=2.0**-53, computed_twice=True):
    """Check a result against a formula; each is computed, so that both may be off by the bound.

    A second-order term of the bound is at most as large as the first while n u is below 1.
    """
    assert got.shape == exact.x.shape, f"{name} has shape {got.shape}, want {exact.x.shape}"
    allowed = (2 if computed_twice else 1) * u * exact.e
    gap = abs(np.asarray(got) - exact.x)
    worst = np.max(gap / np.maximum(allowed, np.finfo(float).tiny), initial=0)
    assert (gap <= allowed).all(), f"{name} is off by {worst:.3g} of the bound"
