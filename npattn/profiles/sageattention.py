"""SageAttention: sageattn of the package sageattention."""

import math

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["SAGEATTENTION"]

# Docstring of sageattn, sageattention/core.py of sageattention 1.0.6: "Only applicable when qo_len
# == kv_len" of is_causal; its asserts name the dtypes, head_dim in [64, 96, 128], and the last axis
# contiguous. It returns no lse and has no backward. attn_qk_int8_per_block_causal.py adds −1e6 to
# hidden scores, which are in base 2.
SAGEATTENTION = Profile(
    name="sageattention",
    version="1.0.6",
    about="sageattn of SageAttention 1, a Triton kernel with queries and keys in int8",
    conventions=Conventions(hidden_add=-1e6 * math.log(2)),
    signature={"is_causal": "causal", "sm_scale": "scale"},
    refuses=(
        'T != S: is_causal is "only applicable when qo_len == kv_len", so that it is not asked',
        "D other than 64, 96 and 128",
        "E != D",
        "dtypes other than float16, bfloat16 and float32",
        "gradients",
    ),
)
