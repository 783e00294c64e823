"""Variables with which processes of JAX share what they compiled, in a folder of this process."""

from __future__ import annotations

import functools
import os
import tempfile
import threading

__all__ = ["sharing"]

_lock = threading.Lock()


def sharing() -> dict[str, str]:
    """Return variables of the environment for such processes, without those the user has set.

    JAX reads them when it is imported. It keeps no program that took less than a second to compile,
    unless told: of attention on small shapes that is none. The folder goes when this process ends.
    """
    name = "JAX_COMPILATION_CACHE_DIR"
    variables = {name: "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    found = {name: value for name, value in variables.items() if name not in os.environ}
    if name in found:
        with _lock:
            found[name] = _make_folder().name
    return found


@functools.cache
def _make_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="npattn-")
