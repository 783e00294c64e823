"""check on several processes: the same report, and no process left behind."""

import dataclasses
import multiprocessing
import os
import pickle
import sys
import threading
import types
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from npattn.cli import cli
from npattn.engines import threads
from npattn.engines.threads import ONE_THREAD
from npattn.errors import OptionError
from npattn.testing import Implementation, ImplementationError, check
from npattn.testing.runner import schedule
from npattn.testing.runner.rounds import Judge
from npattn.testing.targets import load
from npattn.testing.targets.numpy import flash, flash_backward, naive
from npattn.testing.worker.connect import connect, isolate
from npattn.testing.worker.supervisor import Limits
from tests.confined import untrusted
from tests.testing.runner.test_untrusted import trial_of

BOTH = ("float32", "float64")
SOME = (
    *("agreement-", "hidden-nan-k", "aggregate", "sink-key"),
    *("shared-heads", "padded-keys", "mask-as-bias", "split-merge"),
)


def contents(report):
    """Return the whole content of a report, with the numbers of its problems."""
    outcomes = [
        (
            dataclasses.replace(o, problem=None),
            repr(o.problem),
            None if o.problem is None else (o.problem.q.tobytes(), o.problem.v.tobytes()),
        )
        for o in report.outcomes
    ]
    return str(report), outcomes, (*report.untested, *report.refused), report.settings


def implementation_in_file(tmp_path, source, name="kernel"):
    """Return an implementation with the path of its file as spec."""
    path = tmp_path / f"{name}_of_a_test.py"
    path.write_text(source)
    spec = f"{path}:attention"
    return Implementation(load(spec)[0], spec=spec)


PLAIN = """
from npattn.testing.targets.numpy import flash


def attention(q, k, v):
    return flash(q, k, v)
"""


WRONG_IN_BLOCKS = """
from npattn.testing.targets.numpy import flash


def attention(q, k, v):
    return flash(q, k[..., :16, :], v[..., :16, :])
"""


RANK_4_BY_CHANCE = """
import numpy as np
from npattn.testing.targets.numpy import flash

def attention(q: np.ndarray, k, v, causal=False):
    if causal and q.ndim == 3 and q.shape[-2] != q.shape[-1]:
        raise ValueError("sizes do not fit")
    return flash(q, k, v, causal=causal)
"""


@pytest.mark.nightly
def test_structure_that_one_process_finds_refused_is_asked_by_none(tmp_path):
    """Both reports are those of a check that never sampled it."""
    f = implementation_in_file(tmp_path, RANK_4_BY_CHANCE)
    kwargs = {"examples": 6, "only": ["agreement-o", "permute-heads", "empty-row"]}
    one, two = check(f, **kwargs), check(f, processes=2, **kwargs)
    assert contents(two) == contents(one)
    assert one.passed
    assert [x for x in one.refused if "rank 3: taken in some sizes, raises in others" in x]


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_two_processes_give_the_report_of_one():
    kwargs = {"dtypes": BOTH, "examples": 3, "only": SOME, "shrink": False, "seed": 3}
    one = check(flash, backward=flash_backward, **kwargs)
    two = check(flash, backward=flash_backward, processes=2, **kwargs)
    assert one.passed
    assert contents(two) == contents(one)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_processes_report_and_shrink_same_failures():
    kwargs = {"examples": 5, "only": ("agreement-o", "empty-row", "hidden-nan")}
    one, two = check(naive, **kwargs), check(naive, processes=2, **kwargs)
    assert [o.rule for o in one.outcomes if o.failed] == [
        "structure",
        "empty-row",
        "hidden-nan-v",
        "hidden-nan-kv",
    ]
    assert contents(two) == contents(one)


@pytest.mark.thorough
def test_causes_are_those_of_one_process(tmp_path):
    implementation = implementation_in_file(tmp_path, WRONG_IN_BLOCKS)
    kwargs = {"examples": 20, "only": ("agreement-o", "convex-hull"), "shrink": False}
    two, one = (check(implementation, processes=n, **kwargs) for n in (2, 1))
    assert [cause.passes_when for cause in one.causes] == ["fails only where S > 16"]
    assert contents(two) == contents(one)


def test_a_judge_crosses_a_pickle_as_it_is():
    trial = dataclasses.replace(
        trial_of(Implementation(naive)), gradients=frozenset({"dq"}), memo={"o": 1}
    )
    limits = frozenset({"values"}), frozenset({"views[float32]"}), 7.0, None, True
    judge = Judge(trial, 3, 5, lambda *_: None, False, *limits)
    other = pickle.loads(pickle.dumps(judge))
    assert other.trial == dataclasses.replace(trial, implementation=None, memo={})
    assert dataclasses.replace(other, trial=trial, progress=judge.progress) == judge


