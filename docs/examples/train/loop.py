"""Training, from the start or from a checkpoint.

Everything random comes from the seed: each epoch's order from (seed, 1, epoch), the dropout mask of
a step from (seed, 2, step). A run that is killed and resumed has the same losses to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array
from train.adam import Adam, step_size
from train.data import Data, digits
from train.model import loss_and_gradients, random_parameters
from train.precision import LossScale
from train.run import Run
from train.settings import Settings

Progress = Callable[[int, int, float, float | None], None]


def train(
    settings: Settings | None = None,
    *,
    data: Data | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
    max_steps: int | None = None,
) -> Run:
    """Train a classifier, from the start or from a checkpoint.

    Parameters
    ----------
    settings : Settings, optional
    data : Data, optional
        Default: `digits`.
    checkpoint : path, optional
        Read if it exists, written after every epoch.
    progress : callable, optional
        Called with (step, steps, loss, test accuracy or None) after every step.
    max_steps : int, optional
        Stop after so many steps, even within an epoch, which then is not saved.

    Returns
    -------
    Run

    Raises
    ------
    OptionError
        If warmup leaves no step to fall in, the loss or its gradient is no longer finite, or the
        file is no checkpoint, or one of other settings.
    MissingExtraError
        If data is None and scikit-learn is not installed.
    """
    settings = settings or Settings()
    data = digits(settings.tokens) if data is None else data
    size = settings.batch_size
    batches = -(-len(data.x) // size)
    steps = settings.epochs * batches
    if settings.warmup >= steps:
        raise OptionError(
            f"warmup is {settings.warmup}, must be below the {steps} steps of {settings.epochs} "
            f"epochs of {batches}: pass a smaller warmup, or more epochs"
        )
    run = _resume_or_start(settings, data, checkpoint)
    while run.epoch < settings.epochs:
        order = np.random.default_rng([settings.seed, 1, run.epoch]).permutation(len(data.x))
        for start in range(0, len(data.x), size):
            batch = order[start : start + size]
            _take_step(run, data.x[batch], data.y[batch], steps)
            step, loss = len(run.losses), run.losses[-1]
            if step == max_steps:
                return run
            if progress is not None:
                progress(step, steps, loss, run.accuracies[-1] if run.accuracies else None)
        run.accuracies.append(run.accuracy(data.test_x, data.test_y))
        if checkpoint is not None:
            run.save(checkpoint)
    return run


def _take_step(run: Run, x: Array, y: Array, steps: int) -> None:
    """Update the parameters by one batch, unless its gradients overflow float16."""
    settings, step = run.settings, len(run.losses)
    loss, gradients, _ = loss_and_gradients(
        run.parameters,
        settings,
        x,
        y,
        dropout_mask=sample_dropout_mask(settings, step, x.shape),
        loss_scale=run.loss_scale.scale,
    )
    if run.loss_scale.accept(loss, gradients.values()):
        lr = step_size(settings.lr, step, steps, settings.warmup)
        run.parameters = run.adam.update(run.parameters, gradients, lr)
    run.losses.append(loss)


def sample_dropout_mask(settings: Settings, step: int, shape: tuple[int, ...]) -> Array | None:
    """Sample the weights to keep in a step on images of a shape; None without dropout."""
    if not settings.dropout:
        return None
    B, T, _ = shape
    rng = np.random.default_rng([settings.seed, 2, step])
    return rng.random((B, settings.num_heads, T, T)) >= settings.dropout


def _resume_or_start(settings: Settings, data: Data, checkpoint: str | Path | None) -> Run:
    if checkpoint is not None and Path(checkpoint).exists():
        run = Run.load(checkpoint)
        if run.settings != settings:
            differences = [
                f"{f.name} {getattr(run.settings, f.name)}, not {getattr(settings, f.name)}"
                for f in fields(Settings)
                if getattr(run.settings, f.name) != getattr(settings, f.name)
            ]
            raise OptionError(
                f"{checkpoint} is of a run with {', '.join(differences)}; pass the same settings "
                "to resume it, or another file"
            )
        return run
    p = random_parameters(settings, data.x.shape[1], data.x.shape[2], data.classes)
    return Run(settings, p, Adam(p), [], [], LossScale.of(settings.precision))
