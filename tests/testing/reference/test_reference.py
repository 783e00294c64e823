"""A function judged by another: right forms pass, mistakes fail, and say where."""

from collections import Counter

import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.testing import Implementation, check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.reference.check import check_reference, replay
from npattn.testing.reference.decisions import Decisions
from npattn.testing.reference.intermediates import Watched
from npattn.testing.reference.letters import Case, LetterSpace, read_inputs
from npattn.testing.reference.noise import Noise
from npattn.testing.reference.spread import Call, Spread, judge, quantile

INPUTS = {"x": "B T C", "w": "C"}
SIZES = {"B": (2, 1), "T": (3, 7, 17), "C": (5, 2, 11)}


def norm(x, w, flip=False, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + x.dtype.type(eps)) * w
    return -y if flip else y


def norm_backward(dout, x, w, flip=False):
    sign = x.dtype.type(-1 if flip else 1)
    centred = x - x.mean(-1, keepdims=True)
    root = np.sqrt((centred**2).mean(-1, keepdims=True) + x.dtype.type(1e-5))
    n, dn = centred / root, sign * dout * w
    dx = (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True)) / root
    return dx, (sign * dout * n).sum((0, 1))


def other_form(x, w, flip=False):
    mean = x.sum(-1, keepdims=True) / x.dtype.type(x.shape[-1])
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    y = w * (x - mean) * (1 / np.sqrt(var + x.dtype.type(1e-5)))
    return y * x.dtype.type(-1) if flip else y


def other_backward(dout, x, w, flip=False):
    dx, dw = norm_backward(dout.copy(), x, w, flip)
    return {"w": np.einsum("btc->c", dw[None, None]), "x": dx}


def without_mean(dout, x, w, flip=False):
    dx, dw = norm_backward(dout, x, w, flip)
    return dx + dx.dtype.type(0.01), dw


def careless(x, w, flip=False):
    return norm(x, w, flip, eps=1e-4)


def late(x, w, flip=False):
    """Forget to flip where there are more than 16 rows."""
    return norm(x, w, flip and x.shape[1] <= 16)


def ask(f, reference=norm, **changes):
    arguments = {"inputs": INPUTS, "sizes": SIZES, "examples": 12, "options": None, **changes}
    return check(f, reference=reference, **arguments)


# --- right and wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_other_form_passes_and_mistake_fails(dtype):
    assert ask(other_form, dtypes=(dtype,)).passed
    assert not ask(careless, dtypes=(dtype,), sizes={"C": (2, 5), "B": (1,), "T": (2,)}).passed or (
        dtype in ("float16", "bfloat16")  # where roundings explain as much as eps does
    )


def test_reference_passes_itself_with_gradients():
    reference = (norm, norm_backward)
    report = ask(other_form, reference, backward=other_backward, options={"flip": (False, True)})
    assert report.passed
    assert [o.rule for o in report.outcomes] == ["reference-out", "reference-dx", "reference-dw"]
    assert report.untested == ()


def test_wrong_gradient_fails_alone():
    report = ask(other_form, (norm, norm_backward), backward=without_mean)
    assert [o.rule for o in report.outcomes if o.failed] == ["reference-dx"]


def test_report_says_where_it_fails():
    report = ask(late, options={"flip": (False, True)}, sizes=None, examples=40)
    [cause] = report.causes
    assert cause.passes_when == "fails only where flip and C > 1 and T > 16"
    words = "It differs from norm: out is negated; it fails only where flip and C > 1 and T > 16"
    assert words in str(report)


def test_smallest_failing_case_is_replayed():
    report = ask(careless)
    [outcome] = report.outcomes
    assert outcome.recipe.startswith("Case(sizes={'B': 1, 'C': 2, 'T': 3}")
    case = eval(outcome.recipe, {"Case": Case})
    [comparison] = replay(careless, norm, case, inputs=INPUTS)
    assert comparison.ratio > 1
    [right] = replay(other_form, norm, case, inputs=INPUTS)
    assert right.passed


def test_results_of_several_kinds_are_named():
    def both(x, w):
        return {"sum": x + w, "count": np.asarray(x.shape[0])}

    assert [o.rule for o in ask(both, both).outcomes] == ["reference-sum", "reference-count"]
    pair = ask(lambda x, w: (x, w * 2), lambda x, w: (x, w + w))
    assert [o.rule for o in pair.outcomes] == ["reference-out[0]", "reference-out[1]"]
    assert pair.passed


def test_wrong_shape_and_nan_fail():
    assert not ask(lambda x, w: norm(x, w)[..., :1]).passed
    assert not ask(lambda x, w: norm(x, w) * np.where(x[:1] > 0, 1, np.nan).astype(x.dtype)).passed


