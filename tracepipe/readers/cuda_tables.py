"""Reads the tables of CUDA runtime calls that the eBPF tutorial's `cuda_events.bt` and `cuda_events` print.

    TIME(ms)     PROCESS          PID          EVENT                DETAILS            cuda_events.bt
    1234         my_cuda_app      12345        cudaMalloc           size=1048576 bytes
    1235         my_cuda_app      12345        cudaMalloc           returned=0 (success)

    TIME     PROCESS          PID     EVENT                    TYPE DETAILS            cuda_events (libbpf)
    17:35:41 my_cuda_app      12345   cudaMalloc            [ENTER] size=1048576 bytes
    17:35:41 my_cuda_app      12345   cudaMalloc             [EXIT] returned=Success

The first counts whole milliseconds since the start of tracing: clock "trace". The second prints the second in
which it prints, without a date: its rows are placed by their order, on the clock "localtime", which counts
from midnight of the first row. With --no-timestamp it prints no time: clock "order", which counts from 0. A
name may be longer than its column or have spaces, so rows are recognized by their shape and not by columns.
Text without a mark of a row is from the program or a log, and is skipped.
"""

from __future__ import annotations

import re
from typing import Any, BinaryIO

from tracepipe.event.checks import shown
from tracepipe.event.model import ID_LIMIT, TIME_LIMIT_NS, Record
from tracepipe.event.vocabulary import COPY_KINDS
from tracepipe.readers.bpftrace_records import loss_of
from tracepipe.readers.recording import BOM, LineReader, Recording, Unusable

HEAD_BYTES = 1 << 16
# The tools' rows have less than 300 bytes. Longer lines than this are not examined.
ROW_BYTES_MAX = 2048
# The most calls of one process that run at the same time. Beyond that, the exit of the oldest is taken to be
# lost.
OPEN_MAX = 256
# And of all processes. Further calls are begins, whose ends are matched as those of any other format.
_ALL_OPEN_MAX = 1 << 14

BY_MS, BY_SECOND, UNTIMED = "trace", "localtime", "order"
"""The three tables, named by the clocks of their rows."""
STEP_NS = 1_000
_DAY_S = 86_400

# comm has any 15 bytes. The longest match is taken, as no details look like the end of a row.
_WHO = rb"(?:(\S(?:.*\S)?)\s+)?(\d{1,10})\s+"
_CALL = rb"cu[a-z]*[A-Z]\w*"
_MS_ROW = re.compile(rb"(\d{1,19})\s+" + _WHO + rb"(" + _CALL + rb")(?:(\s*)|\s+(\w+=.*))")
_TAGGED_ROW = re.compile(
    rb"(?:(\d\d):(\d\d):(\d\d)\s+)?" + _WHO + rb"(\w+)\s+\[(ENTER|EXIT)\](?:\s+(\S.*)|\s*)"
)
_TITLES = {
    b"TIME(ms) PROCESS PID EVENT DETAILS": BY_MS,
    b"TIME PROCESS PID EVENT TYPE DETAILS": BY_SECOND,
    b"PROCESS PID EVENT TYPE DETAILS": UNTIMED,
}
# Halves of rows, or two rows in one, where two writers wrote at once.
_KEYS = rb"(?:size|kind|ptr|func|function|stream|event|handle|device|returned)="
_MARK = re.compile(
    rb"\[(?:ENTER|EXIT)\]|returned=|=-?\d+ \((?:success|error)\)|bytes, kind=|^" + _KEYS
    + rb"|\b" + _CALL + rb" +" + _KEYS + rb"|\d +" + _CALL + rb" *$"
    rb"|^\d{1,19} {3,}\S|^\d\d:\d\d:\d\d \S.*? \d+ +cu"
)  # fmt: skip

# These calls have no details at their entry. Another call without details may be half of a row.
_WITHOUT_DETAILS = frozenset({b"cudaStreamCreate", b"cudaEventCreate", b"cudaGetDevice"})
_EVENT_COLUMN = 20
_NUMBER, _ADDRESS = re.compile(r"-?\d{1,19}"), re.compile(r"0x[0-9a-f]{1,16}|\(nil\)")
_SHAPES = {
    "size": re.compile(r"-?\d{1,20} bytes"),
    "kind": _NUMBER,
    "device": _NUMBER,
    **dict.fromkeys(("ptr", "func", "function", "stream", "event", "handle"), _ADDRESS),
}
# `tracepipe convert` writes this for a call whose result was not recorded.
_NO_RESULT = "returned=?"
_RETURNED = re.compile(r"returned=(?:(-?\d{1,19}) \((?:success|error)\)|([A-Z]\w*))")
# The libbpf tool numbers its names of errors consecutively: they are CUDA's only up to 9.
_RESULT_NAMES = frozenset({
    "InvalidValue", "OutOfMemory", "NotInitialized", "Deinitialized", "ProfilerDisabled",
    "ProfilerNotInitialized", "ProfilerAlreadyStarted", "ProfilerAlreadyStopped", "InvalidConfiguration",
})  # fmt: skip

