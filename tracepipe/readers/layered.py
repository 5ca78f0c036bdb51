"""Reads the JSON Lines that layered bpftrace and BCC CUDA tracers print.

    {"event_id":1,"ts":0.001,"type":"userspace","name":"cuInit","phase":"B"}
    {"event_id":3,"ts":0.004,"type":"scheduler","name":"nv_schedule_work"}
    # Heartbeat: 120 events
    {"event_id":7,"ts":1.2,"tid":7,"phase":"E","type":"userspace","name":"cuInit","duration_us":12.3}

`ts` is milliseconds since the start of tracing, printed with six decimals; they become nanoseconds on the
clock "trace". Keys differ by line: those for which `Event` has no field become its args. Text between the
JSON lines is from the script (a banner, heartbeats, a summary) and is skipped. `bpftrace -f json` wraps all
of this in its own records: `bpftrace_records.py`.

A call may have two lines without a phase: one at its entry, one at its exit with the duration (`CallEnds`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, BinaryIO, Final

import orjson

from tracepipe.event.checks import Fault, shown
from tracepipe.event.model import (
    COUNT_LIMIT,
    HOST_LAYERS,
    ID_LIMIT,
    INDEX_LIMIT,
    TIME_LIMIT_NS,
    Problem,
    Record,
    new_header,
)
from tracepipe.event.vocabulary import COPY_KINDS, direction_named
from tracepipe.hooks.sets import MEMORY_EFFECTS, effect_of
from tracepipe.hooks.slots import decode_command
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
from tracepipe.readers.recording import (
    THREAD_EXIT,
    TOO_DEEP,
    UNNAMED_KERNEL,
    Batch,
    Recording,
    event_of_exit,
    is_too_deep,
    not_json,
    recording_of,
)

# The `type` of a line → the layer it belongs to. Names that only one variant of the scripts prints:
# kernel_memory (BCC), kernel_mem, ioctl, gpu_complete (dma_fence_signaled) and gpu_mem (gpu_mem_total).
LAYER_OF_TYPE: Final = {
    "userspace": "userspace",
    "hook": "hook",
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
    "gpu_thread": "gpu_thread",
    THREAD_EXIT: "gpu_thread",
}
# Lines of these types have neither a name nor an `op`.
NAMED_BY_TYPE: Final = frozenset({"ioctl", "gpu_complete", "gpu_mem"})
_OF_THREADS = frozenset({"gpu_thread", THREAD_EXIT})
_NAMED_BY = {"transfer": ("name", "op", "direction"), **dict.fromkeys(_OF_THREADS, ("name", "kernel"))}

# Names of the sum in a line of gpu_mem → its unit, bytes. A bare `total` is the guide's name for the field
# `total_mem_kb`.
BARE_TOTAL: Final = "total"
_TOTALS = {
    "total_bytes": 1,
    "size_bytes": 1,
    "size": 1,
    "total_kb": 1024,
    "total_mem_kb": 1024,
    BARE_TOTAL: 1024,
}

START: Final = "start_ts"
"""The start of an event, as `tracepipe convert` writes it in a single line at the event's end."""
_FIELDS = frozenset({"type", "ts", "phase", "name", "pid", "tid", "cpu", "comm", START})
_OF_PLACES = frozenset({"kernel", "gpu", "device", "block", "thread"})
_NS = {"duration_us": 1_000, "duration_ms": 1_000_000}
# Below 2^51 ns (26 days) the two roundings of `ms * 1e6` stay under half a nanosecond in sum.
_FLOAT_IS_EXACT_MS = (1 << 51) / 1e6
_HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]{1,16}")
_TS_TEXT = re.compile(rb'"ts"\s*:\s*(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)')


def ns_of_ms(ms: int | float, text: bytes = b"") -> int:
    """Nanoseconds of `ms` milliseconds, exact to the six decimals that the scripts print.

    Up to 26 days, `round(ms * 1e6)` is exact. Beyond that, a double cannot represent every nanosecond, and
    the decimal digits are taken from `text`, the line from which `ms` was parsed. Further decimals are
    rounded.
    """
    if isinstance(ms, int):
        return ms * 1_000_000
    if abs(ms) >= _FLOAT_IS_EXACT_MS:
        for match in _TS_TEXT.finditer(text):
            if float(match[1]) == ms:
                return round(Decimal(match[1].decode()) * 1_000_000)
    return round(ms * 1e6)


