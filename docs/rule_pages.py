"""A page for each rule, made when the site is built: what `npattn explain` prints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from npattn.cli.explain import WITHOUT_RULE, Explanation, explain
from npattn.testing.rules import RULES

NAMES = (*WITHOUT_RULE, *RULES)


def page(one: Explanation) -> str:
    """Text of a rule's page."""
    known = [
        f"* [{issue}](https://github.com/{issue.replace('#', '/issues/')})" for issue in one.issues
    ]
    for found in one.findings:
        anchor = re.sub(r"[^\w -]", "", found["title"].lower()).replace(" ", "-")
        place = (
            f"../reports/{found['report']}.md" if found["report"] else f"../findings.md#{anchor}"
        )
        limit = ", a limit that it keeps to" if found["kind"] == "limit" else ""
        known.append(f"* {found['system']}: [{found['title']}]({place}){limit}")
    parts = {
        "Why": one.why,
        "What breaks it": f"It was broken by {one.bugs}" if one.bugs else "",
        "In the wild": "\n".join(known) or "No real system is known to break it.",
        "Ask it alone": f"```bash\nnpattn check TARGET --only {one.name}\n```",
    }
    text = "".join(f"\n## {title}\n\n{words}\n" for title, words in parts.items() if words)
    return f"# {one.name}\n\n{one.demand} ({one.where}; [semantics](../semantics.md))\n{text}"


def write(folder: Path) -> None:
    """Write the page of each rule, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.md").write_text(page(find(name)), "utf-8")


def find(name: str) -> Explanation:
    """Return what is known of a rule; a rule of modules with the same name comes first."""
    return [one for one in explain(name) if one.name == name][-1]
