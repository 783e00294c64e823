"""Every rule states its reason, passes on correct implementations, and fails on mistakes."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from benchmarks.zoo.correct import Kernel
from benchmarks.zoo.mutants import MUTANTS
from npattn.mistakes import Attention
from npattn.profiles import PROFILES
from npattn.testing import Recipe, check
from npattn.testing.cases.recipe import are_identical
from npattn.testing.rules import (
    MODULES,
    PROPERTIES,
    calls,
    equivalents,
    extremes,
    gradients,
    identities,
    memory,
    order_and_parts,
)
from npattn.testing.targets.numpy import flash, flash_backward
from tests.testing.alone import judge_alone
from tests.testing.rules.relations import rules_of

FEW = min(settings().max_examples // 30, 8)  # 2; in the nightly profile 8
SEMANTICS = Path(__file__).parents[3] / "docs" / "semantics.md"

# One mutant for each rule: a rule without one might be unable to fail.
KILLS = {
    "shape-dtype": "out-widened",
    "agreement-o": "scale-twice",
    "agreement-lse": "lse-base-2",
    "agreement-max-score": "max-score-from-zero",
    "agreement-weights": "weights-after-dropout",
    "agreement-dq": "dq-unscaled",
    "agreement-dk": "dk-of-base-2-query",
    "agreement-dv": "dk-of-first-head",
    "agreement-dbias": "dbias-zero",
    "agreement-dsinks": "dsinks-zero",
    "agreement-dgate": "dgate-zero",
    "model-sizes": "scale-twice",
    "rows-sum-to-one": "mask-after-softmax",
    "empty-row": "empty-row-mean",
    "hidden-finite": "softcap-after-mask",
    "hidden-nan-k": "nan-leaks-through-additive-mask",
    "hidden-nan-v": "nan-leaks-through-zero-weight",
    "hidden-nan-kv": "nan-leaks-through-additive-mask",
    "nan-query": "nan-of-query-zeroed",
    "nan-query-alone": "nan-leaks-into-gradients",
    "inputs-unchanged": "input-changed",
    "views": "views-misread",
    "repeatable": "result-changes",
    "nan-value": "nan-spreads-over-columns",
    "look-alike-masks": "mask-inverted",
    "permute-keys": "dbias-last-writer-wins",
    "permute-queries": "dbias-last-writer-wins",
    "permute-heads": "heads-tiled",
    "permute-batch": "dbias-last-writer-wins",
    "batch-alone": "causal-top-left",
    "shared-heads": "dk-of-first-head",
    "padded-keys": "mask-added-as-number",
    "causal-prefix": "empty-row-mean",
    "split-merge": "lse-base-2",
    "window-infinite": "causal-strict",
    "causal-as-mask": "causal-top-left",
    "window-as-mask": "window-one-wider",
    "mask-as-bias": "mask-inverted",
    "scale-of-query": "scale-twice",
    "bias-shift": "softcap-over-bias",
    "one-key": "jacobian-without-rank-1-term",
    "convex-hull": "softmax-over-queries",
    "value-linear": "values-ignored",
    "sink-key": "sink-scaled",
    "sink-minus-inf": "sink-minus-inf",
    "equal-scores": "mask-after-softmax",
    "dbias-rows": "dbias-last-writer-wins",
    "unseen-keys": "mask-ignored-in-backward",
    "key-gradient-sum": "jacobian-without-rank-1-term",
    "value-euler": "dk-of-first-head",
    "query-key-euler": "dq-unscaled",
    "cotangent-linear": "dout-taken-as-ones",
    "lse-gradient": "dlse-ignored",
    "directional": "softcap-slope-forgotten",
    "offset-bias": "maximum-of-padding",
    "saturated": "no-max-subtracted",
    "large-products": "product-in-float16",
    "after-other-dtype": "precision-of-first-call",
    "after-other-strides": "plan-of-other-strides",
    "packed-inputs": "packed-in-one-order",
    "aliased-inputs": "value-scaled-with-key",
    "arrays-reused": "contents-of-first-call",
    "outputs-kept": "out-written-again",
    "two-threads": "work-shared-by-threads",
    "aggregate": "weights-truncated",
    "late-keys": "maximum-pinned-to-0",
}

ORDER = """
shape-dtype agreement-o agreement-lse agreement-max-score agreement-weights
agreement-dq agreement-dk agreement-dv
agreement-dbias agreement-dsinks agreement-dgate
model-sizes rows-sum-to-one empty-row sink-minus-inf
hidden-finite hidden-nan-k hidden-nan-v hidden-nan-kv late-keys nan-value nan-query
nan-query-alone look-alike-masks unusual-contents unusual-cotangents
permute-keys permute-queries permute-heads permute-batch
batch-alone shared-heads padded-keys causal-prefix split-merge window-infinite causal-as-mask
window-as-mask mask-as-bias scale-of-query bias-shift one-key convex-hull value-linear sink-key
equal-scores dbias-rows unseen-keys key-gradient-sum value-euler query-key-euler cotangent-linear
lse-gradient directional offset-bias saturated large-products inputs-unchanged views repeatable
after-other-strides after-other-dtype packed-inputs aliased-inputs two-threads arrays-reused
nearly-same-contents outputs-kept outputs-apart other-sequences unread-slots page-ids
first-calls refused-again same-bits-again
same-bits-in-batch same-bits-beside-others same-bits-padded same-bits-in-parts same-bits-threads
aggregate
"""


OF_SEQUENCES = ("other-sequences", "unread-slots", "page-ids")
OF_TORCH = rules_of(calls, equivalents, extremes, gradients, identities, memory, order_and_parts)


def outcome_of(report, rule):
    (outcome,) = (o for o in report.outcomes if o.rule == rule)
    return outcome


def test_every_rule_kills_a_mutant():
    # Their mutants are in tests of their own: they need a state anew, or only change bits.
    alone = {"first-calls", "refused-again", "nearly-same-contents", "outputs-apart"}
    alone |= {"unusual-contents", "unusual-cotangents", *OF_SEQUENCES}
    elsewhere = {name for name in PROPERTIES if name in alone or name.startswith("same-bits-")}
    assert set(KILLS) == set(PROPERTIES) - elsewhere
    assert set(KILLS.values()) <= set(MUTANTS)


@pytest.mark.every
@pytest.mark.parametrize(("rule", "name"), KILLS.items())
def test_rule_fails_on_its_mutant(rule, name):
    mutant = MUTANTS[name]
    outcome = judge_alone(mutant, rule, mutant.dtypes[0], 60, leaves=False, evenly=True)
    assert outcome.status == ("suspect" if rule == "aggregate" else "failed"), outcome
    assert outcome.worst > 1
    assert outcome.message
    assert_recipe_is_true(outcome)


def assert_recipe_is_true(outcome):
    """The recipe that a report prints makes the failing problem, or says that it was changed."""
    line, changed, _ = outcome.recipe.partition(", then changed")
    made = eval(line, {"Recipe": Recipe})
    assert are_identical(made, outcome.problem) is not bool(changed), outcome.recipe


def wrong_statuses(report, absent):
    """Return the outcomes that are neither passed nor among the rules that do not apply.

    What depends on the machine's BLAS is left out: whether bits are the same.
    """
    judged = [o for o in report.outcomes if o.level != "reproducible"]
    asked = {name for name, p in PROPERTIES.items() if p.level != "reproducible"}
    assert {o.rule for o in judged} >= asked
    return [
        (o.rule, o.status, o.message)
        for o in judged
        if o.status != ("not applicable" if o.rule in absent else "passed") or not o.worst <= 1
    ]


@pytest.mark.every
@pytest.mark.broad
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_flash_passes_every_rule(dtype):
    report = check(flash, backward=flash_backward, examples=FEW, dtypes=dtype, accept="o")
    # It has neither the largest scores nor gates; nothing is refused, and it has no sequences.
    absent = {"agreement-max-score", "agreement-dgate", "refused-again", *OF_SEQUENCES}
    absent |= set() if dtype == "float16" else {"large-products"}
    assert wrong_statuses(report, absent) == []


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_torch_passes_its_rules(dtype):
    """Other rules are known to fail: tests/testing/targets has them."""
    pytest.importorskip("torch")
    from npattn.testing.targets.torch import sdpa_math

    conventions = PROFILES["torch.sdpa"].conventions
    report = check(
        sdpa_math, only=OF_TORCH, examples=4, dtypes=dtype, conventions=conventions, shrink=False
    )
    assert {o.status for o in report.outcomes} <= {"passed", "not applicable"}, str(report)
    assert {o.rule for o in report.outcomes if o.status == "passed"} >= {"one-key", "shared-heads"}


def test_first_line_of_docstring_states_the_rule():
    for rule in PROPERTIES.values():
        assert 20 < len(rule.about) < 100, rule.rule
        assert rule.about.endswith((".", ",")), rule.rule


def test_docstrings_give_reason_and_bugs():
    short = [
        name
        for name, rule in PROPERTIES.items()
        if "Broken by" not in rule.check.__doc__ or len(rule.check.__doc__.split()) < 20
    ]
    assert short == []


def test_rules_cite_numbers_of_the_semantics():
    numbers = set(re.findall(r"^\*\*(\d+)\. ", SEMANTICS.read_text(), re.MULTILINE))
    for rule in PROPERTIES.values():
        cited = re.findall(r"\d+", rule.section)
        assert cited, rule.rule
        assert set(cited) <= numbers, rule.rule


def cited(text):
    """Numbers of a list such as "1, 4-7"."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {n for low, high in ranges for n in range(int(low), int(high or low) + 1)}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.split(".")[-1])
