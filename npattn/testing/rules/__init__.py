"""The rules of docs/semantics.md as properties that an implementation has, or has not.

Each property is a function of a `Trial` and a `Recipe`; it raises `Violation` where the rule is
broken, and returns the largest error / allowed error that it saw (None: the recipe had nothing to
show). Where it can, it needs no reference beside the rule itself.
"""

from npattn.testing.rules import (
    aggregate,
    agreement,
    differences,
    extremes,
    gradients,
    hidden,
    identities,
    memory,
    softmax,
    symmetry,
)
from npattn.testing.rules.register import REGISTER, Property, rule

__all__ = ["PROPERTIES", "Property", "rule"]

# The order in which reports list them.
FAMILIES = [
    module.__name__
    for module in (
        agreement,
        softmax,
        hidden,
        symmetry,
        identities,
        gradients,
        differences,
        extremes,
        memory,
        aggregate,
    )
]

PROPERTIES: dict[str, Property] = dict(
    sorted(REGISTER.items(), key=lambda item: FAMILIES.index(item[1].check.__module__))
)
"""Every property, by rule."""
