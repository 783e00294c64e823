"""JAX: jax.nn.dot_product_attention."""

import numpy as np

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["LENGTHS", "NN"]

# jax/_src/nn/functions.py of 0.10.2: _apply_masks puts _get_large_negative at hidden scores, so
# that a query that sees nothing gives the mean; one whose keys all have a bias of −inf gives NaN,
# as run. Masks align the first query with the first key.
NN = Profile(
    name="jax.nn",
    version="0.10",
    about="jax.nn.dot_product_attention",
    conventions=Conventions(
        causal="top_left",
        hidden_fill=float(np.float32(-0.7) * np.finfo(np.float32).max),
        empty_row="nan",
    ),
    signature={
        "bias": "bias",
        "mask": "mask",
        "scale": "scale",
        "is_causal": "causal",
        "local_window_size": "window of numbers",
        "return_residual": "lse (B, T, H) without gradient",
    },
    layout="BTHD",
    refuses=(
        "E != D: value must have the shape of key",
        "a mask or bias of rank 2: it must be 4D",
    ),
)

# The same function: _get_padding_mask_logits hides what is behind the lengths, and queries behind
# theirs give 0. Masks and windows count from the first query and key. A sample of length 0 gets
# the mean of all slots, as run: so the fill of NN says.
LENGTHS = Profile(
    name="jax.nn.lengths",
    version="0.10",
    about="jax.nn.dot_product_attention with query_seq_lengths and key_value_seq_lengths",
    conventions=Conventions(causal="top_left"),
    signature={
        "query_seq_lengths": "lengths of queries",
        "key_value_seq_lengths": "lengths of keys",
        "scale": "scale",
        "is_causal": "causal",
        "local_window_size": "window of numbers",
        "return_residual": "lse (B, T, H) without gradient",
    },
    layout="BTHD",
    refuses=("E != D: value must have the shape of key",),
)
