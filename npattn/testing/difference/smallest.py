"""Search for the smallest problem on which two conventions give different results.

    H query heads   K key/value heads   T queries   S keys;  D = E = 1

Small problems are tried in order of their size, with the options that a topic is about. The first
on which that topic alone makes the difference is the example.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array, finfo
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.difference.words import TOPICS

SIZES = ((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (1, 1, 2, 2), (1, 1, 1, 3), (4, 2, 1, 1))
"""(H, K, T, S), the smallest first."""
OPTIONS = {
    "causal": ("causal", "window"),
    "window": ("window",),
    "mask_true": ("mask",),
    "hidden scores": ("mask", "bias"),
    "empty_row": ("mask", "bias"),
    "empty_row_bias": ("bias",),
    "bias": ("bias", "scale"),
    "softcap": ("softcap", "mask", "bias"),
    "lse_empty": ("mask", "bias"),
    "weights": ("dropout",),
    "dropout_at_rate_0": ("dropout",),
}
"""Topic → the options of the problems that are tried; none for the others."""
SHOWS = {"lse_base": "lse", "lse_empty": "lse", "weights": "weights"}
"""Topic → the result that it changes, if that is not o."""
Size = tuple[int, int, int, int]
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Example:
    """The smallest problem found on which two conventions differ."""

    # its alignment is that of neither: `causal` and `window` are as they are given
    problem: Problem
    options: Mapping[str, Any]  # options by name, as they are given
    result: str  # "o", or the first result that differs: "lse", "weights", "dq", ..
    a: Array  # exact values under the one and the other
    b: Array
    # nothing but this topic makes the difference: with the other's value of it, the one gives the
    # other's result
    alone: bool = True

    def __str__(self) -> str:
        p = self.problem
        sizes = f"T = {p.T}, S = {p.S}" + ("" if p.headless else f", H = {p.H}, K = {p.K}")
        arrays = [f"{n} = {_format(getattr(p, n))}" for n in "qkv"]
        options = [n if x is True else f"{n} = {_format(x)}" for n, x in self.options.items()]
        return f"{sizes}: {', '.join([*arrays, *options])}"

    def values(self) -> tuple[str, str]:
        """Return the results under the one and the other as text."""
        return f"{self.result} = {_format(self.a)}", f"{self.result} = {_format(self.b)}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it; NaN and infinities are text."""
        inputs = {n: getattr(self.problem, n) for n in "qkv"} | dict(self.options)
        inputs = {name: as_json(x) for name, x in inputs.items()}
        return {"inputs": inputs, "result": self.result, "a": as_json(self.a), "b": as_json(self.b)}


def as_json(x: Any) -> Any:
    """Return arrays as lists, and NaN and infinities as text."""
    if isinstance(x, np.ndarray):
        x = x.tolist()
    if isinstance(x, (list, tuple)):
        return [as_json(one) for one in x]
    return x if not isinstance(x, float) or np.isfinite(x) else str(x)


