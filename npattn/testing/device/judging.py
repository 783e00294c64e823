"""One problem on a device: the implementation, the oracle and what is allowed, all of it there.

Of a problem as it is, every result is looked at. Of a long one a few queries are: their rows are a
problem of their own, with as many queries. The cotangents of all others are 0, so that dk and dv of
every key are those of that problem too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from npattn.arrays import band, diagonal
from npattn.testing.adapters.base import ResultError
from npattn.testing.bounds.rounding import Rounding, Units, unit_roundoff
from npattn.testing.bounds.row_norms import RowNorms
from npattn.testing.compare import Comparison
from npattn.testing.device.sampling import Drawn
from npattn.testing.device.tensors import Tensors, compared, worst_ratios
from npattn.testing.trial import Trial
from npattn.torch.api import backward, evaluate

__all__ = ["Held", "held"]

Tensor = torch.Tensor
OTHERS = "dq of other rows"


@dataclass
class Held:
    """What an implementation gave, beside what is exact and what is allowed.

    Attributes
    ----------
    got : list of (name, tensor)
    want, allowed : dict
    bounded : bool
        Whether the cheap form holds; else nothing but a number that is no number is wrong.
    """

    got: list[tuple[str, Tensor]]
    want: dict[str, Tensor]
    allowed: dict[str, Tensor]
    bounded: bool

    @cached_property
    def ratios(self) -> dict[str, float]:
        """The largest error / allowed error of each result."""
        return worst_ratios(self.got, self.want, self.allowed)

    @property
    def worst(self) -> float:
        return max(self.ratios.values(), default=0.0)

    def comparisons(self) -> list[Comparison]:
        """The worst element of each result, the worst result first."""
        found = [compared(n, x, self.want[n], self.allowed[n]) for n, x in self.got]
        return sorted(found, key=lambda c: -c.ratio)


def held(trial: Trial, given: Drawn, rows: Tensor | None = None) -> Held:
    """The implementation against the oracle.

    Parameters
    ----------
    trial : Trial
    given : Drawn
    rows : int tensor, optional
        The queries that are looked at; the mask then must be the same for every query.

    Raises
    ------
    ImplementationError
    """
    canonical: Any = trial.conventions.canonical(given.problem)
    do, dlse = given.dout, given.dlse
    if rows is not None:
        canonical, do, dlse = _of_rows(canonical, rows), do[..., rows, :], dlse[..., rows]
    fwd: Any = evaluate(canonical, engine="dense")
    want: dict[str, Any] = {"o": fwd.out, "lse": fwd.lse}
    dlse = torch.where(torch.isneginf(fwd.lse), 0, dlse)  # of rows that see nothing
    got = _given(trial, given, do, dlse, rows)
    do, dl = (
        canonical.to_compute_dtype(do),
        canonical.to_compute_dtype(dlse) if trial.takes_dlse else None,
    )
    if trial.conventions.lse_base == "2" and dl is not None:
        dl = dl / math.log(2)
    if trial.gradients:
        grads = backward(fwd, do, dl)
        want |= {n: getattr(grads, n[1:]) for n in trial.gradients}
    models = [(trial.rounding, trial.space.dtype)]
    if canonical.dtype == torch.float32:
        models.append((Rounding.undeclared("float32"), "float32"))
    forms = [RowNorms(canonical, *model, Tensors(fwd.out, fwd.lse)) for model in models]
    names = [name for name in want if want[name] is not None]
    want = {name: want[name] for name in names}
    bounded = all(form.fits for form in forms)
    if bounded:
        for form in forms:
            form.apart = rows is not None
        bounds = [_bounds(form, do if trial.gradients else None, dl) for form in forms]
        allowed = _certified(forms[0], want, bounds)
    else:
        most = torch.finfo(canonical.dtype).max
        allowed = {name: torch.full_like(x, most) for name, x in want.items()}
    _translate(trial, want, allowed)
    if rows is not None and trial.gradients:
        nothing = want["lse"].new_zeros(())
        want, allowed = want | {OTHERS: nothing}, allowed | {OTHERS: nothing}
    return Held([(n, x) for n, x in got if n in want], want, allowed, bounded)


def _given(
    trial: Trial, given: Drawn, do: Tensor, dlse: Tensor, rows: Tensor | None
) -> list[tuple[str, Tensor]]:
    """What the implementation gives, of the rows that are looked at."""
    problem = given.problem
    inputs = {n: getattr(problem, n) for n in ("q", "k", "v", "mask", "bias")}
    inputs = {n: x for n, x in inputs.items() if x is not None}
    if rows is not None:
        kind = do.dtype
        do = torch.zeros_like(_wide(given.dout)).index_copy(-2, rows, _wide(do)).to(kind)
        dlse = torch.zeros_like(given.dlse).index_copy(-1, rows, dlse)
    cotangents = {"o": do} | ({"lse": dlse} if trial.takes_dlse else {})
    gave = trial.implementation.results_on_device(
        problem, inputs, cotangents if trial.gradients else None
    )
    found = [(name, _tensor(name, x, given.dout.device)) for name, x in gave]
    if rows is None:
        return found
    some: list[tuple[str, Tensor]] = []
    for name, x in found:
        axis = -1 if name == "lse" else -2
        if name not in ("o", "lse", "dq") or x.shape[axis:][:1] != (problem.T,):
            some.append((name, x))
            continue
        some.append((name, x.index_select(axis, rows)))
        if name == "dq":
            some.append((OTHERS, _wide(x).abs().amax(-1).index_fill(-1, rows, 0).amax()))
    return some


def _wide(x: Tensor) -> Tensor:
    """The same numbers, of which more can be asked: torch has few operations on float8."""
    return x.float() if x.element_size() == 1 else x


def _tensor(name: str, x: Any, device: torch.device) -> Tensor:
    """A result, once it is known to be one."""
    if not isinstance(x, Tensor):
        raise ResultError(f"{name} is a {type(x).__qualname__}, must be a torch tensor")
    if x.device != device:
        raise ResultError(f"{name} is on {x.device}, must be on {device} as q")
    return x.detach()


def _of_rows(problem: Any, rows: Tensor) -> Any:
    """The problem of these queries alone."""
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    visible: Any = problem.mask_array
    if left is not None or right is not None:
        beside = rows[:, None] + diagonal(problem.T, problem.S, problem.alignment)
        keys: Any = torch.arange(problem.S, device=rows.device)
        inside = band(beside, keys, left, right)  # type: ignore[arg-type]  # tensors
        visible = inside if visible is None else visible & inside
    return problem.replace(
        q=problem.q[..., rows, :], mask=visible, causal=False, window=None, alignment=None
    )


def _bounds(form: RowNorms, do: Any, dlse: Any) -> dict[str, Any]:
    found = form.forward(weights=False)
    if form.problem.headless:
        do, dlse = (None if x is None else x[None] for x in (do, dlse))
    if do is not None:
        found |= form.backward(do, dlse)
    return {n: t[0] if form.problem.headless and n in ("o", "lse") else t for n, t in found.items()}


def _certified(
    form: RowNorms, want: dict[str, Tensor], bounds: list[dict[str, Any]]
) -> dict[str, Tensor]:
    """What is allowed, with the oracle's own error: in proportion to its unit, or, of an oracle in
    float32, the bound of whoever computes in float32, and the rounding of its result."""
    allowed, *own = bounds
    if not own:
        more = 1 + unit_roundoff("float64") / form.unit.u
        return {name: more * allowed[name] for name in want}
    u = unit_roundoff("float32")
    return {name: allowed[name] + own[0][name] + u * want[name].abs() for name in want}


def _translate(trial: Trial, want: dict[str, Tensor], allowed: dict[str, Tensor]) -> None:
    """lse to another base, as `tolerance` does."""
    if trial.conventions.lse_base != "2":
        return
    u = Units.of(trial.rounding, trial.space.dtype).u
    size = torch.where(torch.isneginf(want["lse"]), 0, want["lse"].abs())
    allowed["lse"] = (allowed["lse"] + 4 * u * size) / math.log(2)
    want["lse"] = want["lse"] / math.log(2)
