"""Report as JSON: real objects, numbers and indices; schema.json beside this file describes it.

The fields are those of the schema, so that none can be written that it does not describe. A number
that JSON does not know is the text "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from npattn.problem import Problem
from npattn.problem.options import OPTIONS
from npattn.testing.cases.options import SCORE_MODS
from npattn.testing.comparison import Comparison
from npattn.testing.report.cause import Cause
from npattn.testing.report.escape import escape_controls
from npattn.testing.report.markup import HERE
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.pair import Reading
from npattn.testing.report.record import Record

VERSION = 3
"""Version of the format: schema.json has the same."""
DIGITS = {"got": 9, "want": 9, "allowed": 3}
"""Digits of the numbers of an excerpt: nine tell any two of float32 apart."""


@cache
def _names(*path: str) -> tuple[str, ...]:
    """Return the fields of an object in the schema, by the names that lead to it."""
    schema = json.loads((HERE / "schema.json").read_text("utf-8"))
    for name in path:
        schema = schema["properties"][name]
        schema = schema.get("items", schema.get("additionalProperties", schema))
        schema = next((x for x in schema.get("anyOf", ()) if "properties" in x), schema)
    return tuple(schema["properties"])


def _fields(value: Any, *path: str, **replaced: Any) -> dict[str, Any]:
    """Return the fields of the object at a path in the schema: `own` ones, else attributes."""
    return {n: replaced[n] if n in replaced else _plain(getattr(value, n)) for n in _names(*path)}


def as_dict(record: Record) -> dict[str, Any]:
    """Return the content of the JSON."""
    sensitivity = record.sensitivity if record.passed else None
    asked = {
        dtype: {"ranges": x.ranges, "skipped_models": record.skipped.get(dtype, {})}
        for dtype, x in record.asked.items()
    }
    return _fields(
        record,
        version=VERSION,
        sensitivity=sensitivity and _fields(sensitivity, "sensitivity"),
        not_promised=_plain(record.taken_back),
        levels={level: _level(record, xs) for level, xs in record.by_level().items()},
        asked=_plain(asked),
        pair=record.pair and _plain(vars(record.pair)),
        reading=record.reading and _reading(record.reading),
        causes=[_cause(cause) for cause in record.causes],
        other_causes=[_cause(cause) for cause in record.other_causes],
        outcomes=[_outcome(record, outcome) for outcome in record.outcomes],
    )


def _reading(reading: Reading) -> dict[str, Any]:
    excerpt = reading.excerpt
    arrays = {"got": excerpt.got, "want": excerpt.want}
    rounded = {
        name: [[_plain(float(f"{x:.{DIGITS[name]}g}")) for x in row] for row in array]
        for name, array in arrays.items()
    }
    place = {"lead": list(excerpt.lead), "row": excerpt.row, "column": excerpt.column}
    return _fields(reading, "reading", wrong=reading.wrong.tolist(), **place, **rounded)


def _cause(cause: Cause) -> dict[str, Any]:
    return _fields(
        cause, "causes", conventions=_plain(cause.conventions and vars(cause.conventions))
    )


def _level(record: Record, outcomes: list[Outcome]) -> dict[str, Any]:
    passed = [o.worst for o in outcomes if o.status == "passed"]
    return {
        "passed": len(passed),
        "failed": sum(map(record.is_bad, outcomes)),
        "not_judged": sum(o.status == "not judged" for o in outcomes),
        "counts": sum(map(record.counts, outcomes)),
        "not_applicable": sum(o.status == "not applicable" for o in outcomes),
        "worst": _plain(max(passed, default=0.0)),
    }


def _outcome(record: Record, outcome: Outcome) -> dict[str, Any]:
    """Return the fields of an outcome, its recipe, power and script, and whether it counts."""
    fields = outcome.sampled and vars(outcome.sampled)  # a rule may have changed the problem since
    recipe = {"line": outcome.recipe, "changed": "then changed" in outcome.recipe, "fields": fields}
    return _fields(
        outcome,
        "outcomes",
        counts=record.counts(outcome),
        comparisons=[_comparison(c) for c in outcome.comparisons],
        problem=outcome.problem and _problem(outcome.problem),
        recipe=_plain(recipe) if outcome.recipe else None,
        power={name: _fields(power, "outcomes", "power") for name, power in outcome.powers.items()},
        script=outcome.script(),
    )


def _comparison(comparison: Comparison) -> dict[str, Any]:
    """Return the worst element of one result; a result of a wrong shape has a note alone."""
    excerpt = comparison.excerpt
    arrays = {n: getattr(excerpt, n) for n in DIGITS} if excerpt else {}
    rounded = {
        name: [[_plain(float(f"{x:.{DIGITS[name]}g}")) for x in row] for row in array]
        for name, array in arrays.items()
    }
    path = ("outcomes", "comparisons")
    shown = excerpt and _fields(excerpt, *path, "excerpt", **rounded)
    return _fields(comparison, *path, excerpt=shown)


def _problem(problem: Problem) -> dict[str, Any]:
    """Return shapes and dtypes of the arrays by name, and the other options."""
    problem = problem.materialise()
    values = {name: getattr(problem, name) for name in ("q", "k", "v", *OPTIONS)}
    arrays = {name: x for name, x in values.items() if isinstance(x, np.ndarray)}
    options = {n: x for n, x in values.items() if n not in arrays and x != OPTIONS[n].default}
    return {
        "shapes": {name: list(x.shape) for name, x in arrays.items()},
        "dtypes": {name: x.dtype.name for name, x in arrays.items()},
        "options": _plain({**options, "alignment": problem.alignment}),
    }


def _plain(value: Any) -> Any:
    """Return a value in the types of JSON; a complex number is text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(x) for x in value]
    if isinstance(value, np.generic):
        value = value.item() if value.dtype.kind in "biufc" else float(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, str):
        return escape_controls(value)
    names = [name for name, mod in SCORE_MODS.items() if mod is value]
    return names[0] if names else escape_controls(repr(value))
