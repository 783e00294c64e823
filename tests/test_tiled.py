"""The tiled engine: judged as any implementation is, held against dense, never all scores."""

import itertools
import tracemalloc

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import npattn
from npattn import biases, masks, tiled
from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.testing import check, compare
from npattn.testing.compare import compare_arrays
from npattn.testing.tolerance import allowed

B, H, K, G, T, S, D, E = 2, 6, 3, 2, 23, 29, 5, 7
SMALL = {"QUERIES": 7, "KEYS": 11, "CELL": 5}
ALL = ["q", "k", "v", "bias", "sinks"]


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return rng(seed).standard_normal(shape)


@pytest.fixture
def small(monkeypatch):
    """Tiles so small that small problems have many, and ends that are cut off."""
    for name, n in SMALL.items():
        monkeypatch.setattr(tiled, name, n)


def attention(
    q, k, v, mask=None, *, causal=False, window=None, bias=None, scale=None, softcap=None,
    sinks=None, dropout_mask=None, dropout_rate=0.0, return_lse=False,
):  # fmt: skip
    """The engine as an implementation under test, in the dtype of its inputs."""
    fwd = npattn.forward(
        q, k, v, mask, causal=causal, window=window, bias=bias, scale=scale, softcap=softcap,
        sinks=sinks, dropout_mask=dropout_mask, dropout_rate=dropout_rate,
        dtype=q.dtype, engine="tiled", conventions=npattn.Conventions(),
    )  # fmt: skip
    return (fwd.out, fwd.lse) if return_lse else fwd.out


def backward(dout, q, k, v, mask=None, *, out, lse, dlse=None, dweights=None, **options):
    fwd = npattn.forward(q, k, v, mask, dtype=q.dtype, engine="tiled",
                         conventions=npattn.Conventions(), **options)  # fmt: skip
    grads = npattn.backward(fwd, dout, dlse, dweights)
    return {name: getattr(grads, name) for name in ALL if getattr(grads, name) is not None}


def test_the_judge_finds_nothing(monkeypatch):
    for name, n in {"QUERIES": 9, "KEYS": 16, "CELL": 8}.items():
        monkeypatch.setattr(tiled, name, n)
    sizes = {"T": (1, 2, 7, 13, 16), "S": (1, 5, 11, 16, 17)}
    report = check(attention, backward=backward, framework="numpy", sizes=sizes, examples=8)
    assert report.passed, str(report)


def test_a_row_keeps_its_bits_whatever_others_see():
    """A score that overflows exp is subtracted in its own row alone."""
    given = problem()
    mask = np.ones((T, S), bool)
    mask[1:, 3] = False
    k = given.k.copy()
    k[..., 3, :] *= 1e5
    do = normal(B, H, T, E, seed=3)
    do[..., 0, :] = 0
    before, after = (
        npattn.api.evaluate(given.replace(mask=mask, k=x), engine="tiled") for x in (given.k, k)
    )
    assert (after.residuals[-1].shift[..., 0] != 0).any()
    assert (after.residuals[-1].shift[..., 1:] == 0).all()
    assert np.array_equal(before.out[..., 1:, :], after.out[..., 1:, :])
    one, other = (npattn.backward(fwd, do) for fwd in (before, after))
    assert np.array_equal(one.q[..., 1:, :], other.q[..., 1:, :])


def problem(seed=0, sizes=(T, S), **options):
    n, m = sizes
    q, k, v = normal(B, H, n, D, seed=seed), normal(B, K, m, D, seed=1), normal(B, K, m, E, seed=2)
    return Problem(q, k, v, **options)


def mod(s, b, h, t, j):
    return s * 0.5 + 0.01 * (h - t + j + b) * np.tanh(s)


