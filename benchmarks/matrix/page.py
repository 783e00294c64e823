"""Page of a matrix: targets × rules as one file without network, its details packed inside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import groupby
from typing import Any

from benchmarks.matrix.cells import STATES, Cell, cells_of, compact
from benchmarks.matrix.details import EXTENTS, Extent, cell_details, pack, target_details
from npattn.testing.levels import LEVELS, REQUIRED, Level
from npattn.testing.report.markup import document, safe_text
from npattn.testing.report.outcome import OUT_OF_TIME
from npattn.testing.report.page import SCRIPT, STYLE

MOST = 3_000_000
"""Bytes of a page at most: with many failures it shows less of each."""
Content = Mapping[str, Any]
Levels = Mapping[Level, Sequence[Content]]


def page(matrix: Content) -> str:
    """Return a matrix as a page of one file, which loads nothing.

    Parameters
    ----------
    matrix : mapping
        As schema.json in this folder describes it; `Matrix.as_dict` returns it.

    Returns
    -------
    str
        HTML. A cell opens its cause, smallest problem, heat maps and script; two targets can be
        compared; rows and columns can be filtered.
    """
    for extent in EXTENTS:
        text = _page(matrix, extent)
        if len(text.encode("utf-8")) <= MOST:
            break
    return text


def _page(matrix: Content, extent: Extent) -> str:
    every = {level: [r for r in matrix["rules"] if r["level"] == level] for level in LEVELS}
    levels: Levels = {level: rules for level, rules in every.items() if rules}
    causes: dict[str, int] = {}
    body = [
        '<p><a href="../index.html">npattn</a></p>',
        "<h1>Which attention keeps which rule</h1>",
        *_introduction(matrix),
        *_controls(matrix, levels),
        '<section id="differences" hidden aria-live="polite"></section>',
        '<div class="grid"><table role="grid" aria-label="Implementations by rules">',
        *_head(levels),
        *_body(matrix, levels, causes),
        "</table></div>",
        '<dialog id="panel" aria-labelledby="panel-title"><header><h2 id="panel-title"></h2>'
        '<button type="button" id="close">close</button></header><div id="panel-body"></div>'
        '<footer><button type="button" id="before">◂ failure before</button> '
        '<button type="button" id="after">next failure ▸</button></footer></dialog>',
        _as_data("states", {s.key: [s.symbol, s.name, s.about] for s in STATES.values()}),
        _as_data("causes", list(causes)),
        *_details(matrix, levels, extent),
    ]
    files = resources.files("benchmarks.matrix")
    style, script = (files.joinpath(f"page.{x}").read_text("utf-8") for x in ("css", "js"))
    return document("npattn matrix", body, style=STYLE + style, script=SCRIPT + script)


def _as_data(name: str, value: object) -> str:
    """Return a value for the script; no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _device(run: Content) -> str:
    """Return the device of a run; files of earlier versions have none, and are of a CPU."""
    return str(run.get("device", "CPU"))


def _runs_of(matrix: Content, target: Content) -> list[Content]:
    return [run for run in matrix["runs"] if run["target"] == target["name"]]


# --- above the table ------------------------------------------------------------------------------


def _introduction(matrix: Content) -> Iterator[str]:
    """Yield what is shown, in sentences, and the legend."""
    targets, settings = matrix["targets"], matrix["settings"]
    projects = {target["project"] for target in targets}
    examples = settings.get("examples")
    each = f", {examples} examples a rule" if examples else ""
    about = (
        f"{len(targets)} implementations of {len(projects)} projects against "
        f"{len(matrix['rules'])} rules, judged by npattn {matrix['npattn']}{each}, on "
        f"{matrix['made']}. {_score(matrix)} A rule holds if every result stays within a derived "
        "tolerance of the exact one, under the conventions that the system documents. Open a cell "
        "for its cause, the smallest failing problem and a script that shows it."
    )
    yield f"<p>{safe_text(about)}</p>"
    chips = "".join(
        f'<span class="chip"><span class="{s.key}">{s.symbol}</span> {s.name}</span> '
        for s in STATES.values()
    )
    items = "".join(
        f'<li><span class="{state.key}">{state.symbol}</span> <b>{state.name}</b>: {state.about}'
        for state in STATES.values()
    )
    yield f'<details class="legend"><summary>Legend: {chips}</summary><ul>{items}</ul></details>'


