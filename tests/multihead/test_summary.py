"""Descriptions of modules: parameter counts, shapes, and heads without effect."""

import numpy as np
import pytest

from npattn import MultiHeadAttention
from npattn.errors import ShapeError

X = np.random.default_rng(0).standard_normal((3, 7, 10))


def small(**kwargs):
    return MultiHeadAttention.init(10, 5, seed=0, **kwargs)


def scale_heads(mha, **changes):
    """Multiply wq of each head by a factor."""
    factor = np.repeat(changes.pop("factor"), mha.head_size)
    return mha.replace(wq=mha.wq * factor, **changes)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"num_kv_heads": 1},
        {"qk_norm": "rms", "norm_q": np.ones(2)},
    ],
)
def test_steps_count_all_parameters(kwargs):
    mha = small(**kwargs)
    description = mha.describe()
    assert sum(step.parameters for step in description.steps) == mha.num_parameters
    assert description.num_parameters == mha.num_parameters
    assert description.heads == ()
    assert f"{mha.num_parameters} parameters" in str(description)


def test_shapes_with_inputs_are_numbers():
    shapes = {step.name: step.shape for step in small().describe(X).steps}
    assert shapes["q = query Wq + bq"] == "(3, 5, 7, 2)"
    assert shapes["weights = softmax(scale q kᵀ)"] == "(3, 5, 7, 7)"
    assert shapes["out = o Wo + bo"] == "(3, 7, 10)"
    assert "(..., 5, T, 2)" in str(small().describe())
    assert "(5, 7, 2)" in str(small().describe(X[0]))


def test_heads_without_effect_are_named():
    mha = scale_heads(small(), factor=[1, 0, 1e4, 1, 1])
    wo = mha.wo.copy()
    wo[6:8] = 0  # nothing of head 3 leaves
    description = mha.replace(wo=wo).describe(X, dout=np.ones_like(X))
    faults = [head.faults for head in description.heads]
    assert faults[0] == ()
    assert faults[1] == ("uniform", "constant")
    assert faults[2] == ("saturated",)
    assert faults[3] == ("no gradient",)
    assert "uniform, constant" in str(description)


def test_head_on_one_key_is_constant_and_saturated():
    mha = small(bias=True)
    bias = np.zeros((7, 7))
    bias[:, 4] = 1e3
    (faults,) = {head.faults for head in mha.describe(X, bias=bias).heads}
    assert faults == ("constant", "saturated")


def test_gradient_is_none_without_dout():
    assert {head.gradient for head in small().describe(X).heads} == {None}


def test_zero_dout_gives_no_gradient():
    description = small().describe(X, dout=np.zeros_like(X))
    assert all("no gradient" in head.faults for head in description.heads)


def test_evenness_needs_two_visible_keys():
    description = small().describe(X, mask=np.eye(7, dtype=bool))
    assert all(np.isnan(head.evenness) for head in description.heads)
    blind = small().describe(X, mask=np.zeros((7, 7), bool))
    assert [head.largest for head in blind.heads] == [0.0] * 5


def test_dout_of_another_shape_raises():
    with pytest.raises(ShapeError, match="dout has shape"):
        small().describe(X, dout=np.zeros((3, 7)))
