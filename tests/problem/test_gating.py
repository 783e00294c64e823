"""Output gates held against loops, complex step, torch's autograd, and formulas [16]."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import npattn.problem.arrays
from npattn import Conventions
from npattn.certify import certify
from npattn.engines import loops
from npattn.errors import DtypeError, OptionError, ShapeError
from tests.engines.test_dense import U, assert_within, rounding

Array = np.ndarray[Any, Any]

B, H, K, T, S, D, E = 2, 6, 3, 5, 11, 13, 7
GATES = {
    "full": (B, H, T, E),
    "heads": (H, 1, 1),
    "matrix": (T, E),
    "rows": (B, H, T, 1),
    "columns": (1, E),
    "number": (1, 1),
    "sample": (B, 1, 1, 1),
}
EMPTY = np.arange(T)[:, None] != 2  # query 2 sees nothing


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def inputs() -> dict[str, Array]:
    return {"q": noise(B, H, T, D), "k": noise(B, K, S, D), "v": noise(B, K, S, E)}


def assert_agrees(fwd: npattn.Forward, conventions: Conventions | None = None) -> None:
    """Compare forward and backward with loops, within the errors of the ungated problem.

    A gate multiplies the error of o, and its product errs by one rounding more; the cotangent of o
    errs by one too, which is that of 2 u more in every gradient.
    """
    problem = fwd.problem
    assert problem.gate is not None
    out, lse, _ = loops.forward(problem, conventions)
    plain = problem.replace(gate=None)
    o = loops.forward(plain, conventions)[0]
    dout, dlse = noise(*out.shape, seed=1), noise(*lse.shape, seed=2)
    dlse = np.where(np.isfinite(loops.forward(plain)[1]), dlse, 0)
    gate = np.broadcast_to(problem.gate, o.shape)
    nats = loops.forward(plain)[1]
    allowed = rounding(plain, nats, loops.forward(plain)[2], gate * dout, dlse)
    o_error = allowed.out + 4 * U * S * abs(np.nan_to_num(o)).max()  # of a mean of values too
    assert_within("out", fwd.out, out, 2 * (abs(gate) * o_error + U * abs(np.nan_to_num(out))))

    got = npattn.backward(fwd, dout, dlse)
    want = loops.backward(problem, dout, dlse, conventions=conventions)
    for name in ("q", "k", "v"):
        size = abs(getattr(want, name))
        more = 4 * U * (np.nan_to_num(size).max() + T * S * H)
        assert_within(
            name, getattr(got, name), getattr(want, name), 2 * getattr(allowed, name) + more
        )
    each = abs(dout) * o_error + U * abs(dout * np.nan_to_num(o))
    n = out.size / problem.gate.size
    total = npattn.problem.arrays.sum_to(
        each + n * U * abs(dout * np.nan_to_num(o)), problem.gate.shape
    )
    assert_within("gate", got.gate, want.gate, 2 * total)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("kind", GATES)
def test_gates_agree_with_loops(kind: str, engine: str) -> None:
    gate = noise(*GATES[kind], seed=3)
    assert_agrees(npattn.forward(**inputs(), mask=EMPTY, gate=gate, engine=engine))


@pytest.mark.parametrize("empty_row", ["zero", "mean", "nan"])
@pytest.mark.parametrize("kind", ["full", "heads", "columns"])
def test_gate_multiplies_what_conventions_return(kind: str, empty_row: Any) -> None:
    meaning = Conventions(empty_row=empty_row)
    gate = noise(*GATES[kind], seed=3)
    fwd = npattn.forward(**inputs(), mask=EMPTY, gate=gate, conventions=meaning)
    plain = npattn.forward(**inputs(), mask=EMPTY, conventions=meaning)
    np.testing.assert_array_equal(fwd.out, gate * plain.out)
    assert_agrees(fwd, meaning)


@pytest.mark.parametrize("shape", [(T, E), (1, T, E), (1, 1), (1, 1, 1)])
def test_gate_of_one_head_without_an_axis(shape: tuple[int, ...]) -> None:
    q, v, gate = noise(T, D), noise(T, E), noise(*shape, seed=4)
    fwd = npattn.forward(q, q, v, gate=gate)
    np.testing.assert_array_equal(
        fwd.out, np.reshape(gate, gate.shape[-2:]) * npattn.attention(q, q, v)
    )
    got, want = (
        npattn.backward(fwd, noise(T, E, seed=5)),
        loops.backward(fwd.problem, noise(T, E, seed=5)),
    )
    assert got.gate is not None
    assert got.gate.shape == shape
    assert_within("gate", got.gate, want.gate, np.full(shape, 64 * T * E * S * U))


def test_lse_and_weights_do_not_depend_on_the_gate() -> None:
    plain, gated = npattn.forward(**inputs()), npattn.forward(**inputs(), gate=noise(T, E))
    np.testing.assert_array_equal(plain.lse, gated.lse)
    np.testing.assert_array_equal(plain.weights, gated.weights)


def test_gate_of_a_fully_masked_row() -> None:
    """Its output and its share in dgate are 0; a gate that is not finite makes NaN of the 0."""
    fwd = npattn.forward(**inputs(), mask=EMPTY, gate=noise(B, H, T, E))
    dgate = npattn.backward(fwd, np.ones_like(fwd.out)).gate
    assert (fwd.out[:, :, 2] == 0).all()
    assert dgate is not None
    assert (dgate[:, :, 2] == 0).all()
    gate = np.where(np.arange(T)[:, None] == 2, np.inf, 1.0)
    with np.errstate(invalid="ignore"):
        assert np.isnan(npattn.attention(**inputs(), mask=EMPTY, gate=gate)[:, :, 2]).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "gate"])
def test_complex_step_through_a_gate(name: str) -> None:
    """The derivative along a direction, by complex step, is the gradient times that direction."""
    given = {**inputs(), "gate": noise(H, 1, E, seed=3)}
    dout, along = noise(B, H, T, E, seed=4), noise(*given[name].shape, seed=5)
    h = 1e-200
    moved = {**given, name: given[name] + 1j * h * along}
    rise = (dout * (npattn.attention(**moved).imag / h)).sum()  # type: ignore[arg-type]
    fwd = npattn.forward(**given)  # type: ignore[arg-type]
    slope = getattr(npattn.backward(fwd, dout), name)
    size = (abs(slope) * abs(along)).sum() + abs(dout).sum()
    assert abs(rise - (slope * along).sum()) <= 8 * (T * S * H + D + E) * U * size


def test_jvp_is_the_transpose_of_backward() -> None:
    given, gate = inputs(), noise(H, 1, E, seed=3)
    fwd = npattn.forward(**given, gate=gate)
    along = {f"d{n}": noise(*x.shape, seed=6) for n, x in {**given, "gate": gate}.items()}
    dout = noise(*fwd.out.shape, seed=7)
    do, _ = npattn.jvp(fwd, **along)
    grads = npattn.backward(fwd, dout)
    slope = sum((getattr(grads, n[1:]) * x).sum() for n, x in along.items())
    size = (abs(dout) * abs(do)).sum() + abs(dout).sum()
    assert abs((dout * do).sum() - slope) <= 64 * T * S * H * U * size


def test_jvp_along_an_input_alone() -> None:
    fwd = npattn.forward(**inputs(), gate=noise(T, E))
    plain = npattn.forward(**inputs())
    dv = noise(B, K, S, E, seed=8)
    want = noise(T, E) * npattn.jvp(plain, dv=dv)[0]
    np.testing.assert_array_equal(npattn.jvp(fwd, dv=dv)[0], want)


def test_mixed_precision_rounds_o_before_the_gate() -> None:
    given, gate = inputs(), noise(H, T, E, seed=3)
    fwd = npattn.forward(**given, gate=gate, dtype="bfloat16")
    o = npattn.attention(**given, dtype="bfloat16")
    want = (gate.astype(o.dtype).astype("f4") * o.astype("f4")).astype(o.dtype)
    assert fwd.out.dtype == o.dtype
    np.testing.assert_array_equal(fwd.out, want)
    dgate = npattn.backward(fwd, np.ones(o.shape)).gate
    assert dgate is not None
    np.testing.assert_array_equal(dgate, o.astype("f4").sum(0))


def test_complex_gate_makes_the_computation_complex() -> None:
    out = npattn.attention(**inputs(), gate=noise(T, E) + 1j)
    np.testing.assert_array_equal(out, (noise(T, E) + 1j) * npattn.attention(**inputs()))
    assert out.dtype == np.complex128


@pytest.mark.every
@pytest.mark.parametrize(
    ("gate", "error", "words"),
    [
        (np.ones(H), ShapeError, r"pass gate\[:, None, None\]"),
        (np.ones(E), ShapeError, r"pass gate\[None, :\]"),
        (np.ones((B, H)), ShapeError, r"pass gate\[:, :, None, None\]"),
        (np.ones((B, H, T)), ShapeError, r"pass gate\[..., None\]"),
        (np.ones((B, T, E)), ShapeError, r"pass gate\[:, None\]"),
        (np.ones((T, S)), ShapeError, r"broadcast against \(..., H, T, E\) = \(2, 6, 5, 7\)"),
        (np.ones((3, B, H, T, E)), ShapeError, "must have rank 2 or more and broadcast"),
        (np.ones((T, E), bool), DtypeError, r"pass gate.astype\(float\)"),
        (np.ones((T, E), int), DtypeError, "gate is int64, must be floating"),
    ],
)
def test_error_of_a_wrong_gate(gate: Array, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        npattn.attention(**inputs(), gate=gate)


def test_what_does_not_take_a_gate_says_so() -> None:
    gated = npattn.forward(**inputs(), gate=noise(T, E), engine="dense")
    with pytest.raises(OptionError, match="'extended' beside a gate"):
        npattn.attention(**inputs(), gate=noise(T, E), precision="extended")
    with pytest.raises(OptionError, match="no bounds with a gate"):
        certify(gated)
    with pytest.raises(OptionError, match="got dgate, but the problem has no gate"):
        npattn.jvp(npattn.forward(**inputs()), dgate=noise(T, E))
    with pytest.raises(ShapeError, match="dgate has shape"):
        npattn.jvp(gated, dgate=noise(E, T))


def test_gate_is_not_written_to() -> None:
    gate = noise(H, 1, 1)
    gate.flags.writeable = False
    fwd = npattn.forward(**inputs(), gate=gate)
    npattn.backward(fwd, np.ones_like(fwd.out))
    assert fwd.problem.gate is gate
    assert fwd.problem.without_gate.gate is None
    assert npattn.backward(npattn.forward(**inputs()), np.ones_like(fwd.out)).gate is None


# --- the largest scores ---------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"mask": EMPTY},
    "cap": {"softcap": 0.5, "bias": noise(T, S, seed=9)},
    "causal": {"causal": "bottom_right", "window": (3, None)},
    "sinks": {"sinks": np.full(H, 9.0), "mask": EMPTY},
    "-inf": {"bias": np.where(noise(T, S, seed=9) > 0, 0, -np.inf)},
}


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_max_score_agrees_with_loops(options: dict[str, Any], engine: str) -> None:
    fwd = npattn.forward(**inputs(), **options, engine=engine)
    want = loops.max_score(fwd.problem)
    size = (D + 4) * D * abs(inputs()["q"]).max() * abs(inputs()["k"]).max() / math.sqrt(D) + 4
    assert_within("max_score", fwd.max_score, want, np.full(want.shape, 2 * U * size))
    assert (np.isneginf(fwd.max_score) == np.isneginf(want)).all()


@pytest.mark.parametrize(
    "meaning",
    [
        Conventions(hidden_fill=-3.0),
        Conventions(hidden_add=-2.0),
        Conventions(lse_base="2", lse_empty=0.0),
        Conventions(kv_head="tile", empty_row="mean"),
    ],
)
def test_max_score_under_conventions(meaning: Conventions) -> None:
    """It is of the keys in the softmax, in nats, and −inf for a row without any."""
    fwd = npattn.forward(**inputs(), mask=EMPTY, conventions=meaning)
    want = loops.max_score(fwd.problem, meaning)
    size = (D + 4) * D * abs(inputs()["q"]).max() * abs(inputs()["k"]).max() / math.sqrt(D) + 4
    assert_within("max_score", fwd.max_score, want, np.full(want.shape, 2 * U * size))


def test_max_score_of_nan_complex_and_extended() -> None:
    given = inputs()
    plain = npattn.forward(**given)
    exact = npattn.forward(**given, precision="extended")
    size = (D + 4) * D * abs(given["q"]).max() * abs(given["k"]).max() / math.sqrt(D)
    assert (abs(exact.max_score - plain.max_score) <= U * size).all()
    whole = {name: np.rint(3 * x) for name, x in given.items()}  # exact in any order of the sums
    turned = npattn.forward(whole["q"] * (1 + 0j), whole["k"], whole["v"])
    np.testing.assert_array_equal(turned.max_score, npattn.forward(**whole).max_score)
    given["q"][0, 0, 0, 0] = np.nan
    for engine, loop in itertools.product(("dense", "tiled"), (False, True)):
        fwd = npattn.forward(**given, engine=engine)
        top = loops.max_score(fwd.problem) if loop else fwd.max_score
        assert np.isnan(top[0, 0, 0])
        assert np.isfinite(top).sum() == top.size - 1


def test_max_score_has_the_shape_of_lse() -> None:
    q = noise(T, D)
    assert npattn.forward(q, q, q).max_score.shape == (T,)
    assert loops.max_score(npattn.Problem(q, q, q)).shape == (T,)
    assert npattn.forward(q, q[:0], q[:0]).max_score.tolist() == [-math.inf] * T
