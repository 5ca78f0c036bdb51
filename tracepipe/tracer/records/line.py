"""Lines of an event file: the only module of a capture that knows the fields of an event and their order.

    {"ts_ns":1000,"type":"userspace","name":"cuInit","phase":"B","pid":11,"tid":12,"cpu":3,"args":{…}}
     time         head                                           where                     more, args

Lines are joined from prepared pieces: encoding a dict for each would alone take twice the time that a whole
line takes now (benchmarks/records.py). The time is the first field, as the rest of a line then repeats, and
readers parse a repeated rest once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from tracepipe.event.model import LAYERS, PHASES

COMM: Final = ',"comm":%s'
"""A further field of an event: its thread's name, as JSON text."""
LAUNCH: Final = ',"launch":%d'
"""A further field of an event: the launch that the call makes."""
STACK: Final = ',"stack":%d'
"""The last further field of an event: the Python stack of the call."""

BEGAN_BEFORE: Final = '"began":"before the recording"'
"""An argument of slices that were open when the recording began, and begin with it."""
BEGAN_AT: Final = f'{BEGAN_BEFORE},"began_ns":%d'
"""The same, with the time at which it really began."""

Where = tuple[int, int, int]
"""pid, tid and cpu of an event, as they are written; pid 0 where no process is known."""


class Head:
    """Layer, name and phase of an event; `text` is that part of the line. It is made once for all lines of a
    kind. `own` is the name of a hook's own layer.
    """

    __slots__ = ("layer", "name", "own", "phase", "text")

    def __init__(self, layer: str, name: str, phase: str, own: str = "") -> None:
        assert layer in LAYERS and phase in PHASES
        self.layer, self.name, self.phase, self.own = layer, name, phase, own
        named = f',"layer":{json.dumps(own)}' if own else ""
        self.text = f'"type":"{layer}"{named},"name":{json.dumps(name)},"phase":"{phase}"'

    def begun(self) -> Head:
        """The head of the begin of what this ends."""
        return Head(self.layer, self.name, "B", self.own)

    def ended(self) -> Head:
        """The head of the end of what this begins."""
        return Head(self.layer, self.name, "E", self.own)


def joined(*members: str) -> str:
    """Join the members that are not empty."""
    return ",".join(member for member in members if member)


def record_line(record: Mapping[str, Any]) -> str:
    """The line of a record that is given as a mapping. Arguments and paths need not be UTF-8: a byte that is
    not becomes an escape as Python shows it, `\\udcff`.
    """
    try:
        return _json_of(record)
    except (TypeError, UnicodeEncodeError):
        return _json_of(_as_utf8(record))


def _json_of(record: object) -> str:
    """Raises TypeError or UnicodeEncodeError for text that is not UTF-8."""
    try:
        import orjson
    except ImportError:  # recording needs only the standard library, but with warps this is much slower
        text = json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n"
        return text.encode().decode()
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE).decode()


def _as_utf8(value: object) -> object:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_as_utf8(key): _as_utf8(item) for key, item in value.items()}
    return [_as_utf8(item) for item in value] if isinstance(value, (list, tuple)) else value


class Lines:
    """Lines in the order of the file. `layers` has the layer of each line's events, "" if it has none."""

    __slots__ = ("_events", "_layer", "_text", "layers", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.layers: list[str] = []
        self._text, self._layer = self.texts.append, self.layers.append
        self._events: dict[int, int] = {}  # index of a line with more than one event → its events

    def event(
        self, ts_ns: int, head: Head, pid: int, tid: int, cpu: int, args: str = "", more: str = ""
    ) -> None:
        """Add an event; `args` are members of its arguments as JSON text, `more` is COMM, LAUNCH or STACK."""
        if pid and args:  # most events: one f-string takes half the time
            self._text(
                f'{{"ts_ns":{ts_ns},{head.text},"pid":{pid},"tid":{tid},"cpu":{cpu}{more},"args":{{{args}}}}}\n'
            )
        else:
            self._text(f'{{"ts_ns":{ts_ns},{head.text},{_where(pid, tid, cpu)}{more}{_args(args)}}}\n')
        self._layer(head.layer)

    def span(self, ts_ns: int, dur_ns: int, head: Head, where: Where, args: str) -> None:
        """Add an event that has a length."""
        self._text(f'{{"ts_ns":{ts_ns},{head.text},"dur_ns":{dur_ns},{_where(*where)}{_args(args)}}}\n')
        self._layer(head.layer)

    def threads(self, texts: list[str]) -> None:
        """Add lines of which each is an event of a GPU's thread."""
        self.texts += texts
        self.layers += ["gpu_thread"] * len(texts)

    def record(self, record: Mapping[str, Any], events: int = 1) -> None:
        """Add a record that is given as a mapping. It counts as `events` events if its type is a layer."""
        if events != 1:
            self._events[len(self.texts)] = events
        self._text(record_line(record))
        self._layer(record["type"] if record["type"] in LAYERS else "")

    def counts(self) -> dict[str, int]:
        """Layer → events."""
        counts = Counter(self.layers)
        for place, events in self._events.items():
            counts[self.layers[place]] += events - 1
        return {layer: count for layer, count in counts.items() if layer and count}

    def cut(self, lines: int, size_bytes: int) -> None:
        """Cut everything after `lines` lines of events, or after `size_bytes`."""
        if len(self.texts) <= lines and len(self.encoded()) <= size_bytes:
            return
        for place, (text, layer) in enumerate(zip(self.texts, self.layers, strict=True)):
            lines -= bool(layer)
            size_bytes -= len(text.encode())
            if lines < 0 or size_bytes < 0:
                del self.texts[place:], self.layers[place:]
                self._events = {at: events for at, events in self._events.items() if at < place}
                return

    def encoded(self) -> bytes:
        """All lines as bytes."""
        return "".join(self.texts).encode()


def _where(pid: int, tid: int, cpu: int) -> str:
    return f'"pid":{pid},"tid":{tid},"cpu":{cpu}' if pid else f'"cpu":{cpu}'


def _args(members: str) -> str:
    return f',"args":{{{members}}}' if members else ""
