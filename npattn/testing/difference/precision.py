"""Roundings that explain the errors of an implementation: one step of attention at a time.

The oracle's steps are computed in float64 with one of them rounded to a narrower dtype. If an
implementation rounds the same step, its errors are those, but for what its other roundings add.
Dropout and the gate, which no plain problem has, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from npattn.conventions import Conventions
from npattn.engines import dense
from npattn.problem import Cotangents, Gradients, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.difference.measure import Answer
from npattn.testing.trial import Trial

Changes = Mapping[str, Callable[[Array], Array]]
"""Quantity → what it becomes: "inputs", "product", "s", "p", "factor" (of a product), "lse"."""


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]  # a dict of literals
def replay(
    problem: Problem, cotangents: Cotangents, conventions: Conventions, changes: Changes
) -> dict[str, Array]:
    """Return results and gradients by name, with some quantities replaced by functions of them."""

    def change(name: str, x: Array) -> Array:
        return np.asarray(changes[name](x)) if name in changes else x

    def product(w: Array, x: Array) -> Array:
        return np.asarray(change("factor", w) @ change("factor", x))

    own = conventions.canonical(problem).replace(dtype="float64")
    q, k, v = (change("inputs", x) for x in dense.operands(own))
    s = change("product", own.scale * (q @ k.swapaxes(-1, -2)))  # (..., H, T, S)
    slope: Array | float = 1.0
    if own.softcap is not None:
        tanh = np.tanh(s / own.softcap)
        s, slope = own.softcap * tanh, 1 - tanh**2
    s = s if own.bias_array is None else s + own.bias_array
    s = change("s", s if own.visible is None else np.where(own.visible, s, -np.inf))
    live, top = s != -np.inf, s.max(-1, keepdims=True, initial=-np.inf)
    sinks = None if own.sinks is None else np.asarray(own.sinks, np.float64)[:, None, None]
    p, p_sink, lse = dense.softmax(s, top, live, sinks)
    p = change("p", p)
    o, shown = product(p, v), change("lse", lse)

    do, dlse, dweights = conventions.cotangents(
        problem, cotangents.dout, cotangents.dlse, cotangents.dweights
    )
    do = change("inputs", np.asarray(do, np.float64).reshape(o.shape))
    dp = product(do, v.swapaxes(-1, -2)) + (0 if dweights is None else dweights)
    dp = dense.where_live(dp, live)
    delta = (p * dp).sum(-1, keepdims=True)  # of weights that are rounded, and do not sum to 1
    delta = delta if dlse is None else delta - dlse.reshape(delta.shape)
    ds = dense.where_live(p * (dp - delta), live)
    dx = ds * slope
    grads = Gradients(
        q=sum_to(own.scale * product(dx, k), own.q.shape),
        k=dense.sum_shared(own.scale * product(dx.swapaxes(-1, -2), q), own.K, own.k.shape),
        v=dense.sum_shared(product(p.swapaxes(-1, -2), do), own.K, own.v.shape),
        bias=own.bias_gradient(ds),
        sinks=None if p_sink is None else sum_to(-p_sink * delta, (own.H, 1, 1))[:, 0, 0],
    )

    if problem.headless:
        o, lse, shown, p, do = (x[0] for x in (o, lse, shown, p, do))
    grads = conventions.gradients(problem, grads, do, lse)
    whole = dict(zip(("o", "lse"), conventions.results(problem, o, shown), strict=True))
    whole |= {"weights": conventions.returned_weights(problem, p, lse)}
    whole |= {"max_score": (top[0] if problem.headless else top)[..., 0]}
    return whole | {f"d{name}": x for name, x in vars(grads).items() if x is not None}


EXPLAINED = 0.75
"""Least share of the mean square of the errors that an explanation takes away: what it leaves is
at most half as large as they are."""
RIGHT = "nothing but the results is rounded"
PASSES = {
    "forward": ("o", "lse", "weights", "max_score"),
    "gradients": ("dq", "dk", "dv", "dbias", "dsinks", "dgate"),
}
Predictions = Mapping[str, Mapping[str, Array]]
"""A rounding in words ("the weights are rounded to bfloat16") → results by name."""


def _to_tf32(x: Array) -> Array:
    """Return float64 numbers rounded to the 11 significant bits of tf32."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.round(fraction * 2**11) / 2**11, exponent)


