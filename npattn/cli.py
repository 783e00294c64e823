"""The command line: npattn check, list, zoo, bench, plot, train."""

from __future__ import annotations

import math
import sys
import tomllib
import zipfile
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from npattn.api import forward
from npattn.arrays import Array
from npattn.conventions import Conventions
from npattn.errors import MissingExtraError, NpattnError, OptionError, ShapeError

try:
    import click
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from npattn.testing.adapters.base import FRAMEWORKS
    from npattn.testing.adapters.implementation import Implementation
    from npattn.testing.check import DTYPES, SWEEPS, check
    from npattn.testing.report.report import Outcome, Report
    from npattn.testing.rules import PROPERTIES
    from npattn.testing.targets import TARGETS, load
except ImportError as err:
    raise MissingExtraError(
        "the npattn command needs hypothesis, rich and click: pip install 'npattn[check]'"
    ) from err

__all__ = ["cli"]

DEFAULT_TARGET = "numpy.flash"

# What npattn plot draws; the options are those of npattn.attention.
CONTENTS = "weights, mask or error, or q, k and v (and options of npattn.attention)"
OPTIONS = (
    *("mask", "causal", "window", "bias", "scale", "softcap"),
    *("sinks", "dropout_mask", "dropout_rate"),
)

# What reading a damaged .npz may raise.
UNREADABLE = (
    *(OSError, EOFError, ValueError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


@click.group()
@click.version_option(package_name="npattn")
def cli() -> None:
    """Is this attention implementation right?"""


@cli.command("check")
@click.argument("target", default=DEFAULT_TARGET)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    help="Of q, k, v; may be given several times.  [default: float32]",
)
@click.option("--device", help="Where torch tensors live, for instance cuda.")
@click.option("--backward", help="Of a NumPy function: module:function or path/file.py:function.")
@click.option("--examples", default=100, show_default=True, type=click.IntRange(1), help="A rule.")
@click.option("--seed", default=0, show_default=True, help="Everything random comes from it.")
@click.option(
    "--framework",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", *FRAMEWORKS]),
    help="Whose arrays it takes.",
)
@click.option("--layout", default="BHTD", show_default=True, type=click.Choice(["BHTD", "BTHD"]))
@click.option("--only", multiple=True, metavar="RULE", help="A rule, or the beginning of several.")
@click.option(
    "--sizes", multiple=True, metavar="D=64,128", help="Draw these sizes only (B H K T S D E)."
)
@click.option(
    "--convention",
    "convention_words",
    multiple=True,
    metavar="NAME=VALUE",
    help="What it promises where systems disagree, as causal=top_left; may be given several times.",
)
@click.option("--rounding", type=click.Choice(["upcast", "fused", "eager"]), help="What it rounds.")
@click.option(
    "-n", "--processes", default=1, show_default=True, type=click.IntRange(1), help="To share out."
)
@click.option(
    "--sweep",
    default=0,
    metavar="N",
    type=click.IntRange(0),
    help="And N problems of every length, which are drawn and judged on the device.",
)
@click.option("--strict", is_flag=True, help="A suspect counts as failed.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write the report there."
)
@click.option("--html", "html_path", type=click.Path(dir_okay=False), help="Write it as a page.")
@click.option(
    "--expect",
    "expect_path",
    type=click.Path(exists=True, dir_okay=False),
    help='Expected failures, as TOML: "rule[dtype]" = "reason".',
)
def check_command(
    target: str,
    dtypes: tuple[str, ...],
    backward: str | None,
    layout: str,
    framework: str,
    sizes: tuple[str, ...],
    only: tuple[str, ...],
    json_path: str | None,
    html_path: str | None,
    expect_path: str | None,
    convention_words: tuple[str, ...],
    **options: Any,
) -> None:
    """Judge TARGET: module:function, path/file.py:function, or a name that npattn list knows.

    Exit code 0: passed; 1: failed; 2: wrong usage, or nothing could be tested.
    """
    console = Console()
    try:
        expected = {} if expect_path is None else _expected(expect_path)
        f, known_backward = load(target)
        implementation = Implementation(
            f,
            backward=known_backward if backward is None else load(backward)[0],
            layout=layout,
            framework=framework,
            spec=target,
            backward_spec=backward,
        )
        conventions = TARGETS[target].conventions if target in TARGETS else Conventions()
        conventions = _changed(conventions, convention_words)
        with _progress() as (bar, tell):
            report = check(
                implementation,
                conventions=conventions,
                dtypes=dtypes or ("float32",),
                sizes=_sizes(sizes),
                only=only or None,
                progress=tell,
                **options,
            )
            bar.stop()
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    report.print_to(console)
    if json_path is not None:
        report.to_json(json_path)
    if html_path is not None:
        report.to_html(html_path)
    checked = {o.rule for o in report.outcomes}
    if only:  # what was not asked cannot be missed
        left_out = {*PROPERTIES, *SWEEPS} - checked
        expected = {n: reason for n, reason in expected.items() if n.split("[")[0] not in left_out}
    sys.exit(_exit_code(report, expected, console))


@cli.command("list")
def list_command() -> None:
    """The targets that are known by name, whether they can run here, and the rules."""
    console = Console()
    table = Table("target", "here", "about", box=None, pad_edge=False)
    for target in TARGETS.values():
        here = "yes" if target.runs_here else escape(f"pip install 'npattn[{target.needs}]'")
        table.add_row(target.name, here, target.about)
    console.print(table)
    console.print()
    rules = Table("rule", "§", "about", box=None, pad_edge=False)
    for rule in PROPERTIES.values():
        rules.add_row(rule.rule, rule.section, rule.about)
    console.print(rules)


@cli.command("plot")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="The picture to write.")
@click.option("--head", type=click.IntRange(0), help="This one alone.  [default: all]")
@click.option("--sample", type=click.IntRange(0), help="Which of a batch, counted flat.")
def plot_command(file: str, out: str, head: int | None, sample: int | None) -> None:
    """Draw FILE, an .npz, as a heat map.

    It holds one of: weights, mask, error (error / allowed error), each (T, S) or (H, T, S); or q,
    k, v, and the options of npattn.attention by name, whose weights are drawn (a window without an
    end has nan there). It may hold labels: queries and keys, arrays of strings.
    Exit code 0: written; 2: wrong usage, and nothing is written.
    """
    try:
        figure = _figure(_arrays(file), head, sample)
        formats = figure.canvas.get_supported_filetypes()
        if Path(out).suffix[1:].lower() not in formats:
            raise OptionError(f"--out is {out!r}, must end in one of .{', .'.join(formats)}")
        figure.savefig(out)
    except (NpattnError, OSError) as err:
        raise click.UsageError(str(err)) from err
    click.echo(f"wrote {out}")


