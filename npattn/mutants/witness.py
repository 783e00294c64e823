"""Find what shows a mistake that tests miss: a problem, or a rule; and write the test."""

import functools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import NpattnError, OptionError
from npattn.mistakes import Mistake
from npattn.mutants.stand_in import stand_in
from npattn.mutants.terms import AXES, Terms, find_axes, translate
from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.capabilities import probe
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.comparison import compare
from npattn.testing.diagnosis.fingerprint import fingerprint_first
from npattn.testing.report.reproducer import write_conventions
from npattn.testing.rules import PROPERTIES, Property
from npattn.testing.trial import Trial, Violation, WrongAnyway

EXAMPLES = 60
"""Problems on which a mistake is tried."""
COUNTED = 20
"""The simplest of them, of which the share that shows a mistake is counted."""
RULES = (
    *("views", "repeatable", "inputs-unchanged", "arrays-reused", "aliased-inputs"),
    *("after-other-strides", "after-other-dtype", "packed-inputs", "two-threads", "nan-query"),
    *("nan-query-alone", "nan-value", "hidden-finite", "hidden-nan-k", "hidden-nan-v"),
    *("hidden-nan-kv", "offset-bias", "aggregate", "lse-gradient", "agreement-o", "agreement-dk"),
)
"""Rules that are asked where no problem shows a mistake: several calls, strides, NaN, rounding."""
FEW = 8
"""Problems on which a rule is asked."""


@dataclass(frozen=True)
class Witness:
    """Proof of a mistake."""

    share: float  # share of the simplest problems on which it is out of tolerance; 0 for a rule
    test: str  # source of a test that fails on the mistake and passes on the function that is right


