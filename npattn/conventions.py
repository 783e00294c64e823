"""Conventions of other systems, as a translation around the engine.

A `Problem` under `Conventions` becomes a canonical one (docs/semantics.md), an engine computes it,
and its results are translated back. The engines know nothing of conventions.
Each translation, with its gradient: docs/derivations/conventions.md.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from npattn import dense
from npattn.arrays import Array, sum_to
from npattn.errors import OptionError
from npattn.options import ScoreMod
from npattn.problem import Gradients, Problem

__all__ = ["Conventions"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """One meaning for each word that systems use differently; the default is npattn's own.

    A row is empty if its query sees no key and has no sink.

    Parameters
    ----------
    causal : {"bottom_right", "top_left"}
        Alignment of ``causal=True`` where T ≠ S, and of windows.
    empty_row : {"zero", "nan", "mean"}
        Result of an empty row. "mean": the mean of all S values, with 1/S of its cotangent to each
        of them and nothing to q, k, bias. "nan": NaN; its gradients are undefined, and backward
        returns NaN wherever they would be added.
    hidden_fill : float, optional
        Scores that mask, causal and window hide become this number instead of leaving the softmax.
        They are constants: no gradient flows through them, but their weights reach out and dv.
        Overrides `empty_row`.
    mask_true : {"attend", "hide"}
        Meaning of True in `mask`.
    window : {"exclusive", "inclusive"}
        "exclusive": left counts the keys beside the query. "inclusive": left counts the query too,
        so that left ≥ 1.
    softcap : {"before_bias", "after_bias", "after_mask"}
        Scores that are capped. "before_bias": scale · q·k, before score_mod and bias. "after_bias":
        the score with both, so that a bias of −inf comes back as −softcap. "after_mask": hidden
        scores too, −inf or `hidden_fill`, so that hidden keys take weight. Sinks are never capped.
    bias : {"after_scale", "before_scale"}
        Add the bias as it is, or multiplied by scale as in scale · (q·k + bias). `softcap` says on
        which side of the cap.
    kv_head : {"repeat", "tile"}
        Query head h uses key/value head h // (H / K), or h % K.
    lse_base : {"e", "2"}
        Base of the logarithm in lse.
    lse_empty : float, default −inf
        lse of an empty row.
    weights : {"before_dropout", "after_dropout"}
        Return the softmax, or the factors of the values.

    Raises
    ------
    OptionError
        If a field has another value.
    """

    causal: Literal["bottom_right", "top_left"] = "bottom_right"
    empty_row: Literal["zero", "nan", "mean"] = "zero"
    hidden_fill: float | None = None
    mask_true: Literal["attend", "hide"] = "attend"
    window: Literal["exclusive", "inclusive"] = "exclusive"
    softcap: Literal["before_bias", "after_bias", "after_mask"] = "before_bias"
    bias: Literal["after_scale", "before_scale"] = "after_scale"
    kv_head: Literal["repeat", "tile"] = "repeat"
    lse_base: Literal["e", "2"] = "e"
    lse_empty: float = -math.inf
    weights: Literal["before_dropout", "after_dropout"] = "before_dropout"

    def __post_init__(self) -> None:
        for name, legal in LEGAL.items():
            value = getattr(self, name)
            if value not in legal:
                renamed = RENAMED.get((name, str(value)))
                cure = f"which was renamed to {renamed!r}" if renamed else f"must be one of {legal}"
                raise OptionError(f"{name} is {value!r}, {cure}")
        for name in ("hidden_fill", "lse_empty"):
            value = getattr(self, name)
            if (value is not None or name == "lse_empty") and (
                isinstance(value, bool) or not isinstance(value, numbers.Real)
            ):
                raise OptionError(f"{name} is {value!r}, must be a number")
        if self.hidden_fill is not None and not math.isfinite(self.hidden_fill):
            raise OptionError(
                f"hidden_fill is {self.hidden_fill}, must be a finite number; with None, hidden "
                "keys leave the softmax"
            )

    # --- problem in -------------------------------------------------------------------------------

    def canonical(self, problem: Problem) -> Problem:
        """Translate a problem into npattn's own terms; `results` translates its results back."""
        fill = self.fill(problem)
        problem = self._translate_options(problem)
        if self._caps_late(problem):
            problem = _cap_late(problem)
        return problem if fill is None else _fill_hidden(problem, fill)

    def fill(self, problem: Problem) -> float | None:
        """Return the number that hidden scores become; None if they leave, or nothing is hidden."""
        if problem.mask is None and problem.window is None and not problem.causal:
            return None
        cap = problem.softcap
        if self.softcap != "after_mask" or cap is None:
            return self.hidden_fill
        return -cap if self.hidden_fill is None else cap * math.tanh(self.hidden_fill / cap)

    def _translate_options(self, problem: Problem) -> Problem:
        """Translate mask, window, heads and bias."""
        changes: dict[str, object] = {}
        if self.mask_true == "hide" and problem.mask is not None:
            changes["mask"] = ~problem.mask
        if self.window == "inclusive" and problem.window is not None:
            left, right = problem.window
            if left == 0:
                raise OptionError(
                    f"window is {(0, right)}, must have left ≥ 1: it includes the query "
                    '(conventions window="inclusive")'
                )
            changes["window"] = (None if left is None else left - 1, right)
        if self.kv_head == "tile" and problem.K != problem.H:
            changes |= {name: self._share_heads(getattr(problem, name), problem) for name in "kv"}
        if self.bias == "before_scale" and problem.bias is not None:
            bias = problem.bias_array
            assert bias is not None
            changes["bias"] = _times(problem.to_compute_dtype(bias), _scale(problem))
        return problem.replace(**changes) if changes else problem

    def _caps_late(self, problem: Problem) -> bool:
        """Return True if score_mod or bias comes before the cap of these conventions."""
        between = problem.bias is not None or problem.score_mod is not None
        return self.softcap != "before_bias" and problem.softcap is not None and between

    # --- results back -----------------------------------------------------------------------------

    def results(self, problem: Problem, out: Array, lse: Array) -> tuple[Array, Array]:
        """Translate out and lse of the canonical problem back."""
        xp, empty = problem.xp, _empty(lse)
        if self.lse_base == "2":
            lse = _times(lse, 1 / math.log(2))
        if not empty.any():
            return out, lse
        lse = xp.where(empty, self.lse_empty, lse)
        if self.empty_row == "nan":
            out = xp.where(empty[..., None], math.nan, out)
        if self.empty_row == "mean":
            out = xp.where(empty[..., None], self._mean_of_values(problem), out)
        return out, lse

    def returned_weights(self, problem: Problem, weights: Array, lse: Array) -> Array:
        """Translate the weights of the canonical problem back."""
        if weights.shape[-1] != problem.S:  # doubled by _fill_hidden
            weights = weights[..., : problem.S] + weights[..., problem.S :]
        weights = self._apply_dropout(problem, weights)
        empty = _empty(lse)[..., None]
        if self.empty_row == "zero" or not empty.any():
            return weights
        fill = math.nan if self.empty_row == "nan" else 1 / max(problem.S, 1)
        filled: Array = problem.xp.where(empty, fill, weights)
        return filled

    def cotangents(
        self, problem: Problem, dout: Array, dlse: Array | None, dweights: Array | None
    ) -> tuple[Array, Array | None, Array | None]:
        """Translate cotangents into those of the canonical problem's results."""
        if dlse is not None and self.lse_base == "2":
            dlse = dlse / math.log(2)
        if dweights is not None:
            dweights = self._apply_dropout(problem, dweights)
            if self.fill(problem) is not None:
                dweights = problem.xp.concatenate([dweights, dweights], axis=-1)
        return dout, dlse, dweights

    def gradients(
        self,
        problem: Problem,
        grads: Gradients,
        dout: Array,
        lse: Array,
        bias_gradient: Callable[[Any, Any], Any] = Problem.bias_gradient,
    ) -> Gradients:
        """Translate gradients of the canonical problem back.

        `bias_gradient` sums the gradient of the scores to that of the bias.
        """
        xp, S, q, k, v = problem.xp, problem.S, grads.q, grads.k, grads.v
        if self.fill(problem) is not None:
            k, v = k[..., :S, :], v[..., :S, :] + v[..., S:, :]
            # Beside twins alone dq is 0, but a NaN, times a twin's key of 0, would be NaN.
            q = xp.where(self._sees_a_key(problem), q, 0)
        if self.kv_head == "tile":
            k = self._sum_shared_heads(k, problem, problem.k.shape)
            v = self._sum_shared_heads(v, problem, problem.v.shape)
        bias = None if grads.bias is None else self._dbias(problem, grads.bias, bias_gradient)
        grads = replace(grads, q=q, k=k, v=v, bias=bias)
        empty = _empty(lse)
        if self.empty_row == "mean" and empty.any():
            dv = self._dv_of_mean(problem, xp.where(empty[..., None], dout, 0))
            grads = replace(grads, v=grads.v + dv)
        if self.empty_row == "nan" and empty.any():
            grads = self._with_nan(problem, grads, empty, bias_gradient)
        return grads

    # --- the parts --------------------------------------------------------------------------------

    def _share_heads(self, x: Array, problem: Problem) -> Array:
        """Index the key/value head of each query head: (..., K, S, n) → (..., H, S, n)."""
        if problem.K == problem.H:
            return x
        h = problem.xp.arange(problem.H)
        used = h % problem.K if self.kv_head == "tile" else h // (problem.H // problem.K)
        shared: Array = x[..., used, :, :]
        return shared

    def _sum_shared_heads(self, dx: Array, problem: Problem, shape: tuple[int, ...]) -> Array:
        """Gradient of `_share_heads`: sum over the query heads that use a key/value head."""
        if problem.K != problem.H:
            K, G = problem.K, problem.H // problem.K
            heads, axis = ((G, K), -4) if self.kv_head == "tile" else ((K, G), -3)
            dx = dx.reshape(*dx.shape[:-3], *heads, *dx.shape[-2:]).sum(axis)
        return sum_to(dx, shape)

    def _sees_a_key(self, problem: Problem) -> Array:
        """Return True where a query sees a key, shaped as q with a last axis of 1."""
        visible = self._translate_options(problem).visible
        assert visible is not None
        any_key = problem.xp.broadcast_to(
            visible.any(-1, keepdims=True), (*problem.lead, problem.H, problem.T, 1)
        )
        seen: Array = sum_to(any_key, (*problem.q.shape[:-1], 1)) > 0
        return seen

    def _apply_dropout(self, problem: Problem, weights: Array) -> Array:
        """Multiply by keep / (1 − rate) if the weights returned are those after dropout."""
        if self.weights == "before_dropout" or problem.dropout_mask is None:
            return weights
        keep = problem.to_compute_dtype(problem.dropout_mask) / (1 - problem.dropout_rate)
        return weights * (keep[0] if keep.ndim > weights.ndim else keep)  # rank 2 has no heads

    def _dbias(self, problem: Problem, dbias: Any, bias_gradient: Callable[[Any, Any], Any]) -> Any:
        """Gradient of the bias, from that of the canonical one."""
        if problem.bias is None:  # the canonical one comes from _fill_hidden
            return None
        late, before = self._caps_late(problem), self.bias == "before_scale"
        if not late and not before and self.fill(problem) is None:
            return dbias  # the canonical one is the same
        dbias = dbias[..., : problem.S]
        if late:
            dbias = _through_cap(self._translate_options(problem), dbias)
        if before:
            with np.errstate(invalid="ignore"):  # a bound of inf, times a scale of 0
                dbias = dbias * _scale(problem)
        return bias_gradient(problem, dbias)

    def _mean_of_values(self, problem: Problem) -> Array:
        """Mean of all S values for each query head: (..., H, 1, E), 0 where S = 0."""
        v = problem.to_compute_dtype(problem.v)
        return self._share_heads(v.sum(-2, keepdims=True) / max(problem.S, 1), problem)

    def _dv_of_mean(self, problem: Problem, dout: Array) -> Array:
        """Gradient of `_mean_of_values`: 1/S of the cotangents of a head's rows to each value."""
        dmean = dout.sum(-2, keepdims=True) / max(problem.S, 1)  # (..., H, 1, E)
        dmean = problem.xp.broadcast_to(dmean, (*dmean.shape[:-2], problem.S, dmean.shape[-1]))
        return self._sum_shared_heads(dmean, problem, problem.v.shape)

    def _with_nan(
        self,
        problem: Problem,
        grads: Gradients,
        empty: Array,
        bias_gradient: Callable[[Any, Any], Any],
    ) -> Gradients:
        """Put NaN wherever a row that is NaN would add to a gradient."""
        xp = problem.xp
        rows = xp.where(empty, math.nan, 0.0)  # (..., H, T)
        rows = rows[None] if problem.headless else rows
        keys = xp.broadcast_to(rows.sum(-1)[..., None, None], (*rows.shape[:-1], problem.S, 1))
        bias = grads.bias
        if problem.bias is not None and bias is not None:
            whole = xp.broadcast_to(rows[..., None], (*rows.shape, problem.S))
            bias = _plus(bias, bias_gradient(problem, whole))
        return replace(
            grads,
            q=grads.q + sum_to(rows[..., None], (*problem.q.shape[:-1], 1)),
            k=grads.k + self._sum_shared_heads(keys, problem, (*problem.k.shape[:-1], 1)),
            v=grads.v + self._sum_shared_heads(keys, problem, (*problem.v.shape[:-1], 1)),
            bias=bias,
        )


