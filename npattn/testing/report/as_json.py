"""Report as JSON: real objects, numbers and indices; schema.json beside this file describes it.

A number that JSON does not know is the text "nan", "inf" or "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.options import OPTIONS
from npattn.problem import Problem
from npattn.testing.cases.options import SCORE_MODS
from npattn.testing.cases.recipe import Recipe
from npattn.testing.compare import Comparison
from npattn.testing.excerpt import Excerpt
from npattn.testing.report.cause import Cause
from npattn.testing.report.escape import escape_controls
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.record import Group, Record
from npattn.testing.report.sensitivity import Sensitivity

__all__ = ["VERSION", "as_dict"]

VERSION = 2
"""Version of the format: schema.json has the same."""


def as_dict(record: Record) -> dict[str, Any]:
    """Return the content of the JSON."""
    return {
        "version": VERSION,
        "target": escape_controls(record.target),
        "passed": record.passed,
        "require": list(record.require),
        "strict": record.strict,
        "settings": _plain(record.settings),
        "untested": _plain(record.untested),
        "refused": _plain(record.refused),
        "expected": _plain(record.expected),
        "stale": _plain(record.stale),
        "missing": list(record.missing),
        "interrupted": record.interrupted,
        "sensitivity": _sensitivity(record.sensitivity if record.passed else None),
        "not_promised": _plain(record.taken_back),
        "levels": {level: _level(record, xs) for level, xs in record.by_level().items()},
        "asked": {
            dtype: {
                "ranges": {letter: list(ends) for letter, ends in asked.ranges.items()},
                "skipped_models": _plain(record.skipped.get(dtype, {})),
            }
            for dtype, asked in record.asked.items()
        },
        "causes": [_cause(record, cause) for cause in record.causes],
        "outcomes": [_outcome(record, outcome) for outcome in record.outcomes],
    }


def _sensitivity(sensitivity: Sensitivity | None) -> dict[str, Any] | None:
    return None if sensitivity is None else {**vars(sensitivity), "rate": sensitivity.rate}


def _level(record: Record, outcomes: list[Outcome]) -> dict[str, Any]:
    passed = [o for o in outcomes if o.status == "passed"]
    return {
        "passed": len(passed),
        "failed": sum(record.is_bad(o) for o in outcomes),
        "counts": sum(record.counts(o) for o in outcomes),
        "not_applicable": sum(o.status == "not applicable" for o in outcomes),
        "worst": _number(max((o.worst for o in passed), default=0.0)),
    }


def _cause(record: Record, cause: Cause) -> dict[str, Any]:
    group = Group(cause, tuple(o for o in record.outcomes if o.id in cause.rules))
    return {
        "text": escape_controls(cause.text),
        "kind": cause.kind,
        "name": cause.name,
        "also": list(cause.also),
        "rules": list(cause.rules),
        "share": _number(cause.share),
        "passes_when": group.contrast,
        "conventions": None if cause.conventions is None else _plain(vars(cause.conventions)),
    }


def _outcome(record: Record, outcome: Outcome) -> dict[str, Any]:
    return {
        "rule": outcome.rule,
        "semantics": outcome.semantics,
        "about": outcome.about,
        "level": outcome.level,
        "dtype": outcome.dtype,
        "status": outcome.status,
        "counts": record.counts(outcome),
        "worst": _number(outcome.worst),
        "examples": outcome.examples,
        "message": escape_controls(outcome.message),
        "diagnosis": _plain(outcome.diagnosis),
        "comparisons": [_comparison(c) for c in outcome.comparisons],
        "problem": None if outcome.problem is None else _problem(outcome.problem),
        "recipe": _recipe(outcome.recipe, outcome.sampled),
        "script": outcome.script(),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    """Return the worst element of one result; a result of a wrong shape has a note alone."""
    numbers = {name: getattr(comparison, name) for name in ("got", "want", "allowed", "ratio")}
    return {
        "name": comparison.name,
        "index": list(comparison.index),
        **{name: _number(value) for name, value in numbers.items()},
        "wrong": comparison.wrong,
        "size": comparison.size,
        "note": escape_controls(comparison.note),
        "excerpt": None if comparison.excerpt is None else _excerpt(comparison.excerpt),
    }


def _excerpt(excerpt: Excerpt) -> dict[str, Any]:
    """Return the place and the elements; nine digits tell any two numbers of float32 apart."""
    names = {"got": 9, "want": 9, "allowed": 3}
    place = {"lead": list(excerpt.lead), "row": excerpt.row, "column": excerpt.column}
    return place | {name: _matrix(getattr(excerpt, name), n) for name, n in names.items()}


def _matrix(array: Array, digits: int) -> list[list[float | int | str]]:
    return [[_number(float(f"{x:.{digits}g}")) for x in row] for row in array]


def _problem(problem: Problem) -> dict[str, Any]:
    """Return shapes and dtypes of the arrays by name, and the other options."""
    problem = problem.materialise()
    arrays = {name: getattr(problem, name) for name in ("q", "k", "v", *OPTIONS)}
    options = {name: value for name, value in arrays.items() if not isinstance(value, np.ndarray)}
    arrays = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}
    default = {name: OPTIONS[name].default for name in options}
    changed = {name: x for name, x in options.items() if x != default[name]}
    return {
        "shapes": {name: list(x.shape) for name, x in arrays.items()},
        "dtypes": {name: x.dtype.name for name, x in arrays.items()},
        "options": _plain({**changed, "alignment": problem.alignment}),
    }


def _recipe(line: str, recipe: Recipe | None) -> dict[str, Any] | None:
    """Return the line that makes the problem, and the recipe; a rule may have changed it since."""
    if not line:
        return None
    fields = None if recipe is None else _plain(vars(recipe))
    return {"line": line, "changed": "then changed" in line, "fields": fields}


def _plain(value: Any) -> Any:
    """Return a value in the types of JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(x) for x in value]
    if value is None or isinstance(value, (bool, np.bool_)):
        return None if value is None else bool(value)
    if isinstance(value, (int, float, np.number)):
        return _number(value)
    if isinstance(value, str):
        return escape_controls(value)
    names = [name for name, mod in SCORE_MODS.items() if mod is value]
    return names[0] if names else escape_controls(repr(value))


def _number(value: Any) -> float | int | str:
    """Return a number, or the name of one that JSON does not know; a complex one as text."""
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (complex, np.complexfloating)):
        return str(value)
    value = float(value)
    if math.isnan(value):
        return "nan"
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
