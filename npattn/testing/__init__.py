"""The judge: ``check(f)`` tests an attention implementation against every rule of the semantics.

Names are loaded when they are first used. To add rules, targets or mistakes, see
`npattn.testing.extend`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npattn.problem import Cotangents
    from npattn.testing.adapters.base import ImplementationError
    from npattn.testing.adapters.implementation import Implementation
    from npattn.testing.bounds.rounding import Integers, Rounding
    from npattn.testing.cases.recipe import Recipe
    from npattn.testing.check import check
    from npattn.testing.compare import Comparison, Exact, compare, exact
    from npattn.testing.diagnosis.fingerprint import Fingerprint, fingerprint
    from npattn.testing.difference.diff import diff
    from npattn.testing.difference.record import Difference
    from npattn.testing.dumps.judge import DumpReport, compare_dump
    from npattn.testing.dumps.record import record
    from npattn.testing.gradients.check import check_gradients
    from npattn.testing.gradients.report import GradientReport
    from npattn.testing.modules.check import check_module, compare_module
    from npattn.testing.report.cause import Cause
    from npattn.testing.report.outcome import Outcome
    from npattn.testing.report.report import Report
    from npattn.testing.spot import SpotCheck, spot_check
    from npattn.testing.suite import Suite, parametrize
    from npattn.testing.variants.check import check_variant

__all__ = [
    "Cause",
    "Comparison",
    "Cotangents",
    "Difference",
    "DumpReport",
    "Exact",
    "Fingerprint",
    "GradientReport",
    "Implementation",
    "ImplementationError",
    "Integers",
    "Outcome",
    "Recipe",
    "Report",
    "Rounding",
    "SpotCheck",
    "Suite",
    "check",
    "check_gradients",
    "check_module",
    "check_variant",
    "compare",
    "compare_dump",
    "compare_module",
    "diff",
    "exact",
    "fingerprint",
    "parametrize",
    "record",
    "spot_check",
]

_HOMES = {
    "Cause": "npattn.testing.report.cause",
    "Comparison": "npattn.testing.compare",
    "Cotangents": "npattn.problem",
    "Difference": "npattn.testing.difference.record",
    "DumpReport": "npattn.testing.dumps.judge",
    "Exact": "npattn.testing.compare",
    "Fingerprint": "npattn.testing.diagnosis.fingerprint",
    "GradientReport": "npattn.testing.gradients.report",
    "Implementation": "npattn.testing.adapters.implementation",
    "ImplementationError": "npattn.testing.adapters.base",
    "Outcome": "npattn.testing.report.outcome",
    "Recipe": "npattn.testing.cases.recipe",
    "Report": "npattn.testing.report.report",
    "Integers": "npattn.testing.bounds.rounding",
    "Rounding": "npattn.testing.bounds.rounding",
    "SpotCheck": "npattn.testing.spot",
    "Suite": "npattn.testing.suite",
    "check": "npattn.testing.check",
    "check_gradients": "npattn.testing.gradients.check",
    "check_module": "npattn.testing.modules.check",
    "compare_module": "npattn.testing.modules.check",
    "compare_dump": "npattn.testing.dumps.judge",
    "record": "npattn.testing.dumps.record",
    "compare": "npattn.testing.compare",
    "diff": "npattn.testing.difference.diff",
    "exact": "npattn.testing.compare",
    "fingerprint": "npattn.testing.diagnosis.fingerprint",
    "parametrize": "npattn.testing.suite",
    "spot_check": "npattn.testing.spot",
    "check_variant": "npattn.testing.variants.check",
}

_MODULES = ("extend", "strategies", "targets", "tolerance", "variants")


class _Door(ModuleType):
    """A module whose public functions are not shadowed by the submodules of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door

if not TYPE_CHECKING:  # which would take any name for one of npattn.testing's

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"npattn.testing.{name}")
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'npattn.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
