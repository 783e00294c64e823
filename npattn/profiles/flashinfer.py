"""FlashInfer: single_prefill_with_kv_cache, and prefill on pages."""

from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["PAGED", "PREFILL"]

# Docstring of single_prefill_with_kv_cache in flashinfer-python 0.7.2, flashinfer/prefill.py:
# custom_mask [qo_len, kv_len] with True for what may be seen, causal "only effective when
# custom_mask is not provided", window_left inclusive. lse is in base 2, causal and window are
# aligned by kv_len − qo_len: include/flashinfer/attention/variants.cuh. Read, not run.
PREFILL = Profile(
    name="flashinfer",
    version="0.7",
    about="flashinfer.single_prefill_with_kv_cache",
    conventions=Conventions(causal="bottom_right", empty_row="zero", lse_base="2"),
    signature={
        "custom_mask": "mask",
        "causal": "causal",
        "sm_scale": "scale",
        "logits_soft_cap": "softcap",
        "return_lse": "lse without gradient",
    },
    refuses=(
        "mask+causal: causal is ignored beside custom_mask",
        "dtypes other than float16, bfloat16 and float8",
        "windows with an end to the right",
        "gradients",
    ),
)

# BatchPrefillWithPagedKVCacheWrapper in the same file: plan takes the arrays that say where the
# sequences are, and custom_mask (a matrix of each request, one behind the other); it is made with
# kv_layout; run takes q (nnz_qo, H, D) and pages (N, P, K, D) or (N, K, P, D), and lse is
# (nnz_qo, H). A window has no end to the right. Read, not run.
PAGED = replace(
    PREFILL,
    name="flashinfer.paged",
    about="flashinfer.BatchPrefillWithPagedKVCacheWrapper, its plan and run in one function",
    signature={
        "qo_indptr": "offsets of queries",
        "kv_indptr": "page offsets",
        "kv_indices": "page list",
        "last_page_len": "keys on last page",
        "custom_mask": "packed mask",
        "kv_layout": "order of pages",
        "causal": "causal",
        "sm_scale": "scale",
        "logits_soft_cap": "softcap",
        "return_lse": "lse (B, T, H) without gradient",
    },
    layout="BTHD",
    refuses=("dtypes other than float16, bfloat16 and float8", "gradients"),
)
