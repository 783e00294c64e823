"""A worker may say little, and what it says may be anything."""

import sys

import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.problem import Cotangents, Problem
from npattn.testing import check
from npattn.testing.adapters.base import Crash, ImplementationError
from npattn.testing.worker.connect import CHILD, connect
from npattn.testing.worker.description import read_description
from npattn.testing.worker.values import find_garbage, raise_errors, value_of

MINIMAL = """
import os, sys
sys.path.insert(0, FOLDER)
import numpy as np
from child import Tensor, parse_frame, read_frame, write_frame

def receive(n):
    data = os.read(0, n)
    if not data:
        raise EOFError
    return data

def write(data):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()

def forward(q, k, v, mask, scale):
    s = scale * q @ np.swapaxes(k, -1, -2)
    s = s if mask is None else np.where(mask, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.where(s == -np.inf, 0, np.exp(s - np.where(top == -np.inf, 0, top)))
    p = p / np.where(top == -np.inf, 1, p.sum(-1, keepdims=True))
    return p, p @ v

def backward(dout, q, k, v, mask, scale):
    p, _ = forward(q, k, v, mask, scale)
    dp = dout @ np.swapaxes(v, -1, -2)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    t = lambda x: np.swapaxes(x, -1, -2)
    return {"q": ds @ k, "k": t(ds) @ q, "v": t(p) @ dout}

def take(tensor):
    x = np.frombuffer(tensor.data, {"F32": np.float32, "BOOL": bool}[tensor.dtype])
    return x.reshape(tensor.shape).astype(float if tensor.dtype == "F32" else bool)

def put(x):
    return Tensor("F32", x.shape, x.astype(np.float32).tobytes())

def answer(message, tensors):
    if message["do"] == "describe":
        rest = [["mask"], ["scale"]]
        inputs = [["q"], ["k"], ["v"]]
        return {"parameters": inputs + rest, "backward": [["dout"], *inputs, *rest]}, {}
    differentiates = message["do"] == "gradients"
    call = message["backward" if differentiates else "call"]
    if set(message) - {"id", "do", "arrays", "call", "backward", "dtype"}:
        os._exit(9)  # nothing beyond was asked for
    def value(x):
        return take(tensors[message["arrays"][x["array"]]["tensor"]]) if type(x) is dict else x
    positional = [value(x) for x in call["positional"]]
    keywords = {n: value(x) for n, x in call["keywords"].items()}
    q, k, v = positional[-3:]
    if q.ndim != 4 or q.shape[:2] != k.shape[:2] or len(tensors) != len(message["arrays"]):
        return {"raised": {"type": "ValueError", "bases": ["ValueError"]}}, {}
    if differentiates:
        grads = backward(*positional, **keywords)
        value = {"mapping": {n: {"tensor": n} for n in grads}}
        return {"value": value}, {n: put(x) for n, x in grads.items()}
    return {"value": {"tensor": "o"}}, {"o": put(forward(*positional, **keywords)[1])}

np.seterr(all="ignore")
rest = bytearray()
while True:
    try:
        message, tensors = parse_frame(read_frame(receive, rest))
    except EOFError:
        break
    reply, out = answer(message, tensors)
    write_frame(write, {**reply, "id": message["id"]}, out)
"""


@pytest.mark.thorough
def test_minimal_worker_is_judged(tmp_path):
    """It says its parameters alone, without defaults, and gives gradients by name."""
    (tmp_path / "own.py").write_text(f"FOLDER = {str(CHILD.parent)!r}\n{MINIMAL}")
    worker = connect("minimal", command=f"{sys.executable} {tmp_path / 'own.py'}")
    try:
        rules = ("agreement-o", "agreement-dk", "inputs-unchanged", "two-threads", "views")
        report = check(worker, examples=13, diagnosis=False, shrink=False, only=rules)
    finally:
        worker.worker.close()
    states = {outcome.rule: outcome.status for outcome in report.outcomes}
    assert states == {
        "agreement-o": "passed",
        "agreement-dk": "passed",
        "inputs-unchanged": "not applicable",
        "two-threads": "not applicable",
        "views": "not applicable",
    }, str(report)


PARAMETERS = [["q"], ["k"], ["v"]]


def test_description_has_defaults():
    described = read_description({"parameters": PARAMETERS})
    assert described["framework"] == "numpy"
    assert described["gradients"] is None
    assert read_description({"parameters": PARAMETERS, "backward": []})["gradients"] == "backward"


@pytest.mark.every
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"parameters": None},
        {"parameters": [["q", "NO_KIND"]]},
        {"parameters": [["q"], ["q"]]},
        {"parameters": [["not a name"]]},
        {"parameters": PARAMETERS, "version": 2},
        {"parameters": PARAMETERS, "backward": 1},
        {"parameters": PARAMETERS, "gradients": "backward"},
        {"parameters": PARAMETERS, "gradients": "by hand"},
        {"parameters": PARAMETERS, "settings": {"odd": 1}},
        {"parameters": PARAMETERS, "settings": {"conventions": {"causal": "left"}}},
        {"parameters": PARAMETERS, "abilities": 1},
        {"parameters": PARAMETERS, "versions": 1},
    ],
)
def test_description_that_is_none_is_wrong_usage(answer):
    with pytest.raises(OptionError, match="the worker"):
        read_description(answer)


@pytest.mark.parametrize(
    "value", [5, {}, [], "a", "tuple", {"tensor": "x"}, {"tuple": 3}, {"mapping": []}]
)
def test_value_that_is_none_is_garbage(value):
    with pytest.raises(Crash, match="garbage"), find_garbage():
        value_of(value, {})


@pytest.mark.parametrize(
    "raised", [5, {}, {"type": "A\0"}, {"type": "\ud800"}, {"type": "A", "bases": 3}]
)
def test_exception_that_is_none_is_garbage(raised):
    with pytest.raises(Crash, match="garbage"):
        raise_errors({"raised": raised}, {"": "raised"})


@pytest.mark.parametrize("bases", [["ValueError"], [], ["ExceptionGroup", "Exception"]])
def test_exception_needs_its_type_alone(bases):
    raised = {"type": "Odd", "message": "no \ud800", "bases": bases}
    with pytest.raises(ImplementationError, match=r"raised Odd: no \\ud800") as caught:
        raise_errors({"raised": raised}, {"": "raised"})
    assert caught.value.is_refusal


TARGET = """
import numpy as np

def f(q, k, v, *, mask=None, bias=None):
    return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)

def backward(dout, q, k, v, *, mask=None, bias=None):
    return {"q": 0 * q, "k": 0 * k, "v": 0 * v, "bias": np.ones((*q.shape[:-1], k.shape[-2]))}
"""


def test_gradients_by_name_can_be_kept(tmp_path):
    """The gradient of the bias is folded to its shape after it was read."""
    (tmp_path / "own.py").write_text(TARGET)
    spec = str(tmp_path / "own.py")
    remote = connect(f"{spec}:f", backward=f"{spec}:backward", framework="numpy")
    q, k = np.ones((1, 2, 3, 5)), np.ones((1, 2, 7, 5))
    problem = Problem(q, k, k, mask=np.ones((3, 7), bool), bias=np.zeros((3, 7)))
    try:
        kept = remote.gradients(problem, Cotangents(q, None, None), before_reading=lambda: None)
    finally:
        remote.worker.close()
    assert kept["dbias"].shape == (3, 7)
    assert (kept["dbias"] == 2).all()


def test_wrong_usage_in_answer_to_a_call_ends_no_check():
    with pytest.raises(Crash, match="usage, in answer to a call"):
        raise_errors({"usage": "never mind"}, {})
