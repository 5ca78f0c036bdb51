"""Sorts rows by texts, of which only a piece is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tracepipe.event.columns import Int32s
from tracepipe.reports.frames.arrays import AnyArray
from tracepipe.reports.frames.grouping import runs
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import made

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The memory for the pieces of all texts that are compared.
_ROOM_BYTES = 1 << 23
_PIECE_LEAST, _PIECE_MOST = 1 << 4, 1 << 12


def in_text_order(text: Callable[[int], str], *columns: AnyArray) -> Int32s:
    """The indices that sort rows by some columns, the first column first, and then by text. Shape `(rows,)`.

    `text` returns the text of a row, and may be called several times. Raises OutputError.
    """
    order, starts = runs(*columns)
    first = 0
    while True:
        # The rows that are equal to another so far, each with the number of its group.
        counts = np.diff(np.append(starts, len(order)))
        alike = np.flatnonzero(np.repeat(counts > 1, counts))
        group = np.repeat(np.arange(len(starts), dtype=np.int32), counts)[alike]
        room = min(max(_ROOM_BYTES // max(len(alike), 1), _PIECE_LEAST), _PIECE_MOST)
        rows = order[alike]
        piece = _pieces(text, rows, first, room)
        if not (piece != b"").any():
            return order
        inner, begins = runs(group, piece)
        order[alike] = rows[inner]
        starts = np.union1d(starts, alike[begins])
        first += room


def _pieces(text: Callable[[int], str], rows: Int32s, first: int, room: int) -> NDArray[np.bytes_]:
    """A piece of the UTF-8 of each row's text, from byte `first` on; UTF-8 sorts like its code points."""

    def some(part: slice) -> NDArray[np.bytes_]:
        found = (_bytes(text(row))[first : first + room] for row in rows[part].tolist())
        return np.array([*found], f"S{room}")

    return made(len(rows), f"S{room}", some)


def _bytes(text: str) -> bytes:
    """A text in UTF-8 without zero bytes, as numpy does not distinguish trailing ones from the end. The
    escapes sort like the bytes that they replace.
    """
    return text.encode("utf-8", "surrogatepass").replace(b"\1", b"\1\2").replace(b"\0", b"\1\1")
