"""double_backward and hvp, held against the definition in 60 digits, torch and each other.

The tolerance: the formulas of docs/derivations/second_order.md evaluated in absolute values, times
a count of roundings (`bounds`).
"""

from __future__ import annotations

import inspect
import math
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn.oracle.api
from npattn import Conventions, biases
from npattn.biases.distances import Alibi
from npattn.engines import backward_twice, dense, score_mod
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.oracle import second_order
from npattn.problem import Problem

U = 2.0**-53
INPUTS = ("q", "k", "v", "bias", "sinks")
COTANGENTS = ("dout", "dlse", "dweights")
SIZES = {  # B, H, K, T, S, D, E
    "tiny": (None, 2, 1, 2, 3, 2, 1),
    "primes": (2, 6, 3, 5, 7, 11, 13),
    "headless": None,
}


def smooth(s, b, h, t, i):
    """A score_mod that bends, of arrays and of mpmath numbers (`sin` is NumPy's or mpmath's)."""
    sin = mpmath.sin if isinstance(s, mpmath.mpf) else np.sin
    return s + 0.5 * sin(s + 0.25 * (t - i))


class Case(NamedTuple):
    problem: Problem
    cotangents: dict[str, Any]
    directions: dict[str, Any]

    @property
    def fwd(self):
        return npattn.oracle.api.evaluate(self.problem, engine="dense")

    def double_backward(self, module=second_order):
        along = {f"dd{n}": x for n, x in self.directions.items()}
        return module.double_backward(self.fwd, **self.cotangents, **along)

    def hvp(self, fwd=None, **other):
        along = {f"d{n}": x for n, x in (self.directions | other).items()}
        return npattn.hvp(fwd or self.fwd, **self.cotangents, **along)


def make(options, size="primes", seed=0, dtype=np.float64):
    """A problem with `options` by name, cotangents of all results, directions of all inputs."""
    rng = np.random.default_rng(seed)
    if size == "headless":
        H, T, S = 1, 5, 7
        shapes = {"q": (5, 11), "k": (7, 11), "v": (7, 13)}
    else:
        B, H, K, T, S, D, E = SIZES[size]
        lead = () if B is None else (B,)
        shapes = {"q": (*lead, H, T, D), "k": (*lead, K, S, D), "v": (K, S, E)}
    words = {
        "scale": {"scale": -0.75},
        "softcap": {"softcap": 1.5},
        "bias": {"bias": rng.standard_normal((T, S))},
        "sinks": {"sinks": rng.standard_normal(H)},
        "mask": {"mask": rng.random((H, T, S)) < 0.6},
        "causal": {"causal": "top_left"},
        "window": {"window": (1, 1)},
        "dropout": {"dropout_mask": rng.random((H, T, S)) < 0.7, "dropout_rate": 0.25},
        "score_mod": {"score_mod": smooth},
        "bias of -inf": {"bias": np.where(rng.random((T, S)) < 0.4, -np.inf, 0.5)},
    }
    merged = {name: x for option in options for name, x in words[option].items()}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    problem = Problem(**arrays, **merged)
    fwd = npattn.oracle.api.evaluate(problem, engine="dense")
    like = {"dout": fwd.out, "dlse": fwd.lse, "dweights": fwd.weights}
    cotangents = {name: rng.standard_normal(x.shape) for name, x in like.items()}
    present = [name for name in INPUTS if getattr(problem, name) is not None]
    directions = {n: rng.standard_normal(getattr(problem, n).shape) for n in present}
    return Case(problem, cotangents, directions)


# --- the bound ------------------------------------------------------------------------------------


