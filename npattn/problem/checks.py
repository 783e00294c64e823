"""One function for each argument of attention: read it and check it, or raise.

Numbers in brackets are the rules of docs/semantics.md.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem.arrays import Array, BiasLike, MaskLike, describe_value
from npattn.problem.options import ALIGNMENTS, OPTIONS, Alignment, Window

Shape = tuple[int, ...]
Hints = dict[Shape, tuple[str, str]]
COMPUTE = tuple(np.dtype(d) for d in ("f4", "f8", "g", "c8", "c16"))
STORAGE = tuple(np.dtype(d) for d in ("bfloat16", "float16"))


def check_result(fwd: Any, kind: type, source: str) -> None:
    """Check that fwd is a result of the forward function that `source` names."""
    if not isinstance(fwd, kind):
        raise OptionError(f"fwd is of type {type(fwd).__name__}; pass the result of {source}")


def read_array(name: str, value: Any) -> Array:
    """Return `value` as a NumPy array, without a copy if possible."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a masked array; pass its .data, and hide positions with mask=")
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


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return True for real and complex floating dtypes, those of ml_dtypes included."""
    # The dtypes of ml_dtypes have kind "V" or "f" by version, and names that begin with float.
    return dtype.kind in "fc" or dtype.name.startswith(("bfloat16", "float"))


def read_floating(name: str, value: Any) -> Array:
    """Return `value` as a floating array. Raises DtypeError if it is not floating."""
    array = read_array(name, value)
    if not is_floating(array.dtype):
        cure = "convert it, for example to float64"
        if array.dtype == np.uint16:
            cure = f"pass {name}.view('bfloat16') if these are the bits of such numbers"
        raise DtypeError(
            f"{name} is {array.dtype}, must be floating (float64, float32, float16, bfloat16, "
            f"float8, complex): {cure}"
        )
    return array


def check_sizes(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
    """Check that q, k, v fit each other, and return lead, H, K, T, S, D, E [12, 14].

    q is (..., H, T, D), k (..., K, S, D), v (..., K, S, E); or all have rank 2, one head.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim < 2 or (array.ndim == 2) != (q.ndim == 2):
            raise ShapeError(
                f"{name} has rank {array.ndim}, must have rank 3 or more, (..., heads, length, "
                f"size); or pass q, k, v all of rank 2, (length, size) {_format_shapes(q, k, v)}"
            )
    T, D = q.shape[-2:]
    S, E = v.shape[-2:]
    H, K, V = (1, 1, 1) if q.ndim == 2 else (q.shape[-3], k.shape[-3], v.shape[-3])
    wrong = None
    if k.shape[-1] != D:
        wrong = f"k has size {k.shape[-1]}, but q has size {D}"
    elif k.shape[-2] != S:
        wrong = f"v has {S} keys, but k has {k.shape[-2]}"
    elif V != K:
        wrong = f"v has {V} heads, but k has {K}"
    elif (K == 0) != (H == 0):
        wrong = f"k has {K} heads, but q has {H}"
    elif K and H % K:
        wrong = f"k has {K} heads, which does not divide the {H} heads of q"
    if wrong:
        raise ShapeError(f"{wrong} {_format_shapes(q, k, v)}")
    lead = q.shape[:-3]
    if not lead == k.shape[:-3] == v.shape[:-3]:
        try:
            lead = np.broadcast_shapes(lead, k.shape[:-3], v.shape[:-3])
        except ValueError:
            raise ShapeError(
                f"q, k, v have leading axes {lead}, {k.shape[:-3]}, {v.shape[:-3]}, "
                f"which do not broadcast {_format_shapes(q, k, v)}"
            ) from None
    return lead, H, K, T, S, D, E


def _format_shapes(q: Array, k: Array, v: Array) -> str:
    return f"[q {q.shape}, k {k.shape}, v {v.shape}]"


