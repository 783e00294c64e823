"""How far results of `forward` and `backward` may be off: a bound for each element.

The bound follows the equations, with one unit u for a sum, a product or a quotient and one for
exp: 2⁻⁵³ and 2⁻⁵¹ for the float64 of `dense`, 2⁻¹⁰² and 2⁻¹⁰⁰ with ``precision="extended"``. Each
product, quotient and exp may also lose 2⁻¹⁰⁵⁰ by underflow. Derivation: docs/extended.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.engines import double_double, extended
from npattn.engines.dense import QUIET, dropout_factor, subtract_mean, sum_shared
from npattn.engines.double_double import as_pair, dot, select
from npattn.errors import OptionError
from npattn.oracle.api import backward, check_forward, read_cotangents
from npattn.problem import Forward, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.problem.foreign import reject_unknown_options

__all__ = ["Certificate", "certify"]
__dir__ = __all__.copy


TINY = 2.0**-1050
"""Bound of what a product, a quotient or exp loses by underflow, in pairs too."""
LARGE = 2.0**990
"""Size from which on a sum or a part of a product may overflow."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """Bounds of the errors of results, each shaped as its result.

    A bound is inf where none is known: if a result or an intermediate is not finite or is beyond
    2⁹⁹⁰, or if the error of a row of scores is not small. A bound is never NaN.

    Attributes
    ----------
    out : array (..., H, T, E)
    lse : array (..., H, T)
    weights : array (..., H, T, S)
    q, k, v, bias, sinks : array or None
        Bounds of the gradients; None without cotangents, and for inputs that do not exist.
    """

    out: Array
    lse: Array
    weights: Array
    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None


@reject_unknown_options
@np.errstate(**QUIET)  # type: ignore[arg-type]
def certify(
    fwd: Forward, dout: ArrayLike | None = None, dlse: ArrayLike | None = None,
    dweights: ArrayLike | None = None,
) -> Certificate:  # fmt: skip
    """Bound the errors of a result of `npattn.forward`, and of its gradients.

    Parameters
    ----------
    fwd : Forward
        Result of engine "dense" in float64, or with ``precision="extended"``; without conventions.
    dout, dlse, dweights : float array_like, optional
        Cotangents, as for `npattn.backward`; without any, gradients are not bounded.

    Returns
    -------
    Certificate

    Raises
    ------
    OptionError
        If `fwd` is of the tiled engine, of another dtype than float64, or has conventions, a
        gate, a score_mod or a bias of `npattn.biases` whose gradient is asked.
    ShapeError, DtypeError
        As for `npattn.backward`.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> from npattn.certify import certify
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 8))
    >>> plain = npattn.forward(x, x, x, engine="dense")
    >>> exact = npattn.forward(x, x, x, precision="extended")
    >>> bool((abs(plain.out - exact.out) <= certify(plain).out + certify(exact).out).all())
    True
    """
    bounds = _ForwardBounds(fwd)
    if dout is None and dlse is None and dweights is None:
        return Certificate(*bounds.forward())
    return Certificate(
        *bounds.forward(), **bounds.backward(*read_cotangents(fwd, dout, dlse, dweights))
    )


class _ForwardBounds:
    """Sizes and errors of the intermediates of one forward pass.

    Bounds are computed in float64: a factor of 1.01 at the end covers their own rounding.
    """

    def __init__(self, fwd: Forward) -> None:
        check_forward("certify.certify", fwd)
        canonical, conventions, *_, residuals = fwd.residuals
        problem: Problem = canonical
        if fwd.engine not in ("dense", "extended") or problem.dtype != np.float64:
            raise OptionError(
                f"certify has bounds of float64 by engine 'dense' or precision='extended', got "
                f"engine {fwd.engine!r} and dtype {problem.dtype}"
            )
        if conventions is not None or problem.score_mod is not None:
            raise OptionError("certify has no bounds under conventions, or of a score_mod")
        if fwd.problem.gate is not None:
            raise OptionError("certify has no bounds with a gate; call forward without it")
        self.problem, self.fwd = problem, fwd
        self.pairs = residuals if fwd.engine == "extended" else None
        plain = residuals if self.pairs is None else residuals.dense
        self.u = 2.0**-53 if self.pairs is None else double_double.UNIT
        self.e = 2.0**-51 if self.pairs is None else double_double.EXP
        self.q, self.k, self.v = (np.where(np.isfinite(x), x, 0) for x in plain[:3])
        self.live, p, self.p_sink = plain.live, plain.p, plain.p_sink
        if self.pairs is not None:
            p = self.pairs.p.nearest
            self.p_sink = None if self.p_sink is None else self.pairs.p_sink.nearest
        self.p, self.keep = np.where(self.live, p, 0), dropout_factor(problem)
        self._scores()
        self._weights()

    def _scores(self) -> None:
        """Bound the error of each score, and of the slope of its softcap."""
        problem, u, k = self.problem, self.u, self.k.swapaxes(-1, -2)
        assert problem.scale is not None
        factor, size = abs(problem.scale), abs(self.q) @ abs(k)
        # D products and sums, the product with the scale, and its own rounding to 1/√D.
        a = (problem.D + 3) * (u * factor * size + (factor + 1) * TINY)
        size = np.maximum(size, factor * size)
        if self.pairs is None:
            s = problem.scale * (self.q @ k)
        else:
            s = dot(as_pair(self.q), as_pair(k)).times(extended.scale_of(problem)).nearest
        self.slope, self.slope_error = np.ones(()), np.zeros(())
        if problem.softcap is not None:
            c, x = problem.softcap, s / problem.softcap
            tanh, e = np.tanh(x), np.exp(-2 * abs(x))
            self.slope = 4 * e / (1 + e) ** 2 + TINY
            moved = a / c + 4 * u * abs(x) + TINY
            # The logarithm of the slope has the derivative −2 tanh.
            change = np.expm1(2 * moved * np.minimum(abs(tanh) + moved, 1))
            rounding = 8 * (u + self.e) * (1.0 if self.pairs is None else self.slope)
            self.slope_error = np.minimum(self.slope * change, 1) + rounding + TINY
            a = a * np.minimum(1, self.slope * (1 + change))
            a = a + 4 * (u + self.e) * abs(c * tanh) + 2 * (c + 1) * TINY
            s = c * tanh
        shut: Any = ~self.live & (True if problem.visible is None else problem.visible)
        if problem.bias_array is not None:
            bias = problem.bias_array.astype(np.float64)
            shut = shut & ~np.isneginf(bias)  # else its score became −inf on the way
            s = s + np.where(np.isfinite(bias), bias, 0)
            a = a + u * abs(s)
            size = np.maximum(size, abs(s))
        self.s, self.a = s, np.where(self.live, a, 0)
        self.unknown = (shut | (self.live & ~(size <= LARGE))).any(-1, keepdims=True)

    def _weights(self) -> None:
        """Bound the errors of weights and lse, and find the rows in which they are not small."""
        problem, u = self.problem, self.u
        top = np.where(self.live, self.s, -np.inf).max(-1, keepdims=True, initial=-np.inf)
        if problem.sinks is not None:
            top = np.maximum(top, problem.sinks.astype(np.float64)[:, None, None])
        top = np.where(np.isneginf(top), 0, top)
        error = np.where(self.live, self.a + u * (abs(self.s - top) + 2) + self.e, 0)
        changed = np.where(self.live, (self.p + TINY) * np.expm1(error), 0).sum(-1, keepdims=True)
        own_sink: Any = 0.0
        if self.p_sink is not None and problem.sinks is not None:
            sinks = problem.sinks.astype(np.float64)[:, None, None]
            own_sink = u * (np.where(np.isfinite(sinks), abs(sinks - top), 0) + 2) + self.e
            changed = changed + (self.p_sink + TINY) * np.expm1(own_sink)
        # The sum of a row is off by a factor between 1 / (1 + changed) and 1 / (1 − changed).
        common = changed / (1 - changed) + (problem.S + 4) * u
        self.unknown = self.unknown | ~(changed < 0.25) | ~(abs(top) <= LARGE)
        e_p = (self.p + TINY) * np.expm1(error + common) + TINY
        self.e_p = np.where(self.live, e_p, 0)
        if self.p_sink is not None:
            self.e_sink = (self.p_sink + TINY) * np.expm1(own_sink + common) + TINY
        self.e_lse = np.asarray(common + 4 * self.e + 2 * u * (abs(top) + np.log(problem.S + 2)))

    def forward(self) -> tuple[Array, Array, Array]:
        """Return the bounds of out, lse and the weights."""
        S, u, rows = self.problem.S, self.u, self.unknown
        keep = 1.0 if self.keep is None else self.keep
        out = (keep * (self.e_p + (S + 4) * u * self.p)) @ abs(self.v)
        out = out + S * TINY * self.live.any(-1, keepdims=True)
        out = np.where(rows | ~((keep * (self.p + self.e_p)) @ abs(self.v) <= LARGE), np.inf, out)
        lse = np.where(rows, np.inf, self.e_lse)[..., 0]
        weights = np.where(rows, np.inf, self.e_p + 3 * u * self.p)
        bounds = [x[0] if self.problem.headless else x for x in (out, lse, weights)]
        results = self.fwd.out, self.fwd.lse, self.fwd.weights
        final = [self._round(x, y) for x, y in zip(bounds, results, strict=True)]
        empty = np.isneginf(self.fwd.lse) & (bounds[1] < np.inf)
        return final[0], np.where(empty, 0, final[1]), final[2]

    def _round(self, bound: Array, result: Array) -> Array:
        """Add underflow, and the last rounding of extended precision; 0 with bound 0 is exact."""
        last = TINY if self.pairs is None else TINY + np.spacing(abs(result)) / 2
        bound = np.where((bound == 0) & (result == 0), 0, 1.01 * bound + last)
        return np.where(np.isfinite(result) & (bound < np.inf), bound, np.inf)

    def backward(self, do: Any, dlse: Array | None, dweights: Array | None) -> dict[str, Any]:
        """Return the bounds of the gradients, by input."""
        problem, u, p, live = self.problem, self.u, self.p, self.live
        if problem.bias is not None and not isinstance(problem.bias, np.ndarray):
            raise OptionError("certify has no bounds of gradients of npattn.biases: pass an array")
        grads = backward(self.fwd, do, dlse, dweights)
        do, dlse, dweights = (
            None if x is None else np.where(np.isfinite(x), x, 0)[(None,) * problem.headless]
            for x in (do, dlse, dweights)
        )
        g, e_g, g_sink, e_g_sink, large = self._less_mean(do, dweights)
        if dlse is not None:
            passed = dlse[..., None]
            e_g = e_g + u * (abs(g) + 2 * e_g + abs(passed))
            e_g_sink = e_g_sink + u * (abs(g_sink) + 2 * e_g_sink + abs(passed))
            g, g_sink = g + passed, g_sink + passed
        most, most_sink = abs(g) + 2 * e_g, abs(g_sink) + 2 * e_g_sink  # exact or computed
        slope = self.slope + self.slope_error
        ds = np.where(live, p * most, 0)
        dx = ds * slope
        e_ds = np.where(live, p * e_g + self.e_p * most + u * ds + TINY, 0)
        e_dx = np.where(live, e_ds * slope + ds * self.slope_error + u * dx + TINY, 0)

        lead = max(int(np.prod(problem.lead)), 1)
        S, T = problem.S + lead, problem.T * max(problem.H // max(problem.K, 1), 1) * lead
        scale, keep = abs(problem.scale or 0.0), 1.0 if self.keep is None else self.keep
        rows: Any = self.unknown | large | (live & ~(most <= LARGE)).any(-1, keepdims=True)
        columns = np.broadcast_to(rows, (*live.shape[:-1], 1)).any(-2, keepdims=True)
        seen, seen_by = live.any(-1, keepdims=True), live.any(-2)[..., None]
        w, e_w = keep * (p + self.e_p), keep * (self.e_p + (T + 6) * u * p)

        def product(e: Array, x: Array, y: Array, *, bad: Any, touched: Array, n: int) -> Array:
            """Bound the error of x @ y, sums of n terms, from the error e of x."""
            y = abs(y)
            error = (e + (n + 4) * u * x) @ y + n * TINY * touched
            return np.where(bad | ~(x @ y <= LARGE / max(scale, 1)), np.inf, error)

        e_q = product(e_dx, dx, self.k, bad=rows, touched=seen, n=S)
        dx, e_dx, w, e_w = (x.swapaxes(-1, -2) for x in (dx, e_dx, w, e_w))
        e_k = product(e_dx, dx, self.q, bad=columns, touched=seen_by, n=T)
        e_v = product(e_w, w, do, bad=columns, touched=seen_by, n=T)
        e_q, e_k = (scale * x + TINY * y for x, y in ((e_q, seen), (e_k, seen_by)))
        found: dict[str, Any] = {
            "q": sum_to(e_q, problem.q.shape),
            "k": sum_shared(e_k, problem.K, problem.k.shape),
            "v": sum_shared(e_v, problem.K, problem.v.shape),
        }
        if problem.bias_array is not None:
            count = max(e_ds.size // max(problem.bias_array.size, 1), 1)
            e_ds = np.where(rows, np.inf, e_ds + count * u * ds)
            found["bias"] = sum_to(e_ds, problem.bias_array.shape)
        if self.p_sink is not None:
            e_sink = self.p_sink * (e_g_sink + (T + 2) * u * most_sink) + self.e_sink * most_sink
            e_sink = np.where(rows | ~(most_sink <= LARGE), np.inf, e_sink + TINY)
            found["sinks"] = sum_to(e_sink, (problem.H, 1, 1))[:, 0, 0]
        return {n: self._round(bound, getattr(grads, n)) for n, bound in found.items()}

    def _less_mean(
        self, do: Array, dweights: Array | None
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Return g of keys and sink (ds = p g), each with its error, and the rows too large.

        g is y, the gradient of a weight, less the mean of y over the row. It does not change if one
        number is subtracted from each y of the row. So this number (a first mean, or y of the
        heaviest key) need not be exact: the error depends on what is left, `far`.
        """
        u, p, S, live, v = self.u, self.p, self.problem.S, self.live, self.v.swapaxes(-1, -2)
        size = abs(do) @ abs(v)
        error = (self.problem.E + 1) * (u * size + TINY)
        if self.keep is not None:
            size, error = size * self.keep, (error + 3 * u * size) * self.keep + TINY
        if dweights is not None:
            size = size + abs(dweights)
            error = error + u * size
        error = np.where(live, error, 0)
        if self.pairs is None:
            y = do @ v if self.keep is None else (do @ v) * self.keep
            y = np.where(live, y if dweights is None else y + dweights, 0)
            shift = (p * y).sum(-1, keepdims=True)
            centered = y - shift
            off = (p * (2 * error + 2 * (S + 3) * u * abs(y))).sum(-1, keepdims=True) + S * TINY
            g, g_sink = subtract_mean(y, 0, p, self.p_sink)
        else:
            r = self.pairs
            pair = dot(as_pair(do), as_pair(v))
            pair = pair if r.keep is None else pair.times(r.keep)
            pair = select(live, pair if dweights is None else pair.plus(dweights), 0.0)
            pivot = extended.heaviest(pair, r.p, r.p_sink)
            y, centered, shift, off = pair.nearest, pair.minus(pivot).nearest, pivot.nearest, 0.0
            g, g_sink = (x.nearest for x in extended.less_mean(pair, r.p, r.p_sink))
        far = np.where(live, abs(centered) + off + 2 * error + u * (abs(y) + abs(shift)), 0)
        far_sink = abs(shift) + off
        error_of_row = error + u * far
        mean = (p * far).sum(-1, keepdims=True)
        common = (self.e_p * (far + error_of_row) + p * (error_of_row + (S + 3) * u * far)).sum(
            -1, keepdims=True
        )
        if self.p_sink is not None:
            mean = mean + self.p_sink * far_sink
            common = common + (self.e_sink + (S + 3) * u * self.p_sink) * far_sink
        common = common + (S + 2) * TINY
        too_large = (live & ~(size <= LARGE)).any(-1, keepdims=True)
        e_sink = common + u * (far_sink + mean)
        return g, error_of_row + common + u * (far + mean), g_sink, e_sink, too_large
