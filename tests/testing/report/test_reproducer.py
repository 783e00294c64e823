"""Scripts that show a failure with numpy, npattn and the implementation alone."""

import ast
import functools
import os
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

from benchmarks.zoo.mutants import MUTANTS
from npattn.conventions import Conventions
from npattn.testing import Implementation, Integers, Rounding, check
from npattn.testing.report.markup import HERE
from npattn.testing.report.reproducer import _literal
from npattn.testing.targets import load
from npattn.testing.targets.numpy import flash

# A user's file, in which each function is wrong in its own way.
MINE = """
import numpy as np
from npattn.testing.targets.numpy import flash, flash_backward

calls = 0

def doubled(q, k, v):
    return 2 * flash(q, k, v)

def wrong_gradient(q, k, v, *, return_lse=False):
    return flash(q, k, v, return_lse=return_lse)

def wrong_gradient_backward(dout, q, k, v, *, out, lse, dlse=None):
    grads = flash_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)
    return 3 * grads["q"], grads["k"], grads["v"]

def in_place(q, k, v):
    out = flash(q, k, v)
    q *= 2
    return out

def in_place_in_backward(dout, q, k, v, *, out, lse, dlse=None):
    k *= 2
    return wrong_gradient_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)

def drifting(q, k, v):
    global calls
    calls += 1
    return flash(q, k, v) * np.float32(1 + calls / 64)

def at_most_33_keys(q, k, v, mask=None):
    if k.shape[-2] > 33:
        raise IndexError("34 keys")
    return flash(q, k, v, mask=mask)

def no_softcap(q, k, v, *, softcap=None):
    if softcap is not None:
        raise KeyError("no softcap yet")
    return flash(q, k, v)

def no_gradient_of_softcap(q, k, v, *, softcap=None):
    return flash(q, k, v, softcap=softcap)

def no_gradient_of_softcap_backward(dout, q, k, v, *, out, softcap=None):
    if softcap is not None:
        raise KeyError("no softcap in backward yet")
    _, lse = flash(q, k, v, return_lse=True)
    return flash_backward(dout, q, k, v, out=out, lse=lse)

def no_score_mod(q, k, v, *, score_mod=None):
    return flash(q, k, v)

def no_view(q, k, v):
    inside = q.ndim > 2 and min(q.shape) > 1 and q.strides[-3] < q.strides[-2]
    return flash(q + 1 if inside else q, k, v)

def all_options(q, k, v, mask=None, *, causal=False, window=None, bias=None, scale=None,
                softcap=None, sinks=None, dropout_mask=None, dropout_rate=0.0):
    out = flash(q, k, v, mask, causal=causal, window=window, bias=bias, scale=scale,
                softcap=softcap, sinks=sinks, dropout_mask=dropout_mask, dropout_rate=dropout_rate)
    used = [mask, window, bias, softcap, sinks, dropout_mask]
    return out + 1 if sum(x is not None for x in used) > 3 else out

def leaks(q, k, v, mask=None):
    from npattn.testing.targets.numpy import naive
    groups = q.shape[-3] // (k.shape[-3] or 1) if q.ndim > 2 else 1
    k, v = (np.repeat(x, groups, -3) if groups != 1 else x for x in (k, v))
    return naive(q, k, v, mask)

def adds_mask(q, k, v, mask=None):
    groups = q.shape[-3] // (k.shape[-3] or 1) if q.ndim > 2 else 1
    k, v = (np.repeat(x, groups, -3) if groups != 1 else x for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    s = s if mask is None else s + np.where(mask, 0, -np.inf).astype(q.dtype)
    e = np.exp((s - s.max(-1, keepdims=True, initial=-np.inf)).astype(np.float32))
    return ((e / e.sum(-1, keepdims=True)).astype(q.dtype) @ v).astype(q.dtype)

def widened(q, k, v):
    return flash(q, k, v).astype(np.float64)

def half(q, k, v, *, is_causal=False):
    return flash(q, k, v)  # is_causal is ignored

plans = {}

def plan_of_first_strides(q, k, v):
    inside = q.ndim > 2 and min(q.shape) > 1 and q.strides[-3] < q.strides[-2]
    shape = q.shape, k.shape, v.shape
    return flash(q + 1 if plans.setdefault(shape, inside) and not inside else q, k, v)

def with_lse(q, k, v, *, return_lse=False):
    return flash(q, k, v, return_lse=return_lse)

def plan_of_first_dtype(dout, q, k, v, *, out, lse, dlse=None):
    grads = flash_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)
    narrow = plans.setdefault((q.shape, k.shape, v.shape), q.dtype.itemsize == 2)
    return {n: x.astype("float16").astype(x.dtype) if narrow else x for n, x in grads.items()}

def other_bits(q, k, v):
    key = "bits", q.shape, k.shape, v.shape, q.dtype
    plans[key] = plans.get(key, 0) + 1
    return flash(q, k, v) * q.dtype.type(1 + 2.0**-23 * (plans[key] == 2))

class Kernel:
    def method(self, q, k, v):
        return 2 * flash(q, k, v)

bound = Kernel().method
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Write that file and return its path; forget its module afterwards."""
    name = f"mine_{tmp_path.name}".replace("-", "_")
    path = tmp_path / f"{name}.py"
    path.write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    sys.modules.pop(name, None)


