"""Operations one by one: as they are without noise, rounded with it, and turned at their kinks."""

import numpy as np
import pytest

from npattn.testing.reference.decisions import Decisions
from npattn.testing.reference.intermediates import Watched
from npattn.testing.reference.noise import Noise

torch = pytest.importorskip("torch")
X = np.array(
    [[0.75, -1.5, 2.25], [3.1, 0.75, -0.2], [1.3, 2.6, -3.9], [0.5, 0.7, 1.1], [4.2, -2, 0]]
)


def at(ufunc):
    def add_rows(x):
        y = np.zeros_like(x)
        ufunc.at(y, [0, 1, 0], x[:3])
        return y

    return add_rows


def without_run(x):
    """Use an array of their type that no run made."""
    y = type(x)(x.shape)
    y[...] = x
    return np.asarray([np.dot(y[0], y[1]), y.argmax(), *(y[0] + y[1])])


NUMPY = {
    "maximum into an array": (lambda x: np.maximum(x, 0, out=np.empty_like(x)), False),
    "product into an array": (lambda x: np.multiply(x, 1.1, out=np.empty_like(x)), True),
    "add at": (at(np.add), True),
    "subtract at": (at(np.subtract), True),
    "modf": (lambda x: np.modf(x * 1)[0], True),
    "split": (lambda x: np.split(x, [2])[1], False),
    "qr": (lambda x: np.linalg.qr(x).R, False),
    "float64": (lambda x: x.astype(np.float64), False),
    "integers": (lambda x: x.astype(int) * 1.5, False),
    "float32": (lambda x: x.astype(np.float32), False),
    "argmax of all": (lambda x: x.ravel()[x.argmax()], False),
    "argmax of columns": (lambda x: np.take_along_axis(x, x.argmax(0)[None], 0), False),
    "argmin of rows": (lambda x: np.take_along_axis(x, x.argmin(1, keepdims=True), 1), False),
    "floor": (lambda x: np.floor(x * 2), False),
    "absolute": (abs, False),
    "clip": (lambda x: np.clip(x, -1, 1), False),
    "maximum from 2.5 on": (lambda x: np.max(x, axis=1, initial=2.5, keepdims=True), False),
    "maximum of some": (lambda x: np.max(x, where=x > 0, initial=0), False),
    "without a run": (without_run, False),
}


def foreach(x):
    y = [x + 0.0, x * 1.0]
    torch._foreach_mul_(y, 1.1)
    return y[0]


TORCH = {  # name → (function, whether it rounds, dtypes that it casts to)
    "sum with narrow": (lambda x: x * torch.full((3,), 1.1), True, ""),
    "list of narrow": (lambda x: torch.cat([x * 1.5, torch.ones(1, 3)]), True, ""),
    "into narrow": (lambda x: torch.zeros(5, 3).add_(x) * 1.1, True, "float32"),
    "floor_": (lambda x: ((x * 4).round() / 3 * 3).floor_(), False, ""),
    "round_ to decimals": (lambda x: (x * 1.0).round_(decimals=1), False, ""),
    "softshrink backward": (lambda x: torch.ops.aten.softshrink_backward(x, x, 0.5), True, ""),
    "item": (lambda x: torch.tensor(x[0, 0].item()), False, ""),
    "equal": (lambda x: torch.tensor(torch.equal(x, x + 1)), False, ""),
    "foreach": (foreach, False, ""),
    "largest of rows": (lambda x: x.max(1).values, False, ""),
    "largest of a number": (lambda x: x[2, 1].max(0).values, False, ""),
    "order of a number": (lambda x: x[2, 1].sort().values, False, ""),
    "convolution": (lambda x: torch.nn.functional.conv1d(x.mT[None], x[:, :, None]), True, ""),
}


@pytest.mark.every
@pytest.mark.parametrize("name", NUMPY)
def test_operations_of_numpy(name):
    f, rounds = NUMPY[name]
    watched = three_runs(f, "numpy", X, f(X), rounds)
    assert watched.lengths == ({9} if name == "add at" else set())
    assert watched.narrowed == ({name} if name == "float32" else set())


@pytest.mark.every
@pytest.mark.parametrize("name", TORCH)
def test_operations_of_torch(name):
    f, rounds, narrow = TORCH[name]
    x = torch.from_numpy(X)
    assert three_runs(f, "torch", x, f(x), rounds).narrowed == {narrow} - {""}


def test_maxima_that_are_taken_as_constants():
    for largest in (lambda x: x.amax(1), lambda x: x.max(1).values):
        watched, x = Watched(largest, "torch"), torch.from_numpy(X).requires_grad_()
        for detached in (False, True):
            with watched.running(None, Decisions(), detached=detached):
                assert watched(x).requires_grad is not detached


def three_runs(f, framework, x, expected, rounds):
    """Compare an exact run, a noisy one, and one that may decide otherwise, but has no width."""
    watched, decisions = Watched(f, framework), Decisions()
    decisions.width = lambda squares, size: np.zeros(squares.shape)
    results = []
    for mode in ("record", "repeat", "turn"):
        noise = Noise(2.0**-12, 0.0, np.random.default_rng(3)) if mode == "repeat" else None
        decisions.start(mode)
        with watched.running(noise, decisions):
            results.append(np.asarray(watched(x)))
    exact, noisy, turned = results
    np.testing.assert_allclose(exact, expected, rtol=1e-6 if watched.narrowed else 1e-15)
    np.testing.assert_allclose(noisy, exact, atol=1e-2)
    assert np.array_equal(noisy, exact) != rounds
    assert np.array_equal(turned, exact)
    assert not decisions.turned
    return watched
