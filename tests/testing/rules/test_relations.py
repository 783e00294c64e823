"""Each relation holds for correct implementations however they round, and fails for mistakes."""

import math

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES
from npattn.testing import check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules import (
    PROPERTIES,
    equivalents,
    gradients,
    identities,
    order_and_parts,
    split_merge,
)
from npattn.testing.rules.relate import another_order, pick, pick_keys, pick_queries, put_back
from npattn.testing.rules.terms import head_of
from npattn.testing.targets.numpy import flash
from tests.testing.rules.relations import (
    GradientsMixed,
    LastKeyLost,
    LastQueryWrittenOver,
    ratios,
    rules_of,
    script_output,
    trial_of,
    violation,
)

RULES = rules_of(order_and_parts, split_merge, equivalents)
IDENTITIES = rules_of(identities, gradients)

OWN = {cls.__name__: cls() for cls in (LastKeyLost, LastQueryWrittenOver, GradientsMixed)}
# Mistakes that break each rule.
BREAKS = {
    "permute-keys": "LastKeyLost dbias-last-writer-wins",
    "permute-queries": "LastQueryWrittenOver dropout-of-first-query dbias-last-writer-wins",
    "permute-heads": "heads-of-padded-group heads-tiled",
    "permute-batch": "mask-of-first-sample dbias-last-writer-wins",
    "batch-alone": "mask-of-first-sample window-ignored-for-one-query GradientsMixed "
    "softmax-over-queries",
    "shared-heads": "heads-by-number-of-keys heads-of-padded-group",
    "padded-keys": "mask-as-length maximum-over-hidden LastKeyLost mask-ignored-when-causal",
    "causal-prefix": "causal-only-when-square causal-ignored-in-backward causal-ignored-with-mask",
    "split-merge": "LastKeyLost lse-of-weights empty-row-lse-zero lse-base-2",
    "window-infinite": "window-replaces-mask window-replaces-causal window-one-narrower",
    "causal-as-mask": "causal-only-when-square causal-ignored-in-backward causal-top-left",
    "window-as-mask": "window-top-left window-one-wider",
    "mask-as-bias": "bias-minus-inf-lost mask-inverted",
    "scale-of-query": "scale-ignored dk-of-scaled-query dq-unscaled",
}


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule, names in BREAKS.items() for name in names.split()]
)
def test_mistakes_fail_and_the_script_shows_it(rule, name):
    trial, err = violation(OWN.get(name) or MISTAKES[name], rule)
    assert err.ratio > 1
    comparisons = trial.against_oracle(err.problem, err.cotangents)
    assert not all(comparison.passed for comparison in comparisons.values())
    assert "WRONG" in script_output(rule, trial, err)


def test_every_rule_has_a_mistake_and_a_mutant():
    assert set(BREAKS) == set(RULES)


# --- correct implementations ----------------------------------------------------------------------


CONVENTIONS = [
    {"causal": "top_left"},
    {"empty_row": "nan", "lse_empty": math.nan},
    {"empty_row": "mean", "window": "inclusive"},
    {"hidden_fill": -1e4},
    {"mask_true": "hide"},
    {"lse_base": "2", "lse_empty": 0.0},
    {"softcap": "after_bias", "kv_head": "tile"},
    {"softcap": "after_mask", "weights": "after_dropout"},
    {"bias": "before_scale"},
]


@pytest.mark.parametrize("fields", CONVENTIONS, ids=str)
@pytest.mark.broad
def test_oracle_passes_under_every_convention(fields):
    trial = trial_of(conventions=Conventions(**fields), dtype="float64")
    for rule in (*RULES, *IDENTITIES):
        if PROPERTIES[rule].unless(trial) is None:
            assert ratios(trial, rule, 2), rule


@pytest.mark.parametrize("rule", ["padded-keys", "causal-prefix", "mask-as-bias"])
def test_hidden_fill_makes_rules_on_hidden_keys_not_applicable(rule):
    trial = trial_of(conventions=Conventions(hidden_fill=-1e4))
    assert PROPERTIES[rule].unless(trial) == "hidden_fill lets hidden keys matter"


# --- sizes and structure --------------------------------------------------------------------------


def recording_flash(refuses=None):
    """Return `flash` that refuses some sizes, and the list of those it accepts."""
    seen = []

    def f(q, k, v, mask=None, *, causal=False, window=None, return_lse=False):
        sizes = {"H": q.shape[-3], "K": k.shape[-3]}
        sizes |= {"T": q.shape[-2], "S": k.shape[-2], "B": len(q) if q.ndim == 4 else 1}
        if refuses is not None and refuses(**sizes):
            raise NotImplementedError
        seen.append(sizes)
        return flash(q, k, v, mask, causal=causal, window=window, return_lse=return_lse)

    return f, seen


