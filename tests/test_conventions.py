"""Every field of Conventions, alone and with others, held against loops.

`Conventions` translates a problem into a canonical one and its results back; `loops` computes what
the field says. The tolerance is the derived one of test_dense.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

# pytest puts the folder of a test on the path.
from test_dense import (
    INPUTS,
    MORE_KEYS,
    MORE_QUERIES,
    NAMES,
    ONE_HEAD,
    Case,
    Cotangents,
    Sizes,
    U,
    assert_within,
    cotangents,
    make,
    rounding,
)

import npattn
from npattn import Conventions, loops
from npattn.conventions import PROFILES
from npattn.errors import OptionError

Array = np.ndarray[Any, Any]

FIELDS: dict[str, tuple[Any, ...]] = {
    "causal": ("top_left",),
    "empty_row": ("nan", "mean"),
    "hidden_fill": (-1e9, 1.5, float(np.finfo(np.float32).min)),
    "mask_true": ("hide",),
    "window": ("total",),
    "lse_base": ("2",),
    "lse_empty": (math.inf, 0.0, math.nan),
}
SINGLES = [{name: value} for name, values in FIELDS.items() for value in values]
PAIRS = [a | b for a, b in itertools.combinations(SINGLES, 2) if a.keys() != b.keys()]
HIDING: dict[str, Any] = {"causal": True, "window": (2, 1)}
PROBLEMS = {
    "bare": (MORE_QUERIES, ()),
    "bias and dropout": (MORE_QUERIES, ("mask", "bias", "dropout")),
    "everything": (MORE_KEYS, NAMES),
    "one head": (ONE_HEAD, ("mask", "score_mod", "softcap", "bias")),
}


def told(fields: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in fields.items())


def assert_agrees(case: Case, conventions: Conventions, **hiding: Any) -> None:
    """Forward and backward under conventions give what loops gives under them."""
    fwd = case.forward(conventions=conventions, **hiding)
    problem, d = fwd.problem, cotangents(fwd, 5)
    out, lse, weights = loops.forward(problem, conventions)
    natural = dataclasses.replace(conventions, lse_base="e", lse_empty=-math.inf)
    base = math.log(2) if conventions.lse_base == "2" else 1.0
    canonical_d = Cotangents(d.dout, None if d.dlse is None else d.dlse / base, d.dweights)
    sized = problem
    if problem.dropout_mask is not None and conventions.empty_row == "mean":
        sized = problem.replace(dropout_mask=np.ones((1, 1), bool))  # a mean row drops nothing
    allowed = rounding(
        sized,
        loops.forward(problem, natural)[1],
        weights,
        *canonical_d,
        steepness=case.steepness,
        constant=filled(problem, conventions),
    )
    lse_error = allowed.lse / base + 2 * U * abs(np.nan_to_num(lse, posinf=0, neginf=0))
    assert_within("out", fwd.out, out, 2 * allowed.out)
    assert_within("lse", fwd.lse, lse, 2 * lse_error)
    assert_within("weights", fwd.weights, weights, 2 * allowed.weights)
    assert (np.isinf(fwd.lse) == np.isinf(lse)).all()  # inf and nan are two conventions

    got, want = npattn.backward(fwd, *d), loops.backward(problem, *d, conventions=conventions)
    for name in INPUTS:
        bound = getattr(allowed, name)
        bound = None if bound is None else 2 * bound
        assert_within(f"d{name}", getattr(got, name), getattr(want, name), bound)


def filled(problem: npattn.Problem, conventions: Conventions) -> Array | bool:
    """True where the score is hidden_fill."""
    visible = dataclasses.replace(conventions, hidden_fill=None).canonical(problem).visible
    return False if conventions.hidden_fill is None or visible is None else ~visible


# --- every field ----------------------------------------------------------------------------------


def test_these_are_all_fields() -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(Conventions)}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("fields", SINGLES + PAIRS, ids=told)
def test_every_field_and_pair_of_fields_gives_what_loops_gives(
    fields: dict[str, Any], problem: str
) -> None:
    sizes, names = PROBLEMS[problem]
    assert_agrees(make(3, sizes, names), Conventions(**fields), **HIDING)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_fields_together_give_what_loops_gives_on_any_options(data: st.DataObject) -> None:
    default = dataclasses.asdict(Conventions())
    fields = {n: data.draw(st.sampled_from([default[n], *values])) for n, values in FIELDS.items()}
    T, S = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    lead = data.draw(st.sampled_from([((), (), ()), ((1,), (2,), ()), ((2,), (1,), (2,))]))
    names = tuple(name for name in NAMES if data.draw(st.booleans()))
    hiding = {name: value for name, value in HIDING.items() if data.draw(st.booleans())}
    case = make(data.draw(st.integers(0, 999)), Sizes(lead, 4, 2, T, S, 3, 2), names)
    if "window" in names:  # left counts the query in some, and so must be 1 or more
        hiding["window"] = HIDING["window"]
    assert_agrees(case, Conventions(**fields), **hiding)


@pytest.mark.parametrize("fields", SINGLES, ids=told)
def test_every_field_changes_something(fields: dict[str, Any]) -> None:
    case = make(3, MORE_QUERIES, ("mask",))
    plain = case.forward(conventions=Conventions(), **HIDING)
    other = case.forward(conventions=Conventions(**fields), **HIDING)
    results = [(getattr(plain, n), getattr(other, n)) for n in ("out", "lse", "weights")]
    assert not all(np.array_equal(a, b, equal_nan=True) for a, b in results)


def test_the_default_changes_nothing() -> None:
    case = make(3, MORE_KEYS, NAMES)
    plain, default = case.forward(), case.forward(conventions=Conventions())
    d = cotangents(plain)
    grads, same = npattn.backward(plain, *d), npattn.backward(default, *d)
    for name in ("out", "lse", "weights"):
        assert (getattr(plain, name) == getattr(default, name)).all()
    for name in INPUTS:
        assert (getattr(grads, name) == getattr(same, name)).all()


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", SINGLES, ids=told)
@pytest.mark.parametrize("size", ["T", "D", "E"])
def test_a_size_of_0_gives_what_loops_gives(size: str, fields: dict[str, Any]) -> None:
    changes: dict[str, Any] = {size: 0}
    case = make(3, MORE_QUERIES._replace(**changes), ("bias",))
    assert_agrees(case, Conventions(**fields), **HIDING)


@pytest.mark.parametrize("fields", [f for f in SINGLES if f.get("empty_row") != "nan"], ids=told)
def test_no_keys_at_all_give_what_loops_gives(fields: dict[str, Any]) -> None:
    assert_agrees(make(3, MORE_QUERIES._replace(S=0), ("bias",)), Conventions(**fields), **HIDING)


def test_hidden_scores_are_the_fill_even_for_a_query_that_is_not_a_number() -> None:
    case = make(3, MORE_QUERIES, ())
    case.q[:, :, 0] = np.nan  # sees nothing: T − S = 2
    fwd = case.forward(conventions=Conventions(hidden_fill=-1e9), causal="bottom_right")
    want, _, _ = loops.forward(fwd.problem, Conventions(hidden_fill=-1e9))
    assert np.isfinite(want).all()
    assert np.isfinite(fwd.out).all()


def test_a_row_that_is_not_a_number_leaves_the_gradients_of_other_queries_alone() -> None:
    case = make(3, MORE_QUERIES, ())
    fwd = case.forward(conventions=Conventions(empty_row="nan"), causal="bottom_right")
    grads = npattn.backward(fwd, np.ones_like(fwd.out))
    assert np.isnan(grads.q[..., :2, :]).all()
    assert np.isfinite(grads.q[..., 2:, :]).all()


def test_a_mean_row_takes_no_part_in_dropout_and_gives_values_an_even_share() -> None:
    case = make(3, MORE_QUERIES, ())
    drop = np.zeros((1, 1), bool)
    mean = Conventions(empty_row="mean")
    fwd = case.forward(conventions=mean, causal="bottom_right", dropout_mask=drop, dropout_rate=0.5)
    grads = npattn.backward(fwd, np.ones_like(fwd.out))
    # Two empty rows, three heads, a batch of two, a fifth of 1 each; every other weight is dropped.
    np.testing.assert_allclose(grads.v, 2 * 3 * 2 / 5, rtol=16 * U, atol=0)
    assert not grads.q.any()


# --- what is illegal ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", "bottom-right"),
        ("causal", True),
        ("empty_row", "zeros"),
        ("empty_row", 0),
        ("mask_true", True),
        ("window", "left"),
        ("lse_base", 2),
        ("lse_base", "10"),
        ("hidden_fill", -math.inf),
        ("hidden_fill", math.nan),
        ("hidden_fill", "-1e9"),
        ("lse_empty", "zero"),
        ("lse_empty", None),
    ],
)
def test_an_illegal_value_is_named_with_its_field(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{name} is"):
        Conventions(**{name: value})


def test_fields_are_keywords_and_unknown_ones_are_refused() -> None:
    with pytest.raises(TypeError):
        Conventions("top_left")  # type: ignore[call-arg]  # the mistake
    with pytest.raises(TypeError):
        Conventions(polarity="hide")  # type: ignore[call-arg]  # the mistake


def test_a_total_window_without_the_query_is_refused() -> None:
    case = make(3, MORE_KEYS, ())
    with pytest.raises(OptionError, match="left ≥ 1"):
        case.forward(conventions=Conventions(window="total"), window=(0, 1))


def test_jvp_refuses_conventions() -> None:
    fwd = make(3, MORE_KEYS, ()).forward(conventions=Conventions())
    with pytest.raises(OptionError, match="conventions"):
        npattn.jvp(fwd, dq=fwd.problem.q)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_gives_what_loops_gives(name: str) -> None:
    assert_agrees(make(3, MORE_QUERIES, ("mask",)), PROFILES[name], **HIDING)
