"""A worker may run in another environment, under another Python, or behind another program."""

import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import npattn
from npattn.cli import cli
from npattn.testing.worker.connect import CHILD

FEW = ("--only", "agreement-o", "--examples", "5")
KERNEL = """
import numpy as np

def f(q, k, v, mask=None, scale=None):
    scale = FACTOR / max(q.shape[-1], 1) ** 0.5 if scale is None else scale
    s = scale * (q.astype(float) @ np.swapaxes(k, -1, -2).astype(float))
    s = s if mask is None else np.where(mask, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    return (p @ v.astype(float)).astype(q.dtype)
"""
OTHERS = ("pypy3", *(f"python3.{n}" for n in range(9, 16)))


def write_kernel(folder, name, factor="1"):
    path = folder / f"{name}.py"
    path.write_text(KERNEL.replace("FACTOR", factor))
    return path


def run(*words):
    result = CliRunner().invoke(cli, ["check", *map(str, words), *FEW])
    return result.exit_code, result.output


def can_import(python, *names):
    """Return True if a Python, in isolated mode, can import all of these packages."""
    command = [python, "-I", "-c", f"import {', '.join(names)}"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def link_package(name, file, folder):
    """Link a package, and the libraries that lie beside it, into a folder."""
    home = Path(file).parent.parent
    for path in (home / name, home / f"{name}.libs"):
        if path.exists():
            (folder / path.name).symlink_to(path)


# --- another environment --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Make a virtual environment with NumPy alone; return its Python."""
    folder = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(symlinks=True).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    link_package("numpy", np.__file__, packages)
    return str(folder / "bin" / "python")


def test_bare_environment_has_numpy_alone(bare):
    assert can_import(bare, "numpy")
    assert not any(can_import(bare, name) for name in ("npattn", "hypothesis", "ml_dtypes"))


def test_target_in_a_bare_environment_passes(bare, tmp_path):
    path = write_kernel(tmp_path, "right")
    code, output = run("mine", "--worker", shlex.join([bare, "-I", str(CHILD), f"{path}:f"]))
    assert code == 0, output
    assert "npattn check mine" in output


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_wrong_target_in_a_bare_environment_fails_as_here(bare, tmp_path):
    path = write_kernel(tmp_path, "unscaled", "max(q.shape[-1], 1) ** 0.5")
    there = run("mine", "--worker", shlex.join([bare, "-I", str(CHILD), f"{path}:f"]))
    here = run(f"{path}:f", "--in-process")
    assert there[0] == here[0] == 1
    first, expected = (output.lstrip().splitlines()[:2] for _, output in (there, here))
    assert first == expected
    assert "scale" in first[1], first


# --- another Python -------------------------------------------------------------------------------


def find_others():
    """Return other Pythons that have NumPy."""
    found = (shutil.which(name) for name in OTHERS if name != f"python3.{sys.version_info[1]}")
    return [python for python in found if python and can_import(python, "numpy")]


def test_target_under_another_python_passes(tmp_path):
    others = find_others()
    if not others:  # test_child.py parses the file as Python 3.9
        pytest.skip("no other Python with NumPy is installed")
    path = write_kernel(tmp_path, "right")
    for python in others:
        code, output = run(python, "--worker", shlex.join([python, "-I", str(CHILD), f"{path}:f"]))
        assert code == 0, output


# --- another machine ------------------------------------------------------------------------------

SSH = """#!/bin/sh
test "$1" = gpu-host || exit 255
shift
cd {folder} || exit 255
exec env -i PATH={folder}/bin:/usr/bin:/bin sh -c "$*"
"""
NPATTN = """#!/bin/sh
PYTHONPATH={home} exec {python} -m npattn "$@"
"""


def write_script(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.thorough
def test_target_behind_ssh_is_judged(tmp_path, monkeypatch):
    """A stand-in for ssh: another folder, an empty environment, the command run by a shell."""
    remote, here = tmp_path / "remote", tmp_path / "here"
    for folder in (remote, here):
        folder.mkdir()
    write_kernel(remote, "my_kernel")
    home = Path(npattn.__file__).parents[1]
    write_script(here / "ssh", SSH.format(folder=remote))
    npattn_there = NPATTN.format(home=home, python=shlex.quote(sys.executable))
    write_script(remote / "bin" / "npattn", npattn_there)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    monkeypatch.chdir(here)
    words = ("my-kernel", "--worker", "ssh gpu-host npattn worker my_kernel:f")
    code, output = run(*words)
    assert code == 0, output
    assert "npattn check my-kernel" in output
    code, output = run("my-kernel", "--worker", "ssh other-host npattn worker my_kernel:f")
    assert code == 2, output
    assert "exit code 255" in output
