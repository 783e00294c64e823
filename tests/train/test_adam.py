"""Size of Adam's steps, by formula, and which parameters decay."""

import math

import numpy as np
import pytest
from train import Settings, train
from train.adam import decays, step_size
from train.model import random_parameters

ULP = 2.0**-52


def test_without_warmup_steps_fall_along_half_a_cosine():
    lrs = [step_size(0.5, step, 11, 0) for step in range(11)]
    expected = 0.25 * (1 + np.cos(np.pi * np.arange(11) / 11))
    np.testing.assert_allclose(lrs, expected, rtol=0, atol=4 * ULP)
    assert lrs[0] == 0.5


@pytest.mark.parametrize("warmup", [1, 3, 7, 10])
def test_warmup_rises_by_equal_parts_to_the_largest_step(warmup):
    lrs = [step_size(0.5, step, 11, warmup) for step in range(11)]
    assert lrs[:warmup] == [0.5 * (step + 1) / warmup for step in range(warmup)]
    assert lrs[warmup - 1] == lrs[warmup] == max(lrs) == 0.5
    assert all(a > b for a, b in zip(lrs[warmup:], lrs[warmup + 1 :], strict=False))
    rest = 11 - warmup
    assert lrs[-1] == pytest.approx(0.25 * (1 + math.cos(math.pi * (rest - 1) / rest)), rel=4 * ULP)


def test_first_step_of_a_run_is_as_small_as_its_warmup_says(few, small):
    """Adam's first step moves each parameter without decay by its size, whatever the gradient."""
    for warmup in (0, 5):
        settings = Settings(**(vars(small) | {"warmup": warmup}))
        before = random_parameters(settings, 5, 3, 4)
        after = train(settings, data=few, max_steps=1).parameters
        moved = abs(after["b2"] - before["b2"])
        # Up to 1e-8 beside the size of the gradient.
        np.testing.assert_allclose(moved, settings.lr / max(warmup, 1), rtol=1e-3)


def test_projections_decay_and_positions_do_not():
    p = random_parameters(Settings(), 5, 3) | random_parameters(
        Settings(positions="relative"), 5, 3
    )
    decaying = {name for name, x in p.items() if decays(name, x)}
    assert decaying == {"we", "wq", "wk", "wv", "wo", "w1", "w2", "wc"}
    assert {"pos", "table"} < set(p)


def test_relative_bias_is_learned(few, small):
    """Buckets that no distance uses stay 0; the others move."""
    settings = Settings(**(vars(small) | {"positions": "relative"}))
    start = random_parameters(settings, 5, 3, 4)["table"]
    assert (start == 0).all()
    table = train(settings, data=few).parameters["table"]
    assert (table[:5] != 0).all()
    assert (table[5:16] == 0).all()
