"""A worker gives the report that the same function gives here, however it is started."""

import io
import math
import shlex
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from threadpoolctl import threadpool_limits

from npattn.cli import cli
from npattn.errors import OptionError
from npattn.oracle.api import evaluate
from npattn.problem import Cotangents, Problem
from npattn.testing import Implementation, Recipe, check
from npattn.testing.adapters import child
from npattn.testing.adapters.base import Crash, ResultError, TimedOut
from npattn.testing.adapters.child import (
    BLOCK,
    LARGEST,
    Tensor,
    parse_frame,
    read_frame,
    write_frame,
)
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.space import Space
from npattn.testing.targets import TARGETS, load_implementation
from npattn.testing.targets.numpy import flash, flash_backward, naive
from npattn.testing.trial import Trial
from npattn.testing.worker import connection
from npattn.testing.worker.connect import CHILD, connect, isolate
from npattn.testing.worker.supervisor import Limits

FEW = {"examples": 2, "diagnosis": False, "shrink": False}
NUMPY = [sys.executable, "-I", str(CHILD)]


@pytest.fixture
def make_remote():
    """Connect to targets, and close their workers at the end."""
    made = []

    def make(*args, **kwargs):
        made.append(connect(*args, **kwargs))
        return made[-1]

    yield make
    for remote in made:
        remote.worker.close()


OF_EACH_LEVEL = (
    *("agreement-", "rows-sum-to-one", "permute-", "empty-row", "saturated", "offset-bias"),
    *("inputs-unchanged", "views", "repeatable", "two-threads", "packed-inputs", "outputs-kept"),
    *("hidden-", "nan-value", "sink-minus-inf", "same-bits-again", "same-bits-in-batch"),
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["numpy.flash", "torch.sdpa"])
def test_the_report_is_the_same_to_the_character(make_remote, name):
    if name.startswith("torch"):
        pytest.importorskip("torch")
    asked = FEW | {"examples": 1, "only": OF_EACH_LEVEL}  # every rule: the test at night
    here = check(load_implementation(name), **asked)
    there = check(make_remote(name), **asked)
    assert there.text(verbose=True) == here.text(verbose=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, x in TARGETS.items() if x.runs_here])
def test_the_report_of_every_known_target_is_the_same(make_remote, monkeypatch, name):
    for variable, value in TARGETS[name].environment.items():
        monkeypatch.setenv(variable, value)
    there = check(make_remote(name, limits=Limits(timeout=900)), examples=3)
    here = check(load_implementation(name), examples=3)
    assert there.text(verbose=True) == here.text(verbose=True)


PADS = """
import torch

def attention(q, k, v):
    hidden = -k.shape[-2] % 32
    k, v = (torch.cat([x, x.new_zeros(*x.shape[:-2], hidden, x.shape[-1])], -2) for x in (k, v))
    scores = torch.einsum("...td,...sd->...ts", q, k) * q.shape[-1] ** -0.5
    shown = torch.ones(scores.shape[-1], dtype=torch.bool)
    shown[shown.numel() - hidden:] = False
    return torch.where(shown, scores, -torch.inf).softmax(-1) @ v
"""


@pytest.mark.thorough
def test_gradients_of_padded_keys_come_back(make_remote, tmp_path):
    """Those of one key are tensors of one element with the strides of the padded ones."""
    pytest.importorskip("torch")
    path = tmp_path / "own_padding.py"
    path.write_text(PADS)
    one = dict.fromkeys(("B", "H", "K", "S", "D", "E"), (1,))
    rules = ["shape-dtype", "agreement-dk", "agreement-dv"]
    report = check(make_remote(f"{path}:attention"), only=rules, sizes=one, **FEW)
    assert report.passed, report.text()
    assert {x.status for x in report.outcomes if x.rule in rules} == {"passed"}


WRAPPED = """
from npattn import Conventions
from npattn.testing import Implementation
from npattn.testing.targets.numpy import naive

kernel = Implementation(naive, framework="numpy", rename={}, like="npattn")
other = Implementation(naive, framework="numpy", quantized=None)
other.conventions = Conventions(lse_empty=float("nan"), hidden_fill=-1e9)
"""


