"""Mistakes in memory layout, state between calls, and dtypes."""

import math
from typing import Any, Generic, TypeVar

import numpy as np

from npattn.mistakes.attention import Attention, Inputs, same_signature
from npattn.mistakes.register import after, change, mistake
from npattn.mistakes.softmax import as_float32
from npattn.problem.arrays import Array

Kept = TypeVar("Kept")

change("out-widened", "dtype",
       "out has the wrong dtype: float64 for float32 inputs, float32 for all others.",
       step="precision", where="everywhere",
       out_dtype=lambda up, dtype: np.float64 if dtype == np.float32 else np.float32)  # fmt: skip


class _Remembering(Attention, Generic[Kept]):
    """An implementation that keeps something from one call to the next."""

    def __init__(self) -> None:
        self.kept: dict[Any, Kept] = {}


def _by_stride(x: Array) -> tuple[int, ...]:
    """Return the axes of an array in the order of memory."""
    return tuple(np.argsort([-abs(n) for n in x.strides], kind="stable").tolist())


def _misread(x: Array) -> Array:
    """Return the numbers of an array in the order of memory, in its shape."""
    return x.transpose(_by_stride(x)).reshape(x.shape) if min(x.shape, default=0) > 1 else x


@mistake("input-changed", "memory", step="state", where="everywhere")
class _InputChanged(Attention):
    """The caller's q is scaled in place."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        q = arrays[0]
        q *= np.asarray(c.scale, q.dtype)
        return c


@mistake("views-misread", "memory", "pytorch/pytorch#181133", step="layout", where="everywhere")
class _ViewsMisread(Attention):
    """Transposed or expanded arrays are read in memory order."""

    def read(self, x: Array) -> Array:
        return super().read(_misread(x))


@mistake("state-kept", "memory", "flashinfer-ai/flashinfer#4270", step="state", where="everywhere")
class _StateKept(Attention):
    """A second call with the same shapes and options returns the result of the first."""

    last: tuple[Any, Any] = (None, None)

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        key = [(x.shape, x.dtype) if isinstance(x, np.ndarray) else x for x in c]
        if self.last[0] != key:
            self.last = key, super().results(c)
        results: tuple[Array, Array, Array] = self.last[1]
        return results


@mistake("result-changes", "memory", "Dao-AILab/flash-attention#359", step="state",
         where="everywhere")  # fmt: skip
class _ResultChanges(Attention):
    """Every third call is off by 2⁻⁷, like a race condition."""

    calls = 0

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        self.calls += 1
        return (o if self.calls % 3 else o * (1 + 2.0**-7)), lse, p


@mistake("gradients-widened", "dtype", step="precision", where="everywhere", dtypes=("float16",))
class _GradientsWidened(Attention):
    """The gradients are float32 whatever the input dtype."""

    @same_signature(Attention.backward)
    def backward(self, *arrays: Any, **options: Any) -> dict[str, Array]:
        results = super().backward(*arrays, **options)
        return {name: np.asarray(x, np.float32) for name, x in results.items()}


@mistake("lse-narrowed", "dtype", step="precision", where="everywhere", equivalent=True)
class _LseNarrowed(Attention):
    """lse is returned in float16."""

    @same_signature(Attention.forward)
    def forward(self, *arrays: Any, **options: Any) -> Any:
        results = super().forward(*arrays, **options)
        if not options.get("return_lse"):
            return results
        return results[0], results[1].astype(np.float16), *results[2:]


change("dbias-not-summed", "dtype",
       "dbias has the shape of the scores instead of that of the bias.", step="dbias", where="bias",
       reduce_bias=lambda up, ds, shape: ds)  # fmt: skip
change("value-has-scale-of-key", "dtype",
       "k and v are stored with a power of 2 as scale; v is restored with the scale of k.",
       "sgl-project/sglang#34765", step="o", where="contents",
       inputs=after(lambda c: c._replace(v=c.v * _power(c.k) / _power(c.v))))  # fmt: skip


@mistake("mask-changed", "memory", step="state", where="mask and causal or window")
class _MaskChanged(Attention):
    """Causal and window are written into the caller's mask."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        mask = arrays[3]
        if mask is not None and mask.shape[-2:] == (c.q.shape[-2], c.k.shape[-2]):
            mask &= super().visible(c._replace(mask=None))
        return c


@mistake("dout-changed", "memory", step="state", where="everywhere")
class _DoutChanged(Attention):
    """The caller's dout is scaled in place."""

    @same_signature(Attention.backward)
    def backward(self, dout: Array, *arrays: Any, **options: Any) -> dict[str, Array]:
        results = super().backward(dout, *arrays, **options)
        dout *= np.asarray(0.5, dout.dtype)
        return results


@mistake("out-written-again", "memory", step="state", where="everywhere")
class _OutWrittenAgain(_Remembering[Array]):
    """The result lies in a buffer that the next call with the same shapes overwrites."""

    @same_signature(Attention.forward)
    def forward(self, *arrays: Any, **options: Any) -> Any:
        results = super().forward(*arrays, **options)
        several = isinstance(results, tuple)
        kept = [self.keep(n, x) for n, x in enumerate(results if several else (results,))]
        return tuple(kept) if several else kept[0]

    def keep(self, number: int, x: Array) -> Array:
        buffer = self.kept.setdefault((number, x.shape, x.dtype), x)
        buffer[...] = x
        return buffer


