"""Candidates from npattn.mistakes: wrong implementations, called as the one under test is."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from copy import copy
from dataclasses import replace
from functools import cache, partial

from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES, Attention, Mistake, with_gate
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.defaults import (
    translate_cotangents,
    translate_gradients,
    translate_problem,
    translate_results,
)
from npattn.testing.diagnosis.evidence import Arrays, Evidence, group
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import RULES
from npattn.testing.trial import Suspicion, Trial, Violation, WrongAnyway

KEEPS = ("memory", "state", "cache")
"""Families of known mistakes that may keep something of the first call."""


def mistake_candidates(evidence: Evidence, without: Container[str] = ()) -> Iterator[Candidate]:
    """Yield every known mistake, but for those left out."""
    for mistake in MISTAKES.values():
        if mistake.name not in without:
            yield _candidate(mistake)


@cache
def _candidate(mistake: Mistake) -> Candidate:
    return Candidate(
        "mistake",
        mistake.name,
        mistake.sentence.rstrip("."),
        partial(_explains, mistake),
        topic=mistake.family,
    )


def _explains(mistake: Mistake, evidence: Evidence) -> bool:
    like = evidence.trial.implementation
    try:
        implementation = implementation_of(mistake, like)
        if evidence.reproduced_by(predict_by(implementation, evidence)):
            return True
        if mistake.family not in KEEPS or not evidence.trial.first_calls:
            return False
        implementation = implementation_of(mistake, like)
        _repeat_first_call(implementation, evidence.trial)
        return evidence.reproduced_by(predict_by(implementation, evidence))
    except ImplementationError:
        return False


def _repeat_first_call(implementation: Implementation, trial: Trial) -> None:
    """Make the first call ever made, for what a mistake keeps of it."""
    problem, cotangents, _ = trial.first_calls[0]
    own = translate_problem(problem, trial.conventions)
    implementation.forward(own)
    if trial.gradients:
        own_cotangents = translate_cotangents(problem, cotangents, trial.conventions)
        implementation.gradients(own, own_cotangents)


def implementation_of(mistake: Mistake, like: Implementation) -> Implementation:
    """Return a mistake, without state of earlier calls, with the options of an implementation."""
    fresh = type(mistake.forward.__self__)()  # type: ignore[attr-defined]
    return implement(fresh, fresh, like)


def implement(forward: Attention, backward: Attention, like: Implementation) -> Implementation:
    """Return the forward of one and the backward of another, with the options of `like`.

    Reading a signature takes longer than a small call, so that it is done once a class.
    """
    if "gate" in like.features:
        forward, backward = (_add_gate(x) for x in (forward, backward))
    # A number that is added to hidden scores is a bias: see `translate_problem`.
    taken = like.features | {"bias"} if "mask" in like.features else like.features
    features = (*sorted(taken), *like.returns)
    classes = type(forward), type(backward)
    implementation = copy(_read_once(*classes, features))  # type: ignore[arg-type]  # hashable
    forward.alignment = backward.alignment = like.conventions.causal
    implementation.f, implementation.backward = forward.forward, backward.backward
    return implementation


def _add_gate(attention: Attention) -> Attention:
    """Return the same attention with a gate, which most candidates lack."""
    gated = with_gate(type(attention))()  # type: ignore[arg-type]  # hashable
    vars(gated).update(vars(attention))
    return gated


@cache
def _read_once(
    forward: type[Attention], backward: type[Attention], features: tuple[str, ...]
) -> Implementation:
    return Implementation(
        forward().forward,
        backward=backward().backward,
        features=features,
        framework="numpy",
        name=forward.__name__,
    )


def predict_by(implementation: Implementation, evidence: Evidence) -> Iterator[Arrays]:
    """Yield the results of a forward pass, then those of a backward pass.

    Raises
    ------
    ImplementationError
        If the implementation raises.
    """
    own, conventions = evidence.problem, evidence.trial.conventions
    problem = translate_problem(own, conventions)
    found = group(implementation.forward(problem, evidence.view))
    yield translate_results(own, found, conventions)
    if evidence.trial.gradients:
        cotangents = translate_cotangents(own, evidence.cotangents, conventions)
        found = group(implementation.gradients(problem, cotangents, evidence.view))
        yield translate_gradients(own, found, conventions)


def breaks_alike(mistake: Mistake, trial: Trial, outcome: Outcome) -> bool:
    """Return True if a mistake breaks the rule of an outcome on its recipe, in the same way."""
    rule = RULES.get(outcome.rule)
    if rule is None or outcome.sampled is None:
        return False
    own = _trial_of(mistake, trial)
    if rule.unless(own):
        return False
    try:
        rule.check(own, outcome.sampled)
    except Violation as err:
        return err.kind == outcome.kind and _results(str(err)) == _results(outcome.message)
    except (ImplementationError, WrongAnyway):
        return False
    return False


def is_suspected_alike(mistake: Mistake, trial: Trial, outcome: Outcome) -> bool:
    """Return True if a mistake is suspected for the same fitted number, to its last digit."""
    rule = RULES.get(outcome.rule)
    if rule is None or outcome.sampled is None:
        return False
    try:
        rule.check(_trial_of(mistake, trial), outcome.sampled)
    except Suspicion as err:
        return str(err).splitlines()[:1] == outcome.message.splitlines()[:1]
    except (ImplementationError, Violation, WrongAnyway):
        return False
    return False


def _trial_of(mistake: Mistake, trial: Trial) -> Trial:
    """Return the trial with a mistake under test, and with the conventions that it keeps."""
    implementation = implementation_of(mistake, trial.implementation)
    conventions = Conventions(causal=trial.conventions.causal)
    return replace(trial, implementation=implementation, conventions=conventions, memo={})


def _results(message: str) -> list[tuple[str, bool]]:
    """Return the result or input that each line names, and whether it became NaN or infinite."""
    lines = [line for line in message.splitlines() if line]
    infinite = r"got (nan|-?inf)\b"
    return sorted((re.split(r"[\[ :]", x)[0], bool(re.search(infinite, x))) for x in lines)
