"""Put a target into a worker."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from npattn.engines.threads import ONE_THREAD
from npattn.errors import OptionError
from npattn.testing.adapters import child
from npattn.testing.adapters.child import ABILITIES, Tensor, format_exception_line
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.load import Spec, by_spec
from npattn.testing.targets import TARGETS, spec_of
from npattn.testing.targets.environments import PackageFolder
from npattn.testing.worker.compilation_cache import cache_variables
from npattn.testing.worker.confinement import WAYS, Way, find_way
from npattn.testing.worker.connection import PROCESSES, Connection
from npattn.testing.worker.remote import Remote
from npattn.testing.worker.seclude import Seclusion, absolute
from npattn.testing.worker.supervisor import Limits, Worker

CHILD = Path(child.__file__)
"""The worker: a file that needs NumPy alone."""

OPENBLAS = "OPENBLAS_NUM_THREADS"


def connect(
    target: str | None,
    *,
    command: str | None = None,
    backward: str | None = None,
    framework: str = "auto",
    device: str | None = None,
    limits: Limits = Limits(),  # noqa: B008  it is frozen
    untrusted: bool = False,
    unconfined: bool = False,
    python: str | Path | None = None,
    alone: bool = True,
    spare: Connection | None = None,
    **arguments: Any,
) -> Remote:
    """Return an implementation that lives in a worker.

    Parameters
    ----------
    target : str or None
        A known name, ``module:function`` or ``path/file.py:function``, where an `Implementation`
        may stand; with `command` only its name in the report, None for that which the worker says.
    command : str, optional
        Program that speaks the protocol on its standard input and output; default: this Python.
    backward : str, optional
        Spec of its backward.
    framework, device
        As of `npattn.testing.check`.
    limits : Limits
    untrusted : bool
        Confine it: it sees nothing of npattn, of the judge and of the network, and writes nothing
        but its own temporary folder.
    unconfined : bool
        Only hide npattn from an untrusted one, and the user's environment variables.
    python : str or Path, optional
        Python that runs the worker, with NumPy and what the target needs, as
        `npattn.testing.targets.environments.choose_python` finds it; default: this one.
    alone : bool
        No other process judges it meanwhile: else all libraries have one thread in its worker, not
        OpenBLAS alone, whose threads wait at small products.
    spare : Connection, optional
        A process of the same target that waits, as `Spare` starts it.
    **arguments
        layout, like, rename, features, quantized, rows of `Implementation`.

    Raises
    ------
    OptionError
        If there is no such target, it cannot be used, or an argument is not legal; or if an
        untrusted one cannot be confined here.
    MissingExtraError
        If a known target needs a package that is not installed.
    """
    keywords = {name: value for name, value in arguments.items() if value is not None}
    if target in TARGETS and command is None and TARGETS[target].drop_in:
        keywords.setdefault("like", TARGETS[target].like)
    if unconfined and not untrusted:
        raise OptionError("got unconfined without untrusted: no other worker is confined")
    if command is not None:
        if untrusted:
            raise OptionError("got untrusted beside a command: it starts what it likes")
        if python is not None:
            raise OptionError("got python beside a command: it names its own")
        if backward is not None:
            raise OptionError("got backward beside a command: its worker names it")
        worker = Worker(shlex.split(command), limits, _settings(framework, device))
        return Remote(worker, **({} if target is None else {"name": target}), **keywords)
    if target is None:
        raise OptionError("target is None, must be named without a command")
    if untrusted and python is not None:
        raise OptionError("got untrusted beside python: it hides the packages of this one alone")
    entry = TARGETS.get(target)
    spec = spec_of(target) if python is None or entry is None else entry.path
    if entry is not None and backward is None and entry.backward is not None:
        backward_spec: str | None = f"{entry.module}:{entry.backward}"
    else:
        backward_spec = backward and spec_of(backward)
    settings = _settings(framework, device) | {"backward": backward_spec}
    if entry is not None:
        settings |= {"packages": list(entry.needs)}
        if limits.timeout is None:
            limits = replace(limits, timeout=entry.timeout)
    variables = {} if entry is None else entry.environment
    argv = [sys.executable, str(CHILD), spec, str(Path.cwd())]
    environment: dict[str, str] = {**os.environ, **cache_variables()}
    folder: Seclusion | PackageFolder | None = None
    way: Way | None = None
    if untrusted:
        settings |= {"fresh": True, "backward": backward_spec and absolute(backward_spec)}
        folder = Seclusion(CHILD)
        words = folder.words(spec)
        if limits.memory is None:
            limits = replace(limits, memory=_half_of_memory())
        walls = folder.walls(filter(None, (spec, backward_spec)), limits.memory)
        way = "no" if unconfined else find_way(walls)
        argv, environment = walls.command(way, words), folder.environment(way)
    elif python is not None:
        folder = PackageFolder()
        argv = [str(python), "-I", str(CHILD), spec, str(folder.path), str(Path.cwd())]
    environment |= {**variables, **_threads(alone)}
    worker = Worker(
        argv, limits, settings, environment=environment, abilities=ABILITIES, spare=spare
    )
    worker.seclusion = folder  # it lives as long
    worker.is_confined = way in WAYS
    remote = Remote(worker, name=target, spec=target, backward_spec=backward, **keywords)
    remote.confined = way
    if entry is not None:
        remote.sizes, remote.rounding = entry.sizes, entry.rounding
        if "like" not in keywords:
            remote.conventions = entry.conventions
    return remote


def isolate(implementation: Implementation, limits: Limits, *, alone: bool = True) -> Remote:
    """Return the same implementation in a worker, which imports its functions or unpickles them.

    Its libraries have one thread if it is not `alone`. Raises OptionError if neither is possible.
    """
    f, backward = implementation.f, implementation.backward
    settings = _settings(implementation.framework.name, implementation.device)
    spec, backward_spec = _import_path(f), backward and _import_path(backward)
    tensors = {}
    if spec is None or (backward is not None and backward_spec is None):
        pickled = _pickle(implementation.name, f, backward)
        tensors = {"pickled": Tensor("U8", (len(pickled),), pickled)}
    else:
        settings |= {"backward": backward_spec}
    command = [sys.executable, str(CHILD), spec or implementation.name, str(Path.cwd())]
    caches = cache_variables() if implementation.framework.compiles else {}
    environment = {**os.environ, **caches, **_threads(alone)}
    quantized = implementation.quantized
    remote = Remote(
        Worker(command, limits, settings, tensors, environment, abilities=ABILITIES),
        rename=implementation.rename,
        features=implementation.told_features,
        layout=implementation.layout,
        like=implementation.profile,
        quantized=quantized and quantized.dtype,
        rows=quantized and quantized.rows,
        name=implementation.name,
        spec=implementation.spec or spec,
        backward_spec=implementation.backward_spec or backward_spec,
    )
    remote.conventions, remote.sizes = implementation.conventions, implementation.sizes
    remote.rounding = implementation.rounding
    return remote


def _import_path(f: Any) -> str | None:
    """Return the module and name by which another process imports a function, None if none."""
    module, name = getattr(f, "__module__", None), getattr(f, "__qualname__", None)
    if module in (None, "__main__") or name is None:
        return None
    spec = f"{module}:{name}"
    return spec if isinstance(by_spec(f, spec), Spec) else None


def _pickle(name: str, f: Any, backward: Any) -> bytes:
    """Return the functions pickled; raise OptionError without cloudpickle, or if that fails."""
    try:
        import cloudpickle  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise OptionError(
            f"isolate is True, and {name} cannot be imported by its name: pip install cloudpickle, "
            "or put it into a module"
        ) from None
    try:
        pickled: bytes = cloudpickle.dumps((f, backward))
    except Exception as err:
        raise OptionError(
            f"isolate is True, and {name} cannot be pickled ({format_exception_line(err)}): put it "
            "into a module"
        ) from err
    return pickled


def _half_of_memory() -> int | None:
    """Return half of the bytes of this machine; None if nothing tells what a process uses."""
    if not PROCESSES.is_dir():
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _threads(alone: bool) -> dict[str, str]:
    return {OPENBLAS: os.environ.get(OPENBLAS, "1")} if alone else ONE_THREAD


def _settings(framework: str, device: str | None) -> dict[str, Any]:
    return {"framework": framework, "device": device}
