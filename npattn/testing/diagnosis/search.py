"""Search for the whole explanations that together reproduce most wrong results.

They are tried on the smallest failing problem; those that reproduce it on every other one, and the
best of them on problems on which nothing failed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter

from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.borders import Neighbours
from npattn.testing.diagnosis.conventions import (
    convention_candidates,
    layout_candidates,
    profile_candidates,
)
from npattn.testing.diagnosis.descales import descale_candidates
from npattn.testing.diagnosis.evidence import Candidate, Evidence, Found, sample
from npattn.testing.diagnosis.explore import LARGE, scores_of
from npattn.testing.diagnosis.locate import is_one_factor, result
from npattn.testing.diagnosis.precision import dtype_candidates, precision_candidates
from npattn.testing.trial import Trial

PROBES = 12
"""Problems near failing ones, and as many others, that a candidate must reproduce as well."""
REFUTED = 0.1
"""Share of those on which the implementation may be right, against what a candidate predicts."""
MOST = 0.5
"""Share of those on which it matters that it must reproduce: another mistake may meet it."""
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
        claimed = claimed + [e for e in rest if candidate.explains(e)]
        found.append((candidate, [whole[e] for e in claimed]))
        left, skipped = ([e for e in x if e not in claimed] for x in (left, skipped))
    return found, [whole[e] for e in (*skipped, *left)]


@dataclass(eq=False)
class _Judge:
    """Judge of candidates: the failing problems, and others on which none failed yet."""

    trial: Trial
    evidence: Sequence[Evidence]
    without: Container[str]

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
        turns = zip(*(Neighbours(self.trial, x).around() for x in recipes), strict=False)
        near = islice(filter(self._asks, chain.from_iterable(turns)), PROBES)
        others = islice(Pools(self.trial.space).cases(1, PROBES), PROBES)
        probes = sample(replace(self.trial, memo={}), chain(near, others))
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
        declared = self.trial.conventions
        made = chain(*(make(first) for make in MAKERS), formats)
        known = claims(chain(convention_candidates(declared), profile_candidates(declared), made))
        if not any(c.changes <= 2 for c, own in known.items() if len(own) == len(left)):
            known |= claims(convention_candidates(declared, 2))
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
        fits = [candidate.explains(e) for e in self.probes]
        telling = [(x, e) for x, e in zip(fits, self.probes, strict=True) if e.wrong or not x]
        refuted = sum(not x and not e.wrong for x, e in telling)  # it is right there
        share = sum(x for x, _ in telling) / len(telling) if telling else 1.0
        return share if share >= MOST and refuted <= REFUTED * len(telling) else 0.0


MAKERS: tuple[Callable[[Evidence], Iterator[Candidate]], ...] = (
    layout_candidates,
    descale_candidates,
    dtype_candidates,
)