_WHOLE_MS = "is in whole milliseconds: the length of a call is known to 1 ms only"
_WHOLE_SECONDS = (
    "is the second in which a row was printed: rows keep their order and are placed 1 µs apart "
    "(args.placed_by), and lengths are not durations"
)
_NO_TIMES = "is missing: rows keep their order and are placed 1 µs apart (args.placed_by)"
_OTHER_TABLE = "is of another table, whose rows have no place among the times of this one"
_NO_THREADS = (
    "begins while another call of its process runs, and the table names no threads: an exit is matched with "
    "the call of its name that began first or, after a loss, last"
)
_NO_EXITS = "the table has no exits: calls are drawn as instants"
_MAY_BE_KIND = (
    "may be the kind: cuda_events.bt prints the fourth argument of cudaMemcpy as its size, and as its kind a "
    "fifth, which does not exist; no direction is taken from such rows"
)
_OWN_NAME = "is a name by the tool's own numbering, which differs from CUDA's above 9"


class _OpenCalls:
    """The open calls. Runtime calls of one thread do not nest, so calls that overlap are of several threads.

    At a time, one call of a process is written as B and E. A call that overlaps it is written as an X when it
    has ended, so that no call seems to end another. Of calls with the same name, the first to begin is taken
    to end first. After exits were lost, that would extend every call to the end of the next: then the last
    one is taken.
    """

    def __init__(self) -> None:
        self.exits_lost = False
        self._open = 0
        self._calls: dict[int, list[Record]] = {}
        self._written: dict[int, Record] = {}

    def enter(self, call: Record) -> Record | None:
        """The record to write for an entry now: none while another call of the process is open."""
        pid = call["pid"]
        if self._open >= _ALL_OPEN_MAX:
            return call
        self._open += 1
        calls = self._calls.setdefault(pid, [])
        if pid not in self._written:
            self._written[pid] = call
            calls.append(call)
            return call
        calls.append(call)
        if len(calls) <= OPEN_MAX:
            return None
        self._open -= 1
        return calls.pop(1 if calls[0] is self._written[pid] else 0)

    def leave(self, end: Record) -> Record:
        """The record to write for an exit: the end of the open call, or a whole call that overlaps it."""
        pid, calls = end["pid"], self._calls.get(end["pid"], [])
        for begin in reversed(calls) if self.exits_lost else calls:
            # comm is the thread's name: an exit under another name is another thread's.
            if begin["name"] == end["name"] and begin.get("comm") == end.get("comm"):
                break
        else:
            return end
        calls[:] = [call for call in calls if call is not begin]
        self._open -= 1
        if not calls:
            del self._calls[pid]
        if begin is self._written.get(pid):
            del self._written[pid]
            return end
        args = {**begin.get("args", {}), **end.get("args", {})}
        whole = begin | {"phase": "X", "dur_ns": max(0, end["ts_ns"] - begin["ts_ns"])}
        return whole | {"args": args} if args else whole

    def rest(self) -> list[Record]:
        """The entries that are not written yet and had no exit. Nothing is open any more."""
        held = [
            call for pid, calls in self._calls.items() for call in calls if call is not self._written.get(pid)
        ]
        self._calls.clear()
        self._written.clear()
        self._open = 0
        return held


