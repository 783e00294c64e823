"""Positions of queries and keys, which attention itself does not see.

    rope  rope_backward                turn pairs of features by an angle that grows with position
    Rotary                             the same for the queries and keys of `MultiHeadAttention`
    plain  linear  ntk  dynamic_ntk    frequencies of `rope`: as published, and for sequences that
    yarn  llama3  longrope             are longer than those of the training
    sinusoidal  look_up                vectors that are added to the input, computed or looked up
    look_up_backward
    alibi_slopes                       of `npattn.biases.alibi`

T is the number of positions, D the size of a vector, R the number of features that `rope` turns.
"""

from npattn.positions.absolute import alibi_slopes, look_up, look_up_backward, sinusoidal
from npattn.positions.attention import Rotary
from npattn.positions.frequencies import (
    Frequencies,
    dynamic_ntk,
    linear,
    llama3,
    longrope,
    ntk,
    plain,
    yarn,
)
from npattn.positions.rotary import rope, rope_backward

__all__ = [
    "Frequencies", "Rotary", "alibi_slopes", "dynamic_ntk", "linear", "llama3", "longrope",
    "look_up", "look_up_backward", "ntk", "plain", "rope", "rope_backward", "sinusoidal", "yarn",
]  # fmt: skip
__dir__ = __all__.copy
