"""A trial asks an implementation once, and for what is allowed only where it must."""

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.testing import Implementation, Recipe, Rounding
from npattn.testing.cases.strategies import Pools, Space
from npattn.testing.targets.numpy import flash, flash_backward
from npattn.testing.trial import Judged, Later, Trial, Violation

RECIPE = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13, seed=17)


def trial_of(f=flash, backward=None, **space):
    implementation = Implementation(f, backward=backward)
    space = Space(features=implementation.features, **space)
    return Trial(implementation, Conventions(), Rounding.undeclared("float32"), space)


def same(x):
    return x


# --- later ----------------------------------------------------------------------------------------


def test_what_is_made_later_is_made_once_and_when_it_is_looked_into():
    calls = []

    def make():
        calls.append(1)
        return {"o": np.ones(3), "lse": np.zeros(2)}

    later = Later(make)
    assert not later.made
    assert calls == []
    assert later["o"].sum() == 3
    assert list(later) == ["o", "lse"]
    assert len(later) == 2
    assert later.made
    assert calls == [1]


# --- two results of one implementation ------------------------------------------------------------


def changed(judged, **results):
    """The same, but for some results; what is allowed is asked for anew."""
    allowed = Later(lambda: dict(judged.allowed))
    found = judged.results | results
    return Judged(judged.problem, judged.cotangents, found, judged.want, allowed)


@pytest.fixture
def first():
    return trial_of().judged(RECIPE)


def moved(judged, share):
    """The same, but for an o that is off by a share of what is allowed."""
    room = trial_of().judged(RECIPE).allowed["o"]
    o = judged.results["o"]
    return changed(judged, o=(o + share * room).astype(o.dtype))


def test_two_that_do_not_differ_need_nothing_that_is_allowed(first):
    second = changed(first)
    assert trial_of().relate(first, second, {"o": same}) == 0
    assert not first.allowed.made
    assert not second.allowed.made


def test_whose_allowance_counts_does_not_depend_on_whether_results_differed_before(first):
    trial_of().relate(first, changed(first), {"o": same})
    other = moved(first, 0.5)
    trial_of().relate(other, first, {"o": same})
    assert first.allowed.made
    assert not other.allowed.made


def test_two_that_are_near_are_judged_by_what_one_of_them_is_allowed(first):
    second = moved(first, 0.5)
    assert 0 < trial_of().relate(first, second, {"o": same}) < 1
    assert first.allowed.made
    assert not second.allowed.made


def test_what_has_been_made_is_taken_first(first):
    second = moved(trial_of().judged(RECIPE), 0.5)
    assert len(second.allowed) > 1
    trial_of().relate(first, second, {"o": same})
    assert not first.allowed.made


def test_two_that_are_apart_are_judged_by_what_both_are_allowed(first):
    o = first.results["o"]
    step = 1.5 * first.allowed["o"]  # more than one is allowed, less than both
    second = changed(first, o=(o + step).astype(o.dtype))
    assert 0 < trial_of().relate(first, second, {"o": same}) <= 1
    assert second.allowed.made


def test_two_that_are_further_apart_are_a_violation_that_shows_the_wrong_one(first):
    o = first.results["o"]
    second = changed(first, o=(o + 5 * first.allowed["o"]).astype(o.dtype))
    with pytest.raises(Violation, match=r"o\[") as caught:
        trial_of().relate(first, second, {"o": same})
    assert caught.value.ratio > 1


def test_where_the_first_may_overflow_it_says_nothing_about_the_second(first):
    o, want = first.results["o"].copy(), first.want["o"].copy()
    o[1, 2, 3, 4], want[1, 2, 3, 4] = np.inf, 2.0**129
    may = Judged(first.problem, first.cotangents, {"o": o}, {"o": want}, first.allowed)
    assert trial_of().relate(may, changed(first), {"o": same}) <= 1
    with pytest.raises(Violation, match=r"o\[1, 2, 3, 4\]"):
        trial_of().relate(changed(first, o=o), changed(first), {"o": same})


def test_a_result_that_either_has_not_or_not_in_its_shape_is_left_out(first):
    for wrong in ({"o": None}, {"o": first.results["o"][:1]}):
        second = changed(first, **wrong)
        assert trial_of().relate(first, second, {"o": same, "dq": same}) == 0
        assert trial_of().relate(second, first, {"o": same}) == 0


# --- against the oracle ---------------------------------------------------------------------------


def test_a_result_of_another_shape_is_beyond_everything():
    def flat(q, k, v):
        return flash(q, k, v)[..., :1]

    found = trial_of(flat).agreement(RECIPE)
    assert found["o"].ratio == np.inf
    assert "o has shape (2, 3, 5, 1), want (2, 3, 5, 13)" in str(found["o"])


def test_what_is_not_asked_for_is_not_compared():
    trial = trial_of(flash, flash_backward)
    trial.gradients = frozenset({"dk"})
    assert set(trial.agreement(RECIPE)) == {"o", "lse", "dk"}


def test_who_raises_on_the_plain_problem_is_wrong_anyway():
    def refuses(q, k, v):
        raise ValueError("never")

    assert trial_of(refuses).wrong_anyway(RECIPE)
    assert not trial_of().wrong_anyway(RECIPE)


def test_an_answer_is_remembered():
    calls = []

    def counted(q, k, v):
        calls.append(q.shape)
        return flash(q, k, v)

    trial = trial_of(counted)
    calls.clear()  # what framework it is was tried
    assert trial.judged(RECIPE) is trial.judged(RECIPE)
    assert trial.agreement(RECIPE) is trial.agreement(RECIPE)
    assert len(calls) == 2  # one for each of the two


def test_cotangents_are_those_that_the_implementation_takes():
    with_lse = trial_of(flash, flash_backward)
    problem = with_lse.problem(RECIPE)
    assert with_lse.cotangents(RECIPE, problem).dlse is not None

    def plain(q, k, v):
        return flash(q, k, v)

    dout, dlse = trial_of(plain).cotangents(RECIPE, problem, weights=True)
    assert dout.shape == (2, 3, 5, 13)
    assert dlse is None


# --- what is planned ------------------------------------------------------------------------------


def test_what_is_planned_is_remembered_by_all_that_it_depends_on():
    trial = trial_of()
    pools = Pools(trial.space)
    planned = list(trial.planned(pools, 3, 10))
    assert planned == list(pools.planned(3, 10))
    again = trial.planned(Pools(trial.space), 3, 10)
    assert all(x is y for x, y in zip(again, planned, strict=True))
    for others in (
        trial.planned(pools, 5, 10),
        trial.planned(pools, 3, 11),
        trial.planned(Pools(trial.space, force={"T": 7}), 3, 10),
        trial.planned(Pools(trial.space, forbid=frozenset({"mask"})), 3, 10),
        trial.planned(Pools(trial.space, nonempty=True), 3, 10),
    ):
        assert list(others) != planned