@pytest.mark.thorough
def test_an_implementation_of_a_module_lives_in_a_worker(make_remote, tmp_path):
    """Its conventions travel whole: −inf, the default of lse_empty, and NaN are no JSON."""
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    plain, other = (make_remote(f"{tmp_path}/wrapped.py:{n}") for n in ("kernel", "other"))
    assert plain.conventions.lse_empty == -np.inf
    assert np.isnan(other.conventions.lse_empty)
    assert other.conventions.hidden_fill == -1e9
    assert check(plain, only=["agreement-o"], **FEW).passed


LSE = """
import time
import numpy as np

def f(q, k, v, return_lse=False):
    q += 1
    time.sleep({seconds})
    return (q.copy(), q[..., 0].copy()) if return_lse else q.copy()
"""


def test_a_forward_with_and_without_lse_is_one_request_of_two_calls(make_remote, tmp_path):
    (tmp_path / "f.py").write_text(LSE.format(seconds=0))
    remote, asked = make_remote(f"{tmp_path}/f.py:f", framework="numpy"), []
    remote.watch = lambda message, shapes: asked.append(message)
    q = np.zeros((2, 3, 5, 7), np.float32)
    results = remote.forward(Problem(q, q, q))
    assert [len(message["calls"]) for message in asked] == [2]
    assert remote.worker.age()[0] == 2
    assert (results["o"] == 1).all()  # that of the first
    assert (results["lse"] == 2).all()  # the second got the same array


@pytest.mark.parametrize("answer", [{}, {"values": []}, {"values": [None]}, {"values": 3}])
def test_an_answer_that_lacks_a_call_is_garbage(make_remote, tmp_path, monkeypatch, answer):
    (tmp_path / "f.py").write_text(LSE.format(seconds=0))
    remote = make_remote(f"{tmp_path}/f.py:f", framework="numpy")
    monkeypatch.setattr(remote.worker, "request", lambda *_: (answer, {}))
    q = np.zeros((2, 3, 5, 7), np.float32)
    with pytest.raises(Crash, match="its process answered with garbage"):
        remote.forward(Problem(q, q, q))


@pytest.mark.thorough
def test_each_of_several_calls_has_its_time(make_remote, tmp_path):
    q = np.zeros((2, 3, 5, 7), np.float32)
    cases = ("short", 1.1, 2.0, False), ("long", 0.6, 0.5, True)  # the first: 1.8 s to spare
    for name, seconds, timeout, ends in cases:
        path = tmp_path / f"{name}.py"  # one of the same second and length may be imported again
        path.write_text(LSE.format(seconds=seconds))
        remote = make_remote(f"{path}:f", framework="numpy", limits=Limits(timeout))
        if ends:
            with pytest.raises(TimedOut, match=r"within 0.5 s for each of 2 calls \(--timeout\)"):
                remote.forward(Problem(q, q, q))
        else:
            assert (remote.forward(Problem(q, q, q))["lse"] == 2).all()


WAITS = """
import time
from pathlib import Path

def f(q, k, v):
    while not Path({path!r}).exists():
        time.sleep(0.01)
    return 2 * q
"""


@pytest.fixture
def waits(make_remote, tmp_path):
    """A worker that answers once a file exists, the path of the file, and a problem."""
    path = tmp_path / "exists"
    (tmp_path / "waits.py").write_text(WAITS.format(path=str(path)))
    q = np.ones((2, 3, 5, 7), np.float32)
    remote = make_remote(f"{tmp_path}/waits.py:f", framework="numpy", limits=Limits(timeout=30.0))
    return remote, path, Problem(q, q, q)


def test_work_is_done_while_the_worker_answers(waits):
    remote, path, problem = waits
    with remote.while_answering(path.touch):
        assert (remote.forward(problem)["o"] == 2).all()
    touched = []
    with remote.while_answering(lambda: touched.append(path.touch())):
        remote.forward(problem)
        remote.forward(problem)
    assert len(touched) == 1  # while the first request is answered