LEGAL = {
    "causal": ("bottom_right", "top_left"),
    "empty_row": ("zero", "nan", "mean"),
    "mask_true": ("attend", "hide"),
    "window": ("exclusive", "inclusive"),
    "softcap": ("before_bias", "after_bias", "after_mask"),
    "bias": ("after_scale", "before_scale"),
    "kv_head": ("repeat", "tile"),
    "lse_base": ("e", "2"),
    "weights": ("before_dropout", "after_dropout"),
}

RENAMED = {("window", "beside"): "exclusive", ("window", "total"): "inclusive"}
"""(field, former value) → its name now."""


def check_conventions(conventions: Any) -> Conventions | None:
    """Check that `conventions` is a `Conventions` or None, and return it."""
    if conventions is None or isinstance(conventions, Conventions):
        return conventions
    raise OptionError(
        f"conventions is {conventions!r}, must be a Conventions, "
        'such as npattn.profiles.PROFILES["torch.sdpa"].conventions'
    )


def _fill_hidden(problem: Problem, fill: float) -> Problem:
    """Make a canonical problem whose hidden scores are `fill`.

    Every key gets a twin that is visible exactly where it is hidden. The twin's key is 0, so that
    its score is its bias, `fill`, which no gradient passes; its value is the key's own.
    """
    xp, visible, S = problem.xp, problem.visible, problem.S
    assert visible is not None
    visible = xp.broadcast_to(visible, (*visible.shape[:-1], S))
    bias = problem.bias_array
    real = problem.to_compute_dtype(xp.zeros((1, 1)) if bias is None else bias)
    real = xp.broadcast_to(real, (*real.shape[:-1], S))
    twin = xp.full_like(real, fill)
    mod = problem.score_mod
    if mod is not None or not xp.isfinite(problem.q).all():  # a twin's score is not 0 · NaN
        mod = _on_real_keys(problem, mod)
    keep = problem.dropout_mask
    if keep is not None:
        keep = xp.broadcast_to(keep, (*keep.shape[:-1], S))
        keep = xp.concatenate([keep, keep], axis=-1)
    return problem.replace(
        k=xp.concatenate([problem.k, xp.zeros_like(problem.k)], axis=-2),
        v=xp.concatenate([problem.v, problem.v], axis=-2),
        mask=xp.concatenate([visible, ~visible], axis=-1),
        bias=xp.concatenate([real, twin], axis=-1),
        dropout_mask=keep,
        score_mod=mod,
        causal=False,
        window=None,
    )


