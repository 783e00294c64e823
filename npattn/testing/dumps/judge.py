"""Judge a dump: each result of one call against the oracle, and what would make it right.

A dump has no function to ask, so all is said of one problem: which results are wrong, where in
their arrays, and which other meaning of the options would make every result right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import NpattnError, OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.options import default_scale
from npattn.profiles import find_profile
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.comparison import Comparison, compare, exact, short
from npattn.testing.diagnosis.evidence import sizes_of
from npattn.testing.diagnosis.place import EVERYWHERE, Sample, learn
from npattn.testing.dumps.read import INPUTS, LOADABLE, Dump, read_dump
from npattn.testing.power import Concluded, Conclusion, Power, conclude, describe, find_unjudged
from npattn.testing.report.pair import AXES
from npattn.testing.spot.check import spot_check
from npattn.testing.spot.result import SpotCheck

WHOLE = 2**23
"""Most scores (B · H · T · S) that are computed whole; of more, rows are sampled."""
MISTAKEN = 0.02
"""Largest share of the elements on which a place that is printed may be mistaken."""


@dataclass(frozen=True, eq=False)
class DumpReport(Concluded):
    """Verdict on a dump.

    Attributes
    ----------
    source : str
        File or folder.
    problem : npattn.Problem
        Its arrays and options.
    comparisons : tuple of Comparison
        One for each result that was judged whole.
    places : dict
        Result out of tolerance → where it is wrong, learned on this one problem; no entry where
        nothing simple separates its wrong elements.
    passes_with : tuple of str
        Changes of the options, as flags, with each of which every result would be right.
    rows : SpotCheck or None
        Result of the sampled rows, if the problem is too large to be computed whole.
    unjudged : tuple of str
        Results in the dump that were not compared.
    accept : tuple of str
        Results that need no verdict.
    """

    source: str
    problem: Problem
    comparisons: tuple[Comparison, ...]
    places: dict[str, str] = field(default_factory=dict)
    passes_with: tuple[str, ...] = ()
    rows: SpotCheck | None = None
    unjudged: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[str, ...]:
        """Results that are out of tolerance."""
        failed = [c.name for c in self.comparisons if not c.passed]
        if self.rows is not None:
            failed += [name for name, ratio in self.rows.ratios.items() if not ratio <= 1]
        return tuple(failed)

    @property
    def powers(self) -> dict[str, Power]:
        """By result: which errors would have been seen."""
        powers = {c.name: c.power for c in self.comparisons if c.power is not None}
        return powers if self.rows is None else powers | dict(self.rows.powers)

    @property
    def conclusion(self) -> Conclusion:
        """Verdict and reason: a result whose double would have passed has none."""
        unjudged = (*self.unjudged, *find_unjudged(self.powers))
        return conclude(failed=bool(self.failed), unjudged=unjudged, accept=self.accept)

    @property
    def reason(self) -> str:
        """Results out of tolerance, or not judged; "" if all passed."""
        if self.failed:
            return f"{', '.join(self.failed)} out of tolerance"
        return self.conclusion.reason

    def __str__(self) -> str:
        """Return a line for each result, with the place of what is wrong, and the verdict."""
        lines = [_describe(self.problem)]
        for c in self.comparisons:
            if c.passed:
                lines.append(f"{c.name:<8} passed {short(c.ratio)} of the tolerance")
                continue
            lines.append(f"{c.name:<8} failed: {c}")
            if (place := self.places.get(c.name)) is not None:
                where = place if place == EVERYWHERE else f"where {place}"
                lines.append(f"{'':<8} wrong {where} (of this problem)")
        if self.rows is not None:
            lines += str(self.rows).splitlines()
        lines += describe(self.powers)
        lines += [f"passes with {change}" for change in self.passes_with]
        reason = f": {self.reason}" if self.reason else ""
        word = self.verdict.replace("failed", "FAILED")  # as a check says it
        return "\n".join([*lines, f"npattn compare {self.source}: {word}{reason}"])

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the arrays as plain data, which JSON can hold."""
        results = {
            c.name: {
                "passed": c.passed,
                "ratio": c.ratio if math.isfinite(c.ratio) else str(c.ratio),
                "wrong": c.wrong,
                "size": c.size,
                "text": str(c),
                "where": self.places.get(c.name),
                "power": None if c.power is None or math.isinf(c.power.factor) else c.power.factor,
            }
            for c in self.comparisons
        }
        rows = None if self.rows is None else str(self.rows)
        return {
            "source": self.source,
            "verdict": self.verdict,
            "reason": self.reason,
            "problem": _describe(self.problem),
            "results": results,
            "passes_with": list(self.passes_with),
            "rows": rows,
        }

    def to_json(self, path: str | Path) -> None:
        """Write `as_dict` to a file."""
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        Path(path).write_text(text + "\n", "utf-8")

    def to_html(self, path: str | Path) -> None:
        """Write the report as a page of one file, with heat maps of the worst elements."""
        from npattn.testing.report.maps import heat_maps
        from npattn.testing.report.markup import code_block, document
        from npattn.testing.report.page import SCRIPT, STYLE

        parts = [f"<h1>npattn compare: {self.verdict}</h1>", code_block(str(self))]
        for c in sorted(self.comparisons, key=lambda c: -c.ratio):
            if c.excerpt is not None:
                parts.append(heat_maps(c.name, c.excerpt))
        page = document(f"npattn compare {self.source}", parts, style=STYLE, script=SCRIPT)
        Path(path).write_text(page, "utf-8")


