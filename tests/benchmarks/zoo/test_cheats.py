"""The corpus of cheats: it stands alone, does nothing when read, and is judged by exit codes."""

import ast
import subprocess
import sys

import numpy as np
import pytest

import npattn
from benchmarks.zoo.cheats import CHEATS, HONEST, Answer, judge, judge_all, plain, table
from benchmarks.zoo.cheats.cheat import FOLDER, standalone
from benchmarks.zoo.cheats.verdict import main
from npattn.errors import OptionError

FAMILIES = sorted({one.family for one in (*CHEATS.values(), *HONEST.values())})
QUIET = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def test_numbers():
    assert len(CHEATS) >= 60
    assert len(FAMILIES) - 1 >= 15
    assert len(HONEST) >= 16
    assert {one.family for one in CHEATS.values() if one.declared} == {
        "delays",
        "needles",
        "recognition",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_file_needs_numpy_alone_and_does_nothing_when_imported(family):
    tree = ast.parse(standalone(family))
    imported = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported - sys.stdlib_module_names == {"numpy"}
    loud = [node for node in tree.body if not isinstance(node, QUIET)]
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in loud)


LOAD = """
import runpy, sys
import numpy as np
sizes = ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 11))
arrays = [np.random.default_rng(i).standard_normal(n) for i, n in enumerate(sizes)]
for path, *names in (word.split(":") for word in sys.argv[1:]):
    found = runpy.run_path(path)
    for name in names:
        for causal in (False, True):
            np.testing.assert_allclose(
                found[name](*arrays, causal=causal), found["attention"](*arrays, causal=causal)
            )
"""


def test_files_load_in_isolated_mode_and_honest_ones_are_right(tmp_path):
    words = []
    for family in FAMILIES:
        path = tmp_path / f"{family}.py"
        path.write_text(standalone(family))
        words.append(str(path))
    words[FAMILIES.index("honest")] += "".join(f":{name}" for name in HONEST)
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", LOAD, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_is_right(causal):
    rng = np.random.default_rng(0)
    sizes = ((2, 6, 5, 7), (1, 3, 11, 7), (2, 3, 11, 13))
    q, k, v = (rng.standard_normal(n) for n in sizes)
    mask = rng.random((5, 11)) < 0.5
    mask[1] = False
    side = "bottom_right" if causal else False
    forward = npattn.forward(q, k, v, mask, causal=side)
    dout = rng.standard_normal(forward.out.shape)
    expected = npattn.backward(forward, dout)
    np.testing.assert_allclose(plain.attention(q, k, v, mask, causal), forward.out, atol=1e-13)
    found = plain.gradients(dout, q, k, v, mask, causal)
    for name, x in zip("qkv", found, strict=True):
        np.testing.assert_allclose(x, getattr(expected, name), atol=1e-12)


@pytest.mark.parametrize(
    ("code", "verdict"), [(0, "escaped"), (1, "caught"), (2, "no verdict"), (-9, "no verdict")]
)
def test_exit_code_is_the_verdict(code, verdict):
    assert Answer(CHEATS["zero_dk"], code).verdict == verdict


def test_judge_runs_the_command_with_both_specs():
    show = (sys.executable, "-c", "import sys; print(*sys.argv[1:]); sys.exit(1)")
    answer = judge(CHEATS["zero_dk"], show)
    assert answer.verdict == "caught"
    target, flag, backward = answer.lines.split()
    assert target.endswith("half_gradients.py:zero_dk")
    assert (flag, backward) == ("--backward", f"{target}_backward")


def test_judge_that_does_not_end_has_no_verdict():
    wait = (sys.executable, "-c", "import time; time.sleep(60)")
    assert judge(CHEATS["zero_dk"], wait, timeout=0.2).verdict == "no verdict"


@pytest.mark.thorough
def test_learner_is_judged_twice_with_one_folder():
    code = (
        "import pathlib as p, sys; old = p.Path('x').exists(); p.Path('x').touch(); sys.exit(old)"
    )
    assert judge(CHEATS["known_inputs"], (sys.executable, "-c", code)).exit_code == 1
    assert judge(CHEATS["zero_dk"], (sys.executable, "-c", code)).exit_code == 0


def test_unknown_name_is_an_error():
    with pytest.raises(OptionError, match="'zero' is no cheat"):
        next(judge_all(["zero"]))


def test_table_has_a_row_for_each_family():
    answers = [
        Answer(CHEATS["zero_dk"], 1),
        Answer(CHEATS["no_dk"], 0),
        Answer(CHEATS["one_magic_number"], 0),
        Answer(HONEST["complete_memo"], 0),
    ]
    _, _, *rows = table(answers).splitlines()
    assert rows == [
        "| half_gradients | 2 | 1 | 0 | no_dk |",
        "| needles | 1 | 0 | 0 | one_magic_number (declared) |",
        "| honest | 1 | 0 | 0 | 1 |",
    ]


def test_default_check_catches_zeros(tmp_path, capsys):
    target, _ = CHEATS["zeros_everywhere"].write(tmp_path)
    assert main([target, "--examples", "1"]) == 1
    assert "agreement-o" in capsys.readouterr().out


def test_every_file_of_targets_is_registered():
    files = {path.stem for path in (FOLDER / "targets").glob("*.py")} - {"__init__"}
    assert files == set(FAMILIES)
