"""Positions on torch tensors: `rope`, differentiable by autograd, and what goes with it.

Angles, and everything without an x, are computed by NumPy in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike

from npattn.errors import DtypeError
from npattn.positions import (
    Frequencies,
    Rotary,
    alibi_slopes,
    dynamic_ntk,
    linear,
    llama3,
    longrope,
    ntk,
    plain,
    sinusoidal,
    yarn,
)
from npattn.positions.rotary import BASE, Layout, make_turn, turn_pairs
from npattn.problem.checks import check_dtype, read_floating
from npattn.torch.tensors import has_float64, short_name, stand_in, to_host, to_tensor

__all__ = [
    "Frequencies", "Rotary", "alibi_slopes", "dynamic_ntk", "linear", "llama3", "longrope", "ntk",
    "plain", "rope", "sinusoidal", "yarn",
]  # fmt: skip

Tensor = torch.Tensor


def rope(
    x: Tensor,
    *, layout: Layout = "half", base: float = BASE, positions: ArrayLike | Tensor | None = None,
    offset: float = 0, size: int | None = None, frequencies: Frequencies | None = None,
    sections: Sequence[int] | None = None, dtype: Any = None,
) -> Tensor:  # fmt: skip
    """Turn pairs of features by their position, as `npattn.positions.rope`.

    Parameters
    ----------
    x : Tensor (..., T, D)
        Of a floating dtype, on any device. The other options are those of
        `npattn.positions.rope`; positions may be a tensor, and get no gradient.
    dtype : torch.dtype or dtype, optional
        Of the computation and the result: float64 (float32 where the device lacks it) or float32.

    Returns
    -------
    Tensor (..., T, D)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.positions.rope`.
    """
    if not isinstance(x, Tensor):
        raise DtypeError(f"x is {type(x).__name__}, must be a tensor: use npattn.positions.rope")
    host_x = read_floating("x", stand_in("x", x))
    name = short_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    wide, narrow = check_dtype(name, "dense", (host_x,))
    if narrow is not None or wide not in ("f4", "f8"):
        raise DtypeError(f"dtype is {dtype!r}, must be float32 or float64, and x real")
    if isinstance(positions, Tensor):
        positions = to_host(positions)
    turn = make_turn("x", x.shape, layout, base, positions, offset, size, frequencies, sections)
    computed = torch.float64 if wide == "f8" and has_float64(x.device.type) else torch.float32
    cos, sin = (to_tensor(n, x.device).to(computed) for n in (turn.cos, turn.sin))
    x = x.to(computed)
    out: Tensor = turn_pairs(x, x.clone(), turn._replace(cos=cos, sin=sin))
    return out
