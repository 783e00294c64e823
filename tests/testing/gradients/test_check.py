"""check_gradients: wrong gradients are named, right ones pass, the rest is reported."""

import re
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from benchmarks.power.gradient_cases import CASES
from npattn.errors import DtypeError, NpattnError, OptionError, ShapeError
from npattn.testing import check_gradients

RNG = np.random.default_rng(5)
X, G, W = RNG.standard_normal((3, 5, 7)), RNG.standard_normal(7), RNG.standard_normal((7, 11))


def layer(x, g, w):
    m, s = x.mean(-1, keepdims=True), np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return (x - m) / s * g @ w


def layer_vjp(dy, x, g, w):
    m, s = x.mean(-1, keepdims=True), np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    h, dh = (x - m) / s, dy @ w.T * g
    dx = (dh - dh.mean(-1, keepdims=True) - h * (dh * h).mean(-1, keepdims=True)) / s
    return dx, (dy @ w.T * h).sum((0, 1)), np.tensordot(h * g, dy, ((0, 1), (0, 1)))


def layer_jvp(dargs, x, g, w):
    dx, dg, dw = dargs
    m, s = x.mean(-1, keepdims=True), np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    h = (x - m) / s
    dh = (dx - dx.mean(-1, keepdims=True) - h * (dx * h).mean(-1, keepdims=True)) / s
    return (dh * g + h * dg) @ w + h * g @ dw


def changed(**change):
    """Return layer_vjp with some of its gradients changed."""

    def vjp(dy, x, g, w):
        grads = dict(zip("xgw", layer_vjp(dy, x, g, w), strict=True))
        return tuple(change.get(name, lambda a: a)(grad) for name, grad in grads.items())

    return vjp


def explanations(report):
    return [one.explanation for one in report.failures]


# --- the verdict ----------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.every
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_is_judged_right(case):
    report = check_gradients(case.f, case.args, vjp=case.vjp, framework="numpy")
    assert report.passed == case.right, str(report)


def test_page_counts_the_cases():
    page = (Path(__file__).parents[3] / "docs" / "gradients.md").read_text()
    right = sum(case.right for case in CASES)
    assert len(CASES) - right >= 30
    assert right >= 20
    assert f"{len(CASES) - right} wrong gradients and {right} right ones" in page
    assert f"{len(CASES) - right} of {len(CASES) - right} | {right} of {right} |" in page


def test_right_gradients_pass_with_a_sharp_resolution():
    report = check_gradients(layer, (X, G, W), vjp=layer_vjp, jvp=layer_jvp)
    assert report.passed
    assert [one.name for one in report.judgements] == [*("dx", "dg", "dw") * 2, "⟨w, J u⟩"]
    assert all(one.power.factor < 1e-7 and one.power.best < 1e-8 for one in report.judgements)
    assert report.notes == ()


@pytest.mark.parametrize(
    ("vjp", "explanation"),
    [
        (changed(x=lambda a: a * 3.00001 / 3), "dx is 1.000003 times what it should be"),
        (changed(g=lambda a: a / 7**0.5), "dg is 1/√7 of what it should be"),
        (changed(w=lambda a: 0 * a), "dw is 0 everywhere"),
        (changed(x=lambda a: a + X.mean(-1, keepdims=True)), "dx lacks a term"),
        (
            changed(w=lambda a: a * (np.arange(11) != 3)),
            "at index 3 of axis 1 alone and is 0 there",
        ),
        (changed(g=lambda a: a * np.where(np.arange(7) == 2, -1, 1)), "wrong sign at 1 of 7"),
        (changed(g=lambda a: np.tile(a, (3, 5, 1))), "is not summed over axes 0, 1"),
        (changed(w=lambda a: a.T), "its axes are in another order"),
        (changed(x=lambda a: np.where(X.max() == X, np.nan, a)), "dx is nan at 1 of 105 elements"),
    ],
)
def test_mistake_is_named(vjp, explanation):
    report = check_gradients(layer, (X, G, W), vjp=vjp)
    [text] = explanations(report)
    assert explanation in text
    assert not report.passed
    assert "wrong" in str(report)


