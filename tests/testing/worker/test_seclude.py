"""Code that nobody trusts finds nothing of npattn, and cannot answer for the judge."""

import os
import re

import pytest
from click.testing import CliRunner

from npattn.cli import cli
from npattn.errors import OptionError
from npattn.testing import check
from npattn.testing.worker.connect import CHILD, connect
from npattn.testing.worker.seclude import Seclusion
from tests.confined import flags, untrusted

FEW = {"only": ["agreement-o"], "examples": 2, "diagnosis": False, "shrink": False}
SPY = """
import importlib, os, sys
import numpy as np

def right(q, k, v):
    s = np.einsum("...td,...sd->...ts", q, k, dtype=float) / max(q.shape[-1], 1) ** 0.5
    p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
    return (p / p.sum(-1, keepdims=True) @ v).astype(q.dtype)

def importable():
    try:
        importlib.import_module("npattn")
    except ImportError:
        return False
    return True

def f(q, k, v):
    if q.ndim != 4 or k.shape[1] != q.shape[1]:
        raise ValueError("rank 4, K = H")
    found = {found}
    return 0 * v if found else right(q, k, v)
"""
FOUND = {
    "the package": "importable()",
    "its folder on the path": "any(os.path.isdir(os.path.join(p, 'npattn')) for p in sys.path)",
    "its folder around the worker": "'npattn' in sys.modules['__main__'].__file__",
    "a variable of the environment": "'NPATTN_SECRET' in os.environ",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOUND)
@pytest.mark.broad
def test_who_looks_for_the_judge_finds_it_only_where_it_is_trusted(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NPATTN_SECRET", "1")
    path = tmp_path / "spy.py"
    path.write_text(SPY.replace("{found}", FOUND[name]))
    trusted, secluded = connect(f"{path}:f"), connect(f"{path}:f", **untrusted())
    assert check(secluded, **FEW).passed
    if name != "its folder on the path":  # installed packages may have it in another way
        assert not check(trusted, **FEW).passed
    for remote in (trusted, secluded):
        remote.worker.close()


def test_the_folder_of_a_seclusion_is_removed_with_it():
    seclusion = Seclusion(CHILD)
    assert (seclusion.packages / "numpy").exists()
    assert not list(seclusion.packages.glob("npattn*"))
    folder = seclusion.packages.parent
    del seclusion
    assert not folder.exists()


@pytest.mark.thorough
def test_what_nobody_trusts_must_have_gradients(tmp_path):
    path = tmp_path / "spy.py"
    path.write_text(SPY.replace("{found}", "False"))
    words = ["check", f"{path}:f", *flags(), "--only", "agreement-o", "--examples", "2"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2, result.output
    assert "not tested, and asked for: dq, dk, dv" in " ".join(result.output.split())
    seed = re.search(r"seed (\d+)", result.output)[1]
    again = CliRunner().invoke(cli, words)
    assert seed not in again.output  # a seed of its own each time


def test_the_first_call_is_judged(tmp_path):
    path = tmp_path / "warm.py"
    deed = "CALLS.append(1); found = len(CALLS) == 1"
    path.write_text("CALLS = []" + SPY.replace("found = {found}", deed))
    remote = connect(f"{path}:f", **untrusted())
    assert not check(remote, **FEW | {"only": ["first-calls"]}).passed
    remote.worker.close()


def test_a_seed_is_a_number_or_random():
    result = CliRunner().invoke(cli, ["check", "--seed", "late"])
    assert result.exit_code == 2
    assert "must be a number, or random" in result.output


@pytest.mark.parametrize("flag", ["--in-process", "--sweep=3"])
def test_what_nobody_trusts_never_runs_here(flag):
    result = CliRunner().invoke(cli, ["check", "--untrusted", flag])
    assert result.exit_code == 2
    assert "--untrusted need a worker" in result.output


def test_few_variables_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", "/somewhere")
    seclusion = Seclusion(CHILD)
    assert seclusion.environment("bwrap")["HOME"] == "/tmp"
    kept = seclusion.environment("no")
    assert kept["PATH"] == "/somewhere"
    assert "OMP_NUM_THREADS" not in kept
    assert kept["HOME"] != os.environ.get("HOME")


def test_npattn_beside_the_target_is_wrong_usage(tmp_path):
    (tmp_path / "npattn").mkdir()
    (tmp_path / "spy.py").write_text(SPY.replace("{found}", "False"))
    with pytest.raises(OptionError, match="copy the file of TARGET to a folder of its own"):
        connect(f"{tmp_path}/spy.py:f", **untrusted())


PATCHES = """
import sys

sys.modules["__main__"].ABILITIES = ()

def f(q, k, v):
    return v
"""


@pytest.mark.parametrize("hidden", [True, False])
def test_a_worker_that_its_target_has_changed_is_not_believed(tmp_path, hidden):
    """Without abilities, rules about memory would not be asked."""
    (tmp_path / "patches.py").write_text(PATCHES)
    own = untrusted() if hidden else {}
    with pytest.raises(OptionError, match=r"lacks abilities that it has .*hold.* has changed it"):
        connect(f"{tmp_path}/patches.py:f", framework="numpy", **own)