def compare_dump(
    path: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    layout: str | None = None,
    like: str | None = None,
    conventions: Conventions | None = None,
    rounding: Rounding | str | None = None,
    samples: int = 256,
    seed: int = 0,
    accept: Iterable[str] = (),
    **options: Any,
) -> DumpReport:
    """Judge the results of one call, from the arrays that it left in files.

    Parameters
    ----------
    path : str or path
        An .npz, a folder of .npy files, a .safetensors or a .pt file with q, k, v, results
        (o, lse, weights, dq, dk, dv, dbias, dsinks, …), cotangents (dout, dlse), and options.
        uint16 arrays are bfloat16 numbers, bit by bit.
    rename : mapping, optional
        Name of an entry → name here; "" leaves an entry out.
    layout : {"BHTD", "BTHD"}, optional
        Axes of q, k, v, o, dout and their gradients. Default: those of `like`, or BHTD.
    like : str, optional
        Known system whose conventions and layout the call has.
    conventions : Conventions, optional
        Default: those of `like`, or of docs/semantics.md.
    rounding : Rounding or str, optional
        As of `npattn.testing.compare`.
    samples, seed : int
        Number of rows, and seed, where the scores are too many to be computed whole.
    accept : iterable of str
        Results that need no verdict.
    **options
        Options of `npattn.attention`, beside those in the dump.

    Returns
    -------
    DumpReport
        ``verdict``, ``passed``, ``comparisons``, ``passes_with``; ``str()`` gives the report.

    Raises
    ------
    OptionError
        If the dump cannot be read, a name is unknown, an option is illegal or given twice, or a
        gradient has no dout.
    ShapeError, DtypeError
        If arrays do not fit each other, or hold something other than numbers.
    """
    profile = None if like is None else find_profile(like)
    if profile is not None:
        conventions = conventions or profile.conventions
        layout = layout or profile.layout
    dump = read_dump(path, rename=rename, layout=layout)
    for name in options:
        if name not in LOADABLE:
            raise OptionError(f"got {name}, must be an option of attention: {', '.join(LOADABLE)}")
        if name in dump.options:
            raise OptionError(
                f"got {name}, which {path} has too: leave one out, or rename the entry to ''"
            )
    if conventions is None and dump.alignment is not None:
        conventions = Conventions(causal=dump.alignment)
    alignment = None if conventions is None else conventions.alignment
    call: dict[str, Any] = {**dump.arrays, **dump.options, **options}
    problem = Problem(**call, alignment=alignment)
    meaning = _Meaning(problem, conventions or Conventions(), rounding)
    if _count_scores(problem) > WHOLE:
        return replace(_judge_rows(dump, meaning, samples, seed), accept=tuple(accept))
    comparisons = meaning.compare(dump, dump.results)
    wrong = [c.name for c in comparisons if not c.passed]
    places = {n: place for n in wrong if (place := _locate(n, dump, meaning)) is not None}
    return DumpReport(
        dump.source,
        problem,
        comparisons,
        places,
        tuple(change for change, _ in _cures(dump, meaning, wrong)) if wrong else (),
        accept=tuple(accept),
    )


