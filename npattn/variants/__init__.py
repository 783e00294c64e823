"""Attention that is no softmax over one set of scores: other sums, and other states."""

from npattn.variants import differential, linear

__all__ = ["differential", "linear"]
