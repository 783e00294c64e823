"""Candidates of arrays of 8 bits: a factor left out, twice, inverse, or of another array or part.

Also how o of 8 bits is stored, and gradients of numbers as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from npattn.errors import NpattnError
from npattn.problem.arrays import Array
from npattn.problem.descales import spread
from npattn.quantization import largest
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.quantized import QuantizedOutput
from npattn.testing.bounds.delivery import half_gap
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.comparison import compare_arrays
from npattn.testing.diagnosis.evidence import Candidate, Evidence

POWERS = range(4, 10)
"""Powers of two that P in float8 may be multiplied by: FlashAttention 3 has 8."""
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
PARTS = {"tensor": (), "head": ("sample", "head")}
"""Parts that have a factor of their own, by axis; blocks and tokens have one axis more."""
Change = Callable[[Array], Array]


def descale_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield what may be done wrong with the factors of inputs, of P and of o, and how o is stored.

    A wrong factor comes before storage, for it often looks like a cut.
    """
    f, wrong = evidence.trial.implementation, {*evidence.wrong}
    if f.quantized is None:
        return
    theirs = {meaning: name for name, meaning in f.signature.meanings.items()}
    names = {x: theirs[meaning] for x, meaning in f.quantized.meanings.items()}
    if f.output is not None and wrong == {"o"}:
        done = "multiplied" if f.output.multiplies else "divided"
        own = {**names, "o": theirs[f.output.meaning]}
        for text, y, change in _mistakes("o", done, f.output.per, own):
            yield _candidate(text, "o", partial(_is_stored_by, y, change))
    for x, per in f.quantized.per.items():
        for text, y, change in _mistakes(x, "multiplied", per, names):
            yield _candidate(text, "o" if x == "v" else "s", partial(_is_of_factor, x, y, change))
    if len(names) > 1:
        text = "query head h is given the factors of key head h % K, must be h // (H / K)"
        yield _candidate(text, "s", _is_tiled)
    for power in POWERS if f.quantized.weights != "input" and wrong == {"o"} else ():
        size = f"2{str(power).translate(RAISED)}"
        text = f"P is multiplied by {size} before it is stored, and o is not divided by it"
        yield _candidate(text, "o", partial(_is_times, "o", 2.0**power))
    if f.output is not None and wrong == {"o"}:
        top = f"{largest(f.output.dtype):g}"
        cut = "o is cut off toward 0 when it is stored, must be rounded to nearest"
        yield _candidate(cut, "o", partial(_is_cut, f.output))
        beyond = f"o is not saturated: beyond ±{top} it must be ±{top}"
        yield _candidate(beyond, "o", partial(_is_wrapped, f.output))
    for x, name in names.items():
        if f.has_gradients and wrong == {f"d{x}"}:
            text = f"d{x} is multiplied by {name}: it is that of {x} as it is stored"
            yield _candidate(text, f"d{x}", partial(_is_of_stored, x, 1))
            yield _candidate(f"d{x} is divided by {name}", f"d{x}", partial(_is_of_stored, x, -1))


def _mistakes(
    x: str, done: str, per: str, names: Mapping[str, str]
) -> Iterator[tuple[str, str, Change]]:
    """Yield mistakes with the factor of an array: in words, whose factor is taken, and as what."""
    name, stored = names[x], "stored as it is computed" if x == "o" else "taken as it is stored"
    yield f"{name} is ignored: {x} is {stored}", x, np.ones_like
    for y in [y for y in names if y != x]:
        yield f"{x} is {done} by {names[y]}, must be by {name}", y, np.asarray
    yield f"{x} is {done} by {name} twice", x, np.square
    opposite = "divided" if done == "multiplied" else "multiplied"
    yield f"{x} is {opposite} by {name}, must be {done}", x, np.reciprocal
    for axis, part in enumerate(PARTS.get(per, ("sample", "head", per))):
        yield f"{name} of the first {part} is taken for all", x, partial(_take_first, axis)
    if per in ("block", "token"):
        for where, step in (("before", 1), ("behind", -1)):
            yield f"{name} of the {per} {where} is taken", x, partial(np.roll, shift=step, axis=-1)


def _take_first(axis: int, factor: Array) -> Array:
    first = factor.swapaxes(0, axis)[:1].swapaxes(0, axis)
    return np.broadcast_to(first, factor.shape)


def _candidate(text: str, step: str, test: Callable[[Evidence], bool]) -> Candidate:
    return Candidate(text, text, partial(_explains, test), step)


def _explains(test: Callable[[Evidence], bool], evidence: Evidence) -> bool:
    try:
        with np.errstate(all="ignore"):  # a wrong factor may be beyond every number
            return test(evidence)
    except (NpattnError, ImplementationError):  # factors of another array may not fit
        return False


