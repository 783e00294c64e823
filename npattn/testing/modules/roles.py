"""The projections of a module, by their names: where each weight of the reference is stored.

A role is an array of indices into one flat vector of all parameters, shaped like the weight or bias
that it stands for. Transposed, packed and split weights are views of it, whatever their layout, and
the gradient of a parameter is what its roles add at their indices.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npattn.errors import NpattnError, OptionError
from npattn.multihead import MultiHeadAttention
from npattn.problem.arrays import Array
from npattn.testing.adapters.modules import TorchModule

WORDS = {
    **dict.fromkeys(("q", "query", "queries", "wq"), "q"),
    **dict.fromkeys(("k", "key", "keys", "wk"), "k"),
    **dict.fromkeys(("v", "value", "values", "wv"), "v"),
    **dict.fromkeys(("o", "out", "output", "wo", "unify", "unifyheads"), "o"),
    **dict.fromkeys(("qkv", "wqkv", "c", "in", "query key value", "pack"), "qkv"),
    **dict.fromkeys(("kv", "wkv"), "kv"),
}
"""What is left of a name without `NOISE` → the projection that it means."""
NOISE = re.compile(
    r"^(w|weights?|bias|proj|projection|linear|lin|layer|to|fc|dense|attn|attention|self|net|mha|"
    r"transform|matrix|mat|kernel|heads?|embed|b|\d+)$"
)
OTHER_PARTS = re.compile(r"(^|\.)(mlp|ffn?|feed_?forward|c_fc)(\.|_|$)")
"""Parts of a block that are not attention."""
OUTPUTS = {"proj", "projection", "dense", "fc", "linear"}
"""Words of a layer that has no other word: the projection of the output."""
HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads", "nheads", "h",
         "num_head", "head_num", "n_h")  # fmt: skip
KV_HEADS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "kv_heads",
            "n_query_groups", "num_groups", "kv_head")  # fmt: skip
NORM = re.compile(r"(^|_)(norm|ln|layernorm|rmsnorm|rms)(_|$)")
ORDERS = {"3 H D": "qkv", "2 H D": "qkv", "H 3 D": "per_head", "H 2 D": "per_head"}
"""Axes of packed rows, as roles= may say them: ``"qkv: 3 H D"`` → order of the reading."""
EXPLICIT = {"wq": "q", "wk": "k", "wv": "v", "wo": "o", "wqkv": "qkv", "wkv": "kv"}
"""Keys of ``roles=`` → projections."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One way to read the parameters of a module as those of `MultiHeadAttention`."""

    # name of a parameter of `MultiHeadAttention` → indices into the flat vector
    indices: Mapping[str, Array]
    num_heads: int
    num_kv_heads: int
    # projection → name of the parameter that it was read from, for reports
    names: Mapping[str, str]
    order: str = ""  # order of packed columns, "" if none are packed
    add_zero_attn: bool = False
    norm: str = ""
    norm_eps: float = 1e-6
    norm_offset: float = 0.0

    def build(self, flat: Array) -> MultiHeadAttention:
        """Return the reference with the weights of a flat vector, (n,)."""
        parameters: dict[str, Any] = {name: flat[index] for name, index in self.indices.items()}
        for name in ("norm_q", "norm_k") if self.norm_offset else ():
            parameters[name] = parameters[name].astype(float) + self.norm_offset
        if self.norm:
            parameters |= {"qk_norm": self.norm, "norm_eps": self.norm_eps}
        return MultiHeadAttention(
            **parameters,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            add_zero_attn=self.add_zero_attn,
        )

    def scatter(self, arrays: Mapping[str, Array], size: int) -> Array:
        """Return a flat vector to which each role has added its array."""
        flat = np.zeros(size)
        for name, index in self.indices.items():
            np.add.at(flat, index, arrays[name])
        return flat

    def name(self, role: str) -> str:
        """Return the name of the parameter that has a role, "wq"; of a packed one, its part."""
        for packed in (role[1:], "qkv", "kv"):
            if packed in self.names:
                part = "" if packed == role[1:] else f" ({role[1:]} part)"
                return self.names[packed] + part
        return role

    def __str__(self) -> str:
        """Return one line: the parameter of each role, how they are packed, heads and norm."""
        D = self.indices["wq"].shape[1] // self.num_heads
        roles = ", ".join(f"w{role} = {name}" for role, name in self.names.items())
        kv = "" if self.num_kv_heads == self.num_heads else f", {self.num_kv_heads} of keys"
        packed = {
            "": "",
            "qkv": ", packed [Q | K | V]",
            "per_head": ", packed per head [q | k | v]",
        }
        heads = "1 head" if self.num_heads == 1 else f"{self.num_heads} heads"
        kind = self.norm.replace("_projection", " of all heads together")
        norm = f"; {kind} norm of q and k, eps {self.norm_eps:g}" if self.norm else ""
        norm += ", weight + 1" if self.norm_offset else ""
        return f"{roles}{packed[self.order]}; {heads} of {D}{kv}{norm}"


