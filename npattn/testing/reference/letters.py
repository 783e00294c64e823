"""Arrays by letters: ``{"x": "B T C", "w": "C 3C", "mask": "T T bool"}``, sampled and shrunk."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array

SIZES = (3, 2, 5, 1, 7, 4, 8, 11, 16, 17, 33, 64, 65, 97, 129)
"""Sizes that a letter is sampled from, the plainest first."""
MOST = 2**15
"""Elements of the largest array that is sampled."""
PARTS = (0.0, 0.25, 0.5, 0.75, 0.875)
"""Parts of a size that are tried in its place; 0 stands for 1."""
SCALES = (1.0, 1.0, 1.0, 4.0, 0.125)
"""Standard deviations of the numbers."""
EXAMPLE = '{"x": "B T C", "w": "C 3C", "mask": "T T bool", "ids": "B T int V"}'


class ArrayOf(NamedTuple):
    """One array: its axes, each a list of (number, letter), and its kind.

    `kind` is "float", "bool", or "int" with numbers from 0 up to below the size `below`.
    """

    axes: tuple[tuple[tuple[int, str], ...], ...]
    kind: str
    below: tuple[tuple[int, str], ...] = ()

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(_size(axis, sizes) for axis in self.axes)


def _size(axis: Sequence[tuple[int, str]], sizes: Mapping[str, int]) -> int:
    return math.prod(n * sizes.get(letter, 1) for n, letter in axis)


def _read_axis(word: str, name: str, text: str) -> tuple[tuple[int, str], ...]:
    """Read "C", "3C", "7" or "H*D"."""
    factors = []
    for factor in word.split("*"):
        match = re.fullmatch(r"(\d*)([A-Za-z]?)", factor)
        if match is None or not factor:
            raise OptionError(
                f"inputs[{name!r}] is {text!r}, whose axis {word!r} is no letter, number or "
                f"product: write it as in {EXAMPLE}"
            )
        factors.append((int(match[1] or 1), match[2]))
    return tuple(factors)


def read_inputs(inputs: Any) -> dict[str, ArrayOf]:
    """Read the arrays of a function, in the order of its arguments."""
    if not isinstance(inputs, Mapping) or not all(isinstance(x, str) for x in inputs.values()):
        raise OptionError(f"inputs is {inputs!r}, must be a mapping, as in {EXAMPLE}")
    arrays = {}
    for name, text in inputs.items():
        words, kind = text.split(), "float"
        below: tuple[tuple[int, str], ...] = ()
        if words[-1:] == ["bool"]:
            words, kind = words[:-1], "bool"
        elif words[-2:-1] == ["int"]:
            below = _read_axis(words[-1], name, text)
            words, kind = words[:-2], "int"
        arrays[name] = ArrayOf(tuple(_read_axis(x, name, text) for x in words), kind, below)
    if not any(x.kind == "float" for x in arrays.values()):
        raise OptionError(f"inputs is {inputs!r}, must have an array of floating numbers")
    return arrays


@dataclass(frozen=True)
class Case:
    """Sizes by letter, options by name, and the seed of the numbers; its repr makes it anew."""

    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __hash__(self) -> int:
        return hash(repr(self))

    def arrays(self, inputs: Mapping[str, ArrayOf], dtype: str) -> dict[str, Array]:
        """Sample the arrays.

        Numbers are normal, with a standard deviation of 1, 4 or 1/8; a mask has three of four
        True, and the first of its last axis, so that a row sees something.
        """
        rng = np.random.default_rng([self.seed, 1])
        arrays: dict[str, Array] = {}
        scale = SCALES[int(rng.integers(len(SCALES)))]
        for name, one in inputs.items():
            shape = one.shape(self.sizes)
            if one.kind == "bool":
                arrays[name] = np.asarray(rng.random(shape) < 0.75)
                arrays[name][..., :1] = True
            elif one.kind == "int":
                arrays[name] = rng.integers(0, _size(one.below, self.sizes), shape)
            else:
                arrays[name] = (scale * rng.standard_normal(shape)).astype(_dtype(dtype))
        return arrays

    def cotangent(self, shape: tuple[int, ...], dtype: Any, number: int) -> Array:
        """Sample the cotangent of a result."""
        rng = np.random.default_rng([self.seed, 6, number])
        return np.asarray(rng.standard_normal(shape)).astype(dtype)


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclass(frozen=True)
class LetterSpace:
    """Cases of some arrays and options."""

    inputs: Mapping[str, ArrayOf]
    # values of each option, the plainest first
    options: Mapping[str, Sequence[Any]]
    # sizes of the letters that do not have any
    sizes: Mapping[str, Sequence[int]]

    @property
    def letters(self) -> list[str]:
        axes = [axis for x in self.inputs.values() for axis in (*x.axes, x.below)]
        return sorted({letter for axis in axes for _, letter in axis if letter})

    def pool(self, letter: str) -> Sequence[int]:
        return self.sizes.get(letter, SIZES)

    def first(self, number: int) -> Case:
        """Return one of the plainest cases; `number` tells them apart."""
        pools = {x: self.pool(x) for x in self.letters}
        sizes = {x: pool[number % len(pool)] for x, pool in pools.items()}
        return Case(sizes, {name: values[0] for name, values in self.options.items()})

    def fits(self, case: Case) -> bool:
        """Return True if no array is too large."""
        return all(math.prod(x.shape(case.sizes)) <= MOST for x in self.inputs.values())

    def cases(self, seed: int, examples: int) -> Iterator[Case]:
        """Sample different cases: most with small sizes, half with plain options."""
        rng, seen = np.random.default_rng([seed, 2]), set()
        for n in range(5 * examples):
            pools = {x: self.pool(x) for x in self.letters}
            small = rng.random() < 0.5
            sizes = {
                x: int(rng.choice(pool[: (len(pool) + 1) // 2] if small else pool))
                for x, pool in pools.items()
            }
            plain = rng.random() < 0.25
            options = {
                name: values[0] if plain else values[int(rng.integers(len(values)))]
                for name, values in self.options.items()
            }
            case = Case(sizes, options, 1000 * seed + n)
            if self.fits(case) and case not in seen:
                seen.add(case)
                yield case
            if len(seen) == examples:
                return

    def smaller(self, case: Case) -> Iterator[Case]:
        """Yield simpler cases: one option plainer, or one size smaller."""
        for name, values in self.options.items():
            if case.options[name] != values[0]:
                yield replace(case, options={**case.options, name: values[0]})
        for letter, size in case.sizes.items():
            pool = sorted(n for n in self.pool(letter) if n < size)
            halves = [
                n
                for n in (1, size // 2, 3 * size // 4, 7 * size // 8, size - 1)
                if letter not in self.sizes and n > 0
            ]
            for n in dict.fromkeys([*pool[:1], *halves, size - 1 if halves else size, *pool[-1:]]):
                if 0 < n < size:
                    yield replace(case, sizes={**case.sizes, letter: n})
