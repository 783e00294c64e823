"""jax.nn.dot_product_attention, compiled ahead; its gradients by jax.vjp."""

from __future__ import annotations

from typing import Any

import jax  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from benchmarks.speed.cases import Task
from benchmarks.speed.contestants import Calls
from npattn.problem.arrays import Array
from npattn.testing.adapters.frameworks import make_framework


def jit(task: Task, threads: int) -> Calls:
    """Contestant jax.jit, in JAX's layout (B, T, H, D)."""
    with make_framework("jax").allowing(task.q.dtype):
        q, k, v, dout = (
            jax.numpy.asarray(np.ascontiguousarray(x.swapaxes(1, 2)))
            for x in (task.q, task.k, task.v, task.dout)
        )
        # JAX has an option for the window, and makes the mask itself.
        arrays = {"bias": task.arrays.bias}
        arrays["mask"] = None if task.case.window else task.arrays.mask
        extra = {n: jax.numpy.asarray(_rank_4(x)) for n, x in arrays.items() if x is not None}

        def attend(q: Any, k: Any, v: Any, extra: Any) -> Any:
            options: dict[str, Any] = {"is_causal": task.case.causal}
            options["local_window_size"] = task.case.window
            return jax.nn.dot_product_attention(q, k, v, **extra, **options)

        def attend_and_pull(q: Any, k: Any, v: Any, extra: Any, dout: Any) -> Any:
            out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, extra), q, k, v)
            return out, *pull(dout)

        compiled = jax.jit(attend).lower(q, k, v, extra).compile()
        compiled_both = jax.jit(attend_and_pull).lower(q, k, v, extra, dout).compile()

    def forward() -> Any:
        return (wait(compiled(q, k, v, extra)),)

    def both() -> Any:
        return wait(compiled_both(q, k, v, extra, dout))

    wait: Any = jax.block_until_ready
    return Calls(forward, both, _read, task.bytes + sum(x.nbytes for x in extra.values()))


def _rank_4(array: Array) -> Array:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _read(results: Any) -> tuple[Array, ...]:
    return tuple(np.asarray(x).swapaxes(1, 2) for x in results)
