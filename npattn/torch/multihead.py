"""torch.nn.MultiheadAttention, with exact attention between its projections.

    q, k, v = query Wqᵀ + bq, key Wkᵀ + bk, value Wvᵀ + bv      as torch.nn.Linear
    q, k = rope(norm(q)), rope(norm(k))                         both optional
    o = attention(q, [k | bias_k | 0], [v | bias_v | 0])        (B, H, T, D), exact
    o ← sigmoid(query Wgᵀ + bg) · o                             with gate=True
    out = merge(o) Woᵀ + bo                                     as torch.nn.Linear

Parameters, arguments and results are those of torch.nn.MultiheadAttention; the differences:
docs/torch_multihead.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.functional import linear, pad

from npattn import multihead
from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.multihead.projections import NORMS, Norm
from npattn.multihead.summary import Description
from npattn.positions.attention import Rotary, check_rotary
from npattn.problem.checks import check_choice, check_integer, check_not_negative
from npattn.torch import multihead_build as build
from npattn.torch.api import forward as attend
from npattn.torch.flags import exact
from npattn.torch.multihead_inputs import ModuleInputs, read_inputs
from npattn.torch.positions import rope as turn_heads
from npattn.torch.problem import ENGINES
from npattn.torch.tensors import cast, to_host

Tensor = torch.Tensor
COMPUTE = (None, torch.float32, torch.float64)


class MultiHeadAttention(nn.Module):
    """Exact drop-in replacement of ``torch.nn.MultiheadAttention``.

    Arguments, parameters, ``state_dict``, initial weights for a seed, and results are the same.
    Projections run as in ``torch.nn.Linear``, under autocast too. Attention between them is
    computed in float64, if the device has it, and rounded once. A fully masked row gives 0, where
    torch gives NaN or 0.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, \
