"""One call of linear attention: arrays and options, checked once, and its results."""

import dataclasses
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem import checks
from npattn.problem.arrays import Array
from npattn.problem.options import default_scale
from npattn.variants.linear.features import FeatureMap, read_feature_map

Form = Literal["recurrent", "chunked"]
FORMS: tuple[Form, ...] = ("recurrent", "chunked")
CHUNK = 64
"""Number of keys in a chunk, unless said."""
AFTER_HEADS = {"log_decay": "SD", "beta": "S1", "initial_state": "DE", "initial_normaliser": "D"}
"""Axes of the optional arrays after (..., K)."""
ARRAYS = ("q", "k", "v", *AFTER_HEADS)


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearProblem:
    """Arrays and options of one call of linear attention, checked on construction.

    The parameters and errors are those of `npattn.variants.linear.attention`.

    Attributes
    ----------
    lead : tuple of int
        The broadcast leading axes of q, k, v.
    H, K, T, S, D, E : int
        Sizes.
    map : FeatureMap
        The feature map with its pullback.
    """

    q: Array
    k: Array
    v: Array
    causal: bool = False
    feature_map: str | FeatureMap | Callable[[Any], Any] = "elu"
    normalise: bool = True
    eps: float = 0.0
    scale: float | None = None
    log_decay: Array | None = None
    beta: Array | None = None
    initial_state: Array | None = None
    initial_normaliser: Array | None = None
    form: Form = "recurrent"
    chunk_size: int | None = None
    dtype: Any = None

    lead: tuple[int, ...] = dataclasses.field(init=False)
    H: int = dataclasses.field(init=False)
    K: int = dataclasses.field(init=False)
    T: int = dataclasses.field(init=False)
    S: int = dataclasses.field(init=False)
    D: int = dataclasses.field(init=False)
    E: int = dataclasses.field(init=False)
    map: FeatureMap = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        put = self.__dict__.__setitem__
        for name in ARRAYS:
            if name not in AFTER_HEADS or getattr(self, name) is not None:
                put(name, checks.read_floating(name, getattr(self, name)))
        sizes = checks.check_sizes(self.q, self.k, self.v)
        for name, value in zip(("lead", "H", "K", "T", "S", "D", "E"), sizes, strict=True):
            put(name, value)
        put("map", read_feature_map(self.feature_map))
        self._check_options()
        for name, axes in AFTER_HEADS.items():
            if getattr(self, name) is not None:
                self._check_broadcast(name, axes)
        put("scale", checks.check_number("scale", self.scale))
        if self.scale is None:
            put("scale", default_scale(self.D)[0])
        dtype, narrow = checks.check_dtype(
            self.dtype, "dense", tuple(getattr(self, name) for name in ARRAYS)
        )
        if narrow is not None:
            raise DtypeError(
                f"dtype is {narrow}, must be float32, float64, longdouble or complex: linear "
                "attention emulates no mixed precision"
            )
        put("dtype", dtype)

    def _check_options(self) -> None:
        """Raise OptionError if an option is not legal, or does not go with another."""
        for name in ("causal", "normalise"):
            checks.check_flag(name, getattr(self, name))
        if self.causal and self.T != self.S:
            raise OptionError(
                f"causal is True for T = {self.T} queries and S = {self.S} keys, must have T = S: "
                "pass the state after earlier keys as initial_state"
            )
        if self.log_decay is not None and not self.causal:
            raise OptionError("got log_decay without causal: keys decay in time; pass causal=True")
        if self.beta is not None and (self.normalise or not self.causal):
            raise OptionError(
                "got beta, which needs causal=True and normalise=False: the delta rule corrects "
                "what a state holds, in time, and has no sum of weights"
            )
        if self.initial_normaliser is not None and not self.normalise:
            raise OptionError("got initial_normaliser, but normalise is False; leave it out")
        if self.normalise and (self.initial_state is None) != (self.initial_normaliser is None):
            raise OptionError(
                "got one of initial_state and initial_normaliser, must have both or neither: the "
                "sums of φ(k)ᵀ v and of φ(k); or pass normalise=False"
            )
        checks.check_not_negative("eps", self.eps)
        if not isinstance(self.form, str) or self.form not in FORMS:
            raise OptionError(
                f"form is {self.form!r}, must be one of {', '.join(FORMS)}: all pairs at once are "
                f'form="chunked" with chunk_size={max(self.S, 1)}'
            )
        if self.chunk_size is not None:
            checks.check_integer("chunk_size", self.chunk_size)
            if self.form != "chunked":
                raise OptionError(f'got chunk_size with form {self.form!r}; pass form="chunked"')

    def _check_broadcast(self, name: str, axes: str) -> None:
        """Check that an array broadcasts against (..., K, *axes) without enlarging it."""
        array = getattr(self, name)
        letters = ", ".join(["...", "K", *axes])
        ends = (1 if axis == "1" else getattr(self, axis) for axis in axes)
        shape = (*self.lead, self.K, *ends)
        try:
            fits = np.broadcast_shapes(array.shape, shape) == shape
        except ValueError:
            fits = False
        if array.ndim < len(axes) or not fits:
            heads = f"; for one number a head pass {name}[:, None, None]"
            hint = heads if name == "log_decay" and array.shape == (self.K,) else ""
            raise ShapeError(
                f"{name} has shape {array.shape}, must have rank {len(axes)} or more and broadcast "
                f"against ({letters}) = {shape}{hint}"
            )

    @property
    def headless(self) -> bool:
        """True if q, k, v have rank 2: one head, without an axis in the results."""
        return self.q.ndim == 2

    @property
    def group(self) -> int:
        """Number of query heads that share a state."""
        return self.H // max(self.K, 1)

    @property
    def size(self) -> int:
        """Number of keys in a chunk of the chunked form."""
        return self.chunk_size or CHUNK


def warn_of_growth(log_decay: Any) -> None:
    """Warn if a decay, an array or a tensor, lets the state grow."""
    if log_decay is not None and bool((log_decay.real > 0).any()):
        level = 1
        while sys._getframe(level).f_globals.get("__name__", "").startswith("npattn."):
            level += 1
        warnings.warn(
            "log_decay has numbers above 0, by which the state grows: it is the natural logarithm "
            "of the factor, so for a factor γ pass log(γ)",
            stacklevel=level + 1,
        )


@dataclass(frozen=True, eq=False)
class LinearForward:
    """Results of linear attention.

    Attributes
    ----------
    out : array (..., H, T, E)
    state : array (..., K, D, E)
        After the last key: the decayed sum of φ(k)ᵀ v.
    normaliser : array (..., K, D) or None
        The decayed sum of φ(k), with normalisation.
    problem : LinearProblem
    """

    out: Array
    state: Array
    normaliser: Array | None
    problem: LinearProblem
    residuals: Any = dataclasses.field(repr=False)


@dataclass(frozen=True, eq=False)
class LinearGradients:
    """Gradients of one loss, each shaped as its input; None where there is no such input."""

    q: Array
    k: Array
    v: Array
    log_decay: Array | None = None
    beta: Array | None = None
    initial_state: Array | None = None
    initial_normaliser: Array | None = None
