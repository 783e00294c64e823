"""The base keeps every rule, and every mutant is wrong by far, in float64 already.

Exact values and bounds are those of tests/testing/targets/test_numpy.py; the judge's own cases,
bounds and rules are not used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import npattn
from benchmarks.zoo.mutants import MUTANTS, Mutant
from npattn.mistakes import MISTAKES, Attention, base, base_backward
from npattn.mistakes.online import Online
from npattn.mistakes.register import STEPS
from npattn.oracle.api import evaluate
from npattn.testing.rules import PROPERTIES
from tests.testing.targets.test_numpy import SIZES, Case, bound, cotangents, draw, oracle

Array = np.ndarray[Any, Any]
U = 2.0**-53
BASE = Mutant("base", "", "", "", "", "", base, base_backward, killed_by=())

REQUIRED = 120  # mutants


def results(mutant: Mutant, case: Case, do: Array, dlse: Array | None) -> dict[str, Array]:
    arrays, options = case
    out, lse, weights = mutant.forward(*arrays, **options, return_lse=True, return_weights=True)
    grads = mutant.backward(do, *arrays, out=out, lse=lse, dlse=dlse, **options)
    arrays = {"o": out, "lse": lse, "weights": weights}
    return arrays | {f"d{name}": x for name, x in grads.items()}


def beyond(
    got: dict[str, Array], reference: dict[str, Array], allowed: dict[str, Array], times: float
) -> set[str]:
    """Return the names of results in error by more than `times` the bound."""
    names = set()
    for name, x in got.items():
        ref = reference[name]
        tolerance = times * allowed[name] + np.finfo(np.float64).tiny
        if x.shape != ref.shape:
            names.add(name)
            continue
        finite = np.isfinite(ref)
        wrong = np.isfinite(x) if name != "lse" else ~np.isnan(ref) & (x != ref)
        gap = abs(np.where(finite, x, 0) - np.where(finite, ref, 0))
        if (wrong & ~finite).any() or not (gap <= np.where(finite, tolerance, 0)).all():
            names.add(name)
    return names


def wrong(mutant: Mutant, case: Case, seed: int = 0, times: float = 10.0) -> set[str]:
    """Return the names of results that differ from npattn's; dlse is 0 on fully masked rows."""
    do, dlse = rows_cotangents(case, seed)
    got = results(mutant, case, do, dlse)
    return beyond(got, oracle(*case, do, dlse), bound(*case, do, dlse, U), times)


def rows_cotangents(case: Case, seed: int = 0) -> tuple[Array, Array]:
    out, lse = base(*case[0], **case[1], return_lse=True)
    do, dlse = cotangents(seed, out, lse)
    return do, np.where(lse == -np.inf, 0, dlse)


def masked_case(hidden: Any, **options: Any) -> Case:
    """Return a case with T ≠ S, shared heads, and the keys `hidden` hidden from all queries."""
    arrays, _ = draw(0, SIZES[0], ())
    mask = np.ones((1, 7), bool)
    mask[0, hidden] = False
    return arrays, {"mask": mask, **options}


def special(sizes: tuple[Any, ...], mask: Any = None, bias: Any = None, **options: Any) -> Case:
    """Return a case of these sizes, with a mask and a bias of these shapes."""
    arrays, _ = draw(0, sizes, ())
    rng = np.random.default_rng(1)
    options |= {} if mask is None else {"mask": rng.random(mask) < 0.6}
    options |= {} if bias is None else {"bias": rng.standard_normal(bias)}
    return arrays, options


def share_keys(arrays: list[Array]) -> list[Array]:
    """Let all batch entries share the keys and values of the first."""
    q, k, v = arrays
    return [q, k[:1], v[:1]]


