"""The fields of `Conventions`, and the translation of problems and results by each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from npattn.conventions.cap import cap_late, scale_of, through_cap
from npattn.conventions.checks import check_fields
from npattn.conventions.hidden import add_to_hidden, fill_hidden
from npattn.errors import OptionError
from npattn.problem import Gradients, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.problem.foreign import reject_unknown_options
from npattn.problem.options import Alignment


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """One meaning for each word that systems use differently; the default is npattn's own.

    A row is empty if its query sees no key and has no sink. Its result is 0 where S = 0, under any
    convention: an empty sum.

    Parameters
    ----------
    causal : {"bottom_right", "top_left", "unless_masked"}
        Alignment of ``causal=True`` where T ≠ S, and of windows. "unless_masked": top-left, and a
        mask replaces causal: with one, later keys are visible where the mask shows them.
    empty_row : {"zero", "nan", "mean"}
        Result of an empty row. "mean": the mean of all S values, with 1/S of its cotangent to each
        of them and nothing to q, k, bias. "nan": NaN; it adds nothing to the gradients of others,
        and backward returns NaN for its own, which are undefined.
    empty_row_bias : {"zero", "nan", "mean"}, optional
        Result of a row that sees keys, all with a score of −inf. Default: `empty_row`.
    hidden_fill : float or "min", optional
        Scores that mask, causal and window hide become this number instead of leaving the softmax.
        They are constants: no gradient flows through them, but their weights reach out and dv.
        Overrides `empty_row`. "min" is the smallest finite number of the dtype of q.
    hidden_add : float or "min", optional
        Scores that mask, causal and window hide have this number added instead of leaving the
        softmax; gradients flow through them. Overrides `empty_row`, excludes `hidden_fill`.
    mask_true : {"attend", "hide"}
        Meaning of True in `mask`.
    window : {"exclusive", "inclusive"}
        "exclusive": left counts the keys beside the query. "inclusive": left counts the query too,
        so that left ≥ 1.
    softcap : {"before_bias", "after_bias", "after_mask"}
        Scores that are capped. "before_bias": scale · q·k, before score_mod and bias. "after_bias":
        the score with both, so that a bias of −inf comes back as −softcap. "after_mask": hidden
        scores too, −inf, `hidden_fill` or with `hidden_add`, so that hidden keys take weight. Sinks
        are never capped.
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
    dropout_at_rate_0 : {"drop", "ignore"}
        A dropout mask beside a rate of 0 drops without rescaling, or does nothing.

    Raises
    ------
    OptionError
        If a field has another value, or both `hidden_fill` and `hidden_add` are given.
    """

    causal: Literal["bottom_right", "top_left", "unless_masked"] = "bottom_right"
    empty_row: Literal["zero", "nan", "mean"] = "zero"
    empty_row_bias: Literal["zero", "nan", "mean"] | None = None
    hidden_fill: float | Literal["min"] | None = None
    hidden_add: float | Literal["min"] | None = None
    mask_true: Literal["attend", "hide"] = "attend"
    window: Literal["exclusive", "inclusive"] = "exclusive"
    softcap: Literal["before_bias", "after_bias", "after_mask"] = "before_bias"
    bias: Literal["after_scale", "before_scale"] = "after_scale"
    kv_head: Literal["repeat", "tile"] = "repeat"
    lse_base: Literal["e", "2"] = "e"
    lse_empty: float = -math.inf
    weights: Literal["before_dropout", "after_dropout"] = "before_dropout"
    dropout_at_rate_0: Literal["drop", "ignore"] = "drop"

    def __post_init__(self) -> None:
        check_fields(self)

    # --- problem in -------------------------------------------------------------------------------

    @property
    def alignment(self) -> Alignment:
        """Alignment of causal and of windows, for `Problem`."""
        return "bottom_right" if self.causal == "bottom_right" else "top_left"

    @property
    def attends_hidden(self) -> bool:
        """True if hidden keys stay in the softmax, whatever the softcap."""
        return self.hidden_fill is not None or self.hidden_add is not None

    @property
    def empty_results(self) -> frozenset[str]:
        """Results of empty rows, by a mask or by a bias."""
        return frozenset({self.empty_row, self.empty_row_bias or self.empty_row})

    def canonical(self, problem: Problem) -> Problem:
        """Translate a problem into npattn's own terms; `results` translates its results back."""
        fill, more = self.fill(problem), self.addend(problem)
        problem = self.before_cap(problem)
        problem = cap_late(problem) if self.caps_late(problem) else problem
        if more is not None and self.softcap != "after_mask":
            problem = add_to_hidden(problem, more)
        return problem if fill is None else fill_hidden(problem, fill)

    def fill(self, problem: Problem) -> float | None:
        """Return the number that hidden scores become; None if they do not, or none is hidden."""
        if not _hides(problem) or self.hidden_add is not None:
            return None
        cap, fill = problem.softcap, _number(self.hidden_fill, problem)
        if self.softcap != "after_mask" or cap is None:
            return fill
        return -cap if fill is None else cap * math.tanh(fill / cap)

    def addend(self, problem: Problem) -> float | None:
        """Return the number that hidden scores have added; None if they do not, or none is hidden.

        With a cap "after_mask" it is added before the cap.
        """
        return _number(self.hidden_add, problem) if _hides(problem) else None

    def absorbs_scores(self, problem: Problem) -> bool:
        """Return True if float64 rounds away the scores of a row beside the number added to them.

        The row sees no key, and the number is so large, 2⁵² or more, that it has no fraction.
        """
        more = self.addend(problem)
        if more is None or abs(more) < 1 / np.finfo(np.float64).eps or problem.S == 0:
            return False
        return not self._sees_a_key(problem).all()

    def hidden_positions(self, problem: Problem) -> Array:
        """Return the positions that mask, causal and window hide; shaped as they are."""
        visible = self.translate_options(problem).visible
        assert visible is not None
        return ~visible

    def translate_options(self, problem: Problem) -> Problem:
        """Translate mask, window, heads, bias and dropout."""
        changes: dict[str, object] = {}
        replaces = self.causal == "unless_masked" and problem.alignment == "top_left"
        if replaces and problem.mask is not None:
            changes["causal"] = False
        if self.mask_true == "hide" and problem.mask is not None:
            changes["mask"] = ~problem.mask
        if self.window == "inclusive" and problem.window is not None:
            left_keys, right_keys = problem.window
            if left_keys == 0:
                raise OptionError(
                    f"window is {(0, right_keys)}, must have left ≥ 1: it includes the query "
                    '(conventions window="inclusive")'
                )
            changes["window"] = (None if left_keys is None else left_keys - 1, right_keys)
        if self.kv_head == "tile" and problem.K != problem.H:
            changes |= {name: self.share_heads(getattr(problem, name), problem) for name in "kv"}
        if self.bias == "before_scale" and problem.bias is not None:
            bias = problem.bias_array
            assert bias is not None
            changes["bias"] = _times(problem.to_compute_dtype(bias), scale_of(problem))
        if not self._drops(problem):
            changes["dropout_mask"] = None
        return problem.replace(**changes) if changes else problem

    def _drops(self, problem: Problem) -> bool:
        """Return True unless a dropout mask does nothing for want of a rate."""
        return self.dropout_at_rate_0 == "drop" or problem.dropout_rate > 0

    def caps_late(self, problem: Problem) -> bool:
        """Return True if score_mod or bias comes before the cap of these conventions."""
        between = problem.bias is not None or problem.score_mod is not None
        return self.softcap != "before_bias" and problem.softcap is not None and between

    def before_cap(self, problem: Problem) -> Problem:
        """Return the problem whose scores, with the bias, a late cap takes."""
        more, problem = self.addend(problem), self.translate_options(problem)
        if more is None or self.softcap != "after_mask":
            return problem
        return add_to_hidden(problem, more)

    def keeps_bias(self, problem: Problem) -> bool:
        """Return True if the canonical bias is that of the problem."""
        changes = self.bias == "before_scale" or self.caps_late(problem)
        return not changes and self.addend(problem) is None and self.fill(problem) is None

    # --- results back -----------------------------------------------------------------------------

    def results(self, problem: Problem, out: Array, lse: Array) -> tuple[Array, Array]:
        """Translate out, (..., H, T, E), and lse, (..., H, T), of the canonical problem back."""
        xp, empty = problem.xp, _empty(lse)
        if self.lse_base == "2":
            lse = _times(lse, 1 / math.log(2))
        if not empty.any():
            return out, lse
        lse = xp.where(empty, self.lse_empty, lse)
        undefined, mean = self.empty_rows(problem, empty)
        if undefined is not None:
            out = xp.where(undefined[..., None], math.nan, out)
        if mean is not None:
            out = xp.where(mean[..., None], self.mean_of_values(problem, problem.v), out)
        return out, lse

    def empty_rows(self, problem: Problem, empty: Array) -> tuple[Array | None, Array | None]:
        """Return which empty rows, (..., H, T), are NaN, and which the mean; None for no row."""
        masked, by_bias = self.empty_row, self.empty_row_bias or self.empty_row
        if problem.S == 0:
            return None, None
        if masked == by_bias:
            rows = {masked: empty}
        else:
            sees = self._sees_a_key(problem)
            sees = sees[0] if problem.headless and empty.ndim == 1 else sees
            # With a number added, a mask alone empties no row.
            sees = sees | (self.hidden_add is not None)
            rows = {masked: empty & ~sees, by_bias: empty & sees}
        found = (rows.get("nan"), rows.get("mean"))
        undefined, mean = (x if x is not None and x.any() else None for x in found)
        return undefined, mean

    def undefined_rows(self, problem: Problem, lse: Array) -> Array | None:
        """Return which rows are NaN by convention, from the canonical lse; None if no row is."""
        return self.empty_rows(problem, _empty(lse))[0]

    def returned_weights(self, problem: Problem, weights: Array, lse: Array) -> Array:
        """Translate the weights of the canonical problem back."""
        if weights.shape[-1] != problem.S:  # doubled by fill_hidden
            weights = weights[..., : problem.S] + weights[..., problem.S :]
        weights = self._apply_dropout(problem, weights)
        undefined, mean = self.empty_rows(problem, _empty(lse))
        for rows, value in ((undefined, math.nan), (mean, 1 / max(problem.S, 1))):
            if rows is not None:
                weights = problem.xp.where(rows[..., None], value, weights)
        return weights

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
        self, problem: Problem, grads: Gradients, dout: Array, lse: Array,
        bias_gradient: Callable[[Any, Any], Any] = Problem.bias_gradient,
    ) -> Gradients:  # fmt: skip
        """Translate gradients of the canonical problem back.

        dout is (..., H, T, E), lse (..., H, T). `bias_gradient` sums the gradient of the scores to
        that of the bias.
        """
        xp, S, q, k, v = problem.xp, problem.S, grads.q, grads.k, grads.v
        if self.fill(problem) is not None:
            k, v = k[..., :S, :], v[..., :S, :] + v[..., S:, :]
            # Beside twins alone dq is 0, but a NaN, times a twin's key of 0, would be NaN.
            shape = (*problem.q.shape[:-1], 1)
            q = xp.where(sum_to(self._sees_a_key(problem)[..., None], shape) > 0, q, 0)
        if self.kv_head == "tile":
            k = self.sum_shared_heads(k, problem, problem.k.shape)
            v = self.sum_shared_heads(v, problem, problem.v.shape)
        bias = None if grads.bias is None else self._dbias(problem, grads.bias, bias_gradient)
        grads = replace(grads, q=q, k=k, v=v, bias=bias)
        undefined, mean = self.empty_rows(problem, _empty(lse))
        if mean is not None:
            dv = self._dv_of_mean(problem, xp.where(mean[..., None], dout, 0))
            grads = replace(grads, v=grads.v + dv)
        if undefined is not None:
            grads = _with_undefined(problem, grads, undefined)
        return grads

    def share_heads(self, x: Array, problem: Problem) -> Array:
        """Index the key/value head of each query head: (..., K, S, n) → (..., H, S, n)."""
        if problem.K == problem.H:
            return x
        h = problem.xp.arange(problem.H)
        used = h % problem.K if self.kv_head == "tile" else h // (problem.H // problem.K)
        shared: Array = x[..., used, :, :]
        return shared

    def sum_shared_heads(self, dx: Array, problem: Problem, shape: tuple[int, ...]) -> Array:
        """Gradient of `share_heads`: sum over the query heads that use a key/value head."""
        if problem.K != problem.H:
            K, G = problem.K, problem.H // problem.K
            heads, axis = ((G, K), -4) if self.kv_head == "tile" else ((K, G), -3)
            dx = dx.reshape(*dx.shape[:-3], *heads, *dx.shape[-2:]).sum(axis)
        return sum_to(dx, shape)

    def _sees_a_key(self, problem: Problem) -> Array:
        """Return True where mask, causal and window show a query a key: (..., H, T)."""
        visible = self.translate_options(problem).visible
        rows = (*problem.lead, problem.H, problem.T)
        if visible is None:
            visible = problem.xp.zeros((1, 1)) == 0
        sees: Array = problem.xp.broadcast_to(visible.any(-1), rows)
        return sees

    def _apply_dropout(self, problem: Problem, weights: Array) -> Array:
        """Multiply by keep / (1 − rate) if the weights returned are those after dropout."""
        mask = problem.dropout_mask
        if self.weights == "before_dropout" or mask is None or not self._drops(problem):
            return weights
        keep = problem.to_compute_dtype(mask) / (1 - problem.dropout_rate)
        return weights * (keep[0] if keep.ndim > weights.ndim else keep)  # rank 2 has no heads

    def _dbias(self, problem: Problem, dbias: Any, bias_gradient: Callable[[Any, Any], Any]) -> Any:
        """Gradient of the bias, from that of the canonical one."""
        if problem.bias is None:  # the canonical one comes from hidden keys
            return None
        if self.keeps_bias(problem):
            return dbias
        dbias = dbias[..., : problem.S]
        if self.caps_late(problem):
            dbias = through_cap(self.before_cap(problem), dbias)
        if self.bias == "before_scale":
            with np.errstate(invalid="ignore"):  # a bound of inf, times a scale of 0
                dbias = dbias * scale_of(problem)
        return bias_gradient(problem, dbias)

    def mean_of_values(self, problem: Problem, v: Array) -> Array:
        """Mean of all S values for each query head: (..., H, 1, E), 0 where S = 0."""
        v = problem.to_compute_dtype(v)
        return self.share_heads(v.sum(-2, keepdims=True) / max(problem.S, 1), problem)

    def _dv_of_mean(self, problem: Problem, dout: Array) -> Array:
        """Gradient of `mean_of_values`: 1/S of the cotangents of a head's rows to each value."""
        dmean = dout.sum(-2, keepdims=True) / max(problem.S, 1)  # (..., H, 1, E)
        dmean = problem.xp.broadcast_to(dmean, (*dmean.shape[:-2], problem.S, dmean.shape[-1]))
        return self.sum_shared_heads(dmean, problem, problem.v.shape)


