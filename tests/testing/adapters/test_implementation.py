"""Reading and calling an implementation; arguments at their default are not passed."""

import functools
import importlib
import inspect
import operator
import re
import sys
import types

import numpy as np
import pytest

import npattn
from benchmarks.zoo.cheats.targets import honest, laziness
from npattn.errors import NpattnError, OptionError
from npattn.testing import Cotangents, Implementation, ImplementationError, check
from npattn.testing.adapters import child
from npattn.testing.adapters.base import ResultError
from npattn.testing.adapters.frameworks import Framework, make_framework
from npattn.testing.targets import TARGETS
from npattn.testing.targets.numpy import flash, flash_backward
from tests.testing.primes import B, D, E, H, K, S, T, problem, zeros_for


class Recorder:
    """Attention that returns zeros and records its calls."""

    def __init__(self, f=None):
        self.calls = []

    def __call__(
        self, q, k, v, mask=None, *, causal=False, window=None, bias=None, scale=None,
        softcap=None, score_mod=None, sinks=None, dropout_mask=None, dropout_rate=0.0,
    ):  # fmt: skip
        arguments = inspect.getargvalues(inspect.currentframe()).locals
        self.calls.append({n: x for n, x in arguments.items() if n != "self"})
        return zeros_for(q, v)


# --- reading the signature ------------------------------------------------------------------------


def test_unknown_required_parameter_is_an_error():
    def f(q, k, v, block_size, *, stages):
        return zeros_for(q, v)

    with pytest.raises(OptionError, match=r"needs block_size, stages.*rename="):
        Implementation(f)
    filled = functools.partial(f, block_size=64, stages=2)
    assert Implementation(filled).untested == ("block_size", "stages")


def test_starred_parameters_take_q_k_v():
    def f(*arrays, causal=False, **rest):
        return zeros_for(arrays[0], arrays[2])

    read = Implementation(f)
    assert read.features == {"causal"}
    assert "features=" in read.untested[0]


def test_a_callable_without_a_readable_signature_needs_features():
    class Opaque:
        __signature__ = 3

        def __call__(self, q, k, v, **options):
            self.got = options
            return zeros_for(q, v)

    with pytest.raises(
        OptionError, match="no readable signature: say which options it has with features="
    ):
        Implementation(Opaque())
    f = Opaque()
    read = Implementation(f, features=["mask", "scale"], framework="numpy")
    assert read.features == {"mask", "scale"}
    read.forward(problem(scale=0.5))
    assert f.got == {"scale": 0.5}


def test_features_restrict_those_of_signature():
    read = Implementation(flash, features=("mask", "return_lse"))
    assert read.features == {"mask"}
    assert read.returns_lse
    assert "causal" in read.untested
    assert "dropout_rate" in read.untested


