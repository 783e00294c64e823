"""Each rule of symmetry holds for what is right however it rounds, and fails for what breaks it."""

import contextlib
import io
import itertools
import math

import numpy as np
import pytest

from npattn.api import backward, evaluate
from npattn.conventions import PROFILES, Conventions
from npattn.mistakes import Attention
from npattn.problem import Problem
from npattn.testing import Implementation, check
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import STRUCTURE, Pools, Space
from npattn.testing.report.reproducer import PLACEHOLDER, script
from npattn.testing.rules import PROPERTIES
from npattn.testing.rules import symmetry as rules
from npattn.testing.targets.numpy import flash, flash_backward
from npattn.testing.trial import GRADIENTS, Judged, Trial, Violation
from npattn.zoo.mutants import MUTANTS

RULES = [name for name, p in PROPERTIES.items() if p.check.__module__ == rules.__name__]


class Oracle:
    """npattn itself under conventions, as an implementation and its gradient."""

    def __init__(self, conventions):
        self.conventions = conventions

    def asked(self, q, k, v, **options):
        problem = Problem(q, k, v, alignment=self.conventions.causal, **options)
        return evaluate(problem, self.conventions)

    def forward(
        self, q, k, v, mask=None, *, causal=False, window=None, bias=None, scale=None,
        softcap=None, score_mod=None, sinks=None, dropout_mask=None, dropout_rate=0.0,
        return_lse=False, return_weights=False,
    ):  # fmt: skip
        fwd = self.asked(
            q, k, v, mask=mask, causal=causal, window=window, bias=bias, scale=scale,
            softcap=softcap, score_mod=score_mod, sinks=sinks, dropout_mask=dropout_mask,
            dropout_rate=dropout_rate,
        )  # fmt: skip
        found = [fwd.out.astype(q.dtype)]
        found += [fwd.lse] if return_lse else []
        found += [fwd.weights] if return_weights else []
        return found[0] if len(found) == 1 else tuple(found)

    def backward(self, dout, q, k, v, *, out=None, lse=None, dlse=None, **options):
        options.pop("dweights", None)
        grads = vars(backward(self.asked(q, k, v, **options), dout, dlse))
        wide = {"bias", "sinks"}
        return {n: x if n in wide else x.astype(q.dtype) for n, x in grads.items() if x is not None}


def trial_of(made=None, conventions=None, dtype="float32", f=None, **space):
    """A trial of something with forward and backward, of which nothing is probed."""
    conventions = conventions or Conventions()
    made = made or Oracle(conventions)
    f = f or Implementation(made.forward, backward=made.backward, framework="numpy")
    space = {"features": f.features, "structure": frozenset(STRUCTURE), "dtype": dtype} | space
    rounding = Rounding.undeclared(dtype)
    return Trial(f, conventions, rounding, Space(**space), gradients=frozenset(GRADIENTS))


def ratios(trial, rule, count):
    """What the rule says of so many small recipes, as far as they show something."""
    property = PROPERTIES[rule]
    pools = Pools(trial.space, **property.draw(trial))
    drawn = map(pools.recipe, range(100 * count))
    small = (r for r in drawn if r.H * r.T * r.S <= 500 and max(r.T, r.S, r.D, r.E) <= 40)
    found = (property.check(trial, recipe) for recipe in small)
    return list(itertools.islice((ratio for ratio in found if ratio is not None), count))


def violation(made, rule):
    """A trial of what is wrong, and what the rule says of it."""
    trial = trial_of(made)
    with pytest.raises(Violation) as caught:
        ratios(trial, rule, 100)
    return trial, caught.value


# --- what is wrong, each in one step --------------------------------------------------------------


class LastKeyLost(Attention):
    """Of an odd number of keys the last is not read."""

    def visible(self, c):
        S = c.k.shape[-2]
        return super().visible(c) & (np.arange(S) < S - S % 2)


class LastQueryWrittenOver(Attention):
    """Of an odd number of queries the last gets the result of the first."""

    def results(self, c):
        o, lse, p = super().results(c)
        if o.shape[-2] % 2:
            o[..., -1, :] = o[..., 0, :]
        return o, lse, p


