"""A kernel that is wrong for one size that models have fails; sizes of its own are respected."""

import numpy as np
import pytest

import npattn
from npattn.mistakes import Attention
from npattn.testing import check
from npattn.testing.cases.model_sizes import MODEL_HEADS, MORE_SHAPES, NONE, SHAPES, model_recipes
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets.numpy import flash, flash_backward
from npattn.testing.trial import Violation
from tests.testing.rules.relations import trial_of

MODEL_SIZES = PROPERTIES["model-sizes"]
EVERY = SHAPES + MORE_SHAPES
ALL = 2 * len(EVERY)
"""Examples that ask every shape."""


class WrongFor(Attention):
    """o is off by 2⁻¹⁰ for the inputs that a condition names."""

    def __init__(self, condition):
        self.condition = condition

    def results(self, c):
        o, lse, p = super().results(c)
        return o * (1 + 2.0**-10 * bool(self.condition(c))), lse, p


class LateKeysLost(Attention):
    """Keys beyond the first 4096 are not read."""

    def visible(self, c):
        return super().visible(c) & (np.arange(c.k.shape[-2]) < 4096)


class DkWrongAt(Attention):
    """dk lacks its last column at D = 80."""

    def dk(self, dx, c, seen):
        dk = super().dk(dx, c, seen)
        if c.k.shape[-1] == 80:
            dk[..., -1] = 0
        return dk


def group(c):
    return c.q.shape[-3] // c.k.shape[-3] if c.q.ndim > 2 else 1


WRONG = {
    "D = 96": (WrongFor(lambda c: c.q.shape[-1] == 96), {"D": 96}),
    "E = 512": (WrongFor(lambda c: c.v.shape[-1] == 512), {"E": 512}),
    "G = 8": (WrongFor(lambda c: group(c) == 8), {"H": 16}),
    "G = 16": (WrongFor(lambda c: group(c) == 16), {"H": 32, "K": 2}),
    "H = 32": (WrongFor(lambda c: c.q.ndim > 2 and c.q.shape[-3] == 32), {"H": 32}),
    "B = 9": (WrongFor(lambda c: c.q.ndim > 3 and c.q.shape[0] == 9), {"lead": (9,)}),
    "S > 4096": (LateKeysLost(), {"S": 8192}),
    "dk at D = 80": (DkWrongAt(), {"D": 80}),
}


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("name", WRONG)
def test_kernel_wrong_for_one_size_fails(name, seed):
    attention, sizes = WRONG[name]
    trial = trial_of(attention)
    recipes = MODEL_SIZES.recipes(trial, seed, ALL)
    wrong = [r for r in recipes if sizes.items() <= vars(r).items()]
    right = [r for r in recipes if r not in wrong and r.T * r.S < 1000]
    assert wrong
    for recipe in wrong:
        with pytest.raises(Violation):
            MODEL_SIZES.check(trial, recipe)
    MODEL_SIZES.check(trial, right[0])


@pytest.mark.thorough
def test_flash_passes_every_shape():
    report = check(flash, backward=flash_backward, only=["model-sizes"], seed=1)
    (outcome,) = report.outcomes
    assert (outcome.status, outcome.examples) == ("passed", len(EVERY))
    assert 0 < outcome.worst < 1


@pytest.mark.parametrize("seed", range(3))
def test_every_shape_is_there_with_options_of_the_seed(seed):
    recipes = model_recipes(Space(), seed, ALL)
    for shape in EVERY:
        letters = [
            {"B": (r.lead or (1,))[0], "left": (r.window or (None,))[0], **vars(r)} for r in recipes
        ]
        assert any(shape.items() <= sizes.items() for sizes in letters), shape
    assert recipes == model_recipes(Space(), seed, ALL)
    assert [r.seed for r in recipes] != [r.seed for r in model_recipes(Space(), seed + 1, ALL)]
    assert max(len(r.lead) * r.H * r.T * r.S * r.D for r in recipes) < 2**25


@pytest.mark.parametrize("missing", ["rank 5", "K < H"])
def test_sizes_share_problems_where_each_is_compiled(missing):
    """None is left out, but windows: fewer problems have them all."""
    space = Space(structure=frozenset(STRUCTURE) - {missing}, features=NONE, few_shapes=True)
    recipes = model_recipes(space, 3, ALL)
    assert len(recipes) == 17
    for shape in SHAPES:
        if "left" not in shape and (missing != "K < H" or shape.get("H") == shape.get("K")):
            letters = [{"B": (r.lead or (1,))[0], **vars(r)} for r in recipes]
            assert any(shape.items() <= sizes.items() for sizes in letters), shape


def test_sizes_that_are_too_large_together_stay_apart():
    space = Space(sizes={"S": (600,)}, features=NONE, few_shapes=True)
    recipes = model_recipes(space, 3, ALL)
    assert {24, 48, 96, 112, 256, 576} <= {r.D for r in recipes}
    assert {40, 24, 12, 28} <= {r.H for r in recipes}
    assert max(r.H * (r.T + r.S) * (r.D + r.E) for r in recipes if r.H > 4) <= 2**21


def test_one_key_has_one_shape_where_each_is_compiled():
    rule, trial = PROPERTIES["one-key"], trial_of(few_shapes=True, features=NONE)
    pools = Pools(trial.space, **rule.draw(trial))
    recipes = [r for r in map(pools.recipe, range(40)) if 0 not in r.whole]
    assert {r.S for r in recipes} == {1}
    assert len({(r.lead, r.H, r.K, r.T, r.D, r.E) for r in recipes}) == 1


