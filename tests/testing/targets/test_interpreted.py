"""Kernels in an interpreter, each through a worker: Triton's, and Pallas's."""

import pytest

from npattn.problem import Cotangents
from npattn.testing import Recipe, compare
from npattn.testing.targets import TARGETS
from npattn.testing.worker.connect import connect
from npattn.testing.worker.supervisor import Limits

# Sizes are those that the kernels take: blocks of 128, one query, keys in two parts of 16.
CASES = {
    "fla.parallel": [
        {"T": 5, "S": 5, "D": 3, "E": 2, "H": 4, "K": 2, "causal": True, "scale": 0.75},
        {"T": 131, "S": 131, "D": 3, "E": 2, "causal": True, "window": (7, 0), "sinks": True},
    ],
    "fla.decoding": [{"T": 1, "S": 37, "D": 3, "E": 2, "H": 4, "K": 2},
                     {"T": 1, "S": 7, "D": 3, "E": 2, "window": (3, None), "sinks": True}],
    "sageattention": [{"T": 128, "S": 128, "D": 64, "E": 64, "H": 4, "scale": 0.25, "causal": True},
                      {"T": 64, "S": 64, "D": 64, "E": 64, "dtype": "float16"}],
    "pallas.gpu": [{"T": 5, "S": 5, "D": 3, "E": 3, "causal": True, "scale": 0.75},
                   {"T": 7, "S": 5, "D": 3, "E": 3}],
    "pallas.gpu-decode": [{"T": 1, "S": 32, "D": 16, "E": 16, "H": 4, "K": 2}],
    "pallas.gpu-paged": [{"T": 1, "S": 37, "D": 16, "E": 16, "H": 4, "softcap": 2.0, "scale": 0.75},
                         {"T": 1, "S": 37, "D": 16, "E": 16, "H": 4, "mask": "empty padding"}],
    "pallas.tpu-flash": [
        {"T": 128, "S": 128, "D": 3, "E": 3, "bias": "heads", "scale": 0.75, "causal": True}
    ],
    "pallas.tpu-splash": [
        {"T": 128, "S": 128, "D": 3, "E": 5, "K": 1, "causal": True, "softcap": 2.0},
        {"T": 128, "S": 256, "D": 3, "E": 3, "window": (7, 3), "sinks": True, "scale": 0.75},
    ],
    "pallas.tpu-paged": [
        {"T": 1, "S": 37, "D": 128, "E": 128, "H": 4, "dtype": "bfloat16", "softcap": 2.0},
        {"T": 1, "S": 37, "D": 128, "E": 128, "mask": "empty padding", "dtype": "bfloat16"},
    ],
}  # fmt: skip
FORWARD_ONLY = (
    "fla.decoding",
    "sageattention",
    "pallas.gpu-decode",
    "pallas.gpu-paged",
    "pallas.tpu-paged",
)
IN_TRITON = ("fla.parallel", "fla.decoding", "sageattention")


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_agrees_with_the_oracle(name):
    target = TARGETS[name]
    if not target.runs_here:
        pytest.skip(f"it needs {target.lacks}")
    remote = connect(name, limits=Limits(timeout=300))
    try:
        for case in CASES[name]:
            recipe = Recipe(**({"lead": (2,), "H": 2, "K": 2, "seed": 3} | case))
            problem = recipe.problem(remote.conventions.causal)
            cotangents = Cotangents(recipe.cotangents(problem).dout, None)
            results = dict(remote.forward(problem).pairs)
            if name not in FORWARD_ONLY:
                results |= dict(remote.gradients(problem, cotangents).pairs)
            compared = compare(
                results,
                problem,
                dout=cotangents.dout,
                conventions=remote.conventions,
                rounding=target.rounding,
            )
            assert [str(one) for one in compared if not one.passed] == []
    finally:
        remote.worker.close()


def test_interpreted_targets_set_their_variables_and_sizes():
    for name in CASES:
        target = TARGETS[name]
        assert (target.environment == {"TRITON_INTERPRET": "1"}) == (name in IN_TRITON)
        assert target.device == "cpu"
    assert TARGETS["fla.decoding"].sizes["T"] == TARGETS["pallas.gpu-decode"].sizes["T"] == (1,)
    assert set(TARGETS["pallas.tpu-flash"].sizes["S"]) == {128}
