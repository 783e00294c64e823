"""Readings of right implementations are exact, and two placements tell P from o."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.zoo.correct import CORRECT
from npattn.mistakes import Gated
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.evidence import observe
from npattn.testing.diagnosis.locate import locate
from npattn.testing.diagnosis.read import LARGEST, Reader, Unreadable
from npattn.testing.trial import GRADIENTS
from tests.testing.diagnosis.failures import attention_with, evidence_of, trial_of, trial_with

BASE = Recipe(lead=(2,), H=3, K=3, T=5, S=11, D=7, E=13, seed=3)
RECIPES = {
    "plain": {},
    "rank 2": {"lead": None, "H": 1, "K": 1},
    "groups": {"H": 6},
    "one key head": {"K": 1},
    "broadcast": {"broadcast": True},
    "mask": {"mask": "full"},
    "empty rows": {"mask": "empty rows"},
    "causal window": {"causal": True, "window": (3, None)},
    "bias": {"bias": "full", "H": 6},
    "low bias": {"bias": "-1e4 rows"},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.3, "H": 6},
    "gate": {"gate": "full"},
    "softcap": {"softcap": 1.5, "scale": -0.37},
    "many keys": {"S": 29, "E": 2, "T": 3},
}


def reader_of(trial, recipe):
    recipe = replace(recipe, dtype=trial.space.dtype)
    problem = trial.problem(recipe)
    return Reader(trial, problem, trial.cotangents(recipe, problem))


def quantities(reader):
    """Yield each quantity that is read, and False where two placements of units disagree."""
    for read in (lambda: reader.p, lambda: reader.p_of_backward, lambda: (reader.ds, False)):
        try:
            yield read()
        except Unreadable:
            continue


def assert_right(reader):
    read = [*quantities(reader)]
    assert read
    for quantity, apart in read:
        assert quantity.known.any()
        assert not quantity.wrong.any(), quantity.name
        assert not np.any(apart), quantity.name


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.broad(2)
def test_quantities_of_a_right_implementation_are_exact(name, dtype):
    trial = trial_with(dtype)
    recipe = replace(BASE, **RECIPES[name])
    reader = reader_of(trial, recipe)
    assert len([*quantities(reader)]) == 3
    assert_right(reader)
    assert locate(evidence_of(trial, recipe)) is None


OTHERS = [name for name, one in CORRECT.items() if one.framework != "jax" and not one.sizes]
DTYPES = ("float32", "float64", "bfloat16")


@pytest.mark.thorough
@pytest.mark.every
@pytest.mark.parametrize("name", OTHERS)
def test_no_step_of_other_right_implementations_is_named(name):
    """As if each rule had failed: in one dtype each, in turn."""
    own, n = CORRECT[name], OTHERS.index(name)
    if not own.runs_here:
        pytest.skip(f"{own.needs} is not installed")
    dtype = next(x for x in DTYPES[n % 3 :] + DTYPES if x in own.dtypes)
    trial = trial_of(
        own.forward, own.backward, None, own.conventions, dtype, framework=own.framework
    )
    trial.gradients = frozenset(GRADIENTS if own.backward else ("dq", "dk", "dv", "dbias"))
    trial.rounding = own.models[0] or trial.rounding
    trial.implementation.conventions = own.conventions
    for key in ("groups", "mask", "causal window", "bias")[n % 2 :: 2]:
        recipe = replace(BASE, **RECIPES[key], seed=n)
        if trial.space.takes(recipe):
            assert_right(reader_of(trial, recipe))
            assert locate(evidence_of(trial, recipe)) is None


def columns_halved(up, c):
    o, *others = up(c)
    return (np.where(np.arange(o.shape[-1]) < 9, o, o / 2), *others)


def keys_halved(up, s, c, live):
    p, *others = up(s, c, live)
    return (np.where(np.arange(p.shape[-1]) < 4, p, p / 2), *others)


def test_placements_disagree_where_columns_of_o_are_wrong():
    quantity, apart = reader_of(trial_with(results=columns_halved), BASE).p
    assert apart[quantity.wrong].mean() > 0.5


def test_placements_agree_where_weights_are_wrong():
    quantity, apart = reader_of(trial_with(softmax=keys_halved), BASE).p
    assert not apart.any()
    assert quantity.wrong[..., 4:].all()
    assert not quantity.wrong[..., :4].any()
    np.testing.assert_allclose(quantity.got[..., 4:], quantity.want[..., 4:] / 2, rtol=1e-5)


def shift_columns(up, w, x, live):
    return up(w, np.roll(x, 1, -3) if x.shape[-1] == BASE.E and w.shape[-1] == BASE.S else x, live)


def test_values_of_another_head_are_found():
    reader = reader_of(trial_with(masked_matmul=shift_columns), BASE)
    found = {own: [x[:2] for x in others] for own, others in reader.foreign_values.items()}
    assert found == {(b, h): [(b, (h - 1) % 3)] for b in range(2) for h in range(3)}


def test_weights_of_the_backward_are_its_own():
    half = trial_with(gradients=lambda up, c, *a: up(c._replace(scale=c.scale / 2), *a))
    reader = reader_of(half, BASE)
    assert not reader.p[0].wrong.any()
    wanted = reader_of(trial_with(), replace(BASE, scale=BASE.D**-0.5 / 2)).p[0].want
    np.testing.assert_allclose(reader.p_of_backward[0].got, wanted, rtol=1e-4)


def test_ds_is_read_at_some_queries_of_many():
    quantity = reader_of(trial_with(), replace(BASE, T=37)).ds
    rows = np.flatnonzero(quantity.known.all((0, 1, 3)))
    assert {0, 15, 16, 31, 32, 36} <= {*rows}
    assert len(rows) < 37
    assert np.isinf(quantity.tolerance[~quantity.known]).all()


@pytest.mark.parametrize(
    ("recipe", "steps", "text"),
    [
        ({"E": 0}, {}, "v has no columns"),
        ({"S": 0, "sinks": True}, {}, "there is no key"),
        ({"S": 403, "E": 1, "T": 2}, {}, "reading takes 403 calls"),
        ({}, {"results": lambda up, c: (up(c)[0][..., :2], *up(c)[1:])}, "o has shape"),
    ],
)
def test_what_cannot_be_read_is_said(recipe, steps, text):
    with pytest.raises(Unreadable, match=text):
        _ = reader_of(trial_with(**steps), replace(BASE, **recipe)).p


def test_gradients_that_are_not_returned_are_not_read():
    trial = trial_of(attention_with().forward, lambda dout, q, k, v, **options: {"q": q})
    reader = reader_of(trial, BASE)
    with pytest.raises(Unreadable, match="dv is not returned"):
        _ = reader.p_of_backward
    with pytest.raises(Unreadable, match="dk is not returned"):
        _ = reader.ds


def test_no_problem_beyond_a_size_is_read():
    trial = trial_of(Gated().forward)
    problem = replace(BASE, T=997, S=1009, H=3).problem()
    assert LARGEST < 6 * 997 * 1009
    with pytest.raises(Unreadable, match="too large"):
        Reader(trial, problem, None)


def test_a_problem_is_read_in_its_view():
    seen = []

    def f(q, k, v):
        seen.append(min(v.strides) < 0)
        return attention_with().forward(q, k, v)

    trial = trial_of(f, features=())
    recipe = replace(BASE, view="reversed")
    problem = trial.problem(recipe)
    evidence = observe(trial, problem, trial.cotangents(recipe, problem), "reversed")
    seen.clear()
    reader = Reader(trial, problem, evidence.cotangents, "reversed")
    assert not reader.p[0].wrong.any()
    assert all(seen)
