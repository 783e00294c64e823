"""Adam with weight decay, and the size of its steps."""

from __future__ import annotations

import math

import numpy as np

from npattn.problem.arrays import Array
from train.model import Parameters

BETA1, BETA2, ADAM_EPS = 0.9, 0.999, 1e-8
DECAY = 0.5
"""Weight decay of the projections: by lr × this per step."""


def step_size(lr: float, step: int, steps: int, warmup: int) -> float:
    """Size of one of the steps 0, 1, …, steps − 1: up along a line, down along half a cosine.

    The steps before `warmup` are lr/warmup, 2·lr/warmup, … up to lr, from which the others fall.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def decays(name: str, x: Array) -> bool:
    """Return True for projections, the parameters with weight decay."""
    return x.ndim == 2 and name not in ("pos", "table")


class Adam:
    """Kingma and Ba 2015, algorithm 1, with the decay of Loshchilov and Hutter 2019."""

    def __init__(self, p: Parameters) -> None:
        self.m = {name: np.zeros_like(x) for name, x in p.items()}
        self.v = {name: np.zeros_like(x) for name, x in p.items()}
        self.step = 0

    def update(self, p: Parameters, d: Parameters, lr: float) -> Parameters:
        self.step += 1
        rise, spread = 1 - BETA1**self.step, 1 - BETA2**self.step
        updated = {}
        for name, x in p.items():
            self.m[name] = BETA1 * self.m[name] + (1 - BETA1) * d[name]
            self.v[name] = BETA2 * self.v[name] + (1 - BETA2) * d[name] ** 2
            size = np.sqrt(self.v[name]) / math.sqrt(spread) + ADAM_EPS
            shrunk = x * (1 - lr * DECAY) if decays(name, x) else x
            updated[name] = shrunk - lr / rise * self.m[name] / size
        return updated
