"""torch: how its tensors go in and out, and its attention functions as targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np

from npattn.arrays import Array
from npattn.errors import MissingExtraError, OptionError
from npattn.testing.adapters.base import ImplementationError, ResultError

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as err:
    raise MissingExtraError(
        "torch targets need torch; npattn itself does not: pip install 'npattn[torch]'"
    ) from err

__all__ = ["Torch", "npattn_fused", "npattn_torch", "sdpa", "sdpa_math"]

# torch has dtypes that NumPy has only through ml_dtypes: they travel as integers of their size.
DISGUISES = {
    torch.bfloat16: (ml_dtypes.bfloat16, torch.int16, np.int16),
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, torch.int8, np.int8),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, torch.int8, np.int8),
}


class Torch:
    """torch tensors on a device; gradients by autograd."""

    name = "torch"
    differentiates = True

    def __init__(self, device: str | None = None) -> None:
        self.device = device or "cpu"
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as err:
            told = str(err).splitlines()[0]
            raise OptionError(f"device is {device!r}, which torch cannot use here: {told}") from err

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def finish(self) -> None:
        if torch.device(self.device).type != "cpu":
            torch.accelerator.synchronize(self.device)

    def allowing(self, dtype: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def give(self, array: Array) -> torch.Tensor:
        if any(stride < 0 for stride in array.strides):
            raise ImplementationError("torch tensors have no negative strides")
        if not array.flags.writeable:  # a view of stride 0: expanded on torch's side instead
            first = self.give(np.array(array[:1]))
            return first.expand(array.shape)
        for tensor_dtype, (dtype, bits, np_bits) in DISGUISES.items():
            if array.dtype == dtype:
                tensor = torch.from_numpy(array.view(np_bits)).to(self.device)
                assert tensor.dtype == bits
                return tensor.view(tensor_dtype)
        return torch.from_numpy(array).to(self.device)

    def take(self, value: Any) -> Array:
        if not isinstance(value, torch.Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise ResultError(f"returned {kind}, must be a torch tensor (or framework=)")
        value = value.detach().cpu()
        if value.dtype in DISGUISES:
            dtype, bits, _ = DISGUISES[value.dtype]
            return np.array(value.contiguous().view(bits).numpy().view(dtype))
        return np.array(value.numpy())

    def gradients(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        asked: Iterable[str],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        asked = tuple(asked)
        leaves = {name: inputs[name].detach().requires_grad_() for name in asked}
        results = call(**leaves)
        reached = [name for name in cotangents if results[name].requires_grad]
        if not reached and any(results[name].numel() for name in cotangents):
            raise ImplementationError("its result does not require grad: autograd cannot reach it")
        grads: Iterable[torch.Tensor | None] = [None] * len(asked)
        if reached:
            outputs, dout = zip(*((results[n], cotangents[n]) for n in reached), strict=True)
            grads = torch.autograd.grad(outputs, list(leaves.values()), dout, allow_unused=True)
        pairs = zip(asked, grads, strict=True)
        # None is how autograd says zero.
        return results, {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in pairs}


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` as a user calls it.

    It has one argument for mask and bias, and refuses ``is_causal`` beside it: whoever has several
    puts −inf into the bias where the mask or the (top-left) causal mask hides.
    """
    hidden = mask
    if causal and (mask is not None or bias is not None):
        triangle = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        hidden, causal = triangle if mask is None else mask & triangle, False
    attn_mask = hidden
    if bias is not None:
        attn_mask = bias if hidden is None else bias.masked_fill(~hidden, float("-inf"))
    grouped = q.ndim > 2 and q.shape[-3] != k.shape[-3]
    return scaled_dot_product_attention(
        q, k, v, attn_mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def sdpa_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """`sdpa`, held to the MATH backend."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, mask, causal=causal, bias=bias, scale=scale)


def npattn_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: Any = None,
    sinks: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    dropout_rate: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """`npattn.torch.forward`, rounded to the dtype of q."""
    from npattn.torch import forward

    fwd = forward(
        q,
        k,
        v,
        mask,
        causal="bottom_right" if causal else False,
        window=window,
        bias=bias,
        scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        sinks=sinks,
        dropout_mask=dropout_mask,
        dropout_rate=dropout_rate,
    )
    out: Any = fwd.out
    return (out.to(q.dtype), fwd.lse) if return_lse else out.to(q.dtype)


def npattn_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """``npattn.torch.attention(engine="fused")``, with the options that it has on any device."""
    from npattn.torch import attention

    return attention(
        q,
        k,
        v,
        mask,
        causal="bottom_right" if causal else False,
        window=window,
        bias=bias,
        scale=scale,
        engine="fused",
    )
