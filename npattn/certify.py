"""How far results of `forward` and `backward` may be off: a bound for each element.

The bound follows the equations to first order, with one unit u for a sum, a product or a quotient
and one for exp: 2⁻⁵³ and 2⁻⁵¹ for the float64 of `dense`, 2⁻¹⁰² and 2⁻¹⁰⁰ with
``precision="extended"``. docs/tolerance.md derives the same for implementations.

    a   error of a score             u (D + 2) |scale| Σ |q||k| + …
    r   relative error of a weight   a + Σ p a + u (S + |s − m| + …)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npattn import double_double
from npattn.api import backward, read_cotangents
from npattn.arrays import Array, sum_to
from npattn.dense import QUIET, dropout_factor, sum_shared
from npattn.errors import OptionError
from npattn.problem import Forward, Problem

__all__ = ["Certificate", "certify"]

TINY = 2.0**-1064
"""Loss by underflow of a weight, and of a finished result."""
FIRST_ORDER = 2.0**-7
"""Largest relative error of a weight for which products of errors do not matter."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """Bounds of the errors of results, each shaped as its result; inf where none is known.

    Attributes
    ----------
    out : array (..., H, T, E)
    lse : array (..., H, T)
    weights : array (..., H, T, S)
    q, k, v, bias, sinks : array or None
        Of the gradients; None without cotangents, and where there is no such input.
    """

    out: Array
    lse: Array
    weights: Array
    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None


@np.errstate(**QUIET)  # type: ignore[arg-type]
def certify(
    fwd: Forward,
    dout: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
    dweights: ArrayLike | None = None,
) -> Certificate:
    """Bound the errors of a result of `npattn.forward`, and of its gradients.

    Parameters
    ----------
    fwd : Forward
        Of engine "dense" in float64, or with ``precision="extended"``; without conventions.
    dout, dlse, dweights : float array_like, optional
        Cotangents as of `npattn.backward`; without any there are no bounds of gradients.

    Returns
    -------
    Certificate

    Raises
    ------
    OptionError
        If `fwd` is of the tiled engine, of another dtype than float64, or has conventions, a
        gate, a score_mod or a bias of `npattn.biases` whose gradient is asked.
    ShapeError, DtypeError
        As of `npattn.backward`.

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
    bounds = _Bounds(fwd)
    if dout is None and dlse is None and dweights is None:
        return Certificate(*bounds.forward())
    return Certificate(
        *bounds.forward(), **bounds.backward(*read_cotangents(fwd, dout, dlse, dweights))
    )


