"""ggml, the library of llama.cpp: ggml_flash_attn_ext."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["FLASH"]

# include/ggml.h of ggml-org/ggml at d99724f: "n_head % n_head_kv == 0", the result is "permuted".
# src/ggml-cpu/ops.cpp there: the mask is asserted to be float16 and is added after the cap, a key
# of −inf is left out, and a row without any is 0 (S_inv); max_bias multiplies the mask by slopes
# that the number of heads fixes. k and v are taken in float32, and in float16, whose products with
# the weights are then summed in float16, unless 64 queries are computed at once.
FLASH = Profile(
    name="ggml",
    version="0.26",
    about="ggml_flash_attn_ext of ggml, the library of llama.cpp, on the CPU",
    conventions=Conventions(empty_row="zero"),
    signature={
        "mask": "mask",
        "scale": "scale",
        "logit_softcap": "softcap",
        "sinks": "sinks",
    },
    refuses=(
        "bias: it would be rounded to float16, as the mask is",
        "rank 2, rank 3, rank 5: its tensors have 4 axes",
    ),
)
