"""What a module computes: the reference, and the same with a step replaced, with tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from npattn.conventions import Conventions
from npattn.multihead import MultiHeadAttention
from npattn.multihead.multihead import MultiHeadForward
from npattn.multihead.projections import linear, merge, split
from npattn.positions.attention import Rotary
from npattn.problem.arrays import Array
from npattn.testing.bounds.multihead import MultiHeadBound, multihead_tolerance


class Inputs(NamedTuple):
    """Exact inputs of a call; `visible` (..., T, S) is True where a query may look."""

    query: Array  # (B, T, in_q)
    key: Array | None  # (B, S, in_k), None: query
    value: Array | None  # (B, S, in_v), None: key
    visible: Array | None


class Exact(NamedTuple):
    """Exact value and tolerance of each result by name, "out" and "weights" first."""

    values: dict[str, Array]
    allowed: dict[str, Array]


@dataclass(frozen=True, eq=False)
class Plan:
    """A computation: `MultiHeadAttention`, and how its steps differ from it."""

    mha: MultiHeadAttention
    # what a query that sees nothing gives
    conventions: Conventions = field(default_factory=Conventions)
    causal: bool = False  # it hides later keys without being told
    scale: float | None = None  # None: 1/√D
    # keys that a query sees beside its own, always
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    rope: Rotary | None = None  # turn of queries and keys
    hides_queries: bool = False  # the output of tokens that a mask hides as keys is 0
    softmax: Literal["keys", "queries"] = "keys"
    # "reshape" forgets to move the head axis after the split
    split: Literal["axis", "reshape"] = "axis"
    residual: bool = False  # the query is added to the output

    def visible(self, inputs: Inputs) -> Array | None:
        """Return what queries may see, causal and window included."""
        visible = inputs.visible
        key = inputs.query if inputs.key is None else inputs.key
        offset = np.arange(key.shape[-2]) - np.arange(inputs.query.shape[-2])[:, None]
        left_keys, right_keys = self.window or (None, None)
        if self.causal and (self.conventions.causal != "unless_masked" or visible is None):
            right_keys = 0
        for hidden in (None if left_keys is None else offset < -left_keys,
                       None if right_keys is None else offset > right_keys):  # fmt: skip
            if hidden is not None:
                visible = ~hidden if visible is None else visible & ~hidden
        return visible

    @property
    def options(self) -> dict[str, Any]:
        """Options of `MultiHeadAttention.forward`, but for the mask."""
        names = ("scale", "softcap", "rope", "conventions")
        return {n: getattr(self, n) for n in names}

    def forward(self, inputs: Inputs) -> MultiHeadForward:
        """Return the forward of the reference: of a plan without a replaced step."""
        return self.mha.forward(*inputs[:3], self.visible(inputs), **self.options)

    def gradients(self, inputs: Inputs, dtype: Any, dout: Array, dweights: Array | None) -> Exact:
        """Return results and gradients of the reference, by the names of `MultiHeadGradients`."""
        fwd = self.forward(inputs)
        grads = self.mha.backward(fwd, dout, None, dweights)
        allowed = multihead_tolerance(fwd, dtype, dout=dout, dweights=dweights)
        values = {"out": fwd.out, "weights": fwd.weights}
        return Exact({n: values[n] if n in values else getattr(grads, n) for n in allowed}, allowed)

    def results(
        self,
        inputs: Inputs,
        dtype: Any,
        kept: tuple[Array, float] | None = None,
        mixed: bool = False,
    ) -> Exact:
        """Return out and weights with their tolerances.

        `kept` is True where dropout keeps a weight, with its rate. In `mixed` precision inputs and
        weights are wider than `dtype`, and rounded to it for products.
        """
        if self.softmax == "queries":
            exact = self._over_queries(inputs, dtype)
        else:
            exact = self._over_keys(inputs, dtype, kept, mixed)
        if self.residual:
            exact.values["out"] = exact.values["out"] + inputs.query
        return exact

    def _over_keys(
        self, inputs: Inputs, dtype: Any, kept: tuple[Array, float] | None, mixed: bool
    ) -> Exact:
        """Return out (B, T, C) and weights (B, H, T, S) of a softmax over keys."""
        mha, arrays, errors = self.mha, inputs._asdict(), None
        if self.split == "reshape":
            mha, heads, errors = self._rearrange(inputs, dtype)
            arrays |= heads
        options = self.options
        if kept is not None:
            options |= {"dropout_mask": kept[0], "dropout_rate": kept[1]}
        fwd = mha.forward(
            arrays["query"], arrays["key"], arrays["value"], self.visible(inputs), **options
        )
        allowed = multihead_tolerance(fwd, dtype, errors=errors, mixed=mixed)
        out, shown = fwd.out, inputs.visible
        if self.hides_queries and shown is not None and shown.shape[-2:] == (1, out.shape[-2]):
            out = out * np.swapaxes(shown[..., 0, :, :], -1, -2)
        return Exact({"out": out, "weights": fwd.weights}, allowed)

    def _rearrange(
        self, inputs: Inputs, dtype: Any
    ) -> tuple[MultiHeadAttention, dict[str, Array], dict[str, Array]]:
        """Return a module whose inputs are projections, with heads that are rows in a row."""
        mha = self.mha
        bound = MultiHeadBound(mha.forward(*inputs[:3]), dtype)
        rows, errors = {}, {}
        weights: dict[str, Any] = {}
        for name, x in bound.steps.inputs.items():
            letter, K = name[0], mha.num_kv_heads or mha.num_heads
            heads = mha.num_heads if name == "query" else K
            w, b = getattr(mha, "w" + letter), getattr(mha, "b" + letter)
            y, e = linear(x, w, b), bound.linear(x, 0.0, w, b)
            *lead, T, width = y.shape
            rows[name] = merge(y.reshape(*lead, heads, T, -1), "concat")
            errors[name] = merge(e.reshape(*lead, heads, T, -1), "concat")
            weights |= {"w" + letter: np.eye(width), "b" + letter: None}
        return replace(mha, **weights), rows, errors

    def _over_queries(self, inputs: Inputs, dtype: np.dtype) -> Exact:
        """A softmax over queries is attention of keys to queries, its weights transposed."""
        query, key, value, _ = inputs
        mha, visible = self.mha, self.visible(inputs)
        key = query if key is None else key
        value = key if value is None else value
        turned = replace(
            mha, wq=mha.wk, bq=mha.bk, wk=mha.wq, bk=mha.bq, wv=mha.wq, bv=mha.bq, wo=None, bo=None
        )
        hides = None if visible is None else np.swapaxes(visible, -1, -2)
        fwd = turned.forward(
            key, query, query, hides, scale=self.scale, conventions=self.conventions
        )
        p, ep = (np.swapaxes(x, -1, -2)
                 for x in (fwd.weights, multihead_tolerance(fwd, dtype)["weights"]))  # fmt: skip
        bound = MultiHeadBound(mha.forward(query, key, value), dtype)
        v = split(linear(value, mha.wv, mha.bv), mha.num_heads)
        ev = split(bound.linear(value, 0.0, mha.wv, mha.bv), mha.num_heads)
        sums = bound.gamma(p.shape[-1] + 3) + bound.unit.low.u
        eo = merge(ep @ abs(v) + (p + ep) @ ev + sums * (p @ abs(v)), mha.merge)
        merged = merge(p @ v, mha.merge)
        if mha.wo is None:
            return Exact({"out": merged, "weights": p}, {"out": eo, "weights": ep})
        out, allowed = linear(merged, mha.wo, mha.bo), bound.linear(merged, eo, mha.wo, mha.bo)
        return Exact({"out": out, "weights": p}, {"out": allowed, "weights": ep})


# --- a step replaced ------------------------------------------------------------------------------


class Change(NamedTuple):
    """A mistake: one step of the computation, replaced."""

    text: str  # the cause in words; {H}, {D}, {W} and {T} are sizes: W = H·D
    step: str  # with `amount` and `where`, as of a `Cause`
    kind: str  # changes of one kind exclude each other
    # plan → plan with the step replaced; None where that is no other computation
    apply: Callable[[Plan], Plan | None]
    amount: str = ""
    where: str = "everywhere"


def describe_unnamed(shown: dict[str, Any]) -> Change:
    """Return a window, positions or a scale that neither an argument nor an attribute names."""
    texts, cures = [], []
    if (window := shown.get("window")) is not None:
        texts.append("keys outside a window are hidden")
        cures.append(f"window={window}")
    if (rope := shown.get("rope")) is not None:
        texts.append("rotary positions have another base")
        cures.append(f"rotary={rope.base:g}")
    if (scale := shown.get("scale")) is not None:
        texts.append("scores have another scale than 1/√D")
        cures.append(f"scale={scale:.9g}")
    text = f"{' and '.join(texts)}, as nothing names: passes with {', '.join(cures)}"
    step = "visible" if "window" in shown else "s"
    return Change(text, step, "option", lambda plan: replace(plan, **shown))


def _scale_by(factor: Callable[[int, int], float]) -> Callable[[Plan], Plan | None]:
    """Replace the scale by a function of D and H."""

    def apply(plan: Plan) -> Plan | None:
        D, H = plan.mha.head_size, plan.mha.num_heads
        scale = factor(D, H)
        return None if math.isclose(scale, D**-0.5) else replace(plan, scale=scale)

    return apply


def _weights(**names: str | None) -> Callable[[Plan], Plan | None]:
    """Replace parameters by others, by name: "wq", or "wq.T" for the transpose."""

    def read(mha: MultiHeadAttention, name: str | None) -> Any:
        attribute, _, turns = (name or "").partition(".")
        array = getattr(mha, attribute) if attribute else None
        return array.T if turns and array is not None else array

    def apply(plan: Plan) -> Plan | None:
        mha = plan.mha
        new: dict[str, Any] = {n: read(mha, other) for n, other in names.items()}
        pairs = [(x, getattr(mha, n)) for n, x in new.items()]
        fits = all(x is None or y is None or x.shape == y.shape for x, y in pairs)
        changes = any(x is not y for x, y in pairs)
        return replace(plan, mha=replace(mha, **new)) if changes and fits else None

    return apply


def _set(merge: Any = None, **fields: Any) -> Callable[[Plan], Plan | None]:
    """Set fields of the plan, and how heads are merged; of one head there is nothing to move."""

    def apply(plan: Plan) -> Plan | None:
        if plan.mha.num_heads == 1 and (merge or "split" in fields):
            return None
        mha = replace(plan.mha, merge=merge) if merge else plan.mha
        return replace(plan, mha=mha, **fields)

    return apply


def _add_query(plan: Plan) -> Plan | None:
    mha = plan.mha
    wide = mha.num_heads * mha.value_size if mha.wo is None else mha.wo.shape[1]
    return replace(plan, residual=True) if wide == mha.wq.shape[0] else None


def _normalise_queries(plan: Plan) -> Plan | None:
    mha = plan.mha
    shared = mha.num_kv_heads != mha.num_heads or mha.bias_k is not None or mha.add_zero_attn
    others = plan.split != "axis" or plan.rope is not None or mha.qk_norm is not None
    return None if shared or others else replace(plan, softmax="queries")


def _projection(whose: str, by: str) -> Change:
    words = {"q": "queries", "k": "keys", "v": "values"}
    text = f"{words[whose]} are projected by {{w{by}}}, which is that of {words[by]}"
    change = _weights(**{f"w{whose}": f"w{by}", f"b{whose}": f"b{by}"})
    return Change(text, "o" if whose == "v" else "s", f"w{whose}", change, f"by W of {words[by]}")


SCALES = tuple(
    Change(f"scores are {text}", "s", "scale", _scale_by(factor), amount)
    for text, amount, factor in (
        ("divided by √(H·D) = √{W}, the whole width, instead of √D = √{D}", "× 1/√H",
         lambda D, H: (H * D) ** -0.5),
        ("not divided by √D = √{D}", "× √D", lambda D, H: 1.0),
        ("divided by D = {D} instead of √D", "× 1/√D", lambda D, H: 1 / D),
        ("multiplied by √D = √{D} instead of divided by it", "× D", lambda D, H: D**0.5),
        ("divided by √H = √{H}, the number of heads, instead of √D = √{D}", "× √(D/H)",
         lambda D, H: H**-0.5),
    )
)  # fmt: skip
"""Scales that have a name."""
HIDES_QUERIES = Change(
    "the mask sets the output of hidden tokens to 0 too, as queries", "o", "mask",
    _set(hides_queries=True), "× 0", "where the query is hidden as a key",
)  # fmt: skip
MOVED = "of another place"
CHANGES = (
    *SCALES,
    Change("heads are merged without moving the head axis back", "o", "merge",
           _set(merge="reshape"), MOVED),
    Change("heads are split by a reshape that does not move the head axis", "layout", "split",
           _set(split="reshape"), MOVED),
    Change("heads are split by a reshape that does not move the head axis, and merged likewise",
           "layout", "split", _set(merge="reshape", split="reshape"), MOVED),
    Change("the softmax runs over queries instead of keys", "p", "softmax", _normalise_queries),
    *(_projection(whose, by) for whose, by in ("kq", "vk", "vq", "qk", "kv", "qv")),
    Change("keys and queries are exchanged: queries are projected by {wk}, keys by {wq}", "s",
           "wq", _weights(wq="wk", wk="wq", bq="bk", bk="bq")),
    Change("the output is not projected by {wo}", "o", "wo", _weights(wo=None, bo=None)),
    *(Change(f"the bias of {words} is not added", step, name, _weights(**{name: None}))
      for name, words, step in (("bq", "queries", "s"), ("bk", "keys", "s"),
                                ("bv", "values", "o"), ("bo", "the output", "o"))),
    *(Change(f"{{w{n}}} is transposed", "o" if n in "vo" else "s", f"w{n}",
             _weights(**{f"w{n}": f"w{n}.T"})) for n in "qkvo"),
    Change("the query is added to the output", "o", "residual", _add_query, "+ query"),
)  # fmt: skip
"""Mistakes of modules that the judge of functions does not name; nothing but the function itself
decides which one it makes."""
