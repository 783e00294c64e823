"""Flax: dot_product_attention of flax.linen and of flax.nnx."""

from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.jax import NN
from npattn.profiles.profile import Profile

__all__ = ["LINEN", "NNX", "NNX_WEIGHTS"]

# flax/linen/attention.py of 0.12.8, dot_product_attention_weights: where(mask, scores,
# finfo(dtype).min). It asserts equal leading axes and equal numbers of heads. A query whose keys
# all have a bias of −inf gives NaN, as run.
LINEN = Profile(
    name="flax",
    version="0.12",
    about="flax.linen.dot_product_attention",
    conventions=Conventions(hidden_fill="min", empty_row="nan"),
    signature={"bias": "bias", "mask": "mask"},
    layout="BTHD",
    refuses=("K < H: it asserts equal numbers of heads", "broadcast: and equal leading axes"),
)

# flax/nnx/nn/attention.py of 0.12.8, dot_product_attention: "Will use the more optimized
# `jax.nn.dot_product_attention` if dropout is not activated and `module=None`."
NNX = replace(
    NN,
    name="flax.nnx",
    version="0.12",
    about="flax.nnx.dot_product_attention",
    signature={"bias": "bias", "mask": "mask", "is_causal": "causal"},
)

# The same file, dot_product_attention_weights: where(mask, scores, finfo(dtype).min), a triangle
# of T × S, and query heads that share a key head one after the other.
NNX_WEIGHTS = replace(
    NNX,
    name="flax.nnx-weights",
    about="flax.nnx.dot_product_attention by its dot_product_attention_weights",
    conventions=Conventions(causal="top_left", hidden_fill="min", empty_row="nan"),
    refuses=("broadcast: it asserts equal leading axes",),
)