class Flat:
    """The parameters of a module as one vector of `size` elements."""

    def __init__(self, parameters: Mapping[str, Array]) -> None:
        self.shapes = {name: x.shape for name, x in parameters.items()}
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        self.starts = dict(zip(self.shapes, itertools.accumulate(sizes, initial=0), strict=False))
        self.size = sum(sizes)

    def join(self, parameters: Mapping[str, Array]) -> Array:
        """Return the vector of these parameters."""
        return np.concatenate([parameters[name].ravel() for name in self.shapes])

    def split(self, flat: Array) -> dict[str, Array]:
        """Return the parameters of a vector."""
        return {name: flat[self.index(name)] for name in self.shapes}

    def index(self, name: str) -> Array:
        """Return the indices of a parameter, in its shape."""
        shape = self.shapes[name]
        return self.starts[name] + np.arange(int(np.prod(shape))).reshape(shape)


def find_projection(name: str) -> str:
    """Return the projection that the dotted name of a parameter means: "q", …; "" for none.

    Examples
    --------
    >>> names = ("W_q.weight", "to_out.0.weight", "in_proj_bias", "norm.weight")
    >>> [find_projection(name) for name in names]
    ['q', 'o', 'qkv', '']
    """
    plain = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    parts = plain.split(".")
    if parts[-1] in ("bias_k", "bias_v") or OTHER_PARTS.search(plain):  # keys, values; no terms
        return ""
    otherwise = ""
    for part in reversed(parts):
        tokens = part.split("_")
        words = " ".join(t for t in tokens if not NOISE.match(t))
        if part == "c_proj":
            return "o"
        if words:
            return WORDS.get(words, otherwise)
        otherwise = "o" if OUTPUTS.intersection(tokens) else otherwise
    return otherwise


