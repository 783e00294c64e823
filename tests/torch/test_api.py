"""npattn.torch: what is torch's own. What every engine computes: test_engines.py."""

import inspect
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

import npattn.oracle.api
from npattn import Conventions, biases, masks
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem.options import FEATURES
from npattn.testing import check
from tests.backends import BACKENDS, OPTIONS, TENSORS, B, D, E, H, S, T, mod, normal, problem

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402  after it is known to be there

import npattn.torch as nt  # noqa: E402
import npattn.torch.api  # noqa: E402
from npattn.torch import autograd as autograd_function  # noqa: E402
from npattn.torch import tiles  # noqa: E402
from npattn.torch.flags import exact  # noqa: E402

# Forward mode of torch loads a script of torch's own, which torch itself finds deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(params=TENSORS)
def backend(request):
    return BACKENDS[request.param]()


@pytest.fixture
def small(monkeypatch):
    BACKENDS["torch"]().small(monkeypatch)


def sample(*shape, seed=0, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)


def tiny(grad=True):
    """q, k, v of 4 heads on 2, 3 queries, 5 keys, sizes 2 and 3."""
    return tuple(
        sample(1, *shape, seed=i, grad=grad)
        for i, shape in enumerate([(4, 3, 2), (2, 5, 2), (2, 5, 3)])
    )


# --- the names ------------------------------------------------------------------------------------


def test_names_are_those_of_npattn():
    missing = {n for n in npattn.__all__ if not hasattr(nt, n)}
    assert not missing
    for name in ("masks", "conventions", "errors", "Conventions", "Forward", "Gradients"):
        assert getattr(nt, name) is getattr(npattn, name)
    assert set(npattn.biases.__all__) <= set(nt.biases.__all__)
    for name in ("plot", "profiles", "testing", "weights"):
        assert getattr(nt, name) is getattr(npattn, name)
    with pytest.raises(AttributeError, match=r"No npattn\.torch attribute atention"):
        nt.atention  # noqa: B018


@pytest.mark.parametrize("function", [nt.attention, nt.forward])
def test_signatures_are_those_of_npattn(function):
    ours = inspect.signature(function).parameters
    theirs = inspect.signature(npattn.attention).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("function", [nt.attention, nt.forward])
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("casual", "did you mean causal?"),
        ("attn_mask", "pass a boolean array as mask= (True = may attend)"),
        ("is_causal", "pass causal=True"),
        ("alignment", 'pass causal="bottom_right"'),
    ],
)
def test_unknown_options_are_answered_with_the_right_one(function, name, answer):
    with pytest.raises(OptionError) as caught:
        function(*tiny(), **{name: True})
    message = str(caught.value)
    assert message.startswith(f"{function.__name__} has no option {name}: {answer}")
    assert f"[options: {', '.join(FEATURES)}, dtype, engine, precision, conventions]" in message


@pytest.mark.parametrize("function", [nt.backward, nt.jvp])
def test_fwd_must_be_a_result_of_forward(function):
    with pytest.raises(OptionError, match=r"fwd is of type int; pass the result of npattn\.torch"):
        function(3, tiny()[0])


def test_import_without_torch_names_the_extra():
    code = "import sys; sys.modules['torch'] = None\nimport npattn\nnpattn.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtraError" in done.stderr
    assert "pip install 'npattn[torch]'" in done.stderr


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_import_loads_no_dynamo():
    code = "import sys, npattn.torch; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- wrong arguments ------------------------------------------------------------------------------

x = normal(2, 3, 5, 4)
WRONG = {
    "keys": {"k": x[..., :3]},
    "rank": {"v": x[0, 0]},
    "integers": {"q": x.astype(int)},
    "integer mask": {"mask": np.ones((5, 5), int)},
    "float mask": {"mask": np.ones((5, 5))},
    "mask of rank 1": {"mask": np.ones(5, bool)},
    "mask that does not fit": {"mask": np.ones((2, 5), bool)},
    "boolean bias": {"bias": np.ones((5, 5), bool)},
    "ambiguous causal": {"causal": True, "q": x[:, :, :3]},
    "causal = 1": {"causal": 1},
    "window": {"window": (-1, 2)},
    "window of bools": {"window": (True, 2)},
    "scale": {"scale": np.inf},
    "softcap": {"softcap": 0.0},
    "score_mod": {"score_mod": 3},
    "sinks": {"sinks": np.ones(2)},
    "rate without a mask": {"dropout_rate": 0.5},
    "rate": {"dropout_rate": 1.0, "dropout_mask": np.ones((5, 5), bool)},
    "dtype": {"dtype": "int32"},
    "a mask as bias": {"bias": masks.causal()},
    "a bias as mask": {"mask": biases.alibi(3)},
    "a mask for other sizes": {"mask": masks.documents([0, 1])},
    "conventions": {"conventions": 3},
}