PLAIN = [draw(0, sizes, ()) for sizes in (SIZES[0], SIZES[1], SIZES[4])]
DRAWN = [draw(seed, sizes) for sizes in (SIZES[0], SIZES[2], SIZES[1]) for seed in range(12)]
HARD: Case = ([500 * PLAIN[0][0][0], *PLAIN[0][0][1:]], {})  # scores ≫ 709
WIDE = ((3,), 3, 3, 17, 23, 71, 7)  # as many samples as heads; more than 64 channels
LONG = ((2,), 2, 2, 37, 157, 5, 3)
MIDDLE = abs(np.arange(157)[None] - 78) < 30  # whole tiles at both ends are hidden
SPECIAL = [
    special(((2,), 2, 2, 1, 19, 5, 3), window=(2, 0)),  # decoding
    special(((), 2, 2, 13, 13, 5, 3), mask=(13, 13), bias=(13, 13)),
    special(((2,), 3, 3, 13, 3, 5, 5), softcap=1.5, scale=0.7, causal=True),  # 3 heads, 3 keys
    special(SIZES[0], sinks=np.full(6, 800.0)),  # its exp overflows
    special(WIDE, mask=(3, 1, 17, 23)),
    special(WIDE, bias=(3, 1, 17, 23)),
    special(WIDE, bias=(17, 23), causal=True, window=(29, None)),
    special(LONG, window=(3, 1)),
    special(LONG, dropout_mask=np.arange(157) % 5 != np.ones((37, 1)), dropout_rate=0.3),
    (special(LONG)[0], {"mask": MIDDLE, "bias": np.full((1, 1), -1e5)}),  # scores ≪ 0
    (share_keys(special(LONG)[0]), {}),
    (HARD[0], {"scale": -1.0}),
]
CASES = [*PLAIN, *DRAWN, HARD, *SPECIAL]


# --- one function a rule: does it detect the mutant? --------------------------------------------


def agreement(name: str) -> Callable[[Mutant], bool]:
    return lambda mutant: any(name in wrong(mutant, case) for case in CASES)


def structure(mutant: Mutant) -> bool:
    return any(wrong(mutant, draw(0, sizes, ())) for sizes in SIZES)


def shape_dtype(mutant: Mutant) -> bool:
    for dtype in (np.float16, np.float32, np.float64):
        case = draw(1, SIZES[0], ("bias", "sinks"), dtype)
        do, dlse = rows_cotangents(case)
        got, reference = results(mutant, case, do, dlse), oracle(*case, do, dlse)
        for name, x in got.items():
            narrow = name in ("o", "dq", "dk", "dv")
            right = x.dtype == dtype if narrow else x.dtype == max(dtype, np.float32, key=bits)
            if not right or x.shape != reference[name].shape:
                return True
    return False


def bits(dtype: Any) -> int:
    return int(np.dtype(dtype).itemsize)


def rows_sum_to_one(mutant: Mutant) -> bool:
    for case in CASES:
        if "sinks" not in case[1]:
            arrays, options = case
            *_, weights = mutant.forward(*arrays, **options, return_lse=True, return_weights=True)
            reference = oracle(*case, *rows_cotangents(case))["weights"].sum(-1)
            if not (
                abs(weights.sum(-1) - np.round(reference)) <= 10 * (weights.shape[-1] + 4) * U
            ).all():
                return True
    return False


def empty_row(mutant: Mutant) -> bool:
    """Fully masked rows by the mask (query 2), and by causal (queries 0 to 4 of 9, with 4 keys)."""
    mask = np.arange(5)[:, None] != np.full((1, 7), 2)
    masked, late = special(SIZES[0]), special(SIZES[2], causal=True)
    masked[1]["mask"] = mask
    sunk = masked[0], {"mask": mask, "sinks": np.linspace(-1, 1, 6)}
    names: set[str] = set()
    for case, empty in ((masked, [2]), (sunk, [2]), (late, range(5))):
        do, dlse = rows_cotangents(case)
        reference, allowed = oracle(*case, do, dlse), bound(*case, do, dlse, U)
        dlse[..., empty] = dlse[..., empty] if "sinks" in case[1] else 1e3  # must be ignored
        names |= beyond(results(mutant, case, do, dlse), reference, allowed, 10)
    return bool(names)


