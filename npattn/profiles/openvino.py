"""OpenVINO: operation ScaledDotProductAttention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["SDPA"]

# docs.openvino.ai (2026), ScaledDotProductAttention-13: "causal: If true, assumes causal attention
# masking ... In this case attention_mask input is ignored." Run: a fully masked row is NaN.
SDPA = Profile(
    name="openvino",
    version="2026.4",
    about="operation ScaledDotProductAttention of OpenVINO, opset 13, on the CPU",
    conventions=Conventions(causal="top_left", empty_row="nan"),
    signature={"attention_mask": "mask or bias", "scale": "scale", "causal": "causal"},
    refuses=(
        'mask+causal, bias+causal: "attention_mask input is ignored"',
        "K < H: key has the heads of query",
    ),
)
