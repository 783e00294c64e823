"""An `Outcome` of what became of a rule, with the line and the script that show it."""

from __future__ import annotations

from typing import Any

from npattn.testing.cases.recipe import Recipe
from npattn.testing.report.report import Outcome, Status
from npattn.testing.report.reproducer import script
from npattn.testing.rules import Property
from npattn.testing.trial import Trial

__all__ = ["outcome_of"]


ALTERED = (
    "hidden-",
    "nan-",
    "rows-sum",
    "bias-shift",
    "one-key",
    "value-linear",
    "sink-key",
    "equal-scores",
    "lse-gradient",
    "directional",
    "offset-bias",
    "large-products",
)
"""Rules that change a problem before they ask."""


def outcome_of(
    rule: Property | str,
    dtype: str,
    status: Status,
    *,
    worst: float = 0.0,
    examples: int = 0,
    message: str = "",
    problem: Any = None,
    recipe: Recipe | None = None,
    trial: Trial | None = None,
    error: Exception | None = None,
) -> Outcome:
    name = rule if isinstance(rule, str) else rule.rule
    changed = name.startswith(ALTERED)
    text = ""
    if problem is not None and trial is not None:
        text = script(trial, name, problem, error)
    return Outcome(
        rule=name,
        section="12, 14" if isinstance(rule, str) else rule.section,
        about="What it accepts it answers rightly, sizes of 0 and each option alone."
        if isinstance(rule, str)
        else rule.about,
        dtype=dtype,
        status=status,
        worst=worst,
        examples=examples,
        message=message,
        problem=problem,
        recipe="" if recipe is None or trial is None else _line(recipe, trial, changed),
        script_text=text,
    )


def _line(recipe: Recipe, trial: Trial, changed: bool) -> str:
    """The recipe as a line to paste, with `from npattn.testing import Recipe`."""
    words = []
    if trial.conventions.causal != "bottom_right":
        words.append(f"alignment={trial.conventions.causal!r}")
    if trial.conventions.mask_true != "attend":
        words.append(f"mask_true={trial.conventions.mask_true!r}")
    line = f"{trial.asked(recipe)!r}.problem({', '.join(words)})"
    return line if not changed else f"{line}, then changed: script() has the arrays"
