"""Cells of a matrix: their states, told apart without colours, and their numbers."""

import pytest

from benchmarks.matrix.cells import BAD, STATES, cells_of, compact

RULE = {"name": "views", "level": "conduct"}


def cell(run_state="done", **fields):
    outcome = {"rule": "views", "level": "conduct", "status": "passed", "worst": 0.5}
    outcome |= {"counts": fields.get("status") in BAD, "message": "has no sinks"} | fields
    report = {"outcomes": [outcome], "not_promised": {"causal": "says it"}}
    return cells_of({"state": run_state, "report": report}, [RULE])[0]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "passed"),
        ({"status": "failed"}, "failed"),
        ({"status": "failed", "counts": False}, "failed, not required"),
        ({"status": "error"}, "raised"),
        ({"status": "error", "counts": False}, "failed, not required"),
        ({"status": "crashed"}, "crashed"),
        ({"status": "timed out", "counts": False}, "timed out"),
        ({"status": "suspect"}, "suspect"),
        ({"status": "not applicable"}, "lacks"),
        ({"status": "not applicable", "message": "refuses K < H"}, "refused"),
        ({"level": "values"}, "silent"),
        ({"level": "values", "run_state": "timed out"}, "timed out"),
    ],
)
def test_outcome_becomes_a_state(fields, state):
    found = cell(**fields)
    assert found.state is STATES[state]
    assert found.failed == (fields.get("status") in BAD)


def test_failure_that_is_not_promised_is_told_apart():
    run = {"state": "done", "report": {"not_promised": {"views": "says so"}, "outcomes": [
        {"rule": "views", "level": "conduct", "status": "failed", "counts": False, "worst": "inf"}
    ]}}  # fmt: skip
    (found,) = cells_of(run, [RULE])
    assert found.state is STATES["failed, not promised"]
    assert found.ratio == float("inf")


@pytest.mark.parametrize("state", ["not run", "crashed", "timed out"])
def test_run_without_a_report_is_in_one_state(state):
    assert [x.state.name for x in cells_of({"state": state, "report": None}, [RULE])] == [state]


def test_states_differ_in_symbol_and_letter():
    assert all(name == state.name for name, state in STATES.items())
    for field in ("symbol", "key", "about"):
        assert len({getattr(state, field) for state in STATES.values()}) == len(STATES)


def test_numbers_fit_a_narrow_cell():
    numbers = [m * 10.0**e for e in range(-9, 99) for m in (1, 1.7, 9.949, 9.951, 9.996)]
    assert max(len(compact(x)) for x in numbers) == 4
    assert {compact(x) for x in numbers if x > 1} & {"", "0", "1"} == set()
