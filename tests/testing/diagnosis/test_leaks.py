"""A NaN that is multiplied by a weight of 0 is one cause, and no other mistake is named for it."""

import numpy as np
import pytest

from npattn.testing import check
from npattn.testing.diagnosis.leaks import TEXT

RULES = ["agreement-o", "hidden-nan", "nan-query-alone"]


def leaking(q, k, v, mask=None, factor=1):
    s = q @ k.swapaxes(-1, -2) * np.float32((q.shape[-1] or 1) ** -0.5)
    s = s if mask is None else np.where(mask, s, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isinf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total) @ v * np.float32(factor)


def twice(q, k, v, mask=None):
    return leaking(q, k, v, mask, factor=2)


def causes(f):
    report = check(f, features=["mask"], only=RULES, examples=7, shrink=False)
    return {cause.name: {rule.split("[")[0] for rule in cause.rules} for cause in report.causes}


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_rules_that_a_leaking_nan_breaks_have_one_cause():
    [(name, rules)] = causes(leaking).items()
    assert name == TEXT
    assert rules <= {"hidden-nan-k", "hidden-nan-v", "hidden-nan-kv", "nan-query-alone"}
    assert "hidden-nan-v" in rules


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_wrong_numbers_are_no_leak():
    found = causes(twice)
    assert all("agreement-o" not in rules for name, rules in found.items() if name == TEXT)
    assert any("agreement-o" in rules for rules in found.values())
