"""Differences of two profiles, or of two implementations, in words and with numbers."""
