"""Sampling of recipes: odd and round sizes, 0 and 1, and nothing that was refused."""

import functools
import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import seed as hypothesis_seed

from npattn.errors import NpattnError, OptionError
from npattn.problem import Problem
from npattn.problem.options import FEATURES, OPTIONS
from npattn.testing.cases import strategies
from npattn.testing.cases.options import SCORE_MODS
from npattn.testing.cases.pairwise import covering, kinds, traits
from npattn.testing.cases.recipe import BIASES, DISTRIBUTIONS, MASKS, OPTION_FIELDS, Recipe
from npattn.testing.cases.rows import rows_of
from npattn.testing.cases.space import EDGES, POOLS, RANKS, STRUCTURE, Space, with_rank
from npattn.testing.cases.strategies import Pools, problems, recipes

EVERYTHING = frozenset(STRUCTURE)
LETTERS = "HKTSDE"


def sample_from(strategy, number=300):
    """Return reproducible samples of a Hypothesis strategy, without shrinking."""
    samples = []
    quiet = settings(max_examples=number, database=None, deadline=None, phases=(Phase.generate,),
                     suppress_health_check=list(HealthCheck))  # fmt: skip

    @hypothesis_seed(0)
    @quiet
    @given(strategy)
    def keep(one):
        samples.append(one)

    keep()
    return samples


@functools.cache
def sample():
    """Return what the judge samples first: recipes chosen by seeds alone."""
    pools = Pools(Space())
    return tuple(pools.recipe(seed) for seed in range(400))


def share(condition, of=None):
    of = sample() if of is None else of
    return sum(map(condition, of)) / len(of)


def without(*names):
    return Space(structure=EVERYTHING - set(names))


# --- sizes ----------------------------------------------------------------------------------------


def test_most_draws_are_different():
    assert len({replace(r, seed=0) for r in sample()}) > 290


@pytest.mark.parametrize(("pair", "least"), [("TS", 0.5), ("TD", 0.7), ("SE", 0.7), ("DE", 0.35)])
def test_sizes_mostly_differ_and_half_have_e_equal_d(pair, least):
    assert share(lambda r: getattr(r, pair[0]) != getattr(r, pair[1])) > least


@pytest.mark.parametrize("letter", "TSDE")
def test_sizes_are_mostly_no_powers_of_two(letter):
    sizes = [getattr(r, letter) for r in sample()]
    assert share(lambda n: n % 2 == 1, sizes) > 0.5
    assert share(lambda n: n > 1 and n & (n - 1) == 0, sizes) < 0.5


@pytest.mark.parametrize("letter", "TSDE")
def test_round_sizes_and_0_and_1_are_sampled(letter):
    sizes = {getattr(r, letter) for r in sample()}
    assert {0, 1} <= sizes
    assert sizes & {8, 16}
    assert 64 in sizes


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("T > S", lambda r: r.T > r.S > 0),
        ("S = 65", lambda r: r.S == 65),
        ("K = 3 with G = 4", lambda r: (r.H, r.K) == (12, 3)),
        ("K = 1 with G > 1", lambda r: r.K == 1 < r.H),
        ("H = 0", lambda r: (r.H, r.K) == (0, 0)),
        ("E != D", lambda r: r.E != r.D),
        ("rank 2", lambda r: r.lead is None),
        ("rank 3", lambda r: r.lead == ()),
        ("rank 5", lambda r: r.lead is not None and len(r.lead) == 2),
        ("B = 0", lambda r: bool(r.lead) and r.lead[0] == 0),
        ("broadcast", lambda r: r.broadcast),
        ("B = H > 1", lambda r: r.lead is not None and r.lead[:1] == (r.H,) != (1,)),
        ("B != H", lambda r: bool(r.lead) and r.lead[0] != r.H > 1),
        ("S = 4096", lambda r: r.S == 4096),
        ("S > 128 with D > 64", lambda r: r.S > 128 and r.D > 64),
        ("one query of many keys", lambda r: r.T == 1 and r.S > 7),
        *((f"{n} queries", lambda r, n=n: n == r.T) for n in EDGES),
        *((f"{n} keys", lambda r, n=n: n == r.S) for n in EDGES),
    ],
)
def test_revealing_structure_is_sampled_often(name, condition):
    assert share(condition) > 0, name


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("mask", [name for name in MASKS if name != "empty padding"]),  # for one rule
        ("bias", BIASES),
        ("distribution", DISTRIBUTIONS),
        ("score_mod", SCORE_MODS),
        ("causal", (True, False)),
        ("sinks", (True, False)),
        ("dropout", (None, 0.5, 0.3)),
        ("scale", (None, 0.0, -0.75)),
        ("window", (None, (0, 0), (3, None), (None, 1))),
        ("softcap", (None, 0.5, 30.0)),
    ],
)
def test_every_kind_of_option_is_sampled(field, values):
    assert set(values) <= {getattr(r, field) for r in sample()} | (
        {None} if field in ("mask", "bias", "score_mod") else set()
    )


