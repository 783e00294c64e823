"""A mistake in the place of a function: its signature, conventions, layout, arrays and tensors."""

import functools
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.mistakes import Attention, Mistake, with_gate
from npattn.mutants.call import Call
from npattn.mutants.terms import Terms
from npattn.problem.arrays import to_numpy
from npattn.testing.adapters.child import parameters


def stand_in(f: Callable[..., Any], terms: Terms, mistake: Mistake | None) -> Callable[..., Any]:
    """Return a function that is called as `f` is, in `terms`, and makes a mistake.

    None is no mistake. The function takes NumPy arrays, or tensors of torch, which it
    differentiates. Its state begins anew.
    """
    instance: Any = Attention() if mistake is None else copy(mistake.forward.__self__)  # type: ignore[attr-defined]
    if "gate" in terms.signature.features:
        base: Any = type(instance)
        instance = with_gate(base)()
    instance.alignment = terms.conventions.alignment
    signature = inspect.Signature([*parameters(f).values()])
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}
    starred = {n: p.kind for n, p in signature.parameters.items() if p.kind in (2, 4)}

    @functools.wraps(f)
    def function(*args: Any, **kwargs: Any) -> Any:
        """Return the mistake's results for a call of f, as arrays, or as tensors if q is one."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name, kind in starred.items():
            more = arguments.pop(name)
            if kind is inspect.Parameter.VAR_POSITIONAL and more:
                raise OptionError(f"no mistake takes *{name}")
            arguments |= more if kind is inspect.Parameter.VAR_KEYWORD else {}
        (_, q), (_, k), (_, v), *rest = arguments.items()
        options = terms.options(dict(rest), defaults)
        mutant = instance
        if isinstance(options.get("causal"), str):  # a string says the alignment
            mutant, options["causal"] = copy(instance), True
            mutant.alignment = bound.arguments[terms.signature.names["causal"]]
        heads_last = terms.layout == "BTHD" and q.ndim == 4
        call = Call(mutant, options, terms, heads_last)
        if hasattr(q, "detach"):
            from npattn.mutants.tensors import call_on_tensors

            carriers = terms.signature.names
            inputs = {n: arguments.get(carriers.get(n, "")) for n in ("bias", "sinks", "gate")}
            results = call_on_tensors(call, (q, k, v), inputs)
        else:
            results = call.forward(*map(np.asarray, (q, k, v)))
        found = tuple(None if n is None else results[n] for n in call.result_names)
        return found[0] if len(found) == 1 else found

    function.__signature__ = signature  # type: ignore[attr-defined]  # a built-in has none
    return function


@dataclass
class Spy:
    """Record of the calls of the function itself."""

    calls: int = 0
    # results that it returned beside o in the first call: those with the axes of lse or weights
    beside: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()  # of q, in the order of their first calls
    # shapes of q, k and the weights in the first call that returned these
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def watch(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its calls recorded."""

        @functools.wraps(f)
        def function(*args: Any, **kwargs: Any) -> Any:
            """Call f, and note its dtypes, and the sizes of the first call that returns weights."""
            result = f(*args, **kwargs)
            if not self.calls and isinstance(result, (tuple, list)):
                names = {0: "weights", -1: "lse"}
                o, *rest = result
                self.beside = tuple(names[x.ndim - o.ndim] for x in rest if x is not None)
            self.calls += 1
            q, k, *_ = (*args, *kwargs.values())
            if isinstance(result, (tuple, list)) and not self.sizes:
                o, *rest = result
                weights = [x for x in rest if x is not None and x.ndim == o.ndim]
                shaped = dict(zip(("q", "k", "weights"), (q, k, *weights), strict=False))
                self.sizes = {n: tuple(x.shape) for n, x in shaped.items()} if weights else {}
            dtype = str(to_numpy(q).dtype)
            self.dtypes += (dtype,) * (dtype not in self.dtypes)
            return result

        return function
