"""Flash Linear Attention: the softmax attention of the package fla-core, two Triton kernels."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["DECODING", "PARALLEL"]

# Docstring of parallel_attn, fla/ops/attn/parallel.py of fla-core 0.6.0: q [B, T, HQ, K], k and v
# with the same T; "each query at position i only attends to keys in [i - window_size + 1, i]. If
# None, full causal attention is used"; sink_bias is in the denominator alone.
PARALLEL = Profile(
    name="fla.parallel",
    version="0.6",
    about="fla.ops.attn.parallel_attn, a Triton kernel",
    conventions=Conventions(),
    signature={"scale": "scale", "sink_bias": "sinks"},
    layout="BTHD",
    refuses=(
        "T != S: q, k and v have one T",
        "D above 256: asserted by parallel_attn_fwd",
        "attention that is not causal: without a window it is full causal attention",
    ),
)

# Docstring of attn_decoding_one_step, fla/ops/attn/decoding.py: one query at the end of each
# sequence; window_size is the "number of most recent keys attended to [...] including the current
# token". It has no backward.
DECODING = Profile(
    name="fla.decoding",
    version="0.6",
    about="fla.ops.attn.decoding.attn_decoding_one_step, a Triton kernel",
    conventions=Conventions(),
    signature={"scale": "scale", "sink_bias": "sinks"},
    refuses=("T other than 1: one step of decoding",),
)
