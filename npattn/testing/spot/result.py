"""The result of a spot check, and the odds of what it may have missed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npattn.errors import OptionError
from npattn.testing.comparison import Comparison
from npattn.testing.power import Concluded, Conclusion, Power, conclude, describe, find_unjudged

PRINTED = 10
"""Number of failures that a report prints."""


@dataclass(frozen=True, eq=False)
class SpotCheck(Concluded):
    """Result of `spot_check`.

    Attributes
    ----------
    rows : int array (samples, ...)
        The checked rows: indices into lse.
    keys : int array (samples, ...) or None
        The keys whose dk and dv were checked: indices into k without its last axis.
    ratios : dict
        Largest error / tolerance of each result among o, lse, dq, dk, dv.
    failures : tuple of Comparison
        The worst element of every row, or key, that is out of tolerance.
    all_rows, all_keys : int
        Number of rows and keys from which the sample was drawn.
    seed : int
    powers : mapping of str to Power
        By result: which errors would have been seen in the sample.
    accept : collection of str
        Results that need no verdict.
    defects : tuple of str
        Mistakes that were put into a row that passed, and not found: npattn is wrong.
    """

    rows: NDArray[Any]
    keys: NDArray[Any] | None
    ratios: dict[str, float]
    failures: tuple[Comparison, ...]
    all_rows: int
    all_keys: int
    seed: int
    powers: Mapping[str, Power] = field(default_factory=dict)
    accept: Collection[str] = ()
    defects: tuple[str, ...] = ()

    @property
    def conclusion(self) -> Conclusion:
        """Verdict and reason."""
        return conclude(
            failed=bool(self.failures),
            tested=any(power.elements for power in self.powers.values()),
            unjudged=[n for n in find_unjudged(self.powers) if self.powers[n].elements],
            accept=self.accept,
            reasons=[f"a defect of npattn: it passes {mistake}" for mistake in self.defects],
        )

    @property
    def worst(self) -> float:
        """The largest error / tolerance."""
        return max(self.ratios.values(), default=0.0)

    def miss_probability(self, share: float, of: str = "rows") -> float:
        """Return the probability of missing every wrong row, if at least this share is wrong.

        Parameters
        ----------
        share : float
            In [0, 1].
        of : {"rows", "keys"}

        Returns
        -------
        float
            Exact, for sampling without replacement.

        Raises
        ------
        OptionError
            If `share` is outside [0, 1], or `of` names what was not checked.
        """
        if not 0 <= share <= 1:
            raise OptionError(f"share is {share!r}, must be in [0, 1]")
        samples, total = self._sample_size(of)
        wrong = math.ceil(share * total)
        if wrong and (wrong - 1) / total >= share:  # the product was rounded up
            wrong -= 1
        return miss_probability(wrong, samples, total)

    def share(self, probability: float = 0.05, of: str = "rows") -> float:
        """Return the least share of wrong rows that is missed with at most this probability.

        Parameters
        ----------
        probability : float
            In (0, 1).
        of : {"rows", "keys"}

        Returns
        -------
        float

        Raises
        ------
        OptionError
            If `probability` is outside (0, 1), or `of` names what was not checked.
        """
        if not 0 < probability < 1:
            raise OptionError(f"probability is {probability!r}, must be in (0, 1)")
        samples, total = self._sample_size(of)
        least, most = 0, total  # all of them cannot be missed; none is missed for certain
        while most - least > 1:
            middle = (least + most) // 2
            if miss_probability(middle, samples, total) <= probability:
                most = middle
            else:
                least = middle
        return most / total if total else 0.0

    def _sample_size(self, of: str) -> tuple[int, int]:
        if of not in ("rows", "keys"):
            raise OptionError(f'of is {of!r}, must be "rows" or "keys"')
        if of == "rows":
            return len(self.rows), self.all_rows
        if self.keys is None:
            raise OptionError('of is "keys", must be "rows": dk and dv were not checked')
        return len(self.keys), self.all_keys

    def __str__(self) -> str:
        state = self.verdict.replace("failed", "FAILED")
        if self.reason:
            state += f" ({self.reason})"
        ratios = ", ".join(f"{name} {ratio:.2g}" for name, ratio in self.ratios.items())
        lines = [f"spot check {state}: largest error / tolerance: {ratios}"]
        lines += [f"  {failure}" for failure in self.failures[:PRINTED]]
        if len(self.failures) > PRINTED:
            lines.append(f"  and {len(self.failures) - PRINTED} more")
        lines += [f"  {line}" for line in describe(self.powers)]
        populations = ("rows",) if self.keys is None else ("rows", "keys")
        return "\n".join([*lines, *(self._odds(of) for of in populations)])

    def _odds(self, of: str) -> str:
        samples, total = self._sample_size(of)
        if samples == total:
            return f"checked all {total} {of}"
        share = self.share(of=of)
        return (
            f"checked {samples} of {total} {of}, sampled with seed {self.seed}: if "
            f"{100 * share:.2g} % of the {of} or more were wrong, the probability of missing all "
            f"of them would be {100 * self.miss_probability(share, of):.2g} %"
        )


def miss_probability(wrong: int, samples: int, total: int) -> float:
    """Return the hypergeometric probability that no wrong item is among the samples."""
    if wrong + samples > total:
        return 0.0
    steps = np.log1p(-wrong / (total - np.arange(samples)))
    return float(np.exp(steps.sum()))
