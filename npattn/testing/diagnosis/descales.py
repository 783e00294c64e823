"""Candidates of quantized inputs: a factor that is left out, of another, or taken twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from npattn.errors import NpattnError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.descales import spread
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.comparison import compare_arrays
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence

Factors = Mapping[str, Array]
Alter = Callable[[Factors], Factors]


def descale_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield what may be done wrong with the factors of quantized inputs."""
    f = evidence.trial.implementation
    if f.quantized is None:
        return
    theirs = {meaning: name for name, meaning in f.signature.meanings.items()}
    names = {x: theirs[meaning] for x, meaning in f.quantized.meanings.items()}
    for text, alter in _alterations(f.quantized.per, names):
        yield Candidate(text, text, partial(_explains, alter), "o" if text[0] == "v" else "s")
    for power in POWERS if f.quantized.weights != "input" and set(evidence.wrong) == {"o"} else ():
        size = f"2{str(power).translate(RAISED)}"
        text = f"P is multiplied by {size} before it is stored, and o is not divided by it"
        yield Candidate(text, text, partial(_is_times, power), "o")


def _alterations(per: Mapping[str, str], names: Mapping[str, str]) -> Iterator[tuple[str, Alter]]:
    """Yield mistakes in words, with the factors that they make of the right ones."""
    for x, name in names.items():
        yield f"{name} is ignored: {x} is taken as it is stored", partial(_change, x, np.ones_like)
        for y, other in names.items():
            if x != y and per[x] == per[y]:
                yield f"{x} is multiplied by {other}, must be by {name}", partial(_copy, x, y)
        yield f"{name} is multiplied by twice", partial(_change, x, np.square)
        yield f"{x} is divided by {name}, must be multiplied", partial(_change, x, np.reciprocal)
        if per[x] in ("head", "token"):
            yield f"{name} of the first head is taken for all", partial(_change, x, _first_head)
            yield f"{name} of the first sample is taken for all", partial(_change, x, _first_sample)
        if per[x] in ("block", "token"):
            text = f"{name} of the first {per[x]} is taken for all"
            yield text, partial(_change, x, _first_block)
            for where, step in (("before", 1), ("behind", -1)):
                text = f"{name} of the {per[x]} {where} is taken"
                yield text, partial(_change, x, partial(_beside, step))
    for x in [x for x in names if per[x] == "head"]:
        text = f"query head h is given {names[x]} of key head h % K, must be h // (H / K)"
        yield text, partial(_change, x, _tile)
    if len(names) > 1:
        yield "query head h is given the factors of key head h % K, must be h // (H / K)", _tile_all


POWERS = range(4, 10)
"""Powers of two that P in float8 may be multiplied by: FlashAttention 3 has 8."""
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _is_times(power: int, evidence: Evidence) -> bool:
    """Return True if o is right but for a power of two."""
    exact, tolerance = evidence.exact["o"], evidence.tolerance["o"]
    return set(evidence.wrong) <= {"o"} and all(
        got.shape == exact.shape
        and compare_arrays(
            "o", got.astype(np.float64) / 2**power, exact, tolerance + half_ulp(got) / 2**power
        ).passed
        for got in evidence.observed["o"]
    )


class _PerQueryHead(np.ndarray):
    """Factors (B, K) of which query head h has that of key head h % K."""


def _change(x: str, change: Callable[[Array], Array], factors: Factors) -> Factors:
    return {**factors, x: change(factors[x])}


def _copy(x: str, y: str, factors: Factors) -> Factors:
    return {**factors, x: factors[y]}


def _first_head(factor: Array) -> Array:
    return np.broadcast_to(factor[:, :1], factor.shape)


def _first_sample(factor: Array) -> Array:
    return np.broadcast_to(factor[:1], factor.shape)


def _first_block(factor: Array) -> Array:
    return np.broadcast_to(factor[..., :1], factor.shape)


def _beside(step: int, factor: Array) -> Array:
    return np.roll(factor, step, -1)


def _tile(factor: Array) -> Array:
    return factor.view(_PerQueryHead)


def _tile_all(factors: Factors) -> Factors:
    return {x: _tile(factor) if factor.ndim == 2 else factor for x, factor in factors.items()}


def _explains(alter: Alter, evidence: Evidence) -> bool:
    try:
        with np.errstate(all="ignore"):  # a wrong factor may be beyond every number
            altered = _alter(alter, evidence)
        return evidence.is_of(altered)
    except (NpattnError, ImplementationError):
        return False


def _alter(alter: Alter, evidence: Evidence) -> Problem:
    """Return the problem with other factors."""
    quantized, problem = evidence.trial.implementation.quantized, evidence.problem
    assert quantized is not None
    stored, factors = quantized.split(problem)
    groups = problem.H // problem.K if problem.K else 1
    arrays = {}
    for x, factor in alter(quantized.by_input(factors)).items():
        array, own = getattr(stored, x).astype(np.float64), np.asarray(factor, np.float64)
        if isinstance(factor, _PerQueryHead):
            array = array if x == "q" else np.repeat(array, groups, axis=1)
            own = np.tile(own, (1, groups))
        arrays[x] = array * spread(own, array.shape, quantized.rows.get(x))
    for x in {"k", "v"} - {*arrays}:
        arrays[x] = getattr(problem, x)
    heads = {arrays[x].shape[1] for x in "kv"} if problem.q.ndim == 4 else {problem.K}
    for x in "kv" if len(heads) > 1 else "":
        if arrays[x].shape[1] == problem.K:
            arrays[x] = np.repeat(arrays[x], groups, axis=1)
    dtype = problem.q.dtype
    return problem.replace(**{x: array.astype(dtype) for x, array in arrays.items()})