def implementation(mine, function, *, by="path", backward=None, **kwargs):
    spec = f"{mine}:{function}" if by == "path" else f"{mine.stem}:{function}"
    f = load(spec)[0]
    if backward is not None:
        kwargs["backward"] = load(f"{mine}:{backward}")[0]
    return Implementation(f, spec=spec, framework="numpy", **kwargs)


def failure(f, rule, *, examples=20, **kwargs):
    report = check(f, only=[rule.removeprefix("option-") if "option" not in rule else "structure"],
                   examples=examples, diagnosis=False, **kwargs)  # fmt: skip
    (outcome,) = (o for o in report.outcomes if o.rule == rule)
    assert outcome.status in ("failed", "error"), str(report)
    return outcome


def run(script, where, *, fails=False):
    """Run the script in a fresh interpreter and return its output."""
    path = where.parent / "shown.py"
    path.write_text(script)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run([sys.executable, "-W", "error", str(path)], cwd=where.parent,
                          env=environment, capture_output=True, text=True, timeout=60,
                          check=False)  # fmt: skip
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


def packages(script):
    names = set()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("by", ["path", "module"])
def test_a_wrong_value_prints_wrong(mine, by):
    text = failure(implementation(mine, "doubled", by=by), "agreement-o").script()
    assert packages(text) <= {"numpy", "npattn"}
    shown = run(text, mine)
    assert "WRONG o[" in shown
    assert "o float32" in shown


def case_of(*case, marks=(), like=None, asked=None, has=()):
    """A function of that file, the rule that it breaks, and what its script has and prints."""
    function, rule, *prints = case
    given = function, like or {}, rule, asked or {}, has, prints
    return pytest.param(
        *given, marks=marks, id=f"{function}-{rule}-{'-'.join(asked or like or '')}"
    )


OWN = Rounding(name="own", integers=Integers(q_rows=3, centred=True), partial="float16")
NUMBERS = Conventions(lse_empty=float("inf"), hidden_fill=-1e4)
thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("function", "like", "rule", "asked", "has", "prints"),
    [
        case_of("adds_mask", "hidden-finite", "WRONG o becomes NaN", marks=thorough,
              asked={"dtypes": ("float16",)}),
        case_of("doubled", "agreement-o", "WRONG o[", asked={"rounding": OWN},
              has=["Integers(largest=127, q_rows=3, k_rows=None, centred=True)"]),
        *(case_of("doubled", "agreement-o", f"o {dtype}", "WRONG o[", asked={"dtypes": (dtype,)},
                has=[dtype]) for dtype in ("bfloat16", "float16", "float8_e4m3fn")),
        case_of("doubled", "agreement-o", "WRONG o[", asked={"conventions": NUMBERS}),
        case_of("doubled", "agreement-o", "o float32", like={"layout": "BTHD"},
              has=["layout='BTHD'"]),
        case_of("half", "agreement-o", "WRONG o[", marks=thorough,
              like={"rename": {"is_causal": "causal"}},
              asked={"conventions": Conventions(causal="top_left")},
              has=["rename={'is_causal': 'causal'}",
                   "conventions = npattn.Conventions(causal='top_left')"]),
        case_of("wrong_gradient", "agreement-dq", "WRONG dq[", "ok    o[", marks=thorough,
              like={"backward": "wrong_gradient_backward"}),
        case_of("in_place", "inputs-unchanged", "q WAS WRITTEN TO", "k unchanged", marks=thorough),
        case_of("drifting", "repeatable", "o DIFFERS BETWEEN TWO CALLS"),
        case_of("no_score_mod", "agreement-o", "WRONG o[", marks=thorough, has=["SCORE_MODS"]),
        case_of("leaks", "hidden-nan-v", "WRONG o["),
        case_of("leaks", "empty-row", "WRONG o[", marks=thorough),
        case_of("no_view", "structure", "WRONG o["),
        case_of("plan_of_first_strides", "after-other-strides", "WRONG o[", marks=thorough,
              has=["before = npattn.Problem("]),
        case_of("with_lse", "after-other-dtype", "WRONG d", marks=thorough,
              like={"backward": "plan_of_first_dtype"}),
        case_of("other_bits", "after-other-dtype", "WRONG o has other bits the second time",
              asked={"dtypes": ("float32",), "sizes": {"T": (5,)}}),
        case_of("widened", "shape-dtype", "o float64"),
    ],
)  # fmt: skip
def test_script_shows_the_failure(mine, function, like, rule, asked, has, prints):
    text = failure(implementation(mine, function, **like), rule, **asked).script()
    assert all(part in text for part in has)
    output = run(text, mine)
    assert all(part in output for part in prints)
    assert "moves" not in output  # rows that see the garbage are not compared


