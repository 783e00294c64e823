"""What f and g may be: of two libraries, with modules, casts, refusals, and other results."""

import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.testing import check
from npattn.testing.reference.amount import describe_amount
from npattn.testing.reference.copies import convert_modules

torch = pytest.importorskip("torch")
F = torch.nn.functional
QUICK = {"examples": 4, "progress": False, "shrink": False, "diagnosis": False}
ROWS = {"x": "B C"}


def ask(f, g, inputs=ROWS, **changes):
    return check(f, reference=g, inputs=inputs, **{**QUICK, **changes})


def test_options_have_any_number_of_values():
    def f(x, step=1):
        return x * (1.0 if step == 1 else 2.0)

    report = ask(f, lambda x, step=1: x * 1, options={"step": (1, 2, 10)}, framework="numpy",
                 reference_framework="numpy", examples=12, shrink=True, diagnosis=True)  # fmt: skip
    assert report.causes[0].passes_when == "fails only where step > 1"


def test_condition_on_two_sizes_is_found():
    def f(x):
        return x * x if x.shape[0] % 4 and x.shape[1] > 8 else x * x * 1.5

    report = ask(
        lambda x: x * x * 1.5, f, framework="numpy", examples=30, shrink=True, diagnosis=True
    )
    assert report.causes[0].passes_when == "fails only where B % 4 ≠ 0 and C > 8"


@pytest.mark.parametrize("first", [3, 2])
def test_refused_sizes_are_left_out_and_said(first):
    def even(x):
        if x.shape[1] % 2:
            raise ValueError("C must be even")
        return x * 1

    report = ask(even, lambda x: x * 1, sizes={"C": (first, 2, 3, 4, 5, 8)}, examples=12)
    assert report.passed
    assert report.outcomes[0].examples == 12
    assert report.refused[0] == "float32: refused where C % 2 ≠ 0"


def test_libraries_of_one_file_may_differ():
    def plain(x):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    assert ask(lambda x: torch.softmax(x, -1), plain).passed
    assert ask(plain, lambda x: torch.softmax(x, -1)).passed
    with pytest.raises(OptionError, match="reference_framework='numpy'"):
        ask(plain, lambda x: x.no_such_thing)


def test_other_results_are_a_sentence():
    one, two = (lambda x: x * 1), (lambda x: (x * 1, x * 2))
    report = ask(one, two, framework="torch")
    assert "returns 1 result (out), but the reference" in str(report)
    report = ask(lambda x: x.sum(-1, keepdim=True), lambda x: x.sum(-1), framework="torch")
    assert "which is (B, 1)" in report.outcomes[0].message
    assert not report.passed


def test_further_results_are_named():
    more = ask(lambda x: {"y": x * 1, "z": x}, lambda x: {"y": x * 1}, framework="torch")
    assert more.passed
    assert any(line.startswith("z, which") for line in more.untested)


def test_size_may_be_a_number():
    assert ask(lambda x: x * 1, lambda x: x * 1, sizes={"C": 6}, framework="torch").passed


def test_casts_of_the_reference_are_said():
    def llama(x, w):
        h = x.to(torch.float32)
        return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def fused(x, w):
        return F.rms_norm(x, (x.shape[-1],), w, 1e-6)

    inputs = {"x": "B C", "w": "C"}
    for dtype in ("float32", "bfloat16", "float64"):
        report = ask(fused, llama, inputs, dtypes=(dtype,), sizes={"B": (1, 3), "C": (5, 8)})
        assert report.passed
        assert any(x.startswith("a cast to float32 in ") for x in report.untested)


def test_modules_are_converted_in_copies():
    one, two, other = (torch.nn.Linear(8, 8) for _ in range(3))
    two.load_state_dict(one.state_dict())
    for dtype in ("float32", "bfloat16"):
        words = {"inputs": {"x": "B T 8"}, "dtypes": (dtype,)}
        assert ask(two, lambda x: one(x), **words).passed
        assert not ask(lambda x: other(x), one, **words).passed
    assert one.weight.dtype == torch.float32
    plain = lambda x: x  # noqa: E731
    assert convert_modules(plain, "float64") is plain


def test_time_is_planned_and_said():
    report = ask(lambda x: x * 1, lambda x: x * 1, budget=1e-9, examples=50, framework="torch")
    assert report.outcomes[0].examples == 3
    assert report.untested == tuple(
        f"{what} in float32, for which there is no time (budget= gives more)"
        for what in ("sizes beyond 11", "47 of 50 examples")
    )


HALF = "y is 2 times as large in 15 of 30 elements"


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda y: 2 * y, "y is 2 times as large"),
        (lambda y: -y, "y is negated"),
        (lambda y: np.roll(y, -1, 0), "y is that of the index 1 later, along axis 0"),
        (lambda y: np.where(np.arange(6) < 4, y, 0), "y is 0 at index ≥ 4 of axis 1 (of 6)"),
        (
            lambda y: np.where(np.arange(6) % 2, 1.5 * y, y),
            "y is 1.5 times as large at index 1, 3, … of axis 1 (of 6)",
        ),
        (lambda y: np.where(y > np.median(y), 2 * y, y), HALF),
        (lambda y: y + (np.arange(6) == 2) * y**2, "y is wrong at index 2 of axis 1 (of 6)"),
        (lambda y: y + 1e-9, ""),
        (lambda y: y + np.sin(y), ""),
    ],
)
def test_wrong_results_are_described(change, text):
    y = np.random.default_rng(0).standard_normal((5, 6))
    assert describe_amount("y", change(y), y, np.full(y.shape, 1e-6)) == text


def test_doubled_gradient_is_named():
    def g(x):
        return x.exp()

    report = ask(lambda x: 2 * g(x) - g(x).detach(), g, framework="torch", diagnosis=True)
    assert "dx is 2 times as large" in report.causes[0].text
