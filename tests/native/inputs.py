"""Random input: lines of the event file, text that is nearly one, and other bytes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

FIXTURES = Path(__file__).parents[2] / "fixtures"
_KNOWN_MAX = 3000
_LIMITS = (
    0,
    1,
    2**31 - 1,
    2**32,
    2**53,
    2**62 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**18,
    10**19,
)
# What the parsers decide by, and what has tripped others.
_TOKENS = (
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"-", b"-0", b"0", b"00", b".5", b"1e5", b"true", b"tru",
    b"null", b"{}", b"[]", b"[[]]", b'""', b'"":', b"\n", b"\r", b"\t", b" ", b"\x00", b"\x1f", b"\x7f",
    b"\x80", b"\xc0\x80", b"\xc3", b"\xc3\xa9", b"\xe2\x82", b"\xe2\x82\xac", b"\xed\xa0\x80", b"\xf0\x9f",
    b"\xf0\x9f\x94\xa5", b"\xf4\x90\x80\x80", b"\xff", b'{"ts_ns":', b'"args":', b'"dur_ns":', b'"launch":',
    b'"stack":',
    b'"type":"gpu_warp"', b'"warp":[', b'"entry_ns":[', b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551616",
)  # fmt: skip
_WORDS = (
    "", "a", "cuLaunchKernel", "cuMemcpyHtoD_v2", "é", "日本語", "🔥", "x" * 63, "y" * 64, "z" * 65, "size",
    "dst", "cpu", "launch", "source_ns", "flags", "name", "stream", "\x7f", "cuda error: out of memory",
)  # fmt: skip
WARP_COLUMNS = (
    "warp", "sm", "slot", "entry_ns", "entry_clk", "entry_mask", "exit_count", "range_count", "exit_ns",
    "exit_clk", "exit_mask", "range_name", "range_clk", "range_dur_clk", "range_open",
)  # fmt: skip


def number(rng: Random) -> int:
    """Small as a rule, at a limit now and then."""
    if rng.random() < 0.1:
        return max(0, rng.choice(_LIMITS) + rng.randint(-1, 1))
    return rng.randrange(1 << rng.randrange(1, 63))


def word(rng: Random) -> str:
    """A string of a name or a value."""
    if rng.random() < 0.05:
        return "w" * rng.randrange(4000)
    return rng.choice(_WORDS)


def scalar(rng: Random) -> Any:
    """A value of the native grammar."""
    kind = rng.randrange(8)
    return (number(rng), -number(rng), word(rng), word(rng), True, False, None, rng.randrange(100))[kind]


def arguments(rng: Random) -> dict[str, Any]:
    """Arguments of an event, rarely more of them than the core takes."""
    count = rng.randrange(1, 40) if rng.random() < 0.05 else rng.randrange(1, 6)
    return {
        f"{word(rng)}{at if rng.random() < 0.7 else ''}": _value(rng, 12 if rng.random() < 0.1 else 2)
        for at in range(count)
    }


def _value(rng: Random, depth: int) -> Any:
    if not depth or rng.random() < 0.7:
        return scalar(rng)
    if rng.random() < 0.6:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {f"{word(rng)}{at}": _value(rng, depth - 1) for at in range(rng.randrange(4))}


def event_line(rng: Random) -> bytes:
    """A line of an event, in the native grammar but for some."""
    record: dict[str, Any] = {"ts_ns": number(rng)}
    fields: list[tuple[str, Any]] = [
        (
            "type",
            rng.choice(["userspace", "syscall", "gpu_kernel", "gpu_warp", "gpu_thread", "gpu_thread_exit"]),
        ),
        ("name", word(rng)),
        ("phase", rng.choice("BEIX")),
        ("pid", rng.randrange(5)),
        ("tid", rng.randrange(5)),
    ]
    fields += [("dur_ns", number(rng))] * (rng.random() < 0.4)
    fields += [("launch", number(rng))] * (rng.random() < 0.3)
    fields += [("stack", number(rng))] * (rng.random() < 0.2)
    fields += [("args", arguments(rng))] * (rng.random() < 0.5)
    for name in ("block", "thread"):
        fields += [(name, [rng.choice((0, 1, 31, number(rng))) for _ in range(3)])] * (rng.random() < 0.2)
    fields += [(word(rng), scalar(rng))] * (rng.random() < 0.1)
    if rng.random() < 0.2:
        rng.shuffle(fields)
    line = compact(record | dict(fields))
    if rng.random() < 0.05:
        # A key that comes twice: the last one counts.
        key = rng.choice(("ts_ns", "type", "name", "dur_ns", "launch", "stack", "args", "block", "thread"))
        line = line[:-1] + b"," + compact({key: rng.choice((scalar, number, arguments))(rng)})[1:]
    return line


def warp_line(rng: Random) -> bytes:
    """A line with a batch of warps."""
    size = rng.randrange(4) if rng.random() < 0.9 else rng.randrange(300)
    record: dict[str, Any] = {"ts_ns": number(rng), "type": "gpu_warp", "name": word(rng)}
    record |= (
        {"launch": number(rng), "grid": [rng.randrange(9) for _ in range(3)]} if rng.random() < 0.5 else {}
    )
    record |= {"args": arguments(rng)} if rng.random() < 0.1 else {}
    for name in WARP_COLUMNS:
        if rng.random() < 0.8:
            record[name] = [number(rng) for _ in range(size)]
    return compact(record)


def compact(record: Any) -> bytes:
    """As captures write it: no blanks, no escapes where none is needed."""
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def cut(rng: Random, text: bytes) -> bytes:
    """As it is, or without its end: where a parser must stop by itself."""
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text


@cache
def recorded_lines() -> list[bytes]:
    """Lines of recordings that are in the repository."""
    lines: list[bytes] = []
    for path in sorted(FIXTURES.glob("*/input.jsonl")):
        with path.open("rb") as file:
            lines += [line.rstrip(b"\n") for line, _ in zip(file, range(100), strict=False)]
    return lines[:_KNOWN_MAX]


def mutated(rng: Random, data: bytes) -> bytes:
    """A few changes of bytes, pieces and tokens."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(made) + 1)
        other = min(len(made), at + rng.randrange(1, 20))
        match rng.randrange(7):
            case 0 if at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            case 1:
                made[at:at] = rng.choice(_TOKENS)
            case 2:
                made[at:other] = rng.choice(_TOKENS)
            case 3:
                del made[at:other]
            case 4:
                made[at:at] = made[at:other] * rng.randrange(1, 4)
            case 5:
                del made[at:]
            case 6:
                made[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(8)))
    return bytes(made)