Conventions.__init__ = reject_unknown_options(Conventions.__init__)  # type: ignore[method-assign]


def check_conventions(conventions: Any) -> Conventions | None:
    """Check that `conventions` is a `Conventions` or None, and return it."""
    if conventions is None or isinstance(conventions, Conventions):
        return conventions
    raise OptionError(
        f"conventions is {conventions!r}, must be a Conventions, "
        'such as npattn.profiles.PROFILES["torch.sdpa"].conventions'
    )


def _hides(problem: Problem) -> bool:
    """Return True if mask, causal or window may hide a key."""
    return problem.mask is not None or problem.window is not None or bool(problem.causal)


def _number(value: float | Literal["min"] | None, problem: Problem) -> float | None:
    return problem.lowest if isinstance(value, str) else value


def _with_undefined(problem: Problem, grads: Gradients, undefined: Array) -> Gradients:
    """Put NaN where only rows that are NaN, `undefined` (..., H, T), have a share in a gradient.

    Those are the rows of q and of a bias array that nobody else reads. A bias of `npattn.biases`
    sums over all rows, to which these add nothing.
    """
    xp = problem.xp
    defined = ~(undefined[None] if problem.headless else undefined)[..., None]  # (..., H, T, 1)
    shared = sum_to(problem.to_compute_dtype(defined), (*problem.q.shape[:-1], 1)) > 0
    q, bias = xp.where(shared, grads.q, math.nan), grads.bias
    array = problem.bias_array
    if bias is not None and array is not None and problem.bias is array:
        of_pairs = xp.broadcast_to(defined, (*defined.shape[:-1], problem.S))
        used = sum_to(problem.to_compute_dtype(of_pairs), array.shape) > 0
        bias = xp.where(used, bias, math.nan)
    return replace(grads, q=q, bias=bias)


def _times(x: Array, number: float) -> Array:
    """Multiply x by a number, complex x part by part: (−∞ + 0j) · number has a NaN."""
    with np.errstate(invalid="ignore", over="ignore"):  # −∞ · 0
        if getattr(x.dtype, "kind", "f") != "c":  # tensors are real
            return x * number
        scaled = np.empty_like(x)
        scaled.real, scaled.imag = x.real * number, x.imag * number
        return scaled


def _empty(lse: Array) -> Array:
    """Mask of the empty rows: exactly those have a canonical lse of −inf."""
    empty: Array = lse.real == -math.inf
    return empty
