"""Names for people who add rules or targets to the judge.

A rule is a function of a `Trial` and a `Recipe`, decorated with `rule`; it raises `Violation`, or
returns the largest error / tolerance (None if the recipe does not exercise it). A target is an
entry of `TARGETS`.

Examples
--------
>>> from npattn.testing.extend import Recipe, Trial, Violation, rule
>>> @rule("finite-output", "10")
... def finite_output(trial: Trial, recipe: Recipe) -> float:
...     "Finite inputs give a finite o."
...     problem = trial.problem(recipe)
...     if not np.isfinite(trial.implementation.forward(problem)["o"]).all():
...         raise Violation("o is not finite", problem)
...     return 0.0
"""

from npattn.problem import Problem
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules import PROPERTIES, Property, rule
from npattn.testing.targets import TARGETS, Target
from npattn.testing.trial import Evaluation, Suspicion, Trial, Violation

__all__ = [
    "PROPERTIES",
    "TARGETS",
    "Evaluation",
    "ImplementationError",
    "Problem",
    "Property",
    "Recipe",
    "Results",
    "Suspicion",
    "Target",
    "Trial",
    "Violation",
    "rule",
]
