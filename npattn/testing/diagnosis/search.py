"""Search for the whole explanations that together reproduce most wrong results.

They are tried on the smallest failing problem; those that reproduce it on every other one, and the
best of them on problems on which nothing failed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter

import numpy as np

from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.candidates import Candidate, Found
from npattn.testing.diagnosis.conventions import (
    convention_candidates,
    convention_pairs,
    matters,
    profile_candidates,
    with_another,
)
from npattn.testing.diagnosis.descales import descale_candidates
from npattn.testing.diagnosis.dtypes import dtype_candidates
from npattn.testing.diagnosis.evidence import Evidence, sample
from npattn.testing.diagnosis.explore import around, scores_of
from npattn.testing.diagnosis.layouts import layout_candidates
from npattn.testing.diagnosis.locate import is_one_factor, result
from npattn.testing.diagnosis.outputs import output_candidates, storage_candidates
from npattn.testing.diagnosis.precision import precision_candidates
from npattn.testing.diagnosis.stored_gradients import stored_gradient_candidates
from npattn.testing.trial import Trial

PROBES = 12
"""Problems near failing ones, and as many others, that a candidate must reproduce as well."""
REFUTED = 0.1
"""Share of those on which the implementation may be right, against what a candidate predicts."""
MOST = 0.5
"""Share of those on which it matters that it must reproduce: another mistake may meet it."""
LARGE = 2**16
"""Scores of the largest problem on which every candidate is tried."""
NEAR = 4
"""Smallest failing problems around which others are tried."""
RIVALS = 4
"""Candidates that explain most, of which the first that further problems confirm is the cause."""
PASSES = 3
"""Failing problems on which every candidate is tried."""


def search(
    trial: Trial, evidence: Sequence[Evidence], without: Container[str] = ()
) -> tuple[Found, list[Evidence]]:
    """Find the candidates that explain what is wrong, but for results that are left out.

    Returned are the candidates, with what each explains, and what none does.
    """
    left = sorted(evidence, key=attrgetter("rank"))
    whole = {e.without(without): e for e in left} if without else {e: e for e in left}
    left = list(whole)
    found: Found = []
    skipped: list[Evidence] = []
    judge = _Judge(trial, left, without)
    for _ in range(PASSES):
        if not left or left[0].size > LARGE:
            break
        candidate, claimed = judge.best(left)
        if candidate is None:
            skipped.append(left.pop(0))
            continue
        # A result barely out of tolerance fits many causes: prefer the cause already found.
        rest = [e for e in (*left, *skipped) if e not in claimed]
        claimed = claimed + [e for e in rest if candidate.explains(e.loose)]
        found.append((candidate, [whole[e] for e in claimed]))
        left, skipped = ([e for e in x if e not in claimed] for x in (left, skipped))
    return found, [whole[e] for e in (*skipped, *left)]


class _Judge:
    """Judge of candidates: the failing problems, and others on which none failed yet."""

    def __init__(self, trial: Trial, evidence: Sequence[Evidence], without: Container[str]) -> None:
        self.trial, self.evidence, self.without = trial, evidence, without

    @cached_property
    def formats(self) -> list[Candidate]:
        """Candidates of narrower formats, which take many calls to make."""
        return list(precision_candidates(self.trial))

    @cached_property
    def probes(self) -> list[Evidence]:
        """Problems near the smallest failing ones, and others."""
        sampled = [e.outcome.sampled for e in self.evidence if e.outcome is not None]
        recipes = [r for r in sampled if r is not None][:NEAR]
        if self.trial.space.few_shapes or not recipes:
            return []
        near = [r for x in recipes for r in around(self.trial, x) if self._asks(r)]
        chosen = np.random.default_rng(recipes[0].seed).permutation(len(near))[:PROBES]
        others = islice(Pools(self.trial.space).cases(1, PROBES), PROBES)
        probes = sample(replace(self.trial, memo={}), chain((near[i] for i in chosen), others))
        return [e.without(self.without) for e in probes if e.size <= LARGE]

    def _asks(self, recipe: Recipe) -> bool:
        """Return True if a recipe is taken, and small enough for every candidate."""
        return scores_of(recipe) <= LARGE and self.trial.space.takes(recipe)

    def best(self, left: Sequence[Evidence]) -> tuple[Candidate | None, list[Evidence]]:
        """Return the candidate that explains most, the smallest problem included, or None."""
        first, *others = left

        def claims(candidates: Iterator[Candidate]) -> dict[Candidate, list[Evidence]]:
            hits = [c for c in candidates if c.explains(first)]
            return {c: [first, *(e for e in others if c.explains(e))] for c in hits}

        wrong = [result(first, name) for name in first.wrong]
        factor = any(is_one_factor(q) for q in wrong)
        formats = [] if factor else self.formats
        known = claims(chain(*(make(first) for make in MAKERS), formats))
        whole = [c for c, own in known.items() if len(own) == len(left)]
        if not any(c.changes <= 2 for c in whole):
            known |= claims(convention_pairs(first))
            singles = [c for c in known if c.conventions is not None and c.changes == 1]
            for one in singles:
                for field, two in with_another(one, first):
                    known[two] = [
                        e
                        for e in left
                        if (two.explains(e) if matters(field, e.problem) else e in known[one])
                    ]
        ordered = sorted(known, key=lambda c: (-len(known[c]), c.changes))
        best, most = None, 0.0
        for candidate in ordered[:RIVALS]:
            if len(known[candidate]) <= most:  # the others explain less of what failed
                break
            explained = self.confirm(candidate) * len(known[candidate])
            best, most = (candidate, explained) if explained > most else (best, most)
        return best, known[best] if best is not None else []

    def confirm(self, candidate: Candidate) -> float:
        """Return the share that it reproduces of problems on which nothing failed yet, 0 if few.

        A problem that it does not allow, as a convention may, tells nothing.
        """
        fits = [candidate.explains(e.loose) for e in self.probes]
        telling = [(x, e) for x, e in zip(fits, self.probes, strict=True) if e.wrong or not x]
        refuted = sum(not x and not e.wrong for x, e in telling)  # it is right there
        share = sum(x for x, _ in telling) / len(telling) if telling else 1.0
        return share if share >= MOST and refuted <= REFUTED * len(telling) else 0.0


MAKERS: tuple[Callable[[Evidence], Iterator[Candidate]], ...] = (
    convention_candidates,
    profile_candidates,
    layout_candidates,
    output_candidates,
    descale_candidates,
    storage_candidates,
    stored_gradient_candidates,
    dtype_candidates,
)
