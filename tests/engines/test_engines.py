"""Every engine, on every kind of array: as near to dense as rounding allows, whatever is asked."""

from functools import cache

import numpy as np
import pytest

import npattn.oracle.api
from npattn import biases
from npattn.problem import Problem
from npattn.testing import compare
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.bounds.free_elements import free_elements
from npattn.testing.comparison import compare_arrays
from tests.backends import (
    BACKENDS,
    EACH,
    OPTIONS,
    POISON,
    B,
    D,
    E,
    H,
    K,
    S,
    T,
    normal,
    problem,
    rng,
)  # fmt: skip

ALL = ["q", "k", "v", "bias", "sinks"]
# What is poisoned runs through the same lines as what is sound: these are measured once.
POISONED = [
    pytest.param(name, marks=() if name == "sound" else pytest.mark.unmeasured) for name in POISON
]

# Which elements are finite does not depend on the dtype: two are for what is sound, and nightly.
POISONED_IN = [
    pytest.param(*one.values, dtype, marks=(*one.marks, *([pytest.mark.nightly] if skips else [])))
    for one in POISONED
    for dtype, skips in (("float32", False), ("float64", "sound" not in one.values))
]


@pytest.fixture(params=EACH)
def backend(request, monkeypatch):
    """An engine with tiles so small that small problems have many."""
    found = BACKENDS[request.param]()
    found.small(monkeypatch)
    return found


def assert_near(got, want):
    """Sums in another order: an error of as many roundings as terms."""
    assert abs(got - want).max() <= (S + T) * H * 2.0**-52 * abs(want).max()


def convert(given, dtype):
    """The problem with arrays of a dtype, computed in it."""
    arrays = {n: x.astype(dtype) for n in ALL if isinstance(x := getattr(given, n), np.ndarray)}
    return given.replace(**arrays, dtype=dtype)


def poisoned(options, poison, dtype):
    """Return a problem with its cotangents."""
    given = convert(problem(**OPTIONS[options]), dtype)
    do, dlse = normal(B, H, T, E, seed=3).astype(dtype), normal(B, H, T, seed=4).astype(dtype)
    POISON[poison](given.q, given.k, given.v, do)
    return given, do, dlse


@cache  # the same for every engine
def reference(options, poison, dtype):
    """Return the exact results of a problem by name, and their tolerances."""
    given, do, dlse = poisoned(options, poison, dtype)
    given = given.materialise()
    fwd = npattn.oracle.api.evaluate(given, engine="dense")
    grads = npattn.backward(fwd, do, dlse)
    exact = {"o": fwd.out, "lse": fwd.lse} | {f"d{n}": getattr(grads, n) for n in ALL}
    allowed = tolerance(given, given.q.dtype, None, dout=do, dlse=dlse)
    for name, free in free_elements(given).items():
        allowed[name] = np.where(free, np.inf, allowed[name])
    return exact, allowed


# The engines of one problem come one after another, so that one process has its reference.
@pytest.mark.parametrize("backend", EACH, indirect=True)
@pytest.mark.parametrize(("poison", "dtype"), POISONED_IN)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_agrees_with_dense_within_rounding(backend, options, poison, dtype):
    if poison == "infinite key" and options in ("softcap", "score_mod"):
        pytest.skip("a cap makes inf a finite score, of which no error can be derived")
    given, do, dlse = poisoned(options, poison, dtype)
    run = backend.evaluate(given)
    grads = run.backward(do, dlse)
    got = {"o": run.out, "lse": run.lse}
    got |= {f"d{name}": x for name in ALL if (x := getattr(grads, name)) is not None}
    parameter = got.pop("dbias") if isinstance(given.bias, biases.Bias) else None
    exact, allowed = reference(options, poison, dtype)
    for name, x in got.items():
        assert x.shape == exact[name].shape
        line = compare_arrays(name, x, exact[name], allowed[name])
        assert line.passed, str(line)
    assert all(x.dtype == dtype for x in got.values())
    if parameter is not None:
        assert_parameter_allowed(parameter, given, do, dlse)


def assert_parameter_allowed(got, given, do, dlse):
    """Tolerance of each score, summed as the gradient of a parameter sums scores."""
    exact = npattn.oracle.api.evaluate(given.replace(dtype="float64"), engine="dense")
    want = npattn.backward(exact, do, dlse).bias
    room = tolerance(given.materialise(), given.q.dtype, None, dout=do, dlse=dlse)["dbias"]
    with np.errstate(invalid="ignore"):  # a room of inf, times a distance of 0
        room = given.bias.gradient(room)
    terms = (x if isinstance(x, tuple) else (x,) for x in (got, want, room))
    for one, exact, limit in zip(*terms, strict=True):
        line = compare_arrays("dbias", one, exact, abs(limit))
        assert line.passed, str(line)