OPTIONS = {
    "plain": {},
    "mask of each sample": {"mask": rng().random((B, 1, T, S)) < 0.5},
    "mask of each head": {"mask": rng().random((H, T, S)) < 0.1},
    "causal": {"causal": "top_left"},
    "window": {"window": (3, 2)},
    "prefix": {"mask": masks.prefix(4, alignment="top_left")},
    "documents": {"mask": masks.documents(np.arange(T) // 8, np.arange(S) // 9)},
    "lengths": {"mask": masks.lengths([3, S], [0, T])},
    "blocks": {"mask": masks.blocks(rng().random((H, 5, 6)) < 0.4, 5)},
    "custom": {"mask": masks.custom(lambda b, h, t, s: (t + s + h) % 3 == b)},
    "two masks": {"mask": masks.window(2, 2) | masks.lengths(2), "causal": "bottom_right"},
    "none of a mask": {"mask": ~masks.window(4, 4)},
    "bias": {"bias": normal(H, T, S)},
    "bias of all heads": {"bias": normal(T, S)},
    "bias of keys": {"bias": normal(B, 1, 1, S)},
    "bias of queries": {"bias": normal(T, 1)},
    "bias of -inf": {"bias": np.where(rng().random((T, S)) < 0.9, -np.inf, 0.0)},
    "bias of -1e9": {"bias": np.where(rng().random((T, S)) < 0.5, -1e9, 0.0)},
    "offset": {"bias": np.full((1, 1), -1e4)},
    "alibi": {"bias": biases.alibi(H)},
    "T5": {"bias": biases.relative(normal(32, H))},
    "a sum of biases": {"bias": biases.alibi(H) + normal(T, S)},
    "sinks": {"sinks": 30 * normal(H), "window": (2, 2)},
    "dropout": {"dropout_mask": rng().random((B, H, T, S)) < 0.7, "dropout_rate": 0.3},
    "dropout of queries": {"dropout_mask": rng().random((T, 1)) < 0.7},
    "softcap": {"softcap": 2.0, "causal": "top_left"},
    "score_mod": {"score_mod": mod, "softcap": 2.0, "mask": masks.window(4, 4)},
    "huge scores": {"scale": 1e3},
    "huge scores, causal": {"scale": -1e4, "causal": "top_left"},
    "scale of 0": {"scale": 0.0},
}
POISON = {
    "sound": lambda q, k, v, do: None,
    "NaN value": lambda q, k, v, do: v.__setitem__((0, 0, 10), np.nan),
    "infinite key": lambda q, k, v, do: k.__setitem__((1, 1, 11, 3), -np.inf),
    "NaN query": lambda q, k, v, do: q.__setitem__((0, 1, 7), np.nan),
    "NaN cotangent": lambda q, k, v, do: do.__setitem__((0, 1, 9), np.nan),
}


def narrowed(given, dtype):
    """The problem with arrays of a dtype, computed in it."""
    arrays = {n: x.astype(dtype) for n in ALL if isinstance(x := getattr(given, n), np.ndarray)}
    return given.replace(**arrays, dtype=dtype)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_is_as_near_to_dense_as_rounding_allows(options, poison, dtype):
    if poison == "infinite key" and options in ("softcap", "score_mod"):
        pytest.skip("a cap makes inf a finite score, of which no error can be derived")
    given = narrowed(problem(**OPTIONS[options]), dtype)
    do, dlse = normal(B, H, T, E, seed=3).astype(dtype), normal(B, H, T, seed=4).astype(dtype)
    POISON[poison](given.q, given.k, given.v, do)
    fwd = npattn.api.evaluate(given, engine="tiled")
    grads = npattn.backward(fwd, do, dlse)
    got = {"o": fwd.out, "lse": fwd.lse}
    got |= {f"d{name}": x for name in ALL if (x := getattr(grads, name)) is not None}
    parameter = got.pop("dbias") if isinstance(given.bias, biases.Bias) else None
    lines = compare(got, given, dout=do, dlse=dlse)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))
    assert all(x.dtype == dtype for x in got.values())
    if parameter is not None:
        assert_parameter_allowed(parameter, given, do, dlse)


