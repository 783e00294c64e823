"""First-order effects of known mistakes on results, for the fits of `systematic_error`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from npattn.oracle.api import backward, evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.rules.terms import expand_heads, lse_unit, scale
from npattn.testing.trial import Evaluation, Trial


def mistake_effects(evaluation: Evaluation, trial: Trial, name: str) -> Iterator[tuple[str, Array]]:
    """First-order effect of each mistake on a tensor, at size 1."""
    exact = evaluation.exact[name]
    yield "mean", np.ones_like(exact)
    if name != "lse":
        yield "gain", exact
    yield "scale", _scale_effect(evaluation, trial, name)
    if name in ("dq", "dk"):
        yield "delta", _delta_effect(evaluation, trial, name)
    if evaluation.problem.bias_array is not None:
        yield "bias", _bias_effect(evaluation, trial, name)
    if name == "o":
        yield from _key_effects(evaluation.problem, trial)


def _scale_effect(evaluation: Evaluation, trial: Trial, name: str) -> Array:
    """Derivative of a result by a factor of the scale that its weights are computed with."""
    problem = evaluation.problem
    slope = _derivative(
        evaluation, trial, name, lambda x: problem.replace(scale=scale(problem) * x)
    )
    return slope - evaluation.exact[name] if name in ("dq", "dk") else slope


def _bias_effect(evaluation: Evaluation, trial: Trial, name: str) -> Array:
    """Derivative of a result by a factor of the bias."""
    problem = evaluation.problem
    assert problem.bias_array is not None
    bias = problem.bias_array.astype(float)
    return _derivative(evaluation, trial, name, lambda x: problem.replace(bias=bias * x))


def _derivative(
    evaluation: Evaluation, trial: Trial, name: str, at: Callable[[float], Problem]
) -> Array:
    """Central difference in a factor of the problem."""
    cot, h = evaluation.cotangents, 2.0**-16
    dlse = None if cot.dlse is None else cot.dlse.astype(float)
    ends = []
    for factor in (1 + h, 1 - h):
        fwd = evaluate(at(factor), trial.conventions, engine="dense")
        if name in ("o", "lse"):
            ends.append(fwd.out if name == "o" else fwd.lse)
        else:
            ends.append(getattr(backward(fwd, cot.dout.astype(float), dlse), name[1:]))
    return np.asarray((ends[0] - ends[1]) / (2 * h))


def _delta_effect(evaluation: Evaluation, trial: Trial, name: str) -> Array:
    """Derivative of dq or dk by a factor of D = Σ do·out, which dP loses as it gains dlse."""
    fwd = evaluate(evaluation.problem, trial.conventions, engine="dense")
    dout = evaluation.cotangents.dout.astype(float)
    delta = lse_unit(trial.conventions) * (dout * fwd.out).sum(-1)
    dlse = np.where(np.isfinite(fwd.lse), -delta, 0)
    return np.asarray(getattr(backward(fwd, 0 * dout, dlse), name[1:]))


def _key_effects(problem: Problem, trial: Trial) -> Iterator[tuple[str, Array]]:
    """Effect on o of a key that is missing, and of one too many."""
    fwd = evaluate(problem, trial.conventions, engine="dense")
    v = expand_heads(trial, problem, problem.v)
    for mistake, at in (("first key missing:", 0), ("last key missing:", problem.S - 1)):
        p = fwd.weights[..., at, None]
        with np.errstate(all="ignore"):
            odds = np.where((p > 0) & (p < 1), p / (1 - p), 0)
        yield mistake, -odds * (v[..., at, None, :] - fwd.out)
    with np.errstate(over="ignore"):  # a key of zeros has the score 0
        weight = 1 / (1 + np.exp(fwd.lse * lse_unit(trial.conventions)))[..., None]
    yield "a key of zeros attended:", -weight * fwd.out
