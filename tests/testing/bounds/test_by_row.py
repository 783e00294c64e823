"""Rows, and gradients of keys, in blocks equal the oracle's, and have the judge's tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, assume, given, reject, settings
from hypothesis import strategies as st

import npattn.oracle.api
from npattn.conventions import Conventions
from npattn.problem import Gradients
from npattn.problem.arrays import Array
from npattn.problem.options import FEATURES
from npattn.testing.bounds import by_key, by_row
from npattn.testing.bounds.allowed import certificate, tolerance
from npattn.testing.bounds.blocks import ProblemInBlocks
from npattn.testing.bounds.by_key import HeadResults, KeyGradients, Slack, sum_heads
from npattn.testing.bounds.by_row import Rows, width
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.worst_case import WorstCase
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.cases.strategies import recipes

SAME = 2.0**-20
"""Relative difference of float64 sums in another order, where they do not cancel."""
SINGLE = frozenset(STRUCTURE) - {"rank 2", "rank 4", "rank 5", "broadcast", "H = 0", "T = 0"}
"""Structure of problems without leading axes, whose groups of heads are one `Rows` each."""


def problems(dtype: str = "float32") -> st.SearchStrategy[Recipe]:
    return recipes(Space(features=frozenset(FEATURES) - {"gate"}, structure=SINGLE, dtype=dtype))


@contextmanager
def parts_of(share: int | None, length: int) -> Iterator[None]:
    """Take keys, or queries, in so many parts, each of whole tiles; None: leave the width."""
    if share is None:
        yield
        return
    size = max(16, math.ceil(length / share / 16) * 16)
    with (
        patch.object(by_row, "width", lambda *_: size),
        patch.object(by_key, "width", lambda *_: size),
    ):
        yield


class Case:
    """A problem with its cotangents, and the queries of the last key/value head."""

    def __init__(self, recipe: Recipe) -> None:
        self.problem = problem = recipe.problem()
        results = recipe.cotangents(problem)
        self.dout = results.dout.astype(float)
        self.dlse = None if results.dlse is None else results.dlse.astype(float)
        self.blocks = ProblemInBlocks(problem, Conventions())
        self.kv = problem.K - 1
        self.heads = self.blocks.heads(self.kv)
        self.h = np.repeat(self.heads, problem.T)
        self.t = np.tile(np.arange(problem.T), len(self.heads))
        self.dtype = problem.q.dtype
        self.rounding = Rounding.undeclared(self.dtype)

    def rows(self, selection: slice = slice(None)) -> Rows:
        h, t = self.h[selection], self.t[selection]
        dlse = None if self.dlse is None else self.dlse[h, t]
        do = self.dout[h, t]
        return Rows(self.blocks, (), h, t, self.rounding, self.dtype, do, dlse, gradient=True)

    def columns(self, keys: Array, slack: Slack, fwd: npattn.Forward) -> list[KeyGradients]:
        return [
            KeyGradients(
                self.blocks,
                ((), h, keys),
                self.rounding,
                self.dtype,
                HeadResults(
                    fwd.lse[h],
                    fwd.out[h],
                    self.dout[h],
                    None if self.dlse is None else self.dlse[h],
                ),
                slack,
            )
            for h in self.heads
        ]

    @property
    def exact(self) -> tuple[npattn.Forward, Gradients]:
        p = self.problem
        fwd = npattn.oracle.api.evaluate(p)
        return fwd, npattn.backward(fwd, self.dout, self.dlse)

    def lse_slack(self, name: str, fwd: npattn.Forward) -> Array:
        """Bound on the error of dk or dv from the rounding of lse, which counts where it is large.

        P = exp(s − lse) is off by a factor of exp(½ ulp(lse)).
        """
        problem, heads = self.problem, self.heads
        lse = np.where(np.isfinite(fwd.lse), fwd.lse, 0)
        rounding = np.minimum(np.spacing(abs(lse)) / 2, 100)  # of the lse of a hidden row: vast
        p = fwd.weights * np.expm1(rounding)[..., None]  # (H, T, S)
        do = abs(self.dout) / (1 - problem.dropout_rate)
        if name == "dv":
            per_head = np.einsum("hts,hte->hse", p, do)
        else:
            v = np.repeat(abs(problem.v.astype(float)), problem.H // problem.K, -3)
            dlse = 0.0 if self.dlse is None else abs(self.dlse)
            rest = (do * abs(fwd.out)).sum(-1) + dlse
            ds = p * (np.einsum("hte,hse->hts", do, v) + rest[..., None])
            q = abs(float(problem.scale or 0)) * abs(problem.q.astype(float))
            per_head = np.einsum("hts,htd->hsd", ds, q)
        return np.asarray(per_head[heads].sum(0))

    def slack_of_cancellation(self, rows: Rows) -> dict[str, Array]:
        """Bound on the loss by three terms that cancel.

        The bound of Σ pR (z v − o)² has it added; where nothing else remains, as in a row with one
        weight of 1, it differs between blocks.
        """
        problem, v = self.problem, np.nan_to_num(self.problem.v.astype(float), posinf=0, neginf=0)
        span = 2 * abs(v).max(initial=0) / (1 - problem.dropout_rate)
        lost = 2 * span * math.sqrt((problem.S + 4) * 2.0**-52)
        moved = (rows.up / rows.down)[0]
        o = np.broadcast_to(moved * lost, rows.o[0].shape)
        k = abs(np.nan_to_num(problem.k.astype(float), posinf=0, neginf=0)).max(initial=0)
        pull = (abs(rows.do[0]) * (o + SAME * rows.worst_bounds["o"][0])).sum(-1, keepdims=True)
        dq = 4 * abs(rows.problem.scale or 0) * pull * k * (1 + rows.rebuild[0]) ** 2
        return {"o": o, "lse": np.zeros(len(self.t)), "dq": dq}

    def of(self, bound: Any, **kwargs: Any) -> dict[str, Array]:
        return bound(self.problem, dout=self.dout, dlse=self.dlse, **kwargs)


def within(got: Array, expected: Array, limits: Array) -> bool:
    """Return True if two results agree but for the order of the same operations."""
    with np.errstate(invalid="ignore"):
        near = abs(got - expected) <= 2 * limits
    return bool((near | (got == expected) | (~np.isfinite(got) & ~np.isfinite(expected))).all())


@pytest.mark.thorough
@pytest.mark.parametrize("parts", [3, None])
@given(recipe=problems())
def test_rows_in_blocks_equal_the_oracle(parts: int | None, recipe: Recipe) -> None:
    case = Case(recipe)
    with parts_of(parts, recipe.S):
        results = case.rows().exact
    fwd, grads = case.exact
    limits = case.of(certificate)
    h, t = case.h, case.t
    assert results.dq is not None
    assert within(results.o, fwd.out[h, t], limits["o"][h, t])
    assert within(results.lse, fwd.lse[h, t], limits["lse"][h, t])
    assert within(results.dq, grads.q[h, t], limits["dq"][h, t])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(phases=[Phase.generate])  # to shrink takes minutes, and shows little more
@given(data=st.data())
@pytest.mark.broad
def test_row_tolerances_equal_those_of_the_judge(dtype: str, data: Any) -> None:
    recipe = data.draw(problems(dtype))
    check_against_judge(recipe)


def test_keys_with_a_bias_of_minus_infinity_leave_the_tolerance_tight() -> None:
    recipe = Recipe(
        lead=(), H=3, K=1, T=2, S=186, D=81, E=81, seed=1681, distribution="integers",
        mask="padding", window=(1, 0), bias="-inf padding", softcap=1.0, sinks=True, dropout=0.5,
    )  # fmt: skip
    check_against_judge(recipe)


@pytest.mark.parametrize("seed", [0, 7, 8, 13])
def test_a_sink_that_takes_most_lets_a_rounded_query_move_dk(seed: int) -> None:
    recipe = Recipe(
        lead=(), H=1, K=1, T=1, S=1, D=3, E=1, seed=seed, distribution="large logits", sinks=True
    )
    check_key_gradients(Case(recipe))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("distribution", "scale"),
    [("large logits", None), ("outliers", None), ("one-hot", None), ("normal", 3000.0)],
)
def test_rows_of_vast_score_errors_have_the_judges_tolerance(
    distribution: str, scale: float | None, sinks: bool
) -> None:
    rows = check_against_judge(
        Recipe(
            lead=(),
            H=2,
            K=1,
            T=7,
            S=67,
            D=5,
            E=3,
            seed=1,
            dtype="bfloat16",
            distribution=distribution,
            scale=scale,
            sinks=sinks,
        )
    )
    assert rows.vast.any() == (scale is not None)


def check_against_judge(recipe: Recipe) -> Rows:
    case = Case(recipe)
    with parts_of(3, recipe.S):
        rows = case.rows()
    judged = case.of(tolerance, dtype=case.dtype)
    slack_of_cancellation = case.slack_of_cancellation(rows)
    for name, limits in rows.tolerances().items():
        expected = judged[name][case.h, case.t]
        with np.errstate(invalid="ignore"):
            apart = limits - expected
            # Where weights may double, the range of the values limits o. Rows take the values that
            # they see, the judge those that any query of a head sees.
            alike = (rows.up[0] > 1) & (limits < 2 * expected)
            apart = np.where(alike & (name == "o"), 0, apart)
            # The bound of dq says nothing there.
            apart = np.where((rows.up[0] > 1) & (name == "dq"), 0, apart)
            assert not (abs(apart) > SAME * expected + slack_of_cancellation[name]).any(), name
    return rows


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(data=st.data())
@pytest.mark.broad
def test_dk_and_dv_equal_the_oracle(dtype: str, data: Any) -> None:
    recipe = data.draw(problems(dtype))
    case = Case(recipe)
    assume(case.problem.S > 0)
    check_key_gradients(case)


def check_key_gradients(case: Case) -> None:
    with parts_of(3, case.problem.T):
        slack = Slack()
        slack.add(case.rows(), np.zeros(len(case.h)))
        if not slack.seen:
            reject()
        fwd, grads = case.exact
        exact, limits = sum_heads(case.columns(np.arange(case.problem.S), slack, fwd))
    with patch.object(WorstCase, "keeps_maximum", False):  # the backward is given lse
        own, judged = case.of(certificate), case.of(tolerance, dtype=case.dtype)
    for name, expected in (("dk", grads.k), ("dv", grads.v)):
        # An error of the oracle's lse, which is given here, is an error of P; so is its rounding.
        least = own[name][case.kv] + 2.0**-26 * judged[name][case.kv] + case.lse_slack(name, fwd)
        assert within(exact[name], expected[case.kv], least), name
        with np.errstate(invalid="ignore"):
            tighter = limits[name] < judged[name][case.kv] * (1 - SAME)
        # Across a power of two, from 0.125 to the number below, the gap of storage halves.
        across = np.frexp(exact[name])[1] != np.frexp(expected[case.kv])[1]
        assert not (tighter & ~across).any(), name


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(lead=(), T=2, S=3, D=3, E=2, seed=1, distribution="flat", bias="-1e9 rows"),
        Recipe(lead=(), T=64, S=8, D=8, E=8, seed=1, dtype="bfloat16", distribution="flat",
               window=(1, 0)),
    ],
    ids=["lse of -1e9", "power of two"],
)  # fmt: skip
def test_key_gradients_where_rounding_of_lse_or_result_counts(recipe: Recipe) -> None:
    check_key_gradients(Case(recipe))


def test_row_does_not_depend_on_rows_beside_it() -> None:
    case = Case(Recipe(lead=(), H=6, K=2, T=7, S=67, D=5, E=3, seed=11, causal=True))
    together, alone = case.rows(), case.rows(slice(8, 9))
    assert within(alone.exact.o[0], together.exact.o[8], np.zeros(3) + 2.0**-50)
    np.testing.assert_allclose(alone.tolerances()["o"][0], together.tolerances()["o"][8], rtol=SAME)


def test_key_blocks_are_whole_tiles() -> None:
    assert width(1, 64) % 16 == 0
    assert width(10**9, 10**9) == 16
    assert width(0, 0) == by_row.CELLS


def test_slack_is_the_largest_error_of_evaluated_rows() -> None:
    case = Case(Recipe(lead=(), H=2, K=2, T=13, S=17, D=5, E=3, seed=3))
    every, one = Slack(), Slack()
    every.add(case.rows(), np.zeros(13))
    for i in range(13):
        one.add(case.rows(slice(i, i + 1)), np.zeros(1))
    assert every.seen == one.seen == 13
    for name, top in every.most.items():
        assert one.most[name] == pytest.approx(top, rel=SAME)
    first = Slack()
    first.add(case.rows(slice(0, 1)), np.zeros(1))
    assert all(first.most[name] <= top * (1 + SAME) for name, top in every.most.items())
    assert first.most != every.most


def test_binary_lse_adds_to_the_slack() -> None:
    case = Case(Recipe(lead=(), H=1, K=1, T=5, S=7, D=3, E=2, seed=5))
    plain, more = Slack(), Slack()
    plain.add(case.rows(), np.zeros(5))
    more.add(case.rows(), np.full(5, math.log(2)))
    assert more.most["rebuild"] >= 2 * plain.most["rebuild"]
    assert more.most["var_l"] > plain.most["var_l"]
