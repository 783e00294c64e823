"""Operator Attention of ONNX Runtime on the CPU as a target."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.errors import MissingExtraError
from npattn.testing.targets.onnx import WEIGHTS, Run, call, model

try:
    from onnxruntime import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        InferenceSession,
        SessionOptions,
    )
except ImportError as err:
    raise MissingExtraError(
        "the target onnxruntime needs onnxruntime; npattn itself does not: "
        "pip install 'npattn[onnxruntime]'"
    ) from err

__all__ = ["attention", "start_session"]


def start_session(made: Any) -> Any:
    """Return what runs a model on the CPU, in one thread."""
    settings = SessionOptions()
    settings.intra_op_num_threads = 1  # on small problems threads wait for each other
    settings.log_severity_level = 4  # errors are raised as well
    serialized = made.SerializeToString()
    return InferenceSession(serialized, settings, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=256)
def _session(dtypes: tuple[tuple[str, Any], ...], weights: bool, **options: Any) -> Run:
    if weights:
        options["qk_matmul_output_mode"] = WEIGHTS
    outputs = ("Y", "", "", "weights") if weights else ("Y",)
    session = start_session(model(24, dict(dtypes), outputs, **options))
    return lambda inputs: list(session.run(None, dict(inputs)))


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
    """Run operator Attention, opset 24, by ONNX Runtime: out, or (out, weights)."""
    if k.shape[-3] == 0:
        raise ValueError("no heads: ONNX Runtime divides by their number and ends the process")
    whole = (q.shape[-2], k.shape[-2])  # it broadcasts neither axis
    mask, bias = (
        None if x is None else np.broadcast_to(x, (*x.shape[:-2], *whole)) for x in (mask, bias)
    )
    return call(
        _session,
        (q, k, v),
        mask,
        bias,
        return_weights,
        is_causal=int(causal),
        scale=scale,
        softcap=softcap,
    )
