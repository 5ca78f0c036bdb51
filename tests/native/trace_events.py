"""Events of Chrome's trace JSON into rows: those that the core takes are what Python makes of them."""

from __future__ import annotations

import ctypes
import json
from contextlib import ExitStack
from random import Random
from typing import Any

import numpy as np
import orjson

from tests.native import buffers, inputs, sorting
from tracepipe.readers.chrome import ns_of
from tracepipe.readers.ids import flow_number, flow_text
from tracepipe.readers.sorted_rows import FLOW, MARK, SLICE, SortedRow

_ALL, _FOREIGN, _NEW, _FULL = range(4)
_PASSED_OVER, _LEFT, _ROW, _ALLOCATION = range(4)
_KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
_NAMES = ("a", "b", "bytes", "size", "operation", "ts", 'k"', "address", "Device Type")
_PLACES = ("device", "stream", "grid", "block", "correlation")
_LAST = (("Bytes", "size"), ("Addr", "address"), ("Total Allocated", "total_allocated"))
_RULES: list[dict[str, str | None]] = [
    {},
    {"device": None, "stream": None, "bytes": "size"},
    {"grid": None, "a": "b"},
]
_AHEAD: list[dict[str, Any]] = [{}, {"operation": "set"}, {"a": "é"}]
_FIRSTS = (b"", b'{"name":"f"}', b"x" * 300)
_FLOWS: list[tuple[Any, ...]] = [(), ("fwdbwd", "f", None), ("c" * 200, None, None)]
_LIMIT_NS = (1 << 62) - 1
_Kind = tuple[int, int, int, int, int, int]
"""What becomes of its events, whether they have a launch, and places among the rules and texts above."""


