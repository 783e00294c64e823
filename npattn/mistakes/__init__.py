"""Wrong implementations of attention: each changes one step of an implementation that is right.

`Attention` is the right one, in replaceable steps; a mistake overrides one of them, and has a
sentence that explains it to a user. One of one expression is a row (`change`), any other a class.
"""

from npattn.mistakes import (  # noqa: F401  each module registers its own
    buffers,
    cache,
    dropout,
    empty,
    gate,
    gradients,
    heads,
    masks,
    memory,
    online_mistakes,
    precision,
    scores,
    softmax,
    window,
)
from npattn.mistakes.attention import Attention, base, base_backward
from npattn.mistakes.gated import Gated, with_gate
from npattn.mistakes.register import REGISTER, Mistake, mistake

__all__ = ["MISTAKES", "Attention", "Gated", "Mistake", "base", "base_backward", "mistake"]
__all__ += ["with_gate"]
__dir__ = __all__.copy


MISTAKES: dict[str, Mistake] = dict(sorted(REGISTER.items(), key=lambda item: item[1].family))
"""All mistakes by name, grouped by family."""