def test_refused_cases_are_listed():
    def even(x, w):
        if x.shape[1] == 7:
            raise ValueError("no T of 7")
        return norm(x, w)

    report = ask(even)
    assert report.passed
    assert any("no T of 7" in line for line in report.refused)


def test_exception_that_is_no_refusal_is_an_error():
    broken = lambda x, w: x.nothing if len(x) > 1 else x  # noqa: E731
    report = ask(broken, lambda x, w: x, framework="numpy")
    assert [o.status for o in report.outcomes] == ["passed", "error"]
    assert not report.passed


# --- torch ----------------------------------------------------------------------------------------


def torch_norm(x, w):
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True) + 1e-5).sqrt() * w


def detached(x, w):
    return torch_norm(x, w.detach() if x.shape[-1] > 2 else w)


def test_torch_gradients_are_its_own():
    import torch

    def library(x, w):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], w)

    right = ask(library, torch_norm, framework="torch", examples=8)
    assert right.passed
    wrong = ask(detached, torch_norm, framework="torch", examples=8)
    assert [o.rule for o in wrong.outcomes if o.failed] == ["reference-dw"]


def test_frameworks_may_differ():
    pytest.importorskip("torch")
    report = ask(other_form, torch_norm, framework="numpy", examples=6)
    assert report.passed
    assert "gradients, which one of them has not" in report.untested[0]


def rotate(x, base=1e4):
    half = x.shape[-1] // 2
    at = np.arange(x.shape[-2])[:, None] * base ** -(np.arange(half) / half)
    a, b, c, s = x[..., :half], x[..., half:], np.cos(at), np.sin(at)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def slow(q, k, v):
    if q.shape[-1] % 2 or q.shape[:-1] != k.shape[:-1]:
        raise ValueError("sizes")
    s = rotate(q) @ rotate(k).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True) @ v).astype(q.dtype)


def fused(q, k, v):
    return slow(q * q.dtype.type(2), k * k.dtype.type(0.5), v)


def shifted(q, k, v):
    return slow(q, np.concatenate([k[..., :16, :], k[..., 16:, :] * k.dtype.type(1.25)], -2), v)


@pytest.mark.thorough
def test_functions_of_q_k_v_need_no_inputs():
    sizes = {"T": (3, 17, 23), "S": (3, 17, 23), "D": (2, 8)}
    right, wrong = (check(f, reference=slow, sizes=sizes, examples=10) for f in (fused, shifted))
    assert right.passed
    assert [o.rule for o in right.outcomes] == ["reference-o"]
    assert wrong.causes[0].passes_when == "fails only where S > 3"  # of what was asked
    recipe = eval(wrong.outcomes[0].recipe, {"Recipe": Recipe})
    assert not all(c.passed for c in replay(shifted, slow, recipe))


@pytest.mark.thorough
def test_function_that_is_not_attention_points_here():
    report = check(fused, examples=20)
    [cause] = report.causes
    assert cause.text.startswith("It is not attention: o is wrong on ")
    assert "check(f, reference=g" in cause.text


@pytest.mark.thorough
def test_wrong_attention_is_still_explained():
    def twice(q, k, v):
        s = q @ k.swapaxes(-1, -2) / q.dtype.type(q.shape[-1])
        e = np.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) @ v

    report = check(twice, examples=20, framework="numpy")
    assert report.causes[0].step == "s"
    assert not report.causes[0].text.startswith("It is not attention")


# --- what may differ ------------------------------------------------------------------------------


def test_quantile_is_that_of_student():
    stats = pytest.importorskip("scipy.stats")
    for draws in (17, 32):
        for alarm in (1e-4, 1e-9):
            exact = stats.t.isf(alarm / 2, draws)
            assert exact <= quantile(alarm, draws) < 1.1 * exact
    assert quantile(1e-9, None) == pytest.approx(stats.norm.isf(5e-10), rel=1e-6)


def test_every_operation_is_rounded():
    """A difference that inputs leave 0 shows the rounding of what lies between."""
    u = 2.0**-24
    watched = Watched(lambda x: (x * 3) / 3 - x, "numpy")
    with watched.running(Noise(u, 0.0, np.random.default_rng(0)), Decisions()):
        errors = watched(np.ones(2000))
    assert 0.5 * u < errors.std() < 2 * u
    assert type(errors) is np.ndarray


def test_terms_of_sums_are_rounded():
    """1 − 1 + 1 − … is 0, and its error is that of its terms."""
    u, x = 2.0**-24, np.tile([1.0, -1.0], 512)
    for total in (np.sum, lambda y: np.ones(1024) @ y, lambda y: np.einsum("i->", y)):
        watched = Watched(lambda y, f=total: f(y[None] * 1.0 if f is None else y), "numpy")
        errors = []
        for seed in range(60):
            with watched.running(Noise(u, 0.0, np.random.default_rng(seed)), Decisions()):
                errors.append(float(watched(x)))
        assert 10 * u < np.std(errors) < 60 * u


