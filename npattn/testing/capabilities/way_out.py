"""Find the dtype, layout and sizes with which a function is taken that refuses plain problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.capabilities.conditions import LENGTHS, Asked
from npattn.testing.cases.conditions import letters_of
from npattn.testing.cases.space import Space
from npattn.testing.places import find_clause, read_condition
from npattn.testing.trial import Trial

DTYPES = ("float32", "bfloat16", "float16", "float64")
TRIED = ((16, 16), (64, 64), (128, 64), (128, 128), (256, 64), (256, 128))
"""Numbers of queries and keys, and sizes of a head."""
SHOWN = 3
"""Sizes of a letter that are named where no modulus describes what is taken."""


@dataclass(frozen=True)
class WayOut:
    """Settings with which a function is taken, where they are not those of the check."""

    dtype: str  # "" if it is that of the check
    layout: str
    sizes: dict[str, str]  # by letter, as "64,128" or "64x"

    @property
    def flags(self) -> str:
        """As the command line has them."""
        words = [f"--dtype {self.dtype}"] if self.dtype else []
        words += [f"--layout {self.layout}"] if self.layout else []
        return " ".join([*words, *(f"--sizes {x}={text}" for x, text in self.sizes.items())])

    @property
    def arguments(self) -> str:
        """As Python has them."""
        words = [f'dtypes="{self.dtype}"'] if self.dtype else []
        words += [f'layout="{self.layout}"'] if self.layout else []
        forms = {x: f'"{t}"' if "x" in t else _tuple(t) for x, t in self.sizes.items()}
        sizes = ", ".join(f'"{x}": {text}' for x, text in forms.items())
        return ", ".join([*words, *([f"sizes={{{sizes}}}"] if sizes else [])])


def find_way_out(trial: Trial) -> WayOut | None:
    """Try other dtypes, sizes and layouts; None if none is taken, or if nothing has to change.

    Conditions on two sizes, and shared heads, are learned by a check, and need no setting.
    """
    for variant in _trials(trial):
        base = variant.space.base()
        try:
            variant.implementation.forward(variant.problem(base), base.view)
        except ImplementationError:
            continue
        asked = Asked(variant, base, free=True)
        sample = asked.sample_of(letters_of(base))
        clause = find_clause(asked.takes, sample, domains=asked.domains, seconds=30)
        alone = {a.names[0]: a.text for a in clause if len(a.names) == 1}
        sizes = {x: _describe(x, alone[x]) for x in "BKDETS" if x in alone}
        dtype = variant.space.dtype if variant.space.dtype != trial.space.dtype else ""
        layout = variant.implementation.layout
        found = WayOut(dtype, layout if layout != trial.implementation.layout else "", sizes)
        return found if found.flags else None
    return None


def _trials(trial: Trial) -> Iterator[Trial]:
    """Yield trials of one size, dtype and layout each, those of the check first."""
    f, space = trial.implementation, trial.space
    layouts = [f.layout] if f.storage or f.packing else [f.layout, *({"BHTD", "BTHD"} - {f.layout})]
    for layout in layouts:
        variant = copy(f)
        variant.layout = layout
        for dtype in dict.fromkeys((space.dtype, *DTYPES)):
            for length, size in TRIED:
                sizes = {"T": (length,), "S": (length,), "D": (size,), "E": (size,)}
                sizes |= dict.fromkeys("BHK", (2,))
                structure = frozenset({"rank 4"})
                only = Space(space.features, structure, dtype, sizes | dict(space.sizes))
                yield replace(
                    trial, implementation=variant, space=only, memo={}, gradients=frozenset()
                )


def _tuple(text: str) -> str:
    numbers = text.split(",")
    return f"({', '.join(numbers)})" if len(numbers) > 1 else f"({text},)"


def _describe(letter: str, text: str) -> str:
    """Return the sizes of a condition on one letter as --sizes takes them."""
    modulus = re.fullmatch(rf"{letter} % (\d+) = 0", text)
    if modulus:
        return f"{modulus[1]}x"
    holds = read_condition(text)
    some = dict.fromkeys(n for n in (8, 16, 32, 64, 128, *LENGTHS) if holds({letter: n}))
    listed = re.search(r"\{(.*)\}", text)
    return listed[1].replace(" ", "") if listed else ",".join(map(str, [*some][:SHOWN]))
