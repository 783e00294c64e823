"""Random rounding of what a function computes on its way, where its framework lets it be seen.

Each array result x of an arithmetic operation becomes x + u |x| ξ + η ξ', with ξ, ξ' uniform in
(−1, 1): u is the unit roundoff, and η half the smallest number, of the dtype that is imitated. In a
sum of terms, or of products, each term is rounded too: that is u √(Σ term²) more. Selections,
signs, copies and products with powers of two are exact; what numbers decide is decided once
(`decisions`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.reference.decisions import Decisions
from npattn.testing.reference.noise import Noise, find_exact

SUMS = {"einsum", "dot", "inner", "vdot", "tensordot"}
"""Functions of NumPy that sum products, and are no ufuncs."""


class Rounded(np.ndarray[Any, Any]):
    """Array whose arithmetic is rounded at random, and whose decisions are those of a run."""

    run: Run | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.run = getattr(source, "run", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Compute on plain arrays, and round what is no comparison, sign or choice."""
        run = next(x.run for x in (*inputs, *kwargs.get("out", ())) if isinstance(x, Rounded))
        out = kwargs.pop("out", ())
        plain = [_plain(x) for x in inputs]
        if out:
            kwargs["out"] = tuple(_plain(x) for x in out)
        chosen = _choose(run, ufunc, method, plain, kwargs) if run is not None else None
        if chosen is not None:
            for x in kwargs.get("out", ()):
                x[...] = chosen
            return out[0] if out else _wrap(chosen, run, True)
        exact, terms, where = ufunc in EXACT or run is None or run.noise is None, None, None
        if run is not None and (ufunc is np.matmul or (ufunc is np.add and method != "__call__")):
            run.lengths.add(_count_terms(ufunc, method, plain, kwargs))
        if not exact and ((ufunc is np.add and method != "__call__") or ufunc is np.matmul):
            terms = _root(getattr(ufunc, method), plain, {**kwargs, "out": None} if out else kwargs)
        if not exact and method == "__call__":
            where = ufunc.__name__, [np.array(x, np.float64) for x in plain[:2]]
            if ufunc in (np.add, np.subtract):
                with np.errstate(all="ignore"):
                    terms = np.hypot(*where[1])
        result = getattr(ufunc, method)(*plain, **kwargs)
        if method == "at" and not exact:
            first = plain[0]
            first[...] = run.noise.round(first, None if terms is None else terms)  # type: ignore
            return None
        if method == "reduce" and ufunc is np.add and np.size(result) == np.size(plain[0]):
            exact = True  # one term each
        if out:
            for x in kwargs["out"]:
                if not exact and x.dtype == np.float64:
                    x[...] = run.noise.round(x, terms, _find_exact(where, x))  # type: ignore
            return out[0] if len(out) == 1 else out
        if isinstance(result, tuple):
            return tuple(_wrap(x, run, exact) for x in result)
        return _wrap(result, run, exact, terms, where)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Round the results of sums of products; other functions call ufuncs, or only move."""
        name = getattr(func, "__name__", "")
        if name in SUMS:
            plain = [[*map(_plain, x)] if isinstance(x, (list, tuple)) else _plain(x) for x in args]
            terms = _root(func, plain, kwargs)
            if self.run is not None:  # the largest that it may be
                self.run.lengths.add(max((np.size(x) for x in plain[0:3]), default=1))
            return _wrap(func(*plain, **kwargs), self.run, False, terms)
        result = super().__array_function__(func, types, args, kwargs)
        if isinstance(result, (tuple, list)):
            make = getattr(type(result), "_make", type(result))  # of named results, as qr's
            return make(_wrap(x, self.run, True) for x in result)
        return _wrap(result, self.run, True)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave out a cast to a narrower dtype, and note it."""
        target = np.dtype(dtype)
        if (
            self.run is not None
            and self.dtype == np.float64
            and target.kind in "fV"
            and target != self.dtype
        ):
            self.run.narrowed.add(target.name)
            return self.copy()
        result = super().astype(dtype, *args, **kwargs)
        if target.kind in "biu" and self.run is not None:
            return self.run.decide("fixed", None, lambda _: _plain(result))
        return result

    def argmax(self, axis: Any = None, out: Any = None, **kwargs: Any) -> Any:
        return self._index(np.argmax, axis, **kwargs)

    def argmin(self, axis: Any = None, out: Any = None, **kwargs: Any) -> Any:
        return self._index(np.argmin, axis, **kwargs)

    def argsort(self, axis: Any = -1, *args: Any, **kwargs: Any) -> Any:
        return self._index(np.argsort, axis, **kwargs)

    def sort(self, axis: Any = -1, *args: Any, **kwargs: Any) -> None:
        """Sort in place, in the order of the run."""
        plain = _plain(self)
        plain[...] = np.take_along_axis(plain, self._index(np.argsort, axis), axis)

    def _index(self, find: Callable[..., Any], axis: Any, **kwargs: Any) -> Any:
        if self.run is None:
            return find(_plain(self), axis=axis, **kwargs)
        return _find_index(self.run, _plain(self), find, axis, **kwargs)


