"""The equations of dense.py with some quantities replaced: what a cause predicts.

    Round = {"p": f}    the weights are f(p), and all that follows is computed from them

It shares no line with dense.py, which nobody touches for it. Everything is float64; conventions
are translated before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from npattn.conventions import Conventions
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.diagnosis.defaults import (
    translate_cotangents,
    translate_gradients,
    translate_problem,
    translate_results,
)
from npattn.testing.diagnosis.evidence import Arrays

Changes = Mapping[str, Callable[[Array], Array]]
"""Quantity → what it becomes: "inputs", "product", "s", "p", "factor" (of a product), "lse"."""


def replay(
    problem: Problem, cotangents: Cotangents, conventions: Conventions, changes: Changes
) -> dict[str, Array]:
    """Return results and gradients by name, with some quantities replaced by functions of them."""
    own = translate_problem(problem, conventions)
    passed_back = translate_cotangents(problem, cotangents, conventions)
    with np.errstate(all="ignore"):  # hidden scores may be anything
        results, gradients = _evaluate(own, passed_back, changes)
    found: Arrays = {name: [x] for name, x in results.items()}
    back: Arrays = {name: [x] for name, x in gradients.items()}
    whole = {**translate_results(problem, found, conventions)}
    whole |= translate_gradients(problem, back, conventions)
    return {name: x[0] for name, x in whole.items()}


def _evaluate(
    problem: Problem, cotangents: Cotangents, changes: Changes
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return results and gradients in float64, with the named quantities changed on the way."""

    def change(name: str, x: Array) -> Array:
        return np.asarray(changes[name](x)) if name in changes else x

    def product(w: Array, x: Array) -> Array:
        return np.asarray(change("factor", w) @ change("factor", x))

    problem = problem.materialise()
    H, K, T = problem.H, problem.K, problem.T
    lead, scale = problem.lead, problem.scale
    assert scale is not None

    def repeat_heads(x: Array) -> Array:
        x = change("inputs", np.asarray(x, np.float64))
        x = x[None] if problem.headless else x
        return np.repeat(x, H // max(K, 1) if x.shape[-3] == K else 1, -3)

    q, k, v = (repeat_heads(x) for x in (problem.q, problem.k, problem.v))
    x = change("product", scale * (q @ k.swapaxes(-1, -2)))  # (..., H, T, S)
    slope: Array | float = 1.0
    s = x
    if problem.softcap is not None:
        tanh = np.tanh(x / problem.softcap)
        s, slope = problem.softcap * tanh, 1 - tanh**2
    bias = problem.bias_array
    s = s if bias is None else s + np.asarray(bias, np.float64)
    visible = True if problem.visible is None else problem.visible
    s = change("s", np.where(visible, s, -np.inf))
    live = s != -np.inf
    sinks = np.full((H, 1, 1), -np.inf)
    if problem.sinks is not None:
        sinks = np.asarray(problem.sinks, np.float64)[:, None, None]
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sinks)
    m = np.where(m == -np.inf, 0, m)
    e, e_sink = np.exp(s - m), np.exp(sinks - m)
    total = e.sum(-1, keepdims=True) + e_sink
    safe = np.where(total == 0, 1, total)
    p, p_sink = change("p", e / safe), e_sink / safe
    keep: Array | float = 1.0
    if problem.dropout_mask is not None:
        keep = np.asarray(problem.dropout_mask, np.float64) / (1 - problem.dropout_rate)
    gate = 1.0 if problem.gate is None else np.asarray(problem.gate, np.float64)
    ungated = product(p * keep, v)
    lse = change("lse", m + np.log(total))[..., 0]
    results = {"o": gate * ungated, "lse": lse, "weights": p}
    results["max_score"] = s.max(-1, initial=-np.inf)

    do = np.asarray(cotangents.dout, np.float64).reshape(*lead, H, T, problem.E)
    dlse = 0.0 if cotangents.dlse is None else cotangents.dlse.reshape(*lead, H, T, 1)
    dw = 0.0 if cotangents.dweights is None else np.asarray(cotangents.dweights, np.float64)
    dgate = do * ungated
    do = change("inputs", gate * do)
    dv = product((p * keep).swapaxes(-1, -2), do)
    dp = np.where(live, product(do, v.swapaxes(-1, -2)) * keep + dw, 0)
    delta = (p * dp).sum(-1, keepdims=True) - dlse
    ds = np.where(live, p * (dp - delta), 0)
    dx = ds * slope
    dq = scale * product(dx, k)
    dk = scale * product(dx.swapaxes(-1, -2), q)

    def sum_shared(dx: Array, x: Array) -> Array:
        dx = dx.reshape(*dx.shape[:-3], K, H // max(K, 1), *dx.shape[-2:]).sum(-3)
        return sum_to(dx, np.shape(x))

    gradients = {"dq": sum_to(dq, np.shape(problem.q)), "dk": sum_shared(dk, problem.k)}
    gradients["dv"] = sum_shared(dv, problem.v)
    if bias is not None:
        gradients["dbias"] = sum_to(ds, np.shape(bias))
    if problem.sinks is not None:
        gradients["dsinks"] = sum_to(-p_sink * delta, (H, 1, 1))[:, 0, 0]
    if problem.gate is not None:
        gradients["dgate"] = sum_to(dgate, np.shape(problem.gate))
    if problem.headless:
        results = {name: x[0] for name, x in results.items()}
    return results, gradients
