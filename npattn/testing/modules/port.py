"""compare_module: outputs that exist already, and the part of a module in which they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import OptionError, ShapeError
from npattn.masks import Mask
from npattn.multihead import MultiHeadAttention
from npattn.multihead.projections import linear
from npattn.problem.arrays import Array, to_numpy
from npattn.testing.adapters.modules import TorchModule
from npattn.testing.bounds.multihead import MultiHeadBound
from npattn.testing.comparison import Comparison, compare_arrays
from npattn.testing.modules.causes import say
from npattn.testing.modules.judge import begin
from npattn.testing.modules.named import Named
from npattn.testing.modules.plan import CHANGES, HIDES_QUERIES, Exact, Inputs, Plan
from npattn.testing.runner.schedule import ERRORS

PARTS = {
    "q": "the projection of queries",
    "k": "the projection of keys",
    "v": "the projection of values",
    "weights": "the inside, before values",
    "merged": "the inside",
    "out": "the projection of the output",
}
"""Outputs in the order in which they are computed, and the part that ends with each."""
ENDS = {"wq": "q", "bq": "q", "wk": "k", "bk": "k", "wv": "v", "bv": "v", "wo": "out", "bo": "out"}
"""Kind of a change → output with which its part ends; others are of the inside."""


def compare_module(
    m: Any,
    inputs: Any,
    outputs: Any,
    *,
    mask: Any = None,
    roles: Mapping[str, str] | None = None,
    num_heads: int | None = None,
    scale: float | None = None,
    conventions: Conventions | None = None,
    dtype: Any = None,
    **named: Any,
) -> tuple[Comparison, ...]:
    """Compare outputs that exist already, of a port say, with the exact ones of a module.

    Parameters
    ----------
    m : npattn.MultiHeadAttention, or a torch module as of `check_module`
        The first is what `npattn.weights` reads from files and frameworks. A torch module gives
        its weights alone: it is called to find its projections, and never for the outputs.
    inputs : array, or mapping of "query", "key", "value"
    outputs : array, or mapping
        "out", and what else there is of "weights" and of the steps: the projections "q", "k" and
        "v" as layers return them, (..., length, heads · size), and "merged", which W_o multiplies.
    mask : bool array, optional
        True = may attend, as of `MultiHeadAttention.forward`.
    roles, num_heads
        As of `check_module`, for a torch module.
    scale : float, optional
        Default: 1/√D.
    conventions : Conventions, optional
    dtype : dtype, optional
        The one that the outputs were computed in. Default: that of the query.

    Returns
    -------
    tuple of Comparison
        One for each output: ``ratio`` is error / tolerance. The first step that fails names the
        part that differs in its ``hint``, as far as the outputs tell.

    Raises
    ------
    OptionError
        If an output has another name, or the module has norms, a gate or rotary positions.
    ShapeError
        If an input does not fit the weights, or an output has another shape than the exact one.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> from npattn.testing import compare_module
    >>> mha = npattn.MultiHeadAttention.init(8, 2, seed=0, dtype=np.float32)
    >>> x = np.ones((1, 3, 8), np.float32)
    >>> [c.passed for c in compare_module(mha, x, mha.forward(x).out.astype(np.float32))]
    [True]
    """
    names: tuple[str, ...] = ("query", "key", "value")
    swaps = False
    name_of: Callable[[str], str] = str
    if isinstance(m, MultiHeadAttention):
        plan = Plan(m, conventions=conventions or Conventions(), scale=scale)
    else:
        module = TorchModule(m)
        with module.computing(0), np.errstate(**ERRORS):
            judge = begin(module, Named(roles, num_heads, scale=scale, **named))
        if judge.left_out or judge.aside:
            raise OptionError(
                f"m has {', '.join([*judge.left_out, *judge.aside])}, which no reference has: "
                "compare outputs of a copy in which it is torch.nn.Identity()"
            )
        plan = replace(judge.plan, conventions=conventions or judge.plan.conventions)
        names, swaps = judge.call.inputs, module.batch_first is False
        name_of = judge.reading.name
    tensors = dict(inputs) if isinstance(inputs, Mapping) else {"query": inputs}
    tensors = {("query", "key", "value")[names.index(n)] if n in names else n: x
             for n, x in tensors.items()}  # fmt: skip
    if unknown := [n for n in tensors if n not in ("query", "key", "value")]:
        raise OptionError(f"inputs has {unknown[0]!r}, must have {', '.join(names)}")
    outputs = dict(outputs) if isinstance(outputs, Mapping) else {"out": outputs}
    if unknown := [n for n in outputs if n not in PARTS]:
        raise OptionError(f"outputs has {unknown[0]!r}, must have {', '.join(PARTS)}")
    arrays = {n: to_numpy(x).swapaxes(0, 1) if swaps else to_numpy(x) for n, x in tensors.items()}
    T, S = (arrays.get(n, arrays["query"]).shape[-2] for n in ("query", "key"))
    shown = mask.to_array(T=T, S=S) if isinstance(mask, Mask) else mask
    shown = None if shown is None else to_numpy(shown)
    canonical = Inputs(arrays["query"], arrays.get("key"), arrays.get("value"), shown)
    kind = dtype or arrays["query"].dtype
    exact = _compute_steps(plan, canonical, kind)
    turned = ("weights",) if swaps else tuple(PARTS)
    got = {n: _fit(n, to_numpy(outputs[n]), exact.values[n], n in turned)
           for n in PARTS if n in outputs}  # fmt: skip
    found = [compare_arrays(n, x, exact.values[n], exact.allowed[n]) for n, x in got.items()]
    wrong = next((i for i, c in enumerate(found) if not c.passed), None)
    if wrong is not None:
        passed = [c.name for c in found if c.passed]
        hint = _name_part(plan, canonical, kind, got, found[wrong].name, passed, name_of)
        found[wrong] = replace(found[wrong], hint=hint)
    return tuple(sorted(found, key=lambda c: list(outputs).index(c.name)))


def _compute_steps(plan: Plan, inputs: Inputs, dtype: Any) -> Exact:
    """Return every output of `PARTS`, with its tolerance."""
    fwd = plan.forward(inputs)
    bound = MultiHeadBound(fwd, dtype)
    allowed = bound.forward(None, None) | {"merged": bound.eo}
    values = {"out": fwd.out, "weights": fwd.weights, "merged": fwd.steps.merged}
    for name, x in fwd.steps.inputs.items():
        affine = [getattr(plan.mha, f"{kind}{name[0]}") for kind in "wb"]
        values[name[0]], allowed[name[0]] = linear(x, *affine), bound.linear(x, 0.0, *affine)
    return Exact(values, allowed)


def _fit(name: str, got: Array, exact: Array, is_first: bool) -> Array:
    """Return an output, samples first."""
    got = got if is_first else got.swapaxes(0, 1)
    if got.shape != exact.shape:
        raise ShapeError(f"{name} has shape {got.shape}, must have {exact.shape}")
    return got


def _name_part(
    plan: Plan,
    inputs: Inputs,
    dtype: Any,
    got: Mapping[str, Array],
    wrong: str,
    passed: Sequence[str],
    name_of: Callable[[str], str],
) -> str:
    """Return the part that differs, with the change of one step that gives the outputs, if any."""
    for change in (*CHANGES, HIDES_QUERIES):
        changed = change.apply(plan)
        if changed is None:
            continue
        other = changed.results(inputs, dtype)
        pairs = [(n, got[n]) for n in ("out", "weights") if n in got]
        if pairs and all(
            x.shape == other.values[n].shape
            and compare_arrays(n, x, other.values[n], other.allowed[n]).passed
            for n, x in pairs
        ):
            part = PARTS.get(ENDS.get(change.kind, "merged"))
            part = "the whole" if change.kind == "residual" else part
            return f"{part} differs: {say(change, plan.mha, name_of)}"
    before = list(PARTS)[: list(PARTS).index(wrong)]
    right = {
        *passed,
        *("qk" if "weights" in passed else ""),
        *(before if "merged" in passed else ()),
    }
    parts = [PARTS[n] for n in (*before, wrong) if n not in right]
    return f"{' or '.join(parts)} differs" if len(parts) < len(PARTS) else "any part may differ"
