"""Output gates and the largest scores on tensors, against NumPy's and against autograd [11, 16]."""

import numpy as np
import pytest

import npattn
from npattn import Conventions
from npattn.errors import DtypeError, OptionError, ShapeError
from tests.problem.test_gating import EMPTY, GATES, B, E, H, K, S, T, inputs, noise

torch = pytest.importorskip("torch")

import npattn.torch as nt  # noqa: E402  after torch is known to be there

U = 2.0**-53
ROUNDINGS = 64 * T * S * H  # more than any sum here has, of terms that are at most 64


def tensors(**arrays):
    return {n: torch.tensor(x, requires_grad=True) for n, x in arrays.items()}


def close(got, want, name=""):
    got = np.asarray(got.detach() if isinstance(got, torch.Tensor) else got)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
    assert got.shape == want.shape, name
    assert np.nanmax(abs(np.nan_to_num(got - want)), initial=0) <= ROUNDINGS * U, name


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("kind", GATES)
def test_gates_agree_with_numpy(kind, engine):
    gate, dout = noise(*GATES[kind], seed=3), noise(B, H, T, E, seed=4)
    want = npattn.forward(**inputs(), mask=EMPTY, gate=gate)
    grads = npattn.backward(want, dout)
    given = tensors(**inputs(), gate=gate)
    fwd = nt.forward(**given, mask=EMPTY, engine=engine)
    close(fwd.out, want.out)
    by_hand = nt.backward(fwd, dout)
    by_autograd = torch.autograd.grad(fwd.out, list(given.values()), torch.tensor(dout))
    for name, own in zip(given, by_autograd, strict=True):
        close(getattr(by_hand, name), getattr(grads, name), name)
        close(own, getattr(grads, name), name)


@pytest.mark.parametrize("empty_row", ["zero", "mean", "nan"])
def test_gates_under_conventions(empty_row):
    meaning, gate = Conventions(empty_row=empty_row), noise(H, 1, 1, seed=3)
    dout = noise(B, H, T, E, seed=4)
    want = npattn.forward(**inputs(), mask=EMPTY, gate=gate, conventions=meaning)
    given = tensors(**inputs(), gate=gate)
    fwd = nt.forward(**given, mask=EMPTY, conventions=meaning)
    close(fwd.out, want.out)
    close(nt.backward(fwd, dout).gate, npattn.backward(want, dout).gate)
    (own,) = torch.autograd.grad(fwd.out, [given["gate"]], torch.tensor(dout))
    close(own, npattn.backward(want, dout).gate)


def test_no_cotangent_of_out_is_one_of_zero():
    fwd = nt.forward(**tensors(**inputs()), gate=noise(T, E))
    assert (nt.backward(fwd, None, torch.ones(B, H, T)).gate == 0).all()


@pytest.mark.parametrize("shape", [(T, E), (1, T, E), (1, 1)])
def test_second_derivatives_of_one_head(shape):
    q, gate = (torch.tensor(noise(*n), requires_grad=True) for n in ((T, E), shape))

    def f(q, gate):
        return nt.attention(q, q, q, gate=gate)

    assert torch.autograd.gradcheck(f, (q, gate))
    assert torch.autograd.gradgradcheck(f, (q, gate))
    fwd = nt.forward(q, q, q, gate=gate)
    assert nt.backward(fwd, fwd.out.detach()).gate.shape == shape
    assert fwd.max_score.shape == (T,)


def test_jvp_agrees_with_numpy():
    gate, along = noise(H, 1, E, seed=3), noise(H, 1, E, seed=5)
    want = npattn.jvp(npattn.forward(**inputs(), gate=gate), dq=inputs()["q"], dgate=along)
    fwd = nt.forward(**tensors(**inputs()), gate=gate)
    for got, exact in zip(nt.jvp(fwd, dq=inputs()["q"], dgate=along), want, strict=True):
        close(got, exact)
    with pytest.raises(ShapeError, match="dgate has shape"):
        nt.jvp(fwd, dgate=noise(T, E))
    q = torch.tensor(noise(T, E))
    assert nt.jvp(nt.forward(q, q, q, gate=noise(T, E)), dgate=noise(T, E))[0].shape == (T, E)


