"""Places are learned as the shortest predicate of the wrong elements."""

from __future__ import annotations

import numpy as np
import pytest

from npattn.testing.diagnosis.place import Sample, learn

LETTERS = "bhtsde"
PROBLEMS = [
    {"T": 5, "S": 7},
    {"T": 37, "S": 41, "H": 2, "K": 2},
    {"T": 71, "S": 67, "H": 6, "K": 3},
    {"T": 71, "S": 56, "H": 4, "K": 2},
    {"T": 131, "S": 67, "H": 1, "K": 1},
    {"T": 64, "S": 64, "H": 6, "K": 2},
    {"T": 37, "S": 48, "H": 8, "K": 2},
    {"T": 37, "S": 100, "H": 3, "K": 3, "D": 23, "E": 29},
]
OPTIONS = [(), ("mask",), ("bias",), ("causal",), ("mask", "bias"), ("sinks",), ("window",)]


def grid(n, axes):
    """Return the indices of some axes, and what they depend on, of the nth problem."""
    sizes = {"B": 1 + n % 3, "H": 3, "K": 1, "D": 11, "E": 13} | PROBLEMS[n % len(PROBLEMS)]
    sizes["G"] = sizes["H"] // sizes["K"]
    shape = tuple(sizes[x.upper()] for x in axes)
    index = dict(zip(axes, np.ogrid[tuple(map(slice, shape))], strict=True))
    return sizes, shape, index


def samples(axes, rule, options=lambda n: (), count=21, empty=lambda i: False):
    """Yield samples that are wrong where a rule says so, of sizes, indices and options."""
    for n in range(count):
        sizes, shape, index = grid(n, axes)
        on = frozenset(options(n))
        wrong = np.broadcast_to(rule(sizes | index | {x: x in on for x in sum(OPTIONS, ())}), shape)
        rows = grid(n, "bht")
        no_key = np.broadcast_to(empty(rows[2]), rows[1])
        known = np.ones(shape, bool)
        yield Sample(sizes, on, axes, np.array(wrong, bool), known, no_key)


def in_turn(n):
    return OPTIONS[(5 * n + n // 8) % len(OPTIONS)]


def place(*args, **options):
    return learn([s for s in samples(*args, **options) if s.wrong.any()])


PLACES = [
    ("everywhere", "bht", lambda x: True),
    ("s ≥ 32", "bhts", lambda x: x["s"] >= 32),
    ("t ≥ 64", "bht", lambda x: x["t"] >= 64),
    ("e ≥ 8", "bhte", lambda x: x["e"] >= 8),
    ("s = 0", "bhts", lambda x: x["s"] == 0),
    ("b ≥ 1", "bht", lambda x: x["b"] >= 1),
    ("h ≥ 1", "bh", lambda x: x["h"] >= 1),
    ("t % 16 = 15", "bht", lambda x: x["t"] % 16 == 15),
    ("t % 8 ≠ 0", "bht", lambda x: x["t"] % 8 != 0),
    ("s % 2 = 1", "bhts", lambda x: x["s"] % 2 == 1),
    ("s = S − 1", "bhts", lambda x: x["s"] == x["S"] - 1),
    ("t = T − 1", "bht", lambda x: x["t"] == x["T"] - 1),
    ("s ≥ 16 · (S // 16)", "bhts", lambda x: x["s"] >= 16 * (x["S"] // 16)),
    ("s < T", "bhts", lambda x: x["s"] < x["T"]),
    ("s = t + S − T", "bhts", lambda x: x["s"] == x["t"] + x["S"] - x["T"]),
    ("s > t", "bhts", lambda x: x["s"] > x["t"]),
    ("h % G ≠ 0", "bht", lambda x: x["h"] % x["G"] != 0),
    ("h // G ≠ h % K", "bht", lambda x: x["h"] // x["G"] != x["h"] % x["K"]),
    ("h // G ≥ 1", "bht", lambda x: x["h"] // x["G"] >= 1),
    ("t % 64 ≥ 32", "bht", lambda x: x["t"] // 32 % 2 == 1),
    ("s // 16 = t // 16", "bhts", lambda x: x["s"] // 16 == x["t"] // 16),
]


def with_spaces(text):
    return text.replace("s ≥ t + 1", "s > t")


@pytest.mark.parametrize(("text", "axes", "rule"), PLACES, ids=[row[0] for row in PLACES])
@pytest.mark.every
@pytest.mark.broad(3)
def test_a_place_is_learned(text, axes, rule):
    found = place(axes, rule, in_turn)
    assert with_spaces(found.text) == text
    assert found.errors < 0.01


def test_nothing_wrong_has_no_place():
    assert place("bht", lambda x: False) is None


def test_rows_that_see_no_key():
    def empty(index):
        return (index["t"] % 5 == 2) & (index["h"] == 1)

    found = place("bht", empty, empty=empty)
    assert found.text == "rows that see no key"


def test_a_predicate_that_holds_by_chance_is_replaced():
    """On the first problems t ≥ 4 is the last row of all; on others it is not."""
    _, *others = samples("bht", lambda x: x["t"] >= 4)
    first = [*samples("bht", lambda x: x["t"] == x["T"] - 1, count=1)]
    chance = learn(first)
    assert chance.errors == 0
    more = [*first, *samples("bht", lambda x: x["t"] == x["T"] - 1)]
    assert chance.text != "t = T − 1" or chance.errors_on(others) > 0.1
    assert learn(more).text == "t = T − 1"


def test_a_place_is_tried_on_other_problems():
    found = place("bhts", lambda x: x["s"] >= 32, in_turn)
    agree, apart = ([*samples("bhts", lambda x, n=n: x["s"] >= n, in_turn)] for n in (32, 16))
    assert found.errors_on(agree) == 0
    assert found.errors_on(apart) > 0.05


def test_what_no_predicate_says_has_errors():
    rng = np.random.default_rng(3)
    found = place("bht", lambda x: rng.random((x["B"], x["H"], x["T"])) < 0.5)
    assert found.errors > 0.3


def test_elements_that_are_not_known_tell_nothing():
    own = [*samples("bht", lambda x: x["t"] >= 32)]
    for sample in own:
        sample.known[:] = np.arange(sample.known.shape[-1]) < 40
    assert learn(own).text == "t ≥ 32"


def test_axes_are_left_out_where_any_element_is_wrong():
    (sample,) = samples("bhts", lambda x: (x["t"] >= 3) & (x["s"] == 2), count=1)
    rows = sample.reduce(3)
    assert rows.axes == "bht"
    assert (rows.wrong == (np.arange(5) >= 3)).all()
    assert sample.reduce(4) is sample


def test_problems_that_pass_tell_a_border_from_another():
    """Of those that fail alone, t ≥ 8 · (T // 8) says as much."""
    every = [*samples("bht", lambda x: x["t"] >= 64 * -(-x["T"] // 128), in_turn)]
    assert learn(every).text == "t ≥ 64 · ⌈T / 128⌉"
