"""Targets by name and by import path, and errors for unknown ones."""

import itertools
import math
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import npattn
from npattn.conventions import Conventions
from npattn.errors import MissingExtraError, OptionError
from npattn.oracle.api import evaluate
from npattn.problem import Cotangents
from npattn.profiles import PROFILES
from npattn.testing import Implementation, ImplementationError, Recipe, check
from npattn.testing.diagnosis.fingerprint import fingerprint_first
from npattn.testing.targets import TARGETS, Target, load, load_implementation, numpy_public
from npattn.testing.targets.environments import choose_python
from npattn.testing.targets.numpy import flash, flash_backward
from npattn.testing.worker.connect import connect
from npattn.testing.worker.supervisor import Limits

TORCH = ("torch", "npattn", "keras.torch", "fla.", "sageattention", "transformers")
JAX = ("jax", "flax", "haiku", "equinox", "keras.jax", "pallas")


def package(target):
    """Return the package whose arrays a target takes, by the beginning or the end of its name."""
    if target.device == "cuda" or target.name.startswith(TORCH) or target.name.endswith("-torch"):
        return "torch"
    return "jax" if target.name.startswith(JAX) or target.name.endswith("-jax") else "numpy"


TAKES = {name: package(target) for name, target in TARGETS.items()}


def test_every_target_has_name_conventions_and_description():
    for name, target in TARGETS.items():
        assert target.name == name
        assert isinstance(target.conventions, Conventions)
        assert len(target.about) > 20
    assert TARGETS["torch.sdpa"].profile is PROFILES["torch.sdpa"]
    assert TARGETS["torch.sdpa"].conventions == Conventions(causal="top_left")


@pytest.mark.parametrize(
    "name", [n for n, one in TARGETS.items() if not one.drop_in and not one.environment]
)
def test_every_available_target_is_an_implementation(name):
    if not TARGETS[name].runs_here:
        pytest.skip(f"{TARGETS[name].lacks}")
    read = load_implementation(name)
    assert read.untested == ()
    assert read.framework.name == TAKES[name]
    assert read.features


def test_flash_comes_with_its_backward_and_naive_without():
    assert load("numpy.flash") == (flash, flash_backward)
    assert load("numpy.naive")[1] is None
    assert TARGETS["numpy.flash"].runs_here


