"""Record of a wrong implementation, and the register of all of them.

`where` is "everywhere", or atoms joined by " and ": a comparison (≥ ≤ < > = ≠) of integers, indices
b h t s d e (query head h, value column e) and sizes B H K T S D E G (G = H/K) under + − · % //;
options, of which one is given ("causal or window"); "rows that see no key", "hidden keys"; or
"contents": such as scores above 80, −1e9, NaN or inf. An option is named if without it all is
right. Where a fully masked row gives numbers, the step is p, and nan where it gives NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from npattn.mistakes.attention import Attention

Implementation = TypeVar("Implementation", bound=type)

STEPS = (
    *("s", "visible", "p", "lse", "o", "dv", "dp", "delta", "ds"),
    *("dq", "dk", "dbias", "dsinks", "dgate"),
    *("layout", "precision", "state", "nan", "refusal"),
)
"""Quantities of the exact computation in their order, and what else can be wrong."""


@dataclass(frozen=True)
class Mistake:
    """A wrong implementation, and the sentence that explains it."""

    name: str
    family: str
    sentence: str  # what the implementation does wrong, for the user who made the same mistake
    source: str  # report of the bug, owner/repository#number, or "inferred"
    # first quantity of the exact computation that is wrong while all before it are right: one of
    # `STEPS`
    step: str
    # predicate of the places of `step` that are wrong: ``"s ≥ 32"``, ``"everywhere"``. With
    # ``"backward: "`` before it, the backward's own recomputation of `step` is wrong.
    where: str
    forward: Callable[..., Any]  # the implementation, and its gradients
    backward: Callable[..., Any]
    # dtypes in which it is wrong; a loss of precision shows in 16 bits only
    dtypes: tuple[str, ...] = ("float32",)
    rounding: str | None = None  # rounding model that its author would declare, if any
    equivalent: bool = False  # True if out and its gradients are right and only lse is wrong


REGISTER: dict[str, Mistake] = {}
"""Every registered mistake, by name, in the order of registration."""


def mistake(
    name: str, family: str, source: str = "inferred", *, step: str, where: str,
    dtypes: tuple[str, ...] = ("float32",), rounding: str | None = None, equivalent: bool = False,
) -> Callable[[Implementation], Implementation]:  # fmt: skip
    """Register a class with ``forward`` and ``backward``; its docstring is the sentence."""

    def register(cls: Implementation) -> Implementation:
        """Add an instance of the class to the register, and return the class as it is."""
        if name in REGISTER:
            raise KeyError(f"two mistakes are named {name}")
        instance, sentence = cls(), " ".join((cls.__doc__ or "").split())
        REGISTER[name] = Mistake(
            name, family, sentence, source, step, where, instance.forward, instance.backward,
            dtypes, rounding, equivalent,
        )  # fmt: skip
        return cls

    return register


def change(
    name: str, family: str, sentence: str, source: str = "inferred", *, step: str, where: str,
    of: type[Attention] = Attention, dtypes: tuple[str, ...] = ("float32",),
    rounding: str | None = None, equivalent: bool = False, **steps: Callable[..., Any],
) -> None:  # fmt: skip
    """Register `of` with other steps, called with the step each replaces and both's arguments."""

    def override(method: str, f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **options: f(getattr(super(cls, self), method), *args, **options)

    methods: dict[str, Any] = {method: override(method, f) for method, f in steps.items()}
    methods |= {"__doc__": sentence, "__reduce__": lambda self: (_instance_of, (name,))}
    cls: Any = type(name, (of,), methods)
    details: dict[str, Any] = {"dtypes": dtypes, "rounding": rounding, "equivalent": equivalent}
    mistake(name, family, source, step=step, where=where, **details)(cls)


def after(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that changes what the one that it replaces returns."""
    return lambda up, *args, **options: f(up(*args, **options))


def one_result(i: int, f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that changes one of several results; f is called with it and the arguments."""

    def step(up: Callable[..., Any], *args: Any) -> Any:
        results = [*up(*args)]
        results[i] = f(results[i], *args)
        return tuple(results)

    return step


def option(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step in place of `inputs` that changes an option if it is given."""

    def step(up: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
        if options.get(name) is not None:
            options[name] = f(options[name])
        return up(*arrays, **options)

    return step


def some_of_other_inputs(which: tuple[int, ...], f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step for `gradients` that computes some results from changed inputs."""

    def step(up: Callable[..., Any], c: Any, *cotangents: Any) -> Any:
        pairs = zip(up(c, *cotangents), up(f(c), *cotangents), strict=True)
        return tuple(pair[i in which] for i, pair in enumerate(pairs))

    return step


def one_for_all(axis: int, i: int = 0) -> Callable[..., Any]:
    """Return a function that takes one entry of an array along an axis for all, if it has it."""

    def take(x: Any) -> Any:
        has_axis = np.ndim(x) >= -axis and x.shape[axis]
        return np.take(x, [i], axis=axis) if has_axis else x

    return take


def _instance_of(name: str) -> Any:
    """Return the object that a mistake's forward and backward are methods of."""
    return REGISTER[name].forward.__self__  # type: ignore[attr-defined]
