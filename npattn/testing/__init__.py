"""The judge: ``check(f)`` holds an attention implementation against every rule of the semantics.

Needs hypothesis, rich and click: ``pip install 'npattn[check]'``.
"""

from npattn.testing.check import check
from npattn.testing.compare import Comparison, compare
from npattn.testing.implementation import Implementation, ImplementationError
from npattn.testing.recipe import Cotangents, Recipe
from npattn.testing.report import Outcome, Report
from npattn.testing.spot import SpotCheck, spot_check
from npattn.testing.tolerance import Rounding

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
