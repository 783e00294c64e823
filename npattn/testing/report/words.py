"""Words of a report that text and page share: headline, causes, levels, failures and verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from npattn.testing.cases.asked import MODELS
from npattn.testing.cases.recipe import VIEWS
from npattn.testing.levels import Level
from npattn.testing.power import describe, union
from npattn.testing.report.cause import Cause
from npattn.testing.report.escape import escape_controls
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.record import FailureGroup, Record

CLOSE = 0.9
"""Share of the tolerance from which a rule that passed is named."""
UNCONFINED = "not confined: untrusted code could read, change or end the judge (--unconfined)"
MUST = "(name it in --must to require it)"
"""Way to make what is not tested count."""
LINK = "what this does not say: npattn explain green"
REFUSED = re.compile(r"(?:\w+: )?([^:]+): refused\b")
"""Line of what is refused → its name."""
REFUSALS = 3
"""Refusals that the verdict names."""


def not_tested(record: Record) -> str:
    """Return "not tested", with the way to make it count if the check has one."""
    if "reference" in record.settings:
        return "not tested"
    must = MUST.replace("--must", "must=") if "reads" in record.settings else MUST
    return f"not tested {must}"


def headline(record: Record) -> str:
    """Return the verdict in a sentence: by how many causes it failed, and what is refused."""
    groups = record.groups()
    if record.verdict == "no verdict":
        text = f"no verdict: {record.reason}"
    elif groups:
        text = _count_causes(groups)
    else:
        text = "passed" if record.passed else "FAILED"
    taken, refused = record.limits if record.tested else ("", "")
    text += f" for {taken}" if taken and record.passed else ""
    names = [refused] if refused else []
    lines = [match[1] for line in record.refused if (match := REFUSED.match(line))]
    names += [x for x in lines if x not in refused.replace(" with ", " and ")]
    names = [name for name in dict.fromkeys(names) if name not in VIEWS]
    more = f" and {len(names) - REFUSALS} more" if len(names) > REFUSALS else ""
    return f"{text}; refused: {', '.join(names[:REFUSALS])}{more}" if names else text


def _count_causes(groups: Sequence[FailureGroup]) -> str:
    """Return how many causes explain how many of the failed rules, in words."""
    total = sum(len(g.outcomes) for g in groups)
    rules = f"FAILED: {count(total, 'rule')}"
    explained = [g for g in groups if g.is_explained]
    if not explained:
        return f"{rules}, by no cause that is known"
    share = sum(len(g.outcomes) for g in explained)
    number = count(len(explained), "cause")
    if share == total:
        return f"{rules}, by {number}"
    return f"{rules}, {share} of them by {number}"


def convention_flag(cause: Cause) -> str:
    """Return the flags with which its rules pass; "" if there are none, or its text names them."""
    if cause.conventions is None or not cause.name or "--convention" in cause.text:
        return ""
    return " ".join(f"--convention {change}" for change in cause.name.split(", "))


def failure_lines(
    outcome: Outcome, most: int | None = None, *, problem: bool = True
) -> Iterator[str]:
    """Yield a failure: what failed, `most` further lines of its message, the rule, the problem."""
    cited = f" [semantics {outcome.semantics}]" if outcome.semantics else ""
    told, *more = escape_controls(outcome.message).splitlines() or [outcome.about]
    yield f"{outcome.id} {outcome.status}: {told.removesuffix(':')}"
    yield from (f"  {line}" for line in more[: None if most is None else max(most - 1, 0)])
    if outcome.message:
        yield f"  rule: {outcome.about}{cited}"
    if problem and outcome.problem is not None:
        yield f"  on {outcome.problem!r}"
    if outcome.recipe:
        yield f"  sampled as {outcome.recipe}"


def worst_text(outcome: Outcome) -> str:
    """Return the largest error / tolerance of an outcome, or NaN; "" if it has none."""
    if 0 < outcome.worst < math.inf:
        return f"{outcome.worst:.2g}"
    return "NaN" if any(math.isnan(abs(c.got)) for c in outcome.comparisons) else ""


def cell_text(outcome: Outcome | None) -> str:
    """Return the cell of a table: the status and the largest error / tolerance, or the reason."""
    if outcome is None:
        return ""
    if outcome.status == "not applicable":
        return f"– {outcome.message}"
    return f"{outcome.status} {worst_text(outcome)}".rstrip()


def settings_line(record: Record) -> str:
    """Return the settings in a line: ``seed 0; examples 100; features causal, scale``."""
    apart = ("versions", "behaves as", "reads")
    return "; ".join(f"{k} {value_text(v)}" for k, v in record.settings.items() if k not in apart)


def behaviour_lines(record: Record) -> list[str]:
    """Return the tightest rounding model that explains the errors in each dtype."""
    models = record.settings.get("behaves as", {})
    return [f"precision: {dtype} like {model}" for dtype, model in models.items()]


def value_text(value: object) -> str:
    """Format a setting: ``causal, scale``, ``causal='top_left'``, or "default" for no changes."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={x!r}" for name, x in value.items()) or "default"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def level_line(record: Record, level: Level, outcomes: Sequence[Outcome]) -> str:
    """Return the verdict on a level: ``values 31 passed, worst 0.39 of the tolerance``."""
    judged = [o for o in outcomes if o.status != "not applicable"]
    if not judged:
        return f"{level} nothing to test"
    bad = [o for o in judged if record.is_bad(o)]
    passed = [o for o in judged if o.status == "passed"]
    unjudged = [o for o in judged if o.status == "not judged"]
    suspects = [o for o in judged if o not in bad and o not in passed and o not in unjudged]
    parts = [f"{len(passed)} passed"] if passed and not bad else []
    worst = max((o.worst for o in passed if math.isfinite(o.worst)), default=0.0)
    parts += [f"worst {worst:.2g} of the tolerance"] if worst else []
    parts += [f"{len(suspects)} suspect: {rule_names(record, suspects)}"] if suspects else []
    parts += [f"{len(unjudged)} not judged: {rule_names(record, unjudged)}"] if unjudged else []
    close = [o for o in passed if o.worst >= CLOSE]
    parts += [f"close: {rule_names(record, close)}"] if close else []
    tail = ", ".join(parts)
    if not bad:
        return f"{level} {tail}"
    failed = f"{level}: {len(bad)} of {len(judged)} failed{_excuses(record, bad)}"
    return f"{failed}; the others: {tail}" if parts else failed