@dataclass(frozen=True)
class Subject:
    """The function, and what it accepts."""

    f: Callable[..., Any]
    spec: str
    terms: Terms
    rename: Mapping[str, str]
    space: Space
    gradients: bool  # autograd of torch differentiates it
    framework: str  # "numpy" or "torch"

    def implement(self, mistake: Mistake | None) -> Implementation:
        """Return a mistake in the place of the function; None for attention that is right."""
        settings = {"rename": self.rename, "layout": self.terms.layout, "framework": self.framework}
        return implement(
            stand_in(self.f, self.terms, mistake), self.terms.beside, self.terms.axes, **settings
        )

    @cached_property
    def problems(self) -> list[tuple[Recipe, Problem, Cotangents, Results]]:
        """Recipes from the simplest to the largest, with the right results."""
        cases = Pools(self.space).cases(0, EXAMPLES)
        recipes = sorted(islice(cases, EXAMPLES), key=_size)
        conventions, right = self.terms.conventions, self.implement(None)
        found = []
        for recipe in recipes:
            problem = recipe.problem(conventions.causal, conventions.mask_true)
            cotangents = recipe.cotangents(problem, lse=False)  # that of an empty row is free
            found.append((recipe, problem, cotangents, self.evaluate(right, problem, cotangents)))
        return found

    def evaluate(self, f: Implementation, problem: Problem, cotangents: Cotangents) -> Results:
        """Return the results and, of a function that autograd differentiates, the gradients."""
        results = f.forward(problem)
        return results + f.gradients(problem, cotangents) if self.gradients else results

    def find(self, mistake: Mistake) -> Witness | None:
        """Return what shows a mistake; None if nothing that the signature can ask does."""
        f, shown, first = self.implement(mistake), 0, None
        with f.framework.one_thread():
            for number, (recipe, problem, cotangents, right) in enumerate(self.problems):
                if first is not None and number >= COUNTED:
                    break
                forward = self._shows(f, problem, cotangents, right)
                if forward is not None:
                    shown += number < COUNTED
                    alone = self.implement(mistake)  # without what earlier problems left behind
                    if not first and self._shows(alone, problem, cotangents, right) is not None:
                        first = recipe, forward
            if first is not None:
                return Witness(shown / COUNTED, self._write(mistake, *first))
            rule = next((rule for rule in self.rules if self._fails(rule, mistake)), None)
        return None if rule is None else Witness(0, self._write(mistake, None, True, rule.rule))

    def _shows(
        self, f: Implementation, problem: Problem, cotangents: Cotangents, right: Results
    ) -> bool | None:
        """Return None if all is right, True if forward is wrong, False if only gradients are."""
        try:
            got = self.evaluate(f, problem, cotangents)
            if _same(got, right) or self._agree(got, problem, cotangents.dout):
                return None
            results = {n: x for n, x in got.items() if not n.startswith("d")}
            return not self._agree(results, problem, None)
        except NpattnError:  # it raises, or has another shape
            return True

    def _agree(self, got: Mapping[str, Any], problem: Problem, dout: Any) -> bool:
        conventions = self.terms.conventions
        return all(
            c.passed for c in compare(dict(got), problem, dout=dout, conventions=conventions)
        )

    @cached_property
    def rules(self) -> list[Property]:
        """Rules that pass attention that is right."""
        rules = [PROPERTIES[name] for name in RULES]
        return [rule for rule in rules if not self._fails(rule, None)]

    def _fails(self, rule: Property, mistake: Mistake | None) -> bool:
        """Return True if a rule fails a mistake on a few problems; None for what is right."""
        model = Rounding.undeclared(self.space.dtype)
        trial = Trial(self.implement(mistake), self.terms.conventions, model, self.space)
        if rule.unless(trial) is not None:
            return False
        pools = Pools(self.space, **rule.draw(trial))
        drawn = rule.recipes and rule.recipes(trial, 0, FEW)
        for recipe in islice(drawn or trial.cases(pools, 0, FEW), FEW):
            try:
                rule.check(trial, recipe)
            except WrongAnyway:
                continue
            except (Violation, ImplementationError):
                return True
        return False

    def _write(self, mistake: Mistake, recipe: Recipe | None, forward: bool, rule: str = "") -> str:
        """Return the source of the test of a problem or a rule."""
        module, _, name = self.spec.partition(":")
        signature, conventions = self.terms.signature, self.terms.conventions
        text = write_conventions(conventions)
        said = [] if text == "npattn.Conventions()" else ["conventions=conventions"]
        words, rename = [name], dict(self.rename)
        if self.terms.beside:  # whose parameters a lambda does not have
            words = [f"lambda *args, **kwargs: {name}(*args, **kwargs)[0]"]
            words += [f"features={sorted(signature.features)!r}"]
            rename = dict(signature.meanings)
        words += [f"rename={rename!r}"] if rename else []
        words += [f"layout={self.terms.layout!r}"] if self.terms.layout != "BHTD" else []
        lines = [f'"""{mistake.sentence}"""']
        lines += [f"f = npattn.testing.Implementation({', '.join(words)})"]
        lines += [f"conventions = {text}"] if said else []
        if recipe is None:
            asked = ", ".join(["f", f'only="{rule}"', "examples=20", *said])
            lines += [f"report = npattn.testing.check({asked})"]
            lines += [f'(one,) = [x for x in report.outcomes if x.rule == "{rule}"]']
            lines += ['assert one.status == "passed", report']
        else:
            seen = repr((conventions.causal, conventions.mask_true))[1:-1]
            seen = "" if seen == "'bottom_right', 'attend'" else seen
            lines += [f"recipe = npattn.testing.{recipe!r}", f"problem = recipe.problem({seen})"]
            keywords = [] if forward else ["dout=given.dout"]
            lines += [] if forward else ["given = recipe.cotangents(problem, lse=False)"]
            call = "forward(problem)" if forward else "gradients(problem, given)"
            asked = ", ".join([f"f.{call}", "problem", *keywords, *said])
            lines += [f"for result in npattn.testing.compare({asked}):"]
            lines += ["    assert result.passed, result"]
        imports = ["import npattn.testing", f"from {module} import {name.split('.')[0]}", "", ""]
        imports = ["import npattn", *imports] if said else imports
        head = [*imports, f"def test_{mistake.name.replace('-', '_')}():"]
        return "\n".join([*head, textwrap.indent("\n".join(lines), "    ")])


