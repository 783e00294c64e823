"""Attention blocks of transformers with random weights are judged as they are."""

import importlib

import pytest
import torch

from npattn.testing import check_module

transformers = pytest.importorskip("transformers")

BLOCKS = {
    "gpt2": ("GPT2Attention", {"n_embd": 24, "n_head": 4}, {"layer_idx": 0}),
    "bert": ("BertSelfAttention", {"hidden_size": 24, "num_attention_heads": 4}, {}),
    "distilbert": ("DistilBertSelfAttention", {"dim": 24, "n_heads": 4}, {}),
    "vit": ("ViTAttention", {"hidden_size": 24, "num_attention_heads": 4}, {}),
    "clip": ("CLIPAttention", {"hidden_size": 24, "num_attention_heads": 4}, {}),
    "t5": ("T5Attention", {"d_model": 24, "d_kv": 6, "num_heads": 4}, {}),
}
CONFIGS = {
    "gpt2": "GPT2Config", "bert": "BertConfig", "distilbert": "DistilBertConfig",
    "vit": "ViTConfig", "clip": "CLIPVisionConfig", "t5": "T5Config",
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("family", BLOCKS)
def test_blocks_pass(family):
    name, sizes, arguments = BLOCKS[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, CONFIGS[family])(**sizes, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = getattr(module, name)(config, **arguments)
    # T5 has no scale: that is in its initial weights.
    report = check_module(block, examples=10, scale=1.0 if family == "t5" else None)
    assert report.passed, report
