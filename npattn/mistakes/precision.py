"""Mistakes in precision: roundings that the author does not declare, or does not know of.

They are wrong in 16-bit dtypes only, and are judged by the rounding model that their author would
declare.
"""

import math
from functools import partial

import ml_dtypes
import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.online import Online, RunningSoftmax
from npattn.mistakes.register import after, change, mistake, one_result
from npattn.problem.arrays import Array

__all__: list[str] = []

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
of_fused = partial(
    mistake, family="precision", step="precision", where="everywhere", rounding="fused"
)
"""Register a mistake of a kernel that declares the rounding model "fused"."""


def round_to(x: Array, dtype: np.dtype[np.generic]) -> Array:
    """Round x to a dtype and read it back."""
    return x.astype(dtype).astype(x.dtype)


def truncate(x: Array) -> Array:
    """Truncate x to bfloat16, towards 0."""
    bits = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.asarray(bits.view(np.float32).astype(x.dtype))


class Fused(Online):
    """Right: P and dS are rounded for the matrix products, as the model "fused" says."""

    def drop(self, p: Array, tile: Inputs) -> Array:
        return round_to(super().drop(p, tile), tile.dtype)

    def uncap(self, ds: Array, live: Array, c: Inputs) -> Array:
        return round_to(super().uncap(ds, live, c), c.dtype)


# --- sums -----------------------------------------------------------------------------------------


@of_fused("row-sum-in-float16", source="sonos/tract#2586", dtypes=("float16",))
class _RowSumInFloat16(Online):
    """Row sums accumulate in float16, where 2048 + 1 = 2048."""

    def row_sum(self, total: Array, p: Array) -> Array:
        terms = np.concatenate([total, p], -1).astype(np.float16)
        return np.add.accumulate(terms, axis=-1)[..., -1:].astype(total.dtype)


@of_fused("accumulator-in-bfloat16", dtypes=("bfloat16",))
class _AccumulatorInBfloat16(Fused):
    """The accumulator of out is rounded to bfloat16 after every 16 keys."""

    def add_tile(self, state: RunningSoftmax, tile: Inputs) -> RunningSoftmax:
        state = super().add_tile(state, tile)
        return state._replace(acc=round_to(state.acc, tile.dtype))


@of_fused("dq-in-bfloat16", dtypes=("bfloat16",))
class _DqInBfloat16(Fused):
    """dq is rounded to bfloat16 after every 16 keys."""

    def collect(self, name: str, into: Array, at: slice, x: Array) -> None:
        super().collect(name, into, at, x)
        if name == "dq":
            into[..., at, :] = round_to(into[..., at, :], BFLOAT16)


