"""Answers of a worker's session, asked in this process."""

import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from npattn.testing.adapters import child
from npattn.testing.adapters.child import (
    JAX,
    NotPossible,
    Session,
    Tensor,
    Torch,
    Usage,
    answer_safely,
    describe_parameters,
    make_framework,
    parse_frame,
)

TARGET = """
import numpy as np

def f(q, k, v, mask=None, score_mod=None):
    return q + v

def two(q, k, v, return_lse=False):
    return q, v[..., 0]

def mapping(q, k, v):
    return {"o": q}

def backward(dout, q, k, v):
    return {"q": dout, "k": k, "v": None}

def text(q: np.ndarray, k, v):
    return "words"

def itself(q: np.ndarray, k, v):
    return q

def writes(q: np.ndarray, k, v):
    k[...] = 7
    return q + 1

def raises(q, k, v):
    raise LookupError("never")
"""
TORCH = """
import torch

def f(q, k, v, mask=None, score_mod=None):
    return torch.add(q, v)

def beside_nothing(q, k, v):
    return q + 1, None
"""
ONES = np.ones((1, 2, 3, 5), np.float32)
CALL = {"positional": [{"array": n} for n in "qkv"], "keywords": {}}


@pytest.fixture
def open_session(tmp_path):
    def open_(name, source=TARGET, **settings):
        path = tmp_path / f"session_{tmp_path.name[-1]}{len(source)}.py"
        path.write_text(source)
        session = Session(f"{path}:{name}")
        described, _ = answer_safely(session, {"do": "describe", **settings}, {})
        return session, described

    return open_


def tensors(**arrays):
    return {n: Tensor("F32", x.shape, x.tobytes()) for n, x in arrays.items()}


def ask(session, do="forward", call=CALL, arrays=None, **message):
    """Ask for a call with arrays of ones; return the answer and its tensors."""
    named = {n: {"tensor": n} for n in ("q", "k", "v", "dout")} | (arrays or {})
    message = {"do": do, "call": call, "arrays": named, **message}
    return answer_safely(session, message, tensors(q=ONES, k=ONES, v=ONES, dout=ONES))


def test_a_call_is_answered(open_session):
    session, described = open_session("f", framework="numpy")
    assert described["framework"] == "numpy"
    assert [name for name, *_ in described["parameters"]] == ["q", "k", "v", "mask", "score_mod"]
    answer, out = ask(session)
    assert answer == {"value": {"tensor": "0"}, "changed": {}}
    assert np.array_equal(np.frombuffer(out["0"].data, np.float32), 2 * ONES.ravel())


def test_several_results_keep_their_places(open_session):
    session, _ = open_session("two", framework="numpy")
    answer, out = ask(session)
    assert answer["value"] == {"tuple": [{"tensor": "0"}, {"tensor": "1"}]}
    assert out["1"].shape == (1, 2, 3)
    session, _ = open_session("mapping", framework="numpy")
    assert "returned builtins.dict" in ask(session)[0]["value"]["no result"]


def test_several_calls_are_answered_in_their_order(open_session):
    """They get the same arrays: one sees what the call before it has done to them."""
    session, _ = open_session("adds", "def adds(q, k, v):\n    q += 1\n    return q.copy()\n")
    answer, out = ask(session, call=None, calls=[CALL, CALL])
    assert answer["values"] == [{"tensor": "call 0, 0"}, {"tensor": "call 1, 0"}]
    values = [np.frombuffer(out[f"call {n}, 0"].data, np.float32) for n in range(2)]
    assert [x[0] for x in values] == [2, 3]


def test_a_backward_is_called_with_the_forward_before(open_session):
    session, _ = open_session("f", framework="numpy")
    session.backward = lambda dout, q, k, v, out: {"q": dout, "k": out, "v": None}
    keywords = {"out": {"result": 0}}
    backward = {"positional": [{"array": n} for n in ("dout", "q", "k", "v")], "keywords": keywords}
    answer, out = ask(session, "gradients", backward=backward)
    assert answer["value"] == {"mapping": {"q": {"tensor": "q"}, "k": {"tensor": "k"}, "v": None}}
    assert np.array_equal(np.frombuffer(out["k"].data, np.float32), 2 * ONES.ravel())
    answer, _ = ask(session, "gradients", cotangents={}, leaves=[])
    assert "differentiated by its backward" in answer["unreadable"]


def test_results_are_kept_until_they_are_read(open_session):
    session, _ = open_session("two", framework="numpy")
    assert ask(session, hold="a")[0]["value"] == {"tuple": [None, None]}
    for again in (True, False):
        answer, _ = answer_safely(session, {"do": "read", "of": "a", "again": again}, {})
        assert answer["value"] == {"tuple": [{"tensor": "0"}, {"tensor": "1"}]}
    answer, _ = answer_safely(session, {"do": "read", "of": "a"}, {})
    assert answer["raised"]["type"] == "KeyError"
    session, _ = open_session("mapping", framework="numpy")
    assert ask(session, hold="b")[0]["value"] is None
    read, _ = answer_safely(session, {"do": "read", "of": "b", "again": True}, {})
    assert "returned builtins.dict" in read["value"]["no result"]
    assert answer_safely(session, {"do": "drop", "drop": ["b"]}, {}) == ({}, {})
    assert session.held == {}


