"""Translate bounds of the canonical problem into those of the results: by conventions and a gate.

What a gate multiplies may be the stored o of another kernel, and so may gate · dout, the cotangent
of that o [16]; docs/tolerance.md §4 derives both. The cotangent is a matter of the gradients
(`stored_do` in worst_case/backward.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from npattn.conventions import Conventions
from npattn.problem import Gradients, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.problem.gating import gate_factor
from npattn.testing.bounds.worst_case import WorstCase

OWN = Conventions()
FORWARD = ("o", "lse", "weights", "max_score")


def translate_bounds(
    problem: Problem,
    conventions: Conventions,
    form: WorstCase,
    bounds: dict[str, Array],
    dout: Array | None,
) -> dict[str, Array]:
    """Return the bounds of a problem's results, from those of the canonical problem.

    dout is (..., H, T, E). `form` is the worst case of the canonical problem; without `dout`, there
    are no gradients.
    """
    if conventions == OWN:
        return _own_terms(problem, bounds)
    empty = form.lse == -np.inf
    if conventions.lse_base == "2":
        size = np.where(empty, 0, abs(form.lse))
        bounds["lse"] = (bounds["lse"] + 4 * form.unit.u * size) / math.log(2)
    if "weights" in bounds:
        bounds["weights"] = _translate_weights(problem, conventions, form, bounds["weights"])
    _, mean = conventions.empty_rows(problem, empty)
    if mean is not None:
        # As a softmax over S equal scores: a weight, S products and sums, a division.
        rel = form.gamma(form.chain + 4) + 2 * form.unit.p.u + form.unit.exp
        sizes = conventions.results(problem.replace(v=abs(problem.v)), abs(form.o), form.lse)[0]
        bounds["o"] = np.where(mean[..., None], rel * sizes, bounds["o"])
        even = rel / max(problem.S, 1)
        if "weights" in bounds:
            bounds["weights"] = np.where(mean[..., None], even, bounds["weights"])
    if problem.headless:
        bounds = {n: t[0] if n in FORWARD else t for n, t in bounds.items()}
    if dout is None:
        return bounds
    raw = Gradients(**{n[1:]: t for n, t in bounds.items() if n[0] == "d"})
    grads = _translate_gradients(problem, conventions, form, raw, abs(dout))
    forward = {n: t for n, t in bounds.items() if n[0] != "d"}
    return forward | {f"d{n}": t for n, t in vars(grads).items() if t is not None}


def _own_terms(problem: Problem, bounds: dict[str, Array]) -> dict[str, Array]:
    """Return the bounds of results in npattn's own terms."""
    for name in {"weights", "dbias"} & bounds.keys():  # a deviation of inf, dropped, is none
        unknown = np.isnan(bounds[name])
        if unknown.any():
            bounds[name] = np.where(unknown, np.inf, bounds[name])
    if problem.headless:
        return {n: t[0] if n in FORWARD else t for n, t in bounds.items()}
    return bounds


def _translate_weights(
    problem: Problem, conventions: Conventions, form: WorstCase, bound: Array
) -> Array:
    """Return the bound on the weights, (..., H, T, S), under these conventions."""
    unit, lse = form.unit, form.lse
    with_zero_rows = _without_empty_rows(conventions)
    with np.errstate(invalid="ignore"):  # a deviation of inf, dropped, is none
        bound = with_zero_rows.returned_weights(problem, bound, lse)
    bound = np.where(np.isnan(bound), np.inf, bound)
    if conventions.weights == "after_dropout" and problem.dropout_mask is not None:
        p_hat = replace(with_zero_rows, weights="before_dropout").returned_weights(
            problem, form.p_hat, lse
        )
        more = (2 * unit.u + unit.p.u) / (1 - problem.dropout_rate) * p_hat
        bound = bound + more + unit.p.eta + unit.tiny
    return bound