def test_options_are_off_in_two_of_three_problems():
    for field in ("mask", "bias", "score_mod", "window"):
        assert 0.4 < share(lambda r, f=field: getattr(r, f) is None) < 0.9, field


# --- refused structure ----------------------------------------------------------------------------

HAS = {
    "rank 2": lambda r: r.lead is None,
    "rank 3": lambda r: r.lead == (),
    "rank 4": lambda r: r.lead is not None and len(r.lead) == 1,
    "rank 5": lambda r: r.lead is not None and len(r.lead) == 2,
    "K < H": lambda r: r.K < r.H,
    "E != D": lambda r: r.E != r.D,
    "T != S": lambda r: r.T != r.S,
    "T > S": lambda r: r.T > r.S > 0,  # S = 0 is probed apart
    "D % 8": lambda r: r.D % 8 != 0,
    "broadcast": lambda r: r.broadcast,
    "B = 0": lambda r: bool(r.lead) and r.lead[0] == 0,
    "H = 0": lambda r: r.H == 0,
    "T = 0": lambda r: r.T == 0,
    "S = 0": lambda r: r.S == 0,
    "D = 0": lambda r: r.D == 0,
    "E = 0": lambda r: r.E == 0,
}


@pytest.mark.parametrize("name", HAS)
@pytest.mark.broad
def test_refused_structure_is_not_sampled(name):
    pools = Pools(without(name))
    samples = [pools.recipe(seed) for seed in range(300)] + sample_from(recipes(without(name)), 60)
    assert len(samples) == 360
    assert share(HAS[name], samples) == 0


def test_value_sizes_are_round_if_odd_ones_are_refused():
    samples = sample_from(recipes(without("D % 8")), 150)
    assert all(r.E % 8 == 0 for r in samples)


def test_plainest_structure_gives_plainest_recipes():
    plainest = Space(structure=frozenset({"rank 3"}), features=frozenset())
    for recipe in sample_from(recipes(plainest), 60):
        assert recipe.lead == ()
        assert recipe.H == recipe.K > 0
        assert recipe.T == recipe.S > 0
        assert recipe.D == recipe.E > 0
        assert recipe.D % 8 == 0


def test_missing_features_are_not_sampled():
    space = Space(features=frozenset({"causal"}))
    samples = sample_from(recipes(space), 60)
    assert share(lambda r: r.causal, samples) > 0
    for field in ("mask", "window", "bias", "scale", "softcap", "score_mod", "dropout"):
        assert {getattr(r, field) for r in samples} == {None}, field
    assert not any(r.sinks for r in samples)


@pytest.mark.parametrize("alone", ["dropout_mask", "dropout_rate"])
def test_dropout_needs_both_its_mask_and_its_rate(alone):
    samples = sample_from(recipes(Space(features=frozenset({alone}))), 30)
    assert {r.dropout for r in samples} == {None}


# --- restricted sampling --------------------------------------------------------------------------


