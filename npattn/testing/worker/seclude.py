"""Start a worker that finds nothing of npattn: for implementations that nobody trusts."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from npattn.errors import OptionError
from npattn.testing.worker.confinement import (
    HOME,
    PROGRAM,
    Walls,
    Way,
    is_memory_folder,
    package_folders,
    surround,
)

KEPT = ("PATH", "LANG", "LC_ALL", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
"""Variables of the environment that the worker gets; its home is a new folder."""
OURS = ("npattn", "__editable__", "__pycache__")
"""Beginnings of the names of what is npattn's, or leads to it, among installed packages."""


class Seclusion:
    """A folder with the worker's file `child`, and links to every installed package but npattn.

    It is removed with the object. A confined worker sees it, the folder of its target, and what
    everybody may read on this machine.
    """

    def __init__(self, child: Path) -> None:
        self.path = folder = Path(tempfile.mkdtemp(prefix="worker-")).resolve()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.child = Path(shutil.copy(child, folder / "worker.py"))
        self.program = Path(shutil.copy(PROGRAM, folder / "confine.py"))
        self.packages, self.home = folder / "packages", folder / "home"
        self.packages.mkdir()
        self.home.mkdir()
        for package in _packages():
            link = self.packages / package.name
            if not package.name.startswith(OURS) and package.suffix != ".pth" and not link.exists():
                link.symlink_to(package)

    def words(self, spec: str) -> list[str]:
        """Return the arguments of Python that run the worker: its file, the target, its path."""
        folder = folder_of(spec)
        if (folder / "npattn").is_dir():
            raise OptionError(
                f"untrusted hides npattn from TARGET, which lies beside it in {folder}: copy the "
                "file of TARGET to a folder of its own"
            )
        return [str(self.child), absolute(spec), str(self.packages), str(folder)]

    def walls(self, specs: Iterable[str], memory: int | None) -> Walls:
        """Return walls in which the worker sees itself, and the folders of these specs."""
        return surround(self.program, [self.path, *map(shown_of, specs)], memory)

    def environment(self, way: Way) -> dict[str, str]:
        """Return the variables that a worker confined in this way gets."""
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        home = str(self.home) if way == "no" else HOME
        return {**kept, "HOME": home, "TMPDIR": home}


def folder_of(spec: str) -> Path:
    """Return the folder in which a target's modules are found."""
    file = spec.rpartition(":")[0]
    return Path(file).resolve().parent if file.endswith(".py") else Path.cwd()


def absolute(spec: str) -> str:
    """Return a spec that says the same in any folder."""
    file, _, name = spec.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else spec


def shown_of(spec: str) -> Path:
    """Return what a worker must see of a target: its folder; in a folder of all, its file alone."""
    folder = folder_of(spec)
    return Path(absolute(spec).rpartition(":")[0]) if is_memory_folder(folder) else folder


def _packages() -> Iterable[Path]:
    """Yield what lies beside the installed packages of this Python."""
    for folder in package_folders():
        yield from folder.iterdir() if folder.is_dir() else ()