def _score(matrix: Content) -> str:
    """Return in a sentence how many targets passed, of those that were judged."""
    reports: dict[str, list[Content]] = {}
    for run in matrix["runs"]:
        if run["report"] is not None:
            reports.setdefault(run["target"], []).append(run["report"])
    passed = sum(all(report["passed"] for report in several) for several in reports.values())
    return (
        f"{passed} of the {len(reports)} that ran keep all rules of the required levels "
        f"({', '.join(REQUIRED)}) in each dtype."
    )


def _controls(matrix: Content, levels: Levels) -> Iterator[str]:
    """Yield the filters, and the choice of two targets to compare."""
    names = [target["name"] for target in matrix["targets"]]
    projects = sorted({target["project"] for target in matrix["targets"]})
    dtypes = list(dict.fromkeys(run["dtype"] for run in matrix["runs"]))
    devices = list(dict.fromkeys(_device(run) for run in matrix["runs"]))
    rules = list(dict.fromkeys(rule["name"] for rule in matrix["rules"]))
    yield (
        '<details class="controls" open><summary>Filter and compare</summary><form role="search">'
        f"{_choice('project', projects)}{_text_field('target', names)}"
        f"{_choice('level', list(levels))}{_text_field('rule', rules)}{_choice('dtype', dtypes)}"
        f"{_choice('device', devices)}"
        '<label class="box"><input type="checkbox" id="only"> only differences</label>'
        f"{_choice('compare', names, nothing='–')}{_choice('with', names, nothing='–')}"
        '<button type="reset">reset</button></form></details><p id="count" role="status"></p>'
    )


def _choice(name: str, values: Sequence[str], nothing: str = "all") -> str:
    options = "".join(f"<option>{safe_text(value)}</option>" for value in values)
    first = f'<option value="">{nothing}</option>'
    return f'<label>{name} <select id="{name}">{first}{options}</select></label>'


def _text_field(name: str, values: Sequence[str]) -> str:
    options = "".join(f'<option value="{safe_text(value)}">' for value in values)
    field = f'<input id="{name}" list="{name}s" type="search" placeholder="part of a name">'
    return f'<label>{name} {field}</label><datalist id="{name}s">{options}</datalist>'


# --- the table ------------------------------------------------------------------------------------


def _head(levels: Levels) -> Iterator[str]:
    """Yield the two header rows: levels, and the rules of each with a column for all of them."""
    groups = "".join(
        f'<th scope="colgroup" colspan="{len(rules) + 1}" data-level="{level}">'
        f'<button type="button" aria-expanded="true" title="{LEVELS[level]}">{level}</button></th>'
        for level, rules in levels.items()
    )
    names = "".join(
        "".join(_rule_header(rule) for rule in rules)
        + f'<th scope="col" class="sum" data-level="{level}">all</th>'
        for level, rules in levels.items()
    )
    yield f'<thead><tr class="levels"><th rowspan="2" class="corner">dtype</th>{groups}</tr>'
    yield f'<tr class="rules">{names}</tr></thead>'


def _rule_header(rule: Content) -> str:
    attributes = {name: safe_text(rule[name]) for name in ("name", "level", "section", "about")}
    data = " ".join(f'data-{name}="{value}"' for name, value in attributes.items())
    button = f'<button type="button" title="{attributes["about"]}">{attributes["name"]}</button>'
    return f'<th scope="col" {data}>{button}</th>'


def _body(matrix: Content, levels: Levels, causes: dict[str, int]) -> Iterator[str]:
    """Yield the rows, grouped by project: a line of words for each target, then its dtypes."""
    width = 1 + sum(len(rules) + 1 for rules in levels.values())
    judged = {run["target"] for run in matrix["runs"] if run["report"] is not None}
    shown = {target["project"] for target in matrix["targets"] if target["name"] in judged}
    targets = sorted(
        matrix["targets"], key=lambda x: (x["project"] not in shown, x["project"].lower())
    )
    order = {target["name"]: i for i, target in enumerate(matrix["targets"])}
    for project, members in groupby(targets, key=lambda target: target["project"]):
        name = safe_text(project)
        yield (
            f'<tbody class="project" data-project="{name}"><tr><th scope="rowgroup" '
            f'colspan="{width}"><span class="stick">{name}</span></th></tr></tbody>'
        )
        for target in members:
            where = f'data-target="{safe_text(target["name"])}" data-project="{name}"'
            yield f'<tbody class="target" data-block="{order[target["name"]]}" {where}>'
            yield _name_row(target, width)
            for run in _runs_of(matrix, target):
                yield _run_row(run, levels, causes, width - 1)
            yield "</tbody>"


