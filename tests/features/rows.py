"""The surveyed features: how each is spelled in npattn, and what runs it.

A row with options is a problem of `npattn.attention`, run by test_features.py: forward and
backward, on arrays and on tensors, against the loops. Another row names the tests that run it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npattn import Conventions, biases, masks
from tests.make import normal

__all__ = ["ROWS", "Row", "arrays"]

# The sizes of every problem; all differ but H, which is a multiple of K.
B, H, K, T, S, D, E = 2, 6, 3, 5, 11, 7, 13


@dataclass(frozen=True)
class Row:
    """One feature.

    Attributes
    ----------
    name : str
        The feature, in the field's words.
    spelled : str
        How npattn spells it, in Markdown.
    options : dict or None
        Options of `npattn.attention`; q, k, v among them replace the usual ones.
    conventions : Conventions or None
    numpy, tensors : tuple of str
        Tests, "path::name", that run it forward and backward; of a row without options.
    """

    name: str
    spelled: str
    options: dict[str, Any] | None = None
    conventions: Conventions | None = None
    numpy: tuple[str, ...] = ()
    tensors: tuple[str, ...] = field(default=())


def arrays() -> dict[str, Any]:
    """Return the q, k, v that a row replaces none of."""
    return {
        "q": normal(B, H, T, D, seed=1),
        "k": normal(B, K, S, D, seed=2),
        "v": normal(B, K, S, E, seed=3),
    }


def square() -> dict[str, Any]:
    """Return k and v with as many keys as queries."""
    return {"k": normal(B, K, T, D, seed=2), "v": normal(B, K, T, E, seed=3)}


def poison_hidden_key() -> dict[str, Any]:
    """Return a key and a value of NaN behind a mask."""
    given, mask = arrays(), np.ones((T, S), bool)
    mask[:, 4] = False
    given["k"][:, :, 4], given["v"][:, :, 4] = np.nan, np.inf
    return {**given, "mask": mask}


def chosen(share: float, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random((B, H, T, S)) < share


def modify(s: Any, b: Any, h: Any, t: Any, j: Any) -> Any:
    return s * 0.5 + 0.01 * (h - t + j + b)


CACHE, CACHE_TENSORS = "tests/cache/test_paging.py::", "tests/torch/test_cache.py::"
MODULE, MODULE_TENSORS = "tests/multihead/test_multihead.py::", "tests/torch/test_multihead.py::"
ENGINES, TENSORS = "tests/engines/test_engines.py::", "tests/torch/test_api.py::"

ROWS = (
    Row("Layout of q, k, v",
        "`(..., H, T, D)`, any leading axes; rank 2 is one head. Packed and paged: `(total, H, D)`",
        {"q": normal(2, 3, H, T, D), "k": normal(3, K, S, D), "v": normal(K, S, E)}),
    Row(
        "q, k and v in one array",
        '`npattn.cache.unpack(qkv, "3H")`, and `pack`',
        numpy=(
            "tests/cache/test_unpacking.py::test_packed_gradients_are_the_gradient_of_what_is_packed",
        ),
        tensors=(
            "tests/cache/test_unpacking.py::test_packed_gradients_are_the_gradient_of_what_is_packed",
        ),
    ),
    Row("Sequences of several lengths, packed",
        "`npattn.cache.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)`",
        numpy=("tests/cache/test_packed.py::test_sequences_are_one_problem_with_a_mask",),
        tensors=(CACHE_TENSORS + "test_packed_sequences_are_those_of_numpy",)),
    Row("One k and v for all samples", "k and v without the batch axis",
        {"k": normal(K, S, D, seed=2), "v": normal(1, K, S, E, seed=3)}),
    Row("Multi-head, grouped and multi-query attention", "k and v with K heads, where K divides H",
        {"k": normal(B, 1, S, D, seed=2), "v": normal(B, 1, S, E, seed=3)}),
    Row("Which head is shared", '`Conventions(kv_head="repeat")` is h // G, `"tile"` h % K', {},
        Conventions(kv_head="tile")),
    Row("Cross-attention", "T and S may differ", {}),
    Row("Values of another size", "v `(..., S, E)`", {}),
    Row("Boolean mask", "`mask=`, True = may attend", {"mask": chosen(0.6)}),
    Row("Bias", "`bias=`, added after scale and softcap", {"bias": normal(B, 1, T, S)}),
    Row("Gradient of the bias", "`Gradients.bias`, summed over the axes that broadcast",
        {"bias": normal(1, 1, T, S)}),
    Row("Padded keys", "`mask=npattn.masks.lengths(keys)`, or a mask `(B, 1, 1, S)`",
        {"mask": masks.lengths([4, S])}),
    Row("Padded queries", "`npattn.masks.lengths(keys, queries)`: rows of 0",
        {"mask": masks.lengths([4, S], [T, 3])}),
    Row("Causal, where T ≠ S", '`causal="bottom_right"` or `"top_left"`; True is an error there',
        {"causal": "bottom_right"}),
    Row("Window on the left", "`window=(left, right)`, keys beside the aligned one",
        {"window": (3, 0)}),
    Row("Window on the right", "`window=(left, right)`", {"window": (0, 2)}),
    Row("Window without end", "`None` on a side", {"window": (None, 1)}),
    Row("Local and chunked attention", "`npattn.masks.chunked`, `sliding`, `dilated`, `strided`",
        {"mask": masks.causal(alignment="bottom_right") & masks.chunked(4)}),
    Row("Prefix", "`npattn.masks.prefix`", {"mask": masks.prefix(4, alignment="bottom_right")}),
    Row("Documents and blocks", "`npattn.masks.documents`, `npattn.masks.blocks`",
        {"mask": masks.documents(np.arange(T) // 2, np.arange(S) // 4)}),
    Row("ALiBi", "`bias=npattn.biases.alibi(H)`", {"bias": biases.alibi(H)}),
    Row("Relative bias of T5", "`bias=npattn.biases.relative(table)`",
        {"bias": biases.relative(normal(32, H))}),
    Row(
        "Rotary positions",
        "`npattn.positions.rope` and `rope_backward`",
        numpy=(
            "tests/positions/test_rotary.py::test_pairs_turn_as_complex_numbers",
            "tests/positions/test_rotary.py::test_backward_is_the_jacobian_transposed",
        ),
        tensors=("tests/torch/test_positions.py::test_forward_and_gradient_are_those_of_numpy",),
    ),
    Row("Softcap", "`softcap=c`: c·tanh(s/c)", {"softcap": 1.5}),
    Row("Sinks", "`sinks=`, one logit a head", {"sinks": normal(H)}),
    Row("Softmax off by one", "`sinks=np.zeros(H)`", {"sinks": np.zeros(H)}),
    Row("Norm of queries and keys",
        '`MultiHeadAttention(..., qk_norm=)`: `"rms"`, `"layer"`, `"l2"`, or of whole projections',
        numpy=("tests/oracle/test_qk_norms.py::test_modules_pass_gradients_through_norms",),
        tensors=("tests/torch/test_qk_norms.py::test_values_and_gradients_are_those_of_numpy",)),
    Row("Output gate", "`gate=`, multiplies the output", {"gate": normal(B, H, T, E)}),
    Row("Scale", "`scale=`, any finite number", {"scale": -0.75}),
    Row("Bias before the scale", '`Conventions(bias="before_scale")`',
        {"bias": normal(T, S), "scale": 0.5}, Conventions(bias="before_scale")),
    Row(
        "Dtype of the softmax",
        '`dtype="bfloat16"`, `"float16"`: mixed precision; else the dtype computed in',
        numpy=(
            "tests/engines/test_dense.py::test_mixed_precision_rounds_operands_of_products_only",
        ),
        tensors=(TENSORS + "test_mixed_precision_agrees_with_dense",),
    ),
    Row("Dropout", "`dropout_rate=` beside `dropout_mask=`",
        {"dropout_mask": chosen(0.7), "dropout_rate": 0.3}),
    Row("Mask of dropout", "`dropout_mask=`, True = keep; nothing is random",
        {"dropout_mask": chosen(0.7)[:, :1], "dropout_rate": 0.2}),
    Row("Weights returned",
        '`forward(...).weights`; after dropout by `Conventions(weights="after_dropout")`',
        {"dropout_mask": chosen(0.7), "dropout_rate": 0.3}, Conventions(weights="after_dropout")),
    Row("lse returned", '`forward(...).lse`, natural or `Conventions(lse_base="2")`', {},
        Conventions(lse_base="2")),
    Row("Gradient through lse", "`backward(fwd, dout, dlse)`", {"sinks": normal(H)}),
    Row("Largest score", "`forward(...).max_score`",
        numpy=("tests/problem/test_gating.py::test_max_score_agrees_with_loops",),
        tensors=("tests/torch/test_gating.py::test_max_score_agrees_with_numpy",)),
    Row("score_mod", "`score_mod=f(s, b, h, t, s_index)`", {"score_mod": modify}),
    Row(
        "Keys appended to a cache",
        "`npattn.cache.append` and `append_backward`",
        numpy=(
            CACHE + "test_appended_keys_lie_behind_those_of_their_sample",
            CACHE + "test_append_backward_is_its_transpose",
        ),
        tensors=(CACHE_TENSORS + "test_appended_keys_are_those_of_numpy",),
    ),
    Row("Keys in pages", "`npattn.cache.paged(q, k_pages, v_pages, block_table, seqlens)`",
        numpy=(CACHE + "test_pages_are_keys_in_a_row",),
        tensors=(CACHE_TENSORS + "test_pages_are_those_of_numpy",)),
    Row(
        "Multi-head latent attention",
        "`npattn.variants.latent`, unabsorbed and absorbed",
        numpy=(
            "tests/variants/test_latent.py::test_is_the_formula_of_the_paper",
            "tests/variants/test_latent.py::test_gradients_are_the_complex_steps_of_the_loops",
        ),
        tensors=("tests/torch/variants/test_latent.py::test_is_the_formula_and_so_are_gradients",),
    ),
    Row(
        "Keys that each query chooses (top-k)",
        "`npattn.variants.gathered`, with lists of keys by `top_k`",
        numpy=(
            "tests/variants/test_gathered.py::test_is_attention_with_the_mask_of_the_lists",
            "tests/variants/test_gathered.py::test_gradients_are_the_complex_steps_of_the_loops",
        ),
        tensors=(
            "tests/torch/variants/test_gathered.py::test_is_that_of_numpy_and_so_are_gradients",
        ),
    ),
    Row(
        "Inputs of 8 bits and their factors",
        "`npattn.quantization.dequantize(values, descale)` and its backward",
        numpy=(
            "tests/test_quantization.py::test_gradients_of_dequantize_are_the_sums_of_each_element",
        ),
        tensors=("tests/torch/test_quantization.py::test_gradients_are_those_of_numpy",),
    ),
    Row(
        "Split keys, merged",
        "`npattn.cache.merge(outs, lses)`",
        numpy=(
            "tests/cache/test_merging.py::test_parts_of_the_keys_are_all_of_them",
            "tests/cache/test_merging.py::test_gradients_through_the_merge_are_those_of_all_keys",
        ),
        tensors=(CACHE_TENSORS + "test_merged_parts_are_those_of_numpy",),
    ),
    Row("Fully masked rows", '0, and −inf in lse; `Conventions(empty_row="mean" or "nan")`',
        {"mask": np.arange(T)[:, None] != 2, "bias": normal(T, S)}, Conventions(empty_row="mean")),
    Row("NaN in hidden keys and values", "changes nothing", poison_hidden_key()),
    Row("No keys", "S = 0 gives rows of 0", {"k": normal(B, K, 0, D), "v": normal(B, K, 0, E)}),
    Row(
        "Same bits in every run",
        "always",
        numpy=(
            "tests/engines/test_tiled.py::test_results_have_the_same_bits_with_any_number_of_threads",
            MODULE + "test_keeping_only_inputs_gives_the_same_bits",
        ),
        tensors=(TENSORS + "test_two_runs_give_the_same_bits",),
    ),
    Row("Gradients of gradients", "`npattn.double_backward` and `npattn.hvp`",
        numpy=("tests/oracle/test_second_order.py::test_both_give_what_the_definition_gives",),
        tensors=("tests/torch/test_second_order.py::test_both_give_what_npattn_gives",)),
    Row(
        "Derivative along a direction",
        "`npattn.jvp(fwd, dq=...)`",
        numpy=(
            "tests/engines/test_dense.py::test_jvp_is_the_adjoint_of_backward",
            ENGINES + "test_a_direction_moves_it_as_it_moves_dense",
        ),
        tensors=(ENGINES + "test_a_direction_moves_it_as_it_moves_dense",),
    ),
    Row("Learned and zero keys (bias_k, add_zero_attn)",
        "`MultiHeadAttention(..., bias_k=, bias_v=, add_zero_attn=True)`",
        numpy=(MODULE + "test_gradients_agree_with_complex_step",),
        tensors=(MODULE_TENSORS + "test_outputs_and_gradients_are_those_of_torch",)),
    Row("Inputs of other sizes (kdim, vdim)", "wk `(in_k, K·D)`, wv `(in_v, K·E)`",
        numpy=(MODULE + "test_variant_agrees_with_torch_forward_and_backward",),
        tensors=(MODULE_TENSORS + "test_outputs_and_gradients_are_those_of_torch",)),
    Row("Head mask, and heads pruned",
        "`gate=head_mask[:, None, None]`; `MultiHeadAttention.prune(heads)`",
        {"gate": np.array([1.0, 0.0, 0.5, 1.0, -1.0, 2.0])[:, None, None]}),
    Row(
        "Linear attention",
        "`npattn.variants.linear`, apart from softmax attention",
        numpy=(
            "tests/variants/test_linear.py::test_forward_is_that_of_plain_loops",
            "tests/variants/test_linear.py::test_gradients_are_those_of_complex_steps",
        ),
        tensors=(
            "tests/torch/variants/test_linear.py::test_values_and_gradients_are_those_of_numpy",
        ),
    ),
)  # fmt: skip