def events_take(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_events_take` and what else knows kinds, over some texts."""
    with ExitStack() as stack:
        known = core.tp_events_new(rng.getrandbits(64))
        assert known
        stack.callback(core.tp_events_free, known)
        # One row at a time, so that they are met in the order of the events.
        rows = core.tp_sorted_new(rng.getrandbits(64), 1, 1 << 20)
        assert rows
        stack.callback(core.tp_sorted_free, rows)
        places = [0]
        for rules in _RULES:
            for old, new in rules.items():
                texts = orjson.dumps(old), b"" if new is None else orjson.dumps(new)
                sized = [part for text in texts for part in (buffers.text(text), len(text))]
                assert core.tp_events_rule(known, *sized) > places[-1]
            places.append(places[-1] + len(rules))
        kinds: list[_Kind] = []
        some = [_event_text(rng) for _ in range(rng.randrange(1, 12))]
        for _ in range(rng.randrange(1, 4)):
            _take(
                core, (known, rows), kinds, places, [rng.choice(some) for _ in range(rng.randrange(20))], rng
            )
            if rng.random() < 0.1:
                core.tp_events_forget(known)
                kinds.clear()


def _number(rng: Random) -> Any:
    return rng.choice(
        [
            rng.random() * 10 ** rng.randrange(-6, 12),
            rng.randrange(9),
            -5,
            0.5,
            -0.0,
            1e-7,
            0.00012,
            1e300,
            123456789.012345,
            inputs.number(rng),
            40.0,
        ]
    )


def _value(rng: Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 9 else 5)
    if kind < 2:
        return _number(rng)
    if kind < 5:
        return rng.choice(("", "a", 'q"', "\n", "é", "\x01", "/", "\\", None, True, False, "\ud800", "🔥"))
    if kind == 7 and rng.random() < 0.2:
        return {"a": _value(rng, depth + 1)}
    return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]


def _event_text(rng: Random) -> bytes:
    event: dict[str, Any] = {
        "ph": rng.choice(("X", "X", "X", "i", "s", "f", "C", "C", "M", "XX", "")),
        "cat": rng.choice(("kernel", "cpu_op", "ac2g", 'c"', 1)),
        "name": rng.choice(("f", "g\n", "é", "", 5)),
        "pid": rng.choice((0, 7, "Spans", -1, 1.5)),
        "tid": rng.choice((0, 7, "stream 7")),
        "ts": _time(rng),
        "dur": _time(rng),
    }
    if event["ph"] in "sfC" and rng.random() < 0.8:
        del event["dur"]
    for key in rng.sample(sorted(event), rng.choice((0, 0, 1, 2))):
        del event[key]
    if rng.random() < 0.3 or event.get("ph") in ("s", "f"):
        event["id"] = rng.choice((0, 5, -7, "0x5f", "", "a b", 'q"', "é", 1.5, True, None, "x" * 120, [1]))
    if rng.random() < 0.3:
        event[rng.choice(("id", "s", "bp", "a", "stream"))] = _value(rng)
    args = {
        rng.choice((*_PLACES, *_NAMES, inputs.word(rng))): _value(rng)
        for _ in range(60 if rng.random() < 0.02 else rng.randrange(6))
    }
    if rng.random() < 0.4:
        args["correlation"] = rng.choice((0, 1, 77, (1 << 31) - 1, 1 << 31, -1, "7", 1.0))
    if rng.random() < 0.3:
        allocated = {"Bytes": rng.choice((512, -512, 0, "5", 1.5)), "Addr": 1 << 46, "Total Allocated": 9}
        args |= {key: allocated[key] for key in rng.sample(sorted(allocated), rng.randrange(4))}
    if rng.random() < 0.8:
        event["args"] = args
    if rng.random() < 0.2:
        items = list(event.items())
        rng.shuffle(items)
        event = dict(items)
    text = json.dumps(event, ensure_ascii=rng.random() < 0.1, indent=rng.choice((None, 1)))
    data = text.encode("utf-8", "surrogatepass")
    return inputs.mutated(rng, data) if rng.random() < 0.3 else data


def _time(rng: Random) -> Any:
    whole = rng.choice((0, 5, 1712195495519689, rng.randrange(1 << 41), 4611686018427387, 10**17))
    return rng.choice((whole, whole + 0.5, f"{whole}.125", whole / 1000, -whole))


def _take(
    core: ctypes.CDLL,
    at_work: tuple[int, int],
    kinds: list[_Kind],
    places: list[int],
    texts: list[bytes],
    rng: Random,
) -> None:
    """Take events, with a kind at random for each that is new."""
    text, (known, rows) = b",".join(texts), at_work
    sizes = np.array([len(one) for one in texts], np.int64)
    starts = np.cumsum(np.append(0, sizes[:-1] + 1))[: len(texts)]
    ends, given = starts + sizes, buffers.text(text)
    times, why = np.array([_LIMIT_NS, _LIMIT_NS, 0], np.int64), np.zeros(1, np.int64)
    at, met = 0, 0
    columns = starts.ctypes.data, ends.ctypes.data
    made: list[SortedRow] = []
    while True:
        at = core.tp_events_take(
            known, rows, given, *columns, at, len(texts), times.ctypes.data, why.ctypes.data
        )
        assert met <= at <= len(texts)
        for row in sorting.taken(core, rows):
            made.append(row)
            while not any(row == _row(kind, texts[met]) for kind in kinds):
                met += 1  # one that was passed over
            met += 1
        if at == len(texts):
            break
        if why[0] == _NEW:
            what = rng.choice((_PASSED_OVER, _LEFT, _ROW, _ROW, _ALLOCATION))
            one = (what, *map(rng.randrange, (2, len(_RULES), len(_FIRSTS), len(_AHEAD), len(_FLOWS))))
            members = _FIRSTS[one[3]], orjson.dumps(_AHEAD[one[4]])[1:-1], flow_text(*_FLOWS[one[5]], "")[:-2]
            sized = (ctypes.c_int64 * len(members))(*map(len, members))
            pointers = (ctypes.c_char_p * len(members))(*members)
            rules = places[one[2]], places[one[2] + 1]
            assert core.tp_events_kind(known, *one[:2], *rules, pointers, sized) == len(kinds)
            kinds.append(one)
        elif why[0] == _FOREIGN:
            at = met = at + 1
    assert times.tolist() == [
        min((row.ts_ns for row in made if row.ts_ns), default=_LIMIT_NS),
        min((row.ts_ns for row in made), default=_LIMIT_NS),
        max((row.ts_ns + row.dur_ns for row in made), default=0),
    ]


def _row(kind: _Kind, text: bytes) -> SortedRow | None:
    """The row of an event of that kind by Python."""
    try:
        event = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    what, has_launch, rules, first, ahead, flow = kind
    if what not in (_ROW, _ALLOCATION):
        return None
    phase = event["ph"]
    rank = SLICE if phase == "X" else FLOW if phase in "stf" else MARK
    outside = (*_KEYS, "id", "bp") if rank == FLOW else _KEYS
    args = {key: value for key, value in event.items() if key not in outside} | (event.get("args") or {})
    named = _RULES[rules]
    renamed = {named.get(key, key): value for key, value in args.items() if named.get(key, key) is not None}
    correlation = args.get("correlation")
    is_launch = type(correlation) is int and 0 < correlation < 1 << 31
    number = correlation if has_launch and is_launch else 0
    if rank == FLOW:
        number = flow_number(*_FLOWS[flow], str(event["id"]))
    members = {**_AHEAD[ahead], **renamed}
    if what == _ALLOCATION:
        is_of_host = args.get("Device Type") == 0 and args["Device Type"] is not False
        kept = {key: args[key] for key, _ in _LAST if key in args}
        members = {key: value for key, value in members.items() if key not in ("Bytes", "Addr")}
        if is_of_host:
            kept.pop("Total Allocated", None)
        members |= {
            name: abs(kept[key]) if key == "Bytes" else kept[key] for key, name in _LAST if key in kept
        }
    return SortedRow(
        ns_of(event["ts"], "ts", text) or 0,
        rank,
        (ns_of(event["dur"], "dur", text) or 0) if rank == SLICE else 0,
        number,
        _FIRSTS[first],
        orjson.dumps(members) if members else b"",
    )
