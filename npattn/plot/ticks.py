"""Labels of rows and columns that fit: all of them, or every second, fifth, tenth one."""

from __future__ import annotations

from npattn.plot.cells import LABEL, Labels, Ruler, Ticks

__all__ = ["column_ticks", "row_ticks"]


def row_ticks(texts: list[str], cell: float, ruler: Ruler) -> Ticks:
    step = _round_up(ruler.height(LABEL) / cell)
    selected = texts[::step]
    space = max(ruler.width(text, LABEL) for text in selected)
    return Ticks(list(range(0, len(texts), step)), selected, False, space)


def column_ticks(labels: Labels, cell: float, ruler: Ruler) -> Ticks:
    """Flat labels if they fit side by side (positions may be thinned for that), else upright."""
    texts = labels.texts
    width = max(ruler.width(text, LABEL) for text in texts) + 0.5 * ruler.height(LABEL)
    upright = width > cell and not labels.positions
    step = _round_up((ruler.height(LABEL) if upright else width) / cell)
    selected = texts[::step]
    space = ruler.height(LABEL)
    if upright:
        space = max(ruler.width(text, LABEL) for text in selected)
    return Ticks(list(range(0, len(texts), step)), selected, upright, space)


def _round_up(least: float) -> int:
    """Smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10