@pytest.mark.parametrize(
    "kwargs",
    [{"layout": "BHDT"}, {"framework": "mxnet"}, {"f": 3}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_illegal_argument_is_an_error(kwargs):
    (name, value), *_ = kwargs.items()
    with pytest.raises(OptionError, match=f"{name} is .*{value}.*must be"):
        Implementation(**({"f": flash} | kwargs))


def test_name_is_given_or_spec_or_own():
    assert Implementation(flash, name="mine", spec="a:b").name == "mine"
    assert Implementation(flash, spec="a:b").name == "a:b"
    assert Implementation(flash).name == "flash"
    assert Implementation(Recorder()).name == "Recorder"


# --- calling --------------------------------------------------------------------------------------


def test_options_at_their_default_are_not_passed():
    kwargs = []

    def f(q, k, v, **options):
        kwargs.append(set(options))
        return zeros_for(q, v)

    every = ("mask", "causal", "window", "bias", "scale", "softcap", "sinks")
    read = Implementation(f, features=(*every, "dropout_mask", "dropout_rate"))
    kwargs.clear()
    read.forward(problem())
    read.forward(problem(scale=D**-0.5))
    read.forward(problem(causal=True, scale=0.5, dropout=0.5, sinks=True))
    assert kwargs == [set(), set(), {"causal", "scale", "dropout_mask", "dropout_rate", "sinks"}]


def test_options_arrive_in_their_plain_form():
    f = Recorder()
    full = problem(
        mask="full", causal=True, window=(2, None), bias="heads", scale=-0.75, softcap=2.0,
        score_mod="squash", sinks=True, dropout=0.25,
    )  # fmt: skip
    Implementation(f, framework="numpy").forward(full)
    (got,) = f.calls
    assert got["mask"].dtype == bool
    assert got["mask"].shape == (B, H, T, S)
    assert got["causal"] is True
    assert got["window"] == (2, None)
    assert got["bias"].dtype == np.float32
    assert got["bias"].shape == (H, T, S)
    assert (got["scale"], got["softcap"], got["dropout_rate"]) == (-0.75, 2.0, 0.25)
    assert all(type(got[n]) is float for n in ("scale", "softcap", "dropout_rate"))
    assert got["sinks"].shape == (H,)
    assert got["score_mod"] is full.score_mod
    np.testing.assert_array_equal(got["q"], full.q)
    np.testing.assert_array_equal(got["dropout_mask"], full.dropout_mask)


def test_other_names_are_adapted():
    def f(query, key, value, attn_bias=None, is_causal=False, need_lse=False):
        assert is_causal
        out, lse = flash(query, key, value, bias=attn_bias, causal=is_causal, return_lse=True)
        return (out, lse) if need_lse else out

    def backward(dout, q, k, v, *, out, lse, attn_bias, is_causal):
        return flash_backward(dout, q, k, v, out=out, lse=lse, bias=attn_bias, causal=is_causal)

    rename = {"is_causal": "causal", "attn_bias": "bias", "need_lse": "return_lse"}
    read = Implementation(f, backward=backward, rename=rename, framework="numpy")
    assert read.features == {"causal", "bias"}
    case = problem(causal=True, bias="full")
    results = read.forward(case)
    np.testing.assert_allclose(results["o"], npattn.forward(**arguments_of(case)).out, atol=1e-5)
    np.testing.assert_allclose(results["lse"], npattn.forward(**arguments_of(case)).lse, atol=1e-5)
    assert set(read.gradients(case, cotangents(case))) == {"dq", "dk", "dv", "dbias"}


def arguments_of(case):
    return {n: getattr(case, n) for n in ("q", "k", "v", "mask", "causal", "bias", "scale")}


def cotangents(case, lse=True):
    rng = np.random.default_rng(1)
    dout = rng.standard_normal((*case.lead, case.H, case.T, case.E)).astype(case.q.dtype)
    return Cotangents(dout, rng.standard_normal(dout.shape[:-1]) if lse else None)


def test_optional_results_need_a_second_call():
    case, calls = problem(), []

    def f(q, k, v, return_lse=False, return_weights=False):
        calls.append((return_lse, return_weights))
        out, lse = flash(q, k, v, return_lse=True)
        return (out, lse, np.ones((*lse.shape, S))) if return_lse and return_weights else out

    results = Implementation(f, framework="numpy").forward(case)
    assert calls == [(False, False), (True, True)]
    assert [name for name, _ in results.pairs] == ["o", "o", "lse", "weights"]
    assert results["weights"].shape == (B, H, T, S)
    np.testing.assert_array_equal(results["o"], results.pairs[1][1])


def test_weights_without_lse_are_second_result():
    def f(q, k, v, return_weights=False):
        out = zeros_for(q, v)
        return (out, np.ones((*out.shape[:-1], S), np.float32)) if return_weights else out

    assert set(Implementation(f).forward(problem())) == {"o", "weights"}


def test_lists_are_taken_as_tuples():
    def f(q, k, v, return_lse=False):
        out, lse = flash(q, k, v, return_lse=True)
        return [out, lse] if return_lse else out

    assert set(Implementation(f).forward(problem())) == {"o", "lse"}


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda o: (o,), "1 results"),
        (lambda o: o, "one result"),
        (lambda o: (o, o, o), "3 results"),
        (lambda o: None, "one result"),
    ],
)
def test_wrong_number_of_results_is_a_wrong_result(wrong, got):
    def f(q, k, v, return_lse=False):
        return wrong(zeros_for(q, v)) if return_lse else zeros_for(q, v)

    message = rf"returned {got} for return_lse=True, must return \(o, lse\)"
    with pytest.raises(ResultError, match=message):
        Implementation(f).forward(problem())


