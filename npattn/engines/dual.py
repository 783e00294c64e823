"""Dual numbers: arrays that carry their derivative through the functions of NumPy.

A function of NumPy that is called on a `Dual` (value, rate) returns the `Dual` of its result, by
the chain rule. Derivatives are exact to rounding, at complex values too; the complex step needs a
real argument.
Source: Clifford 1873; Griewank and Walther 2008, chapter 3 (forward mode).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array

# The derivative of f from x and y = f(x), for each function of one variable.
SLOPES: dict[Any, Callable[..., Any]] = {
    np.positive: lambda x, y: 1,
    np.negative: lambda x, y: -1,
    np.exp: lambda x, y: y,
    np.exp2: lambda x, y: y * np.log(2),
    np.expm1: lambda x, y: y + 1,
    np.log: lambda x, y: 1 / x,
    np.log2: lambda x, y: 1 / (x * np.log(2)),
    np.log10: lambda x, y: 1 / (x * np.log(10)),
    np.log1p: lambda x, y: 1 / (1 + x),
    np.sqrt: lambda x, y: 0.5 / y,
    np.square: lambda x, y: 2 * x,
    np.reciprocal: lambda x, y: -y * y,
    np.sin: lambda x, y: np.cos(x),
    np.cos: lambda x, y: -np.sin(x),
    np.tan: lambda x, y: 1 + y * y,
    np.sinh: lambda x, y: np.cosh(x),
    np.cosh: lambda x, y: np.sinh(x),
    np.tanh: lambda x, y: 1 - y * y,
    np.arcsin: lambda x, y: 1 / np.sqrt(1 - x * x),
    np.arccos: lambda x, y: -1 / np.sqrt(1 - x * x),
    np.arctan: lambda x, y: 1 / (1 + x * x),
    np.arcsinh: lambda x, y: 1 / np.sqrt(1 + x * x),
    np.arccosh: lambda x, y: 1 / (np.sqrt(x - 1) * np.sqrt(x + 1)),
    np.arctanh: lambda x, y: 1 / (1 - x * x),
}

# The same in x and in z, from x, z and y = f(x, z), for each function of two.
PAIRS: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
    np.add: (lambda x, z, y: 1, lambda x, z, y: 1),
    np.subtract: (lambda x, z, y: 1, lambda x, z, y: -1),
    np.multiply: (lambda x, z, y: z, lambda x, z, y: x),
    np.divide: (lambda x, z, y: 1 / z, lambda x, z, y: -y / z),
    np.power: (lambda x, z, y: z * np.power(x, z - 1), lambda x, z, y: y * np.log(x)),
    np.maximum: (lambda x, z, y: y == x, lambda x, z, y: y != x),
    np.minimum: (lambda x, z, y: y == x, lambda x, z, y: y != x),
}

# Functions without a derivative: where they are used, they choose between formulas.
PLAIN = frozenset({
    np.greater, np.greater_equal, np.less, np.less_equal, np.equal, np.not_equal,
    np.isfinite, np.isnan, np.isinf,
})  # fmt: skip


class Dual(np.lib.mixins.NDArrayOperatorsMixin):
    """An array and its derivative.

    Parameters
    ----------
    rate : array
        Of the shape of `value`.
    """

    def __init__(self, value: Any, rate: Any):
        self.value, self.rate = np.asarray(value), np.asarray(rate)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.value.dtype

    @property
    def real(self) -> Array:
        """Real part of the value, without a derivative: for comparisons."""
        return self.value.real

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Return the function's value with its derivative, but comparisons plain."""
        if method != "__call__" or kwargs:
            return NotImplemented
        values = [_value(x) for x in inputs]
        if function in PLAIN:
            return function(*values)
        if function in SLOPES:
            y = function(*values)
            return Dual(y, SLOPES[function](*values, y) * inputs[0].rate)
        if function not in PAIRS:
            return NotImplemented
        y, rate = function(*values), 0
        for slope, x in zip(PAIRS[function], inputs, strict=True):
            if isinstance(x, Dual):  # 0 times the slope of a constant may be NaN
                rate = rate + slope(*values, y) * x.rate
        return Dual(y, np.broadcast_to(rate, y.shape))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is not np.where or len(args) != 3 or kwargs:
            return NotImplemented
        condition, x, z = args
        condition = _value(condition)
        return Dual(
            np.where(condition, _value(x), _value(z)), np.where(condition, _rate(x), _rate(z))
        )


def differentiate(name: str, function: Callable[[Any], Any], x: Array) -> Array:
    """Derivative of an elementwise function at x, of any shape, exact to rounding.

    Raises OptionError if the function, called `name` there, uses what this module does not have.
    """
    try:
        y = function(Dual(x, np.ones_like(x)))
    except (AttributeError, TypeError, ValueError) as err:
        raise OptionError(
            f"{name} has no derivative at complex scores, since it is no formula of NumPy's "
            f"elementary functions ({type(err).__name__}: {err}): write it with those and np.where"
        ) from err
    return y.rate if isinstance(y, Dual) else np.zeros_like(x)  # a constant


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Dual) else x


def _rate(x: Any) -> Any:
    return x.rate if isinstance(x, Dual) else 0
