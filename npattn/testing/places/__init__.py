"""Tell on which problems a function fails, by asking it: a place is attacked before it is said."""

from npattn.testing.places.asking import Answer, Asking, Sample, Spent, Value
from npattn.testing.places.atoms import Atom, Pair, describe_clauses, read_condition
from npattn.testing.places.find import Place, find_clause, find_place

__all__ = [
    "Answer",
    "Asking",
    "Atom",
    "Pair",
    "Place",
    "Sample",
    "Spent",
    "Value",
    "describe_clauses",
    "find_clause",
    "find_place",
    "read_condition",
]
