"""Every surveyed feature runs forward and backward, on arrays and on tensors."""

import ast

import numpy as np
import pytest

from npattn import biases
from npattn.engines import loops
from npattn.problem import Problem
from npattn.testing.comparison import compare_arrays
from npattn.testing.tolerance import allowed
from tests.backends import NumPy, Torch
from tests.features.rows import ROWS, arrays
from tests.features.table import PAGE, ROOT, find_tests, make_page

pytestmark = pytest.mark.unmeasured  # other tests run these lines

SURVEYED = 54
PROBLEMS = [pytest.param(row, id=row.name) for row in ROWS if row.options is not None]
GRADIENTS = ("q", "k", "v", "bias", "sinks", "gate")


def evaluate(row, backend):
    """Compare the results and gradients of a row with those of the loops."""
    conventions = row.conventions
    alignment = None if conventions is None else conventions.causal
    problem = Problem(**(arrays() | row.options), alignment=alignment)
    run = backend.evaluate(problem, conventions)
    rng = np.random.default_rng(7)
    names = ("out", "lse", "weights")
    cotangents = [rng.standard_normal(getattr(run, name).shape) for name in names]
    grads = run.backward(*cotangents)
    out, lse, weights = loops.forward(problem, conventions)
    wanted = loops.backward(problem, *cotangents, conventions)
    room = allowed(
        problem.materialise(), np.float64, None, conventions=conventions,
        **dict(zip(("dout", "dlse", "dweights"), cotangents, strict=True)),
    )  # fmt: skip
    exact = {"o": out, "lse": lse, "weights": weights}
    got = {"o": run.out, "lse": run.lse, "weights": run.weights}
    for name in GRADIENTS:
        if getattr(wanted, name) is not None:
            exact[f"d{name}"], got[f"d{name}"] = getattr(wanted, name), getattr(grads, name)
    if isinstance(problem.bias, biases.Bias):  # the loops know the array, and not its parameter
        exact["dbias"] = problem.bias.gradient(exact["dbias"])
        room["dbias"] = abs(problem.bias.gradient(room["dbias"]))
    for name, want in exact.items():
        assert got[name].shape == want.shape, name
        comparison = compare_arrays(name, got[name], want, room[name])
        assert comparison.passed, str(comparison)


@pytest.mark.parametrize("row", PROBLEMS)
def test_arrays_agree_with_the_loops(row):
    evaluate(row, NumPy("dense"))


@pytest.mark.parametrize("row", PROBLEMS)
def test_tensors_agree_with_the_loops(row):
    evaluate(row, Torch("cpu"))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_every_row_is_run_by_tests_of_the_ordinary_suite(kind):
    for row in ROWS:
        names = find_tests(row, kind)
        assert names, row.name
        for name in names:
            path, function = name.split("::")
            tree = ast.parse((ROOT / path).read_text())
            test = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}[function]
            marks = "".join(ast.unparse(d) for d in test.decorator_list)
            assert "nightly" not in marks, name
            assert "skip" not in marks, name


def test_every_surveyed_feature_has_a_row():
    assert len({row.name for row in ROWS}) == len(ROWS) == SURVEYED


def test_the_page_is_current():
    assert PAGE.read_text() == make_page(), "run: python -m tests.features"