def _on_real_keys(problem: Problem, mod: ScoreMod | None) -> ScoreMod:
    xp, S = problem.xp, problem.S

    def modify(s: Array, b: Array, h: Array, t: Array, s_index: Array) -> Array:
        # A twin's index is clipped: mod may look up a table of S entries with it.
        real = s if mod is None else mod(s, b, h, t, xp.minimum(s_index, S - 1))
        kept: Array = xp.where(s_index < S, real, 0)
        return kept

    return modify


def _cap_late(problem: Problem) -> Problem:
    """Make a canonical problem that caps the score with its bias: score_mod does all three.

    A bias of 0 stays, in full shape: its gradient is that of each final score.
    """
    xp, cap = problem.xp, _cap(problem)
    whole = (*problem.lead, problem.H, problem.T, problem.S)
    return problem.replace(
        score_mod=_after_bias(problem, lambda y: cap * xp.tanh(y / cap)),
        softcap=None,
        bias=None if problem.bias is None else xp.zeros(whole, dtype=problem.dtype),
    )


@np.errstate(all="ignore")  # hidden scores may be anything
def _through_cap(problem: Problem, ds: Array) -> Array:
    """Gradient of the bias from that of the final scores: ds · (1 − tanh²)."""
    xp, cap = problem.xp, _cap(problem)
    textbook = getattr(problem, "textbook", dense)
    q, k, _ = textbook.operands(problem)
    x = _scale(problem) * (q @ k.swapaxes(-1, -2))  # the input of score_mod
    rate = problem.replace(score_mod=_after_bias(problem, lambda y: 1 - xp.tanh(y / cap) ** 2))
    slope = textbook.call_score_mod(rate, x)
    capped: Array = xp.where(ds == 0, 0, ds * slope)  # a hidden score may be NaN, its slope too
    return capped


