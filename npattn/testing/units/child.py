"""Process that judges one unit, which comes on standard input: python -m … RESULT.

Standard input stays open as long as somebody waits for the result: when it is closed, the process
ends, and with it the worker that it has started.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from npattn.testing.units.unit import Unit, do_unit


def main(path: str) -> None:
    """Read a unit, judge it, and write the result to a file."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    text = sys.stdin.readline()
    threading.Thread(target=_end_with_reader, daemon=True).start()
    unit = Unit.from_text(text)
    os.chdir(unit.folder)
    Path(path).write_text(do_unit(unit).to_text(), "utf-8")


def _end_with_reader() -> None:
    while os.read(0, 1 << 12):  # not by sys.stdin, whose lock an ending interpreter wants
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # the worker is closed in order


if __name__ == "__main__":
    main(sys.argv[1])
