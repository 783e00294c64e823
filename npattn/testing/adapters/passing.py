"""How an implementation takes its arrays and options, and how its results are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, cast

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.problem.meanings import LATENT
from npattn.problem.options import OPTIONS, default_scale
from npattn.testing.adapters.arguments import Sizes, form_arguments
from npattn.testing.adapters.base import (
    ResultError,
    Results,
    catch_foreign,
    inexpressible,
    note_problem,
)
from npattn.testing.adapters.forms import Form, Layout
from npattn.testing.adapters.frameworks import Framework
from npattn.testing.adapters.key_lists import read_key_lists
from npattn.testing.adapters.latent import read_latent
from npattn.testing.adapters.packing import read_packing
from npattn.testing.adapters.quantized import QuantizedOutput, read_quantized
from npattn.testing.adapters.request import name_gradients
from npattn.testing.adapters.sequences import Sequences
from npattn.testing.adapters.signature import Signature
from npattn.testing.adapters.storage import UNSTORED, read_storage
from npattn.testing.adapters.views import lay_out

ARRAYS = ("q", "k", "v", *(o.name for o in OPTIONS.values() if o.kind == "array"))


class Passing:
    """How an implementation takes its arrays and options."""

    f: Callable[..., Any]
    backward: Callable[..., Any] | None
    name: str
    layout: str
    framework: Framework
    conventions: Conventions
    signature: Signature
    backward_signature: Signature
    backward_takes: frozenset[str]
    told_features: tuple[str, ...] | None
    features: frozenset[str]
    untested: tuple[str, ...]
    reads: tuple[str, ...]
    returns: tuple[str, ...]
    forward_only: bool

    def _read_forms(
        self, quantized: str | None, rows: Mapping[str, int] | None, layout: str | None
    ) -> None:
        """Read each form of inputs from the signature, refuse pairs, and note what follows.

        Raises OptionError if it has two forms of which the judge passes one.
        """
        self.quantized = read_quantized(self.f, self.signature, self.name, quantized, rows)
        self.storage = read_storage(self.signature, self.name)
        self.packing = read_packing(self.signature.packed)
        self.latent = read_latent(self.signature, self.name)
        self.key_lists = read_key_lists(self.signature, self.name)
        if self.packing is not None and self.storage is not None:
            paged = self.storage.keys == "pages" and self.packing.order == "parts"
            self.packing = replace(self.packing, pages=paged, stored=True)
        self._refuse_pairs(layout)

        forms = (self.quantized, self.packing, self.storage, self.latent, self.key_lists)
        self.reads += tuple(form.words for form in forms if form is not None)
        if self.quantized is not None:
            self.forward_only = self.backward is None
        if self.packing is not None or self.storage is not None:
            self.layout = "BTHD"
        if self.storage is not None:
            self.forward_only |= self.storage.appends  # no gradient of a written cache is defined
            if self.told_features is None:
                unstored = [name for name in UNSTORED if name in self.features]
                self.features -= {*unstored}
                self.untested += tuple(f"{n}: not of sequences as they are" for n in unstored)

    def _refuse_pairs(self, layout: str | None) -> None:
        """Raise OptionError for two forms of which the judge passes one, or for their layout."""
        name, packing, storage, quantized = self.name, self.packing, self.storage, self.quantized
        if storage is not None and quantized is not None and quantized.rows:
            raise OptionError(
                f"{name} takes {storage.words} with factors of blocks of rows, which are not known "
                "there: factors of heads, tokens or whole arrays are"
            )
        if packing is not None and quantized is not None:
            raise OptionError(f"quantized= needs q, k and v apart, and {name} has one array")
        for heads_last in (packing, storage):
            if heads_last is not None and layout == "BHTD":
                raise OptionError(
                    f"layout is {layout!r}, must be BTHD: {name} takes {heads_last.words}"
                )
        for by_keys in (self.key_lists, self.latent):
            for other in (storage, quantized):
                if by_keys is not None and other is not None:
                    raise OptionError(
                        f"{name} takes {by_keys.words}, and {other.words}: of these two the judge "
                        "passes one; wrap it, with a default for the other"
                    )

    @property
    def returns_lse(self) -> bool:
        """True if it has a parameter ``return_lse``."""
        return "return_lse" in self.returns

    @property
    def returns_weights(self) -> bool:
        """True if it has a parameter ``return_weights``."""
        return "return_weights" in self.returns

    @property
    def returns_max_score(self) -> bool:
        """True if it has a parameter ``return_max_score``."""
        return "return_max_score" in self.returns

    @property
    def forms(self) -> list[Form]:
        """The forms of its inputs, in the order in which a call takes them."""
        stored = self.arrangement if self.storage is None else Sequences(self.storage)
        forms = (self.latent, self.key_lists, self.quantized, stored, self.packing)
        return [form for form in forms if form is not None]

    @property
    def arrangement(self) -> Layout:
        """The layout of its arrays, where they are no stored sequences."""
        meanings = self.signature.meanings.values()
        output = "BTHD" if self.signature.module else self.layout
        one_head = self.latent is not None and self.latent.one_head
        heads_last = "lse (B, T, H) without gradient" in meanings
        return Layout(self.layout, output, heads_last, one_head)

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

    @property
    def weights_storage(self) -> str:
        """Storage of P where no rounding model is declared."""
        return "input" if self.quantized is None else self.quantized.weights

    @property
    def output(self) -> QuantizedOutput | None:
        """How o is returned, if it is in 8 bits."""
        return None if self.quantized is None else self.quantized.output

    def fit(self, problem: Problem) -> Problem:
        """Return the problem, with numbers that its inputs hold exactly: quantized, or tied.

        Where samples have lengths, hidden keys are where causal and windows do not count them.
        """
        mask_true = self.conventions.mask_true
        return reduce(lambda fitted, form: form.fit(fitted, mask_true), self.forms, problem)

    def inputs(self, problem: Problem, view: str = "contiguous") -> dict[str, Any]:
        """Return fresh, writable arrays of the framework, by npattn's names."""
        tensors = {}
        with self.framework.allowing(problem.q.dtype):
            laid_out = self.storage is not None or self.packing is not None
            for name, array in self._store(problem).items():
                swaps = not laid_out and self.arrangement.swaps(name, problem.q.ndim)
                array_view = view if name in (*"qkv", *LATENT) else "contiguous"
                tensors[name] = self.framework.give(lay_out(array, array_view, swaps))
        return tensors

    def _store(self, problem: Problem) -> dict[str, Array]:
        """Return the arrays of a call in the forms that it takes."""
        asked = stored = problem.materialise()
        arrays: Mapping[str, Array] = {
            n: x for n in ARRAYS if (x := getattr(stored, n)) is not None
        }
        with note_problem(asked):
            for form in self.forms:
                stored, arrays = form.store(stored, arrays, self.conventions.mask_true)
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
        split_problem = problem
        if self.quantized is not None:
            with note_problem(problem):
                split_problem, _ = self.quantized.split(problem)
        q, k, v = (self._narrow(name, getattr(split_problem, name)) for name in "qkv")
        return q, k, v

    def options(self, problem: Problem) -> dict[str, Any]:
        """Return the options that are not arrays and not at their default."""
        values = {o.name: getattr(problem, o.name) for o in OPTIONS.values() if o.kind != "array"}
        values["causal"] = bool(problem.causal)  # which alignment it means, the conventions say
        if problem.scale == default_scale(problem.D)[0]:
            del values["scale"]
        passed = {name: x for name, x in values.items() if x != OPTIONS[name].default}
        with note_problem(problem):
            if self.signature.always_causal and not passed.pop("causal", False):
                raise inexpressible("a call without causal")
            for form in self.forms:
                passed |= form.numbers(problem, self.conventions.mask_true)
        return passed

    def give_cotangents(
        self, problem: Problem, cotangents: Cotangents, view: str = "contiguous"
    ) -> dict[str, Any]:
        """Return the cotangents of its results as arrays of the framework, by result."""
        asked = replace(
            cotangents,
            dlse=cotangents.dlse if self.returns_lse else None,
            dweights=cotangents.dweights if self.returns_weights else None,
        )
        if self.storage is not None:
            with note_problem(problem):
                form, mask_true = Sequences(self.storage), self.conventions.mask_true
                stored = form.store_cotangents(problem, asked, mask_true)
            swap = False
        else:
            layout = self.arrangement
            stored, swap = {"o": asked.dout}, layout.swaps("o", problem.q.ndim)
            if asked.dlse is not None:
                stored["lse"] = np.ascontiguousarray(layout.swap_lse(np.array(asked.dlse)))
            if asked.dweights is not None:
                stored["weights"] = np.array(asked.dweights)
        stored["o"] = lay_out(stored["o"], view, swap)
        return {name: self.framework.give(x) for name, x in stored.items()}

    def keywords(
        self,
        signature: Signature,
        inputs: dict[str, Any],
        options: dict[str, Any],
        sizes: Sizes | Problem,
    ) -> dict[str, Any]:
        """Return everything but q, k, v, by the names and in the forms of a signature."""
        values = {**inputs, **options}
        unasked = [n for n in values if n in OPTIONS and n not in self.features]
        assert not unasked, f"{self.name} has no {', '.join(unasked)}: the judge must not pass it"
        return form_arguments(signature, values, sizes, self.framework, self.conventions.mask_true)

    def _read(self, pairs: Iterable[tuple[str, Any]], problem: Problem | None = None) -> Results:
        """Return results as npattn has them; without a problem, of plain arrays."""
        arrays: list[tuple[str, Any]] = []
        forms: list[Form] = [self.arrangement] if problem is None else self.forms[::-1]
        mask_true, any_problem = self.conventions.mask_true, cast("Any", problem)
        for name, value in pairs:
            with catch_foreign(f"{name} could not be read:"):
                found: Mapping[str, Any] = {name: self.framework.take(value)}
                for form in forms:
                    parts = (form.restore(n, x, any_problem, mask_true) for n, x in found.items())
                    found = {n: x for part in parts for n, x in part.items()}
                arrays += found.items()
        for form in forms if problem is not None else ():
            arrays = form.join(arrays, any_problem)
        return Results(tuple(arrays))

    def name_gradients(self, grads: Any, inputs: dict[str, Any]) -> dict[str, Any]:
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
