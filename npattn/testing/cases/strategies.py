"""Sample recipes: from seeds, so that all pairs of options occur, and as Hypothesis strategies.

Sizes are mostly different, odd and not powers of two, because round shapes hide bugs; round ones,
those beside the edges of tiles, 0 and 1 are sampled too. Every list begins with the simplest value,
to which Hypothesis shrinks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, combinations, islice, zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from npattn.errors import DtypeError, OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array, finfo
from npattn.problem.checks import check_integer
from npattn.problem.options import OPTIONS
from npattn.testing.cases.assemble import assemble
from npattn.testing.cases.classes import classes_of_recipe, classes_of_value, field_of
from npattn.testing.cases.distributions import DISTRIBUTIONS
from npattn.testing.cases.options import BIASES, GATES, MASKS, SCORE_MODS
from npattn.testing.cases.pairwise import BY_SAMPLE, CROWD, count_options, covering
from npattn.testing.cases.recipe import OPTION_FIELDS, Recipe
from npattn.testing.cases.rows import Rows, column, recipes_of, rows_of
from npattn.testing.cases.shapes import few_shapes, program
from npattn.testing.cases.space import Space

if TYPE_CHECKING:  # loaded when a failing problem shrinks: it takes a while
    from hypothesis import strategies as st

CANDIDATES = 1200
"""Most recipes from which `covering` chooses."""
CANDIDATES_EACH = 100
"""Recipes for each example, if those are fewer."""
FEW = 20
"""Examples that each rule is asked at least."""
FIRST = 300
"""Recipes from which those among the first 20 are chosen: a quarter of the time."""
FIELDS = 32
"""At least as many as pools have lists."""
PLAIN = Recipe()
KEEP = object()
"""Change that leaves a field as the seed chose it."""
NAMED = {
    "mask": (*(name for name in MASKS if name != "empty padding"), *BY_SAMPLE),
    "bias": (*BIASES, *["-inf padding"] * 2),  # no other leaves keys out and empties no row
    "score_mod": tuple(SCORE_MODS),
    "sinks": (True,),
    "gate": tuple(GATES),
}
"""Values of the fields of a recipe that stand for an array or a callable."""
SIZES = ("B", "heads", "T", "S", "D", "E")
_sizes = attrgetter("lead", *"HKTSDE")


@dataclass(frozen=True)
class Pools:
    """Values to sample each field of a recipe from, the simplest first."""

    space: Space
    # fields of `Recipe` that have this value, or one of a tuple of them
    force: Mapping[str, Any] = field(default_factory=dict)
    forbid: frozenset[str] = frozenset()  # features that are not sampled
    nonempty: bool = False  # no size is 0
    shapes: int | None = None  # most shapes, where a framework compiles for each

    def __hash__(self) -> int:
        return hash((self.space, frozenset(self.force), self.forbid, self.nonempty))

    @cached_property
    def lists(self) -> dict[str, Sequence[Any]]:
        """Values of each field of `Recipe`, and of names that determine several fields."""
        space = self.space
        pools: dict[str, Sequence[Any]] = {letter: space.pool(letter) for letter in "BTSDE"}
        if self.nonempty:
            pools = {letter: [n for n in pool if n] for letter, pool in pools.items()}
        pools["rank"], pools["heads"] = space.ranks, space.heads
        pools["extent"] = space.extents(frozenset(self.force))
        # Extreme arrays hide mistakes that plain ones show, so a third is plain.
        pools["distribution"] = ["normal"] * (len(DISTRIBUTIONS) // 2) + list(DISTRIBUTIONS)
        pools["broadcast"] = (False, False, True) if "broadcast" in space.structure else (False,)
        # Kernels dispatch on E = D, on T = S and on round sizes: each gets its share.
        pools["same size"] = (False, False, True) if "E" not in space.sizes else (False,)
        pools["square"] = (False, False, True) if "S" not in space.sizes else (False,)
        pools["round"] = (False,) if space.sizes else (False,) * 5 + (True,)
        # With B = H swapped axes go unnoticed by shape.
        apart = "B" in space.sizes or "B" in self.force
        pools["B = H"] = (False,) if apart else (False, False, False, True)
        zeros = [] if self.nonempty else space.zeros
        pools["zero"] = [""] * max(8 * len(zeros), 1) + zeros
        pools |= _options(space.features - self.forbid)
        for name, values in self.force.items():
            pools[name] = values if isinstance(values, tuple) else (values,)
        if self.space.refused:
            # Of what a rule forces, nothing may be left: `conflict` says so.
            names = [n for n in OPTION_FIELDS if n in pools]
            pools |= {n: self._keep_accepted(n, pools[n]) or pools[n] for n in names}
        return pools

    def _keep_accepted(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Return the values of an option that are not refused whatever else is on."""
        refuses = self.space.refuses
        rank = self.space.first_rank
        return [x for x in values if not refuses(classes_of_value(name, x, rank))]

    @property
    def conflict(self) -> str | None:
        """Reason why nothing can be sampled that is accepted; None if something can."""
        for name in self.space.always:
            if name in self.forbid:
                return f"{name} is always on"
        for name, values in self.force.items():
            offered = values if isinstance(values, tuple) else (values,)
            if name in OPTION_FIELDS and not self._keep_accepted(name, offered):
                rank = self.space.first_rank
                kinds = set().union(*(classes_of_value(name, x, rank) for x in offered)) - {name}
                return f"refuses {', '.join(sorted(kinds)) or name}"
        return None

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that is the same for pools of one space that sample alike."""
        return tuple(sorted(self.force.items())), self.forbid, self.nonempty, self.shapes

    @cached_property
    def _switches(self) -> list[tuple[str, list[Any]]]:
        """Values of each option that is not forced; the first is off."""
        names = [n for n in _options(self.space.features) if n in self.lists]
        free = [n for n in names if n not in self.force and n not in self.space.always]
        return [(n, list(dict.fromkeys(self.lists[n]))) for n in free]

    @cached_property
    def _shapes(self) -> list[dict[str, Any]]:
        """Values that decide the shape, for each of few shapes."""
        fixed = frozenset(self.force) | frozenset(self.space.sizes)
        if {"H", "K"} & fixed:
            fixed |= {"heads"}
        return few_shapes(self.space.structure, self.lists, fixed)[: self.shapes]

    @cached_property
    def few(self) -> list[tuple[str, ...]]:
        """Every set of at most two options, by their fields."""
        offered = _options(self.space.features - self.forbid)
        fields = [n for n in offered if n not in {*self.force, *self.space.always}]
        return [on for size in (0, 1, 2) for on in combinations(fields, size)]

    def recipe(self, seed: int, changes: Sequence[Any] = ()) -> Recipe:
        """Return the recipe of a seed, with some changes of what the seed chooses."""
        changed = zip(self.lists, changes, strict=False)
        columns = {name: column([value]) for name, value in changed if value is not KEEP}
        (recipe,) = recipes_of(self._assemble([seed], self._choose([seed]) | columns))
        return recipe

    def recipes(self, seeds: Sequence[int]) -> list[Recipe]:
        """Return the recipe of each seed, which chooses evenly from every list.

        An odd seed gives a plain problem, for which kernels have their fast paths: two options at
        most, and plain structure. Mistakes there hide behind every third option.
        """
        return recipes_of(self._rows(seeds)) if seeds else []

    def _rows(self, seeds: Sequence[int]) -> Rows:
        return self._assemble(seeds, self._choose(seeds))

    def _assemble(self, seeds: Sequence[int], chosen: Rows) -> Rows:
        """Return rows of a value of each list, changed until nothing of a row is refused."""
        rows = assemble(self.space, frozenset(self.force), seeds, chosen)
        if (longest := self.space.longest) is not None:  # round lengths and tiles may be longer
            rows |= {letter: np.minimum(rows[letter], longest) for letter in "TS"}
        if not self.space.refused and not self.space.excluded:
            return rows
        recipes = [self._leave_out(recipe) for recipe in recipes_of(rows)]
        return rows_of([self._avoid(recipe) for recipe in recipes])

    def _avoid(self, recipe: Recipe) -> Recipe:
        """Change sizes or options that are not forced until no refused condition holds.

        By turns other sizes are taken first, or an option is turned off.
        """
        excludes, fixed = self.space.excludes, {*self.force, *self.space.always}
        if not self.space.excluded or not excludes(recipe):
            return recipe
        names = [n for n in OPTION_FIELDS if n not in fixed]
        off = [replace(recipe, **{n: getattr(PLAIN, n)}) for n in names]
        lists = {x: self.lists[x] for x in "TSDE" if x not in self.force}
        sizes = [
            replace(recipe, **{x: n})
            for x, numbers in lists.items()
            for n in dict.fromkeys(numbers)
        ]
        if "T" not in self.force and "S" not in self.force:
            sizes.insert(0, replace(recipe, T=recipe.S, S=recipe.T))
        ways = [*sizes, *off] if recipe.seed // 2 % 2 else [*off, *sizes]
        return next((r for r in ways if self._offers(r) and not excludes(r)), recipe)

    def _offers(self, recipe: Recipe) -> bool:
        """Return True if T, S, D and E of a recipe are of what is restricted."""
        return self.space.has_sizes(recipe) and not self.space.refuses(classes_of_recipe(recipe))

    @cached_property
    def _columns(self) -> Rows:
        return {name: column(values) for name, values in self.lists.items()}

    def _choose(self, seeds: Sequence[int]) -> Rows:
        """Return the value that each seed chooses from each list."""
        chosen = self._choose_freely(seeds)
        if self._base is not None:
            # Values of the pools whose programs agreement compiles, if these pools offer them too.
            others = self._base._choose(seeds)
            for name in chosen.keys() & others.keys():
                offered = np.array([x in self.lists[name] for x in others[name].tolist()])
                chosen[name] = np.where(offered, others[name], chosen[name])
        for row, seed in enumerate(seeds if self.space.few_shapes else ()):
            shape = self._shape(seed) if self._base is None else self._base._shape(seed)
            for name, value in (shape if shape in self._shapes else self._shape(seed)).items():
                chosen[name][row] = value
        return chosen

    def _choose_freely(self, seeds: Sequence[int]) -> Rows:
        """Return a value of each field for each seed; odd seeds have a few options on, at most."""
        n = len(self.lists)
        plain = {i: np.random.default_rng([x, 0]) for i, x in enumerate(seeds) if x % 2}
        where = np.array(
            [
                plain[row].random(n) if row in plain else _places(seed, max(n, FIELDS))[:n]
                for row, seed in enumerate(seeds)
            ]
        )
        chosen = {
            name: values[(place * len(values)).astype(int)]
            for (name, values), place in zip(self._columns.items(), where.T, strict=True)
        }
        for row, rng in plain.items():
            on = self.few[seeds[row] // 2 % len(self.few)]
            for name, (off, *values) in self._switches:
                chosen[name][row] = values[int(rng.integers(len(values)))] if name in on else off
            plainest = {"rank": self.lists["rank"][0], "broadcast": False, "zero": ""}
            plainest["same size"] = "E" not in self.space.sizes and bool(rng.integers(4))
            for name in plainest.keys() - self.force.keys():
                chosen[name][row] = plainest[name]
        return chosen

    def _shape(self, seed: int) -> dict[str, Any]:
        """Return the values that decide the shape, of few shapes."""
        return self._shapes[seed // 2 % len(self._shapes)]

    @cached_property
    def _base(self) -> Pools | None:
        """Pools of the same space without restrictions, whose programs agreement compiles.

        None if these have no restrictions, or if the framework does not compile.
        """
        pools = Pools(self.space)
        return pools if self.space.few_shapes and pools != self else None

    def _leave_out(self, recipe: Recipe) -> Recipe:
        """Change options that are not forced until nothing of the recipe is refused together."""
        for combination in sorted(map(sorted, self.space.refused)) * 2:
            if not classes_of_recipe(recipe).issuperset(combination):
                continue
            fixed = {*self.force, *self.forbid, *self.space.always}
            changes = [x for name in combination for x in _ways_out(name) if not fixed & x.keys()]
            if changes:
                recipe = replace(recipe, **changes[recipe.seed // 2 % len(changes)])
            elif any(name.endswith("= 0") for name in combination):
                recipe = _without_zeros(recipe)
        return recipe

    def cases(self, seed: int, examples: int) -> Iterator[Recipe]:
        """Yield recipes to judge with, a few times more than `examples`, since some show nothing.

        First each pair of options without a third, up to half of the examples; then recipes in
        which every option occurs with every kind of structure, and each kind occurs; then, in turn,
        a plain one and one with as many options at once as models have. Of the first two kinds
        there are as many as of each other among the first 20, which are all that many rules try.

        Where a framework compiles, restricted pools yield the recipes of unrestricted ones, changed
        as little as the restrictions require, since agreement compiles their programs.

        A report must be the same everywhere, so the seeds do not come from Hypothesis, whose
        samples depend on what else is loaded.
        """
        if not all(self.lists.values()):
            return  # sizes of 0 only, for a rule that needs more
        if self._base is not None:
            yield from self._adapt(self._base, seed, examples)
            return
        fields = tuple(self.lists)
        pairs = _pairs(self, fields, seed, examples)
        yield from pairs[: FEW // 2]
        yield from _first_after_pairs(self, fields, seed, examples)
        yield from pairs[FEW // 2 :]
        draws, covered, crowds, seeds = _after_pairs(self, fields, seed, examples)
        yield from covered
        for i in range(0, len(seeds), FEW):  # few at once, since most are never asked
            turn = seeds[i : i + FEW]
            plain = self.recipes([seed + 1 for seed, _ in turn])
            other = recipes_of(draws, crowds[i : i + len(turn)])
            other += self.recipes([seed for _, seed in turn[len(other) :]])
            yield from chain.from_iterable(zip(plain, other, strict=True))

    def _adapt(self, pools: Pools, seed: int, examples: int) -> list[Recipe]:
        """Return recipes of other pools, changed to these: by turns a plain and a crowded one.

        Recipes of either kind are sorted: those that need no new program first; among these, one
        of each program before a second of any; and then one of each shape before a second.
        """
        # Twice as many as a rule is asked, since some show nothing.
        asked = list(islice(pools.cases(seed, examples), 2 * max(examples, FEW)))
        programs = {program(recipe) for recipe in asked[:examples]}
        place: dict[Recipe, tuple[bool, int, int]] = {}
        turns: Counter[Any] = Counter()
        for recipe in self.recipes([recipe.seed for recipe in asked]):
            key = program(recipe)
            turns[key] += 1
            rank = key not in programs, turns[key]
            shape = recipe.seed % 2, *rank, *_sizes(recipe)
            turns[shape] += 1
            place[recipe] = *rank, turns[shape]
        ordered = sorted(place, key=place.__getitem__)
        kinds = ([r for r in ordered if r.seed % 2 == odd] for odd in (1, 0))
        return [r for pair in zip_longest(*kinds) for r in pair if r is not None]

    def changes(self) -> st.SearchStrategy[tuple[Any, ...]]:
        """Return a strategy of changes to a recipe: few, and as it shrinks, all of them."""
        from hypothesis import strategies as st

        simple = [list(dict.fromkeys(pool)) for pool in self.lists.values()]
        return st.tuples(*(st.sampled_from([*pool, *[KEEP] * 15 * len(pool)]) for pool in simple))

    def anything(self) -> st.SearchStrategy[Recipe]:
        """Return a strategy of recipes, each field of which is a choice of its own."""
        from hypothesis import strategies as st

        names = sorted(self.lists, key=lambda name: name in SIZES)  # these shrink last
        shapes = st.sampled_from(self._shapes) if self.space.few_shapes else st.just({})
        return st.builds(self._build, st.integers(0, 2**32 - 1), shapes, *map(self._choice, names))

    def _build(self, seed: int, shape: Mapping[str, Any], *chosen: tuple[str, Any]) -> Recipe:
        columns = {name: column([value]) for name, value in {**dict(chosen), **shape}.items()}
        (recipe,) = recipes_of(self._assemble([seed], columns))
        return recipe

    def _choice(self, name: str) -> st.SearchStrategy[tuple[str, Any]]:
        """Return a strategy of one field: of its pool and, where sizes are free, any size.

        Values are paired with their name because Hypothesis copies choices between equal
        strategies: examples would repeat each other.
        """
        from hypothesis import strategies as st

        values, space = self.lists[name], self.space
        odd = name in "TS" or (name in "DE" and "D % 8" in space.structure)
        if odd and name not in {*self.force, *space.sizes} and not space.few_shapes:
            values = [*range(1, max(values) + 1), *values * (max(values) // len(values))]
        return st.sampled_from([(name, value) for value in values])

    def near(self, seed: int) -> st.SearchStrategy[Recipe]:
        """Return a strategy of recipes near that of a seed, which shrinks to the simplest."""
        return self.changes().map(lambda changes: self.recipe(seed, changes))


@lru_cache(maxsize=2 * CANDIDATES)
def _places(seed: int, n: int) -> Array:
    """Return n numbers in [0, 1), the first of which are the same for every n.

    Cached, for all pools have candidates of the same seeds.
    """
    return np.random.default_rng([seed, 0]).random(n)


# Cached, for many rules and implementations sample alike. The recipe of a seed depends on the order
# of the fields, which equal pools may have differently.


@lru_cache(maxsize=128)
def _pairs(pools: Pools, fields: tuple[str, ...], seed: int, examples: int) -> list[Recipe]:
    """Return a recipe for each pair of options, up to half of the examples.

    The first, without options, has plain numbers, whose tolerances are the sharpest.
    """
    first = len(pools.few) * (seed % 2**20)
    count = min(len(pools.few), examples // 2)
    pairs = pools.recipes([2 * (first + n) + 1 for n in range(count)])
    if "distribution" not in pools.force:
        pairs[:1] = [replace(recipe, distribution="normal") for recipe in pairs[:1]]
    return pairs


@lru_cache(maxsize=128)
def _first_after_pairs(
    pools: Pools, fields: tuple[str, ...], seed: int, examples: int
) -> list[Recipe]:
    """Return the first few recipes that cover what pairs leave."""
    numbers = np.random.default_rng([seed, 7]).integers(2**31, size=FIRST).tolist()
    draws = pools._rows([2 * n for n in numbers])
    covered = covering(rows_of(_pairs(pools, fields, seed, examples)), draws)
    return recipes_of(draws, [*islice(covered, FEW // 2)])


@lru_cache(maxsize=128)
def _after_pairs(
    pools: Pools, fields: tuple[str, ...], seed: int, examples: int
) -> tuple[Rows, list[Recipe], Array, list[list[int]]]:
    """Return candidates, those that cover what is left, rows of crowds of options, and seeds."""
    rng = np.random.default_rng([seed, 11])
    candidates = min(CANDIDATES, CANDIDATES_EACH * examples)
    draws = pools._rows([2 * n for n in rng.integers(2**31, size=candidates).tolist()])
    first = _first_after_pairs(pools, fields, seed, examples)
    plan = rows_of([*_pairs(pools, fields, seed, examples), *first])
    covered = recipes_of(draws, [*covering(plan, draws)])
    crowds = np.flatnonzero(count_options(draws) > CROWD)
    return draws, covered, crowds, (2 * rng.integers(2**31, size=(5 * examples, 2))).tolist()


def recipes(space: Space | None = None, **options: Any) -> st.SearchStrategy[Recipe]:
    """Return a strategy of recipes within a space.

    Parameters
    ----------
    space : Space, optional
        Default: everything that `Problem` accepts.
    **options
        `force`, `forbid` and `nonempty` of `Pools`.

    Returns
    -------
    strategy of Recipe
    """
    return Pools(space or Space(), **options).anything()


def _ways_out(name: str) -> list[dict[str, Any]]:
    """Return changes of a recipe, after which it is not of this class of options."""
    field = field_of(name)
    if name == "no causal":
        return [{"causal": True}]
    return [] if not field or name.startswith("no ") else [{field: getattr(PLAIN, field)}]


def _without_zeros(recipe: Recipe) -> Recipe:
    """Return the recipe with sizes of 1 for those of 0."""
    sizes: dict[str, Any] = {n: getattr(recipe, n) or 1 for n in "HKTSDE"}
    lead = None if recipe.lead is None else tuple(n or 1 for n in recipe.lead)
    return replace(recipe, lead=lead, **sizes)


def _options(features: frozenset[str]) -> dict[str, Sequence[Any]]:
    """Return the values of each option, by field of `Recipe`; off in two of three problems."""
    # No system means by a mask at rate 0 that it drops.
    rates = [rate for rate in OPTIONS["dropout_rate"].examples if rate]
    values: dict[str, Sequence[Any]] = {}
    for name in OPTION_FIELDS:
        if name == "dropout":
            on: Sequence[Any] = rates if features >= {"dropout_mask", "dropout_rate"} else ()
        elif name in features:
            on = NAMED.get(name) or OPTIONS[name].examples or (True,)
        else:
            on = ()
        if on:
            values[name] = [getattr(PLAIN, name)] * (2 * len(on)) + list(on)
    return values


def problems(
    space: Space | None = None,
    *,
    heads: int | tuple[int, int] | None = None,
    max_len: int | None = None,
    options: str | Iterable[str] | None = None,
    dtype: str | None = None,
    **pools: Any,
) -> st.SearchStrategy[Problem]:
    """Return a strategy of problems.

    Parameters
    ----------
    space : Space, optional
        Problems to sample from. Default: everything that `npattn.Problem` accepts.
    heads : int or (int, int), optional
        H, with every K that divides it; or (H, K). Default: 1 to 192, and 0.
    max_len : int, optional
        Largest number of queries and of keys, T and S. Default: mostly below 20, up to 4096.
    options : str or iterable of str, optional
        Names of the options that may be on, as "causal"; () for none. Each is off in most of the
        problems. Default: all of `npattn.attention`.
    dtype : str, optional
        Dtype of the arrays, default "float32".
    **pools
        `force`, `forbid` and `nonempty` of `Pools`: values of fields of a recipe, as
        ``force={"causal": True}``; options that are off; True for no size of 0.

    Returns
    -------
    strategy of npattn.Problem

    Raises
    ------
    OptionError
        If `heads` is not ≥ 1 or K does not divide H, `max_len` is not ≥ 1, or an option is unknown.
    DtypeError
        If `dtype` is no floating dtype.

    Examples
    --------
    >>> from npattn.testing.strategies import problems
    >>> strategy = problems(heads=(6, 2), max_len=16, options=("causal", "mask"), dtype="float64")
    """
    space = space or Space()
    changes: dict[str, Any] = {}
    if heads is not None:
        H, *K = (heads,) if isinstance(heads, int) else heads
        if H < 1 or any(n < 1 or H % n for n in K):
            raise OptionError(f"heads is {heads}, must be H ≥ 1, or (H, K) where K divides H")
        changes["sizes"] = {**space.sizes, "H": (H,), **({"K": tuple(K)} if K else {})}
        changes["structure"] = space.structure - (set() if H == 1 else {"rank 2"})  # has no heads
    if max_len is not None:
        changes["longest"] = check_integer("max_len", max_len, 1)
    if options is not None:
        changes["features"] = _read_options(options)
    if dtype is not None:
        changes["dtype"] = _check_dtype(dtype)
    return recipes(replace(space, **changes), **pools).map(Recipe.problem)


def _read_options(options: str | Iterable[str]) -> frozenset[str]:
    """Return the names of options; a mask and a rate of dropout are one option."""
    names = {options} if isinstance(options, str) else set(options)
    for name in sorted(names - OPTIONS.keys()):
        raise OptionError(f"options has {name!r}, must be among {', '.join(OPTIONS)}")
    dropout = {"dropout_mask", "dropout_rate"}
    return frozenset(names | (dropout if names & dropout else set()))


def _check_dtype(dtype: str) -> str:
    try:
        finfo(dtype)
    except (TypeError, ValueError) as err:
        raise DtypeError(f"dtype is {dtype!r}, must be floating, as float32 or bfloat16") from err
    return dtype
