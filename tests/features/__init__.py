"""The features that attention systems have, and the tests that run each of them.

``python -m tests.features`` writes the table of docs/features.md from them.
"""
