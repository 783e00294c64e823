"""ONNX: its reference evaluator, and ONNX Runtime.

They are imported on the first call. Masks and biases are passed in full, since the reference
misreads a row of keys under causal. In float16 its softmax has three more roundings than others; in
float64 its attributes are float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.zoo.correct.register import correct
from benchmarks.zoo.correct.signature import import_on_call
from benchmarks.zoo.correct.torch import NAN
from npattn.problem.arrays import Array
from npattn.profiles import PROFILES


def reference(
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
    from npattn.testing.targets.onnx import attention  # which needs onnx

    whole = (q.shape[-2], k.shape[-2])
    mask, bias = (
        None if x is None else np.broadcast_to(x, (*x.shape[:-2], *whole)) for x in (mask, bias)
    )
    options: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap}
    options["return_weights"] = return_weights
    return attention(q, k, v, mask, causal=causal, bias=bias, **options)


correct("onnx.reference", "The operator Attention of ONNX by its reference evaluator.", reference,
        dtypes=("float32",), conventions=PROFILES["onnx"].conventions, needs="onnx",
        breaks=NAN)  # fmt: skip
correct("onnxruntime", "The operator Attention of ONNX by ONNX Runtime, on the CPU.",
        import_on_call("npattn.testing.targets.onnxruntime", "attention", "causal", "bias", "scale",
                 "softcap", "return_weights"),
        dtypes=("float32", "float16"), conventions=PROFILES["onnx"].conventions,
        needs="onnxruntime", breaks=(*NAN, "hidden-finite"))  # fmt: skip
