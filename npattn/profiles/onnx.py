"""ONNX: the operator Attention."""

from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["ATTENTION", "ATTENTION_1_22"]

# onnx/defs/nn/defs.cc, Attention-25, without a cache: the offset of is_causal is 0 there.
ATTENTION = Profile(
    name="onnx",
    version="1.23",
    about="operator Attention of ONNX, opsets 23 to 25, without a cache",
    conventions=Conventions(causal="top_left", empty_row="zero"),
    signature={
        "attn_mask": "mask or bias",
        "is_causal": "causal",
        "scale": "scale",
        "softcap": "softcap",
    },
)

# Errata of Attention-23 and -24: "corrected in version 1.23", NaN for fully masked rows until then.
ATTENTION_1_22 = replace(
    ATTENTION,
    name="onnx@1.22",
    version="1.22",
    conventions=replace(ATTENTION.conventions, empty_row="nan"),
)
