"""Reports for pipelines: annotations of GitHub, Markdown and SARIF.

Each reads a report and the place of the judged function, and prints nothing.
"""

from __future__ import annotations

from typing import Any

from npattn.testing.report import words
from npattn.testing.report.place import Place
from npattn.testing.report.record import FailureGroup, Record

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def annotate(record: Record, place: Place | None) -> str:
    """Return a line for each cause that counts, as GitHub Actions reads them in a log."""
    lines = []
    for group in record.groups():
        where = "" if place is None else f"file={_escape(place.file, True)},line={place.line},"
        title = _escape(f"npattn: {_title(group)}", True)
        lines.append(f"::error {where}title={title}::{_escape(_message(record, group))}")
    if not lines and not record.passed:
        lines.append(f"::error title=npattn::{_escape(words.verdict(record))}")
    return "\n".join(lines)


def markdown(record: Record) -> str:
    """Return the report as Markdown: the verdict, the causes, and a table of the levels."""
    lines = [f"### npattn check {_code(record.target)}", "", words.verdict(record), ""]
    for group in record.groups():
        lines += [f"- **{_prose(_title(group))}**", f"  {_prose(_message(record, group))}"]
    lines += [""] if record.groups() else []
    lines += ["| level | result |", "|---|---|"]
    for level, outcomes in record.by_level().items():
        line = words.level_line(record, level, outcomes)
        lines.append(f"| {level} | {_prose(line.removeprefix(level).lstrip(': '))} |")
    if record.refused:
        lines += ["", "<details><summary>refused</summary>", ""]
        lines += [f"- {_prose(text)}" for text in record.refused]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def sarif(record: Record, place: Place | None, version: str) -> dict[str, Any]:
    """Return the report as a log of SARIF 2.1.0: one result for each failed rule that counts."""
    failed = [(o, g.cause) for g in record.groups() for o in g.outcomes]
    location: list[dict[str, Any]] = []
    if place is not None:
        region = {"startLine": place.line}
        location = [
            {"physicalLocation": {"artifactLocation": {"uri": place.file}, "region": region}}
        ]
    rules = {o.rule: o.about for o, _ in failed}
    results = []
    for outcome, cause in failed:
        text = outcome.message if cause is None else f"{cause.text}\n{outcome.message}"
        results.append(
            {
                "ruleId": outcome.rule,
                "level": "error",
                "message": {"text": f"{outcome.id}: {text}"},
                "locations": location,
            }
        )
    driver = {
        "name": "npattn",
        "version": version,
        "rules": [
            {
                "id": name,
                "shortDescription": {"text": about},
                "help": {"text": f"npattn explain {name}"},
            }
            for name, about in rules.items()
        ],
    }
    run = {"tool": {"driver": driver}, "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _title(group: FailureGroup) -> str:
    """Return the cause in its first line, or the rule that shows a failure without one."""
    shown = group.smallest
    text = f"{shown.id} {shown.status}" if group.cause is None else group.cause.text
    return " ".join(text.split())


def _message(record: Record, group: FailureGroup) -> str:
    """Return the first line of a failure, and the rules that failed."""
    shown = group.smallest
    first = shown.message.partition("\n")[0] or shown.about
    return f"{shown.id}: {first}; failed: {words.rule_names(record, group.outcomes)}"


def _escape(text: str, in_property: bool = False) -> str:
    """Return text as a workflow command takes it."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else text


def _prose(text: str) -> str:
    """Return a line of text that Markdown shows as it is."""
    line = " ".join(text.split())
    for character in "\\`*_<>|[]":
        line = line.replace(character, f"\\{character}")
    return line


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"
