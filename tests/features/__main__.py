"""Writes the table of docs/features.md."""

from tests.features.table import PAGE, make_page

PAGE.write_text(make_page())
