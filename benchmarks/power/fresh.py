"""Twenty mistakes of newer bug reports, two of which served to mend the diagnosis.

    python -m benchmarks.power.words --newer

Each is a right implementation but for some steps, with the step and place that its report names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes import Attention, Mistake


def _share(kv: Any) -> Any:
    def share(self: Any, x: Any, H: int) -> Any:
        K = x.shape[-3]
        return np.take(x, np.clip([kv(h, H, K) for h in range(H)], 0, K - 1), axis=-3)

    return share


def _first_head(self: Any, c: Any) -> Any:
    return Attention.results(self, c._replace(q=c.q[..., :1, :, :] + 0 * c.q, k=c.k[..., :1, :, :],
                                              v=c.v[..., :1, :, :]))  # fmt: skip


def _product_of(columns: int) -> Any:
    return lambda self, c: Attention.product(
        self, c._replace(q=np.where(np.arange(c.q.shape[-1]) < columns, c.q, 0))
    )


def _later_queries_alone(self: Any, c: Any, do: Any, dlse: Any, dw: Any) -> Any:
    dq, _, _, *rest = Attention.gradients(self, c, do, dlse, dw)
    later = np.arange(c.k.shape[-2]) <= np.arange(c.q.shape[-2])[:, None]
    own = c._replace(mask=later if c.mask is None else c.mask & later)
    _, dk, dv, *_ = Attention.gradients(self, own, do, dlse, dw)
    return dq, dk, dv, *rest


def _dq_of_first_columns(self: Any, c: Any, do: Any, dlse: Any, dw: Any) -> Any:
    _, *rest = Attention.gradients(self, c, do, dlse, dw)
    few = np.where(np.arange(do.shape[-1]) < c.q.shape[-1], do, 0)
    p = self.rebuild(*self.scores(c)[:1], c, self.scores(c)[1])[0]
    whole = self.undrop(do @ self.share(c.v, do.shape[-3]).swapaxes(-1, -2), c)
    delta = self.delta(p, whole + dw)
    dp = self.undrop(few @ self.share(c.v, do.shape[-3]).swapaxes(-1, -2), c)
    ds = p * (dp + dw - delta + dlse) * self.cap_slope(c)
    return c.scale * ds @ self.share(c.k, do.shape[-3]), *rest


def _cap_of_all(self: Any, x: Any, visible: Any, c: Any) -> Any:
    return self.hide(self.cap(x + self.bias(c), c), visible)


def _with(step: str, when: Any, **changes: Any) -> Any:
    """Return a step that sees other inputs where a condition of them holds."""
    right = getattr(Attention, step)

    def wrong(self: Any, *args: Any) -> Any:
        (at,) = (i for i, x in enumerate(args) if hasattr(x, "softcap"))
        c = args[at]
        if when(c):
            c = c._replace(**{name: f(c) for name, f in changes.items()})
        return right(self, *args[:at], c, *args[at + 1 :])

    return wrong


def _sample(source: Any) -> Any:
    """Return a function that takes the bias of another sample, where heads share it."""

    def bias(self: Any, c: Any) -> Any:
        x = c.bias
        if np.ndim(x) < 4 or np.shape(x)[-3] > 1 or len(x) == 1:
            return x
        B = len(x)
        return x[[source(b, c.q.shape[-3]) % B for b in range(B)]]

    return bias


def _rows_of_tiles(self: Any, c: Any) -> Any:
    o, lse, p = Attention.results(self, c)
    T = c.q.shape[-2]
    whole = np.arange(T) < 16 * (T // 16) if T > 16 else np.ones(T, bool)
    return np.where(whole[:, None], o, 0), lse, p


def _bias_of_first_head(self: Any, ds: Any, shape: Any) -> Any:
    one_of_heads = len(shape) > 2 and shape[-3] == 1
    return Attention.reduce_bias(self, ds[..., :1, :, :] if one_of_heads else ds, shape)


def _first_of_group(self: Any, dx: Any, x: Any) -> Any:
    *lead, H, S, n = dx.shape
    return dx.reshape(*lead, x.shape[-3], H // max(x.shape[-3], 1), S, n)[..., 0, :, :]


def _divide(self: Any, p: Any, dp: Any) -> Any:
    return np.where(p.any(-1, keepdims=True), (p * dp).sum(-1, keepdims=True), np.nan)


def _keys_of_queries(self: Any, c: Any) -> Any:
    return Attention.visible(self, c) & (np.arange(c.k.shape[-2]) < c.q.shape[-2])


def _short_window(self: Any, c: Any) -> Any:
    left, right = Attention.sides(self, c)
    return None if left is None else left - 1, right


def _mask_of_first_sample(self: Any, mask: Any, c: Any) -> Any:
    return mask[:1] if mask.ndim == 4 else mask


ROWS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "divided-by-key-heads": ("PSAL-POSTECH/ONNXim#34", "s", "h // K ≠ h // G and K > 1",
        {"share": _share(lambda h, H, K: h // K)}),
    "every-head-is-the-first": ("BobMcDear/attorch#14", "o", "h ≥ 1", {"results": _first_head}),
    "scale-of-one-half": ("BobMcDear/attorch#14", "s", "D ≠ 4 and no scale",
        {"default_scale": lambda self, H, D: 0.5}),
    "columns-of-one-size": ("gittensor-ai-lab/sparkinfer#330", "s", "D > 128",
        {"product": _product_of(128)}),
    "later-queries-alone": ("triton-lang/triton#5660", "dv", "no causal",
        {"gradients": _later_queries_alone}),
    "dq-of-first-columns": ("XunhaoLai/native-sparse-attention-triton#27", "dq", "E > D",
        {"gradients": _dq_of_first_columns}),
    "bias-is-capped": ("emmtrix/emx-onnx-cgen#731", "s", "softcap and bias",
        {"final": _cap_of_all}),
    "uncapped-decode": ("chrishayuk/larql#237", "s", "softcap and T = 1",
        {"cap": _with("cap", lambda c: c.q.shape[-2] == 1, softcap=lambda c: None)}),
    "no-sinks-in-long-rows": ("chrishayuk/larql#237", "p", "sinks and S > 64",
        {"softmax": _with("softmax", lambda c: c.k.shape[-2] > 64,
                          sinks=lambda c: np.full_like(c.sinks, -np.inf))}),
    "backward-of-sinks-open-right": ("AMD-AGI/Primus-Turbo#262", "visible",
        "backward: window and sinks",
        {"gradients": _with("gradients", lambda c: c.window and np.isfinite(c.sinks).any(),
                            window=lambda c: (c.window[0], None))}),
    "bias-of-first-sample": ("microsoft/onnxruntime#24017", "s", "b ≥ 1 and bias",
        {"bias": _sample(lambda b, H: 0)}),
    "bias-overstrides": ("microsoft/onnxruntime#28963", "s", "b ≥ 1 and bias",
        {"bias": _sample(lambda b, H: b * H)}),
    "rows-of-tiles": ("tile-ai/TileOPs#1511", "o", "t ≥ 16 · (T // 16) and T > 16",
        {"results": _rows_of_tiles}),
    "keys-of-queries": ("jax-ml/jax#24491", "visible", "s ≥ T", {"visible": _keys_of_queries}),
    "dbias-of-first-head": ("HKUSTDial/flash-sparse-attention#199", "dbias", "bias and H > 1",
        {"reduce_bias": _bias_of_first_head}),
    "nan-of-empty-rows": ("Dao-AILab/flash-attention#443", "nan", "rows that see no key",
        {"delta": _divide}),
    "dropout-of-another-call": ("inferred", "p", "backward: dropout",
        {"gradients": _with("gradients", lambda c: np.ndim(c.keep) > 0,
                            keep=lambda c: np.roll(c.keep, 1, -1))}),
    "first-of-each-group": ("fla-org/flash-linear-attention#1029", "dv", "G > 1",
        {"share_back": _first_of_group}),
    "window-without-its-edge": ("ROCm/aiter#1633", "visible", "window", {"sides": _short_window}),
    "mask-of-first-sample": ("huggingface/candle#1920", "visible", "b ≥ 1 and mask",
        {"mask": _mask_of_first_sample}),
}  # fmt: skip
"""Name → report, step, place, and the steps that are replaced."""


def _make(name: str, source: str, step: str, where: str, steps: dict[str, Any]) -> Mistake:
    f = type(name, (Attention,), steps)()
    return Mistake(name, "fresh", "", source, step, where, f.forward, f.backward)


MISTAKES = {name: _make(name, *row) for name, row in ROWS.items()}
