"""Spot checks pass right rows, fail wrong ones in the sample, and state the odds of a miss.

`online` is a correct float32 attention that never holds the scores; it shares no code with npattn.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import npattn
from npattn import biases, masks
from npattn.conventions import Conventions
from npattn.errors import DtypeError, NpattnError, OptionError, ShapeError
from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array, Tile
from npattn.problem.options import FEATURES
from npattn.problem.sizes import Sized
from npattn.testing import SpotCheck, spot_check
from npattn.testing.bounds import by_row
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.cases.strategies import recipes
from npattn.testing.comparison import compare_arrays
from npattn.testing.spot import evaluation, sample_indices
from npattn.testing.spot.evaluation import SampledRows

BF16 = ml_dtypes.bfloat16
B, H, K, T, S, D, E = 2, 6, 3, 53, 61, 5, 7
ROWS, KEYS = B * H * T, B * K * S
STEP = 16


def arrays(dtype: Any = np.float32, seed: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    shapes = ((B, H, T, D), (B, K, S, D), (B, K, S, E))
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def online(
    q: Array, k: Array, v: Array, *, causal: bool = False, shift: int = 0, skip: int = 0
) -> tuple[Array, Array]:
    """Attention in float32 over tiles of keys. Wrong: the diagonal off by `shift`, and the last
    `skip` keys left out."""
    G, length = q.shape[-3] // k.shape[-3], k.shape[-2]
    k, v = np.repeat(k, G, -3), np.repeat(v, G, -3)
    m = np.full((*q.shape[:-1], 1), -np.inf, np.float32)
    total, o = np.zeros_like(m), np.zeros((*q.shape[:-1], v.shape[-1]), np.float32)
    last = np.arange(q.shape[-2])[:, None] + length - q.shape[-2] + shift
    for s in range(0, length - skip, STEP):
        keys = np.arange(s, min(s + STEP, length - skip))
        x = np.float32(q.shape[-1] ** -0.5) * (q @ k[..., keys, :].swapaxes(-1, -2))
        x = np.where(keys <= last, x, np.float32(-np.inf)) if causal else x
        top = np.maximum(m, x.max(-1, keepdims=True))
        safe = np.where(np.isinf(top), np.float32(0), top)
        e, old = np.exp(x - safe), np.exp(m - safe)
        total, o = total * old + e.sum(-1, keepdims=True), o * old + e @ v[..., keys, :]
        m = top
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isinf(m), 0, m) + np.log(total))[..., 0]
    return o / np.where(total == 0, 1, total), lse


@dataclass
class Delivered:
    """Results of a correct implementation, and the call that checks them."""

    q: Array
    k: Array
    v: Array
    results: dict[str, Any]
    options: dict[str, Any]

    def check(self, samples: int = 10**9, seed: int = 0, **changed: Any) -> SpotCheck:
        kwargs = self.results | self.options | {"samples": samples, "seed": seed} | changed
        return spot_check(kwargs.pop("out"), kwargs.pop("lse"), self.q, self.k, self.v, **kwargs)


def make_case(dtype: Any = np.float32, compute: Any = np.float32, **options: Any) -> Delivered:
    """Results and gradients in the precision of `dtype`."""
    q, k, v = arrays(dtype)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal((B, H, T, E)).astype(dtype)
    dlse = rng.standard_normal((B, H, T)).astype(np.float32)
    fwd = npattn.forward(q, k, v, dtype=compute, **options)
    grads = npattn.backward(fwd, dout, np.where(np.isfinite(fwd.lse), dlse, 0))
    results = {"out": fwd.out, "lse": fwd.lse, "dout": dout, "dlse": dlse}
    gradients = {"dq": grads.q, "dk": grads.k, "dv": grads.v}
    return Delivered(q, k, v, results | gradients, options)


# --- correct results pass -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_correct_online_softmax_passes(causal: bool) -> None:
    q, k, v = arrays()
    word: Any = "bottom_right" if causal else False
    result = spot_check(*online(q, k, v, causal=causal), q, k, v, causal=word, samples=100)
    assert result.passed
    assert 0 < result.worst < 1
    assert set(result.ratios) == {"o", "lse"}


@pytest.mark.parametrize(("dtype", "compute"), [(np.float32, np.float32), (BF16, "bfloat16")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right"},
        {"causal": "top_left", "window": (11, None)},
        {"window": (3, 5), "scale": -0.7},
        {"softcap": 1.5, "sinks": np.linspace(-1, 1, H)},
    ],
    ids=str,
)
def test_low_precision_results_and_gradients_pass(
    dtype: Any, compute: Any, options: dict[str, Any]
) -> None:
    result = make_case(dtype, compute, **options).check(samples=64)
    assert not result.failures, str(result)
    assert result.passed or dtype == BF16  # which leaves dk and dv little
    assert set(result.ratios) == {"o", "lse", "dq", "dk", "dv"}
    assert 0 < result.worst < 1


@pytest.mark.thorough
@settings(phases=[Phase.generate])  # to shrink takes minutes, and shows little more
@given(
    recipe=recipes(
        Space(
            features=frozenset(FEATURES) - {"gate"},
            structure=frozenset(STRUCTURE) - {"broadcast"},
            dtype="float32",
        )
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_rounded_exact_results_pass(recipe: Any, seed: int) -> None:
    problem = recipe.problem()
    cotangents = recipe.cotangents(problem)
    fwd = evaluate(problem)
    grads = npattn.backward(fwd, cotangents.dout, cotangents.dlse)
    options = {
        name: getattr(problem, name) for name in (*FEATURES,) if getattr(problem, name) is not None
    }
    try:
        result = spot_check(
            fwd.out.astype(np.float32),
            fwd.lse.astype(np.float32),
            problem.q,
            problem.k,
            problem.v,
            **options,
            dout=cotangents.dout,
            dlse=cotangents.dlse,
            **{f"d{n}": getattr(grads, n).astype(np.float32) for n in "qkv"},
            samples=5,
            seed=seed,
        )
    except OptionError:  # no query that was drawn sees a key
        assume(False)
    assert not result.failures, str(result)
    assert not result.defects


def test_score_mod_gets_indices_of_the_whole_problem() -> None:
    def modify(s: Array, b: Array, h: Array, t: Array, s_index: Array) -> Array:
        return s + 0.1 * np.sin(b + 2 * h + 3 * t + 5 * s_index)

    case = make_case(score_mod=modify)
    with patch.object(by_row, "CELLS", 2**6):  # parts of 16 keys
        result = case.check(samples=25)
    assert result.passed, str(result)
    assert not case.check(samples=25, score_mod=None).passed


CONVENTIONS: dict[str, tuple[Conventions, dict[str, Any]]] = {
    "top left": (Conventions(causal="top_left"), {"causal": True}),
    "hide": (Conventions(mask_true="hide"), {"mask": np.eye(T, S, 3, dtype=bool)}),
    "inclusive window": (Conventions(window="inclusive"), {"window": (4, 2)}),
    "tile": (Conventions(kv_head="tile"), {}),
    "base 2": (Conventions(lse_base="2"), {}),
    "after bias": (Conventions(softcap="after_bias"), {"softcap": 0.7, "bias": np.ones((T, 1))}),
    "bias": (Conventions(bias="before_scale"), {"bias": np.eye(T, S)}),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions_apply_to_rows(name: str) -> None:
    conventions, options = CONVENTIONS[name]
    case = make_case(conventions=conventions, **options)
    result = case.check(samples=100)
    assert result.passed, str(result)
    other = case.options | ({"causal": "bottom_right"} if options.get("causal") else {})
    q, k, v, results = case.q, case.k, case.v, case.results
    other["conventions"] = None
    wrong = spot_check(results["out"], results["lse"], q, k, v, **other, samples=100)
    assert not wrong.passed


ROWS_ONLY: dict[str, tuple[Conventions, dict[str, Any]]] = {
    "fill": (Conventions(hidden_fill=-2.0), {"causal": "bottom_right"}),
    "after mask": (Conventions(softcap="after_mask"), {"softcap": 0.7, "window": (2, 2)}),
    "nan": (Conventions(empty_row="nan"), {"mask": np.arange(T)[:, None] % 3 == 0}),
    "mean": (Conventions(empty_row="mean"), {"mask": np.arange(T)[:, None] % 3 == 0}),
    "empty": (Conventions(lse_empty=0.0), {"mask": np.arange(T)[:, None] % 3 == 0}),
}


@pytest.mark.parametrize("name", ROWS_ONLY)
def test_conventions_of_hidden_keys_apply_to_rows(name: str) -> None:
    conventions, options = ROWS_ONLY[name]
    case = make_case(conventions=conventions, **options)
    result = case.check(samples=100, dk=None, dv=None)
    assert not result.failures, str(result)
    assert result.passed or name == "nan"  # two of three rows are NaN
    assert not case.check(samples=100, dk=None, dv=None, conventions=None).passed


@pytest.mark.parametrize("name", [*CONVENTIONS, *ROWS_ONLY])
def test_row_has_the_tolerance_of_compare(name: str) -> None:
    conventions, options = (CONVENTIONS | ROWS_ONLY)[name]
    q, k, v = arrays()
    fwd = npattn.forward(q, k, v, conventions=conventions, **options)
    wrong = np.where(np.isfinite(fwd.lse), fwd.lse + 1, 0)
    result = spot_check(fwd.out, wrong, q, k, v, conventions=conventions, samples=40, **options)
    limits = tolerance(fwd.problem, q.dtype, conventions=conventions)["lse"]
    finite_failures = [failure for failure in result.failures if np.isfinite(failure.want)]
    assert finite_failures
    for failure in finite_failures:
        assert failure.allowed == pytest.approx(limits[failure.index], rel=2.0**-20)


@pytest.mark.parametrize(("factor", "passes"), [(0.99, True), (1.01, False)])
def test_row_fails_beyond_its_tolerance(factor: float, passes: bool) -> None:
    q, k, v = arrays()
    fwd = npattn.forward(q, k, v)
    off = factor * tolerance(fwd.problem, q.dtype)["lse"]
    result = spot_check(fwd.out, fwd.lse + off, q, k, v, samples=30)
    assert result.ratios["lse"] == pytest.approx(factor, rel=2.0**-10)
    assert len(result.failures) == (0 if passes else 30)


@pytest.mark.thorough
def test_nan_rows_need_nan_and_no_gradient() -> None:
    conventions, options = ROWS_ONLY["nan"]
    case = make_case(conventions=conventions, **options)
    zero = np.nan_to_num(case.results["out"])
    assert not case.check(out=zero, dk=None, dv=None).passed
    assert not case.check(dq=np.nan_to_num(case.results["dq"]), dk=None, dv=None).failures


def test_rank_2_is_checked() -> None:
    q, k, v = (x[0, 0] for x in arrays())
    fwd = npattn.forward(q, k, v, dtype=np.float32)
    result = spot_check(fwd.out, fwd.lse, q, k, v, samples=7)
    assert result.passed
    assert result.rows.shape == (7, 1)
    broken = fwd.out.copy()
    broken[result.rows[3, 0]] += 1
    (failure,) = spot_check(broken, fwd.lse, q, k, v, samples=7).failures
    assert failure.index[0] == result.rows[3, 0]


def test_broadcast_queries_are_checked_without_gradient() -> None:
    q, k, v = arrays()
    fwd = npattn.forward(q[0], k, v, dtype=np.float32)
    assert spot_check(fwd.out, fwd.lse, q[0], k, v, samples=50).passed
    with pytest.raises(ShapeError, match=r"dq has leading axes \(\), must have those of out"):
        spot_check(fwd.out, fwd.lse, q[0], k, v, dout=fwd.out, dq=q[0])


def test_lse_is_optional() -> None:
    q, k, v = arrays()
    out, _ = online(q, k, v)
    result = spot_check(out, None, q, k, v, samples=9)
    assert result.passed
    assert set(result.ratios) == {"o"}


# --- mask and bias objects ------------------------------------------------------------------------


MASKS: dict[str, Any] = {
    "causal": masks.causal(alignment="bottom_right"),
    "window": masks.window(7, 3),
    "lengths": masks.lengths(np.array([19, S])),
    "documents": masks.documents(np.arange(T) // 11, np.arange(S) // 13),
    "hidden": ~masks.prefix(17, alignment="top_left"),
    "custom": masks.custom(lambda b, h, t, s: (b + h + t + s) % 3 > 0),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.broad
def test_mask_object_equals_its_array(name: str) -> None:
    rule = MASKS[name]
    array = np.broadcast_to(rule.to_array(T, S, lead=(B,), H=H), (B, H, T, S))
    case = make_case(mask=array)
    assert case.check(samples=60, mask=rule).passed
    assert case.check(samples=60).ratios == case.check(samples=60, mask=rule).ratios
    assert not case.check(samples=60, mask=None).passed


BIASES: dict[str, Any] = {
    "alibi": biases.alibi(H),
    "relative": biases.relative(np.linspace(-1, 1, 8 * H).reshape(8, H), max_distance=20),
}


@pytest.mark.parametrize("name", BIASES)
def test_bias_object_equals_its_array(name: str) -> None:
    rule = BIASES[name]
    case = make_case(bias=np.asarray(rule.to_array(T, S, lead=(B,), H=H)))
    assert case.check(samples=60, bias=rule).passed
    assert case.check(samples=60).ratios == case.check(samples=60, bias=rule).ratios
    assert not case.check(samples=60, bias=None).passed


def test_mask_object_is_evaluated_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, asked = masks.causal(alignment="bottom_right"), []
    answer = type(rule).tile

    def tile(self: Any, of: Tile) -> bool | Array:
        asked.append((of.t1 - of.t0) * (of.s1 - of.s0))
        return answer(self, of)

    def whole(*_: Any, **__: Any) -> Array:
        raise AssertionError("the whole mask was made")

    monkeypatch.setattr(type(rule), "tile", tile)
    monkeypatch.setattr(Sized, "to_array", whole)
    case = make_case(causal="bottom_right")
    assert case.check(samples=20, causal=False, mask=rule).passed
    assert 0 < max(asked) <= S


def test_mask_object_of_other_sizes_is_refused() -> None:
    q, k, v = arrays()
    with pytest.raises(ShapeError):
        spot_check(*online(q, k, v), q, k, v, masks.documents(np.arange(T), np.arange(S + 1)))


# --- mistakes are found ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_planted_rows_are_found_if_sampled(seed: int) -> None:
    q, k, v = arrays()
    out, lse = online(q, k, v)
    planted, _ = sample_indices(np.random.default_rng(seed), (B, H, T), 13)
    for b, h, t in planted:
        out[b, h, t, seed % E] += 0.01
    result = spot_check(out, lse, q, k, v, samples=29, seed=1000 + seed)
    looked_at = {tuple(row) for row in result.rows.tolist()}
    wrong = {tuple(row) for row in planted.tolist()} & looked_at
    assert {failure.index[:3] for failure in result.failures} == wrong
    assert all(failure.index[3] == seed % E for failure in result.failures)
    assert result.passed == (not wrong)


MISTAKES: dict[str, Callable[[Array, Array, Array], tuple[Array, Array]]] = {
    "scale": lambda q, k, v: online(np.float32(1.001) * q, k, v),
    "last keys": lambda q, k, v: online(q, k, v, skip=S % STEP),
    "one key": lambda q, k, v: online(q, k, v, skip=1),
    "zero": lambda q, k, v: (0 * online(q, k, v)[0], online(q, k, v)[1]),
    "nan": lambda q, k, v: (np.nan * online(q, k, v)[0], online(q, k, v)[1]),
    "inf": lambda q, k, v: (online(q, k, v)[0], np.inf + online(q, k, v)[1]),
    "binary": lambda q, k, v: (online(q, k, v)[0], online(q, k, v)[1] / np.float32(math.log(2))),
    "lse": lambda q, k, v: (online(q, k, v)[0], online(q, k, v)[1] + np.float32(1e-4)),
    "head": lambda q, k, v: online(q, k[:, ::-1], v),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_all_rows_is_found(name: str) -> None:
    q, k, v = arrays()
    result = spot_check(*MISTAKES[name](q, k, v), q, k, v, samples=3)
    assert len(result.failures) >= 2


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("factor", [1.001, -1, 0, np.nan])
def test_wrong_gradient_is_found_and_named(name: str, factor: float) -> None:
    case = make_case(causal="bottom_right")
    wrong = {name: np.float32(factor) * case.results[name]}
    result = case.check(samples=20, **wrong)
    assert result.failures
    assert {failure.name for failure in result.failures} == {name}


@pytest.mark.parametrize("seed", range(8))
def test_planted_keys_are_found_if_sampled(seed: int) -> None:
    case = make_case()
    planted, _ = sample_indices(np.random.default_rng(seed), (B, K, S), 23)
    dk = case.results["dk"].copy()
    for b, h, s in planted:
        dk[b, h, s, seed % D] *= -1.1
    result = case.check(samples=31, seed=1000 + seed, dk=dk)
    assert result.keys is not None
    looked_at = {tuple(key) for key in result.keys.tolist()}
    wrong = {tuple(key) for key in planted.tolist()} & looked_at
    assert {failure.index[:3] for failure in result.failures} == wrong


def test_gradient_that_ignores_dlse_is_found() -> None:
    case = make_case()
    fwd = npattn.forward(case.q, case.k, case.v)
    grads = npattn.backward(fwd, case.results["dout"])
    for name, of in (("dq", grads.q), ("dk", grads.k)):
        wrong = {name: of.astype(np.float32)}
        assert {f.name for f in case.check(samples=10, **wrong).failures} == {name}
        alone: dict[str, Any] = {"dlse": None, "dq": None, "dk": None, "dv": None}
        assert case.check(samples=10, **(alone | wrong)).passed


def test_declared_roundings_have_larger_ratios() -> None:
    case = make_case(BF16, "bfloat16")  # it stores P and dS in bfloat16
    loose, sharp, wrong = (case.check(50, rounding=r) for r in (None, "fused", "upcast"))
    assert not loose.failures
    assert sharp.passed
    assert all(sharp.powers[name].factor < loose.powers[name].factor for name in loose.powers)
    assert not wrong.passed
    assert all(sharp.ratios[name] > ratio for name, ratio in loose.ratios.items())


# --- the sample -----------------------------------------------------------------------------------


def test_share_is_robust_to_rounding() -> None:
    for whole, samples in itertools.product(range(1, 60), (1, 3)):
        result = report(min(samples, whole), whole)
        for wrong in range(whole + 1):
            blind = math.comb(whole - wrong, len(result.rows)) / math.comb(whole, len(result.rows))
            assert result.miss_probability(wrong / whole) == pytest.approx(blind, abs=2.0**-40)


def test_miss_probability_is_hypergeometric() -> None:
    from scipy.stats import hypergeom

    result = report(256, 10**6)
    for wrong in (1, 100, 11_700, 500_000):
        exact = hypergeom.pmf(0, 10**6, wrong, 256)
        assert result.miss_probability(wrong / 10**6) == pytest.approx(exact, rel=1e-9)
        assert result.miss_probability(wrong / 10**6) <= (1 - wrong / 10**6) ** 256


@given(samples=st.integers(1, 300), more=st.integers(0, 10**7), probability=st.floats(0.001, 0.999))
def test_share_is_the_least_for_a_miss_probability(
    samples: int, more: int, probability: float
) -> None:
    whole = samples + more
    result = report(samples, whole)
    share = result.share(probability)
    assert result.miss_probability(share) <= probability
    assert result.miss_probability(max(share - 1.5 / whole, 0)) > probability


def report(samples: int, whole: int) -> SpotCheck:
    return SpotCheck(np.zeros((samples, 1), int), None, {"o": 0.5}, (), whole, 0, 3)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(OptionError, match="share is"):
        report(3, 7).miss_probability(share)


@pytest.mark.parametrize("probability", [0, 1, math.nan])
def test_probability_is_between_0_and_1(probability: float) -> None:
    with pytest.raises(OptionError, match="probability is"):
        report(3, 7).share(probability)


def test_unchecked_population_has_no_probability() -> None:
    with pytest.raises(OptionError, match=r'of is "keys", must be "rows"'):
        report(3, 7).miss_probability(0.5, "keys")
    with pytest.raises(OptionError, match="of is 'queries'"):
        report(3, 7).miss_probability(0.5, "queries")


def test_rows_are_sampled_uniformly_without_replacement() -> None:
    shape, times, samples = (2, 3, 5), 2000, 7
    count = np.zeros(shape, int)
    for seed in range(times):
        rows, whole = sample_indices(np.random.default_rng(seed), shape, samples)
        assert whole == 30
        assert len({tuple(row) for row in rows.tolist()}) == samples
        count[tuple(rows.T)] += 1
    share = samples / 30
    deviation = math.sqrt(times * share * (1 - share))
    assert abs(count - times * share).max() < 5 * deviation


def test_seed_decides_the_sample() -> None:
    case = make_case()
    first, again, other = (case.check(samples=20, seed=seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.rows, again.rows)
    assert first.ratios == again.ratios
    assert (first.rows != other.rows).any()


def test_small_problems_are_checked_whole() -> None:
    result = make_case().check(samples=ROWS)
    assert len(result.rows) == result.all_rows == ROWS
    assert result.keys is not None
    assert len(result.keys) == result.all_keys == KEYS
    assert result.miss_probability(1 / ROWS) == 0
    assert f"checked all {ROWS} rows" in str(result)
    assert f"checked all {KEYS} keys" in str(result)


@pytest.mark.parametrize("empty", ["B", "H", "T", "S", "E"])
def test_sizes_of_0_are_checked(empty: str) -> None:
    size = {"B": 2, "H": 3, "T": 5, "S": 7, "E": 2} | {empty: 0}
    B, H, T, S, E = size.values()
    q, k, v = np.ones((B, H, T, 3)), np.ones((B, H, S, 3)), np.ones((B, H, S, E))
    fwd = npattn.forward(q, k, v)
    result = spot_check(fwd.out, fwd.lse, q, k, v)
    assert not result.failures
    reasons = {"S": "not judged: lse", "E": ""}  # o alone is empty without E
    assert result.reason == reasons.get(empty, "nothing tested")
    assert result.all_rows == B * H * T
    assert isinstance(str(result), str)


# --- power ----------------------------------------------------------------------------------------


def test_gradient_that_could_be_doubled_unseen_has_no_verdict() -> None:
    case = make_case(BF16, "bfloat16")
    wrong = (1.2 * case.results["dk"].astype(np.float32)).astype(BF16)
    for result in (case.check(31), case.check(31, dk=wrong)):
        assert not result.failures
        assert (result.verdict, result.passed) == ("no verdict", False)
        assert result.reason == "not judged: dk, dv"
        assert "dk: twice the result would not have been seen" in str(result)
    assert case.check(31, accept=("dk", "dv")).passed
    assert not case.check(31, accept=("dv",)).passed


def test_power_of_rows_is_the_least_error_that_fails() -> None:
    case = make_case()
    factor = case.check(37).powers["o"].factor
    for share, passes in ((0.2, True), (5.0, False)):
        out = case.results["out"].astype(float) * (1 + share * factor)
        assert case.check(37, out=out.astype(np.float32)).passed is passes


@pytest.mark.parametrize("miss", [abs, np.zeros_like], ids=["sign", "all"])
def test_comparison_that_misses_mistakes_is_a_defect(
    miss: Callable[[Array], Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        evaluation,
        "compare_arrays",
        lambda n, got, want, t: compare_arrays(n, miss(got), miss(want), t),
    )
    result = make_case().check(23)
    assert result.verdict == "no verdict"
    assert "a defect of npattn: it passes the negative result (o)" in result.reason


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_mapped_files_are_not_written_or_loaded_whole(tmp_path: Path) -> None:
    H, S, D = 2, 2**16, 16
    rng = np.random.default_rng(0)
    mapped = {}
    for name in ("q", "k", "v", "out"):
        np.save(tmp_path / name, rng.standard_normal((H, S, D), dtype=np.float32))
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    before = {name: (tmp_path / f"{name}.npy").read_bytes() for name in mapped}
    tracemalloc.start()
    with patch.object(by_row, "CELLS", 2**10):
        result = spot_check(mapped["out"], None, mapped["q"], mapped["k"], mapped["v"], samples=3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not result.passed  # the numbers are noise
    # One head of k, in its own dtype; the scores of three rows are three sixteenths of that.
    assert peak < S * D * 4
    assert {name: (tmp_path / f"{name}.npy").read_bytes() for name in mapped} == before


def test_arguments_are_not_written() -> None:
    case = make_case(sinks=np.zeros(H), bias=np.zeros((T, S)))
    given = {"q": case.q, "k": case.k, "v": case.v, **case.results, **case.options}
    for array in given.values():
        array.flags.writeable = False
    assert case.check(samples=5).passed


# --- the report -----------------------------------------------------------------------------------


def test_report_has_sample_sizes_and_miss_probability() -> None:
    text = str(make_case().check(samples=64))
    assert text.startswith("spot check passed: largest error / tolerance: o 0.")
    assert f"checked 64 of {ROWS} rows, sampled with seed 0: if 4.4 % of the rows" in text
    assert f"checked 64 of {KEYS} keys" in text
    assert "the probability of missing all of them would be 4.8 %" in text


def test_report_prints_first_failures_and_counts_the_rest() -> None:
    case = make_case()
    result = case.check(
        samples=25, out=-case.results["out"], dq=None, dk=None, dv=None, dout=None, dlse=None
    )
    text = str(result)
    assert text.startswith("spot check FAILED")
    assert text.count("\n  o[") == 10
    assert "  and 15 more" in text
    b, h, t, e = result.failures[0].index
    assert f"o[{b}, {h}, {t}, {e}]: got " in text
    assert result.failures[0].want == pytest.approx(-result.failures[0].got, rel=1e-4)
    assert result.worst == max(failure.ratio for failure in result.failures)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.every
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": None}, "out is None: pass the output of the implementation"),
        ({"out": np.zeros((B, H, T, E + 1))}, r"out has shape .*, must have \(2, 6, 53, 7\)"),
        ({"lse": np.zeros((B, H, T, 1))}, r"lse has shape .*, must have \(2, 6, 53\)"),
        ({"out": np.zeros((B, H, T, E), int)}, "out is int64, must be floating"),
        ({"dq": np.zeros((B, H, T, D + 1))}, "dq has shape"),
        ({"dout": np.zeros((B, H, T))}, "dout has shape"),
        ({"dlse": np.zeros((B, H, S))}, "dlse has shape"),
        ({"dout": None}, "got dq without dout: pass the cotangent of out"),
        (
            {"dq": None, "dk": None, "dv": None},
            "got dout, but no gradient to check: pass dq, dk or dv",
        ),
        ({"dq": None, "dk": None, "dv": None, "dout": None}, "got dlse, but no gradient to check"),
        ({"lse": None}, "dv needs lse, since P is"),
        ({"samples": 0}, "samples is 0, must be an integer ≥ 1"),
        ({"seed": -1}, "seed is -1, must be an integer ≥ 0"),
        ({"rounding": "loose"}, "rounding is 'loose', must be one of"),
        ({"conventions": "torch"}, "conventions is 'torch', must be a Conventions"),
        ({"causal": True}, "causal=True is ambiguous for T = 53 queries and S = 61 keys"),
        ({"window": (-1, 0)}, "window is"),
        ({"mask": np.ones(S, bool)}, "mask has shape"),
        (
            {"conventions": Conventions(hidden_fill=-1.0), "causal": "top_left"},
            "got dv under conventions that give hidden keys a gradient",
        ),
        ({"conventions": Conventions(empty_row="mean")}, "got dv under conventions"),
        ({"conventions": Conventions(window="inclusive"), "window": (0, 0)}, "must have left ≥ 1"),
        ({"mask": np.zeros((1, 1), bool)}, "no sampled query sees a key"),
    ],
)
def test_illegal_arguments_are_errors(changes: dict[str, Any], message: str) -> None:
    case = make_case()
    with pytest.raises(NpattnError, match=message):
        case.check(samples=changes.pop("samples", 5), **changes)


def test_complex_arrays_are_refused() -> None:
    q, k, v = arrays()
    with pytest.raises(DtypeError, match="q is complex64, must be real: spot_check"):
        spot_check(*online(q, k, v), q.astype(np.complex64), k, v)


def test_problems_with_a_gate_are_refused() -> None:
    q, k, v = arrays()
    gated = Problem(q, k, v, gate=np.ones((B, H, T, E), np.float32))
    out = np.zeros((B, H, T, E), np.float32)
    with pytest.raises(OptionError, match=r"got gate, .* pass the output before it"):
        SampledRows(gated, Conventions(), None, {"o": out}, None, None)
