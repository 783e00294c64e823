"""A function and its reference: cases that both take, their arrays, and simpler cases."""

from __future__ import annotations

import copy
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np

from npattn.errors import OptionError
from npattn.problem import Cotangents
from npattn.problem.arrays import Array
from npattn.testing.adapters import child
from npattn.testing.adapters.base import ImplementationError, ResultError, catch_foreign
from npattn.testing.adapters.child import FRAMEWORKS, parameters, qualified_name
from npattn.testing.adapters.frameworks import Framework, make_framework, try_frameworks
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.borders import Neighbours
from npattn.testing.diagnosis.explore import LARGE, PLAIN, tame
from npattn.testing.places import Spent, describe_clauses, find_clause, find_place
from npattn.testing.reference.copies import convert_modules
from npattn.testing.reference.decisions import Decisions
from npattn.testing.reference.intermediates import Watched
from npattn.testing.reference.letters import PARTS, Case, LetterSpace
from npattn.testing.reference.sides import Sides, share_cotangents
from npattn.testing.reference.spread import Call
from npattn.testing.trial import Trial

Fails = Callable[[Any], bool | None]
Known = Sequence[tuple[Any, bool]]


class Pair(Protocol):
    """Protocol of a function and its reference, in one dtype."""

    def cases(self, seed: int, examples: int) -> Iterator[Any]:
        """Sample different cases."""

    def call(self, case: Any) -> Call:
        """Return the arrays of a case and the two functions of them."""

    def largest(self, case: Any) -> int:
        """Return the largest size of a case."""

    def smaller(self, case: Any) -> Iterator[Any]:
        """Yield simpler cases."""

    def place(self, case: Any, fails: Fails, asked: Known, seconds: float) -> tuple[str, int]:
        """Return the condition of the cases that fail, and the number of cases that say so.

        "" if none is found in so many seconds. `case` fails; `fails` says it of others, None if one
        of the two does not take it; `asked` are cases that were asked, with True for those that
        fail.
        """

    def takes(self, refused: Any) -> str:
        """Return the condition of the cases that the function refuses, from one; "" if none."""


# --- arrays by letters ----------------------------------------------------------------------------

OUT = "out"
"""Name of a single result."""
LARGEST = 137
"""Size below which the place of a failure is looked for."""
QUESTIONS = 150
"""Cases that are asked for it, at most."""
Request = tuple[Mapping[str, Array], Mapping[str, Any]]
"""Arrays and options of a call."""


