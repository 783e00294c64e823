"""check_gradients of torch and JAX functions: their own autodiff, or derivatives by hand."""

import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.testing import check_gradients

RNG = np.random.default_rng(5)
X = RNG.standard_normal((3, 7))


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def cube(torch):
    """Return an autograd.Function whose gradients are wrong by two factors."""

    def make(factor, again=2):
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, dy, x):
                ctx.save_for_backward(dy, x)
                return factor * dy * x**2

            @staticmethod
            def backward(ctx, ddx):
                dy, x = ctx.saved_tensors
                return ddx * factor * x**2, again * factor * ddx * dy * x

        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**3

            @staticmethod
            def backward(ctx, dy):
                return Square.apply(dy, *ctx.saved_tensors)

        return Cube

    return make


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_autograd_function_is_given_as_a_class(torch, cube, dtype):
    x = torch.tensor(X, dtype=getattr(torch, dtype))
    assert check_gradients(cube(3), (x,)).passed
    report = check_gradients(cube(3.00001), (x,))
    assert not report.passed
    assert report.judgements[0].name == "dx"
    if dtype == "float64":
        assert report.failures[0].explanation == "dx is 1.0000033 times what it should be"


def test_numpy_arguments_of_an_autograd_function(cube):
    assert check_gradients(cube(3), (X,)).passed
    assert not check_gradients(cube(3.00001), (X,)).passed


@pytest.mark.parametrize("again", [2, 2.001])
def test_second_order(torch, cube, again):
    report = check_gradients(cube(3, again), (torch.tensor(X),), second_order=True)
    assert report.passed is (again == 2)
    assert [one.claimed_by for one in report.judgements] == ["vjp", "second order", "second order"]
    assert [one.name for one in report.failures] == ([] if again == 2 else ["dx"])


def test_second_order_of_derivatives_by_hand():
    with pytest.raises(OptionError, match="second_order needs the autodiff"):
        check_gradients(np.sin, (X,), vjp=lambda d, x: d * np.cos(x), second_order=True)


@pytest.mark.parametrize("factor", [1, 1.001])
def test_torch_function_with_a_vjp_by_hand(torch, factor):
    x = torch.tensor(X)
    report = check_gradients(torch.sin, (x,), vjp=lambda d, x: factor * d * x.cos())
    assert report.passed is (factor == 1)


