"""Judge one dtype: probe what is accepted, then ask each rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.capabilities import Finding, probe
from npattn.testing.cases.strategies import Pools
from npattn.testing.report.outcome import Outcome, Status, add_reproducer
from npattn.testing.rules import PROPERTIES, Property
from npattn.testing.rules.systematic_error import plain_recipes, tightest_model
from npattn.testing.runner.robustness import describe_wrong_input
from npattn.testing.runner.search import Search
from npattn.testing.trial import Suspicion, Trial, Violation

__all__ = ["BEHAVIOUR", "ROBUSTNESS", "Answers", "Judge", "Progress", "Round"]

BEHAVIOUR = "behaves as"
ROBUSTNESS = "robustness"  # asked only by name: it gives notes, and needs child processes
ABOUT_STRUCTURE = (
    "Accepted structure, sizes of 0 included, and each option alone give right results."
)
Progress = Callable[[str, str, int, int], None]  # dtype, rule, done, total
Answers = dict[str, Outcome | str]


@dataclass
class Judge:
    """Judge of one dtype: narrows the space to what is accepted, then asks each rule.

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
        """Probe what is accepted, and list the rules to ask; empty-row is answered at once.

        If fully masked rows are wrong, the other rules are asked without them, so that one defect
        does not hide the others, nor look like them.
        """
        capabilities = probe(self.trial)
        self.trial, self.refused = capabilities.trial, [*capabilities.refused]
        wrong = [self._from_finding(finding) for finding in capabilities.findings]
        names = [rule.rule for rule in rules] if self.trial.space.structure else []
        names += [ROBUSTNESS] if robust else []
        names += [BEHAVIOUR] if "aggregate" in names else []
        begun = Round(self, wrong, names)
        if self.trial.space.structure:  # also if others are asked only: they must say the same
            begun.report_progress("empty-row")
            empty = self.judge(PROPERTIES["empty-row"], self.trial)
            if "empty-row" in names:
                begun.answers["empty-row"] = empty
            if empty.status in ("failed", "error"):
                self.trial.skips_empty_rows = True
                self.refused.append(
                    "fully masked queries are wrong; only rule empty-row still tests them"
                )
        return begun

    def _from_finding(self, finding: Finding) -> Outcome:
        outcome = Outcome(
            finding.rule,
            "12, 14",
            ABOUT_STRUCTURE,
            self.trial.space.dtype,
            finding.status,
            worst=float("inf") if finding.status == "failed" else 0.0,
            examples=finding.examples,
            message=finding.message,
            level=finding.level,
        )
        if finding.problem is None or finding.recipe is None:
            return outcome
        return add_reproducer(outcome, self.trial, finding.problem, finding.recipe, finding.error)

    def answer(self, names: Sequence[str]) -> Iterator[tuple[str, Outcome | str]]:
        """Yield the outcome of each rule, or of `ROBUSTNESS`; for `BEHAVIOUR` its text.

        These rules sample alike and share one memo. Others start with an empty one, so that it
        does not matter which were asked before.
        """
        trial = self.trial.fresh()
        for name in names:
            if name == ROBUSTNESS:
                yield name, _robustness(trial)
            elif name == BEHAVIOUR:
                yield name, _behaviour(trial, self.seed)
            else:
                yield name, self.judge(PROPERTIES[name], trial)

    def sweep(self, rule: str, count: int) -> Outcome:
        """Return the outcome of "sweep" or "long", which sample on the device."""
        from npattn.testing.device.sweep import Sweep  # and with it torch

        sweep = Sweep(self.trial, self.seed, self.progress, self.shrinks)
        return sweep.run(count) if rule == "sweep" else sweep.long()

    def judge(self, rule: Property, trial: Trial) -> Outcome:
        """Search for a failing problem of one rule."""
        dtype = trial.space.dtype
        reason = rule.unless(trial)
        if reason is not None:
            return _outcome(rule, dtype, "not applicable", message=reason)
        search = Search(rule, trial, self.examples, self.shrinks)
        search.run(self.seed)
        if search.failure is not None:
            return _failed_outcome(rule, trial, search)
        if search.tried == 0:
            message = "no generated problem exercises this rule"
            return _outcome(rule, dtype, "not applicable", message=message)
        return _outcome(rule, dtype, "passed", worst=search.worst, examples=search.tried)


