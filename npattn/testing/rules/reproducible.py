"""Rules about bits: those of a row, computed in another call, batch or number of threads [15].

They are measured, and not required unless asked for: what trains on its own samples needs them,
and most kernels choose their order of summation by the sizes of the whole call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.base import Results
from npattn.testing.rules.calls import experiment
from npattn.testing.rules.order_and_parts import pad
from npattn.testing.rules.register import (
    first,
    hidden_keys_matter,
    in_bytes,
    needs,
    refuses,
    single,
)
from npattn.testing.rules.relate import (
    Pick,
    pick,
    pick_cotangents,
    pick_keys,
    pick_problem,
    pick_queries,
    pick_samples,
    put_back_cotangents,
)
from npattn.testing.rules.terms import fits_sizes, hidden_keys_count
from npattn.testing.trial import Trial, Violation

SIZES = {"B": (3,), "T": (16, 33, 24), "S": (64, 130, 96), "D": (64,)}
"""Large enough for a kernel to choose between orders of summation."""
ROWS = ("o", "lse", "weights", "max_score", "dq")
SAMPLES = (*ROWS, "dk", "dv")
PADDING = 31
"""Keys that are added and hidden."""
_experiment = partial(experiment, count=3, level="reproducible", sizes=SIZES)


def _compare_bits(
    in_padding: Results,
    part: Results,
    picks: Sequence[Pick],
    names: Sequence[str],
    problem: Problem,
    cotangents: Cotangents,
    when: str,
) -> None:
    """Raise Violation if entries of the whole have other bits than those of a part."""
    lines, size, count = [], 0, 0
    for name in names:
        if name not in in_padding or name not in part:
            continue
        here, there = pick(name, in_padding[name], picks), part[name]
        alike = here.shape == there.shape and here.dtype == there.dtype
        if not alike or here.dtype.kind in "biuc":
            continue  # other rules report it
        # As integers; NaN is NaN, whatever its payload.
        numbers = (np.where(np.isnan(x), np.array(np.nan, x.dtype), x) for x in (here, there))
        bits = [np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in numbers]
        differ = bits[0] != bits[1]
        size, count = size + differ.size, count + int(differ.sum())
        if differ.any():
            with np.errstate(invalid="ignore"):  # inf − inf
                gap = np.max(abs(here.astype(float) - there.astype(float)), initial=0)
            lines.append(
                f"{name}: {int(differ.sum())} of {differ.size} elements, by up to {gap:.3g}"
            )
    if lines:
        text = "\n".join([f"other bits {when}:", *lines])
        raise Violation(text, problem, cotangents, "calls", ratio=float("inf"))


@_experiment("same-bits-again")
def same_bits_again(trial: Trial, problem: Problem, cotangents: Cotangents) -> float:
    """The same call again, with arrays at another alignment, gives the same bits.

    Rule repeatable asks it of arrays that are as aligned as before, and is required. Broken by sums
    in vectors that begin where the memory is aligned, by atomic additions.
    """
    results = trial.results(problem, cotangents)
    shifted = trial.results(problem, cotangents, "shifted")
    names = tuple(results)
    _compare_bits(results, shifted, (), names, problem, cotangents, "at another alignment")
    return 0.0


_queries = first(in_bytes, single("T"))
_several = first(in_bytes, refuses("rank 4", "rank 5"), single("B"))


@_experiment("same-bits-in-batch", unless=_several)
def same_bits_in_batch(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """A sample has the same bits alone, and at another place in the batch.

    Requests come in batches of any size, and should not change each other. Broken by kernels that
    choose splits, tiles or an order of sums by the size of the batch.
    """
    if not problem.lead or problem.lead[0] < 2:
        return None
    results = trial.results(problem, cotangents)
    B = problem.lead[0]
    orders = {"at another place in the batch": np.roll(np.arange(B), 1)}
    if fits_sizes(trial, B=1):
        orders["alone in the batch"] = np.array([B - 1])
    for when, order in orders.items():
        picks = [pick_samples(problem, order)]
        other = pick_problem(problem, picks), pick_cotangents(cotangents, picks)
        _compare_bits(results, trial.results(*other), picks, SAMPLES, problem, cotangents, when)
    return 0.0


@_experiment("same-bits-beside-others", unless=_several)
def same_bits_beside_others(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """A sample has the same bits whatever the other samples of the batch hold.

    No sum of a sample has terms of another. Broken by a scale, a maximum or a skipped tile that is
    decided for all samples together.
    """
    if not problem.lead or problem.lead[0] < 2:
        return None
    picks = [pick_samples(problem, np.array([0]))]
    arrays = {name: getattr(problem, name) for name in "qkv"}
    if any(len(x) == 1 for x in arrays.values()):
        return None  # it broadcasts
    arrays = {n: np.concatenate([x[:1], np.roll(x[1:], 1)]) for n, x in arrays.items()}
    results = trial.results(problem, cotangents)
    others = trial.results(problem.replace(**arrays), cotangents)
    part = Results(tuple((name, pick(name, x, picks)) for name, x in others.pairs))
    when = "beside other samples"
    _compare_bits(results, part, picks, SAMPLES, problem, cotangents, when)
    return 0.0


@_experiment(
    "same-bits-padded", unless=first(in_bytes, needs("mask"), hidden_keys_matter, refuses("T != S"))
)
def same_bits_padded(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """A row has the same bits with more keys that the mask hides.

    A hidden key adds exactly 0 to every sum. Broken by splits and orders of sums that are chosen by
    the length with its padding.
    """
    S = max(trial.space.sizes.get("S", (problem.S + PADDING,)))
    if S <= problem.S or not fits_sizes(trial, T=problem.T, S=S):
        return None
    if hidden_keys_count(trial, problem) or problem.score_mod is not None:
        return None
    padding = np.arange(S) >= problem.S
    keys = np.where(padding, 0, np.arange(S))
    aligned_last = trial.conventions.causal == "bottom_right"
    if aligned_last and (problem.causal or problem.window is not None):
        padding, keys = (np.roll(x, S - problem.S) for x in (padding, keys))
    padded = pad(trial, problem, padding, keys)
    picks = [pick_keys(padded, np.flatnonzero(~padding))]
    in_padding = trial.results(padded, put_back_cotangents(cotangents, picks, padded))
    plain, when = trial.results(problem, cotangents), "with padding"
    _compare_bits(in_padding, plain, picks, SAMPLES, problem, cotangents, when)
    return 0.0


@_experiment("same-bits-in-parts", unless=_queries)
def same_bits_in_parts(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """A row has the same bits if its queries come in several calls, down to one query each.

    A prompt is read in parts, and decoded query by query. Broken by another kernel for one query,
    by tiles and splits that are chosen by the number of queries.
    """
    if problem.score_mod is not None:
        return None
    results = trial.results(problem, cotangents)
    tried = False
    for count in (1, problem.T // 2):
        # Aligned with the same keys.
        last = trial.conventions.causal == "bottom_right"
        order = np.arange(problem.T)[-count:] if last else np.arange(count)
        if not 0 < count < problem.T or not fits_sizes(trial, T=count, S=problem.S):
            continue
        tried = True
        picks = [pick_queries(problem, order)]
        part = trial.results(pick_problem(problem, picks), pick_cotangents(cotangents, picks))
        when = f"with {count} of {problem.T} queries"
        _compare_bits(results, part, picks, ROWS, problem, cotangents, when)
    return 0.0 if tried else None


def _fixed_threads(trial: Trial) -> str | None:
    framework = trial.implementation.framework
    fixed = f"the number of threads of {framework.name} is fixed when the process starts"
    return fixed if framework.threads(1) is None else None


@_experiment("same-bits-threads", unless=_fixed_threads)
def same_bits_threads(trial: Trial, problem: Problem, cotangents: Cotangents) -> float:
    """Another number of threads gives the same bits.

    What computes on a server should give what was computed on a laptop. Broken by sums that are
    split among the threads, each of which adds its part first.
    """
    by_count = []
    for count in (1, 2):
        threads = trial.implementation.framework.threads(count)
        assert threads is not None
        with threads:
            by_count.append(trial.results(problem, cotangents))
    one, several = by_count
    names, when = tuple(one), "with two threads"
    _compare_bits(one, several, (), names, problem, cotangents, when)
    return 0.0