class _Bounds:
    """Sizes and errors of the intermediates of one forward pass."""

    def __init__(self, fwd: Forward) -> None:
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
        self.extended = fwd.engine == "extended"
        plain = residuals.dense if self.extended else residuals
        self.u = double_double.UNIT if self.extended else 2.0**-53
        self.e = double_double.EXP if self.extended else 2.0**-51
        self.q, self.k, self.v = (np.where(np.isfinite(x), x, 0) for x in plain[:3])
        self.live, self.p, self.p_sink = plain.live, np.where(plain.live, plain.p, 0), plain.p_sink
        self.keep = dropout_factor(problem)
        self._scores(plain.tanh)
        self._weights()

    def _scores(self, tanh: Array | None) -> None:
        problem, u = self.problem, self.u
        assert problem.scale is not None
        s = problem.scale * (self.q @ self.k.swapaxes(-1, -2))
        size = abs(problem.scale) * (abs(self.q) @ abs(self.k).swapaxes(-1, -2))
        a = (problem.D + 2) * u * size + TINY * (size > 0)
        self.slope, self.slope_error = np.ones(()), np.zeros(())
        if problem.softcap is not None and tanh is not None:
            c, e = problem.softcap, np.exp(-2 * abs(s / problem.softcap))
            self.slope = 4 * e / (1 + e) ** 2
            moved = 2 * abs(tanh) * self.slope * (a / c + 4 * u * abs(s / c))
            own = 8 * (u + self.e) * (self.slope if self.extended else 1.0)
            self.slope_error = moved + own
            a = a * np.minimum(1, self.slope + 2 * a / c) + 4 * (u + self.e) * abs(c * tanh)
            s = c * tanh
        if problem.bias_array is not None:
            bias = problem.bias_array.astype(np.float64)
            s = s + np.where(np.isfinite(bias), bias, 0)
            a = a + u * abs(s)
        self.s, self.a = s, np.where(self.live, a, 0)

    def _weights(self) -> None:
        problem, u = self.problem, self.u
        top = np.where(self.live, self.s, -np.inf).max(-1, keepdims=True, initial=-np.inf)
        if problem.sinks is not None:
            top = np.maximum(top, problem.sinks.astype(np.float64)[:, None, None])
        top = np.where(np.isfinite(top), top, 0)
        own = self.a + u * (abs(self.s - top) + 2) + self.e
        own = np.where(self.live, own, 0)
        mean = (self.p * own).sum(-1, keepdims=True)
        own_sink: Any = 0.0
        if self.p_sink is not None and problem.sinks is not None:
            sinks = problem.sinks.astype(np.float64)[:, None, None]
            away = np.where(np.isfinite(sinks), abs(sinks - top), 0)
            own_sink = u * (away + 2) + self.e
            mean = mean + self.p_sink * own_sink
        self.mean = mean + (problem.S + 3) * u
        r = np.where(self.live, own + self.mean, 0)
        self.e_p, self.r_sink = np.where(self.live, self.p * r + TINY, 0), own_sink + self.mean
        self.unknown = ~(r.max(-1, keepdims=True, initial=0) < FIRST_ORDER) | ~np.isfinite(
            self.mean
        )
        self.e_lse = np.asarray(
            self.mean + 2 * u * abs(top) + 2 * self.e + u * np.log(problem.S + 2)
        )

    def forward(self) -> tuple[Array, Array, Array]:
        """Return the bounds of out, lse and the weights."""
        problem, u = self.problem, self.u
        keep = 1.0 if self.keep is None else self.keep
        out = (keep * (self.e_p + (problem.S + 4) * u * self.p)) @ abs(self.v)
        lse, weights = self.e_lse[..., 0], self.e_p + 3 * u * self.p
        rows = self.unknown
        bounds = (out, lse, weights)
        off = (rows, rows[..., 0], rows)
        known = [np.where(row, np.inf, 1.01 * x) for row, x in zip(off, bounds, strict=True)]
        if problem.headless:
            known = [x[0] for x in known]
        results = (self.fwd.out, self.fwd.lse, self.fwd.weights)
        final = [self._round(x, y) for x, y in zip(known, results, strict=True)]
        empty = np.isneginf(self.fwd.lse)
        return final[0], np.where(empty, 0, final[1]), final[2]

    def _round(self, bound: Array, result: Array) -> Array:
        """Add underflow, and in extended precision the last rounding; what is all 0 is exact."""
        gap = np.spacing(abs(np.where(np.isfinite(result), result, 0))) / 2
        last = gap if self.extended else 0
        return np.where((bound > 0) | (result != 0), bound + TINY + last, 0)

    def backward(self, do: Array, dlse: Array | None, dweights: Array | None) -> dict[str, Any]:
        """Return the bounds of the gradients, by input."""
        problem, u = self.problem, self.u
        if problem.bias is not None and not isinstance(problem.bias, np.ndarray):
            raise OptionError("certify has no bounds of gradients of npattn.biases: pass an array")
        grads = backward(self.fwd, do, dlse, dweights)
        if problem.headless:
            do = do[None]
            dlse, dweights = (None if x is None else x[None] for x in (dlse, dweights))
        do = np.where(np.isfinite(do), do, 0)
        g, g_sink = self._less_mean(*self._of_weights(do, dweights))
        if dlse is not None:
            passed = np.where(np.isfinite(dlse), dlse, 0)[..., None]
            g, g_sink = (x.plus(passed, u) for x in (g, g_sink))
        ds = np.where(self.live, abs(self.p * g.value), 0)
        e_ds = self.e_p * abs(g.value) + 2 * u * ds + self.p * g.error
        e_ds = np.where(self.live, e_ds, 0)
        dx = ds * self.slope
        e_dx = e_ds * (self.slope + self.slope_error) + ds * self.slope_error + u * dx

        scale, G = abs(problem.scale or 0.0), max(problem.H // max(problem.K, 1), 1)
        T = problem.T * G * max(int(np.prod(problem.lead)), 1)
        e_w = (1.0 if self.keep is None else self.keep) * (self.e_p + (T + 6) * u * self.p)
        e_dq = scale * ((e_dx + (problem.S + 3) * u * dx) @ abs(self.k))
        e_dk = scale * ((e_dx + (T + 3) * u * dx).swapaxes(-1, -2) @ abs(self.q))
        e_dv = e_w.swapaxes(-1, -2) @ abs(do)
        bad = self.unknown
        columns = np.asarray(np.broadcast_to(bad, self.live.shape).any(-2))[..., None]
        found: dict[str, Any] = {
            "q": sum_to(np.where(bad, np.inf, e_dq), problem.q.shape),
            "k": sum_shared(np.where(columns, np.inf, e_dk), problem.K, problem.k.shape),
            "v": sum_shared(np.where(columns, np.inf, e_dv), problem.K, problem.v.shape),
        }
        if problem.bias_array is not None:
            count = max(e_ds.size // max(problem.bias_array.size, 1), 1)
            e_ds = np.where(bad, np.inf, e_ds + count * u * ds)
            found["bias"] = sum_to(e_ds, problem.bias_array.shape)
        if self.p_sink is not None:
            own = abs(g_sink.value) * (self.r_sink + (T + 2) * u) + g_sink.error
            own = np.where(bad, np.inf, self.p_sink * own)
            found["sinks"] = sum_to(own, (problem.H, 1, 1))[:, 0, 0]
        return {n: self._round(1.01 * bound, getattr(grads, n)) for n, bound in found.items()}

    def _of_weights(self, do: Array, dweights: Array | None) -> tuple[Array, Array]:
        """Return the gradient of the weights, and its error."""
        u, keep = self.u, self.keep
        size = abs(do) @ abs(self.v).swapaxes(-1, -2)
        y, error = do @ self.v.swapaxes(-1, -2), (self.problem.E + 1) * u * size
        if keep is not None:
            y, error = y * keep, (error + 3 * u * abs(y)) * keep
        if dweights is not None:
            y, error = y + dweights, error + u * (abs(y) + abs(dweights))
        return np.where(self.live, y, 0), np.where(self.live, error, 0)

    def _less_mean(self, y: Array, e_y: Array) -> tuple[_Off, _Off]:
        """Return what the softmax passes back, y less its mean, for keys and for the sink."""
        u, p, S = self.u, self.p, self.problem.S
        mean = (p * y).sum(-1, keepdims=True)
        e_first = u * abs(y)
        if self.extended:
            pivot = 0 * mean
            if S:
                at = p.argmax(-1, keepdims=True)
                own: Any = True
                if self.p_sink is not None:
                    own = np.take_along_axis(p, at, -1) >= self.p_sink
                pivot = np.where(own, np.take_along_axis(y, at, -1), 0)
            far, far_sink = abs(y - pivot) + abs(mean - pivot), abs(pivot) + abs(mean - pivot)
        else:  # the first mean is off by this, and the second pass takes it off again
            off = ((self.e_p + (S + 2) * u * p) * abs(y)).sum(-1, keepdims=True)
            far, far_sink = abs(y - mean) + off + u * abs(mean), abs(mean) * (1 + u) + off
        e_p = self.e_p + (S + 4) * u * p
        common = (p * (e_y + e_first) + e_p * far).sum(-1, keepdims=True)
        if self.p_sink is not None:
            common = common + self.p_sink * far_sink * (self.r_sink + (S + 4) * u)
        e_g = e_y + e_first + common + 4 * u * far
        return _Off(y - mean, e_g, far), _Off(-mean, common + 4 * u * far_sink, far_sink)


class _Off(NamedTuple):
    """A number, its error, and the size of what it is a difference of."""

    value: Array
    error: Array
    size: Array

    def plus(self, x: Array, u: float) -> _Off:
        """Return the sum with an exact number."""
        value = self.value + x
        return _Off(value, self.error + u * (abs(value) + self.size), self.size)
