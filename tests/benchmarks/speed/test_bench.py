"""python -m benchmarks.speed: turns, statuses, ratios and reports. No test is about speed."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.speed import (
    CASES,
    CONTESTANTS,
    Calls,
    Cell,
    Contestant,
    Report,
    Settings,
    Times,
    bench,
)
from benchmarks.speed.__main__ import bench_command
from npattn import masks
from npattn.engines import tiled

from benchmarks.speed import limits, machine, memory, report as reports, run as runs  # isort: skip
from benchmarks.speed.cases import make_task
from benchmarks.speed.clock import PATIENCE, TURN, Clock, turn
from benchmarks.speed.memory import Probe
from npattn.errors import MissingExtraError, OptionError
from npattn.problem import Problem

T = 7
MIB = 2**20


class FakeClock(Clock):
    """Time passes in calls and in sleep alone; `awake` seconds of them some thread spins."""

    def __init__(self, awake=0.0):
        self.time, self.busy, self.awake = 0.0, 0.0, awake

    def now(self):
        return self.time

    def processor_time(self):
        return self.busy

    def sleep(self, seconds):
        spins = min(seconds, self.awake)
        self.busy, self.awake = self.busy + spins, self.awake - spins
        self.time += seconds

    def call(self, seconds):
        self.time += seconds


class SlowClock(FakeClock):
    """Every call takes a second, and so is called once."""

    def now(self):
        self.time += 1
        return self.time


def costs(seconds=0.0, inputs=0, forward=0, both=0, refused=""):
    """A probe of all contestants that says the same at any length, times (T / 7)²."""

    def probing(name, case, dtype, length, seed, threads, timeout):
        growth = (length / T) ** 2
        sizes = (int(growth * n) for n in (inputs, forward, both))
        return Probe(*sizes, seconds=growth * seconds, refused=refused)

    return probing


def small(*names, probing=None, **options):
    """Run one case, one dtype and one length by default."""
    words = {"cases": ("plain",), "dtypes": ("float32",), "lengths": (T,), "rounds": 2} | options
    return bench(
        Settings(contestants=names, **words), clock=SlowClock(), probing=probing or costs()
    )


def cell(name="a", role="peer", forward=(1.0,), both=(2.0,), status="ok", case="plain", length=T):
    contestant = Contestant(name, role, "", "", None, "")
    times = (Times.of(list(forward)), Times.of(list(both)))
    return Cell(case, "float32", length, contestant, status).with_times(*times)


ABOUT = {
    "versions": {"npattn": "1"},
    "system": "s",
    "cpu": "c",
    "avx512": None,
    "cores": 2,
    "threads": 2,
    "memory_by": "m",
    "load": [None, None],
    "seed": 0,
    "rounds": 1,
    "seconds": 1.0,
    "memory": MIB,
    "interrupted": False,
}


def row_of(cells, name):
    return next(row for row in Report(ABOUT, tuple(cells)).rows() if row["contestant"] == name)


# --- contestants for these tests ------------------------------------------------------------------


def doubled(task, threads):
    """Wrong: twice what attention gives."""
    ready = CONTESTANTS["numpy.naive"].start(task, threads)
    return ready._replace(read=lambda found: tuple(2 * x for x in found))


def wrong_dk(task, threads):
    ready = CONTESTANTS["numpy.naive"].start(task, threads)

    def read(found):
        return found if len(found) == 1 else (*found[:2], found[2] + np.float32(0.1), found[3])

    return ready._replace(read=read)


def wide(task, threads):
    ready = CONTESTANTS["numpy.naive"].start(task, threads)
    return ready._replace(read=lambda found: tuple(x.astype(np.float64) for x in found))


def forward_only(task, threads):
    return CONTESTANTS["numpy.naive"].start(task, threads)._replace(both=None)


def raising(task, threads):
    def forward():
        raise NotImplementedError("no kernel\nof this kind")

    return Calls(forward, None, None, 0)


@pytest.fixture
def fake(monkeypatch):
    """Makes a function of this file a contestant."""

    def make(function, needs=None):
        name = function.__name__
        entry = Contestant(name, "peer", __name__, name, needs, "of a test")
        monkeypatch.setitem(CONTESTANTS, name, entry)
        return name

    return make


# --- numbers --------------------------------------------------------------------------------------


def test_times_are_median_least_and_most():
    times = Times.of([5.0, 2.0, 3.0])
    assert (times.median, times.least, times.most) == (3.0, 2.0, 5.0)
    assert times.rounds == (5.0, 2.0, 3.0)
    assert Times.of([]) is None


def test_ratios_are_to_best_peer_and_bounds():
    cells = [
        cell("mine", "npattn", forward=[6.0], both=[12.0]),
        cell("slow", forward=[8.0], both=[3.0]),
        cell("fast", forward=[2.0], both=[4.0]),
        cell("products", "ceiling", forward=[1.5], both=[2.0]),
        cell("products+exp", "floor", forward=[3.0], both=[6.0]),
    ]
    mine = row_of(cells, "mine")
    assert mine["forward"]["to_best_peer"] == 3.0
    assert mine["both"]["to_best_peer"] == 4.0
    assert mine["forward"]["to_ceiling"] == 4.0
    assert mine["forward"]["of_floor"] == 0.5
    assert row_of(cells, "fast")["forward"]["to_best_peer"] == 1.0


def test_npattn_is_no_peer_of_itself():
    cells = [cell("mine", "npattn"), cell("other", "npattn", forward=[0.5])]
    assert row_of(cells, "mine")["forward"]["to_best_peer"] is None


@pytest.mark.parametrize("status", ["wrong", "refused", "skipped"])
def test_wrong_results_have_no_ratio(status):
    cells = [cell("mine", "npattn"), cell("bad", forward=[0.1], status=status), cell("good")]
    assert row_of(cells, "mine")["forward"]["to_best_peer"] == 1.0
    assert row_of(cells, "bad")["forward"]["to_best_peer"] is None


def test_lengths_are_not_compared():
    cells = [cell("mine", "npattn", length=11), cell("peer", length=13)]
    assert row_of(cells, "mine")["forward"]["to_best_peer"] is None


# --- time -----------------------------------------------------------------------------------------


def test_long_call_runs_once():
    clock, calls = FakeClock(), []

    def call():
        calls.append(1)
        clock.call(3.0)

    assert turn(call, clock) == pytest.approx(3.0)
    assert len(calls) == 1


def test_short_call_is_repeated_without_counting_the_first():
    clock, seconds = FakeClock(), iter([TURN / 2.5, *[TURN / 5] * 9])
    assert turn(lambda: clock.call(next(seconds)), clock) == pytest.approx(TURN / 5)
    assert len(list(seconds)) == 9 - 3


def test_turn_waits_for_spinning_threads():
    clock = FakeClock(awake=0.05)
    clock.settle()
    assert clock.awake == 0
    assert clock.now() < 0.07


def test_waiting_for_busy_threads_ends():
    clock = FakeClock(awake=1e9)
    clock.settle()
    assert clock.now() == pytest.approx(PATIENCE, rel=0.01)


def test_clock_goes_forward():
    clock = Clock()
    before, used = clock.now(), clock.processor_time()
    clock.settle()
    assert clock.now() > before
    assert clock.processor_time() >= used


def test_every_round_has_every_turn_in_rotated_order(monkeypatch, fake):
    order = []
    monkeypatch.setattr(runs, "turn", lambda call, clock: order.append(call) or 1.0)
    small("numpy.naive", fake(forward_only), rounds=3)
    a, a_both, b = order[:3]
    assert order == [a, a_both, b, b, a, a_both, a, a_both, b]


# --- who is skipped, and why ----------------------------------------------------------------------


def statuses(report):
    return {c.T: (c.status, c.note) for c in report.cells}


def test_slow_contestant_is_skipped_with_a_note():
    report = small("numpy.naive", lengths=(7, 11), seconds=10, probing=costs(seconds=4.0))
    status, note = statuses(report)[7]
    assert status == "ok"
    status, note = statuses(report)[11]
    assert status == "skipped"
    assert note == "would take about 20 s, may take 10"
    assert "skipped: would take about 20 s, may take 10" in str(report)


def test_slow_contestant_has_fewer_rounds():
    report = small("numpy.naive", rounds=9, seconds=10, probing=costs(seconds=2.0))
    assert len(report.cells[0].forward.rounds) == 5
    report = small("numpy.naive", rounds=9, seconds=9, probing=costs(seconds=2.9))
    assert len(report.cells[0].forward.rounds) == 3


def test_contestant_beyond_memory_is_skipped_with_a_note():
    probing = costs(inputs=MIB, both=5 * MIB, forward=MIB)
    report = small("numpy.naive", lengths=(7, 14), memory=10 * MIB, probing=probing)
    assert statuses(report)[7][0] == "ok"
    assert statuses(report)[14][0] == "skipped"
    assert "GiB" in statuses(report)[14][1]


def test_inputs_of_all_contestants_count_together():
    probing = costs(inputs=4 * MIB, forward=MIB, both=MIB)
    report = small("npattn.dense", "numpy.naive", memory=8 * MIB, probing=probing)
    assert [c.status for c in report.cells] == ["ok", "skipped"]


def test_long_first_sequence_is_estimated_from_shorter_one():
    asked = []

    def probing(name, case, dtype, length, *rest):
        asked.append(length)
        return Probe(seconds=float(length))

    report = small("numpy.naive", lengths=(2048,), seconds=10, probing=probing)
    assert asked == [1024]
    assert report.cells[0].status == "skipped"


def test_refusal_is_noted_and_not_tried_again():
    asked = []

    def probing(name, case, dtype, length, *rest):
        asked.append(length)
        return Probe(refused="RuntimeError: no kernel")

    report = small("numpy.naive", lengths=(7, 11), probing=probing)
    assert [c.status for c in report.cells] == ["refused", "refused"]
    assert report.cells[1].note == "RuntimeError: no kernel"
    assert all(c.forward is None for c in report.cells)


def test_exception_is_refusal_with_first_line(fake):
    report = small(fake(raising), "numpy.naive")
    by_name = {c.contestant.name: c for c in report.cells}
    assert by_name["raising"].note == "NotImplementedError: no kernel"
    assert by_name["raising"].status == "refused"
    assert by_name["numpy.naive"].forward is not None


def test_interrupted_run_reports_cells_so_far():
    def stop(what, done, total):
        if done == 1:
            raise KeyboardInterrupt

    settings = Settings(
        cases=("plain",), lengths=(7, 11), contestants=("numpy.naive",), dtypes=("float32",)
    )
    report = bench(settings, progress=stop, clock=SlowClock(), probing=costs())
    assert [c.T for c in report.cells] == [7]
    assert "INTERRUPTED" in str(report)


def test_report_is_saved_after_every_length():
    seen = []
    settings = Settings(
        cases=("plain",), lengths=(7, 11), contestants=("numpy.naive",), dtypes=("float32",)
    )
    bench(settings, save=seen.append, clock=SlowClock(), probing=costs())
    assert [(len(r.cells), r.about["interrupted"]) for r in seen] == [
        (1, True),
        (2, True),
        (2, False),
    ]


# --- results --------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.broad
def test_npattn_and_naive_results_are_right(case):
    names = ("npattn.tiled", "npattn.dense", "numpy.naive", "products", "products+exp")
    report = small(*names, cases=(case,), dtypes=("float32", "float64"), rounds=1)
    assert {(c.contestant.name, c.status) for c in report.cells} == {(n, "ok") for n in names}
    assert all(c.forward and c.both for c in report.cells)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(
            (name, case)
            for name in ("torch.fused", "torch.math", "onnx.reference")
            for case in CASES
        ),
        *(("jax.jit", case) for case in ("window", "alibi", "gqa")),  # which take long to compile
    ],
)
def test_results_of_installed_systems_are_right(case, name):
    pytest.importorskip(CONTESTANTS[name].needs)
    (found,) = small(name, cases=(case,), rounds=1).cells
    assert (found.status, found.note) == ("ok", "")
    assert (found.both is None) == (name == "onnx.reference")


@pytest.mark.parametrize(
    ("function", "note"),
    [(doubled, "o["), (wrong_dk, "dk["), (wide, "out is float64 (1, 8, 7, 64), not float32")],
)
def test_wrong_results_are_noted_without_ratio(fake, function, note):
    report = small(fake(function), "numpy.naive")
    row = next(r for r in report.rows() if r["contestant"] == function.__name__)
    assert row["status"] == "wrong"
    assert row["note"].startswith(note)
    assert row["forward"]["to_best_peer"] is None
    assert f"wrong: {note}" in str(report)


@pytest.mark.thorough
def test_results_of_long_sequences_are_verified(fake):
    (found,) = small(fake(wrong_dk), lengths=(1031,), cases=("window",)).cells
    assert found.status == "wrong"


# --- cases ----------------------------------------------------------------------------------------


def test_seed_determines_the_arrays():
    first, same, other = (make_task(CASES["documents"], 31, "float32", seed) for seed in (3, 3, 5))
    assert np.array_equal(first.q, same.q)
    assert np.array_equal(first.arrays.mask, same.arrays.mask)
    assert not np.array_equal(first.q, other.q)


def test_cases_window_and_documents():
    window = make_task(CASES["window"], 601, "float32", 0).arrays.visible
    assert set(window.sum(-1)) == set(range(1, 257))
    documents = make_task(CASES["documents"], 61, "float32", 0).arrays.visible
    assert len({tuple(row) for row in documents}) == 8


@pytest.mark.parametrize("case", ["causal", "window", "documents"])
def test_products_are_those_of_visible_tiles(case):
    task = make_task(CASES[case], 1103, "float32", 0)
    problem = task.problem()
    visible = problem.visible
    counted = np.zeros((problem.H, problem.T, problem.S), int)
    for tiles in tiled.visible_tiles(problem):
        for head, kv, t0, t1, s0, s1 in tiles:
            assert kv == head
            assert visible[t0:t1, s0:s1].any()
            counted[head, t0:t1, s0:s1] += 1
    assert counted.max() == 1
    assert (counted[:, visible] == 1).all()
    assert counted.mean() < 1


def test_products_of_shared_heads():
    q, k = np.ones((1, 6, 5, 3)), np.ones((1, 2, 7, 3))
    problem = Problem(q, k, k, mask=masks.window(3, 3))
    pairs = {tile[:2] for tiles in tiled.visible_tiles(problem) for tile in tiles}
    assert pairs == {(h, h // 3) for h in range(6)}


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_child_process_measures_memory_of_naive():
    length, H = 509, 8
    seen = memory.probe("numpy.naive", "plain", "float32", length, 0, 1, timeout=300)
    scores = 4 * H * length**2
    assert seen.refused == ""
    assert seen.inputs == 4 * (4 * H * length * 64)
    assert seen.forward > scores
    assert seen.both > 2 * scores
    assert seen.seconds > 0


def test_endless_process_is_refused():
    seen = memory.probe("numpy.naive", "plain", "float32", T, 0, 1, timeout=0.01)
    assert seen.refused == "did not end within 0 s"


def test_failed_or_killed_process_is_refused(monkeypatch, tmp_path):
    program = tmp_path / "program"
    monkeypatch.setattr(memory.sys, "executable", str(program))
    for line, refusal in [
        ("kill -9 $$", "ended by signal 9, perhaps for its memory"),
        ("echo no such thing >&2; exit 3", "failed: no such thing"),
        ("exit 3", "failed: no word"),
        ("exit 0", "failed: no word"),
    ]:
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
        seen = memory.probe("numpy.naive", "plain", "float32", T, 0, 1, timeout=60)
        assert seen.refused == refusal


def test_exception_in_child_process_is_refusal(fake):
    seen = memory.measure(fake(raising), "plain", "float32", T, 0, 1)
    assert seen.refused == "NotImplementedError: no kernel"


def test_without_proc_peak_is_that_of_the_process(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "none" / "clear_refs")
    monkeypatch.setattr(limits, "MEMINFO", tmp_path / "none")
    assert "ru_maxrss" in memory.describe_method()
    assert memory._peak(lambda: None) == 0
    assert limits.available() > MIB


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"cases": ("nope",)},
        {"cases": ()},
        {"contestants": ("torhc",)},
        {"dtypes": ("float16",)},
        {"lengths": ()},
        {"lengths": (0,)},
        {"rounds": 0},
        {"seconds": 0},
        {"seconds": float("nan")},
        {"seed": -1},
        {"threads": 0},
        {"memory": 0},
    ],
)
def test_illegal_settings_raise(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        Settings(**options)


def test_missing_contestant_names_the_extra(fake):
    name = fake(doubled, needs="no_such_package")
    with pytest.raises(MissingExtraError, match="pip install 'npattn\\[no_such_package\\]'"):
        Settings(contestants=(name,))
    assert name not in Settings().contestants


def test_threads_are_limited_during_the_run_only(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    before = runs.pool.count()
    with limits.limit_threads(1):
        assert runs.pool.count() == 1
        assert limits.os.environ["NPROC"] == "1"
    assert runs.pool.count() == before
    assert "NPROC" not in limits.os.environ
    monkeypatch.setenv("NPROC", "5")
    with limits.limit_threads(1):
        pass
    assert limits.os.environ["NPROC"] == "5"


# --- what is written ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    names = ("npattn.tiled", "numpy.naive", "products", "products+exp")
    return small(*names, cases=("plain", "causal"), lengths=(7, 11))


def test_table_has_a_line_for_every_cell(measured):
    lines = str(measured).splitlines()
    for row in measured.rows():
        own = [x for x in lines if x.split()[:2] == [str(row["T"]), row["contestant"]]]
        assert len(own) == 2  # one a case
    assert {"plain, float32", "causal, float32"} <= set(lines)


def test_summary_has_every_case_pass_and_length(measured):
    lines = [line.split() for line in str(measured).splitlines()]
    at = lines.index(["case", "npattn.tiled", "/", "best", "peer,", "T", "=", "7", "11"])
    ratios = {
        (row["case"], row["T"], p): row[p]["to_best_peer"]
        for row in measured.rows()
        if row["contestant"] == "npattn.tiled"
        for p in ("forward", "both")
    }
    plain = [f"{ratios['plain', T, 'forward']:.2f}" for T in (7, 11)]
    assert lines[at + 1] == ["plain", "float32,", "forward", *plain]
    assert len(lines[at + 1 :]) == 2 * 2


def test_json_has_the_numbers_of_the_table(measured, tmp_path):
    path = tmp_path / "found.json"
    measured.to_json(path)
    found = json.loads(path.read_text())
    assert reports.head(found["about"]) == reports.head(measured.about)
    table = str(measured)
    for row in found["rows"]:
        for word in reports._format_row(row):
            assert word in table
    assert [reports._format_row(r) for r in found["rows"]] == [
        reports._format_row(r) for r in measured.rows()
    ]


def test_head_names_versions_and_hardware(measured):
    head = str(measured).split("\n\n")[0]
    for word in ("numpy", "BLAS", "AVX-512", "threads", "seed 0", "load", "clear_refs"):
        assert word in head


def test_unreadable_hardware_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "none")
    about = machine.description(1, ("numpy.naive",), "")
    assert about["avx512"] is None
    assert "unknown whether with AVX-512" in reports.head(
        ABOUT | about | {"load": [about["load"]] * 2}
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.0, "12 s"), (0.0123, "12.3 ms"), (4.56e-7, "0.456 µs")]
)
def test_format_of_seconds(seconds, text):
    assert reports._format_seconds(seconds) == text


@pytest.mark.thorough
def test_picture_has_a_panel_per_case_and_pass(measured, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.speed.picture import draw

    figure = draw(measured)
    path = tmp_path / "found.png"
    figure.savefig(path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert len(figure.axes) == 2 * 2
    for ax in figure.axes:
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        assert len(ax.lines) == 4


def test_wrong_results_are_not_in_the_picture():
    pytest.importorskip("matplotlib")
    from benchmarks.speed.picture import draw

    figure = draw(Report(ABOUT, (cell("good"), replace(cell("bad"), status="wrong"))))
    assert [line.get_label() for line in figure.axes[0].lines] == ["good"]
    assert draw(Report(ABOUT, (cell("bad", status="wrong"),))).legends == []


# --- the command line -----------------------------------------------------------------------------


def command(*words, code=0):
    result = CliRunner().invoke(bench_command, [*map(str, words)], terminal_width=200)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


@pytest.mark.thorough
def test_command_prints_table_and_writes_files(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(runs.bench, "__kwdefaults__", runs.bench.__kwdefaults__ | fast())
    found, picture = tmp_path / "found.json", tmp_path / "found.svg"
    words = ("--cases", "gqa", "--lengths", "7,11", "--dtype", "float64", "--rounds", 1)
    output = command(
        *words, "--contestants", "numpy.naive,npattn.tiled", "--json", found, "--picture", picture
    )
    assert "gqa, float64" in output
    assert {row["T"] for row in json.loads(found.read_text())["rows"]} == {7, 11}
    assert "<svg" in picture.read_text()


def test_an_interrupted_command_has_exit_code_130(monkeypatch):
    about = ABOUT | {"interrupted": True}
    monkeypatch.setattr("benchmarks.speed.bench", lambda *_, **__: Report(about, (cell("good"),)))
    assert "INTERRUPTED" in command(code=130)


def fast():
    return {"clock": SlowClock(), "probing": costs()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cases", "plain,nope"), "cases has 'nope', must be of plain"),
        (("--contestants", "torhc"), "contestants has 'torhc', must be of npattn.tiled"),
        (("--lengths", "128,x"), "--lengths is '128,x', must look like 128,256"),
        (("--dtype", "float16"), "dtypes has 'float16'"),
        (("--json", "/no/such/folder/x.json"), "does not exist; create it first"),
        (("--picture", "x.abc"), "must end in one of"),
    ],
)
def test_wrong_usage_is_reported_before_any_work(words, said, monkeypatch):
    monkeypatch.setattr(runs, "make_task", None)  # would raise if any work began
    assert said in " ".join(command(*words, code=2).replace("│", " ").split())


def test_list_names_all_cases_and_contestants():
    output = command("--list")
    assert all(name in output for name in (*CASES, *CONTESTANTS))
