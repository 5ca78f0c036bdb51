"""Events of Chrome's trace JSON into rows: those that the core takes are what Python makes of them."""

from __future__ import annotations

import ctypes
import json
from random import Random
from typing import Any

import numpy as np
import orjson

from tests.native import buffers, inputs
from tracepipe.native.signatures import EventRows
from tracepipe.readers.chrome_numbers import ns_of

_ALL, _FOREIGN, _NEW, _FULL = range(4)
_PASSED_OVER, _LEFT, _ROW = range(3)
_KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
_PLACES = ("device", "stream", "grid", "block", "correlation")
_RULES: list[dict[str, str | None]] = [
    {},
    {"device": None, "stream": None, "bytes": "size"},
    {"grid": None, "a": "b"},
]
_AHEAD: list[dict[str, Any]] = [{}, {"operation": "set"}, {"a": "é"}]
_LAUNCH_BITS = 3 << 40


def events_take(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_events_take` and what else knows kinds, over some texts."""
    known = core.tp_events_new(rng.getrandbits(64), _LAUNCH_BITS)
    assert known
    try:
        for number, rules in enumerate(_RULES):
            text = b"".join(_quoted(name) + b"\0" for pair in rules.items() for name in pair)
            assert core.tp_events_rules(known, number, buffers.text(text), len(text)) == 0
        kinds: list[tuple[int, int, int, int]] = []
        some = [_event_text(rng) for _ in range(rng.randrange(1, 12))]
        for _ in range(rng.randrange(1, 4)):
            _take(core, known, kinds, [rng.choice(some) for _ in range(rng.randrange(20))], rng)
            if rng.random() < 0.1:
                core.tp_events_forget(known)
                kinds.clear()
    finally:
        core.tp_events_free(known)


def _quoted(name: str | None) -> bytes:
    return b"" if name is None else orjson.dumps(name)


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
        "ph": rng.choice(("X", "X", "X", "i", "s", "f", "M", "C", "XX", "")),
        "cat": rng.choice(("kernel", "cpu_op", "ac2g", 'c"', 1)),
        "name": rng.choice(("f", "g\n", "é", "", 5)),
        "pid": rng.choice((0, 7, "Spans", -1, 1.5)),
        "tid": rng.choice((0, 7, "stream 7")),
        "ts": _time(rng),
        "dur": _time(rng),
    }
    for key in rng.sample(sorted(event), rng.choice((0, 0, 1, 2))):
        del event[key]
    if rng.random() < 0.3:
        event[rng.choice(("id", "s", "bp", "a", "stream"))] = _value(rng)
    args = {
        rng.choice((*_PLACES, "a", "b", "bytes", "size", "operation", "ts", 'k"', inputs.word(rng))): _value(
            rng
        )
        for _ in range(60 if rng.random() < 0.02 else rng.randrange(6))
    }
    if rng.random() < 0.4:
        args["correlation"] = rng.choice((0, 1, 77, (1 << 31) - 1, 1 << 31, -1, "7", 1.0))
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
    core: ctypes.CDLL, known: int, kinds: list[tuple[int, int, int, int]], texts: list[bytes], rng: Random
) -> None:
    """Take events, with a kind at random for each that is new."""
    text = b",".join(texts)
    sizes = np.array([len(one) for one in texts], np.int64)
    starts = np.cumsum(np.append(0, sizes[:-1] + 1))[: len(texts)]
    ends, given, room = starts + sizes, buffers.text(text), rng.randrange(1, 8)
    numbers, kind = np.zeros((5, room), np.int64), np.zeros(room, np.int32)
    view, made = buffers.view(EventRows, *numbers, kind), np.zeros(2, np.int64)
    at, taken = 0, []
    while True:
        before, came_from = int(made[0]), at
        at = core.tp_events_take(
            known, given, starts.ctypes.data, ends.ctypes.data, at, len(texts), view, made.ctypes.data, room
        )
        assert came_from <= at <= len(texts)
        assert before <= made[0] <= min(room, before + at - came_from)
        taken += texts[came_from:at]
        if at == len(texts) or made[1] == _FULL:
            _expect_rows(core, known, kinds, taken, numbers[:, : made[0]], kind.tolist())
            made[0], taken = 0, []
        if at == len(texts):
            return
        if made[1] == _NEW:
            what = rng.choice((_PASSED_OVER, _LEFT, _ROW, _ROW))
            one = (what, rng.randrange(2), rng.randrange(len(_RULES)), rng.randrange(len(_AHEAD)))
            ahead = orjson.dumps(_AHEAD[one[3]])[1:-1]
            assert core.tp_events_kind(known, *one[:3], buffers.text(ahead), len(ahead)) == len(kinds)
            kinds.append(one)
        elif made[1] == _FOREIGN:
            at += 1


def _expect_rows(
    core: ctypes.CDLL,
    known: int,
    kinds: list[tuple[int, int, int, int]],
    texts: list[bytes],
    numbers: Any,
    numbers_of_kinds: list[int],
) -> None:
    """Of the events that were taken, those that were not passed over are the rows."""
    there = ctypes.c_void_p()
    size = core.tp_events_texts(known, ctypes.byref(there))
    whole, start, left = buffers.taken(size, there), 0, list(texts)
    for ts, rank, dur, number, end, kind in zip(
        *numbers.tolist(), numbers_of_kinds[: numbers.shape[1]], strict=True
    ):
        _, has_launch, rules, ahead = kinds[kind]
        args, start = whole[start:end], end
        while True:
            text = left.pop(0)
            event = orjson.loads(text)
            if (ts, rank, dur, number, args) == _row(event, text, has_launch, _RULES[rules], _AHEAD[ahead]):
                break
    assert start == size


def _row(
    event: dict[str, Any], text: bytes, has_launch: int, rules: dict[str, str | None], ahead: dict[str, Any]
) -> tuple[Any, ...]:
    """The row of an event by Python."""
    args = {key: value for key, value in event.items() if key not in _KEYS} | (event.get("args") or {})
    renamed = {rules.get(key, key): value for key, value in args.items() if rules.get(key, key) is not None}
    correlation = args.get("correlation")
    is_launch = type(correlation) is int and 0 < correlation < 1 << 31
    is_slice = event["ph"] == "X"
    said = {**ahead, **renamed}
    return (
        ns_of(event["ts"], "ts", text),
        0 if is_slice else 1,
        ns_of(event["dur"], "dur", text) if is_slice else 0,
        (correlation if is_launch else 0) | _LAUNCH_BITS if has_launch else 0,
        orjson.dumps(said) if said else b"",
    )
