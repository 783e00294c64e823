"""Reading and writing torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from npattn.multihead import MultiHeadAttention
from npattn.problem.arrays import Array
from npattn.weights import exchange

if TYPE_CHECKING:
    import torch

EXTRA = ("bias_k", "bias_v")


def from_torch(module: torch.nn.MultiheadAttention) -> MultiHeadAttention:
    """Read the weights of a ``torch.nn.MultiheadAttention`` of any device, in their own dtype.

    Parameters
    ----------
    module : torch.nn.MultiheadAttention
        With or without bias, ``kdim``, ``vdim``, ``add_bias_kv``, ``add_zero_attn``. Whatever its
        ``batch_first``, `MultiHeadAttention.forward` takes (..., T, in_q); True in a mask hides in
        torch, and shows in npattn.

    Returns
    -------
    MultiHeadAttention

    Raises
    ------
    OptionError
        If module is something else, a subclass with its own forward, on the meta device, or in
        training mode with dropout.
    DtypeError
        If a weight is not floating.
    MissingExtraError
        If torch is not installed.

    Examples
    --------
    >>> import torch
    >>> mha = from_torch(torch.nn.MultiheadAttention(6, 2, kdim=5, vdim=3, dtype=torch.bfloat16))
    >>> mha.wk.shape, mha.wv.shape, mha.bo.dtype
    ((5, 6), (3, 6), dtype(bfloat16))
    """
    torch = _torch("from_torch")
    parent = torch.nn.MultiheadAttention
    exchange.check_kind("module", module, {"torch.nn.MultiheadAttention": parent}, ("forward",))
    if module.dropout and module.training:
        raise exchange.dropout_error(
            "module", module.dropout, "is in training mode", "module.eval()"
        )
    arguments = read_projections(module, [module.embed_dim] * 3)
    options = {"num_heads": module.num_heads, "add_zero_attn": module.add_zero_attn}
    return MultiHeadAttention(**arguments, **options)


def read_projections(module: Any, rows: list[int]) -> dict[str, Any]:
    """Read the projections, of so many rows for q, k and v, and appended keys of a torch module."""
    ends = np.cumsum(rows)[:-1]
    if module.in_proj_weight is not None:
        weights = np.split(exchange.read("in_proj_weight", module.in_proj_weight), ends)
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        weights = [exchange.read(name, getattr(module, name)) for name in names]
    arrays: dict[str, Any] = {
        name: exchange.transpose(w) for name, w in zip(("wq", "wk", "wv"), weights, strict=True)
    }
    arrays["wo"] = exchange.transpose(exchange.read("out_proj.weight", module.out_proj.weight))
    arrays["bo"] = exchange.optional("out_proj.bias", module.out_proj.bias)
    if module.in_proj_bias is not None:
        biases = np.split(exchange.read("in_proj_bias", module.in_proj_bias), ends)
        arrays |= dict(zip(("bq", "bk", "bv"), biases, strict=True))
    for name in EXTRA:
        extra = exchange.optional(name, getattr(module, name))  # (1, 1, H·D)
        arrays[name] = None if extra is None else extra.reshape(-1)
    return arrays


def name_as_torch(p: Mapping[str, Array], packed: bool) -> dict[str, Array]:
    """Return projections and appended keys by torch's names, as torch has them."""
    weights = [exchange.transpose(p[name]) for name in ("wq", "wk", "wv")]
    state = {"out_proj.weight": exchange.transpose(p["wo"])}
    if packed:
        state["in_proj_weight"] = np.concatenate(weights)
    else:
        state |= {f"{n}_proj_weight": w for n, w in zip("qkv", weights, strict=True)}
    if "bo" in p:
        state["in_proj_bias"] = np.concatenate([p[name] for name in ("bq", "bk", "bv")])
        state["out_proj.bias"] = p["bo"]
    return state | {name: p[name].reshape(1, 1, -1) for name in EXTRA if name in p}


def to_torch(mha: MultiHeadAttention, *, batch_first: bool = True) -> torch.nn.MultiheadAttention:
    """Write a ``torch.nn.MultiheadAttention`` on the CPU, with the same bits in the same dtype.

    Parameters
    ----------
    mha : MultiHeadAttention
    batch_first : bool, default True
        Let it take (B, T, in_q), as in npattn, instead of torch's (T, B, in_q).

    Returns
    -------
    torch.nn.MultiheadAttention

    Raises
    ------
    OptionError
        If torch cannot represent the module: shared key/value heads, heads whose sizes do not add
        up to in_q, another output size, no output projection, some biases without the others,
        ``merge="reshape"``, qk_norm, a gate, several dtypes, or one that torch does not have.
    MissingExtraError
        If torch is not installed.

    Examples
    --------
    >>> import npattn
    >>> to_torch(npattn.MultiHeadAttention.init(6, 2, seed=0)).in_proj_weight.shape
    torch.Size([18, 6])
    """
    torch = _torch("to_torch")
    _check_fits_torch(mha, torch)
    p, embed = mha.parameters, mha.wq.shape[0]
    kdim, vdim = mha.wk.shape[0], mha.wv.shape[0]
    # On the meta device torch initialises nothing, so that its random state stays as it is.
    module = torch.nn.MultiheadAttention(
        embed, mha.num_heads, bias="bo" in p, add_bias_kv="bias_k" in p,
        add_zero_attn=bool(mha.add_zero_attn), kdim=kdim, vdim=vdim, batch_first=batch_first,
        device="meta",
    )  # fmt: skip
    state = name_as_torch(p, packed=kdim == vdim == embed)
    tensors = {name: tensor_of(array) for name, array in state.items()}
    module.load_state_dict(tensors, assign=True)
    return module  # type: ignore[no-any-return]  # torch is Any here


def _check_fits_torch(mha: MultiHeadAttention, torch: Any) -> None:
    """Raise OptionError unless wq and wo are (embed, embed), wv is (·, embed), of one dtype."""
    embed, first = mha.wq.shape[0], mha.wq.dtype.name
    wo = () if mha.wo is None else mha.wo.shape
    square = f"must be ({embed}, {embed}): torch has H·D = H·E = in_q = out"
    values = f"must be ({mha.wv.shape[0]}, {embed}): torch has E = D"
    others = [f"{n} is {x.dtype}" for n, x in mha.parameters.items() if x.dtype.name != first]
    is_real = mha.wq.dtype.kind != "c" and isinstance(getattr(torch, first, None), torch.dtype)
    exchange.check_fits(
        "to_torch", mha, (mha.wq.shape[1] != embed, f"wq has shape {mha.wq.shape}, {square}"),
        (mha.wv.shape[1] != embed, f"wv has shape {mha.wv.shape}, {values}"),
        (wo != (embed, embed), f"wo has shape {wo}, {square}"),
        (bool(others), f"{', '.join(others)}, must be {first} as wq"),
        (not is_real, f"wq is {first}, must be a real floating dtype that torch has"), appends=True,
        value_size=True,
    )  # fmt: skip


def _torch(function: str) -> Any:
    with exchange.needed_by(function, "torch"):
        import torch
    return torch


def tensor_of(array: Array) -> Any:
    """Copy an array to a tensor with the same bits."""
    torch = _torch("to_torch")
    plain = np.array(array, array.dtype.newbyteorder("="), order="C")  # a copy
    bits = torch.from_numpy(plain.view(f"i{plain.itemsize}"))
    assert bits.dtype == exchange.torch_bits(torch, plain.itemsize)
    return bits.view(getattr(torch, plain.dtype.name))