@dataclass
class Run:
    """One evaluation: its rounding, its decisions, and the narrower dtypes that it casts to."""

    noise: Noise | None
    decisions: Decisions
    narrowed: set[str] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)

    def decide(self, *args: Any) -> Any:
        return self.decisions.decide(*args)


EXACT = {
    np.negative, np.positive, np.isnan, np.isinf, np.isfinite, np.copysign, np.ldexp, np.sign,
    np.rint, np.floor, np.ceil, np.trunc, np.absolute, np.fabs, np.maximum, np.minimum, np.fmax,
    np.fmin, np.conjugate, np.signbit,
}  # fmt: skip
"""Ufuncs that round nothing."""
COMPARE = {np.greater, np.less, np.greater_equal, np.less_equal, np.equal, np.not_equal}
STEPS = {np.sign, np.rint, np.floor, np.ceil, np.trunc}
"""Ufuncs that are constant but for jumps."""


def _choose(run: Run, ufunc: Any, method: str, inputs: Any, kwargs: Any) -> Any:
    """Return the result of a comparison, step or choice by the decisions of the run, or None."""
    if method == "reduce" and ufunc in (np.maximum, np.minimum, np.fmax, np.fmin):
        return _extremum(run, ufunc, inputs[0], kwargs)
    if method != "__call__":
        return None
    plain = {n: x for n, x in kwargs.items() if n != "out"}
    if ufunc in COMPARE:
        result = np.asarray(ufunc(*inputs, **plain))
        with np.errstate(all="ignore"):
            a, b = (np.asarray(x, np.float64) for x in inputs)
            gap = np.broadcast_to(a - b, result.shape)
        kind = "fixed" if ufunc in (np.equal, np.not_equal) else "compare"
        return run.decide(kind, gap, lambda _: result)
    if ufunc in STEPS and np.asarray(inputs[0]).dtype == np.float64:
        return run.decide("step", np.asarray(inputs[0]), lambda x: np.asarray(ufunc(x, **plain)))
    if ufunc in (np.absolute, np.fabs):
        x = np.asarray(inputs[0])
        return np.where(run.decide("compare", x, lambda _: x < 0), -x, x)
    if ufunc in (np.maximum, np.minimum, np.fmax, np.fmin):
        a, b = (np.asarray(x) for x in inputs)
        least = ufunc in (np.minimum, np.fmin)
        with np.errstate(all="ignore"):
            gap = np.asarray(b - a if least else a - b, np.float64)
            first = (a <= b if least else a >= b) | (a != a)
        return np.where(run.decide("compare", gap, lambda _: np.asarray(first)), a, b)
    if ufunc.__name__ == "clip":  # np.clip is another function, which calls this one
        x, low, high = inputs
        x = _choose(run, np.maximum, method, [x, low], {})
        return _choose(run, np.minimum, method, [x, high], {})
    return None


def _count_terms(ufunc: Any, method: str, inputs: Any, kwargs: Any) -> int:
    """Return the number of terms of the sums of matmul, of a reduction, accumulation or `at`."""
    if method == "at":  # the largest that it may be
        return max(map(np.size, inputs[1:]))
    shape = np.shape(inputs[-1] if ufunc is np.matmul else inputs[0])
    if ufunc is np.matmul:
        return int(shape[-2] if len(shape) > 1 else shape[0])
    axis = kwargs.get("axis", 0)
    axes = range(len(shape)) if axis is None else [axis] if isinstance(axis, int) else axis
    return math.prod(shape[n] for n in axes) if shape else 1


def _extremum(run: Run, ufunc: Any, x: Array, kwargs: Any) -> Any:
    """Return the maxima or minima of x, of any shape, over axes, by the index of the run."""
    axis, keep = kwargs.get("axis", 0), kwargs.get("keepdims", False)
    axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    axes = sorted(n % max(x.ndim, 1) for n in axes)
    others = [n for n in range(x.ndim) if n not in axes]
    if kwargs.get("where", True) is not True or not x.ndim:
        return None
    flat = x.transpose(*others, *axes).reshape([*(x.shape[n] for n in others), -1])
    find = np.argmin if ufunc in (np.minimum, np.fmin) else np.argmax
    i = _find_index(run, flat, find, -1, keepdims=True)
    values = np.take_along_axis(flat, i, -1)[..., 0]
    shape = [1 if n in axes else x.shape[n] for n in range(x.ndim)]
    values = values.reshape(shape) if keep else values
    if "initial" in kwargs:
        return _choose(run, ufunc, "__call__", [values, kwargs["initial"]], {})
    return values


