"""Sphinx: ``sphinx-build -W -b html docs docs/_build``, without a network."""

import sys
from pathlib import Path

import npattn

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are no part of the package

project = "npattn"
version = release = npattn.__version__
author = copyright = "the npattn developers"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"fixed_sidebar": True, "page_width": "1100px"}
html_show_sourcelink = False
_pages = Path(__file__).parent / "_static"
html_static_path = [_pages.name] if _pages.is_dir() else []  # of the matrix, once it is written

myst_heading_anchors = 4  # [a link](semantics.md#the-rules) works, as it does on a hub

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say types and shapes
napoleon_google_docstring = False
napoleon_use_ivar = True  # Attributes sections and documented properties do not collide

# The lessons: python files that run when the site is built, and are then pages and notebooks.
sys.path.insert(0, str(Path(__file__).parent))  # gallery.py
extensions.append("sphinx_gallery.gen_gallery")
exclude_patterns.append("lessons")  # the sources; lessons_built is made from them
sphinx_gallery_conf = {
    "examples_dirs": "lessons",
    "gallery_dirs": "lessons_built",
    "filename_pattern": "/",  # all run
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "image_scrapers": ("matplotlib", "gallery.save_last_figure"),
    "capture_repr": (),
    "download_all_examples": False,
    "min_reported_time": 3,
    "show_memory": False,
    "plot_gallery": True,
}
