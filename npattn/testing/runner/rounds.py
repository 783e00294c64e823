"""The judge of one dtype: rules over planned problems, and what fails shrunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.errors import Flaky

from npattn.testing.adapters.implementation import ImplementationError
from npattn.testing.capabilities import Probe
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.report.outcome import outcome_of
from npattn.testing.report.report import Outcome, Status
from npattn.testing.rules import PROPERTIES, Property
from npattn.testing.rules.systematic_error import plain_recipes, tightest_model
from npattn.testing.runner.robustness import notes
from npattn.testing.trial import Suspicion, Trial, Violation

__all__ = ["BEHAVIOUR", "ROBUSTNESS", "Answers", "Judge", "Progress", "Round", "Search"]

BEHAVIOUR = "behaves as"
ROBUSTNESS = "robustness"  # asked only by name: it gives notes, and needs child processes
SHRINK_SECONDS = 8.0  # per failing rule; the smallest problem found by then is reported
Progress = Callable[[str, str, int, int], None]  # dtype, rule, done, total
Answers = dict[str, Outcome | str]


@dataclass
class Judge:
    """One dtype's worth of `check`: narrows the space to what is accepted, then asks each rule.

    Attributes
    ----------
    refused : list of str
        What was not accepted, and why.
    """

    trial: Trial
    examples: int
    seed: int
    progress: Progress
    shrinks: bool

    def __post_init__(self) -> None:
        self.refused: list[str] = []

    def begin(self, rules: Sequence[Property], robust: bool = False) -> Round:
        """Probe what is accepted; then all that is to be asked, of which empty-row is answered.

        It comes first: where empty rows are wrong, the other rules are asked without them, so
        that one defect does not hide the others, nor look like them.
        """
        trial = self.trial
        wrong = Probe(trial, self.refused).run()
        names = [rule.rule for rule in rules] if trial.space.structure else []
        names += [ROBUSTNESS] if robust else []
        names += [BEHAVIOUR] if "aggregate" in names else []
        begun = Round(self, wrong, names)
        if "empty-row" in names:
            begun.tell("empty-row")
            empty = self.judge(PROPERTIES["empty-row"])
            begun.answers["empty-row"] = empty
            if empty.status in ("failed", "error"):
                trial.shuns_empty_rows = True
                self.refused.append("queries that see nothing: wrong, so only empty-row has them")
        return begun

    def answer(self, names: Sequence[str]) -> Iterator[tuple[str, Outcome | str]]:
        """The outcome of each rule, or of `ROBUSTNESS`; of `BEHAVIOUR` what it says.

        Rules that draw alike share what they find out, others nothing, so that it does not matter
        which were asked before.
        """
        self.trial.forget()
        for name in names:
            yield name, self._answer(name)

    def _answer(self, name: str) -> Outcome | str:
        if name == ROBUSTNESS:
            return _robustness(self.trial)
        if name == BEHAVIOUR:
            return _behaviour(self.trial, self.seed)
        return self.judge(PROPERTIES[name])

    def sweep(self, rule: str, count: int) -> Outcome:
        """One of the rules that draw on the device."""
        from npattn.testing.device.sweep import Sweep  # and with it torch

        sweep = Sweep(self.trial, self.seed, self.progress, self.shrinks)
        return sweep.run(count) if rule == "sweep" else sweep.long()

    def judge(self, rule: Property) -> Outcome:
        """One rule over the planned problems, the failing one shrunk."""
        trial, dtype = self.trial, self.trial.space.dtype
        reason = rule.unless(trial)
        if reason is not None:
            return outcome_of(rule, dtype, "not applicable", message=reason)
        search = Search(rule, trial, self.examples, self.shrinks)
        search.run(self.seed)
        if search.failure is not None:
            recipe, err = search.failure
            status: Status = "failed"
            if isinstance(err, (ImplementationError, Suspicion)):
                status = "error" if isinstance(err, ImplementationError) else "suspect"
            return outcome_of(
                rule,
                dtype,
                status,
                worst=getattr(err, "ratio", 0.0),
                examples=search.tried,
                message=str(err) + search.note,
                problem=getattr(err, "problem", None) or trial.problem(recipe),
                recipe=recipe,
                trial=trial,
                error=err,
            )
        if search.tried == 0:
            told = "no problem drawn could show it, or all were wrong before"
            return outcome_of(rule, dtype, "not applicable", message=told)
        return outcome_of(rule, dtype, "passed", worst=search.worst, examples=search.tried)


@dataclass
class Round:
    """What one dtype is asked, and the answers.

    Attributes
    ----------
    judge : Judge
    wrong : list of Outcome
        Of the probe.
    names : list of str
        The rules, and what else `Judge.answer` takes.
    answers : dict
        By name.
    """

    judge: Judge
    wrong: list[Outcome]
    names: list[str]
    answers: Answers = field(default_factory=dict)

    @property
    def left(self) -> list[str]:
        return [name for name in self.names if name not in self.answers]

    @property
    def behaves(self) -> str | None:
        said = self.answers.get(BEHAVIOUR)
        return said if isinstance(said, str) else None

    def outcomes(self) -> list[Outcome]:
        answers = (self.answers[name] for name in self.names)
        return self.wrong + [found for found in answers if isinstance(found, Outcome)]

    def tell(self, name: str) -> None:
        """Tell how far it is, and which rule it is at."""
        if self.judge.trial.space.structure:
            done, total = (sum(n in PROPERTIES for n in x) for x in (self.answers, self.names))
            self.judge.progress(self.judge.trial.space.dtype, name, done, total)

    def groups(self) -> list[list[str]]:
        """What is left, together if it draws alike, the largest group first."""
        groups: dict[Any, list[str]] = {}
        trial = self.judge.trial
        for name in self.left:
            key: Any = "aggregate" if name == BEHAVIOUR else name  # they ask for the same
            rule = PROPERTIES.get(name)
            if rule is not None and rule.recipes is None and rule.unless(trial) is None:
                key = Pools(trial.space, **rule.draw(trial)).key
            groups.setdefault(key, []).append(name)
        return sorted(groups.values(), key=len, reverse=True)


class Search:
    """One rule over different recipes; what fails is shrunk."""

    def __init__(self, rule: Property, trial: Trial, examples: int, shrinks: bool = True) -> None:
        self.rule, self.trial, self.examples, self.shrinks = rule, trial, examples, shrinks
        self.worst, self.tried, self.note = 0.0, 0, ""
        self.failure: tuple[Recipe, Violation | ImplementationError] | None = None
        self._seen: dict[Recipe, Violation | ImplementationError | None] = {}
        self._deadline = float("inf")

    def run(self, seed: int) -> None:
        pools = Pools(self.trial.space, **self.rule.draw(self.trial))
        chosen = self.rule.recipes
        try:
            if chosen is not None:
                for recipe in chosen(self.trial, seed, self.examples):
                    self.one(recipe)
                return
            for recipe in self.trial.planned(pools, seed, self.examples):
                self.one(recipe)
                if self.tried >= self.examples:
                    return
        except (Violation, ImplementationError):
            pass  # what failed is in self.failure
        # Not where it is caught: Hypothesis tells errors apart by what was being handled, too.
        if self.failure is not None and chosen is None and self.shrinks:
            self._shrink(pools, seed)

    def _shrink(self, pools: Pools, seed: int) -> None:
        """Let Hypothesis find the simplest failing recipe that is like the one that failed."""
        assert self.failure is not None
        self._deadline = time.monotonic() + SHRINK_SECONDS
        profile = settings(
            max_examples=200,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        near = pools.near(self.failure[0].seed)
        test = hypothesis_seed(seed)(profile(given(near)(self.one)))
        try:
            test()
        except (Violation, ImplementationError):
            pass  # the last one, the simplest, is in self.failure
        except Flaky:
            self.note = "\n(it did not fail every time that the same problem was tried)"

    def one(self, recipe: Recipe) -> None:
        if recipe in self._seen:
            err = self._seen[recipe]
            if err is not None:
                self.failure = recipe, err
                raise err
            return
        if time.monotonic() > self._deadline:
            return
        self._seen[recipe] = None
        if self.trial.shuns(recipe, self.rule.rule):
            return
        try:
            ratio = self.rule.check(self.trial, recipe)
        except (Violation, ImplementationError) as err:
            if self.rule.alters and self.trial.wrong_anyway(recipe):
                return
            self._seen[recipe] = err
            self.failure = recipe, err
            raise
        if ratio is not None and self.failure is None:
            self.tried += 1
            self.worst = max(self.worst, ratio)


def _robustness(trial: Trial) -> Outcome:
    """Notes on what becomes of wrong input; they pass, whatever they say."""
    lines = notes(trial.implementation, trial.space)
    about = "What it does with wrong input: notes, and no verdict."
    return Outcome(
        ROBUSTNESS,
        "—",
        about,
        trial.space.dtype,
        "passed",
        examples=len(lines),
        message="\n".join(lines),
    )


def _behaviour(trial: Trial, seed: int) -> str:
    """The tightest rounding model that explains what it does on plain inputs."""
    try:
        model = tightest_model(trial, plain_recipes(trial.space, seed))
    except ImplementationError as err:
        return f"no model: {err}"
    if model is None:
        return "no model: its errors are larger than any preset explains"
    return f"{model[0].name}, χ² {model[1]:.2g}"
