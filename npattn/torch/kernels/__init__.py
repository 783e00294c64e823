"""PyTorch's own attention kernels, for problems that they compute exactly; others are refused.

Two functions are called: ``scaled_dot_product_attention``, and on CUDA, for options that it lacks,
FlexAttention. Every option means there what it means in docs/semantics.md, for finite numbers.
Where one of their kernels is known to compute something else, the problem is rewritten, another
kernel is chosen, or the problem is refused with the reason. The result is in the dtype of q, k, v
and is differentiated by PyTorch. The known traps, and the promises that this path does not make:
docs/torch_multihead.md.
"""

from npattn.torch.kernels.route import evaluate, forward, refusal, route
from npattn.torch.kernels.sdpa import WITH_MASK

__all__ = ["WITH_MASK", "evaluate", "forward", "refusal", "route"]
