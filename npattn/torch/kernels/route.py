"""Choose the function of PyTorch that computes a problem exactly, or refuse it with the reason."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.problem import Forward
from npattn.problem.arrays import Array
from npattn.torch.kernels.flex import compile_flex, evaluate_flex
from npattn.torch.kernels.operands import differentiates, unflatten
from npattn.torch.kernels.sdpa import evaluate_sdpa
from npattn.torch.problem import Problem
from npattn.torch.tensors import short_name

Tensor = torch.Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")
SQUARE = 128  # FlexAttention works in squares of so many queries and keys


def evaluate(problem: Problem, conventions: Conventions | None = None) -> Forward:
    """Evaluate a problem under conventions; .lse is None unless FlexAttention computed it."""
    gate: Any = problem.gate
    if gate is not None and gate.dtype != problem.q.dtype:
        name = short_name(gate.dtype)
        raise OptionError(
            f"gate is {name}, must be {short_name(problem.q.dtype)} as q: it would be rounded "
            '[engine="fused"; "auto" computes every problem]'
        )
    canonical: Any = problem.without_gate
    if conventions is not None:
        canonical = conventions.canonical(canonical)
        _check_translatable(problem, conventions)
    out, lse = forward(canonical)
    if lse is not None and conventions is not None:
        out, lse = conventions.results(problem, out, lse)  # type: ignore[arg-type, assignment]

    if gate is not None:
        out = (gate[0] if problem.headless and gate.ndim == 3 else gate) * out

    def refuse(result: str) -> Array:
        raise OptionError(
            f'engine="fused" has no {result}; call forward with another engine for that'
        )

    lazy = (partial(refuse, "weights"), partial(refuse, "max_score"))
    return Forward(out, lse, problem, "fused", None, *lazy)  # type: ignore[arg-type]


def forward(problem: Problem, *, lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Attention by the fused kernels of PyTorch, differentiable by its autograd.

    Raises OptionError if they cannot compute it exactly: the option, and why.

    Parameters
    ----------
    problem : Problem
        In npattn's own terms, without conventions.
    lse : bool, default False
        Require the lse, which only FlexAttention computes.

    Returns
    -------
    out : tensor (..., H, T, E)
        In the dtype of q, k, v.
    lse : tensor (..., H, T) or None
        None from scaled_dot_product_attention.
    """
    function = route(problem, lse=lse)
    with _no_autocast(problem.device.type):
        if function == "sdpa":
            return unflatten(evaluate_sdpa(problem), problem), None
        out, log = evaluate_flex(problem, compile_flex(problem))
    return unflatten(out, problem), unflatten(log, problem)


def route(problem: Problem, *, lse: bool = False) -> Literal["sdpa", "flex"]:
    """Choose the function that computes a problem. Raises OptionError if neither does."""
    why = refusal(problem, lse=lse)
    if why is not None:
        raise OptionError(f'{why} [engine="fused"; "auto" computes every problem]')
    if lse or _beyond_sdpa(problem) or (_is_sparse(problem) and _beyond_flex(problem) is None):
        return "flex"
    return "sdpa"


def refusal(problem: Problem, *, lse: bool = False) -> str | None:
    """Return why PyTorch's kernels cannot compute a problem exactly; None if they can."""
    q, k, v, dtype = problem.q, problem.k, problem.v, problem.__dict__["_given"][2]
    bias: Any = problem.bias_array
    if problem.device.type not in DEVICES:
        return f"q is on {problem.device}, must be on one of {', '.join(DEVICES)}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        names = ", ".join(short_name(x.dtype) for x in (q, k, v))
        legal = ", ".join(map(short_name, DTYPES))
        return f"q, k, v are {names}, must be one of {legal}, all the same"
    if dtype is not None and (problem.storage or problem.dtype) != q.dtype:
        name = short_name(q.dtype)
        return f"dtype is {dtype}, must be None or {name} as q: kernels compute in the dtype of q"
    if 0 in (*problem.lead, problem.H, problem.T, problem.S, problem.D, problem.E):
        name = next((n for n in "HTSDE" if getattr(problem, n) == 0), "the batch")
        return f"{name} is 0, must be positive: kernels differ in what they do"
    if problem.dropout_mask is not None:
        return "PyTorch's kernels take no dropout_mask: they draw their own"
    if problem.sinks is not None:
        return "PyTorch's kernels have no sinks"
    if bias is not None and bias.dtype != q.dtype:
        name = short_name(bias.dtype)
        return f"bias is {name}, must be {short_name(q.dtype)} as q: it would be rounded"
    beyond = "lse was requested" if lse else _beyond_sdpa(problem)
    why = _beyond_flex(problem) if beyond else None
    return None if why is None else f"{beyond}, which only FlexAttention has, and {why}"


def _beyond_sdpa(problem: Any) -> str | None:
    """Return the option that scaled_dot_product_attention lacks."""
    if problem.softcap is not None:
        return f"softcap is {problem.softcap}"
    return None if problem.score_mod is None else "there is a score_mod"


def _is_sparse(problem: Any) -> bool:
    """Check that FlexAttention can skip what scaled_dot_product_attention would mask."""
    an_object = problem.mask is not None and not isinstance(problem.mask, Tensor)
    return problem.window is not None or an_object


def _beyond_flex(problem: Any) -> str | None:
    """Return why FlexAttention cannot compute a problem exactly; None if it can."""
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
    if problem.bias is not None and differentiates(problem):
        # Its backward rebuilds the weights from a float32 lse, which a bias of −1e9 swallows.
        return "its gradients are wrong for a large bias: use torch.no_grad, or leave out the bias"
    return None


def _check_translatable(problem: Any, conventions: Conventions) -> None:
    """Raise OptionError if conventions change results, not only the names of options."""
    hides = problem.bias is not None or problem.visible is not None
    wrong = None
    if conventions.fill(problem) is not None or conventions.addend(problem) is not None:
        wrong = "hidden scores are filled or added to, must leave the softmax"
    elif conventions.empty_row != "zero" and hides:
        wrong = f'empty_row is {conventions.empty_row!r}, must be "zero"'
    elif conventions.empty_row_bias not in (None, "zero") and problem.bias is not None:
        wrong = f'empty_row_bias is {conventions.empty_row_bias!r}, must be "zero"'
    elif conventions.bias != "after_scale" and problem.bias is not None:
        wrong = f'bias is {conventions.bias!r}, must be "after_scale"'
    elif conventions.softcap != "before_bias" and problem.softcap is not None:
        wrong = f'softcap is {conventions.softcap!r}, must be "before_bias"'
    if wrong:
        raise OptionError(f'{wrong} with engine="fused": PyTorch has no such convention')


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    """Context in which operands are computed in their own dtype."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
