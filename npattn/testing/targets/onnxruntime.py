"""Operators of ONNX Runtime on the CPU as targets: Attention, and two of com.microsoft."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from npattn.errors import optional_import
from npattn.problem.arrays import Array
from npattn.testing.targets.onnx import (
    IR_VERSION,
    Dtypes,
    Run,
    describe_value,
    helper,
    model,
    operator,
)
from npattn.testing.targets.wrapping import merge_heads, split_heads

with optional_import("the target onnxruntime needs", "onnxruntime", "onnxruntime"):
    from onnxruntime import InferenceSession, SessionOptions


DOMAIN = "com.microsoft"
GQA_INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
    "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink",
)  # fmt: skip
MHA_INPUTS = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias")


def _start_session(made: Any) -> Any:
    """Return what runs a model on the CPU, in one thread."""
    settings = SessionOptions()
    settings.intra_op_num_threads = 1  # on small problems threads wait for each other
    settings.log_severity_level = 4  # errors are raised as well
    serialized = made.SerializeToString()
    return InferenceSession(serialized, settings, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=256)
def _by_runtime(dtypes: Dtypes, weights: bool, **options: Any) -> Run:
    session = _start_session(model(24, dtypes, weights, **options))
    return lambda inputs: list(session.run(None, dict(inputs)))


def _repeat_rows(q: Array, k: Array, *added: Array | None) -> list[Array | None]:
    """Return mask and bias with all queries and keys: ONNX Runtime broadcasts neither axis."""
    if k.shape[-3] == 0:
        raise ValueError("no heads: ONNX Runtime divides by their number and ends the process")
    plane = (q.shape[-2], k.shape[-2])
    return [None if x is None else np.broadcast_to(x, (*x.shape[:-2], *plane)) for x in added]


attention = operator("attention", _by_runtime, _repeat_rows)


@lru_cache(maxsize=256)
def _session(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    described: tuple[tuple[str, Any, int], ...],
    **attributes: Any,
) -> Any:
    """Start a session of one node; inputs are described by name, dtype and rank."""
    dtype = described[0][1]
    node = helper.make_node(name, list(inputs), list(outputs), domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        name,
        [describe_value(*one) for one in described],
        [describe_value(n, dtype, 3 if n == "out" else 4) for n in outputs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return _start_session(made)


def _run(
    operator_name: str,
    names: tuple[str, ...],
    arrays: Mapping[str, Array],
    outputs: tuple[str, ...],
    **attributes: Any,
) -> Array:
    """Run an operator; an input that is not given has no name."""
    described = tuple((name, x.dtype, x.ndim) for name, x in arrays.items())
    inputs = tuple(name if name in arrays else "" for name in names)
    set_attributes = {name: x for name, x in attributes.items() if x is not None}
    session = _session(operator_name, inputs, outputs, described, **set_attributes)
    out: Array = session.run(["out"], dict(arrays))[0]
    return out


def _check(q: Array, k: Array) -> None:
    if q.ndim != 4:
        raise ValueError("q must have 4 axes here")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError("no size may be 0: it is divided by")


def mha(
    query: Array,
    key: Array,
    value: Array,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    scale: float | None = None,
) -> Array:
    """Run MultiHeadAttention; True in key_padding_mask (B, S) hides the key, as in PyTorch."""
    _check(query, key)
    H = query.shape[1]
    if key.shape[1] != H:
        raise ValueError("key must have the heads of query")
    arrays = dict(zip(MHA_INPUTS, map(merge_heads, (query, key, value)), strict=False))
    if key_padding_mask is not None:
        arrays["key_padding_mask"] = (~key_padding_mask).astype(np.int32)
    if attention_bias is not None:
        four_axes = (1,) * (4 - attention_bias.ndim) + attention_bias.shape
        arrays["attention_bias"] = np.broadcast_to(
            attention_bias.reshape(four_axes), (*four_axes[:2], query.shape[2], key.shape[2])
        )
    out = _run("MultiHeadAttention", MHA_INPUTS, arrays, ("out",), num_heads=H, scale=scale)
    return split_heads(out, H)


def gqa(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Run GroupQueryAttention, which is causal: behind a cache of the keys before the queries.

    q is (B, H, T, D), k and v are (B, K, S, D). Without causal each query is the only one of a
    call, and the last key is its own.
    """
    _check(q, k)
    B, H, T, D = q.shape
    S = k.shape[2]
    if v.shape != k.shape or len(k) != B:
        raise ValueError("k and v must have one shape, and the batch of q")
    if not causal and window is not None:
        raise ValueError("a window needs causal")
    if T > S:
        raise ValueError("there must be a key for each query")
    full_bias = None if bias is None else np.broadcast_to(bias, (B, H, T, S))
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if not causal:  # (B, H, T, D) → (B T, H, 1, D)
        rows = q.swapaxes(1, 2).reshape(B * T, H, 1, D)
        if full_bias is not None:
            full_bias = full_bias.swapaxes(1, 2).reshape(B * T, H, 1, S)
        k, v = (np.repeat(x, T, axis=0) for x in (k, v))
        out = _behind_cache(rows, k, v, full_bias, **options)
        return out.reshape(B, T, H, D).swapaxes(1, 2)
    options["local_window_size"] = None if window is None else window[0]
    if T == S:
        return _behind_cache(q, k, v, full_bias, **options)
    parts = []
    for b in range(B):  # several queries behind a cache are a batch of 1
        sample = slice(b, b + 1)
        part = None if full_bias is None else full_bias[sample]
        parts.append(_behind_cache(q[sample], k[sample], v[sample], part, **options))
    return np.concatenate(parts)


def _behind_cache(
    q: Array, k: Array, v: Array, bias: Array | None, sinks: Array | None, **options: Any
) -> Array:
    """Call the operator with the last T keys as new ones, the others as cache; shapes as gqa."""
    B, H, T, _ = q.shape
    K, S = k.shape[1:3]
    arrays = {"query": merge_heads(q)}
    for name, x in (("key", k), ("value", v)):
        arrays[name] = merge_heads(x[:, :, S - T :])
    for name, x in (("past_key", k), ("past_value", v)):
        arrays[name] = np.ascontiguousarray(x[:, :, : S - T])
    arrays["seqlens_k"] = np.full(B, S - 1, np.int32)
    arrays["total_sequence_length"] = np.array([S], np.int32)
    if bias is not None:
        arrays["attention_bias"] = np.ascontiguousarray(bias)
    if sinks is not None:
        arrays["head_sink"] = sinks
    outputs = ("out", "present_key", "present_value")
    out = _run(
        "GroupQueryAttention", GQA_INPUTS, arrays, outputs, num_heads=H, kv_num_heads=K, **options
    )
    return split_heads(out, H)
