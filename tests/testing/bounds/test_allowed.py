"""Bounds hold for every correct rounding, and mistakes exceed them.

`Kernel` of the zoo is a correct implementation of low precision in NumPy: every product
and every addition is rounded to the accumulator, one at a time, and what a `Rounding` says is
stored low is rounded to the dtype of the inputs. It shares no code with the oracle or the bounds.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import npattn
from benchmarks.zoo.correct import CORRECT, Kernel
from npattn.conventions import Conventions
from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.problem.arrays import finfo
from npattn.testing.bounds.allowed import BoundTask, bounds, deviations, tolerance
from npattn.testing.bounds.rounding import Rounding, unit_roundoff
from npattn.testing.bounds.ulp import excess
from npattn.testing.bounds.worst_case import WorstCase
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import recipes
from npattn.testing.comparison import Comparison, compare_arrays

pytestmark = pytest.mark.unmeasured  # other tests run these lines

Array = np.ndarray[Any, Any]

LOW = ("bfloat16", "float16", "float32")
GRADIENTS = ("q", "k", "v", "bias", "sinks")
LOG2E = 1 / math.log(2)


UPCAST, FUSED, EAGER = Rounding.upcast(), Rounding.fused(), Rounding.eager()
LOOSE = Rounding.undeclared("bfloat16")
FROM_OUT, FROM_WEIGHTS = {"delta_from": "out"}, {"delta_from": "weights"}

KERNELS = {
    name: Kernel(**{"order": "first"} | choices)
    for name, choices in {
        "upcast": {"rounding": replace(UPCAST, **FROM_WEIGHTS)},
        "upcast, last first": {
            "rounding": replace(UPCAST, **FROM_WEIGHTS), "order": "last", "flushes": True,
        },
        "upcast, tiles": {"rounding": replace(UPCAST, **FROM_OUT), "tile": 17, "binary": True},
        "fused": {"rounding": FUSED, "tile": 17, "binary": True},
        "fused, last first": {
            "rounding": FUSED, "tile": 33, "order": "last", "sink": "last", "flushes": True,
        },
        "eager": {"rounding": replace(EAGER, **FROM_WEIGHTS)},
        "eager, last first": {
            "rounding": replace(EAGER, **FROM_WEIGHTS), "order": "last", "apart": True,
        },
        "undeclared": {"rounding": replace(LOOSE, **FROM_WEIGHTS)},
        "undeclared, tiles": {
            "rounding": replace(LOOSE, **FROM_OUT, scores="accumulator"), "tile": 33,
        },
    }.items()
}  # fmt: skip
"""Correct implementations by name; the first word is the preset that they keep."""

SIZES = {
    "B": (2, 1),
    "H": (1, 2, 3, 6),
    "T": (2, 1, 3, 5, 11, 17, 34),
    "S": (3, 1, 2, 5, 7, 19, 37, 65),
    "D": (3, 1, 2, 5, 13, 64),
    "E": (2, 1, 3, 9, 33),
}


def declared_models(name: str, dtype: Any) -> Rounding:
    """The preset of the first word of a name in `KERNELS`."""
    preset = name.split(",")[0]
    return Rounding.undeclared(dtype) if preset == "undeclared" else Rounding.from_name(preset)


def oracle(
    problem: Problem, dout: Array, dlse: Array | None, conventions: Conventions | None = None
) -> dict[str, Array]:
    """Exact results by name."""
    fwd = evaluate(problem, conventions)
    grads = npattn.backward(fwd, dout.astype(float), None if dlse is None else dlse.astype(float))
    expected = {"o": fwd.out, "lse": fwd.lse}
    return expected | {f"d{n}": x for n in GRADIENTS if (x := getattr(grads, n)) is not None}


def ratios(
    got: dict[str, Array],
    problem: Problem,
    dout: Array,
    dlse: Array | None,
    rounding: Rounding | None = None,
    conventions: Conventions | None = None,
) -> dict[str, Comparison]:
    """Compare results with the oracle, within the bounds."""
    expected = oracle(problem, dout, dlse, conventions)
    wide = None if dlse is None else dlse.astype(float)
    tolerance = bounds(problem, problem.q.dtype, rounding, dout=dout.astype(float), dlse=wide,
                       conventions=conventions)  # fmt: skip
    return {n: compare_arrays(n, got[n], x, tolerance[n]) for n, x in expected.items() if n in got}


def assert_within(outcomes: dict[str, Comparison], context: object) -> None:
    wrong = [str(c) for c in outcomes.values() if not c.passed]
    assert not wrong, "\n".join([str(context), *wrong])


def normal(dtype: str, T: int = 33, S: int = 65, D: int = 64, **options: Any) -> Recipe:
    return Recipe(lead=(2,), H=2, K=2, T=T, S=S, D=D, E=16, dtype=dtype, seed=3, **options)


# --- correct implementations pass -----------------------------------------------------------------

UNGATED = frozenset({"gate"})
"""Options that these kernels lack; tests/testing/test_gates.py has kernels with gates."""

# A third of the examples of the profile, since each meets nine implementations in three dtypes.
FEWER = settings(max_examples=max(settings.default.max_examples // 3, 1))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("preset", ["upcast", "fused", "eager", "undeclared"])
@FEWER
@given(data=st.data())
def test_correct_kernels_stay_within_declared_and_undeclared_bounds(
    dtype: str, preset: str, data: st.DataObject
) -> None:
    recipe = data.draw(recipes(Space(dtype=dtype, sizes=SIZES), forbid=UNGATED))
    problem = recipe.problem()
    cotangents = recipe.cotangents(problem)
    wide = dtype == "float32"  # undeclared is eager there
    own, loose = declared_models(preset, dtype), Rounding.undeclared(dtype)
    for name, kernel in KERNELS.items():
        if name.split(",")[0] == preset and not (wide and preset == "undeclared"):
            got = kernel(problem, *cotangents)
            for rounding in {own, loose}:
                outcomes = ratios(got, problem, *cotangents, rounding)
                assert_within(outcomes, (name, rounding.name, recipe))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_across_blocks_and_tiles_stay_within_bounds(name: str, dtype: str) -> None:
    recipe = normal(dtype, T=67, S=129, D=8)
    problem = recipe.problem()
    cotangents = recipe.cotangents(problem)
    got = KERNELS[name](problem, *cotangents)
    assert_within(ratios(got, problem, *cotangents, declared_models(name, dtype)), name)
    assert_within(ratios(got, problem, *cotangents), name)


def test_second_rounding_of_ds_may_lose_subnormals() -> None:
    # dS · scale is stored too: 64 numbers just below half the least subnormal, of one sign.
    sign = np.where(np.arange(64) % 2, -1, 1)[:, None]
    q, k = np.zeros((1, 256)), sign * np.eye(1, 256)
    dout = np.array([[7 * 64 * 2.0**-24]], np.float16)
    problem = Problem(*(x.astype(np.float16) for x in (q, k, sign)))
    got = KERNELS["eager"](problem, dout)
    assert got["dq"][0, 0] == 0
    assert_within(ratios(got, problem, dout, None, EAGER), "dS · scale below the subnormals")


@pytest.mark.parametrize("name", ["fused", "eager"])
def test_weights_stored_twice_may_lose_subnormals_twice(name: str) -> None:
    # Every query gives the second key a weight between the least subnormals.
    q, k, v, dout = (np.ones((n, 1), np.float16) for n in (64, 2, 2, 64))
    keep = np.ones((1, 2), bool)
    for score in np.linspace(-17.4, -14.5, 60):
        k[:, 0] = 0, score
        problem = Problem(q, k, v, dropout_mask=keep, dropout_rate=0.3)
        got = KERNELS[name](problem, dout)
        assert_within(ratios(got, problem, dout, None, declared_models(name, "float16")), score)


def test_stored_slope_may_be_subnormal() -> None:
    recipe = Recipe(
        lead=None, T=5, S=5, D=64, E=3, dtype="float16", seed=1438, distribution="low",
        causal=True, window=(3, None), bias="one for all samples", scale=0.5, score_mod="squash",
        sinks=True, dropout=0.0,
    )  # fmt: skip
    problem = recipe.problem()
    cotangents = recipe.cotangents(problem)
    got = KERNELS["eager"](problem, *cotangents)
    assert_within(ratios(got, problem, *cotangents, EAGER), recipe)


def test_stored_score_may_pass_a_turn_of_score_mod() -> None:
    def late(s: Array, *_: Any) -> Array:
        return np.where(s.real > 1015.5, s - 1015.5, 0)

    q, k, v = np.array([[7.0]]), np.array([[145.0], [0.0]]), np.array([[1.0], [-1.0]])
    low = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    problem = Problem(*low, scale=1.0, score_mod=late)
    got = KERNELS["eager"](problem, np.ones((1, 1), ml_dtypes.bfloat16))["o"]
    assert got[0, 0] > 0.2 > evaluate(problem).out[0, 0] == 0  # 7 · 145 = 1015 is stored as 1016
    for limit in (bounds, tolerance):
        assert excess(got, np.zeros((1, 1))) <= limit(problem, "bfloat16", EAGER)["o"]


def test_gradients_through_lse_and_out_may_be_stored_apart() -> None:
    # One of them is almost minus the other, so that their sum is smaller than their roundings.
    rng, n, low = np.random.default_rng(0), 20000, ml_dtypes.bfloat16
    v, dout = 4 * rng.standard_normal((n, 1, 3, 1)), rng.standard_normal((n, 1, 1, 1))
    v, dout = v.astype(low).astype(float), dout.astype(low).astype(float)
    pull = dout[..., 0] * (v[..., 0, :] - v.mean(-2))
    dlse = (-pull * (1 + rng.uniform(-0.02, 0.02, pull.shape))).astype(np.float32)
    q, k, bias = np.zeros((n, 1, 1, 1)), np.zeros((n, 1, 3, 1)), np.zeros((n, 1, 1, 3))
    problem = Problem(*(x.astype(low) for x in (q, k, v)), bias=bias.astype(low))
    got = KERNELS["eager, last first"](problem, dout.astype(low), dlse)
    assert_within(ratios(got, problem, dout.astype(low), dlse, EAGER), "parts that cancel")


def test_delta_may_come_from_returned_weights() -> None:
    # One key, its score summed the other way round in backward: P is not quite 1, and nor is D.
    q, k = np.array([[1025.3, 1023.7, 0.3]], np.float32), np.array([[1.0013, -1, 1]], np.float32)
    v, dout, dweights = (np.full((1, 1), x, np.float32) for x in (1, 1, 2.0**-6))
    a, b, c = (q * k).T
    p = np.exp(((c + b) + a) - ((a + b) + c))
    dp = dout * v + dweights
    dq = p * (dp - p * dp) * k
    problem = Problem(q, k, v, scale=1.0)
    kwargs = {"dout": dout.astype(float), "dweights": dweights.astype(float)}
    gap = excess(dq, np.zeros((1, 3)))
    assert (gap > 0).all()
    for limit in (bounds, tolerance):
        assert (gap <= limit(problem, "float32", replace(UPCAST, **FROM_OUT), **kwargs)["dq"]).all()


@pytest.mark.parametrize("lead", [(1021, 1), (1021,)], ids=["samples", "heads"])
def test_parts_of_shared_gradients_may_be_stored(lead: tuple[int, ...]) -> None:
    # Three equal weights; dv of each of 1021 problems, or heads, is rounded, and nothing else.
    one, low = (1,) * len(lead), ml_dtypes.bfloat16
    q, k, v = (np.zeros(n, low) for n in ((*lead, 1, 1), (*one, 3, 1), (*one, 3, 13)))
    dout = np.random.default_rng(0).standard_normal((*lead, 1, 13)).astype(low)
    problem, do = Problem(q, k, v), dout.astype(float)
    parts = (do / 3).astype(low).astype(float)
    gap = abs(parts.sum(0) - do.sum(0) / 3)
    assert (gap > 0).all()
    for limit in (bounds, tolerance):
        limits = limit(problem, "bfloat16", replace(UPCAST, shared="input"), dout=do)
        assert (gap <= limits["dv"]).all()


ARRAYS = ("q", "k", "v", "bias", "dout", "dlse")


def mutate(arrays: dict[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """Each array of each climber changed in one of six ways, or left as it is."""
    outcomes = {}
    for name, x in arrays.items():
        one = (len(x), *(1,) * (x.ndim - 1))
        kind, size = rng.integers(0, 12, one), 10.0 ** rng.uniform(-3, 1, one)
        some = rng.random(x.shape) < 0.3
        changes = (
            np.where(some, x + size * rng.standard_normal(x.shape), x),
            x * 2.0 ** rng.integers(-3, 4, one),
            np.where(some, -x, x),
            x + 4 * size * rng.choice([-1, 1], one),
            np.where(some, x[:, :, :1], x),  # duplicates
            np.where(some, np.round(x), x),
        )
        for i, change in enumerate(changes):
            x = np.where(kind == i, change, x)
        outcomes[name] = x
    return outcomes


def climb(
    name: str,
    dtype: str,
    sizes: tuple[int, int, int, int],
    *,
    steps: int,
    climbers: int,
    seed: int,
    drops: bool = False,
) -> dict[str, float]:
    """The largest ratio that climbers find by chance and selection; one leading axis holds them."""
    rng, (T, S, D, E) = np.random.default_rng(seed), sizes
    shapes = ((T, D), (S, D), (S, E), (T, S), (T, E), (T,))
    best = {
        n: rng.standard_normal((climbers, 1, *shape))
        for n, shape in zip(ARRAYS, shapes, strict=True)
    }
    results = ("o", "lse", "dq", "dk", "dv", "dbias")
    aim = np.arange(climbers) % len(results)
    height = np.full(climbers, -1.0)
    top = float(finfo(dtype).max) / 1024
    dropout: dict[str, Any] = {}
    if drops:
        dropout = {"dropout_mask": rng.random((T, S)) < 0.7, "dropout_rate": 0.3}
    for _ in range(steps):
        tried = mutate(best, rng) if height.max() >= 0 else best
        low = {n: np.clip(x, -top, top).astype(dtype) for n, x in tried.items() if n != "dlse"}
        dout, dlse = low.pop("dout"), tried["dlse"].astype(np.float32)
        problem = Problem(**low, **dropout)
        expected = oracle(problem, dout, dlse)
        tolerance = bounds(problem, dtype, declared_models(name, dtype), dout=dout.astype(float),
                           dlse=dlse.astype(float))  # fmt: skip
        got = KERNELS[name](problem, dout, dlse)
        with np.errstate(all="ignore"):
            gaps = {n: excess(got[n], expected[n]) for n in results}
            each = [np.where(g == 0, 0, g / tolerance[n]) for n, g in gaps.items()]
        now = np.choose(aim, [x.reshape(climbers, -1).max(-1) for x in each])
        now = np.where(np.isnan(now), np.inf, now)
        better = now > height
        height = np.where(better, now, height)
        for n, x in tried.items():
            best[n] = np.where(better.reshape(climbers, *(1,) * (x.ndim - 1)), x, best[n])
    return {n: float(height[aim == i].max()) for i, n in enumerate(results)}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ["fused", "fused, last first", "eager"])
def test_search_for_worst_inputs_finds_no_violation(name: str, dtype: str) -> None:
    for seed, sizes in enumerate([(3, 5, 2, 2), (1, 2, 1, 1), (12, 3, 2, 1), (2, 40, 2, 1)]):
        outcomes = climb(name, dtype, sizes, steps=12, climbers=48, seed=seed, drops=seed > 1)
        assert max(outcomes.values()) <= 1, (sizes, seed, outcomes)
        if (
            dtype != "float32"
        ):  # where roundings of weights rule, the bound is not far from attained
            assert max(outcomes.values()) > 0.2, (sizes, seed, outcomes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("option", ["plain", "mask", "bias", "causal"])
@pytest.mark.parametrize("backend", ["default", "math"])
def test_torch_stays_within_the_undeclared_bound(dtype: str, option: str, backend: str) -> None:
    torch = pytest.importorskip("torch")
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "mask": {"mask": "matrix"},
        "bias": {"bias": "full"},
        "causal": {"causal": True},
    }
    T = 33 if option == "causal" else 67
    recipe = normal(dtype, T=T, S=33, D=16, **options[option])
    problem = recipe.problem("top_left")
    dout = recipe.cotangents(problem).dout

    def tensor(x: Array | None, leaf: bool = True) -> Any:
        if x is None:
            return None
        plain = x if x.dtype.name != "bfloat16" else x.astype(np.float32)
        outcomes = torch.from_numpy(np.array(plain)).to(getattr(torch, dtype if leaf else "bool"))
        return outcomes.requires_grad_() if leaf else outcomes

    def array(x: Any) -> Array:
        return np.asarray(x.detach().double().numpy()).astype(dtype)

    q, k, v, bias = (tensor(x) for x in (problem.q, problem.k, problem.v, problem.bias))
    extra = bias if bias is not None else tensor(problem.mask, leaf=False)
    backends = [torch.nn.attention.SDPBackend.MATH] if backend == "math" else None
    attend = torch.nn.functional.scaled_dot_product_attention
    causal = option == "causal"
    if backends:
        with torch.nn.attention.sdpa_kernel(backends):
            out = attend(q, k, v, attn_mask=extra, is_causal=causal)
    else:
        out = attend(q, k, v, attn_mask=extra, is_causal=causal)
    out.backward(tensor(dout).detach())
    got = {"o": array(out), "dq": array(q.grad), "dk": array(k.grad), "dv": array(v.grad)}
    if bias is not None:
        got["dbias"] = array(bias.grad)
    assert_within(ratios(got, problem, dout, None), (dtype, option, backend))


CONVENTIONS = {
    "filled with -1e4": Conventions(hidden_fill=-1e4),
    "filled with -1e9": Conventions(hidden_fill=-1e9),
    "filled with 0": Conventions(hidden_fill=0.0, lse_base="2"),
    "mean of all values": Conventions(empty_row="mean", lse_base="2", lse_empty=0.0),
    "base 2": Conventions(lse_base="2"),
}


@pytest.mark.parametrize("named", CONVENTIONS)
@FEWER
@given(data=st.data())
def test_bounds_hold_under_conventions(named: str, data: st.DataObject) -> None:
    force = {"mask": ("full", "empty rows", "empty head", "padding", None)}
    recipe = data.draw(recipes(Space(sizes=SIZES), force=force, forbid=UNGATED | {"score_mod"}))
    conventions = CONVENTIONS[named]
    problem = recipe.problem()
    cotangents = recipe.cotangents(problem)
    kernel = replace(KERNELS["upcast"], conventions=conventions)
    got = kernel(problem, *cotangents)
    outcomes = ratios(got, problem, *cotangents, UPCAST, conventions)
    assert_within(outcomes, (named, recipe))


MEANINGS = {
    "cap over the bias": Conventions(softcap="after_bias"),
    "cap over the bias inside the scale": Conventions(softcap="after_bias", bias="before_scale"),
    "cap over the mask": Conventions(softcap="after_mask", hidden_fill=-1e4),
    "bias inside the scale": Conventions(bias="before_scale", lse_base="2"),
    "heads in tiles": Conventions(kv_head="tile", weights="after_dropout"),
}


@pytest.mark.parametrize("named", MEANINGS)
@FEWER
@given(data=st.data())
def test_float32_oracle_stays_within_bounds_under_conventions(
    named: str, data: st.DataObject
) -> None:
    recipe = data.draw(recipes(Space(sizes=SIZES, dtype="float32"), forbid=frozenset({"sinks"})))
    conventions, problem = MEANINGS[named], recipe.problem()
    dout, dlse = recipe.cotangents(problem)
    narrow = evaluate(problem.replace(dtype=np.float32), conventions)
    grads = vars(npattn.backward(narrow, dout, dlse))
    got = {"o": narrow.out, "lse": narrow.lse, "weights": narrow.weights}
    got |= {f"d{n}": x for n, x in grads.items() if x is not None}
    wide = evaluate(problem, conventions)
    exact = vars(npattn.backward(wide, dout.astype(float), dlse.astype(float)))
    expected = {"o": wide.out, "lse": wide.lse, "weights": wide.weights}
    expected |= {f"d{n}": x for n, x in exact.items() if x is not None}
    kwargs = {"dout": dout.astype(float), "dlse": dlse.astype(float), "conventions": conventions}
    for limit in (bounds, tolerance):
        limits = limit(problem, "float32", UPCAST, **kwargs)
        outcomes = [compare_arrays(n, x, expected[n], limits[n]) for n, x in got.items()]
        assert all(c.passed for c in outcomes), (named, recipe, *map(str, outcomes))


def test_a_gradient_through_the_scale_may_be_flushed() -> None:
    options = {"bias": "full", "scale": 0.125, "distribution": "large logits"}
    recipe = Recipe(H=2, K=2, T=23, S=131, D=19, E=11, dtype="float32", seed=3, **options)
    conventions, problem = Conventions(bias="before_scale"), recipe.problem()
    dout = recipe.cotangents(problem).dout
    exact = oracle(problem, dout, None, conventions)["dbias"]
    flushed = exact.astype(np.float32)
    flushed[abs(flushed) < np.finfo(np.float32).tiny] = 0
    assert ((flushed == 0) & (abs(exact) > 2.0**-140)).any()
    kwargs = {"dout": dout.astype(float), "conventions": conventions}
    for limit in (bounds, tolerance):
        limits = limit(problem, "float32", UPCAST, **kwargs)
        assert compare_arrays("dbias", flushed, exact, limits["dbias"]).passed


# --- mistakes do not ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "error"), [("bfloat16", 3e-2), ("float16", 1e-2), ("float32", 1e-3)]
)
@pytest.mark.parametrize("T, S", [(8, 16), (33, 65)])  # noqa: PT006  # reads as the letters do
def test_wrong_scale_exceeds_declared_bound(dtype: str, error: float, T: int, S: int) -> None:
    problem, cotangents = sample_problem(normal(dtype, T=T, S=S))
    scaled = problem.replace(scale=problem.scale * (1 + error))
    got = KERNELS["fused"](scaled, *cotangents)
    outcomes = ratios(got, problem, *cotangents, FUSED)
    assert min(outcomes[n].ratio for n in ("o", "lse", "dv")) > 3
    assert min(outcomes[n].ratio for n in ("dq", "dk")) > 1


@pytest.mark.parametrize(
    ("dtype", "error"), [("bfloat16", 1e-1), ("float16", 3e-2), ("float32", 1e-3)]
)
def test_wrong_scale_exceeds_undeclared_bound(dtype: str, error: float) -> None:
    problem, cotangents = sample_problem(normal(dtype))
    scaled = problem.replace(scale=problem.scale * (1 + error))
    outcomes = ratios(KERNELS["fused"](scaled, *cotangents), problem, *cotangents)
    assert outcomes["o"].ratio > 1.2
    assert outcomes["lse"].ratio > 1.2


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("rounding", [FUSED, None], ids=["declared", "undeclared"])
def test_missing_key_exceeds_bound(dtype: str, rounding: Rounding | None) -> None:
    problem, cotangents = sample_problem(normal(dtype))
    mask = np.arange(problem.S)[None] < problem.S - 1
    outcomes = ratios(
        KERNELS["fused"](problem.replace(mask=mask), *cotangents), problem, *cotangents, rounding
    )
    assert min(c.ratio for c in outcomes.values()) > 1.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(7))
def test_query_scaled_and_rounded_before_product_is_eager(dtype: str, seed: int) -> None:
    """As modules do that divide q by √D: s may cancel, but not the rounding of q in it."""
    recipe = replace(normal(dtype), seed=seed)
    problem, cotangents = sample_problem(recipe)
    scaled = (problem.q.astype(np.float32) * np.float32(problem.scale)).astype(dtype)
    got = KERNELS["fused"](problem.replace(q=scaled, scale=1.0), *cotangents)
    outcomes = ratios({n: got[n] for n in ("o", "lse", "dk", "dv")}, problem, *cotangents)
    assert max(c.ratio for c in outcomes.values()) <= 1


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("rounding", [FUSED, None], ids=["declared", "undeclared"])
def test_missing_rank_one_term_exceeds_bound(dtype: str, rounding: Rounding | None) -> None:
    problem, cotangents = sample_problem(normal(dtype))
    wrong = replace(KERNELS["fused"], forgets_delta=True)
    outcomes = ratios(wrong(problem, *cotangents), problem, *cotangents, rounding)
    assert outcomes["dq"].ratio > 2
    assert outcomes["dk"].ratio > 2
    assert outcomes["o"].passed
    assert outcomes["dv"].passed


@pytest.mark.parametrize(
    ("stored", "dropout", "name"),
    [("dscores", None, "dq"), ("weights", None, "dq"), ("weights", 0.3, "o")],
    ids=["dS after the scale", "dS of the stored P", "P after dropout"],
)
def test_fused_model_allows_one_rounding_less(
    stored: str, dropout: float | None, name: str
) -> None:
    problem, (dout, _) = sample_problem(normal("bfloat16", T=5, S=7, D=3, dropout=dropout))
    apart = Rounding(name="apart", **{stored: "input"})
    for limit in (bounds, deviations):
        more, less = (
            limit(problem, "bfloat16", model, dout=dout.astype(float))[name]
            for model in (apart, replace(apart, fuses=True))
        )
        assert np.median(more / less) > 1.1


def test_weights_rebuilt_from_imprecise_lse_exceed_bound() -> None:
    # Seven equal scores of 2²⁰, whose lse float32 holds to a sixteenth.
    q, k, v = (np.ones((n, 1), np.float32) for n in (1, 7, 7))
    problem = Problem(0 * q, k, v, bias=np.full((1, 7), 2.0**20, np.float32))
    fwd = evaluate(problem)
    dv = np.exp(2.0**20 - fwd.lse.astype(np.float32).astype(float)) * np.ones((7, 1))
    limits = bounds(problem, "float32", UPCAST, dout=np.ones((1, 1)))["dv"]
    assert (excess(dv.astype(np.float32), fwd.weights.T) > limits).all()


BASE2 = {
    "subtracted first": ("at 2^14", "one tile at -1e9", "tiles at -1e9"),
    "folded": ("at 2^14", "one tile at -1e9"),
    "apart": ("at 2^14",),
}
"""Scores for which the forms of exp2 are right, where nothing but their exponent is rounded."""


def base2_weights(form: str, s: Array, tile: int) -> Array:
    """Weights by exp2 in float32, its exponent computed in one of three ways."""
    c = np.float32(LOG2E)

    def power(s: Array, m: Any) -> Array:
        if form == "subtracted first":
            return np.exp2((s - m) * c)
        if form == "apart":
            return np.exp2(s * c - m * c)
        exact = s.astype(float) * float(c) - float(m * c)  # fused: rounded once
        return np.exp2(exact.astype(np.float32))

    def rescale(m: Any) -> Any:
        return power(m, s.max()) if form == "apart" else np.exp2((m - s.max()) * c)

    tiles = [s[i : i + tile] for i in range(0, len(s), tile)]
    parts = [power(x, x.max()) * rescale(x.max()) for x in tiles]
    e = np.concatenate(parts).astype(float)
    return np.asarray(e / e.sum())


@pytest.mark.parametrize("form", BASE2)
@pytest.mark.parametrize("where", BASE2["subtracted first"])
def test_exponent_in_base_2_is_right_as_far_as_the_bound_says(form: str, where: str) -> None:
    rng = np.random.default_rng(7)
    near, far = 2.0**14 - 12 + 3 * rng.standard_normal(61), -1e9 + 64 * (3 - rng.permutation(61))
    s = np.float32(near if where == "at 2^14" else far)
    none = np.zeros((61, 1), np.float32)
    problem = Problem(none[:1], none, none, bias=s[None])
    limit = bounds(problem, "float32", Rounding.upcast())["weights"][0]
    tile = 17 if where == "tiles at -1e9" else 61
    gap = abs(base2_weights(form, s, tile) - evaluate(problem).weights[0])
    assert (gap <= limit).all() == (where in BASE2[form])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_weights_exceed_upcast_bound(dtype: str) -> None:
    problem, cotangents = sample_problem(normal(dtype))
    got = KERNELS["fused"](problem, *cotangents)
    assert not ratios(got, problem, *cotangents, UPCAST)["o"].passed
    assert ratios(got, problem, *cotangents, FUSED)["o"].passed


# --- the bounds themselves ------------------------------------------------------------------------


@FEWER
@given(recipe=recipes(Space(sizes=SIZES | {"T": (2, 0, 1, 5), "S": (3, 0, 1, 7)})))
def test_bounds_of_finite_results_are_finite_and_nonnegative(recipe: Recipe) -> None:
    problem, (dout, dlse) = sample_problem(recipe)
    for dtype in (*LOW, "float64"):
        for rounding in (UPCAST, EAGER, None):
            tolerance = bounds(
                problem, dtype, rounding, dout=dout.astype(float), dlse=dlse.astype(float)
            )
            expected = oracle(problem, dout, dlse)
            for name, exact in expected.items():
                t = tolerance[name]
                assert t.shape == exact.shape, name
                assert np.isfinite(t[np.isfinite(exact)]).all(), (name, dtype, rounding)
                assert (t[np.isfinite(exact)] >= 0).all(), (name, dtype, rounding)


@given(recipe=recipes(Space(sizes=SIZES), force={"mask": ("empty rows", "empty head")}))
def test_fully_masked_rows_have_zero_tolerance(recipe: Recipe) -> None:
    problem, (dout, dlse) = sample_problem(recipe)
    problem = problem.replace(sinks=None, gate=None)
    empty = np.isneginf(evaluate(problem).lse)
    tolerance = bounds(problem, recipe.dtype, dout=dout.astype(float), dlse=dlse.astype(float))
    assert (tolerance["o"][empty] == 0).all()
    assert (tolerance["lse"][empty] == 0).all()
    if problem.q.shape[:-1] == empty.shape:
        assert (tolerance["dq"][empty] == 0).all()


@pytest.mark.parametrize("garbage", [1.0, 1e30, np.nan, np.inf])
def test_hidden_key_has_zero_tolerance_and_moves_no_bound(garbage: float) -> None:
    problem, (dout, dlse) = sample_problem(normal("float32", T=5, S=7, D=3))
    mask = np.arange(7)[None] != 4
    hidden = problem.replace(mask=mask)
    k, v = problem.k.copy(), problem.v.copy()
    k[..., 4, :] = v[..., 4, :] = garbage
    cotangents = {"dout": dout.astype(float), "dlse": dlse.astype(float)}
    tolerance = bounds(hidden.replace(k=k, v=v), "bfloat16", **cotangents)
    assert (tolerance["dk"][..., 4, :] == 0).all()
    assert (tolerance["dv"][..., 4, :] == 0).all()
    plain = bounds(hidden, "bfloat16", **cotangents)
    for name, t in plain.items():
        assert np.allclose(tolerance[name], t, rtol=1e-6, atol=0), name


def test_visible_nan_spoils_bounds_of_its_row_alone() -> None:
    problem, (dout, dlse) = sample_problem(normal("float32", T=5, S=7, D=3))
    q = problem.q.copy()
    q[0, 1, 2] = np.nan
    poisoned = problem.replace(q=q)
    tolerance = bounds(poisoned, "float16", dout=dout.astype(float), dlse=dlse.astype(float))
    for name, exact in oracle(poisoned, dout, dlse).items():
        assert np.isfinite(tolerance[name][np.isfinite(exact)]).all(), name


def test_nothing_is_asked_of_a_sink_beside_a_nan_cotangent() -> None:
    problem, (dout, dlse) = sample_problem(normal("float32", T=3, S=5, D=2))
    mask = np.arange(3)[:, None] != 1  # query 1 sees its sink alone
    problem = problem.replace(mask=mask, sinks=np.full(problem.H, 0.5, np.float32))
    dout[0, 1, 1] = np.nan
    got = Kernel(rounding=replace(UPCAST, **FROM_OUT))(problem, dout, dlse)["dsinks"]
    assert np.isnan(got[1])  # from Σ dout · o
    exact = oracle(problem, dout, dlse)["dsinks"]
    assert np.isfinite(exact).all()  # from Σ p dp
    for tolerated in (bounds, tolerance):
        t = tolerated(problem, "float32", dout=dout.astype(float), dlse=dlse.astype(float))
        assert np.array_equal(np.isinf(t["dsinks"]), np.arange(problem.H) == 1)
        assert compare_arrays("dsinks", got, exact, t["dsinks"]).passed


def test_common_offset_of_values_costs_sums_and_storage_only() -> None:
    plain, _ = sample_problem(normal("float32", T=5, S=7, D=3))
    far = plain.replace(v=plain.v + 100)
    near, moved = (bounds(p, "float64", UPCAST)["o"] for p in (plain, far))
    roundings = plain.S + 20  # the sums and the normalisation, not D and the exponential's argument
    assert (moved <= near + 2 * roundings * 2.0**-53 * 110 * 2).all()


@pytest.mark.parametrize("dtype", LOW)
def test_stricter_model_allows_no_more(dtype: str) -> None:
    problem, (dout, _) = sample_problem(normal(dtype, T=5, S=7, D=3))
    models = (UPCAST, FUSED, EAGER, Rounding.undeclared(dtype))
    outcomes = [
        bounds(problem, dtype, replace(r, delta_from="either"), dout=dout.astype(float))
        for r in models
    ]
    for strict, loose in itertools.pairwise(outcomes):
        for name, t in strict.items():
            assert (t <= loose[name]).all(), name


def test_default_rounding_is_undeclared() -> None:
    problem, (dout, _) = sample_problem(normal("bfloat16", T=5, S=7, D=3))
    given_none = bounds(problem, "bfloat16", dout=dout.astype(float))
    named = bounds(problem, "bfloat16", Rounding.undeclared("bfloat16"), dout=dout.astype(float))
    assert given_none.keys() == named.keys()
    assert all(np.array_equal(t, named[name]) for name, t in given_none.items())


def test_without_dout_only_forward_is_bounded() -> None:
    problem, _ = sample_problem(normal("float32", T=5, S=7, D=3, sinks=True, bias="full"))
    assert set(bounds(problem, "float32")) == {"o", "lse", "weights", "max_score"}


def test_bound_is_of_the_order_of_unit_roundoff() -> None:
    problem, _ = sample_problem(normal("float32", T=5, S=7, D=3))
    for dtype in (*LOW, "float64"):
        u = unit_roundoff(dtype)
        tolerance = bounds(problem, dtype, FUSED)["o"]
        assert (tolerance > u / 16).all()
        assert (tolerance < 512 * u).all()


def sample_problem(recipe: Recipe) -> tuple[Problem, Any]:
    problem = recipe.problem()
    return problem, recipe.cotangents(problem)


@pytest.mark.parametrize("name", ["float32", "tf32", "float16", "bfloat16"])
def test_float64_in_a_narrower_format_has_a_tolerance_beside_the_largest_offset(name):
    """The error of a score near the least float64 is far beyond any exponential."""
    recipe = Recipe(lead=(), T=3, S=5, D=7, E=2, dtype="float64", seed=1, bias="least rows")
    model = Rounding(name=name, operands=name, scores=name, weights=name)
    allowed = tolerance(recipe.problem(), "float64", model)
    assert {n: np.isfinite(x).all() for n, x in allowed.items()} == dict.fromkeys(allowed, True)


def test_a_rounded_query_moves_the_weight_of_a_key_far_from_the_mean_of_its_row():
    """The products with a key of zeros are exact; those with all others are rounded, and alike."""
    kernel = CORRECT["tf32"].forward.__self__
    squares = []
    for seed in range(97):
        rng = np.random.default_rng(seed)
        k = np.array([3.0, -5.0]) + 0.3 * rng.standard_normal((1, 1, 307, 2))
        k[..., 0, :] = 0
        q, v = rng.standard_normal((1, 1, 1, 2)), rng.standard_normal((1, 1, 307, 1))
        problem = Problem(*(x.astype(np.float32) for x in (q, k, v)), scale=1.0)
        dout = np.ones((1, 1, 1, 1), np.float32)
        got = kernel(problem, dout, None)
        exact = evaluate(problem, engine="dense").weights
        sigma = deviations(problem, "float32", CORRECT["tf32"].rounding)["weights"]
        squares.append(((got["weights"] - exact) / sigma)[0, 0, 0, 0] ** 2)
    assert 1 / 4 < np.mean(squares) < 1.5  # a third, for 3 b² stands for b²


# --- gradients through the maximum of a row -------------------------------------------------------


def through_maximum(problem: Problem, dout: Array) -> dict[str, Array]:
    """Return the gradients of exp(s − max s) / Σ, by autograd in float32, the maximum included."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (problem.q, problem.k, problem.v))
    s = q @ k.mT * problem.scale
    p = (s - s.amax(-1, keepdim=True)).exp()
    out = p / p.sum(-1, keepdim=True) @ v
    grads = torch.autograd.grad(out, (q, k, v), torch.tensor(dout))
    return dict(zip(("dq", "dk", "dv"), (x.numpy() for x in grads), strict=True))


