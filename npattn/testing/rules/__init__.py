"""The rules of docs/semantics.md as properties of an implementation.

Each rule is a function of a `Trial` and a `Recipe`, one module a theme. It raises `Violation` if
the rule is broken, and returns the largest error / tolerance (None if the recipe does not
exercise the rule). If it can, it compares the implementation with itself, and needs no reference.
"""

from collections import ChainMap

from npattn.testing.rules import (
    agreement,
    calls,
    contents,
    differences,
    equivalents,
    extremes,
    first_calls,
    gradients,
    hidden,
    identities,
    memory,
    order_and_parts,
    reproducible,
    second_order,
    sequences,
    softmax,
    split_merge,
    systematic_error,
    unusual,
)
from npattn.testing.rules.register import ON_REQUEST, PROPERTIES, Property, rule

__all__ = ["ON_REQUEST", "PROPERTIES", "RULES", "Property", "rule"]

# Importing a module registers its rules. Reports list them in this order.
MODULES = (
    agreement,
    softmax,
    hidden,
    unusual,
    order_and_parts,
    split_merge,
    equivalents,
    identities,
    gradients,
    differences,
    extremes,
    memory,
    calls,
    contents,
    sequences,
    first_calls,
    reproducible,
    systematic_error,
)
MODULES_ON_REQUEST = (second_order,)

_ORDER = [module.__name__ for module in MODULES]
# Rules that others register come last.
for _name in sorted(PROPERTIES, key=lambda name: _ORDER.index(PROPERTIES[name].check.__module__)):
    PROPERTIES[_name] = PROPERTIES.pop(_name)

RULES = ChainMap(ON_REQUEST, PROPERTIES)  # iterates over the last one first
"""Those, and the rules that are asked by name alone."""
