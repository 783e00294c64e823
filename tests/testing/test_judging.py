"""check: refusals are not sampled; defects are found, shrunk and reproducible."""

import json
import math
import re

import numpy as np
import pytest
from hypothesis import settings

import npattn
from npattn.conventions import Conventions
from npattn.errors import NpattnError
from npattn.problem.options import OPTIONS
from npattn.testing import Implementation, Recipe, Rounding, check
from npattn.testing.judging import name_rules
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets.numpy import flash, flash_backward, naive

FEW = 8  # examples
OF_EVERY_RULE = min(settings().max_examples // 15, FEW)  # 4; in the nightly profile 8


def outcome_of(report, rule):
    (outcome,) = (o for o in report.outcomes if o.rule == rule)
    return outcome


def statuses(report):
    return {o.rule: o.status for o in report.outcomes}


def judge(f, *only, examples=FEW, **kwargs):
    only = only or ("agreement-o",)
    return check(f, only=only, examples=examples, diagnosis=False, **kwargs)


def plain(q, k, v):
    return flash(q, k, v)


# --- structure ------------------------------------------------------------------------------------

REFUSALS = {
    "K < H": lambda q, k, v: q.ndim > 2 and k.shape[-3] < q.shape[-3],
    "T > S": lambda q, k, v: q.shape[-2] > k.shape[-2],
    "T != S": lambda q, k, v: q.shape[-2] != k.shape[-2],
    "E != D": lambda q, k, v: q.shape[-1] != v.shape[-1],
    "rank 2": lambda q, k, v: q.ndim == 2,
    "rank 3": lambda q, k, v: q.ndim == 3,
    "rank 5": lambda q, k, v: q.ndim == 5,
    "D % 8": lambda q, k, v: q.shape[-1] % 8,
    "broadcast": lambda q, k, v: q.shape[:-3] != k.shape[:-3],
    "B = 0": lambda q, k, v: 0 in q.shape[:-3],
    "H = 0": lambda q, k, v: q.ndim > 2 and q.shape[-3] == 0,
    "T = 0": lambda q, k, v: q.shape[-2] == 0,
    "S = 0": lambda q, k, v: k.shape[-2] == 0,
    "D = 0": lambda q, k, v: q.shape[-1] == 0,
    "E = 0": lambda q, k, v: v.shape[-1] == 0,
}
VIEWS = {
    "transposed": lambda x: x.ndim > 2 and 0 < x.strides[-3] < x.strides[-2],
    "stepped": lambda x: x.strides[-1] == 2 * x.itemsize < x.strides[-2],
    "reversed": lambda x: x.strides[-2] < 0,
    "expanded": lambda x: 0 in x.strides and x.size > 0,
}


def refusing(condition):
    refused = []

    def f(q, k, v):
        if condition(q, k, v):
            refused.append(q.shape)
            raise NotImplementedError("not this one")
        return flash(q, k, v)

    f.refused = refused
    return f


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.broad
def test_refused_structure_is_listed_and_not_sampled(name):
    f = refusing(REFUSALS[name])
    report = judge(f, examples=20, framework="numpy")
    line = f"float32: {name}: refused (raised NotImplementedError: not this one)"
    assert line in report.refused
    assert report.passed, str(report)
    probes = len(f.refused)
    assert probes <= 6  # probed alone, not sampled
    assert outcome_of(report, "agreement-o").examples == 20


@pytest.mark.parametrize("name", VIEWS)
def test_refused_views_are_listed_and_not_sampled(name):
    f = refusing(lambda *arrays: any(VIEWS[name](x) for x in arrays if min(x.shape) > 1))
    report = judge(f, "views", examples=20)
    assert any(line.startswith(f"float32: {name}: refused") for line in report.refused)
    assert report.passed, str(report)


def test_views_rule_needs_an_accepted_view():
    def f(q, k, v):
        if not all(x.flags.c_contiguous for x in (q, k, v)):
            raise ValueError("contiguous only")
        return flash(q, k, v)

    report = judge(f, "views")
    refused = {line.split(": ")[1] for line in report.refused if "contiguous only" in line}
    assert refused == set(VIEWS)
    assert outcome_of(report, "views").message == "refuses every view that is not contiguous"


def test_implementation_that_refuses_everything_is_untested():
    def f(q: np.ndarray, k, v, mask=None):
        raise ValueError("never")

    report = check(f, examples=FEW)
    assert not report.tested
    assert not report.passed
    assert statuses(report) == {"structure": "not applicable"}
    assert any("even the plainest problem is refused" in line for line in report.refused)
    assert "never" in str(report)


def test_refusal_by_backward_counts():
    def backward(dout, q, k, v, *, out, lse, dlse=None):
        if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
            raise NotImplementedError("no GQA in backward")
        return flash_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)

    def f(q, k, v, return_lse=False):
        return flash(q, k, v, return_lse=return_lse)

    report = judge(f, "agreement-dq", backward=backward)
    assert any("K < H: refused (backward raised" in line for line in report.refused)
    assert report.passed, str(report)


def test_backward_that_refuses_everything_is_listed():
    def backward(dout, q, k, v):
        raise NotImplementedError("soon")

    report = judge(plain, "agreement-o", "agreement-dq", backward=backward)
    assert any(line.startswith("float32: gradients: refused") for line in report.refused)
    assert statuses(report)["agreement-o"] == "passed"
    assert statuses(report)["agreement-dq"] == "not applicable"


