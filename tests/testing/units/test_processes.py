"""Units in processes of their own."""

import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from npattn.errors import OptionError
from npattn.testing.units.processes import Jobs, judge_in_process
from npattn.testing.units.unit import Result, Unit, do_unit

FLASH = Unit(target="numpy.flash", dtype="float32", rules=("agreement-o",), examples=2)
KILLS = """
import os, signal
def f(q, k, v):
    os.kill(os.getppid(), signal.SIGKILL)
"""


def judge(unit):
    return Result.from_text(judge_in_process(unit.to_text()))


@pytest.mark.thorough
def test_a_process_gives_what_this_one_gives():
    with ThreadPoolExecutor(1) as executor, Jobs(executor) as jobs:
        jobs.submit(FLASH)
        unit, result = jobs.wait()
        assert jobs.running() == []
    assert unit == FLASH
    assert replace(result, seconds=0) == replace(do_unit(FLASH), seconds=0)


@pytest.mark.thorough
def test_the_end_of_a_process_costs_its_unit(tmp_path):
    (tmp_path / "kills.py").write_text(KILLS)
    result = judge(replace(FLASH, target="kills.py:f", folder=str(tmp_path)))
    assert result == Result("crashed", "the judge ended with signal 9")


@pytest.mark.thorough
def test_errors_of_a_process_are_quoted(tmp_path):
    result = judge(replace(FLASH, folder=str(tmp_path / "nowhere")))
    assert result.state == "crashed"
    assert "exit code 1" in result.why
    assert "nowhere" in result.why


@pytest.mark.thorough
def test_processes_share_what_jax_compiled(tmp_path, monkeypatch):
    """The folder is the same for all, and is that of the user where there is one."""
    name = "JAX_COMPILATION_CACHE_DIR"
    (tmp_path / "says.py").write_text(
        "import os, pathlib\n"
        f"with pathlib.Path(__file__).with_name('folders').open('a') as file:\n"
        f"    print(os.environ[{name!r}], os.environ['XLA_FLAGS'], sep=';', file=file)\n"
        "def f(q, k, v):\n    raise SystemError('one call is enough')\n"
    )
    unit = replace(FLASH, target="says.py:f", folder=str(tmp_path))
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    judge(unit)
    judge(replace(unit, dtype="float64"))
    monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("XLA_FLAGS", "")
    judge(unit)
    lines = (line.split(";") for line in (tmp_path / "folders").read_text().splitlines())
    (first, flags), *others, last = lines
    assert [*map(tuple, others)] == [(first, flags)] * len(others)
    assert Path(first).is_dir()
    assert "optimization_level=0" in flags
    assert last == ["mine", ""]


def test_a_unit_ends_at_its_limit():
    result = judge(replace(FLASH, limit=0.01))
    assert (result.state, result.why) == ("timed out", "not done after 0.01 s")


@pytest.mark.nightly
def test_what_is_known_at_the_limit_is_kept(tmp_path):
    source = "import time\ndef f(q, k, v):\n    time.sleep(3)\n    return v.mean(-2) * q\n"
    (tmp_path / "slow.py").write_text(source)
    slow = replace(FLASH, target="slow.py:f", folder=str(tmp_path), timeout=60.0, limit=20.0)
    result = judge(replace(slow, rules=None))
    assert (result.state, result.why) == ("timed out", "not done after 20 s")
    assert result.report["interrupted"]


def test_leaving_ends_what_runs(tmp_path):
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(101)\n")
    start = time.monotonic()
    with ThreadPoolExecutor(1) as executor, Jobs(executor) as jobs:
        for seed in range(3):
            jobs.submit(replace(FLASH, target="hangs.py:f", folder=str(tmp_path), seed=seed))
        while len(jobs.running()) != 1:
            time.sleep(0.01)
    assert time.monotonic() - start < 101


def fail(err):
    """Return an executor whose only call ends with an error."""
    future = Future()
    future.set_exception(err)
    return SimpleNamespace(submit=lambda *_: future)


def test_an_error_of_npattn_is_raised():
    with Jobs(fail(OptionError("no unit"))) as jobs:
        jobs.submit(FLASH)
        with pytest.raises(OptionError, match="no unit"):
            jobs.wait()


def test_a_lost_worker_of_the_executor_costs_its_unit():
    with Jobs(fail(BrokenProcessPool("a worker has\nended"))) as jobs:
        jobs.submit(FLASH)
        unit, result = jobs.wait()
    assert unit == FLASH
    assert result == Result("crashed", "BrokenProcessPool: a worker has ended")


def test_a_lost_executor_is_an_error():
    with Jobs(fail(CancelledError())) as jobs:
        jobs.submit(FLASH)
        with pytest.raises(OptionError, match="the executor was lost"):
            jobs.wait()
