"""Multi-head latent attention (MLA): keys and values of all heads from one compressed vector a key.

    c (..., S, C) compressed keys and values      k_rope (..., S, R) rotary keys of all heads
    q_nope (..., H, T, N)   q_rope (..., H, T, R)   w_uk (H, C, N)   w_uv (H, C, E)

    unabsorbed   k_h = [c w_uk_h | k_rope]   v_h = c w_uv_h   q_h = [q_nope_h | q_rope_h]
                 o_h = attention(q_h, k_h, v_h)
    absorbed     q_h = [q_nope_h w_ukᵀ_h | q_rope_h]   k = [c | k_rope]   v = c, of all heads
                 o_h = attention(q_h, k, v) w_uv_h

Both are the same function, scale 1/√(N + R) by default: training expands the keys, decoding reads
the compressed ones. Rotary parts come turned, by `npattn.positions.rope`.
Source: DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from npattn.engines.dense import QUIET
from npattn.errors import ShapeError
from npattn.oracle import api
from npattn.oracle.signatures import only_out
from npattn.oracle.twins import on_arrays
from npattn.problem import Forward
from npattn.problem.arrays import Array, sum_to
from npattn.problem.checks import check_choice, check_cotangent, check_result
from npattn.problem.foreign import reject_options, reject_unknown_options

__all__ = [
    "Form", "LatentForward", "LatentGradients", "LatentSizes", "attention", "backward",
    "check_form", "check_latent", "forward",
]  # fmt: skip

Form = Literal["unabsorbed", "absorbed"]
NAMES = ("q_nope", "q_rope", "c", "k_rope", "w_uk", "w_uv")
OPTIONS = (
    *("mask", "causal", "window", "bias", "scale", "softcap", "score_mod", "sinks"),
    *("dropout_mask", "dropout_rate", "dtype", "engine", "conventions"),
)


@dataclass(frozen=True, eq=False)
class LatentForward:
    """Results of `forward`.

    Attributes
    ----------
    out : array (..., H, T, E)
    lse : array (..., H, T)
    weights : array (..., H, T, S)
        Computed on demand.
    form : {"unabsorbed", "absorbed"}
    attention : Forward
        The attention inside: of the expanded keys, or of the compressed ones.
    """

    out: Array
    lse: Array
    form: Form
    attention: Forward = field(repr=False)
    inputs: dict[str, Array] = field(repr=False)
    shapes: dict[str, tuple[int, ...]] = field(repr=False)

    @property
    def weights(self) -> Array:
        return self.attention.weights


@dataclass(frozen=True, eq=False)
class LatentGradients:
    """Gradients of one loss, each shaped as its input; None where there is no such input."""

    q_nope: Array
    q_rope: Array
    c: Array
    k_rope: Array
    w_uk: Array
    w_uv: Array
    bias: Any = None
    sinks: Array | None = None


@on_arrays
@np.errstate(**QUIET)  # type: ignore[arg-type]  # a dict of literals
def forward(
    xp: Any, /, q_nope: ArrayLike, q_rope: ArrayLike, c: ArrayLike, k_rope: ArrayLike,
    w_uk: ArrayLike, w_uv: ArrayLike,
    *, form: Form = "unabsorbed", **options: Any,
) -> LatentForward:  # fmt: skip
    """Multi-head latent attention with its lse and weights, and what `backward` needs.

    Parameters
    ----------
    q_nope, q_rope : float array_like (..., H, T, N), (..., H, T, R)
        Parts of the queries without and with rotary positions; the second is turned already.
    c, k_rope : float array_like (..., S, C), (..., S, R)
        Compressed keys and values, and the rotary keys (turned already) that all heads share.
        Leading axes broadcast with those of the queries.
    w_uk, w_uv : float array_like (H, C, N), (H, C, E)
        Up-projections of keys and of values, of each head; they multiply from the right.
    form : {"unabsorbed", "absorbed"}, default "unabsorbed"
        Expand keys and values, or take the projections into queries and outputs: the same results
        but for rounding.
    **options
        mask, causal, window, bias, scale, softcap, score_mod, sinks, dropout_mask, dropout_rate,
        dtype, engine, conventions of `npattn.attention`; scale defaults to 1/√(N + R).

    Returns
    -------
    LatentForward
        .out (..., H, T, E), .lse (..., H, T), .weights (..., H, T, S), .form, .attention

    Raises
    ------
    ShapeError
        If shapes do not fit each other, or the options.
    DtypeError
        If an array is not floating, or `dtype` emulates mixed precision.
    OptionError
        If `form` or an option has an illegal value, or an option is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import variants
    >>> q_nope, q_rope = np.ones((2, 3, 4)), np.ones((2, 3, 2))  # H = 2, T = 3, N = 4, R = 2
    >>> c, k_rope = np.ones((5, 6)), np.ones((5, 2))             # S = 5, C = 6
    >>> w_uk, w_uv = np.ones((2, 6, 4)), np.ones((2, 6, 7))      # E = 7
    >>> variants.latent.attention(q_nope, q_rope, c, k_rope, w_uk, w_uv).shape
    (2, 3, 7)
    """
    arrays, facts = xp.read(q_nope=q_nope, q_rope=q_rope, c=c, k_rope=k_rope, w_uk=w_uk, w_uv=w_uv)
    shapes = {name: x.shape for name, x in facts.items()}
    sizes = check_latent(shapes)
    check_form(form, options)
    dtype = xp.compute_dtype(options.get("dtype"), facts.values(), like=q_nope)
    inputs = {name: xp.astype(x, dtype) for name, x in arrays.items()}
    settings = {"scale": sizes.scale} | options | {"dtype": dtype}
    settings["scale"] = sizes.scale if settings["scale"] is None else settings["scale"]

    query, rotary, keys, k_rotary, uk, uv = inputs.values()
    # (..., 1, S, C), (..., 1, S, R)
    keys, k_rotary = keys[..., None, :, :], k_rotary[..., None, :, :]
    with xp.exact(dtype, query):
        if form == "unabsorbed":
            k = _join(xp, xp.matmul(keys, uk), k_rotary)  # (..., H, S, N + R)
            v = xp.matmul(keys, uv)
            attention = xp.forward(_join(xp, query, rotary), k, v, **settings)
            out = attention.out
        else:
            absorbed = xp.matmul(query, uk.swapaxes(-1, -2))  # (..., H, T, C)
            # One head, which no head shares if H = 0.
            k, v = (x[..., : sizes.H, :, :] for x in (_join(xp, keys, k_rotary), keys))
            attention = xp.forward(_join(xp, absorbed, rotary), k, v, **settings)
            out = xp.matmul(attention.out, uv)
    return LatentForward(out, attention.lse, form, attention, inputs, shapes)


attention = only_out(
    "attention", forward, np.ndarray, "Multi-head latent attention.", "ndarray (..., H, T, E)"
)


@reject_unknown_options
@np.errstate(**QUIET)  # type: ignore[arg-type]
def backward(
    fwd: LatentForward, dout: ArrayLike, dlse: ArrayLike | None = None,
    dweights: ArrayLike | None = None,
) -> LatentGradients:  # fmt: skip
    """Gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights.

    Parameters
    ----------
    fwd : LatentForward
        Result of `forward`.
    dout : float array_like (..., H, T, E)
    dlse, dweights : float array_like (..., H, T), (..., H, T, S), optional
        Default 0.

    Returns
    -------
    LatentGradients
        .q_nope .q_rope .c .k_rope .w_uk .w_uv .bias .sinks, each shaped as its input.

    Raises
    ------
    ShapeError, DtypeError
        If a cotangent has not the shape of its result, or is not floating.
    OptionError
        If `fwd` is not a result of `forward`.
    """
    check_result(fwd, LatentForward, "npattn.variants.latent.forward")
    query, _, c, _, w_uk, w_uv = fwd.inputs.values()
    do = check_cotangent("dout", dout, fwd.out.shape)
    c, N = c[..., None, :, :], query.shape[-1]
    if fwd.form == "unabsorbed":
        grads = api.backward(fwd.attention, do, dlse, dweights)
        dk, dv, dquery = grads.k[..., :N], grads.v, grads.q[..., :N]
        dw_uk = sum_products(c, dk)  # from k = c w_uk
        dw_uv = sum_products(c, dv)  # from v = c w_uv
        dkeys, dvalues = dk @ w_uk.swapaxes(-1, -2), dv @ w_uv.swapaxes(-1, -2)
    else:
        du = do @ w_uv.swapaxes(-1, -2)  # from o = u w_uv
        defined = _defined_rows(fwd.attention)
        dw_uv = sum_products(np.where(defined, fwd.attention.out, 0), do)
        grads = api.backward(fwd.attention, du, dlse, dweights)
        N = c.shape[-1]
        dabsorbed = grads.q[..., :N]
        dquery = dabsorbed @ w_uk  # from q = q_nope w_ukᵀ
        dw_uk = sum_products(query, np.where(defined, dabsorbed, 0)).swapaxes(-1, -2)
        dkeys, dvalues = grads.k[..., :N], grads.v
    shapes = fwd.shapes
    # Keys may have leading axes of k_rope, which values have not: each is summed before they meet.
    of_keys, of_values = (sum_to(dx.sum(-3), shapes["c"]) for dx in (dkeys, dvalues))
    return LatentGradients(
        q_nope=sum_to(dquery, shapes["q_nope"]),
        q_rope=sum_to(grads.q[..., N:], shapes["q_rope"]),
        c=of_keys + of_values,  # c is both
        k_rope=sum_to(grads.k[..., N:].sum(-3), shapes["k_rope"]),
        w_uk=dw_uk,
        w_uv=dw_uv,
        bias=grads.bias,
        sinks=grads.sinks,
    )


def _defined_rows(attention: Forward) -> Array:
    """Return the rows (..., H, T, 1) that are not NaN by convention: those add to no weight [8]."""
    _, conventions, lse, *_ = attention.residuals
    problem = attention.problem
    undefined = None if conventions is None else conventions.undefined_rows(problem, lse)
    return np.ones((), bool) if undefined is None else ~undefined[..., None]


class LatentSizes(NamedTuple):
    """Sizes of latent attention, and its default scale."""

    H: int
    N: int
    R: int
    scale: float


def check_latent(shapes: dict[str, tuple[int, ...]]) -> LatentSizes:
    """Check the shapes of the six arrays against each other."""
    query, rotary, c, k_rope, w_uk, w_uv = (shapes[name] for name in NAMES)
    shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    letters = ("(..., H, T, N)", "(..., H, T, R)", "(..., S, C)", "(..., S, R)")
    ranks = dict(zip(NAMES, (3, 3, 2, 2, 3, 3), strict=True))
    for (name, least), must in zip(
        ranks.items(), (*letters, "(H, C, N)", "(H, C, E)"), strict=True
    ):
        rank = len(shapes[name])
        if rank < least or (rank > least and name.startswith("w")):
            raise ShapeError(f"{name} has shape {shapes[name]}, must be {must} [{shown}]")
    (H, T, N), R, (S, C) = query[-3:], rotary[-1], c[-2:]
    must_be: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
        ("q_rope", rotary[-3:], (H, T, R)),
        ("k_rope", k_rope[-2:], (S, R)),
        ("w_uk", w_uk, (H, C, N)),
        ("w_uv", w_uv[:2], (H, C)),
    )
    for name, found, must_end in must_be:
        if found != must_end:
            raise ShapeError(
                f"{name} has sizes {found}, must be {must_end} beside the other arrays [{shown}]"
            )
    for name, found in (("c", c), ("k_rope", k_rope)):
        if len(found) == len(query) > 3 and found[-3] == 1:
            raise ShapeError(
                f"{name} has shape {found}, with an axis of 1 where queries have heads, must be "
                f"{letters[NAMES.index(name)]}: pass {name}.squeeze(-3) [{shown}]"
            )
    try:
        np.broadcast_shapes(query[:-3], rotary[:-3], c[:-2], k_rope[:-2])
    except ValueError:
        raise ShapeError(f"leading axes do not broadcast [{shown}]") from None
    return LatentSizes(H, N, R, 1 / math.sqrt(N + R) if N + R else 1.0)


def check_form(form: Any, options: dict[str, Any]) -> None:
    """Check the form, and that every option exists here."""
    check_choice("form", form, get_args(Form))
    reject_options("latent.attention", options, ("form", *OPTIONS))


def sum_products(x: Array, dy: Array) -> Array:
    """Sum xᵀ dy over rows and leading axes: the gradient (H, m, n) of w in y = x w.

    x is (..., H | 1, rows, m), dy (..., H, rows, n). A row without gradient counts nothing,
    whatever stands in the other one: 0 · NaN is NaN, but hidden keys matter to nobody [10].
    """
    x = np.where(~np.isfinite(x) & (dy == 0).all(-1, keepdims=True), 0, x)
    dy = np.where(~np.isfinite(dy) & (x == 0).all(-1, keepdims=True), 0, dy)
    products: Array = x.swapaxes(-1, -2) @ dy
    return np.asarray(products.sum(tuple(range(products.ndim - 3))))


def _join(xp: Any, x: Any, y: Any) -> Any:
    """Join features of two arrays whose other axes broadcast."""
    lead = np.broadcast_shapes(tuple(x.shape[:-1]), tuple(y.shape[:-1]))
    return xp.concatenate([xp.broadcast_to(a, (*lead, a.shape[-1])) for a in (x, y)], axis=-1)