device, dtype
        As in ``torch.nn.MultiheadAttention``. The dropout mask is sampled with torch's generator of
        the device, but not as torch samples it.
    num_kv_heads : int, optional
        K, which divides num_heads; default num_heads. As in `npattn.MultiHeadAttention`.
    head_dim : int, optional
        D; default embed_dim / num_heads, which must then be an integer.
    value_head_dim : int, optional
        E, of the heads of values; default head_dim.
    out_dim : int, optional
        Size of the output; default embed_dim.
    merge : {"concat", "reshape"}
        "reshape" forgets to move the head axis back before it reshapes, as some code does.
    qk_norm : {"rms", "layer", "l2", "rms_projection", "layer_projection"}, optional
        Normalise queries and keys after the projections, in their dtype, as in
        `npattn.MultiHeadAttention`, with parameters norm_q and norm_k, and norm_q_bias and
        norm_k_bias where the mean is taken off.
    norm_eps : float, default 1e-6
        Added to the mean square under the root; of "l2" the least length that divides.
    norm_weight : {"shared", "head", "number"}
        Parameters of norms of heads: one row for all heads, or a row or a number for each.
    gate : bool, default False
        Multiply the heads of o by those of a sigmoid of a projection of query, gate_proj, which has
        the dtype of the projections.
    compute_dtype : torch.dtype, optional
        Attention is computed in it. Default float64, or float32 on a device without float64.
    engine : {"auto", "dense", "tiled", "fused"}
        As in `npattn.torch.attention`. "fused" calls PyTorch's kernels in the dtype of the
        projections, and refuses what they cannot do exactly, weights and dropout included.
    empty_row : {"zero", "nan", "mean"}
        Result of attention in a fully masked row.

    Raises
    ------
    OptionError
        If an argument of the constructor has an illegal value, or not with another argument.

    Examples
    --------
    >>> import torch, npattn.torch
    >>> mha = npattn.torch.MultiHeadAttention(8, 2, batch_first=True)
    >>> out, weights = mha(*[torch.ones(3, 5, 8)] * 3)
    >>> out.shape, weights.shape
    (torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))
    """

    # torch.nn.TransformerEncoderLayer reads it; if it is True, the layer computes attention itself
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
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
        add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None,
        vdim: int | None = None, batch_first: bool = False,
        device: torch.device | str | int | None = None, dtype: torch.dtype | None = None,
        *, num_kv_heads: int | None = None, head_dim: int | None = None,
        value_head_dim: int | None = None, out_dim: int | None = None,
        merge: Literal["concat", "reshape"] = "concat", qk_norm: Norm | None = None,
        norm_eps: float = 1e-6, norm_weight: build.NormWeight = "shared", gate: bool = False,
        compute_dtype: torch.dtype | None = None, engine: str = "auto",
        empty_row: Literal["zero", "nan", "mean"] = "zero",
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_dim = check_integer("embed_dim", embed_dim)
        self.num_heads = H = check_integer("num_heads", num_heads)
        self.num_kv_heads = K = check_integer(
            "num_kv_heads", H if num_kv_heads is None else num_kv_heads
        )
        if H % K:
            raise OptionError(f"num_kv_heads is {K}, which does not divide num_heads = {H}")
        if head_dim is None and embed_dim % H:
            raise OptionError(
                f"embed_dim is {embed_dim}, not a multiple of num_heads = {H}: pass head_dim"
            )
        self.head_dim = D = check_integer(
            "head_dim", embed_dim // H if head_dim is None else head_dim
        )
        self.value_head_dim = E = check_integer(
            "value_head_dim", D if value_head_dim is None else value_head_dim
        )
        self.out_dim = check_integer("out_dim", embed_dim if out_dim is None else out_dim)
        self.merge = check_choice("merge", merge, ("concat", "reshape"))
        self.qk_norm = None if qk_norm is None else check_choice("qk_norm", qk_norm, NORMS)
        self.norm_eps = check_not_negative("norm_eps", norm_eps)
        self.norm_weight = _check_norm_weight(norm_weight, qk_norm)
        self.kdim = check_integer("kdim", embed_dim if kdim is None else kdim)
        self.vdim = check_integer("vdim", embed_dim if vdim is None else vdim)
        self.dropout = _check_probability(dropout)
        self.batch_first, self.add_zero_attn = bool(batch_first), bool(add_zero_attn)
        self.compute_dtype, self.engine = _check_compute(compute_dtype, engine)
        self.empty_row: Literal["zero", "nan", "mean"] = empty_row
        Conventions(empty_row=empty_row)  # checks it

        def parameter(exists: bool, *shape: int) -> nn.Parameter | None:
            if not exists:
                return None
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        packed = self.kdim == self.vdim == embed_dim
        rows = (H * D, K * D, K * E)
        self.in_proj_weight = parameter(packed, sum(rows), embed_dim)
        widths = (embed_dim, self.kdim, self.vdim)
        for name, row_count, width in zip(build.SEPARATE, rows, widths, strict=True):
            self.register_parameter(name, parameter(not packed, row_count, width))
        self.in_proj_bias = parameter(bias, sum(rows))
        self.out_proj = nn.Linear(H * E, self.out_dim, bias=bias, device=device, dtype=dtype)
        self.bias_k = parameter(add_bias_kv, 1, 1, K * D)
        self.bias_v = parameter(add_bias_kv, 1, 1, K * E)
        for name, heads in zip(build.NORMS, (H, K), strict=True) if qk_norm else ():
            shape = build.norm_shape(self, heads)
            self.register_parameter(name, parameter(True, *shape))
            if self._takes_mean:
                self.register_parameter(f"{name}_bias", parameter(True, *shape))
        self._reset_parameters()
        self.gate_proj = None
        if gate:  # last, so that it changes no other weight of a seed
            self.gate_proj = nn.Linear(embed_dim, H * E, bias=bias, device=device, dtype=dtype)
            nn.init.xavier_uniform_(self.gate_proj.weight)
            if bias:
                nn.init.zeros_(self.gate_proj.bias)

    def _reset_parameters(self) -> None:
        """Sample the parameters in torch's order, so that a seed gives the same weights."""
        for name in ("in_proj_weight", *build.SEPARATE):
            weight = getattr(self, name)
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)
        for name in build.NORMS if self.qk_norm else ():
            nn.init.ones_(getattr(self, name))
        for name in build.NORM_BIASES if self._takes_mean else ():
            nn.init.zeros_(getattr(self, name))

    @property
    def _takes_mean(self) -> bool:
        return (self.qk_norm or "").startswith("layer")

    def extra_repr(self) -> str:
        """Return the sizes, and each option that differs from its default."""
        parts = [f"{self.embed_dim}, {self.num_heads}"]
        for name, default in (
            ("num_kv_heads", self.num_heads), ("kdim", self.embed_dim), ("vdim", self.embed_dim),
            ("dropout", 0.0), ("add_zero_attn", False), ("batch_first", False),
            ("compute_dtype", None), ("engine", "auto"), ("empty_row", "zero"),
            ("value_head_dim", self.head_dim), ("out_dim", self.embed_dim), ("merge", "concat"),
            ("qk_norm", None), ("norm_eps", 1e-6), ("norm_weight", "shared"),
        ):  # fmt: skip
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)!r}")
        parts += [] if self.gate_proj is None else ["gate=True"]
        if self.head_dim * self.num_heads != self.embed_dim:
            parts.append(f"head_dim={self.head_dim}")
        return ", ".join(parts)

    # --- forward ----------------------------------------------------------------------------------

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None,
        average_attn_weights: bool = True, is_causal: bool = False,
        *, rope: Rotary | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attention of query to key and value, as in ``torch.nn.MultiheadAttention``.

        Parameters
        ----------
        query, key, value : tensor
            (T, B, embed_dim), (S, B, kdim), (S, B, vdim); with batch_first (B, T, ...); or without
            a batch (T, embed_dim), ...
        key_padding_mask : tensor (B, S) or (S,), optional
            Bool: True hides, as everywhere in torch.nn. Floating: added to the scores.
        need_weights : bool, default True
            Return the weights too.
        attn_mask : tensor (T, S) or (B·H, T, S), optional
            Bool: True hides. Floating: added to the scores.
        average_attn_weights : bool, default True
            Average the weights over the heads.
        is_causal : bool, default False
            A hint that attn_mask, which is then required, is the causal mask. The mask counts; only
            "fused" uses the hint, where torch does.
        rope : npattn.positions.Rotary, optional
            Turn every head of queries and keys by its position, after the projections and norms,
            and round to their dtype. The keys of add_bias_kv and add_zero_attn have no position.

        Returns
        -------
        out : tensor, as query
        weights : tensor (B, T, S) or (B, H, T, S), or None
            After dropout; the keys of add_bias_kv and add_zero_attn are the last of S.

        Raises
        ------
        ShapeError
            If an input or a mask has a shape that does not fit the others.
        DtypeError
            If an input or a mask is no strided tensor, or a mask neither bool nor floating.
        OptionError
            If tensors are on different devices; if `is_causal` comes without `attn_mask`; if an
            option of `rope` has an illegal value; if "fused" cannot compute the call exactly.
        """
        inputs = {"query": query, "key": key, "value": value}
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        call = read_inputs(self, inputs, masks)
        if is_causal and attn_mask is None:
            raise OptionError(
                "is_causal=True is only a hint: pass the causal mask itself as attn_mask"
            )
        if need_weights and self.engine == "fused":
            raise OptionError(
                'need_weights is True with engine="fused", must be False: the kernels return none'
            )
        hinted = is_causal and self.engine == "fused" and key_padding_mask is None
        if hinted:
            call = call._replace(mask=None, bias=None)
        check_rotary(rope)
        q, k, v = self._project(call, rope)
        compute = _attend_in_no_graph if torch.compiler.is_compiling() else _attend
        out, weights = compute(self, q, k, v, self._gate(call), call, hinted, need_weights)
        if self.merge == "concat":
            out = out.transpose(-3, -2).flatten(-2)
        else:  # the heads of a query are torn apart
            out = out.reshape(out.shape[0], out.shape[2], -1)
        out = self.out_proj(out)  # (B, T, out_dim)
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        if not call.batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, call: ModuleInputs, rope: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, T, D), k (B, K, S, D) and v (B, K, S, E), extra keys included."""
        inputs = (call.query, call.key, call.value)
        rows = build.projection_rows(self)
        biases: Any = (None,) * 3
        if self.in_proj_bias is not None:
            biases = torch.split(self.in_proj_bias, rows)
        if self.in_proj_weight is not None:
            weights: Any = torch.split(self.in_proj_weight, rows)
        else:
            weights = [getattr(self, name) for name in build.SEPARATE]
        sizes = (self.head_dim, self.head_dim, self.value_head_dim)
        each = zip(inputs, weights, biases, sizes, strict=True)
        q, k, v = (_split(linear(x, w, b), size) for x, w, b, size in each)
        q, k = self._normalise(q, "norm_q"), self._normalise(k, "norm_k")
        if rope is not None:
            turn = _turn_in_no_graph if torch.compiler.is_compiling() else _turn
            of_queries, of_keys = rope.arguments(q.shape[1], k.shape[1])
            q, k = turn(q, of_queries), turn(k, of_keys)
        k, v = self._extend(k, self.bias_k), self._extend(v, self.bias_v)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _gate(self, call: ModuleInputs) -> Tensor | None:
        """Return the gate (B, H, T, E)."""
        if self.gate_proj is None:
            return None
        gate = torch.sigmoid(self.gate_proj(call.query))
        return _split(gate, self.value_head_dim).transpose(1, 2)

    def _normalise(self, x: Tensor, name: str) -> Tensor:
        """Normalise the heads of (B, S, K, D)."""
        if self.qk_norm is None:
            return x
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        rows = x.flatten(-2) if self.qk_norm.endswith("_projection") else x
        size = rows.shape[-1:]
        if self.qk_norm == "l2":
            unit = nn.functional.normalize(rows, dim=-1, eps=self.norm_eps)
            return torch.mul(unit, weight)
        # The functions of torch know one row of parameters; others are for each head.
        inside = weight.shape == size
        w, b = (weight, bias) if inside else (None, None)
        if self._takes_mean:
            y = nn.functional.layer_norm(rows, size, w, b, self.norm_eps)
        else:
            y = nn.functional.rms_norm(rows, size, w, self.norm_eps)
        if not inside:
            y = y * weight if bias is None else y * weight + bias
        return y.reshape(x.shape)

    def _extend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Append the key or value of bias_k or bias_v, and that of zeros, to (B, S, K, D)."""
        B, _, K, D = x.shape
        if bias is not None:
            x = torch.cat([x, bias.to(x.dtype).view(1, 1, K, D).expand(B, 1, K, D)], 1)
        if self.add_zero_attn:
            x = torch.cat([x, x.new_zeros(B, 1, K, D)], 1)
        return x

    # --- heads ------------------------------------------------------------------------------------

    def prune(self, heads: Sequence[int]) -> MultiHeadAttention:
        """Return a module without these query heads.

        It computes exactly what zeroing the outputs of those heads gives. A key/value head is
        removed with the last query head that uses it. The parameters are copies; a state_dict of
        the smaller module loads into ``MultiHeadAttention(embed_dim, num_heads - n,
        head_dim=head_dim)``.

        Parameters
        ----------
        heads : sequence of int
            Indices of query heads, negative ones from the end.

        Raises
        ------
        OptionError
            If no head would remain, groups that share a key/value head would keep different
            numbers of heads, or ``merge="reshape"`` mixes the heads.
        """
        return build.prune(MultiHeadAttention, self, heads)

    # --- in and out -------------------------------------------------------------------------------

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> MultiHeadAttention:
        """Make a module with copies of the parameters of a ``torch.nn.MultiheadAttention``.

        Its mode, training or evaluation, is the same too.

        Parameters
        ----------
        module : torch.nn.MultiheadAttention
        **options
            compute_dtype, engine and empty_row, as in `MultiHeadAttention`.

        Raises
        ------
        OptionError
            If `module` is something else, or a subclass with a forward of its own.
        """
        return build.from_torch(cls, module, options)

    def to_torch(self) -> nn.MultiheadAttention:
        """Return a ``torch.nn.MultiheadAttention`` with copies of the parameters, in the same mode.

        Raises
        ------
        OptionError
            If key/value heads are shared or normalised, the sizes of heads do not add up to
            embed_dim, as after `prune`, or heads of v, the output or the merge are others than
            torch's: it has no place for these.
        """
        return build.to_torch(self)

    @classmethod
    def from_numpy(
        cls, mha: multihead.MultiHeadAttention, *, batch_first: bool = True, **options: Any
    ) -> MultiHeadAttention:
        """Make a module with the bits of a `npattn.MultiHeadAttention`, on the CPU.

        Parameters
        ----------
        mha : npattn.MultiHeadAttention
        batch_first : bool, default True
            Take (B, T, embed_dim), as `mha` does.
        **options
            dropout, compute_dtype, engine and empty_row, as in `MultiHeadAttention`.

        Raises
        ------
        OptionError
            If this module has no place for a part of `mha`: no output projection, some biases
            without the others, a norm of one of q and k alone, several dtypes.
        """
        return build.from_numpy(cls, mha, batch_first, options)

    def to_numpy(self) -> multihead.MultiHeadAttention:
        """Return the `npattn.MultiHeadAttention` with the same bits in the same dtype."""
        return build.to_numpy(self)

    def describe(
        self, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None
    ) -> Description:
        """Summarise shapes and parameter counts; with inputs, the behaviour of each head too.

        Computed by `npattn.MultiHeadAttention.describe`, in float64 on the CPU, without dropout.

        Parameters
        ----------
        query, key, value : tensor, optional
            As in `forward`; without query, the steps alone; key and value are query by default.

        Returns
        -------
        Description
        """
        inputs = [None if x is None else to_host(x) for x in (query, key, value)]
        if not self.batch_first:
            inputs = [x if x is None or x.ndim < 3 else x.swapaxes(0, 1) for x in inputs]
        return self.to_numpy().describe(*inputs)


def _split(x: Tensor, size: int) -> Tensor:
    """(B, S, K·D) → (B, S, K, D)."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _turn(x: Tensor, options: dict[str, Any]) -> Tensor:
    """Turn the heads of (B, S, K, D) by their positions, and round to the dtype of x."""
    return cast(turn_heads(x.transpose(1, 2), **options), x.dtype).transpose(1, 2)


