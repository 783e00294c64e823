"""Rules about sequences that are stored beside others: packed, in a cache, or in pages [15]."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from npattn.problem import Cotangents, Problem
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.calls import experiment
from npattn.testing.rules.register import requires
from npattn.testing.trial import Trial, Violation

_takes_none = requires(lambda t: t.implementation.storage is not None, "takes no sequences")


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

    So may other sequences. Memory is reserved before it is written to. Broken by whole pages that
    are read and hidden behind the product with v, where 0 times NaN is NaN, and by keys beyond the
    last that take part in a maximum.
    """
    when = "with NaN in other sequences, and in slots that no sequence has"
    return _judge_stored(trial, problem, cotangents, when, unread="nan")


FIRST_PAGE = 2**16
"""Pages that no sequence has before the others, whose ids need more than 16 bits."""
MOST = 2**25
"""Numbers in these pages beyond which they are left out."""


def _takes_no_pages(trial: Trial) -> str | None:
    storage = trial.implementation.storage
    return "takes no pages" if storage is None or storage.keys != "pages" else None


def _smallest(trial: Trial, seed: int, examples: int) -> list[Recipe]:
    """Return a problem with few numbers in a page; none if the sizes of the user are large."""
    space, storage = trial.space, trial.implementation.storage
    D, E = (next(n for n in space.pool(letter) if n) for letter in "DE")
    E = E if "E != D" in space.structure else D
    H, K = min(pair for pair in space.heads if pair[0])
    assert storage is not None
    if FIRST_PAGE * storage.page_size * K * max(D, E) > MOST:
        return []
    return [replace(space.base(), H=H, K=K, D=D, E=E, seed=seed)]


@experiment("page-ids", 1, _takes_no_pages, level="values", recipes=_smallest)
def page_ids(trial: Trial, problem: Problem, cotangents: Cotangents) -> float:
    """The id of a page may be any number, beyond 65 536 too.

    A server has as many pages as its memory holds. Broken by a table of 16 bits, and by an offset
    id · P · K · D that is counted in few.
    """
    when = f"with page ids from {FIRST_PAGE}"
    return _judge_stored(trial, problem, cotangents, when, first_page=FIRST_PAGE)
