"""What a correct implementation is, and the register of all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from npattn.conventions import Conventions
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.report.report import Outcome, Report
from npattn.testing.rules import PROPERTIES

__all__ = ["CORRECT", "Correct", "correct"]

FINE = ("passed", "not applicable")


@dataclass(frozen=True, kw_only=True)
class Correct:
    """A correct implementation: what the judge says against it is a false alarm.

    Attributes
    ----------
    name : str
    sentence : str
        How it differs from the others.
    forward : callable
        An implementation under test.
    backward : callable or None
        Its gradients; None: autodiff, or none.
    dtypes : tuple of str
        In which it is correct.
    rounding : Rounding or None
        The model that it declares. None: none, which allows the most.
    beyond : bool
        It rounds more than is allowed to whoever declares nothing.
    framework : {"numpy", "torch", "jax"}
    conventions : Conventions
    needs : str or None
        The package without which it cannot run.
    sizes : mapping
        Where it is slow: those to draw, ``{"T": (2, 3)}``.
    breaks : tuple of str
        Rules that it is known to break, and why it is here all the same: a system in wide use.
    """

    name: str
    sentence: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    dtypes: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
    rounding: Rounding | None = None
    beyond: bool = False
    framework: str = "numpy"
    conventions: Conventions = Conventions()  # noqa: RUF009  it is frozen
    needs: str | None = None
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    breaks: tuple[str, ...] = ()

    @property
    def runs_here(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    @property
    def models(self) -> tuple[Rounding | None, ...]:
        """Those under which it must pass."""
        return (self.rounding,) if self.beyond else tuple(dict.fromkeys((self.rounding, None)))

    @property
    def rules(self) -> tuple[str, ...]:
        """All but those that it is known to break."""
        return tuple(name for name in PROPERTIES if name not in self.breaks)

    def alarms(self, report: Report) -> list[Outcome]:
        """What a report says against it, but for what it is known to break."""
        return [o for o in report.outcomes if o.status not in FINE and o.rule not in self.breaks]

    def implementation(self) -> Implementation:
        """As the judge takes it."""
        return Implementation(
            self.forward, backward=self.backward, framework=self.framework, name=self.name
        )


CORRECT: dict[str, Correct] = {}
"""Correct implementations, by name."""


def correct(
    name: str,
    sentence: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    **words: Any,
) -> None:
    """Put an implementation into the register."""
    if name in CORRECT:
        raise KeyError(f"{name} is twice among the correct implementations")
    CORRECT[name] = Correct(
        name=name, sentence=sentence, forward=forward, backward=backward, **words
    )
