"""Bounds of o after a gate, and of the gradient of the gate [16].

What a gate multiplies may be the stored o of another kernel, and so may gate · dout, the cotangent
of that o; docs/tolerance.md §4 derives both. The cotangent is a matter of the gradients
(`stored_do` in worst_case/backward.py).
"""

from __future__ import annotations

import numpy as np

from npattn.arrays import Array, sum_to
from npattn.conventions import Conventions
from npattn.gating import gate_factor
from npattn.problem import Problem
from npattn.testing.bounds.worst_case import WorstCase


def gate_cotangent(problem: Problem, dout: Array) -> Array:
    """Return the cotangent of o before the gate."""
    return dout if problem.gate is None else np.asarray(gate_factor(problem) * dout)


@np.errstate(all="ignore")  # o may be NaN, and 0 · inf is 0 here
def gate_bounds(
    problem: Problem,
    conventions: Conventions,
    form: WorstCase,
    bounds: dict[str, Array],
    dout: Array | None,
) -> dict[str, Array]:
    """Return the bounds of a problem with a gate, from those without it.

    `form` is the worst case of the canonical problem, after its forward and, with `dout`, its
    backward.
    """
    if problem.gate is None:
        return bounds
    unit, gate = form.unit, np.broadcast_to(abs(gate_factor(problem)), bounds["o"].shape)
    o = form.o[0] if problem.headless else form.o
    lse = form.lse[0] if problem.headless else form.lse
    o = abs(conventions.results(problem, o, lse)[0])
    stored = bounds["o"] + unit.low.u * (o + bounds["o"]) + unit.low.eta
    gated = gate * stored + unit.u * gate * (o + stored) + unit.tiny
    result = bounds | {"o": np.where(gate == 0, 0, gated)}
    if dout is None:
        return result
    size = abs(dout) * o
    # The products with dout may be stored, and so may sums of them.
    each = abs(dout) * stored + (unit.u + 2 * unit.low.u) * (size + abs(dout) * stored)
    each = each + unit.low.eta + unit.tiny
    head = (None,) if problem.headless else (...,)
    each, size = each[head], size[head]
    shape = problem.gate.shape
    n = each.size / max(problem.gate.size, 1)
    each = each + form.gamma(n + 4) * (size + each)
    if form.gates_weights:
        rows = form.gate_row_error(np.asarray(dout[head]))
        each = each + rows / max(problem.E, 1)
    undefined = conventions.undefined_rows(problem, lse)
    if undefined is not None:  # NaN by convention; kernels multiply it
        each = np.where(undefined[head][..., None], np.inf, each)
    return result | {"dgate": sum_to(each, shape)}
