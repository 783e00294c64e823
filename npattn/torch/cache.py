"""Packed sequences, pages, caches and merged parts on torch tensors, differentiable by autograd.

Each sequence is one problem of `npattn.torch.forward`; the meanings are those of `npattn.cache`,
whose `unpack` takes tensors as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike

from npattn.cache.appending import find_new_slots, read_rotary
from npattn.cache.merging import Base, check_base, check_parts
from npattn.cache.packed import check_packed, read_options
from npattn.cache.paging import check_paged, check_pages, find_slots
from npattn.cache.unpacking import unpack
from npattn.checks import read_floating
from npattn.errors import DtypeError
from npattn.torch.api import forward
from npattn.torch.positions import rope
from npattn.torch.tensors import cast, has_float64, stand_in, to_host

__all__ = [
    "Appended",
    "Results",
    "append",
    "merge",
    "paged",
    "paged_forward",
    "unpack",
    "varlen",
    "varlen_forward",
]

Tensor = torch.Tensor
Integers = ArrayLike | Tensor


class Results(NamedTuple):
    """Output and lse."""

    out: Tensor
    lse: Tensor


class Appended(NamedTuple):
    """A cache with new keys and values, and the number of keys of each sample."""

    k_cache: Tensor
    v_cache: Tensor
    seqlens: Tensor  # int64, on the device of the cache


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None,
    **options: Any,
) -> Tensor:
    """Attention within each of several packed sequences, as `npattn.cache.varlen`.

    Parameters
    ----------
    q, k, v : Tensor
        (total_q, H, D), (total_k, K, D), (total_k, K, E), of floating dtypes on one device.
    cu_seqlens_q, cu_seqlens_k, **options
        As in `npattn.cache.varlen`, of `npattn.torch.attention`; bounds may be tensors.

    Returns
    -------
    Tensor (total_q, H, E)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.cache.varlen`.
    """
    return varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, **options).out


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None,
    **options: Any,
) -> Results:
    """`varlen` with its lse (H, total_q).

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, **options
        As in `varlen`.

    Returns
    -------
    Results
        .out (total_q, H, E), .lse (H, total_q)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `varlen`.
    """
    given = [_stand_in(name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    of_q, of_k = check_packed(given, _host(cu_seqlens_q), _host(cu_seqlens_k))
    each = read_options(options, len(of_q) - 1)
    ends = list(zip(of_q, of_q[1:], of_k, of_k[1:], strict=False)) or [(0, 0, 0, 0)]
    parts: list[Any] = []
    for (a, b, c, d), own in zip(ends, each, strict=True):
        parts.append(forward(*(x.swapaxes(0, 1) for x in (q[a:b], k[c:d], v[c:d])), **own))
    out = torch.cat([part.out.swapaxes(0, 1) for part in parts])
    return Results(out, torch.cat([part.lse for part in parts], dim=1))


def paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Integers,
    seqlens: Integers,
    **options: Any,
) -> Tensor:
    """Attention of each sample's queries to its keys, which lie in pages.

    Parameters
    ----------
    q, k_pages, v_pages : Tensor
        (B, T, H, D), (N, P, K, D), (N, P, K, E), of floating dtypes on one device.
    block_table, seqlens, **options
        As in `npattn.cache.paged`, of `npattn.torch.attention`; integers may be tensors.

    Returns
    -------
    Tensor (B, T, H, E)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.cache.paged`.
    """
    return paged_forward(q, k_pages, v_pages, block_table, seqlens, **options).out


def paged_forward(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Integers,
    seqlens: Integers,
    **options: Any,
) -> Results:
    """`paged` with its lse (B, H, T).

    Parameters
    ----------
    q, k_pages, v_pages, block_table, seqlens, **options
        As in `paged`.

    Returns
    -------
    Results
        .out (B, T, H, E), .lse (B, H, T)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `paged`.
    """
    names = ("q", "k_pages", "v_pages")
    query, *pages = (_stand_in(n, x) for n, x in zip(names, (q, k_pages, v_pages), strict=True))
    lengths = check_paged(query, pages[0], pages[1], _host(seqlens))
    slots = find_slots(_host(block_table), lengths, pages[0].shape[:2])
    each = read_options(options, len(lengths))
    parts: list[Any] = []
    for b, own in enumerate(each[: len(lengths)]):
        where = tuple(torch.as_tensor(x, device=k_pages.device) for x in slots[b])
        keys = (x[where].swapaxes(0, 1) for x in (k_pages, v_pages))
        parts.append(forward(q[b].swapaxes(0, 1), *keys, **own))
    if not parts:  # sizes and dtypes are those of a sample without tokens
        arrays: tuple[Any, ...] = (q, k_pages, v_pages)
        none = (x.new_zeros((x.shape[2], 0, x.shape[3])) for x in arrays)
        one: Any = forward(*none, **each[0])
        (T, H), E = q.shape[1:3], one.out.shape[-1]
        return Results(one.out.new_zeros((0, T, H, E)), one.lse.new_zeros((0, H, T)))
    out = torch.stack([part.out.swapaxes(0, 1) for part in parts])
    return Results(out, torch.stack([part.lse for part in parts]))


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens: Integers,
    *,
    block_table: Integers | None = None,
    rotary: Mapping[str, Any] | None = None,
) -> Appended:
    """Return a cache with new keys and values behind those of each sample.

    As `npattn.cache.append`; the cache that is given is not written to.

    Parameters
    ----------
    k_cache, v_cache : Tensor (B, S, K, D), (B, S, K, E)
        With a table, pages (N, P, K, D), (N, P, K, E).
    k, v : Tensor (B, T, K, D), (B, T, K, E)
        On the device of the cache; they are rounded to its dtype.
    seqlens, block_table, rotary
        As in `npattn.cache.append`; tensors get no gradient.

    Returns
    -------
    Appended
        .k_cache, .v_cache, .seqlens

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.cache.append`.
    """
    k_old, v_old = _stand_in("k_cache", k_cache), _stand_in("v_cache", v_cache)
    check_pages("k_cache", k_old, "v_cache", v_old)
    slots = find_new_slots(
        k_old, v_old, _stand_in("k", k), _stand_in("v", v), _host(seqlens), _host(block_table)
    )
    if rotary is not None:
        options = read_rotary(rotary)
        turned = rope(k.swapaxes(1, 2), positions=slots.positions[:, None], **options)
        k = turned.swapaxes(1, 2)
    page, slot = (torch.from_numpy(x).to(k_cache.device) for x in (slots.page, slots.slot))
    k_cache, v_cache = (
        old.index_put((page, slot), cast(x, old.dtype)) for old, x in ((k_cache, k), (v_cache, v))
    )
    return Appended(k_cache, v_cache, torch.from_numpy(slots.lengths).to(k_cache.device))


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], *, base: Base = "e") -> Results:
    """Merge the results of attention over parts of the keys, as `npattn.cache.merge`.

    Parameters
    ----------
    outs : sequence of Tensor (..., E)
    lses : sequence of Tensor (...)
        −inf where a part has no visible key; +inf gives NaN.
    base : {"e", "2"}, default "e"

    Returns
    -------
    Results
        .out (..., E), .lse (...), in float64 (float32 where the device lacks it)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.cache.merge`, but for an lse of +inf, which is not looked for.
    """
    check_base(base)
    outs, lses = list(outs), list(lses)
    check_parts([_stand_in("outs", x) for x in outs], [_stand_in("lses", x) for x in lses])
    exp, log = (torch.exp2, torch.log2) if base == "2" else (torch.exp, torch.log)
    wide = torch.float64 if has_float64(outs[0].device.type) else torch.float32
    logs = torch.stack([x.to(wide) for x in lses])
    live = ~torch.isneginf(logs)
    top = logs.detach().amax(0)
    top = torch.where(torch.isneginf(top), 0, top)
    sizes = torch.where(live, exp(torch.where(live, logs - top, 0)), 0)
    total = sizes.sum(0)
    some = live.any(0)
    lse = torch.where(some, log(torch.where(some, total, 1)) + top, -torch.inf)
    weights = sizes / torch.where(some, total, 1)
    parts = torch.where(live[..., None], torch.stack([x.to(wide) for x in outs]), 0)
    return Results((weights[..., None] * parts).sum(0), lse)


def _stand_in(name: str, x: Any) -> Any:
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} is {type(x).__name__}, must be a tensor: use npattn.cache")
    return read_floating(name, stand_in(name, x))


def _host(x: Any) -> Any:
    """Return integers as NumPy's."""
    return to_host(x) if isinstance(x, Tensor) else x
