"""Parts of the exact engine in one pass: with stand-ins of the kernels, or with the kernels in
Triton's interpreter; on a GPU every test of the engines runs them.
"""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch.tiles  # noqa: E402
from npattn.torch.engine import in_one_pass  # noqa: E402
from tests.backends import BACKENDS, mod, problem  # noqa: E402

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INF = float("inf")


class Kernels:
    """The kernels in torch, slow and plain, and how often they were called."""

    LEAST, FAILURES = 1, (RuntimeError,)

    def shared_memory(self, device):
        return self.LEAST

    def __init__(self):
        self.sums = self.tiles = 0

    def sum_exp(self, q, k, v, first, left, right):
        self.sums += 1
        T, S, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        s = q @ k.repeat_interleave(G, 1).mT
        after = torch.arange(S) - torch.arange(T)[:, None] - first
        hidden = torch.zeros(T, S, dtype=bool)
        hidden |= after < -(T + S if left is None else left)
        hidden |= after > (T + S if right is None else right)
        p = torch.exp(s.masked_fill(hidden, -INF))
        return p @ v.repeat_interleave(G, 1), p.sum(-1)

    def weights_and_gradients(self, s, dp, log, delta):
        self.tiles += 1
        hidden = s == -INF
        s.copy_(torch.exp(s - log[..., None]))
        dp.copy_(torch.where(hidden, 0, (dp - delta[..., None]) * s))


@pytest.fixture
def kernels(monkeypatch):
    """The kernels for problems of many tiles on the CPU: stand-ins, or Triton's interpreter."""
    kernels = Kernels()
    if INTERPRETED:
        from npattn.torch.engine import triton_kernels as in_triton

        for name, count in (("sum_exp", "sums"), ("weights_and_gradients", "tiles")):
            monkeypatch.setattr(
                kernels, name, count_calls(kernels, count, getattr(in_triton, name))
            )

    def is_large(ops):
        return ops.q.dtype == torch.float64 and ops.overwrites and not ops.plan.one_tile

    monkeypatch.setattr(in_one_pass, "_is_large", is_large)
    monkeypatch.setattr(in_one_pass, "kernels_on", lambda device: kernels)
    BACKENDS["torch"]().small(monkeypatch)
    return kernels


def count_calls(kernels, count, call):
    def counting(*arguments):
        setattr(kernels, count, getattr(kernels, count) + 1)
        return call(*arguments)

    return counting


def differences(options):
    """Largest relative differences between npattn.torch and the dense engine."""
    results = []
    for name in ("dense", "torch"):
        run = BACKENDS[name]().evaluate(problem(**options))
        grads = run.backward(np.ones(run.out.shape))
        results.append((run.out, run.lse, grads.q, grads.k, grads.v))
    largest = []
    for a, b in zip(*results, strict=True):
        finite = np.isfinite(a)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        largest.append(np.abs(a[finite] - b[finite]).max() / np.abs(a[finite]).max())
    return max(largest)


SUMS = {
    "plain": {},
    "scale": {"scale": 0.75},
    "sinks": {"sinks": np.linspace(-1, 2, 6)},
    "causal": {"causal": "bottom_right"},
    "causal, rows without keys": {"causal": "bottom_right", "sizes": (29, 23)},
    "window": {"window": (5, 2)},
    "window of one side": {"window": (None, 3)},
    "window alone": {"window": (3, 0), "causal": "top_left"},
}
TILES = {
    "bias": {"bias": np.arange(29.0)[None] / 7},
    "softcap": {"softcap": 2.0},
    "mask": {"mask": np.arange(29)[None] % 3 > 0},
    "dropout": {"dropout_mask": np.arange(29)[None] % 3 > 0, "dropout_rate": 0.5},
    "two bands": {"mask": npattn.masks.window(7, 3), "causal": "top_left"},
}


@pytest.mark.parametrize("options", [*SUMS, *TILES])
def test_results_are_those_of_the_dense_engine(kernels, options):
    words = SUMS.get(options) or TILES.get(options) or {}
    # 29 keys, sizes of 5 and 7: some 50 roundings on the way to any number.
    assert differences(words) <= 64 * np.finfo(float).eps
    assert kernels.sums == (options in SUMS)
    assert kernels.tiles > 0 or options == "causal, rows without keys"  # which have a shift


