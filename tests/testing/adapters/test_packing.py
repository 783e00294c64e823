"""Functions that take several of q, k and v in one array are judged as they are."""

import inspect

import numpy as np
import pytest

import npattn
from npattn.cache import pack, unpack
from npattn.errors import OptionError
from npattn.problem import Cotangents
from npattn.testing import Implementation, Recipe, check
from npattn.testing.adapters.base import ImplementationError, ResultError
from npattn.testing.adapters.packing import Packing, read_packing

QUICK = {"examples": 3, "framework": "numpy", "shrink": False, "diagnosis": False}
RULES = ["agreement-o", "agreement-dq", "agreement-dk", "agreement-dv", "shape-dtype"]
SIZES = {"lead": (2,), "H": 5, "K": 5, "T": 7, "S": 7, "D": 11, "E": 11}


def attend(q, k, v, causal):
    causal = "bottom_right" if causal else False
    return npattn.attention(q, k, v, causal=causal, dtype=q.dtype).swapaxes(1, 2)


def gradients(dout, q, k, v, causal):
    fwd = npattn.forward(q, k, v, causal="bottom_right" if causal else False)
    grads = npattn.backward(fwd, dout.swapaxes(1, 2))
    return grads.q, grads.k, grads.v


def qkv_packed(qkv, causal=False):
    return attend(*unpack(qkv), causal)


def qkv_packed_backward(dout, qkv, causal=False):
    return pack(*gradients(dout, *unpack(qkv), causal)).astype(qkv.dtype)


def kv_packed(q, kv, causal=False):
    return attend(q.swapaxes(1, 2), *unpack(kv), causal)


def kv_packed_backward(dout, q, kv, causal=False):
    dq, dk, dv = gradients(dout, q.swapaxes(1, 2), *unpack(kv), causal)
    return dq.swapaxes(1, 2).astype(q.dtype), pack(dk, dv).astype(q.dtype)


def by_head(qkv, causal=False):
    return attend(*unpack(qkv, order="heads"), causal)


def in_loops(qkv, causal=False):
    """The same in loops over heads and queries, which rounds in another order."""
    B, T, _, H, D = qkv.shape
    out = np.zeros((B, T, H, D), qkv.dtype)
    for b, t, h in np.ndindex(B, T, H):
        n = t + 1 if causal else T
        s = (qkv[b, :n, 1, h] * qkv[b, t, 0, h]).astype(float).sum(-1) / (D**0.5 or 1)
        p = np.exp(s - s.max())
        out[b, t, h] = (p[:, None] * qkv[b, :n, 2, h]).sum(0) / p.sum()
    return out


