"""The judge of attention that is no Problem: linear and differential attention."""

from npattn.testing.variants.case import Case, Request
from npattn.testing.variants.check import check_variant, replay
from npattn.testing.variants.differential import DifferentialCase
from npattn.testing.variants.linear import LinearCase

__all__ = ["Case", "DifferentialCase", "LinearCase", "Request", "check_variant", "replay"]
