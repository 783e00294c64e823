"""ONNX: the operator Attention."""

from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = [
    "ATTENTION",
    "ATTENTION_1_18",
    "ATTENTION_1_19",
    "ATTENTION_1_21",
    "ATTENTION_1_22",
    "RUNTIME",
    "RUNTIME_GQA",
    "RUNTIME_MHA",
]

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

# Run, each release of 1.18 to 1.23: until 1.21 the mask comes before the softcap, which makes a
# hidden score −softcap, and in 1.18.0 and 1.19.0 query head h uses key/value head h % K.
ATTENTION_1_21 = replace(
    ATTENTION_1_22,
    name="onnx@1.21",
    version="1.21",
    conventions=replace(ATTENTION_1_22.conventions, softcap="after_mask"),
)
ATTENTION_1_19 = replace(
    ATTENTION_1_21,
    name="onnx@1.19",
    version="1.19",
    conventions=replace(ATTENTION_1_21.conventions, kv_head="tile"),
)
ATTENTION_1_18 = replace(
    ATTENTION_1_19,
    name="onnx@1.18",
    version="1.18",
    refuses=("mask+causal: an assertion of the evaluator",),
)

# The target onnxruntime runs this one, on the CPU.
RUNTIME = replace(
    ATTENTION,
    name="onnxruntime",
    version="1.31",
    about="operator Attention by ONNX Runtime",
)

# microsoft/onnxruntime, docs/ContribOperators.md of 1.31, com.microsoft.MultiHeadAttention:
# mask_filter_value is "The value to be filled in the attention mask. Default value is -10000.0f";
# run, a mask of 0 and that is added to the scores. num_heads is one number for all three.
RUNTIME_MHA = Profile(
    name="onnxruntime.mha",
    version="1.32",
    about="operator com.microsoft.MultiHeadAttention of ONNX Runtime",
    conventions=Conventions(hidden_add=-1e4, empty_row="nan"),
    signature={
        "attention_bias": "bias",
        "key_padding_mask": "key padding",
        "scale": "scale",
    },
    refuses=(
        "masks of queries: key_padding_mask has one for each key",
        "K < H: one num_heads for all",
    ),
)

# The same page, com.microsoft.GroupQueryAttention: "causal" always; "local_window_size:
# left_window_size for local attention", and run: 1 is the query's own key alone.
RUNTIME_GQA = Profile(
    name="onnxruntime.gqa",
    version="1.32",
    about="operator com.microsoft.GroupQueryAttention of ONNX Runtime, behind a cache",
    conventions=Conventions(window="inclusive"),
    refuses=(
        "D % 8: head_size must be a multiple of 8",
        "E != D: value has the head_size of query",
    ),
)
