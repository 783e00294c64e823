"""A mistake that is no candidate for a rule's failure does not stop the diagnosis."""

from __future__ import annotations

from npattn.mistakes import MISTAKES
from npattn.testing.diagnosis.mistakes import breaks_alike
from tests.testing.diagnosis.failures import fail, trial_of


def test_mistake_wrong_in_every_call_breaks_no_rule_about_calls():
    mistake = MISTAKES["input-changed"]
    trial = trial_of(mistake.forward, mistake.backward)
    for outcome in fail(trial, ["plain", "wide"], kind="after"):
        object.__setattr__(outcome, "rule", "after-other-dtype")
        assert not breaks_alike(mistake, trial, outcome)
