"""Roundings that explain the errors of an implementation: one step of attention at a time.

The oracle's steps are computed in float64 with one of them rounded to a narrower dtype. If an
implementation rounds the same step, its errors are those, but for what its other roundings add.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.mistakes import Attention
from npattn.mistakes.attention import Inputs
from npattn.problem.arrays import Array
from npattn.testing.bounds.ulp import real
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.diagnosis.mistakes import implement, predict_by
from npattn.testing.diagnosis.steps.precision import ROUNDINGS
from npattn.testing.diagnosis.steps.step import STEPS, Step, replaces
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
    """The rounding that explains the errors of one pass best.

    Attributes
    ----------
    text : str
        "the weights are rounded to bfloat16".
    share : float
        Share of the mean square of the errors that it takes away, in units of the tolerance.
    prediction : mapping of str to array
        Results that it predicts, by name.
    """

    text: str
    share: float
    prediction: Prediction


def _round_unscaled(rounding: Any) -> type[Attention]:
    """Return attention whose weights are rounded before they are divided by their sum."""

    def softmax(self: Attention, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = Attention.softmax(self, s, c, live)
        top = p.max(-1, keepdims=True, initial=0)
        top = np.where(top == 0, 1, top)  # exp(s − max) is p / max(p)
        return np.asarray(rounding(p / top)) * top, p_sink, lse

    return replaces(softmax=softmax)


def _steps() -> Iterator[Step]:
    yield from (step for step in STEPS if step.topic in ("precision", "precision of float64"))
    for name, (topic, rounding) in ROUNDINGS.items():
        text = f"the weights are rounded to {name} before they are divided by their sum"
        yield Step(topic, text, _round_unscaled(rounding))


def predict_roundings(trial: Trial, own: Answer) -> dict[str, Prediction]:
    """Return the results of a plain problem with each step rounded to each dtype, by its words.

    Under `RIGHT` nothing is rounded but the results. Last come the results in mixed precision,
    whose operands are rounded and whose sums are float32 [15].
    """
    exact = {name: x.exact for name, x in own.judged.items()}
    evidence = Evidence(trial, own.problem, own.cotangents, "contiguous", {}, exact)
    like = trial.implementation

    def predict(made: Attention) -> Prediction:
        parts = predict_by(implement(made, made, like), evidence)
        return {name: x[0] for part in parts for name, x in part.items()}

    predictions = {RIGHT: predict(Attention())}
    predictions |= {step.text: predict(step.make()) for step in _steps()}
    for dtype, text in MIXED.items():
        mixed = own.problem.replace(dtype=dtype)
        predictions[text] = trial.exact(mixed, own.cotangents)
    return predictions


def explain_errors(own: Answer, predictions: Mapping[str, Prediction]) -> dict[str, Explained]:
    """Return the rounding that explains the errors of each pass, where one does.

    Results without a prediction are left out: the predictions may be of the other function.
    """
    found = {}
    for name, results in PASSES.items():
        judged = [n for n in results if n in own.judged and n in predictions[RIGHT]]
        right = _stack(own, judged, predictions[RIGHT])
        error = _stack(own, judged, {n: own.judged[n].array for n in judged}) - right
        total = float((error**2).sum())
        best: Explained | None = None
        for text, prediction in predictions.items() if total else ():
            if text == RIGHT or any(n not in prediction for n in judged):
                continue
            if best and text in MIXED.values():
                break  # a step says more
            left = error - (_stack(own, judged, prediction) - right)
            share = 1 - float((left**2).sum()) / total
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
    judged = [n for n in PASSES[name] if all(n in own.judged for own in sides)]
    errors = [_stack(own, judged, {n: own.judged[n].array for n in judged}) for own in sides]
    total = float(((errors[0] - errors[1]) ** 2).sum())
    for i, (own, found) in enumerate(zip(sides, explained, strict=True)):
        if name in found:
            predicted = _stack(own, judged, found[name].prediction)
            errors[i] = errors[i] - (predicted - _stack(own, judged, right))
    return float(((errors[0] - errors[1]) ** 2).sum()) / total if total else None


def _stack(own: Answer, names: Iterable[str], arrays: Mapping[str, Array]) -> Array:
    """Return errors in units of the tolerance, one after the other; 0 for what is no number."""
    parts = [np.zeros(0)]
    for name in names:
        judged = own.judged[name]
        if arrays[name].shape == judged.exact.shape:
            with np.errstate(all="ignore"):
                error = (real(arrays[name]).astype(np.float64) - judged.exact) / judged.tolerance
            parts.append(np.where(np.isfinite(error), error, 0).ravel())
    return np.concatenate(parts)
