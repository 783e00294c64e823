"""Predicates that separate recipes which fail from those which pass."""

import itertools

import pytest

from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.predicates import fit


def texts(fails, recipes):
    return [predicate.text for predicate in fit([(r, fails(r)) for r in recipes])]


LENGTHS = [Recipe(S=n) for n in (2, 3, 5, 7, 8, 15, 16, 17, 32, 48, 64, 127, 128, 129, 160, 257)]
HEADS = [Recipe(H=H, K=K) for H in (1, 2, 3, 4, 6) for K in (1, 2, 3, 4, 6) if H % K == 0]


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("S is no multiple of 16", lambda r: r.S % 16),
        ("S is odd", lambda r: r.S % 2),
        ("S is even", lambda r: r.S % 2 == 0),
        ("S > 128", lambda r: r.S > 128),
        ("S < 16", lambda r: r.S < 16),
    ],
)
def test_one_size(text, fails):
    assert texts(lambda r: bool(fails(r)), LENGTHS)[0] == text


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("K < H", lambda r: r.K < r.H),
        ("1 < K < H", lambda r: 1 < r.K < r.H),
        ("K = 1 < H", lambda r: r.K == 1 < r.H),
        ("K = H", lambda r: r.K == r.H),
    ],
)
def test_heads(text, fails):
    assert texts(fails, HEADS)[0] == text


def test_two_sizes():
    grid = [Recipe(S=S, D=D) for S, D in itertools.product((3, 8, 16, 17, 33), repeat=2)]
    assert texts(lambda r: r.S > 16 and r.D % 8 != 0, [*grid, Recipe(S=40, D=5)]) == []
    grid += [Recipe(S=S, D=D) for S in (24, 40) for D in (4, 5, 7, 32)]
    found = texts(lambda r: r.S > 16 and r.D % 8 != 0, grid)
    assert found[0] == "S > 16 and D is no multiple of 8"


@pytest.mark.parametrize("fails", [lambda r: True, lambda r: False, lambda r: r.S == 15])
def test_too_few_witnesses(fails):
    """Nothing is said of failures everywhere, nowhere, or at one size of many."""
    assert texts(fails, LENGTHS) == []


def test_multiple_needs_its_half_and_its_double():
    """Lengths of 3, 5, 7 that fail and of 16, 32, 48 that pass say nothing of 2, 4, 8 or 16."""
    assert texts(lambda r: r.S % 16 != 0, [Recipe(S=n) for n in (16, 3, 48, 5, 32, 7)]) == []


def test_threshold_needs_both_neighbours():
    """Between a size that passes and one that fails the threshold may be anywhere."""
    assert texts(lambda r: r.S > 100, [r for r in LENGTHS if r.S not in (127, 128)]) == []
