"""Command of this folder: train a classifier, compare two, and answer questions about one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from npattn.cli import Command
from npattn.errors import NpattnError, OptionError
from npattn.testing.parsing import INTERRUPTED, interruptible, path_to_write
from train import Data, ModelComparison, Run, Settings, compare, digits, train
from train.interactive import converse
from train.precision import PRECISIONS
from train.settings import POSITIONS, TOKENS

PROMPT = "> "
DEFAULT = Settings()
ONE_RUN = {"model", "checkpoint", "out", "interactive"}
"""Parameters that do not go with --compare."""

Advance = Callable[[str, int, int, float, float | None], None]


@click.command(
    "train",
    cls=Command,
    # --embed_dim is --embed-dim
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)
@click.option(
    "--model",
    default="multihead",
    show_default=True,
    type=click.Choice(["multihead", "single"]),
    help="Attention with --num-heads heads, or with one head of the whole width.",
)
@click.option("--tokens", default=DEFAULT.tokens, show_default=True, type=click.Choice(TOKENS))
@click.option(
    "--embed-dim", default=DEFAULT.embed_dim, show_default=True, help="A multiple of --num-heads."
)
@click.option(
    "--num-heads",
    default=DEFAULT.num_heads,
    show_default=True,
    help="Heads of the multi-head model.",
)
@click.option("--epochs", default=DEFAULT.epochs, show_default=True)
@click.option("--batch-size", default=DEFAULT.batch_size, show_default=True)
@click.option("--lr", default=DEFAULT.lr, show_default=True, help="Step of Adam at its largest.")
@click.option(
    "--warmup",
    default=DEFAULT.warmup,
    show_default=True,
    metavar="STEPS",
    help="Steps in which Adam's step rises to --lr, before it falls along half a cosine.",
)
@click.option(
    "--dropout",
    default=DEFAULT.dropout,
    show_default=True,
    metavar="RATE",
    help="Share of the attention weights that training drops.",
)
@click.option(
    "--positions",
    default=DEFAULT.positions,
    show_default=True,
    type=click.Choice(POSITIONS),
    help="Vectors added to the tokens, or a relative bias of the scores.",
)
@click.option(
    "--dtype",
    default=DEFAULT.dtype,
    show_default=True,
    type=click.Choice([*PRECISIONS]),
    help="bfloat16 and float16 emulate mixed precision, with parameters in float32.",
)
@click.option("--seed", default=DEFAULT.seed, show_default=True, help="Seed of everything random.")
@click.option(
    "--compare",
    "compares",
    is_flag=True,
    help="Train a multi-head and a single-head model of the same sizes, side by side.",
)
@click.option(
    "--interactive",
    is_flag=True,
    help="Afterwards answer what is typed: the number of a test image, or help.",
)
@click.option(
    "--checkpoint",
    type=click.Path(dir_okay=False),
    help="Written after every epoch; if it exists, the run resumes from it.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False), help="Picture of the mean weights of the heads."
)
def train_command(
    model: str,
    compares: bool,
    interactive: bool,
    checkpoint: str | None,
    out: str | None,
    **options: Any,
) -> None:
    """Train a small attention classifier on handwritten digits, with npattn's own gradients.

    Flags may be spelled with underscores as well: --embed_dim.
    Exit code 0: trained; 2: wrong usage, or scikit-learn is not installed; 130: interrupted.
    """
    try:
        if compares:
            _refuse_beside_compare()
        if model == "single":
            options["num_heads"] = _one_head(options["num_heads"])
        settings = Settings(**options)
        path_to_write(checkpoint)
        picture = _path_of_picture(out)
        data = digits(settings.tokens)
        with _progress() as advance, interruptible():
            if compares:
                result: ModelComparison | Run = compare(settings, data=data, progress=advance)
            else:

                def advance_one(*at: Any) -> None:
                    advance("training", *at)

                result = train(settings, data=data, checkpoint=checkpoint, progress=advance_one)
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    except KeyboardInterrupt:
        if checkpoint is not None and Path(checkpoint).exists():
            click.echo(f"the same command goes on with {checkpoint}", err=True)
        sys.exit(INTERRUPTED)
    if isinstance(result, ModelComparison):
        click.echo(str(result))
        return
    _print_results(result, data)
    if picture is not None:
        _draw_weights(result, data, picture)
        click.echo(f"wrote {out}")
    if interactive:
        _converse(result, data)


def _from_command_line(name: str) -> bool:
    here = click.core.ParameterSource.COMMANDLINE
    return click.get_current_context().get_parameter_source(name) == here


def _refuse_beside_compare() -> None:
    beside = [name for name in sorted(ONE_RUN) if _from_command_line(name)]
    if beside:
        names = " and ".join(f"--{name}" for name in beside)
        raise OptionError(
            f"got {names} beside --compare, which trains two models: leave out one of them"
        )


def _one_head(num_heads: int) -> int:
    """Return 1; say so if another number of heads was asked for."""
    if _from_command_line("num_heads") and num_heads != 1:
        click.echo(f"--model single has 1 head: --num-heads {num_heads} is not used", err=True)
    return 1


def _path_of_picture(out: str | None) -> Path | None:
    """Return the path of the picture, if one can be drawn and written there."""
    if out is None:
        return None
    from npattn.plot.files import check_picture  # loads matplotlib

    return check_picture("--out", out)


@contextmanager
def _progress() -> Iterator[Advance]:
    """Show a bar on the error stream; give the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        tasks = {}

        def advance(name: str, step: int, steps: int, loss: float, accuracy: float | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=steps)
            suffix = "" if accuracy is None else f", test accuracy {100 * accuracy:.1f} %"
            bar.update(tasks[name], description=f"{name}: loss {loss:.4f}{suffix}", completed=step)

        yield advance


def _print_results(run: Run, data: Data) -> None:
    settings = run.settings
    heads, size = settings.num_heads, settings.embed_dim // settings.num_heads
    count = "1 head" if heads == 1 else f"{heads} heads"
    skipped = len(run.losses) - run.adam.step
    overflows = f", {skipped} of them left out by overflow" if skipped else ""
    click.echo(f"{count} of {size}, {run.num_parameters:,} parameters in {settings.dtype}")
    click.echo(f"loss {run.losses[-1]:.6f} after {len(run.losses)} steps{overflows}")
    click.echo(f"test accuracy {100 * run.accuracies[-1]:.2f} % of {len(data.test_y)} images")


def _draw_weights(run: Run, data: Data, picture: Path) -> None:
    from npattn import plot

    tokens = [f"{run.settings.tokens[:-1]} {n}" for n in range(data.x.shape[1])]
    weights = run.weights(data.test_x).mean(0)
    plot.heads(weights, queries=tokens, keys=tokens).savefig(picture)


def _converse(run: Run, data: Data) -> None:
    try:
        converse(run, data, _read_lines(), click.echo)
    except KeyboardInterrupt:
        click.echo()  # the line of the prompt ends here


def _read_lines() -> Iterator[str]:
    """Yield what is typed, or piped, up to its end; a piped line is shown after the prompt."""
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            click.echo()
            return
        if not sys.stdin.isatty():
            click.echo(line)
        yield line
