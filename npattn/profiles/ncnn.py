"""ncnn: layer SDPA."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["SDPA"]

# docs/developer-guide/operators.md of Tencent/ncnn at a4d2ea1: "qk = qk + attn_mask if attn_mask
# exists", and a scale of 0 is "auto = 1.f / sqrt(embed_dim)". Run on x86: a row of −inf is 0.
SDPA = Profile(
    name="ncnn",
    version="1.0",
    about="layer SDPA of ncnn on the CPU",
    conventions=Conventions(empty_row="zero"),
    signature={"attn_mask": "mask or bias", "scale": "scale"},
    refuses=(
        "rank 2, rank 3, rank 5: its arrays have 3 axes, a sample each",
        "scale 0: it stands for the default",
    ),
)