def _after_bias(problem: Problem, function: Callable[[Array], Array]) -> ScoreMod:
    """Make the score_mod function(score_mod(s) + bias)."""
    xp, mod, bias = problem.xp, problem.score_mod, problem.bias_array
    bias = None if bias is None else problem.to_compute_dtype(bias)

    def modify(s: Array, b: Array, h: Array, t: Array, s_index: Array) -> Array:
        s = s if mod is None else mod(s, b, h, t, s_index)
        if bias is not None:
            lead = xp.unravel_index(b, problem.lead) if problem.lead else ()
            at = (*lead, h, t, s_index)[-bias.ndim :]
            s = s + bias[tuple(xp.minimum(i, n - 1) for i, n in zip(at, bias.shape, strict=True))]
        return function(s)

    return modify


def _times(x: Array, number: float) -> Array:
    """Multiply x by a number, complex x part by part: (−∞ + 0j) · number has a NaN."""
    with np.errstate(invalid="ignore", over="ignore"):  # −∞ · 0
        if getattr(x.dtype, "kind", "f") != "c":  # tensors are real
            return x * number
        scaled = np.empty_like(x)
        scaled.real, scaled.imag = x.real * number, x.imag * number
        return scaled


def _plus(x: Any, y: Any) -> Any:
    """Add x and y, term by term where a bias is a sum."""
    return tuple(map(_plus, x, y)) if isinstance(x, tuple) else x + y


def _scale(problem: Problem) -> float:
    assert problem.scale is not None  # Problem has put the default there  [1]
    return problem.scale


def _cap(problem: Problem) -> float:
    assert problem.softcap is not None
    return problem.softcap


def _empty(lse: Array) -> Array:
    """Mask of the empty rows: exactly those have a canonical lse of −inf."""
    empty: Array = lse.real == -math.inf
    return empty
