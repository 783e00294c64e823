"""How a module is called: its inputs, its masks in every form, and what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array
from npattn.testing.adapters.modules import Returned, TorchModule
from npattn.testing.modules.case import ModuleCase
from npattn.testing.modules.plan import Inputs

KEYS = ("key", "k", "keys")
VALUES = ("value", "v", "values")
CONTEXTS = ("context", "encoder_hidden_states", "key_value_states", "memory", "kv", "cond")
"""Inputs that keys and values both come from."""
MASKS = ("mask", "attn_mask", "attention_mask", "src_mask", "tgt_mask", "causal_mask", "masks")
PADDING = ("key_padding_mask", "padding_mask", "pad_mask", "src_key_padding_mask")
WANTED = ("need_weights", "output_attentions", "return_weights", "return_attention",
          "return_attn", "return_attn_weights", "return_attention_weights")  # fmt: skip
"""Flags that ask for the weights."""
AVERAGE = "average_attn_weights"

KINDS = ("True may attend", "True hides", "1 may attend, 0 hides", "0 or −inf is added")
SHAPES = ("T S", "1 1 T S", "B 1 T S", "B T S", "B H T S", "BH T S", "B 1 1 S", "B S")


class Form(NamedTuple):
    """Form in which a module takes a mask: "mask: True may attend, (B, 1, T, S)"."""

    parameter: str
    kind: str
    shape: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.kind}, ({self.shape.replace(' ', ', ')})"

    @property
    def axes(self) -> int:
        return len(self.shape.split())

    @property
    def has_queries(self) -> bool:
        """True if queries may see different keys."""
        return " T " in f" {self.shape} "

    def array(self, visible: Array, sizes: Mapping[str, int], dtype: Any) -> Array:
        """Return the argument for a mask (B or 1, 1, T or 1, S) that is True where one may look."""
        B, H, S = sizes["B"], sizes["H"], visible.shape[-1]
        T = sizes["T"] if self.has_queries else 1
        full = np.broadcast_to(visible, (B, H, T, S))
        shapes = {"T S": full[0, 0], "1 1 T S": full[:1, :1], "B 1 T S": full[:, :1]}
        shapes |= {"B T S": full[:, 0], "B H T S": full, "BH T S": full.reshape(B * H, T, S)}
        shapes |= {"B 1 1 S": full[:, :1, :1], "B S": full[:, 0, 0]}
        array = np.ascontiguousarray(shapes[self.shape])
        if self.kind == "True hides":
            return ~array
        if self.kind == "1 may attend, 0 hides":
            return array.astype(dtype)
        if self.kind == "0 or −inf is added":
            return np.where(array, 0, -np.inf).astype(dtype)
        return array


def describe_forms(forms: Iterable[Form]) -> str:
    """Return the forms of masks that are understood: "mask (T, S), (B, 1, T, S): True may attend".

    Examples
    --------
    >>> describe_forms([Form("mask", "True hides", "T S"), Form("mask", "True hides", "B S")])
    'mask (T, S), (B, S): True hides'
    """
    shapes: dict[tuple[str, str], list[str]] = {}
    for form in forms:
        axes = f"({form.shape.replace(' ', ', ')})"
        shapes.setdefault((form.parameter, form.kind), []).append(axes)
    kinds: dict[tuple[str, str], list[str]] = {}
    for (parameter, kind), shape in shapes.items():
        kinds.setdefault((parameter, ", ".join(shape)), []).append(kind)
    return "; ".join(f"{name} {shape}: {' or '.join(k)}" for (name, shape), k in kinds.items())


@dataclass
class Call:
    """The arguments of a module, by what they are."""

    module: TorchModule
    # names of query, key and value, as far as it has them, in their order
    inputs: tuple[str, ...] = ()
    # parameters that take masks, each with the shapes to try
    masks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    forms: list[Form] = field(default_factory=list)  # those that it takes, once they are learned
    num_heads: int = 1

    @classmethod
    def read(cls, module: TorchModule) -> Call:
        """Read the signature of a module; OptionError if it has no input, or needs other ones."""
        arguments = module.arguments()
        names = list(arguments)
        if not names:
            raise OptionError(f"{module.name} takes no input, must take x or query, key, value")
        inputs = [names[0]]
        for words in (CONTEXTS, KEYS, VALUES):
            inputs += [n for n in names[1:] if n in words and n not in inputs][:1]
        if inputs[1:2] and inputs[1] in CONTEXTS:
            inputs = inputs[:2]
        masks: list[tuple[str, tuple[str, ...]]] = [(n, SHAPES) for n in names if n in MASKS]
        masks += [(n, ("B S", "B 1 1 S")) for n in names if n in PADDING]
        accepted = (*inputs, *(n for n, _ in masks), *WANTED)
        if more := [n for n, required in arguments.items() if required and n not in accepted]:
            raise OptionError(
                f"{module.name} requires {', '.join(more)}, which is no input and no mask: pass "
                f"call=lambda m, x, mask: m(x, mask, {more[0]}=...)"
            )
        return cls(module, tuple(inputs), tuple(masks))

    @property
    def crosses(self) -> bool:
        """True if keys are an input of their own."""
        return len(self.inputs) > 1

    @property
    def asks(self) -> tuple[str, ...]:
        """Ways to ask for weights that its flags have: of each head, averaged, not at all."""
        names = self.module.arguments()
        average = ("average",) if AVERAGE in names else ()
        return ("heads", *average, *(("none",) if any(n in names for n in WANTED) else ()))

    def __call__(
        self, case: ModuleCase, inputs: Inputs, cotangents: Any = None, form: Form | None = None
    ) -> Returned:
        """Call the module, (B, T, C) in and out; ImplementationError if it has another answer."""
        arrays: list[Array | None] = list(inputs[:3])
        names = self.inputs
        if self.crosses and names[1] in CONTEXTS:
            arrays[2] = None
            if inputs.key is None and not self.module.arguments()[names[1]]:
                names = names[:1]  # self-attention is the default
        options = self._options(case.ask, case.B, case.T, inputs.visible, form)
        return self.module.call(dict(zip(names, arrays, strict=False)), options, cotangents)

    def _options(
        self, ask: str, B: int, T: int, visible: Array | None, form: Form | None
    ) -> dict[str, Any]:
        """Return the flags that ask for weights, and the mask in its form."""
        names = self.module.arguments()
        options: dict[str, Any] = {n: ask != "none" for n in WANTED if n in names}
        if AVERAGE in names:
            options[AVERAGE] = ask == "average"
        if visible is not None and form is not None:
            sizes = {"B": B, "T": T, "H": self.num_heads}
            options[form.parameter] = form.array(visible, sizes, self.module.array_dtype)
        return options

    def invoke(self, inputs: Sequence[Any], visible: Array | None, form: Form | None) -> Any:
        """Return the output (B, T, C) for tensors, which autograd may follow."""
        B, T = inputs[0].shape[:2]
        options = self._options(self.asks[-1], B, T, visible, form)
        return self.module.run(dict(zip(self.inputs, inputs, strict=False)), options)[0]
