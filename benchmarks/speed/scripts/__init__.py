"""Measurements of one question each: python -m benchmarks.speed.scripts.NAME."""