def hidden_finite(mutant: Mutant) -> bool:
    case = masked_case([2, 5], softcap=2.0)
    do, dlse = rows_cotangents(case)
    (q, k, v), options = case
    dirty = (q, k.copy(), v.copy())
    dirty[1][..., [2, 5], :], dirty[2][..., [2, 5], :] = 1e3, -1e4
    clean, got = results(mutant, case, do, dlse), results(mutant, ([*dirty], options), do, dlse)
    return any(not (clean[name] == got[name]).all() for name in clean)


def with_values(case: Case, where: str, *values: float) -> Case:
    """Put values at keys 2 and 5: NaN and inf, or those given."""
    (q, k, v), options = case
    k, v = k.copy(), v.copy()
    for name, x in (("k", k), ("v", v)):
        if name in where:
            x[..., 2, :], x[..., 5, :] = values or (np.nan, np.inf)
    return [q, k, v], options


def visible_nan_lost(mutant: Mutant, where: str) -> bool:
    """Return True unless NaN at keys 2 and 5 reaches query 1, and only query 1."""
    case = masked_case([])
    case[1]["mask"] = (np.arange(5)[:, None] == 1) | (np.arange(7) % 3 != 2)
    out = mutant.forward(*with_values(case, where, np.nan, np.nan)[0], **case[1])
    return bool((np.isnan(out).any(-1) != (np.arange(5) == 1)).any())


def hidden_nan(where: str) -> Callable[[Mutant], bool]:
    def check(mutant: Mutant) -> bool:
        case = masked_case([2, 5])
        do, dlse = rows_cotangents(case)
        reference, allowed = oracle(*case, do, dlse), bound(*case, do, dlse, U)
        got = results(mutant, with_values(case, where), do, dlse)
        return bool(beyond(got, reference, allowed, 10)) or visible_nan_lost(mutant, where)

    return check


def nan_query(mutant: Mutant) -> bool:
    """NaN in query 1 of head 3, which uses key/value head 1 and sees keys 2 to 4 of 7."""
    case = draw(0, SIZES[0], ())
    case[1]["window"] = (1, 1)
    do, dlse = rows_cotangents(case)
    results(mutant, case, do, dlse)  # results that are kept must not be returned again
    case[0][0][0, 3, 1] = np.nan
    touched: dict[str, Any] = dict.fromkeys(("o", "lse", "dq"), (0, 3, 1))
    touched |= dict.fromkeys(("dk", "dv"), (0, 1, slice(2, 5)))
    for name, x in results(mutant, case, do, dlse).items():
        if name != "weights":
            expected = np.zeros(x.shape, bool)
            expected[touched[name]] = True
            if (np.isnan(x) != expected).any():
                return True
    return False


def inputs_unchanged(mutant: Mutant) -> bool:
    case = special(SIZES[0], mask=(5, 7), bias=(5, 7), causal=True, sinks=np.ones(6))
    do, dlse = rows_cotangents(case)
    inputs = (*case[0], *case[1].values(), do, dlse)
    arrays = [x for x in inputs if isinstance(x, np.ndarray)]
    before = [x.copy() for x in arrays]
    results(mutant, case, do, dlse)
    return any(not (x == y).all() for x, y in zip(arrays, before, strict=True))


