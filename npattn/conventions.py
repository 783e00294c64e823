"""What a system means where the field disagrees, as a translation around the engine.

A `Problem` under `Conventions` becomes a canonical one (docs/semantics.md), an engine computes it,
and what it gives is translated back. The engines know nothing of conventions.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from npattn.errors import OptionError
from npattn.problem import Array, Gradients, Problem, ScoreMod, sum_to

__all__ = ["PROFILES", "Conventions"]


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """One meaning for each word that systems use differently; the default is npattn's own.

    Parameters
    ----------
    causal : {"bottom_right", "top_left"}
        What ``causal=True`` means where T ≠ S; windows lie likewise.
    empty_row : {"zero", "nan", "mean"}
        What a query gives that sees nothing and has no sink. "mean": of all S values, with 1/S of
        its cotangent to each of them and nothing to q, k, bias. "nan": NaN; its gradients are
        undefined, and backward returns NaN wherever they would be added.
    hidden_fill : float, optional
        Scores that mask, causal and window hide become this number instead of leaving the softmax.
        They are constants: no gradient flows through them, but their weights reach out and dv.
        Overrides `empty_row`.
    mask_true : {"attend", "hide"}
        What True means in `mask`.
    window : {"beside", "total"}
        Whether left counts the keys beside the query, or the query too (then left ≥ 1).
    lse_base : {"e", "2"}
        The base of the logarithm lse.
    lse_empty : float, default −inf
        lse of a query that sees nothing and has no sink.
    """

    causal: Literal["bottom_right", "top_left"] = "bottom_right"
    empty_row: Literal["zero", "nan", "mean"] = "zero"
    hidden_fill: float | None = None
    mask_true: Literal["attend", "hide"] = "attend"
    window: Literal["beside", "total"] = "beside"
    lse_base: Literal["e", "2"] = "e"
    lse_empty: float = -math.inf

    def __post_init__(self) -> None:
        for name, legal in LEGAL.items():
            value = getattr(self, name)
            if value not in legal:
                raise OptionError(f"{name} is {value!r}, must be one of {legal}")
        for name in ("hidden_fill", "lse_empty"):
            value = getattr(self, name)
            if (value is not None or name == "lse_empty") and (
                isinstance(value, bool) or not isinstance(value, numbers.Real)
            ):
                raise OptionError(f"{name} is {value!r}, must be a number")
        if self.hidden_fill is not None and not math.isfinite(self.hidden_fill):
            raise OptionError(
                f"hidden_fill is {self.hidden_fill}, must be a finite number, or None for hidden "
                "keys to leave the softmax"
            )

    # --- problem in -------------------------------------------------------------------------------

    def canonical(self, problem: Problem) -> Problem:
        """The problem in npattn's own terms, with the same results up to `results`."""
        changes: dict[str, object] = {}
        if self.mask_true == "hide" and problem.mask is not None:
            changes["mask"] = ~problem.mask
        if self.window == "total" and problem.window is not None:
            left, right = problem.window
            if left == 0:
                raise OptionError(
                    "window is (0, ...), must have left ≥ 1 where it counts the query itself "
                    '(conventions window="total")'
                )
            changes["window"] = (None if left is None else left - 1, right)
        if changes:
            problem = problem.replace(**changes)
        if self.hidden_fill is not None and problem.visible is not None:
            problem = _filled(problem, self.hidden_fill)
        return problem

    # --- results back -----------------------------------------------------------------------------

    def results(self, problem: Problem, out: Array, lse: Array) -> tuple[Array, Array]:
        """out and lse of the canonical problem, in the terms of these conventions."""
        empty = self._empty(lse)
        if self.lse_base == "2":
            lse = lse / math.log(2)
        if not empty.any():
            return out, lse
        lse = np.where(empty, self.lse_empty, lse)
        if self.empty_row == "nan":
            out = np.where(empty[..., None], np.nan, out)
        if self.empty_row == "mean":
            out = np.where(empty[..., None], _mean_of_values(problem), out)
        return out, lse

    def weights(self, problem: Problem, weights: Array, lse: Array) -> Array:
        """The weights of the canonical problem, in the terms of these conventions."""
        if weights.shape[-1] != problem.S:  # doubled by _filled
            weights = weights[..., : problem.S] + weights[..., problem.S :]
        empty = self._empty(lse)[..., None]
        if self.empty_row == "zero" or not empty.any():
            return weights
        fill = np.nan if self.empty_row == "nan" else 1 / max(problem.S, 1)
        return np.where(empty, fill, weights)

    def cotangents(
        self, problem: Problem, dout: Array, dlse: Array | None, dweights: Array | None
    ) -> tuple[Array, Array | None, Array | None]:
        """Cotangents of what `results` and `weights` gave, as those of the canonical problem."""
        if dlse is not None and self.lse_base == "2":
            dlse = dlse / math.log(2)
        if dweights is not None and self._fills(problem):
            dweights = np.concatenate([dweights, dweights], axis=-1)
        return dout, dlse, dweights

    def gradients(self, problem: Problem, grads: Gradients, dout: Array, lse: Array) -> Gradients:
        """Gradients of the canonical problem, in the terms of these conventions."""
        if self._fills(problem):
            S, bias = problem.S, grads.bias
            if bias is not None:
                bias = None if problem.bias is None else sum_to(bias[..., :S], problem.bias.shape)
            grads = replace(
                grads, k=grads.k[..., :S, :], v=grads.v[..., :S, :] + grads.v[..., S:, :], bias=bias
            )
        empty = self._empty(lse)
        if self.empty_row == "mean" and empty.any():
            grads = replace(
                grads, v=grads.v + _dv_of_mean(problem, np.where(empty[..., None], dout, 0))
            )
        if self.empty_row == "nan" and empty.any():
            grads = _with_nan(problem, grads, empty)
        return grads

    def _fills(self, problem: Problem) -> bool:
        options = (problem.mask, problem.window, problem.causal or None)
        return self.hidden_fill is not None and any(o is not None for o in options)

    def _empty(self, lse: Array) -> Array:
        """Rows that see nothing and have no sink: exactly those have a canonical lse of −inf."""
        return np.asarray(lse.real == -np.inf)


