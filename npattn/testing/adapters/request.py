"""Calls of an implementation as messages, which `child` answers in this process or in a worker.

A message names its arrays, so that the same call can be made with others in their place: those that
autograd differentiates, or those of another process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from npattn.problem import Problem
from npattn.problem.meanings import LATENT
from npattn.problem.options import RESULTS
from npattn.testing.adapters import child
from npattn.testing.adapters.arguments import Sizes, make_module
from npattn.testing.adapters.base import ResultError, catch_foreign
from npattn.testing.adapters.frameworks import Composed, Framework, translate_errors
from npattn.testing.adapters.signature import Signature

INPUTS = ("q", "k", "v", "bias", "sinks", "gate")
LEAVES = (*INPUTS, "qkv", "kv", LATENT[0])
"""Inputs that have a gradient."""


class Callee(Protocol):
    """Attributes of an implementation that a request reads."""

    f: Callable[..., Any]
    backward: Callable[..., Any] | None
    name: str
    framework: Framework
    signature: Signature
    backward_signature: Signature
    backward_takes: frozenset[str]
    returns: tuple[str, ...]

    @property
    def layout(self) -> str: ...
    @property
    def returns_lse(self) -> bool: ...
    @property
    def slices(self) -> bool: ...

    def note_error_state(self, changed: bool) -> None: ...

    def keywords(
        self,
        signature: Signature,
        inputs: dict[str, Any],
        options: dict[str, Any],
        sizes: Sizes | Problem,
    ) -> dict[str, Any]: ...


class CallRequest:
    """One call, or several with the same arrays, in this process.

    The problem is None for arrays and options that none has. With `keeps` the arrays are those of a
    rule, which looks at them afterwards.
    """

    # returns a context in which what an answer has is looked at
    reading: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, f: Callee, problem: Problem | None, keeps: bool = False) -> None:
        self.f, self.problem, self.keeps = f, problem, keeps
        self.options: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}  # arrays of the framework by npattn's names
        self.arrays: dict[str, Any] = {}  # these, and all others that the call needs
        self.cotangents: dict[str, Any] = {}  # cotangents, by result
        self.returns: tuple[str, ...] = ()
        self._results: Any = None  # of a forward whose backward is asked later

    def add_inputs(self, inputs: Mapping[str, Any], options: dict[str, Any]) -> None:
        """Add the arrays and the options of the calls."""
        self.inputs, self.options = dict(inputs), options
        self.add_arrays(inputs)

    def add_cotangents(self, cotangents: dict[str, Any]) -> None:
        """Add cotangents of the results."""
        self.cotangents = cotangents
        self.add_arrays({_name_cotangent(n): x for n, x in cotangents.items()})

    def add_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Add arrays by npattn's names."""
        self.arrays |= arrays

    # --- what is asked ---

    def forward(self, calls: Sequence[tuple[str, ...]], hold: bool = False) -> list[Any]:
        """Return what the function returned in each of several calls."""
        prefixes = {"": "raised"}
        return [
            self.send({"do": "forward", "call": self._call(returns)}, prefixes, hold)
            for returns in calls
        ]

    def autograd(self, names: Sequence[str], hold: bool = False) -> dict[str, Any]:
        """Return the gradients of the inputs named, by the framework."""
        prefixes = {"forward": "raised", "": "its gradient raised"}
        value = self.send(self._autograd(names), prefixes, hold)
        return {f"d{name}": value[name] for name in names}

    def autograd_twice(self, second: Mapping[str, Any]) -> dict[str, Any]:
        """Return the gradients of Σ second · gradients, by input, and by "o" for that in dout."""
        self.add_arrays({f"dd{name}": x for name, x in second.items()})
        message = self._autograd(list(second))
        message["second"] = {name: {"array": f"dd{name}"} for name in second}
        value = self.send(message, {"forward": "raised", "": "its second gradient raised"})
        return {**{name: value[name] for name in second}, "o": value["cotangent 0"]}

    def backward(self, meanwhile: Callable[[], object] | None = None, hold: bool = False) -> Any:
        """Return what the backward returned, called after the forward and `meanwhile`."""
        returns = ("return_lse",) if self.f.returns_lse else ()
        message: dict[str, Any] = {"do": "gradients", "backward": self._backward()}
        if meanwhile is None:
            message |= self._counted_call(returns)
        else:
            request = {"do": "forward", **self._counted_call(returns)}
            message["of"] = self.keep(self.send(request, {"": "raised"}, True))
            meanwhile()
        return self.send(message, {"": "backward raised", "forward": "raised"}, hold)

    def everything(self, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the results of a forward whose gradients are asked, by name, and these."""
        returns = ("return_lse",) if self.f.returns_lse else ()
        if self.f.backward is None:
            message = self._autograd(names)
            prefixes = {"forward": "raised", "": "its gradient raised"}
        else:
            message = {"do": "gradients", "backward": self._backward()}
            message |= self._counted_call(returns)
            prefixes = {"": "backward raised", "forward": "raised"}
        results, value = self.send(message | {"everything": True}, prefixes)
        if self.f.backward is not None:
            return name_results(self.f.signature, results, returns), value
        named = zip(["o", *(n for n in self.cotangents if n != "o")], results.values(), strict=True)
        return dict(named), {f"d{name}": value[name] for name in names}

    def overwrite(self) -> list[tuple[str, str]]:
        """Return the names of results that share memory, and write to them if none do."""
        message = self._counted_call(self.f.returns) | {"do": "forward", "overwrite": True}
        if self.cotangents:
            message |= {"do": "gradients", "backward": self._backward()}
        answer = self.send(message, {"": "raised", "backward": "backward raised"})
        names = ["o", *(n.removeprefix("return_") for n in self.f.returns)]
        leading = self.f.signature.leading

        def name(kind: str, item: Any) -> str:
            if kind == "input":
                return str(item)
            if kind == "result":
                return names[item] if item < len(names) else f"result {item}"
            return f"d{leading[item]}" if isinstance(item, int) else f"d{item}"

        with self.reading():
            return [(name(*one), name(*other)) for one, other in answer.get("overlaps", ())]

    # --- messages ---

    def _autograd(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the message that asks the worker for gradients of these inputs by autograd."""
        returns = tuple(n for n in RESULTS if n.removeprefix("return_") in self.cotangents)
        results = ["o", *(n.removeprefix("return_") for n in returns)]
        return {
            "do": "gradients",
            **self._counted_call(returns),
            "leaves": list(names),
            "cotangents": {
                str(i): {"array": _name_cotangent(n)}
                for i, n in enumerate(results)
                if n in self.cotangents
            },
            **({"slices": True} if self.f.slices else {}),
        }

    def _counted_call(self, returns: tuple[str, ...]) -> dict[str, Any]:
        """Return a call whose results are counted before it goes on with them."""
        self.returns = returns
        return {"call": self._call(returns), "results": count_results(self.f.signature, returns)}

    def _call(self, returns: tuple[str, ...]) -> dict[str, Any]:
        f, values = self.f, self.options | dict.fromkeys(returns, True)
        keywords = f.keywords(f.signature, self.inputs, values, self.sizes)
        module = [make_module(self.sizes)] if f.signature.module else []
        return self._form([*module, *self._leading], keywords)

    def _backward(self) -> dict[str, Any]:
        f = self.f
        keywords = f.keywords(f.backward_signature, self.inputs, self.options, self.sizes)
        extra: dict[str, Any] = {"out": {"result": 0}}
        extra |= {"lse": {"result": 1} if f.returns_lse else None}
        extra |= {"dlse": self.cotangents.get("lse"), "dweights": self.cotangents.get("weights")}
        taken = {n: x for n, x in extra.items() if n in f.backward_takes}
        return self._form([{"array": "dout"}, *self._leading], taken | keywords)

    @property
    def sizes(self) -> Sizes | Problem:
        """The sizes of the calls: of the problem, or of arrays that none has."""
        if self.problem is not None:
            return self.problem
        return Sizes.of(self.inputs["q"], self.inputs["k"], self.f.layout)

    @property
    def _leading(self) -> list[Any]:
        """The arrays that come first."""
        return [{"array": name} for name in self.f.signature.leading]

    def _form(self, positional: list[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "positional": [self._entry(x) for x in positional],
            "keywords": {name: self._entry(x) for name, x in keywords.items()},
        }

    def _entry(self, value: Any) -> Any:
        """Return an argument as a message has it."""
        if isinstance(value, dict):  # it is one
            return value
        if isinstance(value, Composed):
            return {value.kind: [self._entry(x) for x in value.parts]}
        if isinstance(value, tuple):
            return [self._entry(x) for x in value]
        name = next((n for n, x in self.arrays.items() if x is value), None)
        return self.encode(value) if name is None else {"array": name}

    # --- answers, of this process ---

    def encode(self, value: Any) -> Any:
        """Return an argument that is no array of the request."""
        return value

    def send(self, message: dict[str, Any], prefixes: Mapping[str, str], hold: bool = False) -> Any:
        """Return what the call of a message returned; raise what it raised behind a prefix.

        With `hold` results stay where they are until they are read, which here they always do.
        """
        f, session = self.f, child.Session(self.f.name)
        session.f, session.backward, session.framework = f.f, f.backward, f.framework.backend
        try:
            with translate_errors(), np.errstate(all="ignore"):  # NaN and inf are given on purpose
                value = session.compute(message, self.arrays, self._results)
                f.note_error_state({*np.geterr().values()} != {"ignore"})
                return value
        except child.OtherCount as err:
            refuse_count(f.signature, err.args[0], self.returns)
        except BaseException as err:
            during = getattr(err, "npattn_phase", "")
            with catch_foreign(prefixes.get(during, prefixes[""])):
                raise

    def keep(self, results: Any) -> Any:
        """Return a key for results, by which a backward is asked."""
        self._results = results
        return ""

    def fetch(self, value: Any) -> Any:
        """Return results as arrays of the framework, wherever they are kept."""
        return value


def _name_cotangent(result: str) -> str:
    return "dout" if result == "o" else f"d{result}"


# --- results by name ------------------------------------------------------------------------------


def refuse_count(signature: Signature, count: int, returns: tuple[str, ...]) -> None:
    """Raise the error for a number of results, counted as `child.OtherCount` counts them."""
    results = None if count == 0 else (None,) * max(count, 0)
    name_results(signature, results, returns)
    raise ValueError(f"{count} results, as it was asked for")


def count_results(signature: Signature, returns: tuple[str, ...]) -> list[int | None]:
    """Return how many results a call may return: 0 stands for a bare o, None for any more."""
    if not returns:
        pairs = signature.module or "need_weights" in signature.meanings.values()
        return [0, 2] if pairs else [0]
    theirs = {signature.names.get(n, n) for n in returns}
    return [1 + len(returns), *([] if theirs <= set(RESULTS) else [None])]  # of other systems


def name_results(signature: Signature, value: Any, returns: tuple[str, ...]) -> dict[str, Any]:
    """Return what a call returned, by npattn's names."""
    names = ["o", *(n.removeprefix("return_") for n in RESULTS if n in returns)]
    several = isinstance(value, (tuple, list))
    count, allowed = len(value) if several else 0, count_results(signature, returns)
    is_allowed = count in allowed or (None in allowed and count > len(names))
    if not returns:
        if several and (not count or not is_allowed):
            raise ResultError(
                f"returned a tuple or list of {count}, must return o alone; more only "
                "where a parameter asks for it, as return_lse=True does for (o, lse)"
            )
        return {"o": value[0] if several else value}
    if not is_allowed:
        got = f"{count} results" if several else "one result"
        flags = ", ".join(f"{signature.names.get(n, n)}=True" for n in returns)
        raise ResultError(f"returned {got} for {flags}, must return ({', '.join(names)})")
    return dict(zip(names, value, strict=False))


def name_gradients(
    signature: Signature, grads: Mapping[str, Any], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return gradients by npattn's names; that of a parameter for mask and bias is dbias."""
    carries = signature.carries.items()
    ours = {theirs: [n for n in names if n in LEAVES] for theirs, names in carries}
    named = {}
    for theirs, gradient in grads.items():
        name = next(iter(ours.get(theirs, ())), theirs)
        if name not in LEAVES:
            raise ResultError(f"backward returned {theirs}, must be among {', '.join(INPUTS)}")
        if hasattr(gradient, "ndim") and name == "gate" and gradient.ndim == 1:
            gradient = gradient.reshape(inputs["gate"].shape)  # of a head mask
        if hasattr(gradient, "ndim") and name == "bias" and "mask" in inputs:
            gradient = _fold_to_shape(gradient, tuple(inputs["bias"].shape))
        if gradient is not None:
            named[f"d{name}"] = gradient
    return named


def _fold_to_shape(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum a gradient over the axes that its input broadcast along."""
    wide = {"dtype": np.float64} if isinstance(gradient, np.ndarray) else {}
    folded = gradient
    while folded.ndim > len(shape):
        folded = folded.sum(0, **wide)
    for axis, size in enumerate(shape):
        if size == 1 and folded.shape[axis] != 1:
            folded = folded.sum(axis, keepdims=True, **wide)
    return folded.astype(gradient.dtype) if wide else folded
