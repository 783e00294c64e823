"""Parts of the exact engine that kernels in Triton compute in one pass on CUDA.

Torch reads and writes a tile once for each operation. In float64 that takes as long as the matrix
products. Problems of one tile stay with torch: launching takes longer than computing there, and
what many small problems are judged by has no kernel of ours in it.

Triton comes with torch on Linux. Before its kernels are used on a device, their results are
compared with those of torch. If they differ, or do not compile, torch computes everything, and a
warning says so once.
"""

import warnings
from functools import lru_cache
from typing import Any

import torch

from npattn.problem.arrays import diagonal
from npattn.torch.engine.operations import INF, SavedTensors, TileOps, rows_of
from npattn.torch.tiles import QueryRows

Tensor = torch.Tensor
LARGEST = 128
"""Largest D and E: of twice as many, a block does not fit in the registers."""
FARTHEST = 2**23
"""Most queries or keys: the index of a number in a plane, and a distance, must fit into 32 bits."""


def sum_exp(ops: TileOps) -> tuple[Tensor, Tensor] | None:
    """Return Σ exp(s) v and Σ exp(s) of each row, sinks left out; None if torch has to."""
    problem, plan = ops.problem, ops.plan
    if not _is_large(ops) or ops.bias or problem.softcap is not None or ops.keep is not None:
        return None
    if plan.tensors or plan.others or len(plan.bands) > 1:
        return None
    if max(problem.D, problem.E) > LARGEST or max(problem.T, problem.S) > FARTHEST:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (ops.q, ops.k, ops.v)):
        return None
    kernels = kernels_on(ops.q.device)
    if kernels is None:
        return None
    first, left, right = 0, None, None
    for band in plan.bands:
        first, left, right = diagonal(problem.T, problem.S, band.alignment), band.left, band.right
    sums: tuple[Tensor, Tensor] = kernels.sum_exp(
        ops.q * ops.scale, ops.k, ops.v, first, left, right
    )
    return sums


def weights_and_gradients(
    ops: TileOps, rows: QueryRows, s: Tensor, dp: Tensor, saved: SavedTensors, delta: Tensor
) -> bool:
    """Write weights over s and ds over dp, (..., m, n), or return False: nothing is done."""
    if not _is_large(ops) or ops.careful or saved.shift is not None:
        return False
    if not (ops.may_overwrite(s) and ops.may_overwrite(dp)):
        return False
    kernels = kernels_on(s.device)
    if kernels is None or not (s.is_contiguous() and dp.is_contiguous()):
        return False
    kernels.weights_and_gradients(s, dp, rows_of(saved.log, rows), delta)
    return True


def _is_large(ops: TileOps) -> bool:
    """Check that a problem has several tiles, and a dtype and device that the kernels know."""
    is_double = ops.q.is_cuda and ops.q.dtype == torch.float64
    return is_double and ops.overwrites and not ops.plan.one_tile


@lru_cache
def kernels_on(device: torch.device) -> Any:
    """Return the kernels if a device has room; warn if they are wrong there, and return None."""
    if torch.version.hip is not None:  # never tried there
        return None
    try:
        import npattn.torch.engine.triton_kernels as found
    except ImportError:  # as on Windows, where torch comes without it
        return None
    kernels: Any = found
    if kernels.shared_memory(device) < kernels.LEAST:
        return None
    try:
        wrong = compare(kernels, device)
    except torch.OutOfMemoryError:  # says nothing about Triton, and may pass
        raise
    except kernels.FAILURES as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong is None:
        return kernels
    warnings.warn(
        f"npattn.torch computes with torch alone on {device}, up to twice as slow, because Triton "
        f"{kernels.triton.__version__} does not work there: {wrong}. Results are as right. For the "
        "speed, install what Triton misses, a C compiler for instance, or another version of it",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def compare(kernels: Any, device: torch.device) -> str | None:
    """Compare the results of the kernels with those of torch; return what is wrong, or None."""
    H, T, S, D, E = 2, 131, 67, LARGEST, LARGEST - 1  # blocks that are full, and that are not
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    q, k, v = normal(1, H, T, D) / D**0.5, normal(1, 1, S, D), normal(1, 1, S, E)
    s, dp, delta = q @ k.mT, normal(1, H, T, S), normal(1, H, T)
    s[..., 1:3], dp[..., 1:3] = -INF, INF  # hidden keys pass nothing on, whatever they are
    hidden = torch.full((T, S), -INF, dtype=torch.float64, device=device).triu(S - T + 1)
    p, u = torch.exp(q @ k.mT + hidden), torch.finfo(torch.float64).eps / 2
    # Either rounds each of D products of a score, its exponential, and each of S terms of a sum.
    off = 2 * ((D + 2) * u * (q.abs() @ k.abs().mT) + (S + 4) * u) * p
    out, total = kernels.sum_exp(q, k, v, S - T, None, 0)
    weights = torch.exp(s - delta[..., None])
    ds = torch.where(s == -INF, 0, (dp - delta[..., None]) * weights)
    kernels.weights_and_gradients(s, dp, delta, delta)
    for name, error, allowed in (
        ("the sum of exp(s)", total - p.sum(-1), off.sum(-1)),
        ("the sum of exp(s) v", out - p @ v, off @ v.abs()),
        ("exp(s − log)", s - weights, 4 * u * weights),
        ("the gradient of s", dp - ds, 8 * u * ds.abs()),
    ):
        if not bool((error.abs() <= allowed).all()):
            return f"{name} is off by {float(error.abs().max()):.3g}"
    return None
