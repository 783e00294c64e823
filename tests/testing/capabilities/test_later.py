"""Structure that is taken in some sizes and raises in others is refused, and the rest is judged."""

import numpy as np
import pytest

import npattn
from npattn.testing import check
from npattn.testing.cases.classes import structure_of
from npattn.testing.cases.recipe import Recipe
from npattn.testing.runner.journal import Journal


def refusing(refuses, error=ValueError):
    """Return right attention that raises where `refuses(q, k)` is true."""

    def f(q, k, v, causal=False):
        if refuses(q, k):
            raise error("not this one")
        alignment = "bottom_right" if causal else False
        return npattn.attention(q, k, v, causal=alignment).astype(q.dtype)

    return f


def judge(f, *only, examples=20, **options):
    options = {"framework": "numpy", "shrink": False, "diagnosis": False, **options}
    return check(f, only=only or ("agreement-o",), examples=examples, **options)


LATE = {
    "rank 3": (lambda q, k: q.ndim == 3 and q.shape[-2] < 7, AssertionError),
    "rank 5": (lambda q, k: q.ndim == 5 and q.shape[-2] < 7, IndexError),
    "broadcast": (lambda q, k: q.ndim == 4 and len(q) > len(k) and q.shape[-2] < 7, ValueError),
    "T = 1": (lambda q, k: q.shape[-2] == 1, ZeroDivisionError),
    "B = 1": (lambda q, k: q.ndim == 4 and len(q) == 1, NotImplementedError),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LATE)
def test_structure_that_raises_in_some_sizes_is_refused(name):
    refuses, error = LATE[name]
    report = judge(refusing(refuses, error), "agreement-o", "batch-alone")
    lines = [line for line in report.refused if "raises in" in line]
    assert report.passed, report
    assert [line.split(": ")[1] for line in lines] == [name]
    assert f"{error.__name__}: not this one" in lines[0]
    assert f"{name}: " in str(report)  # short as it is


@pytest.mark.thorough
def test_view_that_raises_in_some_sizes_is_refused():
    def refuses(q, k):
        return q.ndim == 4 and 1 < q.shape[2] < 12 and 0 < q.strides[1] < q.strides[2]

    report = judge(refusing(refuses), "views", seed=2)
    assert report.passed
    assert any("transposed: taken in some sizes, raises in others" in x for x in report.refused)


@pytest.mark.thorough
def test_rank_taken_by_chance_is_forgotten_with_its_wrong_answers():
    """Axes are counted from the front: in rank 3 the mask of causal is of other sizes."""

    def of_rank_4(q, k, v, causal=False):
        scores = q @ k.swapaxes(-1, -2) / np.float32(q.shape[-1] ** 0.5)
        mask = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        scores = np.where(mask, scores, -np.float32(np.inf)) if causal else scores
        top = scores.max(-1, keepdims=True)
        p = np.exp(scores - np.where(np.isfinite(top), top, 0))
        return p / np.maximum(p.sum(-1, keepdims=True), np.float32(1e-30)) @ v

    report = judge(of_rank_4, "agreement-o", "empty-row", "permute-heads")
    assert {o.status for o in report.outcomes if o.level in ("values", "edges")} == {"passed"}
    assert sum("rank 3: taken in some sizes, raises in others" in x for x in report.refused) == 1


def does_not_fit(text):
    """Raise ValueError as NumPy does, not on purpose."""
    return np.zeros(2).reshape(3)


PLAIN = {
    "many queries": (lambda q, k: q.shape[-2] > 32, IndexError),
    "more keys": (lambda q, k: k.shape[-2] == 3 and q.shape[-2] != 3, does_not_fit),
    "a mistake": (lambda q, k: q.ndim == 3 and q.shape[-2] < 7, NameError),
}


@pytest.mark.parametrize("name", PLAIN)
def test_exceptions_of_plain_structure_stay_errors(name):
    report = judge(refusing(*PLAIN[name]), seed=2)
    assert not report.passed
    assert [o.status for o in report.outcomes if o.rule == "agreement-o"] == ["error"]
    assert not any("raises in" in line for line in report.refused)


def test_sizes_that_the_user_names_are_no_structure_to_refuse():
    report = judge(refusing(LATE["T = 1"][0], does_not_fit), sizes={"T": (3, 1)})
    assert [o.status for o in report.outcomes if o.rule == "agreement-o"] == ["error"]


@pytest.mark.thorough
def test_journal_goes_on_without_refused_structure(tmp_path):
    f, path = refusing(LATE["rank 3"][0]), tmp_path / "journal"
    whole = judge(f, journal=path)
    journal = Journal.resume(path)
    assert list(journal.refused["float32"]) == ["rank 3"]
    again = judge(f, resume=path)
    assert again.refused == whole.refused
    assert [o.examples for o in again.outcomes] == [o.examples for o in whole.outcomes]


@pytest.mark.thorough
def test_answers_given_with_refused_structure_are_forgotten():
    """Rank 3 is wrong in one rule, and raises in a later one: nothing wrong is left of it."""
    calls = []

    def f(q, k, v):
        late = q.ndim == 3 and q.shape[-2] < 7
        calls.extend([late] if late else [])
        if late and len(calls) > 1:
            raise ValueError("not this one")
        return (npattn.attention(q, k, v) * (1 + late)).astype(q.dtype)

    report = judge(f, "agreement-o", "permute-heads")
    assert any("rank 3: taken in some sizes" in line for line in report.refused)
    assert {o.rule: o.status for o in report.outcomes}["agreement-o"] == "passed"


def test_structure_of_a_recipe():
    plain = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13)
    assert structure_of(plain) == ("rank 4",)
    odd = Recipe(lead=(1,), H=1, K=1, T=0, S=1, D=11, E=13, view="stepped", broadcast=True)
    assert structure_of(odd) == (
        "stepped",
        "broadcast",
        "rank 4",
        "T = 0",
        "B = 1",
        "H = 1",
        "S = 1",
    )
    assert structure_of(Recipe(lead=None, T=5, S=7, D=11, E=13)) == ("rank 2",)