def _excuses(record: Record, bad: Sequence[Outcome]) -> str:
    """Return why failures of a level do not count, with the names of those that do not."""
    parts = []
    for excuse in ("expected", "not promised", "not required"):
        outcomes = [o for o in bad if record.excuse(o) == excuse]
        if outcomes:
            number = "" if len(outcomes) == len(bad) else f", {len(outcomes)} of them"
            parts.append(f"{number} ({excuse}): {rule_names(record, outcomes)}")
    return ";".join(parts)


def level_lines(record: Record) -> list[tuple[str, bool]]:
    """Return the levels in sentences, with True for those that fail the report.

    Those of which everything passed share the first one.
    """
    clean, others, worst = [], [], 0.0
    for level, outcomes in record.by_level().items():
        judged = [o for o in outcomes if o.status != "not applicable"]
        if all(o.status == "passed" and o.worst < CLOSE for o in judged):
            clean += [f"{level} {len(judged)}"] if judged else []
            worst = max([worst, *(o.worst for o in judged)])
        else:
            counts = any(map(record.counts, outcomes))
            others.append((level_line(record, level, outcomes), counts))
    tail = f", worst {worst:.2g} of the tolerance" if worst else ""
    kept = "kept" if len(record.dtypes) == 1 else f"kept ({', '.join(record.dtypes)})"
    return [(f"{kept}: {', '.join(clean)}{tail}", False), *others] if clean else others


def untested_line(record: Record) -> str:
    """Return which options and results were not tested."""
    untested = "; ".join(record.untested) or "no option and no result is left out"
    return f"{not_tested(record)}: {untested}"


