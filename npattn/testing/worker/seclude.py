"""Start a worker that finds nothing of npattn: for implementations that nobody trusts."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from npattn.errors import OptionError

KEPT = ("PATH", "LANG", "LC_ALL", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
"""Variables of the environment that the worker gets; its home is a new folder."""
OURS = ("npattn", "__editable__", "__pycache__")
"""Beginnings of the names of what is npattn's, or leads to it, among installed packages."""


class Seclusion:
    """A folder with the worker's file, and links to every installed package but npattn.

    It is removed with the object.

    Parameters
    ----------
    child : Path
        The worker's file.
    """

    def __init__(self, child: Path) -> None:
        folder = Path(tempfile.mkdtemp(prefix="worker-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.child = Path(shutil.copy(child, folder / "worker.py"))
        self.packages, self.home = folder / "packages", folder / "home"
        self.packages.mkdir()
        self.home.mkdir()
        for package in _packages():
            link = self.packages / package.name
            if not package.name.startswith(OURS) and package.suffix != ".pth" and not link.exists():
                link.symlink_to(package)

    def command(self, spec: str) -> list[str]:
        """Return the command: isolated from the user's folders and variables, without site.

        Raises
        ------
        OptionError
            If npattn lies in the folder of the target, which is on the worker's path.
        """
        home = spec.rpartition(":")[0]
        own = Path(home).resolve().parent if home.endswith(".py") else Path.cwd()
        if (own / "npattn").is_dir():
            raise OptionError(
                f"untrusted hides npattn from TARGET, which lies beside it in {own}: copy the file "
                "of TARGET to a folder of its own"
            )
        path = f"{Path(home).resolve()}:{spec.rpartition(':')[2]}" if home.endswith(".py") else spec
        return [sys.executable, "-I", "-S", str(self.child), path, str(self.packages), str(own)]

    def environment(self) -> dict[str, str]:
        """Return the variables that the worker gets."""
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        return {**kept, "HOME": str(self.home), "TMPDIR": str(self.home)}


def _packages() -> Iterable[Path]:
    """Yield what lies beside the installed packages of this Python."""
    for name in ("purelib", "platlib"):
        folder = Path(sysconfig.get_path(name))
        yield from folder.iterdir() if folder.is_dir() else ()
