"""Causes of failures: the simplest candidates that together reproduce all wrong results.

Candidates are tried on the smallest failing problem first; those that reproduce it are tried on
every other one. Where several reproduce as many, problems on which the rules did not fail decide.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np

from npattn.conventions import Conventions
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.apart import tell_apart
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.conduct import conduct_causes
from npattn.testing.diagnosis.contrasts import contrast
from npattn.testing.diagnosis.conventions import (
    convention_candidates,
    profile_candidates,
    with_another,
    without_one,
)
from npattn.testing.diagnosis.dtypes import dtype_candidates
from npattn.testing.diagnosis.evidence import Evidence, collect, sample
from npattn.testing.diagnosis.leaks import LEAK, leaks_nan
from npattn.testing.diagnosis.mistakes import mistake_candidates
from npattn.testing.diagnosis.ratios import is_fitted, ratio_candidates
from npattn.testing.diagnosis.steps import step_candidates
from npattn.testing.diagnosis.suspicion import collect_suspicion
from npattn.testing.levels import REQUIRED
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import PROPERTIES
from npattn.testing.trial import Trial

__all__ = ["diagnose"]

PROBES = 16
"""Problems beside the failing ones on which candidates that explain equally much are compared."""
RIVALS = 48
"""Candidates that explain equally much and are compared, the simplest; many do if little failed."""
CONTRASTS = 2
"""Causes of which it is found when they pass, which takes as long as finding the cause."""
REPEATED = 4
"""Failing problems that are run once more, to see whether the results are the same."""
LARGE = 2**16
"""Scores of the largest problem on which every candidate is tried."""
PASSES = 6
"""Failing problems on which every candidate is tried; what then is left stays unexplained."""


def diagnose(
    judged: Sequence[tuple[Trial, Sequence[Outcome]]],
    without: Container[str] = (),
    contrasts: int = CONTRASTS,
) -> tuple[list[Outcome], tuple[Cause, ...]]:
    """Find the causes of what failed.

    Parameters
    ----------
    judged : sequence of (Trial, sequence of Outcome)
        For each dtype, the trial with its space narrowed to what is accepted, and all outcomes.
    without : container of str
        Names of known mistakes that are no candidates.
    contrasts : int
        Number of causes of which it is found when they pass; with any, of the unexplained too.

    Returns
    -------
    outcomes : list of Outcome
        All of them, those that failed with a diagnosis.
    causes : tuple of Cause
        Every outcome that failed, raised or is suspect belongs to exactly one; the cause of most
        comes first. Bits that differ (level reproducible) are measured, and have none.
    """
    causes: dict[tuple[str, str], Cause] = {}
    for trial, outcomes in judged:
        bad = [o for o in outcomes if o.status in ("failed", "error", "suspect")]
        bad = [o for o in bad if o.level != "reproducible"]  # measured, and no mistake
        for cause in _Diagnosis(trial.fresh(), bad, without).causes() if bad else ():
            key = (cause.kind, cause.name or cause.text)
            known = causes.get(key)
            causes[key] = _merge(known, cause) if known else cause
    level = {o.id: o.level for _, outcomes in judged for o in outcomes}

    def place(cause: Cause) -> tuple[bool, bool, int]:
        """Causes of what is required come first, then those of most rules."""
        beside = not any(level[rule] in REQUIRED for rule in cause.rules)
        return cause.kind == "unexplained", beside, -len(cause.rules)

    ordered = sorted(causes.values(), key=place)
    for i, cause in enumerate(ordered):
        if i < contrasts or (contrasts and cause.kind == "unexplained"):
            ordered[i] = _with_contrast(cause, judged)
    texts = {rule: cause.text for cause in ordered for rule in cause.rules}
    explained = [
        replace(outcome, diagnosis=texts.get(outcome.id))
        for _, outcomes in judged
        for outcome in outcomes
    ]
    return explained, tuple(ordered)


def _merge(one: Cause, other: Cause) -> Cause:
    """Return the same cause in two dtypes."""
    also = tuple(name for name in one.also if name in other.also)
    return replace(one, rules=one.rules + other.rules, also=also)


def _with_contrast(cause: Cause, judged: Sequence[tuple[Trial, Sequence[Outcome]]]) -> Cause:
    """Return the cause with what separates failing from passing problems of one rule, put first.

    One that fails on problems as they were sampled tells more than one that changes them.
    """
    own = [(t, o) for t, outcomes in judged for o in outcomes if o.id in cause.rules]
    trial, first = min(own, key=lambda x: (x[1].sampled is None, "then changed" in x[1].recipe))
    rules = (first.id, *(rule for rule in cause.rules if rule != first.id))
    asked = cause.kind != "raised" or first.rule in PROPERTIES  # no option is tried twice
    return replace(cause, rules=rules, passes_when=contrast(trial, first) if asked else "")


@dataclass
class _Diagnosis:
    """Search for the causes of the failures in one dtype."""

    trial: Trial
    outcomes: list[Outcome]
    without: Container[str]
    evidence: list[Evidence] = field(default_factory=list)
    known: dict[tuple[str, str, int], bool] = field(default_factory=dict)

    def causes(self) -> Iterator[Cause]:
        """Yield causes that together have every outcome once."""
        for outcome in self.outcomes:
            evidence = self._collect(outcome)
            if evidence is not None and evidence.wrong:
                self.evidence.append(evidence)
        left = sorted(self.evidence, key=lambda e: e.size)
        if any(self._differs(e) for e in left[:REPEATED]):
            yield from conduct_causes(self.trial, self.outcomes, {}, self.without, unsteady=True)
            return
        found: list[tuple[Candidate, list[Evidence]]] = []
        skipped: list[Evidence] = []
        for _ in range(PASSES):
            if not left or left[0].size > LARGE:
                break
            candidate, claimed = self._best(left)
            if candidate is None:
                skipped.append(left.pop(0))
                continue
            found.append((candidate, claimed))
            left = [e for e in left if e not in claimed]
        leaks = [e for e in (*skipped, *left) if leaks_nan(e)]
        # What explains only one of many leaks by chance is no cause of its own, and neither is a
        # convention of which nothing but leaks is seen: a fill lets NaN through too.
        chance = [
            (candidate, claimed)
            for candidate, claimed in found
            if all(map(leaks_nan, claimed))
            and (candidate.conventions is not None or len(claimed) < len(leaks))
        ]
        if leaks or chance:
            found = [x for x in found if x not in chance]
            found.append((LEAK, leaks + [e for _, claimed in chance for e in claimed]))
            skipped, left = ([e for e in some if e not in leaks] for some in (skipped, left))
        if 2 * len(skipped + left) > len(self.evidence):
            # A step that fits one problem, where most of what failed fits nothing, does so by
            # chance; a whole known mistake or a plain factor rarely does.
            lone = [
                (candidate, claimed)
                for candidate, claimed in found
                if candidate.kind in ("dtype", "step")
                and len({e.outcome.sampled for e in claimed if e.outcome}) == 1
            ]
            found = [x for x in found if x not in lone]
            skipped += [e for _, claimed in lone for e in claimed]
        explained = {e.outcome.rule for _, claimed in found for e in claimed if e.outcome}
        for candidate, claimed in found:
            yield self._cause(candidate, claimed)
        rest = [o for o in self.outcomes if o.rule not in explained]
        wrong = {e.outcome.rule: e for e in (*skipped, *left) if e.outcome}
        yield from conduct_causes(self.trial, rest, wrong, self.without)

    def _collect(self, outcome: Outcome) -> Evidence | None:
        if outcome.status == "suspect":
            return collect_suspicion(self.trial, outcome)
        return collect(self.trial, outcome)

    def _differs(self, evidence: Evidence) -> bool:
        """Return True if another call on the same problem gives other results."""
        assert evidence.outcome is not None
        again = self._collect(evidence.outcome)
        if again is None:
            return True
        for name, arrays in evidence.observed.items():
            others = again.observed.get(name, ())
            if len(arrays) != len(others):  # it returned the result once more, or no longer
                return True
            if not all(
                np.array_equal(x, y, equal_nan=True) for x, y in zip(arrays, others, strict=True)
            ):
                return True
        return False

    def _best(self, left: list[Evidence]) -> tuple[Candidate | None, list[Evidence]]:
        """Return the candidate that explains most of what is left, the smallest problem included.

        Of several it is the one that fits other problems best, and then the simplest.
        """
        first, *others = left
        hits = [c for c in self._candidates(first) if self._explains(c, first)]
        claims = {c: [first, *(e for e in others if self._explains(c, e))] for c in hits}
        if max(map(len, claims.values()), default=0) < len(left):
            pairs = [two for c in hits if c.conventions for two in with_another(c, first)]
            more = {c: [first, *(e for e in others if self._explains(c, e))] for c in pairs}
            claims |= {c: x for c, x in more.items() if len(x) > 1}
        if len(self.evidence) > 1:  # a number fitted to one problem of several is chance
            claims = {c: x for c, x in claims.items() if len(x) > 1 or not is_fitted(c)}
        for most in sorted({len(x) for x in claims.values()}, reverse=True):
            best = self._best_fits([c for c in claims if len(claims[c]) == most])
            if best:
                plainest, *alike = tell_apart(best, claims[best[0]])
                also = tuple(c.name for c in alike if c.kind == "mistake")
                return replace(plainest, also=also), claims[plainest]
        return None, []

    def _best_fits(self, rivals: list[Candidate]) -> list[Candidate]:
        """Return the rivals that miss fewest probes, the simplest first."""
        best, fewest = list[Candidate](), len(self.probes)
        for rival in sorted(rivals, key=lambda c: (c.rank, c.changes))[:RIVALS]:
            missed = self._misses(rival, fewest + 1)
            if missed > fewest or self._contradicts(rival) or self._overreaches(rival):
                continue
            best = [rival] if missed < fewest else [*best, rival]
            fewest = missed
        return best

    def _explains(self, candidate: Candidate, evidence: Evidence) -> bool:
        """Return True if the candidate explains the evidence; memoized, by its unique name."""
        key = (candidate.kind, candidate.name, id(evidence))
        if key not in self.known:
            self.known[key] = candidate.explains(evidence)
        return self.known[key]

    def _candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        yield from convention_candidates(evidence)
        yield from profile_candidates(evidence)
        yield from ratio_candidates(evidence)
        yield from dtype_candidates(evidence)
        yield from step_candidates(evidence)
        yield from mistake_candidates(evidence, self.without)

    @cached_property
    def probes(self) -> list[Evidence]:
        """Problems of every option, as rules sample them."""
        cases = self.trial.cases(Pools(self.trial.space), 0, PROBES)
        recipes = (r for r in cases if not self.trial.skips(r, "probe"))
        return [e for e in sample(self.trial, islice(recipes, PROBES)) if e.size <= LARGE // 4]

    def _misses(self, candidate: Candidate, limit: int = PROBES) -> int:
        """Return the number of probes that a candidate does not explain, counted up to a limit."""
        missed = (1 for probe in self.probes if not self._explains(candidate, probe))
        return sum(islice(missed, limit))

    def _contradicts(self, candidate: Candidate) -> bool:
        """Return True if the candidate would make a probe wrong that is right.

        Such a mistake, or convention, is another one. A factor or a step may be wrong on some
        problems only, as where a kernel has several paths.
        """
        if candidate.kind in ("ratio", "step", "layout"):
            return False
        return any(not (e.wrong or self._explains(candidate, e)) for e in self.probes)

    def _overreaches(self, candidate: Candidate) -> bool:
        """Return True if it fits the probes as well without one of its conventions.

        A NaN that leaks past a weight of 0 looks like a convention too. Those of a known system
        may come with some that no probe shows.
        """
        if candidate.conventions is None:
            return False
        own, known = self._misses(candidate), candidate.name.startswith("as ")
        fewer = map(self._misses, without_one(candidate, self.trial.conventions))
        return any(missed < own or (missed == own and not known) for missed in fewer)

    def _cause(self, candidate: Candidate, claimed: list[Evidence]) -> Cause:
        outcomes = [e.outcome for e in claimed if e.outcome is not None]
        rules = {o.id for o in outcomes}
        conventions: Conventions | None = candidate.conventions
        return Cause(
            candidate.text,
            tuple(o.id for o in self.outcomes if o.id in rules),
            candidate.kind,
            candidate.name,
            conventions=conventions,
            topic=candidate.topic,
            also=candidate.also,
        )
