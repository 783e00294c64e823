"""Causes of failures: each outcome that failed belongs to one, or is unexplained."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from npattn.conventions import Conventions
from npattn.testing.diagnosis.ahead import Contrasts, Submit, nobody
from npattn.testing.diagnosis.candidates import Candidate, Found
from npattn.testing.diagnosis.chance import drop_lone_steps, merge_leaks
from npattn.testing.diagnosis.conduct import conduct_causes
from npattn.testing.diagnosis.evidence import Evidence, collect, problem_size
from npattn.testing.diagnosis.layouts import raises_by_layout
from npattn.testing.diagnosis.search import search
from npattn.testing.diagnosis.sequences import find_sequence_causes
from npattn.testing.diagnosis.suspicion import collect_suspicion
from npattn.testing.levels import REQUIRED
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import RULES
from npattn.testing.trial import Trial

CONTRASTS = 2
"""Causes of which it is found when they pass, which takes as long as finding the cause."""
REPEATED = 4
"""Failing problems that are run once more, to see whether the results are the same."""


def diagnose(
    judged: Sequence[tuple[Trial, Sequence[Outcome]]],
    without: Container[str] = (),
    contrasts: int = CONTRASTS,
    submit: Submit = nobody,
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
    submit : callable
        Calls a function in an idle process, as `npattn.testing.diagnosis.ahead.Submit` says.

    Returns
    -------
    outcomes : list of Outcome
        All of them, those that failed with a diagnosis.
    causes : tuple of Cause
        Every outcome that failed, raised or is suspect belongs to exactly one; the cause of most
        comes first. Bits that differ (level reproducible) are measured, and have none.
    """
    causes: dict[tuple[str, str], Cause] = {}
    begun = Contrasts(submit)
    for trial, outcomes in judged:
        bad = [o for o in outcomes if o.failed or o.status == "suspect"]
        bad = [o for o in bad if o.level != "reproducible"]  # measured, and no mistake
        for outcome in _likely_contrasts(bad, contrasts):
            begun.begin(trial, outcome)
        for cause in _Diagnosis(trial.fresh(), bad, without).causes() if bad else ():
            key = (cause.kind, cause.name or cause.text)
            known = causes.get(key)
            causes[key] = _merge(known, cause) if known else cause
    level = {o.id: o.level for _, outcomes in judged for o in outcomes}

    def place(cause: Cause) -> tuple[int, int, bool]:
        """Causes of most required rules come first, then those of most rules."""
        required = sum(level[rule] in REQUIRED for rule in cause.rules)
        return -required, -len(cause.rules), cause.kind == "unexplained"

    ordered = sorted(causes.values(), key=place)
    for i, cause in enumerate(ordered):
        if i < contrasts or (contrasts and cause.kind == "unexplained"):
            ordered[i] = _with_contrast(cause, judged, begun)
    begun.close()
    texts = {rule: cause.text for cause in ordered for rule in cause.rules}
    explained = [
        replace(outcome, diagnosis=texts.get(outcome.id))
        for _, outcomes in judged
        for outcome in outcomes
    ]
    return explained, tuple(ordered)


def _merge(one: Cause, other: Cause) -> Cause:
    """Return the same cause in two dtypes; a restriction to a size of 0 must hold in both."""
    also = tuple(name for name in one.also if name in other.also)
    if one.text.startswith(other.text):
        one = replace(one, text=other.text, topic=other.topic)
    return replace(one, rules=one.rules + other.rules, also=also)


