"""Write dumps from live calls: a wrapper that keeps the arrays of a function's first calls."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer

QKV = ("q", "k", "v")


def record(
    f: Callable[..., Any], folder: str | Path, *, calls: int = 1, skip: int = 0
) -> Callable[..., Any]:
    """Return `f`, whose calls also write what went in and came out, for `npattn compare`.

    Put it around an attention function of a running model: ``layer.attend = record(layer.attend,
    "dumps")``. Results, gradients and the arguments of `f` stay as they are.

    Parameters
    ----------
    f : callable
        The first three arguments are q, k, v; it returns o, or (o, lse) or (o, weights). NumPy
        arrays or torch tensors.
    folder : str or path
        Folder of the dumps, call-0.npz, call-1.npz, …; made if it does not exist. A file that
        exists is never overwritten: the call raises.
    calls : int, default 1
        Number of calls to write; later ones only pass through.
    skip : int, default 0
        Number of calls before them.

    Returns
    -------
    callable
        With torch tensors that require gradients, a later backward adds dout (and dlse), dq, dk
        and dv to the file. bfloat16 is written as uint16, bit by bit.

    Raises
    ------
    OptionError
        If `calls` or `skip` is no such number, or, in a call, if the file exists.

    Warns
    -----
    RuntimeWarning
        If an argument is neither an array, a number, a text nor a tuple of numbers: it is left out.
    """
    most, before = check_integer("calls", calls, 1), check_integer("skip", skip, 0)
    place = Path(folder).absolute()
    try:
        signature = inspect.signature(f)
    except ValueError:  # a function of C, as torch's own
        signature = inspect.signature(_any_arguments)
    done = 0

    @functools.wraps(f)
    def call_and_write(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        number, done = done - before, done + 1
        if not 0 <= number < most:
            return f(*args, **kwargs)
        call = _Call(place / f"call-{number}.npz")
        bound = signature.bind_partial(*args, **kwargs)
        call.keep_arguments(bound.arguments)
        result = f(*bound.args, **bound.kwargs)
        result = call.keep_results(result)
        call.write()
        return result

    return call_and_write


def _any_arguments(q: Any, k: Any, v: Any, /, *rest: Any, **options: Any) -> None:
    """Have the signature of a function that tells nothing of its own."""


class _Call:
    """Entries of one dump, and the file that they are written to."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise OptionError(f"{path} exists: pass another folder, or move the file")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.entries: dict[str, Array] = {}

    def write(self) -> None:
        """Write all entries, in place of a file with fewer."""
        stored: dict[str, Any] = {
            n: x.view(np.uint16) if x.dtype.name == "bfloat16" else x
            for n, x in self.entries.items()
        }
        new = self.path.with_suffix(".part.npz")
        np.savez(new, **stored)
        new.replace(self.path)

    def keep_arguments(self, arguments: dict[str, Any]) -> None:
        """Keep the arguments by name; tensors with gradients are replaced by views with hooks."""
        flat: list[tuple[dict[str, Any], str, str]] = []
        for i, (name, value) in enumerate(arguments.items()):
            if isinstance(value, Mapping):  # options by name
                arguments[name] = inner = dict(value)
                flat += [(inner, key, key) for key in inner]
            else:
                flat.append((arguments, name, QKV[i] if i < len(QKV) else name))
        for holder, key, name in flat:
            value = holder[key]
            array = _to_array(value)
            if array is not None:
                self.entries[name] = array
                holder[key] = self._watch(f"d{name}", value)
            elif value is not None:
                warnings.warn(
                    f"{key} is {type(value).__name__}, which {self.path.name} cannot hold: "
                    "pass it to npattn compare as a flag",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def keep_results(self, result: Any) -> Any:
        """Keep o, and of a tuple lse and weights by their shapes; returns the same results."""
        parts = list(result) if isinstance(result, (tuple, list)) else [result]
        o = _to_array(parts[0])
        if o is None:
            raise OptionError(f"f returned {type(parts[0]).__name__}, must return o or (o, lse)")
        for i, part in enumerate(parts):
            array = _to_array(part)
            if array is None or array.ndim < o.ndim - 1:
                continue  # None, or a seed
            weights = i and array.ndim == o.ndim
            name = "o" if not i else "weights" if weights else "lse"
            cotangent = {"o": "dout", "lse": "dlse", "weights": "dweights"}[name]
            self.entries.setdefault(name, array)
            parts[i] = self._watch(cotangent, part)
        if isinstance(result, tuple):
            return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
        return parts if isinstance(result, list) else parts[0]

    def _watch(self, name: str, value: Any) -> Any:
        """Return a tensor whose gradient is written too, or any other value as it is."""
        if not getattr(value, "requires_grad", False):
            return value
        view = value.view_as(value)

        def keep(gradient: Any) -> None:
            if name not in self.entries and (array := _to_array(gradient)) is not None:
                self.entries[name] = array
                self.write()

        view.register_hook(keep)
        return view


def _to_array(value: Any) -> Array | None:
    """Return a copy of an array, tensor, number, text or tuple of numbers; None of others."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            import ml_dtypes
            import torch

            return np.array(tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
        return np.array(tensor.numpy())
    if isinstance(value, tuple) and all(x is None or isinstance(x, (int, float)) for x in value):
        return np.array([np.nan if x is None else x for x in value], float)
    if isinstance(value, (np.ndarray, np.generic, bool, int, float, str)):
        return np.array(value)
    return None