@pytest.mark.thorough
def test_missing_gradients_are_listed():
    def backward(dout, q, k, v, **options):
        out, lse = flash(q, k, v, return_lse=True, **options)
        grads = flash_backward(dout, q, k, v, out=out, lse=lse, **options)
        return {n: grads[n] for n in "qk"}

    def f(q, k, v, *, bias=None, sinks=None):
        return flash(q, k, v, bias=bias, sinks=sinks)

    report = judge(f, "agreement-d", backward=backward)
    for name in ("dbias", "dsinks", "dv"):
        assert f"float32: {name}: backward does not return it" in report.refused
    assert statuses(report)["agreement-dq"] == "passed"
    assert statuses(report)["agreement-dv"] == "not applicable"
    assert outcome_of(report, "agreement-dsinks").message == "gives no dsinks"


@pytest.mark.thorough
@pytest.mark.parametrize("letter", "TSDE")
@pytest.mark.broad
def test_failure_at_size_0_is_reported_alone(letter):
    def f(q, k, v):
        out = flash(q, k, v)
        sizes = {"T": q.shape[-2], "S": k.shape[-2], "D": q.shape[-1], "E": v.shape[-1]}
        if sizes[letter]:
            return out
        return out + 1 if out.size else np.zeros((3,), q.dtype)

    report = check(f, examples=FEW, only=["agreement-o", "shape-dtype"])
    assert statuses(report) == {
        "structure": "failed",
        "agreement-o": "passed",
        "shape-dtype": "passed",
    }
    assert f"float32: {letter} = 0: accepted and wrong, so not sampled again" in report.refused
    assert outcome_of(report, "structure").message.startswith(f"{letter} = 0: ")
    assert 0 in (outcome_of(report, "structure").problem.q.shape) + (
        outcome_of(report, "structure").problem.v.shape
    )


@pytest.mark.thorough
def test_general_failure_is_not_blamed_on_size_0():
    report = check(lambda q, k, v: 2 * flash(q, k, v), examples=FEW, only=["agreement-o"])
    assert statuses(report) == {"agreement-o": "failed"}


# --- options --------------------------------------------------------------------------------------


def without_softcap(error, values):
    def f(q, k, v, *, softcap=None, scale=None):
        if softcap is not None:
            values.append(softcap)
            raise error("no softcap yet")
        return flash(q, k, v, scale=scale)

    return f


def test_option_that_always_raises_a_mistake_is_an_error():
    values = []
    report = judge(without_softcap(KeyError, values), examples=20)
    assert statuses(report) == {"option-softcap": "error", "agreement-o": "passed"}
    assert not report.passed
    assert values == list(OPTIONS["softcap"].examples)  # each once
    assert "no softcap yet" in outcome_of(report, "option-softcap").message
    assert any("softcap: raised, so it is not sampled again" in line for line in report.refused)


@pytest.mark.parametrize("error", [AssertionError, NotImplementedError])
def test_option_whose_every_value_is_refused_is_no_failure(error):
    values = []
    report = judge(without_softcap(error, values), examples=20)
    assert statuses(report) == {"agreement-o": "passed"}
    assert report.passed
    first = OPTIONS["softcap"].examples[0]
    assert values == [*OPTIONS["softcap"].examples, first]  # once more at other sizes
    assert any(line.startswith("float32: softcap: refused (raised") for line in report.refused)


def test_exception_on_accepted_structure_is_an_error():
    def f(q, k, v, mask=None):
        if mask is not None and not mask.any(-1).all():
            raise FloatingPointError("a row sees nothing")
        return flash(q, k, v, mask)

    report = judge(f, "empty-row", "agreement-o")
    assert outcome_of(report, "empty-row").status == "error"
    assert "raised FloatingPointError: a row sees nothing" in str(report)
    assert statuses(report)["agreement-o"] == "passed"  # sampled without empty rows
    assert any("fully masked queries are wrong" in line for line in report.refused)
    assert not report.passed


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda o: None, id="None"),
        pytest.param(lambda o: [o], id="list"),
        pytest.param(lambda o: "o", id="text"),
    ],
)
def test_unreadable_result_never_passes(wrong):
    calls = []

    def f(q: np.ndarray, k, v, scale=None):
        calls.append(q.shape)
        return flash(q, k, v) if scale is None else wrong(flash(q, k, v))

    report = judge(f)
    assert statuses(report)["option-scale"] == "error"
    assert not report.passed


UNREADABLE = {
    "returned builtins.NoneType, must be a NumPy array": lambda o: None,
    "returned a tuple or list of 1, must return o alone": lambda o: [o],
    "returned builtins.str, must be a NumPy array": lambda o: "o",
    "dtype object, must hold numbers": lambda o: o.astype(object),
}


@pytest.mark.parametrize(("text", "wrong"), UNREADABLE.items())
def test_unreadable_plain_result_is_a_structure_error(text, wrong):
    report = judge(lambda q, k, v: wrong(flash(q, k, v)), framework="numpy")
    assert statuses(report)["structure"] == "error"
    assert text in outcome_of(report, "structure").message
    assert outcome_of(report, "structure").script()
    assert not report.passed