def test_constants_of_torch_stay():
    import torch

    def f(x):
        return torch.arange(5, dtype=torch.float64) * 0.1, x * 3

    watched = Watched(f, "torch")
    with watched.running(Noise(2.0**-10, 0.0, np.random.default_rng(0)), Decisions()):
        constant, result = watched(torch.full((5,), 1.1, dtype=torch.float64))
    assert torch.equal(constant, torch.arange(5, dtype=torch.float64) * 0.1)
    assert not torch.equal(result, torch.full((5,), 1.1 * 3, dtype=torch.float64))


def cancelling(given):
    return {"out": given["x"] * np.float64(1)}


def test_false_alarms_are_rare_for_an_error_as_modelled():
    """Errors of one rounding of each number, many times: none is an alarm."""
    rng = np.random.default_rng(7)
    counts = Counter()
    for seed in range(50):
        x = rng.standard_normal(301).astype(np.float32)
        error = 1 + 2.0**-24 * rng.uniform(-1, 1, x.shape)

        def f(given, error=error):
            return {"out": given["x"].astype(np.float64) * error}

        call = Call({"x": x}, f, cancelling, Watched(None, ""), 1)
        [comparison] = judge(call, "float32", seed, 1e-4).comparisons
        counts[comparison.passed] += 1
    assert counts == {True: 50}


def test_reference_that_takes_no_float64_is_asked_in_the_dtype():
    def narrow(x, w):
        if x.dtype == np.float64:
            raise ValueError("no float64")
        return norm(x, w)

    report = ask(other_form, narrow)
    assert report.passed
    assert "in float64, which it does not take" in report.untested[1]
    assert not ask(careless, narrow, sizes={"C": (2,), "B": (1,), "T": (3,)}).passed


def test_error_of_the_reference_in_the_dtype_counts():
    x = np.linspace(1, 2, 11, dtype=np.float32)

    def coarse(given):
        return {"out": given["x"] + (1e-3 if given["x"].dtype == np.float32 else 0)}

    spread = Spread(Call({"x": x}, coarse, coarse, Watched(None, ""), 1), "float32", 0)
    spread.draw(6)
    assert spread.coarse["out"] > 1e6
    assert (spread.tolerance("out", 1e-4, last=True) > 1e-3).all()


# --- arguments ------------------------------------------------------------------------------------


def test_letters_are_read():
    arrays = read_inputs({"x": "B T*H 3C 7", "mask": "T T bool", "ids": "B int 2V"})
    sizes = {"B": 2, "T": 5, "H": 3, "C": 11, "V": 13}
    assert [x.shape(sizes) for x in arrays.values()] == [(2, 15, 33, 7), (5, 5), (2,)]
    case = Case(sizes)
    made = case.arrays(arrays, "bfloat16")
    assert made["x"].dtype.name == "bfloat16"
    assert made["mask"].dtype == bool
    assert made["mask"][:, 0].all()
    assert 0 <= made["ids"].min() <= made["ids"].max() < 26


def test_cases_differ_and_shrink():
    space = LetterSpace(read_inputs(INPUTS), {"flip": (False, True)}, {"T": (3, 7)})
    cases = list(space.cases(0, 30))
    assert len(set(cases)) == 30
    assert {case.sizes["T"] for case in cases} == {3, 7}
    large = Case({"B": 5, "T": 7, "C": 11}, {"flip": True})
    smaller = list(space.smaller(large))
    assert Case(large.sizes, {"flip": False}) in smaller
    assert {case.sizes["T"] for case in smaller} == {7, 3}
    assert {case.sizes["C"] for case in smaller} >= {1, 5, 10}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": {"x": "B T?"}}, "whose axis 'T\\?' is no letter"),
        ({"inputs": ["x"]}, "must be a mapping"),
        ({"inputs": {"m": "T bool"}}, "must have an array of floating numbers"),
        ({"sizes": {"Q": (2,)}}, "sizes has 'Q', which no array has: B, C, T"),
        ({"options": {"flip": "no"}}, "must be a sequence of values"),
        ({"inputs": None, "options": {"flip": (True,)}}, "got options without inputs"),
        ({"strict": True}, "got strict beside reference"),
        ({"reference": None}, "got inputs without reference"),
    ],
)
def test_illegal_arguments(changes, words):
    with pytest.raises(OptionError, match=words):
        ask(norm, **changes)


def test_implementation_beside_inputs_is_refused():
    f = Implementation(lambda q, k, v: q, framework="numpy")
    with pytest.raises(OptionError, match="got inputs beside an Implementation"):
        check_reference(f, norm, inputs=INPUTS)
