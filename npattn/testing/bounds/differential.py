"""Bounds on the error of differential attention: those of two softmaxes, carried on.

    y = o1 − λ o2           e_y = e_1 + |λ| e_2 + roundings, a stored P1 − λ P2 among them
    r = y / s               e_s ≤ √(mean e_y²), a norm; and back, through the norm and each softmax

The bounds of each softmax are those of `npattn.testing.bounds.allowed`. The effect of an error of a
cotangent is bounded by the sums of its backward with absolute values. docs/differential.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.engines import dense
from npattn.engines.score_mod import slope
from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.bounds.allowed import bounds
from npattn.testing.bounds.rounding import Rounding, Units
from npattn.variants.differential import DifferentialForward, backward
from npattn.variants.differential.api import beside


def differential_bounds(
    fwd: DifferentialForward, dtype: Any, dout: Array | None = None
) -> dict[str, tuple[Array, Array]]:
    """Return every result by name, exact, with the largest error of an implementation.

    Parameters
    ----------
    fwd : DifferentialForward
        Result of `npattn.variants.differential.forward` in float64, of arrays with a head axis. A
        bias is an array.
    dtype : dtype
        Of the arrays as the implementation gets them.
    dout : float64 array, optional
        Cotangent; without it there are no gradients.

    Returns
    -------
    dict of name → (exact, allowed)
        out, and with dout: dq1, dk1, dq2, dk2, dv, dlam, dbias, dsinks, dnorm_weight.
    """
    at = _DifferentialBounds(fwd, dtype)
    results = {"out": (fwd.out, at.e_out)}
    if dout is None:
        return results
    exact = backward(fwd, dout)
    errors = at.backward(dout)
    values = {"d" + name: value for name, value in vars(exact).items() if value is not None}
    return results | {name: (value, errors[name]) for name, value in values.items()}


class _DifferentialBounds:
    """Errors of y, of the root mean square and of the output; then of gradients."""

    def __init__(self, fwd: DifferentialForward, dtype: Any) -> None:
        self.fwd, self.dtype = fwd, dtype
        self.units = units = Units.of(Rounding.undeclared(dtype), dtype)
        self.u, self.low = units.u + 2.0**-53, units.low.u  # with the oracle's own rounding
        self.lam = abs(beside(fwd.lam, fwd.out))
        self.problems = (fwd.first.problem, fwd.second.problem)
        self.o2 = fwd.second.out
        e1, self.e2 = (bounds(p, dtype)["o"] for p in self.problems)
        # Σ (P1 + |λ| P2) |v|: what a stored difference of weights is rounded by, and its sum.
        sizes = [_weights(p) @ _values(p) for p in self.problems]
        self.size2 = sizes[1]
        stored = (2 * self.low + 4 * self.u) * (sizes[0] + self.lam * sizes[1])
        self.e_y = e1 + self.lam * self.e2 + stored
        self.e_y += units.low.eta * abs(_values(self.problems[0])).sum(-2, keepdims=True)
        if fwd.norm is None:
            self.e_out = abs(fwd.out_scale) * self.e_y + 2 * self.low * abs(fwd.out)
            return
        E = fwd.out.shape[-1]
        self.unit, self.s = abs(fwd.norm.unit), fwd.norm.size
        # A root mean square is a norm: it moves by no more than that of the error.
        self.e_s = np.sqrt((self.e_y**2).mean(-1, keepdims=True))
        self.e_s += ((E / 2 + 4) * self.u + 2 * self.low) * self.s
        # The root of the mean square and eps is at least that of eps, in any arithmetic.
        least = np.sqrt(fwd.norm_eps) * (1 - (E / 2 + 4) * self.u - 2 * self.low)
        self.least = np.maximum(self.s - self.e_s, max(least, 0))
        with np.errstate(divide="ignore", invalid="ignore"):
            self.e_unit = (self.e_y + self.unit * self.e_s) / self.least
        self.e_unit = np.where(self.least > 0, self.e_unit, np.inf)
        weight = 1.0 if fwd.norm_weight is None else abs(fwd.norm_weight)
        self.e_out = abs(fwd.out_scale) * weight * self.e_unit
        self.e_out += (4 * self.u + 3 * self.low) * abs(fwd.out)

    def backward(self, dout: Array) -> dict[str, Array]:
        """Errors of all gradients, by name, for dout (..., H, T, E)."""
        fwd = self.fwd
        dy, e_dy, e_weight = self._through_norm(dout)
        total = abs(dy) * self.e2 + e_dy * (abs(self.o2) + self.e2)
        count = dy.size // max(fwd.lam.size, 1) + self.problems[0].S
        total = total + (count * self.u + 3 * self.low) * abs(dy) * self.size2
        shape = fwd.lam.shape
        dlam = total.sum() if shape == () else total.sum((-1, -2)).reshape(-1, *shape).sum(0)
        lam = beside(fwd.lam, fwd.out)
        one = self._attention(0, dy, e_dy)
        two = self._attention(1, -lam * dy, self.lam * e_dy + (self.u + self.low) * abs(lam * dy))
        errors = {"dlam": np.asarray(dlam), "dnorm_weight": e_weight}
        errors |= {f"d{n}{i}": e["d" + n] for i, e in ((1, one), (2, two)) for n in "qk"}
        errors |= {n: one[n] + two[n] for n in ("dv", "dbias", "dsinks") if n in one}
        # Without eps an output of 0 has no direction: its error is inf, and inf · 0 is unknown too.
        return {n: np.where(np.isnan(x), np.inf, x) for n, x in errors.items()}

    def _through_norm(self, dout: Array) -> tuple[Array, Array, Array]:
        """Gradient of y with its error, and the error of norm_weight's, for dout (..., H, T, E)."""
        fwd, u, low = self.fwd, self.u, self.low
        du = fwd.out_scale * dout * (1.0 if fwd.norm_weight is None else fwd.norm_weight)
        if fwd.norm is None:
            return du, (2 * u + low) * abs(du), np.zeros(0)
        E, size = du.shape[-1], abs(du)
        rel = 4 * u + 2 * low
        mean = (size * self.unit).mean(-1, keepdims=True)
        e_mean = (size * self.e_unit).mean(-1, keepdims=True) + ((E + 4) * u + rel) * mean
        inner = rel * (size + self.unit * mean) + self.e_unit * mean
        inner = inner + (self.unit + self.e_unit) * e_mean
        dy = (du - fwd.norm.unit * (du * fwd.norm.unit).mean(-1, keepdims=True)) / self.s
        e_dy = (inner + abs(dy) * self.e_s) / self.least + (2 * u + low) * abs(dy)
        scaled = abs(fwd.out_scale * dout)
        rows = tuple(range(dout.ndim - 1))
        count = dout.size // max(E, 1)
        e_weight = scaled * self.e_unit + (count * u + 3 * low) * scaled * self.unit
        return dy, e_dy, e_weight.sum(rows)

    def _attention(self, i: int, do: Array, e_do: Array) -> dict[str, Array]:
        """Errors of the gradients of one softmax for a cotangent with an error."""
        p = self.problems[i]
        bounds_of_softmax = bounds(p, self.dtype, dout=do)
        moved = _propagate(p, e_do)
        # v, bias and sinks add the gradients of both softmaxes.
        sizes, rel = _propagate(p, abs(do)), 2 * (self.u + self.low)
        alone = ("dq", "dk")
        return {
            n: bounds_of_softmax[n] + x + (0 if n in alone else rel * sizes[n])
            for n, x in moved.items()
        }


