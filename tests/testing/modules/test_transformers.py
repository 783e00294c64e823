"""Attention blocks of transformers with random weights are judged as they are.

Decoders get rotary positions that turn nothing, and no softcap: `check_module` knows neither.
"""

import importlib

import pytest
import torch

from npattn.testing import check_module

transformers = pytest.importorskip("transformers")

HEADS = {"hidden_size": 24, "num_attention_heads": 4}
SHARED = HEADS | {"num_key_value_heads": 2, "head_dim": 6, "num_hidden_layers": 2}
FIRST = {"layer_idx": 0}
# Module, configuration, its settings, arguments of the module, scale if it is not 1/√D.
BLOCKS = {
    "bert": ("BertSelfAttention", "BertConfig", HEADS, {}, None),
    "clip": ("CLIPAttention", "CLIPVisionConfig", HEADS, {}, None),
    "distilbert": (
        "DistilBertSelfAttention",
        "DistilBertConfig",
        {"dim": 24, "n_heads": 4},
        {},
        None,
    ),
    "gpt2": ("GPT2Attention", "GPT2Config", {"n_embd": 24, "n_head": 4}, FIRST, None),
    "opt": ("OPTAttention", "OPTConfig", HEADS | {"word_embed_proj_dim": 24}, FIRST, None),
    # T5 has no scale: that is in its initial weights.
    "t5": ("T5Attention", "T5Config", {"d_model": 24, "d_kv": 6, "num_heads": 4}, {}, 1.0),
    "vit": ("ViTAttention", "ViTConfig", HEADS, {}, None),
}
DECODERS = {
    "gemma2": ("Gemma2Attention", "Gemma2Config", SHARED | {"attn_logit_softcapping": None}, FIRST,
               256**-0.5),
    # Alone it would take encoder_hidden_states, and do nothing with them.
    "gpt_bigcode": ("GPTBigCodeAttention", "GPTBigCodeConfig", {"n_embd": 24, "n_head": 4}, FIRST,
                    None),
    "gpt_neox": ("GPTNeoXAttention", "GPTNeoXConfig", HEADS, FIRST, None),
    "llama": ("LlamaAttention", "LlamaConfig", SHARED, FIRST, None),
    "mistral": ("MistralAttention", "MistralConfig", SHARED, FIRST, None),
    "phi": ("PhiAttention", "PhiConfig", SHARED, FIRST, None),
    "qwen2": ("Qwen2Attention", "Qwen2Config", SHARED, FIRST, None),
}  # fmt: skip


class Still(torch.nn.Module):
    """A decoder's block at positions that turn nothing."""

    def __init__(self, block):
        super().__init__()
        self.block, self.config = block, block.config

    def forward(self, x, attention_mask=None):
        turned = getattr(self.block, "rotary_ndims", 6)  # of phi a part
        cos = x.new_ones(1, x.shape[1], turned)
        return self.block(x, position_embeddings=(cos, 0 * cos), attention_mask=attention_mask)


def make_block(family):
    name, config, settings, arguments, scale = (BLOCKS | DECODERS)[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(transformers, config)(**settings, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = getattr(module, name)(made, **arguments)
    return (Still(block) if family in DECODERS else block), scale


@pytest.mark.nightly
@pytest.mark.parametrize("family", [*BLOCKS, *DECODERS])
def test_blocks_pass(family):
    block, scale = make_block(family)
    report = check_module(block, examples=10, scale=scale)
    assert report.passed, report


@pytest.mark.nightly
def test_a_block_that_takes_a_context_and_ignores_it_fails():
    block = make_block("gpt_bigcode")[0].block.eval()
    x, context = torch.randn(2, 1, 5, 24)
    assert torch.equal(block(x)[0], block(x, encoder_hidden_states=context)[0])
    report = check_module(block, examples=5, only="cross-attention")
    assert not report.passed


@pytest.mark.nightly
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_qwen3_is_judged_with_its_norms_and_positions(implementation):
    qwen3 = transformers.models.qwen3.modeling_qwen3
    config = transformers.Qwen3Config(**SHARED, attn_implementation=implementation)
    block, rotary = qwen3.Qwen3Attention(config, 0), qwen3.Qwen3RotaryEmbedding(config)

    def call(m, x, mask=None):
        at = torch.arange(x.shape[1])[None]
        return m(x, position_embeddings=rotary(x, at), attention_mask=mask)

    report = check_module(block, call=call, examples=5)
    assert report.passed, report
    assert "rotary, half, base 10000" in report.settings["reads"]
    block.scaling *= 1.5
    report = check_module(block, call=call, examples=5)
    assert "passes with scale=" in report.causes[0].text
