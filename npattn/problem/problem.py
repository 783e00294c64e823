"""An attention problem: arrays and options, checked and normalised once, on construction.

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
    D query/key size   E value size
    q (..., H, T, D)   k (..., K, S, D)   v (..., K, S, E)   out (..., H, T, E)   lse (..., H, T)

`Problem` alone decides on shapes, dtypes and options; the engines trust it and contain only
mathematics. Numbers in brackets are the rules of docs/semantics.md, and docs/glossary.md says what
a word means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from npattn.problem import checks, options
from npattn.problem.arrays import (
    Array,
    BiasLike,
    MaskLike,
    band,
    cast,
    describe_value,
    diagonal,
    finfo,
    sum_to,
)
from npattn.problem.foreign import reject_unknown_options
from npattn.problem.options import Alignment, ScoreMod, Window, default_scale

NUMBERS = tuple(name for name, option in options.OPTIONS.items() if option.kind == "number")


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """Arrays and options of one attention call, checked and normalised on construction.

    Parameters
    ----------
    q, k, v : array_like
        (..., H, T, D), (..., K, S, D), (..., K, S, E). Any real or complex floating dtype that
        NumPy or ml_dtypes knows, or an object with DLPack or ``__array__``. Leading axes
        broadcast; rank 2 (all three) is one head without batch. Their dtype is kept.
    mask : bool array_like or one of `npattn.masks`, optional
        True = may attend. Rank ≥ 2, broadcasts against (..., H, T, S).  [5, 14]
    causal : bool, "bottom_right" or "top_left", default False
        Query t sees keys s ≤ t + (S − T), or s ≤ t. True: only where T == S, or with
        `alignment`.  [6]
    window : (left, right), optional
        Keys beside the aligned diagonal, inclusive; None = unlimited on that side.  [7]
    bias : float array_like or one of `npattn.biases`, optional
        Added to the scores after scale and softcap. Rank ≥ 2, broadcasts as `mask` does.  [4]
    scale : float, optional
        Multiplies q·k. Default 1/√D (1 where D = 0). Any finite number.  [1]
    softcap : float, optional
        c > 0: scores become c·tanh(s/c).  [2]
    score_mod : callable, optional
        Elementwise and analytic, f(s, b, h, t, s_index) on arrays that broadcast with s.  [3]
    sinks : float array_like (H,), optional
        One more logit per head, without a value.  [8]
    dropout_mask : bool array_like, optional
        True = keep. Broadcasts as `mask` does.  [9]
    dropout_rate : float, default 0.0
        In [0, 1); kept weights are divided by 1 − rate.  [9]
    gate : float array_like, optional
        Multiplies out. Rank ≥ 2, broadcasts against (..., H, T, E).  [16]
    dtype : dtype, optional
        Dtype of the computation and of the results; default float64, complex128 for complex
        arrays. bfloat16 and float16 emulate mixed precision: sums are float32; operands of products
        and results are rounded.  [15]
    engine : {"auto", "dense", "tiled"}
        "tiled" supports neither complex arrays nor mixed precision.
    alignment : {"bottom_right", "top_left"}, optional
        Alignment of ``causal=True`` where T ≠ S, and of a window without causal.

    Attributes
    ----------
    lead : tuple of int
        The broadcast leading axes.
    H, K, T, S, D, E : int
        Sizes.
    visible : bool array or None
        Intersection of mask, causal and window; None if every key is visible.
    mask_array, bias_array : array or None
        Mask and bias as arrays, even if they were passed as objects.
    storage : dtype or None
        The narrow dtype of mixed precision; then `dtype` is float32.

    Raises
    ------
    ShapeError
        If an array has a shape that does not fit q, k, v.
    DtypeError
        If an array or `dtype` has a dtype that is not legal here.
    OptionError
        If an option has an illegal value, or excludes another option.
    """

    q: Array
    k: Array
    v: Array
    mask: Array | MaskLike | None = None
    _: dataclasses.KW_ONLY
    causal: bool | Alignment = False
    window: Window | None = None
    bias: Array | BiasLike | None = None
    scale: float | None = None
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    sinks: Array | None = None
    dropout_mask: Array | None = None
    dropout_rate: float = 0.0
    gate: Array | None = None
    dtype: Any = None
    engine: str = "auto"
    alignment: Alignment | None = None

    lead: tuple[int, ...] = dataclasses.field(init=False)
    H: int = dataclasses.field(init=False)
    K: int = dataclasses.field(init=False)
    T: int = dataclasses.field(init=False)
    S: int = dataclasses.field(init=False)
    D: int = dataclasses.field(init=False)
    E: int = dataclasses.field(init=False)
    storage: np.dtype[Any] | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        put = self.__dict__.__setitem__
        put("_given", (self.causal, self.scale, self.dtype, self.alignment))
        for name in ("q", "k", "v"):
            put(name, checks.read_floating(name, getattr(self, name)))
        arrays = (self.q, self.k, self.v)
        sizes = checks.check_sizes(*arrays)
        for name, value in zip(("lead", "H", "K", "T", "S", "D", "E"), sizes, strict=True):
            put(name, value)
        for name, read in checks.READ_BESIDE_SCORES.items():
            if getattr(self, name) is not None:
                value = read(getattr(self, name))
                checks.check_beside_scores(name, value, (self.lead, self.H, self.T, self.S), arrays)
                put(name, value)
        if self.sinks is not None:
            put("sinks", checks.read_sinks(self.sinks, arrays))
        if self.gate is not None:
            put("gate", checks.read_gate(self.gate))
            checks.check_gate(self.gate, (self.lead, self.H, self.T, self.E), arrays)
        causal, alignment = checks.check_causal(self.causal, self.alignment, self.T, self.S)
        put("causal", causal)
        put("alignment", alignment)
        put("window", checks.check_window(self.window))
        for name in NUMBERS:
            put(name, checks.check_number(name, getattr(self, name)))
        if self.scale is None:
            put("scale", default_scale(self.D)[0])
        checks.check_dropout(self.dropout_rate, self.dropout_mask)
        checks.check_score_mod(self.score_mod)
        checks.check_choice("engine", self.engine, options.ENGINES)
        dtype, storage = checks.check_dtype(
            self.dtype, self.engine, (*arrays, self.bias, self.sinks, self.gate)
        )
        put("dtype", dtype)
        put("storage", storage)

    def __repr__(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) if field.init else None
            if isinstance(value, np.ndarray):
                words.append(f"{field.name}={describe_value(value)}")
            elif field.init and field.name != "_" and value != field.default:
                words.append(f"{field.name}={value!r}")
        return f"Problem({', '.join(words)})"

    @property
    def xp(self) -> Any:
        """Module of functions on these arrays; npattn.torch has its own for tensors."""
        return np

    @property
    def headless(self) -> bool:
        """True if q, k, v have rank 2: one head, without an axis in the results."""
        return self.q.ndim == 2

    @cached_property
    def visible(self) -> Array | None:
        """Visible keys by mask, causal and window; broadcasts against (..., H, T, S) [5-7]."""
        left_keys, right_keys = self.window or (None, None)
        if self.causal:
            right_keys = 0 if right_keys is None else min(right_keys, 0)
        if left_keys is None and right_keys is None:
            return self.mask_array
        t = self.xp.arange(self.T)[:, None]
        aligned = t + diagonal(self.T, self.S, self.alignment)  # (T, 1) the key of each query
        inside = band(aligned, self.xp.arange(self.S), left_keys, right_keys)
        return inside if self.mask_array is None else self.mask_array & inside

    @cached_property
    def mask_array(self) -> Array | None:
        """Mask as an array."""
        return self.as_array(self.mask)

    @cached_property
    def bias_array(self) -> Array | None:
        """Bias as an array."""
        return self.as_array(self.bias)

    @property
    def lowest(self) -> float:
        """Most negative finite score that an implementation of these inputs can store.

        Its scores have the dtype of q, or the storage dtype of mixed precision. The number is in
        the range of `dtype` too.
        """
        stored_limits = finfo(self.q.dtype if self.storage is None else self.storage)
        return max(float(stored_limits.min), float(finfo(self.dtype).min))

    @property
    def without_gate(self) -> Problem:
        """The problem without its gate, which the engines leave to `npattn.problem.gating`."""
        return self if self.gate is None else self.replace(gate=None)

    def materialise(self) -> Problem:
        """Return the problem with mask and bias as arrays; itself if they are arrays already."""
        if self.mask is self.mask_array and self.bias is self.bias_array:
            return self
        return self.replace(mask=self.mask_array, bias=self.bias_array)

    def bias_gradient(self, ds: Array) -> Any:
        """Gradient of the bias from the gradient of the scores (..., H, T, S) [13]."""
        if self.bias is None or self.bias_array is None:
            return None
        ds = sum_to(ds, self.bias_array.shape)
        return self.bias.gradient(ds) if isinstance(self.bias, BiasLike) else ds

    def to_compute_dtype(self, x: Array) -> Array:
        """Convert x to the dtype of the computation."""
        return x.astype(self.dtype)

    def to_operand(self, x: Array) -> Array:
        """Convert an input to the dtype of the computation; mixed precision rounds it once [15]."""
        if self.storage is None:
            return x.astype(self.dtype, copy=False)
        return cast(x, self.storage).astype(self.dtype)

    def round_to_storage(self, x: Any) -> Any:
        """Round x to the storage dtype of mixed precision, if there is one [15]."""
        return x if self.storage is None else self.to_operand(x)

    def to_output_dtype(self, x: Array) -> Array:
        """Convert x to the dtype of the results [15]."""
        return x if self.storage is None else cast(x, self.storage)

    @property
    def has_default_scale(self) -> bool:
        """True if the scale is 1/√D because none was given."""
        return self.__dict__["_given"][1] is None

    def replace(self, **changes: Any) -> Problem:
        """Return the problem with other arrays or options, checked again."""
        # Defaults that depend on the arrays are computed again.
        names = ("causal", "scale", "dtype", "alignment")
        arguments = dict(zip(names, self.__dict__["_given"], strict=True))
        return dataclasses.replace(self, **(arguments | changes))

    def as_array(self, value: Array | MaskLike | BiasLike | None) -> Array | None:
        """Return a mask or a bias of this problem's sizes as an array; None is None."""
        if value is None or isinstance(value, np.ndarray):
            return value
        return value.to_array(self.T, self.S, lead=self.lead, H=self.H)


