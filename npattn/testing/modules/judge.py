"""The judge of one module in one dtype: it learns what the module means, then compares."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.multihead import MultiHeadAttention
from npattn.positions.attention import Rotary
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.modules import Returned, TorchModule
from npattn.testing.bounds.rounding import unit_roundoff
from npattn.testing.comparison import Comparison, compare_result, compare_shape
from npattn.testing.modules.call import KINDS, Call, Form, describe_forms
from npattn.testing.modules.case import ModuleCase
from npattn.testing.modules.inside import SEEN, Inside, Traits, read_traits
from npattn.testing.modules.named import Named
from npattn.testing.modules.plan import (
    CHANGES,
    HIDES_QUERIES,
    SCALES,
    Change,
    Exact,
    Inputs,
    Plan,
    describe_unnamed,
)
from npattn.testing.modules.roles import Reading, find_roles

EMPTY_ROWS = (
    Conventions(),
    Conventions(empty_row="nan"),
    Conventions(hidden_fill=-1e9),
    Conventions(hidden_add=-1e4),
    Conventions(hidden_add="min"),
)
"""What a query that sees nothing gives, the meanings to try."""
LENGTHS: tuple[Any, ...] = (1, 2, 3, 5, 7, 13)
OWN_LENGTH: tuple[Any, ...] = ("T",)
"""Numbers of keys of their own: any, or that of queries."""
CHANGED = [
    *((c,) for c in CHANGES),
    *(p for p in itertools.combinations(CHANGES, 2) if p[0].kind != p[1].kind),
]
"""Changes to try, one and two at a time."""
TRY = ModuleCase(B=2, T=5, seed=1, recorded=False)
FILLS = ((0.0, False), (1.0, False), (64.0, False), (-np.inf, False), (0.0, True))
"""Numbers with which a parameter of one axis does nothing: a term, a factor, the argument of a
sigmoid or tanh, a sink. One of two axes becomes 0, or with True the unit matrix, which mixes no
heads."""


class Meaning(NamedTuple):
    """A module by one reading of its parameters."""

    reading: Reading
    plan: Plan  # the reference with what arguments and attributes name
    shown: dict[str, Any]  # fields of the plan that probes show to be others
    notes: list[str]  # how a report says what is named


class Judge:
    """A module with the reference that it is compared with."""

    def __init__(
        self, module: TorchModule, named: Named | None = None, deadline: float = math.inf
    ) -> None:
        self.module, self.call = module, Call.read(module)
        self.named = named or Named()
        declared = self.named.roles, self.named.num_heads, self.named.num_kv_heads
        self.notes: list[str] = []
        self.flat, readings, self.unread = find_roles(module, *declared)
        norms = {n.rpartition(".")[0] for n in self.unread if "norm" in module.holder(n).lower()}
        self.left_out = sorted(norms)
        if norms:
            module.stack.enter_context(module.leaving_out(self.left_out))
            self.notes.append(f"{', '.join(self.left_out)} not judged: replaced by the identity")
            self.flat, readings, self.unread = find_roles(module, *declared)
        width = {n: readings[0].indices["w" + n].shape[0] for n in "qkv"}
        if len(self.call.inputs) == 1 and len(set(width.values())) > 1:
            raise OptionError(
                f"{readings[0].name('wk')} takes {width['k']} channels, and queries come from "
                f"{width['q']}: keys that are projected twice (latent, MLA) are not read; judge "
                "the function of q, k and v inside with npattn.testing.check"
            )
        self.values = self.flat.join(module.parameters())
        self.answers: dict[ModuleCase, tuple[Comparison, ...]] = {}
        self.refused: list[str] = []
        # steps that the module replaces: with them the reference, `plan`, reproduces it
        self.changes: list[Change] = []
        self.unknown, self.is_scaled, self.factor, self.length = "", False, 1.0, 0
        # parameters and buffers that were given other values, since the reference does not know
        # what they do → how a report says that
        self.aside: dict[str, str] = {}
        self.key_lengths: tuple[Any, ...] = ()  # numbers of keys of their own that it takes
        self.wrong_keys = ""  # what it does with them instead, if anything else is seen
        self.cross_forms: list[Form] = []  # forms of masks that it takes where S ≠ T
        self.seen: dict[ModuleCase, tuple[Returned, Exact]] = {}
        self._learn(readings, deadline)

    # --- learn what it means ----------------------------------------------------------------------

    def _learn(self, readings: Sequence[Reading], deadline: float) -> None:
        """Find the reading, steps that are replaced, forms of masks, and empty rows."""
        self.named = self.named.fill(self.module, readings[0])
        self.notes += self.named.notes
        self.reading, self.plan = readings[0], Plan(readings[0].build(self.values))
        self.call.num_heads = self.reading.num_heads
        try:
            first = self.ask(self.probe)
        except ImplementationError:
            if self.named.length is None:
                raise
            self.length = self.named.length
        if self.module.batch_first is None:
            self._learn_axes()
        first = self.ask(self.probe)
        self.returns_weights = first.weights is not None
        if first.weights is not None and (first.weights < 0).any():
            self.module.returns_scores = True
            self.notes.append("returns scores in place of weights: their softmax is compared")
            first = self.ask(self.probe)
        self.repeats = _same(first, self.ask(self.probe))
        self.dropout_stays = False
        with ExitStack() as stack:
            if not self.repeats:
                stack.enter_context(self.module.watching_dropout(drops=False))
                first = self.ask(self.probe)
                self.dropout_stays = _same(first, self.ask(self.probe))
            inputs = self.inputs(self.probe)
            meanings = self._read(readings)
            found = self._find(meanings, inputs, first)
            if found is None and (self.unknown or self.is_scaled) and self._set_aside(readings):
                meanings, first = self._read(readings), self.ask(self.probe)
                found = self._find(meanings, inputs, first)
            found = found or self._explain(meanings, inputs, first, deadline)
            self.is_known = found is not None
            self.reading, self.plan, self.changes = found or (*meanings[0][:2], [])
            self.call.num_heads = self.reading.num_heads
            self._learn_lengths()
            self._learn_masks()

    def _read(self, readings: Sequence[Reading]) -> list[Meaning]:
        """Return the meanings of readings, with what probes show of each."""
        seen: dict[Any, Traits] = {}
        meanings = []
        for reading in readings:
            way = tuple(reading.indices["wq"].flat[:2])  # a transpose begins with others
            key = reading.num_heads, reading.num_kv_heads, reading.order, way
            traits = seen[key] = seen.get(key) or self._probe(reading)
            self.unknown = self.unknown or traits.unknown
            self.is_scaled = self.is_scaled or abs(traits.factor - 1) > SEEN
            rope, note = self.named.rope_of(traits.rotary)
            window, words = self.named.window_of(traits.window)
            for causal in (traits.causal, not traits.causal):  # a probe of a mistake may mislead
                plan = Plan(self._build(reading), causal=causal, scale=self.named.scale,
                            softcap=self.named.softcap, rope=rope, window=window)  # fmt: skip
                shown: dict[str, Any] = {"window": traits.window, "rope": traits.rotary}
                shown |= {"scale": traits.scale or None}
                shown = {n: x for n, x in shown.items() if x != getattr(plan, n)}
                meanings.append(Meaning(reading, plan, shown, [x for x in (note, words) if x]))
        return meanings

    def _find(
        self, meanings: Sequence[Meaning], inputs: Inputs, got: Returned
    ) -> tuple[Reading, Plan, list[Change]] | None:
        """Return the plan that gives a result as it is named, or with the least that probes show.

        What no argument and no attribute names is a change: it explains, and does not excuse.
        """
        for count, meaning in itertools.product(range(4), meanings):
            for names in itertools.combinations(meaning.shown, count):
                read, plan = {n: meaning.shown[n] for n in names}, meaning.plan
                # A mistake that has a name comes first.
                changes: list[Change | None] = [*SCALES] if names == ("scale",) else []
                for change in [*changes, describe_unnamed(read) if read else None]:
                    changed = plan if change is None else change.apply(plan)
                    if changed is not None and self._fits(changed, inputs, got):
                        self.notes += meaning.notes
                        return meaning.reading, plan, [] if change is None else [change]
        return None

    def _explain(
        self, meanings: Sequence[Meaning], inputs: Inputs, got: Returned, deadline: float
    ) -> tuple[Reading, Plan, list[Change]] | None:
        """Return the plan that gives a result with one or two changes, while there is time."""
        fits = [x for x in meanings if x.plan.forward(inputs).out.shape == got.out.shape]
        for changes, meaning in itertools.product(CHANGED, fits):
            if time.process_time() > deadline:
                return None
            changed = apply(meaning.plan, changes)
            if changed is not None and self._fits(changed, inputs, got):
                return meaning.reading, meaning.plan, list(changes)
        return None

    def _set_aside(self, readings: Sequence[Reading]) -> bool:
        """Give what is in no projection values with which probes show nothing that is unknown.

        First parameters alone, then buffers too. A gate without a bias halves, as W_v does then.
        Returns False if no values do that.
        """
        buffers, before = self.module.buffers(), self.values
        arrays = self.module.parameters() | buffers
        words = self.unknown or "a factor of the output"
        sets = [x for x in (self.unread, [*self.unread, *buffers]) if x]
        for names, (fill, mixes) in itertools.product(sets, FILLS):
            new = {n: np.full_like(arrays[n], fill if arrays[n].ndim == 1 else 0) for n in names}
            for x in new.values() if mixes else ():
                x[...] = np.eye(*x.shape) if x.ndim == 2 else x
            self.values = self.flat.join(arrays | new)
            self.module.write(new)
            traits = self._probe(readings[0])
            halves = (fill, mixes) == FILLS[0] and all(x.ndim > 1 for x in new.values())
            factor = next((f for f in (1.0, 0.5) if abs(traits.factor - f) < SEEN), 0.0)
            if not traits.unknown and (factor == 1 or (factor and halves)):
                words = "heads are mixed" if mixes else words
                self.aside = dict.fromkeys(names, f"{words}; the rest without {', '.join(names)}")
                self.factor, self.unknown = factor, ""
                return True
            self.module.write(arrays)
        self.values = before
        return False

    def _probe(self, reading: Reading) -> Traits:
        """Return what probes show by a reading; a factor of NaN if it does not take them."""
        plan = Plan(reading.build(self.values), scale=self.named.scale, softcap=self.named.softcap)
        try:
            with self.restoring(reading):
                traits = read_traits(self.inside(reading, plan))
            said = traits.rotary is not None and isinstance(self.named.rotary, Rotary)
            return traits._replace(unknown="") if said else traits
        except ImplementationError:
            return Traits(factor=math.nan)

    def _build(self, reading: Reading) -> MultiHeadAttention:
        """Return the reference of a reading, with its factor."""
        mha = reading.build(self.values)
        bv = None if mha.bv is None else self.factor * mha.bv
        return mha if self.factor == 1 else replace(mha, wv=self.factor * mha.wv, bv=bv)

    def _learn_axes(self) -> None:
        """Find out whether inputs are (T, B, C): a sample does not change others, a token does."""
        self.module.batch_first = True
        case = replace(self.probe, B=self.probe.T)
        inputs, before = self.inputs(case), self.ask(case)
        reaches = []
        for axis in (0, 1):
            moved = [None if x is None else x + (np.indices(x.shape)[axis] == 0).astype(x.dtype)
                     for x in inputs[:3]]  # fmt: skip
            assert moved[0] is not None
            after = self.call(case, Inputs(moved[0], moved[1], moved[2], None))
            differs = (before.out != after.out) & ~np.isnan(after.out)
            reaches.append(bool(np.moveaxis(differs, axis, 0)[1:].any()))
        if reaches == [True, False]:
            self.module.batch_first = False
            self.notes.append("inputs are (T, B, C)")

    # --- what selections show ---------------------------------------------------------------------

    def inside(self, reading: Reading, plan: Plan) -> Inside:
        """Return the module as a function; its weights are to be restored by `restoring`."""
        call = self.call
        needs = len(call.inputs) != 2 or call.module.arguments()[call.inputs[1]]
        if not needs and (self.wrong_keys or not self.key_lengths):
            call = replace(call, inputs=call.inputs[:1])
        D = reading.indices["wq"].shape[1] // reading.num_heads
        scale = D**-0.5 if plan.scale is None else plan.scale
        return Inside(self.module, call, self.flat, reading, self.values, scale, plan.rope,
                      self.length, self.factor)  # fmt: skip

    @contextmanager
    def restoring(self, reading: Reading) -> Iterator[None]:
        """Leave out norms of q and k for a while, and restore the weights at its end."""
        indices = [x.ravel() for role, x in reading.indices.items() if role.startswith("norm")]
        norms = {n.rpartition(".")[0] for n in self.flat.shapes for x in indices
                 if np.isin(self.flat.index(n), x).any()}  # fmt: skip
        try:
            with self.module.leaving_out(sorted(norms)):
                yield
        finally:
            self.module.write(self.flat.split(self.values))

    def _learn_lengths(self) -> None:
        """Find out which numbers of keys of their own it takes: any, that of queries, or none."""
        for lengths, words in ((LENGTHS, "S ≠ T"), (OWN_LENGTH, "keys of their own")):
            if not self.call.crosses or self.key_lengths:
                return
            try:
                case = replace(self.small, S=lengths[-1])
                inputs, got = self.inputs(case), self.ask(case)
                assert inputs.key is not None
                moved = inputs._replace(key=np.asarray(3 * inputs.key, self.module.array_dtype))
                query, key = self.call.inputs[:2]
                if _same(got, self.call(case, moved)):
                    self.wrong_keys = f"{key} has no effect: keys and values come from {query}"
                elif inputs.value is None and self._fits_after(inputs, got):
                    self.wrong_keys = f"keys of {key} come after those of {query}, which count too"
                self.key_lengths = lengths
            except ImplementationError as err:
                self.refused.append(f"{words}: {err}")

    def _fits_after(self, inputs: Inputs, got: Returned) -> bool:
        """Return True if the keys of a context stand behind those of the queries."""
        query, key = inputs.query, inputs.key
        if not self.is_known or key is None or query.shape[-1] != key.shape[-1]:
            return False
        joined = inputs._replace(key=np.concatenate((query, key), -2))
        return self._fits(self.own_plan, joined, got)

    def _learn_masks(self) -> None:
        """Find the forms in which it takes a mask, and what an empty row gives."""
        case = replace(self.probe, mask="random")
        plan = self.own_plan
        alone = replace(plan, conventions=replace(plan.conventions, causal="unless_masked"))
        for parameter, shapes in self.call.masks:
            errors, answers = [], []
            for kind, shape in itertools.product(KINDS, shapes):
                form = Form(parameter, kind, shape)
                try:
                    self.ask(case, form, record=True)  # a fast path may take what this does not
                    answers.append((form, self.ask(case, form)))
                except ImplementationError as err:
                    errors.append(f"{form}: {err}")
            fits = self._fits_masked if self.is_known else self._shows
            fitting = [f for f, got in answers if fits(plan, case, f, got)]
            if plan.causal and not fitting:
                fitting = [f for f, got in answers if fits(alone, case, f, got)]
                if fitting:
                    plan, self.plan = alone, replace(self.plan, conventions=alone.conventions)
            if not fitting:
                other = replace(plan, hides_queries=True)
                fitting = [f for f, got in answers if self._fits_masked(other, case, f, got)]
                self.changes += [HIDES_QUERIES] if fitting else []
            if not fitting and answers:  # the form that hides as many keys as it is told
                counts = [np.subtract(*map(np.sum, self._see(plan, case, f))) for f, _ in answers]
                fitting = [answers[int(np.argmin(np.abs(counts)))][0]]
            self.call.forms += fitting + self._suspect_forms(fitting, answers)
            if not answers:
                self.refused.append(f"{parameter}: {errors[0]}")
                self.call.forms += self._form_of_float32(parameter)
        self._learn_cross_forms()
        self._learn_empty_rows()

    def _learn_cross_forms(self) -> None:
        """Find the forms of masks that it takes where S ≠ T; one of queries may raise there."""
        lengths = self.key_lengths[-1:]
        for form, S in itertools.product(self.call.forms, lengths):
            try:
                self.ask(replace(self.small, S=S, mask="random"), form)
                self.cross_forms.append(form)
            except ImplementationError as err:
                self.refused.append(f"{form} where S ≠ T: {err}")

    def _fits_masked(self, plan: Plan, case: ModuleCase, form: Form, got: Returned) -> bool:
        return self._fits(plan, self.inputs(case, form), got)

    def _shows(self, plan: Plan, case: ModuleCase, form: Form, got: Returned) -> bool:
        """Return True if equal scores show the keys that a plan does, whatever else is wrong."""
        return np.array_equal(*self._see(plan, case, form))

    def _see(self, plan: Plan, case: ModuleCase, form: Form) -> tuple[Array, Array]:
        """Return the keys that equal scores show, and those that a plan does, (B, T, S)."""
        inputs = self.inputs(case, form)
        zeros, shown = np.zeros((case.B, 1)), np.asarray(plan.visible(inputs))
        expected = np.broadcast_to(shown, (case.B, 1, case.T, case.T))[:, 0]
        try:
            with self.restoring(self.reading):
                P = self.inside(self.reading, plan).weights(
                    (0,), zeros, zeros, case.T, visible=inputs.visible, form=form
                )
        except ImplementationError:
            return ~expected, expected
        return np.nan_to_num(P) > SEEN, expected

    def _form_of_float32(self, parameter: str) -> list[Form]:
        """Return a form that the module takes in float32, if all raise in a narrower dtype."""
        if self.module.dtype not in ("float16", "bfloat16"):
            return []
        other = Judge(self.module.copy("float32"), self.named)
        return [form for form in other.call.forms if form.parameter == parameter][:1]

    def _suspect_forms(
        self, fitting: Sequence[Form], answers: Sequence[tuple[Form, Returned]]
    ) -> list[Form]:
        """Return forms that do not fit, and have to; note those that may mean something else.

        A mask with four axes has one possible meaning: if one four-axis form of a kind works, the
        others must too.
        """
        kinds = {form.kind for form in fitting}
        first = answers[0][1].out.shape if answers else ()
        four_axes = {form.kind for form in fitting if form.axes == 4}
        more = [(f, got.out.shape) for f, got in answers if f not in fitting and f.kind in kinds]
        suspects = [f for f, shape in more
                    if f.kind in four_axes and f.axes == 4 and shape == first]  # fmt: skip
        if others := [f for f, _ in more if f not in suspects]:
            self.refused.append(f"{describe_forms(others)}: taken, and means something else")
        return suspects

    def _learn_empty_rows(self) -> None:
        """Find out what a query that sees nothing gives."""
        case = replace(self.probe, mask="empty")
        if not self.call.forms:
            return
        form = self.call.forms[0]
        try:
            got = self.ask(case, form)
        except ImplementationError as err:
            self.refused.append(f"a query that sees nothing: {err}")
            return
        for conventions in EMPTY_ROWS:
            conventions = replace(conventions, causal=self.plan.conventions.causal)
            plan = replace(self.own_plan, conventions=conventions)
            if self._fits(plan, self.inputs(case, form), got, finite=True):
                self.plan = replace(self.plan, conventions=conventions)
                return

    @property
    def appends(self) -> bool:
        """True if it has keys of its own."""
        return self.reading.add_zero_attn or "bias_k" in self.reading.indices

    @property
    def is_unknown(self) -> bool:
        """True if the reference does not fit, and a probe shows something that it does not know."""
        return not self.is_known and bool(self.unknown)

    @property
    def own_plan(self) -> Plan:
        """The reference with the steps that the module replaces."""
        return apply(self.plan, self.changes) or self.plan

    def _fits(self, plan: Plan, inputs: Inputs, got: Returned, finite: bool = False) -> bool:
        """Return True if a plan gives these results; with `finite` also which are finite."""
        exact = plan.results(inputs, self.module.array_dtype)
        values, out = exact.values, got.out.astype(float)
        if finite and not np.array_equal(np.isfinite(values["out"]), np.isfinite(out)):
            return False
        return all(c.passed for c in self._compare_forward(got, exact))

    @property
    def probe(self) -> ModuleCase:
        """A small case that it must take: self-attention, if its widths allow that."""
        return replace(self.small, S=self.lengths[0])

    @property
    def small(self) -> ModuleCase:
        """A case of self-attention."""
        return replace(TRY, T=self.length or TRY.T)

    @property
    def lengths(self) -> tuple[Any, ...]:
        """Numbers of keys of a plain case."""
        mha = self.plan.mha
        alike = mha.wq.shape[0] == mha.wk.shape[0] == mha.wv.shape[0]
        return (None,) if alike or not self.call.crosses else ("T",)

    # --- ask and compare --------------------------------------------------------------------------

    def form_of(self, case: ModuleCase) -> Form | None:
        """Return the form of the mask of a case."""
        return None if case.mask == "none" else self.call.forms[case.form]

    def inputs(self, case: ModuleCase, form: Form | None = None) -> Inputs:
        """Return the inputs of a case, in the dtype of the module."""
        mha, form = self.plan.mha, form or self.form_of(case)
        widths = {"query": mha.wq.shape[0], "key": mha.wk.shape[0], "value": mha.wv.shape[0]}
        inputs = case.inputs(widths, self.module.array_dtype, form.shape if form else "T S")
        shared = self.call.crosses and len(self.call.inputs) == 2
        return inputs._replace(value=None) if shared else inputs

    def ask(self, case: ModuleCase, form: Form | None = None, record: bool = False) -> Returned:
        """Return the results of the module; with `record` those that autograd has followed."""
        cotangents = (lambda out, weights: (out, weights)) if record else None
        return self.call(case, self.inputs(case, form), cotangents, form or self.form_of(case))

    def compare(self, case: ModuleCase) -> tuple[Comparison, ...]:
        """Compare every result of a case with the reference."""
        if case not in self.answers:
            self.answers[case] = self._compare(case)
        return self.answers[case]

    def _compare(self, case: ModuleCase) -> tuple[Comparison, ...]:
        """Return comparisons of the outputs, and of all gradients if the case is recorded."""
        inputs, form, dtype = self.inputs(case), self.form_of(case), self.module.array_dtype
        if not case.recorded:
            got, exact = self.call(case, inputs, None, form), self.plan.results(inputs, dtype)
            self.seen[case] = got, exact
            return self._compare_forward(got, exact)
        fwd = self.plan.forward(inputs)
        rng = np.random.default_rng((case.seed, 1))
        drawn: list[Array | None] = []

        def cotangents(out: Array, weights: Array | None) -> tuple[Array, Array | None]:
            dout, dweights = np.asarray(rng.standard_normal(out.shape), dtype), None
            scores = self.module.returns_scores
            if (
                weights is not None
                and not scores
                and weights.shape in _weight_shapes(fwd.weights.shape)
            ):
                dweights = np.asarray(rng.standard_normal(weights.shape), dtype)
            drawn.extend((dout, dweights))
            return dout, dweights

        got = self.call(case, inputs, cotangents, form)
        wrong = compare_shape("out", got.out, fwd.out.shape)
        if wrong is not None:
            return (wrong,)
        dout, dweights = (None if x is None else x.astype(float) for x in drawn)
        assert dout is not None
        spread = None if dweights is None else _spread(dweights, fwd.weights.shape)
        exact = self.plan.gradients(inputs, dtype, dout, spread)
        self.seen[case] = got, exact
        found = [compare_result(name, *x) for name, x in self.gradient_pairs(got, exact).items()]
        return (*self._compare_forward(got, exact), *found)

    def ask_restored(self, case: ModuleCase) -> tuple[Returned, Returned]:
        """Return the results of the module, and of a copy that has loaded its state dict."""
        other = replace(self.call, module=self.module.loaded_copy(np.random.default_rng(case.seed)))
        inputs, form = self.inputs(case), self.form_of(case)
        return self.call(case, inputs, None, form), other(case, inputs, None, form)

    def compare_training(self, case: ModuleCase) -> tuple[Comparison, ...]:
        """Compare results in training mode, for the weights that dropout keeps there.

        They may be returned before it or after it.
        """
        got, seen = self._train(case)
        inputs, dtype = self.inputs(case), self.module.array_dtype
        exact = self.plan.results(inputs, dtype)
        if not seen:
            return self._compare_forward(got, exact)
        (kept, rate), *_ = seen
        kept = kept.reshape(exact.values["weights"].shape)
        exact = self.plan.results(inputs, dtype, (kept, rate))
        found = self._compare_forward(got, exact)
        if all(c.passed for c in found):
            return found
        factor, two = kept / (1 - rate), 2 * unit_roundoff(dtype)  # a product and a quotient
        p, e = exact.values["weights"], exact.allowed["weights"]
        dropped = {"weights": p * factor}, {"weights": (e + two * p) * factor}
        pairs = zip(exact, dropped, strict=True)
        return self._compare_forward(got, Exact(*(x | y for x, y in pairs)))

    def _train(self, case: ModuleCase) -> tuple[Returned, list[tuple[Array, float]]]:
        """Return the results in training mode, and what dropout keeps."""
        self.module.train(True)
        try:
            with self.module.watching_dropout() as seen:
                return self.ask(case), seen
        finally:
            self.module.train(False)

    @property
    def training_reason(self) -> str:
        """Why training mode cannot be judged; "" if it can."""
        got, seen = self._train(self.probe)
        B, H, T = TRY.B, self.reading.num_heads, self.small.T
        shapes = [(B, H, T, T), (B * H, T, T)]
        if len(seen) > 1 or any(kept.shape not in shapes for kept, _ in seen):
            return "it drops other things than the weights"
        if not seen and not _same(got, self._train(self.probe)[0]):
            return "it drops by other means than torch.nn.functional.dropout"
        return ""

    def compare_mixed(self, case: ModuleCase) -> tuple[Comparison, ...]:
        """Compare results under torch.autocast, whose products take operands in bfloat16."""
        self.module.mixed = True
        try:
            got = self.ask(case)
        finally:
            self.module.mixed = False
        return compare_forward(got, self.plan.results(self.inputs(case), ml_dtypes.bfloat16,
                                                      mixed=True), ml_dtypes.bfloat16)  # fmt: skip

    def compare_compiled(self, case: ModuleCase) -> tuple[Comparison, ...]:
        """Compare every result of what torch.compile makes of the module."""
        with self.forgetting(), self.module.compiling():
            return self.compare(case)

    def _compare_forward(self, got: Returned, exact: Exact) -> tuple[Comparison, ...]:
        return compare_forward(got, exact, self.module.array_dtype)

    def gradient_pairs(self, got: Returned, exact: Exact) -> dict[str, tuple[Array, Array, Array]]:
        """Return gradients by name: got, exact, and how far they may differ.

        Those of inputs that another stands for, and of parameters in no projection, are left out.
        """
        pairs = {
            f"d{name}": (x, exact.values[role], exact.allowed[role])
            for (name, x), role in zip(got.inputs.items(), ("query", "key", "value"), strict=False)
            if x is not None
        }
        plan, values = self.plan, dict(exact.values)
        term = "norm_k_bias" if plan.mha.qk_norm else "bk"
        if plan.rope is None and not self.appends and term in values:
            values[term] = 0 * values[term]  # one term for all keys moves no weight
        errors = dict(exact.allowed)
        for x, name in itertools.product((values, errors), {"wv", "bv"} & values.keys()):
            x[name] = self.factor * x[name]
        want = self.flat.split(self.reading.scatter(values, self.flat.size))
        allowed = self.flat.split(self.reading.scatter(errors, self.flat.size))
        parameters = {n: g for n, g in got.parameters.items() if n not in self.unread}
        return pairs | {f"d{n}": (g, want[n], allowed[n]) for n, g in parameters.items()}

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Ask everything anew for a while."""
        kept = self.answers, self.seen
        self.answers, self.seen = {}, {}
        try:
            yield
        finally:
            self.answers, self.seen = kept


