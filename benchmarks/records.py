"""Compares the lines that a capture makes of records with a dict and a JSON encoder for each event.

    python benchmarks/records.py [RECORDS]        default: 65536

Both give the same bytes. Times are those of this process, the best of several runs, as ratios to the first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tracepipe.hooks.hook import FilePlace, Probe
from tracepipe.hooks.names import HookIndex
from tracepipe.hooks.sets import load_set
from tracepipe.tracer.records import record
from tracepipe.tracer.records.render import RecordRenderer

RUNS = 7
PIECE_BYTES = 4096 * record.RECORD_BYTES  # what a capture renders at once
DRIVER = load_set("cuda-driver")


TURN: list[tuple[int, ...]] = [
    (record.CALL_ENTER, 0, 0x7F0012345678, 10 | 20 << 32, 1 | 256 << 32, 1 << 32 | 1),
    (record.CALL_RETURN, 0),
    (record.CALL_ENTER, 1, 0x7F0000001000),
    (record.SYSCALL_ENTER, 0, 5, 0x7FFD00001000, 4096),
    (record.SWITCH_OUT, 0, 1),
    (record.WAKEUP, 4300, 3),
    (record.SWITCH_IN, 0),
    (record.SYSCALL_EXIT, 0, 4096),
    (record.CALL_RETURN, 1),
]


def probe(symbol: str) -> Probe:
    hook = HookIndex(DRIVER.hooks, DRIVER.variants).find(symbol)
    assert hook is not None
    return Probe(symbol, symbol, FilePlace("/lib/libcuda.so.1", 64), hook)


def records(count: int) -> bytes:
    """A thread that launches and waits: calls, system calls, and its turns on a processor."""
    made = []
    for at in range(count):
        kind, number, *words = TURN[at % len(TURN)]
        place = 10**12 + 700 * at, 4243, 4242, number, kind, 0, at % 8
        made.append(record.RECORD.pack(*place, *(*words, 0, 0, 0, 0)[:4]))
    return b"".join(made)


def rendered(data: bytes) -> list[bytes]:
    renderer = RecordRenderer(
        [probe("cuLaunchKernel"), probe("cuStreamSynchronize")], {0: "read"}, DRIVER.values
    )
    pieces = []
    for at in range(0, len(data), PIECE_BYTES):
        lines = renderer.render(data[at : at + PIECE_BYTES])
        lines.counts()
        pieces.append(lines.encoded())
    return pieces


def best_s(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(RUNS):
        before_s = time.process_time()
        work()
        times.append(time.process_time() - before_s)
    return min(times)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 65536
    data = records(count)
    lines = b"".join(rendered(data)).splitlines(keepends=True)
    events = [json.loads(line) for line in lines]
    encoders: dict[str, Callable[[dict[str, Any]], bytes]] = {
        "dict and orjson": lambda event: orjson.dumps(dict(event), option=orjson.OPT_APPEND_NEWLINE),
        "dict and json": lambda event: json.dumps(dict(event), separators=(",", ":")).encode() + b"\n",
    }
    assert all(
        encode(event) == line
        for encode in encoders.values()
        for event, line in zip(events, lines, strict=True)
    )
    ours_s = best_s(lambda: rendered(data))
    print(f"{'records to lines':<20}{1e9 * ours_s / count:7.0f} ns an event")
    # As warm in the cache as new events are, and as many at a time.
    piece = [events[at % len(TURN)] for at in range(PIECE_BYTES // record.RECORD_BYTES)]
    for name, encode in encoders.items():
        taken_s = best_s(lambda: b"".join([encode(event) for event in piece]))  # noqa: B023
        ratio = taken_s / len(piece) / (ours_s / count)
        print(f"{name:<20}{1e9 * taken_s / len(piece):7.0f} ns to encode one: {ratio:.2f} of all that")


if __name__ == "__main__":
    main()