def read_boolean(name: str, value: Any) -> Array:
    """Return `value` as a bool array. Raises DtypeError if it is not boolean."""
    array = read_array(name, value)
    if array.dtype == np.bool_:
        return array
    if is_floating(array.dtype) and name == "mask":
        cure = "pass it as bias to add its numbers (0 and -inf) to the scores"
    elif array.dtype.kind in "iu":
        cure = f"integer masks are ambiguous; pass {name} == 1 or {name} == 0"
    else:
        cure = "True = keep" if name == "dropout_mask" else "True = may attend"
    raise DtypeError(f"{name} is {array.dtype}, must be bool: {cure}")


def read_mask(value: Any) -> Array | MaskLike:
    """Return a mask as a bool array, or unchanged if it is an object."""
    if type(value) is np.ndarray or not isinstance(value, (MaskLike, BiasLike)):
        return read_boolean("mask", value)
    if isinstance(value, BiasLike):
        raise DtypeError(f"mask is the bias {describe_value(value)}; pass it as bias")
    return value


def read_bias(value: Any) -> Array | BiasLike:
    """Return a bias as a floating array, or unchanged if it is an object."""
    if type(value) is np.ndarray or not isinstance(value, (MaskLike, BiasLike)):
        array = read_array("bias", value)
        if array.dtype == np.bool_:
            raise DtypeError("bias is bool, must be floating: pass it as mask (True = may attend)")
        return read_floating("bias", array)
    if isinstance(value, MaskLike):
        raise DtypeError(f"bias is the mask {describe_value(value)}; pass it as mask")
    return value


def check_score_shape(
    name: str, shape: tuple[int, ...], lead: tuple[int, ...], H: int, T: int, S: int
) -> tuple[int, ...]:
    """Check that `shape` broadcasts against (*lead, H, T, S) without enlarging it [14]."""
    score_shape = (*lead, H, T, S)
    if not _broadcasts(shape, score_shape):
        hints: Hints = {(S,): ("one row of keys", "None, :")}
        if len(lead) == 1:
            hints.setdefault((*lead, S), (f"a (B, S) {name}", ":, None, None, :"))
            hints.setdefault((*lead, T, S), (f"a (B, T, S) {name}", ":, None"))
        raise _broadcast_error(name, shape, "H, T, S", score_shape, hints)
    return shape


def check_integer(name: str, n: Any, least: int = 1) -> int:
    """Return `n` as an int. Raises OptionError if it is not an integer ≥ `least`."""
    if isinstance(n, (bool, np.bool_)) or not isinstance(n, numbers.Integral) or n < least:
        raise OptionError(f"{name} is {n!r}, must be an integer ≥ {least}")
    return int(n)


def check_choice(name: str, value: Any, legal: Sequence[str]) -> Any:
    """Return `value` if it is one of the legal words."""
    if not isinstance(value, str) or value not in legal:
        raise OptionError(f"{name} is {value!r}, must be one of {', '.join(legal)}")
    return value


def check_flag(name: str, value: Any) -> None:
    """Check that `value` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise OptionError(f"{name} is {value!r}, must be True or False")


def check_not_negative(name: str, value: Any) -> float:
    """Return a finite number ≥ 0 as a float."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < math.inf:
        raise OptionError(f"{name} is {value!r}, must be a finite number ≥ 0")
    return float(value)


def read_integers(name: str, value: Any, cure: str = "") -> Array:
    """Return `value` as an array of integers. Raises DtypeError, with the cure, if it is none."""
    array = read_array(name, value)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name} is {array.dtype}, must be integers{cure}")
    return array


READ_BESIDE_SCORES: dict[str, Callable[[Any], Any]] = {
    "mask": read_mask,
    "bias": read_bias,
    "dropout_mask": partial(read_boolean, "dropout_mask"),
}
"""Option that broadcasts against the scores → its reader."""


def check_beside_scores(
    name: str, value: Array | MaskLike | BiasLike, sizes: tuple[tuple[int, ...], int, int, int],
    arrays: tuple[Array, Array, Array],
) -> None:  # fmt: skip
    """Check that a mask or bias broadcasts against the scores without enlarging them [14]."""
    try:
        shape = value.shape if isinstance(value, np.ndarray) else value.shape(*sizes)
        check_score_shape(name, shape, *sizes)
    except ShapeError as err:
        raise ShapeError(f"{err} {_format_shapes(*arrays)}") from None


