"""Terms in which a function is called: its parameters, conventions, layout and results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.problem.arrays import Array, to_numpy
from npattn.problem.options import FEATURES
from npattn.testing.adapters.signature import Signature

TRANSLATED = (
    *("causal", "mask_true", "window", "empty_row", "empty_row_bias", "hidden_fill", "hidden_add"),
    *("lse_base", "lse_empty"),
)
"""Conventions under which `stand_in` can put a mistake."""
UNTRANSLATED = {
    "softcap": {"softcap"},
    "bias": {"bias"},
    "weights": {"dropout_mask", "dropout_rate"},
    "dropout_at_rate_0": {"dropout_mask", "dropout_rate"},
    "kv_head": set[str](),
}
"""Other conventions → the options without which they mean nothing: no witness has these."""
AXES = (0, 1, 2, 3)
"""Order of the axes of (B, H, T, S)."""
ARRAYS = ("mask", "bias", "sinks", "dropout_mask", "gate")


@dataclass(frozen=True)
class Terms:
    """Terms in which the tests call a function."""

    signature: Signature
    conventions: Conventions = field(default_factory=Conventions)
    layout: str = "BHTD"  # "BHTD" or "BTHD": of q, k, v and o
    # results, "lse" or "weights", that it returns beside o without being asked
    beside: tuple[str, ...] = ()
    axes: tuple[int, ...] = AXES  # axes of (B, H, T, S) in the order in which its weights have them

    def __post_init__(self) -> None:
        if unknown := [x for x in self.signature.meanings.values() if x not in READERS]:
            raise OptionError(f"no mistake takes a parameter that is {unknown[0]!r}")
        if self.signature.leading != ("q", "k", "v") or self.signature.module:
            raise OptionError("mistakes take q, k and v, three arrays that come first")
        default = Conventions()
        for name in (f.name for f in fields(Conventions)):
            value = getattr(self.conventions, name)
            if value != getattr(default, name) and name not in TRANSLATED:
                raise OptionError(f"mistakes have no convention {name}={value!r}")

    @property
    def empty_row(self) -> str:
        """Result of a row that sees nothing; a number in place of hidden scores gives the mean."""
        filled = self.conventions.hidden_fill is not None or self.conventions.hidden_add is not None
        return "mean" if filled else self.conventions.empty_row

    def options(self, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call by npattn's names, in npattn's conventions.

        Given are the values of its parameters beside q, k and v, and their defaults.
        """
        found: dict[str, Any] = {"causal": True} if self.signature.always_causal else {}
        for theirs, value in arguments.items():
            meaning = self.signature.meanings.get(theirs)
            if meaning is not None and value is not None:
                found |= READERS[meaning](value)
            elif meaning is None and not _is_default(value, defaults.get(theirs)):
                raise OptionError(f"no mistake takes {theirs}={value!r}: its meaning is unknown")
        found = {n: to_numpy(x) if n in ARRAYS else x for n, x in found.items()}
        if "mask" in found and self.conventions.mask_true == "hide":
            found["mask"] = ~found["mask"]
        left_keys, right_keys = found.get("window") or (None, None)
        if left_keys is not None and self.conventions.window == "inclusive":
            found["window"] = (left_keys - 1, right_keys)
        return found


def translate(conventions: Conventions) -> tuple[Conventions, frozenset[str]]:
    """Return conventions that mistakes can have, and the options that mean something else then."""
    default, ambiguous = Conventions(), set[str]()
    for name, options in UNTRANSLATED.items():
        if getattr(conventions, name) != getattr(default, name):
            conventions = replace(conventions, **{name: getattr(default, name)})
            ambiguous |= options
    return conventions, frozenset(ambiguous)


def find_axes(sizes: Mapping[str, Sequence[int]], layout: str) -> tuple[int, ...]:
    """Return the axes of (B, H, T, S) in the order of weights, by the shapes of one call.

    Of orders that fit alike, that of (B, H, T, S) comes first, and then one with T before S.
    """
    if "weights" not in sizes or any(len(x) != 4 for x in sizes.values()):
        return AXES
    at = {"BHTD": (1, 2), "BTHD": (2, 1)}[layout]
    (batch, heads, rows), keys = (sizes["q"][i] for i in (0, *at)), sizes["k"][at[1]]
    lengths = (batch, heads, rows, keys)
    fits = [
        p for p in permutations(AXES) if tuple(lengths[i] for i in p) == tuple(sizes["weights"])
    ]
    return min(fits, key=lambda p: (p != AXES, p.index(2) > p.index(3), p), default=AXES)


def _is_default(value: Any, default: Any) -> bool:
    """Return True for a default that a caller passes: the same object, or an equal number."""
    return value is default or (isinstance(value, (bool, int, float, str)) and value == default)


def _to_bool(mask: Any) -> Array:
    return np.asarray(to_numpy(mask) != 0)


def _read_mask_or_bias(value: Any) -> dict[str, Any]:
    array = to_numpy(value)
    return {"bias": array} if array.dtype.kind not in "biu" else {"mask": _to_bool(array)}


def _read_head_mask(value: Any) -> dict[str, Any]:
    array = to_numpy(value)
    if array.ndim != 1:
        raise OptionError(f"no mistake takes a head mask {array.shape}, must be (H,)")
    return {"gate": array[:, None, None]}


def _read_window(value: Any) -> dict[str, Any]:
    left_keys, right_keys = (None if n is None or n < 0 else int(n) for n in value)
    return {} if left_keys is right_keys is None else {"window": (left_keys, right_keys)}


def _refuse_dropout(value: Any) -> dict[str, Any]:
    if value:
        raise OptionError(f"no mistake draws a dropout mask of its own (at rate {value})")
    return {}


def _same(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: value}


READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **{name: _same(name) for name in (*FEATURES, "return_lse", "return_weights")},
    "mask": lambda value: {"mask": _to_bool(value)},
    "mask or bias": _read_mask_or_bias,
    "added mask or bias": _same("bias"),
    "key padding": lambda value: {"mask": ~_to_bool(value)[:, None, None, :]},
    "head mask": _read_head_mask,
    "window": _read_window,
    "window or −1": _read_window,
    "window of numbers": _read_window,
    "need_weights": _same("return_weights"),
    "lse without gradient": _same("return_lse"),
    **dict.fromkeys(("shared heads", "no effect"), lambda value: {}),
    "no dropout": _refuse_dropout,
}
"""Meaning of a parameter → function that reads the options in its value."""
