"""Results and gradients of a call, by npattn's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from npattn.meanings import LATENT
from npattn.options import RESULTS
from npattn.testing.adapters.base import ResultError
from npattn.testing.adapters.signature import Signature

__all__ = ["LEAVES", "count_results", "name_gradients", "name_results"]

INPUTS = ("q", "k", "v", "bias", "sinks", "gate")
LEAVES = (*INPUTS, "qkv", "kv", LATENT[0])
"""Inputs that have a gradient."""


def count_results(signature: Signature, returns: tuple[str, ...]) -> list[int | None]:
    """Return how many results a call may return: 0 stands for a bare o, None for any more."""
    if not returns:
        pairs = signature.module or "need_weights" in signature.meanings.values()
        return [0, 2] if pairs else [0]
    theirs = {signature.names.get(n, n) for n in returns}
    return [1 + len(returns), *([] if theirs <= set(RESULTS) else [None])]  # of other systems


def name_results(signature: Signature, value: Any, returns: tuple[str, ...]) -> dict[str, Any]:
    """Return what a call returned, by npattn's names.

    Raises
    ------
    ResultError
        If it returned fewer results than were asked for; or more, unasked or under npattn's own
        flags.
    """
    names = ["o", *(n.removeprefix("return_") for n in RESULTS if n in returns)]
    several = isinstance(value, (tuple, list))
    count, allowed = len(value) if several else 0, count_results(signature, returns)
    is_allowed = count in allowed or (None in allowed and count > len(names))
    if not returns:
        if several and (not count or not is_allowed):
            raise ResultError(
                f"returned a tuple or list of {count}, must return o alone; more only "
                "where a parameter asks for it, as return_lse=True does for (o, lse)"
            )
        return {"o": value[0] if several else value}
    if not is_allowed:
        got = f"{count} results" if several else "one result"
        flags = ", ".join(f"{signature.names.get(n, n)}=True" for n in returns)
        raise ResultError(f"returned {got} for {flags}, must return ({', '.join(names)})")
    return dict(zip(names, value, strict=False))


def name_gradients(
    signature: Signature,
    grads: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return gradients by npattn's names; that of a parameter for mask and bias is dbias.

    Raises
    ------
    ResultError
        If one is of no input that has a gradient.
    """
    carries = signature.carries.items()
    ours = {theirs: [n for n in names if n in LEAVES] for theirs, names in carries}
    named = {}
    for theirs, gradient in grads.items():
        name = next(iter(ours.get(theirs, ())), theirs)
        if name not in LEAVES:
            raise ResultError(f"backward returned {theirs}, must be among {', '.join(INPUTS)}")
        if hasattr(gradient, "ndim") and name == "gate" and gradient.ndim == 1:
            gradient = gradient.reshape(inputs["gate"].shape)  # of a head mask
        if hasattr(gradient, "ndim") and name == "bias" and "mask" in inputs:
            gradient = _fold_to_shape(gradient, tuple(inputs["bias"].shape))
        if gradient is not None:
            named[f"d{name}"] = gradient
    return named


def _fold_to_shape(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum a gradient over the axes that its input broadcast along."""
    wide = {"dtype": np.float64} if isinstance(gradient, np.ndarray) else {}
    folded = gradient
    while folded.ndim > len(shape):
        folded = folded.sum(0, **wide)
    for axis, size in enumerate(shape):
        if size == 1 and folded.shape[axis] != 1:
            folded = folded.sum(axis, keepdims=True, **wide)
    return folded.astype(gradient.dtype) if wide else folded
