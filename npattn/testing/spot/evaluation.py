"""Evaluate a sample of rows and keys exactly, and compare results with them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.checks import read_floating
from npattn.testing.bounds.blocks import ProblemInBlocks
from npattn.testing.bounds.by_key import HeadResults, KeyGradients, Slack, sum_heads
from npattn.testing.bounds.by_row import Rows
from npattn.testing.bounds.rounding import Rounding, Units, unit_roundoff
from npattn.testing.bounds.worst_case import finite
from npattn.testing.comparison import Comparison, compare_arrays
from npattn.testing.power import Power, find_unseen
from npattn.testing.spot.result import SpotCheck

AT_ONCE = 64
"""Rows, or keys, that are evaluated together."""
SCORES = 2**24
"""Scores in memory to be counted, where a few rows have many."""

Group = tuple[tuple[int, ...], Array, Array]


class SampledRows:
    """A problem and the results to check in a sample of its rows and keys."""

    def __init__(
        self,
        problem: Problem,
        conventions: Conventions,
        rounding: Rounding | None,
        results: dict[str, Any],
        dout: Any,
        dlse: Any,
    ) -> None:
        self.problem, self.conventions = problem, conventions
        for name in ("q", "k", "v", "bias", "sinks"):
            array = getattr(problem, name)
            if array is not None and array.dtype.kind == "c":
                raise DtypeError(
                    f"{name} is {array.dtype}, must be real: spot_check supports no complex problem"
                )
        if problem.gate is not None:
            raise OptionError(
                "got gate, which spot_check does not cover: pass the output before it, and no gate"
            )
        self.dtype = problem.q.dtype
        self.rounding = rounding or Rounding.undeclared(self.dtype)
        if self.rounding.needs_whole_rows:
            raise OptionError(
                f"rounding is {self.rounding.name}, which spot_check does not cover: its integers "
                "and partial sums need whole rows; npattn check judges them"
            )
        self.blocks = ProblemInBlocks(problem, conventions)
        self.lead, self.H, self.T = problem.lead, problem.H, problem.T
        row = () if problem.headless else (*problem.lead, problem.H)
        shapes = {
            "o": (*row, problem.T, problem.E),
            "lse": (*row, problem.T),
            "dq": problem.q.shape,
            "dk": problem.k.shape,
            "dv": problem.v.shape,
        }
        results = {name: x for name, x in results.items() if x is not None}
        if "o" not in results:
            raise OptionError("out is None: pass the output of the implementation")
        self.got = {
            n: self._array("out" if n == "o" else n, x, shapes[n]) for n, x in results.items()
        }
        self.dout = None if dout is None else self._array("dout", dout, shapes["o"])
        self.dlse = None if dlse is None else self._array("dlse", dlse, shapes["lse"])
        self._check_conventions()
        self._check_gradients()
        self.slack = Slack()
        self.defects: dict[str, list[str]] = {}

    def _array(self, name: str, value: Any, shape: tuple[int, ...]) -> Array:
        """Return an array with a head axis, after checking its dtype and shape."""
        array = read_floating(name, value)
        if array.shape != shape:
            raise ShapeError(f"{name} has shape {array.shape}, must have {shape}")
        return array[None] if self.problem.headless else array

    def _check_conventions(self) -> None:
        if len(self.conventions.empty_results) > 1:
            raise OptionError(
                f"empty_row_bias is {self.conventions.empty_row_bias!r}, must be None in a spot "
                f"check, or as empty_row, {self.conventions.empty_row!r}"
            )

    def _check_gradients(self) -> None:
        """Raise if gradients come without dout or lse, or under conventions that forbid them."""
        gradients = [name for name in ("dq", "dk", "dv") if name in self.got]
        if gradients and self.dout is None:
            raise OptionError(f"got {gradients[0]} without dout: pass the cotangent of out too")
        if not gradients and (self.dout is not None or self.dlse is not None):
            name = "dout" if self.dout is not None else "dlse"
            raise OptionError(f"got {name}, but no gradient to check: pass dq, dk or dv too")
        for name in gradients:
            lead = self.got[name].shape[:-3]
            if lead != self.lead:
                raise ShapeError(
                    f"{name} has leading axes {lead}, must have those of out, {self.lead}: "
                    f"a gradient summed over broadcast axes needs all of their rows"
                )
        if not self.checks_keys:
            return
        if "lse" not in self.got:
            raise OptionError(f"{gradients[-1]} needs lse, since P is exp(s − lse): pass lse too")
        if self.conventions.empty_results != {"zero"} or self.blocks.attends_hidden:
            raise OptionError(
                f"got {gradients[-1]} under conventions that give hidden keys a gradient: leave it "
                'out, or hidden_fill, softcap="after_mask" and empty_row'
            )

    @property
    def checks_keys(self) -> bool:
        return "dk" in self.got or "dv" in self.got

    # --- the check --------------------------------------------------------------------------------

    def check(self, samples: int, seed: int, accept: tuple[str, ...] = ()) -> SpotCheck:
        """Sample rows and keys, and compare the results there."""
        rng, problem = np.random.default_rng(seed), self.problem
        rows, all_rows = sample_indices(rng, (*self.lead, self.H, self.T), samples)
        comparisons = [
            c for group in self._groups(rows, problem.S) for c in self._compare_rows(*group)
        ]
        keys, all_keys = None, 0
        if self.checks_keys:
            keys, all_keys = sample_indices(rng, (*self.lead, problem.K, problem.S), samples)
            if len(keys) and not self.slack.seen:
                raise OptionError(
                    f"samples is {samples}, but no sampled query sees a key: the errors of lse and "
                    "out are not known; pass more samples"
                )
            comparisons += [
                c for group in self._groups(keys, self.T, True) for c in self._compare_keys(*group)
            ]
        ratios = {
            name: max((c.ratio for c in comparisons if c.name == name), default=0.0)
            for name in self.got
        }
        powers = {
            name: Power.union(
                c.power for c in comparisons if c.name == name and c.power is not None
            )
            for name in self.got
        }
        head = 1 if problem.headless else 0
        return SpotCheck(
            rows[:, head:],
            None if keys is None else keys[:, head:],
            ratios,
            tuple(c for c in comparisons if not c.passed),
            all_rows,
            all_keys,
            seed,
            powers,
            accept,
            tuple(f"{x} ({name})" for name, found in self.defects.items() for x in found),
        )

    def _groups(self, sample: Array, length: int, checks_keys: bool = False) -> Iterator[Group]:
        """Iterate over groups of indices, (lead, h, t), that share a key/value head."""
        together: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for *lead, h, t in sample.tolist():
            together[(*lead, h if checks_keys else self.blocks.kv_head(h))].append((h, t))
        size = max(1, min(AT_ONCE, SCORES // max(length, 1)))
        for (*lead, _), pairs in together.items():
            for i in range(0, len(pairs), size):
                h, t = np.array(pairs[i : i + size]).T
                yield tuple(lead), h, t

    def _compare_rows(self, lead: tuple[int, ...], h: Array, t: Array) -> Iterator[Comparison]:
        """Yield comparisons at queries t, (n,), of heads h, (n,), which share their keys."""
        do, dl = (None if x is None else x[lead][h, t] for x in (self.dout, self.dlse))
        binary = self.conventions.lse_base == "2"
        if dl is not None:
            dl = dl.astype(float) / (math.log(2) if binary else 1.0)
        rows = Rows(
            self.blocks,
            lead,
            h,
            t,
            self.rounding,
            self.dtype,
            None if do is None else do.astype(float),
            dl,
            gradient="dq" in self.got,
        )
        if self.checks_keys:
            self.slack.add(rows, 4 * rows.unit.u * binary * abs(finite(rows.lse[0])))
        exact, tolerances = self._translate(rows, lead)
        yield from self._compare(exact, tolerances, lead, h, t)

    def _compare_keys(self, lead: tuple[int, ...], kv: Array, s: Array) -> Iterator[Comparison]:
        """Yield comparisons of dk and dv at keys s, (n,), of one key head, repeated in kv, (n,)."""
        base = math.log(2) if self.conventions.lse_base == "2" else 1.0
        assert self.dout is not None
        lse, out, do = self.got["lse"][lead], self.got["o"][lead], self.dout[lead]
        dlse = None if self.dlse is None else self.dlse[lead]
        heads = [
            KeyGradients(
                self.blocks,
                (lead, h, s),
                self.rounding,
                self.dtype,
                HeadResults(lse[h], out[h], do[h], None if dlse is None else dlse[h], base),
                self.slack,
            )
            for h in self.blocks.heads(int(kv[0]))
        ]
        exact, tolerances = sum_heads(heads)
        yield from self._compare(exact, self._add_oracle_error(tolerances), lead, kv, s)

    def _compare(
        self,
        exact: dict[str, Array],
        tolerances: dict[str, Array],
        lead: tuple[int, ...],
        h: Array,
        t: Array,
    ) -> Iterator[Comparison]:
        """Yield the worst element of each result at each pair of h, (n,), and t, (n,)."""
        for name in (name for name in self.got if name in exact):
            got = self.got[name][lead][h, t]
            found = _compare_each(name, got, exact[name], tolerances[name])
            if name not in self.defects and all(c.passed for c in found):
                self.defects[name] = _find_unseen(name, got, exact[name], tolerances[name])
            for worst, at in zip(found, zip(h.tolist(), t.tolist(), strict=True), strict=True):
                index = (*lead, *at)[1 if self.problem.headless else 0 :]
                yield replace(worst, index=(*index, *worst.index))

    def _translate(
        self, rows: Rows, lead: tuple[int, ...]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return exact rows and their tolerances, translated by the conventions."""
        c, unit, (o, lse, dq) = self.conventions, rows.unit, rows.exact
        tolerances, empty = self._add_oracle_error(rows.tolerances()), np.isneginf(lse)
        if c.lse_base == "2":
            error = 4 * unit.u * np.where(empty, 0, abs(lse))
            tolerances["lse"] = (tolerances["lse"] + error) / math.log(2)
        means = np.zeros((1, 1, self.problem.E))
        result = c.empty_row if self.problem.S else "zero"
        if result == "mean" and empty.any():
            # As a softmax over S equal scores: a weight, S products and sums, a division.
            kv = self.blocks.kv_head(int(rows.at[1][0]))
            mean, size = self._means(self.blocks.plane(self.problem.v, lead)[kv])
            rel = rows.gamma(rows.chain + 4) + 2 * unit.p.u + unit.exp
            tolerances["o"] = np.where(empty[:, None], rel * size, tolerances["o"])
            means = mean[None, None]
        keys = min(self.problem.S, 1)
        one = Problem(np.zeros((1, len(lse), 1)), np.zeros((1, keys, 1)), means[:, :keys])
        o, lse = (x[0] for x in c.results(one, o[None], lse[None]))
        exact = {"o": o, "lse": lse}
        if dq is not None:
            exact["dq"] = dq
            if result == "nan":  # a gradient of such a row is not compared
                tolerances["dq"] = np.where(empty[:, None], np.inf, tolerances["dq"])
        return exact, tolerances

    def _means(self, v: Array) -> tuple[Array, Array]:
        """Return the means of all values of a head, and of their absolute values: (E,) each."""
        total, size = np.zeros((2, self.problem.E))
        for s in range(0, len(v), SCORES // 2**10):
            part = v[s : s + SCORES // 2**10].astype(float)
            total, size = total + part.sum(0), size + abs(part).sum(0)
        return total / max(len(v), 1), size / max(len(v), 1)

    def _add_oracle_error(self, tolerances: dict[str, Array]) -> dict[str, Array]:
        """Add the oracle's own error, in proportion to its unit."""
        more = 1 + unit_roundoff(np.float64) / Units.of(self.rounding, self.dtype).u
        return {name: more * bound for name, bound in tolerances.items()}


def _compare_each(name: str, got: Array, exact: Array, tolerance: Array) -> list[Comparison]:
    rows = zip(got, exact, tolerance, strict=True)
    return [compare_arrays(name, *row) for row in rows]


def _find_unseen(name: str, got: Array, exact: Array, tolerance: Array) -> list[str]:
    """Return the mistakes that are not found in rows that passed: [] unless npattn errs."""

    def fails(changed: Array) -> bool:
        return not all(c.passed for c in _compare_each(name, changed, exact, tolerance))

    return find_unseen(got, exact, tolerance, fails)


def sample_indices(
    rng: np.random.Generator, shape: tuple[int, ...], samples: int
) -> tuple[Array, int]:
    """Sample distinct indices into an array of this shape.

    Returns them, (samples, axes), and their number in all.
    """
    total = math.prod(shape)
    if samples >= total:
        flat = np.arange(total)
    else:
        flat = np.sort(rng.choice(total, samples, replace=False))
    return np.stack(np.unravel_index(flat, shape), -1).reshape(-1, len(shape)), total
