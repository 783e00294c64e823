"""Rules about sequences that are stored beside others: packed, in a cache, or in pages [15]."""

from __future__ import annotations

import zlib
from typing import Any

from npattn.problem import Cotangents, Problem
from npattn.testing.rules.calls import experiment
from npattn.testing.trial import Trial, Violation

__all__: list[str] = []


def _takes_none(trial: Trial) -> str | None:
    return "takes no sequences" if trial.implementation.storage is None else None


def _judge_stored(
    trial: Trial, problem: Problem, cotangents: Cotangents, when: str, **storage: Any
) -> float:
    """Return the worst ratio of a problem that is stored in another way."""
    f = trial.implementation.with_storage(**storage)
    results = f.forward(problem)
    if trial.gradients:
        results += f.gradients(problem, cotangents)
    comparisons = trial.compare(results, problem, cotangents)
    wrong = [c for c in comparisons.values() if not c.passed]
    ratio = max((c.ratio for c in comparisons.values()), default=0.0)
    if wrong:
        text = "\n".join([f"{when}:", *map(str, wrong)])
        raise Violation(text, problem, cotangents, "calls", ratio)
    return ratio


@experiment("other-sequences", 24, _takes_none, level="values")
def other_sequences(trial: Trial, problem: Problem, cotangents: Cotangents) -> float:
    """A sequence has the results that it has alone, whatever sequences and pages are beside it.

    Before and behind it are none, one or two, of any lengths, 0 included where it takes such; pages
    are in any order. Broken by offsets that are counted in longest lengths, by a diagonal that
    another sequence places, by the first page of a row of the table for all.
    """
    empties = {"T = 0", "S = 0"} <= trial.space.structure
    seed = 1 + zlib.crc32(problem.q.tobytes())
    when = "depends on the sequences beside it: their number, lengths or pages"
    return _judge_stored(trial, problem, cotangents, when, seed=seed, least=1 - empties)


def _takes_no_nan(trial: Trial) -> str | None:
    f = trial.implementation
    if f.quantized is not None and f.quantized.dtype == "int8":
        return "int8 has no NaN"
    return _takes_none(trial)


@experiment("unread-slots", 12, _takes_no_nan, level="non-finite")
def unread_slots(trial: Trial, problem: Problem, cotangents: Cotangents) -> float:
    """What no sequence has may hold NaN: slots behind its last key, pages that nobody uses.

    So may other sequences. Broken by whole pages that are read and hidden behind the product with
    v, where 0 times NaN is NaN, and by keys beyond the last that take part in a maximum.
    """
    when = "with NaN in other sequences, and in slots that no sequence has"
    return _judge_stored(trial, problem, cotangents, when, unread="nan")
