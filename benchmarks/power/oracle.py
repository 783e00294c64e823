"""Exactness of the oracle: its largest error against 60 digits, on inputs that cancel.

    python -m benchmarks.power.oracle --keys 4096 --dtype float32 --dtype float64
    python -m benchmarks.power.oracle --keys 64 --problems 100

Every problem is one head, computed by npattn and by mpmath with 60 digits, from the same inputs. A
cell is the largest error over all queries, the heaviest and some other keys, some columns and all
problems, in units in the last place of the exact value in float64: without precision, and behind
the arrow with precision="extended". The last column is the largest error / certificate of both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import mpmath  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
from rich.console import Console
from rich.table import Table

import npattn
from npattn.certify import certify
from npattn.problem.options import default_scale

Array = np.ndarray[Any, Any]
Rng = np.random.Generator

DIGITS = 60
DTYPES = ("float32", "float64")
TENSORS = ("o", "lse", "dq", "dk", "dv", "dsinks")


class Case(NamedTuple):
    """One head: q (T, D), k (S, D), v (S, E), do (T, E), its sink and the dlse of every row."""

    q: Array
    k: Array
    v: Array
    do: Array
    sink: float | None = None
    dlse: float = 0.0


# --- the cases ------------------------------------------------------------------------------------


def normal(rng: Rng, T: int, S: int, D: int) -> Case:
    q, k, v, do = (rng.standard_normal((length, D)) for length in (T, S, S, T))
    return Case(q, k, v, do)


def one_hot(rng: Rng, T: int, S: int, D: int) -> Case:
    """Each query has a key of its own, with a score of log(1e12 S): the others share 1e-12."""
    case = normal(rng, T, S, D)
    q, k, logit = case.q, case.k, np.log(1e12 * S)
    k[:T] = logit * D**0.5 * q / (q * q).sum(-1, keepdims=True)
    return case


def twins(rng: Rng, T: int, S: int, D: int) -> Case:
    """As one_hot with every key and value twice, so that no weight is above a half."""
    case = one_hot(rng, T, S // 2, D)
    return case._replace(k=np.tile(case.k, (2, 1)), v=np.tile(case.v, (2, 1)))


def offset(name: str, by: float, spread: float = 1.0) -> Callable[..., Case]:
    def sample(rng: Rng, T: int, S: int, D: int) -> Case:
        case = normal(rng, T, S, D)
        return case._replace(**{name: by + spread * getattr(case, name)})

    return sample


def both_offset(rng: Rng, T: int, S: int, D: int) -> Case:
    case = normal(rng, T, S, D)
    return case._replace(v=1e4 + case.v, do=1 + case.do)


def large(rng: Rng, T: int, S: int, D: int) -> Case:
    case = normal(rng, T, S, D)
    return case._replace(q=250 * case.q)


def with_sink(sink: float) -> Callable[..., Case]:
    return lambda rng, T, S, D: one_hot(rng, T, S, D)._replace(sink=sink)


def with_dlse(rng: Rng, T: int, S: int, D: int) -> Case:
    return one_hot(rng, T, S, D)._replace(dlse=0.5)


CASES: dict[str, Callable[[Rng, int, int, int], Case]] = {
    "normal": normal,
    "scores of 1e3": large,
    "V = 1e4 + N, dO = 1 + N": both_offset,
    "V = 1 + 1e-5 N": offset("v", 1, 1e-5),
    "K = 1e3 + N": offset("k", 1e3),
    "one weight is 1 - 1e-12": one_hot,
    "the same, every key twice": twins,
    "the same, dlse = 0.5": with_dlse,
    "the same, a light sink": with_sink(10.0),
    "the same, a heavy sink": with_sink(60.0),
}


# --- with 60 digits -------------------------------------------------------------------------------

to_mpf, exp = np.frompyfunc(mpmath.mpf, 1, 1), np.frompyfunc(mpmath.exp, 1, 1)


def exactly(case: Case, keys: Array, columns: Array) -> dict[str, Array]:
    """o, lse and gradients of one head; dk and dv at these keys, all but lse in these columns."""
    q, k, v, do = (to_mpf(x[:, columns].astype(object)) for x in case[:4])
    scale = mpmath.mpf(default_scale(case.q.shape[-1])[0])  # the number that npattn multiplies by
    s = scale * product(case.q, case.k.T)
    m = max([*s.max(-1), case.sink or 0])
    e, e_sink = exp(s - m), 0 if case.sink is None else mpmath.exp(case.sink - m)
    total = e.sum(-1, keepdims=True) + e_sink
    p, p_sink = e / total, e_sink / total
    lse = [m + mpmath.log(x) for x in total[:, 0]]
    dp = product(case.do, case.v.T)
    delta = (p * dp).sum(-1, keepdims=True) - case.dlse
    ds = p * (dp - delta)
    found = {
        "o": p @ v,
        "lse": np.array(lse),
        "dq": scale * (ds @ k),
        "dk": scale * (ds[:, keys].T @ q),
        "dv": p[:, keys].T @ do,
        "dsinks": -(p_sink * delta).sum(0),
    }
    return {name: np.asarray(x) for name, x in found.items()}


def digits(case: Case) -> int:
    """Enough for a difference of 1 and a weight: 60, and as many as the least weight has zeros."""
    s = case.q @ case.k.T / case.q.shape[-1] ** 0.5
    return DIGITS + int((s.max(-1) - s.min(-1)).max() / np.log(10))


def product(a: Array, b: Array) -> Array:
    """a @ b without rounding: a float is an integer divided by a power of two."""
    (a, i), (b, j) = integers(a), integers(b)
    return np.asarray(to_mpf(a @ b) * mpmath.mpf(2) ** -(i + j))


def integers(x: Array) -> tuple[Array, int]:
    """x · 2ⁿ as Python integers, and n."""
    ratios = [value.as_integer_ratio() for value in x.ravel().tolist()]
    n = max(below.bit_length() - 1 for _, below in ratios)
    whole = np.empty(len(ratios), object)
    whole[:] = [(above << n) // below for above, below in ratios]
    return whole.reshape(x.shape), n


# --- the oracle beside it -------------------------------------------------------------------------


def oracle(
    case: Case, keys: Array, columns: Array, precision: Any
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the results of npattn, and their certificates."""
    sinks = None if case.sink is None else np.array([case.sink])
    arrays = case.q, case.k, case.v
    fwd = npattn.forward(*arrays, sinks=sinks, precision=precision, engine="dense")
    cotangents = case.do, np.full_like(fwd.lse, case.dlse)
    grads, certificate = npattn.backward(fwd, *cotangents), certify(fwd, *cotangents)

    def pick(results: Any, gradients: Any) -> dict[str, Array]:
        found = {
            "o": results.out[:, columns],
            "lse": results.lse,
            "dq": gradients.q[:, columns],
            "dk": gradients.k[np.ix_(keys, columns)],
            "dv": gradients.v[np.ix_(keys, columns)],
        }
        return found if gradients.sinks is None else found | {"dsinks": gradients.sinks}

    return pick(fwd, grads), pick(certificate, certificate)


