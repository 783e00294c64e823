"""Arrays and classes that many tests make."""

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st


def normal(*shape: int, seed: int = 0) -> Any:
    """Return standard normal numbers, the same for a seed."""
    return np.random.default_rng(seed).standard_normal(shape)


def make_changed(base: Any, name: str, cause: str | None = "", **attributes: Any) -> Any:
    """Return a class that is `base` but for some attributes, and the cause that a report names."""
    return type(name, (base,), {"cause": cause, "__module__": base.__module__} | attributes)


def assert_same_bits(got: Any, want: Any) -> None:
    """Two modules, `MultiHeadAttention`, with the same options and parameters."""
    assert got.options == want.options
    assert got.parameters.keys() == want.parameters.keys()
    for name, array in want.parameters.items():
        other = got.parameters[name]
        assert (other.dtype, other.shape) == (array.dtype, array.shape), name
        assert other.tobytes() == array.tobytes(), name


class Sizes(NamedTuple):
    """Sizes of masks and biases, and of problems with them."""

    lead: tuple[int, ...]
    H: int
    T: int
    S: int


sizes_of_a_problem = st.builds(
    Sizes,
    st.sampled_from([(2,), (), (1,), (3, 2), (0,)]),
    st.sampled_from([3, 2, 1, 0]),
    st.sampled_from([5, 6, 7, 4, 3, 2, 1, 0]),
    st.sampled_from([7, 6, 5, 4, 3, 2, 1, 0]),
)
generators = st.builds(np.random.default_rng, st.integers(0, 2**32))


def inputs(sizes: Sizes, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Return q, k and v of these sizes."""
    lead, H, T, S = sizes
    draw = rng.standard_normal
    return draw((*lead, H, T, 3)), draw((*lead, H, S, 3)), draw((*lead, H, S, 2))
