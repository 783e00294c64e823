"""Derived tolerances: how far a result may be off, per element.

Source: docs/tolerance.md.
"""

from npattn.testing.bounds.allowed import bounds, certificate, deviations
from npattn.testing.bounds.allowed import tolerance as allowed
from npattn.testing.bounds.rounding import Integers, Rounding

__all__ = ["Integers", "Rounding", "allowed", "bounds", "certificate", "deviations"]