def test_rules_keep_to_the_sizes_of_the_user():
    f, seen = recording_flash()
    sizes = {"B": (1, 2), "H": (3, 6), "K": (3,), "T": (5, 7), "S": (5, 7, 12), "D": (8,)}
    report = check(f, framework="numpy", sizes=sizes, only=RULES, examples=4)
    for letter in "BHKTS":
        assert {n[letter] for n in seen} <= set(sizes[letter]), letter
    statuses = {o.rule: o.status for o in report.outcomes if o.status != "passed"}
    # K = H = 6 is not among the sizes, and there is neither bias nor scale.
    assert statuses == dict.fromkeys(
        ("shared-heads", "mask-as-bias", "scale-of-query"), "not applicable"
    )


@pytest.mark.parametrize(
    ("refuses", "not_applicable"),
    [
        (lambda T, S, **_: T != S, {"padded-keys", "split-merge"}),
        (lambda T, S, **_: T > S, set()),
        (lambda K, H, **_: K != H, {"shared-heads"}),
    ],
    ids=["T != S", "T > S", "K < H"],
)
def test_rules_keep_to_accepted_structure(refuses, not_applicable):
    f, _ = recording_flash(refuses)
    rules = {"batch-alone", "shared-heads", "padded-keys", "causal-prefix", "split-merge"}
    report = check(f, framework="numpy", only=rules, examples=3)
    statuses = {o.rule: o.status for o in report.outcomes}
    assert statuses.pop("structure", "passed") == "passed"
    assert {n for n, status in statuses.items() if status == "not applicable"} == not_applicable
    assert set(statuses.values()) <= {"passed", "not applicable"}


@pytest.mark.parametrize(
    ("rule", "reason", "space"),
    [
        ("permute-keys", "sizes allow no S above 1", {"sizes": {"S": (1,)}}),
        ("permute-heads", "refuses rank 3, rank 4, rank 5", {"structure": frozenset({"rank 2"})}),
        ("permute-batch", "refuses rank 4, rank 5", {"structure": frozenset({"rank 3"})}),
        ("shared-heads", "refuses K < H", {"structure": frozenset({"rank 4"})}),
        ("padded-keys", "sizes allow one S only", {"sizes": {"S": (64,)}}),
        ("padded-keys", "has no mask", {"features": frozenset({"bias"})}),
        ("causal-prefix", "sizes allow one T only", {"sizes": {"T": (64,)}}),
        ("window-as-mask", "has no window and no mask", {"features": frozenset({"bias"})}),
        ("scale-of-query", "has no scale", {"features": frozenset({"bias"})}),
    ],
)
def test_not_applicable_gives_reason(rule, reason, space):
    assert PROPERTIES[rule].unless(trial_of(**space)) == reason


@pytest.mark.parametrize(
    ("rule", "fields", "forbidden"),
    [
        ("mask-as-bias", {}, set()),
        ("mask-as-bias", {"softcap": "after_bias"}, {"softcap"}),
        ("mask-as-bias", {"bias": "before_scale"}, {"scale"}),
        ("scale-of-query", {}, set()),
        ("scale-of-query", {"bias": "before_scale"}, {"bias"}),
    ],
)
def test_conventions_forbid_options(rule, fields, forbidden):
    trial = trial_of(conventions=Conventions(**fields))
    assert PROPERTIES[rule].draw(trial)["forbid"] == forbidden


def test_head_of_follows_conventions():
    problem = Recipe(H=6, K=3).problem()
    tiled = trial_of(conventions=Conventions(kv_head="tile"))
    assert head_of(tiled, problem).tolist() == [0, 1, 2, 0, 1, 2]
    assert head_of(trial_of(), problem).tolist() == [0, 0, 1, 1, 2, 2]


def test_mask_as_bias_needs_a_dtype_with_inf():
    reason = PROPERTIES["mask-as-bias"].unless(trial_of(dtype="float8_e4m3fn"))
    assert reason == "float8_e4m3fn has no −inf"
    assert PROPERTIES["mask-as-bias"].unless(trial_of(dtype="float8_e5m2")) is None


# --- picks ----------------------------------------------------------------------------------------


def test_pick_leaves_missing_and_broadcast_axes():
    problem = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13).problem()
    order = np.array([6, 0])
    picks = [pick_keys(problem, order)]
    one_a_row, matrix = np.ones((5, 1)), np.arange(35.0).reshape(5, 7)
    assert pick("bias", one_a_row, picks).shape == (5, 1)
    assert np.array_equal(pick("dbias", matrix, picks), matrix[:, [6, 0]])
    assert pick("q", problem.q, picks) is problem.q
    assert np.array_equal(pick("dk", problem.k, picks), problem.k[..., [6, 0], :])


def test_put_back_fills_with_zeros():
    problem = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13).problem()
    picks = [pick_queries(problem, np.array([3])), pick_keys(problem, np.array([6, 0]))]
    whole = np.arange(1.0, 36).reshape(5, 7)
    back = put_back("bias", pick("bias", whole, picks), picks, whole.shape)
    expected = np.zeros((5, 7))
    expected[3, [0, 6]] = whole[3, [0, 6]]
    assert np.array_equal(back, expected)


def test_another_order_is_not_the_identity():
    rng = np.random.default_rng(0)
    assert all((another_order(rng, 2) == [1, 0]).all() for _ in range(20))
    assert another_order(rng, 1) == [0]