Problem.__init__ = reject_unknown_options(Problem.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True, eq=False)
class Forward:
    """Results of a forward pass, with the intermediates that backward needs.

    Attributes
    ----------
    out : array (..., H, T, E)
        After the gate, if there is one.
    lse : array (..., H, T)
        Natural logarithm of the sum of exp(scores), sink included; −inf in empty rows.
    weights : array (..., H, T, S)
        The softmax, before dropout. Computed on demand if the engine does not keep it.
    max_score : array (..., H, T)
        The largest final score of each row, without the sink; −inf in a row without scores.
        Computed on demand; it has no gradient.
    problem : Problem
    engine : str
        The engine that computed the results.
    """

    out: Array
    lse: Array
    problem: Problem
    engine: str
    residuals: Any = dataclasses.field(repr=False)
    make_weights: Callable[[], Array] = dataclasses.field(repr=False)
    make_max_score: Callable[[], Array] = dataclasses.field(repr=False)

    @cached_property
    def weights(self) -> Array:
        return self.make_weights()

    @cached_property
    def max_score(self) -> Array:
        return self.make_max_score()


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of one loss, each shaped as its input; None where there is no such input."""

    q: Array
    k: Array
    v: Array
    bias: Any = None  # a bias of npattn.biases: shaped as its parameter; a tuple for a sum
    sinks: Array | None = None
    gate: Array | None = None


@dataclass(frozen=True, eq=False)
class Cotangents:
    """Cotangents of out, and of lse and the weights if the implementation returns these.

    ``dout, dlse = cotangents`` unpacks the two cotangents that most rules alter.
    """

    dout: Array
    dlse: Array | None
    dweights: Array | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.dout, self.dlse))
