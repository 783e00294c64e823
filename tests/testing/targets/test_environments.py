"""Virtual environments for targets: made once, made anew if broken, and workers run in them."""

import importlib.metadata
import importlib.util
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import npattn
from npattn.cli import cli
from npattn.errors import MissingExtraError, OptionError
from npattn.profiles import PROFILES
from npattn.testing.targets import TARGETS, Target, environments
from npattn.testing.targets.environments import choose_python, list_packages, make_environment
from npattn.testing.worker.connect import connect

NAME, VERSION = "attention_elsewhere", "2.3"
SOURCE = """
import sys
from npattn.testing.targets.numpy import flash

def attend(q, k, v, mask=None):
    return (flash(q, k, v, mask) * (sys.prefix == PREFIX)).astype(q.dtype)
"""


def write_wheel(folder, prefix, version=VERSION):
    """Write a wheel by hand: its function is right in the environment with this prefix alone.

    With it comes the NumPy of this Python, by the path of its folder.
    """
    home = folder / "numpy-alone"
    home.mkdir(exist_ok=True)
    for name in ("numpy", "numpy.libs", "ml_dtypes", "lazy_loader"):
        package = Path(np.__file__).parents[1] / name
        if package.exists() and not (home / name).exists():
            (home / name).symlink_to(package)
    about = f"{NAME}-{version}.dist-info"
    files = {
        f"{NAME}.py": SOURCE.replace("PREFIX", repr(str(prefix))),
        f"{NAME}.pth": f"{home}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: me\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / f"{NAME}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | {f"{about}/RECORD": record}).items():
            wheel.writestr(path, text)


@pytest.fixture
def target(monkeypatch, tmp_path):
    """A target of a package that pip finds in a folder alone, and needs nothing else of."""
    monkeypatch.setattr(environments, "NEEDS", ())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    one = Target("elsewhere", NAME, "attend", None, (NAME,), PROFILES["npattn"], "for this test",
                 pip=(f"{NAME}=={VERSION}",))  # fmt: skip
    monkeypatch.setitem(TARGETS, "elsewhere", one)
    return one


@pytest.fixture
def envs(tmp_path):
    return tmp_path / "envs"


@pytest.mark.thorough
def test_an_environment_is_made_once_and_the_worker_runs_in_it(target, envs, tmp_path):
    (name,) = target.pip
    own = envs / environments._name([name])
    write_wheel(tmp_path, own)
    words = ["check", "elsewhere", "--envs", str(envs), "--only", "agreement-o", "--examples", "2"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[0] == f"making {own}: pip install '{name}'"

    told = []
    assert choose_python(target, envs, told.append) == own / "bin" / "python"
    assert told == []  # it is there
    (own / environments.MARKER).unlink()  # as if it had been ended in the middle
    (own / "left").touch()
    python = choose_python(target, envs, told.append)
    assert len(told) == 1
    assert not (own / "left").exists()
    remote = connect("elsewhere", python=python)
    assert remote.worker.description["versions"]["numpy"] == np.__version__
    q = np.ones((2, 3, 5, 7), np.float32)
    np.testing.assert_array_equal(remote.forward(npattn.Problem(q, q, q))["o"], q)
    remote.worker.close()


@pytest.mark.thorough
@pytest.mark.parametrize("pip_is_here", [True, False])
def test_what_pip_says_is_said(target, envs, monkeypatch, pip_is_here):
    if not pip_is_here:  # a pip of its own takes seconds to make
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "pip" else find(n))
        run = environments._run

        def run_without_pip(command, line):
            *words, last = command
            run([*words, "--without-pip", last] if "venv" in words else command, line)

        monkeypatch.setattr(environments, "_run", run_without_pip)
    said = "No matching distribution found for attention_elsewhere==2.3"
    said = said if pip_is_here else "No module named pip"
    with pytest.raises(MissingExtraError, match=rf"cannot be made, exit code 1:\n(.*\n)*.*{said}"):
        choose_python(target, envs)
    assert list(envs.glob(f"*/{environments.MARKER}")) == []


def test_a_folder_that_is_a_file_is_said(envs):
    envs.touch()
    with pytest.raises(OptionError, match=r"the folder of environments .*envs cannot be used"):
        make_environment(["nothing==1"], envs)


def test_no_environment_is_made_where_none_helps(monkeypatch, envs, tmp_path):
    assert choose_python(TARGETS["numpy.flash"], envs) is None
    monkeypatch.setattr("npattn.testing.targets.target.DRIVER", tmp_path / "none")
    kernel = Target("x", "x", "f", None, ("x",), PROFILES["npattn"], "for this test", device="cuda")
    with pytest.raises(MissingExtraError, match="x needs an NVIDIA GPU"):
        choose_python(kernel, envs)
    clone = Target(
        *("x", "x", "f", None, ("absent_one",), PROFILES["npattn"], "for this test"),
        install="clone it",
    )
    with pytest.raises(MissingExtraError, match=r"absent_one, which .*: to install it, clone it"):
        choose_python(clone, envs)
    assert not envs.exists()


def test_names_of_environments_differ_with_their_contents(monkeypatch):
    names = [["a==1"], ["a==11"], ["a==1", "b"], ["a==1-b"], ["b", "a==1"]]
    folders = [environments._name(one) for one in names]
    monkeypatch.setattr(environments, "NEEDS", ("other",))
    folders += [environments._name(one) for one in names]
    assert len(set(folders)) == 2 * len(names)
    python = f"py{sys.version_info[0]}.{sys.version_info[1]}"
    assert folders[0].startswith(f"a-1-{python}-")


def test_extras_of_npattn_become_their_packages(monkeypatch):
    lines = ["numpy>=2.0", 'a>=1; extra == "one"', "b[x]==2 ; extra == 'one'", 'c; extra == "two"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert list_packages(("npattn[one]", "c==3", "a>=1")) == ("a>=1", "b[x]==2", "c==3")
    assert list_packages(("npattn[one,two]",)) == ("a>=1", "b[x]==2", "c")
    with pytest.raises(OptionError, match=r"npattn\[three\] is not known to the npattn"):
        list_packages(("npattn[three]",))

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", not_installed)
    with pytest.raises(OptionError, match=r"npattn\[one\] is not known"):
        list_packages(("npattn[one]",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["numpy.flash", "--in-process"], "--envs need a worker"),
        (["a.py:f"], "--envs needs a name that npattn list shows, and TARGET is 'a.py:f'"),
        (["--worker", "cat"], "--envs needs a name that npattn list shows, and TARGET is None"),
    ],
)
def test_environments_are_for_known_targets_in_workers(words, message, envs):
    done = CliRunner().invoke(cli, ["check", *words, "--envs", str(envs)])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"command": "cat"}, "got python beside a command"),
        ({"untrusted": True}, "got untrusted beside python"),
    ],
)
def test_a_python_beside_what_it_cannot_start_is_an_error(more, message):
    with pytest.raises(OptionError, match=message):
        connect("numpy.flash", python=sys.executable, **more)
