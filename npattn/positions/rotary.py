"""Rotary positions: pairs of features (a, b) turn by the angle θ = position · frequency.

    a ← a cos θ − b sin θ      b ← b cos θ + a sin θ
    layout "half": a = x_i, b = x_{i+R/2}      "interleaved": a = x_{2i}, b = x_{2i+1}

    x (..., T, D)    R ≤ D features turn, the first ones    i = 0 … R/2 − 1

The score of a query at t and a key at s depends on t − s alone. Backward turns the other way.
Source: Su et al. 2021, "RoFormer", eq. 34.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.positions.frequencies import Frequencies, plain, read_number
from npattn.problem import checks
from npattn.problem.arrays import Array
from npattn.problem.descales import read_real
from npattn.problem.foreign import reject_unknown_options

__all__ = ["Layout", "Turn", "make_turn", "rope", "rope_backward", "turn_array", "turn_pairs"]

Layout = Literal["half", "interleaved"]
LAYOUTS = get_args(Layout)
BASE = 10000.0


@reject_unknown_options
def rope(
    x: ArrayLike,
    *, layout: Layout = "half", base: float = BASE, positions: ArrayLike | None = None,
    offset: float = 0, size: int | None = None, frequencies: Frequencies | None = None,
    sections: Sequence[int] | None = None, dtype: Any = None,
) -> Array:  # fmt: skip
    """Turn pairs of features by their position: queries and keys before attention.

    Parameters
    ----------
    x : float array_like (..., T, D)
        Queries or keys.
    layout : {"half", "interleaved"}, default "half"
        The partner of feature i is i + R/2 (Llama, GPT-NeoX), or its neighbour (GPT-J, RoFormer).
    base : float, default 10000.0
        Of the frequencies base^(−2i/R).
    positions : array_like (T,) or (..., T), optional
        Position of each vector; default offset, offset + 1, …. The longer form has every leading
        axis of x, or 1 in its place: (B, 1, T) beside (B, H, T, D). With `sections` it has one more
        axis, the first: the coordinates of a vector, such as time, height and width.
    offset : float, default 0
        Position of the first vector: the number of keys that a cache holds already.
    size : int, optional
        R, the number of features that turn, even; the others stay. Default D.
    frequencies : Frequencies, optional
        Of `npattn.positions.yarn` and the like, in place of `base` and `size`.
    sections : sequence of int, optional
        Number of pairs that turn by each coordinate, in order; they sum to R/2 (Qwen2-VL).
    dtype : dtype, optional
        Of the computation and the result; default float64, complex128 for complex x.

    Returns
    -------
    ndarray (..., T, D)

    Raises
    ------
    ShapeError
        If x has no axis T, or positions have neither of the two shapes.
    DtypeError
        If x is not floating, or positions are not real numbers.
    OptionError
        If R is odd or above D, the sections do not sum to R/2, `frequencies` come with a base or
        another size, `positions` with an offset, or an option has another illegal value.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import positions
    >>> positions.rope(np.array([[1.0, 0.0], [1.0, 0.0]])).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """
    array = checks.read_floating("x", x)
    turn = make_turn("x", array.shape, layout, base, positions, offset, size, frequencies, sections)
    return turn_array(array, turn, dtype)


@reject_unknown_options
def rope_backward(
    dout: ArrayLike,
    *, layout: Layout = "half", base: float = BASE, positions: ArrayLike | None = None,
    offset: float = 0, size: int | None = None, frequencies: Frequencies | None = None,
    sections: Sequence[int] | None = None, dtype: Any = None,
) -> Array:  # fmt: skip
    """Return the gradient of x from that of ``rope(x, ...)``, which has the same options.

    Parameters
    ----------
    dout : float array_like (..., T, D)
        Gradient of the result. The options are those of `rope`.

    Returns
    -------
    ndarray (..., T, D)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `rope`.
    """
    array = checks.read_floating("dout", dout)
    turn = make_turn(
        "dout", array.shape, layout, base, positions, offset, size, frequencies, sections
    )
    return turn_array(array, turn.inverse(), dtype)


class Turn(NamedTuple):
    """Cosine and sine of the angle of each pair, times the amplitude; and which pairs they are."""

    cos: Any  # (..., T, R/2), which broadcasts against x
    sin: Any
    first: slice  # of features
    second: slice

    def inverse(self) -> Turn:
        """Return the turn by the opposite angles, which is the transposed map."""
        return self._replace(sin=-self.sin)


def make_turn(
    name: str, shape: Sequence[int], layout: Any, base: Any, positions: Any, offset: Any, size: Any,
    frequencies: Any, sections: Any,
) -> Turn:  # fmt: skip
    """Check the options of `rope` for an array of this shape, and return what it multiplies by."""
    if len(shape) < 2:
        raise ShapeError(f"{name} has shape {tuple(shape)}, must be (..., T, D)")
    checks.check_choice("layout", layout, LAYOUTS)
    frequencies = _read_frequencies(shape[-1], base, size, frequencies)
    values = frequencies.values
    places = _read_positions(shape, positions, offset, sections is not None)
    if sections is None:
        angles = places[..., None] * values
    else:
        axes = _coordinates(sections, len(places), len(values))
        angles = np.moveaxis(places, 0, -1)[..., axes] * values
    R = 2 * len(values)
    halves = slice(0, R // 2), slice(R // 2, R)
    first, second = halves if layout == "half" else (slice(0, R, 2), slice(1, R, 2))
    a = frequencies.amplitude
    return Turn(a * np.cos(angles), a * np.sin(angles), first, second)


def turn_pairs(x: Any, out: Any, turn: Turn) -> Any:
    """Write the turned pairs of x into out, which holds the features that stay."""
    a, b = x[..., turn.first], x[..., turn.second]
    out[..., turn.first] = a * turn.cos - b * turn.sin
    out[..., turn.second] = b * turn.cos + a * turn.sin
    return out


def turn_array(x: Array, turn: Turn, dtype: Any) -> Array:
    """Turn the pairs of x in `dtype`."""
    wide, narrow = checks.check_dtype(dtype, "dense", (x,))
    if narrow is not None:
        raise DtypeError(
            f"dtype is {dtype!r}, must be float32, float64, longdouble, complex64 or complex128"
        )
    x = x.astype(wide)
    real = wide if wide.kind == "f" else np.zeros(0, wide).real.dtype
    cos, sin = turn.cos.astype(real), turn.sin.astype(real)
    return np.asarray(turn_pairs(x, x.copy(), turn._replace(cos=cos, sin=sin)))


def _read_frequencies(D: int, base: Any, size: Any, frequencies: Any) -> Frequencies:
    """Return the frequencies, by default those of base; raise if they turn more than D features."""
    if frequencies is None:
        R = D if size is None else checks.check_integer("size", size, 0)
        if R > D or R % 2:
            more = ": pass size=, the number of features that turn" if size is None else ""
            raise OptionError(f"size is {R}, must be even and at most D, which is {D}{more}")
        return plain(R, base=base)
    if not isinstance(frequencies, Frequencies):
        raise OptionError(
            f"frequencies is {frequencies!r}, must be Frequencies: npattn.positions.Frequencies(x)"
        )
    R = 2 * len(frequencies.values)
    if read_number("base", base) != BASE:
        raise OptionError(f"base is {base}, must not be given with frequencies, which have theirs")
    if size is not None and checks.check_integer("size", size, 0) != R:
        raise OptionError(f"size is {size}, must be {R} with these frequencies, or left out")
    if R > D:
        raise OptionError(f"frequencies turn {R} features, must be at most D, which is {D}")
    return frequencies


def _read_positions(shape: Sequence[int], positions: Any, offset: Any, sectioned: bool) -> Array:
    """Return positions that broadcast against (..., T); with sections, coordinates come first."""
    lead, first = tuple(shape[:-1]), read_number("offset", offset, -np.inf)
    if positions is None:
        if sectioned:
            raise OptionError("positions is None, must be given with sections: (P, T)")
        return first + np.arange(lead[-1])
    if first != 0:
        raise OptionError(f"offset is {offset!r}, must not be given with positions: add it to them")
    array = checks.read_array("positions", positions)
    if array.dtype.kind in "biu":
        if array.dtype.kind == "b":
            raise DtypeError("positions is bool, must be real numbers")
        array = array.astype(np.float64)
    array = read_real("positions", array).astype(np.float64)
    if not np.isfinite(array).all():
        raise OptionError("positions has NaN or inf, must be finite")
    axes = array.shape[1:] if sectioned else array.shape
    fits = len(axes) in (1, len(lead)) and all(
        n in (1, m) for n, m in zip(axes[::-1], lead[::-1], strict=False)
    )
    if not fits or not axes or axes[-1] != lead[-1]:
        before = "(P, ...) before " if sectioned else ""
        hint = ""
        if len(axes) == 2 and len(lead) == 3:
            hint = f": pass positions[{':, ' if sectioned else ''}:, None]"
        raise ShapeError(
            f"positions has shape {array.shape}, must be {before}({lead[-1]},) or {lead}, "
            f"with 1 for axes that share them{hint}"
        )
    return array


def _coordinates(sections: Any, count: int, pairs: int) -> Array:
    """Return the number of the coordinate that each pair turns by."""
    try:
        sizes = [checks.check_integer("a section", n, 0) for n in sections]
    except TypeError:
        raise OptionError(f"sections is {sections!r}, must be a sequence of integers") from None
    if sum(sizes) != pairs or len(sizes) != count:
        raise OptionError(
            f"sections is {sections!r}, must be {count} numbers, one for each row of positions, "
            f"that sum to R/2, which is {pairs}"
        )
    return np.repeat(np.arange(count), sizes)