def _weights(p: Problem) -> Array:
    """Weights after dropout."""
    residuals = dense.forward(p)[2]
    return residuals.p if residuals.keep is None else residuals.p * residuals.keep


def _values(p: Problem) -> Array:
    return abs(dense.operands(p)[2])


def _propagate(p: Problem, e: Array) -> dict[str, Array]:
    """Bound on the gradients for any cotangent of absolute value at most e, (..., H, T, E)."""
    q, k, v, tanh, capped, live, w, w_sink, keep, _ = dense.forward(p)[2]
    used = w if keep is None else w * keep
    dp = e @ abs(v).swapaxes(-1, -2)
    dp = np.where(live, dp if keep is None else dp * keep, 0)
    mean = (w * dp).sum(-1, keepdims=True)
    ds = w * (dp + mean)
    dx = ds if capped is None else ds * abs(slope(p, capped))
    dx = abs(p.scale or 0) * (dx if tanh is None else dx * (1 - tanh**2))
    errors = {
        "dq": sum_to(dx @ abs(k), p.q.shape),
        "dk": dense.sum_shared(dx.swapaxes(-1, -2) @ abs(q), p.K, p.k.shape),
        "dv": dense.sum_shared(used.swapaxes(-1, -2) @ e, p.K, p.v.shape),
    }
    if p.bias is not None:
        errors["dbias"] = p.bias_gradient(ds)
    if w_sink is not None:
        errors["dsinks"] = sum_to(w_sink * mean, (p.H, 1, 1))[:, 0, 0]
    return errors
