r"""Reads the JSON Lines that layered bpftrace and BCC CUDA tracers print.

    {"event_id":1,"ts":0.001,"type":"userspace","name":"cuInit","phase":"B"}
    {"event_id":3,"ts":0.004,"type":"scheduler","name":"nv_schedule_work"}
    # Heartbeat: 120 events
    {"event_id":7,"ts":1.2,"tid":7,"phase":"E","type":"userspace","name":"cuInit","duration_us":12.3}

`ts` is milliseconds since the start of tracing, printed with six decimals; they become nanoseconds on the
clock "trace". Keys differ by line: those that an `Event` has no field for become its args. Text between
the JSON lines is the script's own (a banner, heartbeats, a summary) and is passed over.

`bpftrace -f json` wraps all of this in records of its own, objects of `type` and `data` and nothing else:

    {"type": "printf", "data": "{\"ts\":23.15,\"type\":\"userspace\","}    a line may come in pieces,
    {"type": "printf", "data": "\"name\":\"cuInit\"}\n"}                or several lines in one record
    {"type": "lost_events", "data": {"events": 12}}
    {"type": "hist", "data": {"@h": [{"min": 0, "max": 0, "count": 4}]}}

`printf` is what the script printed and `lost_events` a loss; all others (maps, histograms, values, times)
say nothing that has a place in time.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, BinaryIO

import orjson

from tracepipe.event.checks import Fault, shown
from tracepipe.event.model import COUNT_LIMIT, ID_LIMIT, TIME_LIMIT_NS, Problem, Record, new_header
from tracepipe.readers.lines import BOM, TOO_DEEP, is_too_deep, not_json
from tracepipe.readers.recording import Batch, Recording, recording_of

CLOCK = "trace"
# About 2000 lines: parsed, they take some MB.
CHUNK_BYTES = 1 << 18

# The `type` of a line → the layer it belongs to. Names that only one variant of the scripts prints:
# kernel_memory (BCC), kernel_mem, ioctl, gpu_complete (dma_fence_signaled) and gpu_mem (gpu_mem_total).
_LAYERS = {
    "userspace": "userspace",
    "syscall": "syscall",
    "ioctl": "syscall",
    "kernel": "kernel",
    "kernel_memory": "kernel",
    "kernel_mem": "kernel",
    "gpu_complete": "kernel",
    "scheduler": "scheduler",
    "memory": "memory",
    "gpu_mem": "memory",
    "transfer": "transfer",
}
# Lines of these types have no name of their own, nor an `op`.
_NAMED_BY_TYPE = frozenset({"ioctl", "gpu_complete", "gpu_mem"})

# bpftrace's own records have these keys and no other.
_WRAPPED_KEYS = {"type", "data"}
_LOST = "lost_events"
# A printed line that is not at its end after so much is none.
_HELD_BYTES_MAX = 1 << 14

_FIELDS = frozenset({"type", "ts", "phase", "name", "pid", "tid", "cpu", "comm"})
_NS = {"duration_us": 1_000, "duration_ms": 1_000_000}
# Below 2^51 ns (26 days) the two roundings of `ms * 1e6` stay under half a nanosecond in sum.
_FLOAT_IS_EXACT_MS = (1 << 51) / 1e6
_TS_TEXT = re.compile(rb'"ts"\s*:\s*(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)')

_LOST_TEXT = re.compile(rb"Lost (\d{1,18}) events")
_LOST_REASON = "bpftrace's buffer was full"
# Lines of several processors come out of order, but within the time of one look at the buffers.
_DISORDER_NS = 1_000_000_000
# Heartbeats and comments; what bpftrace says at the start; the maps and histograms it prints at the end.
_SCRIPT_TEXT = re.compile(rb"#|Attaching \d+ probes?\.\.\.|@|[\[(].*[\])]\s+\d+ \|[@ ]*\|$")
_BLOCK_TITLE = re.compile(rb"===+ .* ===+$")


def ns_of_ms(ms: int | float, text: bytes = b"") -> int:
    """Nanoseconds of `ms` milliseconds, exact to the six decimals that the scripts print.

    Up to 26 days `round(ms * 1e6)` is exact. Beyond, a double may not hold every nanosecond, and the decimal
    digits are taken from `text`, the line that `ms` was parsed from. Further decimals are rounded.
    """
    if isinstance(ms, int):
        return ms * 1_000_000
    if abs(ms) >= _FLOAT_IS_EXACT_MS:
        for match in _TS_TEXT.finditer(text):
            if float(match[1]) == ms:
                return round(Decimal(match[1].decode()) * 1_000_000)
    return round(ms * 1e6)


def _number_fault(value: Any, limit: int) -> str:
    """What is wrong with a time or duration of at most `limit`, or nothing."""
    if type(value) not in (int, float):
        return f"must be a number, not {shown(value)}"
    if value < 0:
        return f"must not be negative, and is {shown(value)}"
    return "" if value <= limit else f"must be at most {limit}, not {shown(value)}"


def _who_fault(line: Record) -> Fault | None:
    """The first of the identity fields that has a wrong type."""
    for name in ("pid", "tid", "cpu"):
        if name in line and (type(line[name]) is not int or not 0 <= line[name] <= ID_LIMIT):
            return name, f"must be an integer from 0 to {ID_LIMIT}, not {shown(line[name])}"
    if "comm" in line and type(line["comm"]) is not str:
        return "comm", f"must be a string, not {shown(line['comm'])}"
    return None


def _name_of(line: Record) -> str | Fault:
    """The name of an event: `name`, else `op`, else the direction of a transfer or the type."""
    kind = line["type"]
    for key in ("name", "op", "direction") if kind == "transfer" else ("name", "op"):
        if key in line:
            name = line[key]
            return name if type(name) is str else (key, f"must be a string, not {shown(name)}")
    return str(kind) if kind in _NAMED_BY_TYPE else ("name", "is missing, and so is op")


def _layer_of(kind: str, line: Record) -> str:
    # "kernel" is the operating system's, but for the launch that the BCC tool writes from its uprobe on
    # cuLaunchKernel: that one is a CUDA kernel seen from the API, and says nothing of when it ran.
    if kind == "kernel" and (line.get("op") == "launch" or line.get("name") == "cuLaunchKernel"):
        return "userspace"
    return _LAYERS[kind]


_Lines = list[tuple[int, bytes]]
"""Lines of text, each with the number of the input's line that it starts on."""


