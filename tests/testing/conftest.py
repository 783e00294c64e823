"""Explanations that end with their questions: their seconds would depend on the machine."""

import pytest

from npattn.testing.diagnosis import borders, causes
from npattn.testing.places import asking

PATIENCE = 100
"""Times the usual seconds."""


@pytest.fixture(autouse=True)
def time_to_explain(monkeypatch):
    spent = asking.Asking._seconds_spent.fget
    monkeypatch.setattr(asking.Asking, "_seconds_spent", property(lambda x: spent(x) / PATIENCE))
    monkeypatch.setattr(causes, "SECONDS", PATIENCE * causes.SECONDS)
    monkeypatch.setattr(borders, "LEARNING", PATIENCE * borders.LEARNING)