def worst_through_maximum(model: Rounding, **arguments: Any) -> float:
    """Return the largest error / tolerance where all values share an offset."""
    worst, sizes = 0.0, {"T": 2, "S": 13, "D": 8, "distribution": "value offset"}
    for seed in range(10):
        problem, (dout, _) = sample_problem(replace(normal("float32", **sizes), E=2, seed=seed))
        got = through_maximum(problem, dout)
        exact = npattn.backward(evaluate(problem), dout.astype(float))
        limits = tolerance(problem, "float32", model, dout=dout.astype(float), **arguments)
        for name in ("dq", "dk"):
            error = abs(got[name] - getattr(exact, name[1]))
            worst = max(worst, float((error / limits[name]).max()))
    return worst


def test_gradients_may_go_through_the_maximum_of_a_row() -> None:
    assert worst_through_maximum(Rounding.undeclared("float32")) < 1
    with patch.object(WorstCase, "keeps_maximum", False):  # without the term they are red
        assert worst_through_maximum(Rounding.undeclared("float32")) > 1


def test_delta_of_out_has_no_maximum_in_its_backward() -> None:
    fused = replace(Rounding.upcast(), delta_from="out")
    assert worst_through_maximum(fused) > 1


@pytest.mark.parametrize("likely", [False, True])
def test_every_gradient_has_the_error_through_the_maximum(likely: bool) -> None:
    """It is at the key with the largest score of each row, or at the sink if that is larger."""
    bias = replace(normal("float32", 5, 13, 7), lead=(), bias="full", sinks=True)
    problem, (dout, _) = sample_problem(bias)
    problem = problem.replace(sinks=np.array([-30, 30], "float32"))  # below, above all scores
    task = BoundTask(problem, "float32", None, dout.astype(float), None, None, None)
    worst = task.worst_case()
    of = {name: x**2 for name, x in task.deviations().items()} if likely else worst
    e_top = np.asarray(task.form.e_top)[..., 0]  # (H, T)
    with patch.object(WorstCase, "keeps_maximum", False):
        none = BoundTask(problem, "float32", None, dout.astype(float), None, None, None)
        without = none.worst_case()
        without = {n: x**2 for n, x in none.deviations().items()} if likely else without
    more = {name: of[name] - without[name] for name in ("dq", "dk", "dbias", "dsinks")}
    q, k = (abs(x.astype(float)) for x in (problem.q, problem.k))
    top = task.form.s[0].argmax(-1)  # of the head whose sink is below all scores
    t = np.arange(5)
    if likely:
        assert all((x >= 0).all() for x in more.values())
        assert (more["dq"][0] > 0).all()
        assert (more["dbias"][0, t, top] > 0).all()
        assert (more["dk"][0, np.unique(top)] > 0).all()
        assert more["dsinks"][1] > 0
        return
    assert (more["dbias"][0, t, top] >= e_top[0]).all()
    assert (more["dq"][0] >= task.form.scale * e_top[0, :, None] * k[0, top] * (1 - 1e-9)).all()
    for s in np.unique(top):
        size = (e_top[0, :, None] * q[0])[top == s].sum(0)
        assert (more["dk"][0, s] >= task.form.scale * size * (1 - 1e-9)).all()
    assert more["dsinks"][1] >= e_top[1].sum()
    assert more["dbias"][1].max() == 0  # its maximum is the sink


def test_queries_of_a_longer_problem_may_lie_in_blocks_of_their_own() -> None:
    recipe = Recipe(lead=(2,), H=2, K=2, T=5, S=7, D=11, E=13, dtype="bfloat16", seed=6)
    problem, (dout, _) = sample_problem(recipe)

    def bound(queries: int | None) -> dict[str, Any]:
        return tolerance(problem, "bfloat16", dout=dout.astype(float), queries=queries)

    alone, few, many = bound(None), bound(33), bound(10**6)
    for name in ("o", "lse", "dq"):
        np.testing.assert_array_equal(many[name], alone[name])
    for name in ("dk", "dv"):  # in one block, in two, in five
        assert (alone[name] < few[name]).all()
        assert (few[name] < many[name]).all()
        np.testing.assert_array_equal(many[name], bound(5 * 32)[name])