@pytest.mark.every
@pytest.mark.parametrize("case", WRONG)
def test_errors_have_the_messages_of_npattn(case, backend):
    options = {"q": x, "k": x, "v": x, **WRONG[case]}
    with pytest.raises((ShapeError, DtypeError, OptionError)) as expected:
        npattn.attention(**options)
    nt.attention(*(backend.array(x) for _ in "qkv"), causal=True)  # a legal call is cached
    with pytest.raises(type(expected.value)) as result:
        nt.attention(**{name: backend.array(value) for name, value in options.items()})
    assert str(result.value) == str(expected.value)


@pytest.mark.thorough
def test_unsupported_tensors_are_refused():
    q, k, v = tiny(grad=False)
    with pytest.raises(DtypeError, match=r"k is a ndarray, must be a torch tensor"):
        nt.attention(q, k.numpy(), v)
    with pytest.raises(DtypeError, match="q is complex128, must be real"):
        nt.attention(q.to(torch.complex128), k, v)
    with pytest.raises(DtypeError, match="bias is complex128, must be real"):
        nt.attention(q, k, v, bias=np.ones((3, 5), complex))
    with pytest.raises(DtypeError, match="dtype is complex128, must be float32"):
        nt.attention(q, k, v, dtype=torch.complex128)
    with pytest.raises(DtypeError, match=r"k is torch.sparse_coo, must be strided"):
        nt.attention(q, k.to_sparse(), v)
    with pytest.raises(OptionError, match="v is on meta, must be on cpu as q"):
        nt.attention(q, k, v.to("meta"))
    with pytest.raises(OptionError, match="q is on meta, must be on a device that stores values"):
        nt.attention(*(x.to("meta") for x in (q, k, v)))
    nested = torch.nested.nested_tensor([q[0], q[0]], layout=torch.jagged)
    with pytest.raises(DtypeError, match="q is nested, must be one tensor"):
        nt.attention(nested, nested, nested)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        quantized = torch.quantize_per_tensor(q.float(), 0.1, 0, torch.qint8)
    with pytest.raises(DtypeError, match="q is quantized, must be plain"):
        nt.attention(quantized, k, v)
    for name in ("scale", "softcap", "dropout_rate", "causal"):
        with pytest.raises(
            OptionError, match=rf"{name} is the tensor 0.75, must be a plain Python value"
        ):
            nt.attention(q, k, v, **{name: torch.tensor(0.75)})
    for name in ("mask", "dropout_mask"):
        with pytest.raises(DtypeError, match=f"{name} is <U1, must be bool"):
            nt.attention(q, k, v, **{name: np.full((3, 5), "a")})
    fwd = nt.forward(q, k, v)
    for dout in (1j * torch.ones_like(fwd.out), 1j * np.ones(fwd.out.shape)):
        with pytest.raises(DtypeError, match=r"dout is .*complex128, must be real"):
            nt.backward(fwd, dout)
    with pytest.raises(DtypeError, match=r"dq is .*complex128, must be real"):
        nt.jvp(fwd, dq=1j * q)
    with pytest.raises(DtypeError, match="NumPy has no such dtype"):
        nt.tensors.numpy_dtype("q", torch.quint8)
    with pytest.raises(OptionError, match="engine is 'fast', must be one of auto, dense, tiled"):
        nt.attention(q, k, v, engine="fast")
    with pytest.raises(OptionError, match="score_mod returned a ndarray, must return a torch"):
        nt.attention(q, k, v, score_mod=lambda s, *_: s.numpy())


def test_wrong_cotangents_and_directions_are_refused():
    fwd = nt.forward(*tiny())
    with pytest.raises(ShapeError, match=r"dout has shape \(3,\), but out has shape"):
        nt.backward(fwd, torch.ones(3))
    with pytest.raises(OptionError, match="dout is on meta, must be on cpu"):
        nt.backward(fwd, torch.ones(1, 4, 3, 3, device="meta"))
    with pytest.raises(OptionError, match="got dbias, but the problem has no bias"):
        nt.jvp(fwd, dbias=torch.ones(3, 5))
    with pytest.raises(OptionError, match="jvp does not support mixed precision"):
        nt.jvp(nt.forward(*tiny(), dtype=torch.bfloat16))
    fwd = nt.forward(*tiny(), bias=nt.biases.alibi(4))
    with pytest.raises(ShapeError, match=r"dbias has shape \(3,\), but the parameter has shape"):
        nt.jvp(fwd, dbias=torch.ones(3))
    with pytest.raises(DtypeError, match="dbias is complex128, must be real"):
        nt.jvp(fwd, dbias=1j * np.ones(4))


