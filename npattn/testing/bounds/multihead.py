"""Allowed errors of multi-head attention: those of its projections, carried through attention.

    B batch   H query heads   K key/value heads   T queries   S keys   m rows of a weight

Queries, keys and values reach attention with the errors of their projections. What attention adds
of its own is in `allowed`; what it makes of the errors that it gets follows from its formulas, with
absolute values. docs/tolerance.md §12 derives both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from npattn.errors import OptionError
from npattn.multihead.multihead import MultiHeadForward
from npattn.multihead.projections import (
    Norm,
    linear,
    merge,
    merge_backward,
    normalise_backward,
    split,
)
from npattn.oracle import api
from npattn.positions import plain
from npattn.positions.rotary import Turn, turn_array
from npattn.problem.arrays import Array, sum_to
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.bounds.rounding import Rounding, Units, unit_roundoff
from npattn.testing.bounds.variance import DEVIATIONS, DISTINCT, R2, count_rises

VAST = 50.0
"""Nats by which a score moves so that its weight is unknown, as in `worst_case`."""


def multihead_tolerance(
    fwd: MultiHeadForward,
    dtype: Any,
    *,
    dout: Array | None = None,
    dweights: Array | None = None,
    errors: Mapping[str, Array] | None = None,
    mixed: bool = False,
) -> dict[str, Array]:
    """Return the allowed error of each result of a module that computes in a dtype.

    Parameters
    ----------
    fwd : MultiHeadForward
        The exact forward, in float64, of the very weights and inputs in that dtype.
    dtype : dtype
    dout : float64 array (..., T, out), optional
        Cotangent of out. With it the gradients are bounded too, of a module without dropout.
    dweights : float64 array (..., H, T, S), optional
    errors : mapping, optional
        Errors of query, key and value themselves, where these are not exact.
    mixed : bool, default False
        Inputs and weights are wider than `dtype`, and rounded to it for each product.

    Returns
    -------
    dict
        "out", "weights" (of each head) and, with dout, the gradients by the names of
        `MultiHeadGradients`: float64, each of the shape of its result.

    Raises
    ------
    OptionError
        If the module has a gate.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> mha = npattn.MultiHeadAttention.init(8, 2, seed=0, dtype=np.float32)
    >>> fwd = mha.forward(np.ones((5, 8), np.float32))
    >>> allowed = multihead_tolerance(fwd, np.float32)
    >>> bool(0 < allowed["out"].max() < 1e-4)
    True
    """
    bound = MultiHeadBound(fwd, dtype, errors or {}, mixed)
    allowed = bound.forward(dout, dweights)
    if dout is not None:
        allowed |= bound.backward(dout, dweights)
    return allowed


class MultiHeadBound:
    """Errors of the steps of one call, forward and backward."""

    def __init__(
        self,
        fwd: MultiHeadForward,
        dtype: Any,
        errors: Mapping[str, Array] | None = None,
        mixed: bool = False,
    ) -> None:
        mha = fwd.module
        if mha.wg is not None:
            raise OptionError(
                "the module has a gate, whose error has no bound yet: judge the attention before "
                "it with npattn.testing.check"
            )
        self.fwd, self.mha, self.dtype, self.errors = fwd, mha, dtype, errors or {}
        self.steps, self.attention = fwd.steps, fwd.attention
        self.norm_errors: dict[str, tuple[Array, Array]] = {}
        self.unit = Units.of(Rounding.undeclared(dtype), dtype)
        self.operands = self.unit.low.times(2) if mixed else 0.0  # both rounded
        self.oracle = 1 + unit_roundoff(np.float64) / self.unit.u  # its error obeys the same bound

    # --- products ---------------------------------------------------------------------------------

    def gamma(self, n: int) -> float:
        """Return the relative error of n roundings in a row."""
        return n * self.unit.u / (1 - n * self.unit.u)

    def linear(self, x: Array, e: Array | float, w: Array, b: Array | None = None) -> Array:
        """Error of x w + b, where x (..., m) errs by e."""
        m, product = w.shape[0], x @ w
        exact = product if b is None else product + b
        size, squares = abs(x) @ abs(w), x**2 @ w**2
        if b is not None:
            size, squares = size + abs(b), squares + b**2
        distinct = _are_distinct(x)[..., None] | _are_distinct(w.T)
        rounded = self.sum_error(m + 1, exact, size, squares, distinct, self.operands)
        flushed = self.unit.tiny * (abs(x).sum(-1, keepdims=True) + abs(w).sum(0) + m)
        stored = self.unit.low.u * (abs(product) + abs(exact)) + 2 * self.unit.low.eta
        carried = (np.zeros(x.shape) + e) @ abs(w)
        return np.asarray(carried + self.oracle * (rounded + stored + flushed))

    def sum_error(
        self, n: int, total: Array, size: Array, squares: Array, distinct: Array, operands: float
    ) -> Array:
        """Error of sums of n products, of which |total|, Σ |x y| and Σ (x y)² are known.

        The worst case; less where the products are distinct, whose roundings are as good as random
        (37): nothing is assumed of roundings of different sums. All arrays have the sums' shape.
        """
        worst = (self.gamma(n + 2) + operands) * size
        u2 = R2 * self.unit.u**2
        variance = u2 * ((n + 2) / 3 * total**2 + (n + 2) / 2 * squares)
        variance = variance + (u2 + R2 * operands**2) * squares  # of each product, and of operands
        likely = DEVIATIONS * np.sqrt(variance)
        return np.asarray(np.where(distinct, np.minimum(worst, likely), worst))

    def sum_of_rows(self, x: Array, ex: Array | float, y: Array, ey: Array | float) -> Array:
        """Error of xᵀ y, x (..., m) and y (..., n), summed over the other axes, where both err."""
        count = math.prod(x.shape[:-1])
        rows, others = _rows(x), _rows(y)
        total = abs(rows).T @ _rows(np.zeros(y.shape) + ey)
        if not isinstance(ex, float):
            total = total + _rows(ex).T @ _rows(abs(y) + ey)
        rounded = self.sum_error(
            count + 1,
            rows.T @ others,
            abs(rows).T @ abs(others),
            (rows**2).T @ others**2,
            _are_distinct(rows.T)[:, None] | _are_distinct(others.T),
            self.unit.low.times(2),
        )
        eta = count * self.unit.tiny + 2 * self.unit.low.eta
        return np.asarray(total + self.oracle * (rounded + eta))

    # --- forward ----------------------------------------------------------------------------------

    def forward(self, dout: Array | None, dweights: Array | None) -> dict[str, Array]:
        """Bounds of out, (..., T, out), and weights, (..., H, T, S); keep those of the steps."""
        steps, problem = self.steps, self.attention.problem
        self.head_errors = {name: self._project(name) for name in ("query", "key", "value")}
        eq, ek, ev = (self._share(self.head_errors[n], n) for n in self.head_errors)
        q, k, v = (self._share(x, n) for x, n in zip((problem.q, problem.k, problem.v),
                                                     self.head_errors, strict=True))  # fmt: skip
        self.q, self.k, self.v, self.eq, self.ek, self.ev = abs(q), abs(k), abs(v), eq, ek, ev
        self.scale = abs(cast(float, problem.scale))
        # What scores move by, and what weights do, of the exact attention of these q, k, v.
        a = self.scale * (eq @ _t(self.k) + (self.q + eq) @ _t(ek))  # (..., H, T, S)
        self.a = a
        p = self.attention.weights
        self.p = p
        moved = p * np.expm1(np.minimum(a, VAST))
        down = (p * np.exp(-np.minimum(a, VAST))).sum(-1, keepdims=True)
        down = np.where(down > 0, down, 1)
        # Where scores move that far, any visible key may take the whole weight.
        vast = (a > VAST).any(-1, keepdims=True)
        ep = np.minimum((moved + p * moved.sum(-1, keepdims=True)) / down, 1)
        self.ep = np.where(vast, 1, ep)
        keep = np.ones((1, 1))  # what dropout multiplies weights by
        if problem.dropout_mask is not None:
            keep = problem.dropout_mask / (1 - problem.dropout_rate)
        spread = abs(keep[..., None] * v[..., None, :, :] - self.attention.out[..., None, :])
        reach = spread.max(-2, initial=0)
        soft = np.minimum((moved[..., None] * spread).sum(-2) / down, reach)
        eo = np.where(vast, reach, soft) + ((p + self.ep) * keep) @ ev
        allowed = tolerance(
            problem,
            self.dtype,
            conventions=self.fwd.inputs.options.get("conventions"),
            dout=None if dout is None else self._through_merge(dout @ self._wo.T),
            dweights=dweights,
        )
        self.allowed = allowed
        self.eo = merge(eo + allowed["o"], self.mha.merge)
        out = self.eo
        if self.mha.wo is not None:
            p_ = steps.parameters
            out = self.linear(steps.merged, self.eo, p_["wo"], p_.get("bo"))
        return {"out": out, "weights": self.ep + allowed["weights"]}

    def _project(self, name: str) -> Array:
        """Error of the heads of a projection, appended keys included, which are exact."""
        steps, letter = self.steps, name[0]
        p, x = steps.parameters, steps.inputs[name]
        w, b = p["w" + letter], p.get("b" + letter)
        heads = self.mha.num_heads if name == "query" else self._kv_heads
        e = split(self.linear(x, self.errors.get(name, 0.0), w, b), heads)
        y = split(linear(x, w, b), heads)
        if name in steps.norms:
            y, e = steps.norms[name].y, self._normalise(name, y, e)
        if name in steps.turns:
            e = self._turn(name, y, e, steps.turns[name])
        more = 0 if name == "query" else self.attention.problem.S - x.shape[-2]
        return np.pad(e, [(0, 0)] * (e.ndim - 2) + [(0, more), (0, 0)])

    def _turn(self, name: str, y: Array, e: Array, turn: Turn) -> Array:
        """Error of the turned heads y (..., n, T, D) that err by e.

        The angles and their cosines are numbers of float32, whatever the dtype of the module: t · ω
        and ω = base^(−2i/R) round, an exponential by the size of its exponent.
        """
        rope = self.fwd.inputs.rope
        assert rope is not None
        u = max(self.unit.u, unit_roundoff(np.float32))
        frequencies = rope.frequencies or plain(rope.size or y.shape[-1], base=rope.base)
        angles = self.fwd.attention.problem.S * frequencies.values
        relative = 2 * abs(np.log(np.maximum(frequencies.values, self.unit.tiny))) + 4
        each = u * (angles * relative + 2) + 4 * self.unit.low.u  # (R/2,)
        out, c, s = e.copy(), abs(turn.cos), abs(turn.sin)
        for one, two in ((turn.first, turn.second), (turn.second, turn.first)):
            sizes = frequencies.amplitude * (abs(y[..., one]) + abs(y[..., two]))
            out[..., one] = c * e[..., one] + s * e[..., two] + each * sizes
        return out

    def _normalise(self, name: str, y: Array, e: Array) -> Array:
        """Error of the normalised heads of y (..., n, T, D) that err by e."""
        kind, norm = str(self.mha.qk_norm), self.steps.norms[name]
        by_projection, heads = kind.endswith("_projection"), y.shape[-3]
        y, e = (merge(x, "concat") if by_projection else x for x in (y, e))
        n = y.shape[-1]
        if kind.startswith("layer"):
            rounded = self.gamma(n + 3) * (abs(y) + abs(y).mean(-1, keepdims=True))
            e = e + e.mean(-1, keepdims=True) + rounded
        unit, count = abs(norm.unit), 1 if kind == "l2" else n
        # Relative error of the divisor; twice covers the quotient, for errors below a half.
        rho = np.minimum((unit * e).sum(-1, keepdims=True) / (count * norm.size), 0.5)
        rounding = self.gamma(n + 8) + self.unit.low.u
        eu = 2 * (e / norm.size + unit * rho) + rounding * unit
        self.norm_errors[name] = eu, rho + rounding
        w, b = (self._beside(f"norm_{name[0]}{x}") for x in ("", "_bias"))
        size = unit if w is None else unit * abs(w)
        size = size if b is None else size + abs(b)
        ey = (eu if w is None else eu * abs(w)) + 2 * self.unit.low.times(2) * size
        return split(ey, heads) if by_projection else ey

    def _beside(self, name: str) -> Array | None:
        w = self.steps.parameters.get(name)
        return w if w is None or w.ndim == 1 else w[:, None, :]

    def _normalised_backward(
        self, name: str, dy: Array, e: Array, allowed: dict[str, Array]
    ) -> tuple[Array, Array]:
        """Return the gradient before a norm and its error; note those of its parameters.

        dy, the gradient behind the norm, and e, its error, are (..., H, T, D).
        """
        kind, norm = str(self.mha.qk_norm), self.steps.norms[name]
        w = self._beside("norm_" + name[0])
        weight = self.steps.parameters.get("norm_" + name[0])
        dx, _, _ = normalise_backward(dy, norm, cast(Norm, kind), weight)
        by_projection, heads = kind.endswith("_projection"), dy.shape[-3]
        dy, e = (merge(x, "concat") if by_projection else x for x in (dy, e))
        eu, rho = self.norm_errors[name]
        unit, n = abs(norm.unit), dy.shape[-1]
        count = 1 if kind == "l2" else n
        rounding = self.gamma(n + 8) + self.unit.low.times(2)
        for more, of, own_error in (("", unit, eu), ("_bias", np.ones(1), np.zeros(1))):
            if f"norm_{name[0]}{more}" in self.steps.parameters:
                shape = self.steps.parameters[f"norm_{name[0]}{more}"].shape
                wide = shape if len(shape) == 1 else (shape[0], 1, shape[1])
                total = e * of + abs(dy) * own_error
                rows = math.prod(dy.shape[:-1])
                total = total + (self.gamma(rows + 3) + rounding) * abs(dy) * of
                allowed[f"norm_{name[0]}{more}"] = sum_to(total, wide).reshape(shape)
        g, eg = (abs(dy), e) if w is None else (abs(dy * w), e * abs(w))
        along = (g * unit).sum(-1, keepdims=True) / count
        ealong = (eg * unit + g * eu).sum(-1, keepdims=True) / count + rounding * along
        edx = eg + eu * along + unit * ealong + rounding * (g + unit * along)
        if kind.startswith("layer"):
            edx = edx + eg.mean(-1, keepdims=True) + rounding * g.mean(-1, keepdims=True)
        edx = edx / norm.size
        edx = split(edx, heads) if by_projection else edx
        rho = rho[..., None, :, :] if by_projection else rho
        return dx, edx + 2 * rho * abs(dx)

    @property
    def _kv_heads(self) -> int:
        return self.mha.num_kv_heads or self.mha.num_heads

    def _share(self, heads: Array, name: str) -> Array:
        """Repeat key/value heads for the query heads that share them."""
        group = 1 if name == "query" else self.mha.num_heads // self._kv_heads
        return np.repeat(heads, group, -3)

    @property
    def _wo(self) -> Array:
        wo = self.steps.parameters.get("wo")
        return np.eye(self.steps.merged.shape[-1]) if wo is None else wo

    def _through_merge(self, dmerged: Array) -> Array:
        return merge_backward(dmerged, self.mha.num_heads, self.mha.merge)

    # --- backward ---------------------------------------------------------------------------------

    def backward(self, dout: Array, dweights: Array | None) -> dict[str, Array]:
        """Return bounds of gradients by name; dout is (..., T, out), dweights (..., H, T, S)."""
        steps, allowed = self.steps, {}
        edmerged = np.zeros(steps.merged.shape)
        if self.mha.wo is not None:
            edmerged = self.linear(dout, 0.0, self._wo.T)
            allowed["wo"] = self.sum_of_rows(steps.merged, self.eo, dout, 0.0)
            allowed["bo"] = self._sum(dout, np.zeros_like(dout))
        do, edo = self._through_merge(dout @ self._wo.T), self._through_merge(edmerged)
        heads = self._heads_backward(do, edo, dweights)
        inner = api.backward(self.attention, do, None, dweights)
        grads = {"query": inner.q, "key": inner.k, "value": inner.v}
        for name, e in heads.items():
            letter, S = name[0], steps.inputs[name].shape[-2]
            if f"bias_{letter}" in steps.parameters:
                appended = self._sum(grads[name][..., S, :], e[..., S, :], 2)
                allowed[f"bias_{letter}"] = appended.reshape(-1)
            dh, edh = grads[name][..., :S, :], e[..., :S, :]
            if name in steps.turns:
                back = steps.turns[name].inverse()
                dh, edh = turn_array(dh, back, None), self._turn(name, dh, edh, back)
            if name in steps.norms:
                dh, edh = self._normalised_backward(name, dh, edh, allowed)
            dy, edy = merge(dh, "concat"), merge(edh, "concat")
            x, w = steps.inputs[name], steps.parameters["w" + letter]
            allowed["w" + letter] = self.sum_of_rows(x, self.errors.get(name, 0.0), dy, edy)
            allowed["b" + letter] = self._sum(dy, edy)
            target = {"query": "query", **self.fwd.inputs.stands_for}[name]
            edx = self.linear(dy, edy, w.T)
            size = 3 * (self.unit.u + self.unit.low.u) * abs(dy @ w.T)  # three terms are added
            allowed[target] = allowed.get(target, 0.0) + edx + size
        return {n: e for n, e in allowed.items() if n in steps.inputs or n in steps.parameters}

    def _heads_backward(self, do: Array, edo: Array, dweights: Array | None) -> dict[str, Array]:
        """Errors of dq, dk, dv: their own, and those of do, (..., H, T, E), which errs by edo."""
        p, ep, v = self.p, self.ep, self._share(self.attention.problem.v, "value")
        dp = do @ _t(v) + (0 if dweights is None else dweights)  # (..., H, T, S)
        edp = edo @ _t(self.v) + (abs(do) + edo) @ _t(self.ev)
        delta = (p * dp).sum(-1, keepdims=True)
        edelta = (ep * abs(dp) + (p + ep) * edp).sum(-1, keepdims=True)
        g = dp - delta
        eds = ep * abs(g) + (p + ep) * (edp + edelta)
        ds = p * abs(g)
        if (cap := self.attention.problem.softcap) is not None:  # of the slope: |(tanh²)′| < 1
            eds = eds + (ds + eds) * np.minimum(2 * self.a / cap, 1)
        errors = {
            "query": self.scale * (eds @ self.k + (ds + eds) @ self.ek),
            "key": self.scale * (_t(eds) @ self.q + _t(ds + eds) @ self.eq),
            "value": _t(ep) @ abs(do) + _t(p + ep) @ edo,
        }
        shape = {n: getattr(self.attention.problem, n[0]).shape for n in errors}
        return {n: self._gather(e, shape[n]) + self.allowed["d" + n[0]] for n, e in errors.items()}

    def _gather(self, e: Array, shape: tuple[int, ...]) -> Array:
        """Sum the errors of the query heads that share a key/value head."""
        *lead, heads, rows, size = e.shape
        kv = shape[-3]
        grouped = e.reshape(*lead, kv, heads // kv, rows, size).sum(-3)
        return sum_to(grouped, shape)

    def _sum(self, x: Array, e: Array, keep: int = 1) -> Array:
        """Error of the sum of x over all but the last axes, where x errs by e."""
        axes = tuple(range(x.ndim - keep))
        count = int(np.prod([x.shape[i] for i in axes]))
        rounding = self.gamma(count + 3) + self.unit.low.times(2)
        return np.asarray(e.sum(axes) + self.oracle * rounding * abs(x).sum(axes))


def _are_distinct(x: Array) -> Array:
    """Return for each row of x (..., m) whether nearly all of its numbers are distinct."""
    rises = count_rises(x.astype(np.float32))
    return np.asarray(rises + 1 >= DISTINCT * x.shape[-1])


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)
