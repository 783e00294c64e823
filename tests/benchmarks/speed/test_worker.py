"""benchmarks/speed/scripts/worker.py measures what it says. No test is about speed."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "benchmarks" / "speed" / "scripts" / "worker.py"
QUICK = {"examples": 1, "only": ["agreement-o"], "diagnosis": False}


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_of_the_worker", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calls_are_made_in_turns(benchmark):
    made = []
    calls = {"here": lambda: made.append("here"), "there": lambda: made.append("there")}
    seconds = benchmark.measure(calls, 3)
    assert made == ["here", "there"] * 3
    assert all(s >= 0 for s in seconds.values())


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_small_calls_and_checks_are_made_here_and_there(benchmark):
    for here, there in (*benchmark.time_calls(2).values(), benchmark.time_check(**QUICK)):
        assert here > 0
        assert there > 0


@pytest.mark.thorough
def test_large_arrays_come_back(benchmark):
    seconds = benchmark.time_arrays(1 << 17, 1)
    assert set(seconds) == {"here", "worker", "mapping"}
    assert all(s > 0 for s in seconds.values())


def test_lines_are_printed(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "time_calls", lambda: {"a call": (0.25e-3, 0.5e-3)})
    monkeypatch.setattr(benchmark, "time_check", lambda: (10.0, 13.0))
    seconds = {"here": 1e-3, "worker": 3e-3, "mapping": 1e-3}
    monkeypatch.setattr(benchmark, "time_arrays", lambda size: seconds)
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["+0.250", "times"]
    assert "1.30 times" in lines[1]
    assert "+2.0 ms (1.0 GiB/s), at least 1.0 mapped" in lines[2]
