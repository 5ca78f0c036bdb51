"""The types of arrays. numpy has no types for shapes: those are stated where the arrays are described."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["AnyArray", "Bools", "Floats", "Int32s", "Int64s", "Ints", "Rows", "T"]

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tracepipe.event.columns import Bools, Int32s, Int64s

    AnyArray = NDArray[Any]
    """Values of any type."""
    Ints = NDArray[np.integer[Any]]
    """Whole numbers of any width, such as the numbers of rows."""
    Floats = NDArray[np.floating[Any]]
    Rows = Ints | Bools | slice
    """Which rows: their numbers, a flag for each, or a range."""
else:
    # numpy is imported when it is first used.
    AnyArray = Bools = Floats = Int32s = Int64s = Ints = Rows = Any

T = TypeVar("T", bound="np.generic")
"""The type of the values of an array."""
