"""Thousands of problems of every length, drawn, computed and judged on one device.

Each is drawn there from a seed and its number, given to the implementation and to npattn.torch in
float64, and held against the cheap form of the bound; of each, a few ratios come to the host. What
fails is made smaller, and asked of the full form where it is small enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from npattn.conventions import Conventions
from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.log_uniform import Plan, simplify
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.device.judging import Held, held
from npattn.testing.device.sampling import Drawn, drawn
from npattn.testing.device.tensors import computes_in
from npattn.testing.report.outcome import Outcome, Status
from npattn.testing.report.reproducer import sampling_script, script
from npattn.testing.trial import GRADIENTS, Trial, Violation

__all__ = ["Sweep", "show_problem"]

CELLS = {"cpu": 2**19, "mps": 2**22}
"""Scores of a problem, at most, by device: some twenty arrays of them are held at once."""
ELSEWHERE = 2**25
BYTES = 2**9
"""Of memory that a device must have for each of them."""
SECOND = 2**16
"""Scores up to which what fails is asked of the full form, on the host."""
WRITTEN = 2**12
"""Numbers that a script writes out; a problem of more it draws anew."""
LENGTHS = {"cpu": 1024}
LONG = 65536
ROWS = 64
"""Queries of a long problem that are looked at."""
SHRINK_SECONDS = 8.0
SECTIONS = "1-11, 13"
ABOUT = {
    "sweep": "Problems of every length, drawn and judged on the device, agree with the oracle.",
    "long": "Rows of very long sequences, and the gradients through them, agree with the oracle.",
}

Failure = Violation | ImplementationError


class Sweep:
    """The two rules ``sweep`` and ``long`` for one implementation in one dtype.

    Parameters
    ----------
    trial : Trial
        Of a function of tensors, after it was probed.
    seed : int
    progress : callable
        Told ``(dtype, rule, done, total)``.
    shrinks : bool
    """

    def __init__(
        self,
        trial: Trial,
        seed: int = 0,
        progress: Callable[[str, str, int, int], None] = lambda *_: None,
        shrinks: bool = True,
    ) -> None:
        self.trial, self.seed, self.progress, self.shrinks = trial, seed, progress, shrinks
        self.device = torch.device(getattr(trial.implementation.framework, "device", "cpu"))
        self.plan = Plan(
            trial.space,
            trial.conventions,
            _cells(self.device),
            empty_rows=not trial.skips_empty_rows,
        )
        self.unbounded = self.large = 0

    def run(self, count: int) -> Outcome:
        """``sweep``: so many problems."""
        recipes = (self.plan.recipe(self.seed, number) for number in range(count))
        return self._judged("sweep", recipes, count)

    def long(self) -> Outcome:
        """``long``: a few long ones."""
        length = LENGTHS.get(self.device.type, LONG)
        recipes = self.plan.long(self.seed, length)
        return self._judged("long", iter(recipes), len(recipes))

    # --- one problem after the other --------------------------------------------------------------

    def _judged(self, rule: str, recipes: Iterator[Recipe], count: int) -> Outcome:
        worst, tried, self.unbounded, self.large = 0.0, 0, 0, 0
        for number, recipe in enumerate(recipes):
            self.progress(self.trial.space.dtype, rule, number, count)
            ratio, failure = self._fitting(recipe, rule)
            if failure is not None:
                return self._failed(rule, recipe, failure, tried)
            worst, tried = max(worst, ratio), tried + 1
        self.progress(self.trial.space.dtype, rule, count, count)
        told = []
        if self.unbounded:
            told.append(
                f"{self.unbounded} of {tried} problems were only asked for numbers that are none: "
                "what their exponents may err by, the cheap form cannot bound"
            )
        if self.large:
            told.append(f"{self.large} calls ran out of memory, and were asked with half the sizes")
        return self._outcome(rule, "passed", worst=worst, examples=tried, message="\n".join(told))

    def _fitting(self, recipe: Recipe, rule: str) -> tuple[float, Failure | None]:
        """`one` of the recipe, or of half its sizes while the implementation has no room."""
        while True:
            ratio, failure = self.one(recipe, rule)
            out_of_memory = isinstance(getattr(failure, "__cause__", None), torch.OutOfMemoryError)
            if not out_of_memory or min(recipe.T, recipe.S) < 2:
                return ratio, failure
            self.large += 1
            failure = None  # whose traceback holds the tensors that had no room
            recipe = replace(recipe, T=recipe.T // 2, S=recipe.S // 2)

    def draw(self, recipe: Recipe) -> Drawn:
        return drawn(
            self.trial.translate(recipe),
            self.device,
            alignment=self.trial.conventions.causal,
            mask_true=self.trial.conventions.mask_true,
            dtype=computes_in(self.device),
        )

    def held(self, recipe: Recipe, rule: str) -> tuple[Drawn, Held]:
        given = self.draw(recipe)
        rows = self.rows(recipe) if rule == "long" else None
        return given, held(self.trial, given, rows)

    def rows(self, recipe: Recipe) -> torch.Tensor:
        """Queries that are looked at, the first and the last among them."""
        planes = math.prod(recipe.lead or ()) * recipe.H
        most = max(min(ROWS, self.plan.cells // (planes * recipe.S), recipe.T), min(4, recipe.T))
        rng = torch.Generator().manual_seed(recipe.seed)
        found = torch.randperm(recipe.T, generator=rng)[:most]
        found[:2] = torch.tensor([recipe.T - 1, 0])[: len(found)]
        return torch.unique(found).to(self.device)  # type: ignore[no-any-return]

    def one(self, recipe: Recipe, rule: str = "sweep") -> tuple[float, Failure | None]:
        """The largest error / allowed error, and what is wrong."""
        try:
            given, found = self.held(recipe, rule)
        except ImplementationError as err:
            return math.inf, err
        if found.bounded and found.worst <= 1:
            return found.worst, None
        if rule == "sweep" and _scores(recipe) <= SECOND:
            return self._second(given)
        if found.worst <= 1:
            self.unbounded += 1
            return 0.0, None
        wrong = [c for c in found.comparisons() if not c.passed]
        text = "\n".join(dict.fromkeys(map(str, wrong)))
        return found.worst, Violation(text, given.problem, ratio=found.worst)

    def _second(self, given: Drawn) -> tuple[float, Violation | ImplementationError | None]:
        """The full form, on the host."""
        problem, cotangents = self._on_host(given)
        found = self.trial.against_oracle(problem, cotangents)
        try:
            return self.trial.check(found, problem, cotangents), None
        except Violation as err:
            return err.ratio, err

    def _on_host(self, given: Drawn) -> tuple[Problem, Cotangents]:
        take = self.trial.implementation.framework.take
        own: Any = given.problem
        names = ("q", "k", "v", "mask", "bias")
        arrays: dict[str, Any] = {
            n: None if (x := getattr(own, n)) is None else take(x) for n in names
        }
        problem = Problem(
            **arrays,
            causal=own.causal,
            window=own.window,
            scale=own.scale,
            alignment=own.alignment,
        )
        dlse = take(given.dlse) if self.trial.takes_dlse else None
        if dlse is not None:
            dlse[self.trial.empty(problem)] = 0
        return problem, Cotangents(take(given.dout), dlse)

    # --- what failed ------------------------------------------------------------------------------

    def _failed(self, rule: str, recipe: Recipe, failure: Failure, tried: int) -> Outcome:
        if self.shrinks and self._alive():
            recipe, failure = self._smallest(rule, recipe, failure)
        status: Status = "error" if isinstance(failure, ImplementationError) else "failed"
        problem = getattr(failure, "problem", None)
        if problem is None and self._alive():
            problem = self.draw(recipe).problem
        return self._outcome(
            rule,
            status,
            worst=getattr(failure, "ratio", 0.0),
            examples=tried + 1,
            message=str(failure),
            problem=problem,
            recipe=self._line(recipe, rule),
            script_text=self._script(rule, recipe, failure),
        )

    def _smallest(self, rule: str, recipe: Recipe, failure: Failure) -> tuple[Recipe, Failure]:
        """Smaller as long as it fails in the same way, for a few seconds."""
        end = time.monotonic() + SHRINK_SECONDS
        smaller = iter(simplify(recipe, self.plan))
        while time.monotonic() < end:
            one = next(smaller, None)
            if one is None:
                break
            _, found = self.one(one, rule)
            if found is not None and type(found) is type(failure):
                recipe, failure = one, found
                smaller = iter(simplify(recipe, self.plan))
        return recipe, failure

    def _alive(self) -> bool:
        """Whether the device still computes: an access out of bounds ends it."""
        try:
            return float(torch.ones(1, device=self.device).sum()) == 1
        except RuntimeError:
            return False

    def _line(self, recipe: Recipe, rule: str) -> str:
        """The line that draws it; `drawn` is in npattn.testing.device.sampling."""
        words = [repr(self.trial.translate(recipe)), repr(str(self.device))]
        if self.trial.conventions.causal != "bottom_right":
            words.append(f"alignment={self.trial.conventions.causal!r}")
        if self.trial.conventions.mask_true != "attend":
            words.append(f"mask_true={self.trial.conventions.mask_true!r}")
        return f"drawn({', '.join(words)})"

    def _script(self, rule: str, recipe: Recipe, failure: Failure) -> str:
        if _numbers(recipe) <= WRITTEN and rule == "sweep" and self._alive():
            problem, cotangents = self._on_host(self.draw(recipe))
            if isinstance(failure, ImplementationError):
                failure.cotangents = cotangents if self.trial.gradients else None
            return script(self.trial, rule, problem, failure)
        words = [repr(recipe), f"device={str(self.device)!r}", f"rule={rule!r}"]
        words.append(f"gradients={sorted(self.trial.gradients)!r}")
        return sampling_script(self.trial, rule, str(failure), ", ".join(words))

    def _outcome(self, rule: str, status: Status, **words: Any) -> Outcome:
        return Outcome(rule, SECTIONS, ABOUT[rule], self.trial.space.dtype, status, **words)


def show_problem(
    f: Implementation,
    recipe: Recipe,
    *,
    device: str = "cpu",
    rule: str = "sweep",
    conventions: Conventions | None = None,
    rounding: Rounding | None = None,
    gradients: Any = GRADIENTS,
) -> bool:
    """Draw a problem anew and print what the implementation makes of it: scripts call this.

    Parameters
    ----------
    f : Implementation
        Of a function of torch tensors.
    recipe : Recipe
    device : str
    rule : {"sweep", "long"}
    conventions : Conventions, optional
    rounding : Rounding, optional
    gradients : iterable of str
        Names of those that it gives.

    Returns
    -------
    bool
        Whether all of it is within what is allowed by the cheap form of the bound.
    """
    f.on(device)
    space = Space(features=f.features, dtype=recipe.dtype)
    model = rounding or Rounding.undeclared(recipe.dtype)
    trial = Trial(f, conventions or Conventions(), model, space, frozenset(gradients))
    given, found = Sweep(trial).held(recipe, rule)
    print(given.problem)
    for comparison in found.comparisons():
        print("ok   " if comparison.passed else "WRONG", comparison)
    return found.worst <= 1


def _cells(device: torch.device) -> int:
    """How many scores a problem may have: fewer where a device has little memory."""
    most = CELLS.get(device.type, ELSEWHERE)
    if device.type != "cuda":
        return most
    return min(most, torch.cuda.get_device_properties(device).total_memory // BYTES)


def _scores(recipe: Recipe) -> int:
    return math.prod(recipe.lead or ()) * recipe.H * recipe.T * recipe.S


def _numbers(recipe: Recipe) -> int:
    """About how many numbers q, k, v, a mask and a bias hold."""
    planes = math.prod(recipe.lead or ()) * recipe.H
    options = (recipe.mask is not None) + (recipe.bias is not None)
    size = (recipe.T + recipe.S) * (recipe.D + recipe.E)
    return int(planes * (size + options * recipe.T * recipe.S))
