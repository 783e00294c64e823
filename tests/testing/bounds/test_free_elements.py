"""Kernels that select and kernels that multiply differ where nothing is asked, and only there."""

import numpy as np
import pytest

from npattn.problem import Problem
from npattn.testing import compare
from npattn.testing.bounds.free_elements import free_elements

B, H, T, S, D, E = 2, 3, 5, 7, 11, 13


@np.errstate(all="ignore")
def results(problem, dout, select):
    """Textbook attention that multiplies dropped weights by 0, or replaces them by 0."""
    q, k, v = (x.astype(float) for x in (problem.q, problem.k, problem.v))
    k, v = (np.repeat(x, H // x.shape[-3], -3) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(D) + problem.bias_array
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    keep = problem.dropout_mask
    drop = (lambda x: np.where(keep, x / 0.5, 0)) if select else (lambda x: x * (keep / 0.5))
    w, dp = drop(p), drop(dout @ v.swapaxes(-1, -2))
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dk, dv = ds.swapaxes(-1, -2) @ q / np.sqrt(D), w.swapaxes(-1, -2) @ dout
    dk, dv = (x.reshape(B, -1, H // problem.K, *x.shape[-2:]).sum(-3) for x in (dk, dv))
    return {"o": w @ v, "dq": ds @ k / np.sqrt(D), "dk": dk, "dv": dv, "dbias": ds}


def poisoned(which, seed, K=H):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((B, H, T, D))
    k, v = rng.standard_normal((B, K, S, D)), rng.standard_normal((B, K, S, E))
    {"q": q, "k": k, "v": v}[which][0, 0, 2, 3] = np.nan
    bias = np.where(rng.random((B, H, T, S)) < 0.2, -np.inf, rng.standard_normal((B, H, T, S)))
    bias[..., 5] = 0  # every query has a key
    keep = rng.random((B, H, T, S)) < 0.5
    return Problem(q, k, v, bias=bias, dropout_mask=keep, dropout_rate=0.5), rng


@pytest.mark.parametrize("select", [False, True])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_both_kinds_of_kernels_agree_elsewhere(which, K, select):
    for seed in range(5):
        problem, rng = poisoned(which, seed, K)
        dout = rng.standard_normal((B, H, T, E))
        comparisons = compare(results(problem, dout, select), problem, dout=dout)
        assert all(c.passed for c in comparisons), [str(c) for c in comparisons]


def test_most_elements_are_asked():
    problem, _ = poisoned("k", 0)
    shares = {name: x.mean() for name, x in free_elements(problem).items()}
    assert max(shares.values()) < 0.3, shares


def test_nan_elsewhere_fails():
    problem, rng = poisoned("k", 0)
    dout = rng.standard_normal((B, H, T, E))
    wrong = results(problem, dout, select=True)
    wrong["dk"][1] = np.nan  # no NaN is in this sample
    assert not all(c.passed for c in compare(wrong, problem, dout=dout))


def test_nothing_is_free_without_nan_or_zero_shares():
    problem, _ = poisoned("k", 0)
    assert free_elements(problem.replace(bias=None, dropout_mask=None, dropout_rate=0.0)) == {}
    assert free_elements(problem.replace(k=np.ones((B, H, S, D)))) == {}
