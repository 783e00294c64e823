"""Runs the rules: searches for failing problems, shrinks them, shares the work out."""
