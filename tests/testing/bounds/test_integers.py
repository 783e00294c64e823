"""Bounds of integer products hold for every correct rounding to them, and mistakes exceed them.

`Int8` is attention as SageAttention computes it, in plain NumPy: integers for q and k with a factor
for a block of rows, P and V in float16, sums over a tile of keys in float16. It shares no code with
the oracle or with the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.oracle.api import evaluate
from npattn.testing import Integers, Rounding, check, compare
from npattn.testing.bounds.allowed import bounds, deviations
from npattn.testing.bounds.integers import integer_errors
from npattn.testing.bounds.rounding import Units
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import recipes

pytestmark = pytest.mark.unmeasured  # other tests run these lines

Array = np.ndarray[Any, Any]

SIZES = {
    "B": (2, 1),
    "H": (2, 1, 3),
    "K": (1, 2),
    "T": (5, 1, 2, 129, 131),
    "S": (5, 1, 3, 63, 67, 131),
    "D": (3, 16, 67),
    "E": (2, 5, 17),
}
FULL = (67, 131, 19)  # T, S, D


@dataclass(frozen=True)
class Int8:
    """Attention whose q and k are integers; what `mistake` names is wrong."""

    largest: int = 127
    q_rows: int = 128
    k_rows: int = 64
    centred: bool = True
    tile: int = 64
    mistake: str = ""

    @property
    def rounding(self) -> Rounding:
        """The rounding model that it declares."""
        parts = {"q_rows": self.q_rows, "k_rows": self.k_rows, "centred": self.centred}
        own = Rounding.int8()
        return replace(own, integers=Integers(largest=self.largest, **parts), sum_block=self.tile)

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> Array:
        H, dtype = q.shape[-3], q.dtype
        k, v = (np.repeat(x, H // x.shape[-3], axis=-3) for x in (k, v))
        if self.centred:
            k = (k - k.mean(-2, keepdims=True, dtype=np.float32)).astype(dtype)
        q, k = q.astype(np.float32), k.astype(np.float32)
        scale = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
        qi, q_factor = self.quantise(q * scale, self.q_rows)
        ki, k_factor = self.quantise(k, self.k_rows)
        if self.mistake == "first factor":
            k_factor = np.broadcast_to(k_factor[..., :1, :], k_factor.shape)
        if self.mistake == "truncation":
            ki = np.trunc(k / np.where(k_factor == 0, 1, k_factor))
        s = (qi @ ki.swapaxes(-1, -2)) * (q_factor * k_factor.swapaxes(-1, -2))
        if self.mistake == "factor of 128":
            s = s * np.float32(127 / 128) ** 2
        if bias is not None:
            s = s + bias.astype(np.float32)
        T, S = s.shape[-2:]
        live = np.ones((T, S), bool) if mask is None else mask
        live = live & np.tri(T, S, dtype=bool) if causal else live
        return self.weigh(np.where(live, s, np.float32(-np.inf)), v).astype(dtype)

    def quantise(self, x: Array, rows: int) -> tuple[Array, Array]:
        """Return integers, and a factor for each row."""
        starts = range(0, x.shape[-2], rows)
        parts = [abs(x[..., i : i + rows, :]).max((-2, -1), keepdims=True) for i in starts]
        lengths = [len(range(x.shape[-2])[i : i + rows]) for i in starts]
        factors = [np.repeat(p, n, axis=-2) for p, n in zip(parts, lengths, strict=True)]
        factor = np.concatenate(factors, -2) / np.float32(self.largest)
        return np.rint(x / np.where(factor == 0, 1, factor)), factor

    def weigh(self, s: Array, v: Array) -> Array:
        """Return the softmax of s times v, one tile of keys after another."""
        m = np.full((*s.shape[:-1], 1), -np.inf, np.float32)
        total, out = np.zeros_like(m), np.zeros((*s.shape[:-1], v.shape[-1]), np.float32)
        for i in range(0, s.shape[-1], self.tile):
            part, values = s[..., i : i + self.tile], v[..., i : i + self.tile, :]
            top = np.maximum(m, part.max(-1, keepdims=True))
            anchor = np.where(np.isneginf(top), np.float32(0), top)
            p, again = np.exp(part - anchor), np.exp(m - anchor)
            total = total * again + p.sum(-1, keepdims=True)
            low = np.zeros(out.shape, np.float16)
            weights, values = p.astype(np.float16), values.astype(np.float16)
            for j in range(part.shape[-1]):
                low = low + weights[..., j, None] * values[..., None, j, :]
            if self.mistake == "no rescaling" and i:
                again = np.float32(1)
            out, m = out * again + low, top
        return out / np.where(total == 0, np.float32(1), total)


MODELS = (
    Int8(),
    Int8(tile=32, k_rows=32, q_rows=16),
    Int8(centred=False, k_rows=1000, q_rows=1),
    Int8(largest=7, k_rows=1),
)


@pytest.mark.broad
@pytest.mark.parametrize("function", MODELS, ids=str)
@settings(max_examples=max(settings.default.max_examples // 3, 1))
@given(data=st.data())
def test_correct_rounding_stays_within_the_bounds(function: Int8, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float16", "float32"]))
    features = frozenset({"mask", "bias", "causal", "scale"})
    structure = frozenset(
        {"rank 4", "T != S", "T > S", "K < H", "E != D", "D % 8", "B = 0", "S = 0"}
    )
    space = Space(dtype=dtype, sizes=SIZES, features=features, structure=structure)
    recipe = data.draw(recipes(space))
    problem = recipe.problem("top_left")
    names = {"mask", "bias", "causal", "scale"}
    options = {n: x for n in names if (x := getattr(problem, n)) is not None}
    got = function(problem.q, problem.k, problem.v, **options)
    (outcome,) = compare({"o": got}, problem, rounding=function.rounding)
    assert outcome.passed, f"{recipe} {outcome}"


def test_errors_have_the_size_of_the_model() -> None:
    T, S, D = FULL
    ratios = []
    for seed in range(11):
        recipe = Recipe(lead=(2,), H=2, K=2, T=T, S=S, D=D, E=11, dtype="float32", seed=seed)
        problem = recipe.problem()
        got = Int8()(problem.q, problem.k, problem.v)
        spread = deviations(problem, "float32", Rounding.int8())["o"]
        error = got - evaluate(problem).out
        ratios.append(np.mean((error / spread) ** 2))
    assert 0.3 < np.mean(ratios) < 1.3


def judge(function: Int8, **options: Any) -> Any:
    sizes = {"B": (2,), "H": (3,), "K": (3,), "T": (131, 5), "S": (67, 131), "D": (19,), "E": (11,)}
    options = {"rounding": Int8().rounding, "examples": 5, "sizes": sizes} | options
    own = Conventions(causal="top_left")
    return check(function, isolate=False, dtypes=("float32",), conventions=own, **options)


def convicted(function: Int8, **options: Any) -> bool:
    quick = {"only": ["agreement-o", "aggregate"], "diagnosis": False, "shrink": False}
    return not judge(function, strict=True, **quick, **options).passed


@pytest.mark.thorough
def test_judge_passes_the_kernel_under_its_model() -> None:
    report = judge(Int8(), strict=True, examples=2)
    assert report.passed, str(report)
    assert "rounding int8" in str(report)
    assert "precision: float32 like int8" in str(report)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_judge_convicts_the_kernel_under_another_model() -> None:
    assert not convicted(Int8())
    assert convicted(Int8(), rounding=None)
    assert convicted(Int8(largest=7))


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("mistake", ["first factor", "truncation", "factor of 128", "no rescaling"])
def test_judge_convicts_mistakes_in_the_integers(mistake: str) -> None:
    assert convicted(Int8(mistake=mistake))


def test_errors_are_those_of_blocks_of_rows() -> None:
    q = np.array([[1.0, -2.0], [4.0, 0.0], [8.0, 1.0]])
    keys = np.array([[1.0, 3.0], [3.0, 5.0]])
    unit = Units.of(Rounding.upcast(), "float64")
    errors = integer_errors(Integers(largest=4, q_rows=2), q, keys, unit)
    np.testing.assert_allclose(errors.q[:, 0], [0.5, 0.5, 1.0], rtol=1e-12)
    np.testing.assert_allclose(errors.k[:, 0], [0.625, 0.625], rtol=1e-12)
    centred = integer_errors(Integers(largest=4, centred=True), q, keys, unit)
    np.testing.assert_array_equal(centred.keys, [[-1, -1], [1, 1]])
    np.testing.assert_allclose(centred.k[:, 0], [0.125, 0.125], rtol=1e-12)
    np.testing.assert_allclose(centred.q[:, 0], [1, 1, 1], rtol=1e-12)


@pytest.mark.parametrize("name", ["largest", "q_rows", "k_rows"])
@pytest.mark.parametrize("number", [0, -3, True, 2.5])
def test_integers_refuse_numbers_below_one(name: str, number: Any) -> None:
    with pytest.raises(OptionError, match=f"{name} is {number}, must be an integer ≥ 1"):
        Integers(**{name: number})


def test_partial_sums_in_float16_widen_the_bound_of_o_alone() -> None:
    T, S, D = FULL
    problem = Recipe(H=2, K=2, T=T, S=S, D=D, E=11, dtype="float32", seed=3).problem()
    plain = Rounding(name="own", sum_block=64)
    low = replace(plain, partial="float16")
    exact, wide = (bounds(problem, "float32", own) for own in (plain, low))
    assert (wide["o"] > 20 * exact["o"]).all()
    np.testing.assert_array_equal(wide["lse"], exact["lse"])
