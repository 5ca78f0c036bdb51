"""Writes `tracepipe/1`, the event file of `event/model.py`, from the batches of any reader.

    {"type":"header","schema":"tracepipe/1","clock":"monotonic",…}
    {"ts_ns":1795,"type":"userspace","name":"cuInit","phase":"B","pid":7,"tid":7,"args":{"flags":0}}
    {"type":"footer","counts":{"userspace":1},"losses":{}}

Events are on the clocks that they were recorded with. The time comes first, then the fields of the shape, so
that the rest of a line repeats and is parsed once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, BinaryIO, Final

import orjson

from tracepipe.converters.writer import TraceInfo, without_form
from tracepipe.event.columns import NONE, SPECIAL, SourceBatch, unsigned
from tracepipe.event.model import FLOW_PHASES, TIME_LIMIT_NS, Footer, Header, Record
from tracepipe.event.nesting import count_loss
from tracepipe.event.shape import Shape
from tracepipe.event.stacks import Stacks
from tracepipe.event.tables import Tables
from tracepipe.event.warps import WARP_COLUMNS, Warps

_FLUSH_BYTES: Final = 1 << 18
_FIELDS: Final = ("pid", "tid", "cpu", "comm", "clock", "domain", "range", "gpu", "stream", "grid", "block")
# Records that are written at their proper place, and not where they were read.
_OWN: Final = frozenset({"header", "stack", "footer"})


class EventFileWriter:
    """Writes events as they come, and a stack before the first event that refers to it."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out = out
        self.counts: Counter[str] = Counter()
        """The number of events by layer. A warp counts as one."""
        self.losses: Counter[str] = Counter()
        self.footer = Footer()
        """The fields of the footer in addition to its counts."""
        self._unwritten: Counter[str] = Counter()
        self._heads: list[bytes | None] = []
        self._rounds = 0
        self._stacks: dict[int, int] = {}
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self.record({**Header().to_record(), **(info.header or Header(clock=info.trace_clock)).to_record()})

    def record(self, record: object) -> None:
        """Write a record that is given as a dict."""
        self._line(orjson.dumps(record))

    def write_events(self, batch: SourceBatch, tables: Tables) -> None:
        """Write the events of a batch, whose times are those of the recording."""
        if self._rounds != tables.shape_rounds:
            self._rounds, self._heads = tables.shape_rounds, []
        self._heads += [_head(shape) for shape in tables.shapes[len(self._heads) :]]
        events = batch.events
        stacks = [NONE] * len(events) if events.stack is None else events.stack.tolist()
        columns = (events.ts_ns, events.dur_ns, events.shape, events.args, events.launch)
        rows = zip(*(column.tolist() for column in columns), stacks, strict=True)
        for at, (ts_ns, dur_ns, number, args, launch, stack) in enumerate(rows):
            if number == SPECIAL:
                self._other(batch.others[args])
                continue
            shape, head = tables.shapes[number], self._heads[number]
            assert shape is not None and head is not None
            if not 0 <= ts_ns <= TIME_LIMIT_NS or not 0 <= dur_ns <= TIME_LIMIT_NS:
                self._unwritten["event|events before the start of its|their clock"] += 1
                continue
            stack_id = self._stack(stack, tables.stacks) if stack != NONE else NONE
            line = b'{"ts_ns":%d%s' % (ts_ns, head)
            if shape.has_dur:
                line += b',"dur_ns":%d' % dur_ns
            if shape.has_launch:
                line += b',"launch":%d' % unsigned(launch)
            elif shape.phase in FLOW_PHASES:
                line += b',"flow":%d' % launch
            if shape.type == "gpu_thread":
                for name, index in zip((b"block", b"thread"), events.thread_of(at), strict=True):
                    line += b"" if index is None else b',"%s":[%d,%d,%d]' % (name, *index)
            if stack_id != NONE:
                line += b',"stack":%d' % stack_id
            self.counts[shape.type] += 1
            self._line(line + (b"}" if args == NONE else b',"args":%s}' % tables.text(args)))

    def _other(self, other: Record | Warps) -> None:
        """Write a record that is not an event."""
        if isinstance(other, Warps):
            self.counts["gpu_warp"] += len(other)
            columns = {
                name: column.tolist() for name in WARP_COLUMNS if (column := getattr(other, name)) is not None
            }
            ranges = {"ranges": other.ranges} if other.ranges else {}
            # The type comes first: readers need it to accept a line of this length.
            self.record({"type": "gpu_warp", "ts_ns": other.ts_ns, **other.launched, **ranges, **columns})
            return
        kind = other["type"]
        if kind == "footer":
            self.footer = Footer.from_record(other)
        elif kind == "loss":
            count_loss(self.losses, other)
        if kind not in _OWN:
            self.record(other)

    def _stack(self, number: int, stacks: Stacks) -> int:
        """The id of a stack, which is written once. Stacks are numbered in the order of the events."""
        known = self._stacks.get(number)
        if known is not None:
            return known
        new = self._stacks[number] = len(self._stacks)
        frames = (stacks.frames[at] for at in stacks.frames_of(number))
        shown = [{key: value for key, value in one._asdict().items() if value is not None} for one in frames]
        omitted = stacks.omitted(number)
        self.record({"type": "stack", "id": new, "frames": shown} | ({"omitted": omitted} if omitted else {}))
        return new

    def _line(self, line: bytes) -> None:
        self._lines.append(line)
        self._waiting_bytes += len(line)
        if self._waiting_bytes >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._lines.append(b"")
        self._out.write(b"\n".join(self._lines))
        # In a compressed file, this ends a part, which can be read without those that follow.
        self._out.flush()
        self._lines, self._waiting_bytes = [], 0

    def finish(self) -> None:
        """Write the lines that are left, and the footer."""
        footer = replace(self.footer, counts=self.counts, losses=self.losses)
        self.record(Footer().to_record() | footer.to_record())
        self._flush()

    def remarks(self) -> list[str]:
        """Remarks about what the file does not contain."""
        return without_form(self._unwritten)


def _head(shape: Shape | None) -> bytes | None:
    """The fields that all events of a shape share, as a part of their lines."""
    if shape is None:
        return None
    stated: dict[str, Any] = {"type": shape.type, "name": shape.name, "phase": shape.phase}
    if shape.layer is not None:
        stated["layer"] = shape.layer
    stated |= {name: value for name in _FIELDS if (value := getattr(shape, name)) is not None}
    return b"," + orjson.dumps(stated)[1:-1]