def bounds(case: Case) -> dict[str, Any]:
    """Bounds of the errors of all results: what each is made of, in absolute values, times n.

    n counts roundings: those of the two dot products of length D and E, of sums over S and over T
    and the heads, and of a weight (with those of its score, which exp makes relative ones), of
    which a term has four factors at most. Slopes of softcap and `smooth` are below 1.5, and the
    slopes of these slopes below 1.5 / min(1, softcap), which also bounds how their errors grow.
    """
    problem, d = case.problem, case.cotangents
    residuals = case.fwd.residuals[-1]
    q, k, v, p = (abs(getattr(residuals, n)) for n in ("q", "k", "v", "p"))
    p_sink = 0 if residuals.p_sink is None else residuals.p_sink
    keep = 1 if residuals.keep is None else residuals.keep
    bends = problem.softcap is not None or problem.score_mod is not None
    first, second = 1.5, 1.5 / min(1, problem.softcap or 1) if bends else 0.0
    head = (lambda x: x[None]) if problem.headless else (lambda x: x)
    do, dl, dw = (abs(head(d[n])) for n in COTANGENTS)
    dd = {n: abs(x) for n, x in case.directions.items()}
    ddq, ddk, ddv = (head(dd[n]) for n in "qkv")
    ddk, ddv = (dense.repeat_heads(x, problem) for x in (ddk, ddv))
    T, S = problem.T, problem.S

    def spread(x, x_sink=0.0):
        return x + (p * x).sum(-1, keepdims=True) + p_sink * x_sink

    g = spread(do @ v.swapaxes(-1, -2) * keep + dw) + dl[..., None]
    g_sink = (g * p).sum(-1, keepdims=True) + dl[..., None]
    ds = p * g
    x = abs(problem.scale) * q @ k.swapaxes(-1, -2)
    turn_x = abs(problem.scale) * (ddq @ k.swapaxes(-1, -2) + q @ ddk.swapaxes(-1, -2))
    turn = np.where(residuals.live, turn_x * first + dd.get("bias", 0), 0)
    turn_sink = dd["sinks"][:, None, None] if "sinks" in dd else 0.0
    h = spread(turn, turn_sink)
    h_sink = (p * turn).sum(-1, keepdims=True) + 2 * turn_sink
    of_p = g * h + keep * (do @ ddv.swapaxes(-1, -2))
    of_s = p * spread(of_p, g_sink * h_sink)
    of_sink = p_sink * (g_sink * h_sink + (p * of_p).sum(-1, keepdims=True))
    dx, of_x = ds * first, of_s * first + ds * turn_x * second
    change, w = p * h, p * keep
    scale = abs(problem.scale)
    bias = (
        np.where(np.isfinite(problem.bias_array), abs(problem.bias_array), 0)
        if (problem.bias is not None)
        else 0.0
    )
    size = (x * first + bias).max() + 2 * (problem.softcap or 0) + S + T  # of a score, at most
    sink = abs(problem.sinks).max() if problem.sinks is not None else 0
    score = (problem.D + 8) * first**2 * max(1, second) * (size + sink)
    n = 4 * (2 * score + S + 8) + 2 * (problem.D + problem.E + S) + T + 40
    n += (problem.H // problem.K) * math.prod(problem.lead)
    T_ = lambda y: y.swapaxes(-1, -2)  # noqa: E731  a transpose
    found = {
        "q": scale * (of_x @ k + dx @ ddk),
        "k": scale * (T_(of_x) @ q + T_(dx) @ ddq),
        "v": T_(change * keep) @ do,
        "bias": of_s,
        "sinks": of_sink + np.zeros_like(p[..., :1]),
        "dout": (change * keep) @ v + w @ ddv,
        "dlse": ((p * turn).sum(-1, keepdims=True) + p_sink * turn_sink)[..., 0],
        "dweights": change,
    }
    shapes = {name: getattr(problem, name) for name in INPUTS}
    for name in "kv":
        shape = shapes[name].shape
        found[name] = dense.sum_shared(found[name], problem.K, shape)
    found["q"] = dense.sum_to(found["q"], shapes["q"].shape)
    if problem.bias is not None:
        found["bias"] = problem.bias_gradient(found["bias"])
    found["sinks"] = found["sinks"].sum((*range(found["sinks"].ndim - 3), -1, -2))
    for name in COTANGENTS:
        found[name] = found[name][0] if problem.headless else found[name]
    return {name: n * U * x for name, x in found.items()}


def assert_within(name, got, want, allowed):
    assert got.shape == want.shape == allowed.shape, name
    gap = abs(got - want)
    at = np.unravel_index(np.argmax(gap - allowed), gap.shape) if gap.size else ()
    assert (gap <= allowed).all(), f"{name}{list(map(int, at))}: {got[at]} is not {want[at]}"


# --- the definition -------------------------------------------------------------------------------


def loss(problem, arrays):
    """Σ dout·out + Σ dlse·lse + Σ dweights·weights in loops of mpmath; (H, T, D) and so on."""
    q, k, v = (arrays[n] for n in "qkv")
    H, T, D = q.shape
    K, S, E = v.shape
    visible = np.broadcast_to(True if problem.visible is None else problem.visible, (H, T, S))
    keep = dense.dropout_factor(problem)
    keep = np.broadcast_to(1.0 if keep is None else keep, (H, T, S))
    bias = arrays.get("bias")
    total = mpmath.mpf(0)
    for h in range(H):
        for t in range(T):
            e = {}
            for j in range(S):
                kv = h // (H // K)
                s = problem.scale * mpmath.fsum(q[h, t, i] * k[kv, j, i] for i in range(D))
                if problem.softcap is not None:
                    s = problem.softcap * mpmath.tanh(s / problem.softcap)
                if problem.score_mod is not None:
                    s = problem.score_mod(s, 0, h, t, j)
                if bias is not None:
                    s += bias[t, j]
                if visible[h, t, j] and s != -mpmath.inf:
                    e[j] = mpmath.exp(s)
            sink = mpmath.exp(arrays["sinks"][h]) if "sinks" in arrays else 0
            mass = mpmath.fsum(e.values()) + sink
            if mass == 0:
                continue
            total += arrays["dlse"][h, t] * mpmath.log(mass)
            for j, x in e.items():
                total += arrays["dweights"][h, t, j] * x / mass
                do_v = mpmath.fsum(arrays["dout"][h, t, i] * v[kv, j, i] for i in range(E))
                total += keep[h, t, j] * x / mass * do_v
    return total


def by_definition(case: Case) -> dict[str, Any]:
    """∂/∂x of the change of the loss along the directions, by mixed differences in 60 digits."""
    problem = case.problem
    inputs = {n: getattr(problem, n) for n in INPUTS if getattr(problem, n) is not None}
    inputs |= case.cotangents
    h = mpmath.mpf(10) ** -15
    as_mp = np.vectorize(mpmath.mpf, otypes=[object])
    arrays = {n: as_mp(x) for n, x in inputs.items()}
    ahead, behind = (
        arrays | {n: arrays[n] + sign * h * as_mp(d) for n, d in case.directions.items()}
        for sign in (1, -1)
    )
    results = {}
    for name in arrays:
        results[name] = np.zeros(arrays[name].shape)
        for at in np.ndindex(arrays[name].shape):
            values = []
            for base in (ahead, behind):
                for sign in (1, -1):
                    moved = base[name].copy()
                    moved[at] += sign * h
                    values.append(loss(problem, base | {name: moved}))
            a, b, c, d = values
            results[name][at] = (a - b - c + d) / (4 * h * h)
    return results


CASES = [
    (),
    ("mask", "scale"),
    ("causal", "bias"),
    ("window", "sinks"),
    ("softcap", "mask"),
    ("dropout", "sinks", "bias"),
    ("bias of -inf", "sinks"),
    ("softcap", "mask", "bias", "sinks", "dropout"),
]
BY_STEP_ALONE = [("score_mod",), ("score_mod", "softcap", "mask", "bias", "sinks", "dropout")]


@pytest.mark.parametrize("options", CASES + BY_STEP_ALONE, ids="-".join)
def test_both_give_what_the_definition_gives(options):
    case = make(options, "tiny")
    allowed = bounds(case)
    with mpmath.workdps(60):
        want = by_definition(case)
    step = case.hvp()
    for name in case.directions:
        assert_within(name, getattr(step, name), want[name], allowed[name])
    if "score_mod" in options:
        return
    by_hand = case.double_backward()
    for name in want:
        assert_within(name, getattr(by_hand, name), want[name], allowed[name])


def test_the_bound_is_narrow():
    allowed = bounds(make(CASES[-1]))
    for name in INPUTS + COTANGENTS:
        assert 0 < allowed[name].max() < U**0.5, name  # half of the digits, and more, are certain


@pytest.mark.parametrize("size", ["tiny", "primes", "headless"])
@pytest.mark.parametrize("options", CASES, ids="-".join)
def test_by_hand_is_hvp_and_jvp(options, size):
    """Second derivatives commute, and Φ is the change of a loss that is linear in cotangents."""
    assert_by_hand_is_hvp(make(options, size, seed=1), second_order)


def assert_by_hand_is_hvp(case, module):
    allowed, by_hand, step = bounds(case), case.double_backward(module), case.hvp()
    do, dlse = npattn.jvp(case.fwd, **{f"d{n}": x for n, x in case.directions.items()})
    for name in case.directions:
        assert_within(name, getattr(by_hand, name), getattr(step, name), 2 * allowed[name])
    assert_within("dout", by_hand.dout, do, 2 * allowed["dout"])
    assert_within("dlse", by_hand.dlse, dlse, 2 * allowed["dlse"])


# In `backward_twice`: a term changed or forgotten, and the options that show it.
ALL = CASES[-1]
MUTANTS = {
    "no dropout in dp": ("dp = (do @ v.swapaxes(-1, -2)) * factor", "dp = do @ v.swapaxes(-1, -2)"),
    "no dweights": ("dp if dweights is None else dp + dweights", "dp"),
    "mean not taken off dp": ("g, g_sink = subtract_mean(dp, 0, p, p_sink)",
                              "g, g_sink = dp, np.zeros_like(p_sink)"),
    "dlse kept from g": ("g, g_sink = g + dlse[..., None], g_sink + dlse[..., None]", "pass"),
    "no ddk in the change of scores": (" + q @ ddk.swapaxes(-1, -2)", ""),
    "no ddq in the change of scores": ("ddq @ k.swapaxes(-1, -2) + ", ""),
    "turn not scaled": ("turn_x = problem.scale * (", "turn_x = ("),
    "cap not in the change of scores": ("turn_x * slope + ddbias", "turn_x + ddbias"),
    "no ddbias": ("turn_x * slope + ddbias", "turn_x * slope"),
    "no ddsinks": ("turn_sink = 0 if ddsinks is None else ddsinks[:, None, None]", "turn_sink = 0"),
    "mean not taken off the change": ("h, h_sink = subtract_mean(turn, turn_sink, p, p_sink)",
                                      "h, h_sink = turn, turn_sink + np.zeros_like(p_sink)"),
    "no ddv in dout": (" + sum_live(w, ddv, live)", ""),
    "dropout not in dout": ("w, dw = p * factor, change * factor", "w, dw = p, change"),
    "no sink in dlse": ("else of_lse + (p_sink * turn_sink)[..., 0]", "else of_lse"),
    "weights detached": ("of_p = where_live(g * h + ", "of_p = where_live(0 * g * h + "),
    "ddv not through the weights": ("g * h + factor * (do @ ddv.swapaxes(-1, -2))", "g * h"),
    "mean not taken off of_p": (
        "of_log_p, of_log_sink = subtract_mean(of_p, g_sink * h_sink, p, p_sink)",
        "of_log_p, of_log_sink = of_p, g_sink * h_sink",
    ),
    "no sink in the mean of of_p": ("subtract_mean(of_p, g_sink * h_sink, p, p_sink)",
                                    "subtract_mean(of_p, 0, p, p_sink)"),
    "slope of the cap fixed": ("of_x = of_x - ds * turn_x", "of_x = of_x - 0 * ds * turn_x"),
    "slope of the cap by half": ("ds * turn_x * 2 * tanh", "ds * turn_x * tanh"),
    "no ddk in q": (" + sum_live(dx, ddk, live)", ""),
    "no ddq in k": (" + sum_live(dx, ddq, seen)", ""),
    "q not scaled": ("of_q = problem.scale * (", "of_q = ("),
    "k not scaled": ("of_k = problem.scale * (", "of_k = ("),
    "cap not in dx": ("dx, of_x = ds * slope, of_s * slope", "dx, of_x = ds, of_s * slope"),
    "cap not in x": ("dx, of_x = ds * slope, of_s * slope", "dx, of_x = ds * slope, of_s"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_term_of_the_page_is_tested(mutant, monkeypatch):
    old, new = MUTANTS[mutant]
    source = inspect.getsource(backward_twice)
    assert source.count(old) == 1
    module = ModuleType("npattn.engines.backward_twice")
    exec(compile(source.replace(old, new), mutant, "exec"), module.__dict__)
    case = make((*ALL, "scale"))
    assert_by_hand_is_hvp(case, second_order)
    monkeypatch.setattr(second_order, "backward_twice", module.backward_twice)
    with pytest.raises(AssertionError, match="is not"):
        assert_by_hand_is_hvp(case, second_order)


# --- hvp ------------------------------------------------------------------------------------------

OPTION_NAMES = (
    "scale", "softcap", "bias", "sinks", "mask", "causal", "window", "dropout", "score_mod",
)  # fmt: skip


@pytest.mark.thorough
@given(st.sets(st.sampled_from(OPTION_NAMES)), st.integers(0, 99), st.sampled_from(list(SIZES)))
def test_the_hessian_is_symmetric(options, seed, size):
    """⟨e, H d⟩ = ⟨d, H e⟩, under any options."""
    case = make(sorted(options), size, seed)
    rng = np.random.default_rng(seed + 100)
    other = {n: rng.standard_normal(x.shape) for n, x in case.directions.items()}
    turned = case._replace(directions=other)
    one, two = case.hvp(), turned.hvp()
    gap = allowed = 0.0
    for name, d in case.directions.items():
        e = other[name]
        gap += (e * getattr(one, name)).sum() - (d * getattr(two, name)).sum()
        allowed += (bounds(case)[name] * abs(e) + bounds(turned)[name] * abs(d)).sum()
    assert abs(gap) <= 2 * allowed  # the sums round, too: less often than n counts


def test_parts_left_out_are_zeros():
    case = make(ALL)
    zeros = {n: np.zeros_like(x) for n, x in case.directions.items()}
    fwd, cotangents = case.fwd, {n: np.zeros_like(x) for n, x in case.cotangents.items()}
    for name, x in case.directions.items():
        whole = case._replace(directions=zeros | {name: x}).double_backward()
        part = npattn.double_backward(fwd, **case.cotangents, **{f"dd{name}": x})
        step = npattn.hvp(fwd, **case.cotangents, **{f"d{name}": x})
        for n in INPUTS + COTANGENTS:
            np.testing.assert_array_equal(getattr(part, n), getattr(whole, n))
        for n in INPUTS:
            assert getattr(step, n).shape == getattr(fwd.problem, n).shape
    none = npattn.double_backward(fwd, None)
    assert none.dlse is None
    assert none.dweights is None
    assert not npattn.hvp(fwd, case.cotangents["dout"]).q.any()
    for name in cotangents:
        part = npattn.double_backward(fwd, **({"dout": None} | {name: case.cotangents[name]}),
                                      ddq=case.directions["q"])  # fmt: skip
        given_zeros = cotangents | {name: case.cotangents[name]}
        whole = npattn.double_backward(fwd, **given_zeros, ddq=case.directions["q"])
        np.testing.assert_array_equal(part.k, whole.k)


def test_a_direction_of_any_length_is_taken_exactly():
    """The step is divided by the length, by a power of two: no bit changes."""
    case = make(ALL)
    plain = case.hvp()
    for power in (-300, 300):
        longer = case.hvp(**{n: np.ldexp(x, power) for n, x in case.directions.items()})
        for name in INPUTS:
            got = np.ldexp(getattr(longer, name), -power)
            np.testing.assert_array_equal(got, getattr(plain, name))


def test_a_larger_step_is_seen(monkeypatch):
    case = make(ALL)
    monkeypatch.setattr(second_order, "_step", lambda along, dtype: 2.0**-16)
    allowed, want = bounds(case), case.double_backward()
    with pytest.raises(AssertionError, match="is not"):
        assert_within("q", case.hvp().q, want.q, 2 * allowed["q"])


def test_a_score_mod_whose_slope_is_held_fixed_is_seen(monkeypatch):
    case = make(("score_mod",), "tiny")
    with mpmath.workdps(60):
        want = by_definition(case)
    real = score_mod.complex_step
    monkeypatch.setattr(score_mod, "_dual_step", lambda p, s, tile: real(p, s.real, tile) + 0j)
    with pytest.raises(AssertionError, match="is not"):
        assert_within("q", case.hvp().q, want["q"], bounds(case)["q"])


@pytest.mark.parametrize("dtype", [np.float32, np.longdouble])
def test_dtype_of_the_computation_is_kept(dtype):
    case = make(ALL, seed=4)
    allowed = bounds(case)
    other = case._replace(problem=case.problem.replace(dtype=dtype))
    u = max(np.finfo(dtype).eps / 2, U)
    for f in (Case.hvp, Case.double_backward)[dtype == np.longdouble :]:
        got, want = f(other), f(case)
        for name in INPUTS:
            x = getattr(got, name)
            assert x.dtype == dtype
            limit = (1 + u / U) * allowed[name]
            assert_within(name, x.astype(np.float64), getattr(want, name), limit)


def test_narrow_inputs_are_taken_exactly():
    case = make(("mask",), dtype=np.float16)
    wide = {n: getattr(case.problem, n).astype(np.float64) for n in "qkv"}
    other = case._replace(problem=case.problem.replace(**wide))
    np.testing.assert_array_equal(case.hvp().q, other.hvp().q)
    np.testing.assert_array_equal(case.double_backward().q, other.double_backward().q)
    filled = Conventions(hidden_fill="min", hidden_add=None)
    problem = case.problem.replace(bias=np.full((5, 7), -65504.0))  # as small as a fill
    along = {f"d{n}": x for n, x in case.directions.items()}
    changes = npattn.hvp(
        npattn.oracle.api.evaluate(problem, filled), case.cotangents["dout"], **along
    )
    number = Conventions(hidden_fill=-65504.0)
    same = npattn.hvp(npattn.oracle.api.evaluate(problem, number), case.cotangents["dout"], **along)
    np.testing.assert_array_equal(changes.q, same.q)
    assert changes.q.any()


def test_the_tiled_engine_has_both():
    case, tiled = make(ALL), make(ALL)
    fwd = npattn.oracle.api.evaluate(tiled.problem, engine="tiled")
    along = {f"dd{n}": x for n, x in case.directions.items()}
    for got, want in (
        (case.hvp(fwd), case.hvp()),
        (npattn.double_backward(fwd, **case.cotangents, **along), case.double_backward()),
    ):
        np.testing.assert_array_equal(got.k, want.k)


def test_undefined_rows_have_undefined_changes():
    case = make(("mask",))
    mask = np.ones((5, 7), bool)
    mask[2] = False
    problem = case.problem.replace(mask=mask)
    fwd = npattn.oracle.api.evaluate(problem, Conventions(empty_row="nan"))
    change = npattn.hvp(fwd, case.cotangents["dout"], dq=case.directions["q"]).q
    assert np.isnan(change[..., 2, :]).all()
    assert np.isfinite(np.delete(change, 2, axis=-2)).all()


@pytest.mark.parametrize("option", ["NaN key behind a mask", "NaN query"])
def test_nan_reaches_no_row_that_does_not_see_it(option):
    case = make(("mask",), seed=5)
    clean = case.double_backward(), case.hvp()
    q, k = case.problem.q.copy(), case.problem.k.copy()
    if option == "NaN query":
        q[0, 0, 1] = np.nan
    else:
        k[0, 0, 3] = np.nan
    live = np.broadcast_to(case.problem.mask, (2, 6, 5, 7))
    seen = live[0, :2, :, 3] if option != "NaN query" else np.arange(5)[None] == [[1], [9]]
    other = case._replace(problem=case.problem.replace(q=q, k=k))
    for got, want in zip((other.double_backward(), other.hvp()), clean, strict=True):
        np.testing.assert_array_equal(got.q[1], want.q[1])
        np.testing.assert_array_equal(got.q[0, 2:], want.q[0, 2:])
        np.testing.assert_array_equal(got.q[0, :2][~seen], want.q[0, :2][~seen])
        assert np.isnan(got.q[0, :2][seen]).all()


# --- biases as objects ----------------------------------------------------------------------------


def test_a_nan_query_leaves_the_rest_of_a_shared_key_as_it_is():
    """dk of key 0 is NaN, but what the other query adds to it still has a gradient."""
    q, k, v = np.array([[np.nan], [1.0]]), np.array([[1.0], [2.0]]), np.array([[1.0], [3.0]])
    dout, along = np.ones((2, 1)), np.ones((2, 1))  # both scores of query 1 move alike
    fwd = npattn.forward(q, k, v, causal=True)
    second = npattn.double_backward(fwd, dout, dweights=np.zeros((2, 2)), ddk=along)
    found = [npattn.hvp(fwd, dout, dk=along).v, second.v]
    if find_spec("torch"):
        import torch

        import npattn.torch as npt

        tensors = npt.forward(*(torch.tensor(x) for x in (q, k, v)), causal=True)
        do, dk = torch.tensor(dout), torch.tensor(along)
        found += [npt.hvp(tensors, do, dk=dk).v.numpy()]
        found += [npt.double_backward(tensors, do, ddk=dk).v.numpy()]
    for x in found:
        assert np.isnan(x[0, 0])  # query 0 sees key 0
        np.testing.assert_allclose(x[1, 0], 0, atol=1e-15)
    assert np.isnan(second.dweights).tolist() == [[True, False], [False, False]]


def test_an_object_has_the_derivatives_of_its_parameter():
    case = make(("mask", "softcap"), seed=6)
    rng = np.random.default_rng(7)
    terms = (
        biases.alibi(rng.standard_normal(6)),
        biases.relative(rng.standard_normal((8, 6)), max_distance=9),
        biases.dense(rng.standard_normal((5, 7)).astype(np.float32)),
    )
    bias = terms[0] + terms[1] + terms[2]
    along = tuple(rng.standard_normal(term.parameter.shape) for term in terms)
    problem = case.problem.replace(bias=bias)
    plain = case.problem.replace(bias=bias.to_array(5, 7, lead=(2,), H=6))
    tangent = bias.with_parameter(along).to_array(5, 7, lead=(2,), H=6)
    with_object = case._replace(problem=problem, directions=case.directions | {"bias": along})
    with_array = case._replace(problem=plain, directions=case.directions | {"bias": tangent})
    allowed = bounds(with_array)
    for got, want in (
        (with_object.double_backward(), with_array.double_backward()),
        (with_object.hvp(), with_array.hvp()),
    ):
        for name in "qkv":
            assert_within(name, getattr(got, name), getattr(want, name), 2 * allowed[name])
        for g, w, b in zip(got.bias, bias.gradient(want.bias),
                           biases_of(terms, allowed["bias"]), strict=True):  # fmt: skip
            assert_within("bias", g, w, b)


def test_an_object_of_somebody_else_stays_where_it_is():
    class Other:
        def __init__(self, bias):
            self.bias, self.dtype = bias, bias.dtype

        def __getattr__(self, name):
            return getattr(self.bias, name)

    case, bias = make((), seed=13), biases.alibi(6)
    other = case._replace(problem=case.problem.replace(bias=Other(bias)))
    known = case._replace(problem=case.problem.replace(bias=bias))
    for f in (Case.hvp, Case.double_backward):
        np.testing.assert_array_equal(f(other).q, f(known).q)
        np.testing.assert_array_equal(f(other).bias, f(known).bias)


def biases_of(terms, bound):
    """The bounds of sums over the distances, from that of the scores; none is below it."""
    for term in terms:
        weight = 12 if isinstance(term, Alibi) else 1  # a distance, at most
        yield 2 * weight * bound.sum() * np.ones(term.parameter.shape)


# --- what is refused ------------------------------------------------------------------------------


def test_what_is_not_supported_is_answered_with_what_to_use():
    case = make(("score_mod", "mask"))
    dout = case.cotangents["dout"]
    by_hand, step = npattn.double_backward, npattn.hvp
    with pytest.raises(OptionError, match=r"support score_mod; call npattn\.hvp"):
        by_hand(case.fwd, dout)
    plain = make(("mask",)).problem
    with pytest.raises(OptionError, match=r"support conventions; call npattn\.hvp"):
        by_hand(npattn.oracle.api.evaluate(plain, Conventions()), dout)
    extended = npattn.forward(plain.q, plain.k, plain.v, precision="extended")
    mixed = npattn.forward(plain.q, plain.k, plain.v, dtype="bfloat16")
    for f in (by_hand, step):
        with pytest.raises(OptionError, match="precision='extended': call forward without it"):
            f(extended, dout)
        with pytest.raises(OptionError, match=r"mixed precision \(dtype bfloat16\); call forward"):
            f(mixed, dout)
        with pytest.raises(OptionError, match=r"fwd is of type int; pass the result of npattn"):
            f(3, dout)
        with pytest.raises(ShapeError, match=r"dout has shape \(3,\), but out has shape"):
            f(npattn.oracle.api.evaluate(plain), np.ones(3))
    with pytest.raises(OptionError, match="got ddbias, but the problem has no bias"):
        by_hand(npattn.oracle.api.evaluate(plain), dout, ddbias=np.ones((5, 7)))
    with pytest.raises(ShapeError, match=r"ddq has shape \(3,\), but dq has shape"):
        by_hand(npattn.oracle.api.evaluate(plain), dout, ddq=np.ones(3))


def test_hvp_is_of_real_arrays():
    longer = make(("mask",)).problem.replace(dtype=np.longdouble)
    with pytest.raises(DtypeError, match="hvp does not support dtype longdouble: call double_back"):
        npattn.hvp(npattn.oracle.api.evaluate(longer), None)
    plain = make(("mask",)).problem
    dout = make(("mask",)).cotangents["dout"]
    fwd = npattn.oracle.api.evaluate(plain, engine="dense")
    with pytest.raises(DtypeError, match="hvp does not support dtype complex128: it is a complex"):
        npattn.hvp(npattn.oracle.api.evaluate(plain.replace(q=plain.q + 0j)), dout)
    with pytest.raises(DtypeError, match="dq is complex128, must be real for hvp"):
        npattn.hvp(fwd, dout, dq=1j * plain.q)
    with pytest.raises(DtypeError, match="dout is complex128, must be real for hvp"):
        npattn.hvp(fwd, 1j * dout, dq=plain.q)


def test_double_backward_takes_complex_arrays():
    """It is analytic as backward is: a complex step along q through it is a third derivative."""
    case = make(("mask", "sinks"), seed=8)
    moved = case._replace(problem=case.problem.replace(q=case.problem.q + 1e-30j))
    assert moved.double_backward().k.dtype == np.complex128
    third = moved.double_backward().k.imag / 1e-30
    h = 2.0**-12
    there = (case._replace(problem=case.problem.replace(q=case.problem.q + x)) for x in (h, -h))
    up, down = (c.double_backward().k for c in there)
    # The central difference errs by h² times a derivative that is of the size of the fourth.
    limit = h * abs(third).max() + 2 * bounds(case)["k"] / h
    assert_within("k", third, (up - down) / (2 * h), limit)


def test_a_score_mod_of_other_functions_is_refused():
    case = make((), "tiny")
    case = case._replace(problem=case.problem.replace(score_mod=lambda s, *_: np.sinc(s.imag)))
    with pytest.raises(OptionError, match="score_mod has no derivative at complex scores, since"):
        case.hvp()


def test_nothing_that_is_passed_is_written_to():
    case = make(ALL)
    arrays = [*case.cotangents.values(), *case.directions.values()]
    arrays += [getattr(case.problem, n) for n in INPUTS]
    before = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    case.double_backward()
    case.hvp()
    assert all((x == y).all() for x, y in zip(arrays, before, strict=True))
