"""FlashAttention: flash_attn_func of flash-attn, of FlashAttention-3 and -4; and xFormers."""

import math
from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

# Docstring of flash_attn_func, Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py: "the
# causal mask is aligned to the bottom right corner", "If the row of the mask is all zero, the
# output will be zero", keys "between [i + seqlen_k - seqlen_q - window_size[0], ...] inclusive".
# lse of an empty row is +inf: csrc/flash_attn/src/softmax.h, normalize_softmax_lse.
FLASH_ATTN = Profile(
    name="flash_attn", version="2.8",
    about="flash_attn_func of the package flash-attn",
    conventions=Conventions(causal="bottom_right", empty_row="zero", lse_empty=math.inf),
    signature={
        "softmax_scale": "scale", "causal": "causal", "window_size": "window or −1",
        "softcap": "softcap", "return_attn_probs": "lse without gradient",
    },
    layout="BTHD",
    refuses=(
        "dtypes other than float16 and bfloat16", "D above 256", "E != D",
        "mask and bias: it has neither",
    ),
)  # fmt: skip

_DESCALES = {f"{name}_descale": f"descale of heads of {name}" for name in "qkv"}

# hopper/flash_attn_interface.py at 0251105 of the same repository, flash_attn_func; softmax.h there
# gives empty rows an lse of −inf. hopper/flash_api.cpp: q_descale, k_descale and v_descale are
# float32 (batch_size, num_heads_k) beside float8_e4m3fn, with an out in bfloat16. Read, not run.
FLASH_ATTN_3 = replace(
    FLASH_ATTN, name="flash_attn@3", version="3.0",
    about="flash_attn_func of FlashAttention-3, hopper/flash_attn_interface.py",
    conventions=Conventions(causal="bottom_right", empty_row="zero"),
    quantized={"float8_e4m3fn": _DESCALES},
    refuses=(
        "dtypes other than float16, bfloat16 and float8",
        "D above 256",
        "mask and bias: it has neither",
    ),
)  # fmt: skip

# flash_attn/cute/interface.py at 0251105, flash_attn_func: window_size has None for an unlimited
# side, learnable_sink is one logit a head, and the backward takes a cotangent of lse. Its score_mod
# is compiled from another language than Python's. Read, not run.
FLASH_ATTN_4 = replace(
    FLASH_ATTN_3, name="flash_attn@4", version="4.0",
    about="flash_attn_func of the package flash-attn-4, flash_attn.cute",
    signature={
        "softmax_scale": "scale", "causal": "causal", "window_size": "window",
        "softcap": "softcap", "learnable_sink": "sinks", "return_lse": "return_lse",
        "gather_kv_indices": "",  # of its kernels for latent attention alone
    },
    quantized={},
    refuses=(
        "score_mod: a function in CuTe's language",
        "dtypes other than float16 and bfloat16",
        "mask and bias: they are functions",
    ),
)  # fmt: skip

# flash_attn/flash_attn_interface.py, flash_attn_varlen_func: q (total_q, nheads, headdim), lse
# (nheads, total_q), and causal aligned to the bottom right of each sequence. Read, not run.
VARLEN = replace(
    FLASH_ATTN, name="flash_attn_varlen",
    about="flash_attn_varlen_func of the package flash-attn",
    signature={
        **FLASH_ATTN.signature, "cu_seqlens_q": "offsets of queries",
        "cu_seqlens_k": "offsets of keys", "max_seqlen_q": "longest queries",
        "max_seqlen_k": "longest keys",
    },
)  # fmt: skip

# The same file, flash_attn_qkvpacked_func: qkv (batch_size, seqlen, 3, nheads, headdim), and
# flash_attn_kvpacked_func: kv (batch_size, seqlen, 2, nheads_k, headdim). Read, not run.
QKVPACKED = replace(
    FLASH_ATTN, name="flash_attn_qkvpacked",
    about="flash_attn_qkvpacked_func of the package flash-attn",
    signature={"qkv": "packed q, k and v", **FLASH_ATTN.signature},
    refuses=(*FLASH_ATTN.refuses, "K < H, T != S: they are in one array"),
)  # fmt: skip
KVPACKED = replace(
    FLASH_ATTN, name="flash_attn_kvpacked",
    about="flash_attn_kvpacked_func of the package flash-attn",
    signature={"kv": "packed k and v", **FLASH_ATTN.signature},
)  # fmt: skip

