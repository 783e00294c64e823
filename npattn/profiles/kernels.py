"""Kernels for GPUs and TPUs: fla, SageAttention, Pallas, FlashInfer, TransformerEngine and more."""

import math
from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

# Docstring of parallel_attn, fla/ops/attn/parallel.py of fla-core 0.6.0: q [B, T, HQ, K], k and v
# with the same T; "each query at position i only attends to keys in [i - window_size + 1, i]. If
# None, full causal attention is used"; sink_bias is in the denominator alone.
FLA_PARALLEL = Profile(
    name="fla.parallel", version="0.6",
    about="fla.ops.attn.parallel_attn, a Triton kernel",
    signature={"scale": "scale", "sink_bias": "sinks"}, layout="BTHD",
    refuses=(
        "T != S: q, k and v have one T",
        "D above 256: asserted by parallel_attn_fwd",
        "attention that is not causal: without a window it is full causal attention",
    ),
)  # fmt: skip

# Docstring of attn_decoding_one_step, fla/ops/attn/decoding.py: one query at the end of each
# sequence; window_size is the "number of most recent keys attended to [...] including the current
# token". It has no backward.
FLA_DECODING = Profile(
    name="fla.decoding", version="0.6",
    about="fla.ops.attn.decoding.attn_decoding_one_step, a Triton kernel",
    signature={"scale": "scale", "sink_bias": "sinks"},
    refuses=("T other than 1: one step of decoding",),
)  # fmt: skip

# Docstring of sageattn, sageattention/core.py of sageattention 1.0.6: "Only applicable when qo_len
# == kv_len" of is_causal; its asserts name the dtypes, head_dim in [64, 96, 128], and the last axis
# contiguous. It returns no lse and has no backward. attn_qk_int8_per_block_causal.py adds −1e6 to
# hidden scores, which are in base 2.
SAGEATTENTION = Profile(
    name="sageattention", version="1.0.6",
    about="sageattn of SageAttention 1, a Triton kernel with queries and keys in int8",
    conventions=Conventions(hidden_add=-1e6 * math.log(2)),
    signature={"is_causal": "causal", "sm_scale": "scale"},
    refuses=(
        'T != S: is_causal is "only applicable when qo_len == kv_len", so that it is not asked',
        "D other than 64, 96 and 128", "E != D", "dtypes other than float16, bfloat16 and float32",
        "gradients",
    ),
)  # fmt: skip

_SCALES = {f"{name}_scales": f"descale of tokens of {name}" for name in "kv"}

# jax/experimental/pallas/ops/gpu/attention.py of jax 0.10.2: span_q >= span_k; errors of mha and
# of _mha_backward; sm_scale is 1 by default.
PALLAS_GPU_MHA = Profile(
    name="pallas.gpu", version="0.10",
    about="jax.experimental.pallas.ops.gpu.attention.mha",
    conventions=Conventions(causal="top_left"), signature={"sm_scale": "scale", "causal": "causal"},
    layout="BTHD",
    refuses=(
        "K < H: one key/value head for each query head",
        "E != D: the same head dimension",
        "T or S above a block of 128 that is no multiple of it",
        "gradients where T and S have different numbers of blocks",
    ),
)  # fmt: skip

# jax/experimental/pallas/ops/gpu/decode_attention.py: gqa, one query for each head.
PALLAS_GPU_DECODE = Profile(
    name="pallas.gpu-decode", version="0.10",
    about="jax.experimental.pallas.ops.gpu.decode_attention.gqa",
    signature={"sm_scale": "scale"},
    refuses=(
        "T other than 1: one step of decoding",
        "S that k_splits does not divide into parts of at least 16 keys",
    ),
)  # fmt: skip

# jax/experimental/pallas/ops/tpu/flash_attention.py: ab is added to the products before they are
# multiplied by sm_scale, in the kernel and in mha_reference; causal masks compare row and column
# from the top left, and hide by a large number; a query whose keys all have a bias of −inf gives
# NaN, as run.
PALLAS_TPU_FLASH = Profile(
    name="pallas.tpu-flash", version="0.10",
    about="jax.experimental.pallas.ops.tpu.flash_attention.flash_attention",
    conventions=Conventions(causal="top_left", bias="before_scale", empty_row="nan"),
    signature={"ab": "bias", "sm_scale": "scale", "causal": "causal"},
    refuses=(
        "K < H: one key/value head for each query head",
        "E != D: the same head dimension",
        "T or S that is no multiple of a block of 128",
    ),
)  # fmt: skip

# jax/experimental/pallas/ops/tpu/splash_attention: masks are True where a query may look;
# CausalMask and LocalMask count from the top left with an offset of 0, and offsets that leave rows
# empty lead "to undefined softmax", so that the target sets those to 0; the kernel has no scale;
# the cap comes before the mask.
PALLAS_TPU_SPLASH = Profile(
    name="pallas.tpu-splash", version="0.10",
    about="splash attention of jax.experimental.pallas.ops.tpu, make_splash_mha",
    conventions=Conventions(causal="top_left"),
    signature={"attn_logits_soft_cap": "softcap", "sinks": "sinks"},
    refuses=(
        "T or S that is no multiple of a block of 128",
        "mask with an axis of samples: one kernel is made for all",
    ),
)  # fmt: skip

