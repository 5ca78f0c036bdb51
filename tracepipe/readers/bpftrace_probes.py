r"""Reads the lines that bpftrace's one-liners print for each probe that is hit.

    [123456789] kprobe:nv_bind_context           printf("[%lld] %s\n", nsecs, probe)
    kprobe:nv_bind_context called at 123456789   printf("%s called at %lld\n", probe, nsecs)
    uprobe:/usr/lib/libcuda.so.1:cuMemAlloc_v2   printf("%s\n", probe): no time

Each line is an instant of its probe's layer. bpftrace's `nsecs` counts from the machine's start, with or
without the time that it slept: these times are on a clock "nsecs". Where no line has a time, lines are placed
by their order, on the clock "order", which counts from 0. All other text that bpftrace does not print itself
is from the script or the traced program (`Hit`), and is counted. The lines may be wrapped as with `bpftrace
-f json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, BinaryIO, cast

import orjson

from tracepipe.event.model import TIME_LIMIT_NS, Problem, Record, new_header
from tracepipe.hooks.probe_names import PATTERN, ProbeName, probe_named
from tracepipe.readers.bpftrace_records import (
    NO_NEIGHBOUR,
    NO_TIME,
    OWN_TEXT,
    PLACED,
    SAID,
    Undated,
    Unwrapped,
    is_wrapped,
    loss_of,
    printed_lines,
)
from tracepipe.readers.recording import Batch, Recording, Rejoined, recording_of

TIMED, UNTIMED = "nsecs", "order"
"""The clocks of lines with and without times."""
STEP_NS = 1_000
# These lines are short: a chunk has thousands of them.
CHUNK_BYTES = 1 << 16
HEAD_BYTES = 1 << 16

_PROBE = PATTERN.encode()
_TIME_FIRST = re.compile(rb"\[(\d{1,20})\]\s+(%b)" % _PROBE)
_TIME_LAST = re.compile(rb"(%b) called at (\d{1,20})" % _PROBE)
_BARE = re.compile(_PROBE)
_NO_TIMES = (
    "is missing: lines are read as hits of their probes, keep their order and are placed 1 µs apart "
    "(args.placed_by); a list of probes, `bpftrace -l`, looks the same"
)


def _parts(text: bytes) -> tuple[bytes, bytes] | None:
    """The probe and the time of a line, the time empty where it has none; None for other text."""
    if found := _TIME_FIRST.fullmatch(text):
        return found[2], found[1]
    if found := _TIME_LAST.fullmatch(text):
        return found[1], found[2]
    return (text, b"") if _BARE.fullmatch(text) else None


@lru_cache(maxsize=1024)
def _probe_of(text: bytes) -> tuple[str, ProbeName]:
    name = text.decode(errors="backslashreplace")
    return name, probe_named(name)


class _Text:
    """The state of reading one input, which decides how its next lines are understood."""

    def __init__(self, clock: str, *, between: bool) -> None:
        self._clock = clock
        self._any = False
        self._count = 0
        self._stated: set[str] = set()
        self._undated = Undated[bytes]() if between else None
        self._unwrapped = Unwrapped()

    def read(self, number: int, text: bytes, cut: bool, batch: Batch) -> None:
        """Add what is on line `number` to `batch`. A `cut` line has no newline, as the input ended."""
        text = text.strip()
        record = _wrapped(text)
        if record is not None:
            for printed_at, printed in self._unwrapped.take(number, record, batch):
                self._read_text(printed_at, printed.strip(), False, batch)
        else:
            self._read_text(number, text, cut, batch)

    def _read_text(self, number: int, text: bytes, cut: bool, batch: Batch) -> None:
        if not text or OWN_TEXT.match(text):
            return
        if loss := loss_of(text):
            batch.records.append(loss)
            return
        parts = _parts(text)
        if parts is None:
            batch.printed.append((number, text))
            return
        self._any = True
        self._add(number, *parts, batch)
        if cut:
            message = "ends with the input and may not be whole"
            batch.problems.append(Problem(number, "", message, skipped=False))

    def _add(self, number: int, text: bytes, time: bytes, batch: Batch) -> None:
        if self._clock == UNTIMED:
            self._add_by_order(number, text, time, batch)
        elif not time and self._undated is not None:
            self._say_once(number, SAID, batch)
            self._add_all(self._undated.wait(number, text), batch)
        elif not time:
            batch.problems.append(Problem(number, *NO_TIME))
        elif (ts_ns := int(time)) > TIME_LIMIT_NS:
            batch.problems.append(Problem(number, "ts", f"must be at most {TIME_LIMIT_NS}, not {ts_ns}"))
        else:
            if self._undated is not None:
                self._add_all(self._undated.until(ts_ns), batch)
            batch.records.append(_event(text, ts_ns, {}))

    def _add_by_order(self, number: int, text: bytes, time: bytes, batch: Batch) -> None:
        """Add one of the lines that are placed at equal distances, as no line before has a time."""
        if time:
            message = "has a time, but the lines before are placed by their order"
            batch.problems.append(Problem(number, "ts", message))
            return
        self._say_once(number, _NO_TIMES, batch)
        batch.records.append(_event(text, self._count * STEP_NS, {"placed_by": "order"}))
        self._count += 1

    def _add_all(self, lines: Iterable[tuple[int, bytes, int | None]], batch: Batch) -> None:
        """Add lines without a time at the times where they were placed."""
        for number, text, ts_ns in lines:
            if ts_ns is None:
                batch.problems.append(Problem(number, *NO_NEIGHBOUR))
            else:
                batch.records.append(_event(text, ts_ns, {"placed": PLACED}))

    def _say_once(self, number: int, message: str, batch: Batch) -> None:
        if message not in self._stated:
            self._stated.add(message)
            batch.problems.append(Problem(number, "ts", message, skipped=False))

    def at_end(self, batch: Batch) -> None:
        """Read a last line without a newline, and add the problems of the whole input."""
        for number, text in self._unwrapped.rest():
            self._read_text(number, text.strip(), True, batch)
        if self._undated is not None:
            self._add_all(self._undated.rest(), batch)
        if not self._any:
            batch.problems.append(Problem(0, "", "has no line of a probe", skipped=False))


def _event(text: bytes, ts_ns: int, args: dict[str, Any]) -> Record:
    """The instant of a probe's name."""
    args["probe"], probe = _probe_of(text)
    # Without a thread, a return cannot be matched with its call: it is a separate event, and not a second
    # call.
    name = f"{probe.name} returns" if probe.is_return else probe.name
    own = {"layer": probe.layer_name} if probe.layer_name else {}
    return {"type": probe.layer, "name": name, "phase": "I", "ts_ns": ts_ns, **own, "args": args}


def _wrapped(text: bytes) -> Record | None:
    """The record of bpftrace in a line, or None."""
    if not text.startswith(b"{"):
        return None
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return record if is_wrapped(record) else None


def read(stream: BinaryIO, *, between: bool = False) -> Recording:
    """Header and batches of such a stream.

    `between`: lines without a time are placed between those that have one.
    """
    head = stream.read(HEAD_BYTES)
    found = (_parts(text) for text, _ in printed_lines(head))
    times = [time for parts in found if parts for time in parts[1:]]
    clock = TIMED if any(times) or not times else UNTIMED
    header = new_header(clock=clock, clocks=[clock])
    lines = _Text(clock, between=between)
    return recording_of(header, cast(BinaryIO, Rejoined(head, stream)), lines, CHUNK_BYTES)


def sniff(head: bytes) -> bool:
    """Whether a line of `head` is of a probe."""
    return any(_parts(text) for text, _ in printed_lines(head))