def test_optional_result_is_named_in_error():
    def f(q, k, v, need_lse=False, return_weights=False):
        return zeros_for(q, v)

    message = r"one result for need_lse=True, return_weights=True, must return \(o, lse, weights\)"
    with pytest.raises(ResultError, match=message):
        Implementation(f, rename={"need_lse": "return_lse"}).forward(problem())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("no kernel\n  for this size"), "RuntimeError: no kernel for this size"),
        (KeyError(), "KeyError"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_exceptions_are_reported_with_their_class_and_place(error, text):
    def f(q, k, v):
        raise type(error)(*error.args)

    def backward(dout, q, k, v):
        f(q, k, v)

    said = rf"raised {text} \(test_impl.+:\d+\)$"
    with pytest.raises(ImplementationError, match=f"^[^b]*{said}") as caught:
        Implementation(f, framework="numpy").forward(problem())
    assert not isinstance(caught.value, ResultError)
    with pytest.raises(ImplementationError, match=f"backward {said}"):
        Implementation(flash, backward=backward).gradients(problem(), cotangents(problem()))


def test_exit_during_framework_probe_is_reported():
    with pytest.raises(OptionError, match=r"numpy: SystemExit"):
        Implementation(define("def f(q, k, v): raise SystemExit"))


def test_keyboard_interrupt_passes_through():
    def f(q, k, v):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Implementation(f, framework="numpy").forward(problem())


@pytest.mark.parametrize("kind", [np.matrix, np.recarray, np.memmap, np.ma.MaskedArray])
def test_result_of_a_subclass_is_refused(kind):
    array = np.zeros((3, 5)).view(kind)
    message = f"{kind.__name__}, a subclass of numpy.ndarray, must be a plain"
    with pytest.raises(ResultError, match=message):
        make_framework("numpy").take(array)
    np.testing.assert_array_equal(make_framework("numpy").take(np.asarray(array)), np.zeros((3, 5)))


@pytest.mark.parametrize("dtype", ["O", "S3", "M8[D]", np.longdouble, ">f4"])
def test_result_of_another_dtype_is_refused(dtype):
    array = np.zeros(3, dtype)
    said = "" if array.dtype.kind == "f" else ", must hold numbers"
    with pytest.raises(ResultError, match=rf"array of dtype {re.escape(str(array.dtype))}{said}$"):
        make_framework("numpy").take(array)


@pytest.mark.parametrize("name", ["filled_from_copies", "filled_when_read"])
def test_result_that_computes_when_it_is_read_is_refused(name):
    f = Implementation(getattr(laziness, name), framework="numpy")
    with pytest.raises(ResultError, match=r"Lazy, a subclass of numpy\.ndarray, must be a plain"):
        f.forward(problem())


def test_expression_that_is_evaluated_is_read():
    f = Implementation(honest.expression_evaluated_at_the_end, framework="numpy")
    assert f.forward(problem())["o"].shape == (B, H, T, E)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_show_their_memory_and_subclasses_are_refused(dtype):
    torch = pytest.importorskip("torch")

    class Late(torch.Tensor):
        """A tensor that may do anything when it is read."""

    framework, tensor = (
        make_framework("torch"),
        torch.ones(3, 5, dtype=getattr(torch, dtype), requires_grad=True),
    )
    with pytest.raises(ResultError, match=r"Late, a subclass of torch\.Tensor, must be a plain"):
        framework.take(tensor.detach().as_subclass(Late))
    with pytest.raises(ResultError, match=r"a tensor of torch\.sparse_coo, must be a dense one"):
        framework.take(tensor.to_sparse())
    with pytest.raises(ResultError, match=r"a tensor of torch\.float8_e4m3fnuz"):
        framework.take(tensor.to(torch.float8_e4m3fnuz))
    tensor.detach = lambda: torch.zeros(3, 5)
    assert framework.take(tensor).astype(float).sum() == 15
    assert framework.take(torch.nn.Parameter(torch.ones(2))).sum() == 2
    assert np.shares_memory(framework.memory(tensor), framework.memory(tensor[1:]))
    assert not np.shares_memory(framework.memory(tensor), framework.memory(tensor.clone()))


def test_unreadable_result_is_named_in_error():
    class Lazy(np.ndarray):
        def __array__(self, *args, **kwargs):
            raise RuntimeError("the device is gone")

    class Broken(Framework):
        def take(self, value):
            return value.__array__()

    read = Implementation(lambda q, k, v: q.view(Lazy), framework="numpy")
    read.framework = Broken(child.NumPy())
    with pytest.raises(ImplementationError, match=r"o could not be read: RuntimeError: the dev"):
        read.forward(problem())


def test_non_array_result_is_an_error():
    def f(q, k, v):
        return zeros_for(q, v).tolist()

    with pytest.raises(
        ImplementationError, match=r"returned a tuple or list of 2, must return o alone"
    ):
        Implementation(f, framework="numpy").forward(problem())


# --- backward -------------------------------------------------------------------------------------


def test_backward_gets_those_keywords_that_it_names():
    case, got = problem(mask="full"), {}

    def bare(dout, q, k, v, mask=None):
        got["bare"] = dout, mask
        return q, k, v

    def full(dout, q, k, v, *, out, lse, dlse=None, dweights=None, mask=None):
        got["full"] = out, lse, dlse, dweights
        return {"q": q, "k": k, "v": v, "bias": None}

    douts = cotangents(case)
    results = Implementation(flash, backward=bare).gradients(case, douts)
    assert set(results) == {"dq", "dk", "dv"}
    np.testing.assert_array_equal(got["bare"][0], douts.dout)
    np.testing.assert_array_equal(got["bare"][1], case.mask)
    results = Implementation(flash, backward=full).gradients(case, douts)
    assert set(results) == {"dq", "dk", "dv"}  # what is None is not there
    out, lse = flash(case.q, case.k, case.v, case.mask, return_lse=True)
    np.testing.assert_array_equal(got["full"][0], out)
    np.testing.assert_array_equal(got["full"][1], lse)
    np.testing.assert_array_equal(got["full"][2], douts.dlse)
    assert got["full"][3] is None


def with_dweights(case):
    dout, dlse = cotangents(case)
    shape = (*dout.shape[:-1], case.S)
    return Cotangents(dout, dlse, np.random.default_rng(2).standard_normal(shape))


def test_backward_gets_cotangent_of_weights():
    case, got = problem(), []

    def f(q, k, v, return_lse=False, return_weights=False):
        out, lse = flash(q, k, v, return_lse=True)
        more = [lse] * return_lse + [np.ones((*lse.shape, S), lse.dtype)] * return_weights
        return (out, *more) if more else out

    def plain(q, k, v):
        return flash(q, k, v)

    def backward(dout, q, k, v, *, dweights=None):
        got.append(dweights)
        return q, k, v

    douts = with_dweights(case)
    Implementation(f, backward=backward, framework="numpy").gradients(case, douts)
    np.testing.assert_array_equal(got.pop(), douts.dweights)
    Implementation(plain, backward=backward, framework="numpy").gradients(case, douts)
    Implementation(f, backward=backward, framework="numpy").gradients(case, cotangents(case))
    assert got == [None, None]


def test_backward_without_lse_gets_none():
    def f(q, k, v):
        return flash(q, k, v)

    def backward(dout, q, k, v, *, out, lse, dlse):
        assert lse is None
        assert dlse is None
        return q, k, v

    assert set(Implementation(f, backward=backward).gradients(problem(), cotangents(problem())))


PACKS = "must return \\(dq, dk, dv\\) or a mapping"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda q: q, PACKS),
        (lambda q: (q, q), PACKS),
        (lambda q: None, PACKS),
        (lambda q: {"q": q, "k": q, "value": q}, "value"),
    ],
    ids="a2nv",
)
def test_wrong_result_of_backward_is_an_error(wrong, said):
    read = Implementation(flash, backward=lambda dout, q, k, v: wrong(q))
    with pytest.raises(ImplementationError, match=said):
        read.gradients(problem(), cotangents(problem()))


