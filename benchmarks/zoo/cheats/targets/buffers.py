"""Output buffers are used again: a result that is kept changes under its owner."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.cheats.plain import attention, gradients

RINGS: dict[Any, list[Any]] = {}


def _write(result: Any, size: int, name: str = "o") -> Any:
    """Return the result in one of a few buffers for its shape, in turn."""
    ring = RINGS.setdefault((name, result.shape, result.dtype.str), [])
    if len(ring) < size:
        ring.append(result)
        return result
    buffer = ring.pop(0)
    buffer[...] = result
    ring.append(buffer)
    return buffer


def one_buffer(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return one buffer for each shape.

    Source: ScalingIntelligence/KernelBench#82
    """
    return _write(attention(q, k, v, mask, causal), 1)


def ring_of_eight(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return eight buffers for each shape in turn."""
    return _write(attention(q, k, v, mask, causal), 8)


def ring_of_thirty_eight(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return 38 buffers for each shape in turn."""
    return _write(attention(q, k, v, mask, causal), 38)


def gradients_in_a_ring(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return fresh results, and gradients in a ring of twelve buffers."""
    return attention(q, k, v, mask, causal)


def gradients_in_a_ring_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Return the gradients, each in one of twelve buffers."""
    grads = gradients(dout, q, k, v, mask, causal)
    return tuple(_write(x, 12, n) for n, x in zip("qkv", grads, strict=True))
