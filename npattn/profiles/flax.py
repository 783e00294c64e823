"""Flax: flax.linen.dot_product_attention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["LINEN"]

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
