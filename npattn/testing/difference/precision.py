"""Roundings that explain the errors of an implementation: one step of attention at a time.

The oracle's steps are computed in float64 with one of them rounded to a narrower dtype. If an
implementation rounds the same step, its errors are those, but for what its other roundings add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.bounds.ulp import real
from npattn.testing.diagnosis.replay import Changes, replay
from npattn.testing.difference.measure import Answer
from npattn.testing.trial import Trial

EXPLAINED = 0.75
"""Least share of the mean square of the errors that an explanation takes away: what it leaves is
at most half as large as they are."""
RIGHT = "nothing but the results is rounded"
MIXED = {
    dtype: f'all is rounded as npattn.attention(dtype="{dtype}") does'
    for dtype in ("float16", "bfloat16")
}
PASSES = {
    "forward": ("o", "lse", "weights", "max_score"),
    "gradients": ("dq", "dk", "dv", "dbias", "dsinks", "dgate"),
}
Prediction = Mapping[str, Array]


@dataclass(frozen=True)
class Explained:
    """The rounding that explains the errors of one pass best."""

    text: str  # "the weights are rounded to bfloat16"
    # share of the mean square of the errors that it takes away, in units of the tolerance
    share: float
    prediction: Prediction  # results that it predicts, by name


TF32_BITS = 13
"""Last bits of the fraction of float32 that tf32 does not have."""


def _to_tf32(x: Array) -> Array:
    """Return float64 numbers rounded to tf32: to nearest, ties away from 0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    half = np.uint32(1 << (TF32_BITS - 1))
    kept_bits = np.uint32(0xFFFFFFFF << TF32_BITS & 0xFFFFFFFF)
    rounded = ((bits + half) & kept_bits).view(np.float32).astype(np.float64)
    return np.where(np.isfinite(x), rounded, x)


def _through(dtype: str, x: Array) -> Array:
    """Return float64 numbers rounded to a dtype, to nearest, ties to even."""
    narrow = np.dtype("float32") if dtype == "bfloat16" else np.dtype(dtype)
    return np.asarray(x).astype(narrow).astype(dtype).astype(np.float64)


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "float32": partial(_through, "float32"),
    "tf32": _to_tf32,
    "float16": partial(_through, "float16"),
    "bfloat16": partial(_through, "bfloat16"),
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
UNSCALED = "the weights are rounded to {} before they are divided by their sum"


def _steps() -> Iterator[tuple[str, Changes]]:
    """Yield each quantity rounded to each dtype, in words and as `replay` takes it."""
    for dtype, rounding in ROUNDINGS.items():
        for text, quantity in QUANTITIES.items():
            yield f"{text} to {dtype}", {quantity: rounding}
    for dtype, rounding in ROUNDINGS.items():
        yield UNSCALED.format(dtype), {"p": partial(_round_unscaled, rounding)}


def _round_unscaled(rounding: Callable[[Array], Array], p: Array) -> Array:
    top = p.max(-1, keepdims=True, initial=0)
    top = np.where(top == 0, 1, top)  # exp(s − max) is p / max(p)
    return np.asarray(rounding(p / top) * top)


def predict_roundings(trial: Trial, side: Answer) -> dict[str, Prediction]:
    """Return the results of a plain problem with each step rounded to each dtype, by its words.

    Under `RIGHT` nothing is rounded but the results. Last come the results in mixed precision,
    whose operands are rounded and whose sums are float32 [15].
    """

    def predict(changes: Changes) -> Prediction:
        results = replay(side.problem, side.cotangents, trial.conventions, changes)
        dtypes = {name: x.array.dtype for name, x in side.judged.items()}
        return {n: x.astype(dtypes.get(n, x.dtype)).astype(x.dtype) for n, x in results.items()}

    predictions = {RIGHT: predict({})}
    predictions |= {text: predict(changes) for text, changes in _steps()}
    for dtype, text in MIXED.items():
        mixed = side.problem.replace(dtype=dtype)
        predictions[text] = trial.exact(mixed, side.cotangents)
    return predictions


def explain_errors(side: Answer, predictions: Mapping[str, Prediction]) -> dict[str, Explained]:
    """Return the rounding that explains the errors of each pass, where one does.

    Results without a prediction are left out: the predictions may be of the other function.
    """
    found = {}
    for name, results in PASSES.items():
        judged = [n for n in results if n in side.judged and n in predictions[RIGHT]]
        right = _stack(side, judged, predictions[RIGHT])
        error = _stack(side, judged, {n: side.judged[n].array for n in judged}) - right
        total = float((error**2).sum())
        best: Explained | None = None
        for text, prediction in predictions.items() if total else ():
            if text == RIGHT or any(n not in prediction for n in judged):
                continue
            if best and text in MIXED.values():
                break  # a step says more
            residual = error - (_stack(side, judged, prediction) - right)
            share = 1 - float((residual**2).sum()) / total
            if share > (best.share if best else EXPLAINED):
                best = Explained(text, share, prediction)
        if best:
            found[name] = best
    return found


def remaining(
    sides: Sequence[Answer],
    explained: Sequence[Mapping[str, Explained]],
    right: Prediction,
    name: str,
) -> float | None:
    """Return the share of a difference that is left without the errors that are explained.

    In mean squares of one pass; None if there is no difference.
    """
    judged = [n for n in PASSES[name] if all(n in side.judged for side in sides)]
    errors = [_stack(side, judged, {n: side.judged[n].array for n in judged}) for side in sides]
    total = float(((errors[0] - errors[1]) ** 2).sum())
    for i, (side, found) in enumerate(zip(sides, explained, strict=True)):
        if name in found:
            predicted = _stack(side, judged, found[name].prediction)
            errors[i] = errors[i] - (predicted - _stack(side, judged, right))
    return float(((errors[0] - errors[1]) ** 2).sum()) / total if total else None


def _stack(side: Answer, names: Iterable[str], arrays: Mapping[str, Array]) -> Array:
    """Return errors in units of the tolerance, one after the other; 0 for what is no number."""
    parts = [np.zeros(0)]
    for name in names:
        judged = side.judged[name]
        if arrays[name].shape == judged.exact.shape:
            with np.errstate(all="ignore"):
                error = (real(arrays[name]).astype(np.float64) - judged.exact) / judged.tolerance
            parts.append(np.where(np.isfinite(error), error, 0).ravel())
    return np.concatenate(parts)
