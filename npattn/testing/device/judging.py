"""Judge one problem on a device: run the implementation and the oracle, and bound their error.

Every row of an ordinary problem is judged, and a few of a long one. These are a problem of their
own, with as many queries: cotangents of all other rows are 0, so that dk and dv of every key are
those of the small problem too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, band, diagonal
from npattn.testing.adapters.base import ResultError, catch_foreign
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.request import LEAVES, name_results
from npattn.testing.comparison import Comparison
from npattn.testing.device.sampling import DeviceSample
from npattn.testing.device.tensors import (
    DeviceArray,
    DeviceProblem,
    compare_tensors,
    real,
    tensor_of,
    worst_ratios,
)
from npattn.testing.power import Power, find_unseen
from npattn.testing.trial import Trial
from npattn.torch.problem import ARRAYS
from npattn.torch.tensors import has_float64, numpy_dtype

Tensor = torch.Tensor
OTHERS = "dq of other rows"
SAMPLED = 2**12
"""Most elements of a result by which its power is measured: exact values come to the host."""
REFUSED = {
    "is_isolated": "sweep needs the implementation in this process, not in a worker",
    "storage": "sweep on a device needs (B, H, T, D): judge sequences without it",
    "packing": "sweep on a device needs q, k and v apart: judge without it",
    "quantized": "sweep on a device has no quantized inputs: judge them without it",
    "latent": "sweep on a device has no latent inputs or lists: leave it out",
    "key_lists": "sweep on a device has no latent inputs or lists: leave it out",
}
"""Attribute of an implementation → why a sweep refuses it."""


@dataclass
class DeviceEvaluation:
    """Results of an implementation on a device, beside exact values and tolerances."""

    results: list[tuple[str, Tensor]]  # (name, tensor): a name comes once for each way to call it
    exact: dict[str, Tensor]  # by the same names
    tolerance: dict[str, Tensor]

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

            array = x.to(torch.float64).cpu().numpy().astype(numpy_dtype(name, x.dtype))
            pair = (self.exact[name], self.tolerance[name])
            exact, tolerance = (y.cpu().numpy().astype(np.float64) for y in pair)
            found = find_unseen(array, exact, tolerance, fails)
            unseen += [f"{mistake} ({name})" for mistake in found]
        return unseen

    def comparisons(self) -> list[Comparison]:
        """Return the worst element of each result, the worst result first."""
        comparisons = [
            compare_tensors(n, x, self.exact[n], self.tolerance[n]) for n, x in self.results
        ]
        return sorted(comparisons, key=lambda c: -c.ratio)


def judge_on_device(
    trial: Trial, sample: DeviceSample, rows: Tensor | None = None
) -> DeviceEvaluation:
    """Run the implementation and the oracle, and bound the error between them.

    Raises ImplementationError if the implementation raises, or returns something that is no tensor
    of the device.

    Parameters
    ----------
    rows : int tensor, optional
        Queries to judge; the mask then must be the same for every query.
    """
    problem, dout, dlse = sample
    if rows is not None:
        problem = _select_rows(problem, rows, trial.conventions)
        dout, dlse = dout[..., rows, :], dlse[..., rows]
    # The oracle needs float64: without it, it computes on the host.
    device = dout.device if has_float64(dout.device.type) else torch.device("cpu")
    moved = {n: x.to(device) for n in ARRAYS if isinstance(x := getattr(problem, n), Tensor)}
    tensors: Any = problem.replace(**moved)
    arrays = DeviceProblem(tensors)
    dlse = torch.where(tensor_of(trial.empty(arrays), dlse.device), 0, dlse)
    results = [(n, x.to(device)) for n, x in _run_implementation(trial, sample, dout, dlse, rows)]
    douts: Any = [DeviceArray(x.to(device)) for x in (dout, dlse)]
    cotangents = Cotangents(douts[0], douts[1] if trial.takes_dlse else None)
    values = trial.exact(arrays, cotangents)
    allowed = trial.tolerance(arrays, cotangents, values, queries=sample.problem.T)
    exact = {n: tensor_of(x, device) for n, x in values.items()}
    tolerance = {n: tensor_of(allowed[n], device) for n in values}
    if rows is not None and trial.gradients:
        exact[OTHERS] = tolerance[OTHERS] = exact["lse"].new_zeros(())
    return DeviceEvaluation([(n, x) for n, x in results if n in exact], exact, tolerance)


def _run_implementation(
    trial: Trial, sample: DeviceSample, dout: Tensor, dlse: Tensor, rows: Tensor | None
) -> list[tuple[str, Tensor]]:
    """Return the results of the implementation, of the rows to judge."""
    problem = sample.problem
    inputs = {n: getattr(problem, n) for n in ARRAYS}
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


def results_on_device(
    f: Implementation,
    problem: Problem,  # for its options
    # arrays of the framework by npattn's names, laid out as npattn has them
    inputs: Mapping[str, Any],
    # cotangents of o and, if it returns it, lse; None asks for no gradients
    cotangents: Mapping[str, Any] | None,
) -> list[tuple[str, Any]]:
    """Return every result as an array of the framework, left on its device.

    Nothing is copied, but for the layout.

    Returns
    -------
    list of (name, array)
        A name comes once for each way to call it.
    """
    for name, why in REFUSED.items():
        if getattr(f, name) not in (None, False):
            raise OptionError(why)
    request = f.request(problem)
    layout = f.arrangement
    laid_out = {n: layout.apply(n, x) for n, x in inputs.items()}
    request.add_inputs(laid_out, f.options(problem))
    if cotangents is not None:
        laid_out_cotangents = {n: layout.apply(n, x) for n, x in cotangents.items()}
        laid_out_cotangents |= (
            {"lse": layout.swap_lse(laid_out_cotangents["lse"])}
            if "lse" in laid_out_cotangents
            else {}
        )
        request.add_cotangents(laid_out_cotangents)
    lse = ("return_lse",) if f.returns_lse else ()
    (value,) = request.forward([()])
    pairs = [*name_results(f.signature, value, ()).items()]
    more: dict[str, Any] = {}
    if cotangents is not None:
        value, more = request.everything([n for n in LEAVES if n in laid_out])
        if f.backward is not None:
            more = f.name_gradients(more, laid_out)
        more |= {n: x for n, x in value.items() if n in ("o", "lse")}
    if lse and "lse" not in more:
        (value,) = request.forward([lse])
        more |= name_results(f.signature, value, lse)
    with catch_foreign("raised"):
        f.framework.finish()
    every = [*pairs, *more.items()]
    return [(n, layout.restore(n, x, problem, "attend")[n]) for n, x in every]


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


def _select_rows(problem: Any, rows: Tensor, conventions: Conventions) -> Any:
    """Return the problem of these queries alone."""
    plain: Any = conventions.translate_options(problem)
    left_keys, right_keys = plain.window or (None, None)
    if plain.causal:
        right_keys = 0 if right_keys is None else min(right_keys, 0)
    visible: Any = plain.mask_array
    if left_keys is not None or right_keys is not None:
        centers = rows[:, None] + diagonal(problem.T, problem.S, problem.alignment)
        keys: Any = torch.arange(problem.S, device=rows.device)
        inside = band(centers, keys, left_keys, right_keys)  # type: ignore[arg-type]  # tensors
        visible = inside if visible is None else visible & inside
    mask = ~visible if visible is not None and conventions.mask_true == "hide" else visible
    return problem.replace(
        q=problem.q[..., rows, :], mask=mask, causal=False, window=None, alignment=None
    )
