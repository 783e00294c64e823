"""precision="extended" and the certificates, against mpmath with 90 digits, in plain loops."""

from __future__ import annotations

import re

import mpmath  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import npattn
from npattn import biases
from npattn.certify import certify
from npattn.errors import OptionError
from npattn.oracle import api
from npattn.testing import Recipe
from tests.high_precision import evaluate, gaps, mp, reference

B, H, K, T, S, D, E = 2, 4, 2, 3, 5, 7, 11
OPTIONS = ("causal", "window", "mask", "bias", "scale", "softcap", "sinks", "dropout")
FORMS = ("normal", "large logits", "value offset", "one-hot", "key offset", "saturated", "low")


def sample(seed, form, chosen=()):
    """Return arguments and cotangents of a small problem."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(n) for n in ((B, H, T, D), (B, K, S, D), (B, K, S, E)))
    if form == "large logits":
        q = 300 * q
    elif form == "value offset":
        v = 1 + 1e-6 * v
    elif form == "key offset":
        k = 1e4 + k
    elif form == "one-hot":  # the heaviest weight is 1 less 1e-20
        k[..., 0, :] = 50 * np.sign(q[:, ::2, 0]) / D**0.5
    elif form == "saturated":
        q, k = 40 * q, 40 * k
    elif form == "low":
        q, k = -abs(q) * 60, abs(k)
    options = {
        "causal": {"causal": "bottom_right"},
        "window": {"window": (2, 1)},
        "mask": {"mask": rng.random((B, 1, T, S)) < 0.6},
        "bias": {"bias": 3 * rng.standard_normal((H, T, S))},
        "scale": {"scale": -0.7},
        "softcap": {"softcap": 2.5},
        "sinks": {"sinks": rng.standard_normal(H)},
        "dropout": {"dropout_mask": rng.random((B, H, T, S)) < 0.6, "dropout_rate": 0.3},
    }
    arguments = {name: value for x in chosen for name, value in options[x].items()}
    cotangents = [rng.standard_normal(n) for n in ((B, H, T, E), (B, H, T), (B, H, T, S))]
    return (q, k, v), arguments, cotangents


def check(arrays, options, cotangents):
    with mpmath.workdps(90):
        want = reference(arrays, options, cotangents)
        for precision in ("extended", None):
            found, certificate = evaluate(arrays, options, cotangents, precision)
            for name, got in found.items():
                off, bound = gaps(got, want[name]), getattr(certificate, name)
                assert got.shape == bound.shape
                assert (off <= bound).all(), (precision, name)
                if precision == "extended":
                    ulp = np.spacing(abs(np.where(np.isfinite(got), got, 0)))
                    certified = bound <= ulp
                    assert certified[(abs(got) > 2.0**-990) & (abs(got) < np.inf)].all(), name
                    assert (off[certified] <= 0.5001 * ulp[certified]).all(), name


@pytest.mark.unmeasured
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chosen", [(), OPTIONS, *((x,) for x in OPTIONS)], ids=str)
def test_results_are_the_nearest_float_and_certificates_hold(form, chosen):
    check(*sample(3, form, chosen))


@pytest.mark.thorough
@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(FORMS), st.sets(st.sampled_from(OPTIONS)))
def test_the_same_of_any_options(seed, form, chosen):
    check(*sample(seed, form, tuple(sorted(chosen))))


def test_a_certificate_is_not_far_from_the_error():
    """Else it would tell nothing: in float64 some error is above a hundredth of its bound."""
    with mpmath.workdps(90):
        arrays, options, cotangents = sample(5, "normal")
        want = reference(arrays, options, cotangents)
        found, certificate = evaluate(arrays, options, cotangents, None)
        for name, got in found.items():
            assert (gaps(got, want[name]) > getattr(certificate, name) / 100).any(), name


def test_an_element_that_cancels_beyond_100_bits_is_not_certified():
    q = np.zeros((1, 1, 1))
    v = np.array([[[1.0], [-1.0], [2.0**-110]]])
    fwd = npattn.forward(q, np.zeros((1, 3, 1)), v, precision="extended")
    assert certify(fwd).out > np.spacing(fwd.out)


@pytest.mark.parametrize("name", ["normal", "heavy tails", "saturated", "NaN keys"])
def test_the_rules_on_nan_and_inf_are_those_of_dense(name):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, 5)) for _ in range(3))
    if name == "NaN keys":
        k[0, 2], v[1, 0] = np.nan, np.inf
    plain, exact = (
        npattn.forward(q, k, v, causal=True, engine="dense", precision=precision)
        for precision in (None, "extended")
    )
    results = [(plain.out, exact.out), (plain.lse, exact.lse), (plain.weights, exact.weights)]
    grads = [npattn.backward(fwd, np.ones_like(plain.out)) for fwd in (plain, exact)]
    results += [(getattr(grads[0], n), getattr(grads[1], n)) for n in "qkv"]
    for one, other in results:
        assert np.array_equal(np.isfinite(one), np.isfinite(other))
        assert np.allclose(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("zero", ["B", "H", "T", "S", "D", "E"])
def test_sizes_of_0(zero):
    sizes = {"B": 2, "H": 2, "T": 3, "S": 5, "D": 7, "E": 11, zero: 0}
    b, h, t, s, d, e = sizes.values()
    arrays = [np.ones(n) for n in ((b, h, t, d), (b, h, s, d), (b, h, s, e))]
    plain, exact = (
        npattn.forward(*arrays, engine="dense", precision=x) for x in (None, "extended")
    )
    assert np.allclose(plain.out, exact.out)
    assert np.array_equal(np.isneginf(plain.lse), np.isneginf(exact.lse))
    grads = npattn.backward(exact, np.ones_like(exact.out), np.ones_like(exact.lse))
    assert [getattr(grads, n).shape for n in "qkv"] == [x.shape for x in arrays]
    certificate = certify(exact, np.ones_like(exact.out))
    assert certificate.out.shape == exact.out.shape


def test_rank_2_broadcasting_and_biases():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(n) for n in ((3, 5), (7, 5), (7, 11)))
    for arrays in ((q, k, v), (q[None, None], np.stack([k, k])[:, None], v[None, None])):
        plain, exact = (
            npattn.forward(*arrays, engine="dense", precision=x) for x in (None, "extended")
        )
        assert np.allclose(plain.out, exact.out, rtol=1e-13)
        certified = certify(exact, np.ones_like(exact.out))
        for name in "qkv":
            own, other = (
                getattr(npattn.backward(fwd, np.ones_like(fwd.out)), name) for fwd in (plain, exact)
            )
            assert own.shape == other.shape == getattr(certified, name).shape
            assert np.allclose(own, other, rtol=1e-11, atol=1e-14)
    slopes = np.array([0.25, 0.5])
    x = rng.standard_normal((2, 3, 5))
    bias = biases.alibi(slopes, alignment="top_left") + rng.standard_normal((2, 3, 3))
    plain, exact = (
        npattn.forward(x, x, x, bias=bias, engine="dense", precision=p) for p in (None, "extended")
    )
    for one, other in zip(
        npattn.backward(plain, np.ones_like(x)).bias,
        npattn.backward(exact, np.ones_like(x)).bias,
        strict=True,
    ):
        assert np.allclose(one, other, rtol=1e-11, atol=1e-13)
    assert certify(exact).out.shape == x.shape
    with pytest.raises(OptionError, match=r"no bounds of gradients of npattn\.biases"):
        certify(exact, np.ones_like(x))


X = np.random.default_rng(0).standard_normal((2, 3, 5))
PLAIN = {"engine": "dense"}
WRONG = (
    (lambda: npattn.attention(X, X, X, precision="high"), "precision is 'high'"),
    (lambda: npattn.attention(X, X, X, precision="extended", engine="tiled"),
     "beside engine 'tiled'"),
    (lambda: npattn.attention(X, X, X, precision="extended", dtype="float32"),
     "beside dtype float32, must be float64"),
    (lambda: npattn.attention(X, X, X, precision="extended", dtype="bfloat16"),
     "beside dtype bfloat16"),
    (lambda: npattn.attention(X, X, X, precision="extended", score_mod=lambda s, *_: s),
     "beside score_mod"),
    (lambda: npattn.jvp(npattn.forward(X, X, X, precision="extended"), dq=X),
     "jvp has no precision='extended'"),
    (lambda: certify(npattn.forward(X, X, X, engine="tiled")), "got engine 'tiled'"),
    (lambda: certify(npattn.forward(X, X, X, dtype="float32", **PLAIN)), "and dtype float32"),
    (lambda: certify(npattn.forward(X, X, X, conventions=npattn.Conventions(), **PLAIN)),
     "no bounds under conventions"),
)  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize(("call", "message"), WRONG)
def test_errors(call, message):
    with pytest.raises(OptionError, match=message):
        call()


def test_conventions_are_those_of_every_engine():
    conventions = npattn.Conventions(causal="top_left", hidden_fill=-50.0, lse_base="2")
    options = {"causal": True, "conventions": conventions}
    problem = Recipe(lead=(2,), T=5, S=7, dtype="float64").problem()
    arrays = problem.q, problem.k, problem.v
    plain = npattn.forward(*arrays, **options, engine="dense")
    exact = npattn.forward(*arrays, **options, precision="extended")
    assert np.allclose(plain.out, exact.out, rtol=1e-13)
    assert np.allclose(plain.lse, exact.lse, rtol=1e-13)


CAUSAL = {"causal": True, "engine": "dense"}  # the first two of five queries see no key
ABSORBED = "hidden_add {} and a row that sees no key"


@pytest.mark.parametrize("number", ["min", -1e300, -1e18])
def test_scores_that_float64_rounds_away_are_no_more_exact(number):
    """In float64 such a row is the mean of all values, in pairs of float64 it is not."""
    q, v = X[:, :1].repeat(5, 1), X
    for T, allowed in ((3, True), (5, False)):
        options = CAUSAL | {"conventions": npattn.Conventions(hidden_add=number)}
        plain = npattn.forward(q[:, :T], v, v, **options)
        if allowed:
            exact = npattn.forward(q[:, :T], v, v, **options, precision="extended")
            assert np.allclose(plain.out, exact.out, rtol=1e-13)
        else:
            assert np.allclose(plain.out[:, 0], v.mean(1), rtol=1e-13)
            with pytest.raises(OptionError, match=re.escape(ABSORBED.format(repr(number)))):
                npattn.forward(q, v, v, **options, precision="extended")


def test_a_number_beside_which_float64_has_no_fractions_is_refused():
    def attend(number):
        conventions, q = npattn.Conventions(hidden_add=number), X[:, :1].repeat(5, 1)
        npattn.attention(q, X, X, causal=True, conventions=conventions, precision="extended")

    attend(1 - 2.0**52)
    with pytest.raises(OptionError, match=re.escape(ABSORBED.format(-(2.0**52)))):
        attend(-(2.0**52))


def test_smaller_numbers_at_hidden_keys_leave_the_scores():
    q = X[:, :1].repeat(5, 1)
    options = CAUSAL | {"conventions": npattn.Conventions(hidden_add=-1e4)}
    plain, exact = (npattn.forward(q, X, X, **options, precision=p) for p in (None, "extended"))
    assert np.allclose(plain.out, exact.out, rtol=1e-10)
    assert not np.allclose(exact.out[:, 0], X.mean(1))


def test_a_row_of_no_keys_has_no_scores_to_keep():
    options = CAUSAL | {"conventions": npattn.Conventions(hidden_add="min")}
    assert not npattn.attention(X, X[:, :0], X[:, :0], **options, precision="extended").any()


@pytest.mark.parametrize("softcap", ["after_bias", "after_mask"])
def test_a_cap_after_the_bias_is_no_score_mod_of_the_user(softcap):
    conventions = npattn.Conventions(softcap=softcap)
    options = {"softcap": 2.0, "conventions": conventions, "precision": "extended"}
    message = re.escape(f"conventions that need a score_mod here (softcap '{softcap}', hidden")
    with pytest.raises(OptionError, match=message):
        npattn.attention(X, X, X, bias=np.ones((3, 3)), **options)
    plain = npattn.attention(X, X, X, softcap=2.0, engine="dense")
    assert np.allclose(npattn.attention(X, X, X, **options), plain, rtol=1e-13)


@pytest.mark.parametrize("softcap", ["before_bias", "after_bias", "after_mask"])
@pytest.mark.parametrize("hidden", [{}, {"hidden_fill": -50.0}, {"hidden_add": -1e4}])
@pytest.mark.parametrize("distribution", ["normal", "NaN queries"])
def test_what_has_no_obstacle_is_evaluated(softcap, hidden, distribution):
    """The judge asks for an obstacle, and then for the results."""
    conventions = npattn.Conventions(softcap=softcap, **hidden)
    for options in ({}, {"mask": "full"}, {"bias": "full"}, {"mask": "full", "bias": "full"}):
        recipe = Recipe(dtype="float64", T=3, S=5, softcap=2.0, **options)
        problem = recipe.problem()
        if distribution == "NaN queries":
            problem = problem.replace(q=np.where(np.arange(problem.D) == 1, np.nan, problem.q))
        if api.find_obstacle(problem, conventions) is None:
            out = api.evaluate(problem, conventions, "extended").out
            assert out.shape == (*problem.q.shape[:-1], problem.E)
        else:
            with pytest.raises(OptionError, match="precision is 'extended' beside"):
                api.evaluate(problem, conventions, "extended")


# --- where one term decides -----------------------------------------------------------------------


def check_one_head(q, k, v, do, softcap=None, scale=None, precisions=("extended", None)):
    """Check dk of one head: within its certificate, and extended to an ulp."""
    with mpmath.workdps(150):
        s = [[mpmath.fsum(map(mpmath.fmul, map(mpmath.mpf, a), b)) for b in k] for a in q]
        factor = 1 / mpmath.sqrt(len(q[0])) if scale is None else mpmath.mpf(scale)
        raw = [[factor * x for x in row] for row in s]
        cap = None if softcap is None else mpmath.mpf(softcap)
        score = raw if cap is None else [[cap * mpmath.tanh(x / cap) for x in row] for row in raw]
        want = np.full(k.shape, mpmath.mpf(0), object)
        for t in range(len(q)):
            e = [mpmath.exp(x) for x in score[t]]
            p = [x / mpmath.fsum(e) for x in e]
            dp = [mpmath.fsum(map(mpmath.fmul, map(mpmath.mpf, do[t]), row)) for row in v]
            mean = mpmath.fsum(map(mpmath.fmul, p, dp))
            for j in range(len(k)):
                slope = 1 if cap is None else mpmath.sech(raw[t][j] / cap) ** 2
                want[j] += factor * slope * p[j] * (dp[j] - mean) * mp(q[t])
        for precision in precisions:
            fwd = npattn.forward(
                q, k, v, softcap=softcap, scale=scale, engine="dense", precision=precision
            )
            got, bound = npattn.backward(fwd, do).k, certify(fwd, do).k
            off = gaps(got, want)
            assert (off <= bound).all(), (precision, float((off / bound).max()))
            if precision is not None:
                assert (off <= np.spacing(abs(got))).all()


def test_beside_a_weight_of_almost_1_nothing_is_lost():
    """The heaviest weight is 1 less 1e−43: without its key as the pivot, its gradient is noise."""
    rng = np.random.default_rng(0)
    k = np.array([[100.0], [0.3], [-0.2], [0.1]])
    check_one_head(np.array([[1.0]]), k, *(rng.standard_normal((n, 3)) for n in (4, 1)))


def test_the_bound_has_what_the_mean_of_a_row_brings():
    """dP of the first key cancels: its rounding reaches every key through the mean alone."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        do = rng.standard_normal((1, 11))
        v = rng.standard_normal((4, 11))
        v[0] = 1e8 * (v[0] - (v[0] @ do[0]) * do[0] / (do[0] @ do[0]))
        check_one_head(rng.standard_normal((1, 2)), rng.standard_normal((4, 2)), v, do)


def test_the_bound_has_what_the_slope_of_a_softcap_brings():
    """Scores that cancel, and a cap of their size: their errors reach dk through the slope."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        q = rng.standard_normal((1, 5))
        k = 1e6 * np.sign(rng.standard_normal((4, 5))) + rng.standard_normal((4, 5))
        k -= (k @ q[0] / (q[0] @ q[0]))[:, None] * q
        k += 0.01 * rng.standard_normal((4, 5))
        arrays = (q, k, rng.standard_normal((4, 3)), rng.standard_normal((1, 3)))
        check_one_head(*arrays, softcap=0.01, scale=1.0)
