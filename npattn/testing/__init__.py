"""The judge: ``check(f)`` holds an attention implementation against every rule of the semantics.

Needs hypothesis, rich and click: ``pip install 'npattn[check]'``.
"""

from npattn.problem import Cotangents
from npattn.testing.adapters.implementation import Implementation, ImplementationError
from npattn.testing.bounds.allowed import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.check import check
from npattn.testing.compare import Comparison, compare
from npattn.testing.report.report import Outcome, Report
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
