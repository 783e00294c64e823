"""Arrays cross the pipe as they are, whatever their dtype, shape and strides."""

import importlib
import io
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn.testing.adapters import child
from npattn.testing.adapters.base import ImplementationError, ResultError
from npattn.testing.adapters.child import Session, parse_frame, read_frame, write_frame
from npattn.testing.adapters.frameworks import WIDE, array_of, make_framework, span
from npattn.testing.worker.remote import SentRequest
from npattn.testing.worker.values import NoArray, value_of

VIEWS = SimpleNamespace(abilities={"views"})


def fill(count, dtype):
    """Return different small numbers, also below 0 and imaginary where the dtype has them."""
    numbers = np.arange(count) * 37 % 101
    if dtype == np.bool_:
        return numbers % 3 == 0
    wide = numbers - 50 if dtype.kind not in "u" else numbers
    return (wide * (1 + 2j) if dtype.kind == "c" else wide).astype(dtype)


@st.composite
def arrays(draw):
    """Arrays of 0 to 4 axes; each is permuted, stepped, reversed or repeated."""
    dtype = WIDE[draw(st.sampled_from(sorted(WIDE)))]
    shape = draw(st.lists(st.sampled_from((0, 1, 1, 2, 3, 5)), max_size=4))
    order, inner, strides = draw(st.permutations(range(len(shape)))), 1, [0] * len(shape)
    for axis in order:
        if shape[axis] == 1:  # any stride is legal
            strides[axis] = draw(st.integers(-7, 7))
            continue
        step = draw(st.sampled_from((1, 1, 1, 2, -1, -2, 0)))
        strides[axis] = step * inner
        inner *= max(1, abs(step) * shape[axis])
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True) if n]
    first = -sum(n for n in reach if n < 0)
    buffer = fill(2 + sum(map(abs, reach)), dtype)
    owner = buffer if draw(st.booleans()) else bytearray(buffer.tobytes())
    offset, *places = (n * dtype.itemsize for n in (1 + first, *strides))
    array = np.ndarray(shape, dtype, owner, offset, places)
    if draw(st.booleans()):  # an array of its own, in the order of its strides
        array = array.copy("K")
    if draw(st.booleans()):
        array.flags.writeable = False
    return array


def send(tensors):
    """Return tensors as they come out of a frame."""
    parts = []
    write_frame(parts.append, {}, tensors)
    return parse_frame(read_frame(io.BytesIO(b"".join(parts)).read, bytearray()))[1]


def describe(array):
    return array.dtype, array.shape, array.tobytes()


def outcome(call, *args):
    """Return what a call gives as dtype, shape and bytes, or the text of its refusal."""
    try:
        return describe(call(*args))
    except (ImplementationError, child.NotPossible, child.NoResult) as err:
        return str(err)


@given(arrays())
def test_inputs_keep_values_strides_and_flags(array):
    """The worker has what the judge sends; torch and JAX take there what they take here."""
    request = SentRequest(VIEWS, None)
    request.add_arrays({"x": array})
    tensors = send(request.tensors)
    session = Session("nothing:nothing")
    session.framework = child.NumPy()
    there = session.arrays({"arrays": request.entries}, tensors)["x"]
    assert describe(there) == describe(array)
    assert there.flags.writeable == array.flags.writeable
    long = [axis for axis, n in enumerate(array.shape) if n > 1 and array.size]
    assert [there.strides[n] for n in long] == [array.strides[n] for n in long]


@pytest.mark.parametrize("name", ["torch", "jax"])
@given(arrays())
def test_frameworks_take_the_same_arrays_on_both_sides(name, array):
    pytest.importorskip(name)
    here = make_framework(name)
    request = SentRequest(VIEWS, None)
    request.add_arrays({"x": array})
    session = Session("nothing:nothing")
    session.framework = here.backend
    tensors = send(request.tensors)

    def receive():
        return here.take(session.arrays({"arrays": request.entries}, tensors)["x"])

    assert outcome(receive) == outcome(lambda: here.take(here.give(array)))


def to_framework(name, array, bit):
    """Return an array of a framework with the strides of a NumPy array, where it has them."""
    if name == "numpy":
        return array
    if name == "jax":
        return importlib.import_module("jax.numpy").asarray(array)
    import torch

    dtype = getattr(torch, array.dtype.name)
    flat = span(array)
    raw = torch.frombuffer(bytearray(flat.tobytes()), dtype=torch.uint8) if flat.size else None
    base = torch.empty(0, dtype=dtype) if raw is None else raw.view(dtype)
    strides = [abs(n) // array.itemsize for n in array.strides]
    tensor = base.as_strided(array.shape, strides)
    if array.dtype.kind == "c" and bit:
        return tensor.conj() if bit == "conjugate" else tensor.conj().imag
    return tensor


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
@given(arrays(), st.sampled_from(["", "conjugate", "negative"]))
def test_results_come_back_as_they_are_read_here(name, array, bit):
    pytest.importorskip(name)
    here = make_framework(name)
    value = to_framework(name, array, bit)
    got = outcome(lambda: array_of(send({"x": here.backend.read(value)})["x"]))
    assert got == outcome(here.take, value)
    assert not isinstance(got, str)
    if name == "numpy":
        assert got == describe(array)


def test_one_element_of_odd_strides_comes_back():
    """Autograd returns such gradients of padded keys, and torch calls them contiguous."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(64.0).as_strided((1, 1, 1, 1), (16, 16, 1, 16), 5)
    assert tensor.is_contiguous()
    assert array_of(child.Torch().read(tensor)).tolist() == [[[[5.0]]]]


def test_buffers_of_another_dtype_are_sent_in_that_of_the_array():
    """The real part of a complex array, and numbers in a buffer of bytes."""
    request = SentRequest(VIEWS, None)
    parts = np.arange(6).reshape(2, 3) * (1 + 2j)
    request.add_arrays({"x": parts.imag, "y": np.arange(24, dtype=np.uint8)[4:20].view(np.float32)})
    session = Session("nothing:nothing")
    session.framework = child.NumPy()
    there = session.arrays({"arrays": request.entries}, send(request.tensors))
    assert (there["x"] == parts.imag).all()
    assert there["y"].tobytes() == bytes(range(4, 20))


def test_strides_of_parts_of_elements_are_refused():
    records = np.zeros(3, "f4, i1")
    request = SentRequest(VIEWS, None)
    with pytest.raises(ImplementationError, match="no strides of parts of elements"):
        request.add_arrays({"x": records["f0"]})


def test_an_error_of_reading_is_raised_where_the_result_is_named():
    raised = {"type": "KeyError", "bases": ["KeyError"], "message": "lost"}
    value = value_of({"raised": raised}, {})
    assert isinstance(value, NoArray)
    assert not isinstance(value.error, ImplementationError)
    assert isinstance(value_of({"no result": "words"}, {}).error, ResultError)
