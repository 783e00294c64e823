"""The arrows of the layout: who may import whom, and what `import npattn` costs."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import npattn

pytestmark = pytest.mark.unmeasured  # other tests run these lines

ROOT = Path(npattn.__file__).parent

# A module may import those of earlier lines, and of its own name's folder; never its own line.
LAYERS = (
    {"errors"},
    {"problem"},
    {"positions"},
    {"masks", "biases"},
    {"engines"},
    {"conventions"},
    {"profiles"},
    {"oracle"},
    {"certify", "cache", "multihead", "mistakes", "quantization"},
    {"variants", "weights"},
    {"__init__", "plot"},
    {"torch"},
    {"testing"},
    {"mutants"},
    {"cli"},
    {"__main__"},
)

# The same inside testing/, by folder or module.
TESTING_LAYERS = (
    {"levels", "excerpt", "parsing", "places", "power"},
    {"cases", "bounds", "adapters"},
    {"comparison", "targets"},
    {"gradients", "spot", "trial", "worker"},
    {"capabilities", "rules", "report"},
    {"device", "diagnosis"},
    {"reference"},
    {"runner", "difference", "variants", "dumps"},
    {"settings"},
    {"judging"},
    {"modules"},
    {"units", "suite", "session"},
    {"pytest_plugin"},
    {"extend", "strategies", "tolerance", "__init__"},
)

# Packages that are slow to load or not always there, and the only files that may import them.
CONFINED = {
    "torch": (
        "torch/",
        "mutants/tensors.py",
        "testing/adapters/child.py",
        "testing/adapters/modules.py",
        "testing/targets/torch.py",
        "testing/targets/cuda.py",
        "testing/targets/fla.py",
        "testing/targets/sageattention.py",
        "testing/targets/transformers.py",
        "testing/device/",
        "testing/dumps/",
        "testing/reference/dispatch.py",
        "weights/torch.py",
    ),
    "safetensors": ("testing/dumps/read.py", "weights/files.py"),
    "jax": ("testing/adapters/child.py", "testing/targets/equinox.py", "testing/targets/pallas.py",
            "testing/targets/flax.py", "testing/targets/haiku.py", "testing/targets/jax.py",
            "testing/targets/keras.py", "weights/equinox.py", "weights/flax.py"),
    "onnx": ("testing/targets/onnx.py",),
    "onnxruntime": ("testing/targets/onnxruntime.py",),
    "openvino": ("testing/targets/openvino.py",),
    "tensorflow": ("testing/targets/keras_others.py",),
    "paddle": ("testing/targets/paddle.py",),
    "tinygrad": ("testing/targets/tinygrad.py",),
    "ncnn": ("testing/targets/ncnn.py",),
    "xllamacpp": ("testing/targets/ggml.py",),
    "numpy_ml": ("testing/targets/numpy_public.py",),
    "neuralnetlib": ("testing/targets/numpy_public.py",),
    "neuralnetworknumpy": ("testing/targets/numpy_public.py",),
    "gpt2": ("testing/targets/numpy_public.py",),
    "hypothesis": ("testing/cases/strategies.py", "testing/runner/search.py"),
    "pytest": ("mutants/runs.py", "testing/pytest_plugin.py", "testing/suite.py"),
    "matplotlib": ("plot/",),
    "sklearn": (),
    "distributed": ("cli/cluster.py",),
    "rich": ("cli/", "testing/report/progress.py", "testing/report/report.py"),
    "click": ("cli/",),
    "jinja2": ("testing/report/markup.py",),
    "markupsafe": ("testing/report/markup.py",),
}  # fmt: skip

FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def layer(part, layers=LAYERS):
    return next((i for i, names in enumerate(layers) if part in names), None)


def part_of(file):
    """The name of a file in its list: "dense" for dense.py, "testing" for testing/x.py."""
    return file.split("/")[0].removesuffix(".py")


def imported(file, source):
    """Absolute names of what a file imports anywhere in it, `from a import b` as a.b."""
    package = ["npattn", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, node.module] if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def own_parts(file, source):
    """The parts of npattn that a file imports; a name that is no module is one of __init__'s."""
    for name in imported(file, source):
        first, *rest = name.split(".")
        if first == "npattn":
            yield rest[0] if rest and layer(rest[0]) is not None else "__init__"


def arrows_back(file, source):
    part = part_of(file)
    return [
        other for other in own_parts(file, source) if other != part and layer(other) >= layer(part)
    ]


def parts_of_testing(file, source):
    """The parts of npattn.testing that one of its files imports."""
    for name in imported(file, source):
        package, _, rest = name.partition("npattn.testing.")
        if not package and rest:
            part = rest.split(".")[0]
            yield part if layer(part, TESTING_LAYERS) is not None else "__init__"