def _number_fault(value: object, limit: int) -> str:
    """The message for a wrong time or duration, which may be at most `limit`; "" for a valid one."""
    if not (type(value) is int or type(value) is float):
        return f"must be a number, not {shown(value)}"
    if value < 0:
        return f"must not be negative, but is {shown(value)}"
    return "" if value <= limit else f"must be at most {limit}, not {shown(value)}"


def _who_fault(line: Record) -> Fault | None:
    """The fault of the first identity field with a wrong type, or None."""
    for name in ("pid", "tid", "cpu"):
        if name in line and (type(line[name]) is not int or not 0 <= line[name] <= ID_LIMIT):
            return name, f"must be an integer from 0 to {ID_LIMIT}, not {shown(line[name])}"
    if "comm" in line and type(line["comm"]) is not str:
        return "comm", f"must be a string, not {shown(line['comm'])}"
    return None


def _name_of(line: Record) -> str | Fault:
    """The name of an event: `name`, else `op`, else the direction of a transfer or the type."""
    kind = line["type"]
    for key in _NAMED_BY.get(kind, ("name", "op")):
        if key in line:
            name = line[key]
            return name if type(name) is str else (key, f"must be a string, not {shown(name)}")
    if kind in _OF_THREADS:
        return UNNAMED_KERNEL
    return str(kind) if kind in NAMED_BY_TYPE else ("name", "is missing, and so is op")


def _layer_of(kind: str, line: Record) -> str:
    # "kernel" is the operating system's, except in the line that the BCC tool writes from its uprobe on
    # cuLaunchKernel: that is the call that launches a CUDA kernel, and not the time at which the kernel ran.
    if kind == "kernel" and (line.get("op") == "launch" or line.get("name") == "cuLaunchKernel"):
        return "userspace"
    return LAYER_OF_TYPE.get(kind, "hook")


def _effect_of(name: str, args: Record, phase: str) -> str:
    """The effect of the call that a line of memory names, such as `alloc` for cuMemAlloc; "" where it names
    no call. If the name does not show it, `op` may have it. A call that failed has no effect. A begin and its
    end must have the same name.
    """
    effect = effect_of(name)[0] or args.get("op")
    failed = phase == "I" and args.get("result", args.get("retval", 0)) != 0
    return effect if effect in MEMORY_EFFECTS and not failed else ""


def place_of(line: Record) -> Record | Fault:
    """The fields `gpu`, `block` and `thread` of an event, from a line that may have `device`, `block` and
    `thread`. The latter two are three numbers, or only x.
    """
    place: Record = {}
    for name in ("block", "thread"):
        if name in line:
            index = _index(line[name])
            if index is None:
                return name, f"must be three numbers from 0 to {INDEX_LIMIT}, not {shown(line[name])}"
            place[name] = index
    device = line.get("gpu", line.get("device", 0))
    if type(device) is not int or not 0 <= device <= ID_LIMIT:
        return "device", f"must be an integer from 0 to {ID_LIMIT}, not {shown(device)}"
    return {"gpu": device, **place}


def _index(value: object) -> list[int] | None:
    index: list[Any] = value if type(value) is list else [value, 0, 0]
    good = len(index) == 3 and all(type(one) is int and 0 <= one <= INDEX_LIMIT for one in index)
    return index if good else None


