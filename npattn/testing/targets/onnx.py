"""Operator Attention of ONNX as a model of one node, and its reference evaluator as a target.

The operator has one input for mask and bias, no lse and no gradient. Its attributes are float32,
whatever the dtype of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.errors import MissingExtraError

try:
    from onnx import (  # type: ignore[import-not-found, unused-ignore]
        FunctionProto,
        defs,
        helper,
    )
    from onnx.reference import ReferenceEvaluator  # type: ignore[import-not-found, unused-ignore]
except ImportError as err:
    raise MissingExtraError(
        "ONNX targets need onnx; npattn itself does not: pip install 'npattn[onnx]'"
    ) from err

__all__ = [
    "FunctionProto",
    "ReferenceEvaluator",
    "attention",
    "call",
    "defs",
    "helper",
    "model",
]

WEIGHTS = 3  # qk_matmul_output_mode: the softmax
Run = Callable[[Mapping[str, Array]], list[Array]]


def model(opset: int, inputs: Mapping[str, Any], outputs: tuple[str, ...], **options: Any) -> Any:
    """Return a model of one Attention node.

    Parameters
    ----------
    opset : int
    inputs : mapping
        Dtypes by name: Q, K, V and, if there is one, attn_mask.
    outputs : tuple of str
        Names by position; "" leaves one out.
    **options
        Attributes of the node.
    """

    def value(name: str, dtype: Any) -> Any:
        rank = None if name == "attn_mask" else 4
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return helper.make_tensor_value_info(name, kind, None if rank is None else [None] * rank)

    node = helper.make_node("Attention", list(inputs), list(outputs), **options)
    graph = helper.make_graph(
        [node],
        "attention",
        [value(name, dtype) for name, dtype in inputs.items()],
        [value(name, inputs["Q"]) for name in outputs if name],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION
    )


IR_VERSION = 11  # of opset 23; readers of later opsets know it


def call(
    start: Callable[..., Run],
    arrays: tuple[Array, Array, Array],
    mask: Array | None,
    bias: Array | None,
    weights: bool,
    **options: Any,
) -> Any:
    """Run an evaluator: out, or (out, weights).

    Parameters
    ----------
    start : callable
        Called with ``(dtypes, weights, **options)``, without options that are None; returns the
        function that runs the model.
    """
    q, k, v = arrays
    scale = options["scale"]
    if scale is not None and scale <= 0:  # the operator takes its square root
        q, options["scale"] = q * q.dtype.type(np.sign(scale)), abs(scale) or 1.0
    inputs = {"Q": q, "K": k, "V": v}
    extra = mask if bias is None else bias
    if bias is not None and mask is not None:
        extra = np.where(mask, bias, bias.dtype.type(-np.inf))
    if extra is not None:  # a last axis of 1 would be padded with −inf, and not repeated
        inputs["attn_mask"] = np.broadcast_to(extra, (*extra.shape[:-1], k.shape[-2]))
    dtypes = tuple((name, array.dtype) for name, array in inputs.items())
    run = start(dtypes, weights, **{n: x for n, x in options.items() if x is not None})
    outputs = run(inputs)
    return tuple(outputs) if weights else outputs[0]


@lru_cache(maxsize=256)
def _evaluator(dtypes: tuple[tuple[str, Any], ...], weights: bool, **options: Any) -> Run:
    if weights:
        options["qk_matmul_output_mode"] = WEIGHTS
    outputs = ("Y", "", "", "weights") if weights else ("Y",)
    evaluator: Any = ReferenceEvaluator(model(25, dict(dtypes), outputs, **options))
    return lambda inputs: list(evaluator.run(None, dict(inputs)))


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_weights: bool = False,
) -> Any:
    """Run operator Attention, opset 25, by ``onnx.reference``: out, or (out, weights)."""
    left, right = (-1 if n is None else n for n in window or (None, None))
    return call(
        _evaluator,
        (q, k, v),
        mask,
        bias,
        return_weights,
        is_causal=int(causal),
        left_window_size=left,
        right_window_size=right,
        scale=scale,
        softcap=softcap,
    )
