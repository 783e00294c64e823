"""torch: attention as its users write it, and torch's own.

torch is imported on the first call, so that the register does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.zoo.correct.register import STORES_PRODUCTS, correct
from benchmarks.zoo.correct.signature import import_on_call
from npattn.profiles import PROFILES
from npattn.testing.cases.recipe import Recipe


def attention(
    product: Callable[[Any, Any, float], Any],
    softmax: Callable[[Any], Any] = lambda s: s.softmax(-1),
) -> Callable[..., Any]:
    """Return attention with one line per equation; `product` computes scores of q, k, scale."""

    def attend(
        q: Any,
        k: Any,
        v: Any,
        mask: Any = None,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        bias: Any = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        dropout_mask: Any = None,
        dropout_rate: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        import torch

        s = product(q, _heads(k, q), 1 / max(q.shape[-1], 1) ** 0.5 if scale is None else scale)
        s = s if softcap is None else softcap * (s / softcap).tanh()
        s = s if bias is None else s + bias
        hidden = ~_visible(s, mask, causal, window) | (s == -torch.inf)
        s = s.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.view(-1, 1, 1)[:, :, 0] if s.ndim == 2 else sinks.view(-1, 1, 1)
            s = torch.cat([s, column.expand(*s.shape[:-1], 1)], -1)
        # The softmax of an empty row is NaN, and its gradient too, even if masked afterwards.
        empty = (s.detach() == -torch.inf).all(-1, keepdim=True)
        s = s.masked_fill(empty, 0.0)
        p = softmax(s)[..., : k.shape[-2]].masked_fill(hidden, 0.0)
        w = p if dropout_mask is None else p * dropout_mask / (1 - dropout_rate)
        out = w @ _heads(v, q)
        if not return_lse:
            return out
        # The gradient of torch.logsumexp is exp(s − lse), which is lost where |lse| is large.
        s = s.to(torch.promote_types(q.dtype, torch.float32))
        m = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
        lse = m + (s - m).exp().sum(-1, keepdim=True).log()
        return out, lse.masked_fill(empty, -torch.inf).squeeze(-1)

    return attend


def through_maximum(s: Any) -> Any:
    """Return the softmax, with the maximum of each row in the graph of autograd."""
    import torch

    if not s.shape[-1]:
        return s
    wide = s.to(torch.promote_types(s.dtype, torch.float32))  # as torch's softmax computes
    p = (wide - wide.amax(-1, keepdim=True)).exp()
    return (p / p.sum(-1, keepdim=True)).to(s.dtype)


def _heads(x: Any, q: Any) -> Any:
    """Repeat shared heads."""
    return x if q.ndim < 3 else x.repeat_interleave(q.shape[-3] // max(x.shape[-3], 1), -3)


def _visible(s: Any, mask: Any, causal: bool, window: tuple[int | None, int | None] | None) -> Any:
    T, S = s.shape[-2:]
    left, right = window or (None, None)
    right = 0 if causal else right
    visible = s.new_ones(T, S).bool() if mask is None else mask
    visible = visible if left is None else visible & s.new_ones(T, S).bool().triu(S - T - left)
    return visible if right is None else visible & s.new_ones(T, S).bool().tril(S - T + right)


TARGETS = "npattn.testing.targets.torch"
TOP_LEFT = PROFILES["torch.sdpa"].conventions
# docs/findings.md shows each. A weight of 0 times NaN is NaN, in out and in the gradients.
NAN = ("hidden-nan-k", "hidden-nan-v", "hidden-nan-kv", "nan-query-alone")
TORCH: dict[str, Any] = {"framework": "torch", "needs": "torch", "breaks": NAN}


def _errs_on(recipe: Recipe) -> bool:
    """Return True where a whole row has a far bias, or float16 sums overflow without keys."""
    return recipe.bias in ("-1e9 rows", "least rows") or (
        recipe.S == 0 and recipe.dtype == "float16"
    )


correct("torch eager", "One line per equation, every result a tensor in the dtype of q.",
        attention(lambda q, k, scale: scale * (q @ k.mT)),
        **(TORCH | {"breaks": (*NAN, *STORES_PRODUCTS)}))  # fmt: skip
correct("torch eager, scale on q",
        "The same with q · scale as a tensor, as in torch.nn.MultiheadAttention.",
        attention(lambda q, k, scale: (scale * q) @ k.mT), **TORCH)  # fmt: skip
correct("torch, through the maximum",
        "A softmax by hand, whose gradient goes through the maximum of each row: exactly, it is 0.",
        attention(lambda q, k, scale: scale * (q @ k.mT), through_maximum),
        **(TORCH | {"breaks": (*NAN, *STORES_PRODUCTS)}))  # fmt: skip
correct("torch.sdpa-math",
        "torch.nn.functional.scaled_dot_product_attention with its MATH backend.",
        import_on_call(TARGETS, "sdpa_math", "causal", "bias", "scale"), conventions=TOP_LEFT,
        **TORCH)  # fmt: skip
correct("torch.sdpa", "The same with the backend chosen here; causal with a scale ≤ 0 is wrong.",
        import_on_call(TARGETS, "sdpa", "causal", "bias"), conventions=TOP_LEFT, errs_on=_errs_on,
        **(TORCH | {"breaks": (*NAN, "nan-query")}))  # fmt: skip