def _outcome(rule: Property, dtype: str, status: Status, **details: Any) -> Outcome:
    return Outcome(rule.rule, rule.section, rule.about, dtype, status, level=rule.level, **details)


def _failed_outcome(rule: Property, trial: Trial, search: Search) -> Outcome:
    assert search.failure is not None
    recipe, err = search.failure.recipe, search.failure.error
    status: Status = "failed"
    if isinstance(err, (ImplementationError, Suspicion)):
        status = "error" if isinstance(err, ImplementationError) else "suspect"
    outcome = _outcome(
        rule,
        trial.space.dtype,
        status,
        worst=getattr(err, "ratio", 0.0),
        examples=search.tried,
        message=str(err) + search.note,
    )
    problem = err.problem if isinstance(err, Violation) else trial.problem(recipe)
    return add_reproducer(outcome, trial, problem, recipe, err)


@dataclass
class Round:
    """Rules asked of one dtype, and the answers.

    Attributes
    ----------
    judge : Judge
    wrong : list of Outcome
        Findings of the probe.
    names : list of str
        The rules, and other names that `Judge.answer` takes.
    answers : dict
        By name.
    """

    judge: Judge
    wrong: list[Outcome]
    names: list[str]
    answers: Answers = field(default_factory=dict)

    @property
    def left(self) -> list[str]:
        """Names without an answer."""
        return [name for name in self.names if name not in self.answers]

    @property
    def behaves(self) -> str | None:
        """Rounding model that explains the errors, in words."""
        text = self.answers.get(BEHAVIOUR)
        return text if isinstance(text, str) else None

    def outcomes(self) -> list[Outcome]:
        """Return the findings of the probe, and the outcomes in the order of the names."""
        answers = (self.answers[name] for name in self.names)
        return self.wrong + [answer for answer in answers if isinstance(answer, Outcome)]

    def report_progress(self, name: str) -> None:
        """Pass the current rule and the number of rules done to the progress callback."""
        if self.judge.trial.space.structure:
            done, total = (sum(n in PROPERTIES for n in x) for x in (self.answers, self.names))
            self.judge.progress(self.judge.trial.space.dtype, name, done, total)

    def groups(self) -> list[list[str]]:
        """Return the names left, those that sample alike together, the largest group first."""
        groups: dict[Any, list[str]] = {}
        trial = self.judge.trial
        for name in self.left:
            key: Any = "aggregate" if name == BEHAVIOUR else name  # they need the same samples
            rule = PROPERTIES.get(name)
            if rule is not None and rule.recipes is None and rule.unless(trial) is None:
                key = Pools(trial.space, **rule.draw(trial)).key
            groups.setdefault(key, []).append(name)
        return sorted(groups.values(), key=len, reverse=True)


def _robustness(trial: Trial) -> Outcome:
    """Describe the reaction to wrong input; such notes always pass."""
    lines = describe_wrong_input(trial.implementation, trial.space)
    return Outcome(
        ROBUSTNESS,
        "—",
        "What it does with wrong input: notes, and no verdict.",
        trial.space.dtype,
        "passed",
        examples=len(lines),
        message="\n".join(lines),
    )


def _behaviour(trial: Trial, seed: int) -> str:
    """Name the tightest rounding model that explains its errors on plain inputs."""
    try:
        model = tightest_model(trial, plain_recipes(trial.space, seed))
    except ImplementationError as err:
        return f"no model: {err}"
    if model is None:
        return "no model: its errors are larger than any preset explains"
    return f"{model[0].name}, χ² {model[1]:.2g}"
