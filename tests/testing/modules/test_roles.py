"""Names of projections, and the places of their weights in a module."""

import numpy as np
import pytest
import torch
from torch import nn

from npattn.errors import OptionError
from npattn.testing.adapters.modules import TorchModule
from npattn.testing.modules.roles import find_projection, find_roles
from tests.testing.modules import lessons


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "projection"),
    [
        *((n, "q") for n in ("W_q.weight", "q_proj.weight", "query.bias", "attn.to_q.weight")),
        *((n, "q") for n in ("Wq.weight", "q_proj_weight", "linear_q.weight", "fc_q.weight", "WQ")),
        *((n, "k") for n in ("key.weight", "keys.weight", "self.key.bias", "key_layer.weight")),
        *((n, "v") for n in ("values.weight", "v_lin.weight", "heads.3.W_v.weight", "b_v")),
        *((n, "o") for n in ("to_out.0.weight", "out_proj.weight", "c_proj.weight", "Wo.weight")),
        *(
            (n, "o")
            for n in ("output.dense.weight", "proj.bias", "fc.weight", "unify_heads.weight")
        ),
        *((n, "qkv") for n in ("in_proj_weight", "in_proj_bias", "qkv.weight", "c_attn.weight")),
        *((n, "qkv") for n in ("query_key_value.weight", "Wqkv.weight", "qkv_layer.bias")),
        ("to_kv.weight", "kv"),
        ("query.linear.weight", "q"),
        *((n, "") for n in ("norm.weight", "q_norm.weight", "bias_k", "alpha.weight", "rel_pos")),
    ],
)
def test_names_mean_projections(name, projection):
    assert find_projection(name) == projection


def weights(module, **arguments):
    judged = TorchModule(module)
    flat, readings, unread = find_roles(judged, arguments.get("roles"), arguments.get("num_heads"))
    return [reading.build(flat.join(judged.parameters())) for reading in readings], unread


def test_layers_are_read_transposed():
    m = lessons.Notebook()
    [mha], unread = weights(m)
    assert np.array_equal(mha.wq, m.W_q.weight.detach().numpy().T)
    assert np.array_equal(mha.bo, m.W_o.bias.detach().numpy())
    assert (mha.num_heads, unread) == (3, [])


def test_packed_columns_are_read_in_both_orders():
    m = lessons.WholeWidth()
    by_kind, by_head = weights(m)[0]
    w = m.qkv.weight.detach().numpy().T
    assert np.array_equal(by_kind.wk, w[:, 14:28])
    assert np.array_equal(by_head.wk, np.concatenate([w[:, 7:14], w[:, 28:35]], 1))


def test_weights_without_a_layer_are_read_both_ways():
    m = lessons.RawWeights()
    one, other = weights(m)[0]
    assert np.array_equal(one.wq, m.w_q.detach().numpy().T)
    assert np.array_equal(other.wq, m.w_q.detach().numpy())


def test_biases_may_be_packed_where_weights_are_not():
    m = nn.MultiheadAttention(15, 3, kdim=7, vdim=11)
    [mha] = weights(m)[0]
    assert (mha.wk.shape, mha.wv.shape) == ((7, 15), (11, 15))
    assert np.array_equal(mha.bv, m.in_proj_bias.detach().numpy()[30:])


def test_heads_with_layers_of_their_own_stand_side_by_side():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(lessons.SingleHead(11, 2) for _ in range(3))
            self.W_o = nn.Linear(6, 11)

        def forward(self, query, key, value):
            outs = [head(query, key, value)[0] for head in self.heads]
            return self.W_o(torch.cat(outs, -1))

    m = Several()
    [mha] = weights(m)[0]
    assert (mha.num_heads, mha.wq.shape) == (3, (11, 6))
    assert np.array_equal(mha.wq[:, 2:4], m.heads[1].W_q.weight.detach().numpy().T)


def test_roles_replace_names():
    m = lessons.OddNames()
    roles = {"wq": "alpha", "wk": "beta", "wv": "gamma", "wo": "delta"}
    [mha], unread = weights(m, roles=roles, num_heads=6)
    assert (mha.num_kv_heads, unread) == (2, [])
    without = {n: x for n, x in roles.items() if n != "wo"}
    [mha], unread = weights(m, roles=without, num_heads=6)
    assert mha.wo is None
    assert unread == ["delta.weight", "delta.bias"]


def test_every_number_of_heads_is_tried_where_none_is_known():
    m = lessons.OddNames(kv=6)
    m.count = 6.0  # no integer
    roles = {"wq": "alpha", "wk": "beta", "wv": "gamma", "wo": "delta"}
    assert [mha.num_heads for mha in weights(m, roles=roles)[0]] == [1, 2, 3, 4, 6, 12]


def test_norms_of_all_heads_together_are_those_of_projections():
    m = lessons.Notebook()
    m.q_norm, m.k_norm = nn.RMSNorm(15), nn.RMSNorm(15)
    _, readings, unread = find_roles(TorchModule(m))
    assert {reading.norm for reading in readings} == {"rms_projection", "layer_projection"}
    assert unread == []


def test_gradients_add_where_roles_share_a_parameter():
    m = lessons.OddNames(kv=6)
    judged = TorchModule(m)
    roles = {"wq": "alpha", "wk": "beta", "wv": "gamma", "wo": "delta"}
    flat, [reading], _ = find_roles(judged, roles, 6)
    shared = type(reading)({**reading.indices, "wk": reading.indices["wq"]}, 6, 6, reading.names)
    ones = {n: np.ones(x.shape) for n, x in shared.indices.items()}
    split = flat.split(shared.scatter(ones, flat.size))
    assert (split["alpha.weight"] == 2).all()
    assert (split["beta.weight"] == 0).all()


def test_a_number_of_heads_that_does_not_divide_is_an_error():
    with pytest.raises(OptionError, match="num_heads is 4, must divide the width 15"):
        weights(lessons.Notebook(), num_heads=4)
