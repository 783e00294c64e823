"""Further problems that tell candidates apart which reproduce all failing ones.

A failing problem is small and has few options: many mistakes give the same results on it. Near it,
with other sizes and contents and with more options, those that are another mistake miss.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest

from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.contrasts import fresh_recipes
from npattn.testing.diagnosis.evidence import Evidence, collect, sample
from npattn.testing.diagnosis.verdicts import Verdicts
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import RULES
from npattn.testing.trial import Trial

PROBLEMS = 32
"""Most problems on which candidates are told apart."""
SECONDS = 1.5
"""Most time that it takes, where a framework compiles each shape."""
SIZE = 2**14
"""Scores of the largest of these problems."""
CONFIRMING = 4
"""Number of further failing problems that a candidate must reproduce, and of rules they are of."""
TRIED = 64
"""Number of problems sampled to find those of one rule; most of them have another structure."""
PLAIN = Recipe()
SEED = 1
"""Seed of the recipes; the judge's default is 0, so most of these problems are new."""


def tell_apart(
    rivals: Sequence[Candidate], claimed: Sequence[Evidence], ignored: Container[str] = ()
) -> list[Candidate]:
    """Drop the candidates that do not reproduce further problems, where another one does.

    Parameters
    ----------
    rivals : sequence of Candidate
        They reproduce all of `claimed`; the simplest first.
    claimed : sequence of Evidence
        Failing problems.
    ignored : container of str
        Results that the failing problems leave out.

    Returns
    -------
    list of Candidate
        Those that nothing tells apart, in the same order.
    """
    left = list(rivals)
    deadline = time.monotonic() + SECONDS
    recipes = islice(_near(claimed), PROBLEMS) if len(left) > 1 else iter(())
    for evidence in sample(claimed[0].trial, recipes):
        if len(left) == 1 or time.monotonic() > deadline:
            break
        if evidence.size <= SIZE and evidence.is_clear:
            left = [c for c in left if c.explains(evidence.without(ignored))] or left
    return left


def is_confirmed(
    candidate: Candidate, claimed: Sequence[Evidence], ignored: Container[str] = ()
) -> bool:
    """Return True if a candidate reproduces further failing problems with the same options.

    On the smallest failing problems, different mistakes often give the same results. The further
    ones differ in sizes and contents alone, so that a second mistake elsewhere does not show in
    them. If the framework compiles each shape, none is tried, and the answer is True.
    """
    if claimed[0].trial.space.few_shapes:
        return True
    outcomes = [e.outcome for e in claimed if e.outcome is not None and e.outcome.sampled]
    sources = (_fails_again(claimed[0].trial, outcome) for outcome in outcomes[:CONFIRMING])
    failing = (e.without(ignored) for together in zip_longest(*sources) for e in together if e)
    own = islice((e for e in failing if e.wrong and e.size <= SIZE), CONFIRMING)
    # What is right may come of another path, as where a kernel falls back to one for dbias.
    return all(candidate.explains(e.without(e.observed.keys() - e.wrong.keys())) for e in own)


def _fails_again(trial: Trial, outcome: Outcome) -> Iterator[Evidence]:
    """Yield problems on which the same rule fails, of other sizes and contents.

    Their options and their structure are those of the outcome.
    """
    base = outcome.sampled
    assert base is not None
    verdicts = Verdicts(trial, outcome)
    for recipe in fresh_recipes(trial.space, base, {}, TRIED):
        if _structure(recipe) != _structure(base):
            continue
        found = verdicts.violation(recipe)
        if found is not None:
            evidence = collect(trial, found)
            if evidence is not None:
                yield evidence


def _structure(recipe: Recipe) -> tuple[bool, ...]:
    """Return which sizes differ: kernels have separate paths for these cases."""
    T, S = recipe.T, recipe.S
    return recipe.K < recipe.H, T < S, T > S, recipe.E != recipe.D


def _near(claimed: Sequence[Evidence]) -> Iterator[Recipe]:
    """Yield, in turn, recipes of the failing rules, and failing ones with other sizes."""
    trial = claimed[0].trial
    outcomes = [e.outcome for e in claimed if e.outcome is not None]
    failing = list(dict.fromkeys(o.sampled for o in outcomes if o.sampled is not None))
    rules = dict.fromkeys(o.rule for o in outcomes if o.rule in RULES)
    sources = [_of_rule(trial, rule) for rule in rules]
    sources += [_of_other_sizes(trial, recipe) for recipe in failing]
    for recipe in chain.from_iterable(zip_longest(*sources)):
        if recipe is not None and not trial.skips(recipe, "probe"):
            yield replace(recipe, view="contiguous")


def _of_other_sizes(trial: Trial, base: Recipe) -> Iterator[Recipe]:
    """Yield a recipe with other sizes and contents; of every second, one option is off."""
    options = options_on(base)
    for n, recipe in enumerate(fresh_recipes(trial.space, base, {}, PROBLEMS)):
        off = options[n // 2 % len(options)] if options and n % 2 else None
        yield replace(recipe, **{off: getattr(PLAIN, off)}) if off else recipe


def _of_rule(trial: Trial, rule: str) -> Iterator[Recipe]:
    pools = Pools(trial.space, **RULES[rule].draw(trial))
    return trial.cases(pools, SEED, PROBLEMS)
