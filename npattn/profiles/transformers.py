"""Transformers: the attention that its models call eager."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["EAGER"]

# transformers/models/llama/modeling_llama.py of 5.23.0, eager_attention_forward, and its copies in
# other models: attention_mask is added, 0 where a query may attend and finfo(dtype).min elsewhere.
# Where all keys have a bias of −inf, the row is NaN, as run. Heads are (B, H, T, D) and the result
# is (B, T, H, D), beside the weights.
EAGER = Profile(
    name="transformers",
    version="5.23",
    about="eager_attention_forward of Hugging Face's models",
    conventions=Conventions(hidden_add="min", empty_row="nan", weights="after_dropout"),
    signature={
        "module": "module",
        "attention_mask": "added mask or bias",
        "scaling": "scale",
    },
    refuses=(
        "rank 2, rank 3, rank 5: its heads are (B, H, T, D)",
        "boolean masks: attention_mask is added",
    ),
)