class _Meaning(NamedTuple):
    """A reading of the dump's options."""

    problem: Problem
    conventions: Conventions
    rounding: Rounding | str | None

    def compare(self, dump: Dump, names: Sequence[str] | Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the comparisons of these results."""
        cotangents: dict[str, Any] = {**dump.cotangents}
        return compare(
            {name: dump.results[name] for name in names},
            self.problem,
            **cotangents,
            conventions=self.conventions,
            rounding=self.rounding,
        )


def _judge_rows(dump: Dump, meaning: _Meaning, samples: int, seed: int) -> DumpReport:
    """Judge a sample of the rows: the whole would be too large."""
    if "o" not in dump.results:
        scores = _count_scores(meaning.problem)
        raise OptionError(
            f"{dump.source} has no o, and {scores} scores, more than {WHOLE}, which are judged by "
            "rows of o: add o to the dump"
        )
    p = meaning.problem
    call: dict[str, Any] = {n: getattr(p, n) for n in LOADABLE if n not in ("causal", "gate")}
    call |= dump.arrays | {n: dump.results[n] for n in ("dq", "dk", "dv") if n in dump.results}
    rows = spot_check(
        dump.results["o"],
        dump.results.get("lse"),
        **call,
        causal=p.alignment if p.causal and p.alignment else p.causal,
        conventions=meaning.conventions,
        rounding=meaning.rounding,
        dout=dump.cotangents.get("dout"),
        dlse=dump.cotangents.get("dlse"),
        samples=samples,
        seed=seed,
    )
    unjudged = tuple(n for n in dump.results if n not in rows.ratios)
    return DumpReport(dump.source, p, (), rows=rows, unjudged=unjudged)


# --- where ----------------------------------------------------------------------------------------


def _locate(name: str, dump: Dump, meaning: _Meaning) -> str | None:
    """Return where a result is wrong; None if nothing simple separates its wrong elements."""
    p, axes = meaning.problem, AXES[name]
    want, tolerance = _exact_of(name, dump, meaning)
    got = np.asarray(dump.results[name]).astype(np.float64)
    with np.errstate(invalid="ignore"):
        wrong = np.asarray(~(abs(got - want) <= tolerance) & np.isfinite(want))
    sizes = sizes_of(p)
    lead = len(axes) - 1 if axes.startswith("b") else len(axes)
    if wrong.ndim < lead or not wrong.any():
        return None
    wrong = wrong.reshape(-1, *wrong.shape[wrong.ndim - lead :]) if lead < len(axes) else wrong
    visible = True if p.visible is None else p.visible
    scores = np.broadcast_to(visible, (*p.lead, p.H, p.T, p.S))
    empty = np.asarray(~scores.any(-1)).reshape(tuple(sizes[x] for x in "BHT"))
    judged = np.ones(wrong.shape, bool)
    place = learn([Sample(sizes, frozenset(), axes, wrong, judged, empty)])
    return place.text if place is not None and place.errors <= MISTAKEN else None


def _exact_of(name: str, dump: Dump, meaning: _Meaning) -> tuple[Array, Array]:
    """Return the exact value and the tolerance of one result."""
    results = exact(
        meaning.problem,
        **dump.cotangents,
        conventions=meaning.conventions,
        rounding=meaning.rounding,
    )
    if name in results:
        return results[name]
    return np.zeros(0), np.zeros(0)  # weights and max_score: `exact` has none


# --- which other meaning would be right -----------------------------------------------------------


def _cures(dump: Dump, meaning: _Meaning, wrong: Sequence[str]) -> Iterator[tuple[str, _Meaning]]:
    """Yield each single change of the options with which every result is right."""
    for change, other in _other_meanings(meaning):
        try:
            right = all(c.passed for c in other.compare(dump, wrong[:1]))
            if right and all(c.passed for c in other.compare(dump, dump.results)):
                yield change, other
        except NpattnError:  # a meaning that this problem cannot have, as top_left without causal
            continue


def _other_meanings(meaning: _Meaning) -> Iterator[tuple[str, _Meaning]]:
    """Yield readings of the same arrays, each with the flag that asks for it."""
    p = meaning.problem
    for name, value in _option_changes(p):
        if value is not None and isinstance(value, tuple):
            text = ",".join("none" if side is None else str(side) for side in value)
        else:
            text = f"{value:.9g}" if isinstance(value, float) else str(value)
        problem = p.replace(**{name: value})
        yield f"--{name} {text}", meaning._replace(problem=problem)
    for name, value in _convention_changes(p, meaning.conventions):
        conventions = replace(meaning.conventions, **{name: value})
        problem = p.replace(alignment=value) if name == "causal" else p
        yield (
            f"--convention {name}={value}",
            meaning._replace(conventions=conventions, problem=problem),
        )


def _option_changes(p: Problem) -> Iterator[tuple[str, Any]]:
    """Yield other values of scale, causal, window and softcap that are easily taken for these."""
    scales = {1.0, default_scale(p.D)[0], 1 / max(p.D, 1), default_scale(p.H * p.D)[0]}
    yield from (("scale", x) for x in sorted(scales) if x != p.scale)
    alignments = ("bottom_right", "top_left") if p.T != p.S else (True,)
    declared = (p.alignment if p.T != p.S else True) if p.causal else False
    yield from (("causal", x) for x in (*alignments, False) if x != declared)
    if p.window is not None:
        left, right = p.window
        yield from (("window", (left + i, right)) for i in (-1, 1) if left is not None and left + i)
        yield from (
            ("window", (left, right + i)) for i in (-1, 1) if right is not None and right + i >= 0
        )
        yield "window", None
    if p.softcap is not None:
        yield "softcap", None


def _convention_changes(p: Problem, c: Conventions) -> Iterator[tuple[str, Any]]:
    """Yield other values of each convention that makes a difference on this problem."""
    choices: dict[str, tuple[bool, tuple[Any, ...]]] = {
        "causal": (
            p.T != p.S and not p.causal and p.window is not None,
            ("bottom_right", "top_left"),
        ),
        "mask_true": (p.mask is not None, ("attend", "hide")),
        "kv_head": (p.K != p.H and p.K > 1, ("repeat", "tile")),
        "window": (p.window is not None, ("exclusive", "inclusive")),
        "softcap": (p.softcap is not None, ("before_bias", "after_bias", "after_mask")),
        "bias": (p.bias is not None, ("after_scale", "before_scale")),
        "lse_base": (True, ("e", "2")),
        "empty_row": (p.visible is not None, ("zero", "nan", "mean")),
        "hidden_fill": (p.visible is not None, (None, "min", -1e9)),
        "hidden_add": (p.visible is not None, (None, "min")),
        "weights": (p.dropout_mask is not None, ("before_dropout", "after_dropout")),
    }
    for name, (applies, values) in choices.items():
        if applies:
            yield from ((name, x) for x in values if x != getattr(c, name))


def _count_scores(p: Problem) -> int:
    return math.prod(p.lead) * p.H * p.T * p.S


def _describe(p: Problem) -> str:
    """Return shapes, dtype and options in a line."""
    shapes = ", ".join(f"{n} {getattr(p, n).shape}" for n in INPUTS)
    values = {n: getattr(p, n) for n in LOADABLE if n not in ("scale", "dropout_rate")}
    options = ", ".join(
        _say_option(p, name) for name, x in values.items() if x is not None and x is not False
    )
    return f"{shapes}, {p.q.dtype}{f'; {options}' if options else ''}"


def _say_option(p: Problem, name: str) -> str:
    value = getattr(p, name)
    if name == "causal" and p.T != p.S:
        return f"causal {p.alignment}"
    return name if value is True or isinstance(value, np.ndarray) else f"{name} {value}"