KERNELS = {
    "qkv": (qkv_packed, qkv_packed_backward, {}),
    "kv": (kv_packed, kv_packed_backward, {}),
    "by head": (by_head, None, {"qkv": "packed q, k and v by head"}),
    "in loops": (in_loops, None, {}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_correct_functions_pass(name):
    f, backward, rename = KERNELS[name]
    rules = [*RULES, "inputs-unchanged", "views", "repeatable"]
    report = check(f, backward=backward, rename=rename, only=rules, **QUICK)
    assert report.passed, str(report)
    judged = {o.rule for o in report.outcomes if o.status == "passed"}
    assert ("agreement-dk" in judged) == (backward is not None)
    reads = Implementation(f, rename=rename, framework="numpy").reads
    assert any("as one array (B," in line for line in reads)


def changed(backward, change):
    """A backward of the same parameters, whose result is changed."""

    def wrong(*args, **kwargs):
        return change(backward(*args, **kwargs))

    wrong.__signature__ = inspect.signature(backward)
    return wrong


def without_dk(dqkv):
    dqkv = dqkv.copy()
    dqkv[:, :, 1] = 0
    return dqkv


def with_dq_twice(dqkv):
    return dqkv * np.array([2, 1, 1], dqkv.dtype)[:, None, None]


OF_KEYS = {"agreement-dk", "agreement-dv"}
MISTAKES = {
    "dk is missing": ("qkv", without_dk, {"agreement-dk"}),
    "dk and dv change places": ("qkv", lambda x: x[:, :, [0, 2, 1]], OF_KEYS),
    "dk and dv of kv change places": ("kv", lambda x: (x[0], x[1][:, :, ::-1]), OF_KEYS),
    "dq twice": ("qkv", with_dq_twice, {"agreement-dq"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_a_packed_gradient_are_found(mistake):
    name, change, rules = MISTAKES[mistake]
    f, backward, _ = KERNELS[name]
    report = check(f, backward=changed(backward, change), only=RULES, **QUICK)
    assert {o.rule for o in report.outcomes if o.status == "failed"} == rules


@pytest.mark.parametrize("order", ["parts", "heads"])
def test_the_other_order_is_the_cause(order):
    other = {"parts": "heads", "heads": "parts"}[order]
    rename = {"qkv": "packed q, k and v by head"} if other == "heads" else {}

    def f(qkv):
        B, T = qkv.shape[:2]
        D = qkv.shape[-1]
        shape = (B, T, 3, -1, D) if order == "parts" else (B, T, -1, 3, D)
        return attend(*unpack(qkv.reshape(shape), order=order), False)

    report = check(f, rename=rename, only=["agreement-o"], **{**QUICK, "diagnosis": True})
    place = "before" if order == "parts" else "behind"
    assert report.causes[0].text == f"it reads its packed array with the parts {place} the heads"


def test_gradients_come_by_name_too():
    f, backward, _ = KERNELS["qkv"]
    recipe = Recipe(**SIZES)
    problem = recipe.problem()
    cotangents = Cotangents(recipe.cotangents(problem).dout, None)
    found = []
    for change in (lambda x: x, lambda x: (x,), lambda x: {"qkv": x}):
        one = Implementation(f, backward=changed(backward, change), framework="numpy")
        found.append(dict(one.gradients(problem, cotangents).pairs))
    assert [{*x} for x in found] == [{"dq", "dk", "dv"}] * 3
    for name in ("dq", "dk", "dv"):
        assert len({x[name].tobytes() for x in found}) == 1
    one = Implementation(f, backward=changed(backward, lambda x: (x, x)), framework="numpy")
    with pytest.raises(ResultError, match=r"must return \(dqkv\) or a mapping"):
        one.gradients(problem, cotangents)
    one = Implementation(f, backward=changed(backward, lambda x: x[:, :, :2]), framework="numpy")
    with pytest.raises(ImplementationError, match="must be that of qkv with 3 parts"):
        one.gradients(problem, cotangents)


def test_what_is_not_of_one_shape_is_refused():
    f = Implementation(qkv_packed, framework="numpy")
    for change in ({"K": 1}, {"S": 5}, {"E": 13}):
        with pytest.raises(ImplementationError, match="q, k and v of several shapes") as raised:
            f.forward(Recipe(**(SIZES | change)).problem())
        assert raised.value.is_refusal
    with pytest.raises(ImplementationError, match="arrays of 2 axes"):
        f.forward(Recipe(**(SIZES | {"lead": None})).problem())
    with pytest.raises(ImplementationError, match="packed, quantized, parts or lists"):
        f.call({}, {})


def test_what_cannot_come_with_a_packed_array_is_an_error():
    with pytest.raises(OptionError, match=r"must be BTHD: .* as one array \(B, T, 3, H, D\)"):
        Implementation(qkv_packed, framework="numpy", layout="BHTD")

    def quantized(qkv, q_descale, k_descale, v_descale):
        return qkv[:, :, 0]

    with pytest.raises(OptionError, match="quantized= needs q, k and v apart"):
        Implementation(quantized, framework="numpy", quantized="fp8")


def test_the_words_for_orders_are_read():
    assert read_packing("packed q, k and v by head") == Packing("qkv", "heads")
    assert read_packing("packed k and v, one behind the other") == Packing("kv", "first")
    assert read_packing("packed k and v, heads before slots") == Packing("kv", "parts")
    assert read_packing("mask") is None


@pytest.mark.parametrize("order", ["parts", "heads", "first"])
@pytest.mark.parametrize("pages", [False, True])
def test_arrays_are_packed_and_parted_along_an_axis(order, pages):
    packing = Packing("kv", order, pages)
    k, v = np.random.default_rng(5).standard_normal((2, 3, 5, 7, 11))
    packed = packing.pack({"k": k, "v": v, "q": k})
    assert {*packed} == {"q", "kv"}
    axis = {"parts": 1 if pages else 2, "heads": 3, "first": 0}[order]
    assert packed["kv"].shape[axis] == 2
    apart = packing.unpack(packed["kv"])
    np.testing.assert_array_equal(apart["dk"], k)
    np.testing.assert_array_equal(apart["dv"], v)


def test_tensors_are_differentiated():
    torch = pytest.importorskip("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def f(qkv, causal=False):
        return sdpa(*unpack(qkv), is_causal=causal).transpose(1, 2)

    arguments = {**QUICK, "framework": "torch"}
    report = check(f, only=RULES, **arguments)
    assert report.passed, str(report)
    assert "agreement-dk" in {o.rule for o in report.outcomes if o.status == "passed"}

    def detached(qkv, causal=False):
        q, k, v = unpack(qkv)
        return sdpa(q, k.detach(), v, is_causal=causal).transpose(1, 2)

    report = check(detached, only=RULES, **arguments)
    assert {o.rule for o in report.outcomes if o.status == "failed"} == {"agreement-dk"}


@pytest.mark.thorough
def test_a_worker_takes_packed_arrays(tmp_path):
    from npattn.testing.worker.connect import connect

    (tmp_path / "kernels.py").write_text(
        "import numpy as np\n"
        "from npattn import backward, cache, forward\n\n\n"
        "def f(qkv, causal=False):\n"
        "    q, k, v = cache.unpack(qkv)\n"
        "    fwd = forward(q, k, v, causal='bottom_right' if causal else False, dtype=q.dtype)\n"
        "    return fwd.out.swapaxes(1, 2)\n\n\n"
        "def b(dout, qkv, causal=False):\n"
        "    q, k, v = cache.unpack(qkv)\n"
        "    fwd = forward(q, k, v, causal='bottom_right' if causal else False)\n"
        "    grads = backward(fwd, dout.swapaxes(1, 2))\n"
        "    return cache.pack(grads.q, grads.k, grads.v).astype(qkv.dtype)\n"
    )
    home = tmp_path / "kernels.py"
    f = connect(f"{home}:f", backward=f"{home}:b")
    try:
        report = check(f, only=[*RULES, "inputs-unchanged", "outputs-apart"], examples=3)
    finally:
        f.worker.close()
    assert report.passed, str(report)
    assert "agreement-dk" in {o.rule for o in report.outcomes if o.status == "passed"}


@pytest.mark.thorough
def test_a_mistake_that_no_order_explains_is_named_as_ever():
    def f(qkv, causal=False):
        q, k, v = unpack(qkv)
        return attend(2 * q, k, v, causal)

    arguments = {**QUICK, "examples": 7, "diagnosis": True}
    report = check(f, only=["agreement-o", "model-sizes"], **arguments)
    assert {cause.step for cause in report.causes} == {"s"}
