"""Processor time of a verdict: beside another checkout, and beside checks by torch.allclose.

    git worktree add ../before 5c57683a
    python -m benchmarks.speed.scripts.verdicts --before ../before --turns 3
    python -m benchmarks.speed.scripts.verdicts --count 8

Checkouts are asked in turns, so that a machine that wanders changes both; the figure is the least
time of each. Throughput is verdicts of a minute of one core: of a `Session`, and of a loop that
compares five random problems in a fresh process, as benchmarks of kernels by language models do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from npattn.testing import Session

RIGHT = """
import numpy as np

def attention(q, k, v):
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(1 / max(q.shape[-1], 1) ** 0.5)
    p = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
    return p / p.sum(-1, keepdims=True) @ v
"""
SCALE = "max(q.shape[-1], 1) ** 0.5"
SOURCES = {"right": RIGHT, "scale": RIGHT.replace(SCALE, "1"), "power": RIGHT.replace("0.5", "0.6")}
ALLCLOSE = """
import torch
from candidate import attention
torch.set_num_threads(1)
for seed in range(5):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
    got = torch.from_numpy(attention(q.numpy(), k.numpy(), v.numpy()))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(got, want, atol=1e-2, rtol=1e-2)
"""
COMMANDS = {
    "npattn --help": ["--help"],
    "npattn check --help": ["check", "--help"],
    "npattn check right": ["check", "right.py:attention"],
    "npattn check -x scale": ["check", "-x", "scale.py:attention"],
    "npattn check -x power": ["check", "-x", "power.py:attention"],
    "npattn check torch.sdpa": ["check", "torch.sdpa"],
    "npattn check jax.nn": ["check", "jax.nn", "--examples", "100"],
}
SLOW = ("npattn check torch.sdpa", "npattn check jax.nn")


def spent() -> float:
    """Processor seconds of this process and of all that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def time_command(words: list[str], checkout: Path, folder: Path) -> float:
    """Return the processor seconds of a command of npattn, and of all processes it starts."""
    before = spent()
    variables = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "npattn", *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise click.ClickException(done.stderr.decode())
    return spent() - before


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
    """Print how many candidates a minute of one core judges, a third of them right."""
    sources = [list(SOURCES.values())[n % 3] for n in range(count)]
    for name, settings in (
        ("Session, untrusted", {"must": ["o"], "strict": False}),
        ("Session(untrusted=False)", {"untrusted": False}),
        ("Session(untrusted=False, diagnosis=False)", {"untrusted": False, "diagnosis": False}),
    ):
        with Session(seconds=60, **settings) as session:
            session.judge(RIGHT)  # imports
            before = spent()
            verdicts = [session.judge(source).verdict for source in sources]
        missed = sum(
            (v == "passed") != (s == RIGHT) for v, s in zip(verdicts, sources, strict=True)
        )
        click.echo(f"{name:44}{60 * count / (spent() - before):7.1f} a minute, {missed} wrong")
    before, missed = spent(), 0
    for source in sources:
        (folder / "candidate.py").write_text(source, "utf-8")
        code = subprocess.run([sys.executable, "-c", ALLCLOSE], cwd=folder, check=False,
                              capture_output=True).returncode  # fmt: skip
        missed += (code == 0) != (source == RIGHT)
    rate = 60 * count / (spent() - before)
    click.echo(f"{'torch.allclose, 5 problems, atol 1e-2':44}{rate:7.1f} a minute, {missed} wrong")


@click.command()
@click.option("--before", type=click.Path(path_type=Path), help="Checkout to compare with.")
@click.option("--turns", default=3, show_default=True)
@click.option("--slow", is_flag=True, help="Also ask torch.sdpa and jax.nn.")
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