def test_work_that_raises_leaves_no_answer_for_the_next_request(waits):
    remote, path, problem = waits

    def fail():
        path.touch()
        raise ValueError("of the judge")

    with pytest.raises(ValueError, match="of the judge"), remote.while_answering(fail):
        remote.forward(problem)
    assert remote.worker.connection.ended
    assert (remote.forward(problem.replace(q=3 * problem.q))["o"] == 6).all()


HIDES = """
import numpy as np

def f(q, k, v, attn_mask=None, return_weights=False):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores + attn_mask)
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v, weights) if return_weights else weights @ v
"""


def test_arrays_that_an_argument_is_made_of_are_no_arguments(make_remote, tmp_path):
    """A mask that hides is turned round for the −inf of a bias, in each of two calls."""
    (tmp_path / "f.py").write_text(HIDES)
    remote = make_remote(f"{tmp_path}/f.py:f", framework="numpy", like="torch.mha")
    problem = Recipe(lead=(2,), mask="padding", bias="full").problem(mask_true="hide")
    results = remote.forward(problem)
    exact = evaluate(problem, remote.conventions)
    np.testing.assert_allclose(results["o"], exact.out, atol=1e-5)
    np.testing.assert_allclose(results["weights"], exact.weights, atol=1e-5)


@pytest.mark.thorough
def test_none_among_the_results_is_named(make_remote, tmp_path):
    """In the terms of its framework, which is not NumPy's."""
    pytest.importorskip("torch")
    code = "import torch\ndef f(q: torch.Tensor, k, v, return_lse=False):\n"
    (tmp_path / "f.py").write_text(f"{code}    return (q, None) if return_lse else q\n")
    remote, q = make_remote(f"{tmp_path}/f.py:f"), np.zeros((2, 3, 5, 7), np.float32)
    with pytest.raises(ResultError, match=r"returned builtins\.NoneType, must be a torch tensor"):
        remote.forward(Problem(q, q, q))


def test_the_oracle_is_asked_while_the_worker_answers(waits, monkeypatch):
    """The worker answers only once the exact values are being computed."""
    remote, path, problem = waits
    exact = Trial.exact

    def compute_exact(*args):
        path.touch()
        return exact(*args)

    monkeypatch.setattr(Trial, "exact", compute_exact)
    space = Space(features=remote.features)
    trial = Trial(remote, remote.conventions, Rounding.undeclared("float32"), space)
    cotangents = Cotangents(problem.v, None)
    assert not trial.against_oracle(problem, cotangents)["o"].passed  # it is no attention
    path.unlink()
    assert trial.evaluate(problem, cotangents).results["o"].shape == problem.q.shape


def test_nothing_is_done_meanwhile_in_this_process(waits):
    here, done = Implementation(naive), []
    with here.while_answering(lambda: done.append(1)):
        here.forward(waits[2])
    assert not done


WRONG = {
    "writes its input": ("q *= 2; return right(q / 2, k, v)", "inputs-unchanged"),
    "result is a view of a buffer": ("BUFFER[:o.size] = o.ravel(); return view(o)", "outputs-kept"),
    "shares a buffer of two threads": ("return twice(q, k, v)", "two-threads"),
    "returns what it keeps": ("return kept(q, k, v)", "outputs-apart"),
    "reads its inputs late": ("return late(q, k, v)", "arrays-reused"),
}
SOURCE = """
import time
import numpy as np
BUFFER = np.zeros(1 << 16, np.float32)
SHARED = np.zeros(1 << 16, np.float32)

def right(q, k, v):
    s = np.einsum("...td,...sd->...ts", q, k, dtype=float) / max(q.shape[-1], 1) ** 0.5
    p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
    return (p / p.sum(-1, keepdims=True) @ v).astype(q.dtype)

def view(o):
    return BUFFER[:o.size].reshape(o.shape)

def twice(q, k, v):
    mine = SHARED[:q.size].reshape(q.shape)
    mine[...] = q
    time.sleep(0.002)
    return right(mine.copy(), k, v)

BY_CONTENTS = {}
def kept(q, k, v):
    key = q.tobytes() + k.tobytes() + v.tobytes()
    if key not in BY_CONTENTS:
        BY_CONTENTS[key] = right(q, k, v)
    return BY_CONTENTS[key]

KEPT = {}
def late(q, k, v):
    if id(q) not in KEPT:
        KEPT[id(q)] = q, right(q, k, v)
    return KEPT[id(q)][1]

"""


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_memory_are_seen_through_the_pipe(make_remote, tmp_path, name):
    body, rule = WRONG[name]
    lines = "o = right(q, k, v) if q.ndim == 4 and k.shape[1] == q.shape[1] else refuse()"
    path = tmp_path / "mine.py"
    path.write_text(
        f"{SOURCE}\ndef refuse():\n    raise ValueError('rank 4, K = H')\n"
        f"def f(q, k, v):\n    {lines}\n    {body}\n"
    )
    report = check(make_remote(f"{path}:f"), only=[rule], **FEW | {"examples": 20})
    (outcome,) = [o for o in report.outcomes if o.rule == rule]
    assert outcome.status == "failed", outcome


