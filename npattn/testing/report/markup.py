"""HTML of the pages and text of the scripts: jinja2 templates, beside this file or elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npattn.testing.report.escape import escape_controls

if TYPE_CHECKING:
    import jinja2

HERE = Path(__file__).parent


@cache
def _environment(*folders: Path) -> jinja2.Environment:
    """Return the templates of these folders and of this one; those of pages escape what they say.

    jinja2 is imported here: most checks write no page and no script.
    """
    import jinja2
    import markupsafe

    @jinja2.pass_eval_context
    def finalize(context: jinja2.nodes.EvalContext, value: Any) -> Any:
        # Not by jinja2's own escaping, which leaves control characters as they are.
        if not context.autoescape or hasattr(value, "__html__"):
            return value
        return markupsafe.Markup(safe_text(str(value)))

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, HERE]),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(name: str, *folders: Path, **values: Any) -> str:
    """Fill a template of one of these folders, or of this one."""
    return _environment(*folders).get_template(name).render(values)


def safe_text(text: str) -> str:
    """Return a text as HTML: markup and control characters are escaped."""
    return escape(escape_controls(text))


def code_block(text: str) -> str:
    """Return a text as a block of code; "" if it is empty."""
    return f"<pre><code>{safe_text(text)}</code></pre>" if text else ""


def document(title: str, body: Iterable[str], *, style: str, script: str) -> str:
    """Return a whole page of one file: `body` is HTML, in a main element."""
    return render("page.html", title=title, body="\n".join(body), style=style, script=script)
