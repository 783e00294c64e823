"""Identities of the gradients hold for what is right, and not for what is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from npattn.conventions import PROFILES, Conventions
from npattn.mistakes import Attention, base, base_backward
from npattn.testing import Recipe, check
from npattn.testing.rules import PROPERTIES
from npattn.testing.rules.differences import UNITS, _Moved
from npattn.testing.rules.estimates import Estimate
from npattn.testing.targets.numpy import flash, flash_backward
from npattn.zoo.mutants import MUTANTS
from tests.testing.rules.test_identities import (
    ASIDE,
    MEANINGS,
    RIGHT,
    oracle_under,
    plain,
    printed,
    ratios,
    recipes_of,
    trial_of,
    violation,
)

RULES = (
    "dbias-rows",
    "unseen-keys",
    "key-gradient-sum",
    "value-euler",
    "query-key-euler",
    "cotangent-linear",
    "lse-gradient",
    "directional",
)
SMALL = {"D": (3, 5), "E": (2, 3)}


# --- what is right keeps them ---------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("named", RIGHT)
def test_what_is_right_keeps_the_identity(named, rule):
    f, backward, dtype = RIGHT[named]
    found = ratios(rule, trial_of(f, backward, dtype), examples=5)
    assert len(found) == 5
    assert max(found) <= 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("named", MEANINGS)
def test_the_oracle_keeps_the_identity_under_conventions(named, rule):
    conventions = MEANINGS[named]
    trial = trial_of(*oracle_under(conventions), conventions=conventions)
    if (reason := PROPERTIES[rule].unless(trial)) is not None:
        assert reason in ASIDE
        return
    found = ratios(rule, trial, examples=3)
    assert len(found) == 3
    assert max(found) <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_keeps_the_identities(dtype):
    pytest.importorskip("torch")
    from npattn.testing.targets.torch import sdpa_math

    conventions = PROFILES["torch.sdpa"]
    report = check(sdpa_math, only=RULES, examples=5, dtypes=(dtype,), conventions=conventions)
    status = {o.rule: o.status for o in report.outcomes}
    assert status.pop("lse-gradient") == "not applicable"
    assert set(status.values()) == {"passed"}, str(report)


# --- what is wrong does not -----------------------------------------------------------------------

WRONG = {
    "dbias-rows": ("jacobian-without-rank-1-term", "dlse-ignored", "dbias-last-writer-wins"),
    "unseen-keys": ("softcap-after-mask", "window-ignored-in-backward", "mask-inverted"),
    "key-gradient-sum": ("jacobian-without-rank-1-term", "dlse-ignored", "dk-of-base-2-query"),
    "value-euler": ("dk-of-first-head", "causal-backward-top-left", "window-ignored-in-backward"),
    "query-key-euler": ("dq-unscaled", "dk-of-base-2-query", "dk-of-first-head"),
    "lse-gradient": ("dlse-ignored",),
    "directional": (
        "jacobian-without-rank-1-term",
        "softcap-slope-forgotten",
        "dk-of-base-2-query",
        "dbias-zero",
        "dsinks-zero",
        "dsinks-without-dlse",
        "dp-not-dropped",
    ),
}


@pytest.mark.parametrize(("rule", "name"), [(rule, n) for rule in WRONG for n in WRONG[rule]])
def test_a_mutant_breaks_the_identity_and_the_script_shows_it(rule, name):
    mutant = MUTANTS[name]
    trial = trial_of(mutant.forward, mutant.backward, sizes=SMALL)
    error = violation(rule, trial)
    assert "WRONG" in printed(rule, trial, error)


class Saturates(Attention):
    """dS is held in a format that ends at ¼."""

    def jacobian(self, p, dp, delta, c):
        return np.clip(super().jacobian(p, dp, delta, c), -0.25, 0.25)


class ForgetsOneOfTwo(Attention):
    """Where o has a cotangent, that of lse is not read."""

    def gradients(self, c, do, dlse, dw):
        return super().gradients(c, do, 0 * dlse if np.any(do) else dlse, dw)


class OnesForCotangents(Attention):
    """Written for the sum of o: dout is taken for 1."""

    def gradients(self, c, do, dlse, dw):
        return super().gradients(c, np.ones_like(do), dlse, dw)


class LeavesOutNothing(Attention):
    """Where o has no cotangent, there is nothing to do."""

    def gradients(self, c, do, dlse, dw):
        grads = super().gradients(c, do, dlse, dw)
        return grads if np.any(do) else tuple(0 * x for x in grads)


class LseOfAnotherSign(Attention):
    """delta + dlse, where delta − dlse is meant."""

    def use_dlse(self, dlse, live):
        return -dlse


class SinkWithoutQuery(Attention):
    """The last key keeps a trace of a gradient, seen or not."""

    def dk(self, dx, c, seen):
        dk = super().dk(dx, c, seen)
        dk[..., -1:, :1] += 1e-30
        return dk


class NaNGradients(Attention):
    """The last row of dq, dk and dv is not written."""

    def gradients(self, c, do, dlse, dw):
        *grads, ds, ds_sink = super().gradients(c, do, dlse, dw)
        for x in grads:
            x[..., -1:, :] = np.nan
        return *grads, ds, ds_sink


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("cotangent-linear", Saturates),
        ("cotangent-linear", ForgetsOneOfTwo),
        ("cotangent-linear", OnesForCotangents),
        ("lse-gradient", LeavesOutNothing),
        ("lse-gradient", LseOfAnotherSign),
        ("dbias-rows", LseOfAnotherSign),
        ("key-gradient-sum", LseOfAnotherSign),
        ("unseen-keys", SinkWithoutQuery),
        ("directional", Saturates),
        ("directional", OnesForCotangents),
        *((rule, NaNGradients) for rule in RULES if rule != "dbias-rows"),
    ],
)
def test_a_mistake_breaks_the_identity_and_the_script_shows_it(rule, wrong):
    trial = trial_of(wrong().forward, wrong().backward, sizes=SMALL)
    error = violation(rule, trial)
    assert "WRONG" in printed(rule, trial, error)


def test_a_gradient_that_is_small_at_a_key_nobody_sees_is_not_0():
    trial = trial_of(SinkWithoutQuery().forward, SinkWithoutQuery().backward, sizes=SMALL)
    told = str(violation("unseen-keys", trial)).splitlines()
    assert [line for line in told if line.startswith("dk") and "e-30, want 0, allowed ±0" in line]


@pytest.mark.parametrize("rule", ["dbias-rows", "key-gradient-sum", "value-euler"])
def test_the_identity_holds_without_a_gradient_through_lse(rule):
    def backward(dout, q, k, v, *, out, lse, **options):
        return flash_backward(dout, q, k, v, out=out, lse=lse, **options)

    assert max(ratios(rule, trial_of(flash, backward), examples=5)) <= 1


# --- what they need -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("dbias-rows", "has no bias"),
        ("unseen-keys", "no backward"),
        ("key-gradient-sum", "gives no dk"),
        ("value-euler", "gives no dv"),
        ("query-key-euler", "gives no dq"),
        ("cotangent-linear", "no backward"),
        ("lse-gradient", "no backward"),
        ("directional", "no backward"),
    ],
)
def test_an_identity_of_a_gradient_needs_it(rule, reason):
    assert PROPERTIES[rule].unless(trial_of(plain)) == reason


@pytest.mark.parametrize("kept", ["q", "k", "v"])
def test_a_backward_that_gives_one_gradient_is_judged_on_that(kept):
    def backward(dout, q, k, v, *, out, lse, dlse=None):
        return {kept: flash_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)[kept]}

    def f(q, k, v, *, return_lse=False):
        return flash(q, k, v, return_lse=return_lse)

    report = check(f, backward=backward, only=RULES, examples=3, dtypes=("float32",))
    status = {o.rule: o.status for o in report.outcomes}
    assert set(status.values()) <= {"passed", "not applicable"}, str(report)
    assert status["directional"] == "passed"
    assert status["cotangent-linear"] == "passed"
    of_two = {"key-gradient-sum": {"k"}, "value-euler": {"v"}, "query-key-euler": set()}
    for rule, needs in of_two.items():
        assert (status[rule] == "passed") == (kept in needs), rule


def test_a_bias_without_gradient_has_no_rows_to_sum():
    trial = replace(trial_of(base, base_backward), gradients=frozenset({"dq", "dk", "dv"}))
    assert PROPERTIES["dbias-rows"].unless(trial) == "gives no dbias"


def test_the_gradient_of_lse_needs_one():
    def f(q, k, v, return_lse=False):
        return flash(q, k, v, return_lse=return_lse)

    def backward(dout, q, k, v, *, out, lse):
        return flash_backward(dout, q, k, v, out=out, lse=lse)

    assert PROPERTIES["lse-gradient"].unless(trial_of(f, backward)) == "no gradient through lse"


@pytest.mark.parametrize("rule", ["dbias-rows", "unseen-keys", "key-gradient-sum", "lse-gradient"])
def test_an_identity_of_what_is_seen_is_not_asked_where_hidden_keys_take_part(rule):
    trial = trial_of(base, base_backward, conventions=Conventions(hidden_fill=-1e4))
    assert PROPERTIES[rule].unless(trial) == "hidden_fill lets hidden keys matter"


def test_unseen_keys_are_drawn_whatever_hides():
    def f(q, k, v, causal=False):
        return flash(q, k, v, causal=causal)

    assert all(r.causal for r in recipes_of("unseen-keys", trial_of(f)))
    masks = {r.mask for r in recipes_of("unseen-keys", trial_of(flash))}
    assert masks <= {"padding", "left padding", "first tile", "empty rows", "empty head"}


def test_dq_is_that_of_means_of_keys_only_where_values_may_have_the_size_of_keys():
    sizes = {"D": (3,), "E": (2,)}
    assert max(ratios("lse-gradient", trial_of(base, base_backward, sizes=sizes), 5)) <= 1
    dq = type("DqAlone", (Attention,), {"dq_scale": lambda self, c: 1.0})()
    trial = trial_of(dq.forward, dq.backward, sizes=sizes)
    assert max(ratios("lse-gradient", trial, 5)) <= 1  # nothing that it can see
    violation("lse-gradient", trial_of(dq.forward, dq.backward, sizes={"D": (3,), "E": (3,)}))


# --- differences ----------------------------------------------------------------------------------


def moved(name, **options):
    """An input of the base in float64, and a direction."""
    recipe = Recipe(lead=(2,), H=6, K=3, T=5, S=7, D=11, E=13, dtype="float64", seed=3, **options)
    trial = trial_of(base, base_backward, "float64")
    moved = _Moved(trial, trial.judged(recipe), name)
    return moved, np.random.default_rng(5).standard_normal(moved.x.shape)


@pytest.mark.parametrize("name", UNITS)
def test_a_difference_agrees_with_the_gradient_of_each_input(name):
    line, step = moved(name, bias="heads", sinks=True, softcap=2.0)
    lengths = line.lengths(step)
    assert line.along(lengths * step) <= 1
    ends = line.to(line.x + lengths * step), line.to(line.x - lengths * step)
    slope = line.slope(line.judged, line.run(*ends))
    left_out = line.left_out(*(line.oracle(p) for p in ends), line.run(*ends))
    assert (abs(left_out.value) < 1e-5 * abs(slope.value)).all()


@pytest.mark.parametrize(
    ("name", "units"),
    [("q", (2, 6, 5, 1)), ("k", (2, 3, 1, 1)), ("v", (2, 3, 1, 13)), ("bias", (6, 5, 1)),
     ("sinks", (6, 1, 1))],
)  # fmt: skip
def test_each_unit_has_a_step_that_is_a_power_of_two(name, units):
    line, step = moved(name, bias="heads", sinks=True)
    assert line.unit(step).shape == units
    lengths = np.broadcast_to(line.lengths(step), units)
    assert np.array_equal(np.log2(lengths), np.round(np.log2(lengths)))
    assert (lengths <= 0.5).all()


@pytest.mark.parametrize("name", UNITS)
def test_one_head_without_batch_is_moved_too(name):
    recipe = Recipe(lead=None, T=5, S=7, D=11, E=13, seed=3, bias="matrix", sinks=True)
    trial = trial_of(base, base_backward)
    line = _Moved(trial, trial.judged(recipe), name)
    step = np.ones_like(line.x)
    assert line.along(line.lengths(step) * step) <= 1


def test_a_bias_of_minus_infinity_does_not_move():
    recipe = Recipe(lead=(2,), T=5, S=7, seed=3, bias="-inf padding")
    trial = trial_of(base, base_backward)
    line = _Moved(trial, trial.judged(recipe), "bias")
    step = np.ones_like(line.x)
    ends = line.to(line.rounded(line.x + step)), line.to(line.rounded(line.x - step))
    assert np.isneginf(line.x).any()
    assert np.array_equal(line.run(*ends) == 0, np.isneginf(line.x))
    assert line.along(step / 8) <= 1


def test_a_step_beyond_the_dtype_ends_at_its_largest_number():
    recipe = Recipe(seed=3, dtype="float16")
    trial = trial_of(base, base_backward, "float16")
    line = _Moved(trial, trial.judged(recipe), "q")
    assert line.rounded(np.full(line.x.shape, 1e9)).max() == 65504
    assert line.rounded(np.full(line.x.shape, 1e9)).dtype == np.float16


def test_what_a_difference_leaves_out_shrinks_with_the_square_of_the_step():
    line, step = moved("k")
    sizes = []
    for h in (2.0**-5, 2.0**-6):
        ends = line.to(line.x + h * step), line.to(line.x - h * step)
        left_out = line.left_out(*(line.oracle(p) for p in ends), line.run(*ends))
        sizes.append(abs(left_out.value) / h)
    assert np.allclose(sizes[0] / sizes[1], 4, rtol=0.1)


def test_empty_rows_leave_the_others_of_their_head_to_be_judged():
    recipe = Recipe(lead=(2,), H=3, K=1, T=5, S=7, D=3, seed=3, mask="empty rows")
    trial = trial_of(base, base_backward)
    line = _Moved(trial, trial.judged(recipe), "k")
    assert np.isinf(Estimate.of(line.judged, "lse").error).any()
    rise = line.rise(line.judged, line.judged)
    assert np.isfinite(rise.error).all()
