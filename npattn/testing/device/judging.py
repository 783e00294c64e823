"""Judge one problem on a device: run the implementation and the oracle, and bound their error.

Every row of an ordinary problem is judged, and a few of a long one. These are a problem of their
own, with as many queries: cotangents of all other rows are 0, so that dk and dv of every key are
those of the small problem too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from npattn.problem.arrays import Array, band, diagonal
from npattn.testing.adapters.base import ResultError
from npattn.testing.adapters.on_device import results_on_device
from npattn.testing.bounds.rounding import Rounding, Units, unit_roundoff
from npattn.testing.bounds.row_norms import RowNorms
from npattn.testing.comparison import Comparison
from npattn.testing.device.sampling import DeviceProblem
from npattn.testing.device.tensors import DeviceTensors, compare_tensors, real, worst_ratios
from npattn.testing.power import Power, find_unseen
from npattn.testing.trial import Trial
from npattn.torch.api import backward, evaluate
from npattn.torch.tensors import numpy_dtype

Tensor = torch.Tensor
OTHERS = "dq of other rows"
SAMPLED = 2**12
"""Most elements of a result by which its power is measured: exact values come to the host."""


@dataclass
class DeviceEvaluation:
    """Results of an implementation on a device, beside exact values and tolerances.

    Attributes
    ----------
    results : list of (name, tensor)
        A name comes once for each way to call it.
    exact, tolerance : dict
        By the same names.
    bounded : bool
        The cheap form of the bound is valid; otherwise only NaN and inf are wrong.
    """

    results: list[tuple[str, Tensor]]
    exact: dict[str, Tensor]
    tolerance: dict[str, Tensor]
    bounded: bool

    @cached_property
    def ratios(self) -> dict[str, float]:
        """Largest error / tolerance of each result."""
        return worst_ratios(self.results, self.exact, self.tolerance)

    @property
    def worst(self) -> float:
        return max(self.ratios.values(), default=0.0)

    def powers(self) -> dict[str, Power]:
        """Return the power of each result, of elements drawn at random where there are many."""
        rng = np.random.default_rng(0)
        found = {name: x for name, x in self.results if name != OTHERS}
        pairs = []
        for name in found:
            pair = torch.stack([x[name].reshape(-1) for x in (self.exact, self.tolerance)])
            if pair.shape[1] > SAMPLED:
                at = torch.from_numpy(rng.integers(0, pair.shape[1], SAMPLED))
                pair = pair[:, at.to(pair.device)]
            pairs.append(pair)
        host = torch.cat(pairs, 1).cpu().numpy().astype(np.float64)  # after one wait
        ends = np.cumsum([pair.shape[1] for pair in pairs])
        parts = np.split(host, ends[:-1], axis=1)
        return {
            name: Power.of(part[0], part[1], numpy_dtype(name, real(x).dtype))
            for (name, x), part in zip(found.items(), parts, strict=True)
        }

    @property
    def is_small(self) -> bool:
        """True if each result may come to the host."""
        return all(x.numel() <= SAMPLED for _, x in self.results)

    def unseen(self) -> list[str]:
        """Return mistakes in results that passed which are not found: [] unless npattn errs."""
        unseen = []
        for name, x in self.results:
            if name == OTHERS or not x.is_floating_point():
                continue

            def fails(changed: Array, name: str = name, x: Tensor = x) -> bool:
                again = torch.from_numpy(changed.astype(np.float64)).to(x.device, x.dtype)
                return not worst_ratios([(name, again)], self.exact, self.tolerance)[name] <= 1

            own = x.to(torch.float64).cpu().numpy().astype(numpy_dtype(name, x.dtype))
            pair = (self.exact[name], self.tolerance[name])
            exact, tolerance = (y.cpu().numpy().astype(np.float64) for y in pair)
            found = find_unseen(own, exact, tolerance, fails)
            unseen += [f"{mistake} ({name})" for mistake in found]
        return unseen

    def comparisons(self) -> list[Comparison]:
        """Return the worst element of each result, the worst result first."""
        comparisons = [
            compare_tensors(n, x, self.exact[n], self.tolerance[n]) for n, x in self.results
        ]
        return sorted(comparisons, key=lambda c: -c.ratio)


def judge_on_device(
    trial: Trial, sample: DeviceProblem, rows: Tensor | None = None
) -> DeviceEvaluation:
    """Run the implementation and the oracle, and bound the error between them.

    Parameters
    ----------
    trial : Trial
    sample : DeviceProblem
    rows : int tensor, optional
        Queries to judge; the mask then must be the same for every query.

    Raises
    ------
    ImplementationError
        If the implementation raises, or returns something that is no tensor of the device.
    """
    canonical: Any = trial.conventions.canonical(sample.problem)
    dout, dlse = sample.dout, sample.dlse
    if rows is not None:
        canonical = _select_rows(canonical, rows)
        dout, dlse = dout[..., rows, :], dlse[..., rows]
    fwd: Any = evaluate(canonical, engine="dense")
    dlse = torch.where(torch.isneginf(fwd.lse), 0, dlse)  # 0 in fully masked rows
    results = _run_implementation(trial, sample, dout, dlse, rows)
    exact: dict[str, Any] = {"o": fwd.out, "lse": fwd.lse}
    cotangents: Any = None
    if trial.gradients:
        # As the oracle takes them: widened, of a natural lse.
        unit = math.log(2) if trial.conventions.lse_base == "2" else 1.0
        natural = canonical.to_compute_dtype(dlse) / unit if trial.takes_dlse else None
        cotangents = canonical.to_compute_dtype(dout), natural
        grads = backward(fwd, *cotangents)
        exact |= {n: getattr(grads, n[1:]) for n in trial.gradients}
    exact = {name: x for name, x in exact.items() if x is not None}
    models = [(trial.rounding, trial.space.dtype)]
    if canonical.dtype == torch.float32:  # then the oracle too errs by as much
        models.append((Rounding.undeclared("float32"), "float32"))
    forms = [RowNorms(canonical, *model, DeviceTensors(fwd.out, fwd.lse)) for model in models]
    for form in forms:
        form.apart = rows is not None
    if bounded := all(form.fits for form in forms):
        tolerance = _add_oracle_error(forms, exact, [_bounds(form, cotangents) for form in forms])
    else:
        largest = torch.finfo(canonical.dtype).max
        tolerance = {name: torch.full_like(x, largest) for name, x in exact.items()}
    _translate_lse(trial, exact, tolerance)
    if rows is not None and trial.gradients:
        exact[OTHERS] = tolerance[OTHERS] = exact["lse"].new_zeros(())
    return DeviceEvaluation([(n, x) for n, x in results if n in exact], exact, tolerance, bounded)


def _run_implementation(
    trial: Trial, sample: DeviceProblem, dout: Tensor, dlse: Tensor, rows: Tensor | None
) -> list[tuple[str, Tensor]]:
    """Return the results of the implementation, of the rows to judge."""
    problem = sample.problem
    inputs = {n: getattr(problem, n) for n in ("q", "k", "v", "mask", "bias")}
    inputs = {n: x for n, x in inputs.items() if x is not None}
    if rows is not None:
        zeros = torch.zeros_like(_widen(sample.dout))
        dout = zeros.index_copy(-2, rows, _widen(dout)).to(dout.dtype)
        dlse = torch.zeros_like(sample.dlse).index_copy(-1, rows, dlse)
    cotangents = {"o": dout} | ({"lse": dlse} if trial.takes_dlse else {})
    pairs = results_on_device(
        trial.implementation, problem, inputs, cotangents if trial.gradients else None
    )
    results = [(name, _check_tensor(name, x, sample.dout.device)) for name, x in pairs]
    if rows is None:
        return results
    selected: list[tuple[str, Tensor]] = []
    for name, x in results:
        axis = -1 if name == "lse" else -2
        if name not in ("o", "lse", "dq") or x.shape[axis:][:1] != (problem.T,):
            selected.append((name, x))
            continue
        selected.append((name, x.index_select(axis, rows)))
        if name == "dq":
            selected.append((OTHERS, _widen(x).abs().amax(-1).index_fill(-1, rows, 0).amax()))
    return selected


def _widen(x: Tensor) -> Tensor:
    """Return float8 as float32: torch has few operations on float8."""
    return x.float() if x.element_size() == 1 else x


def _check_tensor(name: str, x: Any, device: torch.device) -> Tensor:
    """Check that a result is a tensor of the device, and detach it."""
    if not isinstance(x, Tensor):
        raise ResultError(f"{name} is a {type(x).__qualname__}, must be a torch tensor")
    if x.device != device:
        raise ResultError(f"{name} is on {x.device}, must be on {device} as q")
    return x.detach()


def _select_rows(problem: Any, rows: Tensor) -> Any:
    """Return the problem of these queries alone."""
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    visible: Any = problem.mask_array
    if left is not None or right is not None:
        centers = rows[:, None] + diagonal(problem.T, problem.S, problem.alignment)
        keys: Any = torch.arange(problem.S, device=rows.device)
        inside = band(centers, keys, left, right)  # type: ignore[arg-type]  # tensors
        visible = inside if visible is None else visible & inside
    return problem.replace(
        q=problem.q[..., rows, :], mask=visible, causal=False, window=None, alignment=None
    )


# --- tolerances -----------------------------------------------------------------------------------


def _bounds(form: RowNorms, cotangents: tuple[Tensor, Tensor | None] | None) -> dict[str, Any]:
    """Return the bounds of every result, with cotangents those of gradients too."""
    headless = form.problem.headless
    bounds = form.forward(weights=False)
    if cotangents is not None:
        pair: Any = cotangents
        if headless:
            pair = (None if x is None else x[None] for x in cotangents)
        bounds |= form.backward(*pair)
    return {n: t[0] if headless and n in ("o", "lse") else t for n, t in bounds.items()}


def _add_oracle_error(
    forms: list[RowNorms], exact: dict[str, Tensor], bounds: list[dict[str, Any]]
) -> dict[str, Tensor]:
    """Add the oracle's own error to the bound.

    In proportion to its unit roundoff; of an oracle in float32, the bound of any implementation
    that computes in float32, and the rounding of its result.
    """
    tolerance, *own = bounds
    if not own:
        factor = 1 + unit_roundoff("float64") / forms[0].unit.u
        return {name: factor * tolerance[name] for name in exact}
    u = unit_roundoff("float32")
    return {name: tolerance[name] + own[0][name] + u * exact[name].abs() for name in exact}


def _translate_lse(trial: Trial, exact: dict[str, Tensor], tolerance: dict[str, Tensor]) -> None:
    """Translate lse to base 2 in place, if the conventions say so, as `bounds.allowed` does."""
    if trial.conventions.lse_base != "2":
        return
    u = Units.of(trial.rounding, trial.space.dtype).u
    size = torch.where(torch.isneginf(exact["lse"]), 0, exact["lse"].abs())
    tolerance["lse"] = (tolerance["lse"] + 4 * u * size) / math.log(2)
    exact["lse"] = exact["lse"] / math.log(2)