def test_error_state_of_a_loaded_target_reaches_no_judge(monkeypatch):
    states = []

    def answer(self, *_):
        states.append(np.geterr())
        return ()

    implementation = Implementation(naive)
    judge = Judge(trial_of(implementation), 3, 5, lambda *_: None, False)
    monkeypatch.setattr(schedule._Process, "implementation", implementation, raising=False)
    monkeypatch.setattr(schedule._Process, "judges", {})
    monkeypatch.setattr(Judge, "answer", answer)
    with np.errstate(all="ignore"):
        schedule._answer(schedule._ProbedJudge.of(judge, 1), ["agreement-o"], 3, {}, False)
    assert states == [schedule.ERRORS]


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_wrong_input_is_tried_in_child_of_worker():
    report = check(naive, processes=2, only=["robustness"])
    (notes,) = (o for o in report.outcomes if o.rule == "robustness")
    assert notes.status == "passed"
    assert "v is one key shorter than k: an exception" in notes.message


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_progress_covers_all_work():
    seen = []
    check(naive, examples=2, only=("agreement-o", "empty-row", "views"), processes=2,
          progress=lambda *at: seen.append(at))  # fmt: skip
    assert [done for _, _, done, _ in seen] == sorted(done for _, _, done, _ in seen)
    assert seen[0][2] == 0
    assert seen[-1][2:] == (3, 3)


@pytest.mark.thorough
def test_workers_load_file_by_path(tmp_path):
    implementation = implementation_in_file(tmp_path, PLAIN)
    kwargs = {"examples": 2, "only": ("agreement-o", "shape-dtype")}
    assert contents(check(implementation, processes=2, **kwargs)) == contents(
        check(implementation_in_file(tmp_path, PLAIN), **kwargs)
    )


def test_unpicklable_implementation_is_an_early_error():
    calls = []

    def local(q, k, v):
        calls.append(1)
        return naive(q, k, v)

    implementation = Implementation(local, framework="numpy")
    with pytest.raises(OptionError, match=r"cannot load .*must be a function of a module.*spec"):
        check(implementation, processes=2)
    assert not calls