MEAN = """
def f(q, k, v):
    return (factor * v.mean(-2, keepdims=True) + 0 * q).astype(q.dtype)
"""
HOME = "npattn.testing.targets.numpy"


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Add a target of the name x.f, of a module that is in tmp_path or anywhere else."""
    monkeypatch.setattr("npattn.testing.targets.target.DRIVER", tmp_path / "none")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def add(module, needs=(), function="f", **more):
        one = Target("x.f", module, function, None, needs, PROFILES["npattn"], "no use", **more)
        monkeypatch.setitem(TARGETS, "x.f", one)
        return one

    return add


@pytest.mark.parametrize(
    ("needs", "more", "message"),
    [
        (("absent_package",), {}, r"absent_package.*npattn\[absent_pack"),
        (("numpy",), {"pip": ("numpy==1.26.4",)}, r"numpy 1\.26\.4, and .* 'numpy==1\.26\.4'"),
        ((), {"pip": ("absent-one[x]==2",)}, r"absent-one 2, which is not installed: pip install"),
        (("numpy",), {"pip": ("numpy>=1", f"numpy=={np.__version__}")}, None),
        (("numpy",), {"device": "cuda"}, "an NVIDIA GPU, and there is none here"),
    ],
)
def test_what_a_target_lacks_is_said(own, needs, more, message):
    one = own(HOME, needs, "flash", **more)
    assert one.runs_here == (message is None)
    if message is None:
        assert load("x.f")[0] is flash
    else:
        with pytest.raises(MissingExtraError, match=f"x.f needs {message}"):
            load("x.f")


def test_variables_of_a_target_are_set_in_its_worker_and_nowhere_else(own, monkeypatch, tmp_path):
    module = tmp_path / "reads_a_variable.py"
    module.write_text("import os\nfactor = float(os.environ['FACTOR_OF_THIS_TEST'])\n" + MEAN)
    own("reads_a_variable", environment={"FACTOR_OF_THIS_TEST": "3"})
    with pytest.raises(OptionError, match=r"x\.f needs FACTOR_OF_THIS_TEST=3 in the environment"):
        load("x.f")
    remote = connect("x.f")
    q = np.ones((2, 3, 5, 7), np.float32)
    np.testing.assert_array_equal(remote.forward(npattn.Problem(q, q, q))["o"], 3 * q)
    remote.worker.close()
    assert "FACTOR_OF_THIS_TEST" not in os.environ
    monkeypatch.setenv("FACTOR_OF_THIS_TEST", "3")
    assert load("x.f")[0](q, q, q)[0, 0, 0, 0] == 3


@pytest.mark.thorough
def test_a_worker_has_the_time_and_says_the_versions_of_its_target(own, tmp_path):
    module = tmp_path / "says_its_version.py"
    module.write_text("__version__ = '7.11'\nfactor = 3\n" + MEAN)
    needs = ("says_its_version", "numpy", "never_imported")
    lacks = own(needs[0], needs, timeout=5).lacks
    assert lacks.startswith("never_imported, which is not installed: pip install 'npattn[says")
    own(needs[0], needs[:2], timeout=5)
    remote, other = connect("x.f"), connect("x.f", limits=Limits(timeout=7))
    assert (remote.worker.limits.timeout, other.worker.limits.timeout) == (5, 7)
    assert remote.versions["says_its_version"] == "7.11"
    assert remote.versions["numpy"] == np.__version__
    remote.worker.close()
    other.worker.close()


@pytest.mark.parametrize(
    ("package", "module", "message"),
    [
        ("torch", "torch", "torch targets need torch; npattn itself does not: pip install"),
        ("equinox", "equinox", "the target equinox needs equinox; npattn itself does not: pip"),
        ("mlx", "mlx", "the target mlx needs mlx; npattn itself does not: pip install"),
        ("haiku", "haiku", "the target haiku needs dm-haiku; npattn itself does not: pip install"),
        ("flax", "flax", "Flax targets need flax; npattn itself does not: pip install"),
        ("jax", "jax", "the target jax.nn needs jax; npattn itself does not: pip install"),
        ("onnx", "onnx", "ONNX targets need onnx; npattn itself does not: pip install"),
        ("onnxruntime", "onnxruntime", "ONNX targets need|onnxruntime needs onnxruntime"),
        ("openvino", "openvino", "the target openvino needs openvino; npattn itself does not: pip"),
        ("paddle", "paddle", "the target paddle needs paddlepaddle; npattn itself does not: pip"),
        ("tinygrad", "tinygrad", "the target tinygrad needs tinygrad; npattn itself does not: pip"),
        ("ncnn", "ncnn", "the target ncnn needs ncnn; npattn itself does not: pip install ncnn"),
        ("xllamacpp", "ggml", "the target ggml.flash needs xllamacpp; npattn itself does not: pip"),
        ("keras", "keras_others", "targets of Keras need keras; npattn itself does not: pip"),
    ],
)
@pytest.mark.unmeasured
def test_import_without_package_names_extra(package, module, message):
    code = f"import sys; sys.modules[{package!r}] = None; import npattn.testing.targets.{module}"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert re.search(message, process.stderr)


# --- targets by import path -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def test_function_loads_from_file_and_module(folder):
    (folder / "own_one.py").write_text(
        "class A:\n    @staticmethod\n    def f(q, k, v): return q\n"
    )
    for spec in ("own_one.py:A.f", f"{folder}/own_one.py:A.f", "own_one:A.f"):
        f, backward = load(spec)
        assert f(1, 2, 3) == 1
        assert backward is None


def test_module_is_loaded_once(folder):
    (folder / "own_two.py").write_text("def f(): return g\ndef g(): pass\n")
    assert load("own_two:f")[0]() is load("own_two:g")[0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("numpy.flach", r"must be module:function.*did you mean numpy.flash\?"),
        ("zzz", r"TARGET is 'zzz', must be .* or a name that npattn list shows$"),
        (":f", "must be module:function"),
        ("own_three:", "must be module:function"),
        ("absent.py:f", r"^there is no file 'absent.py' \[in .*\]"),
        ("absent:f", "^there is no module 'absent' "),
        ("absent.inside:f", "^there is no module 'absent.inside' "),
        ("own_three.py:g", "has no callable 'g', it has f$"),
        ("own_three.py:number", "has no callable 'number'"),
        ("own_three.py:f.g.h", "has no callable 'f.g.h'"),
        ("own_three.py:_A", "_A is a class, must be a function: give an instance a name"),
        ("own_three.py:_F", r"_F is a torch.autograd.Function, must be .*: pass own.*:_F\.apply$"),
        ("own_three.py:_A.f", "_A.f is a method of a class, must be a function: give an inst"),
        ("own_exit.py:f", r"ends itself when it is imported \(SystemExit: 3\): keep what"),
        ("own_exit:f", r"ends itself when it is imported \(SystemExit: 3\): keep what"),
    ],
)
def test_unknown_target_error_lists_targets(folder, spec, message):
    (folder / "own_three.py").write_text(
        "number = 3\ndef f(q, k, v): return q\ndef _g(): pass\n"
        "class _A:\n    def f(self, q, k, v): return q\n_a = _A()\n"
        "class _Function: pass\n_Function.__name__ = 'Function'\n"
        "_Function.__module__ = 'torch.autograd.function'\nclass _F(_Function): pass\n"
    )
    (folder / "own_exit.py").write_text("raise SystemExit(3)\n")
    assert load("own_three.py:_a.f")[0](2, 3, 5) == 2
    with pytest.raises(OptionError, match=message):
        load(spec)


def test_import_error_inside_module_passes_through(folder):
    (folder / "own_four.py").write_text("import absent_dependency\ndef f(q, k, v): return q\n")
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        load("own_four:f")
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        load("own_four.py:f")


def test_file_imports_its_neighbour(folder):
    inner = folder / "kernels"
    inner.mkdir()
    (inner / "own_helper.py").write_text("def f(q, k, v): return q\n")
    (inner / "own_five.py").write_text("from own_helper import f\n")
    assert load("kernels/own_five.py:f")[0](1, 2, 3) == 1


@pytest.mark.parametrize("name", ["csv", "hypothesis"])
def test_file_named_like_installed_module_is_not_taken_for_it(folder, name):
    (folder / f"{name}.py").write_text(f"import {name}\ndef f(q, k, v): return {name}\n")
    f, _ = load(f"{name}.py:f")
    other = f(1, 2, 3)
    assert other.__file__ != str(folder / f"{name}.py")
    assert f.__module__ != name
    assert load(f"{name}.py:f")[0] is f


def test_files_of_the_same_name_are_loaded_apart(folder):
    for place, value in (("one", 1), ("two", 2)):
        (folder / place).mkdir()
        (folder / place / "own_six.py").write_text(f"def f(q, k, v): return {value}\n")
    assert load("one/own_six.py:f")[0](0, 0, 0) == 1
    assert load("two/own_six.py:f")[0](0, 0, 0) == 2


WHOLE = """
from npattn.testing import Implementation
from npattn.testing.targets.numpy import flash, flash_backward

