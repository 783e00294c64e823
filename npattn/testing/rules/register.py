"""What a property is, the register of all of them, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from npattn.testing.cases.recipe import Recipe
from npattn.testing.trial import Trial

__all__ = [
    "REGISTER",
    "Check",
    "Property",
    "fills",
    "first",
    "force_hiding",
    "no_gradients",
    "no_lse",
    "nothing_hides",
    "rule",
]

HIDES = ("mask", "causal", "window")


Check = Callable[[Trial, Recipe], "float | None"]


@dataclass(frozen=True)
class Property:
    """A rule, what it needs, and its check.

    Attributes
    ----------
    rule : str
        What ``--only`` and reports call it.
    section : str
        Its numbers in docs/semantics.md.
    check : callable
        Its docstring states the rule, why it holds, and the bugs that break it.
    unless : callable
        Trial → why it does not apply, or None.
    draw : callable
        Trial → arguments of `Pools`.
    alters : bool
        It alters a problem and compares with the oracle: where the unaltered one is wrong too,
        that is the business of another rule.
    recipes : callable, optional
        (trial, seed, examples) → the recipes to ask it of, instead of drawn ones.
    """

    rule: str
    section: str
    check: Check
    unless: Callable[[Trial], str | None] = lambda trial: None
    draw: Callable[[Trial], dict[str, Any]] = lambda trial: {}
    alters: bool = False
    recipes: Callable[[Trial, int, int], list[Recipe]] | None = None

    @property
    def about(self) -> str:
        """The rule in a line."""
        return (self.check.__doc__ or "").strip().splitlines()[0]


REGISTER: dict[str, Property] = {}
"""Every property that a module has made, by rule."""


def rule(
    name: str,
    section: str,
    *,
    unless: Callable[[Trial], str | None] = lambda trial: None,
    draw: Callable[[Trial], dict[str, Any]] = lambda trial: {},
    alters: bool = False,
    recipes: Callable[[Trial, int, int], list[Recipe]] | None = None,
) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        REGISTER[name] = Property(name, section, check, unless, draw, alters, recipes)
        return check

    return register


def no_gradients(trial: Trial) -> str | None:
    return None if trial.gradients else "no backward"


def no_lse(trial: Trial) -> str | None:
    return None if trial.implementation.returns_lse else "returns no lse"


def nothing_hides(trial: Trial) -> str | None:
    hides = any(name in trial.space.features for name in HIDES)
    return None if hides else "has no mask, causal or window"


def fills(trial: Trial) -> str | None:
    if trial.conventions.hidden_fill is not None:
        return "hidden_fill lets hidden keys matter"
    late = trial.conventions.softcap == "after_mask" and "softcap" in trial.space.features
    return "a softcap after the mask lets hidden keys matter" if late else None


def first(*reasons: Callable[[Trial], str | None]) -> Callable[[Trial], str | None]:
    return lambda trial: next((r for r in (reason(trial) for reason in reasons) if r), None)


def force_hiding(trial: Trial) -> dict[str, Any]:
    """Options of `recipes` with which something is hidden."""
    features = trial.space.features
    if "mask" in features:
        return {"force": {"mask": ("full", "padding", "left padding", "first tile", "matrix")}}
    if "causal" in features:
        return {"force": {"causal": True}}
    return {"force": {"window": ((1, 0), (0, 1), (2, 3))}}
