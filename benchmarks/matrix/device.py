"""Targets, dtypes and seconds for each unit of a matrix on a device with a budget."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

DTYPES = ("bfloat16", "float16", "float32")
"""In this order, of every target: those that kernels are written for first."""
_FLAVOURS = ("", "-flash", "-efficient", "-cudnn", "-math")
TARGETS = (
    *(f"torch.sdpa{backend}" for backend in _FLAVOURS),
    *("torch.flex-cuda", "torch.flex-compiled", "jax.nn-cudnn", "jax.nn-xla", "pallas.gpu-cuda"),
    *("fla.parallel-cuda", "fla.decoding-cuda", "sageattention-cuda", "flash_attn_triton"),
    *("jvp_flash_attention", "flag_gems", "xformers", "transformers.sdpa", "transformers.flex"),
    *("flash_attn", "flash_attn_3", "flash_attn_4", "flash_attn.varlen", "flash_attn.kvcache"),
    *("flashinfer", "flashinfer.paged", "transformer_engine", "thunderkittens", "vllm.paged"),
    *("npattn.torch", "npattn.torch-fused", "torch.nested", "torch.mha", "torch.mha-sdpa"),
)
"""Targets that are asked on a GPU if none is named, the most used first."""
SWEEP = 200
"""Problems that are sampled and judged on the device, of a target of torch."""
VARIABLES: Mapping[str, str] = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": ""}
"""Set for processes on a GPU: JAX takes most of its memory, and programs are compiled for a CPU."""
START = 12.0
"""Seconds of a unit's time for its processes, which load torch or JAX, and for causes."""
LEAST = 5.0
"""Seconds of questions below which a unit is not begun."""


@dataclass
class Budget:
    """Time of a matrix, shared evenly by the units that are left."""

    seconds: float
    processes: int = 1  # units that are judged at once
    clock: Callable[[], float] = time.monotonic  # seconds, as of `time.monotonic`
    ends: float = field(init=False)

    def __post_init__(self) -> None:
        self.ends = self.clock() + self.seconds

    @property
    def left(self) -> float:
        """Seconds until the budget is over; 0 then."""
        return max(self.ends - self.clock(), 0.0)

    def share(self, units: int) -> float | None:
        """Return the seconds of questions of the next of `units` units, None if it is too late."""
        left = self.left
        rounds = math.ceil(units / self.processes)
        seconds = min(max(left / rounds - START, LEAST), left - START / 2)
        return None if seconds < LEAST else seconds


def name_device(device: str | None) -> tuple[str, str]:
    """Return the short name of a device, and its description with the driver.

    Parameters
    ----------
    device : str or None
        As of `npattn.testing.check`: "cuda", "cuda:1", "cpu", None.

    Returns
    -------
    name : str
        "CPU", "H200"; the first word of `device` where nothing is known of it.
    description : str

    Examples
    --------
    >>> name_device("cpu")
    ('CPU', 'CPU')
    """
    kind, _, number = (device or "cpu").partition(":")
    if kind == "cpu":
        return "CPU", "CPU"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        name, driver = done.stdout.splitlines()[int(number or 0)].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return kind, kind
    return shorten(name), f"{name}, driver {driver}"


def shorten(name: str) -> str:
    """Return the model in the name of a GPU.

    Examples
    --------
    >>> [shorten(x) for x in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090")]
    ['H200', 'A100', 'GeForce RTX 4090']
    """
    model = re.search(r"\b[A-Z]{1,2}\d{2,4}[A-Z]?\b", name)
    return model[0] if model else name.removeprefix("NVIDIA ")
