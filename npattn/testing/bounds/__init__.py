"""Tolerances: rounding models, and the bounds derived from them."""
