"""What PyTorch's own attention computes exactly, handed to it; the rest is refused with the reason.

Two functions are asked, whichever can: ``scaled_dot_product_attention``, and on CUDA, for what that
has no argument for, FlexAttention. What is handed over means the same there as in
docs/semantics.md, with numbers that are finite; where a kernel of theirs is known to give something
else, the problem is put in other words that mean the same, another kernel is asked, or none. The
result is in the dtype of q, k, v, and is differentiated by PyTorch. Which traps there are, and
which promises this path does not make: docs/torch_multihead.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from npattn import masks
from npattn.arrays import Array, diagonal
from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.problem import Forward
from npattn.torch.problem import Problem, moved

__all__ = ["evaluate", "forward", "not_fused", "refusal", "route"]

Tensor = torch.Tensor
Index = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # f(b, h, t, s)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")
SQUARE = 128  # FlexAttention works in squares of so many queries and keys
WITH_MASK = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def evaluate(problem: Problem, conventions: Conventions | None = None) -> Forward:
    """The forward pass of a `Problem` in somebody's terms; .lse is None unless FlexAttention
    computed it.

    Raises
    ------
    OptionError
        As `forward`; also if PyTorch has no such convention, or weights are asked for.
    """
    canonical = problem
    if conventions is not None:
        canonical = conventions.canonical(problem)  # type: ignore[assignment]
        _check_translated(problem, conventions)
    out, lse = forward(canonical)
    if lse is not None and conventions is not None:
        out, lse = conventions.results(problem, out, lse)  # type: ignore[arg-type, assignment]

    def weights() -> Array:
        raise OptionError('weights are asked for, must not be with engine="fused": it has none')

    return Forward(out, lse, problem, "fused", None, weights)  # type: ignore[arg-type]


def not_fused(fwd: Forward) -> Forward:
    """A forward pass on tensors whose gradients are npattn's own."""
    if not isinstance(fwd.problem, Problem):
        raise OptionError(
            "fwd is of npattn, must be of npattn.torch: pass it to the function in npattn"
        )
    if fwd.engine == "fused":
        raise OptionError('fwd has engine "fused", must have another: ask autograd for gradients')
    return fwd