class DropoutOfFirstRow(Attention):
    """All queries drop what the first drops."""

    def inputs(self, *arrays, **options):
        inputs = super().inputs(*arrays, **options)
        keep = inputs.keep
        return inputs if isinstance(keep, float) else inputs._replace(keep=keep[..., :1, :])


class GroupsOfThree(Attention):
    """Query head h uses key/value head h // 3, as far as there are so many."""

    def share(self, x, H):
        return x[..., np.minimum(np.arange(H) // 3, x.shape[-3] - 1), :, :]


class MaskOfFirstSample(Attention):
    """The mask of the first sample is used for all."""

    def visible(self, c):
        per_sample = c.mask is not None and c.mask.ndim > 3
        return super().visible(c._replace(mask=c.mask[:1]) if per_sample else c)


class OneQueryForgetsWindow(Attention):
    """A path for decoding, one query, does not read the window."""

    def visible(self, c):
        return super().visible(c._replace(window=None) if c.q.shape[-2] == 1 else c)


class GradientsMixed(Attention):
    """Samples get a part of the gradient of the last one."""

    def gradients(self, c, do, dlse, dw):
        dq, *rest = super().gradients(c, do, dlse, dw)
        return dq + 2.0**-5 * dq[-1:] * (dq.ndim > 3), *rest


class PaddingCounted(Attention):
    """The mask is read as so many first keys."""

    def visible(self, c):
        if c.mask is None:
            return super().visible(c)
        length = c.mask.sum(-1, keepdims=True)
        return super().visible(c._replace(mask=np.arange(c.mask.shape[-1]) < length))


class MaximumOfHidden(Attention):
    """The row maximum is taken over hidden scores too, and exp underflows in float32."""

    def results(self, c):
        m = self.product(c).max(-1, keepdims=True, initial=-np.inf)
        s, live = self.scores(c)
        low = s - m < -100
        return super().results(c._replace(bias=c.bias + np.where(low & live, -np.inf, 0)))


class CausalOfSquares(Attention):
    """causal is not read where T ≠ S."""

    def sides(self, c):
        square = c.q.shape[-2] == c.k.shape[-2]
        return super().sides(c if square else c._replace(causal=False))


class CausalGradientOfAll(Attention):
    """Backward rebuilds the weights without causal."""

    def recompute(self, c):
        return c._replace(causal=False)


class LseOfProbabilities(Attention):
    """lse is taken of the weights."""

    def lse(self, pivot, total, e_sink):
        return np.log(total / np.where(total == 0, 1, total) + 1)


class LseOfEmptyIsZero(Attention):
    """lse of a query that sees nothing is 0."""

    def lse(self, pivot, total, e_sink):
        return np.where(total == 0, 0, super().lse(pivot, total, e_sink))


class WindowClobbersMask(Attention):
    """The mask is not read where a window is given."""

    def visible(self, c):
        return super().visible(c if c.window is None else c._replace(mask=None))


class WindowReplacesCausal(Attention):
    """causal is not read where a window is given."""

    def sides(self, c):
        return super().sides(c if c.window is None else c._replace(causal=False))


class WindowAnchoredAtZero(Attention):
    """A window lies along the diagonal from the first corner, causal from the last."""

    def diagonal(self, T, S):
        return np.arange(T)[:, None]

    def sides(self, c):
        left, right = super().sides(c)
        shift = c.k.shape[-2] - c.q.shape[-2]
        return left, right if right is None or not c.causal else right + shift


class MinusInfIsLarge(Attention):
    """A bias of −inf becomes −20."""

    def inputs(self, *arrays, **options):
        inputs = super().inputs(*arrays, **options)
        return inputs._replace(bias=np.maximum(inputs.bias, -20.0))


class ScaleIgnored(Attention):
    """The scale is 1/√D whatever is said."""

    def inputs(self, *arrays, **options):
        inputs = super().inputs(*arrays, **options)
        return inputs._replace(scale=self.default_scale(1, inputs.q.shape[-1]))


class DkScaledTwice(Attention):
    """dk has the scale twice."""

    def dk(self, dx, c, seen):
        return c.scale * super().dk(dx, c, seen)


BREAKS = [
    ("permute-keys", LastKeyLost),
    ("permute-queries", LastQueryWrittenOver),
    ("permute-queries", DropoutOfFirstRow),
    ("permute-heads", GroupsOfThree),
    ("permute-batch", MaskOfFirstSample),
    ("batch-alone", MaskOfFirstSample),
    ("batch-alone", OneQueryForgetsWindow),
    ("batch-alone", GradientsMixed),
    ("shared-heads", GroupsOfThree),
    ("padded-keys", PaddingCounted),
    ("padded-keys", MaximumOfHidden),
    ("padded-keys", LastKeyLost),
    ("causal-prefix", CausalOfSquares),
    ("causal-prefix", CausalGradientOfAll),
    ("split-merge", LastKeyLost),
    ("split-merge", LseOfProbabilities),
    ("split-merge", LseOfEmptyIsZero),
    ("window-infinite", WindowClobbersMask),
    ("window-infinite", WindowReplacesCausal),
    ("causal-as-mask", CausalOfSquares),
    ("causal-as-mask", CausalGradientOfAll),
    ("window-as-mask", WindowAnchoredAtZero),
    ("mask-as-bias", MinusInfIsLarge),
    ("scale-of-query", ScaleIgnored),
    ("scale-of-query", DkScaledTwice),
]

# And mutants of the zoo.
KILLS = {
    "permute-keys": "dbias-last-writer-wins",
    "permute-queries": "dbias-last-writer-wins",
    "permute-heads": "heads-tiled",
    "permute-batch": "dbias-last-writer-wins",
    "batch-alone": "softmax-over-queries",
    "shared-heads": "heads-of-padded-group",
    "padded-keys": "mask-ignored-when-causal",
    "causal-prefix": "causal-ignored-with-mask",
    "split-merge": "lse-base-2",
    "window-infinite": "window-one-narrower",
    "causal-as-mask": "causal-top-left",
    "window-as-mask": "window-one-wider",
    "mask-as-bias": "mask-inverted",
    "scale-of-query": "dq-unscaled",
}


@pytest.mark.parametrize(
    ("rule", "wrong"), BREAKS, ids=[f"{rule}-{wrong.__name__}" for rule, wrong in BREAKS]
)
def test_the_rule_fails_what_breaks_it(rule, wrong):
    trial, err = violation(wrong(), rule)
    assert err.ratio > 1
    found = trial.against_oracle(err.problem, err.cotangents)
    assert not all(comparison.passed for comparison in found.values())


@pytest.mark.parametrize(("rule", "name"), KILLS.items())
def test_the_rule_fails_its_mutant_and_the_script_shows_it(rule, name):
    mutant = MUTANTS[name]
    trial, err = violation(mutant, rule)
    text = script(trial, rule, err.problem, err)
    told = io.StringIO()
    given = {"f": mutant.forward, "f_backward": mutant.backward}
    with contextlib.redirect_stdout(told):
        exec(text.replace(PLACEHOLDER, ""), given)
    assert "WRONG" in told.getvalue()


def test_every_rule_has_something_that_breaks_it():
    assert set(KILLS) == {rule for rule, _ in BREAKS} == set(RULES)


# --- what is right --------------------------------------------------------------------------------


class Flash:
    """The online softmax that npattn ships."""

    forward, backward = staticmethod(flash), staticmethod(flash_backward)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("made", [Attention(), Flash()], ids=["base", "flash"])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_right_keeps_the_rule(made, rule, dtype):
    found = ratios(trial_of(made, dtype=dtype), rule, 3)
    assert len(found) == 3
    assert max(found) <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_keeps_every_rule_that_it_can_be_asked(dtype):
    pytest.importorskip("torch")
    from npattn.testing.targets.torch import sdpa_math

    structure = frozenset({"rank 4", "K < H", "E != D", "T != S", "T > S", "D % 8"})
    f = Implementation(sdpa_math, framework="torch")
    trial = trial_of(conventions=PROFILES["torch.sdpa"], dtype=dtype, f=f, structure=structure)
    asked = [rule for rule in RULES if PROPERTIES[rule].unless(trial) is None]
    assert set(RULES) - set(asked) == {"split-merge", "window-infinite", "window-as-mask"}
    for rule in asked:
        assert max(ratios(trial, rule, 2)) <= 1, rule


MEANINGS = [
    {"causal": "top_left"},
    {"empty_row": "nan", "lse_empty": math.nan},
    {"empty_row": "mean", "window": "inclusive"},
    {"hidden_fill": -1e4},
    {"mask_true": "hide"},
    {"lse_base": "2", "lse_empty": 0.0},
    {"softcap": "after_bias", "kv_head": "tile"},
    {"softcap": "after_mask", "weights": "after_dropout"},
    {"bias": "before_scale"},
]


@pytest.mark.parametrize("meaning", MEANINGS, ids=str)
def test_the_rules_hold_under_every_convention_to_the_last_bits_of_float64(meaning):
    trial = trial_of(conventions=Conventions(**meaning), dtype="float64")
    for rule in RULES:
        if PROPERTIES[rule].unless(trial) is None:
            assert ratios(trial, rule, 2), rule


@pytest.mark.parametrize("rule", ["padded-keys", "causal-prefix", "mask-as-bias"])
def test_where_hidden_keys_are_filled_a_rule_about_hidden_keys_is_not_asked(rule):
    trial = trial_of(conventions=Conventions(hidden_fill=-1e4))
    assert PROPERTIES[rule].unless(trial) == "hidden_fill lets hidden keys matter"


# --- what is asked --------------------------------------------------------------------------------


def seen_by(**refuses):
    """`flash`, which notes the sizes that it is asked, and refuses some."""
    seen = []

    def f(q, k, v, mask=None, *, causal=False, window=None, return_lse=False):
        sizes = {"H": q.shape[-3], "K": k.shape[-3]}
        sizes |= {"T": q.shape[-2], "S": k.shape[-2], "B": len(q) if q.ndim == 4 else 1}
        if any(refused(**sizes) for refused in refuses.values()):
            raise NotImplementedError
        seen.append(sizes)
        return flash(q, k, v, mask, causal=causal, window=window, return_lse=return_lse)

    return f, seen


def test_only_sizes_that_the_user_allows_are_asked():
    f, seen = seen_by()
    sizes = {"B": (1, 2), "H": (3, 6), "K": (3,), "T": (5, 7), "S": (5, 7, 12), "D": (8,)}
    report = check(f, framework="numpy", sizes=sizes, only=RULES, examples=4)
    for letter in "BHKTS":
        assert {n[letter] for n in seen} <= set(sizes[letter]), letter
    statuses = {o.rule: o.status for o in report.outcomes if o.status != "passed"}
    # K = H = 6 is not among the sizes, and there is neither bias nor scale.
    assert statuses == dict.fromkeys(
        ("shared-heads", "mask-as-bias", "scale-of-query"), "not applicable"
    )


@pytest.mark.parametrize(
    ("refused", "rules_without"),
    [
        (lambda T, S, **_: T != S, {"padded-keys", "split-merge"}),
        (lambda T, S, **_: T > S, set()),
        (lambda K, H, **_: K != H, {"shared-heads"}),
    ],
    ids=["T != S", "T > S", "K < H"],
)
def test_structure_that_is_refused_is_not_asked(refused, rules_without):
    f, _ = seen_by(it=refused)
    asked = {"batch-alone", "shared-heads", "padded-keys", "causal-prefix", "split-merge"}
    report = check(f, framework="numpy", only=asked, examples=3)
    statuses = {o.rule: o.status for o in report.outcomes}
    assert statuses.pop("structure", "passed") == "passed"
    assert {n for n, status in statuses.items() if status == "not applicable"} == rules_without
    assert set(statuses.values()) <= {"passed", "not applicable"}


@pytest.mark.parametrize(
    ("rule", "reason", "space"),
    [
        ("permute-keys", "sizes allow no S above 1", {"sizes": {"S": (1,)}}),
        ("permute-heads", "refuses rank 3, rank 4, rank 5", {"structure": frozenset({"rank 2"})}),
        ("permute-batch", "refuses rank 4, rank 5", {"structure": frozenset({"rank 3"})}),
        ("shared-heads", "refuses K < H", {"structure": frozenset({"rank 4"})}),
        ("padded-keys", "sizes allow one S only", {"sizes": {"S": (64,)}}),
        ("padded-keys", "has no mask", {"features": frozenset({"bias"})}),
        ("causal-prefix", "sizes allow one T only", {"sizes": {"T": (64,)}}),
        ("window-as-mask", "has no window and no mask", {"features": frozenset({"bias"})}),
        ("scale-of-query", "has no scale", {"features": frozenset({"bias"})}),
    ],
)
def test_a_rule_that_cannot_be_asked_says_why(rule, reason, space):
    assert PROPERTIES[rule].unless(trial_of(**space)) == reason


@pytest.mark.parametrize(
    ("rule", "meaning", "left_out"),
    [
        ("mask-as-bias", {}, set()),
        ("mask-as-bias", {"softcap": "after_bias"}, {"softcap"}),
        ("mask-as-bias", {"bias": "before_scale"}, {"scale"}),
        ("scale-of-query", {}, set()),
        ("scale-of-query", {"bias": "before_scale"}, {"bias"}),
    ],
)
def test_an_option_for_which_a_convention_makes_the_rule_untrue_is_not_drawn(
    rule, meaning, left_out
):
    trial = trial_of(conventions=Conventions(**meaning))
    assert PROPERTIES[rule].draw(trial)["forbid"] == left_out


def test_heads_are_shared_as_the_conventions_say():
    problem = Recipe(H=6, K=3).problem()
    tiled = trial_of(conventions=Conventions(kv_head="tile"))
    assert rules._head_of(tiled, problem).tolist() == [0, 1, 2, 0, 1, 2]
    assert rules._head_of(trial_of(), problem).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_bias_of_minus_inf_is_not_asked_of_a_dtype_without_inf():
    reason = PROPERTIES["mask-as-bias"].unless(trial_of(dtype="float8_e4m3fn"))
    assert reason == "float8_e4m3fn has no −inf"
    assert PROPERTIES["mask-as-bias"].unless(trial_of(dtype="float8_e5m2")) is None


@pytest.mark.parametrize("shuns", [False, True])
def test_where_empty_rows_are_known_to_be_wrong_no_part_has_any(shuns, monkeypatch):
    trial, asked = trial_of(), []
    trial.shuns_empty_rows = shuns
    forward = trial.implementation.forward
    noted = lambda problem, *view: asked.append(problem) or forward(problem, *view)  # noqa: E731
    monkeypatch.setattr(trial.implementation, "forward", noted)
    for seed in range(30):
        PROPERTIES["split-merge"].check(trial, Recipe(T=5, S=3, seed=seed, mask="padding"))
    assert {problem.S for problem in asked} == {1, 2, 3}
    assert any(trial.empty(problem).any() for problem in asked) != shuns


# --- the parts ------------------------------------------------------------------------------------


def test_an_axis_that_an_array_lacks_or_broadcasts_along_stays():
    problem = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13).problem()
    order = np.array([6, 0])
    pick = [rules._keys(problem, order)]
    one_a_row, matrix = np.ones((5, 1)), np.arange(35.0).reshape(5, 7)
    assert rules._picked("bias", one_a_row, pick).shape == (5, 1)
    assert np.array_equal(rules._picked("dbias", matrix, pick), matrix[:, [6, 0]])
    assert rules._picked("q", problem.q, pick) is problem.q
    assert np.array_equal(rules._picked("dk", problem.k, pick), problem.k[..., [6, 0], :])


def test_what_was_picked_is_put_back_among_zeros():
    problem = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13).problem()
    picks = [rules._queries(problem, np.array([3])), rules._keys(problem, np.array([6, 0]))]
    whole = np.arange(1.0, 36).reshape(5, 7)
    back = rules._placed("bias", rules._picked("bias", whole, picks), picks, whole.shape)
    want = np.zeros((5, 7))
    want[3, [0, 6]] = whole[3, [0, 6]]
    assert np.array_equal(back, want)


