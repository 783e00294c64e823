"""Kernels of other projects that take 8 bits with factors, judged whole within derived bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from npattn.testing import Implementation, Rounding, check
from npattn.testing.worker.connect import connect
from npattn.testing.worker.supervisor import Limits

KERNELS = Path(__file__).with_name("sage_kernels.py")
RULES = ("agreement-o", "shared-heads")
SIZES = {"B": (1, 2), "H": (2, 4), "K": (2,), "T": (5, 131), "S": (64, 192), "D": (64,), "E": (64,)}
# P in float16, summed in float16 over 64 keys; q and k come in int8, so that nothing is lost there.
SAGE = replace(Rounding.int8(), integers=None, name="P and sums in float16")


def judge(remote, **arguments):
    try:
        return check(remote, sizes=SIZES, dtypes=("float16",), only=RULES, **arguments)
    finally:
        remote.worker.close()


@pytest.mark.nightly
def test_sageattention_kernel_in_int8():
    pytest.importorskip("sageattention")
    pytest.importorskip("triton")
    limits = Limits(timeout=300)
    report = judge(connect(f"{KERNELS}:right", limits=limits), examples=6, rounding=SAGE)
    assert report.passed, str(report)
    assert 0 < max(o.worst for o in report.outcomes if o.status == "passed") <= 1
    report = judge(connect(f"{KERNELS}:wrong", limits=limits), examples=6, rounding=SAGE)
    assert report.causes[0].text == "k_scales of the block behind is taken"


PAGES = {"B": (2,), "H": (4,), "K": (2,), "T": (1,), "S": (13, 32), "P": (16,)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "profile", "dtype", "D"),
    [
        ("gpu_paged", "pallas.gpu-paged", "float32", 16),
        ("tpu_paged", "pallas.tpu-paged", "bfloat16", 128),
    ],
)
def test_pallas_pages_in_int8(name, profile, dtype, D):
    """Factors of tokens in pages, interpreted; with those of the token before it is wrong."""
    jnp = pytest.importorskip("jax.numpy")
    pallas = pytest.importorskip("npattn.testing.targets.pallas")
    kernel = getattr(pallas, name)

    def shifted(*arrays, k_scales=None, v_scales=None, **options):
        moved = {"k_scales": jnp.roll(k_scales, 1, 1), "v_scales": v_scales}
        return kernel(*arrays, **moved, **options)

    asked = {"dtypes": (dtype,), "examples": 3, "sizes": PAGES | {"D": (D,), "E": (D,)}}
    rules = ("agreement-o", "other-sequences")
    report = check(kernel, like=profile, framework="jax", quantized="int8", only=rules, **asked)
    assert report.passed, str(report)
    assert max(o.worst for o in report.outcomes if o.status == "passed") > 0
    f = Implementation(shifted, like=profile, framework="jax", quantized="int8", features=("mask",))
    assert not check(f, only=["agreement-o"], **asked).passed