@pytest.mark.parametrize(
    ("function", "rule", "asked", "error"),
    [
        # The keys that a rule appends are what it raises at.
        pytest.param("at_most_33_keys", "padded-keys", {"shrink": False}, "IndexError",
                     marks=thorough),
        ("no_softcap", "option-softcap", {}, "no softcap yet"),
    ],
)  # fmt: skip
def test_script_raises_again(mine, function, rule, asked, error):
    text = failure(implementation(mine, function), rule, **asked).script()
    assert error in run(text, mine, fails=True)


@pytest.mark.parametrize(
    ("name", "row", "value", "shown"),
    [
        ("o", 1, 5.0, ""),  # it sees the garbage
        ("o", 0, 5.0, "WRONG o moves by 4.0"),
        ("o", 0, np.nan, "WRONG o becomes NaN"),
        ("dq", 1, 5.0, "WRONG dq moves by 4.0"),
    ],
)
def test_rows_that_see_the_garbage_are_compared_in_gradients_alone(name, row, value, shown, capsys):
    before, after = np.ones((2, 3)), np.ones((2, 3))
    after[row] = value
    given = {"before": {name: before}, "problem": {name: after}, "results": lambda found: found}
    template = (HERE / "script.jinja").read_text("utf-8")
    shown_moves = template.partition('kind == "moves" %}\n')[2].partition("{% elif")[0]
    exec(shown_moves, {"np": np, "dout": np.array([[1.0], [0.0]])} | given)
    assert capsys.readouterr().out.strip() == shown


def test_script_docstring_names_broken_rule(mine):
    outcome = failure(implementation(mine, "doubled"), "agreement-o")
    head = ast.get_docstring(ast.parse(outcome.script()))
    assert 'breaks "agreement-o"' in head
    assert "got" in head
    assert "want" in head


@pytest.mark.parametrize(
    "name", ["C:\\new\\x.py:f", 'a"""\nraise SystemExit(3)\n"""', "nul \0", '"""" ""', "\\"]
)
def test_script_quotes_any_name(name):
    f = Implementation(lambda q, k, v: 2 * flash(q, k, v), name=name, framework="numpy")
    text = failure(f, "agreement-o", examples=1, shrink=False).script()
    assert name in ast.get_docstring(ast.parse(text), clean=False)


@pytest.mark.thorough
def test_a_wrong_gradient_of_two_functions_prints_wrong(mine):
    f, backward = (
        load(f"{mine.stem}:{n}")[0] for n in ("wrong_gradient", "wrong_gradient_backward")
    )
    text = failure(f, "agreement-dq", backward=backward).script()
    assert packages(text) == {"numpy", "npattn", mine.stem}
    assert "WRONG dq[" in run(text, mine)


def test_input_written_by_backward_is_shown(mine):
    f, backward = (load(f"{mine.stem}:{n}")[0] for n in ("wrong_gradient", "in_place_in_backward"))
    shown = run(failure(f, "inputs-unchanged", backward=backward).script(), mine)
    assert "k WAS WRITTEN TO" in shown


@pytest.mark.thorough
def test_script_raises_again_for_raising_gradient(mine):
    names = ("no_gradient_of_softcap", "no_gradient_of_softcap_backward")
    f, backward = (load(f"{mine.stem}:{n}")[0] for n in names)
    text = failure(f, "option-softcap", backward=backward).script()
    assert "no softcap in backward yet" in run(text, mine, fails=True)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_many_options_at_once_are_kept(mine):
    outcome = failure(implementation(mine, "all_options"), "agreement-o", examples=20)
    assert outcome.script().count("\n    np.array(") == 3
    assert sum(f" {n}=" in outcome.script() for n in ("mask", "bias", "sinks", "dropout_mask")) >= 1
    assert "WRONG o[" in run(outcome.script(), mine)


