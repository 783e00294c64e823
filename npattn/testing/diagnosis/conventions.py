"""Candidates that follow other conventions: each legal value of each field, and pairs of them.

Also arrays in another order: axes of q, k, v and o, and the results themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.conventions.checks import LEGAL
from npattn.errors import NpattnError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.profiles import PROFILES
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.storage import read_shown
from npattn.testing.diagnosis.evidence import Candidate, Evidence
from npattn.testing.diagnosis.sentences import CONVENTIONS
from npattn.testing.report.cause import STEPS
from npattn.testing.report.outcome import Outcome
from npattn.testing.trial import Trial

NUMBERS: dict[str, tuple[Any, ...]] = {
    "hidden_fill": (None, -1e4, -1e9, "min"),
    "hidden_add": (None, -1e4, -1e9, "min"),
    "lse_empty": (-np.inf, np.inf, 0.0),
}
"""Values that are tried of the fields that are numbers."""
OF_HIDDEN = {"hidden_fill", "hidden_add", "empty_row", "empty_row_bias"}
"""Fields that say what becomes of what is hidden."""
HIDES = {"mask"}, {"causal"}, {"window"}
EMPTIES = {"mask"}, {"bias"}, {"window"}, {"causal", "T > S"}
NEEDS: dict[str, tuple[set[str], ...]] = {
    "causal": ({"causal", "T != S"}, {"window", "T != S"}),
    "window": ({"window"},),
    "mask_true": ({"mask"},),
    "hidden scores": HIDES,
    "empty_row": EMPTIES,
    "empty_row_bias": ({"bias"},),
    "bias": ({"bias"},),
    "softcap": tuple({"softcap", *x} for x in (*HIDES, {"bias"})),
    "kv_head": ({"K < H"},),
    "lse_base": ({"lse"},),
    "lse_empty": tuple({"lse", *x} for x in EMPTIES),
    "weights": ({"weights", "dropout_mask"},),
    "dropout_at_rate_0": ({"dropout_mask"},),
}
"""Topic of conventions → what a problem must have, or results be, for it to show, in any set."""
FILLS = {"hidden_fill", "hidden_add"}
EMPTY = "rows that see no key"
STEP_OF = {
    "causal": ("visible", "T ≠ S and causal or window"),
    "mask_true": ("visible", "mask"),
    "window": ("visible", "window"),
    "softcap": ("s", "softcap and bias"),
    "bias": ("s", "bias"),
    "kv_head": ("s", "h // G ≠ h % K"),
    "hidden_fill": ("p", EMPTY),
    "hidden_add": ("p", EMPTY),
    "empty_row": ("p", EMPTY),
    "empty_row_bias": ("p", EMPTY),
    "lse_empty": ("lse", EMPTY),
    "lse_base": ("lse", "everywhere"),
    "weights": ("p", "dropout and weights"),
    "dropout_at_rate_0": ("p", "dropout"),
}
"""Step that a field changes, and where."""


def convention_candidates(declared: Conventions, fields: int = 1) -> Iterator[Candidate]:
    """Yield every set of other values of the given number of fields."""
    others = [
        (field, value)
        for field, values in (LEGAL | NUMBERS).items()
        for value in values
        if value not in (getattr(declared, field), "unless_masked")  # of modules
    ]
    for chosen in combinations(others, fields):
        changes = dict(chosen)
        if len(changes) == fields and not changes.keys() >= FILLS:
            yield _candidate(declared, changes)


def profile_candidates(declared: Conventions) -> Iterator[Candidate]:
    """Yield the conventions of each known system that differ from the declared ones."""
    for name, profile in PROFILES.items():
        theirs = vars(profile.conventions).items()
        changes = {field: x for field, x in theirs if x != getattr(declared, field)}
        if len(changes) > 2:  # else it is among the pairs
            system = _candidate(declared, changes)
            yield replace(system, text=f"{system.text}: it follows {name} {profile.version}")


def matters(field: str, problem: Problem) -> bool:
    """Return True if a field of the conventions may change the results of a problem."""
    if problem.S == 0:
        return True
    arrays = ("mask", "window", "bias", "softcap", "dropout_mask")
    there = {name for name in arrays if getattr(problem, name) is not None}
    T, S, H, K = problem.T, problem.S, problem.H, problem.K
    padded = problem.mask is not None  # and a sequence that is stored has fewer keys
    shape = {"causal": problem.causal, "T != S": T != S or padded, "T > S": T > S}
    there |= {name for name, x in (shape | {"K < H": 1 < K < H}).items() if x} | {"lse", "weights"}
    return any(there >= needs for needs in NEEDS.get(field, NEEDS["hidden scores"]))


def _candidate(declared: Conventions, changes: dict[str, Any]) -> Candidate:
    """Return a candidate that explains results by conventions with these fields changed."""
    for one, other in (sorted(FILLS), sorted(FILLS, reverse=True)):  # one of them at most
        if changes.get(one) is not None and getattr(declared, other) is not None:
            changes = {other: None} | changes
    names = [f"{field}={_format(value)}" for field, value in changes.items()]
    text = "; ".join(CONVENTIONS.get(name) or f"it follows {name}" for name in names)
    step, where = min((_step_of(*x) for x in changes.items()), key=lambda x: STEPS.index(x[0]))
    return Candidate(
        ", ".join(names),
        text,
        partial(_explains, tuple(changes.items())),
        step,
        where,
        conventions=replace(declared, **changes),
        changes=len(changes),
    )


def _step_of(field: str, value: Any) -> tuple[str, str]:
    """Return the step that a convention changes, and where."""
    if value == "nan":
        return "nan", EMPTY
    if (field, value) == ("softcap", "after_mask"):
        return "visible", "softcap and mask"
    return STEP_OF[field]


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _explains(changes: Sequence[tuple[str, Any]], evidence: Evidence) -> bool:
    telling = tuple(x for x in changes if matters(x[0], evidence.problem))
    return _reproduces(telling, evidence) if telling else not evidence.wrong


@lru_cache(maxsize=512)
def _reproduces(changes: tuple[tuple[str, Any], ...], evidence: Evidence) -> bool:
    """Return True if conventions with these fields changed give what was observed."""
    problem = evidence.problem
    finite = all(np.isfinite(x).all() for x in (problem.q, problem.k, problem.v))
    if not finite and not OF_HIDDEN.isdisjoint(dict(changes)):
        return False  # a NaN that leaks looks like a fill that lets it through
    try:
        conventions = replace(evidence.trial.conventions, **dict(changes))
        return evidence.reproduced_by(_predict(conventions, evidence))
    except NpattnError:  # these conventions do not allow the problem
        return False


def _predict(conventions: Conventions, evidence: Evidence) -> dict[str, Array]:
    """Return exact results under other conventions; OptionError if these forbid the problem."""
    problem, order = _move_keys(realign(evidence.problem, conventions), evidence)
    trial = replace(evidence.trial, conventions=conventions, memo={})
    exact = trial.exact(problem, evidence.cotangents)
    if order is not None:
        back = np.argsort(order, -2)
        exact |= {
            name: np.take_along_axis(exact[name], back, -2) for name in {"dk", "dv"} & {*exact}
        }
    if "nan" in conventions.empty_results:  # gradients to which a row of NaN adds are undefined
        exact = {
            name: np.where(np.isnan(x) & np.isfinite(evidence.exact[name]), evidence.exact[name], x)
            if name[0] == "d" and evidence.exact[name].shape == x.shape
            else x
            for name, x in exact.items()
        }
    return exact


def _move_keys(problem: Problem, evidence: Evidence) -> tuple[Problem, Array | None]:
    """Return the problem with the visible keys of each sample first or last, and their order.

    A stored sequence has no padding. In a padded problem its keys come last for bottom-right
    alignment, and first for top-left. The order, indices (B, 1, S, 1), is None if no key moves.
    """
    storage, mask_true = evidence.trial.implementation.storage, evidence.trial.conventions.mask_true
    if storage is None or problem.bias is not None or problem.dropout_mask is not None:
        return problem, None
    moved = storage.fit(problem, mask_true)
    if moved is problem:
        return problem, None
    theirs, ours = (
        np.argsort(~read_shown(x, mask_true), -1, kind="stable") for x in (moved, problem)
    )
    order = np.empty_like(ours)
    np.put_along_axis(order, theirs, ours, -1)
    order = order.swapaxes(-1, -2)
    k, v = (np.take_along_axis(x, order, -2) for x in (problem.k, problem.v))
    return moved.replace(k=k, v=v), order


def realign(problem: Problem, conventions: Conventions) -> Problem:
    """Return the problem with its diagonal where the conventions have it."""
    return problem.replace(causal=bool(problem.causal), alignment=conventions.alignment)


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
    yield Candidate(layout, text, _explains_layout, "layout")
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


def _explains_layout(evidence: Evidence) -> bool:
    if evidence.problem.q.ndim != 4:
        return not evidence.wrong  # only rank 4 has two layouts
    try:
        return evidence.reproduced_by(_predict_layout(evidence))
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
    return evidence.reproduced_by(exact) or evidence.reproduced_by(exact | back)


def _explains_reshape(evidence: Evidence) -> bool:
    """Return True if q, k and v that are reshaped from or to the other layout give the results."""
    problem = evidence.problem
    if problem.headless:
        return not evidence.wrong

    def explains(reshape: Callable[[Array], Array]) -> bool:
        other = problem.replace(q=reshape(problem.q), k=reshape(problem.k), v=reshape(problem.v))
        return evidence.reproduced_by(evidence.trial.exact(other, evidence.cotangents))

    def to(x: Array) -> Array:
        return x.swapaxes(-2, -3).reshape(x.shape)

    def back(x: Array) -> Array:
        return x.reshape(x.swapaxes(-2, -3).shape).swapaxes(-2, -3)

    return explains(to) or explains(back)


def _explains_order(evidence: Evidence) -> bool:
    o, lse = evidence.exact["o"], evidence.exact["lse"]
    return evidence.reproduced_by({**evidence.exact, "o": [o, lse], "lse": o})


def _predict_layout(evidence: Evidence) -> dict[str, Array]:
    """Return the exact results where heads and sequence are taken for each other.

    Raises ShapeError or OptionError if these shapes do not fit then, or do not allow the options.
    """
    trial, problem, cotangents = evidence.trial, evidence.problem, evidence.cotangents
    q, k, v = map(_swap, (problem.q, problem.k, problem.v))
    other = realign(problem.replace(q=q, k=k, v=v), trial.conventions)
    exact = trial.exact(other, replace(cotangents, dout=_swap(cotangents.dout)))
    return {name: _swap(x) if name in SWAPPED else x for name, x in exact.items()}


def _swap(x: Array) -> Array:
    return x.swapaxes(1, 2)
