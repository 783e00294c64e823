"""Every field of Conventions, alone and with others, held against loops.

`Conventions` translates a problem into a canonical one and its results back; `loops` computes what
the field says. The tolerance is the derived one of test_dense, of a problem that rounds alike.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import npattn.oracle.api
from npattn import Conventions, Problem
from npattn.conventions import fields as fields_module
from npattn.conventions import tangents
from npattn.engines import loops
from npattn.errors import OptionError
from npattn.problem.arrays import sum_to
from npattn.profiles import PROFILES

# pytest puts the folder of a test on the path.
from tests.engines.test_dense import (
    INPUTS,
    MORE_KEYS,
    MORE_QUERIES,
    NAMES,
    ONE_HEAD,
    Case,
    Cotangents,
    Rounding,
    Sizes,
    U,
    assert_within,
    cotangents,
    gamma,
    make,
    rounding,
    slope_along,
)

Array = np.ndarray[Any, Any]

FIELDS: dict[str, tuple[Any, ...]] = {
    "causal": ("top_left", "unless_masked"),
    "empty_row": ("nan", "mean"),
    "empty_row_bias": ("nan", "mean"),
    "hidden_fill": (-1e9, 1.5, "min"),
    "hidden_add": (-2.5, -1e4, "min"),
    "mask_true": ("hide",),
    "window": ("inclusive",),
    "softcap": ("after_bias", "after_mask"),
    "bias": ("before_scale",),
    "kv_head": ("tile",),
    "lse_base": ("2",),
    "lse_empty": (math.inf, 0.0, math.nan),
    "weights": ("after_dropout",),
    "dropout_at_rate_0": ("ignore",),
}
SINGLES = [{name: value} for name, values in FIELDS.items() for value in values]
# A constant that is not finite has no complex step, and neither has a row of NaN; the loss of an
# lse near the smallest float64 overflows.
SMOOTH = [f for f in SINGLES if "lse_empty" not in f and not {"nan", "min"} & set(f.values())]
ONCE = ("empty_row_bias", "hidden_add", "dropout_at_rate_0")
SOME = [
    {name: value} for name, values in FIELDS.items() for value in values[: 1 if name in ONCE else 2]
]
HIDDEN = {"hidden_fill", "hidden_add"}  # only one of them
PAIRS = [
    a | b
    for a, b in itertools.combinations(SOME, 2)
    if a.keys() != b.keys() and not (a | b).keys() >= HIDDEN
]
HIDING: dict[str, Any] = {"causal": True, "window": (2, 1)}
AFTER_BIAS = {"softcap": "after_bias"}
SHARED = MORE_QUERIES._replace(H=6, K=2)
# Seeds with a scale above 0, a rate above 0, a bias that has a −inf, and arrays of many elements.
PROBLEMS = {
    "more queries": (7, MORE_QUERIES, ("softcap", "bias")),
    "bias and dropout": (25, MORE_QUERIES, ("mask", "bias", "dropout")),
    "everything": (29, MORE_KEYS, NAMES),
    "one head": (3, ONE_HEAD, ("mask", "score_mod", "softcap", "bias")),
    "shared heads": (12, SHARED, ("mask", "bias", "softcap", "dropout")),
}


def case_id(fields: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in fields.items())


def assert_agrees(case: Case, meaning: Conventions, **hiding: Any) -> None:
    """Forward and backward under conventions give what loops gives under them."""
    fwd = case.forward(conventions=meaning, **hiding)
    problem, d = fwd.problem, cotangents(fwd, 5)
    out, lse, weights = loops.forward(problem, meaning)
    allowed = rounding_under(problem, meaning, d, case.steepness)
    base = math.log(2) if meaning.lse_base == "2" else 1.0
    lse_error = allowed.lse / base + 2 * U * abs(np.nan_to_num(lse, posinf=0, neginf=0))
    # Each of the two keeps within the bound, hence the factor.
    assert_within("out", fwd.out, out, 2 * allowed.out)
    assert_within("lse", fwd.lse, lse, 2 * lse_error)
    assert_within("weights", fwd.weights, weights, 2 * allowed.weights)
    assert (np.isinf(fwd.lse) == np.isinf(lse)).all()  # inf and nan are two conventions

    got, want = npattn.backward(fwd, *d), loops.backward(problem, *d, conventions=meaning)
    for name in INPUTS:
        bound = getattr(allowed, name)
        bound = None if bound is None else 2 * bound
        assert_within(f"d{name}", getattr(got, name), getattr(want, name), bound)


def rounding_under(
    problem: Problem, meaning: Conventions, d: Cotangents, steepness: float
) -> Rounding:
    """The bounds of test_dense, of a problem in the default meaning that rounds no less.

    They have ten roundings to spare, which pay for a factor more and for the sum over a group.
    """
    plain = dataclasses.replace(
        meaning, lse_base="e", lse_empty=-math.inf, weights="before_dropout"
    )
    _, lse, weights = loops.forward(problem, plain)
    base = math.log(2) if meaning.lse_base == "2" else 1.0
    most = 1 / (1 - problem.dropout_rate) if meaning.weights == "after_dropout" else 1.0
    d = Cotangents(
        d.dout,
        None if d.dlse is None else d.dlse / base,
        None if d.dweights is None else d.dweights * most,
    )
    sized, dbias = problem, 1.0  # dbias: what the bound of that gradient is multiplied by
    if problem.dropout_mask is not None and meaning.empty_row == "mean":
        sized = sized.replace(dropout_mask=np.ones((1, 1), bool))  # a mean row drops nothing
    if meaning.dropout_at_rate_0 == "ignore" and problem.dropout_rate == 0:
        sized = sized.replace(dropout_mask=None)
    if meaning.bias == "before_scale" and problem.bias is not None:
        dbias = abs(problem.scale or 0)
        sized = sized.replace(bias=dbias * finite(problem.bias))
    if meaning.softcap != "before_bias" and problem.softcap is not None:
        bend = 4 / 27**0.5 / problem.softcap  # the largest |cap''|; |cap'| ≤ 1
        steepness = steepness * (1 + bend)  # its square is above the second derivative of both
        dbias *= 5 + steepness  # of 1 − tanh²: its own rounding, and bend · that of the score
        sized = remove_cap(sized)
    tiles = problem.H // problem.K if meaning.kv_head == "tile" and problem.K else 1
    if tiles > 1:
        sized = sized.replace(
            k=np.concatenate([problem.k] * tiles, -3), v=np.concatenate([problem.v] * tiles, -3)
        )
    if meaning.hidden_add is not None and not absorbs_scores(meaning):
        bias = np.zeros((1, 1)) if sized.bias is None else finite(sized.bias)
        sized = sized.replace(bias=bias + abs(meaning.hidden_add))
    hidden = fill_mask(problem, meaning)
    allowed = rounding(sized, lse, weights, *d, steepness=steepness, constant=hidden)
    return allowed._replace(
        weights=allowed.weights * most,
        k=in_groups(allowed.k, problem.K, tiles),
        v=in_groups(allowed.v, problem.K, tiles),
        bias=None if problem.bias is None or allowed.bias is None else allowed.bias * dbias,
    )


def remove_cap(problem: Problem) -> Problem:
    """Without softcap, and with a bias as large as all numbers that meet before the cap.

    A score_mod of test_dense adds at most 0.25 |t − s| or 0.5 b; twice the cap is for tanh.
    """
    added = 2 * (problem.softcap or 0)
    if problem.score_mod is not None:
        added += 0.25 * max(problem.T, problem.S) + 0.5 * math.prod(problem.lead)
    bias = np.zeros((1, 1)) if problem.bias is None else finite(problem.bias)
    return problem.replace(softcap=None, bias=bias + added, score_mod=lambda s, *_: s)


def finite(x: Array) -> Array:
    return np.where(np.isfinite(x), abs(x), 0)


def in_groups(bound: Array, K: int, tiles: int) -> Array:
    """The sum over the query heads h, h + K, ... that share a key/value head."""
    if tiles == 1:
        return bound
    total: Array = bound.reshape(*bound.shape[:-3], tiles, K, *bound.shape[-2:]).sum(-4)
    return total


def absorbs_scores(meaning: Conventions) -> bool:
    """True if a score of usual size plus the number is the number, in float64."""
    more = meaning.hidden_add
    return more == "min" or (isinstance(more, float) and abs(more) > 1e30)


def fill_mask(problem: Problem, meaning: Conventions) -> Array | bool:
    """True where the score is a number that hidden keys get, or one that absorbs their score."""
    capped = meaning.softcap == "after_mask" and problem.softcap is not None
    filled = meaning.hidden_fill is not None or absorbs_scores(meaning)
    filled = filled or (capped and meaning.hidden_add is None)
    renaming = Conventions(mask_true=meaning.mask_true, window=meaning.window)
    visible = renaming.canonical(problem).visible
    return False if visible is None or not filled else ~visible


# --- every field ----------------------------------------------------------------------------------


def test_these_are_all_fields() -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(Conventions)}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("fields", SINGLES, ids=case_id)
@pytest.mark.broad
def test_every_field_gives_what_loops_gives(fields: dict[str, Any], problem: str) -> None:
    assert_agrees(make(*PROBLEMS[problem]), Conventions(**fields), **HIDING)


@pytest.mark.parametrize("fields", PAIRS, ids=case_id)
@pytest.mark.broad
def test_every_pair_of_fields_gives_what_loops_gives(fields: dict[str, Any]) -> None:
    problem = ("bias and dropout", "everything")[PAIRS.index(fields) % 2]
    assert_agrees(make(*PROBLEMS[problem]), Conventions(**fields), **HIDING)


@st.composite
def any_case(draw: st.DrawFn) -> tuple[Case, Conventions, dict[str, Any]]:
    """A problem, any combination of fields, and options that hide keys."""
    default = dataclasses.asdict(Conventions())
    fields = {n: draw(st.sampled_from([default[n], *values])) for n, values in FIELDS.items()}
    if fields["hidden_fill"] is not None:
        fields["hidden_add"] = None
    T, S = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    lead = draw(st.sampled_from([((), (), ()), ((1,), (2,), ()), ((2,), (1,), (2,))]))
    names = tuple(name for name in NAMES if draw(st.booleans()))
    hiding = {name: value for name, value in HIDING.items() if draw(st.booleans())}
    case = make(draw(st.integers(0, 999)), Sizes(lead, 4, 2, T, S, 3, 2), names)
    if "window" in names:  # left counts the query in some, and so must be 1 or more
        hiding["window"] = HIDING["window"]
    return case, Conventions(**fields), hiding


@pytest.mark.thorough
@settings(deadline=None, max_examples=100)
@given(any_case())
def test_any_combination_of_fields_agrees_with_loops(drawn: Any) -> None:
    case, meaning, hiding = drawn
    assert_agrees(case, meaning, **hiding)


@pytest.mark.parametrize("fields", SINGLES, ids=case_id)
def test_every_field_changes_something(fields: dict[str, Any]) -> None:
    case = make(*PROBLEMS["shared heads"])
    case.options["bias"] = np.array(case.options["bias"])
    case.options["bias"][..., -1, :] = -np.inf
    options = HIDING | ({"dropout_rate": 0.0} if "dropout_at_rate_0" in fields else {})
    plain = case.forward(conventions=Conventions(), **options)
    other = case.forward(conventions=Conventions(**fields), **options)
    results = [(getattr(plain, n), getattr(other, n)) for n in ("out", "lse", "weights")]
    assert not all(np.array_equal(a, b, equal_nan=True) for a, b in results)


@pytest.mark.parametrize("fields", SMOOTH, ids=case_id)
@pytest.mark.parametrize("problem", ["bias and dropout", "everything", "shared heads"])
@pytest.mark.broad
def test_gradients_are_the_slopes_of_forward_under_every_field(
    problem: str, fields: dict[str, Any]
) -> None:
    case = make(*PROBLEMS[problem])
    case.options.update(HIDING, conventions=Conventions(**fields))
    fwd = case.forward()
    d = cotangents(fwd, 43)
    grads = npattn.backward(fwd, *d)
    allowed = rounding_under(fwd.problem, Conventions(**fields), d, case.steepness)
    rng = np.random.default_rng(47)
    for name in INPUTS:
        gradient, bound = getattr(grads, name), getattr(allowed, name)
        if gradient is None:
            continue
        direction = rng.standard_normal(gradient.shape)
        gap = abs(slope_along(case, d, name, direction) - (gradient * direction).sum())
        # Forward mode adds the same products in another order, hence 2; the inner product rounds.
        limit = 2 * (bound * abs(direction)).sum()
        limit += gamma(gradient.size) * abs(gradient * direction).sum()
        assert gap <= limit, f"d{name}: {gap:.2g} > {limit:.2g}"


def assert_jvp_is_the_adjoint(case: Case, meaning: Conventions, seed: int = 47) -> None:
    """⟨cotangents, jvp(direction)⟩ = ⟨backward(cotangents), direction⟩ within the bound of both."""
    case.options.update(conventions=meaning)
    scale = case.options.get("scale")
    if meaning.bias == "before_scale" and scale is not None and scale <= 0:
        bias = case.options.get("bias")  # −inf times such a scale makes rows NaN, or all weight
        case.options["bias"] = None if bias is None else np.where(np.isinf(bias), -1.0, bias)
    fwd = case.forward()
    d = cotangents(fwd, 43, which="l")
    assert d.dlse is not None
    undefined = np.isnan(fwd.out).any(-1)  # its gradients are, and so is its change
    grads = npattn.backward(fwd, *d)
    allowed = rounding_under(fwd.problem, meaning, d, case.steepness)
    rng = np.random.default_rng(seed)
    present = [name for name in INPUTS if getattr(grads, name) is not None]
    along = {f"d{n}": rng.standard_normal(getattr(grads, n).shape) for n in present}
    do, dlse = npattn.jvp(fwd, **along)
    assert (np.isnan(do).any(-1) == undefined).all()
    forward_mode = (d.dout * np.where(undefined[..., None], 0, do)).sum() + (d.dlse * dlse).sum()
    products = {n: np.nan_to_num(getattr(grads, n)) * along[f"d{n}"] for n in present}
    limit = sum(2 * (getattr(allowed, n) * abs(along[f"d{n}"])).sum() for n in present)
    limit += sum(gamma(x.size) * abs(x).sum() for x in products.values())
    gap = abs(forward_mode - sum(x.sum() for x in products.values()))
    assert gap <= limit, f"{gap:.2g} > {limit:.2g}"


@pytest.mark.parametrize("fields", [{}, *SINGLES], ids=case_id)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.broad
def test_jvp_is_the_adjoint_of_backward_under_every_field(
    problem: str, fields: dict[str, Any]
) -> None:
    case = make(*PROBLEMS[problem])
    case.options.update(HIDING)
    assert_jvp_is_the_adjoint(case, Conventions(**fields))


@pytest.mark.parametrize("fields", PAIRS, ids=case_id)
@pytest.mark.broad
def test_jvp_is_the_adjoint_of_backward_under_every_pair(fields: dict[str, Any]) -> None:
    case = make(*PROBLEMS[("bias and dropout", "everything")[PAIRS.index(fields) % 2]])
    case.options.update(HIDING)
    assert_jvp_is_the_adjoint(case, Conventions(**fields))


@pytest.mark.thorough
@settings(deadline=None, max_examples=100)
@given(any_case())
def test_jvp_is_the_adjoint_of_backward_under_any_combination(drawn: Any) -> None:
    case, meaning, hiding = drawn
    case.options.update(hiding)
    assert_jvp_is_the_adjoint(case, meaning)


# A line of npattn.conventions.tangents changed, and the fields that show it.
IN_TANGENTS = {
    "heads repeated": ("conventions.share_heads(along[name], problem)",
                       "xp.repeat(along[name], problem.H // problem.K, -3)", {"kv_head": "tile"}),
    "twins of values that stay": ("xp.concatenate([v, v], axis=-2)",
                                  "xp.concatenate([v, 0 * v], axis=-2)", {"hidden_fill": 1.5}),
    "twins of keys that move": ("xp.concatenate([k, xp.zeros_like(k)], axis=-2)",
                                "xp.concatenate([k, k], axis=-2)", {"hidden_fill": 1.5}),
    "fills that move": ("xp.concatenate([dbias, xp.zeros_like(dbias)]",
                        "xp.concatenate([dbias, dbias]", {"hidden_fill": 1.5}),
    "dbias not scaled": ("dbias = dbias * scale_of(problem)", "pass", {"bias": "before_scale"}),
    "dbias past the cap": ("dbias = through_cap(", "dbias = (lambda p, x: x)(", AFTER_BIAS),
    "cap of what was not added to": ("conventions.before_cap(problem)",
                                     "conventions.translate_options(problem)",
                                     {"softcap": "after_mask", "hidden_add": -2.5}),
    "base e": ("dlse = dlse / math.log(2)", "pass", {"lse_base": "2"}),
    "mean that stays": ("mean is not None and dv is not None", "False", {"empty_row": "mean"}),
    "NaN that stays": ("if undefined is not None:", "if False:", {"empty_row": "nan"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", IN_TANGENTS)
def test_a_mistake_in_the_translation_of_directions_is_seen(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, fields = IN_TANGENTS[mistake]
    source = inspect.getsource(tangents)
    assert source.count(old) == 1
    wrong = ModuleType("wrong")
    exec(compile(source.replace(old, new), mistake, "exec"), wrong.__dict__)
    case = make(*PROBLEMS["shared heads"])
    case.options.update(HIDING)
    assert_jvp_is_the_adjoint(case, Conventions(**fields))
    for name in ("canonical_direction", "translate_changes"):
        monkeypatch.setattr(npattn.oracle.api, name, getattr(wrong, name))
    with pytest.raises(AssertionError):
        assert_jvp_is_the_adjoint(case, Conventions(**fields))


def assert_hvp_is_the_slope_of_backward(case: Case, meaning: Conventions) -> None:
    """Change of ⟨backward, e⟩ along d against central differences over h and h / 2.

    Their distance exceeds the error of the one over h / 2, which is O(h²); the rest is rounding.
    """
    case.options.update(conventions=meaning)
    fwd = case.forward()
    d, rng = cotangents(fwd, 43), np.random.default_rng(53)
    present = [n for n in INPUTS if getattr(npattn.backward(fwd, *d), n) is not None]
    along, e = (
        {n: rng.standard_normal(getattr(fwd.problem, n).shape) for n in present} for _ in "de"
    )
    allowed = rounding_under(fwd.problem, meaning, d, case.steepness)
    rounded = sum((getattr(allowed, n) * abs(e[n])).sum() for n in present)

    def gradient(step: float) -> float:
        moved = {n: getattr(fwd.problem, n) + step * along[n] for n in present}
        there = npattn.oracle.api.evaluate(fwd.problem.replace(**moved), meaning)
        grads = npattn.backward(there, *d)
        return sum(float((np.nan_to_num(getattr(grads, n)) * e[n]).sum()) for n in present)

    h = U ** (1 / 4)
    wide, narrow = ((gradient(s) - gradient(-s)) / (2 * s) for s in (h, h / 2))
    change = npattn.hvp(fwd, *d, **{f"d{n}": x for n, x in along.items()})
    got = sum((np.nan_to_num(getattr(change, n)) * e[n]).sum() for n in present)
    assert abs(got - narrow) <= abs(wide - narrow) + 4 * rounded / h


# A score that the smallest number absorbs has gradients, as systems have them, and yet no slope.
MOVING = [{}, *(f for f in SINGLES if f != {"hidden_add": "min"})]


@pytest.mark.parametrize("fields", MOVING, ids=case_id)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.broad
def test_hvp_is_the_slope_of_backward_under_every_field(
    problem: str, fields: dict[str, Any]
) -> None:
    case = make(*PROBLEMS[problem])
    case.options.update(HIDING)
    assert_hvp_is_the_slope_of_backward(case, Conventions(**fields))


def no_factor(self: Conventions, problem: Problem, dbias: Array, bias_gradient: Any) -> Array:
    assert problem.bias is not None
    return sum_to(dbias[..., : problem.S], problem.bias.shape)


def as_given(self: Conventions, problem: Problem, weights: Array) -> Array:
    return weights


def as_filled(self: Conventions, problem: Problem) -> float | None:
    return self.hidden_fill


def as_repeated(self: Conventions, x: Array, problem: Problem) -> Array:
    return np.repeat(x, problem.H // problem.K, -3)


FILLED_AND_CAPPED = {"softcap": "after_mask", "hidden_fill": 1.5}
MISTAKES: dict[str, tuple[Any, str, Callable[..., Any], dict[str, Any]]] = {
    "bias not scaled": (fields_module, "_times", lambda x, number: x, {"bias": "before_scale"}),
    "dbias not scaled": (Conventions, "_dbias", no_factor, {"bias": "before_scale"}),
    "dbias past the cap": (fields_module, "through_cap", lambda p, ds: ds, AFTER_BIAS),
    "capped before the bias": (Conventions, "caps_late", lambda self, p: False, AFTER_BIAS),
    "hidden keys leave": (Conventions, "fill", lambda self, p: None, {"softcap": "after_mask"}),
    "a fill that is not capped": (Conventions, "fill", as_filled, FILLED_AND_CAPPED),
    "heads repeated": (Conventions, "share_heads", as_repeated, {"kv_head": "tile"}),
    "weights as they are": (Conventions, "_apply_dropout", as_given, {"weights": "after_dropout"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_translation_is_seen(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, wrong, fields = MISTAKES[mistake]
    case = make(*PROBLEMS["shared heads"])
    assert_agrees(case, Conventions(**fields), **HIDING)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError, match="beyond by"):
        assert_agrees(case, Conventions(**fields), **HIDING)


def test_a_gradient_of_weights_that_forgets_dropout_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgets(self: Conventions, problem: Problem, *given: Any) -> Any:
        return given

    case, meaning = make(*PROBLEMS["shared heads"]), Conventions(weights="after_dropout")
    monkeypatch.setattr(Conventions, "cotangents", forgets)
    with pytest.raises(AssertionError, match=r"^dq is"):
        assert_agrees(case, meaning)


# --- what each field means ------------------------------------------------------------------------


def scores(meaning: Conventions, *, S: int = 2, **options: Any) -> Array:
    """The final scores of one query q = 1 with keys 1, 2, ..., scale 1, read from the weights."""
    one, keys = np.ones((1, 1)), np.arange(1.0, S + 1)[:, None]
    options = {"scale": 1.0, **options}
    fwd = npattn.forward(one, keys, np.ones((S, 1)), conventions=meaning, **options)
    with np.errstate(divide="ignore"):  # hidden
        return np.asarray(np.log(fwd.weights[0]) + fwd.lse[0])


BIAS = np.array([[0.5, -np.inf]])
CAP_3: dict[str, Any] = {"softcap": 3.0}


def assert_near(got: Any, want: Any) -> None:
    """Scores of order 1 from a log, an exp and a tanh or two: fewer than 40 roundings."""
    np.testing.assert_allclose(got, want, rtol=40 * U, atol=40 * U)


def test_after_bias_caps_neither_hidden_keys_nor_fills() -> None:
    mask = np.array([[True, False]])
    got = scores(Conventions(softcap="after_bias"), mask=mask, **CAP_3)
    assert_near(got, [3 * math.tanh(1 / 3), -np.inf])
    got = scores(Conventions(softcap="after_bias", hidden_fill=-5.0), mask=mask, **CAP_3)
    assert_near(got, [3 * math.tanh(1 / 3), -5])


def test_sinks_are_never_capped() -> None:
    one = np.ones((1, 1, 1))
    meaning = Conventions(softcap="after_mask")
    fwd = npattn.forward(
        one, one, one, np.zeros((1, 1), bool), softcap=2.0, sinks=np.array([7.0]),
        conventions=meaning,
    )  # fmt: skip
    assert_near(fwd.lse, [[np.logaddexp(2 * math.tanh(-math.inf), 7)]])


def test_narrow_bias_is_scaled_in_compute_dtype() -> None:
    bias = np.array([[1.0, 3.0]]).astype(ml_dtypes.bfloat16)
    got = scores(Conventions(bias="before_scale"), bias=bias, scale=0.1)
    assert_near(got, [0.2, 0.5])  # 0.1 is 0.10009765625 in bfloat16


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_minus_infinity_times_nonpositive_scale_follows_arithmetic(scale: float) -> None:
    meaning = Conventions(bias="before_scale")
    assert np.isnan(scores(meaning, bias=BIAS, scale=scale)).all()
    case = make(*PROBLEMS["shared heads"])
    assert np.isinf(case.options["bias"]).any()
    assert_agrees(case, meaning, scale=scale)
    hidden = scores(meaning, bias=BIAS, scale=scale, mask=np.array([[True, False]]))
    assert_near(hidden, [1.5 * scale, -np.inf])


def test_tiling_keeps_the_order_of_query_heads() -> None:
    seen = []

    def spy(s: Array, b: Array, h: Array, t: Array, s_index: Array) -> Array:
        seen.append(h.ravel().tolist())
        return s + h

    q, k = np.zeros((6, 1, 1)), np.zeros((2, 1, 1))
    bias, sinks = 10.0 * np.arange(6)[:, None, None], np.full(6, -np.inf)
    sinks[5] = 100
    fwd = npattn.forward(
        q, k, k, bias=bias, sinks=sinks, score_mod=spy, conventions=Conventions(kv_head="tile")
    )
    assert seen[-1] == [0, 1, 2, 3, 4, 5]  # earlier calls check that it is elementwise
    assert fwd.lse[:, 0].tolist() == [0, 11, 22, 33, 44, 100]


def test_a_mean_row_has_even_weights_after_dropout_too() -> None:
    fwd = make(3, MORE_QUERIES, ()).forward(
        conventions=Conventions(empty_row="mean", weights="after_dropout"),
        causal="bottom_right", dropout_mask=np.zeros((1, 1), bool), dropout_rate=0.5,
    )  # fmt: skip
    assert (fwd.weights[..., :2, :] == 0.2).all()  # T − S = 2 rows see nothing
    assert not fwd.weights[..., 2:, :].any()


def test_late_cap_indexes_broadcast_biases() -> None:
    for shape in ((7, 5), (1, 5), (3, 1, 1), (2, 1, 7, 1), (1, 1, 1, 5)):
        case = make(3, MORE_QUERIES, ("softcap",))
        case.options["bias"] = np.random.default_rng(5).standard_normal(shape)
        assert_agrees(case, Conventions(softcap="after_bias", hidden_fill=-2.0), **HIDING)


def test_conventions_align_causal_masks_and_windows() -> None:
    others: dict[str, Any] = {"softcap": "after_bias", "bias": "before_scale", "kv_head": "tile"}
    case = make(*PROBLEMS["shared heads"])
    for causal in ("top_left", "bottom_right"):
        meaning = Conventions(causal=causal, **others)  # type: ignore[arg-type]
        said, asked = (
            case.forward(causal=c, window=(2, 1), conventions=meaning) for c in (causal, True)
        )
        assert (said.out == asked.out).all()
        canonical = meaning.canonical(said.problem)
        assert (canonical.causal, canonical.alignment) == (causal, causal)
        assert np.array_equal(canonical.visible, said.problem.visible)  # type: ignore[arg-type]


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", SINGLES, ids=case_id)
@pytest.mark.parametrize("size", ["T", "D", "E"])
@pytest.mark.broad
def test_a_size_of_0_gives_what_loops_gives(size: str, fields: dict[str, Any]) -> None:
    changes: dict[str, Any] = {size: 0}
    case = make(3, MORE_QUERIES._replace(**changes), ("bias",))
    assert_agrees(case, Conventions(**fields), **HIDING)


@pytest.mark.parametrize("fields", [f for f in SINGLES if f.get("empty_row") != "nan"], ids=case_id)
def test_no_keys_at_all_give_what_loops_gives(fields: dict[str, Any]) -> None:
    assert_agrees(make(3, MORE_QUERIES._replace(S=0), ("bias",)), Conventions(**fields), **HIDING)


@pytest.mark.parametrize("fields", [{"hidden_fill": -1e9}, {"softcap": "after_mask"}], ids=case_id)
@pytest.mark.parametrize("where", ["q", "v"])
def test_nan_behind_a_fill_leaves_empty_rows_alone(where: str, fields: dict[str, Any]) -> None:
    case = make(3, MORE_QUERIES, ("softcap",))
    {"q": case.q[:, :, 0], "v": case.v[:, 0]}[where][...] = np.nan
    assert_agrees(case, Conventions(**fields), causal=True)
    fwd = case.forward(conventions=Conventions(**fields), causal=True)
    grads = npattn.backward(fwd, np.ones_like(fwd.out))
    assert np.isnan(fwd.out[..., :2, :]).all() == (where == "v")  # T − S = 2
    assert (grads.q[..., :2, :] == 0).all()


def test_a_late_cap_has_a_gradient_for_complex_scores() -> None:
    case, meaning = make(*PROBLEMS["shared heads"]), Conventions(softcap="after_bias")
    fwd = case.forward(conventions=meaning)
    d = cotangents(fwd)
    allowed = rounding_under(fwd.problem, meaning, d, case.steepness)
    grads = npattn.backward(fwd, *d)
    same = npattn.backward(case.forward(q=case.q + 0j, conventions=meaning), *d)
    for name in ("q", "k", "v", "bias"):
        bound = 2 * getattr(allowed, name)
        assert_within(name, getattr(same, name).real, getattr(grads, name), bound)
        assert not getattr(same, name).imag.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_gradients_are_rounded_once(dtype: str) -> None:
    """dv of a key that some queries see and others find filled is the sum of two."""

    def low(x: Array) -> Array:
        return x.astype(dtype).astype(np.float32)

    rng = np.random.default_rng(0)
    q, k, v, dout = (low(rng.standard_normal((3, 2, n, 5))) for n in (7, 11, 11, 7))
    meaning = Conventions(hidden_fill=1.5)
    mask = rng.random((7, 11)) < 0.5
    fwd = npattn.forward(q, k, v, mask, conventions=meaning, dtype=dtype)
    grads = npattn.backward(fwd, dout)
    w = low(fwd.weights).swapaxes(-1, -2)
    dv = np.where(mask.T, w, 0) @ dout + np.where(mask.T, 0, w) @ dout
    np.testing.assert_array_equal(grads.v, dv.astype(dtype))


# --- what is illegal ------------------------------------------------------------------------------


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", "bottom-right"),
        ("causal", True),
        ("empty_row", "zeros"),
        ("empty_row", 0),
        ("mask_true", True),
        ("window", "left"),
        ("lse_base", 2),
        ("lse_base", "10"),
        ("hidden_fill", -math.inf),
        ("hidden_fill", math.nan),
        ("hidden_fill", "-1e9"),
        ("lse_empty", "zero"),
        ("lse_empty", None),
        ("softcap", "after_scale"),
        ("softcap", None),
        ("bias", "before"),
        ("kv_head", 0),
        ("weights", False),
    ],
)
def test_an_illegal_value_is_named_with_its_field(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{name} is"):
        Conventions(**{name: value})


def test_fields_are_keywords_and_unknown_ones_are_refused() -> None:
    with pytest.raises(TypeError):
        Conventions("top_left")  # type: ignore[call-arg]  # the mistake
    with pytest.raises(TypeError):
        Conventions(polarity="hide")  # type: ignore[call-arg]  # the mistake


def test_an_inclusive_window_without_the_query_is_refused() -> None:
    case = make(3, MORE_KEYS, ())
    with pytest.raises(OptionError, match=r"window is \(0, 1\), must have left ≥ 1"):
        case.forward(conventions=Conventions(window="inclusive"), window=(0, 1))


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_gives_what_loops_gives(name: str) -> None:
    assert_agrees(make(3, MORE_QUERIES, ("mask",)), PROFILES[name].conventions, **HIDING)