def test_number_of_shapes_follows_examples():
    for examples, count in ((1, 1), (20, 10), (50, 25), (400, len(EVERY))):
        assert len(model_recipes(Space(), 0, examples)) == count


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"D": (64, 96), "E": (96,), "T": (16, 32)}, 39),  # D, T, B, and every pair of heads twice
        ({"H": (8,), "K": (4,)}, 33),
        ({"H": (32,)}, 38),  # not two lengths, for they have too many scores,
        ({"B": (1,), "S": (2100,), "D": (576,), "E": (512,)}, 2),  # nor heads, for too many numbers
    ],
)
def test_restricted_sizes_are_kept(sizes, count):
    recipes = model_recipes(Space(sizes=sizes), 0, ALL)
    assert len(recipes) == count
    for recipe in recipes:
        own = {"B": recipe.lead[0], **vars(recipe)}
        assert all(own[letter] in legal for letter, legal in sizes.items()), recipe


def test_sizes_of_0_are_left_out():
    assert model_recipes(Space(sizes={"T": (0,)}), 0, ALL) == []
    assert {r.T for r in model_recipes(Space(sizes={"T": (0, 4)}), 0, ALL)} == {4}


@pytest.mark.parametrize("name", ["T != S", "T > S", "E != D", "K < H", "rank 4", "broadcast"])
def test_refused_structure_is_not_asked(name):
    recipes = model_recipes(Space(structure=frozenset(STRUCTURE) - {name}), 0, ALL)
    wrong = {
        "T != S": [r for r in recipes if r.T != r.S],
        "T > S": [r for r in recipes if r.T > r.S],
        "E != D": [r for r in recipes if r.E != r.D],
        "K < H": [r for r in recipes if r.K != r.H],
        "rank 4": [r for r in recipes if r.lead is not None and len(r.lead) == 1],
        "broadcast": [r for r in recipes if r.broadcast],
    }
    assert recipes
    assert wrong[name] == []


def test_rank_2_alone_has_one_head():
    recipes = model_recipes(Space(structure=frozenset({"rank 2", "T != S", "T > S"})), 0, ALL)
    assert {(r.lead, r.H, r.K) for r in recipes} == {(None, 1, 1)}
    assert {r.D for r in recipes} >= {24, 96, 256}


def test_options_that_the_space_lacks_are_not_drawn():
    recipes = model_recipes(Space(features=frozenset({"causal"})), 0, ALL)
    assert {r.causal for r in recipes} == {True, False}
    assert all(r.mask is r.bias is r.window is r.scale is None for r in recipes)


def test_skipped_recipes_are_drawn_again():
    def masked(recipe):
        return recipe.mask is not None

    skipped = model_recipes(Space(), 0, ALL, masked)
    assert len(skipped) == len(EVERY)
    assert not any(masked(r) for r in skipped)


@pytest.mark.thorough
@pytest.mark.parametrize(("factor", "status"), [(1.0, "passed"), (1.01, "failed")])
def test_largest_scores_are_bounded_at_every_shape(factor, status):
    """They have no bound by row norms."""

    def f(q, k, v, *, return_max_score=False):
        fwd = npattn.forward(q, k, v, engine="dense")
        out = fwd.out.astype(q.dtype)
        return (out, (factor * fwd.max_score).astype("float32")) if return_max_score else out

    report = check(f, only=["model-sizes"], examples=20, dtypes=("float32",), shrink=False)
    (outcome,) = (o for o in report.outcomes if o.rule == "model-sizes")
    assert outcome.status == status, str(report)
    assert not outcome.failed or {c.name for c in outcome.comparisons if not c.passed} == {
        "max_score"
    }


def test_kernel_that_is_always_causal_has_long_problems():
    """Long shapes leave causal and windows out, but not where they are always on."""
    always = Space(
        features=frozenset({"causal"}),
        always={"causal": True},
        refused=frozenset({frozenset({"no causal"})}),
        few_shapes=True,
    )
    recipes = model_recipes(always, 3, ALL)
    assert all(r.causal for r in recipes)
    assert {(20, 2100), (1, 8192), (1025, 1025)} <= {(r.T, r.S) for r in recipes}


@pytest.mark.parametrize("seed", range(5))
def test_one_query_has_windows_of_many_keys(seed):
    windows = [r for r in model_recipes(Space(), seed, ALL) if r.T == 1 and r.S > 250 and r.window]
    assert {r.window[0] for r in windows} >= {7, 64, 128}


def test_windows_are_those_that_are_accepted():
    refused = frozenset({frozenset({"window", "no causal"}), frozenset({"window (n, None)"})})
    space = Space(features=frozenset({"window", "causal"}), refused=refused)
    recipes = [r for r in model_recipes(space, 2, ALL) if r.T == 1 and r.S > 250 and r.window]
    assert {r.window[0] for r in recipes} >= {7, 64, 128}
    assert {r.causal for r in recipes} == {True}
    assert not any(r.window[1] is None for r in recipes)


def tile_of_heads(bug):
    def f(q, k, v, mask=None):
        H, K = q.shape[-3], k.shape[-3]
        group = H // K
        tile = min(group, 4) if bug else 1
        own = np.arange(H) // tile * tile // group
        return flash(q, k[..., own, :, :], v[..., own, :, :], mask)

    return f


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
def test_tile_that_crosses_a_group_fails(seed):
    options = {"examples": 20, "seed": seed, "shrink": False, "diagnosis": False}
    only = ["agreement-o", "model-sizes"]
    sizes = {"B": (2,)}
    assert not check(tile_of_heads(bug=True), only=only, sizes=sizes, **options).passed
    assert check(tile_of_heads(bug=False), only=only, sizes=sizes, **options).passed


def test_heads_of_models_are_all_asked():
    recipes = model_recipes(Space(), 0, ALL)
    for T in (1, 5):
        assert {(r.H, r.K) for r in recipes if r.T == T} >= {*MODEL_HEADS.values()}