def test_modules_are_headed_by_the_numbers_of_their_rules(module):
    own = [rule for rule in PROPERTIES.values() if rule.check.__module__ == module.__name__]
    heading = re.search(r"\[([\d, -]+)\]", module.__doc__.splitlines()[0])
    assert cited(heading[1]) == set().union(*(cited(rule.section) for rule in own))


def test_ids_are_words_with_hyphens():
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in PROPERTIES)
    assert all(name == rule.rule for name, rule in PROPERTIES.items())


def test_order_of_rules_in_reports():
    assert " ".join(PROPERTIES).split() == ORDER.split()


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("agreement-lse", "returns no lse"),
        ("agreement-dq", "no backward"),
        ("agreement-dbias", "has no bias"),
        ("agreement-dsinks", "has no sinks"),
        ("empty-row", "nothing empties a row"),
        ("hidden-finite", "has no mask, causal or window"),
        ("hidden-nan-v", "has no mask, causal or window"),
    ],
)
def test_not_applicable_gives_reason(rule, reason):
    report = check(plain, only=[rule], examples=3)
    outcome = outcome_of(report, rule)
    assert outcome.status == "not applicable"
    assert outcome.message == reason


def plain(q, k, v):
    return flash(q, k, v)


# --- mistakes beyond the mutants of the zoo -------------------------------------------------------


