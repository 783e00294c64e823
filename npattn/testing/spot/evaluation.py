"""An output of any length, held against the exact one in a sample of its rows.

The oracle itself costs T · S; a row of it costs S. So a few rows, drawn at random, are computed
exactly and held against what is allowed of them, and the result says what may have been missed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.checks import check_integer, read_floating
from npattn.conventions import Conventions, check_conventions
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.options import Alignment, ScoreMod, Window
from npattn.problem import Problem
from npattn.testing.bounds.blocks import Blocks
from npattn.testing.bounds.by_key import Columns, Delivered, Slack, of_keys
from npattn.testing.bounds.by_row import Rows
from npattn.testing.bounds.rounding import Rounding, Units, unit_roundoff
from npattn.testing.bounds.worst_case import finite
from npattn.testing.compare import Comparison, compare_arrays

__all__ = ["SpotCheck", "spot_check"]

AT_ONCE = 64
"""Rows, or keys, that are looked at together."""
HELD = 2**24
"""Scores that are held to be counted, where a few rows have many."""
SHOWN = 10
"""Failures that a report prints."""

Group = tuple[tuple[int, ...], Array, Array]


@dataclass(frozen=True, eq=False)
class SpotCheck:
    """What `spot_check` found.

    Attributes
    ----------
    rows : int array (samples, ...)
        The rows that were checked: indices into lse.
    keys : int array (samples, ...) or None
        The keys whose dk and dv were checked: indices into k without its last axis.
    ratios : dict
        Of o, lse, dq, dk, dv, where given: the largest error / allowed error.
    failures : tuple of Comparison
        Of every row, or key, that is wrong: its worst element, what was got, wanted and allowed.
    all_rows, all_keys : int
        Of how many they were drawn.
    seed : int
    """

    rows: Array
    keys: Array | None
    ratios: dict[str, float]
    failures: tuple[Comparison, ...]
    all_rows: int
    all_keys: int
    seed: int

    @property
    def passed(self) -> bool:
        """Whether nothing that was looked at is wrong."""
        return not self.failures

    @property
    def worst(self) -> float:
        """The largest error / allowed error."""
        return max(self.ratios.values(), default=0.0)

    def missed(self, share: float, of: str = "rows") -> float:
        """The probability of having missed all wrong rows, had at least this share been wrong.

        Parameters
        ----------
        share : float
            In [0, 1].
        of : {"rows", "keys"}

        Returns
        -------
        float
            Exact, of drawing without replacement.

        Raises
        ------
        OptionError
        """
        if not 0 <= share <= 1:
            raise OptionError(f"share is {share!r}, must be in [0, 1]")
        drawn, whole = self._drawn(of)
        wrong = math.ceil(share * whole)
        if wrong and (wrong - 1) / whole >= share:  # the product was rounded up
            wrong -= 1
        return _missed(wrong, drawn, whole)

    def share(self, probability: float = 0.05, of: str = "rows") -> float:
        """The least share of wrong rows that would be missed with at most this probability.

        Parameters
        ----------
        probability : float
            In (0, 1).
        of : {"rows", "keys"}

        Returns
        -------
        float

        Raises
        ------
        OptionError
        """
        if not 0 < probability < 1:
            raise OptionError(f"probability is {probability!r}, must be in (0, 1)")
        drawn, whole = self._drawn(of)
        least, most = 0, whole  # missing all of them is impossible, missing none of none certain
        while most - least > 1:
            middle = (least + most) // 2
            if _missed(middle, drawn, whole) <= probability:
                most = middle
            else:
                least = middle
        return most / whole if whole else 0.0

    def _drawn(self, of: str) -> tuple[int, int]:
        if of not in ("rows", "keys"):
            raise OptionError(f'of is {of!r}, must be "rows" or "keys"')
        if of == "rows":
            return len(self.rows), self.all_rows
        if self.keys is None:
            raise OptionError('of is "keys", must be "rows": no dk or dv was given')
        return len(self.keys), self.all_keys

    def __str__(self) -> str:
        state = "passed" if self.passed else "FAILED"
        figures = ", ".join(f"{n} {ratio:.2g}" for n, ratio in self.ratios.items())
        lines = [f"spot check {state}: largest error / allowed error {figures}"]
        lines += [f"  {failure}" for failure in self.failures[:SHOWN]]
        if len(self.failures) > SHOWN:
            lines.append(f"  and {len(self.failures) - SHOWN} more")
        populations = ("rows",) if self.keys is None else ("rows", "keys")
        return "\n".join([*lines, *(self._odds(of) for of in populations)])

    def _odds(self, of: str) -> str:
        drawn, whole = self._drawn(of)
        if drawn == whole:
            return f"all {whole} {of} were looked at"
        share = self.share(of=of)
        return (
            f"{drawn} of {whole} {of} were looked at, drawn with seed {self.seed}: if "
            f"{100 * share:.2g} % of the {of} or more were wrong, this would have missed them with "
            f"probability {100 * self.missed(share, of):.2g} %"
        )


def spot_check(
    out: Any,
    lse: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    causal: bool | Alignment = False,
    window: Window | None = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Any = None,
    dropout_mask: Any = None,
    dropout_rate: float = 0.0,
    conventions: Conventions | None = None,
    rounding: Rounding | str | None = None,
    dout: Any = None,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    samples: int = 256,
    seed: int = 0,
) -> SpotCheck:
    """Hold an output of any length against the exact one, in rows drawn at random.

    Each row that is drawn is computed in float64 from all of its keys, and held against what
    `compare` allows of it. The arrays may be memory-mapped: of q, k, v only a few keys at a time
    are converted, and nothing of the size of the scores is made. It takes time in proportion to
    samples · S for the rows, and to samples · T · H / K for keys; memory grows with neither T nor S
    but for four bytes a score of the rows looked at together.

    Parameters
    ----------
    out : array (..., H, T, E)
        As delivered.
    lse : array (..., H, T), or None
        As delivered. None: not checked.
    q, k, v, mask, causal, window, bias, scale, softcap, score_mod, sinks, dropout_mask, \