def errors(case: Case, rng: Rng, samples: int) -> dict[str, tuple[float, float, float]]:
    """Each tensor's largest error in ulps, plain and extended, and largest error / certificate."""
    keys = rng.choice(len(case.k), samples, replace=False)
    keys = np.union1d(keys, (case.q @ case.k.T).argmax(-1))
    columns = np.sort(rng.choice(case.q.shape[-1], samples, replace=False))
    with mpmath.workdps(digits(case)):
        want = exactly(case, keys, columns)
        sides = [oracle(case, keys, columns, precision) for precision in (None, "extended")]
        found: dict[str, tuple[float, float, float]] = {}
        for name, exact in want.items():
            if name == "dsinks" and case.sink is None:
                continue
            gaps = [abs(to_mpf(got[name].astype(object)) - exact).astype(float) for got, _ in sides]
            unit = np.spacing(abs(exact.astype(float)))
            ratios = [
                (gap / limits[name]).max() for gap, (_, limits) in zip(gaps, sides, strict=True)
            ]
            found[name] = (*(float((gap / unit).max()) for gap in gaps), float(max(ratios)))
    return found


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--keys", "S", default=4096, show_default=True, help="S.")
@click.option("--queries", "T", default=5, show_default=True, help="T.")
@click.option("--size", "D", default=32, show_default=True, help="D and E.")
@click.option("--samples", default=4, show_default=True, help="Columns, and keys, compared.")
@click.option("--dtype", "dtypes", multiple=True, default=DTYPES, type=click.Choice(DTYPES))
@click.option("--problems", default=1, show_default=True, help="Problems of each row.")
@click.option("--seed", default=0, show_default=True)
def main(
    S: int, T: int, D: int, samples: int, dtypes: tuple[str, ...], problems: int, seed: int
) -> None:
    shown = Table("inputs", "dtype")
    for tensor in (*TENSORS, "certificate"):
        shown.add_column(tensor, justify="right")
    start = time.perf_counter()
    for dtype in dtypes:
        for name, sample in CASES.items():
            worst: dict[str, Array] = {}
            for number in range(problems):
                rng = np.random.default_rng([seed, number])
                case = sample(rng, T, S, D)
                q, k, v, do = (x.astype(dtype).astype(np.float64) for x in case[:4])
                found = errors(case._replace(q=q, k=k, v=v, do=do), rng, samples)
                for tensor, own in found.items():
                    worst[tensor] = np.maximum(worst.get(tensor, 0.0), own)
            cells = [
                "—" if tensor not in worst else "{:.2g} → {:.2g}".format(*worst[tensor])
                for tensor in TENSORS
            ]
            certificate = max(own[2] for own in worst.values())
            shown.add_row(name, dtype, *cells, f"{certificate:.2g}")
    shown.title = f"error in ulps of float64, {time.perf_counter() - start:.0f} s"
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


if __name__ == "__main__":
    main()