def arrows_back_in_testing(file, source):
    part = part_of(file.removeprefix("testing/"))
    own = layer(part, TESTING_LAYERS)
    return [
        other
        for other in parts_of_testing(file, source)
        if other != part and layer(other, TESTING_LAYERS) >= own
    ]


def module_of(file):
    return "npattn." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def circles(sources):
    """Modules that import each other, directly or not; delayed imports count."""
    modules = {module_of(file): file for file in sources}
    arrows = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for name in imported(file, sources[file])
        }
        & (modules.keys() - {module})
        for module, file in modules.items()
    }
    while True:  # take away what imports nothing that is left
        free = {module for module, others in arrows.items() if not others & arrows.keys()}
        if not free:
            return sorted(arrows)
        arrows = {module: others for module, others in arrows.items() if module not in free}


def strays(file, source):
    packages = {name.split(".")[0] for name in imported(file, source)} & CONFINED.keys()
    return [p for p in sorted(packages) if not file.startswith(CONFINED[p])]


def by_file(find, files=FILES):
    """What a function finds in each file, where it finds something."""
    found = {file: find(file, (ROOT / file).read_text()) for file in files}
    return {file: names for file, names in found.items() if names}


def test_every_module_has_its_place_in_the_layers():
    """A new one is added to LAYERS, where its imports allow."""
    assert [file for file in FILES if layer(part_of(file)) is None] == []


@pytest.mark.thorough
def test_imports_never_point_back():
    assert by_file(arrows_back) == {}


@pytest.mark.thorough
def test_imports_inside_testing_never_point_back():
    """A new module is added to TESTING_LAYERS first."""
    inside = [file for file in FILES if file.startswith("testing/")]
    parts = {file: part_of(file.removeprefix("testing/")) for file in inside}
    assert [f for f, part in parts.items() if layer(part, TESTING_LAYERS) is None] == []
    assert by_file(arrows_back_in_testing, inside) == {}


@pytest.mark.thorough
def test_modules_do_not_import_each_other_in_circles():
    assert circles({file: (ROOT / file).read_text() for file in FILES}) == []


def test_a_circle_is_seen():
    late = "def f():\n    from npattn.testing.cases.recipe import Recipe"
    recipe, plain = "from npattn.testing.cases import distributions", "import numpy"
    sources = {
        "testing/cases/recipe.py": recipe,
        "testing/cases/distributions.py": late,
        "testing/cases/pairwise.py": "from npattn.testing.cases.recipe import Recipe",
        "problem/problem.py": plain,
    }
    names = [module_of(file) for file in sources][:3]  # the third imports the circle
    assert circles(sources) == sorted(names)
    assert circles(sources | {"testing/cases/distributions.py": plain}) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("testing/cases/recipe.py", "from npattn.testing.trial import Trial"),
        ("testing/trial.py", "from npattn.testing.rules import PROPERTIES"),
        ("testing/rules/hidden.py", "from npattn.testing import check"),
        ("testing/report/report.py", "def f():\n    from npattn.testing.runner import search"),
        ("testing/capabilities.py", "from npattn.testing.report.outcome import Outcome"),
    ],
)
def test_an_arrow_back_inside_testing_is_seen(file, source):
    assert arrows_back_in_testing(file, source)


def test_the_package_imports_no_benchmark():
    assert (
        by_file(lambda f, s: [n for n in imported(f, s) if n.split(".")[0] == "benchmarks"]) == {}
    )


def test_the_judge_imports_no_mistake():
    """Causes are read from the function under test, and looked up in no list."""

    def mistakes(file, source):
        return [n for n in imported(file, source) if n.startswith("npattn.mistakes")]

    assert mistakes("testing/judging.py", "from ..mistakes import MISTAKES")
    assert by_file(mistakes, [file for file in FILES if file.startswith("testing/")]) == {}


@pytest.mark.thorough
def test_heavy_packages_stay_where_they_belong():
    assert by_file(strays) == {}


