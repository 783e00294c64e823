"""Targets in NumPy: `flash` keeps every rule, `naive` breaks the usual two."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import npattn
from npattn.testing.targets.numpy import TILE, flash, flash_backward, naive

Array = np.ndarray[Any, Any]
Case = tuple[list[Array], dict[str, Any]]  # q, k, v and the options of an implementation

OPTIONS = ("mask", "causal", "window", "bias", "scale", "softcap", "sinks", "dropout")
DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)

# lead, H, K, T, S, D, E: different, odd, longer than a tile, square, 0 and 1.
SIZES = [
    ((2,), 6, 3, 5, 7, 11, 13),
    ((), 12, 3, 5, 11, 8, 6),
    ((2, 3), 2, 1, 9, 4, 3, 5),
    ((1,), 4, 4, 65, 65, 16, 16),
    ((), 6, 2, 7, 2 * TILE + 1, 5, 2),
    ((2,), 2, 2, 1, TILE, 4, 4),
    ((), 2, 1, 3, 1, 1, 1),
    ((2,), 4, 2, 0, 5, 3, 2),
    ((2,), 4, 2, 3, 0, 3, 2),
    ((), 2, 2, 4, 6, 0, 3),
    ((), 2, 1, 4, 6, 3, 0),
    ((0,), 2, 1, 4, 6, 3, 2),
    ((2,), 0, 0, 4, 6, 3, 2),
]


def draw(
    seed: int, sizes: tuple[Any, ...], names: tuple[str, ...] = OPTIONS, dtype: Any = np.float64
) -> Case:
    """Sample a problem of these sizes, with each option on or off at random."""
    rng = np.random.default_rng(seed)
    lead, H, K, T, S, D, E = sizes
    normal = rng.standard_normal
    arrays = [2 * normal((*lead, H, T, D)), normal((*lead, K, S, D)), normal((*lead, K, S, E))]
    whole = (*lead, H, T, S)

    def broadcast() -> tuple[int, ...]:
        cut = rng.integers(0, len(whole) - 1)
        return tuple(n if rng.random() < 0.7 else 1 for n in whole[cut:])

    on = {name: name in names and rng.random() < 0.5 for name in OPTIONS}
    options: dict[str, Any] = {}
    if on["mask"]:
        options["mask"] = rng.random(broadcast()) < 0.6
    if on["causal"]:
        options["causal"] = True
    if on["window"]:
        pairs = [(0, 0), (2, 1), (3, None), (None, 0), (1, 60)]
        options["window"] = pairs[rng.integers(len(pairs))]
    if on["bias"]:
        options["bias"] = normal(broadcast()).astype(dtype)
        options["bias"][rng.random(options["bias"].shape) < 0.1] = -np.inf
    if on["scale"]:
        options["scale"] = float(rng.choice([-0.7, 0.0, 0.3, 1.5]))
    if on["softcap"]:
        options["softcap"] = float(rng.choice([0.5, 3.0, 30.0]))
    if on["sinks"]:
        options["sinks"] = normal(H).astype(dtype)
    if on["dropout"]:
        options["dropout_mask"] = rng.random(broadcast()) < 0.7
        options["dropout_rate"] = float(rng.choice([0.0, 0.3]))
    return [x.astype(dtype) for x in arrays], options


def oracle(
    arrays: list[Array], options: dict[str, Any], do: Array, dlse: Array | None, **changes: Any
) -> dict[str, Array]:
    """Return o, lse, weights and every gradient, by npattn in float64."""
    causal = "bottom_right" if options.get("causal") else False
    fwd = npattn.forward(*arrays, **{**options, "causal": causal, **changes})
    grads = npattn.backward(fwd, do, dlse)
    results = {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}
    named = {f"d{name}": getattr(grads, name) for name in ("q", "k", "v", "bias", "sinks")}
    return results | {name: x for name, x in named.items() if x is not None}


def cotangents(seed: int, out: Array, lse: Array) -> tuple[Array, Array]:
    """Random cotangents of out and lse; finite garbage in fully masked rows."""
    rng = np.random.default_rng(seed + 1)
    do = np.asarray(rng.standard_normal(out.shape)).astype(out.dtype)
    dlse = np.asarray(rng.standard_normal(lse.shape)).astype(lse.dtype)
    return do, np.where(lse == -np.inf, np.asarray(1e6, lse.dtype), dlse)


def finfo(dtype: Any) -> Any:
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def forward(arrays: list[Array], options: dict[str, Any]) -> tuple[Array, Array]:
    out, lse = flash(*arrays, **options, return_lse=True)
    return np.asarray(out), np.asarray(lse)


def run(
    arrays: list[Array], options: dict[str, Any], do: Array, dlse: Array | None
) -> dict[str, Array]:
    out, lse = forward(arrays, options)
    grads = flash_backward(do, *arrays, out=out, lse=lse, dlse=dlse, **options)
    return {"o": out, "lse": lse} | {f"d{name}": x for name, x in grads.items()}


def to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x over heads that share and over broadcast axes, to `shape` (..., K, S, n)."""
    if x.ndim > 2 and len(shape) > 2 and x.shape[-3] != shape[-3] and shape[-3] > 1:
        *lead, H, s, n = x.shape
        x = x.reshape(*lead, shape[-3], H // shape[-3], s, n).sum(-3)
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    summed: Array = x.sum(axis=axes, keepdims=True)
    return summed


@np.errstate(all="ignore")
def bound(
    arrays: list[Array],
    options: dict[str, Any],
    do: Array,
    dlse: Array | None,
    u: float,
    u_out: float = 0.0,
) -> dict[str, Array]:
    """First-order bound on the rounding of one evaluation with unit roundoff u, per element.

    A sum of n products is off by at most (n + 2) u Σ|terms| in any order (n further operations
    for rescaling between tiles are counted with it). So a score is off by
        a = (D + 4) u |scale| |q||k|ᵀ + 6u (|s| + |softcap| + |bias|),
    the argument of exp by a + 4u (|s| + |lse|), hence every weight by the factor 1 ± r,
        r = 2 max_j (a + 4u |s − lse|) + (2 S + 16) u,
    where the 2 is for numerator and denominator (the tanh of a softcap has slope ≤ 1). From there
    each line of the algorithm passes on what it got and adds (n + 4) u of what it sums. D (delta)
    comes from out, whose error is met by |do|; `u_out` is the roundoff of an out stored low.
    The pivot of exp cancels, but its rounding 4u|lse| does not: it is in r.
    """
    wide = [np.asarray(x, np.float64) for x in arrays]
    q, k, v = (x if x.ndim > 2 else x[None] for x in wide)
    H, T, S, D, E = *q.shape[-3:-1], k.shape[-2], q.shape[-1], v.shape[-1]
    group = H // max(k.shape[-3], 1)
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q = np.broadcast_to(q, (*lead, H, T, D))
    k, v = np.repeat(k, group, -3), np.repeat(v, group, -3)
    ref = oracle(arrays, options, do, dlse)
    lse = np.where(np.isfinite(ref["lse"]), ref["lse"], 0).reshape(*lead, H, T, 1)
    p, do = ref["weights"].reshape(*lead, H, T, S), np.asarray(do, np.float64)
    do = do.reshape(*lead, H, T, E)
    scale = abs(options.get("scale") or (0.0 if "scale" in options else 1 / (D or 1) ** 0.5))
    bias = np.asarray(options.get("bias", np.zeros((1, 1))), np.float64)
    bias = abs(np.where(np.isfinite(bias), bias, 0))
    cap = options.get("softcap")
    kept = options.get("dropout_mask", True) / (1 - options.get("dropout_rate", 0.0))
    dl = (
        np.zeros_like(lse) if dlse is None else abs(np.asarray(dlse, np.float64).reshape(lse.shape))
    )
    dl = np.where(p.any(-1, keepdims=True) | ("sinks" in options), dl, 0)

    def t(x: Array) -> Array:
        return x.swapaxes(-1, -2)

    raw = scale * (abs(q) @ t(abs(k)))  # ≥ |s| before the softcap
    x = scale * np.sign(options.get("scale", 1.0)) * (q @ t(k))
    tanh = np.zeros_like(x) if cap is None else np.tanh(x / cap)
    s = abs(x) if cap is None else abs(cap * tanh)
    a = (D + 4) * u * raw + 6 * u * (s + bias + (0 if cap is None else cap))
    arg = np.where(p > 0, a + 4 * u * (s + bias + abs(lse)), 0)
    sink = 0.0 if "sinks" not in options else abs(options["sinks"].astype(float))[:, None, None]
    r = 2 * arg.max(-1, keepdims=True, initial=0) + 8 * u * (sink + abs(lse)) + (2 * S + 16) * u

    w = p * kept
    bounds = {"lse": r[..., 0] + 4 * u * abs(lse[..., 0]), "weights": p * r}
    bounds["o"] = (r + (S + 4) * u) * (w @ abs(v))
    e_out = bounds["o"] + u_out * (w @ abs(v))

    dp = (do @ t(v)) * kept
    e_dp = (E + 4) * u * (abs(do) @ t(abs(v))) * kept
    delta = (p * dp).sum(-1, keepdims=True)
    mass = (p * abs(dp)).sum(-1, keepdims=True)
    e_delta = (abs(do) * (e_out + (E + 4) * u * (w @ abs(v)))).sum(-1, keepdims=True)
    e_delta = e_delta + (p * e_dp).sum(-1, keepdims=True) + (r + (S + 4) * u) * mass + 4 * u * dl
    spread = abs(dp) + abs(delta) + dl
    e_ds = p * ((r + 6 * u) * spread + e_dp + e_delta)
    ds = p * spread
    if cap is None:
        e_dx, dx = e_ds, ds
    else:  # 1 − tanh² has slope ≤ 2/cap in x, and is itself off by 4u
        e_dx = e_ds * (1 - tanh**2) + ds * (2 * (a + 4 * u * raw) / cap + 8 * u)
        dx = ds
    bounds["dq"] = scale * (e_dx @ abs(k) + (S + 4) * u * (dx @ abs(k)))
    rows = T * group * int(np.prod(lead)) + 8  # what is summed into one element, at most
    bounds["dk"] = scale * (t(e_dx) @ abs(q) + rows * u * (t(dx) @ abs(q)))
    bounds["dv"] = t(w * (r + rows * u)) @ abs(do)
    bounds["dbias"] = e_ds + rows * S * u * ds
    p_sink = np.exp(np.minimum(-lse + (0.0 if "sinks" not in options else
                    options["sinks"].astype(float)[:, None, None]), 0))  # fmt: skip
    e_sink = p_sink * ((r + rows * u) * (abs(delta) + dl + mass) + e_delta)

    shapes = {"dq": 0, "dk": 1, "dv": 2}
    for name, i in shapes.items():
        bounds[name] = to_shape(bounds[name], arrays[i].shape)
    if "bias" in options:
        bounds["dbias"] = to_shape(bounds["dbias"], options["bias"].shape)
    if "sinks" in options:
        bounds["dsinks"] = to_shape(e_sink, (H, 1, 1))[:, 0, 0]
    return {name: bounds[name].reshape(ref[name].shape) for name in ref}


def assert_within(got: dict[str, Array], want: dict[str, Array], allowed: dict[str, Array]) -> None:
    """Check that `got` is within `allowed` of `want`, and non-finite where `want` is."""
    for name, x in got.items():
        ref, limit = want[name], allowed[name]
        assert x.shape == ref.shape, f"{name} has shape {x.shape}, want {ref.shape}"
        finite = np.isfinite(ref)
        assert not np.isfinite(np.asarray(x, np.float64)[~finite]).any(), name
        assert (x[ref == -np.inf] == -np.inf).all(), name
        gap = abs(np.asarray(x, np.float64) - np.where(finite, ref, 0))[finite]
        ratio = gap - limit[finite]
        assert (ratio <= 0).all(), (
            f"{name} off by {gap[ratio > 0]}, allowed {limit[finite][ratio > 0]}"
        )


def check_flash(arrays: list[Array], options: dict[str, Any], seed: int = 0) -> None:
    out, lse = forward(arrays, options)
    do, dlse = cotangents(seed, out, lse)
    got, exact = run(arrays, options, do, dlse), oracle(arrays, options, do, dlse)
    dtype = arrays[0].dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    for name, x in got.items():
        assert x.dtype == (dtype if name in ("o", "dq", "dk", "dv") else wide), name
    u = float(np.finfo(wide).eps) / 2
    u_out = 0.0 if dtype == wide else float(finfo(dtype).eps) / 2
    allowed = bound(arrays, options, do, dlse, u, u_out)
    if wide == np.float64:  # the oracle rounds as much
        allowed = {name: 2 * x for name, x in allowed.items()}
    if u_out:  # and the results are rounded once more, subnormals by half the smallest of them
        tiny = float(finfo(dtype).smallest_subnormal)
        low = {n: u_out * (1 + u_out) * abs(exact[n]) + tiny for n in ("o", "dq", "dk", "dv")}
        allowed = {n: x * (1 + u_out) + low.get(n, 0) for n, x in allowed.items()}
    else:
        tiny = float(np.finfo(wide).tiny)
        allowed = {n: x + tiny for n, x in allowed.items()}
    assert_within(got, exact, allowed)


# --- flash: agreement -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_flash_agrees_with_the_oracle_over_all_options(sizes: tuple[Any, ...], seed: int) -> None:
    check_flash(*draw(seed, sizes), seed)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("seed", range(8))
def test_flash_in_low_precision_is_within_float32_bound(dtype: Any, seed: int) -> None:
    check_flash(*draw(seed, SIZES[seed % 5], dtype=dtype), seed)


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_alone_agrees(option: str) -> None:
    seed = next(s for s in range(99) if draw(s, SIZES[0], (option,))[1])
    for sizes in SIZES:
        check_flash(*draw(seed, sizes, (option,)))


def test_one_head_of_rank_2() -> None:
    (q, k, v), options = draw(5, ((), 1, 1, 5, 7, 11, 13))
    options = {"sinks": np.array([0.3]), "bias": np.ones((1, 7)), "causal": True} | options
    check_flash([q[0], k[0], v[0]], options)


@pytest.mark.parametrize(
    "leads", [((2, 1), (3,), (1, 1)), ((), (2,), ()), ((1,), (1,), (3,)), ((2,), (), (2, 1))]
)
def test_leading_axes_broadcast_and_their_gradients_are_summed(leads: Any) -> None:
    rng = np.random.default_rng(1)
    shapes = [(*leads[0], 4, 5, 3), (*leads[1], 2, 7, 3), (*leads[2], 2, 7, 6)]
    check_flash([rng.standard_normal(shape) for shape in shapes], {"causal": True})


def test_strides_do_not_matter() -> None:
    (q, k, v), options = draw(3, SIZES[0], ("mask", "bias"))
    views = [
        np.asfortranarray(q),
        np.repeat(k, 2, axis=-2)[..., ::2, :],
        np.ascontiguousarray(v[..., ::-1])[..., ::-1],
    ]
    check_flash(views, options)
    check_flash([q, np.broadcast_to(k[:, :1], k.shape), v], options)
    for x, y in zip(flash(*views, **options), flash(q, k, v, **options), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13 * abs(v).max())


def test_flash_is_pure_and_deterministic() -> None:
    arrays, options = draw(7, SIZES[0])
    before = [x.copy() for x in arrays]
    out, lse = forward(arrays, options)
    do, dlse = cotangents(0, out, lse)
    first, second = run(arrays, options, do, dlse), run(arrays, options, do, dlse)
    assert all((x == y).all() for x, y in zip(arrays, before, strict=True))
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


# --- flash: edge cases ----------------------------------------------------------------------------


@pytest.mark.parametrize("with_sinks", [False, True])
def test_fully_masked_row(with_sinks: bool) -> None:
    (q, k, v), _ = draw(0, SIZES[0], ())
    mask = np.ones((5, 7), bool)
    mask[2] = False
    options: dict[str, Any] = {"mask": mask}
    if with_sinks:
        options["sinks"] = np.linspace(-1, 1, 6)
    out, lse = forward([q, k, v], options)
    assert (out[..., 2, :] == 0).all()
    assert (lse[..., 2] == (options["sinks"] if with_sinks else -np.inf)).all()
    do, dlse = np.ones_like(out), np.zeros_like(lse)
    dlse[..., 2] = 1e30
    grads = flash_backward(do, q, k, v, out=out, lse=lse, dlse=dlse, **options)
    clean = flash_backward(do, q, k, v, out=out, lse=lse, **options)
    for name in "qkv":
        assert (grads[name] == clean[name]).all()
    assert (grads["q"][..., 2, :] == 0).all()
    if with_sinks:
        assert (grads["sinks"] >= 1e30).all()


def test_row_of_minus_inf_scores_is_fully_masked() -> None:
    (q, k, v), _ = draw(0, SIZES[4], ())
    bias = np.zeros((7, k.shape[-2]))
    bias[3] = -np.inf
    bias[4, :TILE] = -np.inf  # the whole first tile
    check_flash([q, k, v], {"bias": bias})
    assert (forward([q, k, v], {"bias": bias})[0][..., 3, :] == 0).all()


def test_hidden_first_tile_keeps_running_maximum() -> None:
    (q, k, v), _ = draw(0, SIZES[4], ())
    mask = np.arange(k.shape[-2])[None] >= TILE
    check_flash([q, k, v], {"mask": mask, "bias": np.full((1, 1), -1e3)})  # exp(−1e3) is 0


@pytest.mark.parametrize("where", ["k", "v", "kv"])
@pytest.mark.parametrize("garbage", [1e30, np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: np.dtype(d).name)
def test_hidden_keys_do_not_change_a_row(where: str, garbage: float, dtype: Any) -> None:
    """The last key is visible to the last query only; the third is hidden from all."""
    (q, k, v), options = draw(0, SIZES[3], ("bias",), dtype)
    mask = np.ones((1, k.shape[-2]), bool)
    mask[0, 2] = False
    options |= {"mask": mask, "causal": True, "softcap": 5.0}
    dirty = [q, k.copy(), v.copy()]
    for x in (x for name, x in (("k", dirty[1]), ("v", dirty[2])) if name in where):
        x[..., 2, :] = garbage
        x[..., -1, :] = garbage
    out, lse = forward([q, k, v], options)
    do, dlse = cotangents(0, out, lse)
    do[..., -1, :], dlse[..., -1] = 0, 0  # the last query passes no gradient on
    clean, got = run([q, k, v], options, do, dlse), run(dirty, options, do, dlse)
    for name in ("o", "lse", "dq"):
        axis = clean[name].ndim - (1 if name == "lse" else 2)
        rows = [np.delete(x[name], -1, axis) for x in (clean, got)]
        assert np.isfinite(rows[1]).all()
        if np.isfinite(garbage):
            assert rows[0].tobytes() == rows[1].tobytes(), name
        else:
            np.testing.assert_allclose(
                rows[1], rows[0], rtol=50 * float(finfo(dtype).eps), atol=1e-5
            )
    for name in ("dk", "dv"):
        assert (got[name][..., 2, :] == 0).all()
    if not np.isfinite(garbage):
        exact = oracle(dirty, options, do, dlse)
        for name in got:
            assert (np.isfinite(got[name]) | ~np.isfinite(exact[name])).all(), name


def test_nan_at_hidden_keys_keeps_gradients_within_bound() -> None:
    (q, k, v), options = draw(2, SIZES[4], ("bias", "sinks"))
    mask = np.random.default_rng(0).random((1, k.shape[-2])) < 0.7
    options["mask"] = mask
    dirty = [q, np.where(mask[0][:, None], k, np.nan), np.where(mask[0][:, None], v, np.inf)]
    out, lse = forward([q, k, v], options)
    do, dlse = cotangents(0, out, lse)
    allowed = bound([q, k, v], options, do, dlse, 2.0**-53)
    exact = oracle([q, k, v], options, do, dlse)
    assert_within(run(dirty, options, do, dlse), exact, {n: 2 * x for n, x in allowed.items()})


def test_nan_query_spreads_to_its_row_and_visible_keys() -> None:
    (q, k, v), _ = draw(0, SIZES[0], ())
    q[0, 3, 1] = np.nan  # head 3 uses key/value head 1; query 1 of 5 stands at key 3 of 7
    options: dict[str, Any] = {"window": (1, 1)}
    out, lse = forward([q, k, v], options)
    do, dlse = cotangents(0, out, lse)
    got = run([q, k, v], options, do, dlse)
    touched: dict[str, Any] = dict.fromkeys(("o", "lse", "dq"), (0, 3, 1))
    touched |= dict.fromkeys(("dk", "dv"), (0, 1, slice(2, 5)))
    for name, x in got.items():
        expected = np.zeros(x.shape, bool)
        expected[touched[name]] = True
        assert (np.isnan(x) == expected).all(), name


@pytest.mark.parametrize("offset", [-1e4, -1e9, float(np.finfo(np.float32).min)])
def test_gradients_are_finite_under_large_common_offset(offset: float) -> None:
    """In float32 the offset swallows the scores and leaves the mean over the keys."""
    (q, k, v), _ = draw(0, SIZES[0], (), np.float32)
    bias = np.full((5, 7), offset, np.float32)
    q[...] = 0  # equal scores, which no rounding can change
    out, lse = forward([q, k, v], {"bias": bias})
    do = np.ones_like(out) * np.arange(13, dtype=np.float32)
    grads = flash_backward(do, q, k, v, out=out, lse=lse, bias=bias)
    exact = oracle([q, k, v], {"bias": bias}, do, None)
    # Equal scores are exact whatever the offset: the tolerance is that without it.
    tolerance = bound([q, k, v], {"bias": np.zeros_like(bias)}, do, None, 2.0**-24)
    assert (abs(out - exact["o"]) <= tolerance["o"]).all()
    assert (abs(grads["v"] - exact["dv"]) <= tolerance["dv"]).all()
    assert (abs(grads["bias"] - exact["dbias"]) <= tolerance["dbias"]).all()


def test_all_dropped_gives_zero_with_a_finite_lse() -> None:
    (q, k, v), _ = draw(0, SIZES[0], ())
    options: dict[str, Any] = {"dropout_mask": np.zeros((5, 7), bool), "dropout_rate": 0.4}
    out, lse = forward([q, k, v], options)
    assert (out == 0).all()
    assert np.isfinite(lse).all()
    check_flash([q, k, v], options)


def test_the_parameters_name_the_features() -> None:
    features = {*inspect.signature(flash).parameters} - {"return_lse"}
    needs = {"dout", "out", "lse", "dlse"}
    assert {*inspect.signature(flash_backward).parameters} - needs == features


# --- naive ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_naive_is_right_on_ordinary_input(dtype: Any) -> None:
    (q, k, v), _ = draw(0, ((2,), 3, 3, 5, 7, 11, 13), (), dtype)
    got = naive(q, k, v, np.tri(5, 7, dtype=bool))
    assert got.dtype == dtype
    do = np.zeros(got.shape)
    tolerance = bound(
        [q, k, v], {"mask": np.tri(5, 7, dtype=bool)}, do, None, float(finfo(dtype).eps) / 2
    )
    exact = npattn.attention(q, k, v, np.tri(5, 7, dtype=bool))
    assert (abs(got.astype(float) - exact) <= 2 * tolerance["o"]).all()  # 2: the oracle rounds too


def test_naive_gives_nan_in_fully_masked_row() -> None:
    x = np.ones((1, 3, 4))
    assert np.isnan(naive(x, x, x, np.zeros((3, 3), bool))).all()


def test_naive_divides_by_zero_at_size_zero() -> None:
    q, v = np.ones((1, 3, 0)), np.ones((1, 3, 4))
    assert np.isnan(naive(q, q, v)).all()
    assert (forward([q, q, v], {})[0] == 1).all()


def test_naive_lets_nan_leak_from_behind_the_mask() -> None:
    q, v = np.ones((1, 2, 4)), np.ones((1, 2, 4))
    v[0, 1] = np.nan
    mask = np.array([[True, False]])
    assert np.isnan(naive(q, q, v, mask)).all()
    assert not np.isnan(flash(q, q, v, mask)).any()
