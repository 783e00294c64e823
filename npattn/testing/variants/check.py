"""check_variant: sample problems of a variant, compare every result, shrink a failure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from npattn.errors import DtypeError, OptionError
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer, read_floating
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.child import STARRED, parameters, qualified_name
from npattn.testing.adapters.frameworks import choose_framework
from npattn.testing.comparison import Comparison, compare_result
from npattn.testing.power import Power, describe_unjudged, keep_judged
from npattn.testing.reference.pairs import Function
from npattn.testing.reference.search import Search, write_replay
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.report import Report
from npattn.testing.report.reproducer import write_import
from npattn.testing.variants.case import Case
from npattn.testing.variants.differential import DifferentialCase
from npattn.testing.variants.linear import LinearCase

VARIANTS: dict[str, type[Case]] = {"linear": LinearCase, "differential": DifferentialCase}
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
    accept: str | Iterable[str] = (),
) -> Report:
    """Check an implementation of linear or differential attention, forward and backward.

    Parameters
    ----------
    f : callable
        Called as the function of the variant: ``f(q, k, v, **options)`` for "linear",
        ``f(q1, k1, q2, k2, v, lam=lam, **options)`` for "differential". It is tested on the options
        that it names. It returns out; if it names ``return_state``, that is True, and it returns
        (out, state), and with normalisation (out, state, normaliser).
    variant : {"linear", "differential"} or a subclass of `Case`
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
    accept : str or iterable of str
        Results that may be not judged, as "dlam": where twice the result would not have been seen.

    Returns
    -------
    Report
        Its one rule is "agreement"; `recipe` of that outcome is the smallest failing case.

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
    kind = VARIANTS.get(variant) if isinstance(variant, str) else variant
    if not isinstance(kind, type) or not issubclass(kind, Case):
        raise OptionError(
            f"variant is {variant!r}, must be one of {', '.join(VARIANTS)}, or a subclass of Case"
        )
    target = _Target(f, backward, framework, device)
    choices = kind.choices(target.names, values or {})
    search = Search(lambda case: target.compare(case, dtype))

    def build(fields: dict[str, Any]) -> Case:
        case = kind.build(fields)
        target.note_changed(values or {}, case)
        return case

    search.run(choices, build, examples, seed)
    target.note_unasked()
    name = variant if isinstance(variant, str) else kind.__name__

    def write_script(case: Any, message: str) -> str:
        imports, arguments = write_import(f, "f", None), "f, case"
        if backward is not None:
            imports += write_import(backward, "f_backward", None)
            arguments += ", backward=f_backward"
        names = f"from npattn.testing.variants import {type(case).__name__}, replay"
        return write_replay(
            f"{target.name} is wrong as {name} attention.",
            message,
            "\n".join([names, "", *imports, ""]),
            case,
            f"{arguments}, framework={target.framework.name!r}, dtype={dtype!r}",
        )

    about = f"Results and gradients of {name} attention agree with the exact ones."
    outcome = Outcome("agreement", "", about, dtype, "not applicable")
    outcome = search.conclude(outcome, write_script)
    if search.failure is None:
        powers = search.powers()
        outcome = outcome.with_powers({n: Power.union(keep_judged(x)) for n, x in powers.items()})
        target.untested += describe_unjudged(powers)
    said = {"seed": seed, "examples": examples, "variant": name}
    accepted = (accept,) if isinstance(accept, str) else tuple(accept)
    return Report(target.name, (outcome,), tuple(target.untested), said, accept=accepted)


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


