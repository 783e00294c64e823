"""check_variant: right implementations pass, mistakes are found and shrunk, scripts replay them."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from npattn.errors import DtypeError, OptionError
from npattn.testing import check_variant, variants
from npattn.testing.variants import DifferentialCase, LinearCase, replay
from npattn.variants import differential, linear
from npattn.variants.linear import chunked
from tests.testing.variants.kernels import (
    DIFFERENTIAL_MISTAKES,
    LINEAR_MISTAKES,
    Differential,
    Linear,
    TiledHeads,
)


def wrong_results(report):
    return [c.name for c in report.outcomes[0].comparisons]


def smallest(report):
    return eval(report.outcomes[0].recipe, vars(variants))


def oracle(form):
    """Our own functions in the dtype of q, in one of two forms."""

    def f(
        q, k, v, causal=False, feature_map="elu", normalise=True, eps=0.0, scale=None,
        log_decay=None, beta=None, initial_state=None, initial_normaliser=None, return_state=False,
    ):  # fmt: skip
        options = {n: x for n, x in locals().items() if n not in ("f", "return_state", "form")}
        fwd = linear.forward(**options, dtype=q.dtype, form=form)
        results = (fwd.out, fwd.state, fwd.normaliser)
        return results if normalise else results[:2]

    def backward(
        dout, q, k, v, causal=False, feature_map="elu", normalise=True, eps=0.0, scale=None,
        log_decay=None, beta=None, initial_state=None, initial_normaliser=None, dstate=None,
        dnormaliser=None,
    ):  # fmt: skip
        names = ("dout", "dstate", "dnormaliser", "names", "form")
        options = {n: x for n, x in locals().items() if n not in names}
        fwd = linear.forward(**options, dtype=q.dtype, form=form)
        grads = linear.backward(fwd, dout, dstate, dnormaliser)
        return {n: x for n, x in vars(grads).items() if x is not None}

    return f, backward


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_each_form_of_the_oracle_passes_in_float32(form):
    f, backward = oracle(form)
    report = check_variant(f, "linear", backward=backward, framework="numpy", examples=60)
    assert report.passed, report
    names = {"out", "state", "normaliser", "dq", "dlog_decay", "dbeta", "dinitial_state"}
    [outcome] = report.outcomes
    assert 40 < outcome.examples <= 60  # equal cases are asked once
    assert names <= {*outcome.powers}
    assert 0 < outcome.worst <= 1
    assert all("was judged on" in text for text in report.untested)  # of keys that grow a state
    assert report.script() == ""


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_kernel_in_its_quadratic_form_passes(dtype):
    kernel = Linear()
    f, backward = kernel.__call__, kernel.backward
    if dtype == "float64":  # it rounds constants to float32
        values = {"eps": (0.0,), "scale": (1.0,), "feature_map": ("identity", "relu", "softmax")}
    else:
        values = None
    report = check_variant(
        f, "linear", backward=backward, framework="numpy", dtype=dtype, values=values
    )
    assert report.passed, report


@pytest.mark.thorough
def test_a_kernel_with_differences_of_weights_passes():
    kernel = Differential()
    report = check_variant(
        kernel.__call__, "differential", backward=kernel.backward, framework="numpy", examples=20
    )
    assert report.passed, report
    assert {"out", "dq1", "dk2", "dv", "dlam"} <= {*report.outcomes[0].powers}


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("variant", "kind", "names"),
    [("linear", *x) for x in LINEAR_MISTAKES]
    + [("differential", *x) for x in DIFFERENTIAL_MISTAKES],
)
def test_mistakes_are_found_and_shrunk(variant, kind, names):
    kernel, examples = kind(), {"linear": 60, "differential": 20}[variant]
    report = check_variant(
        kernel.__call__, variant, backward=kernel.backward, framework="numpy", examples=examples
    )
    assert not report.passed
    assert set(wrong_results(report)) & set(names.split()), report
    case = smallest(report)
    assert variant != "linear" or case.B * case.K * case.G * case.T * case.D * case.E <= 8


@pytest.mark.thorough
def test_the_script_shows_the_failure(tmp_path):
    kernel = "tests.testing.variants.kernels"
    path = tmp_path / "shown.py"
    report = check_variant(tiled, "linear", framework="numpy", values={"feature_map": ("elu",)})
    assert not report.passed
    text = report.script()
    assert "from tests.testing.variants.test_check import tiled" in text
    assert kernel not in text
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": "."},
    )  # fmt: skip
    assert "out of tolerance" in done.stdout
    comparisons = replay(tiled, smallest(report), framework="numpy")
    assert [str(c) for c in comparisons] == done.stdout.splitlines()


def tiled(q, k, v):
    return TiledHeads()(q, k, v)


@pytest.mark.thorough
def test_the_report_says_what_it_found():
    report = check_variant(tiled, "linear", framework="numpy")
    text = str(report)
    assert "linear attention agree with the exact ones" in text
    assert "gradients, for there is no backward=" in text
    assert "sampled as LinearCase(B=1, K=2, G=2, T=1, S=1, D=1, E=1" in text
    assert "out[0, " in text
    assert "of 4 elements out of tolerance" in text
    assert wrong_results(report) == ["out"]
    local = check_variant(lambda q, k, v: q * np.nan, "linear", framework="numpy")
    assert "TODO: import your implementation" in local.script()


@pytest.mark.thorough
def test_a_wrong_shape_and_an_exception_are_failures():
    wrong = check_variant(lambda q, k, v: v[..., :0], "linear", framework="numpy")
    assert "out has shape" in str(wrong)
    integers = check_variant(
        lambda q, k, v: tiled(q, k, v).astype(int), "linear", framework="numpy"
    )
    assert "out is int64, must be floating" in str(integers)
    raises = check_variant(lambda q, k, v: q @ v, "linear", framework="numpy", values={"D": (3,)})
    assert "raised ValueError" in raises.outcomes[0].message
    assert "raised ValueError" in raises.script()
    odd = check_variant(lambda q, k, v, return_state: v, "linear", framework="numpy")
    assert "must return ['out', 'state', 'normaliser']" in odd.outcomes[0].message


def test_a_backward_may_leave_gradients_out():
    kernel = Linear()

    def backward(dout, q, k, v, causal=False, feature_map="elu", log_decay=None):
        options = {"causal": causal, "feature_map": feature_map, "log_decay": log_decay}
        grads = kernel.backward(dout, q, k, v, **options)
        return grads["q"], grads["k"], grads["v"]

    def forward(q, k, v, causal=False, feature_map="elu", log_decay=None):
        return kernel(q, k, v, causal=causal, feature_map=feature_map, log_decay=log_decay)

    report = check_variant(forward, "linear", backward=backward, framework="numpy", examples=20)
    assert report.passed, report
    assert report.untested[0] == "the gradient of log_decay, which backward does not return"
    assert report.untested[1].startswith("dq was judged on ")
    assert "dlog_decay" not in report.outcomes[0].powers


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", [None, "reads before the decay", "adds what it holds", "no β"])
def test_mistakes_of_the_delta_rule_are_found(mistake):
    def delta(q, k, v, log_decay, beta):
        state, scale, rows = np.zeros((*k.shape[:2], k.shape[-1], v.shape[-1]), q.dtype), 1, []
        for t in range(k.shape[-2]):
            row = k[..., t, :, None]
            held = state
            state = np.exp(log_decay[..., t, :, None]) * state
            held = held if mistake == "reads before the decay" else state
            error = v[..., t, None, :] - row.swapaxes(-1, -2) @ held
            if mistake == "adds what it holds":
                error = v[..., t, None, :] + row.swapaxes(-1, -2) @ held
            u = error if mistake == "no β" else beta[..., t, :, None] * error
            state = state + row * u
            rows.append((scale * q[..., t, None, :] @ state)[..., 0, :])
        return np.stack(rows, -2)

    values = {"causal": [True], "normalise": [False], "feature_map": ["identity"], "scale": [1.0]}
    values |= {"decay": ["key", "feature"], "beta": [True], "G": [1]}
    report = check_variant(delta, "linear", values=values, framework="numpy", examples=20)
    assert report.passed == (mistake is None), report


def exchange_rows(L, b):
    """Solve (1 + L) u = b as any other system of equations: in float64, whatever the dtype."""
    return np.linalg.solve(np.eye(L.shape[-1]) + L, b)


@pytest.mark.thorough
@pytest.mark.parametrize(("solve", "right"), [(chunked.solve, True), (exchange_rows, False)])
def test_a_delta_rule_that_exchanges_rows_is_found(solve, right, monkeypatch):
    monkeypatch.setattr(chunked, "solve", solve)
    f, backward = oracle("chunked")
    values = {"causal": [True], "normalise": [False], "feature_map": ["identity"]}
    values |= {"beta": [True], "long": [False, True]}
    options = {"framework": "numpy", "dtype": "float64", "values": values, "examples": 20}
    report = check_variant(f, "linear", backward=backward, **options)
    assert report.passed == right, report
    assert right or smallest(report).long


def test_the_delta_rule_has_chunks_of_64_keys_and_more():
    """Its tolerance does not grow with their number beyond what it is good for."""
    case = LinearCase(T=67, S=67, D=64, E=3, causal=True, normalise=False, feature_map="identity",
                      beta=True, decay="feature")  # fmt: skip
    request = case.request("float32")
    for name, (exact, allowed) in case.exact(request, "float32", True).items():
        if name != "dlog_decay":  # sums that cancel
            assert np.median(allowed) < 0.1 * np.median(abs(exact)), name


@pytest.mark.thorough
def test_values_say_what_an_implementation_means():
    def decayed(q, k, v, log_decay):
        options = {"causal": True, "feature_map": "identity", "normalise": False}
        return Linear()(q, k, v, log_decay=log_decay, **options)

    values = {"causal": (True,), "feature_map": ("identity",), "normalise": (False,)}
    report = check_variant(decayed, "linear", values=values, framework="numpy")
    assert report.passed, report
    assert not check_variant(decayed, "linear", framework="numpy").passed


@pytest.mark.thorough
def test_torch_functions_are_differentiated():
    torch = pytest.importorskip("torch")

    def attention(q, k, v, causal=False, normalise=True):
        q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        w = q @ k.mT / q.shape[-1] ** 0.5
        w = w.tril() if causal else w
        return w @ v / w.sum(-1, keepdim=True) if normalise else w @ v

    def blind(q, k, v, causal=False):
        return attention(q, k.detach(), v, causal)

    for dtype, unseen in (("float32", ()), ("bfloat16", ("dq", "dk"))):
        options = {"framework": "torch", "dtype": dtype, "examples": 20}
        report = check_variant(attention, "linear", **options, accept=unseen)
        assert report.passed, report
        assert check_variant(attention, "linear", **options).passed == (not unseen)
        assert {"dq", "dk", "dv"} <= {*report.outcomes[0].powers}
    found = check_variant(blind, "linear", framework="torch", examples=20)
    assert wrong_results(found) == ["dk"]

    def difference(q1, k1, q2, k2, v, mask=None, bias=None, lam=1.0, norm=False):
        one = torch.nn.functional.scaled_dot_product_attention
        groups = q1.shape[1] // v.shape[1]
        k1, k2, v = (x.repeat_interleave(groups, 1) for x in (k1, k2, v))
        hidden = bias
        if mask is not None:
            zeros = torch.zeros(()) if bias is None else bias
            hidden = torch.where(mask, zeros, -torch.inf)
        first, second = (one(q, k, v, attn_mask=hidden) for q, k in ((q1, k1), (q2, k2)))
        y = first - (lam[:, None, None] if lam.ndim else lam) * second
        return torch.nn.functional.rms_norm(y, y.shape[-1:], eps=1e-5) if norm else y

    report = check_variant(difference, "differential", framework="torch", examples=20)
    assert report.passed, report
    assert {"dbias", "dlam"} <= {*report.outcomes[0].powers}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"variant": "quadratic"}, OptionError, "must be one of linear, differential"),
        ({"dtype": "float16"}, DtypeError, "must be one of float32, float64, bfloat16"),
        ({"examples": 0}, OptionError, "examples is 0"),
        ({"values": {"dropout": (0,)}}, OptionError, "values has 'dropout', must have fields"),
        ({"values": {"T": ()}}, OptionError, "values['T'] is empty"),
        ({"values": {"causal": (True, False)}}, OptionError, "names no causal: pass the one"),
    ],
)
def test_errors_name_the_way_out(options, error, words):
    with pytest.raises(error) as caught:
        check_variant(**({"f": tiled, "variant": "linear", "framework": "numpy"} | options))
    assert words in str(caught.value)


def test_a_variant_may_be_a_class_of_cases():
    report = check_variant(tiled, LinearCase, framework="numpy", values={"G": (1,)})
    assert report.passed
    assert report.settings["variant"] == "LinearCase"


def test_cases_are_the_same_for_a_seed():
    for case in (LinearCase(T=3, seed=4), DifferentialCase(T=3, mask=True, bias=True, seed=4)):
        one, two = case.request("float32"), case.request("float32")
        for name, array in one.positional.items():
            assert np.array_equal(array, two.positional[name])
            assert array.dtype == np.float32
        exact = case.exact(one, "float32", True)
        assert all((allowed >= 0).all() for _, allowed in exact.values())


@pytest.mark.thorough
def test_dropped_options_of_differential_attention_are_passed():
    def f(q1, k1, q2, k2, v, lam, sinks=None, softcap=None, norm_weight=None, norm=False):
        return differential.attention(
            q1, k1, q2, k2, v, lam=lam, sinks=sinks, softcap=softcap, norm_weight=norm_weight,
            norm=norm, dtype=q1.dtype,
        )  # fmt: skip

    report = check_variant(f, "differential", framework="numpy", examples=20)
    assert report.passed, report
    without = check_variant(
        lambda q1, k1, q2, k2, v, lam, softcap=None: f(q1, k1, q2, k2, v, lam),
        "differential", framework="numpy", examples=20,
    )  # fmt: skip
    assert smallest(without).softcap == 2.0


# --- what a check asks, and what it says that it did not ------------------------------------------


def split(rescales):
    """Differential attention over keys in tiles of 32, whose sums may forget their rescaling."""

    def attend(q, k, v):
        s = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
        m, total, out = np.full((*s.shape[:-1], 1), -np.inf, np.float32), 0, 0
        for at in range(0, s.shape[-1], 32):
            tile = s[..., at : at + 32]
            new = np.maximum(m, tile.max(-1, keepdims=True))
            p, factor = np.exp(tile - new), np.exp(m - new)
            total = total * factor + p.sum(-1, keepdims=True)
            out = out * (factor if rescales else 1) + p @ v[..., at : at + 32, :]
            m = new
        return out / total

    def f(q1, k1, q2, k2, v, lam):
        return attend(q1, k1, v) - (lam[:, None, None] if lam.ndim else lam) * attend(q2, k2, v)

    return f


@pytest.mark.thorough
@pytest.mark.parametrize("rescales", [True, False])
def test_sizes_go_beyond_the_end_of_a_tile(rescales):
    options = {"values": {"G": [1]}, "framework": "numpy"}
    assert check_variant(split(rescales), "differential", **options).passed == rescales


@pytest.mark.parametrize("name", ["q1", "v", "lam"])
def test_an_input_that_is_changed_fails(name):
    def f(q1, k1, q2, k2, v, lam):
        out = split(True)(q1, k1, q2, k2, v, lam)
        given = locals()[name]
        given *= 0
        return out

    report = check_variant(f, "differential", values={"G": [1]}, framework="numpy")
    assert report.outcomes[0].message == f"changed its input {name}"
    assert not report.passed


def test_options_that_no_problem_had_are_untested():
    def f(q1, k1, q2, k2, v, lam, window=None, dropout_mask=None):
        return split(True)(q1, k1, q2, k2, v, lam)

    report = check_variant(f, "differential", values={"G": [1]}, framework="numpy", examples=5)
    assert report.passed
    assert report.untested[1:] == (
        "window, which no problem had",
        "dropout_mask, which no problem had",
    )


def test_values_that_other_fields_change_are_untested():
    def delta(q, k, v, beta=None):
        assert beta is None
        weights = (q @ k.swapaxes(-1, -2)) * np.tri(q.shape[-2], dtype=np.float32)
        return weights @ v * np.float32(q.shape[-1] ** -0.5)

    plain = {"causal": [True], "feature_map": ["identity"], "normalise": [False], "G": [1]}
    values = plain | {"beta": [False], "S": [3]}
    report = check_variant(delta, "linear", values=values, framework="numpy", examples=5)
    assert report.passed
    changed, beta = report.untested[1:]
    assert changed.startswith("S 3 everywhere: problems had ")
    assert beta == "beta, which no problem had"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"T": 5}, r"values\['T'\] is 5, must be a sequence of values: \(5,\)"),
        ({"T": "5"}, r"values\['T'\] is '5', must be a sequence"),
        ({"T": ["a"]}, r"values\['T'\] is 'a', must be an integer ≥ 1"),
        ({"T": [0]}, r"is 0, must be an integer ≥ 1"),
        ({"T": [True]}, r"is True, must be an integer ≥ 1"),
        ({"seed": [-1]}, r"values\['seed'\] is -1, must be an integer ≥ 0"),
        ({"causal": [1]}, r"has 1, must have True or False"),
        ({"decay": ["channel"]}, r"has 'channel', must have values among None, 'head', 'key'"),
        ({"decay": [len]}, r"must have values among None, 'head', 'key'"),
        ({"scale": ["1"]}, r"has '1', must have finite numbers or None"),
        ({"eps": [None]}, r"has None, must have finite numbers$"),
        ([("T", 5)], r"values is of type list, must be a mapping"),
    ],
)
def test_illegal_values_name_the_legal_ones(values, words):
    f, _ = oracle("recurrent")
    with pytest.raises(OptionError, match=words):
        check_variant(f, "linear", values=values, framework="numpy")


@pytest.mark.parametrize("variant", [7, int, "quadratic"])
def test_a_variant_is_a_name_or_a_class(variant):
    with pytest.raises(OptionError, match="must be one of linear, differential, or a subclass"):
        check_variant(oracle("recurrent")[0], variant, framework="numpy")


@pytest.mark.thorough
def test_a_norm_of_almost_nothing_has_a_tolerance():
    """In bfloat16 the error of y may be larger than y; the root of eps is left."""
    case = DifferentialCase(T=3, S=5, D=8, E=2, norm=True, norm_eps=1e-5, scale=-0.75, seed=0)
    for seed in range(150):
        one = replace(case, seed=seed)
        request = one.request("bfloat16")
        found = one.exact(request, "bfloat16", gradients=True)
        for exact, tolerance in found.values():
            assert np.isfinite(exact).all()
            assert (tolerance > 0).all()
