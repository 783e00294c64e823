"""The tiled engine: judged as any implementation is, never all scores, and its threads.

What every engine must compute: test_engines.py.
"""

import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import npattn.oracle.api
from npattn import biases, masks
from npattn.engines import threads, tiled
from npattn.engines.tiled import operations, tiling
from npattn.engines.tiled.gradients import Pull
from npattn.engines.tiled.operations import Call, Saved
from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.testing import check, compare
from tests.backends import OPTIONS, TILES, B, D, E, H, K, S, T, normal, problem

ALL = ["q", "k", "v", "bias", "sinks"]


@pytest.fixture
def small(monkeypatch):
    """Tiles so small that small problems have many, and ends that are cut off."""
    for name, n in TILES.items():
        monkeypatch.setattr(tiling, name, n)


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


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.unmeasured
def test_the_judge_finds_nothing(monkeypatch):
    for name, n in {"QUERIES": 9, "FEWEST": 5, "ROUND": 1, "KEYS": 16, "CELL": 8}.items():
        monkeypatch.setattr(tiling, name, n)
    sizes = {"T": (1, 2, 7, 13, 16), "S": (1, 5, 11, 16, 17)}
    report = check(attention, backward=backward, framework="numpy", sizes=sizes, examples=2)
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
        npattn.oracle.api.evaluate(given.replace(mask=mask, k=x), engine="tiled")
        for x in (given.k, k)
    )
    assert (after.residuals[-1].shift[..., 0] != 0).any()
    assert (after.residuals[-1].shift[..., 1:] == 0).all()
    assert np.array_equal(before.out[..., 1:, :], after.out[..., 1:, :])
    one, other = (npattn.backward(fwd, do) for fwd in (before, after))
    assert np.array_equal(one.q[..., 1:, :], other.q[..., 1:, :])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("hides", ["causal", "mask"])
def test_nan_bias_at_hidden_positions_is_inert(hides):
    visible = np.tri(T, dtype=bool)
    options = {"causal": True} if hides == "causal" else {"mask": visible}
    q, k, v, do = (normal(H, T, D, seed=n) for n in range(4))
    plain = Problem(q, k, v, bias=np.zeros((T, T)), **options)
    given = plain.replace(bias=np.where(visible, 0, np.nan))
    want, got = (npattn.oracle.api.evaluate(p, engine="tiled") for p in (plain, given))
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)
    one, other = npattn.backward(want, do), npattn.backward(got, do)
    assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("q", "k", "v"))
    assert np.array_equal(one.bias, other.bias)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("careful", [False, True])
def test_visible_nan_score_makes_a_nan_row(careful):
    q, k, v = (normal(H, T, D, seed=n) for n in range(3))
    visible, bias = np.tri(T, dtype=bool), np.zeros((T, T))
    bias[5, 3] = np.nan
    if careful:
        v[:, -1] = np.inf
    given = Problem(q, k, v, visible, bias=bias)
    want, got = (npattn.oracle.api.evaluate(given, engine=name) for name in ("dense", "tiled"))
    assert np.isnan(want.lse[:, 5]).all()
    assert np.array_equal(np.isnan(got.lse), np.isnan(want.lse))
    assert np.array_equal(np.isnan(got.out[:, :-1]), np.isnan(want.out[:, :-1]))


