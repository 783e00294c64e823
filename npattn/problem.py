"""One attention problem: arrays and options, checked and normalised once, when made.

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
    D query/key size   E value size
    q (..., H, T, D)   k (..., K, S, D)   v (..., K, S, E)   out (..., H, T, E)   lse (..., H, T)

`Problem` is the only judge of shapes, dtypes and options; the engines trust it and contain only
mathematics. Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import ml_dtypes  # registers bfloat16 and float8 with NumPy, by name too
import numpy as np

from npattn.errors import DtypeError, OptionError, ShapeError

__all__ = [
    "ENGINES",
    "Array",
    "BiasLike",
    "Forward",
    "Gradients",
    "MaskLike",
    "Problem",
    "Tile",
    "band",
    "boolean",
    "checked_alignment",
    "checked_cotangent",
    "diagonal",
    "direction_shape",
    "finfo",
    "fitting",
    "floating",
    "integer",
    "plane_of",
    "read_array",
    "read_bias",
    "read_mask",
    "shown",
    "sum_to",
    "tile_of",
]

Array = np.ndarray[Any, Any]
Alignment = Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]
ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]

ALIGNMENTS = ("bottom_right", "top_left")
ENGINES = ("auto", "dense", "tiled")
COMPUTE = tuple(np.dtype(d) for d in ("f4", "f8", "g", "c8", "c16"))
STORAGE = tuple(np.dtype(d) for d in ("bfloat16", "float16"))
FAR = 2**62  # further than any key, and what is added to an index without overflow


class Tile(NamedTuple):
    """A rectangle of the scores of one head: queries t0 ≤ t < t1 and keys s0 ≤ s < s1.

    `lead`, `H`, `T`, `S` are the sizes of the whole problem; `plane` is an index into
    ``(*lead, H)``.
    """

    lead: tuple[int, ...]
    H: int
    T: int
    S: int
    plane: tuple[int, ...]
    t0: int
    t1: int
    s0: int
    s1: int

    @property
    def t(self) -> Array:
        """The queries: (t1 − t0, 1)."""
        return np.arange(self.t0, self.t1)[:, None]

    @property
    def s(self) -> Array:
        """The keys: (1, s1 − s0)."""
        return np.arange(self.s0, self.s1)[None]

    @property
    def indices(self) -> tuple[Array, Array, Array, Array]:
        """b, h, t and s_index as score_mod gets them: with the rank of (*lead, H, T, S)."""
        *lead, h = self.plane
        b = int(np.ravel_multi_index(lead, self.lead)) if lead else 0
        before = (1,) * len(self.lead)  # the axes of lead
        one = (*before, 1, 1, 1)
        return (
            np.full(one, b),
            np.full(one, h),
            self.t.reshape(*before, 1, -1, 1),
            self.s.reshape(*before, 1, 1, -1),
        )


@runtime_checkable
class MaskLike(Protocol):
    """What `Problem` takes as a mask besides arrays; `npattn.masks` makes such objects."""

    def shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """That of `to_array` for these sizes; ShapeError where it does not fit them."""

    def __invert__(self) -> MaskLike:
        """What this one hides."""

    def hull(self, tile: Tile) -> tuple[int, int]:
        """(lo, hi): the rows of the tile see no key outside lo ≤ s < hi."""

    def tile(self, tile: Tile) -> bool | Array:
        """True or False where all or none is visible, else a bool array (t1 − t0, s1 − s0)."""

    def to_array(
        self,
        T: int | None = None,
        S: int | None = None,
        *,
        lead: tuple[int, ...] = (),
        H: int = 1,
    ) -> Array:
        """The whole mask as a bool array."""


@runtime_checkable
class BiasLike(Protocol):
    """What `Problem` takes as a bias besides arrays; `npattn.biases` makes such objects."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of `to_array`."""

    def shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """That of `to_array` for these sizes; ShapeError where it does not fit them."""

    def tile(self, tile: Tile) -> Array:
        """The bias of a tile, which broadcasts to (t1 − t0, s1 − s0)."""

    def to_array(
        self,
        T: int | None = None,
        S: int | None = None,
        *,
        lead: tuple[int, ...] = (),
        H: int = 1,
    ) -> Array:
        """The whole bias as an array."""

    def zeros(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Any:
        """What `add` adds to: an array shaped as the parameter, a tuple for a sum."""

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        """Add the gradient of the parameter, from that of a tile (t1 − t0, s1 − s0), in place."""

    def gradient(self, ds: Array) -> Any:
        """The gradient of the parameter, from that of the scores (..., H, T, S) or of its array."""


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """Arrays and options of one attention call, checked and normalised when made.

    Parameters
    ----------
    q, k, v : array
        (..., H, T, D), (..., K, S, D), (..., K, S, E). Any real or complex floating dtype that
        NumPy or ml_dtypes knows, or an object with DLPack or ``__array__``. Leading axes
        broadcast; rank 2 (all three) is one head without batch. Kept exactly as given.
    mask : bool array or one of `npattn.masks`, optional
        True = may attend. Rank ≥ 2, broadcasts against (..., H, T, S).  [5, 14]
    causal : bool, "bottom_right" or "top_left", default False
        Query t sees keys s ≤ t + (S − T), or s ≤ t. True: only where T == S, or with
        `alignment`.  [6]
    window : (left, right), optional
        Keys beside the aligned diagonal, inclusive; None = unlimited on that side.  [7]
    bias : float array or one of `npattn.biases`, optional
        Added to the scores after scale and softcap. Rank ≥ 2, broadcasts as `mask` does.  [4]
    scale : float, optional
        Multiplies q·k. Default 1/√D (1 where D = 0). Any finite number.  [1]
    softcap : float, optional
        c > 0: scores become c·tanh(s/c).  [2]
    score_mod : callable, optional
        Elementwise and analytic, f(s, b, h, t, s_index) on arrays that broadcast with s.  [3]
    sinks : float array (H,), optional
        One more logit a head, without a value.  [8]
    dropout_mask : bool array, optional
        True = keep. Broadcasts as `mask` does.  [9]
    dropout_rate : float, default 0.0
        In [0, 1); kept weights are divided by 1 − rate.  [9]
    dtype : dtype, optional
        Computed in and returned: float64 unless said, complex128 for complex arrays. bfloat16 and
        float16 emulate mixed precision: computed in float32, and what enters a product or is
        returned is rounded.  [15]
    engine : {"auto", "dense", "tiled"}
        What computes it; "tiled" no complex arrays and no mixed precision.
    alignment : {"bottom_right", "top_left"}, optional
        What ``causal=True`` means where T ≠ S, and where a window without causal lies.

    Attributes
    ----------
    lead : tuple of int
        The broadcast leading axes.
    H, K, T, S, D, E : int
        The sizes.
    visible : bool array or None
        What mask, causal and window leave to see; None where that is everything.
    mask_array, bias_array : array or None
        mask and bias as arrays, whatever they were given as.
    storage : dtype or None
        The narrow dtype that mixed precision stores in; then `dtype` is float32.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        Before any work, naming the argument, what it is and what it must be.
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
            put(name, floating(name, getattr(self, name)))
        for name, value in zip(
            ("lead", "H", "K", "T", "S", "D", "E"), _sizes(self.q, self.k, self.v), strict=True
        ):
            put(name, value)
        if self.mask is not None:
            put("mask", self._fitting("mask", read_mask(self.mask)))
        if self.bias is not None:
            put("bias", self._fitting("bias", read_bias(self.bias)))
        if self.dropout_mask is not None:
            keep = boolean("dropout_mask", self.dropout_mask)
            put("dropout_mask", self._fitting("dropout_mask", keep))
        if self.sinks is not None:
            put("sinks", self._one_a_head(floating("sinks", self.sinks)))
        causal, alignment = _causal(self.causal, self.alignment, self.T, self.S)
        put("causal", causal)
        put("alignment", alignment)
        put("window", _window(self.window))
        put("scale", _scale(self.scale, self.D))
        put("softcap", _softcap(self.softcap))
        put("dropout_rate", _dropout_rate(self.dropout_rate, self.dropout_mask))
        if self.score_mod is not None and not callable(self.score_mod):
            raise OptionError(
                f"score_mod is {self.score_mod!r}, must be a callable f(s, b, h, t, s_index)"
            )
        if not isinstance(self.engine, str) or self.engine not in ENGINES:
            raise OptionError(f"engine is {self.engine!r}, must be one of {', '.join(ENGINES)}")
        dtype = self._compute_dtype()
        narrow = dtype in STORAGE
        if self.engine == "tiled" and (narrow or dtype.kind == "c"):
            raise OptionError(
                f'engine is "tiled" with dtype {dtype}, must be "dense" or "auto": tiles are '
                "computed in float32, float64 or longdouble"
            )
        put("storage", dtype if narrow else None)
        put("dtype", np.dtype(np.float32) if narrow else dtype)

    def __repr__(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) if field.init else None
            if isinstance(value, np.ndarray):
                words.append(f"{field.name}={shown(value)}")
            elif field.init and field.name != "_" and value != field.default:
                words.append(f"{field.name}={value!r}")
        return f"Problem({', '.join(words)})"

    @property
    def xp(self) -> Any:
        """Where functions on these arrays come from; of tensors, npattn.torch has another."""
        return np

    @property
    def headless(self) -> bool:
        """Whether q, k, v have rank 2: one head, which the results do not show."""
        return self.q.ndim == 2

    @cached_property
    def visible(self) -> Array | None:
        """What mask, causal and window leave to see, broadcasting against (..., H, T, S). [5-7]"""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        if left is None and right is None:
            return self.mask_array
        t = self.xp.arange(self.T)[:, None]
        beside = t + diagonal(self.T, self.S, self.alignment)  # (T, 1) the key of each query
        inside = band(beside, self.xp.arange(self.S), left, right)
        return inside if self.mask_array is None else self.mask_array & inside

    @cached_property
    def mask_array(self) -> Array | None:
        """The mask as an array."""
        return self._as_array(self.mask)

    @cached_property
    def bias_array(self) -> Array | None:
        """The bias as an array."""
        return self._as_array(self.bias)

    def materialised(self) -> Problem:
        """The same problem with arrays where mask and bias are objects; itself where none is."""
        if self.mask is self.mask_array and self.bias is self.bias_array:
            return self
        return self.replace(mask=self.mask_array, bias=self.bias_array)

    def bias_gradient(self, ds: Array) -> Any:
        """The gradient of the bias from that of the scores (..., H, T, S).  [13]"""
        if self.bias is None or self.bias_array is None:
            return None
        ds = sum_to(ds, self.bias_array.shape)
        return ds if isinstance(self.bias, np.ndarray) else self.bias.gradient(ds)

    def computed(self, x: Array) -> Array:
        """x in the dtype computed in."""
        return x.astype(self.dtype)

    def stored(self, x: Array) -> Array:
        """x as it is kept beside what computes: rounded, in mixed precision.  [15]"""
        return x if self.storage is None else self.returned(x).astype(self.dtype)

    def returned(self, x: Array) -> Array:
        """x in the dtype that is returned.  [15]"""
        if self.storage is None:
            return x
        with np.errstate(over="ignore"):  # that is what the dtype does
            return x.astype(self.storage)

    def replace(self, **changes: Any) -> Problem:
        """The same problem with other arrays or options, checked again."""
        # What was left to its default takes the default of the new problem.
        names = ("causal", "scale", "dtype", "alignment")
        given = dict(zip(names, self.__dict__["_given"], strict=True))
        return dataclasses.replace(self, **(given | changes))

    def _fitting(self, name: str, value: Any) -> Any:
        """`value`, if it broadcasts against the scores without enlarging them.  [14]"""
        sizes = (self.lead, self.H, self.T, self.S)
        try:
            shape = value.shape if isinstance(value, np.ndarray) else value.shape(*sizes)
            fitting(name, shape, *sizes)
        except ShapeError as err:
            raise ShapeError(f"{err} {_shapes(self.q, self.k, self.v)}") from None
        return value

    def _as_array(self, value: Array | MaskLike | BiasLike | None) -> Array | None:
        if value is None or isinstance(value, np.ndarray):
            return value
        return value.to_array(self.T, self.S, lead=self.lead, H=self.H)

    def _one_a_head(self, sinks: Array) -> Array:
        if sinks.shape == (self.H,):
            return sinks
        raise ShapeError(
            f"sinks has shape {sinks.shape}, must have shape (H,) = ({self.H},) "
            f"{_shapes(self.q, self.k, self.v)}"
        )

    def _compute_dtype(self) -> np.dtype[Any]:
        arrays = (self.q, self.k, self.v, self.bias, self.sinks)
        is_complex = any(a is not None and a.dtype.kind == "c" for a in arrays)
        if self.dtype is None:
            return np.dtype(np.complex128 if is_complex else np.float64)
        must = (
            f"dtype is {self.dtype!r}, must be one of float32, float64, longdouble, "
            "complex64, complex128: it is what the oracle computes in; or bfloat16 or float16, to "
            "emulate mixed precision"
        )
        try:
            dtype: np.dtype[Any] = np.dtype(self.dtype)
        except TypeError:
            raise DtypeError(must) from None
        if dtype not in (*COMPUTE, *STORAGE):
            raise DtypeError(must)
        if is_complex and dtype.kind != "c":
            raise DtypeError(f"dtype is {dtype}, must be complex where an array is")
        return dtype


@dataclass(frozen=True, eq=False)
class Forward:
    """What a forward pass gives, and what its backward needs.

    Attributes
    ----------
    out : array (..., H, T, E)
    lse : array (..., H, T)
        Natural logarithm of the sum of exp(scores), sink included; −inf where nothing is seen.
    weights : array (..., H, T, S)
        The softmax, before dropout. Computed on demand where the engine does not keep it.
    problem : Problem
        What was asked.
    engine : str
        What computed it.
    """

    out: Array
    lse: Array
    problem: Problem
    engine: str
    residuals: Any = dataclasses.field(repr=False)
    make_weights: Callable[[], Array] = dataclasses.field(repr=False)

    @cached_property
    def weights(self) -> Array:
        return self.make_weights()


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of one loss, each shaped as its input; None where there is no such input."""

    q: Array
    k: Array
    v: Array
    bias: Any = None  # a bias of npattn.biases: shaped as its parameter; a tuple for a sum
    sinks: Array | None = None


@cache
def finfo(dtype: Any) -> Any:
    """The limits of a floating dtype, bfloat16 and float8 included."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x over the axes along which an array of `shape` was broadcast to it.  [13]"""
    if x.shape == shape:
        return x
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and x.shape[extra + i] != 1
    )
    summed: Array = x.sum(axis=axes, keepdims=True)
    return summed.reshape(shape)


