"""npattn.testing.cases.shapes: few whole shapes, for frameworks that compile for each."""

import itertools
from dataclasses import replace

import pytest

from npattn.problem.options import OPTIONS
from npattn.testing.cases.options import OFFSETS
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.shapes import SHAPES, program
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.cases.strategies import Pools

ALL = frozenset(STRUCTURE)


def shapes(space, **options):
    recipes = list(itertools.islice(Pools(space, **options).cases(0, 100), 200))
    return {(r.lead, r.H, r.K, r.T, r.S, r.D, r.E, r.broadcast) for r in recipes}


def test_few_shapes_carry_many_contents():
    few = shapes(Space(few_shapes=True), nonempty=True)
    assert len(few) == len(SHAPES) < len(shapes(Space(), nonempty=True))


def test_shapes_have_what_kernels_dispatch_on():
    few = shapes(Space(few_shapes=True), nonempty=True)
    have = {
        "one query": any(T == 1 < S for _, _, _, T, S, *_ in few),
        "T = S": any(T == S for _, _, _, T, S, *_ in few),
        "T > S": any(T > S for _, _, _, T, S, *_ in few),
        "over a tile": any(S > 64 for _, _, _, _, S, *_ in few),
        "T and S over a tile": any(T > 16 < S for _, _, _, T, S, *_ in few),
        "shared heads": any(1 < K < H for _, H, K, *_ in few),
        "one key/value head": any(1 == K < H for _, H, K, *_ in few),
        "B = H": any(lead == (H,) != (1,) for lead, H, *_ in few),
        "D % 8": any(D % 8 for *_, D, _, _ in few),
        "E = D": any(D == E for *_, D, E, _ in few),
        "ranks": {None if x is None else len(x) for x, *_ in few} == {None, 0, 1, 2},
        "broadcast": any(broadcast for *_, broadcast in few),
    }
    assert all(have.values()), have


def test_sizes_of_zero_are_those_of_one_shape():
    few = shapes(Space(few_shapes=True))
    zeros = [x for x in few if 0 in (*(x[0] or ()), *x[1:7])]
    assert zeros
    assert len(few) <= len(SHAPES) + len("BHTSDE")


@pytest.mark.parametrize("missing", ["K < H", "E != D", "T != S", "T > S", "D % 8", "broadcast"])
def test_shapes_keep_to_accepted_structure(missing):
    wrong = {
        "K < H": lambda lead, H, K, T, S, D, E, broadcast: K < H,
        "E != D": lambda lead, H, K, T, S, D, E, broadcast: E != D,
        "T != S": lambda lead, H, K, T, S, D, E, broadcast: T != S,
        "T > S": lambda lead, H, K, T, S, D, E, broadcast: T > S,
        "D % 8": lambda lead, H, K, T, S, D, E, broadcast: D % 8 or E % 8,
        "broadcast": lambda *shape: shape[-1],
    }[missing]
    few = shapes(Space(structure=ALL - {missing}, few_shapes=True), nonempty=True)
    assert few
    assert not any(wrong(*shape) for shape in few)


@pytest.mark.thorough
def test_sizes_of_the_user_and_of_a_rule_are_kept():
    few = shapes(Space(sizes={"D": (24, 40), "H": (12,)}, few_shapes=True), nonempty=True)
    assert {D for *_, D, _, _ in few} == {24, 40}
    assert {H for lead, H, *_ in few if lead is not None} == {12}
    forced = shapes(Space(few_shapes=True), force={"T": (19, 2)}, nonempty=True)
    assert {T for _, _, _, T, *_ in forced} == {19, 2}
    assert len(shapes(Space(few_shapes=True), force={"T": (9,)}, nonempty=True, shapes=1)) == 1


def test_ranks_that_are_refused_have_no_shape():
    lone = frozenset(STRUCTURE) - {"rank 2", "rank 3", "rank 5"}
    assert {len(lead) for lead, *_ in shapes(Space(structure=lone, few_shapes=True))} == {1}


def test_the_probe_and_sizes_of_zero_share_a_shape():
    base = Space(few_shapes=True).base()
    few = shapes(Space(few_shapes=True))
    plain = (base.lead, base.H, base.K, base.T, base.S, base.D, base.E, False)
    assert plain in few
    zeros = [x for x in few if 0 in (*(x[0] or ()), *x[1:7])]
    assert all(sum(a != b for a, b in zip(x, plain, strict=True)) <= 2 for x in zeros)


OPTIONS_OF_JAX = frozenset({"mask", "bias", "causal", "scale", "window", "lse"})
FEW = Space(features=OPTIONS_OF_JAX, structure=ALL - {"rank 5", "broadcast"}, few_shapes=True)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"distribution": "saturated"},
        {"mask": "prefix"},  # of the shape that "matrix" has
        {"bias": "alibi"},
    ],
)
def test_contents_need_no_new_program(change):
    recipe = Recipe(lead=(2,), H=3, K=3, T=5, S=7, mask="documents", bias="heads")
    like = {"mask": "documents", "bias": "heads"} | change
    assert program(replace(recipe, **like)) == program(recipe)


