"""ThunderKittens: mha_forward and mha_backward of its attention for the H100."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["MHA"]

# HazyResearch/ThunderKittens at 0b55588, kernels/attention/mha_h100/mha_h100.cu: "D must be 64 or
# 128, and N must be a multiple of 64"; K divides H; one length, one D and bfloat16 are checked.
# Read, not run.
MHA = Profile(
    name="thunderkittens",
    version="0b55588",
    about="mha_forward and mha_backward of ThunderKittens, kernels/attention/mha_h100",
    conventions=Conventions(),
    signature={"causal": "causal"},
    refuses=(
        "T != S: one length",
        "E != D: one head dimension",
        "dtypes other than bfloat16",
        "D other than 64 and 128, T that is no multiple of 64",
    ),
)
