"""Search for the simplest candidates that together reproduce all wrong results.

Candidates are tried on the smallest failing problem first; those that reproduce it are tried on
every other one. Where several reproduce as many, problems on which the rules did not fail decide.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.apart import is_confirmed, tell_apart
from npattn.testing.diagnosis.candidates import Candidate, Found
from npattn.testing.diagnosis.conventions import (
    convention_candidates,
    convention_pairs,
    profile_candidates,
    with_another,
    without_one,
)
from npattn.testing.diagnosis.descales import descale_candidates
from npattn.testing.diagnosis.dtypes import dtype_candidates
from npattn.testing.diagnosis.evidence import Evidence, sample
from npattn.testing.diagnosis.layouts import layout_candidates
from npattn.testing.diagnosis.mistakes import mistake_candidates
from npattn.testing.diagnosis.outputs import output_candidates
from npattn.testing.diagnosis.parts import part_candidates
from npattn.testing.diagnosis.precision import precision_candidates
from npattn.testing.diagnosis.ratios import is_fitted, ratio_candidates
from npattn.testing.diagnosis.steps import factor_candidates, step_candidates
from npattn.testing.diagnosis.stored_gradients import stored_gradient_candidates
from npattn.testing.rules.systematic_error import plain_recipes
from npattn.testing.trial import Trial

PROBES = 16
"""Problems beside the failing ones on which candidates that explain equally much are compared."""
RIVALS = 48
"""Candidates that explain equally much and are compared, the simplest; many do if little failed."""
LARGE = 2**16
"""Scores of the largest problem on which every candidate is tried."""
PASSES = 8
"""Failing problems on which every candidate is tried; what then is left stays unexplained."""


def search(
    trial: Trial, evidence: list[Evidence], without: Container[str]
) -> tuple[Found, list[Evidence]]:
    """Find the candidates that explain what is wrong.

    What they leave over is looked at once more without the results that they explain elsewhere:
    there two mistakes may meet, one in dk and one in everything.

    Parameters
    ----------
    trial : Trial
    evidence : list of Evidence
        Failing problems.
    without : container of str
        Names of known mistakes that are no candidates.

    Returns
    -------
    found : list of (Candidate, list of Evidence)
        Candidates, and what each explains.
    rest : list of Evidence
        What none does.
    """
    found, rest = Search(trial, evidence, without).run()
    names = frozenset(name for _, claimed in found for e in claimed for name in e.wrong)
    reduced = {id(e): e.without(names) for e in rest}
    again = [e for e in reduced.values() if e.wrong]
    if not (names and again):
        return found, rest
    more, _ = Search(trial, again, without, names).run()
    for candidate, claimed in more:
        whole = [e for e in rest if reduced[id(e)] in claimed]
        found.append((candidate, whole))
        rest = [e for e in rest if e not in whole]
    return found, rest


@dataclass
class Search:
    """Search for the candidates that explain some evidence.

    Attributes
    ----------
    trial : Trial
    evidence : list of Evidence
    without : container of str
        Names of known mistakes that are no candidates.
    ignored : frozenset of str
        Results that the evidence leaves out.
    """

    trial: Trial
    evidence: list[Evidence]
    without: Container[str]
    ignored: frozenset[str] = frozenset()
    known: dict[tuple[str, str, int], bool] = field(default_factory=dict)

    def run(self) -> tuple[Found, list[Evidence]]:
        """Return candidates with what each explains, and what none does."""
        left = sorted(self.evidence, key=lambda e: e.size)
        found: Found = []
        skipped: list[Evidence] = []
        for _ in range(PASSES):
            if not left or left[0].size > LARGE:
                break
            candidate, claimed = self._best(left, alone=not skipped)
            if candidate is None:
                skipped.append(left.pop(0))
                continue
            # A result barely out of tolerance fits many causes: prefer the cause already found.
            claimed += [e for e in left if e not in claimed and candidate.explains(e.loosely())]
            found.append((candidate, claimed))
            left = [e for e in left if e not in claimed]
        return found, [*skipped, *left]

    def _best(self, left: list[Evidence], alone: bool) -> tuple[Candidate | None, list[Evidence]]:
        """Return the candidate that explains most of what is left, the smallest problem included.

        Of several it is the one that fits other problems best, and then the simplest. Two
        conventions at once are tried where no single candidate explains all. `alone` is True if
        nothing was given up before.
        """
        total = len(left) if alone else len(self.evidence)
        hits = [c for c in self._candidates(left[0]) if self._explains(c, left[0])]
        claims = self._claims(hits, left)
        best, claimed = self._best_of(claims, total)
        if best is not None and len(claimed) == len(left):
            return best, claimed
        pairs = [c for c in convention_pairs(left[0]) if self._explains(c, left[0])]
        pairs += [two for c in hits if c.conventions for two in with_another(c, left[0])]
        more = {c: x for c, x in self._claims(pairs, left).items() if len(x) > 1 or c in pairs}
        return self._best_of(claims | more, total) if more else (best, claimed)

    def _claims(
        self, candidates: list[Candidate], left: list[Evidence]
    ) -> dict[Candidate, list[Evidence]]:
        """Return what each of the candidates explains; all of them explain the first."""
        first, *others = left
        return {c: [first, *(e for e in others if self._explains(c, e))] for c in candidates}

    def _best_of(
        self, claims: dict[Candidate, list[Evidence]], total: int
    ) -> tuple[Candidate | None, list[Evidence]]:
        """Return the candidate that explains most, and what it explains; None if all miss."""
        if len(self.evidence) > 1:  # a number fitted to one problem of several is chance
            claims = {c: x for c, x in claims.items() if len(x) > 1 or not is_fitted(c)}
        for most in sorted({len(x) for x in claims.values()}, reverse=True):
            rivals = [c for c in claims if len(claims[c]) == most]
            best = self._best_fits(rivals, whole=most == total)
            left = tell_apart(best, claims[best[0]], self.ignored) if best else []
            left = [c for c in left if is_confirmed(c, claims[c], self.ignored)]
            if left:
                plainest, *alike = left
                also = tuple(c.name for c in alike if c.kind == "mistake")
                return replace(plainest, also=also), claims[plainest]
        return None, []

    def _best_fits(self, rivals: list[Candidate], whole: bool) -> list[Candidate]:
        """Return the rivals that miss fewest probes, the simplest first.

        They explain the whole of what is left, or a part.
        """
        best, fewest = list[Candidate](), len(self.probes)
        for rival in sorted(rivals, key=lambda c: (c.rank, c.changes))[:RIVALS]:
            missed = self._misses(rival, fewest + 1)
            if missed > fewest or self._contradicts(rival, whole) or self._overreaches(rival):
                continue
            best = [rival] if missed < fewest else [*best, rival]
            fewest = missed
        return best

    def _explains(self, candidate: Candidate, evidence: Evidence) -> bool:
        """Return True if the candidate explains the evidence; memoized, by its unique name."""
        key = (candidate.kind, candidate.name, id(evidence))
        if key not in self.known:
            self.known[key] = candidate.explains(evidence)
        return self.known[key]

    def _candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        yield from descale_candidates(evidence)
        yield from output_candidates(evidence)
        yield from stored_gradient_candidates(evidence)
        yield from part_candidates(evidence)
        yield from convention_candidates(evidence)
        yield from profile_candidates(evidence)
        yield from layout_candidates(evidence)
        yield from ratio_candidates(evidence)
        yield from dtype_candidates(evidence)
        yield from step_candidates(evidence)
        yield from mistake_candidates(evidence, self.without)
        yield from self.plain_candidates

    @cached_property
    def plain_candidates(self) -> list[Candidate]:
        """Formats in which everything may be computed, and factors of all scores."""
        found = list(precision_candidates(self.trial))
        for plain in sample(self.trial, plain_recipes(self.trial.space, 0)[:1]):
            found += factor_candidates(plain)
        return found

    @cached_property
    def probes(self) -> list[Evidence]:
        """Problems of every option, as rules sample them."""
        cases = self.trial.cases(Pools(self.trial.space), 0, PROBES)
        recipes = (r for r in cases if not self.trial.skips(r, "probe"))
        sampled = sample(self.trial, islice(recipes, PROBES))
        return [e.without(self.ignored) for e in sampled if e.size <= LARGE // 4]

    def _misses(self, candidate: Candidate, limit: int = PROBES) -> int:
        """Return the number of probes that a candidate does not explain, counted up to a limit."""
        missed = (1 for probe in self.probes if not self._explains(candidate, probe))
        return sum(islice(missed, limit))

    def _contradicts(self, candidate: Candidate, whole: bool) -> bool:
        """Return True if the candidate would make a probe wrong that is right.

        Such a mistake, or convention, is another one. A factor may be wrong on some problems only,
        as where a kernel has several paths, and so may a step that explains the whole of what
        failed; one that leaves failures over and is right elsewhere fits by chance.
        """
        if candidate.kind == "ratio" or (candidate.kind == "step" and whole):
            return False
        return any(not (e.wrong or self._explains(candidate, e)) for e in self.probes)

    def _overreaches(self, candidate: Candidate) -> bool:
        """Return True if it fits the probes as well without one of its conventions.

        A NaN that leaks past a weight of 0 looks like a convention too. Those of a known system
        may come with some that no probe shows.
        """
        if candidate.conventions is None:
            return False
        own, known = self._misses(candidate), candidate.name.startswith("as ")
        fewer = map(self._misses, without_one(candidate, self.trial.conventions))
        return any(missed < own or (missed == own and not known) for missed in fewer)
