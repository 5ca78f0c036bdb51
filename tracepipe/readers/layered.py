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

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, BinaryIO, Final

import orjson

from tracepipe.event.checks import shown
from tracepipe.event.columns import EventColumns
from tracepipe.event.model import (
    COUNT_LIMIT,
    GLOBALTIMER,
    HOST_LAYERS,
    ID_LIMIT,
    INDEX_LIMIT,
    TIME_LIMIT_NS,
    Record,
)
from tracepipe.event.tables import NativeTables
from tracepipe.event.vocabulary import COPY_KINDS, direction_named
from tracepipe.hooks.ioctl import decode_command
from tracepipe.native import library
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
from tracepipe.readers.layered_core import DISORDER_NS, KEYS_MAX, LENGTHS, START, Key, NativeLines, key_of
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
            text = self._core.unwrapped(text, is_held=self.holds_text)
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
            if key in line and (type(line[key]) is not int or not 0 <= line[key] <= ID_LIMIT):
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
            if len(index) != 3 or not all(type(one) is int and 0 <= one <= INDEX_LIMIT for one in index):
                wrong = f"must be three numbers from 0 to {INDEX_LIMIT}, not {shown(line[name])}"
                raise Unusable(name, wrong)
            place[name] = index
    device = line.get("gpu", line.get("device", 0))
    if type(device) is not int or not 0 <= device <= ID_LIMIT:
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
