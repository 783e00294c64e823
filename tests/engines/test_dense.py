"""dense held against four judges that share no code with it.

`loops` on every option and pair of options, complex-step differentiation of forward, mpmath with 50
digits on inputs that are hard, and torch where it means the same. What two of them may differ by is
never typed in: `rounding` derives it from the numbers of the problem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import mpmath  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import npattn
from npattn.engines import dense, loops
from npattn.errors import OptionError

Array = np.ndarray[Any, Any]
Options = dict[str, Any]
Rng = np.random.Generator

INPUTS = ("q", "k", "v", "bias", "sinks")
DTYPES: tuple[Any, ...] = (
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)


# --- what rounding may do -------------------------------------------------------------------------

U = 2.0**-53  # half the distance from 1 to the next float64
LIBM = 8 * U  # relative error of exp, log, tanh: NumPy promises 4 units in the last place
TINY = 2.0**-1020  # absolute error of a weight that underflows


class Rounding(NamedTuple):
    """Bounds of the error of a float64 computation, element by element."""

    out: Array
    lse: Array
    weights: Array
    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None


def rounding(
    problem: npattn.Problem,
    lse: Array,
    weights: Array,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    steepness: float = 1.0,
    constant: Array | bool = False,
) -> Rounding:
    """A first-order bound on |computed − exact|, from the sizes and magnitudes of the problem.

    The textbook's equations, each with the error of its result below it. An operation multiplies
    its result by 1 + δ, |δ| ≤ u; n of them, or a sum of n terms in any order, err by at most
    γ(n) = nu / (1 − nu) times the sum of absolute values (Higham, Accuracy and Stability of
    Numerical Algorithms, ch. 3). The error of a product is Δa |b| + |a| Δb; ΔaΔb, smaller by u,
    is dropped. An error of a score acts through exp: a weight errs relatively by expm1 of it plus
    that of the lse, which is the weighted mean of the errors of the scores.

    Args: lse (natural) and weights are the judge's; what is not finite counts as 0.
    steepness: max(1, |f'|) of a score_mod f, whose |f''| must be ≤ 1. constant: True where a score
    is a constant of the problem, which nobody computes.
    """
    rows = (*problem.lead, problem.H, problem.T)
    S, D, E, G = problem.S, problem.D, problem.E, max(problem.H // max(problem.K, 1), 1)
    c = math.inf if problem.softcap is None else problem.softcap
    q, k, v = (_operand(x, problem) for x in (problem.q, problem.k, problem.v))
    p, lse = _finite(weights).reshape(*rows, S), _finite(lse).reshape(*rows, 1)
    do, dl, dw = (
        np.zeros(shape) if x is None else abs(_finite(x)).reshape(shape)
        for x, shape in ((dout, (*rows, E)), (dlse, lse.shape), (dweights, p.shape))
    )
    bias = 0.0 if problem.bias is None else abs(_finite(problem.bias))
    keep = np.ones((1, 1))
    if problem.dropout_mask is not None:
        keep = problem.dropout_mask / (1 - problem.dropout_rate)

    # x = scale · q·k;  s = f(c · tanh(x / c)) + bias
    x = abs(problem.scale or 0) * (q @ _T(k))
    x_error = gamma(D) * x
    gap = -np.log(np.where(p > 0, p, 1))  # lse − s; nothing follows from a weight of 0
    s = abs(lse) + gap
    s_error = steepness * (x_error + 2 * LIBM * np.minimum(x, c)) + LIBM * (s + bias)
    s_error = np.where((p == 0) | constant, 0, s_error)

    # p = exp(s − m) / Σ exp(s − m), where lse − log(S + 1) ≤ m ≤ lse
    e_error = s_error + U * (gap + math.log(S + 1)) + LIBM
    mean_error = (p * e_error).sum(-1, keepdims=True)
    p_sink = sink_error = np.zeros((1, 1))
    if problem.sinks is not None:
        sink_gap = np.maximum(lse - _finite(problem.sinks)[:, None, None], 0)
        p_sink, sink_error = np.exp(-sink_gap), U * (sink_gap + math.log(S + 1)) + LIBM
        mean_error = mean_error + p_sink * sink_error
    lse_error = (
        mean_error + gamma(S) + LIBM * math.log(S + 2) + 2 * U * (abs(lse) + math.log(S + 1))
    )
    p_error = p * np.expm1(e_error + mean_error + gamma(S)) + TINY
    p_sink_error = p_sink * np.expm1(sink_error + mean_error + gamma(S)) + TINY

    # w = p · keep;  o = w v
    w, w_error = p * keep, (p_error + gamma(0) * p) * keep
    o_error = w_error @ v + gamma(S) * (w @ v)

    # dp = (do vᵀ) · keep + dw;  delta = Σ p dp − dlse;  ds = p (dp − delta)
    dp = (do @ _T(v)) * keep + dw
    dp_error = gamma(E) * dp
    delta = (p * dp).sum(-1, keepdims=True) + dl
    delta_error = (p_error * dp + p * dp_error).sum(-1, keepdims=True) + gamma(S) * delta
    ds = p * (dp + delta)
    ds_error = p_error * (dp + delta) + p * (dp_error + delta_error) + gamma(0) * ds
    ds_sink = p_sink * delta
    ds_sink_error = p_sink_error * delta + p_sink * delta_error + gamma(0) * ds_sink

    # dx = ds · f' · (1 − tanh²), whose subtraction has an absolute error
    f_error = 0.0 if problem.score_mod is None else x_error + 2 * LIBM * (x + steepness)
    tanh_error = 0.0 if problem.softcap is None else 2 * x_error / c + 4 * LIBM
    dx = steepness * ds
    dx_error = steepness * ds_error + ds * (f_error + steepness * tanh_error)

    scale, head = abs(problem.scale or 0), 0 if problem.headless else slice(None)
    return Rounding(
        out=o_error[head],
        lse=lse_error[..., 0][head],
        weights=p_error[head],
        q=_sum_error(scale * (dx_error @ k), scale * (dx @ k), S, problem.q),
        k=_sum_error(scale * (_T(dx_error) @ q), scale * (_T(dx) @ q), problem.T, problem.k, G),
        v=_sum_error(_T(w_error) @ do, _T(w) @ do, problem.T, problem.v, G),
        bias=None if problem.bias is None else _sum_error(ds_error, ds, 1, problem.bias),
        sinks=None
        if problem.sinks is None
        else _sum_error(ds_sink_error, ds_sink, 1, problem.sinks[:, None, None])[:, 0, 0],
    )


def gamma(n: int) -> float:
    """n roundings in a row, and ten more for factors: scale, keep, 1 / ln 2."""
    return (n + 10) * U / (1 - (n + 10) * U)


def _finite(x: Any) -> Array:
    return np.nan_to_num(np.asarray(x).astype(np.float64), nan=0, posinf=0, neginf=0)


def _T(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _operand(x: Array, problem: npattn.Problem) -> Array:
    """|x| as (lead, H, length, size)."""
    x = abs(_finite(x if x.ndim > 2 else x[None]))
    x = np.repeat(x, problem.H // max(x.shape[-3], 1), axis=-3)
    return np.broadcast_to(x, (*problem.lead, *x.shape[-3:]))


def _sum_error(error: Array, size: Array, n: int, like: Array, G: int = 1) -> Array:
    """The error of the sum of n terms, of G heads and of broadcast axes, in the shape of like."""
    shape = error.shape
    error, size = (
        x.reshape(*shape[:-3], shape[-3] // G, G, *shape[-2:]).sum(-3) for x in (error, size)
    )
    extra = error.ndim - like.ndim
    axes = tuple(range(extra)) + tuple(extra + i for i, m in enumerate(like.shape) if m == 1)
    terms = n * G * math.prod(error.shape[i] for i in axes)
    total: Array = (error + gamma(terms) * size).sum(axes, keepdims=True).reshape(like.shape)
    return total


def assert_within(name: str, got: Array | None, want: Array | None, allowed: Array | None) -> None:
    """|got − want| ≤ allowed; not finite in the same places, and −inf where −inf is wanted."""
    if want is None:
        assert got is None, f"{name} is {got}, want None"
        return
    assert got is not None, f"{name} is None, want an array"
    assert got.shape == want.shape, f"{name} has shape {got.shape}, want {want.shape}"
    assert got.dtype == np.float64, f"{name} is {got.dtype}, want float64"
    finite = np.isfinite(want)
    wrong = (np.isfinite(got) != finite) | ((want == -np.inf) != (got == -np.inf))
    assert not wrong.any(), f"{name} is {got[wrong][:3]}, want {want[wrong][:3]}"
    gap = np.zeros(want.shape)
    np.subtract(got, want, out=gap, where=finite)
    excess = abs(gap) - (allowed if allowed is not None else 0)
    assert (excess[finite] <= 0).all(), (
        f"{name} is {got[finite][excess[finite].argmax()]}, "
        f"want {want[finite][excess[finite].argmax()]}, beyond by {excess[finite].max():.2g}"
    )


# --- problems -------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Each of q, k, v has its own leading axes; None is rank 2."""

    leads: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None
    H: int
    K: int
    T: int
    S: int
    D: int
    E: int

    @property
    def whole(self) -> tuple[int, ...]:
        return (*np.broadcast_shapes(*(self.leads or ())), self.H, self.T, self.S)

    def arrays(self, rng: Rng, dtype: Any = np.float64) -> list[Array]:
        ends = ((self.H, self.T, self.D), (self.K, self.S, self.D), (self.K, self.S, self.E))
        if self.leads is None:
            return [rng.standard_normal(end[1:]).astype(dtype) for end in ends]
        shapes = [(*lead, *end) for lead, end in zip(self.leads, ends, strict=True)]
        return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


class Case(NamedTuple):
    q: Array
    k: Array
    v: Array
    options: Options
    steepness: float

    def forward(self, **changes: Any) -> npattn.Forward:
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        return npattn.forward(**{**arrays, **self.options, **changes})


class Cotangents(NamedTuple):
    dout: Array
    dlse: Array | None
    dweights: Array | None


def part(rng: Rng, whole: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of rank ≥ 2 that broadcasts against `whole`."""
    rank = int(rng.integers(2, len(whole) + 1))
    return tuple(1 if rng.random() < 0.25 else n for n in whole[-rank:])


def a_mask(rng: Rng, sizes: Sizes) -> Options:
    return {"mask": rng.random(part(rng, sizes.whole)) < 0.6}


def a_causal(rng: Rng, sizes: Sizes) -> Options:
    return {"causal": str(rng.choice(["bottom_right", "top_left"]))}


def a_window(rng: Rng, sizes: Sizes) -> Options:
    left, right = (None if rng.random() < 0.2 else int(rng.integers(0, 4)) for _ in range(2))
    return {"window": (left, right)}


def a_bias(rng: Rng, sizes: Sizes) -> Options:
    bias = rng.standard_normal(part(rng, sizes.whole))
    return {"bias": np.where(rng.random(bias.shape) < 0.1, -np.inf, bias)}


def a_scale(rng: Rng, sizes: Sizes) -> Options:
    return {"scale": float(rng.choice([-0.7, 0.0, 0.3, 2.0]))}


def a_softcap(rng: Rng, sizes: Sizes) -> Options:
    return {"softcap": float(rng.uniform(0.5, 3))}


def a_score_mod(rng: Rng, sizes: Sizes) -> Options:
    def bend(s: Array, b: Array, h: Array, t: Array, s_index: Array) -> Array:
        return np.sin(s) + 0.5 * s + 0.25 * (t - s_index)  # a quarter of an integer is exact

    def stretch(s: Array, b: Array, h: Array, t: Array, s_index: Array) -> Array:
        return s * (1 - 0.5 * (h % 2)) + 0.5 * b

    return {"score_mod": bend if rng.random() < 0.5 else stretch}


STEEPNESS = 1.5  # of both: |cos(s) + 0.5| and |1 - 0.5 (h % 2)| are at most that


def some_sinks(rng: Rng, sizes: Sizes) -> Options:
    return {"sinks": rng.standard_normal(sizes.H)}


def a_dropout(rng: Rng, sizes: Sizes) -> Options:
    keep = rng.random(part(rng, sizes.whole)) < 0.7
    return {"dropout_mask": keep, "dropout_rate": float(rng.choice([0.0, 0.3]))}


OPTIONS: dict[str, Callable[[Rng, Sizes], Options]] = {
    "mask": a_mask,
    "causal": a_causal,
    "window": a_window,
    "bias": a_bias,
    "scale": a_scale,
    "softcap": a_softcap,
    "score_mod": a_score_mod,
    "sinks": some_sinks,
    "dropout": a_dropout,
}
NAMES = tuple(OPTIONS)
PAIRS = [(), *((n,) for n in NAMES), *itertools.combinations(NAMES, 2), NAMES]
MORE_KEYS = Sizes(((2,), (2,), (2,)), H=6, K=2, T=5, S=7, D=3, E=11)
MORE_QUERIES = Sizes(((2,), (1,), ()), H=3, K=1, T=7, S=5, D=2, E=11)
ONE_HEAD = Sizes(None, H=1, K=1, T=5, S=7, D=3, E=2)


def make(seed: int, sizes: Sizes, names: tuple[str, ...], dtype: Any = np.float64) -> Case:
    """The case that these say; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    options: Options = {}
    q, k, v = sizes.arrays(rng, dtype)
    for name in names:
        options |= OPTIONS[name](rng, sizes)
    for name in ("bias", "sinks"):
        if name in options:
            options[name] = with_dtype(options[name], dtype)
    return Case(q, k, v, options, STEEPNESS if "score_mod" in names else 1.0)


def with_dtype(x: Array, dtype: Any) -> Array:
    """In that dtype, where it has an infinity; else −inf becomes 0 instead of NaN."""
    small = x.astype(dtype)
    return np.where(np.isnan(small.astype(np.float64)), np.zeros((), dtype), small)


def cotangents(fwd: npattn.Forward, seed: int = 1, which: str = "all") -> Cotangents:
    rng = np.random.default_rng(seed)
    shapes = (fwd.out.shape, fwd.lse.shape, fwd.weights.shape)
    do, dl, dw = (np.asarray(rng.standard_normal(shape)) for shape in shapes)
    return Cotangents(do, dl if "l" in which else None, dw if "a" in which else None)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any sizes, 0 and 1 too, broadcasting leading axes, any options."""
    K, G = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n = {name: draw(st.integers(1, 5)) for name in "TSDE"}
    lead = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    nothing = draw(st.sampled_from([*"-------TSDEKB"]))  # one size is 0 now and then
    n |= {nothing: 0} if nothing in n else {}
    T, S, D, E = (n[name] for name in "TSDE")
    K = 0 if nothing == "K" else K
    lead = (0, *lead) if nothing == "B" else lead
    each = tuple(
        tuple(draw(st.sampled_from([1, m])) for m in lead[draw(st.integers(0, len(lead))) :])
        for _ in range(3)
    )
    sizes = Sizes((each[0], each[1], each[2]), K * G, K, T, S, D, E)
    if draw(st.integers(0, 5)) == 5:
        sizes = Sizes(None, 1, 1, T, S, D, E)
    names = tuple(name for name in NAMES if draw(st.booleans()))
    return make(draw(st.integers(0, 2**32)), sizes, names, draw(st.sampled_from(DTYPES)))


# --- against loops --------------------------------------------------------------------------------


def assert_forward_agrees(case: Case, fwd: npattn.Forward) -> None:
    out, lse, weights = loops.forward(fwd.problem)
    allowed = rounding(fwd.problem, lse, weights, steepness=case.steepness)
    for name, want in (("out", out), ("lse", lse), ("weights", weights)):
        # Each of the two keeps within the bound, hence the factor.
        assert_within(name, getattr(fwd, name), want, 2 * getattr(allowed, name))


def assert_backward_agrees(case: Case, fwd: npattn.Forward, d: Cotangents) -> None:
    got, want = npattn.backward(fwd, *d), loops.backward(fwd.problem, *d)
    _, lse, weights = loops.forward(fwd.problem)
    allowed = rounding(fwd.problem, lse, weights, *d, steepness=case.steepness)
    for name in INPUTS:
        bound = getattr(allowed, name)
        assert_within(
            f"d{name}",
            getattr(got, name),
            getattr(want, name),
            None if bound is None else 2 * bound,
        )


@pytest.mark.parametrize("sizes", [MORE_KEYS, MORE_QUERIES, ONE_HEAD], ids=str)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.broad
def test_options_and_pairs_agree_with_loops(names: tuple[str, ...], sizes: Sizes) -> None:
    case = make(len(names), sizes, names)
    fwd = case.forward()
    assert_forward_agrees(case, fwd)
    assert_backward_agrees(case, fwd, cotangents(fwd))


@pytest.mark.thorough
@settings(deadline=None, max_examples=150)
@given(case=cases(), which=st.sampled_from(["o", "l", "a", "all"]))
@pytest.mark.unmeasured
def test_any_problem_gives_what_loops_gives(case: Case, which: str) -> None:
    fwd = case.forward()
    assert_forward_agrees(case, fwd)
    assert_backward_agrees(case, fwd, cotangents(fwd, which=which))


@pytest.mark.parametrize("name", ["K", "T", "S", "D", "E"])
def test_a_size_of_0_gives_what_loops_gives(name: str) -> None:
    changes: dict[str, Any] = {"K": 0, "H": 0} if name == "K" else {name: 0}
    sizes = MORE_KEYS._replace(**changes)
    for sinks in ((), ("sinks", "bias")):
        case = make(3, sizes, sinks)
        fwd = case.forward()
        assert_forward_agrees(case, fwd)
        assert_backward_agrees(case, fwd, cotangents(fwd))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_narrow_inputs_are_taken_exactly(dtype: Any) -> None:
    names = ("mask", "bias", "softcap", "sinks", "dropout")
    case = make(5, MORE_KEYS, names, dtype)
    fwd = case.forward()
    assert fwd.problem.q.dtype == dtype
    assert_forward_agrees(case, fwd)
    assert_backward_agrees(case, fwd, cotangents(fwd))


def test_inputs_of_different_dtypes_go_together() -> None:
    q, k, v = MORE_KEYS.arrays(np.random.default_rng(7))
    case = Case(q.astype(ml_dtypes.bfloat16), k.astype(np.float32), v.astype(np.float16), {}, 1.0)
    fwd = case.forward(sinks=np.ones(6, ml_dtypes.float8_e5m2))
    assert_forward_agrees(case, fwd)
    assert_backward_agrees(case, fwd, cotangents(fwd))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_rounds_operands_of_products_only(dtype: str) -> None:
    """To the last bit, for one rounding more or less changes a few of hundreds of numbers."""

    def low(x: Array) -> Array:
        return x.astype(dtype).astype(np.float32)

    rng = np.random.default_rng(0)
    shapes = {"q": (7, 5), "k": (11, 5), "v": (11, 13), "dout": (7, 13)}
    given = {name: rng.standard_normal((2, 3, *shape)) for name, shape in shapes.items()}
    dout = given.pop("dout")
    keep = rng.random((7, 11)) < 0.7
    fwd = npattn.forward(**given, dropout_mask=keep, dropout_rate=0.5, dtype=dtype)
    grads = npattn.backward(fwd, dout)

    q, k, v, do = (low(x) for x in (*given.values(), dout))
    z, scale = keep.astype(np.float32) / 0.5, 5**-0.5
    e = scale * (q @ _T(k))
    e = np.exp(e - e.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    w = low(p * z)
    g = (do @ _T(v)) * z
    for _ in range(2):  # the mean is taken twice
        g = g - (p * g).sum(-1, keepdims=True)
    ds = low(p * g)
    want = {"q": scale * (ds @ k), "k": scale * (_T(ds) @ q), "v": _T(w) @ do}
    np.testing.assert_array_equal(fwd.weights, p)
    np.testing.assert_array_equal(fwd.out, (w @ v).astype(dtype))
    for name, x in want.items():
        np.testing.assert_array_equal(getattr(grads, name), x.astype(dtype), err_msg=name)


# --- what is not finite  [10] ---------------------------------------------------------------------

HIDING: dict[str, Options] = {
    "mask": {"mask": (np.arange(7) != 6)[None, :]},
    "causal": {"causal": "top_left"},
    "window": {"window": (None, 0)},
}


@pytest.mark.parametrize("names", [(), ("softcap",), ("score_mod",), ("sinks", "dropout")], ids=str)
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.broad
def test_garbage_behind_a_mask_stays_hidden(
    garbage: float, hiding: str, names: tuple[str, ...]
) -> None:
    case = make(11, MORE_KEYS, names)
    case.k[:, :, 6], case.v[:, :, 6] = garbage, garbage
    fwd = case.forward(**HIDING[hiding])
    assert_forward_agrees(case, fwd)
    if not (hiding == "window" and np.isinf(garbage)):  # its last query sees an infinite key
        assert_backward_agrees(case, fwd, cotangents(fwd))
    assert np.isfinite(fwd.out[..., :4, :]).all()


@pytest.mark.parametrize("names", [(), ("sinks",), ("bias", "dropout")], ids=str)
@pytest.mark.parametrize("hiding", HIDING)
def test_finite_garbage_behind_a_mask_changes_no_bit(hiding: str, names: tuple[str, ...]) -> None:
    before, after = bits_beside_garbage(hiding, names)
    for name in before:
        assert np.array_equal(before[name], after[name]), name


@pytest.mark.parametrize("hiding", ["causal", "window"])
def test_centring_values_by_hidden_keys_is_detected(
    hiding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def centre(w: Array, x: Array, live: Array) -> Array:
        mean = x.mean(-2, keepdims=True)
        return np.asarray(w @ (x - mean) + w.sum(-1, keepdims=True) * mean)

    monkeypatch.setattr(dense, "sum_live", centre)
    before, after = bits_beside_garbage(hiding, ())
    assert not np.array_equal(before["out"], after["out"])


def bits_beside_garbage(
    hiding: str, names: tuple[str, ...]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Every result of rows that do not see key 6, with and without large numbers there."""
    case = make(89, MORE_KEYS, names)
    results = []
    for size in (1, 1e30):
        case.k[:, :, 6] *= size
        case.v[:, :, 6] *= -size
        fwd = case.forward(**HIDING[hiding])
        visible = np.asarray(fwd.problem.visible)
        sees = np.broadcast_to(visible, fwd.weights.shape)[..., 6]
        do, dl, dw = (np.asarray(x) for x in cotangents(fwd))
        do, dw = (np.where(sees[..., None], 0, x) for x in (do, dw))
        grads = npattn.backward(fwd, do, np.where(sees, 0, dl), dw)
        rows = {n: getattr(fwd, n)[~sees] for n in ("out", "lse", "weights")}
        found = {n: getattr(grads, n) for n in INPUTS if getattr(grads, n) is not None}
        results.append(rows | found)
    return results[0], results[1]


@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_spreads_to_rows_that_see_it_only(which: str) -> None:
    case = make(13, MORE_KEYS, ("dropout",))
    getattr(case, which)[0, 1, 4] = np.nan  # queries 2, 3 and 4 see key 4; heads 3 to 5 share it
    fwd = case.forward(causal="bottom_right")
    assert_forward_agrees(case, fwd)
    seeing = np.zeros(fwd.lse.shape, bool)
    seeing[0, 3:, 2:] = True
    assert (np.isnan(fwd.out) == seeing[..., None]).all()
    assert_backward_agrees(case, fwd, cotangents(fwd))


def test_nan_query_leaves_gradients_of_hidden_keys_alone() -> None:
    case = make(17, MORE_KEYS, ("sinks",))
    case.q[1, 2, 0] = np.nan  # sees keys 0, 1 and 2 of head 2 // 3
    fwd = case.forward(causal="bottom_right")
    grads = npattn.backward(fwd, np.ones_like(fwd.out))
    reached = np.zeros((2, 2, 7, 1), bool)
    reached[1, 0, :3] = True
    assert (np.isnan(grads.k) == reached).all()
    assert (np.isnan(grads.v) == reached).all()
    assert_forward_agrees(case, fwd)
    assert_backward_agrees(case, fwd, cotangents(fwd))


def test_a_nan_query_that_sees_nothing_changes_nothing() -> None:
    case = make(19, MORE_QUERIES, ("bias",))
    case.q[:, :, 0] = np.nan
    fwd = case.forward(causal="bottom_right")  # T - S = 2 queries see no key
    grads = npattn.backward(fwd, np.ones_like(fwd.out))
    assert (fwd.out[..., 0, :] == 0).all()
    assert (fwd.lse[..., 0] == -np.inf).all()
    for name in ("q", "k", "v", "bias"):
        assert np.isfinite(getattr(grads, name)).all(), name


# --- against complex-step differentiation ---------------------------------------------------------

STEP = 1e-200  # its square is 0 beside any float, so that the imaginary part is the derivative


def slope_along(case: Case, d: Cotangents, name: str, direction: Array) -> float:
    """The derivative of the loss by one input along a direction, from forward alone."""
    at = case.options[name] if name in case.options else getattr(case, name)
    fwd = case.forward(**{name: at + 1j * STEP * direction})
    loss = (d.dout * fwd.out).sum()
    if d.dlse is not None:  # −inf has no slope, and complex −inf · 0 is NaN
        loss += (d.dlse * np.where(fwd.lse.real == -np.inf, 0, fwd.lse)).sum()
    if d.dweights is not None:
        loss += (d.dweights * fwd.weights).sum()
    return float(loss.imag) / STEP


def assert_slopes_agree(case: Case, seed: int, *, each: bool = False) -> None:
    """Forward differentiated by complex step, and backward: along one direction, or each axis."""
    fwd = case.forward()
    d = cotangents(fwd, seed)
    grads = npattn.backward(fwd, *d)
    allowed = rounding(fwd.problem, fwd.lse, fwd.weights, *d, steepness=case.steepness)
    rng = np.random.default_rng(seed)
    for name in INPUTS:
        gradient, bound = getattr(grads, name), getattr(allowed, name)
        if gradient is None:
            continue
        directions = [rng.standard_normal(gradient.shape)]
        if each:
            directions = list(np.eye(gradient.size).reshape(-1, *gradient.shape))
        for direction in directions:
            slope = slope_along(case, d, name, direction)
            # Forward mode adds the same products as reverse mode in another order, hence 2; then
            # the inner product of this test rounds.
            limit = 2 * (bound * abs(direction)).sum()
            limit += gamma(gradient.size) * abs(gradient * direction).sum()
            gap = abs(slope - (gradient * direction).sum())
            assert gap <= limit, f"d{name}: {gap:.2g} > {limit:.2g} at {direction}"


@pytest.mark.parametrize("sizes", [MORE_KEYS, MORE_QUERIES], ids=str)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_gradients_are_the_slopes_of_forward(names: tuple[str, ...], sizes: Sizes) -> None:
    assert_slopes_agree(make(23, sizes, names), 29)


@pytest.mark.parametrize("names", [(), NAMES, ("softcap", "sinks", "dropout")], ids="-".join)
def test_every_gradient_element_is_a_slope_of_forward(names: tuple[str, ...]) -> None:
    sizes = Sizes(((), (2,), (1,)), H=2, K=1, T=3, S=5, D=2, E=1)
    assert_slopes_agree(make(31, sizes, names), 37, each=True)


@pytest.mark.parametrize("sizes", [MORE_KEYS, MORE_QUERIES, ONE_HEAD], ids=str)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_jvp_is_the_adjoint_of_backward(names: tuple[str, ...], sizes: Sizes) -> None:
    case = make(41, sizes, names)
    fwd = case.forward()
    d = cotangents(fwd, 43, which="l")
    grads = npattn.backward(fwd, *d)
    allowed = rounding(fwd.problem, fwd.lse, fwd.weights, *d, steepness=case.steepness)
    rng = np.random.default_rng(47)
    present = [name for name in INPUTS if getattr(grads, name) is not None]
    along = {f"d{n}": rng.standard_normal(getattr(grads, n).shape) for n in present}
    if sizes is MORE_QUERIES:  # a direction in which leading axes broadcast too
        along["dv"] = along["dv"].copy()
    do, dlse = npattn.jvp(fwd, **along)
    assert d.dlse is not None
    forward_mode = (d.dout * do).sum() + (d.dlse * dlse).sum()
    products = {n: getattr(grads, n) * along[f"d{n}"] for n in present}
    limit = sum(2 * (getattr(allowed, n) * abs(along[f"d{n}"])).sum() for n in present)
    limit += sum(gamma(x.size) * abs(x).sum() for x in products.values())
    assert abs(forward_mode - sum(x.sum() for x in products.values())) <= limit


# --- against 50 digits ----------------------------------------------------------------------------


class Exact(NamedTuple):
    out: Array
    lse: Array
    weights: Array
    q: Array
    k: Array
    v: Array
    bias: Array
    sinks: Array


def exactly(case: Case, d: Cotangents) -> Exact:
    """One head, in mpmath: mask, bias, sinks and softcap; rounded to float64 at the very end."""
    q, k, v, mask, bias = (
        np.asarray(x, dtype=object)
        for x in (case.q, case.k, case.v, case.options["mask"], case.options["bias"])
    )
    q, k, v, bias = (np.vectorize(mpmath.mpf, otypes=[object])(x) for x in (q, k, v, bias))
    sink, scale, c = (
        mpmath.mpf(float(np.ravel(case.options[name])[0])) for name in ("sinks", "scale", "softcap")
    )
    do, dl, dw = (np.vectorize(mpmath.mpf, otypes=[object])(x) for x in d)
    (T, D), S = q.shape, len(k)
    p, ds, dx = (np.full((T, S), mpmath.mpf(0), object) for _ in range(3))
    lse, dsink = np.full(T, mpmath.mpf(0), object), mpmath.mpf(0)
    for t, s in itertools.product(range(T), range(S)):
        raw = scale * mpmath.fsum(q[t, i] * k[s, i] for i in range(D)) / c
        p[t, s] = mpmath.exp(c * mpmath.tanh(raw) + bias[t, s]) if mask[t, s] else mpmath.mpf(0)
        dx[t, s] = scale * mpmath.sech(raw) ** 2
    for t in range(T):
        total = mpmath.fsum(p[t]) + mpmath.exp(sink)
        lse[t], p[t] = (mpmath.log(total), p[t] / total) if total else (mpmath.mpf("-inf"), p[t])
        dp = do[t] @ v.T + dw[t]
        delta = mpmath.fsum(p[t] * dp) - dl[t]
        ds[t] = p[t] * (dp - delta)
        dsink -= mpmath.exp(sink - lse[t]) * delta if total and sink > -mpmath.inf else 0
    dx = dx * ds
    results = (p @ v, lse, p, dx @ k, dx.T @ q, p.T @ do, ds, np.array([dsink], dtype=object))
    return Exact(*(np.vectorize(float, otypes=[float])(x) for x in results))


def hard(seed: int, *, logits: float, offset: float, softcap: float, sink: float) -> Case:
    """T = 3 queries, the second of which sees nothing, and S = 5 keys."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, 2)), rng.standard_normal((5, 2)), rng.standard_normal((5, 7))
    mask = rng.random((3, 5)) < 0.8
    mask[0, 0], mask[1], mask[2, 4] = True, False, True
    options = {
        "mask": mask,
        "bias": offset + rng.standard_normal((3, 5)),
        "scale": logits,
        "softcap": softcap,
        "sinks": np.array([sink], float),
    }
    return Case(q, k, v, options, 1.0)


HARD: dict[str, dict[str, float]] = {
    "easy": {"logits": 1, "offset": 0, "softcap": 5, "sink": 1},
    "logits of 1e4": {"logits": 1e4, "offset": 0, "softcap": 1e6, "sink": 0},
    "a common offset of -1e9": {"logits": 1, "offset": -1e9, "softcap": 5, "sink": -1e9},
    "no weight but the sink's": {"logits": 1, "offset": -1e9, "softcap": 5, "sink": 0},
    "a saturated softcap": {"logits": 20, "offset": 0, "softcap": 2, "sink": 0},
    "a softcap saturated to the last bit": {"logits": 1e4, "offset": 0, "softcap": 3, "sink": 0},
    "a large sink": {"logits": 1, "offset": 0, "softcap": 5, "sink": 300},
    "a larger sink": {"logits": 1, "offset": 0, "softcap": 5, "sink": 1e5},
    "a sink of no weight": {"logits": 1, "offset": 0, "softcap": 5, "sink": -1e5},
    "no sink": {"logits": 10, "offset": 0, "softcap": 100, "sink": -np.inf},
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("hardship", HARD)
def test_hard_inputs_give_what_50_digits_give(hardship: str, seed: int) -> None:
    case = hard(seed, **HARD[hardship])
    fwd = case.forward()
    d = cotangents(fwd, 53)
    with mpmath.workdps(50):
        exact = exactly(case, d)
    allowed = rounding(fwd.problem, exact.lse, exact.weights, *d)
    grads = npattn.backward(fwd, *d)
    for name in ("out", "lse", "weights"):
        assert_within(name, getattr(fwd, name), getattr(exact, name), getattr(allowed, name))
    for name in INPUTS:
        bound = getattr(allowed, name)
        assert_within(f"d{name}", getattr(grads, name), getattr(exact, name), bound)


def test_bound_is_narrow_enough_to_fail() -> None:
    case = hard(1, **HARD["easy"])
    fwd = case.forward()
    d = cotangents(fwd, 59)
    allowed = rounding(fwd.problem, fwd.lse, fwd.weights, *d)
    for name in ("out", "lse", "weights"):
        assert getattr(allowed, name).max() < 1e-13
    for name in INPUTS:
        assert getattr(allowed, name).max() < 1e-12


# --- where a mean cancels -------------------------------------------------------------------------


def one_hot(seed: int, lead: float) -> Case:
    """Two rows in which one key leads by about `lead`, and one that sees nothing."""
    case = hard(seed, logits=1, offset=0, softcap=1e6, sink=-np.inf)
    bias = case.options["bias"].copy()
    bias[0, 0] += lead
    bias[2, 4] += lead
    return case._replace(options={**case.options, "bias": bias})


def pairwise(p: Array, x: Array) -> Array:
    """Σ_i p_i |x_j − x_i|, which is at least |x_j − Σ p x|, and as small where one p_j is 1."""
    gaps: Array = (p[..., None, :] * abs(x[..., :, None] - x[..., None, :])).sum(-1)
    return gaps


def less_mean_bound(p: Array, p_error: Array, x: Array, e: Array, size: Array) -> Array:
    """A bound on the error of p (x − Σ p x) whose mean was taken twice; e ≥ |error of x|.

    A constant added to x is gone after the first pass but for what that pass has lost, at most
    `lost`, which the second sees as any other x and rounds again: the product of two errors. So
    everything else is relative to the distances in the row, and not to x. The errors of x meet in
    e_j − Σ p e, at most the sum over i ≠ j of p_i (e_i + e_j).
    """
    S = x.shape[-1]
    apart = pairwise(p, x)
    others = p @ (1 - np.eye(S)) * e + (p * e) @ (1 - np.eye(S))
    lost = ((p_error + gamma(S) * p) * size).sum(-1, keepdims=True)
    mean_error = ((p_error + gamma(S) * p) * apart).sum(-1, keepdims=True)
    mean_error = mean_error + 2 * (p_error + gamma(S) * p).sum(-1, keepdims=True) * lost
    bound: Array = p_error * apart + p * (others + mean_error + gamma(0) * apart)
    return bound


def assert_gradients_keep_the_bound_of_two_passes(case: Case) -> None:
    fwd = case.forward()
    do, _, dw = cotangents(fwd, 79)
    assert dw is not None
    d = Cotangents(do, np.zeros_like(fwd.lse), dw)  # dlse would be added to what is small
    with mpmath.workdps(70):
        exact = exactly(case, d)
    p, p_error = exact.weights, rounding(fwd.problem, exact.lse, exact.weights).weights
    x = do @ case.v.T + dw
    size = abs(do) @ abs(case.v.T) + abs(dw)
    e = gamma(case.v.shape[-1]) * size
    ds, ds_error = abs(exact.bias), less_mean_bound(p, p_error, x, e, size)
    # Then scale, the slope 1 − tanh² of a softcap that is all but none, and sums.
    dx_error = (ds_error + gamma(len(case.k)) * ds) * case.options["scale"]
    grads = npattn.backward(fwd, *d)
    assert_within("dbias", grads.bias, exact.bias, ds_error)
    assert_within("dq", grads.q, exact.q, dx_error @ abs(case.k))
    assert_within("dk", grads.k, exact.k, dx_error.T @ abs(case.q))


def assert_jvp_keeps_the_bound_of_two_passes(case: Case) -> None:
    fwd = case.forward()
    bump = np.asarray(np.random.default_rng(83).standard_normal(fwd.weights.shape))
    got, _ = npattn.jvp(fwd, dbias=bump)
    S, E = case.v.shape
    for column in range(E):  # of do: the gradient of that column of o by the bias, along bump
        d = Cotangents(np.zeros_like(fwd.out), np.zeros_like(fwd.lse), np.zeros_like(bump))
        d.dout[:, column] = 1
        with mpmath.workdps(70):
            exact = exactly(case, d)
        p, p_error = exact.weights, rounding(fwd.problem, exact.lse, exact.weights).weights
        dp = p * pairwise(p, bump)
        dp_error = less_mean_bound(p, p_error, bump, np.zeros_like(p), abs(bump)) + gamma(S) * dp
        allowed = dp_error @ abs(case.v[:, column]) + gamma(S) * abs(exact.bias * bump).sum(-1)
        assert_within("do", got[:, column], (exact.bias * bump).sum(-1), allowed)


LEADS = [11.0, 31.0, 47.0]  # the other weights add up to about 1e-5, 1e-14, 1e-20


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("lead", LEADS)
def test_small_gradients_beside_a_weight_near_1_are_exact(lead: float, seed: int) -> None:
    assert_gradients_keep_the_bound_of_two_passes(one_hot(seed, lead))
    assert_jvp_keeps_the_bound_of_two_passes(one_hot(seed, lead))


@pytest.mark.parametrize(
    "check",
    [assert_gradients_keep_the_bound_of_two_passes, assert_jvp_keeps_the_bound_of_two_passes],
)
@pytest.mark.parametrize("lead", LEADS)
def test_taking_the_mean_once_is_seen(
    lead: float, check: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(x: Array, x_sink: Any, p: Array, p_sink: Array | None) -> tuple[Array, Array]:
        mean = (p * x).sum(-1, keepdims=True) + (0 if p_sink is None else p_sink * x_sink)
        return x - mean, x_sink - mean

    monkeypatch.setattr(dense, "subtract_mean", once)
    with pytest.raises(AssertionError, match="beyond by"):
        check(one_hot(1, lead))
    # Not by the bound of one pass, which is relative to the size of dp.
    case = one_hot(1, lead)
    assert_backward_agrees(case, case.forward(), cotangents(case.forward()))


# --- manners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [MORE_KEYS, MORE_QUERIES, ONE_HEAD], ids=str)
def test_nothing_that_is_passed_is_written_to(sizes: Sizes) -> None:
    case = make(67, sizes, NAMES)
    given = [
        case.q,
        case.k,
        case.v,
        *(x for x in case.options.values() if isinstance(x, np.ndarray)),
    ]
    before = [x.copy() for x in given]
    fwd = case.forward()
    d = cotangents(fwd, 71)
    given += [x for x in d if x is not None]
    before += [x.copy() for x in d if x is not None]
    for array in given:
        array.flags.writeable = False  # writing would raise, were it only to restore it
    grads = npattn.backward(case.forward(), *d)
    npattn.jvp(fwd, dq=grads.q, dk=grads.k, dv=grads.v, dbias=grads.bias, dsinks=grads.sinks)
    assert all((x == y).all() for x, y in zip(given, before, strict=True))


@pytest.mark.parametrize(
    "score_mod",
    [lambda s, b, h, t, i: np.abs(s), lambda s, b, h, t, i: s.real * 2.0],
    ids=["abs", "real"],
)
def test_score_mod_that_is_not_analytic_is_refused(score_mod: Any) -> None:
    fwd = make(73, MORE_KEYS, ()).forward(score_mod=score_mod)
    with pytest.raises(OptionError, match="analytic"):
        npattn.backward(fwd, np.ones_like(fwd.out))


@pytest.mark.parametrize("function", [np.logaddexp, np.arctan2])
def test_score_mod_that_takes_no_complex_numbers_is_refused(function: Any) -> None:
    fwd = make(73, MORE_KEYS, ()).forward(score_mod=lambda s, *_: function(s, 1.0))
    with pytest.raises(OptionError, match=r"has no derivative at complex scores.*must be analytic"):
        npattn.backward(fwd, np.ones_like(fwd.out))


def test_score_mod_may_return_integers_and_booleans() -> None:
    case = make(73, MORE_KEYS, ())
    results = [
        case.forward(score_mod=lambda s, *_, t=t: (s.real > 0.25).astype(t))
        for t in (np.float64, np.int64, np.bool_)
    ]
    for fwd in results[1:]:
        assert np.array_equal(fwd.out, results[0].out)
        assert not npattn.backward(fwd, np.ones_like(fwd.out)).q.any()


def test_score_mod_that_returns_nothing_is_refused() -> None:
    message = "score_mod returned an array of dtype object, must return numbers"
    with pytest.raises(OptionError, match=message):
        make(73, MORE_KEYS, ()).forward(score_mod=lambda s, *_: None)