# --- attention between the projections ------------------------------------------------------------


def _attend(
    module: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None,
    call: ModuleInputs, causal: bool, need_weights: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return o (B, H, T, D) and, if needed, weights (B, H, T, S), in the dtype of q."""
    extra = int(module.bias_k is not None) + int(module.add_zero_attn)
    mask, bias = call.mask, call.bias
    if extra:
        mask = None if mask is None else pad(mask, (0, extra), value=True)
        bias = None if bias is None else pad(bias, (0, extra))
    fwd: Any = attend(
        q, k, v, mask, causal="top_left" if causal else False, bias=bias, gate=gate,
        dtype=module.compute_dtype, engine=module.engine,
        conventions=Conventions(empty_row=module.empty_row, weights="after_dropout"),
        **_sample_dropout(module, (*q.shape[:3], k.shape[2]), q.device),
    )  # fmt: skip
    weights = cast(_weights(fwd), q.dtype) if need_weights else None
    return cast(fwd.out, q.dtype), weights


# Dynamo must not trace it: NumPy checks the shapes. Not torch.compiler.disable: it loads dynamo at
# once, which takes as long as loading torch.
_attend_in_no_graph = _disable_dynamo(_attend)
_turn_in_no_graph = _disable_dynamo(_turn)


def _sample_dropout(
    module: MultiHeadAttention, shape: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    """Sample the dropout options of training with the generator of the device."""
    if not module.training or module.dropout == 0:
        return {}
    keep = torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - module.dropout)
    # With every weight dropped, nothing is left to divide.
    return {"dropout_mask": keep, "dropout_rate": module.dropout if module.dropout < 1 else 0.0}


def _weights(fwd: Any) -> Tensor:
    """Return the weights of a forward pass, differentiable as exp(s − lse)."""
    p = fwd.problem
    if not fwd.lse.requires_grad:
        return fwd.weights  # type: ignore[no-any-return]
    q, k = p.to_compute_dtype(p.q), p.to_compute_dtype(p.k).repeat_interleave(p.H // p.K, -3)
    with exact(p.dtype, p.device):
        s = p.scale * (q @ k.mT)
    s = s if p.bias is None else s + p.to_compute_dtype(p.bias)
    hidden = s == -torch.inf if p.mask is None else ~p.mask | (s == -torch.inf)
    empty = (fwd.lse == -torch.inf)[..., None]
    # Avoid −inf − −inf and gradients of hidden scores: both would be NaN.
    s = s.masked_fill(hidden, 0) - fwd.lse.masked_fill(empty[..., 0], 0)[..., None]
    w = s.exp().masked_fill(hidden, 0)
    if p.dropout_mask is not None:
        w = w * (p.to_compute_dtype(p.dropout_mask) / (1 - p.dropout_rate))
    # Fully masked rows are as the conventions say, without a gradient.
    return torch.where(empty, fwd.weights, w)


def _check_norm_weight(value: Any, norm: str | None) -> build.NormWeight:
    check_choice("norm_weight", value, get_args(build.NormWeight))
    if value != "shared" and (norm is None or norm.endswith("_projection")):
        raise OptionError(
            f"norm_weight is {value!r} with qk_norm {norm!r}, must be 'shared': it is for norms of "
            "heads"
        )
    return value  # type: ignore[no-any-return]


def _check_probability(dropout: Any) -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise OptionError(f"dropout is {dropout!r}, must be a number from 0 to 1")
    return float(dropout)


def _check_compute(dtype: Any, engine: Any) -> tuple[torch.dtype | None, str]:
    if dtype not in COMPUTE:
        raise OptionError(f"compute_dtype is {dtype!r}, must be one of {COMPUTE}")
    check_choice("engine", engine, ENGINES)
    if engine == "fused" and dtype is not None:
        raise OptionError(
            f'compute_dtype is {dtype} with engine="fused", must be None: the kernels compute in '
            "the dtype of the projections"
        )
    return dtype, engine
