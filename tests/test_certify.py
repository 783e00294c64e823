"""Certificates of nasty problems, against mpmath: no error may exceed its bound."""

from __future__ import annotations

import mpmath  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import pytest

import npattn
from npattn.certify import certify
from tests.high_precision import evaluate, gaps, reference

DIGITS = 700  # of a sum of numbers between 1e-324 and 1e308, and of their products

LARGEST = np.finfo(np.float64).max


def draw(rng, shape):
    """Return finite numbers of one of many kinds of sizes, sometimes of several at once."""
    return np.clip(_draw(rng, shape), -LARGEST, LARGEST)


def _draw(rng, shape):
    x = rng.standard_normal(shape)
    kind = rng.integers(9)
    if kind < 2:
        return x
    if kind == 2:  # one size for all
        return x * 10.0 ** rng.uniform(-320, 307)
    if kind == 3:  # another for each
        return x * 10.0 ** rng.uniform(-320, 307, shape)
    if kind == 4:  # moderate ones
        return x * 10.0 ** rng.uniform(-20, 20, shape)
    if kind == 5:  # differences that cancel
        return 10.0 ** rng.uniform(0, 12) + x
    if kind == 6:
        values = 0.0, -0.0, 5e-324, 2.0**-1022, 1e-160, 1.0, 1e154, 2.0**996, LARGEST
        return np.sign(x) * rng.choice(values, shape)
    return x * 10.0 ** rng.uniform(-3, 3)


def sample(seed):
    """Return arguments, options and cotangents of a tiny problem that is hard somewhere."""
    rng = np.random.default_rng(seed)
    K, G, T, D, E = (int(rng.integers(1, 3)) for _ in range(5))
    H, S = K * G, int(rng.integers(1, 5))
    q, k, v = (draw(rng, n) for n in ((1, H, T, D), (1, K, S, D), (1, K, S, E)))
    options = {}
    with np.errstate(all="ignore"):
        largest = float(np.nanmax(abs(q)) * np.nanmax(abs(k)))
    if rng.random() < 0.7 and 0 < largest < np.inf:  # scores that are not all alike
        with np.errstate(over="ignore"):
            wanted = min(10.0 ** rng.uniform(-2, 3) / largest, 1e300)
        if rng.random() < 0.5 and wanted > 1e-300:
            options["scale"] = wanted * rng.choice([1, -1])
        else:
            k = np.clip(k * wanted, -LARGEST, LARGEST)
    if rng.random() < 0.4:
        options["softcap"] = float(10.0 ** rng.choice([rng.uniform(-2, 2), rng.uniform(-300, 300)]))
    if rng.random() < 0.3:
        options["bias"] = draw(rng, (H, T, S))
        options["bias"][rng.random((H, T, S)) < 0.2] = rng.choice([-1e9, -np.inf, -1e300, -745.0])
    if rng.random() < 0.3:
        options["sinks"] = draw(rng, (H,))
        options["sinks"][rng.random(H) < 0.2] = -np.inf
    if rng.random() < 0.3:
        options["mask"] = rng.random((1, 1, T, S)) < 0.6
    if rng.random() < 0.2:
        options |= {"dropout_mask": rng.random((1, H, T, S)) < 0.6, "dropout_rate": 0.3}
    cotangents = [draw(rng, n) for n in ((1, H, T, E), (1, H, T), (1, H, T, S))]
    for at in (1, 2):
        cotangents[at] *= rng.random() < 0.5
    return (q, k, v), options, cotangents


def find_violations(seed):
    """Return each result with an error above its bound, and how many bounds are finite."""
    arrays, options, cotangents = sample(seed)
    known, violations = [0, 0], []
    with mpmath.workdps(DIGITS):
        want = reference(arrays, options, cotangents)
        for precision in ("extended", None):
            found, certificate = evaluate(arrays, options, cotangents, precision)
            for name, got in found.items():
                bound = getattr(certificate, name)
                known[0] += int((bound < np.inf).sum())
                known[1] += bound.size
                if not (gaps(got, want[name]) <= bound).all():
                    violations.append((seed, precision, name))
    return violations, known


@pytest.mark.thorough
@pytest.mark.parametrize(
    "seeds", [range(150), pytest.param(range(150, 20_000), marks=pytest.mark.nightly)], ids=len
)
def test_no_error_exceeds_its_certificate(seeds):
    results = [find_violations(seed) for seed in seeds]
    assert [x for violations, _ in results for x in violations] == []
    finite, every = np.sum([known for _, known in results], axis=0)
    assert finite > every / 2  # a bound of inf proves nothing


def test_a_bound_is_inf_beside_what_is_not_finite():
    """Extended precision and float64 beside sizes beyond 2⁹⁹⁰, a product that is inf, and NaN."""
    one, do = np.ones((1, 1, 1)), np.ones((1, 1, 1))
    k, v = np.array([[[0.5], [0.25]]]), np.array([[[1e300], [-1e300]]])
    for precision in ("extended", None):
        fwd = npattn.forward(one, k, v, engine="dense", precision=precision)
        grads, bounds = npattn.backward(fwd, do), certify(fwd, do)
        assert np.isfinite(grads.q).all()
        assert np.isinf(bounds.q).all()
        fwd = npattn.forward(1e10 * one, k, v, scale=0.0, engine="dense", precision=precision)
        assert np.isinf(certify(fwd, 1e10 * do).k).all()
    fwd = npattn.forward(1e200 * one, -1e200 * k, k, scale=1e-300, engine="dense")
    assert np.isinf(certify(fwd).out).all()  # q k is −inf, and its scaled score is not


def test_scores_that_float64_cannot_hold_apart_keep_their_row():
    """Low parts of such scores are large: they belong to the maximum of the row too."""
    rng = np.random.default_rng(0)
    q, k, v = 1e13 * rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 7, 5)), np.eye(7)
    fwd = npattn.forward(q, 1e13 * k, v[None].repeat(2, 0), precision="extended")
    assert np.array_equal(fwd.out.sum(-1), np.ones((2, 3)))
    assert np.isfinite(fwd.lse).all()