def test_loops_shares_no_code_with_the_other_oracle():
    file = "engines/loops.py"
    names = [n for n in imported(file, (ROOT / file).read_text()) if n.startswith("npattn.")]
    assert {n.split(".")[1] for n in names} <= {"errors", "problem"}
    shared = {n for n in names if n.startswith("npattn.problem.arrays")}
    assert shared <= {"npattn.problem.arrays.Array"}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("problem/problem.py", "from npattn.engines.dense import forward"),
        ("problem/problem.py", "from npattn import oracle"),
        ("masks/mask.py", "import npattn.engines.loops"),
        ("engines/dense.py", "from npattn import attention"),
        ("engines/dense.py", "from .. import conventions"),
        ("engines/dense.py", "def f():\n    from ..testing import check"),
        ("__init__.py", "from npattn.testing import check"),
        ("testing/judging.py", "from ..cli import main"),
    ],
)
def test_an_arrow_back_is_seen(file, source):
    assert arrows_back(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engines/dense.py", "from npattn.problem import Problem"),
        ("testing/judging.py", "from npattn.testing.report.report import Report"),
        ("testing/judging.py", "from . import report\nfrom .. import attention"),
        ("cli.py", "import npattn\nfrom npattn import testing"),
    ],
)
def test_an_arrow_forward_is_let_through(file, source):
    assert arrows_back(file, source) == []


@pytest.mark.parametrize(
    ("file", "source", "stray"),
    [
        ("testing/judging.py", "import torch.nn", ["torch"]),
        ("oracle/api.py", "def f():\n    from hypothesis import given", ["hypothesis"]),
        ("testing/targets/torch.py", "import torch", []),
        ("torch/__init__.py", "import torch", []),
        ("weights.py", "import npattn.torch", []),
    ],
)
def test_a_stray_import_is_seen(file, source, stray):
    assert strays(file, source) == stray


# --- what `import npattn` costs -------------------------------------------------------------------


def in_a_fresh_interpreter(code):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_import_loads_nothing_heavy():
    loaded = in_a_fresh_interpreter("import sys, npattn; print(*sys.modules)").split()
    assert "numpy" not in loaded
    code = "import sys, npattn; npattn.attention; print(*sys.modules)"
    loaded = in_a_fresh_interpreter(code).split()
    assert "npattn.engines.dense" in loaded
    assert set(loaded).isdisjoint(
        {"torch", "jax", "hypothesis", "matplotlib", "rich", "click", "jinja2", "pytest"}
    )


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"numpy", "npattn.testing.judging", "npattn.cli.check"}),
        (["explain", "agreement-o"], {"npattn.testing.units", "npattn.cli.cluster"}),
        (
            ["check", "numpy.flash", "--in-process", "--only", "agreement-o", "--examples", "3"],
            {f"npattn.testing.{x}" for x in ("modules", "units", "reference", "gradients")}
            | {"npattn.testing.dumps", "npattn.testing.diagnosis"},
        ),
    ],
)
def test_commands_load_what_they_run(arguments, absent):
    code = f"""
import sys
from npattn.cli import cli
try:
    cli({arguments!r})
except SystemExit:
    print(*sys.modules)
"""
    loaded = in_a_fresh_interpreter(code).splitlines()[-1].split()
    assert "npattn.cli" in loaded
    heavy = {"scipy", "hypothesis", "torch", "jax", "rich.progress", "jinja2", "email"}
    assert set(loaded).isdisjoint(absent | heavy)


def test_reading_a_signature_needs_no_hypothesis():
    code = "import sys, npattn.testing.adapters.signature; print(*sys.modules)"
    loaded = in_a_fresh_interpreter(code).split()
    assert set(loaded).isdisjoint({"torch", "hypothesis", "rich", "click"})


@pytest.mark.parametrize("name", ["npattn", "npattn.testing", "npattn.torch"])
def test_names_of_a_door_are_those_of_its_stub(name):
    """Each can be had, and is no module of the name of a function."""
    module = importlib.import_module(name)
    assert [n for n in dir(module) if not hasattr(module, n)] == []
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())
    written = [a.asname for x in stub.body if isinstance(x, ast.ImportFrom) for a in x.names]
    written += [x.targets[0].id for x in stub.body if isinstance(x, ast.Assign)]
    assert sorted(written) == sorted(dir(module))
    assert set(module.__all__) == set(written) - {"plot", "torch"}  # which need a package
    folder = Path(module.__file__).parent
    shadowed = [n for n in written if (folder / f"{n}.py").exists() or (folder / n).is_dir()]
    assert [n for n in shadowed if not isinstance(getattr(module, n), ModuleType)] == []


def test_what_is_not_there_is_said():
    with pytest.raises(AttributeError, match="No npattn attribute atention"):
        npattn.atention  # noqa: B018


@pytest.mark.thorough
def test_import_takes_at_most_twice_the_time_of_numpy():
    """Processor time of both in one interpreter: a slow or busy machine slows both down."""
    own = "import numpy; b = t(); import npattn; npattn.attention; print((t() - b) / (b - a))"
    code = f"from time import process_time as t; a = t(); {own}"
    assert min(float(in_a_fresh_interpreter(code)) for _ in range(10)) < 2
