"""The zoo: wrong implementations of attention, each a few lines over one that is right.

`Attention` is the right one, in steps; a mutant overrides one of them. The judge is proven by
them: a rule that a mutant names in `killed_by` must fail it.
"""

from npattn.testing.mutants import (  # each module registers its own
    dropout,
    empty,
    gradients,
    heads,
    masks,
    memory,
    scores,
    softmax,
)
from npattn.testing.mutants.attention import Attention, base, base_backward
from npattn.testing.mutants.register import MUTANTS, Mutant, mutant

__all__ = [
    "MUTANTS",
    "Attention",
    "Mutant",
    "base",
    "base_backward",
    "dropout",
    "empty",
    "gradients",
    "heads",
    "masks",
    "memory",
    "mutant",
    "scores",
    "softmax",
]
