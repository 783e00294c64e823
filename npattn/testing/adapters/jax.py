"""JAX arrays on a device as a framework.

They are immutable and have no strides, so that the rules on inputs and views have little to check;
a donated buffer (``donate_argnums``) is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.errors import OptionError, optional_import
from npattn.testing.adapters.base import ImplementationError, ResultError
from npattn.testing.adapters.numpy import READABLE

with optional_import("JAX targets need", "jax", "jax"):
    import jax
    import jax.numpy as jnp

__all__ = ["JAX"]

CALLS = 64
"""Calls between two counts of the memory maps. A call compiles a few programs at most."""


def _count_maps() -> int:
    """Return the number of memory maps of this process; 0 without /proc, as on macOS.

    Each program that XLA compiles for a CPU takes about 30. XLA aborts when none is left.
    """
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@cache
def _most_maps() -> int:
    """Return the most memory maps that Linux allows a process, by default 65 530."""
    most = Path("/proc/sys/vm/max_map_count")
    return int(most.read_text()) if most.exists() else 65_530


class JAX:
    """JAX arrays on a device; gradients by ``jax.vjp``."""

    name = "jax"
    differentiates = True
    compiles = immutable = True

    def __init__(self, device: str | None = None) -> None:
        platform, _, number = (device or "").partition(":")
        self._calls = 0
        try:
            self.device = jax.devices(platform or None)[int(number or 0)]
        except (RuntimeError, IndexError, ValueError) as err:
            reason = str(err).splitlines()[0]
            raise OptionError(f"device is {device!r}, which JAX cannot use here: {reason}") from err

    def one_thread(self) -> AbstractContextManager[None]:
        return nullcontext()  # XLA sets its number of threads when the process starts

    def threads(self, count: int) -> AbstractContextManager[None] | None:
        return None

    def finish(self) -> None:
        pass  # `take` waits

    def device_works(self) -> bool:
        return True

    def allowing(self, dtype: Any) -> AbstractContextManager[None]:
        """Enable float64 for float64 alone: with it, JAX makes float64 of Python numbers."""
        self._clear_programs()
        wide: AbstractContextManager[None] = jax.enable_x64(True)
        return wide if dtype == np.float64 else nullcontext()

    def _clear_programs(self) -> None:
        """Clear compiled programs every `CALLS` calls if they take half of the memory maps."""
        self._calls += 1
        if self._calls % CALLS == 0 and _count_maps() > _most_maps() // 2:
            jax.clear_caches()

    def give(self, array: Array) -> jax.Array:
        if not array.flags.c_contiguous:
            raise ImplementationError("JAX arrays have no strides")
        # A copy, which nobody else writes to: device_put may share it, and compiles nothing.
        converted = jax.device_put(array.copy(), self.device)
        if converted.dtype != array.dtype:
            raise ImplementationError(f"JAX converted {array.dtype} to {converted.dtype}")
        return converted

    def take(self, value: Any) -> Array:
        if not isinstance(value, jax.Array):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise ResultError(f"returned {kind}, must be a JAX array (or framework=)")
        if value.is_deleted():
            raise ImplementationError("the buffer of an array was donated (donate_argnums)")
        array = np.array(value)
        if array.dtype not in READABLE:
            raise ResultError(f"returned an array of dtype {array.dtype}")
        return array

    def memory(self, value: jax.Array) -> Array | None:
        return None  # nobody can write to it

    def add_mask(self, mask: jax.Array, q: jax.Array) -> jax.Array:
        return jnp.where(mask, 0, jnp.finfo(q.dtype).min).astype(q.dtype)

    def hide(self, bias: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.where(mask, bias, -jnp.inf)

    def gradients(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        names: Iterable[str],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        names = tuple(names)

        def run(*leaves: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            results = call(**dict(zip(names, leaves, strict=True)))
            return {name: results[name] for name in cotangents}, results

        outputs, pull, results = jax.vjp(run, *(inputs[n] for n in names), has_aux=True)
        # A cotangent must have the dtype of its result.
        douts = {name: x.astype(outputs[name].dtype) for name, x in cotangents.items()}
        return results, dict(zip(names, pull(douts), strict=True))

    def gradients_twice(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        second: Mapping[str, Any],
    ) -> dict[str, Any]:
        def first(leaves: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
            def run(own: dict[str, Any]) -> dict[str, Any]:
                results = call(**own)
                return {name: results[name] for name in given}

            outputs, pull = jax.vjp(run, leaves)
            douts = {name: x.astype(outputs[name].dtype) for name, x in given.items()}
            (gradients,) = pull(douts)
            return dict(gradients)

        _, pull = jax.vjp(first, {name: inputs[name] for name in second}, dict(cotangents))
        leaves, given = pull(dict(second))
        return {**leaves, **given}