def test_mask_and_bias_may_be_arrays(backend):
    given = problem(mask=OPTIONS["mask of each sample"]["mask"], bias=normal(H, T, S))
    tensors = backend.problem(given)
    mixed = tensors.replace(mask=given.mask, bias=given.bias)
    one, other = (nt.api.evaluate(p).out for p in (tensors, mixed))
    assert torch.equal(one, other)


def test_repr_of_a_problem():
    q, k, v = tiny()
    text = repr(nt.Problem(q, k, v, causal="top_left", dtype=torch.float32))
    assert text == (
        "Problem(q=torch.float64 (1, 4, 3, 2), k=torch.float64 (1, 2, 5, 2), v=torch.float64 "
        f"(1, 2, 5, 3), causal='top_left', scale={2**0.5 / 2}, dtype=torch.float32, "
        "alignment='top_left')"
    )


# --- dtypes ---------------------------------------------------------------------------------------

NARROW = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NARROW)
def test_floating_dtypes_are_upcast_exactly_to_float64(dtype, backend):
    q, k, v = (t.detach().to(backend.device).to(dtype) for t in tiny())
    out = nt.attention(q, k, v)
    assert out.dtype == torch.float64
    assert torch.equal(out, nt.attention(q.double(), k.double(), v.double()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_agrees_with_dense(dtype, backend):
    given = problem(causal="top_left", bias=normal(H, T, S), dtype=dtype)
    do, dlse = normal(B, H, T, E, seed=3), normal(B, H, T, seed=4)
    expected = npattn.oracle.api.evaluate(given)
    run = nt.api.evaluate(backend.problem(given))
    grads = nt.backward(run, backend.array(do), backend.array(dlse))
    exact_grads = npattn.backward(expected, do, dlse)
    assert run.out.dtype == grads.q.dtype == getattr(torch, dtype)
    assert run.lse.dtype == torch.float32
    step = float(torch.finfo(run.out.dtype).eps)
    pairs = [(run.out, expected.out)] + [
        (getattr(grads, n), getattr(exact_grads, n)) for n in ("q", "k", "v", "bias")
    ]
    for result, exact_ in pairs:
        result, exact_ = result.double().cpu().numpy(), exact_.astype(np.float64)
        # A sum in another order moves a rounding by one step of the format at the most.
        assert abs(result - exact_).max() <= step * abs(exact_).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_rounds_wide_inputs(dtype):
    wide = tiny(grad=False)
    expected = nt.attention(*(x.to(dtype) for x in wide), dtype=dtype)
    for given in (wide, [x.float() for x in wide]):
        assert torch.equal(nt.attention(*given, dtype=dtype), expected)


def test_q_k_and_v_may_have_different_dtypes():
    given = tiny(grad=False)
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for i in range(3):
        mixed = [x.to(dtypes[(i + j) % 3]) for j, x in enumerate(given)]
        expected = nt.attention(*(x.double() for x in mixed))
        assert torch.equal(nt.attention(*mixed), expected)


def test_dtype_float32_gives_float32_results():
    q, k, v = tiny(grad=False)
    for dtype in (torch.float32, "float32", np.float32):
        fwd = nt.forward(q, k, v, dtype=dtype)
        assert fwd.out.dtype == fwd.lse.dtype == fwd.weights.dtype == torch.float32


def test_results_of_the_other_package_are_refused():
    given = tiny(grad=False)
    here, there = nt.forward(*given), npattn.forward(*(x.numpy() for x in given))
    for ask in (nt.backward, nt.jvp):
        with pytest.raises(OptionError, match=r"fwd is a result of npattn\.forward"):
            ask(there, None)
    for ask in (npattn.backward, npattn.jvp):
        with pytest.raises(OptionError, match=r"fwd is a result of npattn\.torch"):
            ask(here, None)


# --- autograd -------------------------------------------------------------------------------------

visible = torch.rand(1, 1, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.6
visible[:, :, 0] = False
keep = torch.rand(1, 4, 3, 5, generator=torch.Generator().manual_seed(1)) < 0.7
TINY = {
    "plain": {},
    "mask": {"mask": visible},
    "mask object": {"mask": masks.window(1, 1) | masks.lengths(1)},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (1, 0)},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_mask": keep, "dropout_rate": 0.3},
    "alibi": {"bias": biases.alibi(4)},
    "T5": {"bias": biases.relative(normal(4, 4), max_distance=4)},
    "dense engine": {"engine": "dense"},
    "shift": {"scale": -900.0},
}
OF_SCORES = {"score_mod": {"score_mod": mod, "softcap": 1.5}}


@pytest.mark.parametrize("case", [*TINY, *OF_SCORES])
@pytest.mark.broad
def test_gradcheck(case):
    options = (TINY | OF_SCORES)[case]
    assert torch.autograd.gradcheck(
        lambda *inputs: nt.attention(*inputs, **options), tiny(), check_forward_ad=True
    )


@pytest.mark.thorough
@pytest.mark.parametrize("tile", [2**18, 40])
@pytest.mark.parametrize("case", [*TINY, *OF_SCORES])
@pytest.mark.broad
def test_gradgradcheck(case, tile, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", {"cpu": tile})
    options = (TINY | OF_SCORES)[case]
    assert torch.autograd.gradgradcheck(
        lambda *inputs: nt.attention(*inputs, **options),
        tiny(),
        check_fwd_over_rev=True,
        fast_mode=True,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("result", ["out", "lse"])
def test_derivatives_of_bias_and_sinks(result):
    def attend(q, k, v, bias, sinks):
        return getattr(nt.forward(q, k, v, visible, bias=bias, sinks=sinks), result)

    inputs = (*tiny(), sample(4, 1, 5, seed=3), sample(4, seed=4))
    assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, inputs)


CONVENTIONS = {
    **{name: npattn.profiles.PROFILES[name].conventions for name in ("torch.sdpa", "jax.nn")},
    "mean": nt.Conventions(empty_row="mean", lse_base="2"),
    "after bias": nt.Conventions(softcap="after_bias", bias="before_scale"),
    "after mask": nt.Conventions(softcap="after_mask"),
    "tile": nt.Conventions(kv_head="tile"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.broad
def test_autograd_under_conventions(name):
    def attend(q, k, v, bias):
        return nt.attention(q, k, v, visible, bias=bias, softcap=1.5, conventions=CONVENTIONS[name])

    inputs = (*tiny(), sample(4, 3, 5, seed=3))
    assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, inputs, check_fwd_over_rev=True, fast_mode=True)


def test_autograd_and_backward_give_the_same_bits(backend):
    given = problem(**OPTIONS["causal"])
    tensors = backend.problem(given)
    leaves = [getattr(tensors, n).clone().requires_grad_() for n in "qkv"]
    fwd = nt.api.evaluate(tensors.with_tensors(**dict(zip("qkv", leaves, strict=True))))
    do, dlse = backend.array(normal(B, H, T, E, seed=3)), backend.array(normal(B, H, T, seed=4))
    result = torch.autograd.grad((fwd.out, fwd.lse), leaves, (do, dlse))
    expected = nt.backward(fwd, do, dlse)
    for one, name in zip(result, "qkv", strict=True):
        assert torch.equal(one, getattr(expected, name))
        assert not getattr(expected, name).requires_grad


def test_gradients_have_the_dtype_of_their_inputs():
    leaves = [t.detach().bfloat16().requires_grad_() for t in tiny()]
    nt.attention(*leaves).sum().backward()
    assert [t.grad.dtype for t in leaves] == [torch.bfloat16] * 3


@pytest.mark.thorough
def test_score_mod_with_a_detached_slope_has_no_second_derivative():
    """gradgradcheck sees a score_mod whose slope is taken for a constant."""
    real = autograd_function.engine.operations.score_mod_slope

    def fixed(problem, s, at):
        rate, differs = real(problem, s.detach(), at)
        return rate.detach(), differs

    def attend(q, k, v):
        return nt.attention(q, k, v, score_mod=mod)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd_function.engine.operations, "score_mod_slope", fixed)
        with pytest.raises(RuntimeError, match="mismatch"):
            torch.autograd.gradgradcheck(attend, tiny(), fast_mode=True)


def test_score_mod_closing_over_a_parameter_is_refused():
    table = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    options = {"score_mod": lambda s, b, h, t, j: s + table[h]}
    with pytest.raises(OptionError, match="closes over a tensor that requires grad"):
        nt.attention(*tiny(), **options)
    with torch.no_grad():
        assert nt.attention(*tiny(), **options).shape == (1, 4, 3, 3)


@pytest.mark.parametrize("broken", [lambda s, *_: s.detach() * 2, lambda s, *_: s.softmax(-1)])
def test_score_mod_with_a_wrong_derivative_is_refused(broken):
    fwd = nt.forward(*tiny(grad=False), score_mod=broken)
    with pytest.raises(OptionError, match="score_mod has a derivative by autograd that differs"):
        nt.backward(fwd, torch.ones_like(fwd.out))


def test_indices_of_score_mod_promote_to_float64():
    q, k, v = tiny(grad=False)
    result = nt.attention(q, k, v, score_mod=lambda s, b, h, t, j: s + 0.1 * j)
    expected = nt.attention(q, k, v, bias=0.1 * torch.arange(5.0).double()[None])
    assert torch.allclose(result, expected, rtol=0, atol=2.0**-50)
    assert torch.get_default_dtype() == torch.float32


def test_torch_func_grad():
    q, k, v = tiny(grad=False)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(nt.attention(leaf, k, v).sin().sum(), leaf)
    result = torch.func.grad(lambda q: nt.attention(q, k, v).sin().sum())(q)
    assert torch.equal(result, expected)


def test_forward_mode_without_requires_grad():
    q, k, v = tiny(grad=False)
    dq, dv = (sample(*x.shape, seed=7, grad=False) for x in (q, v))
    expected = nt.jvp(nt.forward(q, k, v), dq=dq, dv=dv)[0]
    with forward_ad.dual_level():
        out = nt.attention(forward_ad.make_dual(q, dq), k, forward_ad.make_dual(v, dv))
        assert torch.equal(forward_ad.unpack_dual(out).tangent, expected)
    result = torch.func.jvp(lambda q, v: nt.attention(q, k, v), (q, v), (dq, dv))[1]
    assert torch.equal(result, expected)


def test_second_derivative_of_a_bias_under_conventions():
    q, k, v = tiny()
    bias = sample(4, 3, 5, seed=9)
    conventions = Conventions(bias="before_scale")

    def out(q, bias):
        return nt.attention(q, k, v, bias=bias, conventions=conventions)

    assert torch.autograd.gradgradcheck(out, (q, bias), fast_mode=True)


def test_infinite_cotangents_stop_at_fully_masked_rows():
    q, k, v = tiny()
    fwd = nt.forward(q, k, v, visible)
    loss = (fwd.lse**2).sum()  # lse is −inf in fully masked rows, and so is its cotangent
    first = torch.autograd.grad(loss, (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first[:2]), (q, k))
    assert all(torch.isfinite(x).all() for x in (*first[:2], *second))


@pytest.mark.parametrize("causal", [False, "top_left"])
def test_both_autograd_functions_give_the_same_bits(causal, monkeypatch):
    given, direction = tiny(), tiny(grad=False)
    out = nt.attention(*given, causal=causal)
    expected = (out, *torch.autograd.grad(out.sin().sum(), given, create_graph=True))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, y) for x, y in zip(given, direction, strict=True)]
        moved = forward_ad.unpack_dual(nt.attention(*duals, causal=causal)).tangent
    monkeypatch.setattr(autograd_function, "transforms_active", lambda: True)
    out = nt.attention(*given, causal=causal)
    for result, known in zip(
        (out, *torch.autograd.grad(out.sin().sum(), given, create_graph=True)),
        expected,
        strict=True,
    ):
        assert torch.equal(result, known)
        assert result.requires_grad
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, y) for x, y in zip(given, direction, strict=True)]
        again = forward_ad.unpack_dual(nt.attention(*duals, causal=causal)).tangent
    assert torch.equal(again, moved)


