"""A function and its reference: cases that both take, their arrays, and simpler cases."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np

from npattn.problem import Cotangents
from npattn.problem.arrays import Array
from npattn.testing.adapters import child
from npattn.testing.adapters.base import ImplementationError, ResultError, catch_foreign
from npattn.testing.adapters.child import parameters, qualified_name
from npattn.testing.adapters.frameworks import (
    FRAMEWORKS,
    Framework,
    make_framework,
    try_frameworks,
)
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.explore import LARGE, PLAIN, around, sample, tame
from npattn.testing.diagnosis.place import Sample
from npattn.testing.reference.intermediates import Watched
from npattn.testing.reference.letters import PARTS, Case, LetterSpace
from npattn.testing.reference.sides import Sides, share_cotangents
from npattn.testing.reference.spread import Call
from npattn.testing.trial import Trial


class Pair(Protocol):
    """Protocol of a function and its reference, in one dtype."""

    def cases(self, seed: int, examples: int) -> Iterator[Any]:
        """Sample different cases."""

    def call(self, case: Any) -> Call:
        """Return the arrays of a case and the two functions of them."""

    def smaller(self, case: Any) -> Iterator[Any]:
        """Yield simpler cases."""

    def around(self, case: Any) -> Iterator[Any]:
        """Yield cases that differ in one thing."""

    def sample(self, case: Any, wrong: bool) -> Sample:
        """Return a case for learning where they differ."""


# --- arrays by letters ----------------------------------------------------------------------------

OUT = "out"
"""Name of a single result."""


class Function:
    """A function of arrays in some framework, with its gradients."""

    def __init__(
        self,
        f: Callable[..., Any],
        backward: Callable[..., Any] | None,
        framework: str,
        device: str | None,
        tiny: tuple[Mapping[str, Array], Mapping[str, Any]],
    ) -> None:
        self.name, self.backward = qualified_name(f), backward
        self.by_name = {
            n for n, p in parameters(f).items() if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        self.f: Callable[..., Any] = f

        def attempt(candidate: str) -> Framework:
            self.framework = make_framework(candidate, device)
            self.results(*tiny)
            return self.framework

        if framework == "auto":
            guess = child.choose_framework(f, "auto", None, tries=False)[0].name
            loaded = [n for n in FRAMEWORKS if n == "numpy" or n in sys.modules]
            self.framework = try_frameworks(self.name, dict.fromkeys((guess, *loaded), ""), attempt)
        else:
            self.framework = make_framework(framework, device)
        self.watched = self.f = Watched(f, self.framework.name)
        self.backward = None if backward is None else self.watched.watch(backward)

    @property
    def differentiates(self) -> bool:
        return self.backward is not None or self.framework.differentiates

    def _call(self, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        positional = [x for name, x in arrays.items() if name not in self.by_name]
        named = {name: x for name, x in arrays.items() if name in self.by_name}
        with catch_foreign("raised"):
            value = self.f(*positional, **named, **options)
        return self._name_results(value)

    def _name_results(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, (tuple, list)):
            return {f"{OUT}[{i}]": x for i, x in enumerate(value)}
        return {OUT: value}

    def _give(self, arrays: Mapping[str, Array]) -> dict[str, Any]:
        return {name: self.framework.give(np.array(x)) for name, x in arrays.items()}

    def _take(self, results: Mapping[str, Any]) -> dict[str, Array]:
        return {name: self.framework.take(x) for name, x in results.items()}

    def results(self, arrays: Mapping[str, Array], options: Mapping[str, Any]) -> dict[str, Array]:
        """Return the results by name."""
        return self._take(self._call(self._give(arrays), options))

    def everything(
        self,
        arrays: Mapping[str, Array],
        options: Mapping[str, Any],
        cotangents: Mapping[str, Array],
        leaves: Sequence[str],
    ) -> dict[str, Array]:
        """Return the results, and the gradients of the arrays that are `leaves`."""
        with self.framework.one_thread(), self.framework.allowing(arrays[leaves[0]].dtype):
            if not cotangents or not self.differentiates:
                return self.results(arrays, options)
            given, inputs = self._give(cotangents), self._give(arrays)

            def run(**own: Any) -> dict[str, Any]:
                return self._call({**inputs, **own}, options)

            with catch_foreign("its gradient raised"):
                if self.backward is None:
                    results, grads = self.framework.gradients(run, inputs, given, leaves)
                else:
                    results, grads = run(), self._pull_back(given, inputs, options, leaves)
            return self._take({**results, **{f"d{name}": x for name, x in grads.items()}})

    def _pull_back(
        self,
        cotangents: Mapping[str, Any],
        inputs: Mapping[str, Any],
        options: Mapping[str, Any],
        leaves: Sequence[str],
    ) -> dict[str, Any]:
        """Call backward=, and read the gradients that it returns."""
        assert self.backward is not None
        douts = tuple(cotangents.values())
        dout = douts if len(douts) > 1 else douts[0]
        value = self.backward(dout, *inputs.values(), **options)
        if isinstance(value, Mapping):
            return dict(value)
        several = value if isinstance(value, (tuple, list)) else (value,)
        if len(several) != len(leaves):
            raise ResultError(
                f"its backward returned {len(several)} gradients, must return those of "
                + ", ".join(leaves)
            )
        return dict(zip(leaves, several, strict=True))


@dataclass(frozen=True)
class FunctionPair:
    """A function and its reference, of arrays by letters."""

    f: Function
    reference: Function
    space: LetterSpace
    dtype: str

    def cases(self, seed: int, examples: int) -> Iterator[Case]:
        return self.space.cases(seed, examples)

    def smaller(self, case: Case) -> Iterator[Case]:
        return self.space.smaller(case)

    def around(self, case: Case) -> Iterator[Case]:
        return (x for x in self.space.around(case) if self.space.fits(x))

    def call(self, case: Case) -> Call:
        """Return the arrays of a case; cotangents are of the results that have floating numbers."""
        arrays = case.arrays(self.space.inputs, self.dtype)
        leaves = [name for name, x in self.space.inputs.items() if x.kind == "float"]
        fixed = {name: x for name, x in arrays.items() if name not in leaves}
        wide = {n: x.astype(np.float64) if n in leaves else x for n, x in arrays.items()}
        dtype = arrays[leaves[0]].dtype
        cotangents = {}
        if self.f.differentiates and self.reference.differentiates:
            with self.reference.framework.allowing(np.dtype(np.float64)):
                results = self.reference.results(wide, case.options)
            cotangents = {
                f"cotangent of {name}": case.cotangent(x.shape, dtype, i)
                for i, (name, x) in enumerate(results.items())
                if x.dtype.kind not in "biu"
            }

        def ask(function: Function, given: Mapping[str, Array]) -> dict[str, Array]:
            own = {name: given[name] if name in leaves else fixed[name] for name in arrays}
            douts = {n.removeprefix("cotangent of "): given[n] for n in cotangents}
            return function.everything(own, case.options, douts, leaves)

        sizes = sorted(case.sizes.values())[-2:]
        return Call(
            {**{name: arrays[name] for name in leaves}, **cotangents},
            lambda given: ask(self.f, given),
            lambda given: ask(self.reference, given),
            self.reference.watched,
            math.prod(sizes),
        )

    def sample(self, case: Case, wrong: bool) -> Sample:
        options = frozenset(
            name if value is True else f"{name}={value!r}"
            for name, value in case.options.items()
            if value != self.space.options[name][0]
        )
        nothing = np.zeros(0, np.int64)
        found = np.asarray(wrong), np.asarray(True), nothing.astype(bool), nothing
        return Sample(dict(case.sizes), options, "", *found)


# --- attention ------------------------------------------------------------------------------------

ARRAYS = ("q", "k", "v", "bias", "sinks", "gate")


@dataclass(frozen=True)
class AttentionPair:
    """A function of q, k, v and its reference (side A), on problems that both accept."""

    sides: Sides
    watched: Watched

    def cases(self, seed: int, examples: int) -> Iterator[Recipe]:
        """Sample recipes as the rules do, with normal numbers."""
        cases = self.sides.a.cases(Pools(self.sides.a.space), seed, 2 * examples)
        tamed = (replace(tame(r), view="contiguous") for r in cases)
        return islice((r for r in dict.fromkeys(tamed) if self._takes(r)), examples)

    def _takes(self, recipe: Recipe) -> bool:
        sides = (self.sides.a, self.sides.b)
        small = recipe.H * recipe.T * recipe.S <= LARGE
        takes = self.sides.a.space.takes(recipe)
        return small and takes and not any(x.refuses_recipe(recipe) for x in sides)

    def call(self, recipe: Recipe) -> Call:
        """Return the arrays of a recipe, and its cotangents."""
        cotangents = share_cotangents(self.sides, recipe)
        problem = self.sides.a.problem(recipe).materialise()
        arrays = {n: x for n in ARRAYS if (x := getattr(problem, n)) is not None}
        arrays["dout"] = cotangents.dout
        if cotangents.dlse is not None:
            arrays["dlse"] = cotangents.dlse

        def ask(trial: Trial, given: Mapping[str, Array]) -> Mapping[str, Array]:
            own = {name: x for name, x in given.items() if name in ARRAYS}
            problem = trial.problem(recipe).materialise().replace(**own)
            with trial.implementation.framework.one_thread():
                return trial.results(problem, Cotangents(given["dout"], given.get("dlse")))

        sizes = sorted((recipe.H, *(recipe.lead or ()), recipe.T, recipe.S, recipe.D, recipe.E))
        return Call(
            arrays,
            lambda given: ask(self.sides.b, given),
            lambda given: ask(self.sides.a, given),
            self.watched,
            math.prod(sizes[-2:]),
        )

    def smaller(self, recipe: Recipe) -> Iterator[Recipe]:
        """Yield the recipe without one option, or with one size halved."""
        changes: list[dict[str, Any]] = [{n: getattr(PLAIN, n)} for n in options_on(recipe)]
        changes += [{"lead": (1,)}] if recipe.lead not in (None, (), (1,)) else []
        changes += [{"H": 1, "K": 1}, {"H": recipe.K}] if recipe.H > 1 else []
        for names in ("TS", "DE", "T", "S", "D", "E"):
            for part in PARTS:
                changes.append({x: int(part * getattr(recipe, x)) or 1 for x in names})
            changes.append({x: getattr(recipe, x) - 1 for x in names})
        for change in changes:
            small = replace(recipe, **change)
            less = (getattr(small, x) <= getattr(recipe, x) for x in "TSDE")
            sizes = (small.T, small.S, small.D, small.E)
            if small != recipe and all(less) and min(sizes) > 0 and self._takes(small):
                yield small

    def around(self, recipe: Recipe) -> Iterator[Recipe]:
        return (r for r in around(self.sides.a, recipe) if self._takes(r))

    def sample(self, recipe: Recipe, wrong: bool) -> Sample:
        found = np.asarray(wrong), np.asarray(True)
        return sample(self.sides.a, recipe, self.sides.a.problem(recipe), "", *found)


def reason(err: ImplementationError) -> str:
    """Return the first line of an error."""
    return str(err).partition("\n")[0]
