"""Search for the smallest problem on which two conventions give different results.

    H query heads   K key/value heads   T queries   S keys;  D = E = 1

Small problems are tried in order of their size. The first on which the fields of one topic alone
make the difference is the example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, lru_cache
from itertools import combinations, product
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array, finfo
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.diagnosis.conventions import realign
from npattn.testing.diagnosis.sentences import CONVENTIONS

HIDDEN = ("hidden_fill", "hidden_add")
TOPICS: dict[str, tuple[str, ...]] = {
    "hidden scores" if name in HIDDEN else name: HIDDEN if name in HIDDEN else (name,)
    for name in vars(Conventions())
}
"""Subject → conventions of it: of `hidden_fill` and `hidden_add` one at most is given."""


def differing(a: Conventions, b: Conventions) -> list[str]:
    """Return the topics in which two conventions differ, in the order of `TOPICS`."""
    return [topic for topic in TOPICS if _values(topic, a) != _values(topic, b)]


def describe(topic: str, conventions: Conventions) -> str:
    """Return the sentence of what conventions say on a topic."""
    value, *more = _values(topic, conventions)
    if topic == "lse_empty":
        return f"lse of a query that sees no key is {value}"
    if topic == "hidden scores":
        became = f"become {value}" if value else f"have {more[0]} added"
        stay = f"hidden scores {became}, and their keys stay in the softmax"
        return stay if value or more[0] else "hidden keys leave the softmax"
    if topic == "empty_row_bias":
        value = value or conventions.empty_row
    return CONVENTIONS[f"{topic}={value}"]


def _values(topic: str, conventions: Conventions) -> tuple[str | None, ...]:
    """Return what is compared: numbers by their text, for NaN is not equal to itself."""
    if topic == "empty_row_bias":
        empty_bias = conventions.empty_row_bias
        return (None if empty_bias == conventions.empty_row else empty_bias,)
    values = (getattr(conventions, name) for name in TOPICS[topic])
    texts = {None: None, "min": "the least finite number of the dtype"}
    return tuple(texts[x] if x in texts else _format(x) for x in values)


SHOWS = {"lse_base": "lse", "lse_empty": "lse", "weights": "weights"}
"""Topic → the result that it changes, if that is not o."""


@dataclass(frozen=True, eq=False)
class Case:
    """A small problem, and its options as they are given; they align to the bottom right."""

    problem: Problem
    options: Mapping[str, Any]

    @property
    def needs(self) -> set[str]:
        """Options and structure that a function must take to show something by it.

        Not a scale or a rate: other sizes and masks show the same without.
        """
        p = self.problem
        there = {"T != S": p.T != p.S, "T > S": p.T > p.S, "K < H": p.K < p.H}
        options = {*self.options} - {"scale", "dropout_rate"}
        return options | {name for name, is_there in there.items() if is_there}


@dataclass(frozen=True, eq=False)
class Example(Case):
    """The smallest problem found on which two conventions differ."""

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
        return {x: as_json(getattr(self, x)) for x in ("result", "a", "b")} | {
            "inputs": as_json(inputs)
        }


def as_json(x: Any) -> Any:
    """Return arrays as lists, records as mappings, and NaN and infinities as text."""
    if isinstance(x, Example):
        return x.as_dict()
    if is_dataclass(x):
        x = vars(x)
    if isinstance(x, Mapping):
        return {name: as_json(value) for name, value in x.items()}
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
def find_example(
    topic: str, a: Conventions, b: Conventions, able: frozenset[str] | None = None
) -> Example | None:
    """Return the smallest problem on which a topic in which two conventions differ shows.

    Preferred are those on which nothing else makes the difference. None if no problem tried shows
    it. `able`, if given, are the options, structure and results that a problem may need.
    """
    fields, result = TOPICS[topic], SHOWS.get(topic, "o")
    if able is not None and result not in able | {"o"}:
        return None
    swapped = (
        replace(a, **{name: getattr(b, name) for name in fields}),
        replace(b, **{name: getattr(a, name) for name in fields}),
    )
    second_best: Example | None = None
    for case in _cases(_levels(a, b)):
        if able is not None and not case.needs <= able:
            continue
        example = _compare(case, result, a, b)
        if example is None:
            continue
        if any(_compare(case, result, *x) is None for x in ((swapped[0], b), (a, swapped[1]))):
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


@cache
def _cases(levels: tuple[float, ...]) -> tuple[Case, ...]:
    """Return the problems that are tried, the smallest first, some with biases of these levels."""
    one: list[dict[str, Any]] = [{"mask": [[False]]}, {"mask": [[True]]}, {"bias": [[-np.inf]]}]
    hidden: list[dict[str, Any]] = [{"mask": [x]} for x in ((0, 0), (0, 1), (1, 0))]
    biases: list[dict[str, Any]] = [{"bias": [[x, y]]} for x in levels for y in (x, 0)]
    return (
        _case(1, 1, slope=True),
        *(_case(1, 1, **options) for options in one),
        *(_case(1, 1, **x, **one[2]) for x in one[:2]),
        *(_case(1, 1, softcap=1.0, **options) for options in one),
        *(_case(1, 1, dropout_mask=[[False]], dropout_rate=rate) for rate in (0.5, 0.0)),
        _case(1, 2, causal=True),
        _case(1, 2, window=(1, 0)),
        _case(1, 2, bias=[[1, 0]], scale=2.0),
        *(_case(1, 2, slope=True, **x) for x in hidden),
        *(_case(1, 2, **x, **y) for x, y in product(hidden, biases)),
        _case(2, 1, causal=True),
        _case(2, 1, window=(0, 0)),
        _case(2, 2, window=(1, 0)),
        _case(2, 2, causal=True),
        _case(2, 2, causal=True, softcap=1.0),
        _case(1, 1, H=4, K=2),
    )


def _case(T: int, S: int, H: int = 1, K: int = 1, slope: bool = False, **options: Any) -> Case:
    """Return a problem of given sizes, without heads if H = 1, whose scores are 0 without slope."""
    heads, shared = ((H,), (K,)) if H > 1 else ((), ())
    q = np.full((*heads, T, 1), float(slope), np.float32)
    k = np.broadcast_to(np.arange(S, dtype=np.float32)[:, None] + 1, (*shared, S, 1)).copy()
    v = np.arange(1, 1 + K * S, dtype=np.float32).reshape(*shared, S, 1)
    dtypes = {"mask": bool, "dropout_mask": bool, "bias": np.float32}
    options |= {n: np.array(options[n], dtype) for n, dtype in dtypes.items() if n in options}
    return Case(Problem(q, k, v, alignment="bottom_right", **options), options)


# --- results --------------------------------------------------------------------------------------


def _compare(case: Case, result: str, a: Conventions, b: Conventions) -> Example | None:
    """Return an example if a result differs beyond rounding."""
    ours, theirs = (_exact(case, c) for c in (a, b))
    if ours is None or theirs is None:
        return None
    x, y = ours[result], theirs[result]
    if np.isfinite(x).all() and np.isfinite(y).all():
        apart = abs(x - y) > sum(_tolerance(case, c)[result] for c in (a, b))
    else:
        apart = ~((x == y) | (np.isnan(x) & np.isnan(y)))
    return Example(case.problem, case.options, result, x, y) if apart.any() else None


@lru_cache(maxsize=4096)
def _exact(case: Case, conventions: Conventions) -> Mapping[str, Array] | None:
    """Return exact results; None if the conventions do not allow the problem."""
    try:
        fwd = evaluate(realign(case.problem, conventions), conventions, engine="dense")
    except OptionError:
        return None
    return {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}


@lru_cache(maxsize=4096)
def _tolerance(case: Case, conventions: Conventions) -> Mapping[str, Array]:
    """Return how far a correct kernel of float32 may be off."""
    return tolerance(realign(case.problem, conventions), "float32", conventions=conventions)
