"""Candidates of o in 8 bits: a factor that is left out or another, and how it is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from npattn.errors import NpattnError
from npattn.problem.arrays import Array
from npattn.problem.descales import spread
from npattn.quantization import largest
from npattn.testing.bounds.delivery import half_gap
from npattn.testing.comparison import compare_arrays
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence

Factors = Callable[[Evidence], Array]
"""Evidence → what the numbers of 8 bits are multiplied by."""


def output_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield what may be done wrong with o that is returned in 8 bits."""
    f = evidence.trial.implementation
    if f.output is None or f.quantized is None or set(evidence.wrong) != {"o"}:
        return
    theirs = {meaning: name for name, meaning in f.signature.meanings.items()}
    name = theirs[f.output.meaning]
    done, opposite = ("multiplied", "divided") if f.output.multiplies else ("divided", "multiplied")
    by_factor: dict[str, Factors] = {
        f"{name} is ignored: o is stored as it is computed": lambda e: np.ones(()),
        f"o is {opposite} by {name}, must be {done}": lambda e: 1 / _right(e),
    }
    if f.output.per != "tensor":
        by_factor[f"{name} of the first head is taken for all"] = lambda e: _right(e)[:, :1]
        by_factor[f"{name} of the first sample is taken for all"] = lambda e: _right(e)[:1]
    if f.output.per in ("block", "token"):
        part = f"{name} of the first {f.output.per} is taken for all"
        by_factor[part] = lambda e: _right(e)[:, :, :1]
    for x, meaning in f.quantized.meanings.items():
        text = f"o is {done} by {theirs[meaning]}, must be by {name}"
        by_factor[text] = partial(_factors_of, x)
    for text, factors in by_factor.items():
        yield _candidate(text, partial(_is_by, factors))


def storage_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield how o may be stored: tried late, for a wrong factor often looks like a cut."""
    output = evidence.trial.implementation.output
    if output is None or set(evidence.wrong) != {"o"}:
        return
    top = f"{largest(output.dtype):g}"
    cut = "o is cut off toward 0 when it is stored, must be rounded to nearest"
    yield _candidate(cut, _is_cut)
    yield _candidate(f"o is not saturated: beyond ±{top} it must be ±{top}", _is_wrapped)


def _candidate(text: str, test: Callable[[Evidence], bool]) -> Candidate:
    return Candidate(text, text, partial(_explains, test), "o")


def _explains(test: Callable[[Evidence], bool], evidence: Evidence) -> bool:
    shape = evidence.exact["o"].shape
    if set(evidence.wrong) - {"o"} or any(o.shape != shape for o in evidence.observed["o"]):
        return False
    try:
        return test(evidence)
    except NpattnError:  # factors of another input may not fit
        return False


def _right(evidence: Evidence) -> Array:
    """Return what the numbers of 8 bits are to be multiplied by."""
    output = evidence.trial.implementation.output
    assert output is not None
    return output.descales(evidence.problem)


def _factors_of(x: str, evidence: Evidence) -> Array:
    """Return the factors of an input as if they were those of o."""
    f, problem = evidence.trial.implementation, evidence.problem
    assert f.quantized is not None
    assert f.output is not None
    _, factors = f.quantized.split(problem)
    own = f.quantized.by_input(factors)[x].astype(np.float64)
    rows = f.quantized.rows.get(x)
    shape = (*problem.lead, *(() if problem.headless else (problem.H,)), problem.T, problem.E)
    found = spread(own, shape, rows)
    return 1 / found if f.output.multiplies else found


def _iterate_stored(evidence: Evidence) -> Iterator[tuple[Array, Array]]:
    """Yield the numbers of 8 bits that were returned, and the exact o."""
    for o in evidence.observed["o"]:
        yield o / _right(evidence), evidence.exact["o"]


def _is_by(factors: Factors, evidence: Evidence) -> bool:
    """Return True if o was divided by other factors, so rounded."""
    other = factors(evidence)
    allowed = evidence.trial.deliver(evidence.problem, evidence.exact["o"], descales=other)
    return all(
        compare_arrays("o", stored * other, exact, allowed).passed
        for stored, exact in _iterate_stored(evidence)
    )


def _is_cut(evidence: Evidence) -> bool:
    """Return True if no number is beyond the exact one, nor a whole gap before it."""
    output = evidence.trial.implementation.output
    assert output is not None
    factor = _right(evidence)
    before = evidence.trial.before_delivery(evidence.problem) / factor
    for stored, exact in _iterate_stored(evidence):
        size, y, top = abs(stored), abs(exact) / factor, largest(output.dtype)
        gap = 2 * half_gap(size, output.dtype)
        apart = (np.sign(stored) != np.sign(exact)) & (size > before)
        early = (size > y + before) | (np.minimum(y - before, top) > size + gap)
        if (apart | early)[np.isfinite(exact)].any() or not np.isfinite(stored).all():
            return False
    return True


def _is_wrapped(evidence: Evidence) -> bool:
    """Return True if what is wrong, if anything, is beyond the largest number."""
    output = evidence.trial.implementation.output
    assert output is not None
    factor = _right(evidence)
    before = evidence.trial.before_delivery(evidence.problem)
    reach = (abs(evidence.exact["o"]) + before) / factor
    within = reach <= largest(output.dtype)
    limits = np.where(within, evidence.tolerance["o"], np.inf)
    with np.errstate(invalid="ignore"):
        return all(
            compare_arrays("o", np.where(within, o, 0), evidence.exact["o"], limits).passed
            for o in evidence.observed["o"]
        )
