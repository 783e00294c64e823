"""Parameters of `MultiHeadAttention`: checks, packed weights, random weights, pruning.

    H query heads   K key/value heads   D query/key size of a head   E value size of a head
    wq (in_q, H·D)   wk (in_k, K·D)   wv (in_v, K·E)   wo (H·E, out)   wg (in_q, H·E)

Functions take and return the arguments of a module by name.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.multihead.projections import NORMS, Merge, Norm
from npattn.problem import checks
from npattn.problem.arrays import Array
from npattn.problem.foreign import reject_unknown_options

PARAMETERS = (
    "wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "bias_k", "bias_v",
    "norm_q", "norm_k", "norm_q_bias", "norm_k_bias", "wg", "bg",
)  # fmt: skip

Order = Literal["qkv", "per_head"]


@dataclass(frozen=True, eq=False, repr=False)
class MultiHeadParameters:
    """Base of `MultiHeadAttention`: its parameters and options, and the ways to build one."""

    wq: Array
    wk: Array
    wv: Array
    wo: Array | None = None
    _: dataclasses.KW_ONLY
    num_heads: int
    num_kv_heads: int | None = None
    bq: Array | None = None
    bk: Array | None = None
    bv: Array | None = None
    bo: Array | None = None
    bias_k: Array | None = None
    bias_v: Array | None = None
    add_zero_attn: bool = False
    merge: Merge = "concat"
    qk_norm: Norm | None = None
    norm_q: Array | None = None
    norm_k: Array | None = None
    norm_q_bias: Array | None = None
    norm_k_bias: Array | None = None
    norm_eps: float = 1e-6
    wg: Array | None = None
    bg: Array | None = None

    def __post_init__(self) -> None:
        self.__dict__.update(_validate(vars(self)))

    def __repr__(self) -> str:
        words = [f"{n}={x.dtype} {x.shape}" for n, x in self.parameters.items()]
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name, value in self.options.items():
            if value != defaults[name] and not (name == "num_kv_heads" and value == self.num_heads):
                words.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"

    # --- built from something else ----------------------------------------------------------------

    @classmethod
    @reject_unknown_options
    def from_packed(
        cls, w: ArrayLike, b: ArrayLike | None = None, wo: ArrayLike | None = None,
        bo: ArrayLike | None = None,
        *, num_heads: int, num_kv_heads: int | None = None, order: Order, merge: Merge = "concat",
        **options: Any,
    ) -> Self:  # fmt: skip
        """Build a module from one weight for queries, keys and values together.

        Parameters
        ----------
        w : float array (in, (H + 2·K)·D)
        b : float array ((H + 2·K)·D,), optional
        wo, bo, num_heads, num_kv_heads, merge, **options
            As in `MultiHeadAttention`.
        order : {"qkv", "per_head"}
            Columns are [Q | K | V], or, for one key/value head after the other, the queries that
            share it, its key and its value: [q | k | v] head by head where K = H.

        Raises
        ------
        ShapeError
            If w is not (in, (H + 2·K)·D), or another array does not fit it.
        DtypeError
            If an array is not floating.
        OptionError
            If order or another option has an illegal value.
        """
        H, K = _head_counts(num_heads, num_kv_heads)
        parameters: dict[str, Any] = {**_split_packed(w, b, H, K, order), "wo": wo, "bo": bo}
        return cls(**parameters, num_heads=H, num_kv_heads=K, merge=merge, **options)

    @classmethod
    @reject_unknown_options
    def init(
        cls, in_size: int, num_heads: int,
        *, seed: int, head_size: int | None = None, value_size: int | None = None,
        num_kv_heads: int | None = None, key_size: int | None = None, value_in: int | None = None,
        out_size: int | None = None, bias: bool = True, add_bias_kv: bool = False,
        gate: bool = False, dtype: DTypeLike = np.float64, **options: Any,
    ) -> Self:  # fmt: skip
        """Sample random weights from the distribution of torch.nn.MultiheadAttention.

        Xavier uniform, ±√(6 / (rows + columns)): where keys and values have the size of queries,
        of the three weights side by side; else of each. wo is uniform in ±1/√(H·E), bias_k and
        bias_v are Xavier normal, the other biases 0. torch draws other numbers for the same seed.

        Parameters
        ----------
        in_size : int
            Size of a query.
        num_heads : int
        seed : int
            The same seed gives the same weights.
        head_size : int, optional
            D; default in_size / num_heads, which then must be whole.
        value_size : int, optional
            E; default D.
        num_kv_heads, key_size, value_in, out_size : int, optional
            K, in_k, in_v, out; default H, in_size, in_k, in_size.
        bias : bool, default True
            Give every projection a bias of zeros.
        add_bias_kv : bool, default False
            Sample bias_k and bias_v.
        gate : bool, default False
            Sample wg, Xavier uniform, and with `bias` give it a bias of zeros.
        dtype : dtype
        **options
            As in `MultiHeadAttention`.

        Raises
        ------
        OptionError
            If a size is no integer ≥ 1, seed no integer ≥ 0, num_heads does not divide in_size
            and head_size is None, or another option has an illegal value.
        """
        rng = np.random.default_rng(checks.check_integer("seed", seed, least=0))
        sizes = _read_sizes(
            in_size, num_heads, head_size=head_size, value_size=value_size,
            num_kv_heads=num_kv_heads, key_size=key_size, value_in=value_in, out_size=out_size,
        )  # fmt: skip
        parts = {"bias": bias, "add_bias_kv": add_bias_kv, "gate": gate}
        parameters = _random_parameters(rng, sizes, **parts, dtype=dtype)
        return cls(**parameters, num_heads=sizes.H, num_kv_heads=sizes.K, **options)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other parameters or options, checked again."""
        return dataclasses.replace(self, **changes)

    # --- parameters and sizes ---------------------------------------------------------------------

    @property
    def _kv_heads(self) -> int:
        assert self.num_kv_heads is not None  # `_validate` has replaced None by a number
        return self.num_kv_heads

    @property
    def head_size(self) -> int:
        """D."""
        return int(self.wq.shape[1] // self.num_heads)

    @property
    def value_size(self) -> int:
        """E."""
        return int(self.wv.shape[1] // self._kv_heads)

    @property
    def parameters(self) -> dict[str, Array]:
        """Every array that is not None, by name."""
        return {n: getattr(self, n) for n in PARAMETERS if getattr(self, n) is not None}

    @property
    def options(self) -> dict[str, Any]:
        """Every other argument, by name."""
        names = ("num_heads", "num_kv_heads", "add_zero_attn", "merge", "qk_norm", "norm_eps")
        return {name: getattr(self, name) for name in names}

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(x.size for x in self.parameters.values())

    def prune(self, heads: Sequence[int]) -> Self:
        """Remove query heads: exactly the result of zeroing their outputs.

        A key/value head goes with the last query head that uses it.

        Parameters
        ----------
        heads : sequence of int
            Indices of query heads, negative ones from the end.

        Raises
        ------
        OptionError
            If heads holds no indices of query heads, none would remain, the remaining key/value
            heads would be shared by unequal numbers of query heads, or heads are mixed by a merge
            "reshape" or a qk_norm of the whole projection.
        """
        query_heads, kv_heads = _remaining_heads(heads, self.num_heads, self._kv_heads)
        if len(query_heads) < self.num_heads and self.merge == "reshape":
            raise OptionError('cannot prune heads with merge="reshape", which mixes them')
        if len(query_heads) < self.num_heads and (self.qk_norm or "").endswith("_projection"):
            raise OptionError(
                f"cannot prune heads with qk_norm {self.qk_norm!r}, whose size is that of all heads"
            )
        return self._select_heads(query_heads, kv_heads)

    def unshared(self) -> Self:
        """Repeat the key/value heads, one for each query head: K = H."""
        group = self.num_heads // self._kv_heads
        kv_heads = [h // group for h in range(self.num_heads)]
        return self._select_heads(range(self.num_heads), kv_heads)

    def _select_heads(self, query_heads: Sequence[int], kv_heads: Sequence[int]) -> Self:
        return self.replace(**_copy_heads(vars(self), query_heads, kv_heads))


# --- checks ---------------------------------------------------------------------------------------


def _validate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module, checked: counts as int, parameters as arrays."""
    H, K = _head_counts(arguments["num_heads"], arguments["num_kv_heads"])
    arrays = {
        name: checks.read_floating(name, arguments[name])
        for name in PARAMETERS
        if arguments[name] is not None or name in ("wq", "wk", "wv")
    }
    _check_options(arguments)
    _check_shapes(arrays, H, K)
    _check_norms(arrays, arguments["qk_norm"], H, K)
    return {**arguments, "num_heads": H, "num_kv_heads": K, **arrays}


def _head_counts(num_heads: Any, num_kv_heads: Any) -> tuple[int, int]:
    H = checks.check_integer("num_heads", num_heads)
    K = checks.check_integer("num_kv_heads", H if num_kv_heads is None else num_kv_heads)
    if H % K:
        raise OptionError(f"num_kv_heads is {K}, which does not divide the {H} query heads")
    return H, K


def _check_options(arguments: Mapping[str, Any]) -> None:
    """Raise OptionError if an argument is not legal, or lacks one that it needs."""
    present = [name for name in PARAMETERS if arguments[name] is not None]
    if ("bias_k" in present) != ("bias_v" in present):
        one, other = ("bias_k", "bias_v") if "bias_k" in present else ("bias_v", "bias_k")
        raise OptionError(f"got {one} without {other}; pass both or neither")
    if "bo" in present and "wo" not in present:
        raise OptionError("got bo without wo; without an output projection bo must be None")
    if "bg" in present and "wg" not in present:
        raise OptionError("got bg without wg; without a gate bg must be None")
    checks.check_flag("add_zero_attn", arguments["add_zero_attn"])
    checks.check_choice("merge", arguments["merge"], ("concat", "reshape"))
    if arguments["qk_norm"] is not None:
        checks.check_choice("qk_norm", arguments["qk_norm"], NORMS)
    norms = [name for name in present if name.startswith("norm")]
    if norms and arguments["qk_norm"] is None:
        raise OptionError(f"got {norms[0]} without qk_norm; pass qk_norm, one of {NORMS}")
    checks.check_not_negative("norm_eps", arguments["norm_eps"])


def _check_shapes(arrays: Mapping[str, Array], H: int, K: int) -> None:
    """Raise ShapeError unless weights are (input, heads · size of a head) and biases fit them."""
    for name, heads in (("wq", H), ("wk", K), ("wv", K)):
        shape = arrays[name].shape
        if len(shape) != 2 or shape[1] % heads:
            raise ShapeError(
                f"{name} has shape {shape}, must be (input, {heads} heads · size of a head)"
            )
    wq, wk, wv = (arrays[name].shape for name in ("wq", "wk", "wv"))
    D, E = wq[1] // H, wv[1] // K
    wo = arrays.get("wo")
    out = wo.shape[-1] if wo is not None and wo.ndim else 0
    shapes = {"wk": (wk[0], K * D), "wo": (H * E, out), "bo": (out,)}
    shapes |= {"wg": (wq[0], H * E), "bg": (H * E,)}
    shapes |= {"bq": (H * D,), "bk": (K * D,), "bv": (K * E,)}
    shapes |= {"bias_k": (K * D,), "bias_v": (K * E,)}
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise ShapeError(
                f"{name} has shape {arrays[name].shape}, must have shape {shape} "
                f"[wq {wq}, wk {wk}, wv {wv}, H {H}, K {K}]"
            )


def _check_norms(arrays: Mapping[str, Array], kind: Norm | None, H: int, K: int) -> None:
    """Check the shapes of the parameters of norms."""
    D = arrays["wq"].shape[1] // H
    for name in PARAMETERS:
        if not name.startswith("norm") or name not in arrays:
            continue
        shape, n = arrays[name].shape, H if name.startswith("norm_q") else K
        if kind is not None and kind.endswith("_projection"):
            legal: tuple[tuple[int, ...], ...] = ((n * D,),)
        else:
            legal = ((D,), (n, D), (n, 1))
        if shape not in legal:
            raise ShapeError(
                f"{name} has shape {shape}, must have shape {' or '.join(map(str, legal))} "
                f"with qk_norm {kind!r} [D {D}, H {H}, K {K}]"
            )
        other = name + "_bias"
        if other in arrays and arrays[other].shape != shape:
            raise ShapeError(
                f"{other} has shape {arrays[other].shape}, must have the shape {shape} of {name}"
            )


# --- packed and random weights --------------------------------------------------------------------


def _split_packed(
    w: ArrayLike, b: ArrayLike | None, H: int, K: int, order: Order
) -> dict[str, Array]:
    """Split w (in, (H + 2·K)·D) and b ((H + 2·K)·D,) into wq, wk, wv and bq, bk, bv."""
    checks.check_choice("order", order, get_args(Order))
    w = checks.read_floating("w", w)
    if w.ndim != 2 or w.shape[1] % (H + 2 * K):
        raise ShapeError(
            f"w has shape {w.shape}, must be (input, {H + 2 * K} heads · size): {H} of queries, "
            f"{K} of keys and of values"
        )
    b = None if b is None else checks.read_floating("b", b)
    if b is not None and b.shape != w.shape[1:]:
        raise ShapeError(f"b has shape {b.shape}, must have shape {w.shape[1:]}")
    D, G = w.shape[1] // (H + 2 * K), H // K

    def split(x: Array) -> list[Array]:
        *lead, _ = x.shape
        if order == "qkv":
            return [np.ascontiguousarray(part) for part in np.split(x, [H * D, (H + K) * D], -1)]
        blocks = x.reshape(*lead, K, G + 2, D)
        parts = (blocks[..., :G, :], H), (blocks[..., G, :], K), (blocks[..., G + 1, :], K)
        return [part.reshape(*lead, heads * D) for part, heads in parts]

    parameters = dict(zip(("wq", "wk", "wv"), split(w), strict=True))
    if b is not None:
        parameters |= dict(zip(("bq", "bk", "bv"), split(b), strict=True))
    return parameters


class _ModuleSizes(NamedTuple):
    """Head counts, sizes of a head, and sizes of what comes in and goes out."""

    H: int
    K: int
    D: int
    E: int
    in_q: int
    in_k: int
    in_v: int
    out: int


def _read_sizes(
    in_size: int, num_heads: int, *, head_size: int | None, value_size: int | None,
    num_kv_heads: int | None, key_size: int | None, value_in: int | None, out_size: int | None,
) -> _ModuleSizes:  # fmt: skip
    """Check the sizes that `MultiHeadAttention.init` is given, and fill in the others."""
    H, K = _head_counts(num_heads, num_kv_heads)
    in_size = checks.check_integer("in_size", in_size)
    if head_size is None and in_size % H:
        raise OptionError(f"in_size is {in_size}, must be a multiple of {H}, or pass head_size")
    D = checks.check_integer("head_size", in_size // H if head_size is None else head_size)
    E = checks.check_integer("value_size", D if value_size is None else value_size)
    in_k = checks.check_integer("key_size", in_size if key_size is None else key_size)
    in_v = checks.check_integer("value_in", in_k if value_in is None else value_in)
    out = checks.check_integer("out_size", in_size if out_size is None else out_size)
    return _ModuleSizes(H, K, D, E, in_size, in_k, in_v, out)


def _random_parameters(
    rng: np.random.Generator, sizes: _ModuleSizes, *, bias: bool, add_bias_kv: bool, gate: bool,
    dtype: DTypeLike,
) -> dict[str, Any]:  # fmt: skip
    """Sample the parameters that `MultiHeadAttention.init` describes."""
    H, K, D, E, in_q, in_k, in_v, out = sizes
    for name, flag in (("bias", bias), ("add_bias_kv", add_bias_kv), ("gate", gate)):
        checks.check_flag(name, flag)
    try:
        dtype = np.dtype(dtype)
    except TypeError as err:
        raise DtypeError(f"dtype is {dtype!r}, must be floating, as float32") from err
    shapes = {"wq": (in_q, H * D), "wk": (in_k, K * D), "wv": (in_v, K * E)}
    all_columns = sum(columns for _, columns in shapes.values())

    def uniform(limit: float, *shape: int) -> Array:
        return rng.uniform(-limit, limit, shape).astype(dtype)

    parameters: dict[str, Any] = {}
    for name, (rows, columns) in shapes.items():
        fan_out = all_columns if in_q == in_k == in_v else columns
        parameters[name] = uniform(math.sqrt(6 / (rows + fan_out)), rows, columns)
    parameters["wo"] = uniform(1 / math.sqrt(H * E), H * E, out)
    if bias:
        parameters |= {f"b{n[1:]}": np.zeros(w.shape[1], dtype) for n, w in [*parameters.items()]}
    if add_bias_kv:
        for name, n in (("bias_k", K * D), ("bias_v", K * E)):
            parameters[name] = (math.sqrt(2 / (n + 1)) * rng.standard_normal(n)).astype(dtype)
    if gate:
        parameters["wg"] = uniform(math.sqrt(6 / (in_q + H * E)), in_q, H * E)
        parameters["bg"] = np.zeros(H * E, dtype) if bias else None
    return parameters


# --- selected heads -------------------------------------------------------------------------------


def _copy_heads(
    arguments: Mapping[str, Any], query_heads: Sequence[int], kv_heads: Sequence[int]
) -> dict[str, Any]:
    """Copy the parameters of these heads, in this order; a head may be repeated."""

    def select(name: str, heads: Sequence[int], count: int, axis: int) -> Array | None:
        x = arguments[name]
        if x is None:
            return None
        first = np.moveaxis(x, axis, 0)
        blocks = first.reshape(count, -1, *first.shape[1:])[list(heads)]
        return np.array(np.moveaxis(blocks.reshape(-1, *first.shape[1:]), 0, axis), order="C")

    H, K = arguments["num_heads"], arguments["num_kv_heads"]
    changes: dict[str, Any] = {n: select(n, query_heads, H, -1) for n in ("wq", "bq", "wg", "bg")}
    for name in ("wk", "wv", "bk", "bv", "bias_k", "bias_v"):
        changes[name] = select(name, kv_heads, K, -1)
    changes["wo"] = select("wo", query_heads, H, 0)
    for name in (name for name in PARAMETERS if name.startswith("norm")):
        heads, count = (query_heads, H) if name.startswith("norm_q") else (kv_heads, K)
        x = arguments[name]
        if x is not None and (x.ndim == 2 or arguments["qk_norm"].endswith("_projection")):
            changes[name] = select(name, heads, count, 0)
    return {**changes, "num_heads": len(query_heads), "num_kv_heads": len(kv_heads)}


def _remaining_heads(heads: Sequence[int], H: int, K: int) -> tuple[list[int], list[int]]:
    """Return the query heads and the key/value heads that remain without these query heads."""
    if not np.iterable(heads):
        raise OptionError(f"heads is {heads!r}, must be a sequence of indices")
    removed = {_head_index(h, H) for h in heads}
    remaining = [h for h in range(H) if h not in removed]
    if not remaining:
        raise OptionError(f"cannot prune all {H} heads; keep at least one")
    groups = [[h for h in remaining if h // (H // K) == g] for g in range(K)]
    sizes = {len(group) for group in groups if group}
    if len(sizes) > 1:
        raise OptionError(
            f"pruning leaves {[len(g) for g in groups]} query heads to the {K} key/value heads; "
            "leave equally many to each that remains, or call .unshared() first"
        )
    return remaining, [g for g, group in enumerate(groups) if group]


def _head_index(h: Any, H: int) -> int:
    is_integer = isinstance(h, numbers.Integral) and not isinstance(h, (bool, np.bool_))
    if not is_integer or not -H <= h < H:
        raise OptionError(f"heads contains {h!r}, must contain integers from {-H} to {H - 1}")
    return int(h) % H