@cli.command("zoo")
@click.argument("names", nargs=-1)
@click.option("--examples", default=100, show_default=True, type=click.IntRange(1), help="A rule.")
@click.option("--seed", default=0, show_default=True, help="Everything random comes from it.")
@click.option(
    "-j", "--jobs", default=1, show_default=True, type=click.IntRange(1), help="Processes."
)
@click.option(
    "--rules",
    default="all",
    show_default=True,
    type=click.Choice(["all", "killers"]),
    help="Every rule, or for a mutant only those that must find it.",
)
@click.option(
    "--kind",
    default="all",
    show_default=True,
    type=click.Choice(["all", "mutant", "correct"]),
    help="What is wrong, what is right, or both.",
)
@click.option("--list", "lists", is_flag=True, help="Only say what is in it.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write the matrix there."
)
def zoo_command(names: tuple[str, ...], lists: bool, json_path: str | None, **options: Any) -> None:
    """Judge the judge: every mutant must be found, and nothing that is right may be.

    NAMES are mutants or correct implementations, or beginnings of their names; default: all.
    Exit code 0: all mutants killed, no false alarm; 1: else; 2: wrong usage.
    """
    from npattn.zoo.correct import CORRECT
    from npattn.zoo.mutants import MUTANTS
    from npattn.zoo.score import zoo

    console = Console()
    if lists:
        table = Table("name", "family", "what is wrong", "source", box=None, pad_edge=False)
        for mutant in MUTANTS.values():
            table.add_row(mutant.name, mutant.family, escape(mutant.sentence), mutant.source)
        for right in CORRECT.values():
            table.add_row(right.name, "correct", escape(right.sentence), "")
        console.print(table)
        return
    try:
        with _progress() as (bar, tell):
            found = zoo(only=names, progress=lambda name, *at: tell("zoo", name, *at), **options)
            bar.stop()
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    console.print(str(found), markup=False, highlight=False, soft_wrap=True)
    if json_path is not None:
        found.to_json(json_path)
    sys.exit(0 if found.passed else 1)