dropout_rate, conventions
        What was asked, as for `npattn.attention`, with the arrays as the implementation had them. A
        mask of `npattn.masks`, or a bias of `npattn.biases`, is asked a few keys at a time.
    rounding : Rounding or str, optional
        Default: what is allowed to whoever declares nothing, for the dtype of q.
    dout, dlse : array, optional
        The cotangents of out and lse, shaped like them.
    dq, dk, dv : array, optional
        Gradients as delivered, shaped like q, k, v; they need dout, dk and dv lse too. Of dq the
        same rows are checked. dk and dv are checked of `samples` keys, which are drawn apart.
    samples : int, default 256
        How many rows, and how many keys; all, where there are no more. Without replacement, each
        row as likely as any other.
    seed : int, default 0

    Returns
    -------
    SpotCheck
        ``passed``, ``worst``, ``failures``, ``missed(share)``; ``str()`` of it is a report.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        Before any work. What is wrong with numbers is never raised.

    Notes
    -----
    A gradient of one key sums over all queries, whose exact lse and out would cost T · S. So dk and
    dv are those of the lse and out that are given, and it is assumed that these are right: that the
    rows not drawn are off by no more than is allowed of the worst of those that were. That much is
    allowed of dk and dv on top. Where rows fail, read those first.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> from npattn.testing import spot_check
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2, 3, 1000, 8), dtype=np.float32) for _ in range(3))
    >>> fwd = npattn.forward(q, k, v, causal=True, dtype=np.float32)
    >>> found = spot_check(fwd.out, fwd.lse, q, k, v, causal=True, samples=100)
    >>> found.passed
    True
    >>> round(found.missed(0.03), 3)  # a defect in 3 % of the rows
    0.046
    """
    meaning = check_conventions(conventions)
    asked = _Asked(
        Problem(
            q,
            k,
            v,
            mask,
            causal=causal,
            window=window,
            bias=bias,
            scale=scale,
            softcap=softcap,
            score_mod=score_mod,
            sinks=sinks,
            dropout_mask=dropout_mask,
            dropout_rate=dropout_rate,
            alignment=None if meaning is None else meaning.causal,
        ),
        conventions or Conventions(),
        Rounding.named(rounding) if isinstance(rounding, str) else rounding,
        {"o": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv},
        dout,
        dlse,
    )
    return asked.check(check_integer("samples", samples), check_integer("seed", seed, 0))


def _missed(wrong: int, drawn: int, whole: int) -> float:
    """The probability that none of the wrong is among those drawn: hypergeometric."""
    if wrong + drawn > whole:
        return 0.0
    steps = np.log1p(-wrong / (whole - np.arange(drawn)))
    return float(np.exp(steps.sum()))


class _Asked:
    """What `spot_check` was asked, checked."""

    def __init__(
        self,
        problem: Problem,
        conventions: Conventions,
        rounding: Rounding | None,
        given: dict[str, Any],
        dout: Any,
        dlse: Any,
    ) -> None:
        self.problem, self.conventions = problem, conventions
        for name in ("q", "k", "v", "bias", "sinks"):
            array = getattr(problem, name)
            if array is not None and array.dtype.kind == "c":
                raise DtypeError(f"{name} is {array.dtype}, must be real: no kernel has others")
        self.dtype = problem.q.dtype
        self.rounding = rounding or Rounding.undeclared(self.dtype)
        self.blocks = Blocks(problem, conventions)
        self.lead, self.H, self.T = problem.lead, problem.H, problem.T
        row = () if problem.headless else (*problem.lead, problem.H)
        shapes = {
            "o": (*row, problem.T, problem.E),
            "lse": (*row, problem.T),
            "dq": problem.q.shape,
            "dk": problem.k.shape,
            "dv": problem.v.shape,
        }
        given = {name: x for name, x in given.items() if x is not None}
        if "o" not in given:
            raise OptionError("out is None, must be what the implementation delivered")
        self.got = {
            n: self._array("out" if n == "o" else n, x, shapes[n]) for n, x in given.items()
        }
        self.dout = None if dout is None else self._array("dout", dout, shapes["o"])
        self.dlse = None if dlse is None else self._array("dlse", dlse, shapes["lse"])
        self._check_gradients()
        self.slack = Slack()

    def _array(self, name: str, value: Any, shape: tuple[int, ...]) -> Array:
        """An array with a head axis, after checking that it has this shape."""
        array = read_floating(name, value)
        if array.shape != shape:
            raise ShapeError(f"{name} has shape {array.shape}, must have {shape}")
        return array[None] if self.problem.headless else array

    def _check_gradients(self) -> None:
        asked = [name for name in ("dq", "dk", "dv") if name in self.got]
        if asked and self.dout is None:
            raise OptionError(f"{asked[0]} is given without dout, must come with it")
        if not asked and (self.dout is not None or self.dlse is not None):
            name = "dout" if self.dout is not None else "dlse"
            raise OptionError(f"{name} is given, must be None without dq, dk or dv")
        for name in asked:
            lead = self.got[name].shape[:-3]
            if lead != self.lead:
                raise ShapeError(
                    f"{name} has leading axes {lead}, must have those of out, {self.lead}: "
                    f"a gradient summed over broadcast axes needs all of their rows"
                )
        if not self.of_keys:
            return
        if "lse" not in self.got:
            raise OptionError(f"lse is None, must be given for {asked[-1]}: P is exp(s − lse)")
        if self.conventions.empty_row != "zero" or self.blocks.fills:
            raise OptionError(
                f"{asked[-1]} is given under conventions by which hidden keys get a gradient, "
                'must be None there: leave out hidden_fill, softcap="after_mask" and empty_row'
            )

    @property
    def of_keys(self) -> bool:
        return "dk" in self.got or "dv" in self.got

    # --- the check --------------------------------------------------------------------------------

    def check(self, samples: int, seed: int) -> SpotCheck:
        rng, problem = np.random.default_rng(seed), self.problem
        rows, all_rows = drawn(rng, (*self.lead, self.H, self.T), samples)
        found = [c for group in self._groups(rows, problem.S) for c in self._rows(*group)]
        keys, all_keys = None, 0
        if self.of_keys:
            keys, all_keys = drawn(rng, (*self.lead, problem.K, problem.S), samples)
            if len(keys) and not self.slack.seen:
                raise OptionError(
                    f"samples is {samples}, must be larger: no query that was drawn sees a key, so "
                    "that nothing is known of what lse and out may be off by"
                )
            found += [c for group in self._groups(keys, self.T, True) for c in self._keys(*group)]
        ratios = {
            name: max((c.ratio for c in found if c.name == name), default=0.0) for name in self.got
        }
        head = 1 if problem.headless else 0
        return SpotCheck(
            rows[:, head:],
            None if keys is None else keys[:, head:],
            ratios,
            tuple(c for c in found if not c.passed),
            all_rows,
            all_keys,
            seed,
        )

    def _groups(self, sample: Array, length: int, of_keys: bool = False) -> Iterator[Group]:
        """Indices that share a key/value head, as many as are looked at together: lead, h, t."""
        together: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for *lead, h, t in sample.tolist():
            together[(*lead, h if of_keys else self.blocks.kv_head(h))].append((h, t))
        size = max(1, min(AT_ONCE, HELD // max(length, 1)))
        for (*lead, _), pairs in together.items():
            for i in range(0, len(pairs), size):
                h, t = np.array(pairs[i : i + size]).T
                yield tuple(lead), h, t

    def _rows(self, lead: tuple[int, ...], h: Array, t: Array) -> Iterator[Comparison]:
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
        if self.of_keys:
            self.slack.add(rows, 4 * rows.unit.u * binary * abs(finite(rows.lse[0])))
        want, allowed = self._translated(rows, lead)
        yield from self._compared(want, allowed, lead, h, t)

    def _keys(self, lead: tuple[int, ...], kv: Array, s: Array) -> Iterator[Comparison]:
        base = math.log(2) if self.conventions.lse_base == "2" else 1.0
        assert self.dout is not None
        lse, out, do = self.got["lse"][lead], self.got["o"][lead], self.dout[lead]
        dlse = None if self.dlse is None else self.dlse[lead]
        columns = [
            Columns(
                self.blocks,
                (lead, h, s),
                self.rounding,
                self.dtype,
                Delivered(lse[h], out[h], do[h], None if dlse is None else dlse[h], base),
                self.slack,
            )
            for h in self.blocks.heads(int(kv[0]))
        ]
        want, allowed = of_keys(columns)
        yield from self._compared(want, self._certified(allowed), lead, kv, s)

    def _compared(
        self,
        want: dict[str, Array],
        allowed: dict[str, Array],
        lead: tuple[int, ...],
        h: Array,
        t: Array,
    ) -> Iterator[Comparison]:
        for name in (name for name in self.got if name in want):
            got = self.got[name][lead][h, t]
            for i, at in enumerate(zip(h.tolist(), t.tolist(), strict=True)):
                found = compare_arrays(name, got[i], want[name][i], allowed[name][i])
                index = (*lead, *at)[1 if self.problem.headless else 0 :]
                yield replace(found, index=(*index, *found.index))

    def _translated(
        self, rows: Rows, lead: tuple[int, ...]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """What rows are, and what is allowed of them, in the terms of the conventions."""
        c, unit, (o, lse, dq) = self.conventions, rows.unit, rows.exact
        room, empty = self._certified(rows.allowed()), np.isneginf(lse)
        if c.lse_base == "2":
            room["lse"] = (room["lse"] + 4 * unit.u * np.where(empty, 0, abs(lse))) / math.log(2)
        means = np.zeros((1, 1, self.problem.E))
        if c.empty_row == "mean" and empty.any():
            # As a softmax over S equal scores: a weight, S products and sums, a division.
            kv = self.blocks.kv_head(int(rows.at[1][0]))
            mean, size = self._means(self.blocks.plane(self.problem.v, lead)[kv])
            rel = rows.gamma(rows.chain + 4) + 2 * unit.p.u + unit.exp
            room["o"] = np.where(empty[:, None], rel * size, room["o"])
            means = mean[None, None]
        one = Problem(np.zeros((1, len(lse), 1)), np.zeros((1, 1, 1)), means)
        o, lse = (x[0] for x in c.results(one, o[None], lse[None]))
        want = {"o": o, "lse": lse}
        if dq is not None:
            want["dq"] = dq
            if c.empty_row == "nan":  # a gradient of such a row is not compared
                room["dq"] = np.where(empty[:, None], np.inf, room["dq"])
        return want, room

    def _means(self, v: Array) -> tuple[Array, Array]:
        """The means of all values of a head, and of their absolute values: (E,) each."""
        total, size = np.zeros((2, self.problem.E))
        for s in range(0, len(v), HELD // 2**10):
            part = v[s : s + HELD // 2**10].astype(float)
            total, size = total + part.sum(0), size + abs(part).sum(0)
        return total / max(len(v), 1), size / max(len(v), 1)

    def _certified(self, room: dict[str, Array]) -> dict[str, Array]:
        """With the oracle's own error, in proportion to its unit."""
        more = 1 + unit_roundoff(np.float64) / Units.of(self.rounding, self.dtype).u
        return {name: more * bound for name, bound in room.items()}


def drawn(rng: np.random.Generator, shape: tuple[int, ...], samples: int) -> tuple[Array, int]:
    """Different indices into an array of that shape, (samples, axes), and how many there are."""
    whole = math.prod(shape)
    if samples >= whole:
        flat = np.arange(whole)
    else:
        flat = np.sort(rng.choice(whole, samples, replace=False))
    return np.stack(np.unravel_index(flat, shape), -1).reshape(-1, len(shape)), whole
