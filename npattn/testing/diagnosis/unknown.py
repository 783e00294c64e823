"""An implementation whose conventions are not known, and the choice among candidates for them.

Each candidate makes the oracle give another result on the same arrays. The implementation follows
the one whose result it gives within the tolerance, if that of every other is far away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.conventions.checks import LEGAL
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import Crash, ImplementationError, NotAsked, Results, TimedOut
from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import compare_result
from npattn.testing.trial import Trial

FAR = 8.0
"""Least distance of candidates in units of their tolerances."""
FILLS = ("hidden_fill", "hidden_add")
ENDS = (Crash, TimedOut, NotAsked)
"""Errors of calls that end the process, or have ended it before."""
KINDS = {
    "mask": ("full", "heads", "matrix", "padding"),
    "bias": ("full", "heads", "matrix", "keys of samples"),
}
"""Shapes of masks and biases, the largest first: the first that is accepted is probed with."""


@dataclass
class Unknown:
    """An implementation, and what is known of its conventions so far."""

    trial: Trial  # with the conventions known so far, those not determined at their default
    determined: dict[str, Any] = field(default_factory=dict)  # convention → value
    undetermined: dict[str, str] = field(default_factory=dict)  # convention → why nothing tells
    # option → kind of mask or bias that it accepts, once tried
    kinds: dict[str, str | None] = field(default_factory=dict)
    # option that the probe left out → "crashed" or "timed out"
    ended: Mapping[str, str] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)  # calls that ended the process, a line each

    @property
    def conventions(self) -> Conventions:
        return self.trial.conventions

    @property
    def fills(self) -> bool:
        """True if hidden scores take part in the softmax."""
        return any(getattr(self.conventions, n) is not None for n in FILLS)

    def has(self, *names: str) -> bool:
        """Return True if it has these options, or accepts this structure."""
        return set(names) <= self.trial.space.features | self.trial.space.structure

    def missing(self, *names: str) -> str:
        """Say why it is not asked for any of these options."""
        return next((self.ended[n] for n in names if n in self.ended), "no such option")

    def give_up(self, reason: str, *names: str) -> None:
        """Record why nothing tells those of these conventions that are not determined."""
        self.undetermined |= {n: reason for n in names if n not in self.determined}

    def settle(self, **values: Any) -> None:
        """Record conventions as determined."""
        self.determined |= values
        self.trial = replace(self.trial, conventions=replace(self.conventions, **values), memo={})

    # --- problems ---

    def recipe(self, **changes: Any) -> Recipe:
        """Return a plain recipe that it accepts, T < S if it can, with some changes."""
        base = self.trial.space.base()
        if self.has("T != S") and "S" not in self.trial.space.sizes:
            base = replace(base, S=base.T + 8)
        return replace(base, **changes)

    def problem(self, recipe: Recipe) -> Problem:
        """Return the problem of a recipe, its mask as the conventions known so far mean it."""
        problem = recipe.problem(self.conventions.alignment, self.conventions.mask_true)
        return self.trial.implementation.fit(problem)

    def kind(self, option: str) -> str | None:
        """Return the kind of mask or bias with the most axes that it accepts, if any."""
        if option not in self.kinds:
            accepted = (kind for kind in KINDS[option] if self._accepts({option: kind}))
            self.kinds[option] = next(accepted, None)
        return self.kinds[option]

    def _accepts(self, changes: Mapping[str, Any]) -> bool:
        try:
            self.call(self.problem(self.recipe(**changes)))
        except ENDS:
            raise
        except ImplementationError:
            return False
        return True

    def hide_rows(self, option: str, kind: str) -> Problem:
        """Return a problem in which mask, or a bias of −inf, hides all keys of some queries."""
        problem = self.problem(self.recipe(**{option: kind}))
        array = np.array(getattr(problem, f"{option}_array"))
        array[..., ::3, :] = -np.inf if option == "bias" else self.conventions.mask_true == "hide"
        return problem.replace(**{option: array})

    # --- results ---

    def call(self, problem: Problem) -> Results:
        """Return what it gives, without gradients."""
        return self.trial.implementation.forward(problem)

    def choose(self, name: str, problems: Iterable[Problem | Recipe]) -> str | None:
        """Determine a convention by the one value whose results it gives on every problem.

        The answer is why nothing tells; None if exactly one value explains its results, and the
        results of all others are far away.
        """
        values = [x for x in LEGAL[name] if x not in (None, "unless_masked")]
        result = {"lse_base": "lse", "weights": "weights"}.get(name, "o")
        candidates = {i: replace(self.conventions, **{name: x}) for i, x in enumerate(values)}
        fits, apart, calls = set(candidates), np.zeros((len(values),) * 2, bool), 0
        refusal = ""
        for given in problems:
            problem = self.problem(given) if isinstance(given, Recipe) else given
            try:
                results = self.call(problem)
            except ENDS:
                raise
            except ImplementationError as err:
                refusal = str(err)
                continue
            calls += 1
            exact = {i: self._exact(problem, c, result) for i, c in candidates.items()}
            own = [x for n, x in results.pairs if n == result]
            fits -= {
                i
                for i, e in exact.items()
                if not all(compare_result(result, x, *e).passed for x in own)
            }
            apart |= np.array([[_are_apart(a, b) for b in exact.values()] for a in exact.values()])
        if not calls:
            return f"it raised {refusal}"
        if not fits:
            return f"matches none of {_either(values)}"
        close = sorted(i for i in candidates if not all(apart[i, j] for j in fits))
        if len(fits) > 1 or close != list(fits):
            return f"{_either([values[i] for i in close])}: nothing tells"
        self.settle(**{name: values[close[0]]})
        return None

    def _exact(
        self, problem: Problem, conventions: Conventions, result: str
    ) -> tuple[Array, Array]:
        """Return the exact result under candidate conventions, and its tolerance."""
        trial = replace(self.trial, conventions=conventions, gradients=frozenset(), memo={})
        problem = problem.replace(alignment=conventions.alignment)
        cotangents = Cotangents(np.zeros((*problem.q.shape[:-1], problem.E)), None)
        exact, tolerance = trial.oracle(problem, cotangents)
        return exact[result], tolerance[result]


def _are_apart(a: tuple[Array, Array], b: tuple[Array, Array]) -> bool:
    """Return True if two exact results differ by far more than is allowed somewhere."""
    same = (a[0] == b[0]) | (np.isnan(a[0]) & np.isnan(b[0]))
    finite = np.isfinite(a[0]) & np.isfinite(b[0])
    with np.errstate(invalid="ignore"):
        far = ~finite | (abs(a[0] - b[0]) > FAR * (a[1] + b[1]))
    return bool((~same & far).any())


def _either(values: Sequence[Any]) -> str:
    return " or ".join(map(repr, values))