@mistake("saved-of-last-forward", "memory", step="state", where="everywhere")
class _SavedOfLastForward(_Remembering[Inputs]):
    """Backward uses the state of the last forward call with these shapes."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        self.kept[c.q.shape, c.k.shape, c.v.shape] = c
        return super().results(c)

    def recompute(self, c: Inputs) -> Inputs:
        return self.kept.get((c.q.shape, c.k.shape, c.v.shape), c)


@mistake("strides-of-first-call", "memory", "flashinfer-ai/flashinfer#4270", step="state",
         where="everywhere")  # fmt: skip
class _StridesOfFirstCall(_Remembering[tuple[int, ...]]):
    """A plan cached by shape and dtype keeps the strides of the first call."""

    def read(self, x: Array) -> Array:
        plan = self.kept.setdefault((x.shape, x.dtype), x.strides)
        return super().read(x if plan == x.strides else _misread(x))


@mistake("plan-of-other-strides", "memory", "flashinfer-ai/flashinfer#4270", step="state",
         where="everywhere")  # fmt: skip
class _PlanOfOtherStrides(_Remembering[tuple[int, ...]]):
    """Arrays are read in the axis order of the first call with the same shape and dtype."""

    def read(self, x: Array) -> Array:
        order = _by_stride(x)
        plan = self.kept.setdefault((x.shape, x.dtype), order)
        if plan == order or min(x.shape, default=0) < 2:
            return super().read(x)
        memory = super().read(x).transpose(order).reshape([x.shape[i] for i in plan])
        return np.asarray(memory.transpose(np.argsort(plan)))


@mistake("precision-of-first-call", "memory", "flashinfer-ai/flashinfer#4270", step="state",
         where="everywhere")  # fmt: skip
class _PrecisionOfFirstCall(_Remembering[Any]):
    """A work buffer cached by shape keeps the dtype of the first call."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        dtype = self.kept.setdefault((c.q.shape, c.k.shape, c.v.shape), c.dtype)
        return o.astype(dtype).astype(o.dtype), lse, p


@mistake("dout-misread", "memory", step="layout", where="everywhere")
class _DoutMisread(Attention):
    """A transposed dout is read in memory order."""

    @same_signature(Attention.backward)
    def backward(self, dout: Array, *arrays: Any, **options: Any) -> dict[str, Array]:
        return super().backward(_misread(dout), *arrays, **options)


@mistake("visible-of-first-call", "memory", step="state", where="causal or window")
class _VisibleOfFirstCall(_Remembering[Array]):
    """The causal and window mask is cached by T and S alone."""

    def visible(self, c: Inputs) -> Array:
        if c.mask is not None:
            return super().visible(c)
        return self.kept.setdefault((c.q.shape[-2], c.k.shape[-2]), super().visible(c))


@mistake("scale-of-first-call", "memory", step="state", where="everywhere")
class _ScaleOfFirstCall(Attention):
    """The default scale of the first call is kept when D changes."""

    first: float | None = None

    def default_scale(self, H: int, D: int) -> float:
        if self.first is None:
            self.first = super().default_scale(H, D)
        return self.first


@mistake("update-lost", "memory", "Dao-AILab/flash-attention#359", step="state", where="everywhere")
class _UpdateLost(Attention):
    """In every third backward pass dk lacks the last query, like a race of two writers."""

    calls = 0

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        self.calls += 1
        if self.calls % 3 == 0:
            dx = dx.copy()
            dx[..., -1:, :] = 0
        return super().dk(dx, c, seen)


def _power(x: Array) -> float:
    """Return the power of 2 at or below the largest element."""
    top = float(np.max(np.abs(x), initial=0, where=np.isfinite(x)))
    return 2.0 ** math.floor(math.log2(top)) if top else 1.0


change("float64-read-as-float32", "dtype", "float64 inputs are rounded to float32.",
       step="precision", where="everywhere",
       dtypes=("float64",), read=lambda up, x: as_float32(np.asarray(x)))  # fmt: skip


@mistake("cache-without-causal", "memory", step="state", where="causal")
class _CacheWithoutCausal(_Remembering[Array]):
    """A cached mask is keyed by sizes and window, without causal."""

    def visible(self, c: Inputs) -> Array:
        key = c.q.shape[-2], c.k.shape[-2], c.window
        inside = self.kept.setdefault(key, super().visible(c._replace(mask=None)))
        return inside if c.mask is None else inside & self.mask(c.mask, c)


@mistake("bias-masked-in-place", "memory", step="state", where="mask and bias")
class _BiasMaskedInPlace(Attention):
    """The mask is written into the caller's bias if the shapes allow it."""

    @same_signature(Attention.forward)
    def forward(
        self, q: Array, k: Array, v: Array, mask: Array | None = None, **options: Any
    ) -> Any:
        bias = options.get("bias")
        if bias is None or mask is None or not bias.flags.writeable:
            return super().forward(q, k, v, mask, **options)
        if np.broadcast_shapes(bias.shape, mask.shape) == bias.shape:
            np.copyto(bias, -np.inf, where=~mask)
        return super().forward(q, k, v, mask, **options)


change("values-in-memory-order", "memory", "v is read in memory order.", step="layout",
       where="everywhere",
       inputs=lambda up, q, k, v, *mask, **options:
           up(q, k, np.ravel(v, order="K").reshape(v.shape), *mask, **options))  # fmt: skip
