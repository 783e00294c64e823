"""Describe what an implementation does with wrong input: a note each, never a verdict.

Nothing is promised here, but a caller wants to know whether a mistake gives an exception, a number
or a crash. Every case runs in a worker or another child process, since a kernel that reads beyond
an array may take its process with it. Only ``--only robustness`` asks.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.adapters.base import Crash, ImplementationError, TimedOut
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space

PATIENCE = 60.0
"""Seconds after which a case counts as hanging."""

Arrays = dict[str, Array]
Options = dict[str, Any]


@dataclass(frozen=True)
class CallerMistake:
    """One mistake of a caller."""

    about: str  # the mistake in words
    needs: str | None  # the option that it is made in
    # (arrays, options) → the same with the mistake in them
    change: Callable[[Arrays, Options], tuple[Arrays, Options]]


def _without_last(name: str, axis: int) -> Callable[[Arrays, Options], tuple[Arrays, Options]]:
    def change(arrays: Arrays, options: Options) -> tuple[Arrays, Options]:
        array = arrays[name]
        shorter = np.take(array, range(array.shape[axis] - 1), axis)
        return arrays | {name: np.ascontiguousarray(shorter)}, options

    return change


def _with(name: str, value: Any) -> Callable[[Arrays, Options], tuple[Arrays, Options]]:
    return lambda arrays, options: (arrays, options | {name: value})


def _uneven_heads(arrays: Arrays, options: Options) -> tuple[Arrays, Options]:
    """Two key/value heads for three query heads."""
    return arrays | {"k": arrays["k"][:, :2].copy(), "v": arrays["v"][:, :2].copy()}, options


def _to_integers(arrays: Arrays, options: Options) -> tuple[Arrays, Options]:
    rounded = {n: np.round(x.astype(np.float64)).astype(np.int32) for n, x in arrays.items()}
    return rounded, options


def _mix_dtypes(arrays: Arrays, options: Options) -> tuple[Arrays, Options]:
    other = np.float64 if arrays["k"].dtype == np.float32 else np.float32
    return arrays | {"k": arrays["k"].astype(other)}, options


def _mask(*axes: str) -> Callable[[Arrays, Options], tuple[Arrays, Options]]:
    def change(arrays: Arrays, options: Options) -> tuple[Arrays, Options]:
        (B, H, T, _), S = arrays["q"].shape, arrays["k"].shape[-2]
        size = {"B": B, "H": H, "T": T, "S": S, "S+1": S + 1, "H+1": H + 1}
        mask = np.random.default_rng(0).random([size[a] for a in axes]) < 0.7
        return arrays | {"mask": mask}, options

    return change


MISTAKES = (
    CallerMistake("v is one key shorter than k", None, _without_last("v", -2)),
    CallerMistake("k is one channel narrower than q", None, _without_last("k", -1)),
    CallerMistake("3 query heads, 2 key/value heads", None, _uneven_heads),
    CallerMistake("v has one head less than k", None, _without_last("v", -3)),
    CallerMistake("k, v of one sample less than q", None, _without_last("k", -4)),
    CallerMistake("k in another dtype than q and v", None, _mix_dtypes),
    CallerMistake("q, k, v of integers", None, _to_integers),
    CallerMistake("mask of shape (S,)", "mask", _mask("S")),
    CallerMistake(
        "mask of shape (B, S), where B = T: it fits by accident", "mask", _mask("B", "S")
    ),
    CallerMistake("mask of one key too many", "mask", _mask("T", "S+1")),
    CallerMistake("mask of one head too many", "mask", _mask("H+1", "T", "S")),
    CallerMistake("window of −2 keys to the left", "window", _with("window", (-2, 0))),
    CallerMistake("softcap of 0", "softcap", _with("softcap", 0.0)),
    CallerMistake("softcap of −1", "softcap", _with("softcap", -1.0)),
    CallerMistake("scale NaN", "scale", _with("scale", float("nan"))),
)
"""The mistakes tried."""


def describe_wrong_input(implementation: Implementation, space: Space) -> list[str]:
    """Describe what becomes of each mistake, a line each.

    Parameters
    ----------
    space : Space
        For its dtype.
    """
    if not implementation.is_isolated and "fork" not in multiprocessing.get_all_start_methods():
        return ["not tried: this system cannot fork, and a crash would end this process"]
    base = replace(Recipe(dtype=space.dtype), lead=(5,), H=3, K=3, T=5, S=7, D=16, E=16)
    problem = base.problem()
    lines = []
    for case in MISTAKES:
        if case.needs is None or case.needs in implementation.features:
            arrays, options = case.change({n: getattr(problem, n).copy() for n in "qkv"}, {})
            lines.append(f"{case.about}: {_describe_call(implementation, arrays, options)}")
    return lines


def _describe_call(implementation: Implementation, arrays: Arrays, options: Options) -> str:
    """Describe one call, made in a worker or in a child process."""
    if implementation.is_isolated:
        try:
            return _describe_answer(implementation, arrays, options)
        except (Crash, TimedOut) as err:
            return f"CRASHED ({err})"
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    args = (theirs, implementation, arrays, options)
    child = context.Process(target=_run_child, args=args, daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE):
            return "no answer within a minute: it hangs"
        answer = str(ours.recv())
        child.join(PATIENCE)  # it ends by itself, with all that it has to do then
        return answer
    except EOFError:
        child.join()
        code = child.exitcode or 0
        return f"CRASHED with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    finally:
        child.kill()
        child.join()
        ours.close()


def _run_child(pipe: Any, implementation: Implementation, arrays: Arrays, options: Options) -> None:
    pipe.send(_describe_answer(implementation, arrays, options))


def _describe_answer(implementation: Implementation, arrays: Arrays, options: Options) -> str:
    try:
        out = implementation.call(arrays, options)
    except (Crash, TimedOut):
        raise
    except ImplementationError as err:
        message = " ".join(str(err).split())
        return f"an exception ({message[:160]})"
    kind = "finite" if np.isfinite(out.astype(np.float64)).all() else "with NaN or inf"
    return f"ANSWERED without a word: {out.dtype} {out.shape}, {kind}"
