"""Frameworks in this process: each array is handled by the worker's file, as in a worker.

What JAX arrays cannot have is said in the words of `child`: they are immutable and have no strides,
so that the rules on inputs and views have little to check there.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from npattn.errors import MissingExtraError, OptionError
from npattn.problem.arrays import Array, finfo
from npattn.testing.adapters import child
from npattn.testing.adapters.base import ImplementationError, ResultError
from npattn.testing.adapters.child import FRAMEWORKS, NAMES, Tensor, contents, short_name

F = TypeVar("F")

WIDE = {n: np.dtype(getattr(ml_dtypes, n, n)) for n in NAMES.values()}
"""Dtypes of results by name; those of a worker are the same."""
TINY = {
    name: np.array(x, np.float32).reshape(1, 1, 2, 2)
    for name, x in zip("qkv", child.TINY, strict=True)
}
"""Arrays of the call that finds out a framework."""


# --- arrays and the bytes of a frame --------------------------------------------------------------


def tensor_of(array: Array) -> Tensor:
    return Tensor(name_dtype(array), array.shape, contents(np.ascontiguousarray(array)))


def array_of(tensor: Tensor) -> Array:
    """Return a view of the frame, which a framework copies when it takes it."""
    dtype = WIDE[NAMES[tensor.dtype]]
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)


def name_dtype(array: Array) -> str:
    short = short_name(array.dtype)
    if short is None:
        raise ImplementationError(f"its worker takes no arrays of {array.dtype}")
    return short


def span(array: Array) -> Array:
    """Return a flat view of the memory from the first element of an array to the last."""
    if not array.size:
        return np.empty(0, array.dtype)
    bits = array.view(f"V{array.itemsize}")  # any dtype has them
    ends: Any = [slice(-1 if n < 0 else 0, None) for n in array.strides]
    first = bits[(..., *ends)]
    reach = sum((size - 1) * abs(n) for size, n in zip(array.shape, array.strides, strict=True))
    if reach % array.itemsize:
        raise ImplementationError("its worker takes no strides of parts of elements")
    count, step = reach // array.itemsize + 1, (array.itemsize,)
    return np.lib.stride_tricks.as_strided(first, (count,), step).view(array.dtype)


def describe_view(array: Array, root: Array) -> dict[str, Any]:
    """Return where an array lies in the flat memory of `root`, as a frame says it."""
    offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    view = {"shape": list(array.shape), "strides": list(array.strides)}
    return {
        **view,
        "offset": offset if array.size else 0,
        **({} if array.flags.writeable else {"read_only": True}),
    }


def is_plain(array: Array) -> bool:
    """Return True for a contiguous, writable array whose strides say no more than its shape."""
    is_contiguous = array.flags.c_contiguous and array.flags.writeable
    return is_contiguous and min(array.strides, default=0) >= 0


@dataclass(frozen=True, eq=False)
class Composed:
    """An array that is formed of others where a call is made: autograd replaces these."""

    kind: str
    parts: tuple[Any, ...]

    def __add__(self, bias: Any) -> Composed:
        return Composed(self.kind, (*self.parts, bias))


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise errors of the worker's file as those of an implementation."""
    try:
        yield
    except child.OtherCount:
        raise
    except child.Usage as err:
        raise OptionError(str(err)) from None
    except child.NoResult as err:
        raise ResultError(str(err)) from None
    except child.NotPossible as err:
        raise ImplementationError(str(err)) from None


# --- frameworks -----------------------------------------------------------------------------------