def test_module_with_float32_parameters(torch):
    """It takes no float64: differences are of float32 calls."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Dropout(0.5), torch.nn.Tanh())
    report = check_gradients(module, (torch.tensor(X, dtype=torch.float32),))
    assert report.passed
    assert 1e-7 < report.judgements[0].power.factor < 0.2
    assert check_gradients(module[0], (torch.tensor(X).float(),)).judgements[0].name == "dinput"


def test_integers_and_several_results(torch):
    def f(table, index, scale):
        return table[index] * scale, {"sum": table.sum(0), "index": index}

    table = torch.tensor(X)
    report = check_gradients(f, (table, torch.tensor([2, 0, 2]), 3.0))
    assert report.passed
    assert [one.name for one in report.judgements] == ["dtable"]
    assert report.notes == ("without a derivative: index, scale",)


def test_detached_part_is_missed_by_autograd(torch):
    report = check_gradients(lambda x: x * x.detach(), (torch.tensor(X),))
    assert report.failures[0].explanation == "dx is 1/2 of what it should be"


@pytest.mark.parametrize("detach", [False, True])
def test_complex_tensors(torch, detach):
    z = torch.tensor(X + 1j * X[::-1])
    report = check_gradients(lambda z: z * (z.detach() if detach else z).conj() * z, (z,))
    assert report.passed is not detach


@pytest.mark.parametrize("factor", [1, 1.0001])
def test_jax_functions(factor):
    jax = pytest.importorskip("jax")

    @jax.custom_vjp
    def f(tree):
        return jax.numpy.sin(tree["x"]) * tree["z"].conj()

    def backward(tree, d):
        x, z = tree["x"], tree["z"]
        dx = (d * z.conj() * jax.numpy.cos(x)).real
        return ({"x": factor * dx, "z": (d * jax.numpy.sin(x)).conj()},)

    f.defvjp(lambda tree: (f(tree), tree), backward)
    with jax.enable_x64(True):
        tree = {"x": jax.numpy.asarray(X), "z": jax.numpy.asarray(X + 1j * X[::-1])}
        report = check_gradients(f, (tree,))
    assert report.passed is (factor == 1)
    assert [one.name for one in report.failures] == ([] if factor == 1 else ["dtree['x']"])


@pytest.mark.parametrize("second_order", [False, True])
def test_jax_in_float32(second_order):
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.asarray(X, dtype=jnp.float32)
    report = check_gradients(lambda x: jnp.tanh(x) @ x.T, (x,), second_order=second_order)
    assert report.passed


@pytest.mark.parametrize("seed", [5, 13])
def test_steps_that_fold_a_fast_wave_overrule_no_finer_ones(torch, seed):
    rng = np.random.default_rng(seed)
    x = torch.tensor(10 * rng.standard_normal((3, 5)), dtype=torch.float32)
    y = torch.tensor(rng.standard_normal(5), dtype=torch.float32)

    def f(x, y):
        z = torch.sin(torch.relu((x + y) * 1e3)).abs()
        return z.norm() * z

    assert not check_gradients(f, (x, y)).failures


def test_results_that_vanish_are_rounded_like_1(torch):
    rng = np.random.default_rng(5)
    x = torch.tensor(1e-6 * rng.standard_normal((3, 5)), dtype=torch.float32)
    y = torch.tensor(rng.standard_normal(5), dtype=torch.float32)

    def f(x, y):
        return torch.nn.functional.layer_norm(torch.exp(-((x * y) ** 2)), (5,))

    assert not check_gradients(f, (x, y)).failures


def test_a_module_and_integers_are_left_as_they_are(torch):
    norm = torch.nn.BatchNorm1d(7).double()
    before = {name: x.clone() for name, x in norm.state_dict().items()}
    index = np.array([2, 0, 1])

    def shifted(x, index):
        y = x[index] * 3
        index += 1
        index %= 3
        return y

    assert check_gradients(norm, (torch.tensor(X),)).passed
    assert all(torch.equal(x, before[name]) for name, x in norm.state_dict().items())
    x = RNG.standard_normal((3, 2))
    inverse = np.argsort(index)
    assert check_gradients(shifted, (x, index), vjp=lambda d, x, i: (3 * d[inverse], None)).passed
    assert (index == [2, 0, 1]).all()


def test_backward_that_changes_its_arrays_is_wrong(torch):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x, ctx.slope = x, x.cos()
            return x.sin()

    class Given(Function):
        @staticmethod
        def backward(ctx, d):
            return ctx.x.cos_().mul_(d)

    class Saved(Function):
        @staticmethod
        def backward(ctx, d):
            return ctx.slope.mul_(d)

    for kind, text in ((Given, "backward changes x, which"), (Saved, "what is saved for it")):
        report = check_gradients(kind, (torch.tensor(X),))
        assert text in report.failures[0].explanation


def test_once_differentiable_has_no_second_order(torch):
    from torch.autograd.function import once_differentiable

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx, d):
            return d * ctx.saved_tensors[0].cos()

    report = check_gradients(Sine, (torch.tensor(X),), second_order=True)
    assert report.reason == "not judged: dx"
    assert "once_differentiable" in str(report)


@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_saturated_units_are_no_alarm(torch, name):
    x = torch.tensor([0.5, 1.0, 9.0, 17.0])
    assert not check_gradients(getattr(torch, name), (x,)).failures


def test_jax_functions_that_cannot_be_traced_are_named():
    jnp = pytest.importorskip("jax.numpy")
    report = check_gradients(lambda x: jnp.tanh(x) if x.sum() > -9 else x, (jnp.ones(3),))
    assert report.passed
    assert "jax.jit cannot trace" in report.notes[0]
