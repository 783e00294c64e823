"""JAX and its libraries: jax.nn, Flax, Haiku, Equinox, and Keras on every backend."""

from dataclasses import replace

import numpy as np

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

# jax/_src/nn/functions.py of 0.10.2: _apply_masks puts _get_large_negative at hidden scores, so
# that a query that sees nothing gives the mean; one whose keys all have a bias of −inf gives NaN,
# as run. Masks align the first query with the first key.
JAX_NN = Profile(
    name="jax.nn", version="0.10",
    about="jax.nn.dot_product_attention",
    conventions=Conventions(
        causal="top_left",
        hidden_fill=float(np.float32(-0.7) * np.finfo(np.float32).max),
        empty_row="nan",
    ),
    signature={
        "bias": "bias", "mask": "mask", "scale": "scale", "is_causal": "causal",
        "local_window_size": "window of numbers",
        "return_residual": "lse (B, T, H) without gradient",
    },
    layout="BTHD",
    refuses=(
        "E != D: value must have the shape of key",
        "a mask or bias of rank 2: it must be 4D",
    ),
)  # fmt: skip

# The same function: _get_padding_mask_logits hides what is behind the lengths, and queries behind
# theirs give 0. Masks and windows count from the first query and key. A sample of length 0 gets
# the mean of all slots, as run: so the fill of JAX_NN says.
JAX_LENGTHS = Profile(
    name="jax.nn.lengths", version="0.10",
    about="jax.nn.dot_product_attention with query_seq_lengths and key_value_seq_lengths",
    conventions=Conventions(causal="top_left"),
    signature={
        "query_seq_lengths": "lengths of queries", "key_value_seq_lengths": "lengths of keys",
        "scale": "scale", "is_causal": "causal", "local_window_size": "window of numbers",
        "return_residual": "lse (B, T, H) without gradient",
    },
    layout="BTHD", refuses=("E != D: value must have the shape of key",),
)  # fmt: skip

# flax/linen/attention.py of 0.12.8, dot_product_attention_weights: where(mask, scores,
# finfo(dtype).min). It asserts equal leading axes and equal numbers of heads. A query whose keys
# all have a bias of −inf gives NaN, as run.
FLAX_LINEN = Profile(
    name="flax", version="0.12",
    about="flax.linen.dot_product_attention",
    conventions=Conventions(hidden_fill="min", empty_row="nan"),
    signature={"bias": "bias", "mask": "mask"}, layout="BTHD",
    refuses=("K < H: it asserts equal numbers of heads", "broadcast: and equal leading axes"),
)  # fmt: skip

# flax/nnx/nn/attention.py of 0.12.8, dot_product_attention: "Will use the more optimized
# `jax.nn.dot_product_attention` if dropout is not activated and `module=None`."
FLAX_NNX = replace(
    JAX_NN, name="flax.nnx", version="0.12",
    about="flax.nnx.dot_product_attention",
    signature={"bias": "bias", "mask": "mask", "is_causal": "causal"},
)  # fmt: skip

# The same file, dot_product_attention_weights: where(mask, scores, finfo(dtype).min), a triangle
# of T × S, and query heads that share a key head one after the other.
FLAX_NNX_WEIGHTS = replace(
    FLAX_NNX, name="flax.nnx-weights",
    about="flax.nnx.dot_product_attention by its dot_product_attention_weights",
    conventions=Conventions(causal="top_left", hidden_fill="min", empty_row="nan"),
    refuses=("broadcast: it asserts equal leading axes",),
)  # fmt: skip

# haiku/_src/attention.py of 0.0.17, MultiHeadAttention.__call__: where(mask, logits, -1e30), with a
# mask of the rank of the logits.
HAIKU = Profile(
    name="haiku", version="0.0.17",
    about="haiku.MultiHeadAttention between its projections",
    conventions=Conventions(hidden_fill=-1e30), signature={"mask": "mask"}, layout="BTHD",
    refuses=("K < H: one num_heads for all", "a mask of another rank than the scores"),
)  # fmt: skip

# equinox/nn/_attention.py of 0.13.8, dot_product_attention_weights: where(mask, logits,
# finfo(logits.dtype).min), on q (T, D), k (S, D), with a mask of exactly (T, S).
EQUINOX = Profile(
    name="equinox", version="0.13",
    about="dot_product_attention of equinox.nn.MultiheadAttention, one head at a time",
    conventions=Conventions(hidden_fill="min"), signature={"mask": "mask"},
    refuses=("a mask of another shape than (T, S)",),
)  # fmt: skip

