"""Reads the arguments of a TrackEvent: debug annotations, and the few typed arguments that all programs use.

    DebugAnnotation   1 name_iid  10 name  2 bool  3 uint  4 int  5 double  6 string  7 pointer  9 JSON
                      17 string_iid  8 nested value, old  11 dictionary entries…  12 array values…
    SourceLocation    2 file  3 function  4 line
    Frame             2 function_name_id  4 rel_pc  5 source_path_iid  6 line      Callstack   2 frame_ids…

Source: protos/perfetto/trace/track_event/debug_annotation.proto, source_location.proto, track_event.proto,
protos/perfetto/trace/profiling/profile_common.proto.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import orjson

from tracepipe.readers.perfetto_sequences import (
    ARG_NAMES,
    BODIES,
    CALLSTACKS,
    CORRELATIONS,
    FRAMES,
    FUNCTIONS,
    LOCATIONS,
    SOURCE_PATHS,
    STRINGS,
    Sequence,
    numbers,
)
from tracepipe.readers.recording import is_too_deep
from tracepipe.readers.wire_fields import double, signed, tagged, text

ANNOTATIONS: Final = 4 << 3 | 2
_NAME_IID, _NAME = 1 << 3, 10 << 3 | 2
_BOOL, _UINT, _INT, _POINTER, _DOUBLE = 2 << 3, 3 << 3, 4 << 3, 7 << 3, 5 << 3 | 1
_STRING, _JSON, _STRING_IID = 6 << 3 | 2, 9 << 3 | 2, 17 << 3
_NESTED, _ENTRIES, _VALUES = 8 << 3 | 2, 11 << 3 | 2, 12 << 3 | 2
# Old form: NestedValue.
_DICT_KEYS, _DICT_VALUES, _ARRAY_VALUES = 2 << 3 | 2, 3 << 3 | 2, 4 << 3 | 2
_OLD_INT, _OLD_DOUBLE, _OLD_BOOL, _OLD_STRING = 5 << 3, 6 << 3 | 1, 7 << 3, 8 << 3 | 2
_DEPTH_MAX: Final = 32
# The most values of an event, and bytes of its texts: a number of few bytes may refer to a long text.
_VALUES_MAX: Final = 1 << 12
_TEXT_BYTES_MAX: Final = 1 << 20
_FRAMES_MAX: Final = 256
_LOCATION, _LOCATION_IID, _LOG, _TASK = 33 << 3 | 2, 34 << 3, 21 << 3 | 2, 5 << 3 | 2
_CORRELATION, _CORRELATION_TEXT, _CORRELATION_IID = 52 << 3, 53 << 3 | 2, 54 << 3
CALLSTACK: Final = "callstack"
_CALLSTACK, _CALLSTACK_IID = 55 << 3 | 2, 56 << 3
_ONE, _TWO = 1 << 3, 2 << 3
_FILE, _FUNCTION, _LINE = 2 << 3 | 2, 3 << 3 | 2, 4 << 3


def number_or_text(value: float) -> float | str:
    """A double, as text where JSON has no such number."""
    return value if math.isfinite(value) else str(value)


class Arguments:
    """Reads arguments. Those that are missing or do not fit are counted."""

    def __init__(self) -> None:
        self.left_out = self.unnamed = 0
        self._values = self._bytes = 0
        self._sequence = Sequence(0)
        self._typed: dict[int, Callable[[Any], Iterable[tuple[str, Any]]]] = {
            _LOCATION: lambda data: [("source", self._location(data))],
            _LOCATION_IID: lambda iid: [("source", self._location_numbered(iid))],
            _LOG: self._log,
            _TASK: self._task,
            _CORRELATION: lambda id: [("correlation_id", id)],
            _CORRELATION_TEXT: lambda data: [("correlation_id", text(data))],
            _CORRELATION_IID: lambda iid: [("correlation_id", self._named(CORRELATIONS, iid))],
            _CALLSTACK: lambda data: [(CALLSTACK, self._inline(data))],
            _CALLSTACK_IID: lambda iid: [(CALLSTACK, self._callstack(iid))],
        }

    def read(
        self, sequence: Sequence, annotations: Iterable[tuple[int, Any]], fields: dict[int, Any]
    ) -> dict[str, Any]:
        """The arguments of an event: its annotations and its typed `fields`. Raises WireError."""
        self._sequence, self._values, self._bytes = sequence, 0, 0
        args: dict[str, Any] = {}
        for tag in fields:
            if tag in self._typed:
                args |= {name: value for name, value in self._typed[tag](fields[tag]) if value is not None}
        for tag, data in annotations:
            if tag == ANNOTATIONS:
                name, value = self._annotation(data, 0)
                if value is not None:
                    args[name] = value
        return args

    def _fits(self, size_bytes: int) -> bool:
        self._values += 1
        self._bytes += size_bytes
        fits = self._values <= _VALUES_MAX and self._bytes <= _TEXT_BYTES_MAX
        self.left_out += not fits
        return fits

    def _entry(self, table: int, iid: int) -> bytes | None:
        """An entry of a table by its number."""
        entry = self._sequence.name(table, iid)
        self.unnamed += entry is None
        return entry

    def _named(self, table: int, iid: int) -> str | None:
        """A text by its number."""
        entry = self._entry(table, iid)
        return text(entry) if entry is not None and self._fits(len(entry)) else None

    def _annotation(self, data: bytes, depth: int) -> tuple[str, Any]:
        """The name and the value of a DebugAnnotation; None for a value that cannot be shown."""
        name, value = "", None
        many: list[tuple[int, bytes]] = []
        if not self._fits(len(data)):
            return name, value
        for tag, one in tagged(data):
            if tag == _NAME_IID:
                name = self._named(ARG_NAMES, one) or f"argument {one}"
            elif tag == _NAME:
                name = text(one)
            elif tag in (_ENTRIES, _VALUES, _NESTED):
                many.append((tag, one))
            elif (made := self._plain(tag, one)) is not None:
                value = made
        if many and depth >= _DEPTH_MAX:
            self.left_out += 1
        elif many:
            value = self._many(many, depth + 1)
        return name, value

    def _plain(self, tag: int, value: Any) -> Any:
        if tag == _INT:
            return signed(value)
        if tag == _UINT:
            return value
        if tag == _STRING:
            return text(value)
        if tag == _STRING_IID:
            return self._named(STRINGS, value)
        if tag == _BOOL:
            return bool(value)
        if tag == _DOUBLE:
            return number_or_text(double(value))
        if tag == _POINTER:
            return f"0x{value:x}"
        if tag == _JSON:
            try:
                parsed = orjson.loads(value)
            except orjson.JSONDecodeError:
                return text(value)
            return text(value) if is_too_deep(value, parsed) else parsed
        return None

    def _many(self, many: list[tuple[int, bytes]], depth: int) -> Any:
        """The values of an array, or of a dictionary by their names."""
        if many[0][0] == _NESTED:
            return self._nested(many[0][1], depth)
        if many[0][0] == _VALUES:
            return [self._annotation(data, depth)[1] for tag, data in many if tag == _VALUES]
        return dict(self._annotation(data, depth) for tag, data in many if tag == _ENTRIES)

    def _nested(self, data: bytes, depth: int) -> Any:
        """A NestedValue."""
        if depth > _DEPTH_MAX or not self._fits(len(data)):
            return None
        keys: list[str] = []
        values: list[Any] = []
        value: Any = None
        for tag, one in tagged(data):
            if tag == _DICT_KEYS:
                keys.append(text(one))
            elif tag in (_DICT_VALUES, _ARRAY_VALUES):
                values.append(self._nested(one, depth + 1))
            elif tag == _OLD_INT:
                value = signed(one)
            elif tag == _OLD_DOUBLE:
                value = number_or_text(double(one))
            elif tag in (_OLD_BOOL, _OLD_STRING):
                value = bool(one) if tag == _OLD_BOOL else text(one)
        if keys:
            return dict(zip(keys, values, strict=False))
        return values or value

    # Typed ----------------------------------------------------------------------------------------------

    def _location(self, data: bytes) -> str | None:
        if not self._fits(len(data)):
            return None
        of = dict(tagged(data))
        return _place(text(of.get(_FILE, b"")), of.get(_LINE, 0), text(of.get(_FUNCTION, b"")))

    def _location_numbered(self, iid: int) -> str | None:
        data = self._entry(LOCATIONS, iid)
        return None if data is None else self._location(data)

    def _log(self, data: bytes) -> Iterator[tuple[str, Any]]:
        of = dict(tagged(data))
        if _ONE in of:
            yield "source", self._location_numbered(of[_ONE])
        if _TWO in of:
            yield "log", self._named(BODIES, of[_TWO])

    def _task(self, data: bytes) -> Iterator[tuple[str, Any]]:
        of = dict(tagged(data))
        if _ONE in of:
            yield "posted_from", self._location_numbered(of[_ONE])

    def _inline(self, data: bytes) -> list[str]:
        """The frames of a callstack in the event, innermost first."""
        frames = [dict(tagged(one)) for tag, one in tagged(data) if tag == 1 << 3 | 2]
        return [
            _place(text(of.get(2 << 3 | 2, b"")), of.get(3 << 3, 0), text(of.get(1 << 3 | 2, b"")))
            for of in reversed(frames[-_FRAMES_MAX:])
            if self._fits(sum(len(value) for value in of.values() if type(value) is bytes))
        ]

    def _callstack(self, iid: int) -> list[str] | None:
        """The frames of a callstack by its number, innermost first."""
        data = self._entry(CALLSTACKS, iid)
        if data is None:
            return None
        ids = [id for tag, value in tagged(data) if tag >> 3 == 2 for id in numbers(tag, value)]
        return [frame for id in reversed(ids[-_FRAMES_MAX:]) if (frame := self._frame(id))]

    def _frame(self, iid: int) -> str | None:
        data = self._entry(FRAMES, iid)
        if data is None:
            return None
        of = dict(tagged(data))
        path = self._named(SOURCE_PATHS, of[5 << 3]) if 5 << 3 in of else None
        function = self._named(FUNCTIONS, of[2 << 3]) if 2 << 3 in of else None
        return _place(path or "", of.get(6 << 3, 0), function or f"0x{of.get(4 << 3, 0):x}")


def _place(path: str, line: int, function: str) -> str:
    """`model/train.py:41 step`."""
    place = f"{path}:{line}" if path and line else path
    return " ".join(part for part in (place, function) if part)
