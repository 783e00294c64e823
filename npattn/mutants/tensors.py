"""Mistakes on tensors of torch, differentiable by their own backward."""

from collections.abc import Mapping
from typing import Any

import torch

from npattn.mutants.call import RESULTS, Call
from npattn.problem.arrays import Array, to_numpy
from npattn.testing.adapters.frameworks import make_framework


def call_on_tensors(
    call: Call, qkv: tuple[Any, Any, Any], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results of a call by name, as tensors on the device of q.

    The call has options as arrays; `inputs` are tensors of bias, sinks and gate as the caller gave
    them, whose gradients autograd wants, None where there is none.
    """
    floating = {n: x for n, x in inputs.items() if torch.is_tensor(x) and x.is_floating_point()}
    names = ("q", "k", "v", *floating)
    apply: Any = _Attention.apply
    results = apply(call, names, *qkv, *floating.values())
    return dict(zip(RESULTS, results, strict=False))


class _Attention(torch.autograd.Function):
    """A call of a mistake, as a node of autograd."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: tuple[str, ...], *tensors: Any) -> Any:
        qkv = tuple(map(to_numpy, tensors[:3]))
        results = call.forward(*qkv)
        ctx.call, ctx.names, ctx.qkv, ctx.results = call, names, qkv, results
        ctx.shapes, ctx.device = [x.shape for x in tensors], tensors[0].device
        return tuple(_tensor(x, ctx.device) for x in results.values())

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        named = dict(zip(ctx.results, map(to_numpy, cotangents), strict=True))
        gradients = ctx.call.backward(ctx.qkv, ctx.results, named)
        grads = [gradients.get(n) for n in ctx.names]
        found = [None if x is None else _tensor(x, ctx.device) for x in grads]
        shaped = [
            x if x is None or x.numel() != shape.numel() else x.reshape(shape)  # a gate of heads
            for x, shape in zip(found, ctx.shapes, strict=True)
        ]
        return None, None, *shaped


def _tensor(array: Array, device: Any) -> Any:
    return make_framework("torch", str(device)).give(array)
