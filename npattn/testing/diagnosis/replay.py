"""Attention with some quantities replaced by functions of them: what a rounding predicts.

    changes = {"p": f}    the weights are f(p), and all that follows is computed from them

Everything is float64, and the parts are those of dense.py. Dropout and the gate, which no plain
problem has, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from npattn.conventions import Conventions
from npattn.engines import dense
from npattn.problem import Cotangents, Gradients, Problem
from npattn.problem.arrays import Array, sum_to

Changes = Mapping[str, Callable[[Array], Array]]
"""Quantity → what it becomes: "inputs", "product", "s", "p", "factor" (of a product), "lse"."""


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]  # a dict of literals
def replay(
    problem: Problem, cotangents: Cotangents, conventions: Conventions, changes: Changes
) -> dict[str, Array]:
    """Return results and gradients by name, with some quantities replaced by functions of them."""

    def change(name: str, x: Array) -> Array:
        return np.asarray(changes[name](x)) if name in changes else x

    def product(w: Array, x: Array) -> Array:
        return np.asarray(change("factor", w) @ change("factor", x))

    own = conventions.canonical(problem).replace(dtype="float64")
    q, k, v = (change("inputs", x) for x in dense.operands(own))
    s = change("product", own.scale * (q @ k.swapaxes(-1, -2)))  # (..., H, T, S)
    slope: Array | float = 1.0
    if own.softcap is not None:
        tanh = np.tanh(s / own.softcap)
        s, slope = own.softcap * tanh, 1 - tanh**2
    s = s if own.bias_array is None else s + own.bias_array
    s = change("s", s if own.visible is None else np.where(own.visible, s, -np.inf))
    live, top = s != -np.inf, s.max(-1, keepdims=True, initial=-np.inf)
    sinks = None if own.sinks is None else np.asarray(own.sinks, np.float64)[:, None, None]
    p, p_sink, lse = dense.softmax(s, top, live, sinks)
    p = change("p", p)
    o, shown = product(p, v), change("lse", lse)

    do, dlse, dweights = conventions.cotangents(
        problem, cotangents.dout, cotangents.dlse, cotangents.dweights
    )
    do = change("inputs", np.asarray(do, np.float64).reshape(o.shape))
    dp = product(do, v.swapaxes(-1, -2)) + (0 if dweights is None else dweights)
    dp = dense.where_live(dp, live)
    delta = (p * dp).sum(-1, keepdims=True)  # of weights that are rounded, and do not sum to 1
    delta = delta if dlse is None else delta - dlse.reshape(delta.shape)
    ds = dense.where_live(p * (dp - delta), live)
    dx = ds * slope
    grads = Gradients(
        q=sum_to(own.scale * product(dx, k), own.q.shape),
        k=dense.sum_shared(own.scale * product(dx.swapaxes(-1, -2), q), own.K, own.k.shape),
        v=dense.sum_shared(product(p.swapaxes(-1, -2), do), own.K, own.v.shape),
        bias=own.bias_gradient(ds),
        sinks=None if p_sink is None else sum_to(-p_sink * delta, (own.H, 1, 1))[:, 0, 0],
    )

    if problem.headless:
        o, lse, shown, p, do = (x[0] for x in (o, lse, shown, p, do))
    grads = conventions.gradients(problem, grads, do, lse)
    whole = dict(zip(("o", "lse"), conventions.results(problem, o, shown), strict=True))
    whole |= {"weights": conventions.returned_weights(problem, p, lse)}
    whole |= {"max_score": (top[0] if problem.headless else top)[..., 0]}
    return whole | {f"d{name}": x for name, x in vars(grads).items() if x is not None}
