"""MultiHeadAttention without some of its heads, and from and to those of torch and of npattn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from npattn import multihead
from npattn.errors import OptionError
from npattn.multihead_build import remaining_heads
from npattn.weights.reading import check_kind, optional, read, transpose
from npattn.weights.torch import tensor_of

__all__ = [
    "SEPARATE",
    "from_numpy",
    "from_torch",
    "projection_rows",
    "prune",
    "to_numpy",
    "to_torch",
]

Tensor = torch.Tensor
Module = TypeVar("Module", bound=nn.Module)

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def prune(kind: type[Module], module: Any, heads: Sequence[int]) -> Module:
    """Return a module of `kind` with copies of the parameters of the other query heads."""
    queries, keys = remaining_heads(heads, module.num_heads, module.num_kv_heads)
    size = module.head_dim

    def take(x: Tensor, chosen: Sequence[int], axis: int) -> Tensor:
        x = x.movedim(axis, -1)
        x = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)[..., list(chosen), :]
        return x.flatten(-2).movedim(-1, axis).contiguous()

    def take_packed(x: Tensor) -> Tensor:
        pairs = zip(torch.split(x, projection_rows(module)), (queries, keys, keys), strict=True)
        return torch.cat([take(rows, chosen, 0) for rows, chosen in pairs])

    state: dict[str, Tensor] = {}
    for name, x in module.state_dict().items():
        if name.startswith("in_proj"):
            state[name] = take_packed(x)
        elif name == "out_proj.weight":
            state[name] = take(x, queries, 1)
        elif name == "out_proj.bias":
            state[name] = x
        else:
            chosen = queries if name == "q_proj_weight" else keys
            state[name] = take(x, chosen, 2 if name in ("bias_k", "bias_v") else 0)
    other = _like(kind, module, num_heads=len(queries), num_kv_heads=len(keys))
    return _load_copies(other, state, module)


def projection_rows(module: Any) -> list[int]:
    """Numbers of rows of in_proj_weight for queries, keys and values."""
    return [heads * module.head_dim for heads in (module.num_heads, *[module.num_kv_heads] * 2)]


def _like(kind: type[Module], module: Any, **changes: Any) -> Module:
    """Return a module with the same options, on the meta device: no random numbers are used."""
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first",
             "num_kv_heads", "head_dim", "compute_dtype", "engine", "empty_row")  # fmt: skip
    options = {name: getattr(module, name) for name in names} | changes
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
    theirs = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        module.dropout,
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=module.batch_first,
        device="meta",
    )
    return _load_copies(theirs, module.state_dict(), module)


# --- NumPy ----------------------------------------------------------------------------------------


def from_numpy(
    kind: type[Module], mha: multihead.MultiHeadAttention, batch_first: bool, options: Any
) -> Module:
    """Return a module of `kind` with the bits of the parameters of `mha`."""
    _check_fits(mha)
    p, embed = mha.parameters, mha.wq.shape[0]
    module: Any = kind(
        embed,
        mha.num_heads,
        bias="bo" in p,
        add_bias_kv="bias_k" in p,
        add_zero_attn=bool(mha.add_zero_attn),
        kdim=mha.wk.shape[0],
        vdim=mha.wv.shape[0],
        batch_first=batch_first,
        device="meta",
        num_kv_heads=mha.num_kv_heads,
        head_dim=mha.head_size,
        **options,
    )
    tensors = {name: tensor_of(array) for name, array in p.items()}
    weights = [tensors[name].T for name in ("wq", "wk", "wv")]
    state = {"out_proj.weight": tensors["wo"].T.contiguous()}
    if module.in_proj_weight is not None:
        state["in_proj_weight"] = torch.cat(weights)
    else:
        state |= {n: w.contiguous() for n, w in zip(SEPARATE, weights, strict=True)}
    if "bo" in p:
        state["in_proj_bias"] = torch.cat([tensors[name] for name in ("bq", "bk", "bv")])
        state["out_proj.bias"] = tensors["bo"]
    state |= {n: tensors[n].view(1, 1, -1) for n in ("bias_k", "bias_v") if n in p}
    module.load_state_dict(state, assign=True)
    return module  # type: ignore[no-any-return]


def to_numpy(module: Any) -> multihead.MultiHeadAttention:
    """Return the module of npattn with the bits of the parameters."""
    rows = projection_rows(module)
    if module.in_proj_weight is not None:
        weights = [read("in_proj_weight", w) for w in torch.split(module.in_proj_weight, rows)]
    else:
        weights = [read(name, getattr(module, name)) for name in SEPARATE]
    arrays: dict[str, Any] = dict(zip(("wq", "wk", "wv"), map(transpose, weights), strict=True))
    arrays["wo"] = transpose(read("out_proj.weight", module.out_proj.weight))
    arrays["bo"] = optional("out_proj.bias", module.out_proj.bias)
    if module.in_proj_bias is not None:
        biases = [read("in_proj_bias", b) for b in torch.split(module.in_proj_bias, rows)]
        arrays |= dict(zip(("bq", "bk", "bv"), biases, strict=True))
    for name in ("bias_k", "bias_v"):
        extra = optional(name, getattr(module, name))
        arrays[name] = None if extra is None else extra.reshape(-1)
    return multihead.MultiHeadAttention(
        **arrays,
        num_heads=module.num_heads,
        num_kv_heads=module.num_kv_heads,
        add_zero_attn=module.add_zero_attn,
    )


def _check_fits(mha: multihead.MultiHeadAttention) -> None:
    """Raise OptionError if the module on tensors has no place for a part of `mha`."""
    embed, dtypes = mha.wq.shape[0], {n: x.dtype for n, x in mha.parameters.items()}
    missing = [getattr(mha, name) is None for name in ("bq", "bk", "bv", "bo")]
    wrong = None
    if mha.wo is None:
        wrong = "wo is None, must be an array: this module always projects the heads"
    elif mha.merge != "concat":
        wrong = f'merge is {mha.merge!r}, must be "concat"'
    elif mha.qk_norm is not None:
        wrong = f"qk_norm is {mha.qk_norm!r}, must be None: this module does not normalise heads"
    elif mha.value_size != mha.head_size:
        wrong = f"heads of v have size {mha.value_size}, must have that of q, {mha.head_size}"
    elif mha.wo.shape[1] != embed:
        wrong = f"wo has shape {mha.wo.shape}, must have {embed} columns, as queries have"
    elif len(set(missing)) > 1:
        wrong = "only some of bq, bk, bv, bo are there: pass zeros for the missing ones"
    elif len(set(dtypes.values())) > 1:
        name = next(name for name, dtype in dtypes.items() if dtype != dtypes["wq"])
        wrong = f"{name} is {dtypes[name]}, must be {dtypes['wq']} as wq"
    if wrong:
        raise OptionError(f"{wrong} [from_numpy of {mha!r}]")
