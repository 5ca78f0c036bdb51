"""Makes lines of stall reasons, which the library in a process has added up.

channel ──▶ records ──▶ gpu_stall      a stretch of about 10 ms: samples by function and reason
                        gpu_stall_pc   a second: the same samples also by instruction, module and line
                        loss           of gpu_stall: samples that CUPTI or the GPU lost, and why
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, Final

from tracepipe.tracer.gpu.engines.stall_records import (
    HEAD,
    KIND_STALL_LOSS,
    KIND_STALL_PCS,
    KIND_STALL_REASON,
    LAYER,
    LOSS,
    REASON,
    STALL,
    STALL_PC,
)
from tracepipe.tracer.gpu.engines.transport import GpuRecord, printable, text
from tracepipe.tracer.gpu.engines.untrusted import Kept, Malformed, add_loss, check_span
from tracepipe.tracer.records.bounds import COLUMN_LIMIT, COUNT_LIMIT, NAME_BYTES_MAX

if TYPE_CHECKING:
    from tracepipe.tracer.gpu.engines.kernels import Process

# The prefix of every reason's name in CUPTI.
_BEFORE_REASON: Final = "smsp__pcsamp_warps_issue_stalled_"
_ENTRIES_MAX: Final = 1 << 13
_NAMES_BYTES_MAX: Final = 1 << 17  # for each line: readers take lines of 1 MiB
_REASON_BYTES: Final = 256
_PERIOD_LOG2_MAX: Final = 31
_LOST_NAME: Final = "function whose name was lost"


class _Names:
    """The names of a line, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[Any, int] = {}
        self.size_bytes = 0

    def place(self, name: str, key: Hashable = None) -> int:
        """The index of a name, or of a name with a key."""
        place = self._places.setdefault((name, key), len(self.texts))
        if place == len(self.texts):
            short = name.encode(errors="replace")[:NAME_BYTES_MAX].decode(errors="ignore")
            self.texts.append(short)
            self.size_bytes += len(short)
        return place


class StallLines:
    """Makes lines of such records."""

    def __init__(self, kept: Kept, losses: dict[str, int]) -> None:
        self._kept, self._losses = kept, losses
        self.samples = 0

    def take_name(self, process: Process, record: GpuRecord) -> None:
        """Take the name of a reason. May raise one of REFUSALS."""
        assert record.kind == KIND_STALL_REASON
        (number,) = REASON.unpack_from(record.payload)
        name = text(record.payload, REASON.size).removeprefix(_BEFORE_REASON)
        if number not in process.stall_reasons:
            self._kept.take(_REASON_BYTES + len(name))
        process.stall_reasons[number] = name

    def take(self, process: Process, record: GpuRecord) -> list[dict[str, Any]]:
        """The records of an event file that a record of the channel becomes. May raise one of REFUSALS."""
        if record.kind == KIND_STALL_LOSS:
            return [self._loss(record)]
        start_ns, end_ns, gpu, period_log2 = HEAD.unpack_from(record.payload)
        check_span(start_ns, end_ns)
        entry = STALL_PC if record.kind == KIND_STALL_PCS else STALL
        entries = list(entry.iter_unpack(record.payload[HEAD.size :]))
        if not 0 < start_ns <= end_ns or period_log2 > _PERIOD_LOG2_MAX or len(entries) > _ENTRIES_MAX:
            raise Malformed
        head = {"ts_ns": start_ns, "dur_ns": end_ns - start_ns, "pid": record.pid}
        head |= {"gpu": process.gpus.get(gpu, gpu), "period_cycles": 1 << period_log2}
        if record.kind == KIND_STALL_PCS:
            return [{"type": f"{LAYER}_pc"} | head | columns for columns in _by_instruction(process, entries)]
        self.samples += sum(samples for _, _, samples in entries)
        return [{"type": LAYER} | head | columns for columns in _by_function(process, entries)]

    def _loss(self, record: GpuRecord) -> dict[str, Any]:
        start_ns, end_ns, samples = LOSS.unpack_from(record.payload)
        check_span(start_ns, end_ns)
        if not 0 < start_ns <= end_ns or not 0 < samples <= COUNT_LIMIT:
            raise Malformed
        add_loss(self._losses, LAYER, samples)
        why = (
            f"process {record.pid}: {printable(text(record.payload[: LOSS.size + _REASON_BYTES], LOSS.size))}"
        )
        loss = {"type": "loss", "layer": LAYER, "count": samples, "reason": why}
        return loss | {"ts_ns": start_ns, "dur_ns": end_ns - start_ns}


def _reason(process: Process, number: int) -> str:
    return process.stall_reasons.get(number, f"reason {number}")


def _by_function(process: Process, entries: list[tuple[int, ...]]) -> Iterator[dict[str, Any]]:
    """The columns of a line, or of several if their names are long."""
    at = 0
    while at < len(entries) or not at:
        functions, reasons = _Names(), _Names()
        rows: list[tuple[int, int, int]] = []
        for function, reason, samples in entries[at:]:
            name = process.names.get(function, _LOST_NAME)
            rows.append((functions.place(name), reasons.place(_reason(process, reason)), samples))
            if functions.size_bytes > _NAMES_BYTES_MAX:
                break
        at += max(len(rows), 1)
        columns = zip(*rows, strict=True) if rows else ((), (), ())
        named = zip(("function", "reason", "samples"), map(list, columns), strict=True)
        yield {"functions": functions.texts, "reasons": reasons.texts, **dict(named)}


def _by_instruction(process: Process, entries: list[tuple[int, ...]]) -> Iterator[dict[str, Any]]:
    """The same, with the offset, the module and the source line of each instruction."""
    at = 0
    while at < len(entries):
        functions, reasons, lines = _Names(), _Names(), _Names()
        modules: list[str] = []
        rows: list[tuple[int, ...]] = []
        for function, module, offset_bytes, line, reason, samples in entries[at:]:
            if offset_bytes > COLUMN_LIMIT:
                raise Malformed
            place = functions.place(process.names.get(function, _LOST_NAME), module)
            if place == len(modules):
                modules.append(f"{module:016x}")
            line_place = lines.place(process.names[line]) + 1 if line in process.names else 0
            rows.append((place, reasons.place(_reason(process, reason)), samples, offset_bytes, line_place))
            if functions.size_bytes + lines.size_bytes > _NAMES_BYTES_MAX:
                break
        at += len(rows)
        names = ("function", "reason", "samples", "offset", "line")
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        if not lines.texts:
            del columns["line"]
        lined = {"lines": lines.texts} if lines.texts else {}
        yield {"functions": functions.texts, "modules": modules, "reasons": reasons.texts, **lined, **columns}
