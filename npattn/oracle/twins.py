"""One function on NumPy arrays and on torch tensors: its first argument, xp, is their library.

    @on_arrays
    def f(xp, q, ...)         npattn.f(q, ...) on arrays; npattn.torch binds f to `Tensors`

What differs between the two is here, as functions of NumPy, and in `npattn.torch.twins`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from npattn.conventions import check_conventions
from npattn.errors import DtypeError, NpattnError
from npattn.oracle import api
from npattn.oracle.signatures import bind
from npattn.positions import rope
from npattn.problem import Forward, Problem
from npattn.problem.arrays import Array, cast
from npattn.problem.checks import check_dtype, read_boolean, read_floating

P = ParamSpec("P")
R = TypeVar("R")


class Arrays:
    """Functions on NumPy arrays, and attention on them."""

    LIBRARY: Any = np
    reads_numbers = True
    """True if a check may look at the numbers of an array."""
    ENGINE = "dense"
    WIDE = "float32, float64 or complex"
    Problem: Any = Problem
    problem: Any = Problem
    forward: Any = staticmethod(api.forward)
    evaluate: Any = staticmethod(api.evaluate)
    rope: Any = staticmethod(rope)
    add_parts: Any = staticmethod(sum)  # one after another
    contiguous: Any = staticmethod(np.ascontiguousarray)

    def __getattr__(self, name: str) -> Any:
        """Return a function that NumPy and torch call alike."""
        return getattr(self.LIBRARY, name)

    def read(self, beside: Any = None, **values: Any) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return floating arrays by name, and arrays of their shapes and dtypes for checks."""
        arrays = {name: read_floating(name, x) for name, x in values.items()}
        return arrays, arrays

    def read_boolean(self, name: str, x: Any) -> Any:
        return read_boolean(name, x)

    def compute_dtype(self, dtype: Any, arrays: Iterable[Array], like: Any) -> Any:
        """Return the dtype to compute in. Raises DtypeError if it is a narrow one."""
        wide, narrow = check_dtype(dtype, "dense", tuple(arrays))
        if narrow is not None:
            raise DtypeError(f"dtype is {narrow}, must be float32, float64, longdouble or complex")
        return wide

    # --- conversions ------------------------------------------------------------------------------

    def astype(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype, copy=False)

    def widen(self, x: Any, like: Any) -> Any:
        """Return x in the dtype of `like`; complex numbers stay so."""
        return x.astype(widen(like.dtype, x), copy=False)

    def at_least_float64(self, x: Any) -> Any:
        return x if x.dtype.kind == "c" else x.astype(np.float64)

    def to_rank(self, x: Any) -> Any:
        """Return x in a dtype of the same order, without gradient."""
        return x.astype(np.float64)

    def largest(self, x: Any, n: int) -> tuple[Any, Any]:
        """Return the n largest numbers of each row and their indices; of equal ones the first."""
        order = np.argsort(-x, axis=-1, kind="stable")[..., :n]
        return np.take_along_axis(x, order, -1), order

    def widest(self, x: Any) -> Any:
        """Return x in float64, or in the widest dtype of its device."""
        return x.astype(np.float64, copy=False)

    def on_host(self, x: Any) -> Any:
        """Return integers, which get no gradient, as NumPy reads them."""
        return x

    def indices(self, arrays: Iterable[Array], like: Any) -> tuple[Any, ...]:
        """Return arrays of integers beside `like`."""
        return tuple(arrays)

    def check_dtype(self, dtype: Any) -> None:
        """Check a dtype of linear attention, which its problem checks too."""

    def name_dtype(self, dtype: Any) -> Any:
        """Return a dtype of the library as NumPy reads it."""
        return dtype

    def read_features(self, feature_map: Any) -> Any:
        """Return a feature map of linear attention as its problem reads it."""
        return feature_map

    def features(self, problem: Any, x: Any) -> Any:
        """Return the features of x in a problem of linear attention."""
        return problem.map.value(x)

    def stack(self, arrays: Sequence[Any], axis: int = 0) -> Any:
        """Join arrays along a new axis: np.stack takes twice as long with small ones."""
        at = (None,) if axis == 0 else (..., None, *(slice(None),) * (-axis - 1))
        return np.concatenate([x[at] for x in arrays], axis)

    def full(self, shape: Sequence[int], value: Any, like: Any) -> Any:
        return np.full(shape, value, like.dtype)

    def put(self, x: Any, at: tuple[Any, ...], values: Any) -> Any:
        """Return a copy of x with other values at these indices, rounded to its dtype."""
        copy = x.copy()
        copy[at] = cast(values, x.dtype)
        return copy

    def exact(self, dtype: Any, like: Any) -> AbstractContextManager[Any]:
        """Context in which products are computed in `dtype`."""
        return nullcontext()

    def forward_each(
        self, arrays: Sequence[tuple[Any, ...]], each: Sequence[dict[str, Any]]
    ) -> list[Forward]:
        """Check q, k, v and the options of every sequence, and then evaluate them."""
        problems = []
        for i, (xs, options) in enumerate(zip(arrays, each, strict=True)):
            settings = dict(options)
            conventions = settings.pop("conventions", None)
            check_conventions(conventions)
            alignment = None if conventions is None else conventions.alignment
            try:
                problems.append((Problem(*xs, **settings, alignment=alignment), conventions))
            except NpattnError as err:
                raise type(err)(f"{err} (sequence {i})") from err
        return [api.evaluate(problem, conventions) for problem, conventions in problems]


ARRAYS = Arrays()


def widen(dtype: Any, array: Array) -> Any:
    """Return a dtype, or its complex counterpart for a complex array."""
    return np.result_type(dtype, np.complex64) if array.dtype.kind == "c" else dtype


def on_arrays(function: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
    """Decorate a function of a library and more to one on NumPy arrays."""
    return bind(ARRAYS, function)
