"""Sources of wrong values, as functions of the indices."""

from dataclasses import replace

import numpy as np
import pytest

from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.sources import differs_from_own, head_source, mask_source, source_of
from tests.testing.diagnosis.failures import attend, trial_of


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (lambda t: t - 32, "row t − 32"),
        (lambda t: 47 - t, "row T − 1 − t"),
        (lambda t: 16 * (t // 16), "row 16 · (t // 16)"),
        (lambda t: t % 8, "row t % 8"),
        (lambda t: 0 * t + 3, "row 3"),
        (lambda t: t, ""),
        (lambda t: t * t, "another row"),
    ],
)
def test_a_source_is_an_expression_of_the_index(source, text):
    here = np.arange(1, 48)
    assert source_of("t", here, source(here), np.full(47, 48)) == text


def test_two_rows_do_not_tell_an_expression():
    here, there = np.array([0, 1]), np.array([1, 0])
    assert source_of("t", here, there, np.array([2, 2])) == "another row"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (lambda h, K, G: h % K, "h % K"),
        (lambda h, K, G: 16 * (h // 16) // G, "(16 · (h // 16)) // G"),
        (lambda h, K, G: 0 * h, "0"),
        (lambda h, K, G: h * h % K, ""),
    ],
)
def test_query_heads_read_a_key_head(source, text):
    heads, K, G = np.arange(40), np.full(40, 10), np.full(40, 4)
    assert head_source(heads, source(heads, K, G), K, G) == text


TILED = "sample b has the mask of sample (H · b + h) % B"


def masks(seen, **changes):
    trial = trial_of(lambda q, k, v, mask=None: v)
    cases = []
    for samples in (2, 3, 5):
        recipe = Recipe(lead=(samples,), T=6, S=9, **changes)
        problem = recipe.problem()
        visible = trial.visible(problem).reshape(samples, 1, 6, 9)
        own = seen(visible, problem)
        wrong = np.broadcast_to((own != visible).any(-1, keepdims=True), own.shape)
        cases.append((trial, problem, own, wrong | True, wrong))
    return mask_source(cases)


def test_the_mask_of_another_sample_is_told():
    """invergent-ai/surogate#110: sample b reads the mask of sample 2b."""
    seen = masks(lambda x, p: x[2 * np.arange(len(x)) % len(x)], mask="full")
    assert seen == "sample b has the mask of sample 2b % B"


@pytest.mark.parametrize(
    ("changes", "option", "text"),
    [
        ({"window": (3, 0)}, {"window": (2, 0)}, "the window is one key too short on the left"),
        ({"window": (3, 0)}, {"window": (5, 0)}, "the window is 2 keys too long on the left"),
        ({"causal": True}, {"causal": False}, "causal is not applied"),
        ({"causal": True}, {"alignment": "top_left"}, "causal is aligned top left"),
    ],
)
def test_options_that_are_taken_otherwise_are_told(changes, option, text):
    trial = trial_of(lambda q, k, v: v)

    def seen(visible, problem):
        return trial.visible(problem.replace(**option)).reshape(visible.shape)

    assert masks(seen, **changes) == text


def test_a_mask_of_nothing_known_has_no_source():
    assert masks(lambda x, p: np.random.default_rng(1).random(x.shape) < 0.5, mask="full") == ""


def test_a_mask_that_others_fit_as_well_is_not_named():
    """One key too long and an open side are the same where no key is further away."""
    trial, recipe = trial_of(attend), Recipe(lead=(2,), H=2, K=2, T=2, S=2, D=5, E=7)
    short, long = (replace(recipe, window=(0, 0), S=n, T=n, seed=1) for n in (2, 5))

    def case(recipe, **other):
        problem = recipe.problem()
        wrong = problem.replace(**other)
        shape = (2, 2, problem.T, problem.S)
        seen = np.broadcast_to(wrong.visible, shape)
        return trial, problem, seen, *2 * [np.ones(shape, bool)]

    assert mask_source([case(short, window=(1, 0))]) == ""
    assert mask_source([case(short, window=(1, 0)), case(long, window=(1, 0))]) == (
        "the window is one key too long on the left"
    )
    assert mask_source([case(short, window=(None, 0)), case(long, window=(None, 0))]) == (
        "the window is not applied on the left"
    )