@pytest.mark.parametrize("kept", [False, True])
def test_large_arrays_come_and_go_as_they_are(make_remote, tmp_path, kept):
    path = tmp_path / "doubles.py"
    path.write_text("def f(q, k, v):\n    q *= 2\n    return q[..., ::-1]\n")
    rng = np.random.default_rng(0)
    sizes = ((1, 2, 1031, 67), (1, 2, 1, 67), (1, 2, 1, 67))
    q, k, v = (rng.standard_normal(size, dtype=np.float32) for size in sizes)
    assert q.nbytes > 2 * BLOCK
    problem, inputs = Problem(q, k, v), {"q": q.copy(), "k": k, "v": v}
    results = make_remote(f"{path}:f").forward(problem, inputs=inputs if kept else None)
    np.testing.assert_array_equal(results["o"], 2 * q[..., ::-1])
    np.testing.assert_array_equal(inputs["q"], 2 * q if kept else q)


def test_the_call_that_finds_out_the_framework_is_judged(make_remote, tmp_path):
    """It is the very first call, and the only wrong one."""
    deed = "CALLS.append(1); return (len(CALLS) > 1) * right(q, k, v)"
    path = tmp_path / "late.py"
    path.write_text(f"{SOURCE}CALLS = []\ndef f(q, k, v):\n    {deed}\n")
    report = check(make_remote(f"{path}:f"), only=["first-calls"], **FEW)
    (outcome,) = [o for o in report.outcomes if o.rule == "first-calls"]
    assert outcome.status == "failed"
    assert ": 1 of the first " in outcome.message
    assert ", call 1 before the others" in outcome.message


@pytest.mark.parametrize("shape", [(3, 5), (0, 5)])
def test_plain_arrays_own_their_memory_as_here(shape):
    data = np.arange(math.prod(shape), dtype=np.float32).tobytes()
    array = child.NumPy().view(Tensor("F32", shape, memoryview(b"?" + data)[1:]), None)
    assert array.flags.owndata
    assert array.flags.writeable
    assert array.flags.aligned
    assert (array.shape, array.tobytes()) == (shape, data)


@pytest.mark.thorough
def test_a_function_of_a_module_is_isolated_by_its_name():
    report = check(naive, isolate=True, only=["empty-row"], **FEW)
    assert not report.passed
    assert "load('npattn.testing.targets.numpy:naive')" in report.script()
    both = isolate(Implementation(flash, backward=flash_backward), Limits())
    both.worker.close()
    assert both.backward_spec == "npattn.testing.targets.numpy:flash_backward"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"command": "true", "untrusted": True}, "untrusted beside a command"),
        ({"command": "true", "backward": "mine:backward"}, "backward beside a command"),
        ({}, "target is None, must be named without a command"),
    ],
)
def test_arguments_that_contradict_a_command_are_wrong_usage(arguments, said):
    with pytest.raises(OptionError, match=said):
        connect(None, **arguments)


def test_a_function_without_a_name_or_a_pickle_cannot_be_isolated(monkeypatch):
    generator = (n for n in range(3))
    with pytest.raises(OptionError, match=r"cannot be pickled .*generator.*: put it into a module"):
        check(Implementation(lambda q, k, v: next(generator), framework="numpy"), isolate=True)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(OptionError, match=r"pip install cloudpickle, or put it into a module"):
        check(Implementation(lambda q, k, v: q, framework="numpy"), isolate=True)


