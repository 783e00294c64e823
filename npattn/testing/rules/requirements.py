"""Conditions under which a rule applies, and how its problems are sampled.

A condition maps a trial to the reason why a rule does not apply, or to None. A sampling maps it to
arguments of `Pools`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from npattn.testing.rules.register import Condition
from npattn.testing.trial import GRADIENTS, Trial

HIDES = ("mask", "causal", "window")


# --- conditions ---


def first(*conditions: Condition) -> Condition:
    """Combine conditions: the first reason that one of them gives."""
    return lambda trial: next((r for r in (reason(trial) for reason in conditions) if r), None)


def no_gradients(trial: Trial) -> str | None:
    return None if trial.gradients else "no backward"


def keeps_nothing(trial: Trial) -> str | None:
    return None if trial.implementation.keeps_arrays else "its worker keeps nothing between calls"


def no_lse(trial: Trial) -> str | None:
    return None if trial.implementation.returns_lse else "returns no lse"


def no_max_score(trial: Trial) -> str | None:
    return None if trial.implementation.returns_max_score else "returns no max_score"


def no_inf(trial: Trial) -> str | None:
    least = np.array(-np.inf, trial.space.dtype).astype(float)
    return None if np.isinf(least) else f"{trial.space.dtype} has no −inf"


def tied_values(trial: Trial) -> str | None:
    """Return why dk has a share of values: they are a part of the keys."""
    return None if trial.implementation.latent is None else "values are a part of the keys"


def in_bytes(trial: Trial) -> str | None:
    return "o is returned in 8 bits" if trial.implementation.output is not None else None


def no_nan_in_o(trial: Trial) -> str | None:
    output = trial.implementation.output
    return "o is int8, which has no NaN" if output and output.dtype == "int8" else None


def nothing_hides(trial: Trial) -> str | None:
    hides = any(name in trial.space.features for name in HIDES)
    return None if hides else "has no mask, causal or window"


def hidden_keys_matter(trial: Trial) -> str | None:
    """Return why hidden keys take weight under the conventions."""
    if trial.conventions.attends_hidden:
        name = "hidden_add" if trial.conventions.hidden_fill is None else "hidden_fill"
        return f"{name} lets hidden keys matter"
    late = trial.conventions.softcap == "after_mask" and "softcap" in trial.space.features
    return "a softcap after the mask lets hidden keys matter" if late else None


def needs(*names: str) -> Condition:
    """Require options and gradients; the reason names the first that is missing."""

    def condition(trial: Trial) -> str | None:
        for name in names:
            if name in GRADIENTS and name not in trial.gradients:
                return f"gives no {name}"
            if name not in GRADIENTS and name not in trial.space.features:
                return f"has no {name}"
        return None

    return condition


def lacks(*features: str) -> Condition:
    """Require options; the reason names all that are missing."""

    def condition(trial: Trial) -> str | None:
        missing = [name for name in features if name not in trial.space.features]
        return f"has no {' and no '.join(missing)}" if missing else None

    return condition


def refuses(*structure: str) -> Condition:
    """Require that one of these structures is accepted."""

    def condition(trial: Trial) -> str | None:
        accepts = trial.space.structure & set(structure)
        return None if accepts else f"refuses {', '.join(structure)}"

    return condition


def fixed_size(letter: str) -> Condition:
    """Require that the user's sizes leave a choice."""

    def condition(trial: Trial) -> str | None:
        fixed = len(set(trial.space.sizes.get(letter, (1, 2)))) == 1
        return f"sizes allow one {letter} only" if fixed else None

    return condition


def single(letter: str) -> Condition:
    """Require that the user's sizes reach 2."""

    def condition(trial: Trial) -> str | None:
        most = max(trial.space.sizes.get(letter, (2,)))
        return f"sizes allow no {letter} above {most}" if most < 2 else None

    return condition


# --- samplings ---


def of_few_shapes(
    draw: Callable[[Trial], dict[str, Any]], count: int = 2
) -> Callable[[Trial], dict[str, Any]]:
    """Sample few shapes where a framework compiles for each: the rule makes others of them."""
    return lambda trial: draw(trial) | ({"shapes": count} if trial.space.few_shapes else {})


def nonempty(trial: Trial) -> dict[str, Any]:
    """Exclude sizes of 0."""
    return {"nonempty": True}


def without_numbering(trial: Trial) -> dict[str, Any]:
    """Exclude every score_mod that reads the numbers of heads, queries or keys."""
    mods = {"score_mod": (None, None, "squash")} if "score_mod" in trial.space.features else {}
    return {"force": mods, "nonempty": True}


def without_positions(trial: Trial) -> dict[str, Any]:
    """Exclude every option that depends on the positions of queries and keys."""
    return without_numbering(trial) | {"forbid": frozenset({"causal", "window"})}


def force_hiding(trial: Trial) -> dict[str, Any]:
    """Force an option that hides some keys."""
    features = trial.space.features
    if "mask" in features:
        return {"force": {"mask": ("full", "padding", "left padding", "first tile", "matrix")}}
    if "causal" in features:
        return {"force": {"causal": True}}
    return {"force": {"window": ((1, 0), (0, 1), (2, 3))}}


def few_queries(trial: Trial, **force: Any) -> dict[str, Any]:
    """Add few queries to what `Pools` force: an identity needs several results of a problem."""
    return force if "T" in trial.space.sizes else {"T": (2, 1, 3, 5, 7, 16), **force}


def forbid_late_softcap(trial: Trial, *others: str) -> frozenset[str]:
    """Forbid these options, and a softcap of more than q·k: it changes bias and mask too."""
    cap = () if trial.conventions.softcap == "before_bias" else ("softcap",)
    return frozenset({*others, *cap})
