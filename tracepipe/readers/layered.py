"""Reads the JSON Lines that layered bpftrace and BCC CUDA tracers print.

    {"event_id":1,"ts":0.001,"type":"userspace","name":"cuInit","phase":"B"}
    {"event_id":3,"ts":0.004,"type":"scheduler","name":"nv_schedule_work"}
    # Heartbeat: 120 events
    {"event_id":7,"ts":1.2,"tid":7,"phase":"E","type":"userspace","name":"cuInit","duration_us":12.3}

`ts` is milliseconds since the start of tracing, printed with six decimals; they become nanoseconds on the
clock "trace". Threads of a GPU may have only a reading of its clock, `ts_ns` or `globaltimer_ns`. Keys differ
by line: those for which `Event` has no field become its args. Text between the JSON lines is from the script
(a banner, heartbeats, a summary) and is skipped. `bpftrace -f json` wraps all of this in its own records:
`bpftrace_records.py`.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, BinaryIO, Final

import numpy as np
import orjson

from tracepipe.event.checks import shown
from tracepipe.event.columns import (
    NONE,
    EventColumns,
    Int32s,
    Int64s,
    distinct,
    joined,
    no_indices,
)
from tracepipe.event.model import (
    COUNT_LIMIT,
    GLOBALTIMER,
    HOST_LAYERS,
    ID_LIMIT,
    INDEX_LIMIT,
    TIME_LIMIT_NS,
    Record,
)
from tracepipe.event.tables import LONG_NAME, LongNames, NativeTables
from tracepipe.event.vocabulary import COPY_KINDS, direction_named
from tracepipe.hooks.ioctl import decode_command
from tracepipe.native import checked, library, owned, seed
from tracepipe.native.signatures import LayeredRows
from tracepipe.readers.bpftrace_records import (
    NO_TIME,
    OWN_TEXT,
    PLACED,
    PROBE,
    ScriptLines,
    is_wrapped,
    loss_of,
    printed_lines,
)
from tracepipe.readers.ids import is_id, is_size
from tracepipe.readers.recording import (
    THREAD_EXIT,
    TOO_DEEP,
    UNNAMED_KERNEL,
    Recording,
    Unusable,
    event_of_exit,
    is_too_deep,
    not_json,
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
_BARE_TOTAL: Final = "total"
_TOTALS = {
    "total_bytes": 1, "size_bytes": 1, "size": 1, "total_kb": 1024, "total_mem_kb": 1024, _BARE_TOTAL: 1024,
}  # fmt: skip

REPEATED: Final = "of_event"
"""A line of a launch with this key repeats a call whose begin was read: `tracepipe convert` writes both."""
START: Final = "start_ts"
"""The start of an event, as `tracepipe convert` writes it in a single line at the event's end."""
LENGTHS: Final = {"duration_us": 1_000, "duration_ms": 1_000_000}
"""Keys of an event's length → their unit, ns."""
DISORDER_NS: Final = 1_000_000_000
"""Lines of several processors come out of order, within the interval at which the buffers are read."""
KEYS_MAX: Final = 1 << 12
"""The most names and threads whose calls are remembered."""
Key = tuple[str, str, int | None, int | None]

CLOCK: Final = "trace"
# Names of a reading of a GPU's clock in lines of its threads.
_TIMERS: Final = ("ts_ns", "globaltimer_ns")
_HEAD_BYTES: Final = 1 << 16
_FIELDS = frozenset({"type", "ts", "phase", "name", "pid", "tid", "cpu", "comm", START})
_OF_PLACES = frozenset({"kernel", "gpu", "device", "block", "thread"})
# Below 2^51 ns (26 days) the two roundings of `ms * 1e6` stay under half a nanosecond in sum.
_FLOAT_IS_EXACT_MS = (1 << 51) / 1e6
_HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]{1,16}")
_TS_TEXT = re.compile(rb'"ts"\s*:\s*(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)')
_PROBE = re.compile(PROBE)
_BLOCK_TITLE = re.compile(rb"===+ .* ===+$")
# A type is a word. Much longer text is not the name of a layer.
_TYPE_CHARACTERS_MAX = 256

_NO_START = (
    "does not state whether ts is the start or the end of a transfer; it is read as the end, because the "
    "script knows the duration only then"
)
_OWN_LAYER = "is not known: each such type becomes a layer of that name"
_NO_UNIT = "has no unit: it is read as KB, as the guide's script prints the field total_mem_kb"
_FAR_ENTRY = (
    "its entry is so far before this line that it was read as an instant: the call is drawn from its "
    "duration, next to it"
)


