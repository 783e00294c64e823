"""Report on the gradients of a function: a line for each argument, and what is wrong in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from npattn.testing.power import Concluded, Conclusion, Power, conclude

Status = Literal["passed", "wrong", "undecided", "not judged"]


@dataclass(frozen=True)
class Judgement:
    """Judgement of the gradient of one argument."""

    name: str  # of the gradient: "dx" of the argument x
    claimed_by: str  # "vjp", "jvp", "second order" or "vjp and jvp"
    # "passed", "wrong", "undecided" or "not judged": "undecided": no difference is precise enough.
    # "not judged": there is nothing to compare with, as where all results are NaN.
    status: Status
    # error of the gradient that would have been seen, over the directions that were asked
    power: Power = field(default_factory=Power)
    explanation: str = ""  # the mistake by its name, "" if it has none
    message: str = ""  # claimed and measured slopes where it is wrong; why nothing could be judged

    def __str__(self) -> str:
        head = f"{self.name:<12} {self.claimed_by:<12} {self.status}"
        if self.status == "passed" and self.power.nonzero:
            return head + self.power.describe("")
        lines = [text for text in (self.explanation, self.message) if text]
        return "\n".join([head, *(f"    {line}" for line in lines)])


@dataclass(frozen=True)
class GradientReport(Concluded):
    """Result of `check_gradients`.

    Attributes
    ----------
    name : str
        The function.
    judgements : tuple of Judgement
    notes : tuple of str
        Kinks, random results, arguments without a derivative.
    seed : int
    accept : tuple of str
        Gradients that need no verdict.
    """

    name: str
    judgements: tuple[Judgement, ...]
    notes: tuple[str, ...] = ()
    seed: int = 0
    accept: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Judgement, ...]:
        """Judgements of gradients that are wrong."""
        return tuple(one for one in self.judgements if one.status == "wrong")

    @property
    def conclusion(self) -> Conclusion:
        """Verdict and reason."""

        def names(status: Status) -> list[str]:
            return list(dict.fromkeys(x.name for x in self.judgements if x.status == status))

        return conclude(
            failed=bool(self.failures),
            tested=any(
                one.status == "passed" or one.name not in self.accept for one in self.judgements
            ),
            undecided=names("undecided"),
            unjudged=names("not judged"),
            accept=self.accept,
        )

    def __str__(self) -> str:
        head = f"gradients of {self.name}: {self.conclusion} (seed {self.seed})"
        notes = [f"note: {note}" for note in self.notes]
        open_ = [one.name for one in self.judgements if one.status in ("undecided", "not judged")]
        if self.verdict == "no verdict" and open_:
            names = ", ".join(map(repr, dict.fromkeys(open_)))
            notes.append(
                f"way out: a wider dtype, or other arguments; or leave it out by name: "
                f"accept=({names},)"
            )
        return "\n".join([head, *map(str, self.judgements), *notes])
