"""Command npattn compare: judge the arrays that a call left in files."""

import sys
from pathlib import Path
from typing import Any

import click

from npattn.cli.flags import GroupedCommand, add_flags
from npattn.cli.target import change_conventions
from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.profiles import find_profile
from npattn.testing.dumps.judge import compare_dump


def parse_entries(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse ("output=o", "scratch=") into {"output": "o", "scratch": ""}."""
    entries = dict(text.partition("=")[::2] for text in texts)
    if any("=" not in text or text.startswith("=") for text in texts):
        raise OptionError(f"--rename is {texts!r}, must look like output=o, or scratch= to skip it")
    return entries


@click.command("compare", cls=GroupedCommand)
@click.argument("dump", type=click.Path(path_type=Path))
@add_flags(
    *("layout", "like", "conventions", "rounding", "rename", "seed", "accept", "json", "html"),
    seed={"value": "0", "help": "Seed of the rows, where they are sampled."},
    rename={
        "help": "What an entry of DUMP is, as output=o; scratch= leaves it out.",
        "parse": parse_entries,
    },
)
@click.option("--causal", metavar="true|ALIGNMENT", help="true, top_left or bottom_right.")
@click.option("--window", metavar="LEFT,RIGHT", help="Keys beside the query; none: unlimited.")
@click.option("--scale", type=float, help="Factor of q·k.  [default: 1/√D]")
@click.option("--softcap", type=float, help="Bound of the scores.")
@click.option("--dropout-rate", type=float, help="Rate of the dropout mask in DUMP.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=256,
    help="Rows to judge where the scores are too many.  [default: 256]",
)
def compare_command(
    dump: Path, conventions: tuple[str, ...] | None, causal: str | None, window: str | None,
    json: Path | None, html: Path | None, seed: int, **flags: Any,
) -> None:  # fmt: skip
    """Judge the results in DUMP: a call of a kernel in CUDA, in C++ or on another machine.

    \b
    npattn compare dump.npz --causal bottom_right
    npattn compare folder/ --like flash_attn --rename attn_out=o
    npattn compare layer3.safetensors --layout BTHD --html page.html

    DUMP is an .npz, a folder of .npy files, a .safetensors or a .pt file. It has q, k and v, any of
    o (or out), lse, weights, dq, dk, dv, dbias, dsinks, with gradients dout (and dlse), and options
    by name: mask, bias, sinks, causal, window, scale, softcap. uint16 arrays are bfloat16.
    Exit code 0: every result is right; 1: one is wrong; 2: wrong usage, or not all were judged.
    """  # noqa: D301  click keeps the lines of a paragraph that begins with a backspace
    options = {n: x for n, x in flags.items() if x is not None}
    if causal is not None:
        options["causal"] = {"true": True, "false": False}.get(causal, causal)
    if window is not None:
        options["window"] = _parse_window(window)
    if conventions:
        like = options.get("like")
        base = Conventions() if like is None else find_profile(like).conventions
        options["conventions"] = change_conventions(base, conventions)
    report = compare_dump(dump, seed=seed, **options)
    if json is not None:
        report.to_json(json)
    if html is not None:
        report.to_html(html)
    click.echo(str(report))
    sys.exit(report.conclusion.exit_code)


def _parse_window(text: str) -> tuple[int | None, int | None]:
    """Parse "3,0" or "none,2"."""
    sides = text.split(",")
    try:
        numbers = [None if side.strip() == "none" else int(side) for side in sides]
    except ValueError:
        numbers = []
    if len(numbers) != 2:
        raise OptionError(f"--window is {text!r}, must look like 3,0 or none,2")
    return numbers[0], numbers[1]
