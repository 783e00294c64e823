"""Examples of the pages: code blocks, what running them prints, and comparison with the page."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
GAP = "..."


def load(name):
    """Import docs/NAME.py, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page, language):
    """Contents of the code blocks of a page, those within lists included."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def block(page, language, start):
    """The one code block that contains `start`."""
    [one] = [text for text in blocks(page, language) if start in text]
    return one


def run(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    return done.stdout


def same_line(shown, printed):
    """True if two lines agree: words exactly, numbers to six hundredths.

    Errors within the tolerance are left out, as they depend on the order of sums in BLAS.
    """
    shown, printed = (_without_passing_errors(line) for line in (shown, printed))
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    numbers = ([float(n.replace("−", "-")) for n in NUMBER.findall(x)] for x in (shown, printed))
    return all(math.isclose(a, b, rel_tol=0.06) for a, b in zip(*numbers, strict=True))


def _without_passing_errors(line):
    line = re.sub(r"(passed|worst) [\d.e+-]+( of the)?", r"\1", " ".join(line.split()))
    return re.sub(r"^ok (\w+)\[.*", r"ok \1", line)


def difference(shown, printed):
    """First shown line that was not printed in its place, or None; `...` stands for any lines."""
    rest = [line for line in printed.splitlines() if line.strip()]
    gap = False
    for line in filter(str.strip, shown.splitlines()):
        if line.strip() == GAP:
            gap = True
            continue
        places = [i for i, other in enumerate(rest) if same_line(line, other)]
        if not places or (places[0] > 0 and not gap):
            return line
        rest, gap = rest[places[0] + 1 :], False
    return None if gap or not rest else f"the end; also printed: {rest[0]}"
