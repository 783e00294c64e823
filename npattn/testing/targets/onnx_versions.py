"""Operator Attention of ONNX, opset 23: by the evaluator of any version, and by its body."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from npattn.arrays import Array
from npattn.testing.targets.onnx import (
    WEIGHTS,
    FunctionProto,
    ReferenceEvaluator,
    Run,
    call,
    defs,
    model,
)

__all__ = ["attention", "body"]

OPSET = 23
OUTPUTS = ("Y", "present_key", "present_value", "weights")
DOMAIN = "body"  # a function of the operator's own domain would not be looked at


@lru_cache(maxsize=256)
def _evaluator(dtypes: tuple[tuple[str, Any], ...], weights: bool, **options: Any) -> Run:
    if weights:
        options["qk_matmul_output_mode"] = WEIGHTS
    outputs = ("Y", "", "", "weights") if weights else ("Y",)
    evaluator: Any = ReferenceEvaluator(model(OPSET, dict(dtypes), outputs, **options))
    return lambda inputs: list(evaluator.run(None, dict(inputs)))


@lru_cache(maxsize=256)
def _body(dtypes: tuple[tuple[str, Any], ...], weights: bool, **options: Any) -> Run:
    """Return what runs the body, whose nodes ONNX writes for these inputs and attributes."""
    if weights:
        options["qk_matmul_output_mode"] = WEIGHTS
    made: Any = model(OPSET, dict(dtypes), OUTPUTS, **options)
    node = made.graph.node[0]
    types = [x.type.SerializeToString() for x in made.graph.input]
    schema = defs.get_schema("Attention", OPSET)
    body = FunctionProto()
    body.ParseFromString(schema.get_context_dependent_function(node.SerializeToString(), types))
    body.domain = node.domain = DOMAIN
    node.input.extend([""] * (len(body.input) - len(node.input)))
    made.functions.append(body)
    made.opset_import.add(domain=DOMAIN, version=1)
    evaluator: Any = ReferenceEvaluator(made)
    names = ["Y", "weights"] if weights else ["Y"]
    return lambda inputs: list(evaluator.run(names, dict(inputs)))


def attention(
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
    """Run operator Attention, opset 23, by ``onnx.reference``: out, or (out, weights)."""
    options = {"is_causal": int(causal), "scale": scale, "softcap": softcap}
    return call(_evaluator, (q, k, v), mask, bias, return_weights, **options)


def body(
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
    """Run the body of operator Attention, opset 23, by ``onnx.reference``."""
    options = {"is_causal": int(causal), "scale": scale, "softcap": softcap}
    return call(_body, (q, k, v), mask, bias, return_weights, **options)
