"""Attention and its gradients by mpmath in plain loops, to hold results and bounds against."""

from __future__ import annotations

import mpmath  # type: ignore[import-untyped]  # it has no annotations
import numpy as np

import npattn
from npattn.certify import certify

NAMES = ("q", "k", "v", "bias", "sinks")


def mp(x):
    return np.vectorize(mpmath.mpf, otypes=[object])(np.asarray(x, float))


def exp(x):
    """Return exp(x) of x up to 0; far below every float64 it is 0, which mpmath is slow to find."""
    return mpmath.exp(x) if x > -10_000 else mpmath.mpf(0)


def tanh(x):
    """Return tanh(x) and its slope, without cancellation."""
    e = exp(-2 * abs(x))
    return mpmath.sign(x) * mpmath.tanh(min(abs(x), 5000)), 4 * e / (1 + e) ** 2


def reference(arrays, options, cotangents):
    """Return o, lse, weights and gradients as mpf, one element after the other."""
    problem = npattn.Problem(*arrays, **options)
    q, k, v = map(mp, arrays)
    do, dl, dw = map(mp, cotangents)
    exact = problem.has_default_scale and problem.D
    scale = 1 / mpmath.sqrt(problem.D) if exact else mpmath.mpf(problem.scale)
    B, H, T, D = q.shape
    K, S, E = v.shape[1:]
    visible = np.broadcast_to(True if problem.visible is None else problem.visible, (B, H, T, S))
    bias = np.broadcast_to(mp(0.0 if problem.bias is None else problem.bias), (B, H, T, S))
    keep, sinks, cap = problem.dropout_mask, problem.sinks, problem.softcap
    factor = 1 / (1 - mpmath.mpf(problem.dropout_rate))
    zeros = lambda *n: np.full(n, mpmath.mpf(0), object)  # noqa: E731
    found = {
        "out": zeros(B, H, T, E),
        "lse": zeros(B, H, T),
        "weights": zeros(B, H, T, S),
        "q": zeros(B, H, T, D),
        "k": zeros(B, K, S, D),
        "v": zeros(B, K, S, E),
        "bias": zeros(H, T, S),
        "sinks": zeros(H),
    }
    for b, h, t in np.ndindex(B, H, T):
        g = h // (H // K)
        seen = [s for s in range(S) if visible[b, h, t, s] and bias[b, h, t, s] != -mpmath.inf]
        raw = {s: scale * mpmath.fsum(q[b, h, t] * k[b, g, s]) for s in seen}
        capped = {s: cap * tanh(x / cap)[0] if cap else x for s, x in raw.items()}
        scores = {s: x + bias[b, h, t, s] for s, x in capped.items()}
        sink = -mpmath.inf if sinks is None else mpmath.mpf(sinks[h])
        top = max([*scores.values(), sink])
        if top == -mpmath.inf:
            found["lse"][b, h, t] = top
            continue
        e, own = {s: exp(x - top) for s, x in scores.items()}, exp(sink - top)
        whole = mpmath.fsum(e.values()) + own
        found["lse"][b, h, t] = mpmath.log(whole) + top
        p = {s: x / whole for s, x in e.items()}
        w = {
            s: x * (factor * bool(keep[b, h, t, s]) if keep is not None else 1)
            for s, x in p.items()
        }
        dp = {}
        for s in seen:
            found["weights"][b, h, t, s] = p[s]
            found["out"][b, h, t] += v[b, g, s] * w[s]
            found["v"][b, g, s] += do[b, h, t] * w[s]
            through = mpmath.fsum(do[b, h, t] * v[b, g, s])
            through *= factor * bool(keep[b, h, t, s]) if keep is not None else 1
            dp[s] = through + dw[b, h, t, s]
        mean = mpmath.fsum(p[s] * dp[s] for s in seen)
        found["sinks"][h] += own / whole * (dl[b, h, t] - mean)
        for s in seen:
            ds = p[s] * (dp[s] - mean + dl[b, h, t])
            found["bias"][h, t, s] += ds
            dx = ds * scale * (tanh(raw[s] / cap)[1] if cap else 1)
            found["q"][b, h, t] += k[b, g, s] * dx
            found["k"][b, g, s] += q[b, h, t] * dx
    return found


def evaluate(arrays, options, cotangents, precision):
    fwd = npattn.forward(*arrays, **options, engine="dense", precision=precision)
    grads = npattn.backward(fwd, *cotangents)
    found = {"out": fwd.out, "lse": fwd.lse, "weights": fwd.weights}
    found |= {name: getattr(grads, name) for name in NAMES if getattr(grads, name) is not None}
    return found, certify(fwd, *cotangents)


def gaps(got, want):
    """Return the distances, inf for a NaN; an infinity is at a distance of 0 from its like."""

    def gap(x, y):
        return 0.0 if x == y else float(abs(mpmath.mpf(x) - y))

    near = [gap(x, y) for x, y in zip(got.ravel().tolist(), want.ravel(), strict=True)]
    return np.nan_to_num(np.array(near), nan=np.inf, posinf=np.inf).reshape(got.shape)
