"""The judge: ``check(f)`` holds an attention implementation against every rule of the semantics.

Needs hypothesis, rich and click: ``pip install 'npattn[check]'``.
"""

from npattn.problem import Cotangents
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.check import check
from npattn.testing.compare import Comparison, compare
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.report import Report
from npattn.testing.spot import SpotCheck, spot_check

__all__ = [
    "Comparison",
    "Cotangents",
    "Implementation",
    "ImplementationError",
    "Outcome",
    "Recipe",
    "Report",
    "Rounding",
    "SpotCheck",
    "check",
    "compare",
    "spot_check",
]