def across(x: Array) -> Array:
    """Return the same array (B, H, T, n), stored as (B, T, H, n)."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def views(mutant: Mutant) -> bool:
    (q, k, v), options = draw(3, SIZES[0], ("mask",))
    transposed = [across(x) for x in (q, k, v)]
    expanded = [q, np.broadcast_to(k[:, :1], k.shape), v]
    stepped = [np.repeat(x, 2, axis=-1)[..., ::2] for x in (q, k, v)]
    backwards = [x[..., ::-1, :].copy()[..., ::-1, :] for x in (q, k, v)]
    layouts = (transposed, expanded, stepped, backwards)
    do, dlse = rows_cotangents(([q, k, v], options))
    straight, turned = (results(mutant, ([q, k, v], options), x, dlse) for x in (do, across(do)))
    return any(wrong(mutant, (arrays, options)) for arrays in layouts) or any(
        (straight[name] != turned[name]).any() for name in straight
    )


def repeatable(mutant: Mutant) -> bool:
    """Return True if a call with other arrays in between is wrong, or changes earlier results."""
    case = draw(0, SIZES[0], ())
    other: Case = [x + 1 for x in case[0]], {}
    do, dlse = rows_cotangents(case)
    first = results(mutant, case, do, dlse)
    before = {name: x.copy() for name, x in first.items()}
    between = wrong(mutant, other)
    changed = any((first[name] != before[name]).any() for name in first)
    out, lse = mutant.forward(*case[0], return_lse=True)
    mutant.forward(*other[0])
    grads = mutant.backward(do, *case[0], out=out, lse=lse, dlse=dlse)
    second = {"o": out, "lse": lse} | {f"d{name}": x for name, x in grads.items()}
    differ = any(x.tobytes() != before[name].tobytes() for name, x in second.items())
    return bool(between) or changed or differ


DETECTS: dict[str, Callable[[Mutant], bool]] = {
    **{f"agreement-{n}": agreement(n) for n in ("o", "lse", "weights")},
    **{f"agreement-d{n}": agreement(f"d{n}") for n in ("q", "k", "v", "bias", "sinks")},
    **{f"hidden-nan-{where}": hidden_nan(where) for where in ("k", "v", "kv")},
    "structure": structure,
    "shape-dtype": shape_dtype,
    "rows-sum-to-one": rows_sum_to_one,
    "empty-row": empty_row,
    "hidden-finite": hidden_finite,
    "nan-query": nan_query,
    "inputs-unchanged": inputs_unchanged,
    "views": views,
    "repeatable": repeatable,
}


# --- the base -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_base_agrees_with_the_oracle(sizes: tuple[Any, ...], seed: int) -> None:
    assert wrong(BASE, draw(seed, sizes), seed, times=2) == set()  # two that round, one bound each


@pytest.mark.parametrize(
    "leads", [((2, 1), (3,), (1, 1)), ((), (2,), ()), ((1,), (1,), (3,)), ((2,), (), (2, 1))]
)
def test_base_sums_over_broadcast_axes(leads: Any) -> None:
    rng = np.random.default_rng(1)
    shapes = [(*leads[0], 4, 5, 3), (*leads[1], 2, 7, 3), (*leads[2], 2, 7, 6)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    assert wrong(BASE, (arrays, {"sinks": rng.standard_normal(4)}), times=2) == set()


def test_base_takes_rank_2() -> None:
    (q, k, v), _ = draw(5, ((), 1, 1, 5, 7, 11, 13), ())
    options = {"sinks": np.array([0.3]), "bias": np.ones((1, 7)), "causal": True}
    assert wrong(BASE, ([q[0], k[0], v[0]], options), times=2) == set()


def test_base_passes_dweights() -> None:
    (q, k, v), options = draw(2, SIZES[0], ("sinks", "bias", "dropout"))
    fwd = npattn.forward(q, k, v, **options)
    dweights = np.asarray(np.random.default_rng(0).standard_normal(fwd.weights.shape))
    do = np.zeros_like(fwd.out)
    reference = npattn.backward(fwd, do, None, dweights)
    got = base_backward(do, q, k, v, out=fwd.out, lse=fwd.lse, dweights=dweights, **options)
    # With v the identity, of keep = 1, o is the weights: the bound for that loss is this one's.
    plain = {name: x for name, x in options.items() if "dropout" not in name}
    eye = np.broadcast_to(np.eye(7), (2, 3, 7, 7))
    allowed = bound([q, k, eye], plain, dweights, None, U)
    for name in ("q", "k"):
        assert (abs(got[name] - getattr(reference, name)) <= 2 * allowed[f"d{name}"]).all()


@pytest.mark.parametrize("rule", sorted(DETECTS))
def test_base_keeps_every_rule(rule: str) -> None:
    assert not DETECTS[rule](BASE)


# --- the mutants ----------------------------------------------------------------------------------


# Mistakes in 16-bit rounding are no more wrong in float64 than the base is.
EXACTLY_WRONG = [name for name, mutant in MUTANTS.items() if mutant.dtypes[0] == "float32"]
# Not shown by the cases above, but by the judge's own in tests/benchmarks/zoo: they need
NOT_HERE = {
    "batch-modulo": "leading axes that broadcast in two places",
    "bias-far-below-hides": "a bias below -1e30",
    "delta-without-dweights": "dweights",
    "dweights-ignored": "dweights",
    "dsinks-of-first-tile": "sinks and more than a tile of queries",
    "dweights-dropped": "dweights",
    "mask-rank-2-as-padding": "as many samples as queries, and a mask of rank 2",
    "mask-rank-3-as-batch": "as many samples as heads, and a mask of rank 3",
    "nan-spreads-over-columns": "NaN in one column of a value",
    "no-keys-sink": "sinks and no keys",
    "packed-decode": "one query, shared heads and a window",
    "rank-2-weights": "rank 2, and the weights",
    "sink-minus-inf": "a sink of -inf",
    "window-in-int32": "a window of 2^31 - 1",
    "contents-of-first-call": "arrays that are reused",
    "packed-in-one-order": "packed inputs",
    "plan-of-other-strides": "two calls with different strides",
    "precision-of-first-call": "two calls with different dtypes",
    "value-scaled-with-key": "k and v in one array",
    "work-shared-by-threads": "two threads",
    "causal-alone-before-scale": "causal alone, a scale that is not positive, and E = D",
    "weights-from-rounded-lse": "float32, and a bias of -1e9",
}


GATES = {n for n, m in MUTANTS.items() if "gate" in inspect.signature(m.forward).parameters}
"""Wrong with a gate, or in the largest score alone: tests/testing/test_gates.py has them."""


@pytest.mark.every
@pytest.mark.parametrize("name", [n for n in EXACTLY_WRONG if n not in GATES])
def test_mutant_is_wrong_by_far(name: str) -> None:
    mutant = MUTANTS[name]
    detected = any(DETECTS[rule](mutant) for rule in mutant.killed_by if rule in DETECTS)
    assert detected == (name not in NOT_HERE)


SIZE = r"(\d+|[bhtsdeBHKTSDEG])"
SIDE = rf"{SIZE}( ([+−·%]|//) {SIZE})*"
OPTION = "(mask|causal|window|bias|softcap|scale|sinks|dropout|gate|d?lse|d?weights)"
SPECIAL = "rows that see no key|hidden keys|contents"
ATOM = rf"({SIDE} [≥≤<>=≠] {SIDE}|{OPTION}( or {OPTION})*|{SPECIAL})"
PLACE = re.compile(rf"(backward: )?(everywhere|{ATOM}( and {ATOM})*)")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("everywhere", True),
        ("backward: t = T − 1", True),
        ("h // K % K ≠ h // G and mask or bias", True),
        ("rows that see no key and sinks", True),
        ("", False),
        ("s > 16 or mask", False),
        ("s >= 16", False),
        ("everywhere and mask", False),
        ("backward:", False),
        ("q ≥ 1", False),
    ],
)
def test_places_are_read(text: str, read: bool) -> None:
    assert bool(PLACE.fullmatch(text)) == read


def test_every_mistake_has_step_and_place() -> None:
    assert [m.name for m in MISTAKES.values() if m.step not in STEPS] == []
    assert [(m.name, m.where) for m in MISTAKES.values() if not PLACE.fullmatch(m.where)] == []


def test_register_is_well_formed() -> None:
    assert len(EXACTLY_WRONG) >= REQUIRED
    assert set(DETECTS) <= {*PROPERTIES, "structure"}
    families = [mutant.family for mutant in MUTANTS.values()]
    assert families == sorted(families)
    features = inspect.signature(base).parameters
    for name, mutant in MUTANTS.items():
        assert mutant.name == name
        assert mutant.killed_by
        assert mutant.sentence.endswith("."), name
        assert mutant.source == "inferred" or mutant.source.count("#") == 1, name
        assert features.items() <= inspect.signature(mutant.forward).parameters.items()
    sentences = {mutant.sentence for mutant in MUTANTS.values()}
    assert len(sentences) == len(MUTANTS)


@pytest.mark.parametrize("base_class", [Attention, Online])
@pytest.mark.parametrize(("T", "S"), [(37, 53), (53, 37)])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (19, 3)}])
def test_base_may_be_aligned_top_left(base_class, T, S, options) -> None:
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((2, n, 5)) for n in (T, S, S))
    made = base_class()
    made.alignment = "top_left"
    changes = {"causal": "top_left"} if "causal" in options else {"alignment": "top_left"}
    exact = evaluate(npattn.Problem(q, k, v, **options | changes)).out
    np.testing.assert_allclose(made.forward(q, k, v, **options), exact, rtol=1e-12, atol=1e-13)
    assert not np.allclose(base_class().forward(q, k, v, **options), exact, atol=1e-3)


def test_causal_alone_before_the_scale_is_wrong_on_one_path() -> None:
    """As PyTorch's CPU kernel, which other options keep from being used."""
    mutant = MISTAKES["causal-alone-before-scale"]
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((2, 3, n, 5)) for n in (7, 11, 11))
    plain = {"causal": True, "scale": -0.5}
    assert np.isnan(mutant.forward(q, k, v, **plain)[..., :-1, :]).all()
    for options in (
        {"mask": np.ones((7, 11), bool)},
        {"bias": np.zeros((7, 11))},
        {"scale": 0.5},
        {"causal": False},
    ):
        o = mutant.forward(q, k, v, **plain | options)
        np.testing.assert_array_equal(o, base(q, k, v, **plain | options))
    wide = np.concatenate([v, v], -1)
    np.testing.assert_array_equal(mutant.forward(q, k, wide, **plain), base(q, k, wide, **plain))


