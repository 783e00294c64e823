"""One call of a mistake under the conventions of the function whose place it takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.mistakes import Attention
from npattn.mutants.terms import Terms
from npattn.problem.arrays import Array

RESULTS = ("o", "lse", "weights")


@dataclass(frozen=True)
class Call:
    """One call of a mistake: options, axes and the results that it returns."""

    attention: Attention
    options: Mapping[str, Any]  # by npattn's names
    terms: Terms
    heads_last: bool  # q, k, v and o are (B, T, H, D)

    def forward(self, *qkv: Array) -> dict[str, Array]:
        """Return the results by name."""
        q, k, v = map(self._move_heads, qkv)
        flags: dict[str, Any] = {
            "return_lse": True,
            "return_weights": "weights" in self.result_names,
        }
        values = self.attention.forward(q, k, v, **flags, **self._others)
        results = self._fill_empty_rows(dict(zip(RESULTS, values, strict=False)), v)
        results |= {"o": self._move_heads(results["o"]), "lse": self._write_lse(results["lse"])}
        return {n: x.transpose(self._axes(x)) if n == "weights" else x for n, x in results.items()}

    def backward(
        self, qkv: tuple[Array, ...], results: Mapping[str, Array], cotangents: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the gradients by the name of the input, in the shapes of q, k, v and options."""
        q, k, v = map(self._move_heads, qkv)
        dout = self._move_heads(cotangents["o"])
        dlse, dweights = cotangents.get("lse"), cotangents.get("weights")
        if dlse is not None and self.terms.conventions.lse_base == "2":
            dlse = dlse / dlse.dtype.type(math.log(2))
        if dweights is not None:
            dweights = dweights.transpose(np.argsort(self._axes(dweights)))
        grads = self.attention.backward(
            *(dout, q, k, v), out=self._move_heads(results["o"]),
            lse=self._read_lse(results["lse"]), dlse=dlse, dweights=dweights, **self._others,
        )  # fmt: skip
        return {n: self._move_heads(x) if n in ("q", "k", "v") else x for n, x in grads.items()}

    @property
    def result_names(self) -> tuple[str | None, ...]:
        """Names of the results in the order of the function; None stands for None."""
        asked = [n for n in RESULTS[1:] if self.options.get(f"return_{n}")]
        if "need_weights" in self.terms.signature.meanings.values():
            return ("o", "weights" if "weights" in asked else None)
        return ("o", *(asked or self.terms.beside))

    @property
    def _others(self) -> dict[str, Any]:
        return {n: x for n, x in self.options.items() if not n.startswith("return_")}

    def _move_heads(self, x: Array) -> Array:
        return x.swapaxes(-2, -3) if self.heads_last else x

    def _axes(self, x: Array) -> tuple[int, ...]:
        return self.terms.axes if x.ndim == len(self.terms.axes) else tuple(range(x.ndim))

    def _write_lse(self, lse: Array) -> Array:
        """Return lse in its base, with what an empty row has."""
        conventions = self.terms.conventions
        lse = lse / lse.dtype.type(math.log(2)) if conventions.lse_base == "2" else lse
        return np.where(lse == -np.inf, lse.dtype.type(conventions.lse_empty), lse)

    def _read_lse(self, lse: Array) -> Array:
        conventions = self.terms.conventions
        lse = np.where(lse == lse.dtype.type(conventions.lse_empty), lse.dtype.type(-np.inf), lse)
        return lse * lse.dtype.type(math.log(2)) if conventions.lse_base == "2" else lse

    def _fill_empty_rows(self, results: dict[str, Array], v: Array) -> dict[str, Array]:
        """Give rows without a visible key what the conventions say of them."""
        empty = results["lse"] == -np.inf
        if not v.shape[-2] or not empty.any():  # without keys o is 0 under all conventions
            return results
        bias, by_bias = self.options.get("bias"), self.terms.conventions.empty_row_bias
        if bias is None or by_bias is None:
            return self._fill(results, v, empty, self.terms.empty_row)
        rows = np.broadcast_to(np.isneginf(bias).all(-1), empty.shape)
        results = self._fill(results, v, empty & rows, by_bias)
        return self._fill(results, v, empty & ~rows, self.terms.empty_row)

    def _fill(
        self, results: dict[str, Array], v: Array, empty: Array, how: str
    ) -> dict[str, Array]:
        """Give empty rows, (..., H, T), NaN or the mean of v, (..., K, S, E); none for "zero"."""
        if how == "zero" or not empty.any():
            return results
        o = results["o"]
        mean: Any = np.nan
        if how == "mean":
            shared = v if v.ndim == 2 else np.repeat(v, o.shape[-3] // v.shape[-3], axis=-3)
            mean = shared.mean(-2, keepdims=True, dtype=np.float64).astype(o.dtype)
        filled = {"o": np.where(empty[..., None], mean, o).astype(o.dtype)}
        if "weights" in results:
            share = np.nan if how == "nan" else 1 / v.shape[-2]
            p = results["weights"]
            filled["weights"] = np.where(empty[..., None], share, p).astype(p.dtype)
        return results | filled
