"""One implementation under judgement: asked for all it gives, and held against the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import tee
from typing import Any

import numpy as np

from npattn.api import backward, evaluate
from npattn.arrays import Array, finfo
from npattn.conventions import Conventions
from npattn.errors import NpattnError
from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.implementation import Implementation, ImplementationError
from npattn.testing.bounds.allowed import Rounding, tolerance
from npattn.testing.bounds.ulp import excess, half_ulp
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools, Space
from npattn.testing.compare import Comparison, compare_arrays

__all__ = ["GRADIENTS", "Judged", "Suspicion", "Trial", "Violation"]

CHEAP = 2**20  # scores, from which the cheap form of the bound is asked first
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


class Violation(NpattnError):
    """An implementation broke a rule, on this problem.

    Attributes
    ----------
    problem : Problem
    cotangents : Cotangents or None
    kind : {"value", "shape", "change", "bits", "moves", "range", "after"}
        What a script must do to show it.
    view : str
        How the arrays lay in memory.
    before : Problem or None
        Whose results should not have moved, where the kind is "moves".
    limits : pair of array, optional
        The least and the largest that o may be, where the kind is "range".
    """

    def __init__(
        self,
        text: str,
        problem: Problem,
        cotangents: Cotangents | None = None,
        kind: str = "value",
        ratio: float = float("inf"),
        before: Problem | None = None,
        limits: tuple[Array, Array] | None = None,
    ) -> None:
        super().__init__(text)
        self.before, self.limits = before, limits
        self.view = "contiguous"
        self.problem, self.cotangents = problem, cotangents
        self.kind, self.ratio = kind, ratio


class Suspicion(Violation):
    """What chance hardly explains, though no single number is wrong."""


class Later(Mapping[str, Array]):
    """Made when it is first looked into: what is allowed costs more than all else.

    Attributes
    ----------
    made : bool
        Whether it has been.
    asked : bool
        Whether it has been, or would have been if results had not been the same anyway.
    """

    def __init__(self, make: Callable[[], dict[str, Array]]) -> None:
        self._make = make
        self.made = self.asked = False

    @cached_property
    def _found(self) -> dict[str, Array]:
        self.made = self.asked = True
        return self._make()

    def __getitem__(self, name: str) -> Array:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


@dataclass(frozen=True)
class Judged:
    """All that an implementation gave for a problem, beside what is exact and what is allowed.

    Attributes
    ----------
    problem : Problem
    cotangents : Cotangents
    results : dict
        Those that are real floats, in the dtype delivered; of several ways to call it, the first.
    want, allowed : mapping
        By the same names, float64.
    """

    problem: Problem
    cotangents: Cotangents
    results: dict[str, Array]
    want: dict[str, Array]
    allowed: Mapping[str, Array]


Across = Mapping[str, Callable[[Array], Array]]


@dataclass
class Trial:
    """One implementation, judged under conventions and a rounding model, in one dtype."""

    implementation: Implementation
    conventions: Conventions
    rounding: Rounding
    space: Space
    gradients: frozenset[str] = frozenset()
    shuns_empty_rows: bool = False
    _agreements: dict[Recipe, dict[str, Comparison]] = field(default_factory=dict)
    _judged: dict[Recipe, Judged] = field(default_factory=dict)
    _problems: dict[Recipe, Problem] = field(default_factory=dict)
    _pulls: dict[tuple[Recipe, bool], Cotangents] = field(default_factory=dict)
    _planned: dict[Any, Iterator[Recipe]] = field(default_factory=dict)

    def planned(self, pools: Pools, seed: int, examples: int) -> Iterator[Recipe]:
        """`Pools.planned`; what was drawn is remembered, for many rules draw alike."""
        key = (pools.key, seed, examples)
        if key not in self._planned:
            (self._planned[key],) = tee(pools.planned(seed, examples), 1)
        return copy(self._planned[key])

    def forget(self) -> None:
        """What was remembered of recipes that no rule to come asks for."""
        for known in (self._agreements, self._judged, self._problems, self._pulls):
            known.clear()

    def problem(self, recipe: Recipe) -> Problem:
        """The recipe's problem in the terms of the conventions; remembered, and nobody's to write
        to."""
        if recipe not in self._problems:
            meaning = self.conventions
            self._problems[recipe] = self.asked(recipe).problem(meaning.causal, meaning.mask_true)
        return self._problems[recipe]

    def asked(self, recipe: Recipe) -> Recipe:
        """The recipe with its window in the terms of the conventions."""
        left, right = recipe.window or (None, None)
        if self.conventions.window == "inclusive" and left is not None:
            return replace(recipe, window=(left + 1, right))
        return recipe

    def cotangents(self, recipe: Recipe, problem: Problem, weights: bool = False) -> Cotangents:
        """Random ones, of o, of what lse there is and, where it is said, of the weights; 0 for the
        lse of empty rows. Those of the recipe's own problem are remembered."""
        if problem is not self._problems.get(recipe):
            return self._cotangents(recipe, problem, weights)
        if (recipe, weights) not in self._pulls:
            self._pulls[recipe, weights] = self._cotangents(recipe, problem, weights)
        return self._pulls[recipe, weights]

    def _cotangents(self, recipe: Recipe, problem: Problem, weights: bool) -> Cotangents:
        found = recipe.cotangents(
            problem, lse=self.takes_dlse, weights=weights and self.takes_dweights
        )
        dlse = found.dlse
        if dlse is not None:
            dlse = np.where(self.empty(problem), np.zeros_like(dlse), dlse)
        return Cotangents(found.dout, dlse, found.dweights)

    @property
    def takes_dlse(self) -> bool:
        f = self.implementation
        return f.returns_lse and (f.backward is None or "dlse" in f.backward_takes)

    @property
    def takes_dweights(self) -> bool:
        f = self.implementation
        return f.returns_weights and (f.backward is None or "dweights" in f.backward_takes)

    @cached_property
    def _leaving(self) -> Conventions:
        """The conventions, but hidden keys leave the softmax."""
        late = self.conventions.softcap == "after_mask"
        softcap = "after_bias" if late else self.conventions.softcap
        return replace(self.conventions, hidden_fill=None, softcap=softcap)

    def visible(self, problem: Problem) -> Array:
        """What is visible, broadcast to (..., H, T, S) (rank 2: (T, S))."""
        canonical = self._leaving.canonical(problem)
        heads = () if problem.headless else (problem.H,)
        whole = (*problem.lead, *heads, problem.T, problem.S)
        return np.broadcast_to(True if canonical.visible is None else canonical.visible, whole)

    def empty(self, problem: Problem) -> Array:
        """Rows that see nothing, (..., H, T), a score of −inf not being seen."""
        plain = self._leaving.canonical(problem)
        plain = plain if plain.sinks is None else plain.replace(sinks=None)
        arrays = (plain.q, plain.k, *([] if plain.bias_array is None else [plain.bias_array]))
        if plain.S and plain.visible is None and all(np.isfinite(x).all() for x in arrays):
            heads = () if plain.headless else (plain.H,)
            return np.zeros((*plain.lead, *heads, plain.T), bool)
        return np.asarray(evaluate(plain, engine="dense").lse == -np.inf)

    def shuns(self, recipe: Recipe, rule: str) -> bool:
        """Whether the rule is not asked of this recipe, since empty rows are known to be wrong."""
        if not self.shuns_empty_rows or rule == "empty-row":
            return False
        return bool(self.empty(self.problem(recipe)).any())

    # --- the implementation against the oracle ---

    def agreement(self, recipe: Recipe) -> dict[str, Comparison]:
        """Every result of a plain problem against the oracle; remembered, for many rules ask."""
        if recipe not in self._agreements:
            problem = self.problem(recipe)
            cotangents = self.cotangents(recipe, problem, weights=True)
            self._agreements[recipe] = self.against_oracle(problem, cotangents, recipe.view)
        return self._agreements[recipe]

    def wrong_anyway(self, recipe: Recipe) -> bool:
        """Whether the plain problem, contiguous and not altered, is wrong or raises."""
        try:
            found = self.agreement(replace(recipe, view="contiguous"))
        except (Violation, ImplementationError):
            return True
        return not all(c.passed for c in found.values())

    def against_oracle(
        self, problem: Problem, cotangents: Cotangents, view: str = "contiguous"
    ) -> dict[str, Comparison]:
        """Compare all that the implementation gives."""
        got = self.results(problem, cotangents, view)
        cheap = math.prod((*problem.lead, problem.H, problem.T, problem.S)) > CHEAP
        found = self._compared(got, *self.oracle(problem, cotangents, cheap=cheap))
        if cheap and not all(c.passed for c in found.values()):
            return self._compared(got, *self.oracle(problem, cotangents))
        return found

    def _compared(
        self, got: list[tuple[str, Array]], want: dict[str, Array], allowed: dict[str, Array]
    ) -> dict[str, Comparison]:
        found: dict[str, Comparison] = {}
        for name, array in got:
            if name not in want:
                continue
            if array.shape != want[name].shape:
                told = f"{name} has shape {array.shape}, want {want[name].shape}"
                found[name] = Comparison(name, math.inf, (), 0.0, 0.0, 0.0, 1, 1, told)
                continue
            seen = compare_arrays(name, array, want[name], allowed[name])
            if name not in found or seen.ratio > found[name].ratio:
                found[name] = seen
        return found

    # --- the implementation against itself ---

    def judged(self, recipe: Recipe) -> Judged:
        """What it gives for the plain problem, contiguous; remembered, for many rules ask."""
        if recipe not in self._judged:
            problem = self.problem(recipe)
            self._judged[recipe] = self.judge(problem, self.cotangents(recipe, problem))
        return self._judged[recipe]

    def judge(self, problem: Problem, cotangents: Cotangents) -> Judged:
        """What it gives for any problem."""
        given = reversed(self.results(problem, cotangents))
        # What is no real float is the business of shape-dtype.
        results = {name: array for name, array in given if array.dtype.kind not in "biuc"}
        want = self.exact(problem, cotangents)
        allowed = Later(lambda: self.room(problem, cotangents, want))
        return Judged(problem, cotangents, results, want, allowed)

    def relate(
        self,
        first: Judged,
        second: Judged,
        across: Across,
        shift: Mapping[str, Array] | None = None,
    ) -> float:
        """The worst ratio; a Violation where results of `second` are not those of `first`, carried
        across.

        Parameters
        ----------
        first, second : Judged
        across : mapping
            Name of a result → how an array of `first` becomes that of `second`: linear, and with no
            negative factor, for what is allowed is carried likewise. Names that either has not, or
            not in its right shape, are left out.
        shift : mapping, optional
            What is added to it.

        Notes
        -----
        Both are within what is allowed of exact results for which the relation holds, so that they
        differ by no more than both together, and the rounding of the first on delivery. Where they
        differ by less than is allowed of one of them, the other's is not asked for; where they do
        not differ, neither is.
        """
        of_second = isinstance(second.allowed, Later) and second.allowed.asked
        one: tuple[str, ...] = ("second",) if of_second else ("first",)
        if self._same(first, second, across, shift or {}):
            if not of_second and isinstance(first.allowed, Later):
                first.allowed.asked = True
            return 0.0
        for rooms in (one, ("first", "second")):
            found = self._related(first, second, across, shift or {}, rooms)
            if all(c.passed for c in found.values()):
                return max((c.ratio for c in found.values()), default=0.0)
        # One of the two is beyond what is allowed; that is the one to show.
        wrong = [c for c in found.values() if not c.passed]
        shown = second if self._is_wrong(second) else first
        text = "\n".join(str(c) for c in sorted(wrong, key=lambda c: -c.ratio))
        worst = max(c.ratio for c in wrong)
        raise Violation(text, shown.problem, shown.cotangents, ratio=worst)

    def _pairs(
        self, first: Judged, second: Judged, across: Across
    ) -> Iterator[tuple[str, Array, Array]]:
        """The results that both have, in their right shapes."""
        for name in across:
            if name not in first.want or name not in second.want:
                continue
            here, there = first.results.get(name), second.results.get(name)
            if here is None or here.shape != first.want[name].shape:
                continue
            if there is None or there.shape != second.want[name].shape:
                continue
            yield name, here, there

    def _same(
        self, first: Judged, second: Judged, across: Across, shift: Mapping[str, Array]
    ) -> bool:
        """Whether there is no excess at all, so that the ratio is 0 whatever is allowed."""
        return not any(
            excess(there, across[name](here.astype(np.float64)) + shift.get(name, 0.0)).any()
            for name, here, there in self._pairs(first, second, across)
        )

    def _related(
        self,
        first: Judged,
        second: Judged,
        across: Across,
        shift: Mapping[str, Array],
        rooms: tuple[str, ...],
    ) -> dict[str, Comparison]:
        """What is allowed of these two, or of one of them, is allowed."""
        found = {}
        for name, here, there in self._pairs(first, second, across):
            carry, own = across[name], half_ulp(here)
            if "first" in rooms:
                # Where the first may overflow, it says nothing about the second.
                top = float(finfo(here.dtype).max)
                over = ~np.isfinite(here.astype(np.float64))
                over = over & (abs(first.want[name]) + first.allowed[name] > top)
                here = np.where(over, np.zeros_like(here), here)
                own = np.where(over, np.inf, first.allowed[name] + half_ulp(here))
            want = carry(here.astype(np.float64)) + shift.get(name, 0.0)
            room = carry(own) + (second.allowed[name] if "second" in rooms else 0.0)
            found[name] = compare_arrays(name, there, want, room)
        return found

    def _is_wrong(self, judged: Judged) -> bool:
        return any(
            not compare_arrays(name, x, judged.want[name], judged.allowed[name]).passed
            for name, x in judged.results.items()
            if name in judged.want and x.shape == judged.want[name].shape
        )

    def results(
        self, problem: Problem, cotangents: Cotangents, view: str = "contiguous"
    ) -> list[tuple[str, Array]]:
        """All that the implementation gives: a name comes once for each way to call it."""
        f = self.implementation
        got = list(f.forward(problem, view).items())
        if self.gradients:
            got += f.gradients(problem, cotangents, view).items()
            # Kernels dispatch on whether the gradient of the bias is asked.
            if problem.bias_array is not None and f.backward is None:
                got += f.gradients(problem, cotangents, view, bias_gradient=False).items()
        return [(name.removesuffix(" too"), array) for name, array in got]

    def oracle(
        self, problem: Problem, cotangents: Cotangents, *, cheap: bool = False
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Exact values and allowed errors."""
        want = self.exact(problem, cotangents)
        return want, self.room(problem, cotangents, want, cheap=cheap)

    def exact(self, problem: Problem, cotangents: Cotangents) -> dict[str, Array]:
        """Exact values of what the implementation gives."""
        fwd = evaluate(problem, self.conventions, engine="dense")
        want: dict[str, Any] = {"o": fwd.out, "lse": fwd.lse}
        if self.implementation.returns_weights:
            want["weights"] = fwd.weights
        if self.gradients:
            grads = backward(fwd, *_float64(cotangents))
            for name in GRADIENTS:
                value = getattr(grads, name[1:])
                if value is not None and name in self.gradients:
                    want[name] = value
        return want

    def room(
        self,
        problem: Problem,
        cotangents: Cotangents,
        want: Mapping[str, Array],
        *,
        cheap: bool = False,
    ) -> dict[str, Array]:
        """What it may err by."""
        dout, dlse, dweights = _float64(cotangents)
        room = tolerance(
            problem,
            problem.q.dtype,
            self.rounding,
            dout=dout if self.gradients else None,
            dlse=dlse,
            dweights=dweights,
            conventions=self.conventions,
            row_norms=cheap,
        )
        if self.conventions.empty_row == "nan":
            for name in GRADIENTS:  # undefined where a NaN row adds to it, says the convention
                if name in want:
                    room[name] = np.where(np.isnan(want[name]), np.inf, room[name])
        return room

    def check(self, found: Mapping[str, Comparison], problem: Problem, cot: Cotangents) -> float:
        """The worst ratio; a Violation if one is above 1."""
        wrong = [c for c in found.values() if not c.passed]
        if wrong:
            worst = max(wrong, key=lambda c: c.ratio)
            text = "\n".join(str(c) for c in sorted(wrong, key=lambda c: -c.ratio))
            raise Violation(text, problem, cot, ratio=worst.ratio)
        return max((c.ratio for c in found.values()), default=0.0)


def _float64(cotangents: Cotangents) -> tuple[Array, Array | None, Array | None]:
    dout, *more = cotangents.dout, cotangents.dlse, cotangents.dweights
    dlse, dweights = (None if x is None else x.astype(float) for x in more)
    return dout.astype(float), dlse, dweights