class Function:
    """A function of arrays in some framework, with its gradients."""

    def __init__(
        self,
        f: Callable[..., Any],
        backward: Callable[..., Any] | None,
        framework: str,
        device: str | None,
        tiny: Sequence[Request],
        argument: str = "framework",
    ) -> None:
        """Find the framework by calls of `tiny` requests, until it takes one."""
        self.name, self.plain_backward = qualified_name(f), backward
        self.by_name = {
            n for n, p in parameters(f).items() if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        self.set_function(f, "numpy")

        def attempt(candidate: str) -> Framework:
            self.framework = make_framework(candidate, device)
            self.set_function(f, candidate)
            self._try(tiny)
            return self.framework

        if framework == "auto":
            guess = child.choose_framework(f, "auto", None, tries=False)[0].name
            loaded = [n for n in FRAMEWORKS if n == "numpy" or n in sys.modules]
            candidates = dict.fromkeys((guess, *loaded), "")
            try:
                self.framework = try_frameworks(self.name, candidates, attempt)
            except OptionError as err:
                text = str(err).replace("framework=", f"{argument}=")
                raise OptionError(text) from None
        else:
            self.framework = make_framework(framework, device)
        self.set_function(f, self.framework.name)

    def set_function(self, f: Callable[..., Any], framework: str) -> None:
        self.watched = self.f = Watched(f, framework)
        backward = self.plain_backward
        self.backward = None if backward is None else self.watched.watch(backward)

    def convert(self, *dtypes: str) -> Function:
        """Return the function with its torch modules, if it holds any, cast to these dtypes."""
        made = copy.copy(self)
        f = convert_modules(self.watched.f, *dtypes)
        if f is not self.watched.f:
            made.set_function(f, self.framework.name)
        return made

    def _try(self, tiny: Sequence[Request]) -> None:
        """Call it, with gradients, on the first of some requests that it does not refuse."""
        for i, (arrays, options) in enumerate(tiny):
            try:
                results = self.results(arrays, options)
                douts = {n: x for n, x in results.items() if x.dtype.kind not in "biu"}
                leaves = [n for n, x in arrays.items() if x.dtype.kind not in "biu"]
                self.everything(arrays, options, douts, leaves)
                return
            except ImplementationError as err:
                if i == len(tiny) - 1 or not err.is_refusal:
                    raise

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
            douts, inputs = self._give(cotangents), self._give(arrays)

            def run(**arguments: Any) -> dict[str, Any]:
                return self._call({**inputs, **arguments}, options)

            with catch_foreign("its gradient raised"):
                if self.backward is None:
                    results, grads = self.framework.gradients(run, inputs, douts, leaves)
                else:
                    results, grads = run(), self._pull_back(douts, inputs, options, leaves)
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
    """A function and its reference, of arrays by letters.

    Modules of the function have the dtype; those of the reference hold the same weights in float64.
    """

    f: Function
    reference: Function
    space: LetterSpace
    dtype: str

    def cases(self, seed: int, examples: int) -> Iterator[Case]:
        return self.space.cases(seed, examples)

    def largest(self, case: Case) -> int:
        return max(case.sizes.values(), default=0)

    def smaller(self, case: Case) -> Iterator[Case]:
        return self.space.smaller(case)

    def place(self, case: Case, fails: Fails, asked: Known, seconds: float) -> tuple[str, int]:
        """Look for the border of each size and option, and attack what is found."""
        end = time.process_time() + seconds

        def answer(problem: Mapping[str, Any]) -> bool | None:
            if time.process_time() > end:
                raise Spent
            other = self._case(problem, case.seed)
            return fails(other) if self.space.fits(other) else None

        told = [({**x.sizes, **x.options}, wrong) for x, wrong in asked]
        place = find_place(
            answer, {**case.sizes, **case.options}, domains=self._domains(),
            choices=self.space.options, known=told, questions=QUESTIONS, seconds=10 * seconds,
        )  # fmt: skip
        return (place.text if place.held else ""), place.questions

    def takes(self, refused: Case) -> str:
        """Return the condition on sizes and options of refused cases, by calls; "" if none."""

        def refuses(problem: Mapping[str, Any]) -> bool | None:
            case = self._case(problem, refused.seed)
            if not self.space.fits(case):
                return None
            arrays = case.arrays(self.space.inputs, self.dtype)
            try:
                with np.errstate(all="ignore"):
                    self.f.results(arrays, case.options)
            except ImplementationError:
                return True
            return False

        clause = find_clause(
            refuses, {**refused.sizes, **refused.options}, domains=self._domains(),
            choices=self.space.options, seconds=1.0,
        )  # fmt: skip
        return describe_clauses([clause]) if clause else ""

    def _domains(self) -> dict[str, Sequence[int]]:
        sizes = self.space.sizes
        return {
            x: sorted(sizes[x]) if x in sizes else range(1, LARGEST) for x in self.space.letters
        }

    def _case(self, problem: Mapping[str, Any], seed: int) -> Case:
        sizes = {x: problem[x] for x in self.space.letters}
        return Case(sizes, {name: problem[name] for name in self.space.options}, seed)

    def call(self, case: Case) -> Call:
        """Return the arrays of a case; cotangents are of the results that have floating numbers."""
        arrays = case.arrays(self.space.inputs, self.dtype)
        leaves = [name for name, x in self.space.inputs.items() if x.kind == "float"]
        fixed = {name: x for name, x in arrays.items() if name not in leaves}
        wide = {n: x.astype(np.float64) if n in leaves else x for n, x in arrays.items()}
        dtype = arrays[leaves[0]].dtype
        cotangents = {}
        try:
            results = self._evaluate_reference(wide, case)
        except ImplementationError:  # it takes no float64
            results = self._evaluate_reference(arrays, case)
        self._compare_forms(self.f.results(arrays, case.options), results, case)
        if self.f.differentiates and self.reference.differentiates:
            cotangents = {
                f"cotangent of {name}": case.cotangent(x.shape, dtype, i)
                for i, (name, x) in enumerate(results.items())
                if x.dtype.kind not in "biu"
            }

        def ask(function: Function, values: Mapping[str, Array]) -> dict[str, Array]:
            arguments = {name: values[name] if name in leaves else fixed[name] for name in arrays}
            douts = {n.removeprefix("cotangent of "): values[n] for n in cotangents}
            return function.everything(arguments, case.options, douts, leaves)

        sizes = sorted(case.sizes.values())[-2:]
        return Call(
            {**{name: arrays[name] for name in leaves}, **cotangents},
            lambda values: ask(self.f, values),
            lambda values: ask(self.reference, values),
            self.reference.watched,
            math.prod(sizes),
        )

    def _evaluate_reference(self, arrays: Mapping[str, Array], case: Case) -> dict[str, Array]:
        reference = self.reference
        allowing = reference.framework.allowing(np.dtype(np.float64))
        with allowing, reference.watched.running(None, Decisions()):
            return reference.results(arrays, case.options)

    def _compare_forms(
        self, got: Mapping[str, Array], want: Mapping[str, Array], case: Case
    ) -> None:
        """Raise ResultError if f lacks results of the reference, or they have other shapes."""
        names = (self.f.name, self.reference.name)
        if set(want) - set(got):
            ours, theirs = (_count_results(x) for x in (got, want))
            raise ResultError(f"{names[0]} returns {ours}, but the reference {names[1]} {theirs}")
        for name, x in want.items():
            if got[name].shape != x.shape:
                ours, theirs = (_write_shape(y.shape, case.sizes) for y in (got[name], x))
                raise ResultError(
                    f"{name} of {names[0]} has shape {ours}, that of the reference {names[1]} "
                    f"{theirs}"
                )


def _count_results(results: Mapping[str, Array]) -> str:
    count = len(results)
    return f"{count} result{'' if count == 1 else 's'} ({', '.join(results)})"


def _write_shape(shape: tuple[int, ...], sizes: Mapping[str, int]) -> str:
    """Return a shape as "(3, 1), which is (B, 1)", with the letters that it can only be."""
    letters = {n: [x for x, m in sizes.items() if m == n] for n in shape if n > 1}
    words = [found[0] if len(found := letters.get(n, [])) == 1 else str(n) for n in shape]
    named = f"({', '.join(words)}{',' if len(words) == 1 else ''})"
    return f"{shape}" if named == f"{shape}" else f"{shape}, which is {named}"


# --- attention ------------------------------------------------------------------------------------

CASES = (24, 60)
"""Cases that are tried around a failing one: at least, whatever the time, and at most."""
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

        def ask(trial: Trial, values: Mapping[str, Array]) -> Mapping[str, Array]:
            changed = {name: x for name, x in values.items() if name in ARRAYS}
            problem = trial.problem(recipe).materialise().replace(**changed)
            with trial.implementation.framework.one_thread():
                return trial.results(problem, Cotangents(values["dout"], values.get("dlse")))

        sizes = sorted((recipe.H, *(recipe.lead or ()), recipe.T, recipe.S, recipe.D, recipe.E))
        return Call(
            arrays,
            lambda values: ask(self.sides.b, values),
            lambda values: ask(self.sides.a, values),
            self.watched,
            math.prod(sizes[-2:]),
        )

    def largest(self, recipe: Recipe) -> int:
        return max(recipe.T, recipe.S, recipe.D, recipe.E)

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

    def place(self, recipe: Recipe, fails: Fails, asked: Known, seconds: float) -> tuple[str, int]:
        """Look for the border of each size and option, and attack what is found."""
        near = Neighbours(self.sides.a, recipe, ask=lambda r: fails(r) if self._takes(r) else None)
        place = near.place(QUESTIONS, seconds)
        return (place.text, place.questions) if place is not None and place.held else ("", 0)

    def takes(self, refused: Recipe) -> str:
        return ""  # what attention functions refuse was probed before


def reason(err: ImplementationError) -> str:
    """Return the first line of an error."""
    return str(err).partition("\n")[0]
