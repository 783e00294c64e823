"""Operation ScaledDotProductAttention of OpenVINO, opset 13, on the CPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from npattn.errors import optional_import
from npattn.problem.arrays import Array

with optional_import("the target openvino needs", "openvino"):
    import openvino
    from openvino import opset13


@lru_cache(maxsize=256)
def _compile(dtype: Any, mask: tuple[Any, int] | None, scaled: bool, causal: bool) -> Any:
    """Compile a model of one operation for arrays of every size; the mask is (dtype, rank)."""

    def parameter(dtype: Any, rank: int) -> Any:
        return opset13.parameter([-1] * rank, openvino.Type(np.dtype(dtype)))

    inputs = [parameter(dtype, 4) for _ in range(3)]
    if mask is not None:
        inputs.append(parameter(*mask))
    scale = parameter(dtype, 0) if scaled else None
    node = opset13.scaled_dot_product_attention(
        *inputs[:3], inputs[3] if mask is not None else None, scale, causal
    )
    model = openvino.Model([node], inputs + ([scale] if scaled else []))
    # A CPU with bfloat16 would use it for float32, and threads wait for each other.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    return openvino.compile_model(model, "CPU", settings)


def attention(
    query: Array,
    key: Array,
    value: Array,
    attention_mask: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> Array:
    """Return the operation's result, (B, H, T, E), for query (B, H, T, D), value (B, H, S, E)."""
    if query.ndim != 4:
        raise ValueError("query must have 4 axes here")
    if key.shape[-3] != query.shape[-3]:
        raise ValueError("key must have the heads of query: the operation broadcasts no others")
    mask = None if attention_mask is None else (attention_mask.dtype, attention_mask.ndim)
    # A compiled model has one request, which two threads would share.
    request = _compile(query.dtype, mask, scale is not None, causal).create_infer_request()
    inputs = [query, key, value]
    if attention_mask is not None:
        inputs.append(attention_mask)
    if scale is not None:
        inputs.append(np.array(scale, query.dtype))
    out: Array = request.infer([np.asarray(x, order="C") for x in inputs])[0]
    return out.copy()  # its memory is that of the request
