"""Whatever a worker sends is data: it ends in a result, or in an exception of the judge's kinds."""

import contextlib
import gc
import io
import json
import os
import resource
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.testing.adapters.base import Crash, ImplementationError
from npattn.testing.adapters.child import (
    ABILITIES,
    Session,
    answer_safely,
    parse_frame,
    write_frame,
)
from npattn.testing.worker import connection
from npattn.testing.worker.connection import HEADER
from npattn.testing.worker.description import read_description
from npattn.testing.worker.remote import Remote
from npattn.testing.worker.supervisor import Limits, Worker
from npattn.testing.worker.values import OF_ALL, answer_bytes

TARGET = "def f(q, k, v, return_lse=False):\n    return (v, v[..., 0]) if return_lse else v\n"
Q = np.ones((1, 2, 3, 4), np.float32)
PROBLEM = Problem(Q, Q, Q)
ROUNDS, MANY = (25, 2000) if settings().max_examples > 1000 else (1, 100)
"""Examples of each of two tests, in rounds: Hypothesis keeps what it drew until one ends."""
ODD = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["F64", "C128", "tensor", "raised", "tuple", "mapping", "no result"]),
        st.sampled_from([10**5 * [1], [0, 2**62], [2**31, 2**31], 3 * [2**40], "\x1b[2J"]),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tensor", "tuple", "raised", "mapping", "type", "message", "0"]), inner
        )
    ),
    max_leaves=4,
)