def failing(f, rule, backward=None, **kwargs):
    outcome = outcome_of(
        check(f, backward=backward, only=[rule], examples=20, diagnosis=False, **kwargs), rule
    )
    assert outcome.status == "failed", outcome
    return outcome.message


class WeightsOfNextKey(Attention):
    """The last of many keys gets the weight of the one before it, and the reverse."""

    def results(self, c):
        _, lse, p = super().results(c)
        if p.shape[-1] > 4:
            p[..., [-2, -1]] = p[..., [-1, -2]]
        return p @ self.share(c.v, c.q.shape[-3]), lse, p


def test_weights_are_read_where_none_are_returned():
    swapped = WeightsOfNextKey()

    def f(q, k, v, mask=None):
        return swapped.forward(q, k, v, mask)

    message = failing(f, "agreement-weights")
    assert re.match(r"weights of keys \d+ to \d+ \(o with v = I\)\[", message)


def test_wrong_shape_breaks_shape_dtype():
    def f(q, k, v):
        return flash(q, k, v)[..., None]

    assert "o has shape" in failing(f, "shape-dtype")
    assert "o has shape" in failing(f, "agreement-o")
    assert "o has shape" in failing(f, "rows-sum-to-one")


@pytest.mark.parametrize("dtype", ["float16", "int64", "bool", "complex64"])
def test_wrong_dtype_of_lse_breaks_shape_dtype(dtype):
    def f(q, k, v, return_lse=False):
        out, lse = flash(q, k, v, return_lse=True)
        return (out, np.nan_to_num(lse).astype(dtype)) if return_lse else out

    assert f"lse has dtype {dtype}" in failing(f, "shape-dtype")


def test_wrong_lse_of_fully_masked_row_breaks_empty_row():
    def f(q, k, v, mask=None, return_lse=False):
        out, lse = flash(q, k, v, mask, return_lse=True)
        return (out, np.where(lse == -np.inf, np.inf, lse)) if return_lse else out

    assert "lse of a fully masked query is inf, expected -inf" in failing(f, "empty-row")


def test_unnormalised_weights_break_rows_sum_to_one():
    def f(q, k, v, return_weights=False):
        out = flash(q, k, v)
        weights = np.full((*out.shape[:-1], k.shape[-2]), 0.25, np.float32)
        return (out, weights) if return_weights else out

    assert "sum of weights" in failing(f, "rows-sum-to-one")