@pytest.mark.usefixtures("small")
def test_views_of_any_strides_are_read_and_left_alone():
    given = problem()
    odd = given.replace(
        q=np.asfortranarray(given.q),
        k=np.repeat(given.k, 2, -2)[..., ::2, :],
        v=given.v[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
    )
    before = [x.tobytes() for x in (odd.q, odd.k, odd.v)]
    want, got = (npattn.oracle.api.evaluate(p, engine="tiled") for p in (given, odd))
    do = np.asfortranarray(normal(B, H, T, E))
    assert_near(got.out, want.out)
    for name in "qkv":
        assert_near(*(getattr(npattn.backward(f, do), name) for f in (got, want)))
    assert before == [x.tobytes() for x in (odd.q, odd.k, odd.v)]


def assert_near(got, want):
    """BLAS adds in another order for other strides: an error of as many roundings as terms."""
    assert abs(got - want).max() <= (S + T) * H * 2.0**-52 * abs(want).max()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("options", ["plain", "bias of all heads", "causal", "alibi"])
def test_results_have_the_same_bits_with_any_number_of_threads(options, heads):
    given = problem(**OPTIONS[options])
    if heads == 1:
        q, k, v = (normal(1, n, D, seed=n) for n in (T, S, S + 1))
        given = Problem(q, k, v[:, :S], causal=OPTIONS[options].get("causal", False))
    do = normal(*given.lead, heads, T, given.E, seed=3)

    def bits(count):
        with threadpool_limits(count, user_api="blas"):
            fwd = npattn.oracle.api.evaluate(given, engine="tiled")
            grads = npattn.backward(fwd, do)
        return [x.tobytes() for x in (fwd.out, fwd.lse, grads.q, grads.k, grads.v)]

    one, *others = (bits(count) for count in (1, 2, 3, 3, 5))
    assert all(other == one for other in others)


@pytest.mark.parametrize(
    ("heads", "options", "most"),
    [(1, {}, 1 / 4), (3, {"causal": True}, 1 / 6), (1, {"causal": True}, 1 / 4)],
)
def test_few_heads_are_shared_out_by_cost(heads, options, most):
    """Under causal, the first keys are seen by the most queries."""
    n = 4096
    x, zeros = np.zeros((heads, n, 1)), np.zeros((heads, n))
    pull = Pull(Call(Problem(x, x, x, **options)), Saved(x, zeros, zeros), x, None, None)
    seen = np.arange(n, 0, -1) if options else np.full(n, n)
    shares = [seen[lo:hi].sum() / seen.sum() / heads for _, _, lo, hi in pull.items]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) <= most + pull.call.keys / n / heads


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bias", [None, normal(T, S), normal(1, S), normal(T, 1), biases.alibi(1)])
def test_one_head_is_shared_out_by_keys(bias):
    q, k, v = (normal(1, n, D, seed=n) for n in (T, S, S + 1))
    given = Problem(q, k, v[:, :S], bias=bias)
    do, dlse = normal(1, T, D, seed=3), normal(1, T, seed=4)  # without dlse a row of dbias is 0
    with threadpool_limits(3, user_api="blas"):
        fwd = npattn.oracle.api.evaluate(given, engine="tiled")
        grads = npattn.backward(fwd, do, dlse)
    want = npattn.backward(npattn.oracle.api.evaluate(given, engine="dense"), do, dlse)
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
def test_heads_sharing_keys_or_bias_stay_in_one_thread(bias, count):
    """Else two threads would add to the same number of a gradient."""
    call = Call(problem(bias=bias))
    zeros = np.zeros((B, H, T))
    with threadpool_limits(1, user_api="blas"):
        pull = Pull(call, Saved(np.zeros((B, H, T, E)), zeros, zeros),
                           np.zeros((B, H, T, E)), None, None)  # fmt: skip
    assert len(pull.items) == count
    assert sorted(itertools.chain(*(planes for _, planes, *_ in pull.items))) == call.planes
    for _, planes, *_ in pull.items:
        assert len(planes) == B * H // count


@pytest.mark.parametrize(
    ("heads", "n", "sizes"),
    [
        (16, 2048, {1024}),
        (8, 2048, {1024}),
        (8, 1024, {512}),
        (8, 1025, {528, 497}),  # about as many in each, and a multiple of 16
        (8, 512, {256}),
        (8, 3, {3}),
        (1, 257, {144, 113}),
    ],
)
def test_blocks_are_halved_where_there_would_be_few(heads, n, sizes):
    x = np.zeros((heads, n, 1))
    blocks = Call(Problem(x, x, x)).blocks()
    assert {t1 - t0 for _, t0, t1 in blocks} == sizes
    assert sum(t1 - t0 for _, t0, t1 in blocks) == heads * n


def test_few_queries_see_many_keys_at_once():
    """Each part takes its time, however few rows it has."""
    q, k = np.zeros((2, 3, 1)), np.zeros((2, 70_001, 1))
    for options in ({}, {"causal": "bottom_right"}):
        call = Call(Problem(q, k, k, **options))
        assert len(call.parts(*call.blocks()[0])) <= 3


