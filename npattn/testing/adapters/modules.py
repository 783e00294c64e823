"""A torch module as its judge sees it: parameters, calls, gradients and modes, in NumPy arrays."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ResultError, catch_foreign
from npattn.testing.adapters.child import STARRED
from npattn.testing.adapters.frameworks import copy_module, make_framework


@dataclass(frozen=True)
class Returned:
    """Results of a call of a module, and the gradients of a loss through them."""

    out: Array  # (..., T, out)
    weights: Array | None  # as the module returns them: of each head, or averaged
    # gradients by name; that of an input that another stands for is None
    inputs: Mapping[str, Array | None]
    parameters: Mapping[str, Array]


class _State(NamedTuple):
    """Parameters and buffers of a module that is not copied, its modes, and what they were."""

    tensors: list[tuple[Any, Any, Any, bool, Any]]  # tensor, data, values, requires_grad, grad
    modes: list[tuple[Any, bool]]

    @classmethod
    def of(cls, owner: Any) -> _State:
        tensors = [*owner.parameters(), *owner.buffers()]
        rows = [(x, x.data, x.detach().clone(), x.requires_grad, x.grad) for x in tensors]
        return cls(rows, [(m, m.training) for m in owner.modules()])

    def restore(self, owner: Any) -> None:
        for x, data, values, requires_grad, grad in self.tensors:
            x.data = data
            x.data.copy_(values)
            x.requires_grad_(requires_grad)
            x.grad = grad
        for module, training in self.modes:
            module.training = training


class TorchModule:
    """A copy of a torch module, in a dtype, so that the original keeps its mode and gradients.

    What is called is the module, or the method of one that stands in its place, or ``call(m, x,
    ...)``. Without a dtype it keeps its own. A module that cannot be copied is judged in place;
    `computing` restores it to the bit. Raises OptionError if it is something else, or has
    parameters of several dtypes, or none.
    """

    def __init__(
        self, module: Any, dtype: str | None = None, call: Callable[..., Any] | None = None
    ) -> None:
        import torch

        self.torch = torch
        owner = getattr(module, "__self__", module)
        if not isinstance(owner, torch.nn.Module):
            raise OptionError(
                f"m is a {type(module).__name__}, must be a torch.nn.Module or a method of one; a "
                "function of q, k and v is judged by npattn.testing.check"
            )
        self.name = type(owner).__qualname__
        self._kept: _State | None = None
        try:
            self.owner = copy_module(owner)
        except (TypeError, RuntimeError, NotImplementedError, AttributeError):
            self.owner, self._kept = owner, _State.of(owner)
        self._call, self._path = call, "" if owner is module else module.__name__
        called = call or getattr(self.owner, self._path or "forward")
        parameters = list(inspect.signature(called).parameters.values())
        self.signature = inspect.Signature(parameters[1:] if call else parameters)
        self.method = self._bind(self.owner)
        if dtype is not None:
            self.owner.to(getattr(torch, dtype))
        self.owner.requires_grad_(True)
        kinds = {p.dtype for p in self.owner.parameters()}
        if len(kinds) != 1:
            self.restore()
            raise OptionError(
                f"m has parameters of {len(kinds)} dtypes, must have one: pass dtypes=('float32',)"
            )
        # False if its inputs are (T, B, C), as it says itself; None if it does not say
        self.batch_first: bool | None = getattr(self.owner, "batch_first", None)
        self.returns_scores = False  # of what it returns beside the output the softmax is taken
        self.stack = ExitStack()  # of what holds while it is judged
        self.dtype = str(kinds.pop()).removeprefix("torch.")
        self.device = next(self.owner.parameters()).device
        self.framework = make_framework("torch", str(self.device))
        self.mixed = False  # called in mixed precision
        self.compiled: Any = None
        self.train(False)

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Dtype of its parameters and inputs."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    def _bind(self, owner: Any) -> Callable[..., Any]:
        if self._call is not None:
            return functools.partial(self._call, owner)
        call: Callable[..., Any] = getattr(owner, self._path) if self._path else owner
        return call

    def restore(self) -> None:
        """Give a module that was not copied what it had."""
        if self._kept is not None:
            self._kept.restore(self.owner)

    def copy(self, dtype: str = "") -> TorchModule:
        """Return another copy, in another dtype if one is given."""
        other = copy.copy(self)
        other.owner, other._kept, other.compiled = copy_module(self.owner), None, None
        other.method = other._bind(other.owner)
        if dtype:
            other.owner.to(getattr(self.torch, dtype))
            other.dtype = dtype
        return other

    @contextmanager
    def leaving_out(self, names: Iterable[str]) -> Iterator[None]:
        """Replace submodules by the identity for a while."""
        places = [(self.owner.get_submodule(n.rpartition(".")[0]), n.split(".")[-1]) for n in names]
        before = [getattr(parent, name) for parent, name in places]
        try:
            for parent, name in places:
                setattr(parent, name, self.torch.nn.Identity())
            yield
        finally:
            for (parent, name), module in zip(places, before, strict=True):
                setattr(parent, name, module)

    def holder(self, name: str) -> str:
        """Return the name of the class of the layer that has a parameter."""
        return type(self.owner.get_submodule(name.rpartition(".")[0])).__name__

    def parameters(self) -> dict[str, Array]:
        """Return the parameters by their dotted names, each once."""
        return {name: self._read(p) for name, p in self.owner.named_parameters()}

    def buffers(self) -> dict[str, Array]:
        """Return the buffers that have its dtype, by their dotted names."""
        arrays = {n: self._read(x) for n, x in self.owner.named_buffers()}
        return {n: x for n, x in arrays.items() if x.dtype == self.array_dtype}

    def multiplies_from_right(self, name: str) -> bool | None:
        """Return True for a weight (in, out), False for (out, in), None for an unknown layer."""
        layer = self.owner.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, (self.torch.nn.Linear, self.torch.nn.MultiheadAttention)):
            return False
        return True if type(layer).__name__ == "Conv1D" else None  # of transformers

    def attribute(self, names: Sequence[str], kind: Any = int) -> Any:
        """Return the first of these attributes that is a number, of it, a part or its config."""
        for holder in (*self.owner.modules(), getattr(self.owner, "config", None)):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, kind) and not isinstance(value, bool):
                    return value
        return None

    def arguments(self) -> dict[str, bool]:
        """Return the named parameters of its call, with True for those that have no default."""
        named = [p for p in self.signature.parameters.values() if p.kind not in STARRED]
        return {p.name: p.default is inspect.Parameter.empty for p in named}

    # --- change it --------------------------------------------------------------------------------

    def train(self, mode: bool) -> None:
        """Put it into training mode, or into that of evaluation."""
        self.owner.train(mode)

    def write(self, arrays: Mapping[str, Array]) -> None:
        """Give parameters and buffers other values."""
        parameters = dict(self.owner.named_parameters()) | dict(self.owner.named_buffers())
        with self.torch.no_grad():
            for name in arrays.keys() & parameters.keys():
                parameters[name].copy_(self.framework.give(arrays[name]))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Call what torch.compile makes of it for a while."""
        plain = self.method
        if self.compiled is None:
            self.compiled = self.torch.compile(plain)
        self.method = self.compiled
        try:
            yield
        finally:
            self.method = plain

    @contextmanager
    def watching_dropout(self, drops: bool = True) -> Iterator[list[tuple[Array, float]]]:
        """Note what torch.nn.functional.dropout keeps; or let it return its input.

        For each call that drops, the list gets True where it keeps an element, and its rate.
        """
        functional: Any = self.torch.nn.functional
        before, seen = functional.dropout, []

        def dropout(
            input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Any:
            if not (drops and training and p > 0):
                return input
            kept = before(self.torch.ones_like(input), p, True) != 0
            seen.append((kept.cpu().numpy(), float(p)))
            return input * kept / (1 - p)

        functional.dropout = dropout
        try:
            yield seen
        finally:
            functional.dropout = before

    def loaded_copy(self, rng: np.random.Generator) -> TorchModule:
        """Return a copy with other parameters, into which its state dict was then loaded."""
        other = self.copy()
        with self.torch.no_grad():
            for p in other.owner.parameters():
                noise = rng.standard_normal(tuple(p.shape)).astype(self.array_dtype)
                p.copy_(self.framework.give(noise))
        other.owner.load_state_dict(copy.deepcopy(self.owner.state_dict()))
        return other

    @contextmanager
    def computing(self, seed: int) -> Iterator[None]:
        """Compute with one thread, and with random numbers that leave those of others alone."""
        with self.framework.one_thread(), self.torch.random.fork_rng(devices=[]):
            self.torch.manual_seed(seed)
            try:
                with self.stack:
                    yield
            finally:
                self.restore()

    # --- call it ----------------------------------------------------------------------------------

    def call(
        self,
        inputs: Mapping[str, Array | None],
        options: Mapping[str, Any],
        cotangents: Callable[[Array, Array | None], tuple[Array, Array | None]] | None = None,
    ) -> Returned:
        """Call it, and differentiate it.

        Inputs and options are its arguments by their names, arrays of any shape among them; an
        input of None is the one before. `cotangents` returns those of output and weights, for their
        values; without it no gradients are taken, nor recorded. Raises ImplementationError if it
        raises, or returns something else.
        """
        tensors: dict[str, Any] = {}
        last = None
        for name, array in inputs.items():
            last = last if array is None else self.framework.give(array.copy())
            tensors[name] = last
        input_leaves = {n: t for (n, t), x in zip(tensors.items(), inputs.values(), strict=True)
               if x is not None}  # fmt: skip
        for tensor in input_leaves.values():
            tensor.requires_grad_(cotangents is not None)
        recording = self.torch.set_grad_enabled(cotangents is not None)
        mixed = self.torch.autocast(self.device.type, self.torch.bfloat16, enabled=self.mixed)
        with recording, mixed, catch_foreign("raised"):
            out, weights = self.run(tensors, options)
            o, w = self._read(out), None if weights is None else self._read(weights)
            if cotangents is None:
                return Returned(o, w, {}, {})
            return Returned(
                o, w, *self._differentiate(input_leaves, out, weights, *cotangents(o, w))
            )

    def run(self, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return output and weights for tensors, samples first; arrays among `options` are given.

        Raises ResultError if it returns something else.
        """
        arguments = {n: self.framework.give(x) if isinstance(x, np.ndarray) else x
                 for n, x in options.items()}  # fmt: skip
        if self.batch_first is not False:
            return self.results(self.method(**tensors, **arguments))
        turned = {id(x): x.transpose(0, 1).contiguous() for x in tensors.values()}
        out, weights = self.results(
            self.method(**{n: turned[id(x)] for n, x in tensors.items()}, **arguments)
        )
        return out.transpose(0, 1), weights

    def _differentiate(
        self,
        input_leaves: dict[str, Any],
        out: Any,
        weights: Any,
        dout: Array,
        dweights: Array | None,
    ) -> tuple[dict[str, Array | None], dict[str, Array]]:
        """Return the gradients of Σ dout·out + Σ dweights·weights, of inputs and parameters.

        dout and dweights have the shapes of out and weights.
        """
        if not out.requires_grad:
            raise ResultError("returned an output that requires no grad: autograd cannot reach it")
        pairs = [(out, dout)]
        if weights is not None and weights.requires_grad and dweights is not None:
            pairs.append((weights, dweights))
        results, cotangents = zip(*((x, self.framework.give(d)) for x, d in pairs), strict=True)
        parameters = dict(self.owner.named_parameters())
        leaves = [*input_leaves.values(), *parameters.values()]
        grads = self.torch.autograd.grad(results, leaves, cotangents, allow_unused=True)
        arrays = iter([
            self._read(self.torch.zeros_like(leaf) if g is None else g)
            for leaf, g in zip(leaves, grads, strict=True)
        ])  # fmt: skip
        inputs: dict[str, Array | None] = {n: next(arrays) for n in input_leaves}
        return inputs, {n: next(arrays) for n in parameters}

    def results(self, value: Any) -> tuple[Any, Any]:
        """Return output and weights: a tensor, (output, weights, ...), or a mapping of these."""
        values = list(value.values()) if isinstance(value, Mapping) else value
        values = [values] if isinstance(values, self.torch.Tensor) else values
        if not isinstance(values, (tuple, list)) or not values:
            raise ResultError(
                f"returned {type(value).__name__}, must be a tensor or (out, weights)"
            )
        others = [x for x in values[1:] if isinstance(x, self.torch.Tensor) and x.ndim > 2]
        weights = [x for x in others if bool(x.any()) and not bool((x < 0).any())]  # not a bias
        chosen = next(iter(weights or others), None)
        if self.returns_scores and chosen is not None:
            chosen = chosen.detach().softmax(-1)
        return values[0], chosen

    def _read(self, tensor: Any) -> Array:
        return self.framework.take(tensor)
