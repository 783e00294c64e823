"""Sample, compute and judge thousands of problems of every length on one device.

Each problem is sampled from a seed and its number, evaluated by the implementation and by the
oracle in float64, and judged with the tolerance of every other rule; a few numbers of each come to
the host. A failing problem is shrunk.
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
from npattn.problem.options import OPTIONS
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.asked import Asked
from npattn.testing.cases.log_uniform import Plan, simplify
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.search import shrink
from npattn.testing.cases.space import Space
from npattn.testing.device.judging import DeviceEvaluation, judge_on_device
from npattn.testing.device.sampling import DeviceSample, sample_on_device
from npattn.testing.power import PlainPowers, Power
from npattn.testing.report.outcome import OUT_OF_TIME, Outcome, Status
from npattn.testing.report.reproducer import sampling_script, script
from npattn.testing.trial import GRADIENTS, Trial, Violation

MAX_SCORES = {"cpu": 2**19, "mps": 2**22}
"""Largest number of scores of a problem, by device; about twenty arrays of them exist at once."""
MAX_SCORES_ELSEWHERE = 2**25
BYTES_PER_SCORE = 2**9
"""Memory that a device must have for each score."""
SCRIPT_NUMBERS = 2**12
"""Most numbers that a script writes out; it samples a larger problem anew."""
LENGTHS = {"cpu": 1024}
LONG = 65536
ROWS = 64
"""Number of queries of a long problem that are judged."""
SHRINK_SECONDS = 8.0
SECTIONS = "1-11, 13"
ABOUT = {
    "sweep": "Problems of every length, sampled and judged on the device, agree with the oracle.",
    "long": "Rows of very long sequences, and the gradients through them, agree with the oracle.",
}

SweepFailure = Violation | ImplementationError


class Sweep:
    """The two rules ``sweep`` and ``long`` for one implementation in one dtype."""

    def __init__(
        self,
        trial: Trial,  # of a torch function that was probed
        seed: int = 0,
        # called with ``(dtype, rule, done, total)``
        progress: Callable[[str, str, int, int], None] = lambda *_: None,
        shrinks: bool = True,
        deadline: float = math.inf,  # time of `time.monotonic` after which no problem is sampled
    ) -> None:
        self.deadline = deadline
        self.trial, self.seed, self.progress, self.shrinks = trial, seed, progress, shrinks
        self.device = torch.device(getattr(trial.implementation.framework, "device", "cpu"))
        self.plan = Plan(
            trial.space,
            trial.conventions,
            _max_scores(self.device),
            empty_rows=not trial.skips_empty_rows,
        )
        self.retries = 0
        self.judged, self.powers = PlainPowers(), dict[str, Power]()
        self.unseen: list[str] | None = None

    def run(self, count: int) -> Outcome:
        """Judge rule ``sweep`` on `count` problems."""
        recipes = (self.plan.recipe(self.seed, number) for number in range(count))
        return self._judge_all("sweep", recipes, count)

    def long(self) -> Outcome:
        """Judge rule ``long`` on a few long problems."""
        length = LENGTHS.get(self.device.type, LONG)
        recipes = self.plan.long(self.seed, length)
        return self._judge_all("long", iter(recipes), len(recipes))

    # --- judge ------------------------------------------------------------------------------------

    def _judge_all(self, rule: str, recipes: Iterator[Recipe], count: int) -> Outcome:
        """Return the outcome of one rule, judged until a recipe fails or the time is up."""
        worst, tried, self.retries = 0.0, 0, 0
        self.judged, self.unseen = PlainPowers(), None
        accepted: list[Recipe] = []
        for number, recipe in enumerate(recipes):
            if time.monotonic() > self.deadline:
                break
            self.progress(self.trial.space.dtype, rule, number, count)
            ratio, failure = self._judge_within_memory(recipe, rule)
            if not isinstance(failure, ImplementationError):
                accepted.append(recipe)
            if failure is not None:
                outcome = self._failure_outcome(rule, recipe, failure, tried)
                return replace(outcome, asked=Asked.of(accepted))
            worst, tried = max(worst, ratio), tried + 1
            self.judged.note_powers(self.powers, plain=recipe.has_plain_scores)
        self.progress(self.trial.space.dtype, rule, count, count)
        if not tried:
            return self._outcome(rule, "not applicable", message=OUT_OF_TIME)
        notes = []
        if self.retries:
            notes.append(
                f"{self.retries} calls ran out of memory and were retried at half the size"
            )
        counts: dict[str, Any] = {"examples": tried, "asked": Asked.of(accepted)}
        passed = self._outcome(rule, "passed", worst=worst, **counts).with_powers(
            self.judged.powers
        )
        notes = [x for x in (passed.message, *notes) if x]
        passed = replace(passed, message="\n".join(notes))
        return passed.with_defects(self.unseen or ())

    def _judge_within_memory(self, recipe: Recipe, rule: str) -> tuple[float, SweepFailure | None]:
        """Judge the recipe, at half its size as long as the implementation runs out of memory."""
        while True:
            ratio, failure = self.judge(recipe, rule)
            out_of_memory = isinstance(getattr(failure, "__cause__", None), torch.OutOfMemoryError)
            if not out_of_memory or min(recipe.T, recipe.S) < 2:
                return ratio, failure
            self.retries += 1
            failure = None  # its traceback keeps the tensors alive
            recipe = replace(recipe, T=recipe.T // 2, S=recipe.S // 2)

    def sample(self, recipe: Recipe) -> DeviceSample:
        """Sample a recipe on the device, in the terms of the conventions."""
        return sample_on_device(
            self.trial.translate(recipe),
            self.device,
            alignment=self.trial.conventions.alignment,
            mask_true=self.trial.conventions.mask_true,
        )

    def evaluate(self, recipe: Recipe, rule: str) -> tuple[DeviceSample, DeviceEvaluation]:
        """Sample a recipe and evaluate it; of a long one, a few rows."""
        sample = self.sample(recipe)
        rows = self.rows(recipe) if rule == "long" else None
        return sample, judge_on_device(self.trial, sample, rows)

    def rows(self, recipe: Recipe) -> torch.Tensor:
        """Return the queries to judge, the first and the last among them."""
        planes = math.prod(recipe.lead or ()) * recipe.H
        most = max(min(ROWS, self.plan.cells // (planes * recipe.S), recipe.T), min(4, recipe.T))
        rng = torch.Generator().manual_seed(recipe.seed)
        rows = torch.randperm(recipe.T, generator=rng)[:most]
        rows[:2] = torch.tensor([recipe.T - 1, 0])[: len(rows)]
        return torch.unique(rows).to(self.device)  # type: ignore[no-any-return]

    def judge(self, recipe: Recipe, rule: str = "sweep") -> tuple[float, SweepFailure | None]:
        """Return the largest error / tolerance, and the failure if there is one."""
        try:
            sample, evaluation = self.evaluate(recipe, rule)
        except ImplementationError as err:
            return math.inf, err
        worst = evaluation.worst
        counts = worst <= 1 and (recipe.has_plain_scores or not self.judged.plain)
        self.powers = evaluation.powers() if counts else {}
        if worst <= 1 and self.unseen is None and evaluation.is_small:
            self.unseen = evaluation.unseen()
        if worst <= 1:
            return worst, None
        wrong = tuple(c for c in evaluation.comparisons() if not c.passed)
        text = "\n".join(dict.fromkeys(map(str, wrong)))
        return worst, Violation(text, *self._to_host(sample), ratio=worst, comparisons=wrong)

    def _to_host(self, sample: DeviceSample) -> tuple[Problem, Cotangents]:
        """Copy a problem and its cotangents to NumPy arrays."""
        take = self.trial.implementation.framework.take
        options: dict[str, Any] = {
            n: take(x) if isinstance(x := getattr(sample.problem, n), torch.Tensor) else x
            for n in (*OPTIONS, "q", "k", "v", "alignment")
        }
        problem = Problem(**options)
        dlse = take(sample.dlse) if self.trial.takes_dlse else None
        if dlse is not None:
            dlse[self.trial.empty(problem)] = 0
        return problem, Cotangents(take(sample.dout), dlse)

    # --- failures ---------------------------------------------------------------------------------

    def _failure_outcome(
        self, rule: str, recipe: Recipe, failure: SweepFailure, tried: int
    ) -> Outcome:
        """Shrink a failure if the device still works, and return its outcome with a script."""
        if self.shrinks and self._device_works():
            recipe, failure = self._shrink(rule, recipe, failure)
        status: Status = "error" if isinstance(failure, ImplementationError) else "failed"
        problem = getattr(failure, "problem", None)
        if problem is None and self._device_works():
            problem = self.sample(recipe).problem
        return self._outcome(
            rule,
            status,
            worst=getattr(failure, "ratio", 0.0),
            examples=tried + 1,
            message=str(failure),
            problem=problem,
            recipe=self._line(recipe),
            script_text=self._script(rule, recipe, failure),
        )

    def _shrink(
        self, rule: str, recipe: Recipe, failure: SweepFailure
    ) -> tuple[Recipe, SweepFailure]:
        """Simplify the recipe as long as it fails in the same way, for a few seconds."""

        def fails(candidate: Recipe) -> bool:
            nonlocal failure
            _, again = self.judge(candidate, rule)
            if again is None or type(again) is not type(failure):
                return False
            failure = again
            return True

        recipe = shrink(
            recipe, lambda x: simplify(x, self.plan), fails, SHRINK_SECONDS, time.monotonic
        )
        return recipe, failure

    def _device_works(self) -> bool:
        return self.trial.implementation.framework.device_works()

    def _line(self, recipe: Recipe) -> str:
        """Format the line to paste; `sample_on_device` is in npattn.testing.device.sampling."""
        arguments = [repr(self.trial.translate(recipe)), repr(str(self.device))]
        if self.trial.conventions.causal != "bottom_right":
            arguments.append(f"alignment={self.trial.conventions.alignment!r}")
        if self.trial.conventions.mask_true != "attend":
            arguments.append(f"mask_true={self.trial.conventions.mask_true!r}")
        return f"sample_on_device({', '.join(arguments)})"

    def _script(self, rule: str, recipe: Recipe, failure: SweepFailure) -> str:
        if _number_count(recipe) <= SCRIPT_NUMBERS and rule == "sweep" and self._device_works():
            problem, cotangents = self._to_host(self.sample(recipe))
            if isinstance(failure, ImplementationError):
                failure.cotangents = cotangents if self.trial.gradients else None
            return script(self.trial, rule, problem, failure)
        arguments = [repr(recipe), f"device={str(self.device)!r}", f"rule={rule!r}"]
        arguments.append(f"gradients={sorted(self.trial.gradients)!r}")
        return sampling_script(self.trial, rule, str(failure), ", ".join(arguments))

    def _outcome(self, rule: str, status: Status, **details: Any) -> Outcome:
        return Outcome(rule, SECTIONS, ABOUT[rule], self.trial.space.dtype, status, **details)


def show_problem(
    f: Implementation,  # of a torch function
    recipe: Recipe,
    *,
    device: str = "cpu",
    rule: str = "sweep",  # "sweep" or "long"
    conventions: Conventions | None = None,
    rounding: Rounding | None = None,
    gradients: Any = GRADIENTS,  # names of those that it returns
) -> bool:
    """Sample a problem, judge the implementation on it and print the comparisons, for scripts.

    Returns
    -------
    bool
        True if every error is within its tolerance.
    """
    f.on(device)
    space = Space(features=f.features, dtype=recipe.dtype)
    model = rounding or Rounding.undeclared(recipe.dtype)
    trial = Trial(f, conventions or Conventions(), model, space, frozenset(gradients))
    sample, evaluation = Sweep(trial).evaluate(recipe, rule)
    print(sample.problem)
    for comparison in evaluation.comparisons():
        print("ok   " if comparison.passed else "WRONG", comparison)
    return evaluation.worst <= 1


def _max_scores(device: torch.device) -> int:
    """Return the largest number of scores of a problem: fewer if a device has little memory."""
    most = MAX_SCORES.get(device.type, MAX_SCORES_ELSEWHERE)
    if device.type != "cuda":
        return most
    return min(most, torch.cuda.get_device_properties(device).total_memory // BYTES_PER_SCORE)


def _number_count(recipe: Recipe) -> int:
    """Estimate how many numbers q, k, v, a mask and a bias hold."""
    planes = math.prod(recipe.lead or ()) * recipe.H
    options = (recipe.mask is not None) + (recipe.bias is not None)
    size = (recipe.T + recipe.S) * (recipe.D + recipe.E)
    return int(planes * (size + options * recipe.T * recipe.S))
