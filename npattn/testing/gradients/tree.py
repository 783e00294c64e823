"""Dicts, lists and tuples of arrays: their leaves by name, and the same tree with other leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from npattn.errors import OptionError


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree in order, each with the expression that reaches it."""
    for key, child in _children(tree):
        yield from leaves(child, f"{name}{key}")
    if not isinstance(tree, dict | list | tuple):
        yield name, tree


def _children(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        yield from ((f"[{key!r}]", child) for key, child in tree.items())
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from ((f".{key}", getattr(tree, key)) for key in tree._fields)
    elif isinstance(tree, list | tuple):
        yield from ((f"[{i}]", child) for i, child in enumerate(tree))


def rebuild(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """Return the tree with each leaf replaced, in the order of `leaves`."""
    if isinstance(tree, dict):
        return {key: rebuild(child, replace) for key, child in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(rebuild(child, replace) for child in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(rebuild(child, replace) for child in tree)
    return replace(tree)


def match(tree: Any, other: Any, name: str, source: str) -> Iterator[Any]:
    """Yield the leaf of `other` for each leaf of `tree`; None may stand for a whole branch."""
    if not isinstance(tree, dict | list | tuple):
        yield other
        return
    pairs = list(_children(tree))
    if other is None:
        others = [None] * len(pairs)
    elif isinstance(tree, dict) and isinstance(other, dict) and tree.keys() == other.keys():
        others = [other[key] for key in tree]
    elif (
        not isinstance(tree, dict) and isinstance(other, list | tuple) and len(other) == len(pairs)
    ):
        others = list(other)
    else:
        size = f" with {len(other)} entries" if isinstance(other, dict | list | tuple) else ""
        raise OptionError(
            f"{source} returned a {type(other).__name__}{size} for {name}, which is a "
            f"{type(tree).__name__} with {len(pairs)}: return the same structure"
        )
    for (key, child), value in zip(pairs, others, strict=True):
        yield from match(child, value, f"{name}{key}", source)