def _find_index(run: Run, x: Array, find: Callable[..., Any], axis: Any, **kwargs: Any) -> Any:
    """Return indices along an axis of x, of any shape, by the decisions of the run."""
    order, least = find is np.argsort, find is np.argmin

    def sign(chosen: Any) -> Array:
        """Move the chosen down, and others up; in an order, every other element."""
        flat = np.ones(x.size if axis is None else x.shape)
        at, dim = np.asarray(chosen), 0 if axis is None else axis
        if axis is None:
            at = at.reshape(-1)
        elif at.ndim < x.ndim:
            at = np.expand_dims(at, axis)
        ranks = np.arange(at.shape[dim]).reshape([-1, *[1] * (at.ndim - 1 - dim % at.ndim)])
        side = np.where((ranks + run.decisions.parity) % 2 == 0, -1.0, 1.0) if order else -1.0
        np.put_along_axis(flat, at, np.broadcast_to(side, at.shape), dim)
        return (-flat if least else flat).reshape(x.shape)

    return run.decide("choose", x, lambda y: find(y, axis=axis, **kwargs), sign)


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, Rounded) else x


def _root(sum_of: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return √(Σ term²) of a sum of terms, or of products of its arguments."""
    squares = [x * x if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in args]
    with np.errstate(all="ignore"):
        result = sum_of(*squares, **kwargs)
        return np.sqrt(squares[0] if result is None else result)  # `at` adds to its argument


def _wrap(x: Any, run: Run | None, exact: bool, terms: Any = None, where: Any = None) -> Any:
    """Return a float64 result as a rounded array, in which no more is rounded if it is exact."""
    if not isinstance(x, (np.ndarray, np.float64)) or x.dtype != np.float64:
        return x
    plain = np.asarray(x).view(np.ndarray)
    if not (exact or run is None or run.noise is None):
        plain = run.noise.round(plain, terms, _find_exact(where, plain))
    rounded = plain.view(Rounded)
    rounded.run = run
    return rounded


def _find_exact(where: Any, x: Array) -> Any:
    return None if where is None else find_exact(where[0], where[1], x.shape)


class Watched:
    """A function whose arithmetic is rounded at random while `running` is entered."""

    def __init__(self, f: Callable[..., Any], framework: str) -> None:
        functools.update_wrapper(self, f)
        self.f, self.framework = f, framework
        self.run: Run | None = None
        self.mode: Any = None
        self.narrowed: set[str] = set()  # narrower dtypes, casts to which were left out
        self.lengths: set[int] = set()  # numbers of terms of its sums, in the last run
        self.takes_maxima = False  # the last run took a maximum along an axis, of torch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.f, *args, **kwargs)

    def watch(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return another function, its backward say, whose arithmetic is rounded as well."""
        return functools.wraps(backward)(functools.partial(self._call, backward))

    def _call(self, f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.mode is not None:
            self.mode.follow([*args, *kwargs.values()])
        if self.run is None or self.framework != "numpy":
            return f(*args, **kwargs)
        watch = functools.partial(_wrap, run=self.run, exact=True)
        result = f(*map(watch, args), **{n: watch(x) for n, x in kwargs.items()})
        if isinstance(result, dict):
            return {name: _plain(x) for name, x in result.items()}
        return tuple(map(_plain, result)) if isinstance(result, (tuple, list)) else _plain(result)

    @property
    def is_seen(self) -> bool:
        """True if operations of its framework can be seen one by one."""
        return self.framework in ("numpy", "torch")

    @contextmanager
    def running(
        self, noise: Noise | None, decisions: Decisions, *, detached: bool = False
    ) -> Iterator[None]:
        """Round its intermediates, and those of its autograd, as long as this is entered.

        Without noise the decisions alone are recorded, repeated or turned. `detached` takes maxima
        of torch as constants.
        """
        if not self.is_seen:
            yield
            return
        self.run = Run(noise, decisions)
        try:
            if self.framework != "torch":
                yield
                self.narrowed |= self.run.narrowed
                self.lengths = self.run.lengths
                return
            from npattn.testing.reference.dispatch import (  # loads torch
                CallMode,
                RoundingMode,
                unfuse_attention,
            )

            with ExitStack() as stack:
                stack.enter_context(unfuse_attention())
                self.mode = stack.enter_context(RoundingMode(noise, decisions))
                stack.enter_context(CallMode(self.mode, detached))
                yield
                self.narrowed |= self.mode.narrowed
                self.lengths, self.takes_maxima = self.mode.lengths, self.mode.takes_maxima
        finally:
            self.run = self.mode = None