def diagonal(T: int, S: int, alignment: Alignment | None) -> int:
    """The key beside query 0; query t is beside the t-th key after it.  [6, 7]"""
    return S - T if alignment == "bottom_right" else 0


def band(beside: Array, s: Array, left: int | None, right: int | None) -> Array:
    """Whether key s lies at most `left` before and `right` after the key beside its query.

    None is unlimited.  [6, 7]
    """
    inside = None if right is None else s <= beside + min(right, FAR)
    if left is not None:
        after = s >= beside - min(left, FAR)
        inside = after if inside is None else inside & after
    if inside is None:
        return np.ones(np.broadcast_shapes(beside.shape, s.shape), bool)
    found: Array = inside
    return found


def plane_of(array: Array, plane: tuple[int, ...], rank: int = 2) -> Array:
    """What an array has at an index of its leading axes, to which they broadcast: its last axes."""
    axes = array.shape[: array.ndim - rank]
    at = plane[len(plane) - len(axes) :]
    found: Array = array[tuple(0 if n == 1 else i for n, i in zip(axes, at, strict=True))]
    return found


def tile_of(array: Array, tile: Tile) -> Array:
    """A tile of an array that broadcasts against the scores; its axes of 1 stay.  [14]"""
    plane = plane_of(array, tile.plane)
    m, n = plane.shape
    rows = slice(None) if m == 1 else slice(tile.t0, tile.t1)
    return plane[rows, slice(None) if n == 1 else slice(tile.s0, tile.s1)]


