"""Arrays that a backward changes: its arguments, and what the forward has saved for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from npattn.problem.arrays import Array, to_numpy
from npattn.testing.gradients.function import Function
from npattn.testing.gradients.tree import leaves


def find_changes(function: Function, w: Array) -> str:
    """Return what a backward changes, in words; "" if nothing.

    A gradient by autograd is asked twice of one graph, whose buffers are kept, and once of another:
    one that differs each time proves nothing. Arrays of JAX do not change.

    Parameters
    ----------
    w : (m,) float64 array
        A cotangent.
    """
    if function.hand_vjp is not None:
        return _find_changes_by_hand(function, w)
    return _find_changes_of_graph(function, w) if function.framework.name == "torch" else ""


def _find_changes_by_hand(function: Function, w: Array) -> str:
    assert function.hand_vjp is not None
    dout, args = function.give_cotangent(w), function.give_arguments()
    names = [name for name, _ in leaves(args, "args")]
    names += [f"cotangent {name}" for name, _ in leaves(dout, "result")]
    arrays = [x for _, x in (*leaves(args, ""), *leaves(dout, ""))]
    before = [_copy(x) for x in arrays]
    with function.calling():
        function.hand_vjp(dout, *args)
    found = _name_changes(names, before, arrays)
    return f"the vjp changes {found}, which it is given" if found else ""


def _find_changes_of_graph(function: Function, w: Array) -> str:
    """Return a sentence if backward changes its inputs, w, (m,), or what it saved; else ""."""
    torch = sys.modules["torch"]
    inputs, douts = function.inputs, list(function.give(w, function.results))
    names, call = function.name_call()

    def record() -> tuple[list[Any], Callable[[], list[Any]]]:
        """Return leaves, and a function that differentiates the graph of a new call by them."""
        with function.calling():
            leaves = [x.detach().requires_grad_() for x in function.give(function.x, inputs)]
            found = call(dict(zip(names, leaves, strict=True)))
        pairs = zip(found.values(), douts, strict=True)
        reached = [(y, d) for y, d in pairs if y.requires_grad]

        def differentiate() -> list[Any]:
            with function.calling():
                results, seeds = zip(*reached, strict=True)
                more = {"retain_graph": True, "allow_unused": True}
                return [_copy(g) for g in torch.autograd.grad(results, leaves, seeds, **more)]

        return leaves, differentiate if reached else list

    leaves, differentiate = record()
    tensors = [*leaves, *douts]
    before, first = [_copy(x) for x in tensors], differentiate()
    titles = [y.name for y in inputs] + [f"cotangent {y.name}" for y in function.results]
    if found := _name_changes(titles, before, tensors):
        return f"backward changes {found}, which it is given"
    try:
        again = differentiate()
    except Exception:  # noqa: BLE001  it may free what it has saved by itself, and raise anything
        return ""
    fresh = record()[1]()
    differs = any(not _is_same(*pair) for pair in zip(first, again, strict=True))
    if differs and all(_is_same(*pair) for pair in zip(first, fresh, strict=True)):
        return "backward changes what is saved for it: a second one of the same graph differs"
    return ""


def _name_changes(names: list[str], before: list[Any], arrays: list[Any]) -> str:
    pairs = zip(names, before, arrays, strict=True)
    return ", ".join(name for name, old, x in pairs if not _is_same(old, _copy(x)))


def _copy(value: Any) -> Any:
    """Return an array in a copy; None for what is none."""
    return np.array(to_numpy(value)) if hasattr(value, "dtype") else None


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (a is not None and b is not None and bool(a.tobytes() == b.tobytes()))
