"""A function and its derivatives on flat vectors: one for all arguments, one for all results.

A vector holds float64 numbers, whatever the dtypes are; a complex number takes two places, so that
⟨dx, u⟩ is the real part of Σ conj(dx) u.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem.arrays import Array, cast, finfo, to_numpy
from npattn.problem.checks import is_floating
from npattn.testing.adapters import child
from npattn.testing.adapters.child import FRAMEWORKS
from npattn.testing.adapters.frameworks import (
    Framework,
    copy_module,
    make_framework,
    translate_errors,
)
from npattn.testing.gradients.tree import leaves, match, rebuild

Gradient = list[Array | None]
"""Gradient of each leaf as it was returned; None where there is none."""


def _eps(dtype: np.dtype[Any]) -> float:
    return max(float(finfo(dtype).eps), 2.0**-52)  # vectors are float64, for longdouble too


MODULE = "torch.nn.modules.module.Module"


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments or the results, and its part of the flat vector."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    part: slice

    @property
    def eps(self) -> float:
        """Distance of 1 to the next number of the dtype, or of float64 if that is larger."""
        return _eps(self.dtype)


def lay_out(named: Iterable[tuple[str, Array]]) -> list[Leaf]:
    """Return the leaves of arrays that follow each other in a flat vector."""
    found: list[Leaf] = []
    for name, array in named:
        start = found[-1].part.stop if found else 0
        size = array.size * (2 if array.dtype.kind == "c" else 1)
        found.append(Leaf(name, array.shape, array.dtype, slice(start, start + size)))
    return found


def flatten(arrays: Iterable[Array]) -> Array:
    """Return arrays as one float64 vector."""
    parts = [np.ravel(x).astype(np.complex128 if x.dtype.kind == "c" else float) for x in arrays]
    return np.concatenate([x.view(float) for x in parts]) if parts else np.zeros(0)


def choose(f: Any, named: Sequence[tuple[str, Any]], by_hand: bool, framework: str) -> Framework:
    """Return the framework whose arrays `f` takes, on the device of the arguments."""
    if framework not in ("auto", *FRAMEWORKS):
        raise OptionError(f"framework is {framework!r}, must be auto, numpy, torch or jax")
    parents = f.__mro__ if isinstance(f, type) else type(f).__mro__
    found = [x for _, x in named if _home(type(x)) in ("torch", "jax")]
    homes = [_home(kind) for kind in (*map(type, found), *parents)]
    if framework == "auto":
        framework = next((home for home in homes if home in ("torch", "jax")), "")
    if not framework:
        by_name = child.choose_framework(f, "auto", None, tries=False)[0].name
        framework = "numpy" if by_hand else by_name
    device = str(found[0].device) if found and framework == "torch" else None
    return make_framework(framework, device)


def _home(kind: type) -> str:
    return kind.__module__.split(".")[0].removesuffix("lib")  # of arrays of JAX: jaxlib


class Function:
    """A function, and what it claims to be its derivative.

    Attributes
    ----------
    inputs, results : list of Leaf
        Floating arrays among the arguments and the results.
    x, value : float64 vectors
        The arguments, and the results there.
    constants : list of str
        Arguments without a derivative: integers, booleans, anything that is no array.
    untraced : str
        The exception that keeps a function of JAX from being compiled, "" if there is none.
    surplus : list of str
        Those for which the last vjp returned a gradient.
    """

    order = "vjp"

    def __init__(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        vjp: Callable[..., Any] | None,
        jvp: Callable[..., Any] | None,
        framework: str,
    ) -> None:
        self.name = getattr(f, "__qualname__", type(f).__qualname__)
        f = _copy_owner(f)
        self.f: Callable[..., Any] = f.apply if child.AUTOGRAD in _class_names(f) else f  # type: ignore[attr-defined]
        if isinstance(f, type) and self.f is f:
            raise OptionError(f"{self.name} is a class; pass an instance, or its method")
        self.args, self.hand_vjp, self.hand_jvp = args, vjp, jvp
        names = _parameter_names(f, len(args))
        named = [x for name, tree in zip(names, args, strict=True) for x in leaves(tree, name)]
        self.framework = choose(f, named, bool(vjp or jvp), framework)
        self.differentiates = vjp is not None or (jvp is None and self.framework.differentiates)
        if vjp is None and jvp is None and not self.differentiates:
            raise OptionError(
                f"{self.name} computes with NumPy, which does not differentiate: pass vjp= or "
                "jvp=, or framework='torch' or 'jax' to judge its autodiff"
            )
        self.state = _random_state()
        read = [(name, self._read(x)) for name, x in named]
        self.is_input = [array is not None for _, array in read]
        self.constants = [name for name, array in read if array is None]
        self.surplus: list[str] = []
        arrays = [(name, array) for name, array in read if array is not None]
        if not arrays:
            raise DtypeError(
                f"args of {self.name} hold no floating array: nothing could be differentiated"
            )
        self.inputs, self.x = lay_out(arrays), flatten(array for _, array in arrays)
        self.untraced = ""
        self.run = self._compile()
        with self.calling():
            self.tree = self.run(list(self.give(self.x, self.inputs)))
        self.draws = not _are_equal(self.state, _random_state())
        read = [(name, self._read(y)) for name, y in leaves(self.tree, "result")]
        self.is_result = [array is not None for _, array in read]
        outputs = [(name, array) for name, array in read if array is not None]
        if not outputs:
            kind = type(self.tree).__name__
            raise DtypeError(f"{self.name} returned {kind}, which holds no floating array")
        self.results, self.value = lay_out(outputs), flatten(array for _, array in outputs)

    def _compile(self) -> Callable[[list[Any]], Any]:
        """Return f as a function of a list of its inputs; of JAX, compiled if it can be."""

        def run(parts: list[Any]) -> Any:
            return self.f(*self._arguments(parts))

        if self.framework.name != "jax":
            return run
        compiled: Callable[[list[Any]], Any] = sys.modules["jax"].jit(run)
        try:
            with self.calling():
                compiled(list(self.give(self.x, self.inputs)))
        except Exception as err:  # noqa: BLE001  a branch on values; f's own comes again
            self.untraced = type(err).__name__
            return run
        return compiled

    def _read(self, value: Any) -> Array | None:
        """Return a leaf as a NumPy array, or None if it has no derivative."""
        hand = self.framework.name == "numpy"
        if isinstance(value, np.ndarray | np.generic) or (hand and isinstance(value, float)):
            array = np.array(value)
        elif not hand and hasattr(value, "dtype"):
            array = self.framework.take(value)
        else:
            return None
        return array if is_floating(array.dtype) else None

    @contextmanager
    def calling(self, wide: bool = False, draws: bool = True) -> Iterator[None]:
        """Give a call that draws global random numbers the same each time, as for dropout."""
        if draws:
            _restore(self.state)
        double = wide or any(leaf.dtype.itemsize >= 8 for leaf in self.inputs)
        with self.framework.allowing(np.float64 if double else np.float32):
            yield

    @property
    def units(self) -> Array:
        """Distance of 1 to the next number, in the dtype of each element of x, (n,)."""
        sizes = [y.part.stop - y.part.start for y in self.inputs]
        return np.repeat([y.eps for y in self.inputs], sizes)

    # --- points ------------------------------------------------------------------------------

    def give(self, vector: Array, layout: Sequence[Leaf], wide: bool = False) -> Iterator[Any]:
        """Yield the arrays of a flat vector as arrays of the framework."""
        for leaf in layout:
            array = vector[leaf.part]
            array = array.view(np.complex128) if leaf.dtype.kind == "c" else array
            dtype = array.dtype if wide else leaf.dtype
            # Where a call would change its arguments, these are not the vector itself.
            part = array.reshape(leaf.shape)
            yield self.framework.give(part.copy() if part.dtype == dtype else cast(part, dtype))

    def _arguments(self, parts: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(_fill(self.args, self.is_input, parts, _keep))

    def give_arguments(self) -> tuple[Any, ...]:
        """Return the arguments, as `f` takes them."""
        return self._arguments(self.give(self.x, self.inputs))

    def give_cotangent(self, w: Array, wide: bool = False) -> Any:
        """Return a cotangent in the structure of the results; 0 where there is no derivative."""
        return _fill(self.tree, self.is_result, self.give(w, self.results, wide), _zeros)

    def values(self, x: Array, wide: bool = False) -> tuple[Array, float]:
        """Return the results at x, and the distance of 1 to the next number in their dtype.

        Parameters
        ----------
        wide : bool
            Call with float64 (complex128) arrays, whatever the dtypes of the arguments.
        """
        with self.calling(wide, self.draws):
            tree = self.run(list(self.give(x, self.inputs, wide)))
        arrays = [array for _, y in leaves(tree, "") if (array := self._read(y)) is not None]
        return flatten(arrays), max(_eps(y.dtype) for y in arrays)

    # --- claims ------------------------------------------------------------------------------

    def vjp(self, w: Array, x: Array, wide: bool = False, rough: int | None = None) -> Gradient:
        """Return the gradients of ⟨w, f(x)⟩ that are claimed, one for each of `inputs`.

        w is (m,), x is (n,). With a number as `rough`, everything that torch saves for backward is
        changed by a rounding, at random with that seed.
        """
        with self.calling(wide):
            if self.hand_vjp is None:
                with self._rounding(rough):
                    return self._differentiate(w, x, wide)
            dout = self.give_cotangent(w, wide)
            grads = self.hand_vjp(dout, *self._arguments(self.give(x, self.inputs, wide)))
        if len(self.args) == 1 and not (isinstance(grads, list | tuple) and len(grads) == 1):
            grads = (grads,)
        if not isinstance(grads, list | tuple) or len(grads) != len(self.args):
            count = len(grads) if isinstance(grads, list | tuple) else 1
            raise OptionError(
                f"vjp returned {count} gradients, but {self.name} has {len(self.args)} arguments: "
                "return one for each, None where there is none"
            )
        claimed = list(match(self.args, tuple(grads), "args", "vjp"))
        pairs = list(zip(claimed, self.is_input, strict=True))
        others = [g for g, kept in pairs if not kept]
        self.surplus = [n for n, g in zip(self.constants, others, strict=True) if g is not None]
        return [_array(g) for g, kept in pairs if kept]

    @contextmanager
    def _rounding(self, seed: int | None) -> Iterator[None]:
        """Change what torch saves for backward by a rounding: slopes come from rounded results."""
        if seed is None or self.framework.name != "torch":
            yield
            return
        torch = sys.modules["torch"]

        def change(x: Any) -> Any:
            if not x.is_floating_point():
                return x
            # Equal numbers stay equal: the backward of a maximum finds it again by that.
            signs = torch.sin(1e10 * x.double().nan_to_num() + seed)
            return (x * (1 + torch.finfo(x.dtype).eps * signs)).to(x.dtype)

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, change):
            yield

    def name_call(self) -> tuple[list[str], Callable[[dict[str, Any]], dict[str, Any]]]:
        """Return names of the inputs, and f as a function of a dict that returns one."""
        names = [f"x{i}" for i in range(len(self.inputs))]
        outputs = [y.name for y in self.results]

        def call(inputs_by_name: dict[str, Any]) -> dict[str, Any]:
            found = [y for _, y in leaves(self.run(list(inputs_by_name.values())), "")]
            kept = [y for y, flag in zip(found, self.is_result, strict=True) if flag]
            return dict(zip(outputs, kept, strict=True))

        return names, call

    def _differentiate(self, w: Array, x: Array, wide: bool) -> Gradient:
        """Return the gradients of ⟨w, f⟩ by the framework's autodiff; w is (m,), x is (n,)."""
        names, call = self.name_call()
        inputs = dict(zip(names, self.give(x, self.inputs, wide), strict=True))
        outputs = [y.name for y in self.results]

        # JAX conjugates neither the cotangent nor the gradient.
        conjugates = self.framework.name == "jax"
        w = _conjugate(w, self.results) if conjugates else w
        douts = dict(zip(outputs, self.give(w, self.results, wide), strict=True))
        _, grads = self.framework.gradients(
            lambda **arguments: call(arguments), inputs, douts, names
        )
        arrays = [self.framework.take(grads[name]) for name in names]
        return [g.conj() if conjugates and g.dtype.kind == "c" else g for g in arrays]

    def jvp(self, u: Array, x: Array, wide: bool = False) -> Array:
        """Return the derivative of the results along u that is claimed, (m,); u and x are (n,)."""
        assert self.hand_jvp is not None
        with self.calling(wide):
            directions = self.give(u, self.inputs, wide)
            tangents = _fill(self.args, self.is_input, directions, lambda _: None)
            args = self._arguments(self.give(x, self.inputs, wide))
            claimed = self.hand_jvp(tangents[0] if len(args) == 1 else tangents, *args)
        found = match(self.tree, claimed, "result", "jvp")
        arrays = [_array(d) for d, kept in zip(found, self.is_result, strict=True) if kept]
        for array, leaf in zip(arrays, self.results, strict=True):
            shape = None if array is None else array.shape
            if shape != leaf.shape:
                raise ShapeError(
                    f"jvp returned shape {shape} for {leaf.name}, must be {leaf.shape}"
                )
        return flatten(array for array in arrays if array is not None)


