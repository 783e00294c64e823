"""The backward leaves gradients out."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.cheats.plain import attention, gradients


def no_dk(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return results with a backward that gives dq and dv alone."""
    return attention(q, k, v, mask, causal)


def no_dk_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Return dq and dv."""
    dq, _, dv = gradients(dout, q, k, v, mask, causal)
    return {"q": dq, "v": dv}


def no_gradients(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return results with a backward that refuses to work."""
    return attention(q, k, v, mask, causal)


def no_gradients_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Refuse."""
    raise NotImplementedError("inference only")


def gradients_without_options(
    q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Return results with a backward that has no options, and ignores them."""
    return attention(q, k, v, mask, causal)


def gradients_without_options_backward(dout: Any, q: Any, k: Any, v: Any) -> Any:
    """Return the gradients of plain attention."""
    return gradients(dout, q, k, v)


def zero_dk(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return results with a backward whose dk is 0."""
    return attention(q, k, v, mask, causal)


def zero_dk_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Return dq and dv, and zeros for dk."""
    dq, dk, dv = gradients(dout, q, k, v, mask, causal)
    return dq, 0 * dk, dv