class Fake:
    """A process that has answered before it was asked."""

    pid = 0

    def __init__(self, answer):
        requests, ours = os.pipe()
        answers, theirs = os.pipe()
        errors, silent = os.pipe()
        os.write(theirs, answer[: 1 << 15])
        os.close(theirs)
        os.close(silent)
        self.requests = requests  # is read by nobody
        self.stdin, self.stdout = os.fdopen(ours, "wb", 0), os.fdopen(answers, "rb", 0)
        self.stderr = os.fdopen(errors, "rb", 0)

    def wait(self, timeout=None):
        with contextlib.suppress(OSError):
            os.close(self.requests)
        self.requests = -1
        return 0

    def poll(self):
        return 0


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return right answers to `describe`, and to two calls of `Remote`."""
    path = tmp_path_factory.mktemp("target") / "f.py"
    path.write_text(TARGET)
    session, found = Session(f"{path}:f"), []

    class Recorder(Worker):
        def request(self, message, tensors, seconds, work=None, most=0):
            found.append(answer_safely(session, message, tensors))
            return found[-1]

        def begin(self):
            return self.generation

    worker = Recorder([], Limits(), {})
    describe = answer_safely(session, {"do": "describe", "framework": "numpy"}, {})
    worker.description = read_description(describe[0])
    Remote(worker).forward(PROBLEM)
    return describe, found[0]


def frame(message, tensors, number=1):
    out = io.BytesIO()
    write_frame(out.write, {**message, "id": number}, tensors)
    return out.getvalue()


def places(value, path=()):
    """Yield the places in JSON."""
    yield path
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def change(value, path, new):
    if not path:
        return new
    value = dict(value) if isinstance(value, dict) else list(value)
    value[path[0]] = change(value[path[0]], path[1:], new)
    return value


@st.composite
def mutants(draw, answer):
    """Return the bytes of an answer that was changed: in its JSON, its header or its bytes."""
    data = frame(*answer)
    size = int.from_bytes(data[8:16], "little")
    header, body = json.loads(data[16 : 16 + size]), data[16 + size :]
    kind = draw(st.sampled_from(["message", "header", "bytes", "length", "cut", "insert"]))
    if kind in ("message", "header"):
        message = json.loads(header["__metadata__"]["npattn"])
        part = message if kind == "message" else header
        path = draw(st.sampled_from(list(places(part))))
        part = change(part, path, draw(ODD))
        if kind == "message":
            header["__metadata__"]["npattn"] = json.dumps(part)
        text = json.dumps(header if kind == "message" else part).encode()
        return struct.pack("<QQ", 8 + len(text) + len(body), len(text)) + text + body
    data = bytearray(data)
    at = draw(st.integers(0, len(data) - 1))
    if kind == "bytes":
        for _ in range(draw(st.integers(1, 4))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    elif kind == "length":
        at = draw(st.sampled_from([0, 8]))
        length = draw(st.one_of(st.integers(0, 2**64 - 1), st.integers(2**28, 2**33)))
        data[at : at + 8] = length.to_bytes(8, "little")
    elif kind == "cut":
        del data[at:]
    else:
        data[at:at] = draw(st.binary(max_size=20))
    return bytes(data)


@pytest.fixture(scope="module")
def fakes():
    """Let `Connection` start nothing."""
    gc.collect()  # a connection of another test could not end its process here
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_end_family", lambda *_: None)
        patch.setattr(connection, "_family", lambda *_: [])
        process = SimpleNamespace(answer=b"")
        popen = lambda *_, **__: Fake(process.answer)  # noqa: E731
        patch.setattr(connection.subprocess, "Popen", popen)
        yield process


@pytest.mark.thorough
def test_changed_messages_end_in_a_verdict(answers, fakes):
    """Nightly there are a hundred thousand."""
    describe, forward = answers

    few = settings(max_examples=MANY)

    @few
    @given(mutants(forward))
    def test_call(data):
        fakes.answer = data
        worker = Worker([], Limits(timeout=2), {"framework": "numpy"})
        worker.description = read_description(describe[0])
        remote = Remote(worker)
        worker.connection = connection.Connection([], None, None)
        try:
            results = remote.forward(PROBLEM)
        except ImplementationError:
            return
        finally:
            worker.close()
        assert all(isinstance(array, np.ndarray) for _, array in results.pairs)

    @few
    @given(mutants(describe))
    def test_describe(data):
        fakes.answer = data
        worker = Worker([], Limits(), {"framework": "numpy"}, abilities=ABILITIES)
        try:
            Remote(worker)
        except (OptionError, ImplementationError):
            pass
        finally:
            worker.close()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(ROUNDS):
        test_call()
        test_describe()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB: 1 GiB


def test_unchanged_message_is_a_result(answers, fakes):
    """Else each change would end in a crash, whatever it is."""
    describe, forward = answers
    fakes.answer = frame(*forward)
    worker = Worker([], Limits(timeout=2), {"framework": "numpy"})
    worker.description = read_description(describe[0])
    remote = Remote(worker)
    worker.connection = connection.Connection([], None, None)
    np.testing.assert_array_equal(remote.forward(PROBLEM)["o"], Q)
    worker.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<Q", 1 << 32), "a frame of 4294967296 bytes"),
        (frame({}, {}, 2), "KeyError: 2"),
        (frame({}, {}, []), "TypeError"),
    ],
)
def test_answer_that_nobody_asked_for_is_garbage(fakes, data, words):
    fakes.answer = data + bytes(10 << 10)
    own = connection.Connection([], None, None)
    with pytest.raises(Crash, match=words):
        own.exchange({"do": "forward"}, {}, 2.0, most=OF_ALL)


def test_header_is_small():
    """JSON makes much memory of it."""
    body = struct.pack("<Q", HEADER + 1) + bytes(HEADER + 1)
    with pytest.raises(ValueError, match="a header of 1048577 bytes"):
        parse_frame(body, HEADER)


def test_bytes_of_an_answer_follow_from_its_shapes():
    """Of results, weights and gradients in the widest dtype, and not of more than memory has."""
    shapes = {"q": (2, 8, 64, 32), "k": (2, 8, 1024, 32), "v": (2, 8, 1024, 32)}
    weights = 16 * 2 * 8 * 64 * 1024
    assert weights < answer_bytes(shapes, 1) < 1 << 32
    broadcast = {"q": (1, 2, 3, 4), "k": (500, 2, 3, 4), "v": (500, 2, 3, 4)}
    assert answer_bytes(broadcast, 1) - OF_ALL >= 16 * 500 * 2 * 3 * 4
    assert answer_bytes({"q": (1, 1, 0, 0)}, 3) < 2 * OF_ALL


def test_parameter_without_a_name_is_no_description():
    """`inspect` raises IndexError."""
    with pytest.raises(OptionError, match="IndexError"):
        read_description({"parameters": [["", "POSITIONAL_OR_KEYWORD", []]]})
