"""Places join the elements that are wrong with the problems that were asked, or say nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import npattn
from npattn.mistakes import MISTAKES
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis import elements
from npattn.testing.diagnosis.borders import Neighbours
from npattn.testing.diagnosis.elements import Asked
from npattn.testing.diagnosis.evidence import observe
from npattn.testing.diagnosis.explore import Point, narrow, sample_of, try_recipe
from npattn.testing.diagnosis.locate import locate
from npattn.testing.diagnosis.place import Sample, Where
from npattn.testing.places import Place, asking
from tests.testing.diagnosis.failures import (
    RECIPES,
    attend,
    attention_with,
    diagnose,
    fail,
    only_cause,
    trial_of,
)

LONG = RECIPES["longest"]
PLAIN = RECIPES["plain"]
OWN = {
    "last tile": replace(PLAIN, T=37, seed=24),
    "gate of queries": replace(PLAIN, gate="columns", seed=21),
    "low rows": replace(PLAIN, bias="-1e4 rows", seed=22),
    "mask of samples": replace(PLAIN, lead=(3,), S=17, mask="padding", seed=23),
    "matrix bias": replace(PLAIN, bias="matrix", seed=24),
    "causal window": replace(PLAIN, T=5, causal=True, window=(1, 0)),
}


def doubled(part, when):
    """Return a function whose o is doubled in some columns, on some problems."""

    def f(q, k, v, causal=False):
        o = attend(q, k, v, causal=causal).copy()
        o[..., part] *= 2 if when(q, k, causal) else 1
        return o

    return trial_of(f)


def neighbours(trial, **changes):
    return Neighbours(trial, replace(LONG, **changes), frozenset({"o"}))


@pytest.fixture(autouse=True)
def _own_recipes(monkeypatch):
    for name, recipe in OWN.items():
        monkeypatch.setitem(RECIPES, name, recipe)


@pytest.mark.thorough
def test_a_place_has_elements_and_problems():
    trial = doubled(slice(8, None), lambda q, k, causal: k.shape[-2] > 16)
    cause = only_cause(trial, fail(trial, ["longest"]))
    assert (cause.step, cause.where, cause.amount) == ("o", "e ≥ 8 and S > 16", "× 2")
    assert cause.passes_when == "fails only where S > 16 and E > 8"
    assert cause.pair.text == "fails with S = 17, passes with S = 16, all else equal"


@pytest.fixture(autouse=True)
def _without_the_wall(monkeypatch):
    """A busy machine does not end a search."""
    monkeypatch.setattr(asking, "SLACK", 100.0)


def test_a_place_holds_on_the_failing_problems_at_hand():
    """Alone it is S > 16; another problem fails at S = 11."""
    trial = doubled(slice(None), lambda q, k, causal: k.shape[-2] > 16)
    other = doubled(slice(None), lambda q, k, causal: True)
    asked = Asked.of(neighbours(trial), [], 60.0)
    assert asked.held
    assert asked.condition == "fails only where S > 16"
    assert asked.fails_on(RECIPES["longest"])
    assert asked.fails_on(RECIPES["plain"]) is False
    points = [try_recipe(other, RECIPES["wide"])]
    assert Asked.of(neighbours(trial), points, 60.0).fails_on(RECIPES["wide"]) is not False


def test_a_problem_with_another_window_refutes_a_place():
    """From window (2, None) the border is a number of keys; with (4, None) it is another."""

    def f(q, k, v, window=None):
        o = npattn.attention(q, k, v, window=window).astype(q.dtype)
        hidden = window is not None and k.shape[-2] - q.shape[-2] - (window[0] or 0) > 5
        return 2 * o if hidden else o

    near = Neighbours(trial_of(f), replace(LONG, S=20, window=(2, None)), frozenset({"o"}))
    assert Asked.of(near, [], 60.0).held
    points = [try_recipe(near.trial, replace(LONG, S=12, window=(4, None)))]
    assert points[0].fault is None
    assert not Asked.of(near, points, 60.0).held


def test_nothing_is_said_of_options_that_were_not_asked():
    trial = doubled(slice(None), lambda q, k, causal: True)
    asked = Asked.of(neighbours(trial), [], 60.0)
    assert asked.fails_on(RECIPES["mask"]) is None
    assert asked.fails_on(RECIPES["causal"])
    assert asked.fails_on(None) is None
    assert asked.condition == ""


def test_numbers_that_fail_alone_are_contents():
    marked = float(LONG.problem().q.flat[0])
    trial = doubled(slice(None), lambda q, k, causal: float(q.flat[0]) == marked)
    near = neighbours(trial)
    assert near.is_of_numbers
    place = near.place()
    assert (place.clauses, place.held) == ((), False)
    pair = near.pair(place)
    assert pair.text == "fails with seed = 12, passes with seed = 16, all else equal"
    assert "seed=16" in pair.passing


def test_problems_that_fail_by_chance_are_asked_with_other_numbers():
    """Every other draw shows the fault, wherever S > 16."""
    trial = doubled(slice(None), lambda q, k, causal: k.shape[-2] > 16 and q.flat[0] > 0)
    some = (neighbours(trial, seed=seed) for seed in range(8))
    near = next(n for n in some if n.is_chancy and not n.is_of_numbers)
    assert near.fails({**near.sample(near.base), "S": 16}) is False
    assert near.fails({**near.sample(near.base), "S": 40}) is True


def test_a_fault_of_few_rows_is_asked_with_many():
    """One row in four shows it: of two rows many draws have none, and S = 17 may pass."""

    def f(q, k, v):
        o = attend(q, k, v).copy()
        rows = (q[..., :1] > 0.7) & (k.shape[-2] > 16)
        return np.where(rows, 2 * o, o)

    recipes = (replace(LONG, T=2, H=1, K=1, seed=seed) for seed in range(1, 40))
    points = (try_recipe(trial_of(f), recipe) for recipe in recipes)
    point = next(p for p in points if p.fault is not None)
    outcome = SimpleNamespace(
        rule="agreement-o", sampled=point.recipe, kind="value", recipe="", view="contiguous"
    )
    near = elements.neighbours_of_fault(
        replace(point.evidence, outcome=outcome), [point], point.fault, "", {"o"}
    )
    assert (near.base.T, near.is_chancy) == (64, False)
    asked = Asked.of(near, [point], 60.0)
    assert asked.condition == "fails only where S > 16"


def test_a_window_that_hides_the_keys_of_a_fault_is_no_condition_of_it(monkeypatch):
    """The first of more than 32 keys have other values, which a window of 24 does not see."""

    def other_values(up, *arrays, **options):
        c = up(*arrays, **options)
        S = c.v.shape[-2]
        return c._replace(v=np.where(np.arange(S)[:, None] < S - 32, 2, 1) * c.v)

    monkeypatch.setitem(RECIPES, "far", replace(LONG, T=2, S=33))
    trial = trial_of(attention_with(inputs=other_values).forward, features=("window",))
    cause = only_cause(trial, fail(trial, ["far"]))
    assert "window" not in cause.text
    assert cause.pair.text == "fails with S = 33, passes with S = 32, all else equal"


def test_a_place_that_one_failing_problem_refutes_is_not_said():
    """t ≥ 1 holds in many short problems; in a long one t = 7 is right."""

    def point(T):
        recipe = replace(LONG, T=T)
        return try_recipe(trial_of(lambda q, k, v: attend(q, k, v)), recipe)

    def point_and_sample(T):
        p = point(T)
        wrong = np.broadcast_to((np.arange(T) % 7 > 0)[:, None], p.evidence.exact["o"].shape)
        sizes = {x: p.evidence.problem.lead[0] if x == "B" else 2 for x in "BHKG"}
        sizes |= {x: getattr(p.recipe, x) for x in "TSDE"}
        empty = np.zeros(wrong.shape[:3], bool)
        return p, Sample(sizes, frozenset(), "bhte", wrong, wrong | True, empty)

    short = [point_and_sample(T) for T in range(2, 8)]
    fault = SimpleNamespace(axes="bhte", step="o", form="")
    assert elements._learn(short, fault, False).text == "t ≥ 1"
    assert elements._learn([*short * 8, point_and_sample(37)], fault, False) is None


def test_what_two_causes_make_wrong_together_is_explained():
    wrong = attention_with(
        dk=lambda up, *args: 2 * up(*args),
        gradients=lambda up, *args: tuple(
            x * (3 if n == 2 else 1) for n, x in enumerate(up(*args))
        ),
    )
    trial = trial_of(wrong.forward, wrong.backward)
    found = diagnose(trial, fail(trial, ["plain", "wide", "groups"]))
    assert {(c.step, c.amount) for c in found} == {("dk", "× 2"), ("dv", "× 3")}
    assert sum(len(c.rules) for c in found) == 3


@pytest.mark.parametrize(("count", "said"), [(2, "t ≥ 3"), (3, "")])
def test_more_than_two_conditions_on_elements_are_no_place(count, said, monkeypatch):
    atoms = tuple(SimpleNamespace(text=str(n)) for n in range(count))
    monkeypatch.setattr(elements, "_learn", lambda *_: Where("t ≥ 3", 0.0, atoms))
    monkeypatch.setattr(elements, "_is_of_one_length", lambda *_: False)
    fault = SimpleNamespace(axes="", step="s", facts={})
    assert elements.say_where([], fault, None, "") == said


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ((("G = 5",), ("K > 1", "G = 7")), ""),
        ((("G = 5",),), "fails only where G = 5"),
        ((("G = 5",), ("T > 64",)), "fails only where G = 5 or T > 64"),
        ((("K > 1", "D > 2"), ("T > 64",)), "fails only where K > 1 and D > 2 or T > 64"),
        ((("K > 1", "D > 2"), ("T > 64", "S > 3")), ""),
    ],
)
def test_a_list_of_numbers_is_no_condition(texts, said):
    clauses = [[SimpleNamespace(text=text) for text in clause] for clause in texts]
    place = SimpleNamespace(clauses=clauses, text=" or ".join(" and ".join(x) for x in texts))
    assert Asked(None, place, True).condition == said
    assert Asked(None, place, False).condition == ""


def test_a_fault_of_calls_that_return_the_weights_too_says_so():
    mistake = MISTAKES["dropout-ignored-with-weights"]
    trial = trial_of(mistake.forward)
    cause = only_cause(trial, fail(trial, ["dropout"]))
    assert (cause.step, cause.where) == ("p", "dropout and weights")


def first_sample(up, c):
    return up(c._replace(bias=c.bias[:1] + 0 * c.bias))


def first_head(up, c):
    return up(c._replace(**{x: getattr(c, x)[..., :1, :, :] + 0 * getattr(c, x) for x in "qkv"}))


@pytest.mark.parametrize(
    ("steps", "name", "where", "amount"),
    [
        ({"bias": first_sample}, "bias", "b ≠ 0 and bias", "sample b has the bias of sample 0"),
        ({"results": first_head}, "groups", "h ≥ 1", "values of head 0"),
    ],
    ids=["a bias of another sample", "all of another head"],
)
def test_what_the_elements_say_is_no_condition(steps, name, where, amount):
    wrong = attention_with(**steps)
    trial = trial_of(wrong.forward)
    cause = only_cause(trial, fail(trial, [name]))
    assert (cause.where, cause.amount) == (where, amount)


def test_a_condition_that_holds_beside_its_border_is_said():
    """At T = 16 no row is beyond the last tile; at T = 1 the one that there is, is right."""

    def f(q, k, v):
        o, T = attend(q, k, v).copy(), q.shape[-2]
        o[..., T // 16 * 16 if T > 16 else T :, :] = 0
        return o

    trial = trial_of(f)
    cause = only_cause(trial, fail(trial, ["last tile"]))
    assert cause.where == "t ≥ 16 · (T // 16) and T > 16"


@pytest.mark.parametrize(("lengths", "where"), [((17, 17), ""), ((17, 23), "s < 4")])
def test_a_number_of_one_length_may_count_from_either_end(lengths, where):
    wrong = attention_with(visible=lambda up, c: up(c) & (np.arange(c.k.shape[-2]) >= 4))
    trial = trial_of(wrong.forward)
    recipes = [replace(LONG, S=n, seed=i) for i, n in enumerate(lengths)]
    points = [try_recipe(trial, recipe) for recipe in recipes]
    assert elements.say_where(points, points[0].fault, None, "visible keys have weight 0") == where


@pytest.mark.parametrize(
    ("x", "others", "is_of_one"), [("h", 1, True), ("h", 3, False), ("t", 1, False), ("t", 0, True)]
)
def test_few_numbers_of_heads_are_one_length(x, others, is_of_one):
    """Most problems that are tried have the heads of the failing one; lengths differ in many."""
    space = SimpleNamespace(sizes={}, few_shapes=False)
    point = SimpleNamespace(evidence=SimpleNamespace(trial=SimpleNamespace(space=space)))
    samples = [SimpleNamespace(sizes={x.upper(): 2 + (n < others)}) for n in range(23)]
    failing = [(point, sample) for sample in samples]
    assert elements._is_of_one_length(Where(f"{x} < 2", 0.0, ()), failing) is is_of_one


def test_values_left_out_have_their_keys_and_the_condition_of_their_problems():
    """Without lse, a row of one key may see none, or lack its value: it is of the same cause."""

    def without_tail(up, *arrays, **options):
        c = up(*arrays, **options)
        S = c.v.shape[-2]
        return c._replace(v=np.where(np.arange(S)[:, None] < S - bool(S % 16), c.v, 0))

    f = attention_with(inputs=without_tail)
    trial = trial_of(lambda q, k, v: f.forward(q, k, v))
    outcomes = fail(trial, ["plain", "wide", "one key"])
    outcomes[-1] = replace(outcomes[-1], recipe="one key, then changed")
    cause = only_cause(trial, outcomes)
    assert (cause.step, cause.where) == ("o", "s = S − 1 and S % 16 ≠ 0")
    assert cause.amount == "the values of visible keys are left out"
    assert cause.reading is not None


def test_another_gradient_that_is_wrong_is_of_no_condition():
    """dk is wrong on every problem, dv on problems of more than 16 keys."""

    def backward(dout, q, k, v, *, out, lse):
        grads = npattn.backward(npattn.forward(q, k, v), dout)
        many = k.shape[-2] > 16
        return tuple(
            x.astype(q.dtype) for x in (grads.q, 2 * grads.k, grads.v * (2 if many else 1))
        )

    trial = trial_of(attend, backward)
    found = {c.step: c for c in diagnose(trial, fail(trial, ["longest", "plain"]))}
    assert (found["dk"].where, found["dv"].where) == ("everywhere", "S > 16")


def test_masks_that_samples_share_do_not_refute_whose_mask_it_is():
    """Sample b has the mask of sample 2b: a mask of all samples, or of one, tells nothing."""

    def f(q, k, v, mask=None):
        if mask is not None:
            sample = 2 * np.arange(len(q)) % len(q)
            mask = np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2]))[sample]
        return npattn.attention(q, k, v, mask=mask).astype(q.dtype)

    trial = trial_of(f, features=frozenset({"mask"}))
    cause = only_cause(trial, fail(trial, ["mask"]))
    assert (cause.step, cause.where) == ("visible", "b ≠ 2 · b % B and mask")
    assert cause.amount == "sample b has the mask of sample 2b % B"
    assert cause.passes_when == "fails only where mask"


def test_a_row_that_sees_no_key_takes_hidden_ones_by_a_wrong_mask(monkeypatch):
    monkeypatch.setattr(Asked, "fails_on", lambda *_: None)  # no place is known

    def mask_of_row_1(up, *arrays, **options):
        c = up(*arrays, **options)
        rows = np.maximum(np.arange(c.q.shape[-2]), 1)
        return c if c.mask is None else c._replace(mask=c.mask[..., rows, :])

    f = attention_with(inputs=mask_of_row_1)
    trial = trial_of(lambda q, k, v, mask=None: f.forward(q, k, v, mask=mask))
    cause = only_cause(trial, fail(trial, ["mask", "empty rows"]))
    assert cause.step == "visible"
    assert "hidden keys take weight" in cause.amount


def test_a_window_that_is_taken_with_causal_alone_has_its_place(monkeypatch):
    """A ring that has the last keys already; row t sees its first t + 1 slots."""

    def ring(q, k, v, causal=False, window=None):
        if window is None:
            return attend(q, k, v, causal=causal)
        left, right = window
        if not causal or left is None or right not in (None, 0):
            raise TypeError("a window ends at the own key, and has a size")
        T, S = q.shape[-2], k.shape[-2]
        t, s = np.arange(T)[:, None], np.arange(S)
        last = s + left + 1 - S
        sees = (s <= t + S - T) & (s >= t + S - T - left)
        if T == S > left + 1:
            sees[:-1] = (last >= 0) & (last <= t[:-1])
        return npattn.attention(q, k, v, mask=sees).astype(q.dtype)

    for n in (5, 7):
        own = replace(LONG, T=n, S=n, causal=True, window=(1, 0))
        monkeypatch.setitem(RECIPES, str(n), own)
    trial = trial_of(ring, features=("causal", "window"))
    cause = only_cause(trial, fail(trial, ["5", "7"]))
    assert cause.step == "visible"
    assert cause.amount == "hidden keys take weight, and visible keys have none"
    assert cause.where == "t < T − 1 and window and T = S"


def test_values_of_an_option_that_pass_are_told_apart():
    """dgate is that of the last query where queries share a gate."""
    mistake = MISTAKES["dgate-of-last-query"]
    trial = trial_of(mistake.forward, mistake.backward)
    cause = only_cause(trial, fail(trial, ["gate of queries"]))
    assert (cause.step, cause.where) == ("dgate", "gate and T > 1")
    assert cause.passes_when == "fails only where gate shared by queries and T > 1"


def test_an_axis_of_length_1_is_told_from_one_that_lacks():
    """The gradient of a bias (B, 1, T, S) is the first head's, of a bias (T, S) the sum of all."""

    def first_head(up, ds, shape):
        return up(ds[..., :1, :, :] if len(shape) > 2 and shape[-3] == 1 else ds, shape)

    wrong = attention_with(reduce_bias=first_head)
    trial = trial_of(wrong.forward, wrong.backward)
    cause = only_cause(trial, fail(trial, ["bias by sample"]))
    assert (cause.step, cause.where) == ("dbias", "bias and H > 1")
    assert cause.passes_when == "fails only where bias.shape[-3] = 1 and H > 1"


