"""Checks in units of work, each in a process of its own, for one machine or many."""