def forward(problem: Problem, *, lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Attention by the fused kernels of PyTorch, differentiable by its autograd.

    Parameters
    ----------
    problem : Problem
        In npattn's own terms, without conventions.
    lse : bool, default False
        Whether it must be there; FlexAttention alone has it.

    Returns
    -------
    out : tensor (..., H, T, E)
        In the dtype of q, k, v.
    lse : tensor (..., H, T) or None
        None where scaled_dot_product_attention computed it.

    Raises
    ------
    OptionError
        If they cannot compute it exactly: the option, and why.
    """
    by = route(problem, lse=lse)
    with _no_autocast(problem.device.type):
        if by == "flex":
            from torch.nn.attention.flex_attention import flex_attention

            out, found = _flex(problem, _compiled(flex_attention, _kind_of(problem)))
        else:
            out, found = _sdpa(problem), None
    return _unflattened(out, problem), None if found is None else _unflattened(found, problem)


def route(problem: Problem, *, lse: bool = False) -> Literal["sdpa", "flex"]:
    """Which function computes it; OptionError where none does."""
    why = refusal(problem, lse=lse)
    if why is not None:
        raise OptionError(f'{why} [engine="fused"; "auto" computes every problem]')
    if lse or _beyond_sdpa(problem) or (_is_sparse(problem) and _not_flex(problem) is None):
        return "flex"
    return "sdpa"


def refusal(problem: Problem, *, lse: bool = False) -> str | None:
    """Why PyTorch's kernels cannot compute it exactly; None where they can."""
    q, k, v, asked = problem.q, problem.k, problem.v, problem.__dict__["_given"][2]
    bias: Any = problem.bias_array
    if problem.device.type not in DEVICES:
        return f"q is on {problem.device}, must be on one of {', '.join(DEVICES)}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        words = ", ".join(_word(x.dtype) for x in (q, k, v))
        return f"q, k, v are {words}, must be one of {', '.join(map(_word, DTYPES))}, all the same"
    if asked is not None and _asked_dtype(problem) != q.dtype:
        return f"dtype is {asked}, must be None or that of q, {_word(q.dtype)}: kernels compute in"
    if 0 in (*problem.lead, problem.H, problem.T, problem.S, problem.D, problem.E):
        name = next((n for n in "HTSDE" if getattr(problem, n) == 0), "the batch")
        return f"{name} is 0, must not be: kernels differ in what they do"
    if problem.dropout_mask is not None:
        return "dropout_mask is given, must be None: PyTorch draws its own"
    if problem.sinks is not None:
        return "sinks is given, must be None: PyTorch has none"
    if bias is not None and bias.dtype != q.dtype:
        of = _word(bias.dtype)
        return f"bias is {of}, must be {_word(q.dtype)} as q: it would be rounded"
    beyond = "lse is asked for" if lse else _beyond_sdpa(problem)
    why = _not_flex(problem) if beyond else None
    return None if why is None else f"{beyond}, which only FlexAttention has, and {why}"


def _beyond_sdpa(problem: Any) -> str | None:
    """The option that scaled_dot_product_attention has no argument for."""
    if problem.softcap is not None:
        return f"softcap is {problem.softcap}"
    return None if problem.score_mod is None else "score_mod is given"


def _is_sparse(problem: Any) -> bool:
    """Whether FlexAttention can leave out what scaled_dot_product_attention masks number by
    number."""
    an_object = problem.mask is not None and not isinstance(problem.mask, Tensor)
    return problem.window is not None or an_object


def _not_flex(problem: Any) -> str | None:
    """Why FlexAttention cannot compute it exactly."""
    T, S, D, E = problem.T, problem.S, problem.D, problem.E
    if problem.device.type != "cuda":
        # torch 2.13: no backward there, and NaN or garbage with 120 keys.
        return f"q is on {problem.device}, must be on cuda: elsewhere it has no backward"
    if problem.q.dtype == torch.float64:
        return "q is float64, must be narrower"
    if T % SQUARE or S % SQUARE:
        # Reported of other lengths: NaN in gradients where mask and score_mod meet.
        return f"T, S are {T}, {S}, must be multiples of {SQUARE}: others are not safe there"
    if any(n < 16 or n & (n - 1) for n in (D, E)):
        return f"D, E are {D}, {E}, must be powers of 2 from 16"
    if problem.bias is not None and _differentiates(problem):
        # Its backward rebuilds the weights from a float32 lse, which a bias of −1e9 swallows.
        return "bias is given with gradients, must be without: they are wrong for a large bias"
    return None


# --- scaled_dot_product_attention -----------------------------------------------------------------


def _sdpa(problem: Any) -> Tensor:
    q, scale = _with_positive_scale(problem)
    k, v = _flat(problem.k, problem), _flat(problem.v, problem)
    grouped = problem.H != problem.K
    if _is_triangle(problem):
        return scaled_dot_product_attention(
            q, k, v, None, 0.0, True, scale=scale, enable_gqa=grouped
        )
    mask = _hidden_by(problem)
    with _kernels(problem, mask):
        return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)


def _is_triangle(problem: Any) -> bool:
    """Whether their top-left causal mask is all that hides, and nothing is added."""
    square = problem.T == problem.S or problem.alignment == "top_left"
    others = (problem.mask, problem.window, problem.bias)
    return bool(problem.causal) and square and all(x is None for x in others)


def _hidden_by(problem: Any) -> Tensor | None:
    """Their one mask: bool with True = may attend, or added to the scores."""
    visible = None if _sees_all(problem) else problem.visible
    visible = None if visible is None else _flat(visible, problem)
    if problem.bias is None:
        return visible
    bias = _flat(problem.bias_array, problem)
    return bias if visible is None else torch.where(visible, bias, float("-inf"))


