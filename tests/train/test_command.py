"""python docs/examples/train on the command line."""

import re
from importlib.util import find_spec

import pytest
from click.testing import CliRunner
from train import Run, Settings, command, digits, precision
from train.interactive import HELP

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")

FAST = ("--epochs", 1, "--embed_dim", 4, "--num_heads", 2)


def run(*flags, code=0, **kwargs):
    words = [*map(str, flags)]
    result = CliRunner().invoke(command.train_command, words, terminal_width=200, **kwargs)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def words(text):
    return " ".join(text.split())


def checkpoint_of(*flags, path):
    run(*flags, "--checkpoint", path)
    return Run.load(path)


def test_flags_have_underscores_or_hyphens(tmp_path):
    hyphens = [flag.replace("_", "-") if isinstance(flag, str) else flag for flag in FAST]
    a, b = (
        checkpoint_of(*flags, size, 512, path=tmp_path / f"{size}.npz")
        for flags, size in ((FAST, "--batch_size"), (hyphens, "--batch-size"))
    )
    assert a.settings == b.settings
    assert a.settings == Settings(embed_dim=4, num_heads=2, epochs=1, batch_size=512)
    assert a.losses == b.losses


def test_every_flag_reaches_its_setting(tmp_path):
    flags = [*FAST, "--batch_size", 512, "--lr", 0.01, "--seed", 3, "--warmup", 2]
    flags += ["--dropout", 0.1, "--positions", "relative", "--dtype", "float16"]
    settings = checkpoint_of(*flags, path=tmp_path / "run.npz").settings
    assert settings == Settings(
        "rows", 4, 2, 1, 512, 0.01, 3, warmup=2, dropout=0.1, positions="relative", dtype="float16"
    )


def test_defaults_are_those_of_settings():
    context = command.train_command.make_context("train", [])
    names = vars(Settings())
    assert Settings(**{name: context.params[name] for name in names}) == Settings()


@pytest.mark.thorough
def test_results_are_printed_and_weights_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "heads.png"
    output = words(run(*FAST, "--out", out))
    assert "2 heads of 2, 370 parameters in float64" in output
    assert "after 23 steps" in output
    assert "% of 359 images" in output
    assert "overflow" not in output
    assert out.read_bytes().startswith(b"\x89PNG")


def test_steps_left_out_are_counted(monkeypatch):
    """Each halves the scale, here from 2³⁰ to what float16 holds."""
    monkeypatch.setattr(precision, "START", 2.0**30)
    output = run(*FAST, "--dtype", "float16")
    [left_out] = re.findall(r"after 23 steps, (\d+) of them left out by overflow$", output, re.M)
    assert 5 <= int(left_out) < 23


def test_single_model_has_one_head(tmp_path):
    one = checkpoint_of("--model", "single", *FAST[:4], path=tmp_path / "a.npz")
    assert one.settings.num_heads == 1
    output = words(run("--model", "single", *FAST))
    assert "--model single has 1 head: --num-heads 2 is not used" in output
    assert "1 head of 4, 370 parameters" in output
    assert "is not used" not in run("--model", "single", *FAST[:4], "--num_heads", 1)


# --- compare --------------------------------------------------------------------------------------


def test_compare_prints_both_models():
    output = run("--compare", *FAST)
    assert "same sizes and number of parameters: embed_dim 4, 2 heads of 2 or 1 head of 4" in output
    assert re.search(r"^    1 +[\d.]+ +[\d.]+ % +[\d.]+ +[\d.]+ %$", output, re.M)
    assert re.search(r"^multi-head [\d.]+ % in [\d.]+ s, single-head [\d.]+ % in", output, re.M)


# --- interactive ----------------------------------------------------------------------------------


def test_interactive_answers_what_is_piped(tmp_path):
    path = tmp_path / "run.npz"
    trained = checkpoint_of(*FAST, path=path)
    output = run(*FAST, "--checkpoint", path, "--interactive", input="17\nhelp\n\nquit\n18\n")
    probabilities = trained.probabilities(digits().test_x)[17]
    best = probabilities.argmax()
    assert "> 17\ntest image 17 is a 5; predicted" in output
    assert f"predicted {best} ({100 * probabilities[best]:.1f} %)" in output
    assert "mean weights of 2 heads" in output
    assert f"> help\n{HELP}\n> \n> quit\n" in output
    assert output.endswith("> quit\n")
    assert "test image 18" not in output


def test_interactive_ends_with_its_input():
    output = run(*FAST, "--interactive", input="999\n")
    assert output.endswith("there is no test image 999: they are 0 to 358\n> \n")


def test_interactive_ends_with_ctrl_c(monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert run(*FAST, "--interactive").endswith("help lists the commands\n\n")


def test_typed_lines_are_not_shown_twice(monkeypatch, capsys):
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    typed = iter(["7", "8"])

    def type_line(prompt):
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", type_line)
    assert list(command._read_lines()) == ["7", "8"]
    assert capsys.readouterr().out == "\n"


# --- wrong usage ----------------------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch):
    """Let it be an error to load images or to train."""

    def fail(*_, **__):
        raise AssertionError("work was begun")

    for name in ("digits", "train", "compare"):
        monkeypatch.setattr(command, name, fail)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--embed_dim", 7), "pass embed_dim 4 or 8, or num_heads 1 or 7"),
        (("--num_heads", 5), "pass embed_dim 30 or 35, or num_heads 4 or 8"),
        (("--num_heads", 0), "num_heads is 0, must be an integer ≥ 1"),
        (("--epochs", 0), "epochs is 0"),
        (("--epochs", "many"), "'many' is not a valid integer"),
        (("--dropout", 1), "dropout is 1.0, must be in [0, 1)"),
        (("--warmup", -1), "warmup is -1"),
        (("--positions", "rope"), "'rope' is not one of 'learned', 'none', 'sinusoidal'"),
        (("--dtype", "float8"), "'float8' is not one of"),
        (("--model", "double"), "'double' is not one of 'multihead', 'single'"),
        (("--embed_dims", 8), "No such option"),
        (("--compare", "--interactive"), "got --interactive beside --compare, which trains two"),
        (("--compare", "--model", "single", "--out", "x.png"), "got --model and --out beside"),
        (("--compare", "--checkpoint", "x.npz"), "got --checkpoint beside --compare"),
        (("--out", "x.xyz"), "--out is 'x.xyz', must end in one of"),
        (("--out", "nowhere/x.png"), "the folder of nowhere/x.png does not exist"),
        (("--checkpoint", "nowhere/x.npz"), "the folder of nowhere/x.npz does not exist"),
    ],
)
def test_wrong_usage_has_exit_code_2_before_any_work(no_work, flags, message):
    assert message in words(run(*flags, code=2))


def test_one_head_is_not_compared():
    assert "num_heads is 1, must be 2" in words(run("--compare", "--num_heads", 1, code=2))


def test_warmup_leaves_steps():
    output = words(run(*FAST, "--warmup", 23, code=2))
    assert "warmup is 23, must be below the 23 steps of 1 epochs of 23: pass a smaller" in output
    assert "after 23 steps" in run(*FAST, "--warmup", 22)


# --- interrupted ----------------------------------------------------------------------------------


def test_interrupted_training_has_exit_code_130(monkeypatch, tmp_path):
    path = tmp_path / "run.npz"

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "train", interrupt)
    assert run(*FAST, "--checkpoint", path, code=130).strip() == ""
    path.write_bytes(b"")
    output = run(*FAST, "--checkpoint", path, code=130)
    assert words(output) == f"the same command goes on with {path}"
