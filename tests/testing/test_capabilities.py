"""The probe learns what an implementation accepts, and only that is sampled afterwards."""

import numpy as np
import pytest

import npattn
from npattn.conventions import Conventions
from npattn.testing import check
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.capabilities import probe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.trial import Trial


def run_probe(f, **kwargs):
    implementation = f if isinstance(f, Implementation) else Implementation(f, **kwargs)
    space = Space(features=implementation.features)
    return probe(Trial(implementation, Conventions(), Rounding.undeclared("float32"), space))


def plain(q, k, v):
    return npattn.attention(q, k, v).astype(q.dtype)


# --- first calls ----------------------------------------------------------------------------------


def test_the_first_calls_are_recorded_as_they_were_answered():
    calls = []

    def warms_up(q, k, v):
        calls.append(q)
        return plain(q, k, v) * np.float32(2 if len(calls) <= 5 else 1)

    found = run_probe(warms_up, framework="numpy")
    first, later = found.trial.first_calls[0], found.trial.first_calls[-1]
    again = [np.asarray(warms_up(p.q, p.k, p.v)) for p, _, _ in (first, later)]
    np.testing.assert_array_equal(first[2]["o"], 2 * again[0])
    np.testing.assert_array_equal(later[2]["o"], again[1])
    assert 5 < len(found.trial.first_calls) <= 64


# --- structure ------------------------------------------------------------------------------------


def gradients_of(q, k, v, dout):
    fwd = npattn.forward(q, k, v)
    return {n: np.asarray(getattr(npattn.backward(fwd, dout), n), q.dtype) for n in "qkv"}


def test_leading_axes_that_are_not_summed_are_a_finding_and_not_sampled():
    def backward(dout, q, k, v):
        grads = gradients_of(q, k, v, dout)
        wide = {n: np.broadcast_to(x, (len(q), *x.shape[1:])) for n, x in grads.items()}
        return wide if q.ndim == 4 and len(q) else grads

    found = run_probe(plain, backward=backward, framework="numpy")
    (row,) = (f for f in found.findings if "broadcast" in f.message)
    assert (row.rule, row.status, row.level) == ("structure", "failed", "values")
    assert row.recipe is not None
    assert row.recipe.broadcast
    assert "broadcast" not in found.trial.space.structure


def test_wrong_structure_is_a_row_for_each_level():
    def f(q, k, v):
        late, views = k.shape[-2] > q.shape[-2], not q.flags.c_contiguous
        return plain(q, k, v) + np.float32(late or views or 0 in q.shape[-1:])

    found = run_probe(f, framework="numpy")
    rows = {f.level: f.message for f in found.findings}
    assert set(rows) == {"values", "conduct", "degenerate"}
    assert rows["values"].startswith("T != S: ")
    assert not {"T != S", "transposed", "D = 0"} & found.trial.space.structure
    assert {"K < H", "E != D", "T > S"} <= found.trial.space.structure


def wrong_where(holds):
    def f(q, k, v):
        return plain(q, k, v) * np.float32(1 + holds(q, k, v) / 64)

    return f


def run_compiled(f):
    """Probe a function as one that is compiled for each shape; return what was found, and asked."""
    asked = set()

    def compiled(q, k, v):
        asked.add((q.shape, k.shape, v.shape))
        return f(q, k, v)

    implementation = Implementation(compiled, framework="numpy")
    space = Space(features=frozenset(), few_shapes=True)
    found = probe(Trial(implementation, Conventions(), Rounding.undeclared("float32"), space))
    return found, asked


def without_shared_heads(q, k, v):
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        raise NotImplementedError("heads are not shared")
    return plain(q, k, v)


def test_structure_is_probed_at_shapes_that_rules_ask_anyway():
    found, asked = run_compiled(without_shared_heads)
    assert found.trial.space.structure >= {"rank 2", "rank 5", "T > S", "D % 8", "broadcast"}
    assert not found.findings
    pools = Pools(found.trial.space, nonempty=True)
    sampled = {(r.problem().q.shape, r.problem().k.shape) for r in map(pools.recipe, range(97))}
    accepted = {(q, k) for q, k, v in asked if q[-3:-2] == k[-3:-2] or len(q) == 2}
    without_zeros = {(q, k) for q, k in accepted if 0 not in {*q, *k}}
    assert without_zeros <= sampled | {((2, 2, 16, 16),) * 2}