def _likely_contrasts(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Return the outcomes whose contrasts the causes will probably need."""
    return sorted((o for o in outcomes if o.level in REQUIRED), key=_contrast_rank)[:count]


def _contrast_rank(outcome: Outcome) -> tuple[bool, bool, bool, bool]:
    """Return the sort key that puts outcomes first whose contrasts tell most.

    What is required is shown. A rule that fails on problems as they were sampled tells more than
    one that changes them, and an exception that comes of a layout tells less than a wrong result.
    """
    changed = outcome.sampled is None, "then changed" in outcome.recipe
    return outcome.level not in REQUIRED, outcome.kind == "raised", *changed


def _with_contrast(
    cause: Cause, judged: Sequence[tuple[Trial, Sequence[Outcome]]], begun: Contrasts
) -> Cause:
    """Return the cause with what separates failing from passing problems of one rule, put first."""
    own = [(t, o) for t, outcomes in judged for o in outcomes if o.id in cause.rules]
    trial, first = min(own, key=lambda pair: _contrast_rank(pair[1]))
    if cause.kind == "raised" and first.rule not in RULES:  # no option is tried twice
        return cause
    rules = (first.id, *(rule for rule in cause.rules if rule != first.id))
    text, holds = begun.find(trial, first)
    return replace(cause, rules=rules, passes_when=text, holds=holds)


@dataclass
class _Diagnosis:
    """Search for the causes of the failures in one dtype."""

    trial: Trial
    outcomes: list[Outcome]
    without: Container[str]
    evidence: list[Evidence] = field(default_factory=list)

    def causes(self) -> Iterator[Cause]:
        """Yield causes that together have every outcome once."""
        for outcome in self.outcomes:
            evidence = self._collect(outcome)
            if evidence is not None and evidence.wrong:
                self.evidence.append(evidence)
        unsteady = [e for e in sorted(self.evidence, key=_rank)[:REPEATED] if self._differs(e)]
        if unsteady:
            yield from conduct_causes(self.trial, self.outcomes, {}, self.without, unsteady[0])
            return
        stored, rest = self._sequence_causes()
        found, rest = search(self.trial, rest, self.without)
        found, rest = drop_lone_steps(*merge_leaks(found, rest))
        found = stored + found
        explained = {e.outcome.rule for _, claimed in found for e in claimed if e.outcome}
        left = [o for o in self.outcomes if o.rule not in explained]
        for candidate, claimed in found:
            rules = {e.outcome.rule for e in claimed if e.outcome}
            if candidate.kind == "storage" and (candidate, claimed) == found[0]:
                # Another shape has other places, so that a call after it seems to depend on it.
                rules |= {o.rule for o in left if o.kind == "after"}
                left = [o for o in left if o.rule not in rules]
            if candidate.kind == "layout":
                rules |= {o.rule for o in left if raises_by_layout(self.trial, o, candidate.name)}
                left = [o for o in left if o.rule not in rules]
            rules |= {
                o.rule for o in left if o.kind == "after" and self._explains_alone(candidate, o)
            }
            left = [o for o in left if o.rule not in rules]
            yield self._cause(candidate, claimed, rules)
        wrong = {e.outcome.rule: e for e in rest if e.outcome}
        yield from conduct_causes(self.trial, left, wrong, self.without)

    def _sequence_causes(self) -> tuple[Found, list[Evidence]]:
        if self.trial.implementation.storage is None and self.trial.implementation.packing is None:
            return [], self.evidence
        return find_sequence_causes(self.evidence)

    def _collect(self, outcome: Outcome) -> Evidence | None:
        if outcome.status == "suspect":
            return collect_suspicion(self.trial, outcome)
        return collect(self.trial, outcome)

    def _explains_alone(self, candidate: Candidate, outcome: Outcome) -> bool:
        """Return True if a candidate explains the second of two calls when it is made alone.

        A mistake of some shapes is right in others, which looks like state of an earlier call.
        """
        alone = self._collect(replace(outcome, kind="value"))
        return alone is not None and bool(alone.wrong) and candidate.explains(alone)

    def _differs(self, evidence: Evidence) -> bool:
        """Return True if another call on the same problem gives other results."""
        assert evidence.outcome is not None
        again = self._collect(evidence.outcome)
        if again is None:
            return True
        return not again.equals(evidence)

    def _cause(self, candidate: Candidate, claimed: list[Evidence], rules: set[str]) -> Cause:
        conventions: Conventions | None = candidate.conventions
        text, topic = _restrict(candidate, claimed)
        return Cause(
            text,
            tuple(o.id for o in self.outcomes if o.rule in rules),
            candidate.kind,
            candidate.name,
            conventions=conventions,
            topic=topic,
            also=candidate.also,
        )


def _rank(evidence: Evidence) -> tuple[bool, int]:
    """Return the sort key that puts small problems of required rules first."""
    assert evidence.outcome is not None
    return evidence.outcome.level not in REQUIRED, evidence.size


def _restrict(candidate: Candidate, claimed: list[Evidence]) -> tuple[str, str]:
    """Return text and topic of a candidate; if it shows at a size of 0 alone, they say so.

    A known mistake says itself where it shows.
    """
    sizes = [x for x in "STBHDE" if all(problem_size(e.problem, x) == 0 for e in claimed)]
    if not sizes or candidate.kind == "mistake":
        return candidate.text, candidate.topic
    return f"{candidate.text}, where {sizes[0]} = 0", f"{candidate.topic}, sizes"
