"""The nearest problem that passes: every size and option of a failing one is changed alone.

A border between sizes is bisected, so that the two problems of a pair differ by one: "fails with
S = 257, passes with S = 256". Each problem is asked with several seeds: numbers that hide a fault
are no border.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npattn.errors import NpattnError
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE
from npattn.testing.diagnosis.evidence import observe
from npattn.testing.diagnosis.explore import LARGE, PLAIN, fit, scores_of
from npattn.testing.report.outcome import Outcome, recipe_line
from npattn.testing.report.pair import Pair
from npattn.testing.rules import RULES
from npattn.testing.trial import Trial

SEEDS = (0, 4, 8)
"""What is added to the seed: a problem passes if it does with each."""
SECONDS = 1.5
"""Processor time for the neighbours of a problem."""
LADDER = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096)
"""Sizes that are tried; the border is bisected between the nearest that passes and the failing."""
TRIVIAL = ("S", "D", "E")
"""Sizes of which 1 says little: a row of one key has weight 1, whatever its score is."""


@dataclass
class _Neighbours:
    """Asks whether problems around a failing one fail.

    Attributes
    ----------
    trial : Trial
    base : Recipe
        The failing problem.
    names : frozenset of str
        Results that are wrong there; others tell nothing.
    """

    trial: Trial
    base: Recipe
    names: frozenset[str]
    seeds: Sequence[int] = SEEDS
    known: dict[Recipe, bool | None] = field(default_factory=dict)
    end: float = 0.0

    def fails(self, recipe: Recipe) -> bool | None:
        """Return True if a problem fails with one of the seeds, None if it is not taken."""
        answers = (self._fails_once(replace(recipe, seed=recipe.seed + n)) for n in self.seeds)
        answer: bool | None = False
        for one in answers:
            if one or one is None:
                return one
            answer = one
        return answer

    def _fails_once(self, recipe: Recipe) -> bool | None:
        if recipe in self.known:
            return self.known[recipe]
        trial = self.trial
        small = scores_of(recipe) <= max(LARGE, scores_of(self.base))
        if time.process_time() > self.end or not small:
            return None
        self.known[recipe] = None
        if not trial.space.takes(recipe) or trial.refuses_recipe(recipe):
            return None
        trial.memo.clear()
        try:
            problem = trial.problem(recipe)
            evidence = observe(trial, problem, trial.cotangents(recipe, problem), recipe.view)
        except (ImplementationError, NpattnError):
            return None
        self.known[recipe] = bool(self.names & {*evidence.wrong})
        return self.known[recipe]

    def borders(self) -> Iterator[tuple[int, Recipe, Recipe, str]]:
        """Yield pairs that fail and pass, with a rank (the most telling is 0) and the change."""
        base = self.base
        for name in options_on(base):
            other = replace(base, **{name: getattr(PLAIN, name)})
            if self.fails(other) is False:
                yield 0, base, other, f"without {name}"
        for change in ({"view": "contiguous"}, {"distribution": "normal"}):
            other = replace(base, **change)
            (name, value), *_ = change.items()
            if other != base and self.fails(other) is False:
                shown = "contiguous arrays" if name == "view" else "normal numbers"
                yield 2, base, other, f"with {shown}"
        if not self.trial.space.few_shapes:
            yield from self._sizes()

    def _sizes(self) -> Iterator[tuple[int, Recipe, Recipe, str]]:
        base = self.base
        for letter in "BKSTDE":
            pair = self._border(letter)
            if pair is None:
                continue
            failing, passing = pair
            rank = 4 if letter in TRIVIAL and _size(passing, letter) == 1 else 1
            yield rank, failing, passing, f"with {_say(letter, passing)}"
        if base.K < base.H:
            other = replace(base, K=base.H)
            if self.fails(other) is False:
                yield 1, base, other, f"with K = {base.H}"

    def _border(self, letter: str) -> tuple[Recipe, Recipe] | None:
        """Return the border of one size that is nearest to the failing problem, if there is one."""
        own = _size(self.base, letter)
        near = {own - 1, own + 1, own // 2, 2 * own, -(-own // 8) * 8, -(-own // 16) * 16}
        ladder = sorted({*LADDER, *near} - {own}, key=lambda n: (abs(n - own), n))
        limit = 4 * own + 64
        for n in (n for n in ladder if 0 < n <= limit):
            if self.fails(self._resize(letter, n)) is False:
                return self._bisect(letter, own, n)
        return None

    def _bisect(self, letter: str, failing: int, passing: int) -> tuple[Recipe, Recipe]:
        while abs(passing - failing) > 1:
            middle = (passing + failing) // 2
            answer = self.fails(self._resize(letter, middle))
            if answer is None:
                break
            passing, failing = (passing, middle) if answer else (middle, failing)
        return self._resize(letter, failing), self._resize(letter, passing)

    def _resize(self, letter: str, n: int) -> Recipe:
        """Return the base with another size, and with the others that the space ties to it."""
        base = self.base
        if letter == "B":
            return replace(base, lead=(n,)) if base.lead else base
        if letter == "K":
            return replace(base, K=n, H=n * (base.H // max(base.K, 1)))
        changes: dict[str, Any] = {letter: n}
        return fit(self.trial.space, replace(base, **changes), base)


def _size(recipe: Recipe, letter: str) -> int:
    if letter == "B":
        return recipe.lead[0] if recipe.lead else 1
    return int(getattr(recipe, letter))


def _say(letter: str, recipe: Recipe) -> str:
    return f"{letter} = {_size(recipe, letter)}"


def find_pair(trial: Trial, outcomes: Sequence[Outcome]) -> Pair | None:
    """Return the failing problem with its nearest neighbour that passes.

    Parameters
    ----------
    trial : Trial
    outcomes : sequence of Outcome
        Failures that may be shown, the one to show first.

    Returns
    -------
    Pair or None
        None if no failure is of one call on a problem as it was sampled.
    """
    for outcome in outcomes:
        recipe = outcome.sampled
        if recipe is None or outcome.kind != "value" or "then changed" in outcome.recipe:
            continue
        pair = _pair_of(trial, replace(recipe, view=outcome.view), outcome)
        if pair is not None:
            return pair
    return None


def _pair_of(trial: Trial, base: Recipe, outcome: Outcome) -> Pair | None:
    if outcome.rule not in RULES:  # structure that is answered wrongly is not sampled otherwise
        trial = replace(trial, space=replace(trial.space, structure=frozenset(STRUCTURE)))
    trial = replace(trial, memo={}, skips_empty_rows=False)
    names = frozenset(c.name for c in outcome.comparisons)
    asked = _Neighbours(trial, base, names, end=time.process_time() + SECONDS)
    if asked.fails(base) is not True:
        return None
    found = sorted(asked.borders(), key=lambda x: x[0])
    failing = recipe_line(base, trial, None)
    if not found:
        text = f"fails with every size and option that was tried ({len(asked.known)} problems)"
        return Pair(text, failing, tried=len(asked.known))
    _, bad, good, change = found[0]
    text = f"{_contrast(bad, good, change)}, all else equal"
    others = tuple(change for *_, change in found[1:])
    lines = (recipe_line(x, trial, None) for x in (bad, good))
    return Pair(text, *lines, others, len(asked.known))


def _contrast(failing: Recipe, passing: Recipe, change: str) -> str:
    """Say what the one change is: "fails with S = 33, passes with S = 32"."""
    if change.startswith("without "):
        return f"fails with {change.removeprefix('without ')}, passes {change}"
    letter, sign, _ = change.removeprefix("with ").partition(" = ")
    if not sign:
        own = failing.view if "arrays" in change else failing.distribution
        return f"fails with {own} {change.rpartition(' ')[2]}, passes {change}"
    return f"fails with {_say(letter, failing)}, passes {change}"
