"""The pictures of the README: ``python docs/readme_pictures.py`` draws them into docs/_static.

They are committed, since a hub shows the README without building anything: the matrix, read from
its page docs/_static/matrix.html, and the weights of one head as `npattn.plot` draws them.
"""

import re
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import npattn
from benchmarks.matrix.cells import STATES
from npattn import plot

STATIC = Path(__file__).parent / "_static"
LOOKS = {  # of a cell: its colour, and the states of the page that have it
    "passed": ("#9bd0a8", ("passed",)),
    "failed": ("#b3261e", ("failed", "raised", "crashed", "timed out")),
    "failed, not required": (
        "#eeb4ae",
        ("failed, not required", "failed, not promised", "suspect"),
    ),
    "not asked": ("#e9ecef", ("refused", "lacks", "not run", "silent")),
}
KEYS = {STATES[s].key: n for n, (_, states) in enumerate(LOOKS.values()) for s in states}


def matrix(page: str) -> Figure:
    """Draw each run as a row and each rule as a column, coloured by the state of the cell."""
    rules = re.findall(r'<th scope="col" data-name="([\w-]+)"', page)
    runs = re.findall(r'^<tr data-dtype="[^"]*"><th scope="row">.*$', page, re.M)
    found = [re.findall(r'<td class="?(\w)(?! sum)', run) for run in runs]
    cells = [[KEYS[key] for key in row] for row in found if len(row) == len(rules)]
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    colours = [colour for colour, _ in LOOKS.values()]
    axes.imshow(cells, cmap=ListedColormap(colours), vmin=0, vmax=3, aspect="auto")
    axes.set(xlabel=f"{len(rules)} rules", ylabel=f"{len(cells)} targets and dtypes")
    axes.set(xticks=[], yticks=[])
    for label, (colour, _) in LOOKS.items():
        axes.plot([], [], "s", color=colour, label=label)
    figure.legend(loc="outside upper center", ncols=len(LOOKS), frameon=False, fontsize=9)
    return figure


def head() -> Figure:
    """Draw the exact weights of a causal head, with words as labels."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 8))
    words = ["the", "cat", "sat", "on", "the", "mat"]
    weights = npattn.forward(q, k, v, causal="bottom_right").weights
    return plot.head(weights, queries=words, keys=words, fmt=".2f")


def main() -> None:
    page = (STATIC / "matrix.html").read_text("utf-8")
    for name, figure in {"readme-matrix": matrix(page), "readme-head": head()}.items():
        figure.savefig(STATIC / f"{name}.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