def size_lines(record: Record, *, verbose: bool = False) -> list[str]:
    """Return the tested sizes, and how many model sizes were not, or with `verbose` which."""
    sizes = {dtype: str(asked) for dtype, asked in record.asked.items() if asked.ranges}
    lines = _by_dtype("tested sizes", sizes)
    if verbose:
        models = {dtype: _name_skipped(reasons) for dtype, reasons in record.skipped.items()}
        return lines + _by_dtype("not tested, of the sizes of known models", models)
    skipped = {name for reasons in record.skipped.values() for name in reasons}
    if not skipped or not lines or record.groups():
        return lines
    *before, last = lines
    return [*before, f"{last}; {count(len(skipped), 'size')} of known models not (--verbose)"]


def _by_dtype(title: str, texts: Mapping[str, str]) -> list[str]:
    """Return one line if the dtypes have the same text, else one for each."""
    if len(set(texts.values())) == 1:
        return [f"{title}: {next(iter(texts.values()))}"]
    return [f"{title}, {dtype}: {text}" for dtype, text in texts.items()]


def _name_skipped(reasons: Mapping[str, str]) -> str:
    """Return the names of model sizes by the reason for which they were not asked."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    if len(names) == 1 and len(reasons) == len(MODELS):
        return f"all {len(MODELS)} ({next(iter(names))})"
    return "; ".join(f"{_fold(rules)} ({reason})" for reason, rules in names.items()) or "none"


def _fold(names: Sequence[str]) -> str:
    """Join names of sizes; letters that several have in common come once: "D = E = 24, 48"."""
    numbers: dict[str, list[str]] = {}
    for name in names:
        letters, _, number = name.rpartition(" = ")
        numbers.setdefault(letters, []).append(number)
    return "; ".join(f"{letters} = {', '.join(values)}" for letters, values in numbers.items())


def power_lines(record: Record, *, verbose: bool = False) -> list[str]:
    """Return what would have been seen of each result, where that is little; else all."""
    lines = []
    for dtype in record.dtypes:
        of_dtype = [o.powers for o in record.outcomes if o.dtype == dtype]
        judged = {n for powers in of_dtype for n, power in powers.items() if power.judged}
        powers = union(  # of rules that judge a result, if one does: that is the verdict's ground
            {n: x for n, x in powers.items() if x.judged or n not in judged} for powers in of_dtype
        )
        title = f"{dtype} " if len(record.dtypes) > 1 else ""
        lines += [f"{title}{line}" for line in describe(powers, verbose=verbose)]
    return lines


def acceptance(record: Record) -> str:
    """Return the way to leave out what is not judged; "" if every result is."""
    names = [name.partition("[")[0] for name in record.unjudged]
    if record.verdict != "no verdict" or not names:
        return ""
    flags = " ".join(f"--accept {name}" for name in dict.fromkeys(names))
    return f"{flags} (accept= in Python) needs no verdict on it"


def verdict(record: Record) -> str:
    """Return the last line: "FAILED: 21 passed, 10 failed"."""
    counts: dict[str, int] = {}
    for outcome in record.outcomes:
        if outcome.status != "not applicable":
            excuse = record.excuse(outcome)
            key = outcome.status + (f" ({excuse})" if excuse else "")
            counts[key] = counts.get(key, 0) + 1
    words = [f"{n} {key}" for key, n in sorted(counts.items(), key=lambda x: x[0] != "passed")]
    words += [f"{count(len(record.stale), 'expected failure')} stale"] if record.stale else []
    if record.verdict == "no verdict":
        return f"no verdict: {record.reason}" + (f" ({', '.join(words)})" if words else "")
    words += [f"not tested, and asked for: {', '.join(record.missing)}"] if record.missing else []
    taken, refused = record.limits if record.tested else ("", "")
    limits = (f" for {taken}" if taken else "") + (f"; {refused} refused" if refused else "")
    return f"{'passed' if record.passed else 'FAILED'}{limits}: {', '.join(words)}"


def rule_names(record: Record, outcomes: Iterable[Outcome]) -> str:
    """Name the rules, with their dtype where there are several; an error as such."""
    single = len(record.dtypes) == 1
    names = []
    for outcome in outcomes:
        name = outcome.rule if single else outcome.id
        plain = outcome.status in ("passed", "failed", "suspect", "not judged")
        names.append(name if plain else f"{name} ({outcome.status})")
    return ", ".join(names)


def count(n: int, noun: str) -> str:
    """Return "1 rule", "2 rules"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"