def assert_parameter_allowed(got, given, do, dlse):
    """What is allowed of each score, summed as the gradient of a parameter sums scores."""
    exact = npattn.api.evaluate(given.replace(dtype="float64"), engine="dense")
    want = npattn.backward(exact, do, dlse).bias
    room = allowed(given.materialised(), given.q.dtype, None, dout=do, dlse=dlse)["dbias"]
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


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", EXTREMES)
def test_what_leaves_the_range_of_float32_is_as_near_as_anything(case):
    words = dict(EXTREMES[case])
    size, hidden = words.pop("v", 1.0), words.pop("hidden", None)
    given = narrowed(problem(**words), "float32")
    given = given.replace(v=given.v * np.float32(size))
    if hidden is not None:
        for name, array in (("key", given.k), ("value", given.v)):
            if name in case:
                array[..., 12, :] = hidden
    do, dlse = (normal(B, H, *n, seed=3).astype("float32") for n in ((T, E), (T,)))
    fwd = npattn.api.evaluate(given, engine="tiled")
    grads = npattn.backward(fwd, do, dlse)
    got = {"o": fwd.out, "lse": fwd.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    assert all(np.isfinite(x).all() for x in got.values())
    lines = compare(got, given, dout=do, dlse=dlse)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))
    exact = npattn.api.evaluate(given.replace(dtype="float64"), engine="dense")
    # Each score is rounded by half of 2⁻²³ of its size, that of its bias included.
    error = 2.0**-23 * (100 + abs(exact.lse).max())
    lost = S * np.finfo("float32").tiny  # what underflows beside a sink
    assert abs(fwd.out - exact.out).max() <= error * abs(exact.out).max() + lost


@pytest.mark.usefixtures("small")
def test_a_huge_value_that_nobody_sees_reaches_no_gradient():
    given = narrowed(problem(mask=np.arange(S)[None] != 12), "float32")
    plain, do = given.replace(v=given.v.copy()), normal(B, H, T, E, seed=3).astype("float32")
    given.v[..., 12, :] = 3e38  # times do it is beyond float32
    want, got = (
        npattn.backward(npattn.api.evaluate(p, engine="tiled"), do) for p in (plain, given)
    )
    for name in "qkv":
        assert np.array_equal(getattr(got, name), getattr(want, name))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("hides", ["causal", "mask"])
def test_a_bias_of_nan_that_nobody_sees_matters_to_nobody(hides):
    visible = np.tri(T, dtype=bool)
    options = {"causal": True} if hides == "causal" else {"mask": visible}
    q, k, v, do = (normal(H, T, D, seed=n) for n in range(4))
    plain = Problem(q, k, v, bias=np.zeros((T, T)), **options)
    given = plain.replace(bias=np.where(visible, 0, np.nan))
    want, got = (npattn.api.evaluate(p, engine="tiled") for p in (plain, given))
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)
    one, other = npattn.backward(want, do), npattn.backward(got, do)
    assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("q", "k", "v"))
    assert np.array_equal(one.bias, other.bias)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("careful", [False, True])
def test_a_visible_score_of_nan_is_a_row_of_nan(careful):
    q, k, v = (normal(H, T, D, seed=n) for n in range(3))
    visible, bias = np.tri(T, dtype=bool), np.zeros((T, T))
    bias[5, 3] = np.nan
    if careful:
        v[:, -1] = np.inf
    given = Problem(q, k, v, visible, bias=bias)
    want, got = (npattn.api.evaluate(given, engine=name) for name in ("dense", "tiled"))
    assert np.isnan(want.lse[:, 5]).all()
    assert np.array_equal(np.isnan(got.lse), np.isnan(want.lse))
    assert np.array_equal(np.isnan(got.out[:, :-1]), np.isnan(want.out[:, :-1]))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", ["a NaN bias", "a cotangent of a row that sees nothing"])
def test_what_is_behind_a_bias_of_minus_inf_gets_no_gradient(case):
    bias, dlse = np.zeros((T, S)), normal(B, H, T, seed=4)
    if case == "a NaN bias":
        bias[0, 0], bias[0, 1:] = np.nan, -np.inf  # a row of NaN, that of key 0 alone
    else:
        bias[0], dlse[..., 0] = -np.inf, np.nan
    given, do = problem(bias=bias), normal(B, H, T, E, seed=3)
    want, got = (
        npattn.backward(npattn.api.evaluate(given, engine=name), do, dlse)
        for name in ("dense", "tiled")
    )
    for name in ("q", "k", "v", "bias"):
        one, other = getattr(want, name), getattr(got, name)
        finite = np.isfinite(one)
        assert finite.all() == (case != "a NaN bias")
        assert np.array_equal(finite, np.isfinite(other))
        assert_near(other[finite], one[finite])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", ["plain", "bias", "dropout", "mask of each head", "alibi"])
