"""Causes of sequences and packed arrays: what is read that belongs to another, or in another order.

A misreading that the judge can share is the cause if every wrong result is right then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.storage import MISREADINGS
from npattn.testing.diagnosis.evidence import Candidate, Evidence, Found
from npattn.testing.trial import GRADIENTS

SLOTS = "it reads slots that no sequence has: behind the last key, or in pages that no table names"
OTHERS = "it reads keys of another sequence"
ALONE = (
    "a sequence is right alone, and wrong where others are beside it: an offset, a longest length "
    "or a row of the table is not its own"
)


def find_sequence_causes(evidence: Sequence[Evidence]) -> Found:
    """Find what is wrong by the places of sequences, or by the order of a packed array."""
    left = list(evidence)
    found: Found = []
    for text, explains in CAUSES:
        claimed = [e for e in left if explains(e)]
        if claimed:
            step = "layout" if text in LAYOUTS else "visible" if text in READS else "s"
            found.append((Candidate(text, text, explains, step, ""), claimed))
            left = [e for e in left if e not in claimed]
    reads = [x for x in found if x[0].text in READS]
    if len(reads) > 1:  # of whom a wrong place is depends on the problem
        reads.sort(key=lambda x: -len(x[1]))
        text = "; ".join(candidate.text for candidate, _ in reads)
        tests = [candidate.explains for candidate, _ in reads]
        whole = Candidate(text, text, lambda e: any(f(e) for f in tests), "visible", "")
        found = [(whole, [e for _, own in reads for e in own])] + [
            x for x in found if x not in reads
        ]
    return [(_of_backward(c, own), own) for c, own in found]


def _of_backward(candidate: Candidate, claimed: Sequence[Evidence]) -> Candidate:
    """Return a cause that is said of the backward if the forward is right."""
    if any({"o", "lse"} & {*e.wrong} for e in claimed):
        return candidate
    return replace(candidate, text=f"in the backward {candidate.text}", where="backward:")


def _call(
    f: Implementation, problem: Problem, cotangents: Cotangents, names: Iterable[str]
) -> Results:
    """Return results, with gradients if one of the names is of a gradient."""
    results = f.forward(problem)
    wanted = f.has_gradients and any(name in GRADIENTS for name in names)
    return results + f.gradients(problem, cotangents) if wanted else results


def _reads(what: str, evidence: Evidence) -> bool:
    """Return True if a wrong o, lse or dv changes with numbers that nobody may read.

    dq and dk also change with them by a δ of another sequence.
    """
    f, wrong = evidence.trial.implementation, {"o", "lse", "dv"} & {*evidence.wrong}
    if f.storage is None or not wrong:
        return False
    try:
        plain, other = (
            _call(one, evidence.problem, evidence.cotangents, wrong)
            for one in (f, f.with_storage(renewed=what))
        )
    except ImplementationError:
        return False
    pairs = zip(plain.pairs, other.pairs, strict=True)
    return any(
        not np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")
        for (name, x), (_, y) in pairs
        if name in wrong
    )


def _is_right(
    evidence: Evidence,
    f: Implementation,
    problem: Problem | None = None,
    cotangents: Cotangents | None = None,
) -> bool:
    """Return True if what is wrong is right of the same function, called in another way."""
    problem, cotangents = problem or evidence.problem, cotangents or evidence.cotangents
    wrong = evidence.wrong
    try:
        results = _call(f, problem, cotangents, wrong)
        found = evidence.trial.compare(results, problem, cotangents)
    except ImplementationError:
        return False
    return all(found[name].passed for name in wrong if name in found)


def _is_right_with(needs: str, changes: Mapping[str, Any], evidence: Evidence) -> bool:
    """Return True if it has a parameter, and is right if its sequences are stored otherwise."""
    f = evidence.trial.implementation
    has = f.storage is not None and needs in {*f.storage.takes, f.storage.keys}
    return has and _is_right(evidence, f.with_storage(**changes))


def _is_right_in(order: str, evidence: Evidence) -> bool:
    """Return True if it is right if its packed array has another order."""
    f = evidence.trial.implementation
    other = f.packing is not None and f.packing.order != order
    return other and _is_right(evidence, f.with_packing(order=order))


def _is_right_alone(evidence: Evidence) -> bool:
    """Return True if each sample is right in a call of its own."""
    if evidence.trial.implementation.storage is None:
        return False
    f, problem = evidence.trial.implementation.with_storage(beside=False), evidence.problem
    samples = (
        _sample(problem, evidence.cotangents, slice(b, b + 1)) for b in range(problem.q.shape[0])
    )
    return all(_is_right(evidence, f, *sample) for sample in samples)


def _sample(problem: Problem, cotangents: Cotangents, b: slice) -> tuple[Problem, Cotangents]:
    """Return one sample of a problem, and what comes back to it."""
    problem = problem.materialise()
    changes = {name: getattr(problem, name)[b] for name in "qkv"}
    mask = problem.mask_array
    if mask is not None and mask.ndim == 4 and len(mask) > 1:
        changes["mask"] = mask[b]
    dlse = None if cotangents.dlse is None else cotangents.dlse[b]
    return problem.replace(**changes), Cotangents(cotangents.dout[b], dlse)


NEEDS = {"columns": "packed mask", "order": "pages"}
"""Needs of a misreading; the others need a rotary table."""
WITHOUT = {
    "cosines": "it is right without a rotary table, and wrong with one",
    "left padding": "it is right without left padding, and wrong with it",
    "rows of the cache": "it is right in the first rows of the cache, and wrong in others",
    "new keys": "it is right without new keys, and wrong with them",
}
LAYOUTS = (MISREADINGS["columns"], MISREADINGS["order"], ALONE)
READS = (SLOTS, OTHERS, "it reads the mask of another sequence")
CAUSES: tuple[tuple[str, Callable[[Evidence], bool]], ...] = (
    *(
        (text, partial(_is_right_with, NEEDS.get(name, "cosines"), {"misread": name}))
        for name, text in MISREADINGS.items()
    ),
    ("it reads its packed array with the parts behind the heads", partial(_is_right_in, "heads")),
    ("it reads its packed array with the parts before the heads", partial(_is_right_in, "parts")),
    (SLOTS, partial(_reads, "slots")),
    (OTHERS, partial(_reads, "sequences")),
    ("it reads the mask of another sequence", partial(_reads, "masks")),
    *(
        (text, partial(_is_right_with, name, {"without": frozenset({name})}))
        for name, text in WITHOUT.items()
    ),
    (ALONE, _is_right_alone),
)
"""Causes in words, each with its test, in the order in which they are tried."""
