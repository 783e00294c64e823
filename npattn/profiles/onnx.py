"""ONNX: the operator Attention."""

from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["ATTENTION", "ATTENTION_1_22", "RUNTIME", "RUNTIME_MHA"]

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

# The target onnxruntime runs this one, on the CPU.
RUNTIME = replace(
    ATTENTION,
    name="onnxruntime",
    version="1.31",
    about="operator Attention by ONNX Runtime",
)

# microsoft/onnxruntime, contrib_ops/cuda/bert/multihead_attention.cc: mask_filter_value is −10000
# by default; a mask of 0 and that is added to the scores. Read, not run.
RUNTIME_MHA = Profile(
    name="onnxruntime.mha",
    version="1.31",
    about="operator com.microsoft.MultiHeadAttention of ONNX Runtime",
    conventions=Conventions(hidden_add=-1e4),
    signature={"attention_bias": "bias", "scale": "scale"},
    refuses=("masks of queries: key_padding_mask has one for each key",),
)
