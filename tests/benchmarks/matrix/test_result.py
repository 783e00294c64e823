"""The result of a matrix, and its JSON."""

import json
from pathlib import Path

import pytest

import benchmarks.matrix.result as result
from benchmarks.matrix.result import Matrix, Row, Run, list_rules, read_matrix
from npattn.errors import OptionError
from npattn.testing import check
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets import TARGETS
from npattn.testing.targets.numpy import flash
from tests.json_schema import errors

SCHEMA = json.loads((Path(result.__file__).parent / "schema.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def matrix():
    report = check(flash, examples=2, only=["agreement-o"], framework="numpy").as_dict()
    runs = (
        Run("numpy.flash", "float32", "done", "", 0.5, report),
        Run("torch.sdpa", "float32", "not run", "torch, which is not installed"),
    )
    targets = tuple(Row.of(TARGETS[run.target]) for run in runs)
    return Matrix({"examples": 2}, list_rules(["agreement-o"], runs), targets, runs)


def test_json_is_as_the_schema_says(matrix, tmp_path):
    matrix.to_json(tmp_path / "matrix.json")
    content = json.loads((tmp_path / "matrix.json").read_text("utf-8"))
    assert list(errors(content, SCHEMA)) == []
    assert content["matrix"] == result.VERSION == SCHEMA["properties"]["matrix"]["enum"][0]


def test_a_changed_field_breaks_the_schema(matrix):
    content = matrix.as_dict()
    content["runs"][0]["state"] = "lost"
    assert list(errors(content, SCHEMA)) == ["report.runs[0].state is 'lost'"]


def test_reading_gives_what_was_written(matrix, tmp_path):
    matrix.to_json(tmp_path / "matrix.json")
    assert read_matrix(tmp_path / "matrix.json") == matrix


@pytest.mark.parametrize("text", ["", "[]", '{"matrix": 2}', '{"version": 2}'])
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "matrix.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"matrix\.json"):
        read_matrix(path)


def test_columns_are_by_level_and_hold_what_reports_have():
    outcome = {"rule": "structure", "level": "degenerate", "semantics": "12", "about": "sizes"}
    runs = [Run("x", "float32", "done", report={"outcomes": [outcome]})]
    names = [(rule.name, rule.level) for rule in list_rules(["views", "agreement-o"], runs)]
    assert names == [("agreement-o", "values"), ("views", "conduct"), ("structure", "degenerate")]


def test_columns_are_those_of_the_register():
    assert {rule.name for rule in list_rules(PROPERTIES, [])} == set(PROPERTIES)


def test_targets_are_grouped_by_who_wrote_them():
    projects = {name: Row.of(target).project for name, target in TARGETS.items()}
    assert projects["numpy.flash"] == projects["npattn.torch"] == "npattn"
    assert projects["torch.sdpa"] == "torch"
    assert projects["transformers.t5"] == "transformers"


@pytest.mark.parametrize(
    ("name", "project", "versions", "own"),
    [
        ("pallas.gpu", "jax", {"jax": "0.11"}, "0.11"),
        ("keras.jax", "keras", {"jax": "0.11", "keras": "3.17"}, "3.17"),
        ("picogpt", "picogpt", {"gpt2": "2.3"}, "2.3"),
        ("torch.flex", "torch", {"numpy": "2.5"}, None),
        ("npattn.torch", "npattn", {"npattn": "0.7", "torch": "2.13"}, "0.7"),
    ],
)
def test_a_project_has_the_version_of_its_package(name, project, versions, own):
    row = Row.of(TARGETS[name], versions)
    assert (row.project, row.versions.get(project)) == (project, own)
