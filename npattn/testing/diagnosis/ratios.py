"""Candidates of a wrong factor: results that are right but for √D, ln 2, −1, the group size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence, problem_size

FACTORS: dict[str, Callable[[Problem], float]] = {
    "0": lambda p: 0.0,
    "−1": lambda p: -1.0,
    "2": lambda p: 2.0,
    "1/2": lambda p: 0.5,
    "ln 2": lambda p: math.log(2),
    "1/ln 2": lambda p: 1 / math.log(2),
    "√D": lambda p: math.sqrt(p.D),
    "1/√D": lambda p: 1 / math.sqrt(p.D),
    "1/scale": lambda p: 1 / _scale(p),
    "scale": lambda p: _scale(p),
    "−scale": lambda p: -_scale(p),
    "D": lambda p: p.D,
    "1/D": lambda p: 1 / p.D,
    "G": lambda p: p.H / p.K,
    "1/G": lambda p: p.K / p.H,
    "H": lambda p: p.H,
    "1/H": lambda p: 1 / p.H,
    "B": lambda p: math.prod(p.lead),
    "1/B": lambda p: 1 / math.prod(p.lead),
    "T": lambda p: p.T,
    "1/T": lambda p: 1 / p.T,
    "S": lambda p: p.S,
    "1/S": lambda p: 1 / p.S,
    "√E": lambda p: math.sqrt(p.E),
    "1/√E": lambda p: 1 / math.sqrt(p.E),
    "(1 − rate)": lambda p: 1 - p.dropout_rate,
    "1/(1 − rate)": lambda p: 1 / (1 - p.dropout_rate),
    "softcap": lambda p: p.softcap or math.nan,
    "1/softcap": lambda p: 1 / (p.softcap or math.nan),
}
"""Factors by which results may be wrong, those with a number first, then those with letters."""
REASONS = {
    "√D": "the scale is missing in {}",
    "1/scale": "the scale is missing in {}",
    "1/√D": "the scale is applied twice in {}",
    "scale": "the scale is applied twice in {}",
    "ln 2": "natural and base-2 logarithms are mixed in {}",
    "1/ln 2": "natural and base-2 logarithms are mixed in {}",
    "1/G": "the heads of a group are averaged, or one is taken, in {}",
    "1/B": "the batch is averaged in {}",
    "(1 − rate)": "1/(1 − rate) of the dropout is missing in {}",
    "1/(1 − rate)": "1/(1 − rate) of the dropout is applied twice in {}",
    "−1": "the sign of {} is wrong",
}
ENOUGH = 8
"""Elements from which a factor is fitted: one number is any multiple of another."""
MOST = 40
"""Most combinations of factors that are tried for one problem."""


def ratio_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the factors that turn the exact values of one problem into the wrong ones."""
    fitting = {name: _fitting(evidence, name) for name in evidence.wrong}
    if not fitting or not all(fitting.values()):
        return
    for factors in islice(product(*fitting.values()), MOST):
        by_name = dict(zip(fitting, factors, strict=True))
        name = ", ".join(f"{n}: {x}" for n, x in by_name.items())
        text = _describe(by_name, evidence.problem)
        yield Candidate("ratio", name, text, partial(_explains, by_name), topic=", ".join(by_name))


def is_fitted(candidate: Candidate) -> bool:
    """Return True for a factor that is a number without a meaning, fitted to one problem."""
    if candidate.kind != "ratio":
        return candidate.kind == "factor"
    return any(part.split(": ")[1] not in FACTORS for part in candidate.name.split(", "))


def _scale(problem: Problem) -> float:
    assert problem.scale is not None
    return problem.scale


def _fitting(evidence: Evidence, name: str) -> list[str]:
    """Return the factors that explain one result; one that is fitted comes last.

    Where different numbers do, the tolerance is too wide to tell, and none is named.
    """
    factors = [*FACTORS, *_fit(evidence, name)]
    fitting = [
        x
        for x in factors
        if math.isfinite(_value(x, evidence.problem))  # NaN is no factor of a NaN
        and evidence.reproduces(name, [_predict(evidence, name, x)])
    ]
    values = [_value(x, evidence.problem) for x in fitting if x in FACTORS]
    return fitting if all(math.isclose(x, values[0]) for x in values) else []


def _fit(evidence: Evidence, name: str) -> Iterator[str]:
    """Yield the factor of least squares, if there is one: finite real numbers have one."""
    got, exact = evidence.observed[name][0], evidence.exact[name]
    if got.shape != exact.shape or np.iscomplexobj(got):
        return
    got = got.astype(float)
    if not (np.isfinite(exact).all() and np.isfinite(got).all()):
        return
    if np.count_nonzero(exact) >= ENOUGH:
        yield repr(float((got * exact).sum() / (exact**2).sum()))


def _value(factor: str, problem: Problem) -> float:
    try:
        return FACTORS[factor](problem) if factor in FACTORS else float(factor)
    except ZeroDivisionError:
        return math.nan


def _predict(evidence: Evidence, name: str, factor: str) -> Array:
    value = _value(factor, evidence.problem)
    with np.errstate(invalid="ignore"):  # inf · 0
        return np.asarray(evidence.exact[name] * value)


def _explains(by_name: dict[str, str], evidence: Evidence) -> bool:
    if not all(math.isfinite(_value(x, evidence.problem)) for x in by_name.values()):
        return False
    predicted = {
        name: [_predict(evidence, name, by_name[name]) if name in by_name else exact]
        for name, exact in evidence.exact.items()
    }
    return evidence.reproduced_by([predicted])


def _describe(by_name: dict[str, str], problem: Problem) -> str:
    """Describe wrong factors: "dk is √D times too large (8.00 at D = 64): ..."."""
    parts = []
    for factor in dict.fromkeys(by_name.values()):
        names = [n for n, x in by_name.items() if x == factor]
        parts.append(_sentence(_enumerate(names), len(names) > 1, factor, problem))
    return "; ".join(parts)


def _sentence(names: str, plural: bool, factor: str, problem: Problem) -> str:
    be = "are" if plural else "is"
    value = _value(factor, problem)
    if factor == "0":
        return f"{names} {be} 0"
    if factor not in FACTORS:
        return f"{names} {be} multiplied by {format_factor(value)}"
    if factor == "−1":
        return f"{names} {be} negated: {REASONS[factor].format(names)}"
    inverse = factor.removeprefix("1/")
    size = "small" if inverse != factor else "large"
    letters = [x for x in "BHTSDE" if x in factor]
    at = ", ".join(f"{x} = {problem_size(problem, x)}" for x in letters)
    number = value if inverse == factor else 1 / value
    if inverse == "scale":  # which is below 1 as a rule, so that "times too" would confuse
        verb = "divided" if inverse != factor else "multiplied"
        text = f"{names} {be} {verb} by scale once too often"
    else:
        text = f"{names} {be} {inverse.strip('()')} times too {size}"
    if not factor.strip("1/").isdigit():
        text += f" ({number:.2f}{f' at {at}' if at else ''})"
    reason = REASONS.get(factor)
    return f"{text}: {reason.format(names)}" if reason else text


def format_factor(value: float) -> str:
    """Print a factor so that one beside 1 differs from it."""
    near = 0 < abs(value - 1) < 1e-4
    return f"1 {'+' if value > 1 else '−'} {abs(value - 1):.2g}" if near else f"{value:.6g}"


def _enumerate(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