def test_what_a_call_changes_in_kept_arrays_is_told(open_session):
    session, _ = open_session("writes")
    kept = {"k": {"tensor": "k", "object": "a"}}
    answer, out = ask(session, arrays=kept)
    assert answer["changed"] == {"a": "changed a"}
    assert (np.frombuffer(out["changed a"].data, np.float32) == 7).all()
    write = {"do": "forward", "call": CALL, "write": {"a": "k"}, "arrays": {}}
    write["arrays"] = {"q": {"tensor": "q"}, "k": {"object": "a"}, "v": {"tensor": "q"}}
    answer_safely(session, write, tensors(q=ONES, k=3 * ONES))
    assert (session.objects["a"] == 7).all()


def test_results_on_the_memory_of_an_input_are_named(open_session):
    session, _ = open_session("itself")
    assert ask(session, overwrite=True)[0] == {"overlaps": [[("result", 0), ("input", "q")]]}
    session, _ = open_session("f", framework="numpy")
    assert ask(session, overwrite=True)[0] == {"overlaps": []}


def test_views_lie_in_one_buffer(open_session):
    session, _ = open_session("f", framework="numpy")
    layout = {"tensor": "q", "shape": [1, 2, 3, 5], "strides": [0, 60, 20, 4], "offset": 0}
    layouts = {"q": layout, "k": {**layout, "read_only": True}}
    arrays = session.arrays({"arrays": layouts}, tensors(q=ONES))
    assert np.shares_memory(arrays["q"], arrays["k"])
    assert [arrays[n].flags.writeable for n in "qk"] == [True, False]


def test_arguments_of_every_kind(open_session):
    session, _ = open_session("f", framework="numpy")
    value = session.value
    assert value([1, None, "a"], {}) == (1, None, "a")
    assert value({"number": "inf"}, {}) == np.inf
    assert value({"module": {"H": 3}}, {}).H == 3
    assert value({"score_mod": "squash"}, {})(0.0, 0, 0, 0, 0) == 0
    assert value({"result": 1}, {}, ("a", "b")) == "b"
    assert value({"result": 2}, {}, ("a", "b")) is None
    with pytest.raises(ValueError, match="an argument of kind 'nonsense'"):
        value({"nonsense": 1}, {})


def test_exceptions_are_described(open_session):
    session, _ = open_session("raises", framework="numpy")
    raised = ask(session)[0]["raised"]
    assert (raised["type"], raised["message"], raised["during"]) == (
        "LookupError",
        "never",
        "forward",
    )
    assert raised["bases"][:2] == ["LookupError", "Exception"]


@pytest.mark.parametrize(
    ("spec", "settings", "reason"),
    [
        ("f", {}, "must be module:function"),
        ("json:loads", {"framework": "numpy", "device": "cuda"}, "must be None for NumPy arrays"),
    ],
)
def test_wrong_usage_is_said(spec, settings, reason):
    answer, _ = answer_safely(Session(spec), {"do": "describe", **settings}, {})
    assert reason in answer["usage"]


def test_frameworks_by_module_annotation_and_import(open_session):
    assert open_session("text")[1]["framework"] == "numpy"
    assert open_session("raises", untried=True)[1]["framework"] == "numpy"
    assert not open_session("raises", untried=True)[1]["tried"]
    assert open_session("f")[1]["tried"]


def test_parameters_of_a_built_in_are_in_its_docstring():
    torch = pytest.importorskip("torch")
    described = describe_parameters(torch.nn.functional.scaled_dot_product_attention)
    names = [name for name, *_ in described]
    assert names[:4] == ["query", "key", "value", "attn_mask"]
    assert ["enable_gqa", "POSITIONAL_OR_KEYWORD", [False], ""] in described
    assert describe_parameters(int.from_bytes) != []
    assert describe_parameters(torch.nn.Linear(2, 3))[0][0] == "input"
    assert describe_parameters(vars) == []


def test_defaults_are_numbers_or_words():
    def f(q, scale=float("inf"), window=(1, 2), *, causal: bool = False, **options): ...

    assert describe_parameters(f) == [
        ["q", "POSITIONAL_OR_KEYWORD", [], ""],
        ["scale", "POSITIONAL_OR_KEYWORD", ["inf"], ""],
        ["window", "POSITIONAL_OR_KEYWORD", [[1, 2]], ""],
        ["causal", "KEYWORD_ONLY", [False], "<class 'bool'>"],
        ["options", "VAR_KEYWORD", [], ""],
    ]


