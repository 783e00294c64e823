"""A description counts what a module has, and names heads that do nothing."""

import numpy as np
import pytest

from npattn import MultiHeadAttention
from npattn.errors import ShapeError

X = np.random.default_rng(0).standard_normal((3, 7, 10))


def small(**words):
    return MultiHeadAttention.init(10, 5, seed=0, **words)


def of_heads(mha, **changes):
    """A head of q and k multiplied by its number."""
    factor = np.repeat(changes.pop("factor"), mha.head_size)
    return mha.replace(wq=mha.wq * factor, **changes)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"num_kv_heads": 1},
        {"qk_norm": "rms", "norm_q": np.ones(2)},
    ],
)
def test_the_parameters_of_its_steps_are_all_that_there_are(words):
    mha = small(**words)
    found = mha.describe()
    assert sum(step.parameters for step in found.steps) == mha.num_parameters
    assert found.num_parameters == mha.num_parameters
    assert found.heads == ()
    assert f"{mha.num_parameters} parameters" in str(found)


def test_with_inputs_the_shapes_are_numbers():
    shapes = {step.name: step.shape for step in small().describe(X).steps}
    assert shapes["q = query Wq + bq"] == "(3, 5, 7, 2)"
    assert shapes["weights = softmax(scale q kᵀ)"] == "(3, 5, 7, 7)"
    assert shapes["out = o Wo + bo"] == "(3, 7, 10)"
    assert "(..., 5, T, 2)" in str(small().describe())
    assert "(5, 7, 2)" in str(small().describe(X[0]))


def test_heads_that_do_nothing_are_named():
    mha = of_heads(small(), factor=[1, 0, 1e4, 1, 1])
    wo = mha.wo.copy()
    wo[6:8] = 0  # nothing of head 3 leaves
    found = mha.replace(wo=wo).describe(X, dout=np.ones_like(X))
    faults = [head.faults for head in found.heads]
    assert faults[0] == ()
    assert faults[1] == ("uniform", "constant")
    assert faults[2] == ("saturated",)
    assert faults[3] == ("no gradient",)
    assert "uniform, constant" in str(found)


def test_a_head_that_looks_at_one_key_for_every_query_is_constant_and_saturated():
    mha = small(bias=True)
    bias = np.zeros((7, 7))
    bias[:, 4] = 1e3
    (faults,) = {head.faults for head in mha.describe(X, bias=bias).heads}
    assert faults == ("constant", "saturated")


def test_without_dout_nothing_is_said_of_gradients():
    assert {head.gradient for head in small().describe(X).heads} == {None}


def test_where_no_gradient_comes_in_no_head_passes_any():
    found = small().describe(X, dout=np.zeros_like(X))
    assert all("no gradient" in head.faults for head in found.heads)


def test_a_query_that_sees_one_key_or_none_has_no_evenness():
    found = small().describe(X, mask=np.eye(7, dtype=bool))
    assert all(np.isnan(head.evenness) for head in found.heads)
    blind = small().describe(X, mask=np.zeros((7, 7), bool))
    assert [head.largest for head in blind.heads] == [0.0] * 5


def test_a_dout_of_another_shape_is_an_error():
    with pytest.raises(ShapeError, match="dout has shape"):
        small().describe(X, dout=np.zeros((3, 7)))
