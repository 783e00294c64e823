"""PyTorch: scaled_dot_product_attention, nn.MultiheadAttention, FlexAttention."""

from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

# docs.pytorch.org, torch.nn.functional.scaled_dot_product_attention: "Efficient implementation
# equivalent to the following". Its textbook lines give NaN where a query sees nothing; all three
# CPU and CUDA implementations give 0 (aten/src/ATen/native/transformers/attention.cpp,
# _safe_softmax), forward and backward, as run on 2.13.
SDPA = Profile(
    name="torch.sdpa", version="2.13",
    about="torch.nn.functional.scaled_dot_product_attention",
    conventions=Conventions(causal="top_left", empty_row="zero"),
    signature={
        "attn_mask": "mask or bias", "is_causal": "causal", "scale": "scale",
        "enable_gqa": "shared heads",
    },
    # The same page: "An error is thrown if both attn_mask and is_causal are set." The kernel chosen
    # for some shapes on the CPU takes both, the others raise.
    refuses=('mask+causal, bias+causal: "An error is thrown if both attn_mask and is_causal"',),
)  # fmt: skip

# docs.pytorch.org, torch.nn.MultiheadAttention: True in attn_mask and key_padding_mask hides. Run
# on 2.13 with need_weights=True, its default: a query that sees nothing gives NaN, the weights
# returned are those after dropout. (With need_weights=False it calls
# scaled_dot_product_attention: 0.)
MULTIHEAD = Profile(
    name="torch.mha", version="2.13",
    about="torch.nn.MultiheadAttention between its projections",
    conventions=Conventions(mask_true="hide", empty_row="nan", weights="after_dropout"),
    signature={"attn_mask": "mask or bias", "key_padding_mask": "key padding"},
    refuses=("K < H: one num_heads for all",),
)  # fmt: skip

# With need_weights=False it calls scaled_dot_product_attention, as run.
MULTIHEAD_SDPA = replace(
    MULTIHEAD, name="torch.mha-sdpa",
    about="torch.nn.MultiheadAttention with need_weights=False, between its projections",
    conventions=Conventions(mask_true="hide"),
)  # fmt: skip

# torch/nn/modules/activation.py of 2.13, MultiheadAttention.forward: "floating-point masks are not
# supported for fast path." A query that sees nothing gives NaN there, as run, with and without
# weights.
MULTIHEAD_FAST = replace(
    MULTIHEAD, name="torch.mha-fast",
    about="torch.nn.MultiheadAttention on its fast path for inference, between its projections",
    conventions=Conventions(mask_true="hide", empty_row="nan"), signature={"attn_mask": "mask"},
    refuses=(
        *MULTIHEAD.refuses,
        "T != S, T > S, E != D: query, key and value are one tensor",
        'bias: "floating-point masks are not supported for fast path"',
        "a mask that differs between heads: the NaN of one goes to all, behind any projection",
    ),
)  # fmt: skip

# torch/nested/_internal/sdpa.py of 2.13 refuses attn_mask on every backend, and is_causal on the
# one of the CPU. A sequence without keys gives 0, as run, or an error (docs/findings.md).
NESTED = replace(
    SDPA, name="torch.nested",
    about="torch.nn.functional.scaled_dot_product_attention on jagged nested tensors",
    conventions=Conventions(), signature={"mask": "mask", "scale": "scale"},
    refuses=(
        "K < H: it broadcasts no heads of nested tensors",
        "a mask that differs between heads or queries",
    ),
)  # fmt: skip

# Docstring of torch 2.13: score_mod(score, b, h, q_idx, k_idx), and masks as a BlockMask of such a
# function. Run on the CPU: a query that sees nothing gives 0, with an lse of −inf.
FLEX = Profile(
    name="flex", version="2.13",
    about="torch.nn.attention.flex_attention.flex_attention",
    conventions=Conventions(empty_row="zero"),
    signature={
        "score_mod": "score_mod", "scale": "scale", "enable_gqa": "shared heads",
        "return_lse": "return_lse",
    },
    refuses=("mask and bias as arrays: they are functions",),
)  # fmt: skip