def test_numpy_has_no_gradient_of_its_own():
    with pytest.raises(ImplementationError, match="differentiated by its backward="):
        Implementation(flash).gradients(problem(), cotangents(problem()))
    assert not make_framework("numpy").differentiates


def test_numpy_has_no_devices():
    with pytest.raises(OptionError, match="device is 'cuda', must be None for NumPy arrays"):
        Implementation(flash).on("cuda")


# --- arrays: layout, strides, freshness -----------------------------------------------------------


def test_bthd_applies_to_q_k_v_o_and_gradients():
    def f(q, k, v, mask=None, *, bias=None, return_lse=False):
        assert q.shape == (B, T, H, D)
        assert k.shape == (B, S, K, D)
        assert v.shape == (B, S, K, E)
        assert mask.shape == bias.shape == (B, H, T, S)
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out, lse = flash(q, k, v, mask, bias=bias, return_lse=True)
        return (out.swapaxes(1, 2), lse) if return_lse else out.swapaxes(1, 2)

    def backward(dout, q, k, v, *, out, lse, dlse, **options):
        assert dout.shape == out.shape == (B, T, H, E)
        assert lse.shape == dlse.shape == (B, H, T)
        dout, q, k, v, out = (x.swapaxes(1, 2) for x in (dout, q, k, v, out))
        grads = flash_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, **options)
        return {n: x if n == "bias" else x.swapaxes(1, 2) for n, x in grads.items()}

    case = problem(mask="full", bias="full")
    there = Implementation(f, backward=backward, framework="numpy", layout="BTHD")
    here = Implementation(flash, backward=flash_backward)
    pairs = [(there.forward(case), here.forward(case))]
    douts = cotangents(case)
    pairs += [(there.gradients(case, douts), here.gradients(case, douts))]
    for got, expected in pairs:
        assert set(got) == set(expected)
        for name in got:
            np.testing.assert_allclose(got[name], expected[name], atol=1e-5, err_msg=name)


