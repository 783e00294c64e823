"""What was found: cells, their ratios, a table and JSON of the same numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from npattn.bench.contestants import Contestant
from npattn.bench.memory import Probe

__all__ = ["PASSES", "Cell", "Report", "Times"]

PASSES = {"forward": "forward", "both": "forward + backward"}


@dataclass(frozen=True)
class Times:
    """Seconds of one call in each round."""

    median: float
    least: float
    most: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, seconds: list[float]) -> Times | None:
        """None of no rounds."""
        if not seconds:
            return None
        return cls(median(seconds), min(seconds), max(seconds), tuple(seconds))


@dataclass(frozen=True)
class Cell:
    """One contestant on one case, dtype and length.

    Attributes
    ----------
    case, dtype : str
    T : int
    contestant : Contestant
    status : str
        "ok", "wrong", "refused" (it raised, or its process ended) or "skipped" (it would take too
        long or too much).
    note : str
        Why.
    forward, both : Times or None
    inputs, memory_forward, memory_both : int or None
        Bytes: of what it was given, and the peak above that.
    """

    case: str
    dtype: str
    T: int
    contestant: Contestant
    status: str = "ok"
    note: str = ""
    forward: Times | None = None
    both: Times | None = None
    inputs: int | None = None
    memory_forward: int | None = None
    memory_both: int | None = None

    def said(self, status: str, note: str) -> Cell:
        return replace(self, status=status, note=note)

    def with_memory(self, seen: Probe) -> Cell:
        return replace(self, inputs=seen.inputs, memory_forward=seen.forward, memory_both=seen.both)

    def with_times(self, forward: Times | None, both: Times | None) -> Cell:
        return replace(self, forward=forward, both=both)

    def times(self, of: str) -> Times | None:
        """Those of "forward" or "both"."""
        return self.forward if of == "forward" else self.both

    @property
    def counts(self) -> bool:
        """Whether its times mean anything."""
        return self.status == "ok"


@dataclass(frozen=True)
class Report:
    """What `bench` found.

    Attributes
    ----------
    about : dict
        Versions, machine, settings.
    cells : tuple of Cell
    """

    about: dict[str, Any]
    cells: tuple[Cell, ...]

    def groups(self) -> dict[tuple[str, str, int], tuple[Cell, ...]]:
        """The cells that were measured together: by case, dtype and T."""
        found: dict[tuple[str, str, int], tuple[Cell, ...]] = {}
        for cell in self.cells:
            key = (cell.case, cell.dtype, cell.T)
            found[key] = (*found.get(key, ()), cell)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One dict a cell, with its ratios: what both the table and the JSON show."""
        return [_row(cell, group) for group in self.groups().values() for cell in group]

    def to_dict(self) -> dict[str, Any]:
        return {"about": self.about, "rows": self.rows()}

    def to_json(self, path: str | Path) -> None:
        """Write everything there."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", "utf-8")

    def __str__(self) -> str:
        parts = [head(self.about)]
        for (case, dtype), rows in _by_case(self.rows()).items():
            parts.append(f"{case}, {dtype}\n{_table(HEADS, [_words(row) for row in rows])}")
        return "\n\n".join([*parts, LEGEND, *_summary(self.rows())])


def _row(cell: Cell, group: tuple[Cell, ...]) -> dict[str, Any]:
    found = {
        "case": cell.case,
        "dtype": cell.dtype,
        "T": cell.T,
        "contestant": cell.contestant.name,
        "role": cell.contestant.role,
        "status": cell.status,
        "note": cell.note,
        "inputs": cell.inputs,
    }
    for name in PASSES:
        times = cell.times(name)
        found[name] = None if times is None else asdict(times) | _ratios(cell, group, name)
        found[f"memory_{name}"] = cell.memory_forward if name == "forward" else cell.memory_both
    return found


def _ratios(cell: Cell, group: tuple[Cell, ...], name: str) -> dict[str, float | None]:
    """Its median by that of the best peer and of the ceiling; that of the floor by it."""

    def best(role: str) -> float | None:
        seen = [c.times(name) for c in group if c.contestant.role == role and c.counts]
        return min((times.median for times in seen if times is not None), default=None)

    own = cell.times(name)
    assert own is not None
    peer, ceiling, floor = (best(role) for role in ("peer", "ceiling", "floor"))

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if cell.counts and above is not None and below else None

    return {
        "to_best_peer": ratio(own.median, peer),
        "to_ceiling": ratio(own.median, ceiling),
        "of_floor": ratio(floor, own.median),
    }


# --- the table ------------------------------------------------------------------------------------

LEGEND = """median (least–most) of the rounds  /peer: by that of the best peer
/ceiling: by that of the matrix products alone  floor: the share of it that products and exp take
peak: memory above the inputs"""

HEADS = (
    *("T", "contestant", "forward", "/peer", "/ceiling", "floor", "peak"),
    *("forward + backward", "/peer", "/ceiling", "floor", "peak", ""),
)


def head(about: dict[str, Any]) -> str:
    """The lines above the table."""
    versions = "  ".join(f"{name} {version}" for name, version in about["versions"].items())
    avx512 = {True: "with", False: "without", None: "unknown whether with"}[about["avx512"]]
    before, after = about["load"]
    lines = [
        "npattn bench",
        versions,
        f"{about['cpu']}, {about['cores']} cores, {avx512} AVX-512, {about['system']}",
        f"threads {about['threads']}  seed {about['seed']}  rounds {about['rounds']}, in turns",
        f"load {before} before, {after} after",
        f"peak memory in a process of its own: {about['memory_by']}",
        f"at most {about['seconds']:g} s a contestant and length, {_bytes(about['memory'])}",
    ]
    return "\n".join(lines + ["INTERRUPTED: some is missing"] * about["interrupted"])


def _by_case(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["case"], row["dtype"]), []).append(row)
    return found


def _summary(rows: list[dict[str, Any]], name: str = "npattn.tiled") -> list[str]:
    """One number a case and T: the median of that contestant by that of the best peer."""
    found: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        for key, words in PASSES.items():
            times = row[key] if row["contestant"] == name else None
            if times is not None:
                line = found.setdefault((row["case"], row["dtype"], words), {})
                line[row["T"]] = _number(times["to_best_peer"])
    lengths = sorted({T for line in found.values() for T in line})
    lines = [[case, f"{dtype}, {words}", *(line.get(T, "–") for T in lengths), ""]
             for (case, dtype, words), line in found.items()]  # fmt: skip
    heads = ("case", f"{name} / best peer, T =", *map(str, lengths), "")
    return [_table(heads, lines)] if lines else []


def _words(row: dict[str, Any]) -> list[str]:
    cells = [str(row["T"]), row["contestant"]]
    for name in PASSES:
        times = row[name]
        if times is None:
            cells += ["–"] * 4
        else:
            spread = f"({_seconds(times['least'])}–{_seconds(times['most'])})"
            cells.append(f"{_seconds(times['median'])} {spread}")
            cells += [_number(times["to_best_peer"]), _number(times["to_ceiling"])]
            share = times["of_floor"]
            cells.append("–" if share is None else f"{100 * share:.0f} %")
        cells.append(_bytes(row[f"memory_{name}"]))
    note = "" if row["status"] == "ok" else f"{row['status']}: {row['note']}"
    return [*cells, note]


def _seconds(x: float) -> str:
    """Three digits, with the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if x >= size:
            return f"{x / size:.3g} {unit}"
    return f"{x / 1e-6:.3g} µs"


def _bytes(n: int | None) -> str:
    if n is None:
        return "–"
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}"


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    """Columns aligned to the right, but for names and notes."""
    lines = [list(heads), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if i in (1, len(heads) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, lines))
