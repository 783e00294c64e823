"""Wrong input gets notes: an exception, an answer, a crash or a hang; none is a verdict."""

import os
import signal
import time

import numpy as np
import pytest

import npattn.testing.runner.robustness as robustness
from npattn.testing import Implementation, check
from npattn.testing.cases.space import Space
from npattn.testing.runner.robustness import MISTAKES, describe_wrong_input
from npattn.testing.targets.numpy import flash, naive
from npattn.testing.worker.connect import connect


def lenient(q, k, v, mask=None):
    """Return a result for any input."""
    return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)


def crashing(q, k, v):
    os.kill(os.getpid(), signal.SIGKILL)


def exiting(q, k, v):
    os._exit(3)


def hanging(q, k, v):
    time.sleep(3600)


def notes_of(f):
    implementation = Implementation(f, framework="numpy")  # which is not tried here
    return dict(
        line.split(": ", 1) for line in describe_wrong_input(implementation, Space(dtype="float32"))
    )


@pytest.mark.thorough
def test_every_wrong_input_of_features_is_tried():
    notes = notes_of(flash)
    wanted = {
        c.about for c in MISTAKES if c.needs is None or c.needs in Implementation(flash).features
    }
    assert (
        len(notes)
        == len(describe_wrong_input(Implementation(flash), Space(dtype="float32")))
        == len(wanted)
    )


@pytest.mark.thorough
def test_exception_is_noted_with_its_message():
    def refusing(q, k, v):
        raise ValueError("k and v must have one length")

    note = notes_of(refusing)["v is one key shorter than k"]
    line = refusing.__code__.co_firstlineno + 1
    text = f"raised ValueError: k and v must have one length (test_robustness.py:{line})"
    assert note == f"an exception ({text})"


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_result_is_noted_with_its_shape():
    note = notes_of(lenient)["v is one key shorter than k"]
    assert note == "ANSWERED without a word: float32 (5, 3, 5, 16), finite"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("f", "note"), [(crashing, "CRASHED with SIGKILL"), (exiting, "CRASHED with exit code 3")]
)
def test_a_crash_ends_the_child_alone(f, note):
    assert set(notes_of(f).values()) == {note}


def test_hanging_call_is_abandoned(monkeypatch):
    monkeypatch.setattr(robustness, "PATIENCE", 0.01)
    assert all("it hangs" in note for note in notes_of(hanging).values())


@pytest.mark.thorough
def test_notes_are_no_verdict():
    report = check(lenient, only=["robustness"])
    (outcome,) = report.outcomes
    assert (outcome.rule, outcome.status) == ("robustness", "passed")
    assert outcome.examples == len(outcome.message.splitlines())
    assert report.passed
    assert "ANSWERED without a word" in str(report)


def test_robustness_runs_only_by_name():
    report = check(lenient, examples=1, only=["shape-dtype"])
    assert "robustness" not in {o.rule for o in report.outcomes}


@pytest.mark.thorough
def test_a_worker_describes_its_mistakes_as_a_child_does():
    here, remote = Implementation(naive, framework="numpy"), connect("numpy.naive")
    space = Space(features=remote.features, dtype="float32")
    assert describe_wrong_input(remote, space) == describe_wrong_input(here, space)
    remote.worker.close()
