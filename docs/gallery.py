"""Figures of `npattn.plot` in the lessons. sphinx-gallery finds those of pyplot alone."""

from typing import Any

from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst


def save_last_figure(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save the figure that is the last line of a block, as a notebook shows it."""
    last = block_vars["example_globals"].get("___")  # sphinx-gallery's name of the last value
    block_vars["example_globals"]["___"] = None  # the next block may have no last value
    if not isinstance(last, Figure) or last.canvas.manager:  # pyplot has a manager for its own
        return ""
    path = next(block_vars["image_path_iterator"])
    last.savefig(path, dpi=100)
    return str(figure_rst([path], gallery_conf["src_dir"]))
