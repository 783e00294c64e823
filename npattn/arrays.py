"""What masks and biases share: the sizes that such an object knows, and arrays of these sizes.

Documents know their T and S, slopes know H, lengths know their batch axes; the rest is for the
problem to say.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from npattn.errors import OptionError, ShapeError
from npattn.problem import Array, fitting, integer, shown

__all__ = ["ANY", "Known", "Sized", "check_broadcast", "known_of", "read_only"]

ANY = -1
"""A T or S for which an object has an axis of 1, which broadcasts."""


class Known(NamedTuple):
    """The sizes that an object knows without its problem."""

    axes: tuple[int, ...] = ()  # of the batch and the heads; 1 broadcasts
    T: int | None = None  # None: for the problem to say
    S: int | None = None

    def __and__(self, other: Known) -> Known:
        """What two objects know that are for the same problem; ShapeError where none is."""
        check_broadcast("batch and head axes", self.axes, other.axes)
        axes = np.broadcast_shapes(self.axes, other.axes)
        return Known(axes, _same("T", self.T, other.T), _same("S", self.S, other.S))


class Sized:
    """A mask or a bias: something that is an array once all sizes are known."""

    kind = ""  # what errors call it

    __array_priority__ = 1000.0  # what an array and this one compose to is for this one to say

    def __repr__(self) -> str:
        words = (
            f"{field.name}={shown(getattr(self, field.name))}"
            for field in fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        )
        return f"{type(self).__name__}({', '.join(words)})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.to_array(), dtype=dtype, copy=copy)

    def shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """The shape of `to_array` for these sizes.

        Parameters
        ----------
        lead : tuple of int
            The batch axes of the problem.
        H, T, S : int
            Its query heads, queries and keys.

        Returns
        -------
        tuple of int
            Of rank 2 or more, broadcasting against ``(*lead, H, T, S)``.

        Raises
        ------
        ShapeError
            If this is for other sizes.
        """
        return fitting(self.kind, self._shape(lead, H, T, S), lead, H, T, S)

    def to_array(
        self,
        T: int | None = None,
        S: int | None = None,
        *,
        lead: tuple[int, ...] = (),
        H: int = 1,
    ) -> Array:
        """The whole as an array.

        Parameters
        ----------
        T, S : int, optional
            Queries and keys; default what is known without a problem.
        lead : tuple of int, optional
        H : int, optional
            Batch axes and query heads; default what is known, or none and one.

        Returns
        -------
        array
            Of `shape`. It may be a read-only view of what this was made of.

        Raises
        ------
        OptionError
            If T or S is neither given nor known.
        ShapeError
            If this is for other sizes.

        Examples
        --------
        >>> from npattn import masks
        >>> masks.window(1, 0).to_array(T=2, S=3)
        array([[ True,  True, False],
               [False,  True,  True]])
        """
        known = self._known()
        T, S = self._size("T", T, known.T), self._size("S", S, known.S)
        if lead == () and H == 1 and known.axes:
            lead, H = known.axes[:-1], known.axes[-1]
        self.shape(lead, H, T, S)
        return self._values(lead, H, T, S)

    def _size(self, name: str, given: int | None, known: int | None) -> int:
        if given is not None:
            return integer(name, given, 0)
        if known is None:
            raise OptionError(
                f"{name} is None, must be given to {self!r}, which does not know it: "
                "write .to_array(T=..., S=...)"
            )
        return 1 if known == ANY else known

    def _known(self) -> Known:
        raise NotImplementedError

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """The shape of `to_array`, held against T and S, but not yet against lead and H."""
        raise NotImplementedError

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        """`to_array` for sizes that fit."""
        raise NotImplementedError


def known_of(array: Array) -> Known:
    """What an array knows that broadcasts against the scores."""
    T, S = (ANY if n == 1 else n for n in (1, 1, *array.shape)[-2:])
    return Known(array.shape[:-2], T, S)


def read_only(array: Array) -> Array:
    """A view through which nothing of the user's is written."""
    view = array.view()
    view.flags.writeable = False
    return view


def check_broadcast(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """ShapeError where two shapes do not broadcast."""
    try:
        np.broadcast_shapes(one, other)
    except ValueError:
        raise ShapeError(f"{name} are {one} and {other}, must broadcast") from None


def _same(name: str, m: int | None, n: int | None) -> int | None:
    """A size that both have, as far as they know it."""
    known = {m, n} - {None, ANY}
    if len(known) > 1:
        raise ShapeError(f"{name} is {m} and {n}, must be the same in all that are composed")
    if known:
        return known.pop()
    return m if n == ANY else n