def test_mixed_precision_is_that_of_numpy():
    given, gate = inputs(), noise(H, T, E, seed=3)
    want = npattn.attention(**given, gate=gate, dtype="bfloat16").astype("f4")
    plain = {n: torch.tensor(x) for n, x in given.items()}
    got = nt.attention(**plain, gate=gate, dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    np.testing.assert_array_equal(got.float().numpy(), want)


def test_gates_around_fused_kernels():
    q = torch.tensor(noise(B, H, T, E), requires_grad=True)
    k = torch.tensor(noise(B, K, S, E, seed=1))
    gate = torch.tensor(noise(B, H, T, E, seed=2), requires_grad=True)
    fused = nt.forward(q, k, k, gate=gate, engine="fused")
    exact = nt.forward(q, k, k, gate=gate)
    close(fused.out, exact.out.detach().numpy())
    own, want = (torch.autograd.grad(x.out.sum(), [q, gate]) for x in (fused, exact))
    for got, other in zip(own, want, strict=True):
        close(got, other.numpy())
    one = nt.attention(q[0, 0], k[0, 0], k[0, 0], gate=gate[0, :1], engine="fused")
    assert one.shape == (T, E)
    with pytest.raises(OptionError, match="gate is float32, must be float64 as q"):
        nt.forward(q, k, k, gate=gate.float(), engine="fused")
    with pytest.raises(OptionError, match="does not support gate on tensors"):
        nt.hvp(exact, exact.out.detach(), dq=q.detach())
    with pytest.raises(OptionError, match="no max_score"):
        _ = fused.max_score


def test_errors_are_those_of_numpy():
    given = tensors(**inputs())
    with pytest.raises(ShapeError, match=r"pass gate\[:, None, None\]"):
        nt.attention(**given, gate=torch.ones(H))
    with pytest.raises(DtypeError, match=r"pass gate.astype\(float\)"):
        nt.attention(**given, gate=torch.ones(T, E, dtype=torch.bool))
    with pytest.raises(DtypeError, match="gate is complex128, must be real on tensors"):
        nt.attention(**given, gate=noise(T, E) + 1j)


@pytest.mark.parametrize("options", [{}, {"mask": EMPTY}, {"softcap": 0.5, "sinks": np.ones(H)}])
def test_max_score_agrees_with_numpy(options):
    want = npattn.forward(**inputs(), **options).max_score
    for engine in ("dense", "tiled"):
        fwd = nt.forward(**tensors(**inputs()), **options, engine=engine)
        assert not fwd.max_score.requires_grad
        got, live = fwd.max_score.numpy(), np.isfinite(want)
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
        assert (abs(got[live] - want[live]) <= ROUNDINGS * U).all()


# --- modules --------------------------------------------------------------------------------------


def module():
    return npattn.MultiHeadAttention.init(
        7, H, seed=0, head_size=4, value_size=5, num_kv_heads=K, out_size=11, gate=True
    )


def test_module_with_a_gate_agrees_with_numpy():
    mha, x, y = module(), noise(B, T, 7), noise(B, S, 7)
    ours = nt.MultiHeadAttention.from_numpy(mha)
    assert "gate=True" in repr(ours)
    query = torch.tensor(x, requires_grad=True)
    out, _ = ours(query, torch.tensor(y), torch.tensor(y))
    fwd, dout = mha.forward(x, y), noise(B, T, 11, seed=2)
    close(out, fwd.out)
    out.backward(torch.tensor(dout))
    grads = mha.backward(fwd, dout)
    close(query.grad, grads.query)
    close(ours.gate_proj.weight.grad.T, grads.wg)
    close(ours.gate_proj.bias.grad, grads.bg)


def test_module_with_a_gate_goes_back_and_is_pruned():
    mha, x = module(), noise(B, T, 7)
    ours = nt.MultiHeadAttention.from_numpy(mha)
    back = ours.to_numpy()
    assert back.parameters.keys() == mha.parameters.keys()
    for name, array in mha.parameters.items():
        np.testing.assert_array_equal(back.parameters[name], array)
    own = torch.tensor(x)
    close(ours.prune([0, 1])(own, own, own)[0], mha.prune([0, 1]).forward(x).out)
    with pytest.raises(OptionError, match="MultiheadAttention has no gate"):
        nt.MultiHeadAttention(12, 3, gate=True).to_torch()
    with pytest.raises(OptionError, match="only some of bq, bk, bv, bo, bg are there"):
        nt.MultiHeadAttention.from_numpy(mha.replace(bg=None))


@pytest.mark.parametrize("bias", [True, False])
def test_module_samples_its_gate_last(bias):
    """The other parameters of a seed are those of a module without a gate."""
    made = []
    for gate in (False, True):
        torch.manual_seed(0)
        made.append(nt.MultiHeadAttention(12, 3, bias=bias, gate=gate))
    plain, gated = (dict(m.named_parameters()) for m in made)
    assert set(gated) - set(plain) == {"gate_proj.weight", *(["gate_proj.bias"] if bias else [])}
    assert (plain["in_proj_weight"] == gated["in_proj_weight"]).all()
    limit = (6 / 24) ** 0.5
    assert 0.9 * limit < abs(gated["gate_proj.weight"]).max() <= limit
