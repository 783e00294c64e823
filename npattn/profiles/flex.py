"""PyTorch's FlexAttention: torch.nn.attention.flex_attention.flex_attention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["FLEX"]

# Docstring of torch 2.13: score_mod(score, b, h, q_idx, k_idx), and masks as a BlockMask of such a
# function. Run on the CPU: a query that sees nothing gives 0, with an lse of −inf.
FLEX = Profile(
    name="flex",
    version="2.13",
    about="torch.nn.attention.flex_attention.flex_attention",
    conventions=Conventions(empty_row="zero"),
    signature={
        "score_mod": "score_mod",
        "scale": "scale",
        "enable_gqa": "shared heads",
        "return_lse": "return_lse",
    },
    refuses=("mask and bias as arrays: they are functions",),
)