def fitting(
    name: str, shape: tuple[int, ...], lead: tuple[int, ...], H: int, T: int, S: int
) -> tuple[int, ...]:
    """`shape`, if it broadcasts against (*lead, H, T, S) without enlarging it.  [14]"""
    whole = (*lead, H, T, S)
    tail = whole[max(len(whole) - len(shape), 0) :]
    fits = len(shape) == len(tail) and all(n in (1, w) for n, w in zip(shape, tail, strict=True))
    if len(shape) >= 2 and fits:
        return shape
    hint = ""
    if shape == whole[-1:]:
        hint = f": write {name}[None, :] for one row of keys"
    elif len(whole) == 4 and shape == (whole[0], whole[-1]):
        hint = f"; a (B, S) {name} must become {name}[:, None, None, :]"
    elif len(whole) == 4 and shape == (whole[0], *whole[-2:]):
        hint = f"; a (B, T, S) {name} must become {name}[:, None]"
    raise ShapeError(
        f"{name} has shape {shape}, must have rank 2 or more and broadcast against "
        f"(..., H, T, S) = {whole}{hint}"
    )


def shown(value: Any) -> str:
    """A value as `Problem` shows it: of an array its dtype and shape."""
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)


def checked_cotangent(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    """A cotangent as an array, after checking that it has the shape of what it belongs to."""
    array = floating(name, value)
    if array.shape != shape:
        raise ShapeError(f"{name} has shape {array.shape}, must have that of {name[1:]}, {shape}")
    return array


def direction_shape(problem: Problem, name: str) -> tuple[int, ...]:
    """The shape that a direction of an input must have; OptionError where it can have none."""
    of = getattr(problem, name)
    if of is None:
        raise OptionError(f"d{name} is given, must be None: the problem has no {name}")
    if isinstance(of, BiasLike):
        raise OptionError(
            f"d{name} is given with {name} = {of!r}, must be None unless the {name} is an array: "
            f"pass {name}={name}.to_array(...)"
        )
    shape: tuple[int, ...] = of.shape
    return shape


# --- one function an argument; each raises on the caller's mistake -------------------------------


def read_array(name: str, value: Any) -> Array:
    """`value` as a NumPy array that shares its memory where that is possible."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(
            f"{name} is a masked array, must be a plain one: "
            "pass its .data, and what it hides through mask="
        )
    try:
        if hasattr(value, "__array__") or not hasattr(value, "__dlpack__"):
            return np.asarray(value)
        return np.asarray(np.from_dlpack(value))
    except (TypeError, ValueError, RuntimeError, BufferError) as err:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        dtype = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
        raise DtypeError(
            f"{name} is a {kind}{dtype}, which NumPy cannot read ({err}); "
            "pass a NumPy array, or first detach it, move it to the CPU and widen its dtype"
        ) from err


def _is_float(dtype: np.dtype[Any]) -> bool:
    # The dtypes of ml_dtypes have kind "V" or "f" by version, and names that begin with float.
    return dtype.kind in "fc" or dtype.name.startswith(("bfloat16", "float"))


def floating(name: str, value: Any) -> Array:
    """`value` as a floating array; DtypeError where it is none."""
    array = read_array(name, value)
    if not _is_float(array.dtype):
        raise DtypeError(
            f"{name} is {array.dtype}, must be floating (float64, float32, float16, bfloat16, "
            "float8, complex): convert it, to float64 say"
        )
    return array


def _sizes(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
    """lead, H, K, T, S, D, E, after checking that q, k, v fit each other.  [12, 14]"""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim < 2 or (array.ndim == 2) != (q.ndim == 2):
            raise ShapeError(
                f"{name} has rank {array.ndim}, must have rank 3 or more, (..., heads, length, "
                f"size), or all of q, k, v rank 2, (length, size) {_shapes(q, k, v)}"
            )
    T, D = q.shape[-2:]
    S, E = v.shape[-2:]
    H, K, V = (1, 1, 1) if q.ndim == 2 else (q.shape[-3], k.shape[-3], v.shape[-3])
    wrong = None
    if k.shape[-1] != D:
        wrong = f"k has size {k.shape[-1]}, must have the size {D} of q"
    elif k.shape[-2] != S:
        wrong = f"v has {S} keys, must have the {k.shape[-2]} keys of k"
    elif V != K:
        wrong = f"v has {V} heads, must have the {K} heads of k"
    elif (K == 0) != (H == 0) or (K and H % K):
        wrong = f"k has {K} heads, which must divide the {H} heads of q"
    if wrong:
        raise ShapeError(f"{wrong} {_shapes(q, k, v)}")
    lead = q.shape[:-3]
    if not lead == k.shape[:-3] == v.shape[:-3]:
        try:
            lead = np.broadcast_shapes(lead, k.shape[:-3], v.shape[:-3])
        except ValueError:
            raise ShapeError(
                f"q, k, v have leading axes {lead}, {k.shape[:-3]}, {v.shape[:-3]}, "
                f"which must broadcast {_shapes(q, k, v)}"
            ) from None
    return lead, H, K, T, S, D, E


def _shapes(q: Array, k: Array, v: Array) -> str:
    return f"[q {q.shape}, k {k.shape}, v {v.shape}]"


def boolean(name: str, value: Any) -> Array:
    """`value` as a bool array; DtypeError where it is none."""
    array = read_array(name, value)
    if array.dtype == np.bool_:
        return array
    if _is_float(array.dtype) and name == "mask":
        cure = "pass it as bias if its numbers are to be added to the scores (0 and -inf)"
    elif array.dtype.kind in "iu":
        cure = f"what 1 means is not ours to guess: pass {name} == 1, or {name} == 0"
    else:
        cure = "True = keep" if name == "dropout_mask" else "True = may attend"
    raise DtypeError(f"{name} is {array.dtype}, must be bool: {cure}")


def read_mask(value: Any) -> Array | MaskLike:
    """A mask as a bool array, or as the object that it is."""
    if type(value) is np.ndarray or not isinstance(value, (MaskLike, BiasLike)):
        return boolean("mask", value)
    if isinstance(value, BiasLike):
        raise DtypeError(f"mask is {value!r}, must be a mask: pass it as bias")
    return value


def read_bias(value: Any) -> Array | BiasLike:
    """A bias as a floating array, or as the object that it is."""
    if type(value) is np.ndarray or not isinstance(value, (MaskLike, BiasLike)):
        return _bias(value)
    if isinstance(value, MaskLike):
        raise DtypeError(f"bias is {value!r}, must be a bias: pass it as mask (True = may attend)")
    return value


def _bias(value: Any) -> Array:
    array = read_array("bias", value)
    if array.dtype == np.bool_:
        raise DtypeError("bias is bool, must be floating: pass it as mask (True = may attend)")
    return floating("bias", array)


def _causal(
    causal: Any, alignment: Any, T: int, S: int
) -> tuple[Literal[False] | Alignment, Alignment]:
    """What causal and alignment come to: False or an alignment, and where a window lies.  [6, 7]"""
    if alignment is not None:
        checked_alignment(alignment)
    if isinstance(causal, (bool, np.bool_)):
        if causal and alignment is None and T != S:
            raise OptionError(
                f"causal is True with T = {T} queries and S = {S} keys, which is ambiguous: "
                'say causal="bottom_right" (t sees s ≤ t + S − T: the last query, the last key), '
                'causal="top_left" (t sees s ≤ t: the first query, the first key), or conventions='
            )
        place: Alignment = alignment or "bottom_right"
        return (place if causal else False), place
    if not isinstance(causal, str) or causal not in ALIGNMENTS:
        raise OptionError(
            f'causal is {causal!r}, must be True, False, "bottom_right" or "top_left"'
        )
    return causal, causal  # type: ignore[return-value]  # one of ALIGNMENTS, checked above


def _window(window: Any) -> Window | None:
    if window is None:
        return None
    must = "must be a pair (left, right) of integers ≥ 0 or None (unlimited), in keys"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise OptionError(f"window is {window!r}, {must}")
    for side in window:
        if side is not None and (
            isinstance(side, (bool, np.bool_)) or not isinstance(side, numbers.Integral) or side < 0
        ):
            raise OptionError(f"window is {tuple(window)!r}, {must}")
    left, right = (None if side is None else int(side) for side in window)
    return None if left is None and right is None else (left, right)


def checked_alignment(alignment: Any) -> Alignment:
    """One of ALIGNMENTS; OptionError where it is none."""
    if alignment not in ALIGNMENTS:
        raise OptionError(f"alignment is {alignment!r}, must be one of {ALIGNMENTS}")
    return alignment  # type: ignore[no-any-return]  # one of ALIGNMENTS, checked above


def integer(name: str, n: Any, least: int = 1) -> int:
    """`n` as an int; OptionError where it is none, or less than it must be."""
    if isinstance(n, (bool, np.bool_)) or not isinstance(n, numbers.Integral) or n < least:
        raise OptionError(f"{name} is {n!r}, must be an integer ≥ {least}")
    return int(n)


def _number(name: str, value: Any, must: str) -> float:
    scalar = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if isinstance(scalar, (bool, np.bool_)) or not isinstance(scalar, numbers.Real):
        raise OptionError(f"{name} is {value!r}, must be {must}")
    try:
        return float(scalar)
    except OverflowError:
        raise OptionError(f"{name} is {scalar}, must be {must}") from None


def _scale(scale: Any, D: int) -> float:
    if scale is None:
        return 1 / math.sqrt(D) if D else 1.0
    number = scale if type(scale) is float else _number("scale", scale, "a finite number or None")
    if not math.isfinite(number):
        raise OptionError(f"scale is {number}, must be a finite number or None (1/√D)")
    return number


def _softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    number = _number("softcap", softcap, "a finite number > 0 or None")
    if not (math.isfinite(number) and number > 0):
        raise OptionError(f"softcap is {number}, must be a finite number > 0 or None (no cap)")
    return number


def _dropout_rate(rate: Any, dropout_mask: Array | None) -> float:
    number = rate if type(rate) is float else _number("dropout_rate", rate, "a number in [0, 1)")
    if not 0 <= number < 1:
        raise OptionError(f"dropout_rate is {number}, must be in [0, 1)")
    if number and dropout_mask is None:
        raise OptionError(
            f"dropout_rate is {number} without a dropout_mask: nothing here is random, "
            "so say which weights are kept (a bool array, True = keep)"
        )
    return number
