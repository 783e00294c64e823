"""A diagnosis that tries fewer problems, where that is enough for what a test says."""

import pytest

from npattn.testing.diagnosis import borders, search


@pytest.fixture(autouse=True)
def small_problems(monkeypatch):
    monkeypatch.setattr(search, "PROBES", 5)
    monkeypatch.setattr(borders, "LEARNED", 2**14)


@pytest.fixture
def few_problems(monkeypatch):
    """Enough for a step, and too few for a place."""
    monkeypatch.setattr(borders, "MOST", 12)
