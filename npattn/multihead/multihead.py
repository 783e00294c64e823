"""Multi-head attention with its projections, forward and backward.

    B batch   H query heads   K key/value heads   T queries   S keys
    D query/key size of a head   E value size of a head

    q = rope(norm(query Wq + bq))   k = rope(norm(key Wk + bk))   v = value Wv + bv
    o = attention(q, [k | bias_k | 0], [v | bias_v | 0])                     (..., H, T, E)
    o ← sigmoid(query Wg + bg) · o                                           (where there is a Wg)
    out = merge(o) Wo + bo                                                   (..., T, out)

Heads are split off before norm and rope, which are optional. Weights multiply from the right. The
keys of ``bias_k`` and ``add_zero_attn`` come last and are seen by every query. Source: Vaswani et
al. 2017, section 3.2.2; gradients: docs/derivations/multihead.md. Gate: Qiu et al. 2025, "Gated
attention for large language models"; use_gate of Keras.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npattn.conventions import Conventions, check_conventions
from npattn.errors import OptionError, ShapeError
from npattn.multihead.build import PARAMETERS, MultiHeadParameters
from npattn.multihead.projections import (
    NormResiduals,
    linear,
    linear_backward,
    merge,
    merge_backward,
    normalise,
    normalise_backward,
    sigmoid,
    sigmoid_backward,
    split,
)
from npattn.multihead.summary import Description, describe
from npattn.oracle import api
from npattn.positions.attention import Rotary, check_rotary
from npattn.positions.rotary import Turn, make_turn, turn_array
from npattn.problem import Forward, Problem
from npattn.problem.arrays import Array, MaskLike, sum_to
from npattn.problem.checks import check_choice, check_cotangent, read_floating
from npattn.problem.foreign import reject_options, reject_unknown_options
from npattn.problem.options import FEATURES

OPTIONS = (*(name for name in FEATURES if name != "mask"), "dtype", "engine", "conventions")


@dataclass(frozen=True, eq=False, repr=False)
class MultiHeadAttention(MultiHeadParameters):
    """Multi-head attention: projections, heads, attention, output projection.

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
        One more key and its value, appended after the projections; both or neither.
    add_zero_attn : bool, default False
        Append one more key and value of zeros.
    merge : {"concat", "reshape"}
        "reshape" forgets to move the head axis back before it reshapes, as some code does.
    qk_norm : {"rms", "layer", "l2", "rms_projection", "layer_projection"}, optional
        Normalise queries and keys after the projections, before rotary positions: each head to mean
        square 1, to mean 0 and variance 1, or to length 1; or all heads of a position together.
    norm_q, norm_k, norm_q_bias, norm_k_bias : float array, optional
        Factors and terms that the result is multiplied by and added to: (D,), or one row (H, D), or
        number (H, 1), for each head (K for keys); (H·D,) and (K·D,) of whole projections.
    norm_eps : float, default 1e-6
        Added to the mean square under the root; of "l2" the least length that divides.
    wg, bg : float array (in_q, H·E), (H·E,), optional
        Gate: the heads of sigmoid(query wg + bg) multiply those of o, before wo.

    Raises
    ------
    ShapeError
        If the shape of a parameter does not fit the others and the numbers of heads.
    DtypeError
        If a parameter is not floating.
    OptionError
        If num_heads or num_kv_heads is no integer ≥ 1, num_kv_heads does not divide num_heads,
        another option has an illegal value, or a parameter lacks the one that it belongs to.

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

    # --- forward and backward ---------------------------------------------------------------------

    def forward(
        self, query: ArrayLike, key: ArrayLike | None = None, value: ArrayLike | None = None,
        mask: ArrayLike | MaskLike | None = None,
        *, rope: Rotary | None = None, keep: Literal["all", "inputs"] = "all", **options: Any,
    ) -> MultiHeadForward:  # fmt: skip
        """Project, attend, merge, project.

        Parameters
        ----------
        query : float array (..., T, in_q)
        key : float array (..., S, in_k), optional
            None: query.
        value : float array (..., S, in_v), optional
            None: key.
        mask : bool array or one of `npattn.masks`, optional
            True = may attend; broadcasts against (..., H, T, S). A (B, S) padding mask is
            ``mask[:, None, None, :]``.
        rope : npattn.positions.Rotary, optional
            Turn every head of queries and keys by its position, after the projections and norms.
            The keys of bias_k and add_zero_attn have no position.
        keep : {"all", "inputs"}
            "inputs" keeps no array of T×S numbers; `backward` then computes forward again.
        **options
            Every option of `npattn.attention`. The keys of bias_k and add_zero_attn come after
            the others: mask, causal, window and bias do not apply to them, a dropout_mask has
            columns for them. dtype "bfloat16" or "float16" rounds the operands and the result of
            each product, as mixed precision does; sums and softmax are float32. A ``gate``
            multiplies o beside that of wg; a head mask (H,) is ``gate=head_mask[:, None, None]``.

        Returns
        -------
        MultiHeadForward
            .out (..., T, out), .lse (..., H, T), .weights (..., H, T, S), .attention

        Raises
        ------
        ShapeError
            If an input has another width than its weight, or an array does not broadcast.
        DtypeError
            If an input is not floating, or mask not boolean.
        OptionError
            If keep, rope or an option is unknown or has an illegal value, or score_mod meets bias_k
            or add_zero_attn. All errors are raised before any work.
        """
        check_choice("keep", keep, ("all", "inputs"))
        _check_options(options)
        check_rotary(rope)
        key_is, value_is = ("query" if key is None else "key"), "value"
        if value is None:
            value_is = key_is
        arrays = {"query": query, "key": query if key is None else key}
        arrays["value"] = arrays["key"] if value is None else value
        inputs = MultiHeadInputs(
            {name: self._input(name, x) for name, x in arrays.items()},
            {"key": key_is, "value": value_is}, mask, rope, options,
        )  # fmt: skip
        steps = self._steps(inputs)
        saved = steps if keep == "all" else None
        return MultiHeadForward(steps.out, steps.attention.lse, self, inputs, saved)

    def backward(
        self, fwd: MultiHeadForward, dout: ArrayLike, dlse: ArrayLike | None = None,
        dweights: ArrayLike | None = None,
    ) -> MultiHeadGradients:  # fmt: skip
        """Gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights.

        Parameters
        ----------
        fwd : MultiHeadForward
            Returned by `forward` of this module.
        dout : float array (..., T, out)
        dlse : float array (..., H, T), optional
        dweights : float array (..., H, T, S), optional
            For weights averaged over the heads: a cotangent / H, for every head.

        Returns
        -------
        MultiHeadGradients
            Each has the shape of its array and is None where there is no such array. Where key or
            value was None, its gradient is added to that of the input that stood for it.

        Raises
        ------
        ShapeError
            If a cotangent has another shape than its result.
        DtypeError
            If a cotangent is not floating.
        OptionError
            If fwd does not come from this module.
        """
        self._check_own(fwd)
        return self._gradients(
            fwd.steps, fwd.inputs, check_cotangent("dout", dout, fwd.out.shape), dlse, dweights
        )

    def importance(self, fwd: MultiHeadForward, dout: ArrayLike) -> Array:
        """Sensitivity of the loss to each head: size of the gradient of a gate of 1 on its o.

        Source: Michel, Levy, Neubig 2019, section 2.3.

        Parameters
        ----------
        fwd : MultiHeadForward
            Returned by `forward` of this module.
        dout : float array (..., T, out)
            A gate multiplies o alone, so that no other cotangent counts.

        Returns
        -------
        float array (H,)

        Raises
        ------
        ShapeError, DtypeError, OptionError
            As in `backward`.
        """
        self._check_own(fwd)
        steps = fwd.steps
        do = self._backward_from_out(steps, check_cotangent("dout", dout, fwd.out.shape))[1]
        rest = tuple(i for i in range(do.ndim) if i != do.ndim - 3)
        return np.asarray(abs((do * steps.attention.out).sum(rest)))

    def describe(
        self, query: ArrayLike | None = None, key: ArrayLike | None = None,
        value: ArrayLike | None = None, mask: ArrayLike | MaskLike | None = None,
        *, dout: ArrayLike | None = None, **options: Any,
    ) -> Description:  # fmt: skip
        """Summarise shapes and parameter counts; with inputs, the behaviour of each head too.

        Parameters
        ----------
        query, key, value, mask, **options
            As in `forward`; without query, the steps alone.
        dout : float array (..., T, out), optional
            Needed to find heads that pass no gradient.

        Returns
        -------
        Description
            Prints as a table that names heads with uniform, constant or saturated weights.

        Raises
        ------
        ShapeError, DtypeError, OptionError
            As in `forward`, and for dout as in `backward`.

        Examples
        --------
        >>> import npattn
        >>> mha = npattn.MultiHeadAttention.init(8, 2, seed=0)
        >>> mha.describe().num_parameters
        288
        """
        if query is None:
            return describe(self)
        fwd = self.forward(query, key, value, mask, **options)
        return describe(
            self, fwd, None if dout is None else check_cotangent("dout", dout, fwd.out.shape)
        )

    # --- the steps --------------------------------------------------------------------------------

    def _check_own(self, fwd: Any) -> None:
        if not isinstance(fwd, MultiHeadForward):
            raise OptionError(
                f"fwd is a {type(fwd).__name__}, must be the MultiHeadForward of this module"
            )
        if fwd.module is not self:
            raise OptionError("fwd comes from another module; pass what this one's forward returns")

    def _input(self, name: str, x: ArrayLike) -> Array:
        """Return query, key or value as an array as wide as its weight is high."""
        array, width = read_floating(name, x), getattr(self, "w" + name[0]).shape[0]
        if array.ndim < 2 or array.shape[-1] != width:
            raise ShapeError(f"{name} has shape {array.shape}, must be (..., length, {width})")
        return array

    def _frame(self, inputs: MultiHeadInputs) -> Problem:
        """Problem of zeros, without appended keys: it checks the options, and holds the dtypes."""
        arrays = [*inputs.arrays.values(), *self.parameters.values()]
        kind = np.result_type(*(x.dtype if x.dtype.kind == "c" else float for x in arrays))
        sizes = {"query": self.head_size, "key": self.head_size, "value": self.value_size}
        zeros = []
        for name, x in inputs.arrays.items():
            *lead, length, _ = x.shape
            heads = self.num_heads if name == "query" else self._kv_heads
            shape = (*lead, heads, length, sizes[name])
            zeros.append(np.broadcast_to(np.zeros((), kind), shape))
        options = {n: x for n, x in inputs.options.items() if n != "conventions"}
        if self._appended_keys:
            options.pop("dropout_mask", None)  # it has columns for the appended keys
            options.pop("dropout_rate", None)
            if options.get("score_mod") is not None:
                raise OptionError(
                    "got score_mod with bias_k or add_zero_attn, whose keys have no index to call "
                    "it with; use one without the other"
                )
        conventions = inputs.options.get("conventions")
        alignment = None if conventions is None else conventions.alignment
        q, k, v = zeros
        return Problem(q, k, v, inputs.mask, alignment=alignment, **options)

    @property
    def _appended_keys(self) -> int:
        """Number of keys that come from the module itself."""
        return int(self.bias_k is not None) + int(self.add_zero_attn)

    @np.errstate(over="ignore", invalid="ignore")  # non-finite input gives non-finite output
    def _steps(self, inputs: MultiHeadInputs) -> MultiHeadSteps:
        """Forward, with every array that backward needs."""
        frame = self._frame(inputs)

        def convert(arrays: Mapping[str, Array]) -> dict[str, Array]:
            return {n: frame.to_operand(x) for n, x in arrays.items()}

        p, x = convert(self.parameters), convert(inputs.arrays)
        heads, norms, turns = {}, {}, self._turns(inputs, frame)
        for name, array in x.items():  # w, b of query, key, value are wq, bq, ...
            y = frame.round_to_storage(linear(array, p["w" + name[0]], p.get("b" + name[0])))
            y = split(y, self.num_heads if name == "query" else self._kv_heads)
            if self.qk_norm is not None and name != "value":
                w, b = p.get("norm_" + name[0]), p.get(f"norm_{name[0]}_bias")
                norms[name] = normalise(y, self.qk_norm, w, b, self.norm_eps)
                y = frame.round_to_storage(norms[name].y)
            if name in turns:
                y = frame.round_to_storage(turn_array(y, turns[name], frame.dtype))
            heads[name] = y
        gate = None
        if self.wg is not None:
            z = frame.round_to_storage(linear(x["query"], p["wg"], p.get("bg")))
            gate = split(frame.round_to_storage(sigmoid(z)), self.num_heads)
        attention = self._attend(heads, p, inputs, frame, gate)
        merged = merge(attention.out.astype(frame.dtype, copy=False), self.merge)
        out = merged
        if self.wo is not None:
            out = frame.round_to_storage(linear(merged, p["wo"], p.get("bo")))
        out = frame.to_output_dtype(out)
        return MultiHeadSteps(frame, p, x, norms, turns, gate, attention, merged, out)

    def _turns(self, inputs: MultiHeadInputs, frame: Problem) -> dict[str, Turn]:
        """Return the turns of query and key by rope, if there is one."""
        turns = {}
        if inputs.rope is not None:
            options = inputs.rope.arguments(frame.T, frame.S)
            for name, heads, settings in zip(
                ("query", "key"), (frame.H, frame.K), options, strict=True
            ):
                *lead, length, _ = inputs.arrays[name].shape
                turns[name] = make_turn(name, (*lead, heads, length, frame.D), **settings)
        return turns

    def _attend(
        self, heads: dict[str, Array], p: dict[str, Array], inputs: MultiHeadInputs, frame: Problem,
        gate: Array | None,
    ) -> Forward:  # fmt: skip
        """Attention of the heads, with the appended keys and both gates; gate is (..., H, T, E)."""
        options: dict[str, Any] = {**inputs.options, "dtype": frame.storage or frame.dtype}
        if gate is not None:
            options["gate"] = gate if frame.gate is None else gate * _gate_option(frame)
        q, k, v, mask = heads["query"], heads["key"], heads["value"], inputs.mask
        if self._appended_keys:
            k, v = self._append_key(k, p.get("bias_k")), self._append_key(v, p.get("bias_v"))
            conventions = options.get("conventions") or Conventions()
            plain = dataclasses.replace(
                conventions, hidden_fill=None, hidden_add=None, softcap="before_bias"
            )
            visible = plain.canonical(frame).visible
            if visible is not None:
                mask = _append_columns(visible, frame.S, self._appended_keys, True)
                mask = ~mask if conventions.mask_true == "hide" else mask
            if frame.bias_array is not None:
                bias = _append_columns(frame.bias_array, frame.S, self._appended_keys, 0)
                options["bias"] = bias
            options |= {"causal": False, "window": None}
        return api.forward(q, k, v, mask, **options)

    def _append_key(self, x: Array, bias: Array | None) -> Array:
        """Append bias_k or bias_v, and the zeros of add_zero_attn, to x (..., K, S, n)."""
        *lead, K, _, n = x.shape
        more = [] if bias is None else [bias.reshape(K, 1, n)]
        more += [np.zeros((K, 1, n), x.dtype)] if self.add_zero_attn else []
        return np.concatenate([x, *(np.broadcast_to(m, (*lead, K, 1, n)) for m in more)], -2)

    @np.errstate(over="ignore", invalid="ignore")
    def _gradients(
        self, steps: MultiHeadSteps, inputs: MultiHeadInputs, dout: Array, dlse: Any, dweights: Any
    ) -> MultiHeadGradients:
        """Return the gradients of `_steps`, read upwards, for dout (..., T, out)."""
        frame, p, S = steps.frame, steps.parameters, steps.frame.S
        d, do = self._backward_from_out(steps, dout)
        grads = api.backward(steps.attention, do, dlse, dweights)
        dheads = {"query": grads.q, "key": grads.k, "value": grads.v}
        for name in ("key", "value") if self.bias_k is not None else ():
            bias = f"bias_{name[0]}"
            d[bias] = sum_to(
                dheads[name][..., S, :], (self._kv_heads, p[bias].size // self._kv_heads)
            ).reshape(-1)
        for name, dy in dheads.items():
            dy = dy.astype(frame.dtype, copy=False)
            dy = dy if name == "query" else dy[..., :S, :]
            if name in steps.turns:
                back = steps.turns[name].inverse()
                dy = frame.round_to_storage(turn_array(dy, back, frame.dtype))
            if name in steps.norms and self.qk_norm is not None:
                w = p.get("norm_" + name[0])
                dy, dw, db = normalise_backward(dy, steps.norms[name], self.qk_norm, w)
                d |= {"norm_" + name[0]: dw, f"norm_{name[0]}_bias": db}
            rows = frame.round_to_storage(merge(dy, "concat"))
            dx, dw, db = linear_backward(rows, steps.inputs[name], p["w" + name[0]])
            d |= {name: dx, "w" + name[0]: dw, "b" + name[0]: db}
        dgate = grads.gate
        if steps.gate is not None and dgate is not None:
            dx, d["wg"], d["bg"], dgate = self._gate_gradients(steps, dgate)
            d["query"] = d["query"] + dx
        for name, other in inputs.stands_for.items():
            if other != name:
                d[other] = d[other] + d.pop(name)
        if grads.bias is not None and frame.bias is not None:
            appended = self._appended_keys
            d["bias"] = frame.bias_gradient(grads.bias[..., :S]) if appended else grads.bias
        present = {n: x for n, x in d.items() if n not in PARAMETERS or n in p}
        converted = {n: _to_result_dtype(frame, x) for n, x in present.items()}
        return MultiHeadGradients(**converted, sinks=grads.sinks, gate=dgate)

    def _gate_gradients(
        self, steps: MultiHeadSteps, dgate: Array
    ) -> tuple[Array, Array, Array, Array | None]:
        """Gradients of query, wg, bg and the option gate through dgate, (..., H, T, E)."""
        frame, gate, of_option = steps.frame, steps.gate, None
        assert gate is not None
        dsigmoid = dgate
        if frame.gate is not None:
            dsigmoid = sum_to(dgate * _gate_option(frame), gate.shape)
            of_option = sum_to(dgate * gate, frame.gate.shape)
        dz = frame.round_to_storage(merge(sigmoid_backward(dsigmoid, gate), "concat"))
        dx, dw, db = linear_backward(dz, steps.inputs["query"], steps.parameters["wg"])
        return dx, dw, db, of_option

    def _backward_from_out(
        self, steps: MultiHeadSteps, dout: Array
    ) -> tuple[dict[str, Array], Array]:
        """Gradients of wo and bo, and of the output of the heads."""
        frame, d = steps.frame, {}
        dmerged = frame.to_operand(dout)
        if self.wo is not None:
            dmerged, dwo, dbo = linear_backward(dmerged, steps.merged, steps.parameters["wo"])
            d = {"wo": dwo, "bo": dbo}
        return d, merge_backward(frame.round_to_storage(dmerged), self.num_heads, self.merge)


MultiHeadAttention.__init__ = reject_unknown_options(  # type: ignore[method-assign]
    MultiHeadAttention.__init__
)


class MultiHeadInputs(NamedTuple):
    """Arguments of one call of `MultiHeadAttention.forward`."""

    arrays: dict[str, Array]  # query, key, value
    stands_for: dict[str, str]  # key, value → the input that is used for it
    mask: Any
    rope: Rotary | None
    options: dict[str, Any]


class MultiHeadSteps(NamedTuple):
    """Arrays that backward needs and that cost much to compute again."""

    frame: Problem
    parameters: dict[str, Array]  # in the dtype computed in
    inputs: dict[str, Array]  # likewise
    norms: dict[str, NormResiduals]  # of query and key
    turns: dict[str, Turn]  # likewise
    gate: Array | None  # (..., H, T, E) that of wg
    attention: Forward
    merged: Array  # (..., T, H·E)
    out: Array  # (..., T, out)


@dataclass(frozen=True, eq=False)
class MultiHeadForward:
    """Result of `MultiHeadAttention.forward`.

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
    inputs: MultiHeadInputs = dataclasses.field(repr=False)
    saved: MultiHeadSteps | None = dataclasses.field(repr=False)

    @property
    def steps(self) -> MultiHeadSteps:
        """All intermediate arrays, computed again if they were not kept."""
        return self.module._steps(self.inputs) if self.saved is None else self.saved

    @property
    def attention(self) -> Forward:
        """The attention between the projections."""
        return self.steps.attention

    @property
    def weights(self) -> Array:
        """Weights of each head, (..., H, T, S)."""
        return self.attention.weights


@dataclass(frozen=True, eq=False)
class MultiHeadGradients:
    """Gradients of one loss, each with the shape of its array; None where there is no such array.

    The names are those of the inputs, of the parameters of `MultiHeadAttention`, and of the
    options bias, sinks and gate.
    """

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
    wg: Array | None = None
    bg: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None
    gate: Array | None = None


def _gate_option(frame: Problem) -> Array:
    """Return the option gate in the dtype computed in."""
    assert frame.gate is not None
    return frame.to_operand(frame.gate)


def _to_result_dtype(frame: Problem, x: Any) -> Any:
    """Convert a gradient, or each term of that of a sum of biases, to the dtype of results."""
    if isinstance(x, tuple):
        return tuple(_to_result_dtype(frame, term) for term in x)
    return frame.to_output_dtype(frame.round_to_storage(x))


def _append_columns(x: Array, S: int, count: int, fill: Any) -> Array:
    """Append `count` columns to x (..., 1 or S)."""
    x = np.broadcast_to(x, (*x.shape[:-1], S))
    return np.concatenate([x, np.full((*x.shape[:-1], count), fill, x.dtype)], -1)


def _check_options(options: Mapping[str, Any]) -> None:
    reject_options("forward", options, OPTIONS)
    check_conventions(options.get("conventions"))