def test_a_place_speaks_of_the_array_that_a_rule_has_made():
    """A bias (T, S) may be asked as (1, 1, T, S)."""
    recipe = replace(RECIPES["bias"], bias="matrix")
    trial = trial_of(attention_with().forward)
    near = replace(neighbours(trial), traits={"bias": "bias.shape[-3] = 1"})
    problem = recipe.problem()
    assert near.sample(recipe)["bias"] is False
    changed = problem.replace(bias=problem.bias_array[None, None])
    assert near.sample(recipe, changed)["bias"] is True


def test_a_value_of_an_option_may_be_what_is_not_shared():
    """dbias of a sample is the sum over all; a rule gives each sample a bias of its own."""
    mistake = MISTAKES["dbias-of-all-samples"]
    trial = trial_of(mistake.forward, mistake.backward)
    outcomes = fail(trial, ["bias", "matrix bias"])
    problem = outcomes[1].problem
    problem = problem.replace(bias=np.stack(2 * [problem.bias_array])[:, None])
    outcomes[1] = replace(outcomes[1], problem=problem, recipe="bias, then changed")
    cause = only_cause(trial, outcomes)
    assert (cause.step, cause.where) == ("dbias", "bias and B > 1")
    assert cause.passes_when == "fails only where bias not shared by samples and B > 1"


