"""Gathered attention and lists of keys on torch tensors, as `npattn.variants.gathered`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike

from npattn.checks import read_floating
from npattn.errors import DtypeError, OptionError
from npattn.foreign import unknown_option
from npattn.problem import Forward
from npattn.torch.api import evaluate
from npattn.torch.biases import TensorBias
from npattn.torch.problem import Problem
from npattn.torch.tensors import stand_in, to_host, to_tensor
from npattn.variants import gathered as arrays
from npattn.variants.gathered import OPTIONS
from npattn.variants.indices import NAN_SCORE, check_lists, check_ranking, read_indices

__all__ = [
    "GatheredResults",
    "attention",
    "drop_repeats",
    "forward",
    "index_mask",
    "top_k",
]

Tensor = torch.Tensor


class GatheredResults(NamedTuple):
    """Output, lse, and the attention inside, whose queries are a batch axis."""

    out: Tensor
    lse: Tensor
    attention: Forward
    headless: bool

    @property
    def weights(self) -> Tensor:
        """Weights (..., H, T, n) of the entries of each list, differentiable once."""
        inside: Any = self.attention.weights
        weights: Tensor = inside[..., 0, :].swapaxes(-3, -2)
        return weights[0] if self.headless else weights


def attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor | ArrayLike, **options: Any
) -> Tensor:
    """Attention in which each query sees the keys of a list.

    Parameters
    ----------
    q, k, v : Tensor
        (..., H, T, D), (..., K, S, D), (..., K, S, E), of floating dtypes on one device.
    indices : int Tensor or array_like (..., H, T, n)
        As in `npattn.variants.gathered.attention`.
    **options
        As there, of `npattn.torch.attention`.

    Returns
    -------
    Tensor (..., H, T, E)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.variants.gathered.attention`; DtypeError also if q, k or v is no tensor.
    """
    return forward(q, k, v, indices, **options).out


def forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor | ArrayLike, **options: Any
) -> GatheredResults:
    """Gathered attention with its lse and weights.

    Parameters
    ----------
    q, k, v, indices, **options
        As in `attention`.

    Returns
    -------
    GatheredResults
        .out (..., H, T, E), .lse (..., H, T), .weights (..., H, T, n), .attention

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `attention`.
    """
    for name in options:
        if name not in OPTIONS:
            raise unknown_option("gathered.attention", name, OPTIONS)
    bias = options.get("bias")
    if isinstance(bias, TensorBias) and isinstance(q, Tensor) and isinstance(k, Tensor):
        options["bias"] = bias.to_tensor(q.shape[-2], k.shape[-2], q.device)
    whole = Problem(q, k, v, **options)
    if whole.storage is not None:
        raise DtypeError(f"dtype is {whole.storage}, must be float32 or float64")
    chosen = read_indices(_host(indices))
    check_lists(chosen, whole.lead, whole.H, whole.T, whole.S)
    heads = chosen.shape[-3] if chosen.ndim > 2 and chosen.shape[-3] > 1 else whole.K
    lists = torch.as_tensor(chosen, device=q.device)
    # Unused entries read a key of zeros behind the last.
    lists = torch.where(lists < 0, whole.S, lists)
    lists = lists.expand(*whole.lead, heads, whole.T, lists.shape[-1])
    if heads < whole.H and heads > 1:
        of_heads = lists.repeat_interleave(whole.H // heads, -3)
    else:
        of_heads = lists
    keys, values = (_gather_rows(_by_head(x, whole, heads), lists) for x in (whole.k, whole.v))
    q = whole.q[None] if whole.headless else whole.q
    arrays: Any = (("bias", whole.bias_array, 0), ("dropout_mask", whole.dropout_mask, True))
    beside = {
        name: _gather_scores(array, of_heads, whole, fill)
        for name, array, fill in arrays
        if array is not None
    }
    listed = (of_heads < whole.S).swapaxes(-3, -2)[..., None, :]
    visible: Any = whole.visible
    if visible is not None:
        listed = listed & _gather_scores(visible, of_heads, whole, False)
    gathered = Problem(
        q.swapaxes(-3, -2)[..., None, :], keys, values, listed, **beside, sinks=whole.sinks,
        scale=whole.scale, softcap=whole.softcap, dropout_rate=whole.dropout_rate,
        dtype=whole.dtype,
    )  # fmt: skip
    attention: Any = evaluate(gathered)
    out, lse = attention.out[..., 0, :].swapaxes(-3, -2), attention.lse[..., 0].swapaxes(-2, -1)
    out, lse = (out[0], lse[0]) if whole.headless else (out, lse)
    return GatheredResults(out, lse, attention, whole.headless)


def index_mask(indices: Tensor | ArrayLike, S: int) -> Tensor:
    """Return the mask (..., T, S) of lists of keys, as `npattn.variants.gathered.index_mask`.

    Parameters
    ----------
    indices : int Tensor or array_like (..., T, n)
    S : int

    Returns
    -------
    bool Tensor (..., T, S)
        On the device of indices.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.variants.gathered.index_mask`.
    """
    return to_tensor(arrays.index_mask(_host(indices), S), _device(indices))


def drop_repeats(indices: Tensor | ArrayLike) -> Tensor:
    """Return lists of keys without repeats, as `npattn.variants.gathered.drop_repeats`.

    Parameters
    ----------
    indices : int Tensor or array_like (..., T, n)

    Returns
    -------
    int64 Tensor (..., T, n)

    Raises
    ------
    ShapeError, DtypeError
        As `npattn.variants.gathered.drop_repeats`.
    """
    return to_tensor(arrays.drop_repeats(_host(indices)), _device(indices))


def top_k(scores: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
    """Return the n keys of the largest visible scores, as `npattn.variants.gathered.top_k`.

    Parameters
    ----------
    scores : float Tensor (..., T, S)
    n : int
    mask : bool Tensor, optional
        True = may be chosen; broadcasts against scores.

    Returns
    -------
    int64 Tensor (..., T, n)
        On the device of scores, and without gradient.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.variants.gathered.top_k`; DtypeError also if scores or mask is no tensor.
    """
    for name, x in (("scores", scores), ("mask", mask)):
        if not isinstance(x, Tensor) and not (name == "mask" and x is None):
            raise DtypeError(f"{name} is {type(x).__name__}, must be a tensor")
    given = read_floating("scores", stand_in("scores", scores))
    if mask is not None and mask.dtype != torch.bool:
        raise DtypeError(f"mask is {mask.dtype}, must be bool: True = may be chosen")
    n = check_ranking(given, n, None if mask is None else tuple(mask.shape))
    ranked = scores.detach()
    ranked = ranked if mask is None else torch.where(mask, ranked, -torch.inf)
    if ranked.isnan().any():
        raise OptionError(NAN_SCORE)
    values, order = torch.sort(ranked, dim=-1, descending=True, stable=True)
    chosen = torch.where(torch.isneginf(values), -1, order)[..., :n]
    return torch.nn.functional.pad(chosen, (0, n - chosen.shape[-1]), value=-1)


def _by_head(x: Tensor, whole: Any, heads: int) -> Tensor:
    """Return k or v with leading axes in full, and a head for each list or the K that they have."""
    x = x[None] if whole.headless else x
    x = x.repeat_interleave(heads // whole.K, -3) if heads > whole.K else x
    return x.expand(*whole.lead, *x.shape[-3:])


def _gather_rows(x: Tensor, lists: Tensor) -> Tensor:
    """Read rows of x (..., heads, S, m) by lists (..., heads, T, n): (..., T, heads, n, m)."""
    extended = torch.nn.functional.pad(x, (0, 0, 0, 1))
    flat = lists.flatten(-2)[..., None].expand(*lists.shape[:-2], -1, x.shape[-1])
    rows = torch.gather(extended, -2, flat).view(*lists.shape, x.shape[-1])
    return rows.swapaxes(-4, -3)


def _gather_scores(array: Tensor, lists: Tensor, whole: Any, fill: Any) -> Tensor:
    """Read the entries of lists (..., H, T, n) from beside the scores: (..., T, H, 1, n)."""
    full = array.expand(*whole.lead, whole.H, whole.T, whole.S)
    extended = torch.cat([full, full.new_full((*full.shape[:-1], 1), fill)], dim=-1)
    lists = lists.expand(*full.shape[:-1], lists.shape[-1])
    return torch.gather(extended, -1, lists).swapaxes(-3, -2)[..., None, :]


def _host(indices: Any) -> Any:
    return to_host(indices) if isinstance(indices, Tensor) else indices


def _device(indices: Any) -> torch.device:
    return indices.device if isinstance(indices, Tensor) else torch.device("cpu")