# keras/src/backend/numpy/nn.py of 3.15.1, _get_large_negative: −0.7 · 3.38953e38 (−0.7 · 65500 in
# float16) takes the place of hidden scores. A query whose keys all have a bias of −inf gives NaN,
# as run on NumPy.
# Documentation of 3.15, keras.ops.dot_product_attention: query (B, T, N, H), key (B, S, K, H). With
# another B on JAX it takes a way of its own, where a mask (T, S) becomes (T, 1, 1, S).
KERAS = Profile(
    name="keras", version="3.15",
    about="keras.ops.dot_product_attention on NumPy",
    conventions=Conventions(causal="top_left", hidden_fill=-0.7 * 3.38953e38, empty_row="nan"),
    signature={"bias": "bias", "mask": "mask", "scale": "scale", "is_causal": "causal"},
    layout="BTHD",
    refuses=(
        "q, k, v of another rank than 4",
        "broadcast: query, key and value have one B",
        "softcap: attn_logits_soft_cap is only supported on a TPU",
    ),
)  # fmt: skip

# keras/src/backend/jax/nn.py of 3.15.1 calls jax.nn.dot_product_attention, whose number for hidden
# scores is another one, as run.
KERAS_JAX = replace(
    KERAS, name="keras.jax",
    about="keras.ops.dot_product_attention on JAX",
    conventions=JAX_NN.conventions,
)  # fmt: skip

# It gives bias and is_causal to torch's scaled_dot_product_attention, whose documentation
# (2.13) says "An error is thrown if both attn_mask and is_causal are set."
CAUSAL_ALONE = "bias+causal: it is torch's attn_mask beside is_causal"

# keras/src/backend/torch/nn.py of 3.15.1: where(mask, 0, that number) is the attn_mask of torch's
# scaled_dot_product_attention, which adds it.
KERAS_TORCH = replace(
    KERAS, name="keras.torch",
    about="keras.ops.dot_product_attention on PyTorch",
    conventions=Conventions(causal="top_left", hidden_add=-0.7 * 3.38953e38),
    refuses=(*KERAS.refuses, "mask+bias: one of them at a time", CAUSAL_ALONE),
)  # fmt: skip

# keras/src/backend/tensorflow/nn.py of 3.15.1: the number of the backend NumPy.
KERAS_TENSORFLOW = replace(
    KERAS, name="keras.tensorflow", about="keras.ops.dot_product_attention on TensorFlow"
)

# keras/src/backend/openvino/nn.py of 3.15.1: a boolean mask is that of OpenVINO's
# ScaledDotProductAttention, where a fully masked row is NaN, and beside a bias becomes 0 and
# finfo.min, which is added.
KERAS_OPENVINO = replace(
    KERAS, name="keras.openvino",
    about="keras.ops.dot_product_attention on OpenVINO",
    conventions=Conventions(causal="top_left", empty_row="nan"),
)  # fmt: skip

# keras/src/layers/attention/attention.py of 3.15.1, Attention._apply_scores: scores − 1e9 where the
# mask hides (65504 in float16). That is one of values, (B, S); the triangle is from the top left.
KERAS_ATTENTION = Profile(
    name="keras.attention", version="3.15",
    about="keras.layers.Attention, one head at a time",
    conventions=Conventions(causal="top_left", hidden_add=-1e9),
    signature={"mask": "mask", "scale": "scale", "is_causal": "causal"},
    refuses=(
        "K < H: it has one head",
        "rank 2, rank 3, rank 5: asked as (B, H, T, D) here",
        "a mask that differs between queries",
    ),
)  # fmt: skip

# keras/src/layers/activations/softmax.py of 3.15.1: −1e9 takes the place of hidden scores, and
# then 0 that of their weights. keras.layers.MultiHeadAttention calls it if it returns scores or has
# a dropout.
KERAS_MHA = Profile(
    name="keras.mha", version="3.15",
    about="keras.layers.MultiHeadAttention with its scores, between its projections",
    conventions=Conventions(causal="top_left"),
    signature={"attention_mask": "mask", "use_causal_mask": "causal"}, layout="BTHD",
    refuses=("K < H: one num_heads for all", "broadcast: query, key and value have one B"),
)  # fmt: skip
