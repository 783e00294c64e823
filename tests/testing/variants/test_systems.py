"""check_variant on functions of other systems: JAX, and Triton kernels of fla, interpreted."""

import os
import subprocess
import sys

import pytest

from npattn.testing import check_variant

FLA = """
import sys, warnings
warnings.simplefilter("ignore")
import fla.ops.common.fused_recurrent as kernels
from fla.ops.gla import fused_recurrent_gla
from fla.ops.linear_attn import fused_recurrent_linear_attn
from fla.ops.simple_gla import fused_recurrent_simple_gla

from npattn.testing import check_variant
from npattn.testing.targets.fla import _without_tuning

for kernel in vars(kernels).values():
    if hasattr(kernel, "fn"):
        _without_tuning(kernel)


def rows(*tensors):
    return [x.transpose(1, 2).contiguous() for x in tensors]


def plain(q, k, v, scale=None, initial_state=None, return_state=False):
    o, state = fused_recurrent_linear_attn(
        *rows(q, k, v), scale=scale, normalize=False, initial_state=initial_state,
        output_final_state=True)
    return o.transpose(1, 2), state


def feature(q, k, v, log_decay, scale=None, initial_state=None, return_state=False):
    q, k, v, g = rows(q, k, v, log_decay)
    o, state = fused_recurrent_gla(
        q, k, v, gk=g, scale=scale, initial_state=initial_state, output_final_state=True)
    return o.transpose(1, 2), state


def key(q, k, v, log_decay, scale=None, initial_state=None, return_state=False):
    q, k, v, g = rows(q, k, v, log_decay)
    o, state = fused_recurrent_simple_gla(
        q, k, v, g=g[..., 0].contiguous(), scale=scale, initial_state=initial_state,
        output_final_state=True)
    return o.transpose(1, 2), state


def early(q, k, v, log_decay, scale=None, initial_state=None, return_state=False):
    return feature(q, k, v, log_decay.roll(-1, -2), scale, initial_state)


means = {"causal": [True], "feature_map": ["identity"], "normalise": [False], "G": [1]}
for f, decay in ((plain, [None]), (feature, ["feature"]), (key, ["key"]), (early, ["feature"])):
    report = check_variant(
        f, "linear", values=means | {"decay": decay}, framework="torch", examples=8)
    print(f.__name__, report.passed, *sorted(report.outcomes[0].powers))
"""


@pytest.mark.nightly
def test_triton_kernels_of_fla():
    pytest.importorskip("fla.ops.linear_attn")
    done = subprocess.run(
        [sys.executable, "-c", FLA], capture_output=True, text=True, check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    passed = {name: ok for name, ok, *_ in lines}
    assert passed == {"plain": "True", "feature": "True", "key": "True", "early": "False"}
    results = {"out", "state", "dq", "dk", "dv", "dlog_decay", "dinitial_state"}
    assert {*lines[1][2:]} == {*lines[2][2:]} == results


def test_functions_of_jax():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def attention(q, k, v, causal=False):
        q, k = (jax.nn.elu(x) + 1 for x in (q, k))
        k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
        w = jnp.einsum("bhtd,bhsd->bhts", q, k, precision="highest")
        w = jnp.tril(w) if causal else w
        return jnp.einsum("bhts,bhse->bhte", w, v, precision="highest") / w.sum(-1, keepdims=True)

    def stopped(q, k, v, causal=False):
        return attention(jax.lax.stop_gradient(q), k, v, causal)

    # Each operation is compiled for each shape.
    sizes = {"B": [1], "K": [2], "G": [2], "T": [3], "S": [3], "D": [2], "E": [5]}
    report = check_variant(attention, "linear", framework="jax", examples=6, values=sizes)
    assert report.passed, report
    assert {"dq", "dk", "dv"} <= {*report.outcomes[0].powers}
    found = check_variant(stopped, "linear", framework="jax", examples=6, values=sizes)
    assert [c.name for c in found.outcomes[0].comparisons] == ["dq"]
