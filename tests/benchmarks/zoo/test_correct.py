"""Correct implementations pass, whatever they round and in whichever order they compute."""

import functools
import inspect
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import npattn
from benchmarks.zoo.correct import CORRECT, Kernel, correct
from benchmarks.zoo.correct.arithmetic import Order, cast, dot, flush, store_as, sum_last, truncate
from benchmarks.zoo.correct.register import STORES_PRODUCTS
from npattn.conventions import Conventions
from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.testing import (
    Cotangents,
    Implementation,
    ImplementationError,
    Recipe,
    Rounding,
    check,
    compare,
)
from npattn.testing.bounds.allowed import bounds
from npattn.testing.bounds.allowed import tolerance as judged_by
from npattn.testing.bounds.ulp import excess
from npattn.testing.cases.space import Space
from npattn.testing.comparison import compare_arrays
from npattn.testing.diagnosis.evidence import observe
from npattn.testing.rules import PROPERTIES
from npattn.testing.trial import GRADIENTS as GRADIENT_NAMES
from npattn.testing.trial import Trial

OWN = [name for name, one in CORRECT.items() if one.needs is None and not one.sizes]
EVERY = [(name, dtype) for name in OWN for dtype in CORRECT[name].dtypes]
# JAX compiles every operation for every shape and dtype: one dtype is enough here.
OTHERS = [
    (name, dtype)
    for name, one in CORRECT.items()
    if one.needs
    for dtype in (one.dtypes[-1:] if one.framework == "jax" else one.dtypes)
]
GRADIENTS = ("q", "k", "v", "bias", "sinks")


def here(name):
    if not CORRECT[name].runs_here:
        pytest.skip(f"{CORRECT[name].needs} is not installed")
    return CORRECT[name]


