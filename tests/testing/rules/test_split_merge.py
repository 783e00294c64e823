"""Two parts of the keys merge to the whole, within the derived tolerance."""

from functools import partial

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.mistakes import Attention
from npattn.problem import Problem
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules import PROPERTIES
from npattn.testing.rules.split_merge import merge
from npattn.testing.trial import Evaluation, Violation
from tests.testing.rules.relations import trial_of


@pytest.mark.parametrize("shuns", [False, True])
def test_no_part_has_fully_masked_rows_if_those_are_wrong(shuns, monkeypatch):
    trial, problems = trial_of(), []
    trial.skips_empty_rows = shuns
    forward = trial.implementation.forward
    record = lambda problem, *view: problems.append(problem) or forward(problem, *view)  # noqa: E731
    monkeypatch.setattr(trial.implementation, "forward", record)
    for seed in range(30):
        PROPERTIES["split-merge"].check(trial, Recipe(T=5, S=3, seed=seed, mask="padding"))
    assert {problem.S for problem in problems} == {1, 2, 3}
    assert any(trial.empty(problem).any() for problem in problems) != shuns


# --- merging --------------------------------------------------------------------------------------

ROWS = 400


def parts_of(rng, spread, error):
    """Two parts with errors up to α in o and β in lse, often just that; and the exact merge."""
    mp = pytest.importorskip("mpmath")
    exact_lse = spread * rng.standard_normal((2, ROWS))
    exact_o = rng.standard_normal((2, ROWS, 3))
    alpha = error * rng.random((2, ROWS, 3))
    beta = error * rng.random((2, ROWS))
    signs = rng.choice([-1, 1], (2, ROWS))
    o, lse = exact_o + signs[..., None] * alpha, exact_lse + signs[::-1] * beta
    nothing = Problem(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros((1, 1)))
    parts = [
        Evaluation(nothing, None, {"o": o[i], "lse": lse[i]},
               {"o": exact_o[i], "lse": exact_lse[i]}, partial(dict, o=alpha[i], lse=beta[i]))
        for i in range(2)
    ]  # fmt: skip
    with mp.workdps(40):
        weights = [[mp.exp(x) for x in row] for row in exact_lse]
        total = [a + b for a, b in zip(*weights, strict=True)]
        exact_merged_lse = [mp.log(x) for x in total]
        exact_merged_o = [
            [sum(weights[i][n] * mp.mpf(exact_o[i, n, e]) for i in range(2)) / total[n]
             for e in range(3)]
            for n in range(ROWS)
        ]  # fmt: skip
    return parts, exact_merged_o, exact_merged_lse


@pytest.mark.parametrize("error", [0.0, 1e-15, 1e-6, 1.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 300.0])
def test_merge_error_is_within_its_bound_and_close_to_it(spread, error):
    rng = np.random.default_rng([17, round(spread)])
    parts, exact_merged_o, exact_merged_lse = parts_of(rng, spread, error)
    empty = np.zeros((2, ROWS), bool)
    merged, tolerance = merge(Conventions(), parts, empty)
    lse_errors = np.array(
        [float(abs(x - exact)) for x, exact in zip(merged["lse"], exact_merged_lse, strict=True)]
    )
    pairs = zip(merged["o"], exact_merged_o, strict=True)
    o_errors = np.array([[float(abs(x - y)) for x, y in zip(*row, strict=True)] for row in pairs])
    # The last rounding of the merge is that of any result on delivery.
    ratio_lse = lse_errors / (tolerance["lse"] + np.spacing(abs(merged["lse"])) / 2)
    ratio_o = o_errors / (tolerance["o"] + np.spacing(abs(merged["o"])) / 2)
    assert ratio_lse.max() <= 1
    assert ratio_o.max() <= 1
    if error >= 1e-6:
        assert ratio_lse.max() > 0.9
        assert ratio_o.max() > 0.5


def test_hidden_part_adds_nothing():
    parts, _, _ = parts_of(np.random.default_rng(5), 1.0, 0.0)
    parts[0].results["o"][0], parts[0].results["lse"][0] = np.nan, -np.inf
    empty = np.zeros((2, ROWS), bool)
    empty[0, 0] = True
    merged, tolerance = merge(Conventions(), parts, empty)
    assert np.array_equal(merged["o"][0], parts[1].results["o"][0])
    assert merged["lse"][0] == parts[1].results["lse"][0]
    assert np.isfinite(tolerance["o"]).all()


def test_minus_infinite_lse_of_visible_keys_leaves_numbers_as_tolerances():
    """As of an lse that overflows in a narrower dtype."""
    parts, _, _ = parts_of(np.random.default_rng(5), 1.0, 0.0)
    for part in parts:
        part.results["lse"][0] = -np.inf
    _, tolerance = merge(Conventions(), parts, np.zeros((2, ROWS), bool))
    assert np.isfinite(tolerance["o"]).all()
    assert np.isfinite(tolerance["lse"]).all()


def test_row_hidden_in_both_parts_follows_conventions():
    parts, _, _ = parts_of(np.random.default_rng(5), 1.0, 0.0)
    for part in parts:
        part.results["o"][0], part.results["lse"][0] = 0, 0.0
    empty = np.zeros((2, ROWS), bool)
    empty[:, 0] = True
    merged, _ = merge(Conventions(lse_empty=0.0), parts, empty)
    assert merged["lse"][0] == 0.0
    assert np.array_equal(merged["o"][0], [0, 0, 0])


class WrongOfTwoKeys(Attention):
    """o of two keys is doubled."""

    def results(self, c):
        o, lse, p = super().results(c)
        return o * (1 + (c.k.shape[-2] == 2)), lse, p


def test_violation_shows_the_wrong_part():
    trial = trial_of(WrongOfTwoKeys())
    for seed in range(4):
        with pytest.raises(Violation) as caught:
            PROPERTIES["split-merge"].check(trial, Recipe(T=5, S=3, seed=seed))
        assert caught.value.problem.S == 2
