"""Spot checks: an output of any length, compared with the exact one in a sample of its rows."""

from npattn.testing.spot.check import spot_check
from npattn.testing.spot.evaluation import sample_indices
from npattn.testing.spot.result import SpotCheck

__all__ = ["SpotCheck", "sample_indices", "spot_check"]
