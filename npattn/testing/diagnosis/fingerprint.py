"""Fingerprint of an unknown implementation: its layout, conventions, precision and refusals.

Small problems on which the values of one convention give different results are given to it; the
value whose exact result it returns is its own. Conventions that no result tells apart stay open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

from npattn.conventions import Conventions
from npattn.conventions.checks import LEGAL
from npattn.errors import DtypeError, OptionError
from npattn.problem.arrays import finfo
from npattn.profiles import PROFILES
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.capabilities import probe
from npattn.testing.cases.space import RANKS, Space, with_rank
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.convention_probes import probe_conventions
from npattn.testing.diagnosis.precision import describe_precision, explain_rounding
from npattn.testing.diagnosis.unknown import ENDS, FILLS, Unknown
from npattn.testing.trial import Trial

LAYOUTS = ("BHTD", "BTHD")
MIXED = 32
"""Problems of several options under the conventions found."""


@dataclass(frozen=True)
class Fingerprint:
    """Findings about an unknown implementation.

    Attributes
    ----------
    name : str
    layout : {"BHTD", "BTHD"}
    conventions : Conventions
        Those that were determined; the others at their default.
    profiles : tuple of str
        Names in `npattn.profiles.PROFILES` that agree in every convention determined; if there is
        none, "jax.nn but for empty_row_bias": those that differ in one.
    precision : str
        Rounding model that explains its errors, and dtypes that it computes in with less.
    refused : tuple of str
        Structure and options that it refuses, a line each.
    undetermined : mapping
        Convention → why nothing tells.
    agreement : mapping
        Result ("o", "lse", "dq", ...) → (number of mixed problems on which it agrees with the
        oracle under these conventions, number tried).
    crashes : tuple of str
        Calls that ended its process, a line each.
    """

    name: str
    layout: str
    conventions: Conventions
    profiles: tuple[str, ...]
    precision: str
    refused: tuple[str, ...] = ()
    undetermined: Mapping[str, str] = field(default_factory=dict)
    agreement: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    crashes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True if its output agrees on all mixed problems, and no call ended its process."""
        agree, tried = self.agreement.get("o", (0, 0))
        return agree == tried > 0 and not self.crashes

    def __str__(self) -> str:
        """Return a table: layout, conventions, precision, and what is open, refused or crashed."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.undetermined.items():
            reasons.setdefault(reason, []).append(name)
        counts = [f"{n} {agree} of {tried}" for n, (agree, tried) in self.agreement.items()]
        rows = [
            ("layout", [self.layout]),
            ("conventions", [format_conventions(self.conventions)]),
            ("profiles", [_format_profiles(self.profiles)]),
            ("precision", [self.precision]),
            ("mixed problems", [f"agree in {', '.join(counts)}" if counts else "none was tried"]),
            ("undetermined", [f"{', '.join(names)}: {why}" for why, names in reasons.items()]),
            ("refused", list(self.refused)),
            ("crashed", list(self.crashes)),
        ]
        lines = [
            f"{title if n == 0 else '':<15}{line}"
            for title, texts in rows
            for n, line in enumerate(texts)
        ]
        return "\n".join([self.name, *lines])


def fingerprint(
    f: Callable[..., Any] | Implementation,
    *,
    backward: Callable[..., Any] | None = None,
    framework: str = "auto",
    layout: str | None = None,
    rename: Mapping[str, str] | None = None,
    device: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> Fingerprint:
    """Find out the conventions of an implementation, its layout, its precision and its refusals.

    Parameters
    ----------
    f : callable or Implementation
        ``f(q, k, v, <options it has>)``.
    backward : callable, optional
        Gradients of a NumPy function, as `check` takes them; only the mixed problems use them.
    framework : {"auto", "numpy", "torch", "jax"}
    layout : {"BHTD", "BTHD"}, optional
        Axes of q, k, v, o; default: found out.
    rename : mapping, optional
        Its parameter names → npattn's.
    device : str, optional
    dtype : str, default "float32"
    seed : int, default 0

    Returns
    -------
    Fingerprint

    Raises
    ------
    DtypeError
        If `dtype` is unknown.
    OptionError
        If `f` cannot be called with q, k, v alone, or without options agrees with the oracle in no
        layout and no precision, so that conventions cannot be told from mistakes.

    Examples
    --------
    >>> from npattn.testing import fingerprint
    >>> from npattn.testing.targets.numpy import naive
    >>> fingerprint(naive).conventions.empty_row
    'nan'
    """
    options: dict[str, Any] = {"backward": backward, "framework": framework, "rename": rename}
    if isinstance(f, Implementation):
        if any(x not in (None, "auto") for x in options.values()) or layout is not None:
            raise OptionError("got options beside an Implementation: pass them to it instead")
        candidates = [f]
    else:
        made = Implementation(f, layout=layout, **options)
        candidates = in_layouts(made) if layout is None else [made]
    for implementation in candidates if device is not None else ():
        implementation.on(str(device))
    return fingerprint_first(candidates, dtype=dtype, seed=seed)


def in_layouts(implementation: Implementation) -> list[Implementation]:
    """Return an implementation of an unknown layout once in each."""
    return [implementation.with_layout(layout) for layout in LAYOUTS]


def fingerprint_first(
    candidates: Sequence[Implementation], *, dtype: str = "float32", seed: int = 0
) -> Fingerprint:
    """Return the fingerprint of the first candidate that is attention on a plain problem.

    Raises DtypeError or OptionError as `fingerprint` does.
    """
    if dtype not in ("float64", "float32", "float16", "bfloat16"):
        raise DtypeError(f"dtype is {dtype!r}, must be float64, float32, float16 or bfloat16")
    trial = _find_attention(candidates, dtype)
    with trial.implementation.framework.one_thread():
        capabilities = probe(trial)
        lost = [x for x in capabilities.findings if x.status in ("crashed", "timed out")]
        unknown = Unknown(
            replace(capabilities.trial, memo={}),
            ended={x.rule.removeprefix("option-"): x.status for x in lost},
            crashes=[x.message for x in lost],
        )
        probe_conventions(unknown)
        precision, agreement = _describe_precision(unknown, seed), _try_mixed(unknown, seed)
        return Fingerprint(
            trial.implementation.name,
            trial.implementation.layout,
            unknown.conventions,
            match_profiles(unknown),
            precision,
            capabilities.refused,
            unknown.undetermined,
            agreement,
            tuple(dict.fromkeys(unknown.crashes)),
        )


def format_conventions(conventions: Conventions) -> str:
    """Format conventions as an expression, those at their default left out."""
    own = [
        f"{f.name}={json.dumps(x)}"
        for f in fields(conventions)
        if (x := getattr(conventions, f.name)) != f.default
    ]
    text = f"Conventions({', '.join(own)})"
    return text.replace("Infinity", "math.inf").replace("NaN", "math.nan")


def _format_profiles(names: tuple[str, ...]) -> str:
    if set(names) == set(PROFILES):
        return "all that are known: what was determined tells none apart"
    return ", ".join(names) or "none that is known"


def _find_attention(candidates: Sequence[Implementation], dtype: str) -> Trial:
    """Return a trial in the layout and the rounding model that explain a plain problem."""
    reasons = []
    for implementation in candidates:
        space = Space(
            features=implementation.features, dtype=dtype, sizes=dict(implementation.sizes)
        )
        storage = implementation.weights_storage
        declared = Rounding.choose(implementation.rounding, dtype, storage)
        trial = Trial(implementation, Conventions(), declared, space)
        reason = ""
        for rank in RANKS:
            try:
                model = explain_rounding(trial, with_rank(space.base(), rank))
            except ImplementationError as err:
                reason = reason or str(err)
                continue
            if model is not None:
                return _settle_heads(replace(trial, rounding=model, memo={}), rank)
            reason = "it is not attention in any precision"
            break
        reasons.append(f"{implementation.layout}: {reason}")
    raise OptionError(
        f"{candidates[0].name} without options agrees with the oracle in no layout "
        f"({'; '.join(reasons)}): npattn check says how it differs"
    )


def _settle_heads(trial: Trial, rank: str) -> Trial:
    """Return the trial under the convention of K < H that its result is of, if there is one.

    Under another one the probe of structures would find K < H wrong, and nothing would ask for it.
    """
    base = trial.space.base()
    recipe = with_rank(replace(base, H=3 * base.K), rank)
    for kv_head in LEGAL["kv_head"]:
        own = replace(trial, conventions=replace(trial.conventions, kv_head=kv_head), memo={})
        try:
            if explain_rounding(own, recipe) is not None:
                return own
        except ImplementationError:  # it takes none: the probe says so
            break
    return trial


def match_profiles(unknown: Unknown) -> tuple[str, ...]:
    """Return the profiles that agree in all that was determined, else those but for one convention.

    Of a fill that is too far from the scores to be measured only that there is one is known.
    """
    asked = {*unknown.determined, *(FILLS if "mask_true" in unknown.determined else ())}
    least = float(finfo(unknown.trial.space.dtype).min)

    def differs(name: str, theirs: Conventions) -> bool:
        own, value = (getattr(x, name) for x in (unknown.conventions, theirs))
        if name == "empty_row_bias":  # None: as empty_row
            own, value = own or unknown.conventions.empty_row, value or theirs.empty_row
        if name in FILLS and (own is None or value is None or name not in unknown.determined):
            return (own is None) != (value is None)
        return bool((least if own == "min" else own) != (least if value == "min" else value))

    differences = {
        name: sorted(n for n in asked if differs(n, profile.conventions))
        for name, profile in PROFILES.items()
    }
    same = tuple(name for name, wrong in differences.items() if not wrong)
    near = (f"{name} but for {wrong[0]}" for name, wrong in differences.items() if len(wrong) == 1)
    return same or tuple(near)


def _describe_precision(unknown: Unknown, seed: int) -> str:
    try:
        return describe_precision(unknown.trial, seed)
    except ENDS as err:
        unknown.crashes.append(f"plain problems: {err}")
        return "its process ended on plain problems"


def _try_mixed(unknown: Unknown, seed: int) -> dict[str, tuple[int, int]]:
    """Count the problems of several options on which each result agrees with the oracle."""
    counts: dict[str, tuple[int, int]] = {}
    trial = unknown.trial
    for recipe in islice(trial.cases(Pools(trial.space), seed, MIXED), MIXED):
        try:
            compared = trial.agreement(recipe)
        except ENDS as err:
            unknown.crashes.append(f"{recipe}: {err}")
            continue
        except ImplementationError:
            continue  # a combination of options that it refuses says nothing of conventions
        for name, comparison in compared.items():
            agree, tried = counts.get(name, (0, 0))
            counts[name] = agree + comparison.passed, tried + 1
    return counts