def test_a_frame_with_a_long_header_is_garbage():
    with pytest.raises(ValueError, match="a header of 99 bytes"):
        parse_frame(bytearray((99).to_bytes(8, "little") + b"{}"))


# --- torch ----------------------------------------------------------------------------------------


def test_tensors_are_read_and_differentiated(open_session):
    pytest.importorskip("torch")
    session, described = open_session("f", TORCH)
    assert (described["framework"], described["gradients"]) == ("torch", "autograd")
    _, out = ask(session, threads=1)
    assert (np.frombuffer(out["0"].data, np.float32) == 2).all()
    gradients = {"cotangents": {"0": {"array": "dout"}}, "leaves": ["q", "k", "v"]}
    for slices in (False, True):
        answer, out = ask(session, "gradients", **gradients, slices=slices)
        assert answer["value"]["mapping"].keys() == {"q", "k", "v"}
        assert (np.frombuffer(out["q"].data, np.float32) == 1).all()
    wanted = {"cotangents": {"0": {"array": "dout"}}, "leaves": ["q"], "results": [2]}
    assert ask(session, "gradients", **wanted)[0] == {"returned": 0}


def test_no_result_has_no_memory(open_session):
    pytest.importorskip("torch")
    session, _ = open_session("beside_nothing", TORCH, framework="torch")
    assert ask(session, overwrite=True)[0] == {"overlaps": []}


def test_tensors_are_laid_out_written_and_compared():
    torch = pytest.importorskip("torch")
    frame = Torch()
    tensor = tensors(q=ONES)["q"]
    strided = frame.view(tensor, {"shape": [2, 3], "strides": [20, 4], "offset": 4})
    assert strided.stride() == (5, 1)
    with pytest.raises(NotPossible, match="no negative strides"):
        frame.view(tensor, {"shape": [2], "strides": [-4], "offset": 8})
    del frame.long["F32"]
    with pytest.raises(NotPossible, match="torch has no dtype float32"):
        frame.base(tensor)
    frame = Torch()
    written = torch.zeros(1, 2, 3, 5)
    frame.write(written, tensor)
    assert (written == 1).all()
    assert frame.memory(written).shape == written.shape
    assert frame.memory(written.bfloat16()).dtype == np.int16
    assert frame.memory(written.to(torch.float8_e5m2)[..., ::2]).dtype == np.int8
    assert frame.memory(written.to(torch.complex64).conj()) is None
    hidden = frame.hide(torch.zeros(2), torch.tensor([True, False]))
    assert hidden.tolist() == [0, -np.inf]
    added = frame.add_mask(torch.tensor([True, False]), torch.zeros(1))
    assert added.tolist() == [0, np.finfo(np.float32).min]


def test_devices_and_frameworks_that_are_not_there(monkeypatch):
    pytest.importorskip("torch")
    with pytest.raises(Usage, match="which torch cannot use here"):
        Torch("nonsense")
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(Usage, match="jax cannot be imported"):
        make_framework("jax", None)


@pytest.mark.parametrize("works", [True, False])
def test_a_result_that_loses_the_device_ends_the_process(open_session, monkeypatch, works, capfd):
    torch = pytest.importorskip("torch")
    session, _ = open_session("f", TORCH, framework="torch")

    def fails(*_, **__):
        raise RuntimeError("misaligned address\nand what to do")

    monkeypatch.setattr(session.framework, "read", fails)
    if not works:
        monkeypatch.setattr(torch, "ones", fails)
    monkeypatch.setattr(os, "_exit", sys.exit)
    if works:
        entry, _ = session.pack("forward", torch.zeros(1))
        assert entry["raised"]["type"] == "RuntimeError"
    else:
        with pytest.raises(SystemExit):
            session.pack("forward", torch.zeros(1))
    said = "the device is lost: RuntimeError: misaligned address\n"
    assert capfd.readouterr().err == ("" if works else said)


@pytest.mark.parametrize(("most", "cleared"), [(1998, 3), (2000, 0)])
def test_jax_clears_programs_before_memory_maps_run_out(monkeypatch, most, cleared):
    times = []
    framework = object.__new__(JAX)
    framework.jax = SimpleNamespace(clear_caches=lambda: times.append(framework.calls))
    framework.calls = 0
    monkeypatch.setattr(child, "count_maps", lambda: 1000)
    monkeypatch.setattr(child, "most_maps", lambda: most)
    for _ in range(3 * JAX.CALLS + 1):
        framework.allowing("F32")
    assert times == [JAX.CALLS, 2 * JAX.CALLS, 3 * JAX.CALLS][:cleared]


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps, as on Linux"
)
def test_memory_maps_are_counted():
    before = child.count_maps()
    held = [mmap.mmap(-1, mmap.PAGESIZE, prot=(1, 3)[n % 2]) for n in range(37)]
    assert before + len(held) - 7 <= child.count_maps() < child.most_maps()
