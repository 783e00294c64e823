"""A case: sizes, options and a seed, from which arrays, exact results and tolerances follow.

A variant is judged once there is a class of cases for it, whose fields are sampled and shrunk, the
simplest value of each first. Nothing else in this folder knows of any variant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer

Exact = dict[str, tuple[Array, Array]]
"""Result by name → its exact value and its tolerance, both float64."""


class Request(NamedTuple):
    """Call of an implementation: its arrays in order and by name, options, and cotangents."""

    positional: dict[str, Array]
    named: dict[str, Array]  # array options, differentiable
    options: dict[str, Any]  # masks, numbers, flags and words
    cotangents: dict[str, Array]  # by name of the result


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Array:
    """Sample a standard normal array, rounded to a dtype."""
    return rng.standard_normal(tuple(shape)).astype(dtype)


def among(*values: Any) -> Any:
    """Return a field of a case with its values; the first is its default."""
    return field(default=values[0], metadata={"values": values})


def option(*values: Any, name: str = "", function: bool = False) -> Any:
    """Return a field that stands for an option of an implementation.

    Parameters
    ----------
    *values
        The first is the default of the option.
    name : str
        Of the option, if the field has another one.
    function : bool
        A function may stand in place of a value.
    """
    metadata = {"values": values, "option": name, "function": function}
    return field(default=values[0], metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem of a variant, of fields that are sampled: `among` values, or an `option`."""

    @classmethod
    def build(cls, fields: Mapping[str, Any]) -> Self:
        """Return the case with these fields, after making them agree with each other."""
        return cls(**fields)

    def request(self, dtype: Any) -> Request:
        """Return arrays and cotangents in a dtype, and the options that are not None."""
        raise NotImplementedError

    def exact(self, request: Request, dtype: Any, gradients: bool) -> Exact:
        """Return the exact results for a request, with the tolerance of each."""
        raise NotImplementedError

    @classmethod
    def choices(
        cls, names: Mapping[str, bool], values: Mapping[str, Sequence[Any]]
    ) -> dict[str, Sequence[Any]]:
        """Return the values of each field to sample from, the simplest first.

        `names` holds the options that the implementation names, with True for those that it
        requires; `values` restricts fields. A field whose option is not named keeps one value; if
        the option is required, its default is none of its values.

        Raises
        ------
        OptionError
            If `values` has an unknown field or value, no values, or several for an option that the
            implementation does not name.
        """
        if not isinstance(values, Mapping):
            raise OptionError(
                f"values is of type {type(values).__name__}, must be a mapping: "
                + '{"causal": (True,)}'
            )
        metadata = {f.name: f.metadata for f in fields(cls)}
        if unknown := [name for name in values if name not in metadata]:
            raise OptionError(
                f"values has {unknown[0]!r}, must have fields among {', '.join(metadata)}"
            )
        chosen: dict[str, Sequence[Any]] = {}
        for name, about in metadata.items():
            choices_of = about["values"]
            option = about["option"] or name if "option" in about else None
            if name in values:
                choices_of = _read_values(
                    name, values[name], choices_of, about.get("function", False)
                )
                if option is not None and option not in names and len(choices_of) > 1:
                    raise OptionError(
                        f"values[{name!r}] has {len(choices_of)} values, but the implementation "
                        f"names no {option}: pass the one that it means"
                    )
            elif option is not None:
                choices_of = choices_of[:1] if option not in names else choices_of[names[option] :]
            chosen[name] = choices_of
        return chosen


def _read_values(name: str, values: Any, every: Sequence[Any], function: bool) -> tuple[Any, ...]:
    """Return the values of a field that somebody asks for, after checking them."""
    where = f"values[{name!r}]"
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise OptionError(f"{where} is {values!r}, must be a sequence of values: ({values!r},)")
    if not values:
        raise OptionError(f"{where} is empty, must hold at least one value")
    kinds = {type(x) for x in every} - {type(None)}
    for value in values:
        number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if kinds == {int}:
            check_integer(where, value, min(every))
        elif kinds == {bool} and not isinstance(value, (bool, np.bool_)):
            raise OptionError(f"{where} has {value!r}, must have True or False")
        elif str in kinds and value not in every and not (function and callable(value)):
            words = ", ".join(map(repr, every))
            raise OptionError(f"{where} has {value!r}, must have values among {words}")
        elif float in kinds and not number and not (value is None and None in every):
            none = " or None" if None in every else ""
            raise OptionError(f"{where} has {value!r}, must have finite numbers{none}")
    return tuple(values)
