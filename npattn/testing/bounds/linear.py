"""Bounds on the error of linear attention: sums of absolute values times counts of roundings.

    y = Σ q a k v        |error| ≤ (1 + r) M(|q| + δq, |k| + δk, |v|) − M(|q|, |k|, |v|)

Results and gradients of the recurrence are sums of products of features, decays, values and
cotangents. M is the same sum of absolute values: it grows in each argument, so that errors δ of the
arguments and r, the relative error of a product in any order of the sum, bound the error of every
form, recurrent and chunked. By the delta rule v is what is written. docs/linear.md has the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from npattn.errors import DtypeError
from npattn.problem.arrays import Array, sum_to
from npattn.testing.bounds.delta import (
    Written,
    add_cotangents,
    add_readers,
    interleave,
    merge,
    split,
)
from npattn.testing.bounds.rounding import Rounding, Units
from npattn.variants.linear import FEATURE_MAPS, FeatureMap, LinearForward, backward, recurrent
from npattn.variants.linear.api import operands_of
from npattn.variants.linear.recurrent import LinearOperands

VAST = 1e100
"""Error of a quotient whose divisor may be 0: finite, so that 0 of it is 0, and inf in the end."""

STORES = 8
"""Arrays of the input's dtype on the way to a gradient: features of q and k, scale · q, the product
of both or a state, y, dn, its product with v or a state, and the gradient of the features."""


def linear_bounds(
    fwd: LinearForward,  # result of `npattn.variants.linear.forward` in float64
    dtype: Any,  # of the arrays as the implementation gets them: float64, float32 or bfloat16
    dout: Array | None = None,  # cotangents; without any there are no gradients
    dstate: Array | None = None,
    dnormaliser: Array | None = None,
) -> dict[str, tuple[Array, Array]]:
    """Return every result by name, exact, with the largest error of an implementation.

    Returns
    -------
    dict of name → (exact, allowed)
        out, state, normaliser, dq, dk, dv, dlog_decay, dbeta, dinitial_state, dinitial_normaliser.
    """
    if np.dtype(dtype) not in (np.dtype(d) for d in ("f8", "f4", "bfloat16")):
        raise DtypeError(f"dtype is {dtype}, must be float64, float32 or bfloat16")
    bounds = _LinearBounds(fwd, Units.of(Rounding.undeclared(dtype), dtype))
    results = bounds.forward()
    if not (dout is None and dstate is None and dnormaliser is None):
        results |= bounds.backward(dout, dstate, dnormaliser)
    return {n: (exact, np.where(e < VAST, e, np.inf)) for n, (exact, e) in results.items()}


class _LinearBounds:
    """Operands of one problem, their absolute values, and these with their errors."""

    def __init__(self, fwd: LinearForward, units: Units) -> None:
        self.fwd, self.p, self.u = fwd, fwd.problem, units
        self.inside = 8 * units.u + units.exp + 2 * units.low.u
        p, value = self.p, self.p.map.value
        self.x: LinearOperands = fwd.residuals[0]
        self.least = self._majorant(lambda x: abs(value(x)))
        self.most = self._majorant(lambda x: abs(value(x)) + self._feature_error(x))
        sums = 2 * p.D + p.E + 2 * p.S + p.group * p.T + 12
        decay = (p.S + 2) * (units.exp + units.u)
        if p.log_decay is not None:
            spread = abs(self.x.g).sum(-2).max(initial=0.0)
            decay += (2 * p.S + 4) * units.u * float(spread)
        self.rel = float(np.expm1(sums * units.u + STORES * units.low.u + decay))
        self.oracle_rel = sums * 2.0**-52  # of the oracle itself, and of these bounds
        self.written: Written | None = None
        if self.x.beta is not None:
            self.written = Written(self.x, self.most)
            u = abs(self.written.u)
            self.least, self.most = add_readers(self.least, u), add_readers(self.most, u)

    def _majorant(self, value: Callable[[Array], Array]) -> LinearOperands:
        """Operands of absolute values, with these features."""
        p = self.p

        def size(x: Array | None) -> Any:
            return None if x is None else abs(x.astype(np.float64))

        changes: dict[str, Any] = {n: size(getattr(p, n)) for n in ("v", "initial_state")}
        changes["initial_normaliser"] = size(p.initial_normaliser)
        features = FeatureMap(value, p.map.pullback)
        assert p.scale is not None
        return operands_of(replace(p, feature_map=features, scale=abs(p.scale), **changes))

    def _error(self, most: Array, least: Array) -> Array:
        """Error of a sum of products from the sums of absolute values, with errors and without."""
        spread = np.maximum(most - least, 0) + self.rel * most + self.oracle_rel * most
        return np.asarray(spread + self.u.tiny * self.p.S)

    # --- results ----------------------------------------------------------------------------------

    def forward(self) -> dict[str, tuple[Array, Array]]:
        """Return (exact, error) of out, state and normaliser, by name; set the error of y."""
        p, fwd = self.p, self.fwd
        if self.written is not None and self.x.beta is not None:
            u = abs(self.written.u)
            residual = abs(self.x.beta) * self._reading_error() + self.rel * u
            e_u = self.written.error(residual)
            self.most = self.most._replace(v=self.most.v + interleave(0 * u, e_u))
        (least, last), (most, last_most) = (recurrent.forward(x) for x in (self.least, self.most))
        self.e_y, e_last = self._error(most, least), self._error(last_most, last)
        if self.written is not None:
            self.e_y, _ = split(self.e_y)
        results = {"out": (fwd.out, self.e_y), "state": (fwd.state, e_last)}
        if p.normalise:
            self.e_o = self._quotient_error(self.e_y)
            results["out"] = (fwd.out, self.e_o)
            results["state"] = (fwd.state, e_last[..., : p.E])
            results["normaliser"] = (fwd.normaliser, e_last[..., p.E])  # type: ignore[assignment]
        return {n: (exact, e.reshape(exact.shape)) for n, (exact, e) in results.items()}

    def _reading_error(self) -> Array:
        """Error of v − k S by the delta rule, if the values in S are exact up to `most`."""
        least, most = (split(recurrent.forward(x)[0])[1] for x in (self.least, self.most))
        return np.asarray(self._error(most, least) + self.rel * abs(self.x.v))

    def _quotient_error(self, e_y: Array) -> Array:
        """Error of o = n / (d + eps) from those of n and d."""
        total, out = self.fwd.residuals[1], self.fwd.out.reshape(*e_y.shape[:-1], self.p.E)
        e_n, e_d = e_y[..., : self.p.E], e_y[..., self.p.E :] + 2 * self.u.u * abs(total)
        with np.errstate(divide="ignore", invalid="ignore"):
            error = (e_n + abs(out) * e_d) / (abs(total) - e_d) + 4 * self.u.u * abs(out)
        # A sum that may be 0 says nothing of its quotient.
        return np.where(abs(total) > 2 * e_d, error, VAST)

    # --- gradients --------------------------------------------------------------------------------

    def backward(
        self, dout: Array | None, dstate: Array | None, dnormaliser: Array | None
    ) -> dict[str, tuple[Array, Array]]:
        """Return (exact, error) of each gradient; cotangents have the shapes of their results."""
        p = self.p
        exact = backward(self.fwd, dout, dstate, dnormaliser)
        dy, e_dy = self._cotangent(dout)
        dS = self._last_cotangent(dstate, dnormaliser)
        of_written: dict[str, Array] = {}
        if self.written is not None:
            dy, e_dy, of_written = self._through_written(dy, dS, dstate)
        dy = abs(dy)
        least = recurrent.backward(self.least, dy, dS)
        most = recurrent.backward(self.most, dy + e_dy, dS)
        sizes = {"dlog_decay": self._decay(self.most, most, dS)}
        errors = {
            "dv": self._error(most.v, least.v)[..., : p.E],
            "dinitial_state": self._error(most.state, least.state)[..., : p.E],
            "dlog_decay": self._error(sizes["dlog_decay"], self._decay(self.least, least, dS)),
        } | of_written
        if self.written is not None:
            least, most = merge(least), merge(most)
        if p.normalise:
            errors["dinitial_normaliser"] = self._error(most.state, least.state)[..., p.E]
        query_shape = (*p.lead, p.H, p.T, p.D)
        for name in ("dq", "dk"):
            x, size, smaller = (getattr(y, name[1:]) for y in (p, most, least))
            factor = abs(p.scale or 0) if name == "dq" else 1.0
            shape = query_shape if name == "dq" else size.shape
            e, size = (factor * y.reshape(shape) for y in (self._error(size, smaller), size))
            errors[name] = self._pullback_error(
                np.broadcast_to(x.astype(np.float64), shape), size, e
            )
        results = {}
        for name, error in errors.items():
            value = getattr(exact, name[1:])
            if value is not None:
                results[name] = (value, self._sum_error(error, sizes.get(name, error), value.shape))
        return results

    def _through_written(
        self, dy: Array, dS: Array, dstate: Array | None
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Return the cotangents of `add_cotangents`, their errors, and the errors of dv and dβ.

        dy is (..., K, H / K, T, E); dS and dstate are (..., K, D, E).
        """
        x, written = self.x, self.written
        assert written is not None
        assert x.beta is not None
        state_cotangent = np.zeros_like(dS) if dstate is None else dstate.reshape(dS.shape)
        dv = abs(recurrent.backward(x, dy, state_cotangent).v)
        both = add_cotangents(abs(dy), dv)
        least, most = (merge(recurrent.backward(y, both, dS)).v for y in (self.least, self.most))
        e_db = written.error_of_adjoint(self._error(most, least))
        e_dv = abs(x.beta) * e_db + self.rel * dv
        error = abs(x.v) + split(recurrent.forward(self.most)[0])[1]  # v − k S
        e_dbeta = (e_db + self.rel * most) * error + most * self._reading_error()
        errors = {"dv": e_dv, "dbeta": e_dbeta.sum(-1, keepdims=True)}
        return both, add_cotangents(0 * dy, e_dv), errors

    def _cotangent(self, dout: Array | None) -> tuple[Array, Array]:
        """Cotangent of y, (..., K, H / K, T, E), with its error, for dout (..., H, T, E)."""
        p = self.p
        do = np.zeros(self.fwd.out.shape) if dout is None else dout
        do = do.reshape(*p.lead, p.K, p.group, p.T, p.E)
        if not p.normalise:
            return do, np.zeros_like(do)
        total, out = self.fwd.residuals[1], self.fwd.out.reshape(do.shape)
        zero = total == 0
        dn = np.where(zero, 0, do / np.where(zero, 1, total))
        e_d = self.e_y[..., p.E :] + 2 * self.u.u * abs(total)
        with np.errstate(divide="ignore", invalid="ignore"):
            e_dn = abs(dn) * (e_d / (abs(total) - e_d) + 2 * self.u.u)
        e_dn = np.where(abs(total) > 2 * e_d, e_dn, VAST)
        e_out = self.e_o + self.u.low.u * abs(out)
        sums = (p.E + 2) * self.u.u + self.oracle_rel
        e_dd = (e_dn * (abs(out) + e_out) + abs(dn) * (e_out + sums * abs(out))).sum(-1)
        dy = np.concatenate([dn, -(dn * out).sum(-1, keepdims=True)], -1)
        return dy, np.concatenate([e_dn, e_dd[..., None]], -1)

    def _last_cotangent(self, dstate: Array | None, dnormaliser: Array | None) -> Array:
        """Absolute cotangent of the last state, (..., K, D, E), dnormaliser as a column more."""
        p = self.p
        state_rows = (*p.lead, p.K, p.D)
        shape = (*state_rows, p.E)
        dS = np.zeros(shape) if dstate is None else abs(dstate).reshape(shape)
        if not p.normalise:
            return dS
        dz = np.zeros(state_rows) if dnormaliser is None else abs(dnormaliser).reshape(state_rows)
        return np.concatenate([dS, dz[..., None]], -1)

    def _decay(self, x: LinearOperands, d: LinearOperands, dS: Array) -> Array:
        """Sum of absolute values behind dlog_decay = Σ_{s ≥ t} (q dq − k dk) + S dS."""
        parts = x.k * d.k
        if x.causal:
            parts = parts + (x.q * d.q).sum(-3)
        later = np.flip(np.flip(parts, -2).cumsum(-2), -2)
        later = later if self.written is None else later[..., ::2, :]
        return np.asarray(later + (recurrent.forward(x)[1] * dS).sum(-1)[..., None, :])

    def _sum_error(self, error: Array, size: Array, shape: tuple[int, ...]) -> Array:
        """Error of the sum over the axes along which an input was broadcast."""
        count = error.size // max(int(np.prod(shape)), 1)
        total = sum_to(np.asarray(error), shape)
        return total if count <= 1 else total + count * self.u.u * sum_to(np.asarray(size), shape)

    # --- features ---------------------------------------------------------------------------------

    def _softmax_error(self, x: Array) -> Array:
        """Relative error of softmax features."""
        top = abs(x).max(-1, keepdims=True, initial=0.0)
        return np.asarray(2 * self.inside * (1 + top) + self.p.D * self.u.u)

    def _feature_error(self, x: Array) -> Array:
        """Error of φ(x) as computed by a handful of operations, one of them exp."""
        kind = self.p.map
        if kind in (FEATURE_MAPS["identity"], FEATURE_MAPS["relu"]):
            return np.zeros_like(x)
        if kind is FEATURE_MAPS["softmax"]:
            return self._softmax_error(x) * kind.value(x)
        y, slope = kind.value(x), kind.pullback(x, np.ones_like(x))
        return np.asarray(self.inside * (abs(y) + abs(x * slope) + 1))

    def _pullback_error(self, x: Array, size: Array, e: Array) -> Array:
        """Error of dx = φ'(x) dφ, |dφ| at most `size` and with error e; all have the shape of x."""
        kind = self.p.map
        if kind is FEATURE_MAPS["softmax"]:
            p, rel = kind.value(x), 3 * self._softmax_error(x)
            through, with_error = (p * (y + (p * y).sum(-1, keepdims=True)) for y in (e, size + e))
            return np.asarray(through + rel * with_error)
        one = np.ones_like(x)
        slope = kind.pullback(x, one)
        error = abs(slope) * e
        if kind not in (FEATURE_MAPS["identity"], FEATURE_MAPS["relu"]):
            nearby = (kind.pullback(x * (1 + d), one) for d in (self.inside, -self.inside))
            bent = max(abs(y - slope).max(initial=0.0) for y in nearby)
            error = error + (self.inside * (1 + abs(slope)) + bent) * (size + e)
        return np.asarray(error)
