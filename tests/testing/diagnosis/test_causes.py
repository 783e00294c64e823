"""Causes are named where they explain, and only there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import npattn
from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES, Attention
from npattn.problem import Cotangents
from npattn.testing import check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis import causes, search
from npattn.testing.diagnosis.conventions import convention_candidates, with_another
from npattn.testing.diagnosis.evidence import observe
from npattn.testing.diagnosis.ratios import ratio_candidates
from tests.testing import sequence_kernels
from tests.testing.diagnosis.failures import fail, trial_of


@pytest.fixture
def no_steps(monkeypatch):
    """Leave out the many candidates that a test is not about."""
    monkeypatch.setattr(search, "step_candidates", lambda evidence: ())
    monkeypatch.setattr(search, "mistake_candidates", lambda evidence, without: ())


@pytest.fixture(autouse=True)
def few_probes(monkeypatch):
    monkeypatch.setattr(search, "PROBES", 5)


def attend(q, k, v, causal=False, **conventions):
    return npattn.attention(
        q, k, v, causal=causal, conventions=Conventions(**{"causal": "bottom_right"} | conventions)
    ).astype(q.dtype)


def gradients(dout, q, k, v, factor=1.0):
    g = npattn.backward(npattn.forward(q, k, v), dout.astype(float))
    return g.q.astype(q.dtype), (g.k * factor).astype(k.dtype), g.v.astype(v.dtype)


def diagnose(judged, without=()):
    return causes.diagnose(judged, without, contrasts=0)


def only_cause(trial, outcomes):
    _, causes = diagnose([(trial, outcomes)])
    assert [o.id for o in outcomes] == sorted(rule for cause in causes for rule in cause.rules)
    assert len(causes) == 1, causes
    return causes[0]


@pytest.mark.thorough
def test_other_heads_are_a_convention():
    def tiled(q, k, v):
        return attend(q, k, v, kv_head="tile")

    trial = trial_of(tiled)
    cause = only_cause(trial, fail(trial, ["groups"]))
    assert (cause.kind, cause.name) == ("convention", "kv_head=tile")
    assert "h % K" in cause.text
    assert cause.conventions == Conventions(kv_head="tile")


@pytest.mark.thorough
def test_scale_missing_in_dk_is_a_ratio():
    def backward(dout, q, k, v):
        return gradients(dout, q, k, v, factor=q.shape[-1] ** 0.5)

    trial = trial_of(attend, backward, features=())
    cause = only_cause(trial, fail(trial, ["plain", "wide"]))
    assert cause.kind == "ratio"
    assert cause.text == "dk is √D times too large (2.65 at D = 7): the scale is missing in dk"


@pytest.mark.thorough
def test_constant_factor_is_told_from_a_size():
    def backward(dout, q, k, v):
        return gradients(dout, q, k, v, factor=7.0)

    trial = trial_of(attend, backward, features=())
    cause = only_cause(trial, fail(trial, ["plain"]))  # D = 7
    assert cause.text == "dk is multiplied by 7"


@pytest.mark.thorough
def test_number_that_fits_one_problem_of_several_is_no_cause():
    def some(q, k, v):
        return attend(q, k, v) * np.float32(1.37 if q.shape[-1] == 7 else 1.91)

    trial = trial_of(some)
    assert only_cause(trial, fail(trial, ["plain", "wide"])).kind == "unexplained"


def test_nan_is_no_factor():
    def nan(q, k, v):
        return np.full_like(attend(q, k, v), np.nan)

    trial = trial_of(nan)
    assert only_cause(trial, fail(trial, ["plain"])).kind != "ratio"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "recipe"), [("heads-of-padded-group", "groups of 3"), ("dbias-of-all-samples", "bias")]
)
@pytest.mark.broad
def test_known_mistake_gets_its_sentence(name, recipe):
    mistake = MISTAKES[name]
    trial = trial_of(mistake.forward, mistake.backward)
    cause = only_cause(trial, fail(trial, [recipe]))
    assert name in (cause.name, *cause.also)
    assert cause.kind == "step" or cause.text == mistake.sentence.rstrip(".")


@pytest.mark.thorough
def test_mistake_left_out_is_not_named():
    mistake = MISTAKES["heads-all-of-first"]
    trial = trial_of(mistake.forward, mistake.backward)
    _, causes = diagnose([(trial, fail(trial, ["groups"]))], without={"heads-all-of-first"})
    assert all(cause.name != "heads-all-of-first" for cause in causes)


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
    assert (cause.kind, cause.name) == ("dtype", "o: bfloat16")


@pytest.mark.thorough
def test_noise_is_not_explained():
    def noisy(q, k, v):
        out = npattn.attention(q, k, v)
        return (out * np.random.default_rng(0).normal(1, 0.1, out.shape)).astype(q.dtype)

    trial = trial_of(noisy)
    cause = only_cause(trial, fail(trial, ["plain", "wide"]))
    assert cause.kind == "unexplained"
    assert cause.text == "no known mistake reproduces this: o out of tolerance"


@pytest.mark.thorough
def test_results_that_nothing_explains_are_named_in_one_order():
    def noise(x):
        return (x * np.random.default_rng(0).normal(1, 0.1, x.shape)).astype(x.dtype)

    def backward(dout, q, k, v):
        return {"k": noise(k), "q": noise(q), "v": noise(v)}

    trial = trial_of(lambda q, k, v: noise(npattn.attention(q, k, v)).astype(q.dtype), backward)
    cause = only_cause(trial, fail(trial, ["plain", "wide"]))
    assert cause.text == "no known mistake reproduces this: o, dq, dk, dv out of tolerance"


def test_right_results_get_no_cause():
    trial = trial_of(attend, features=())
    cause = only_cause(trial, fail(trial, ["plain", "wide"]))
    assert cause.kind == "unexplained"


@pytest.mark.thorough
def test_two_conventions_are_one_cause():
    def both(q, k, v, causal=False):
        return attend(q, k, v, causal=causal and "top_left", kv_head="tile")

    trial = trial_of(both)
    cause = only_cause(trial, fail(trial, ["groups", "causal"]))
    assert cause.name == "causal=top_left, kv_head=tile"


@pytest.mark.thorough
def test_convention_beside_a_leaking_nan():
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
    _, causes = diagnose([(trial, [base, replace(row, problem=problem, cotangents=cotangents)])])
    assert "lse_base=2" in {cause.name for cause in causes}


class TwoConventions(Attention):
    """Causal is aligned top-left, and lse has base 2: each problem shows both."""

    def diagonal(self, T, S):
        return np.arange(T)[:, None]

    def lse(self, pivot, total, e_sink):
        return super().lse(pivot, total, e_sink) / np.log(2)

    def use_dlse(self, dlse, live):
        return dlse / np.log(2)


def test_two_conventions_in_one_problem_are_one_cause(no_steps):
    wrong = TwoConventions()
    trial = trial_of(wrong.forward, wrong.backward, features=("causal", "return_lse"))
    cause = only_cause(trial, fail(trial, ["causal"]))
    assert cause.name == "causal=top_left, lse_base=2"


def swapped(q, k, v, **options):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return npattn.attention(q, k, v, **options).swapaxes(1, 2).astype(q.dtype)


def swapped_gradients(dout, q, k, v, **options):
    dout, q, k, v = (x.swapaxes(1, 2) for x in (dout, q, k, v))
    g = npattn.backward(npattn.forward(q, k, v, **options), dout.astype(float))
    return tuple(x.swapaxes(1, 2).astype(q.dtype) for x in (g.q, g.k, g.v))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("declared", "layout", "forward", "backward"),
    [(None, "BTHD", swapped, swapped_gradients), ("BTHD", "BHTD", attend, gradients)],
)
def test_other_layout_is_a_cause(declared, layout, forward, backward):
    trial = trial_of(forward, backward, features=(), layout=declared)
    square, long = fail(trial, ["square", "plain"])  # T ≠ S are two sets of heads that do not fit
    raised = replace(long, status="error", kind="raised", message="ValueError: heads")
    cause = only_cause(trial, [square, raised])
    assert (cause.kind, cause.name) == ("layout", layout)
    assert f"--layout {layout}" in cause.text


def swap_heads(x):
    return x.swapaxes(1, 2) if x.ndim == 4 else x


def sequence_first(q, k, v, *, return_lse=False):
    fwd = npattn.forward(*map(swap_heads, (q, k, v)))
    o = swap_heads(fwd.out).astype(q.dtype)
    return (o, fwd.lse.astype(np.float32)) if return_lse else o


def lse_first(q, k, v, *, return_lse=False):
    fwd = npattn.forward(q, k, v)
    o = fwd.out.astype(q.dtype)
    return (fwd.lse.astype(np.float32), o) if return_lse else o


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("f", "text"),
    [(sequence_first, "the layout is BTHD"), (lse_first, "it returns (lse, o), must return (o,")],
)
def test_results_in_another_order_are_a_cause_beside_lse(f, text):
    trial = trial_of(f, features=("return_lse",))
    cause = only_cause(trial, fail(trial, ("square",)))
    assert cause.kind == "layout"
    assert cause.text.startswith(text)


@pytest.mark.thorough
def test_queries_and_keys_that_are_exchanged_are_a_cause():
    trial = trial_of(lambda q, k, v: attend(k, q, v), features=())
    cause = only_cause(trial, fail(trial, ("square",)))
    assert cause.text == "q and k are exchanged"


@pytest.mark.thorough
def test_exception_in_either_layout_is_no_layout():
    def raises(q, k, v):
        if q.shape[-1] == 13:  # as in "wide"
            raise ValueError("no 13")
        return swapped(q, k, v)

    trial = trial_of(raises)
    square, wide = fail(trial, ["square", "wide"])
    raised = replace(wide, status="error", kind="raised", message="ValueError: no 13")
    _, causes = diagnose([(trial, [square, raised])])
    assert sorted(cause.kind for cause in causes) == ["layout", "raised"]


class SecondBehindFirst(Attention):
    """dk lacks the scale on every problem, and causal is aligned top-left."""

    def diagonal(self, T, S):
        return np.arange(T)[:, None]

    def dk(self, dx, c, seen):
        return super().dk(dx, c, seen) / c.scale


@pytest.mark.thorough
def test_second_mistake_is_found_beside_one_that_shows_everywhere(no_steps):
    wrong = SecondBehindFirst()
    trial = trial_of(wrong.forward, wrong.backward, features=("causal",))
    _, causes = diagnose([(trial, fail(trial, ["wide", "causal"]))])
    assert sorted(cause.name for cause in causes) == ["causal=top_left", "dk: √D"]


@pytest.mark.thorough
def test_cause_seen_at_a_size_of_0_alone_says_so():
    class NoSinkWithoutKeys(Attention):
        def lse(self, pivot, total, e_sink):
            return super().lse(pivot, total - e_sink * (self.S == 0), e_sink)

        def scores(self, c):
            self.S = c.k.shape[-2]
            return super().scores(c)

    wrong = NoSinkWithoutKeys()
    trial = trial_of(wrong.forward, wrong.backward, features=("sinks", "return_lse"))
    _, (cause,) = diagnose([(trial, fail(trial, ["no keys"]))], without=set(MISTAKES))
    assert (cause.kind, cause.text) == ("step", "lse leaves out the sink, where S = 0")
    assert "sizes" in cause.topic


@pytest.mark.thorough
def test_two_mistakes_are_two_causes():
    def both(q, k, v, causal=False):
        return attend(q, k, v, causal=causal, kv_head="tile") * (-1 if causal else 1)

    trial = trial_of(both)
    outcomes, causes = diagnose([(trial, fail(trial, ["groups", "causal"]))])
    assert {cause.name for cause in causes} == {"kv_head=tile", "o: −1"}
    assert [o.diagnosis for o in outcomes] == [
        next(c.text for c in causes if o.id in c.rules) for o in outcomes
    ]


def test_exceptions_are_grouped_by_message():
    def raises(q, k, v, causal=False):
        raise ValueError("no causal" if causal else "no")

    trial = trial_of(raises)
    outcomes = [
        *fail(trial, ["plain", "wide"], "a", "error", kind="raised", message="ValueError: no"),
        *fail(trial, ["causal"], "b", "error", kind="raised", message="ValueError: no causal"),
    ]
    _, causes = diagnose([(trial, outcomes)])
    assert [(c.kind, len(c.rules)) for c in causes] == [("raised", 2), ("raised", 1)]
    assert causes[0].text == "it raises: ValueError: no"


def test_passed_outcomes_have_no_diagnosis():
    trial = trial_of(attend, features=())
    outcomes, causes = diagnose([(trial, fail(trial, ["plain"], status="passed"))])
    assert causes == ()
    assert outcomes[0].diagnosis is None


def test_no_factor_is_named_within_a_wide_tolerance():
    """A row of −1e9 leaves a tolerance in which 2 is as good a factor of dv as √5."""
    right = Attention()
    trial = trial_of(right.forward, right.backward)
    recipe = Recipe(lead=(2,), H=1, T=3, S=3, D=5, E=3, seed=2, bias="-1e9 rows")
    problem = trial.problem(recipe)
    evidence = observe(trial, problem, trial.cotangents(recipe, problem), recipe.view)
    wide = np.full_like(evidence.exact["dv"], 0.3) * abs(evidence.exact["dv"])
    vars(evidence)["tolerance"] = {**evidence.tolerance, "dv": wide}
    wrong = replace(evidence, observed={**evidence.observed, "dv": (2.1 * evidence.exact["dv"],)})
    vars(wrong)["tolerance"] = vars(evidence)["tolerance"]
    assert wrong.wrong.keys() == {"dv"}
    assert not list(ratio_candidates(wrong))
    plain = replace(recipe, bias=None)
    problem = trial.problem(plain)
    evidence = observe(trial, problem, trial.cotangents(plain, problem), plain.view)
    twice = replace(evidence, observed={**evidence.observed, "dv": (2 * evidence.exact["dv"],)})
    assert "dv: 2" in [candidate.name for candidate in ratio_candidates(twice)]


@pytest.mark.parametrize("field", ["hidden_add", "hidden_fill"])
@pytest.mark.parametrize("declared", [{}, {"hidden_add": -1e4}, {"hidden_fill": -1e9}])
def test_no_pair_of_conventions_fills_hidden_scores_twice(field, declared):
    """A problem that hides nothing tells neither, and each is paired with any other."""
    trial = SimpleNamespace(conventions=Conventions(**declared))
    hides, plain = (
        SimpleNamespace(trial=trial, problem=Recipe(mask=mask).problem())
        for mask in ("matrix", None)
    )
    named = [c for c in convention_candidates(hides) if f"{field}=" in c.name]
    others = [two.conventions for own in named for two in with_another(own, plain)]
    assert len(others) > 10
    assert all(None in (c.hidden_add, c.hidden_fill) for c in others)


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