def read_gate(value: Any) -> Array:
    """Return a gate as a floating array. Raises DtypeError if it is not floating."""
    array = read_array("gate", value)
    if array.dtype == np.bool_:
        raise DtypeError("gate is bool, must be floating: pass gate.astype(float)")
    return read_floating("gate", array)


def check_gate(
    gate: Array, sizes: tuple[tuple[int, ...], int, int, int], arrays: tuple[Array, Array, Array]
) -> None:
    """Check that a gate broadcasts against (*lead, H, T, E) without enlarging it [16]."""
    lead, H, T, E = sizes
    shape, out_shape = gate.shape, (*lead, H, T, E)
    if _broadcasts(shape, out_shape):
        return
    hints: Hints = {(E,): ("one row of numbers", "None, :")}
    hints[H,] = ("one number per head", ":, None, None")
    if len(lead) == 1:
        hints.setdefault((*lead, H), ("a (B, H) gate", ":, :, None, None"))
        hints.setdefault((*lead, H, T), ("a (B, H, T) gate", "..., None"))
        hints.setdefault((*lead, T, E), ("a (B, T, E) gate", ":, None"))
    err = _broadcast_error("gate", shape, "H, T, E", out_shape, hints)
    raise ShapeError(f"{err} {_format_shapes(*arrays)}")


def _broadcasts(shape: tuple[int, ...], full_shape: tuple[int, ...]) -> bool:
    """Return True if an array of this shape and rank ≥ 2 broadcasts to `full_shape` as it is."""
    tail = full_shape[max(len(full_shape) - len(shape), 0) :]
    fits = len(shape) == len(tail) and all(n in (1, w) for n, w in zip(shape, tail, strict=True))
    return fits and len(shape) >= 2


def _broadcast_error(
    name: str, shape: Shape, letters: str, full_shape: Shape, hints: Hints
) -> ShapeError:
    """Make the error of a shape; `hints` say what other shapes stand for, and how to index them."""
    words, index = hints.get(shape, ("", ""))
    hint = words and f"; for {words} pass {name}[{index}]"
    return ShapeError(
        f"{name} has shape {shape}, must have rank 2 or more and broadcast against "
        f"(..., {letters}) = {full_shape}{hint}"
    )


def read_sinks(value: Any, arrays: tuple[Array, Array, Array]) -> Array:
    """Return sinks as a floating array with one entry per query head [8]."""
    sinks = read_floating("sinks", value)
    H = 1 if arrays[0].ndim == 2 else arrays[0].shape[-3]
    if sinks.shape == (H,):
        return sinks
    raise ShapeError(
        f"sinks has shape {sinks.shape}, must have shape (H,) = ({H},) {_format_shapes(*arrays)}"
    )


def check_causal(
    causal: Any, alignment: Any, T: int, S: int
) -> tuple[Literal[False] | Alignment, Alignment]:
    """Return causal as False or an alignment, and the alignment of a window [6, 7]."""
    if alignment is not None:
        check_alignment(alignment)
    if isinstance(causal, (bool, np.bool_)):
        if causal and alignment is None and T != S:
            raise OptionError(
                f"causal=True is ambiguous for T = {T} queries and S = {S} keys: pass "
                'causal="bottom_right" (t sees s ≤ t + S − T: the last query, the last key), '
                'causal="top_left" (t sees s ≤ t: the first query, the first key), or conventions='
            )
        place: Alignment = alignment or "bottom_right"
        return (place if causal else False), place
    if not isinstance(causal, str) or causal not in ALIGNMENTS:
        raise OptionError(
            f'causal is {causal!r}, must be True, False, "bottom_right" or "top_left"'
        )
    return causal, causal  # type: ignore[return-value]  # one of ALIGNMENTS, checked above


def check_window(window: Any) -> Window | None:
    """Return the window as a pair of int or None; None if neither side is limited."""
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
    left_keys, right_keys = (None if side is None else int(side) for side in window)
    return None if left_keys is None and right_keys is None else (left_keys, right_keys)


