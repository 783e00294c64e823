"""Linear attention on torch tensors, differentiable by autograd, to any order.

    S_t = exp(g_t) S_{t−1} + φ(k_t)ᵀ v_t        o_t = scale · φ(q_t) S_t, divided by that of v = 1

Forms and meanings are those of `npattn.variants.linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from npattn.errors import DtypeError, OptionError
from npattn.torch.flags import exact
from npattn.torch.tensors import has_float64, short_name, stand_in
from npattn.variants.linear import FEATURE_MAPS
from npattn.variants.linear.problem import ARRAYS, Form, LinearProblem, warn_of_growth

__all__ = ["FEATURE_MAPS", "Results", "attention", "forward"]

Tensor = torch.Tensor


class Results(NamedTuple):
    """Output (..., H, T, E), last state (..., K, D, E), and normaliser (..., K, D) or None."""

    out: Tensor
    state: Tensor
    normaliser: Tensor | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    feature_map: str | Callable[[Tensor], Tensor] = "elu",
    normalise: bool = True,
    eps: float = 0.0,
    scale: float | None = None,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_normaliser: Tensor | None = None,
    form: Form = "recurrent",
    chunk_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Exact linear attention on tensors, as `npattn.variants.linear.attention`.

    Parameters
    ----------
    q, k, v, log_decay, beta, initial_state, initial_normaliser : Tensor
        Shaped as there, of real floating dtypes, on one device.
    feature_map : {"elu", "identity", "relu", "softmax"} or callable, default "elu"
        φ by name, or f(x) on tensors, that returns the shape of x.
    causal, normalise, eps, scale, form, chunk_size
        As there.
    dtype : torch.dtype, optional
        Of the computation and the result: float64 (float32 where the device lacks it) or float32.

    Returns
    -------
    Tensor (..., H, T, E)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.variants.linear.attention`; DtypeError also if q, k or v is no real tensor, and
        OptionError if tensors are on different devices.

    Examples
    --------
    >>> import torch, npattn.torch
    >>> x = torch.ones(1, 3, 2, requires_grad=True)
    >>> npattn.torch.variants.linear.attention(x, x, x, causal=True).shape
    torch.Size([1, 3, 2])
    """
    return forward(**locals()).out


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    feature_map: str | Callable[[Tensor], Tensor] = "elu",
    normalise: bool = True,
    eps: float = 0.0,
    scale: float | None = None,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_normaliser: Tensor | None = None,
    form: Form = "recurrent",
    chunk_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> Results:
    """Linear attention with its last state.

    Parameters
    ----------
    q, k, v, causal, feature_map, normalise, eps, scale, log_decay, beta, initial_state
    initial_normaliser, form, chunk_size, dtype
        As in `attention`.

    Returns
    -------
    Results
        .out (..., H, T, E), .state (..., K, D, E), .normaliser (..., K, D) or None, all
        differentiable.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As in `attention`.
    """
    arguments = dict(locals())
    tensors = {n: arguments[n] for n in ARRAYS if arguments[n] is not None}
    p, computed = _check(arguments, tensors)
    warn_of_growth(log_decay)
    with exact(computed, q.device):
        x = _Operands(p, {n: y.to(computed) for n, y in tensors.items()}, feature_map)
        y, last = _recur(x) if p.form == "recurrent" else _by_chunks(x, p.size)
        state, normaliser = last, None
        if p.normalise:
            total = y[..., -1:] + p.eps
            none = total == 0
            y = torch.where(none, 0, y[..., :-1] / torch.where(none, 1, total))
            state, normaliser = last[..., :-1], last[..., -1]
    out = y.reshape(*p.lead, p.H, p.T, p.E)
    if not p.headless:
        return Results(out, state, normaliser)
    return Results(out[0], state[0], None if normaliser is None else normaliser[0])


