"""TransformerEngine: transformer_engine.pytorch.DotProductAttention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["DOT_PRODUCT"]

# Docstrings of DotProductAttention, NVIDIA/TransformerEngine at d0067d0,
# dot_product_attention.py in transformer_engine/pytorch/attention/dot_product_attention:
# attention_mask is True where a key is hidden, causal_bottom_right is a mask type of its own,
# window_size is inclusive with −1 for an unlimited side. What an empty row gives depends on the
# backend that it chooses. Read, not run.
DOT_PRODUCT = Profile(
    name="transformer_engine",
    version="2.20",
    about="transformer_engine.pytorch.DotProductAttention, with causal_bottom_right",
    conventions=Conventions(causal="bottom_right", empty_row="zero"),
    layout="BTHD",
)
