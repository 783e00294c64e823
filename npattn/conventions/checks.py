"""Legal values of the fields of `Conventions`."""

import math
import numbers
from typing import Any

from npattn.errors import OptionError

LEGAL: dict[str, tuple[Any, ...]] = {
    "causal": ("bottom_right", "top_left", "unless_masked"),
    "empty_row": ("zero", "nan", "mean"),
    "empty_row_bias": (None, "zero", "nan", "mean"),
    "mask_true": ("attend", "hide"),
    "window": ("exclusive", "inclusive"),
    "softcap": ("before_bias", "after_bias", "after_mask"),
    "bias": ("after_scale", "before_scale"),
    "kv_head": ("repeat", "tile"),
    "lse_base": ("e", "2"),
    "weights": ("before_dropout", "after_dropout"),
    "dropout_at_rate_0": ("drop", "ignore"),
}


def check_fields(conventions: Any) -> None:
    """Raise OptionError if a field of a `Conventions` has a value that is not legal."""
    for name, legal in LEGAL.items():
        value = getattr(conventions, name)
        if not isinstance(value, (str, type(None))) or value not in legal:
            raise OptionError(f"{name} is {value!r}, must be one of {legal}")
    fill, more = conventions.hidden_fill, conventions.hidden_add
    _check_hidden("hidden_fill", fill)
    _check_hidden("hidden_add", more)
    if fill is not None and more is not None:
        raise OptionError(
            f"hidden_fill is {fill!r} and hidden_add is {more!r}, must not both be given: a hidden "
            "score becomes a number, or has a number added"
        )
    if not _is_number(conventions.lse_empty):
        raise OptionError(f"lse_empty is {conventions.lse_empty!r}, must be a number")


def _check_hidden(name: str, value: Any) -> None:
    """Check `hidden_fill` or `hidden_add`."""
    if (
        value is None
        or (isinstance(value, str) and value == "min")
        or (_is_number(value) and math.isfinite(value))
    ):
        return
    raise OptionError(
        f'{name} is {value!r}, must be a finite number or "min" (the smallest of the dtype of q); '
        "with None, hidden keys leave the softmax"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
