"""Power of comparisons: what would have been seen, what is not judged, and verdicts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from npattn.testing.comparison import compare_arrays
from npattn.testing.power import (
    EXIT_CODES,
    Power,
    conclude,
    describe,
    describe_unjudged,
    find_unjudged,
    find_unseen,
    keep_judged,
    union,
)

INF, NAN = math.inf, math.nan


def power(exact: Any, tolerance: Any, dtype: Any = np.float64) -> Power:
    return Power.of(np.array(exact, float), np.array(tolerance, float), dtype)


def test_factor_is_the_median_of_tolerance_over_value() -> None:
    one = power([1.0, -2.0, 4.0, 0.0], [0.1, 0.1, 0.1, 0.01])
    assert one.factor == pytest.approx(0.05)
    assert one.best == pytest.approx(0.025)
    assert one.zero == pytest.approx(0.01)
    assert (one.elements, one.nonzero, one.doubled, one.without) == (4, 3, 3, 0)
    assert one.judged


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_smallest_factor_is_where_the_comparison_begins_to_fail(dtype: Any) -> None:
    """Just above the factor a result is out of tolerance; at half of it, within."""
    exact, tolerance = np.array([1.5]), np.array([0.0])
    factor = Power.of(exact, tolerance, dtype).factor
    near, far = (np.array([1.5 * (1 + x * factor)], dtype) for x in (0.5, 2.1))
    assert compare_arrays("o", near, exact, tolerance).passed
    assert not compare_arrays("o", far, exact, tolerance).passed


def test_result_whose_doubling_passes_in_most_elements_is_not_judged() -> None:
    assert power([1.0, 1.0], [0.1, 2.0]).judged
    assert not power([1.0, 1.0, 1.0], [0.1, 2.0, INF]).judged
    assert power([1.0, 1.0, 1.0], [0.1, 2.0, INF]).without == 1


@pytest.mark.parametrize("exact", [[NAN, NAN], [INF, -INF], []])
def test_result_of_nan_or_inf_alone_is_not_judged(exact: list[float]) -> None:
    assert not power(exact, np.full(len(exact), NAN)).judged


def test_infinite_elements_do_not_count_beside_others() -> None:
    one = power([-INF, 2.0], [NAN, 0.1])
    assert one.judged
    assert (one.nonzero, one.without) == (1, 0)


def test_zeros_alone_are_judged_by_absolute_error() -> None:
    one = power([0.0, 0.0], [1e-7, 1e-3])
    assert one.judged
    assert one.describe("dq") == "dq is 0: an error of 1e-07 would have been seen"
    assert not power([0.0], [INF]).judged


def test_union_takes_the_median_over_problems() -> None:
    powers = [{"o": power([1.0], [x])} for x in (0.1, 0.2, 0.9)]
    one = union([*powers, {"dq": power([1.0], [2.0])}])
    assert one["o"].factor == pytest.approx(0.2)
    assert one["o"].best == pytest.approx(0.1)
    assert find_unjudged(one) == ("dq",)
    assert Power.from_dict(one["o"].as_dict()) == one["o"]


def test_problems_that_judge_nothing_are_left_out_if_half_judge() -> None:
    seen, unseen = Power.of(np.ones(5), np.full(5, 0.1)), Power.of(np.ones(5), np.full(5, 7.0))
    assert keep_judged([seen, unseen]) == [seen]
    assert keep_judged([seen, unseen, unseen]) == [seen, unseen, unseen]
    powers = {"o": [seen, unseen], "lse": [seen], "dq": [unseen, unseen, seen]}
    assert describe_unjudged(powers) == ["o was judged on 1 of 2 problems"]


def test_words_name_what_would_have_been_seen() -> None:
    exact = np.ones(100)
    allowed = np.full(100, 1e-4)
    allowed[:4] = 3.0
    assert Power.of(exact, allowed).describe("dx") == (
        "dx: an error of 0.01 % would have been seen; 96 % of the elements were judged"
    )
    exact[:48] = NAN
    one = {"dx": Power.of(exact, allowed)}
    assert describe(one, "g is NaN there") == [
        "dx: 48 % of the elements were not judged: g is NaN there"
    ]
    assert describe({"o": power([1.0], [1e-6])}) == []
    assert len(describe({"o": power([1.0], [1e-6])}, verbose=True)) == 1


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({"failed": False}, "passed"),
        ({"failed": True, "unjudged": ["dx"]}, "failed"),
        ({"failed": False, "tested": False}, "no verdict: nothing tested"),
        ({"failed": False, "unjudged": ["dx", "db"]}, "no verdict: not judged: dx, db"),
        ({"failed": False, "unjudged": ["dx"], "accept": ["dx"]}, "passed"),
        ({"failed": False, "incomplete": ["a"] * 17}, "no verdict: incomplete: 17 rules"),
        ({"failed": False, "undecided": ["db"]}, "no verdict: undecided: db"),
    ],
)
def test_verdict_needs_all_that_was_not_accepted(known: dict[str, Any], text: str) -> None:
    found = conclude(**known)
    assert str(found) == text
    assert found.exit_code == EXIT_CODES[found.verdict]
    assert found.passed == (text == "passed")


EXACT = np.array([[0.0, 1.0, -2.0], [3.0, 0.5, 0.25]])
ALLOWED = np.full_like(EXACT, 1e-5)


def test_what_was_asked_for_is_said_where_nothing_was_tested() -> None:
    known: dict[str, Any] = {"failed": False, "tested": False}
    assert conclude(**known).reason == "nothing tested"
    known |= {"missing": ["dq"], "reasons": ["a gate"]}
    assert conclude(**known).reason == "nothing tested; a gate; not tested, and asked for: dq"


def test_self_test_finds_every_change_by_a_whole_comparison() -> None:
    tried = []

    def fails(changed: np.ndarray[Any, Any]) -> bool:
        tried.append(changed)
        return not compare_arrays("o", changed, EXACT, ALLOWED).passed

    assert find_unseen(EXACT.astype(np.float32), EXACT, ALLOWED, fails) == []
    assert len(tried) == 6


def test_self_test_names_what_a_broken_comparison_misses() -> None:
    def by_size(changed: np.ndarray[Any, Any]) -> bool:
        return not compare_arrays("o", abs(changed), abs(EXACT), ALLOWED).passed

    assert find_unseen(EXACT, EXACT, ALLOWED, by_size) == ["the negative result"]
    assert len(find_unseen(EXACT, EXACT, ALLOWED, lambda _: False)) == 6


def test_self_test_skips_changes_that_change_nothing() -> None:
    same = np.full(5, 3.0)
    found = find_unseen(same, same, np.full(5, 1e-9), lambda _: False)
    assert "the result shifted by one element" not in found
    assert len(found) == 4
