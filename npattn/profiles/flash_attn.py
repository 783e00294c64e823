"""FlashAttention: flash_attn_func of the package flash-attn."""

import math

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["FLASH_ATTN"]

# Docstring of flash_attn_func, Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py: "the
# causal mask is aligned to the bottom right corner", "If the row of the mask is all zero, the
# output will be zero", keys "between [i + seqlen_k - seqlen_q - window_size[0], ...] inclusive".
# lse of an empty row is +inf: csrc/flash_attn/src/softmax.h, normalize_softmax_lse.
FLASH_ATTN = Profile(
    name="flash_attn",
    version="2.8",
    about="flash_attn_func of the package flash-attn",
    conventions=Conventions(causal="bottom_right", empty_row="zero", lse_empty=math.inf),
    signature={
        "softmax_scale": "scale",
        "causal": "causal",
        "window_size": "window or −1",
        "softcap": "softcap",
        "return_attn_probs": "lse without gradient",
    },
    layout="BTHD",
    refuses=(
        "dtypes other than float16 and bfloat16",
        "D above 256",
        "E != D",
        "mask and bias: it has neither",
    ),
)
