"""Implementations that are known by name, and whether they can run here."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from npattn.conventions import PROFILES, Conventions
from npattn.errors import MissingExtraError, OptionError

__all__ = ["TARGETS", "Target", "load"]


@dataclass(frozen=True)
class Target:
    """An implementation that is known by name.

    Attributes
    ----------
    name : str
    module, function : str
        Where it is.
    backward : str or None
        Its backward, in the same module; None: autograd, or none.
    needs : str or None
        The package without which it cannot run.
    conventions : Conventions
    about : str
    """

    name: str
    module: str
    function: str
    backward: str | None
    needs: str | None
    conventions: Conventions
    about: str

    @property
    def runs_here(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def load(self) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """The callable and its backward."""
        module = importlib.import_module(self.module)
        backward = None if self.backward is None else getattr(module, self.backward)
        return getattr(module, self.function), backward


_HERE = "npattn.testing.targets"
_ALL = (
    Target(
        "numpy.flash",
        f"{_HERE}.numpy",
        "flash",
        "flash_backward",
        None,
        PROFILES["npattn"],
        "online softmax in float32 with backward, shipped with npattn",
    ),
    Target(
        "numpy.naive",
        f"{_HERE}.numpy",
        "naive",
        None,
        None,
        PROFILES["npattn"],
        "the textbook ten lines, shipped with npattn: what everybody writes first",
    ),
    Target(
        "torch.sdpa",
        f"{_HERE}.torch",
        "sdpa",
        None,
        "torch",
        PROFILES["torch.sdpa"],
        "torch.nn.functional.scaled_dot_product_attention, as a user calls it",
    ),
    Target(
        "torch.sdpa-math",
        f"{_HERE}.torch",
        "sdpa_math",
        None,
        "torch",
        PROFILES["torch.sdpa"],
        "the same, held to its MATH backend",
    ),
    Target(
        "npattn.torch",
        f"{_HERE}.torch",
        "npattn_torch",
        None,
        "torch",
        PROFILES["npattn"],
        "npattn.torch.forward: the oracle on tensors, judged as anything else",
    ),
    Target(
        "npattn.torch-fused",
        f"{_HERE}.torch",
        "npattn_fused",
        None,
        "torch",
        PROFILES["npattn"],
        "npattn.torch with engine=\"fused\": PyTorch's kernels in npattn's terms",
    ),
    Target(
        "jax.nn",
        f"{_HERE}.jax",
        "dot_product_attention",
        "dot_product_attention_backward",
        "jax",
        PROFILES["jax.nn"],
        "jax.nn.dot_product_attention; it compiles for each shape, so restrict --sizes",
    ),
    Target(
        "onnx.reference",
        f"{_HERE}.onnx",
        "attention",
        None,
        "onnx",
        PROFILES["onnx"],
        "operator Attention of ONNX, opset 25, by its reference evaluator; forward only",
    ),
    Target(
        "onnxruntime",
        f"{_HERE}.onnxruntime",
        "attention",
        None,
        "onnxruntime",
        PROFILES["onnx"],
        "operator Attention, opset 24, by ONNX Runtime on the CPU; forward only",
    ),
)
TARGETS = {target.name: target for target in _ALL}
"""The known targets, by name."""


def load(spec: str) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """The callable that a target names, and its backward where it is known.

    Parameters
    ----------
    spec : str
        A known name, ``module:function`` or ``path/file.py:function``.

    Raises
    ------
    OptionError
        If there is no such thing, with what there is.
    MissingExtraError
        If a package that it needs is not installed.
    """
    if spec in TARGETS:
        target = TARGETS[spec]
        if not target.runs_here:
            raise MissingExtraError(
                f"{spec} needs {target.needs}, which is not installed: "
                f"pip install 'npattn[{target.needs}]'"
            )
        return target.load()
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not name:
        near = difflib.get_close_matches(spec, TARGETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(
            f"TARGET is {spec!r}, must be module:function, path/file.py:function, or one of "
            f"{', '.join(TARGETS)}{hint}"
        )
    module = _module(home)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        public = [n for n, x in vars(module).items() if callable(x) and n[0] != "_"]
        raise OptionError(f"{home} has no callable {name!r}, it has {', '.join(public[:20])}")
    return found, None


def _module(home: str) -> ModuleType:
    """A module by its name or its path; what it raises while it is imported goes through."""
    if home.endswith(".py"):
        path = Path(home).resolve()
        if not path.is_file():
            raise OptionError(f"TARGET has file {home!r}, which does not exist [in {Path.cwd()}]")
        loaded = sys.modules.get(path.stem)
        if loaded is not None and getattr(loaded, "__file__", None) == str(path):
            return loaded
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    if str(Path.cwd()) not in sys.path:  # as python -m does
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as err:
        if err.name is None or not home.startswith(err.name):
            raise
        raise OptionError(
            f"TARGET has module {home!r}, which cannot be found [in {Path.cwd()} and sys.path]"
        ) from err
