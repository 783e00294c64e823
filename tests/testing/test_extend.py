"""A rule and a target added through npattn.testing.extend take part."""

import numpy as np
import pytest

import npattn.testing
from npattn.testing import check, extend
from npattn.testing.targets import load
from npattn.testing.targets.numpy import flash


@pytest.fixture
def finite_output():
    @extend.rule("finite-output", "10")
    def finite(trial, recipe):
        """Finite inputs give a finite o."""
        problem = trial.problem(recipe)
        if not np.isfinite(trial.implementation.forward(problem)["o"]).all():
            raise extend.Violation("o is not finite", problem)
        return 0.0

    yield "finite-output"
    del extend.PROPERTIES["finite-output"]


@pytest.mark.parametrize(("factor", "status"), [(1, "passed"), (np.nan, "failed")])
def test_an_added_rule_is_asked(finite_output, factor, status):
    report = check(lambda q, k, v: factor * flash(q, k, v), only=[finite_output], examples=3)
    assert [o.status for o in report.outcomes if o.rule == finite_output] == [status]


def test_an_added_target_is_known_by_name(monkeypatch):
    home = "npattn.testing.targets.numpy"
    plain = extend.TARGETS["numpy.naive"].profile
    target = extend.Target("mine", home, "flash", "flash_backward", (), plain, "about")
    monkeypatch.setitem(extend.TARGETS, "mine", target)
    assert load("mine")[0] is flash


def test_users_see_public_names_only():
    modules = {"extend", "strategies", "targets", "tolerance", "variants"}
    assert modules < {*dir(npattn.testing)}
    assert all(
        callable(getattr(npattn.testing, n)) for n in dir(npattn.testing) if n not in modules
    )
    assert all(getattr(npattn.testing, name).__all__ for name in modules)
    with pytest.raises(AttributeError, match="attribute chekc"):
        npattn.testing.chekc  # noqa: B018
