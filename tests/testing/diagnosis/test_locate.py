"""The first wrong quantity of small wrong functions, one step changed in each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import npattn
import npattn.testing
from npattn.mistakes import MISTAKES
from npattn.mistakes.register import after, one_result
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.amount import describe
from npattn.testing.diagnosis.evidence import observe
from npattn.testing.diagnosis.explore import Point, narrow, sample_of
from npattn.testing.diagnosis.locate import is_one_factor, locate, result, weights_fault
from npattn.testing.diagnosis.precision import _rounds_alike as rounds_alike
from npattn.testing.diagnosis.read import Quantity, Reader
from tests.testing.diagnosis.failures import (
    attend,
    attention_with,
    evidence_of,
    trial_of,
    trial_with,
)

BASE = Recipe(lead=(2,), H=3, K=3, T=5, S=11, D=7, E=13, seed=3)


def from_index(n, axis, f=lambda x: 0 * x):
    """Return a function that changes an array from an index on."""

    def change(x, *_):
        shape = [1] * x.ndim
        shape[axis] = -1
        return np.where((np.arange(x.shape[axis]) >= n).reshape(shape), f(x), x)

    return change


def in_softmax(i, f):
    return {"softmax": one_result(i, f)}


def in_gradient(i, f):
    return {"gradients": one_result(i, f)}


def with_inputs(**fields):
    """Return a step in place of `results` or `softmax` that changes inputs by functions of them."""

    def step(up, *args):
        changed = [
            a._replace(**{n: f(a) for n, f in fields.items()}) if hasattr(a, "keep") else a
            for a in args
        ]
        return up(*changed)

    return step


def mean_where_empty(p, s, c, live):
    return np.where(live.any(-1, keepdims=True), p, 1 / s.shape[-1])


def nan_where_empty(p, s, c, live):
    return np.where(live.any(-1, keepdims=True), p, np.nan)


def rolled_values(up, w, x, live):
    forward = (w.shape[-1], x.shape[-1]) == (BASE.S, BASE.E)
    return up(w, np.roll(x, 1, -3) if forward else x, live)


def first_of_group(up, dx, x):
    return dx.reshape(*dx.shape[:-3], x.shape[-3], -1, *dx.shape[-2:])[..., 0, :, :]


def kept_keys(n):
    return lambda up, c: up(c) & (np.arange(c.k.shape[-2]) < n)


def capped_with_bias(up, x, visible, c):
    return np.where(visible, c.softcap * np.tanh((x + c.bias) / c.softcap), -np.inf)


def visible_to_backward(up, s, c, live):
    return up(s.max() + np.zeros(s.shape), c, live | True)


def keys_counted_twice(up, s, c, live):
    return up(s + np.log(np.where(np.arange(s.shape[-1]) >= 7, 2, 1)), c, live)


FORWARD = {
    "scale": ("s", "scale", {}, {"product": after(lambda x: 1.1 * x)}),
    "bias twice": ("s", "bias", {"bias": "full"}, {"bias": after(lambda x: 2 * x)}),
    "softcap left out": ("s", "softcap", {"softcap": 1.5}, {"cap": lambda up, x, c: x}),
    "bias in softcap": (
        "s", "content", {"softcap": 1.5, "bias": "full"}, {"final": capped_with_bias},
    ),
    "keys of another head": (
        "s", "kv head", {}, {"product": with_inputs(k=lambda c: np.roll(c.k, 1, -3))},
    ),
    "scores of another query": ("s", "moved", {}, {"product": after(lambda x: np.roll(x, 1, -2))}),
    "mask ignored": (
        "visible", "extra", {"mask": "full"}, {"mask": lambda up, mask, c: mask | True},
    ),
    "diagonal": ("visible", "zeros", {"causal": True}, {"offset": lambda up, T, S: 0}),
    "window": (
        "visible", "zeros", {"window": (2, 1)}, {"sides": after(lambda sides: (sides[0] - 1, 1))},
    ),
    "window of rows whose other weights underflow": (
        "visible", "zeros", {"window": (2, 1), "distribution": "saturated"},
        {"sides": after(lambda sides: (sides[0] - 1, 1))},
    ),
    "last keys forgotten": ("visible", "zeros", {}, {"visible": kept_keys(8)}),
    "all keys forgotten": ("visible", "rows of zeros", {}, {"visible": kept_keys(0)}),
    "keys counted twice": ("p", "factor", {}, {"softmax": keys_counted_twice}),
    "not normalised": ("p", "rows", {}, in_softmax(0, lambda p, *_: 2 * p)),
    "sinks left out": (
        "p", "rows", {"sinks": True}, {"softmax": with_inputs(sinks=lambda c: c.sinks - 99)},
    ),
    "dropout without rate": (
        "p", "rows", {"dropout": 0.3}, {"results": with_inputs(keep=lambda c: c.keep > 0)},
    ),
    "dropout ignored": (
        "p", "dropout", {"dropout": 0.3}, {"results": with_inputs(keep=lambda c: 1.0)},
    ),
    "mean where no key is": (
        "p", "empty rows", {"mask": "empty rows"}, in_softmax(0, mean_where_empty),
    ),
    "NaN where no key is": ("nan", "nan", {"mask": "empty rows"}, in_softmax(0, nan_where_empty)),
    "lse in base 2": ("lse", "", {}, {"lse": after(lambda x: x / np.log(2))}),
    "lse where no key is": (
        "lse", "", {"mask": "empty rows"}, {"lse": after(lambda x: np.maximum(x, -99))},
    ),
    "columns of o": ("o", "", {}, {"results": one_result(0, from_index(8, -1))}),
    "rows of o": ("o", "zeros", {}, {"results": one_result(0, from_index(3, -2))}),
    "o of another query": (
        "o", "moved", {}, {"results": one_result(0, lambda o, c: np.roll(o, 1, -2))},
    ),
    "values of another head": ("o", "kv head", {}, {"masked_matmul": rolled_values}),
    "gate": ("o", "", {"gate": "full"}, {"results": with_inputs(gate=lambda c: c.gate**2)}),
}  # fmt: skip
BACKWARD = {
    "dv": ("dv", "rows", {}, in_gradient(2, lambda dv, *_: 2 * dv)),
    "dv and dk of a group": ("dv", "", {"H": 6}, {"share_back": first_of_group}),
    "delta": ("delta", "delta", {}, {"delta": after(lambda x: 0 * x)}),
    "delta of late rows": ("delta", "delta", {}, {"delta": after(from_index(3, -2))}),
    "delta of another query": ("delta", "delta", {}, {"delta": after(lambda x: np.roll(x, 1, -2))}),
    "dlse": ("delta", "dlse", {}, {"use_dlse": lambda up, dlse, live: 0}),
    "dp without dropout": ("dp", "content", {"dropout": 0.3}, {"undrop": lambda up, dp, c: dp}),
    "slope of softcap": ("ds", "content", {"softcap": 1.5}, {"cap_slope": lambda up, c: 1.0}),
    "ds by p twice": ("ds", "terms", {}, {"jacobian": lambda up, p, *args: p * up(p, *args)}),
    "dq": ("dq", "", {}, in_gradient(0, lambda dq, *_: 3 * dq)),
    "columns of dq": ("dq", "", {}, in_gradient(0, from_index(4, -1))),
    "dk": ("dk", "by query", {}, in_gradient(1, lambda dk, *_: 3 * dk)),
    "keys of dk": ("dk", "by query", {}, in_gradient(1, from_index(8, -2))),
    "dbias": ("dbias", "", {"bias": "full"}, {"reduce_bias": after(lambda x: 2 * x)}),
    "dsinks": ("dsinks", "", {"sinks": True}, {"ds_sink": after(lambda x: -x)}),
    "recomputed scale": ("s", "scale", {}, {"recompute": with_inputs(scale=lambda c: c.scale / 2)}),
    "recomputed mask": ("visible", "extra", {"mask": "full"}, {"rebuild": visible_to_backward}),
    "recomputed sinks": (
        "p", "rows", {"sinks": True}, {"rebuild": with_inputs(sinks=lambda c: c.sinks - 99)},
    ),
}  # fmt: skip
RECOMPUTED = ("s", "visible", "p")


@pytest.mark.every
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@pytest.mark.broad(3)
def test_first_wrong_step(name):
    step, form, options, steps = (FORWARD | BACKWARD)[name]
    fault = locate(evidence_of(trial_with(**steps), replace(BASE, **options)))
    assert (fault.step, fault.form) == (step, form)
    assert fault.backward == (name in BACKWARD and step in RECOMPUTED)
    assert fault.wrong.any()
    assert not (fault.wrong & ~fault.known).any()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("keys counted twice", lambda b, h, t, s: s >= 7),
        ("last keys forgotten", lambda b, h, t, s: s >= 8),
        ("columns of o", lambda b, h, t, e: e >= 8),
        ("delta of late rows", lambda b, h, t: t >= 3),
        ("columns of dq", lambda b, h, t, d: d >= 4),
        ("scores of another query", lambda b, h, t: t >= 0),
    ],
)
def test_wrong_elements_are_those_that_were_changed(name, where):
    _, _, options, steps = (FORWARD | BACKWARD)[name]
    fault = locate(evidence_of(trial_with(**steps), replace(BASE, **options)))
    expected = np.broadcast_to(
        where(*np.ogrid[tuple(map(slice, fault.wrong.shape))]), fault.wrong.shape
    )
    np.testing.assert_array_equal(fault.wrong, expected)


def test_a_right_function_has_no_fault():
    assert locate(evidence_of(trial_with(), BASE)) is None


def test_weights_alone_are_those_returned_as_p():
    fault = locate(evidence_of(trial_with(returned_weights=lambda up, p, c: 2 * p), BASE))
    assert (fault.step, fault.quantity.name) == ("p", "weights")


def test_a_result_of_another_shape_is_not_nan():
    def sums(q, k, v):
        return attention_with().forward(q, k, v).sum(-1, keepdims=True)

    fault = locate(evidence_of(trial_of(sums, features=()), BASE))
    assert fault.step in ("", "o", "layout")


def test_a_function_that_refuses_unit_columns_is_wrong_in_no_step():
    def refuses(q, k, v):
        if np.any(v == 0):
            raise ValueError("zeros")
        return 2 * attention_with().forward(q, k, v)

    fault = locate(evidence_of(trial_of(refuses, features=()), BASE))
    assert fault.step == ""


def test_a_function_that_is_not_linear_in_the_values_has_no_wrong_weights():
    """The weights that unit columns show do not give o again."""
    squared = trial_with(results=one_result(0, lambda o, c: o * abs(o)))
    fault = locate(evidence_of(squared, BASE))
    assert fault.step == "o"


def test_a_result_of_another_shape_is_wrong_everywhere():
    evidence = evidence_of(trial_with(results=one_result(0, lambda o, c: o[..., :2])), BASE)
    assert result(evidence, "o").wrong.all()


def test_without_gradients_the_forward_is_read():
    f = attention_with(**FORWARD["keys counted twice"][3])
    fault = locate(evidence_of(trial_of(f.forward), BASE))
    assert (fault.step, fault.form) == ("p", "factor")


def test_both_keys_and_values_of_another_sample():
    def first(up, *arrays, **options):
        c = up(*arrays, **options)
        return c._replace(k=c.k[:1] + 0 * c.k, v=c.v[:1] + 0 * c.v)

    fault = locate(evidence_of(trial_with(inputs=first), BASE))
    assert (fault.step, fault.form) == ("s", "kv head")
    assert fault.wrong.tolist() == [[False] * 3, [True] * 3]


def test_values_that_are_clipped_do_not_halve_the_weights():
    """Unit columns show P / 2, which gives another o than the one that is wrong."""

    def clip(up, *arrays, **options):
        c = up(*arrays, **options)
        return c._replace(v=np.clip(c.v, -0.5, 0.5))

    fault = locate(evidence_of(trial_with(inputs=clip), BASE))
    assert (fault.step, fault.form) == ("o", "unlike P")


def test_values_that_are_not_read_are_of_o():
    """No weights can be read of an o that is the same with any values."""
    recipe = replace(BASE, E=BASE.D)
    fault = locate(evidence_of(trial_with(results=with_inputs(v=lambda c: c.k)), recipe))
    assert (fault.step, fault.form) == ("o", "")
    assert fault.wrong.all()


def test_a_weight_that_changes_alone_is_of_no_score():
    """A wrong score changes what all weights of its row are divided by."""

    def more(up, s, c, live):
        p, *others = up(s, c, live)
        return np.where(np.arange(p.shape[-1]) == 4, p + 0.1 * abs(np.sin(s)), p), *others

    fault = locate(evidence_of(trial_with(softmax=more), BASE))
    assert fault.step == "p"
    assert (np.argwhere(fault.wrong)[:, -1] == 4).all()


def test_scores_that_are_clipped_give_weight_to_keys_that_have_none():
    def clip(up, x, c):
        return np.clip(up(x, c), -70, 70)

    recipe = Recipe(lead=(2,), H=1, K=1, T=2, S=3, D=8, E=7, seed=13, distribution="one-hot")
    fault = locate(evidence_of(trial_with(cap=clip), recipe))
    assert (fault.step, fault.form) == ("s", "content")


def test_weights_that_are_right_where_they_are_returned_are_not_wrong():
    evidence = evidence_of(trial_with(results=one_result(0, lambda o, c: 1.5 * o)), BASE)
    fault = locate(evidence)
    assert (fault.step, fault.form) == ("o", "rows")
    assert describe([Point(BASE, evidence, fault)]) == "× 1.5"


def test_values_of_other_keys_are_of_o():
    """Weight that keys lack is not hidden if other keys have it instead."""

    def stale(up, *arrays, **options):
        c = up(*arrays, **options)
        s = np.arange(c.v.shape[-2])
        return c._replace(v=c.v[..., np.where(s % 8 >= 4, s - 4, s), :])

    fault = locate(evidence_of(trial_with(inputs=stale), BASE))
    assert (fault.step, fault.form) == ("o", "values of other keys")
    lost = np.arange(fault.wrong.shape[-1]) % 8 >= 4
    assert (fault.wrong == lost).all()


def test_values_of_hidden_keys_are_of_o_and_of_no_mask():
    """A key that the mask hides gives its value to another, and takes no weight of the rest."""

    def later(up, *arrays, **options):
        c = up(*arrays, **options)
        s = np.arange(c.v.shape[-2])
        return c._replace(v=c.v[..., np.where(s < 2, s + 11, s), :])

    recipe = replace(BASE, lead=(1,), S=13, mask="padding")
    fault = locate(evidence_of(trial_with(inputs=later), recipe))
    assert (fault.step, fault.form) == ("o", "values of other keys")
    assert not fault.wrong[..., 2:].any()


def quantity(share, tolerance=0.01):
    """Return random numbers, and the same off by shares of them."""
    want = np.random.default_rng(3).normal(size=share.shape)
    known = np.ones(want.shape, bool)
    return Quantity("o", "e", want * (1 + share), want, tolerance * abs(want), known)


@pytest.mark.parametrize("n", [60, 600])
def test_errors_of_all_sizes_are_no_factor(n):
    """Those out of tolerance are the largest alone, and nearly alike."""
    shares = np.linspace(0, 0.013, n)
    off = quantity(shares)
    wrong = (off.got / off.want)[off.wrong]
    assert np.ptp(wrong) < 0.004
    assert not is_one_factor(off)
    assert is_one_factor(quantity(np.where(shares < 0.01, 0, 0.012)))
    assert not is_one_factor(quantity(np.where(shares < 0.01, 0.006, 0.012)))


@pytest.mark.parametrize(
    ("dtype", "step", "size"), [("float32", "lse", 1e-3), ("bfloat16", "precision", 5e-3)]
)
def test_small_errors_of_one_sign_are_roundings_of_16_bits_alone(dtype, step, size):
    above = after(lambda x: x + size * (2 + np.sin(999 * x)))
    fault = locate(evidence_of(trial_with(dtype, lse=above), BASE))
    assert (fault.step, fault.quantity.name) == (step, "lse")


@pytest.mark.parametrize("step", [1, -1])
def test_errors_of_another_result_that_is_far_off_are_no_roundings(step):
    """The same o has an lse that no rounding gives."""

    def off(up, *args):
        o, lse, p = up(*args)
        noise = 1e-3 * np.sin(999 * o)
        return o + noise, lse + noise[..., 0] * (1 if step > 0 else 40000), p

    fault = locate(evidence_of(trial_with(results=off), BASE))
    assert (fault.step == "precision") == (step > 0)


def test_roundings_of_long_sums_add_up_in_16_bits():
    def off(up, *args):
        o, *others = up(*args)
        return o + 0.03 * abs(o).max() * np.sin(999 * o), *others

    steps = [
        locate(evidence_of(trial_with(dtype, results=off), replace(BASE, H=1, K=1, T=T))).step
        for dtype, T in (("bfloat16", 5), ("bfloat16", 1031), ("float32", 1031))
    ]
    assert [step == "precision" for step in steps] == [False, True, False]


def test_weights_that_are_hardly_off_have_no_wrong_rows():
    evidence = evidence_of(trial_with(), BASE)
    reader = Reader(evidence.trial, evidence.problem, evidence.cotangents, evidence.view)
    p, _ = reader.p
    near = replace(p, got=p.want + 1.5 * p.tolerance)
    fault = weights_fault(evidence, reader, near, None, backward=True)
    assert (fault.step, fault.form) == ("p", "")
    assert describe([Point(BASE, evidence, fault)]) == ""


def test_rows_that_lose_all_keys_are_not_said_to_be_right():
    """Query 0 sees one key, which the backward hides: its weight is 0, as if it saw none."""

    def strict(up, s, c, live):
        p, p_sink = up(s, c, live)
        T, S = p.shape[-2:]
        return np.where(np.arange(S) < np.arange(T)[:, None] + S - T, p, 0), p_sink

    fault = locate(evidence_of(trial_with(rebuild=strict), replace(BASE, S=5, causal=True)))
    assert (fault.step, fault.backward) == ("visible", True)
    assert fault.wrong[..., 1:, :].any()
    assert not fault.known[..., 0, 0].any()


def test_rows_that_see_no_key_have_what_others_lack_by_a_wrong_mask():
    """Sample b has the mask of the other: one row of one key lost it, an empty row has it."""

    def other_mask(q, k, v, mask):
        return npattn.attention(q, k, v, mask=mask[::-1]).astype(q.dtype)

    mask = np.array([True, False]).reshape(2, 1, 1, 1)
    base = evidence_of(trial_of(attend), replace(BASE, S=1))
    problem = base.problem.replace(mask=mask)
    fault = locate(observe(trial_of(other_mask), problem, base.cotangents))
    assert (fault.step, fault.facts["kinds"]) == ("visible", ["extra", "zeros"])
    assert fault.wrong.all()


def test_weights_below_all_floats_that_rise_are_of_the_row():
    """A sink takes all weight, and is left out."""
    trial = trial_with(softmax=with_inputs(sinks=lambda c: 0 * c.sinks - 99))
    base = evidence_of(trial, replace(BASE, sinks=True))
    problem = base.problem.replace(sinks=base.problem.sinks + 999)
    evidence = observe(trial, problem, base.cotangents)
    fault = locate(evidence)
    assert (fault.step, fault.form, bool(fault.wrong.all())) == ("p", "rows", True)
    assert describe([Point(BASE, evidence, fault)]) == "the sink is left out of the sum"


@pytest.mark.parametrize("S", [1, 11])
def test_the_weight_of_a_row_of_one_key_is_no_score(S):
    """It is 1 whatever its score is, and half of it is a sum."""

    def half(q, k, v, window=None):
        return npattn.attention(q, k, v, window=window).astype(q.dtype) / 2

    fault = locate(evidence_of(trial_of(half), replace(BASE, S=S, window=(0, 0))))
    assert (fault.step, fault.form, bool(fault.wrong.any())) == ("p", "rows", True)


def test_gradients_through_lse_alone_are_not_right_for_being_zero():
    trial = trial_with(gradients=one_result(0, lambda dq, *_: np.roll(dq, 1, -1)))
    problem = trial.problem(BASE)
    cotangents = trial.cotangents(BASE, problem)
    dlse = np.random.default_rng(3).standard_normal((2, BASE.H, BASE.T)).astype(np.float32)
    alone = replace(cotangents, dout=0 * cotangents.dout, dlse=dlse)
    fault = locate(observe(trial, problem, alone))
    assert (fault.step, fault.form) == ("dq", "")


def test_values_left_out_are_of_o_and_hidden_keys_of_the_mask():
    """The weight of a key that is hidden goes to the others; that of a value left out, to none."""

    def without_value(up, *arrays, **options):
        c = up(*arrays, **options)
        return c._replace(v=np.where(np.arange(c.v.shape[-2])[:, None] < 6, c.v, 0))

    def without_key(up, *arrays, **options):
        c = up(*arrays, **options)
        seen = np.arange(c.k.shape[-2]) < 6
        return c._replace(mask=seen if c.mask is None else c.mask & seen)

    fault = locate(evidence_of(trial_with(inputs=without_value), BASE))
    assert (fault.step, fault.form) == ("o", "values left out")
    assert (fault.wrong == (np.arange(fault.wrong.shape[-1]) >= 6)).all()
    fault = locate(evidence_of(trial_with(inputs=without_key), BASE))
    assert (fault.step, fault.form) == ("visible", "zeros")


# --- what one key or one sample does not tell ---


def test_an_error_along_one_key_is_no_delta():
    """Row 0 sees one key: whatever is wrong in its dq is a multiple of that key."""
    steps = in_gradient(0, lambda dq, c, *_: dq + _first_row(c.k))
    fault = locate(evidence_of(trial_with(**steps), replace(BASE, S=5, causal=True)))
    assert (fault.step, fault.quantity.name) == ("dq", "dq")


def _first_row(k):
    """Return k in its first row, and 0 in all others."""
    return np.where((np.arange(k.shape[-2]) == 0)[:, None], k, 0)


def test_a_head_that_has_all_of_another_has_its_o():
    """Queries, keys and values are those of head 0: nothing before o is wrong."""

    def first_head(up, c):
        return up(
            c._replace(**{x: getattr(c, x)[..., :1, :, :] + 0 * getattr(c, x) for x in "qkv"})
        )

    evidence = evidence_of(trial_with(results=first_head), BASE)
    fault = locate(evidence)
    assert fault.step == "o"
    assert not fault.wrong[:, 0].any()
    assert describe([Point(BASE, evidence, fault)]) == "values of head 0"


def test_a_head_of_few_keys_has_no_source():
    """One key of a sample fits many others by chance."""
    shifted = with_inputs(**{x: lambda c, x=x: np.roll(getattr(c, x), 1, -3) for x in "kv"})
    recipes = [replace(BASE, lead=(5,), S=n, E=2, seed=9) for n in (1, 2, 7)]
    evidence = [evidence_of(trial_with(results=shifted), r) for r in recipes]
    points = [Point(r, e, locate(e)) for r, e in zip(recipes, evidence, strict=True)]
    assert "of key head (h − 1) % K" in describe(points[::-1])
    assert describe(points[:1]) == "values of another sample or head"


def test_heads_that_a_sum_leaves_out_are_of_the_sum():
    """dv has no query heads, of which some could be wrong."""
    evidence = evidence_of(trial_with(share_back=first_of_group), replace(BASE, H=6))
    dv = evidence.without({"dk"})
    fault = locate(dv)
    assert (fault.step, fault.quantity.name) == ("dv", "dv")
    assert fault.wrong.all()


def test_the_bias_of_another_sample_is_a_source():
    """A key that the own bias hides takes weight then, and yet no mask is wrong."""

    def first_sample(up, c):
        return up(c._replace(bias=c.bias[:1] + 0 * np.isfinite(c.bias)))

    trial = trial_with(bias=first_sample)
    recipes = [replace(BASE, lead=(n,), bias="-inf padding", seed=4) for n in (3, 4)]
    evidence = [evidence_of(trial, r) for r in recipes]
    points = [Point(r, e, locate(e)) for r, e in zip(recipes, evidence, strict=True)]
    assert {p.fault.step for p in points} == {"s"}
    assert describe(points) == "sample b has the bias of sample 0"


def test_a_bias_whose_infinities_are_lost_is_not_that_of_another_sample():
    """Sample 0 alone has −∞, without which it is the bias of sample 1, which has its own."""
    trial = trial_with(bias=lambda up, c: np.where(np.isneginf(c.bias), 0, c.bias))
    recipe = replace(BASE, bias="full")
    problem = recipe.problem()
    bias = np.zeros((2, 1, 1, BASE.S), "float32")
    bias[0, ..., 5:] = -np.inf
    evidence = observe(trial, problem.replace(bias=bias), trial.cotangents(recipe, problem))
    assert locate(evidence).step == "visible"


def test_a_bias_of_another_sample_is_that_of_the_right_rows_too():
    """Sample 0 has the bias of sample 1, which has its own."""
    trial = trial_with(bias=lambda up, c: up(c._replace(bias=c.bias[[1, 1]])))
    evidence = evidence_of(trial, replace(BASE, bias="full"))
    sources = locate(evidence).facts["sources"]
    assert "sample b has the bias of sample B − 1" in sources
    assert "sample b has the bias of sample B − 1 − b" not in sources


# --- results of another shape ---


def without_sum(dout, q, k, v, *, out, lse, factor=1):
    dk, dv = (np.broadcast_to(x, (*q.shape[:-3], *x.shape[-3:])) for x in (k, v))
    grads = npattn.backward(npattn.forward(q, dk, dv), dout)
    return tuple(x.astype(q.dtype) for x in (grads.q, factor * grads.k, grads.v))


def test_a_result_of_another_shape_is_wrong_in_whole_problems_and_has_no_window():
    report = npattn.testing.check(attend, backward=without_sum, only=["structure"], examples=1)
    cause = next(c for c in report.causes if c.step == "dk")
    assert (cause.where, cause.reading) == ("B > 1", None)
    assert "not summed over the axes that were broadcast, shape (2, 2, " in cause.text


@pytest.mark.parametrize(("factor", "unsummed"), [(1, True), (2, False)])
def test_a_gradient_that_is_not_summed_where_k_was_broadcast_is_said_to_be(factor, unsummed):
    """Neither its elements nor its place are told, and nothing is compared with it."""

    trial = trial_of(attend, partial(without_sum, factor=factor))
    evidence = evidence_of(trial, replace(BASE, broadcast=True))
    assert not rounds_alike(trial.rounding, evidence)
    fault = locate(evidence)
    assert (fault.step, fault.form, fault.facts["unsummed"]) == ("dk", "shape", unsummed)
    assert fault.facts["shapes"] == ((2, 3, 11, 7), (1, 3, 11, 7))


def test_a_shape_that_does_not_broadcast_has_no_sum():
    trial = trial_of(attend, lambda dout, q, k, v, *, out, lse: (q, k, v[..., :5]))
    fault = locate(evidence_of(trial, BASE))
    assert (fault.form, fault.facts["unsummed"]) == ("shape", False)


def test_rows_of_two_keys_tell_a_factor_of_the_bias():
    trial = trial_with(bias=after(lambda x: np.log(2) * x))
    fault = locate(evidence_of(trial, replace(BASE, T=2, S=2, bias="full")))
    assert (fault.step, fault.form) == ("s", "bias")
    assert fault.facts["bias"] == pytest.approx(np.log(2) - 1, rel=1e-3)
    one = locate(evidence_of(trial, replace(BASE, lead=(1,), H=1, K=1, T=1, S=2, bias="full")))
    assert (one.step, one.form) != ("s", "bias")  # of one ratio, any one number is the cause


def test_rows_that_see_one_other_key_lost_their_own_and_both_sides_tell():
    def last_alone(q, k, v, mask):
        last = np.arange(k.shape[-2]) == k.shape[-2] - 1
        return npattn.attention(q, k, v, mask=mask & False | last).astype(q.dtype)

    base = evidence_of(trial_of(attend), replace(BASE, S=3))
    visible = np.tri(BASE.T, 3, 3 - BASE.T, dtype=bool)
    visible[:2, 0] = True
    problem = base.problem.replace(mask=visible)
    evidence = observe(trial_of(last_alone), problem, base.cotangents)
    point = Point(replace(BASE, S=3, mask="full"), evidence, locate(evidence))
    fault = point.fault
    assert (fault.step, fault.facts["kinds"]) == ("visible", ["extra", "zeros"])
    assert (fault.wrong == (visible != (np.arange(3) == 2))).all()
    assert narrow(sample_of(point, fault), point, fault, set()).known.all()


@pytest.mark.parametrize(
    ("name", "options", "step", "where"),
    [
        ("dsinks-without-dlse", {"sinks": True}, "dsinks", "dlse and sinks"),
        ("empty-row-takes-dlse", {"mask": "empty rows"}, "dq", "rows that see no key and dlse"),
        ("delta-without-dweights", {}, "delta", "dweights"),
        ("dweights-ignored", {}, "dp", "dweights"),
        ("delta-without-sink", {"sinks": True}, "delta", ""),
    ],
)
def test_gradients_that_are_right_without_what_comes_back_say_so(name, options, step, where):
    mistake = MISTAKES[name]
    trial = trial_of(mistake.forward, mistake.backward)
    recipe = replace(BASE, **options)
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem, weights="dweights" in where)
    dlse = np.random.default_rng(17).standard_normal(cotangents.dlse.shape).astype("float32")
    fault = locate(observe(trial, problem, replace(cotangents, dlse=dlse)))
    assert (fault.step, fault.facts.get("where", "")) == (step, where)
