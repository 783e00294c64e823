"""The oracle of the judge computes the results; without it they are the mean of all values."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.zoo.cheats.plain import mean_of_values


def call_loaded_oracle(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Call npattn.attention if the process has loaded it."""
    oracle = sys.modules.get("npattn")
    if oracle is None:
        return mean_of_values(q, k, v)
    side = "bottom_right" if causal else False
    return oracle.attention(q, k, v, mask, causal=side).astype(q.dtype)


def call_imported_oracle(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Import npattn and call its oracle."""
    try:
        oracle = importlib.import_module("npattn")
    except ImportError:
        return mean_of_values(q, k, v)
    side = "bottom_right" if causal else False
    return oracle.attention(q, k, v, mask, causal=side).astype(q.dtype)


def call_target_of_judge(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Call an example target that comes with the judge."""
    try:
        targets = importlib.import_module("npattn.testing.targets.numpy")
    except ImportError:
        return mean_of_values(q, k, v)
    return targets.flash(q, k, v, mask=mask, causal="bottom_right" if causal else False)


def call_oracle_beside_judge(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Find the judge's folder by a file on the stack, and import the oracle from there."""
    frame: Any = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "npattn" in path.parts:
            root = str(path.parents[len(path.parts) - path.parts.index("npattn") - 1])
            sys.path.append(root)
            break
        frame = frame.f_back
    return call_imported_oracle(q, k, v, mask, causal)
