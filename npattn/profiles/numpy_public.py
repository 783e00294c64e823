"""Attention that others have written in NumPy alone: numpy-ml, neuralnetlib and more."""

from npattn.conventions import Conventions
from npattn.profiles.profile import Profile

__all__ = ["NEURALNETLIB", "NEURALNETWORKNUMPY", "NUMPY_ML", "PICOGPT"]

_HEADS = (
    "rank 2, rank 3, rank 5: heads are (B, H, T, D) here",
    "K < H: one number of heads for all",
    "broadcast: and one batch",
)
_DTYPE = {
    "shape-dtype": "NumPy 2.0 migration guide: a float64 scalar, as np.sqrt of an int, is not weak"
}
"""They divide by np.sqrt(D), so that float32 becomes float64 since NumPy 2."""

# numpy_ml/neural_nets/layers/layers.py of 0.1.2, DotProductAttention: Q "of shape (n_ex, *, d_k)",
# without a mask; scale is a flag, so that it is 1/√D or 1.
NUMPY_ML = Profile(
    name="numpy_ml",
    version="0.1",
    about="DotProductAttention of numpy-ml, in NumPy alone",
    refuses=_HEADS,
    promises=_DTYPE,
)

# neuralnetlib/layers.py of 5.0.0, MultiHeadAttention._softmax_with_mask: "masked positions
# (mask == 1) get a zero probability", and the sum of a row is 1e-6 at least, so that one without
# keys is 0.
NEURALNETLIB = Profile(
    name="neuralnetlib",
    version="5.0",
    about="MultiHeadAttention of neuralnetlib, in NumPy alone",
    conventions=Conventions(mask_true="hide", empty_row="zero"),
    signature={"mask": "mask"},
    refuses=_HEADS,
    promises=_DTYPE,
)

# neuralnetworknumpy/layers/SingleHeadAttention.py of 0.3.0: "True = block this position", whose
# score becomes −inf. Its backward adds up the gradients of one input.
NEURALNETWORKNUMPY = Profile(
    name="neuralnetworknumpy",
    version="0.3",
    about="SingleHeadAttention of neuralnetworknumpy, in NumPy alone",
    conventions=Conventions(mask_true="hide", empty_row="nan"),
    signature={"mask": "mask"},
    refuses=(*_HEADS, "T != S: self-attention"),
    promises=_DTYPE,
)

# gpt2.py of jaymody/picoGPT at 8172920: the mask is added, and −1e10 where its mha hides.
PICOGPT = Profile(
    name="picogpt",
    version="2023",
    about="attention of picoGPT, in NumPy alone",
    conventions=Conventions(hidden_add="min", empty_row="nan"),
    signature={"mask": "added mask or bias"},
    refuses=(*_HEADS, "mask+bias: one parameter, and their sum is the caller's"),
    promises=_DTYPE,
)