def test_an_error_of_the_users_function_is_raised_here():
    def fail(s, *_):
        raise ZeroDivisionError("mine")

    for count in (1, 3):
        with threadpool_limits(count, user_api="blas"), pytest.raises(ZeroDivisionError):
            npattn.oracle.api.evaluate(problem(score_mod=fail), engine="tiled")
    npattn.oracle.api.evaluate(problem(), engine="tiled")


LARGE = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (3, 2)},
    "one row": {"mask": np.arange(T)[:, None] == np.full(S, T - 2)},
    "bias": {"bias": 1e3 * normal(T, S)},
    "sinks": {"sinks": normal(H)},
    "score_mod": {"score_mod": lambda s, *_: s * 0.5},
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rows", [1, 8])  # blocks of 7, and of 1
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("options", LARGE)
def test_gradients_use_the_weights_of_forward_at_any_size(options, count, rows):
    """Their rounding decides the weights where it exceeds 1, so that it has to be the same.

    With v = I the output is the weights, and dv, and do along dv, are products with them.
    """
    given = {n: x[-rows:] if n in ("mask", "bias") else x for n, x in LARGE[options].items()}
    if "sinks" in given:
        given["sinks"] = given["sinks"][:1]
    v, do, dv = np.eye(S)[None], normal(1, rows, S, seed=3), normal(1, S, S, seed=4)
    # BLAS has another routine for one row; at these widths it adds in another order.
    for dtype, size, width in itertools.product(["float32", "float64"], [1e2, 1e9], [7, 23]):
        q, k = (size * normal(1, n, width, seed=n) for n in (rows, S))
        # The complex step of a score_mod has no digits left to check it with in float32.
        if options == "score_mod" and size > 1e2:
            continue
        arrays = {n: x.astype(dtype) for n, x in {"q": q, "k": k, "v": v, **given}.items()
                  if isinstance(x, np.ndarray) and n != "mask"}  # fmt: skip
        with threadpool_limits(count, user_api="blas"):
            fwd = npattn.oracle.api.evaluate(
                Problem(**{**given, **arrays}, dtype=dtype), engine="tiled"
            )
            grads = npattn.backward(fwd, do.astype(dtype))
            moved, _ = npattn.jvp(fwd, dv=dv.astype(dtype))
        w = fwd.out.astype("float64")
        room = (S + T) * np.finfo(dtype).eps
        assert abs(grads.v - w.mT @ do).max() <= room * (w.mT @ abs(do)).max()
        assert abs(moved - w @ dv).max() <= room * (w @ abs(dv)).max()
        assert all(np.isfinite(x).all() for x in (grads.q, grads.k))


@pytest.mark.usefixtures("small")
def test_calls_inside_a_call_return_from_several_threads():
    """Each call of the user's function makes another, while all threads are in the outer ones."""
    plain = Problem(*(normal(1, n, D, seed=n) for n in (T, S, S)))
    do = normal(1, T, D)

    def call(score_mod):
        fwd = npattn.oracle.api.evaluate(plain.replace(score_mod=score_mod), engine="tiled")
        return fwd.out, npattn.backward(fwd, do).q

    def mod(s, *_):
        inner = npattn.oracle.api.evaluate(plain, engine="tiled")
        assert np.array_equal(inner.out, want)
        return s * 1

    with threadpool_limits(3, user_api="blas"), ThreadPoolExecutor(3) as pool:
        want = npattn.oracle.api.evaluate(plain, engine="tiled").out
        alone = call(lambda s, *_: s * 1)
        found = [pool.submit(call, mod) for _ in range(3)]
        for future in found:
            assert all(map(np.array_equal, future.result(timeout=60), alone))
        assert threads.count() == 3