def attend(q, k, v, cap=None):
    return flash(q, k, v, softcap=cap)

mine = Implementation(attend, rename={"cap": "softcap"}, name="other", framework="numpy")
"""


def test_implementation_is_a_target(folder):
    (folder / "own_seven.py").write_text(WHOLE)
    read = load_implementation("own_seven.py:mine")
    assert read.features == {"softcap"}
    assert (read.name, read.spec) == ("own_seven.py:mine", "own_seven.py:mine.f")
    again = pickle.loads(pickle.dumps(read))
    assert again.f is read.f
    with pytest.raises(OptionError, match="got like, rename beside own_seven"):
        load_implementation("own_seven.py:mine", like="torch.sdpa", rename={"cap": "softcap"})


def test_target_stands_in_for_system(folder):
    (folder / "own_eight.py").write_text("def f(q, k, v, window_size=(-1, -1)): return q\n")
    read = load_implementation("own_eight.py:f", like="flash_attn", framework="numpy")
    assert (read.layout, read.features) == ("BTHD", {"window"})
    assert read.conventions.lse_empty == math.inf
    renamed = load_implementation("numpy.flash", rename={"causal": "causal"})
    assert renamed.conventions == TARGETS["numpy.flash"].conventions


# --- functions of libraries, called as their profile says -----------------------------------------


@pytest.fixture
def judged_apart(request):
    """A target in a worker, which ends with the test; .ci/nightly has a folder of environments."""
    target, envs = TARGETS[request.param], os.environ.get("NPATTN_ENVS")
    apart = envs is not None and target.can_be_installed and not target.install
    if not target.runs_here and not apart:
        pytest.skip(f"{target.name} needs {target.lacks}")
    python = None if envs is None else choose_python(target, Path(envs))
    remote = connect(target.name, python=python)
    yield remote
    remote.worker.close()


FORWARD_ONLY = {
    "torch.flex": "does not support backward on CPU",
    "torch.flex-compiled": "does not support backward on CPU",
    "torch.mha-fast": "its result does not require grad",
}
DROP_INS = [name for name, target in TARGETS.items() if target.drop_in]
APART = [*DROP_INS, *(n for n, one in TARGETS.items() if one.pip and not one.drop_in), "onnx.body"]
# Of sizes of their own: see test_interpreted.
SIZED = ("pallas.gpu-paged", "pallas.tpu-paged", "sageattention")
IN_PROCESS = ("torch.nested", "torch.mha-sdpa", "torch.mha-fast")  # the gate asks them below
COMPILED = ("torch.flex-compiled",)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "judged_apart",
    # The fully masked rows of paddle depend on the size.
    [name for name in APART if name not in ("paddle", *COMPILED, *SIZED)],
    indirect=True,
)
def test_fingerprint_of_a_library_is_its_profile(judged_apart):
    found = fingerprint_first([judged_apart])
    assert TARGETS[judged_apart.name].profile.name in found.profiles, str(found)


@pytest.mark.parametrize(
    "judged_apart",
    [
        pytest.param(n, marks=pytest.mark.nightly if n in IN_PROCESS + COMPILED else ())
        for n in APART
        if n not in SIZED
    ],
    indirect=True,
)
@pytest.mark.broad
def test_library_agrees_with_npattn(judged_apart):
    remote, target = judged_apart, TARGETS[judged_apart.name]
    assert remote.framework.name == TAKES[target.name]
    assert (remote.layout, remote.conventions) == (target.profile.layout, target.conventions)
    options = {"scale": 0.5, "causal": True, "mask": "padding", "sinks": "normal"}
    if target.name in ("equinox", "onnx.reference@1.18"):  # a mask is (T, S)
        options["mask"] = "matrix"
    taken = {n: x for n, x in options.items() if n in remote.features}
    refused = target.profile.refused_names
    if target.name == "keras.torch" or "mask+causal" in refused:
        taken.pop("causal", None)
    D = 16 if "D % 8" in refused else 11
    S = 5 if "T != S" in refused else 7
    recipe = Recipe(lead=(2,), H=3, K=3, T=5, S=S, D=D, E=D, seed=2, **taken)
    problem = recipe.problem(remote.conventions.causal, remote.conventions.mask_true)
    cotangents = Cotangents(recipe.cotangents(problem).dout, None)
    fwd, grads = exact_results(problem, cotangents, remote.conventions)
    np.testing.assert_allclose(remote.forward(problem)["o"], fwd.out, atol=1e-5)
    assert remote.has_gradients == (TAKES[target.name] != "numpy" or target.backward is not None)
    if target.name in FORWARD_ONLY:
        with pytest.raises(ImplementationError, match=FORWARD_ONLY[target.name]):
            remote.gradients(problem, cotangents)
    elif remote.has_gradients:
        for name, array in remote.gradients(problem, cotangents).items():
            np.testing.assert_allclose(array, grads[name], atol=1e-5, err_msg=name)


def test_drop_in_is_read_by_its_profile_here_too():
    pytest.importorskip("torch")
    read = load_implementation("torch.flex")
    assert (read.profile, read.features) == (PROFILES["flex"], {"scale", "score_mod"})
    told = load_implementation("torch.flex", like="flash_attn")
    assert told.profile is PROFILES["flash_attn"]


def test_picogpt_is_called_with_one_head_at_a_time(monkeypatch):
    calls = []

    def attention(q, k, v, mask):
        calls.append((q.shape, k.shape, v.shape, mask.shape))
        return npattn.attention(q, k, v, bias=mask)

    monkeypatch.setitem(sys.modules, "gpt2", types.SimpleNamespace(attention=attention))
    problem = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13, mask="padding", seed=2).problem()
    read = Implementation(numpy_public.picogpt, like="picogpt")
    exact = evaluate(problem, read.conventions).out
    np.testing.assert_allclose(read.forward(problem)["o"], exact, atol=1e-5)
    assert calls[-6:] == [((5, 11), (7, 11), (7, 13), (5, 7))] * 6


KERAS = """
import os
from npattn.testing.targets.keras import on_numpy
import numpy as np
one = np.ones((1, 1, 1, 1), np.float32)
assert on_numpy(one, one, one).ravel() == 1
assert "KERAS_BACKEND" not in os.environ
from npattn.errors import OptionError
from npattn.testing.targets.keras import on_jax
try:
    on_jax(1, 2, 3)
