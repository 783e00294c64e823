"""The hand-written forward and backward as one `torch.autograd.Function`.

Its backward consists of differentiable operations on saved inputs and outputs of the function, so
that autograd can differentiate the backward once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from npattn.conventions import Conventions, canonical_direction, translate_changes
from npattn.errors import OptionError
from npattn.problem import Gradients
from npattn.torch import engine
from npattn.torch.bias_terms import bias_gradient
from npattn.torch.engine.operations import SavedTensors, transforms_active
from npattn.torch.engine.outputs import weights as engine_weights
from npattn.torch.flags import exact
from npattn.torch.problem import Problem
from npattn.torch.tensors import BATCHED, cast, refuse_batched

Tensor = torch.Tensor


class AttentionCall(NamedTuple):
    """A problem, its conventions, and how to compute it."""

    problem: Problem
    conventions: Conventions | None
    one_tile: bool  # whatever the size

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any) -> AttentionCall:
        bias = self.problem.bias if bias is None else bias
        problem = self.problem.with_tensors(q=q, k=k, v=v, bias=bias, sinks=sinks)
        return self._replace(problem=problem)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """q, k, v, bias and sinks, as far as they are tensors."""
        p = self.problem
        return p.q, p.k, p.v, p.bias if isinstance(p.bias, Tensor) else None, p.sinks

    def results(self, saved: SavedTensors) -> tuple[Tensor, Tensor]:
        """Return the canonical out and lse, without an axis of heads if the problem has none."""
        out, lse = saved.out, saved.lse
        return (out[0], lse[0]) if self.problem.headless else (out, lse)

    def canonical(self) -> Problem:
        if self.conventions is None:
            return self.problem
        return self.conventions.canonical(self.problem)  # type: ignore[return-value]

    def undefined_rows(self, saved: SavedTensors) -> Tensor | None:
        """Return which rows are NaN by the conventions, (..., H, T); None if no row is."""
        if self.conventions is None:
            return None
        lse: Any = self.results(saved)[1]
        return self.conventions.undefined_rows(self.problem, lse)  # type: ignore[return-value]

    def max_score(self) -> Tensor:
        """Return the largest score of each row, without a gradient."""
        problem = self.problem
        with torch.no_grad(), exact(problem.dtype, problem.device):
            top = engine.max_score(self.canonical(), self.one_tile)
        return top[0] if problem.headless else top

    def forward(self) -> tuple[SavedTensors, tuple[Tensor, ...]]:
        """Compute the canonical problem; with conventions also return their out and lse."""
        problem = self.problem
        with exact(problem.dtype, problem.device):
            if self.conventions is None:
                return engine.forward(problem, self.one_tile), ()
            saved = engine.forward(self.canonical(), self.one_tile)
            raw, raw_lse = self.results(saved)
            translate: Any = self.conventions.results
            out, lse = translate(problem, raw, raw_lse)
            # The results of a function of autograd share no memory.
            out = out.clone() if out is raw else out
            return saved, (out, lse.clone() if lse is raw_lse else lse)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor, SavedTensors]:
    """Return out, lse and the results that gradients need, differentiable where an input is."""
    if _needs_autograd(call.tensors):
        apply: Any = _Attention.apply if transforms_active() else _UntransformedAttention.apply
        results = apply(call, *call.tensors)
        saved, translated = SavedTensors(*results[:3]), results[3:]
    else:
        saved, translated = call.forward()
    out, lse = translated or call.results(saved)
    return call.problem.to_output_dtype(out), lse, saved


def _needs_autograd(inputs: tuple[Tensor | None, ...]) -> bool:
    """Check if autograd records any of these tensors, in reverse or forward mode."""
    if torch.is_grad_enabled():
        for x in inputs:
            if x is not None and x.requires_grad:
                return True
    if getattr(forward_ad, "_current_level", 0) < 0:  # no forward mode
        return False
    unpacked: Any = forward_ad.unpack_dual
    return any(x is not None and unpacked(x).tangent is not None for x in inputs)


def pull_back(
    call: AttentionCall, saved: SavedTensors, dout: Tensor | None, dlse: Tensor | None,
    dweights: Tensor | None = None, *, draw: Tensor | None = None, dlog: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Gradients from cotangents of the results, and from draw, dlog of the canonical ones."""
    problem, canonical = call.problem, call.canonical()
    conventions: Any = call.conventions
    do = torch.zeros_like(call.results(saved)[0]) if dout is None else dout
    dl, dw = dlse, dweights
    with exact(problem.dtype, problem.device):
        if conventions is not None:
            do, dl, dw = conventions.cotangents(problem, do, dl, dw)
        if problem.headless:
            do = do[None]
            dl, dw = (None if x is None else x[None] for x in (dl, dw))
        do_total = do if draw is None else do + draw
        dl = dlog if dl is None else dl if dlog is None else dl + dlog
        grads = engine.backward(canonical, saved, do_total, dl, dw, call.one_tile)
        if conventions is not None:
            do, lse = do[0] if problem.headless else do, call.results(saved)[1]
            grads = conventions.gradients(problem, grads, do, lse, bias_gradient)
    return grads


