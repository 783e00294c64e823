"""attention, forward and backward of linear attention: features, a form, and the normalisation.

    n_t = scale · φ(q_t) S_t        d_t = scale · φ(q_t) · z_t        o_t = n_t / (d_t + eps)
    S_t = a_t S_{t−1} + φ(k_t)ᵀ v_t        z_t = a_t z_{t−1} + φ(k_t)        a = exp(log_decay)

z is the column of S for a value of 1. Without normalisation o = n. Where d + eps is 0 no key
counts: o is 0 and passes no gradient. Source: Katharopoulos et al. 2020, arXiv 2006.16236; decay:
Sun et al. 2023, arXiv 2307.08621, and Yang et al. 2023, arXiv 2312.06635; delta rule: Yang et al.
2024, arXiv 2406.06484 and 2412.06464. Gradients: docs/derivations/linear.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from npattn.errors import DtypeError, OptionError
from npattn.oracle.signatures import only_out
from npattn.oracle.twins import ARRAYS, on_arrays
from npattn.problem.arrays import Array, sum_to
from npattn.problem.checks import check_cotangent, check_result
from npattn.problem.foreign import reject_unknown_options
from npattn.variants.linear import chunked, recurrent
from npattn.variants.linear.features import FeatureMap
from npattn.variants.linear.problem import ARRAYS as NAMES
from npattn.variants.linear.problem import (
    Form,
    LinearForward,
    LinearGradients,
    LinearProblem,
    warn_of_growth,
)
from npattn.variants.linear.recurrent import LinearOperands


@reject_unknown_options
@on_arrays
def forward(
    xp: Any, /, q: ArrayLike, k: ArrayLike, v: ArrayLike,
    *, causal: bool = False, feature_map: str | FeatureMap | Callable[[Any], Any] = "elu",
    normalise: bool = True, eps: float = 0.0, scale: float | None = None,
    log_decay: ArrayLike | None = None, beta: ArrayLike | None = None,
    initial_state: ArrayLike | None = None, initial_normaliser: ArrayLike | None = None,
    form: Form = "recurrent", chunk_size: int | None = None, dtype: DTypeLike | None = None,
) -> LinearForward:  # fmt: skip
    """Linear attention with its last state, and what `backward` needs.

    Parameters
    ----------
    q, k, v : array_like
        (..., H, T, D), (..., K, S, D), (..., K, S, E), where K divides H; rank 2 (all three) is
        one head. Real or complex floating dtypes. Leading axes broadcast.
    causal : bool, default False
        Query t reads keys s ≤ t; T must be S. Otherwise every query reads all keys.
    feature_map : {"elu", "identity", "relu", "softmax"} or callable, default "elu"
        φ: elu(x) + 1, x, max(x, 0), softmax over the features; or elementwise and analytic f(x),
        or a `FeatureMap` with its pullback.
    normalise : bool, default True
        Divide by the sum of the weights.
    eps : float, default 0.0
        Added to that sum; ≥ 0.
    scale : float, optional
        Multiplies φ(q)·φ(k). Default 1/√D; it cancels with normalisation where eps is 0.
    log_decay : float array_like, optional
        Natural logarithm of the factor on the state before key t is added; with causal. Broadcasts
        against (..., K, S, D), rank ≥ 2: (K, 1, 1) for one number a head, (..., K, S, 1) for one a
        key, (..., K, S, D) for one a feature.
    beta : float array_like, optional
        Write β (v − φ(k) a S) instead of v, what the decayed state holds at φ(k) taken off: the
        delta rule; with causal, without normalisation. Broadcasts against (..., K, S, 1), rank ≥ 2.
    initial_state : float array_like (..., K, D, E), optional
        State before the first key; broadcasts, rank ≥ 2.
    initial_normaliser : float array_like (..., K, D), optional
        The sum of φ(k) that goes with it, with normalisation.
    form : {"recurrent", "chunked"}
        Order of the computation: one key after another, or chunks of `chunk_size` keys (default
        64), and fewer where decays are strong. They agree but for rounding.
    dtype : dtype, optional
        Dtype of the computation and of the result; default float64, complex128 for complex arrays.

    Returns
    -------
    LinearForward
        .out (..., H, T, E), .state (..., K, D, E), .normaliser (..., K, D) or None, .problem

    Raises
    ------
    ShapeError
        If an array has a shape that does not fit q, k, v.
    DtypeError
        If an array is not floating, or `dtype` not one to compute in.
    OptionError
        If an option has an illegal value, or does not go with another one.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.variants import linear
    >>> q, k, v = np.ones((1, 3, 2)), np.ones((1, 3, 2)), np.arange(3.0).reshape(1, 3, 1)
    >>> linear.attention(q, k, v, causal=True)[0, :, 0]
    array([0. , 0.5, 1. ])
    """
    named = {
        "q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta,
        "initial_state": initial_state, "initial_normaliser": initial_normaliser,
    }  # fmt: skip
    arrays, facts = xp.read(
        **{name: x for name, x in named.items() if x is not None or name in "qkv"}
    )
    xp.check_dtype(dtype)
    problem = LinearProblem(
        **facts, causal=causal, feature_map=xp.read_features(feature_map), normalise=normalise,
        eps=eps, scale=scale, form=form, chunk_size=chunk_size, dtype=xp.name_dtype(dtype),
    )  # fmt: skip
    warn_of_growth(arrays.get("log_decay"))
    wide = xp.compute_dtype(dtype, facts.values(), like=q)
    with xp.exact(wide, q):
        x = operands_of(problem, xp, {name: xp.astype(x, wide) for name, x in arrays.items()})
        if problem.form == "recurrent":
            y, last = recurrent.forward(x, xp)
        else:
            y, last = getattr(xp, "by_chunks", chunked.forward)(x, problem.size)
        return _results(xp, problem, x, y, last)


attention = only_out(
    "attention", forward, np.ndarray,
    "Exact linear attention, φ(q) (φ(k)ᵀ v), with and without normalisation and decay.",
    "array (..., H, T, E)",
)  # fmt: skip


def _results(
    xp: Any, problem: LinearProblem, x: LinearOperands, y: Any, last: Any
) -> LinearForward:
    """Divide by the sum of the weights, and shape the results as the inputs."""
    out, state, normaliser, total = y, last, None, None
    if problem.normalise:
        total = y[..., -1:] + problem.eps  # (..., K, G, T, 1)
        out = xp.where(total == 0, 0, y[..., :-1] / xp.where(total == 0, 1, total))
        state, normaliser = last[..., :-1], last[..., -1]
    out = out.reshape(*problem.lead, problem.H, problem.T, problem.E)
    if problem.headless:
        out, state = out[0], state[0]
        normaliser = None if normaliser is None else normaliser[0]
    return LinearForward(out, state, normaliser, problem, (x, total))


@reject_unknown_options
def backward(
    fwd: LinearForward, dout: ArrayLike | None, dstate: ArrayLike | None = None,
    dnormaliser: ArrayLike | None = None,
) -> LinearGradients:  # fmt: skip
    """Exact gradients of Σ dout·out + Σ dstate·state + Σ dnormaliser·normaliser.

    Parameters
    ----------
    fwd : LinearForward
        Result of `forward`.
    dout : float array_like (..., H, T, E), or None
        None is 0.
    dstate : float array_like (..., K, D, E), optional
    dnormaliser : float array_like (..., K, D), optional

    Returns
    -------
    LinearGradients
        .q .k .v .log_decay .beta .initial_state .initial_normaliser, each shaped as its input; None
        where there is no such input.

    Raises
    ------
    ShapeError
        If a cotangent is not shaped like its result.
    DtypeError
        If a cotangent is not floating.
    OptionError
        If `fwd` is not a result of `forward`, or dnormaliser comes without normalisation.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.variants import linear
    >>> fwd = linear.forward(np.ones((3, 2)), np.ones((3, 2)), np.ones((3, 1)), causal=True)
    >>> linear.backward(fwd, np.ones_like(fwd.out)).v.round(3).T
    array([[1.833, 0.833, 0.333]])
    """
    check_result(fwd, LinearForward, "npattn.variants.linear.forward")
    p, (x, total) = fwd.problem, fwd.residuals
    results = {"dout": fwd.out, "dstate": fwd.state, "dnormaliser": fwd.normaliser}
    cotangents = {"dout": dout, "dstate": dstate, "dnormaliser": dnormaliser}
    do, dS, dz = (_cotangent(p, n, cotangents[n], results[n]) for n in results)
    dy = do.reshape(*p.lead, p.K, p.group, p.T, p.E)
    if p.normalise:
        dn = np.where(total == 0, 0, dy / np.where(total == 0, 1, total))  # from o = n / d
        dd = -(dn * fwd.out.reshape(dy.shape)).sum(-1, keepdims=True)
        dy = np.concatenate([dn, dd], -1)
        dS = np.concatenate([dS, dz[..., None]], -1)
    if p.form == "recurrent":
        grads = recurrent.backward(x, dy, dS)
    else:
        grads = chunked.backward(x, dy, dS, p.size)
    return _through_features(p, grads)


def _through_features(p: LinearProblem, grads: LinearOperands) -> LinearGradients:
    """Gradients of the inputs from those of the features, each summed to its shape."""

    def reduce_to(name: str, dx: Array | None) -> Array | None:
        array = getattr(p, name)
        return None if array is None or dx is None else sum_to(dx, array.shape)

    q, k = (x.astype(p.dtype, copy=False) for x in (p.q, p.k))
    dq = p.scale * grads.q.reshape(*p.lead, p.H, p.T, p.D)  # from q = scale · φ(q)
    dq, dk = (p.map.pullback(np.broadcast_to(x, d.shape), d) for x, d in ((q, dq), (k, grads.k)))
    return LinearGradients(
        q=sum_to(dq, p.q.shape),
        k=sum_to(dk, p.k.shape),
        v=sum_to(grads.v[..., : p.E], p.v.shape),
        log_decay=reduce_to("log_decay", grads.g),
        beta=reduce_to("beta", grads.beta),
        initial_state=reduce_to("initial_state", grads.state[..., : p.E]),
        initial_normaliser=reduce_to(
            "initial_normaliser", grads.state[..., -1] if p.normalise else None
        ),
    )


def _cotangent(p: LinearProblem, name: str, value: Any, result: Array | None) -> Array:
    """Return a cotangent of the result's shape, with a head axis and computed dtype; None is 0."""
    if result is None:
        if value is not None:
            raise OptionError(f"got {name}, but normalise is False; leave it out")
        return np.zeros(())
    if value is None:
        array = np.zeros(result.shape, p.dtype)
    else:
        array = check_cotangent(name, value, result.shape)
        if array.dtype.kind == "c" and p.dtype.kind != "c":
            raise DtypeError(f"{name} is {array.dtype}, but all arrays are real: pass it so too")
        array = array.astype(p.dtype, copy=False)
    return array[None] if p.headless else array