def test_fixed_sizes_are_kept():
    sizes = {"B": (3,), "H": (4, 8), "K": (2, 4), "T": (128,), "S": (64, 96), "D": (64, 128)}
    samples = sample_from(recipes(Space(sizes=sizes, structure=EVERYTHING - {"rank 2"})), 100)
    for recipe in samples:
        for letter in sizes.keys() - {"B"}:
            assert getattr(recipe, letter) in sizes[letter], letter
        assert recipe.H % recipe.K == 0
        assert recipe.lead[:1] in ((), (3,))
    for letter in sizes.keys() - {"B"}:
        assert {getattr(r, letter) for r in samples} == set(sizes[letter]), letter


@pytest.mark.thorough
def test_hundred_examples_differ_in_every_field():
    """Hypothesis copies choices between equal strategies; fields are told apart by name."""
    samples = sample_from(recipes(), 100)
    assert len(samples) == len(set(samples)) == 100
    assert len({r.seed for r in samples}) > 80
    assert len({(r.lead, r.H, r.K, r.T, r.S, r.D, r.E) for r in samples}) > 80
    assert len({switched_on(r) for r in samples}) > 60


@pytest.mark.parametrize(
    ("fails", "smallest"),
    [
        (lambda r: r.T > 5, Recipe(lead=(2,), H=1, K=1, T=6, S=1, D=1, E=1)),
        (
            lambda r: r.causal and r.K < r.H,
            Recipe(lead=(2,), H=2, K=1, T=1, S=1, D=1, E=1, causal=True),
        ),
    ],
)
def test_failures_shrink_to_the_smallest_sizes(fails, smallest):
    phases = (Phase.generate, Phase.shrink)  # to explain takes ten times as long
    quiet = settings(database=None, deadline=None, phases=phases, max_examples=200)
    assert find(recipes(), fails, settings=quiet, random=Random(0)) == smallest