@pytest.mark.parametrize("options", [{"score_mod": mod}, {"dtype": "float32"}])
def test_torch_computes_what_the_kernels_cannot(kernels, options):
    run = BACKENDS["torch"]().evaluate(problem(**options))
    run.backward(np.ones(run.out.shape))
    assert (kernels.sums, kernels.tiles) == (0, 0)


@pytest.mark.parametrize(("limit", "size"), [("LARGEST", 6), ("FARTHEST", 28)])
def test_large_problems_stay_with_torch(kernels, monkeypatch, limit, size):
    monkeypatch.setattr(in_one_pass, limit, size)  # E is 7, S is 29
    BACKENDS["torch"]().evaluate(problem())
    assert kernels.sums == 0


def test_numbers_that_are_not_finite_stay_with_torch(kernels):
    given = problem(causal="top_left")
    given.v[0, 0, 19] = np.nan
    runs = [BACKENDS[name]().evaluate(given) for name in ("dense", "torch")]
    dense, ours = (np.isnan(run.out) for run in runs)
    assert dense.any()
    assert not dense.all()
    np.testing.assert_array_equal(ours, dense)
    runs[1].backward(np.ones(ours.shape))
    assert kernels.tiles == 0


def test_cotangents_that_are_not_finite_stay_with_torch(kernels):
    given, do = problem(causal="top_left"), np.ones((2, 6, 23, 7))
    do[0, 0, 3] = np.inf
    dense, ours = (BACKENDS[name]().evaluate(given).backward(do) for name in ("dense", "torch"))
    assert kernels.tiles == 0
    for name in "qkv":
        one, other = getattr(dense, name), getattr(ours, name)
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))
        assert not np.isfinite(one).all()


def test_scores_beyond_the_range_of_exp_stay_with_torch(kernels):
    dense, ours = (BACKENDS[name]().evaluate(problem(scale=1e4)) for name in ("dense", "torch"))
    assert kernels.sums == 1  # whose results are not in range
    off = 64 * np.finfo(float).eps * np.abs(dense.lse).max()  # of a score, and so of a weight
    np.testing.assert_allclose(ours.lse, dense.lse, rtol=0, atol=off)
    np.testing.assert_allclose(ours.out, dense.out, rtol=0, atol=off * np.abs(dense.out).max())
    grads = ours.backward(np.ones(ours.out.shape))
    assert all(np.isfinite(x).all() for x in (grads.q, grads.k, grads.v))
    assert kernels.tiles == 0


def test_what_autograd_records_stays_with_torch(kernels):
    q, k, v = (torch.randn(1, 2, 23, n, dtype=torch.float64, requires_grad=True) for n in (5, 5, 7))
    out = npattn.torch.attention(q, k, v)
    assert kernels.sums == 1  # inside a function of autograd nothing is recorded
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert kernels.tiles == 0
    torch.autograd.grad(dq.sum(), (q, k, v))


def test_a_small_problem_stays_with_torch(kernels, monkeypatch):
    monkeypatch.setattr(npattn.torch.tiles, "TILE", {"cpu": 2**20})
    BACKENDS["torch"]().evaluate(problem())
    assert kernels.sums == 0


# --- before the kernels are used ------------------------------------------------------------------