@pytest.mark.thorough
def test_a_closure_is_isolated_by_its_pickle():
    pytest.importorskip("cloudpickle")
    factor = 2

    def doubled(q, k, v):
        return factor * flash(q, k, v)

    report = check(Implementation(doubled), isolate=True, only=["agreement-o"], **FEW)
    assert [o.status for o in report.outcomes] == ["failed"]


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_processes_have_a_worker_each(make_remote):
    alone = check(make_remote("numpy.flash"), only=["agreement-o", "views"], **FEW)
    shared = check(make_remote("numpy.flash"), only=["agreement-o", "views"], processes=2, **FEW)
    assert str(shared) == str(alone)


def test_a_command_is_a_worker(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    command = shlex.join([*NUMPY, f"{path}:right"])
    words = ["check", "mine", "--worker", command, "--only", "agreement-o", "--examples", "2"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "npattn check mine" in result.output


def test_the_file_of_the_worker_is_named():
    result = CliRunner().invoke(cli, ["worker", "--path"])
    assert result.output.strip() == str(CHILD)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.py:f", "there is no file"),
        ("nowhere:f", "there is no module"),
        ("json:nothing", "has no callable 'nothing', it has"),
    ],
)
def test_a_target_that_cannot_be_used_is_wrong_usage(target, said):
    with pytest.raises(OptionError, match=said):
        connect(target)


def test_a_target_whose_package_is_missing_names_what_is(tmp_path):
    path = tmp_path / "lacks_one.py"
    path.write_text(
        "try:\n    import absent_one\n"
        'except ImportError as err:\n    raise ImportError("pip install absent-kit") from err\n'
    )
    with pytest.raises(OptionError, match=r"absent-kit \(No module named 'absent_one'\)"):
        connect(f"{path}:f")


CLASSES = "class A:\n    def f(self, q, k, v): return q\na = A()\n"
AUTOGRAD = "import torch\nclass A(torch.autograd.Function): pass\nclass B(A): pass\n"


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("A", CLASSES, "A is a class, must be a function: give an instance a name"),
        ("A.f", CLASSES, "A.f is a method of a class, must be a function: give an instance"),
        ("B", AUTOGRAD, r"B is a torch.autograd.Function, must be a function: pass .*:B\.apply$"),
        ("f", "raise SystemExit(3)\n", r"ends itself when it is imported \(SystemExit: 3\): keep"),
        ("f", "x = 1\nx.y\n", r"cannot be imported: AttributeError: .* \(own_kinds.py:2\)"),
    ],
)
def test_a_target_that_is_no_function_says_what_to_name(tmp_path, name, source, said):
    if source is AUTOGRAD:
        pytest.importorskip("torch")
    path = tmp_path / "own_kinds.py"
    path.write_text(source)
    with pytest.raises(OptionError, match=said):
        connect(f"{path}:{name}")
    if source is CLASSES:
        assert connect(f"{path}:a.f").signature.leading == ("q", "k", "v")


def test_a_target_that_exits_when_it_is_imported_is_wrong_usage(tmp_path):
    (tmp_path / "exits.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(OptionError, match=r"cannot be imported: crashed: .* exit code 0"):
        connect(f"{tmp_path}/exits.py:f")


def test_a_command_that_does_not_exist_is_wrong_usage():
    with pytest.raises(OptionError, match="cannot be started"):
        connect("mine", command="no-such-program")


def test_limits_need_a_worker():
    words = ["check", "--in-process", "--timeout", "3"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert "--timeout need a worker" in result.output


# --- frames ---------------------------------------------------------------------------------------


def frame(message, **arrays):
    parts = []
    tensors = {n: Tensor("F32", x.shape, x.tobytes()) for n, x in arrays.items()}
    write_frame(parts.append, message, tensors)
    return bytearray(b"".join(parts))[8:]


def test_a_frame_is_read_as_it_was_written():
    array = np.arange(15, dtype=np.float32).reshape(3, 5)
    message, tensors = parse_frame(frame({"do": "forward"}, q=array))
    assert message == {"do": "forward"}
    assert tensors["q"].shape == (3, 5)
    assert bytes(tensors["q"].data) == array.tobytes()


def test_headers_quote_what_names_and_messages_hold():
    array = np.zeros((2, 0, 3), np.float32)
    message = {"text": 'a "name" \\ é ∞ \n', "number": 7}
    read, tensors = parse_frame(frame(message, **{'q"\\': array}))
    assert read == message
    assert tensors['q"\\'].shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape":[3,5]', b'"shape":[3,7]'),
        (b'"shape":[3,5]', b'"shape":[-3,5]'),
        (b'"data_offsets":[0,60]', b'"data_offsets":[9,69]'),
        (b'"dtype":"F32"', b'"dtype":"F99"'),
    ],
)
def test_a_frame_that_lies_is_garbage(old, new):
    body = frame({}, q=np.zeros((3, 5), np.float32))
    assert old in body
    with pytest.raises((ValueError, KeyError)):
        parse_frame(body.replace(old, new))


