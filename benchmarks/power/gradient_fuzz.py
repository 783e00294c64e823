"""Random compositions of torch functions, whose gradients by autograd `check_gradients` must pass.

    python -m benchmarks.power.gradient_fuzz --count 600

Arguments go up to 20 times a normal one, so that units saturate, weights vanish and numbers cancel.
An alarm is a gradient that is called wrong; one that could not be judged is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F

from npattn.testing import check_gradients
from npattn.testing.gradients.report import GradientReport

SCALES = (0.1, 1.0, 5.0, 20.0)
UNITS: dict[str, Callable[[Any, Any], Any]] = {
    "tanh": lambda x, y: torch.tanh(x),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "log_softmax": lambda x, y: torch.log_softmax(x, -1),
    "logsumexp": lambda x, y: torch.logsumexp(x, -1, keepdim=True) + x,
    "softplus": lambda x, y: F.softplus(x),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "relu": lambda x, y: F.relu(x),
    "abs": lambda x, y: x.abs(),
    "erf": lambda x, y: torch.erf(x),
    "bell": lambda x, y: torch.exp(-(x**2)),
    "sin": lambda x, y: torch.sin(x),
    "norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
    "unit": lambda x, y: F.normalize(x, dim=-1),
    "maximum": lambda x, y: torch.maximum(x, y),
    "amax": lambda x, y: x - x.amax(-1, keepdim=True),
    "sort": lambda x, y: torch.sort(x, -1).values,
    "times": lambda x, y: x * y,
    "plus": lambda x, y: x + y,
    "over": lambda x, y: x / (1 + y**2),
    "mix": lambda x, y: torch.softmax(x * y, -1) @ torch.tanh(x.mT) @ x,
    "cumsum": lambda x, y: x.cumsum(-1),
    "gate": lambda x, y: torch.sigmoid(y) * torch.tanh(x),
}
"""Functions of x (3, 5) and y (5,) that return (3, 5)."""


def compose(seed: int) -> tuple[str, Callable[[Any, Any], Any], tuple[Any, Any]]:
    """Return the name of a composition, the function, and its arguments x (3, 5) and y (5,)."""
    rng = np.random.default_rng(seed)
    names = [str(name) for name in rng.choice(list(UNITS), rng.integers(1, 5))]
    dtype = torch.float32 if seed % 2 else torch.float64
    sizes = rng.choice(SCALES, 2)
    shapes = ((3, 5), (5,))
    args = [
        torch.tensor(n * rng.standard_normal(s), dtype=dtype)
        for n, s in zip(sizes, shapes, strict=True)
    ]

    def f(x: Any, y: Any) -> Any:
        for name in names:
            x = UNITS[name](x, y)
        return x

    told = f"{seed}: {' '.join(names)} at {sizes[0]:g}, {sizes[1]:g} in {str(dtype)[6:]}"
    return told, f, (args[0], args[1])


def judge(seed: int) -> tuple[str, GradientReport]:
    """Return the name of a composition, and what is said of its gradients."""
    name, f, args = compose(seed)
    return name, check_gradients(f, args, seed=seed)


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--count", default=600, show_default=True)
@click.option("--start", default=0, show_default=True, help="The first seed.")
def main(count: int, start: int) -> None:
    alarms, open_ = [], 0
    for seed in range(start, start + count):
        name, report = judge(seed)
        open_ += not report.passed and not report.failures
        if report.failures:
            alarms.append(name)
            print(name, *map(str, report.failures), sep="\n    ", flush=True)
    print(f"{len(alarms)} alarms in {count} compositions; {open_} without a verdict")
    raise SystemExit(bool(alarms))


if __name__ == "__main__":
    main()