@pytest.mark.parametrize("seed", range(3))
def test_every_group_and_number_of_shared_heads_is_sampled(seed):
    plan = [r for r in cases(seed) if names(traits, r)]  # none of them has a size of 0
    assert {r.H // r.K for r in plan} >= set(POOLS["G"])
    assert {r.K for r in plan} >= set(POOLS["K"])


def test_recipe_and_its_neighbours_are_reproducible():
    pools = Pools(Space())
    assert pools.recipe(7) == Pools(Space()).recipe(7)
    near = sample_from(pools.near(7), 30)
    assert {r.seed for r in near} == {7}
    assert len(set(near)) > 3
    assert pools.recipe(7) in near


def test_fixed_sizes_hold_if_longer_queries_are_refused():
    sizes = {"T": (32, 128), "S": (64,)}
    samples = sample_from(recipes(Space(sizes=sizes, structure=EVERYTHING - {"T > S"})), 40)
    assert {(r.T, r.S) for r in samples} == {(32, 64)}


def test_heads_without_common_divisor_are_not_shared():
    samples = sample_from(
        recipes(Space(sizes={"H": (5,), "K": (2,)}, structure=frozenset({"rank 4"}))), 20
    )
    assert {(r.H, r.K) for r in samples} == {(5, 5)}


@pytest.mark.parametrize(
    "sizes", [{"Q": (1,)}, {"D": 64}, {"D": ()}, {"D": (-1,)}, {"D": (1.5,)}, {"DT": (1,)}]
)
def test_illegal_sizes_are_an_error(sizes):
    with pytest.raises(OptionError, match="must be a letter of B H K T S D E with a"):
        Space(sizes=sizes)


@pytest.mark.parametrize("letter", "BHTSDE")
def test_a_size_of_0_is_not_the_first(letter):
    space = Space(sizes={letter: (0, 3)})
    assert space.pool(letter) == (3, 0)
    base = space.base()
    assert (base.lead if letter == "B" else getattr(base, letter)) in (3, (3,))


@pytest.mark.thorough
def test_nonempty_draws_no_size_of_0():
    for recipe in sample_from(recipes(Space(), nonempty=True), 150):
        sizes = [getattr(recipe, letter) for letter in LETTERS]
        assert all((*sizes, *(recipe.lead or ())))


def test_forced_options_are_sampled_and_forbidden_ones_not():
    samples = sample_from(
        recipes(
            Space(),
            force={"mask": ("padding", "full"), "causal": True, "S": 9},
            forbid=frozenset({"sinks", "bias"}),
            nonempty=True,
        ),
        60,
    )
    assert {r.mask for r in samples} == {"padding", "full"}
    assert {(r.causal, r.sinks, r.bias) for r in samples} == {(True, False, None)}
    assert {r.S for r in samples} == {9}


def test_the_dtype_is_that_of_the_space():
    assert {r.dtype for r in sample_from(recipes(Space(dtype="bfloat16")), 10)} == {"bfloat16"}


def test_every_draw_makes_a_problem():
    samples = sample_from(problems(), 100)
    assert len(samples) == 100
    assert all(type(p) is Problem for p in samples)
    small = sample_from(problems(Space(sizes={"T": (4,)}), nonempty=True), 5)
    assert {p.T for p in small} == {4}


@pytest.mark.parametrize(("rank", "lead"), [("rank 2", None), ("rank 3", ()), ("rank 5", (2, 3))])
def test_the_plainest_problem_has_a_rank_that_is_accepted(rank, lead):
    assert Space(structure=frozenset({rank})).base().lead == lead


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("of", RANKS)
def test_a_recipe_of_any_rank_is_given_any_other(rank, of):
    recipe = with_rank(with_rank(Space().base(), of), rank)
    assert recipe.problem().q.ndim == int(rank.removeprefix("rank "))


def test_plainest_problem_has_fixed_sizes():
    base = Space(sizes={"D": (40,), "T": (3,), "H": (6,), "K": (2,)}).base()
    assert (base.D, base.E, base.T, base.S, base.H, base.K) == (40, 40, 3, 3, 6, 2)
    other = Space(sizes={"E": (24,), "S": (5,), "B": (7,)}).base()
    assert (other.D, other.E, other.T, other.S, other.lead) == (16, 24, 16, 5, (7,))


def test_features_and_structure_default_to_all():
    assert Space().features == set(FEATURES)
    assert Space().structure == set(STRUCTURE)
    assert set(HAS) < set(STRUCTURE)


def switched_on(recipe):
    """Return the options of a recipe that are not at their default."""
    plain = Recipe()
    return frozenset(n for n in OPTION_FIELDS if getattr(recipe, n) != getattr(plain, n))


def test_first_half_of_cases_covers_pairs_of_options():
    pairs = {frozenset(pair) for pair in itertools.combinations(OPTION_FIELDS, 2)}
    few = 1 + len(OPTION_FIELDS) + len(pairs)  # none, one or two options
    cases = list(itertools.islice(Pools(Space()).cases(0, 2 * few), few + 10))
    plan = cases[:10] + cases[20:]
    met = {switched_on(recipe) for recipe in plan}
    assert pairs <= met
    assert max(map(len, met)) == 2
    assert all(len(recipe.lead) == 1 and not recipe.broadcast for recipe in plan)
    assert sum(recipe.E == recipe.D for recipe in plan) > len(plan) / 2


def test_cases_depend_on_seed_alone():
    first, again, other = (list(Pools(Space()).cases(seed, 60)) for seed in (3, 3, 5))
    assert first == again
    assert not set(first) & set(other)


def test_cases_do_not_depend_on_earlier_cases():
    forced = {"mask": ("full", "matrix"), "bias": ("full", "matrix")}
    turned = dict(reversed(forced.items()))
    one, other = (Pools(Space(features=frozenset()), force=x) for x in (forced, turned))
    assert one == other  # though what a seed chooses differs
    after = list(one.cases(3, 10)), list(other.cases(3, 10))
    for remembered in (strategies._pairs, strategies._first_after_pairs, strategies._after_pairs):
        remembered.cache_clear()
    assert list(other.cases(3, 10)) == after[1] != after[0]


def test_pairs_of_options_come_without_sampling_the_rest(monkeypatch):
    monkeypatch.setattr(strategies, "_first_after_pairs", None)
    monkeypatch.setattr(strategies, "_after_pairs", None)
    pools = Pools(Space())
    assert len({*itertools.islice(pools.cases(0, 100), 10)}) == 10


def test_the_first_20_cases_are_of_both_kinds():
    pools = Pools(Space())
    first = list(itertools.islice(pools.cases(0, 200), 20))
    assert first[:10] == strategies._pairs(pools, tuple(pools.lists), 0, 200)[:10]
    assert first[10:] == strategies._first_after_pairs(pools, tuple(pools.lists), 0, 200)
    options = [len(switched_on(recipe)) for recipe in first]
    assert max(options[:10]) <= 2 < max(options[10:])


def names(table, recipe):
    return [name for name, (has,) in table(rows_of([recipe])).items() if has]


def cases(seed, space=None, **kwargs):
    return list(itertools.islice(Pools(space or Space(), **kwargs).cases(seed, 100), 100))


# Kinds of structure; every problem that is not empty has one of each group.
GROUPS = (
    ("rank 2", "rank 3", "rank 4", "rank 5"),
    ("K = H", "K = 1", "1 < K < H"),
    ("E = D", "E != D"),
    ("T = S", "T < S", "T > S"),
    ("D % 8", "D = 8 n"),
)
APART = ("T = 1", "broadcast", "B = H", "scale < 0", "steep")  # may be there beside them
# One head has no group, no leading axes are no batch, and one query has no more keys than itself.
NEVER = {
    *itertools.product(["rank 2"], ["K = 1", "1 < K < H", "broadcast", "B = H"]),
    *itertools.product(["rank 3"], ["broadcast", "B = H"]),
    *itertools.product(["T = S", "T > S"], ["T = 1"]),
}


def pairs_that_can_meet():
    kinds = [(kind, group) for group in (*GROUPS, *((kind,) for kind in APART)) for kind in group]
    kinds += [(option, (option,)) for option in OPTION_FIELDS]
    return {
        frozenset((one, other))
        for (one, group), (other, _) in itertools.combinations(kinds, 2)
        if other not in group and (one, other) not in NEVER and (other, one) not in NEVER
    }


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.broad
def test_hundred_cases_cover_pairs_of_options_and_structure(seed):
    met = {frozenset(p) for r in cases(seed) for p in itertools.combinations(names(traits, r), 2)}
    assert pairs_that_can_meet() == met


@pytest.mark.parametrize("seed", range(3))
def test_within_100_examples_every_kind_is_there(seed):
    plan = cases(seed)
    for field, values in [
        ("mask", [name for name in MASKS if name != "empty padding"]),
        ("bias", BIASES),
        ("distribution", DISTRIBUTIONS),
        ("score_mod", SCORE_MODS),
        ("scale", OPTIONS["scale"].examples),
        ("softcap", OPTIONS["softcap"].examples),
        ("window", OPTIONS["window"].examples),
        ("dropout", (0.5, 0.3)),
        ("T", (1, *EDGES)),
        ("S", (1, *EDGES, 4096)),
        ("D", (1, 8, 64, 65, 128)),
    ]:
        assert set(values) <= {getattr(r, field) for r in plan}, field
    assert any(r.S > 128 and r.D > 64 for r in plan)
    shown = {kind for r in plan for kind in names(kinds, r)}
    assert shown >= {"by sample", "H = T", "K = S", "T = D", "S = D", "S = E"}
    assert shown >= {f"broadcast {x}" for x in (["kept", "not"], ["not", "kept"])}
    assert {letter for letter in "TSDEH" for r in plan if getattr(r, letter) == 0} == set("TSDEH")


def test_covered_pairs_respect_features_and_structure():
    features = frozenset({"causal", "bias", "scale"})
    space = Space(features=features, structure=EVERYTHING - {"rank 2", "rank 5", "K < H"})
    met = {
        frozenset(p) for r in cases(0, space) for p in itertools.combinations(names(traits, r), 2)
    }
    gone = {"rank 2", "rank 5", "K = 1", "1 < K < H"} | (set(OPTION_FIELDS) - features)
    assert {pair for pair in pairs_that_can_meet() if not pair & gone} == met


def test_covering_cases_have_few_options_and_no_duplicates():
    plan = Pools(Space()).recipes([2 * seed for seed in range(200)])
    numbers = list(covering(rows_of([]), rows_of(plan)))
    chosen = [plan[n] for n in numbers]
    assert len(chosen) == len(set(chosen)) < 75
    assert max(map(len, map(switched_on, chosen))) <= 4
    assert list(covering(rows_of(chosen), rows_of(plan))) == []


@pytest.mark.thorough
def test_long_rows_are_cheap_and_need_free_sizes():
    long = [r for seed in range(20) for r in cases(seed) if r.S == 4096]
    assert 10 < len(long) < 100
    assert max(r.T * r.H for r in long) <= 12
    for sizes in ({"S": (64,)}, {"T": (64,)}, {"B": (2,)}):
        assert all(r.S != 4096 for r in cases(0, Space(sizes=sizes)))
    assert all(r.S != 4096 for r in cases(0, without("T != S")))


def test_problems_stay_within_size_limit():
    for recipe in cases(0) + cases(1):
        heads = math.prod(recipe.lead or ()) * recipe.H
        assert heads * recipe.T * recipe.S <= 2**16, recipe
        assert heads * (recipe.T + recipe.S) * max(recipe.D, recipe.E) <= 2**18, recipe


# --- plain arguments of problems ------------------------------------------------------------------


def sizes_of(strategy):
    return [(p.H, p.K, p.T, p.S) for p in sample_from(strategy, 150)]


def test_heads_are_those_asked_for():
    assert {s[:2] for s in sizes_of(problems(heads=6))} == {(6, 1), (6, 2), (6, 3), (6, 6)}
    assert {s[:2] for s in sizes_of(problems(heads=(6, 2)))} == {(6, 2)}
    assert any(p.headless for p in sample_from(problems(heads=1), 100))


@pytest.mark.parametrize("longest", [1, 2, 7, 40])
def test_lengths_are_at_most_max_len(longest):
    """Whatever makes them longer: round sizes, tiles, extents."""
    masks = {"mask": ("first tile", None)}
    for strategy in (problems(max_len=longest), problems(max_len=longest, force=masks)):
        sizes = sizes_of(strategy)
        assert {max(s[i] for s in sizes) for i in (2, 3)} == {longest}
        assert {s[2] for s in sizes} >= {0, 1, longest}
        assert longest < 3 or share(lambda s: s[2] == longest, sizes) < 0.4  # not cut to it
    assert min(s[2] for s in sizes_of(problems(max_len=longest, nonempty=True))) == 1


def test_recipes_of_seeds_keep_to_the_longest_too():
    pools = Pools(Space(longest=11))
    assert max(max(r.T, r.S) for r in map(pools.recipe, range(200))) == 11


def test_options_are_those_named():
    named = sample_from(problems(options=("causal", "softcap"), max_len=5, dtype="float16"), 100)
    assert {bool(p.causal) for p in named} == {True, False}
    assert {p.softcap is None for p in named} == {True, False}
    assert all(p.mask is p.bias is p.sinks is None for p in named)
    assert {p.q.dtype.name for p in named} == {"float16"}
    plain = sample_from(problems(options=(), max_len=5), 50)
    assert not any(p.causal or p.mask is not None or p.dropout_rate for p in plain)
    dropped = sample_from(problems(options="dropout_rate", max_len=5), 50)
    assert any(p.dropout_mask is not None for p in dropped)


def test_arguments_narrow_a_space_that_is_given():
    space = Space(structure=frozenset({"rank 3"}), sizes={"D": (5,)})
    found = sample_from(problems(space, heads=2, max_len=3, options="causal"), 50)
    assert {(p.q.ndim, p.H, p.D) for p in found} == {(3, 2, 5)}
    assert space.sizes == {"D": (5,)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0}, "heads is 0, must be H ≥ 1"),
        ({"heads": (6, 4)}, r"heads is \(6, 4\), must be .* where K divides H"),
        ({"max_len": 0}, "max_len is 0, must be"),
        ({"options": "causl"}, "options has 'causl', must be among mask, causal"),
        ({"dtype": "int32"}, "dtype is 'int32', must be floating"),
        ({"dtype": "fp16"}, "dtype is 'fp16', must be floating"),
    ],
)
def test_arguments_that_are_not_legal_are_errors(arguments, message):
    with pytest.raises(NpattnError, match=message):
        problems(**arguments)