def test_a_gradient_of_what_rows_share_has_its_place():
    mistake = MISTAKES["dbias-transposed"]
    trial = trial_of(mistake.forward, mistake.backward)
    cause = only_cause(trial, fail(trial, ["square bias"]))
    assert (cause.step, cause.where) == ("dbias", "bias and T = S")


def test_elements_that_no_longer_problem_has_are_no_place():
    """Aligned top-left, causal hides too many keys where T < S, and too few where T > S."""
    mistake = MISTAKES["causal-backward-top-left"]
    trial = trial_of(mistake.forward, mistake.backward)
    trial.skips_empty_rows = True
    cause = only_cause(trial, fail(trial, ["causal"]))
    assert (cause.step, cause.where) == ("visible", "backward: causal and T ≠ S")


def test_a_size_that_a_window_exceeds_is_no_border():
    """With a window of 7 keys the fault ends at S = 8, with another elsewhere."""

    def f(q, k, v, window=None):
        o = npattn.attention(q, k, v, window=window).astype(q.dtype)
        return 2 * o if window is not None and (window[0] or 0) >= k.shape[-2] else o

    trial = trial_of(f, features=("window",))
    near = Neighbours(trial, replace(LONG, S=5, window=(7, 0)), frozenset({"o"}))
    points = [try_recipe(trial, replace(LONG, S=5, window=(1, 0)))]
    asked = Asked.of(near, points, 60.0)
    assert asked.condition == "fails only where window[0] ≥ S"
    assert asked.fails_on(replace(LONG, S=29, window=(29, 0)))
    assert asked.fails_on(replace(LONG, S=29, window=(28, 0))) is False