def _loss(count: int) -> Record:
    return {"type": "loss", "count": min(count, COUNT_LIMIT), "reason": _LOST_REASON}


def _is_wrapped(record: Any) -> bool:
    """Whether a parsed line is one of bpftrace's own records."""
    return type(record) is dict and record.keys() == _WRAPPED_KEYS and type(record["type"]) is str


def _is_object(text: bytes) -> bool:
    try:
        return type(orjson.loads(text)) is dict
    except orjson.JSONDecodeError:
        return False


class _Unwrapped:
    """Puts the lines together that a script printed."""

    def __init__(self) -> None:
        self._held = b""
        self._held_at = 0

    def take(self, number: int, record: Record, batch: Batch) -> _Lines:
        """The lines that bpftrace's record on line `number` completes. A loss or a fault goes to `batch`."""
        kind, data = record["type"], record["data"]
        if kind == "printf":
            if type(data) is str:
                return self._join(number, data.encode())
            batch.problems.append(Problem(number, "data", f"must be a string, not {shown(data)}"))
        elif kind == _LOST:
            count = data.get("events") if type(data) is dict else None
            if type(count) is int and count >= 0:
                batch.records.append(_loss(count))
            else:
                wrong = f"must be an integer of at least 0, not {shown(count)}"
                batch.problems.append(Problem(number, "data.events", wrong))
        return []

    def _join(self, number: int, text: bytes) -> _Lines:
        lines: _Lines = []
        if self._held and text.startswith(b"{"):
            if not self._held.startswith(b"{") or _is_object(self._held):
                # Printed without a newline, and not the begin of what comes now.
                lines = self.rest()
            elif text.endswith(b"\n") and _is_object(text):
                # Another processor's line between the pieces of one.
                return [(number, text[:-1])]
        if not self._held:
            self._held_at = number
        whole, newline, tail = text.rpartition(b"\n")
        if newline:
            first, *others = (self._held + whole).split(b"\n")
            lines += [(self._held_at, first), *((number, line) for line in others)]
            self._held, self._held_at = tail, number
        else:
            self._held += tail
        return lines + self.rest() if len(self._held) > _HELD_BYTES_MAX else lines

    def rest(self) -> _Lines:
        """The line that has not ended, if there is one."""
        held, self._held = self._held, b""
        return [(self._held_at, held)] if held else []


