"""Rules about the contents of arrays, and about whose memory they are [15].

A result belongs to the contents that the inputs had when the call was made, and its memory to
the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.cases.classes import classes_of_problem
from npattn.testing.cases.recipe import same_bits
from npattn.testing.rules.calls import experiment, judge_call, largest, roll_contents
from npattn.testing.rules.register import first, keeps_nothing, requires
from npattn.testing.trial import Trial, Violation

HELD = 39
"""Calls while one result is held."""


_immutable = first(
    keeps_nothing,
    requires(lambda t: not t.implementation.framework.immutable, "its arrays are immutable"),
)


# --- the same objects with other contents ---


def _other_options(problem: Problem, f: Implementation) -> Problem | None:
    """Return a problem with other mask, bias, sinks and gate; None if it has none of them.

    The mask hides fewer positions, so that no row loses its last key; a bias of −inf stays. Where
    masks are lengths or lists, other ones make arrays of other shapes.
    """
    problem = problem.materialise()
    changes: dict[str, Array] = {}
    if problem.mask is not None and f.storage is None and f.key_lists is None:
        mask = np.asarray(problem.mask)
        changes["mask"] = mask | np.roll(mask, 1)
    for name in ("bias", "sinks", "gate"):
        array = getattr(problem, name)
        if array is not None:
            steps = np.arange(array.size).reshape(array.shape) % 5 / 4
            changes[name] = array + steps.astype(array.dtype)
    return problem.replace(**changes) if changes else None


@experiment("arrays-reused", 6, _immutable)
def arrays_reused(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """Results belong to the contents that the arrays had when the call was made.

    The inputs are overwritten before the results are read, q, k and v with NaN, and the same
    objects are passed again with other contents: first q, k and v, then masks and biases alone,
    for a cache may know the one by its contents and the other by its address. Broken by results
    that are views of inputs or computed when they are read, by static graphs, and by caches that
    know an array by its address or its identity.
    """
    f = trial.implementation
    nan = {n: np.full_like(getattr(problem, n), np.nan) for n in "qkv"}
    spoilt = (_other_options(problem, f) or problem).replace(**nan)
    inputs = f.inputs(problem)
    ratios: list[float | None] = []

    def write(contents: Problem) -> None:
        for name, array in f.inputs(contents).items():
            inputs[name][...] = array

    def ask(problem_now: Problem, before_reading: Callable[[], None], when: str) -> None:
        write(problem_now)
        results = f.forward(problem_now, inputs=inputs, before_reading=before_reading)
        if trial.gradients:
            write(problem_now)
            results += f.gradients(
                problem_now, cotangents, inputs=inputs, before_reading=before_reading
            )
        ratios.append(judge_call(trial, results, problem_now, cotangents, when))

    changed = "where the inputs changed before the results were read"
    ask(problem, lambda: write(spoilt), changed)
    other = roll_contents(f, problem, 1)
    ask(other, lambda: None, "where the same objects hold other contents")
    if "mask" in trial.space.features and _other_options(other, f) is None:
        t, s = np.ogrid[: problem.T, : problem.S]
        masked = other.replace(mask=(t + s) % 2 == 0)
        if not trial.space.refuses(classes_of_problem(masked)):
            other, inputs = masked, f.inputs(masked)
            ask(other, lambda: None, "where a mask comes with them")
    options = _other_options(other, f)
    if options is not None:
        ask(options, lambda: None, "where the same mask, bias, sinks or gate hold other contents")
    return largest(ratios)


# --- other objects with nearly the same contents ---


def _like(
    f: Implementation, problem: Problem, rng: np.random.Generator
) -> Iterator[tuple[str, Problem]]:
    """Yield problems that differ from one of whole numbers in little, and say in what."""
    for name in "qkv":
        array = getattr(problem, name)
        yield (
            f"{name} holds the same numbers in another order",
            problem.replace(**{name: np.roll(array, 1)}),
        )
        changed = array.copy()
        if array.size > 2:  # neither of the ends
            changed.reshape(-1)[rng.integers(1, array.size - 1)] += array.dtype.type(3)
            yield f"one number of {name} differs", problem.replace(**{name: changed})
    if problem.mask is not None:
        mask = np.asarray(problem.mask)
        hidden = np.argwhere(~mask)
        if len(hidden):
            mask = mask.copy()
            mask[tuple(rng.choice(hidden))] = True
            yield "one position of the mask differs", f.fit(problem.replace(mask=mask))


@experiment("nearly-same-contents", 2)
def nearly_same_contents(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """Inputs with nearly the contents of an earlier call have results of their own.

    q, k and v are whole numbers, whose sums are exact in any order: in another order they have the
    same sums, and where one number differs the same ends. Broken by caches that know contents by a
    sum, a sample or the ends, or by a part of the inputs alone.
    """
    rng = np.random.default_rng([problem.q.size, problem.v.size, 31])
    inputs = {n: getattr(problem, n) for n in "qkv"}
    integers = {n: rng.integers(-3, 4, x.shape).astype(x.dtype) for n, x in inputs.items()}
    plain = problem.materialise().replace(**integers)
    first, ratios = trial.results(plain, cotangents), [0.0]
    right = [n for n, c in trial.compare(first, plain, cotangents).items() if c.passed]
    for difference, like in _like(trial.implementation, plain, rng):
        results = trial.results(like, cotangents)
        found = trial.compare(results, like, cotangents)
        wrong = [n for n in right if n in found and not found[n].passed]
        # What was wrong before is no answer of the earlier call: agreement reports it.
        stale = [n for n in wrong if same_bits(first[n], results[n])]
        if stale:
            text = (
                f"{', '.join(stale)} as of an earlier call, where only this differs: {difference}"
            )
            text = "\n".join([text, *(str(found[n]) for n in stale)])
            raise Violation(text, like, cotangents, "calls", max(found[n].ratio for n in stale))
        ratios += [c.ratio for c in found.values() if c.passed]
    return max(ratios)


# --- whose memory a result is ---


@experiment("outputs-kept", 2, keeps_nothing)
def outputs_kept(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """A result keeps its contents while forty calls of the same shapes are made.

    A caller may keep what it was given, as long as it likes. Broken by output buffers that are used
    again, one or a few by turns, and by arenas that are freed.
    """
    f = trial.implementation
    others = [roll_contents(f, problem, n) for n in range(1, HELD + 1)]
    results = f.forward(problem, before_reading=lambda: [f.forward(x) for x in others])
    if trial.gradients:
        results += f.gradients(
            problem, cotangents, before_reading=lambda: [f.gradients(x, cotangents) for x in others]
        )
    when = f"read after {HELD} other calls"
    return judge_call(trial, results, problem, cotangents, when)


@experiment("outputs-apart", 8, _immutable, square=True, sizes={"T": (1,)})
def outputs_apart(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """The memory of a result belongs to nobody else: no input, no other result, no later call.

    There is one query and one key, so that o equals v and gradients are 0: few calls show it. The
    caller may write to what it was given. A view of a fresh buffer is fine, and so are parts
    of one that do not overlap. Broken by returning an input where the answer equals it, one array
    for two gradients, and a cached array itself.
    """
    if "mask" not in trial.space.always:
        problem = problem.replace(mask=None)  # it may hide the only key
    f, first = trial.implementation, trial.against_oracle(problem, cotangents)
    asked = cotangents if trial.gradients else None
    for name, other in f.overwrite_results(problem, asked):
        text = f"{name} shares memory with {other}"
        raise Violation(text, problem, cotangents, "calls")
    again = trial.compare(trial.results(problem, cotangents), problem, cotangents)
    wrong = [c for c in again.values() if not c.passed and first[c.name].passed]
    if wrong:
        when = "after the caller wrote to the results of an earlier call with the same contents"
        text = "\n".join([f"results are wrong {when}:", *map(str, wrong)])
        raise Violation(text, problem, cotangents, "calls", max(c.ratio for c in wrong))
    return max((c.ratio for c in again.values() if c.passed), default=0.0)