class LayeredLines(ScriptLines[Record]):
    """Reads the lines of one input."""

    # Some thousand lines: parsed, they take some MB.
    chunk_bytes = 1 << 20
    no_line = "has no JSON line"

    def __init__(self, *, between: bool, clock: str = CLOCK, is_wrapped: bool = False) -> None:
        super().__init__(between=between)
        self._clock, self._is_wrapped = clock, is_wrapped
        self._in_block = False
        self.last_line_ns = 0
        """The time of the last line, or of one before it within the disorder of processors."""
        self._own_layer_said = False
        self._core = None
        # A line that waits for its time is not of the core's grammar, nor can the next one be.
        if isinstance(self.tables, NativeTables) and (core := library()) is not None and not between:
            self._core = NativeLines(core, self, self.tables)
        self._ends = self._core or _CallEnds(self)

    def read_text(self, first: int, text: bytes, is_cut: bool) -> int:
        self.batch.text_bytes = len(text)
        if self._core is None:
            return super().read_text(first, text, is_cut)
        if self._is_wrapped:
            text = self._core.unwrapped(text, is_held=bool(self._held))
        self.read_numbered(self._core.read(first, text), is_cut=is_cut)
        return self._core.count

    def columns(self) -> EventColumns:
        if self._core is None:
            return super().columns()
        self._core.settle()
        return self._core.merged(super().columns())

    def read_line(self, text: bytes, is_cut: bool) -> None:
        """Read a line, or the lines in a record of bpftrace. Raises Unusable."""
        text = text.strip()
        if not text:
            return
        if not text.startswith(b"{"):
            self._read_text(text)
            return
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError as e:
            self.see_line()
            wrong = not_json(e)
            raise Unusable("", "was cut off in the middle of the line" if is_cut else wrong) from e
        if is_wrapped(line) and line["type"] not in LAYER_OF_TYPE:
            self.read_numbered(self.printed_in(line), is_cut=False)
            return
        self.see_line()
        if is_too_deep(text, line):
            raise Unusable("", TOO_DEEP)
        kind = line.get("type")
        if type(kind) is not str or not 0 < len(kind) <= _TYPE_CHARACTERS_MAX:
            wrong = f"must be the name of a layer, not {shown(kind)}" if "type" in line else "is missing"
            raise Unusable("type", wrong)
        if kind == "kernel" and REPEATED in line:
            return
        if key := _timer_of(line):
            self._add_on_gpu(line, key)
            return
        if "ts" not in line:
            if not self.wait(line):
                raise Unusable(*NO_TIME)
            return
        _check_number("ts", line["ts"], TIME_LIMIT_NS // 1_000_000)
        ts_ns = ns_of_ms(line["ts"], text)
        self.add_waiting(ts_ns)
        self.add_at(line, ts_ns)
        back_ns = self.last_line_ns - ts_ns
        self.last_line_ns = ts_ns if back_ns > DISORDER_NS else max(ts_ns, self.last_line_ns)
        if back_ns > DISORDER_NS:
            words = f"goes back by {back_ns // 1_000_000} ms: times may count from another start from here on"
            self.say("ts", words, skipped=False)

    def see_line(self) -> None:
        self.has_lines, self._in_block = True, False

    @property
    def knows_no_start(self) -> bool:
        return _NO_START in self._said

    def say_far_entry(self) -> None:
        self.say("duration_us", _FAR_ENTRY, skipped=False)

    def event_of_stem(self, line: Record) -> Record | None:
        kind = line["type"]
        if kind not in LAYER_OF_TYPE or kind == "gpu_mem":
            raise Unusable("type", "")
        if kind == "kernel" and REPEATED in line:
            return None
        if kind in _OF_THREADS:
            line |= {name: [0, 0, 0] for name in ("block", "thread") if name in line}
        return self._event(kind, line, 0)

    def _read_text(self, text: bytes) -> None:
        if loss := loss_of(text):
            self.records.append(loss)
            return
        try:
            text.decode()
            is_text = b'":' not in text and b'"}' not in text and b"\0" not in text
        except UnicodeDecodeError:
            is_text = False
        if not is_text:  # but the rest of a broken JSON line
            raise Unusable("", f"is neither JSON nor a script's text: {shown(text)}")
        self._in_block = self._in_block or _BLOCK_TITLE.match(text) is not None
        is_own = text.startswith(b"#") or OWN_TEXT.match(text) or self._in_block or not self.has_lines
        (self.batch.foreign_lines if is_own else self.batch.printed).append((self.number, text))

    def _add_on_gpu(self, line: Record, key: str) -> None:
        """Add the event of a line whose time is a reading of the GPU's clock. Raises Unusable."""
        ts_ns = (line if key in line else line["args"]).pop(key)
        if type(ts_ns) is not int or not 0 <= ts_ns <= TIME_LIMIT_NS:
            raise Unusable(key, f"must be an integer from 0 to {TIME_LIMIT_NS}, not {shown(ts_ns)}")
        record = self._event(line["type"], line, ts_ns)
        record["clock"] = f"{GLOBALTIMER}{record['gpu']}"
        if (args := record.get("args", {})).get("placed") == PLACED:
            del args["placed"]
        self.records.append(record)

    def add_at(self, line: Record, ts_ns: int) -> None:
        """Add the event of a line at a time. Raises Unusable."""
        kind = line["type"]
        record = self._event(kind, line, ts_ns)
        if START not in line:
            self._ends.note(record)
            if kind == "transfer" and record["phase"] == "X":
                self.say_once("duration_ms", _NO_START)
        if kind not in LAYER_OF_TYPE and not self._own_layer_said:
            self._own_layer_said = True
            self.say("type", f"{shown(kind)} {_OWN_LAYER}", skipped=False)
        if kind == "gpu_mem" and _BARE_TOTAL in line:
            self.say_once(_BARE_TOTAL, _NO_UNIT)
        self.records.append(record)

    def _event(self, kind: str, line: Record, ts_ns: int) -> Record:
        """The event of a line. An unknown type becomes a layer of its own. Raises Unusable."""
        phase = line.get("phase", "I")
        if type(phase) is not str or phase not in ("B", "E", "I"):
            raise Unusable("phase", f"must be B, E or I or absent, not {shown(phase)}")
        name = _name_of(kind, line)
        for key in ("pid", "tid", "cpu"):
            if key in line and not is_id(line[key]):
                raise Unusable(key, f"must be an integer from 0 to {ID_LIMIT}, not {shown(line[key])}")
        if "comm" in line and type(line["comm"]) is not str:
            raise Unusable("comm", f"must be a string, not {shown(line['comm'])}")
        layer = LAYER_OF_TYPE.get(kind, "hook")
        # "kernel" is the operating system's, except in the line that the BCC tool writes from its uprobe on
        # cuLaunchKernel: that is the call that launches a CUDA kernel, and not the time at which the kernel
        # ran.
        if kind == "kernel" and (line.get("op") == "launch" or line.get("name") == "cuLaunchKernel"):
            layer = "userspace"
        record: Record = {"type": layer, "name": name, "phase": phase, "ts_ns": ts_ns}
        if self._clock != CLOCK:
            record["clock"] = CLOCK
        record |= {key: line[key] for key in ("pid", "tid", "cpu", "comm") if key in line}
        args = {key: value for key, value in line.items() if key not in _FIELDS}
        if type(args.get("args")) is dict:
            args = args.pop("args") | args
        if _PROBE.fullmatch(name):  # bpftrace's `probe`, which differs for the entry and the return
            from tracepipe.hooks.probe_names import probe_named

            if phase != "E":
                args["probe"] = name
            record["name"] = probe_named(name).name
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
            _put_total(record, args)
        elif layer == "memory" and (effect := _effect_of(name, args, phase)):
            record["name"] = effect
            if effect != name:
                args["call"] = name
        elif layer == "transfer":
            _put_direction(record, args)
        elif "cmd" in args or "ioctl_cmd" in args:
            args |= _command_of(args, is_ioctl=kind == "ioctl" or "ioctl" in name)
        if kind in _OF_THREADS:
            record |= _place_of(line)
            args = {key: value for key, value in args.items() if key not in _OF_PLACES}
        if kind != THREAD_EXIT:
            self._put_duration(record, line, args)
        if args:
            record["args"] = args
        return event_of_exit(record) if kind == THREAD_EXIT else record

    def _put_duration(self, record: Record, line: Record, args: Record) -> None:
        """Move the length of an event, if it has one, from its arguments to its record. Raises Unusable."""
        if record["phase"] != "E" and "phase" in line:
            return
        key = next((key for key in LENGTHS if key in args), None)
        if key is None:
            return
        _check_number(key, args[key], TIME_LIMIT_NS // LENGTHS[key])
        dur_ns, end_ns = round(args[key] * LENGTHS[key]), record["ts_ns"]
        if record["phase"] == "E":  # which keeps its time
            record["dur_ns"] = dur_ns
        else:  # a line without a phase is written at the end of what it describes
            record.update(phase="X", ts_ns=max(0, end_ns - dur_ns), dur_ns=min(dur_ns, end_ns))
        if record["phase"] == "X" and dur_ns > end_ns:
            self.say(key, "begins before the start of tracing; the slice is drawn from 0", skipped=False)
        else:
            del args[key]


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


def _check_number(field: str, value: object, limit: int) -> None:
    """Check a time or a duration, which may be at most `limit`. Raises Unusable."""
    if not (type(value) is int or type(value) is float):
        raise Unusable(field, f"must be a number, not {shown(value)}")
    if value < 0:
        raise Unusable(field, f"must not be negative, but is {shown(value)}")
    if not value <= limit:
        raise Unusable(field, f"must be at most {limit}, not {shown(value)}")


def _name_of(kind: str, line: Record) -> str:
    """The name of an event: `name`, else `op`, else the direction of a transfer or the type. Raises
    Unusable.
    """
    for key in _NAMED_BY.get(kind, ("name", "op")):
        if key in line:
            if type(line[key]) is not str:
                raise Unusable(key, f"must be a string, not {shown(line[key])}")
            return str(line[key])
    if kind in _OF_THREADS:
        return UNNAMED_KERNEL
    if kind not in NAMED_BY_TYPE:
        raise Unusable("name", "is missing, and so is op")
    return kind


def _effect_of(name: str, args: Record, phase: str) -> str:
    """The effect of the call that a line of memory names, such as `alloc` for cuMemAlloc; "" where it names
    no call. If the name does not show it, `op` may have it. A call that failed has no effect. A begin and its
    end must have the same name.
    """
    from tracepipe.hooks.sets import MEMORY_EFFECTS, effect_of

    effect = effect_of(name)[0] or args.get("op")
    failed = phase == "I" and args.get("result", args.get("retval", 0)) != 0
    return effect if effect in MEMORY_EFFECTS and not failed else ""


def _place_of(line: Record) -> Record:
    """The fields `gpu`, `block` and `thread` of an event, from a line that may have `device`, `block` and
    `thread`. The latter two are three numbers, or only x. Raises Unusable.
    """
    place: Record = {}
    for name in ("block", "thread"):
        if name in line:
            index: list[Any] = line[name] if type(line[name]) is list else [line[name], 0, 0]
            if not is_size(index):
                wrong = f"must be three numbers from 0 to {INDEX_LIMIT}, not {shown(line[name])}"
                raise Unusable(name, wrong)
            place[name] = index
    device = line.get("gpu", line.get("device", 0))
    if not is_id(device):
        raise Unusable("device", f"must be an integer from 0 to {ID_LIMIT}, not {shown(device)}")
    return {"gpu": device, **place}


def _put_direction(record: Record, args: Record) -> None:
    """Name a copy by its direction. If it was named by its call, that is kept as an argument."""
    given = args.get("direction")
    if type(given) is str:
        given = args["direction"] = direction_named(given)
    from tracepipe.hooks.sets import effect_of

    effect, direction = effect_of(record["name"])
    if effect == "transfer":
        kind = args.get("kind")
        if type(kind) is int and 0 <= kind < len(COPY_KINDS):
            direction = direction or COPY_KINDS[kind]
        args["call"] = record["name"]
        record["name"] = given if type(given) is str else direction or "copy"
    record["name"] = direction_named(record["name"])


def _put_total(record: Record, args: Record) -> None:
    """Put the memory in use on a GPU that the driver reports into the record: `total_bytes`, and the GPU."""
    for key, unit_bytes in _TOTALS.items():
        if type(total := args.get(key)) is int and 0 <= total < COUNT_LIMIT:
            args["total_bytes"] = total * unit_bytes
            break
    if is_id(gpu := args.get("gpu_id")):
        record["gpu"] = gpu


def _command_of(args: Record, is_ioctl: bool) -> Record:
    """An ioctl's command taken apart: `{dir, type, nr, size_bytes}`, and `request` where it has a name."""
    command = args.get("ioctl_cmd", args.get("cmd") if is_ioctl else None)
    if type(command) is str and _HEXADECIMAL.fullmatch(command):
        command = int(command, 16)
    if type(command) is not int or not 0 <= command < 1 << 64:
        return {}
    return {key: value for key, value in decode_command(command).items() if key not in {"cmd", *args}}


def key_of(record: Record, names: LongNames) -> Key:
    """The key of all lines of calls of one function on one thread."""
    return record["type"], names.shortened(record["name"]), record.get("pid"), record.get("tid")


# A script reads the clock separately for the line and for the duration, and may print one with fewer digits.
_APART_NS: Final = 100_000
# The most open calls of one name on one thread that are remembered.
_OPEN_MAX: Final = 16
# Nearly all entries of a function have an exit, if this many times as many have one as have none.
_SURELY: Final = 10


@dataclass(slots=True)
class _Function:
    """How many calls of a function had both lines, and how many were followed by another without an exit."""

    exits: int = 0
    missing: int = 0


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


class _CallEnds:
    """Joins two lines of a call: one at its entry, one at its exit with the duration, perhaps both without a
    phase.

        {"ts":1.000,"tid":7,"type":"scheduler","name":"f"}                      an instant, as far as it shows
        {"ts":1.100,"tid":7,"type":"scheduler","name":"f","duration_us":99.8}   began when that was written

    These are one call, and become its begin and its end. A record can be changed only while its batch is
    read. For exits that come later, the newest entry of a function is a begin immediately, if nearly all of
    its entries had their exits so far. A script may leave short calls out at their exits: such entries stay
    instants.
    """

    def __init__(self, lines: LayeredLines) -> None:
        self._lines, self._batch, self._batches = lines, lines.batch, 0
        self._entries: dict[Key, list[_Entry]] = {}
        self._functions: dict[tuple[str, str], _Function] = {}

    def note(self, record: Record) -> None:
        """Note the next record of the lines. Its phase may change."""
        if record["type"] not in HOST_LAYERS:
            return
        if self._lines.batch is not self._batch:
            self._batch, self._batches = self._lines.batch, self._batches + 1
        key = key_of(record, self._lines.tables.long_names)
        if key not in self._entries:
            if len(self._entries) >= KEYS_MAX:
                self._entries.clear()
                self._functions.clear()
            self._entries[key] = []
        if record["phase"] in ("B", "I"):
            self._enter(key, record)
        elif "dur_ns" not in record or not self._leave(key, record):
            # An end that has no duration, or that of something else, ends the innermost call.
            entries = self._entries[key]
            if entries and entries[-1].says_so and record["phase"] == "E":
                entries.pop()

    def _enter(self, key: Key, record: Record) -> None:
        entries = self._entries[key]
        function = self._functions.get(key[:2])
        says_so = record["phase"] == "B"
        if function and entries and not entries[-1].says_so:
            function.missing += 1
            self._change(entries[-1], "I")
        if function and function.exits > _SURELY * function.missing:
            record["phase"] = "B"
        if len(entries) >= _OPEN_MAX:
            del entries[0]
        place, is_begin = len(self._lines.records), record["phase"] == "B"
        entries.append(_Entry(record["ts_ns"], self._batches, place, says_so, is_begin))

    def _leave(self, key: Key, record: Record) -> bool:
        """Find the entry of the call for a line with a duration, which is its exit. Return whether there is
        one.
        """
        entries = self._entries[key]
        if not entries:
            return False
        is_end, dur_ns = record["phase"] == "E", record["dur_ns"]
        start_ns = record["ts_ns"] - dur_ns * is_end
        # The entry at whose time a call of that length began, preferably the innermost.
        entry = min(reversed(entries), key=lambda entry: abs(entry.ts_ns - start_ns))
        if abs(entry.ts_ns - start_ns) > _APART_NS or entry.ts_ns > start_ns + dur_ns:
            return False
        function = self._functions.setdefault(key[:2], _Function())
        function.exits += 1
        function.missing -= function.missing > 0 and entry is not entries[-1] and not entry.says_so
        del entries[entries.index(entry) :]
        self._change(entry, "B")
        if not entry.is_begin:
            self._lines.say_far_entry()
        elif not is_end:
            record.update(phase="E", ts_ns=record["ts_ns"] + dur_ns)
        return True

    def _change(self, entry: _Entry, phase: str) -> None:
        """Give the record of an entry another phase, if it can still be changed."""
        if entry.batch == self._batches:
            self._lines.records[entry.place]["phase"] = phase
            entry.is_begin = phase == "B"


# Roles of a row, as layered.c has them; the last is of rows that are no part of a call.
INSTANT, BEGIN, END, END_WITH_LENGTH, WHOLE, ALONE = range(6)
PHASES: Final = "IBEEX"
_PLACE: Final = "pid", "tid", "cpu"
_HOLE: Final = b"\x01"
_HOLE_TEXT = re.compile(rb'"\\u0001(\d+)"')
_STEMS_MAX: Final = 1 << 12
_ALL_KNOWN: Final = 1 << 62
_HELD_ROOM: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class _Event:
    """The event of all lines that differ in their place and in values of arguments: its record, which has no
    arguments, and its recipe. Lines with an empty record repeat another line.
    """

    role: int
    record: Record
    recipe: bytes = b""
    has_no_start: bool = False


class NativeLines:
    r"""Reads the usual lines in the native core, `layered.c`, and joins the lines of calls.

        {"event_id":7,"ts":1.5,"type":"userspace","name":"f","phase":"E","retval":0,"duration_us":2.5}
        {"event_id":□, "ts":0, "type":"userspace","name":"f","phase":"E","retval":□,"duration_us":0}  its stem

    Python reads the stem once, with a text that no line can have for each □, which is a value that becomes an
    argument and decides nothing else. The result is the shape and the recipe of the arguments for all lines
    of that stem. Every other line is read by `LayeredLines`, in the order of the file.
    """

    def __init__(self, core: ctypes.CDLL, lines: LayeredLines, tables: NativeTables) -> None:
        self._core, self._lines, self._tables = core, lines, tables
        self._state = owned(self, core.tp_layered_new(seed()), core.tp_layered_free)
        self._events: dict[bytes, _Event | None] = {}
        self._stems: list[Record | None] = []
        # By stem; the last is of rows without one.
        self._role = np.full(_STEMS_MAX + 1, ALONE, np.uint8)
        self._key, self._function = (np.full(_STEMS_MAX + 1, NONE, np.int32) for _ in range(2))
        self._number = np.full(2 * (_STEMS_MAX + 1), NONE, np.int32)
        self._has_event, self._is_whole, self._has_no_start = np.zeros((3, _STEMS_MAX + 1), np.bool_)
        self._rounds = tables.shape_rounds
        self._keys: dict[Key, tuple[int, int]] = {}
        self._functions: dict[tuple[str, str], int] = {}
        self._batches = 0
        self._begin(0, 0)

    def unwrapped(self, text: bytes, *, is_held: bool) -> bytes:
        """The text, with the line in place of each record of bpftrace that has a whole one. `is_held`: text
        without a newline waits for its end.
        """
        lines, held = ctypes.create_string_buffer(len(text)), ctypes.c_int32(is_held)
        size = self._core.tp_layered_unwrap(text, len(text), lines, ctypes.byref(held))
        return ctypes.string_at(lines, size)

    def _begin(self, count: int, size: int) -> None:
        """Begin a batch of so many lines and bytes."""
        self._batch, self._batches, self.count = self._lines.batch, self._batches + 1, count
        self._ts, self._dur = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._stem, self._args = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._index = no_indices(count)
        # A record has more than eight bytes of text, and the text of a line before may be its begin.
        self._phases = np.zeros(count + size // 8 + _HELD_ROOM, np.uint8)
        self._noted: list[tuple[Record, int]] = []
        self._places: list[int] = []
        self._is_native = np.zeros(count, np.bool_)

    def read(self, first: int, text: bytes) -> Iterator[tuple[int, bytes]]:
        """Read lines, and yield the number and the text of each that the core cannot read, in its turn."""
        if len(self._stems) >= _STEMS_MAX:
            self._core.tp_layered_forget(self._state)
            self._stems.clear()
            self._events.clear()
            self._number[:], self._key[:] = NONE, NONE
        # Counting them in bytes would take three times as long.
        newlines = np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        self._begin(int(newlines) + 1, len(text))
        self._read(text)
        ts, stem, dur, foreign = self._ts, self._stem, self._dur, self._stem == NONE
        self._line_ts = ts
        if not self._has_event[: len(self._stems)].all() or foreign.any():
            self._line_ts = np.where(self._has_event[stem], ts, 0)
        if self._is_whole.any():
            whole = self._is_whole[stem]
            foreign |= whole & (dur > ts)
            self._ts = ts - np.where(whole, dur, 0)
        if self._has_no_start.any() and not self._lines.knows_no_start:
            foreign |= self._has_no_start[stem]
        self._phases[: self.count] = self._role[stem]
        lines = text.split(b"\n") if foreign.any() else []
        start = 0
        for stop in (*np.flatnonzero(foreign).tolist(), self.count):
            while start < stop:
                start, begin = self._in_order(start, stop), start
                self._join(first, begin, start)
                if start < stop:
                    foreign[start] = True
                    lines = lines or text.split(b"\n")
                    yield first + start, lines[start]
                    self._place_records(start)
                    start += 1
            if stop < self.count:
                yield first + stop, lines[stop]
                self._place_records(stop)
            start = stop + 1
        self._is_native = self._has_event[stem] & ~foreign

    def _place_records(self, at: int) -> None:
        """Note that the new records are of the line at a place."""
        self._places += [at] * (len(self._lines.records) - len(self._places))

    def _read(self, text: bytes) -> None:
        columns = self._ts, self._stem, self._args, self._dur, self._index
        view, done, at = LayeredRows(*(column.ctypes.data for column in columns)), ctypes.c_int64(0), 0
        refs = self._state, self._tables.reader, text, len(text), ctypes.byref(done)
        while at < self.count:
            known = len(self._stems) if len(self._stems) < _STEMS_MAX else _ALL_KNOWN
            at = checked(self._core.tp_layered_read(*refs, known, ctypes.byref(view), at, self.count))
            if at < self.count:
                self._learn(len(self._stems))

    def _learn(self, number: int) -> None:
        """Read the next stem."""
        pointer, place = ctypes.c_void_p(), (ctypes.c_int32 * 3)()
        size = self._core.tp_layered_stem(self._state, number, ctypes.byref(pointer), place)
        text = ctypes.string_at(pointer, size)
        if text not in self._events:
            self._events[text] = self._event_of(text)
        event = self._events[text]
        at = {key: number for key, number in zip(_PLACE, place, strict=True) if number != NONE}
        self._stems.append(None if event is None else event.record | at)
        if event is not None:
            self._role[number], self._has_no_start[number] = event.role, event.has_no_start
            self._has_event[number] = bool(event.record)
            self._is_whole[number] = event.record.get("phase") == "X"
            refs = self._state, self._tables.reader
            checked(self._core.tp_layered_set(*refs, number, event.recipe, len(event.recipe)))

    def _event_of(self, text: bytes) -> _Event | None:
        """The event of the lines with the text of a stem, None where Python must read them."""
        parts = text.split(_HOLE)
        holes = [b'"\\u0001%d"' % at for at in range(len(parts) - 1)]
        try:
            line = _PARSED(b"".join(map(bytes.__add__, parts, [*holes, b""])).decode())
            record = self._lines.event_of_stem(line)
        except (Unusable, _TwiceError):
            return None
        if record is None:
            return _Event(ALONE, {})
        args = record.pop("args", {})
        values = (*record.values(), *args)
        if any(type(one) is str and (len(one) > LONG_NAME or "\x01" in one) for one in values):
            return None
        if not args.keys().isdisjoint(LENGTHS):
            return None
        recipe = _HOLE_TEXT.sub(_hole, orjson.dumps(args)) if args else b""
        phase = record["phase"]
        is_call = record["type"] in HOST_LAYERS and START not in line
        role = {"I": INSTANT, "B": BEGIN, "X": WHOLE}.get(
            phase, END_WITH_LENGTH if "dur_ns" in record else END
        )
        has_no_start = is_call and line["type"] == "transfer" and phase == "X"
        return _Event(role if is_call else ALONE, record, recipe, has_no_start)

    def _in_order(self, start: int, stop: int) -> int:
        """The place of the first row that goes back in time, `stop` where there is none."""
        lines = self._lines
        ts = self._line_ts[start:stop]
        last = np.maximum.accumulate(np.append(lines.last_line_ns, ts))
        has_event = self._has_event[self._stem[start:stop]]
        end = int(np.append(np.flatnonzero((last[:-1] - ts > DISORDER_NS) & has_event), stop - start)[0])
        lines.last_line_ns = int(last[end])
        if end:
            lines.see_line()
        return start + end

    # Calls ---------------------------------------------------------------------------------------------

    def _join(self, first: int, start: int, end: int) -> None:
        """Join the lines of calls, from `start` to `end`."""
        stem = self._stem[start:end]
        new = distinct(stem[(self._role[stem] != ALONE) & (self._key[stem] == NONE)]).tolist()
        names = self._tables.long_names
        keys = {at: key_of(record, names) for at in new if (record := self._stems[at]) is not None}
        if end - start > 1 and len(self._keys.keys() | keys.values()) > KEYS_MAX:
            for at in range(start, end):
                self._join(first, at, at + 1)
            return
        for at, key in keys.items():
            self._key[at], self._function[at] = self._numbers(key)
        columns = self._key[stem], self._function[stem], self._ts[start:end], self._dur[start:end]
        for at in self._note(columns, start):
            self._lines.number = first + start + at
            self._lines.say_far_entry()

    def note(self, record: Record) -> None:
        """Note the next record of the lines, as _CallEnds does."""
        if record["type"] not in HOST_LAYERS:
            return
        if self._lines.batch is not self._batch:
            self._begin(0, 0)
        key, function = (
            np.array([number], np.int32) for number in self._numbers(key_of(record, self._tables.long_names))
        )
        place, phase = self.count + len(self._lines.records), record["phase"]
        has_dur = END_WITH_LENGTH if "dur_ns" in record else END
        self._phases[place] = {"I": INSTANT, "B": BEGIN, "X": WHOLE}.get(phase, has_dur)
        ts, dur = np.array([[record["ts_ns"]], [record.get("dur_ns", 0)]], np.int64)
        for _ in self._note((key, function, ts, dur), place):
            self._lines.say_far_entry()
        if phase == "X" and self._phases[place] == END_WITH_LENGTH:
            record.update(phase="E", ts_ns=int(ts[0]))
        self._noted.append((record, place))

    def _note(self, columns: tuple[Int32s, Int32s, Int64s, Int64s], first: int) -> Iterator[int]:
        """Note rows, and yield those whose entries are too far before them."""
        refs = *(column.ctypes.data for column in columns), self._phases.ctypes.data, first, self._batches
        at, count = 0, len(columns[0])
        while (at := self._core.tp_layered_note(self._state, *refs, at, count)) < count:
            yield at
            at += 1

    def _numbers(self, key: Key) -> tuple[int, int]:
        if key not in self._keys:
            if len(self._keys) >= KEYS_MAX:
                self._core.tp_layered_forget_calls(self._state)
                self._keys.clear()
                self._functions.clear()
                self._key[:] = NONE
            function = self._functions.setdefault(key[:2], len(self._functions))
            self._keys[key] = len(self._keys), function
        return self._keys[key]

    # Columns -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give the records of the batch the phases that they have in the end."""
        for record, place in self._noted:
            if record["phase"] in "IB":
                record["phase"] = PHASES[self._phases[place]]

    def merged(self, of_records: EventColumns) -> EventColumns:
        """The events of the batch in the order of its lines, with those of its records."""
        if self._lines.batch is not self._batch or not self.count:
            return of_records
        at: Int64s | slice = np.flatnonzero(self._is_native)
        if self._is_native.all():
            at = slice(self.count)  # which copies nothing
        stem = self._stem[at]
        changed = (self._phases[at] != self._role[stem]) & (self._role[stem] != ALONE)
        if self._rounds != self._tables.shape_rounds:
            self._rounds, self._number[:] = self._tables.shape_rounds, NONE
        which = 2 * stem + changed
        for one in distinct(which[self._number[which] == NONE]).tolist():
            record = self._stems[one >> 1]
            assert record is not None
            if one & 1:
                record = record | {"phase": "B" if record["phase"] == "I" else "E"}
            self._number[one] = self._tables.shape_number(record)
        index = self._index[at]
        events = EventColumns(
            self._ts[at],
            self._number[which],
            self._args[at],
            self._dur[at],
            np.zeros(len(stem), np.int64),
            index=index if (index[:, ::3] != NONE).any() else None,
        )
        if not len(of_records):
            return events
        places = np.append(np.flatnonzero(self._is_native), np.array(self._places, np.int64))
        order = np.argsort(places, kind="stable")
        return joined([events, of_records]).take(order)


def _hole(found: re.Match[bytes]) -> bytes:
    return _HOLE + bytes([int(found[1])])


class _TwiceError(Exception):
    """An object has two values of one key."""


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise _TwiceError
    return members


# json.loads would make a decoder for each stem.
_PARSED: Final = json.JSONDecoder(object_pairs_hook=_members).decode


def read(stream: BinaryIO, *, between: bool = False) -> Recording:
    """The recording in such a stream. `between`: lines without a time are placed between those with one. The
    header's clock is that of a GPU if all lines at the begin have only its times.
    """
    head = stream.read(_HEAD_BYTES)
    lines = [line for _, line in printed_lines(head)]
    kinds = {_timer_of(line) != "" for line in lines if _is_of_script(line)}
    clock = f"{GLOBALTIMER}0" if kinds == {True} else CLOCK
    reader = LayeredLines(between=between, clock=clock, is_wrapped=any(map(is_wrapped, lines)))
    recording = reader.recording(clock, stream, head)
    recording.is_undeclared = True
    return recording


def sniff(head: bytes) -> bool:
    """Whether a line of `head` is a JSON object of a type that the scripts print, wrapped or not."""
    return any(_is_of_script(line) for _, line in printed_lines(head))


def _is_of_script(line: object) -> bool:
    if type(line) is not dict or type(kind := line.get("type")) is not str:
        return False
    return kind in NAMED_BY_TYPE or (kind in LAYER_OF_TYPE and ("ts" in line or _timer_of(line) != ""))


def _timer_of(line: Record) -> str:
    """The key of the only time of a line if that is one of a GPU, in the line or in its `args`; else ""."""
    if "ts" in line or line["type"] not in _OF_THREADS:
        return ""
    args = line.get("args")
    keys = [*line, *args] if type(args) is dict else line
    return next((key for key in _TIMERS if key in keys), "")