def _translate_gradients(
    problem: Problem, conventions: Conventions, form: WorstCase, raw: Gradients, dout: Array
) -> Gradients:
    """Translate bounds of gradients; `dout` is |dout|, (..., H, T, E)."""
    flat = form.lse[0] if problem.headless else form.lse
    with_zero_rows = _without_empty_rows(conventions)
    grads = with_zero_rows.gradients(problem, raw, dout, flat)
    if problem.bias_array is not None and grads.bias is not None and raw.bias is not None:
        bias = abs(grads.bias) + _extra_dbias_error(problem, conventions, form, raw.bias)
        grads = replace(grads, bias=np.where(np.isnan(bias), np.inf, bias))
    undefined, mean = conventions.empty_rows(problem, np.isneginf(form.lse))
    if undefined is None and mean is None:
        return grads
    nothing = replace(raw, **{n: np.zeros_like(t) for n, t in vars(raw).items() if t is not None})
    empty_row_share = conventions.gradients(problem, nothing, dout, flat)
    if mean is not None:
        # The cotangent of an empty row goes to v through a rounded 1/S.
        rel = form.gamma(form.chain + problem.T + 4) + 3 * form.unit.low.u
        grads = replace(grads, v=grads.v + rel * empty_row_share.v)
    if undefined is not None:  # where only rows of NaN have a share, nothing is compared
        free = {n: np.isnan(t) for n, t in vars(empty_row_share).items() if t is not None}
        grads = replace(
            grads, **{n: np.where(at, np.inf, getattr(grads, n)) for n, at in free.items()}
        )
    return grads


def _without_empty_rows(conventions: Conventions) -> Conventions:
    """Return the conventions under which empty rows are 0, as the canonical ones."""
    return replace(conventions, empty_row="zero", empty_row_bias=None)


@np.errstate(invalid="ignore")  # inf · 0, in deviations that do not count
def _extra_dbias_error(
    problem: Problem, conventions: Conventions, form: WorstCase, raw: Array
) -> Array | float:
    """Return the error of dbias by a late cap, or by the scale that it goes through.

    `raw`, its bound in the canonical problem, broadcasts to the shape of the scores.
    """
    before = conventions.bias == "before_scale"
    if problem.bias_array is None or not (form.caps_late or before):
        return 0.0
    S, unit = problem.S, form.unit
    mass, extra = abs(form.ds)[..., :S], np.zeros(())
    if form.caps_late:
        n = mass.size / max(problem.bias_array.size, 1)
        extra = form.cap_error[..., :S] * (mass + raw[..., :S])
        extra = extra + (unit.u + unit.ds.u + form.gamma(n + 4)) * mass + unit.ds.eta
    if before:
        extra = (extra + 2 * (unit.u + unit.ds.u) * mass + unit.ds.eta) * form.scale
        extra = extra + unit.tiny * (mass > 0)  # the product with the scale is flushed
    return sum_to(np.broadcast_to(extra, mass.shape), problem.bias_array.shape)


# --- the gate -----------------------------------------------------------------------------------


def gate_cotangent(problem: Problem, dout: Array) -> Array:
    """Return the cotangent of o before the gate."""
    return dout if problem.gate is None else (gate_factor(problem) * dout)


@np.errstate(all="ignore")  # o may be NaN, and 0 · inf is 0 here
def gate_bounds(
    problem: Problem,
    conventions: Conventions,
    form: WorstCase,
    bounds: dict[str, Array],
    dout: Array | None,
) -> dict[str, Array]:
    """Return the bounds of a problem with a gate, from those without; dout is (..., H, T, E).

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
        rows = form.gate_row_error(dout[head])
        each = each + rows / max(problem.E, 1)
    undefined = conventions.undefined_rows(problem, lse)
    if undefined is not None:  # NaN by convention; kernels multiply it
        each = np.where(undefined[head][..., None], np.inf, each)
    return result | {"dgate": sum_to(each, shape)}