def test_missing_lse_is_an_error():
    def f(q, k, v, *, return_lse=False):
        return flash(q, k, v)

    report = judge(f)
    assert statuses(report)["structure"] == "error"
    assert "one result for return_lse=True, must return (o, lse)" in str(report)
    assert not report.passed


PACKS = [
    (lambda *g: g[:2], "backward returned 2 arrays, must return (dq, dk, dv) or a mapping"),
    (lambda *g: g[0], "backward returned one result, must return (dq, dk, dv) or a mapping"),
    (lambda *g: {"Q": g[0]}, "backward"),
]


@pytest.mark.parametrize(("pack", "text"), PACKS)
def test_unreadable_gradient_is_an_error_beside_judged_output(pack, text):
    def backward(dout, q, k, v):
        return pack(q, k, v)

    report = judge(plain, backward=backward)
    assert statuses(report)["gradients"] == "error"
    assert text in outcome_of(report, "gradients").message
    assert statuses(report)["agreement-o"] == "passed"
    assert not report.passed


@pytest.mark.parametrize("kind", [NameError, TypeError, ValueError, RuntimeError])
def test_a_backward_that_raises_on_the_plainest_problem_is_an_error(kind):
    def backward(dout, q, k, v):
        raise kind("of the backward")

    report = judge(plain, backward=backward)
    assert not report.passed
    assert f"backward raised {kind.__name__}" in outcome_of(report, "gradients").message
    assert "without backward=" in outcome_of(report, "gradients").message
    assert not any("no backward= was given" in line for line in report.untested)
    assert statuses(report)["agreement-o"] == "passed"


def fails_by_mistake(q, k, v):
    return undefined(q)  # noqa: F821


@pytest.mark.thorough
@pytest.mark.parametrize("isolate", [False, True])
def test_an_exception_has_the_place_in_code_of_the_user(isolate):
    report = judge(fails_by_mistake, isolate=isolate)
    (line,) = (line for line in report.refused if "nothing: " in line)
    assert "even the plainest problem fails (raised NameError: " in line
    number = fails_by_mistake.__code__.co_firstlineno + 1
    assert line.endswith(f" (test_judging.py:{number}))")


def test_what_a_library_raises_has_the_place_of_its_call():
    report = judge(lambda q, k, v: np.concatenate([q, v[..., :1, :]], -1))
    (line,) = (line for line in report.refused if "nothing: " in line)
    assert "raised ValueError: all the input" in line
    assert re.search(r"\(test_judging\.py:\d+\)\)$", line)


def test_a_backward_that_is_said_to_be_missing_is_a_refusal():
    def backward(dout, q, k, v):
        raise NotImplementedError("the backward comes later")

    report = judge(plain, backward=backward)
    assert report.passed
    assert any("gradients: refused (backward raised NotImpl" in line for line in report.refused)
    assert not any("no backward= was given" in line for line in report.untested)


@pytest.mark.parametrize(("kind", "passes"), [(NameError, False), (RuntimeError, True)])
def test_mistakes_in_a_gradient_of_autograd_are_errors(kind, passes):
    torch = pytest.importorskip("torch")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        @staticmethod
        def backward(ctx, dout):
            raise kind("derivative")

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return Attention.apply(q, k, v)

    report = check(f, examples=FEW, only=["agreement-o"], diagnosis=False)
    assert report.passed == passes
    assert passes == any("gradients: refused" in line for line in report.refused)


def test_gradients_that_one_dtype_lacks_are_asked_in_the_next():
    def backward(dout, q, k, v):
        if q.dtype == np.float16:
            raise NotImplementedError("not in float16")
        out, lse = flash(q, k, v, return_lse=True)
        grads = flash_backward(dout, q, k, v, out=out, lse=lse)
        return {name: 2 * x for name, x in grads.items()}

    dtypes = ("float16", "float32")
    report = judge(plain, "agreement-dq", backward=backward, dtypes=dtypes)
    found = {o.dtype: o.status for o in report.outcomes if o.rule == "agreement-dq"}
    assert found == {"float16": "not applicable", "float32": "failed"}


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex128"])
def test_non_real_result_fails(dtype):
    report = judge(lambda q, k, v: flash(q, k, v).astype(dtype), "agreement-o", "shape-dtype")
    assert statuses(report)["shape-dtype"] == "failed"
    assert not report.passed


def test_unknown_gradient_name_does_not_stop_the_judge():
    def backward(dout, q, k, v):
        return {"q": q, "k": k, "v": v, "mask": q}

    report = judge(plain, "shape-dtype", backward=backward)
    assert not report.passed or any("mask" in line for line in report.refused)


