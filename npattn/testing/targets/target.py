"""An implementation known by name, and what it needs to run."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.profiles import Profile

_PLACES = [Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl")]
DRIVER = next((path for path in _PLACES if path.exists()), _PLACES[0])
"""File that is there where NVIDIA's driver is: some virtual machines have the second alone."""


def _is_installed(module: str) -> bool:
    """Return True if a module, ``a.b`` too, can be found."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a
        return False


@dataclass(frozen=True)
class Target:
    """An implementation known by name.

    Attributes
    ----------
    name : str
    module, function : str
        Its import path.
    backward : str or None
        Name of its backward in the same module; None for autograd, or no gradients.
    needs : tuple of str
        The packages that it needs, by the names that are imported: that of its project first.
    profile : Profile
    about : str
    drop_in : bool
        It is called as the library's own function is: its profile says how.
    pip : tuple of str
        What `pip install` gets for it; default: the extras of npattn that are named as `needs`. A
        version fixed by ``==`` asks for an environment of its own, unless that one is installed.
    environment : mapping
        Variables of its worker's process, set before anything is imported.
    project : str
        What it is part of; default: the first word of its name.
    install : str
        How to install it where pip does not: words that follow "to install it,".
    device : str
        Where it runs: "cpu", or "cuda" where it needs an NVIDIA GPU.
    dtypes : tuple of str
        Of float32 and float64 those that it computes in, as run: it may take others, and convert
        them. Narrower ones where it computes in neither.
    sizes : mapping of letter to sizes
        Sizes that it is judged at where nobody asks for others: those that it takes, and that end
        in minutes.
    rounding : str, optional
        Its rounding model where nobody names another, as of `Rounding.from_name`.
    timeout : float, optional
        Seconds a call where nobody asks for others: of one that compiles or interprets, and says
        nothing of it. Default: as of `npattn.testing.worker.connection.Limits`.
    """

    name: str
    module: str
    function: str
    backward: str | None
    needs: tuple[str, ...]
    profile: Profile
    about: str
    drop_in: bool = False
    pip: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    project: str = ""
    install: str = ""
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "float64")
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    rounding: str | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not self.project:
            project = "npattn" if self.profile.name == "npattn" else self.name.partition(".")[0]
            object.__setattr__(self, "project", project)

    @property
    def path(self) -> str:
        """Its import path as one word, ``module:function``."""
        return f"{self.module}:{self.function}"

    @property
    def conventions(self) -> Conventions:
        """The conventions of its profile."""
        return self.profile.conventions

    @property
    def like(self) -> str | None:
        """Name of the profile that says how to call it; None if npattn's own names do."""
        return self.profile.name if self.drop_in else None

    @property
    def requirements(self) -> tuple[str, ...]:
        """Packages that `pip install` gets for it; empty if npattn is enough."""
        return self.pip or ((f"npattn[{','.join(self.needs)}]",) if self.needs else ())

    @property
    def lacks(self) -> str | None:
        """The reason why it cannot run here, with the pip line; None if it can."""
        if not self.can_be_installed:
            return "an NVIDIA GPU, and there is none here"
        line = "pip install " + " ".join(f"'{one}'" for one in self.requirements)
        line = f"to install it, {self.install}" if self.install else line
        for module in self.needs:
            if not _is_installed(module):
                return f"{module}, which is not installed: {line}"
        for package, version in self._fixed_versions():
            from importlib import metadata  # slow to load

            try:
                here = metadata.version(package)
            except metadata.PackageNotFoundError:
                return f"{package} {version}, which is not installed: {line}"
            if here != version:
                return f"{package} {version}, and {here} is installed: {line}"
        return None

    @property
    def can_be_installed(self) -> bool:
        """True if it runs here once its packages are installed."""
        return self.device != "cuda" or DRIVER.exists()

    @property
    def runs_here(self) -> bool:
        """True if what it needs is installed."""
        return self.lacks is None

    def _fixed_versions(self) -> list[tuple[str, str]]:
        """Return the packages whose version is fixed, with that."""
        parts = (one.partition("==") for one in self.pip)
        return [(package.partition("[")[0], version) for package, sign, version in parts if sign]

    def check_environment(self) -> None:
        """Raise `OptionError` if a variable that its process needs is not set in this one."""
        missing = [f"{n}={x}" for n, x in self.environment.items() if os.environ.get(n) != x]
        if missing:
            raise OptionError(
                f"{self.name} needs {' '.join(missing)} in the environment: start Python with it, "
                "or judge it in a worker, as npattn check does"
            )

    def load(self) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Import the callable and its backward."""
        module = importlib.import_module(self.module)
        backward = None if self.backward is None else getattr(module, self.backward)
        return getattr(module, self.function), backward