def _name_row(target: Content, width: int) -> str:
    version = target["versions"].get(target["project"], "")
    number = f"{target['project']} {version}" if version else ""  # others stand in its panel
    return (
        f'<tr class="name"><th scope="rowgroup" colspan="{width}"><div class="stick">'
        f'<button type="button">{safe_text(target["name"])}</button> '
        f'<span class="version">{safe_text(number)}</span> '
        f'<span class="words">{safe_text(target["words"])}</span></div></th></tr>'
    )


def _run_row(run: Content, levels: Levels, causes: dict[str, int], width: int) -> str:
    """Return the cells of a run; a single wide one if it has no report."""
    dtype, device = safe_text(run["dtype"]), safe_text(_device(run))
    row = f'<tr data-dtype="{dtype}" data-device="{device}">'
    dtype += "" if device == "CPU" else f" {device}"
    if run["report"] is None:
        state = STATES[run["state"]]
        why = f"{state.symbol} {state.name}: {safe_text(run['why'])}"
        cells = f'<td class="{state.key} wide" colspan="{width}"><span class="stick">{why}</span>'
        return f'{row}<th scope="row">{dtype}</th>{cells}</tr>'
    parts = []
    for rules in levels.values():
        found = cells_of(run, rules)
        parts += [*(_cell(cell, causes) for cell in found), _summary(found)]
    verdict = STATES[_verdict(run["report"])]
    head = f'<th scope="row">{dtype} <b class="{verdict.key}">{verdict.symbol}</b></th>'
    return f"{row}{head}{''.join(parts)}</tr>"


def _verdict(report: Content) -> str:
    """Return the state of a whole run; one that only ran out of time is neither right nor wrong."""
    outcomes = report["outcomes"]
    late = any(one["message"] == OUT_OF_TIME for one in outcomes)
    if late and not any(one["counts"] for one in outcomes):
        return "not asked"
    return "passed" if report["passed"] else "failed"


def _cell(cell: Cell, causes: dict[str, int]) -> str:
    number = compact(cell.ratio)
    small = f"<i>{number}</i>" if number else ""
    cause = _cause_number(cell, causes)
    return f"<td class={cell.state.key}{cause}>{cell.state.symbol}{small}"


def _cause_number(cell: Cell, causes: dict[str, int]) -> str:
    """Return the attribute that names the cause of a failure; each text is written once."""
    if not cell.failed or cell.outcome is None or not cell.outcome["diagnosis"]:
        return ""
    return f" data-c={causes.setdefault(cell.outcome['diagnosis'], len(causes))}"


def _summary(cells: Sequence[Cell]) -> str:
    """Return the cell of a whole level: what is worst in it, and how many of how many rules."""
    judged = [c for c in cells if c.outcome and c.outcome["status"] != "not applicable"]
    counted = [c for c in judged if c.failed and c.outcome and c.outcome["counts"]]
    broken = counted or [c for c in judged if c.failed]
    if not judged:
        state, number = STATES["lacks"], ""
    elif broken:
        state, number = broken[0].state, f"{len(broken)}/{len(judged)}"
        state = STATES["failed"] if counted else state
    else:
        state, number = STATES["passed"], str(len(judged))
    return f'<td class="{state.key} sum">{state.symbol}<i>{number}</i>'


def _details(matrix: Content, levels: Levels, extent: Extent) -> Iterator[str]:
    """Yield one packed block for each target: its own details, and those of each cell."""
    rules = [rule for group in levels.values() for rule in group]
    for i, target in enumerate(matrix["targets"]):
        runs = _runs_of(matrix, target)
        cells = [[cell_details(run, x, extent) for x in cells_of(run, rules)] for run in runs]
        block = pack({"target": target_details(target, runs), "cells": cells})
        yield f'<script type="text/plain" id="block-{i}">{block}</script>'
