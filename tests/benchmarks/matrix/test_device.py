"""Matrices on a device within a budget, by a clock that the units move; wheels that are carried."""

import subprocess
from types import SimpleNamespace

import pytest

from benchmarks.journal import Journal
from benchmarks.matrix import carry, device
from benchmarks.matrix.device import LEAST, START, name_device
from benchmarks.matrix.result import merge_matrices
from benchmarks.matrix.run import run_matrix
from npattn.errors import OptionError
from npattn.testing.report.outcome import OUT_OF_TIME
from npattn.testing.targets import TARGETS
from npattn.testing.units.unit import Result, Unit, do_unit
from tests.benchmarks.matrix.test_run import answer_of
from tests.testing.units.inline import Inline

TWO = {"targets": ["numpy.naive", "numpy.flash"], "device": "cpu"}


def make_result(unit):
    """Return a report of one rule; of a sweep, one of a sweep."""
    report = answer_of(unit).report | {"passed": True, "untested": [], "causes": []}
    rule = "sweep" if unit.judges.get("sweep") else "views"
    outcomes = [one | {"rule": rule} for one in report["outcomes"]]
    return Result("done", report=report | {"outcomes": outcomes})


@pytest.fixture
def judged():
    """Judge units, each in START seconds and its share of the budget, and remember them."""
    seen = SimpleNamespace(units=[], now=0.0, lost={})

    def judge(unit):
        seen.units.append(unit)
        seen.now += START + unit.judges["budget"]
        lost = seen.lost.get(unit.key)
        return Result(lost, "device lost") if lost else make_result(unit)

    seen.run = lambda budget, ends_after=None, **more: run_matrix(
        **TWO | more, budget=budget, clock=lambda: seen.now, executor=Inline(judge, ends_after)
    )
    return seen


def test_units_come_by_dtype_and_share_the_budget(judged):
    matrix = judged.run(12 * (START + 17))
    names = ["numpy.naive {}", "numpy.flash {}", "numpy.naive {} sweep", "numpy.flash {} sweep"]
    wanted = [name.format(dtype) for dtype in device.DTYPES for name in names]
    assert [unit.key for unit in judged.units] == wanted
    assert {unit.judges["budget"] for unit in judged.units} == {17}
    assert all(unit.calls == {"device": "cpu"} for unit in judged.units)
    assert {o["rule"] for run in matrix.runs for o in run.report["outcomes"]} == {"views", "sweep"}
    assert not any(run.report["passed"] for run in matrix.runs)  # the sweep has failed
    assert {run.device for run in matrix.runs} == {"CPU"}
    assert set(device.TARGETS) <= set(TARGETS)


def test_what_was_not_asked_is_said(judged):
    matrix = judged.run(3 * (START + LEAST), dtypes=["bfloat16"])
    assert matrix.runs[1].report["untested"] == [f"sweep and long: {OUT_OF_TIME}"]
    with pytest.raises(OptionError, match="blocks is 3, must be 1 with a budget"):
        judged.run(LEAST, blocks=3)
    judged.lost = {"numpy.naive bfloat16": "timed out"}  # when the budget is over
    nothing = judged.run(START + LEAST)
    assert {(run.state, run.why) for run in nothing.runs} == {("not asked", OUT_OF_TIME)}


def test_a_lost_device_costs_one_row(judged):
    lost = ["numpy.naive bfloat16", "numpy.flash bfloat16 sweep", "numpy.naive bfloat16 sweep"]
    judged.lost = dict.fromkeys(lost[:2], "crashed")
    naive, flash = judged.run(10_000, dtypes=["bfloat16"]).runs
    assert [o["rule"] for o in naive.report["outcomes"]] == ["sweep"]
    assert flash.report["untested"] == ["sweep and long: crashed: device lost"]
    assert [run.state for run in (naive, flash)] == ["crashed"] * 2
    assert not naive.report["passed"] | flash.report["passed"]
    judged.lost = dict.fromkeys(lost[::2], "crashed")
    assert [run.state for run in judged.run(10_000).runs] == ["crashed"] + ["done"] * 5


def test_a_budget_goes_on_where_it_ended(judged, tmp_path):
    path, asked = tmp_path / "journal", TWO | {"budget": 10_000}
    with pytest.raises(KeyboardInterrupt):
        judged.run(10_000, ends_after=5, journal=Journal.create("matrix", path, asked))
    matrix = judged.run(10_000, journal=Journal.resume("matrix", path))
    assert len({unit.key for unit in judged.units}) == len(judged.units) == 12
    assert {run.state for run in matrix.runs} == {"done"}


def test_results_of_two_devices_are_one_matrix(judged, monkeypatch):
    cpu = judged.run(10_000)
    line = "NVIDIA H100 80GB HBM3, 580.1\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=line))
    assert name_device("cuda") == ("H100", "NVIDIA H100 80GB HBM3, driver 580.1")
    gpu = judged.run(10_000, device="cuda", targets=["numpy.flash"])
    both = merge_matrices([cpu, gpu])
    assert [run.device for run in both.runs] == ["CPU"] * 6 + ["H100"] * 3
    with pytest.raises(OptionError, match="bfloat16 CPU is in two"):
        merge_matrices([cpu, cpu])


def test_a_sweep_is_asked_in_the_process_of_the_unit():
    pytest.importorskip("torch")
    judges = {"sweep": 2, "budget": 60.0}
    unit = Unit(target="torch.sdpa-math", dtype="float32", rules=("sweep",), judges=judges,
                calls={"device": "cpu"})  # fmt: skip
    assert [o["examples"] for o in do_unit(unit).report["outcomes"] if o["rule"] == "sweep"] == [2]


def test_wheels_that_do_not_fit_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(carry, "FOLDER", tmp_path)
    (tmp_path / "other-1-cp27-cp27m-win32.whl").touch()
    (tmp_path / "site" / "flash_attn").mkdir(parents=True)
    carry.install(str(tmp_path / "site"))
    assert "other-1-cp27-cp27m-win32.whl is left out" in capsys.readouterr().err
    assert list((tmp_path / "site").iterdir()) == []