@cli.command("bench")
@click.option("--cases", help="Of plain, causal, …, with commas.  [default: all]")
@click.option("--lengths", help="T, with commas.  [default: 128,256,…,16384]")
@click.option("--contestants", help="With commas.  [default: all that are installed]")
@click.option(
    "--dtype", "dtypes", multiple=True, help="float32, float64; may be given twice. [default: both]"
)
@click.option("--rounds", default=7, show_default=True, help="In each, everybody has a turn.")
@click.option(
    "--seconds",
    default=240.0,
    show_default=True,
    help="That one contestant may take at one length; it is skipped where it would take more.",
)
@click.option(
    "--threads", type=int, help="Of each contestant.  [default: as many as BLAS would use]"
)
@click.option("--seed", default=0, show_default=True, help="Everything random comes from it.")
@click.option("--list", "lists", is_flag=True, help="Only say who takes part, and in what.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write all figures there."
)
@click.option(
    "--picture", "picture_path", type=click.Path(dir_okay=False), help="Draw seconds over T there."
)
def bench_command(
    cases: str | None,
    lengths: str | None,
    contestants: str | None,
    dtypes: tuple[str, ...],
    json_path: str | None,
    picture_path: str | None,
    lists: bool,
    **options: Any,
) -> None:
    """Time and memory of npattn beside NumPy, torch, JAX and ONNX, in one run.

    Exit code 0: measured; 2: wrong usage. What is wrong is marked, and is no failure.
    """
    from npattn.bench import CASES, CONTESTANTS, Settings, bench

    console = Console()
    if lists:
        table = Table("name", "here", "about", box=None, pad_edge=False)
        for name, case in CASES.items():
            table.add_row(name, "yes", case.about)
        for name, contestant in CONTESTANTS.items():
            here = escape(f"pip install 'npattn[{contestant.needs}]'")
            table.add_row(name, "yes" if contestant.runs_here else here, contestant.about)
        console.print(table)
        return
    words = {"cases": cases, "contestants": contestants}
    options |= {n: tuple(text.split(",")) for n, text in words.items() if text is not None}
    options |= {"dtypes": dtypes} if dtypes else {}
    try:
        if lengths is not None:
            options["lengths"] = _lengths(lengths)
        settings = Settings(**options)
        for path in (json_path, picture_path):
            if path is not None and not Path(path).absolute().parent.is_dir():
                raise OptionError(f"{path} is in no folder, must be in one that exists")
        if picture_path is not None:
            from npattn.bench import picture

            picture.checked(picture_path)
        with _progress() as (bar, tell):
            report = bench(
                settings,
                progress=lambda what, *at: tell("bench", what, *at),
                save=None if json_path is None else lambda found: found.to_json(json_path),
            )
            bar.stop()
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if picture_path is not None:
        picture.draw(report).savefig(picture_path)


