"""Reads the JSON Lines that layered bpftrace and BCC CUDA tracers print.

    {"event_id":1,"ts":0.001,"type":"userspace","name":"cuInit","phase":"B"}
    {"event_id":3,"ts":0.004,"type":"scheduler","name":"nv_schedule_work"}
    # Heartbeat: 120 events
    {"event_id":7,"ts":1.2,"tid":7,"phase":"E","type":"userspace","name":"cuInit","duration_us":12.3}

`ts` is milliseconds since the start of tracing, printed with six decimals; they become nanoseconds on the
clock "trace". Keys differ by line: those for which `Event` has no field become its args. Text between the
JSON lines is from the script (a banner, heartbeats, a summary) and is skipped. `bpftrace -f json` wraps all
of this in its own records: `bpftrace_records.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import BinaryIO

import orjson

from tracepipe.event.checks import Fault, shown
from tracepipe.event.model import Problem, Record, new_header
from tracepipe.readers.bpftrace_records import OWN_TEXT, Unwrapped, is_wrapped, loss_of, printed_lines
from tracepipe.readers.call_ends import CallEnds
from tracepipe.readers.layered_events import (
    BARE_TOTAL,
    LAYER_OF_TYPE,
    NAMED_BY_TYPE,
    START,
    event_of,
    time_of,
)
from tracepipe.readers.lines import TOO_DEEP, is_too_deep, not_json
from tracepipe.readers.recording import Batch, Recording, recording_of
from tracepipe.readers.undated import NO_NEIGHBOUR, SAID, Undated

CLOCK = "trace"
# About 2000 lines: parsed, they take some MB.
CHUNK_BYTES = 1 << 18

# Lines of several processors come out of order, within the interval at which the buffers are read.
_DISORDER_NS = 1_000_000_000
# A type is a word. Much longer text is not the name of a layer.
_TYPE_CHARACTERS_MAX = 256
_BLOCK_TITLE = re.compile(rb"===+ .* ===+$")

REPEATED = "of_event"
"""A line of a launch with this key repeats a call whose begin was read: `tracepipe convert` writes both."""

_NO_START = (
    "does not state whether ts is the start or the end of a transfer; it is read as the end, because the "
    "script knows the duration only then"
)
_OWN_LAYER = "is not known: each such type becomes a layer of that name"
_NO_UNIT = "has no unit: it is read as KB, as the guide's script prints the field total_mem_kb"


class _Text:
    """The state of reading one input, which decides how its next lines are understood."""

    def __init__(self, *, between: bool) -> None:
        self._seen_json = False
        self._in_block = False
        self._stated: set[str] = set()
        self._said_own_layer = False
        self._last_ns = 0
        self._unwrapped = Unwrapped()
        self._ends = CallEnds()
        self._undated = Undated[Record]() if between else None

    def read(self, number: int, text: bytes, cut: bool, batch: Batch) -> None:
        """Add what is on line `number` to `batch`. A `cut` line has no newline, as the input ended."""
        text = text.strip()
        if not text:
            return
        if not text.startswith(b"{"):
            self._read_text(number, text, batch)
            return
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError as e:
            self._seen_json, self._in_block = True, False
            wrong = not_json(e)
            batch.problems.append(
                Problem(number, "", "was cut off in the middle of the line" if cut else wrong)
            )
            return
        if is_wrapped(line) and line["type"] not in LAYER_OF_TYPE:
            for printed_at, printed in self._unwrapped.take(number, line, batch):
                self.read(printed_at, printed, False, batch)
            return
        self._seen_json, self._in_block = True, False
        fault = ("", TOO_DEEP) if is_too_deep(text, line) else self._read_json(number, line, text, batch)
        if fault:
            batch.problems.append(Problem(number, *fault))

    def _read_text(self, number: int, text: bytes, batch: Batch) -> None:
        if loss := loss_of(text):
            batch.records.append(loss)
            return
        # The rest of a broken JSON line is not text of a program: it has a key, an end, or bytes that are not
        # text.
        if b'":' in text or b'"}' in text or b"\0" in text or not _is_utf8(text):
            batch.problems.append(Problem(number, "", f"is neither JSON nor a script's text: {shown(text)}"))
            return
        self._in_block = self._in_block or _BLOCK_TITLE.match(text) is not None
        is_own = text.startswith(b"#") or OWN_TEXT.match(text) or self._in_block or not self._seen_json
        (batch.foreign_lines if is_own else batch.printed).append((number, text))

    def _read_json(self, number: int, line: Record, text: bytes, batch: Batch) -> Fault | None:
        kind = line.get("type")
        if type(kind) is not str or not 0 < len(kind) <= _TYPE_CHARACTERS_MAX:
            return (
                "type",
                f"must be the name of a layer, not {shown(kind)}" if "type" in line else "is missing",
            )
        if kind == "kernel" and REPEATED in line:
            return None
        ts_ns = time_of(line, text)
        if isinstance(ts_ns, tuple):
            if "ts" in line or self._undated is None:
                return ts_ns
            self._say_once(number, "ts", SAID, batch)
            self._add_all(self._undated.wait(number, line), batch)
            return None
        if self._undated is not None:
            self._add_all(self._undated.until(ts_ns), batch)
        if fault := self._add(number, line, ts_ns, batch):
            return fault
        self._check_order(number, ts_ns, batch)
        return None

    def _add_all(self, lines: Iterable[tuple[int, Record, int | None]], batch: Batch) -> None:
        """Add lines without a time at the times where they were placed."""
        for number, line, ts_ns in lines:
            fault = NO_NEIGHBOUR if ts_ns is None else self._add(number, line, ts_ns, batch)
            if fault:
                batch.problems.append(Problem(number, *fault))

    def _add(self, number: int, line: Record, ts_ns: int, batch: Batch) -> Fault | None:
        kind = line["type"]
        record = event_of(kind, line, ts_ns, batch.problems, number)
        if isinstance(record, tuple):
            return record
        is_whole = START in line
        if not is_whole:
            self._ends.take(number, record, batch)
        if kind == "transfer" and record["phase"] == "X" and not is_whole:
            self._say_once(number, "duration_ms", _NO_START, batch)
        if kind not in LAYER_OF_TYPE and not self._said_own_layer:
            self._said_own_layer = True
            batch.problems.append(Problem(number, "type", f"{shown(kind)} {_OWN_LAYER}", skipped=False))
        if kind == "gpu_mem" and BARE_TOTAL in line:
            self._say_once(number, BARE_TOTAL, _NO_UNIT, batch)
        batch.records.append(record)
        return None

    def _say_once(self, number: int, field: str, message: str, batch: Batch) -> None:
        if message not in self._stated:
            self._stated.add(message)
            batch.problems.append(Problem(number, field, message, skipped=False))

    def _check_order(self, number: int, ts_ns: int, batch: Batch) -> None:
        back_ns = self._last_ns - ts_ns
        self._last_ns = ts_ns if back_ns > _DISORDER_NS else max(ts_ns, self._last_ns)
        if back_ns > _DISORDER_NS:
            message = (
                f"goes back by {back_ns // 1_000_000} ms: times may count from another start from here on"
            )
            batch.problems.append(Problem(number, "ts", message, skipped=False))

    def at_end(self, batch: Batch) -> None:
        """Read a last line without a newline, and add the problems of the whole input."""
        for number, text in self._unwrapped.rest():
            self.read(number, text, True, batch)
        if self._undated is not None:
            self._add_all(self._undated.rest(), batch)
        if not self._seen_json:
            batch.problems.append(Problem(0, "", "has no JSON line", skipped=False))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def read(stream: BinaryIO, *, between: bool = False) -> Recording:
    """Header and batches of such a stream; times are on the clock "trace".

    `between`: lines without a time are placed between those that have one.
    """
    header = new_header(clock=CLOCK, clocks=[CLOCK])
    return recording_of(header, stream, _Text(between=between), CHUNK_BYTES)


def sniff(head: bytes) -> bool:
    """Whether a line of `head` is a JSON object of a type that the scripts print, wrapped or not."""
    return any(
        type(kind := line.get("type")) is str
        and (kind in NAMED_BY_TYPE or (kind in LAYER_OF_TYPE and "ts" in line))
        for _, line in printed_lines(head)
        if line is not None
    )
