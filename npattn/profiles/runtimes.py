"""Runtimes and array libraries: MLX, ONNX, OpenVINO, PaddlePaddle, tinygrad, ggml, ncnn, NumPy."""

from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

# Docstring of 0.32.4: a mask is boolean or additive, "causal" is aligned to the lower right. Run on
# the CPU: a query whose keys are masked gives the mean, also under "causal"; one whose keys have a
# bias of −inf gives NaN.
MLX = Profile(
    name="mlx", version="0.32",
    about="mlx.core.fast.scaled_dot_product_attention",
    conventions=Conventions(hidden_fill="min", empty_row="nan"),
    signature={"mask": "mask or bias", "scale": "scale", "sinks": "sinks"},
    refuses=(
        'causal as a flag: it is the word mask="causal"',
        "rank 2, rank 3, rank 5: it takes (B, H, T, D)",
    ),
)  # fmt: skip

# onnx/defs/nn/defs.cc, Attention-25, without a cache: the offset of is_causal is 0 there.
ONNX = Profile(
    name="onnx", version="1.23",
    about="operator Attention of ONNX, opsets 23 to 25, without a cache",
    conventions=Conventions(causal="top_left", empty_row="zero"),
    signature={
        "attn_mask": "mask or bias", "is_causal": "causal", "scale": "scale", "softcap": "softcap",
    },
)  # fmt: skip

# Errata of Attention-23 and -24: "corrected in version 1.23", NaN for fully masked rows until then.
ONNX_1_22 = replace(
    ONNX, name="onnx@1.22", version="1.22", conventions=replace(ONNX.conventions, empty_row="nan"),
)  # fmt: skip

# Run, each release of 1.18 to 1.23: until 1.21 the mask comes before the softcap, which makes a
# hidden score −softcap, and in 1.18.0 and 1.19.0 query head h uses key/value head h % K.
ONNX_1_21 = replace(
    ONNX_1_22, name="onnx@1.21", version="1.21",
    conventions=replace(ONNX_1_22.conventions, softcap="after_mask"),
)  # fmt: skip
ONNX_1_19 = replace(
    ONNX_1_21, name="onnx@1.19", version="1.19",
    conventions=replace(ONNX_1_21.conventions, kv_head="tile"),
)  # fmt: skip
ONNX_1_18 = replace(
    ONNX_1_19, name="onnx@1.18", version="1.18",
    refuses=("mask+causal: an assertion of the evaluator",),
)  # fmt: skip

# The target onnxruntime runs this one, on the CPU.
RUNTIME = replace(
    ONNX, name="onnxruntime", version="1.31",
    about="operator Attention by ONNX Runtime",
)  # fmt: skip

# microsoft/onnxruntime, docs/ContribOperators.md of 1.31, com.microsoft.MultiHeadAttention:
# mask_filter_value is "The value to be filled in the attention mask. Default value is -10000.0f";
# run, a mask of 0 and that is added to the scores. num_heads is one number for all three.
RUNTIME_MHA = Profile(
    name="onnxruntime.mha", version="1.32",
    about="operator com.microsoft.MultiHeadAttention of ONNX Runtime",
    conventions=Conventions(hidden_add=-1e4, empty_row="nan"),
    signature={"attention_bias": "bias", "key_padding_mask": "key padding", "scale": "scale"},
    refuses=(
        "masks of queries: key_padding_mask has one for each key",
        "K < H: one num_heads for all",
    ),
)  # fmt: skip

# The same page, com.microsoft.GroupQueryAttention: "causal" always; "local_window_size:
# left_window_size for local attention", and run: 1 is the query's own key alone.
RUNTIME_GQA = Profile(
    name="onnxruntime.gqa", version="1.32",
    about="operator com.microsoft.GroupQueryAttention of ONNX Runtime, behind a cache",
    conventions=Conventions(window="inclusive"),
    refuses=(
        "D % 8: head_size must be a multiple of 8",
        "E != D: value has the head_size of query",
    ),
)  # fmt: skip

# docs.openvino.ai (2026), ScaledDotProductAttention-13: "causal: If true, assumes causal attention
# masking ... In this case attention_mask input is ignored." Run: a fully masked row is NaN.
OPENVINO = Profile(
    name="openvino", version="2026.4",
    about="operation ScaledDotProductAttention of OpenVINO, opset 13, on the CPU",
    conventions=Conventions(causal="top_left", empty_row="nan"),
    signature={"attention_mask": "mask or bias", "scale": "scale", "causal": "causal"},
    refuses=(
        'mask+causal, bias+causal: "attention_mask input is ignored"',
        "K < H: key has the heads of query",
    ),
)  # fmt: skip

# Docstring of 3.3: arrays are (B, T, H, D); True "should take part in attention"; "If is_causal is
# set to True, the causal mask should not be provided, otherwise the provided mask will be ignored".
# paddle/nn/functional/sdpa.py: where(mask, 0, −inf) is added, so that a row of them is NaN, as run;
# in float32 it is the mean where the number of keys fills vector registers (docs/findings.md).
PADDLE = Profile(
    name="paddle", version="3.3",
    about="paddle.nn.functional.scaled_dot_product_attention on the CPU",
    conventions=Conventions(causal="top_left", empty_row="nan"),
    signature={"attn_mask": "mask or bias", "is_causal": "causal", "scale": "scale"}, layout="BTHD",
    refuses=('mask+causal, bias+causal: "the provided mask will be ignored"',),
)  # fmt: skip

