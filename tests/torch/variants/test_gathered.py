"""Gathered attention and its lists on tensors: those of NumPy, by autograd."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch as npt  # noqa: E402
from npattn import biases, masks, variants  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402
from npattn.testing.bounds.allowed import bounds  # noqa: E402
from npattn.testing.comparison import compare_arrays  # noqa: E402
from tests.variants.test_gathered import (  # noqa: E402
    LISTS,
    WRONG,
    B,
    E,
    H,
    M,
    S,
    T,
    draw_lists,
    sample,
)

GIVEN = {
    "lists alone": {},
    "every option": {
        "mask": np.tri(T, S, 7, bool), "causal": "bottom_right", "window": (6, None),
        "bias": np.random.default_rng(3).standard_normal((H, T, S)), "scale": 0.4, "softcap": 3.0,
        "sinks": np.random.default_rng(4).standard_normal(H),
        "dropout_mask": np.random.default_rng(5).random((B, 1, T, S)) < 0.8, "dropout_rate": 0.25,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", GIVEN)
@pytest.mark.parametrize("case", LISTS)
def test_is_that_of_numpy_and_so_are_gradients(case, options):
    given, lists = GIVEN[options], draw_lists(LISTS[case], n=6)
    arrays = dict(zip("qkv", sample(2), strict=True))
    arrays |= {name: given[name] for name in ("bias", "sinks") if name in given}
    want = variants.gathered.forward(*sample(2), lists, **given)
    normal = np.random.default_rng(6).standard_normal
    do, dlse = normal(want.out.shape), normal(want.lse.shape)
    dlse[np.isneginf(want.lse)] = 0
    grads = variants.gathered.backward(want, do, dlse)
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    got = npt.variants.gathered.forward(**given | tensors | {"indices": torch.tensor(lists)})
    torch.autograd.backward((got.out, got.lse), (torch.tensor(do), torch.tensor(dlse)))
    listed = variants.gathered.index_mask(lists, S) & given.get("mask", np.True_)
    problem = want.problem.replace(mask=np.broadcast_to(listed, (B, H, T, S)))
    allowed = bounds(problem, np.float64, dout=do, dlse=dlse)
    pairs = {"o": (got.out.detach(), want.out), "lse": (got.lse.detach(), want.lse)}
    pairs |= {f"d{name}": (x.grad, getattr(grads, name)) for name, x in tensors.items()}
    for name, (x, exact) in pairs.items():
        line = compare_arrays(name, x.numpy(), exact, 2 * allowed[name])  # both round
        assert line.passed, str(line)
    assert got.weights.shape == (B, H, T, 6)
    at = np.broadcast_to(np.where(lists < 0, 0, lists), want.weights.shape)
    room = 2 * np.take_along_axis(allowed["weights"], at, -1)
    line = compare_arrays("weights", got.weights.detach().numpy(), want.weights, room)
    assert line.passed, str(line)


def test_objects_are_masks_and_biases_too():
    q, k, v = map(torch.tensor, sample(7))
    lists = draw_lists((B, 1, T), n=6)
    slopes = torch.rand(H, dtype=torch.float64, requires_grad=True)
    given = {"mask": masks.causal(alignment="top_left"), "bias": npt.biases.alibi(slopes)}
    out = npt.variants.gathered.attention(q, k, v, lists, **given)
    out.sum().backward()
    own = given | {"bias": biases.alibi(slopes.detach().numpy())}
    want = variants.gathered.forward(*sample(7), lists, **own)
    wanted = variants.gathered.backward(want, np.ones_like(want.out)).bias
    problem = want.problem.materialise()
    visible = problem.mask & variants.gathered.index_mask(lists, S)
    problem = problem.replace(mask=np.broadcast_to(visible, (B, H, T, S)))
    allowed = bounds(problem, np.float64, dout=np.ones_like(want.out))
    room = abs(own["bias"].gradient(allowed["dbias"]))
    assert (abs(slopes.grad.numpy() - wanted) <= 2 * room).all()
    assert (abs(out.detach().numpy() - want.out) <= 2 * allowed["o"]).all()


def test_keys_in_no_list_get_no_gradient_whatever_they_hold():
    q, k, v = sample(8)
    k[..., -2:, :], v[..., -2:, :] = np.nan, np.inf
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    npt.variants.gathered.attention(*tensors, draw_lists((T,), keys=S - 2)).sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)
    assert not tensors[1].grad[..., -2:, :].any()
    assert not tensors[2].grad[..., -2:, :].any()


def test_one_head_without_an_axis():
    q, k, v = (torch.tensor(x[0, 0]) for x in sample(9))
    got = npt.variants.gathered.forward(q, k, v, draw_lists((T,)))
    assert (got.out.shape, got.lse.shape, got.weights.shape) == ((T, E), (T,), (T, M))


@pytest.mark.parametrize("masked", [False, True])
def test_top_k_is_that_of_numpy(masked):
    rng = np.random.default_rng(10)
    scores = rng.integers(-2, 3, (2, 3, T, S)).astype(float)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    mask = rng.random((T, S)) < 0.6 if masked else None
    for n in (0, 3, S + 2):
        found = npt.variants.gathered.top_k(
            torch.tensor(scores), n, None if mask is None else torch.tensor(mask)
        )
        assert np.array_equal(found, variants.gathered.top_k(scores, n, mask))


def test_lists_are_made_on_tensors_too():
    lists = torch.tensor([[3, 1, 3, -1], [0, 0, 2, 2]])
    assert npt.variants.gathered.drop_repeats(lists).tolist() == [[3, 1, -1, -1], [0, -1, 2, -1]]
    mask = npt.variants.gathered.index_mask(lists, 4)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[False, True, False, True], [True, False, True, False]]
    assert torch.equal(npt.variants.gathered.index_mask(lists.numpy(), 4), mask)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists_are_errors(case):
    lists, error, match = WRONG[case]
    with pytest.raises(error, match=match):
        npt.variants.gathered.attention(*map(torch.tensor, sample()), torch.tensor(lists))


def test_wrong_arguments_are_errors():
    q, k, v = map(torch.tensor, sample())
    lists, scores = draw_lists((T,)), torch.zeros(T, S)
    with pytest.raises(OptionError, match="has no option score_mod"):
        npt.variants.gathered.attention(q, k, v, lists, score_mod=None)
    with pytest.raises(DtypeError, match="float16, must be float32 or float64"):
        npt.variants.gathered.attention(q, k, v, lists, dtype=torch.float16)
    with pytest.raises(DtypeError, match="scores is ndarray, must be a tensor"):
        npt.variants.gathered.top_k(scores.numpy(), 2)
    with pytest.raises(DtypeError, match="mask is list, must be a tensor"):
        npt.variants.gathered.top_k(scores, 2, [[True]])
    with pytest.raises(DtypeError, match=r"mask is int64, must be bool"):
        npt.variants.gathered.top_k(scores, 2, torch.ones(T, S, dtype=torch.int64))
    with pytest.raises(OptionError, match="scores has NaN"):
        npt.variants.gathered.top_k(scores * torch.nan, 2)
    with pytest.raises(ShapeError, match="mask has shape"):
        npt.variants.gathered.top_k(scores, 2, torch.ones(S, T, dtype=torch.bool))
