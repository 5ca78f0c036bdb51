"""Reads what the GPU examples of bpftime print: kernel_trace, kernelretsnoop, cuda-counter, launchlate.

    [kernel_trace] ts=809635273301344 block=(0,0,0) thread=(1,0,0)        entry of a thread
    Thread (1, 0, 0) timestamp: 1749147474550023140                       exit of a thread, in some block
    Warp 1 (threads 32-63):  finish around timestamp 1749147474550025000  exit of a warp, summed up
    Entered _Z9vectorAddPKfS0_Pf x=0, ts=1749147474550023136              entry of a thread of block x
    Exited (with tsp) _Z9vectorAddPKfS0_Pf x=0 duration=6437888 tsp=1749147474550023136ns     its exit

All times are %globaltimer in ns. The tools do not print which GPU it was: events are on "globaltimer:0". Only
cuda-counter prints the kernel's name; the events of the others are called "kernel". Fields that a user added
to a tool's line (`… thread=(1,0,0) a=1.5`) are arguments of its event. Lines without a mark of these tools
are of a log or the program, and are skipped.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, BinaryIO

import numpy as np

from tracepipe.event.checks import shown
from tracepipe.event.columns import EventColumns, Int32s, Int64s, distinct, no_indices
from tracepipe.event.model import COUNT_LIMIT, TIME_LIMIT_NS, HostInstant
from tracepipe.readers.recording import BOM, LineReader, Recording, Unusable
from tracepipe.units import counted

CLOCK = "globaltimer:0"
HEAD_BYTES = 1 << 16

# CUDA's largest block and thread indices (CUDA C++ Programming Guide, technical specifications).
BLOCK_LIMIT = (1 << 31) - 1, 65535, 65535
THREAD_LIMIT = 1024, 1024, 64
# A block has at most 1024 threads. This many different indices are counted separately, to limit memory.
OCCURRENCES_LIMIT = 1 << 16
# Numbers with more digits may exceed 64 bits.
_EXACT_DIGITS = 18

_N = rb"(\d{1,20})"
# Fields that users add to those of the tools, but not the fields of another line that was printed into this
# one.
_MORE = rb"((?:\s(?!ts=|block=|thread=)[A-Za-z_]\w*=\S+)*)"
# bpftime's documentation has remarks after some lines (`// +4ns`).
_REMARK = rb"(?:\s*//.*)?"
_KERNEL_TRACE = re.compile(
    rb"\[kernel_trace\] ts=%b block=\(%b,%b,%b\) thread=\(%b,%b,%b\)" % ((_N,) * 7) + _MORE + _REMARK
)
_KERNELRETSNOOP = re.compile(rb"Thread \(%b, %b, %b\) timestamp: %b" % ((_N,) * 4) + _MORE + _REMARK)
# How that documentation summarizes the threads of a warp.
_WARP = re.compile(rb"Warp %b \(threads %b-%b\):\s+finish around timestamp %b" % ((_N,) * 4) + _REMARK)
_ENTERED = re.compile(rb"Entered (\S+) x=%b, ts=%b" % (_N, _N))
_EXITED = re.compile(rb"Exited \(with tsp\) (\S+) x=%b duration=%b tsp=%bns" % (_N, _N, _N))
_UNTIMED_EXIT = re.compile(rb"Exited \(without tsp\) (\S+) x=%b" % _N)
_KERNEL_TRACE_TOTAL = re.compile(rb"\[kernel_trace\] total events: %b" % _N)
_KERNELRETSNOOP_TOTAL = re.compile(rb"Total events collected: %b" % _N)
_DROPS = re.compile(rb"(OOB|Full|Bad-size|Other) drops: %b" % _N)
_HISTOGRAM_TITLE = re.compile(rb"\d\d:\d\d:\d\d\s+Launch Latency Distribution:")
_HISTOGRAM_ROW = re.compile(rb"[<>]?\d\S*\s*: %b\s*\|\**" % _N)
# launchlate's reading of the host's clocks, at its start.
_CALIBRATION = re.compile(rb"Clock calibration: REALTIME - MONOTONIC = (-?\d{1,20}) ns")
_CALIBRATION_LINES = re.compile(
    _CALIBRATION.pattern + rb"\s+MONOTONIC:\s+(\d{1,12})\.(\d{9})\s+REALTIME:\s+(\d{1,12})\.(\d{9})\s"
)
# A line with one of these is from a tool, whole or broken: two threads that write at the same time break
# lines.
# Lines with nothing else, many of which are read at once.
_ENTRIES = re.compile(
    rb"^\[kernel_trace\] ts=(\d{1,19}) block=\((\d{1,10}),(\d{1,5}),(\d{1,5})\)"
    rb" thread=\((\d{1,4}),(\d{1,4}),(\d{1,2})\)$",
    re.MULTILINE,
)
_EXITS = re.compile(rb"^Thread \((\d{1,4}), (\d{1,4}), (\d{1,2})\) timestamp: (\d{1,19})$", re.MULTILINE)
_MARK = re.compile(
    rb"\[kernel_trace\]|block=\(|thread=\(|Thread \(\d|\) timestamp: |Entered (?:_Z|\S+ x=)|, ts=\d"
    rb"|Exited \(with|\btsp=\d|Total events collected|Clock calibration: REALTIME|Warp \d+ \(threads \d"
)
# How the events of the tools that count them begin. A line may have several, and a broken event counts.
_STARTS = {
    "kernel_trace": re.compile(rb"\[kernel_trace\] (?!total events)"),
    "kernelretsnoop": re.compile(rb"Thread \(\d"),
}
# These lines end with a number: without a newline after it, digits may be missing.
_ENDS_IN_DIGITS = (_KERNELRETSNOOP, _ENTERED, _WARP)

_NO_BLOCK = (
    "the same thread index again: kernelretsnoop prints no block, so the threads of different blocks and "
    "launches differ only in args.occurrence"
)
_NO_THREAD = (
    "cuda-counter prints block x only, and measures each exit from the newest entry in that block: "
    "the thread is not known"
)


_EVENT = {"type": "gpu_thread", "name": "kernel", "phase": "I", "gpu": 0}


def _added(fields: bytes) -> dict[str, Any]:
    """Fields that a user added to a tool's line: numbers where JSON has such numbers, else texts."""
    pairs = (field.decode(errors="backslashreplace").partition("=") for field in fields.split())
    return {key: _value(text) for key, _, text in pairs}


