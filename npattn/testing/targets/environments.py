"""Virtual environments for targets: a folder each, made by pip, in which their workers run."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import npattn
from npattn.errors import MissingExtraError, OptionError
from npattn.testing.targets.target import Target

NEEDS = ("numpy>=2.0", "ml_dtypes>=0.5", "threadpoolctl>=3.1", "lazy_loader>=0.4")
"""Packages of npattn itself and the worker; npattn is put on the path, and not installed."""
MARKER = "npattn.json"
"""File that is written last: a folder without it is a half that was left."""
LAST_LINES = 12
"""Lines of pip's output that an error shows."""
EXTRA = re.compile(r"npattn\[(.*)\]")
CONDITION = re.compile(r"""(.*?)\s*;\s*extra\s*==\s*["'](.*)["']""")


def choose_python(
    target: Target, folder: Path, tell: Callable[[str], None] | None = None
) -> Path | None:
    """Return the Python that has what a target needs, None if this one has.

    Parameters
    ----------
    folder : Path
        Where the environments are, one folder for each list of requirements.
    tell : callable, optional
        Called with a line before an environment is made, which may take minutes.
    """
    if target.runs_here:
        return None
    if target.install or not target.can_be_installed:
        raise MissingExtraError(f"{target.name} needs {target.lacks}")
    return make_environment(list_packages(target.requirements), folder, tell)


def list_packages(requirements: Sequence[str]) -> tuple[str, ...]:
    """Return requirements with the packages of each extra of npattn in its place.

    Raises OptionError if npattn's metadata do not name them: it is not installed, or has no such
    extra.
    """
    packages: list[str] = []
    for requirement in requirements:
        extra = EXTRA.fullmatch(requirement)
        packages += [requirement] if extra is None else _list_extras(extra[1].split(","))
    return tuple(dict.fromkeys(packages))


def _list_extras(extras: Sequence[str]) -> list[str]:
    """Return the requirements of npattn's extras; raise OptionError if one is not known."""
    from importlib import metadata  # slow to load

    try:
        lines = metadata.requires("npattn") or []
    except metadata.PackageNotFoundError:
        lines = []
    found = [match for line in lines if (match := CONDITION.fullmatch(line))]
    packages: list[str] = []
    for extra in extras:
        of_extra = [match[1] for match in found if match[2] == extra]
        if not of_extra:
            raise OptionError(
                f"npattn[{extra}] is not known to the npattn that is installed: pip install it anew"
            )
        packages += of_extra
    return packages


def make_environment(
    requirements: Sequence[str], folder: Path, tell: Callable[[str], None] | None = None
) -> Path:
    """Return the Python of an environment with these packages; make it if it is not there.

    Raises MissingExtraError if pip fails; the message has its last lines.

    Parameters
    ----------
    requirements : sequence of str
        Packages as `pip install` gets them.
    folder : Path
        Where the environments are. One that is whole is used again, a half is made anew; a second
        process waits for the first.
    tell : callable, optional
        Called with a line before it is made.
    """
    environment = folder.absolute() / _name(requirements)
    python = environment / "bin" / "python"
    try:
        environment.parent.mkdir(parents=True, exist_ok=True)
        with _lock(environment.with_name(environment.name + ".lock")):
            if not ((environment / MARKER).is_file() and python.exists()):
                line = "pip install " + " ".join(f"'{one}'" for one in requirements)
                if tell is not None:
                    tell(f"making {environment}: {line}")
                shutil.rmtree(environment, ignore_errors=True)
                _fill(environment, python, [*NEEDS, *requirements], line)
                (environment / MARKER).write_text(json.dumps({"requirements": list(requirements)}))
    except OSError as err:
        raise OptionError(f"the folder of environments {folder} cannot be used: {err}") from err
    return python


def _fill(environment: Path, python: Path, packages: Sequence[str], line: str) -> None:
    """Make an environment and install packages, by the pip of this Python or one of its own."""
    ours = importlib.util.find_spec("pip") is not None  # it saves seconds
    _run(
        [
            sys.executable,
            "-I",
            "-m",
            "venv",
            *(["--without-pip"] if ours else []),
            str(environment),
        ],
        line,
    )
    own_pip = [str(python), "-I", "-m", "pip"]
    pip = [sys.executable, "-I", "-m", "pip", "--python", str(python)] if ours else own_pip
    _run([*pip, "install", "--disable-pip-version-check", "--no-input", *packages], line)


def _name(requirements: Sequence[str]) -> str:
    """Return the name of an environment's folder: readable, and another one for other contents."""
    python = f"py{sys.version_info[0]}.{sys.version_info[1]}"
    words = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(requirements)).strip("-.")[:60]
    text = "\n".join((python, *NEEDS, *requirements))
    return f"{words}-{python}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _run(command: Sequence[str], line: str) -> None:
    """Run a step of making an environment."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        last = "\n  ".join([x for x in done.stdout.splitlines() if x.strip()][-LAST_LINES:])
        raise MissingExtraError(
            f"the environment with {line} cannot be made, exit code {done.returncode}:\n  {last}"
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file that one process at a time can hold."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class PackageFolder:
    """A folder with a link to npattn alone, which is removed with the object.

    The folder that npattn lies in may have every other package of this Python.

    Attributes
    ----------
    path : Path
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="npattn-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        (self.path / "npattn").symlink_to(Path(npattn.__file__).parent)
