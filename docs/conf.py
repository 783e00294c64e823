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