def begin(module: TorchModule, named: Named, deadline: float = math.inf) -> Judge:
    """Return the judge of a module. Raises OptionError if the module cannot be called at all."""
    try:
        return Judge(module, named, deadline)
    except ImplementationError as err:
        raise OptionError(
            f"{module.name} could not be called on x (2, 5, C): {err}; pass "
            "call=lambda m, x, mask: ... for a module with other inputs, or sizes= for one that "
            "takes other lengths alone"
        ) from err


def compare_forward(got: Returned, exact: Exact, dtype: Any) -> tuple[Comparison, ...]:
    """Compare out, and weights as they are returned: of each head, or averaged."""
    found = [compare_result("out", got.out, exact.values["out"], exact.allowed["out"])]
    if got.weights is not None:
        p, e = exact.values["weights"], exact.allowed["weights"]
        if got.weights.shape == _weight_shapes(p.shape)[1]:
            # A mean of H numbers rounds H + 1 times, and is stored.
            e = e.mean(-3) + (p.shape[-3] + 2) * unit_roundoff(dtype) * p.mean(-3)
            p = p.mean(-3)
        found.append(compare_result("weights", got.weights, p, e))
    return tuple(found)


def apply(plan: Plan, changes: Sequence[Change]) -> Plan | None:
    """Return the plan with steps replaced; None where one replaces nothing."""
    changed: Plan | None = plan
    for change in changes:
        changed = None if changed is None else change.apply(changed)
    return changed


def _same(one: Returned, other: Returned) -> bool:
    pairs = ((one.out, other.out), (one.weights, other.weights))
    return all(x is None or y is None or np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def _weight_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that weights may have: of each head, or averaged."""
    return shape, (*shape[:-3], *shape[-2:])


def _spread(dweights: Array, shape: tuple[int, ...]) -> Array:
    """Return the cotangent of weights of each head, for that of weights as they are returned."""
    if dweights.shape == shape:
        return dweights
    return np.broadcast_to(dweights[..., None, :, :] / shape[-3], shape)
