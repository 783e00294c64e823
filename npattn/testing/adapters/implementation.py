"""An implementation under test: what it can do, and how it is called.

Its first three positional parameters are q, k, v; the options that it names are the features it is
tested on. Options arrive in their plain form: `mask` a boolean array, `bias` a float array,
`window` a pair, `causal` a bool; those at their default are not passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from npattn.arrays import Array
from npattn.errors import NpattnError, OptionError
from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.base import (
    Framework,
    ImplementationError,
    NumPy,
    ResultError,
    framework_of,
    told,
)
from npattn.testing.adapters.signature import RETURNS, called, parameters, read
from npattn.testing.targets import load

__all__ = ["Framework", "Implementation", "ImplementationError", "NumPy", "ResultError"]

INPUTS = ("q", "k", "v", "bias", "sinks")


class Implementation:
    """A callable under test.

    Parameters
    ----------
    f : callable
        ``f(q, k, v, <options it has>)`` → o, or (o, lse), (o, lse, weights) on request.
    backward : callable, optional
        ``backward(dout, q, k, v, *, out, lse, dlse, dweights, <same options>)``, any subset of
        these keywords, → (dq, dk, dv) or a mapping with keys among q, k, v, bias, sinks. torch and
        JAX functions need none.
    rename : mapping, optional
        Its parameter names → npattn's: ``{"is_causal": "causal", "attn_mask": "bias"}``.
    features : iterable of str, optional
        What it has, where the signature cannot be read or says too much.
    framework : {"auto", "numpy", "torch", "jax"}
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
        self.name = name or spec or called(f)
        self.rename = {ours: theirs for theirs, ours in (rename or {}).items()}
        has = read(f, self.name, rename or {}, features)
        self.features, self.returns, self.untested = has.features, has.returns, has.untested
        self.backward_takes = parameters(backward)
        self.framework = framework_of(f, self.name, framework)
        self.device: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Functions by a spec that finds them: other processes may not import them by name."""
        left_out = ("f", "backward", "backward_takes", "framework")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        state["framework"] = self.framework.name
        state["f"] = _place(self.f, (self.spec, 0))
        state["backward"] = _place(self.backward, (self.backward_spec, 0), (self.spec, 1))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in ("f", "backward"):
            if isinstance(state[name], _Place):
                spec, which = state[name]
                state[name] = load(spec)[which]
        self.__dict__.update(state)
        self.backward_takes = parameters(self.backward)
        self.framework = framework_of(self.f, self.name, state["framework"], self.device)

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
        self.framework = framework_of(self.f, self.name, self.framework.name, device)
        self.device = device

    # --- calling ----------------------------------------------------------------------------------

    def inputs(self, problem: Problem, view: str = "contiguous") -> dict[str, Any]:
        """Fresh, writable arrays of the framework, by npattn's names."""
        problem, given = problem.materialised(), {}
        with self.framework.allowing(problem.q.dtype):
            for name in ("q", "k", "v", "mask", "bias", "sinks", "dropout_mask"):
                array = getattr(problem, name)
                if array is not None:
                    laid = view if name in "qkv" else "contiguous"
                    given[name] = self.framework.give(_lay(array, laid, self._swaps(name, problem)))
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
        with self.framework.allowing(problem.q.dtype):
            results = self._call(inputs, options, ())
            if self.returns:
                more = self._call(inputs, options, self.returns)
                results |= {"o too" if name == "o" else name: x for name, x in more.items()}
            return self._taken(results)

    def gradients(
        self,
        problem: Problem,
        cotangents: Cotangents,
        view: str = "contiguous",
        *,
        bias_gradient: bool = True,
        inputs: dict[str, Any] | None = None,
        given: dict[str, Any] | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> dict[str, Array]:
        """dq, dk, dv and, where it has them, dbias and dsinks.

        `given` are its cotangents, made by `taken_back`; `meanwhile` is called between an explicit
        backward and the forward before it.
        """
        inputs = self.inputs(problem, view) if inputs is None else inputs
        options = self.options(problem)
        with self.framework.allowing(problem.q.dtype):
            given = self.taken_back(problem, cotangents, view) if given is None else given
            return self._taken(
                self._differentiated(inputs, options, given, bias_gradient, meanwhile)[1]
            )

    def call(self, arrays: Mapping[str, Array], options: dict[str, Any]) -> Array:
        """o of arrays and options as they are, right or wrong."""
        given = {name: self.framework.give(array) for name, array in arrays.items()}
        return self._taken(self._call(given, options, ()))["o"]

    def where_they_are(
        self, problem: Problem, inputs: Mapping[str, Any], cotangents: Mapping[str, Any] | None
    ) -> list[tuple[str, Any]]:
        """All that it gives, as arrays of its framework: nothing is read, moved or copied, but for
        the layout.

        Parameters
        ----------
        problem : Problem
            Whose options are asked.
        inputs : mapping
            Arrays of the framework by npattn's names, laid out as npattn has them.
        cotangents : mapping or None
            Of o and, where it returns it, lse; None asks for no gradients.

        Returns
        -------
        list of (name, array)
            A name comes once for each way to call it.
        """
        options = self.options(problem)
        inputs = {n: self._laid(x) if n in "qkv" else x for n, x in inputs.items()}
        found = list(self._call(inputs, options, ()).items())
        if cotangents is None:
            more = self._call(inputs, options, ("return_lse",)) if self.returns_lse else {}
        else:
            given = {n: self._laid(x) if n == "o" else x for n, x in cotangents.items()}
            results, grads = self._differentiated(inputs, options, given, True, lambda: None)
            more = {n: x for n, x in results.items() if n in ("o", "lse")} | grads
        with _foreign("raised"):
            self.framework.finish()
        return [(n, self._turned(n, x)) for n, x in [*found, *more.items()]]

    def raw(self, problem: Problem) -> Any:
        """o as it was returned: not copied."""
        with self.framework.allowing(problem.q.dtype):
            return self._call(self.inputs(problem), self.options(problem), ())["o"]

    def taken_back(
        self, problem: Problem, cotangents: Cotangents, view: str = "contiguous"
    ) -> dict[str, Any]:
        """The cotangents as arrays of the framework."""
        return self._cotangents(cotangents, view, self._swaps("q", problem))

    def _cotangents(self, cotangents: Cotangents, view: str, swap: bool) -> dict[str, Any]:
        """Those of what it returns, by the name of that."""
        given = {"o": self.framework.give(_lay(cotangents.dout, view, swap))}
        if cotangents.dlse is not None and self.returns_lse:
            given["lse"] = self.framework.give(np.array(cotangents.dlse))
        if cotangents.dweights is not None and self.returns_weights:
            given["weights"] = self.framework.give(np.array(cotangents.dweights))
        return given

    def _differentiated(
        self,
        inputs: dict[str, Any],
        options: dict[str, Any],
        given: dict[str, Any],
        bias: bool,
        meanwhile: Callable[[], object],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What it returns on the way, and the gradients by name."""
        if self.backward is None:
            return self._autograd(inputs, options, given, bias)
        return self._explicit(inputs, options, given, meanwhile)

    def _autograd(
        self, inputs: dict[str, Any], options: dict[str, Any], given: dict[str, Any], bias: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        returns = tuple(n for n in RETURNS if n.removeprefix("return_") in given)
        asked = [n for n in INPUTS if n in inputs and (bias or n != "bias")]

        def call(**arrays: Any) -> dict[str, Any]:
            return self._call({**inputs, **arrays}, options, returns)

        with _foreign("its gradient raised"):
            results, grads = self.framework.gradients(call, inputs, given, asked)
        return results, {f"d{name}": grad for name, grad in grads.items()}

    def _explicit(
        self,
        inputs: dict[str, Any],
        options: dict[str, Any],
        given: dict[str, Any],
        meanwhile: Callable[[], object],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        assert self.backward is not None
        results = self._call(inputs, options, ("return_lse",) if self.returns_lse else ())
        meanwhile()
        extra = {"out": results["o"], "lse": results.get("lse")}
        extra |= {"dlse": given.get("lse"), "dweights": given.get("weights")}
        words = {n: x for n, x in extra.items() if n in self.backward_takes}
        words |= self._words(inputs, options)
        with _foreign("backward raised"), np.errstate(all="ignore"):
            found = self.backward(given["o"], inputs["q"], inputs["k"], inputs["v"], **words)
        if isinstance(found, Mapping):
            unknown = [str(n) for n in found if n not in INPUTS]
            if unknown:
                raise ResultError(
                    f"backward returned {', '.join(unknown)}, must be among {', '.join(INPUTS)}"
                )
            return results, {f"d{name}": grad for name, grad in found.items() if grad is not None}
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise ResultError("backward must return (dq, dk, dv) or a mapping")
        return results, dict(zip(("dq", "dk", "dv"), found, strict=True))

    def _call(
        self, inputs: dict[str, Any], options: dict[str, Any], returns: tuple[str, ...]
    ) -> dict[str, Any]:
        words = self._words(inputs, options | dict.fromkeys(returns, True))
        with _foreign("raised"), np.errstate(all="ignore"):  # NaN and inf are given on purpose
            found = self.f(inputs["q"], inputs["k"], inputs["v"], **words)
        names = ["o", *(n.removeprefix("return_") for n in RETURNS if n in returns)]
        if len(names) == 1:
            return {"o": found}
        if not isinstance(found, (tuple, list)) or len(found) != len(names):
            got = f"{len(found)} results" if isinstance(found, (tuple, list)) else "one result"
            asked = ", ".join(f"{self.rename.get(n, n)}=True" for n in returns)
            raise ResultError(f"returned {got} for {asked}, must return ({', '.join(names)})")
        return dict(zip(names, found, strict=True))

    def _words(self, inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """All but q, k, v, by the implementation's own names."""
        words = {n: x for n, x in {**inputs, **options}.items() if n not in "qkv"}
        return {self.rename.get(n, n): x for n, x in words.items()}

    def _taken(self, results: dict[str, Any]) -> dict[str, Array]:
        taken = {}
        for name, value in results.items():
            with _foreign(f"{name} could not be read:"):
                taken[name] = self._turned(name, self.framework.take(value))
        return taken

    def _turned(self, name: str, array: Any) -> Any:
        """A result as npattn lays it out."""
        swaps = self.layout == "BTHD" and name in ("o", "o too", "dq", "dk", "dv")
        return array.swapaxes(-2, -3) if swaps and array.ndim == 4 else array

    def _laid(self, array: Any) -> Any:
        """A tensor as the implementation lays it out."""
        swaps = self.layout == "BTHD" and array.ndim == 4
        return array.swapaxes(-2, -3).contiguous() if swaps else array

    def _swaps(self, name: str, problem: Problem) -> bool:
        return self.layout == "BTHD" and name in "qkv" and problem.q.ndim == 4


class _Place(NamedTuple):
    """Where a function is found: of what `load` gives for a spec, the first or the second."""

    spec: str
    which: int


def _place(function: Any, *places: tuple[str | None, int]) -> Any:
    """The first of these places where it is; else the function itself."""
    for spec, which in places:
        try:
            if spec is not None and function is not None and load(spec)[which] is function:
                return _Place(spec, which)
        except (NpattnError, ImportError):
            continue  # a spec that is only a name
    return function


@contextmanager
def _foreign(what: str) -> Iterator[None]:
    """Foreign code may raise anything, and exit; it goes into the report."""
    try:
        yield
    except ImplementationError:
        raise
    except (Exception, SystemExit) as err:
        raise ImplementationError(f"{what} {told(err)}") from err


def _lay(array: Array, view: str, swap: bool) -> Array:
    """A copy of `array` that lies in memory as `view` says, seen with its axes -2 and -3 swapped
    if `swap`."""
    if swap:
        array = np.ascontiguousarray(array.swapaxes(-2, -3))
    if view == "transposed" and array.ndim > 2:
        return array.swapaxes(-2, -3).copy().swapaxes(-2, -3)
    if view == "transposed":
        return array.copy("F")
    if view == "stepped":
        buffer = np.zeros(
            (*array.shape[:-2], 2 * array.shape[-2], 2 * array.shape[-1]), array.dtype
        )
        buffer[..., ::2, ::2] = array
        return buffer[..., ::2, ::2]
    if view == "reversed":
        return array[..., ::-1, :].copy()[..., ::-1, :]
    if view == "expanded" and array.ndim > 2 and array.shape[0] > 1 and _constant(array):
        return np.broadcast_to(array[:1].copy(), array.shape)
    return array.copy()


def _constant(array: Array) -> bool:
    """Whether the first axis repeats one value, so that a stride of 0 can hold it."""
    return bool((array == array[:1]).all())
