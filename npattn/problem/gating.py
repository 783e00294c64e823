"""Output gate: out = gate · o, around the engines, which know nothing of it.

    do = gate · dout     dgate = sum of dout · o to the shape of the gate

Rule 16 of docs/semantics.md. A head mask is a gate of shape (H, 1, 1). Every function takes arrays
and tensors alike. Source: Qiu et al. 2025, "Gated attention for large language models".
"""

from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to


def apply_gate(problem: Problem, o: Array, undefined: Array | None = None) -> Array:
    """Return gate · o, (..., H, T, E), rounded; rows `undefined`, (..., H, T), stay NaN [15]."""
    o = problem.to_compute_dtype(o)
    if undefined is None:
        return problem.to_output_dtype(gate_factor(problem) * o)
    rows, xp = undefined[..., None], problem.xp
    gated = gate_factor(problem) * xp.where(rows, 0, o)
    return problem.to_output_dtype(xp.where(rows, float("nan"), gated))


def pull_back(
    problem: Problem, o: Array, dout: Array, undefined: Array | None = None
) -> tuple[Array, Array]:
    """Return the cotangent of o, (..., H, T, E), and the gradient of the gate, in its shape."""
    gate = problem.gate
    assert gate is not None
    dout = problem.round_to_storage(dout)
    each = dout * problem.to_compute_dtype(o)
    if undefined is not None:
        each = problem.xp.where(undefined[..., None], 0, each)
    each = each[None] if problem.headless else each
    return gate_factor(problem) * dout, sum_to(each, gate.shape)


def apply_gate_tangent(problem: Problem, o: Array, do: Array, dgate: Array | None) -> Array:
    """Return the directional derivative of gate · o; the shape of dgate is that of the gate."""
    moved = gate_factor(problem) * do
    return moved if dgate is None else moved + _without_head(problem, dgate) * o


def gate_factor(problem: Problem) -> Array:
    """Return the gate in the dtype of the computation; broadcasts against out."""
    assert problem.gate is not None
    return _without_head(problem, problem.to_operand(problem.gate))


def _without_head(problem: Problem, gate: Array) -> Array:
    """Drop the head axis of a gate, where q, k, v have none."""
    return gate[0] if problem.headless and gate.ndim == 3 else gate
