"""Masks are plain boolean arrays that say what is seen."""

import numpy as np
import pytest

import npattn
from npattn import masks
from npattn.errors import OptionError


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("T", "S"), [(5, 7), (7, 5), (3, 3), (0, 2), (2, 0)])
def test_a_causal_mask_is_what_causal_means(alignment, T, S):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 3)) for n in (T, S, S))
    mask = masks.causal(T, S, alignment=alignment)
    assert np.asarray(mask).shape == (T, S)
    assert np.asarray(mask).dtype == bool
    np.testing.assert_array_equal(
        npattn.attention(q, k, v, mask), npattn.attention(q, k, v, causal=alignment)
    )


def test_a_square_one_needs_no_alignment():
    np.testing.assert_array_equal(np.asarray(masks.causal(5)), np.tri(5, dtype=bool))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"T": 3, "S": 5}, "alignment is None with T = 3 queries and S = 5 keys"),
        ({"T": 3, "alignment": "left"}, "alignment is 'left', must be one of"),
        ({"T": -1}, "T is -1, must be an integer ≥ 0"),
        ({"T": 3, "S": 2.0}, "S is 2.0, must be an integer ≥ 0"),
        ({"T": True}, "T is True, must be an integer ≥ 0"),
    ],
)
def test_what_is_ambiguous_or_no_length_is_an_error(words, message):
    with pytest.raises(OptionError, match=message):
        masks.causal(**words)