def test_a_scale_of_1_does_not_refute_a_factor_of_the_scale():
    mistake = MISTAKES["dq-unscaled"]
    trial = trial_of(mistake.forward, mistake.backward)
    cause = only_cause(trial, fail(trial, ["plain"]))
    assert (cause.step, cause.where, cause.amount) == ("dq", "everywhere", "× 1/scale")


@pytest.mark.parametrize(
    ("name", "recipe", "where"),
    [
        ("no-keys-sink", "no keys", "sinks and S = 0"),  # and of T = 0 too
        ("empty-row-lse-without-sink", "no keys", "rows that see no key and sinks"),
        ("maximum-of-padding", "low rows", "contents and S % 16 ≠ 0"),
    ],
    ids=["no query", "no row without keys", "contents of a bias, and sinks with all weight"],
)
def test_problems_that_have_nothing_to_show_are_no_condition(name, recipe, where):
    trial = trial_of(MISTAKES[name].forward)
    assert only_cause(trial, fail(trial, [recipe])).where == where


def test_a_mask_of_samples_that_is_tiled_over_heads_names_its_sample():
    trial = trial_of(MISTAKES["mask-tiled-over-heads"].forward)
    cause = only_cause(trial, fail(trial, ["mask of samples"]))
    assert cause.amount == "sample b has the mask of sample (H · b + h) % B"
    assert cause.where == "b ≠ (H · b + h) % B and mask"