def test_a_size_of_0_is_kept(mine):
    mine.write_text(
        MINE
        + textwrap.dedent("""
        def ones(q, k, v):
            return flash(q, k, v) + (k.shape[-2] == 0)
        """)
    )
    text = failure(implementation(mine, "ones"), "structure").script()
    assert "np.zeros((" in text
    assert "WRONG o[" in run(text, mine)


def test_a_known_target_is_loaded_by_its_name(mine):
    f, _ = load("numpy.naive")
    text = failure(Implementation(f, spec="numpy.naive"), "empty-row").script()
    assert "load('numpy.naive')" in text
    assert "WRONG o[" in run(text, mine)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_a_torch_function_is_shown_with_its_gradients(mine):
    pytest.importorskip("torch")
    mine.write_text("""
import torch

def f(q, k, v):
    s = torch.einsum("bhtd,bhsd->bhts", q, k)  # not scaled
    return torch.einsum("bhts,bhse->bhte", s.softmax(-1), v)
""")
    spec = f"{mine}:f"
    f = Implementation(load(spec)[0], spec=spec, framework="torch")
    sizes = {"H": (2,), "K": (2,), "B": (2,), "D": (3,), "S": (5,)}
    text = failure(f, "agreement-dq", sizes=sizes).script()
    assert "framework='torch'" in text
    assert "WRONG dq[" in run(text, mine)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "f",
    [
        pytest.param(lambda q, k, v: 2 * MUTANTS["dlse-ignored"].forward(q, k, v), id="lambda"),
        pytest.param(functools.partial(MUTANTS["scale-twice"].forward, causal=False), id="partial"),
    ],
)
def test_unnamed_function_gets_placeholder(f, mine):
    text = failure(f, "agreement-o").script()
    assert "TODO: import your implementation here, as `f`" in text
    ast.parse(text)
    assert "TODO" in run(text, mine, fails=True)


def test_a_placeholder_can_be_filled_in(mine):
    text = failure(lambda q, k, v: 2 * load("numpy.flash")[0](q, k, v), "agreement-o").script()
    (line,) = (line for line in text.splitlines() if line.startswith("raise SystemExit"))
    text = text.replace(line, f"from {mine.stem} import doubled as f")
    assert "WRONG o[" in run(text, mine)


def test_a_nested_function_gets_a_placeholder():
    def f(q, k, v):
        return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)

    assert "TODO" in failure(f, "agreement-o").script()


@pytest.mark.parametrize("path", [True, False])
def test_function_of_main_is_loaded_from_its_file(mine, path, monkeypatch):
    f = load(f"{mine}:doubled")[0]
    f.__module__ = "__main__"
    main = types.ModuleType("__main__")
    main.doubled = f
    if path:
        main.__file__ = str(mine)
    monkeypatch.setitem(sys.modules, "__main__", main)
    text = failure(f, "agreement-o", framework="numpy").script()
    if path:
        assert f"load('{mine}:doubled')" in text
        assert "WRONG o[" in run(text, mine)
    else:
        assert "TODO: import your implementation here" in text


def test_bound_method_differs_from_function_of_class(mine):
    text = failure(load(f"{mine.stem}:bound")[0], "agreement-o", framework="numpy").script()
    ast.parse(text)
    if "TODO" not in text:
        assert "WRONG o[" in run(text, mine)


def test_multiline_repr_gives_valid_script():
    class Kernel:
        def __call__(self, q, k, v):
            return 2 * load("numpy.flash")[0](q, k, v)

        def __repr__(self):
            return "Kernel(\n  stages=2)"

    text = failure(Kernel(), "agreement-o").script()
    ast.parse(text)
    assert "TODO" in text


@pytest.mark.parametrize("shape", [(), (1,), (7,), (67,), (3, 5), (2, 3, 5, 71), (2, 0, 3)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bool"])
def test_array_literals_are_exact_and_wrapped(shape, dtype):
    rng = np.random.default_rng(0)
    array = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 5, shape))
    array[rng.random(shape) < 0.4] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324])
    text = _literal(array.astype(dtype))
    array_again = eval(text, {"np": np})
    assert (array_again.dtype, array_again.shape) == (dtype, shape)
    assert array_again.tobytes() == array.astype(dtype).tobytes()
    assert max(map(len, text.splitlines())) <= 100


def test_passed_outcome_has_no_script():
    f, backward = load("numpy.flash")
    (outcome,) = check(f, backward=backward, only=["agreement-o"], examples=2).outcomes
    assert outcome.script() == ""
