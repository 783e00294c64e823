"""An implementation under test: what it can do, and how it is called.

Its first three positional parameters are q, k, v; the options that it names are the features it is
tested on. Options arrive in their plain form: `mask` a boolean array, `bias` a float array,
`window` a pair, `causal` a bool; those at their default are not passed.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from npattn.errors import NpattnError, OptionError
from npattn.problem import Array, Problem
from npattn.testing.recipe import Cotangents
from npattn.testing.strategies import FEATURES

__all__ = ["Framework", "Implementation", "ImplementationError", "NumPy"]

RETURNS = ("return_lse", "return_weights")
INPUTS = ("q", "k", "v", "bias", "sinks")


class ImplementationError(NpattnError):
    """The implementation under test raised, or returned what cannot be read.

    Attributes
    ----------
    cotangents : Cotangents or None
        Where it was its gradient that was asked for.
    """

    cotangents: Cotangents | None = None


class Framework(Protocol):
    """How arrays go into an implementation, come out of it, and are differentiated."""

    name: str
    differentiates: bool

    def one_thread(self) -> AbstractContextManager[None]:
        """Small problems are slow on many threads, which wait for each other."""

    def give(self, array: Array) -> Any:
        """A writable array of the framework with the values and the strides of `array`."""

    def take(self, value: Any) -> Array:
        """A result as a NumPy array, in the dtype delivered."""

    def gradients(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        asked: Iterable[str],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Results of ``call(**inputs)``, and the gradients asked, through the cotangents."""


