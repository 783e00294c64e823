"""Candidates that follow other conventions: each legal value of each field, and pairs of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from npattn.testing.adapters.storage import read_shown
from npattn.testing.diagnosis.evidence import Arrays, Candidate, Evidence
from npattn.testing.diagnosis.sentences import CONVENTIONS
from npattn.testing.report.cause import STEPS

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


def _predict(conventions: Conventions, evidence: Evidence) -> Arrays:
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
    return {name: [array] for name, array in exact.items()}


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
