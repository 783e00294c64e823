"""Operator Attention of ONNX as a model of one node, and its reference evaluator as a target.

The operator has one input for mask and bias, no lse and no gradient. Its attributes are float32,
whatever the dtype of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from npattn.errors import optional_import
from npattn.problem.arrays import Array
from npattn.testing.targets.wrapping import rename

with optional_import("ONNX targets need", "onnx", "onnx"):
    from onnx import FunctionProto, defs, helper
    from onnx.reference import ReferenceEvaluator

__all__ = ["attention", "attention_23", "body", "describe_value", "helper", "model", "operator"]

WEIGHTS = 3  # qk_matmul_output_mode: the softmax
IR_VERSION = 11  # of opset 23; readers of later opsets know it
BODY_OUTPUTS = ("Y", "present_key", "present_value", "weights")
BODY_DOMAIN = "body"  # a function of the operator's own domain would not be looked at
Dtypes = tuple[tuple[str, Any], ...]
Run = Callable[[Mapping[str, Array]], list[Array]]


def describe_value(name: str, dtype: Any, rank: int | None) -> Any:
    """Return an input or output of a model, of any sizes."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, kind, None if rank is None else [None] * rank)


def model(
    opset: int,
    dtypes: Dtypes,  # (str, dtype): of Q, K, V and, if there is one, attn_mask
    weights: bool,  # let it return weights beside Y
    # names by position, where they are others; "" leaves one out
    outputs: tuple[str, ...] | None = None,
    **options: Any,  # attributes of the node
) -> Any:
    """Return a model of one Attention node."""
    if weights:
        options["qk_matmul_output_mode"] = WEIGHTS
    outputs = outputs or (("Y", "", "", "weights") if weights else ("Y",))
    node = helper.make_node("Attention", [n for n, _ in dtypes], list(outputs), **options)
    graph = helper.make_graph(
        [node],
        "attention",
        [describe_value(n, dtype, None if n == "attn_mask" else 4) for n, dtype in dtypes],
        [describe_value(n, dict(dtypes)["Q"], 4) for n in outputs if n],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION
    )


def operator(name: str, start: Callable[..., Run], check: Callable[..., Any] | None = None) -> Any:
    """Return the operator Attention without a window as a function: out, or (out, weights).

    Parameters
    ----------
    name : str
        Its name in its module.
    start : callable
        Called with ``(dtypes, weights, **options)``, without options that are None; returns the
        function that runs the model.
    check : callable, optional
        Called with ``(q, k, mask, bias)``; returns the mask and the bias to pass on.
    """

    def attend(
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None = None,
        *,
        causal: bool = False,
        bias: Array | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Return out, and weights if asked, of q (B, H, T, D), k (B, K, S, D), v (B, K, S, E)."""
        if check is not None:
            mask, bias = check(q, k, mask, bias)
        return _call(start, (q, k, v), mask, bias, return_weights, causal, scale, softcap=softcap)

    return rename(attend, name)


def _call(
    start: Callable[..., Run],
    arrays: tuple[Array, Array, Array],
    mask: Array | None,
    bias: Array | None,
    weights: bool,
    causal: bool,
    scale: float | None,
    **options: Any,
) -> Any:
    """Run an evaluator: out, or (out, weights)."""
    q, k, v = arrays
    if scale is not None and scale <= 0:  # the operator takes its square root
        q, scale = q * q.dtype.type(np.sign(scale)), abs(scale) or 1.0
    inputs = {"Q": q, "K": k, "V": v}
    extra = mask if bias is None else bias
    if bias is not None and mask is not None:
        extra = np.where(mask, bias, bias.dtype.type(-np.inf))
    if extra is not None:  # a last axis of 1 would be padded with −inf, and not repeated
        inputs["attn_mask"] = np.broadcast_to(extra, (*extra.shape[:-1], k.shape[-2]))
    dtypes = tuple((name, array.dtype) for name, array in inputs.items())
    options |= {"is_causal": int(causal), "scale": scale}
    run = start(dtypes, weights, **{n: x for n, x in options.items() if x is not None})
    outputs = run(inputs)
    return tuple(outputs) if weights else outputs[0]


def _by_evaluator(opset: int) -> Callable[..., Run]:
    @lru_cache(maxsize=256)
    def start(dtypes: Dtypes, weights: bool, **options: Any) -> Run:
        evaluator: Any = ReferenceEvaluator(model(opset, dtypes, weights, **options))
        return lambda inputs: list(evaluator.run(None, dict(inputs)))

    return start


@lru_cache(maxsize=256)
def _by_body(dtypes: Dtypes, weights: bool, **options: Any) -> Run:
    """Return what runs the body, whose nodes ONNX writes for these inputs and attributes."""
    made: Any = model(23, dtypes, weights, BODY_OUTPUTS, **options)
    node = made.graph.node[0]
    types = [x.type.SerializeToString() for x in made.graph.input]
    schema = defs.get_schema("Attention", 23)
    body = FunctionProto()
    body.ParseFromString(schema.get_context_dependent_function(node.SerializeToString(), types))
    body.domain = node.domain = BODY_DOMAIN
    node.input.extend([""] * (len(body.input) - len(node.input)))
    made.functions.append(body)
    made.opset_import.add(domain=BODY_DOMAIN, version=1)
    evaluator: Any = ReferenceEvaluator(made)
    names = ["Y", "weights"] if weights else ["Y"]
    return lambda inputs: list(evaluator.run(names, dict(inputs)))


_start_25 = _by_evaluator(25)


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
    left_keys, right_keys = (-1 if n is None else n for n in window or (None, None))
    options = {"left_window_size": left_keys, "right_window_size": right_keys, "softcap": softcap}
    return _call(_start_25, (q, k, v), mask, bias, return_weights, causal, scale, **options)


attention_23 = operator("attention_23", _by_evaluator(23))
body = operator("body", _by_body)
