"""Names that fit by chance: those of leaking NaN, and of one problem where most fits nothing."""

from __future__ import annotations

from npattn.testing.diagnosis.candidates import Candidate, Found
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.diagnosis.leaks import LEAK, leaks_nan


def merge_leaks(found: Found, rest: list[Evidence]) -> tuple[Found, list[Evidence]]:
    """Give the leaks of NaN that nothing explains, or that a name fits by chance, to one cause.

    What explains only one of many leaks is no cause of its own, and neither is what keeps hidden
    positions in the softmax if nothing but leaks is seen of it: a fill lets NaN through too.
    """
    leaks = [e for e in rest if leaks_nan(e)]
    chance = [
        (candidate, claimed)
        for candidate, claimed in found
        if all(map(leaks_nan, claimed)) and (_keeps_hidden(candidate) or len(claimed) < len(leaks))
    ]
    if not (leaks or chance):
        return found, rest
    found = [x for x in found if x not in chance]
    found.append((LEAK, leaks + [e for _, claimed in chance for e in claimed]))
    return found, [e for e in rest if e not in leaks]


def _keeps_hidden(candidate: Candidate) -> bool:
    """Return True for conventions, and for steps that give hidden positions another score."""
    step_of_hidden = candidate.kind == "step" and candidate.topic == LEAK.topic
    return candidate.conventions is not None or step_of_hidden


def drop_lone_steps(found: Found, rest: list[Evidence]) -> tuple[Found, list[Evidence]]:
    """Drop what fits one problem where most of what failed fits nothing.

    Steps, dtypes and factors do so by chance; a whole known mistake or a plain factor rarely does.
    """
    if 2 * len(rest) <= len(rest) + sum(len(claimed) for _, claimed in found):
        return found, rest
    lone = [
        (candidate, claimed)
        for candidate, claimed in found
        if candidate.kind in ("dtype", "step", "precision", "factor")
        and len({e.outcome.sampled for e in claimed if e.outcome}) == 1
    ]
    found = [x for x in found if x not in lone]
    return found, rest + [e for _, claimed in lone for e in claimed]
