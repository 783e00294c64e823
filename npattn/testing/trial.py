"""One implementation under test in one dtype: its results beside exact values and tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import tee
from typing import Any, NamedTuple, TypeVar

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import NpattnError
from npattn.oracle.api import backward, evaluate, find_obstacle
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.latent import tie
from npattn.testing.bounds.allowed import bounds, tolerance
from npattn.testing.bounds.delivery import delivery_error
from npattn.testing.bounds.free_elements import free_elements
from npattn.testing.bounds.rounding import Rounding, Units
from npattn.testing.bounds.worst_case import are_tame
from npattn.testing.cases.classes import classes_of_problem, classes_of_recipe, structure_of
from npattn.testing.cases.recipe import Recipe, resize
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.comparison import Comparison, check_tolerance, compare_result
from npattn.testing.power import Power

DOUBTFUL = 0.5
"""Error / tolerance of a float64 result from which the oracle is evaluated without rounding."""
MOST_TERMS = 2**22
"""Terms of its sums, where that takes half a second."""
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks", "dgate")

Value = TypeVar("Value")


class Violation(NpattnError):
    """An implementation broke a rule on a problem.

    Attributes
    ----------
    problem : npattn.Problem
    cotangents : Cotangents or None
    kind : {"value", "shape", "change", "bits", "moves", "range", "after", "calls"}
        How a script shows it.
    ratio : float
        Largest error / tolerance.
    view : str
        Memory layout of the arrays.
    before : npattn.Problem or None
        Problem whose results should be the same, if the kind is "moves" or "after".
    limits : (array, array) or None
        Least and largest legal o, if the kind is "range".
    related : frozenset of str
        Results in which two calls differ that a relation holds against each other; none for others.
    comparisons : tuple of Comparison
        Results that are out of tolerance, the worst first.
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
        related: frozenset[str] = frozenset(),
        comparisons: tuple[Comparison, ...] = (),
    ) -> None:
        super().__init__(text)
        self.problem, self.cotangents = problem, cotangents
        self.kind, self.ratio = kind, ratio
        self.before, self.limits, self.related = before, limits, related
        self.comparisons, self.view = comparisons, "contiguous"


class WrongAnyway(NpattnError):
    """A problem that is wrong unaltered too, which is left to the rules on agreement."""


class Suspicion(Violation):
    """Errors that chance hardly explains, though each of them is within its tolerance."""


@dataclass(frozen=True)
class Evaluation:
    """Results of an implementation for a problem, beside exact values and tolerances.

    Attributes
    ----------
    problem : npattn.Problem
    cotangents : Cotangents
    results : mapping
        Results that are real floats, in the dtype delivered; the first of each name.
    exact : mapping
        Exact values by the same names, float64.
    bound : callable
        Returns the tolerances by the same names, float64.
    """

    problem: Problem
    cotangents: Cotangents
    results: Mapping[str, Array]
    exact: Mapping[str, Array]
    bound: Callable[[], Mapping[str, Array]]

    @cached_property
    def tolerance(self) -> Mapping[str, Array]:
        """Tolerances by name; computed when first needed, since they cost more than all else."""
        return self.bound()


class Passed(NamedTuple):
    """A result that passed, with the exact values and the tolerances, of one shape."""

    recipe: Recipe
    result: Array
    exact: Array
    tolerance: Array


class Refusal(NamedTuple):
    """One call that was refused: with cotangents it is that for gradients."""

    problem: Problem
    cotangents: Cotangents | None
    view: str
    text: str