@pytest.mark.thorough
def test_unimportable_function_is_an_early_error(monkeypatch):
    module = types.ModuleType("module_that_only_this_process_has")
    exec(PLAIN, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    children = multiprocessing.active_children()
    with pytest.raises(OptionError, match=r"cannot load \(ModuleNotFoundError: .*processes=1"):
        check(module.attention, processes=2, framework="numpy")
    assert multiprocessing.active_children() == children


def test_fewer_than_1_process_is_an_error():
    with pytest.raises(OptionError, match="processes is 0, must be an integer ≥ 1"):
        check(naive, processes=0)


THREADS = """
import multiprocessing
import os

from npattn.testing.targets.numpy import flash


def attention(q, k, v):
    if multiprocessing.parent_process() is not None and os.environ["OMP_NUM_THREADS"] != "1":
        raise RuntimeError("more than one thread")
    return flash(q, k, v)
"""


@pytest.mark.thorough
def test_workers_have_one_thread_and_parent_keeps_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    report = check(
        implementation_in_file(tmp_path, THREADS, "threads"),
        examples=2,
        only=["views"],
        processes=2,
    )
    assert report.passed
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert "MKL_NUM_THREADS" not in os.environ


CRASH = """
import multiprocessing
import os

from npattn.testing.targets.numpy import flash


def attention(q, k, v):
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return flash(q, k, v)
"""


@pytest.mark.thorough
def test_crash_of_worker_is_reported(tmp_path):
    with pytest.raises(ImplementationError, match=r"ended the process .*processes=1"):
        check(
            implementation_in_file(tmp_path, CRASH, "crash"),
            examples=2,
            only=["views"],
            processes=2,
        )


STOP = """
import multiprocessing

from npattn.testing.targets.numpy import flash


class Stop(BaseException):
    pass


def attention(q, k, v):
    if multiprocessing.parent_process() is not None:
        raise Stop("enough")
    return flash(q, k, v)
"""


@pytest.mark.thorough
def test_what_is_no_exception_is_a_crash_of_one_rule(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    implementation = implementation_in_file(tmp_path, STOP, "stop")
    children = multiprocessing.active_children()
    report = check(implementation, examples=2, only=["agreement-o"], processes=2)
    (outcome,) = [o for o in report.outcomes if o.rule == "agreement-o"]
    assert outcome.status == "crashed"
    assert "Stop: enough" in outcome.message
    assert multiprocessing.active_children() == children


SLOW = """
import multiprocessing
import time

from npattn.testing.targets.numpy import flash


def attention(q, k, v):
    if multiprocessing.parent_process() is not None and q.shape[-1] != 16:
        time.sleep(1000)
    return flash(q, k, v)
"""


@pytest.mark.thorough
def test_an_interrupt_ends_the_processes(tmp_path):
    def interrupt(dtype, rule, done, total):
        if done == 1:
            raise KeyboardInterrupt

    children = multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt):
        check(implementation_in_file(tmp_path, SLOW, "slow"), examples=2,
              only=["shape-dtype", "agreement-lse"], processes=2, progress=interrupt)  # fmt: skip
    assert multiprocessing.active_children() == children


def test_functions_are_pickled_by_spec():
    specs = [f"npattn.testing.targets.numpy:{name}" for name in ("flash", "flash_backward")]
    state = Implementation(
        flash, backward=flash_backward, spec=specs[0], backward_spec=specs[1]
    ).__getstate__()
    assert tuple(state["f"]) == (specs[0],)
    assert tuple(state["backward"]) == (specs[1],)


def test_spec_of_another_object_is_only_a_name():
    state = Implementation(naive, spec="npattn.testing.targets.numpy:flash").__getstate__()
    assert state["f"] is naive
    assert Implementation(naive, spec="a name").__getstate__()["f"] is naive


def test_implementation_survives_pickling():
    f, backward = load("numpy.flash")
    here = Implementation(f, backward=backward, spec="numpy.flash", rename={"scale": "scale"})
    there = pickle.loads(pickle.dumps(here))
    assert there.f is f
    assert there.backward is backward
    assert (there.features, there.returns, there.rename) == (
        here.features,
        here.returns,
        here.rename,
    )
    ones = np.ones((1, 2, 3), np.float32)
    arrays = dict.fromkeys("qkv", ones)
    assert np.array_equal(there.call(arrays, {}), here.call(arrays, {}))


DIES = """
import os
import numpy as np

def f(q, k, v, mask=None):
    if q.ndim != 4 or k.shape[1] != q.shape[1]:
        raise ValueError("rank 4, and K = H")
    if mask is not None and os.path.exists({asked!r}):
        os._exit(3)
    s = q.astype(float) @ np.swapaxes(k, -1, -2).astype(float) / max(q.shape[-1], 1) ** 0.5
    s = s if mask is None else np.where(mask, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    return (p / np.maximum(p.sum(-1, keepdims=True), 1e-300) @ v.astype(float)).astype(q.dtype)
"""


@pytest.mark.thorough
def test_kinds_that_processes_give_up_are_in_the_report(tmp_path, monkeypatch):
    """The probe finds masks right, and every later call with one is a crash."""
    path, asked, ask = tmp_path / "dies.py", tmp_path / "asked", schedule.Processes.ask

    def note_and_ask(self, work):
        asked.touch()
        ask(self, work)

    monkeypatch.setattr(schedule.Processes, "ask", note_and_ask)
    path.write_text(DIES.format(asked=str(asked)))
    remote = connect(f"{path}:f", framework="numpy")
    only = ("agreement-o", "shape-dtype", "repeatable", "views", "inputs-unchanged")
    report = check(
        remote, only=only, examples=6, processes=2, shrink=False, diagnosis=False, dtypes="float32"
    )
    remote.worker.close()
    assert "crashed" in {outcome.status for outcome in report.outcomes}
    lines = [line for line in report.refused if "not asked again" in line]
    names = [name for line in lines for name in line.partition(":")[0].split(", ")]
    assert "mask" in names
    assert len(names) == len(set(names)), lines
    assert "exit code 3" in lines[0]


@pytest.fixture
def observer(monkeypatch):
    """Numbers of processes that are started, and rules that this process answers."""
    found = types.SimpleNamespace(pools=[], rules=[], alone=[])
    answer, pool = Judge.answer, schedule.ProcessPoolExecutor

    def start(n, *arguments):
        found.pools.append(n)
        return pool(n, *arguments)

    def note(judge, names, *arguments):
        found.rules += names
        found.alone.append(bool(threads._BLAS.running))
        return answer(judge, names, *arguments)

    monkeypatch.setattr(schedule, "ProcessPoolExecutor", start)
    monkeypatch.setattr(Judge, "answer", note)
    return found


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("fail_fast", [False, True])
def test_who_checks_answers_too_where_the_target_has_a_worker(observer, fail_fast):
    kwargs = {"examples": 5, "only": SOME, "isolate": True, "shrink": False}
    kwargs |= {"fail_fast": fail_fast}
    two = check(naive, processes=2, **kwargs)
    assert observer.pools == [1]
    assert observer.rules
    assert all(observer.alone)  # with one thread of BLAS
    assert contents(two) == contents(check(naive, **kwargs))


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_who_checks_leaves_what_may_end_it_to_others(observer):
    check(naive, examples=2, only=["views", "mask-as-bias", "sink-key"], processes=2)
    assert observer.pools == [2]
    assert not observer.rules


@pytest.mark.thorough
def test_untrusted_targets_are_judged_by_processes_that_do_nothing_else(observer, tmp_path):
    path = tmp_path / "f.py"
    path.write_text("def f(q, k, v):\n    return v[..., :1, :] + 0 * q[..., :1]\n")
    remote = connect(f"{path}:f", framework="numpy", **untrusted())
    check(remote, examples=2, only=["views", "mask-as-bias"], processes=2, diagnosis=False)
    remote.worker.close()
    assert observer.pools == [2]
    assert not observer.rules


@pytest.mark.thorough
def test_a_crash_costs_rules_and_not_the_process_that_checks(tmp_path, observer):
    path = tmp_path / "f.py"
    path.write_text(CRASH.replace("multiprocessing.parent_process() is not None", "len(q) > 2"))
    remote = connect(f"{path}:attention", framework="numpy")
    kwargs = {"shrink": False, "diagnosis": False, "processes": 2}
    report = check(remote, examples=3, only=SOME, **kwargs)
    remote.worker.close()
    assert observer.rules
    assert any("crashed" in o.message for o in report.outcomes)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_threads_of_blas_are_one_in_each_worker(tmp_path, monkeypatch):
    """Workers had the environment of the process that connected, with its threads."""
    monkeypatch.chdir(tmp_path)  # beside npattn an untrusted one would find it
    Path("f.py").write_text("def f(q, k, v):\n    return q @ k.swapaxes(-1, -2) @ v\n")
    for name in ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    for alone in (False, True):
        remote = connect("numpy.flash", alone=alone)
        hidden = connect("f.py:f", framework="numpy", alone=alone, **untrusted())
        isolated = isolate(Implementation(flash), Limits(), alone=alone)
        for made in (remote, hidden, pickle.loads(pickle.dumps(remote)), isolated):
            environment = made.worker.environment
            assert (ONE_THREAD.items() <= environment.items()) is not alone
            made.worker.close()


@pytest.mark.parametrize(("given", "alone"), [(["-n", "2"], False), ([], True)])
def test_workers_of_the_command_know_whether_they_are_alone(monkeypatch, given, alone):
    found = []

    def note(*_, **kwargs):
        found.append(kwargs["alone"])
        raise OptionError("enough")

    monkeypatch.setattr("npattn.cli.target.connect", note)
    result = CliRunner().invoke(cli, ["check", "numpy.flash", *given])
    assert result.exit_code == 2
    assert found == [alone]


@pytest.mark.parametrize(("processes", "alone"), [(2, False), (1, True)])
def test_workers_of_functions_know_whether_they_are_alone(monkeypatch, processes, alone):
    found = []

    def note(*_, **kwargs):
        found.append(kwargs["alone"])
        raise OptionError("enough")

    monkeypatch.setattr("npattn.testing.worker.connect.isolate", note)
    with pytest.raises(OptionError, match="enough"):
        check(flash, isolate=True, processes=processes)
    assert found == [alone]


@pytest.mark.parametrize(
    ("stops_at", "order"), [({"values"}, ["first", "second"]), (set(), ["second", "first"])]
)
def test_answers_that_may_end_the_check_are_kept_in_the_order_of_the_rules(stops_at, order):
    """Whoever is first: which failure ends it must not depend on the clock."""
    tasks, kept = [schedule._Task(Future(), [n], 3, {}) for n in ("first", "second")], []

    def answer(task):
        return schedule._Answer(dict.fromkeys(task.names, "passed"), {}, None)

    processes = object.__new__(schedule.Processes)
    processes.takes_part = False
    processes.implementation = types.SimpleNamespace(add_given_up=len, untrusted=None)
    work = types.SimpleNamespace(
        judge=types.SimpleNamespace(stops_at=stops_at),
        stopped=False,
        record=lambda name, _: kept.append(name),
        report_progress=len,
    )
    tasks[1].future.set_result(answer(tasks[1]))
    threading.Timer(0.2, lambda: tasks[0].future.set_result(answer(tasks[0]))).start()
    processes._collect(work, tasks)
    assert kept == order