def test_exchanged_gradients_are_named():
    y = RNG.standard_normal(X.shape)
    report = check_gradients(
        lambda x, y: x * y**2, (X, y), vjp=lambda d, x, y: (2 * d * x * y, d * y**2)
    )
    assert explanations(report) == ["dx is the gradient of y", "dy is the gradient of x"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_seed_changes_no_verdict(seed):
    assert check_gradients(layer, (X, G, W), vjp=layer_vjp, seed=seed).passed
    assert not check_gradients(
        layer, (X, G, W), vjp=changed(x=lambda a: 1.00001 * a), seed=seed
    ).passed


def test_message_has_slopes_and_the_order_of_the_remainder():
    report = check_gradients(np.sin, (X,), vjp=lambda d, x: 1.001 * d * np.cos(x))
    [failure] = report.failures
    assert re.match(r"slope \S+ ± \S+, claimed \S+; order .* 1.00 ", failure.message)


@pytest.mark.parametrize(
    ("jvp", "passes"),
    [
        (lambda dx, x: dx * np.cos(x), True),
        (lambda dx, x: dx * np.sin(x), False),
        (lambda dx, x: dx * np.cos(x) + 1e-6, False),
        (lambda dx, x: dx * np.where(x > 1, np.nan, np.cos(x)), False),
    ],
)
def test_jvp_of_one_argument(jvp, passes):
    assert check_gradients(np.sin, (X,), jvp=jvp).passed is passes


def test_jvp_and_vjp_that_disagree():
    """A factor of 1 + 1e-11 is below every difference, and above the roundings of both."""
    report = check_gradients(
        np.sin, (X,), vjp=lambda d, x: d * np.cos(x), jvp=lambda d, x: (1 + 1e-11) * d * np.cos(x)
    )
    [failure] = report.failures
    assert failure.claimed_by == "vjp and jvp"


# --- arguments and results ------------------------------------------------------------------------


Pair = namedtuple("Pair", "a b")


def tree_vjp(factor):
    def vjp(dout, p, n):
        a, b = p["pair"]
        da = dout["y"] @ b[0].T
        return {"pair": (da, [a.T @ dout["y"] + factor * dout["z"][0]]), "rest": None}, None

    return vjp


def tree_function(p, n):
    a, b = p["pair"]
    return {"y": a @ b[0], "z": (b[0].sum(), n)}


@pytest.mark.parametrize("factor", [1, 0])
def test_trees_of_arguments_and_results(factor):
    tree = {"pair": Pair(X[0], [W]), "rest": np.arange(3)}
    report = check_gradients(tree_function, (tree, 13), vjp=tree_vjp(factor))
    assert report.passed is (factor == 1)
    assert [one.name for one in report.judgements] == ["dp['pair'].a", "dp['pair'].b[0]"]
    assert "without a derivative: p['rest'], n" in report.notes


@pytest.mark.parametrize("factor", [1, 0])
def test_a_gradient_may_be_missing_where_it_is_0(factor):
    def f(x, g):
        return x * (1 + factor * g)

    report = check_gradients(f, (X, G), vjp=lambda d, x, g: (d * (1 + factor * g), None))
    assert report.passed is (factor == 0)
    said = " ".join(str(report).split())
    assert ("no dg was returned, but " in said and "depends on g;" in said) is (factor == 1)


@pytest.mark.parametrize("conjugate", [True, False])
def test_complex_numbers(conjugate):
    z = RNG.standard_normal(7) + 1j * RNG.standard_normal(7)

    def vjp(d, z):
        return d * (2 * z).conj() if conjugate else d * 2 * z

    assert check_gradients(np.square, (z,), vjp=vjp).passed is conjugate


def test_longdouble_is_judged_like_float64():
    x = X.astype(np.longdouble)
    report = check_gradients(np.sin, (x,), vjp=lambda d, x: d * np.cos(x))
    assert report.passed
    assert 1e-15 < report.judgements[0].power.factor < 1e-6


def test_tangent_of_a_constant_is_none():
    def jvp(dargs, x, n):
        dx, dn = dargs
        return n * dx if dn is None else np.nan * dx

    assert check_gradients(lambda x, n: n * x, (X, 3), jvp=jvp).passed


def test_scalar_and_empty_arguments():
    vjp = lambda d, a, e: (d * 2 * a, 0 * e)  # noqa: E731
    report = check_gradients(lambda a, e: a**2 + e.sum(), (3.0, np.zeros((0, 5))), vjp=vjp)
    assert report.passed
    assert [one.name for one in report.judgements] == ["da"]


def test_arguments_are_not_changed():
    def f(x):
        x *= 2
        return np.sin(x)

    before = X.copy()
    assert check_gradients(f, (X,), vjp=lambda d, x: 2 * d * np.cos(2 * x)).passed
    assert np.array_equal(X, before)


# --- what is no mistake ---------------------------------------------------------------------------


def test_kink_is_reported_and_no_mistake():
    x = np.where(abs(X) < 0.5, 0, X)
    report = check_gradients(np.abs, (x,), vjp=lambda d, x: d * np.sign(x))
    assert report.passed
    assert "absolute has a kink at these arguments, in x" in report.notes[0]


@pytest.mark.parametrize(("slope", "status"), [(-1, "passed"), (5, "wrong"), (np.nan, "wrong")])
def test_slope_at_a_kink(slope, status):
    """Any between the one-sided ones passes."""
    x = np.zeros(3)
    report = check_gradients(np.abs, (x,), vjp=lambda d, x: slope * d)
    assert [one.status for one in report.judgements] == [status]


@pytest.mark.parametrize("factor", [1, 1.01])
def test_mistake_beside_a_kink_of_a_large_array(factor):
    """Each random direction has the kink at 1; the mistake is in an element not asked alone."""
    x = np.random.default_rng(0).uniform(-0.9, 0.9, 41)
    x[3] = 1
    change = np.where(np.arange(41) == 17, factor, 1)
    report = check_gradients(
        lambda x: np.clip(x, -1, 1) ** 2, (x,), vjp=lambda d, x: 2 * d * x * change
    )
    assert report.passed is (factor == 1)


def test_middle_of_three_tied_numbers():
    """Its place in the sorted row is in neither of the one-sided slopes."""
    order = np.array([1, 0, 2])
    report = check_gradients(
        lambda x: np.sort(x) * [1, 100, 1],
        (np.zeros(3) + 7,),
        vjp=lambda d, x: (d * [1, 100, 1])[order],
    )
    assert report.passed


def test_infinite_gradient_at_an_infinite_slope():
    with np.errstate(divide="ignore"):
        report = check_gradients(
            np.cbrt, (np.array([0.0, 1, 8]),), vjp=lambda d, x: d / np.cbrt(x) ** 2 / 3
        )
    assert report.passed


def test_random_results_are_reported():
    clock = np.random.default_rng(0)
    report = check_gradients(
        lambda x: np.sin(x) * (clock.random(x.shape) < 0.5), (X,), vjp=lambda d, x: d * np.cos(x)
    )
    assert report.failures == ()
    assert not report.passed
    assert "is not deterministic" in report.notes[0]
    assert report.reason == "undecided: dx"
    assert "accept=('dx',)" in str(report)


def test_global_generators_are_kept():
    state = np.random.get_state()[1].copy()  # noqa: NPY002

    def drop(x):
        return x**2 * (np.random.random(x.shape) < 0.5)  # noqa: NPY002

    def vjp(d, x):
        return 2 * d * x * (np.random.random(x.shape) < 0.5)  # noqa: NPY002

    report = check_gradients(drop, (X,), vjp=vjp)
    assert report.passed
    assert report.notes == ()
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_nothing_but_noise_is_not_judged():
    def steps(x):
        return np.floor(1e3 * x)

    report = check_gradients(steps, (X,), vjp=lambda d, x: 1e3 * d)
    assert not report.passed


def test_resolution_is_that_of_a_direction_with_a_slope():
    mask = np.arange(7) > 2
    report = check_gradients(
        lambda x: np.sin(x) * mask, (X[0],), vjp=lambda d, x: d * np.cos(x) * mask
    )
    assert 1e-15 < report.judgements[0].power.factor < 1e-6
    constant = check_gradients(lambda x: 0 * x + 1, (X[0],), vjp=lambda d, x: 0 * d)
    assert constant.passed
    assert str(constant).endswith("passed")


@pytest.mark.parametrize("factor", [1, 1.001])
def test_large_fills_beside_results(factor):
    """The roundings of −1e30 would hide every slope."""
    mask = np.tri(5, 7, dtype=bool)
    report = check_gradients(
        lambda x: np.where(mask, np.sin(x), -1e30),
        (X[0],),
        vjp=lambda d, x: factor * d * np.cos(x) * mask,
    )
    assert report.passed is (factor == 1)
    assert bool(report.failures) is (factor != 1)


def test_cancellation_in_a_float32_gradient():
    """1 − tanh² x is a multiple of 6e-8, and changes by none of them if x changes by a rounding."""
    x = np.linspace(3, 6, 7, dtype=np.float32)
    assert check_gradients(np.tanh, (x,), vjp=lambda d, x: d * (1 - np.tanh(x) ** 2)).passed


def test_gradient_of_results_that_vanished():
    """1 − tanh x is 0 beyond 19, and its gradient 1 / cosh² x is not."""
    x = np.array([-30.0, 0.3, 1, 25])
    report = check_gradients(
        lambda x: 1 - np.tanh(x),
        (x,),
        vjp=lambda d, x: -4 * d * np.exp(-2 * abs(x)) / (1 + np.exp(-2 * abs(x))) ** 2,
    )
    assert report.passed


def test_domain_that_ends_beside_the_arguments():
    x = np.array([1e-8, 1, 2 - 1e-9])

    def f(x):
        assert (x > 0).all()
        assert (x < 2).all()
        return np.log(x) + np.log(2 - x)

    assert check_gradients(f, (x,), vjp=lambda d, x: d / x - d / (2 - x)).passed
    assert not check_gradients(f, (x,), vjp=lambda d, x: d / x).passed


def test_exception_beside_the_arguments_is_reported():
    def f(x):
        if not np.array_equal(x, X):
            raise ValueError("another X")
        return np.sin(x)

    report = check_gradients(f, (X,), vjp=lambda d, x: d * np.cos(f(x) * 0 + x))
    assert [one.status for one in report.judgements] == ["undecided"]
    assert "near it: ValueError: another X" in str(report)


# --- wrong usage ----------------------------------------------------------------------------------


@pytest.mark.every
@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((np.sin, X), {"vjp": layer_vjp}, OptionError, r"args is a ndarray; pass a tuple: \(x,\)"),
        ((np.sin, (X,)), {}, OptionError, "pass vjp= or jvp="),
        ((np.sin, (X,)), {"framework": "tf"}, OptionError, "framework is 'tf', must be auto"),
        ((np.sin, (X,)), {"vjp": layer_vjp, "seed": -1}, NpattnError, "seed"),
        (
            (np.sin, (X,)),
            {"vjp": layer_vjp, "second_order": True},
            OptionError,
            "second_order needs",
        ),
        ((np.square, (np.arange(3),)), {"vjp": layer_vjp}, DtypeError, "no floating array"),
        ((np.isfinite, (X,)), {"vjp": layer_vjp}, DtypeError, "returned ndarray, which holds no"),
        ((layer, (X, G, W)), {"vjp": lambda d, *args: d}, OptionError, "vjp returned 1 gradients"),
        (
            (layer, (X, G, W)),
            {"vjp": lambda d, *args: (d, d)},
            OptionError,
            "layer has 3 arguments",
        ),
        ((np.sin, (X,)), {"jvp": lambda d, x: d[0]}, ShapeError, r"jvp returned shape \(5, 7\)"),
        ((dict, ({"a": X},)), {"vjp": layer_vjp}, OptionError, "dict is a class; pass an instance"),
        (
            (lambda t: t["a"] * 2, ({"a": X},)),
            {"vjp": lambda d, t: {"b": d}},
            OptionError,
            "vjp returned a dict with 1 entries for args",
        ),
    ],
)
def test_wrong_usage_names_the_way_out(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        check_gradients(*args, **kwargs)


def test_exception_at_the_arguments_is_the_user_s():
    with pytest.raises(ZeroDivisionError):
        check_gradients(lambda x: 1 / 0, (X,), vjp=lambda d, x: d)


def test_a_jvp_that_is_nan_is_wrong():
    x, y = RNG.standard_normal((2, 3))

    def jvp(dargs, x, y):
        return np.where(dargs[1] != 0, np.nan, np.cos(x) * dargs[0])

    report = check_gradients(lambda x, y: np.sin(x) + y * y, (x, y), jvp=jvp)
    assert not report.passed
    assert report.failures


def test_a_complex_gradient_of_a_real_array_is_wrong():
    x = RNG.standard_normal(5)
    right = check_gradients(np.sin, (x,), vjp=lambda d, x: (d * np.cos(x) + 0j,))
    wrong = check_gradients(np.sin, (x,), vjp=lambda d, x: (d * np.cos(x) + 1j,))
    assert right.passed
    assert not wrong.passed


@pytest.mark.parametrize("factor", [2, 3])
def test_complex_arrays(factor):
    z = RNG.standard_normal((2, 3)) + 1j * RNG.standard_normal((2, 3))
    report = check_gradients(lambda z: z * z, (z,), vjp=lambda d, z: (factor * d * z.conj(),))
    assert report.passed == (factor == 2)


# --- what cannot be known -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(26), 143, 332, 569, 627])
def test_random_composition_is_no_alarm(seed):
    """Saturated units, vanishing weights, cancelling numbers: `benchmarks.power.gradient_fuzz`."""
    pytest.importorskip("torch")
    from benchmarks.power.gradient_fuzz import judge

    name, report = judge(seed)
    assert not report.failures, (name, str(report))


@pytest.mark.parametrize(
    ("f", "x"), [(np.log, np.full(3, -1.0)), (np.exp, np.full(3, 1000.0))], ids=["nan", "inf"]
)
def test_results_that_are_not_finite_leave_no_verdict(f, x):
    with np.errstate(all="ignore"):
        report = check_gradients(f, (x,), vjp=lambda d, x: 7 * d)
    assert (report.verdict, report.reason) == ("no verdict", "not judged: dx")


@pytest.mark.parametrize(("factor", "passed"), [(1, True), (1.001, False)])
def test_nan_among_the_arguments_is_left_out(factor, passed):
    report = check_gradients(
        np.sin, (np.array([1.0, np.nan]),), vjp=lambda d, x: factor * d * np.cos(x)
    )
    assert report.passed is passed
    assert not any("has a slope" in one.explanation for one in report.judgements)


def test_undecided_gradient_is_accepted_by_name():
    clock = np.random.default_rng(0)

    def f(x, y):
        return np.sin(x) * (clock.random(x.shape) < 0.5), y

    def judge(*accept):
        return check_gradients(
            f, (X, X), vjp=lambda d, x, y: (d[0] * np.cos(x), d[1]), accept=accept
        )

    assert judge().reason == "undecided: dx"
    assert judge("dx").passed


def test_subnormal_arguments_and_results():
    x = np.array([5e-324, 1e-310])
    assert check_gradients(lambda x: 3 * x, (x,), vjp=lambda d, x: 3 * d).passed
    assert not check_gradients(lambda x: 3 * x, (x,), vjp=lambda d, x: 2 * d).passed


def test_self_test_finds_a_judge_that_finds_nothing(monkeypatch):
    from npattn.testing.gradients import judge

    own = judge.persists
    monkeypatch.setattr(judge, "persists", lambda size, error: own(size, error) & False)
    report = check_gradients(np.sin, (X[0],), vjp=lambda d, x: d * np.cos(x))
    assert report.reason == "undecided: dx"
    assert "a defect of npattn" in str(report)


# --- kinks, ties and what a backward changes ------------------------------------------------------


def test_claim_beyond_the_slopes_beside_a_kink_is_wrong():
    report = check_gradients(
        lambda x: np.maximum(x, 0),
        (np.array([0.0, 0.0, 2.0]),),
        vjp=lambda d, x: np.where(x == 0, 7, 1) * d,
    )
    assert "is 7 at [0], where" in report.failures[0].explanation
    assert report.failures[0].explanation.endswith("slopes are 0 and 1")


def test_sum_at_ties_is_named():
    x = np.array([[1.0, 1.0, 0.0], [2.0, 0.0, 2.0]])
    report = check_gradients(
        lambda x: x.max(-1), (x,), vjp=lambda d, x: d[:, None] * (x == x.max(-1, keepdims=True))
    )
    assert "at ties: the sum at equal numbers, [0, 0], [0, 1], is 2 times its slope" in str(report)


def test_vjp_that_changes_its_cotangent_is_wrong():
    report = check_gradients(np.sin, (X,), vjp=lambda d, x: np.multiply(d, np.cos(x), out=d))
    assert explanations(report) == ["the vjp changes cotangent result, which it is given"]


def test_gradient_of_integers_is_remarked():
    index = np.array([1, 2, 0])
    report = check_gradients(
        lambda x, i: x[i], (X[0, 0], index), vjp=lambda d, x, i: (np.bincount(i, d, 7), np.zeros(3))
    )
    assert report.passed
    assert "the vjp returns a gradient for i, which has none" in report.notes


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_factor_is_told_to_the_precision_of_the_data(dtype):
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(dtype)
    report = check_gradients(lambda x: x * x, (x,), vjp=lambda d, x: 4 * x * d)
    assert explanations(report) == ["dx is 2 times what it should be"]