def test_fully_masked_rows_do_not_hide_other_defects():
    def f(q, k, v, mask=None, *, scale=None):
        return naive(q, np.repeat(k, q.shape[-3] // (k.shape[-3] or 1), -3) if q.ndim > 2 else k,
                     np.repeat(v, q.shape[-3] // (v.shape[-3] or 1), -3) if q.ndim > 2 else v,
                     mask)  # fmt: skip

    report = judge(f, "empty-row", "agreement-o", "rows-sum-to-one", sizes={"S": (3, 7)})
    assert statuses(report)["empty-row"] == "failed"
    assert statuses(report)["agreement-o"] == "failed"  # the scale is ignored
    assert statuses(report)["rows-sum-to-one"] == "passed"
    assert "nan" not in outcome_of(report, "agreement-o").message


# --- side effects, races, seeds -------------------------------------------------------------------


@pytest.mark.thorough
def test_write_to_inputs_is_detected():
    def f(q, k, v, mask=None):
        out = flash(q, k, v, mask)
        if mask is not None:
            np.logical_not(mask, out=mask)
        return out

    report = judge(f, "inputs-unchanged", examples=20)
    assert outcome_of(report, "inputs-unchanged").message == "mask was written to"


@pytest.mark.thorough
def test_flaky_implementation_fails_with_problem():
    rng = np.random.default_rng(0)

    def f(q, k, v):
        out = flash(q, k, v)
        return out + (rng.random() < 0.4)

    report = judge(f, "agreement-o", "repeatable", examples=20)
    assert statuses(report)["agreement-o"] == statuses(report)["repeatable"] == "failed"
    assert outcome_of(report, "agreement-o").problem is not None


@pytest.mark.thorough
def test_flaky_failure_during_shrinking_still_fails():
    calls = []

    def f(q, k, v):
        calls.append(1)
        return flash(q, k, v) + (len(calls) == 40)

    report = judge(f, examples=20)
    assert outcome_of(report, "agreement-o").status == "failed"


def softmax_over_1_too_many(q, k, v, scale=None, *, return_lse=False):
    out, lse = flash(q, k, v, scale=scale, return_lse=True)
    total = np.exp(lse.astype(np.float64))[..., None]
    out = (out * (total / (1 + total))).astype(q.dtype)
    return (out, lse) if return_lse else out


def without_versions(report):
    data = report.as_dict()
    return json.dumps(data, default=str)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_seed_determines_report():
    kwargs = {"examples": 20, "only": ["agreement-o", "agreement-lse"]}
    first, again = (check(softmax_over_1_too_many, seed=3, **kwargs) for _ in range(2))
    assert str(first) == str(again)
    assert without_versions(first) == without_versions(again)
    assert "seed 3" in str(first)
    other = check(plain, seed=4, **kwargs)
    assert other.outcomes[0].worst != check(plain, seed=5, **kwargs).outcomes[0].worst


def test_raising_failure_is_shrunk_without_flaky_note():
    def f(q, k, v, *, causal=False, window=None, scale=None):  # causal is True where T ≠ S
        return npattn.attention(q, k, v, causal=causal, window=window, scale=scale, dtype=q.dtype)

    outcome = outcome_of(judge(f, examples=20), "agreement-o")
    assert outcome.status == "error"
    assert "raised OptionError: causal=True is ambiguous for T = 2 queries" in outcome.message
    assert "did not fail every time" not in outcome.message


@pytest.mark.thorough
def test_the_smallest_failing_problem_is_small():
    def f(q, k, v, *, causal=False, scale=None, softcap=None):
        return flash(q, k, v, causal=causal, scale=scale)  # softcap is ignored

    outcome = outcome_of(judge(f, examples=20), "agreement-o")
    problem = outcome.problem
    assert problem.softcap is not None
    assert not problem.causal
    assert problem.T * problem.S <= 12
    assert problem.D <= 5
    assert problem.E <= 3
    again = eval(outcome.recipe, {"Recipe": Recipe})
    assert repr(again) == repr(problem)
    np.testing.assert_array_equal(again.q, problem.q)


# --- arguments ------------------------------------------------------------------------------------


def test_only_takes_rules_and_prefixes():
    report = judge(flash, "hidden-nan", "hidden-nan-v", "agreement-o", examples=3)
    rules = [o.rule for o in report.outcomes]
    assert rules == ["hidden-nan-k", "hidden-nan-v", "hidden-nan-kv", "agreement-o"]


@pytest.mark.thorough
@pytest.mark.parametrize("letter", "BHTS")
@pytest.mark.broad
def test_sizes_of_0_are_probed_with_different_widths(letter):
    """A result as wide as q, and not as v, is wrong even if it is empty."""

    def as_wide_as_q(q, k, v):
        empty = 0 in (*q.shape[:-1], *k.shape[:-1])
        return np.zeros_like(q) if empty else flash(q, k, v)

    report = check(as_wide_as_q, only=["structure"])
    rows = {outcome.level: outcome.message for outcome in report.outcomes}
    assert f"{letter} = 0: o has shape" in rows["degenerate" if letter == "H" else "edges"]


@pytest.mark.thorough
def test_only_structure_probes_and_judges_no_rule():
    report = check(lambda q, k, v: flash(q, k, v) + (k.shape[-2] == 0), only=["structure"])
    assert statuses(report) == {"structure": "failed"}


@pytest.mark.thorough
def test_without_only_every_rule_has_an_outcome():
    report = check(plain, examples=2, sizes={"T": (3,), "S": (5,)})
    assert [o.rule for o in report.outcomes] == list(PROPERTIES)
    assert report.passed, str(report)


def test_sizes_restrict_sampling_and_probe():
    seen = set()

    def f(q, k, v):
        seen.add((q.shape[-2], k.shape[-2], q.shape[-1]))
        return flash(q, k, v)

    judge(f, "agreement-o", "views", sizes={"T": (4, 6), "S": (9,), "D": (8, 24)}, examples=20,
           framework="numpy")  # fmt: skip
    assert {T for T, _, _ in seen} == {4, 6}
    assert {S for _, S, _ in seen} == {9}
    assert {D for _, _, D in seen} == {8, 24}


def test_one_name_may_stand_for_a_sequence_of_one():
    report = check(flash, only="agreement-o", features="mask", examples=3)
    assert [o.rule for o in report.outcomes if o.rule != "structure"] == ["agreement-o"]
    assert report.settings["features"] == ("mask",)


def test_fixed_shape_kernel_is_judged_on_its_shape():
    def f(q, k, v, *, causal=False):
        if (q.shape, k.shape, v.shape) != ((1, 4, 16, 64), (1, 2, 16, 64), (1, 2, 16, 64)):
            raise ValueError("one shape only")
        return flash(q, k, v, causal=causal)

    sizes = {"B": (1,), "H": (4,), "K": (2,), "T": (16,), "S": (16,), "D": (64,), "E": (64,)}
    report = judge(f, sizes=sizes, framework="numpy")
    assert report.passed, str(report)
    assert outcome_of(report, "agreement-o").examples == FEW


def test_every_dtype_has_its_own_outcome():
    dtypes = ("float32", "bfloat16", "float8_e5m2")
    # undeclared, P has three significant bits: half of o could be twice as large unseen
    report = judge(plain, dtypes=dtypes, examples=5, accept="o[float8_e5m2]")
    assert [o.dtype for o in report.outcomes] == ["float32", "bfloat16", "float8_e5m2"]
    assert [o.id for o in report.outcomes][1] == "agreement-o[bfloat16]"
    assert report.passed, str(report)


def rounds_scores(q, k, v):
    """Store the scores in the dtype of q, as eager code does."""
    s = (q.astype(np.float32) @ k.astype(np.float32).swapaxes(-1, -2)).astype(q.dtype)
    s = (s.astype(np.float32) / np.float32(math.sqrt(q.shape[-1] or 1))).astype(q.dtype)
    s = s.astype(np.float64)
    w = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
    w = w / np.maximum(w.sum(-1, keepdims=True), 1e-300)
    return (w @ v.astype(np.float64)).astype(q.dtype)


@pytest.mark.thorough
def test_declared_rounding_is_enforced():
    kwargs = {"dtypes": ("bfloat16",), "examples": 20, "framework": "numpy",
             "sizes": {"H": (1,), "K": (1,)}}  # fmt: skip
    assert judge(rounds_scores, **kwargs).passed
    strict = judge(rounds_scores, rounding="upcast", **kwargs)
    assert outcome_of(strict, "agreement-o").status == "failed"
    assert strict.settings["rounding"] == "upcast"
    assert not judge(rounds_scores, rounding=Rounding.upcast(), **kwargs).passed


def test_strict_is_kept_by_the_report():
    assert check(plain, only=["agreement-o"], examples=2, strict=True).strict


def test_layout_is_passed_on():
    def f(q, k, v):
        if q.ndim != 4:
            raise ValueError("rank 4 only")
        return flash(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)

    assert judge(f, layout="BTHD").passed
    assert not judge(f).passed


def test_features_restrict_what_is_tested():
    def f(q, k, v, *, scale=None, softcap=None):
        return flash(q, k, v, scale=scale)

    assert not judge(f, examples=20).passed
    report = judge(f, features=["scale"])
    assert report.passed
    assert "softcap: unknown to the judge, keeps its default" in report.untested


def test_an_implementation_is_taken_as_it_is():
    def f(q, k, v, is_causal=False):
        return flash(q, k, v, causal=is_causal)

    report = judge(Implementation(f, rename={"is_causal": "causal"}, name="mine"))
    assert report.target == "mine"
    assert report.settings["features"] == ("causal",)
    assert report.passed


def test_progress_is_called():
    calls = []
    judge(plain, "agreement-o", "views", examples=2, progress=lambda *args: calls.append(args))
    assert calls[0] == ("float32", "agreement-o", 0, 2)
    assert calls[-1] == ("float32", "", 2, 2)


BESIDE = "beside an Implementation: pass it to Implementation"
ILLEGAL = [
    ({"dtypes": ("float31",)}, "dtypes has 'float31', must be among"),
    ({"dtypes": ()}, "dtypes is empty, must have 1 or more"),
    ({"examples": 0}, "examples is 0, must be an integer ≥ 1"),
    ({"examples": 2.5}, "examples is 2.5, must be an integer ≥ 1"),
    ({"seed": -1}, "seed is -1, must be an integer ≥ 0"),
    ({"seed": "random"}, "seed is 'random', must be an integer ≥ 0"),
    ({"processes": 0}, "processes is 0, must be an integer ≥ 1"),
    ({"budget": "60s"}, "budget is '60s', must be a number of seconds > 0"),
    ({"only": ["hidden-nans"]}, "'hidden-nans' is not a rule"),
    ({"sizes": {"Q": (3,)}}, "sizes"),
    ({"sizes": {"D": 64}}, "sizes"),
    ({"sizes": [3]}, r"sizes is \[3\], must be a mapping"),
    ({"sizes": {"T": (0,)}}, r"sizes has T=\(0,\), must have one ≥ 1"),
    ({"expect": ["agreement-o"]}, r"expect is \['agreement-o'\], must be a mapping"),
    ({"expect": {"views": " "}}, "expect has views without a reason"),
    ({"must": ["dx"]}, "must has 'dx'"),
    ({"rename": ["cap"]}, r"rename is \['cap'\], must be a mapping, as in "),
    ({"rename": "cap=softcap"}, "rename is 'cap=softcap', must be a mapping, as in "),
    ({"backward": 3}, "backward is 3, must be a callable or None"),
    ({"rounding": "exact"}, "exact"),
    ({"rounding": 3}, "rounding"),
    ({"framework": "mxnet"}, "mxnet"),
    ({"layout": "BHDT"}, "BHDT"),
    ({"features": ["heads"]}, "heads"),
    ({"device": "cuda"}, "device is 'cuda', must be None"),
    ({"conventions": "torch.sdpa"}, "conventions"),
    ({"f": Implementation(flash), "backward": flash_backward}, f"got backward {BESIDE}"),
    ({"f": Implementation(flash), "layout": "BTHD"}, f"got layout {BESIDE}"),
    ({"f": Implementation(flash), "features": ["mask"]}, f"got features {BESIDE}"),
    ({"f": Implementation(flash), "framework": "torch"}, f"got framework {BESIDE}"),
]


@pytest.mark.every
@pytest.mark.parametrize(("given", "message"), ILLEGAL)
def test_an_illegal_argument_is_an_early_error(given, message):
    with pytest.raises(NpattnError, match=message):
        check(**({"f": flash, "only": ["agreement-o"]} | given))


# --- conventions ----------------------------------------------------------------------------------


def peculiar(
    *,
    top_left=False,
    hides=False,
    empty="zero",
    fill=None,
    base=math.e,
    counts_itself=False,
    lse_empty=-math.inf,
):
    """Attention in plain NumPy under other conventions."""

    @np.errstate(all="ignore")
    def f(q, k, v, mask=None, *, causal=False, window=None, bias=None, return_lse=False):
        q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
        if q.ndim > 2 and k.shape[-3]:
            k64, v64 = (np.repeat(x, q.shape[-3] // k.shape[-3], -3) for x in (k64, v64))
        T, S = q.shape[-2], k.shape[-2]
        s = q64 @ k64.swapaxes(-1, -2) / math.sqrt(q.shape[-1] or 1)
        s = s if bias is None else s + bias
        visible = np.ones((T, S), bool) if mask is None else (~mask if hides else mask)
        past = np.arange(S) - np.arange(T)[:, None] - (0 if top_left else S - T)
        left, right = window or (None, None)
        right = 0 if causal else right
        left = left - 1 if left is not None and counts_itself else left
        visible = visible if left is None else visible & (past >= -left)
        visible = visible if right is None else visible & (past <= right)
        s = np.where(visible, s, -np.inf if fill is None else fill)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(top == -np.inf, 0, top)
        e = np.exp(s - top)
        total = e.sum(-1, keepdims=True)
        w = np.where(s == -np.inf, 0, e / np.where(total == 0, 1, total))
        dead = total == 0
        w = np.where(dead, {"zero": 0, "nan": np.nan, "mean": 1 / max(S, 1)}[empty], w)
        # Only keys that count are multiplied: 0 · NaN is NaN.
        bad = ((w != 0).astype(float) @ ~np.isfinite(v64)) > 0
        o = np.where(bad, np.nan, w @ np.where(np.isfinite(v64), v64, 0)).astype(q.dtype)
        o = np.where(dead, np.nan, o).astype(q.dtype) if empty == "nan" and S else o
        lse = np.where(dead, lse_empty, (top + np.log(total)) / math.log(base))[..., 0]
        return (o, lse.astype(np.float32)) if return_lse else o

    return f


LEAST = float(np.finfo(np.float32).min)
CONVENTIONS = {
    "mask_true": ({"hides": True}, {"mask_true": "hide"}),
    "causal": ({"top_left": True}, {"causal": "top_left"}),
    "mean": ({"empty": "mean"}, {"empty_row": "mean"}),
    "nan": ({"empty": "nan"}, {"empty_row": "nan"}),
    "hidden_fill": ({"fill": LEAST}, {"hidden_fill": LEAST}),
    "hidden_fill -1e4": ({"fill": -1e4}, {"hidden_fill": -1e4}),
    "lse_base": ({"base": 2.0}, {"lse_base": "2"}),
    "lse_empty": ({"lse_empty": np.inf}, {"lse_empty": np.inf}),
    "window": ({"counts_itself": True}, {"window": "inclusive"}),
    "many": (
        {"top_left": True, "hides": True, "base": 2.0, "empty": "mean"},
        {"causal": "top_left", "mask_true": "hide", "lse_base": "2", "empty_row": "mean"},
    ),
}


ON_CONVENTIONS = [
    rule for rule, one in PROPERTIES.items() if one.level in ("values", "edges", "non-finite")
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONVENTIONS)
def test_other_conventions_pass_under_their_own(name):
    quirks, conventions = CONVENTIONS[name]
    kwargs = {"framework": "numpy", "examples": OF_EVERY_RULE, "only": ON_CONVENTIONS}
    report = check(peculiar(**quirks), conventions=Conventions(**conventions), **kwargs)
    assert report.passed, str(report)
    assert next(iter(conventions)) in str(report.settings["conventions"])


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.broad
def test_other_conventions_fail_under_npattn(name):
    quirks, _ = CONVENTIONS[name]
    only = ["empty-row", "agreement-o", "agreement-lse"]
    report = check(
        peculiar(**quirks), framework="numpy", examples=20, only=only, shrink=False, diagnosis=False
    )
    assert "failed" in statuses(report).values()
    assert report.settings["conventions"] == {}


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.broad
def test_npattn_conventions_fail_under_others(name):
    _, conventions = CONVENTIONS[name]
    only = ["empty-row", "agreement-o", "agreement-lse"]
    kwargs = {
        "framework": "numpy",
        "examples": 20,
        "only": only,
        "shrink": False,
        "diagnosis": False,
    }
    report = check(peculiar(), conventions=Conventions(**conventions), **kwargs)
    assert not report.passed


@pytest.mark.thorough
def test_default_conventions_pass_under_npattn():
    report = check(peculiar(), framework="numpy", examples=OF_EVERY_RULE)
    assert report.passed, str(report)


@pytest.mark.thorough
def test_recipe_line_of_failure_follows_conventions():
    conventions = Conventions(causal="top_left", mask_true="hide", window="inclusive")
    quirks = {"top_left": True, "hides": True, "counts_itself": False}
    report = judge(peculiar(**quirks), conventions=conventions, framework="numpy", examples=20)
    outcome = outcome_of(report, "agreement-o")
    assert outcome.status == "failed"
    assert ".problem(alignment='top_left', mask_true='hide')" in outcome.recipe
    again = eval(outcome.recipe, {"Recipe": Recipe})
    assert repr(again) == repr(outcome.problem)


@pytest.mark.thorough
def test_gradients_are_judged_under_conventions_too():
    torch = pytest.importorskip("torch")

    def jax_like(q, k, v, mask=None, *, causal=False, return_lse=False):
        if q.ndim > 2:
            k, v = (x.repeat_interleave(q.shape[-3] // (k.shape[-3] or 1), -3) for x in (k, v))
        s = q @ k.transpose(-1, -2) / (q.shape[-1] or 1) ** 0.5
        T, S = s.shape[-2:]
        visible = torch.ones(T, S, dtype=torch.bool)
        visible = visible.tril() if causal else visible
        visible = visible if mask is None else visible & mask
        s = s.masked_fill(~visible, LEAST)
        o = s.softmax(-1) @ v
        return (o, s.logsumexp(-1) / math.log(2)) if return_lse else o

    sizes = {"B": (2,), "S": (3, 7), "T": (2, 5), "D": (3, 8), "H": (4,), "K": (2,)}
    kwargs = {"framework": "torch", "sizes": sizes, "only": ["empty-row", "agreement"]}
    conventions = Conventions(causal="top_left", hidden_fill=LEAST, lse_base="2")
    report = check(jax_like, conventions=conventions, examples=12, **kwargs)
    assert report.passed, str(report)
    assert statuses(report)["agreement-dv"] == "passed"
    assert not check(jax_like, examples=12, shrink=False, diagnosis=False, **kwargs).passed


# --- the report's head ----------------------------------------------------------------------------


def test_untested_lines_come_first():
    def f(q, k, v, block=64):
        if q.ndim != 4:
            raise ValueError("rank 4 only")
        return flash(q, k, v)

    report = check(f, examples=2, only=["agreement-o"])
    text = report.text(verbose=True)
    for line in (
        "block: unknown to the judge, keeps its default",
        "options it does not have: mask, causal, window",
        "gradients: no backward= was given",
        "lse: no return_lse parameter",
        "float32: rank 3: refused (raised ValueError: rank 4 only (test_judging.py:",
    ):
        lines = (*report.untested, *report.refused)
        assert any(entry.startswith(line) for entry in lines), line
        assert text.index(line) < text.index("agreement-o")
    assert text.index("not tested") < text.index("rule ")
    assert "; block: unknown to the judge, keeps its default; options it" in " ".join(
        str(report).split()
    )


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_expected_failures_with_only_are_those_asked():
    kwargs = {"examples": 2, "only": ["agreement-o", "shape-dtype"]}
    doubled = lambda q, k, v: 2 * flash(q, k, v)  # noqa: E731
    other = {"empty-row": "is not asked here", "agreement-o": "doubled"}
    report = check(doubled, framework="numpy", expect=other, **kwargs)
    assert report.passed, str(report)
    stale = {**other, "shape-dtype[float32]": "old", "emty-row": "a slip"}
    report = check(doubled, framework="numpy", expect=stale, **kwargs)
    assert not report.passed
    assert set(report.stale) == {"shape-dtype[float32]", "emty-row"}


def test_facts_describe_the_run():
    report = check(flash, examples=2, seed=7, only=["agreement-o"])
    assert report.settings["seed"] == 7
    assert report.settings["examples"] == 2
    assert report.settings["rounding"] == "undeclared"
    assert report.settings["versions"]["npattn"] == npattn.__version__
    assert report.settings["versions"]["numpy"] == np.__version__


def test_torch_function_without_gradient_is_judged_on_forward():
    torch = pytest.importorskip("torch")

    @torch.no_grad()
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(1.5 * q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v

    threads = torch.get_num_threads()
    report = check(f, examples=20, only=["agreement"], diagnosis=False)
    assert any("does not require grad" in line for line in report.refused)
    assert statuses(report)["agreement-o"] == "failed"
    assert statuses(report)["agreement-dq"] == "not applicable"
    assert torch.get_num_threads() == threads


def test_backward_without_dlse_leaves_lse_untested():
    def f(q: np.ndarray, k, v, *, return_lse=False):
        return flash(q, k, v, return_lse=return_lse)

    def backward(dout, q, k, v, *, out, lse):
        return flash_backward(dout, q, k, v, out=out, lse=lse)

    report = check(f, backward=backward, examples=FEW, only=["agreement"])
    assert report.passed, str(report)
    assert "gradients through lse: backward has no dlse parameter" in report.untested


@pytest.mark.thorough
def test_wrong_gradient_shape_fails_that_gradient_alone():
    def f(q: np.ndarray, k, v):
        return flash(q, k, v)

    def backward(dout, q, k, v, *, out, lse):
        _, lse = flash(q, k, v, return_lse=True)
        grads = flash_backward(dout, q, k, v, out=out, lse=lse)
        return {**grads, "k": grads["k"][..., None]}

    by_rule = statuses(check(f, backward=backward, examples=FEW, only=["agreement"]))
    assert by_rule["agreement-dk"] == "failed"
    assert by_rule["agreement-o"] == by_rule["agreement-dq"] == by_rule["agreement-dv"] == "passed"


def test_range_of_every_letter_is_listed():
    sizes = {"D": (64, 128), "H": (6,), "K": (2,), "B": (1,)}
    report = check(flash, examples=1, only=["shape-dtype"], sizes=sizes, shrink=False)
    ranges = report.asked["float32"].ranges
    assert "".join(ranges) == "BHKGTSDE"
    assert [ranges[x] for x in "BHKG"] == [(1, 1), (6, 6), (2, 2), (3, 3)]
    assert 64 <= min(ranges["D"]) <= max(ranges["D"]) <= 128


@pytest.mark.thorough
def test_one_rule_alone_leaves_out_rows_that_are_known_to_be_wrong():
    """The default says that they are wrong; a rule that is asked alone must not say more."""
    report = check(naive, examples=6, only=["agreement-o"], shrink=False)
    assert statuses(report)["agreement-o"] == "passed"
    assert any("fully masked queries are wrong" in line for line in report.refused)


@pytest.mark.thorough
def test_what_must_be_tested_and_is_not_does_not_pass():
    report = check(naive, must=["mask", "dk"], only=["agreement-o"], examples=2)
    assert report.missing == ("dk",)
    assert report.as_dict()["missing"] == ["dk"]
    assert not report.passed
    assert report.reason == "not tested, and asked for: dk"
    assert "\nno verdict: not tested, and asked for: dk (1 passed" in str(report)
    assert check(naive, must=["o"], only=["agreement-o"], examples=2).missing == ()


def fills(q, k, v, attn_mask=None):
    """Attention that fills where a boolean mask hides, and adds a float one, which may be −inf."""
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if attn_mask is not None and attn_mask.dtype == bool:
        scores = np.where(attn_mask, scores, np.finfo(q.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    with np.errstate(invalid="ignore"):  # −inf − −inf, in an empty row
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.thorough
def test_a_fill_is_not_asked_of_a_mask_beside_a_bias_in_one_parameter():
    """There the mask is −inf, and a row that it empties is not that of a fill."""
    conventions = Conventions(hidden_fill="min", empty_row="nan")
    report = check(
        fills, conventions=conventions, dtypes="float32", only=["empty-row"], sizes={"S": (5,)}
    )
    assert report.passed
    assert any("in one parameter the mask is −inf" in text for text in report.refused)
    separate = judge(flash, "empty-row", dtypes="float32", examples=2)
    assert "mask and bias together" not in separate.text(verbose=True)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_function_of_one_rank_is_asked_for_views_and_other_dtypes(rank):
    """They begin from the plainest problem, which had rank 4."""

    def of_rank(q, k, v):
        if q.ndim != rank:
            raise ValueError(f"q must have {rank} axes")
        return flash(q, k, v)

    rules = ("packed-inputs", "after-other-dtype", "inputs-unchanged")
    report = judge(of_rank, *rules, framework="numpy", dtypes="float32", examples=4)
    assert statuses(report) == dict.fromkeys(rules, "passed")


def test_rules_are_named_before_they_are_asked():
    assert name_rules(None, 0) == ["structure", *PROPERTIES]
    assert name_rules(["agreement-d", "robustness", "double-backward"], 0) == [
        "structure",
        *(name for name in PROPERTIES if name.startswith("agreement-d")),
        "double-backward",
        "robustness",
    ]
    assert name_rules(["views"], 5) == ["structure", "views", "sweep", "long"]
    assert name_rules(["views", "long"], 5) == ["structure", "views", "long"]
    only = ("robustness", "agreement-o")
    report = check(naive, only=only, examples=2, framework="numpy", diagnosis=False)
    assert {o.rule for o in report.outcomes} <= set(name_rules(only, 0))
