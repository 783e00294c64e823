"""Online, the tiled base of the mistakes, keeps the rules; its tiles hold each visible key once."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import npattn
from npattn.mistakes import MISTAKES, online
from npattn.mistakes.attention import Attention, Inputs, within
from npattn.mistakes.online import TILE, Online, Split
from npattn.mistakes.precision import Fused
from npattn.problem.arrays import Array
from npattn.testing import check
from npattn.testing.bounds.allowed import bounds

BASES = (Online, Split)


def implementation_of(name: str) -> Any:
    return MISTAKES[name].forward.__self__  # type: ignore[attr-defined]  # a bound method


def judge(base: Online, **options: Any) -> Any:
    return check(base.forward, backward=base.backward, diagnosis=False, **options)


# --- it is right ----------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["hidden-", "nan-", "empty-row", "padded-keys", "repeatable"])
@pytest.mark.broad
def test_split_keeps_the_rules_on_hidden_values(rule: str) -> None:
    report = judge(Split(), examples=4, only=[rule])
    assert report.passed, str(report)
    assert all(outcome.status == "passed" for outcome in report.outcomes)


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("base", BASES)
def test_agrees_with_the_oracle(base: type[Online]) -> None:
    report = judge(base(), examples=30, seed=1, only=["agreement-"])
    assert report.passed, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "rounding"), [("float64", None), ("bfloat16", "upcast")])
def test_rounds_nothing_to_the_input_dtype(dtype: str, rounding: str | None) -> None:
    options = {"dtypes": (dtype,), "rounding": rounding, "only": ["agreement-"]}
    report = judge(Online(), examples=5, **options)
    assert report.passed, str(report)


def test_bfloat16_accumulator_is_not_upcast() -> None:
    options = {"dtypes": ("bfloat16",), "rounding": "upcast", "only": ["agreement-o"]}
    wrong = implementation_of("accumulator-in-bfloat16")
    assert not judge(wrong, examples=5, shrink=False, **options).passed


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_rounding_for_products_is_fused_not_upcast() -> None:
    options = {"dtypes": ("bfloat16",), "only": ["agreement-"], "examples": 4}
    report = judge(Fused(), rounding="fused", **options)
    assert report.passed, str(report)
    assert not judge(Fused(), rounding="upcast", shrink=False, **options).passed


@pytest.mark.parametrize("base", BASES)
def test_dweights_reach_dq_and_dk(base: type[Online]) -> None:
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


def visible(base: Attention, c: Inputs) -> Array:
    T, S = c.q.shape[-2], c.k.shape[-2]
    return within(np.arange(S) - np.arange(T)[:, None] - (S - T), base.sides(c))


def visits(base: Online, c: Inputs) -> Array:
    """Count how often the tiles show each key to each query."""
    T, S = c.q.shape[-2], c.k.shape[-2]
    counts = np.zeros((T, S), int)
    for rows in base.query_tiles(T):
        for keys in base.key_tiles(c, rows):
            online.add_at(counts, rows, keys, base.tile_visible(c, rows, keys).astype(int))
    return counts


def shows_each_key_once(base: Online) -> bool:
    calls = [inputs_of(base, sizes, **options) for sizes, options in product(SIZES, SIDES)]
    return all((visits(base, c) == visible(base, c)).all() for c in calls)


def test_tiles_show_each_visible_key_once() -> None:
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
def test_wrong_tiles_show_other_keys(name: str) -> None:
    assert not shows_each_key_once(implementation_of(name))


def test_padding_is_in_no_tile() -> None:
    c = inputs_of(Online(), (1, 17))
    (rows,) = Online().query_tiles(1)
    wrong, keys = implementation_of("tail-padding-attended"), slice(TILE, 2 * TILE)
    assert Online().tile_visible(c, rows, keys).sum() == 1
    assert wrong.tile_visible(c, rows, keys).sum() == TILE


def test_tiles_hidden_by_causal_are_skipped() -> None:
    c = inputs_of(Online(), (67, 67), causal=True)
    counts = [len(Online().key_tiles(c, rows)) for rows in Online().query_tiles(67)]
    assert counts == [1, 2, 3, 4, 5]


def test_tiles_left_of_the_window_are_skipped() -> None:
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