def _through(dtype: str, x: Array) -> Array:
    """Return float64 numbers rounded to float32 and then to a dtype, as kernels do."""
    return np.asarray(x).astype(np.float32).astype(dtype).astype(np.float64)


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    **{dtype: partial(_through, dtype) for dtype in ("float32", "float16", "bfloat16")},
    "tf32": _to_tf32,
}
"""Rounding to a dtype, by its name."""
QUANTITIES = {
    "q, k and v are rounded": "inputs",
    "q kᵀ is rounded": "product",
    "the final scores are rounded": "s",
    "the weights are rounded": "p",
    "the factors of each product with v, dout, q and k are rounded": "factor",
    "lse is rounded": "lse",
}
"""Quantity of `replay` that is rounded, in words."""


def _steps() -> Iterator[tuple[str, Changes]]:
    """Yield each quantity rounded to each dtype, in words and as `replay` takes it."""
    for dtype, rounding in ROUNDINGS.items():
        for text, quantity in QUANTITIES.items():
            yield f"{text} to {dtype}", {quantity: rounding}
    for dtype, rounding in ROUNDINGS.items():
        text = f"the weights are rounded to {dtype} before they are divided by their sum"
        yield text, {"p": partial(_round_unscaled, rounding)}


def _round_unscaled(rounding: Callable[[Array], Array], p: Array) -> Array:
    top = p.max(-1, keepdims=True, initial=0)
    top = np.where(top == 0, 1, top)  # exp(s − max) is p / max(p)
    return np.asarray(rounding(p / top) * top)


def predict_roundings(trial: Trial, side: Answer) -> Predictions:
    """Return the results of a plain problem with each step rounded to each dtype.

    Under `RIGHT` nothing is rounded but the results.
    """

    def predict(changes: Changes) -> Mapping[str, Array]:
        results = replay(side.problem, side.cotangents, trial.conventions, changes)
        dtypes = {name: x.array.dtype for name, x in side.judged.items()}
        return {n: x.astype(dtypes.get(n, x.dtype)).astype(x.dtype) for n, x in results.items()}

    return {text: predict(changes) for text, changes in ((RIGHT, {}), *_steps())}


def explain_errors(side: Answer, predictions: Predictions) -> dict[str, str]:
    """Return the rounding that explains the errors of each pass, where one does.

    Results without a prediction are left out: the predictions may be of the other function.
    """
    found = {}
    for name, results in PASSES.items():
        judged = [n for n in results if n in side.judged and n in predictions[RIGHT]]
        right = _stack(side, judged, predictions[RIGHT])
        error = _stack_observed(side, judged) - right
        left = {
            text: float(np.square(error - (_stack(side, judged, prediction) - right)).sum())
            for text, prediction in predictions.items()
        }
        best = min(left, key=left.__getitem__)
        if left[best] < (1 - EXPLAINED) * left[RIGHT]:
            found[name] = best
    return found


def remaining(
    sides: Sequence[Answer],
    explained: Sequence[Mapping[str, str]],
    predictions: Predictions,
    name: str,
) -> float | None:
    """Return the share of a difference that is left without the errors that are explained.

    In mean squares of one pass; None if there is no difference.
    """
    judged = [n for n in PASSES[name] if all(n in side.judged for side in sides)]
    observed = [_stack_observed(side, judged) for side in sides]
    left = [*observed]
    for i, (side, found) in enumerate(zip(sides, explained, strict=True)):
        if name in found:
            right, predicted = (predictions[text] for text in (RIGHT, found[name]))
            left[i] = left[i] - (_stack(side, judged, predicted) - _stack(side, judged, right))
    total, rest = (float(np.square(x[0] - x[1]).sum()) for x in (observed, left))
    return rest / total if total else None


def _stack_observed(side: Answer, names: Iterable[str]) -> Array:
    return _stack(side, names, {n: x.array for n, x in side.judged.items()})


def _stack(side: Answer, names: Iterable[str], arrays: Mapping[str, Array]) -> Array:
    """Return errors in units of the tolerance, one after the other."""
    judged = [side.judged[n]._replace(array=arrays[n]) for n in names]
    return np.concatenate([np.zeros(0), *(x.errors.ravel() for x in judged)])
