"""Explanations that end with their questions: their seconds would depend on the machine."""

import pytest

from npattn.testing.diagnosis import causes, explore
from npattn.testing.places import asking

PATIENCE = 100
"""Times the usual seconds."""


@pytest.fixture(autouse=True)
def time_to_explain(monkeypatch):
    spent = asking.Asking._seconds_spent.fget
    monkeypatch.setattr(asking.Asking, "_seconds_spent", property(lambda x: spent(x) / PATIENCE))
    for module in (causes, explore):
        monkeypatch.setattr(module, "SECONDS", PATIENCE * module.SECONDS)
