"""Keras: keras.ops.dot_product_attention, and what its layers compute themselves."""

from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.jax import NN
from npattn.profiles.profile import Profile

__all__ = [
    *("LAYER", "MULTIHEAD"),
    *("OPS", "OPS_JAX", "OPS_OPENVINO", "OPS_TENSORFLOW", "OPS_TORCH"),
]

# keras/src/backend/numpy/nn.py of 3.15.1, _get_large_negative: −0.7 · 3.38953e38 (−0.7 · 65500 in
# float16) takes the place of hidden scores. A query whose keys all have a bias of −inf gives NaN,
# as run on NumPy.
# Documentation of 3.15, keras.ops.dot_product_attention: query (B, T, N, H), key (B, S, K, H). With
# another B on JAX it takes a way of its own, where a mask (T, S) becomes (T, 1, 1, S).
OPS = Profile(
    name="keras",
    version="3.15",
    about="keras.ops.dot_product_attention on NumPy",
    conventions=Conventions(causal="top_left", hidden_fill=-0.7 * 3.38953e38, empty_row="nan"),
    signature={"bias": "bias", "mask": "mask", "scale": "scale", "is_causal": "causal"},
    layout="BTHD",
    refuses=(
        "q, k, v of another rank than 4",
        "broadcast: query, key and value have one B",
        "softcap: attn_logits_soft_cap is only supported on a TPU",
    ),
)

# keras/src/backend/jax/nn.py of 3.15.1 calls jax.nn.dot_product_attention, whose number for hidden
# scores is another one, as run.
OPS_JAX = replace(
    OPS,
    name="keras.jax",
    about="keras.ops.dot_product_attention on JAX",
    conventions=NN.conventions,
)

# It gives bias and is_causal to torch's scaled_dot_product_attention, whose documentation
# (2.13) says "An error is thrown if both attn_mask and is_causal are set."
CAUSAL_ALONE = "bias+causal: it is torch's attn_mask beside is_causal"

# keras/src/backend/torch/nn.py of 3.15.1: where(mask, 0, that number) is the attn_mask of torch's
# scaled_dot_product_attention, which adds it.
OPS_TORCH = replace(
    OPS,
    name="keras.torch",
    about="keras.ops.dot_product_attention on PyTorch",
    conventions=Conventions(causal="top_left", hidden_add=-0.7 * 3.38953e38),
    refuses=(*OPS.refuses, "mask+bias: one of them at a time", CAUSAL_ALONE),
)

# keras/src/backend/tensorflow/nn.py of 3.15.1: the number of the backend NumPy.
OPS_TENSORFLOW = replace(
    OPS, name="keras.tensorflow", about="keras.ops.dot_product_attention on TensorFlow"
)

# keras/src/backend/openvino/nn.py of 3.15.1: a boolean mask is that of OpenVINO's
# ScaledDotProductAttention, where a fully masked row is NaN, and beside a bias becomes 0 and
# finfo.min, which is added.
OPS_OPENVINO = replace(
    OPS,
    name="keras.openvino",
    about="keras.ops.dot_product_attention on OpenVINO",
    conventions=Conventions(causal="top_left", empty_row="nan"),
)

# keras/src/layers/attention/attention.py of 3.15.1, Attention._apply_scores: scores − 1e9 where the
# mask hides (65504 in float16). That is one of values, (B, S); the triangle is from the top left.
LAYER = Profile(
    name="keras.attention",
    version="3.15",
    about="keras.layers.Attention, one head at a time",
    conventions=Conventions(causal="top_left", hidden_add=-1e9),
    signature={"mask": "mask", "scale": "scale", "is_causal": "causal"},
    refuses=(
        "K < H: it has one head",
        "rank 2, rank 3, rank 5: asked as (B, H, T, D) here",
        "a mask that differs between queries",
    ),
)

# keras/src/layers/activations/softmax.py of 3.15.1: −1e9 takes the place of hidden scores, and
# then 0 that of their weights. keras.layers.MultiHeadAttention calls it if it returns scores or has
# a dropout.
MULTIHEAD = Profile(
    name="keras.mha",
    version="3.15",
    about="keras.layers.MultiHeadAttention with its scores, between its projections",
    conventions=Conventions(causal="top_left"),
    signature={"attention_mask": "mask", "use_causal_mask": "causal"},
    layout="BTHD",
    refuses=(
        "K < H: one num_heads for all",
        "broadcast: query, key and value have one B",
    ),
)