class NumPy:
    """Plain NumPy arrays; gradients come from an explicit backward."""

    name = "numpy"
    differentiates = False

    def one_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def give(self, array: Array) -> Array:
        return array

    def take(self, value: Any) -> Array:
        if not isinstance(value, (np.ndarray, np.generic)):
            raise ImplementationError(
                f"returned {type(value).__module__}.{type(value).__qualname__}, "
                "must be a NumPy array (or name framework=)"
            )
        return np.array(value)

    def gradients(self, *_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        raise ImplementationError("a NumPy function is differentiated by its backward=")


class Implementation:
    """A callable under test.

    Parameters
    ----------
    f : callable
        ``f(q, k, v, <options it has>)`` → o, or (o, lse), (o, lse, weights) on request.
    backward : callable, optional
        ``backward(dout, q, k, v, *, out, lse, dlse, dweights, <same options>)``, any subset of
        these keywords, → (dq, dk, dv) or a mapping with keys among q, k, v, bias, sinks. torch
        functions need none.
    rename : mapping, optional
        Its parameter names → npattn's: ``{"is_causal": "causal", "attn_mask": "bias"}``.
    features : iterable of str, optional
        What it has, where the signature cannot be read or says too much.
    framework : {"auto", "numpy", "torch"}
    layout : {"BHTD", "BTHD"}
        Of q, k, v, o, dout and their gradients; "BTHD" is for rank 4.
    name : str, optional
        How reports call it.
    spec, backward_spec : str, optional
        "module:function", "path.py:function" or a known name, from which scripts import it and
        its backward.

    Attributes
    ----------
    features : frozenset of str
        The options on which it is tested.
    untested : tuple of str
        Parameters that keep their default.

    Raises
    ------
    OptionError
        If the callable cannot be called with q, k, v alone, or an argument is not legal.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        *,
        backward: Callable[..., Any] | None = None,
        rename: Mapping[str, str] | None = None,
        features: Iterable[str] | None = None,
        framework: str = "auto",
        layout: str = "BHTD",
        name: str | None = None,
        spec: str | None = None,
        backward_spec: str | None = None,
    ) -> None:
        if not callable(f):
            raise OptionError(f"f is {f!r}, must be a callable f(q, k, v, ...)")
        if layout not in ("BHTD", "BTHD"):
            raise OptionError(f"layout is {layout!r}, must be BHTD or BTHD")
        self.f, self.backward, self.layout = f, backward, layout
        self.spec, self.backward_spec = spec, backward_spec
        self.forward_only = False  # until a probe finds that it gives no gradient
        self.name = name or spec or _name(f)
        self.rename = {ours: theirs for theirs, ours in (rename or {}).items()}
        known = (*FEATURES, *RETURNS)
        named = _parameters(f)
        kinds = {p.kind for p in named.values()}
        if named and inspect.Parameter.VAR_KEYWORD not in kinds:
            absent = [theirs for theirs in (rename or {}) if theirs not in named]
            if absent:
                raise OptionError(
                    f"rename has {', '.join(absent)}, must be parameters of {_name(f)} "
                    f"({', '.join(named)}): rename={{theirs: ours}}"
                )
        for ours in (*self.rename, *(features or ())):
            if ours not in known:
                raise OptionError(f"{ours} is not a feature, must be one of {', '.join(known)}")
        has, self.untested = self._read_signature(known, features)
        self.features = frozenset(has) & frozenset(FEATURES)
        self.returns = tuple(name for name in RETURNS if name in has)
        self.backward_takes = _parameters(backward) if backward is not None else {}
        self.framework = self._framework(framework)

    @property
    def has_gradients(self) -> bool:
        return not self.forward_only and (
            self.backward is not None or self.framework.differentiates
        )

    @property
    def returns_lse(self) -> bool:
        return "return_lse" in self.returns

    @property
    def returns_weights(self) -> bool:
        return "return_weights" in self.returns

    def on(self, device: str) -> None:
        """Put arrays on a device of the framework."""
        if self.framework.name == "numpy":
            raise OptionError(f"device is {device!r}, must be None for NumPy arrays")
        self.framework = self._made(self.framework.name, device)

    # --- calling ----------------------------------------------------------------------------------

    def inputs(self, problem: Problem, view: str = "contiguous") -> dict[str, Any]:
        """Fresh, writable arrays of the framework, by npattn's names."""
        given = {}
        for name in ("q", "k", "v", "mask", "bias", "sinks", "dropout_mask"):
            array = getattr(problem, name)
            if array is not None:
                laid = _lay(
                    array, view if name in "qkv" else "contiguous", self._swaps(name, problem)
                )
                given[name] = self.framework.give(laid)
        return given

    def options(self, problem: Problem) -> dict[str, Any]:
        """The options that are not arrays and not at their default."""
        default = 1 / math.sqrt(problem.D) if problem.D else 1.0
        options = {
            "causal": bool(problem.causal),
            "window": problem.window,
            "scale": None if problem.scale == default else problem.scale,
            "softcap": problem.softcap,
            "score_mod": problem.score_mod,
            "dropout_rate": problem.dropout_rate,
        }
        at_default = {"causal": False, "dropout_rate": 0.0}  # the others: None
        return {name: x for name, x in options.items() if x != at_default.get(name)}

    def forward(
        self, problem: Problem, view: str = "contiguous", inputs: dict[str, Any] | None = None
    ) -> dict[str, Array]:
        """o as plainly called and, where it has them, lse and weights ("o too" beside them)."""
        inputs = self.inputs(problem, view) if inputs is None else inputs
        options = self.options(problem)
        results = self._call(inputs, options, ())
        if self.returns:
            more = self._call(inputs, options, self.returns)
            results |= {"o too" if name == "o" else name: value for name, value in more.items()}
        return self._taken(results, problem)

    def gradients(
        self,
        problem: Problem,
        cotangents: Cotangents,
        view: str = "contiguous",
        *,
        bias_gradient: bool = True,
        inputs: dict[str, Any] | None = None,
    ) -> dict[str, Array]:
        """dq, dk, dv and, where it has them, dbias and dsinks."""
        inputs = self.inputs(problem, view) if inputs is None else inputs
        options = self.options(problem)
        dout = _lay(cotangents.dout, view, self._swaps("q", problem))
        given = {"o": self.framework.give(dout)}
        if cotangents.dlse is not None and self.returns_lse:
            given["lse"] = self.framework.give(np.array(cotangents.dlse))
        if self.backward is None:
            found = self._autograd(inputs, options, given, bias_gradient)
        else:
            found = self._explicit(inputs, options, given)
        return self._taken(found, problem)

    def _autograd(
        self, inputs: dict[str, Any], options: dict[str, Any], given: dict[str, Any], bias: bool
    ) -> dict[str, Any]:
        returns = ("return_lse",) if "lse" in given else ()
        asked = [
            n for n in ("q", "k", "v", "bias", "sinks") if n in inputs and (bias or n != "bias")
        ]

        def call(**arrays: Any) -> dict[str, Any]:
            return self._call({**inputs, **arrays}, options, returns)

        try:
            _, grads = self.framework.gradients(call, inputs, given, asked)
        except ImplementationError:
            raise
        except Exception as err:  # foreign code may raise anything; it goes into the report
            raise ImplementationError(f"its gradient raised {_told(err)}") from err
        return {f"d{name}": grad for name, grad in grads.items()}

    def _explicit(
        self, inputs: dict[str, Any], options: dict[str, Any], given: dict[str, Any]
    ) -> dict[str, Any]:
        assert self.backward is not None
        results = self._call(inputs, options, ("return_lse",) if self.returns_lse else ())
        extra = {"out": results["o"], "lse": results.get("lse"), "dlse": given.get("lse")}
        extra["dweights"] = None  # no rule sends a gradient through the weights yet
        takes = self.backward_takes
        words = {n: x for n, x in extra.items() if n in takes}
        words |= {
            self.rename.get(n, n): x for n, x in {**inputs, **options}.items() if n not in "qkv"
        }
        try:
            with np.errstate(all="ignore"):
                found = self.backward(given["o"], inputs["q"], inputs["k"], inputs["v"], **words)
        except Exception as err:  # foreign code may raise anything; it goes into the report
            raise ImplementationError(f"backward raised {_told(err)}") from err
        if isinstance(found, Mapping):
            unknown = [str(n) for n in found if n not in INPUTS]
            if unknown:
                raise ImplementationError(
                    f"backward returned {', '.join(unknown)}, must be among {', '.join(INPUTS)}"
                )
            return {f"d{name}": grad for name, grad in found.items() if grad is not None}
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise ImplementationError("backward must return (dq, dk, dv) or a mapping")
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    def _call(
        self, inputs: dict[str, Any], options: dict[str, Any], returns: Iterable[str]
    ) -> dict[str, Any]:
        words = {n: x for n, x in {**inputs, **options}.items() if n not in "qkv"}
        words |= dict.fromkeys(returns, True)
        words = {self.rename.get(n, n): x for n, x in words.items()}
        try:
            with np.errstate(all="ignore"):  # NaN and inf are given on purpose
                found = self.f(inputs["q"], inputs["k"], inputs["v"], **words)
        except Exception as err:  # foreign code may raise anything; it goes into the report
            raise ImplementationError(f"raised {_told(err)}") from err
        names = ["o", *(n.removeprefix("return_") for n in RETURNS if n in tuple(returns))]
        parts = (found,) if len(names) == 1 else found
        if not isinstance(parts, (tuple, list)) or len(parts) != len(names):
            raise ImplementationError(f"must return {', '.join(names)} when asked for them")
        return dict(zip(names, parts, strict=True))

    def _taken(self, results: dict[str, Any], problem: Problem) -> dict[str, Array]:
        taken = {}
        for name, value in results.items():
            array = self.framework.take(value)
            if (
                self.layout == "BTHD"
                and name in ("o", "o too", "dq", "dk", "dv")
                and array.ndim == 4
            ):
                array = array.swapaxes(-2, -3)
            taken[name] = array
        return taken

    def _swaps(self, name: str, problem: Problem) -> bool:
        return self.layout == "BTHD" and name in "qkv" and problem.q.ndim == 4

    # --- reading ----------------------------------------------------------------------------------

    def _read_signature(
        self, known: tuple[str, ...], features: Iterable[str] | None
    ) -> tuple[set[str], tuple[str, ...]]:
        parameters = _parameters(self.f)
        if not parameters:
            if features is None:
                raise OptionError(
                    f"{self.name} has no readable signature, must be given with features= "
                    "(the options it has; () for none)"
                )
            return set(features), ()
        positional = [
            n
            for n, p in parameters.items()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        starred = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        if len(positional) < 3 and not starred:
            raise OptionError(
                f"{self.name} has {len(positional)} positional parameters, must have three: q, k, v"
            )
        ours = {theirs: ours for ours, theirs in self.rename.items()}
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        rest = [n for n, p in parameters.items() if n not in positional[:3] and p.kind not in kinds]
        has = {ours.get(n, n) for n in rest} & set(known)
        unknown = [n for n in rest if ours.get(n, n) not in known]
        needed = [n for n in unknown if parameters[n].default is inspect.Parameter.empty]
        if needed:
            raise OptionError(
                f"{self.name} needs {', '.join(needed)}, which the judge does not know: give it a "
                "default, wrap it, or say what it is with Implementation(f, rename={theirs: ours})"
            )
        if features is not None:
            unknown += sorted(has - set(features))
            has = set(features)
        elif any(p.kind in kinds for p in parameters.values()):
            unknown.append("*args or **kwargs (say which options there are: features=)")
        return has, tuple(unknown)

    def _framework(self, framework: str) -> Framework:
        if framework not in ("auto", "numpy", "torch"):
            raise OptionError(f"framework is {framework!r}, must be auto, numpy or torch")
        if framework == "auto":
            framework = self._guess()
        return self._made(framework)

    def _made(self, framework: str, device: str | None = None) -> Framework:
        if framework == "numpy":
            return NumPy()
        from npattn.testing.targets.torch import Torch  # torch is optional

        return Torch(device)

    def _guess(self) -> str:
        home = (getattr(self.f, "__module__", None) or "").split(".")[0]
        if home in ("numpy", "torch"):
            return "torch" if home == "torch" else "numpy"
        annotations = " ".join(str(p.annotation) for p in _parameters(self.f).values())
        for word, name in (("torch", "torch"), ("numpy", "numpy"), ("np.", "numpy")):
            if word in annotations:
                return name
        # One tiny probe, NumPy first: a NumPy function may well accept tensors.
        candidates = ["numpy"] + (["torch"] if "torch" in sys.modules else [])
        told = []
        for name in candidates:
            framework = self._framework(name)
            arrays = [framework.give(np.ones((1, 1, 2, 2), np.float32)) for _ in range(3)]
            try:
                framework.take(self.f(*arrays))
            except Exception as err:  # noqa: BLE001  the probe only asks whether it can be called
                told.append(f"{name}: {_told(err)}")
            else:
                return name
        # It may take other sizes only: then by what its module has imported.
        modules = {getattr(x, "__name__", "") for x in getattr(self.f, "__globals__", {}).values()}
        for name in ("torch", "numpy"):
            if name in modules:
                return name
        raise OptionError(
            f"{self.name} could not be called on a tiny problem ({'; '.join(told)}); say which "
            'arrays it takes with framework="numpy" or framework="torch"'
        )


def _parameters(f: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(f).parameters
    except (ValueError, TypeError):
        return {}


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__qualname__", None) or type(f).__qualname__


def _told(err: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(err).split())
    return f"{type(err).__name__}: {text[:200]}" if text else type(err).__name__


def _lay(array: Array, view: str, swap: bool) -> Array:
    """A copy of `array` that lies in memory as `view` says, seen with its axes -2 and -3 swapped
    if `swap`."""
    if swap:
        array = np.ascontiguousarray(array.swapaxes(-2, -3))
    if view == "transposed" and array.ndim > 2:
        return np.ascontiguousarray(array.swapaxes(-2, -3)).swapaxes(-2, -3)
    if view == "transposed":
        return np.asfortranarray(array)
    if view == "stepped":
        buffer = np.zeros(
            (*array.shape[:-2], 2 * array.shape[-2], 2 * array.shape[-1]), array.dtype
        )
        buffer[..., ::2, ::2] = array
        return buffer[..., ::2, ::2]
    if view == "reversed":
        return np.ascontiguousarray(array[..., ::-1, :])[..., ::-1, :]
    if view == "expanded" and array.ndim > 2 and array.shape[0] > 1 and _constant(array):
        return np.broadcast_to(array[:1].copy(), array.shape)
    return array.copy()


def _constant(array: Array) -> bool:
    """Whether the first axis repeats one value, so that a stride of 0 can hold it."""
    return bool((array == array[:1]).all())
