"""Memory that a worker shares with the judge: large frames, and what a target may do to it."""

import gc
import io
import os

import numpy as np
import pytest

from npattn.problem import Problem
from npattn.testing.adapters.child import LARGE_BLOCK, Tensor, parse_frame, read_frame, write_frame
from npattn.testing.worker import shared
from npattn.testing.worker.connect import connect
from npattn.testing.worker.connection import Connection
from npattn.testing.worker.shared import SharedMemory

TARGET = """
import os

def echo(q, k, v):
    return q

def cut(q, k, v):
    for descriptor in range(3, 64):  # all that this process has
        try:
            os.ftruncate(descriptor, 0)
        except OSError:
            pass
    return q
"""
LARGE = np.arange(3 * 101 * 1009, dtype=np.float32).reshape(1, 3, 1009, 101)
SMALL = LARGE[:, :, :5]


@pytest.fixture
def ask(tmp_path):
    """Return a function that returns o of q, of a function of the target."""
    path = tmp_path / "target.py"
    path.write_text(TARGET)

    def forward(name, q):
        remote = connect(f"{path}:{name}", framework="numpy")
        try:
            return remote.forward(Problem(q, SMALL, SMALL))["o"]
        finally:
            remote.worker.close()

    return forward


@pytest.fixture
def pipe_counts(monkeypatch):
    """Numbers of bytes that the judge sends and receives by pipe."""
    counts = {"sent": 0, "received": 0}
    send, receive = Connection._send, Connection._receive

    def count_sent(self, data, deadline):
        counts["sent"] += len(data)
        send(self, data, deadline)

    def count_received(self, count, deadline):
        data = receive(self, count, deadline)
        counts["received"] += len(data)
        return data

    monkeypatch.setattr(Connection, "_send", count_sent)
    monkeypatch.setattr(Connection, "_receive", count_received)
    return counts


def test_large_frames_lie_in_shared_memory(ask, pipe_counts):
    np.testing.assert_array_equal(ask("echo", LARGE), LARGE)
    assert max(pipe_counts.values()) < LARGE_BLOCK


def offer_other_memory(patch):
    """Say that the memory begins with other bytes, as some file of another machine does."""
    other = SharedMemory()
    other.close_descriptors()
    begins = other.offer["shared"]["begins"]
    init = SharedMemory.__init__

    def init_other(self):
        init(self)
        self.offer["shared"]["begins"] = begins

    patch.setattr(SharedMemory, "__init__", init_other)


@pytest.mark.parametrize(
    "prevent",
    [
        lambda patch: patch.delattr(os, "memfd_create"),
        lambda patch: patch.setattr(shared, "SIZE", LARGE_BLOCK),
        offer_other_memory,
    ],
    ids=["no such memory", "too small", "other memory"],
)
def test_large_frames_come_by_pipe_without_shared_memory(ask, pipe_counts, monkeypatch, prevent):
    prevent(monkeypatch)
    np.testing.assert_array_equal(ask("echo", LARGE), LARGE)
    assert min(pipe_counts.values()) > LARGE.nbytes


def test_a_target_cannot_end_the_judge_by_cutting_the_memory_off(ask):
    np.testing.assert_array_equal(ask("cut", LARGE), LARGE)


def test_requests_of_other_threads_come_by_pipe(ask, pipe_counts, monkeypatch):
    """Two of them at once would write to the same memory."""
    monkeypatch.setattr(Connection, "_channel", lambda self, thread: 1)
    np.testing.assert_array_equal(ask("echo", LARGE), LARGE)
    assert min(pipe_counts.values()) > LARGE.nbytes


@pytest.mark.thorough
def test_descriptors_of_the_judge_are_closed(ask):
    gc.collect()  # what tests before this one have left is closed here, and not in between
    before = os.listdir("/dev/fd")
    ask("echo", LARGE)
    assert not set(os.listdir("/dev/fd")) - set(before)


# --- frames ---------------------------------------------------------------------------------------


@pytest.fixture
def frame():
    """A large frame in shared memory, and what its stream has."""
    memory, parts = memoryview(bytearray(2 * LARGE.nbytes)), []
    tensors = {"q": Tensor("F32", LARGE.shape, LARGE.tobytes())}
    write_frame(parts.append, {"id": 7}, tensors, memory)
    return memory, io.BytesIO(b"".join(parts))


def test_a_frame_is_copied_from_shared_memory(frame):
    memory, stream = frame
    assert stream.getvalue() == bytes(8)
    body = read_frame(stream.read, bytearray(), memory)
    memory[:] = bytes(len(memory))  # its writer may change it
    message, tensors = parse_frame(body)
    assert message == {"id": 7}
    assert bytes(tensors["q"].data) == LARGE.tobytes()


@pytest.mark.parametrize("length", [7, 2 * LARGE.nbytes - 7])
def test_a_frame_that_is_not_in_the_memory_is_garbage(frame, length):
    memory, stream = frame
    memory[:8] = length.to_bytes(8, "little")
    with pytest.raises(ValueError, match=f"a frame of {length} bytes"):
        read_frame(stream.read, bytearray(), memory)


def test_a_length_of_0_is_garbage_where_no_memory_is_shared(frame):
    _, stream = frame
    with pytest.raises(ValueError, match="a frame of 0 bytes"):
        read_frame(stream.read, bytearray())


@pytest.mark.parametrize("seen", [None, False, 1, "yes"])
def test_memory_is_shared_with_who_says_that_it_sees_it(seen):
    memory = SharedMemory()
    memory.close_descriptors()
    memory.agree(seen)
    assert memory.view is None
    memory.agree(True)
    assert len(memory.view) == shared.SIZE
    memory.close()
    assert memory.view is None
