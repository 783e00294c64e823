"""Processor time of a verdict: beside another checkout, and beside checks by torch.allclose.

    git worktree add ../before 5c57683a
    python -m benchmarks.speed.scripts.verdicts --before ../before --turns 3
    python -m benchmarks.speed.scripts.verdicts --count 10

Checkouts are asked in turns, so that a machine that wanders changes both; the figure is the least
time of each. Throughput is verdicts of a minute of one core over candidates of which one in five is
right: of a `Session`, of a check as KernelBench makes it, and of plain loops with torch.allclose.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from benchmarks.speed.clock import processor_seconds
from benchmarks.speed.judge import JITTED
from npattn.testing import Session

RIGHT = """
import numpy as np

def attention(q, k, v):
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(1 / max(q.shape[-1], 1) ** 0.5)
    p = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
    return p / p.sum(-1, keepdims=True) @ v
"""
SCALE = "max(q.shape[-1], 1) ** 0.5"
SOURCES = {
    "right": RIGHT,
    "scale": RIGHT.replace(SCALE, "1"),
    "power": RIGHT.replace("0.5", "0.6"),
    "overflow": RIGHT.replace(" - s.max(-1, keepdims=True, initial=-1e30)", ""),
    "tail": RIGHT.replace("    p = ", "    s[..., s.shape[-1] // 8 * 8 :] = -1e30\n    p = "),
}
ALLCLOSE = """
import sys
import torch
torch.set_num_threads(1)

def is_close(source, draw, shape, trials):
    names = {}
    exec(source, names)
    for seed in range(trials):
        torch.manual_seed(seed)
        q, k, v = (draw(shape) for _ in range(3))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        got = torch.from_numpy(names["attention"](q.numpy(), k.numpy(), v.numpy()))
        if got.shape != want.shape or not torch.allclose(got, want, atol=1e-2, rtol=1e-2):
            return False
    return True

kind, *files = sys.argv[1:]
draw, shape = {"rand": (torch.rand, (32, 8, 128, 64)), "randn": (torch.randn, (2, 4, 64, 32))}[kind]
for file in files:
    print(is_close(open(file).read(), draw, shape, 5))
"""
LOOPS = {
    "as KernelBench: 5 uniform inputs of one shape": ("rand", True),
    "torch.allclose, 5 normal inputs": ("randn", True),
    "the same, in one process for all": ("randn", False),
}
"""Loops with tolerance 1e-2: kind of inputs, and True for a fresh process a candidate."""
COMMANDS = {
    "npattn --help": ["--help"],
    "npattn check --help": ["check", "--help"],
    "npattn check right": ["check", "right.py:attention"],
    "npattn check -x scale": ["check", "-x", "scale.py:attention"],
    "npattn check -x power": ["check", "-x", "power.py:attention"],
    "npattn check torch.sdpa": ["check", "torch.sdpa"],
    "npattn check jax.nn": ["check", "jax.nn", "--examples", "100"],
    "npattn check jitted": ["check", JITTED],
}
SLOW = ("npattn check torch.sdpa", "npattn check jax.nn", "npattn check jitted")


def time_command(words: list[str], checkout: Path, folder: Path) -> float:
    """Return the processor seconds of a command of npattn, and of all processes it starts."""
    before = processor_seconds()
    variables = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "npattn", *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise click.ClickException(done.stderr.decode())
    return processor_seconds() - before


def compare_checkouts(before: Path, turns: int, slow: bool, folder: Path) -> None:
    """Print the least time of each command in either checkout, and their ratio."""
    here = Path(__file__).parents[3]
    for name, words in COMMANDS.items():
        if name in SLOW and not slow:
            continue
        pairs = [[time_command(words, x, folder) for x in (before, here)] for _ in range(turns)]
        old, new = map(min, zip(*pairs, strict=True))
        click.echo(f"{name:28}{old:8.2f} s{new:8.2f} s{new / old:8.2f}")


def measure_throughput(count: int, folder: Path) -> None:
    """Print how many candidates a minute of one core each way judges, and how many wrongly."""
    names = [list(SOURCES)[n % len(SOURCES)] for n in range(count)]
    rates = []

    def report(way: str, judge: Callable[[], list[bool]]) -> None:
        before = processor_seconds()
        passed = judge()
        rates.append(60 * count / (processor_seconds() - before))
        missed = sum(p != (n == "right") for p, n in zip(passed, names, strict=True))
        shown = f"{rates[-1]:7.1f} a minute{rates[-1] / rates[0]:8.2f} times"
        click.echo(f"{way:48}{shown}, {missed} of {count} wrong")

    for way, settings in (
        ("Session, untrusted", {"must": ["o"], "strict": False}),
        ("Session(untrusted=False)", {"untrusted": False}),
        ("Session(untrusted=False, diagnosis=False)", {"untrusted": False, "diagnosis": False}),
    ):
        with Session(seconds=600, **settings) as session:  # of a busy machine
            session.judge(RIGHT)  # imports
            report(way, lambda s=session: [s.judge(SOURCES[n]).verdict == "passed" for n in names])
    files = [f"{folder / n}.py" for n in names]
    for way, (kind, fresh) in LOOPS.items():
        report(way, partial(run_loop, kind, files, fresh))


def run_loop(kind: str, files: list[str], fresh: bool) -> list[bool]:
    """Return which files agree with torch, each asked in a fresh process or all in one."""
    if fresh and len(files) > 1:
        return [agrees for file in files for agrees in run_loop(kind, [file], fresh)]
    command = [sys.executable, "-c", ALLCLOSE, kind, *files]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line == "True" for line in done.stdout.split()]


@click.command()
@click.option("--before", type=click.Path(path_type=Path), help="Checkout to compare with.")
@click.option("--turns", default=3, show_default=True)
@click.option("--slow", is_flag=True, help="Also ask torch.sdpa and functions of JAX.")
@click.option("--count", default=0, help="Candidates of the throughput.")
def main(before: Path | None, turns: int, slow: bool, count: int) -> None:
    """Measure the processor time of verdicts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source, text in SOURCES.items():
            (folder / f"{source}.py").write_text(text, "utf-8")
        if before is not None:
            compare_checkouts(before.resolve(), turns, slow, folder)
        if count:
            measure_throughput(count, folder)


if __name__ == "__main__":
    main()