@pytest.mark.parametrize(
    ("holds", "name"),
    [
        (lambda q, k, v: q.ndim == 2, "rank 2"),
        (lambda q, k, v: q.ndim == 5, "rank 5"),
        (lambda q, k, v: q.shape[-1] % 8 > 0, "D % 8"),
        (lambda q, k, v: q.ndim > 3 and q.shape[-3] > k.shape[-3], "K < H"),
    ],
)
def test_what_is_wrong_at_a_whole_shape_is_found_alone(holds, name):
    found, _ = run_compiled(wrong_where(holds))
    messages = [f.message for f in found.findings if f.rule == "structure"]
    assert [m.partition(":")[0] for m in messages] == [name]
    assert name not in found.trial.space.structure
    assert {"rank 3", "T != S", "E != D"} <= found.trial.space.structure


def test_structure_is_not_blamed_if_the_plainest_problem_is_wrong():
    found = run_probe(lambda q, k, v: 2 * plain(q, k, v), framework="numpy")
    assert found.findings == ()
    assert "K < H" in found.trial.space.structure


def test_mistake_in_accepted_heads_is_an_error_and_no_refusal():
    def f(q, k, v):
        if q.ndim == 4 and q.shape[1] != k.shape[1]:
            raise NameError("groups")
        return plain(q, k, v)

    (row,) = run_probe(f, framework="numpy").findings
    assert (row.rule, row.status) == ("structure", "error")
    line = f.__code__.co_firstlineno + 2
    assert row.message == f"K < H: raised NameError: groups (test_capabilities.py:{line})"


# --- options --------------------------------------------------------------------------------------


def sampled(found, n=80, **kwargs):
    pools = Pools(found.trial.space, **kwargs)
    return [pools.recipe(seed) for seed in range(n)]


def refusing(refuses, error):
    """Return right attention that raises where `refuses(q, mask, ...)` is true."""

    def f(q, k, v, mask=None, *, causal=False, scale=None, window=None, softcap=None):
        if refuses(q, mask, causal, scale, window):
            raise error
        options = {"causal": "bottom_right" if causal else False, "window": window}
        return npattn.attention(
            q, k, v, mask, scale=scale, softcap=softcap, **options
        ).astype(q.dtype)  # fmt: skip

    return f


def both(q, mask, causal, scale, window):
    return mask is not None and causal


def other_masks(q, mask, causal, scale, window):
    return mask is not None and (mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[-2] != 1)


