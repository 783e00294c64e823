"""torch.nn.MultiheadAttention, with exact attention between its projections.

    q, k, v = query Wqᵀ + bq, key Wkᵀ + bk, value Wvᵀ + bv      as torch.nn.Linear
    o = attention(q, [k | bias_k | 0], [v | bias_v | 0])        (B, H, T, D), exact
    out = merge(o) Woᵀ + bo                                     as torch.nn.Linear

Parameters, arguments and results are those of torch.nn.MultiheadAttention; what differs is said in
docs/torch_multihead.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.functional import linear, pad

from npattn import multihead
from npattn.checks import check_integer
from npattn.conventions import Conventions
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.multihead_build import remaining_heads
from npattn.torch.api import forward as attend
from npattn.torch.flags import exact
from npattn.torch.problem import ENGINES
from npattn.weights.reading import check_kind, optional, read, transposed
from npattn.weights.torch import tensor_of

__all__ = ["MultiHeadAttention"]

Tensor = torch.Tensor
Module = TypeVar("Module", bound=nn.Module)

COMPUTE = (None, torch.float32, torch.float64)
PACKED = ("in_proj_weight",)
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class MultiHeadAttention(nn.Module):
    """``torch.nn.MultiheadAttention``, exact and as a drop-in: the same arguments, parameters,
    ``state_dict``, initial weights for a seed, and results.

    Projections run as ``torch.nn.Linear`` does, under autocast too. Attention between them is
    computed in float64, where the device has it, and rounded once. A query that sees nothing gives
    0, where torch gives NaN or 0.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, \
