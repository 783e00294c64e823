"""double_backward and hvp on tensors, held against those of npattn."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.oracle.api  # noqa: E402
import npattn.torch as nt  # noqa: E402
from npattn import biases  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402
from tests.backends import Torch  # noqa: E402
from tests.oracle.test_second_order import (  # noqa: E402
    ALL,
    CASES,
    COTANGENTS,
    INPUTS,
    assert_within,
    bounds,
    make,
)


def smooth(s, b, h, t, i):
    """The score_mod of those tests, on tensors."""
    return s + 0.5 * torch.sin(s + 0.25 * (t - i))


def on_tensors(case, conventions=None):
    backend = Torch("cpu")
    problem = case.problem
    if problem.score_mod is not None:
        problem = problem.replace(score_mod=smooth)
    return backend.evaluate(problem, conventions).fwd


def both(case, fwd):
    """Results of double_backward and of hvp, on tensors."""
    d = {n: torch.from_numpy(x) for n, x in case.cotangents.items()}
    along = {n: torch.from_numpy(x) for n, x in case.directions.items()}
    by_hand = nt.double_backward(fwd, **d, **{f"dd{n}": x for n, x in along.items()})
    return by_hand, nt.hvp(fwd, **d, **{f"d{n}": x for n, x in along.items()})


@pytest.mark.parametrize("size", ["primes", "headless"])
@pytest.mark.parametrize("options", [*CASES, (*ALL, "score_mod")], ids="-".join)
def test_both_give_what_npattn_gives(options, size):
    case = make(options, size, seed=9)
    second, change = both(case, on_tensors(case))
    allowed, want = bounds(case), case.hvp()
    for name in case.directions:
        for got in (second, change):
            got = getattr(got, name).numpy()
            assert_within(name, got, getattr(want, name), 2 * allowed[name])
    if "score_mod" not in options:
        want = case.double_backward()
        for name in COTANGENTS:
            got = getattr(second, name).numpy()
            assert_within(name, got, getattr(want, name), 2 * allowed[name])


FIELDS = {
    "fill": {"hidden_fill": -1.5},
    "late cap": {"softcap": "after_bias", "bias": "before_scale"},
    "mean": {"empty_row": "mean", "lse_base": "2", "kv_head": "tile"},
    "nan": {"empty_row": "nan"},
}


@pytest.mark.parametrize("name", FIELDS)
def test_conventions_are_those_of_npattn(name):
    case, conventions = (
        make(("softcap", "bias", "mask"), seed=10),
        npattn.Conventions(**FIELDS[name]),
    )
    mask = case.problem.mask & (np.arange(5)[:, None] != 2)
    case = case._replace(problem=case.problem.replace(mask=mask))
    fwd = npattn.oracle.api.evaluate(case.problem, conventions, engine="dense")
    want = case.hvp(fwd)
    # Those of a problem in the default meaning that rounds no less: nothing is hidden in it.
    allowed = bounds(case._replace(problem=case.problem.replace(mask=None)))
    for got in both(case, on_tensors(case, conventions)):
        for n in case.directions:
            one, other = getattr(got, n).numpy(), getattr(want, n)
            assert np.array_equal(np.isnan(one), np.isnan(other))
            assert_within(n, np.nan_to_num(one), np.nan_to_num(other), 2 * allowed[n])


def test_an_object_has_the_gradients_of_its_parameter():
    case, rng = make(("mask",), seed=11), np.random.default_rng(12)
    bias = biases.alibi(rng.standard_normal(6)) + rng.standard_normal((5, 7))
    along = (rng.standard_normal(6), rng.standard_normal((5, 7)))
    case = case._replace(problem=case.problem.replace(bias=bias))
    want = case.hvp(bias=along)
    tensors = {f"d{n}": torch.from_numpy(x) for n, x in case.directions.items()}
    d = {n: torch.from_numpy(x) for n, x in case.cotangents.items()}
    tensors["dbias"] = tuple(map(torch.from_numpy, along))
    got = nt.hvp(on_tensors(case), **d, **tensors)
    array = bias.to_array(5, 7, lead=(2,), H=6)
    tangent = bias.with_parameter(along).to_array(5, 7, lead=(2,), H=6)
    plain = case._replace(
        problem=case.problem.replace(bias=array), directions=case.directions | {"bias": tangent}
    )
    allowed = bounds(plain)
    for name in "qkv":
        got_x = getattr(got, name).numpy()
        assert_within(name, got_x, getattr(want, name), 2 * allowed[name])
    for one, other in zip(got.bias, want.bias, strict=True):
        limit = 2 * 12 * allowed["bias"].sum() * np.ones(other.shape)  # a distance is below 12
        assert_within("bias", one.numpy(), other, limit)


def test_parts_left_out_are_zeros():
    case = make(ALL)
    fwd = on_tensors(case)
    second = nt.double_backward(fwd, None)
    assert second.dlse is None
    assert not any(getattr(second, n).any() for n in (*INPUTS, "dout"))
    plain = on_tensors(make(()))
    assert nt.hvp(plain, plain.out).bias is None


def test_narrow_inputs_have_wide_results():
    case = make(("mask",), dtype=np.float16)
    second, change = both(case, on_tensors(case, npattn.Conventions(hidden_fill="min")))
    want = case.hvp(npattn.oracle.api.evaluate(case.problem, npattn.Conventions(hidden_fill="min")))
    visible = case._replace(problem=case.problem.replace(mask=None))
    for got in (second, change):
        assert got.q.dtype == torch.float64
        assert_within("q", got.q.numpy(), want.q, 2 * bounds(visible)["q"])


def test_what_is_not_supported_is_refused():
    case = make(("mask",))
    q, k, v = (torch.from_numpy(getattr(case.problem, n)) for n in "qkv")
    fwd, mixed = nt.forward(q, k, v), nt.forward(q, k, v, dtype=torch.bfloat16)
    for f in (nt.double_backward, nt.hvp):
        with pytest.raises(OptionError, match=r"mixed precision \(dtype bfloat16\)"):
            f(mixed, None)
        with pytest.raises(OptionError, match=r"fwd is a result of npattn\.forward; pass it to"):
            f(case.fwd, None)
        with pytest.raises(ShapeError, match=r"dout has shape \(3,\), but out has shape"):
            f(fwd, torch.ones(3))
    with pytest.raises(OptionError, match="got ddbias, but the problem has no bias"):
        nt.double_backward(fwd, None, ddbias=torch.ones(5, 7))
    fwd = nt.forward(q, k, v, bias=biases.alibi(6))
    with pytest.raises(DtypeError, match="ddbias is complex128, must be real"):
        nt.double_backward(fwd, None, ddbias=1j * np.ones(6))