def test_threads_share_score_mod_and_default_dtype_safely():
    running, most = [], []

    def score_mod(s, b, h, t, j):
        running.append(1)
        most.append(len(running))
        time.sleep(2**-10)  # long enough for other threads to come in
        running.pop()
        return s * 0.5 + 0.1 * (t - j)

    q = sample(1, 4, 61, 7, grad=False)
    expected = nt.attention(q, q, q, score_mod=score_mod)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: nt.attention(q, q, q, score_mod=score_mod), range(64)))
    assert all(torch.equal(x, expected) for x in results)
    assert torch.get_default_dtype() == torch.float32
    assert max(most) == 1  # all threads share the default dtype


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch < 2.9")
@pytest.mark.usefixtures("flags")
def test_last_thread_restores_the_precision_flag():
    leaf = torch.backends.mkldnn.matmul
    leaf.fp32_precision = "bf16"
    first, second = (exact(torch.float32, torch.device("cpu")) for _ in range(2))
    first.__enter__()
    third = exact(torch.float32, torch.device("cpu"))
    second.__enter__()
    first.__exit__(None, None, None)
    assert leaf.fp32_precision == "ieee"
    with third:
        second.__exit__(None, None, None)
        assert leaf.fp32_precision == "ieee"
    assert leaf.fp32_precision == "bf16"


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": False}, {"causal": 0}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"window": (1, 0)}, {"window": (1, False)}),
        ({"window": (1, 0)}, {"window": (1, 0.0)}),
        ({"dropout_rate": 0.0}, {"dropout_rate": False}),
        ({"sinks": torch.zeros(4)}, {"sinks": torch.zeros(4, dtype=torch.int64)}),
        ({"mask": torch.ones(3, 5, dtype=torch.bool)}, {"mask": torch.ones(3, 5)}),
        ({"mask": torch.ones(3, 5, dtype=torch.bool)}, {"mask": torch.ones(5, 3) > 0}),
        ({"bias": torch.ones(3, 5)}, {"bias": torch.ones(3, 5).to_sparse()}),
    ],
)
def test_cached_checks_distinguish_types(right, wrong):
    given = tiny(grad=False)
    nt.attention(*given, **right)
    for _ in range(2):
        with pytest.raises((OptionError, DtypeError, ShapeError)):
            nt.attention(*given, **wrong)