def check_alignment(alignment: Any) -> Alignment:
    """Return `alignment` if it is one of `ALIGNMENTS`."""
    return check_choice("alignment", alignment, ALIGNMENTS)  # type: ignore[no-any-return]


def check_number(name: str, value: Any) -> float | None:
    """Return a number option as a float; None stays None if None is the default."""
    option = OPTIONS[name]
    if value is None and option.default is None:
        return None
    number = value if type(value) is float else _to_float(name, value, option.legal)
    if not option.accepts(number):
        raise OptionError(f"{name} is {number}, must be {option.legal}")
    return number


def _to_float(name: str, value: Any, legal: str) -> float:
    scalar = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if isinstance(scalar, (bool, np.bool_)) or not isinstance(scalar, numbers.Real):
        raise OptionError(f"{name} is {value!r}, must be {legal}")
    try:
        return float(scalar)
    except OverflowError:
        raise OptionError(f"{name} is {scalar}, must be {legal}") from None


def check_dropout(rate: float, dropout_mask: Array | None) -> None:
    """Check that a dropout rate comes with a mask [9]."""
    if rate and dropout_mask is None:
        raise OptionError(
            f"dropout_rate is {rate}, but there is no dropout_mask: nothing here is random; "
            "pass the weights to keep as a bool array (True = keep)"
        )


def check_score_mod(score_mod: Any) -> None:
    """Check that score_mod can be called [3]."""
    if score_mod is not None and not callable(score_mod):
        raise OptionError(f"score_mod is {score_mod!r}, must be a callable f(s, b, h, t, s_index)")
    try:
        parameters = None if score_mod is None else inspect.signature(score_mod)
    except ValueError:  # a function of C has none
        parameters = None
    try:
        if parameters is not None:
            parameters.bind(*range(5))
    except TypeError as err:
        raise OptionError(
            f"score_mod has the parameters {parameters}, must take five, (s, b, h, t, s_index)"
        ) from err


def check_dtype(
    value: Any, engine: str, arrays: tuple[Any, ...]
) -> tuple[np.dtype[Any], np.dtype[Any] | None]:
    """Return the dtype of the computation, and the dtype that mixed precision stores in [15]."""
    dtype = _requested_dtype(value, any(a is not None and a.dtype.kind == "c" for a in arrays))
    narrow = dtype in STORAGE
    if engine == "tiled" and (narrow or dtype.kind == "c"):
        raise OptionError(
            f'engine "tiled" does not support dtype {dtype}, only float32, float64 and longdouble: '
            'pass engine="dense" or "auto"'
        )
    return (np.dtype(np.float32), dtype) if narrow else (dtype, None)


def _requested_dtype(value: Any, is_complex: bool) -> np.dtype[Any]:
    """Return the dtype to compute in, by default float64, or complex128 for complex arrays."""
    if value is None:
        return np.dtype(np.complex128 if is_complex else np.float64)
    must = (
        f"dtype is {value!r}, must be float32, float64, longdouble, complex64 or complex128; "
        "or bfloat16 or float16, to emulate mixed precision"
    )
    try:
        dtype: np.dtype[Any] = np.dtype(value)
    except TypeError:
        raise DtypeError(must) from None
    if dtype not in (*COMPUTE, *STORAGE):
        raise DtypeError(must)
    if is_complex and dtype.kind != "c":
        raise DtypeError(f"dtype is {dtype}, but an array is complex: pass complex128")
    return dtype


def check_cotangent(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    """Return a cotangent as an array, after checking that it has the shape of its result."""
    array = read_floating(name, value)
    if array.shape != shape:
        raise ShapeError(f"{name} has shape {array.shape}, but {name[1:]} has shape {shape}")
    return array


def direction_shape(name: str, value: Any, prefix: str = "d") -> tuple[int, ...]:
    """Return the shape of an input. Raises OptionError if there is no such input."""
    if value is None:
        raise OptionError(f"got {prefix}{name}, but the problem has no {name}")
    return value.shape  # type: ignore[no-any-return]