def test_mistake_only_with_return_lse_breaks_agreement():
    def f(q, k, v, return_lse=False):
        out, lse = flash(q, k, v, return_lse=True)
        return (2 * out, lse) if return_lse else out  # another code path

    assert failing(f, "agreement-o").startswith("o[")


SMALL = {"T": (5,), "S": (7,), "D": (3,), "E": (2,)}
WITHOUT_AGGREGATE = [rule for rule in PROPERTIES if rule != "aggregate"]
DIAGNOSED = ["shape-dtype", "agreement-o", "agreement-dq", "hidden-finite", "empty-row"]
"""Rules whose failures are explained, of each kind one."""


def cut(x):
    return x[..., :-1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "wrong", ["o", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("lse", "weights")), "k"]
)
@pytest.mark.broad
def test_wrong_shapes_raise_in_no_rule(wrong):
    def f(q, k, v, mask=None, *, causal=False, bias=None, sinks=None, return_lse=False,
          return_weights=False):  # fmt: skip
        kwargs = {"causal": causal, "bias": bias, "sinks": sinks}
        all_three = Kernel().forward(q, k, v, mask, **kwargs, return_lse=True, return_weights=True)
        names, requested = ("o", "lse", "weights"), (True, return_lse, return_weights)
        pairs = zip(names, all_three, requested, strict=True)
        results = [cut(x) if name == wrong else x for name, x, keep in pairs if keep]
        return tuple(results) if len(results) > 1 else results[0]

    def backward(dout, q, k, v, *, mask=None, causal=False, bias=None, sinks=None, dlse=None):
        o, lse = flash(q, k, v, mask, causal=causal, bias=bias, sinks=sinks, return_lse=True)
        kwargs = {"mask": mask, "causal": causal, "bias": bias, "sinks": sinks, "dlse": dlse}
        grads = flash_backward(dout, q, k, v, out=o, lse=lse, **kwargs)
        return {n: cut(x) if n == wrong and x is not None else x for n, x in grads.items()}

    # Rule aggregate is slow: one of the cases has it.
    some = None if wrong == "lse" else WITHOUT_AGGREGATE
    report = judge_small(f, backward, some)
    assert outcome_of(report, "shape-dtype").status == "failed"
    assert not [o.rule for o in report.outcomes if o.status == "error"], str(report)
    if wrong == "o":
        assert not judge_small(f, backward, DIAGNOSED, diagnosis=True).passed


def judge_small(f, backward, rules, diagnosis=False):
    """Judge a function that is wrong throughout; the diagnosis is slow, and is asked of a few."""
    options = {"examples": 2, "sizes": SMALL, "shrink": False, "diagnosis": diagnosis}
    return check(f, backward=backward, only=rules, **options)


ODD = {
    "no number": lambda x: np.full_like(x, np.nan),
    "infinite": lambda x: np.full_like(x, np.inf),
    "complex": lambda x: x * (1 + 1j),
    "an integer": lambda x: np.nan_to_num(x).astype(np.int64),
    "a bool": lambda x: x > 0,
    "a sum": lambda x: x.sum(),
    "one axis more": lambda x: x[None],
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("odd", "of"),
    [
        *(("infinite", "o and lse"), ("complex", "o and lse"), ("an integer", "gradients")),
        pytest.param("a bool", "o and lse", marks=pytest.mark.nightly),
        pytest.param("a sum", "o and lse", marks=pytest.mark.nightly),
        pytest.param("no number", "gradients", marks=pytest.mark.nightly),
        pytest.param("complex", "gradients", marks=pytest.mark.nightly),
        ("one axis more", "gradients"),
    ],
)
@pytest.mark.broad(3)
def test_odd_results_fail_and_raise_in_no_rule(odd, of):
    def f(q, k, v, mask=None, *, causal=False, bias=None, sinks=None, return_lse=False):
        kwargs = {"causal": causal, "bias": bias, "sinks": sinks}
        results = flash(q, k, v, mask, **kwargs, return_lse=True)
        results = [ODD[odd](x) if of == "o and lse" else x for x in results]
        return tuple(results) if return_lse else results[0]

    def backward(dout, q, k, v, *, mask=None, causal=False, bias=None, sinks=None, dlse=None):
        kwargs = {"mask": mask, "causal": causal, "bias": bias, "sinks": sinks}
        o, lse = flash(q, k, v, **kwargs, return_lse=True)
        grads = flash_backward(dout, q, k, v, out=o, lse=lse, dlse=dlse, **kwargs)
        return {n: ODD[odd](x) for n, x in grads.items() if x is not None and of == "gradients"}

    # Rule aggregate is slow: one of the cases has it.
    report = judge_small(f, backward, None if odd == "complex" else WITHOUT_AGGREGATE)
    assert not report.passed
    if odd == "infinite" or (odd, of) == ("complex", "o and lse"):
        assert not judge_small(f, backward, DIAGNOSED, diagnosis=True).passed
    assert {o.status for o in report.outcomes} <= {"failed", "passed", "not applicable", "suspect"}


