"""Checkers of gradients on the same wrong gradients, and on right ones that are hard to confirm.

    python -m benchmarks.power.gradients --write
    python -m benchmarks.power.gradients --only "layer norm" --seeds 20

Each checker is asked as its documentation shows it, with its default tolerances. SciPy returns a
number and leaves the threshold to its caller: it gets the one of `THRESHOLDS` with which it judges
most cases right. A checker that raises because it cannot take a case has not judged it right.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.power.gradient_cases import CASES, Case
from benchmarks.power.tables import markdown, put
from npattn.testing import check_gradients

PAGE = Path(__file__).parents[2] / "docs" / "gradients.md"
THRESHOLDS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
"""Errors of scipy.optimize.check_grad, as a part of the gradient, up to which it is right."""


def own(case: Case, seed: int = 0) -> bool:
    return check_gradients(case.f, case.args, vjp=case.vjp, framework="numpy", seed=seed).passed


def torch_gradcheck(case: Case) -> bool:
    import torch

    to = torch.from_numpy

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.save_for_backward(*args)
            return to(np.asarray(case.f(*(x.numpy() for x in args))))

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            grads = case.vjp(dout.numpy(), *(x.numpy() for x in ctx.saved_tensors))
            return tuple(to(np.ascontiguousarray(g)) for g in grads)

    args = [to(x.copy()).requires_grad_() for x in case.args]
    return bool(torch.autograd.gradcheck(Function.apply, args))


def scipy_error(case: Case) -> float:
    """Return the error of check_grad, as a part of the gradient."""
    from scipy.optimize import check_grad

    rng = np.random.default_rng(0)
    dout = rng.standard_normal(np.shape(case.f(*case.args))).astype(case.args[0].dtype)
    ends = np.cumsum([x.size for x in case.args])[:-1]

    def split(flat: Any) -> list[Any]:
        parts = zip(np.split(flat, ends), case.args, strict=True)
        return [part.reshape(x.shape).astype(x.dtype) for part, x in parts]

    def value(flat: Any) -> float:
        return float((dout * case.f(*split(flat))).sum())

    def gradient(flat: Any) -> Any:
        return np.concatenate([np.ravel(g) for g in case.vjp(dout, *split(flat))]).astype(float)

    start = np.concatenate([x.ravel() for x in case.args]).astype(float)
    return float(check_grad(value, gradient, start) / max(np.linalg.norm(gradient(start)), 1e-300))


def scipy_check_grad(case: Case, threshold: float) -> bool:
    return scipy_error(case) <= threshold


def jax_check_grads(case: Case) -> bool:
    import jax
    from jax.test_util import check_grads

    with jax.enable_x64(True):
        result = np.asarray(case.f(*case.args))
        like = jax.ShapeDtypeStruct(result.shape, result.dtype)
        likes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.args)

        @jax.custom_vjp
        def f(*args: Any) -> Any:
            return jax.pure_callback(lambda *own: case.f(*map(np.asarray, own)), like, *args)

        def backward(args: Any, dout: Any) -> Any:
            def call(*own: Any) -> Any:
                return case.vjp(*map(np.asarray, own))

            return jax.pure_callback(call, likes, dout, *args)

        f.defvjp(lambda *args: (f(*args), args), backward)
        check_grads(f, tuple(map(jax.numpy.asarray, case.args)), order=1, modes=["rev"])
    return True


def autograd_check_grads(case: Case) -> bool:
    from autograd.extend import defvjp, primitive
    from autograd.test_util import check_grads

    f = primitive(lambda *args: case.f(*args))

    def pull(i: int) -> Callable[..., Any]:
        return lambda _, *args: lambda dout: case.vjp(dout, *args)[i]

    defvjp(f, *map(pull, range(len(case.args))))
    np.random.seed(0)  # noqa: NPY002  it draws its directions there
    check_grads(f, modes=["rev"], order=1)(*case.args)
    return True


CHECKERS: dict[str, tuple[str, Callable[[Case], bool]]] = {
    "`npattn.testing.check_gradients`": ("npattn", own),
    "`torch.autograd.gradcheck`": ("torch", torch_gradcheck),
    "`jax.test_util.check_grads`": ("jax", jax_check_grads),
    "`autograd.test_util.check_grads`": ("autograd", autograd_check_grads),
}


def is_judged_right(checker: Callable[[Case], bool], case: Case) -> bool:
    """Return True if a checker passes a right gradient, or fails a wrong one."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return checker(case) == case.right
    except Exception:  # noqa: BLE001  a checker fails a gradient by whatever it raises
        return not case.right


def judge(checker: Callable[[Case], bool], cases: list[Case]) -> tuple[list[Case], float]:
    """Return the cases that are misjudged, and the seconds that all took."""
    began = time.perf_counter()
    missed = [case for case in cases if not is_judged_right(checker, case)]
    return missed, time.perf_counter() - began


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--only", default="", help="Cases whose name contains this.")
@click.option("--seeds", default=1, show_default=True, help="Seeds of check_gradients to count.")
@click.option("--write", is_flag=True, help="Put the table into docs/gradients.md.")
def main(only: str, seeds: int, write: bool) -> None:
    cases = [case for case in CASES if only in case.name]
    checkers = {name: f for name, (home, f) in CHECKERS.items() if find_spec(home)}
    if find_spec("scipy"):
        best = min(
            (partial(scipy_check_grad, threshold=t) for t in THRESHOLDS),
            key=lambda f: len(judge(f, cases)[0]),
        )
        checkers[f"`scipy.optimize.check_grad` ≤ {best.keywords['threshold']:g}"] = best
    rows = []
    for name, checker in checkers.items():
        missed, seconds = judge(checker, cases)
        counts = [
            f"{sum(c.right == right for c in cases) - sum(c.right == right for c in missed)} of "
            f"{sum(c.right == right for c in cases)}"
            for right in (False, True)
        ]
        rows.append([name, *counts, f"{1000 * seconds / max(len(cases), 1):.0f}"])
        print(f"{name}: {', '.join(counts)}; {seconds:.1f} s", flush=True)
        for case in missed:
            print(f"    {'false alarm' if case.right else 'not found'}: {case.name}")
    heads = ["checker", "wrong gradients found", "right gradients passed", "ms a case"]
    table = markdown(heads, rows)
    if seeds > 1:
        runs = [(case, seed) for seed in range(seeds) for case in cases]
        bad = [(c.name, s) for c, s in runs if not is_judged_right(partial(own, seed=s), c)]
        print(f"misjudged over {seeds} seeds: {len(bad)} of {len(runs)}", *bad, sep="\n    ")
    print(table)
    if write:
        put(PAGE, "checkers", table)


if __name__ == "__main__":
    main()