# tinygrad/mixin/rand.py of 0.14: tril() for is_causal, which raises beside attn_mask; a mask
# becomes 0 and −inf, which is added, so that a row of −inf is NaN, as run.
TINYGRAD = Profile(
    name="tinygrad", version="0.14",
    about="Tensor.scaled_dot_product_attention of tinygrad, on its interpreter in Python",
    conventions=Conventions(causal="top_left", empty_row="nan"),
    signature={"attn_mask": "mask or bias", "is_causal": "causal", "enable_gqa": "shared heads"},
    refuses=("mask+causal, bias+causal: cannot set attn_mask when is_causal=True",),
)  # fmt: skip

# include/ggml.h of ggml-org/ggml at d99724f: "n_head % n_head_kv == 0", the result is "permuted".
# src/ggml-cpu/ops.cpp there: the mask is asserted to be float16 and is added after the cap, a key
# of −inf is left out, and a row without any is 0 (S_inv); max_bias multiplies the mask by slopes
# that the number of heads fixes. k and v are taken in float32, and in float16, whose products with
# the weights are then summed in float16, unless 64 queries are computed at once.
GGML = Profile(
    name="ggml", version="0.26",
    about="ggml_flash_attn_ext of ggml, the library of llama.cpp, on the CPU",
    conventions=Conventions(empty_row="zero"),
    signature={"mask": "mask", "scale": "scale", "logit_softcap": "softcap", "sinks": "sinks"},
    refuses=(
        "bias: it would be rounded to float16, as the mask is",
        "rank 2, rank 3, rank 5: its tensors have 4 axes",
    ),
)  # fmt: skip

# docs/developer-guide/operators.md of Tencent/ncnn at a4d2ea1: "qk = qk + attn_mask if attn_mask
# exists", and a scale of 0 is "auto = 1.f / sqrt(embed_dim)". Run on x86: a row of −inf is 0.
NCNN = Profile(
    name="ncnn", version="1.0",
    about="layer SDPA of ncnn on the CPU",
    conventions=Conventions(empty_row="zero"),
    signature={"attn_mask": "mask or bias", "scale": "scale"},
    refuses=(
        "rank 2, rank 3, rank 5: its arrays have 3 axes, a sample each",
        "scale 0: it stands for the default",
    ),
)  # fmt: skip

_HEADS = (
    "rank 2, rank 3, rank 5: heads are (B, H, T, D) here",
    "K < H: one number of heads for all",
    "broadcast: and one batch",
)
_DTYPE = {
    "shape-dtype": "NumPy 2.0 migration guide: a float64 scalar, as np.sqrt of an int, is not weak"
}
"""They divide by np.sqrt(D), so that float32 becomes float64 since NumPy 2."""

# numpy_ml/neural_nets/layers/layers.py of 0.1.2, DotProductAttention: Q "of shape (n_ex, *, d_k)",
# without a mask; scale is a flag, so that it is 1/√D or 1.
NUMPY_ML = Profile(
    name="numpy_ml", version="0.1",
    about="DotProductAttention of numpy-ml, in NumPy alone",
    refuses=_HEADS, promises=_DTYPE,
)  # fmt: skip

# neuralnetlib/layers.py of 5.0.0, MultiHeadAttention._softmax_with_mask: "masked positions
# (mask == 1) get a zero probability", and the sum of a row is 1e-6 at least, so that one without
# keys is 0.
NEURALNETLIB = Profile(
    name="neuralnetlib", version="5.0",
    about="MultiHeadAttention of neuralnetlib, in NumPy alone",
    conventions=Conventions(mask_true="hide", empty_row="zero"), signature={"mask": "mask"},
    refuses=_HEADS, promises=_DTYPE,
)  # fmt: skip

# neuralnetworknumpy/layers/SingleHeadAttention.py of 0.3.0: "True = block this position", whose
# score becomes −inf. Its backward adds up the gradients of one input.
NEURALNETWORKNUMPY = Profile(
    name="neuralnetworknumpy", version="0.3",
    about="SingleHeadAttention of neuralnetworknumpy, in NumPy alone",
    conventions=Conventions(mask_true="hide", empty_row="nan"), signature={"mask": "mask"},
    refuses=(*_HEADS, "T != S: self-attention"),
    promises=_DTYPE,
)  # fmt: skip

# gpt2.py of jaymody/picoGPT at 8172920: the mask is added, and −1e10 where its mha hides.
PICOGPT = Profile(
    name="picogpt", version="2023",
    about="attention of picoGPT, in NumPy alone",
    conventions=Conventions(hidden_add="min", empty_row="nan"),
    signature={"mask": "added mask or bias"},
    refuses=(*_HEADS, "mask+bias: one parameter, and their sum is the caller's"),
    promises=_DTYPE,
)  # fmt: skip