def _value(text: str) -> int | float | str:
    if re.fullmatch(r"-?\d+", text, re.ASCII):
        return int(text) if len(text) <= _EXACT_DIGITS else text
    is_number = re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", text, re.ASCII) is not None
    return number if is_number and math.isfinite(number := float(text)) else text


def _check_index(field: str, index: list[int], limits: tuple[int, int, int]) -> None:
    """Check an index against CUDA's limits. Raises Unusable."""
    for axis, value, limit in zip("xyz", index, limits, strict=True):
        if value >= limit:
            raise Unusable(field, f"has {axis}={value}, and CUDA's largest is {limit - 1}")


class ToolLines(LineReader):
    """Reads the lines of one input. `calibrated`: the header has the start that launchlate prints."""

    # About 4000 lines.
    chunk_bytes = 1 << 18
    no_line = "has no line of a bpftime tool"
    has_usual = True

    def __init__(self, *, calibrated: bool) -> None:
        super().__init__()
        self._calibrated = calibrated
        self._occurrences: dict[int, int] = {}
        """By the index of a thread, as one number: how often it came."""
        # The events of each tool in the text, also on broken lines, and how many of its total are missing.
        self._counted: Counter[str] = Counter()
        self._missing: Counter[str] = Counter()
        self._patterns: tuple[tuple[re.Pattern[bytes], Callable[[re.Match[bytes]], None]], ...] = (
            (_KERNEL_TRACE, self._entry),
            (_KERNELRETSNOOP, self._exit),
            (_WARP, self._warp),
            (_ENTERED, self._entered),
            (_EXITED, self._exited),
            (_UNTIMED_EXIT, self._untimed_exit),
            (_KERNEL_TRACE_TOTAL, lambda found: self._total("kernel_trace", int(found[1]))),
            (_KERNELRETSNOOP_TOTAL, lambda found: self._total("kernelretsnoop", int(found[1]))),
            (_DROPS, self._drops),
            (_HISTOGRAM_TITLE, lambda found: None),
            (_HISTOGRAM_ROW, self._histogram),
            (_CALIBRATION, self._calibration),
        )

    def read_line(self, text: bytes, is_cut: bool) -> None:
        """Read a line. Raises Unusable."""
        text = text.strip()
        found = None
        try:
            for pattern, read in self._patterns:
                if found := pattern.fullmatch(text):
                    self.has_lines = True
                    read(found)
                    if is_cut and pattern in _ENDS_IN_DIGITS:
                        self.say(
                            "ts", "ends with the input: digits of its time may be missing", skipped=False
                        )
                    return
            if _MARK.search(text):
                self.has_lines = True
                raise Unusable("", f"is not a whole line of a bpftime tool: {shown(text)}")
        except Unusable:
            # The line gives no event, but its event counts as read: it is not missing from the tool's total.
            for tool, start in _STARTS.items():
                self._counted[tool] += len(start.findall(text))
            raise
        if text:
            self.batch.foreign_lines.append((self.number, text))

    def usual(self, first: int, lines: list[bytes]) -> EventColumns | None:
        """The events of lines that all are entries, or exits, of threads; None where any line is another."""
        are_entries = lines[0].startswith(b"[kernel_trace]")
        found = (_ENTRIES if are_entries else _EXITS).findall(b"\n".join(lines))
        numbers = [*map(int, chain.from_iterable(found))]
        if len(found) != len(lines) or max(numbers) > TIME_LIMIT_NS:
            return None
        read = np.array(numbers, np.int64).reshape(len(lines), -1)
        ts_ns = read[:, 0 if are_entries else -1].copy()
        index = no_indices(len(lines))
        places = read[:, 1:] if are_entries else read[:, :-1]
        index[:, -places.shape[1] :] = places
        if (places >= np.array((*BLOCK_LIMIT, *THREAD_LIMIT)[-places.shape[1] :])).any():
            return None
        occurrences: Int64s | None = np.zeros(len(lines), np.int64)
        if not are_entries and (occurrences := self._occurrences_of(index[:, 3:])) is None:
            return None
        assert occurrences is not None
        if len(again := np.flatnonzero(occurrences)):
            self.number = first + int(again[0])
            self.say_once("thread", _NO_BLOCK)
        different = distinct(occurrences)
        exits = ({"event": "exit", "occurrence": one} for one in different.tolist())
        known = [self.tables.args_number(one) for one in ([{"event": "entry"}] if are_entries else exits)]
        args = np.array(known, np.int32)[np.searchsorted(different, occurrences)]
        self._counted["kernel_trace" if are_entries else "kernelretsnoop"] += len(lines)
        shape = np.full(len(lines), self.tables.shape_number(_EVENT), np.int32)
        nothing = np.zeros(len(lines), np.int64)
        return EventColumns(ts_ns, shape, args, nothing, nothing.copy(), index=index)

    def _occurrences_of(self, threads: Int32s) -> Int64s | None:
        """How often each thread's index came before; None where there are too many different ones."""
        x, y, z = threads.astype(np.int64).T
        key = x + THREAD_LIMIT[0] * (y + THREAD_LIMIT[1] * z)
        order = np.argsort(key, kind="stable")
        is_first = np.append(True, np.diff(key[order]) != 0)
        firsts, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        keys = key[order][firsts].tolist()
        if len(self._occurrences.keys() | set(keys)) > OCCURRENCES_LIMIT:
            return None
        before = np.array([self._occurrences.get(one, 0) for one in keys], np.int64)
        found = np.empty(len(key), np.int64)
        found[order] = before[group] + np.arange(len(key)) - firsts[group]
        after = before + np.bincount(group)
        self._occurrences |= zip(keys, after.tolist(), strict=True)
        return found

    def _add(self, tool: str, ts_ns: int, args: dict[str, Any], **fields: object) -> None:
        if ts_ns > TIME_LIMIT_NS:
            raise Unusable("ts", f"must be at most {TIME_LIMIT_NS}, not {ts_ns}")
        self._counted[tool] += 1
        self.records.append({**_EVENT, "ts_ns": ts_ns, **fields, "args": args})

    def _entry(self, found: re.Match[bytes]) -> None:
        ts_ns, *index = map(int, found.groups()[:7])
        block, thread = index[:3], index[3:]
        _check_index("block", block, BLOCK_LIMIT)
        _check_index("thread", thread, THREAD_LIMIT)
        args = {**_added(found[8]), "event": "entry"}
        self._add("kernel_trace", ts_ns, args, block=block, thread=thread)

    def _exit(self, found: re.Match[bytes]) -> None:
        *thread, ts_ns = map(int, found.groups()[:4])
        self._exit_of(thread, ts_ns, _added(found[5]))

    def _warp(self, found: re.Match[bytes]) -> None:
        warp, first, last, ts_ns = map(int, found.groups())
        self._exit_of([first, 0, 0], ts_ns, {"warp": warp, "threads": [first, last]})

    def _exit_of(self, thread: list[int], ts_ns: int, args: dict[str, Any]) -> None:
        """The exit of a thread in some block, or of the threads of a warp by its first."""
        _check_index("thread", thread, THREAD_LIMIT)
        args["event"] = "exit"
        x, y, z = thread
        key = x + THREAD_LIMIT[0] * (y + THREAD_LIMIT[1] * z)
        occurrence = self._occurrences.get(key, 0)
        if occurrence or len(self._occurrences) < OCCURRENCES_LIMIT:
            args["occurrence"] = occurrence
            self._occurrences[key] = occurrence + 1
        else:
            self.say_once("thread", "is one index too many to count: it has no args.occurrence")
        if occurrence:
            self.say_once("thread", _NO_BLOCK)
        self._add("kernelretsnoop", ts_ns, args, thread=thread)

    def _of_block_x(self, found: re.Match[bytes], ts_ns: int, event: str, **fields: int) -> None:
        """An event of cuda-counter, whose x is the block's."""
        block_x = int(found[2])
        if block_x >= BLOCK_LIMIT[0]:
            raise Unusable("x", f"is {block_x}, and CUDA's largest block index is {BLOCK_LIMIT[0] - 1}")
        self.say_once("x", _NO_THREAD)
        args = {"event": event, "block_x": block_x}
        self._add("cuda-counter", ts_ns, args, name=found[1].decode(errors="backslashreplace"), **fields)

    def _entered(self, found: re.Match[bytes]) -> None:
        self._of_block_x(found, int(found[3]), "entry")

    def _exited(self, found: re.Match[bytes]) -> None:
        # tsp is the time of the entry from which the duration is measured.
        dur_ns, entry_ns = int(found[3]), int(found[4])
        if dur_ns > TIME_LIMIT_NS:
            # A thread that leaves "before" the newest entry wraps around the unsigned subtraction.
            raise Unusable("duration", f"must be at most {TIME_LIMIT_NS}, not {dur_ns}")
        self._of_block_x(found, entry_ns + dur_ns, "exit", dur_ns=dur_ns)

    def _untimed_exit(self, found: re.Match[bytes]) -> None:
        raise Unusable("tsp", "is missing: the exit has no place in time")

    def _total(self, tool: str, total: int) -> None:
        """Compare a tool's own count, cumulative since its start, with its events that were read."""
        count, missing = self._counted[tool], total - self._counted[tool]
        if missing > self._missing[tool]:
            reason = f"{tool} counted {counted(total, 'event|events')}, and the text has {count}"
            self._lose(missing - self._missing[tool], reason)
            self._missing[tool] = missing

    def _drops(self, found: re.Match[bytes]) -> None:
        if count := int(found[2]):
            self._lose(count, f"kernelretsnoop: {found[0].decode()}")

    def _lose(self, count: int, reason: str) -> None:
        self.records.append(
            {"type": "loss", "count": min(count, COUNT_LIMIT), "layer": "gpu_thread", "reason": reason}
        )

    def _histogram(self, found: re.Match[bytes]) -> None:
        raise Unusable("ts", "is missing: a histogram row counts launches and places none in time")

    def _calibration(self, found: re.Match[bytes]) -> None:
        if not self._calibrated:
            words = "clock calibration without consistent clock readings; not used"
            self.say("start", words, skipped=False)
        self._calibrated = False  # once for each start of the tool


