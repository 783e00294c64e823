"""Gradients of the whole model, with every option, against a complex step through its loss."""

import dataclasses

import numpy as np
import pytest
from train.loop import sample_dropout_mask
from train.model import MAX_DISTANCE, forward, log_softmax, random_parameters
from train.model import loss_and_gradients as gradients_of
from train.settings import POSITIONS

from npattn import biases, positions

STEP = 1e-30
"""Imaginary step: its square is below any rounding, so that the derivative is not truncated."""
ROOT = np.finfo(np.float64).eps ** 0.5
"""√ε: at least the rounding of a derivative, and far below a lost term (as in dense.py)."""

OPTIONS = [
    *({"positions": name} for name in POSITIONS),
    {"dropout": 0.3},
    {"dropout": 0.3, "positions": "relative"},
    {"num_heads": 1, "positions": "sinusoidal", "dropout": 0.3},
]


def name_of(options):
    return "-".join(map(str, options.values()))


def noisy_parameters(settings, seed=1):
    """Parameters of which none is 0 or 1, and with every relu off its kink."""
    rng = np.random.default_rng(seed)
    p = random_parameters(settings, 5, 3, 4)
    p = {name: x + 0.1 * rng.standard_normal(x.shape) for name, x in p.items()}
    p["b1"] = p["b1"] + 9 * rng.choice([-1, 1], p["b1"].shape)
    return {name: x.astype(settings.precision.master) for name, x in p.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_gradients_are_the_complex_step(few, small, options):
    settings, rng = dataclasses.replace(small, **options), np.random.default_rng(2)
    p, mask = noisy_parameters(settings), sample_dropout_mask(settings, 0, few.x.shape)
    _, grads, steps = gradients_of(p, settings, few.x, few.y, mask)
    assert (steps.inner < 0).any()
    assert (steps.inner > 0).any()
    assert set(grads) == set(p)
    for name, x in p.items():
        way = rng.standard_normal(x.shape)
        moved = p | {name: x + 1j * STEP * way}
        log_p = log_softmax(forward(moved, settings, few.x, mask).logits)
        slope = -log_p[np.arange(len(few.y)), few.y].mean().imag / STEP
        product = grads[name] * way
        assert abs(slope - product.sum()) <= ROOT * abs(product).sum() + ROOT**2, name
        # A bias of all keys moves nothing: its gradient is 0 but for rounding.
        assert name == "bk" or abs(grads[name]).max() > ROOT, name


def test_gradient_of_every_bucket_that_is_used(few, small):
    settings = dataclasses.replace(small, positions="relative")
    _, grads, _ = gradients_of(noisy_parameters(settings), settings, few.x, few.y)
    used = biases.relative(np.arange(32.0)[:, None], max_distance=MAX_DISTANCE)
    rows = np.unique(used.to_array(T=5, S=5)).astype(int)
    assert len(rows) == 9  # distances −4 to 4
    assert (grads["table"][rows] != 0).all()
    assert (np.delete(grads["table"], rows, 0) == 0).all()


# --- positions ------------------------------------------------------------------------------------


def plain_logits(p, settings, x, factor=None):
    """The same model in plain formulas, with the weights multiplied by `factor`."""

    def norm(h, w, b):
        gap = h - h.mean(-1, keepdims=True)
        return gap / np.sqrt(gap.var(-1, keepdims=True) + 1e-5) * w + b

    T, H = x.shape[1], settings.num_heads
    D = settings.embed_dim // H
    h = x @ p["we"] + p["be"]
    if settings.positions == "learned":
        h = h + p["pos"]
    if settings.positions == "sinusoidal":
        h = h + positions.sinusoidal(T, settings.embed_dim)
    n = norm(h, p["g1"], p["c1"])
    q, k, v = (n @ p["w" + c] + p["b" + c] for c in "qkv")
    o = np.empty_like(q)
    for head in range(H):
        at = slice(head * D, (head + 1) * D)
        s = q[..., at] @ k[..., at].swapaxes(-1, -2) / np.sqrt(D)
        if settings.positions == "relative":
            for t in range(T):
                for key in range(T):
                    # T < 8: each distance has a bucket, those of later keys from 16 on
                    row = key - t + 16 if key > t else t - key
                    s[:, t, key] += p["table"][row, head]
        w = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
        o[..., at] = (w if factor is None else w * factor[:, head]) @ v[..., at]
    h = h + o @ p["wo"] + p["bo"]
    inner = norm(h, p["g2"], p["c2"]) @ p["w1"] + p["b1"]
    h = h + np.maximum(inner, 0) @ p["w2"] + p["b2"]
    return norm(h, p["g3"], p["c3"]).mean(1) @ p["wc"] + p["bc"]


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_logits_are_those_of_plain_formulas(few, small, options):
    settings = dataclasses.replace(small, **options)
    p, mask = noisy_parameters(settings), sample_dropout_mask(settings, 3, few.x.shape)
    factor = None if mask is None else mask / (1 - settings.dropout)
    expected = plain_logits(p, settings, few.x, factor)
    got = forward(p, settings, few.x, mask).logits
    assert abs(got - expected).max() <= ROOT * abs(expected).max()


def test_positions_matter(small, few):
    """Without positions the order of the rows is nothing to the model; with any it is."""
    for name in POSITIONS:
        settings = dataclasses.replace(small, positions=name)
        p = noisy_parameters(settings)
        there, back = (forward(p, settings, x).logits for x in (few.x, few.x[:, ::-1]))
        gap = abs(there - back).max()
        assert (gap <= ROOT) == (name == "none"), name


def test_parameters_that_positions_share_are_the_same(small):
    every = {n: random_parameters(dataclasses.replace(small, positions=n), 5, 3) for n in POSITIONS}
    shared = set.intersection(*map(set, every.values()))
    assert set(every["none"]) == shared
    assert set(every["learned"]) - shared == {"pos"}
    assert set(every["relative"]) - shared == {"table"}
    for p in every.values():
        for name in shared:
            np.testing.assert_array_equal(p[name], every["none"][name])


# --- dropout --------------------------------------------------------------------------------------


def test_evaluation_drops_nothing(few, small):
    """The logits of a model with dropout are those of one without, where no mask is given."""
    dropping = dataclasses.replace(small, dropout=0.5)
    p = noisy_parameters(small)
    with_it, without = (forward(p, s, few.x).logits for s in (dropping, small))
    np.testing.assert_array_equal(with_it, without)


def test_dropout_mask_is_of_the_seed_and_the_step(small):
    settings, shape = dataclasses.replace(small, dropout=0.25), (31, 5, 3)
    mask = sample_dropout_mask(settings, 7, shape)
    assert mask.shape == (31, 3, 5, 5)
    # Within five standard deviations of the mean of that many draws.
    deviation = np.sqrt(0.25 * 0.75 / mask.size)
    assert abs(mask.mean() - 0.75) < 5 * deviation
    np.testing.assert_array_equal(mask, sample_dropout_mask(settings, 7, shape))
    assert (mask != sample_dropout_mask(settings, 8, shape)).any()
    other = dataclasses.replace(settings, seed=1)
    assert (mask != sample_dropout_mask(other, 7, shape)).any()
    assert sample_dropout_mask(small, 7, shape) is None


def test_log_softmax_of_large_logits():
    log_p = log_softmax(np.array([[1e4, 0.0, -1e4]]))
    np.testing.assert_array_equal(log_p, [[0.0, -1e4, -2e4]])