class TableLines(LineReader):
    """Reads the rows of one table. `has_exits`: it has the exits of calls, as far as is known."""

    # Some 3000 rows.
    chunk_bytes = 1 << 18
    no_line = "has no row of a CUDA event table"

    def __init__(self, table: str, *, has_exits: bool) -> None:
        super().__init__()
        self._table, self._has_exits = table, has_exits
        self._calls = _OpenCalls()
        self._last_ns, self._day, self._last_s = -STEP_NS, 0, -1
        self._is_doubtful = False
        """Whether the details of the row have a problem."""

    def read_line(self, text: bytes, is_cut: bool) -> None:
        """Read a line. Raises Unusable."""
        # Padding stays: a row without details ends in it.
        text = text.lstrip().rstrip(b"\r")
        may_be_tagged = b"] " in text or text.endswith(b"]")
        if len(text) > ROW_BYTES_MAX:
            raise Unusable("", f"is longer than any row, {ROW_BYTES_MAX} bytes: {shown(text[:40])}")
        if may_be_tagged and (found := _TAGGED_ROW.fullmatch(text)):
            self._read_tagged(found, is_cut)
        elif found := _MS_ROW.fullmatch(text):
            self._read_by_ms(found, is_cut)
        elif table := _TITLES.get(b" ".join(text.split())):
            if self.has_lines:
                words = "a second table starts here: its times may count from another start"
                self.say("TIME", words, skipped=False)
                self.records += self._calls.rest()
                if table == BY_MS:
                    self._last_ns = 0
        elif loss := loss_of(text):
            self.records.append(loss)
            self._calls.exits_lost = True
        elif _MARK.search(text):
            broken = "was cut off in the middle of the row" if is_cut else "is not a whole row of the table"
            raise Unusable("", f"{broken}: {shown(text)}")
        elif text:
            self.batch.foreign_lines.append((self.number, text))

    def read_end(self) -> None:
        """Add the entries that wait for an exit."""
        self.records += self._calls.rest()

    def _read_by_ms(self, found: re.Match[bytes], is_cut: bool) -> None:
        ms, comm, pid, name, padding, details = found.groups()
        if self._table != BY_MS:
            raise Unusable("TIME", _OTHER_TABLE)
        if int(ms) > TIME_LIMIT_NS // 1_000_000:
            raise Unusable("TIME(ms)", f"must be at most {TIME_LIMIT_NS // 1_000_000}, not {int(ms)}")
        if details is None and not padding and len(name) < _EVENT_COLUMN and name not in _WITHOUT_DETAILS:
            raise Unusable("EVENT", f"ends the line without padding: the row is cut at {shown(name)}")
        ts_ns = int(ms) * 1_000_000
        is_exit = details is not None and details.startswith(b"returned")
        self._add(ts_ns, (comm, pid, name), is_exit, details or b"", {}, is_cut)
        self.say_once("TIME(ms)", _WHOLE_MS)
        # Rows of several processors come out of order, within the interval at which the buffers are read.
        if ts_ns < self._last_ns - 1_000_000_000:
            self.say("TIME(ms)", f"goes back by {(self._last_ns - ts_ns) // 1_000_000} ms", skipped=False)
        self._last_ns = max(self._last_ns, ts_ns)

    def _read_tagged(self, found: re.Match[bytes], is_cut: bool) -> None:
        hour, minute, second, comm, pid, name, tag, details = found.groups()
        is_timed = hour is not None
        if self._table == BY_MS or is_timed != (self._table == BY_SECOND):
            raise Unusable("TIME", _OTHER_TABLE if is_timed else "is missing, but the other rows have one")
        ts_ns = self._last_ns + STEP_NS
        if is_timed:
            if int(hour) > 23 or int(minute) > 59 or int(second) > 60:  # 60 in a leap second
                time = b":".join((hour, minute, second)).decode()
                raise Unusable("TIME", f"is not a time of day: {time}")
            # The start of this second, from the first row's midnight.
            clock_s = int(hour) * 3600 + int(minute) * 60 + int(second)
            if self._last_s - clock_s > _DAY_S // 2:
                self._day += 1
            elif clock_s < self._last_s:
                # The clock was set, or summer time ended. Rows are still in order.
                self.say_once("TIME", "goes back: such rows are placed after the last one before them")
            self._last_s = clock_s
            ts_ns = max(ts_ns, (self._day * _DAY_S + clock_s) * 1_000_000_000)
        by_order = {"placed_by": "order"}
        self._add(ts_ns, (comm, pid, name), tag == b"EXIT", details or b"", by_order, is_cut)
        self._last_ns = ts_ns
        self.say_once("TIME", _WHOLE_SECONDS if is_timed else _NO_TIMES)

    def _add(
        self,
        ts_ns: int,
        who: tuple[bytes, bytes, bytes],
        is_exit: bool,
        details: bytes,
        marks: dict[str, str],
        is_cut: bool,
    ) -> None:
        """Add a call's entry or exit. Raises Unusable if it is two rows in one."""
        comm, pid, name = (part.decode(errors="backslashreplace") if part else "" for part in who)
        if who[0] and _MARK.search(who[0]):
            raise Unusable("PROCESS", f"has another row in it: {shown(comm)}")
        if int(pid) > ID_LIMIT:
            raise Unusable("PID", f"must be at most {ID_LIMIT}, not {pid}")
        self.has_lines = True
        text = details.decode(errors="backslashreplace").strip()
        self._is_doubtful = False
        args = (self._exit_args(text) if is_exit else self._entry_args(text)) | marks
        is_whole = text.endswith((")", "bytes")) or who[2] in _WITHOUT_DETAILS
        if is_cut and not self._is_doubtful and not is_whole:
            self.say("DETAILS", "end with the input and may not be whole", skipped=False)
        record: Record = {"type": "userspace", "name": name, "phase": "E" if is_exit else "B", "ts_ns": ts_ns}
        record |= {"pid": int(pid)} | ({"comm": comm} if comm else {}) | ({"args": args} if args else {})
        self._has_exits = self._has_exits or is_exit
        event: Record | None = record
        if not self._has_exits:
            self.say_once("EVENT", _NO_EXITS)
            record["phase"] = "I"
        elif is_exit:
            event = self._calls.leave(record)
        elif (event := self._calls.enter(record)) is not record:
            self.say_once("PID", _NO_THREADS)
        if event is not None:
            self.records.append(event)

    def _exit_args(self, text: str) -> dict[str, Any]:
        """Arguments of an exit: `returned=0 (success)`, `returned=OutOfMemory`."""
        if text == _NO_RESULT:
            return {}
        found = _RETURNED.fullmatch(text)
        self._is_doubtful = found is None or found[2] not in (None, "Success", *_RESULT_NAMES)
        if found is None:
            self.say("returned", f"is not whole: {shown(text)}", skipped=False)
            return {"details": text} if text else {}
        if found[1] is not None or found[2] == "Success":
            return {"result": int(found[1] or 0)}
        if self._is_doubtful:
            self.say_once("returned", _OWN_NAME)
        return {"result_name": found[2]}

    def _entry_args(self, text: str) -> dict[str, Any]:
        """Arguments of an entry: `size=1048576 bytes, kind=1`."""
        args: dict[str, Any] = {}
        for part in text.split(", ") if text else ():
            key, equals, value = part.partition("=")
            if not equals or (key in _SHAPES and not _SHAPES[key].fullmatch(value)):
                self.say(key if equals else "DETAILS", f"is not whole: {shown(part)}", skipped=False)
                self._is_doubtful = True
                args["details"] = text
            elif key == "size":
                args["size_bytes"] = int(value.removesuffix(" bytes"))
            elif _NUMBER.fullmatch(value):
                args[key] = int(value)
            else:
                args["function" if key == "func" else key] = "0x0" if value == "(nil)" else value
        if "kind" in args:
            if self._table == BY_MS and 0 <= args.get("size_bytes", -1) < len(COPY_KINDS):
                self.say_once("size", _MAY_BE_KIND)
                self._is_doubtful = True
            elif 0 <= args["kind"] < len(COPY_KINDS):
                args["direction"] = COPY_KINDS[args["kind"]]
        return args