@pytest.mark.parametrize(
    ("is_chancy", "attacked", "held"), [(True, 40, False), (False, 40, True), (False, 7, False)]
)
def test_what_may_be_chance_is_no_condition(is_chancy, attacked, held, monkeypatch):
    near = neighbours(doubled(slice(None), lambda *_: True))
    near.is_chancy = is_chancy
    atom = SimpleNamespace(text="S ≠ 9", holds=lambda problem: problem["S"] != 9)
    place = Place(((atom,),), True, (), attacked, 80)
    monkeypatch.setattr(Neighbours, "place", lambda *_, **__: place)
    assert Asked.of(near, [], 60.0).held is held


@pytest.mark.parametrize(("failing", "text"), [(0, ""), (1, "everywhere")])
def test_numbers_decide_if_other_problems_pass(failing, text):
    near = neighbours(doubled(slice(None), lambda *_: True))
    near._answers = [False, False, False]
    known = [(replace(LONG, seed=LONG.seed + 4 * n), n < 3 * failing) for n in range(1, 7)]
    place = near.place(120, 60.0, known)
    assert place.text == text


def test_the_chance_of_right_elements_is_bounded_from_above():
    right, every = np.array([5, 1, 0, 2]), np.array([36, 7, 11, 300])
    p = right.sum() / every.sum()
    bound = elements._bound_chance(right, every)
    for k, n, own in zip(right.tolist(), every.tolist(), bound, strict=True):
        exact = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
        assert exact <= own * (1 + 1e-9)
    assert bound[0] < 0.01
    assert (bound[2:] == 1).all()  # no more than all together have


