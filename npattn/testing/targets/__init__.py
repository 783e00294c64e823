"""Implementations known by name, and whether they can run here."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npattn.conventions import Conventions
from npattn.errors import MissingExtraError, OptionError
from npattn.profiles import PROFILES, Profile
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.load import load_callable, load_object

__all__ = ["TARGETS", "Target", "load", "load_implementation", "spec_of"]


@dataclass(frozen=True)
class Target:
    """An implementation known by name.

    Attributes
    ----------
    name : str
    module, function : str
        Its import path.
    backward : str or None
        Name of its backward in the same module; None for autograd, or no gradients.
    needs : str or None
        The package that it needs.
    profile : Profile
    about : str
    drop_in : bool
        It is called as the library's own function is: its profile says how.
    """

    name: str
    module: str
    function: str
    backward: str | None
    needs: str | None
    profile: Profile
    about: str
    drop_in: bool = False

    @property
    def conventions(self) -> Conventions:
        """The conventions of its profile."""
        return self.profile.conventions

    @property
    def like(self) -> str | None:
        """Name of the profile that says how to call it; None if npattn's own names do."""
        return self.profile.name if self.drop_in else None

    @property
    def runs_here(self) -> bool:
        """True if the package that it needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def load(self) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Import the callable and its backward."""
        module = importlib.import_module(self.module)
        backward = None if self.backward is None else getattr(module, self.backward)
        return getattr(module, self.function), backward


_HERE = "npattn.testing.targets"
MODELS = ("bert", "gemma2", "gpt2", "llama", "mistral", "phi", "qwen2", "t5", "whisper")
"""Models of Hugging Face whose eager attention is a target."""


def _drop_in(name: str, module: str, function: str, profile: str) -> Target:
    """Return the target of a library's own function, called as its profile says."""
    known = PROFILES[profile]
    needs = name.partition(".")[0]
    return Target(name, module, function, None, needs, known, known.about, drop_in=True)


def _of_model(name: str) -> Target:
    """Return the target of a model's eager attention."""
    module, known = f"transformers.models.{name}.modeling_{name}", PROFILES["transformers"]
    about = f"eager_attention_forward of Hugging Face's {name}"
    return Target(
        f"transformers.{name}",
        module,
        "eager_attention_forward",
        None,
        "transformers",
        known,
        about,
        drop_in=True,
    )


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
    _drop_in("torch.mha", f"{_HERE}.torch", "mha", "torch.mha"),
    _drop_in("torch.flex", "torch.nn.attention.flex_attention", "flex_attention", "flex"),
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
    _drop_in("jax.nn", "jax.nn", "dot_product_attention", "jax.nn"),
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
        PROFILES["onnxruntime"],
        "operator Attention, opset 24, by ONNX Runtime on the CPU; forward only",
    ),
    _drop_in("flax.linen", "flax.linen", "dot_product_attention", "flax"),
    _drop_in("equinox", f"{_HERE}.equinox", "attention", "equinox"),
    _drop_in("keras.numpy", f"{_HERE}.keras", "on_numpy", "keras"),
    _drop_in("keras.jax", f"{_HERE}.keras", "on_jax", "keras.jax"),
    _drop_in("keras.torch", f"{_HERE}.keras", "on_torch", "keras.torch"),
    _drop_in("mlx", f"{_HERE}.mlx", "attention", "mlx"),
    *(_of_model(name) for name in MODELS),
)
TARGETS = {target.name: target for target in _ALL}
"""The known targets, by name."""


def load(spec: str) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return the callable that a target names, and its backward where it is known.

    Parameters
    ----------
    spec : str
        A known name, ``module:function`` or ``path/file.py:function``.

    Raises
    ------
    OptionError
        If there is no such target; the message says what there is.
    MissingExtraError
        If the target needs a package that is not installed.
    """
    spec_of(spec)
    if spec in TARGETS:
        return TARGETS[spec].load()
    return load_callable(spec), None


def spec_of(target: str) -> str:
    """Return ``module:function`` or ``path/file.py:function`` of a target.

    Raises
    ------
    OptionError
        If it is neither that nor a known name; the message says what there is.
    MissingExtraError
        If the target needs a package that is not installed.
    """
    if target in TARGETS:
        known = TARGETS[target]
        if not known.runs_here:
            raise MissingExtraError(
                f"{target} needs {known.needs}, which is not installed: "
                f"pip install 'npattn[{known.needs}]'"
            )
        return f"{known.module}:{known.function}"
    home, colon, name = target.rpartition(":")
    if not colon or not home or not name:
        near = difflib.get_close_matches(target, TARGETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(
            f"TARGET is {target!r}, must be module:function, path/file.py:function, or a name "
            f"that npattn list shows{hint}"
        )
    return target


def load_implementation(
    spec: str,
    *,
    backward: str | None = None,
    framework: str = "auto",
    layout: str | None = None,
    like: str | None = None,
    rename: Mapping[str, str] | None = None,
) -> Implementation:
    """Return the implementation that a target names, with the conventions that are known of it.

    Parameters
    ----------
    spec : str
        A known name, ``module:function`` or ``path/file.py:function``; in place of the function
        an `Implementation` may stand, which is taken as it is.
    backward : str, optional
        Spec of its backward.
    framework, layout, like, rename
        As of `Implementation`.

    Raises
    ------
    OptionError
        If there is no such target, an argument is not legal, or one is given beside an
        `Implementation`.
    MissingExtraError
        If the target needs a package that is not installed.
    """
    given: dict[str, Any] = {"layout": layout, "like": like, "rename": rename or None}
    given |= {"backward": backward, "framework": None if framework == "auto" else framework}
    made = load_object(spec) if spec not in TARGETS and ":" in spec else None
    if isinstance(made, Implementation):
        return _take_whole(made, spec, [n for n, x in given.items() if x is not None])
    f, known_backward = load(spec)
    if like is None and spec in TARGETS:
        like = TARGETS[spec].like
    implementation = Implementation(
        f,
        backward=known_backward if backward is None else load(backward)[0],
        framework=framework,
        layout=layout,
        like=like,
        rename=rename,
        spec=spec,
        backward_spec=backward,
    )
    if like is None and spec in TARGETS:
        implementation.conventions = TARGETS[spec].conventions
    return implementation


def _take_whole(made: Implementation, spec: str, beside: Sequence[str]) -> Implementation:
    """Return an implementation of a module under the spec that finds it."""
    if beside:
        raise OptionError(
            f"got {', '.join(beside)} beside {spec}, which is an Implementation: pass it to "
            "Implementation(f, ...) there"
        )
    implementation = copy.copy(made)
    implementation.name = spec
    implementation.spec, implementation.backward_spec = f"{spec}.f", f"{spec}.backward"
    return implementation