@pytest.mark.parametrize(
    ("distribution", "bias"), [("one-hot", "-1e9 rows"), ("normal", "-1e4 rows")]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_that_begin_with_a_large_bias_are_within_the_tolerance(dtype, distribution, bias):
    """They round once a product at the size of the bias, where a bias that comes last does once."""
    sizes = {"lead": (2,), "H": 1, "K": 1, "T": 5, "S": 3, "D": 127, "E": 2, "dtype": dtype}
    one = CORRECT["bias first"]
    f = Implementation(one.forward, backward=one.backward, framework="numpy")
    for seed in range(5):
        recipe = Recipe(**sizes, seed=seed, distribution=distribution, bias=bias)
        problem = recipe.problem()
        for comparison in compare(f.forward(problem), problem, rounding=one.rounding):
            assert comparison.passed, comparison


# --- against the oracle ---------------------------------------------------------------------------


# More than 32 queries and keys, so that tiles and blocks have a remainder.
SIZES = {"lead": (2,), "H": 2, "K": 1, "T": 35, "S": 37, "D": 11, "E": 5}
OPTIONS = (
    {},
    {"mask": "empty rows", "bias": "full", "sinks": True, "distribution": "large logits"},
    {"causal": True, "window": (16, None), "softcap": 2.0, "bias": "heads", "scale": 1.7},
    {"mask": "padding", "bias": "-inf padding", "dropout": 0.3, "scale": -0.75},
    {"bias": "large negative padding", "distribution": "one-hot", "sinks": True},
    {"mask": "first tile", "distribution": "value offset", "broadcast": True, "dropout": 0.0},
    {"score_mod": "distance", "mask": "matrix", "distribution": "low", "lead": ()},
    {"mask": "matrix", "distribution": "outliers", "sinks": True, "lead": None, "H": 1},
)


@functools.cache
def exact(recipe):
    problem = recipe.problem()
    fwd = evaluate(problem)
    dout, dlse = recipe.cotangents(problem)
    dlse = np.where(np.isneginf(fwd.lse), 0, dlse).astype(dlse.dtype)
    grads = npattn.backward(fwd, dout.astype(float), dlse.astype(float))
    reference = {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}
    reference |= {f"d{n}": x for n in GRADIENTS if (x := getattr(grads, n)) is not None}
    return problem, Cotangents(dout, dlse), reference


@functools.cache
def tolerances(recipe, rounding):
    problem, (dout, dlse), _ = exact(recipe)
    return bounds(problem, recipe.dtype, rounding, dout=dout.astype(float), dlse=dlse.astype(float))


def results(one, problem, cotangents):
    f = one.implementation()
    return (f.forward(problem) + f.gradients(problem, cotangents)).pairs


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_correct_stays_within_its_models(name, dtype):
    one = CORRECT[name]
    features = one.implementation().features
    for options in OPTIONS:
        recipe = Recipe(**(SIZES | options), dtype=dtype, seed=1)
        if recipe.score_mod and "score_mod" not in features:
            continue
        problem, cotangents, reference = exact(recipe)
        got = results(one, problem, cotangents)
        assert {n for n, _ in got} >= set(reference) - {"weights"}
        for rounding in one.models:
            tolerance = tolerances(recipe, rounding)
            shared = [(n, x) for n, x in got if n in reference]
            comparisons = [compare_arrays(n, x, reference[n], tolerance[n]) for n, x in shared]
            assert all(c.passed for c in comparisons), (recipe, rounding, *map(str, comparisons))


# Former false alarms: the kernel and the problem.
FORMER_ALARMS = {
    "scores that err by hundreds": (
        "eager",
        Recipe(
            lead=(), H=12, K=3, T=5, S=19, D=2, E=2, dtype="bfloat16", seed=4173260466,
            distribution="huge logits", window=(16, 5), bias="-1e9 rows", scale=0.5, dropout=0.0,
        ),
    ),
    "scores stored beside a large bias": (
        "undeclared",
        Recipe(
            lead=(1,), H=6, K=3, T=11, S=5, D=2, E=2, dtype="bfloat16", seed=92004007,
            distribution="one-hot", window=(2, 3), bias="-1e9 rows",
        ),
    ),
    "a score_mod that turns within a rounding error": (
        "eager, scale on q",
        Recipe(
            lead=(2,), H=2, K=2, T=8, S=16, D=8, E=8, dtype="bfloat16", seed=1494698235,
            distribution="huge logits", score_mod="squash", sinks=True,
        ),
    ),
    "a cap that bends within a rounding error": (
        "eager",
        Recipe(
            lead=(1, 1), H=3, K=1, T=17, S=5, D=40, E=33, dtype="bfloat16", seed=1030813202,
            distribution="huge logits", broadcast=True, bias="one for all samples", softcap=1.0,
            sinks=True, dropout=0.5,
        ),
    ),
    "truncated sums": (
        "truncated accumulators",
        Recipe(
            lead=(3,), H=2, K=1, T=16, S=16, D=64, E=64, dtype="bfloat16", seed=92004113,
            distribution="near-uniform", bias="-1e9 rows", softcap=2.0,
        ),
    ),
    "D and the cotangent of the weights": (
        "fused",
        Recipe(
            lead=(2, 3), H=1, K=1, T=257, S=7, D=5, E=5, dtype="float32", seed=2256124620,
            distribution="mixed scales", broadcast=True, mask="matrix", dropout=0.0,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("about", FORMER_ALARMS)
def test_former_false_alarm_passes(about, weights):
    name, recipe = FORMER_ALARMS[about]
    problem = recipe.problem()
    cotangents = vars(recipe.cotangents(problem, weights=weights))
    exact_cotangents = {n: None if x is None else x.astype(float) for n, x in cotangents.items()}
    fwd = evaluate(problem)
    grads = npattn.backward(fwd, **exact_cotangents)
    reference = {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}
    reference |= {f"d{n}": x for n in GRADIENTS if (x := getattr(grads, n)) is not None}
    got = CORRECT[name].forward.__self__(problem, **cotangents)
    for model in CORRECT[name].models:
        tolerance = judged_by(problem, recipe.dtype, model, **exact_cotangents)
        comparisons = [compare_arrays(n, x, reference[n], tolerance[n]) for n, x in got.items()]
        assert all(c.passed for c in comparisons), (model, *map(str, comparisons))


def test_rounded_query_may_reach_steeper_part_of_softcap():
    q, k = np.array([[171.0, 187.0]]), np.array([[27.125, -24.75], [0.0, 0.0]])
    v = np.array([[1.0], [-1.0]])
    low = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v)]
    problem = Problem(*low, scale=0.7, softcap=1.0)
    one = CORRECT["eager, scale on q"]
    stored_q = (q * 0.7).astype(ml_dtypes.bfloat16).astype(float)
    assert (0.7 * q @ k.T)[0, 0] > 7  # where tanh is flat
    assert (stored_q @ k.T)[0, 0] < 0
    got = one.forward(*low, scale=0.7, softcap=1.0)
    gap = excess(got, evaluate(problem).out)
    assert gap > 0.1
    assert gap <= judged_by(problem, "bfloat16", one.rounding)["o"]


@pytest.mark.parametrize(("name", "dtype"), OTHERS)
def test_frameworks_pass_in_their_dtypes(name, dtype):
    one = here(name)
    report = check(one.implementation(), conventions=one.conventions, dtypes=dtype, sizes=one.sizes,
                   examples=3, only=["agreement-o", "agreement-dq"])  # fmt: skip
    assert report.tested
    assert one.alarms(report) == [], str(report)


@pytest.mark.parametrize("name", [n for n, one in CORRECT.items() if one.beyond])
def test_rounding_beyond_the_undeclared_model_fails(name):
    one = CORRECT[name]
    plain = Recipe(H=2, K=2, T=37, S=67, D=11, E=13, dtype=one.dtypes[-1], seed=1)
    steep = replace(plain, distribution="large logits", bias="full")
    swallowed = replace(plain, distribution="near-uniform", bias="-1e9 rows")
    comparisons = []
    for recipe in (plain, steep, swallowed):
        problem, cotangents, reference = exact(recipe)
        tolerance = tolerances(recipe, None)
        got = results(one, problem, cotangents)
        comparisons += [compare_arrays(n, x, reference[n], tolerance[n]) for n, x in got]
    assert any(not c.passed for c in comparisons), max(c.ratio for c in comparisons)


@pytest.mark.thorough
def test_loops_pass_in_every_dtype():
    one = CORRECT["loops"]
    report = check(one.implementation(), dtypes=one.dtypes, rounding=one.rounding, sizes=one.sizes,
                   examples=1, only=["agreement-o", "agreement-dk"])  # fmt: skip
    assert report.passed, str(report)


def pass_rules(name, dtype, only, examples):
    """Return the report of a correct implementation, after checking that it has no false alarm."""
    one = CORRECT[name]
    report = check(one.implementation(), conventions=one.conventions, dtypes=dtype,
                   rounding=one.rounding, examples=examples, only=only, shrink=False,
                   diagnosis=False)  # fmt: skip
    assert report.tested
    assert one.alarms(report) == [], str(report)
    return report


@pytest.mark.thorough
@pytest.mark.parametrize("name", [n for n in OWN if "float16" in CORRECT[n].dtypes])
def test_products_in_float16_are_stored_by_those_that_say_so(name):
    """They overflow before they are scaled, and no tolerance covers that."""
    report = pass_rules(name, "float16", ["large-products"], examples=2)
    failed = {o.rule for o in report.outcomes if o.status == "failed"}
    assert failed == set(STORES_PRODUCTS) & set(CORRECT[name].breaks)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bias as channels", "bias first"])
def test_a_folded_bias_spreads_no_nan(name):
    pass_rules(name, "float64", ["nan-query-alone"], examples=10)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_every_rule_passes(name, dtype):
    pass_rules(name, dtype, CORRECT[name].rules, examples=10)


# --- the register ---------------------------------------------------------------------------------


@pytest.mark.thorough
def test_bits_that_depend_on_the_call_are_no_false_alarm():
    """tf32 rounds what comes in, and blocks of keys differ with their number."""
    one = CORRECT["tf32"]
    report = check(one.implementation(), dtypes="float32", rounding=one.rounding, examples=3,
                   only=["same-bits"])  # fmt: skip
    assert any(o.status == "failed" for o in report.outcomes)
    assert one.alarms(report) == []


def test_register_is_well_formed():
    assert len(CORRECT) >= 25
    assert len({one.sentence for one in CORRECT.values()}) == len(CORRECT)
    judged = {name for name, rule in PROPERTIES.items() if rule.level != "reproducible"}
    for name, one in CORRECT.items():
        assert one.name == name
        assert one.sentence.endswith(".")
        assert set(one.breaks) <= set(PROPERTIES)
        assert set(one.rules) == judged - set(one.breaks)
        assert one.dtypes


@pytest.mark.thorough
def test_no_two_kernels_give_the_same_bits():
    """Otherwise one of them is superfluous."""
    recipe = Recipe(
        H=6, K=2, T=37, S=67, D=11, E=13, dtype="bfloat16", seed=5, mask="empty rows", bias="full",
        sinks=True, distribution="large logits",
    )  # fmt: skip
    seen = {}
    for name in OWN:
        if "bfloat16" not in CORRECT[name].dtypes or CORRECT[name].breaks:
            continue  # it differs by the rule that it breaks
        if "gate" in CORRECT[name].implementation().features:
            continue  # it differs where there is a gate
        problem, cotangents, _ = exact(recipe)
        got = results(CORRECT[name], problem, cotangents)
        bits = b"".join(x.astype(np.float64).tobytes() for _, x in got)
        assert bits not in seen, (name, seen[bits])
        seen[bits] = name


def test_duplicate_name_is_an_error():
    with pytest.raises(KeyError, match="two correct implementations are named rows"):
        correct("rows", "Again.", lambda q, k, v: q)


@pytest.mark.thorough
def test_known_break_is_no_alarm():
    one = CORRECT["mask as bias"]
    rules = ["hidden-nan-k", "hidden-nan-kv"]
    arguments = {"examples": 10, "only": rules, "sizes": {"T": (3,), "S": (5,)}}
    report = check(one.implementation(), **arguments)
    assert [o.rule for o in report.outcomes if o.failed] == rules
    assert one.alarms(report) == []
    assert replace(one, breaks=("hidden-nan-k",)).alarms(report)[0].rule == "hidden-nan-kv"


FAR = {"lead": (1,), "H": 2, "K": 2, "T": 8, "S": 8, "D": 16, "E": 16, "seed": 1}


@pytest.mark.parametrize(
    "where",
    [
        {"bias": "-1e9 rows", "distribution": "flat"},
        {"bias": "least rows", "distribution": "flat"},
        {"S": 0, "dtype": "float16", "distribution": "low"},
    ],
    ids=str,
)
def test_torch_errs_where_it_is_said_to(where):
    """Problems are left out of the count of false alarms only where torch is wrong."""
    one = here("torch.sdpa")
    recipe = Recipe(**{"dtype": "float32"} | FAR | where)
    assert one.errs_on(recipe)
    assert not one.errs_on(replace(recipe, bias=None, S=7))
    trial = Trial(
        one.implementation(),
        one.conventions,
        Rounding.undeclared(recipe.dtype),
        Space(one.implementation().features, dtype=recipe.dtype),
        frozenset(GRADIENT_NAMES),
    )
    problem = trial.problem(recipe)
    assert observe(trial, problem, trial.cotangents(recipe, problem)).wrong


def test_models_are_the_declared_one_and_none():
    assert CORRECT["fused"].models == (Rounding.fused(), None)
    assert CORRECT["torch eager"].models == (None,)
    assert CORRECT["tf32"].models == (CORRECT["tf32"].rounding,)


# --- the kernel -----------------------------------------------------------------------------------


def small(dtype="float32", **options):
    return Recipe(H=2, K=1, T=5, S=7, D=3, E=2, dtype=dtype, seed=3, **options)


def worst(kernel, recipe, rounding):
    problem, (dout, dlse), reference = exact(recipe)
    tolerance = tolerances(recipe, rounding)
    got = kernel(problem, dout, dlse)
    return {n: compare_arrays(n, x, reference[n], tolerance[n]).ratio for n, x in got.items()}


@pytest.mark.parametrize("storage", ["scores", "weights", "dweights", "dscores", "queries"])
def test_undeclared_storage_exceeds_the_tolerance(storage):
    rounding = Rounding(name="one", **{storage: "input"})
    kernel = Kernel(rounding=rounding, scaled="queries")
    recipe = replace(small("bfloat16"), T=37, S=67, D=11)
    assert max(worst(kernel, recipe, rounding).values()) <= 1
    assert max(worst(kernel, recipe, Rounding.upcast()).values()) > 1


@pytest.mark.parametrize(
    ("fields", "models"),
    [
        ({"gradient_block": 8}, Rounding.upcast()),
        ({"shared": "input"}, Rounding.upcast()),
        ({"gradient_roundings": 2}, Rounding.upcast()),
        ({"exp_error": 2.0**-7}, Rounding.upcast()),
        ({"lse": "input"}, Rounding.upcast()),
        ({"row_sum": "input"}, Rounding.upcast()),
        ({"out_roundings": 2}, Rounding.upcast()),
    ],
    ids=lambda fields: next(iter(fields)) if isinstance(fields, dict) else "",
)
def test_every_field_of_a_model_changes_the_kernel(fields, models):
    rounding = Rounding(name="one", **fields)
    kernel = Kernel(rounding=rounding, scaled="queries", tile=16)
    recipe = replace(small("bfloat16"), T=37, S=67, D=11)
    assert max(worst(kernel, recipe, rounding).values()) <= 1
    assert max(worst(kernel, recipe, models).values()) > 1


def test_delta_from_out_with_low_weights_is_allowed():
    rounding = Rounding(name="one", weights="bfloat16", delta_from="out", fuses=True)
    ratios = worst(Kernel(rounding=rounding, tile=16), replace(small(), T=37, S=67), rounding)
    assert max(ratios.values()) <= 1, ratios


LONG = Recipe(lead=(2,), H=2, K=1, T=37, S=257, D=13, E=5, seed=1)
# One field of a model alone, in rows so long that only the statistical bound allows it: dtype,
# model, other choices of the kernel, options of the problem.
ALONE = {
    "S": ("float32", {"scores": "bfloat16"}, {}, {}),
    "S and a bias": ("float32", {"scores": "bfloat16"}, {}, {"bias": "full"}),
    "S and a cap": ("float32", {"scores": "bfloat16"}, {}, {"softcap": 2.0, "scale": 1.7}),
    "P": ("float32", {"weights": "bfloat16"}, {}, {}),
    "P, and D from out": ("float32", {"weights": "bfloat16", "fuses": True, "delta_from": "out"},
                          {"tile": 16}, {"bias": "one a row"}),
    "dS": ("float32", {"dscores": "bfloat16"}, {}, {"bias": "full"}),
    "lse": ("float32", {"lse": "bfloat16"}, {"tile": 16}, {"bias": "full"}),
    "lse and a sink": ("float32", {"lse": "bfloat16", "delta_from": "out"}, {"tile": 16},
                       {"sinks": True, "T": 257, "S": 67}),
    "q": ("float32", {"queries": "bfloat16"}, {"scaled": "queries"}, {}),
    "blocks of gradients": ("bfloat16", {"gradient_block": 2}, {}, {"T": 129}),
    "out": ("bfloat16", {"out_roundings": 2}, {"tile": 16}, {}),
}  # fmt: skip


@pytest.mark.parametrize("about", ALONE)
def test_single_rounding_is_allowed_in_long_rows(about):
    dtype, fields, choices, options = ALONE[about]
    rounding, recipe = Rounding(name="one", **fields), replace(LONG, dtype=dtype, **options)
    problem, (dout, dlse), reference = exact(recipe)
    got = Kernel(rounding=rounding, **choices)(problem, dout, dlse)
    cotangents = {"dout": dout.astype(float), "dlse": dlse.astype(float)}
    tolerance = judged_by(problem, dtype, rounding, **cotangents)
    comparisons = [compare_arrays(n, x, reference[n], tolerance[n]) for n, x in got.items()]
    assert all(c.passed for c in comparisons), [*map(str, comparisons)]
    assert (tolerance["dq"] < bounds(problem, dtype, rounding, **cotangents)["dq"]).any()


def test_dk_uses_the_rounded_query():
    rounding = Rounding(name="one", queries="bfloat16")
    problem, (dout, _), _ = exact(replace(LONG, scale=0.05))
    got = Kernel(rounding=rounding, scaled="queries")(problem, dout)["dk"]
    reference = npattn.backward(evaluate(problem), dout.astype(float)).k
    tolerance = judged_by(problem, "float32", rounding, dout=dout.astype(float))
    assert (excess(got, reference) <= tolerance["dk"]).all()


def test_separately_rounded_parts_of_dscores_may_cancel():
    rounding, rng = (
        Rounding(name="one", dscores="bfloat16", dweights="float32"),
        np.random.default_rng(0),
    )
    x = rng.standard_normal((101, 1, 1, 1)).astype(np.float32)
    two = np.zeros((101, 1, 2, 1), np.float32)
    v = two + np.float32([[1], [-1]])  # D is 0, and dP is ±x
    problem = Problem(two[..., :1, :], two, v, bias=two.swapaxes(-1, -2))
    dlse = (-x[..., 0] * (1 + rng.standard_normal((101, 1, 1)) / 100)).astype(np.float32)
    got = Kernel(rounding=rounding, apart=True)(problem, x, dlse)["dbias"]
    cotangents = {"dout": x.astype(float), "dlse": dlse.astype(float)}
    reference = npattn.backward(evaluate(problem), **cotangents).bias
    for limit in (bounds, judged_by):
        assert (
            excess(got, reference) <= limit(problem, "float32", rounding, **cotangents)["dbias"]
        ).all()


def test_unrepresentable_bias_gets_extra_tolerance():
    # −10⁴ + s is stored as −9984 for every s: bfloat16 has no −10⁴.
    rounding = Rounding(name="one", scores="bfloat16")
    recipe = replace(small(), T=37, S=67, bias="-1e4 rows")
    problem, (dout, dlse), reference = exact(recipe)
    got = Kernel(rounding=rounding)(problem, dout, dlse)
    cotangents = {"dout": dout.astype(float), "dlse": dlse.astype(float)}
    for limit in (bounds, judged_by):
        tolerance = limit(problem, "float32", rounding, **cotangents)
        comparisons = [compare_arrays(n, x, reference[n], tolerance[n]) for n, x in got.items()]
        assert all(c.passed for c in comparisons), [*map(str, comparisons)]


def test_kernel_without_rank_one_term_is_wrong():
    ratios = worst(Kernel(forgets_delta=True), small(), Rounding.upcast())
    assert ratios["dq"] > 1
    assert ratios["o"] <= 1


@pytest.mark.parametrize(
    "choices",
    [
        {"tile": 3},
        {"tile": 2, "splits": 3, "sink": "last"},
        {"sink": "key"},
        {"sink": "key", "tile": 3},
        {"log_softmax": True},
        {"binary": True},
        {"binary": True, "tile": 3},
        {"channels": True, "scaled": "queries"},
        {"apart": True},
        {"order": "kahan"},
        *({"scaled": scaled} for scaled in ("scores", "queries", "keys", "both")),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [None, -0.75, 0.0])
def test_choices_do_not_change_the_mathematics(choices, scale):
    recipe = small(
        "float64", mask="empty rows", bias="-inf padding", sinks=True, dropout=0.3, scale=scale
    )
    problem, (dout, dlse), reference = exact(recipe)
    dweights = np.random.default_rng(0).standard_normal((2, 2, 5, 7))
    got = Kernel(**choices)(problem, dout, dlse, dweights)
    grads = npattn.backward(evaluate(problem), dout, dlse, dweights)
    reference = reference | {f"d{n}": getattr(grads, n) for n in GRADIENTS}
    assert set(got) == set(reference)
    for name, array in got.items():
        np.testing.assert_allclose(array, reference[name], atol=1e-13, err_msg=name)


@pytest.mark.parametrize(
    "conventions",
    [
        Conventions(hidden_fill=-1e4, lse_base="2"),
        Conventions(hidden_fill=0.0),
        Conventions(empty_row="mean", lse_empty=3.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("tile", [None, 3])
def test_kernel_keeps_its_conventions(conventions, tile):
    problem, (dout, dlse), _ = exact(small("float64", mask="empty rows", bias="full"))
    fwd = evaluate(problem, conventions)
    dlse = np.where(np.isneginf(evaluate(problem).lse), 0, dlse)
    grads = npattn.backward(fwd, dout, dlse)
    reference = {"o": fwd.out, "lse": fwd.lse}
    reference |= {f"d{n}": x for n in GRADIENTS if (x := getattr(grads, n)) is not None}
    got = Kernel(conventions=conventions, tile=tile)(problem, dout, dlse)
    for name, exact_array in reference.items():
        np.testing.assert_allclose(got[name], exact_array, atol=1e-12, err_msg=name)


def test_kernel_has_every_option():
    own = set(inspect.signature(Kernel().forward).parameters)
    theirs = set(inspect.signature(npattn.attention).parameters)
    assert own - theirs == {"return_lse", "return_weights"}
    assert theirs - own == {"dtype", "engine", "precision", "conventions", "gate"}


def test_dtypes_of_results():
    for dtype, wide in [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]:
        problem, cotangents, _ = exact(small(dtype, bias="full", sinks=True))
        for name, array in Kernel()(problem, cotangents.dout, cotangents.dlse).items():
            least = {"lse": wide, "weights": wide, "dsinks": wide}.get(name, dtype)
            assert array.dtype == least, name


# --- arithmetic -----------------------------------------------------------------------------------


def identity(x):
    return x


@pytest.mark.parametrize("order", ["blas", "first", "last", "pairwise", "kahan"])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 13])
def test_every_order_gives_the_product(order: Order, n):
    rng = np.random.default_rng(n)
    a, b = rng.integers(-8, 8, (2, 3, 5, n)), rng.integers(-8, 8, (3, n, 2))
    product = dot(a.astype(float), b.astype(float), order, None, identity)
    np.testing.assert_array_equal(product, a @ b)
    np.testing.assert_array_equal(
        sum_last(a.astype(float), order, None, identity), a.sum(-1, keepdims=True)
    )


def test_orders_round_differently():
    u = 2.0**-24
    x = np.array([[1, u, u]], np.float32)
    orders: tuple[Order, ...] = ("first", "last", "kahan")
    sums = {order: sum_last(x, order, None, identity).item() for order in orders}
    assert sums == {"first": 1, "last": 1 + 2 * u, "kahan": 1 + 2 * u}
    x = np.array([[1, u, u, u]], np.float32)
    assert sum_last(x, "first", None, identity).item() == 1
    assert sum_last(x, "first", 2, identity).item() == 1 + 2 * u  # (1 + u) + (u + u)
    assert sum_last(x, "pairwise", None, identity).item() == 1 + 2 * u


def test_kahan_stops_compensating_after_overflow():
    x = np.array([[3e38, 3e38, 1.0]], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        assert sum_last(x, "kahan", None, identity).item() == np.inf


def test_subnormal_results_are_flushed():
    tiny = np.finfo(np.float32).tiny
    x = np.array([tiny, tiny / 2, -tiny / 2, 0, np.inf], np.float32)
    np.testing.assert_array_equal(flush(x), np.array([tiny, 0, 0, 0, np.inf], np.float32))


def test_truncation_goes_towards_zero():
    x = np.array([1 + 2.0**-24, -1 - 1.5 * 2.0**-23, 1.5, np.inf])
    np.testing.assert_array_equal(truncate(x), [1, -1 - 2.0**-23, 1.5, np.inf])


def test_tf32_has_ten_bits_and_ties_to_even():
    x = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-10, 3e38, np.nan], np.float32)
    reference = np.array([1, 1 + 2.0**-9, 1 + 2.0**-10, store_as(x, "tf32")[3], np.nan], np.float32)
    np.testing.assert_array_equal(store_as(x, "tf32"), reference)
    assert abs(reference[3] - x[3]) <= 2.0**-11 * x[3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16"])
def test_float64_is_rounded_once(dtype):
    """Just beside the middle of two neighbours, where float32 would first round to the middle."""
    low = np.linspace(1, 1.75, 4).astype(dtype)
    above = np.nextafter(low, np.array(8, dtype)).astype(float)
    middle = (low.astype(float) + above) / 2
    np.testing.assert_array_equal(cast(np.nextafter(middle, 0), low.dtype), low)
    np.testing.assert_array_equal(cast(np.nextafter(middle, 8), low.dtype).astype(float), above)


def test_kernel_refuses_wrong_shapes():
    f = CORRECT["rows"].implementation()
    wrong = Problem(*(np.ones((1, 2, 3), np.float32) for _ in range(3)))
    inputs = f.inputs(wrong)
    inputs["k"] = inputs["k"][..., :2]
    with pytest.raises(ImplementationError, match="raised ShapeError: k has"):
        f.forward(wrong, inputs=inputs)