def find_roles(
    module: TorchModule,
    roles: Mapping[str, str] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> tuple[Flat, list[Reading], list[str]]:
    """Return the readings of a module, the likeliest first, and the parameters in none.

    `roles` says for "wq", "wk", "wv", "wo", "wqkv" or "wkv" the name of a parameter, or of what
    holds it. The default of `num_heads` is an attribute, or else every number that fits the widths.
    """
    flat = Flat(module.parameters())
    found: dict[str, list[str]] = {}
    explicit, said = _read_roles(roles or {}, flat)
    for name in flat.shapes:
        by_name = find_projection(name)
        projection = explicit.get(name, "" if by_name in explicit.values() else by_name)
        if projection:
            found.setdefault(projection, []).append(name)
    weights = {x for x, names in found.items() if any(len(flat.shapes[n]) > 1 for n in names)}
    kinds = {"q", "k", "v"} if "qkv" not in weights else set()
    kinds -= {"k", "v"} if "kv" in weights else set()
    if missing := sorted(kinds - weights):
        raise OptionError(
            f"found no projection {', '.join('w' + x for x in missing)} among the parameters "
            f"{', '.join(flat.shapes)}: pass roles={{'w{missing[0]}': 'NAME'}}; keys that are "
            "projected twice (latent, MLA) are judged as a function of q, k and v with "
            "npattn.testing.check"
        )
    heads = num_heads or module.attribute(HEADS)
    kv = num_kv_heads or module.attribute(KV_HEADS)
    readings: list[Reading] = []
    errors: list[str] = []
    orders = (said,) if said else ("qkv", "per_head")
    for turned, order in itertools.product((True, False), orders):
        for reading in _read(module, flat, found, turned, order, heads, kv):
            try:
                reading.build(np.zeros(flat.size))
            except NpattnError as err:
                errors.append(str(err))
                continue
            if not any(_same(reading, other) for other in readings):
                readings.append(reading)
    if not readings:
        why = errors[0] if errors else (
            f"widths of {', '.join(n for names in found.values() for n in names)} do not fit "
            f"{heads or 'any number of'} heads and {kv or 'any number'} of keys"
        )  # fmt: skip
        raise OptionError(
            f"the parameters of m are not read as those of attention ({why}): pass num_heads= and "
            "num_kv_heads=, or judge the function of q, k and v inside with npattn.testing.check"
        )
    readings = [x for one in readings for x in _with_norms(module, flat, one)]
    read = np.zeros(flat.size, bool)
    for index in readings[0].indices.values():
        read[index] = True
    return flat, readings, [n for n in flat.shapes if not read[flat.index(n)].any()]


def _with_norms(module: TorchModule, flat: Flat, reading: Reading) -> Iterator[Reading]:
    """Yield the reading with each meaning that norms of q and k may have; itself without any."""
    norms: dict[str, str] = {}
    for name in flat.shapes:
        *_, layer, last = ("", *name.lower().split("."))
        words = set(re.split(r"_|(?<=[qk])(?=norm|ln)", layer if layer else last))
        for letter in ("q", "k"):
            if NORM.search("_".join(words)) and words & {
                letter,
                {"q": "query", "k": "key"}[letter],
            }:
                norms[f"norm_{letter}{'_bias' if last == 'bias' else ''}"] = name
    H, K = reading.num_heads, reading.num_kv_heads
    D = reading.indices["wq"].shape[1] // H
    width = flat.shapes[norms["norm_q"]] if {"norm_q", "norm_k"} <= norms.keys() else ()
    if width not in ((D,), (H * D,)):
        yield reading
        return
    indices = {**reading.indices, **{n: flat.index(name) for n, name in norms.items()}}
    holder = module.owner.get_submodule(norms["norm_q"].rpartition(".")[0])
    eps = next((float(x) for n in ("eps", "variance_epsilon") if (x := getattr(holder, n, None))),
               1e-6)  # fmt: skip
    suffix = "_projection" if width != (D,) or (D == H * D and K != H) else ""
    kinds = [("rms", 0.0), ("rms", 1.0), ("layer", 0.0)]
    for kind, offset in kinds[2:] if "norm_q_bias" in norms else kinds:
        yield replace(
            reading, indices=indices, norm=kind + suffix, norm_eps=eps, norm_offset=offset
        )


def _read_roles(roles: Mapping[str, str], flat: Flat) -> tuple[dict[str, str], str]:
    """Return the projection of each parameter that ``roles=`` names, and the order it says."""
    explicit: dict[str, str] = {}
    order = ""
    for role, text in roles.items():
        holder, _, axes = text.partition(":")
        if axes and " ".join(axes.split()) not in ORDERS:
            raise OptionError(f"roles[{role!r}] has axes {axes!r}, must be one of {[*ORDERS]}")
        order = ORDERS[" ".join(axes.split())] if axes else order
        if role not in EXPLICIT:
            raise OptionError(f"roles has {role!r}, must have {', '.join(EXPLICIT)}")
        inside = [n for n in flat.shapes if n == holder or n.startswith(f"{holder}.")]
        if not inside:
            raise OptionError(
                f"roles[{role!r}] is {holder!r}, must name one of {', '.join(flat.shapes)}"
            )
        explicit |= dict.fromkeys(inside, EXPLICIT[role])
    return explicit, order


def _same(one: Reading, other: Reading) -> bool:
    same = one.num_heads == other.num_heads and one.indices.keys() == other.indices.keys()
    return same and all(np.array_equal(x, other.indices[n]) for n, x in one.indices.items())


def _read(
    module: TorchModule,
    flat: Flat,
    found: Mapping[str, Sequence[str]],
    turned: bool,
    order: str,
    heads: int | None,
    kv_heads: int | None,
) -> Iterator[Reading]:
    """Yield readings: one for each number of heads.

    `turned`: read weights of unknown layers as (out, in).
    """
    matrices: dict[str, Array] = {}
    names: dict[str, str] = {}
    for projection, parameters in found.items():
        weights = [n for n in parameters if len(flat.shapes[n]) > 1]
        biases = [n for n in parameters if len(flat.shapes[n]) == 1]
        if not weights:  # the biases of separate weights may be packed
            matrices["b" + projection] = np.concatenate([flat.index(n) for n in biases])
            continue
        parts = [_matrix(module, flat, n, turned) for n in weights]
        if any(p.ndim != 2 for p in parts):
            return
        # Heads that have layers of their own stand side by side, in the order of their names.
        matrices["w" + projection] = np.concatenate(parts, 1)
        if len(biases) == len(weights):
            matrices["b" + projection] = np.concatenate([flat.index(n) for n in biases])
        names[projection] = weights[0] + (f" … {weights[-1]}" if len(weights) > 1 else "")
        if heads is None and len(weights) > 1:
            heads = len(weights)
    packed = order if {"wqkv", "wkv"}.intersection(matrices) else ""
    counts = _count_heads(matrices, heads, kv_heads)
    if heads and matrices.get("wq", np.zeros((1, heads))).shape[1] % heads:
        raise OptionError(f"num_heads is {heads}, must divide the width {matrices['wq'].shape[1]}")
    for H, K in counts:
        indices = _unpack(dict(matrices), H, K, packed or "qkv")
        if indices is None:
            continue
        for name in ("bias_k", "bias_v"):
            if name in flat.shapes:
                indices[name] = flat.index(name).ravel()
        D = indices["wq"].shape[1] // H
        K = indices["wk"].shape[1] // D
        zero = bool(getattr(module.owner, "add_zero_attn", False))
        yield Reading(indices, H, max(K, 1), names, packed, zero)


def _count_heads(
    matrices: Mapping[str, Array], heads: int | None, kv_heads: int | None
) -> list[tuple[int, int]]:
    """Return numbers of query heads and of key/value heads that fit the widths.

    Where all three are packed the output projection, if there is one, has the width of the queries.
    """
    if "wqkv" not in matrices:
        width = matrices["wq"].shape[1]
        numbers = [heads] if heads else [n for n in range(1, width + 1) if width % n == 0]
        return [(H, kv_heads or H) for H in numbers]
    packed = matrices["wqkv"].shape[1]
    width = matrices["wo"].shape[0] if "wo" in matrices else packed // 3
    found = []
    for H in [heads] if heads else [n for n in range(1, width + 1) if width % n == 0]:
        K = kv_heads or (max(packed - width, 0) * H // (2 * width) if width % H == 0 else 0)
        if K and width % H == 0 and (H + 2 * K) * (width // H) == packed:
            found.append((H, K))
        elif not kv_heads:
            found.append((H, H))
    return found


def _matrix(module: TorchModule, flat: Flat, name: str, turned: bool) -> Array:
    """Return the indices of a weight, as it multiplies from the right."""
    index, right = flat.index(name), module.multiplies_from_right(name)
    return index if right or (right is None and not turned) else index.T


def _unpack(arrays: dict[str, Array], H: int, K: int, order: str) -> dict[str, Array] | None:
    """Split packed columns; None where they do not fit."""
    for packed, letters in (("qkv", "qkv"), ("kv", "kv")):
        for kind in ("w", "b"):
            if kind + packed not in arrays:
                continue
            x = arrays.pop(kind + packed)
            width = x.shape[-1]
            groups = {"q": H, "k": K, "v": K}
            total = sum(groups[n] for n in letters)
            if width % total:
                return None
            D = width // total
            if order == "per_head":
                if H != K:
                    return None
                each = np.moveaxis(x.reshape(*x.shape[:-1], H, len(letters), D), -2, 0)
                parts = [p.reshape(*x.shape[:-1], H * D) for p in each]
            else:
                ends = np.cumsum([groups[n] * D for n in letters])[:-1]
                parts = np.split(x, ends, -1)
            arrays |= {kind + n: p for n, p in zip(letters, parts, strict=True)}
    return arrays