def _fill(
    tree: Any, flags: Iterable[bool], parts: Iterable[Any], other: Callable[[Any], Any]
) -> Any:
    """Return a tree with the leaves flagged replaced by `parts`, all others by ``other(leaf)``."""
    values, kept = iter(parts), iter(flags)
    return rebuild(tree, lambda old: next(values) if next(kept) else other(old))


def _array(value: Any) -> Array | None:
    return None if value is None else to_numpy(value)


def _zeros(value: Any) -> Any:
    return value * 0 if hasattr(value, "dtype") else None


def _conjugate(vector: Array, layout: Sequence[Leaf]) -> Array:
    vector = vector.copy()
    for leaf in layout:
        if leaf.dtype.kind == "c":
            vector[leaf.part][1::2] *= -1
    return vector


def _random_state() -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    numpy = np.random.get_state()  # noqa: NPY002  a function under test may draw from it
    return numpy, random.getstate(), torch.get_rng_state() if torch else None


def _are_equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    same = all(np.array_equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    return same and a[1] == b[1] and (a[2] is None or bool((a[2] == b[2]).all()))


def _restore(state: tuple[Any, ...]) -> None:
    np.random.set_state(state[0])  # noqa: NPY002
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["torch"].set_rng_state(state[2])


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Leave the global generators of Python, NumPy and torch as they were."""
    before = _random_state()
    try:
        yield
    finally:
        _restore(before)


def _copy_owner(f: Any) -> Any:
    """Return f, or that of a copy of its torch module: calls may change buffers."""
    owner = getattr(f, "__self__", f)
    if MODULE not in _class_names(type(owner)):
        return f
    other = copy_module(owner)
    return other if owner is f else getattr(other, f.__name__)


def _keep(old: Any) -> Any:
    """Return an argument that is not differentiated; a copy of an array, which f may change."""
    return copy.deepcopy(old) if hasattr(old, "dtype") else old


def _class_names(f: Any) -> set[str]:
    parents = f.__mro__ if isinstance(f, type) else ()
    return {f"{parent.__module__}.{parent.__qualname__}" for parent in parents}


def _parameter_names(f: Any, count: int) -> list[str]:
    """Return the names of the first parameters; those of an autograd.Function skip ctx."""
    # A module has its parameters in forward, too: its call takes anything.
    parameters = list(child.parameters(getattr(f, "forward", f)).values())
    if isinstance(f, type) and "setup_context" not in vars(f):
        parameters = parameters[1:]
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [plain[i] if i < len(plain) else f"args[{i}]" for i in range(count)]


class SecondOrder(Function):
    """The gradient of a function, as a function of its arguments and of the cotangents."""

    order = "second order"

    def __init__(self, first: Function, rng: np.random.Generator) -> None:
        self.first, self.name, self.framework = first, first.name, first.framework
        self.hand_jvp, self.differentiates, self.constants, self.surplus = None, True, [], []
        self.untraced = ""
        n = len(first.x)
        dout = [
            Leaf(f"d{y.name}", y.shape, y.dtype, slice(y.part.start + n, y.part.stop + n))
            for y in first.results
        ]
        self.inputs, self.results = [*first.inputs, *dout], first.inputs
        self.x = np.concatenate([first.x, rng.standard_normal(len(first.value))])

    def values(self, x: Array, wide: bool = False) -> tuple[Array, float]:
        n = len(self.first.x)
        arrays = [g for g in self.first.vjp(x[n:], x[:n], wide) if g is not None]
        return flatten(arrays), max(_eps(g.dtype) for g in arrays)

    def vjp(self, w: Array, x: Array, wide: bool = False, rough: int | None = None) -> Gradient:
        first, n = self.first, len(self.first.x)
        with first.calling(wide), first._rounding(rough), translate_errors():
            names, call = first.name_call()
            inputs = dict(zip(names, first.give(x[:n], first.inputs, wide), strict=True))
            second = dict(zip(names, first.give(w, first.inputs, wide), strict=True))
            outputs = [y.name for y in first.results]
            douts = dict(zip(outputs, first.give(x[n:], first.results, wide), strict=True))
            twice = first.framework.backend.gradients_twice(call, inputs, douts, second)
            keys = [*names, *(f"cotangent {name}" for name in outputs)]
            return [first.framework.take(twice[key]) for key in keys]
