"""Implementations that are known by name, and whether they can run here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from npattn.conventions import PROFILES, Conventions

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """An implementation that is known by name.

    Attributes
    ----------
    name : str
    module, function : str
        Where it is.
    backward : str or None
        Its backward, in the same module; None: autograd, or none.
    needs : str or None
        The package without which it cannot run.
    profile : str
        Its conventions, in `npattn.conventions.PROFILES`.
    about : str
    """

    name: str
    module: str
    function: str
    backward: str | None
    needs: str | None
    profile: str
    about: str

    @property
    def runs_here(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    @property
    def conventions(self) -> Conventions:
        return PROFILES[self.profile]

    def load(self) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """The callable and its backward."""
        module = importlib.import_module(self.module)
        backward = None if self.backward is None else getattr(module, self.backward)
        return getattr(module, self.function), backward


_HERE = "npattn.testing.targets"
_ALL = (
    Target(
        "numpy.flash",
        f"{_HERE}.numpy",
        "flash",
        "flash_backward",
        None,
        "npattn",
        "online softmax in float32 with backward, shipped with npattn",
    ),
    Target(
        "numpy.naive",
        f"{_HERE}.numpy",
        "naive",
        None,
        None,
        "npattn",
        "the textbook ten lines, shipped with npattn: what everybody writes first",
    ),
    Target(
        "torch.sdpa",
        f"{_HERE}.torch",
        "sdpa",
        None,
        "torch",
        "torch.sdpa",
        "torch.nn.functional.scaled_dot_product_attention, as a user calls it",
    ),
    Target(
        "torch.sdpa-math",
        f"{_HERE}.torch",
        "sdpa_math",
        None,
        "torch",
        "torch.sdpa",
        "the same, held to its MATH backend",
    ),
)
TARGETS = {target.name: target for target in _ALL}
"""The known targets, by name."""
