"""Refuse structure that the probe accepted, or did not try, and that raises in a later problem."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from npattn.errors import NpattnError
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.classes import structure_of
from npattn.testing.cases.recipe import Recipe, repeat_for_view, resize
from npattn.testing.cases.space import LATE, STRUCTURE, Space, with_rank
from npattn.testing.trial import Trial


class StructureRefusedError(NpattnError):
    """Structure raises where the same problem with plain structure does not: it is refused.

    Attributes
    ----------
    name : str
        A rank, "broadcast", a view, or a size of 0 or 1 such as "T = 1".
    line : str
        Line of the report.
    """

    def __init__(self, name: str, line: str) -> None:
        super().__init__(name, line)  # with which it is made again in another process
        self.name, self.line = name, line


def blame_structure(
    trial: Trial, recipe: Recipe, err: ImplementationError
) -> StructureRefusedError | None:
    """Find the structure without which the problem of an exception is answered.

    Parameters
    ----------
    recipe : Recipe
        The recipe that a rule was asked.
    err : ImplementationError
        Raised by a problem that the rule made of it, maybe of other sizes.

    Returns
    -------
    StructureRefusedError or None
        None if the problem raises with plain structure too, or if its exception refuses nothing.
    """
    if not err.may_refuse_structure or err.problem is None:
        return None
    asked = resize(recipe, err.problem)
    base = trial.space.base()
    plain = {*structure_of(base), *(f"{x} = {n}" for x in trial.space.sizes for n in (0, 1))}
    names = [name for name in structure_of(asked) if name not in plain]
    if not names or attempt(trial, asked) is None:
        return None
    if attempt(trial, _make_plain(asked, names, trial.space)) is not None:
        return None
    for name in names if len(names) > 1 else ():
        if attempt(trial, _make_plain(asked, [name], trial.space)) is None:
            return StructureRefusedError(name, _line(name, err))
    return StructureRefusedError(names[0], _line(names[0], err))  # each of them raises


def _line(name: str, err: ImplementationError) -> str:
    where = "taken in some sizes, " if name in STRUCTURE else ""
    what = "others" if name in STRUCTURE else "some problems"
    return f"{name}: {where}{LATE} {what} ({err}), so it is not sampled again"


def attempt(trial: Trial, recipe: Recipe) -> ImplementationError | None:
    """Return what all calls for a problem raise, or None."""
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    try:
        trial.results(*repeat_for_view(recipe, problem, cotangents), recipe.view)
    except ImplementationError as err:
        return err
    return None


def _make_plain(recipe: Recipe, names: Collection[str], space: Space) -> Recipe:
    """Replace the structure that `names` lists by plain structure."""
    base = space.base()
    least = dict.fromkeys("TS", 2) | {"D": base.D, "E": base.E}  # D as it is accepted
    changes: dict[str, Any] = {name: n for name, n in least.items() if _has(names, name)}
    if _has(names, "H") or (recipe.lead is None and base.lead is not None):
        changes |= {"H": base.H, "K": base.K}
    if recipe.view in names:
        changes["view"] = "contiguous"
    if "broadcast" in names:
        changes["broadcast"] = False
    plain = replace(recipe, **changes)
    if any(name.startswith("rank") for name in names):
        plain = with_rank(plain, space.ranks[0])
    if _has(names, "B") and plain.lead:
        plain = replace(plain, lead=(2,) * len(plain.lead))
    # What is tied to a size goes with it.
    if "E != D" not in space.structure:
        plain = replace(plain, E=plain.D)
    if "T != S" not in space.structure or ("T > S" not in space.structure and plain.T > plain.S):
        plain = replace(plain, S=plain.T)
    return plain


def _has(names: Collection[str], letter: str) -> bool:
    return f"{letter} = 0" in names or f"{letter} = 1" in names
