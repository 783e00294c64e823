"""PaddlePaddle: paddle.nn.functional.scaled_dot_product_attention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["SDPA"]

# Docstring of 3.3: arrays are (B, T, H, D); True "should take part in attention"; "If is_causal is
# set to True, the causal mask should not be provided, otherwise the provided mask will be ignored".
# paddle/nn/functional/sdpa.py: where(mask, 0, −inf) is added, so that a row of them is NaN, as run;
# in float32 it is the mean where the number of keys fills vector registers (docs/findings.md).
SDPA = Profile(
    name="paddle",
    version="3.3",
    about="paddle.nn.functional.scaled_dot_product_attention on the CPU",
    conventions=Conventions(causal="top_left", empty_row="nan"),
    signature={"attn_mask": "mask or bias", "is_causal": "causal", "scale": "scale"},
    layout="BTHD",
    refuses=('mask+causal, bias+causal: "the provided mask will be ignored"',),
)