def _check(
    arguments: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[LinearProblem, torch.dtype]:
    """Check a call on stand-ins for its tensors; return its problem, and the dtype computed in."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.is_complex():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise DtypeError(
                f"{name} is {kind}, must be a real tensor: use npattn.variants.linear.attention"
            )
        if x.device != tensors["q"].device:
            raise OptionError(f"{name} is on {x.device}, must be on {tensors['q'].device} as q")
    if isinstance(arguments["feature_map"], tuple):
        raise OptionError("feature_map is a FeatureMap of arrays; pass a callable f(x) on tensors")
    dtype = arguments.pop("dtype")
    if dtype not in (None, torch.float32, torch.float64):
        raise DtypeError(f"dtype is {short_name(dtype)}, must be float32 or float64")
    wide = torch.float64 if has_float64(tensors["q"].device.type) else torch.float32
    p = LinearProblem(**(arguments | {n: stand_in(n, x) for n, x in tensors.items()}))
    return p, dtype or wide


def _features(kind: Any, x: Tensor) -> Tensor:
    if kind == "identity":
        return x
    if kind == "elu":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    if kind == "relu":
        return x.relu()
    if kind == "softmax":
        return x.softmax(-1)
    y = kind(x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise OptionError(f"feature_map returned {found}, must return a tensor {tuple(x.shape)}")
    return y


class _Operands:
    """Features, values with a column of 1, decays and state, with the whole leading axes."""

    def __init__(self, p: LinearProblem, tensors: dict[str, Tensor], feature_map: Any) -> None:
        q, k, v = (tensors[n] for n in ("q", "k", "v"))
        kv, self.causal = (*p.lead, p.K), p.causal

        def whole(name: str, *shape: int) -> Tensor:
            x = tensors.get(name)
            return q.new_zeros(shape) if x is None else x.expand(shape)

        scale: Any = p.scale
        features = scale * _features(feature_map, q)
        self.q = features.expand(*p.lead, p.H, p.T, p.D).reshape(*kv, p.group, p.T, p.D)
        self.k = _features(feature_map, k).expand(*kv, p.S, p.D)
        self.v, self.state = v.expand(*kv, p.S, p.E), whole("initial_state", *kv, p.D, p.E)
        if p.normalise:
            self.v = torch.cat([self.v, q.new_ones(*kv, p.S, 1)], -1)
            z = whole("initial_normaliser", *kv, p.D)
            self.state = torch.cat([self.state, z[..., None]], -1)
        self.beta = whole("beta", *kv, p.S, 1) if "beta" in tensors else None
        decay = tensors.get("log_decay")
        self.g = whole("log_decay", *kv, p.S, 1 if decay is None else decay.shape[-1])


def _recur(x: _Operands) -> tuple[Tensor, Tensor]:
    """Return y (..., K, G, T, E) and the last state, one key after another."""
    a, state, rows = x.g.exp(), x.state, []
    for t in range(x.k.shape[-2]):
        k, u = x.k[..., t, :, None], x.v[..., t, None, :]
        state = a[..., t, :, None] * state
        if x.beta is not None:
            u = x.beta[..., t, :, None] * (u - k.mT @ state)
        state = state + k * u
        if x.causal:
            rows.append(x.q[..., t, :] @ state)
    if not x.causal:
        return x.q @ state[..., None, :, :], state
    if not rows:
        return x.q.new_zeros(*x.q.shape[:-1], x.v.shape[-1]), state
    return torch.stack(rows, -2), state


def _by_chunks(x: _Operands, size: int) -> tuple[Tensor, Tensor]:
    """Return y and the last state, chunk by chunk of keys."""
    state, length = x.state, x.k.shape[-2]
    y = x.q @ state[..., None, :, :] if not x.causal else None
    rows = []
    for start in range(0, length, size):
        at = slice(start, start + size)
        k, v = x.k[..., at, :], x.v[..., at, :]
        if y is not None:
            y = y + (x.q @ k[..., None, :, :].mT) @ v[..., None, :, :]
            state = state + k.mT @ v
            continue
        q, g = x.q[..., at, :], x.g[..., at, :]
        G, C = g.cumsum(-2), g.shape[-2]
        seen = torch.ones((C, C), dtype=torch.bool, device=g.device).tril()
        # G_t − G_s as a sum of its own: a difference loses all digits beyond a reset of −1e15.
        gap = torch.where(seen.tril(-1)[..., None], g[..., :, None, :], 0).cumsum(-3)
        within = gap.exp() * seen[..., None]
        out_of, last = within[..., -1, :, :], G[..., -1, :, None].exp()
        within = within[..., None, :, :, :]
        pairs = ((q[..., :, None, :] * k[..., None, None, :, :]) * within).sum(-1)
        before = (q * G.exp()[..., None, :, :]) @ state[..., None, :, :]
        if x.beta is not None:  # (1 + L) u = β (v − (k exp(G)) S)
            beta = x.beta[..., at, :]
            L = beta * ((k[..., :, None, :] * k[..., None, :, :]) * within[..., 0, :, :, :]).sum(-1)
            v = torch.linalg.solve_triangular(
                L.tril(-1), beta * (v - (k * G.exp()) @ state), upper=False, unitriangular=True
            )
        rows.append(before + pairs @ v[..., None, :, :])
        state = last * state + (k * out_of).mT @ v
    if y is None:
        empty = x.q.new_zeros(*x.q.shape[:-1], x.v.shape[-1])
        y = torch.cat(rows, -2) if rows else empty
    return y, state
