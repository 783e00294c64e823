"""Record of a wrong implementation, and the register of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["REGISTER", "Mistake", "mistake"]

Implementation = TypeVar("Implementation", bound=type)


@dataclass(frozen=True)
class Mistake:
    """A wrong implementation, and the sentence that explains it.

    Attributes
    ----------
    name, family : str
    sentence : str
        What the implementation does wrong, for the user who made the same mistake.
    source : str
        Report of the bug, owner/repository#number, or "inferred".
    forward, backward : callable
        The implementation, and its gradients.
    dtypes : tuple of str
        Dtypes in which it is wrong; a loss of precision shows in 16 bits only.
    rounding : str or None
        Rounding model that its author would declare, if any.
    equivalent : bool
        True if out and its gradients are right and only lse is wrong.
    """

    name: str
    family: str
    sentence: str
    source: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    dtypes: tuple[str, ...] = ("float32",)
    rounding: str | None = None
    equivalent: bool = False


REGISTER: dict[str, Mistake] = {}
"""Every registered mistake, by name, in the order of registration."""


def mistake(
    name: str,
    family: str,
    source: str = "inferred",
    *,
    dtypes: tuple[str, ...] = ("float32",),
    rounding: str | None = None,
    equivalent: bool = False,
) -> Callable[[Implementation], Implementation]:
    """Register a class with ``forward`` and ``backward``; its docstring is the sentence."""

    def register(cls: Implementation) -> Implementation:
        if name in REGISTER:
            raise KeyError(f"two mistakes are named {name}")
        instance, sentence = cls(), " ".join((cls.__doc__ or "").split())
        REGISTER[name] = Mistake(
            name,
            family,
            sentence,
            source,
            instance.forward,
            instance.backward,
            dtypes,
            rounding,
            equivalent,
        )
        return cls

    return register
