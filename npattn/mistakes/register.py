"""What a mutant is, and the register of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["REGISTER", "Mutant", "mutant"]

Made = TypeVar("Made", bound=type)


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation, and what must find it.

    Attributes
    ----------
    name, family : str
    sentence : str
        What is wrong.
    source : str
        The report of the bug, owner/repository#number, or "inferred".
    killed_by : tuple of str
        Rules of the judge; any of them must fail.
    forward, backward : callable
        An implementation under test, and its gradients.
    dtypes : tuple of str
        In which it is wrong; precision is lost in 16 bits only.
    rounding : str or None
        The model that its author would declare; None: none.
    equivalent : bool
        out is right and stays right; only lse shows the mistake.
    """

    name: str
    family: str
    sentence: str
    source: str
    killed_by: tuple[str, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    dtypes: tuple[str, ...] = ("float32",)
    rounding: str | None = None
    equivalent: bool = False


REGISTER: dict[str, Mutant] = {}
"""Every mutant that a module has made, by name."""


def mutant(
    name: str,
    family: str,
    killed_by: str,
    source: str = "inferred",
    *,
    dtypes: tuple[str, ...] = ("float32",),
    rounding: str | None = None,
    equivalent: bool = False,
) -> Callable[[Made], Made]:
    """Put a class with ``forward`` and ``backward`` into the zoo; its docstring says what is
    wrong."""

    def register(cls: Made) -> Made:
        if name in REGISTER:
            raise KeyError(f"{name} is twice in the zoo")
        made, sentence = cls(), " ".join((cls.__doc__ or "").split())
        REGISTER[name] = Mutant(
            name,
            family,
            sentence,
            source,
            tuple(killed_by.split()),
            made.forward,
            made.backward,
            dtypes,
            rounding,
            equivalent,
        )
        return cls

    return register