def hostile(rng: Random) -> bytes:
    """What no tool writes: only tokens, deep, long, or random bytes."""
    match rng.randrange(6):
        case 0:
            return b"".join(rng.choice(_TOKENS) for _ in range(rng.randrange(60)))
        case 1:
            return b'{"ts_ns":1,"args":' + rng.choice((b"[", b'{"a":', b"[1,")) * rng.randrange(1, 4000)
        case 2:
            return b'{"ts_ns":5,"name":"' + b"n" * rng.choice((2029, 2047, 2048, 2049, 70000)) + b'"}'
        case 3:
            return rng.randbytes(rng.randrange(300))
        case 4:
            return b'{"ts_ns":' + b"9" * rng.randrange(25) + rng.choice((b"", b",", b',"', b"}"))
        case _:
            keys = b",".join(b'"k%d":%d' % (at, at) for at in range(rng.choice((23, 24, 25, 26, 3000))))
            return b'{"ts_ns":5,"args":{' + keys + rng.choice((b"}}", b"}", b""))


def any_line(rng: Random) -> bytes:
    """One of all of the above."""
    source = rng.random()
    if source < 0.1:
        return hostile(rng)
    if source < 0.35:
        line = rng.choice(recorded_lines())
    else:
        line = warp_line(rng) if source < 0.5 else event_line(rng)
    return mutated(rng, line) if rng.random() < 0.5 else line


def within_64_bits(value: int) -> int:
    """The nearest number that a column can hold."""
    return max(-(1 << 63), min(value, (1 << 63) - 1))


def moment(rng: Random) -> int:
    """A time after clocks were related, ns: as a rule within a second, at the limits now and then."""
    if rng.random() < 0.03:
        return rng.choice((-(1 << 63), -(1 << 60), -1, 0, (1 << 62) + (1 << 60), (1 << 63) - 1))
    return 1_700_000_000_000_000_000 + rng.randrange(1_000_000_000)
