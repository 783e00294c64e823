"""check_variant: sample problems of a variant, compare every result, shrink a failure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from npattn.errors import DtypeError, OptionError
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer, read_floating
from npattn.testing.adapters.base import ImplementationError, catch_foreign
from npattn.testing.adapters.child import STARRED, parameters, qualified_name
from npattn.testing.adapters.frameworks import choose_framework
from npattn.testing.compare import Comparison, compare_arrays
from npattn.testing.variants.case import Case, Request
from npattn.testing.variants.differential import DifferentialCase
from npattn.testing.variants.linear import LinearCase
from npattn.testing.variants.report import VariantReport, importable
from npattn.testing.variants.search import search

VARIANTS: dict[str, type[Any]] = {"linear": LinearCase, "differential": DifferentialCase}
DTYPES = ("float32", "float64", "bfloat16")


def check_variant(
    f: Callable[..., Any],
    variant: str | type[Case],
    *,
    backward: Callable[..., Any] | None = None,
    values: Mapping[str, Sequence[Any]] | None = None,
    framework: str = "auto",
    device: str | None = None,
    dtype: str = "float32",
    examples: int = 100,
    seed: int = 0,
) -> VariantReport:
    """Check an implementation of linear or differential attention, forward and backward.

    Parameters
    ----------
    f : callable
        Called as the function of the variant: ``f(q, k, v, **options)`` for "linear",
        ``f(q1, k1, q2, k2, v, lam=lam, **options)`` for "differential". It is tested on the options
        that it names. It returns out; if it names ``return_state``, that is True, and it returns
        (out, state), and with normalisation (out, state, normaliser).
    variant : {"linear", "differential"} or a class with the protocol `Case`
    backward : callable, optional
        ``backward(dout, *arrays, **options)``, with `dstate` and `dnormaliser` if it names them:
        returns a mapping of gradients by the names of the arrays, or a tuple in their order. A
        torch or JAX function needs none. Without gradients the results are checked alone.
    values : mapping, optional
        Values of fields of `LinearCase` or `DifferentialCase` to sample from, such as
        ``{"causal": (True,), "D": (16, 32)}``. One value says what f means by an option that it
        does not name.
    framework, device
        As in `npattn.testing.check`.
    dtype : {"float32", "float64", "bfloat16"}
    examples : int, default 100
        Number of problems.
    seed : int, default 0

    Returns
    -------
    VariantReport
        ``passed``, ``worst``, ``case``, ``comparisons``, ``script()``; ``str()`` gives a report.

    Raises
    ------
    OptionError
        If `variant`, `values` or another argument has an illegal value.
    DtypeError
        If `dtype` is another.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.testing import check_variant
    >>> def kernel(q, k, v):
    ...     weights = np.maximum(q, 0) @ np.maximum(k, 0).swapaxes(-1, -2)
    ...     return weights @ v / np.float32(np.sqrt(q.shape[-1]))
    >>> values = {"feature_map": ("relu",), "normalise": (False,), "G": (1,)}
    >>> check_variant(kernel, "linear", values=values, framework="numpy").passed
    True
    """
    if dtype not in DTYPES:
        raise DtypeError(f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
    check_integer("examples", examples)
    check_integer("seed", seed, 0)
    if isinstance(variant, str) and variant not in VARIANTS:
        raise OptionError(f"variant is {variant!r}, must be one of {', '.join(VARIANTS)}")
    if not isinstance(variant, str) and not hasattr(variant, "choices"):
        raise OptionError(
            f"variant is {variant!r}, must be one of {', '.join(VARIANTS)}, or a class with the "
            "protocol Case"
        )
    kind = VARIANTS[variant] if isinstance(variant, str) else variant
    target = _Target(f, backward, framework, device)
    choices = kind.choices(target.names, values or {})
    worst: dict[str, float] = {}
    failed: list[tuple[Case, tuple[Comparison, ...], str]] = []
    tried = 0

    def fails(fields: dict[str, Any]) -> bool:
        nonlocal tried
        case: Case = kind.build(fields)
        tried += not failed
        target.note_changed(values or {}, case)
        try:
            comparisons, error = target.compare(case, dtype), ""
        except ImplementationError as err:
            comparisons, error = (), str(err)
        if error or not all(c.passed for c in comparisons):
            failed.append((case, comparisons, error))
            return True
        for c in comparisons:
            worst[c.name] = max(worst.get(c.name, 0.0), c.ratio)
        return False

    search(choices, fails, examples, seed)
    target.note_unasked()
    case, comparisons, error = failed[-1] if failed else (None, (), "")
    own = importable(f, "f")
    other = () if backward is None else importable(backward, "f_backward")
    arguments = "f, case" + ("" if backward is None else ", backward=f_backward")
    return VariantReport(
        name=qualified_name(f),
        variant=variant if isinstance(variant, str) else kind.__name__,
        dtype=dtype,
        tried=tried,
        seed=seed,
        worst=worst,
        case=case,
        comparisons=comparisons,
        error=error,
        untested=tuple(target.untested),
        call=f"{arguments}, framework={target.framework.name!r}, dtype={dtype!r}",
        imports=own + other if own and (other or backward is None) else (),
    )


def replay(
    f: Callable[..., Any],
    case: Case,
    *,
    backward: Callable[..., Any] | None = None,
    framework: str = "auto",
    device: str | None = None,
    dtype: str = "float32",
) -> tuple[Comparison, ...]:
    """Compare the results of an implementation for one case.

    Parameters
    ----------
    f, backward, framework, device, dtype
        As in `check_variant`.
    case : Case
        As a report prints it.

    Returns
    -------
    tuple of Comparison
        One for each result and gradient.

    Raises
    ------
    ImplementationError
        If the implementation raises, or returns something else.
    """
    return _Target(f, backward, framework, device).compare(case, dtype)


class _Target:
    """An implementation and its backward, called with arrays of its framework."""

    def __init__(self, f: Any, backward: Any, framework: str, device: str | None) -> None:
        self.f, self.backward = f, backward
        self.framework = choose_framework(f, qualified_name(f), framework, device)
        named = [p for p in parameters(f).values() if p.kind not in STARRED]
        self.names = {p.name: p.default is inspect.Parameter.empty for p in named}
        self.untested: list[str] = []
        self.asked = {"return_state"}
        if not self.differentiates:
            self.untested.append("gradients, for there is no backward=")

    @property
    def differentiates(self) -> bool:
        return self.backward is not None or self.framework.differentiates

    def note_changed(self, values: Mapping[str, Sequence[Any]], case: Case) -> None:
        """Note the values that are asked for and that other fields of a case change."""
        for field, own in values.items():
            got = getattr(case, field)
            text = f"{field} {', '.join(map(repr, own))} everywhere: problems had {got!r} too"
            if got not in own and not any(x.startswith(f"{field} ") for x in self.untested):
                self.untested.append(text)

    def note_unasked(self) -> None:
        """Note the options that the implementation names, and that no problem had."""
        for name in self.names:
            if name not in self.asked:
                self.untested.append(f"{name}, which no problem had")

    def compare(self, case: Case, dtype: Any) -> tuple[Comparison, ...]:
        """Compare every result for a case. Raises ImplementationError if it has none."""
        request = case.request(dtype)
        arrays = len(request.positional)  # whatever they are called
        self.asked |= {*list(self.names)[:arrays], *request.named, *request.options}
        with self.framework.one_thread(), self.framework.allowing(np.dtype(dtype)):
            results = self._results(request)
            request = request._replace(cotangents=self._reachable(request, results))
            if self.differentiates:
                results |= self._gradients(request)
        exact = case.exact(request, dtype, self.differentiates)
        return tuple(_compare(n, results[n], *exact[n]) for n in exact if n in results)

    def _reachable(self, request: Request, results: Mapping[str, Any]) -> dict[str, Array]:
        """Return the cotangents of the results that gradients are taken through."""
        through = set(results)
        if self.backward is not None:
            through &= {"out", *(n[1:] for n in parameters(self.backward))}
        return {n: x for n, x in request.cotangents.items() if n in through}

    def _options(self, request: Request) -> dict[str, Any]:
        """Return the options that the implementation names, masks as its arrays."""
        options = {n: x for n, x in request.options.items() if n in self.names}
        give = self.framework.give
        options = {
            n: give(x.copy()) if isinstance(x, np.ndarray) else x for n, x in options.items()
        }
        return options | ({"return_state": True} if "return_state" in self.names else {})

    def _call(self, request: Request, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Call the implementation with arrays of its framework, by name."""
        positional = [arrays[n] for n in request.positional]
        named = {n: arrays[n] for n in request.named}
        with catch_foreign(f"{qualified_name(self.f)} raised"):
            got = self.f(*positional, **named, **self._options(request))
        if "return_state" not in self.names:
            return {"out": got}
        names = list(request.cotangents)
        if not isinstance(got, (tuple, list)) or len(got) != len(names):
            raise ImplementationError(f"returned {type(got).__name__}, must return {names}")
        return dict(zip(names, got, strict=True))

    def _arrays(self, request: Request) -> dict[str, Any]:
        both = {**request.positional, **request.named}
        return {n: self.framework.give(x.copy()) for n, x in both.items()}

    def _results(self, request: Request) -> dict[str, Array]:
        arrays = self._arrays(request)
        got = self._call(request, arrays)
        results = {n: self.framework.take(x) for n, x in got.items()}
        for name, x in {**request.positional, **request.named}.items():
            if self.framework.take(arrays[name]).tobytes() != x.tobytes():
                raise ImplementationError(f"changed its input {name}")
        return results

    def _gradients(self, request: Request) -> dict[str, Array]:
        names = [*request.positional, *request.named]
        given = {n: self.framework.give(x.copy()) for n, x in request.cotangents.items()}
        if self.backward is not None:
            return self._explicit(request, names, given)
        with catch_foreign(f"{qualified_name(self.f)} raised in its backward"):
            _, grads = self.framework.gradients(
                lambda **arrays: self._call(request, arrays), self._arrays(request), given, names
            )
        return {"d" + n: self.framework.take(x) for n, x in grads.items()}

    def _explicit(
        self, request: Request, names: list[str], cotangents: dict[str, Any]
    ) -> dict[str, Array]:
        """Call backward=, and read the gradients that it returns."""
        backward, arrays = self.backward, self._arrays(request)
        wanted = parameters(backward)
        options = {n: x for n, x in self._options(request).items() if n in wanted}
        options |= {n: arrays.pop(n) for n in request.named}
        options |= {f"d{n}": x for n, x in cotangents.items() if n != "out"}
        with catch_foreign(f"{qualified_name(backward)} raised"):
            got = backward(cotangents["out"], *arrays.values(), **options)
        if not isinstance(got, Mapping):
            got = dict(zip(names, got, strict=False))
        for name in names:
            text = f"the gradient of {name}, which backward does not return"
            if name not in got and text not in self.untested:
                self.untested.append(text)
        return {"d" + n: self.framework.take(got[n]) for n in names if n in got}


def _compare(name: str, got: Array, exact: Array, allowed: Array) -> Comparison:
    """Compare a result with the exact one, its shape and dtype first."""
    note = ""
    if got.shape != exact.shape:
        note = f"{name} has shape {got.shape}, must have {exact.shape}"
    try:
        read_floating(name, got)
    except DtypeError as err:
        note = str(err)
    if note:
        return Comparison(name, float("inf"), (), 0.0, 0.0, 0.0, got.size, got.size, note)
    return compare_arrays(name, got, exact, allowed)
