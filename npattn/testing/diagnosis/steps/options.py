"""Steps that take an option, an array or a size for another one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs, within
from npattn.mistakes.masks import visible_by_any
from npattn.problem.arrays import Array
from npattn.testing.diagnosis.steps.step import change, overrides

# --- options left out, or taken for others ---


def _side(c: Inputs, which: int, more: int) -> dict[str, Any]:
    """Move one side of the window by some keys."""
    sides = list(c.window or (None, None))
    side = sides[which]
    sides[which] = None if side is None else side + more
    return {"window": tuple(sides)}


def _first(x: Any, axis: int, at: int = 0) -> Any:
    """Return an array in which all entries along an axis are one of them."""
    if not isinstance(x, np.ndarray) or x.ndim < -axis or not x.shape[axis]:
        return x
    return np.broadcast_to(np.take(x, [at], axis=axis), x.shape)


def _by_head(x: Any) -> Any:
    """Return an array (B, 1, T, S) as (1, B, T, S)."""
    by_sample = isinstance(x, np.ndarray) and x.ndim > 3 and x.shape[-3] == 1 < x.shape[-4]
    return x.swapaxes(-3, -4) if by_sample else x


def _turn(x: Any) -> Any:
    """Return an array with its axes of queries and keys exchanged, if it is square."""
    square = isinstance(x, np.ndarray) and x.ndim > 1 and x.shape[-1] == x.shape[-2]
    return x.swapaxes(-1, -2) if square else x


def _group(c: Inputs) -> int:
    """Return the number of query heads that share a key/value head."""
    H, K = (max(int(x.shape[-3]), 1) for x in (c.q, c.k))
    return H // K


change("mask", "the mask is ignored", lambda c: {"mask": None})
change("mask", "the mask is inverted", lambda c: {"mask": ~c.mask})
change(
    "mask", "the mask of the first sample is used for all", lambda c: {"mask": _first(c.mask, -4)}
)
change("mask", "the mask of the first head is used for all", lambda c: {"mask": _first(c.mask, -3)})
change("mask", "the mask of sample b is used for head b", lambda c: {"mask": _by_head(c.mask)})
change(
    "mask",
    "the mask of the last query is used for all",
    lambda c: {"mask": _first(c.mask, -2, -1)},
)
change(
    "mask",
    "the mask is transposed where there are as many queries as keys",
    lambda c: {"mask": _turn(c.mask)},
)
overrides(
    "mask",
    "with causal, a key is visible if the mask or causal allows it, not both",
    visible=visible_by_any,
)
change("causal", "causal is ignored", lambda c: {"causal": False})
change("masks", "causal is applied where it is not given", lambda c: {"causal": True})
change("window", "the window is ignored", lambda c: {"window": None})
change("window", "the window is one key too wide on the left", lambda c: _side(c, 0, 1))
change("window", "the window is one key too narrow on the left", lambda c: _side(c, 0, -1))
change("window", "the window is one key too wide on the right", lambda c: _side(c, 1, 1))
change("window", "the window is one key too narrow on the right", lambda c: _side(c, 1, -1))
change(
    "window", "the left side of the window is ignored", lambda c: {"window": (None, c.window[1])}
)
change(
    "window", "the right side of the window is ignored", lambda c: {"window": (c.window[0], None)}
)
change("window", "the sides of the window are swapped", lambda c: {"window": c.window[::-1]})
change(
    "window",
    "the left side of the window is used for both",
    lambda c: {"window": (c.window[0],) * 2},
)
change(
    "window",
    "a window side of 0 is taken as unlimited",
    lambda c: {"window": tuple(n or None for n in c.window)},
)
change("bias", "the bias is ignored", lambda c: {"bias": 0.0})
change(
    "bias",
    "the bias has the wrong sign",
    lambda c: {"bias": np.where(np.isfinite(c.bias), -c.bias, c.bias)},
)
change("bias", "the bias is multiplied by the scale", lambda c: {"bias": c.scale * c.bias})
change(
    "bias", "the bias of the first sample is used for all", lambda c: {"bias": _first(c.bias, -4)}
)
change("bias", "the bias of the first head is used for all", lambda c: {"bias": _first(c.bias, -3)})
change("bias", "the bias of sample b is used for head b", lambda c: {"bias": _by_head(c.bias)})
change(
    "bias", "the bias of the last query is used for all", lambda c: {"bias": _first(c.bias, -2, -1)}
)
change(
    "bias",
    "the bias is transposed where there are as many queries as keys",
    lambda c: {"bias": _turn(c.bias)},
)
change(
    "bias", "−inf in the bias is lost", lambda c: {"bias": np.where(np.isneginf(c.bias), 0, c.bias)}
)
change(
    "bias",
    "−inf in the bias is clamped to a finite number",
    lambda c: {"bias": np.maximum(c.bias, np.finfo(np.float32).min)},
)
change("softcap", "the softcap is ignored", lambda c: {"softcap": None})
change("sinks", "the sinks are ignored", lambda c: {"sinks": np.full_like(c.sinks, -np.inf)})
change("sinks", "the sinks are multiplied by the scale", lambda c: {"sinks": c.scale * c.sinks})
change(
    "sinks", "the sink of the first head is used for all", lambda c: {"sinks": _first(c.sinks, -3)}
)
change(
    "sinks",
    "query head h uses the sink of head h // (H / K)",
    lambda c: {"sinks": c.sinks[np.arange(len(c.sinks)) // _group(c)]},
)
change(
    "sinks",
    "the sinks are read in the order (H / K, K) of heads",
    lambda c: {"sinks": c.sinks.reshape(_group(c), -1).T.reshape(c.sinks.shape)},
)
change("dropout", "dropout is ignored", lambda c: {"keep": 1.0})
change(
    "dropout",
    "weights that dropout keeps are not divided by 1 − rate",
    lambda c: {"keep": np.sign(c.keep)},
)
change(
    "dropout",
    "weights that dropout keeps are divided by 1 − rate twice",
    lambda c: {"keep": c.keep * np.max(c.keep, initial=0)},
)
change(
    "dropout",
    "the dropout mask is inverted",
    lambda c: {"keep": np.max(c.keep, initial=1) - c.keep},
)
change(
    "dropout",
    "the dropout mask of the first query is used for all",
    lambda c: {"keep": _first(c.keep, -2)},
)
change(
    "dropout",
    "the dropout mask of the first head is used for all",
    lambda c: {"keep": _first(c.keep, -3)},
)

# --- options left out on the path that returns the weights ---

_LEFT_OUT: dict[str, Any] = {
    "mask": lambda c: {"mask": None},
    "causal": lambda c: {"causal": False},
    "window": lambda c: {"window": None},
    "bias": lambda c: {"bias": 0.0},
    "softcap": lambda c: {"softcap": None},
    "sinks": lambda c: {"sinks": np.full_like(c.sinks, -np.inf)},
    "dropout": lambda c: {"keep": 1.0},
}


def _results_without(changes: Any) -> Any:
    """Return the results of other options, if the weights are requested."""

    def results(self: Attention, c: Inputs) -> tuple[Array, Array, Array]:
        return Attention.results(self, c._replace(**changes(c)) if c.returns_weights else c)

    return results


for _option, _changes in _LEFT_OUT.items():
    overrides(
        _option,
        f"{_option} is ignored where the weights are returned",
        results=_results_without(_changes),
    )

# --- scale ---


def _round_up(n: int, tile: int) -> int:
    return -(-n // tile) * tile


def _default(n: float) -> float:
    return 1 / math.sqrt(n or 1)


change(
    "scale",
    "the scale argument is ignored: it is 1/√D",
    lambda c: {"scale": _default(c.q.shape[-1])},
)
change("scale", "the scale is 1", lambda c: {"scale": 1.0})
change("scale", "the scale is applied twice", lambda c: {"scale": c.scale**2})
change(
    "scale", "the scores are divided by the scale", lambda c: {"scale": 1 / (c.scale or math.inf)}
)
change("scale", "the sign of the scale is lost", lambda c: {"scale": abs(c.scale)})
change("scale", "the scale is 1/√E", lambda c: {"scale": _default(c.v.shape[-1])})
change("scale", "the scale is 1/√H", lambda c: {"scale": _default(c.q.shape[-3])})
change(
    "scale", "the scale is 1/√(H·D)", lambda c: {"scale": _default(c.q.shape[-3] * c.q.shape[-1])}
)
change("scale", "the scale is 1/√S", lambda c: {"scale": _default(c.k.shape[-2])})
change("scale", "the scale is 1/D", lambda c: {"scale": 1 / (c.q.shape[-1] or 1)})
change(
    "scale",
    "the weights are powers of 2 instead of e: the factor log₂ e is missing",
    lambda c: {x: getattr(c, x) * math.log(2) for x in ("scale", "bias", "sinks")},
)
change(
    "scale",
    "the factor log₂ e is multiplied onto the scores, but their exponential has base e",
    lambda c: {x: getattr(c, x) / math.log(2) for x in ("scale", "bias", "sinks")},
)
for _tile in (8, 16, 32, 64, 128):
    change(
        "scale",
        f"the scale is that of D rounded up to a multiple of {_tile}",
        lambda c, n=_tile: {"scale": _default(_round_up(c.q.shape[-1], n))},  # type: ignore[misc]
    )

# --- keys, channels and columns ---


def _only(c: Inputs, shown: Array) -> dict[str, Any]:
    """Hide the keys that are not shown, (S,), behind the mask."""
    whole = np.broadcast_to(shown, (c.q.shape[-2], c.k.shape[-2]))
    return {"mask": whole if c.mask is None else whole & c.mask}


def _keys(c: Inputs) -> Array:
    return np.arange(c.k.shape[-2])


def _tail(x: Array, tile: int, axis: int = -1) -> Array:
    """Return an array that is 0 after the last whole tile of an axis."""
    kept = np.arange(x.shape[axis]) < x.shape[axis] // tile * tile
    return np.asarray(x * (kept if axis == -1 else kept[:, None]))


def _attend_padding(c: Inputs, tile: int) -> Array:
    """Return sinks that hold the keys beyond the last of each query that no diagonal hides."""
    T, S = c.q.shape[-2], c.k.shape[-2]
    wrong = Attention()
    beside = np.arange(S, _round_up(S, tile)) - wrong.diagonal(T, S)
    count = within(beside, wrong.sides(c)).sum(-1, keepdims=True)
    return np.logaddexp(c.sinks, np.log(count)) if count.any() else c.sinks


def _product_of_whole(tile: int) -> Any:
    def product(self: Attention, c: Inputs) -> Array:
        return Attention.product(self, c._replace(q=_tail(c.q, tile)))

    return product


change("keys", "the first key is lost", lambda c: _only(c, _keys(c) > 0))
change("keys", "the last key is lost", lambda c: _only(c, _keys(c) < c.k.shape[-2] - 1))
change("keys", "k is taken for v", lambda c: {"v": c.k})
change("keys", "k and v are exchanged", lambda c: {"k": c.v, "v": c.k})
change("keys", "q and k are exchanged", lambda c: {"q": c.k, "k": c.q})
change("keys", "every row has one more key of zeros", lambda c: {"sinks": np.logaddexp(c.sinks, 0)})
for _tile in (4, 8, 16, 32, 64, 128, 256):
    change(
        "keys",
        f"keys after the last whole tile of {_tile} are lost",
        lambda c, n=_tile: _only(c, _keys(c) < c.k.shape[-2] // n * n),  # type: ignore[misc]
    )
    # A key of zeros has score 0 and value 0: it weighs as much as a sink of 0.
    change(
        "keys",
        f"keys of zeros take weight: those that pad the last tile of {_tile} are not hidden",
        lambda c, n=_tile: {"sinks": _attend_padding(c, n)},  # type: ignore[misc]
    )
    change(
        "sizes",
        f"only the first {_tile} keys are read",
        lambda c, n=_tile: _only(c, _keys(c) < n),  # type: ignore[misc]
    )
    change(
        "sizes",
        f"channels after the last whole vector of {_tile} are left out of q kᵀ",
        lambda c, n=_tile: {"q": _tail(c.q, n), "k": _tail(c.k, n)},  # type: ignore[misc]
    )
    overrides(
        "sizes",
        f"channels after the last whole vector of {_tile} are left out of the scores, but not of "
        "dq and dk",
        product=_product_of_whole(_tile),
    )
    change(
        "sizes",
        f"columns after the last whole vector of {_tile} are 0",
        lambda c, n=_tile: {"v": _tail(c.v, n)},  # type: ignore[misc]
    )
