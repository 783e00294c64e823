"""The tiled base of the zoo is right: it keeps the rules, and its tiles hold all that is seen."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import npattn
from npattn.arrays import Array
from npattn.mistakes import MISTAKES, online
from npattn.mistakes.attention import Attention, Inputs, within
from npattn.mistakes.online import TILE, Online, Split
from npattn.mistakes.precision import Fused
from npattn.testing import check
from npattn.testing.bounds.allowed import bounds

BASES = (Online, Split)


def mutant(name: str) -> Any:
    return MISTAKES[name].forward.__self__  # type: ignore[attr-defined]  # a bound method


def judged(base: Online, **options: Any) -> Any:
    return check(base.forward, backward=base.backward, **options)


# --- it is right ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["hidden-", "nan-", "empty-row", "padded-keys", "repeatable"])
def test_what_is_hidden_padded_or_nan_stays_where_it_is(rule: str) -> None:
    report = judged(Split(), examples=4, only=[rule])
    assert report.passed, str(report)
    assert all(outcome.status == "passed" for outcome in report.outcomes)


@pytest.mark.parametrize("base", BASES)
def test_it_agrees_with_the_oracle_on_what_the_judge_draws(base: type[Online]) -> None:
    report = judged(base(), examples=30, seed=1, only=["agreement-"])
    assert report.passed, str(report)


@pytest.mark.parametrize(("dtype", "rounding"), [("float64", None), ("bfloat16", "upcast")])
def test_it_rounds_nothing_to_its_inputs_dtype(dtype: str, rounding: str | None) -> None:
    options = {"dtypes": (dtype,), "rounding": rounding, "only": ["agreement-"]}
    report = judged(Online(), examples=5, **options)
    assert report.passed, str(report)


def test_what_accumulates_in_bfloat16_is_not_upcast() -> None:
    options = {"dtypes": ("bfloat16",), "rounding": "upcast", "only": ["agreement-o"]}
    wrong = mutant("accumulator-in-bfloat16")
    assert not judged(wrong, examples=5, shrink=False, **options).passed


def test_what_rounds_for_matrix_products_alone_is_fused_and_not_upcast() -> None:
    options = {"dtypes": ("bfloat16",), "only": ["agreement-"], "examples": 4}
    report = judged(Fused(), rounding="fused", **options)
    assert report.passed, str(report)
    assert not judged(Fused(), rounding="upcast", shrink=False, **options).passed


@pytest.mark.parametrize("base", BASES)
def test_the_weights_that_it_returns_pass_gradients(base: type[Online]) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(n) for n in ((2, 6, 37, 5), (2, 3, 53, 5), (2, 3, 53, 7)))
    problem = npattn.Problem(q, k, v, causal="bottom_right")
    fwd = npattn.forward(q, k, v, causal="bottom_right")
    dweights = rng.standard_normal(fwd.weights.shape)
    got = base().backward(
        np.zeros_like(fwd.out), q, k, v, out=fwd.out, lse=None, dweights=dweights, causal=True
    )
    want = npattn.backward(fwd, np.zeros_like(fwd.out), None, dweights)
    # With v the identity o is the weights: the bound for a loss through o is that for one
    # through them.
    eye = np.broadcast_to(np.eye(53), (2, 3, 53, 53))
    allowed = bounds(problem.replace(v=eye), np.float64, dout=dweights)
    assert (abs(got["q"] - want.q) <= allowed["dq"]).all()
    assert (abs(got["k"] - want.k) <= allowed["dk"]).all()


# --- it is tiled ----------------------------------------------------------------------------------

SIZES = ((37, 59), (59, 37), (67, 67), (1, 17), (17, 1), (32, 48))
SIDES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (3, 5)},
    {"window": (19, None)},
    {"causal": True, "window": (2, 7)},
)


def inputs_of(base: Attention, sizes: tuple[int, int], **options: Any) -> Inputs:
    T, S = sizes
    q, k, v = (np.zeros((1, n, 2), np.float32) for n in (T, S, S))
    return base.inputs(q, k, v, **options)


def seen(base: Attention, c: Inputs) -> Array:
    T, S = c.q.shape[-2], c.k.shape[-2]
    return within(np.arange(S) - np.arange(T)[:, None] - (S - T), base.sides(c))


def visits(base: Online, c: Inputs) -> Array:
    """How often the tiles show each key to each query."""
    T, S = c.q.shape[-2], c.k.shape[-2]
    found = np.zeros((T, S), int)
    for rows in base.query_tiles(T):
        for keys in base.key_tiles(c, rows):
            online.place(found, rows, keys, base.inside(c, rows, keys).astype(int))
    return found


def shows_each_key_once(base: Online) -> bool:
    calls = [inputs_of(base, sizes, **options) for sizes, options in product(SIZES, SIDES)]
    return all((visits(base, c) == seen(base, c)).all() for c in calls)


def test_its_tiles_show_what_is_visible_once_and_nothing_else() -> None:
    assert shows_each_key_once(Online())


@pytest.mark.parametrize(
    "name",
    [
        "tail-keys-skipped",
        "tiles-overlap",
        "key-between-tiles-lost",
        "causal-tile-taken-as-whole",
        "causal-tile-skipped",
        "window-tile-taken-as-whole",
        "window-tile-skipped",
    ],
)
def test_tiles_that_are_off_by_one_show_something_else(name: str) -> None:
    assert not shows_each_key_once(mutant(name))


def test_padding_is_in_no_tile() -> None:
    c = inputs_of(Online(), (1, 17))
    (rows,) = Online().query_tiles(1)
    assert Online().inside(c, rows, slice(TILE, 2 * TILE)).sum() == 1
    assert mutant("tail-padding-attended").inside(c, rows, slice(TILE, 2 * TILE)).sum() == TILE


def test_tiles_that_causal_hides_are_not_visited() -> None:
    c = inputs_of(Online(), (67, 67), causal=True)
    counts = [len(Online().key_tiles(c, rows)) for rows in Online().query_tiles(67)]
    assert counts == [1, 2, 3, 4, 5]


def test_tiles_left_of_the_window_are_not_visited() -> None:
    c = inputs_of(Online(), (67, 67), window=(16, 0))
    assert [len(Online().key_tiles(c, rows)) for rows in Online().query_tiles(67)] == [
        1,
        2,
        2,
        2,
        2,
    ]


def test_the_last_tile_of_keys_comes_first() -> None:
    c = inputs_of(Online(), (1, 53))
    starts = [keys.start for keys in Online().key_tiles(c, slice(0, 1))]
    assert starts == [48, 32, 16, 0]
