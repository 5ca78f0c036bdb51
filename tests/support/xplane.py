"""XSpaces of XLA's profiler: made for a test, and read by a separate decoder of the wire format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tracepipe.converters.packets import delimited, double, number

Message = dict[int, list[Any]]


def message(data: bytes) -> Message:
    """The fields of a message by number: integers, or bytes."""
    out: Message = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            out.setdefault(tag >> 3, []).append(varint())
            continue
        size = {1: 8, 5: 4}.get(tag & 7) or varint()
        out.setdefault(tag >> 3, []).append(data[at : at + size])
        at += size
    return out


@dataclass
class Event:
    """An event with its name, its times in ns after the line's, and its numeric stats by name."""

    plane: str
    line: str
    name: str
    start_ns: int
    dur_ns: int
    stats: dict[str, Any] = field(default_factory=dict)


def events_of(data: bytes) -> list[Event]:
    """All events that have a time."""
    out = []
    for plane in map(message, message(data)[1]):
        names = {
            entry.get(1, [0])[0]: message(entry[2][0]).get(2, [b""])[0].decode()
            for key in (4, 5)
            for entry in map(message, plane.get(4, []) if key == 4 else [])
        }
        stats = {
            entry.get(1, [0])[0]: message(entry[2][0]).get(2, [b""])[0].decode()
            for entry in map(message, plane.get(5, []))
        }
        for line in map(message, plane.get(3, [])):
            for event in map(message, line.get(4, [])):
                stated = {stats[stat[1][0]]: stat for stat in map(message, event.get(4, []))}
                start_ps, dur_ps = event.get(2, [0])[0], event.get(3, [0])[0]
                out.append(
                    Event(
                        plane[2][0].decode(),
                        line.get(2, [b""])[0].decode(),
                        names[event[1][0]],
                        line.get(3, [0])[0] + start_ps // 1000,
                        dur_ps // 1000,
                        {name: (stat.get(3) or stat.get(4) or [None])[0] for name, stat in stated.items()},
                    )
                )
    return out


def start_of(data: bytes) -> int:
    """When the profile began, ns."""
    for plane in map(message, message(data)[1]):
        if plane[2][0] == b"Task Environment":
            return int(max(stat[3][0] for stat in map(message, plane[6]) if 3 in stat and stat[1][0] == 1))
    return 0


# Making them -----------------------------------------------------------------------------------------------


def stat(id: int, value: int | float | str | None = None, *, ref: int | None = None) -> bytes:
    """An XStat."""
    if ref is not None:
        value_field = number(7, ref)
    elif isinstance(value, str):
        value_field = delimited(5, value.encode())
    else:
        value_field = double(2, value) if isinstance(value, float) else number(4, value or 0)
    return number(1, id) + value_field


def unsigned_stat(id: int, value: int) -> bytes:
    """An XStat of an uint64."""
    return number(1, id) + number(3, value)


def event(id: int, offset_ps: int | None, dur_ps: int | None, *stats: bytes) -> bytes:
    """An XEvent; without an offset an aggregate."""
    where = number(5, 3) if offset_ps is None else number(2, offset_ps)
    length = b"" if dur_ps is None else number(3, dur_ps)
    return number(1, id) + where + length + b"".join(delimited(4, one) for one in stats)


def line(id: int, name: str, timestamp_ns: int, *events: bytes) -> bytes:
    """An XLine."""
    head = number(1, id) + delimited(2, name.encode()) + number(3, timestamp_ns)
    return head + b"".join(delimited(4, one) for one in events)


def plane(name: str, *lines: bytes, events: Any = (), stats: Any = (), own: Any = ()) -> bytes:
    """An XPlane; `events` and `stats` are names, numbered from 1; `own` are the plane's own stats."""
    out = delimited(2, name.encode()) + b"".join(delimited(3, one) for one in lines)
    for key, names in ((4, events), (5, stats)):
        for id, text in enumerate(names, 1):
            value = number(1, id) + delimited(2, text.encode())
            out += delimited(key, number(1, id) + delimited(2, value))
    return out + b"".join(delimited(6, one) for one in own)


def space(*planes: bytes) -> bytes:
    """An XSpace."""
    return b"".join(delimited(1, one) for one in planes)