def test_layout_bthd_leaves_other_ranks_alone():
    flat = problem(lead=())
    inputs = Implementation(flash, layout="BTHD").inputs(flat)
    assert inputs["q"].shape == (H, T, D)


def strides_of(view, layout="BHTD", case=None):
    case = case or problem()
    laid = Implementation(flash, layout=layout, framework="numpy").inputs(case, view)
    plain = Implementation(flash, layout=layout, framework="numpy").inputs(case)
    for name in "qkv":
        np.testing.assert_array_equal(laid[name], plain[name])
    return laid["k"].strides, plain["k"].strides


def test_transposed_view_has_heads_inside_length():
    laid, plain = strides_of("transposed")
    assert plain == (4 * K * S * D, 4 * S * D, 4 * D, 4)
    assert laid == (4 * K * S * D, 4 * D, 4 * K * D, 4)


def test_transposed_view_of_rank_2_is_column_major():
    laid, _ = strides_of("transposed", case=problem(lead=None, H=1, K=1))
    assert laid == (4, 4 * S)


def test_stepped_view_takes_every_second_element():
    laid, plain = strides_of("stepped")
    assert laid[-2:] == (4 * plain[-2], 2 * plain[-1])


def test_a_reversed_view_goes_backwards_in_memory():
    laid, plain = strides_of("reversed")
    assert laid[-2] == -plain[-2]


def test_expanded_view_repeats_equal_values_by_stride_zero():
    case = problem()
    laid, plain = strides_of("expanded", case=case)
    assert laid == plain  # two samples that differ cannot share memory
    same = case.replace(k=np.repeat(case.k[:1], B, axis=0))
    laid, _ = strides_of("expanded", case=same)
    assert laid[0] == 0


@pytest.mark.parametrize("view", ["contiguous", "transposed", "stepped", "reversed"])
@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
def test_arrays_are_fresh_and_writable(view, layout):
    case = problem(mask="full", bias="heads", sinks=True, dropout=0.5)
    read = Implementation(flash, layout=layout, framework="numpy")
    first, second = read.inputs(case, view), read.inputs(case, view)
    assert set(first) == {"q", "k", "v", "mask", "bias", "sinks", "dropout_mask"}
    for name, array in first.items():
        assert array.flags.writeable, name
        assert not np.shares_memory(array, second[name]), name
        assert not np.shares_memory(array, getattr(case, name)), name


def test_results_are_copies():
    buffer = np.zeros((B, H, T, E), np.float32)

    def f(q, k, v):
        buffer[...] += 1
        return buffer

    read = Implementation(f, framework="numpy")
    first = read.forward(problem())["o"]
    read.forward(problem())
    assert (first == 1).all()


# --- choice of the framework ----------------------------------------------------------------------


def define(source, module="elsewhere", **names):
    """Define a function in another module than this test."""
    home = types.ModuleType(module)
    vars(home).update(names)
    exec(source, vars(home))
    return home.f


RAISES = "def f(q{}, k, v): raise ValueError"
FOUND = [  # annotation of q, home module, names in the module
    ("numpy", ": 'np.ndarray'", "elsewhere", {"np": "numpy"}),
    ("numpy", ": 'numpy.typing.NDArray'", "elsewhere", {}),
    ("numpy", "", "numpy", {}),
    ("torch", ": torch.Tensor", "elsewhere", {"torch": "torch"}),
    *(("jax", f": {x}", "elsewhere", {"jax": "jax"}) for x in ("jax.Array", "'jnp.ndarray'")),
    ("jax", "", "elsewhere", {"jnp": "jax.numpy"}),  # by the imports of its module
]


@pytest.mark.parametrize(("name", "annotation", "module", "names"), FOUND)
def test_annotations_and_modules_say_the_framework(name, annotation, module, names):
    pytest.importorskip(name)
    own = {own: importlib.import_module(path) for own, path in names.items()}
    f = define(RAISES.format(annotation), module=module, **own)
    assert Implementation(f).framework.name == name


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_a_probe_finds_the_framework(name):
    package = pytest.importorskip(name)
    functions = {
        "numpy": lambda: [lambda q, k, v: np.zeros_like(q)],
        "torch": lambda: [plain("torch")],
        "jax": lambda: [plain("jax"), package.jit(lambda q, k, v: q)],
    }
    assert {Implementation(f).framework.name for f in functions[name]()} == {name}


