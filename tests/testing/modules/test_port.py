"""compare_module: outputs of ports, and the part in which they differ."""

import numpy as np
import pytest
import torch

import npattn
from npattn.errors import OptionError, ShapeError
from npattn.testing import compare_module
from npattn.testing.modules.port import PARTS
from tests.testing.modules import lessons

B, T, S, H, D, WIDTH = 2, 5, 7, 3, 2, 11


def test_outputs_of_a_port_are_compared():
    m = lessons.Notebook().eval()
    x, y = torch.randn(2, 5, 15), torch.randn(2, 7, 15)
    out, weights = m(x, y, y)
    inputs = {"query": x.numpy(), "key": y.numpy(), "value": y.numpy()}
    outputs = {"out": out.detach().numpy(), "weights": weights.detach().numpy()}
    found = compare_module(m, inputs, outputs)
    assert [c.name for c in found] == ["out", "weights"]
    assert all(0 < c.ratio <= 1 for c in found)
    outputs["out"] = outputs["out"] + np.float32(1e-3)
    assert [c.passed for c in compare_module(m, inputs, outputs)] == [False, True]


def test_outputs_are_compared_with_weights_from_elsewhere():
    mha = npattn.MultiHeadAttention.init(11, 3, head_size=2, seed=5, dtype=np.float32)
    x = np.random.default_rng(0).standard_normal((2, 7, 11)).astype(np.float32)
    out = mha.forward(x, dtype="float32").out.astype(np.float32)
    [comparison] = compare_module(mha, x, out)
    assert 0 < comparison.ratio <= 1
    with pytest.raises(OptionError, match="outputs has 'o'"):
        compare_module(mha, x, {"o": out})
    with pytest.raises(ShapeError, match="out has shape"):
        compare_module(mha, x, out[:1])


# --- the part that differs ------------------------------------------------------------------------


@pytest.fixture
def mha():
    biases = {
        f"b{n}": np.arange(1.0, 1 + width) / 7
        for n, width in zip("qkvo", (6, 6, 6, WIDTH), strict=True)
    }
    plain = npattn.MultiHeadAttention.init(WIDTH, H, head_size=D, seed=5)
    weights = {n: x for n, x in plain.parameters.items() if n.startswith("w")}
    return npattn.MultiHeadAttention(**weights, **biases, num_heads=H)


def steps(mha, x, y, **wrong):
    """Return every step of a port that has other weights, or another `factor` of the scores."""
    factor = wrong.pop("factor", 1.0)
    w = mha.parameters | wrong
    q, k, v = (z @ w["w" + n] + w["b" + n] for n, z in zip("qkv", (x, y, y), strict=True))
    heads = [z.reshape(B, -1, H, D).swapaxes(1, 2) for z in (q, k, v)]
    s = factor * heads[0] @ heads[1].swapaxes(-1, -2) / D**0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    merged = (p @ heads[2]).swapaxes(1, 2).reshape(B, T, -1)
    return {"q": q, "k": k, "v": v, "weights": p, "merged": merged,
            "out": merged @ w["wo"] + w["bo"]}  # fmt: skip


def compare(mha, names, **wrong):
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((B, T, WIDTH)), rng.standard_normal((B, S, WIDTH))
    outputs = steps(mha, x, y, **wrong)
    found = compare_module(mha, {"query": x, "key": y}, {n: outputs[n] for n in names})
    assert [c.name for c in found] == [n for n in PARTS if n in names]
    return found


def test_a_right_port_has_no_part_that_differs(mha):
    found = compare(mha, [*PARTS])
    assert all(c.passed and not c.hint for c in found)
    assert all(max(c.power.factors) < 1e-6 for c in found)


@pytest.mark.parametrize("name", PARTS)
def test_the_first_output_that_is_wrong_names_its_part(mha, name):
    wrong = {
        **{n: {"w" + n: 1.01 * getattr(mha, "w" + n)} for n in "qkv"},
        "weights": {"factor": 1.01},
        "out": {"wo": 1.01 * mha.wo},
        "merged": {},
    }[name]
    names = [*PARTS]
    if name == "merged":
        names.remove("weights")
        wrong = {"factor": 1.01}
    found = compare(mha, names, **wrong)
    first = next(c for c in found if not c.passed)
    assert first.name == name
    before = "the inside, before values or " if name == "merged" else ""
    assert first.hint == f"{before}{PARTS[name]} differs"
    assert str(first).endswith(first.hint)
    assert [bool(c.hint) for c in found].count(True) == 1


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"bv": np.zeros(6)}, "the projection of values differs: the bias of values is not added"),
        ({"bo": np.zeros(WIDTH)}, "the projection of the output differs: the bias of the output"),
        ({"factor": D**0.5}, "the inside differs: scores are not divided by √D = √2"),
        ({"wk": "wq", "bk": "bq"}, "the projection of keys differs: keys are projected by wq"),
    ],
)
def test_a_step_that_is_known_is_read_from_the_output_alone(mha, wrong, hint):
    own = {n: getattr(mha, x) if isinstance(x, str) else x for n, x in wrong.items()}
    [out] = compare(mha, ["out"], **own)
    assert not out.passed
    assert out.hint.startswith(hint)


def test_what_is_not_given_may_differ_too(mha):
    _, out = compare(mha, ["weights", "out"], wv=1.01 * mha.wv)
    assert out.hint == (
        "the projection of values or the inside or the projection of the output differs"
    )
    [out] = compare(mha, ["out"], wv=1.01 * mha.wv)
    assert out.hint == "any part may differ"
    _, out = compare(mha, ["merged", "out"], wo=1.01 * mha.wo)
    assert out.hint == "the projection of the output differs"


def test_masks_and_samples_second_are_compared():
    m = torch.nn.MultiheadAttention(15, 3)
    x = torch.randn(T, B, 15)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    out, _ = m(x, x, x, attn_mask=hidden)
    [found] = compare_module(m, x, out.detach(), mask=npattn.masks.causal(), num_heads=3)
    assert found.passed
    [found] = compare_module(m, x, out.detach().flip(2), mask=~hidden)
    assert found.hint == "any part may differ"
    ignored, _ = m(x, x, x)
    [found] = compare_module(m, x, ignored.detach(), mask=~hidden)
    assert found.hint == "any part may differ"
