"""Multi-head attention with its projections, forward and backward.

    B batch   H query heads   K key/value heads   T queries   S keys
    D query/key size of a head   E value size of a head

    q = norm(query Wq + bq)   k = norm(key Wk + bk)   v = value Wv + bv      (heads split off)
    o = attention(q, [k | bias_k | 0], [v | bias_v | 0])                     (..., H, T, E)
    out = merge(o) Wo + bo                                                   (..., T, out)

Weights multiply from the right. The keys of ``bias_k`` and ``add_zero_attn`` come last and are
seen by every query. Source: Vaswani et al. 2017, section 3.2.2; gradients:
docs/derivations/multihead.md.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from npattn import api
from npattn.arrays import Array, check_integer, sum_to
from npattn.checks import check_cotangent, read_floating
from npattn.conventions import Conventions, check_conventions
from npattn.errors import OptionError, ShapeError
from npattn.problem import Forward, Problem
from npattn.projections import (
    Merge,
    Norm,
    Normed,
    linear,
    linear_backward,
    merge,
    merge_backward,
    normalise,
    normalise_backward,
    split,
)
from npattn.summary import Description, described

__all__ = ["MultiHeadAttention", "MultiHeadForward", "MultiHeadGradients"]

PARAMETERS = (
    "wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "bias_k", "bias_v",
    "norm_q", "norm_k", "norm_q_bias", "norm_k_bias",
)  # fmt: skip
OPTIONS = (
    "causal", "window", "bias", "scale", "softcap", "score_mod", "sinks", "dropout_mask",
    "dropout_rate", "dtype", "engine", "conventions",
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class MultiHeadAttention:
    """Projections, heads, attention, output projection.

    Parameters
    ----------
    wq, wk, wv : float array
        (in_q, H·D), (in_k, K·D), (in_v, K·E): they multiply from the right.
    wo : float array (H·E, out), optional
        None leaves the heads side by side.
    num_heads : int
        H ≥ 1.
    num_kv_heads : int, optional
        K, which divides H; default H. Query head h uses key/value head h // (H / K).
    bq, bk, bv, bo : float array, optional
        (H·D,), (K·D,), (K·E,), (out,).
    bias_k, bias_v : float array (K·D,), (K·E,), optional
        One more key and its value, after the projections; both or neither.
    add_zero_attn : bool, default False
        One more key and value of zeros.
    merge : {"concat", "reshape"}
        "reshape" forgets to move the head axis back before it reshapes, as some code does.
    qk_norm : {"rms", "layer"}, optional
        Normalises every head of every query and key, after the projections.
    norm_q, norm_k, norm_q_bias, norm_k_bias : float array (D,), optional
        What a normalised head is multiplied by, and what is added.
    norm_eps : float, default 1e-6
        Added to the mean square under the root.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        When made: naming the argument, what it is and what it must be.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> mha = npattn.MultiHeadAttention.init(8, 2, seed=0)
    >>> fwd = mha.forward(np.ones((3, 5, 8)))
    >>> fwd.out.shape, fwd.weights.shape
    ((3, 5, 8), (3, 2, 5, 5))
    >>> mha.backward(fwd, np.ones_like(fwd.out)).wq.shape
    (8, 8)
    """

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

    def __post_init__(self) -> None:
        put = self.__dict__.__setitem__
        H = check_integer("num_heads", self.num_heads)
        K = check_integer("num_kv_heads", H if self.num_kv_heads is None else self.num_kv_heads)
        if H % K:
            raise OptionError(f"num_kv_heads is {K}, must divide the {H} query heads")
        put("num_heads", H)
        put("num_kv_heads", K)
        for name in PARAMETERS:
            if getattr(self, name) is not None or name in ("wq", "wk", "wv"):
                put(name, read_floating(name, getattr(self, name)))
        self._check_options()
        for name, shape in self._shapes().items():
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise ShapeError(
                    f"{name} has shape {array.shape}, must have shape {shape} "
                    f"[wq {self.wq.shape}, wk {self.wk.shape}, wv {self.wv.shape}, H {H}, K {K}]"
                )

    def _check_options(self) -> None:
        if (self.bias_k is None) != (self.bias_v is None):
            given = "bias_k" if self.bias_v is None else "bias_v"
            raise OptionError(f"{given} is given alone, must come with the other of bias_k, bias_v")
        if self.bo is not None and self.wo is None:
            raise OptionError("bo is given without wo, must be None where nothing is projected")
        if not isinstance(self.add_zero_attn, (bool, np.bool_)):
            raise OptionError(f"add_zero_attn is {self.add_zero_attn!r}, must be a bool")
        for name, legal in (("merge", ("concat", "reshape")), ("qk_norm", ("rms", "layer", None))):
            if getattr(self, name) not in legal:
                raise OptionError(f"{name} is {getattr(self, name)!r}, must be one of {legal}")
        norms = [n for n in PARAMETERS if n.startswith("norm") and getattr(self, n) is not None]
        if norms and self.qk_norm is None:
            raise OptionError(f"{norms[0]} is given, must come with qk_norm")
        eps = self.norm_eps
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
            raise OptionError(f"norm_eps is {eps!r}, must be a finite number ≥ 0")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """What each parameter must be like, by the shapes of the three weights."""
        H, K = self.num_heads, self._kv_heads
        for name, heads in (("wq", H), ("wk", K), ("wv", K)):
            w = getattr(self, name)
            if w.ndim != 2 or w.shape[1] % heads:
                raise ShapeError(
                    f"{name} has shape {w.shape}, must be (input, {heads} heads · size of a head)"
                )
        D, E = self.wq.shape[1] // H, self.wv.shape[1] // K
        out = self.wo.shape[-1] if self.wo is not None and self.wo.ndim else 0
        sizes = {"wk": (self.wk.shape[0], K * D), "wo": (H * E, out), "bo": (out,)}
        sizes |= {"bq": (H * D,), "bk": (K * D,), "bv": (K * E,)}
        sizes |= {"bias_k": (K * D,), "bias_v": (K * E,)}
        return sizes | {name: (D,) for name in PARAMETERS if name.startswith("norm")}

    def __repr__(self) -> str:
        words = [f"{n}={x.dtype} {x.shape}" for n, x in self.parameters.items()]
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name, value in self.options.items():
            if value != defaults[name] and not (name == "num_kv_heads" and value == self.num_heads):
                words.append(f"{name}={value!r}")
        return f"MultiHeadAttention({', '.join(words)})"

    # --- made from something else -----------------------------------------------------------------

    @classmethod
    def from_packed(
        cls,
        w: Any,
        b: Any = None,
        wo: Any = None,
        bo: Any = None,
        *,
        num_heads: int,
        order: Literal["qkv", "per_head"],
        merge: Merge = "concat",
        **options: Any,
    ) -> MultiHeadAttention:
        """Of one weight for queries, keys and values together.

        Parameters
        ----------
        w : float array (in, 3·H·D)
        b : float array (3·H·D,), optional
        wo, bo, num_heads, merge, **options
            As in `MultiHeadAttention`.
        order : {"qkv", "per_head"}
            Columns are [Q | K | V], or [q | k | v] head by head.

        Raises
        ------
        ShapeError, DtypeError, OptionError
        """
        if order not in ("qkv", "per_head"):
            raise OptionError(f'order is {order!r}, must be "qkv" or "per_head"')
        H, w = check_integer("num_heads", num_heads), read_floating("w", w)
        if w.ndim != 2 or w.shape[1] % (3 * H):
            raise ShapeError(f"w has shape {w.shape}, must be (input, 3 · {H} heads · size)")
        b = None if b is None else read_floating("b", b)
        if b is not None and b.shape != w.shape[1:]:
            raise ShapeError(f"b has shape {b.shape}, must have shape {w.shape[1:]}")

        def parts(x: Array) -> list[Array]:
            shape = (3, H, -1) if order == "qkv" else (H, 3, -1)
            parted = x.reshape(*x.shape[:-1], *shape)
            parted = parted if order == "qkv" else parted.swapaxes(-2, -3)
            width = x.shape[-1] // 3
            return [parted[..., i, :, :].reshape(*x.shape[:-1], width) for i in range(3)]

        q, k, v = parts(w)
        bq, bk, bv = (None, None, None) if b is None else parts(b)
        return cls(q, k, v, wo, bq=bq, bk=bk, bv=bv, bo=bo, num_heads=H, merge=merge, **options)

    @classmethod
    def init(
        cls,
        in_size: int,
        num_heads: int,
        *,
        seed: int,
        head_size: int | None = None,
        value_size: int | None = None,
        num_kv_heads: int | None = None,
        key_size: int | None = None,
        value_in: int | None = None,
        out_size: int | None = None,
        bias: bool = True,
        add_bias_kv: bool = False,
        dtype: Any = np.float64,
        **options: Any,
    ) -> MultiHeadAttention:
        """Random weights, as torch.nn.MultiheadAttention draws them (not its very numbers).

        Xavier uniform, ±√(6 / (rows + columns)): where keys and values have the size of queries,
        of the three weights side by side; else of each. wo is uniform in ±1/√(H·E), bias_k and
        bias_v are Xavier normal, the other biases 0.

        Parameters
        ----------
        in_size : int
            Of a query.
        num_heads : int
        seed : int
            The same numbers for the same seed.
        head_size : int, optional
            D; default in_size / num_heads, which then must be whole.
        value_size : int, optional
            E; default D.
        num_kv_heads, key_size, value_in, out_size : int, optional
            K, in_k, in_v, out; default H, in_size, in_k, in_size.
        bias : bool, default True
            Whether the projections add one.
        add_bias_kv : bool, default False
            Whether there are bias_k and bias_v.
        dtype : dtype
        **options
            As in `MultiHeadAttention`.
        """
        rng = np.random.default_rng(check_integer("seed", seed, least=0))
        H, in_size = check_integer("num_heads", num_heads), check_integer("in_size", in_size)
        K = check_integer("num_kv_heads", H if num_kv_heads is None else num_kv_heads)
        if head_size is None and in_size % H:
            raise OptionError(f"in_size is {in_size}, must be a multiple of {H}, or give head_size")
        D = check_integer("head_size", in_size // H if head_size is None else head_size)
        E = check_integer("value_size", D if value_size is None else value_size)
        in_k = check_integer("key_size", in_size if key_size is None else key_size)
        in_v = check_integer("value_in", in_k if value_in is None else value_in)
        out = check_integer("out_size", in_size if out_size is None else out_size)
        packed = in_size == in_k == in_v
        shapes = {"wq": (in_size, H * D), "wk": (in_k, K * D), "wv": (in_v, K * E)}
        columns = sum(n for _, n in shapes.values())

        def uniform(limit: float, *shape: int) -> Array:
            return rng.uniform(-limit, limit, shape).astype(dtype)

        made: dict[str, Any] = {}
        for name, (rows, own) in shapes.items():
            made[name] = uniform(math.sqrt(6 / (rows + (columns if packed else own))), rows, own)
        made["wo"] = uniform(1 / math.sqrt(H * E), H * E, out)
        if bias:
            made |= {f"b{n[1:]}": np.zeros(w.shape[1], dtype) for n, w in [*made.items()]}
        if add_bias_kv:
            for name, n in (("bias_k", K * D), ("bias_v", K * E)):
                made[name] = (math.sqrt(2 / (n + 1)) * rng.standard_normal(n)).astype(dtype)
        return cls(**made, num_heads=H, num_kv_heads=K, **options)

    def replace(self, **changes: Any) -> MultiHeadAttention:
        """The same with other parameters or options, checked again."""
        return dataclasses.replace(self, **changes)

    # --- what it has ------------------------------------------------------------------------------

    @property
    def _kv_heads(self) -> int:
        assert self.num_kv_heads is not None  # a number, once it is made
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
        """Every array that there is, by name."""
        return {n: getattr(self, n) for n in PARAMETERS if getattr(self, n) is not None}

    @property
    def options(self) -> dict[str, Any]:
        """Every other argument, by name."""
        names = ("num_heads", "num_kv_heads", "add_zero_attn", "merge", "qk_norm", "norm_eps")
        return {name: getattr(self, name) for name in names}

    @property
    def num_parameters(self) -> int:
        return sum(x.size for x in self.parameters.values())

    # --- forward and backward ---------------------------------------------------------------------

    def forward(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        mask: Any = None,
        *,
        keep: Literal["all", "inputs"] = "all",
        **options: Any,
    ) -> MultiHeadForward:
        """Project, attend, merge, project.

        Parameters
        ----------
        query : float array (..., T, in_q)
        key : float array (..., S, in_k), optional
            None: query.
        value : float array (..., S, in_v), optional
            None: key.
        mask : bool array, optional
            True = may attend; broadcasts against (..., H, T, S). A (B, S) padding mask is
            ``mask[:, None, None, :]``.
        keep : {"all", "inputs"}
            "inputs" keeps no array of T×S numbers; `backward` then computes forward again.
        **options
            Every option of `npattn.attention`. The keys of bias_k and add_zero_attn come after
            those given: mask, causal, window and bias do not reach them, a dropout_mask has
            columns for them. dtype "bfloat16" or "float16" rounds what enters each product and
            what leaves it, as mixed precision does; sums and softmax are float32.

        Returns
        -------
        MultiHeadForward
            .out (..., T, out), .lse (..., H, T), .weights (..., H, T, S), .attention

        Raises
        ------
        ShapeError, DtypeError, OptionError
            Before any work.
        """
        if keep not in ("all", "inputs"):
            raise OptionError(f'keep is {keep!r}, must be "all" or "inputs"')
        _check_options(options)
        key_is, value_is = ("query" if key is None else "key"), "value"
        if value is None:
            value_is = key_is
        given = {"query": query, "key": query if key is None else key}
        given["value"] = given["key"] if value is None else value
        inputs = {name: self._input(name, x) for name, x in given.items()}
        call = Call(inputs, {"key": key_is, "value": value_is}, mask, options)
        steps = self._steps(call)
        kept = steps if keep == "all" else None
        return MultiHeadForward(steps.out, steps.attention.lse, self, call, kept)

    def backward(
        self, fwd: MultiHeadForward, dout: Any, dlse: Any = None, dweights: Any = None
    ) -> MultiHeadGradients:
        """Gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights.

        Parameters
        ----------
        fwd : MultiHeadForward
            What `forward` of this module returned.
        dout : float array (..., T, out)
        dlse : float array (..., H, T), optional
        dweights : float array (..., H, T, S), optional
            Of weights that are averaged over the heads: a cotangent / H, for every head.

        Returns
        -------
        MultiHeadGradients
            Each shaped as what it belongs to; None where there is no such array. Where key or
            value was None, its gradient is in that of what it stood for.

        Raises
        ------
        ShapeError, DtypeError, OptionError
        """
        self._check_own(fwd)
        return self._gradients(
            fwd.steps, fwd.call, check_cotangent("dout", dout, fwd.out.shape), dlse, dweights
        )

    def importance(self, fwd: MultiHeadForward, dout: Any) -> Array:
        """How the loss depends on each head: the size of its gradient in a gate of 1 on o, (H,).

        Parameters as in `backward`; a gate multiplies o alone, so that no other cotangent counts.
        Source: Michel, Levy, Neubig 2019, section 2.3.
        """
        self._check_own(fwd)
        steps = fwd.steps
        do = self._from_out(steps, check_cotangent("dout", dout, fwd.out.shape))[1]
        rest = tuple(i for i in range(do.ndim) if i != do.ndim - 3)
        return np.asarray(abs((do * steps.attention.out).sum(rest)))

    def describe(
        self,
        query: Any = None,
        key: Any = None,
        value: Any = None,
        mask: Any = None,
        *,
        dout: Any = None,
        **options: Any,
    ) -> Description:
        """Shapes and parameter counts of every step; with inputs, what each head does.

        Parameters
        ----------
        query, key, value, mask, **options
            As in `forward`; without query, the steps alone.
        dout : float array (..., T, out), optional
            To tell which heads pass no gradient.

        Returns
        -------
        Description
            Printed, a table that names heads whose weights are uniform, constant or saturated.

        Examples
        --------
        >>> import npattn
        >>> mha = npattn.MultiHeadAttention.init(8, 2, seed=0)
        >>> mha.describe().num_parameters
        288
        """
        if query is None:
            return described(self)
        fwd = self.forward(query, key, value, mask, **options)
        return described(
            self, fwd, None if dout is None else check_cotangent("dout", dout, fwd.out.shape)
        )

    def prune(self, heads: Sequence[int]) -> MultiHeadAttention:
        """Without these query heads: exactly what zeroing their outputs gives.

        A key/value head goes with the last query head that uses it.

        Parameters
        ----------
        heads : sequence of int
            Indices of query heads, negative ones from the end.

        Raises
        ------
        OptionError
            If none would stay, or as many would not stay of each group that shares a key/value
            head, or merge is "reshape", which mixes heads.
        """
        stay, kv = staying_heads(heads, self.num_heads, self._kv_heads)
        if len(stay) < self.num_heads and self.merge == "reshape":
            raise OptionError('heads cannot be pruned with merge="reshape", which mixes them')
        return self._of_heads(stay, kv)

    def unshared(self) -> MultiHeadAttention:
        """With the key/value heads repeated, one for each query head: K = H."""
        group = self.num_heads // self._kv_heads
        return self._of_heads(range(self.num_heads), [h // group for h in range(self.num_heads)])

    def _of_heads(self, query_heads: Sequence[int], kv_heads: Sequence[int]) -> MultiHeadAttention:
        def pick(x: Array | None, heads: Sequence[int], count: int, axis: int) -> Array | None:
            if x is None:
                return None
            moved = np.moveaxis(x, axis, 0)
            parted = moved.reshape(count, -1, *moved.shape[1:])[list(heads)]
            return np.moveaxis(parted.reshape(-1, *moved.shape[1:]), 0, axis).copy()

        changes: dict[str, Any] = {}
        for name in ("wq", "bq"):
            changes[name] = pick(getattr(self, name), query_heads, self.num_heads, -1)
        for name in ("wk", "wv", "bk", "bv", "bias_k", "bias_v"):
            changes[name] = pick(getattr(self, name), kv_heads, self._kv_heads, -1)
        changes["wo"] = pick(self.wo, query_heads, self.num_heads, 0)
        counts = {"num_heads": len(query_heads), "num_kv_heads": len(kv_heads)}
        return self.replace(**changes, **counts)

    # --- the steps --------------------------------------------------------------------------------

    def _check_own(self, fwd: Any) -> None:
        if not isinstance(fwd, MultiHeadForward):
            raise OptionError(f"fwd is a {type(fwd).__name__}, must be what this forward returned")
        if fwd.module is not self:
            raise OptionError("fwd is of another module, must be what this one's forward returned")

    def _input(self, name: str, x: Any) -> Array:
        """query, key or value, as wide as its weight takes it."""
        array, width = read_floating(name, x), getattr(self, "w" + name[0]).shape[0]
        if array.ndim < 2 or array.shape[-1] != width:
            raise ShapeError(f"{name} has shape {array.shape}, must be (..., length, {width})")
        return array

    def _frame(self, call: Call) -> Problem:
        """The attention problem without its numbers and without the keys that are added: it checks
        the options, and says what is computed in."""
        arrays = [*call.inputs.values(), *self.parameters.values()]
        kind = np.result_type(*(x.dtype if x.dtype.kind == "c" else float for x in arrays))
        sizes = {"query": self.head_size, "key": self.head_size, "value": self.value_size}
        empty = []
        for name, x in call.inputs.items():
            *lead, length, _ = x.shape
            heads = self.num_heads if name == "query" else self._kv_heads
            shape = (*lead, heads, length, sizes[name])
            empty.append(np.broadcast_to(np.zeros((), kind), shape))
        options = {n: x for n, x in call.options.items() if n != "conventions"}
        if self._added:
            options.pop("dropout_mask", None)  # it has columns for the keys that are added
            options.pop("dropout_rate", None)
            if options.get("score_mod") is not None:
                raise OptionError(
                    "score_mod is given with bias_k or add_zero_attn, must be None: which index "
                    "the keys have that are added is not ours to guess"
                )
        q, k, v = empty
        return Problem(q, k, v, call.mask, alignment=_alignment(call.options), **options)

    @property
    def _added(self) -> int:
        """How many keys come from the module itself."""
        return int(self.bias_k is not None) + int(self.add_zero_attn)

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite gives what is not
    def _steps(self, call: Call) -> Steps:
        """Forward, with all that backward needs."""
        frame = self._frame(call)

        def read(arrays: Mapping[str, Array]) -> dict[str, Array]:
            return {
                n: frame.round_to_storage(x.astype(frame.dtype, copy=False))
                for n, x in arrays.items()
            }

        p, x = read(self.parameters), read(call.inputs)
        heads, normed = {}, {}
        for name, array in x.items():  # w, b of query, key, value are wq, bq, ...
            y = frame.round_to_storage(linear(array, p["w" + name[0]], p.get("b" + name[0])))
            y = split(y, self.num_heads if name == "query" else self._kv_heads)
            if self.qk_norm is not None and name != "value":
                w, b = p.get("norm_" + name[0]), p.get(f"norm_{name[0]}_bias")
                normed[name] = normalise(y, self.qk_norm, w, b, self.norm_eps)
                y = frame.round_to_storage(normed[name].y)
            heads[name] = y
        attention = self._attend(heads, p, call, frame)
        merged = merge(attention.out.astype(frame.dtype, copy=False), self.merge)
        out = merged
        if self.wo is not None:
            out = frame.round_to_storage(linear(merged, p["wo"], p.get("bo")))
        return Steps(frame, p, x, normed, attention, merged, frame.to_output_dtype(out))

    def _attend(
        self, heads: dict[str, Array], p: dict[str, Array], call: Call, frame: Problem
    ) -> Forward:
        """Attention of the heads, with the keys that are added."""
        options: dict[str, Any] = {**call.options, "dtype": frame.storage or frame.dtype}
        q, k, v, mask = heads["query"], heads["key"], heads["value"], call.mask
        if self._added:
            k, v = self._extended(k, p.get("bias_k")), self._extended(v, p.get("bias_v"))
            conventions = options.get("conventions") or Conventions()
            plain = dataclasses.replace(conventions, hidden_fill=None, softcap="before_bias")
            visible = plain.canonical(frame).visible
            if visible is not None:
                mask = _with_columns(visible, frame.S, self._added, True)
                mask = ~mask if conventions.mask_true == "hide" else mask
            if frame.bias_array is not None:
                options["bias"] = _with_columns(frame.bias_array, frame.S, self._added, 0)
            options |= {"causal": False, "window": None}
        return api.forward(q, k, v, mask, **options)

    def _extended(self, x: Array, bias: Array | None) -> Array:
        """(..., K, S, n) with the key or value of bias_k or bias_v, and that of zeros."""
        *lead, K, _, n = x.shape
        more = [] if bias is None else [bias.reshape(K, 1, n)]
        more += [np.zeros((K, 1, n), x.dtype)] if self.add_zero_attn else []
        return np.concatenate([x, *(np.broadcast_to(m, (*lead, K, 1, n)) for m in more)], -2)

    @np.errstate(over="ignore", invalid="ignore")
    def _gradients(
        self, steps: Steps, call: Call, dout: Array, dlse: Any, dweights: Any
    ) -> MultiHeadGradients:
        """`_steps`, read upwards."""
        frame, p, S = steps.frame, steps.parameters, steps.frame.S
        found, do = self._from_out(steps, dout)
        grads = api.backward(steps.attention, do, dlse, dweights)
        dheads = {"query": grads.q, "key": grads.k, "value": grads.v}
        for name in ("key", "value") if self.bias_k is not None else ():
            bias = f"bias_{name[0]}"
            found[bias] = sum_to(
                dheads[name][..., S, :], (self._kv_heads, p[bias].size // self._kv_heads)
            ).reshape(-1)
        for name, dy in dheads.items():
            dy = dy.astype(frame.dtype, copy=False)
            dy = dy if name == "query" else dy[..., :S, :]
            if name in steps.normed and self.qk_norm is not None:
                w = p.get("norm_" + name[0])
                dy, dw, db = normalise_backward(dy, steps.normed[name], self.qk_norm, w)
                found |= {"norm_" + name[0]: dw, f"norm_{name[0]}_bias": db}
            rows = frame.round_to_storage(merge(dy, "concat"))
            dx, dw, db = linear_backward(rows, steps.inputs[name], p["w" + name[0]])
            found |= {name: dx, "w" + name[0]: dw, "b" + name[0]: db}
        for name, other in call.stands_for.items():
            if other != name:
                found[other] = found[other] + found.pop(name)
        if grads.bias is not None and frame.bias is not None:
            found["bias"] = frame.bias_gradient(grads.bias[..., :S]) if self._added else grads.bias
        found = {n: _returned(frame, x) for n, x in found.items() if self._has(n)}
        return MultiHeadGradients(**found, sinks=grads.sinks)

    def _from_out(self, steps: Steps, dout: Array) -> tuple[dict[str, Array], Array]:
        """Gradients of wo and bo, and of what the heads give."""
        frame, found = steps.frame, {}
        dmerged = frame.round_to_storage(dout.astype(frame.dtype, copy=False))
        if self.wo is not None:
            dmerged, dwo, dbo = linear_backward(dmerged, steps.merged, steps.parameters["wo"])
            found = {"wo": dwo, "bo": dbo}
        return found, merge_backward(frame.round_to_storage(dmerged), self.num_heads, self.merge)

    def _has(self, name: str) -> bool:
        """Whether there is an array that a gradient belongs to."""
        return name not in PARAMETERS or getattr(self, name) is not None


class Call(NamedTuple):
    """What forward was asked."""

    inputs: dict[str, Array]  # query, key, value
    stands_for: dict[str, str]  # key, value → the input that it is
    mask: Any
    options: dict[str, Any]


class Steps(NamedTuple):
    """What backward needs, and nothing that it can rebuild from these at little cost."""

    frame: Problem
    parameters: dict[str, Array]  # in the dtype computed in
    inputs: dict[str, Array]  # likewise
    normed: dict[str, Normed]  # of query and key
    attention: Forward
    merged: Array  # (..., T, H·E)
    out: Array  # (..., T, out)


@dataclass(frozen=True, eq=False)
class MultiHeadForward:
    """What `MultiHeadAttention.forward` gives.

    Attributes
    ----------
    out : array (..., T, out)
    lse : array (..., H, T)
    weights : array (..., H, T, S)
        Of each head, those of bias_k and add_zero_attn last; ``weights.mean(-3)`` is their average.
    attention : Forward
        The attention between the projections.
    module : MultiHeadAttention
    """

    out: Array
    lse: Array
    module: MultiHeadAttention
    call: Call = dataclasses.field(repr=False)
    kept: Steps | None = dataclasses.field(repr=False)

    @property
    def steps(self) -> Steps:
        """All on the way; computed again where it was not kept."""
        return self.module._steps(self.call) if self.kept is None else self.kept

    @property
    def attention(self) -> Forward:
        return self.steps.attention

    @property
    def weights(self) -> Array:
        return self.attention.weights


@dataclass(frozen=True, eq=False)
class MultiHeadGradients:
    """Gradients of one loss, each shaped as what it belongs to; None where there is none."""

    query: Array
    key: Array | None = None
    value: Array | None = None
    wq: Array | None = None
    wk: Array | None = None
    wv: Array | None = None
    wo: Array | None = None
    bq: Array | None = None
    bk: Array | None = None
    bv: Array | None = None
    bo: Array | None = None
    bias_k: Array | None = None
    bias_v: Array | None = None
    norm_q: Array | None = None
    norm_k: Array | None = None
    norm_q_bias: Array | None = None
    norm_k_bias: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None


# --- the parts ------------------------------------------------------------------------------------


def _returned(frame: Problem, x: Any) -> Any:
    """A gradient in the dtype that is returned, each term of that of a sum of biases."""
    if isinstance(x, tuple):
        return tuple(_returned(frame, term) for term in x)
    return frame.to_output_dtype(frame.round_to_storage(x))


def _with_columns(x: Array, S: int, count: int, fill: Any) -> Array:
    """x for S keys with `count` more of them."""
    x = np.broadcast_to(x, (*x.shape[:-1], S))
    return np.concatenate([x, np.full((*x.shape[:-1], count), fill, x.dtype)], -1)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            raise OptionError(
                f"{name} is no option of forward, must be one of {', '.join(OPTIONS)}"
            )
    check_conventions(options.get("conventions"))


def _alignment(options: Mapping[str, Any]) -> Any:
    conventions = options.get("conventions")
    return None if conventions is None else conventions.causal


def staying_heads(heads: Any, H: int, K: int) -> tuple[list[int], list[int]]:
    """The query heads and the key/value heads that stay without these query heads."""
    if not np.iterable(heads):
        raise OptionError(f"heads is {heads!r}, must be a sequence of indices")
    gone = {_head(h, H) for h in heads}
    stay = [h for h in range(H) if h not in gone]
    if not stay:
        raise OptionError(f"heads are all {H}, must leave one")
    groups = [[h for h in stay if h // (H // K) == g] for g in range(K)]
    sizes = {len(group) for group in groups if group}
    if len(sizes) > 1:
        raise OptionError(
            f"heads leave {[len(g) for g in groups]} query heads to the {K} key/value heads, "
            "must leave as many to each that stays: prune others too, or take .unshared() first"
        )
    return stay, [g for g, group in enumerate(groups) if group]


def _head(h: Any, H: int) -> int:
    whole = isinstance(h, numbers.Integral) and not isinstance(h, (bool, np.bool_))
    if not whole or not -H <= h < H:
        raise OptionError(f"heads hold {h!r}, must hold integers from {-H} to {H - 1}")
    return int(h) % H
