"""engine="fused": PyTorch's kernels give what npattn means, or the problem is refused."""

import warnings
from functools import lru_cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torch.testing import assert_close  # noqa: E402

import npattn.torch  # noqa: E402
from npattn import Conventions, biases, masks  # noqa: E402
from npattn.errors import OptionError  # noqa: E402
from npattn.testing import check, compare  # noqa: E402
from npattn.testing.targets import TARGETS  # noqa: E402
from npattn.torch import Problem, attention, forward, kernels  # noqa: E402
from npattn.torch.kernels import flex, sdpa  # noqa: E402
from npattn.torch.kernels.operands import unflatten  # noqa: E402

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 4, 11
CUDA = torch.device("cuda")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=dtype)


def operands(*, lead=(B,), keys=K, T=T, S=S, D=D, E=E, dtype=torch.float64):
    shapes = ((*lead, H, T, D), (*lead, keys, S, D), (*lead, keys, S, E))
    return [normal(*x, seed=i, dtype=dtype).requires_grad_() for i, x in enumerate(shapes)]


def results(engine, given, *more, **options):
    out = attention(*given, engine=engine, **options)
    leaves = [x for x in (*given, *more) if x.requires_grad]
    return out, *torch.autograd.grad((out * normal(*out.shape)).sum(), leaves)


def both_agree(given, *more, **options):
    assert_close(
        results("fused", given, *more, **options), results("auto", given, *more, **options)
    )


# --- judged ---------------------------------------------------------------------------------------

# What kernels do with NaN and inf: docs/findings.md.
NOT_PROMISED = {"hidden-nan-k", "hidden-nan-v", "hidden-nan-kv", "nan-query", "nan-query-alone"}


ONLY = ["agreement-", "empty-row", "hidden-nan-", "nan-query", "offset-bias"]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.broad
def test_judge_fails_only_unpromised_rules(dtype):
    target = TARGETS["npattn.torch-fused"]
    report = check(
        target.load()[0], conventions=target.conventions, dtypes=(dtype,), examples=4, only=ONLY
    )
    failed = {o.rule for o in report.outcomes if o.status in ("failed", "error")}
    passed = {o.rule for o in report.outcomes if o.status == "passed"}
    assert "hidden-nan-v" in failed
    assert failed <= NOT_PROMISED
    agreement = {f"agreement-{name}" for name in ("o", "dq", "dk", "dv", "dbias")}
    assert agreement | {"empty-row", "offset-bias"} <= passed


@pytest.mark.thorough
def test_judge_passes_the_exact_engine():
    report = check(TARGETS["npattn.torch"].load()[0], examples=4, only=ONLY)
    assert report.passed
    assert "agreement-dsinks" in {o.rule for o in report.outcomes if o.status == "passed"}


# --- what scaled_dot_product_attention is given ---------------------------------------------------

