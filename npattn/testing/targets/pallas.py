"""JAX's Pallas kernels as targets, interpreted where there is no GPU, or no TPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from npattn.errors import optional_import

with optional_import("the targets pallas need", "jax", "jax"):
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.gpu import attention, decode_attention
    from jax.experimental.pallas.ops.gpu import paged_attention as gpu_pages
    from jax.experimental.pallas.ops.tpu import flash_attention
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention, quantization_utils
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks


Window = tuple[int | None, int | None]

SPLITS = 2
"""Parts of the keys that one step of decoding is split into."""


def _default(scale: float | None, q: jax.Array) -> float:
    """Return the scale; two of these kernels multiply by 1 if none is given."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _check_rank(q: jax.Array) -> None:
    if q.ndim != 4:
        raise ValueError(f"q must have 4 axes, got {q.ndim}")


@functools.partial(jax.jit, static_argnums=(3, 4))  # else each backward is compiled anew
def _mha(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> Any:
    interpret = jax.default_backend() != "gpu"
    return attention.mha(q, k, v, None, scale, causal, interpret=interpret)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _flash(
    q: jax.Array, k: jax.Array, v: jax.Array, ab: jax.Array | None, scale: float, causal: bool
) -> Any:
    return flash_attention.flash_attention(q, k, v, ab, causal=causal, sm_scale=scale)


def gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False, scale: float | None = None
) -> Any:
    """Call ``mha`` of the Pallas kernels for GPUs, with q (B, H, T, D), k and v (B, H, S, D)."""
    _check_rank(q)
    if q.shape[:2] != k.shape[:2] or k.shape != v.shape:
        raise ValueError("q, k and v must have one B and one H, and k and v one shape")
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return _mha(q, k, v, _default(scale, q), causal).swapaxes(1, 2)


def gpu_decode(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None = None) -> Any:
    """Call ``gqa`` of the Pallas kernels for GPUs, one step of decoding."""
    _check_rank(q)
    if q.shape[2] != 1 or q.shape[0] != k.shape[0] or k.shape != v.shape:
        raise ValueError("q must have one query, and k and v its B and one shape")
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    o = decode_attention.gqa(q[:, :, 0], k, v, sm_scale=scale, k_splits=SPLITS, interpret=True)
    return o[:, :, None]


def tpu_flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> Any:
    """Call ``flash_attention`` of Pallas for TPUs; q is (B, H, T, D), k and v are (B, H, S, D)."""
    _check_rank(q)
    shape = (*q.shape[:3], k.shape[2])
    ab = None if bias is None else jnp.broadcast_to(bias, shape)
    pltpu.set_tpu_interpret_mode()  # for the backward too, which is traced after this call
    return _flash(q, k, v, ab, _default(scale, q), causal)


def _one_query(q: jax.Array, scale: float | None) -> jax.Array:
    """Return q (B, H, D) of one step of decoding, multiplied by the scale as the caller does it."""
    if q.ndim != 4 or q.shape[1] != 1:
        raise ValueError(f"q has shape {q.shape}, must have one query for each sequence")
    return q[:, 0] * jnp.asarray(_default(scale, q), q.dtype)


def gpu_paged(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    block_tables: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
) -> jax.Array:
    """Call ``paged_attention`` of the Pallas kernels for GPUs; the caller scales q.

    Pages of int8 come with factors (N, P, K) of their tokens.

    Raises ValueError if there is more than one query.
    """
    scaled = _one_query(q, scale)
    width = block_tables.shape[1]
    table = jnp.pad(block_tables, ((0, 0), (0, -width % SPLITS)))  # it asserts whole splits
    o = gpu_pages.paged_attention(
        *(scaled, k_pages.transpose(2, 0, 1, 3), v_pages.transpose(2, 0, 1, 3), table, lengths),
        k_splits=SPLITS,
        pages_per_compute_block=1,
        attn_logits_soft_cap=softcap,
        k_scales_pages=None if k_scales is None else k_scales.transpose(2, 0, 1),
        v_scales_pages=None if v_scales is None else v_scales.transpose(2, 0, 1),
        interpret=True,
    )
    return o[:, None]


def tpu_paged(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
) -> Any:
    """Call ``paged_attention`` of the Pallas kernels for TPUs; the caller scales q.

    Pages of int8 come with factors (N, P, K) of their tokens, and are made a QuantizedTensor: its
    scales stand for 127.5, and not for 1.

    Raises ValueError if there is more than one query.
    """
    scaled = _one_query(q, scale)
    pltpu.set_tpu_interpret_mode()
    pages: Any = [x.transpose(2, 0, 1, 3) for x in (k_pages, v_pages)]  # (K, N, P, D)
    for i, scales in enumerate((k_scales, v_scales)):
        if scales is not None:
            page_scales = scales.transpose(2, 0, 1)[..., None] * quantization_utils.MAX_INT8
            pages[i] = quantization_utils.QuantizedTensor(pages[i], page_scales)
    o = paged_attention(
        *(scaled, *pages, lengths, page_indices),
        attn_logits_soft_cap=softcap,
        pages_per_compute_block=1,
    )
    return o[:, None]


@functools.lru_cache(maxsize=64)  # the kernel is compiled for a function of the mask
def _band(T: int, S: int, causal: bool, window: Window | None) -> Any:
    """Return the mask of causal and window, or None."""
    band = masks.CausalMask((T, S)) if causal else None
    if window is None:
        return band
    near = masks.LocalMask((T, S), window, 0)
    return near if band is None else near & band


@functools.partial(jax.jit, static_argnums=5)
def _splash(
    infos: Any, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, options: Any
) -> Any:
    kernel = splash.SplashAttentionKernel(*infos, **dict(options))
    return jax.vmap(lambda *one: kernel(*one, None, sinks))(q, k, v)


def tpu_splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Any = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> Any:
    """Call the kernel that ``make_splash_mha`` makes of the masks; the caller scales q.

    It has an "undefined softmax" where a query sees nothing: such a query is given all keys, and
    its result is set to 0. q is (B, H, T, D), k (B, K, S, D), v (B, K, S, E), sinks (H,).
    """
    _check_rank(q)
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    band = _band(T, S, causal, window)
    shown = masks.FullMask((T, S)) if band is None else band
    heads: list[Any] = [shown] * H
    if mask is not None:
        mask = np.asarray(mask)
        if mask.ndim > 3 and mask.shape[-4] > 1:
            raise ValueError("the mask must be one for all samples: give (H, T, S)")
        mask = np.broadcast_to(mask.reshape((1,) * (3 - mask.ndim) + mask.shape[-3:]), (H, T, S))
        dense = [masks.NumpyMask(np.array(one)) for one in mask]
        heads = dense if band is None else [one & band for one in dense]
    visible = np.stack([one[:, :] for one in heads])
    sees: Any = visible.any(-1)
    if not sees.all():
        heads = [masks.NumpyMask(one) for one in visible | ~sees[..., None]]
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask(heads), attn_logits_soft_cap=softcap, interpret=True
    )
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    scaled = q * jnp.asarray(_default(scale, q), q.dtype)
    out = _splash(infos, scaled, k, v, sinks, tuple(sorted(kernel.kwargs.items())))
    return jnp.where(sees[..., None], out, 0)
