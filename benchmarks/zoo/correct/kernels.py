"""Kernels: the same attention in other orders and with other roundings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.zoo.correct.kernel import Kernel
from benchmarks.zoo.correct.register import STORES_PRODUCTS, correct
from npattn.testing.bounds.rounding import Rounding

UPCAST, FUSED, EAGER = Rounding.upcast(), Rounding.fused(), Rounding.eager()
FROM_OUT = replace(UPCAST, delta_from="out")
FROM_WEIGHTS = replace(UPCAST, delta_from="weights")
LOW = ("float16", "bfloat16")
ALL = ("float64", "float32", *LOW)


def kernel(
    name: str,
    sentence: str,
    *,
    dtypes: tuple[str, ...] = ALL,
    beyond: bool = False,
    breaks: tuple[str, ...] = (),
    declared: bool = True,
    **choices: Any,
) -> None:
    implementation = Kernel(**choices)
    correct(
        name,
        sentence,
        implementation.forward,
        implementation.backward,
        dtypes=dtypes,
        rounding=implementation.rounding if declared else None,
        beyond=beyond,
        breaks=breaks,
    )


# --- the order ---
# A row each
# fmt: off

kernel("rows", "Whole rows of scores, products by BLAS.")
kernel("first to last", "Every sum from its first term to its last.", order="first")
kernel("last to first", "Every sum, and the keys, from the last to the first.", order="last")
kernel("pairwise", "Sums of sums of two.", order="pairwise")
kernel("Kahan", "Compensated sums: the next term makes up for each rounding.", order="kahan")
kernel("blocked sums", "Sums of sums of 16, as declared.", order="first",
       rounding=replace(UPCAST, sum_block=16))
kernel("tiles of 5", "Online softmax, 5 keys a step.", tile=5)
kernel("tiles of 7", "Online softmax, 7 keys a step, the last first.", tile=7, order="last")
kernel("tiles of 13", "Online softmax, 13 keys a step, D from the delivered out.", tile=13,
       rounding=FROM_OUT)
kernel("two passes", "The weights are rebuilt from lse, D is Σ P·dP.", tile=1 << 20,
       rounding=FROM_WEIGHTS)
kernel("split keys", "Three parts of the keys, merged by their lse.", tile=16, splits=3)
kernel("split keys, sink last", "Five parts of the keys and the sink, merged by their lse.", tile=4,
       splits=5, sink="last")

# --- the scale, the exponential, the bias, the sink ---

kernel("scale on q", "q · scale before the product.", scaled="queries")
kernel("scale on k", "k · scale before the product.", scaled="keys")
kernel("scale on both", "q and k times the root of the scale.", scaled="both")
kernel("exp2", "exp2, with log₂e folded into the scale.", binary=True, tile=16)
kernel("log-softmax", "Weights are exp(s − m − log Σ).", log_softmax=True)
kernel("bias as channels",
       "The bias is folded into additional channels of q and k, summed in pairs.", channels=True,
       scaled="queries", order="pairwise")
kernel("bias first", "Each sum of products begins with the bias.", channels=True, scaled="queries",
       order="last")
kernel("sink as key", "The sink is one more key, its value 0.", sink="key", tile=16)
kernel("mask as bias", "−inf is added to hidden scores.", hides="bias",
       breaks=("hidden-nan-k", "hidden-nan-kv", "nan-query-alone"))

# --- the roundings ---

kernel("fused", "Flash: P and dS are rounded, D comes from the rounded out.",
       dtypes=("float32", *LOW), tile=16, binary=True, rounding=FUSED)
kernel("fused, D from weights", "P and dS are rounded, D is Σ P·dP.", dtypes=("float32", *LOW),
       tile=16, rounding=replace(FUSED, delta_from="weights"))
kernel("fused, flushed", "Subnormal results are 0, the last tile comes first, the sink at the end.",
       dtypes=("float32", *LOW), order="last", tile=33, sink="last", flushes=True, rounding=FUSED)
kernel("eager", "Every intermediate is stored, P is normalised.", rounding=EAGER,
       breaks=STORES_PRODUCTS)
kernel("eager, scale on q", "The same, with q · scale stored before the product.", scaled="queries",
       rounding=EAGER)
kernel("eager, parts of dS", "The gradients through out and through lse are stored, then added.",
       apart=True, order="last", rounding=EAGER, breaks=STORES_PRODUCTS)
kernel("heads rounded", "dk and dv of each query head are rounded before they are summed.",
       rounding=replace(UPCAST, shared="input"))
kernel("gradients in blocks", "Gradients are rounded after every 32 rows.", dtypes=LOW,
       declared=False, tile=32, rounding=replace(FUSED, gradient_block=32))
kernel("undeclared",
       "Every rounding that an undeclared model allows, and an exp in error by 2⁻¹¹.",
       dtypes=LOW, declared=False, rounding=Rounding.undeclared("bfloat16"), breaks=STORES_PRODUCTS)
kernel("wide accumulators", "Sums and the softmax in float64.", dtypes=("float32", *LOW),
       rounding=replace(UPCAST, accumulator="float64"))
kernel("truncated accumulators", "Sums and products are cut off to float32.", beyond=True,
       dtypes=LOW, order="first", tile=32, rounding=replace(FUSED, accumulator="truncated"))
kernel("tf32", "Matrices of float32 enter their products with 10 bits.", dtypes=("float32",),
       beyond=True, tile=32, rounding=replace(UPCAST, operands="tf32"))
kernel("low lse", "lse is saved in the dtype of q.", dtypes=LOW, beyond=True, tile=32,
       rounding=replace(UPCAST, lse="input"))
kernel("low row sums", "The weights of a row are summed in the dtype of q.", dtypes=LOW,
       beyond=True, rounding=replace(EAGER, row_sum="input"), breaks=STORES_PRODUCTS)
