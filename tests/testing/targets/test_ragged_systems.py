"""Systems for sequences of their own lengths, and for steps of decoding, within derived bounds.

Each is asked more than once with a mistake in its call: then the same bounds must find it.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from npattn import Problem, masks
from npattn.positions import plain, rope
from npattn.testing import check, compare
from npattn.testing.targets import load_implementation

RULES = ("agreement-", "other-sequences")
B, H, K, T, S, D = 2, 6, 3, 5, 7, 16


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def passes(o, problem):
    """True if o is within the derived tolerance of the oracle."""
    return all(c.passed for c in compare(np.asarray(o), problem))


@pytest.mark.parametrize(
    ("name", "package", "rules"),
    [
        pytest.param(
            "jax.nn.lengths",
            "jax",
            {"agreement-o", "agreement-dk", "other-sequences"},
            marks=pytest.mark.nightly,
        ),
        ("torch.nested", "torch", {"agreement-o", "agreement-dq", "agreement-dv"}),
        ("transformers.gpt_oss", "transformers", {"agreement-o", "agreement-dsinks"}),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_target_agrees_by_the_rules(name, package, rules):
    """jax.nn with query_seq_lengths, nested (jagged) tensors, the sinks of gpt-oss."""
    pytest.importorskip(package)
    few = {"examples": 2, "accept": ("dq", "dk", "dv")}  # too few for their power
    report = check(load_implementation(name), only=RULES, **few)
    assert report.passed, str(report)
    worst = {o.rule: o.worst for o in report.outcomes if o.status == "passed"}
    assert worst.keys() >= rules
    assert all(0 < worst[rule] < 1 for rule in rules if rule.startswith("agreement"))


@pytest.mark.parametrize("causal", [False, True])
def test_jax_lengths_of_queries_and_keys(causal):
    """Each sample alone, its own rows and keys; with the lengths of another it is wrong."""
    jax = pytest.importorskip("jax")
    q, k, v = normal(B, H, T, D), normal(B, K, T, D, seed=1), normal(B, K, T, D, seed=2)
    lengths = {"query_seq_lengths": (5, 4), "key_value_seq_lengths": (2, 5)}

    def attend(order):
        own = {name: jax.numpy.array(x)[order] for name, x in lengths.items()}
        swapped = (x.swapaxes(1, 2) for x in (q, k, v))
        o = jax.nn.dot_product_attention(*swapped, is_causal=causal, **own)
        return np.asarray(o).swapaxes(1, 2)

    right, wrong = attend(np.array([0, 1])), attend(np.array([1, 0]))
    for b, (t, s) in enumerate(zip(*lengths.values(), strict=True)):
        own = slice(b, b + 1)
        visible = np.tril(np.ones((t, s), bool)) if causal else None  # from the top left
        problem = Problem(q[own, :, :t], k[own, :, :s], v[own, :, :s], mask=visible)
        assert passes(right[own, :, :t], problem)
        assert not passes(wrong[own, :, :t], problem)


# --- documents in FlexAttention -------------------------------------------------------------------

DOCUMENTS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_of_documents(causal):
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    n = len(DOCUMENTS)
    q, k, v = normal(B, H, n, D), normal(B, K, n, D, seed=1), normal(B, K, n, D, seed=2)

    def attend(documents):
        ids = torch.tensor(documents)

        def same(b, h, t, s):
            alike = ids[t] == ids[s]
            return alike & (s <= t) if causal else alike

        mask = flex.create_block_mask(same, None, None, n, n, device="cpu")
        tensors = map(torch.tensor, (q, k, v))
        return flex.flex_attention(*tensors, block_mask=mask, enable_gqa=True).numpy()

    visible = masks.documents(DOCUMENTS)
    problem = Problem(q, k, v, mask=visible, causal=causal)
    assert passes(attend(DOCUMENTS), problem)
    assert not passes(attend(np.roll(DOCUMENTS, 1)), problem)  # a document begins a token late


# --- a step of decoding with a cache, after rotation ----------------------------------------------


@pytest.mark.parametrize("steps", [(T, 1, 1), (1, 1, 1, 1, 1, 1, 1), (3, 4)], ids=str)
def test_llama_decodes_with_a_dynamic_cache(steps):
    """o of each step, of queries and keys that are turned by their places."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import DynamicCache, LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    config = LlamaConfig(hidden_size=H * D, num_attention_heads=H, max_position_embeddings=64)
    turns = llama.LlamaRotaryEmbedding(config)
    module = SimpleNamespace(num_key_value_groups=H // K, training=False)
    q, k, v = normal(B, H, S, D), normal(B, K, S, D, seed=1), normal(B, K, S, D, seed=2)

    def decode(late=0):
        cache, found, past = DynamicCache(), [], 0
        for length in steps:
            rows = slice(past, past + length)
            places = torch.arange(past, past + length)[None]
            cos, sin = turns(torch.tensor(q), places + late)
            own = (torch.tensor(x[:, :, rows]) for x in (q, k))
            turned_q, turned_k = llama.apply_rotary_pos_emb(*own, cos, sin)
            keys, values = cache.update(turned_k, torch.tensor(v[:, :, rows]), 0)
            past += length
            hidden = torch.ones(length, past, dtype=torch.bool).triu(past - length + 1)
            bias = torch.zeros(length, past).masked_fill(hidden, torch.finfo(torch.float32).min)
            o, _ = llama.eager_attention_forward(
                module, turned_q, keys, values, bias[None, None], D**-0.5
            )
            found.append(o.transpose(1, 2).numpy())
        assert cache.get_seq_length() == S
        return np.concatenate(found, 2), turned(late)

    def turned(late):
        cos, sin = turns(torch.tensor(q), torch.arange(S)[None] + late)
        return [x.numpy() for x in llama.apply_rotary_pos_emb(*map(torch.tensor, (q, k)), cos, sin)]

    o, (turned_q, turned_k) = decode()
    problem = Problem(turned_q, turned_k, v, causal=True)
    assert passes(o, problem)
    exact = [rope(x, frequencies=plain(D)) for x in (q, k)]
    for got, want, x in zip((turned_q, turned_k), exact, (q, k), strict=True):
        # A rounded power times a place; cos and sin, two products and a sum.
        assert (abs(got - want) <= (8 * S + 8) * 2.0**-24 * 2 * abs(x).max()).all()
    unturned = Problem(q, k, v, causal=True)
    assert not passes(o, unturned)
    assert not passes(np.roll(o, 1, 2), problem)