def _sees_all(problem: Any) -> bool:
    """One query at the end, as in decoding, sees every key: no mask is needed."""
    last = problem.T == 1 and problem.alignment != "top_left"
    return last and problem.mask is None and problem.window is None


def _with_positive_scale(problem: Any) -> tuple[Tensor, float]:
    """q and scale, with signs moved to q: kernels hide with −inf before they multiply by scale."""
    q, scale = _flat(problem.q, problem), float(problem.scale or 0.0)
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale else (q * 0, 1.0)


def _kernels(problem: Any, mask: Tensor | None) -> AbstractContextManager[Any]:
    """The kernels that are right with a mask."""
    if mask is None:
        return nullcontext()
    if mask.dtype != torch.bool and _differentiates(problem):
        # Others rebuild the weights from a float32 lse: wrong gradients in a row of −1e9.
        return sdpa_kernel(SDPBackend.MATH)
    # cuDNN, the other one on CUDA: NaN in dq with a mask at some lengths.
    return nullcontext() if problem.device.type == "cpu" else sdpa_kernel(WITH_MASK)


# --- FlexAttention --------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _compiled(function: Any, kind: tuple[Any, ...]) -> Any:
    """The function, compiled for calls of a kind.

    What torch compiles for a ninth time it does not compile, without a word: then FlexAttention
    holds T × S numbers. So each kind has a count of its own.
    """
    words: Any = {"isolate_recompiles": True} if ISOLATES else {}
    return torch.compile(function, dynamic=False, **words)  # dynamic has been a source of NaN


ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def _kind_of(problem: Any) -> tuple[Any, ...]:
    """All that is compiled into a kernel."""
    given = (problem.q, problem.k, problem.v)
    options = (problem.scale, problem.softcap, problem.causal, problem.window)
    return *((x.shape, x.dtype, x.device) for x in given), *options, _differentiates(problem)


