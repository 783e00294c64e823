"""Heat maps of a wrong result for a page: got, want and error / tolerance, as SVG."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.comparison import short
from npattn.testing.excerpt import Excerpt
from npattn.testing.report.markup import safe_text


def heat_maps(name: str, excerpt: Excerpt) -> str:
    """Return got, want and error / tolerance as three heat maps of the same elements.

    Parameters
    ----------
    name : str
        The result: "o", "dk".
    excerpt : Excerpt
    """
    rows, columns = excerpt.got.shape
    lead = "".join(f"{i}, " for i in excerpt.lead)
    last = f"{excerpt.row}:{excerpt.row + rows}, {excerpt.column}:{excerpt.column + columns}"
    where = f"{name}[{lead}{last}]"
    both = np.concatenate([excerpt.got.ravel(), excerpt.want.ravel()])
    top = float(abs(both[np.isfinite(both)]).max(initial=0)) or 1.0
    maps = (
        _map("got", excerpt.got, [_sign_colour(x / top) for x in excerpt.got.flat]),
        _map("want", excerpt.want, [_sign_colour(x / top) for x in excerpt.want.flat]),
        _map("error / tolerance", excerpt.ratio, [_ratio_colour(x) for x in excerpt.ratio.flat]),
    )
    key = "blue below 0, red above; green within the tolerance, black without a number"
    caption = f"<figcaption>{safe_text(where)}: {key}</figcaption>"
    return f'<figure>{caption}<div class="maps">{"".join(maps)}</div></figure>'


def _map(title: str, values: Array, colours: Iterable[str]) -> str:
    """Return one map as SVG; a cell says its value."""
    rows, columns = values.shape
    cells = "".join(
        f'<rect x="{i % columns}" y="{i // columns}" width="1" height="1" fill="{colour}">'
        f"<title>{short(float(value))}</title></rect>"
        for i, (value, colour) in enumerate(zip(values.flat, colours, strict=True))
    )
    size = f'viewBox="0 0 {columns} {rows}" style="max-width:{max(columns * 14, 72)}px"'
    image = f'<svg {size} role="img" aria-label="{title}">{cells}</svg>'
    return f"<div><small>{title}</small>{image}</div>"


def _sign_colour(share: float) -> str:
    """Return blue for negative, white for 0, red for positive shares of the largest number."""
    if not np.isfinite(share):
        return "#000"
    fade = round(215 * (1 - min(abs(share), 1.0))) + 20
    return f"rgb(235,{fade},{fade})" if share > 0 else f"rgb({fade},{fade},235)"


def _ratio_colour(ratio: float) -> str:
    """Return green within the tolerance, yellow to red beyond it, black for no number."""
    if not np.isfinite(ratio):
        return "#000"
    if ratio <= 1:
        return "#8c8"
    return f"rgb(235,{round(190 / (1 + np.log10(ratio)))},40)"