EXTREMES = {
    "values that overflow times what does not": {"bias": np.full((1, 1), 80.0), "v": 1e6},
    "a sink beyond exp": {"sinks": np.full(H, 200.0)},
    "sums that are almost lost": {"bias": np.full((1, 1), -95.0)},
    "scores beyond exp": {"bias": np.full((1, 1), 200.0)},
    "a NaN key that nobody sees": {"mask": np.arange(S)[None] != 12, "hidden": np.nan},
    "an infinite key and value that nobody sees": {
        "mask": np.arange(S)[None] != 12,
        "hidden": -np.inf,
    },
}


@pytest.mark.parametrize("case", EXTREMES)
def test_scores_beyond_float32_agree_within_rounding(backend, case):
    words = dict(EXTREMES[case])
    size, hidden = words.pop("v", 1.0), words.pop("hidden", None)
    given = convert(problem(**words), "float32")
    given = given.replace(v=given.v * np.float32(size))
    if hidden is not None:
        for name, array in (("key", given.k), ("value", given.v)):
            if name in case:
                array[..., 12, :] = hidden
    do, dlse = (normal(B, H, *n, seed=3).astype("float32") for n in ((T, E), (T,)))
    run = backend.evaluate(given)
    grads = run.backward(do, dlse)
    got = {"o": run.out, "lse": run.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    assert all(np.isfinite(x).all() for x in got.values())
    lines = compare(got, given, dout=do, dlse=dlse)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))
    exact = npattn.oracle.api.evaluate(given.replace(dtype="float64"), engine="dense")
    # Each score is rounded by half of 2⁻²³ of its size, that of its bias included.
    error = 2.0**-23 * (100 + abs(exact.lse).max())
    lost = S * np.finfo("float32").tiny  # what underflows beside a sink
    assert abs(run.out - exact.out).max() <= error * abs(exact.out).max() + lost


def test_a_huge_value_that_nobody_sees_reaches_no_gradient(backend):
    given = convert(problem(mask=np.arange(S)[None] != 12), "float32")
    plain, do = given.replace(v=given.v.copy()), normal(B, H, T, E, seed=3).astype("float32")
    given.v[..., 12, :] = 3e38  # times do it is beyond float32
    want, got = (backend.evaluate(p).backward(do) for p in (plain, given))
    for name in "qkv":
        assert np.array_equal(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("case", ["a NaN bias", "a cotangent of a row that sees nothing"])
def test_key_behind_a_minus_inf_bias_gets_no_gradient(backend, case):
    bias, dlse = np.zeros((T, S)), normal(B, H, T, seed=4)
    if case == "a NaN bias":
        bias[0, 0], bias[0, 1:] = np.nan, -np.inf  # a row of NaN, that of key 0 alone
    else:
        bias[0], dlse[..., 0] = -np.inf, np.nan
    given, do = problem(bias=bias), normal(B, H, T, E, seed=3)
    want = npattn.backward(npattn.oracle.api.evaluate(given, engine="dense"), do, dlse)
    got = backend.evaluate(given).backward(do, dlse)
    for name in ("q", "k", "v", "bias"):
        one, other = getattr(want, name), getattr(got, name)
        finite = np.isfinite(one)
        assert finite.all() == (case != "a NaN bias")
        assert np.array_equal(finite, np.isfinite(other))
        assert_near(other[finite], one[finite])


@pytest.mark.parametrize("sink", [0.5, -np.inf])
@pytest.mark.parametrize("hides", ["mask", "bias"])
def test_sink_only_row_passes_no_gradient(backend, hides, sink):
    visible = np.arange(T)[:, None] != np.zeros(S)
    hidden = {"mask": visible} if hides == "mask" else {"bias": np.where(visible, 0, -np.inf)}
    given = problem(sinks=np.array([sink, 0.25, *normal(H - 2)]), **hidden)
    do, dlse = normal(B, H, T, E, seed=3), normal(B, H, T, seed=4)
    do[:, :, 0] = 0
    want = npattn.backward(npattn.oracle.api.evaluate(given, engine="dense"), do, dlse)
    do[:, 0, 0], do[:, 1, 0] = np.nan, np.inf
    got = backend.evaluate(given).backward(do, dlse)
    for name in ("q", "k", "v", "sinks", *(["bias"] if hides == "bias" else [])):
        assert_near(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("hides", ["mask", "bias"])
def test_dlse_of_a_sink_only_row_reaches_the_sink(backend, hides):
    visible = np.arange(T)[:, None] != np.zeros(S)
    hidden = {"mask": visible} if hides == "mask" else {"bias": np.where(visible, 0, -np.inf)}
    given, do = problem(sinks=normal(H), **hidden), normal(B, H, T, E, seed=3)
    dlse = normal(B, H, T, seed=4)
    dlse[:, 1, 0] = 0
    want = npattn.backward(npattn.oracle.api.evaluate(given, engine="dense"), do, dlse)
    dlse[:, 1, 0] = np.nan
    got = backend.evaluate(given).backward(do, dlse)
    for name in ("q", "k", "v"):
        assert_near(getattr(got, name), getattr(want, name))
    assert np.array_equal(np.isnan(got.sinks), np.arange(H) == 1)


@pytest.mark.parametrize("options", ["plain", "bias", "dropout", "mask of each head", "alibi"])
def test_cotangents_of_the_weights_go_in(backend, options):
    given = problem(**OPTIONS[options])
    do, dlse, dw = normal(B, H, T, E), normal(B, H, T), normal(B, H, T, S, seed=5)
    run = backend.evaluate(given)
    grads = run.backward(do, dlse, dw)
    got = {f"d{name}": getattr(grads, name) for name in "qkv"}
    lines = compare(got, given, dout=do, dlse=dlse, dweights=dw)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))