def test_the_order_is_another_one_wherever_there_is_another():
    rng = np.random.default_rng(0)
    assert all((rules._shuffled(rng, 2) == [1, 0]).all() for _ in range(20))
    assert rules._shuffled(rng, 1) == [0]


# --- merging --------------------------------------------------------------------------------------

ROWS = 400


def parts_of(rng, spread, error):
    """Two parts that are off by at most α in o and β in lse, often by just that; and the truth."""
    mp = pytest.importorskip("mpmath")
    exact_lse = spread * rng.standard_normal((2, ROWS))
    exact_o = rng.standard_normal((2, ROWS, 3))
    alpha = error * rng.random((2, ROWS, 3))
    beta = error * rng.random((2, ROWS))
    signs = rng.choice([-1, 1], (2, ROWS))
    o, lse = exact_o + signs[..., None] * alpha, exact_lse + signs[::-1] * beta
    nothing = Problem(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros((1, 1)))
    parts = [
        Judged(nothing, None, {"o": o[i], "lse": lse[i]},
               {"o": exact_o[i], "lse": exact_lse[i]}, {"o": alpha[i], "lse": beta[i]})
        for i in range(2)
    ]  # fmt: skip
    with mp.workdps(40):
        weights = [[mp.exp(x) for x in row] for row in exact_lse]
        total = [a + b for a, b in zip(*weights, strict=True)]
        want_lse = [mp.log(x) for x in total]
        want_o = [
            [sum(weights[i][n] * mp.mpf(exact_o[i, n, e]) for i in range(2)) / total[n]
             for e in range(3)]
            for n in range(ROWS)
        ]  # fmt: skip
    return parts, want_o, want_lse