# jax/experimental/pallas/ops/tpu/paged_attention/paged_attention_kernel.py: one query for each
# sequence, k_pages (K, N, P, D), lengths and page_indices; no scale and no alignment. It loads
# pages as bfloat16 (_maybe_dequantize), whatever they are; no keys give 0, as run. Of pages in int8
# and a factor for each token of each head the target makes its QuantizedTensor.
PALLAS_TPU_PAGED = Profile(
    name="pallas.tpu-paged", version="0.10",
    about="jax.experimental.pallas.ops.tpu.paged_attention.paged_attention",
    signature={
        "lengths": "lengths of keys", "page_indices": "page table", "softcap": "softcap",
        "scale": "scale",
    },
    quantized={"int8": _SCALES}, layout="BTHD",
    refuses=(
        "T other than 1: one step of decoding",
        "E != D: k_pages and v_pages must have one shape",
    ),
)  # fmt: skip

# jax/experimental/pallas/ops/gpu/paged_attention.py: pages, block_tables and lengths as there; no
# scale, ValueError for k and v of two shapes. Of no keys it divides 0 by an epsilon. Its
# k_scales_pages and v_scales_pages have a factor for each token of each head.
PALLAS_GPU_PAGED = replace(
    PALLAS_TPU_PAGED, name="pallas.gpu-paged",
    about="jax.experimental.pallas.ops.gpu.paged_attention.paged_attention",
    signature={
        "lengths": "lengths of keys", "block_tables": "page table", "softcap": "softcap",
        "scale": "scale",
    },
)  # fmt: skip

# Docstring of single_prefill_with_kv_cache in flashinfer-python 0.7.2, flashinfer/prefill.py:
# custom_mask [qo_len, kv_len] with True for what may be seen, causal "only effective when
# custom_mask is not provided", window_left inclusive. lse is in base 2, causal and window are
# aligned by kv_len − qo_len: include/flashinfer/attention/variants.cuh. Read, not run.
FLASHINFER = Profile(
    name="flashinfer", version="0.7",
    about="flashinfer.single_prefill_with_kv_cache",
    conventions=Conventions(causal="bottom_right", empty_row="zero", lse_base="2"),
    signature={
        "custom_mask": "mask", "causal": "causal", "sm_scale": "scale",
        "logits_soft_cap": "softcap", "return_lse": "lse without gradient",
    },
    refuses=(
        "mask+causal: causal is ignored beside custom_mask",
        "dtypes other than float16, bfloat16 and float8",
        "windows with an end to the right",
        "gradients",
    ),
)  # fmt: skip

# BatchPrefillWithPagedKVCacheWrapper in the same file: plan takes the arrays that say where the
# sequences are, and custom_mask (a matrix of each request, one behind the other); it is made with
# kv_layout; run takes q (nnz_qo, H, D) and pages (N, P, K, D) or (N, K, P, D), and lse is
# (nnz_qo, H). A window has no end to the right. Read, not run.
FLASHINFER_PAGED = replace(
    FLASHINFER, name="flashinfer.paged",
    about="flashinfer.BatchPrefillWithPagedKVCacheWrapper, its plan and run in one function",
    signature={
        "qo_indptr": "offsets of queries", "kv_indptr": "page offsets", "kv_indices": "page list",
        "last_page_len": "keys on last page", "custom_mask": "packed mask",
        "kv_layout": "order of pages", "causal": "causal", "sm_scale": "scale",
        "logits_soft_cap": "softcap", "return_lse": "lse (B, T, H) without gradient",
    },
    layout="BTHD",
    refuses=("dtypes other than float16, bfloat16 and float8", "gradients"),
)  # fmt: skip

# Docstrings of DotProductAttention, NVIDIA/TransformerEngine at d0067d0,
# dot_product_attention.py in transformer_engine/pytorch/attention/dot_product_attention:
# attention_mask is True where a key is hidden, causal_bottom_right is a mask type of its own,
# window_size is inclusive with −1 for an unlimited side. What an empty row gives depends on the
# backend that it chooses. Read, not run.
TRANSFORMER_ENGINE = Profile(
    name="transformer_engine", version="2.20",
    about="transformer_engine.pytorch.DotProductAttention, with causal_bottom_right",
    conventions=Conventions(causal="bottom_right", empty_row="zero"), layout="BTHD",
)  # fmt: skip

# HazyResearch/ThunderKittens at 0b55588, kernels/attention/mha_h100/mha_h100.cu: "D must be 64 or
# 128, and N must be a multiple of 64"; K divides H; one length, one D and bfloat16 are checked.
# Read, not run.
THUNDERKITTENS = Profile(
    name="thunderkittens", version="0b55588",
    about="mha_forward and mha_backward of ThunderKittens, kernels/attention/mha_h100",
    signature={"causal": "causal"},
    refuses=(
        "T != S: one length", "E != D: one head dimension", "dtypes other than bfloat16",
        "D other than 64 and 128, T that is no multiple of 64",
    ),
)  # fmt: skip
