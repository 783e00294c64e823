"""Judge one dtype: probe what is accepted, then ask each rule, in rounds of growing size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.capabilities import Finding, StructureRefusedError, leave_out, probe
from npattn.testing.cases.asked import Asked
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import FEW, Pools
from npattn.testing.report.outcome import OUT_OF_TIME, Outcome, Status, add_reproducer
from npattn.testing.report.progress import Progress
from npattn.testing.rules import RULES, Property
from npattn.testing.rules.systematic_error import describe_fit, plain_recipes, tightest_model
from npattn.testing.runner.journal import Answer, Journal, answer_of, recipe_of
from npattn.testing.runner.robustness import describe_wrong_input
from npattn.testing.runner.search import RuleSearch, Standing
from npattn.testing.runner.self_test import find_unseen_mistakes
from npattn.testing.trial import Suspicion, Trial, Violation

BEHAVIOUR = "behaves as"
ROBUSTNESS = "robustness"  # asked only by name: it gives notes, and needs child processes
ABOUT_STRUCTURE = (
    "Accepted structure, sizes of 0 included, and each option alone give right results."
)
ABOUT_GRADIENTS = "The plainest problem has the gradients that it is said to have."
Answers = dict[str, Answer]
"""By rule: its outcome, or how far it has come; by `BEHAVIOUR`: a text."""
FULLY_MASKED = "fully masked queries are wrong; only rule empty-row still tests them"
FIRST_ROUNDS = (4, FEW)
"""Examples of every rule after which the next rule is asked: most mistakes show at once."""
AHEAD = 25
"""Times as many of agreement, whose rules share calls: nearly every mistake shows there."""
AHEAD_APART = 5
"""Times as many of its rules on inputs that few problems have, which share none."""
TELLING = (
    *("agreement-o", "empty-row", "offset-bias", "causal-as-mask", "causal-prefix"),
    *("window-as-mask", "window-infinite", "model-sizes", "late-keys", "padded-keys"),
    *("views", "repeatable"),
)
"""Rules that most mistakes of kernels break, and that are asked first where time is limited."""


PLAIN_SCORES = 2**8
"""Scores of a head up to which a smallest problem costs no examples: T = S = 16 is cheap."""


def round_sizes(examples: int) -> list[int]:
    """Return the number of examples of each rule after each round."""
    return [*(n for n in FIRST_ROUNDS if n < examples), examples]


def ignore_progress(*_: object) -> None:
    """Report nothing."""


@dataclass
class Judge:
    """Judge of one dtype: narrows the space to what is accepted, then asks each rule.

    Attributes
    ----------
    refused : list of str
        What was not accepted, and why.
    stops_at : frozenset of str
        Levels and rules whose first failure ends the questions.
    expected : frozenset of str
        Failures that do not: outcomes' ids.
    deadline : float
        Time of `time.monotonic` after which nothing is asked.
    journal : Journal or None
        Told of each problem before it is tried.
    fits : bool
        Fewer examples are asked where the smallest problem is large.
    evenly : bool
        Every rule is asked all examples, as where it was named.
    """

    trial: Trial
    examples: int
    seed: int
    progress: Progress
    shrinks: bool
    stops_at: frozenset[str] = frozenset()
    expected: frozenset[str] = frozenset()
    deadline: float = math.inf
    journal: Journal | None = None
    evenly: bool = False
    fits: bool = False

    def __post_init__(self) -> None:
        self.refused: list[str] = []
        self.asked_of = self.trial  # before it is narrowed to what is accepted

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"progress": ignore_progress}  # who gets it reports none

    def begin(self, rules: Sequence[Property], robust: bool = False) -> Round:
        """Probe what is accepted, and list the rules to ask; empty-row begins at once."""
        capabilities = probe(self.trial)
        self.trial, self.refused = capabilities.trial, [*capabilities.refused]
        if self.fits:
            fewer = self.examples * PLAIN_SCORES // self.trial.space.least_scores
            self.examples = min(self.examples, max(fewer, FEW))
        wrong = [self._from_finding(finding) for finding in capabilities.findings]
        names = [rule.rule for rule in rules] if self.trial.space.structure else []
        names += [ROBUSTNESS] if robust else []
        names += [BEHAVIOUR] if "aggregate" in names else []
        refused = {} if self.journal is None else self.journal.refused
        for name, line in refused.get(self.trial.space.dtype, {}).items():
            self.refuse(StructureRefusedError(name, line))
        begun = Round(self, wrong, names)
        if self.trial.space.structure:  # also if others are asked only: they must say the same
            begun.ask_empty_rows()
        return begun

    def refuse(self, refusal: StructureRefusedError) -> None:
        """Sample structure no more that raises in some problems, and say so."""
        self.trial.space = leave_out(self.trial.space, refusal.name)
        self.refused.insert(0, refusal.line)  # first: it came as a surprise

    def _from_finding(self, finding: Finding) -> Outcome:
        """Return the outcome of what probing found, with a script if there is a problem."""
        outcome = Outcome(
            finding.rule,
            "13" if finding.rule == "gradients" else "12, 14",
            ABOUT_GRADIENTS if finding.rule == "gradients" else ABOUT_STRUCTURE,
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

    def answer(
        self, names: Sequence[str], count: int, standings: Mapping[str, Standing]
    ) -> Iterator[tuple[str, Answer]]:
        """Yield the outcome of each rule, or its standing after `count` examples.

        `ROBUSTNESS` has an outcome, `BEHAVIOUR` a text, both in the last round. These rules sample
        alike and share one memo. Others start with an empty one, so that it does not matter which
        were asked before. Nothing follows a failure that stops the check.
        """
        trial = self.trial.fresh()
        for name in names:
            answer: Answer
            if name in (ROBUSTNESS, BEHAVIOUR) and count < self.examples:
                answer = Standing()
            elif name == ROBUSTNESS:
                answer = _robustness(trial)
            elif name == BEHAVIOUR and time.monotonic() > self.deadline:
                answer = OUT_OF_TIME
            elif name == BEHAVIOUR:
                answer = _behaviour(trial, self.seed)
            else:
                examples = self._examples_of(name, count)
                answer = self.judge(RULES[name], trial, examples, standings.get(name))
            yield name, answer
            if self.stops(answer):
                return

    def _examples_of(self, name: str, count: int) -> int:
        """Return how many examples of a rule are done after a round of `count`."""
        # Who turns wrong late should meet agreement in the last round too.
        if self.trial.implementation.untrusted is None and name.startswith("agreement-"):
            apart = name in ("agreement-dbias", "agreement-dsinks", "agreement-dgate")
            count *= AHEAD_APART if apart else AHEAD
        return min(count, self.examples)

    def _asked_in_all(self, rule: Property) -> int:
        """Return how many examples a rule is asked until it is done."""
        if self.evenly or rule.last or rule.recipes is not None:
            return self.examples
        return min(self.examples, max(FEW, self.examples // rule.share))

    def stops(self, answer: Answer) -> bool:
        """Return True if this failure ends the questions."""
        return (
            isinstance(answer, Outcome)
            and answer.failed
            and not self.stops_at.isdisjoint({answer.level, answer.rule})
            and answer.id not in self.expected
        )

    def sweep(self, rule: str, count: int) -> Outcome:
        """Return the outcome of "sweep" or "long", which sample on the device."""
        from npattn.testing.device.sweep import Sweep  # and with it torch

        sweep = Sweep(self.trial, self.seed, self.progress, self.shrinks, self.deadline)
        return sweep.run(count) if rule == "sweep" else sweep.long()

    def judge(
        self,
        rule: Property,
        trial: Trial,
        count: int | None = None,
        standing: Standing | None = None,
        *,
        leaves: bool = True,
    ) -> Outcome | Standing:
        """Search for a failing problem of one rule among its next ones, up to `count`."""
        dtype = trial.space.dtype
        reason = rule.unless(trial)
        if reason is None and rule.recipes is None:
            reason = Pools(trial.space, **rule.draw(trial)).conflict
        if reason is not None:
            return _outcome(rule, dtype, "not applicable", message=reason)
        search = self._search(rule, trial, standing, leaves=leaves)
        search.run(self.seed, count)
        standing = search.standing
        if search.failure is not None:
            return _failed_outcome(rule, trial, search)
        if count is not None and count < self._asked_in_all(rule):
            return standing
        left_to = standing.left_to
        if standing.tried == 0:
            message = "no generated problem exercises this rule"
            message = OUT_OF_TIME if time.monotonic() > self.deadline else message
            message = "agreement fails there" if standing.left else message
            return _outcome(rule, dtype, "not applicable", message=message, left_to=left_to)
        counts: dict[str, Any] = {"examples": standing.tried, "asked": standing.asked}
        passed = _outcome(rule, dtype, "passed", worst=standing.worst, left_to=left_to, **counts)
        read = () if trial.implementation.returns_weights else ("weights",)  # o of v = I
        passed = passed.with_powers({n: x for n, x in standing.powers.items() if n not in read})
        unseen = find_unseen_mistakes(trial, rule) if rule.rule.startswith("agreement-") else []
        return passed.with_defects(unseen)

    def _search(
        self, rule: Property, trial: Trial, standing: Standing | None, *, leaves: bool = True
    ) -> RuleSearch:
        """Return a search for failures of one rule, whose recipes go to the journal, if any."""
        tell: Callable[[Recipe], object] = lambda _: None  # noqa: E731
        if self.journal is not None:
            tell = partial(self.journal.note_recipe, trial.space.dtype, rule.rule)
        return RuleSearch(
            rule,
            trial,
            self.examples,
            self.shrinks,
            standing,
            most=self._asked_in_all(rule),
            leaves=leaves,
            deadline=self.deadline,
            tell=tell,
        )

    def restore(self, entry: Mapping[str, Any]) -> Answer:
        """Return the answer in an entry of a journal; what failed is asked once more.

        If that passes now, the rule begins anew.
        """
        answer, recipe = answer_of(entry), recipe_of(entry)
        if not isinstance(answer, Outcome) or recipe is None:
            return answer
        rule, trial = RULES[answer.rule], self.trial.fresh()
        search = self._search(rule, trial, Standing(tried=answer.examples, asked=answer.asked))
        with suppress(Violation, ImplementationError):  # it is in search.failure
            search.try_recipe(recipe)
        return Standing() if search.failure is None else _failed_outcome(rule, trial, search)


def _outcome(rule: Property, dtype: str, status: Status, **details: Any) -> Outcome:
    return Outcome(rule.rule, rule.section, rule.about, dtype, status, level=rule.level, **details)


def _failed_outcome(rule: Property, trial: Trial, search: RuleSearch) -> Outcome:
    """Return the outcome of a failed search: failed, suspect, or the status of its exception."""
    assert search.failure is not None
    recipe, err = search.failure.recipe, search.failure.error
    status: Status = "failed"
    if isinstance(err, (ImplementationError, Suspicion)):
        status = err.status if isinstance(err, ImplementationError) else "suspect"
    outcome = _outcome(
        rule,
        trial.space.dtype,
        status,
        worst=getattr(err, "ratio", 0.0),
        examples=search.standing.tried,
        message=str(err) + search.note,
        asked=search.standing.asked,
    )
    problem = err.problem or trial.problem(recipe)
    return add_reproducer(outcome, trial, problem, recipe, err)


@dataclass
class Round:
    """Rules asked of one dtype, and the answers."""

    judge: Judge
    wrong: list[Outcome]  # findings of the probe
    names: list[str]  # the rules, and other names that `Judge.answer` takes
    answers: dict[str, Outcome | str] = field(default_factory=dict)  # by name
    # by name, of rules without an answer yet
    standings: dict[str, Standing] = field(default_factory=dict)
    stopped: bool = False  # a failure has ended the questions
    continues: bool = False  # it asks other problems than a round before it

    def __post_init__(self) -> None:
        self.stopped = any(map(self.judge.stops, self.wrong))

    def ask_empty_rows(self) -> None:
        """Ask rule empty-row first.

        If fully masked rows are wrong, the other rules are asked without them, so that one defect
        does not hide the others, nor look like them.
        """
        judge, named = self.judge, "empty-row" in self.names
        if named:
            self.report_progress("empty-row")
        asked = judge if named else replace(judge, shrinks=False)
        count = min(FIRST_ROUNDS[-1], judge.examples)
        try:
            empty = asked.judge(RULES["empty-row"], judge.trial, count)
        except StructureRefusedError as err:
            self.begin_without(err)
            return
        if named:
            self.record("empty-row", empty)
        if isinstance(empty, Outcome) and empty.failed:
            judge.trial.skips_empty_rows = True
            judge.refused.append(FULLY_MASKED)

    def begin_without(self, refusal: StructureRefusedError) -> None:
        """Refuse structure that raises in some problems, and forget what was answered with it.

        So a report does not depend on which rule met the exception, nor when.
        """
        judge = self.judge
        judge.refuse(refusal)
        if judge.journal is not None:
            judge.journal.note_refused(judge.trial.space.dtype, refusal.name, refusal.line)
        self.answers, self.standings = {}, {}
        self.stopped = any(map(judge.stops, self.wrong))
        if not self.continues:
            judge.trial.skips_empty_rows = False
            judge.refused = [line for line in judge.refused if line != FULLY_MASKED]
            with judge.trial.implementation.framework.one_thread():
                self.ask_empty_rows()

    def restore(self) -> None:
        """Take the answers that the journal has from before."""
        answers = {} if self.judge.journal is None else self.judge.journal.answers
        for name in self.names:
            entry = answers.get((self.judge.trial.space.dtype, name))
            if entry is not None:
                self._keep(name, self.judge.restore(entry))

    def record(self, name: str, answer: Answer) -> None:
        """Keep an answer, or how far a rule has come."""
        if self.judge.journal is not None:
            self.judge.journal.note_answer(self.judge.trial.space.dtype, name, answer)
        self._keep(name, answer)

    def _keep(self, name: str, answer: Answer) -> None:
        if isinstance(answer, Standing):
            self.standings[name] = answer
        else:
            self.answers[name] = answer
            self.stopped = self.stopped or self.judge.stops(answer)

    def again(self, seed: int, examples: int) -> Round:
        """Return a round that asks the rules which did not fail, with other problems."""
        failed = [n for n, x in self.answers.items() if isinstance(x, Outcome) and x.failed]
        names = [n for n in self.names if n in RULES and n not in failed]
        return Round(replace(self.judge, seed=seed, examples=examples), [], names, continues=True)

    def merge(self, other: Round) -> None:
        """Add the answers of a later round."""
        for name, new in other.answers.items():
            old = self.answers[name]
            if isinstance(old, Outcome) and isinstance(new, Outcome):
                self.answers[name] = old.merge(new)
        self.stopped = self.stopped or other.stopped
        self.judge.refused += other.judge.refused

    @property
    def open_names(self) -> list[str]:
        """Names without an answer."""
        return [name for name in self.names if name not in self.answers]

    @property
    def behaves(self) -> str | None:
        """Rounding model that explains the errors, in words."""
        text = self.answers.get(BEHAVIOUR)
        return text if isinstance(text, str) else None

    def standings_of(self, names: Sequence[str]) -> dict[str, Standing]:
        """Return how far these rules have come, where they have begun."""
        return {name: self.standings[name] for name in names if name in self.standings}

    @property
    def sizes(self) -> Asked:
        """Sizes of all problems that were asked and accepted."""
        parts = [x.asked for x in self.standings.values()]
        parts += [x.asked for x in self.answers.values() if isinstance(x, Outcome)]
        return Asked.union(parts)

    def outcomes(self) -> list[Outcome]:
        """Return the findings of the probe, and the outcomes in the order of the names."""
        answers = (self.answers[name] for name in self.names if name in self.answers)
        return self.wrong + [answer for answer in answers if isinstance(answer, Outcome)]

    def ask_again(self) -> None:
        """Ask relations without leaving anything to agreement, where that passed.

        They left problems on which it fails, but its own samples do not show that.
        """
        trial = self.judge.trial.fresh()
        for name, answer in () if self.stopped else self.answers.items():
            asked = [self.answers.get(f"agreement-{n}") for n in getattr(answer, "left_to", ())]
            if any(isinstance(a, Outcome) and a.status == "passed" for a in asked):
                with trial.implementation.framework.one_thread():
                    again = self.judge.judge(RULES[name], trial, leaves=False)
                assert isinstance(again, Outcome)  # all its examples were asked
                self.answers[name] = again

    def report_progress(self, name: str) -> None:
        """Pass the current rule and the number of rules done to the progress callback."""
        if self.judge.trial.space.structure:
            done, total = (sum(n in RULES for n in x) for x in (self.answers, self.names))
            self.judge.progress(self.judge.trial.space.dtype, name, done, total)

    def groups(self) -> list[list[str]]:
        """Return the names left, those that sample alike together, the largest group first.

        With a deadline the groups of `TELLING` rules come before them, in that order. Groups in
        which no failure would end the questions come last.
        """
        groups: dict[Any, list[str]] = {}
        trial = self.judge.trial
        for name in self.open_names:
            key: Any = "aggregate" if name == BEHAVIOUR else name  # they need the same samples
            rule = RULES.get(name)
            if rule is not None and rule.recipes is None and rule.unless(trial) is None:
                key = Pools(trial.space, **rule.draw(trial)).key
            groups.setdefault(key, []).append(name)
        limited = math.isfinite(self.judge.deadline)
        first = {name: i for i, name in enumerate(TELLING)} if limited else {}
        return sorted(
            groups.values(),
            key=lambda names: (
                self._are_beside(names),
                min(first.get(name, len(TELLING)) for name in names),
                -len(names),
            ),
        )

    def _are_beside(self, names: Sequence[str]) -> bool:
        """Return True if the questions end at failures, but at none of these rules."""
        ends = self.judge.stops_at
        rules = [RULES[name] for name in names if name in RULES]
        return bool(ends) and all(ends.isdisjoint({rule.level, rule.rule}) for rule in rules)


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
    if trial.implementation.output is not None:
        return "no known rounding: o in 8 bits hides smaller errors"
    try:
        model = tightest_model(trial, plain_recipes(trial.space, seed))
    except ImplementationError as err:
        return f"no known rounding: {err}"
    if model is None:
        return "no known rounding: its errors are larger than any preset explains"
    return describe_fit(*model)