@pytest.mark.parametrize("error", [0.0, 1e-15, 1e-6, 1.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 300.0])
def test_what_merges_is_off_by_no_more_than_derived_and_sometimes_by_nearly_that(spread, error):
    rng = np.random.default_rng([17, round(spread)])
    parts, want_o, want_lse = parts_of(rng, spread, error)
    gone = np.zeros((2, ROWS), bool)
    merged, room = rules._merged(Conventions(), parts, gone)
    off_lse = np.array(
        [float(abs(x - want)) for x, want in zip(merged["lse"], want_lse, strict=True)]
    )
    pairs = zip(merged["o"], want_o, strict=True)
    off_o = np.array([[float(abs(x - y)) for x, y in zip(*row, strict=True)] for row in pairs])
    # The last rounding of what merges is that of any result on delivery.
    ratio_lse = off_lse / (room["lse"] + np.spacing(abs(merged["lse"])) / 2)
    ratio_o = off_o / (room["o"] + np.spacing(abs(merged["o"])) / 2)
    assert ratio_lse.max() <= 1
    assert ratio_o.max() <= 1
    if error >= 1e-6:
        assert ratio_lse.max() > 0.9
        assert ratio_o.max() > 0.5


def test_a_part_that_is_not_seen_adds_nothing_whatever_it_holds():
    parts, _, _ = parts_of(np.random.default_rng(5), 1.0, 0.0)
    parts[0].results["o"][0], parts[0].results["lse"][0] = np.nan, -np.inf
    gone = np.zeros((2, ROWS), bool)
    gone[0, 0] = True
    merged, room = rules._merged(Conventions(), parts, gone)
    assert np.array_equal(merged["o"][0], parts[1].results["o"][0])
    assert merged["lse"][0] == parts[1].results["lse"][0]
    assert np.isfinite(room["o"]).all()


def test_where_no_part_is_seen_the_merged_row_is_empty():
    parts, _, _ = parts_of(np.random.default_rng(5), 1.0, 0.0)
    for part in parts:
        part.results["o"][0], part.results["lse"][0] = 0, 0.0
    gone = np.zeros((2, ROWS), bool)
    gone[:, 0] = True
    merged, _ = rules._merged(Conventions(lse_empty=0.0), parts, gone)
    assert merged["lse"][0] == 0.0
    assert np.array_equal(merged["o"][0], [0, 0, 0])


class WrongOfTwoKeys(Attention):
    """Twice what is right, of two keys."""

    def results(self, c):
        o, lse, p = super().results(c)
        return o * (1 + (c.k.shape[-2] == 2)), lse, p


def test_the_part_that_is_wrong_is_the_one_to_show():
    trial = trial_of(WrongOfTwoKeys())
    for seed in range(4):
        with pytest.raises(Violation) as caught:
            PROPERTIES["split-merge"].check(trial, Recipe(T=5, S=3, seed=seed))
        assert caught.value.problem.S == 2
