"""Equinox: the attention of one head inside equinox.nn.MultiheadAttention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["HEAD"]

# equinox/nn/_attention.py of 0.13.8, dot_product_attention_weights: where(mask, logits,
# finfo(logits.dtype).min), on q (T, D), k (S, D), with a mask of exactly (T, S).
HEAD = Profile(
    name="equinox",
    version="0.13",
    about="dot_product_attention of equinox.nn.MultiheadAttention, one head at a time",
    conventions=Conventions(hidden_fill="min"),
    signature={"mask": "mask"},
    refuses=("a mask of another shape than (T, S)",),
)