@pytest.mark.parametrize("options", ["mask", "bias", "sinks", "dropout_mask"])
def test_cached_checks_keep_no_tensors(options):
    shape = (4,) if options == "sinks" else (3, 5)
    for seed in range(2):
        given, x = [x + seed for x in tiny(grad=False)], sample(*shape, seed=seed, grad=False)
        option = {options: x > 0 if "mask" in options else x}
        result = nt.attention(*given, **option)
        expected = npattn.attention(
            *(x.numpy() for x in given), **{n: x.numpy() for n, x in option.items()}
        )
        assert np.allclose(result.numpy(), expected, rtol=0, atol=2.0**-48)


@pytest.mark.parametrize("window", [None, (1, None)])
@pytest.mark.parametrize("n", [3, 71])  # small bands are cached
def test_inference_mode_leaves_no_tensor_behind(n, window):
    q, k, v = (sample(1, 2, n, 2, seed=i) for i in range(3))
    options = {"causal": "bottom_right", "window": window}
    with torch.inference_mode():
        plain = nt.attention(q, k, v, **options)
    out = nt.attention(q, k, v, **options)
    grads = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in grads), (q, k, v))
    assert torch.equal(plain, out)
    assert all(torch.isfinite(x).all() for x in second)


def test_plans_are_shared_between_problems_of_a_kind(monkeypatch):
    def problem_with(shift):
        return nt.Problem(*(x + shift for x in tiny(grad=False)))

    first = tiles.plan_of(problem_with(0), False)
    assert tiles.plan_of(problem_with(1), False) is first
    monkeypatch.setitem(tiles.TILE, "cpu", 7)
    other = problem_with(2)
    tiled = tiles.plan_of(other, False)
    assert tiled is not first
    assert len(tiles.plan_of(other, True).rows) == 1 < len(tiled.rows)
    assert tiles.plan_of(other, False) is tiled


