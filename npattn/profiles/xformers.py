"""xFormers: xformers.ops.memory_efficient_attention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["MEMORY_EFFICIENT"]

# Docstring of memory_efficient_attention, facebookresearch/xformers, xformers/ops/fmha/__init__.py:
# [B, M, H, K], attn_bias is added, and "Equivalent pytorch code", whose softmax gives NaN where all
# scores are −inf. Read, not run.
MEMORY_EFFICIENT = Profile(
    name="xformers",
    version="0.0.2x",
    about="xformers.ops.memory_efficient_attention",
    conventions=Conventions(empty_row="nan"),
    signature={"attn_bias": "bias", "scale": "scale"},
    layout="BTHD",
    refuses=("boolean masks: a tensor as attn_bias is added", "K < H: with four axes"),
)
