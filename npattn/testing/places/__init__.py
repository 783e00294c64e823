"""Tell on which problems a function fails, by asking it: a place is attacked before it is said."""

from npattn.testing.places.asking import Answer, Asking, Spent, Value
from npattn.testing.places.atoms import Atom, Pair, describe_clauses
from npattn.testing.places.find import Place, find_clause, find_place

__all__ = [
    "Answer",
    "Asking",
    "Atom",
    "Pair",
    "Place",
    "Spent",
    "Value",
    "describe_clauses",
    "find_clause",
    "find_place",
]
