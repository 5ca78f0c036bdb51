"""Recordings that are nearly those of fixtures/: some of their fields, values, lines and bytes are others."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import orjson
import zstandard

from tests.fuzz import packets
from tests.golden.hostile import HEADER, PAIR, START_NS, _dumped
from tests.native.inputs import any_line, mutated

FIXTURES = Path(__file__).parents[2] / "fixtures"
FINDS = Path(__file__).parent / "finds"
_LINES_MAX = 40
_TRACES_SHARE = 0.06
_EXTREMES: tuple[Any, ...] = (
    0, 1, -1, 31, 32, 33, 255, 65_535, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 32, (1 << 53) + 1, (1 <<
    62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1,
    10**30, 0.0, -0.0, 0.5, -1.5, 1e15, 1e308, -1e308, 5e-324, float("nan"), float("inf"), True, False,
    None, "", [], {}, [[]], {"": {}}, [0, 0, 0], [1, 1, 1], [1 << 31, 1 << 31, 1 << 31], [1, 2], "0x0",
    "5", "NaN", "monotonic", "realtime", "globaltimer:0", "globaltimer:1", "tsc", "x" * 3_000,
    "\x1b]0;t\x07", "\u202e\u2028\x9b", "é日😀", "$^{", "=1+1", "</script>", "a\x00b", "\\", '"',
    "%s{}[red]",
)  # fmt: skip
_NAMES = (
    "ts_ns", "type", "name", "phase", "pid", "tid", "cpu", "comm", "gpu", "stream", "launch", "grid",
    "block", "thread", "clock", "dur_ns", "args", "warp", "sm", "slot", "entry_ns", "exit_ns",
    "exit_count", "entry_mask", "exit_mask", "entry_clk", "exit_clk", "source_ns", "host_lo_ns",
    "host_hi_ns", "count", "layer", "reason", "counts", "losses", "clocks", "clock_pairs", "start",
    "command", "gpus", "schema", "ended_by", "size", "address", "ptr", "call", "result", "direction",
    "kind", "unclosed", "no_begin", "ts", "duration_us", "duration_ms", "event_id", "data", "op",
    "bytes", "window", "cause", "stack", "id", "frames", "function", "file", "line", "omitted",
)  # fmt: skip
_WORDS = (
    "userspace", "syscall", "kernel", "scheduler", "memory", "transfer", "gpu_kernel", "gpu_warp",
    "gpu_thread", "gpu_thread_exit", "header", "footer", "clock", "loss", "window", "stack", "B", "E", "I",
    "X", "alloc", "free", "running", "ioctl", "cuLaunchKernel", "cuMemAlloc_v2", "cuMemFree_v2",
    "cuMemcpyHtoD_v2", "printf", "lost_events",
)  # fmt: skip


@cache
def seeds() -> list[list[bytes]]:
    """The lines of every recording to start from, and of what was found before."""
    paths = [*sorted(FIXTURES.glob("*/input.*")), *sorted(FINDS.iterdir())]
    return [path.read_bytes().split(b"\n") for path in paths if path.suffix in (".jsonl", ".txt")]


def recording(rng: Random) -> bytes:
    """One recording."""
    if rng.random() < _TRACES_SHARE:
        return packets.trace(rng)
    lines = _invented(rng) if rng.random() < 0.15 else _some(rng, rng.choice(seeds()))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 12))):
        if not lines:
            break
        rng.choice(_CHANGES)(rng, lines)
    newline = rng.choice((b"\n",) * 8 + (b"\r\n",))
    data = rng.choice((b"",) * 15 + (b"\xef\xbb\xbf",)) + newline.join(lines)
    if rng.random() < 0.05:
        data = mutated(rng, data)
    if rng.random() < 0.05:
        data = data[: rng.randrange(len(data) + 1)]
    if rng.random() < 0.05:
        data = rng.choice((partial(gzip.compress, mtime=0), zstandard.compress))(data)
        if rng.random() < 0.5:
            data = mutated(rng, data[: rng.randrange(len(data) + 1)])
    return data


def _some(rng: Random, lines: list[bytes]) -> list[bytes]:
    """The first line, and some that follow each other; all of a short recording as a rule."""
    if len(lines) <= _LINES_MAX and rng.random() < 0.8:
        return list(lines)
    count = rng.choice((1, 2, 4, 10, _LINES_MAX))
    start = rng.randrange(1, max(2, len(lines) - count))
    return [lines[0], *lines[start : start + count]]


def _invented(rng: Random) -> list[bytes]:
    """Events that mean nothing, of few names, threads and streams at few times."""

    def small(most: int, size: int) -> list[int]:
        return [rng.randint(0, most) for _ in range(size)]

    def event() -> dict[str, Any]:
        layer, phase = rng.choice(_WORDS[:9]), rng.choice("BBBEEEIXX")
        made: dict[str, Any] = {
            "ts_ns": START_NS + rng.randrange(30),
            "type": layer,
            "name": rng.choice(_WORDS[17:]),
        }
        if layer == "gpu_warp":
            counts = [rng.randrange(3) for _ in range(rng.randrange(5))]
            made |= {
                "gpu": rng.randrange(2),
                "warp": small(9, len(counts)),
                "entry_ns": small(20, len(counts)),
            }
            made |= {"exit_count": counts, "exit_ns": small(9, sum(counts))}
            more: dict[str, Any] = {
                "sm": small(1, len(counts)), "slot": small(1, len(counts)),
                "entry_mask": small(7, len(counts)), "exit_mask": small(7, sum(counts)),
                "exit_clk": small(99, sum(counts)), "grid": small(3, 3),
                "block": small(40, 3), "launch": rng.randrange(3),
            }  # fmt: skip
            return made | {name: more[name] for name in rng.sample(list(more), rng.randrange(len(more)))}
        made["phase"] = phase
        if phase == "X" or rng.random() < 0.3:
            made["dur_ns"] = rng.randrange(12)
        made |= dict(
            zip(("gpu", "stream") if layer.startswith("gpu") else ("pid", "tid"), small(2, 2), strict=True)
        )
        if layer == "gpu_thread":
            made |= {"block": small(1, 3), "thread": small(33, 3)}
        if rng.random() < 0.5:
            made["launch"] = rng.choice((0, 1, 2, (1 << 64) - 1))
        if rng.random() < 0.5:
            made["args"] = {rng.choice(_NAMES[-14:]): rng.choice(_EXTREMES) for _ in range(rng.randrange(3))}
        return made

    return [_dumped(HEADER), *(_dumped(event()) for _ in range(rng.randrange(40)))]


# Lines ---------------------------------------------------------------------------------------------------


def _delete(rng: Random, lines: list[bytes]) -> None:
    del lines[rng.randrange(len(lines))]


def _delete_most(rng: Random, lines: list[bytes]) -> None:
    kept = rng.sample(range(len(lines)), min(len(lines), rng.choice((0, 1, 2, 3))))
    lines[1:] = [lines[at] for at in sorted(kept) if at]


def _duplicate(rng: Random, lines: list[bytes]) -> None:
    line = rng.choice(lines)
    at = rng.randrange(len(lines) + 1)
    lines[at:at] = [line] * rng.choice((1, 1, 2, 30))


def _swap(rng: Random, lines: list[bytes]) -> None:
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]


def _shuffle(rng: Random, lines: list[bytes]) -> None:
    rest = lines[1:]
    rng.shuffle(rest)
    lines[1:] = rest


def _cut(rng: Random, lines: list[bytes]) -> None:
    at = rng.randrange(len(lines))
    place = rng.randrange(len(lines[at]) + 1)
    lines[at : at + 1] = rng.choice(([lines[at][:place]], [lines[at][:place], lines[at][place:]]))


def _join(rng: Random, lines: list[bytes]) -> None:
    at = rng.randrange(len(lines))
    lines[at : at + 2] = [b"".join(lines[at : at + 2])]


def _mix(rng: Random, lines: list[bytes]) -> None:
    """Put in lines of another recording, of any format."""
    other = rng.choice(seeds())
    start = rng.randrange(len(other))
    at = rng.randrange(len(lines) + 1)
    lines[at:at] = other[start : start + rng.choice((1, 1, 3, 10))]


def _odd(rng: Random, lines: list[bytes]) -> None:
    at = rng.randrange(len(lines) + 1)
    lines[at:at] = [any_line(rng).replace(b"\n", b" ")]


def _bytes(rng: Random, lines: list[bytes]) -> None:
    at = rng.randrange(len(lines))
    lines[at] = mutated(rng, lines[at]).replace(b"\n", b" ")


def _paired(rng: Random, lines: list[bytes]) -> None:
    """Give a clock a pair, or a header of many clocks."""
    pair = PAIR | {"clock": rng.choice(("globaltimer:0", "globaltimer:1", "tsc", "realtime"))}
    pair["source_ns"] = rng.choice((0, PAIR["source_ns"], rng.randrange(1 << 62)))
    at = rng.randrange(1, len(lines) + 1)
    lines[at:at] = [_dumped(pair)]
    if rng.random() < 0.5:
        lines[0] = _dumped(HEADER)


# Fields --------------------------------------------------------------------------------------------------


def _field(rng: Random, lines: list[bytes]) -> None:
    """Change one value, key or item somewhere inside a record."""
    at = rng.randrange(len(lines))
    try:
        record = orjson.loads(lines[at])
    except orjson.JSONDecodeError:
        _number(rng, lines)
        return
    if not isinstance(record, dict) or not record:
        return
    holder, key = _place(rng, record)
    value = holder[key]
    match rng.randrange(9):
        case 0 | 1 | 2:
            holder[key] = rng.choice(_EXTREMES)
        case 3:
            holder[key] = rng.choice(_WORDS)
        case 4:
            del holder[key]
        case 5:
            holder[key] = _near(rng, value)
        case 6 if isinstance(holder, dict):
            holder[rng.choice(_NAMES)] = holder.pop(key) if rng.random() < 0.5 else value
        case 7 if isinstance(holder, list):
            holder[key:key] = [value] * rng.choice((1, 3, 300))
        case _ if isinstance(holder, dict):
            # The same field twice in the text: the last one counts.
            again = _dumped({key: rng.choice((value, *_EXTREMES))})
            if holder is record:
                lines[at] = _dumped(record)[:-1] + b"," + again[1:]
                return
    lines[at] = json.dumps(record).encode() if rng.random() < 0.1 else _dumped(record)


def _place(rng: Random, record: dict[str, Any]) -> tuple[Any, Any]:
    """A holder and a key of it, anywhere in a record."""
    holder: Any = record
    while True:
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.3:
            return holder, key
        holder = inner


def _near(rng: Random, value: Any) -> Any:
    """Nearly the same."""
    if isinstance(value, bool) or value is None:
        return rng.choice(_EXTREMES)
    if isinstance(value, int):
        return rng.choice(
            (value + 1, value - 1, -value, value * 1_000, value // 1_000, value << 32, float(value))
        )
    if isinstance(value, str):
        return rng.choice((value[1:], value + value, value.upper(), f" {value}", value + "\n", value * 50))
    if isinstance(value, list):
        return rng.choice((value[1:], value + value, value[::-1], [value], dict(enumerate(map(str, value)))))
    return [value]


def _exchange(rng: Random, lines: list[bytes]) -> None:
    """Exchange the values of one field between two records, or of two fields of one."""
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    try:
        one, other = orjson.loads(lines[a]), orjson.loads(lines[b])
    except orjson.JSONDecodeError:
        return
    if not (isinstance(one, dict) and isinstance(other, dict) and one and other):
        return
    key = rng.choice(list(one))
    key_there = key if key in other and rng.random() < 0.7 else rng.choice(list(other))
    one[key], other[key_there] = other[key_there], one[key]
    lines[a], lines[b] = _dumped(one), _dumped(other)


def _number(rng: Random, lines: list[bytes]) -> None:
    """Put another number, or another word, in the place of one of a line of text."""
    at = rng.randrange(len(lines))
    words = lines[at].split(b" ")
    place = rng.randrange(len(words))
    key, equals, value = words[place].rpartition(b"=")
    new = rng.choice(
        (
            b"%d" % rng.choice([n for n in _EXTREMES if type(n) is int]),
            rng.choice(_WORDS).encode(),
            b"",
            value * 9,
        )
    )
    words[place] = key + equals + new
    lines[at] = b" ".join(words)


_Change = Callable[[Random, list[bytes]], None]
_CHANGES: tuple[_Change, ...] = (
    *(_field,) * 10, *(_exchange,) * 2, *(_number,) * 2, _delete, _delete_most, _duplicate, _duplicate, _swap,
    _shuffle, _cut, _join, _mix, _odd, _bytes, _paired,
)  # fmt: skip