except OptionError as err:
    assert "has loaded it with numpy: judge it in a process of its own" in str(err)
else:
    raise AssertionError("it was called")
"""


def test_keras_with_another_backend_is_an_error():
    if not TARGETS["keras.numpy"].runs_here:  # to import it here needs its default backend
        pytest.skip("keras is not installed")
    environment = {name: x for name, x in os.environ.items() if name != "KERAS_BACKEND"}
    subprocess.run([sys.executable, "-c", KERAS], check=True, env=environment)


# --- torch ----------------------------------------------------------------------------------------

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 11, 13
SIZES = {"lead": (B,), "H": H, "K": K, "T": T, "S": S, "D": D, "E": E, "dtype": "float64"}
ON = {"mask": "padding", "causal": True, "bias": "full", "scale": 0.5}
COMBINATIONS = [
    {name: ON[name] for name in names} for n in range(4) for names in itertools.combinations(ON, n)
]


RAGGED = [
    pytest.param(name, options, marks=pytest.mark.thorough)
    for name in IN_PROCESS
    for options in ({}, {"mask": "left padding"})
]


def exact_results(problem, cotangents, conventions):
    fwd = evaluate(problem, conventions)
    grads = npattn.backward(fwd, cotangents.dout.astype(float))
    names = ("q", "k", "v", "bias", "sinks")
    return fwd, {f"d{n}": x for n in names if (x := getattr(grads, n)) is not None}


def assert_all_agree(name, sizes, options, atol):
    """Compare all results of a target in this process, and its gradients if it has them."""
    read = load_implementation(name)
    recipe = Recipe(**sizes, **options)
    problem = recipe.problem(read.conventions.causal, read.conventions.mask_true)
    cotangents = Cotangents(recipe.cotangents(problem).dout, None)
    fwd, grads = exact_results(problem, cotangents, read.conventions)
    results = read.forward(problem)
    for got, array in results.pairs:
        exact = {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}[got]
        np.testing.assert_allclose(array, exact, atol=atol, err_msg=got)
    if name in FORWARD_ONLY:
        with pytest.raises(ImplementationError, match=FORWARD_ONLY[name]):
            read.gradients(problem, cotangents)
    elif read.has_gradients:
        got = dict(read.gradients(problem, cotangents).pairs)
        assert set(got) == set(grads)
        for gradient, array in got.items():
            np.testing.assert_allclose(array, grads[gradient], atol=atol, err_msg=gradient)
    return set(results)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("name", "options"),
    [*itertools.product(("torch.sdpa", "torch.sdpa-math"), COMBINATIONS), *RAGGED],
    ids=lambda x: x if isinstance(x, str) else "+".join(x) or "plain",
)
def test_torch_agrees_with_npattn_in_float64(name, options):
    pytest.importorskip("torch")
    sizes = SIZES
    if name in IN_PROCESS:
        square = "T != S" in TARGETS[name].profile.refused_names
        sizes = SIZES | {"H": 3, "K": 3, "E": D, "S": T if square else S}
    assert "o" in assert_all_agree(name, sizes, options, 1e-12)


@pytest.mark.parametrize("shape", ["rank 2", "one head each"])
def test_torch_takes_heads_that_are_not_shared(shape):
    pytest.importorskip("torch")
    sizes = {"H": 1, "K": 1, "lead": None} if shape == "rank 2" else {"H": 3, "K": 3}
    problem = Recipe(**(SIZES | sizes)).problem()
    out = Implementation(load("torch.sdpa")[0]).forward(problem)["o"]
    np.testing.assert_allclose(out, npattn.attention(problem.q, problem.k, problem.v), atol=1e-12)


def test_torch_math_passes_ordinary_problems_in_float64():
    pytest.importorskip("torch")
    f, _ = load("torch.sdpa-math")
    report = check(
        f,
        conventions=PROFILES["torch.sdpa"].conventions,
        dtypes=("float64",),
        sizes={"H": (4,), "K": (2,), "B": (2,), "T": (3, 5), "S": (5, 7)},
        only=["agreement", "shape-dtype", "views", "inputs-unchanged"],
        examples=6,
    )
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.nested", "query must have 4 axes here, got 3"),
        ("torch.mha-sdpa", "query must have 4 axes here, got 3"),
        ("torch.mha-fast", r"must be \(B, H, T, D\), of one shape"),
    ],
)
def test_torch_path_refuses_rank_3(name, message):
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=message):
        load(name)[0](*[torch.ones(3, 5, 7)] * 3)


def test_ragged_batch_refuses_mask_of_queries():
    torch = pytest.importorskip("torch")
    q = torch.ones(2, 3, 5, 7)
    with pytest.raises(ValueError, match="the same keys for all heads and queries"):
        load("torch.nested")[0](q, q, q, torch.ones(5, 5, dtype=torch.bool))


def test_fast_path_of_multihead_is_taken(monkeypatch):
    torch = pytest.importorskip("torch")
    native, calls = torch._native_multi_head_attention, []

    def count(*args):
        calls.append(args)
        return native(*args)

    monkeypatch.setattr(torch, "_native_multi_head_attention", count)
    attend = load("torch.mha-fast")[0]
    q = torch.ones(2, 3, 5, 7)
    assert torch.equal(attend(q, q, q), q)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="attn_mask must be one for all heads"):
        attend(q, q, q, torch.zeros(3, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="more than are asked of it here, or none"):
        attend(*[torch.ones(1, 2, 1, 1031)] * 3)
    with pytest.raises(ValueError, match="more than are asked of it here, or none"):
        attend(*[torch.ones(1, 2, 1, 0)] * 3)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # it says why no kernel is available
def test_flash_backend_is_held_to():
    torch = pytest.importorskip("torch")
    attend = load("torch.sdpa-flash")[0]
    q = torch.ones(2, 3, 5, 7)
    torch.testing.assert_close(attend(q, q, q, causal=True), q)
    with pytest.raises(RuntimeError, match="No available kernel"):
        attend(q[0], q[0], q[0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_compiled_flex_attention_is_compiled_once(monkeypatch):
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import flex_attention

    from npattn.testing.targets import torch as targets

    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **more: compiled.append(f) or f)
    targets._compile.cache_clear()
    q = torch.ones(2, 3, 5, 7)
    for _ in range(2):
        torch.testing.assert_close(targets.flex_compiled(q, q, q, scale=0.5), q)
    targets._compile.cache_clear()
    assert compiled.count(flex_attention) == 1  # it compiles a part of its own


# --- JAX and ONNX ---------------------------------------------------------------------------------

EQUAL = {"lead": (B,), "H": H, "K": K, "T": T, "S": S, "D": D, "E": D}
FULL = {
    "plain": {},
    "mask and bias": {"mask": "padding", "bias": "full"},
    "causal": {"causal": True, "scale": -0.75},
    "window": {"window": (2, None), "bias": "heads"},
    "softcap": {"softcap": 2.0, "bias": "one a row"},
    "mask a row": {"mask": "matrix", "scale": 0.0, "bias": "keys"},
    "empty rows": {"mask": "empty rows", "scale": -0.75},
}
BESIDE_O = {"jax.nn": "lse", "onnx.reference": "weights", "onnxruntime": "weights"}


@pytest.mark.parametrize("options", FULL)
@pytest.mark.parametrize("name", BESIDE_O)
def test_library_agrees_with_npattn_in_every_option(name, options):
    pytest.importorskip(TARGETS[name].needs[0])
    kwargs = FULL[options]
    if not set(kwargs) - {"S"} <= load_implementation(name).features:
        pytest.skip(f"{name} lacks an option of {', '.join(kwargs)}: other rows have the rest")
    sizes = EQUAL if name == "jax.nn" else EQUAL | {"E": E}
    assert {"o", BESIDE_O[name]} <= assert_all_agree(name, sizes, kwargs, 1e-5)


def test_jax_gives_mean_of_values_in_fully_masked_row():
    pytest.importorskip("jax")
    read = load_implementation("jax.nn")
    problem = Recipe(**EQUAL, mask="empty rows").problem(read.conventions.causal)
    results, fwd = read.forward(problem), evaluate(problem, read.conventions)
    empty = ~np.broadcast_to(problem.mask, (B, H, T, S)).any(-1)
    assert empty.any()
    mean = np.repeat(problem.v.mean(-2, keepdims=True), H // K, axis=1)
    np.testing.assert_allclose(
        results["o"][empty], np.broadcast_to(mean, results["o"].shape)[empty], atol=1e-5
    )
    np.testing.assert_allclose(results["o"], fwd.out, atol=1e-5)
    np.testing.assert_allclose(results["lse"], fwd.lse, rtol=1e-6)


def test_no_heads_do_not_end_the_process():
    pytest.importorskip("onnxruntime")
    none = np.zeros((2, 0, 3, 5), np.float32)
    with pytest.raises(ValueError, match="no heads: ONNX Runtime divides by their number"):
        load("onnxruntime")[0](none, none, none)


def test_onnx_model_has_one_node_and_is_cached():
    pytest.importorskip("onnx")
    from npattn.testing.targets import onnx

    types = (("Q", np.dtype("f4")), ("K", np.dtype("f4")), ("V", np.dtype("f4")))
    made = onnx.model(24, types, False, is_causal=1)
    assert [node.op_type for node in made.graph.node] == ["Attention"]
    assert made.opset_import[0].version == 24
    assert onnx._start_25(types, False) is onnx._start_25(types, False)
