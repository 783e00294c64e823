"""The register of mistakes, and what the base and single mistakes are said to do.

That the judge passes the base and finds every mistake: tests/benchmarks/zoo/test_mutants.py.
"""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

import npattn
from benchmarks.zoo.mutants import MUTANTS
from npattn.mistakes import MISTAKES, Attention, base, base_backward
from npattn.mistakes.online import Online
from npattn.mistakes.register import STEPS
from npattn.oracle.api import evaluate

REQUIRED = 120  # mutants

# Mistakes in 16-bit rounding are no more wrong in float64 than the base is.
EXACTLY_WRONG = [name for name, mutant in MUTANTS.items() if mutant.dtypes[0] == "float32"]


SIZE = r"(\d+|[bhtsdeBHKTSDEG])"
SIDE = rf"{SIZE}( ([+−·%]|//) {SIZE})*"
OPTION = "(mask|causal|window|bias|softcap|scale|sinks|dropout|gate|d?lse|d?weights)"
SPECIAL = "rows that see no key|hidden keys|contents"
ATOM = rf"({SIDE} [≥≤<>=≠] {SIDE}( or {OPTION})*|{OPTION}( or {OPTION})*|{SPECIAL})"
PLACE = re.compile(rf"(backward: )?(everywhere|{ATOM}( and {ATOM})*)")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("everywhere", True),
        ("backward: t = T − 1", True),
        ("h // K % K ≠ h // G and mask or bias", True),
        ("rows that see no key and sinks", True),
        ("", False),
        ("s > 16 or mask", True),
        ("mask or s > 16", False),
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


def test_mistakes_are_wrong_in_their_numbers_alone() -> None:
    """All return what the base returns; one that raised would not show that a rule sees it."""
    rng, heads = np.random.default_rng(17), ((4, 19), (2, 23), (2, 23), (4, 19))
    q, k, v, do = (rng.standard_normal((2, h, n, 5), np.float32) for h, n in heads)
    given = {"mask": rng.random((19, 23)) < 0.8, "causal": True, "window": (7, 0), "softcap": 3.0}
    given |= {"bias": rng.standard_normal((4, 1, 23), np.float32)}
    other = []
    for name, mutant in MISTAKES.items():
        with np.errstate(all="ignore"):
            out, lse = mutant.forward(q, k, v, **given, return_lse=True)
            backward = mutant.backward or base_backward
            grads = backward(do, q, k, v, out=out, lse=lse, **given)
        shapes = {n: np.shape(grads[n]) for n in ("q", "k", "v", "bias")}
        wanted = {"q": q.shape, "k": k.shape, "v": v.shape, "bias": (4, 1, 23)}
        if np.shape(out) != q.shape or shapes != wanted:
            other.append(name)
    assert other == ["dbias-not-summed"]  # which is not summed to the shape of bias
