"""Attention with an output gate and the largest scores, in steps; and a gate around any other.

    B batch   H query heads   T queries   E value size
    o ← gate · o    do ← gate · dout    dgate = Σ dout · o      [16]

`Attention` itself has neither, so that its mistakes are judged on the options of their own.
"""

import inspect
from functools import cache
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs, with_options_of
from npattn.problem.arrays import Array, sum_to


class Gated(Attention):
    """`Attention` with a gate."""

    def inputs(self, *arrays: Any, gate: Array | None = None, **options: Any) -> Inputs:
        """Return the inputs of the steps; its parameters are the options of the implementation."""
        c = super().inputs(*arrays, **options)
        return c if gate is None else c._replace(gate=np.asarray(gate, np.float64))

    _base = inspect.signature(Attention.inputs)
    _own = inspect.Parameter("gate", inspect.Parameter.KEYWORD_ONLY, default=None)
    inputs.__signature__ = _base.replace(  # type: ignore[attr-defined]
        parameters=[*_base.parameters.values(), _own]
    )

    @with_options_of(inputs, Attention.forward)
    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None = None,
        *,
        return_max_score: bool = False,
        **options: Any,
    ) -> Any:
        """Return out, or out and what is requested; with the shapes of `Attention.forward`."""
        results = super().forward(q, k, v, mask, **options)
        if not return_max_score:
            return results
        asked = [options.pop(flag, False) for flag in ("return_lse", "return_weights")]
        top = self.max_score(self.inputs(q, k, v, mask, **options))
        top = top.astype(np.result_type(q.dtype, np.float32) if q.dtype.kind == "f" else np.float32)
        rest = results if any(asked) else (results,)
        return (*rest, top[0] if q.ndim == 2 else top)

    @with_options_of(inputs, Attention.backward)
    @np.errstate(all="ignore")
    def backward(
        self, dout: Array, q: Array, k: Array, v: Array, **options: Any
    ) -> dict[str, Array]:
        """Return gradients by input name, with dgate; with the shapes of `Attention.backward`."""
        grads = super().backward(dout, q, k, v, **options)
        gate = options.get("gate")
        if gate is not None:
            for name in ("out", "lse", "dlse", "dweights"):
                options.pop(name, None)
            c = self.inputs(q, k, v, **options)
            do = np.asarray(dout, np.float64).reshape(*c.q.shape[:-1], v.shape[-1])
            wide = np.result_type(q.dtype, np.float32) if q.dtype.kind == "f" else np.float32
            grads["gate"] = self.dgate(do, c, gate.shape).astype(wide)
        return grads

    @np.errstate(all="ignore")
    def max_score(self, c: Inputs) -> Array:
        """Return the largest score of each row, (..., H, T)."""
        s, _ = self.scores(c)
        return np.asarray(s.max(-1, initial=-np.inf))

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        """Return out, lse and weights."""
        o, lse, p = super().results(c)
        return self.gate(o, c), self.gated_lse(lse, c), p

    def gate(self, o: Array, c: Inputs) -> Array:
        return np.asarray(c.gate * o)

    def gated_lse(self, lse: Array, c: Inputs) -> Array:
        return lse  # as it is without a gate

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        """Return dq, dk, dv by query head, and the gradients of the scores and the sink."""
        return super().gradients(c, self.do(do, c), dlse, dw)

    def do(self, dout: Array, c: Inputs) -> Array:
        """Return the cotangent of o before the gate."""
        return np.asarray(c.gate * dout)

    def inner_out(self, c: Inputs) -> Array:
        return super().results(c)[0]

    def dgate(self, dout: Array, c: Inputs, shape: tuple[int, ...]) -> Array:
        return sum_to(dout * self.inner_out(c), shape)


@cache
def with_gate(cls: type[Attention]) -> type[Attention]:
    """Return a class with a gate around the attention of `cls`."""
    if issubclass(cls, Gated):
        return cls
    return type(f"Gated{cls.__name__}", (Gated, cls), {})