@of_fused("group-summed-in-bfloat16", where="G > 1", dtypes=("bfloat16",))
class _GroupSummedInBfloat16(Fused):
    """dk and dv are summed over shared query heads in bfloat16."""

    def share_back(self, dx: Array, x: Array) -> Array:
        *lead, H, S, n = dx.shape
        K = x.shape[-3]
        parts = np.moveaxis(dx.reshape(*lead, K, H // max(K, 1), S, n), -3, 0)
        total = np.zeros(parts.shape[1:], dx.dtype)
        for part in parts:
            total = round_to(total + round_to(part, BFLOAT16), BFLOAT16)
        return total


# --- scores and weights ---------------------------------------------------------------------------


@of_fused("product-in-float16", source="NVIDIA/TensorRT-LLM#18044", dtypes=("float16",))
class _ProductInFloat16(Attention):
    """q kᵀ is stored in float16 before the scale and overflows at 65504."""

    def product(self, c: Inputs) -> Array:
        stored = round_to(super().product(c._replace(scale=1.0)), np.dtype(np.float16))
        return np.asarray(c.scale * stored)


change("scores-in-bfloat16", "precision",
       "The final scores are rounded to bfloat16 in a kernel declared as fused.",
       step="precision", where="everywhere", dtypes=("bfloat16",), rounding="fused",
       final=lambda up, x, visible, c: round_to(up(x, visible, c), c.dtype))  # fmt: skip
change("scale-in-bfloat16", "precision", "The scale is rounded to the dtype of q.",
       step="precision", where="everywhere", dtypes=("bfloat16",), rounding="fused",
       product=lambda up, c:
           up(c._replace(scale=float(round_to(np.array(c.scale), c.dtype)))))  # fmt: skip


@of_fused("exp-of-second-order", dtypes=("bfloat16",))
class _ExpOfSecondOrder(Online):
    """exp is a second-order polynomial between powers of 2, off by up to 2⁻⁷."""

    def exp(self, x: Array) -> Array:
        n = np.round(np.maximum(x / math.log(2), -150))
        f = np.maximum(x, -150 * math.log(2)) - n * math.log(2)
        return np.where(x == -np.inf, 0, np.ldexp(1 + f + f * f / 2, np.nan_to_num(n).astype(int)))


change("weights-in-float8", "precision",
       "The weights are rounded to float8 for the product with v in a kernel declared as fused.",
       step="precision", where="everywhere", of=Online, dtypes=("bfloat16",), rounding="fused",
       drop=lambda up, p, tile:
           round_to(p, np.dtype(ml_dtypes.float8_e4m3fn)) * tile.keep)  # fmt: skip
change("weights-truncated", "precision",
       "The weights are truncated to bfloat16 instead of rounded to nearest.",
       step="precision", where="everywhere", of=Online,
       dtypes=("bfloat16",), rounding="fused",
       drop=lambda up, p, tile: truncate(up(p, tile)))  # fmt: skip
change("dscores-truncated", "precision",
       "The gradient of the scores is truncated to bfloat16 instead of rounded to nearest.",
       step="precision", where="everywhere", dtypes=("bfloat16",), rounding="fused",
       jacobian=lambda up, p, dp, delta, c: truncate(up(p, dp, delta, c)))  # fmt: skip
change("out-truncated", "precision", "out is truncated to bfloat16 instead of rounded to nearest.",
       step="precision", where="everywhere", dtypes=("bfloat16",), rounding="fused",
       results=one_result(0, lambda o, c: truncate(o)))  # fmt: skip
change("out-gained", "precision",
       "out is too large by a factor of 1 + 2⁻⁶, as with an approximate reciprocal.",
       step="o", where="everywhere", dtypes=("bfloat16",), rounding="fused",
       results=one_result(0, lambda o, c: o * (1 + 2.0**-6)))  # fmt: skip


@mistake("softmax-in-float16", "precision", "pytorch/executorch#18407", step="nan",
         where="contents", dtypes=("float16",))  # fmt: skip
class _SoftmaxInFloat16(Attention):
    """exp is computed in float16 without subtracting the maximum and overflows at 11."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        e, e_sink = (np.exp(x.astype(np.float16)).astype(np.float64) for x in (s, c.sinks))
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return e / safe, e_sink / safe, np.log(total)


# --- between forward and backward -----------------------------------------------------------------


@of_fused("lse-saved-in-bfloat16", source="tenstorrent/tt-metal#41683",
          where="backward: everywhere", dtypes=("bfloat16",))  # fmt: skip
class _LseSavedInBfloat16(Online):
    """Backward rebuilds the weights from an lse that was saved in bfloat16."""

    def saved_state(self, c: Inputs) -> RunningSoftmax:
        state = super().saved_state(c)
        lse = round_to(self.row_lse(state, c), c.dtype)
        return RunningSoftmax(lse, np.isfinite(lse).astype(lse.dtype), self.divide(state))


# --- masks as numbers -----------------------------------------------------------------------------


@mistake("mask-overflows-float16", "precision", "ahrefs/ocannl#548", step="nan",
         where="rows that see no key", dtypes=("float16",))  # fmt: skip
class _MaskOverflowsFloat16(Attention):
    """−1e9 is added to hidden scores, which is −inf in float16: fully masked rows are NaN."""

    def hide(self, s: Array, visible: Array) -> Array:
        added = s + np.where(visible, 0, np.float64(-1e9)).astype(np.float16)
        return np.where((added == -np.inf).all(-1, keepdims=True), np.nan, added)


change("mask-is-least-float16", "precision",
       "−65504 is added to hidden scores: a fully masked row weighs all keys about equally.",
       "pytorch/pytorch#110213", step="p", where="rows that see no key", dtypes=("float16",),
       hide=lambda up, s, visible:
           round_to(s + np.where(visible, 0, -65504.0), np.dtype(np.float16)))  # fmt: skip


# --- float32 computed in less -----------------------------------------------------------------


def to_tf32(x: Array) -> Array:
    """Round x to tf32, whose fraction is 13 bits shorter than float32's: ties away from 0."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32).astype(x.dtype)


change("inputs-in-tf32", "precision",
       "q, k and v of float32 are rounded to tf32, as by tensor cores.",
       step="precision", where="everywhere", read=after(to_tf32))  # fmt: skip
change("inputs-in-bfloat16", "precision", "q, k and v of float32 are rounded to bfloat16.",
       step="precision", where="everywhere",
       read=after(lambda x: round_to(x, BFLOAT16)))  # fmt: skip
change("scores-in-tf32", "precision", "q kᵀ of float32 is rounded to tf32.",
       step="precision", where="everywhere", product=after(to_tf32))  # fmt: skip
change("weights-in-bfloat16", "precision", "The weights of float32 are rounded to bfloat16.",
       step="precision", where="everywhere",
       softmax=one_result(0, lambda p, s, c, live: round_to(p, BFLOAT16)))  # fmt: skip
change("lse-in-bfloat16", "precision", "lse of float32 inputs is rounded to bfloat16.",
       step="precision", where="everywhere", equivalent=True,
       lse=after(lambda x: round_to(x, BFLOAT16)))  # fmt: skip