def test_it_never_holds_all_scores():
    n, heads, size = 2048, 2, 8
    q, k, v = (normal(heads, n, size, seed=i) for i in range(3))
    given, do = Problem(q, k, v, engine="tiled"), normal(heads, n, size)

    def work():
        fwd = npattn.oracle.api.evaluate(given)
        npattn.backward(fwd, do)

    work()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tiles = 8 * 2 * tiling.QUERIES * tiling.KEYS  # s and dp of one thread
    assert peak < 20 * q.nbytes + 2 * tiles < 8 * n * n


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (masks.window(255, 0), lambda n: 256 + tiling.CELL),
        (masks.causal(), lambda n: (n + tiling.CELL) / 2),
        (masks.documents(np.arange(8192) // 512), lambda n: 512),
        (masks.documents(np.arange(8192) // 499), lambda n: 499 + tiling.CELL),
        (masks.lengths(100), lambda n: 100),
        (masks.blocks(np.eye(32, dtype=bool), 256), lambda n: 256),
    ],
)
def test_a_mask_costs_what_it_shows(mask, share):
    n = 8192
    x = np.zeros((1, n, 1))
    call = Call(Problem(x, x, x, mask))
    parts = itertools.chain(*(call.parts(*block) for block in call.blocks()))
    area = sum((t1 - t0) * (s1 - s0) for t0, t1, s0, s1, *_ in parts)
    assert area <= n * share(n) < n * n


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", OPTIONS)
def test_parts_cover_each_visible_score_once(options):
    given = problem(**OPTIONS[options])
    call = Call(given)
    whole = (B, H, T, S)
    visible = np.broadcast_to(True if given.visible is None else given.visible, whole)
    seen = np.zeros(whole, int)
    for plane, t0, t1 in call.blocks():
        for part in call.parts(plane, t0, t1):
            r0, r1, s0, s1, p0, p1 = part
            assert t0 <= r0 < r1 <= t1
            assert s1 - s0 <= (tiling.CELL if part.partial else tiling.KEYS)
            seen[plane][r0:r1, s0:s1] += 1
            own = visible[plane][r0:r1, s0:s1]
            assert part.partial != own.all()
            assert own[: p0 - r0].all()
            assert own[p1 - r0 :].all()
            assert not own[[p0 - r0, p1 - 1 - r0]].all(1).any() or not part.partial
    assert seen.max() == 1
    assert not (visible & (seen == 0)).any()


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize(
    ("left", "right"), [(None, 0), (0, 0), (3, 0), (2, 7), (None, 5), (4, None)]
)
def test_cells_of_a_band_are_trimmed_as_those_of_its_array(left, right, alignment):
    band = masks.window(left, right, alignment=alignment)
    for rows, keys in itertools.product((5, 23, 41), (7, 29, 43)):
        call = Call(Problem(*(np.zeros((1, n, 2)) for n in (rows, keys, keys))))
        array = masks.of(band.to_array(rows, keys))
        for t0, s0 in itertools.product(range(0, rows, 3), range(0, keys, 5)):
            cell = call.tile((0,), t0, min(t0 + 11, rows), s0, min(s0 + 7, keys))
            assert tiling._trim(band, cell) == tiling._trim(array, cell)


BASES = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "sinks": {"sinks": normal(H)},
    "dropout": OPTIONS["dropout"],
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("size", [1, 300])  # 300: exp overflows, and the maximum is subtracted
@pytest.mark.parametrize("options", BASES)
@pytest.mark.parametrize("fast", [False, True])
def test_weights_are_powers_of_two_or_of_e(monkeypatch, fast, options, size):
    monkeypatch.setattr(operations, "_has_fast_exp2", lambda _: fast)
    given = problem(**BASES[options])
    given = given.replace(q=size * given.q)
    assert Call(given).exp is (np.exp2 if fast else np.exp)
    do, dlse, dv = normal(B, H, T, E), normal(B, H, T), normal(B, K, S, E, seed=5)
    runs = [npattn.oracle.api.evaluate(given, engine=name) for name in ("tiled", "dense")]
    assert (runs[0].residuals[-1].shift != 0).any() == (size > 1)
    fwd, exact = runs
    grads = npattn.backward(fwd, do, dlse)
    got = {"o": fwd.out, "lse": fwd.lse} | {
        f"d{n}": x for n in ALL if (x := getattr(grads, n)) is not None
    }
    lines = compare(got, given, dout=do, dlse=dlse)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))
    scores = D * abs(given.q).max() * abs(given.k).max()
    # The rounding of a score is a relative error of its weight; one more scales it.
    room = (D + 4 + S) * 2.0**-52 * scores
    assert abs(fwd.max_score - exact.max_score).max() <= room
    moved, wanted = npattn.jvp(fwd, dv=dv)[0], npattn.jvp(exact, dv=dv)[0]
    assert abs(moved - wanted).max() <= room * abs(dv).max()


