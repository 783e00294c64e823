"""A diagnosis that tries fewer problems, where that is enough for what a test says."""

from itertools import islice

import pytest

from npattn.testing.diagnosis import explore, search


@pytest.fixture(autouse=True)
def small_problems(monkeypatch):
    monkeypatch.setattr(search, "PROBES", 5)
    monkeypatch.setattr(explore, "LARGE", 2**14)


@pytest.fixture
def few_problems(monkeypatch):
    """Enough for a step, and too few for a place."""
    around = explore.around
    monkeypatch.setattr(explore, "around", lambda *args: islice(around(*args), 12))
