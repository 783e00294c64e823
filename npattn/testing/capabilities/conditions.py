"""Learn from one refused problem which others are: asked, and confirmed by what is taken."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.capabilities.later import StructureRefusedError, attempt
from npattn.testing.capabilities.options import values_of
from npattn.testing.cases.conditions import SIZES, letters_of
from npattn.testing.cases.recipe import OPTION_FIELDS, Recipe
from npattn.testing.cases.space import AT, LATE, ONLY, WHERE, Space
from npattn.testing.places import Sample, find_clause, find_place, read_condition
from npattn.testing.trial import Trial

LENGTHS = range(1, 257)
"""Numbers of T, S, D and E that are tried where the space has them free."""
FEW = (1, 2, 3, 4)
"""Of B, K and G."""
QUESTIONS, SECONDS = 250, 30.0


def blame_condition(
    trial: Trial, recipe: Recipe, err: ImplementationError
) -> StructureRefusedError | None:
    """Find the condition of a deliberate refusal; see `ImplementationError.refuses`.

    Parameters
    ----------
    recipe : Recipe
        It raises, as it is, or changed by a rule.

    Returns
    -------
    StructureRefusedError or None
        Its name says what is taken alone, what is refused, or, where no condition holds against an
        attack, which line of the user's refuses. None if the exception is no deliberate refusal.
    """
    line = err.refuses
    if not line:
        return None
    asked = Asked(trial, recipe)
    first = asked.sample_of(letters_of(recipe))
    if asked.refuses(first) is True:
        base = asked.sample_of(letters_of(trial.space.base()))
        base |= {x: False for x in base if x not in (*SIZES, *trial.space.always)}
        if asked.refuses(base) is False:
            domains = asked.domains
            clause = find_clause(
                asked.takes, base, domains=domains, questions=QUESTIONS, seconds=SECONDS
            )
            needs = [a.text for a in clause if {*a.names} <= {*SIZES} and not a.holds(first)]
            if needs:
                text = " and ".join(needs)
                return _refusal(f"{ONLY}{text}", f"only {text} taken", err)
            place = find_place(
                asked.refuses,
                first,
                domains=domains,
                known=[(base, False)],
                questions=QUESTIONS,
                seconds=SECONDS,
            )
            text = place.text
            excluded = {*trial.space.excluded}
            if place.held and all(place.clauses) and text not in excluded:
                return _refusal(f"{WHERE}{text}", f"{text}: refused", err)
    return _refusal(f"{AT}{err.place}", f"some problems are left out: {line!r} {LATE} them", err)


def _refusal(name: str, line: str, err: ImplementationError) -> StructureRefusedError:
    return StructureRefusedError(name, f"{line} ({_message(err)})")


def _message(err: ImplementationError) -> str:
    return str(err).removeprefix("raised ")


class Asked:
    """Whether problems near a recipe are refused, by their sizes and options.

    Parameters
    ----------
    recipe : Recipe
        Its rank, options and contents are kept.
    free : bool
        Sizes and structure need not be those of the space.
    """

    def __init__(self, trial: Trial, recipe: Recipe, free: bool = False) -> None:
        self.trial, self.recipe, self.free = trial, recipe, free
        space = trial.space
        self.domains: dict[str, Sequence[int]] = {x: FEW if x in "BKG" else LENGTHS for x in SIZES}
        if not free:
            self.domains |= {
                x: sorted({*letters}) for x, letters in space.sizes.items() if x in SIZES
            }
            self.domains["G"] = FEW if "K < H" in space.structure else (1,)
        self.on = {name: self._value(name) for name in OPTION_FIELDS}
        self.ties: dict[str, str] = {}
        letters = letters_of(recipe)
        for x, y, name in (("S", "T", "T != S"), ("E", "D", "E != D")):
            apart = {**letters, x: 2 * letters[y]}
            if name not in space.structure and not (free and self.refuses(apart) is False):
                self.ties[x] = y

    def _value(self, name: str) -> Any:
        value = getattr(self.recipe, name)
        off = getattr(Recipe(), name)
        return value if value != off else next(iter(values_of(self.trial.space, name)), off)

    def sample_of(self, letters: Sample) -> dict[str, Any]:
        """Return the letters that may be changed: S is tied to T where both must be equal."""
        return {x: value for x, value in letters.items() if x not in self.ties}

    def refuses(self, sample: Sample) -> bool | None:
        """Return True for a deliberate refusal, False if it is taken, None if neither."""
        recipe = self.recipe_of(sample)
        space = self.trial.space
        if not self.free and (not space.takes(recipe) or self.trial.refuses_recipe(recipe)):
            return None
        err = attempt(self.trial, recipe)
        return False if err is None else True if err.refuses or self.free else None

    def takes(self, sample: Sample) -> bool | None:
        """Return the opposite, of which a clause tells what is taken."""
        refused = self.refuses(sample)
        return None if refused is None else not refused

    def recipe_of(self, sample: Sample) -> Recipe:
        """Return the recipe with these sizes and options."""
        sizes = {x: sample[self.ties.get(x, x)] for x in "KTSDE"}
        sizes["H"] = sample["K"] * sample["G"]
        lead = self.recipe.lead
        lead = lead if not lead else (sample["B"], *lead[1:])
        plain = Recipe()
        options = {
            name: self.on[name] if sample.get(name) else getattr(plain, name)
            for name in OPTION_FIELDS
        }
        return replace(self.recipe, lead=lead, **sizes, **options)


def leave_out(space: Space, name: str) -> Space:
    """Return the space without what the name of a refusal says; see `StructureRefusedError`."""
    if name.startswith(AT):
        return replace(space, refused_at=space.refused_at | {name.removeprefix(AT)})
    if name.startswith(WHERE):
        return replace(space, excluded=(*space.excluded, name.removeprefix(WHERE)))
    if name.startswith(ONLY):
        return _keep_to(space, name.removeprefix(ONLY))
    return replace(
        space, structure=space.structure - {name}, refused=space.refused | {frozenset({name})}
    )


def _keep_to(space: Space, condition: str) -> Space:
    """Return the space of the problems for which a conjunction of conditions on sizes holds."""
    sizes: dict[str, Sequence[int]] = dict(space.sizes)
    structure = space.structure
    excluded = space.excluded
    for part in condition.split(" and "):
        letters = [*dict.fromkeys(re.findall(r"\b[BKGTSDE]\b", part))]
        if part == "G = 1":
            structure -= {"K < H"}
        elif len(letters) == 1 and letters[0] != "G":
            sizes[letters[0]] = _values(space, letters[0], part)
        else:
            excluded = (*excluded, f"not ({part})")
    only = (*space.only, *condition.split(" and "))
    return replace(space, sizes=sizes, structure=structure, excluded=excluded, only=only)


def _values(space: Space, letter: str, part: str) -> tuple[int, ...]:
    """Return sizes for which a condition holds: those that are sampled anyway, and the least."""
    holds = read_condition(part)
    pool: Mapping[int, None] = dict.fromkeys(space.pool(letter))
    taken = [n for n in pool if n and holds({letter: n})]
    least = [n for n in LENGTHS if holds({letter: n})][: 4 if len(taken) < 4 else 0]
    return tuple(dict.fromkeys([*taken, *least])) or tuple(pool)
