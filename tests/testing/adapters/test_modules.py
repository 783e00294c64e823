"""A torch module in NumPy arrays: a copy, its parameters, modes, dropout and gradients."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from npattn.errors import OptionError
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.modules import TorchModule
from tests.testing.modules import lessons

X = np.random.default_rng(0).standard_normal((2, 5, 15)).astype(np.float32)
SELF = {"query": X, "key": None, "value": None}


def test_a_copy_is_judged_in_evaluation():
    m = lessons.Notebook().train()
    judged = TorchModule(m)
    assert m.training
    assert not judged.owner.training
    judged.write({"W_q.bias": np.full(15, 3, np.float32)})
    assert (judged.parameters()["W_q.bias"] == 3).all()
    assert not (m.W_q.bias == 3).any()


def test_a_module_that_cannot_be_copied_is_restored_after_an_interrupt():
    m = lessons.Notebook().train()
    m.lock = threading.Lock()
    m.W_k.weight.requires_grad_(False)
    before = {n: x.clone() for n, x in m.state_dict().items()}
    judged = TorchModule(m, "float64")
    assert judged.owner is m

    def interrupt():
        with judged.computing(0):
            judged.write({"W_q.bias": np.full(15, 3)})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert m.training
    assert not m.W_k.weight.requires_grad
    assert all(torch.equal(x, before[n]) for n, x in m.state_dict().items())


def test_another_dtype_is_that_of_the_copy():
    m = lessons.Notebook()
    judged = TorchModule(m, "bfloat16")
    assert judged.array_dtype.name == "bfloat16"
    assert m.W_q.weight.dtype == torch.float32


def test_parameters_of_several_dtypes_are_refused():
    m = lessons.Notebook()
    m.W_q.double()
    with pytest.raises(OptionError, match="parameters of 2 dtypes"):
        TorchModule(m)


def test_results_that_a_module_keeps_are_copied_too():
    m = lessons.PerHead()
    m.compute_attention(torch.ones(2, 5, 10))
    assert not m.query.is_leaf
    assert TorchModule(m.compute_attention).owner.query.shape == m.query.shape


def test_gradients_are_those_of_torch():
    m = lessons.Notebook().eval()
    dout, dweights = np.ones_like(X), np.full((2, 3, 5, 5), 2, np.float32)
    got = TorchModule(m).call(SELF, {}, lambda out, weights: (dout, dweights))
    x = torch.tensor(X, requires_grad=True)
    out, weights = m(x, x, x)
    (out.sum() + 2 * weights.sum()).backward()
    assert set(got.inputs) == {"query"}
    assert np.allclose(got.inputs["query"], x.grad.numpy(), atol=1e-6)
    assert np.allclose(got.parameters["W_v.weight"], m.W_v.weight.grad.numpy(), atol=1e-6)


def test_without_cotangents_no_gradient_is_recorded():
    class Recorded(lessons.Notebook):
        def forward(self, query, key, value):
            self.asked = query.requires_grad, torch.is_grad_enabled()
            return super().forward(query, key, value)

    judged = TorchModule(Recorded())
    judged.call(SELF, {})
    assert judged.owner.asked == (False, False)
    judged.call(SELF, {}, lambda out, weights: (out, weights))
    assert judged.owner.asked == (True, True)


def test_dropout_is_seen_and_may_be_left_out():
    judged = TorchModule(lessons.Notebook(dropout=0.25))
    judged.train(True)
    with judged.watching_dropout() as seen:
        judged.call(SELF, {})
    [(kept, rate)] = seen
    assert (kept.shape, kept.dtype, rate) == ((2, 3, 5, 5), bool, 0.25)
    assert 0.5 < kept.mean() < 1
    with judged.watching_dropout(drops=False) as seen:
        one, other = (judged.call(SELF, {}).out for _ in range(2))
    assert seen == []
    assert np.array_equal(one, other)
    assert torch.nn.functional.dropout.__module__ == "torch.nn.functional"


@pytest.mark.parametrize(
    ("value", "words"), [(3, "returned int"), ((), "returned tuple"), ((3,), "returned .*int")]
)
def test_what_is_no_result_is_an_error(value, words):
    class Other(nn.Linear):
        def forward(self, x):
            return value

    with pytest.raises(ImplementationError, match=words):
        TorchModule(Other(15, 15)).call({"x": X}, {})


def test_an_output_without_a_graph_is_an_error():
    class Cut(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(ImplementationError, match="requires no grad"):
        TorchModule(Cut(15, 15)).call({"x": X}, {}, lambda out, weights: (out, weights))


def test_a_mapping_has_output_and_weights_first():
    class Named(lessons.Notebook):
        def forward(self, x):
            out, weights = super().forward(x, x, x)
            return {"last_hidden_state": out, "attentions": weights, "more": None}

    got = TorchModule(Named()).call({"x": X}, {})
    assert (got.out.shape, got.weights.shape) == ((2, 5, 15), (2, 3, 5, 5))
