"""The zoo: wrong implementations of attention, each a few lines over one that is right.

`Attention` is the right one, in steps; a mutant overrides one of them. The judge is proven by
them: a rule that a mutant names in `killed_by` must fail it.
"""

from npattn.mistakes import (  # noqa: F401  each module registers its own
    blind,
    cache,
    dropout,
    empty,
    gradients,
    heads,
    masks,
    memory,
    online,
    precision,
    scores,
    softmax,
    window,
)
from npattn.mistakes.attention import Attention, base, base_backward
from npattn.mistakes.register import REGISTER, Mutant, mutant

__all__ = ["MUTANTS", "Attention", "Mutant", "base", "base_backward", "mutant"]

MUTANTS: dict[str, Mutant] = dict(sorted(REGISTER.items(), key=lambda item: item[1].family))
"""The zoo by name, a family together."""
