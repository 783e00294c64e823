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
from npattn.multihead.projections import merge, merge_backward, split
from npattn.oracle import api
from npattn.problem.arrays import Array, sum_to
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.bounds.rounding import Rounding, Units, unit_roundoff

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
        If the module has norms, a gate or rotary positions.

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
        if mha.qk_norm is not None or mha.wg is not None or fwd.inputs.rope is not None:
            raise OptionError(
                "the module has norms, a gate or rotary positions, whose errors have no bound yet: "
                "judge the attention between them with npattn.testing.check"
            )
        self.fwd, self.mha, self.dtype, self.errors = fwd, mha, dtype, errors or {}
        self.steps, self.attention = fwd.steps, fwd.attention
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
        each = self.oracle * (self.gamma(m + 3) + self.operands)  # relative to |x| |w| + |b|
        flushed = self.unit.tiny * (abs(x).sum(-1, keepdims=True) + abs(w).sum(0) + m)
        stored = self.unit.low.u * (abs(product) + abs(exact)) + 2 * self.unit.low.eta
        bias = 0.0 if b is None else each * abs(b)
        return np.asarray((each * abs(x) + e) @ abs(w) + bias + self.oracle * (stored + flushed))

    def sum_of_rows(self, x: Array, ex: Array | float, y: Array, ey: Array | float) -> Array:
        """Error of xᵀ y summed over every axis but the last, where both err."""
        count = math.prod(x.shape[:-1])
        each = self.oracle * (self.gamma(count + 3) + self.unit.low.times(2))
        size = abs(y)
        total = _rows(abs(x)).T @ _rows(ey + each * size)
        if not isinstance(ex, float):
            total = total + _rows(ex).T @ _rows(size + ey)
        eta = count * self.unit.tiny + 2 * self.unit.low.eta
        return np.asarray(total + self.oracle * eta)

    # --- forward ----------------------------------------------------------------------------------

    def forward(self, dout: Array | None, dweights: Array | None) -> dict[str, Array]:
        """Bounds of out and weights; keep those of the steps for `backward`."""
        steps, problem = self.steps, self.attention.problem
        self.head_errors = {name: self._project(name) for name in ("query", "key", "value")}
        eq, ek, ev = (self._share(self.head_errors[n], n) for n in self.head_errors)
        q, k, v = (self._share(x, n) for x, n in zip((problem.q, problem.k, problem.v),
                                                     self.head_errors, strict=True))  # fmt: skip
        self.q, self.k, self.v, self.eq, self.ek, self.ev = abs(q), abs(k), abs(v), eq, ek, ev
        self.scale = abs(cast(float, problem.scale))
        # What scores move by, and what weights do, of the exact attention of these q, k, v.
        a = self.scale * (eq @ _t(self.k) + (self.q + eq) @ _t(ek))  # (..., H, T, S)
        p = self.attention.weights
        self.p = p
        moved = p * np.expm1(np.minimum(a, VAST))
        down = (p * np.exp(-np.minimum(a, VAST))).sum(-1, keepdims=True)
        down = np.where(down > 0, down, 1)
        # Where scores move that far, any visible key may take the whole weight.
        vast = (a > VAST).any(-1, keepdims=True)
        ep = np.minimum((moved + p * moved.sum(-1, keepdims=True)) / down, 1)
        self.ep = np.where(vast, 1, ep)
        keep = _keep_factors(problem)
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
        self.own = allowed
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
        e = self.linear(x, self.errors.get(name, 0.0), p["w" + letter], p.get("b" + letter))
        e = split(e, self.mha.num_heads if name == "query" else self._kv_heads)
        more = 0 if name == "query" else self.attention.problem.S - x.shape[-2]
        return np.pad(e, [(0, 0)] * (e.ndim - 2) + [(0, more), (0, 0)])

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
        """`forward` read upwards: bounds of the gradients."""
        steps, allowed = self.steps, {}
        edmerged = np.zeros(steps.merged.shape)
        if self.mha.wo is not None:
            edmerged = self.linear(dout, 0.0, self._wo.T)
            allowed["wo"] = self.sum_of_rows(steps.merged, self.eo, dout, 0.0)
            allowed["bo"] = self._sum(dout, np.zeros_like(dout))
        do, edo = self._through_merge(dout @ self._wo.T), self._through_merge(edmerged)
        heads = self._heads_backward(do, edo, dweights)
        grads = self._own_gradients(do, dweights)
        length = {name: x.shape[-2] for name, x in steps.inputs.items()}
        for name, e in heads.items():
            letter = name[0]
            if f"bias_{letter}" in steps.parameters:
                own = self._sum(grads[name][..., length[name], :], e[..., length[name], :], 2)
                allowed[f"bias_{letter}"] = own.reshape(-1)
            dy, edy = (merge(z[..., : length[name], :], "concat") for z in (grads[name], e))
            x, w = steps.inputs[name], steps.parameters["w" + letter]
            allowed["w" + letter] = self.sum_of_rows(x, self.errors.get(name, 0.0), dy, edy)
            allowed["b" + letter] = self._sum(dy, edy)
            target = {"query": "query", **self.fwd.inputs.stands_for}[name]
            edx = self.linear(dy, edy, w.T)
            size = 3 * (self.unit.u + self.unit.low.u) * abs(dy @ w.T)  # three terms are added
            allowed[target] = allowed.get(target, 0.0) + edx + size
        return {n: e for n, e in allowed.items() if n in steps.inputs or n in steps.parameters}

    def _heads_backward(self, do: Array, edo: Array, dweights: Array | None) -> dict[str, Array]:
        """Errors of dq, dk, dv: those that attention gets, and its own."""
        p, ep, v = self.p, self.ep, self._share(self.attention.problem.v, "value")
        dp = do @ _t(v) + (0 if dweights is None else dweights)  # (..., H, T, S)
        edp = edo @ _t(self.v) + (abs(do) + edo) @ _t(self.ev)
        delta = (p * dp).sum(-1, keepdims=True)
        edelta = (ep * abs(dp) + (p + ep) * edp).sum(-1, keepdims=True)
        g = dp - delta
        eds = ep * abs(g) + (p + ep) * (edp + edelta)
        ds = p * abs(g)
        errors = {
            "query": self.scale * (eds @ self.k + (ds + eds) @ self.ek),
            "key": self.scale * (_t(eds) @ self.q + _t(ds + eds) @ self.eq),
            "value": _t(ep) @ abs(do) + _t(p + ep) @ edo,
        }
        shape = {n: getattr(self.attention.problem, n[0]).shape for n in errors}
        return {n: self._gather(e, shape[n]) + self.own["d" + n[0]] for n, e in errors.items()}

    def _gather(self, e: Array, shape: tuple[int, ...]) -> Array:
        """Sum the errors of the query heads that share a key/value head."""
        *lead, heads, rows, size = e.shape
        kv = shape[-3]
        grouped = e.reshape(*lead, kv, heads // kv, rows, size).sum(-3)
        return sum_to(grouped, shape)

    def _own_gradients(self, do: Array, dweights: Array | None) -> dict[str, Array]:
        grads = api.backward(self.attention, do, None, dweights)
        return {"query": grads.q, "key": grads.k, "value": grads.v}

    def _sum(self, x: Array, e: Array, keep: int = 1) -> Array:
        """Error of the sum of x over all but the last axes, where x errs by e."""
        axes = tuple(range(x.ndim - keep))
        count = int(np.prod([x.shape[i] for i in axes]))
        rounding = self.gamma(count + 3) + self.unit.low.times(2)
        return np.asarray(e.sum(axes) + self.oracle * rounding * abs(x).sum(axes))


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _keep_factors(problem: Any) -> Array:
    """What dropout multiplies weights by: 0 where it drops."""
    if problem.dropout_mask is None:
        return np.ones((1, 1))
    return np.asarray(problem.dropout_mask / (1 - problem.dropout_rate))
