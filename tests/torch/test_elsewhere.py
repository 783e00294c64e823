"""npattn.torch on a device that is not the CPU: the same bits, and nothing meets what is elsewhere.

The device is that of tests/elsewhere.py, which needs no accelerator.
"""

import copy

import numpy as np
import pytest

from tests.backends import OPTIONS, B, E, H, S, T, Torch, normal, problem

torch = pytest.importorskip("torch")
elsewhere = pytest.importorskip("tests.elsewhere", exc_type=ImportError)

import npattn.torch as nt  # noqa: E402  after it is known to be there
from npattn.profiles import PROFILES  # noqa: E402
from npattn.testing import check  # noqa: E402
from npattn.testing.adapters import child  # noqa: E402
from npattn.testing.device import sweep  # noqa: E402
from npattn.torch import tiles  # noqa: E402

NAMES = ["q", "k", "v", "bias", "sinks"]


@pytest.fixture(autouse=True)
def accepted_results(monkeypatch):
    """Tensors of the device are a subclass, which an accelerator's are not."""
    init = child.Torch.__init__

    def accept(self, device=None):
        init(self, device)
        self.plain += (elsewhere.Elsewhere,)

    monkeypatch.setattr(child.Torch, "__init__", accept)


@pytest.fixture(params=[pytest.param("one tile", marks=pytest.mark.nightly), "many"])
def tile(request, monkeypatch):
    """Both devices compute in the same tiles."""
    n = 2**18 if request.param == "one tile" else 13 * 11 * 6
    monkeypatch.setattr(tiles, "TILE", dict.fromkeys(["cpu", "elsewhere"], n))
    if request.param == "many":
        monkeypatch.setattr(tiles, "QUERIES", 13)
        monkeypatch.setattr(tiles, "CELL", 11)


def results(device, given, conventions=None):
    run = Torch(device).evaluate(given, conventions)
    do, dlse, dweights = normal(B, H, T, E), normal(B, H, T, seed=1), normal(B, H, T, S, seed=2)
    grads = run.backward(do, dlse, None if conventions else dweights)
    arrays = [run.out, run.lse, run.weights, *(getattr(grads, name) for name in NAMES)]
    if conventions is None:
        along = {f"d{name}": normal(*getattr(given, name).shape, seed=3) for name in "qkv"}
        arrays += run.jvp(**along)
    return [x for one in arrays for x in (one if isinstance(one, tuple) else (one,))]


def assert_same(one, other):
    assert len(one) == len(other)
    for x, y in zip(one, other, strict=True):
        assert (x is None) == (y is None)
        assert x is None or np.array_equal(x, y, equal_nan=True)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.broad
def test_options_give_the_same_bits_elsewhere(options):
    given = problem(**OPTIONS[options])
    assert_same(results("elsewhere", given), results("cpu", given))


@pytest.mark.parametrize("profile", ["npattn", "torch.sdpa", "jax.nn", "onnx@1.22"])
def test_conventions_give_the_same_bits_elsewhere(profile):
    given = problem(mask=normal(B, 1, T, S) < -1)  # some queries see nothing
    both = (
        results(device, given, PROFILES[profile].conventions) for device in ("elsewhere", "cpu")
    )
    assert_same(*both)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_give_the_same_bits_elsewhere(dtype):
    given = problem(causal="top_left", bias=normal(H, T, S), dtype=dtype)
    assert Torch("elsewhere").evaluate(given).fwd.out.dtype == getattr(torch, dtype)
    given = given.replace(dtype="float32")
    assert_same(results("elsewhere", given), results("cpu", given))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("hidden", [True, False])
def test_non_finite_inputs_give_the_same_bits_elsewhere(poison, hidden):
    given = problem(mask=np.arange(S)[None] != 11 if hidden else None, sinks=normal(H))
    given.k[..., 11, :], given.v[..., 11, 0] = poison, poison
    assert_same(results("elsewhere", given), results("cpu", given))


