"""Arguments of MultiHeadAttention.forward: checked, batch first, masks in npattn's terms."""

from typing import Any, NamedTuple

import torch

from npattn.errors import DtypeError, OptionError, ShapeError

Tensor = torch.Tensor


class ModuleInputs(NamedTuple):
    """Inputs (B, T, embed_dim), (B, S, kdim), (B, S, vdim), and masks that broadcast to scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None  # True = may attend
    bias: Tensor | None
    batched: bool


def read_inputs(module: Any, inputs: dict[str, Any], masks: dict[str, Any]) -> ModuleInputs:
    """Check query, key, value, key_padding_mask and attn_mask, and bring them to one form."""
    _check_kinds(inputs, masks)
    query = inputs["query"]
    batched, ranks = query.ndim == 3, {x.ndim for x in inputs.values()}
    widths = (module.embed_dim, module.kdim, module.vdim)
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in inputs.items())
    if len(ranks) > 1 or query.ndim not in (2, 3):
        raise ShapeError(f"query, key, value must all have rank 2, or all rank 3 [{shapes}]")
    for (name, x), width in zip(inputs.items(), widths, strict=True):
        if x.shape[-1] != width:
            raise ShapeError(f"{name} has size {x.shape[-1]}, must have size {width} [{shapes}]")
    if not batched:
        inputs = {name: x[None] for name, x in inputs.items()}
    elif not module.batch_first:
        inputs = {name: x.transpose(0, 1) for name, x in inputs.items()}
    query, key, value = inputs.values()
    B, T, S, H = query.shape[0], query.shape[1], key.shape[1], module.num_heads
    if key.shape[:2] != (B, S) or value.shape[:2] != (B, S):
        raise ShapeError(f"key and value must have {B} samples and the same length [{shapes}]")
    of_keys: Any = {(B, S) if batched else (S,): (B, 1, 1, S)}
    of_scores: Any = {(T, S): (1, 1, T, S), (B * H, T, S): (B, H, T, S)}
    padding = _reshape_mask("key_padding_mask", masks["key_padding_mask"], of_keys)
    mask = _reshape_mask("attn_mask", masks["attn_mask"], of_scores)
    visible, bias = _merge_masks(padding, mask, _mask_dtype(module, query))
    return ModuleInputs(query, key, value, visible, bias, batched)


def _check_kinds(inputs: dict[str, Any], masks: dict[str, Any]) -> None:
    """Raise unless inputs are strided tensors, and masks tensors on the device of query."""
    for name, x in inputs.items():
        if not isinstance(x, Tensor) or x.is_nested:
            kind = "nested" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise DtypeError(f"{name} is {kind}, must be a strided tensor")
    device = inputs["query"].device
    for name, mask in masks.items():
        if mask is not None and not isinstance(mask, Tensor):
            raise DtypeError(
                f"{name} is a {type(mask).__name__}, must be a tensor: npattn.torch.attention "
                "takes objects of npattn.masks"
            )
        if mask is not None and mask.device != device:
            raise OptionError(f"{name} is on {mask.device}, must be on {device} as query")


def _mask_dtype(module: Any, query: Tensor) -> torch.dtype:
    """Return the dtype in which two floating masks are added."""
    if module.engine == "fused":
        return query.dtype
    if module.compute_dtype in (torch.float32, torch.float64):
        return module.compute_dtype  # type: ignore[no-any-return]
    return torch.float64 if query.device.type != "mps" else torch.float32


def _reshape_mask(
    name: str, mask: Tensor | None, shapes: dict[tuple[int, ...], tuple[int, ...]]
) -> Tensor | None:
    """Reshape a mask to broadcast against (B, H, T, S)."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DtypeError(f"{name} is {mask.dtype}, must be bool (True hides) or floating (added)")
    if tuple(mask.shape) not in shapes:
        legal = " or ".join(map(str, shapes))
        raise ShapeError(f"{name} has shape {tuple(mask.shape)}, must have {legal}")
    return mask.reshape(shapes[tuple(mask.shape)])


def _merge_masks(
    padding: Tensor | None, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Merge two masks, each of which hides or is added, to `visible` and a bias."""
    both = [x for x in (padding, mask) if x is not None]
    visible = [~x for x in both if x.dtype == torch.bool]
    biases = [x for x in both if x.dtype != torch.bool]
    return (
        visible[0] & visible[1] if len(visible) == 2 else next(iter(visible), None),
        biases[0].to(dtype) + biases[1].to(dtype) if len(biases) == 2 else next(iter(biases), None),
    )
