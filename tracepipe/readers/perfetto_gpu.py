"""Reads GPU stages of a Perfetto trace: kernels, or stages of graphics, on the queues on which they ran.

    GpuRenderStageEvent   2 duration  13 hw_queue_iid  14 stage_iid (3, 4 by number)  11 gpu_id  5 context
                          10 submission_id  17 name  20 name_iid  19 kernel_iid
                          21 launch {1 grid  2 workgroup}  6 extra data…  7 specifications of numbers:
                          {2 queues…  3 stages…} {1 name}
    InternedData          23 contexts {2 pid}  24 specifications {2 name}  1000 compute_kernels {2 name
                          3 demangled name}

A queue becomes a stream, by its number or else in the order of the queues' first stages. Source:
protos/perfetto/trace/gpu/gpu_render_stage_event.proto.
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import Any, Final

from tracepipe.event.model import ID_LIMIT, INDEX_LIMIT, TIME_LIMIT_NS
from tracepipe.event.tables import packed
from tracepipe.readers.perfetto_sequences import EVENT_NAMES, GPU_CONTEXTS, GPU_KERNELS, GPU_STAGES, Sequence
from tracepipe.readers.recording import cut_text
from tracepipe.readers.sorted_rows import SortedRow, SortedRows
from tracepipe.readers.wire_fields import BYTES, signed, tagged, text

_DURATION, _QUEUE_IID, _STAGE_IID, _GPU, _CONTEXT = 2 << 3, 13 << 3, 14 << 3, 11 << 3, 5 << 3
_QUEUE, _STAGE, _SUBMISSION = 3 << 3, 4 << 3, 10 << 3
_NAME, _NAME_IID, _KERNEL_IID, _LAUNCH = 17 << 3 | BYTES, 20 << 3, 19 << 3, 21 << 3 | BYTES
_EXTRA, _SPECIFICATIONS = 6 << 3 | BYTES, 7 << 3 | BYTES
_ONE, _TWO, _THREE = (field << 3 | BYTES for field in (1, 2, 3))
_GPUS_MAX: Final = 1 << 10
_QUEUES_MAX: Final = 1 << 12
_EXTRAS_MAX: Final = 256


def _text(data: bytes) -> str:
    return cut_text(text(data))


class GpuStages:
    """Reads stages. `counted` counts what was not read, by kind."""

    def __init__(self, rows: SortedRows) -> None:
        self._rows = rows
        self.counted: Counts[str] = Counts()
        self._queues: list[str] = []
        self._stages: list[str] = []
        """Names by number, as older programs give them."""
        self._streams: dict[tuple[int, str], int] = {}

    def add(self, data: bytes, ts_ns: int, sequence: Sequence) -> None:
        """Add a GpuRenderStageEvent, of a packet with this time. Raises WireError."""
        fields = tagged(data)
        of = dict(fields)
        for tag, value in tagged(of.get(_SPECIFICATIONS, b"")):  # the names of queues and stages
            if tag in (_TWO, _THREE):
                names = self._queues if tag == _TWO else self._stages
                if len(names) < _QUEUES_MAX:
                    names.append(_text(dict(tagged(value)).get(_ONE, b"")))
        if _STAGE not in of and _STAGE_IID not in of:
            return
        gpu, dur_ns = signed(of.get(_GPU, 0)), of.get(_DURATION, 0)
        if not 0 <= gpu < _GPUS_MAX or not 0 <= ts_ns <= TIME_LIMIT_NS - min(dur_ns, TIME_LIMIT_NS):
            self.counted["stage|stages has|have an impossible GPU or time"] += 1
            return
        queue = self._named(of, sequence, _QUEUE_IID, _QUEUE)
        stage = self._named(of, sequence, _STAGE_IID, _STAGE)
        name = self._name(of, sequence) or stage
        args = {"queue": queue, "stage": stage} if name != stage else {"queue": queue}
        for tag, value in fields:
            if tag == _EXTRA and len(args) < _EXTRAS_MAX:
                extra = dict(tagged(value))
                args[_text(extra.get(_ONE, b""))] = _text(extra.get(_TWO, b""))
        if _SUBMISSION in of:
            args["submission_id"] = of[_SUBMISSION]
        record: dict[str, Any] = {
            "type": "gpu_kernel", "name": name, "phase": "X", "dur_ns": 0, "gpu": gpu,
            "stream": self._stream(gpu, queue, of),
        }  # fmt: skip
        context = sequence.name(GPU_CONTEXTS, of.get(_CONTEXT, 0))
        pid = 0 if context is None else signed(dict(tagged(context)).get(2 << 3, 0))
        record |= {"pid": pid} if 0 < pid <= ID_LIMIT else {}
        launch = dict(tagged(of.get(_LAUNCH, b"")))
        for key, tag in (("grid", _ONE), ("block", _TWO)):
            if tag in launch:
                three = dict(tagged(launch[tag]))
                size = [three.get(axis << 3, 1) for axis in (1, 2, 3)]
                if all(one <= INDEX_LIMIT for one in size):
                    record[key] = size
        self._rows.add(SortedRow(ts_ns, 0, dur_ns, 0, packed(record), packed(args)))

    def _named(self, of: dict[int, Any], sequence: Sequence, iid: int, number: int) -> str:
        """The name of a queue or a stage."""
        if iid in of:
            entry = sequence.name(GPU_STAGES, of[iid])
            name = b"" if entry is None else dict(tagged(entry)).get(_TWO, b"")
            return _text(name) or f"{of[iid]}"
        at, names = signed(of.get(number, 0)), self._queues if number == _QUEUE else self._stages
        what = "queue" if number == _QUEUE else "render stage"
        return (names[at] if 0 <= at < len(names) else "") or f"{what}({at})"

    def _name(self, of: dict[int, Any], sequence: Sequence) -> str:
        """The name of a stage, where it has its own."""
        if _KERNEL_IID in of and (entry := sequence.name(GPU_KERNELS, of[_KERNEL_IID])):
            kernel = dict(tagged(entry))
            if name := _text(kernel.get(_THREE, b"") or kernel.get(_TWO, b"")):
                return name
        if _NAME in of:
            return _text(of[_NAME])
        return cut_text(sequence.text_of(EVENT_NAMES, of.get(_NAME_IID, 0)) or "")

    def _stream(self, gpu: int, queue: str, of: dict[int, Any]) -> int:
        if _QUEUE_IID not in of and 0 <= signed(of.get(_QUEUE, 0)) <= ID_LIMIT:
            return signed(of.get(_QUEUE, 0))
        key = gpu, queue
        if key not in self._streams and len(self._streams) < _QUEUES_MAX:
            self._streams[key] = sum(other == gpu for other, _ in self._streams)
        return self._streams.get(key, 0)