def _factor(y: str, change: Change, shape: tuple[int, ...], evidence: Evidence) -> Array:
    """Return the factor of an array, changed, as it broadcasts against one of a shape."""
    f, problem = evidence.trial.implementation, evidence.problem
    if y == "o" and f.output is not None:
        return spread(change(f.output.factors(problem)).astype(np.float64), shape, f.output.rows)
    assert f.quantized is not None
    _, factors = f.quantized.split(problem)
    own = change(f.quantized.by_input(factors)[y]).astype(np.float64)
    return spread(own, shape, f.quantized.rows.get(y))


def _is_of_inputs(arrays: Mapping[str, Array], evidence: Evidence) -> bool:
    """Return True if all results are within tolerance of those for other inputs."""
    trial, problem = evidence.trial, evidence.problem.replace(**arrays)
    exact = trial.exact(problem, evidence.cotangents)
    tolerance = trial.tolerance(problem, evidence.cotangents, exact, asked=evidence.problem)
    return evidence.is_within(exact, tolerance)


def _is_of_factor(x: str, y: str, change: Change, evidence: Evidence) -> bool:
    """Return True if another factor of an input gives the results."""
    array = getattr(evidence.problem, x)
    stored = array.astype(np.float64) / _factor(x, np.asarray, array.shape, evidence)
    other = stored * _factor(y, change, array.shape, evidence)
    return _is_of_inputs({x: other.astype(array.dtype)}, evidence)


def _is_tiled(evidence: Evidence) -> bool:
    """Return True if query head h with the factors of key head h % K gives the results."""
    problem, quantized = evidence.problem, evidence.trial.implementation.quantized
    assert quantized is not None
    groups = problem.H // max(problem.K, 1)
    _, factors = quantized.split(problem)
    arrays = {x: np.repeat(getattr(problem, x), groups if x != "q" else 1, 1) for x in "qkv"}
    for x, factor in quantized.by_input(factors).items():
        if factor.ndim == 2:
            other = np.tile(factor, (1, groups)).astype(np.float64) / np.repeat(factor, groups, 1)
            arrays[x] = (arrays[x] * other[..., None, None]).astype(problem.q.dtype)
    return _is_of_inputs(arrays, evidence)


def _all_pass(name: str, evidence: Evidence, passes: Callable[[Array], bool]) -> bool:
    """Return True if every result of a name has its shape and passes, and no other is wrong."""
    shape = evidence.exact[name].shape
    return {*evidence.wrong} <= {name} and all(
        x.shape == shape and passes(x) for x in evidence.observed[name]
    )


def _is_stored_by(y: str, change: Change, evidence: Evidence) -> bool:
    """Return True if o was stored with another factor, so rounded."""
    trial, problem, exact = evidence.trial, evidence.problem, evidence.exact["o"]
    output = trial.implementation.output
    assert output is not None
    other = _factor(y, change, exact.shape, evidence)
    other = 1 / other if output.multiplies else other
    allowed = trial.deliver(problem, exact, descales=other)
    times = other / output.descales(problem)
    return _all_pass("o", evidence, lambda o: compare_arrays("o", o * times, exact, allowed).passed)


def _is_times(name: str, times: Array | float, evidence: Evidence) -> bool:
    """Return True if a result is right but for a factor."""
    exact, tolerance = evidence.exact[name], evidence.tolerance[name]

    def is_right(x: Array) -> bool:
        allowed = tolerance + half_ulp(x) / times
        return compare_arrays(name, x.astype(np.float64) / times, exact, allowed).passed

    return _all_pass(name, evidence, is_right)


def _is_of_stored(x: str, power: int, evidence: Evidence) -> bool:
    """Return True if the gradient of an input has its factor, to a power, too much."""
    name = f"d{x}"
    factor = _factor(x, np.asarray, evidence.exact[name].shape, evidence)
    return _is_times(name, factor**power, evidence)


def _is_cut(output: QuantizedOutput, evidence: Evidence) -> bool:
    """Return True if each number is nearer to 0 than the exact one, by less than the gap there."""
    factor, top = output.descales(evidence.problem), largest(output.dtype)
    want = np.clip(evidence.exact["o"] / factor, -top, top)
    before = evidence.trial.before_delivery(evidence.problem) / factor

    def is_cut(o: Array) -> bool:
        half = half_gap(abs(o / factor), output.dtype)
        middle = o / factor + np.sign(want) * half
        return compare_arrays("o", middle, want, half + before).passed

    return _all_pass("o", evidence, is_cut)


def _is_wrapped(output: QuantizedOutput, evidence: Evidence) -> bool:
    """Return True if what is wrong, if anything, is beyond the largest number."""
    exact = evidence.exact["o"]
    reach = abs(exact) + evidence.trial.before_delivery(evidence.problem)
    within = reach <= largest(output.dtype) * output.descales(evidence.problem)
    limits = np.where(within, evidence.tolerance["o"], np.inf)
    return _all_pass(
        "o", evidence, lambda o: compare_arrays("o", np.where(within, o, 0), exact, limits).passed
    )
