"""The shapes of a recording as columns. A shape is what events have in common that differ only in time and
arguments."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import numpy as np

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, Three
from tracepipe.event.groups import number_rows
from tracepipe.event.model import LAYERS
from tracepipe.store.schema import FRAMES

if TYPE_CHECKING:
    from tracepipe.store.store import Store

    Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]

NO_SUCH: Final = -(1 << 31)
"""The number of a value that no shape has."""
_TEXTS: Final = ("name", "comm", "domain", "kernel")
_INT64_MAX: Final = (1 << 63) - 1
# No side of a block is longer. The product of three such sides fits 64 bits.
_THREADS_MOST: Final = 1 << 20


class ShapeTable:
    """The shapes of a recording by number. A shape is a name at a place: the place is everything else, with
    the whole name of a kernel where that is longer.

    Columns have numbers. Those of name, comm, domain and kernel are numbers of texts; a layer is an index
    into `LAYERS`, or the inverted number of a text; a phase is the code of its letter. A number of a
    process, GPU and so on is the value itself, or less than NONE for a value beyond 63 bits. NONE means "no
    value".
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._larges: list[int] = store.fact("large")
        self._columns: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._whole("phase"))

    def _whole(self, name: str) -> Any:
        """A column of all shapes, shape `(shapes,)`."""
        if name not in self._columns:
            self._columns[name] = self._store.column("shapes", f"{name}_text" if name in _TEXTS else name)
        return self._columns[name]

    @cached_property
    def threads(self) -> tuple[Int32s, Int32s]:
        """A number for the thread of each shape, shape `(shapes,)`, and the first shape of each number."""
        return number_rows(self._whole("pid"), self._whole("tid"))

    @cached_property
    def _all_texts(self) -> list[str]:
        return list(self._store.column("texts", "text"))

    @cached_property
    def _text_numbers(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self._all_texts)}

    @cached_property
    def encoded(self) -> list[bytes]:
        """All texts in UTF-8, by their numbers."""
        return [text.encode() for text in self._all_texts]

    @cached_property
    def _given(self) -> dict[tuple[int | None, int | None], str]:
        rows = self._store.rows("select pid, tid, name from store.thread_names")
        return {(pid, tid): name for pid, tid, name in rows}

    def column(self, name: str, shapes: Ints | int | slice = slice(None)) -> Any:
        """The numbers of a column for some shapes, or for rows that have these shapes; by default for all
        shapes. Shapes `(n,)`.
        """
        return self._whole(name)[shapes]

    @overload
    def value(self, name: Literal["name", "layer"], number: int) -> str: ...
    @overload
    def value(self, name: Literal["comm"], number: int) -> str | None: ...
    @overload
    def value(self, name: Literal["pid", "tid"], number: int) -> int | None: ...

    def value(self, name: str, number: int) -> int | str | None:
        """The value of a number in a column; None for NONE."""
        if name == "layer":
            return LAYERS[number] if number >= 0 else self.text(~number)
        if name == "phase":
            return chr(number)
        if number == NONE:
            return None
        if name in _TEXTS:
            return self.text(number)
        return number if number > NONE else self._larges[NONE - 1 - number]

    def values(self, name: str, shapes: Ints) -> list[Any]:
        """The values of a column, also `grid` and `block`, for rows that have these shapes; None where there
        is no value, or it is beyond 63 bits.
        """
        if name in ("grid", "block"):
            sides = np.stack([self.column(f"{name}_{axis}", shapes) for axis in "xyz"], axis=1)
            return [None if three[0] == NONE else three for three in sides.tolist()]
        numbers = self.column(name, shapes).tolist()
        if name in _TEXTS or name in ("layer", "phase"):
            known: dict[int, Any] = {number: self.value(name, number) for number in set(numbers)}  # type: ignore[call-overload]
            return [known[number] for number in numbers]
        return [None if number <= NONE else number for number in numbers]

    def ids_of(self, shape: int) -> tuple[int | None, int | None]:
        """The process and the thread of a shape."""
        pid, tid = (int(self.column(name, shape)) for name in ("pid", "tid"))
        return self.value("pid", pid), self.value("tid", tid)

    def number_of(self, name: str, value: object) -> int:
        """The number of a value in a column, NO_SUCH where no shape has it."""
        if name == "layer" and value in LAYERS:
            return LAYERS.index(str(value))
        if name == "phase" and isinstance(value, str):
            return ord(value)
        if value is None:
            return NONE
        if isinstance(value, str):
            number = self._text_numbers.get(value, NO_SUCH)
            return number if number == NO_SUCH or name != "layer" else ~number
        assert isinstance(value, int)
        if value <= _INT64_MAX:
            return value
        return NONE - 1 - self._larges.index(value) if value in self._larges else NO_SUCH

    def has_launch(self, shapes: Ints) -> Bools:
        """Flags the shapes that have launch ids. Shapes `(n,)`."""
        has: Bools = self.column("has_launch", shapes)
        return has

    def texts(self, name: str, shapes: Int32s) -> list[str | None]:
        """A column of texts, None where there is no text."""
        return self.values(name, shapes)

    def text(self, number: int) -> str:
        """The text with a number; invalid Unicode is replaced."""
        return self._all_texts[number]

    def numbers(self, name: str, shapes: Ints, without: int) -> Int64s:
        """A column of integers, with `without` where there is no value, and NONE for one beyond 63 bits.
        Shapes `(n,)`.
        """
        values = self.column(name, shapes)
        found: Int64s = np.where(values == NONE, without, np.maximum(values, NONE)).astype(np.int64)
        return found

    def sizes(self, shapes: Ints) -> tuple[list[Three | None], list[Three | None]]:
        """The grids and the blocks of some shapes, None where one was not recorded."""
        grids, blocks = (
            [None if three is None else (three[0], three[1], three[2]) for three in self.values(name, shapes)]
            for name in ("grid", "block")
        )
        return grids, blocks

    def block_threads(self, shapes: Ints) -> Int64s:
        """How many threads a block has, 0 where that was not recorded. Shapes `(n,)`."""
        sides = [self.column(f"block_{axis}", shapes) for axis in "xyz"]
        threads: Int64s = np.prod([side.clip(0, _THREADS_MOST) for side in sides], axis=0, dtype=np.int64)
        return np.where(sides[0] == NONE, 0, threads)

    def given_name(self, pid: int | None, tid: int | None) -> str | None:
        """The name that the recording gives a thread, or a process where `tid` is None."""
        return self._given.get((pid, tid))

    def thread_name(self, pid: int | None, tid: int | None) -> str | None:
        """The name that the recording gives a thread, else its last name."""
        if given := self.given_name(pid, tid):
            return given
        comm = self._last_names.get((self.number_of("pid", pid), self.number_of("tid", tid)))
        return None if comm is None else self.text(comm)

    @cached_property
    def _last_names(self) -> dict[tuple[int, int], int]:
        """By the numbers of process and thread, the number of the last name of the thread."""
        # The name that an annotation gives a thread is not the name of its process.
        comm = self._whole("comm")
        named = np.flatnonzero((comm != NONE) & (self._whole("frame") != FRAMES.index("annotation")))
        pids, tids = self._whole("pid")[named].tolist(), self._whole("tid")[named].tolist()
        return dict(zip(zip(pids, tids, strict=True), comm[named].tolist(), strict=True))
