"""Masks: what a query may see, as boolean arrays for ``mask=`` (True = may attend)."""

from __future__ import annotations

from typing import get_args

import numpy as np

from npattn.errors import OptionError
from npattn.problem import Alignment, Array, integer

__all__ = ["causal"]


def causal(T: int, S: int | None = None, *, alignment: Alignment | None = None) -> Array:
    """Each query sees the keys up to its own.

    Parameters
    ----------
    T : int
        Queries.
    S : int, optional
        Keys; default T.
    alignment : {"bottom_right", "top_left"}, optional
        Query t sees keys s ≤ t + (S − T), or s ≤ t. Must be said where T ≠ S.

    Returns
    -------
    bool array (T, S)

    Raises
    ------
    OptionError

    Examples
    --------
    >>> from npattn import masks
    >>> masks.causal(2, 3, alignment="bottom_right")
    array([[ True,  True, False],
           [ True,  True,  True]])
    """
    T, S = integer("T", T, 0), integer("S", T if S is None else S, 0)
    if alignment is None and T != S:
        raise OptionError(
            f"alignment is None with T = {T} queries and S = {S} keys, which is ambiguous: "
            'say alignment="bottom_right" (the last query sees the last key) or "top_left"'
        )
    if alignment is not None and alignment not in get_args(Alignment):
        raise OptionError(f"alignment is {alignment!r}, must be one of {get_args(Alignment)}")
    offset = S - T if alignment == "bottom_right" else 0
    return np.asarray(np.arange(S) <= np.arange(T)[:, None] + offset)
