"""Verdicts of a report, one for each rule, as a test runner needs them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from npattn.testing.power import find_unjudged
from npattn.testing.report.escape import escape_controls
from npattn.testing.report.outcome import DEFECT, OUT_OF_TIME, Outcome
from npattn.testing.report.record import FailureGroup, Record
from npattn.testing.report.reproducer import write_conventions
from npattn.testing.report.words import failure_lines

PROBE = "structure"
"""Rule that comes first, with which findings of the probe are told."""
TOLD = 4
"""Lines of the message of a failure; the report has all."""
WORST_FIRST = ("failed", "xfailed", "passed", "skipped")


@dataclass(frozen=True)
class Verdict:
    """Result of a test."""

    status: Literal["passed", "failed", "xfailed", "skipped"]
    text: str = ""  # the reason, in its first line; "" if passed
    script: str = ""  # standalone Python file that shows a failure, or ""


def rule_verdict(record: Record, rule: str, dtype: str, asked: Collection[str]) -> Verdict:
    """Return the verdict on one rule in one dtype.

    Parameters
    ----------
    asked : collection of str
        Every rule that has a test. Outcomes of others (``option-mask``) belong to "structure".
    """
    here = [o for o in record.outcomes if o.dtype == dtype]
    of_rule = [o for o in here if o.rule == rule or (rule == PROBE and o.rule not in asked)]
    if not of_rule:
        refused = [text for text in record.refused if text.startswith(f"{dtype}: nothing")]
        if here and rule == PROBE and not refused:  # it has an outcome if it finds something
            return Verdict("passed")
        return Verdict("skipped", refused[0] if refused else "not asked, after an earlier failure")
    verdicts = [_outcome_verdict(record, outcome) for outcome in of_rule]
    status = min((v.status for v in verdicts), key=WORST_FIRST.index)
    told = [v for v in verdicts if v.status == status]
    return Verdict(status, "\n\n".join(v.text for v in told if v.text), told[0].script)


def rest_verdict(record: Record) -> Verdict:
    """Return the verdict on what belongs to no rule: a report fails if this or a rule does."""
    names = {name for outcome in record.outcomes for name in (outcome.id, outcome.rule)}
    lines = [_stale_line(record, name) for name in record.stale if name not in names]
    if record.missing:
        lines.append(f"no verdict: not tested, and asked for: {', '.join(record.missing)}")
    if not record.tested:
        lines += ["no verdict: nothing tested", *record.refused, *record.untested]
    return Verdict("failed", "\n".join(lines)) if lines else Verdict("passed")


def _outcome_verdict(record: Record, outcome: Outcome) -> Verdict:
    """Return the verdict on one outcome: stale expectations fail, excused failures xfail."""
    stale = [_stale_line(record, n) for n in (outcome.id, outcome.rule) if n in record.stale]
    if stale:
        return Verdict("failed", "\n".join(stale))
    if outcome.message == OUT_OF_TIME and record.requires(outcome):
        return Verdict("failed", f"no verdict: {OUT_OF_TIME}")
    if outcome.status == "not applicable":
        return Verdict("skipped", outcome.message)
    if outcome.status == "not judged":
        names = {name for o in (outcome,) for name in find_unjudged(o.powers)}
        open_names = [n for n in record.unjudged if n.partition("[")[0] in names]
        if outcome.kind == DEFECT or (open_names and record.requires(outcome)):
            return Verdict("failed", f"no verdict: not judged: {outcome.message}")
        return Verdict("passed")
    if outcome.status == "passed":
        return Verdict("passed")
    text, script = _failure_text(record, outcome), outcome.script()
    if record.counts(outcome):
        return Verdict("failed", text, script)
    excuse = record.excuse(outcome) or outcome.status  # one that is suspect has none
    if excuse == "expected":
        text = f"{record.expectation(outcome)}\n{text}"
    elif excuse == "not promised":
        text = f"{record.taken_back[outcome.rule]}\n{text}"
    return Verdict("xfailed", f"{excuse}: {text}", script)


def _stale_line(record: Record, name: str) -> str:
    return f"expected failure {name} {record.stale[name]}: remove it"


def _failure_text(record: Record, outcome: Outcome) -> str:
    """Return the cause, the values got and expected, and the problem that shows them."""
    causes = (*record.causes, *record.other_causes)
    cause = next((c for c in causes if c.explains(outcome)), None)
    lines = [] if cause is None else [" ".join(cause.text.split())]
    told = escape_controls(outcome.message).splitlines()
    if lines and outcome.rule == "structure":  # whose message begins with what was asked: D = 0
        lines[0] = f"{told[0].partition(':')[0]}: {lines[0]}"
    lines += told[:TOLD] + [f"… and {len(told) - TOLD} lines more"] * (len(told) > TOLD)
    if contrast := FailureGroup(cause, (outcome,)).contrast:
        lines.append(contrast)
    head, *rest = failure_lines(outcome, most=0)
    if outcome.message:  # which stands above: the name of the rule is followed by what it says
        head = f"{outcome.id} {outcome.status}: {rest.pop(0).removeprefix('  rule: ')}"
    lines += [head, *rest]
    if cause is not None and cause.conventions is not None:
        lines.append(f"  passes with conventions={write_conventions(cause.conventions)}")
    return "\n".join(lines)