@pytest.mark.parametrize(
    ("shape", "lead", "expected"),
    [((2, 3, 1, 5), 2, False), ((2, 1, 1, 5), 2, True), ((3, 1, 5), 1, False), (None, 2, False)],
    ids=["its own", "shared by heads", "one sample", "no mask"],
)
def test_heads_that_share_a_mask_tell_nothing_of_one_of_another_head(shape, lead, expected):
    recipe = Recipe(lead=(lead,), H=3, K=3, T=1, S=5, D=7, E=11, seed=13)
    rng = np.random.default_rng(17)
    mask = None if shape is None else rng.random(shape) < 0.5
    failing = replace(recipe, lead=(2,)).problem().replace(mask=rng.random((2, 3, 1, 5)) < 0.5)
    own = recipe.problem().replace(mask=mask)
    assert elements._shares_masks(own, failing) is expected
    assert not elements._shares_masks(own, own)


def test_keys_that_another_option_hides_tell_nothing():
    """The infinities of a bias are lost; causal hides one of their keys too."""
    trial = trial_of(attention_with(bias=lambda up, c: np.maximum(c.bias, 0)).forward)
    recipe = replace(LONG, T=3, S=5, causal=True, bias="-inf padding")
    problem = replace(recipe, bias=None).problem()
    bias = np.where(np.arange(5)[None] < 3, 0, -np.inf).astype("float32")
    evidence = observe(trial, problem.replace(bias=bias), trial.cotangents(recipe, problem))
    point = Point(recipe, evidence, locate(evidence))
    assert point.fault.facts["kinds"] == ["extra"]
    known = narrow(sample_of(point, point.fault), point, point.fault, {"bias"}).known
    hidden = (np.arange(5) > 2) & (np.arange(5) <= np.arange(3)[:, None] + 2)
    assert (known == hidden).all()


