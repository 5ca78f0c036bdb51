"""Makes lines of stall reasons, which the library in a process has added up: `native/stall_records.h`.

gpu_stall      a stretch of about 10 ms: samples by function and reason
gpu_stall_pc   a second: the same samples also by instruction, module and line
loss           of gpu_stall: samples that CUPTI or the GPU lost, and why
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterator
from enum import IntEnum
from typing import Any, Final

from tracepipe.event.model import COLUMN_LIMIT, COUNT_LIMIT, NAME_BYTES_MAX
from tracepipe.printable import printable
from tracepipe.tracer.gpu.engines.channel import (
    ENTRY_BYTES,
    REFUSALS,
    GpuRecord,
    Malformed,
    check_span,
    text,
)
from tracepipe.tracer.gpu.engines.streams import Decoder, Process, Recording
from tracepipe.tracer.records.line import Lines

STALLS_VARIABLE: Final = "TRACEPIPE_GPU_STALLS"
"""The variable that is set if the library is to sample stall reasons."""
STALL_LAYER: Final = "gpu_stall"
"""The layer of stall reasons and of their losses."""


class StallKind(IntEnum):
    """Kinds of records of stall reasons."""

    STALL_REASON = 49
    STALLS = 50
    STALL_PCS = 51
    STALL_LOSS = 52


REASON: Final = struct.Struct("<I")
HEAD: Final = struct.Struct("<QQII")
STALL: Final = struct.Struct("<QII")
STALL_PC: Final = struct.Struct("<QQQQII")
LOSS: Final = struct.Struct("<QQQ")

# The prefix of every reason's name in CUPTI.
_BEFORE_REASON: Final = "smsp__pcsamp_warps_issue_stalled_"
_ENTRIES_MAX: Final = 1 << 13
_NAMES_BYTES_MAX: Final = 1 << 17  # for each line: readers take lines of 1 MiB
_REASON_BYTES: Final = 256
_PERIOD_LOG2_MAX: Final = 31


class StallDecoder(Decoder):
    """Makes lines of records of stall reasons."""

    kinds = frozenset(StallKind)
    kept = frozenset({StallKind.STALL_REASON})  # other records are complete with them
    whole = kinds - kept

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self._reasons: dict[tuple[int, int], str] = {}
        self._waiting: list[GpuRecord] = []

    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Take the name of a reason, and keep other records until all names of the chunk are known."""
        process = self._recording.process(record.pid)
        if record.kind != StallKind.STALL_REASON:
            self._waiting.append(record)
            return
        (number,) = REASON.unpack_from(record.payload)
        name = text(record.payload, REASON.size).removeprefix(_BEFORE_REASON)
        if (process.number, number) not in self._reasons:
            self._recording.memory.use(ENTRY_BYTES + len(name))
        self._reasons[process.number, number] = name

    def end_chunk(self, lines: Lines) -> None:
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            try:
                made = self._samples(record)
            except REFUSALS as refusal:
                self._recording.refuse(refusal)
                continue
            for line in made:
                lines.record(line)

    def _samples(self, record: GpuRecord) -> list[dict[str, Any]]:
        process, is_by_pc = self._recording.process(record.pid), record.kind == StallKind.STALL_PCS
        if record.kind == StallKind.STALL_LOSS:
            start_ns, end_ns, count = LOSS.unpack_from(record.payload)
            check_span(start_ns, end_ns)
            if not 0 < start_ns <= end_ns or not 0 < count <= COUNT_LIMIT:
                raise Malformed
            reason = printable(text(record.payload[: LOSS.size + _REASON_BYTES], LOSS.size))
            reason = f"process {record.pid}: {reason}"
            return [self._recording.loss(STALL_LAYER, count, reason, start_ns, end_ns - start_ns)]
        start_ns, end_ns, gpu, period_log2 = HEAD.unpack_from(record.payload)
        check_span(start_ns, end_ns)
        entries = list((STALL_PC if is_by_pc else STALL).iter_unpack(record.payload[HEAD.size :]))
        if not 0 < start_ns <= end_ns or period_log2 > _PERIOD_LOG2_MAX or len(entries) > _ENTRIES_MAX:
            raise Malformed
        head: dict[str, Any] = {"type": f"{STALL_LAYER}_pc" if is_by_pc else STALL_LAYER}
        head |= {"ts_ns": start_ns, "dur_ns": end_ns - start_ns, "pid": record.pid}
        head |= {"gpu": process.gpus.get(gpu, gpu), "period_cycles": 1 << period_log2}
        if not is_by_pc:
            self._recording.stall_samples += sum(samples for _, _, samples in entries)
            entries = [(function, 0, 0, -1, reason, samples) for function, reason, samples in entries]
            if not entries:
                return [head | {"functions": [], "reasons": [], "function": [], "reason": [], "samples": []}]
        return [head | columns for columns in self._columns(process, entries, is_by_pc=is_by_pc)]

    def _columns(
        self, process: Process, entries: list[tuple[int, ...]], *, is_by_pc: bool
    ) -> Iterator[dict[str, Any]]:
        """The columns of a line, or of several if their names are long: samples by function and reason, with
        `is_by_pc` also by the offset, the module and the source line of each instruction.
        """
        at = 0
        while at < len(entries):
            functions, reasons, lines = _Names(), _Names(), _Names()
            modules: list[str] = []
            rows: list[tuple[int, ...]] = []
            for function, module, offset_bytes, line, reason, samples in entries[at:]:
                if offset_bytes > COLUMN_LIMIT:
                    raise Malformed
                index = functions.index(process.names.get(function, "function whose name was lost"), module)
                if index == len(modules):
                    modules.append(f"{module:016x}")
                line_index = lines.index(process.names[line]) + 1 if line in process.names else 0
                name = self._reasons.get((process.number, reason), f"reason {reason}")
                rows.append((index, reasons.index(name), samples, offset_bytes, line_index))
                if functions.size_bytes + lines.size_bytes > _NAMES_BYTES_MAX:
                    break
            at += len(rows)
            names = ("function", "reason", "samples", "offset", "line")
            columns: dict[str, Any] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
            if not lines.texts:
                del columns["line"]
            texts: dict[str, list[str]] = {"functions": functions.texts}
            if is_by_pc:
                texts["modules"] = modules
            else:
                del columns["offset"]
            texts["reasons"] = reasons.texts
            yield texts | ({"lines": lines.texts} if lines.texts else {}) | columns


class _Names:
    """The names of a line, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._indices: dict[tuple[str, Hashable], int] = {}
        self.size_bytes = 0

    def index(self, name: str, key: Hashable = None) -> int:
        """The index of a name, or of a name with a key."""
        index = self._indices.setdefault((name, key), len(self.texts))
        if index == len(self.texts):
            short = name.encode(errors="replace")[:NAME_BYTES_MAX].decode(errors="ignore")
            self.texts.append(short)
            self.size_bytes += len(short)
        return index
