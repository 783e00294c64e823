"""Command npattn plot: draw a heat map of an .npz file."""

from typing import Any

import click

from npattn.errors import OptionError


@click.command("plot")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="The picture to write.")
@click.option("--head", type=click.IntRange(0), help="Draw this head alone.  [default: all]")
@click.option("--sample", type=click.IntRange(0), help="Element of the batch, counted flat.")
@click.option("--cmap", metavar="NAME", help="Colour map of matplotlib.  [default: viridis]")
@click.option(
    "--fmt",
    metavar="FORMAT",
    help="Format of the numbers in the cells, as .3f or .0%.  [default: at most five characters]",
)
@click.option(
    "--figsize",
    metavar="W,H",
    help="Width and height of the picture in inches, as 8,6.  [default: as the cells need]",
)
def plot_command(file: str, out: str, figsize: str | None, **look: Any) -> None:
    """Draw FILE, an .npz, as a heat map.

    It holds one of: weights, mask, error (error / tolerance), each (T, S) or (H, T, S); or q,
    k, v and options of npattn.attention by name, whose exact weights are drawn (nan stands for an
    unlimited side of window). It may hold labels: queries and keys, arrays of strings.
    Exit code 0: written; 2: wrong usage, and nothing is written.
    """
    from npattn.plot.files import check_picture, draw_file  # loads matplotlib

    path = check_picture("--out", out)
    size = None if figsize is None else _inches(figsize)
    try:
        draw_file(file, figsize=size, **look).savefig(path)
    except OSError as err:
        raise click.UsageError(str(err)) from err
    click.echo(f"wrote {out}")


def _inches(text: str) -> tuple[float, float]:
    """Parse "8,6" into (8.0, 6.0)."""
    try:
        width, height = (float(side) for side in text.split(","))
    except ValueError:
        raise OptionError(f"--figsize is {text!r}, must look like 8,6: width and height") from None
    return width, height
