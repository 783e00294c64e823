"""Two functions that are not plain attention, compared with each other."""

from dataclasses import replace

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.testing import Implementation, diff
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE
from npattn.testing.difference.measure import measure
from npattn.testing.difference.wrong import Wrong, compare_pair, is_plain
from npattn.testing.reference.sides import Sides
from tests.testing.difference import kernels
from tests.testing.rules.relations import trial_of


def rotate(x, shift=0.0):
    """Rotate pairs of columns by the position, as rotary embeddings do."""
    half = x.shape[-1] // 2
    at = np.arange(x.shape[-2])[:, None] * 0.5 + np.arange(half) + shift
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(at) - b * np.sin(at), b * np.cos(at) + a * np.sin(at)], -1)


def turning(q, k, v, shift=0.0):
    """Attention after a rotation of q and k, of keys from 16 on by another angle."""
    if q.shape[-1] % 2 or q.shape[-2] != k.shape[-2]:
        raise NotImplementedError("sizes")
    k = np.concatenate([rotate(k)[..., :16, :], rotate(k, shift)[..., 16:, :]], -2)
    return kernels.right(rotate(q), k, v)


def reference(q, k, v):
    return turning(*(x.astype(np.float64) for x in (q, k, v))).astype(q.dtype)


def fast(q, k, v):
    return turning(q, k, v).astype(q.dtype)


def late(q, k, v):
    return turning(q, k, v, shift=0.25).astype(q.dtype)


def nothing(q, k, v):
    return np.where(rotate(q)[..., :1] > 0, np.nan, fast(q, k, v)).astype(q.dtype)


def sides_of(a, b):
    equal = frozenset(STRUCTURE) - {"T != S", "T > S"}
    one, two = (trial_of(f=Implementation(f, framework="numpy"), structure=equal) for f in (a, b))
    return Sides(*(replace(trial, gradients=frozenset()) for trial in (one, two)))


RECIPES = [Recipe(T=n, S=n, D=6, E=5) for n in (7, 37)]


def test_pair_that_differs_by_roundings_agrees():
    alike, reason, lines = compare_pair(sides_of(reference, fast), RECIPES)
    assert (alike, reason) == (True, "")
    assert lines[0].startswith("Neither is plain attention: o of both is wrong on most problems")
    assert lines[1].startswith("They agree on 2 problems: ")


def test_pair_that_differs_beyond_roundings_says_where():
    alike, reason, lines = compare_pair(sides_of(reference, late), RECIPES)
    assert (alike, reason) == (False, "")
    assert lines[0].startswith("Neither is plain attention")
    assert lines[1].startswith("They differ on 1 of 2 problems")
    assert "sampled as Recipe(lead=(1,), H=1, K=1, T=17, S=17, D=2, E=1" in lines[2]
    assert lines[3:] == ("It fails only where S > 16.",)  # and T = S


def test_nan_of_one_alone_differs():
    alike, reason, lines = compare_pair(sides_of(reference, nothing), RECIPES[:1])
    assert (alike, reason) == (False, "")
    assert "got nan, want -" in lines[2]


def test_nothing_compared_is_no_agreement():
    odd = [replace(recipe, D=7) for recipe in RECIPES]
    assert compare_pair(sides_of(reference, fast), odd)[:2] == (False, "nothing tested")


def test_only_what_nothing_explains_is_no_plain_attention():
    measured = measure(sides_of(reference, fast), RECIPES)
    unknown, known = Wrong(Conventions()), Wrong(Conventions(), causes=("scale twice",))
    assert not is_plain(measured, [unknown, unknown])
    assert is_plain(measured, [unknown, known])
    assert is_plain(measure(sides_of(kernels.right, fast), RECIPES), [unknown, unknown])


@pytest.mark.nightly
@pytest.mark.parametrize(("f", "begins"), [(fast, "They agree on"), (late, "They differ on")])
def test_headline_of_diff(f, begins):
    sizes = {"D": (4, 16), "T": (7, 16, 17, 23), "S": (7, 16, 17, 23)}
    difference = diff(reference, f, examples=9, sizes=sizes)
    assert difference.answer[1].startswith(begins)