# What it refuses and how, lines of the report, and what is sampled, which may also be a conflict.
LEARNED = {
    "a pair of options": (
        both, NotImplementedError("not both"),
        ['option combinations refused: mask+causal "NotImplementedError: not both"'],
        lambda recipes, space: not any(r.mask and r.causal for r in recipes)
        and any(r.mask for r in recipes) and any(r.causal for r in recipes),
    ),
    "values of a number": (
        lambda q, mask, causal, scale, window: scale is not None and scale <= 0,
        ValueError("scale must be positive"), ["option values refused"],
        lambda recipes, space: {r.scale for r in recipes} == {None, 0.5, 1.0, 1.7},
    ),
    "values of a pair": (
        lambda q, mask, causal, scale, window: window is not None and window[1] != 0,
        NotImplementedError("left only"), ["option values refused"],
        lambda recipes, space: {r.window for r in recipes} == {None, (0, 0), (1, 0), (7, 0)},
    ),
    "kinds of masks": (
        other_masks, ValueError("key padding only"), [],
        lambda recipes, space: {r.mask for r in recipes} == {None, "padding", "left padding"}
        and all(len(r.lead or ()) == 1 for r in recipes if r.mask)
        and Pools(space, force={"mask": ("first tile",)}).conflict == "refuses mask (B, H, T, S)",
    ),
    "anything that is not causal": (
        lambda q, mask, causal, scale, window: not causal, NotImplementedError("always causal"),
        ['always causal: refused without "NotImplementedError: always causal"'],
        lambda recipes, space: all(r.causal for r in recipes)
        and Pools(space, forbid=frozenset({"causal"})).conflict == "causal is always on",
    ),
    "a window without causal": (
        lambda q, mask, causal, scale, window: window is not None and not causal,
        ValueError("a window needs causal"), [],
        lambda recipes, space: {r.causal for r in recipes if r.window} == {True},
    ),
    "a mask at a size of 0": (
        lambda q, mask, causal, scale, window: mask is not None and not q.size,
        ValueError("no samples"), ["B = 0 with mask"],
        lambda recipes, space: not any(r.mask and r.lead and 0 in r.lead for r in recipes),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNED)
def test_refusal_is_learned(name):
    refuses, error, lines, is_sampled = LEARNED[name]
    found = run_probe(refusing(refuses, error), framework="numpy")
    assert found.findings == ()
    for line in lines:
        assert sum(line in refused for refused in found.refused) == 1
    assert is_sampled(sampled(found, 200), found.trial.space)


@pytest.mark.parametrize("error", [IndexError, KeyError, AttributeError, ZeroDivisionError])
def test_mistakes_are_never_refusals(error):
    found = run_probe(refusing(both, error("oops")), framework="numpy")
    (row,) = found.findings
    assert (row.rule, row.status) == ("option-mask+causal", "error")
    assert not any(r.mask and r.causal for r in sampled(found))


def test_exception_at_one_size_only_is_no_refusal():
    f = refusing(lambda q, *rest: both(q, *rest) and q.shape[-2] == 16, ValueError("not here"))
    (row,) = run_probe(f, framework="numpy").findings
    assert (row.rule, row.status) == ("option-mask+causal", "error")
    assert "other problems of its kind do not raise it" in row.message


def test_problem_that_a_rule_made_and_is_refused_shows_nothing():
    """window-as-mask states a window as a mask, which comes with causal."""
    f = refusing(both, NotImplementedError("not both"))
    report = check(f, examples=3, only=["window-as-mask"], shrink=False, diagnosis=False)
    assert {o.status for o in report.outcomes} <= {"passed", "not applicable"}


def test_sizes_are_blamed_where_plain_structure_is_wrong_too():
    def wrong_from_17_keys(q, k, v):
        return plain(q, k, v) + np.float32(k.shape[-2] > 16)

    found = run_probe(wrong_from_17_keys, framework="numpy")
    assert {"T != S", "T > S"} <= found.trial.space.structure
    assert found.findings == ()


def test_sizes_of_0_are_not_asked_of_a_function_that_is_wrong_throughout():
    found = run_probe(lambda q, k, v: 2 * plain(q, k, v), framework="numpy")
    assert not [name for name in found.trial.space.structure if name.endswith("= 0")]
    assert "sizes of 0: not asked, for the plainest problem is wrong" in found.refused


def test_broadcasting_is_probed_with_several_samples():
    def one_batch(q, k, v):
        assert q.shape[0] == k.shape[0]
        return plain(q, k, v)

    implementation = Implementation(one_batch, framework="numpy")
    for batches, refused in (((1, 2), True), ((1,), False)):
        space = Space(features=frozenset(), sizes={"B": batches})
        found = probe(Trial(implementation, Conventions(), Rounding.undeclared("float32"), space))
        assert "broadcast" not in found.trial.space.structure
        assert any(line.startswith("broadcast: refused") for line in found.refused) == refused


def test_a_view_that_repeats_samples_is_probed_with_several():
    """One sample has no stride to be 0: a function that refuses every view seemed to take it."""

    def contiguous_only(q, k, v):
        if not all(x.flags.c_contiguous for x in (q, k, v)):
            raise ValueError("contiguous arrays only")
        return plain(q, k, v)

    implementation = Implementation(contiguous_only, framework="numpy")
    for batches in ((1, 2), (1,)):
        space = Space(features=frozenset(), sizes={"B": batches})
        found = probe(Trial(implementation, Conventions(), Rounding.undeclared("float32"), space))
        assert not {"transposed", "expanded", "reversed"} & set(found.trial.space.structure)


# --- a signature of another system ----------------------------------------------------------------


def subset_of_flash_attn(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
                         window_size=(-1, -1), softcap=0.0, return_attn_probs=False):  # fmt: skip
    """Take flash-attn's parameters, and assert that most of them are at their default."""
    assert window_size == (-1, -1)
    assert softcap == 0
    assert not return_attn_probs
    alignment = "bottom_right" if causal else False
    heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
    o = npattn.attention(*heads_first, scale=softmax_scale, causal=alignment)
    return o.astype(q.dtype).swapaxes(1, 2)


def test_options_of_a_profile_that_are_asserted_away_are_refused():
    report = check(
        subset_of_flash_attn, like="flash_attn", framework="numpy", examples=4,
        only=["agreement-o", "refused-again", "first-calls"], diagnosis=False,
    )  # fmt: skip
    assert report.passed
    assert {o.rule for o in report.outcomes if o.status == "passed"} >= {"agreement-o"}
    assert "lse: return_attn_probs raises" in report.untested
    refused = [line.removeprefix("float32: ").partition(" (")[0] for line in report.refused]
    assert {"lse: refused, so it is not read", "window: refused", "softcap: refused"} <= {*refused}
    assert not report.missing


def test_only_the_results_that_raise_are_not_read():
    def f(q, k, v, *, return_lse=False, return_weights=False):
        if return_weights:
            raise NotImplementedError("no weights")
        fwd = npattn.forward(q, k, v)
        o = fwd.out.astype(q.dtype)
        return (o, fwd.lse.astype(q.dtype)) if return_lse else o

    implementation = Implementation(f, framework="numpy")
    found = run_probe(implementation)
    assert implementation.returns == ("return_lse",)
    assert [line for line in found.refused if "not read" in line] == [
        "weights: refused, so it is not read (return_weights=True raised NotImplementedError: no "
        "weights)"
    ]
