"""Outcome of one rule in one dtype, with the line and the script that show a failure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.asked import Asked
from npattn.testing.cases.recipe import Recipe, are_identical
from npattn.testing.comparison import Comparison
from npattn.testing.levels import Level
from npattn.testing.power import Power, find_unjudged, union
from npattn.testing.report.reproducer import script
from npattn.testing.trial import Trial, Violation

Status = Literal[
    "passed", "failed", "error", "crashed", "timed out", "suspect", "not judged", "not applicable"
]
OUT_OF_TIME = "not asked within the budget"
"""Message of an outcome whose rule was not asked in time."""
DEFECT = "defect"
"""Kind of an outcome whose rule does not find mistakes that it must find: npattn is wrong."""


@dataclass(frozen=True)
class Outcome:
    """Result of one rule in one dtype.

    Attributes
    ----------
    rule : str
    semantics : str
        Numbers of the rule in docs/semantics.md.
    about : str
        The rule in a line.
    dtype : str
    status : {"passed", "failed", "error", "crashed", "timed out", "suspect", "not judged", \
"not applicable"}
    worst : float
        Largest error / tolerance in problems that passed; of the smallest failing one, if one
        failed.
    examples : int
        Number of problems tried.
    message : str
        Values got and expected, tolerance and place; the reason if not applicable; "" if passed.
    problem : npattn.Problem or None
        The smallest failing problem.
    recipe : str
        Line that makes it.
    level : str
        One of `npattn.testing.levels.LEVELS`.
    diagnosis : str or None
        Name of the cause that it belongs to.
    kind : str
        How it fails, as of a `Violation`; "raised" for an exception, "" if it passed; `DEFECT` if
        npattn is wrong, and it is not judged.
    cotangents : Cotangents or None
        Of the smallest failing problem.
    comparisons : tuple of Comparison
        Results that are out of tolerance there, the worst first.
    sampled : Recipe or None
        Recipe from which that problem was made, maybe by changing it.
    view : str
        Memory layout of its arrays.
    left_to : frozenset of str
        Results in which it fails where they are wrong anyway: rules agreement-… report these.
    raised : str
        Type and place of the exception, "ValueError at kernel.py:12"; "" without one, or a place.
    asked : Asked
        Sizes of the problems that were asked and accepted.
    powers : mapping of str to Power
        Power of each result, of a rule of agreement: in problems with plain numbers.
    """

    rule: str
    semantics: str
    about: str
    dtype: str
    status: Status
    worst: float = 0.0
    examples: int = 0
    message: str = ""
    problem: Problem | None = None
    recipe: str = ""
    script_text: str = field(default="", repr=False)
    level: Level = "values"
    diagnosis: str | None = None
    kind: str = ""
    cotangents: Cotangents | None = field(default=None, repr=False, compare=False)
    comparisons: tuple[Comparison, ...] = field(default=(), repr=False, compare=False)
    sampled: Recipe | None = field(default=None, repr=False)
    view: str = "contiguous"
    left_to: frozenset[str] = frozenset()
    raised: str = ""
    asked: Asked = field(default_factory=Asked, repr=False)
    powers: Mapping[str, Power] = field(default_factory=dict, repr=False)

    def script(self) -> str:
        """Return a standalone Python file that shows the failure; "" if nothing failed."""
        return self.script_text

    @property
    def failed(self) -> bool:
        """True if it counts against the implementation."""
        return self.status in ("failed", "error") or self.has_ended

    @property
    def has_ended(self) -> bool:
        """True if the implementation ended its process, or did not answer in time."""
        return self.status in ("crashed", "timed out")

    def merge(self, later: Outcome) -> Outcome:
        """Return the outcome of both, for other problems of the same rule that came later."""
        if later.status == "not applicable" or self.kind == DEFECT:
            return self
        passed = later.status in ("passed", "not judged")
        worst = max(self.worst, later.worst) if passed else later.worst
        tried = self.examples + later.examples
        left_to, asked = self.left_to | later.left_to, Asked.union([self.asked, later.asked])
        both = replace(later, worst=worst, examples=tried, left_to=left_to, asked=asked)
        if not passed or later.kind == DEFECT:
            return both
        return both.with_powers(union([self.powers, later.powers]))

    def with_powers(self, powers: Mapping[str, Power]) -> Outcome:
        """Return an outcome that passed with its powers: "not judged" if one is too small."""
        unjudged = find_unjudged(powers)
        if not unjudged:
            return replace(self, status="passed", message="", powers=powers)
        message = "; ".join(powers[name].describe(name) for name in unjudged)
        return replace(self, status="not judged", message=message, powers=powers)

    def with_defects(self, unseen: Collection[str]) -> Outcome:
        """Return the outcome as not judged if mistakes in results that passed were not found."""
        if not unseen:
            return self
        message = f"a defect of npattn, please report it: it passes {', '.join(unseen)}"
        return replace(self, status="not judged", kind=DEFECT, message=message)

    @property
    def power(self) -> dict[str, float]:
        """Smallest ε for each result such that 1 + ε times it would have been seen; inf: none."""
        return {name: power.factor for name, power in self.powers.items()}

    @property
    def id(self) -> str:
        """Name in a file of expected failures."""
        return f"{self.rule}[{self.dtype}]"


def add_reproducer(
    outcome: Outcome, trial: Trial, problem: Problem, recipe: Recipe, error: Exception | None
) -> Outcome:
    """Return the outcome with the problem, the line that makes it and a script that shows it."""
    return replace(
        outcome,
        problem=problem,
        recipe=recipe_line(recipe, trial, problem),
        script_text=script(trial, outcome.rule, problem, error),
        kind=error.kind if isinstance(error, Violation) else "raised",
        cotangents=getattr(error, "cotangents", None),
        comparisons=getattr(error, "comparisons", ()),
        sampled=recipe,
        view=getattr(error, "view", recipe.view),
        raised=_origin(error),
    )


def _origin(error: Exception | None) -> str:
    """Return type and place of the exception behind an error, "" if either is unknown."""
    place = error.place if isinstance(error, ImplementationError) else ""
    return f"{type(error.__cause__).__name__} at {place}" if error and place else ""


def recipe_line(recipe: Recipe, trial: Trial, problem: Problem | None) -> str:
    """Format the recipe as a line to paste, with ``from npattn.testing import Recipe``.

    A problem that was made of it and then changed is said to be; None was not.
    """
    kwargs = []
    if trial.conventions.causal != "bottom_right":
        kwargs.append(f"alignment={trial.conventions.alignment!r}")
    if trial.conventions.mask_true != "attend":
        kwargs.append(f"mask_true={trial.conventions.mask_true!r}")
    line = f"{trial.translate(recipe)!r}.problem({', '.join(kwargs)})"
    if trial.implementation.quantized is not None:
        return f"{line}, then quantized: script() has the arrays"
    if trial.implementation.latent is not None:
        return f"{line}, then with the first columns of k for v: script() has the arrays"
    if problem is None or are_identical(problem, trial.problem(recipe)):
        return line
    return f"{line}, then changed: script() has the arrays"
