"""Implementation under test: its features, and calls of its forward and backward.

Its first three positional parameters are q, k, v; the options that it names are the features it is
tested on. Options arrive in their plain form: `mask` a boolean array, `bias` a float array,
`window` a pair, `causal` a bool; those at their default are not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import NpattnError, OptionError
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.profiles import Profile, find_profile
from npattn.testing.adapters.base import ImplementationError, ResultError, Results, note_problem
from npattn.testing.adapters.child import parameters, qualified_name, refuse_class
from npattn.testing.adapters.frameworks import (
    TINY,
    Framework,
    choose_framework,
    find_framework,
    translate_errors,
)
from npattn.testing.adapters.load import Spec, by_spec, load_callable
from npattn.testing.adapters.passing import Passing
from npattn.testing.adapters.quantized import WORDS
from npattn.testing.adapters.request import LEAVES, CallRequest, name_results
from npattn.testing.adapters.session import HostProcess
from npattn.testing.adapters.signature import read_backward, read_signature
from npattn.testing.adapters.views import lay_out

__all__ = ["Framework", "Implementation", "ImplementationError", "ResultError"]


class Implementation(Passing, HostProcess):
    """A callable under test, which takes arrays as `Passing` says, in a `HostProcess`.

    Parameters
    ----------
    f : callable
        ``f(q, k, v, <options it has>)`` → o, or (o, lse), (o, lse, weights),
        (o, lse, weights, max_score) on request.
    backward : callable, optional
        ``backward(dout, q, k, v, *, out, lse, dlse, dweights, <same options>)``, any subset of
        these keywords, → (dq, dk, dv) or a mapping with keys among q, k, v, bias, sinks, gate.
        torch and JAX functions need none.
    rename : mapping, optional
        Its parameter names → npattn's, ``{"cap": "softcap"}``, or another of
        `npattn.problem.meanings.MEANINGS`. Names in `npattn.problem.foreign.FOREIGN` are
        understood without it.
    features : str or iterable of str, optional
        Its options, if the signature cannot be read or names too many; `causal` without a parameter
        is always on.
    framework : {"auto", "numpy", "torch", "jax"}, or Framework
    layout : {"BHTD", "BTHD"}, optional
        Of q, k, v, o, dout and their gradients; "BTHD" is for rank 4. Default: "BHTD", or that of
        `like`.
    like : str or Profile, optional
        System that it stands in for, one of `npattn.profiles.PROFILES`: its signature, layout and
        conventions hold where nothing else is said.
    quantized : {"fp8", "float8_e4m3fn", "float8_e5m2", "int8"}, optional
        Format of those of q, k, v and o that it has a factor for (``q_descale``, ``o_scale``, …),
        of those alone; "fp8" is "float8_e4m3fn". The others are in the dtype tested. It is asked
        for gradients if it has a `backward`: of q, k and v as they are meant, values · descale.
    rows : mapping, optional
        Number of rows in a block of "q", "k", "v" or "o", where its factors are of blocks.
    name : str, optional
        Its name in reports.
    spec, backward_spec : str, optional
        "module:function", "path.py:function" or a known name, from which scripts import it and
        its backward.

    Attributes
    ----------
    features : frozenset of str
        The options that it is tested on.
    untested : tuple of str
        Parameters that keep their default.
    reads : tuple of str
        How parameters with names of their own are understood: ``"attn_mask as mask and bias"``.
    conventions : Conventions
        Those of `like`, or that its names imply.
    first_result : array or None
        Result of the call that found out its framework, if one did.
    profile : Profile or None
        That of `like`.
    sizes : mapping of letter to sizes
        Sizes that it is judged at where nobody asks for others.
    rounding : str or None
        Rounding model where nobody names another, as of `Rounding.from_name`.

    Raises
    ------
    OptionError
        If `f` is no callable, cannot be called with q, k, v alone, or an argument is not legal; if
        there is no profile `like`.
    """

    rounding: str | None = None

    def __init__(
        self,
        f: Callable[..., Any],
        *,
        backward: Callable[..., Any] | None = None,
        rename: Mapping[str, str] | None = None,
        features: str | Iterable[str] | None = None,
        framework: str | Framework = "auto",
        layout: str | None = None,
        like: str | Profile | None = None,
        quantized: str | None = None,
        rows: Mapping[str, int] | None = None,
        name: str | None = None,
        spec: str | None = None,
        backward_spec: str | None = None,
    ) -> None:
        if not callable(f):
            raise OptionError(f"f is {f!r}, must be a callable f(q, k, v, ...)")
        if isinstance(f, type):
            with translate_errors():
                refuse_class(f, f.__qualname__, "pass an instance")
        if backward is not None and not callable(backward):
            raise OptionError(f"backward is {backward!r}, must be a callable or None")
        if layout not in (None, "BHTD", "BTHD"):
            raise OptionError(f"layout is {layout!r}, must be BHTD or BTHD")
        self.profile = find_profile(like) if isinstance(like, str) else like
        self.f, self.backward = f, backward
        self.layout = layout or (self.profile.layout if self.profile else "BHTD")
        self.spec, self.backward_spec = spec, backward_spec
        self.forward_only = self.slices = False
        self.gradients_raise = False  # until a probe finds that they do, whatever the problem
        self.name = name or spec or qualified_name(f)
        if rename is not None and not isinstance(rename, Mapping):
            example = '{"cap": "softcap"}'
            raise OptionError(f"rename is {rename!r}, must be a mapping, as in {example}")
        self.rename = dict(rename or {})
        features = (features,) if isinstance(features, str) else features
        in_bits = quantized and WORDS.get(quantized, quantized)
        signature = self.profile.signature_in(in_bits) if self.profile else None
        self.told_features = None if features is None else tuple(features)
        self.signature = read_signature(
            f, self.name, self.rename, self.told_features, signature, quantized is not None
        )
        self.features, self.returns = self.signature.features, self.signature.returns
        self.untested, self.reads = self.signature.untested, self.signature.reads
        self._read_forms(quantized, rows, layout)
        self.notes: dict[str, str] = {}
        self.sizes: Mapping[str, Sequence[int]] = {} if self.latent is None else self.latent.sizes
        implied = Conventions(causal="top_left") if self.signature.top_left else Conventions()
        self.conventions = self.profile.conventions if self.profile else implied
        self.backward_takes = frozenset(parameters(backward))
        self.backward_signature = read_backward(backward, self.signature)
        if self.quantized is not None and backward is not None:
            self.quantized.check_backward(self.backward_signature, self.signature)
        self.first_result: Array | None = None
        self.device: str | None = None
        if isinstance(framework, str):
            found = find_framework(f, self.name, framework, call=self._tiny_call)
            self.framework, self.first_result = found
        else:
            self.framework = framework
        if self.packing is not None:
            self.first_result = None  # of three arrays, which it does not take
        if self.storage is not None:
            self.storage = replace(self.storage, few_shapes=self.framework.compiles)

    @property
    def _tiny_call(self) -> Callable[[Framework], Framework] | None:
        """Call for `find_framework`; None if q, k and v are all that the implementation needs."""
        if self.takes_plain_arrays and not self.signature.required:
            return None

        def call(framework: Framework) -> Framework:
            self.framework = framework
            self.forward(Problem(*TINY.values()))
            return framework

        return call

    def __getstate__(self) -> dict[str, Any]:
        """Replace functions by a spec that finds them: processes may not import them by name."""
        left_out = ("f", "backward", "framework")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        state["framework"] = self.framework.name
        state["f"] = by_spec(self.f, self.spec)
        state["backward"] = by_spec(self.backward, self.backward_spec)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in ("f", "backward"):
            if isinstance(state[name], Spec):
                state[name] = load_callable(state[name].spec)
        self.__dict__.update(state)
        self.framework = choose_framework(self.f, self.name, state["framework"], self.device)

    @property
    def has_gradients(self) -> bool:
        """True if it has a backward, or its framework differentiates it."""
        return not (self.forward_only or self.gradients_raise) and (
            self.backward is not None or self.framework.differentiates
        )

    def ask_everything(self) -> None:
        """Ask for every result that the signature names, and for gradients."""
        self.returns, self.gradients_raise = self.signature.returns, False

    @property
    def first_calls(self) -> tuple[tuple[Problem, Cotangents, Results], ...]:
        """The call that found out its framework, if one did, as `Trial` has first calls.

        None of a function with defaults of its own: they had a part in it.
        """
        if self.first_result is None or self.signature.defaults:
            return ()
        layout = self.arrangement
        arrays = (x.swapaxes(-2, -3) if layout.swaps(n, 4) else x for n, x in TINY.items())
        problem = Problem(*arrays)
        result = layout.restore("o", self.first_result, problem, "attend")["o"]
        dout = np.ones((*problem.q.shape[:-1], problem.E), problem.q.dtype)
        return ((problem, Cotangents(dout, None), Results((("o", result),))),)

    @property
    def takes_dlse(self) -> bool:
        """True if it has gradients through lse."""
        theirs = self.signature.names.get("return_lse", "")
        detached = "without gradient" in self.signature.meanings.get(theirs, "")
        in_backward = self.backward is None or "dlse" in self.backward_takes
        return self.returns_lse and in_backward and not detached

    def on(self, device: str) -> None:
        """Put the arrays of later calls on a device of the framework."""
        self.framework = choose_framework(self.f, self.name, self.framework.name, device)
        self.device = device

    # --- calling ----------------------------------------------------------------------------------

    def _replace(self, **changes: Any) -> Implementation:
        """Return the same implementation with other attributes."""
        other = object.__new__(type(self))
        vars(other).update(vars(self) | changes)
        return other

    def without_leaves(self) -> Implementation:
        """Return the same implementation, which gets slices of the arrays that it takes first."""
        return self._replace(slices=True)

    def restrict(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
        """Give its storage the lengths and the page size that it takes; return the other sizes.

        Raises
        ------
        OptionError
            If there is a page size P, and it takes no pages, or P is not one integer > 0.
        """
        rest = {letter: values for letter, values in sizes.items() if letter != "P"}
        if self.storage is not None:
            self.storage = replace(self.storage, only={n: rest[n] for n in "TS" if n in rest})
        if "P" not in sizes:
            return rest
        if self.storage is None or self.storage.keys != "pages":
            raise OptionError(f"sizes has P={sizes['P']!r}, and {self.name} takes no pages")
        if len(sizes["P"]) != 1 or not isinstance(sizes["P"][0], int) or sizes["P"][0] < 1:
            raise OptionError(f"sizes has P={sizes['P']!r}, must be one page size, as in (16,)")
        self.storage = replace(self.storage, page_size=sizes["P"][0])
        return rest

    def with_storage(self, **changes: Any) -> Implementation:
        """Return the same implementation, whose sequences have other surroundings."""
        assert self.storage is not None
        return self._replace(storage=replace(self.storage, **changes))

    def with_packing(self, **changes: Any) -> Implementation:
        """Return the same implementation, taken to have its packed array in another order."""
        assert self.packing is not None
        return self._replace(packing=replace(self.packing, **changes))

    def with_layout(self, layout: str) -> Implementation:
        """Return the same implementation, taken to have a layout."""
        return self._replace(layout=layout)

    @contextmanager
    def _calling(self, problem: Problem, cotangents: Cotangents | None = None) -> Iterator[None]:
        """Note the problem on an error of the implementation; raise if the device is lost."""
        try:
            with self.framework.allowing(problem.q.dtype), note_problem(problem, cotangents):
                yield
        except (ImplementationError, RuntimeError) as err:
            if self.framework.device_works():
                raise
            raise NpattnError(
                f"the device is lost, every further call in this process fails: {err}, on "
                f"{problem}. Judge in a worker, which is restarted after such an error: pass "
                "isolate=True, or run npattn check without --sweep"
            ) from err

    def request(self, problem: Problem | None, keeps: bool = False) -> CallRequest:
        """Return a request for calls, to which arrays are added."""
        return CallRequest(self, problem, keeps)

    def _request(
        self, problem: Problem, view: str = "contiguous", inputs: dict[str, Any] | None = None
    ) -> CallRequest:
        """Return a request with the arrays of a problem, or with those of a rule."""
        request = self.request(problem, keeps=inputs is not None and self.keeps_arrays)
        arrays = self.inputs(problem, view) if inputs is None else inputs
        request.add_inputs(arrays, self.options(problem))
        return request

    def forward(
        self,
        problem: Problem,
        view: str = "contiguous",
        inputs: dict[str, Any] | None = None,
        *,
        before_reading: Callable[[], object] | None = None,
    ) -> Results:
        """Call it plainly and, if it returns lse or weights on request, once more with them.

        `before_reading` is called between the calls and the reading of their results.
        """
        with self._calling(problem):
            request = self._request(problem, view, inputs)
            calls = ((), self.returns) if self.returns else ((),)
            pairs: list[tuple[str, Any]] = []
            values = request.forward(calls, hold=before_reading is not None)
            for value, returns in zip(values, calls, strict=True):
                pairs += name_results(self.signature, value, returns).items()
            if before_reading is not None:
                before_reading()
            return self._read(pairs, problem)

    def gradients(
        self,
        problem: Problem,
        cotangents: Cotangents,
        view: str = "contiguous",
        *,
        bias_gradient: bool = True,
        inputs: dict[str, Any] | None = None,
        given: dict[str, Any] | None = None,
        meanwhile: Callable[[], object] | None = None,
        before_reading: Callable[[], object] | None = None,
    ) -> Results:
        """Return dq, dk, dv and, where it has them, dbias, dsinks and dgate.

        Parameters
        ----------
        problem : Problem
        cotangents : Cotangents
        view : str
            Memory layout of q, k, v and dout.
        bias_gradient : bool
            False asks autograd for no gradient of the bias.
        inputs, given : dict, optional
            Arrays of the framework, from `inputs` and `give_cotangents`; default: fresh ones.
        meanwhile : callable, optional
            Called between the forward and an explicit backward.
        before_reading : callable, optional
            Called between the backward and the reading of its results.
        """
        with self._calling(problem, cotangents):
            request = self._request(problem, view, inputs)
            arrays = self.give_cotangents(problem, cotangents, view) if given is None else given
            request.add_cotangents(arrays)
            hold = before_reading is not None
            if self.backward is None:
                without = () if bias_gradient else ("bias",)
                names = [n for n in LEAVES if n in request.inputs and n not in without]
                value = request.autograd(names, hold)
            else:
                value = request.backward(meanwhile, hold)
            if before_reading is not None:
                before_reading()
            if self.backward is not None:  # naming may fold the gradient of the bias
                value = self.name_gradients(request.fetch(value), request.inputs)
            return self._read(value.items(), problem)

    def gradients_twice(
        self, problem: Problem, cotangents: Cotangents, directions: Mapping[str, Array]
    ) -> Results:
        """Return the gradients of Σ directions · gradients, as its framework finds them.

        Parameters
        ----------
        problem : Problem
        cotangents : Cotangents
        directions : mapping
            Cotangents of the gradients, by input.

        Returns
        -------
        Results
            "second dq" and so on for each of these inputs, and "second dout".
        """
        with self._calling(problem, cotangents):
            request = self._request(problem)
            request.add_cotangents(self.give_cotangents(problem, cotangents))
            layout = self.arrangement
            second = {
                name: self.framework.give(lay_out(x, "contiguous", layout.swaps(name, x.ndim)))
                for name, x in directions.items()
            }
            found = request.autograd_twice(second)
            # They are laid out as first derivatives.
            pairs = [(f"d{n}", found[n]) for n in directions] + [("o", found["o"])]
            names = {"o": "second dout"}
            named = ((names.get(n, f"second {n}"), x) for n, x in self._read(pairs).pairs)
            return Results(tuple(named))

    def call(self, arrays: Mapping[str, Array], options: dict[str, Any]) -> Array:
        """Return o of arrays and options as they are, legal or not."""
        self.refuse_raw()
        request = self.request(None)
        tensors = {name: self.framework.give(array) for name, array in arrays.items()}
        request.add_inputs(tensors, options)
        (value,) = request.forward([()])
        return self._read(name_results(self.signature, value, ()).items())["o"]

    def raw(self, problem: Problem) -> Any:
        """Return o without copying it."""
        with self._calling(problem):
            (value,) = self._request(problem).forward([()], hold=True)
            return name_results(self.signature, value, ())["o"]

    def overwrite_results(
        self, problem: Problem, cotangents: Cotangents | None
    ) -> list[tuple[str, str]]:
        """Call it, and write to its results, as their owner may.

        Returns the names of results that share memory with another result or an input; nothing
        is written then. Without cotangents no gradients are asked; those that the framework finds
        are its own affair.
        """
        with self._calling(problem, cotangents):
            request = self._request(problem)
            if cotangents is not None and self.backward is not None:
                request.add_cotangents(self.give_cotangents(problem, cotangents))
            return request.overwrite()
