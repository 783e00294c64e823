"""Describe in one line of plain words what a system means, from its profile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from npattn.conventions import Conventions
from npattn.problem.meanings import MEANINGS
from npattn.profiles import Profile

EMPTY = {"zero": "0", "nan": "NaN", "mean": "the mean of all values"}
OTHERS: dict[str, tuple[str, str]] = {
    "mask_true": ("mask", "True in a mask hides"),
    "window": ("window", "a window counts the query itself"),
    "softcap": ("softcap", "the softcap comes after the bias"),
    "bias": ("bias", "the bias is multiplied by the scale"),
    "kv_head": ("", "query head h uses key/value head h mod K"),
    "lse_base": ("return_lse", "lse in base 2"),
    "lse_empty": ("return_lse", "lse of a query that sees nothing is {}"),
    "weights": ("return_weights", "the weights returned are those after dropout"),
    "dropout_at_rate_0": ("dropout_mask", "a dropout mask at rate 0 does nothing"),
}
"""Field of the conventions → the option that it concerns ("" for any), and words for a change."""


def describe_in_words(profile: Profile) -> str:
    """Return what a system means, in one line.

    Parameters
    ----------
    profile : Profile

    Returns
    -------
    str
        Parts with semicolons between them: hidden keys and queries that see nothing first.

    Examples
    --------
    >>> from npattn.profiles import PROFILES
    >>> describe_in_words(PROFILES["torch.sdpa"])
    'leaves hidden keys out of the softmax; a query that sees nothing gives 0; causal from the top \
left; does not take mask+causal, bias+causal'
    """
    conventions, takes = profile.conventions, _options(profile)
    parts = (
        [_hidden_scores(conventions)] if takes("mask") or takes("causal") or takes("window") else []
    )
    parts += _empty_rows(conventions, takes)
    if takes("causal"):
        corner = conventions.causal.replace("_", " ")
        parts.append(f"causal from the {corner}")
    default = Conventions()
    for field, (option, words) in OTHERS.items():
        value = getattr(conventions, field)
        if value != getattr(default, field) and (not option or takes(option)):
            parts.append(words.format(_number(value)))
    if conventions.softcap == "after_mask" and takes("softcap"):
        parts.append("and after the mask, so that hidden keys take weight")
    if profile.refused_names:
        parts.append(f"does not take {', '.join(_in_order(profile))}")
    return "; ".join(parts)


def _options(profile: Profile) -> Callable[[str], bool]:
    """Return a function: does the system take an option? Without a signature it may take any."""
    known = {name for meaning in profile.signature.values() for name in MEANINGS.get(meaning, ())}
    return lambda name: not known or name in known


def _in_order(profile: Profile) -> list[str]:
    names = [name for line in profile.refuses for name in line.split(": ")[0].split(", ")]
    return list(dict.fromkeys(names))


def _hidden_scores(conventions: Conventions) -> str:
    if conventions.hidden_fill is not None:
        return f"sets hidden scores to {_number(conventions.hidden_fill)}"
    if conventions.hidden_add is not None:
        return f"adds {_number(conventions.hidden_add)} to hidden scores"
    return "leaves hidden keys out of the softmax"


def _empty_rows(conventions: Conventions, takes: Callable[[str], bool]) -> list[str]:
    """Say what a query gives that sees nothing, by a mask and, if that differs, by its bias."""
    by_bias = EMPTY[conventions.empty_row_bias or conventions.empty_row]
    by_mask = EMPTY[conventions.empty_row]
    if conventions.hidden_fill is not None:
        by_mask = EMPTY["mean"]  # all scores are the same number
    elif conventions.hidden_add is not None:
        by_mask = EMPTY["mean"] if _absorbs(conventions.hidden_add) else "what it gives unmasked"
    parts = [f"a query that sees nothing gives {by_mask}"]
    if by_bias != by_mask and takes("bias"):
        parts.append(f"one whose scores are all −inf gives {by_bias}")
    return parts


def _absorbs(number: float | Literal["min"]) -> bool:
    """Return True if float32 scores are lost beside a number: its neighbours are 1 apart or more.

    They then become equal, and the weights 1/S.
    """
    if number == "min":
        return True
    with np.errstate(over="ignore"):
        rounded = np.float32(abs(number))
    return not math.isfinite(rounded) or bool(np.spacing(rounded) >= 1)


def _number(value: Any) -> str:
    """Write a number as text does: −1e9, −inf, "the least finite number"."""
    if value == "min":
        return "the least finite number"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}".replace("e+0", "e").replace("e+", "e").replace("-", "−")
