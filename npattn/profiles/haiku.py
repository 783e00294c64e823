"""Haiku: the attention inside haiku.MultiHeadAttention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["MULTIHEAD"]

# haiku/_src/attention.py of 0.0.17, MultiHeadAttention.__call__: where(mask, logits, -1e30), with a
# mask of the rank of the logits.
MULTIHEAD = Profile(
    name="haiku",
    version="0.0.17",
    about="haiku.MultiHeadAttention between its projections",
    conventions=Conventions(hidden_fill=-1e30),
    signature={"mask": "mask"},
    layout="BTHD",
    refuses=("K < H: one num_heads for all", "a mask of another rank than the scores"),
)
