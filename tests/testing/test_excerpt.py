"""Excerpts: elements around the worst one, at most 16 by 16, of arrays of any rank."""

import numpy as np
import pytest

from npattn.testing.comparison import compare_arrays
from npattn.testing.excerpt import SIDE, Excerpt


@pytest.mark.parametrize(
    ("shape", "index", "size"),
    [
        ((), (), (1, 1)),
        ((5,), (3,), (1, 5)),
        ((2, 3, 5, 7), (1, 2, 4, 6), (5, 7)),
        ((2, 29, 37), (1, 0, 0), (SIDE, SIDE)),
        ((2, 29, 37), (1, 28, 36), (SIDE, SIDE)),
        ((2, 29, 37), (0, 13, 17), (SIDE, SIDE)),
        ((3, 23), (2, 11), (3, SIDE)),
    ],
)
def test_excerpt_holds_the_worst_element(shape, index, size):
    want = np.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    got = want.copy()
    got[index] += 3.0
    excerpt = Excerpt.around(index, got, want, np.full(shape, 0.5))
    assert excerpt.got.shape == excerpt.want.shape == excerpt.allowed.shape == size
    at = np.unravel_index(excerpt.ratio.argmax(), size)
    assert excerpt.ratio[at] == 6
    row, column = (0,) * (2 - len(index)) + index[-2:]
    assert (excerpt.row + at[0], excerpt.column + at[1]) == (row, column)
    assert excerpt.lead == index[:-2]


def test_ratio_of_nan_is_inf_and_of_equal_infinities_0():
    got, want = np.array([np.nan, np.inf, 1.0]), np.array([1.0, np.inf, 2.0])
    ratio = Excerpt.around((0,), got, want, np.array([1.0, 1.0, 0.0])).ratio
    assert ratio.tolist() == [[np.inf, 0, np.inf]]


def test_comparison_has_an_excerpt_only_if_it_fails():
    want = np.arange(7.0)
    assert compare_arrays("o", want, want, np.ones(7)).excerpt is None
    excerpt = compare_arrays("o", want + 2, want, np.ones(7)).excerpt
    assert excerpt is not None
    assert excerpt.ratio.max() == pytest.approx(2)


def test_excerpt_is_read_from_json():
    got, want = np.array([[np.nan, 1.0, 3.0]]), np.array([[1.0, np.inf, 2.0]])
    excerpt = Excerpt.around((0, 2), got, want, np.array([[0.5, 0.5, 0.5]]))
    content = {"lead": [], "row": 0, "column": 0}
    content |= {"got": [["nan", 1, 3.0]], "want": [[1, "inf", 2]], "allowed": [[0.5] * 3]}
    read = Excerpt.from_dict(content)
    np.testing.assert_array_equal(read.got, excerpt.got)
    np.testing.assert_array_equal(read.want, excerpt.want)
    assert read.ratio.tolist() == excerpt.ratio.tolist() == [[np.inf, np.inf, 2]]
