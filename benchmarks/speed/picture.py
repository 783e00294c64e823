"""Seconds over T, log-log: a column a case, a row a dtype and pass, a line a contestant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.speed.contestants import CONTESTANTS
from benchmarks.speed.report import PASSES, Cell, Report
from npattn.errors import OptionError, optional_import

with optional_import("a picture needs", "matplotlib", "plot"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


PANEL = (3.4, 2.9)  # inches
DPI = 130
# Okabe and Ito's colours, which the colour-blind tell apart, and marks for readers without colour.
COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#999999")
MARKS = "os^vDPX"
BOUNDS: dict[str, dict[str, Any]] = {
    "ceiling": {"color": "black", "linestyle": "--", "linewidth": 1},
    "floor": {"color": "black", "linestyle": ":", "linewidth": 1},
}


def check_path(path: str) -> None:
    """Raise OptionError if no picture can be written to `path`, by its ending."""
    formats = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        raise OptionError(f"picture is {path!r}, must end in one of .{', .'.join(formats)}")


def draw(report: Report) -> Figure:
    """Draw the picture, without wrong results.

    Parameters
    ----------
    report : Report

    Returns
    -------
    matplotlib.figure.Figure
    """
    cases = list(dict.fromkeys(cell.case for cell in report.cells))
    rows = [(d, p) for d in dict.fromkeys(cell.dtype for cell in report.cells) for p in PASSES]
    size = (PANEL[0] * len(cases), PANEL[1] * len(rows) + 0.7)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots(len(rows), len(cases), squeeze=False, sharex=True, sharey=True)
    handles: dict[str, Any] = {}
    for i, (dtype, name) in enumerate(rows):
        for j, case in enumerate(cases):
            ax = axes[i][j]
            ax.set_title(f"{case}, {dtype}, {PASSES[name]}", fontsize=8)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.grid(True, color="0.9", linewidth=0.5)
            ax.tick_params(labelsize=7)
            cells = [c for c in report.cells if c.case == case and c.dtype == dtype]
            handles |= _lines(ax, cells, name)
            if j == 0:
                ax.set_ylabel("seconds", fontsize=8)
            if i == len(rows) - 1:
                ax.set_xlabel("T, in keys", fontsize=8)
    if handles:
        columns = min(len(handles), 2 * len(cases))
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns,
            fontsize=8, frameon=False,
        )  # fmt: skip
    return figure


def _lines(ax: Any, cells: list[Cell], name: str) -> dict[str, Any]:
    """Draw one line per contestant with times; return the handles by name."""
    handles = {}
    for contestant in dict.fromkeys(cell.contestant for cell in cells):
        own = [c for c in cells if c.contestant == contestant and c.counts]
        points = [(c.T, t) for c in own if (t := c.times(name)) is not None]
        if not points:
            continue
        lengths, times = zip(*points, strict=True)
        medians = [t.median for t in times]
        style = BOUNDS.get(contestant.role) or _style(contestant.name)
        (handles[contestant.name],) = ax.plot(lengths, medians, label=contestant.name, **style)
        if contestant.role not in BOUNDS:
            least, most = [t.least for t in times], [t.most for t in times]
            ax.fill_between(lengths, least, most, color=style["color"], alpha=0.15, linewidth=0)
    return handles


def _style(name: str) -> dict[str, Any]:
    """Style of a contestant, the same in every picture."""
    i = list(CONTESTANTS).index(name) if name in CONTESTANTS else 0
    own = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)]}
    return own | {"markersize": 3, "linewidth": 1.6 if name.startswith("npattn") else 1}