def operands_of(p: LinearProblem, xp: Any = ARRAYS, arrays: Any = None) -> LinearOperands:
    """Return features, values, decay and state, with all leading axes, of arrays by name."""
    if arrays is None:
        fields = {name: getattr(p, name) for name in NAMES}
        arrays = {n: x.astype(p.dtype, copy=False) for n, x in fields.items() if x is not None}
    kv = (*p.lead, p.K)

    def full(x: Any, *shape: int) -> Any:
        return xp.broadcast_to(xp.full((), 0, like=arrays["q"]) if x is None else x, shape)

    q = full(p.scale * xp.features(p, arrays["q"]), *p.lead, p.H, p.T, p.D)
    k = full(xp.features(p, arrays["k"]), *kv, p.S, p.D)
    v = full(arrays["v"], *kv, p.S, p.E)
    state = full(arrays.get("initial_state"), *kv, p.D, p.E)
    if p.normalise:
        v = xp.concatenate([v, xp.full((*kv, p.S, 1), 1, like=v)], axis=-1)
        z = full(arrays.get("initial_normaliser"), *kv, p.D)
        state = xp.concatenate([state, z[..., None]], axis=-1)
    decay = arrays.get("log_decay")
    per_feature = decay is not None and decay.shape[-1] != 1
    g = full(decay, *kv, p.S, p.D if per_feature else 1)
    beta = None if p.beta is None else full(arrays["beta"], *kv, p.S, 1)
    return LinearOperands(q.reshape(*kv, p.group, p.T, p.D), k, v, g, state, beta, bool(p.causal))
