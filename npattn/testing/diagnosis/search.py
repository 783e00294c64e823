"""Search for the whole explanations that together reproduce most wrong results.

They are tried on the smallest failing problem; those that reproduce it on every other one, and the
best of them on problems on which nothing failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.candidates import Candidate, Found
from npattn.testing.diagnosis.conventions import (
    convention_candidates,
    convention_pairs,
    profile_candidates,
    with_another,
)
from npattn.testing.diagnosis.descales import descale_candidates
from npattn.testing.diagnosis.dtypes import dtype_candidates
from npattn.testing.diagnosis.evidence import Evidence, sample
from npattn.testing.diagnosis.explore import around
from npattn.testing.diagnosis.layouts import layout_candidates
from npattn.testing.diagnosis.precision import precision_candidates
from npattn.testing.diagnosis.stored_gradients import stored_gradient_candidates
from npattn.testing.diagnosis.verdicts import is_within
from npattn.testing.trial import Trial

PROBES = 12
"""Problems near the failing one, and as many others, that a candidate must reproduce as well."""
REFUTED = 0.1
"""Share of those on which the implementation may be right, against what a candidate predicts."""
MOST = 0.75
"""Share of those on which it matters that it must reproduce: another mistake may meet it."""
LARGE = 2**16
"""Scores of the largest problem on which every candidate is tried."""
PASSES = 4
"""Failing problems on which every candidate is tried."""


def search(trial: Trial, evidence: Sequence[Evidence]) -> tuple[Found, list[Evidence]]:
    """Find the candidates that explain what is wrong.

    Returns
    -------
    found : list of (Candidate, list of Evidence)
        Candidates, and what each explains.
    rest : list of Evidence
        What none does.
    """
    left = sorted(evidence, key=lambda e: e.size)
    formats = list(precision_candidates(trial)) if left else []
    found: Found = []
    skipped: list[Evidence] = []
    for _ in range(PASSES):
        if not left or left[0].size > LARGE:
            break
        candidate, claimed = _best(trial, left, formats)
        if candidate is None:
            skipped.append(left.pop(0))
            continue
        # A result barely out of tolerance fits many causes: prefer the cause already found.
        rest = [e for e in (*left, *skipped) if e not in claimed]
        claimed = claimed + [e for e in rest if candidate.explains(e.loosely())]
        found.append((candidate, claimed))
        left, skipped = ([e for e in x if e not in claimed] for x in (left, skipped))
    return found, [*skipped, *left]


def _best(
    trial: Trial, left: Sequence[Evidence], formats: Sequence[Candidate]
) -> tuple[Candidate | None, list[Evidence]]:
    """Return the candidate that explains most, the smallest problem included; None if none does."""
    first, *others = left

    def claims(candidates: Iterator[Candidate]) -> dict[Candidate, list[Evidence]]:
        hits = [c for c in candidates if c.explains(first)]
        return {c: [first, *(e for e in others if c.explains(e))] for c in hits}

    known = claims(_candidates(first, formats))
    if not known or max(map(len, known.values())) < len(left):
        known |= claims(convention_pairs(first))
        singles = [c for c in known if c.conventions is not None and c.changes == 1]
        known |= claims(two for c in singles for two in with_another(c, first))
    ordered = sorted(known, key=lambda c: (-len(known[c]), c.changes))
    for candidate in ordered[:6]:
        if _is_confirmed(trial, candidate, first):
            return candidate, known[candidate]
    return None, []


MAKERS: tuple[Callable[[Evidence], Iterator[Candidate]], ...] = (
    convention_candidates,
    profile_candidates,
    layout_candidates,
    descale_candidates,
    stored_gradient_candidates,
    dtype_candidates,
)


def _candidates(evidence: Evidence, formats: Sequence[Candidate]) -> Iterator[Candidate]:
    for make in MAKERS:
        yield from make(evidence)
    yield from formats


def _is_confirmed(trial: Trial, candidate: Candidate, first: Evidence) -> bool:
    """Return True if it reproduces problems on which nothing failed yet.

    A problem that it does not allow, as a convention may, tells nothing.
    """
    sampled = first.outcome.sampled if first.outcome is not None else None
    if trial.space.few_shapes or sampled is None:
        return True
    near = [r for r in around(trial, sampled) if is_within(trial.space, r)]
    chosen = np.random.default_rng(sampled.seed).permutation(len(near))[:PROBES]
    others = islice(Pools(trial.space).cases(1, PROBES), PROBES)
    recipes = chain((near[i] for i in chosen), others)
    probes = [e for e in sample(replace(trial, memo={}), recipes) if e.size <= LARGE]
    explained = [candidate.explains(e.loosely()) for e in probes]
    telling = [(fits, e) for fits, e in zip(explained, probes, strict=True) if e.wrong or not fits]
    refuted = sum(not fits and not e.wrong for fits, e in telling)  # it is right there
    reproduced = sum(fits for fits, _ in telling)
    return reproduced >= MOST * len(telling) and refuted <= REFUTED * len(telling)