OPTIONS = {
    "nothing": {},
    "causal, bottom right": {"causal": "bottom_right"},
    "causal, top left": {"causal": "top_left"},
    "window": {"window": (2, 1)},
    "window with causal": {"window": (1, None), "causal": "top_left"},
    "mask": {"mask": normal(B, 1, T, S) > 0},
    "mask of keys with causal": {"mask": normal(T, S) > 0, "causal": "bottom_right"},
    "documents": {"mask": masks.documents(np.arange(T) // 2, np.arange(S) // 2)},
    "lengths": {"mask": masks.lengths([5, 0])},
    "scale": {"scale": 0.3},
    "negative scale with causal": {"scale": -0.3, "causal": "top_left"},
    "no scale with causal": {"scale": 0.0, "causal": "top_left"},
    "bias": {"bias": normal(H, T, S)},
    "bias with mask and causal": {"bias": normal(B, 1, T, S), "mask": normal(1, S) > 0,
                                  "causal": "bottom_right"},
    "alibi": {"bias": biases.alibi([0.5**h for h in range(1, H + 1)]), "causal": "bottom_right"},
}  # fmt: skip


@pytest.mark.parametrize("keys", [H, K])
@pytest.mark.parametrize("options", OPTIONS)
def test_options_agree_with_the_exact_engine(options, keys):
    both_agree(operands(keys=keys), **OPTIONS[options])


@pytest.mark.parametrize(("T", "S"), [(5, 5), (7, 5), (1, 7), (7, 1)])
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_causal_agrees_at_any_lengths(causal, T, S):
    both_agree(operands(T=T, S=S), causal=causal)


def test_leading_axes_agree():
    both_agree([x[0, 0] for x in operands(keys=H)], causal="bottom_right")
    both_agree(operands(lead=()), bias=normal(T, S))
    both_agree(operands(lead=(2, 3)), mask=normal(2, 1, H, 1, S) > 0)
    both_agree(operands(lead=(2, 3)), mask=normal(3, 1, T, 1) > 0, bias=normal(H, 1, S))
    q, k, v = operands()
    both_agree([q, k[0], v[:1]])


def test_gradient_of_a_bias_agrees():
    bias = normal(H, 1, S).requires_grad_()
    both_agree(operands(), bias, bias=bias, causal="bottom_right")


@pytest.mark.parametrize("causal", [False, "top_left"])
def test_gradients_of_rows_with_a_bias_of_minus_1e9(causal):
    given = operands(T=8, S=8, D=8, E=8, dtype=torch.float32)
    bias = torch.zeros(8, 8)
    bias[1:] = -1e9
    _, _, _, dv = results("fused", given, bias=bias, causal=causal)
    dout = normal(B, H, 8, 8).float()  # the weights of a row sum to 1, so that dv sums to dout
    assert_close(dv.sum(-2), dout.reshape(B, K, H // K, 8, 8).sum((2, 3)))


def test_autocast_does_not_change_the_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = operands(dtype=dtype)
        plain = attention(*given, engine="fused")
        with torch.autocast("cpu", torch.bfloat16):
            under = attention(*given, engine="fused")
        assert plain.dtype == under.dtype == dtype
        assert_close(under, plain, rtol=0, atol=0)
        assert_close(plain, attention(*given).to(dtype))


def test_triangle_is_one_call_without_copies(monkeypatch):
    calls = []

    def record(*args, **kwargs):
        calls.append((args, kwargs))
        return scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", record)
    given = operands(S=T)
    attention(*given, engine="fused", causal=True)
    ((args, kwargs),) = calls
    assert args[3:] == (None, 0.0, True)
    assert kwargs == {"scale": D**-0.5, "enable_gqa": True}
    assert all(x is y for x, y in zip(args[1:3], given[1:], strict=True))
    assert args[0] is given[0]


@pytest.mark.parametrize("options", [{"mask": torch.ones(T, 1) > 0}, {"bias": normal(H, T, 1)}])
def test_one_number_for_all_keys_is_written_out(monkeypatch, options):
    """EFFICIENT_ATTENTION takes a last axis of 1 for one of S on CUDA."""
    given = []

    def record(q, k, v, mask, **kwargs):
        given.append(mask)
        return scaled_dot_product_attention(q, k, v, mask, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", record)
    both_agree(operands(), **options)
    assert {x.shape[-1] for x in given} == {S}
    assert all(x.is_contiguous() for x in given)


def test_last_query_needs_no_mask(monkeypatch):
    masked = []
    monkeypatch.setattr(
        sdpa,
        "scaled_dot_product_attention",
        lambda q, k, v, mask, **_: masked.append(mask) or torch.zeros(B, H, 1, E),
    )
    attention(*operands(T=1), engine="fused", causal="bottom_right")
    attention(*operands(T=1), engine="fused", causal="bottom_right", window=(2, 0))
    assert masked[0] is None
    assert masked[1].tolist() == [[[[False] * 4 + [True] * 3]]]


def test_other_engines_do_not_call_the_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "evaluate", None)
    for engine in ("auto", "tiled", "dense"):
        assert attention(*operands(), engine=engine).dtype == torch.float64
    with pytest.raises(TypeError, match="not callable"):
        attention(*operands(), engine="fused")


# --- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "take no dropout_mask": {"dropout_mask": normal(T, S) > 0},
    "have no sinks": {"sinks": normal(H)},
    "softcap is 2.0, which only FlexAttention has, and q is on cpu": {"softcap": 2.0},
    "there is a score_mod, which only FlexAttention has": {
        "score_mod": lambda s, b, h, t, i: 2 * s
    },
    "bias is float32, must be float64": {"bias": normal(T, S, dtype=torch.float32)},
    "dtype is torch.float32, must be None": {"dtype": torch.float32},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_options_are_refused(reason):
    with pytest.raises(OptionError, match=reason):
        attention(*operands(), engine="fused", **REFUSED[reason])
    assert attention(*operands(), engine="auto", **REFUSED[reason]).isfinite().all()


def test_unsupported_operands_are_refused():
    q, k, v = operands()
    for given, message in (
        ((q, k.float(), v), "float64, float32, float64, must be one of"),
        ([x.to(torch.float8_e5m2) for x in (q, k, v)], "float8_e5m2"),
        ((q, k[..., :0, :], v[..., :0, :]), "S is 0"),
        ([x[:0] for x in (q, k, v)], "the batch is 0"),
    ):
        with pytest.raises(OptionError, match=message):
            attention(*given, engine="fused")


def test_conventions_are_translated_or_refused():
    given, hidden = operands(), normal(T, S) > 0
    for conventions, options in (
        (Conventions(mask_true="hide"), {"mask": hidden}),
        (Conventions(causal="top_left"), {"causal": True}),
        (Conventions(kv_head="tile"), {}),
        (Conventions(window="inclusive"), {"window": (2, 1)}),
        (Conventions(empty_row="nan"), {}),
    ):
        both_agree(given, conventions=conventions, **options)
    for conventions, options, message in (
        (Conventions(hidden_fill=-1e9), {"mask": hidden}, "hidden scores are filled"),
        (Conventions(empty_row="nan"), {"mask": hidden}, "empty_row is 'nan'"),
        (Conventions(bias="before_scale"), {"bias": normal(T, S)}, "bias is 'before_scale'"),
        (Conventions(softcap="after_bias"), {"softcap": 2.0}, "softcap is 'after_bias'"),
    ):
        with pytest.raises(OptionError, match=message):
            attention(*given, engine="fused", conventions=conventions, **options)


def test_missing_results_are_refused():
    fwd = forward(*operands(), engine="fused")
    assert (fwd.lse, fwd.engine) == (None, "fused")
    with pytest.raises(OptionError, match='engine="fused" has no weights'):
        fwd.weights  # noqa: B018
    with pytest.raises(OptionError, match="ask autograd"):
        npattn.torch.backward(fwd, fwd.out)
    with pytest.raises(OptionError, match="lse was requested, which only FlexAttention has"):
        kernels.forward(fwd.problem, lse=True)


# --- what FlexAttention is given: forward alone, uncompiled, for its backward needs a GPU ---------


def evaluate_uncompiled(problem):
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that it is not compiled
        out, lse = flex.evaluate_flex(problem, flex_attention)
    return unflatten(out, problem), unflatten(lse, problem)


TABLE = normal(S)
FLEX = {
    "softcap": {"softcap": 2.0},
    "score_mod": {"score_mod": lambda s, b, h, t, i: s * (1 + b + 2 * h) - (t - i).abs()},
    "score_mod of a table": {"score_mod": lambda s, b, h, t, i: s + TABLE[i]},
    "softcap with all": {"softcap": 2.0, "bias": normal(B, 1, T, S), "causal": "bottom_right",
                         "window": (3, None), "score_mod": lambda s, b, h, t, i: 2 * s,
                         "mask": normal(B, H, 1, S) > 0},
    "window": {"window": (1, 2)},
    "causal": {"causal": "top_left"},
    "documents": {
        "mask": masks.documents(
            [[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]], [[0, 0, 0, 1, 1, 1, 3], [1] * 7]
        ),
    },
    "documents with a window": {
        "mask": masks.documents(np.arange(T) // 2, np.arange(S) // 3)
        & masks.window(2, 1, alignment="bottom_right"),
    },
    "lengths": {"mask": masks.lengths([5, 0])},
    "mask": {"mask": normal(T, 1) > 0},
    "negative scale": {"scale": -0.5, "causal": "bottom_right"},
}  # fmt: skip


@pytest.mark.parametrize("options", FLEX)
def test_flex_agrees_with_the_exact_engine(options):
    given = [x.detach() for x in operands()]
    expected = forward(*given, **FLEX[options])
    result = evaluate_uncompiled(Problem(*given, **FLEX[options]))
    assert_close(result[0], expected.out)
    assert_close(result[1], expected.lse)


def on_cuda(*, grad=False, dtype=torch.bfloat16, S=256, E=64, **options):
    """A problem that says it is on a GPU; nobody computes it."""
    shapes = ((B, H, 128, 64), (B, K, S, 64), (B, K, S, E))
    q, k, v = (torch.zeros(x, dtype=dtype).requires_grad_(grad) for x in shapes)
    problem = Problem(q, k, v, **options)
    problem.__dict__["device"] = CUDA
    return problem


def test_route_on_a_gpu():
    for options in ({"softcap": 2.0}, {"score_mod": lambda s, b, h, t, i: s}):
        assert kernels.route(on_cuda(**options)) == "flex"
    assert kernels.route(on_cuda(), lse=True) == "flex"
    assert kernels.route(on_cuda(window=(9, 0))) == "flex"
    assert kernels.route(on_cuda(mask=masks.lengths([5, 3]))) == "flex"
    assert kernels.route(on_cuda(window=(9, 0), S=250)) == "sdpa"
    assert kernels.route(on_cuda(window=(9, 0), dtype=torch.float64)) == "sdpa"
    assert kernels.route(on_cuda(causal="bottom_right")) == "sdpa"


def test_each_kind_of_call_compiles_once(monkeypatch):
    """After eight compilations of a function torch computes it eagerly: T × S numbers."""
    requests = []
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: requests.append(kwargs) or object())
    monkeypatch.setattr(flex, "_compile", lru_cache(flex._compile.__wrapped__))
    calls = [{"window": (n, 0), "S": 128 * n} for n in range(1, 11)] * 2
    calls += [{"softcap": 2.0}, {"softcap": 3.0}, {"softcap": 2.0, "dtype": torch.float16}]
    calls += [{"softcap": 2.0, "grad": True}]
    functions = {flex._compile(None, flex._kind(on_cuda(**options))) for options in calls}
    assert len(requests) == len(functions) == 14
    assert all(kwargs.get("isolate_recompiles", False) == flex.ISOLATES for kwargs in requests)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"S": 250}, "must be multiples of 128"),
        ({"E": 48}, "must be powers of 2"),
        ({"dtype": torch.float64}, "q is float64"),
        ({"grad": True, "bias": torch.zeros(128, 256, dtype=torch.bfloat16)}, "large bias"),
    ],
)
def test_unsafe_problems_on_a_gpu_are_refused(options, reason):
    with pytest.raises(OptionError, match=reason):
        kernels.route(on_cuda(softcap=2.0, **options))


