"""Sphinx: ``sphinx-build -q -W --keep-going -b html docs docs/_build``, without a network."""

import re
import sys
from pathlib import Path

import npattn

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]  # benchmarks, and the modules of this folder

import pictures
import rule_pages
from home import address, write_home
from report_lexer import ReportLexer

project = "npattn"
version = release = npattn.__version__
html_title = project
author = copyright = "the npattn developers"

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_static"]
linkcheck_ignore = [r"_static/"]

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navbar_center": ["navbar-nav"],
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "navbar_persistent": ["search-button-field"],
    "navigation_with_keys": False,
    "use_edit_page_button": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": {"**": ["page-toc", "edit-this-page"], "index": []},
    "icon_links": [{"name": "Source", "url": address(), "icon": "fa-brands fa-github"}],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_sidebars = {"index": [], "readme": []}
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
# Pages that are made when the site is built are edited in what they are made from.
html_context = {
    "edit_page_url_template": address()
    + """/edit/main/{%- if pagename in roots %}{{ roots[pagename] }}
{%- elif pagename.startswith("rules/") %}npattn/testing/rules
{%- elif pagename.startswith("lessons_built/index") %}docs/lessons/GALLERY_HEADER.rst
{%- elif pagename.startswith("lessons_built/") %}docs/lessons/{{ pagename[14:] }}.py
{%- else %}docs/{{ file_name }}{% endif %}"""
}
html_css_files = ["site.css"]
html_show_sourcelink = False

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 4  # [a link](semantics.md#the-rules) works, as it does on a hub
mathjax4_config = {"options": {"enableMenu": False}, "output": {"font": "mathjax-newcm"}}

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say types and shapes
numpydoc_show_class_members = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what is printed is not copied
copybutton_prompt_is_regexp = True

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
    "image_scrapers": ("gallery.save_last_figure", "matplotlib"),
    "capture_repr": (),
    "download_all_examples": False,
    "min_reported_time": 3,
    "show_memory": False,
    "show_signature": False,
    "plot_gallery": True,
}

ROOT_PAGES = {
    "readme": "README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "security": "SECURITY.md",
}
"""Page of the site → the file beside docs/ that it shows."""
html_context["roots"] = ROOT_PAGES
SEARCHED = {
    "diagnosis": "off-by-one",
    "green": "guarantee",
    "how-to/continuous-integration": "CI",
    "how-to/dump": "dump",
    "how-to/pytest": "pytest, junit",
    "how-to/varlen-and-paged": "uint16",
    "how-to/gradient": "gradient check",
    "how-to/triton-on-a-laptop": "Triton",
    "positions": "RoPE",
    "cache": "paged",
}
"""Page → words that a search finds there first: they are made entries of the index.

Several are parted by commas.
"""


def read_beside(app, name, source):
    """Show a file of the root as a page, its links made those of docs/; add what is searched."""
    if name in SEARCHED:
        entries = ", ".join(f"! {words}" for words in SEARCHED[name].split(", "))
        source[0] = f"```{{index}} {entries}\n```\n\n{source[0]}"
    source[0] = source[0].replace("<!-- home -->", write_home())
    if name in ROOT_PAGES:
        path = DOCS.parent / ROOT_PAGES[name]
        app.env.note_dependency(str(path))
        text = re.sub(r'(\]\(|src(?:set)?=")docs/', r"\1", path.read_text("utf-8"))
        for page, file in ROOT_PAGES.items():
            text = text.replace(f"]({file}", f"]({page}.md")
        source[0] = text


def fit_pictures(app, name, template, context, doctree):
    """Show stacked pictures on a narrow screen; link those of the lessons to their full size."""
    body = context.get("body", "")
    stacked = r'<source media="(max-width: 40rem)" srcset="\1_static/pictures/narrow/\2.svg">'
    drawn = r'<img [^>]*src="([./]*)_images/(\w+)\.svg"[^>]*>'
    body = re.sub(drawn, rf"<picture>{stacked}\g<0></picture>", body)
    lesson = r'<img src="([^"]*)"[^>]*class = "sphx-glr-single-img"/>'
    context["body"] = re.sub(lesson, r'<a class="full-size" href="\1">\g<0></a>', body)


def setup(app):
    rule_pages.write(DOCS / "rules")
    pictures.write(DOCS / "_static" / "pictures")
    for language in ("npattn-report", "text", "console"):
        app.add_lexer(language, ReportLexer)
    app.connect("source-read", read_beside)
    app.connect("html-page-context", fit_pictures)
