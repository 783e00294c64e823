"""MultiHeadAttention without some of its heads, and from and to those of torch and of npattn."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn

from npattn import multihead
from npattn.errors import OptionError
from npattn.weights.exchange import check_kind, optional, read, transpose
from npattn.weights.torch import name_as_torch, read_projections, tensor_of

Tensor = torch.Tensor
Module = TypeVar("Module", bound=nn.Module)

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
NormWeight = Literal["shared", "head", "number"]
NORMS = ("norm_q", "norm_k")
NORM_BIASES = ("norm_q_bias", "norm_k_bias")


def prune(kind: type[Module], module: Any, heads: Sequence[int]) -> Module:
    """Return a module of `kind` with copies of the parameters of the other query heads."""
    kept = to_numpy(module).prune(heads)
    other = _like(kind, module, num_heads=kept.num_heads, num_kv_heads=kept.num_kv_heads)
    device = next(module.parameters()).device
    state = {name: x.to(device) for name, x in _state_of(kept, other).items()}
    return _load_copies(other, state, module)


def projection_rows(module: Any) -> list[int]:
    """Numbers of rows of in_proj_weight for queries, keys and values."""
    H, K, D = module.num_heads, module.num_kv_heads, module.head_dim
    return [H * D, K * D, K * module.value_head_dim]


def norm_shape(module: Any, heads: int) -> tuple[int, ...]:
    """Shape of the parameters of the norm of queries or keys with so many heads."""
    if module.qk_norm.endswith("_projection"):
        return (heads * module.head_dim,)
    shapes = {"shared": (module.head_dim,), "head": (heads, module.head_dim)}
    return {**shapes, "number": (heads, 1)}[module.norm_weight]


def _like(kind: type[Module], module: Any, **changes: Any) -> Module:
    """Return a module with the same options, on the meta device: no random numbers are used."""
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first",
             "num_kv_heads", "head_dim", "value_head_dim", "out_dim", "merge", "qk_norm",
             "norm_eps", "norm_weight", "compute_dtype", "engine", "empty_row")  # fmt: skip
    options = {name: getattr(module, name) for name in names} | changes
    options["gate"] = module.gate_proj is not None
    options |= {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    return kind(**options, device="meta")


def _load_copies(module: Module, state: Mapping[str, Tensor], like: nn.Module) -> Module:
    """Load copies of tensors into a module on the meta device; requires_grad and mode as `like`."""
    copies = {name: x.detach().clone() for name, x in state.items()}
    module.load_state_dict(copies, assign=True)
    parameters = dict(like.named_parameters())
    for name, x in module.named_parameters():
        x.requires_grad_(parameters[name].requires_grad)
    return module.train(like.training)


# --- torch ----------------------------------------------------------------------------------------


def from_torch(kind: type[Module], module: nn.MultiheadAttention, options: Any) -> Module:
    """Return a module of `kind` with copies of the parameters of torch's module."""
    parent = nn.MultiheadAttention
    check_kind("module", module, {"torch.nn.MultiheadAttention": parent}, ("forward",))
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim",
             "batch_first")  # fmt: skip
    same: dict[str, Any] = {name: getattr(module, name) for name in names}
    same |= {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    return _load_copies(kind(**same, **options, device="meta"), module.state_dict(), module)


def to_torch(module: Any) -> nn.MultiheadAttention:
    """Return torch's module with copies of the parameters."""
    if module.num_kv_heads != module.num_heads:
        raise OptionError(
            f"num_kv_heads is {module.num_kv_heads}, must be {module.num_heads} as num_heads: "
            "torch.nn.MultiheadAttention shares no heads"
        )
    if module.head_dim * module.num_heads != module.embed_dim:
        raise OptionError(
            f"{module.num_heads} heads have size {module.head_dim}, must add up to embed_dim "
            f"{module.embed_dim}: torch.nn.MultiheadAttention has no others"
        )
    settings = {
        "value_head_dim": module.head_dim, "out_dim": module.embed_dim, "merge": "concat",
        "qk_norm": None,
    }  # fmt: skip
    if module.gate_proj is not None:
        raise OptionError("gate is True, must be False: torch.nn.MultiheadAttention has no gate")
    for name, must in settings.items():
        if getattr(module, name) != must:
            raise OptionError(
                f"{name} is {getattr(module, name)!r}, must be {must!r}: "
                "torch.nn.MultiheadAttention has no other"
            )
    theirs = nn.MultiheadAttention(
        module.embed_dim, module.num_heads, module.dropout, bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None, add_zero_attn=module.add_zero_attn, kdim=module.kdim,
        vdim=module.vdim, batch_first=module.batch_first, device="meta",
    )  # fmt: skip
    return _load_copies(theirs, module.state_dict(), module)


# --- NumPy ----------------------------------------------------------------------------------------


def from_numpy(
    kind: type[Module], mha: multihead.MultiHeadAttention, batch_first: bool, options: Any
) -> Module:
    """Return a module of `kind` with the bits of the parameters of `mha`."""
    _check_fits(mha)
    p, embed, names = mha.parameters, mha.wq.shape[0], (*NORMS, *NORM_BIASES)
    module: Any = kind(
        embed, mha.num_heads, bias="bo" in p, add_bias_kv="bias_k" in p,
        add_zero_attn=bool(mha.add_zero_attn), kdim=mha.wk.shape[0], vdim=mha.wv.shape[0],
        batch_first=batch_first, device="meta", num_kv_heads=mha.num_kv_heads,
        head_dim=mha.head_size, value_head_dim=mha.value_size, out_dim=p["wo"].shape[1],
        merge=mha.merge, qk_norm=mha.qk_norm, norm_eps=mha.norm_eps,
        norm_weight=next((_norm_weight(mha, n) for n in names if n in p), "shared"), gate="wg" in p,
        **options,
    )  # fmt: skip
    module.load_state_dict(_state_of(mha, module), assign=True)
    return module  # type: ignore[no-any-return]


def _state_of(mha: multihead.MultiHeadAttention, module: Any) -> dict[str, Tensor]:
    """Return the parameters of `mha` by the names of the module, on the CPU."""
    p = mha.parameters
    state = name_as_torch(p, packed=module.in_proj_weight is not None)
    if "wg" in p:
        state["gate_proj.weight"] = transpose(p["wg"])
    if "bg" in p:
        state["gate_proj.bias"] = p["bg"]
    for name, parameter in module.named_parameters():
        if name in (*NORMS, *NORM_BIASES):  # npattn's may be left out
            fill = np.zeros if name in NORM_BIASES else np.ones
            state[name] = p[name] if name in p else fill(parameter.shape, p["wq"].dtype)
    return {name: tensor_of(array) for name, array in state.items()}


def to_numpy(module: Any) -> multihead.MultiHeadAttention:
    """Return the module of npattn with the bits of the parameters."""
    arrays = read_projections(module, projection_rows(module))
    if module.gate_proj is not None:
        arrays["wg"] = transpose(read("gate_proj.weight", module.gate_proj.weight))
        arrays["bg"] = optional("gate_proj.bias", module.gate_proj.bias)
    parameters = dict(module.named_parameters())
    arrays |= {name: optional(name, parameters.get(name)) for name in (*NORMS, *NORM_BIASES)}
    return multihead.MultiHeadAttention(
        **arrays, num_heads=module.num_heads, num_kv_heads=module.num_kv_heads,
        add_zero_attn=module.add_zero_attn, merge=module.merge, qk_norm=module.qk_norm,
        norm_eps=module.norm_eps,
    )  # fmt: skip


def _norm_weight(mha: multihead.MultiHeadAttention, name: str) -> NormWeight:
    """Return the kind of a parameter of a norm, by its shape."""
    shape = mha.parameters[name].shape
    if len(shape) == 1:
        return "shared"
    return "number" if shape[1] == 1 else "head"


def _check_fits(mha: multihead.MultiHeadAttention) -> None:
    """Raise OptionError if the module on tensors has no place for a part of `mha`."""
    dtypes = {n: x.dtype for n, x in mha.parameters.items()}
    kinds = {_norm_weight(mha, n) for n in (*NORMS, *NORM_BIASES) if n in mha.parameters}
    names = ("bq", "bk", "bv", "bo", *(["bg"] if mha.wg is not None else []))
    missing = [getattr(mha, name) is None for name in names]
    wrong = None
    if mha.wo is None:
        wrong = "wo is None, must be an array: this module always projects the heads"
    elif not (mha.qk_norm or "layer").startswith("layer") and not (
        {*NORM_BIASES}.isdisjoint(mha.parameters)
    ):
        wrong = f'a bias beside qk_norm="{mha.qk_norm}", must be "layer": other norms have none'
    elif len(kinds) > 1:
        wrong = (
            "norm_q and norm_k differ in kind, must be one row, or rows or numbers for each head"
        )
    elif len(set(missing)) > 1:
        wrong = f"only some of {', '.join(names)} are there: pass zeros for the missing ones"
    elif len(set(dtypes.values())) > 1:
        name = next(name for name, dtype in dtypes.items() if dtype != dtypes["wq"])
        wrong = f"{name} is {dtypes[name]}, must be {dtypes['wq']} as wq"
    if wrong:
        raise OptionError(f"{wrong} [from_numpy of {mha!r}]")