def time_of(line: Record, text: bytes) -> int | Fault:
    """The time of a line, ns, or its fault."""
    if "ts" not in line:
        return NO_TIME
    if wrong := _number_fault(line["ts"], TIME_LIMIT_NS // 1_000_000):
        return "ts", wrong
    return ns_of_ms(line["ts"], text)


def event_of(kind: str, line: Record, ts_ns: int, problems: list[Problem], number: int) -> Record | Fault:
    """The event at `ts_ns` on line `number`, or the fault of the line. An unknown type becomes a layer of its
    own.
    """
    phase = line.get("phase", "I")
    if type(phase) is not str or phase not in ("B", "E", "I"):
        return "phase", f"must be B, E or I or absent, not {shown(phase)}"
    name = _name_of(line)
    if isinstance(name, tuple):
        return name
    if fault := _who_fault(line):
        return fault
    record: Record = {"type": _layer_of(kind, line), "name": name, "phase": phase, "ts_ns": ts_ns}
    for key in ("pid", "tid", "cpu", "comm"):
        if key in line:
            record[key] = line[key]
    args = {key: value for key, value in line.items() if key not in _FIELDS}
    if kind == "hook" and type(args.get("layer")) is str:
        record["layer"] = args.pop("layer")
    elif kind not in LAYER_OF_TYPE:
        record["layer"] = kind
    # Six decimals can be restored from the nanoseconds. A finer time is kept as it was written.
    if "ts" not in line:
        args["placed"] = PLACED
    elif ts_ns / 1e6 != line["ts"]:
        args["source_ts_ms"] = line["ts"]
    if kind == "gpu_mem":
        _take_total(record, args)
    elif record["type"] == "memory" and (effect := _effect_of(name, args, phase)):
        record["name"] = effect
        if effect != name:
            args["call"] = name
    elif record["type"] == "transfer":
        _take_direction(record, args)
    elif "cmd" in args or "ioctl_cmd" in args:
        args |= _command_of(args, is_ioctl=kind == "ioctl" or "ioctl" in name)
    if kind in _OF_THREADS:
        place = place_of(line)
        if isinstance(place, tuple):
            return place
        record |= place
        args = {key: value for key, value in args.items() if key not in _OF_PLACES}
    if kind != THREAD_EXIT and (fault := _take_duration(record, line, args, problems, number)):
        return fault
    if args:
        record["args"] = args
    return event_of_exit(record) if kind == THREAD_EXIT else record


def _take_direction(record: Record, args: Record) -> None:
    """Name a copy by its direction. If it was named by its call, that is kept as an argument."""
    given = args.get("direction")
    if type(given) is str:
        given = args["direction"] = direction_named(given)
    effect, direction = effect_of(record["name"])
    if effect == "transfer":
        kind = args.get("kind")
        if type(kind) is int and 0 <= kind < len(COPY_KINDS):
            direction = direction or COPY_KINDS[kind]
        args["call"] = record["name"]
        record["name"] = given if type(given) is str else direction or "copy"
    record["name"] = direction_named(record["name"])


def _take_total(record: Record, args: Record) -> None:
    """Put the memory in use on a GPU that the driver reports into the record: `total_bytes`, and the GPU."""
    for key, unit_bytes in _TOTALS.items():
        if type(total := args.get(key)) is int and 0 <= total < COUNT_LIMIT:
            args["total_bytes"] = total * unit_bytes
            break
    if type(gpu := args.get("gpu_id")) is int and 0 <= gpu <= ID_LIMIT:
        record["gpu"] = gpu


def _command_of(args: Record, is_ioctl: bool) -> Record:
    """An ioctl's command taken apart: `{dir, type, nr, size_bytes}`, and `request` where it has a name."""
    command = args.get("ioctl_cmd", args.get("cmd") if is_ioctl else None)
    if type(command) is str and _HEXADECIMAL.fullmatch(command):
        command = int(command, 16)
    if type(command) is not int or not 0 <= command < 1 << 64:
        return {}
    return {key: value for key, value in decode_command(command).items() if key not in {"cmd", *args}}


def _take_duration(
    record: Record, line: Record, args: Record, problems: list[Problem], number: int
) -> Fault | None:
    """Take the length of a record from its arguments, if it has one. Return the fault of a wrong one."""
    if record["phase"] != "E" and "phase" in line:
        return None
    for key, ns in _NS.items():
        if key not in args:
            continue
        if wrong := _number_fault(args[key], TIME_LIMIT_NS // ns):
            return key, wrong
        if not _add_duration(record, round(args[key] * ns)):
            message = "begins before the start of tracing; the slice is drawn from 0"
            problems.append(Problem(number, key, message, skipped=False))
        else:
            del args[key]
        break
    return None


def _add_duration(record: Record, dur_ns: int) -> bool:
    """Set the length of a record. Return whether it begins after the start of tracing.

    An E keeps its time. A line without a phase is written at the end of what it describes, and becomes an X.
    """
    if record["phase"] == "E":
        record["dur_ns"] = dur_ns
        return True
    end_ns: int = record["ts_ns"]
    record.update(phase="X", ts_ns=max(0, end_ns - dur_ns), dur_ns=min(dur_ns, end_ns))
    return dur_ns <= end_ns


# A script reads the clock separately for the line and for the duration, and may print one with fewer digits.
_APART_NS: Final = 100_000
# The most open calls of one name on one thread, and the most names and threads, that are remembered.
_OPEN_MAX: Final = 16
_KEYS_MAX: Final = 1 << 12
# There must be this many times as many entries with an exit as entries without.
_SURELY: Final = 10
_FAR_ENTRY: Final = (
    "its entry is so far before this line that it was read as an instant: the call is drawn from its "
    "duration, next to it"
)


@dataclass(slots=True)
class _Function:
    """How many calls of a function had both lines, and how many were followed by another without an exit."""

    exits: int = 0
    missing: int = 0

    @property
    def has_exits(self) -> bool:
        """Whether nearly all entries have an exit."""
        return self.exits > _SURELY * self.missing


@dataclass(slots=True, eq=False)
class _Entry:
    """A line that may be a call's entry: its time, and the batch and the place of its record. `says_so`: its
    phase is B. `is_begin`: it is read as a begin.
    """

    ts_ns: int
    batch: int
    place: int
    says_so: bool
    is_begin: bool


class CallEnds:
    """Remembers the entries of one input, and recognizes the lines that are their exits."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], list[_Entry]] = {}
        self._functions: dict[tuple[str, str], _Function] = {}
        self._batch: Batch | None = None
        self._batches = 0

    def take(self, number: int, record: Record, batch: Batch) -> None:
        """Take the record of line `number`, the next in `batch`. Its phase may change."""
        if record["type"] not in HOST_LAYERS:
            return
        if batch is not self._batch:
            self._batch, self._batches = batch, self._batches + 1
        key = record["type"], record["name"], record.get("pid"), record.get("tid")
        if record["phase"] in ("B", "I"):
            self._enter(key, record, batch)
        elif "dur_ns" in record:
            self._leave(number, key, record, batch)
        else:
            self._end_innermost(key)

    def _enter(self, key: tuple[Any, ...], record: Record, batch: Batch) -> None:
        if len(self._entries) >= _KEYS_MAX:
            self._entries.clear()
        entries = self._entries.setdefault(key, [])
        function = self._functions.get(key[:2])
        says_so = record["phase"] == "B"
        if function and entries and not entries[-1].says_so:
            function.missing += 1
            self._turn(entries[-1], "I", batch)
        if function and function.has_exits:
            record["phase"] = "B"
        if len(entries) >= _OPEN_MAX:
            del entries[0]
        place, is_begin = len(batch.records), record["phase"] == "B"
        entries.append(_Entry(record["ts_ns"], self._batches, place, says_so, is_begin))

    def _leave(self, number: int, key: tuple[Any, ...], record: Record, batch: Batch) -> None:
        """Find the entry of the call for a line with a duration, which is its exit."""
        entries = self._entries.get(key)
        if not entries:
            return
        is_end = record["phase"] == "E"
        entry = _nearest(entries, record["ts_ns"] - record["dur_ns"] * is_end, record["dur_ns"])
        if entry is None:
            if is_end:
                self._end_innermost(key)
            return
        if len(self._functions) >= _KEYS_MAX:
            self._functions.clear()
        function = self._functions.setdefault(key[:2], _Function())
        function.exits += 1
        function.missing -= function.missing > 0 and entry is not entries[-1] and not entry.says_so
        del entries[entries.index(entry) :]
        self._turn(entry, "B", batch)
        if not entry.is_begin:
            batch.problems.append(Problem(number, "duration_us", _FAR_ENTRY, skipped=False))
        elif not is_end:
            record.update(phase="E", ts_ns=record["ts_ns"] + record["dur_ns"])

    def _end_innermost(self, key: tuple[Any, ...]) -> None:
        """End the innermost call with an end that has no duration, or that of something else."""
        entries = self._entries.get(key)
        if entries and entries[-1].says_so:
            entries.pop()

    def _turn(self, entry: _Entry, phase: str, batch: Batch) -> None:
        """Give the record of an entry another phase, if it can still be changed."""
        if entry.batch == self._batches:
            batch.records[entry.place]["phase"] = phase
            entry.is_begin = phase == "B"


def _nearest(entries: list[_Entry], start_ns: int, dur_ns: int) -> _Entry | None:
    """The entry at whose time a call of that length began, preferably the innermost."""
    entry = min(reversed(entries), key=lambda entry: abs(entry.ts_ns - start_ns))
    is_near = abs(entry.ts_ns - start_ns) <= _APART_NS and entry.ts_ns <= start_ns + dur_ns
    return entry if is_near else None


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
