"""Recipes of every length for sweeps, from a seed and a number each.

T and S are log-uniform from 1 to 4096. Half of the problems have one option at most, for which
kernels have their fast paths; the others have each option with an even chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.problem.options import OPTIONS
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space

LONGEST = 4096
MASKS = ("matrix", "full", "padding", "left padding", "documents", "empty rows")
BIASES = ("matrix", "full", "keys", "one for all heads", "one a head", "alibi", "-inf padding")
MODS = ("distance", "squash")
GATES = ("full", "one a row", "heads")
DISTRIBUTIONS = (
    *("normal",) * 6,
    *("large logits", "value offset", "flat", "integers", "outliers", "duplicate keys"),
    *("tiny values", "near-uniform", "mixed scales"),
)
SCALES = (0.5, 1.0, -0.75, 1.7, 0.02)
ROUND = (64, 128, 64, 32, 128, 16, 96)
ODD = (40, 5, 17, 65, 3)


@dataclass(frozen=True)
class Plan:
    """Sampling plan for an implementation."""

    space: Space  # problems that it accepts
    conventions: Conventions
    cells: int  # largest number of scores, or of numbers in queries and keys, if sizes are free
    empty_rows: bool = True  # sample fully masked queries

    def recipe(self, seed: int, number: int) -> Recipe:
        """Return the recipe of a number, which does not depend on the others."""
        rng = np.random.default_rng([seed, number, 19])
        on = self._options(rng, number)
        recipe = Recipe(
            seed=int(rng.integers(2**31)), dtype=self.space.dtype, **self._sizes(rng, number)
        )
        options: dict[str, Any] = {"distribution": str(rng.choice(DISTRIBUTIONS))}
        if "mask" in on:
            options["mask"] = str(rng.choice(MASKS if self._empties else MASKS[:4]))
        if "bias" in on:
            options["bias"] = str(rng.choice(BIASES if self._empties else BIASES[:-1]))
        if "scale" in on:
            options["scale"] = float(rng.choice(SCALES))
        if "softcap" in on:
            options["softcap"] = float(rng.choice(OPTIONS["softcap"].examples))
        if "score_mod" in on:
            options["score_mod"] = str(rng.choice(MODS))
        if "dropout_mask" in on:
            options["dropout"] = float(rng.choice((0.3, 0.5)))
        if "gate" in on:
            options["gate"] = str(rng.choice(GATES))
        if "window" in on:
            sides = [int(np.exp(rng.uniform(0, math.log(recipe.S + 1)))) for _ in range(2)]
            left_keys, right_keys = sides if rng.integers(4) else (sides[0], None)
            options["window"] = (left_keys, right_keys)
        return self.fit(replace(recipe, causal="causal" in on, sinks="sinks" in on, **options))

    def long(self, seed: int, length: int) -> list[Recipe]:
        """Return recipes with T = S = length, with no option or one that needs no T × S array."""
        sizes = self.space.sizes
        T, S = (max(sizes.get(letter, (length,))) for letter in "TS")
        if self.square:
            T = S = min(T, S)
        H, K = max(pair for pair in self.space.heads if pair[0] <= 8 or "H" in sizes)
        D = max(self._pool("D", (64,)))
        E = max(self._pool("E", (D,)))
        plain = Recipe(
            lead=self._lead(1), H=H, K=K, T=T, S=S, D=D, E=E, dtype=self.space.dtype, seed=seed
        )
        causal: dict[str, Any] = {"causal": True}
        window: dict[str, Any] = {"window": (1000, 500)}
        mask: dict[str, Any] = {"mask": "padding"}
        variants = [({}, set()), (causal, {"causal"}), (window, {"window"}), (mask, {"mask"})]
        recipes = [replace(plain, **x) for x, needs in variants if needs <= self.options]
        return [self.fit(replace(x, seed=seed + n), None) for n, x in enumerate(recipes)]

    @property
    def options(self) -> frozenset[str]:
        """Options that are sampled."""
        drops = {"dropout_mask", "dropout_rate"} <= self.space.features
        return self.space.features - {"dropout_rate"} - (set() if drops else {"dropout_mask"})

    @property
    def _empties(self) -> bool:
        plain = (
            self.conventions.empty_results == {"zero"} and self.conventions.lse_empty == -math.inf
        )
        return plain and self.empty_rows

    @property
    def square(self) -> bool:
        """True if it accepts T = S only."""
        return "T != S" not in self.space.structure

    def _options(self, rng: np.random.Generator, number: int) -> set[str]:
        options = [name for name in OPTIONS if name in self.options]
        if number % 2:
            which = int(rng.integers(len(options) + 1))
            return set(options[which : which + 1])
        on = {name for name in options if rng.integers(2)}
        if not self._empties and "mask" in on:  # together they may hide everything
            on -= {"causal", "window"}
        return on

    def _pool(self, letter: str, free: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes to sample from, without 0."""
        return tuple(n for n in self.space.sizes.get(letter, free) if n) or free

    def _lead(self, B: int) -> tuple[int, ...] | None:
        leads = {"rank 4": (B,), "rank 3": (), "rank 2": None}
        return next((lead for rank, lead in leads.items() if rank in self.space.structure), ())

    def _sizes(self, rng: np.random.Generator, number: int) -> dict[str, Any]:
        """Return lead and sizes of a problem: lengths are log-uniform, often equal or round."""
        structure = self.space.structure

        def length(letter: str) -> int:
            free = int(np.exp(rng.uniform(0, math.log(LONGEST + 1))))
            return int(rng.choice(self._pool(letter, (free,))))

        T, S = length("T"), length("S")
        if "S" not in self.space.sizes and rng.integers(4) == 0:
            S = T  # kernels dispatch on it, and on round sizes
        if not self.space.sizes and rng.integers(4) == 0:
            T, S = (n if n < 64 else n // 64 * 64 for n in (T, S))
        odd = ODD if "D % 8" in structure else ()
        D = int(rng.choice(self._pool("D", ROUND + odd)))
        E = int(rng.choice(self._pool("E", (D, D, D, *ROUND[:3], *odd))))
        if "E != D" not in structure:
            E = D
        heads = self.space.heads
        H, K = heads[int(rng.integers(len(heads)))]
        lead = self._lead(int(rng.choice(self._pool("B", (1, 2, 3)))))
        if lead is None:
            H = K = 1
        return {"lead": lead, "H": H, "K": K, "T": T, "S": S, "D": D, "E": E}

    def fit(self, recipe: Recipe, cells: int | None = 0) -> Recipe:
        """Reduce samples, heads, then lengths, until the problem is small enough."""
        sizes = self.space.sizes
        limit = self.cells if cells == 0 else cells
        if recipe.lead and "B" not in sizes:
            recipe = replace(
                recipe, lead=(max(1, min(recipe.lead[0], _max_samples(recipe, limit))),)
            )
        if _max_samples(recipe, limit) == 0 and not set("HK") & set(sizes):
            recipe = replace(recipe, H=1, K=1)
        while _max_samples(recipe, limit) == 0 and not {"T", "S"} <= set(sizes):
            letter = max(set("TS") - set(sizes), key=lambda n: int(getattr(recipe, n)))
            if getattr(recipe, letter) == 1:
                break
            recipe = replace(recipe, **{letter: getattr(recipe, letter) // 2})
        return self.adapt(recipe)

    def adapt(self, recipe: Recipe) -> Recipe:
        """Change T and S to what the implementation accepts, and avoid empty rows on request."""
        T, S, sizes = recipe.T, recipe.S, self.space.sizes
        banded = recipe.causal or recipe.window is not None
        if self.square:
            T = S = min(T, S)
        elif T > S and ("T > S" not in self.space.structure or (banded and not self._empties)):
            if "S" in sizes:
                T = max((n for n in self._pool("T", (S,)) if n <= S), default=S)
            elif "T" in sizes:
                S = T
            else:
                T, S = S, T
        return replace(recipe, T=T, S=S)


def _max_samples(recipe: Recipe, cells: int | None) -> int:
    """Return the number of samples that fit, by their scores or by their queries and keys."""
    if cells is None:
        return 2**31
    T, S, size = recipe.T, recipe.S, max(recipe.D, recipe.E)
    return cells // (recipe.H * max(T * S, (T + S) * size))


def simplify(recipe: Recipe, plan: Plan) -> list[Recipe]:
    """Return simpler recipes, each with one thing less, the largest steps first."""
    changes: list[dict[str, Any]] = []
    sizes = plan.space.sizes
    for letter in "TS":
        n = getattr(recipe, letter)
        less = (n // 8, n // 2, n - n // 4, n - 1) if letter not in sizes else sizes[letter]
        changes += [{letter: m} for m in sorted(set(less)) if 0 < m < n]
    if plan.square:
        changes = [{"T": c.get("T", c.get("S")), "S": c.get("T", c.get("S"))} for c in changes]
    if recipe.lead and "B" not in sizes and recipe.lead != (1,):
        changes.append({"lead": (1,)})
    if not set("HK") & set(sizes) and recipe.H > 1:
        changes += [{"H": 1, "K": 1}, {"H": recipe.H // recipe.K, "K": 1}, {"H": recipe.K}]
    if not set("DE") & set(sizes) and max(recipe.D, recipe.E) > 8:
        changes.append({"D": 8, "E": 8})
    for name in ("mask", "bias", "window", "scale", "softcap", "score_mod", "dropout", "gate"):
        changes.append({name: None})
    changes += [{"causal": False}, {"sinks": False}, {"distribution": "normal"}]
    recipes = [replace(recipe, **change) for change in changes]
    return [x for x in recipes if x != recipe and plan.adapt(x) == x]
