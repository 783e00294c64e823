"""Workers share JAX's compilation cache; an untrusted one has none."""

import os
import pickle
from pathlib import Path

import pytest

from npattn.testing import Implementation
from npattn.testing.targets.numpy import flash
from npattn.testing.worker import compilation_cache
from npattn.testing.worker.compilation_cache import cache_variables
from npattn.testing.worker.connect import connect, isolate
from npattn.testing.worker.supervisor import Limits
from tests.confined import untrusted

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
    first, second = cache_variables(), cache_variables()
    assert first == second
    assert Path(first[FOLDER]).is_dir()
    assert float(first[LEAST]) == 0


@pytest.mark.parametrize("mine", ["mine", ""])
def test_what_the_user_has_set_stays(monkeypatch, mine):
    monkeypatch.setenv(FOLDER, mine)
    assert FOLDER not in cache_variables()
    monkeypatch.setenv(LEAST, "2")
    assert not cache_variables()


def test_a_folder_that_is_still_written_to_ends_without_an_error(monkeypatch):
    folder = compilation_cache._make_folder.__wrapped__()

    def is_not_empty(*_, **__):
        raise OSError("Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", is_not_empty)
        folder.cleanup()
    assert Path(folder.name).is_dir()
    Path(folder.name).rmdir()


def test_a_worker_has_the_folder_wherever_it_is_started(tmp_path):
    path = tmp_path / "nobody_calls_it.py"
    path.write_text(TARGET)
    remote = connect(f"{path}:f", framework="numpy")
    remote.worker.close()
    again = pickle.loads(pickle.dumps(remote)).worker  # as another process of a check has it
    assert again.environment[FOLDER] == cache_variables()[FOLDER]
    assert {**os.environ, **cache_variables()}.items() <= again.environment.items()


def test_an_untrusted_worker_has_none(tmp_path):
    path = tmp_path / "nobody_trusts_it.py"
    path.write_text(TARGET)
    remote = connect(f"{path}:f", framework="numpy", **untrusted())
    remote.worker.close()
    assert FOLDER not in remote.worker.environment


@pytest.mark.thorough
@pytest.mark.parametrize("compiles", [True, False])
def test_an_isolated_function_has_one_if_its_framework_compiles(monkeypatch, compiles):
    implementation = Implementation(flash, framework="numpy")
    monkeypatch.setattr(implementation.framework, "compiles", compiles, raising=False)
    remote = isolate(implementation, Limits())
    remote.worker.close()
    assert (FOLDER in (remote.worker.environment or {})) == compiles
