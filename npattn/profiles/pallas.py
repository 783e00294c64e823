"""JAX's Pallas kernels: three kernels for a GPU, three for a TPU."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["GPU_DECODE", "GPU_MHA", "GPU_PAGED", "TPU_FLASH", "TPU_PAGED", "TPU_SPLASH"]

_SCALES = {f"{name}_scales": f"descale of tokens of {name}" for name in "kv"}

# jax/experimental/pallas/ops/gpu/attention.py of jax 0.10.2: span_q >= span_k; errors of mha and
# of _mha_backward; sm_scale is 1 by default.
GPU_MHA = Profile(
    name="pallas.gpu",
    version="0.10",
    about="jax.experimental.pallas.ops.gpu.attention.mha",
    conventions=Conventions(causal="top_left"),
    signature={"sm_scale": "scale", "causal": "causal"},
    layout="BTHD",
    refuses=(
        "K < H: one key/value head for each query head",
        "E != D: the same head dimension",
        "T or S above a block of 128 that is no multiple of it",
        "gradients where T and S have different numbers of blocks",
    ),
)

# jax/experimental/pallas/ops/gpu/decode_attention.py: gqa, one query for each head.
GPU_DECODE = Profile(
    name="pallas.gpu-decode",
    version="0.10",
    about="jax.experimental.pallas.ops.gpu.decode_attention.gqa",
    conventions=Conventions(),
    signature={"sm_scale": "scale"},
    refuses=(
        "T other than 1: one step of decoding",
        "S that k_splits does not divide into parts of at least 16 keys",
    ),
)

# jax/experimental/pallas/ops/tpu/flash_attention.py: ab is added to the products before they are
# multiplied by sm_scale, in the kernel and in mha_reference; causal masks compare row and column
# from the top left, and hide by a large number; a query whose keys all have a bias of −inf gives
# NaN, as run.
TPU_FLASH = Profile(
    name="pallas.tpu-flash",
    version="0.10",
    about="jax.experimental.pallas.ops.tpu.flash_attention.flash_attention",
    conventions=Conventions(causal="top_left", bias="before_scale", empty_row="nan"),
    signature={"ab": "bias", "sm_scale": "scale", "causal": "causal"},
    refuses=(
        "K < H: one key/value head for each query head",
        "E != D: the same head dimension",
        "T or S that is no multiple of a block of 128",
    ),
)

# jax/experimental/pallas/ops/tpu/splash_attention: masks are True where a query may look;
# CausalMask and LocalMask count from the top left with an offset of 0, and offsets that leave rows
# empty lead "to undefined softmax", so that the target sets those to 0; the kernel has no scale;
# the cap comes before the mask.
TPU_SPLASH = Profile(
    name="pallas.tpu-splash",
    version="0.10",
    about="splash attention of jax.experimental.pallas.ops.tpu, make_splash_mha",
    conventions=Conventions(causal="top_left"),
    signature={"attn_logits_soft_cap": "softcap", "sinks": "sinks"},
    refuses=(
        "T or S that is no multiple of a block of 128",
        "mask with an axis of samples: one kernel is made for all",
    ),
)

# jax/experimental/pallas/ops/tpu/paged_attention/paged_attention_kernel.py: one query for each
# sequence, k_pages (K, N, P, D), lengths and page_indices; no scale and no alignment. It loads
# pages as bfloat16 (_maybe_dequantize), whatever they are; no keys give 0, as run. Of pages in int8
# and a factor for each token of each head the target makes its QuantizedTensor.
TPU_PAGED = Profile(
    name="pallas.tpu-paged",
    version="0.10",
    about="jax.experimental.pallas.ops.tpu.paged_attention.paged_attention",
    conventions=Conventions(),
    signature={
        "lengths": "lengths of keys",
        "page_indices": "page table",
        "softcap": "softcap",
        "scale": "scale",
    },
    quantized={"int8": _SCALES},
    layout="BTHD",
    refuses=(
        "T other than 1: one step of decoding",
        "E != D: k_pages and v_pages must have one shape",
    ),
)

# jax/experimental/pallas/ops/gpu/paged_attention.py: pages, block_tables and lengths as there; no
# scale, ValueError for k and v of two shapes. Of no keys it divides 0 by an epsilon. Its
# k_scales_pages and v_scales_pages have a factor for each token of each head.
GPU_PAGED = Profile(
    name="pallas.gpu-paged",
    version="0.10",
    about="jax.experimental.pallas.ops.gpu.paged_attention.paged_attention",
    conventions=Conventions(),
    signature={
        "lengths": "lengths of keys",
        "block_tables": "page table",
        "softcap": "softcap",
        "scale": "scale",
    },
    quantized={"int8": _SCALES},
    layout="BTHD",
    refuses=(
        "T other than 1: one step of decoding",
        "E != D: k_pages and v_pages must have one shape",
    ),
)
