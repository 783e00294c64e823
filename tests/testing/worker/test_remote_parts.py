"""Refusals of a worker that can little, by a description of it and no process."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from npattn import Problem
from npattn.cli.worker import worker_command
from npattn.errors import OptionError
from npattn.testing.adapters.base import ImplementationError, ResultError
from npattn.testing.cases.options import SCORE_MODS
from npattn.testing.worker.remote import Remote, array_of
from npattn.testing.worker.values import Held, HeldItem

LITTLE = {
    "name": "f", "parameters": [[n, "POSITIONAL_OR_KEYWORD"] for n in "qkv"], "framework": "numpy",
    "gradients": None, "abilities": [],
}  # fmt: skip


def remote(**description):
    """Return an implementation in a worker that answers nothing."""
    worker = SimpleNamespace(
        description=LITTLE | description, generation=1, begin=lambda: 1, first_result=None,
        limits=SimpleNamespace(timeout=None), settings={}, environment={},
    )  # fmt: skip
    return Remote(worker)


def test_a_command_needs_a_target():
    result = CliRunner().invoke(worker_command, [])
    assert result.exit_code == 2
    assert "TARGET is missing" in result.output


def test_settings_of_an_implementation_are_not_said_again():
    settings = {"layout": "BTHD"}
    worker = SimpleNamespace(description=LITTLE | {"settings": settings})
    with pytest.raises(OptionError, match="got layout beside an Implementation"):
        Remote(worker, layout="BHTD")


def test_what_a_worker_cannot_is_refused():
    f = remote()
    with pytest.raises(ResultError, match="returned None among its results"):
        f.framework.take(None)
    request = f.request(Problem(*np.ones((3, 1, 1, 2, 2))))
    with pytest.raises(ImplementationError, match="differentiates no gradients"):
        request.autograd_twice({})
    with pytest.raises(ImplementationError, match="keeps no results"):
        request.send({"do": "forward"}, {}, hold=True)


def test_a_first_call_may_compile():
    f = remote(compiles=True)
    assert f.seconds("shape") > f.seconds("shape") == f.seconds("shape")
    assert remote().seconds("shape") == f.seconds("shape")


def test_an_array_of_an_earlier_process_is_not_written_again():
    f, x = remote(), np.ones(3)
    f.counterpart(x)
    x[0] = 2
    f.worker.generation = 2
    assert f.changes() == {}
    f.worker.generation = 1
    assert list(map(id, f.changes().values())) == [id(x)]
    f._drop(0, "array 0")
    del x
    gc.collect()
    assert f._dropped == ["array 0", "array 1"]


def test_a_result_of_an_earlier_process_is_lost():
    f = remote()
    with pytest.raises(ImplementationError, match="the process that kept its result has ended"):
        f.read(HeldItem(Held("result 1", 0, 8), 0))


def test_arguments_are_written_as_json():
    request, x = remote().request(None), np.ones((2, 3))
    names = [request.encode(array) for array in (x, x.T, x)]
    assert names == [{"array": "argument 0"}, {"array": "argument 1"}, {"array": "argument 0"}]
    assert np.array_equal(array_of(request.tensors["argument 1"]), x.T)
    assert request.encode(SimpleNamespace(size=3)) == {"module": {"size": 3}}
    name, mod = next(iter(SCORE_MODS.items()))
    assert request.encode(mod) == {"score_mod": name}
    assert request.encode((1, None)) == (1, None)
