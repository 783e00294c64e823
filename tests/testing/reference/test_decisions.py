"""Selections and kinks: exact in every noisy run, so that a doubled gradient never passes."""

import numpy as np
import pytest

from npattn.testing import check
from npattn.testing.comparison import compare_arrays
from npattn.testing.reference import spread
from npattn.testing.reference.decisions import Decisions
from npattn.testing.reference.intermediates import Watched
from npattn.testing.reference.noise import Noise

torch = pytest.importorskip("torch")
F = torch.nn.functional
QUICK = {
    "examples": 3,
    "progress": False,
    "framework": "torch",
    "shrink": False,
    "diagnosis": False,
}
ROWS = {"x": "B C"}
LAYER = {"x": "B C", "w": "C E"}


def ask(f, g, inputs=ROWS, **changes):
    return check(f, reference=g, inputs=inputs, **{**QUICK, **changes})


def twice(g):
    """Return the right values with a doubled gradient."""
    return lambda *x: 2 * g(*x) - g(*x).detach()


def softmax(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def failed(report):
    return {o.rule.removeprefix("reference-") for o in report.outcomes if o.failed}


SELECTIONS = {
    "amax": (softmax, ROWS),
    "absmax": (lambda x: x / x.abs().amax(-1, keepdim=True), ROWS),
    "relu": (lambda x, w: F.relu(x @ w), LAYER),
    "clamp": (lambda x: x.clamp(-0.5, 1) * x, ROWS),
    "sort": (lambda x: x.sort(-1).values.cumsum(-1), ROWS),
    "topk": (lambda x: x.topk(1, -1).values.exp(), ROWS),
    "median": (lambda x: x - x.median(-1, keepdim=True).values.exp(), ROWS),
    "max pool": (lambda x: F.max_pool1d(x[:, None], 2) * 3, {"x": "B 2C"}),
    "where": (lambda x, w: torch.where(x @ w > 0, x @ w, (x @ w).exp()), LAYER),
    "gather": (lambda x, i: x.gather(-1, i[:, None]).exp(), {"x": "B C", "i": "B int C"}),
    "mean": (lambda x: x.mean(-1), ROWS),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_doubled_gradient_fails(name):
    g, inputs = SELECTIONS[name]
    assert "dx" in failed(ask(twice(g), g, inputs))


RIGHT = {
    "one key": (
        F.scaled_dot_product_attention,
        lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1, dtype=torch.float32).to(q) @ v,
        {"q": "B H T D", "k": "B H S D", "v": "B H S D"},
        {"S": 1},
    ),
    "one class": (
        lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1),
        lambda x, i: x.logsumexp(-1) - 0.9 * x.gather(-1, i[:, None])[:, 0] - 0.1 * x.mean(-1),
        {"x": "B V", "i": "B int V"},
        {"V": 1, "B": 1},
    ),
    "detached": (lambda x: torch.softmax(x, -1), softmax, ROWS, {}),
    "relu": (lambda x, w: (x @ w).clamp(min=0), SELECTIONS["relu"][0], LAYER, {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_form_passes(name):
    f, g, inputs, sizes = RIGHT[name]
    if name == "one class":
        g_mean = lambda x, i: g(x, i).mean()  # noqa: E731
        assert ask(g_mean, f, inputs, sizes=sizes).passed
    assert name == "one class" or ask(f, g, inputs, sizes=sizes).passed


def test_sums_over_repeated_indices_in_float64():
    def counted(e, i):
        return F.one_hot(i, len(e)).to(e.dtype).sum(1) @ e / i.shape[1]

    inputs, sizes = {"e": "V C", "i": "B T int V"}, {"V": 1, "C": 1, "T": 33, "B": (3, 8)}
    assert ask(counted, lambda e, i: e[i].mean(1), inputs, sizes=sizes, dtypes=("float64",)).passed


def test_kinks_of_numpy_backwards_are_repeated():
    def relu(x):
        return np.maximum(x, 0) * x.dtype.type(3)

    def backward(dout, x):
        return (dout * 3 * (x > 0)).astype(x.dtype)

    def doubled(dout, x):
        return 2 * backward(dout, x)

    reference, words = (relu, backward), {"framework": "numpy"}
    assert ask(relu, reference, backward=backward, **words).passed
    assert failed(ask(relu, reference, backward=doubled, **words)) == {"dx"}


def test_noisy_runs_repeat_decisions_and_turns_take_others():
    u, x = 2.0**-10, torch.tensor([[1.0, 1.0 + 2**-12, -1.0], [2.0, 5.0, 2.0**-20]])
    watched, decisions = Watched(lambda x: (x.amax(-1), (x * 3 > 0)), "torch"), Decisions()

    def run(mode, noise=None):
        decisions.start(mode)
        with watched.running(noise, decisions):
            y = x.double()
            return watched(y)

    exact, positive = run("record")
    assert exact.tolist() == [1.0 + 2**-12, 5.0]
    for seed in range(8):
        near, _ = run("repeat", Noise(u, 2.0**-18, np.random.default_rng(seed)))
        assert torch.equal(near, exact)  # the largest of the exact run, and not rounded
    decisions.width = lambda square, size: np.full(square.shape, 2.0**-8)
    other, turned = run("turn")
    assert other.tolist() == [1.0, 5.0]
    assert (turned != positive).tolist() == [[False] * 3, [False, False, True]]
    assert decisions.turned


def test_elements_at_a_kink_are_left_out_and_said():
    """f takes the other side of a kink that lies within the error."""

    def g(x):
        y = x * 1.0
        return torch.where((x * 3) / 3 - x >= 0, y, 2 * y)

    report = ask(lambda x: 2 * x, g)
    assert report.verdict == "no verdict"
    assert "rounding crosses a kink there" in str(report)


def test_share_of_nan_is_said():
    report = ask(lambda x: x.abs().log(), torch.log, examples=6)
    assert any("of the elements were not judged" in x and "is NaN" in x for x in report.untested)


def test_check_that_sees_nothing_says_so(monkeypatch):
    def passes(name, got, exact, allowed):
        return compare_arrays(name, exact, exact, allowed)

    monkeypatch.setattr(spread, "compare_result", passes)
    report = ask(softmax, softmax, examples=1)
    assert report.verdict == "no verdict"
    assert "defect of npattn" in str(report)


FUSED = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x[..., None], 1)[..., 0],
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "losses": lambda x: F.cross_entropy(x, x.argmax(-1)) + F.smooth_l1_loss(x, x * x),
    "std": lambda x: x.std(-1, correction=1) + x.var() + x.norm(),
    "activations": lambda x: F.gelu(x) + F.silu(x) + F.softplus(x) + F.hardtanh(x) + F.elu(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "in place": lambda x: (x * 1.1).clamp_(min=0).add_(1).relu_(),
    "reductions": lambda x: x.amax((0, 1)) + x.max() + x.aminmax().max + x.cummax(0).values,
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_operations_are_rounded_inside(name):
    """They take float64, give the same numbers with no noise, and others with it."""
    f, x = FUSED[name], torch.randn(5, 6, dtype=torch.float64)
    watched, noise = Watched(f, "torch"), Noise(2.0**-20, 0.0, np.random.default_rng(0))
    results = []
    for own in (None, noise):
        leaf, decisions = x.clone().requires_grad_(), Decisions()
        with watched.running(own, decisions):
            y = watched(leaf)
            [dx] = torch.autograd.grad([y], [leaf], [torch.ones_like(y)])
        results.append((y.detach(), dx))
    exact, noisy = results
    leaf = x.clone().requires_grad_()
    plain = f(leaf).double()
    [dx] = torch.autograd.grad([plain], [leaf], [torch.ones_like(plain)])
    wide = 1e-5 if name == "softmax" else 1e-12
    torch.testing.assert_close(exact[0], plain.detach(), rtol=0, atol=wide)
    torch.testing.assert_close(exact[1], dx, rtol=0, atol=wide)
    assert 0 < float((noisy[0] - exact[0]).abs().max()) < 1e-3


def test_cotangents_are_rounded():
    """The gradient of a mean has no argument of the function in it."""
    watched, spreads = Watched(lambda x: x.mean(-1), "torch"), []
    dout = torch.full((50,), 1.1, dtype=torch.float64)
    for seed in range(3):
        with watched.running(Noise(2.0**-10, 0.0, np.random.default_rng(seed)), Decisions()):
            x = torch.ones(50, 3, dtype=torch.float64, requires_grad=True)
            [dx] = torch.autograd.grad([watched(x)], [x], [dout])
        spreads.append(float(dx.std()))
    assert min(spreads) > 1e-5


def test_scalar_whose_decisions_cross_is_left_out_whole():
    """A sum over kinks has one element, in bfloat16 within the error of all of them."""

    def g(x, y):
        return torch.nn.functional.l1_loss(x, y)

    report = check(
        lambda x, y: 2 * g(x, y) - g(x, y).detach(), reference=g, inputs={"x": "B C", "y": "B C"},
        dtypes="bfloat16", examples=5, progress=False, diagnosis=False, shrink=False,
    )  # fmt: skip
    assert report.verdict == "failed"