# --- promises -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["plain", "mask of each head", "T5", "bias of keys", "sinks"])
def test_two_runs_give_the_same_bits(options, backend, monkeypatch):
    backend.small(monkeypatch)
    given, do = problem(**OPTIONS[options]), backend.array(normal(B, H, T, E, seed=3))

    def bits():
        fwd = nt.api.evaluate(backend.problem(given))
        grads = nt.backward(fwd, do)
        results = (fwd.out, fwd.lse, grads.q, grads.k, grads.v, grads.bias)
        return [x.cpu().numpy().tobytes() for x in results if x is not None]

    assert bits() == bits()


@pytest.mark.parametrize("options", OPTIONS)
def test_tiles_change_only_the_order_of_sums(options, backend, monkeypatch):
    given = backend.problem(problem(**OPTIONS[options]))
    expected = nt.api.evaluate(given, engine="dense").out
    backend.small(monkeypatch)
    result = nt.api.evaluate(given.replace()).out
    size = 1 + abs(given.scale) * S * D * 16
    assert (result - expected).abs().max() <= size * S * 2.0**-52 * expected.abs().max()


def test_no_tensor_holds_all_scores(backend, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", {backend.device: 2**14})
    n = 2048
    q, k, v = (backend.array(normal(1, 2, n, 3, seed=i)) for i in range(3))
    sizes = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    with Watched():
        nt.backward(nt.forward(q, k, v, causal=True), torch.ones_like(q))
    assert max(sizes) <= 2 * 2**14 < n * n / 64


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (masks.window(255, 0), lambda n: 255 + 2 * tiles.QUERIES + tiles.CELL),
        (masks.causal(), lambda n: n / 2 + tiles.QUERIES + tiles.CELL),
        (masks.documents(np.arange(8192) // 512), lambda n: 512 + tiles.QUERIES + tiles.CELL),
        (masks.lengths(100), lambda n: tiles.CELL),
        (torch.arange(8192)[None] < 100, lambda n: tiles.CELL),
        (torch.ones(8192, 8192, dtype=torch.bool).tril(), lambda n: n / 2 + 2 * tiles.QUERIES),
    ],
)
def test_cost_follows_the_visible_area(mask, share):
    n = 8192
    x = torch.zeros(1, n, 1)
    plan = tiles.plan_of(nt.Problem(x, x, x, mask), False)
    area = sum((r.t1 - r.t0) * sum(p.s1 - p.s0 for p in r.strips) for r in plan.rows)
    assert area <= n * share(n) < n * n


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", OPTIONS)
def test_strips_cover_each_visible_score_once(options):
    given = problem(**OPTIONS[options])
    plan = tiles.plan_of(BACKENDS["torch"]().problem(given), False)
    whole = (B, H, T, S)
    visible = np.broadcast_to(True if given.visible is None else given.visible, whole)
    count = np.zeros(whole, int)
    for rows in plan.rows:
        for strip in rows.strips:
            at = (*rows.at, slice(strip.s0, strip.s1))
            count[at] += 1
            tile = plan.visible(rows, strip).numpy() if strip.partial else True
            assert np.array_equal(np.broadcast_to(tile, count[at].shape), visible[at])
    assert count.max() == 1
    assert not (visible & (count == 0)).any()


READ = [
    lambda: torch.backends.cuda.matmul.fp32_precision,
    lambda: torch.backends.mkldnn.matmul.fp32_precision,
    lambda: torch.backends.fp32_precision,
    lambda: torch.is_autocast_enabled("cpu"),
]
FLAGS = {
    "as it is": lambda: None,
    "old names": lambda: torch.set_float32_matmul_precision("medium"),
    "new names": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "of everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture
def flags():
    yield
    torch.backends.fp32_precision = "none"
    for leaf in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        leaf.fp32_precision = "none"


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch < 2.9")
@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("setting", FLAGS)
def test_global_flags_have_no_effect_and_are_kept(setting, backend):
    q, k, v = (t.to(backend.device).float() for t in tiny(grad=False))
    expected = nt.attention(q, k, v, dtype="float32")
    FLAGS[setting]()
    before = [read() for read in READ]
    for device in ("cpu", "cuda"):
        leaf = torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul
        with suppress(ZeroDivisionError), exact(torch.float32, torch.device(device)):
            assert leaf.fp32_precision in ("ieee", "none")
            raise ZeroDivisionError
    with torch.autocast(backend.device):
        result = nt.attention(q, k, v, dtype="float32")
        assert torch.is_autocast_enabled(backend.device)
    assert torch.equal(result, expected)
    assert [read() for read in READ] == before
    if setting == "of everything":  # and what was unset is not set
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")  # torch's own, about .grad, while it traces
def test_torch_compile_gives_the_same_bits_or_refuses():
    q, k, v = tiny()

    def f(q, k, v):
        fwd = nt.forward(q, k, v, causal="top_left")
        return fwd.out.sin() + fwd.lse[..., None]

    compiled = torch.compile(f, backend="eager")
    expected, result = f(q, k, v), compiled(q, k, v)
    assert torch.equal(result, expected)
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (expected, result)]
    assert all(map(torch.equal, *grads))
    torch._dynamo.reset()
    whole = torch.compile(f, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"npattn\.torch reads results to check that they stay"):
        whole(q, k, v)


def in_its_dtype(
    q, k, v, mask=None, *, causal=False, window=None, bias=None, scale=None, softcap=None,
    sinks=None, dropout_mask=None, dropout_rate=0.0, return_lse=False,
):  # fmt: skip
    """npattn.torch as an implementation under test: computed in float64, rounded once."""
    fwd = nt.forward(
        q, k, v, mask, causal=causal, window=window, bias=bias, scale=scale, softcap=softcap,
        sinks=sinks, dropout_mask=dropout_mask, dropout_rate=dropout_rate,
        conventions=nt.Conventions(),
    )  # fmt: skip
    lse = fwd.lse.to(torch.promote_types(q.dtype, torch.float32))
    return (fwd.out.to(q.dtype), lse) if return_lse else fwd.out.to(q.dtype)


@pytest.mark.thorough
@pytest.mark.usefixtures("small")
def test_judge_passes_the_engine():
    report = check(
        in_its_dtype,
        framework="torch",
        dtypes=("float32", "bfloat16", "float64"),
        sizes={"H": (4,), "K": (2,), "B": (2,), "T": (2, 7), "S": (5, 11)},
        only=["agreement", "shape-dtype", "empty-row", "hidden", "views", "inputs-unchanged"],
        examples=3,
    )
    assert report.passed, str(report)


# --- objects --------------------------------------------------------------------------------------


class Foreign:
    """A bias that is none of npattn's: what `BiasLike` asks for, and nothing else."""

    def __init__(self, bias):
        self.bias = bias
        for name in ("dtype", "shape", "tile", "to_array", "zeros", "add", "gradient"):
            setattr(self, name, getattr(bias, name))


def terms_of(one, other):
    """Pairs of gradients, one for each term of a bias."""
    return zip(one, other, strict=True) if isinstance(other, tuple) else [(one, other)]


def test_foreign_bias_is_evaluated_per_head(backend):
    given, own = (problem(bias=b) for b in (Foreign(biases.alibi(H)), biases.alibi(H)))
    do, dlse = normal(B, H, T, E, seed=3), normal(B, H, T, seed=4)
    expected = npattn.oracle.api.evaluate(own)
    run = nt.api.evaluate(backend.problem(given))
    assert (
        abs(backend.numpy(run.out) - expected.out).max() <= S * 2.0**-52 * abs(expected.out).max()
    )
    result = backend.numpy(nt.backward(run, backend.array(do), backend.array(dlse)).bias)
    exact_ = npattn.backward(expected, do, dlse).bias
    assert abs(result - exact_).max() <= B * T * S * 2.0**-52 * S * abs(exact_).max()


@pytest.mark.parametrize("bias", ["alibi", "T5", "a sum of biases"])
def test_gradients_of_bias_parameters_under_conventions(bias, backend):
    given = problem(**OPTIONS[bias])
    do, dlse = normal(B, H, T, E, seed=3), normal(B, H, T, seed=4)
    conventions = nt.Conventions(bias="before_scale")
    expected = npattn.backward(npattn.oracle.api.evaluate(given, conventions), do, dlse).bias
    run = nt.api.evaluate(backend.problem(given), conventions)
    result = backend.numpy(nt.backward(run, backend.array(do), backend.array(dlse)).bias)
    for one, exact_ in terms_of(result, expected):
        assert one.shape == exact_.shape
        assert abs(one - exact_).max() <= B * T * S * 2.0**-52 * S * abs(exact_).max()


def test_masks_compose_with_tensors():
    q, k, v = tiny(grad=False)
    tensor = torch.ones(3, 5, dtype=torch.bool).tril()
    for mask in (tensor & masks.lengths(2), masks.lengths(2) & tensor):
        expected = nt.attention(q, k, v, tensor & (torch.arange(5) < 2))
        assert torch.equal(nt.attention(q, k, v, mask), expected)


@pytest.mark.parametrize("fields", [{"bias": "before_scale"}, {"hidden_fill": -3.0}])
@pytest.mark.parametrize("shape", [(2, 1, 1, 3, 5), (1, 2, 4, 1, 5), (3, 5), (2, 2, 4, 3, 5)])
def test_broadcast_bias_counts_once_under_conventions(shape, fields):
    arrays = [normal(2, 2, h, n, 2, seed=i) for i, (h, n) in enumerate([(4, 3), (2, 5), (2, 5)])]
    bias, do = normal(*shape, seed=4), normal(2, 2, 4, 3, 2, seed=5)
    conventions = Conventions(**fields)
    options = {"causal": "top_left", "conventions": conventions}
    tensors = [torch.from_numpy(x) for x in arrays]
    for given in (biases.dense(bias), biases.dense(bias) + biases.dense(2 * bias)):
        expected = npattn.backward(npattn.forward(*arrays, bias=given, **options), do).bias
        result = nt.backward(nt.forward(*tensors, bias=given, **options), torch.from_numpy(do)).bias
        for one, other in terms_of(result, expected):
            assert np.allclose(one.numpy(), other, rtol=0, atol=2.0**-44 * abs(other).max())


def test_gradients_of_no_queries_with_a_late_softcap():
    q, k, v = torch.zeros(2, 1, 0, 1), torch.zeros(2, 1, 3, 1), torch.zeros(2, 1, 3, 2)
    options = {"softcap": 3.0, "conventions": Conventions(softcap="after_bias")}
    fwd = nt.forward(q, k, v, bias=torch.zeros(0, 3), **options)
    grads = nt.backward(fwd, torch.ones_like(fwd.out))
    assert grads.q.shape == q.shape
    assert not grads.k.any()


def test_extended_precision_is_for_arrays():
    q = torch.ones(1, 2, 3)
    with pytest.raises(OptionError, match="precision is 'extended', must be None on tensors"):
        nt.attention(q, q, q, precision="extended")
