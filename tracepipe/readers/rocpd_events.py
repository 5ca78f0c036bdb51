"""Makes events of the rows of a rocpd database.

rocpd_kernel_dispatch    gpu_kernel X     launch, grid (in blocks), block, stream
rocpd_memory_copy        transfer X       HtoD, …: gpu, stream, size, launch
rocpd_memory_allocate    memory X         alloc, free: size, address
rocpd_region             userspace X      calls of HIP: arguments; launch, where they asked for work
                         annotation B, E  ranges of roctx
                         hook X           calls of HSA, RCCL, …: a layer each
rocpd_sample             hook I           marks
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import orjson

from tracepipe.event.model import INDEX_LIMIT
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args
from tracepipe.event.vocabulary import direction_named
from tracepipe.kernel_names import short_kernel_name
from tracepipe.readers.event_rows import EventRows, Place, Take, Values
from tracepipe.readers.launch_numbers import Launches
from tracepipe.readers.rocpd_rows import COMMON, Session
from tracepipe.readers.sqlite_tables import BROKEN

if TYPE_CHECKING:
    from tracepipe.event.columns import Three


TABLES: Final = ("kernel_dispatch", "memory_copy", "memory_allocate", "region", "sample")
_SIZES: Final = (
    "workgroup_size_x", "workgroup_size_y", "workgroup_size_z", "grid_size_x", "grid_size_y", "grid_size_z",
)  # fmt: skip
_COPY: Final = "MEMORY_COPY_"
_OWN: Final = len(COMMON)
_MARK: Final = "roctxMark"
_EFFECTS: Final = {"ALLOC": "alloc", "FREE": "free"}


class Events:
    """Makes events of the rows of one recording."""

    def __init__(self, rows: EventRows, session: Session, launches: Launches) -> None:
        self._rows, self._session, self._launches = rows, session, launches

    def streams(self) -> Iterator[tuple[str, Iterator[Values], Take]]:
        """The tables, with their rows in the order of time, and the function that takes a row."""
        session = self._session
        takes: tuple[tuple[str, tuple[str, ...], str, Take], ...] = (
            ("region", ("name_id",), "start", self._region),
            ("sample", ("name_id",), "timestamp", self._sample),
            ("memory_allocate", ("type", "level", "name_id", "address", "size"), "start", self._allocate),
            (
                "kernel_dispatch",
                ("kernel_id", "dispatch_id", "group_segment_size", "private_segment_size", *_SIZES),
                "start",
                self._kernel,
            ),
            ("memory_copy", ("name_id", "size", "dst_agent_id", "src_agent_id"), "start", self._copy),
        )
        for kind, columns, time, take in takes:
            yield session.table(kind), session.rows(kind, columns, time), take

    # Calls ---------------------------------------------------------------------------------------------

    def _region(self, at: Place, row: Values) -> None:
        start, end, pid, tid, _, _, _, correlation, category, stated, event, name = row
        kind = self._session.strings.get(category) or "regions"
        if kind.startswith("MARKER"):
            self._range(at, row, self._message(stated) or self._text(name))
            return
        args = self._args(event)
        dur_ns = self._rows.length(at, start, end, args)
        launch = None
        if kind.startswith("HIP"):
            process = self._session.pid(pid) or 0
            launch = self._launches.of(process, correlation, is_call=True)
        key = ("region", at[0], pid, tid, kind, name, launch is not None)
        shape = self._rows.shape(key, self._region_shape, *key[2:])
        self._rows.add(at, start, shape, args, dur_ns, launch or 0)

    def _region_shape(self, pid: object, tid: object, kind: str, name: object, has_launch: bool) -> Shape:
        is_call = kind.startswith("HIP")
        return Shape(
            "userspace" if is_call else "hook", self._text(name), "X", self._session.pid(pid),
            self._session.tid(tid), has_dur=True, has_launch=has_launch, layer=None if is_call else kind,
        )  # fmt: skip

    def _args(self, event: object) -> Args:
        try:
            return self._session.args(event)
        except BROKEN:  # one of the texts is too long; the call itself is kept
            return {"arguments": "cannot be read"}

    def _message(self, stated: object) -> str | None:
        """The text of a marker."""
        try:
            value = orjson.loads(stated) if isinstance(stated, str) else None
        except orjson.JSONDecodeError:
            return None
        message = value.get("message") if isinstance(value, dict) else None
        return message if isinstance(message, str) and message else None

    def _range(self, at: Place, row: Values, name: str) -> None:
        start, end, pid, tid, *_ = row
        args: Args = {}
        dur_ns = self._rows.length(at, start, end, args)
        is_mark = self._text(row[_OWN]).startswith(_MARK)
        nests = not is_mark and self._rows.nests((at[0], pid, tid), start, start + dur_ns)
        phase = "I" if is_mark else "B" if nests else "X"
        process, thread = self._session.pid(pid), self._session.tid(tid)
        shape = Shape("annotation", name, phase, process, thread, has_dur=phase == "X")
        self._rows.add(at, start, self._rows.number_of(shape), args, dur_ns if phase == "X" else 0)
        if nests:
            self._rows.end_later(start + dur_ns, Shape("annotation", name, "E", process, thread))

    def _sample(self, at: Place, row: Values) -> None:
        kind = self._session.strings.get(row[COMMON.index("category_id")]) or "samples"
        name = self._message(row[COMMON.index("extdata")]) or self._text(row[_OWN])
        layer = ("annotation", None) if kind.startswith("MARKER") else ("hook", kind)
        shape = Shape(
            layer[0], name, "I", self._session.pid(row[2]), self._session.tid(row[3]), layer=layer[1]
        )
        self._rows.add(at, row[0], self._rows.number_of(shape), self._args(row[COMMON.index("event_id")]))

    # Work of GPUs --------------------------------------------------------------------------------------

    def _kernel(self, at: Place, row: Values) -> None:

        kernel, dispatch, shared, private, *sizes = row[_OWN:]
        whole = self._session.kernel(kernel)
        args: Args = {"function": whole} if short_kernel_name(whole) != whole else {}
        values = {"dispatch": dispatch, "shared_bytes": shared, "private_bytes": private}
        args |= {name: value for name, value in values.items() if type(value) is int}
        block, grid = _blocks(sizes)
        self._work(at, "gpu_kernel", short_kernel_name(whole), row, args, row[4], (grid, block))

    def _copy(self, at: Place, row: Values) -> None:
        name, size, target, source = row[_OWN:]
        args: Args = {"size": size} if type(size) is int else {}
        session = self._session
        gpus = [gpu for agent in (target, source) if (gpu := session.gpu(agent)) is not None]
        if len(set(gpus)) == 2:
            args |= {"to_gpu": gpus[0], "from_gpu": gpus[1]}
        agent = target if session.gpu(target) is not None else source
        self._work(at, "transfer", direction_named(self._text(name).removeprefix(_COPY)), row, args, agent)

    def _work(
        self,
        at: Place,
        kind: str,
        name: str,
        row: Values,
        args: Args,
        agent: object,
        sizes: tuple[Three | None, Three | None] = (None, None),
    ) -> None:
        start, end, pid, tid, _, queue, stream, correlation = row[:8]
        if type(tid) is int:
            args["tid"] = self._session.tid(tid)
        if type(queue) is int:
            args["queue"] = queue
        launch = self._launches.of(self._session.pid(pid) or 0, correlation, is_call=False)
        on = stream if type(stream) is int else queue
        key = (kind, at[0], name, pid, agent, on, launch is not None, *sizes)
        shape = self._rows.shape(key, self._work_shape, kind, name, pid, agent, on, launch is not None, sizes)
        self._rows.add(at, start, shape, args, self._rows.length(at, start, end, args), launch or 0)

    def _work_shape(
        self,
        kind: str,
        name: str,
        pid: object,
        agent: object,
        stream: object,
        has_launch: bool,
        sizes: tuple[Three | None, Three | None],
    ) -> Shape:
        grid, block = sizes
        return Shape(
            kind, name, "X", self._session.pid(pid), gpu=self._session.gpu(agent) or 0,
            stream=stream if type(stream) is int and stream >= 0 else None,
            grid=grid, block=block, has_dur=True, has_launch=has_launch,
        )  # fmt: skip

    def _allocate(self, at: Place, row: Values) -> None:
        start, end, pid, tid, agent = row[:5]
        kind, level, name, address, size = row[_OWN:]
        args: Args = {"size": size} if type(size) is int else {}
        args |= {"address": address} if type(address) is int else {}
        args |= {"level": level.lower()} if type(level) is str else {}
        dur_ns = self._rows.length(at, start, end, args)
        # Only real memory counts as allocated, not reserved address space.
        effect = _EFFECTS.get(kind) if level == "REAL" else None
        shape = Shape(
            "memory", effect or self._text(name), "X", self._session.pid(pid), self._session.tid(tid),
            gpu=self._session.gpu(agent), has_dur=True,
        )  # fmt: skip
        self._rows.add(at, start, self._rows.number_of(shape), args, dur_ns)

    # What all have -------------------------------------------------------------------------------------

    def _text(self, number: object) -> str:
        text = self._session.strings.get(number)
        return text if text is not None else f"text {number}"


def _blocks(sizes: list[Any]) -> tuple[Three | None, Three | None]:
    """The blocks of a grid, and the threads of a block. rocpd has the threads of the grid."""
    if not all(type(size) is int and 0 < size <= INDEX_LIMIT for size in sizes):
        return None, None
    x, y, z, *threads = sizes
    return (x, y, z), (-(-threads[0] // x), -(-threads[1] // y), -(-threads[2] // z))