class _Target(Function):
    """An implementation and its backward, asked for the results of a request."""

    def __init__(self, f: Any, backward: Any, framework: str, device: str | None) -> None:
        chosen = choose_framework(f, qualified_name(f), framework, device)
        super().__init__(f, backward, chosen.name, device, [({}, {})])
        named = [p for p in parameters(f).values() if p.kind not in STARRED]
        self.names = {p.name: p.default is inspect.Parameter.empty for p in named}
        self.returned: list[str] = []
        self.asked = {"return_state"}
        self.untested = [] if self.differentiates else ["gradients, for there is no backward="]

    def note_changed(self, values: Mapping[str, Sequence[Any]], case: Case) -> None:
        """Note the values that are asked for and that other fields of a case change."""
        for field, allowed in values.items():
            got = getattr(case, field)
            text = f"{field} {', '.join(map(repr, allowed))} everywhere: problems had {got!r} too"
            if got not in allowed and not any(x.startswith(f"{field} ") for x in self.untested):
                self.untested.append(text)

    def note_unasked(self) -> None:
        """Note the options that the implementation names, and that no problem had."""
        self.untested += [f"{n}, which no problem had" for n in self.names if n not in self.asked]

    def compare(self, case: Case, dtype: Any) -> tuple[Comparison, ...]:
        """Compare every result for a case. Raises ImplementationError if it has none."""
        request = case.request(dtype)
        leaves = [*request.positional, *request.named]
        # Whatever the arrays are called that come by position.
        self.asked |= {*[*self.names][: len(request.positional)], *request.named, *request.options}
        options = {n: x for n, x in request.options.items() if n in self.names}
        masks = {n: options.pop(n) for n, x in [*options.items()] if isinstance(x, np.ndarray)}
        options |= {"return_state": True} if "return_state" in self.names else {}
        self.by_name = {*request.named, *masks}
        self.returned = list(request.cotangents)
        arrays = {**request.positional, **request.named, **masks}
        with self.framework.one_thread(), self.framework.allowing(np.dtype(dtype)):
            results = self.results(arrays, options)
        through = set(results)
        if self.backward is not None:
            through &= {"out", *(n[1:] for n in parameters(self.backward))}
        cotangents = {n: x for n, x in request.cotangents.items() if n in through}
        if self.differentiates:
            results = self.everything(arrays, options, cotangents, leaves) | results
        request = request._replace(cotangents=cotangents)
        exact = case.exact(request, dtype, self.differentiates)
        return tuple(_compare(n, results[n], *exact[n]) for n in exact if n in results)

    def results(self, arrays: Mapping[str, Array], options: Mapping[str, Any]) -> dict[str, Array]:
        """Return the results by name, of a call that leaves its arrays as they are."""
        tensors = self._give(arrays)
        results = self._take(self._call(tensors, options))
        for name, x in arrays.items():
            if self.framework.take(tensors[name]).tobytes() != x.tobytes():
                raise ImplementationError(f"changed its input {name}")
        return results

    def _name_results(self, value: Any) -> dict[str, Any]:
        if "return_state" not in self.names:
            return {"out": value}
        if not isinstance(value, (tuple, list)) or len(value) != len(self.returned):
            raise ImplementationError(
                f"returned {type(value).__name__}, must return {self.returned}"
            )
        return dict(zip(self.returned, value, strict=True))

    def _pull_back(
        self,
        cotangents: Mapping[str, Any],
        inputs: Mapping[str, Any],
        options: Mapping[str, Any],
        leaves: Sequence[str],
    ) -> dict[str, Any]:
        """Call backward= with what it names; it may leave gradients out."""
        wanted = parameters(self.backward)
        positional = [x for n, x in inputs.items() if n not in self.by_name]
        named = {n: x for n, x in inputs.items() if n in self.by_name}
        arguments = {n: x for n, x in {**options, **named}.items() if n in wanted or n in leaves}
        arguments |= {f"d{n}": x for n, x in cotangents.items() if n != "out"}
        assert self.backward is not None
        got = self.backward(cotangents["out"], *positional, **arguments)
        got = got if isinstance(got, Mapping) else dict(zip(leaves, got, strict=False))
        for name in leaves:
            text = f"the gradient of {name}, which backward does not return"
            if name not in got and text not in self.untested:
                self.untested.append(text)
        return {n: got[n] for n in leaves if n in got}


def _compare(name: str, got: Array, exact: Array, allowed: Array) -> Comparison:
    """Compare a result with the exact one, its shape and dtype first."""
    try:
        read_floating(name, got)
    except DtypeError as err:
        return Comparison(name, float("inf"), (), 0.0, 0.0, 0.0, got.size, got.size, str(err))
    return compare_result(name, got, exact, allowed)
