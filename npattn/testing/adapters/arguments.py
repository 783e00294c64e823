"""Arguments of a call, by the names of the implementation and in the forms that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from npattn.problem import Problem
from npattn.problem.meanings import DESCALES, LATENT, LISTS, STORED
from npattn.problem.options import OPTIONS, default_scale
from npattn.testing.adapters.base import inexpressible
from npattn.testing.adapters.frameworks import Framework
from npattn.testing.adapters.signature import Signature


class Sizes(NamedTuple):
    """Sizes of a call, which some forms depend on."""

    H: int
    K: int
    T: int
    S: int
    D: int

    @classmethod
    def of(cls, q: Any, k: Any, layout: str) -> Sizes:
        """Read the sizes of q and k, laid out as the implementation takes them."""
        shapes = [tuple(q.shape), tuple(k.shape)]
        if layout == "BTHD" and all(len(x) == 4 for x in shapes):
            shapes = [(x[0], x[2], x[1], x[3]) for x in shapes]
        heads = [x[-3] if len(x) > 2 else 1 for x in shapes]
        return cls(heads[0], heads[1], shapes[0][-2], shapes[1][-2], shapes[0][-1])


BY_MEANING = {*STORED, *DESCALES, *LATENT, *LISTS}
"""Meanings that no option has: where sequences are, factors, parts of q, or lists of keys."""


class _Call(NamedTuple):
    """Values of one call, by npattn's names, and what is needed to give them another form."""

    values: Mapping[str, Any]
    sizes: Sizes | Problem
    framework: Framework
    mask_true: str

    @property
    def visible(self) -> Any:
        """The mask, True where a query may attend."""
        mask = self.values["mask"]
        return ~mask if self.mask_true == "hide" else mask


def form_arguments(
    signature: Signature,
    values: Mapping[str, Any],
    sizes: Sizes | Problem,
    framework: Framework,
    mask_true: str = "attend",
) -> dict[str, Any]:
    """Return the keywords of a call.

    Values are arrays, options, results asked for and other keywords by npattn's names; options at
    their default are left out. `mask_true` is the meaning of True in their mask: "attend" or
    "hide". Raises ImplementationError if a parameter cannot hold a value: a mask per query as key
    padding, for instance.
    """
    call = _Call(values, sizes, framework, mask_true)
    kwargs: dict[str, Any] = {}
    for theirs, meaning in signature.meanings.items():
        if meaning in BY_MEANING:
            value = values.get(meaning.removesuffix(" of any number"))
        else:
            value = FORMS.get(meaning, _plain)(call, signature.carries[theirs])
        if value is None and theirs in signature.required:
            kwargs[theirs] = _default(call, meaning)
        elif value is not None and not _leaves_out(call, signature, theirs, value):
            kwargs[theirs] = value
    named = {*signature.names, "q", "k", "v", *signature.leading}
    named |= BY_MEANING
    return kwargs | {ours: value for ours, value in values.items() if ours not in named}


def _plain(call: _Call, ours: tuple[str, ...]) -> Any:
    return next((call.values[n] for n in ours if n in call.values), None)


def _leaves_out(call: _Call, signature: Signature, theirs: str, value: Any) -> bool:
    """Return True for a value that is the function's own default, in every second size.

    So what it does where a caller leaves an option out is asked, too.
    """
    defaults = [signature.defaults[n] for n in signature.carries[theirs] if n in signature.defaults]
    return (
        bool(defaults) and str(defaults[0]) == str(value) and (call.sizes.T + call.sizes.S) % 2 == 1
    )


def _default(call: _Call, meaning: str) -> Any:
    """Return the value that leaves the result unchanged, for a parameter without a default."""
    if meaning == "scale":
        return default_scale(call.sizes.D)[0]
    if meaning in OPTIONS:
        return OPTIONS[meaning].default
    return NEUTRAL.get(meaning, False)


NEUTRAL = {
    **dict.fromkeys(("mask or bias", "added mask or bias", "key padding", "head mask")),
    "no dropout": 0.0,
    "window or −1": (-1, -1),
}
"""Values that leave the result unchanged, by meanings that no option has."""


def _mask_or_bias(call: _Call, ours: tuple[str, ...]) -> Any:
    """Return the boolean mask, the float bias, or the bias with −inf where the mask hides."""
    if not {"mask", "bias"} <= set(ours) & set(call.values):
        return _plain(call, ours)
    bias = call.values["bias"]
    if "float8" in str(bias.dtype):
        raise inexpressible(f"a mask beside a bias: {bias.dtype} cannot hold −inf")
    return call.framework.hide(bias, call.visible)


def _added_mask_or_bias(call: _Call, ours: tuple[str, ...]) -> Any:
    """Return the sum of the bias and, where the mask hides, the least finite number."""
    if "mask" not in ours or "mask" not in call.values:
        return _plain(call, ours)
    q = next(call.values[name] for name in ("q", "qkv") if name in call.values)
    added = call.framework.add_mask(call.visible, q)
    return added + call.values["bias"] if {"bias"} <= set(ours) & set(call.values) else added


def make_module(sizes: Sizes | Problem) -> Any:
    """Return what the attention functions of Hugging Face's models read of their module."""
    groups = sizes.H // sizes.K if sizes.K else 1
    return SimpleNamespace(
        num_key_value_groups=groups, head_dim=sizes.D, is_causal=False, training=False
    )


def _key_padding(call: _Call, ours: tuple[str, ...]) -> Any:
    """Return the keys that a mask of shape (B, 1, 1, S) hides, as (B, S)."""
    if _plain(call, ours) is None:
        return None
    mask = call.visible
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1:
        raise inexpressible(f"a mask of shape {tuple(mask.shape)}: it takes key padding alone")
    return ~mask[:, 0, 0, :]


def _head_mask(call: _Call, ours: tuple[str, ...]) -> Any:
    """Return a gate of heads, (H, 1, 1), as (H,)."""
    gate, H = _plain(call, ours), call.sizes.H
    if gate is None:
        return None
    if tuple(gate.shape) != (H, 1, 1) and (H != 1 or gate.ndim != 2 or tuple(gate.shape) != (1, 1)):
        raise inexpressible(f"a gate of shape {tuple(gate.shape)}: it takes one number per head")
    return call.framework.reshape(gate, (H,))


def _window(call: _Call, ours: tuple[str, ...], unlimited: int | None = None) -> Any:
    """Return a window with a number for unlimited sides: without one, beyond every key."""
    window, beyond = _plain(call, ours), call.sizes.T + call.sizes.S
    number = beyond if unlimited is None else unlimited
    return window if window is None else tuple(number if n is None else n for n in window)


FORMS: dict[str, Callable[[_Call, tuple[str, ...]], Any]] = {
    "mask or bias": _mask_or_bias,
    "added mask or bias": _added_mask_or_bias,
    "key padding": _key_padding,
    "head mask": _head_mask,
    "window or −1": partial(_window, unlimited=-1),
    "window of numbers": _window,
    "need_weights": lambda call, ours: "return_weights" in call.values,
    "shared heads": lambda call, ours: True if call.sizes.K < call.sizes.H else None,
    **dict.fromkeys(("no dropout", "no effect"), lambda call, ours: None),
}
"""Value of a parameter by its meaning; None is not passed. The others are passed as they are."""
