"""Implementation under test: its features, and calls of its forward and backward.

Its first three positional parameters are q, k, v; the options that it names are the features it is
tested on. Options arrive in their plain form: `mask` a boolean array, `bias` a float array,
`window` a pair, `causal` a bool; those at their default are not passed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any, cast

import numpy as np

from npattn.arrays import Array
from npattn.conventions import Conventions
from npattn.errors import NpattnError, OptionError
from npattn.meanings import LATENT
from npattn.options import OPTIONS
from npattn.problem import Cotangents, Problem
from npattn.profiles import Profile, find_profile
from npattn.testing.adapters.arguments import Sizes, form_arguments
from npattn.testing.adapters.base import (
    ImplementationError,
    ResultError,
    Results,
    catch_foreign,
    inexpressible,
    note_problem,
)
from npattn.testing.adapters.child import parameters, qualified_name, refuse_class
from npattn.testing.adapters.forms import Form, Layout
from npattn.testing.adapters.frameworks import (
    TINY,
    Framework,
    choose_framework,
    find_framework,
    translate_errors,
)
from npattn.testing.adapters.key_lists import read_key_lists
from npattn.testing.adapters.latent import read_latent
from npattn.testing.adapters.load import Spec, by_spec, hash_files, load_callable
from npattn.testing.adapters.output import QuantizedOutput
from npattn.testing.adapters.packing import read_packing
from npattn.testing.adapters.quantized import WORDS, read_quantized
from npattn.testing.adapters.request import LEAVES, Request, name_gradients, name_results
from npattn.testing.adapters.sequences import Sequences
from npattn.testing.adapters.signature import Signature, read_backward, read_signature
from npattn.testing.adapters.storage import UNSTORED, read_storage
from npattn.testing.adapters.untrusted import Untrusted
from npattn.testing.adapters.views import lay_out

__all__ = ["Framework", "Implementation", "ImplementationError", "ResultError"]

ARRAYS = ("q", "k", "v", *(o.name for o in OPTIONS.values() if o.kind == "array"))


INTERPRETERS = ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM")
"""Variables of the environment that have kernels interpreted."""


def find_interpreter(environment: Mapping[str, str]) -> str | None:
    """Return the variable by which kernels are interpreted, if one is on."""
    return next((n for n in INTERPRETERS if environment.get(n, "0") not in ("", "0")), None)


class Implementation:
    """A callable under test.

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
        `npattn.meanings.MEANINGS`. Names in `npattn.foreign.FOREIGN` are understood without it.
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
    packing : Packing or None
        Which of q, k and v it takes in one array.
    storage : Storage or None
        How it takes sequences of different lengths, if it has parameters for them.
    quantized : QuantizedInputs or None
        Which of q, k, v and o are of 8 bits, if one is.
    latent : LatentInputs or None
        How it takes parts of q and k, with values that are a part of the keys.
    key_lists : KeyLists or None
        How it takes masks as lists of keys.
    sizes : mapping of letter to sizes
        Sizes that it is judged at where nobody asks for others.
    rounding : str or None
        Rounding model where nobody names another, as of `Rounding.from_name`.
    untrusted : Untrusted or None
        Means against it, if nobody trusts it.
    notes : dict of str
        What it does that fails nothing, and a user wants to know.

    Raises
    ------
    OptionError
        If `f` is no callable, cannot be called with q, k, v alone, or an argument is not legal; if
        there is no profile `like`.
    """

    untrusted: Untrusted | None = None
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
        self.quantized = read_quantized(f, self.signature, self.name, quantized, rows)
        if self.quantized is not None:
            self.reads += (self.quantized.words,)
            self.forward_only = backward is None
        self.storage = read_storage(self.signature, self.name)
        if self.storage is not None and self.quantized is not None and self.quantized.rows:
            raise OptionError(
                f"{self.name} takes {self.storage.words} with factors of blocks of rows, which "
                "are not known there: factors of heads, tokens or whole arrays are"
            )
        self.packing = read_packing(self.signature.packed)
        if self.packing is not None and self.quantized is not None:
            raise OptionError(f"quantized= needs q, k and v apart, and {self.name} has one array")
        if self.packing is not None and self.storage is not None:
            paged = self.storage.keys == "pages" and self.packing.order == "parts"
            self.packing = replace(self.packing, pages=paged, stored=True)
        self.latent = read_latent(self.signature, self.name)
        self.key_lists = read_key_lists(self.signature, self.name)
        for heads_last in (self.packing, self.storage):
            if heads_last is not None and layout == "BHTD":
                raise OptionError(
                    f"layout is {layout!r}, must be BTHD: {self.name} takes {heads_last.words}"
                )
            self.layout = self.layout if heads_last is None else "BTHD"
        forms = (self.packing, self.storage, self.latent, self.key_lists)
        self.reads += tuple(form.words for form in forms if form is not None)
        if self.storage is not None:
            self.forward_only |= self.storage.appends  # nobody says what a written cache's is
            if features is None:
                unstored = [name for name in UNSTORED if name in self.features]
                self.features -= {*unstored}
                self.untested += tuple(f"{n}: not of sequences as they are" for n in unstored)
        beside = [x for x in (self.storage, self.quantized) if x is not None]
        if (self.latent or self.key_lists) and beside:
            raise OptionError(
                f"{self.name} takes {self.reads[-1]}, and {beside[0].words}: of these two the "
                "judge passes one; wrap it, with a default for the other"
            )
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
    def weights_storage(self) -> str:
        """Storage of P where no rounding model is declared."""
        return "input" if self.quantized is None else self.quantized.weights

    @property
    def output(self) -> QuantizedOutput | None:
        """How o is returned, if it is in 8 bits."""
        return None if self.quantized is None else self.quantized.output

    @property
    def backward_gets_bytes(self) -> bool:
        """True if its backward is given the o of its forward, and that is in 8 bits."""
        return self.output is not None and "out" in self.backward_takes

    def fit(self, problem: Problem) -> Problem:
        """Return the problem, with numbers that its inputs hold exactly: quantized, or tied.

        Where samples have lengths, hidden keys are where causal and windows do not count them.
        """
        mask_true = self.conventions.mask_true
        return reduce(lambda own, form: form.fit(own, mask_true), self.forms, problem)

    @property
    def source(self) -> str:
        """Hash of the files of its functions; "" if there are none."""
        return hash_files(self.f, self.backward)

    @property
    def is_isolated(self) -> bool:
        """True if it lives in another process."""
        return False

    def while_answering(self, work: Callable[[], object] | None) -> AbstractContextManager[None]:
        """Return a context in which `work` is done while another process, if any, answers."""
        return nullcontext()

    @property
    def keeps_arrays(self) -> bool:
        """True if arrays and results of one call are there in the next."""
        return True

    @property
    def interpreter(self) -> str | None:
        """Variable by which its kernels are interpreted, one at a time; None if there is none."""
        return find_interpreter(os.environ)

    @property
    def takes_threads(self) -> bool:
        """True if two threads may call it at once."""
        return True

    @property
    def versions(self) -> dict[str, str]:
        """Versions of what it needs, where they may differ from those here."""
        return {}

    @property
    def given_up_lines(self) -> list[str]:
        """Kinds of problems that are not asked again, a line each."""
        return []

    @property
    def given_up_kinds(self) -> dict[str, str]:
        """Kinds of problems that are not asked again, with the reason."""
        return {}

    def add_given_up(self, kinds: Mapping[str, str]) -> None:
        """Add kinds that the worker of another process is not asked again."""

    @property
    def first_calls(self) -> tuple[tuple[Problem, Cotangents, Results], ...]:
        """The call that found out its framework, if one did, as `Trial` has first calls."""
        if self.first_result is None:
            return ()
        layout = self.arrangement
        arrays = (x.swapaxes(-2, -3) if layout.swaps(n, 4) else x for n, x in TINY.items())
        problem = Problem(*arrays)
        result = layout.restore("o", self.first_result, problem, "attend")["o"]
        dout = np.ones((*problem.q.shape[:-1], problem.E), problem.q.dtype)
        return ((problem, Cotangents(dout, None), Results((("o", result),))),)

    @property
    def returns_lse(self) -> bool:
        """True if it has a parameter ``return_lse``."""
        return "return_lse" in self.returns

    @property
    def takes_dlse(self) -> bool:
        """True if it has gradients through lse."""
        theirs = self.signature.names.get("return_lse", "")
        detached = "without gradient" in self.signature.meanings.get(theirs, "")
        in_backward = self.backward is None or "dlse" in self.backward_takes
        return self.returns_lse and in_backward and not detached

    @property
    def returns_weights(self) -> bool:
        """True if it has a parameter ``return_weights``."""
        return "return_weights" in self.returns

    @property
    def returns_max_score(self) -> bool:
        """True if it has a parameter ``return_max_score``."""
        return "return_max_score" in self.returns

    def on(self, device: str) -> None:
        """Put the arrays of later calls on a device of the framework."""
        self.framework = choose_framework(self.f, self.name, self.framework.name, device)
        self.device = device

    # --- calling ----------------------------------------------------------------------------------

    def inputs(self, problem: Problem, view: str = "contiguous") -> dict[str, Any]:
        """Return fresh, writable arrays of the framework, by npattn's names."""
        given = {}
        with self.framework.allowing(problem.q.dtype):
            laid_out = self.storage is not None or self.packing is not None
            for name, array in self._store(problem).items():
                swaps = not laid_out and self.arrangement.swaps(name, problem.q.ndim)
                own = view if name in (*"qkv", *LATENT) else "contiguous"
                given[name] = self.framework.give(lay_out(array, own, swaps))
        return given

    @property
    def arrangement(self) -> Layout:
        """The layout of its arrays, where they are no stored sequences."""
        meanings = self.signature.meanings.values()
        output = "BTHD" if self.signature.module else self.layout
        one_head = self.latent is not None and self.latent.one_head
        heads_last = "lse (B, T, H) without gradient" in meanings
        return Layout(self.layout, output, heads_last, one_head)

    @property
    def forms(self) -> list[Form]:
        """The forms of its inputs, in the order in which a call takes them."""
        stored = self.arrangement if self.storage is None else Sequences(self.storage)
        forms = (self.latent, self.key_lists, self.quantized, stored, self.packing)
        return [form for form in forms if form is not None]

    def _store(self, problem: Problem) -> dict[str, Array]:
        """Return the arrays of a call in the forms that it takes."""
        whole = own = problem.materialise()
        arrays: Mapping[str, Array] = {n: x for n in ARRAYS if (x := getattr(own, n)) is not None}
        with note_problem(whole):
            for form in self.forms:
                own, arrays = form.store(own, arrays, self.conventions.mask_true)
        return {name: self._narrow(name, array) for name, array in arrays.items()}

    def _narrow(self, name: str, array: Array) -> Array:
        return array if self.quantized is None else self.quantized.narrow(name, array)

    def inputs_after(self, problem: Problem) -> dict[str, Array]:
        """Return what arrays hold after a call that writes to them, by npattn's names."""
        if self.storage is None or self.framework.immutable:
            return {}
        with note_problem(problem):
            arrays = Sequences(self.storage).store_after(problem, self.conventions.mask_true)
        return self.packing.pack(arrays) if self.packing and arrays else arrays

    def raw_inputs(self, problem: Problem) -> tuple[Array, Array, Array]:
        """Return q, k and v in npattn's layout, in the dtypes in which they are passed."""
        own = problem
        if self.quantized is not None:
            with note_problem(problem):
                own, _ = self.quantized.split(problem)
        q, k, v = (self._narrow(name, getattr(own, name)) for name in "qkv")
        return q, k, v

    def options(self, problem: Problem) -> dict[str, Any]:
        """Return the options that are not arrays and not at their default."""
        values = {o.name: getattr(problem, o.name) for o in OPTIONS.values() if o.kind != "array"}
        values["causal"] = bool(problem.causal)  # which alignment it means, the conventions say
        if problem.scale == (1 / math.sqrt(problem.D) if problem.D else 1.0):
            del values["scale"]
        given = {name: x for name, x in values.items() if x != OPTIONS[name].default}
        with note_problem(problem):
            if self.signature.always_causal and not given.pop("causal", False):
                raise inexpressible("a call without causal")
            for form in self.forms:
                given |= form.numbers(problem, self.conventions.mask_true)
        return given

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

    def request(self, problem: Problem | None, keeps: bool = False) -> Request:
        """Return a request for calls, to which arrays are added."""
        return Request(self, problem, keeps)

    def _request(
        self, problem: Problem, view: str = "contiguous", inputs: dict[str, Any] | None = None
    ) -> Request:
        """Return a request with the arrays of a problem, or with those of a rule."""
        request = self.request(problem, keeps=inputs is not None and self.keeps_arrays)
        own = self.inputs(problem, view) if inputs is None else inputs
        request.add_inputs(own, self.options(problem))
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
            own = self.give_cotangents(problem, cotangents, view) if given is None else given
            request.add_cotangents(own)
            hold = before_reading is not None
            if self.backward is None:
                value = request.autograd(self._leaves(request.inputs, bias_gradient), hold)
            else:
                value = request.backward(meanwhile, hold)
            if before_reading is not None:
                before_reading()
            if self.backward is not None:  # naming may fold the gradient of the bias
                value = self._name_gradients(request.fetch(value), request.inputs)
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

    @property
    def takes_plain_arrays(self) -> bool:
        """True if q, k and v are three arrays of the tested dtype, without sequences."""
        others = (self.storage, self.quantized, self.packing, self.latent, self.key_lists)
        return all(x is None for x in others)

    def refuse_raw(self) -> None:
        """Refuse q, k and v as they are, if it takes others in their place."""
        if not self.takes_plain_arrays:
            raise inexpressible(
                "arrays that are not stored as sequences, packed, quantized, parts or lists"
            )

    def call(self, arrays: Mapping[str, Array], options: dict[str, Any]) -> Array:
        """Return o of arrays and options as they are, legal or not."""
        self.refuse_raw()
        request = self.request(None)
        given = {name: self.framework.give(array) for name, array in arrays.items()}
        request.add_inputs(given, options)
        (value,) = request.forward([()])
        return self._read(name_results(self.signature, value, ()).items())["o"]

    def results_on_device(
        self, problem: Problem, inputs: Mapping[str, Any], cotangents: Mapping[str, Any] | None
    ) -> list[tuple[str, Any]]:
        """Return every result as an array of the framework, left on its device.

        Nothing is copied, but for the layout.

        Parameters
        ----------
        problem : Problem
            For its options.
        inputs : mapping
            Arrays of the framework by npattn's names, laid out as npattn has them.
        cotangents : mapping or None
            Cotangents of o and, if it returns it, lse; None asks for no gradients.

        Returns
        -------
        list of (name, array)
            A name comes once for each way to call it.
        """
        if self.storage is not None:
            raise OptionError("sweep on a device needs (B, H, T, D): judge sequences without it")
        if self.packing is not None:
            raise OptionError("sweep on a device needs q, k and v apart: judge without it")
        if self.quantized is not None:
            raise OptionError("sweep on a device has no quantized inputs: judge them without it")
        if self.latent is not None or self.key_lists is not None:
            raise OptionError("sweep on a device has no latent inputs or lists: leave it out")
        request = self.request(problem)
        layout = self.arrangement
        own = {n: layout.apply(n, x) for n, x in inputs.items()}
        request.add_inputs(own, self.options(problem))
        if cotangents is not None:
            given = {n: layout.apply(n, x) for n, x in cotangents.items()}
            given |= {"lse": layout.swap_lse(given["lse"])} if "lse" in given else {}
            request.add_cotangents(given)
        lse = ("return_lse",) if self.returns_lse else ()
        (value,) = request.forward([()])
        pairs = [*name_results(self.signature, value, ()).items()]
        more: dict[str, Any] = {}
        if cotangents is not None:
            value, more = request.everything(self._leaves(own))
            if self.backward is not None:
                more = self._name_gradients(more, own)
            more |= {n: x for n, x in value.items() if n in ("o", "lse")}
        if lse and "lse" not in more:
            (value,) = request.forward([lse])
            more |= name_results(self.signature, value, lse)
        with catch_foreign("raised"):
            self.framework.finish()
        every = [*pairs, *more.items()]
        return [(n, layout.restore(n, x, problem, "attend")[n]) for n, x in every]

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

    def give_cotangents(
        self, problem: Problem, cotangents: Cotangents, view: str = "contiguous"
    ) -> dict[str, Any]:
        """Return the cotangents of its results as arrays of the framework, by result."""
        own = replace(
            cotangents,
            dlse=cotangents.dlse if self.returns_lse else None,
            dweights=cotangents.dweights if self.returns_weights else None,
        )
        if self.storage is not None:
            with note_problem(problem):
                form, mask_true = Sequences(self.storage), self.conventions.mask_true
                stored = form.store_cotangents(problem, own, mask_true)
            swap = False
        else:
            layout = self.arrangement
            stored, swap = {"o": own.dout}, layout.swaps("o", problem.q.ndim)
            if own.dlse is not None:
                stored["lse"] = np.ascontiguousarray(layout.swap_lse(np.array(own.dlse)))
            if own.dweights is not None:
                stored["weights"] = np.array(own.dweights)
        stored["o"] = lay_out(stored["o"], view, swap)
        return {name: self.framework.give(x) for name, x in stored.items()}

    def _leaves(self, inputs: Mapping[str, Any], bias: bool = True) -> list[str]:
        """Return the names of the inputs whose gradients autograd is asked for."""
        return [n for n in LEAVES if n in inputs and (bias or n != "bias")]

    def _name_gradients(self, grads: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return what a backward returned, by npattn's names."""
        if isinstance(grads, Mapping):
            if self.latent is not None:
                theirs = self.latent.names(self.signature)
                grads = {theirs.get(name, name): x for name, x in grads.items()}
            return name_gradients(self.backward_signature, grads, inputs)
        names = [f"d{name}" for name in self.signature.leading]
        if len(names) == 1 and not isinstance(grads, (tuple, list)):
            grads = (grads,)
        if not isinstance(grads, (tuple, list)) or len(grads) != len(names):
            several = isinstance(grads, (tuple, list)) and len(grads) != 1
            count = f"{len(grads)} arrays" if several else "one result"
            wanted = f"({', '.join(names)}) or a mapping"
            raise ResultError(f"backward returned {count}, must return {wanted}")
        return dict(zip(names, grads, strict=True))

    def note_error_state(self, changed: bool) -> None:
        """Note that NumPy's error state is changed where it is loaded or called."""
        if changed:
            self.notes["error state"] = "changed by np.seterr, calls begin with NumPy's own"

    def keywords(
        self, signature: Signature, inputs: dict[str, Any], options: dict[str, Any]
    ) -> dict[str, Any]:
        """Return everything but q, k, v, by the names and in the forms of a signature."""
        values = {**inputs, **options}
        unasked = [n for n in values if n in OPTIONS and n not in self.features]
        assert not unasked, f"{self.name} has no {', '.join(unasked)}: the judge must not pass it"
        sizes, mask_true = self.sizes_of(inputs, options), self.conventions.mask_true
        return form_arguments(signature, values, sizes, self.framework, mask_true)

    def sizes_of(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Sizes:
        """Return the sizes of a call."""
        if self.latent is not None:
            return self.latent.call_sizes(inputs, self.layout)
        order = options.get("order of pages", "")
        heads_first = self.storage is not None and self.storage.heads_first
        heads_first = order == "HND" or (heads_first and not order)
        return Sizes.of(inputs, self.layout, self.storage is not None, self.packing, heads_first)

    def _read(self, pairs: Iterable[tuple[str, Any]], problem: Problem | None = None) -> Results:
        """Return results as npattn has them; without a problem, of plain arrays."""
        arrays: list[tuple[str, Any]] = []
        forms: list[Form] = [self.arrangement] if problem is None else self.forms[::-1]
        mask_true, own = self.conventions.mask_true, cast("Any", problem)
        for name, value in pairs:
            with catch_foreign(f"{name} could not be read:"):
                found: Mapping[str, Any] = {name: self.framework.take(value)}
                for form in forms:
                    parts = (form.restore(n, x, own, mask_true) for n, x in found.items())
                    found = {n: x for part in parts for n, x in part.items()}
                arrays += found.items()
        for form in forms if problem is not None else ():
            arrays = form.join(arrays, own)
        return Results(tuple(arrays))