@pytest.mark.parametrize("rule", ["empty-row", "unseen-keys", "hidden-nan-kv", "causal-prefix"])
def test_rules_on_hidden_keys_need_only_causal(rule):
    def f(q, k, v, *, causal=False, return_lse=False):
        return flash(q, k, v, causal=causal, return_lse=return_lse)

    def backward(dout, q, k, v, *, out, lse, causal=False, dlse=None):
        return flash_backward(dout, q, k, v, out=out, lse=lse, causal=causal, dlse=dlse)

    report = check(
        f, backward=backward, only=[rule], examples=4, dtypes=("float32",), diagnosis=False
    )
    assert outcome_of(report, rule).status == "passed", str(report)


def test_overflow_of_hidden_garbage_breaks_hidden_finite():
    def f(q, k, v, mask=None):
        k, v = (np.repeat(x, q.shape[-3] // (x.shape[-3] or 1), -3) if q.ndim > 2 else x
                for x in (k, v))  # fmt: skip
        w = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))  # no maximum is subtracted
        w = w if mask is None else w * mask
        return w @ v / w.sum(-1, keepdims=True)

    report = check(f, only=["hidden-finite"], examples=20, dtypes=("float32",), diagnosis=False)
    (outcome,) = (o for o in report.outcomes if o.rule == "hidden-finite")
    assert outcome.status == "failed"
    assert "o becomes NaN where finite garbage" in outcome.message


def test_plan_cached_by_shape_breaks_structure():
    plans = {}

    def f(q, k, v):
        plan = plans.setdefault(q.shape, q.strides)
        return flash(q if q.strides == plan else q[..., ::-1], k, v)

    message = failing(f, "structure")
    assert message.startswith("transposed: o["), message


def test_result_cached_by_shape_breaks_repeatable():
    kept = {}

    def f(q, k, v):
        key = q.shape, k.shape, v.shape
        return kept.setdefault(key, flash(q, k, v)).copy()

    assert failing(f, "repeatable")


def test_cached_result_with_right_gradients_breaks_repeatable():
    kept = {}

    def f(q, k, v, return_lse=False):
        key = q.shape, k.shape, v.shape
        out, lse = kept.setdefault(key, flash(q, k, v, return_lse=True))
        return (out.copy(), lse.copy()) if return_lse else out.copy()

    def backward(dout, q, k, v, *, dlse=None):
        out, lse = flash(q, k, v, return_lse=True)
        return flash_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)

    assert failing(f, "repeatable", backward)


def test_unrequested_dropout_breaks_repeatable():
    rng = np.random.default_rng(0)

    def f(q, k, v):
        return flash(q, k, v) * (rng.random(v.shape[-1]) < 0.9)

    assert "between two calls" in failing(f, "repeatable")


def test_writing_to_v_breaks_inputs_unchanged():
    def f(q, k, v):
        out = flash(q, k, v)
        v[...] = 0
        return out

    assert failing(f, "inputs-unchanged") == "v was written to"


def test_writing_in_backward_breaks_inputs_unchanged():
    def backward(dout, q, k, v, *, out, lse, dlse=None):
        grads = flash_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)
        k *= 2
        return grads

    def f(q, k, v, return_lse=False):
        return flash(q, k, v, return_lse=return_lse)

    assert failing(f, "inputs-unchanged", backward) == "k was written to"


def test_smallest_failing_recipe_is_small():
    mutant = MUTANTS["scale-twice"]
    report = check(mutant.forward, only=["agreement-o"], examples=20, diagnosis=False)
    line = outcome_of(report, "agreement-o").recipe
    recipe = eval(line.rpartition(".problem(")[0], {"Recipe": Recipe})
    assert recipe.T * recipe.S * recipe.D * recipe.E <= 60
