"""Problems that a sweep judges in a second, and where the time goes.

    python -m benchmarks.speed.scripts.sweep --device cuda --dtype bfloat16 --count 10000

First the sweep as `npattn check TARGET --sweep N` runs it; then a part of it again with a wait for
the device after each stage, which shows the time of each, and once more counting operations.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import npattn
from npattn.testing import Implementation, Rounding
from npattn.testing.cases.space import Space
from npattn.testing.device import judging
from npattn.testing.device import sweep as sweep_module
from npattn.testing.device.sweep import Sweep
from npattn.testing.targets import TARGETS, load
from npattn.testing.trial import Trial

STAGES = (
    (sweep_module, "sample_on_device", "sampling"),
    (judging, "_run_implementation", "implementation"),
    (Trial, "exact", "oracle"),
    (Trial, "tolerance", "bound"),
    (judging, "worst_ratios", "comparison"),
)

VIEWS = {
    *("view", "expand", "transpose", "slice", "select", "unsqueeze", "squeeze", "permute", "t"),
    *("detach", "alias", "split", "split_with_sizes", "as_strided", "_unsafe_view"),
    *("_reshape_alias", "empty", "empty_like", "empty_strided", "new_empty"),
}
"""Operations that launch nothing on a device."""


class Operations(TorchDispatchMode):
    """Counts the operations of a device, and the waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __enter__(self):
        plain = self.tolist = torch.Tensor.tolist

        def tolist(x):  # which no dispatch sees
            self.count["tolist"] += 1
            return plain(x)

        torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self.tolist
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        self.count[name] += 1
        found = function(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            tensors = [x for x in (*args, found) if isinstance(x, torch.Tensor)]
            self.count["between devices"] += len({x.device for x in tensors}) > 1
        return found

    @property
    def launches(self) -> int:
        excluded = (*VIEWS, "tolist", "between devices")
        return sum(n for name, n in self.count.items() if name not in excluded)

    @property
    def waits(self) -> int:
        return sum(self.count[n] for n in ("_local_scalar_dense", "tolist", "between devices"))


@contextmanager
def time_stages(device: torch.device) -> Iterator[dict[str, float]]:
    """Time each stage, waiting for the device at both ends."""
    seconds: dict[str, float] = defaultdict(float)
    plain = [(home, name, getattr(home, name)) for home, name, _ in STAGES]

    def finish() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    def time_stage(function, stage):
        def run(*args, **kwargs):
            finish()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            finish()
            seconds[stage] += time.perf_counter() - start
            return result

        return run

    for (home, name, stage), (_, _, function) in zip(STAGES, plain, strict=True):
        setattr(home, name, time_stage(function, stage))
    try:
        yield seconds
    finally:
        for home, name, function in plain:
            setattr(home, name, function)


def trial_of(target: str, dtype: str, device: str, rounding: str | None) -> Trial:
    f, backward = load(target)
    implementation = Implementation(f, backward=backward, framework="torch", spec=target)
    implementation.on(device)
    conventions = TARGETS[target].conventions if target in TARGETS else npattn.Conventions()
    model = Rounding.undeclared(dtype) if rounding is None else Rounding.from_name(rounding)
    space = Space(features=implementation.features, dtype=dtype)
    return Trial(implementation, conventions, model, space, frozenset({"dq", "dk", "dv", "dbias"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="torch.sdpa")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounding", choices=["upcast", "fused", "eager"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    trial = trial_of(asked.target, asked.dtype, asked.device, asked.rounding)
    sweep = Sweep(trial, asked.seed)
    sweep.run(3)  # what is loaded once
    print(f"{asked.target}, {asked.dtype}, {sweep.device}, {sweep.plan.cells} scores at most")

    start = time.perf_counter()
    outcome = sweep.run(asked.count)
    took = time.perf_counter() - start
    print(f"{outcome.status}, largest error / tolerance {outcome.worst:.2g} {outcome.message}")
    each = took / outcome.examples
    print(f"{took:.1f} s, {1 / each:.1f} problems a second, {1e4 * each:.0f} s for 10 000")

    start = time.perf_counter()
    outcome = sweep.long()
    took = time.perf_counter() - start
    print(f"long: {outcome.status}, {outcome.examples} problems in {took:.1f} s {outcome.message}")

    recipes = [sweep.plan.recipe(asked.seed, n) for n in range(min(asked.count, 200))]
    with time_stages(sweep.device) as seconds:
        for recipe in recipes:
            sweep.judge(recipe)
    for stage, took in seconds.items():
        print(f"{1e3 * took / len(recipes):10.2f} ms a problem  {stage}")

    launches, waits = [], []
    for recipe in recipes[:30]:
        with Operations() as operations:
            sweep.judge(recipe)
        launches.append(operations.launches)
        waits.append(operations.waits)
    print(f"{sum(launches) / len(launches):.0f} operations a problem, {max(launches)} at most")
    print(f"{sum(waits) / len(waits):.1f} waits for the device, {max(waits)} at most")
    if sweep.device.type == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of device memory at most")


if __name__ == "__main__":
    main()
