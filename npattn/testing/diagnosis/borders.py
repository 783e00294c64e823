"""On which problems it fails, by asking: the conditions of a place, and the nearest that passes.

A problem is told to `find_place` by its sizes and options; each is asked with the numbers of one
seed. What could not show the fault, as a row of one key, tells nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, zip_longest
from typing import Any

from npattn.problem import Problem
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.diagnosis.explore import (
    EXTREME,
    LARGE,
    PLAIN,
    VALUES,
    Point,
    fit,
    observe_recipe,
    scores_of,
    tame,
    try_recipe,
)
from npattn.testing.diagnosis.kinds import traits_of, values_of
from npattn.testing.places import Answer, Place, Value, find_place
from npattn.testing.places import Pair as Border
from npattn.testing.report.outcome import Outcome, recipe_line
from npattn.testing.report.pair import Pair
from npattn.testing.rules import RULES
from npattn.testing.trial import GRADIENTS, Trial

QUESTIONS = 300
SECONDS = 3.0
"""Questions and seconds of processor time for the borders around the failures of a check."""
FEW_QUESTIONS = 60
"""Questions for the nearest problem that passes alone."""
MILD = {"window": (24, 24)}
"""Values of options that are tried beside those of a problem: of few keys a fault may not show."""
HEADS = ((1, 1), (4, 2), (2, 2), (2, 1), (10, 2), (4, 4), (6, 3), (8, 2), (5, 1), (14, 2))
"""Pairs H, K to which the heads of a failing problem are changed."""
MOST, LEAST, LEARNING = 40, 16, 1.5
"""Most problems to learn a place from; processor time for them, once the least were tried."""
LEARNED = LARGE
"""Scores of the largest problem to learn a place from."""
SEEDS = 4
"""Numbers that are asked where a fault shows with some, and not with others."""
CONTENTS = "contents"
"""Name of numbers that are not normal ones, as of an option."""
FEW = {"B": range(1, 5), "K": range(1, 5), "G": (1, 2, 3, 4, 8)}
"""Heads and samples that are asked."""
LONGEST = 520
"""Largest size that is asked, unless the failing problem is larger."""
BY_CHANCE = 0.1
"""Share of problems with other numbers that may fail where the numbers decide."""
WORK = 2**21
"""Products of the largest problem that is asked, unless the failing one is larger: some 0.2 s."""


@dataclass
class Neighbours:
    """Problems around a failing one, by their sizes and options."""

    trial: Trial
    base: Recipe  # the failing problem
    names: frozenset[str] = frozenset()  # results that are wrong there; others tell nothing
    weights: bool = False  # gradients come back from the weights too
    # Problem that passes → False if the fault could not have been seen in it
    tells: Callable[[Evidence], bool] = field(default=lambda evidence: True)
    of_empty: bool = False  # rows that see no key are wrong alone: without any it passes
    # Recipe → whether it fails, None if that tells nothing; default: whether a result is wrong
    ask: Callable[[Recipe], Answer] | None = None
    # What the values of an option have that fail, by its name: "window[0] = 0"
    traits: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def values(self) -> dict[str, Any]:
        """Value of each option that the space takes, if it is on: the one of the base first."""
        on = options_on(self.base)
        values = {name: getattr(self.base, name) for name in on}
        if self.base.distribution == "normal":
            first = {name: own[0] for name, own in VALUES.items()} | MILD
            more = {name: value for name, value in first.items() if name not in on}
            more = {name: x for name, x in more.items() if self._takes({name: x})}
            values |= more
        if is_special(self.base):
            values[CONTENTS] = self.base.distribution
        return values

    def _takes(self, changes: dict[str, Any]) -> bool:
        recipe = replace(self.base, **changes)
        return self.trial.space.takes(recipe) and not self.trial.refuses_recipe(recipe)

    def sample(self, recipe: Recipe, problem: Problem | None = None) -> dict[str, Value]:
        """Return sizes and options of a recipe, or of what was made of it, as far as asked."""
        on = [*options_on(recipe), *([CONTENTS] if is_special(recipe) else [])]
        sizes = {"B": recipe.lead[0] if recipe.lead else 1, "K": recipe.K}
        sizes |= {"G": recipe.H // max(recipe.K, 1)}
        sizes |= {x: getattr(recipe, x) for x in "TSDE"}
        asked = {x: n for x, n in sizes.items() if x in self.domains}
        lacks = self.list_without_trait(recipe, problem)
        return asked | {name: name in on and name not in lacks for name in self.values}

    def list_without_trait(self, recipe: Recipe, problem: Problem | None = None) -> list[str]:
        """Return the options that are on, but have a value with which it passes."""
        own = {*options_on(recipe)} & {*self.traits}
        problem = self.trial.problem(recipe) if own and problem is None else problem
        return [x for x in own if problem and self.traits[x] not in traits_of(problem, x)]

    @cached_property
    def domains(self) -> dict[str, Sequence[int]]:
        """Sizes that are asked, by letter."""
        space, base = self.trial.space, self.base
        if space.few_shapes:
            return {}
        heads = {} if base.lead is None or {"H", "K"} & set(space.sizes) else FEW
        domains: dict[str, Sequence[int]] = {**heads}
        for x in "TSDE":
            size = getattr(base, x)
            domains[x] = range(min(size, 1), max(LONGEST, 2 * size))
            if x in "DE" and "D % 8" not in space.structure:
                domains[x] = range(8, LONGEST, 8)
        for name, own in (("T != S", "T"), ("E != D", "E")):
            if name not in space.structure:
                del domains[own]
        domains |= {x: sorted(own) for x, own in space.sizes.items() if x in domains}
        return domains

    def recipe(self, sample: Mapping[str, Value]) -> Recipe:
        """Return the recipe of a problem."""
        changes: dict[str, Any] = {x: sample[x] for x in "TSDE" if x in sample}
        if "B" in sample:
            changes |= {"lead": (sample["B"],), "K": sample["K"], "H": sample["K"] * sample["G"]}
        for name, value in self.values.items():
            changes[name] = value if sample[name] else getattr(PLAIN, name, None)
        is_tame = CONTENTS in changes and not changes.pop(CONTENTS)
        if self.base.bias in EXTREME and not is_tame:
            changes["bias"] = self.base.bias  # whose numbers they are
        recipe = fit(self.trial.space, replace(self.base, **changes), self.base)
        return tame(recipe) if is_tame else recipe

    # --- problems to learn from ---

    def around(self) -> Iterator[Recipe]:
        """Yield the base with another option, length, and head or width in turn."""
        base, T, S, H, K = self.base, self.base.T, self.base.S, self.base.H, self.base.K
        rows = [(61, S), (T, 61), (109, S), (T, 109)]  # where last tiles begin is not the same
        rows += [(67, 83), (T, 2 * S + 3), (2 * T + 3, S), (T, T), (S, S), (1, S)]
        near = (S - 1, S + 1, S // 2, -(-S // 16) * 16, 16 * (S // 16), S + 16, 24, 40, 5)
        rows += [(T, max(s, 2)) for s in near]
        others: list[dict[str, Any]] = [{x: n} for n in (8, 16, 24, 33, 64, 72) for x in "DE"]
        if base.lead is not None:
            heads = (*HEADS, (2 * H, 2 * K), (2 * H, K))
            others = [{"H": h, "K": k} for h, k in heads if (h, k) != (H, K)] + others
            others = [{"lead": (n,)} for n in (3, 5, 1)] + others
        sizes = [[{"T": t, "S": s} for t, s in rows], others]
        turns = zip_longest(
            self._change_options(),
            *(
                ()
                if self.trial.space.few_shapes
                else ([replace(base, **x) for x in k] for k in sizes)
            ),
        )
        several = (recipe for turn in turns for recipe in turn if recipe is not None)
        yield from dict.fromkeys(map(self._draw, count(), (base, *several)))

    def _draw(self, n: int, recipe: Recipe) -> Recipe:
        """Return a recipe as the space takes it; with other numbers if its options are the same."""
        fitted = fit(self.trial.space, recipe, self.base)
        same = options_on(fitted) == options_on(self.base)
        return replace(fitted, seed=self.base.seed + 4 * (n or 1)) if same else fitted

    def _change_options(self) -> Iterator[Recipe]:
        """Yield the base without each option, with others in its place, and with one more."""
        on = options_on(self.base)
        if self.base.distribution != PLAIN.distribution:
            yield replace(self.base, distribution=PLAIN.distribution)
        for name in on:
            for x in (getattr(PLAIN, name), *VALUES[name]):
                if x not in EXTREME or self.base.bias in EXTREME:
                    yield replace(self.base, **{name: x})
        plain = replace(self.base, **{name: getattr(PLAIN, name) for name in on})
        yield from [plain] if len(on) > 1 else []
        for name in [x for x in VALUES if x not in on]:
            yield from (replace(r, **{name: VALUES[name][0]}) for r in (plain, self.base))

    def points(self) -> list[Point]:
        """Try problems around the base, as long as there is time."""
        end = time.process_time() + LEARNING
        points: list[Point] = []
        for recipe in self.around():
            if scores_of(recipe) > LEARNED:
                continue
            late = time.process_time() - end
            enough = len(points) >= MOST or (late > 0 and len(points) >= LEAST)
            if enough or late > LEARNING:
                break
            point = try_recipe(self.trial, recipe, self.weights)
            points += [] if point is None else [point]
        return points

    # --- questions ---

    def fails(self, sample: Mapping[str, Value]) -> Answer:
        """Return whether a result is wrong; None if it is refused, or would tell nothing."""
        recipe = self.recipe(sample)
        if self.ask is not None:
            return None if self._is_large(recipe) else self.ask(recipe)
        answer = self._fails(recipe)
        return self.fails_again(sample) if answer is False and self.is_chancy else answer

    def fails_again(self, sample: Mapping[str, Value]) -> Answer:
        """Return whether a result is wrong with some of other numbers."""
        return self.ask is None and self.fails_somehow(self.recipe(sample))

    def fails_somehow(self, recipe: Recipe) -> bool:
        """Return whether a result of a recipe is wrong with some of other numbers."""
        return any(map(self._fails, draw_again(recipe)))

    @cached_property
    def _answers(self) -> list[Answer]:
        """Answers for the base with other numbers."""
        return [] if self.ask is not None else [*map(self._fails, draw_again(self.base))]

    @cached_property
    def is_chancy(self) -> bool:
        """True if the base passes with some other numbers: others are asked where it passes."""
        return False in self._answers

    @property
    def is_of_numbers(self) -> bool:
        """True if the base passes with any other numbers."""
        return self.is_chancy and True not in self._answers

    def find_trait(self, name: str, told: Iterable[tuple[Recipe, bool]]) -> str:
        """Return what the values of an option have that fail, and no others; "" if nothing.

        `told` are problems that were tried, with True for those that fail.
        """
        answers = [(recipe, x) for recipe, x in told if name in options_on(recipe)]
        for value in values_of(name, self.base, EXTREME):
            recipe = replace(self.base, **{name: value})
            answer = self._fails(recipe)
            if answer is not None:
                answers.append((recipe, answer or self.fails_somehow(recipe)))
        traits = [(traits_of(self.trial.problem(recipe), name), x) for recipe, x in answers]
        common = set.intersection(*(own for own, x in traits if x))
        common -= set().union(*(own for own, x in traits if not x))
        common = {x for x in common if " shared by " in x} or common
        return common.pop() if len(common) == 1 else ""

    def _fails(self, recipe: Recipe) -> Answer:
        """Return True if one of the named results is wrong; None if that cannot be known."""
        if self._is_large(recipe):
            return None
        evidence = observe_recipe(self.trial, recipe, self.weights)
        if evidence is None:
            return None
        if self.names & {*evidence.wrong}:
            return True
        return False if self.shows(evidence) else None

    def _is_large(self, recipe: Recipe) -> bool:
        """Return True if a problem takes too long to be asked."""
        return _work_of(recipe) > max(WORK, 2 * _work_of(self.base))

    def shows(self, evidence: Evidence) -> bool:
        """Return True if the fault would have been seen in a problem that passes."""
        has_rows = not self.of_empty or self.trial.empty(evidence.problem).any()
        has_queries = evidence.problem.T or not self.base.T
        return bool(has_rows and has_queries) and self.tells(evidence)

    def place(
        self,
        questions: int = QUESTIONS,
        seconds: float = SECONDS,
        known: Iterable[tuple[Recipe, bool]] = (),
    ) -> Place | None:
        """Return the place of the failures around the base; None if it does not fail.

        It takes at most so many seconds of processor time. `known` are problems that were tried,
        with True for those that fail: what they tell costs no question.
        """
        start = self.sample(self.base)
        if self.fails(start) is not True:
            return None
        known = list(known)
        others = [x for r, x in known if r.seed != self.base.seed]
        if self.is_of_numbers and sum(others) <= BY_CHANCE * len(others):
            return Place((), False, (), 0, 0)
        told = [(self.sample(r), x) for r, x in known if self.is_asked(r)]

        def find() -> Place:
            return find_place(
                self.fails,
                start,
                domains=self.domains,
                # That one more passes by chance refutes nothing.
                again=(lambda _: True) if self.is_chancy else self.fails_again,
                known=[(problem, x) for problem, x in told if x or not self.is_chancy],
                questions=questions,
                seconds=seconds,
            )

        place = find()
        if not place.held and not self.is_chancy:
            # The base fails with any numbers, its smaller neighbours with some alone.
            self.is_chancy = any(self.fails_again(pair.passing) for pair in place.pairs)
            place = find() if self.is_chancy else place
        return place

    def is_asked(self, recipe: Recipe) -> bool:
        """Return True if a recipe is one that is asked, but for its numbers."""
        if not {*options_on(recipe)} <= {*self.values}:
            return False
        return replace(self.recipe(self.sample(recipe)), seed=recipe.seed) == recipe

    def holds(self, place: Place, recipe: Recipe, problem: Problem | None = None) -> bool | None:
        """Return True if a place says that a recipe fails; None if it speaks of no such recipes.

        It speaks of those with the numbers and options of the base. `problem` is what a rule has
        made of the recipe.
        """
        kinds = [(r.distribution, r.bias in EXTREME and r.bias) for r in (recipe, self.base)]
        if (is_special(recipe) and kinds[0] != kinds[1]) or not {*options_on(recipe)} <= {
            *self.values
        }:
            return None
        return place.holds(self.sample(recipe, problem))

    def pair(self, place: Place, where: str = "") -> Pair:
        """Return the nearest problem that passes, with recipes to paste.

        One change of what `where` names comes first: numbers may make any other pass by chance.
        """
        told = {*re.findall(r"\w+", where)}
        start = self.sample(self.base)

        def order(pair: Border) -> tuple[bool, int, int]:
            changed = sum(start[name] != value for name, value in pair.failing.items())
            return pair.name not in told, max(changed - 1, 0), _rank(pair)

        found = min(place.pairs, key=order, default=None)
        line = recipe_line(self.base, self.trial, None)
        if self.is_of_numbers:
            other = next(draw_again(self.base))
            text = f"fails with seed = {self.base.seed}, passes with seed = {other.seed}"
            return Pair(f"{text}, all else equal", line, recipe_line(other, self.trial, None))
        if found is None:
            every = "fails with every size and option that was tried"
            return Pair(
                every if place.held else "no problem that passes was found in the time", line
            )
        bad, good = (recipe_line(self.recipe(p), self.trial, None) for p in found)
        others = dict.fromkeys(str(p) for p in place.pairs[1:] if p.name != found.name)
        return Pair(str(found), bad, good, tuple(others))


def draw_again(recipe: Recipe) -> Iterator[Recipe]:
    """Yield a recipe with other numbers."""
    return (replace(recipe, seed=recipe.seed + 4 * n) for n in range(1, SEEDS))


def _work_of(recipe: Recipe) -> int:
    """Return the number of products of the problem of a recipe, of one key at least."""
    return scores_of(replace(recipe, S=max(recipe.S, 1))) * (recipe.D + recipe.E)


def is_special(recipe: Recipe) -> bool:
    """Return True if the arrays of a recipe are not of normal numbers."""
    return recipe.distribution != PLAIN.distribution or recipe.bias in EXTREME


def _rank(pair: Border) -> int:
    """Return how little a pair tells: least that of an option, most that of a size of 1.

    Of one key the weight is 1, whatever its score is, and a row of one column has one product.
    """
    value = pair.passing[pair.name]
    if isinstance(value, bool):
        return 2 * value  # without it before with it
    if value > 1:
        return 1
    return 3 if pair.name in FEW else 4 if pair.name == "T" else 5


def neighbours_of(trial: Trial, outcome: Outcome, names: Iterable[str]) -> Neighbours | None:
    """Return the problems around that of a failure; None if it is not one of a single call."""
    recipe = outcome.sampled
    if recipe is None or outcome.kind != "value" or "then changed" in outcome.recipe:
        return None
    if outcome.rule not in RULES:  # structure that is answered wrongly is not sampled otherwise
        trial = replace(trial, space=replace(trial.space, structure=frozenset(STRUCTURE)))
    of_forward = frozenset(names) - {*GRADIENTS}
    gradients = frozenset() if of_forward else trial.gradients  # which are dear
    trial = replace(trial, memo={}, skips_empty_rows=False, gradients=gradients)
    return Neighbours(trial, replace(recipe, view=outcome.view), of_forward or frozenset(names))


def find_pair(trial: Trial, outcomes: Sequence[Outcome]) -> Pair | None:
    """Return the first failure of one call with its nearest neighbour that passes, if any."""
    for outcome in outcomes:
        near = neighbours_of(trial, outcome, (c.name for c in outcome.comparisons))
        place = None if near is None else near.place(FEW_QUESTIONS, SECONDS / 2)
        if near is not None and place is not None:
            return near.pair(place)
    return None
