"""Spot checks: an output of any length, held against the exact one in a sample of its rows."""

from npattn.testing.spot.evaluation import SpotCheck, drawn, spot_check

__all__ = ["SpotCheck", "drawn", "spot_check"]
