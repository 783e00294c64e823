"""Heat maps of a wrong result for a page: got, want and error / tolerance, as coloured tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.excerpt import Excerpt
from npattn.testing.report.markup import safe_text
from npattn.testing.report.pair import AXES, SIDE, two_digits


def heat_maps(name: str, excerpt: Excerpt, axes: str = "") -> str:
    """Return got, want and error / tolerance as three tables of the same numbers, coloured.

    Parameters
    ----------
    name : str
        The result: "o", "dk".
    excerpt : Excerpt
        At most 8 × 8 of its elements are shown, with the first that is out of tolerance.
    axes : str
        Letters of the axes of the result; that of a known result needs none.
    """
    part = excerpt.crop(SIDE)
    axes = axes or AXES.get(name, "")
    lead = zip(axes[:-2], part.lead, strict=False)
    place = ", ".join(f"{letter} = {i}" for letter, i in lead) or ", ".join(map(str, part.lead))
    both = np.concatenate([part.got.ravel(), part.want.ravel()])
    top = float(abs(both[np.isfinite(both)]).max(initial=0)) or 1.0
    tables = (
        _table("got", part.got, part, axes, lambda x: _sign_colour(x / top)),
        _table("want", part.want, part, axes, lambda x: _sign_colour(x / top)),
        _table("error / tolerance", part.ratio, part, axes, _ratio_colour),
    )
    key = "blue below 0, red above; green within the tolerance, black without a number"
    caption = (
        f"<figcaption>{safe_text(f'{name} at {place}' if place else name)}: {key}</figcaption>"
    )
    return f'<figure>{caption}<div class="maps">{"".join(tables)}</div></figure>'


def _table(
    title: str, values: Array, part: Excerpt, axes: str, colour: Callable[[float], str]
) -> str:
    """Return one map: rows and columns with their indices, and a number in each cell."""
    across = "".join(f"<th>{part.column + j}" for j in range(values.shape[1]))
    corner = " \\ ".join(axes[-2:])
    rows = [f"<tr><th>{corner}{across}"]
    for i, row in enumerate(values):
        cells = "".join(f'<td style="background:{colour(x)}">{_number(x)}' for x in row.tolist())
        rows.append(f"<tr><th>{part.row + i}{cells}")
    return f'<table class="map"><caption>{title}</caption>{"".join(rows)}</table>'


def _number(x: float) -> str:
    """Return a number in at most five characters, white where its cell is black."""
    text = two_digits(x)
    return text if np.isfinite(x) else f'<b style="color:#fff">{text}</b>'


def _sign_colour(share: float) -> str:
    """Return blue for negative, white for 0, red for positive shares of the largest number."""
    if not np.isfinite(share):
        return "#000"
    fade = round(15 * (1 - min(abs(share), 1.0) / 2))
    return f"#f{fade:x}{fade:x}" if share > 0 else f"#{fade:x}{fade:x}f"


def _ratio_colour(ratio: float) -> str:
    """Return green within the tolerance, yellow to red beyond it, black for no number."""
    if not np.isfinite(ratio):
        return "#000"
    return "#8c8" if ratio <= 1 else f"#e{round(11 / (1 + np.log10(ratio))):x}4"