def test_second_derivatives_elsewhere():
    def grads(device):
        q, k, v = (
            torch.from_numpy(normal(1, 4, n, 3, seed=n)).to(device).clone().requires_grad_()
            for n in (5, 7, 7)
        )
        out = nt.attention(q, k, v, causal="bottom_right", softcap=3.0)
        first = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
        second = torch.autograd.grad(sum(g.cos().sum() for g in first), (q, k, v))
        return [x.detach().cpu() for x in (out, *first, *second)]

    there, here = grads("elsewhere"), grads("cpu")
    for one, other in zip(there[:4], here[:4], strict=True):
        assert torch.equal(one, other)
    # What comes to a tensor in several ways autograd adds up in an order of its own.
    for one, other in zip(there[4:], here[4:], strict=True):
        assert (one - other).abs().max() <= 4 * 5 * 7 * 2.0**-52 * other.abs().max()


def test_modules_move_with_their_parameters():
    torch.manual_seed(0)
    here = nt.MultiHeadAttention(12, 3, batch_first=True)
    there = copy.deepcopy(here).to("elsewhere")
    x, hides = torch.randn(2, 5, 12), torch.ones(5, 5).triu(1) > 0
    padding = torch.arange(5) >= torch.tensor([[3], [5]])
    given = (x, x, x, padding)
    expected = here(*given, attn_mask=hides)
    result = there(*(t.to("elsewhere") for t in given), attn_mask=hides.to("elsewhere"))
    for one, other in zip(result, expected, strict=True):
        assert torch.equal(one.cpu(), other)
    expected[0].sum().backward()
    result[0].sum().backward()
    for one, other in zip(there.parameters(), here.parameters(), strict=True):
        assert one.device == elsewhere.DEVICE
        assert torch.equal(one.grad.cpu(), other.grad)


def test_tensors_of_another_device_are_refused():
    q, k, v = (torch.zeros(1, 2, 3, 5, device="elsewhere") for _ in "qkv")
    with pytest.raises(nt.errors.OptionError, match=r"k is on cpu, must be on elsewhere:0 as q"):
        nt.attention(q, k.cpu(), v)
    fwd = nt.forward(q, k, v)
    with pytest.raises(nt.errors.OptionError, match=r"dout is on cpu, must be on elsewhere:0 as q"):
        nt.backward(fwd, torch.zeros(1, 2, 3, 5))


def test_mixing_devices_raises():
    """Without this, nothing above would show anything."""
    there, here = torch.ones(3, device="elsewhere"), torch.ones(3)
    assert there.device == elsewhere.DEVICE
    for mistake in (lambda: there + here, lambda: torch.where(there > 0, here, 0.0)):
        with pytest.raises(RuntimeError, match="a tensor of the CPU among tensors elsewhere"):
            mistake()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    assert torch.equal((there + 1).cpu(), here + 1)


@pytest.fixture
def draws(monkeypatch):
    """The device draws what the CPU draws, of the same lengths."""
    monkeypatch.setattr(torch, "Generator", elsewhere.Generator)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    for limits in (sweep.MAX_SCORES, sweep.LENGTHS):
        monkeypatch.setitem(limits, "elsewhere", limits["cpu"])


def ours(q, k, v, mask=None, *, causal=False, window=None, bias=None, scale=None, return_lse=False):
    fwd = nt.forward(
        q, k, v, mask, causal="bottom_right" if causal else False, window=window, bias=bias,
        scale=scale, dtype="float32",
    )  # fmt: skip
    out = fwd.out.to(q.dtype)
    return (out, fwd.lse) if return_lse else out


def wrong(q, k, v, mask=None, *, causal=False):
    return ours(q, k, v, mask, causal=causal, scale=2.0)


SIZES = {"B": (2,), "T": (5, 23, 67), "S": (3, 29, 61), "D": (16, 11), "E": (16, 7)}


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.usefixtures("draws")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_sweeps_elsewhere_and_on_the_cpu_agree(dtype):
    def outcomes(f, device):
        return check(
            f, framework="torch", device=device, sweep=12, only=["sweep", "long"], sizes=SIZES,
            dtypes=[dtype], diagnosis=False,
        ).outcomes  # fmt: skip

    for outcome, known in zip(outcomes(ours, "elsewhere"), outcomes(ours, "cpu"), strict=True):
        assert outcome.status == known.status == "passed"
        assert outcome.worst == known.worst > 0
    assert [outcome.status for outcome in outcomes(wrong, "elsewhere")] == ["failed", "failed"]
