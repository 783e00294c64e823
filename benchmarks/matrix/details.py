"""Details of a matrix as HTML: what a page shows when a cell or a target is opened."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.matrix.cells import Cell
from npattn.testing.excerpt import Excerpt
from npattn.testing.report.cause import Cause
from npattn.testing.report.maps import heat_maps
from npattn.testing.report.markup import code_block, safe_text
from npattn.testing.report.words import convention_flag

LINES = 6
"""Lines of a message at most."""

Content = Mapping[str, Any]


class Extent(NamedTuple):
    """How much of a failure is shown."""

    maps: int  # results that are drawn, the worst first
    # characters of the longest script; in place of a longer one stands the command for it
    longest: int


EXTENTS = (Extent(3, 8000), Extent(1, 8000), Extent(1, 3000), Extent(1, 0), Extent(0, 0))
"""The most first: a page takes the first with which it is small enough."""


def pack(details: object) -> str:
    """Return an object of JSON's types as text: deflated (RFC 1950), in base64.

    A browser reads it with DecompressionStream("deflate").
    """
    text = json.dumps(details, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")


def cell_details(run: Content, cell: Cell, extent: Extent = EXTENTS[0]) -> str:
    """Return what is known of a cell: the cause, the smallest problem, maps and the script."""
    outcome = cell.outcome
    if outcome is None:
        return _paragraph(run["why"] or cell.state.about)
    if not cell.failed:
        return "".join(_paragraph(line) for line in _plain_lines(outcome))
    lines = outcome["message"].splitlines()
    more = f"\n… and {len(lines) - LINES} more lines" if len(lines) > LINES else ""
    parts = [*_cause(run["report"], outcome), "<h3>What came out</h3>"]
    parts.append(code_block("\n".join(lines[:LINES]) + more))
    wrong = [c for c in outcome["comparisons"] if c.get("excerpt")]
    parts += [heat_maps(c["name"], Excerpt.from_dict(c["excerpt"])) for c in wrong[: extent.maps]]
    parts += [*_problem(outcome), *_script(run, outcome, extent.longest)]
    return "".join(parts)


def _paragraph(text: str) -> str:
    return f"<p>{safe_text(text)}</p>" if text else ""


def _plain_lines(outcome: Content) -> Iterator[str]:
    """Yield what is to say of an outcome that is no failure."""
    yield outcome["message"]
    if outcome["examples"]:
        yield f"{outcome['examples']} problems were tried."
    if outcome["status"] == "passed" and outcome["worst"]:
        yield f"The largest error is {float(outcome['worst']):.2g} of its tolerance."


def _cause(report: Content, outcome: Content) -> Iterator[str]:
    """Yield the cause that explains a failure, and when the rule passes."""
    name = f"{outcome['rule']}[{outcome['dtype']}]"
    contents = [one for one in report["causes"] if name in one["rules"]]
    # Structure has an outcome at each level, and may have as many causes.
    contents = [one for one in contents if one["name"] == outcome["diagnosis"]] or contents
    for content in contents:
        keys = ("text", "name", "passes_when", "conventions")
        cause = Cause(rules=(), **{key: content[key] for key in keys})
        yield f"<h3>Cause</h3>{_paragraph(cause.text)}"
        yield _paragraph(cause.passes_when)
        flag = convention_flag(cause)
        yield f"<p>It passes with <code>{safe_text(flag)}</code></p>" if flag else ""
    if not contents:
        yield "<h3>Cause</h3><p>No known cause reproduces it.</p>"
    if promise := report["not_promised"].get(outcome["rule"]):
        yield f"<p>Not promised: {safe_text(promise)}</p>"
    if reason := report["expected"].get(name, report["expected"].get(outcome["rule"])):
        yield f"<p>Expected: {safe_text(reason)}</p>"


def _problem(outcome: Content) -> Iterator[str]:
    """Yield the shapes and options of the smallest failing problem, and the line that makes it."""
    if outcome["problem"] is not None:
        shapes, dtypes = outcome["problem"]["shapes"], outcome["problem"]["dtypes"]
        arrays = [f"{n} {dtypes[n]} ({', '.join(map(str, x))})" for n, x in shapes.items()]
        options = [f"{n} {x}" for n, x in outcome["problem"]["options"].items()]
        yield f"<h3>Smallest failing problem</h3>{_paragraph(', '.join(arrays + options))}"
    if outcome["recipe"] is not None:
        yield code_block(outcome["recipe"]["line"])


def _script(run: Content, outcome: Content, longest: int) -> Iterator[str]:
    """Yield the script with a button that copies it, or the command that writes a long one."""
    script = outcome["script"]
    if not script:
        return
    settings = run["report"]["settings"]
    command = (
        f"npattn check {run['target']} --dtype {run['dtype']} --only {outcome['rule']} "
        f"{'' if run.get('device', 'CPU') == 'CPU' else '--device cuda '}"
        f"--examples {settings.get('examples', 100)} --seed {settings.get('seed', 0)} "
        "--script FILE"
    )
    long = len(script) > longest
    title = f"Command that writes its script of {len(script)} characters" if long else "Script"
    copy = '<button type="button" class="copy">copy</button>'
    yield f"<h3>{title}</h3>{copy}{code_block(command if long else script)}"


def target_details(target: Content, runs: Sequence[Content]) -> str:
    """Return what is known of a target: versions, causes, and what was not tested or is refused."""
    versions = [f"{package} {version}" for package, version in target["versions"].items()]
    parts = [_paragraph(target["about"]), _paragraph(target["words"])]
    parts.append(_paragraph(", ".join([*versions, f"device {target['device']}"])))
    for run in runs:
        report = run["report"]
        device = run.get("device", "CPU")
        parts.append(f"<h3>{safe_text(run['dtype'])}{'' if device == 'CPU' else f' {device}'}</h3>")
        parts.append(_paragraph(f"{run['state']}: {run['why']}" if run["why"] else ""))
        if report is None:
            continue
        packages = report["settings"].get("versions", {}).items() if device != "CPU" else ()
        own = f" with {', '.join(f'{name} {version}' for name, version in packages)}"
        parts.append(_paragraph(f"Judged in {run['seconds']:.0f} seconds{own * bool(packages)}."))
        parts.append(_items("Causes of failures", [c["text"] for c in report["causes"]]))
        parts.append(_items("Not tested", report["untested"]))
        parts.append(_items("Refused", report["refused"]))
    return "".join(parts)


def _items(title: str, lines: Sequence[str]) -> str:
    """Return a list under its title; "" if it is empty."""
    items = "".join(f"<li>{safe_text(line)}</li>" for line in lines if line)
    return f"<h4>{title}</h4><ul>{items}</ul>" if items else ""
