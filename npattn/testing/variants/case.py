"""A case: sizes, options and a seed, from which arrays, exact results and tolerances follow.

A variant is judged once there is a case for it: a frozen dataclass whose fields are sampled and
shrunk, the simplest value of each first. Nothing else in this folder knows of any variant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array

Exact = dict[str, tuple[Array, Array]]
"""Result by name → its exact value and its tolerance, both float64."""


class Request(NamedTuple):
    """Call of an implementation: its arrays in order and by name, options, and cotangents."""

    positional: dict[str, Array]
    named: dict[str, Array]  # array options, differentiable
    options: dict[str, Any]  # masks, numbers, flags and words
    cotangents: dict[str, Array]  # by name of the result


class Case(Protocol):
    """Protocol of a case of one variant."""

    def request(self, dtype: Any) -> Request:
        """Return arrays and cotangents in a dtype, and the options that are not None."""

    def exact(self, request: Request, dtype: Any, gradients: bool) -> Exact:
        """Return the exact results for a request, with the tolerance of each."""

    @classmethod
    def choices(
        cls, names: Mapping[str, bool], values: Mapping[str, Sequence[Any]]
    ) -> dict[str, Sequence[Any]]:
        """Return the values of each field to sample from, the simplest first.

        `names` holds the options that the implementation names, with True for those that it
        requires; `values` restricts fields.
        """

    @classmethod
    def build(cls, fields: Mapping[str, Any]) -> Self:
        """Return the case with these fields, after making them agree with each other."""


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Array:
    """Sample a standard normal array, rounded to a dtype."""
    return rng.standard_normal(tuple(shape)).astype(dtype)


def _check_fields(values: Any, defaults: Mapping[str, Any]) -> None:
    """Raise OptionError unless `values` is a mapping of known fields."""
    if not isinstance(values, Mapping):
        raise OptionError(
            f"values is of type {type(values).__name__}, must be a mapping: "
            + '{"causal": (True,)}'
        )
    unknown = [name for name in values if name not in defaults]
    if unknown:
        raise OptionError(
            f"values has {unknown[0]!r}, must have fields among {', '.join(defaults)}"
        )


def allowed_values(
    defaults: Mapping[str, Sequence[Any]],
    options: Mapping[str, str],
    names: Mapping[str, bool],
    values: Mapping[str, Sequence[Any]],
    optional: Callable[[str], Sequence[Any]],
    callables: Collection[str] = (),
) -> dict[str, Sequence[Any]]:
    """Return the values of all fields: those in `values`, else the defaults.

    Parameters
    ----------
    defaults : mapping
        Values of each field; its first is the default of an option.
    options : mapping
        Field → option of the implementation that it stands for. A field whose option the
        implementation does not name keeps one value.
    names, values
        As of `Case.choices`.
    optional : callable
        Field → its values if the implementation requires the option.
    callables : collection of str
        Fields that a function may stand for, beside their words.

    Raises
    ------
    OptionError
        If `values` has an unknown field or value, no values, or several for an option that the
        implementation does not name.
    """
    _check_fields(values, defaults)
    chosen: dict[str, Sequence[Any]] = {}
    for field, every in defaults.items():
        own = tuple(every)
        if field in values:
            own = _read_values(field, values[field], every, field in callables)
        option = options.get(field)
        if not own:
            raise OptionError(f"values[{field!r}] is empty, must hold at least one value")
        if option is not None and option not in names:
            if field in values and len(own) > 1:
                raise OptionError(
                    f"values[{field!r}] has {len(own)} values, but the implementation names no "
                    f"{option}: pass the one that it means"
                )
            own = own[:1]
        elif option is not None and field not in values and names[option]:
            own = tuple(optional(field))
        chosen[field] = own
    return chosen


def _read_values(field: str, values: Any, every: Sequence[Any], function: bool) -> tuple[Any, ...]:
    """Return the values of a field that somebody asks for, after checking them."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise OptionError(
            f"values[{field!r}] is {values!r}, must be a sequence of values: ({values!r},)"
        )
    legal, words = _test_of(every)
    for value in values:
        if not legal(value) and not (function and callable(value)):
            raise OptionError(f"values[{field!r}] has {value!r}, must have {words}")
    return tuple(values)


def _test_of(every: Sequence[Any]) -> tuple[Callable[[Any], bool], str]:
    """Return a test for values of the same kind, and words for those that pass it."""
    kinds = {type(x) for x in every} - {type(None)}
    none = None in every
    if kinds == {bool}:
        return lambda x: isinstance(x, (bool, np.bool_)), "True or False"
    if kinds == {int}:
        least = min(every)
        return lambda x: _is_integer(x) and x >= least, f"integers ≥ {least}"
    if str in kinds:
        words = ", ".join(repr(x) for x in every)
        return lambda x: x in every, f"values among {words}"
    words = "finite numbers" + (" or None" if none else "")
    return lambda x: (x is None and none) or _is_number(x), words


def _is_integer(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)