class _Text:
    """What has been seen of one input, which decides how its next lines are understood."""

    def __init__(self) -> None:
        self._seen_json = False
        self._in_block = False
        self._said_transfer = False
        self._last_ns = 0
        self._unwrapped = _Unwrapped()

    def read(self, number: int, text: bytes, cut: bool, batch: Batch) -> None:
        """Put what line `number` says into `batch`. `cut` lines have no newline, as the input ended."""
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
        if _is_wrapped(line) and line["type"] not in _LAYERS:
            for printed_at, printed in self._unwrapped.take(number, line, batch):
                self.read(printed_at, printed, False, batch)
            return
        self._seen_json, self._in_block = True, False
        fault = ("", TOO_DEEP) if is_too_deep(text, line) else self._read_json(number, line, text, batch)
        if fault:
            batch.problems.append(Problem(number, *fault))

    def _read_text(self, number: int, text: bytes, batch: Batch) -> None:
        if lost := _LOST_TEXT.match(text):
            batch.records.append(_loss(int(lost[1])))
            return
        # The rest of a broken JSON line is no banner: it has a key, or bytes that are not text.
        broken = b'":' in text or b"\0" in text or not _is_utf8(text)
        if not broken and _BLOCK_TITLE.match(text):
            self._in_block = True
        elif broken or not (_SCRIPT_TEXT.match(text) or self._in_block or not self._seen_json):
            batch.problems.append(Problem(number, "", f"is neither JSON nor the script's: {shown(text)}"))
        else:
            batch.passed_over.append((number, text))

    def _read_json(self, number: int, line: Record, text: bytes, batch: Batch) -> Fault | None:
        kind = line.get("type")
        if type(kind) is not str or kind not in _LAYERS:
            known = ", ".join(_LAYERS)
            return "type", f"must be one of {known}, not {shown(kind)}" if "type" in line else "is missing"
        record = _event(kind, line, text, batch.problems, number)
        if isinstance(record, tuple):
            return record
        if kind == "transfer" and record["phase"] == "X" and not self._said_transfer:
            self._said_transfer = True
            batch.problems.append(
                Problem(
                    number,
                    "duration_ms",
                    "does not say whether ts is the start or the end of a transfer; it is read as the end, "
                    "because the script knows the duration only then",
                    skipped=False,
                )
            )
        batch.records.append(record)
        self._check_order(number, ns_of_ms(line["ts"], text), batch)
        return None

    def _check_order(self, number: int, ts_ns: int, batch: Batch) -> None:
        back_ns = self._last_ns - ts_ns
        self._last_ns = ts_ns if back_ns > _DISORDER_NS else max(ts_ns, self._last_ns)
        if back_ns > _DISORDER_NS:
            message = (
                f"goes back by {back_ns // 1_000_000} ms: times may count from another start from here on"
            )
            batch.problems.append(Problem(number, "ts", message, skipped=False))

    def at_end(self, batch: Batch) -> None:
        """Read what waits for its newline, and say what there is to say of the whole input."""
        for number, text in self._unwrapped.rest():
            self.read(number, text, True, batch)
        if not self._seen_json:
            batch.problems.append(Problem(0, "", "holds no JSON line", skipped=False))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _event(kind: str, line: Record, text: bytes, problems: list[Problem], number: int) -> Record | Fault:
    """The event that line `number`, of a known type, says, or what is wrong with the line."""
    if "ts" not in line:
        return "ts", "is missing: the line has no place in time"
    ms = line["ts"]
    if wrong := _number_fault(ms, TIME_LIMIT_NS // 1_000_000):
        return "ts", wrong
    phase = line.get("phase", "I")
    if type(phase) is not str or phase not in ("B", "E", "I"):
        return "phase", f"must be B, E or I or absent, not {shown(phase)}"
    name = _name_of(line)
    if isinstance(name, tuple):
        return name
    if fault := _who_fault(line):
        return fault
    ts_ns = ns_of_ms(ms, text)
    record: Record = {"type": _layer_of(kind, line), "name": name, "phase": phase, "ts_ns": ts_ns}
    for key in ("pid", "tid", "cpu", "comm"):
        if key in line:
            record[key] = line[key]
    args = {key: value for key, value in line.items() if key not in _FIELDS}
    # Six decimals come back from the nanoseconds; a finer time is kept as it was written.
    if ts_ns / 1e6 != ms:
        args["source_ts_ms"] = ms
    for key, ns in _NS.items():
        if key in args and (phase == "E" or "phase" not in line):
            if wrong := _number_fault(args[key], TIME_LIMIT_NS // ns):
                return key, wrong
            if not _add_duration(record, round(args[key] * ns)):
                message = "reaches back before the start of tracing; the span is drawn from 0"
                problems.append(Problem(number, key, message, skipped=False))
            else:
                del args[key]
            break
    if args:
        record["args"] = args
    return record


def _add_duration(record: Record, dur_ns: int) -> bool:
    """Give a record its length, and say whether there was room for it.

    An E keeps its time. A line without phase is written when the span has ended: it becomes an X.
    """
    if record["phase"] == "E":
        record["dur_ns"] = dur_ns
        return True
    end_ns: int = record["ts_ns"]
    record.update(phase="X", ts_ns=max(0, end_ns - dur_ns), dur_ns=min(dur_ns, end_ns))
    return dur_ns <= end_ns


def read(stream: BinaryIO) -> Recording:
    """Header and batches of such a stream; times are on the clock "trace"."""
    return recording_of(new_header(clock=CLOCK, clocks=[CLOCK]), stream, _Text(), CHUNK_BYTES)


def sniff(head: bytes) -> bool:
    """Whether a line of `head` is a JSON object of a type that the scripts print, wrapped or not."""
    unwrapped, unused = _Unwrapped(), Batch()
    lines = head.removeprefix(BOM).split(b"\n")
    while lines:
        printed: list[bytes] = []
        for text in lines:
            if not text.lstrip().startswith(b"{"):
                continue
            try:
                line = orjson.loads(text)
            except orjson.JSONDecodeError:
                continue
            kind = line.get("type")
            if type(kind) is str and (kind in (_LOST, *_NAMED_BY_TYPE) or (kind in _LAYERS and "ts" in line)):
                return True
            if _is_wrapped(line):
                printed += (text for _, text in unwrapped.take(0, line, unused))
        lines = printed
    return False