device, dtype
        As in ``torch.nn.MultiheadAttention``. The mask of dropout is drawn with torch's generator
        of the device, though not as torch draws it.
    num_kv_heads : int, optional
        K, which divides num_heads; default num_heads. As in `npattn.MultiHeadAttention`.
    head_dim : int, optional
        D; default embed_dim / num_heads, which then must be whole.
    compute_dtype : torch.dtype, optional
        What attention is computed in; float64 unless said, float32 where the device has none.
    engine : {"auto", "dense", "tiled", "fused"}
        As in `npattn.torch.attention`. "fused" hands attention to PyTorch's kernels in the dtype of
        the projections, and refuses what they cannot do exactly: weights and dropout among it.
    empty_row : {"zero", "nan", "mean"}
        What attention gives for a query that sees nothing.

    Raises
    ------
    OptionError
        When made: naming the argument, what it is and what it must be.

    Examples
    --------
    >>> import torch, npattn.torch
    >>> mha = npattn.torch.MultiHeadAttention(8, 2, batch_first=True)
    >>> out, weights = mha(*[torch.ones(3, 5, 8)] * 3)
    >>> out.shape, weights.shape
    (torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))
    """

    # torch.nn.TransformerEncoderLayer asks for it, and where it is True computes attention itself
    # from these parameters, without calling this module.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        compute_dtype: torch.dtype | None = None,
        engine: str = "auto",
        empty_row: Literal["zero", "nan", "mean"] = "zero",
    ) -> None:
        super().__init__()
        self.embed_dim = check_integer("embed_dim", embed_dim)
        self.num_heads = H = check_integer("num_heads", num_heads)
        self.num_kv_heads = K = check_integer(
            "num_kv_heads", H if num_kv_heads is None else num_kv_heads
        )
        if H % K:
            raise OptionError(f"num_kv_heads is {K}, must divide the {H} query heads")
        if head_dim is None and embed_dim % H:
            raise OptionError(
                f"embed_dim is {embed_dim}, must be a multiple of {H}, or give head_dim"
            )
        self.head_dim = D = check_integer(
            "head_dim", embed_dim // H if head_dim is None else head_dim
        )
        self.kdim = check_integer("kdim", embed_dim if kdim is None else kdim)
        self.vdim = check_integer("vdim", embed_dim if vdim is None else vdim)
        self.dropout = _probability(dropout)
        self.batch_first, self.add_zero_attn = bool(batch_first), bool(add_zero_attn)
        self.compute_dtype, self.engine = _computed_by(compute_dtype, engine)
        self.empty_row: Literal["zero", "nan", "mean"] = empty_row
        Conventions(empty_row=empty_row)  # which checks it

        def parameter(there: bool, *shape: int) -> nn.Parameter | None:
            if not there:
                return None
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        packed = self.kdim == self.vdim == embed_dim
        rows = (H * D, K * D, K * D)
        self.in_proj_weight = parameter(packed, sum(rows), embed_dim)
        widths = (embed_dim, self.kdim, self.vdim)
        for name, own, width in zip(SEPARATE, rows, widths, strict=True):
            self.register_parameter(name, parameter(not packed, own, width))
        self.in_proj_bias = parameter(bias, sum(rows))
        self.out_proj = nn.Linear(H * D, embed_dim, bias=bias, device=device, dtype=dtype)
        self.bias_k = parameter(add_bias_kv, 1, 1, K * D)
        self.bias_v = parameter(add_bias_kv, 1, 1, K * D)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """In torch's order, so that a seed gives the weights that it gives there."""
        for name in (*PACKED, *SEPARATE):
            weight = getattr(self, name)
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def extra_repr(self) -> str:
        words = [f"{self.embed_dim}, {self.num_heads}"]
        for name, default in (
            ("num_kv_heads", self.num_heads), ("kdim", self.embed_dim), ("vdim", self.embed_dim),
            ("dropout", 0.0), ("add_zero_attn", False), ("batch_first", False),
            ("compute_dtype", None), ("engine", "auto"), ("empty_row", "zero"),
        ):  # fmt: skip
            if getattr(self, name) != default:
                words.append(f"{name}={getattr(self, name)!r}")
        if self.head_dim * self.num_heads != self.embed_dim:
            words.append(f"head_dim={self.head_dim}")
        return ", ".join(words)

    # --- forward ----------------------------------------------------------------------------------

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As that of ``torch.nn.MultiheadAttention``.

        Parameters
        ----------
        query, key, value : tensor
            (T, B, embed_dim), (S, B, kdim), (S, B, vdim); with batch_first (B, T, ...); or without
            a batch (T, embed_dim), ...
        key_padding_mask : tensor (B, S) or (S,), optional
            Bool: True hides, as everywhere in torch.nn. Floating: added to the scores.
        need_weights : bool, default True
            Whether weights are returned.
        attn_mask : tensor (T, S) or (B·H, T, S), optional
            Bool: True hides. Floating: added to the scores.
        average_attn_weights : bool, default True
            Whether the weights are averaged over the heads.
        is_causal : bool, default False
            Says that attn_mask, which must be given, is the causal one. The mask counts; only
            "fused" goes by the hint, where torch does.

        Returns
        -------
        out : tensor, as query
        weights : tensor (B, T, S) or (B, H, T, S), or None
            After dropout; the keys of add_bias_kv and add_zero_attn are the last of S.

        Raises
        ------
        ShapeError, DtypeError, OptionError
        """
        call = self._checked(query, key, value, key_padding_mask, attn_mask)
        if is_causal and attn_mask is None:
            raise OptionError(
                "is_causal is True without attn_mask, must come with it: it is a hint"
            )
        if need_weights and self.engine == "fused":
            raise OptionError(
                'need_weights is True with engine="fused", must be False: the kernels give none'
            )
        hinted = is_causal and self.engine == "fused" and key_padding_mask is None
        if hinted:
            call = call._replace(mask=None, bias=None)
        q, k, v = self._projected(call)
        attended = _in_no_graph if torch.compiler.is_compiling() else MultiHeadAttention._attended
        out, weights = attended(self, q, k, v, call, hinted, need_weights)
        out = self.out_proj(out.transpose(-3, -2).flatten(-2))  # (B, T, embed_dim)
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        if not call.batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _checked(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> Call:
        """What was given, batch first, masks as npattn means them."""
        given = {"query": query, "key": key, "value": value}
        for name, x in given.items():
            if not isinstance(x, Tensor) or x.is_nested:
                kind = "nested" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise DtypeError(f"{name} is {kind}, must be a strided tensor")
        for name, hides in (("key_padding_mask", padding), ("attn_mask", mask)):
            if hides is not None and not isinstance(hides, Tensor):
                raise DtypeError(
                    f"{name} is a {type(hides).__name__}, must be a tensor: npattn.torch.attention "
                    "takes objects of npattn.masks"
                )
            if hides is not None and hides.device != query.device:
                raise OptionError(
                    f"{name} is on {hides.device}, must be on {query.device} as query"
                )
        batched, ranks = query.ndim == 3, {x.ndim for x in given.values()}
        widths = (self.embed_dim, self.kdim, self.vdim)
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
        if len(ranks) > 1 or query.ndim not in (2, 3):
            raise ShapeError(f"query has rank {query.ndim}, must have 2 or 3 as all [{shapes}]")
        for (name, x), width in zip(given.items(), widths, strict=True):
            if x.shape[-1] != width:
                raise ShapeError(f"{name} has size {x.shape[-1]}, must have {width} [{shapes}]")
        if not batched:
            given = {name: x[None] for name, x in given.items()}
        elif not self.batch_first:
            given = {name: x.transpose(0, 1) for name, x in given.items()}
        query, key, value = given.values()
        B, T, S = *query.shape[:2], key.shape[1]
        if key.shape[:2] != (B, S) or value.shape[:2] != (B, S):
            raise ShapeError(f"key and value must be of {B} samples and as long [{shapes}]")
        H = self.num_heads
        padding = _shaped("key_padding_mask", padding, {(B, S) if batched else (S,): (B, 1, 1, S)})
        mask = _shaped("attn_mask", mask, {(T, S): (1, 1, T, S), (B * H, T, S): (B, H, T, S)})
        visible, bias = _merged(padding, mask, self._summed_in(query))
        return Call(query, key, value, visible, bias, batched)

    def _summed_in(self, query: Tensor) -> torch.dtype:
        """The dtype that two masks are added in."""
        if self.engine == "fused":
            return query.dtype
        if self.compute_dtype in (torch.float32, torch.float64):
            return self.compute_dtype
        return torch.float64 if query.device.type != "mps" else torch.float32

    def _projected(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D), k and v (B, K, S, D) with the keys that are added."""
        inputs = (call.query, call.key, call.value)
        rows = self._rows
        biases: Any = (None,) * 3
        if self.in_proj_bias is not None:
            biases = torch.split(self.in_proj_bias, rows)
        if self.in_proj_weight is not None:
            weights: Any = torch.split(self.in_proj_weight, rows)
        else:
            weights = [getattr(self, name) for name in SEPARATE]
        parts = zip(inputs, weights, biases, strict=True)
        q, k, v = (self._split(linear(x, w, b)) for x, w, b in parts)
        k, v = self._extended(k, self.bias_k), self._extended(v, self.bias_v)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @property
    def _rows(self) -> list[int]:
        """How many rows of in_proj_weight belong to queries, keys and values."""
        return [heads * self.head_dim for heads in (self.num_heads, *[self.num_kv_heads] * 2)]

    def _split(self, x: Tensor) -> Tensor:
        """(B, S, K·D) → (B, S, K, D)."""
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)

    def _extended(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(B, S, K, D) with the key or value of bias_k or bias_v, and that of zeros."""
        B, _, K, D = x.shape
        if bias is not None:
            x = torch.cat([x, bias.to(x.dtype).view(1, 1, K, D).expand(B, 1, K, D)], 1)
        if self.add_zero_attn:
            x = torch.cat([x, x.new_zeros(B, 1, K, D)], 1)
        return x

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """o (B, H, T, D) and, where needed, weights (B, H, T, S), in the dtype of q."""
        added = int(self.bias_k is not None) + int(self.add_zero_attn)
        mask, bias = call.mask, call.bias
        if added:
            mask = None if mask is None else pad(mask, (0, added), value=True)
            bias = None if bias is None else pad(bias, (0, added))
        fwd: Any = attend(
            q,
            k,
            v,
            mask,
            causal="top_left" if causal else False,
            bias=bias,
            dtype=self.compute_dtype,
            engine=self.engine,
            conventions=Conventions(empty_row=self.empty_row, weights="after_dropout"),
            **self._dropped((*q.shape[:3], k.shape[2]), q.device),
        )
        weights = _weights(fwd).to(q.dtype) if need_weights else None
        return fwd.out.to(q.dtype), weights

    def _dropped(self, shape: tuple[int, ...], device: torch.device) -> dict[str, Any]:
        """What is dropped in training, drawn with the generator of the device."""
        if not self.training or self.dropout == 0:
            return {}
        keep = torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - self.dropout)
        # Nothing is left to divide where all is dropped.
        return {"dropout_mask": keep, "dropout_rate": self.dropout if self.dropout < 1 else 0.0}

    # --- heads ------------------------------------------------------------------------------------

    def prune(self, heads: Sequence[int]) -> MultiHeadAttention:
        """A module without these query heads: exactly what zeroing their outputs gives.

        A key/value head goes with the last query head that uses it. The parameters are copies; a
        state_dict of the smaller module loads into
        ``MultiHeadAttention(embed_dim, num_heads - n, head_dim=head_dim)``.

        Parameters
        ----------
        heads : sequence of int
            Indices of query heads, negative ones from the end.

        Raises
        ------
        OptionError
            If none would stay, or as many would not stay of each group that shares a key/value
            head.
        """
        stay, kv = remaining_heads(heads, self.num_heads, self.num_kv_heads)

        def of_heads(x: Tensor, chosen: Sequence[int], axis: int) -> Tensor:
            parted = self._split(x.movedim(axis, -1))[..., list(chosen), :]
            return parted.flatten(-2).movedim(-1, axis).contiguous()

        def of_all(x: Tensor) -> Tensor:
            pairs = zip(torch.split(x, self._rows), (stay, kv, kv), strict=True)
            return torch.cat([of_heads(part, chosen, 0) for part, chosen in pairs])

        state: dict[str, Tensor] = {}
        for name, x in self.state_dict().items():
            if name.startswith("in_proj"):
                state[name] = of_all(x)
            elif name == "out_proj.weight":
                state[name] = of_heads(x, stay, 1)
            elif name == "out_proj.bias":
                state[name] = x
            else:
                chosen = stay if name == "q_proj_weight" else kv
                state[name] = of_heads(x, chosen, 2 if name in ("bias_k", "bias_v") else 0)
        other = self._like(num_heads=len(stay), num_kv_heads=len(kv))
        return _filled(other, state, self)

    def _like(self, **changes: Any) -> MultiHeadAttention:
        """Another one of the same options, with parameters on the meta device: nothing is drawn."""
        names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim",
                 "batch_first", "num_kv_heads", "head_dim", "compute_dtype", "engine",
                 "empty_row")  # fmt: skip
        options = {name: getattr(self, name) for name in names} | changes
        options |= {"bias": self.in_proj_bias is not None, "add_bias_kv": self.bias_k is not None}
        return MultiHeadAttention(**options, device="meta")

    # --- in and out -------------------------------------------------------------------------------

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> MultiHeadAttention:
        """Of a ``torch.nn.MultiheadAttention``: copies of its parameters, and its mode.

        Parameters
        ----------
        module : torch.nn.MultiheadAttention
        **options
            compute_dtype, engine and empty_row, as in `MultiHeadAttention`.

        Raises
        ------
        OptionError
            If it is something else, or a subclass with a forward of its own.
        """
        parent = nn.MultiheadAttention
        check_kind("module", module, {"torch.nn.MultiheadAttention": parent}, ("forward",))
        names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim",
                 "batch_first")  # fmt: skip
        same = {name: getattr(module, name) for name in names}
        there: dict[str, Any] = {
            "bias": module.in_proj_bias is not None,
            "add_bias_kv": module.bias_k is not None,
        }
        made = cls(**same, **there, device="meta", **options)
        return _filled(made, module.state_dict(), module)

    def to_torch(self) -> nn.MultiheadAttention:
        """A ``torch.nn.MultiheadAttention`` with copies of these parameters, in the same mode.

        Raises
        ------
        OptionError
            If it has what torch has no place for: shared key/value heads, or heads whose sizes do
            not add up to embed_dim, as after `prune`.
        """
        if self.num_kv_heads != self.num_heads:
            raise OptionError(
                f"num_kv_heads is {self.num_kv_heads}, must be {self.num_heads} as num_heads: "
                "torch.nn.MultiheadAttention shares none"
            )
        if self.head_dim * self.num_heads != self.embed_dim:
            raise OptionError(
                f"{self.num_heads} heads have size {self.head_dim}, must add up to embed_dim "
                f"{self.embed_dim}: torch.nn.MultiheadAttention has no others"
            )
        module = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            self.dropout,
            bias=self.in_proj_bias is not None,
            add_bias_kv=self.bias_k is not None,
            add_zero_attn=self.add_zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            device="meta",
        )
        return _filled(module, self.state_dict(), self)

    @classmethod
    def from_numpy(
        cls, mha: multihead.MultiHeadAttention, *, batch_first: bool = True, **options: Any
    ) -> MultiHeadAttention:
        """Of a `npattn.MultiHeadAttention`: the same bits in the same dtype, on the CPU.

        Parameters
        ----------
        mha : npattn.MultiHeadAttention
        batch_first : bool, default True
            Whether it takes (B, T, embed_dim), as `mha`.
        **options
            dropout, compute_dtype, engine and empty_row, as in `MultiHeadAttention`.

        Raises
        ------
        OptionError
            Says what this module has no place for: values of another size than keys, another
            output size than embed_dim, no output projection, some biases without the others,
            ``merge="reshape"``, qk_norm, several dtypes.
        """
        _check_fits(mha)
        p, embed = mha.parameters, mha.wq.shape[0]
        made = cls(
            embed,
            mha.num_heads,
            bias="bo" in p,
            add_bias_kv="bias_k" in p,
            add_zero_attn=bool(mha.add_zero_attn),
            kdim=mha.wk.shape[0],
            vdim=mha.wv.shape[0],
            batch_first=batch_first,
            device="meta",
            num_kv_heads=mha.num_kv_heads,
            head_dim=mha.head_size,
            **options,
        )
        tensors = {name: tensor_of(array) for name, array in p.items()}
        weights = [tensors[name].T for name in ("wq", "wk", "wv")]
        state = {"out_proj.weight": tensors["wo"].T.contiguous()}
        if made.in_proj_weight is not None:
            state["in_proj_weight"] = torch.cat(weights)
        else:
            state |= {n: w.contiguous() for n, w in zip(SEPARATE, weights, strict=True)}
        if "bo" in p:
            state["in_proj_bias"] = torch.cat([tensors[name] for name in ("bq", "bk", "bv")])
            state["out_proj.bias"] = tensors["bo"]
        state |= {n: tensors[n].view(1, 1, -1) for n in ("bias_k", "bias_v") if n in p}
        made.load_state_dict(state, assign=True)
        return made

    def to_numpy(self) -> multihead.MultiHeadAttention:
        """The `npattn.MultiHeadAttention` with the same bits in the same dtype."""
        if self.in_proj_weight is not None:
            weights = [
                read("in_proj_weight", w) for w in torch.split(self.in_proj_weight, self._rows)
            ]
        else:
            weights = [read(name, getattr(self, name)) for name in SEPARATE]
        given: dict[str, Any] = dict(zip(("wq", "wk", "wv"), map(transposed, weights), strict=True))
        given["wo"] = transposed(read("out_proj.weight", self.out_proj.weight))
        given["bo"] = optional("out_proj.bias", self.out_proj.bias)
        if self.in_proj_bias is not None:
            biases = [read("in_proj_bias", b) for b in torch.split(self.in_proj_bias, self._rows)]
            given |= dict(zip(("bq", "bk", "bv"), biases, strict=True))
        for name in ("bias_k", "bias_v"):
            extra = optional(name, getattr(self, name))
            given[name] = None if extra is None else extra.reshape(-1)
        return multihead.MultiHeadAttention(
            **given,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            add_zero_attn=self.add_zero_attn,
        )


# Dynamo must not look inside: what judges shapes is NumPy. torch.compiler.disable says so too, and
# loads dynamo at once, which takes as long as torch itself.
_in_no_graph = _disable_dynamo(MultiHeadAttention._attended)


class Call(NamedTuple):
    """What forward was asked: (B, T, embed_dim), (B, S, kdim), (B, S, vdim), and what hides."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None  # True = may attend
    bias: Tensor | None
    batched: bool


# --- the parts ------------------------------------------------------------------------------------


def _shaped(
    name: str, mask: Tensor | None, shapes: dict[tuple[int, ...], tuple[int, ...]]
) -> Tensor | None:
    """A mask as it broadcasts against (B, H, T, S)."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DtypeError(f"{name} is {mask.dtype}, must be bool (True hides) or floating (added)")
    if tuple(mask.shape) not in shapes:
        must = " or ".join(map(str, shapes))
        raise ShapeError(f"{name} has shape {tuple(mask.shape)}, must have {must}")
    return mask.reshape(shapes[tuple(mask.shape)])


def _merged(
    padding: Tensor | None, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """What both leave to see, and what both add."""
    given = [x for x in (padding, mask) if x is not None]
    visible = [~x for x in given if x.dtype == torch.bool]
    added = [x for x in given if x.dtype != torch.bool]
    both = visible[0] & visible[1] if len(visible) == 2 else None
    total = added[0].to(dtype) + added[1].to(dtype) if len(added) == 2 else None
    return (
        both if both is not None else next(iter(visible), None),
        total if total is not None else next(iter(added), None),
    )


def _weights(fwd: Any) -> Tensor:
    """The weights of a forward, with their gradient: exp(s − lse), of which both have one."""
    p = fwd.problem
    if not fwd.lse.requires_grad:
        found: Tensor = fwd.weights
        return found
    q, k = p.to_compute_dtype(p.q), p.to_compute_dtype(p.k).repeat_interleave(p.H // p.K, -3)
    with exact(p.dtype, p.device):
        s = p.scale * (q @ k.mT)
    s = s if p.bias is None else s + p.to_compute_dtype(p.bias)
    hidden = s == -torch.inf if p.mask is None else ~p.mask | (s == -torch.inf)
    empty = (fwd.lse == -torch.inf)[..., None]
    # Neither −inf − −inf nor a gradient of what is hidden: both would be NaN.
    s = s.masked_fill(hidden, 0) - fwd.lse.masked_fill(empty[..., 0], 0)[..., None]
    w = s.exp().masked_fill(hidden, 0)
    if p.dropout_mask is not None:
        w = w * (p.to_compute_dtype(p.dropout_mask) / (1 - p.dropout_rate))
    # What the conventions put where nothing is seen, and no gradient is passed.
    return torch.where(empty, fwd.weights, w)


def _probability(dropout: Any) -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise OptionError(f"dropout is {dropout!r}, must be a number from 0 to 1")
    return float(dropout)


def _computed_by(dtype: Any, engine: Any) -> tuple[torch.dtype | None, str]:
    if dtype not in COMPUTE:
        raise OptionError(f"compute_dtype is {dtype!r}, must be one of {COMPUTE}")
    if not isinstance(engine, str) or engine not in ENGINES:
        raise OptionError(f"engine is {engine!r}, must be one of {', '.join(ENGINES)}")
    if engine == "fused" and dtype is not None:
        raise OptionError(
            f'compute_dtype is {dtype} with engine="fused", must be None: the kernels compute in '
            "what the projections give"
        )
    return dtype, engine


def _filled(module: Module, state: Mapping[str, Tensor], like: nn.Module) -> Module:
    """A module of the meta device with copies of these tensors, in the mode of another module."""
    copies = {name: x.detach().clone() for name, x in state.items()}
    module.load_state_dict(copies, assign=True)
    wanted = dict(like.named_parameters())
    for name, x in module.named_parameters():
        x.requires_grad_(wanted[name].requires_grad)
    return module.train(like.training)


def _check_fits(mha: multihead.MultiHeadAttention) -> None:
    embed, dtypes = mha.wq.shape[0], {n: x.dtype for n, x in mha.parameters.items()}
    biases = [getattr(mha, name) is None for name in ("bq", "bk", "bv", "bo")]
    wrong = None
    if mha.wo is None:
        wrong = "wo is None, must be given: this module always projects the heads"
    elif mha.merge != "concat":
        wrong = f'merge is {mha.merge!r}, must be "concat"'
    elif mha.qk_norm is not None:
        wrong = f"qk_norm is {mha.qk_norm!r}, must be None: this module does not normalise heads"
    elif mha.value_size != mha.head_size:
        wrong = f"heads of v have size {mha.value_size}, must have that of q, {mha.head_size}"
    elif mha.wo.shape[1] != embed:
        wrong = f"wo has shape {mha.wo.shape}, must have {embed} columns, as queries have"
    elif len(set(biases)) > 1:
        wrong = "bq, bk, bv, bo are given in part, must be all or none: a missing one can be zeros"
    elif len(set(dtypes.values())) > 1:
        name = next(name for name, dtype in dtypes.items() if dtype != dtypes["wq"])
        wrong = f"{name} is {dtypes[name]}, must be {dtypes['wq']} as wq"
    if wrong:
        raise OptionError(f"{wrong} [from_numpy of {mha!r}]")
