"""The worker: holds one implementation and answers the judge's requests about it.

    python child.py TARGET

TARGET is module:function or path/file.py:function. This is one file that imports nothing of npattn
and needs NumPy alone, so that it runs in any environment with Python 3.9 or later. Requests come
on standard input and answers go to standard output, as docs/protocol.md says; what the
implementation prints goes to standard error.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import dis
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import json
import linecache
import math
import mmap
import os
import platform
import queue
import re
import struct
import sys
import sysconfig
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, Callable

if __name__ == "__main__":  # without site NumPy too is found in the folders that are named
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
    sys.path[:0] = sys.argv[2:]

import numpy as np

VERSION = 1
LARGEST = 1 << 33
"""Bytes of a frame beyond which it is garbage."""
BLOCK, LARGE_BLOCK = 1 << 16, 1 << 20
"""Bytes up to which a frame is joined, and is read at once; and those read of a longer one."""
LIBRARIES = (
    *(sysconfig.get_paths()[n] for n in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(path for path in sys.path if path.endswith("-packages")),
)
TOKEN = 16
"""Random bytes at the start of shared memory, by which a worker knows that it sees the same."""
DTYPES = """
    F64 float64 8, F32 float32 4, F16 float16 2, BF16 bfloat16 2, F8_E4M3 float8_e4m3fn 1,
    F8_E5M2 float8_e5m2 1, C64 complex64 8, C128 complex128 16, BOOL bool 1, I64 int64 8,
    I32 int32 4, I16 int16 2, I8 int8 1, U64 uint64 8, U32 uint32 4, U16 uint16 2, U8 uint8 1
"""
"""Dtypes by their name in a frame, NumPy's name, and the bytes of an element."""
ROWS = [row.split() for row in DTYPES.split(",")]
SIZES = {short: int(size) for short, _, size in ROWS}
NAMES = {short: name for short, name, _ in ROWS}
SHORT = {name: short for short, name in NAMES.items()}
KINDS = (
    "POSITIONAL_ONLY",
    "POSITIONAL_OR_KEYWORD",
    "VAR_POSITIONAL",
    "KEYWORD_ONLY",
    "VAR_KEYWORD",
)
STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ERRORS: Any = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""NumPy's own error state, whatever the target has made of it."""
FRAMEWORKS = ("numpy", "torch", "jax")
WORDS = {"torch": r"\btorch\b", "jax": r"\b(jax|jnp)\b", "numpy": r"\b(numpy|np|npt)\b"}
"""Patterns that name a framework in an annotation."""
AUTOGRAD = "torch.autograd.function.Function"
"""Class whose subclasses are called by their `apply`."""
TINY = ([1, -0.5, 0.25, 0.75], [0.5, 1, -1, 0.25], [2, -1, 0.5, 1.5])
"""Elements of q, k, v, each (1, 1, 2, 2), of the call that finds out a framework."""


class Usage(Exception):
    """The target cannot be used as it was asked for."""


class NoResult(Exception):
    """The implementation answered, but with something that is not a result."""


class Unfound(Exception):
    """Nothing told which framework's arrays a function takes; it has the error of each."""


class OtherCount(NoResult):
    """The implementation returned more or fewer results than it was asked for.

    It has their number: 0 if one was returned alone, and −1 for none in a tuple or list.
    """


class NotPossible(Exception):
    """A request for something that the framework does not have."""


# --- frames ---------------------------------------------------------------------------------------


class Tensor:
    """A dtype's short name, a shape, and the bytes of a contiguous array."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Any) -> None:
        self.dtype, self.shape, self.data = dtype, tuple(shape), data


encode, quote = json.JSONEncoder(allow_nan=False).encode, json.encoder.encode_basestring_ascii


def write_frame(
    write: Callable[[Any], Any], message: Any, tensors: dict[str, Tensor], shared: Any = None
) -> None:
    """Write a message and tensors as one frame: a length, and a file in the safetensors format.

    A large one lies in memory that is `shared`, if it has room; a length of 0 says so.
    """
    entries, end = [f'{{"__metadata__":{{"npattn":{quote(encode(message))}}}'], 0
    for name, tensor in tensors.items():
        begin, end = end, end + len(tensor.data)
        shape = ",".join(map(str, tensor.shape))
        entries.append(
            f'{quote(name)}:{{"dtype":"{tensor.dtype}","shape":[{shape}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
    text = ",".join(entries).encode() + b"}"
    text += b" " * (-len(text) % 8)
    head = struct.pack("<QQ", 8 + len(text) + end, len(text)) + text
    parts = [head, *(tensor.data for tensor in tensors.values())]
    if shared is not None and LARGE_BLOCK < end <= len(shared) - len(head):
        at = 0
        for part in parts:
            shared[at : at + len(part)] = part
            at += len(part)
        parts = [bytes(8)]
    for part in parts if end > BLOCK else [b"".join(parts)]:
        write(part)


def read_frame(
    receive: Callable[[int], bytes], rest: bytearray, shared: Any = None, largest: int = LARGEST
) -> Any:
    """Read one frame without its length; ValueError says how it is none.

    `receive` returns at most so many bytes, and one or more. In `rest` is what came behind the
    frame before. What lies in `shared` memory is copied: its writer may change it. Nothing is
    allocated for a frame of more than `largest` bytes.
    """
    while len(rest) < 8:
        rest += receive(BLOCK)
    length = int.from_bytes(rest[:8], "little")
    is_shared = shared is not None and length == 0
    if is_shared:
        length = int.from_bytes(shared[:8], "little")
        largest = min(largest, len(shared) - 8)
    if not 8 <= length <= largest:
        raise ValueError(f"a frame of {length} bytes")
    try:  # the system gives pages to what is written alone: the length may be a lie
        body = np.empty(length, np.uint8).data
    except MemoryError:
        raise ValueError(f"a frame of {length} bytes, for which there is no memory") from None
    if is_shared:
        del rest[:8]
        body[:] = shared[8 : 8 + length]
        return body
    begin = rest[8 : 8 + length]
    del rest[: 8 + length]
    got = len(begin)
    body[:got] = begin
    while got < length:
        part = receive(min(length - got, LARGE_BLOCK))
        body[got : got + len(part)] = part
        got += len(part)
    return body


def parse_frame(body: Any, header: int = LARGEST) -> tuple[Any, dict[str, Tensor]]:
    """Return the message and the tensors of a frame without its length.

    Its header, of which JSON makes many times as much memory, has at most so many bytes.
    """
    size = int.from_bytes(body[:8], "little")
    if size > min(header, len(body) - 8):
        raise ValueError(f"a header of {size} bytes in a frame of {len(body)}")
    entries = json.loads(str(body[8 : 8 + size], "utf-8"))
    if not isinstance(entries, dict):
        raise ValueError("a header that is no object")
    message = json.loads(entries.pop("__metadata__", {}).get("npattn", "null"))
    data, tensors = memoryview(body)[8 + size :], {}
    for name, entry in entries.items():
        dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
        begin, end = map(int, entry["data_offsets"])
        if min(shape, default=0) < 0:
            raise ValueError(f"a tensor of shape {shape}")
        needed = math.prod(shape) * SIZES[dtype]
        if not 0 <= begin <= end <= len(data) or end - begin != needed:
            raise ValueError(f"a tensor of {end - begin} bytes, of shape {shape}")
        tensors[name] = Tensor(dtype, shape, data[begin:end])
    return message, tensors


@functools.lru_cache(maxsize=64)
def short_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a dtype in a frame, None if it has none; NumPy takes long to name it."""
    return SHORT.get(dtype.name) if dtype.isnative else None


