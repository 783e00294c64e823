"""The JSON of a report: objects, numbers and indices, as the schema says."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import npattn.testing.report.as_json as as_json
from npattn import Conventions
from npattn.testing import Cause, Outcome, Report, check
from npattn.testing.excerpt import Excerpt
from npattn.testing.targets.numpy import flash
from tests.json_schema import errors

SCHEMA = json.loads((Path(as_json.__file__).parent / "schema.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def report():
    def f(q, k, v, mask=None, causal=False):
        if causal:
            raise FloatingPointError("never \x1b[2J \ud800")
        out = flash(q, k, v, mask)
        out[..., -1, :] *= np.float32(2)
        return out

    only = ["agreement", "empty-row", "views", "hidden-nan-v"]
    report = check(f, examples=3, only=only, framework="numpy", expect={"views": "slow"})
    cause = Cause("x \x1b", ("agreement-o[float32]",), conventions=Conventions())
    return replace(report, causes=(cause,))


def written(report, folder):
    report.to_json(folder / "report.json")
    raw = (folder / "report.json").read_bytes()

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(raw.decode("utf-8"), parse_constant=no_constant)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_json_is_as_the_schema_says(report, tmp_path):
    data = written(report, tmp_path)
    assert list(errors(data, SCHEMA)) == []
    assert data["version"] == as_json.VERSION
    assert {o["level"] for o in data["outcomes"]} >= {"values", "edges"}
    assert "\\x1b[2J \\ud800" in json.dumps(data, ensure_ascii=False).replace("\\\\", "\\")


def test_schema_sees_what_is_missing_or_of_another_kind(report, tmp_path):
    data = written(report, tmp_path)
    for change in ({"passed": "no"}, {"outcomes": [{}]}, {"other": 1}, {"version": 1}):
        assert list(errors({**data, **change}, SCHEMA)), change
    del data["causes"]
    assert list(errors(data, SCHEMA)) == ["report lacks causes"]


def test_failure_has_numbers_and_indices(report):
    (outcome,) = (o for o in report.as_dict()["outcomes"] if o["rule"] == "agreement-o")
    worst = outcome["comparisons"][0]
    assert worst["name"] == "o"
    excerpt = Excerpt.from_dict(worst["excerpt"])
    row, column = worst["index"][-2] - excerpt.row, worst["index"][-1] - excerpt.column
    assert excerpt.got.astype("float32")[row, column] == worst["got"]
    assert excerpt.ratio.argmax() == row * excerpt.ratio.shape[1] + column
    assert worst["index"][-2] == outcome["problem"]["shapes"]["q"][-2] - 1
    assert abs(worst["got"] - worst["want"]) > worst["allowed"] > 0
    assert worst["ratio"] == outcome["worst"] > 1
    assert outcome["problem"]["dtypes"]["q"] == "float32"
    assert outcome["recipe"]["fields"]["dtype"] == "float32"
    assert outcome["recipe"]["line"].startswith("Recipe(")
    assert outcome["counts"]


@pytest.mark.parametrize(
    ("value", "text"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (np.float32(2), 2.0)]
)
def test_number_that_json_lacks_is_a_word(value, text, tmp_path):
    outcome = Outcome("views", "15", "Views.", "float32", "failed", worst=value)
    data = written(Report("f", (outcome,), (), {"a": (value, {"b": None}, True)}), tmp_path)
    assert data["outcomes"][0]["worst"] == text
    assert data["settings"] == {"a": [text, {"b": None}, True]}
    assert data["outcomes"][0]["problem"] is None
