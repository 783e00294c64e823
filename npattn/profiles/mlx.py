"""MLX: mlx.core.fast.scaled_dot_product_attention."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["FAST"]

# Docstring of 0.32.4: a mask is boolean or additive, "causal" is aligned to the lower right. Run on
# the CPU: a query whose keys are masked gives the mean, also under "causal"; one whose keys have a
# bias of −inf gives NaN.
FAST = Profile(
    name="mlx",
    version="0.32",
    about="mlx.core.fast.scaled_dot_product_attention",
    conventions=Conventions(hidden_fill="min", empty_row="nan"),
    signature={"mask": "mask or bias", "scale": "scale", "sinks": "sinks"},
    refuses=(
        'causal as a flag: it is the word mask="causal"',
        "rank 2, rank 3, rank 5: it takes (B, H, T, D)",
    ),
)
