"""Results: cells, their ratios, and the same numbers as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.speed.contestants import Contestant
from benchmarks.speed.memory import Probe

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
        """Summarise the rounds; None if there are none."""
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
        much time or memory).
    note : str
        The reason for a status other than "ok".
    forward, both : Times or None
    inputs, memory_forward, memory_both : int or None
        Bytes of the inputs, and of the peak above them.
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

    def with_status(self, status: str, note: str) -> Cell:
        return replace(self, status=status, note=note)

    def with_memory(self, probe: Probe) -> Cell:
        return replace(
            self, inputs=probe.inputs, memory_forward=probe.forward, memory_both=probe.both
        )

    def with_times(self, forward: Times | None, both: Times | None) -> Cell:
        return replace(self, forward=forward, both=both)

    def times(self, of: str) -> Times | None:
        """Times of "forward" or "both"."""
        return self.forward if of == "forward" else self.both

    @property
    def counts(self) -> bool:
        """True if its results are right, so that its times count."""
        return self.status == "ok"


@dataclass(frozen=True)
class Report:
    """Result of `bench`.

    Attributes
    ----------
    about : dict
        Versions, machine, settings.
    cells : tuple of Cell
    """

    about: dict[str, Any]
    cells: tuple[Cell, ...]

    def groups(self) -> dict[tuple[str, str, int], tuple[Cell, ...]]:
        """Group the cells that were measured together, by case, dtype and T."""
        groups: dict[tuple[str, str, int], tuple[Cell, ...]] = {}
        for cell in self.cells:
            key = (cell.case, cell.dtype, cell.T)
            groups[key] = (*groups.get(key, ()), cell)
        return groups

    def rows(self) -> list[dict[str, Any]]:
        """One dict per cell, with its ratios, for the table and the JSON."""
        return [_row(cell, group) for group in self.groups().values() for cell in group]

    def to_dict(self) -> dict[str, Any]:
        return {"about": self.about, "rows": self.rows()}

    def to_json(self, path: str | Path) -> None:
        """Write everything to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", "utf-8")

    def __str__(self) -> str:
        parts = [head(self.about)]
        for (case, dtype), rows in _by_case(self.rows()).items():
            parts.append(f"{case}, {dtype}\n{_table(HEADS, [_format_row(row) for row in rows])}")
        return "\n\n".join([*parts, LEGEND, *_summary(self.rows())])


def _row(cell: Cell, group: tuple[Cell, ...]) -> dict[str, Any]:
    row = {
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
        row[name] = None if times is None else asdict(times) | _ratios(cell, group, name)
        row[f"memory_{name}"] = cell.memory_forward if name == "forward" else cell.memory_both
    return row


def _ratios(cell: Cell, group: tuple[Cell, ...], name: str) -> dict[str, float | None]:
    """Ratios of its median to the best peer and to the ceiling, and of the floor to it."""

    def best(role: str) -> float | None:
        times = [c.times(name) for c in group if c.contestant.role == role and c.counts]
        return min((t.median for t in times if t is not None), default=None)

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
    """Format the lines above the table."""
    versions = "  ".join(f"{name} {version}" for name, version in about["versions"].items())
    avx512 = {True: "with", False: "without", None: "unknown whether with"}[about["avx512"]]
    before, after = about["load"]
    lines = [
        "python -m benchmarks.speed",
        versions,
        f"{about['cpu']}, {about['cores']} cores, {avx512} AVX-512, {about['system']}",
        f"threads {about['threads']}  seed {about['seed']}  rounds {about['rounds']}, in turns",
        f"load {before} before, {after} after",
        f"peak memory in a process of its own: {about['memory_by']}",
        f"at most {about['seconds']:g} s a contestant and length, {_format_bytes(about['memory'])}",
    ]
    return "\n".join(lines + ["INTERRUPTED: some results are missing"] * about["interrupted"])


def _by_case(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["dtype"]), []).append(row)
    return groups


def _summary(rows: list[dict[str, Any]], name: str = "npattn.tiled") -> list[str]:
    """Format one number per case and T: the median of a contestant by that of the best peer."""
    lines_by_case: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        for key, passes in PASSES.items():
            times = row[key] if row["contestant"] == name else None
            if times is not None:
                line = lines_by_case.setdefault((row["case"], row["dtype"], passes), {})
                line[row["T"]] = _format_ratio(times["to_best_peer"])
    lengths = sorted({T for line in lines_by_case.values() for T in line})
    lines = [[case, f"{dtype}, {passes}", *(line.get(T, "–") for T in lengths), ""]
             for (case, dtype, passes), line in lines_by_case.items()]  # fmt: skip
    heads = ("case", f"{name} / best peer, T =", *map(str, lengths), "")
    return [_table(heads, lines)] if lines else []


def _format_row(row: dict[str, Any]) -> list[str]:
    cells = [str(row["T"]), row["contestant"]]
    for name in PASSES:
        times = row[name]
        if times is None:
            cells += ["–"] * 4
        else:
            spread = f"({_format_seconds(times['least'])}–{_format_seconds(times['most'])})"
            cells.append(f"{_format_seconds(times['median'])} {spread}")
            cells += [_format_ratio(times["to_best_peer"]), _format_ratio(times["to_ceiling"])]
            share = times["of_floor"]
            cells.append("–" if share is None else f"{100 * share:.0f} %")
        cells.append(_format_bytes(row[f"memory_{name}"]))
    note = "" if row["status"] == "ok" else f"{row['status']}: {row['note']}"
    return [*cells, note]


def _format_seconds(x: float) -> str:
    """Format seconds with three digits and a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if x >= size:
            return f"{x / size:.3g} {unit}"
    return f"{x / 1e-6:.3g} µs"


def _format_bytes(n: int | None) -> str:
    if n is None:
        return "–"
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def _format_ratio(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}"


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    """Format a table, aligned to the right except for names and notes."""
    lines = [list(heads), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if i in (1, len(heads) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, lines))