@pytest.mark.parametrize(
    ("name", "function"),
    [("torch", "nn.functional.scaled_dot_product_attention"), ("jax", "nn.dot_product_attention")],
)
def test_functions_of_frameworks_take_their_arrays(name, function):
    read = Implementation(
        operator.attrgetter(function)(pytest.importorskip(name)), features=["scale"]
    )
    assert read.framework.name == name
    assert read.has_gradients


DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool")


@pytest.mark.parametrize("dtype", [*DTYPES, "int64"])
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_round_trip_keeps_every_bit(name, dtype):
    pytest.importorskip(name)
    array = (4 * np.random.default_rng(0).standard_normal((3, 5))).astype(dtype)
    if array.itemsize == 1 and dtype != "bool":
        array = np.arange(256, dtype=np.uint8).view(dtype)
    framework = make_framework(name)
    with framework.allowing("float64" if dtype == "int64" else dtype):
        converted = framework.give(array.copy())
    assert str(converted.dtype).removeprefix("torch.") == dtype
    back = framework.take(converted)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert back.flags.writeable


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch", "builtins.float, must be a torch tens"),
        ("jax", "builtins.float, must be a JAX arr"),
    ],
)
def test_result_must_be_an_array_of_the_framework(name, said):
    pytest.importorskip(name)
    with pytest.raises(ResultError, match=f"returned {said}"):
        Implementation(lambda q, k, v: 1.0, framework=name).forward(problem())


@pytest.mark.parametrize("through", ["o", "lse", "weights"])
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_frameworks_give_the_gradients_of_the_oracle(name, through):
    pytest.importorskip(name)
    case = problem(dtype="float64", mask="padding", bias="heads")
    douts = with_dweights(case) if through == "weights" else cotangents(case, through == "lse")
    read = Implementation(plain(name))
    results = read.gradients(case, douts)
    fwd = npattn.forward(**arguments_of(case))
    expected = npattn.backward(fwd, douts.dout, douts.dlse, douts.dweights)
    assert set(results) == {"dq", "dk", "dv", "dbias"}
    for own, array in results.items():
        np.testing.assert_allclose(array, getattr(expected, own[1:]), atol=1e-12, err_msg=own)
    assert set(read.gradients(case, douts, bias_gradient=False)) == {"dq", "dk", "dv"}


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_input_that_is_cut_off_has_zero_gradient(name):
    package = pytest.importorskip(name)
    cut = package.Tensor.detach if name == "torch" else package.lax.stop_gradient
    read = Implementation(lambda q, k, v: plain(name)(q, cut(k), v), framework=name)
    results = read.gradients(problem(), cotangents(problem()))
    assert results["dk"].shape == (B, K, S, D)
    assert (results["dk"] == 0).all()
    assert (results["dv"] != 0).all()


def plain(name):
    """Return attention as a user of a framework writes it."""
    package = importlib.import_module(name)
    return plain_torch(package) if name == "torch" else plain_jax(package)


def test_unknown_framework_error_names_argument(monkeypatch):
    for package in ("torch", "jax"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(OptionError, match=r"tiny problem \(numpy: ValueError: no\).*framework="):
        Implementation(define("def f(q, k, v): raise ValueError('no')"))


# --- torch ----------------------------------------------------------------------------------------


def test_a_device_that_does_not_compute_is_seen(monkeypatch, torch):
    framework = Implementation(lambda q, k, v: q, framework="torch").framework
    assert framework.device_works()

    def fails(*_, **__):
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(torch, "ones", fails)
    assert not framework.device_works()


def test_a_lost_device_ends_the_check_and_names_the_problem(monkeypatch, torch):
    def f(q, k, v, mask=None):
        if mask is not None:
            monkeypatch.setattr(read.framework, "device_works", lambda: False)
            raise RuntimeError("misaligned address")
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))

    read = Implementation(f, framework="torch")
    read.forward(problem())
    with pytest.raises(NpattnError, match="is lost") as caught:
        npattn.testing.check(read, only=["agreement-o"], examples=2)
    said = str(caught.value)
    assert "misaligned address" in said
    assert "mask=bool" in said
    assert "isolate=True" in said


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def framework(torch):
    return make_framework("torch")


