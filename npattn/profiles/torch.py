"""PyTorch: torch.nn.functional.scaled_dot_product_attention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["SDPA"]

# docs.pytorch.org, torch.nn.functional.scaled_dot_product_attention: "Efficient implementation
# equivalent to the following". Its textbook lines give NaN where a query sees nothing; all three
# CPU and CUDA implementations give 0 (aten/src/ATen/native/transformers/attention.cpp,
# _safe_softmax), forward and backward, as run on 2.13.
SDPA = Profile(
    name="torch.sdpa",
    version="2.13",
    about="torch.nn.functional.scaled_dot_product_attention",
    conventions=Conventions(causal="top_left", empty_row="zero"),
    signature={
        "attn_mask": "mask or bias",
        "is_causal": "causal",
        "scale": "scale",
        "enable_gqa": "shared heads",
    },
    refuses=('is_causal beside attn_mask: "Explicit attn_mask should not be set"',),
)