class Wrong(Kernels):
    """Kernels with one mistake each."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake

    def sum_exp(self, q, k, v, first, left, right):
        right = right + 1 if self.mistake == "one key more" else right
        q = q.float().double() if self.mistake == "scores of float32" else q
        out, total = super().sum_exp(q, k, v, first, left, right)
        if self.mistake == "a last block that is missing":
            out[:, :, 128:] = 0
        if self.mistake == "sums of float32":
            total = total.float().double()
        if self.mistake == "products of tf32":
            out = super().sum_exp(q, k, v.bfloat16().double(), first, left, right)[0]
        return out, total

    def weights_and_gradients(self, s, dp, log, delta):
        hidden = s == -INF
        super().weights_and_gradients(s, dp, log, delta)
        if self.mistake == "hidden gradients":
            dp[hidden] = float("nan")
        if self.mistake == "weights of float32":
            s.copy_(s.float())
        if self.mistake == "no mean":
            dp += delta[..., None] * s


MISTAKES = {
    "one key more": "the sum of exp(s) is off",
    "scores of float32": "the sum of exp(s) is off",
    "sums of float32": "the sum of exp(s) is off",
    "a last block that is missing": "the sum of exp(s) v is off",
    "products of tf32": "the sum of exp(s) v is off",
    "weights of float32": "exp(s − log) is off",
    "no mean": "the gradient of s is off",
    "hidden gradients": "the gradient of s is off",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_kernels_are_told(mistake):
    assert in_one_pass.compare(Wrong(mistake), CPU).startswith(MISTAKES[mistake])


def test_right_kernels_pass():
    assert in_one_pass.compare(Kernels(), CPU) is None


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let the CPU count as a GPU on which a module stands for the kernels."""
    monkeypatch.setattr(torch.version, "hip", None)

    def install(module):
        module.triton = type("triton", (), {"__version__": "0.0"})
        name = "npattn.torch.engine.triton_kernels"
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(npattn.torch.engine, "triton_kernels", module, raising=False)
        return in_one_pass.kernels_on.__wrapped__(CPU)  # without what an earlier test found

    return install


def test_kernels_that_agree_are_used(on_a_gpu):
    kernels = Kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_a_gpu(kernels) is kernels


def test_kernels_that_do_not_agree_are_not_used(on_a_gpu):
    with pytest.warns(RuntimeWarning, match=r"torch alone on cpu.*the gradient of s is off by"):
        assert on_a_gpu(Wrong("no mean")) is None


def test_a_compiler_that_is_missing_is_said(on_a_gpu):
    kernels = Kernels()

    def fail(*arguments):
        raise RuntimeError("Failed to find C compiler")

    kernels.sum_exp = fail
    with pytest.warns(RuntimeWarning, match="RuntimeError: Failed to find C compiler"):
        assert on_a_gpu(kernels) is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), TypeError("a defect")])
def test_other_errors_are_not_hidden(on_a_gpu, error):
    kernels = Kernels()

    def fail(*arguments):
        raise error

    kernels.sum_exp = fail
    with pytest.raises(type(error)):
        on_a_gpu(kernels)


def test_a_gpu_without_room_stays_with_torch(on_a_gpu, monkeypatch):
    kernels = Wrong("no mean")
    kernels.LEAST = 2
    monkeypatch.setattr(kernels, "shared_memory", lambda device: 1)
    assert on_a_gpu(kernels) is None  # without a warning


def test_an_amd_gpu_stays_with_torch(on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert on_a_gpu(Wrong("no mean")) is None


# --- the kernels themselves -----------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="in a process of its own, below")
def test_kernels_agree_with_torch():
    from npattn.torch.engine import triton_kernels

    assert in_one_pass.compare(triton_kernels, CPU) is None


@pytest.mark.skipif(not INTERPRETED, reason="in a process of its own, below")
@pytest.mark.parametrize(("left", "right"), [(None, None), (3, None), (None, -2), (0, 0), (41, 37)])
def test_sums_of_strided_operands(left, right):
    from npattn.torch.engine import triton_kernels

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64).transpose(1, 2)

    q, k, v = normal(2, 131, 6, 3), normal(2, 67, 2, 3), normal(2, 67, 2, 17)
    out, total = triton_kernels.sum_exp(q, k, v, -5, left, right)
    expected_out, expected = Kernels().sum_exp(q, k, v, -5, left, right)
    size = Kernels().sum_exp(q, k, v.abs(), -5, left, right)[0]
    off = 128 * np.finfo(float).eps  # 67 keys, scores of three products, some as large as 10
    assert ((out - expected_out).abs() <= off * size).all()
    assert ((total - expected).abs() <= off * expected).all()
    assert not total.isnan().any()


@pytest.mark.unmeasured
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_the_interpreter_of_triton():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # The interpreter computes with NumPy, which warns where CUDA gives inf or NaN.
    command += ["-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
