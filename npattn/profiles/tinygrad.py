"""tinygrad: Tensor.scaled_dot_product_attention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["SDPA"]

# tinygrad/mixin/rand.py of 0.14: tril() for is_causal, which raises beside attn_mask; a mask
# becomes 0 and −inf, which is added, so that a row of −inf is NaN, as run.
SDPA = Profile(
    name="tinygrad",
    version="0.14",
    about="Tensor.scaled_dot_product_attention of tinygrad, on its interpreter in Python",
    conventions=Conventions(causal="top_left", empty_row="nan"),
    signature={
        "attn_mask": "mask or bias",
        "is_causal": "causal",
        "enable_gqa": "shared heads",
    },
    refuses=("mask+causal, bias+causal: cannot set attn_mask when is_causal=True",),
)