@dataclass
class Trial:
    """One implementation, judged under conventions and a rounding model, in one dtype.

    Attributes
    ----------
    implementation : Implementation
    conventions : Conventions
    rounding : Rounding
    space : Space
        Problems that it accepts; its dtype is the one tested.
    gradients : frozenset of str
        Names among `GRADIENTS` that it returns.
    skips_empty_rows : bool
        Fully masked rows are known to be wrong, and only the rule empty-row has them.
    first_calls : tuple of (problem, cotangents, results)
        The first calls ever made, to find out its framework and by the probe: results of the
        forward and, where it has gradients, of those, in the order in which the calls were made.
    refusals : tuple of Refusal
        The first calls that the probe found refused.
    memo : dict
        Values computed for recipes, shared by rules that sample alike; see `fresh`.
    powers : dict
        Power of each result in the last problem that a rule of agreement passed, by name.
    judged : (results, (exact, tolerance))
        Results that were compared with the oracle last, exact values and tolerances by name.
    """

    implementation: Implementation
    conventions: Conventions
    rounding: Rounding
    space: Space
    gradients: frozenset[str] = frozenset()
    skips_empty_rows: bool = False
    first_calls: tuple[tuple[Problem, Cotangents, Results], ...] = ()
    refusals: tuple[Refusal, ...] = ()
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    powers: dict[str, Power] = field(default_factory=dict, repr=False)
    judged: tuple[Results, tuple[Mapping[str, Array], Mapping[str, Array]]] = field(
        default_factory=lambda: (Results(()), ({}, {})), repr=False
    )

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the implementation, which a process has, and what is remembered."""
        return vars(self) | {"implementation": None, "memo": {}}

    def fresh(self) -> Trial:
        """Return the same trial with an empty memo."""
        return replace(self, memo={})

    def _remember(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key not in self.memo:
            self.memo[key] = make()
        value: Value = self.memo[key]
        return value

    # --- problems ---

    def cases(self, pools: Pools, seed: int, examples: int) -> Iterator[Recipe]:
        """Return an iterator over `Pools.cases`; memoized, for many rules sample alike."""
        key = ("cases", pools.key, seed, examples)
        (recipes,) = self._remember(key, lambda: tee(pools.cases(seed, examples), 1))
        return copy(recipes)

    def problem(self, recipe: Recipe) -> Problem:
        """Return the problem of a recipe in the terms of the conventions; memoized, read-only."""
        conventions = self.conventions

        def make() -> Problem:
            adapted = self.translate(recipe).problem(conventions.alignment, conventions.mask_true)
            return self.implementation.fit(adapted)

        return self._remember(("problem", recipe), make)

    def translate(self, recipe: Recipe) -> Recipe:
        """Return the recipe with its window in the terms of the conventions."""
        left_keys, right_keys = recipe.window or (None, None)
        if self.conventions.window == "inclusive" and left_keys is not None:
            return replace(recipe, window=(left_keys + 1, right_keys))
        return recipe

    def cotangents(self, recipe: Recipe, problem: Problem, weights: bool = False) -> Cotangents:
        """Return random cotangents of o, of lse if it returns one, and on request of the weights.

        The cotangent of the lse of fully masked rows is 0. Memoized for the recipe's own problem.
        """
        if problem is not self.memo.get(("problem", recipe)):
            return self._cotangents(recipe, problem, weights)
        key = ("cotangents", recipe, weights)
        return self._remember(key, lambda: self._cotangents(recipe, problem, weights))

    def _cotangents(self, recipe: Recipe, problem: Problem, weights: bool) -> Cotangents:
        random = recipe.cotangents(
            problem, lse=self.takes_dlse, weights=weights and self.takes_dweights
        )
        dlse = random.dlse
        if dlse is not None:
            dlse = np.where(self.empty(problem), np.zeros_like(dlse), dlse)
        return Cotangents(random.dout, dlse, random.dweights)

    @property
    def takes_dlse(self) -> bool:
        """True if it has gradients through lse."""
        return self.implementation.takes_dlse

    @property
    def takes_dweights(self) -> bool:
        """True if it has gradients through the weights."""
        f = self.implementation
        return f.returns_weights and (f.backward is None or "dweights" in f.backward_takes)

    @cached_property
    def _without_fill(self) -> Conventions:
        """Conventions under which hidden keys leave the softmax."""
        late = self.conventions.softcap == "after_mask"
        softcap = "after_bias" if late else self.conventions.softcap
        return replace(self.conventions, hidden_fill=None, hidden_add=None, softcap=softcap)

    def visible(self, problem: Problem) -> Array:
        """Return the visible positions, broadcast to (..., H, T, S) (rank 2: (T, S))."""
        canonical = self._without_fill.canonical(problem)
        heads = () if problem.headless else (problem.H,)
        scores_shape = (*problem.lead, *heads, problem.T, problem.S)
        return np.broadcast_to(
            True if canonical.visible is None else canonical.visible, scores_shape
        )

    def empty(self, problem: Problem) -> Array:
        """Return the fully masked rows, (..., H, T); a score of −inf is not visible."""
        plain = self._without_fill.canonical(problem)
        plain = plain if plain.sinks is None else plain.replace(sinks=None)
        numbers = (plain.q.astype(float), plain.k.astype(float), np.array(plain.scale, float))
        if plain.score_mod is None and are_tame(*numbers):
            return _empty_rows(plain)
        empty: Array = evaluate(plain, engine="dense").lse == -np.inf
        return empty

    def skips(self, recipe: Recipe, rule: str) -> bool:
        """Return True if the recipe has fully masked rows, which are known to be wrong.

        Also if a bias of −inf is multiplied by a scale of 0 or less: it then is NaN, or +inf.
        """
        scale = 1.0 if self.conventions.bias != "before_scale" else recipe.scale
        if scale is not None and scale <= 0 and "-inf" in (recipe.bias or ""):
            return True
        if not self.skips_empty_rows or rule == "empty-row":
            return False
        return bool(self.empty(self.problem(recipe)).any())

    def refuses_recipe(self, recipe: Recipe) -> bool:
        """Return True if options or structure of the recipe are refused, together or alone."""
        if self.space.excludes(recipe):
            return True
        if not self.space.refused:
            return False
        return self.space.refuses(classes_of_recipe(recipe).union(structure_of(recipe)))

    def has_refused(self, err: ImplementationError, recipe: Recipe) -> bool:
        """Return True if it raised because of what is refused in a problem made of a recipe."""
        if isinstance(err.__cause__, Exception) and self._is_excluded(err, recipe):
            return True
        if err.problem is None or not err.may_refuse_structure or not self.space.refused:
            return False
        structure = frozenset(structure_of(resize(recipe, err.problem)))
        classes = classes_of_problem(err.problem) if err.is_refusal else frozenset()
        return self.space.refuses(structure | classes)

    def _is_excluded(self, err: ImplementationError, recipe: Recipe) -> bool:
        """Return True if sizes that nobody asks for raise, or if a known condition refuses them."""
        if err.refuses and err.place and err.place in self.space.refused_at:
            return True
        if err.problem is None or not (self.space.sizes or self.space.excluded):
            return False
        resized = replace(resize(recipe, err.problem), causal=bool(err.problem.causal))
        if not self.space.has_sizes(resized):
            return True
        return bool(err.refuses) and self.space.excludes(resized)

    # --- results beside the oracle ---

    def agreement(self, recipe: Recipe) -> dict[str, Comparison]:
        """Compare every result of a plain problem with the oracle; memoized."""

        def compare() -> dict[str, Comparison]:
            problem = self.problem(recipe)
            cotangents = self.cotangents(recipe, problem, weights=True)
            comparisons = self.against_oracle(problem, cotangents, recipe.view)
            for name, array in self.judged[0].pairs:
                c = comparisons.get(name)
                if c is not None and c.passed and c.power and c.power.doubled and c.power.judged:
                    exact, allowed = (x[name] for x in self.judged[1])
                    self.memo.setdefault(("passed", name), Passed(recipe, array, exact, allowed))
            return comparisons

        return self._remember(("agreement", recipe), compare)

    def passed(self, name: str) -> Passed | None:
        """Return the first result of this name that passed, among those that are remembered."""
        return self.memo.get(("passed", name))

    def fails_unaltered(self, recipe: Recipe) -> bool:
        """Return True if the plain, contiguous problem is wrong or raises."""
        try:
            return bool(self.disagreements(recipe))
        except (Violation, ImplementationError):
            return True

    def disagreements(self, recipe: Recipe) -> frozenset[str]:
        """Return the results of the plain, contiguous problem that the oracle finds wrong."""
        comparisons = self.agreement(replace(recipe, view="contiguous"))
        return frozenset(name for name, c in comparisons.items() if not c.passed)

    def against_oracle(
        self, problem: Problem, cotangents: Cotangents, view: str = "contiguous"
    ) -> dict[str, Comparison]:
        """Compare every result with the oracle."""
        exact = cache(lambda: self.exact(problem, cotangents))
        bound = cache(lambda: self.tolerance(problem, cotangents, exact()))
        results = self.results(problem, cotangents, view, (exact, bound))
        self._note_judged()
        return self._compare(results, problem, cotangents, (exact(), bound()))

    def _note_judged(self) -> None:
        if self.implementation.untrusted is not None:
            self.implementation.untrusted.note_judged()

    def compare(
        self, results: Results, problem: Problem, cotangents: Cotangents
    ) -> dict[str, Comparison]:
        """Compare results of any call for a problem with the oracle."""
        return self._compare(results, problem, cotangents, self.oracle(problem, cotangents))

    def _compare(
        self,
        results: Results,
        problem: Problem,
        cotangents: Cotangents,
        oracle: tuple[Mapping[str, Array], Mapping[str, Array]],
    ) -> dict[str, Comparison]:
        """Compare results; where rounding may decide, with the oracle in extended precision."""
        comparisons = worst_by_name(results, *oracle)
        self.judged = results, oracle
        if self._doubts(comparisons, problem):
            exact = self.exact(problem, cotangents, engine="extended")
            comparisons = worst_by_name(results, exact, oracle[1])
        return comparisons

    def _doubts(self, comparisons: Mapping[str, Comparison], problem: Problem) -> bool:
        """Return True if rounding of the oracle may decide, and it can be evaluated without."""
        if problem.dtype != np.float64 or problem.q.dtype != np.float64:
            return False
        if not any(c.ratio > DOUBTFUL for c in comparisons.values()):
            return False
        terms = math.prod((*problem.lead, problem.H, problem.T, problem.S, problem.D + problem.E))
        return terms <= MOST_TERMS and find_obstacle(problem, self.conventions) is None

    def evaluation(self, recipe: Recipe) -> Evaluation:
        """Evaluate the plain problem, contiguous; memoized."""

        def evaluate_plain() -> Evaluation:
            problem = self.problem(recipe)
            return self.evaluate(problem, self.cotangents(recipe, problem))

        return self._remember(("evaluation", recipe), evaluate_plain)

    def evaluate(self, problem: Problem, cotangents: Cotangents) -> Evaluation:
        """Run the implementation on any problem."""
        exact = cache(lambda: self.exact(problem, cotangents))
        results = self.results(problem, cotangents, needed_next=(exact,))
        self._note_judged()
        # Results of another kind are the business of shape-dtype.
        floats = {n: x for n, x in results.items() if x.dtype.kind not in "biuc"}
        bound = cache(lambda: self.tolerance(problem, cotangents, exact()))
        return Evaluation(problem, cotangents, floats, exact(), bound)

    def results(
        self,
        problem: Problem,
        cotangents: Cotangents,
        view: str = "contiguous",
        needed_next: Sequence[Callable[[], object]] = (),
    ) -> Results:
        """Return every result of the implementation, of each way to call it.

        What is `needed_next` is computed while a worker answers, a function for each request.
        """
        f, work = self.implementation, iter(needed_next)
        with f.while_answering(next(work, None)):
            results = f.forward(problem, view)
        if self.gradients:
            with f.while_answering(next(work, None)):
                results += f.gradients(problem, cotangents, view)
            # Kernels dispatch on whether the gradient of the bias is wanted.
            if problem.bias_array is not None and f.backward is None:
                results += f.gradients(problem, cotangents, view, bias_gradient=False)
        return results

    def oracle(
        self, problem: Problem, cotangents: Cotangents
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return exact values and tolerances, by name."""
        exact = self.exact(problem, cotangents)
        return exact, self.tolerance(problem, cotangents, exact)

    def exact(
        self, problem: Problem, cotangents: Cotangents, engine: str = "dense"
    ) -> dict[str, Array]:
        """Return the exact values of what the implementation returns."""
        fwd = evaluate(problem, self.conventions, engine=engine)
        exact: dict[str, Any] = {"o": fwd.out, "lse": fwd.lse}
        if self.implementation.returns_weights:
            exact["weights"] = fwd.weights
        if self.implementation.returns_max_score:
            exact["max_score"] = fwd.max_score
        if self.gradients:
            grads = backward(fwd, *_float64(cotangents))
            for name in GRADIENTS:
                value = getattr(grads, name[1:])
                if value is not None and name in self.gradients:
                    exact[name] = value
            if self.implementation.latent is not None and "dk" in exact:
                exact = tie(exact, grads.v)
        return exact

    def tolerance(
        self,
        problem: Problem,
        cotangents: Cotangents,
        exact: Mapping[str, Array],
        *,
        asked: Problem | None = None,
        queries: int | None = None,
    ) -> dict[str, Array]:
        """Return the allowed error of each result, by name.

        `asked` is the problem of the call whose factor of o the results have, if it is another;
        `queries` the number of queries of a longer problem, if this one has some of them.
        """
        dout, dlse, dweights = _float64(cotangents)
        setting = problem.q.dtype, self.rounding
        apart: Array | None = None  # error of out as a backward gets it, in 8 bits
        f = self.implementation
        if self.gradients and f.output is not None and "out" in f.backward_takes:
            apart = self.deliver(problem, exact["o"])
        allowed = tolerance(
            problem,
            *setting,
            dout=dout if self.gradients else None,
            dlse=dlse,
            dweights=dweights,
            conventions=self.conventions,
            queries=queries,
            delivered=apart,
            only=exact.keys(),
        )
        allowed["o"] = self._deliver(asked or problem, exact["o"], allowed["o"])
        for name, free in free_elements(problem, self.conventions).items():
            if name in allowed:
                allowed[name] = np.where(free, np.inf, allowed[name])
        if self.implementation.latent is not None and "dk" in exact:
            allowed = self._tie_tolerance(allowed, problem, cotangents)
        for name in exact:
            check_tolerance(name, allowed[name], exact[name])
        return allowed

    def _tie_tolerance(
        self, allowed: dict[str, Array], problem: Problem, cotangents: Cotangents
    ) -> dict[str, Array]:
        """Return tolerances where v is a part of k: dk and dv may be stored, and then added."""
        grads = backward(evaluate(problem, self.conventions), *_float64(cotangents))
        low = Units.of(self.rounding, problem.q.dtype).low
        errors = allowed["dk"][..., : problem.E] + allowed["dv"]
        sizes = abs(grads.k[..., : problem.E]) + abs(grads.v) + errors
        return tie(allowed, allowed["dv"] + low.u * sizes + 2 * low.eta)

    def bounds(self, problem: Problem, o: Array) -> dict[str, Array]:
        """Return the worst case of o, whose exact values are given, of lse and of the weights."""
        setting = problem.q.dtype, self.rounding
        limits = bounds(problem, *setting, conventions=self.conventions)
        return limits | {"o": self._deliver(problem, o, limits["o"])}

    def before_delivery(self, problem: Problem) -> Array:
        """Return the allowed error of o before it is rounded to 8 bits."""
        setting = problem.q.dtype, self.rounding
        return tolerance(problem, *setting, conventions=self.conventions)["o"]

    def deliver(self, problem: Problem, o: Array, descales: Array | None = None) -> Array:
        """Return the allowed error of o in 8 bits, by the descales of a call or others."""
        return self._deliver(problem, o, self.before_delivery(problem), descales)

    def _deliver(
        self, problem: Problem, o: Array, allowed: Array, descales: Array | None = None
    ) -> Array:
        """Return the allowed error of o as it is returned: in 8 bits, it may be."""
        output = self.implementation.output
        if output is None:
            return allowed
        descales = output.descales(problem) if descales is None else descales
        dtype = problem.q.dtype
        return delivery_error(o, allowed, descales, output.dtype, self.rounding, dtype)

    def check(self, found: Mapping[str, Comparison], problem: Problem, cot: Cotangents) -> float:
        """Return the largest ratio; raise a `Violation` if one is above 1."""
        wrong = [c for c in found.values() if not c.passed]
        if wrong:
            wrong.sort(key=lambda c: -c.ratio)
            text = "\n".join(map(str, wrong))
            ratio = wrong[0].ratio
            raise Violation(text, problem, cot, ratio=ratio, comparisons=tuple(wrong))
        return max((c.ratio for c in found.values()), default=0.0)

    def agree(self, found: Mapping[str, Comparison], problem: Problem, cot: Cotangents) -> float:
        """Return the largest ratio as `check` does, and keep the powers of these results."""
        ratio = self.check(found, problem, cot)
        self.powers = {name: c.power for name, c in found.items() if c.power is not None}
        return ratio


