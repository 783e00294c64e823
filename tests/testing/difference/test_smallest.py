"""Smallest examples: each convention that differs shows, and nothing smaller was passed over."""

import json
import math
from itertools import combinations

import numpy as np
import pytest

from npattn import Conventions, attention
from npattn.conventions.checks import LEGAL
from npattn.oracle.api import evaluate
from npattn.profiles import PROFILES, Profile
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.diagnosis.conventions import realign
from npattn.testing.diagnosis.sentences import CONVENTIONS
from npattn.testing.difference import smallest
from npattn.testing.difference.profiles import diff_profiles
from npattn.testing.difference.smallest import TOPICS, describe, differing, find_example


def results(example, conventions):
    fwd = evaluate(realign(example.problem, conventions), conventions)
    return {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}[example.result]


@pytest.mark.thorough
def test_every_pair_of_profiles_prints_and_every_convention_shows():
    found = 0
    for a, b in combinations(PROFILES.values(), 2):
        difference = diff_profiles(a, b)
        assert str(difference).startswith("A is ")
        topics = differing(a.conventions, b.conventions)
        assert [one.topic for one in difference.conventions] == topics
        assert bool(topics) == ("same conventions" not in difference.answer[0])
        for one in difference.conventions:
            assert one.a != one.b
            assert one.example.alone, (a.name, b.name, one.topic)
        json.dumps(difference.as_dict(), allow_nan=False)
        found += len(topics)
    assert found > len(PROFILES)


CHANGES = [
    {"causal": "top_left"},
    {"window": "inclusive"},
    {"mask_true": "hide"},
    {"hidden_fill": -1e9},
    {"hidden_add": -1e4},
    {"hidden_fill": "min"},
    {"empty_row": "mean"},
    {"empty_row": "nan"},
    {"empty_row_bias": "nan"},
    {"bias": "before_scale"},
    {"softcap": "after_bias"},
    {"softcap": "after_mask"},
    {"kv_head": "tile"},
    {"lse_base": "2"},
    {"lse_empty": math.nan},
    {"lse_empty": 0.0},
    {"weights": "after_dropout"},
    {"dropout_at_rate_0": "ignore"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_each_value_differs_beyond_rounding(changes):
    a, b = Conventions(), Conventions(**changes)
    [topic] = differing(a, b)
    example = find_example(topic, a, b)
    own, other = (results(example, c) for c in (a, b))
    np.testing.assert_array_equal(own, example.a)
    np.testing.assert_array_equal(other, example.b)
    if np.isfinite(own).all() and np.isfinite(other).all():
        allowed = [
            tolerance(realign(example.problem, c), np.float32, conventions=c)[example.result]
            for c in (a, b)
        ]
        assert (abs(own - other) > sum(allowed)).any()
    else:
        assert not np.array_equal(own, other, equal_nan=True)


def test_example_is_what_npattn_attention_computes():
    """The line of an example, typed in by hand."""
    a, b = PROFILES["torch.sdpa"].conventions, PROFILES["flash_attn"].conventions
    example = find_example("causal", a, b)
    assert str(example) == "T = 1, S = 2: q = [[0]], k = [[1], [2]], v = [[1], [2]], causal"
    assert example.values() == ("o = [[1]]", "o = [[1.5]]")
    arrays = [np.array(x, float) for x in ([[0]], [[1], [2]], [[1], [2]])]
    assert attention(*arrays, causal=True, conventions=a) == [[1]]
    assert attention(*arrays, causal=True, conventions=b) == [[1.5]]


def test_nothing_smaller_shows_it():
    """With T = S = 1 both alignments see the one key."""
    a, b = Conventions(), Conventions(causal="top_left")
    example = find_example("causal", a, b)
    assert example.problem.T * example.problem.S == 2
    assert smallest._compare(smallest._case(1, 1, slope=True, causal=True), "o", a, b) is None


@pytest.mark.parametrize(
    ("able", "options", "sizes"),
    [
        ({"mask", "bias"}, ["mask"], (1, 1)),
        ({"bias"}, ["bias"], (1, 1)),
        ({"window", "causal", "T != S", "T > S"}, ["causal"], (2, 1)),
        ({"causal", "T != S", "K < H"}, None, None),
    ],
    ids=["mask", "bias", "causal", "no empty row"],
)
def test_example_has_what_both_take(able, options, sizes):
    a, b = Conventions(), Conventions(empty_row="nan", lse_base="2")
    example = find_example("empty_row", a, b, frozenset(able))
    assert find_example("lse_base", a, b, frozenset(able)) is None
    assert find_example("lse_base", a, b, frozenset({"lse"})) is not None
    if options is None:
        assert example is None
    else:
        assert [*example.options] == options
        assert sizes == (example.problem.T, example.problem.S)


def test_what_only_other_conventions_show_is_marked():
    """Scores that hidden keys keep hide what an empty row gives, unless a bias empties it."""
    a = Conventions(empty_row_bias="nan", hidden_fill=-1e9)
    b = Conventions(empty_row_bias="nan", hidden_fill=-1e9, empty_row="mean", lse_empty=0.0)
    assert find_example("empty_row", a, b) is None
    c = Conventions(empty_row_bias="nan", empty_row="mean", kv_head="tile")
    example = find_example("empty_row", a, c)
    assert not example.alone


def test_every_legal_value_has_a_sentence():
    named = {f"{name}={value}" for name, values in LEGAL.items() for value in values if value}
    assert named == set(CONVENTIONS)
    assert {name for names in TOPICS.values() for name in names} == set(vars(Conventions()))
    for topic in TOPICS:
        assert describe(topic, Conventions())


def test_numbers_in_words():
    assert describe("hidden scores", Conventions(hidden_fill="min")).startswith("hidden scores bec")
    assert "−10000 added" in describe("hidden scores", Conventions(hidden_add=-1e4))
    assert "is nan" in describe("lse_empty", Conventions(lse_empty=math.nan))
    assert differing(Conventions(lse_empty=math.nan), Conventions(lse_empty=math.nan)) == []
    assert differing(Conventions(), Conventions(empty_row_bias="zero")) == []


def test_signatures_layouts_and_promises():
    a = Profile(
        name="a",
        version="1",
        about="",
        signature={"is_causal": "causal", "attn_mask": "mask or bias", "bias": "bias"},
        refuses=("K < H: no", "both"),
        promises={"views": "page 3"},
    )
    b = Profile(
        name="b",
        version="2",
        about="",
        signature={"causal": "causal"},
        layout="BTHD",
        refuses=("both",),
    )
    lines = diff_profiles(a, b).beside
    assert lines == (
        "only A takes: mask (as attn_mask), bias (as attn_mask or bias)",
        "other names: causal is is_causal in A, causal in B",
        "layout of q, k, v and o: (B, H, T, D) in A, (B, T, H, D) in B",
        "only A refuses K < H: no",
        "only A does not promise the rule views: page 3",
    )
    assert diff_profiles(a, b).answer == (
        "They have the same conventions; what else differs is below.",
    )
    assert diff_profiles(a, a).alike
    assert not diff_profiles(a, b).alike