def _format(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return _format(x.tolist())
    if isinstance(x, list):
        return f"[{', '.join(map(_format, x))}]"
    if isinstance(x, float):
        return f"{x:.6g}".replace("-", "−").replace("e+", "e")
    return str(x)


@lru_cache(maxsize=1024)
def find_example(topic: str, a: Conventions, b: Conventions) -> Example | None:
    """Return the smallest problem on which a topic in which two conventions differ shows.

    Preferred are those on which nothing else makes the difference. None if no problem tried
    shows it.
    """
    fields = TOPICS[topic]
    swapped = (
        replace(a, **{name: getattr(b, name) for name in fields}),
        replace(b, **{name: getattr(a, name) for name in fields}),
    )
    second_best: Example | None = None
    for size, options, slope in _candidates(topic, _levels(a, b)):
        example = _compare(topic, size, options, slope, a, b)
        if example is None:
            continue
        if any(
            _compare(topic, size, options, slope, x, y) is None
            for x, y in ((swapped[0], b), (a, swapped[1]))
        ):
            return example
        second_best = second_best or replace(example, alone=False)
    return second_best


def _levels(a: Conventions, b: Conventions) -> tuple[float, ...]:
    """Return biases to compare hidden scores with: the numbers that these become, and between."""
    levels = (x for c in (a, b) for x in (c.hidden_fill, c.hidden_add) if x is not None)
    least = float(finfo(np.float32).min)
    numbers = {least if x == "min" else float(np.clip(x, least, None)) for x in levels}
    between = {-math.sqrt(x * y) for x, y in combinations(sorted(numbers), 2) if x * y > 0}
    return tuple(sorted(numbers | between, reverse=True))


# --- the problems ---------------------------------------------------------------------------------


def _candidates(topic: str, levels: tuple[float, ...]) -> Iterator[tuple[Size, Options, bool]]:
    """Yield sizes, options, and True if scores are not all 0; the simplest first."""
    names = OPTIONS.get(topic, ())
    for size in SIZES:
        values = _values(*size[2:], levels)
        most = len(names) if math.prod(size) <= 2 else 1  # larger ones are many
        for count in range(min(len(names), most) + 1):
            for chosen in combinations(names, count):
                for kinds in product(*(values[name] for name in chosen)):
                    options = tuple(x for kind in kinds for x in kind)
                    yield from ((size, options, slope) for slope in (False, True))


def _values(T: int, S: int, levels: tuple[float, ...]) -> dict[str, list[Options]]:
    """Return the values of each option, as the options that it stands for."""
    patterns = [
        tuple(bits[n * S : (n + 1) * S] for n in range(T))
        for bits in product((False, True), repeat=T * S)
    ]
    first = tuple(tuple(t == s == 0 for s in range(S)) for t in range(T))
    every = tuple((True,) * S for _ in range(T))
    biases: list[Options] = [
        (("bias", (level, where)),) for level in (-np.inf, 1.0, *levels) for where in (every, first)
    ]
    dropped = tuple(tuple(not x for x in row) for row in first)
    rates: list[Options] = [
        (("dropout_mask", keep), ("dropout_rate", r))
        for keep in (dropped, every)
        for r in (0.5, 0.0)
    ]
    return {
        "causal": [(("causal", True),)],
        "window": [(("window", sides),) for sides in ((0, 0), (1, 0), (0, 1))],
        "mask": [(("mask", pattern),) for pattern in patterns],
        "bias": biases,
        "scale": [(("scale", 2.0),)],
        "softcap": [(("softcap", 1.0),)],
        "dropout": rates,
    }


@lru_cache(maxsize=4096)
def _make(size: Size, options: Options, slope: bool) -> tuple[Problem, dict[str, Any]]:
    """Return a problem, and its options as they are given; they align to the bottom right."""
    H, K, T, S = size
    heads = (H,) if H > 1 else ()
    shared = (K,) if H > 1 else ()
    q = np.full((*heads, T, 1), 1.0 if slope else 0.0, np.float32)
    k = np.broadcast_to(np.arange(S, dtype=np.float32)[:, None] + 1, (*shared, S, 1)).copy()
    v = np.arange(1, 1 + int(np.prod((*shared, S))), dtype=np.float32).reshape(*shared, S, 1)
    arguments: dict[str, Any] = {}
    for name, value in options:
        if name == "bias":
            level, where = value
            value = np.where(np.array(where), np.float32(level), np.float32(0))
        arguments[name] = np.array(value) if name in ("mask", "dropout_mask") else value
    return Problem(q, k, v, alignment="bottom_right", **arguments), arguments


# --- results --------------------------------------------------------------------------------------


def _compare(
    topic: str, size: Size, options: Options, slope: bool, a: Conventions, b: Conventions
) -> Example | None:
    """Return an example if the result that the topic changes differs beyond rounding."""
    name = SHOWS.get(topic, "o")
    ours, theirs = (_exact(size, options, slope, c) for c in (a, b))
    if ours is None or theirs is None:
        return None
    x, y = ours[name], theirs[name]
    apart = ~((x == y) | (np.isnan(x) & np.isnan(y)))
    if not apart.any():
        return None
    if np.isfinite(x).all() and np.isfinite(y).all():
        allowed = sum(_tolerance(size, options, slope, c)[name] for c in (a, b))
        if not (abs(x - y) > allowed).any():
            return None
    return Example(*_make(size, options, slope), name, x, y)


@lru_cache(maxsize=4096)
def _exact(
    size: Size, options: Options, slope: bool, conventions: Conventions
) -> Mapping[str, Array] | None:
    """Return exact results; None if the conventions do not allow the problem."""
    try:
        fwd = evaluate(_align(size, options, slope, conventions), conventions, engine="dense")
    except OptionError:
        return None
    return {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}


@lru_cache(maxsize=4096)
def _tolerance(
    size: Size, options: Options, slope: bool, conventions: Conventions
) -> Mapping[str, Array]:
    """Return how far a correct kernel of float32 may be off."""
    problem = _align(size, options, slope, conventions)
    return tolerance(problem, problem.q.dtype, conventions=conventions)


def _align(size: Size, options: Options, slope: bool, conventions: Conventions) -> Problem:
    problem, _ = _make(size, options, slope)
    return problem.replace(causal=bool(problem.causal), alignment=conventions.alignment)