def push_forward(
    call: AttentionCall, saved: SavedTensors, along: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Changes along a direction of out and lse: canonical, with a head axis, and translated."""
    problem, conventions = call.problem, call.conventions
    with exact(problem.dtype, problem.device):
        canonical, moved_v = call.canonical(), along["v"]
        if conventions is not None:
            along = canonical_direction(conventions, problem, along)
        named = {f"d{name}": x for name, x in along.items()}
        raw, dlog = engine.jvp(canonical, saved, **named, one_tile=call.one_tile)
        do, dlse = (raw[0], dlog[0]) if problem.headless else (raw, dlog)
        if conventions is not None:
            translate: Any = translate_changes
            lse = call.results(saved)[1]
            do, dlse = translate(conventions, problem, do, dlse, lse, moved_v)
    return raw, dlog, do, dlse


def weigh(call: AttentionCall, saved: SavedTensors) -> Tensor:
    """Return the weights, differentiable where an input is."""
    if _needs_autograd(call.tensors):
        apply: Any = _Weights.apply
        weights: Tensor = apply(call, saved, *call.tensors)
        return weights
    return _weights(call, saved)


def _weights(call: AttentionCall, saved: SavedTensors) -> Tensor:
    problem, conventions = call.problem, call.conventions
    with torch.no_grad(), exact(problem.dtype, problem.device):
        p = engine_weights(call.canonical(), saved, call.one_tile)
        p = p[0] if problem.headless else p
        if conventions is None:
            return p
        raw: Any = call.results(saved)[1]
        translate: Any = conventions.returned_weights
        translated: Tensor = translate(problem, p, raw)
        return translated


class _Weights(torch.autograd.Function):
    """The weights of results that are known, which are not differentiated again."""

    @staticmethod
    def forward(call: AttentionCall, saved: SavedTensors, *tensors: Any) -> Tensor:
        return _weights(call.with_tensors(*tensors), saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.saved, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dweights: Tensor) -> Any:
        """Return the gradients of Σ dweights · weights by tensor, for dweights (..., H, T, S)."""
        refuse_batched(dweights)
        tensors, saved = ctx.saved_tensors, ctx.saved
        call = ctx.call.with_tensors(*tensors)
        if torch.is_grad_enabled():  # the results again, as functions of the inputs
            saved = attend(call)[2]
        grads = pull_back(call, saved, None, None, dweights)
        return None, None, *_by_tensor(tensors, grads)


def _by_tensor(tensors: Sequence[Any], grads: Gradients) -> list[Any]:
    """Return the gradients in the dtypes of q, k, v, bias and sinks; None for no such tensor."""
    each = (grads.q, grads.k, grads.v, grads.bias, grads.sinks)
    return [None if x is None else cast(g, x.dtype) for x, g in zip(tensors, each, strict=True)]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(call: AttentionCall, *tensors: Any) -> tuple[Any, ...]:
        saved, translated = call.with_tensors(*tensors).forward()
        return *saved, *translated

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.set_materialize_grads(False)
        if output[2] is not None:
            ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, *output[:3])
        ctx.save_for_forward(*tensors, *output[:3])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        refuse_batched(*cotangents)
        *tensors, out, log, shift = ctx.saved_tensors
        call, saved = ctx.call.with_tensors(*tensors), SavedTensors(out, log, shift)
        draw, dlog, _, dout, dlse = (*cotangents, None, None)[:5]
        grads = pull_back(call, saved, dout, dlse, draw=draw, dlog=dlog)
        return None, *_by_tensor(tensors, grads)

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise OptionError(BATCHED)

    @staticmethod
    def jvp(ctx: Any, _: Any, *directions: Any) -> Any:
        refuse_batched(*directions)
        *tensors, out, log, shift = ctx.saved_tensors
        call = ctx.call.with_tensors(*tensors)
        problem, names = call.problem, ("q", "k", "v", "bias", "sinks")
        along = {
            name: None if x is None else problem.to_compute_dtype(x)
            for name, x in zip(names, directions, strict=True)
        }
        raw, dlog, do, dlse = push_forward(call, SavedTensors(out, log, shift), along)
        return (raw, dlog, None) if call.conventions is None else (raw, dlog, None, do, dlse)


class _UntransformedAttention(torch.autograd.Function):
    """The same function without setup_context, so that torch need not bind arguments by name.

    Binding takes as long as the rest of autograd. Transforms of torch.func need setup_context.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
        saved, translated = inputs[0].forward()  # its tensors are the other inputs
        output = (*saved, *translated)
        _Attention.setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_Attention.backward)
    jvp = staticmethod(_Attention.jvp)