def direction_of(parameter):
    if isinstance(parameter, tuple):
        return tuple(map(direction_of, parameter))
    return normal(*parameter.shape, seed=9)


@pytest.mark.parametrize("poison", POISONED[:2])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_direction_moves_it_as_it_moves_dense(backend, options, poison):
    given = problem(**OPTIONS[options])
    POISON[poison](given.q, given.k, given.v, normal(1, 1))
    names = [n for n in ALL if isinstance(getattr(given, n), np.ndarray)]
    along = {f"d{n}": normal(*getattr(given, n).shape, seed=9) for n in names}
    if isinstance(given.bias, biases.Bias):
        along["dbias"] = direction_of(given.bias.parameter)
    exact = npattn.jvp(npattn.oracle.api.evaluate(given, engine="dense"), **along)
    # An error of the scores is one of ds too: of 2 · |scale| · Σ |q k| in units of rounding.
    size = 1 + abs(given.scale) * np.einsum("bhtd->bht", abs(given.q)).max() * abs(given.k).max()
    for want, got in zip(exact, backend.evaluate(given).jvp(**along), strict=True):
        finite = np.isfinite(want)
        assert np.array_equal(finite, np.isfinite(got))
        largest = abs(want[finite]).max()
        assert abs(got[finite] - want[finite]).max() <= S * size * 2.0**-52 * largest


def test_a_direction_that_nobody_sees_moves_nothing(backend):
    given = problem(mask=np.arange(S)[None] != 12)
    run = backend.evaluate(given)
    dk, dv = normal(B, K, S, D, seed=7), normal(B, K, S, E, seed=8)
    want = run.jvp(dk=dk, dv=dv)
    dv[..., 12, :] = np.nan
    for one, other in zip(want, run.jvp(dk=dk, dv=dv), strict=True):
        assert_near(other, one)


@pytest.mark.parametrize("hides", ["mask", "bias"])
def test_sink_of_minus_inf_moves_no_empty_row(backend, hides):
    visible = np.arange(T)[:, None] != np.zeros(S)
    hidden = {"mask": visible} if hides == "mask" else {"bias": np.where(visible, 0, -np.inf)}
    given = problem(sinks=np.array([-np.inf, *normal(H - 1)]), **hidden)
    along = {"dsinks": normal(H, seed=5), "dq": normal(B, H, T, D, seed=6)}
    do, dlse = backend.evaluate(given).jvp(**along)
    want = npattn.jvp(npattn.oracle.api.evaluate(given, engine="dense"), **along)
    assert not do[:, 0, 0].any()
    assert not dlse[:, 0, 0].any()
    assert_near(do, want[0])
    assert_near(dlse, want[1])


