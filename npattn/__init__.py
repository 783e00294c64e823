"""npattn tells whether an attention implementation is right.

An oracle (`attention`, `forward`, `backward`: exact values and gradients, pure NumPy, float64) and
a judge (`npattn.testing`, and ``npattn check`` on the command line).
"""

import sys

if sys.argv[:1] == ["-m"] and "--untrusted" in sys.argv and not sys.flags.safe_path:
    sys.path.pop(0)  # the working folder, of code that nobody trusts: before anything is imported

from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npattn import biases, conventions, errors, masks, positions
from npattn.conventions import Conventions
from npattn.multihead import MultiHeadAttention
from npattn.oracle.api import attention, backward, forward, jvp
from npattn.oracle.second_order import double_backward, hvp
from npattn.problem import Forward, Gradients, Problem

__version__ = "0.1.0"

__all__ = [
    "Conventions",
    "Forward",
    "Gradients",
    "MultiHeadAttention",
    "Problem",
    "attention",
    "backward",
    "biases",
    "conventions",
    "double_backward",
    "errors",
    "forward",
    "hvp",
    "jvp",
    "masks",
    "positions",
]

LATER = (
    *("cache", "plot", "profiles", "quantization", "testing", "torch", "variants"),
    "weights",
)
"""Modules that are slow to load, or need an extra: loaded on first use."""


def __dir__() -> list[str]:
    return [*__all__, *LATER]  # not the modules that are not for users


MOVED = {
    **{name: f"engines.{name}" for name in ("dense", "loops", "tiled", "extended", "threads")},
    **{name: f"engines.{name}" for name in ("backward_twice", "double_double", "dual")},
    **{name: f"problem.{name}" for name in ("arrays", "checks", "descales", "foreign", "gating")},
    **{name: f"problem.{name}" for name in ("meanings", "options", "sizes")},
    **{name: f"oracle.{name}" for name in ("api", "directions", "second_order", "twins")},
    **{name: f"multihead.{name}" for name in ("projections", "summary")},
    "multihead_build": "multihead.build",
}
"""Modules by the names that they had, npattn.dense and its like: these stay importable."""


class _Moved(MetaPathFinder, Loader):
    """Find modules by the names that they had."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        found = package == "npattn" and rest.partition(".")[0] in MOVED
        return spec_from_loader(name, self) if found else None

    def exec_module(self, module: ModuleType) -> None:
        first, dot, rest = module.__name__.removeprefix("npattn.").partition(".")
        sys.modules[module.__name__] = import_module(f"npattn.{MOVED[first]}{dot}{rest}")


sys.meta_path.insert(0, _Moved())  # before folders that an earlier version has left

if not TYPE_CHECKING:  # type checkers would take any name for one of npattn's

    def __getattr__(name: str) -> Any:
        if name in LATER or name in MOVED:
            return import_module(f"npattn.{name}")
        raise AttributeError(f"module 'npattn' has no attribute {name!r}")