class Framework:
    """Conversion of arrays to and from a framework, and its way to gradients.

    Arguments that are formed of several arrays are `Composed`, but for NumPy arrays.
    """

    def __init__(self, backend: child.NumPy) -> None:
        self.backend, self.name = backend, backend.name
        self.differentiates = backend.differentiates
        self.compiles = backend.compiles  # for every shape, so that few shapes save time
        self.sets_threads, self.immutable = backend.sets_threads, backend.name == "jax"
        self.composes = backend.name != "numpy"
        self.device: Any = getattr(backend, "device", None)

    def one_thread(self) -> AbstractContextManager[None]:
        """Compute with one thread: small problems are slow on many."""
        return self.threads(1) or nullcontext()

    def threads(self, count: int) -> AbstractContextManager[None] | None:
        """Compute with a number of threads, or return None if it is fixed.

        BLAS and XLA set theirs when they are loaded.
        """
        threads: AbstractContextManager[None] = self.backend.threads(count)
        return threads if self.sets_threads else None

    def finish(self) -> None:
        """Wait for pending work, so that its errors are raised here."""
        self.backend.finish()

    def device_works(self) -> bool:
        """Return True if the device still computes; an access out of bounds ends that."""
        return self.backend.device_works()

    def allowing(self, dtype: Any) -> AbstractContextManager[None]:
        """Enable arrays of a dtype, where the framework needs to be told."""
        allowing: AbstractContextManager[None] = self.backend.allowing(short_name(np.dtype(dtype)))
        return allowing

    def give(self, array: Array) -> Any:
        """Return a writable array of the framework with the values and strides of `array`."""
        if self.name == "numpy":
            return array
        with translate_errors():
            if is_plain(array):
                return self.backend.view(tensor_of(array), None)
            flat = span(array)
            tensor = Tensor(name_dtype(flat), flat.shape, contents(flat))
            return self.backend.view(tensor, describe_view(array, flat), self.backend.base(tensor))

    def take(self, value: Any) -> Array:
        """Return a result as a NumPy array, in the dtype delivered."""
        with translate_errors():
            return np.array(array_of(self.backend.read(value)))

    def memory(self, value: Any) -> Array | None:
        """Return a NumPy array on the memory of a result, or None where NumPy cannot read it."""
        memory: Array | None = self.backend.memory(value)
        return memory

    def add_mask(self, mask: Any, q: Any) -> Any:
        """Return 0 where the mask is True, and the least finite number of q's dtype elsewhere."""
        if self.composes:
            return Composed("add_mask", (mask, q))
        return np.where(mask, 0, finfo(q.dtype).min).astype(q.dtype)

    def hide(self, bias: Any, mask: Any) -> Any:
        """Return the bias with −inf where the mask is False, differentiable in the bias."""
        if self.composes:
            return Composed("hide", (bias, mask))
        return np.where(mask, bias, bias.dtype.type(-np.inf))

    def reshape(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Return an array in another shape, differentiable."""
        return Composed("reshape", (array, shape)) if self.composes else array.reshape(shape)

    def gradients(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        names: Iterable[str],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the results of ``call(**inputs)`` and the gradients of the inputs named."""
        leaves = {name: inputs[name] for name in names}
        with translate_errors():
            results, grads = self.backend.gradients(lambda x: call(**x), leaves, cotangents)
        return results, grads


# --- which one ------------------------------------------------------------------------------------


def make_framework(name: str, device: str | None = None) -> Framework:
    """Return a framework by name, on a device.

    Raises OptionError if there is no such device.
    """
    try:
        importlib.import_module(name)
    except ImportError as err:
        shown = "JAX" if name == "jax" else name
        raise MissingExtraError(
            f"{shown} targets need {name}; npattn itself does not: pip install 'npattn[{name}]'"
        ) from err
    with translate_errors():
        return Framework(child.make_framework(name, device))


def choose_framework(
    f: Callable[..., Any], name: str, framework: str = "auto", device: str | None = None
) -> Framework:
    """Return the framework named, or for "auto" the one whose arrays `f` takes.

    Raises OptionError if `framework` is unknown, or for "auto" if neither the home module of `f`,
    nor its annotations, nor a tiny call tell.
    """
    return find_framework(f, name, framework, device)[0]


def find_framework(
    f: Callable[..., Any],
    name: str,
    framework: str = "auto",
    device: str | None = None,
    call: Callable[[Framework], Framework] | None = None,
) -> tuple[Framework, Array | None]:
    """Return the framework, and the result of `f` for `TINY` if a call found it out.

    `call` calls it with arrays of a framework and with what it needs besides q, k and v, and
    returns the framework; it is asked where nothing else tells.
    """
    if framework not in ("auto", *FRAMEWORKS):
        legal = ", ".join(("auto", *FRAMEWORKS[:-1]))
        raise OptionError(f"framework is {framework!r}, must be {legal} or {FRAMEWORKS[-1]}")
    if framework != "auto":
        return make_framework(framework, device), None
    try:
        with translate_errors():
            of_child, tried = child.choose_framework(f, framework, device)
    except child.Unfound as err:

        def try_candidate(candidate: str) -> Framework:
            assert call is not None
            return call(make_framework(candidate))

        return try_frameworks(name, err.args[0], None if call is None else try_candidate), None
    return Framework(of_child), np.array(array_of(tried["tried"])) if tried else None


def try_frameworks(name: str, errors: Mapping[str, str], call: Callable[[str], F] | None) -> F:
    """Return the result of a call with the arrays of the first framework that it takes.

    `errors` says what a call with q, k and v alone raised in each framework to try. `call` gives
    what is needed besides, by the name of a framework; it is None if that is nothing. `name` is for
    the error.
    """
    raised = dict(errors)
    for candidate in errors:
        if call is None:
            break
        try:
            return call(candidate)
        except ImplementationError as err:
            raised[candidate] = str(err)
    lines = "; ".join(f"{candidate}: {text}" for candidate, text in raised.items())
    raise OptionError(
        f"{name} could not be called on a tiny problem ({lines}); say which "
        f"arrays it takes with framework={' or framework='.join(map(repr, FRAMEWORKS))}"
    )


def copy_module(module: Any) -> Any:
    """Copy a torch module; results that it keeps as attributes are copied without their graph."""
    kept = [x for m in module.modules() for x in vars(m).values() if hasattr(x, "is_leaf")]
    return copy.deepcopy(module, {id(x): x.detach() for x in kept if not x.is_leaf})
