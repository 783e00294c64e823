"""Record of a check: outcomes, causes and settings, and the verdict that follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from npattn.testing.cases.asked import Asked
from npattn.testing.levels import LEVELS, REQUIRED, Level
from npattn.testing.power import Concluded, Conclusion, conclude, find_unjudged
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import DEFECT, OUT_OF_TIME, Outcome
from npattn.testing.report.pair import Pair, Reading, reading_of_comparison
from npattn.testing.report.sensitivity import Sensitivity


@dataclass(frozen=True)
class FailureGroup:
    """Failures that one cause explains, or that none does, in the order of levels."""

    cause: Cause | None
    outcomes: tuple[Outcome, ...]  # one or more

    @property
    def is_explained(self) -> bool:
        """True if a cause says which step is wrong."""
        return self.cause is not None and self.cause.is_known

    @property
    def contrast(self) -> str:
        """When its problems pass, where the cause does not say so itself; "" if nothing tells."""
        if self.cause is None or self.cause.passes_when.endswith(f" {self.cause.where}"):
            return ""
        return self.cause.passes_when

    @property
    def reading(self) -> Reading | None:
        """The first wrong quantity that was read, else the worst result of its smallest failure."""
        if self.cause is not None and self.cause.reading is not None:
            return self.cause.reading
        shown = self.smallest
        readings = (reading_of_comparison(c, shown.recipe) for c in shown.comparisons)
        return next((x for x in readings if x is not None), None)

    @property
    def smallest(self) -> Outcome:
        """The failure to show: the smallest problem, of a plain agreement if one failed."""
        return min(self.outcomes, key=_reading_order)


@dataclass(frozen=True, repr=False)
class Record(Concluded):
    """Result of a check, without its formats.

    Attributes
    ----------
    target : str
    outcomes : tuple of Outcome
    untested : tuple of str
        Untested options, sizes and results, each with the reason.
    settings : dict
        Seed, examples, conventions, rounding, features, versions.
    strict : bool
        A suspect counts as failed.
    require : tuple of str
        Levels and rules that must pass.
    causes : tuple of Cause
        What explains the failures that count, the one that explains most first.
    refused : tuple of str
        What it does not take (structure, options, combinations, values), a line each.
    expected : mapping
        Expected failures: rule, or ``rule[dtype]`` → reason.
    taken_back : mapping
        Rules that the system of ``like`` does not promise → its documentation that says so.
    interrupted : bool
        Not everything was asked.
    missing : tuple of str
        What had to be tested and was not.
    sensitivity : Sensitivity or None
        Of a check of what nobody trusts: faults that it would have seen.
    confined : {"bwrap", "namespaces", "no"} or None
        How the process of what nobody trusts was confined; None for what is trusted.
    asked : mapping of str to Asked
        By dtype: sizes of the problems that were asked and accepted.
    skipped : mapping of str to mapping
        By dtype: name of each model size that was not asked → the reason.
    way_out : tuple of str
        Settings with which problems are taken, where all were refused: a line each.
    limits : (str, str)
        For which problems the verdict is, and what is refused, as "causal with T > S".
    sharper : tuple of str
        Which errors a declared rounding would see where none is declared and little is seen.
    few : tuple of str
        Why there is no verdict: dtypes of which few problems are taken ("in float32 it takes 4% of
        the problems"), parts of a module that are not judged.
    accept : tuple of str
        Results that may be not judged: "dx", or "dx[float16]" in one dtype.
    other_causes : tuple of Cause
        What explains failures that do not count.
    """

    target: str
    outcomes: tuple[Outcome, ...]
    untested: tuple[str, ...]
    settings: dict[str, Any]
    strict: bool = False
    require: tuple[str, ...] = REQUIRED
    causes: tuple[Cause, ...] = ()
    refused: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)
    taken_back: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False
    missing: tuple[str, ...] = ()
    sensitivity: Sensitivity | None = None
    confined: str | None = None
    asked: Mapping[str, Asked] = field(default_factory=dict)
    skipped: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    way_out: tuple[str, ...] = ()
    limits: tuple[str, str] = ("", "")
    sharper: tuple[str, ...] = ()
    few: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    other_causes: tuple[Cause, ...] = ()

    def __post_init__(self) -> None:
        counting = [o for o in self.outcomes if self.counts(o)]
        causes = (*self.causes, *self.other_causes)
        explaining = tuple(c for c in causes if any(map(c.explains, counting)))
        object.__setattr__(self, "causes", explaining)
        object.__setattr__(self, "other_causes", tuple(c for c in causes if c not in explaining))

    @property
    def conclusion(self) -> Conclusion:
        """Verdict and reason."""
        failed = any(self.counts(o) for o in self.outcomes) or (self.tested and bool(self.stale))
        defects = [f"a defect of npattn in {o.id}" for o in self.outcomes if o.kind == DEFECT]
        return conclude(
            failed=failed,
            tested=self.tested or self.interrupted,
            missing=self.missing,
            incomplete=self.incomplete,
            unjudged=self.unjudged,
            reasons=(*defects, *self.few, *(["interrupted"] if self.interrupted else [])),
        )

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Required rules that were not asked within the time."""
        return tuple(o.id for o in self.outcomes if o.message == OUT_OF_TIME and self.requires(o))

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Results that are not judged, and not left out by `accept`, with their dtype if several.

        Those of rules that are not required do not count, and a result that another required rule
        has judged is judged: a rule with problems of its own may have steep ones alone.
        """
        names: dict[str, None] = {}
        passed = [o for o in self.outcomes if o.status == "passed" and self.requires(o)]
        judged = {
            (o.dtype, n)
            for o in passed
            for n, power in o.powers.items()
            if power.nonzero and n not in find_unjudged(o.powers)
        }
        for outcome in self.outcomes:
            if outcome.status == "not judged" and self.requires(outcome):
                for name in find_unjudged(outcome.powers):
                    if (outcome.dtype, name) in judged:
                        continue
                    both = f"{name}[{outcome.dtype}]"
                    if name not in self.accept and both not in self.accept:
                        names[name if len(self.dtypes) == 1 else both] = None
        return tuple(names)

    @property
    def tested(self) -> bool:
        """True if any problem was accepted."""
        return any(o.status != "not applicable" for o in self.outcomes)

    def counts(self, outcome: Outcome) -> bool:
        """Return True if the outcome fails the report: bad, required and not expected."""
        return self.is_bad(outcome) and self.requires(outcome) and self.expectation(outcome) is None

    def is_bad(self, outcome: Outcome) -> bool:
        """Return True if the outcome failed; with `strict` also if it is suspect."""
        return outcome.failed or (self.strict and outcome.status == "suspect")

    def requires(self, outcome: Outcome) -> bool:
        """Return True if its rule is required by name, or its level is and the rule promised.

        Whatever ends its process fails at every level.
        """
        if outcome.rule in self.require or outcome.has_ended:
            return True
        return outcome.level in self.require and outcome.rule not in self.taken_back

    def excuse(self, outcome: Outcome) -> str:
        """Return why a failure does not count, in a word or two; "" if it does, or is none."""
        if not self.is_bad(outcome) or self.counts(outcome):
            return ""
        if self.expectation(outcome) is not None:
            return "expected"
        return "not promised" if outcome.rule in self.taken_back else "not required"

    def expectation(self, outcome: Outcome) -> str | None:
        """Return the reason for which its failure is expected; None if it is not."""
        return self.expected.get(outcome.id, self.expected.get(outcome.rule))

    @property
    def stale(self) -> dict[str, str]:
        """Expected failures that did not occur, each with the reason to remove it."""
        failed = {n for o in self.outcomes if self.is_bad(o) for n in (o.id, o.rule)}
        checked = {n for o in self.outcomes for n in (o.id, o.rule)}
        return {
            name: "did not fail" if name in checked else "matches no rule that was checked"
            for name in self.expected
            if name not in failed
        }

    @property
    def pair(self) -> Pair | None:
        """The pair of the first cause: a problem that fails, and its neighbour that passes."""
        return next((g.cause.pair for g in self._first_groups() if g.cause is not None), None)

    @property
    def reading(self) -> Reading | None:
        """The first wrong quantity, got beside wanted, of the first cause."""
        for group in self._first_groups()[:1]:
            return group.reading
        return None

    def _first_groups(self) -> list[FailureGroup]:
        return self.groups() or self.groups(required=False)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(o.dtype for o in self.outcomes))

    def by_level(self) -> dict[Level, list[Outcome]]:
        """Return the outcomes of each level that has any, in the order of `LEVELS`."""
        levels = {level: [o for o in self.outcomes if o.level == level] for level in LEVELS}
        return {level: outcomes for level, outcomes in levels.items() if outcomes}

    @staticmethod
    def by_rule(outcomes: Iterable[Outcome]) -> list[dict[str, Outcome]]:
        """Return the outcomes of each rule by dtype: the rows of a table."""
        rows: dict[str, dict[str, Outcome]] = {}
        for outcome in outcomes:
            rows.setdefault(outcome.rule, {})[outcome.dtype] = outcome
        return list(rows.values())

    def groups(self, *, required: bool = True) -> list[FailureGroup]:
        """Return the failures by cause, the group of most failed rules that count first.

        Parameters
        ----------
        required : bool
            Only failures that count against the report; else every one.
        """
        wanted = self.counts if required else self.is_bad
        rest = [o for outcomes in self.by_level().values() for o in outcomes if wanted(o)]
        groups = []
        for cause in (*self.causes, *self.other_causes):
            members = tuple(o for o in rest if cause.explains(o))
            rest = [o for o in rest if o not in members]
            groups += [FailureGroup(cause, members)] if members else []
        levels = dict.fromkeys(o.level for o in rest)
        groups += [FailureGroup(None, tuple(o for o in rest if o.level == x)) for x in levels]
        return sorted(groups, key=self._count_rules)

    def _count_rules(self, group: FailureGroup) -> tuple[int, int, bool]:
        """Return a sort key: groups of most rules come first, those with a cause before others."""
        counting = {o.rule for o in group.outcomes if self.counts(o)}
        rules = {o.rule for o in group.outcomes}
        return -len(counting), -len(rules), not group.is_explained


def _reading_order(outcome: Outcome) -> tuple[bool, bool, float]:
    """Agreements first: they compare with the oracle, on a problem as it was sampled.

    What has no script comes last: the report leads with a failure that can be shown.
    """
    problem = outcome.problem
    size = math.inf
    if problem is not None:  # of arrays, or of tensors after a sweep
        size = sum(math.prod(x.shape) for x in (problem.q, problem.k, problem.v))
    return not outcome.script(), not outcome.rule.startswith("agreement-"), size
