"""The process in which an implementation is called: this one, or that of a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

from npattn.testing.adapters.load import hash_files
from npattn.testing.adapters.untrusted import Untrusted

INTERPRETERS = ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM")
"""Variables of the environment that have kernels interpreted."""


class HostProcess:
    """Calls in this process."""

    f: Callable[..., Any]
    backward: Callable[..., Any] | None
    notes: dict[str, str]  # what it does that fails nothing, and a user wants to know
    is_isolated: bool = False  # it lives in another process
    keeps_arrays: bool = True  # arrays and results of one call are there in the next
    takes_threads: bool = True  # two threads may call it at once
    # environment variables of its process; None for those of this one
    environment: Mapping[str, str] | None = None
    # versions of what it needs, where they may differ from those here
    versions: Mapping[str, str] = MappingProxyType({})
    untrusted: Untrusted | None = None  # means against the implementation, if nobody trusts it
    # "bwrap", "namespaces" or "no": how its process is confined; None if it is trusted
    confined: str | None = None

    @property
    def source(self) -> str:
        """Hash of the files of its functions; "" if there are none."""
        return hash_files(self.f, self.backward)

    def while_answering(self, work: Callable[[], object] | None) -> AbstractContextManager[None]:
        """Return a context in which `work` is done while another process, if any, answers."""
        return nullcontext()

    @property
    def interpreter(self) -> str | None:
        """Variable by which its kernels are interpreted, one at a time; None if there is none."""
        variables = os.environ if self.environment is None else self.environment
        return next((n for n in INTERPRETERS if variables.get(n, "0") not in ("", "0")), None)

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