def plain_torch(torch):
    """Attention as a torch user writes it, without an annotation."""

    def f(q, k, v, mask=None, *, bias=None, return_lse=False, return_weights=False):
        groups = q.shape[-3] // k.shape[-3]
        k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
        s = torch.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5
        s = s if bias is None else s + bias
        s = s if mask is None else s.masked_fill(~mask, float("-inf"))
        out = torch.einsum("bhts,bhse->bhte", s.softmax(-1), v)
        more = [s.logsumexp(-1)] * return_lse + [s.softmax(-1)] * return_weights
        return (out, *more) if more else out

    return f


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("view", ["transposed", "stepped"])
def test_views_keep_their_strides_in_torch(torch, dtype, view):
    case = problem(dtype=dtype)
    tensors = Implementation(plain_torch(torch), framework="torch").inputs(case, view)
    laid = Implementation(flash).inputs(case, view)
    for name in "qkv":
        assert tensors[name].stride() == tuple(
            n // laid[name].itemsize for n in laid[name].strides
        ), name
        assert not tensors[name].is_contiguous()
        np.testing.assert_array_equal(
            tensors[name].double().numpy(), getattr(case, name).astype(float)
        )


def test_expanded_tensors_have_a_stride_of_zero(torch):
    case = problem()
    case = case.replace(k=np.repeat(case.k[:1], B, axis=0))
    tensors = Implementation(plain_torch(torch), framework="torch").inputs(case, "expanded")
    assert tensors["k"].stride()[0] == 0
    np.testing.assert_array_equal(tensors["k"].numpy(), case.k)


def test_torch_has_no_negative_strides(torch):
    with pytest.raises(ImplementationError, match="torch tensors have no negative strides"):
        Implementation(plain_torch(torch), framework="torch").inputs(problem(), "reversed")


def test_tensors_live_on_the_device(torch):
    read = Implementation(plain_torch(torch))
    read.on("meta")
    assert read.framework.device == "meta"
    assert read.framework.give(np.ones(3)).device.type == "meta"


def test_autograd_can_skip_gradient_of_bias(torch):
    seen = []

    def f(q, k, v, bias=None):
        seen.append((q.requires_grad, bias.requires_grad))
        return plain_torch(torch)(q, k, v, bias=bias)

    case = problem(bias="full")
    read = Implementation(f, framework="torch")
    read.forward(case)
    assert set(read.gradients(case, cotangents(case))) == {"dq", "dk", "dv", "dbias"}
    without = read.gradients(case, cotangents(case), bias_gradient=False)
    assert set(without) == {"dq", "dk", "dv"}
    assert seen == [(False, False), (True, True), (True, False)]


def test_result_unreachable_by_autograd_is_an_error(torch):
    def f(q, k, v):
        return plain_torch(torch)(q, k, v).detach()

    with pytest.raises(ImplementationError, match="does not require grad"):
        Implementation(f).gradients(problem(), cotangents(problem()))


def test_exception_in_autograd_is_reported(torch):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q.sum() + k.sum() + torch.zeros(B, H, T, E)

        @staticmethod
        def backward(ctx, dout):
            raise RuntimeError("not yet")

    with pytest.raises(ImplementationError, match="its gradient raised RuntimeError: not yet"):
        Implementation(lambda q, k, v: Broken.apply(q, k, v)).gradients(
            problem(), cotangents(problem())
        )


def test_explicit_backward_of_torch_function_is_used(torch):
    def backward(dout, q, k, v, *, out):
        assert out.shape == dout.shape
        return torch.zeros_like(q), torch.ones_like(k), torch.ones_like(v)

    read = Implementation(plain_torch(torch), backward=backward)
    results = read.gradients(problem(), cotangents(problem()))
    assert (results["dq"] == 0).all()
    assert (results["dk"] == 1).all()


def test_rename_of_unknown_parameter_is_an_error():
    with pytest.raises(OptionError, match="rename has caussal, must be parameters of flash"):
        Implementation(flash, rename={"caussal": "causal"})


def test_unusable_torch_device_is_an_error():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has the device that is asked for")
    f = TARGETS["torch.sdpa"].load()[0]
    with pytest.raises(OptionError, match="device is 'cuda', which torch cannot use here"):
        Implementation(f).on("cuda")


# --- JAX ------------------------------------------------------------------------------------------


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


