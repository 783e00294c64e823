"""Bounds of second derivatives, for implementations whose gradients are differentiated again.

docs/tolerance.md, section 10, derives them.
"""

from __future__ import annotations

import math

import numpy as np

from npattn.engines import dense
from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.bounds.rounding import Rounding, Units, unit_roundoff


@np.errstate(all="ignore")  # hidden scores may be anything
def second_order_bounds(
    problem: Problem,  # canonical, without score_mod
    dtype: object,  # the dtype of q, k, v
    rounding: Rounding,
    do: Array,  # with a head axis, float64
    dlse: Array | None,
    # by name of the input, with a head axis, float64; None is 0
    directions: dict[str, Array | None],
) -> dict[str, Array]:
    """Return bounds of the gradients of Σ directions · gradients.

    Every result is a sum of products of inputs, weights and slopes (docs/derivations/
    second_order.md). Such a sum, whatever its order, errs by no more than the sum of the absolute
    values of its terms, times (1 + error of a factor) over all factors, less 1.

    Returns
    -------
    dict
        "q", "k", "v", "bias", "sinks" and "o" (the gradient in dout): absolute, float64; "o" has a
        head axis. inf in rows whose scores have no digit left.
    """
    sizes = _Sizes(problem, dtype, rounding, do, dlse, directions)
    return sizes.bounds()


class _Sizes:
    """The lines of `npattn.engines.backward_twice`, in absolute values."""

    def __init__(
        self,
        problem: Problem,
        dtype: object,
        rounding: Rounding,
        do: Array,
        dlse: Array | None,
        directions: dict[str, Array | None],
    ) -> None:
        self.problem = problem
        self.unit = Units.of(rounding, dtype)
        kinds = ("low", "operands", "q", "s", "p", "row_sum", "lse", "dp", "ds", "shared")
        self.u = max(self.unit.u, *(getattr(self.unit, name).u for name in kinds))
        _, lse, residuals = dense.forward(problem)
        self.r = residuals
        self.lse = np.where(np.isfinite(lse), abs(lse), 0)
        self.lse = self.lse[None] if problem.headless else self.lse
        # A weight that vanishes in the format has an error of `tiny`, which is u of this more.
        self.p = np.where(residuals.live, residuals.p + self.unit.tiny / self.u, 0)
        self.p_sink = 0.0 if residuals.p_sink is None else residuals.p_sink
        self.do, self.dl = abs(do), 0.0 if dlse is None else abs(dlse)[..., None]
        self.d = {n: None if x is None else abs(x) for n, x in directions.items()}
        self.slope_of_slope = 0.0 if problem.softcap is None else 1 / problem.softcap  # below 0.77

    def bounds(self) -> dict[str, Array]:
        """Return the bounds by name."""
        problem, p, p_sink, n = self.problem, self.p, self.p_sink, self._growth()
        q, k, v = (abs(x) for x in (self.r.q, self.r.k, self.r.v))
        keep = 1.0 if self.r.keep is None else self.r.keep
        scale = abs(problem.scale or 0.0)
        ddq = np.zeros_like(q) if self.d["q"] is None else self.d["q"]
        ddk, ddv = (
            np.zeros_like(x) if y is None else dense.repeat_heads(y, problem)
            for x, y in ((k, self.d["k"]), (v, self.d["v"]))
        )

        g, g_sink = self._with_mean(keep * (self.do @ _T(v)))
        g, g_sink = g + self.dl, g_sink + self.dl
        turn_x = scale * (ddq @ _T(k) + q @ _T(ddk))
        dbias, dsinks = self.d["bias"], self.d["sinks"]
        turn = np.where(self.r.live, turn_x if dbias is None else turn_x + dbias, 0)
        h, h_sink = self._with_mean(turn, 0.0 if dsinks is None else dsinks[:, None, None])
        of_p, of_sink = self._with_mean(g * h + keep * (self.do @ _T(ddv)), g_sink * h_sink)
        ds, of_s, change = p * g, p * of_p, p * h
        of_x = of_s + ds * turn_x * self.slope_of_slope

        sums = {
            "q": scale * ((n * of_x) @ k + (n * ds) @ ddk),
            "k": scale * (_T(n * of_x) @ q + _T(n * ds) @ ddq),
            "v": _T(n * change * keep) @ self.do,
            "o": n * ((change * keep) @ v + (p * keep) @ ddv),
        }
        sums = {name: x + self.unit.tiny * (1 + x) for name, x in sums.items()}
        bounds = {
            "q": sum_to(sums["q"], problem.q.shape),
            "k": dense.sum_shared(sums["k"], problem.K, problem.k.shape),
            "v": dense.sum_shared(sums["v"], problem.K, problem.v.shape),
            "o": sums["o"],
        }
        if problem.bias_array is not None:
            bounds["bias"] = sum_to(n * of_s, problem.bias_array.shape)
        if problem.sinks is not None:
            of_sinks = np.broadcast_to(n * p_sink * of_sink, (*p.shape[:-1], 1))
            bounds["sinks"] = sum_to(of_sinks, (problem.H, 1, 1))[:, 0, 0]
        # The oracle obeys the same bound with its own unit.
        more = 1 + unit_roundoff(np.float64) / self.u
        return {name: np.where(np.isnan(x), np.inf, more * x) for name, x in bounds.items()}

    def _with_mean(self, x: Array, x_sink: Array | float = 0.0) -> tuple[Array, Array]:
        """Add the mean of each row, where the page subtracts it."""
        mean = (self.p * x).sum(-1, keepdims=True) + self.p_sink * x_sink
        return x + mean, x_sink + mean

    def _growth(self) -> Array:
        """Largest relative error of a term, (..., H, T, 1)."""
        problem, u = self.problem, self.u
        q, k = abs(self.r.q), abs(self.r.k)
        x = abs(problem.scale or 0.0) * (q @ _T(k))
        bias = 0.0 if problem.bias_array is None else abs(problem.bias_array)
        bias = np.where(np.isfinite(bias), bias, 0)
        sink = 0.0 if problem.sinks is None else abs(problem.sinks)[:, None, None]
        sink = np.where(np.isfinite(sink), sink, 0)
        # Of a score: its product, and each sum that it goes through, up to s − m and s − lse.
        error = u * ((problem.D + 8) * x + 6 * bias) + self.unit.exp * x
        error = np.where(self.r.live, error, 0).max(-1, keepdims=True, initial=0)
        error = error + 6 * u * (sink + self.lse[..., None])
        of_weight = 2 * error + 2 * self.unit.exp + (problem.S + 8) * u
        of_slope = 2 * error * self.slope_of_slope + 8 * self.unit.exp
        copies = problem.T * math.prod(problem.lead) * max(problem.H // max(problem.K, 1), 1)
        roundings = 2 * (problem.D + problem.E) + 4 * problem.S + copies + 40
        # At most four weights and two slopes in a term.
        return np.asarray(np.expm1(4 * of_weight + 2 * of_slope + roundings * u))


def _T(x: Array) -> Array:
    return x.swapaxes(-1, -2)
