"""Report on the gradients of a function: a line for each argument, and what is wrong in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from npattn.testing.comparison import short

Status = Literal["passed", "wrong", "undecided"]


@dataclass(frozen=True)
class Judgement:
    """Judgement of the gradient of one argument.

    Attributes
    ----------
    name : str
        Of the gradient: "dx" of the argument x.
    claimed_by : {"vjp", "jvp", "second order", "vjp and jvp"}
    status : {"passed", "wrong", "undecided"}
    resolution : float
        Part of the gradient by which an error would have been seen in the best direction; 0 if the
        results do not change, or have kinks alone.
    explanation : str
        The mistake by its name, "" if it has none.
    message : str
        Claimed and measured slopes where it is wrong; why nothing could be judged.
    """

    name: str
    claimed_by: str
    status: Status
    resolution: float = float("inf")
    explanation: str = ""
    message: str = ""

    def __str__(self) -> str:
        head = f"{self.name:<12} {self.claimed_by:<12} {self.status}"
        if self.status == "passed" and self.resolution > 0:
            return f"{head}: an error of {short(self.resolution)} of it would have been seen"
        lines = [text for text in (self.explanation, self.message) if text]
        return "\n".join([head, *(f"    {line}" for line in lines)])


@dataclass(frozen=True)
class GradientReport:
    """Result of `check_gradients`.

    Attributes
    ----------
    name : str
        The function.
    judgements : tuple of Judgement
    notes : tuple of str
        Kinks, random results, arguments without a derivative.
    seed : int
    """

    name: str
    judgements: tuple[Judgement, ...]
    notes: tuple[str, ...] = ()
    seed: int = 0

    @property
    def failures(self) -> tuple[Judgement, ...]:
        """Judgements of gradients that are wrong."""
        return tuple(one for one in self.judgements if one.status == "wrong")

    @property
    def passed(self) -> bool:
        """True if no gradient is wrong, and at least one could be judged."""
        return not self.failures and any(one.status == "passed" for one in self.judgements)

    def __str__(self) -> str:
        if self.failures:
            head = f"gradients of {self.name}: wrong"
        else:
            head = f"gradients of {self.name}: {'passed' if self.passed else 'not judged'}"
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"{head} (seed {self.seed})", *map(str, self.judgements), *notes])
