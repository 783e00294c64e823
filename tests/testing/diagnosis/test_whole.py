"""Conventions, layouts, formats and exceptions are causes as a whole, and tried before reading."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import npattn
from npattn.conventions import Conventions
from npattn.mistakes import Attention
from npattn.problem import Cotangents
from npattn.testing import check
from npattn.testing.diagnosis.conventions import convention_candidates
from npattn.testing.report.cause import STEPS
from npattn.testing.report.words import convention_flag
from tests.testing import sequence_kernels
from tests.testing.diagnosis.failures import attend, diagnose, fail, only_cause, trial_of


def gradients(dout, q, k, v):
    g = npattn.backward(npattn.forward(q, k, v), dout.astype(float))
    return tuple(x.astype(q.dtype) for x in (g.q, g.k, g.v))


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ({"kv_head": "tile"}, ["groups"]),
        ({"causal": "top_left"}, ["causal"]),
        ({"causal": "top_left", "kv_head": "tile"}, ["groups", "causal"]),
    ],
)
@pytest.mark.thorough
def test_another_convention_is_named_with_its_flag(declared, names):
    def f(q, k, v, causal=False):
        return attend(q, k, v, causal, declared)

    trial = trial_of(f)
    cause = only_cause(trial, fail(trial, names))
    assert cause.name == ", ".join(f"{n}={x}" for n, x in declared.items())
    assert cause.conventions == Conventions(**declared)
    assert convention_flag(cause) == " ".join(f"--convention {n}={x}" for n, x in declared.items())
    assert cause.step in STEPS[4:9]


class TwoConventions(Attention):
    """Causal is aligned top-left, and lse has base 2: each problem shows both."""

    def diagonal(self, T, S):
        return np.arange(T)[:, None]

    def lse(self, pivot, total, e_sink):
        return super().lse(pivot, total, e_sink) / np.log(2)

    def use_dlse(self, dlse, live):
        return dlse / np.log(2)


def test_two_conventions_in_one_problem_are_one_cause():
    wrong = TwoConventions()
    trial = trial_of(wrong.forward, wrong.backward, features=("causal", "return_lse"))
    cause = only_cause(trial, fail(trial, ["causal"]))
    assert cause.name == "causal=top_left, lse_base=2"


@pytest.mark.thorough
def test_a_convention_beside_a_leaking_nan():
    """A convention that explains a NaN, and other problems less well, is not added."""

    def both(q, k, v, mask=None, *, return_lse=False):
        fwd = npattn.forward(q, k, v, mask, conventions=Conventions(lse_base="2"))
        out = (fwd.out + 0 * v.sum(-2, keepdims=True)).astype(q.dtype)
        return (out, fwd.lse) if return_lse else out

    trial = trial_of(both)
    base, row = fail(trial, ["plain", "plain"])
    q, v = row.problem.q[..., :1, :], row.problem.v.copy()
    v[..., 0, :] = np.nan
    problem = row.problem.replace(q=q, v=v, mask=np.zeros((1, 5), bool))
    cotangents = Cotangents(row.cotangents.dout[..., :1, :], None)
    found = diagnose(trial, [base, replace(row, problem=problem, cotangents=cotangents)])
    assert "lse_base=2" in {cause.name for cause in found}


@pytest.mark.parametrize("declared", [{}, {"hidden_add": -1e4}, {"hidden_fill": -1e9}])
def test_no_pair_of_conventions_fills_hidden_scores_twice(declared):
    pairs = [c.conventions for c in convention_candidates(Conventions(**declared), 2)]
    assert len(pairs) > 100
    assert all(None in (c.hidden_add, c.hidden_fill) for c in pairs)


@pytest.mark.thorough
def test_a_convention_is_predicted_on_the_keys_of_each_sequence(monkeypatch):
    """A padded problem has the keys of a sample last; the function gets no padding."""
    top_left = ("packed", "end], causal)", "end], causal, 0)")
    monkeypatch.setitem(sequence_kernels.MISTAKES, "top left", top_left)
    rules = ("agreement-o", "empty-row")
    options = {"framework": "numpy", "dtypes": "float32", "examples": 10}
    (cause,) = check(sequence_kernels.build("top left"), only=rules, **options).causes
    assert cause.conventions == Conventions(causal="top_left")
    assert {rule.partition("[")[0] for rule in cause.rules} == {*rules}


def swap_axes(q, k, v, **options):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return npattn.attention(q, k, v, **options).swapaxes(1, 2).astype(q.dtype)


def swapped_gradients(dout, q, k, v, **options):
    dout, q, k, v = (x.swapaxes(1, 2) for x in (dout, q, k, v))
    g = npattn.backward(npattn.forward(q, k, v, **options), dout.astype(float))
    return tuple(x.swapaxes(1, 2).astype(q.dtype) for x in (g.q, g.k, g.v))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("declared", "layout", "forward", "backward"),
    [(None, "BTHD", swap_axes, swapped_gradients), ("BTHD", "BHTD", attend, gradients)],
)
def test_other_layout_is_a_cause(declared, layout, forward, backward):
    trial = trial_of(forward, backward, features=(), layout=declared)
    square, long = fail(trial, ["square", "plain"])  # T ≠ S are two sets of heads that do not fit
    raised = replace(long, status="error", kind="raised", message="ValueError: heads")
    cause = only_cause(trial, [square, raised])
    assert (cause.step, cause.name) == ("layout", layout)
    assert f"--layout {layout}" in cause.text


def lse_first(q, k, v, *, return_lse=False):
    fwd = npattn.forward(q, k, v)
    o = fwd.out.astype(q.dtype)
    return (fwd.lse.astype(np.float32), o) if return_lse else o


@pytest.mark.thorough
def test_results_in_another_order_are_a_cause():
    trial = trial_of(lse_first, features=("return_lse",))
    cause = only_cause(trial, fail(trial, ["square"]))
    assert cause.step == "layout"
    assert cause.text.startswith("it returns (lse, o), must return (o,")


@pytest.mark.thorough
def test_an_exception_in_either_layout_is_no_layout():
    def raises(q, k, v):
        if q.shape[-1] == 13:  # as in "wide"
            raise ValueError("no 13")
        return swap_axes(q, k, v)

    trial = trial_of(raises)
    square, wide = fail(trial, ["square", "wide"])
    raised = replace(wide, status="error", kind="raised", message="ValueError: no 13")
    assert sorted(c.step for c in diagnose(trial, [square, raised])) == ["layout", "refusal"]


def test_exceptions_are_grouped_by_message():
    def raises(q, k, v, causal=False):
        raise ValueError("no causal" if causal else "no")

    trial = trial_of(raises)
    outcomes = [
        *fail(trial, ["plain", "wide"], "a", "error", kind="raised", message="ValueError: no"),
        *fail(trial, ["causal"], "b", "error", kind="raised", message="ValueError: no causal"),
    ]
    found = diagnose(trial, outcomes)
    assert [(c.step, len(c.rules)) for c in found] == [("refusal", 2), ("refusal", 1)]
    assert found[0].text == "it raises: ValueError: no"


@pytest.mark.thorough
def test_dtype_that_a_sum_is_rounded_to():
    """Partial sums in bfloat16 leave a result whose elements are bfloat16 numbers."""
    import ml_dtypes

    def halves(q, k, v):
        even = (np.arange(k.shape[-2]) % 2 == 0)[:, None]
        first, second = (npattn.attention(q, k, v * keys) for keys in (even, ~even))
        return sum(x.astype(ml_dtypes.bfloat16) for x in (first, second)).astype(q.dtype)

    trial = trial_of(halves, features=())
    cause = only_cause(trial, fail(trial, ["plain", "wide"]))
    assert (cause.step, cause.name) == ("precision", "o: bfloat16")


def test_a_convention_that_a_right_result_refutes_is_none():
    """Only short calls are aligned top-left: longer ones are right under the declared alignment."""

    def short(q, k, v, causal=False):
        own = {"causal": "top_left"} if q.shape[-2] <= 8 else {}
        return attend(q, k, v, causal, own)

    trial = trial_of(short)
    cause = only_cause(trial, fail(trial, ["causal"]))
    assert cause.conventions is None
    assert cause.step == "visible"


def gradients_of_exchanged(dout, q, k, v):
    """Gradients of what was used as k and v, in this order."""
    return gradients(dout, q, *((v, k) if k.shape == v.shape else (k, v)))


def back_from_exchanged(dout, q, k, v):
    """Gradients as autograd gives them: of each argument, whatever it was used as."""
    dq, dv, dk = gradients_of_exchanged(dout, q, k, v)
    return (dq, dk, dv) if k.shape == v.shape else (dq, dv, dk)


@pytest.mark.parametrize("backward", [None, back_from_exchanged, gradients_of_exchanged])
def test_keys_and_values_that_are_exchanged_are_named(backward):
    def f(q, k, v):
        return attend(q, v, k) if k.shape == v.shape else attend(q, k, v)

    trial = trial_of(f, backward)
    cause = only_cause(trial, fail(trial, ["equal widths"]))
    assert cause.text == "k and v are exchanged where their shapes are equal, D = E"
    assert (cause.step, cause.where, cause.name) == ("s", "D = E", "k and v exchanged")


@pytest.mark.parametrize("moved_first", [True, False])
def test_heads_that_are_reshaped_are_named(moved_first):
    def reshape(x):
        if moved_first:
            return x.swapaxes(1, 2).reshape(x.shape)
        return x.reshape(x.shape[0], x.shape[2], x.shape[1], -1).swapaxes(1, 2)

    trial = trial_of(lambda q, k, v: attend(*map(reshape, (q, k, v))))
    cause = only_cause(trial, fail(trial, ["groups", "wide"]))
    assert (cause.step, cause.where, cause.name) == ("layout", "H > 1", "heads reshaped")


def test_queries_and_keys_that_are_exchanged_are_named():
    trial = trial_of(lambda q, k, v: attend(k, q, v) if k.shape == q.shape else attend(q, k, v))
    cause = only_cause(trial, fail(trial, ["square"]))
    assert (cause.step, cause.where) == ("s", "T = S and H = K")
