"""Transformers: the attention that its models call eager, and that which they call sdpa."""

from dataclasses import replace

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

# transformers/models/llama/modeling_llama.py of 5.23.0, eager_attention_forward, and its copies in
# other models: attention_mask is added, 0 where a query may attend and finfo(dtype).min elsewhere.
# Where all keys have a bias of −inf, the row is NaN, as run. Heads are (B, H, T, D) and the result
# is (B, T, H, D), beside the weights.
EAGER = Profile(
    name="transformers", version="5.23",
    about="eager_attention_forward of Hugging Face's models",
    conventions=Conventions(hidden_add="min", empty_row="nan", weights="after_dropout"),
    signature={"module": "module", "attention_mask": "added mask or bias", "scaling": "scale"},
    refuses=(
        "rank 2, rank 3, rank 5: its heads are (B, H, T, D)",
        "boolean masks: attention_mask is added",
    ),
)  # fmt: skip

# transformers/models/gpt_oss/modeling_gpt_oss.py of 5.23.0: the sinks of the module are one more
# key, and its softmax computes in the dtype of the scores.
GPT_OSS = replace(
    EAGER, name="transformers.gpt_oss",
    about="eager_attention_forward of Hugging Face's gpt_oss, with sinks",
    signature={**EAGER.signature, "sinks": "sinks"},
)  # fmt: skip

# transformers/integrations/sdpa_attention.py of 5.23.0, sdpa_attention_forward, which calls torch's
# scaled_dot_product_attention: a boolean attention_mask is True where a query may attend, is_causal
# is left out beside one, "Attention mask is not to be provided (even if it is a causal pattern)",
# and for one query: "Not in decoding phase (otherwise we want full attention on the single query
# token)".
SDPA = Profile(
    name="transformers.sdpa", version="5.23",
    about="sdpa_attention_forward of Hugging Face's models",
    conventions=Conventions(causal="top_left"),
    signature={
        "module": "module", "attention_mask": "mask or bias", "scaling": "scale",
        "is_causal": "causal",
    },
    refuses=(
        "rank 2, rank 3, rank 5: its heads are (B, H, T, D)",
        'mask+causal, bias+causal: "Attention mask is not to be provided"',
        "a mask or bias of another rank than 4",
    ),
)  # fmt: skip

# transformers/models/bloom/modeling_bloom.py of 5.23.0, BloomAttention: ALiBi is added to scaled
# scores, one number for each head and key, then the mask as in other models.
BLOOM = Profile(
    name="transformers.bloom", version="5.23",
    about="BloomAttention of Hugging Face between its projections, with ALiBi",
    conventions=EAGER.conventions,
    signature={"alibi": "bias", "attention_mask": "added mask or bias"},
    refuses=(
        *EAGER.refuses, "K < H: one n_head for all", "E != D, T > S: self-attention",
        "a bias that differs between queries",
    ),
)  # fmt: skip

# transformers/models/falcon/modeling_falcon.py of 5.23.0, FalconAttention with alibi:
# (scores + alibi) * inv_norm_factor, then the mask.
FALCON = replace(
    BLOOM, name="transformers.falcon",
    about="FalconAttention of Hugging Face between its projections, with ALiBi",
    conventions=replace(EAGER.conventions, bias="before_scale"),
    refuses=(
        *EAGER.refuses, "E != D, T > S: self-attention", "a bias that differs between queries",
    ),
)  # fmt: skip
