"""The process in which an implementation is called: this one, or that of a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from npattn.testing.adapters.load import hash_files
from npattn.testing.adapters.untrusted import Untrusted

__all__ = ["Session", "find_interpreter"]

INTERPRETERS = ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM")
"""Variables of the environment that have kernels interpreted."""


def find_interpreter(environment: Mapping[str, str]) -> str | None:
    """Return the variable by which kernels are interpreted, if one is on."""
    return next((n for n in INTERPRETERS if environment.get(n, "0") not in ("", "0")), None)


class Session:
    """Calls in this process.

    Attributes
    ----------
    untrusted : Untrusted or None
        Means against the implementation, if nobody trusts it.
    notes : dict of str
        What it does that fails nothing, and a user wants to know.
    """

    f: Callable[..., Any]
    backward: Callable[..., Any] | None
    notes: dict[str, str]
    untrusted: Untrusted | None = None

    @property
    def source(self) -> str:
        """Hash of the files of its functions; "" if there are none."""
        return hash_files(self.f, self.backward)

    @property
    def is_isolated(self) -> bool:
        """True if it lives in another process."""
        return False

    def while_answering(self, work: Callable[[], object] | None) -> AbstractContextManager[None]:
        """Return a context in which `work` is done while another process, if any, answers."""
        return nullcontext()

    @property
    def keeps_arrays(self) -> bool:
        """True if arrays and results of one call are there in the next."""
        return True

    @property
    def interpreter(self) -> str | None:
        """Variable by which its kernels are interpreted, one at a time; None if there is none."""
        return find_interpreter(os.environ)

    @property
    def takes_threads(self) -> bool:
        """True if two threads may call it at once."""
        return True

    @property
    def versions(self) -> dict[str, str]:
        """Versions of what it needs, where they may differ from those here."""
        return {}

    @property
    def given_up_lines(self) -> list[str]:
        """Kinds of problems that are not asked again, a line each."""
        return []

    @property
    def given_up_kinds(self) -> dict[str, str]:
        """Kinds of problems that are not asked again, with the reason."""
        return {}

    def add_given_up(self, kinds: Mapping[str, str]) -> None:
        """Add kinds that the worker of another process is not asked again."""

    def note_error_state(self, changed: bool) -> None:
        """Note that NumPy's error state is changed where it is loaded or called."""
        if changed:
            self.notes["error state"] = "changed by np.seterr, calls begin with NumPy's own"