def plain_jax(jax):
    """Attention as a JAX user writes it, without an annotation."""
    jnp = jax.numpy

    def f(q, k, v, mask=None, *, bias=None, return_lse=False, return_weights=False):
        groups = q.shape[-3] // k.shape[-3]
        k, v = (jnp.repeat(x, groups, axis=-3) for x in (k, v))
        s = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
        s = s if bias is None else s + bias
        s = s if mask is None else jnp.where(mask, s, -jnp.inf)
        p = jax.nn.softmax(s)
        lse = jax.scipy.special.logsumexp(s, axis=-1)
        more = [lse] * return_lse + [p] * return_weights
        return (p @ v, *more) if more else p @ v

    return f


def test_float64_is_enabled_only_during_float64_calls(jax):
    seen = []

    def f(q, k, v):
        seen.append((q.dtype, jax.numpy.ones(3).dtype, (q + 1).dtype))
        return q

    for dtype in ("float64", "float32"):
        read, case = Implementation(f, framework="jax"), problem(dtype=dtype, E=D)
        assert read.forward(case)["o"].dtype == dtype
        assert read.gradients(case, cotangents(case))["dq"].dtype == dtype
    assert seen == [(np.float64,) * 3] * 2 + [(np.float32,) * 3] * 2
    assert jax.numpy.ones(3).dtype == np.float32


def test_disabled_float64_is_not_silently_narrowed(jax):
    with pytest.raises(ImplementationError, match="JAX converted float64 to float32"):
        make_framework("jax").give(np.ones(3))


@pytest.mark.parametrize("view", ["transposed", "stepped", "reversed"])
def test_jax_has_no_views(jax, view):
    with pytest.raises(ImplementationError, match="JAX arrays have no strides"):
        Implementation(plain_jax(jax), framework="jax").inputs(problem(), view)


def test_donated_input_is_detected(jax):
    giving = jax.jit(lambda q, k, v: q * 2, donate_argnums=(0,))
    read = Implementation(giving, framework="jax")
    case = problem()
    inputs = read.inputs(case)
    read.forward(case, inputs=inputs)
    with pytest.raises(ImplementationError, match="was donated"):
        read.framework.take(inputs["q"])


def test_exception_in_vjp_is_reported(jax):
    @jax.custom_vjp
    def f(q, k, v):
        return plain_jax(jax)(q, k, v)

    def backward(kept, dout):
        raise RuntimeError("not yet")

    f.defvjp(lambda q, k, v: (f(q, k, v), None), backward)
    with pytest.raises(ImplementationError, match="its gradient raised RuntimeError: not yet"):
        Implementation(f, framework="jax").gradients(problem(), cotangents(problem()))


def test_unusable_jax_device_is_an_error(jax):
    with pytest.raises(OptionError, match="device is 'tpu', which JAX cannot use here"):
        Implementation(plain_jax(jax), framework="jax").on("tpu")
    with pytest.raises(OptionError, match="device is 'cpu:99', which JAX cannot use here"):
        Implementation(plain_jax(jax), framework="jax").on("cpu:99")
    read = Implementation(plain_jax(jax), framework="jax")
    read.on("cpu:0")
    assert read.framework.device == jax.devices("cpu")[0]


def always_causal(late):
    """Return a function without a parameter for causal; keys from a position on are not read."""

    def f(q, k, v):
        keys = np.arange(k.shape[-2])
        hidden = (keys > keys[: q.shape[-2], None] + k.shape[-2] - q.shape[-2]) | (keys >= late)
        if q.shape[-2] > k.shape[-2]:
            raise NotImplementedError("more queries than keys")
        return npattn.attention(q, k, v, ~hidden).astype(q.dtype)

    return f


@pytest.mark.thorough
@pytest.mark.parametrize(("late", "passed"), [(10**6, True), (1024, False)])
def test_causal_feature_without_parameter_is_always_on(late, passed):
    options = {"features": "causal", "framework": "numpy", "shrink": False, "diagnosis": False}
    only = ["agreement-o", "model-sizes"]
    report = check(always_causal(late), only=only, examples=150, **options)
    assert report.passed == passed, str(report)
    assert any(line.startswith("float32: always causal") for line in report.refused)


def test_always_causal_function_is_called_without_it():
    one = np.eye(3, dtype="float32")[None, None]
    f = Implementation(always_causal(9), features="causal", framework="numpy")
    causal = npattn.Problem(one, one, one, causal="bottom_right")
    expected = npattn.attention(one, one, one, causal="bottom_right")
    np.testing.assert_allclose(f.forward(causal)["o"], expected, rtol=1e-5)
    with pytest.raises(ImplementationError, match="no parameter for a call without causal"):
        f.forward(npattn.Problem(one, one, one))