def test_a_bias_of_zeros_tells_nothing():
    trial = trial_of(lambda q, k, v, bias=None: 2 * attend(q, k, v), features=("bias",))
    (outcome,) = fail(trial, ["bias"])
    point = try_recipe(trial, RECIPES["bias"])
    evidence = replace(point.evidence, outcome=outcome)
    near = elements.neighbours_of_fault(evidence, [point], point.fault, "", {"o"})
    right = trial_of(lambda q, k, v, bias: npattn.attention(q, k, v, bias=bias))
    problem = point.evidence.problem
    for factor in (1, 0):
        other = problem.replace(bias=factor * problem.bias_array)
        assert near.tells(observe(right, other, point.evidence.cotangents)) is bool(factor)


def test_a_problem_without_queries_tells_nothing_of_others():
    """Sums over no row are 0, and right, whatever is wrong with the rows."""
    wrong = attention_with(gradients=lambda up, *args: [2 * x for x in up(*args)])
    trial = trial_of(wrong.forward, wrong.backward)
    near = Neighbours(trial, PLAIN, frozenset({"dv"}))
    sizes = near.sample(PLAIN)
    assert near.fails(sizes) is True
    assert near.fails(sizes | {"T": 0}) is None
    assert (
        Neighbours(trial, replace(PLAIN, T=0), frozenset({"dv"})).fails(sizes | {"T": 0}) is False
    )


@pytest.mark.parametrize(("failing", "tells"), [("plain", False), ("one key", True)])
def test_rows_of_one_key_tell_nothing_unless_they_fail(failing, tells):
    trial = trial_of(lambda q, k, v: 2 * attend(q, k, v))
    (outcome,) = fail(trial, [failing])
    point = try_recipe(trial, RECIPES[failing])
    evidence = replace(point.evidence, outcome=outcome)
    fault = replace(point.fault, step="p")
    near = elements.neighbours_of_fault(evidence, [point], fault, "", {"o"})
    one_key = replace(LONG, S=1).problem()
    assert near.tells(observe(trial_of(attend), one_key, point.evidence.cotangents)) is tells


def test_a_rule_is_not_asked_about_problems_that_take_too_long():
    asked = []
    near = Neighbours(trial_of(attend), PLAIN, ask=lambda recipe: asked.append(recipe) or True)
    sizes = near.sample(PLAIN)
    assert near.fails(sizes) is True
    assert near.fails(sizes | {"T": 509, "S": 503, "D": 499}) is None
    assert len(asked) == 1
