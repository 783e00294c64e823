"""Positions that are added: to the input as vectors, or to the scores by the distance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.positions.frequencies import read_number
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer, read_array, read_floating

__all__ = ["alibi_slopes", "look_up", "look_up_backward", "sinusoidal"]


def sinusoidal(T: int, D: int, *, base: float = 10000.0, offset: float = 0) -> Array:
    """Vectors of sines and cosines: column 2i is sin(t · base^(−2i/D)), column 2i + 1 the cosine.

    Source: Vaswani et al. 2017, section 3.5.

    Parameters
    ----------
    T : int
        Number of positions.
    D : int
        Size of a vector; of an odd one the last column is a sine.
    base : float, default 10000.0
    offset : float, default 0
        First position.

    Returns
    -------
    ndarray (T, D) of float64
        It has no parameter; the gradient of the input that it is added to passes unchanged.

    Raises
    ------
    OptionError
        If a size is not an integer ≥ 0, `base` not positive, or a number not finite.

    Examples
    --------
    >>> from npattn import positions
    >>> positions.sinusoidal(2, 4).round(2)
    array([[0.  , 1.  , 0.  , 1.  ],
           [0.84, 0.54, 0.01, 1.  ]])
    """
    T, D = check_integer("T", T, 0), check_integer("D", D, 0)
    t = read_number("offset", offset, -np.inf) + np.arange(T)
    angles = t[:, None] * read_number("base", base) ** (-np.arange(0, D, 2) / max(D, 1))
    out = np.empty((T, D))
    out[:, 0::2], out[:, 1::2] = np.sin(angles), np.cos(angles[:, : D // 2])
    return out


def look_up(table: ArrayLike, positions: ArrayLike) -> Array:
    """Look up the vector of each position: ``table[positions]``, without negative ones.

    Parameters
    ----------
    table : float array_like (N, D)
    positions : int array_like (...)
        From 0 to N − 1. ``np.arange(T) + 2`` for tables that begin with two rows for padding.

    Returns
    -------
    ndarray (..., D) of the dtype of the table

    Raises
    ------
    ShapeError
        If the table is not of rank 2.
    DtypeError
        If the table is not floating, or positions are not integers.
    OptionError
        If a position is negative, or the table has no row for it.
    """
    array = read_floating("table", table)
    if array.ndim != 2:
        raise ShapeError(f"table has shape {array.shape}, must be (N, D)")
    return np.asarray(array[_read_rows(positions, len(array))])


def look_up_backward(dout: ArrayLike, positions: ArrayLike, *, N: int) -> Array:
    """Return the gradient of the table from that of ``look_up(table, positions)``.

    Parameters
    ----------
    dout : float array_like (..., D)
    positions : int array_like (...)
    N : int
        Number of rows of the table.

    Returns
    -------
    ndarray (N, D) of float64, or complex128 for complex gradients
        Rows that are looked up several times have the sum; those that are not have 0.

    Raises
    ------
    ShapeError
        If `dout` has not the shape of positions and one axis more.
    DtypeError, OptionError
        As `look_up`.
    """
    rows, array = _read_rows(positions, check_integer("N", N, 0)), read_floating("dout", dout)
    if array.ndim != rows.ndim + 1 or array.shape[:-1] != rows.shape:
        raise ShapeError(f"dout has shape {array.shape}, must be {(*rows.shape, 'D')}")
    out = np.zeros((N, array.shape[-1]), np.result_type(array.dtype, np.float64))
    np.add.at(out, rows, array.astype(out.dtype))
    return out


def alibi_slopes(H: int) -> Array:
    """Slopes of ALiBi, one a head: 2^(−8/H), 2^(−16/H), …. Source: Press et al. 2022.

    Where H is no power of two: those of the power of two below, then every second one of that
    above, as in the code of the paper.

    Parameters
    ----------
    H : int
        Number of heads.

    Returns
    -------
    ndarray (H,) of float64

    Raises
    ------
    OptionError
        If H is not an integer ≥ 1.

    Examples
    --------
    >>> from npattn import positions
    >>> positions.alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    H = check_integer("H", H)
    below = 2 ** (H.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / below) for h in range(below)]
    slopes += [2 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * (H - below), 2)]
    return np.array(slopes)


def _read_rows(positions: Any, N: int) -> Array:
    rows = read_array("positions", positions)
    if rows.dtype.kind not in "iu" and rows.size:
        raise DtypeError(f"positions is {rows.dtype}, must be integers")
    if rows.size and not (rows.min() >= 0 and rows.max() < N):
        raise OptionError(
            f"positions has {rows.min()} to {rows.max()}, must be 0 to {N - 1}: "
            "the table has no other rows"
        )
    return rows.astype(np.int64)
