"""A folder in which workers share JAX's compilation cache."""

from __future__ import annotations

import functools
import os
import tempfile
import threading

_lock = threading.Lock()


def cache_variables() -> dict[str, str]:
    """Return environment variables that enable the cache, without those that the user has set.

    The folder is deleted when this process ends. JAX reads the variables when it is imported. By
    default it caches no program that compiled in less than a second, as those of small shapes do.
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
    # A worker that is being ended may still write there.
    return tempfile.TemporaryDirectory(prefix="npattn-", ignore_cleanup_errors=True)
