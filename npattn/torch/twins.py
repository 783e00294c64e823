"""The functions of `npattn.oracle.twins` on tensors: their library, and their results."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

from npattn.errors import DtypeError, OptionError
from npattn.oracle import signatures, twins
from npattn.problem.arrays import Array
from npattn.problem.checks import check_dtype, read_boolean, read_floating
from npattn.problem.foreign import reject_unknown_options
from npattn.torch import api
from npattn.torch.flags import exact
from npattn.torch.positions import rope
from npattn.torch.problem import Problem
from npattn.torch.tensors import cast, has_float64, short_name, stand_in, to_host, to_tensor

P = ParamSpec("P")
R = TypeVar("R")
Tensor = torch.Tensor


class Tensors(twins.Arrays):
    """Functions on tensors, and attention on them, for the module of npattn.torch that is named."""

    LIBRARY = torch
    reads_numbers = False
    ENGINE = "auto"
    WIDE = "float32 or float64"
    Problem = Problem
    problem = staticmethod(api.read_problem)
    forward = staticmethod(api.forward)
    evaluate = staticmethod(api.evaluate)
    rope = staticmethod(rope)

    contiguous: Any = staticmethod(torch.Tensor.contiguous)
    repeat: Any = staticmethod(torch.repeat_interleave)
    stack: Any = staticmethod(torch.stack)
    take_along_axis: Any = staticmethod(torch.take_along_dim)

    def __init__(self, module: str) -> None:
        self.module, self.home = module, module.replace(".torch", "")

    def read(self, beside: Any = None, **values: Any) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return the tensors as they are, and arrays that stand for their shapes and dtypes."""
        facts = {}
        for name, x in values.items():
            if not isinstance(x, Tensor):
                raise DtypeError(f"{name} is {type(x).__name__}, must be a tensor: use {self.home}")
            if x.is_complex():
                raise DtypeError(
                    f"{name} is {short_name(x.dtype)}, must be a real tensor: use {self.home}"
                )
            beside = x if beside is None else beside
            if x.device != beside.device:
                raise OptionError(
                    f"{name} is on {x.device}, must be on {beside.device} as the other tensors"
                )
            facts[name] = read_floating(name, stand_in(name, x))
        return values, facts

    def read_boolean(self, name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} is {type(x).__name__}, must be a tensor: use {self.home}")
        read_boolean(name, stand_in(name, x))
        return x

    def compute_dtype(self, dtype: Any, arrays: Iterable[Array], like: Any) -> torch.dtype:
        name = self.name_dtype(dtype)
        wide, narrow = check_dtype(name, "dense", tuple(arrays))
        if narrow is not None or wide not in ("f4", "f8"):
            raise DtypeError(
                f"dtype is {dtype!r}, must be float32 or float64, and all tensors real"
            )
        if wide == "f8" and (dtype is not None or has_float64(like.device.type)):
            return torch.float64
        return torch.float32

    def add_parts(self, x: Any) -> Any:
        return x.sum(0)

    def amax(self, x: Any, axis: int) -> Any:
        return x.detach().amax(axis)

    def astype(self, x: Any, dtype: Any) -> Any:
        return x.to(dtype)

    def asarray(self, x: Any) -> Any:
        return x

    at_least_float64 = asarray

    def widen(self, x: Any, like: Any) -> Any:
        return x.to(like.dtype)

    def to_rank(self, x: Any) -> Any:
        return x.detach()

    def largest(self, x: Any, n: int) -> tuple[Any, Any]:
        values, order = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :n], order[..., :n]

    def widest(self, x: Any) -> Any:
        return x.to(torch.float64 if has_float64(x.device.type) else torch.float32)

    def on_host(self, x: Any) -> Any:
        return to_host(x) if isinstance(x, Tensor) else x

    def indices(self, arrays: Iterable[Array], like: Any) -> tuple[Any, ...]:
        return tuple(torch.as_tensor(x, device=like.device) for x in arrays)

    def check_dtype(self, dtype: Any) -> None:
        if dtype not in (None, torch.float32, torch.float64):
            raise DtypeError(f"dtype is {self.name_dtype(dtype)}, must be float32 or float64")

    def name_dtype(self, dtype: Any) -> Any:
        return short_name(dtype) if isinstance(dtype, torch.dtype) else dtype

    def full(self, shape: Sequence[int], value: Any, like: Any) -> Any:
        return like.new_full(tuple(shape), value)

    def put(self, x: Any, at: tuple[Any, ...], values: Any) -> Any:
        return x.index_put(at, cast(values, x.dtype))

    def exact(self, dtype: Any, like: Any) -> AbstractContextManager[Any]:
        return exact(dtype, like.device)

    def forward_each(self, arrays: Sequence[tuple[Any, ...]], each: Sequence[Any]) -> list[Any]:
        return [api.forward(*xs, **options) for xs, options in zip(arrays, each, strict=True)]

    # --- functions of a module --------------------------------------------------------------------

    def bind(
        self, function: Callable[P, Any], result: type[R], example: str = ""
    ) -> Callable[P, R]:
        """Return a function of npattn on tensors, whose result is a tensor or has such fields."""
        body: Any = function
        library = copy.copy(self)
        library.home += f".{body.__name__}"  # for errors
        bound = signatures.bind(library, body.of_library)

        def call(*args: Any, **kwargs: Any) -> Any:
            return _convert(bound(*args, **kwargs), result)

        return self._describe(call, bound, result, example)

    def bind_on_host(self, function: Callable[P, Any], result: type[R]) -> Callable[P, R]:
        """Return a function of npattn computed on the host, where no gradient passes through it."""

        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            host = [_to_host(y) for y in (x, *args)]
            out = function(*host, **{n: _to_host(y) for n, y in kwargs.items()})
            device = x.device if isinstance(x, Tensor) else torch.device("cpu")
            back = tuple(to_tensor(y, device) for y in (out if isinstance(out, tuple) else (out,)))
            return _convert(back if isinstance(out, tuple) else back[0], result)

        return self._describe(call, function, result)

    def _describe(
        self, call: Any, function: Callable[P, Any], result: type[R], example: str = ""
    ) -> Callable[P, R]:
        """Name a function as the one of npattn, document it on tensors, and keep it from dynamo."""
        like: Any = function
        call.__name__, call.__qualname__, call.__module__ = (
            like.__name__, like.__qualname__, self.module
        )  # fmt: skip
        signature = inspect.signature(like)
        parameters = [
            p.replace(annotation=re.sub("ArrayLike", "Tensor", p.annotation))
            for p in signature.parameters.values()
        ]
        signatures.sign(call, inspect.Signature(parameters, return_annotation=result.__name__))
        text = (like.__doc__ or "").split("\n    Examples\n")[0].rstrip()
        summary, _, rest = text.partition("\n")
        summary += (
            f"\n\n    On tensors, differentiable by autograd, as `{self.home}.{like.__name__}`."
        )
        for pattern, word in WORDS:
            rest = re.sub(pattern, word, rest)
        call.__doc__ = f"{summary}\n{rest}\n    {example and EXAMPLES + example}"
        rejecting: Any = reject_unknown_options(call)
        # Dynamo must not trace it: NumPy checks the shapes.
        in_no_graph = _disable_dynamo(rejecting)

        @wraps(rejecting)
        def public(*args: P.args, **kwargs: P.kwargs) -> R:
            compute = in_no_graph if torch.compiler.is_compiling() else rejecting
            return compute(*args, **kwargs)  # type: ignore[no-any-return]

        return public


EXAMPLES = "\n    Examples\n    --------"
WORDS = (
    ("array_like", "Tensor"),
    ("ndarray", "Tensor"),
    ("`npattn.attention`", "`npattn.torch.attention`"),
)


def _to_host(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return short_name(x)
    return to_host(x) if isinstance(x, Tensor) else x


def _convert(out: Any, result: Any) -> Any:
    """Return the result of a function as another type with the same fields, or its first fields."""
    if isinstance(out, result):
        return out
    if isinstance(out, tuple):
        return result(*out)
    return result(*(getattr(out, name) for name in result._fields))
