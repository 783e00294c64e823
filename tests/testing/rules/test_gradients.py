"""Identities of the gradients hold for correct implementations, and not for mistakes."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.zoo.mutants import MUTANTS
from npattn.conventions import Conventions
from npattn.mistakes import Attention, base, base_backward
from npattn.testing import Recipe, check
from npattn.testing.rules import PROPERTIES
from npattn.testing.rules.differences import UNITS, VariedInput
from npattn.testing.rules.estimates import Estimate
from npattn.testing.targets.numpy import flash, flash_backward
from tests.testing.rules.relations import script_output
from tests.testing.rules.test_identities import (
    OF_GRADIENTS,
    plain,
    ratios,
    recipes_of,
    trial_of,
    violation,
)

SMALL = {"D": (3, 5), "E": (2, 3)}


# --- mistakes -------------------------------------------------------------------------------------

WRONG = {
    "dbias-rows": ("jacobian-without-rank-1-term", "dlse-ignored", "dlse-subtracted",
                   "dbias-last-writer-wins"),
    "unseen-keys": ("softcap-after-mask", "window-ignored-in-backward", "mask-inverted"),
    "key-gradient-sum": (*("jacobian-without-rank-1-term", "dlse-ignored"),
                         *("dlse-subtracted", "dk-of-base-2-query")),
    "value-euler": ("dk-of-first-head", "causal-backward-top-left", "window-ignored-in-backward"),
    "query-key-euler": ("dq-unscaled", "dk-of-base-2-query", "dk-of-first-head"),
    "cotangent-linear": ("dout-taken-as-ones",),
    "lse-gradient": ("dlse-ignored", "dlse-subtracted"),
    "directional": ("jacobian-without-rank-1-term", "softcap-slope-forgotten", "dk-of-base-2-query",
                    "dbias-zero", "dsinks-zero", "dsinks-without-dlse", "dp-not-dropped",
                    "dout-taken-as-ones"),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "name"), [(rule, n) for rule in WRONG for n in WRONG[rule]])
@pytest.mark.broad
def test_mutants_fail_and_the_script_shows_it(rule, name):
    mutant = MUTANTS[name]
    trial = trial_of(mutant.forward, mutant.backward, sizes=SMALL)
    error = violation(rule, trial)
    assert "WRONG" in script_output(rule, trial, error)


class Saturates(Attention):
    """dS is stored in a format that ends at ¼."""

    def jacobian(self, p, dp, delta, c):
        return np.clip(super().jacobian(p, dp, delta, c), -0.25, 0.25)


class ForgetsOneOfTwo(Attention):
    """If o has a cotangent, that of lse is not read."""

    def gradients(self, c, do, dlse, dw):
        return super().gradients(c, do, 0 * dlse if np.any(do) else dlse, dw)


class NothingWithoutDout(Attention):
    """If o has no cotangent, all gradients are 0."""

    def gradients(self, c, do, dlse, dw):
        grads = super().gradients(c, do, dlse, dw)
        return grads if np.any(do) else tuple(0 * x for x in grads)


class TraceAtLastKey(Attention):
    """The last key has a trace of a gradient, even if hidden."""

    def dk(self, dx, c, seen):
        dk = super().dk(dx, c, seen)
        dk[..., -1:, :1] += 1e-30
        return dk


class NaNGradients(Attention):
    """The last row of dq, dk and dv is never written."""

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
        ("lse-gradient", NothingWithoutDout),
        ("unseen-keys", TraceAtLastKey),
        ("directional", Saturates),
        *((rule, NaNGradients) for rule in OF_GRADIENTS if rule != "dbias-rows"),
    ],
)
def test_mistakes_fail_and_the_script_shows_it(rule, wrong):
    trial = trial_of(wrong().forward, wrong().backward, sizes=SMALL)
    error = violation(rule, trial)
    assert "WRONG" in script_output(rule, trial, error)


def test_small_gradient_of_a_hidden_key_fails():
    trial = trial_of(TraceAtLastKey().forward, TraceAtLastKey().backward, sizes=SMALL)
    lines = str(violation("unseen-keys", trial)).splitlines()
    assert [line for line in lines if line.startswith("dk") and "e-30, want 0, allowed ±0" in line]


@pytest.mark.parametrize("rule", ["dbias-rows", "key-gradient-sum", "value-euler"])
def test_correct_implementation_without_dlse_passes(rule):
    def backward(dout, q, k, v, *, out, lse, **options):
        return flash_backward(dout, q, k, v, out=out, lse=lse, **options)

    assert max(ratios(rule, trial_of(flash, backward), examples=5)) <= 1


# --- conditions -----------------------------------------------------------------------------------


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
def test_missing_gradient_is_not_applicable(rule, reason):
    assert PROPERTIES[rule].unless(trial_of(plain)) == reason


@pytest.mark.parametrize("kept", ["q", "k", "v"])
def test_backward_with_one_gradient_is_judged(kept):
    def backward(dout, q, k, v, *, out, lse, dlse=None):
        return {kept: flash_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)[kept]}

    def f(q, k, v, *, return_lse=False):
        return flash(q, k, v, return_lse=return_lse)

    report = check(f, backward=backward, only=OF_GRADIENTS, examples=3, dtypes=("float32",))
    status = {o.rule: o.status for o in report.outcomes}
    assert set(status.values()) <= {"passed", "not applicable"}, str(report)
    assert status["directional"] == "passed"
    assert status["cotangent-linear"] == "passed"
    of_two = {"key-gradient-sum": {"k"}, "value-euler": {"v"}, "query-key-euler": set()}
    for rule, needs in of_two.items():
        assert (status[rule] == "passed") == (kept in needs), rule


def test_dbias_rows_needs_dbias():
    trial = replace(trial_of(base, base_backward), gradients=frozenset({"dq", "dk", "dv"}))
    assert PROPERTIES["dbias-rows"].unless(trial) == "gives no dbias"


def test_lse_gradient_needs_dlse():
    def f(q, k, v, return_lse=False):
        return flash(q, k, v, return_lse=return_lse)

    def backward(dout, q, k, v, *, out, lse):
        return flash_backward(dout, q, k, v, out=out, lse=lse)

    assert PROPERTIES["lse-gradient"].unless(trial_of(f, backward)) == "no gradient through lse"


@pytest.mark.parametrize("rule", ["dbias-rows", "unseen-keys", "key-gradient-sum", "lse-gradient"])
def test_hidden_fill_is_not_applicable(rule):
    trial = trial_of(base, base_backward, conventions=Conventions(hidden_fill=-1e4))
    assert PROPERTIES[rule].unless(trial) == "hidden_fill lets hidden keys matter"


def test_unseen_keys_works_with_any_hiding_option():
    def f(q, k, v, causal=False):
        return flash(q, k, v, causal=causal)

    assert all(r.causal for r in recipes_of("unseen-keys", trial_of(f)))
    masks = {r.mask for r in recipes_of("unseen-keys", trial_of(flash))}
    assert masks <= {"padding", "left padding", "first tile", "empty rows", "empty head"}


def test_lse_gradient_compares_dq_only_if_e_may_be_d():
    sizes = {"D": (3,), "E": (2,)}
    assert max(ratios("lse-gradient", trial_of(base, base_backward, sizes=sizes), 5)) <= 1
    dq = type("DqAlone", (Attention,), {"dq_scale": lambda self, c: 1.0})()
    trial = trial_of(dq.forward, dq.backward, sizes=sizes)
    assert max(ratios("lse-gradient", trial, 5)) <= 1  # nothing that it can see
    violation("lse-gradient", trial_of(dq.forward, dq.backward, sizes={"D": (3,), "E": (3,)}))


# --- differences ----------------------------------------------------------------------------------


def vary(name, **options):
    """Return an input of the base in float64, and a direction."""
    recipe = Recipe(lead=(2,), H=6, K=3, T=5, S=7, D=11, E=13, dtype="float64", seed=3, **options)
    trial = trial_of(base, base_backward, "float64")
    line = VariedInput(trial, trial.evaluation(recipe), name)
    return line, np.random.default_rng(5).standard_normal(line.x.shape)


@pytest.mark.parametrize("name", [n for n in UNITS if n != "gate"])  # base has none
def test_difference_agrees_with_gradient_of_each_input(name):
    line, step = vary(name, bias="heads", sinks=True, softcap=2.0)
    lengths = line.lengths(step)
    assert line.check(lengths * step) <= 1
    ends = line.replace(line.x + lengths * step), line.replace(line.x - lengths * step)
    slope = line.slope(line.base, line.run(*ends))
    remainder = line.remainder(*(line.oracle(p) for p in ends), line.run(*ends))
    assert (abs(remainder.value) < 1e-5 * abs(slope.value)).all()


@pytest.mark.parametrize(
    ("name", "units"),
    [("q", (2, 6, 5, 1)), ("k", (2, 3, 1, 1)), ("v", (2, 3, 1, 13)), ("bias", (6, 5, 1)),
     ("sinks", (6, 1, 1))],
)  # fmt: skip
def test_steps_of_units_are_powers_of_two(name, units):
    line, step = vary(name, bias="heads", sinks=True)
    assert line.sum_units(step).shape == units
    lengths = np.broadcast_to(line.lengths(step), units)
    assert np.array_equal(np.log2(lengths), np.round(np.log2(lengths)))
    assert (lengths <= 0.5).all()


@pytest.mark.parametrize("name", [n for n in UNITS if n != "gate"])
def test_difference_of_one_head_without_batch(name):
    recipe = Recipe(lead=None, T=5, S=7, D=11, E=13, seed=3, bias="matrix", sinks=True)
    trial = trial_of(base, base_backward)
    line = VariedInput(trial, trial.evaluation(recipe), name)
    step = np.ones_like(line.x)
    assert line.check(line.lengths(step) * step) <= 1


def test_bias_of_minus_inf_stays():
    recipe = Recipe(lead=(2,), T=5, S=7, seed=3, bias="-inf padding")
    trial = trial_of(base, base_backward)
    line = VariedInput(trial, trial.evaluation(recipe), "bias")
    step = np.ones_like(line.x)
    ends = line.replace(line.round(line.x + step)), line.replace(line.round(line.x - step))
    assert np.isneginf(line.x).any()
    assert np.array_equal(line.run(*ends) == 0, np.isneginf(line.x))
    assert line.check(step / 8) <= 1


def test_step_is_clipped_to_the_dtype():
    recipe = Recipe(seed=3, dtype="float16")
    trial = trial_of(base, base_backward, "float16")
    line = VariedInput(trial, trial.evaluation(recipe), "q")
    assert line.round(np.full(line.x.shape, 1e9)).max() == 65504
    assert line.round(np.full(line.x.shape, 1e9)).dtype == np.float16


def test_remainder_shrinks_with_square_of_step():
    line, step = vary("k")
    sizes = []
    for h in (2.0**-5, 2.0**-6):
        ends = line.replace(line.x + h * step), line.replace(line.x - h * step)
        remainder = line.remainder(*(line.oracle(p) for p in ends), line.run(*ends))
        sizes.append(abs(remainder.value) / h)
    assert np.allclose(sizes[0] / sizes[1], 4, rtol=0.1)


def test_fully_masked_rows_leave_others_of_the_head():
    recipe = Recipe(lead=(2,), H=3, K=1, T=5, S=7, D=3, seed=3, mask="empty rows")
    trial = trial_of(base, base_backward)
    line = VariedInput(trial, trial.evaluation(recipe), "k")
    assert np.isinf(Estimate.of(line.base, "lse").error).any()
    rise = line.rise(line.base, line.base)
    assert np.isfinite(rise.error).all()