SHAPES = {
    "no keys": ((B, H, T, D), (B, K, 0, D), (B, K, 0, E)),
    "no queries": ((B, H, 0, D), (B, K, S, D), (B, K, S, E)),
    "no batch": ((0, H, T, D), (0, K, S, D), (0, K, S, E)),
    "no heads": ((B, 0, T, D), (B, 0, S, D), (B, 0, S, E)),
    "no size": ((B, H, T, 0), (B, K, S, 0), (B, K, S, E)),
    "no value": ((B, H, T, D), (B, K, S, D), (B, K, S, 0)),
    "rank 2": ((T, D), (S, D), (S, E)),
    "rank 2, no keys": ((T, D), (0, D), (0, E)),
    "rank 2, no size": ((T, 0), (S, 0), (S, E)),
    "rank 3, no queries": ((H, 0, D), (K, S, D), (K, S, E)),
    "rank 5, no value": ((2, 3, H, T, D), (2, 3, K, S, D), (2, 3, K, S, 0)),
    "rank 5": ((2, 3, H, T, D), (2, 3, K, S, D), (2, 3, K, S, E)),
    "broadcast keys": ((2, H, T, D), (1, K, S, D), (K, S, E)),
    "broadcast queries": ((1, H, T, D), (2, K, S, D), (2, K, S, E)),
    "broadcast": ((3, 1, H, T, D), (2, K, S, D), (K, S, E)),
}


@pytest.mark.parametrize("shapes", SHAPES)
def test_any_shape_is_computed(backend, shapes):
    q, k, v = (normal(*shape, seed=i) for i, shape in enumerate(SHAPES[shapes]))
    given = Problem(q, k, v, sinks=np.zeros(q.shape[-3] if q.ndim > 2 else 1))
    run = backend.evaluate(given)
    do, dlse = normal(*run.out.shape, seed=4), normal(*run.lse.shape, seed=5)
    grads = run.backward(do, dlse)
    got = {"o": run.out, "lse": run.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    lines = compare(got | {"dsinks": grads.sinks}, given, dout=do, dlse=dlse)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))
    along = {f"d{name}": getattr(given, name) for name in "qkv"}
    wanted = npattn.jvp(npattn.oracle.api.evaluate(given, engine="dense"), **along)
    for one, other in zip(run.jvp(**along), wanted, strict=True):
        assert one.shape == other.shape
        assert not other.size or abs(one - other).max() <= 2.0**-40 * (1 + abs(other).max())


@pytest.mark.parametrize("name", ["npattn", "torch.sdpa", "jax.nn", "onnx@1.22"])
def test_conventions_are_translated_around_it(backend, name):
    given = problem(mask=rng().random((B, 1, T, S)) < 0.1)
    conventions, do = npattn.profiles.PROFILES[name].conventions, normal(B, H, T, E)
    run = backend.evaluate(given, conventions)
    grads = run.backward(do)
    got = {"o": run.out, "lse": run.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    lines = compare(got, given, dout=do, conventions=conventions)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))


EACH_FIELD = {
    "fill": {"hidden_fill": -1.5},
    "add": {"hidden_add": -1.5, "softcap": "after_mask"},
    "late cap": {"softcap": "after_bias", "bias": "before_scale"},
    "capped fill": {"softcap": "after_mask", "kv_head": "tile"},
    "mean": {"empty_row": "mean", "lse_base": "2", "kv_head": "tile"},
    "nan": {"empty_row": "nan", "lse_empty": 0.0},
}


@pytest.mark.parametrize("bias", ["array", "object"])
@pytest.mark.parametrize("name", EACH_FIELD)
def test_a_direction_is_translated_around_it(backend, name, bias):
    """The same translation around another engine, whose errors are those of the test above."""
    term = normal(H, T, S) if bias == "array" else biases.alibi(normal(H)) + normal(T, S)
    mask = rng().random((B, 1, T, S)) < 0.1
    given = problem(mask=mask, bias=term, softcap=2.0)
    conventions = npattn.Conventions(**EACH_FIELD[name])
    along = {f"d{n}": normal(*getattr(given, n).shape, seed=9) for n in "qkv"}
    along["dbias"] = direction_of(term if bias == "array" else term.parameter)
    exact = npattn.jvp(npattn.oracle.api.evaluate(given, conventions, engine="dense"), **along)
    size = 1 + np.einsum("bhtd->bht", abs(given.q)).max() * abs(given.k).max()
    for want, got in zip(exact, backend.evaluate(given, conventions).jvp(**along), strict=True):
        finite = np.isfinite(want)
        assert np.array_equal(finite, np.isfinite(got))
        largest = abs(want[finite]).max()
        assert abs(got[finite] - want[finite]).max() <= S * size * 2.0**-52 * largest


def test_weights_are_those_of_dense(backend):
    given = problem(mask=OPTIONS["mask of each head"]["mask"])  # some queries see nothing
    want = npattn.oracle.api.evaluate(given, engine="dense").weights
    assert_near(backend.evaluate(given).weights, want)