def test_kernels_that_mishandle_masks_are_excluded():
    bias = torch.zeros(128, 256, dtype=torch.bfloat16)

    def backends(problem, mask):
        with sdpa.correct_kernels(problem, mask):
            return {b for b in SDPBackend.__members__.values() if b in _enabled_backends()}

    everything = _enabled_backends()
    assert backends(on_cuda(), None) == everything
    assert backends(on_cuda(mask=bias == 0), bias == 0) == everything - {SDPBackend.CUDNN_ATTENTION}
    assert backends(on_cuda(grad=True, bias=bias), bias) == {SDPBackend.MATH}
    assert backends(on_cuda(bias=bias), bias) == everything - {SDPBackend.CUDNN_ATTENTION}


def _enabled_backends():
    cuda = torch.backends.cuda
    enabled_by_backend = {
        SDPBackend.MATH: cuda.math_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
    }
    return {backend for backend, enabled in enabled_by_backend.items() if enabled}


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_nonpositive_scale_hides_correctly(scale):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 17, 8, generator=rng) for _ in range(3))  # E = D: FLASH_ATTENTION
    plain = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    out = attention(q, k, v, causal=True, scale=scale, engine="fused")
    arrays = (x.numpy() for x in (q, k, v))
    problem = npattn.Problem(*arrays, causal=True, scale=scale)
    if torch.__version__.startswith("2.13."):
        assert plain.isnan().any()  # what is walked around is there
    assert all(line.passed for line in compare(out.numpy(), problem))
