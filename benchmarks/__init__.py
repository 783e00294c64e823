"""Measurements of the judge and of the oracle, which nobody needs who uses them."""
