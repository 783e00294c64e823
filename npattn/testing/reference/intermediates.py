"""Random rounding of what a function computes on its way, where its framework lets it be seen.

Each array result x of an arithmetic operation becomes x + u |x| ξ + η ξ', with ξ, ξ' uniform in
(−1, 1): u is the unit roundoff, and η half the smallest number, of the dtype that is imitated. In a
sum of terms, or of products, each term is rounded too: that is u √(Σ term²) more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from npattn.testing.reference.noise import Noise

SUMS = {"einsum", "dot", "inner", "vdot", "tensordot"}
"""Functions of NumPy that sum products, and are no ufuncs."""


class Rounded(np.ndarray[Any, Any]):
    """Array whose arithmetic is rounded at random."""

    noise: Noise | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.noise = getattr(source, "noise", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Compute on plain arrays, and round what is no comparison, sign or choice."""
        out = kwargs.pop("out", ())
        plain = [_plain(x) for x in inputs]
        if out:
            kwargs["out"] = tuple(_plain(x) for x in out)
        result = getattr(ufunc, method)(*plain, **kwargs)
        noise = next(x.noise for x in (*inputs, *out) if isinstance(x, Rounded))
        exact, terms = ufunc in EXACT, None
        if (ufunc is np.add and method != "__call__") or ufunc is np.matmul:
            terms = _root(getattr(ufunc, method), plain, {**kwargs, "out": None} if out else kwargs)
        if out:
            for x in kwargs["out"]:
                if not exact and x.dtype == np.float64:
                    x[...] = noise.round(x, terms)  # type: ignore[union-attr]
            return out[0] if len(out) == 1 else out
        if isinstance(result, tuple):
            return tuple(_wrap(x, noise, exact) for x in result)
        return _wrap(result, noise, exact, terms)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Round the results of sums of products; other functions call ufuncs, or only move."""
        if getattr(func, "__name__", "") in SUMS:
            plain = [[*map(_plain, x)] if isinstance(x, (list, tuple)) else _plain(x) for x in args]
            terms = _root(func, plain, kwargs)
            return _wrap(func(*plain, **kwargs), self.noise, False, terms)
        result = super().__array_function__(func, types, args, kwargs)
        if isinstance(result, (tuple, list)):
            return type(result)(_wrap(x, self.noise, True) for x in result)
        return _wrap(result, self.noise, True)


EXACT = {np.maximum, np.minimum, np.negative, np.absolute, np.sign, np.isnan, np.fmax, np.fmin}
"""Ufuncs that round nothing."""


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, Rounded) else x


def _root(sum_of: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return √(Σ term²) of a sum of terms, or of products of its arguments."""
    squares = [x * x if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in args]
    with np.errstate(all="ignore"):
        return np.sqrt(sum_of(*squares, **kwargs))


def _wrap(x: Any, noise: Noise | None, exact: bool, terms: Any = None) -> Any:
    """Return a float64 result as a rounded array, in which no more is rounded if it is exact."""
    if not isinstance(x, (np.ndarray, np.float64)) or x.dtype != np.float64:
        return x
    plain = np.asarray(x).view(np.ndarray)
    own = (plain if exact or noise is None else noise.round(plain, terms)).view(Rounded)
    own.noise = noise
    return own


class Watched:
    """A function whose arithmetic is rounded at random while `rounding` is entered."""

    def __init__(self, f: Callable[..., Any], framework: str) -> None:
        functools.update_wrapper(self, f)
        self.f, self.framework = f, framework
        self.noise: Noise | None = None
        self.mode: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.mode is not None:
            self.mode.follow([*args, *kwargs.values()])
        if self.noise is None or self.framework != "numpy":
            return self.f(*args, **kwargs)
        watch = functools.partial(_wrap, noise=self.noise, exact=True)
        result = self.f(*map(watch, args), **{n: watch(x) for n, x in kwargs.items()})
        if isinstance(result, dict):
            return {name: _plain(x) for name, x in result.items()}
        return tuple(map(_plain, result)) if isinstance(result, (tuple, list)) else _plain(result)

    @property
    def is_seen(self) -> bool:
        """True if operations of its framework can be seen one by one."""
        return self.framework in ("numpy", "torch")

    @contextmanager
    def rounding(self, noise: Noise) -> Iterator[None]:
        """Round its intermediates, and those of its autograd, as long as this is entered."""
        self.noise = noise
        try:
            if self.framework != "torch":
                yield
                return
            from npattn.testing.reference.dispatch import RoundingMode  # loads torch

            with RoundingMode(noise) as self.mode:
                yield
        finally:
            self.noise = self.mode = None
