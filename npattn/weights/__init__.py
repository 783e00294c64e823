"""Conversion of `MultiHeadAttention` from and to other frameworks and files, to the bit.

    ours      wq (in_q, H·D)        wo (H·E, out)       weights multiply from the right
    torch     q (H·D, in_q)         out (out, H·E)      transposed; q, k, v in one if all inputs are
    equinox   query (H·D, in_q)     output (out, H·E)   transposed
    keras     query (in_q, H, D)    output (H, E, out)  heads have an axis
    flax      query (in_q, H, D)    out (H, E, out)     heads have an axis; norms are a scale (D,)
    files     by the names of a family of models        and with options: rope, causal, bias, ...

The frameworks order columns head by head, scale the scores by 1/√D and put the heads side by side,
as ours do. Every array is copied, so that later changes of the source do not reach it. A part that
`MultiHeadAttention` cannot represent is an `OptionError`, never left out; so is a module that would
drop weights at random as it stands. Importing this loads no framework.
"""

from npattn.weights.checkpoint import Layer, from_checkpoint
from npattn.weights.equinox import from_equinox, to_equinox
from npattn.weights.families import LayerNames
from npattn.weights.files import load, save
from npattn.weights.flax import from_flax, to_flax
from npattn.weights.keras import from_keras, to_keras
from npattn.weights.torch import from_torch, to_torch

__all__ = [
    "Layer", "LayerNames", "from_checkpoint", "from_equinox", "from_flax", "from_keras",
    "from_torch", "load", "save", "to_equinox", "to_flax", "to_keras", "to_torch",
]  # fmt: skip
__dir__ = __all__.copy