# The same file, flash_attn_varlen_qkvpacked_func: qkv (total, 3, nheads, headdim). Read, not run.
VARLEN_QKVPACKED = replace(
    QKVPACKED, name="flash_attn_varlen_qkvpacked",
    about="flash_attn_varlen_qkvpacked_func of the package flash-attn",
    signature={
        **QKVPACKED.signature, "cu_seqlens": "offsets of both", "max_seqlen": "longest of both",
    },
)  # fmt: skip

# The same file, flash_attn_with_kvcache: with block_table the caches are (num_blocks,
# page_block_size, nheads_k, headdim), and "page_block_size must be a multiple of 256". k and v are
# written to the caches "starting at the indices specified by cache_seqlens", and turned "at
# indices cache_seqlens, cache_seqlens + 1, etc."; q likewise "if causal or local", else "at indices
# cache_seqlens only". Pages come with neither cache_batch_idx nor cache_leftpad: mha_fwd_kvcache in
# csrc/flash_attn/flash_api.cpp. Read, not run.
KVCACHE = replace(
    FLASH_ATTN, name="flash_attn_with_kvcache",
    about="flash_attn_with_kvcache of the package flash-attn",
    signature={
        "k": "new keys of any number", "v": "new values of any number", "rotary_cos": "cosines",
        "rotary_sin": "sines", "cache_seqlens": "lengths of keys",
        "cache_batch_idx": "rows of the cache", "cache_leftpad": "left padding",
        "block_table": "page table", "rotary_interleaved": "adjacent pairs",
        "softmax_scale": "scale", "causal": "causal", "window_size": "window or −1",
        "softcap": "softcap", "return_softmax_lse": "lse without gradient",
    },
    refuses=(*FLASH_ATTN.refuses, "pages whose size is no multiple of 256", "gradients"),
)  # fmt: skip

# vllm_flash_attn/flash_attn_interface.py at 03ef28b of vllm-project/flash-attention,
# flash_attn_varlen_func with seqused_k and block_table; softmax_lse is (nheads, total_q). Its
# q_descale, k_descale and v_descale go to FlashAttention-3 as they are. Read.
VLLM_PAGED = replace(
    FLASH_ATTN, name="vllm.paged", version="03ef28b",
    about="flash_attn_varlen_func of vLLM's flash-attention, on pages",
    signature={
        "cu_seqlens_q": "offsets of queries", "max_seqlen_q": "longest queries",
        "max_seqlen_k": "longest keys", "seqused_k": "lengths of keys", "block_table": "page table",
        "softmax_scale": "scale", "causal": "causal", "window_size": "window or −1",
        "softcap": "softcap", "s_aux": "sinks", "return_softmax_lse": "lse without gradient",
    },
    quantized={"float8_e4m3fn": _DESCALES},
    refuses=(*FLASH_ATTN.refuses, "pages whose size is no multiple of 16", "gradients"),
)  # fmt: skip

# Docstring of memory_efficient_attention, facebookresearch/xformers, xformers/ops/fmha/__init__.py:
# [B, M, H, K], attn_bias is added, and "Equivalent pytorch code", whose softmax gives NaN where all
# scores are −inf. Read, not run.
MEMORY_EFFICIENT = Profile(
    name="xformers", version="0.0.2x",
    about="xformers.ops.memory_efficient_attention",
    conventions=Conventions(empty_row="nan"), signature={"attn_bias": "bias", "scale": "scale"},
    layout="BTHD",
    refuses=("boolean masks: a tensor as attn_bias is added", "K < H: with four axes"),
)  # fmt: skip