def _empty_rows(problem: Problem) -> Array:
    """Return the rows, (..., H, T), that see no key, where no product of q and k is infinite."""
    heads = () if problem.headless else (problem.H,)
    live: Array | bool = True if problem.visible is None else problem.visible
    if problem.bias_array is not None:
        live = live & (problem.bias_array != -np.inf)
    scores = (*problem.lead, *heads, problem.T, problem.S)
    empty: Array = ~np.any(np.broadcast_to(live, scores), -1)
    return empty


def worst_by_name(
    results: Results, exact: Mapping[str, Array], tolerance: Mapping[str, Array]
) -> dict[str, Comparison]:
    """Compare all arrays with the exact ones; of several with one name keep the worst."""
    comparisons: dict[str, Comparison] = {}
    for name, array in results.pairs:
        if name not in exact:
            continue
        comparison = compare_result(name, array, exact[name], tolerance[name])
        if name not in comparisons or comparison.ratio > comparisons[name].ratio:
            comparisons[name] = comparison
    return comparisons


def _float64(cotangents: Cotangents) -> tuple[Array, Array | None, Array | None]:
    dout, *more = cotangents.dout, cotangents.dlse, cotangents.dweights
    dlse, dweights = (None if x is None else x.astype(float) for x in more)
    return dout.astype(float), dlse, dweights
