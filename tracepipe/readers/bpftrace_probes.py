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
from typing import BinaryIO

import numpy as np

from tracepipe.event.columns import EventColumns
from tracepipe.event.model import TIME_LIMIT_NS, Record
from tracepipe.hooks.probe_names import ProbeName, probe_named
from tracepipe.kernel_names import remembered
from tracepipe.readers.bpftrace_records import (
    NO_TIME,
    OWN_TEXT,
    PLACED,
    PROBE,
    ScriptLines,
    is_wrapped,
    loss_of,
    parsed_object,
    printed_lines,
)
from tracepipe.readers.recording import Recording, row_of

TIMED, UNTIMED = "nsecs", "order"
"""The clocks of lines with and without times."""
STEP_NS = 1_000
HEAD_BYTES = 1 << 16

_PROBE = PROBE.encode()
_DIGITS_MAX = 20
# The numbers of so many probes are remembered.
_KNOWN_MAX = 1 << 12
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


@remembered
def _probe_of(text: bytes) -> tuple[str, ProbeName]:
    name = text.decode(errors="backslashreplace")
    return name, probe_named(name)


class _ProbeLines(ScriptLines[bytes]):
    """Reads the lines of one input, whose times are on this clock."""

    # These lines are short: a chunk has thousands of them.
    chunk_bytes = 1 << 18
    no_line = "has no line of a probe"

    def __init__(self, clock: str, *, between: bool) -> None:
        super().__init__(between=between)
        self._clock, self.has_usual = clock, clock == TIMED and not between
        self._count = 0
        self._known: dict[bytes, tuple[int, int]] = {}
        """By probe: the shape and the arguments of its events, in the numbers of `_round`."""
        self._round = 0

    def usual(self, first: int, lines: list[bytes]) -> EventColumns | None:
        """The events of lines with a time, a blank and a probe each; None where any line is another."""
        words = b" ".join(lines).split(b" ")
        times, probes = [word[1:-1] for word in words[::2]], words[1::2]
        if len(words) != 2 * len(lines) or not all(map(bytes.isdigit, times)):
            return None
        if lines != [b"[%b] %b" % line for line in zip(times, probes, strict=True)]:
            return None
        ts_ns = [*map(int, times)]
        if max(map(len, times)) > _DIGITS_MAX or max(ts_ns) > TIME_LIMIT_NS:
            return None
        if self._round != self.tables.rounds or len(self._known) > _KNOWN_MAX:
            self._round = self.tables.rounds
            self._known.clear()
        for probe in {*probes} - self._known.keys():
            if not _BARE.fullmatch(probe):
                return None
            _, shape, args, *_ = row_of(self._event(probe, 0, {}), self.tables, self.batch.others)
            self._known[probe] = shape, args
        shape, args = np.array([*map(self._known.__getitem__, probes)], np.int32).T
        nothing = np.zeros(len(lines), np.int64)
        return EventColumns(np.array(ts_ns, np.int64), shape.copy(), args.copy(), nothing, nothing.copy())

    def read_line(self, text: bytes, is_cut: bool) -> None:
        """Read a line, or the lines in a record of bpftrace."""
        text = text.strip()
        if text.startswith(b"{") and is_wrapped(record := parsed_object(text)):
            self.read_numbered(self.printed_in(record), is_cut=False)
            return
        if text.startswith(b"@"):
            self.note_map()
        if not text or OWN_TEXT.match(text):
            return
        if loss := loss_of(text):
            self.records.append(loss)
            return
        parts = _parts(text)
        if parts is None:
            self.batch.printed.append((self.number, text))
            return
        self.has_lines = True
        probe, time = parts
        if self._clock == UNTIMED and time:
            self.say("ts", "has a time, but the lines before are placed by their order")
        elif self._clock == UNTIMED:
            self.say_once("ts", _NO_TIMES)
            self._add(probe, self._count * STEP_NS, {"placed_by": "order"})
            self._count += 1
        elif not time:
            if not self.wait(probe):
                self.say(*NO_TIME)
        elif (ts_ns := int(time)) > TIME_LIMIT_NS:
            self.say("ts", f"must be at most {TIME_LIMIT_NS}, not {ts_ns}")
        else:
            self.add_waiting(ts_ns)
            self._add(probe, ts_ns, {})
        if is_cut:
            self.say("", "ends with the input and may not be whole", skipped=False)

    def add_at(self, line: bytes, ts_ns: int) -> None:
        """Add the instant of a line without a time."""
        self._add(line, ts_ns, {"placed": PLACED})

    def _add(self, text: bytes, ts_ns: int, args: Record) -> None:
        self.records.append(self._event(text, ts_ns, args))

    @staticmethod
    def _event(text: bytes, ts_ns: int, args: Record) -> Record:
        """The event of a hit of a probe."""
        args["probe"], probe = _probe_of(text)
        # Without a thread, a return cannot be matched with its call: it is a separate event, and not a second
        # call.
        name = f"{probe.name} returns" if probe.is_return else probe.name
        event: Record = {"type": probe.layer, "name": name, "phase": "I", "ts_ns": ts_ns}
        layer = {"layer": probe.layer_name} if probe.layer_name else {}
        return {**event, **layer, "args": args}


def read(stream: BinaryIO, *, between: bool = False) -> Recording:
    """The recording in such a stream. `between`: lines without a time are placed between those with one."""
    head = stream.read(HEAD_BYTES)
    found = (_parts(text) for text, _ in printed_lines(head))
    times = [parts[1] for parts in found if parts]
    clock = TIMED if any(times) or not times else UNTIMED
    return _ProbeLines(clock, between=between).recording(clock, stream, head)


def sniff(head: bytes) -> bool:
    """Whether a line of `head` is of a probe."""
    return any(_parts(text) for text, _ in printed_lines(head))