def test_the_mask_of_the_first_sample():
    trial, recipe = trial_of(attend), Recipe(lead=(5,), H=2, K=2, T=3, S=7, D=5, E=7, mask="full")
    problem = recipe.problem()
    mask = np.asarray(problem.mask_array)
    case = trial, problem, mask[[0] * 5], *2 * [np.ones(mask.shape, bool)]
    assert mask_source([case]) == "sample b has the mask of sample 0"


def test_right_rows_tell_masks_apart_that_give_all_wrong_ones():
    """Each wrong row has the mask of the other of two samples, whatever its head."""
    trial, recipe = trial_of(attend), Recipe(lead=(2,), H=3, K=3, T=5, S=7, mask="padding", seed=1)
    problem = recipe.problem()
    own = trial.visible(problem)
    b, h = np.ogrid[:2, :3]
    seen = own[(3 * b + h) % 2, h]
    wrong = np.broadcast_to((seen != own).any(-1, keepdims=True), own.shape)
    case = trial, problem, seen, wrong | True, wrong
    assert mask_source([case]) == TILED
    assert mask_source([(*case[:3], wrong, wrong)]) == ""


@pytest.mark.parametrize(
    ("amount", "text", "index", "holds"),
    [
        ("sample b has the bias of sample 0", "b ≠ 0", {"b": [0, 1, 2], "B": 3}, [0, 1, 1]),
        (
            "sample b has the mask of sample 2b % B",
            "b ≠ 2 · b % B",
            {"b": [0, 1, 2], "B": 3},
            [0, 1, 1],
        ),
        (
            "query head h takes keys of key head h % K, must be h // G",
            "h // G ≠ h % K",
            {"h": [0, 1, 2, 3, 4, 5], "K": 3, "G": 2},
            [0, 1, 1, 1, 1, 0],
        ),
        ("row t has the mask of row t + 1", "t < T − 1", {"t": [0, 1, 2], "T": 3}, [1, 1, 0]),
        ("row t has the mask of row t − 2", "t ≥ 2", {"t": [0, 1, 2, 3], "T": 4}, [0, 0, 1, 1]),
    ],
)
def test_a_place_follows_from_a_source(amount, text, index, holds):
    index = {x: np.broadcast_to(i, len(holds)) for x, i in index.items()}
    found, differs = differs_from_own(amount)
    assert found == text
    assert differs(index).tolist() == [bool(x) for x in holds]


@pytest.mark.parametrize(
    ("samples", "seen", "text"),
    [
        (3, lambda x: x.swapaxes(0, 1), "sample b and head h have the mask of sample h and head b"),
        (2, lambda x: x[[[0, 1, 0], [1, 0, 1]], range(3)], TILED),
    ],
    ids=["as many samples as heads", "fewer samples"],
)
def test_a_mask_of_another_sample_by_the_head(samples, seen, text):
    trial, recipe = trial_of(attend), Recipe(H=3, K=3, T=5, S=7, seed=1)
    problem = replace(recipe, lead=(samples,), mask="padding").problem()
    own = trial.visible(problem)
    case = trial, problem, seen(own), own | True, own | True
    assert mask_source([case]) == text
    place, differs = differs_from_own(text)
    b, h = (x.ravel() for x in np.indices((samples, 3)))
    moved = seen(np.indices((samples, 3))[0]).ravel()
    assert place.startswith("b ≠ ")
    assert (differs({"b": b, "h": h, "B": samples, "H": 3}) == (moved != b)).all()


@pytest.mark.parametrize("amount", ["", "hidden keys take weight", "keys of another head"])
def test_other_amounts_name_no_source(amount):
    assert differs_from_own(amount) is None