def _start_of(head: bytes) -> HostInstant | None:
    """The instant at which launchlate read both host clocks, where `head` has it and it is consistent."""
    found = _CALIBRATION_LINES.search(head)
    if not found:
        return None
    offset_ns, mono_s, mono_ns, real_s, real_ns = (int(group) for group in found.groups())
    monotonic_ns, realtime_ns = mono_s * 10**9 + mono_ns, real_s * 10**9 + real_ns
    if realtime_ns - monotonic_ns != offset_ns:
        return None
    return {"monotonic_ns": monotonic_ns, "realtime_ns": realtime_ns}


def read(stream: BinaryIO) -> Recording:
    """The recording in such a stream. The header has `start` where launchlate read the host's clocks."""
    head = stream.read(HEAD_BYTES)
    start = _start_of(head)
    return ToolLines(calibrated=bool(start)).recording(CLOCK, stream, head, start=start)


_OWN_LINES = (
    _KERNEL_TRACE, _KERNELRETSNOOP, _WARP, _ENTERED, _EXITED, _KERNEL_TRACE_TOTAL, _KERNELRETSNOOP_TOTAL,
    _HISTOGRAM_TITLE, _CALIBRATION,
)  # fmt: skip


def sniff(head: bytes) -> bool:
    """Whether a line of `head` is wholly one that a bpftime tool prints."""
    lines = (line.strip() for line in head.removeprefix(BOM).split(b"\n"))
    return any(pattern.fullmatch(line) for line in lines for pattern in _OWN_LINES)
