"""Two models side by side: what they share, the table, and the verdict."""

import dataclasses
import re

import numpy as np
import pytest
from train import ModelComparison, compare, train

from npattn.errors import OptionError


@pytest.fixture(scope="module")
def comparison(few):
    from train import Settings

    return compare(Settings(embed_dim=6, num_heads=3, epochs=3, batch_size=7), data=few)


def test_models_are_those_that_are_trained_alone(comparison, few, small):
    for name, heads in (("multi-head", 3), ("single-head", 1)):
        alone = train(dataclasses.replace(small, num_heads=heads), data=few)
        run = comparison.runs[name]
        assert run.losses == alone.losses
        assert run.accuracies == alone.accuracies
        np.testing.assert_array_equal(
            comparison.right[name], alone.predict(few.test_x) == few.test_y
        )


def test_models_have_as_many_parameters(comparison, few, small):
    counts = [run.num_parameters for run in comparison.runs.values()]
    # Embedding, positions, four projections, three norms, feed-forward, classifier.
    d = 6
    expected = 3 * d + d + 5 * d + 4 * (d * d + d) + 3 * 2 * d + 8 * d * d + 5 * d + 4 * d + 4
    assert counts == [expected, expected]
    assert "same sizes and number of parameters: embed_dim 6, 3 heads of 2" in str(comparison)
    relative = compare(dataclasses.replace(small, positions="relative", epochs=1), data=few)
    many, one = (run.num_parameters for run in relative.runs.values())
    assert many - one == 2 * 32
    assert "same sizes and parameters, but for a relative bias a head" in str(relative)


def test_table_has_a_line_for_each_epoch(comparison):
    lines = str(comparison).splitlines()
    assert lines[2].split() == ["multi-head", "single-head"]
    count = f"{comparison.runs['multi-head'].num_parameters:,}"
    assert lines[3].split() == ["parameters", count, count]
    assert lines[4].split() == ["epoch", "loss", "accuracy", "loss", "accuracy"]
    for epoch, line in enumerate(lines[5:8]):
        cells = [str(epoch + 1)]
        for run in comparison.runs.values():
            loss = np.mean(run.losses[5 * epoch : 5 * epoch + 5])
            cells += [f"{loss:.4f}", f"{100 * run.accuracies[epoch]:.2f}", "%"]
        assert line.split() == cells
    assert re.fullmatch(r"time +\d+\.\d s +\d+\.\d s", lines[8])
    assert len({len(line) for line in lines[2:9]}) == 1, "columns end alike"


def verdict(one, other, runs):
    right = {"multi-head": np.array(one, bool), "single-head": np.array(other, bool)}
    made = ModelComparison(runs, {"multi-head": 2.0, "single-head": 1.0}, right)
    return made, str(made).splitlines()[-1]


def test_verdict_is_a_sign_test(comparison):
    """9 of 9 disputed images: 2 · 2⁻⁹; 3 of 4: 2 · 5/16; none: 1."""
    made, text = verdict([1] * 9 + [0], [0] * 10, comparison.runs)
    assert made.p_value == 2 * 2.0**-9
    assert text == (
        "multi-head 90.00 % in 2.0 s, single-head 0.00 % in 1.0 s: multi-head is right on 9 more "
        "of 10 test images, more than chance (p = 0.0039)"
    )
    made, text = verdict([1, 0, 0, 0, 1], [0, 1, 1, 1, 1], comparison.runs)
    assert made.p_value == 2 * 5 / 16
    assert text.endswith(
        "single-head is right on 2 more of 5 test images, no more than chance gives (p = 0.62)"
    )
    made, text = verdict([1, 0, 1], [0, 1, 1], comparison.runs)
    assert made.p_value == 1
    assert text.endswith(": both are right on 2 of 3 test images")
    assert verdict([1, 1], [1, 1], comparison.runs)[0].p_value == 1


def test_progress_names_the_model(few, small):
    seen = []
    compare(small, data=few, progress=lambda *at: seen.append(at[:3]))
    expected = [(n, step + 1, 15) for n in ("multi-head", "single-head") for step in range(15)]
    assert seen == expected


def test_one_head_is_not_compared_with_one(few, small):
    with pytest.raises(OptionError, match="num_heads is 1, must be 2 or more"):
        compare(dataclasses.replace(small, num_heads=1), data=few)
