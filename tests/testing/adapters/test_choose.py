"""The framework of a function that imports none is found by a call with all that it needs."""

import pytest

from npattn.errors import OptionError
from npattn.testing import Implementation
from npattn.testing.targets import load_implementation
from npattn.testing.worker.connect import connect

SOURCE = """
def attend_to_pages(q, k_cache, v_cache, cache_seqlens, block_table):
    assert block_table.shape[0] == q.shape[0] == len(cache_seqlens)
    return q * k_cache.sum() * v_cache.sum()

def attend_with_scale(q, k, v, scale):
    return q @ k.swapaxes(-1, -2) * scale @ v

def attend_packed(qkv, causal=False):
    return qkv[:, :, 0] * 1

def large(q, k, v, scale):
    raise ValueError("needs 16 keys")

def asks_for_more(q, k, v):
    raise ValueError("needs 16 queries")
"""


def open_both(tmp_path, name):
    """Return functions that open a target here and in a worker."""
    path = tmp_path / "own_framework.py"
    path.write_text(SOURCE)
    return [lambda f=f: f(f"{path}:{name}") for f in (load_implementation, connect)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["attend_to_pages", "attend_with_scale", "attend_packed"])
def test_a_tiny_call_passes_what_was_recognised(tmp_path, name):
    for open_ in open_both(tmp_path, name):
        f = open_()
        assert f.framework.name == "numpy"
        assert f.first_result is None  # it is none of q, k and v alone


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("large", r"\(numpy: raised ValueError: needs 16 keys \(own_framework.py:"),
        ("asks_for_more", r"\(numpy: ValueError: needs 16 queries \(own_framework.py:"),
    ],
)
def test_a_framework_that_nothing_tells_is_an_error(tmp_path, name, reason):
    messages = set()
    for open_ in open_both(tmp_path, name):
        with pytest.raises(OptionError, match=reason) as caught:
            open_()
        tried, _, advice = str(caught.value).partition("); say which arrays it takes with ")
        messages.add(tried.split("; torch")[0].split("; jax")[0])  # which are imported here
        assert advice == "framework='numpy' or framework='torch' or framework='jax'"
    assert len(messages) == 1


def test_a_class_is_refused_with_what_to_pass():
    torch = pytest.importorskip("torch")

    class Product(torch.autograd.Function):
        pass

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return q

    with pytest.raises(OptionError, match=r"Product is a torch.autograd.Function, .*\.apply$"):
        Implementation(Product)
    with pytest.raises(OptionError, match="Module is a class, must be a function: pass an inst"):
        Implementation(Module)
    assert isinstance(Implementation(Module(), framework="torch").f, Module)
    assert Implementation(Product.apply, framework="torch", features=()).f == Product.apply
