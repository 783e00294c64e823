"""A worker answers as the same function does here, also where its results are wrong."""

import numpy as np
import pytest

from npattn.problem import Cotangents, Problem
from npattn.testing import Recipe
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.child import Session, answer_safely
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.space import Space
from npattn.testing.rules import RULES
from npattn.testing.targets import load_implementation
from npattn.testing.trial import Trial
from npattn.testing.worker.connect import connect
from npattn.testing.worker.description import read_description
from npattn.testing.worker.remote import Remote
from npattn.testing.worker.supervisor import Limits

NUMPY = """
import numpy as np

def longer(q, k, v): return (q + v).astype(np.longdouble)
def double_complex(q, k, v): return (q + v).astype(complex)
def other_byte_order(q, k, v): return (q + v).astype(">f4")
def fortran(q, k, v): return np.asfortranarray(q + v)
def backwards(q, k, v): return (q + v)[..., ::-1]
def mapping(q, k, v): return {"o": q + v}
def nothing(q, k, v): return None
def list_of_one(q, k, v): return [q + v]
def empty(q, k, v): return ()
def alone(q, k, v, return_lse=False): return q + v
def beside_nothing(q, k, v, return_lse=False): return (q + v, None) if return_lse else q + v
def beside_words(q, k, v, return_lse=False): return (q + v, "lse") if return_lse else q + v
def raises(q, k, v): raise KeyError("lost")

def backward(dout, q, k, v): return dout, None, {"v": v}
"""
TORCH = """
import torch

def negative_bit(q, k, v): return torch.complex(q, -q).conj().imag + 0 * (k + v)
def conjugate_bit(q, k, v): return (q + v).to(torch.complex64).conj()
def sparse(q, k, v): return (q + v).to_sparse()
def eighths(q, k, v): return (q + v).to(torch.float8_e4m3fnuz)
def detached(q, k, v): return (q + v).detach()
def read(q, k, v): return torch.from_numpy((q + v).numpy())
def refuses(q, k, v):
    if q.requires_grad:
        raise ValueError("no gradients")
    return q + v
def mapping(q, k, v): return {"o": q + v}
def nothing(q, k, v): return None
def array(q, k, v): return (q + v).detach().numpy()
def pair(q, k, v): return q + v, q
def alone(q, k, v, return_lse=False): return q + v
def beside_nothing(q, k, v, return_lse=False): return (q + v, None) if return_lse else q + v
"""


HEADS = """
import torch

def f(q, k, v, head_mask=None):
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return o if head_mask is None else o * head_mask[:, None, None]
"""


class Inline:
    """A worker without a process of its own."""

    settings, environment, first_result, generation, limits = {}, None, None, 1, Limits()

    def __init__(self, spec, **settings):
        self.session = Session(spec)
        answer, _ = answer_safely(self.session, {"do": "describe", **settings}, {})
        self.description = read_description(answer)

    def begin(self):
        return self.generation

    def request(self, message, tensors, seconds, work=None, most=0):
        return answer_safely(self.session, message, tensors)


def outcome(call, *args):
    """Return the results of a call, or what its error says."""
    try:
        return [(n, x.dtype, x.shape, x.tobytes()) for n, x in call(*args).pairs]
    except ImplementationError as err:
        return type(err), str(err), err.is_refusal


def functions(source):
    return [line[4:].partition("(")[0] for line in source.splitlines() if line[:4] == "def "]


CASES = [("numpy", n) for n in functions(NUMPY)[:-1]] + [("torch", n) for n in functions(TORCH)]


@pytest.mark.parametrize(("framework", "name"), CASES)
def test_odd_results_are_the_same_in_a_worker(tmp_path, framework, name):
    pytest.importorskip(framework)
    path = tmp_path / f"odd_{framework}.py"
    path.write_text(NUMPY if framework == "numpy" else TORCH)
    own = f"{path}:backward" if framework == "numpy" else None
    settings = {"framework": framework, "backward": own}
    here = load_implementation(f"{path}:{name}", **settings)
    there = Remote(Inline(f"{path}:{name}", **settings), name=here.name)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 3, 5)).astype(np.float32)
    problem = Problem(q, k, v)
    cotangents = Cotangents(np.ones_like(v), np.ones(v.shape[:-1], np.float32))
    assert outcome(there.forward, problem) == outcome(here.forward, problem)
    gradients = outcome(there.gradients, problem, cotangents)
    assert gradients == outcome(here.gradients, problem, cotangents)
    overlaps = [[], []]
    for found, f in zip(overlaps, (there, here), strict=True):
        try:
            found += f.overwrite_results(problem, cotangents if own else None)
        except ImplementationError as err:
            found += [str(err)]
    assert overlaps[0] == overlaps[1]


def test_gradient_of_a_head_mask_comes_back(tmp_path):
    """The mask is a gate in another shape, through which autograd reaches the gate."""
    pytest.importorskip("torch")
    (tmp_path / "heads.py").write_text(HEADS)
    spec = f"{tmp_path}/heads.py:f"
    there = Remote(Inline(spec, framework="torch"), name="f")
    problem = Recipe(lead=(2,), H=3, T=5, S=5, D=7, E=7, gate="head mask").problem()
    cotangents = Cotangents(np.ones_like(problem.q), None)
    found = there.gradients(problem, cotangents)
    here = load_implementation(spec, framework="torch").gradients(problem, cotangents)
    assert found["dgate"].shape == (3, 1, 1)
    assert found["dgate"].any()
    np.testing.assert_array_equal(found["dgate"], here["dgate"])


@pytest.mark.parametrize("rule", ["outputs-kept", "arrays-reused"])
def test_rules_that_hold_results_pass_in_a_process_started_anew(rule):
    """The judge ends a process between two rules; what a rule holds is in the next one."""
    remote = connect("numpy.flash")
    space = Space(features=frozenset({"mask"}))
    trial = Trial(remote, remote.conventions, Rounding.undeclared("float32"), space)
    recipe = Recipe(seed=3)
    assert RULES[rule].check(trial, recipe) is not None
    remote.worker.close()
    generation = remote.worker.generation
    assert RULES[rule].check(trial, recipe) is not None
    assert remote.worker.generation == generation + 1
    remote.worker.close()
