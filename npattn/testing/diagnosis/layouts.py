"""Candidates of arrays in another order: axes of q, k, v and o, and the results themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial

from npattn.errors import NpattnError
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.diagnosis.conventions import realign
from npattn.testing.diagnosis.evidence import Arrays, Candidate, Evidence
from npattn.testing.report.outcome import Outcome
from npattn.testing.trial import Trial

AXES = {
    "BTHD": "axis 1 of q, k, v and o is the sequence, and axis 2 the heads",
    "BHTD": "axis 1 of q, k, v and o is the heads, and axis 2 the sequence",
}
EXCHANGED = {("k", "v"): "D = E", ("q", "k"): "T = S and H = K"}
"""Pairs of arrays that may be taken for each other → where their shapes are equal."""
SWAPPED = ("o", "dq", "dk", "dv")
"""Results in the layout of q; lse, weights and masks have one of their own."""


def layout_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the layout that is not declared, and arrays that are taken for each other."""
    for (x, y), where in EXCHANGED.items():
        text = f"{x} and {y} are exchanged where their shapes are equal, {where}"
        explains = partial(_explains_exchange, x, y)
        yield Candidate(f"{x} and {y} exchanged", text, explains, "s", where)
    if evidence.trial.implementation.storage is not None:
        return
    text = "q, k and v are reshaped to move their head axis, which leaves their memory in its order"
    yield Candidate("heads reshaped", text, _explains_reshape, "layout", "H > 1")
    layout = next(name for name in AXES if name != evidence.trial.implementation.layout)
    text = f"the layout is {layout}: {AXES[layout]} (--layout {layout})"
    yield Candidate(layout, text, _explains, "layout")
    if evidence.trial.implementation.returns == ("return_lse",):
        text = "it returns (lse, o), must return (o, lse)"
        yield Candidate("(lse, o)", text, _explains_order, "layout")


def raises_by_layout(trial: Trial, outcome: Outcome, layout: str) -> bool:
    """Return True for an exception of a problem that raises nothing in another layout.

    That layout has rank 4: problems of other ranks are not asked in it.
    """
    if outcome.kind != "raised" or outcome.problem is None:
        return False
    if outcome.problem.q.ndim != 4:
        return True
    implementation = copy(trial.implementation)
    implementation.layout = layout
    try:
        implementation.forward(outcome.problem, outcome.view)
    except ImplementationError:
        return False
    return True


def _explains(evidence: Evidence) -> bool:
    if evidence.problem.q.ndim != 4:
        return not evidence.wrong  # only rank 4 has two layouts
    try:
        return evidence.reproduced_by(_predict(evidence))
    except NpattnError:  # read otherwise, the shapes of this problem do not fit
        return False


def _explains_exchange(x: str, y: str, evidence: Evidence) -> bool:
    problem = evidence.problem
    a, b = getattr(problem, x), getattr(problem, y)
    if a.shape != b.shape:
        return not evidence.wrong
    exact = evidence.trial.exact(problem.replace(**{x: b, y: a}), evidence.cotangents)
    dx, dy = f"d{x}", f"d{y}"
    back = {dx: exact[dy], dy: exact[dx]} if dx in exact else {}  # as an autograd gives them
    both = ({name: [array] for name, array in own.items()} for own in (exact, exact | back))
    return any(evidence.reproduced_by(own) for own in both)


def _explains_reshape(evidence: Evidence) -> bool:
    """Return True if q, k and v that are reshaped from or to the other layout give the results."""
    problem = evidence.problem
    if problem.headless:
        return not evidence.wrong

    def explains(reshape: Callable[[Array], Array]) -> bool:
        other = problem.replace(q=reshape(problem.q), k=reshape(problem.k), v=reshape(problem.v))
        exact = evidence.trial.exact(other, evidence.cotangents)
        return evidence.reproduced_by({name: [x] for name, x in exact.items()})

    def to(x: Array) -> Array:
        return x.swapaxes(-2, -3).reshape(x.shape)

    def back(x: Array) -> Array:
        return x.reshape(x.swapaxes(-2, -3).shape).swapaxes(-2, -3)

    return explains(to) or explains(back)


def _explains_order(evidence: Evidence) -> bool:
    exact = {name: [x] for name, x in evidence.exact.items()}
    o, lse = evidence.exact["o"], evidence.exact["lse"]
    return evidence.reproduced_by(exact | {"o": [o, lse], "lse": [o]})


def _predict(evidence: Evidence) -> Arrays:
    """Return the exact results where heads and sequence are taken for each other.

    Raises ShapeError or OptionError if these shapes do not fit then, or do not allow the options.
    """
    trial, problem, cotangents = evidence.trial, evidence.problem, evidence.cotangents
    q, k, v = map(_swap, (problem.q, problem.k, problem.v))
    other = realign(problem.replace(q=q, k=k, v=v), trial.conventions)
    exact = trial.exact(other, replace(cotangents, dout=_swap(cotangents.dout)))
    return {name: [_swap(x) if name in SWAPPED else x] for name, x in exact.items()}


def _swap(x: Array) -> Array:
    return x.swapaxes(1, 2)
