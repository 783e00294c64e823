"""Steps between the inputs and o that are computed otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.problem.arrays import Array
from npattn.testing.diagnosis import leaks
from npattn.testing.diagnosis.steps.step import overrides

# --- visible keys ---


def _top_left(self: Attention, T: int, S: int) -> Array:
    return np.arange(T)[:, None]


def _earlier(self: Attention, T: int, S: int) -> Array:
    return np.arange(T)[:, None] + self.offset(T, S) - 1


def _later(self: Attention, T: int, S: int) -> Array:
    return np.arange(T)[:, None] + self.offset(T, S) + 1


def _offset_from_0(self: Attention, T: int, S: int) -> Array:
    return np.arange(T)[:, None] + max(S - T, 0)


def _bottom_right_by_queries(self: Attention, T: int, S: int) -> Array:
    return np.arange(T)[:, None] - max(T - S, 0)


overrides(
    "diagonal", "causal or window is aligned top-left, with query t at key t", diagonal=_top_left
)
overrides("diagonal", "the diagonal is one key too early", diagonal=_earlier)
overrides("diagonal", "the diagonal is one key too late", diagonal=_later)
overrides(
    "diagonal",
    "the offset S − T of the diagonal is not negative with T > S",
    diagonal=_offset_from_0,
)
overrides(
    "diagonal",
    "the offset S − T of the diagonal is not positive with S > T",
    diagonal=_bottom_right_by_queries,
)


def _hide_with(number: float) -> Any:
    def hide(self: Attention, s: Array, visible: Array) -> Array:
        return np.where(visible, s, number)

    return hide


def _hide_by_adding(number: float) -> Any:
    def hide(self: Attention, s: Array, visible: Array) -> Array:
        return s + np.where(visible, 0, number)

    return hide


def _hide_by_product(self: Attention, s: Array, visible: Array) -> Array:
    return s * visible


def _everything_live(self: Attention, c: Inputs) -> tuple[Array, Array]:
    s, _ = Attention.scores(self, c)
    return s, s != -np.inf


for _number in (-1e4, -1e9, float(np.finfo(np.float16).min), float(np.finfo(np.float32).min)):
    overrides(
        "hidden",
        f"hidden scores are {_number:.5g}, and take weight where all others are as low",
        hide=_hide_with(_number),
        scores=_everything_live,
    )
    overrides(
        "hidden",
        f"{_number:.5g} is added to hidden scores, which take weight where all others are as low",
        hide=_hide_by_adding(_number),
        scores=_everything_live,
    )


def _add_mask(self: Attention, s: Array, visible: Array) -> Array:
    return s + visible


for _hide, _text in ((_add_mask, "the mask is added to the scores as 1 and 0"),
                     (_hide_with(0.0), "hidden scores are 0")):  # fmt: skip
    overrides("masks", f"{_text}: hidden keys keep weight", hide=_hide)
    overrides(
        "masks",  # a mask that hides nothing is added too
        f"{_text}: hidden keys keep weight and gradients",
        hide=_hide,
        scores=_everything_live,
    )
overrides(
    "hidden",
    "the mask multiplies the scores: hidden ones are 0 and keep weight",
    hide=_hide_by_product,
    scores=_everything_live,
)


def _mask_weights(self: Attention, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
    visible = self.visible(c)
    p, p_sink, lse = Attention.softmax(self, self.cap(self.product(c), c) + self.bias(c), c, live)
    return np.where(visible, p, 0), p_sink, lse


overrides(
    "hidden",
    "weights are masked after the softmax, and not normalised again",
    softmax=_mask_weights,
)

# --- softcap ---


def _leave_scale_out(self: Attention, c: Inputs) -> Array:
    return Attention.product(self, c if c.softcap is None else c._replace(scale=1.0))


def _scale_capped(self: Attention, x: Array, c: Inputs) -> Array:
    return x if c.softcap is None else c.scale * Attention.cap(self, x, c)


def _cap_with_bias(self: Attention, x: Array, visible: Array, c: Inputs) -> Array:
    return self.hide(self.cap(x + self.bias(c), c), visible)


def _cap_last(self: Attention, x: Array, visible: Array, c: Inputs) -> Array:
    return self.cap(self.hide(x + self.bias(c), visible), c)


def _cap_sinks(self: Attention, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
    return Attention.softmax(self, s, c._replace(sinks=self.cap(c.sinks, c)), live)


def _clip(self: Attention, x: Array, c: Inputs) -> Array:
    return x if c.softcap is None else np.clip(x, -c.softcap, c.softcap)


def _cap_without_factor(self: Attention, x: Array, c: Inputs) -> Array:
    return x if c.softcap is None else np.tanh(x / c.softcap)


overrides(
    "softcap",
    "the softcap is applied before the scale",
    product=_leave_scale_out,
    cap=_scale_capped,
)
overrides("softcap", "the softcap is applied after the bias is added", final=_cap_with_bias)
overrides(
    "softcap", "the softcap is applied after the mask: hidden keys take weight", final=_cap_last
)
overrides("softcap", "the softcap is applied to the sinks too", softmax=_cap_sinks)
overrides("softcap", "the softcap clips instead of c·tanh(s/c)", cap=_clip)
overrides("softcap", "the softcap is tanh(s/c), without the factor c", cap=_cap_without_factor)

# --- softmax ---


def _over_queries(self: Attention, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
    _, p_sink, lse = Attention.softmax(self, s, c, live)
    e = np.exp(s - np.maximum(s.max(-2, keepdims=True, initial=-np.inf), np.finfo(float).min))
    return e / np.maximum(e.sum(-2, keepdims=True), np.finfo(float).tiny), p_sink, lse


def _without_maximum(
    self: Attention, s: Array, c: Inputs, live: Array
) -> tuple[Array, Array, Array]:
    e, e_sink = np.exp(s.astype(np.float32)), np.exp(c.sinks.astype(np.float32))
    total = e.sum(-1, keepdims=True) + e_sink
    safe = np.where(total == 0, 1, total)
    return np.where(live, e / safe, 0), e_sink / safe, np.log(total)


def _maximum_of_0(self: Attention, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
    m = np.maximum(s.max(-1, keepdims=True, initial=0.0), c.sinks)
    e, e_sink = np.exp((s - m).astype(np.float32)), np.exp((c.sinks - m).astype(np.float32))
    total = e.sum(-1, keepdims=True) + e_sink
    safe = np.where(total == 0, 1, total)
    return np.where(live, e / safe, 0), e_sink / safe, m + np.log(total)


def _empty_nan(self: Attention, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
    p, p_sink, lse = Attention.softmax(self, s, c, live)
    return np.where(np.isneginf(lse), np.nan, p), p_sink, lse


def _empty_nan_with_weights(self: Attention, c: Inputs) -> tuple[Array, Array, Array]:
    o, lse, p = Attention.results(self, c)
    nan = np.isneginf(lse)[..., None] & c.returns_weights
    return np.where(nan, np.nan, o), lse, np.where(nan, np.nan, p)


def _empty_mean(self: Attention, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
    p, p_sink, lse = Attention.softmax(self, s, c, live)
    return np.where(np.isneginf(lse), 1 / max(s.shape[-1], 1), p), p_sink, lse


def _everywhere(self: Attention, w: Array, x: Array, live: Array) -> Array:
    return np.asarray(w @ x)


def _ignore_nan(self: Attention, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
    return Attention.softmax(self, np.where(np.isnan(s), -np.inf, s), c, live)


def _clear_nan(self: Attention, w: Array, x: Array, live: Array) -> Array:
    return np.asarray(np.nan_to_num(w) @ np.nan_to_num(x))


overrides("softmax", "the softmax is taken over the queries", softmax=_over_queries)
overrides(
    "softmax", "no maximum is subtracted before exp, which overflows", softmax=_without_maximum
)
overrides(
    "softmax",
    "the maximum that is subtracted is never below 0, so that rows of low scores vanish",
    softmax=_maximum_of_0,
)
overrides("empty", "a query that sees nothing gives NaN", softmax=_empty_nan)
overrides(
    "empty",
    "a query that sees nothing gives NaN where the weights are returned",
    results=_empty_nan_with_weights,
)
overrides("empty", "a query that sees nothing gives the mean of all values", softmax=_empty_mean)
overrides(
    "NaN",
    leaks.TEXT,
    masked_matmul=_everywhere,
)
overrides("NaN", "NaN scores are hidden", softmax=_ignore_nan)
overrides("NaN", "NaN is replaced by 0", masked_matmul=_clear_nan)


# --- results ---


def _lse_without_sink(self: Attention, pivot: Array, total: Array, e_sink: Array) -> Array:
    return np.asarray(pivot + np.log(total - e_sink))


def _lse_without_maximum(self: Attention, pivot: Array, total: Array, e_sink: Array) -> Array:
    return np.asarray(np.log(total))


def _drop_weights(self: Attention, p: Array, c: Inputs) -> Array:
    return p * c.keep


def _tail_rows(tile: int) -> Any:
    def results(self: Attention, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = Attention.results(self, c)
        whole = np.arange(o.shape[-2]) < o.shape[-2] // tile * tile
        return o * whole[:, None], lse, p

    return results


overrides("lse", "lse leaves out the sink", lse=_lse_without_sink)
overrides("lse", "the maximum is not added back to lse", lse=_lse_without_maximum)
overrides("dropout", "the weights returned are those after dropout", returned_weights=_drop_weights)
for _tile in (4, 8, 16, 32, 64, 128):
    overrides(
        "sizes",
        f"rows of o after the last whole tile of {_tile} queries are 0",
        results=_tail_rows(_tile),
    )