LEGAL = {
    "causal": ("bottom_right", "top_left"),
    "empty_row": ("zero", "nan", "mean"),
    "mask_true": ("attend", "hide"),
    "window": ("beside", "total"),
    "lse_base": ("e", "2"),
}

PROFILES = {
    "npattn": Conventions(),
    # torch 2.13: functional.scaled_dot_product_attention; is_causal is top-left, empty rows give 0.
    "torch.sdpa": Conventions(causal="top_left", empty_row="zero"),
}
"""The conventions of known systems, by name."""


def _filled(problem: Problem, fill: float) -> Problem:
    """A canonical problem whose hidden scores are `fill`.

    Every key gets a twin that is visible exactly where it is hidden. The twin's key is 0, so that
    its score is its bias, `fill`, which no gradient passes; its value is the key's own.
    """
    visible, S = problem.visible, problem.S
    assert visible is not None
    whole = (*visible.shape[:-1], S)
    visible = np.broadcast_to(visible, whole)
    real = np.zeros((1, 1)) if problem.bias is None else problem.bias.astype(problem.dtype)
    real = np.broadcast_to(real, (*real.shape[:-1], S))
    twin = np.full_like(real, fill)
    mod = problem.score_mod
    if mod is not None or not np.isfinite(problem.q).all():  # a twin's score is not 0 · NaN
        mod = _on_real_keys(mod, S)
    keep = problem.dropout_mask
    if keep is not None:
        keep = np.broadcast_to(keep, (*keep.shape[:-1], S))
        keep = np.concatenate([keep, keep], axis=-1)
    return problem.replace(
        k=np.concatenate([problem.k, np.zeros_like(problem.k)], axis=-2),
        v=np.concatenate([problem.v, problem.v], axis=-2),
        mask=np.concatenate([visible, ~visible], axis=-1),
        bias=np.concatenate([real, twin], axis=-1),
        dropout_mask=keep,
        score_mod=mod,
        causal=False,
        window=None,
    )


def _on_real_keys(mod: ScoreMod | None, S: int) -> ScoreMod:
    def modified(s: Array, b: Array, h: Array, t: Array, s_index: Array) -> Array:
        # A twin's index is clipped: mod may look up a table of S entries with it.
        real = s if mod is None else mod(s, b, h, t, np.minimum(s_index, S - 1))
        return np.where(s_index < S, real, 0)

    return modified


def _with_nan(problem: Problem, grads: Gradients, empty: Array) -> Gradients:
    """NaN wherever a row that is NaN would add to a gradient."""
    rows = np.where(empty, np.nan, 0.0)  # (..., H, T)
    rows = rows[None] if problem.headless else rows
    keys = np.broadcast_to(rows.sum(-1)[..., None, None], (*rows.shape[:-1], problem.S, 1))
    if problem.K != problem.H:
        G = problem.H // problem.K
        keys = keys.reshape(*keys.shape[:-3], problem.K, G, problem.S, 1).sum(-3)
    bias = grads.bias
    if problem.bias is not None and bias is not None:
        whole = np.broadcast_to(rows[..., None], (*rows.shape, problem.S))
        bias = bias + sum_to(whole, problem.bias.shape)
    return replace(
        grads,
        q=grads.q + sum_to(rows[..., None], (*problem.q.shape[:-1], 1)),
        k=grads.k + sum_to(keys, (*problem.k.shape[:-1], 1)),
        v=grads.v + sum_to(keys, (*problem.v.shape[:-1], 1)),
        bias=bias,
    )


def _mean_of_values(problem: Problem) -> Array:
    """The mean of all S values for each query head: (..., H, 1, E), 0 where S = 0."""
    v = problem.v.astype(problem.dtype)
    mean = v.sum(-2, keepdims=True) / max(problem.S, 1)
    if problem.headless or problem.H == problem.K:
        return np.asarray(mean)
    return np.repeat(mean, problem.H // problem.K, axis=-3)


def _dv_of_mean(problem: Problem, dout: Array) -> Array:
    """The gradient of `_mean_of_values`: 1/S of the cotangents of a head's rows to each value."""
    dmean = dout.sum(-2, keepdims=True) / max(problem.S, 1)  # (..., H, 1, E)
    if not problem.headless and problem.H != problem.K:
        G = problem.H // problem.K
        dmean = dmean.reshape(*dmean.shape[:-3], problem.K, G, *dmean.shape[-2:]).sum(-3)
    dmean = np.broadcast_to(dmean, (*dmean.shape[:-2], problem.S, dmean.shape[-1]))
    return sum_to(dmean, problem.v.shape)
