"""Memory that a worker on this machine shares with the judge, for large frames."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

from npattn.testing.adapters.child import TOKEN

SIZE = 1 << 28
"""Bytes; the system gives those that are written alone."""


class SharedMemory:
    """Memory behind a descriptor that a worker inherits; nobody can make it smaller."""

    def __init__(self) -> None:
        # for the worker to inherit; none where the system has no such memory
        self.descriptors: tuple[int, ...] = ()
        self.offer: dict[str, Any] = {}  # what the request `describe` says of it
        self.view: memoryview | None = None  # once the worker has said that it sees its bytes
        if not hasattr(os, "memfd_create"):  # Linux has it
            return
        descriptor = os.memfd_create("npattn", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, SIZE)
        # To read what a worker has cut off would end this process.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._mapping, token = mmap.mmap(descriptor, SIZE), os.urandom(TOKEN)
        self._mapping[:TOKEN] = token
        self.descriptors = (descriptor,)
        offered = {"descriptor": descriptor, "bytes": SIZE, "begins": token.hex()}
        self.offer = {"shared": offered}

    def close_descriptors(self) -> None:
        """Close what only had to be inherited."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def agree(self, seen: Any) -> None:
        """Begin to share, if a worker says that it sees this memory."""
        if self.offer and seen is True:
            self.view = memoryview(self._mapping)

    def close(self) -> None:
        """Give the memory back; nobody may be reading it."""
        if self.view is not None:
            self.view.release()
            self.view = None
        if self.offer:
            self._mapping.close()
            self.offer = {}
