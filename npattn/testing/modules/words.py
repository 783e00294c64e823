"""What a judge has found out about a module, in words: projections, masks, and what is left out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from npattn.testing.adapters.modules import Returned
from npattn.testing.modules.judge import Judge


def describe_roles(judge: Judge) -> str:
    """Return the projections, and what changing each of them confirms.

    A change of the last head of W_q, or of W_k, must change the weights of the heads that have it
    and of no other; one of W_v or W_o must change the output and no weights.
    """
    if not judge.repeats:
        return f"{judge.reading}; not confirmed, since two calls differ"
    odd = [text for role in ("wq", "wk", "wv", "wo") if (text := _test_role(judge, role))]
    confirmed = "each confirmed by changing it" if not odd else "; ".join(odd)
    return f"{judge.reading}; {confirmed}"


def _test_role(judge: Judge, role: str) -> str:
    """Return what is odd about the effect of a role; "" if nothing is."""
    reading, name = judge.reading, judge.reading.name(role)
    if role not in reading.indices:
        return ""
    index, heads = reading.indices[role], range(reading.num_heads)
    affected: Iterable[int] = ()
    if role in ("wq", "wk"):
        D = reading.indices["wq"].shape[1] // reading.num_heads
        index = index[:, -D:]
        group = reading.num_heads // reading.num_kv_heads if role == "wk" else 1
        affected = heads[-group:]
    values = judge.values.copy()
    values[index] = values[index] + np.asarray(0.5, values.dtype)
    before = judge.ask(judge.probe)
    with judge.module.replacing(judge.flat.split(values)):
        after = judge.ask(judge.probe)
    if np.array_equal(before.out, after.out):
        return f"a change of {name} changes nothing"
    changed = _changed_heads(before, after)
    if changed is None or changed == set(affected):
        return ""
    which = ", ".join(map(str, sorted(changed))) or "no head"
    return f"a change of {name} changes the weights of {which}, expected {[*affected] or 'none'}"


def _changed_heads(before: Returned, after: Returned) -> set[int] | None:
    """Return the heads whose weights differ; None where they are not returned by head."""
    if before.weights is None or after.weights is None or before.weights.ndim != 4:
        return None
    differ = (before.weights != after.weights).any((0, 2, 3))
    return set(np.flatnonzero(differ).tolist())
