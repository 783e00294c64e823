"""Gradients of the gradients of attention: `dense.backward`, differentiated by hand.

    dense.backward returns the gradients dq, dk, dv, dbias, dsinks of L = Σ do·o + Σ dlse·lse + …
    They are results as o is, and a loss may depend on them:
    Φ = Σ ddq·dq + Σ ddk·dk + Σ ddv·dv + Σ ddbias·dbias + Σ ddsinks·dsinks,
    where ddx is the cotangent of dx. This page has the gradients of Φ in everything that
    dense.backward reads: q, k, v, bias, sinks, and the cotangents do, dlse, dweights.

Φ is the change of L along (ddq, ddk, ddv, ddbias, ddsinks). Hence two checks of every line here:
the gradient of Φ in do is the change of o along it (`dense.jvp`), and that in q, k, v is the change
of the gradients themselves (`npattn.hvp`), as second derivatives may be taken in either order.
Derivation: docs/derivations/second_order.md. Numbers in brackets: docs/semantics.md.
"""

from dataclasses import dataclass

import numpy as np

from npattn.engines.dense import (
    QUIET,
    Residuals,
    repeat_heads,
    subtract_mean,
    sum_live,
    sum_shared,
    where_live,
)
from npattn.problem import Gradients, Problem
from npattn.problem.arrays import Array, sum_to


@dataclass(frozen=True, eq=False)
class SecondGradients(Gradients):
    """Gradients of a loss of the gradients, each shaped as its input; None for no such input."""

    dout: Array | None = None
    dlse: Array | None = None
    dweights: Array | None = None


@np.errstate(**QUIET)  # type: ignore[arg-type]  # a dict of literals
def backward_twice(
    problem: Problem,
    residuals: Residuals,
    do: Array,
    dlse: Array | None = None,
    dweights: Array | None = None,
    *,
    ddq: Array,
    ddk: Array,
    ddv: Array,
    ddbias: Array | None = None,
    ddsinks: Array | None = None,
) -> SecondGradients:
    """Gradients of Φ = Σ ddq·dq + Σ ddk·dk + …: forward and backward, read upwards.

    do is (..., H, T, E), dlse (..., H, T), dweights (..., H, T, S), ddq as q, ddk as k, and so on.
    All arrays have a head axis. A problem with score_mod or mixed precision is not for this page.
    """
    q, k, v, tanh, _, live, p, p_sink, keep, _ = residuals
    ddk, ddv = repeat_heads(ddk, problem), repeat_heads(ddv, problem)
    factor = 1 if keep is None else keep  # w = p · κ  [9]

    # The lines of backward: g = dp less its mean, and ds = p g.
    dp = (do @ v.swapaxes(-1, -2)) * factor
    dp = where_live(dp if dweights is None else dp + dweights, live)
    g, g_sink = subtract_mean(dp, 0, p, p_sink)
    if dlse is not None:
        g, g_sink = g + dlse[..., None], g_sink + dlse[..., None]
    ds = where_live(p * g, live)

    # The change of the scores along the direction, as in jvp: Φ = Σ ds · turn + Σ w (do · ddv).
    turn_x = problem.scale * (ddq @ k.swapaxes(-1, -2) + q @ ddk.swapaxes(-1, -2))
    slope = 1 if tanh is None else 1 - tanh**2  # s = c · tanh(x / c)
    turn = turn_x * slope if ddbias is None else turn_x * slope + ddbias
    turn = where_live(turn, live)
    turn_sink = 0 if ddsinks is None else ddsinks[:, None, None]
    h, h_sink = subtract_mean(turn, turn_sink, p, p_sink)  # turn less its mean: the change of log p
    change = where_live(p * h, live)  # of p

    # Φ is linear in do, in dlse and in dweights.
    w, dw = p * factor, change * factor
    of_do = sum_live(dw, v, live) + sum_live(w, ddv, live)
    of_lse = (p * turn).sum(-1)
    of_lse = of_lse if p_sink is None else of_lse + (p_sink * turn_sink)[..., 0]

    # In v: dp = κ (do · v) is all that contains it.
    of_v = sum_live(dw.swapaxes(-1, -2), do, live.swapaxes(-1, -2))

    # In p, up to a constant of each row, which the softmax takes off again.
    of_p = where_live(g * h + factor * (do @ ddv.swapaxes(-1, -2)), live)
    of_log_p, of_log_sink = subtract_mean(of_p, g_sink * h_sink, p, p_sink)
    of_s = where_live(p * of_log_p, live)
    of_sink = None if p_sink is None else p_sink * of_log_sink

    # In x, through s, and through the slope of the cap, which is −2 tanh (1 − tanh²) / c steep.
    dx, of_x = ds * slope, of_s * slope
    if tanh is not None:
        of_x = of_x - ds * turn_x * 2 * tanh * slope / problem.softcap
    dx, of_x = where_live(dx, live), where_live(of_x, live)

    # In q and k: x = scale · q kᵀ, and turn_x contains both once more.
    of_q = problem.scale * (sum_live(of_x, k, live) + sum_live(dx, ddk, live))
    of_x, dx, seen = (x.swapaxes(-1, -2) for x in (of_x, dx, live))
    of_k = problem.scale * (sum_live(of_x, q, seen) + sum_live(dx, ddq, seen))

    headless = problem.headless
    return SecondGradients(
        q=sum_to(of_q, problem.q.shape),
        k=sum_shared(of_k, problem.K, problem.k.shape),
        v=sum_shared(of_v, problem.K, problem.v.shape),
        bias=problem.bias_gradient(of_s),
        sinks=None if of_sink is None else sum_to(of_sink, (problem.H, 1, 1))[:, 0, 0],
        dout=of_do[0] if headless else of_do,
        dlse=None if dlse is None else of_lse[0] if headless else of_lse,
        dweights=None if dweights is None else change[0] if headless else change,
    )