@pytest.mark.parametrize(
    "change",
    [
        {"T": 11},
        {"lead": (13,)},
        {"dtype": "float64"},
        {"mask": None},
        {"mask": "padding"},
        {"bias": "one a row"},
        {"scale": 0.25},
        {"causal": True},
        {"window": (1, 2)},
        {"sinks": True},
        {"dropout": 0.5},
        {"broadcast": True},
    ],
)
def test_shapes_and_options_need_a_new_program(change):
    recipe = Recipe(lead=(2,), H=3, K=3, T=5, S=7, mask="documents", bias="heads")
    assert program(replace(recipe, **change)) != program(recipe)


SAMPLINGS = {
    "nonempty": {"nonempty": True},
    "causal": {"force": {"causal": True}, "nonempty": True},
    "window": {"force": {"window": OPTIONS["window"].examples}},
    "hiding": {"force": {"mask": ("full", "padding", "matrix")}},
    "bias": {"force": {"bias": OFFSETS}, "nonempty": True},
    "few queries": {"force": {"T": (2, 1, 3, 5, 7, 16)}, "nonempty": True},
    "distribution": {"force": {"distribution": "saturated"}},
    "without": {"forbid": frozenset({"causal", "bias"}), "nonempty": True},
    "one shape": {"nonempty": True, "shapes": 1},
}


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_restricted_pools_begin_with_programs_of_agreement(name, seed):
    asked = list(itertools.islice(Pools(FEW).cases(seed, 100), 100))
    programs = {program(recipe) for recipe in asked}
    pools = Pools(FEW, **SAMPLINGS[name])
    begun = list(itertools.islice(pools.cases(seed, 100), 20))
    assert sum(program(recipe) in programs for recipe in begun) >= 15
    assert len({program(recipe) for recipe in begun}) >= 13
    assert [recipe.seed % 2 for recipe in begun] == [1, 0] * 10  # two options at most, and more


@pytest.mark.parametrize("name", SAMPLINGS)
def test_new_programs_come_last(name):
    programs = {program(recipe) for recipe in itertools.islice(Pools(FEW).cases(0, 100), 100)}
    recipes = list(Pools(FEW, **SAMPLINGS[name]).cases(0, 100))
    for odd in (0, 1):
        kind = [recipe for recipe in recipes if recipe.seed % 2 == odd]
        known = [program(recipe) in programs for recipe in kind]
        assert known == sorted(known, reverse=True)
        assert not all(known)
        assert any(known)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_shapes_take_turns(name):
    asked = list(itertools.islice(Pools(FEW).cases(0, 100), 200))
    programs = {program(recipe) for recipe in asked[:100]}
    pools = Pools(FEW, **SAMPLINGS[name])
    first = {}
    for recipe in asked:
        own = pools.recipe(recipe.seed)
        first.setdefault(program(own), own)
    different = {recipe for own, recipe in first.items() if own in programs}
    for odd in (0, 1):
        kind = [r for r in pools.cases(0, 100) if r in different and r.seed % 2 == odd]
        shapes = [(r.lead, r.H, r.K, r.T, r.S, r.D, r.E) for r in kind]
        turns = [shapes[:n].count(shape) for n, shape in enumerate(shapes)]
        assert turns == sorted(turns)
        assert len(kind) >= 5


def test_restricted_pools_keep_a_shape_that_fits():
    lengths = (16, 19)  # not those that come first
    pools = Pools(FEW, force={"T": lengths})
    asked = list(itertools.islice(Pools(FEW).cases(0, 100), 100))
    stay = [recipe for recipe in asked if recipe.T in lengths]
    assert len({recipe.S for recipe in stay}) > 1
    for recipe in stay:
        assert pools.recipe(recipe.seed) == recipe


def fits(recipe, pools):
    """Return True if the recipe meets the restrictions of the pools."""
    forced = all(
        getattr(recipe, n) in (x if isinstance(x, tuple) else (x,)) for n, x in pools.force.items()
    )
    plain = Recipe()
    off = all(getattr(recipe, n) == getattr(plain, n) for n in pools.forbid)
    sizes = (*(recipe.lead or ()), *(getattr(recipe, n) for n in "HKTSDE"))
    return forced and off and not (pools.nonempty and 0 in sizes)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_each_recipe_fits_and_its_seed_gives_it_again(name):
    pools = Pools(FEW, **SAMPLINGS[name])
    recipes = list(pools.cases(0, 100))
    assert len(set(recipes)) == 200
    for recipe in recipes:
        assert pools.recipe(recipe.seed) == recipe
        assert fits(recipe, pools)


def test_pairs_of_options_come_first_where_nothing_compiles():
    pools = Pools(Space(), force={"causal": True}, nonempty=True)
    begun = itertools.islice(pools.cases(0, 100), 10)
    assert [set(options_on(recipe)) - {"causal"} for recipe in begun] == [
        set(pair) for pair in pools.few[:10]
    ]
