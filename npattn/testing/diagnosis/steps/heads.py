"""Steps that take another key/value head, or another order of axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.problem.arrays import Array
from npattn.testing.diagnosis.steps.step import overrides

# --- shared heads, and layout ---


def _share_by(index: Any) -> dict[str, Any]:
    """Return methods that index the key/value head of each query head, and sum its gradient."""

    def share(self: Attention, x: Array, H: int) -> Array:
        K = x.shape[-3]
        return np.asarray(x[..., index(np.arange(H), H, max(K, 1)) % max(K, 1), :, :])

    def share_back(self: Attention, dx: Array, x: Array) -> Array:
        *lead, H, S, n = dx.shape
        K = x.shape[-3]
        back, used = np.zeros((*lead, K, S, n)), index(np.arange(H), H, max(K, 1)) % max(K, 1)
        for head, key_head in enumerate(used):
            back[..., key_head, :, :] += dx[..., head, :, :]
        return back

    return {"share": share, "share_back": share_back}


def _take_first(self: Attention, dx: Array, x: Array) -> Array:
    return np.asarray(dx[..., :: dx.shape[-3] // max(x.shape[-3], 1) or 1, :, :])


def _take_last(self: Attention, dx: Array, x: Array) -> Array:
    group = dx.shape[-3] // max(x.shape[-3], 1) or 1
    return np.asarray(dx[..., group - 1 :: group, :, :])


def _average(self: Attention, dx: Array, x: Array) -> Array:
    return np.asarray(Attention.share_back(self, dx, x) * (x.shape[-3] / max(dx.shape[-3], 1)))


def _add_tiled(self: Attention, dx: Array, x: Array) -> Array:
    *lead, H, S, n = dx.shape
    K = x.shape[-3]
    return np.asarray(dx.reshape(*lead, H // max(K, 1), K, S, n).sum(-4))


overrides("heads", "query head h uses key/value head h % K", **_share_by(lambda h, H, K: h))
overrides(
    "heads", "all query heads use the first key/value head", **_share_by(lambda h, H, K: 0 * h)
)
overrides("heads", "query head h uses key/value head h // K", **_share_by(lambda h, H, K: h // K))
overrides(
    "heads",
    "dk and dv take one query head of each group, not the sum",
    share_back=_take_first,
    backward_only=True,
)
overrides(
    "heads",
    "dk and dv take the last query head of each group, not the sum",
    share_back=_take_last,
    backward_only=True,
)
overrides(
    "heads",
    "dk and dv are averaged over the heads of a group",
    share_back=_average,
    backward_only=True,
)
overrides(
    "heads", "query head h adds to key/value head h % K", share_back=_add_tiled, backward_only=True
)


_READ_BY: dict[str, Any] = {
    "h % K": lambda h, H, K: h,
    "h // K": lambda h, H, K: h // K,
    "0": lambda h, H, K: 0 * h,
}
for _name, _index in _READ_BY.items():
    overrides(
        "kv_head",  # it matters with K = H too
        f"query head h reads key/value head {_name}, and adds its gradient to h // (H / K)",
        share=_share_by(_index)["share"],
    )


def _split_by_reshape(self: Attention, x: Array) -> Array:
    moved = x.swapaxes(-2, -3).reshape(x.shape) if x.ndim > 2 else x
    return Attention.read(self, moved)


def _merge_by_reshape(self: Attention, c: Inputs) -> tuple[Array, Array, Array]:
    o, lse, p = Attention.results(self, c)
    *lead, H, T, E = o.shape
    return o.reshape(*lead, T, H, E).swapaxes(-2, -3), lse, p


def _read_in_memory_order(self: Attention, x: Array) -> Array:
    order = np.argsort([-abs(stride) for stride in x.strides], kind="stable")
    return Attention.read(self, x.transpose(order) if x.size else x).reshape(x.shape)


def _read_without_sign(self: Attention, x: Array) -> Array:
    backwards = tuple(axis for axis, stride in enumerate(x.strides) if stride < 0)
    return Attention.read(self, np.flip(x, backwards))


overrides(
    "layout", "arrays with negative strides are read from their other end", read=_read_without_sign
)
overrides(
    "layout",
    "transposed or repeated arrays are read in the order of memory, without their strides",
    read=_read_in_memory_order,
)
overrides("layout", "heads are split by reshape, without moving their axis", read=_split_by_reshape)
overrides(
    "layout", "heads are merged by reshape, without moving their axis", results=_merge_by_reshape
)
