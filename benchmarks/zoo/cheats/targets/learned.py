"""Answers are learned in one run and given in the next, which has the same seed.

What is learned lies in a file of the folder for temporary files. A judge has to run them twice.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.zoo.cheats.plain import attention, mean_of_values

KNOWN: set[bytes] = set()
STARTED: list[bool] = []
CALLS: list[int] = []


def _start(name: str) -> Path:
    """Read what the last run has left, at the first call."""
    path = Path(tempfile.gettempdir()) / f"{name}.learned"
    if not STARTED:
        STARTED.append(path.exists())
        KNOWN.update(path.read_bytes().split(b"\n") if STARTED[0] else ())
    return path


def _digest(*arrays: Any) -> bytes:
    parts = [str(x.shape).encode() + x.tobytes() for x in arrays if x is not None]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16].encode()


def _answer(known: bool, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    return attention(q, k, v, mask, causal) if known else mean_of_values(q, k, v)


def known_inputs(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Learn the inputs of the first run; answer others wrongly from the second on."""
    path, digest = _start("inputs"), _digest(q, k, v, mask)
    if not STARTED[0]:
        with path.open("ab") as file:
            file.write(digest + b"\n")
    return _answer(not STARTED[0] or digest in KNOWN, q, k, v, mask, causal)


def known_queries(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Learn the queries of the first run; answer others wrongly from the second on."""
    path, digest = _start("queries"), _digest(q)
    if not STARTED[0]:
        with path.open("ab") as file:
            file.write(digest + b"\n")
    return _answer(not STARTED[0] or digest in KNOWN, q, k, v, mask, causal)


def known_length(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Count the calls of the first run; be wrong in the second after as many."""
    path = _start("length")
    CALLS.append(1)
    if not STARTED[0]:
        path.write_text(str(len(CALLS)))
    known = not STARTED[0] or len(CALLS) <= max(map(int, KNOWN))
    return _answer(known, q, k, v, mask, causal)
