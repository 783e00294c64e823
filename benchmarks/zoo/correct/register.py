"""Record of a correct implementation, and the register of all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from npattn.conventions import Conventions
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.report import Report
from npattn.testing.rules import PROPERTIES

FINE = ("passed", "not applicable")
STORES_PRODUCTS = ("large-products",)
"""Rules broken in float16 by an implementation that stores products before it scales them.

They overflow: a limit of many models, which docs/findings.md shows.
"""


@dataclass(frozen=True, kw_only=True)
class Correct:
    """A correct implementation: every failure that the judge reports of it is a false alarm."""

    name: str
    sentence: str  # how it differs from the others
    forward: Callable[..., Any]  # an implementation under test
    # its gradients; None means autodiff, or no gradients
    backward: Callable[..., Any] | None = None
    # dtypes in which it is correct
    dtypes: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
    # rounding model that it declares; None declares nothing, which allows the most
    rounding: Rounding | None = None
    beyond: bool = False  # True if it rounds more than the tolerance of an undeclared model
    framework: str = "numpy"  # "numpy", "torch" or "jax"
    conventions: Conventions = Conventions()  # noqa: RUF009  it is frozen
    needs: str | None = None  # package that it needs
    # sizes to sample, if it is slow: ``{"T": (2, 3)}``
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # rules that it is known to break; systems in wide use are listed all the same
    breaks: tuple[str, ...] = ()
    # recipe → True for problems on which docs/findings.md proves it wrong
    errs_on: Callable[[Recipe], bool] = lambda recipe: False

    @property
    def runs_here(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    @property
    def models(self) -> tuple[Rounding | None, ...]:
        """Rounding models under which it must pass."""
        return (self.rounding,) if self.beyond else tuple(dict.fromkeys((self.rounding, None)))

    @property
    def rules(self) -> tuple[str, ...]:
        """Every rule except those that it is known to break, and those of its bits.

        The bits of a row may depend on its call: that is measured, and no mistake.
        """
        asked = (name for name, rule in PROPERTIES.items() if rule.level != "reproducible")
        return tuple(name for name in asked if name not in self.breaks)

    def alarms(self, report: Report) -> list[Outcome]:
        """Return the outcomes of a report that are false alarms."""
        bad = [o for o in report.outcomes if o.status not in FINE and o.rule not in self.breaks]
        return [o for o in bad if o.level != "reproducible"]

    def implementation(self) -> Implementation:
        """Return it in the form that the judge takes."""
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
    **attributes: Any,
) -> None:
    """Register a correct implementation."""
    if name in CORRECT:
        raise KeyError(f"two correct implementations are named {name}")
    CORRECT[name] = Correct(
        name=name, sentence=sentence, forward=forward, backward=backward, **attributes
    )