def _flex(problem: Any, function: Any) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    q, scale = _with_positive_scale(problem)
    out, aux = function(
        q.contiguous(),
        _flat(problem.k, problem).contiguous(),
        _flat(problem.v, problem).contiguous(),
        score_mod=_score_mod(problem),
        block_mask=_block_mask(problem),
        scale=scale,
        enable_gqa=problem.H != problem.K,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def _score_mod(problem: Any) -> Any:
    """softcap, score_mod and bias, in that order, as one function of a score; None for none."""
    cap, own = problem.softcap, problem.score_mod
    bias = None if problem.bias is None else _index(problem.bias_array, problem)
    if cap is None and own is None and bias is None:
        return None

    def modified(s: Tensor, b: Tensor, h: Tensor, t: Tensor, s_index: Tensor) -> Tensor:
        s = s if cap is None else cap * torch.tanh(s / cap)
        s = s if own is None else own(s, b, h, t, s_index)
        return s if bias is None else s + bias(b, h, t, s_index)

    return modified


def _block_mask(problem: Any) -> Any:
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    T, S, mask = problem.T, problem.S, problem.mask
    band = _band(diagonal(T, S, problem.alignment), left, right, T + S)
    if mask is None:
        return _band_blocks(band, T, S, problem.device)
    own = _mask_mod(mask, problem)
    whole = own if band is None else _both(own, band)
    # Samples and heads whose blocks are the same have them once.
    lead, H, sizes = problem.lead, problem.H, (T, S)
    shape = mask.shape if isinstance(mask, Tensor) else mask.shape(lead, H, *sizes)
    B = math.prod(lead) if math.prod(shape[:-3]) != 1 else None
    H = H if len(shape) > 2 and shape[-3] != 1 else None
    return _blocks(whole, B, H, T, S, problem.device)


@lru_cache(maxsize=16)
def _band_blocks(band: Index | None, T: int, S: int, device: torch.device) -> Any:
    return None if band is None else _blocks(band, None, None, T, S, device)


def _blocks(
    mask_mod: Index, B: int | None, H: int | None, T: int, S: int, device: torch.device
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod, B, H, T, S, device=device)


def _mask_mod(mask: Any, problem: Any) -> Index:
    """A mask as a function of indices, which itself has T × S numbers only where the mask has."""
    T, S = problem.T, problem.S
    if isinstance(mask, masks.And):
        return _both(_mask_mod(mask.one, problem), _mask_mod(mask.other, problem))
    if isinstance(mask, masks.Band):
        band = _band(diagonal(T, S, mask.alignment), mask.left, mask.right, T + S)
        if band is not None:
            return band
    if isinstance(mask, masks.Documents):
        queries, keys = (_of_sample(x, problem) for x in (mask.queries, mask.keys))
        return lambda b, h, t, s: queries[b, t] == keys[b, s]
    return _index(mask if isinstance(mask, Tensor) else problem._as_array(mask), problem)


@lru_cache(maxsize=16)  # the same function for the same numbers: nothing is compiled again
def _band(beside: int, left: int | None, right: int | None, most: int) -> Index | None:
    """Keys beside the diagonal; what is further than `most` keys is as good as unlimited."""
    if left is None and right is None:
        return None
    far = beside + (most if right is None else min(right, most))
    near = beside - (most if left is None else min(left, most))

    def inside(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s - t <= far) & (s - t >= near)

    return inside


def _both(one: Index, other: Index) -> Index:
    def both(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return one(b, h, t, s) & other(b, h, t, s)

    return both


def _of_sample(documents: Array, problem: Any) -> Tensor:
    """(..., n) → (B, n): the documents of each sample."""
    tensor = moved(documents, problem.device)
    n = tensor.shape[-1]
    return tensor.expand(*problem.lead, n).reshape(-1, n).contiguous()


def _index(x: Tensor, problem: Any) -> Index:
    """What broadcasts against the scores, as a function of indices."""
    x = _flat(x, problem).contiguous()
    steps = [int(n != 1) for n in x.shape]  # an axis of 1 is the same for all

    def at(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return x[b * steps[0], h * steps[1], t * steps[2], s * steps[3]]

    return at


def _check_translated(problem: Any, conventions: Conventions) -> None:
    """What is done to results, or to more than the names of options, PyTorch cannot be asked."""
    hides = problem.bias is not None or problem.visible is not None
    wrong = None
    if conventions.fill(problem) is not None:
        wrong = "hidden scores are filled, must leave the softmax"
    elif conventions.empty_row != "zero" and hides:
        wrong = f'empty_row is {conventions.empty_row!r}, must be "zero"'
    elif conventions.bias != "after_scale" and problem.bias is not None:
        wrong = f'bias is {conventions.bias!r}, must be "after_scale"'
    elif conventions.softcap != "before_bias" and problem.softcap is not None:
        wrong = f'softcap is {conventions.softcap!r}, must be "before_bias"'
    if wrong:
        raise OptionError(f'{wrong} with engine="fused": PyTorch has no such convention')


# --- the parts ------------------------------------------------------------------------------------


def _flat(x: Tensor, problem: Any) -> Tensor:
    """(..., n, m) → (B, heads, n, m) with all leading axes in one; of what broadcasts, B may be
    1."""
    lead = problem.lead
    if x.ndim == 4 and len(lead) == 1 and x.shape[0] == lead[0]:
        return x
    while x.ndim < 3:
        x = x[None]
    if x.ndim == 3 and x is not problem.q and x is not problem.k and x is not problem.v:
        return x[None]
    return x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def _unflattened(x: Tensor, problem: Any) -> Tensor:
    """(B, H, ...) → (..., H, ...), and without heads where q, k, v have none."""
    if problem.headless:
        return x[0, 0]
    return x if len(problem.lead) == 1 else x.reshape(*problem.lead, *x.shape[1:])


def _differentiates(problem: Any) -> bool:
    tensors = (problem.q, problem.k, problem.v, problem.bias)
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in tensors
    )


def _asked_dtype(problem: Any) -> torch.dtype:
    return problem.storage or problem.dtype  # type: ignore[no-any-return]


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    """What was handed over is computed in its own dtype."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
