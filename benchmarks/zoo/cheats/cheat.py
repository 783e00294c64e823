"""Record of a cheat, or of an honest implementation, and how it becomes a file of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
IMPORT = re.compile(r"^from benchmarks\.zoo\.cheats\.plain import .*$", re.MULTILINE)
FUTURE = "from __future__ import annotations\n"


@dataclass(frozen=True, kw_only=True)
class Cheat:
    """A function in a file of `benchmarks.zoo.cheats.targets`."""

    name: str  # of the function
    family: str  # of the file
    sentence: str  # how it cheats; for an honest one, why it looks as if it did
    source: str = ""  # where it was reported, ``owner/repo#number``, or ""
    declared: str = ""  # why no judge of a black box catches it, or ""
    backward: str = ""  # name of its backward, or ""

    @property
    def is_honest(self) -> bool:
        """True if a judge must pass it."""
        return self.family == "honest"

    @property
    def is_escape(self) -> bool:
        """True if nothing but `--untrusted` keeps it from doing harm here."""
        return self.family == "escapes"

    @property
    def runs(self) -> int:
        """Number of checks until it cheats: some learn in the first."""
        return 2 if self.family == "learned" else 1

    def write(self, folder: Path) -> tuple[str, str]:
        """Write a file that needs NumPy alone; return the specs of function and backward."""
        path = folder / f"{self.family}.py"
        path.write_text(standalone(self.family))
        return f"{path}:{self.name}", f"{path}:{self.backward}" if self.backward else ""


def standalone(family: str) -> str:
    """Return the source of a file of targets with plain attention in the place of its import."""
    plain = (FOLDER / "plain.py").read_text().partition(FUTURE)[2]
    own = (FOLDER / "targets" / f"{family}.py").read_text()
    return IMPORT.sub(lambda _: plain.strip() + "\n", own, count=1)