def contents(array: np.ndarray[Any, Any]) -> Any:
    """Return the bytes of a contiguous array; those of a large one are not copied."""
    if array.nbytes <= BLOCK:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data


# --- frameworks -----------------------------------------------------------------------------------


class NumPy:
    """Plain NumPy arrays; gradients come from an explicit backward."""

    name = "numpy"
    differentiates = compiles = sets_threads = False

    def __init__(self, device: str | None = None) -> None:
        if device is not None:
            raise Usage(f"device is {device!r}, must be None for NumPy arrays")

    def dtype(self, short: str) -> np.dtype[Any]:
        if short in ("BF16", "F8_E4M3", "F8_E5M2"):
            try:
                import ml_dtypes
            except ImportError:
                raise NotPossible(f"{NAMES[short]} needs ml_dtypes") from None
            return np.dtype(getattr(ml_dtypes, NAMES[short]))  # type: ignore[no-any-return]
        return np.dtype(NAMES[short])

    def view(self, tensor: Tensor, layout: dict[str, Any] | None, base: Any = None) -> Any:
        """Return a writable array of the bytes, or a view of them; `base` is shared by views."""
        dtype = self.dtype(tensor.dtype)
        if layout is None and base is None:  # its own, as those of a caller most often are
            return np.frombuffer(tensor.data, dtype).reshape(tensor.shape).copy()
        if base is None:
            base = np.frombuffer(bytearray(tensor.data), dtype)
        if layout is None:
            return base.reshape(tensor.shape)
        shape, strides = tuple(layout["shape"]), tuple(layout["strides"])
        array = np.ndarray(shape, dtype, base, layout["offset"], strides)
        array.flags.writeable = not layout.get("read_only")
        return array

    def base(self, tensor: Tensor) -> Any:
        return np.frombuffer(bytearray(tensor.data), self.dtype(tensor.dtype))

    def check(self, value: Any) -> np.ndarray[Any, Any]:
        """Return a result in C order; raise NoResult if it is no plain array of numbers."""
        if not isinstance(value, (np.ndarray, np.generic)):
            raise NoResult(
                f"returned {type(value).__module__}.{type(value).__qualname__}, "
                "must be a NumPy array (or name framework=)"
            )
        if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
            raise NoResult(
                f"returned {type(value).__module__}.{type(value).__qualname__}, a subclass of "
                "numpy.ndarray, must be a plain array (np.asarray(o))"
            )
        if value.dtype.hasobject or value.dtype.kind in "SUMm":
            raise NoResult(f"returned an array of dtype {value.dtype}, must hold numbers")
        return np.ascontiguousarray(value).reshape(value.shape)

    def read(self, value: Any) -> Tensor:
        array = self.check(value)
        short = short_name(array.dtype)
        if short is None:  # longdouble, or bytes in another order
            raise NoResult(f"returned an array of dtype {array.dtype}")
        return Tensor(short, array.shape, contents(array))

    def write(self, array: Any, tensor: Tensor) -> None:
        array[...] = np.frombuffer(bytearray(tensor.data), self.dtype(tensor.dtype)).reshape(
            tensor.shape
        )

    def memory(self, value: Any) -> Any:
        """Return a NumPy array on the memory of a result, None where NumPy cannot read it."""
        return value if isinstance(value, np.ndarray) else None

    def threads(self, count: int | None) -> Any:
        return contextlib.nullcontext()

    def allowing(self, dtype: str | None) -> Any:
        return contextlib.nullcontext()

    def finish(self) -> None:
        pass

    def device_works(self) -> bool:
        """Return True if the device still computes; an access out of bounds ends that."""
        return True

    def gradients(self, *_: Any) -> Any:
        raise NotPossible("a NumPy function is differentiated by its backward=")

    def gradients_twice(self, *_: Any) -> Any:
        raise NotPossible("a NumPy function is differentiated by its backward=, once")