@cli.command("train")
@click.option("--tokens", default="rows", show_default=True, type=click.Choice(["rows", "pixels"]))
@click.option("--embed-dim", default=32, show_default=True, help="A multiple of --num-heads.")
@click.option("--num-heads", default=4, show_default=True)
@click.option("--epochs", default=40, show_default=True)
@click.option("--batch-size", default=64, show_default=True)
@click.option("--lr", default=4e-3, show_default=True, help="Adam's step at the beginning.")
@click.option("--seed", default=0, show_default=True, help="Everything random comes from it.")
@click.option("--interactive", is_flag=True, help="Ask for each of these.")
@click.option(
    "--checkpoint",
    type=click.Path(dir_okay=False),
    help="Written after every epoch; where it exists, the run goes on from it.",
)
@click.option("--out", type=click.Path(dir_okay=False), help="A picture of what the heads look at.")
def train_command(
    interactive: bool, checkpoint: str | None, out: str | None, **options: Any
) -> None:
    """Train a small attention classifier on handwritten digits, with npattn's own gradients.

    Exit code 0: trained; 2: wrong usage, or scikit-learn is not installed.
    """
    from npattn.train import Settings, digits, train

    console = Console()
    if interactive:
        options = {n: click.prompt(n.replace("_", " "), default=x) for n, x in options.items()}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        settings = Settings(**options)
        data = digits(settings.tokens)
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("training", total=None)

            def tell(step: int, steps: int, loss: float, accuracy: float | None) -> None:
                reached = "" if accuracy is None else f", test accuracy {100 * accuracy:.1f} %"
                said = f"loss {loss:.4f}{reached}"
                bar.update(task, description=said, completed=step, total=steps)

            run = train(settings, data=data, checkpoint=checkpoint, progress=tell)
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    console.print(f"loss {run.losses[-1]:.6f} after {len(run.losses)} steps")
    console.print(f"test accuracy {100 * run.accuracies[-1]:.2f} % of {len(data.test_y)} images")
    if out is not None:
        from npattn import plot

        tokens = [f"{settings.tokens[:-1]} {n}" for n in range(data.x.shape[1])]
        weights = run.weights(data.test_x).mean(0)
        plot.heads(weights, queries=tokens, keys=tokens).savefig(out)
        console.print(f"wrote {out}", soft_wrap=True)


