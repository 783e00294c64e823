"""A multi-head and a single-head model of the same sizes, trained side by side."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array
from train.data import Data, digits
from train.loop import train
from train.run import Run
from train.settings import Settings

CHANCE = 0.05
"""Probability below which the verdict does not put a difference down to chance."""


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """Two trained models, and which test images each of them gets right.

    Attributes
    ----------
    runs : dict of Run
        By "multi-head" and "single-head".
    seconds : dict of float
        Time of training, by the same names.
    right : dict of bool array
        Test images whose digit is predicted, by the same names.
    """

    runs: dict[str, Run]
    seconds: dict[str, float]
    right: dict[str, Array]

    @property
    def p_value(self) -> float:
        """Probability of a difference as large as this one, were both models equally good.

        Of the images that only one model gets right, each would go to either with probability 1/2:
        the exact sign test of McNemar 1947.
        """
        one, other = self.right.values()
        disputed = int((one != other).sum())
        least = min(int((one & ~other).sum()), int((other & ~one).sum()))
        tail = sum(math.comb(disputed, k) for k in range(least + 1))
        return min(1.0, float(2 * tail / 2**disputed))

    def __str__(self) -> str:
        lines = [self._sizes(), "", *self._table(), "", self._verdict()]
        return "\n".join(lines)

    def _sizes(self) -> str:
        settings = self.runs["multi-head"].settings
        d, H = settings.embed_dim, settings.num_heads
        same = len({run.num_parameters for run in self.runs.values()}) == 1
        budget = "number of parameters" if same else "parameters, but for a relative bias a head"
        return f"same sizes and {budget}: embed_dim {d}, {H} heads of {d // H} or 1 head of {d}"

    def _table(self) -> list[str]:
        """Return the lines of the table by epoch."""
        runs, column = self.runs.values(), 22
        head = [f"{name:>{column}}" for name in self.runs]
        lines = ["".join([f"{'':<10}", *head])]
        lines += [_line("parameters", [f"{run.num_parameters:,}" for run in runs], column)]
        lines += [_line("epoch", [f"{'loss':>10}{'accuracy':>12}"] * len(self.runs), column)]
        for epoch in range(max(run.epoch for run in runs)):
            cells = [
                f"{_mean_loss(run, epoch):>10.4f}{100 * run.accuracies[epoch]:>10.2f} %"
                for run in runs
            ]
            lines.append(_line(f"{epoch + 1:>5}", cells, column))
        lines += [_line("time", [f"{seconds:.1f} s" for seconds in self.seconds.values()], column)]
        return lines

    def _verdict(self) -> str:
        results = {
            name: f"{name} {100 * right.mean():.2f} % in {self.seconds[name]:.1f} s"
            for name, right in self.right.items()
        }
        counts = {name: int(right.sum()) for name, right in self.right.items()}
        images = len(self.right["multi-head"])
        best = max(counts, key=counts.__getitem__)
        ahead = max(counts.values()) - min(counts.values())
        text = f"{', '.join(results.values())}: "
        if not ahead:
            return f"{text}both are right on {counts[best]} of {images} test images"
        by_chance = "no more than chance gives" if self.p_value >= CHANCE else "more than chance"
        return (
            f"{text}{best} is right on {ahead} more of {images} test images, "
            f"{by_chance} (p = {self.p_value:.2g})"
        )


def compare(
    settings: Settings | None = None,
    *,
    data: Data | None = None,
    progress: Callable[[str, int, int, float, float | None], None] | None = None,
) -> ModelComparison:
    """Train a multi-head model, and a single-head one of the same sizes, from the same seed.

    Both have the same number of parameters, except for one relative bias a head.

    Parameters
    ----------
    settings : Settings, optional
        Of the multi-head model; the other has num_heads 1.
    data : Data, optional
        Default: `digits`.
    progress : callable, optional
        Called with the name of the model, and as in `train`.

    Returns
    -------
    ModelComparison

    Raises
    ------
    OptionError
        If num_heads is 1; and as in `train`.
    MissingExtraError
        As in `train`.
    """
    settings = settings or Settings()
    if settings.num_heads == 1:
        raise OptionError("num_heads is 1, must be 2 or more to be compared with a single head")
    data = digits(settings.tokens) if data is None else data
    runs, seconds, right = {}, {}, {}
    for name, heads in (("multi-head", settings.num_heads), ("single-head", 1)):

        def advance(*at: float | None, name: str = name) -> None:
            if progress is not None:
                progress(name, *at)  # type: ignore[arg-type]  # as `train` calls it

        start = time.perf_counter()
        run = train(dataclasses.replace(settings, num_heads=heads), data=data, progress=advance)
        runs[name], seconds[name] = run, time.perf_counter() - start
        right[name] = run.predict(data.test_x) == data.test_y
    return ModelComparison(runs, seconds, right)


def _mean_loss(run: Run, epoch: int) -> float:
    batches = len(run.losses) // run.epoch
    return float(np.mean(run.losses[epoch * batches : (epoch + 1) * batches]))


def _line(name: str, cells: list[str], column: int) -> str:
    return "".join([f"{name:<10}", *(f"{cell:>{column}}" for cell in cells)])