@pytest.mark.parametrize("step", [1, 7, 1 << 16])
def test_frames_are_told_apart_however_they_come(step):
    arrays = [np.arange(n, dtype=np.float32) for n in (3, 40_000, 0)]
    parts = []
    for number, array in enumerate(arrays):
        tensors = {"q": Tensor("F32", array.shape, array.tobytes())}
        write_frame(parts.append, {"id": number}, tensors)
    stream, rest = io.BytesIO(b"".join(parts)), bytearray()
    for number, array in enumerate(arrays):
        body = read_frame(lambda count: stream.read(min(count, step)), rest)
        message, tensors = parse_frame(body)
        assert message == {"id": number}
        assert bytes(tensors["q"].data) == array.tobytes()
    assert not rest


@pytest.mark.parametrize("length", [7, LARGEST + 1])
def test_a_length_that_no_frame_has_is_garbage(length):
    stream = io.BytesIO(length.to_bytes(8, "little"))
    with pytest.raises(ValueError, match=f"a frame of {length} bytes"):
        read_frame(stream.read, bytearray())


def test_a_frame_for_which_there_is_no_memory_is_garbage(monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    stream = io.BytesIO(LARGEST.to_bytes(8, "little"))
    with pytest.raises(ValueError, match="no memory"):
        read_frame(stream.read, bytearray())


def test_limits_are_kept_where_a_worker_is_sent_to_another_process(make_remote):
    import pickle

    remote = make_remote("numpy.naive", limits=Limits(timeout=7.0))
    again = pickle.loads(pickle.dumps(remote))
    assert again.worker.limits == Limits(timeout=7.0)
    assert again.signature == remote.signature


def test_a_limit_that_cannot_be_watched_is_wrong_usage(monkeypatch, tmp_path):
    monkeypatch.setattr(connection, "PROCESSES", tmp_path / "none")
    with pytest.raises(OptionError, match="needs /proc"):
        connect("numpy.naive", limits=Limits(memory=1 << 30))


@pytest.mark.thorough
def test_sweeps_never_reach_a_worker(make_remote):
    with pytest.raises(OptionError, match="sweep is 3, must be 0 for what lives in a worker"):
        check(make_remote("numpy.naive"), sweep=3)
    with pytest.raises(OptionError, match="sweep is 3, must be 0 for what lives in a worker"):
        check(naive, isolate=True, sweep=3)


COUNTS = """
import os
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info


def attention(q, k, v):
    blas = [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]
    seen = f"{max(blas)} {os.environ.get('OMP_NUM_THREADS')}"
    Path(__file__).with_name("threads").write_text(seen)
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""


@pytest.mark.parametrize("apart", [True, False])
def test_products_of_small_problems_have_one_thread(tmp_path, monkeypatch, apart):
    """OpenBLAS has: libraries of the user's own, in a worker that is alone, have all threads."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    path = tmp_path / "counts.py"
    path.write_text(COUNTS, "utf-8")
    implementation = (
        connect(f"{path}:attention") if apart else load_implementation(f"{path}:attention")
    )
    with threadpool_limits(2, "blas"):
        check(implementation, examples=2, only=["agreement-o"], diagnosis=False)
    assert (tmp_path / "threads").read_text() == "1 3"