def _table_of(head: bytes) -> tuple[str, bool] | None:
    """The table that `head` begins with, if any, and whether it has exits, which the libbpf tool can leave
    out.
    """
    table, entries, exits = "", 0, 0
    for text in head.removeprefix(BOM).split(b"\n"):
        if len(text) > ROW_BYTES_MAX:
            continue
        text = text.lstrip().rstrip(b"\r")
        if found := _TAGGED_ROW.fullmatch(text):
            # A first row without a time may have been cut.
            table = BY_SECOND if found[1] and table in ("", UNTIMED) else table or UNTIMED
            is_exit = found[7] == b"EXIT"
        elif found := _MS_ROW.fullmatch(text):
            table = table or BY_MS
            is_exit = (found[6] or b"").startswith(b"returned")
        else:
            table = table or _TITLES.get(b" ".join(text.split()), "")
            continue
        entries, exits = entries + (not is_exit), exits + is_exit
    return (table, exits > 0 or entries < 2) if table else None


def read(stream: BinaryIO) -> Recording:
    """The recording in such a stream; times are on the clock of its table."""
    head = stream.read(HEAD_BYTES)
    table, has_exits = _table_of(head) or (BY_MS, True)
    return TableLines(table, has_exits=has_exits).recording(table, stream, head)


def sniff(head: bytes) -> bool:
    """Whether a line of `head` is the title or a row of such a table."""
    return _table_of(head) is not None