def test_cotangents_of_the_weights_go_in(options):
    given = problem(**OPTIONS[options])
    do, dlse, dw = normal(B, H, T, E), normal(B, H, T), normal(B, H, T, S, seed=5)
    fwd = npattn.api.evaluate(given, engine="tiled")
    grads = npattn.backward(fwd, do, dlse, dw)
    got = {f"d{name}": getattr(grads, name) for name in "qkv"}
    lines = compare(got, given, dout=do, dlse=dlse, dweights=dw)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("poison", ["sound", "NaN value"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_direction_moves_it_as_it_moves_dense(options, poison):
    given = problem(**OPTIONS[options])
    POISON[poison](given.q, given.k, given.v, normal(1, 1))
    names = [n for n in ALL if isinstance(getattr(given, n), np.ndarray)]
    along = {f"d{n}": normal(*getattr(given, n).shape, seed=9) for n in names}
    exact, fwd = (npattn.api.evaluate(given, engine=name) for name in ("dense", "tiled"))
    # An error of the scores is one of ds too: of 2 · |scale| · Σ |q k| in units of rounding.
    size = 1 + abs(given.scale) * np.einsum("bhtd->bht", abs(given.q)).max() * abs(given.k).max()
    for want, got in zip(npattn.jvp(exact, **along), npattn.jvp(fwd, **along), strict=True):
        finite = np.isfinite(want)
        assert np.array_equal(finite, np.isfinite(got))
        largest = abs(want[finite]).max()
        assert abs(got[finite] - want[finite]).max() <= S * size * 2.0**-52 * largest


@pytest.mark.usefixtures("small")
def test_a_direction_that_nobody_sees_moves_nothing():
    given = problem(mask=np.arange(S)[None] != 12)
    fwd = npattn.api.evaluate(given, engine="tiled")
    dk, dv = normal(B, K, S, D, seed=7), normal(B, K, S, E, seed=8)
    want = npattn.jvp(fwd, dk=dk, dv=dv)
    dv[..., 12, :] = np.nan
    for one, other in zip(want, npattn.jvp(fwd, dk=dk, dv=dv), strict=True):
        assert_near(other, one)


def test_weights_are_those_of_dense():
    given = problem(causal="top_left")
    fwd = npattn.api.evaluate(given, engine="tiled")
    assert np.array_equal(fwd.weights, npattn.api.evaluate(given, engine="dense").weights)


SHAPES = {
    "no keys": ((B, H, T, D), (B, K, 0, D), (B, K, 0, E)),
    "no queries": ((B, H, 0, D), (B, K, S, D), (B, K, S, E)),
    "no batch": ((0, H, T, D), (0, K, S, D), (0, K, S, E)),
    "no heads": ((B, 0, T, D), (B, 0, S, D), (B, 0, S, E)),
    "no size": ((B, H, T, 0), (B, K, S, 0), (B, K, S, E)),
    "no value": ((B, H, T, D), (B, K, S, D), (B, K, S, 0)),
    "rank 2": ((T, D), (S, D), (S, E)),
    "rank 5": ((2, 3, H, T, D), (2, 3, K, S, D), (2, 3, K, S, E)),
    "broadcast": ((3, 1, H, T, D), (2, K, S, D), (K, S, E)),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shapes", SHAPES)
def test_any_shape_is_computed(shapes):
    q, k, v = (normal(*shape, seed=i) for i, shape in enumerate(SHAPES[shapes]))
    given = Problem(q, k, v, sinks=np.zeros(q.shape[-3] if q.ndim > 2 else 1))
    fwd = npattn.api.evaluate(given, engine="tiled")
    do, dlse = normal(*fwd.out.shape, seed=4), normal(*fwd.lse.shape, seed=5)
    grads = npattn.backward(fwd, do, dlse)
    got = {"o": fwd.out, "lse": fwd.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    lines = compare(got | {"dsinks": grads.sinks}, given, dout=do, dlse=dlse)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))


@pytest.mark.usefixtures("small")
def test_views_of_any_strides_are_read_and_left_alone():
    given = problem()
    odd = given.replace(
        q=np.asfortranarray(given.q),
        k=np.repeat(given.k, 2, -2)[..., ::2, :],
        v=given.v[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
    )
    before = [x.tobytes() for x in (odd.q, odd.k, odd.v)]
    want, got = (npattn.api.evaluate(p, engine="tiled") for p in (given, odd))
    do = np.asfortranarray(normal(B, H, T, E))
    assert_near(got.out, want.out)
    for name in "qkv":
        assert_near(*(getattr(npattn.backward(f, do), name) for f in (got, want)))
    assert before == [x.tobytes() for x in (odd.q, odd.k, odd.v)]


def assert_near(got, want):
    """BLAS adds in another order for other strides: an error of as many roundings as terms."""
    assert abs(got - want).max() <= (S + T) * H * 2.0**-52 * abs(want).max()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", ["plain", "bias of all heads", "causal", "alibi"])
def test_any_number_of_threads_gives_the_same_bits_each_time(options):
    given, do = problem(**OPTIONS[options]), normal(B, H, T, E, seed=3)

    def bits():
        fwd = npattn.api.evaluate(given, engine="tiled")
        grads = npattn.backward(fwd, do)
        return [x.tobytes() for x in (fwd.out, fwd.lse, grads.v, grads.k)]

    with threadpool_limits(3, user_api="blas"):
        assert bits() == bits()
        many = bits()
    with threadpool_limits(1, user_api="blas"):
        assert bits()[:2] == many[:2]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bias", [None, normal(T, S), normal(1, S), normal(T, 1), biases.alibi(1)])
def test_one_head_is_shared_out_by_keys(bias):
    q, k, v = (normal(1, n, D, seed=n) for n in (T, S, S + 1))
    given = Problem(q, k, v[:, :S], bias=bias)
    do, dlse = normal(1, T, D, seed=3), normal(1, T, seed=4)  # without dlse a row of dbias is 0
    with threadpool_limits(3, user_api="blas"):
        fwd = npattn.api.evaluate(given, engine="tiled")
        grads = npattn.backward(fwd, do, dlse)
    want = npattn.backward(npattn.api.evaluate(given, engine="dense"), do, dlse)
    for name in ("q", "k", "v", *(["bias"] if bias is not None else [])):
        assert_near(getattr(grads, name), getattr(want, name))


@pytest.mark.parametrize(
    ("bias", "count"),
    [
        (None, B * K),
        (normal(B, H, T, S), B * K),
        (normal(B, 1, T, S), B),
        (normal(H, T, S), K),
        (normal(T, S), 1),
        (biases.alibi(H), K),
        (biases.alibi(H) + normal(B, 1, 1, S), 1),
    ],
)
def test_heads_that_share_keys_or_a_bias_are_one_thread_s(bias, count):
    """Else two threads would add to the same number of a gradient."""
    call = tiled._Call(problem(bias=bias))
    zeros = np.zeros((B, H, T))
    with threadpool_limits(1, user_api="blas"):
        pull = tiled._Pull(call, tiled.Saved(np.zeros((B, H, T, E)), zeros, zeros),
                           np.zeros((B, H, T, E)), None)  # fmt: skip
    assert len(pull.items) == count
    assert sorted(itertools.chain(*(planes for _, planes, *_ in pull.items))) == call.planes
    for _, planes, *_ in pull.items:
        assert len(planes) == B * H // count


@pytest.mark.parametrize(("n", "rows"), [(512, 256), (1024, 512), (1023, 256), (3, 256)])
def test_blocks_are_halved_where_there_would_be_few(n, rows):
    x = np.zeros((8, n, 1))
    blocks = tiled._Call(Problem(x, x, x)).blocks()
    assert {t1 - t0 for _, t0, t1 in blocks} <= {rows, n % rows}


def test_an_error_of_the_users_function_is_raised_here():
    def broken(s, *_):
        raise ZeroDivisionError("mine")

    for count in (1, 3):
        with threadpool_limits(count, user_api="blas"), pytest.raises(ZeroDivisionError):
            npattn.api.evaluate(problem(score_mod=broken), engine="tiled")
    npattn.api.evaluate(problem(), engine="tiled")


def test_it_never_holds_all_scores():
    n, heads, size = 2048, 2, 8
    q, k, v = (normal(heads, n, size, seed=i) for i in range(3))
    given, do = Problem(q, k, v, engine="tiled"), normal(heads, n, size)

    def work():
        fwd = npattn.api.evaluate(given)
        npattn.backward(fwd, do)

    work()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tiles = 8 * 2 * tiled.QUERIES * tiled.KEYS  # s and dp of one thread
    assert peak < 20 * q.nbytes + 2 * tiles < 8 * n * n


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (masks.window(255, 0), lambda n: 2 * tiled.CELL),
        (masks.causal(), lambda n: n / 2 + tiled.CELL),
        (masks.documents(np.arange(8192) // 512), lambda n: 512),
        (masks.documents(np.arange(8192) // 499), lambda n: 499 + tiled.CELL),
        (masks.lengths(100), lambda n: 100),
        (masks.blocks(np.eye(32, dtype=bool), 256), lambda n: 256),
    ],
)
def test_a_mask_costs_what_it_shows(mask, share):
    n = 8192
    x = np.zeros((1, n, 1))
    call = tiled._Call(Problem(x, x, x, mask))
    parts = itertools.chain(*(call.parts(*block) for block in call.blocks()))
    area = sum((t1 - t0) * (s1 - s0) for t0, t1, s0, s1, _ in parts)
    assert area <= n * share(n) < n * n


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", OPTIONS)
def test_parts_hold_each_visible_score_once_and_are_marked_where_they_hide_one(options):
    given = problem(**OPTIONS[options])
    call = tiled._Call(given)
    whole = (B, H, T, S)
    visible = np.broadcast_to(True if given.visible is None else given.visible, whole)
    seen = np.zeros(whole, int)
    for plane, t0, t1 in call.blocks():
        for r0, r1, s0, s1, partial in call.parts(plane, t0, t1):
            assert t0 <= r0 < r1 <= t1
            assert s1 - s0 <= (tiled.CELL if partial else tiled.KEYS)
            seen[plane][r0:r1, s0:s1] += 1
            assert partial != visible[plane][r0:r1, s0:s1].all()
    assert seen.max() == 1
    assert not (visible & (seen == 0)).any()


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "complex128"}]
)
def test_what_it_does_not_compute_is_refused(options):
    with pytest.raises(OptionError, match=r'engine is "tiled" with dtype .*, must be "dense"'):
        problem(engine="tiled", **options)
    assert npattn.forward(*(normal(1, 3, 2) for _ in "qkv"), **options).engine == "dense"


def test_complex_arrays_are_refused():
    x = normal(1, 3, 2).astype(complex)
    with pytest.raises(OptionError, match="complex128, must be"):
        npattn.attention(x, x, x, engine="tiled")


def test_auto_takes_it_where_there_are_many_scores():
    few, many = (normal(1, n, 2) for n in (23, 1031))
    assert npattn.forward(few, few, few).engine == "dense"
    assert npattn.forward(many, many, many).engine == "tiled"
    assert npattn.forward(many, many, many, dtype="bfloat16").engine == "dense"
    assert npattn.forward(many, many, many, dtype="complex128").engine == "dense"
    assert npattn.forward(many, many, many, engine="dense").engine == "dense"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", npattn.conventions.PROFILES)
def test_conventions_are_translated_around_it(name):
    given = problem(mask=rng().random((B, 1, T, S)) < 0.1)
    conventions, do = npattn.conventions.PROFILES[name], normal(B, H, T, E)
    fwd = npattn.api.evaluate(given, conventions, engine="tiled")
    grads = npattn.backward(fwd, do)
    got = {"o": fwd.out, "lse": fwd.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    lines = compare(got, given, dout=do, conventions=conventions)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))