def implement(
    f: Callable[..., Any], beside: Sequence[str], axes: tuple[int, ...] = AXES, **settings: Any
) -> Implementation:
    """Return a function as an implementation: o alone where no more is asked, weights in order."""
    if not beside and axes == AXES:
        return Implementation(f, **settings)
    back = tuple(int(i) for i in np.argsort(axes))

    @functools.wraps(f)
    def call_in_order(*args: Any, **kwargs: Any) -> Any:
        value = f(*args, **kwargs)
        if beside or not isinstance(value, (tuple, list)):
            return value[0] if beside else value
        o, *rest = value
        moves = [x is not None and x.ndim == len(back) for x in rest]
        found = [
            (x.permute(back) if hasattr(x, "permute") else x.transpose(back)) if move else x
            for x, move in zip(rest, moves, strict=True)
        ]
        return (o, *found)

    return Implementation(call_in_order, **settings)


def inspect_function(
    f: Callable[..., Any], spec: str, *, beside: tuple[str, ...] = (),
    change: Callable[[Conventions], Conventions] | None = None, layout: str | None = None,
    rename: Mapping[str, str] | None = None, dtype: str = "float32",
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> Subject:  # fmt: skip
    """Find out the terms of a function, and what it accepts.

    `beside` are results that it returns beside o without being asked, and `change` changes the
    conventions that were found out. Without a layout that is found out. `sizes` are shapes of q, k
    and weights in a call, as of `find_axes`.
    """
    made = implement(f, beside, layout=layout, rename=rename)
    beside = tuple(n for n in beside if f"return_{n}" not in made.signature.returns)
    if made.framework.name not in ("numpy", "torch"):
        raise OptionError(f"mistakes take arrays of NumPy or torch, not of {made.framework.name}")
    candidates = []
    for one in ("BHTD", "BTHD") if layout is None else (layout,):
        settings = {"layout": one, "rename": rename, "framework": made.framework.name}
        candidates.append(implement(f, beside, find_axes(sizes or {}, one), **settings))
    found = fingerprint_first(candidates, dtype=dtype)
    conventions = found.conventions if change is None else change(found.conventions)
    tiled = conventions.kv_head == "tile"
    conventions, ambiguous = translate(conventions)
    axes = find_axes(sizes or {}, found.layout)
    terms = Terms(made.signature, conventions, found.layout, beside, axes)
    made = implement(f, beside, axes, **settings | {"layout": found.layout})
    features = made.features - {"score_mod"} - ambiguous
    space = Space(features=features, dtype=dtype)
    model = Rounding.undeclared(dtype)
    with made.framework.one_thread():
        capabilities = probe(Trial(made, conventions, model, space))
    space = capabilities.trial.space
    space = replace(space, features=space.features & features)
    if tiled:  # which no mistake does: without shared heads it is the same
        space = replace(space, structure=space.structure - {"K < H"})
    more = made.has_gradients, made.framework.name
    return Subject(f, spec, terms, dict(rename or {}), space, *more)


def _size(recipe: Recipe) -> tuple[int, int]:
    """Return how many options and peculiarities a recipe has, and how large it is."""
    odd = (recipe.distribution != "normal") + recipe.broadcast + (recipe.view != "contiguous")
    size = math.prod(recipe.lead or ()) * recipe.H * recipe.T * recipe.S
    return len(options_on(recipe)) + odd + (size == 0), size


def _same(got: Results, right: Results) -> bool:
    return got.keys() == right.keys() and all(
        np.array_equal(got[n], right[n], equal_nan=True) and got[n].dtype == right[n].dtype
        for n in right
    )
