"""Numbers that a caller or a module names, and that are never inferred from what it does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from npattn.positions.attention import Rotary
from npattn.testing.adapters.modules import TorchModule
from npattn.testing.modules.roles import Reading

Window = tuple[int | None, int | None]

SCALES = ("scaling", "softmax_scale", "scale", "scale_factor")
CAPS = ("attn_logit_softcapping", "logit_cap", "attn_logit_cap", "softcap", "logits_soft_cap")
WINDOWS = ("sliding_window", "window_size", "window", "attention_window", "sliding_window_size")
BASES = ("rope_theta", "rotary_base", "rope_base", "rotary_emb_base", "theta", "base")


@dataclass(frozen=True)
class Named:
    """Options of `check_module` that say what a module means."""

    roles: Mapping[str, str] | None = None  # as of `check_module`
    num_heads: int | None = None
    num_kv_heads: int | None = None
    scale: float | None = None
    softcap: float | None = None
    window: Window | int | None = None
    rotary: Rotary | float | None = None
    length: int | None = None  # number of tokens of probes, if it does not take every number
    notes: tuple[str, ...] = ()  # what attributes of the module say, in words

    def fill(self, module: TorchModule, reading: Reading) -> Named:
        """Return these options, with what attributes of the module say of the others.

        An attribute of the scale is a multiplier or a divisor. One that is a known mistake (1, or
        made of the whole width) says nothing, nor does one beside a config, which has a name of its
        own for another scale.
        """
        config = getattr(module.owner, "config", None)
        H, D = reading.num_heads, reading.indices["wq"].shape[1] // reading.num_heads
        notes, changes = list(self.notes), dict[str, Any]()
        if self.scale is None and (scalar := getattr(config, "query_pre_attn_scalar", None)):
            changes["scale"] = float(scalar) ** -0.5
            notes.append(f"scale 1/√{scalar} by config.query_pre_attn_scalar")
        elif self.scale is None and config is None:
            scale = module.attribute(SCALES, float)
            mistakes = (1.0, D**0.5, D**-0.5, 1 / D, float(D), (H * D) ** -0.5, (H * D) ** 0.5,
                        H**-0.5, H**0.5, 0.0)  # fmt: skip
            if scale is not None and not any(math.isclose(scale, x) for x in mistakes):
                changes["scale"] = scale
                notes.append(f"scale {scale:.6g} by its attribute")
        if self.softcap is None and (cap := module.attribute(CAPS, (int, float))):
            changes["softcap"] = float(cap)
            notes.append(f"softcap {cap:g} by its attribute")
        if self.window is None:
            changes["window"] = module.attribute(WINDOWS)
        if self.rotary is None:
            parameters = getattr(config, "rope_parameters", None)
            kind = getattr(module.owner, "layer_type", None)
            parameters = parameters if isinstance(parameters, dict) else {}
            base = (parameters.get(kind) or parameters).get("rope_theta")
            changes["rotary"] = base or module.attribute(BASES, (int, float))
        return replace(self, notes=tuple(notes), **changes)

    def rope_of(self, read: Rotary | None) -> tuple[Rotary | None, str]:
        """Return the rotary positions as named, else as read, with a note."""
        if read is None:
            return None, ""
        if isinstance(self.rotary, Rotary):
            return self.rotary, "rotary as passed"
        part = "" if read.size is None else f" of {read.size} features"
        if self.rotary:
            base = float(self.rotary)
            return replace(read, base=base), f"rotary, {read.layout}{part}, base {base:g}"
        return read, f"rotary, {read.layout}{part}, base {read.base:g} read, not checked"

    def window_of(self, read: Window | None) -> tuple[Window | None, str]:
        """Return the window as named, with a note; a number counts the query or does not."""
        if read is None or self.window is None:
            return None, ""
        if not isinstance(self.window, int):
            return tuple(self.window), ""  # type: ignore[return-value]
        if read[0] not in (self.window - 1, self.window) or read[1] not in (0, None, read[0]):
            return None, ""
        words = "the query counted" if read[0] == self.window - 1 else "beside the query"
        return read, f"window {self.window} ({words})"