def test_weights_rebuilt_from_a_rounded_lse_are_1_in_a_row_of_large_bias() -> None:
    mutant = MISTAKES["weights-from-rounded-lse"]
    rng = np.random.default_rng(13)
    q, k, v, do = (rng.standard_normal((1, n, 5), np.float32) for n in (3, 7, 7, 3))
    for offset in (0.0, -1e9):
        bias = np.array([[0.0], [offset], [0.0]]) + np.zeros(7)
        out = mutant.forward(q, k, v, bias=bias)
        grads = mutant.backward(do, q, k, v, out=out, lse=None, bias=bias)
        right = base_backward(do, q, k, v, out=out, lse=None, bias=bias)
        p = base(q, k, v, bias=bias, return_weights=True)[1]
        surplus = np.where(offset, 1 - p[:, 1, :, None], 0) * do[:, 1, None]
        np.testing.assert_allclose(grads["v"], right["v"] + surplus, atol=1e-5)
        dp = do @ v.swapaxes(-1, -2)
        own = mutant.forward(q, k, v, bias=bias, return_weights=True)[1]
        delta = (own * dp).sum(-1, keepdims=True)  # as Σ dout · out
        ds = np.where([[[0], [offset], [0]]], dp - delta, p * (dp - delta))
        np.testing.assert_allclose(grads["q"], ds @ k / 5**0.5, atol=1e-5)
    assert not vars(mutant.backward.__self__)  # another thread may call it meanwhile
