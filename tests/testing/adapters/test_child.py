"""Parts of the program of a worker that other tests reach in its own process, or not at all."""

import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from npattn.testing import Implementation
from npattn.testing.adapters import child
from npattn.testing.adapters.child import NotPossible, NumPy, Session, Tensor
from npattn.testing.targets.numpy import flash


def tensor_of(array):
    return Tensor("F32", array.shape, array.tobytes())


def test_a_negative_size_is_refused():
    entry = {"dtype": "F32", "shape": [-1, 2], "data_offsets": [0, 0]}
    header = json.dumps({"x": entry}).encode()
    with pytest.raises(ValueError, match=r"a tensor of shape \(-1, 2\)"):
        child.parse_frame(len(header).to_bytes(8, "little") + header)


def test_views_share_a_buffer_or_have_their_own():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    framework, tensor = NumPy(), tensor_of(x)
    shared = framework.base(tensor)
    whole = framework.view(tensor, None, shared)
    layout = {"shape": [3, 2], "strides": [4, 12], "offset": 0}
    turned, own = (framework.view(tensor, layout, base) for base in (shared, None))
    whole[0, 1] = 7
    assert np.array_equal(turned, whole.T)
    assert np.array_equal(own, x.T)


def test_a_function_of_no_framework_is_one_of_numpy():
    f = type("Callable", (), {"__call__": lambda self, q: q})()
    assert type(child.choose_framework(f, "auto", None, tries=False)[0]) is NumPy


def test_defaults_that_json_has_not_are_dots():
    def f(q, scale=1.0, sizes=(2, 3), kind=object, least=-np.inf):
        pass

    described = {name: default for name, _, default, _ in child.describe_parameters(f)}
    assert described == {
        "q": [], "scale": [1.0], "sizes": [[2, 3]], "kind": ["..."], "least": ["-inf"],
    }  # fmt: skip


def test_a_pickled_target_comes_with_its_settings():
    session = Session("")
    backward = np.negative
    pickled = Tensor("U8", (0,), pickle.dumps((np.add, backward)))
    assert session.load_target({}, {"pickled": pickled}) == ("auto", {})
    assert (session.f, session.backward) == (np.add, backward)


def test_an_implementation_brings_its_settings(tmp_path, monkeypatch):
    own = Implementation(flash, framework="numpy", layout="BTHD")
    own.quantized = SimpleNamespace(dtype="float8_e4m3fn", rows=2)
    monkeypatch.setattr(child, "load", lambda spec: own)
    session = Session("own")
    framework, settings = session.load_target({}, {})
    assert (framework, session.f, session.backward) == ("numpy", flash, None)
    assert settings["layout"] == "BTHD"
    assert (settings["quantized"], settings["rows"]) == ("float8_e4m3fn", 2)
    with pytest.raises(KeyError, match="sing"):
        session.compute({"do": "sing"}, {})


# --- gradients of torch ---------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_a_result_without_elements_has_gradients_of_zero(torch):
    leaves, none = {"q": torch.ones(2, 3)}, torch.ones(0, 3)
    results, grads = child.Torch().gradients(lambda x: {"o": none}, leaves, {"o": none})
    assert results["o"] is none
    assert torch.equal(grads["q"], torch.zeros(2, 3))
    with pytest.raises(NotPossible, match="autograd cannot reach it"):
        child.Torch().gradients(lambda x: {"o": x["q"].detach()}, leaves, {"o": leaves["q"]})


def test_gradients_that_autograd_does_not_reach_have_no_gradients(torch):
    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dout):
            return torch.full_like(dout, 2)

    x = {"q": torch.ones(2, 3)}
    for call, words in (
        (lambda leaves: {"o": leaves["q"].detach()}, "its result does not require grad"),
        (lambda leaves: {"o": Constant.apply(leaves["q"])}, "its gradients do not require grad"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            child.Torch().gradients_twice(call, x, {"o": x["q"]}, x)


def test_another_device_is_waited_for(torch, monkeypatch):
    waited = []
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(synchronize=waited.append))
    framework = child.Torch()
    framework.finish()
    framework.device = "meta"
    framework.finish()
    assert waited == ["meta"]
