"""Causes of results that are out of tolerance: conventions that are not declared, and mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from npattn.conventions import Conventions
from npattn.testing.diagnosis.amount import describe
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.diagnosis.explore import PLAIN, Point
from npattn.testing.diagnosis.locate import locate
from npattn.testing.diagnosis.search import search
from npattn.testing.diagnosis.sentences import BACKWARD, say
from npattn.testing.trial import Trial

FEW = 6
"""Problems on which the causes are searched for, the smallest."""


@dataclass(frozen=True)
class Wrong:
    """Why results of one implementation are out of tolerance."""

    # those that it follows, as far as its results tell: the declared ones but for `follows`
    conventions: Conventions
    follows: str = ""  # those that it does not declare, "causal=top_left"
    causes: tuple[str, ...] = ()  # what else reproduces its results, in words
    precision: tuple[str, ...] = ()  # formats whose roundings have the size of its errors, in words
    # those that are read to be wrong where nothing reproduces its results, in words
    steps: tuple[str, ...] = ()


def explain_wrong(trial: Trial, evidence: Sequence[Evidence]) -> Wrong:
    """Search for what reproduces wrong results, as reports on failures do."""
    declared = trial.conventions
    smallest = sorted(evidence, key=lambda e: e.size)[:FEW]
    found, rest = search(trial.fresh(), smallest) if smallest else ([], [])
    changes: dict[str, Any] = {}
    names = []
    for candidate in [c for c, _ in found if c.conventions is not None]:
        own = vars(candidate.conventions).items() - vars(declared).items()
        if not dict(own).keys() & changes.keys():
            changes |= dict(own)
            names.append(candidate.name)
    others = [c for c, _ in found if c.conventions is None]
    return Wrong(
        replace(declared, **changes),
        ", ".join(names),
        tuple(c.text for c in others if c.step != "precision"),
        tuple(c.text for c in others if c.step == "precision"),
        () if found else _read(rest),
    )


def _read(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    """Return the first step that is wrong on each problem, and by how much, in words."""
    steps: dict[tuple[str, bool], list[Point]] = {}
    for e in evidence:
        if (fault := locate(e)) is not None:
            steps.setdefault((fault.step, fault.backward), []).append(Point(PLAIN, e, fault))
    return tuple(
        say(step, BACKWARD if backward else "", describe(readings))
        for (step, backward), readings in steps.items()
    )