class _progress:
    """A bar on the error stream, and the function that moves it."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self) -> tuple[Progress, Any]:
        self.bar.start()
        task = self.bar.add_task("probing", total=None)

        def tell(dtype: str, rule: str, done: int, total: int) -> None:
            self.bar.update(task, description=f"{dtype} {rule}", completed=done, total=total)

        return self.bar, tell

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _sizes(texts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """("D=64,128", "T=128") → {"D": (64, 128), "T": (128,)}."""
    sizes = {}
    for text in texts:
        letter, equals, numbers = text.partition("=")
        try:
            sizes[letter] = tuple(int(n) for n in numbers.split(","))
        except ValueError:
            equals = ""
        if not equals:
            raise OptionError(f"--sizes is {text!r}, must look like D=64,128")
    return sizes


def _lengths(text: str) -> tuple[int, ...]:
    """ "128,256" → (128, 256)."""
    try:
        return tuple(int(n) for n in text.split(","))
    except ValueError:
        raise OptionError(f"--lengths is {text!r}, must look like 128,256") from None


def _changed(conventions: Conventions, words: tuple[str, ...]) -> Conventions:
    """The conventions with ("causal=top_left", "hidden_fill=-1e9", ...)."""
    names = [f.name for f in fields(Conventions)]
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in names:
            raise OptionError(f"--convention is {word!r}, must be NAME=VALUE, {', '.join(names)}")
        number = name in ("hidden_fill", "lse_empty")
        try:
            changes[name] = float(value) if number else value
        except ValueError:
            raise OptionError(f"--convention is {word!r}, must have a number") from None
    return replace(conventions, **changes)


def _expected(path: str) -> dict[str, str]:
    """The file of expected failures, each with a reason."""
    try:
        entries = tomllib.loads(Path(path).read_text())
    except tomllib.TOMLDecodeError as err:
        raise OptionError(f'{path} is not TOML ({err}); write "rule[dtype]" = "reason"') from err
    for name, reason in entries.items():
        if not isinstance(reason, str) or not reason.strip():
            raise OptionError(f'{path} has {name} without a reason, must be "rule" = "reason"')
    return entries


def _exit_code(report: Report, expected: dict[str, str], console: Console) -> int:
    """0 if all that failed was expected, and all that was expected failed."""
    if not report.tested:
        console.print("nothing could be tested")
        return 2

    def entries(outcome: Outcome) -> set[str]:
        return {outcome.id, outcome.rule} & set(expected)

    bad = {"failed", "error"} | ({"suspect"} if report.strict else set())
    failed = [o for o in report.outcomes if o.status in bad]
    met = {name for outcome in failed for name in entries(outcome)}
    for outcome in failed:
        for name in sorted(entries(outcome)):
            console.print(f"expected: {outcome.id}: {expected[name]}", markup=False, soft_wrap=True)
    stale = sorted(set(expected) - met)
    named = {name for outcome in report.outcomes for name in (outcome.id, outcome.rule)}
    for name in stale:
        why = "did not fail" if name in named else "matches no rule that was checked"
        console.print(f"expected failure {name} {why}: remove it", markup=False, soft_wrap=True)
    surprises = [o for o in failed if not entries(o)]
    if failed and not surprises and not stale:
        console.print("as expected", style="bold")
    return 1 if surprises or stale else 0


def _arrays(path: str) -> dict[str, Array]:
    """What an .npz holds, if it is one."""
    must = f"must be an .npz that holds {CONTENTS}"
    if not zipfile.is_zipfile(path):
        raise OptionError(f"{path} is no .npz, {must}")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in file.files}
    except UNREADABLE as err:
        raise OptionError(f"{path} cannot be read ({err}), {must}") from err


def _figure(arrays: dict[str, Array], head: int | None, sample: int | None) -> Any:
    """The heat map of what a file holds, a matplotlib figure."""
    from npattn import plot  # and with it matplotlib

    labels = {name: arrays.pop(name).tolist() for name in ("queries", "keys") if name in arrays}
    name, array = _drawable(arrays)
    array = _picked(name, array, head, sample)
    title = None if head is None else f"head {head}"
    if name == "mask":
        return plot.mask(array, title=title, **labels)
    if name == "error":
        queries, keys = labels.get("queries"), labels.get("keys")
        axes = ("query" if queries else "row", "key" if keys else "column")
        return plot.error(array, rows=queries, columns=keys, axes=axes, title=title)
    draw = plot.heads if array.ndim == 3 else plot.head
    return draw(array, title=title, **labels)


def _drawable(arrays: dict[str, Array]) -> tuple[str, Array]:
    """The one array that is to be drawn, and which it is."""
    names = ", ".join(arrays) or "nothing"
    if not {"q", "k", "v"} & set(arrays):
        if len(arrays) != 1 or names not in ("weights", "mask", "error"):
            raise OptionError(f"the file holds {names}, must hold {CONTENTS}")
        return names, arrays[names]
    missing = [name for name in "qkv" if name not in arrays]
    unknown = [name for name in arrays if name not in (*"qkv", *OPTIONS)]
    if missing or unknown:
        raise OptionError(
            f"the file holds {names}, must hold q, k, v, and of {', '.join(OPTIONS)} what is wanted"
        )
    options = {n: _option(n, a) for n, a in arrays.items()}
    return "weights", forward(**options).weights


def _option(name: str, array: Array) -> Any:
    """An option of npattn.attention as it stands in a file, where None is nan."""
    if name == "window" and array.shape == (2,) and array.dtype.kind in "iuf":
        sides = (None if np.isnan(n) else float(n) for n in array)  # beside nan all are floats
        return tuple(int(n) if n is not None and n.is_integer() else n for n in sides)
    return array.item() if array.ndim == 0 else array


def _picked(name: str, array: Array, head: int | None, sample: int | None) -> Array:
    """One of the batch and one of the heads, where they were asked for."""
    if sample is not None:
        if array.ndim < 4:
            raise ShapeError(f"{name} has shape {array.shape}, must have a batch for --sample")
        array = array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])
        if sample >= len(array):
            raise OptionError(f"--sample is {sample}, must be below {len(array)}")
        array = array[sample]
    elif array.ndim > 3:
        raise ShapeError(f"{name} has shape {array.shape}: pick one of the batch with --sample")
    if head is None:
        return array
    if array.ndim != 3:
        raise ShapeError(f"{name} has shape {array.shape}, must be (H, T, S) for --head")
    if head >= len(array):
        raise OptionError(f"--head is {head}, must be below {len(array)}, the number of heads")
    one: Array = array[head]
    return one
