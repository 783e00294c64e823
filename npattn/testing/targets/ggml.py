"""ggml_flash_attn_ext of llama.cpp on the CPU, called by ctypes in the library of xllamacpp."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from npattn.errors import optional_import
from npattn.problem.arrays import Array

with optional_import("the target ggml.flash needs", "xllamacpp"):
    from xllamacpp import xllamacpp


_TYPES = {"float32": 0, "float16": 1}  # ggml_type, ggml.h
_SPARE = 1 << 20  # bytes for the graph and the heads of its tensors


class _InitParams(ctypes.Structure):
    """Arguments of ggml_init; with no buffer it allocates one."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


_LIBRARY = ctypes.CDLL(xllamacpp.__file__)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of ggml with its C types."""
    function = getattr(_LIBRARY, name)
    function.restype, function.argtypes = result, arguments
    return function


_POINTER, _FLOAT = ctypes.c_void_p, ctypes.c_float
_init = _function("ggml_init", _POINTER, _InitParams)
_free = _function("ggml_free", None, _POINTER)
_new_tensor = _function(
    "ggml_new_tensor_4d", _POINTER, _POINTER, ctypes.c_int, *[ctypes.c_int64] * 4
)
_data = _function("ggml_get_data", _POINTER, _POINTER)
_flash = _function("ggml_flash_attn_ext", _POINTER, *[_POINTER] * 5, *[_FLOAT] * 3)
_add_sinks = _function("ggml_flash_attn_ext_add_sinks", None, _POINTER, _POINTER)
_new_graph = _function("ggml_new_graph", _POINTER, _POINTER)
_expand = _function("ggml_build_forward_expand", None, _POINTER, _POINTER)
_compute = _function("ggml_graph_compute_with_ctx", ctypes.c_int, _POINTER, _POINTER, ctypes.c_int)
_function("ggml_cpu_init", None)()


def _check(q: Array, k: Array, v: Array, mask: Array | None) -> None:
    """Raise where ggml would end the process, or read what is not there: see `flash` for shapes."""
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError("q, k and v must have 4 axes: ggml's tensors have them")
    if not q.dtype == k.dtype == v.dtype or q.dtype.name not in _TYPES:
        raise ValueError(f"q, k and v are {q.dtype}, must be float32 or float16")
    if len({x.shape[0] for x in (q, k, v)}) > 1 or k.shape[:3] != v.shape[:3]:
        raise ValueError("q, k and v must have one batch, k and v their heads and keys")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError("no size may be 0 here: ggml divides by them")
    if q.shape[1] % k.shape[1]:
        raise ValueError("the heads of k must divide those of q")
    if mask is not None and (mask.ndim > 4 or mask.dtype != bool):
        raise ValueError("mask must be boolean here, with at most 4 axes")


def flash(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    scale: float,
    logit_softcap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Call it with one thread; k and v keep their dtype, q is float32, and so is its result.

    q is (B, H, T, D), k (B, K, S, D), v (B, K, S, E), the result (B, H, T, E). Raises ValueError if
    ggml would end the process.
    """
    _check(q, k, v, mask)
    inputs = [q.astype("f4"), k, v]
    (B, H, T, D), (S, E) = q.shape, v.shape[2:]
    if mask is not None:
        hidden = np.where(mask, np.float16(0), np.float16(-np.inf))
        inputs.append(np.broadcast_to(hidden, (*hidden.shape[:-2], T, S)))
    if sinks is not None:
        inputs.append(sinks.astype("f4"))
    o = np.empty((B, T, H, E), np.float32)
    # Beside inputs and result, each thread has buffers of 64 rows.
    size = sum(x.nbytes for x in (*inputs, o)) + 1024 * (D + E) + 8 * H * (E + 2) + _SPARE
    context = _init(_InitParams(size, None, False))
    if context is None:
        raise MemoryError(f"ggml_init has no {size} bytes")
    try:
        tensors = [_copy_to_tensor(context, x) for x in inputs]
        last = tensors.pop() if sinks is not None else None
        node = _flash(context, *tensors, *[None] * (4 - len(tensors)), scale, 0.0, logit_softcap)
        if last is not None:
            _add_sinks(node, last)
        graph = _new_graph(context)
        _expand(graph, node)
        status = _compute(context, graph, 1)
        if status:
            raise RuntimeError(f"ggml_graph_compute_with_ctx returned {status}")
        ctypes.memmove(o.ctypes.data, _data(node), o.nbytes)
    finally:
        _free(context)
    return o.swapaxes(1, 2).astype(q.dtype)


def _copy_to_tensor(context: int, x: Array) -> Any:
    """Copy an array into a new tensor, whose axes are counted from the last."""
    x = np.ascontiguousarray(x)
    sizes = (*x.shape[::-1], 1, 1, 1)[:4]
    tensor = _new_tensor(context, _TYPES[x.dtype.name], *sizes)
    ctypes.memmove(_data(tensor), x.ctypes.data, x.nbytes)
    return tensor
