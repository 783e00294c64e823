"""Workers share what JAX compiled; one that is not trusted shares nothing."""

import os
import pickle
from pathlib import Path

import pytest

from npattn.testing.worker.compiled import sharing
from npattn.testing.worker.connect import connect
from npattn.testing.worker.seclude import Seclusion

FOLDER, LEAST = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
TARGET = """
def f(q, k, v):
    raise SystemError("nobody calls it")
"""


@pytest.fixture(autouse=True)
def without_variables(monkeypatch):
    for name in (FOLDER, LEAST):
        monkeypatch.delenv(name, raising=False)


def test_all_have_one_folder_and_keep_every_program():
    first, second = sharing(), sharing()
    assert first == second
    assert Path(first[FOLDER]).is_dir()
    assert float(first[LEAST]) == 0


@pytest.mark.parametrize("mine", ["mine", ""])
def test_what_the_user_has_set_stays(monkeypatch, mine):
    monkeypatch.setenv(FOLDER, mine)
    assert FOLDER not in sharing()
    monkeypatch.setenv(LEAST, "2")
    assert not sharing()


def test_a_worker_has_the_folder_wherever_it_is_started(tmp_path):
    path = tmp_path / "nobody_calls_it.py"
    path.write_text(TARGET)
    remote = connect(f"{path}:f", framework="numpy")
    remote.worker.close()
    again = pickle.loads(pickle.dumps(remote)).worker  # as another process of a check has it
    assert again.environment[FOLDER] == sharing()[FOLDER]
    assert {**os.environ, **sharing()}.items() <= again.environment.items()


def test_who_is_not_trusted_has_none():
    seclusion = Seclusion(Path(__file__))
    assert FOLDER not in seclusion.environment()
