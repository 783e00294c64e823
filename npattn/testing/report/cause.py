"""Cause of failures: the mistake or convention that reproduces the wrong results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from npattn.conventions import Conventions
from npattn.testing.report.outcome import Outcome


def holds_always(_: Outcome) -> bool:
    """Return True: a text without a condition contradicts no outcome."""
    return True


@dataclass(frozen=True)
class Cause:
    """Explanation of failures.

    Attributes
    ----------
    text : str
        The cause in words: "dk is √D times too large (8.00 at D = 64): the scale is missing in dk".
    rules : tuple of str
        Ids of the failed outcomes that it explains, ``rule[dtype]``, each in one cause only.
    kind : str
        "storage" (of sequences), "descale" (factors of quantized inputs), "convention",
        "layout", "ratio" (a wrong factor), "dtype", "step" (one of the algorithm that is wrong or
        left out), "mistake" (of npattn.mistakes), "precision" (all of it is computed in a narrower
        format), "factor" (of all scores), "conduct" (between calls, or in shapes and dtypes),
        "raised" (an exception) or "unexplained".
    name : str
        The convention (``causal=top_left``), or the name of the known mistake; "" if it has none.
    share : float
        Share of the wrong results of these rules that it reproduces within the tolerance.
    passes_when : str
        Contrast: "fails only where S is no multiple of 16"; "" if nothing tells.
    conventions : Conventions or None
        Conventions under which the check would pass these rules.
    topic : str
        Part of attention that it is about: an option, a result, "delta"; "" if none is known.
    also : tuple of str
        Names of other known mistakes that give the same results on all problems tried.
    holds : callable
        False for an outcome whose problem contradicts `passes_when`.
    """

    text: str
    rules: tuple[str, ...]
    kind: str = "mistake"
    name: str = ""
    share: float = 1.0
    passes_when: str = ""
    conventions: Conventions | None = None
    topic: str = ""
    also: tuple[str, ...] = ()
    holds: Callable[[Outcome], bool] = field(default=holds_always, repr=False, compare=False)
