"""The sweep: problems that are drawn, computed and judged where the tensors are."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn  # noqa: E402
import npattn.torch  # noqa: E402
from npattn import Conventions, Problem  # noqa: E402
from npattn.conventions import PROFILES  # noqa: E402
from npattn.errors import OptionError  # noqa: E402
from npattn.testing import Implementation, Rounding, check, compare  # noqa: E402
from npattn.testing.adapters.torch import Torch  # noqa: E402
from npattn.testing.bounds.row_norms import RowNorms  # noqa: E402
from npattn.testing.cases.log_uniform import Plan, simplify  # noqa: E402
from npattn.testing.cases.recipe import Recipe  # noqa: E402
from npattn.testing.cases.space import STRUCTURE, Space  # noqa: E402
from npattn.testing.compare import compare_arrays  # noqa: E402
from npattn.testing.device import judging as held_module  # noqa: E402
from npattn.testing.device import sweep as sweep_module  # noqa: E402
from npattn.testing.device.sampling import BIASES, DISTRIBUTIONS, MASKS, drawn  # noqa: E402
from npattn.testing.device.sweep import Sweep, show_problem  # noqa: E402
from npattn.testing.device.tensors import Tensors, compared, ratios  # noqa: E402
from npattn.testing.targets.torch import sdpa  # noqa: E402
from npattn.testing.trial import Trial  # noqa: E402

TOP_LEFT = PROFILES["torch.sdpa"]
SMALL = {"B": (2,), "T": (5, 23, 67), "S": (3, 29, 61), "D": (16, 11), "E": (16, 7)}
SWEEPS = ("sweep", "long")


def ours(q, k, v, mask=None, *, causal=False, window=None, bias=None, scale=None, return_lse=False):
    """npattn.torch in float32: right, with a gradient through lse."""
    fwd = npattn.torch.forward(
        q, k, v, mask, causal="bottom_right" if causal else False, window=window, bias=bias,
        scale=scale, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        conventions=Conventions(),
    )  # fmt: skip
    out = fwd.out.to(q.dtype)
    return (out, fwd.lse) if return_lse else out


def swept(f, count=30, *, only=("sweep",), sizes=SMALL, conventions=TOP_LEFT, **words):
    return check(
        f, framework="torch", sweep=count, only=only, sizes=sizes, conventions=conventions,
        device="cpu", **words,
    )  # fmt: skip


def trial_of(f, dtype="float32", conventions=TOP_LEFT, sizes=SMALL, rounding=None):
    implementation = Implementation(f, framework="torch")
    space = Space(implementation.features, frozenset(STRUCTURE), dtype, sizes)
    gradients = frozenset({"dq", "dk", "dv", "dbias"})
    model = rounding or Rounding.undeclared(dtype)
    return Trial(implementation, conventions, model, space, gradients)


# --- what is right passes -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_torch_sdpa_passes(dtype):
    report = swept(sdpa, only=SWEEPS, dtypes=(dtype,))
    assert report.passed, str(report)
    assert [o.rule for o in report.outcomes] == list(SWEEPS)
    assert report.outcomes[0].examples == 30
    assert 0 < report.outcomes[0].worst < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_npattn_torch_passes_with_lse_and_windows(dtype):
    report = swept(ours, only=SWEEPS, conventions=None, dtypes=(dtype,))
    assert report.passed, str(report)
    assert report.settings["sweep"] == 30


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_dtypes_of_which_torch_asks_little_are_swept_too(dtype):
    report = swept(sdpa_of_float8, only=SWEEPS, dtypes=(dtype,), count=6)
    assert report.passed, str(report)
    assert report.outcomes[1].examples


def sdpa_of_float8(q, k, v, mask=None, *, causal=False):
    """Computed in float32, of which the result is rounded."""
    out = sdpa(*(x.float() for x in (q, k, v)), mask, causal=causal)
    return out.to(q.dtype)


def test_other_layouts_and_an_explicit_backward_pass():
    def attend(q, k, v, causal=False):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ours(q, k, v, causal=causal).transpose(1, 2)

    def pulled(dout, q, k, v, *, causal=False):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(attend(q, k, v, causal), (q, k, v), dout)

    f = Implementation(attend, backward=pulled, layout="BTHD", framework="torch")
    report = check(f, sweep=12, only=["sweep"], sizes=SMALL)
    assert report.passed, str(report)


def test_a_base_of_2_and_a_mask_that_hides_are_understood():
    def attend(q, k, v, mask=None, *, return_lse=False):
        conventions = Conventions(mask_true="hide", lse_base="2")
        fwd = npattn.torch.forward(q, k, v, mask, dtype=torch.float32, conventions=conventions)
        return (fwd.out, fwd.lse) if return_lse else fwd.out

    conventions = Conventions(mask_true="hide", lse_base="2")
    report = swept(attend, 12, conventions=conventions)
    assert report.passed, str(report)
    assert not swept(attend, 12, conventions=Conventions(mask_true="hide")).passed


# --- what is wrong does not -----------------------------------------------------------------------


def scaled(factor):
    def f(q, k, v, mask=None, *, causal=False, scale=None):
        scale = factor * (q.shape[-1] ** -0.5 if scale is None else scale)
        return sdpa(q, k, v, mask, causal=causal, scale=scale)

    return f


def test_a_wrong_scale_fails_and_is_made_small():
    report = swept(scaled(1.05))
    [found] = report.outcomes
    assert found.status == "failed"
    assert found.worst > 1
    assert "drawn(Recipe(" in found.recipe
    assert isinstance(found.problem, Problem)
    # Two keys and one query show it; one key does not.
    assert (found.problem.T, found.problem.S) == (5, 3)
    assert found.problem.mask is None


def test_a_wrong_alignment_fails():
    report = swept(sdpa, conventions=Conventions())
    [found] = report.outcomes
    assert found.status == "failed"
    assert found.problem.causal
    assert found.problem.T != found.problem.S


class LosesKeys(torch.autograd.Function):
    """dk without a factor of 2, but for T > S alone."""

    @staticmethod
    def forward(ctx, k, longer):
        ctx.longer = longer
        return k.clone()

    @staticmethod
    def backward(ctx, dk):
        return (dk / 2 if ctx.longer else dk), None


def halved(q, k, v, causal=False):
    return sdpa(q, LosesKeys.apply(k, q.shape[-2] > k.shape[-2]), v, causal=causal)


def test_a_gradient_that_lacks_a_factor_where_there_are_more_queries_than_keys_fails():
    [found] = swept(halved).outcomes
    assert found.status == "failed"
    assert found.problem.T > found.problem.S
    assert "dk[" in found.message
    assert "dv[" not in found.message


def overflows(q, k, v, causal=False):
    """A block index of 10 bits: beyond 1024 queries, the first are written again."""
    out = sdpa(q, k, v, causal=causal)
    T = q.shape[-2]
    if T <= 1024:
        return out
    return torch.cat([out[..., :1024, :], out[..., : T - 1024, :]], -2)


@pytest.mark.parametrize("rule", SWEEPS)
def test_an_index_that_overflows_at_1024_queries_fails_and_no_less_does(rule):
    sizes = {"B": (1,), "H": (1,), "K": (1,), "S": (17,), "D": (16,), "E": (16,)}
    lengths = (900, 1024, 1100, 1500)
    report = swept(overflows, 8, only=(rule,), sizes=sizes | {"T": lengths})
    [found] = report.outcomes
    assert found.status == "failed"
    assert found.problem.T == 1100
    assert "o[" in found.message
    assert swept(overflows, 8, only=(rule,), sizes=sizes | {"T": lengths[:2]}).passed


def narrow(q, k, v):
    """Products that are summed in bfloat16, a few keys at a time."""
    s = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    p = torch.softmax(s, -1).to(q.dtype)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for s0 in range(0, k.shape[-2], 2):
        out = out + p[..., s0 : s0 + 2] @ v[..., s0 : s0 + 2, :]
    return out


def test_sums_in_bfloat16_fail_where_more_is_declared():
    sizes = SMALL | {"H": (2,), "K": (2,), "S": (997, 641), "T": (3,)}
    report = swept(narrow, 12, sizes=sizes, dtypes=("bfloat16",), rounding="fused")
    assert report.outcomes[0].status == "failed"


def nan_now_and_then(q, k, v):
    out = sdpa(q, k, v)
    return torch.where(torch.arange(q.shape[-2])[:, None] == 60, math.nan, out)


def test_nan_where_a_number_belongs_fails():
    [found] = swept(nan_now_and_then).outcomes
    assert found.status == "failed"
    assert "got nan" in found.message
    assert found.worst == math.inf


def large(q, k):
    """Sizes that the probe before the rules does not ask."""
    return min(q.shape[-2], k.shape[-2]) > 60


def short(q, k, v):
    return sdpa(q, k, v)[..., :60, :] if large(q, k) else sdpa(q, k, v)


def raises(q, k, v):
    if large(q, k):
        raise ValueError("60 at most")
    return sdpa(q, k, v)


def elsewhere(q, k, v):
    return sdpa(q, k, v).to("meta" if large(q, k) else "cpu")


def of_numpy(q, k, v):
    return sdpa(q, k, v).detach().numpy() if large(q, k) else sdpa(q, k, v)


@pytest.mark.parametrize(
    ("f", "status", "message"),
    [
        (short, "failed", "o has shape (2, 1, 60, 8), want (2, 1, 67, 8)"),
        (raises, "error", "raised ValueError: 60 at most"),
        (elsewhere, "error", "o is on meta, must be on cpu as q"),
        (of_numpy, "error", "o is a ndarray, must be a torch tensor"),
    ],
)
def test_what_is_no_result_is_said(f, status, message):
    trial = trial_of(f, sizes={"B": (2,), "T": (5, 67), "S": (3, 61), "D": (8,), "E": (8,)})
    trial.gradients = frozenset()
    outcome = Sweep(trial).run(12)
    assert outcome.status == status
    assert outcome.message == message
    assert (outcome.problem.T, outcome.problem.S) == (67, 61)


def test_a_gradient_that_raises_is_an_error():
    [found] = swept(short).outcomes
    assert found.status == "error"
    assert "its gradient raised RuntimeError: Mismatch in shape" in found.message


def test_the_script_of_a_small_failure_writes_it_out_and_shows_it(tmp_path):
    sizes = {"B": (1,), "H": (1,), "K": (1,), "T": (5,), "S": (3,), "D": (7,), "E": (7,)}
    report = check(WRONG, framework="torch", sweep=6, only=["sweep"], sizes=sizes)
    ran(report.outcomes[0].script(), tmp_path, "WRONG o[")


def test_the_script_of_a_large_failure_draws_it_anew(tmp_path):
    sizes = {"B": (1,), "H": (1,), "K": (1,), "T": (1100,), "S": (17,), "D": (16,), "E": (16,)}
    report = check(WRONG, framework="torch", sweep=2, only=SWEEPS, sizes=sizes)
    for outcome in report.outcomes:
        text = outcome.script()
        assert len(text) < 4000
        assert "from npattn.testing.device.sweep import show_problem" in text
        assert f"rule={outcome.rule!r}" in text
    ran(text, tmp_path, "WRONG o[")


def WRONG(q, k, v):
    return 1.25 * sdpa(q, k, v)


def ran(text, folder, told):
    import os
    from pathlib import Path

    path = folder / "script.py"
    path.write_text(text)
    roots = os.pathsep.join([str(Path(npattn.__file__).parents[1]), str(Path(__file__).parents[3])])
    environment = os.environ | {"PYTHONPATH": roots}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


# --- the bound ------------------------------------------------------------------------------------

OPTIONS = (
    {},
    {"causal": True},
    {"mask": "padding", "distribution": "large logits"},
    {"mask": "empty rows", "window": (7, 3)},
    {"bias": "full", "scale": -0.75},
    {"bias": "-inf padding"},
    {"bias": "keys", "causal": True, "distribution": "value offset"},
    {"lead": None, "H": 1, "K": 1, "mask": "matrix"},
)


def on_host(given):
    own, take = given.problem, Torch().take
    arrays = {
        n: take(x) for n in ("q", "k", "v", "mask", "bias") if (x := getattr(own, n)) is not None
    }
    return Problem(
        **arrays, causal=own.causal, window=own.window, scale=own.scale, alignment=own.alignment
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_tensors_it_is_that_of_numpy(options, dtype):
    recipe = Recipe(**{"lead": (2,), "H": 6, "K": 3, "T": 37, "S": 41, "D": 16, "E": 13} | options)
    recipe = replace(recipe, dtype=dtype, seed=5)
    given = drawn(recipe)
    problem, rounding = on_host(given), Rounding.undeclared(dtype)
    fwd = npattn.torch.api.evaluate(given.problem, engine="dense")
    theirs = RowNorms(given.problem, rounding, dtype, Tensors(fwd.out, fwd.lse))
    numbers = RowNorms(problem, rounding, dtype)
    assert theirs.fits == numbers.fits
    do, dlse = given.dout.double(), torch.where(torch.isneginf(fwd.lse), 0, given.dlse.double())
    do, dlse = (x[None] if problem.headless else x for x in (do, dlse))
    one = theirs.forward() | theirs.backward(do, dlse)
    other = numbers.forward() | numbers.backward(do.numpy(), dlse.numpy())
    assert one.keys() == other.keys()
    for name, t in other.items():
        assert np.allclose(one[name].numpy(), t, rtol=1e-6, atol=0), name


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_errors_on_tensors_are_those_of_numpy(dtype):
    rng = torch.Generator().manual_seed(3)
    tensor = getattr(torch, dtype)
    edges = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        torch.finfo(tensor).max,
        torch.finfo(tensor).tiny / 4,
    ]
    got = torch.cat([torch.tensor(edges), torch.randn(93, generator=rng)]).to(tensor)
    for want in (
        got.double() * (1 + 1e-4 * torch.randn(100, generator=rng, dtype=torch.float64)),
        torch.randn(100, generator=rng, dtype=torch.float64),
        torch.full((100,), math.nan, dtype=torch.float64),
        torch.full((100,), 1e300, dtype=torch.float64),
    ):
        allowed = 1e-5 * torch.rand(100, generator=rng, dtype=torch.float64)
        allowed[::7], allowed[::11] = 0, math.inf
        take = Torch().take
        told = compare_arrays("o", take(got), want.numpy(), allowed.numpy())
        here = compared("o", got, want, allowed)
        assert here.ratio == pytest.approx(told.ratio, rel=1e-12)
        assert here.wrong == told.wrong
        for at in range(100):
            some = slice(at, at + 1)
            one = compare_arrays("o", take(got)[some], want.numpy()[some], allowed.numpy()[some])
            assert float(ratios(got, want, allowed)[at]) == pytest.approx(one.ratio, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_oracle_in_float32_is_allowed_its_own_error(dtype, monkeypatch):
    exact = swept(sdpa, dtypes=(dtype,), rounding="eager")
    monkeypatch.setattr(sweep_module, "computes_in", lambda device: torch.float32)
    report = swept(sdpa, only=SWEEPS, dtypes=(dtype,), rounding="eager")
    assert report.passed, str(report)
    # More is allowed, but of the same size: an error of float32 is little beside that of bfloat16.
    ratio = report.outcomes[0].worst / exact.outcomes[0].worst
    assert 0.2 < ratio < 1.1
    assert not swept(scaled(1.05), dtypes=(dtype,)).passed


def test_where_the_cheap_form_says_nothing_small_problems_go_to_the_full_one():
    trial = trial_of(sdpa, "bfloat16", rounding=Rounding.eager())
    recipe = Recipe(lead=(2,), H=2, K=2, T=5, S=7, D=16, E=16, dtype="bfloat16", scale=9.0)
    steep = replace(recipe, distribution="flat", bias="keys", scale=None)
    sweep = Sweep(trial)
    far = drawn(steep)
    far.problem.bias.mul_(100)
    assert not held_module.held(trial, far).bounded
    ratio, failure = sweep._second(far)
    assert failure is None
    assert 0 < ratio < 1


def test_where_nothing_is_bounded_only_nan_is_wrong(monkeypatch):
    monkeypatch.setattr(sweep_module, "SECOND", 0)
    monkeypatch.setattr(RowNorms, "fits", property(lambda self: False, lambda self, x: None), False)
    report = swept(scaled(1.05), 6)
    assert report.passed
    assert "6 of 6 problems were only asked for numbers that are none" in report.outcomes[0].message
    assert not swept(nan_now_and_then, 12).passed


# --- what is drawn --------------------------------------------------------------------------------


def test_a_problem_is_drawn_again_to_the_same_bits_whatever_came_before():
    plan = Plan(Space(dtype="bfloat16"), Conventions(), 2**14)
    recipe = plan.recipe(3, 11)
    for number in range(9):
        drawn(plan.recipe(4, number))
    again = Plan(Space(dtype="bfloat16"), Conventions(), 2**14).recipe(3, 11)
    assert again == recipe
    first, second = drawn(recipe), drawn(again)
    for name in ("q", "k", "v", "mask", "bias"):
        one, other = getattr(first.problem, name), getattr(second.problem, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert torch.equal(first.dout, second.dout)
    assert torch.equal(first.dlse, second.dlse)
    assert not torch.equal(first.problem.q, drawn(replace(recipe, seed=1)).problem.q)


def test_lengths_are_log_uniform_and_every_option_is_drawn():
    plan = Plan(Space(), Conventions(), 2**25)
    recipes = [plan.recipe(0, number) for number in range(600)]
    for letter in "TS":
        lengths = np.array([getattr(recipe, letter) for recipe in recipes])
        assert lengths.min() == 1
        assert 2048 < lengths.max() <= 4096
        assert 40 < np.median(lengths) < 100
    for name in ("mask", "causal", "window", "bias", "scale"):
        share = sum(bool(getattr(recipe, name)) for recipe in recipes) / len(recipes)
        assert 0.2 < share < 0.5, name
    assert {recipe.mask for recipe in recipes} == {None, *MASKS}
    assert {recipe.bias for recipe in recipes} == {None, *BIASES}
    assert {recipe.distribution for recipe in recipes} == set(DISTRIBUTIONS)
    assert any(recipe.K < recipe.H for recipe in recipes)
    assert any(recipe.T == recipe.S > 64 for recipe in recipes)


def test_sizes_that_are_given_are_kept_and_others_fit():
    plan = Plan(Space(sizes={"T": (300, 301), "D": (64,)}), Conventions(), 2**16)
    recipes = [plan.recipe(1, number) for number in range(100)]
    assert {recipe.T for recipe in recipes} == {300, 301}
    assert {recipe.D for recipe in recipes} == {64}
    assert all(sweep_module._scores(recipe) <= 2**16 for recipe in recipes)
    for recipe in recipes:
        assert all(one.T in (300, 301) and one.D == 64 for one in simplify(recipe, plan))


def test_structure_that_is_refused_is_not_drawn():
    structure = frozenset({"rank 3"})
    plan = Plan(Space(structure=structure), Conventions(), 2**20)
    recipes = [plan.recipe(0, n) for n in range(60)]
    recipes += [one for recipe in recipes for one in simplify(recipe, plan)]
    assert all(recipe.T == recipe.S and recipe.D == recipe.E for recipe in recipes)
    assert all(recipe.H == recipe.K and recipe.lead == () for recipe in recipes)
    assert all(recipe.D % 8 == 0 for recipe in recipes)
    rank_2 = Plan(Space(structure=frozenset({"rank 2", "T != S"})), Conventions(), 2**20)
    found = [rank_2.recipe(0, n) for n in range(60)]
    assert all(recipe.lead is None and recipe.T <= recipe.S for recipe in found)


def test_where_empty_rows_are_not_wanted_every_query_sees_a_key():
    space = Space(dtype="float32")
    plan = Plan(space, Conventions(), 2**14, empty_rows=False)
    for number in range(60):
        problem = drawn(plan.recipe(2, number)).problem
        lse = npattn.torch.api.evaluate(problem, engine="dense").lse
        assert not torch.isneginf(lse).any()
    filled = Plan(space, Conventions(hidden_fill=-1e9), 2**14)
    assert filled.options == {"bias", "scale"}
    assert Plan(space, Conventions(bias="before_scale"), 2**14).options == {
        "mask", "causal", "window", "scale",
    }  # fmt: skip


# --- nothing is moved -----------------------------------------------------------------------------


def test_nothing_but_a_few_numbers_comes_to_the_host(monkeypatch):
    moved = []

    def watch(name):
        plain = getattr(torch.Tensor, name)

        def watched(self, *args, **words):
            moved.append((name, self.numel()))
            return plain(self, *args, **words)

        monkeypatch.setattr(torch.Tensor, name, watched)

    sweep = Sweep(trial_of(sdpa, sizes={}))
    for name in ("cpu", "numpy", "tolist", "item", "__array__", "__bool__", "__float__"):
        watch(name)
    found = [sweep.run(12), sweep.long()]
    assert [outcome.status for outcome in found] == ["passed", "passed"]
    assert max(size for _, size in moved) <= 16
    assert len(moved) < 16 * 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_said(capsys):
    with pytest.raises(OptionError, match="device is 'cuda', which torch cannot use here"):
        check(sdpa, framework="torch", device="cuda", sweep=3)


def test_what_a_sweep_cannot_be_is_said():
    def numpy_function(q: np.ndarray, k: np.ndarray, v: np.ndarray):
        return q

    for words, f, message in (
        ({"sweep": 3}, numpy_function, "sweep is 3, must be 0 for functions of numpy arrays"),
        ({"sweep": -1}, sdpa, "sweep is -1, must be an integer ≥ 0"),
        ({"sweep": True}, sdpa, "sweep is True, must be an integer ≥ 0"),
        ({"only": ["sweep"]}, sdpa, "sweep is 0, must be how many problems sweep may draw"),
        ({"only": ["swept"]}, sdpa, "'swept' is not a rule, must be one of .*sweep, long"),
    ):
        with pytest.raises(OptionError, match=message):
            check(f, **words)


def test_a_call_that_runs_out_of_memory_is_asked_with_half_the_sizes():
    def hungry(q, k, v):
        if q.shape[-2] > 300:
            raise torch.OutOfMemoryError("no room")
        return sdpa(q, k, v)

    outcome = Sweep(trial_of(hungry, sizes={"D": (8,)})).long()
    assert outcome.status == "passed"
    assert outcome.message == "2 calls ran out of memory, and were asked with half the sizes"


def test_after_a_device_has_died_nothing_is_asked_of_it(monkeypatch):
    def dies(q, k, v):
        monkeypatch.setattr(sweep_module.Sweep, "_alive", lambda self: False)
        raise RuntimeError("an illegal memory access")

    trial = trial_of(dies)
    outcome = Sweep(trial).run(3)
    assert outcome.status == "error"
    assert outcome.problem is None
    assert "an illegal memory access" in outcome.message


def test_shown_says_of_every_result_whether_it_is_right(capsys):
    recipe = Recipe(lead=(2,), H=1, K=1, T=9, S=7, D=8, E=5, seed=4)
    assert show_problem(Implementation(sdpa), recipe, conventions=TOP_LEFT)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:7] for line in lines[1:]].count("ok    o") == 2
    assert not show_problem(Implementation(WRONG, framework="torch"), recipe)
    assert "WRONG o[" in capsys.readouterr().out


def test_a_failure_holds_up_against_compare():
    [found] = swept(WRONG, 6).outcomes
    got = WRONG(*(torch.from_numpy(x) for x in (found.problem.q, found.problem.k, found.problem.v)))
    [line] = compare(got.numpy(), found.problem)
    assert line.ratio == pytest.approx(found.worst, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cuda_device_it_sweeps_too(dtype):
    report = check(
        sdpa, framework="torch", device="cuda", sweep=100, only=SWEEPS, conventions=TOP_LEFT,
        dtypes=(dtype,),
    )  # fmt: skip
    assert report.passed, str(report)
    assert not check(WRONG, framework="torch", device="cuda", sweep=20, only=["sweep"]).passed