class Torch(NumPy):
    """Tensors of torch on a device; gradients by autograd."""

    name = "torch"
    differentiates = sets_threads = True

    def __init__(self, device: str | None = None) -> None:
        import torch

        self.torch, self.device = torch, device or "cpu"
        self.plain = (torch.Tensor, torch.nn.Parameter)
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as err:
            reason = str(err).splitlines()[0]
            raise Usage(f"device is {device!r}, which torch cannot use here: {reason}") from None
        self.short = {getattr(torch, n): s for s, n in NAMES.items() if hasattr(torch, n)}
        self.long = {short: dtype for dtype, short in self.short.items()}

    def base(self, tensor: Tensor) -> Any:
        if tensor.dtype not in self.long:
            raise NotPossible(f"torch has no dtype {NAMES[tensor.dtype]}")
        if not len(tensor.data):
            return self.torch.empty(0, dtype=self.long[tensor.dtype], device=self.device)
        flat = self.torch.frombuffer(bytearray(tensor.data), dtype=self.long[tensor.dtype])
        return flat.to(self.device)

    def view(self, tensor: Tensor, layout: dict[str, Any] | None, base: Any = None) -> Any:
        base = self.base(tensor) if base is None else base
        if layout is None:
            return base.reshape(tensor.shape)
        if any(n < 0 for n in layout["strides"]):
            raise NotPossible("torch tensors have no negative strides")
        size = SIZES[tensor.dtype]
        strides = [n // size for n in layout["strides"]]
        return base.as_strided(layout["shape"], strides, layout["offset"] // size)

    def check(self, value: Any) -> Any:
        """Return a result detached, on the CPU; raise NoResult if it is no plain, dense tensor."""
        if not isinstance(value, self.torch.Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise NoResult(f"returned {kind}, must be a torch tensor (or framework=)")
        if type(value) not in self.plain:  # one may compute when it is read
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise NoResult(f"returned {kind}, a subclass of torch.Tensor, must be a plain tensor")
        if value.is_nested or value.layout != self.torch.strided:
            kind = "a nested tensor" if value.is_nested else f"a tensor of {value.layout}"
            raise NoResult(f"returned {kind}, must be a dense one")
        if value.dtype not in self.short:
            raise NoResult(f"returned a tensor of {value.dtype}")
        # An instance may have a detach of its own.
        return self.torch.Tensor.detach(value).cpu().resolve_conj().resolve_neg().contiguous()

    def read(self, value: Any) -> Tensor:
        tensor = self.check(value)
        # An axis of size 1 may have any stride, that of a flat one too.
        flat = tensor.as_strided((tensor.numel(),), (1,))
        data = contents(flat.view(self.torch.uint8).numpy()) if tensor.numel() else b""
        return Tensor(self.short[tensor.dtype], tuple(tensor.shape), data)

    def write(self, array: Any, tensor: Tensor) -> None:
        with self.torch.no_grad():
            array.copy_(self.view(tensor, None))

    def memory(self, value: Any) -> Any:
        if not isinstance(value, self.torch.Tensor) or value.device.type != "cpu":
            return None
        value, short = self.torch.Tensor.detach(value), self.short.get(value.dtype)
        if short is None or value.layout != self.torch.strided or value.is_conj() or value.is_neg():
            return None
        bits = {"BF16": self.torch.int16, "F8_E4M3": self.torch.int8, "F8_E5M2": self.torch.int8}
        return value.view(bits.get(short, value.dtype)).numpy()

    def add_mask(self, mask: Any, q: Any) -> Any:
        zeros = self.torch.zeros_like(mask, dtype=q.dtype)
        return zeros.masked_fill(~mask, self.torch.finfo(q.dtype).min)

    def hide(self, bias: Any, mask: Any) -> Any:
        return self.torch.where(mask, bias, -self.torch.inf)

    @contextlib.contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        before = self.torch.get_num_threads()
        if count in (None, before):
            yield
            return
        self.torch.set_num_threads(count)
        try:
            yield
        finally:
            self.torch.set_num_threads(before)

    def finish(self) -> None:
        if self.torch.device(self.device).type != "cpu":
            self.torch.accelerator.synchronize(self.device)

    def device_works(self) -> bool:
        try:
            return float(self.torch.ones(1, device=self.device).sum()) == 1
        except RuntimeError:  # after an access to a wrong address every call fails
            return False

    def gradients(
        self, call: Any, leaves: dict[str, Any], cotangents: dict[Any, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the results of a call of leaves, and their gradients."""
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        results = call(leaves)
        reached = [n for n in cotangents if results[n].requires_grad]
        if not reached and any(results[n].numel() for n in cotangents):
            raise NotPossible("its result does not require grad: autograd cannot reach it")
        grads: Any = [None] * len(leaves)
        if reached:
            outputs, douts = [results[n] for n in reached], [cotangents[n] for n in reached]
            inputs = list(leaves.values())
            grads = self.torch.autograd.grad(outputs, inputs, douts, allow_unused=True)
        zeros = self.torch.zeros_like  # autograd returns None for zero
        return results, {n: zeros(leaves[n]) if g is None else g for n, g in zip(leaves, grads)}

    def gradients_twice(
        self, call: Any, leaves: dict[str, Any], cotangents: dict[Any, Any], second: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the gradients of Σ second · gradient by leaf and cotangent; 0 where none comes."""
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        tracked = {n: x.detach().requires_grad_() for n, x in cotangents.items()}
        results, grad = call(leaves), self.torch.autograd.grad
        reached = {n: x for n, x in tracked.items() if results[n].requires_grad}
        if not reached:
            raise NotImplementedError("its result does not require grad: autograd cannot reach it")
        outputs, douts = [results[n] for n in reached], list(reached.values())
        tensors = list(leaves.values())
        first = grad(outputs, tensors, douts, create_graph=True, allow_unused=True)
        pairs = [(g, second[n]) for n, g in zip(leaves, first) if g is not None]
        recorded = [(g, x) for g, x in pairs if g.requires_grad]
        if not recorded:
            text = "its gradients do not require grad: autograd cannot reach them"
            raise NotImplementedError(text)
        if self.is_differentiable_once([g for g, _ in recorded]):
            raise NotImplementedError("its backward is marked once_differentiable")
        inputs = {**leaves, **{f"cotangent {n}": x for n, x in tracked.items()}}
        wanted, sums, directions = list(inputs.values()), *zip(*recorded)
        twice = grad(sums, wanted, directions, allow_unused=True)
        zeros = self.torch.zeros_like
        return {n: zeros(x) if g is None else g for (n, x), g in zip(inputs.items(), twice)}

    def is_differentiable_once(self, gradients: list[Any]) -> bool:
        """Return True if a backward is marked so: no path from it leads to inputs."""
        nodes = [x.grad_fn for x in gradients]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if node is None:
                continue
            if node.name() == "torch::autograd::Error":
                return True
            behind = {other for other, _ in node.next_functions} - seen
            seen |= behind
            nodes += behind
        return False


def count_maps() -> int:
    """Return the number of memory maps of this process; 0 without /proc, as on macOS.

    Each program that XLA compiles for a CPU takes about 30. XLA aborts when none is left.
    """
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def most_maps() -> int:
    """Return the most memory maps that Linux allows a process, by default 65 530."""
    most = Path("/proc/sys/vm/max_map_count")
    return int(most.read_text()) if most.exists() else 65_530


class JAX(NumPy):
    """JAX arrays on a device; gradients by jax.vjp."""

    CALLS = 64
    """Calls between two counts of the memory maps. A call compiles a few programs at most."""

    name = "jax"
    differentiates = compiles = True

    def __init__(self, device: str | None = None) -> None:
        import jax  # type: ignore[import-not-found, unused-ignore]
        import jax.numpy as jnp  # type: ignore[import-not-found, unused-ignore]

        self.jax, self.jnp = jax, jnp
        self.calls = 0
        platform, _, number = (device or "").partition(":")
        try:
            self.device = jax.devices(platform or None)[int(number or 0)]
        except (RuntimeError, IndexError, ValueError) as err:
            reason = str(err).splitlines()[0]
            raise Usage(f"device is {device!r}, which JAX cannot use here: {reason}") from None

    def allowing(self, dtype: str | None) -> Any:
        """Enable float64 for float64 alone: with it, JAX makes float64 of Python numbers."""
        self.clear_programs()
        return self.jax.enable_x64(True) if dtype == "F64" else contextlib.nullcontext()

    def clear_programs(self) -> None:
        """Clear compiled programs every `CALLS` calls if they take half of the memory maps."""
        self.calls += 1
        if self.calls % self.CALLS == 0 and count_maps() > most_maps() // 2:
            self.jax.clear_caches()

    def view(self, tensor: Tensor, layout: dict[str, Any] | None, base: Any = None) -> Any:
        array = super().view(tensor, layout, base)
        if not array.flags.c_contiguous:
            raise NotPossible("JAX arrays have no strides")
        # The array is nobody else's: device_put may share it, and compiles nothing.
        converted = self.jax.device_put(array, self.device)
        if converted.dtype != array.dtype:
            raise NotPossible(f"JAX converted {array.dtype} to {converted.dtype}")
        return converted

    def check(self, value: Any) -> Any:
        if not isinstance(value, self.jax.Array):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise NoResult(f"returned {kind}, must be a JAX array (or framework=)")
        if value.is_deleted():
            raise NotPossible("the buffer of an array was donated (donate_argnums)")
        return np.ascontiguousarray(value).reshape(value.shape)

    def memory(self, value: Any) -> Any:
        return None  # nobody can write to it

    def write(self, array: Any, tensor: Tensor) -> None:
        raise TypeError("JAX arrays are immutable")

    def add_mask(self, mask: Any, q: Any) -> Any:
        return self.jnp.where(mask, 0, self.jnp.finfo(q.dtype).min).astype(q.dtype)

    def hide(self, bias: Any, mask: Any) -> Any:
        return self.jnp.where(mask, bias, -self.jnp.inf)

    def gradients(
        self, call: Any, leaves: dict[str, Any], cotangents: dict[Any, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the results of a call of leaves, and their gradients, from one vjp."""
        names = list(leaves)

        def run(*values: Any) -> Any:
            results = call(dict(zip(names, values)))
            return {n: results[n] for n in cotangents}, results

        outputs, pull, results = self.jax.vjp(run, *leaves.values(), has_aux=True)
        # A cotangent must have the dtype of its result.
        douts = {n: x.astype(outputs[n].dtype) for n, x in cotangents.items()}
        return results, dict(zip(names, pull(douts)))

    def gradients_twice(
        self, call: Any, leaves: dict[str, Any], cotangents: dict[Any, Any], second: dict[str, Any]
    ) -> dict[str, Any]:
        """Return gradients of Σ second · gradient by leaf and cotangent, by a vjp of the vjp."""

        def first(arrays: Any, douts: Any) -> Any:
            def run(arrays: Any) -> Any:
                results = call(arrays)
                return {n: results[n] for n in douts}

            outputs, pull = self.jax.vjp(run, arrays)
            return dict(pull({n: x.astype(outputs[n].dtype) for n, x in douts.items()})[0])

        _, pull = self.jax.vjp(first, dict(leaves), dict(cotangents))
        inputs, douts = pull(dict(second))
        return {**inputs, **{f"cotangent {n}": x for n, x in douts.items()}}


CLASSES = {"numpy": NumPy, "torch": Torch, "jax": JAX}


def choose_framework(
    f: Any, wanted: str, device: str | None, tries: bool = True
) -> tuple[NumPy, dict[str, Tensor]]:
    """Return the framework named, or for "auto" the one whose arrays `f` takes, and what it tried.

    That is the result of a tiny call as "tried", where nothing else told; without `tries` it makes
    none. Raises Unfound where that call and the imports of its module do not tell either.
    """
    if wanted != "auto":
        return make_framework(wanted, device), {}
    home = (getattr(f, "__module__", None) or "").split(".")[0]
    if home in FRAMEWORKS:
        return make_framework(home, device), {}
    annotations = " ".join(str(p.annotation) for p in parameters(f).values())
    for name, word in WORDS.items():
        if re.search(word, annotations):
            return make_framework(name, device), {}
    errors = {}
    for name in FRAMEWORKS if tries else ():
        if name == "numpy" or name in sys.modules:
            framework = make_framework(name, None)
            data = (np.array(x, np.float32).tobytes() for x in TINY)
            arrays = [framework.view(Tensor("F32", (1, 1, 2, 2), x), None) for x in data]
            try:
                result = framework.read(f(*arrays))
            except (Exception, SystemExit) as err:  # noqa: BLE001  it only asks if it can be called
                errors[name] = format_exception_line(err)
            else:
                framework = make_framework(name, device) if device else framework
                return framework, {"tried": result}
    # It may take other sizes only: choose by the imports of its module.
    around = [x for x in getattr(f, "__globals__", {}).values() if isinstance(x, ModuleType)]
    modules = {module.__name__.split(".")[0] for module in around}
    for name in WORDS:
        if name in modules:
            return make_framework(name, device), {}
    if tries:
        raise Unfound(errors)
    return make_framework("numpy", device), {}


def make_framework(name: str, device: str | None) -> NumPy:
    try:
        return CLASSES[name](device)
    except ImportError as err:
        raise Usage(f"{name} cannot be imported by the worker: {format_line(err)}") from None


# --- the target -----------------------------------------------------------------------------------


INSTANCE = "give an instance a name in the module, and pass that name"


def load(spec: str) -> Any:
    """Import the function that a spec names: module:name or path/file.py:name, also dotted."""
    module, holder, value = find(spec)
    if isinstance(value, type):
        refuse_class(value, spec)
    named = getattr(getattr(value, "__code__", None), "co_varnames", ())
    if isinstance(holder, type) and named[:1] == ("self",):
        raise Usage(f"{spec} is a method of a class, must be a function: {INSTANCE}")
    if not callable(value) and not is_wrapped(value):
        home, _, name = spec.rpartition(":")
        public = [n for n, x in vars(module).items() if callable(x) and n[0] != "_"]
        raise Usage(f"{home} has no callable {name!r}, it has {', '.join(public[:20])}")
    return value


def find(spec: str) -> tuple[ModuleType, Any, Any]:
    """Import what a spec names; return its module, what holds it, and it, None if there is none."""
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not name:
        raise Usage(f"{spec!r} must be module:function or path/file.py:function")
    module = import_file(home) if home.endswith(".py") else import_module(home)
    holder: Any = None
    value: Any = module
    for part in name.split("."):
        holder, value = value, getattr(value, part, None)
    return module, holder, value


def refuse_class(value: type, name: str, instance: str = INSTANCE) -> None:
    """Raise the error that says what to pass in place of a class."""
    if any(f"{k.__module__}.{k.__name__}" == AUTOGRAD for k in value.__mro__):
        raise Usage(f"{name} is a torch.autograd.Function, must be a function: pass {name}.apply")
    raise Usage(f"{name} is a class, must be a function: {instance}")


def hash_files(*specs: str | None) -> str:
    """Return a hash of the files that specs name and that are loaded; "" if there are none."""
    homes = [spec.rpartition(":")[0] for spec in specs if spec]
    paths = [x if x.endswith(".py") else getattr(sys.modules.get(x), "__file__", x) for x in homes]
    files = [Path(path) for path in paths if path and Path(path).is_file()]
    contents = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(contents).hexdigest() if files else ""


def list_own_files() -> list[str]:
    """Return the files of loaded modules that belong to no library: the user's own."""
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    absolute = {str(Path(path).absolute()) for path in loaded if isinstance(path, str)}
    package = str(Path(__file__).absolute().parents[2])  # npattn, or nothing of it
    return sorted(x for x in absolute if not x.startswith((*LIBRARIES, package)) and x != __file__)


def import_module(home: str) -> ModuleType:
    """Import a module by name; exceptions that it raises itself pass through."""
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as err:
        if err.name is None or not home.startswith(err.name):
            raise
        raise Usage(f"there is no module {home!r} [in {Path.cwd()} and sys.path]") from None


def import_file(home: str) -> ModuleType:
    """Import a file under a name that no other module has, with its neighbours on the path."""
    path = Path(home).resolve()
    if not path.is_file():
        raise Usage(f"there is no file {home!r} [in {Path.cwd()}]")
    for name, loaded in list(sys.modules.items()):
        file = vars(loaded).get("__file__") if isinstance(loaded, ModuleType) else None
        if file == str(path) and name != "__main__":
            return loaded
    taken = path.stem in sys.modules or is_installed(path.stem, path.parent)
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:  # last if it would hide an installed module
        hides = any(is_installed(x.stem, path.parent) for x in path.parent.glob("*.py"))
        sys.path.insert(len(sys.path) if hides else 0, str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as unless_loaded:
        unless_loaded.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        unless_loaded.pop_all()
    return module


def is_installed(name: str, folder: Path) -> bool:
    """Return True if a module of this name is found outside `folder`."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    found = importlib.machinery.PathFinder.find_spec(name, elsewhere)
    standard = getattr(sys, "stdlib_module_names", sys.builtin_module_names)  # 3.9 has no list
    return name in standard or (found is not None and found.origin is not None)


def as_json(value: Any) -> Any:
    """Return a value as JSON has it, which has no number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": repr(value)}
    return value


def is_wrapped(value: Any) -> bool:
    """Return True for an `Implementation` of npattn, which names a function and how to call it."""
    kind = type(value)
    return kind.__name__ == "Implementation" and kind.__module__.startswith("npattn.")


def parameters(f: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a callable; none if they cannot be read, or if it is None.

    Those of a torch module are the ones of its `forward`: its `__call__` names none.
    """
    if f is None:
        return {}
    try:
        named = dict(inspect.signature(f).parameters)
    except (ValueError, TypeError):
        return documented_parameters(f)
    forward = getattr(f, "forward", None)
    if callable(forward) and all(p.kind in STARRED for p in named.values()):
        return parameters(forward)
    return named


def documented_parameters(f: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters that the docstring of a built-in opens with."""
    name, text = getattr(f, "__name__", None), getattr(f, "__doc__", None) or ""
    line = re.match(r"\s*(\w+)(\([^()]*\))", text)
    if not inspect.isbuiltin(f) or line is None or line[1] != name:
        return {}
    try:
        (function,) = ast.parse(f"def f{line[2]}: pass").body
    except SyntaxError:
        return {}
    assert isinstance(function, ast.FunctionDef)
    arguments, empty = function.args, inspect.Parameter.empty
    missing: list[Any] = [empty] * (len(arguments.args) - len(arguments.defaults))
    either, keyword = itertools.repeat("POSITIONAL_OR_KEYWORD"), itertools.repeat("KEYWORD_ONLY")
    named = [
        *zip(arguments.args, [*missing, *arguments.defaults], either),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, keyword),
    ]
    found = {}
    for argument, default, kind in named:
        value = empty if default in (None, empty) else _value_of(default)
        found[argument.arg] = inspect.Parameter(
            argument.arg, getattr(inspect.Parameter, kind), default=value
        )
    return found


def _value_of(node: Any) -> Any:
    """Return the value of a literal, or the text of another expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def qualified_name(f: Any) -> str:
    """Return the qualified name of a callable, or of its class."""
    return getattr(f, "__qualname__", None) or type(f).__qualname__


def describe_parameters(f: Any) -> list[list[Any]]:
    """Return name, kind, default and annotation of each parameter; a default is in a list."""
    described = []
    for p in parameters(f).values():
        default: list[Any] = [] if p.default is p.empty else [p.default]
        if default and type(default[0]) in (tuple, list) and set(map(type, default[0])) <= {int}:
            default = [list(default[0])]
        elif default and not (default[0] is None or type(default[0]) in (bool, int, float, str)):
            default = ["..."]
        if default and isinstance(default[0], float) and not np.isfinite(default[0]):
            default = [str(default[0])]
        annotation = "" if p.annotation is p.empty else str(p.annotation)
        described.append([p.name, KINDS[p.kind], default, annotation])
    return described


# --- requests -------------------------------------------------------------------------------------

MODS: dict[str, Callable[..., Any]] = {
    "distance": lambda s, b, h, t, i: s - 0.125 * (h + 1) * (t - i),
    "squash": lambda s, b, h, t, i: s / (1 + 0.0625 * s * s),
}
"""Formulas that a `score_mod` may name."""


ABILITIES = ("views", "objects", "hold", "forms", "channels", "calls", "twice", "counts")
"""Requests beyond the plain ones that are answered."""


class Session:
    """One implementation, with the arrays and results that the judge asked to keep."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.f: Any = None
        self.backward: Any = None
        self.framework: Any = None
        self.shared: Any = None
        self.objects: dict[str, Any] = {}
        self.held: dict[str, tuple[dict[str, Any], Any, str]] = {}

    def answer(
        self, message: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Answer one request."""
        for key in message.get("drop", ()):
            for table in (self.objects, self.held):
                table.pop(key, None)
        do = message["do"]
        if do == "describe":
            return self.describe(message, tensors)
        if do == "drop":
            return {}, {}
        threads = self.framework.threads(message.get("threads"))
        with threads, self.framework.allowing(message.get("dtype")):
            for key, name in message.get("write", {}).items():
                self.framework.write(self.objects[key], tensors[name])
            if do == "read":
                return self.read(message)
            with np.errstate(**ERRORS):
                reply, out = self.ask(message, tensors)
                return ({**reply, "error_state": True} if np.geterr() != ERRORS else reply), out

    def load_target(
        self, message: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[str, dict[str, Any]]:
        """Load the functions; return the framework and the settings that come with them."""
        backward = message.get("backward")
        if "pickled" in tensors:  # from the judge, never to it
            import pickle

            target, self.backward = pickle.loads(bytes(tensors["pickled"].data))
        else:
            target = load(self.spec)
            self.backward = load(backward) if backward else None
        framework, settings = message.get("framework", "auto"), {}
        if is_wrapped(target):
            settings = {
                "rename": dict(target.rename),
                "layout": target.layout,
                "features": target.told_features,
                "conventions": {n: as_json(x) for n, x in vars(target.conventions).items()},
                "like": target.profile.name if target.profile else None,
            }
            if target.quantized is not None:
                settings |= {"quantized": target.quantized.dtype, "rows": target.quantized.rows}
            framework, self.backward, target = target.framework.name, target.backward, target.f
        self.f = target
        return framework, settings

    def describe(
        self, message: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Load the target, and say how it is called."""
        framework, settings = self.load_target(message, tensors)
        target, backward = self.f, message.get("backward")
        tries, unfound = not message.get("untried"), {}
        try:
            self.framework, tried = choose_framework(
                target, framework, message.get("device"), tries
            )
        except Unfound as err:  # the judge knows what else to pass, and asks again
            self.framework, tried = NumPy(), {}
            unfound = {"unfound": err.args[0]}
        loaded = read_versions((*message.get("packages", ()), "torch", "jax"))
        description: dict[str, Any] = {
            "version": VERSION,
            "name": qualified_name(target),
            "framework": self.framework.name,
            "tried": framework == "auto" and tries,
            "gradients": "backward"
            if self.backward
            else ("autograd" if self.framework.differentiates else None),
            "compiles": self.framework.compiles,
            "threads": self.framework.sets_threads,
            "abilities": list(ABILITIES),
            "parameters": describe_parameters(target),
            "backward": describe_parameters(self.backward) if self.backward else None,
            "settings": settings,
            "source": hash_files(self.spec, backward),
            "files": list_own_files(),
            "error_state": np.geterr() != ERRORS,
            "shared": self.share(message.get("shared")),
            "versions": {"numpy": np.__version__, "python": platform.python_version(), **loaded},
            **unfound,
        }
        return description, tried

    def share(self, offered: Any) -> bool:
        """Map the memory that the judge offers, if it is the same here; return True if it is."""
        if offered is None:
            return False
        try:
            memory = memoryview(mmap.mmap(offered["descriptor"], offered["bytes"]))
        except (OSError, ValueError):  # on another machine it is some other file
            return False
        if bytes(memory[:TOKEN]).hex() == offered["begins"]:
            self.shared = memory
        return self.shared is not None

    # --- arguments ---

    def arrays(self, message: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the arrays of a request by name, made or kept."""
        found: dict[str, Any] = {}
        bases: dict[str, Any] = {}
        for name, entry in message.get("arrays", {}).items():
            key = entry.get("object")
            if key in self.objects:
                found[name] = self.objects[key]
                continue
            buffer = entry["tensor"]
            layout = entry if "shape" in entry else None
            if layout and buffer not in bases:
                bases[buffer] = self.framework.base(tensors[buffer])
            found[name] = self.framework.view(tensors[buffer], layout, bases.get(buffer))
            if key is not None:
                self.objects[key] = found[name]
        return found

    def value(self, entry: Any, arrays: dict[str, Any], results: Any = None) -> Any:
        """Return the value of an argument."""
        if isinstance(entry, list):
            return tuple(self.value(x, arrays) for x in entry)
        if not isinstance(entry, dict):
            return entry
        (kind, content), *_ = entry.items()
        if kind == "array":
            return arrays[content]
        if kind == "result":
            return pick(results, content)
        if kind == "hide":
            bias, mask = (self.value(x, arrays) for x in content)
            return self.framework.hide(bias, mask)
        if kind == "add_mask":
            mask, q, *bias = (self.value(x, arrays) for x in content)
            added = self.framework.add_mask(mask, q)
            return added + bias[0] if bias else added
        if kind == "reshape":
            array, shape = (self.value(x, arrays) for x in content)
            return array.reshape(shape)
        if kind == "number":
            return float(content)
        if kind == "score_mod":
            return MODS[content]
        if kind == "module":
            return SimpleNamespace(**content)
        raise ValueError(f"an argument of kind {kind!r}")

    def call(
        self, f: Any, call: dict[str, Any], arrays: dict[str, Any], results: Any = None
    ) -> Any:
        positional = [self.value(x, arrays, results) for x in call["positional"]]
        keywords = {n: self.value(x, arrays, results) for n, x in call["keywords"].items()}
        return f(*positional, **keywords)

    # --- requests ---

    def ask(
        self, message: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Answer a request for calls, or for gradients."""
        kept, results, _ = self.held[message["of"]] if "of" in message else ({}, None, "")
        arrays = {**kept, **self.arrays(message, tensors)}
        before = self.contents(message, arrays)
        value = self.compute(message, arrays, results)
        if message.get("overwrite"):
            return value, {}
        return self.reply(message, arrays, value, before)

    def compute(self, message: dict[str, Any], arrays: dict[str, Any], results: Any = None) -> Any:
        """Return what the function returns, or its gradients; `results` are of a call before."""
        do, has_backward = message["do"], message.get("backward") is not None
        if do not in ("forward", "gradients"):
            raise KeyError(do)
        if "of" not in message and (has_backward or do == "forward"):
            with during("forward"):
                calls = message.get("calls") or [message["call"]]
                values = [self.call(self.f, call, arrays) for call in calls]
                check_count(values[0], message)
                results = values if "calls" in message else values[0]
        value: Any = ()
        if has_backward:
            with during("backward"):
                value = self.call(self.backward, message["backward"], arrays, results)
        elif do == "gradients":
            with during("gradient"):
                results, value = self.autograd(message, arrays)
        self.framework.finish()
        if message.get("overwrite"):
            return self.overwrite(arrays, results, value)
        if message.get("everything"):
            return results, value
        return results if do == "forward" else value

    def overwrite(self, arrays: dict[str, Any], results: Any, gradients: Any) -> dict[str, Any]:
        """Write to results as their owner may; if some share memory, name them instead."""
        owned = {("result", n): x for n, x in items(results)}
        owned.update({("gradient", n): x for n, x in items(gradients)})
        memory = {n: self.framework.memory(x) for n, x in owned.items() if x is not None}
        others = {("input", n): self.framework.memory(x) for n, x in arrays.items()}
        named = [(n, x) for n, x in memory.items() if x is not None]
        inputs = [(n, x) for n, x in others.items() if x is not None]
        pairs = [*itertools.combinations(named, 2), *itertools.product(named, inputs)]
        overlaps = [[x[0], y[0]] for x, y in pairs if np.shares_memory(x[1], y[1])]
        for _, array in named if not overlaps else ():
            if array.flags.writeable:
                array[...] = 0 if array.dtype.kind in "biu" else np.nan
        return {"overlaps": overlaps}

    def autograd(self, message: dict[str, Any], arrays: dict[str, Any]) -> tuple[Any, Any]:
        """Return results of the forward by their places, and gradients by name."""
        wanted = [int(n) for n in message["cotangents"]]

        def run(leaves: dict[str, Any]) -> dict[int, Any]:
            inputs = {**arrays, **leaves}
            if message.get("slices"):  # no leaves, but results of an operation on them
                leading = {x.get("array") for x in message["call"]["positional"]}
                inputs = {n: x[...] if n in leading else x for n, x in inputs.items()}
            with during("forward"):
                value = self.call(self.f, message["call"], inputs)
                check_count(value, message)
            return {n: pick(value, n) for n in wanted}

        cotangents = {int(n): self.value(x, arrays) for n, x in message["cotangents"].items()}
        leaves = {name: arrays[name] for name in message["leaves"]}
        if "second" in message:
            second = {n: self.value(x, arrays) for n, x in message["second"].items()}
            return None, self.framework.gradients_twice(run, leaves, cotangents, second)
        found: tuple[Any, Any] = self.framework.gradients(run, leaves, cotangents)
        return found

    def contents(self, message: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Tensor]:
        """Return the contents of the kept arrays of a call."""
        entries = message.get("arrays", {}).items()
        kept = {entry["object"]: arrays[n] for n, entry in entries if "object" in entry}
        read = {key: self.framework.read(x) for key, x in kept.items()}
        return {key: Tensor(x.dtype, x.shape, bytes(x.data)) for key, x in read.items()}

    def reply(
        self, message: dict[str, Any], arrays: dict[str, Any], value: Any, before: dict[str, Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the results and what the call has changed, or keep the results."""
        out: dict[str, Tensor] = {}
        changed, do = {}, message["do"]
        for key, old in before.items():
            new = self.framework.read(self.objects[key])
            if bytes(new.data) != bytes(old.data):
                changed[key] = f"changed {key}"
                out[f"changed {key}"] = new
        if "hold" in message:
            self.held[message["hold"]] = (arrays, value, do)
            return {"value": self.structure(do, value), "changed": changed}, out
        if "calls" in message:
            packed = [self.pack(do, x, f"call {n}, ") for n, x in enumerate(value)]
            for _, tensors in packed:
                out.update(tensors)
            return {"values": [entry for entry, _ in packed], "changed": changed}, out
        entry, tensors = self.pack(do, value)
        return {"value": entry, "changed": changed}, {**out, **tensors}

    def read(self, message: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        _, value, do = self.held[message["of"]]
        if not message.get("again"):
            del self.held[message["of"]]
        entry, tensors = self.pack(do, value)
        return {"value": entry}, tensors

    def end_without_device(self, err: BaseException) -> None:
        """End the process if its device is lost: the judge starts another, which has it again."""
        if self.framework is not None and not self.framework.device_works():
            reason = (message_of(err).splitlines() or [""])[0]
            print(
                f"the device is lost: {type(err).__name__}: {reason}", file=sys.stderr, flush=True
            )
            os._exit(1)

    def structure(self, do: str, value: Any) -> Any:
        """Return the structure of a value, without contents."""
        if isinstance(value, (tuple, list)):
            return {"tuple": [None] * len(value)}
        is_mapping = isinstance(value, dict) and do == "gradients"
        return {"mapping": dict.fromkeys(map(str, value))} if is_mapping else None

    def pack(self, do: str, value: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
        """Return the structure of a value and its tensors; what is none is said in words.

        A mapping is of gradients, where None leaves one out; among results it is no array.
        """
        tensors: dict[str, Tensor] = {}

        def pack_item(place: str, item: Any) -> Any:
            name = prefix + place
            try:
                tensors[name] = self.framework.read(item)
            except NoResult as err:
                return {"no result": str(err)}
            except NotPossible as err:
                return {"unreadable": str(err)}
            except Exception as err:  # noqa: BLE001  arrays of foreign code may raise anything
                self.end_without_device(err)
                return {"raised": describe_error(err)}
            return {"tensor": name}

        if isinstance(value, (tuple, list)):
            return {"tuple": [pack_item(str(n), x) for n, x in enumerate(value)]}, tensors
        if isinstance(value, dict) and do == "gradients":
            pairs = ((str(n), x) for n, x in value.items())
            packed = {n: None if x is None else pack_item(n, x) for n, x in pairs}
            return {"mapping": packed}, tensors
        return pack_item("0", value), tensors


def items(value: Any) -> list[tuple[Any, Any]]:
    """Return one or several results with their places."""
    if isinstance(value, dict):
        return [(str(n), x) for n, x in value.items()]
    return list(enumerate(value)) if isinstance(value, (tuple, list)) else [(0, value)]


def check_count(value: Any, message: dict[str, Any]) -> None:
    """Raise OtherCount if a call returned another number of results than its request allows.

    The request has the numbers as `OtherCount` counts; None behind one allows more.
    """
    allowed, several = message.get("results"), isinstance(value, (tuple, list))
    count = (len(value) or -1) if several else 0
    if allowed and count not in allowed and not (allowed[-1] is None and count > allowed[0]):
        raise OtherCount(count)


def pick(value: Any, index: int) -> Any:
    """Return one of several results, None if there are fewer."""
    if isinstance(value, (tuple, list)):
        return value[index] if index < len(value) else None
    return value if index == 0 else None


# --- errors ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Note in which phase the implementation raised."""
    try:
        yield
    except (NoResult, NotPossible):
        raise
    except BaseException as err:
        with contextlib.suppress(Exception):
            if not hasattr(err, "npattn_phase"):  # of the innermost
                err.npattn_phase = phase  # type: ignore[attr-defined]
        raise


def message_of(err: BaseException) -> str:
    """Return the message of an exception, which may raise itself.

    That of an import that failed has what failed in it, at the end.
    """
    try:
        cause = err.__cause__ if isinstance(err, ImportError) else None
        return f"{err} ({cause})" if isinstance(cause, ImportError) else str(err)
    except BaseException as second:  # noqa: BLE001  a message of foreign code
        return f"(its message raised {type(second).__name__})"


def read_versions(modules: Iterable[str]) -> dict[str, str]:
    """Return the versions of those modules that are imported, where they or pip know them."""
    from importlib import metadata  # slow to load

    versions = {}
    for name in modules:
        if name in sys.modules:
            with contextlib.suppress(metadata.PackageNotFoundError):
                version = getattr(sys.modules[name], "__version__", None)
                versions[name] = str(version or metadata.version(name))
    return versions


def format_line(err: BaseException) -> str:
    """Format an exception as one line."""
    text = " ".join(message_of(err).split())
    return f"{type(err).__name__}: {text[:200]}" if text else type(err).__name__


def format_exception_line(err: BaseException) -> str:
    """Format an exception as one line of at most 200 characters of message, and its place.

    Who refuses says why; of anything else one wants to know where.
    """
    place = getattr(err, "place", "") or place_of(err)
    shown = place and not isinstance(err, NotImplementedError)
    line, text = getattr(err, "refuses", "") or refusing_line(err), format_line(err)
    if line.startswith("assert") and text == type(err).__name__:  # it says what it asks
        text = f"{text}: {line}"
    return f"{text} ({place})" if shown else text


def place_of(err: BaseException) -> str:
    """Return file:line of the last call in code of the user's own; "" if there is none."""
    frame = _own_frame(err)
    if frame is None:
        return ""
    return f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"


def _own_frame(err: BaseException) -> TracebackType | None:
    """Return the last entry of the traceback that is in code of the user's own."""
    innermost, trace = None, err.__traceback__
    while trace is not None:
        file, module = trace.tb_frame.f_code.co_filename, trace.tb_frame.f_globals.get("__name__")
        foreign = file.startswith(("<", *LIBRARIES)) or file == __file__
        if not foreign and str(module).partition(".")[0] != "npattn":
            innermost = trace
        trace = trace.tb_next
    return innermost


def refusing_line(err: BaseException) -> str:
    """Return the line of the user's code that raises or asserts; "" if it came about otherwise.

    Then the innermost call is one of the user's own, and stands at a ``raise`` or an ``assert``:
    an exception of a library, or of a sum of arrays that do not fit, is no refusal.
    """
    frame = _own_frame(err)
    if frame is None or frame.tb_next is not None:
        return ""
    code = frame.tb_frame.f_code
    if dis.opname[code.co_code[frame.tb_lasti]] != "RAISE_VARARGS":
        return ""
    return linecache.getline(code.co_filename, frame.tb_lineno).strip() or "raise"


def describe_error(err: BaseException) -> dict[str, Any]:
    """Describe an exception by its type, the built-in types it derives from, and its message."""
    kinds = [k.__name__ for k in type(err).__mro__ if getattr(builtins, k.__name__, None) is k]
    return {
        "type": type(err).__name__,
        "module": str(type(err).__module__),
        "bases": kinds,
        "message": message_of(err)[:2000].encode("utf-8", "backslashreplace").decode(),
        "place": place_of(err),
        "refuses": refusing_line(err)[:200],
        "during": str(getattr(err, "npattn_phase", "")),
    }


def answer_safely(
    session: Session, message: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """Answer a request, whatever the implementation raises."""
    try:
        return session.answer(message, tensors)
    except Usage as err:
        return {"usage": str(err)}, {}
    except OtherCount as err:
        return {"returned": err.args[0]}, {}
    except NoResult as err:
        return {"no result": str(err)}, {}
    except NotPossible as err:
        return {"unreadable": str(err)}, {}
    except BaseException as err:  # noqa: BLE001  foreign code may raise anything
        session.end_without_device(err)
        return {"raised": describe_error(err)}, {}


# --- the process ----------------------------------------------------------------------------------


class Pipes:
    """Standard input and output as they were, out of reach of what prints or reads."""

    def __init__(self) -> None:
        self.source, self.sink = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
        self.lock = threading.Lock()

    def receive(self, count: int) -> bytes:
        data = os.read(self.source, count)
        if not data:
            raise EOFError
        return data

    def write(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.sink, view) :]

    def send(self, message: Any, tensors: dict[str, Tensor], shared: Any = None) -> None:
        with self.lock:
            write_frame(self.write, message, tensors, shared)


def serve(session: Session, pipes: Pipes) -> None:
    """Answer requests until the judge closes its end; a channel is a thread of its own."""
    channels: dict[int, queue.Queue[Any]] = {}

    def work(requests: queue.Queue[Any]) -> None:
        while True:
            message, tensors = requests.get()
            reply, out = answer_safely(session, message, tensors)
            pipes.send({**reply, "id": message["id"]}, out)

    rest = bytearray()
    while True:
        try:
            message, tensors = parse_frame(read_frame(pipes.receive, rest, session.shared))
        except EOFError:
            return
        channel = message.get("channel", 0)
        if channel == 0:
            reply, out = answer_safely(session, message, tensors)
            pipes.send({**reply, "id": message["id"]}, out, session.shared)
            continue
        sys.setswitchinterval(1e-6)  # so that few calls show what threads share
        if channel not in channels:
            channels[channel] = queue.Queue()
            threading.Thread(target=work, args=(channels[channel],), daemon=True).start()
        channels[channel].put((message, tensors))


PRELOAD = "NPATTN_PRELOAD"
"""Variable with the name of a framework to import before the judge asks anything."""


def main(target: str) -> None:
    """Serve one target until the judge closes its end."""
    with contextlib.suppress(ImportError):
        importlib.import_module(os.environ.pop(PRELOAD, "math"))
    serve(Session(target), Pipes())
    atexit._run_exitfuncs()
    os._exit(0)  # threads of the target may run on


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(
            "usage: child.py TARGET [FOLDER ...], TARGET as module:function or file.py:function"
        )
    main(sys.argv[1])  # the folders are on the path
