"""Contrasts that other processes found are taken, and all others are found here."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from npattn.testing.diagnosis import ahead, causes
from npattn.testing.diagnosis.statement import Contrast
from npattn.testing.targets.numpy import naive
from tests.testing.diagnosis.failures import fail, trial_of

TRIAL = trial_of(naive)
(OUTCOME,) = fail(TRIAL, ["plain"])
HERE = Contrast("here")


@pytest.fixture
def found_here(monkeypatch):
    """Outcomes whose contrasts are found in this process."""
    outcomes = []

    def contrast(trial, outcome):
        outcomes.append(outcome)
        return HERE

    monkeypatch.setattr("npattn.testing.diagnosis.contrasts.contrast", contrast)
    return outcomes


def begun(future):
    contrasts = ahead.Contrasts(lambda *_: future)
    contrasts.begin(TRIAL, OUTCOME)
    return contrasts


def at_work():
    future = Future()
    assert future.set_running_or_notify_cancel()
    return future


def test_what_another_process_found_is_taken(found_here):
    future = at_work()
    contrasts = begun(future)
    future.set_result(Contrast("elsewhere"))
    assert contrasts.find(TRIAL, OUTCOME) == Contrast("elsewhere")
    assert not found_here


def test_what_nobody_has_begun_is_found_here(found_here):
    future = Future()
    assert begun(future).find(TRIAL, OUTCOME) == HERE
    assert future.cancelled()
    assert found_here == [OUTCOME]


def test_what_failed_elsewhere_is_found_here(found_here):
    future = at_work()
    future.set_exception(AttributeError("it cannot be pickled"))
    assert begun(future).find(TRIAL, OUTCOME) == HERE
    assert found_here == [OUTCOME]


def test_without_processes_all_is_found_here(found_here):
    contrasts = ahead.Contrasts()
    contrasts.begin(TRIAL, OUTCOME)
    assert contrasts.find(TRIAL, OUTCOME) == HERE
    assert found_here == [OUTCOME]


def test_what_is_not_asked_for_is_given_up():
    future = Future()
    begun(future).close()
    assert future.cancelled()


def test_a_diagnosis_begins_contrasts_of_what_is_required(found_here):
    outcomes = fail(TRIAL, ["wide", "plain", "longer", "groups"])
    object.__setattr__(outcomes[0], "level", "non-finite")
    object.__setattr__(outcomes[2], "kind", "raised")
    futures = {}

    def submit(function, trial, outcome):
        assert function is ahead._contrast
        return futures.setdefault(outcome.id, Future())

    causes.diagnose([(TRIAL, outcomes)], contrasts=2, submit=submit)
    assert list(futures) == [outcomes[1].id, outcomes[3].id]
    assert len(found_here) < len(futures)
    assert all(future.cancelled() for future in futures.values())
