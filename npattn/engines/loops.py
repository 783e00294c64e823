"""The second oracle: attention and its gradients in plain Python floats and loops.

    s = c·tanh(scale · q kᵀ / c)   s ← score_mod(s) + bias   p = softmax(s)
    o = gate · (p · keep) v

    B batch   H query heads   K key/value heads   T queries   S keys
    D query/key size   E value size
    q (..., H, T, D)   k (..., K, S, D)   v (..., K, S, E)   o (..., H, T, E)   lse (..., H, T)
    A hidden key, or one whose score is −inf, is in no sum. A query without any score gives o = 0,
    lse = −inf, and passes no gradient. Numbers in brackets are the rules of docs/semantics.md.
    Source: Vaswani et al. 2017, eq. 1. Gradients: docs/derivations/attention.md.

This file shares nothing with dense.py on purpose: it works one query at a time, decides itself
which keys are visible and where an array broadcasts, differentiates softcap as 1/cosh², and adds
with math.fsum. Conventions are computed as they read, not by way of another problem. NumPy only
carries numbers in and out: score_mod expects its numbers.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from npattn.errors import OptionError
from npattn.problem import Gradients, Problem
from npattn.problem.arrays import Array

Index = tuple[int, ...]

STEP = 1e-200  # of the complex step: its square vanishes, so that only rounding is left


class _Default(NamedTuple):
    """Conventions of docs/semantics.md; of `causal` only "unless_masked" is read.

    A `Problem` carries the alignment.
    """

    causal: str = "bottom_right"
    mask_true: str = "attend"
    window: str = "exclusive"
    hidden_fill: float | str | None = None
    hidden_add: float | str | None = None
    empty_row: str = "zero"
    empty_row_bias: str | None = None
    softcap: str = "before_bias"
    bias: str = "after_scale"
    kv_head: str = "repeat"
    lse_base: str = "e"
    lse_empty: float = -math.inf
    weights: str = "before_dropout"
    dropout_at_rate_0: str = "drop"


Meaning: TypeAlias = Any
"""A `Conventions`, or any other object with the attributes of `_Default`."""


class _Score(NamedTuple):
    """Score of one key for one query."""

    value: float
    slope: float = 0.0  # its derivative by scale · q·k
    bias_slope: float = 0.0  # its derivative by the bias
    free: bool = True  # False where it is a constant, which passes no gradient


class _Row(NamedTuple):
    """One query of one head: results of forward, with the numbers that backward needs."""

    scores: dict[int, _Score]  # by key; only keys in the softmax
    p: dict[int, float]  # the weights of these keys, before dropout
    w: dict[int, float]  # after dropout
    p_sink: float
    lse: float
    out: list[float]  # (E,) before the gate
    defined: bool = True  # False for a row of NaN, whose own gradients are undefined


def forward(problem: Problem, conventions: Meaning | None = None) -> tuple[Array, Array, Array]:
    """Compute attention one query at a time.

    Raises OptionError if an array is complex.

    Parameters
    ----------
    problem : Problem
        Real. Its mask and window follow `conventions`.
    conventions : Conventions, optional
        Default: docs/semantics.md.

    Returns
    -------
    out (..., H, T, E), lse (..., H, T), weights (..., H, T, S)
        In float64; weights are before dropout, unless the conventions say after.
    """
    task = _ScalarProblem(problem, conventions or _Default())
    out, lse, weights = (np.zeros((*task.rows, n)) for n in (problem.E, 1, problem.S))
    for b, at in task.queries():
        row = _row(task, b, at)
        out[at] = [_gate(task, (*at, e)) * x for e, x in enumerate(row.out)]  # [16]
        lse[at] = row.lse
        returned = row.w if task.conventions.weights == "after_dropout" else row.p
        for s, weight in returned.items():
            weights[(*at, s)] = weight
    if problem.headless:  # the one head has no axis  [14]
        out, lse, weights = out[0], lse[0], weights[0]
    return out, lse[..., 0], weights


def max_score(problem: Problem, conventions: Meaning | None = None) -> Array:
    """Return the largest score of each query, (..., H, T); −inf where there is none.

    Parameters and errors are those of `forward`.
    """
    task = _ScalarProblem(problem, conventions or _Default())
    top = np.full(task.rows, -np.inf)
    for b, at in task.queries():
        scores = [score.value for score in _scores(task, b, at)[0].values()]
        top[at] = math.nan if any(map(math.isnan, scores)) else max(scores, default=-math.inf)
    return top[0] if problem.headless else top


def backward(
    problem: Problem,
    dout: Array,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Meaning | None = None,
) -> Gradients:
    """Gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights: forward, read upwards.

    dout, dlse and dweights are shaped as the results of `forward`, whose other parameters and
    errors are the same.

    Returns
    -------
    Gradients
        In float64, each shaped as its input; None where there is no such input. A bias or a mask
        that is an object stands for its array: the gradient is that of ``problem.bias_array``.
    """
    task = _ScalarProblem(problem, conventions or _Default())
    cotangents = (_real("dout", dout), _real("dlse", dlse), _real("dweights", dweights))
    sums = {
        name: _Sums(array.shape)
        for name in ("q", "k", "v", "bias", "sinks", "gate")
        if (array := getattr(task.problem, name)) is not None
    }
    undefined = "nan" in (task.conventions.empty_row, task.conventions.empty_row_bias)
    undefined_gradients = (("q", task.problem.D), ("bias", task.problem.S)) if undefined else ()
    for b, at in task.queries():
        row = _row(task, b, at)
        for name, n in undefined_gradients:
            if name in sums:
                sums[name].note(at, n, row.defined)
        if row.defined:
            do, dl, dw = _cotangents(task, at, *cotangents)
            for e, x in enumerate(do):  # from out = gate · o
                if "gate" in sums:
                    sums["gate"].add((*at, e), x * row.out[e])
                do[e] = _gate(task, (*at, e)) * x
            _add_row(task, sums, at, row, do, dl, dw)
    return Gradients(**{name: total.array() for name, total in sums.items()})


# --- one row, forward -----------------------------------------------------------------------------


def _row(task: _ScalarProblem, b: int, at: Index) -> _Row:
    """Compute the query at `at` = (..., h, t) with all keys."""
    scores, sees = _scores(task, b, at)
    sink = task.value("sinks", at[-2:-1], -math.inf)
    if not scores and sink == -math.inf:
        return _empty_row(task, at, sees)

    p, p_sink, lse = _softmax({s: score.value for s, score in scores.items()}, sink)  # [8, 11]
    if task.conventions.lse_base == "2":
        lse /= math.log(2)
    w = {s: p[s] * _keep(task, at, s) for s in p}  # [9]
    return _Row(scores, p, w, p_sink, lse, _out(task, at, w))


def _scores(task: _ScalarProblem, b: int, at: Index) -> tuple[dict[int, _Score], bool]:
    """Return the scores of the keys in the softmax, and True if any key is visible.

    A visible key whose score is −inf is not in the softmax. Every key counts as visible if hidden
    scores have a number added.
    """
    scores, more = {}, task.number(task.conventions.hidden_add)
    seen = {s: _sees(task, at, s) for s in range(task.problem.S)}
    for s in seen:
        if seen[s] or more is not None:
            scores[s] = _score(task, b, at, s, 0.0 if seen[s] or more is None else more)
        else:
            scores[s] = _Score(_hidden_score(task), free=False)
    scores = {s: score for s, score in scores.items() if score.value != -math.inf}  # [4]
    return scores, more is not None or any(seen.values())


def _sees(task: _ScalarProblem, at: Index, s: int) -> bool:
    """Return True if mask, causal and window all show key s to the query at `at` [5-7]."""
    problem, t = task.problem, at[-1]
    from_end = t + problem.S - problem.T  # the key beside t when the last query is beside the last
    if task.mask is not None:
        value = bool(task.mask[_within(task.mask.shape, (*at, s))])
        if value == (task.conventions.mask_true == "hide"):
            return False
    replaced = task.mask is not None and task.conventions.causal == "unless_masked"
    if problem.causal == "top_left" and s > t and not replaced:
        return False
    if problem.causal == "bottom_right" and s > from_end:
        return False
    if problem.window is not None:
        left_keys, right_keys = problem.window
        aligned = t if problem.alignment == "top_left" else from_end
        counted = 1 if task.conventions.window == "inclusive" else 0  # the query itself, in left
        if left_keys is not None and aligned - s > left_keys - counted:
            return False
        if right_keys is not None and s - aligned > right_keys:
            return False
    return True


def _hidden_score(task: _ScalarProblem) -> float:
    """Score of a hidden key; −inf leaves the softmax."""
    fill, cap = task.number(task.conventions.hidden_fill), task.problem.softcap
    score = -math.inf if fill is None else fill
    if cap is not None and task.conventions.softcap == "after_mask":
        score = cap * math.tanh(score / cap)
    return score


def _score(task: _ScalarProblem, b: int, at: Index, s: int, more: float) -> _Score:
    """Compute scale · q·k, with cap, score_mod and bias in the order of the conventions [1-4].

    `more` is the number that is added to a hidden score.
    """
    q, k = task.vector("q", at), task.vector("k", task.key(at, s))
    score = _Score(task.scale * _sum(a * b for a, b in zip(q, k, strict=True)), slope=1.0)
    if task.conventions.softcap == "before_bias":
        score = _cap(task, score)
    score = _modify(task, b, (*at, s), score)
    score = _add_bias(task, (*at, s), score)
    if task.conventions.softcap == "after_mask":
        return _cap(task, score._replace(value=score.value + more))
    if task.conventions.softcap == "after_bias":
        score = _cap(task, score)
    return score._replace(value=score.value + more)


def _cap(task: _ScalarProblem, score: _Score) -> _Score:
    """Cap a score: c · tanh(score / c) [2]."""
    c = task.problem.softcap
    if c is None:
        return score
    rate = _sech2(score.value / c)
    value = c * math.tanh(score.value / c)
    return _Score(value, rate * score.slope, rate * score.bias_slope)


def _modify(task: _ScalarProblem, b: int, at: Index, score: _Score) -> _Score:
    """Apply score_mod to the score at (..., h, t, s) [3]."""
    mod = task.problem.score_mod
    if mod is None:
        return score
    where = tuple(np.int64(i) for i in (b, *at[-3:]))
    with np.errstate(all="ignore"):
        value = mod(np.float64(score.value), *where)  # type: ignore[arg-type]  # 0-d
        step = mod(np.complex128(complex(score.value, STEP)), *where)  # type: ignore[arg-type]
    return _Score(float(value), score.slope * (complex(step).imag / STEP))


def _add_bias(task: _ScalarProblem, at: Index, score: _Score) -> _Score:
    """Add the bias to a score; some conventions multiply it by scale [4]."""
    factor = task.scale if task.conventions.bias == "before_scale" else 1.0
    bias = task.value("bias", at, 0.0)
    return _Score(score.value + factor * bias, score.slope, factor)


def _softmax(scores: dict[int, float], sink: float) -> tuple[dict[int, float], float, float]:
    """Weights, the weight of the sink and lse of scores that are not all −inf [8, 11]."""
    everything = [*scores.values(), sink]
    top = math.nan if any(map(math.isnan, everything)) else max(everything)
    e = {s: math.exp(score - top) for s, score in scores.items()}
    e_sink = math.exp(sink - top)
    total = _sum([*e.values(), e_sink])
    return {s: x / total for s, x in e.items()}, e_sink / total, top + math.log(total)


def _empty_row(task: _ScalarProblem, at: Index, by_bias: bool) -> _Row:
    """Result of a query without a score, by convention [8]; `by_bias` if it sees keys of −inf."""
    S, E, lse = task.problem.S, task.problem.E, task.conventions.lse_empty
    result = task.conventions.empty_row
    if by_bias:
        result = task.conventions.empty_row_bias or result
    if result == "zero" or S == 0:
        return _Row({}, {}, {}, 0.0, lse, [0.0] * E)
    if result == "nan":
        p = dict.fromkeys(range(S), math.nan)
        return _Row({}, p, p, 0.0, lse, [math.nan] * E, defined=False)
    p = dict.fromkeys(range(S), 1 / S)
    return _Row(dict.fromkeys(p, _Score(0.0, free=False)), p, p, 0.0, lse, _out(task, at, p))


def _out(task: _ScalarProblem, at: Index, w: dict[int, float]) -> list[float]:
    """o = w v over the keys of one row: (E,) [10]."""
    values = {s: task.vector("v", task.key(at, s)) for s in w}
    return [_sum(_times(w[s], values[s][e]) for s in w) for e in range(task.problem.E)]


def _gate(task: _ScalarProblem, at: Index) -> float:
    """Factor of the element of o at (..., h, t, e) [16]."""
    return task.value("gate", at, 1.0)


def _keep(task: _ScalarProblem, at: Index, s: int) -> float:
    """Factor of a weight by dropout [9]."""
    if task.conventions.dropout_at_rate_0 == "ignore" and task.problem.dropout_rate == 0:
        return 1.0
    kept = task.value("dropout_mask", (*at, s), 1.0)
    return kept / (1 - task.problem.dropout_rate)


# --- one row, backward ----------------------------------------------------------------------------


def _add_row(
    task: _ScalarProblem,
    sums: dict[str, _Sums],
    at: Index,
    row: _Row,
    do: list[float],
    dlse: float,
    dweights: list[float],
) -> None:
    """Add the share of one query to every gradient."""
    scale, q = task.scale, task.vector("q", at)
    dp = {}  # the gradient of each weight before dropout
    for s in row.p:
        v, key = task.vector("v", task.key(at, s)), task.key(at, s)
        for e, x in enumerate(do):
            sums["v"].add((*key, e), _times(row.w[s], x))  # from o = w v
        dw = _sum(a * b for a, b in zip(do, v, strict=True))  # from o = w v
        # From w = p · keep; p or w is returned.
        dropped = task.conventions.weights == "after_dropout"
        direct = dweights[s] * _keep(task, at, s) if dropped else dweights[s]
        dp[s] = dw * _keep(task, at, s) + direct
    delta = _sum(row.p[s] * dp[s] for s in dp) - dlse

    for s, score in row.scores.items():
        if not score.free:
            continue
        k, key = task.vector("k", task.key(at, s)), task.key(at, s)
        ds = row.p[s] * (dp[s] - delta)  # from p = exp(s − lse), and lse
        if "bias" in sums:
            sums["bias"].add((*at, s), ds * score.bias_slope)  # from s = x + bias
        dx = ds * score.slope  # from s = score_mod(c · tanh(x / c))
        for d in range(task.problem.D):
            sums["q"].add((*at, d), scale * _times(dx, k[d]))  # from x = scale · q·k
            sums["k"].add((*key, d), scale * _times(dx, q[d]))
    if "sinks" in sums:
        sums["sinks"].add(at[-2:-1], -row.p_sink * delta)  # as ds, with dp = 0


def _cotangents(
    task: _ScalarProblem, at: Index, dout: Array | None, dlse: Array | None, dweights: Array | None
) -> tuple[list[float], float, list[float]]:
    """dout (E,), dlse and dweights (S,) of one row."""
    do, dl, dw = [0.0] * task.problem.E, 0.0, [0.0] * task.problem.S
    if dout is not None:
        do = dout[_within(dout.shape[:-1], at)].tolist()
    if dlse is not None:
        dl = float(dlse[_within(dlse.shape, at)])
        dl = dl / math.log(2) if task.conventions.lse_base == "2" else dl
    if dweights is not None:
        dw = dweights[_within(dweights.shape[:-1], at)].tolist()
    return do, dl, dw


# --- the parts ------------------------------------------------------------------------------------


class _ScalarProblem:
    """A problem under conventions, with its numbers as Python floats on request."""

    def __init__(self, problem: Problem, conventions: Meaning) -> None:
        problem = problem.materialise()
        self.problem = problem
        self.conventions = conventions
        self.mask = problem.mask_array
        assert problem.scale is not None  # Problem has put the default there  [1]
        self.scale = problem.scale
        self.rows = (*problem.lead, problem.H, problem.T)
        names = ("q", "k", "v", "bias", "sinks", "dropout_mask", "gate")
        self.arrays = {name: _real(name, getattr(problem, name)) for name in names}

    def number(self, value: float | str | None) -> float | None:
        """Return a number; "min" stands for the smallest finite one of the dtype of q."""
        if value != "min":
            return value  # type: ignore[return-value]  # "min" is the only word
        dtypes = (self.problem.storage or self.problem.q.dtype, self.problem.dtype)
        return max(float(ml_dtypes.finfo(x).min) for x in dtypes)  # type: ignore[no-untyped-call]

    def queries(self) -> Iterator[tuple[int, Index]]:
        """Yield the flat leading index b and the index (..., h, t) of every query."""
        problem = self.problem
        leads = itertools.product(*(range(n) for n in problem.lead))
        for b, lead in enumerate(leads):
            for h, t in itertools.product(range(problem.H), range(problem.T)):
                yield b, (*lead, h, t)

    def key(self, at: Index, s: int) -> Index:
        """Index (..., K head, s) of key s for the query at (..., h, t) [1]."""
        h, K = at[-2], self.problem.K
        if self.conventions.kv_head == "tile":
            return (*at[:-2], h % K, s)
        return (*at[:-2], h // (self.problem.H // K), s)

    def vector(self, name: str, at: Index) -> list[float]:
        """Last axis of q, k or v at an index of the whole."""
        array = self.arrays[name]
        assert array is not None
        return list(array[_within(array.shape[:-1], at)].tolist())

    def value(self, name: str, at: Index, default: float) -> float:
        """Element of bias, sinks, dropout_mask or gate at an index of the whole."""
        array = self.arrays[name]
        return default if array is None else float(array[_within(array.shape, at)])


class _Sums:
    """Terms of a gradient, by the element of its input [13]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.terms: dict[Index, list[float]] = defaultdict(list)
        self.defined: dict[Index, bool] = defaultdict(bool)

    def add(self, at: Index, term: float) -> None:
        """Add to the element that broadcasts to the index `at` of the whole."""
        self.terms[_within(self.shape, at)].append(term)

    def note(self, at: Index, n: int, defined: bool) -> None:
        """Note whether the n elements of the row at an index of the whole have a gradient."""
        for i in range(n):
            self.defined[_within(self.shape, (*at, i))] |= defined

    def array(self) -> Array:
        """Return the gradient: 0 where nothing was added, NaN where no row has one."""
        array = np.zeros(self.shape)
        for at, terms in self.terms.items():
            array[at] = _sum(terms)
        for at, defined in self.defined.items():
            if not defined:
                array[at] = math.nan
        return array


def _within(shape: tuple[int, ...], at: Index) -> Index:
    """Index, in an array of `shape`, of the element that broadcasts to `at` [14]."""
    tail = at[len(at) - len(shape) :]
    return tuple(0 if n == 1 else i for n, i in zip(shape, tail, strict=True))


def _real(name: str, array: Any) -> Array | None:
    if array is None:
        return None
    array = np.asarray(array)
    if array.dtype.kind == "c":
        raise OptionError(f"{name} is {array.dtype}, must be real: loops works in Python floats")
    return np.asarray(array.astype(np.float64))


def _sum(terms: Iterable[float]) -> float:
    terms = list(terms)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # beyond the largest float; ∞ − ∞
        return sum(terms)


def _times(weight: float, x: float) -> float:
    """Multiply weight and x; NaN for an x that is not finite, whatever the weight [10]."""
    return weight * x if math.isfinite(x) else math.nan


def _sech2(x: float) -> float:
    """Compute 1 / cosh(x)² without the cancellation of 1 − tanh(x)²."""
    e = math.exp(-2 * abs(x))
    return 4 * e / (1 + e) ** 2
