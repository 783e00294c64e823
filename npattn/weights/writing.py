"""Shared by the exporters: what a framework has a place for, and the dtype of its arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  # NumPy then knows "bfloat16"
import numpy as np

from npattn.arrays import Array, cast
from npattn.errors import DtypeError, OptionError
from npattn.multihead import MultiHeadAttention
from npattn.weights.files import DTYPES
from npattn.weights.reading import join_names

__all__ = ["check_fits", "check_held", "heads_apart", "read_parameters"]

BIASES = ("bq", "bk", "bv", "bo")


def check_fits(
    function: str,
    mha: MultiHeadAttention,
    *own: tuple[bool, str],
    shares_heads: bool = False,
    separate_biases: bool = False,
    value_size: bool = False,
    norms: bool = False,
) -> None:
    """Raise OptionError at the first part of `mha` that a framework has no place for.

    The keywords say what it has a place for; `own` are further conditions, with their messages.
    """
    H, K, D, E = mha.num_heads, mha.num_kv_heads, mha.head_size, mha.value_size
    some = len({getattr(mha, name) is None for name in BIASES}) > 1
    for wrong, message in (
        (mha.wo is None, "wo is None; the heads are always projected there"),
        (mha.bias_k is not None, "got bias_k and bias_v; no keys are appended there"),
        (bool(mha.add_zero_attn), "add_zero_attn is True; no keys are appended there"),
        (mha.merge != "concat", f'merge is {mha.merge!r}, must be "concat"'),
        (
            K != H and not shares_heads,
            f"num_kv_heads is {K}, must be {H} as num_heads: none are shared there "
            "(mha.unshared())",
        ),
        (
            E != D and not value_size,
            f"heads of values have size {E}, must be {D} as those of queries",
        ),
        (
            some and not separate_biases,
            "got some of bq, bk, bv, bo; all or none are there (a missing one can be zeros)",
        ),
        (
            mha.qk_norm is not None and not norms,
            f"qk_norm is {mha.qk_norm!r}, must be None: heads are not normalised there",
        ),
        (0 in (D, E), f"heads have sizes {D} and {E}, must be 1 or more"),
        *own,
    ):
        if wrong:
            raise OptionError(f"{message} [{function} of {mha!r}]")


def read_parameters(function: str, mha: MultiHeadAttention, dtype: Any) -> dict[str, Array]:
    """Return copies of all parameters in one dtype: their own, or this one, rounded once."""
    names = sorted({x.dtype.name for x in mha.parameters.values()})
    if dtype is None and len(names) > 1:
        raise OptionError(f"parameters are {join_names(names)}, must be one: pass dtype=")
    try:
        wanted = np.dtype(names[0] if dtype is None else dtype)
    except TypeError as err:
        raise DtypeError(
            f"dtype is {dtype!r}, must be one of {join_names(DTYPES.values())}"
        ) from err
    if wanted not in DTYPES.values():
        raise DtypeError(f"dtype is {wanted}, must be one of {join_names(DTYPES.values())}")
    arrays = {}
    for name, x in mha.parameters.items():
        if x.dtype.kind == "c":
            raise DtypeError(f"{name} is {x.dtype}, must be real")
        with np.errstate(over="ignore", invalid="ignore"):  # NaN stays NaN
            arrays[name] = np.array(cast(x, wanted), order="C")
            overflow = (np.isinf(arrays[name]) & ~np.isinf(x)).any()
        if overflow:
            raise OptionError(f"{name} has numbers beyond the range of {wanted} [{function}]")
    return arrays


def heads_apart(mha: MultiHeadAttention, arrays: dict[str, Array]) -> dict[str, Array]:
    """Give heads an axis: query (in_q, H, D), its bias (H, D), ..., out (H, E, out)."""
    sizes = {"q": mha.head_size, "k": mha.head_size, "v": mha.value_size}
    split = {}
    for name, x in arrays.items():
        if name in ("wq", "wk", "wv", "bq", "bk", "bv"):
            x = x.reshape(*x.shape[:-1], -1, sizes[name[1]])
        split[name] = x.reshape(-1, mha.value_size, x.shape[-1]) if name == "wo" else x
    return split


def check_held(function: str, held: Any, array: Array) -> None:
    """Check that a framework holds an array in its dtype: JAX makes float64 float32."""
    actual = str(held.dtype).removeprefix("torch.")
    if actual != array.dtype.name:
        raise OptionError(
            f"a parameter is {array.dtype}, but {function} can only hold it as {actual}: pass "
            f"dtype={actual!r}, or call jax.config.update('jax_enable_x64', True)"
        )