@pytest.mark.parametrize("fast", [False, True])
def test_a_huge_sink_is_the_maximum_in_either_unit(monkeypatch, fast):
    monkeypatch.setattr(operations, "_has_fast_exp2", lambda _: fast)
    given = problem(sinks=np.full(H, 5000.0))
    fwd = npattn.oracle.api.evaluate(given, engine="tiled")
    room = 5000 * 2.0**-50  # of a number of this size, rounded on the way to log 2 and back
    assert abs(fwd.lse - 5000).max() <= room
    assert not fwd.out.any()
    grads = npattn.backward(fwd, np.zeros_like(fwd.out), np.ones_like(fwd.lse))
    assert abs(grads.sinks - B * T).max() <= B * T * room


@pytest.mark.parametrize("queries", [1, 3, E, E + 1])  # v has one more column from E + 1 on
@pytest.mark.parametrize("options", ["plain", "causal", "sinks"])
def test_gradients_of_few_queries_agree(options, queries):
    given = problem(**BASES[options])
    given = given.replace(q=given.q[..., :queries, :])
    do, dlse = normal(B, H, queries, E, seed=3), normal(B, H, queries, seed=4)
    grads = npattn.backward(npattn.oracle.api.evaluate(given, engine="tiled"), do, dlse)
    lines = compare({f"d{n}": getattr(grads, n) for n in "qkv"}, given, dout=do, dlse=dlse)
    assert all(line.passed for line in lines), "\n".join(map(str, lines))


def test_powers_of_two_are_for_scores_that_are_a_product():
    scores = np.zeros((T, S))
    for options in ({"bias": scores}, {"softcap": 2.0}, {"score_mod": lambda s, *_: s}):
        assert Call(problem(**options)).exp is np.exp
    assert Call(problem(scale=1.5e308)).exp is np.exp  # log2(e) times it is inf
    assert Call(problem(dtype="longdouble")).exp is np.exp


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "complex128"}]
)
def test_what_it_does_not_compute_is_refused(options):
    with pytest.raises(
        OptionError, match=r'engine "tiled" does not support dtype .*: pass engine="dense"'
    ):
        problem(engine="tiled", **options)
    assert npattn.forward(*(normal(1, 3, 2) for _ in "qkv"), **options).engine == "dense"


def test_auto_takes_it_where_there_are_many_scores():
    few, many = (normal(1, n, 2) for n in (23, 1031))
    assert npattn.forward(few, few, few).engine == "dense"
    assert npattn.forward(many, many, many).engine == "tiled"
    assert npattn.forward(many, many, many, dtype="bfloat16").engine == "dense"
    assert npattn.forward(many, many, many, dtype="complex128").engine == "dense"
    assert npattn.forward(many, many, many, engine="dense").engine == "dense"


@pytest.mark.parametrize(
    ("lead", "sizes", "engine"),
    [
        ((8192,), (1, 1), "dense"),
        ((8192,), (1, 101), "dense"),
        ((2048,), (31, 31), "dense"),
        ((127,), (131, 131), "tiled"),
        ((), (1031, 1031), "tiled"),
        ((), (7, 4099), "dense"),
        ((), (1, 4099), "dense"),
        ((), (1, 100_003), "tiled"),
        ((0,), (1031, 1031), "dense"),
    ],
)
def test_auto_decides_by_scores_and_blocks(lead, sizes, engine):
    """Each block of queries of the tiled engine costs time, however few its scores are."""
    queries, keys = sizes
    q, k = np.zeros((*lead, 8, queries, 2)), np.zeros((8, keys, 2))
    assert tiled.choice(Problem(q, k, k)) == engine


@pytest.mark.parametrize(("keys", "engine"), [(1009, "dense"), (4099, "tiled")])
def test_auto_leaves_the_repeating_of_many_shared_keys_to_the_tiled_engine(keys, engine):
    q, k = np.zeros((8, 1, 2)), np.zeros((2, keys, 2))
    assert tiled.choice(Problem(q, k, k)) == engine
