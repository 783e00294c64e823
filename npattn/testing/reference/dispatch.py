"""Random rounding of the operations of torch, in forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch._decomp import decomposition_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from npattn.problem.arrays import Array
from npattn.testing.reference.decisions import Decisions
from npattn.testing.reference.noise import Noise, find_exact


class RoundingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Round at random what is computed from the arguments of a function; without noise, nothing.

    Constants, as the positions of a rotation, stay: a right function has them in full precision.
    Fused operations are computed by their decompositions. Casts to a narrower dtype are left out,
    and noted in `narrowed`. Comparisons, indices and steps are `decisions`.
    """

    def __init__(self, noise: Noise | None, decisions: Decisions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.noise, self.decisions = noise, decisions
        self.narrowed: set[str] = set()
        self.lengths: set[int] = set()  # numbers of terms of its sums
        self.takes_maxima = False
        self.reached: dict[int, Any] = {}  # memory → its owner, so that no other tensor gets it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to be skipped by a compiler, torch would load it, for seconds."""
        return False

    def follow(self, values: Iterable[Any]) -> None:
        """Round what is computed from these tensors."""
        for x in _tensors(list(values)):
            if x.dtype == torch.float64:
                self.reached[_memory(x)] = x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operation, rounded and wide if its tensors are followed."""
        kwargs = kwargs or {}
        tensors = [*_tensors(args), *_tensors((*kwargs.values(),))]
        memories = {_memory(x) for x in tensors}
        if memories.isdisjoint(self.reached):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if "dtype" in kwargs or name == "convert_element_type":
            args, kwargs = self._keep_wide(name, args, kwargs)
        if any(x.dtype in NARROW for x in tensors):
            args = _widen(name, args)
        plain = name.rstrip("_")
        if func.namespace == "prims" and plain == "var":
            return self._mark(_variance(self, func, args, kwargs))
        fused = plain in FUSED and func.namespace == "aten"
        if plain in CHOICES or fused:
            return self._mark(self._replace(func, plain, args, kwargs))
        if plain in STEPS and plain != name:
            return args[0].copy_(self._step(getattr(torch, plain), args, kwargs))
        if plain in STEPS:
            return self._mark(self._step(func, args, kwargs))
        if plain in COMPARISONS:
            return self._compare(func, args, kwargs, plain)
        return self._compute(func, plain, args, kwargs, memories)

    # --- what rounds ------------------------------------------------------------------------------

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any, memories: set[int]) -> Any:
        """Return the result of an operation, rounded in place if its numbers are new."""
        terms = exact = None
        if name in SUMS and not _repeats_nothing(name, args, kwargs):
            self.lengths.add(_count_terms(name, func, args, kwargs))
        if self.noise is not None and name not in MOVES:
            if name in SUMS and not _repeats_nothing(name, args, kwargs):
                terms = _root(name, func, args, kwargs)
            operands = [_operand(x) for x in args[:2]] if name in ARITHMETIC else []
            exact = (name, [x.copy() for x in operands if x is not None])
            if name in ("add", "sub", "rsub") and len(exact[1]) == 2:
                with np.errstate(all="ignore"):
                    terms = [torch.from_numpy(np.asarray(np.hypot(*exact[1])))]
        result = func(*args, **kwargs)
        tensors = list(_tensors(result))
        if not any(x.dtype.is_floating_point or x.dtype.is_complex for x in tensors):
            decides = any(x.dtype == torch.float64 for x in _tensors((args, *kwargs.values())))
            bits = any(_memory(x) in memories for x in tensors)  # of a result that is read
            return self._fix(result) if decides and not bits else result
        moves = name in MOVES or _repeats_nothing(name, args, kwargs)
        for i, x in enumerate(tensors):
            if x.dtype in NARROW:  # an array of the function's own, which it writes to
                self.narrowed.add(f"{x.dtype}".removeprefix("torch."))
                self.reached[_memory(x)] = x
            if x.dtype != torch.float64:
                continue
            new = _memory(x) not in memories or func._schema.is_mutable
            if new and x.numel() and not moves and self.noise is not None:
                of_part = None if terms is None else terms[i]
                self._round(x, of_part, exact)
            self.reached[_memory(x)] = x
        return result

    def _round(self, x: Any, terms: Any, exact: Any) -> None:
        assert self.noise is not None
        sizes = None if terms is None else terms.detach().cpu().numpy()
        where = None if exact is None else find_exact(exact[0], exact[1], tuple(x.shape))
        rounded = self.noise.round(x.detach().cpu().numpy(), sizes, where)
        x.copy_(_tensor(rounded, x))

    def _keep_wide(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments without a cast to a narrower dtype."""
        dtype = kwargs.get("dtype", args[1] if name == "convert_element_type" else None)
        if dtype in NARROW:
            self.narrowed.add(f"{dtype}".removeprefix("torch."))
            kwargs = {**kwargs, "dtype": torch.float64} if "dtype" in kwargs else kwargs
            args = (args[0], torch.float64) if name == "convert_element_type" else args
        return args, kwargs

    def _mark(self, result: Any) -> Any:
        for x in _tensors(result):
            if x.dtype == torch.float64:
                self.reached[_memory(x)] = x
        return result

    def _replace(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Compute an operation by others, and copy what it has to change in place."""
        table = CHOICES.get(name)
        self.takes_maxima |= name in MAXIMA
        if table is not None:
            result = table(self, func, args, kwargs)
        else:
            overload = getattr(getattr(torch.ops.aten, name), func._overloadname, func)
            decomposition = decomposition_table.get(overload, decomposition_table.get(func))
            if decomposition is None:
                return self._compute(func, name, args, kwargs, set())
            with self:
                result = decomposition(*args, **kwargs)
        if func._schema.name.endswith("_"):
            return args[0].copy_(result)
        return result

    # --- what decides -----------------------------------------------------------------------------

    def _fix(self, result: Any) -> Any:
        """Return what was decided in the exact run, whatever operation it is."""
        if isinstance(result, torch.Tensor):
            fixed = self.decisions.decide("fixed", None, lambda _: _array(result))
            same = fixed.shape == tuple(result.shape)
            return _tensor(fixed, result) if same else result
        if isinstance(result, (bool, int, float)):
            return self.decisions.decide("fixed", None, lambda _: result)
        return result

    def _compare(self, func: Any, args: Any, kwargs: Any, name: str) -> Any:
        out = func(*args, **kwargs)
        a, b = (_operand(x) for x in args[:2])
        with np.errstate(all="ignore"):
            gap = None if a is None or b is None else np.broadcast_to(a - b, tuple(out.shape))
        kind = "fixed" if name in ("eq", "ne") else "compare"
        fixed = self.decisions.decide(kind, gap, lambda _: _array(out))  # type: ignore[arg-type]
        out.copy_(_tensor(fixed, out))  # a comparison in place has float results
        return out

    def _step(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]

        def evaluate(y: Array | None) -> Array:
            return _array(func(_tensor(y, x), *args[1:], **kwargs))

        return _tensor(self.decisions.decide("step", _array(x), evaluate), x)

    def choose(
        self, x: Any, index: Callable[[Any], Any], dim: int, least: bool, order: bool = False
    ) -> Any:
        """Return indices along an axis as of the exact run.

        `index` gives them for x, in the rank of x: those of small elements if `least`, and those of
        all elements, in their order, if `order`.
        """

        def evaluate(y: Array | None) -> Array:
            return _array(index(_tensor(y, x)))

        def sign(chosen: Array) -> Array:
            """Move the chosen down, and others up; in an order, every other element."""
            side = np.ones(tuple(x.shape))
            ranks = np.arange(chosen.shape[dim]).reshape([-1, *[1] * (x.ndim - 1 - dim % x.ndim)])
            down = np.where((ranks + self.decisions.parity) % 2 == 0, -1.0, 1.0) if order else -1.0
            np.put_along_axis(side, chosen, np.broadcast_to(down, chosen.shape), dim)
            return -side if least else side

        found = self.decisions.decide("choose", _array(x), evaluate, sign)
        return _tensor(found, x)


def unfuse_attention() -> AbstractContextManager[None]:
    """Compute scaled_dot_product_attention by its steps, which can be seen."""
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return context


class CallMode(TorchFunctionMode):
    """See calls above autograd: the cotangents of gradients are rounded as the arguments are.

    With `detached` it takes maxima as constants, as a right function may where they only shift a
    softmax: a gradient through the maximum adds up to 0 there, and takes the error of the largest
    element with it, which other right functions have.
    """

    def __init__(self, rounding: RoundingMode, detached: bool) -> None:
        super().__init__()
        self.rounding, self.detached = rounding, detached

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            outputs = kwargs.get("grad_outputs", args[2] if len(args) > 2 else None)
            self.rounding.follow([outputs])
        result = func(*args, **kwargs)
        if not self.detached or getattr(func, "__name__", "") not in MAXIMA:
            return result
        if isinstance(result, tuple):
            return type(result)((result[0].detach(), *result[1:]))
        return result.detach()


MAXIMA = {"amax", "max", "amin", "min"}


# --- operations that choose -----------------------------------------------------------------------


def _along(mode: RoundingMode, x: Any, dim: int, keep: bool, least: bool) -> tuple[Any, Any]:
    """Return the largest or least elements along an axis, and their indices."""
    if not x.ndim:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    find = torch.argmin if least else torch.argmax
    i = mode.choose(x, lambda y: find(y, dim, keepdim=True), dim, least)
    values = x.gather(dim, i)
    return (values, i) if keep else (values.squeeze(dim), i.squeeze(dim))


def _extremum(least: bool) -> Callable[..., Any]:
    """Return what stands for torch's maxima, or minima if `least`: values by index of the run."""

    def extremum(mode: RoundingMode, func: Any, args: Any, kwargs: Any) -> Any:
        """max(x), max(x, dim), amax(x, dims): the last is of several axes, without indices."""
        x, *rest = args
        options = dict(zip(("dim", "keepdim"), rest, strict=False)) | kwargs
        keep, dim = options.get("keepdim", False), options.get("dim", ())
        if isinstance(dim, int) and "amax amin".find(func._schema.name[-4:]) < 0:
            return _along(mode, x, dim, keep, least)
        axes = [dim] if isinstance(dim, int) else list(dim) or list(range(x.ndim))
        axes = sorted(d % max(x.ndim, 1) for d in axes)
        others = [d for d in range(x.ndim) if d not in axes]
        flat = x.permute(*others, *axes).reshape([*(x.shape[d] for d in others), -1])
        values, _ = _along(mode, flat, -1, False, least)
        return values.reshape([1 if d in axes else n for d, n in enumerate(x.shape)] if keep
                              else [x.shape[d] for d in others])  # fmt: skip

    return extremum


def _arg(least: bool) -> Callable[..., Any]:
    def arg(mode: RoundingMode, func: Any, args: Any, kwargs: Any) -> Any:
        x, dim, keep = (*args, None, False)[:3] if len(args) < 3 else args[:3]
        dim, keep = kwargs.get("dim", dim), kwargs.get("keepdim", keep)
        y = x.reshape(-1) if dim is None else x
        i = _along(mode, y, -1 if dim is None else dim, keep and dim is not None, least)[1]
        return i.reshape([1] * x.ndim) if keep and dim is None else i

    return arg


def _by_indices(axis: int, default: int, order: bool = False) -> Callable[..., Any]:
    """Return what computes (values, indices) by the indices; the axis is argument `axis`."""

    def select_again(mode: RoundingMode, func: Any, args: Any, kwargs: Any) -> Any:
        x, dim = args[0], kwargs.get("dim", args[axis] if len(args) > axis else default)
        if not x.ndim:
            return func(*args, **kwargs)

        def index(y: Any) -> Any:
            i = func(y, *args[1:], **kwargs)[1]
            return i if i.ndim == x.ndim else i.unsqueeze(dim)

        i = mode.choose(x, index, dim, False, order)
        kept = func(x, *args[1:], **kwargs)[1].shape
        return x.gather(dim, i).reshape(kept), i.reshape(kept)

    return select_again


def _by_windows(axes: int) -> Callable[..., Any]:
    """Return what computes a maximum pooling over the last axes by its indices."""

    def pool(mode: RoundingMode, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        shape = func(*args, **kwargs)[1].shape
        flat = x.flatten(-axes)

        def index(y: Any) -> Any:
            return func(y.reshape(x.shape), *args[1:], **kwargs)[1].flatten(-axes)

        i = mode.choose(flat, index, -1, False)
        return flat.gather(-1, i).reshape(shape), i.reshape(shape)

    return pool


def _greater(least: bool) -> Callable[..., Any]:
    def greater(mode: RoundingMode, func: Any, args: Any, kwargs: Any) -> Any:
        a, b = args
        with mode:
            first = ((a <= b) if least else (a >= b)) | (a != a)
        return torch.where(first, a, b)

    return greater


def _size(mode: RoundingMode, func: Any, args: Any, kwargs: Any) -> Any:
    with mode:
        negative = args[0] < 0
    return torch.where(negative, -args[0], args[0])


def _variance(mode: RoundingMode, func: Any, args: Any, kwargs: Any) -> Any:
    """prims.var(x, dims, correction), which sums squares of what is left beside the mean."""
    x, dims = args[:2]
    dims = list(range(x.ndim)) if dims is None else list(dims)
    n = math.prod(x.shape[d] for d in dims)
    with mode:
        rest = x - x.sum(dims, keepdim=True) / n
        return (rest * rest).sum(dims) / (
            n - kwargs.get("correction", args[2] if len(args) > 2 else 0)
        )


CHOICES: dict[str, Callable[..., Any]] = {
    "amax": _extremum(False), "amin": _extremum(True), "max": _extremum(False),
    "min": _extremum(True), "argmax": _arg(False), "argmin": _arg(True),
    "maximum": _greater(False), "minimum": _greater(True), "fmax": _greater(False),
    "fmin": _greater(True), "abs": _size,
    "sort": _by_indices(1, -1, True), "topk": _by_indices(2, -1, True),
    "kthvalue": _by_indices(2, -1),
    "median": _by_indices(1, -1), "mode": _by_indices(1, -1), "cummax": _by_indices(1, -1),
    "cummin": _by_indices(1, -1), "max_pool2d_with_indices": _by_windows(2),
    "max_pool3d_with_indices": _by_windows(3), "adaptive_max_pool2d": _by_windows(2),
}  # fmt: skip
"""Operations that select elements, computed by the indices of the exact run."""
COMPARISONS = {"gt", "lt", "ge", "le", "eq", "ne"}
STEPS = {"sign", "sgn", "floor", "ceil", "round", "trunc"}
"""Operations that are constant but for jumps."""
FUSED = {
    "relu", "relu6", "threshold", "threshold_backward", "leaky_relu", "leaky_relu_backward",
    "hardtanh", "hardtanh_backward", "hardswish", "hardswish_backward", "hardsigmoid",
    "hardsigmoid_backward", "elu", "elu_backward", "celu", "selu", "softshrink",
    "softshrink_backward", "hardshrink", "_prelu_kernel", "_prelu_kernel_backward", "clamp",
    "clamp_min", "clamp_max", "huber_loss", "huber_loss_backward", "smooth_l1_loss",
    "smooth_l1_loss_backward", "_softmax", "_softmax_backward_data", "_log_softmax",
    "_log_softmax_backward_data", "_safe_softmax", "logsumexp", "native_layer_norm",
    "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_fused_rms_norm", "_fused_rms_norm_backward",
    "mse_loss", "mse_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits", "soft_margin_loss", "gelu", "gelu_backward", "silu",
    "silu_backward", "softplus", "softplus_backward", "log_sigmoid_forward",
    "log_sigmoid_backward", "mish", "mish_backward", "glu", "glu_backward", "sigmoid_backward",
    "tanh_backward", "mean", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "addcmul",
    "addcdiv", "lerp", "logaddexp", "logaddexp2", "xlogy", "nll_loss_forward", "nll_loss_backward",
}  # fmt: skip
"""Operations that are computed by torch's own decompositions."""
SUMS = {
    "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "baddbmm", "addbmm", "sum", "nansum",
    "cumsum", "convolution", "convolution_backward", "index_put", "_index_put_impl", "index_add",
    "scatter_add", "avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "embedding_dense_backward",
    "_embedding_bag", "trace", "upsample_bilinear2d_backward", "max_pool2d_with_indices_backward",
}  # fmt: skip
"""Sums of terms, or of products."""
REPEATED = {
    *("index_put", "_index_put_impl", "index_add", "scatter_add", "embedding_dense_backward"),
    *("_embedding_bag", "max_pool2d_with_indices_backward"),
}
MOVES = {
    "clone", "copy", "_to_copy", "cat", "neg", "masked_fill", "where", "stack", "fill", "index",
    "gather", "constant_pad_nd", "zero", "zeros_like", "ones_like", "full_like", "empty_like",
    "new_zeros", "new_empty", "new_full", "new_ones", "tril", "triu", "flip", "roll",
    "slice_backward", "select_backward", "diagonal_backward", "embedding", "masked_select",
    "masked_scatter", "index_select", "scatter", "take", "repeat", "convert_element_type",
    "index_fill", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
    "pixel_shuffle", "unfold_backward", "slice_scatter", "select_scatter", "diagonal_scatter",
    "as_strided_scatter", "lift_fresh", "detach", "alias", "expand", "permute", "set", "resize",
    "_unsafe_index", "split", "unbind", "native_channel_shuffle", "im2col",
    "value_selecting_reduction_backward",
}  # fmt: skip
"""Operations that compute nothing; a hidden score stays what it is."""
ARITHMETIC = {"add", "sub", "rsub", "mul", "div"}
NARROW = {torch.float32, torch.float16, torch.bfloat16}


def _count_terms(name: str, func: Any, args: Any, kwargs: Any) -> int:
    """Return the number of terms of the longest sum of an operation, or a larger one."""
    sizes = [tuple(x.shape) for x in _tensors(args)]
    if name in ("mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "baddbmm", "addbmm"):
        return int(sizes[-1][0] if len(sizes[-1]) < 2 else sizes[-1][-2])
    if name == "sum":
        dims = args[1] if len(args) > 1 and args[1] else range(len(sizes[0]))
        return math.prod(sizes[0][d] for d in ([dims] if isinstance(dims, int) else dims))
    if name == "cumsum":
        return max(sizes[0], default=1)
    if name in REPEATED:
        return max((int(n.max()) for n in _change(func, args, kwargs, torch.ones_like)), default=1)
    return max(map(math.prod, sizes), default=1)


def _repeats_nothing(name: str, args: Any, kwargs: Any) -> bool:
    """Return True for a sum of one term each, and for indices that are set, not added."""
    if name == "sum":
        x, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
        axes = range(x.ndim) if not dims else [dims] if isinstance(dims, int) else dims
        return bool(math.prod(x.shape[d] for d in axes) == 1)
    if name in ("index_put", "_index_put_impl"):
        return not bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    return False


def _widen(name: str, args: Any) -> Any:
    """Return the arguments in float64, but the one that an operation writes to."""

    def widen(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(widen, x))
        return x.double() if isinstance(x, torch.Tensor) and x.dtype in NARROW else x

    first = args[:1] if name.endswith("_") else widen(args[:1])
    return (*first, *map(widen, args[1:]))


def _root(name: str, func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return √(Σ term²) of sums of terms, or of products of arguments.

    n terms that are added to one index, one after another, may be equal and have equal errors: up
    to n/2 roundings of Σ |term|. Σ |term| √n / 4 stands for it: a tolerance is 6 spreads and more,
    and has a factor √(n/3) beside.
    """
    if name not in REPEATED:
        return [x.sqrt() for x in _change(func, args, kwargs, lambda x: x * x)]
    sums, counts = (_change(func, args, kwargs, how) for how in (torch.abs, torch.ones_like))
    return [x * n.sqrt() / 4 for x, n in zip(sums, counts, strict=True)]


def _change(func: Any, args: Any, kwargs: Any, how: Callable[[Any], Any]) -> list[Any]:
    """Return the results of an operation on other numbers."""
    changed = [how(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    return [*_tensors(func(*changed, **kwargs))]


def _operand(x: Any) -> Array | None:
    if isinstance(x, torch.Tensor):
        return _array(x)
    return np.asarray(x, np.float64) if isinstance(x, (bool, int, float)) else None


def _array(x: Any) -> Array:
    return np.asarray(x.detach().cpu().resolve_neg().numpy())


def _tensor(x: Any, like: Any) -> Any:
    return torch.from_numpy(np.array(x, order="C")).to(like.device)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _tensors(x)


def _memory(x: Any) -> int:
    return int(x.untyped_storage().data_ptr())
