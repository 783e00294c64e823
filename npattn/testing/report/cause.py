"""Cause of failures: the first quantity that is wrong, where, and how much."""

from __future__ import annotations

from dataclasses import dataclass, field

from npattn.conventions import Conventions
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.pair import Pair, Reading

STEPS = (
    "refusal", "state", "layout", "nan", "s", "visible", "p", "lse", "o", "dv", "dp", "delta", "ds",
    "dq", "dk", "dbias", "dsinks", "dgate", "precision", "",
)  # fmt: skip
"""Legal values of `Cause.step`, in the order of the computation."""


@dataclass(frozen=True)
class Cause:
    """Explanation of failures.

    Attributes
    ----------
    text : str
        The cause in words: "δ is wrong where t ≥ 128: it is 0".
    rules : tuple of str
        Ids of the failed outcomes that it explains, ``rule[dtype]``, each in one cause only, but
        for structure, which has an outcome at each level.
    step : str
        The first quantity of dense.py that is wrong while all before it are right, one of `STEPS`:
        "s", "visible", "p", "lse", "o", "dv", "dp", "delta", "ds", "dq", "dk", "dbias", "dsinks",
        "dgate"; or "layout", "precision", "state", "nan", "refusal"; "" if it is not known.
    where : str
        Predicate of the elements that are wrong: ``s ≥ 32 and causal``; "everywhere"; "" if it is
        not known. It begins with "backward: " if the forward is right, and the backward computes
        the quantity again.
    amount : str
        By how much, or of which other place: "counted 2 times", "× 1/√D", "of query t − 32".
    passes_when : str
        Condition of problems: "fails only where S % 16 ≠ 0"; "" if nothing tells.
    conventions : Conventions or None
        Conventions under which the check would pass these rules.
    confirmed : int
        Number of problems on which it was tried.
    name : str
        Short id, which outcomes have as their `diagnosis`.
    pair : Pair or None
        A problem that fails and its nearest neighbour that passes.
    reading : Reading or None
        A window of the first wrong quantity, got beside wanted.
    """

    text: str
    rules: tuple[str, ...]
    step: str = ""
    where: str = ""
    amount: str = ""
    passes_when: str = ""
    conventions: Conventions | None = None
    confirmed: int = 0
    name: str = ""
    pair: Pair | None = field(default=None, repr=False, compare=False)
    reading: Reading | None = field(default=None, repr=False, compare=False)

    @property
    def is_known(self) -> bool:
        """True if it says which step is wrong."""
        return bool(self.step)

    def explains(self, outcome: Outcome) -> bool:
        """Return True if an outcome is among those that it explains."""
        return outcome.id in self.rules and outcome.diagnosis in (None, self.name)
