"""Where events are drawn: a row for each layer of each thread and for each stream, and its track."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tracepipe.event.columns import NONE, Bools, Int64s, TraceColumns
from tracepipe.event.counters import ACTIVE_WARPS, RANK_OF_GPU, RANK_OF_SM, SUMMARY
from tracepipe.event.model import COUNTS, Header
from tracepipe.event.nesting import FLOWS_OF_ALL, FLOWS_OF_IOCTLS, NO_ROW, ShapeRow, new_nesting
from tracepipe.event.ops import OpColumns
from tracepipe.event.origins import Origins
from tracepipe.event.shape import Shape
from tracepipe.event.sm_limits import sm_limits
from tracepipe.event.tables import Args, Tables
from tracepipe.kernel_names import kernel_title
from tracepipe.layout.timeline import FIRST_EXTRA, Book, Track, slice_name
from tracepipe.layout.tree import LAYER_TITLES, RANK_GPU, RANK_PROCESS, Tree

# The order under a GPU: counters, streams, SMs, kernels whose warps' slots are not known.
RANK_STREAM: Final = RANK_OF_GPU + 1
RANK_LOGICAL: Final = 200_000
IOCTL: Final = "ioctl"
# A viewer keeps a list by processor number. Linux has up to 8192 processors.
CPUS_MAX: Final = 1 << 13


OF_SHAPE: Final = np.dtype(
    [
        ("is_known", np.bool_),  # the rest is set
        ("drawn", np.bool_),  # its events nest on rows, and are not drawn one by one by `ThreadLayout`
        ("on_stream", np.bool_),
        ("beyond", np.bool_),  # there are too many tracks for its events to be drawn
        ("switches", np.bool_),  # its events have no row, as the format has its own form for them
        ("names_thread", np.int32),  # the name that its events have for their thread, from 1 on
        ("counts_memory", np.bool_),  # its events are of the memory layer
        ("launches", np.bool_),  # its events are calls that may launch
        ("runs", np.uint8),  # whether a thread gets a processor or leaves it, as in `ThreadWork`
        ("thread", np.int32),  # the track of its thread, NONE without one
        ("gpu", np.int32),  # the row of its GPU, NONE where its events are not whole kernels
        ("name", np.int32),  # the name of the kernel
    ]
)
"""What the stages of the layout know of a shape."""


_ThreadName = tuple[bool, int | None, int | None, str]
"""Whether the program gave the name, the process and the thread, and the name."""


@dataclass(slots=True, eq=False)
class HostThread:
    """One thread: its group, and the rows of its layers, by layer and own name."""

    track: Track
    rows: dict[tuple[str, str | None], int] = field(default_factory=dict)


class Rows:
    """Makes the rows of a recording, and keeps by its number how each shape's events nest."""

    def __init__(
        self, header: Header, tables: Tables, tree: Tree, origins: Origins, *, separate_switches: bool
    ) -> None:
        self.tree = tree
        self.book = Book(tables)
        self.of_shape: Any = np.empty(0, OF_SHAPE)
        """What the layout knows of each shape, by its number."""
        self._names: dict[str, int] = {}
        ioctl = self.name(IOCTL)
        self.nesting = new_nesting(ioctl)
        self._separate_switches = separate_switches
        self._named: set[tuple[int | None, int | None]] = set()
        """Threads that the program named itself. These names come before those of the kernel."""
        self._thread_names: dict[_ThreadName, int] = {}
        self.threads: dict[tuple[int | None, int | None], HostThread] = {}
        self.extras: list[Args] = []
        """Arguments of operations that do not come from an event, since the last `Drawn`."""
        self._gpus: dict[int, Track] = {}
        self._launch_ranks: dict[int, dict[tuple[str, int | None], int]] = {}
        self._streams: dict[tuple[int, int], int] = {}
        self._ranges: dict[tuple[object, ...], int] = {}
        self._about_gpus = {gpu["index"]: gpu for gpu in header.gpus if isinstance(gpu.get("index"), int)}
        self._about_counters = {(str(one.get("gpu")), str(one.get("name"))): one for one in header.counters}
        self._origins = origins
        self._of_tracks: dict[int, int] = {}
        self._numbers: dict[int, Any] = {}

    def keep_args(self, args: Args) -> int:
        """Keep the arguments of an operation for the next `Drawn`, and return its `event`."""
        self.extras.append(args)
        return FIRST_EXTRA - (len(self.extras) - 1)

    def launch_group(self, gpu: int, kernel: str, launch: int | None) -> Track:
        """The group of a launch whose warps' slots are not known. Groups are in the order of their first
        warps, as a launch id may have 64 bits.
        """
        ranks = self._launch_ranks.setdefault(gpu, {})
        rank = ranks.setdefault((kernel, launch), RANK_LOGICAL + len(ranks))
        title = kernel_title(kernel)
        name = title if launch is None else f"{title} launch {launch}"
        return self.tree.child(self.gpu(gpu), "group", name, rank)

    def name(self, name: str) -> int:
        """The number of a name."""
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names)
            self.book.names.append(name)
        return number

    def add_shape(self, number: int, shape: Shape) -> None:
        """Decide where the events of a new shape are drawn."""
        own = self.of_shape[number]
        own["names_thread"] = 0
        if shape.comm and shape.type in LAYER_TITLES:
            named = shape.type == "annotation", shape.pid, shape.tid, shape.comm
            own["names_thread"] = self._thread_names.setdefault(named, len(self._thread_names) + 1)
        is_known = (shape.pid, shape.tid) in self.threads
        own["switches"] = (
            self._separate_switches
            and shape.is_switch
            and (shape.cpu or 0) < CPUS_MAX
            and (is_known or not self.tree.is_full)
        )
        if own["switches"]:
            self.thread(shape.pid, shape.tid, shape.comm or "")
            own["beyond"] = False
            return
        row = self._shape_row(shape)
        own["drawn"] = row.row != NO_ROW
        own["beyond"] = row.row == NO_ROW and shape.type != "gpu_thread" and shape.phase != COUNTS
        own["on_stream"] = shape.on_stream
        self.nesting.set_shape(number, row)

    def flagged(self, flag: str, events: TraceColumns) -> Int64s:
        """The places of the events whose shapes have a flag of `OF_SHAPE`."""
        flags: Bools = self.of_shape[flag] > 0
        if not flags.any():
            return np.empty(0, np.int64)
        return np.flatnonzero((events.shape >= 0) & flags[np.maximum(events.shape, 0)])

    def shape(self, number: int) -> Shape:
        """The shape of an event."""
        shape = self.book.tables.shapes[number]
        assert shape is not None
        return shape

    def name_threads(self, events: TraceColumns) -> None:
        """Give threads the names that events have for them."""
        if not len(self.of_shape):
            return
        names = [*self._thread_names]
        numbers = self.of_shape["names_thread"][np.maximum(events.shape, 0)]
        last = np.full(len(names) + 1, NONE, np.int64)
        last[np.where(events.shape < 0, 0, numbers)] = np.arange(len(numbers))
        last[0] = NONE
        for number in np.argsort(last)[np.count_nonzero(last == NONE) :].tolist():
            is_given, pid, tid, name = names[number - 1]
            if is_given:
                self._named.add((pid, tid))
            elif pid is not None and pid == tid:
                self.tree.rename(("process", pid), name)
            if is_given or (pid, tid) not in self._named:
                self.tree.rename(("thread", pid, tid), name)

    def forget_shapes(self) -> None:
        """Forget all shapes: they have new numbers now."""
        self.nesting.forget_shapes()
        self._thread_names.clear()

    def forget_names(self, waiting: OpColumns) -> None:
        """Forget the names that no open slice and no operation in `waiting` has. The rest is renumbered."""
        names = self.book.names
        used = self.nesting.open_names(len(names))
        of_waiting = waiting.used()["name"]
        used[self._names[IOCTL]] = used[of_waiting] = True
        to = (np.cumsum(used) - 1).astype(np.int32)
        self.nesting.rename(to)
        names[:] = [names[at] for at in np.flatnonzero(used).tolist()]
        self._names = {name: number for number, name in enumerate(names)}
        of_waiting[:] = to[of_waiting]

    def _shape_row(self, shape: Shape) -> ShapeRow:
        name = self.name(slice_name(shape))
        if shape.phase == COUNTS:
            return ShapeRow(NO_ROW, name, shape.phase)
        row, takes_flow = NO_ROW, False
        if shape.on_stream:
            key = gpu, stream = shape.gpu or 0, shape.stream or 0
            row = self._streams.get(key, NO_ROW)
            if row == NO_ROW and not self.tree.is_full:
                rank = min(RANK_STREAM + stream, RANK_OF_SM - 1)
                track = self.tree.child(self.gpu(gpu), "slices", f"stream {stream}", rank, "gpu")
                row = self._streams[key] = self.new_row(track, on_stream=True)
        elif shape.type in LAYER_TITLES:
            row = self._host(shape)
            takes_flow = shape.drawn_layer == "kernel" or (shape.type == "syscall" and shape.name == IOCTL)
        return ShapeRow(row, name, shape.phase, takes_flow, shape.has_dur, shape.has_launch)

    def new_row(self, track: Track, on_stream: bool = False) -> int:
        """Make a row for a track."""
        self.add_overlap_tracks()
        row = self.nesting.add_row(on_stream)
        self.book.tracks.append(track)
        self._of_tracks[track.id] = row
        return row

    def row_of(self, track: Track) -> int:
        """The row of a track."""
        row = self._of_tracks.get(track.id)
        return self.new_row(track) if row is None else row

    def add_overlap_tracks(self) -> None:
        """Make the overlap tracks of the overlap rows that the nesting added."""
        tracks = self.book.tracks
        for row in range(len(tracks), self.nesting.row_count):
            base = self.nesting.base(row)
            count = self._numbers[base] = self._numbers.get(base, 0) + 1
            tracks.append(self.tree.overlap_track(tracks[base], count))

    def thread(self, pid: int | None, tid: int | None, comm: str) -> HostThread:
        """One thread."""
        thread = self.threads.get((pid, tid))
        if thread is None:
            thread = self.threads[pid, tid] = HostThread(self.tree.thread(pid, tid, comm))
        return thread

    def _host(self, shape: Shape) -> int:
        if shape.range is not None or shape.on_gpu:
            key = (shape.pid, shape.domain, shape.range, *((shape.row or ()) if shape.on_gpu else ()))
            row = self._ranges.get(key, NO_ROW)
            if row == NO_ROW and not self.tree.is_full:
                if shape.range is None:
                    track = self._beside_stream(shape.gpu or 0, shape.stream, shape.layer or shape.type)
                else:
                    track = self.tree.ranges(self.tree.process(shape.pid), shape.domain, shape.range)
                row = self._ranges[key] = self.new_row(track)
            return row
        # A hook's layer may have the title of hooks without a layer name.
        own = None if shape.layer == LAYER_TITLES["hook"] else shape.layer
        layer = shape.drawn_layer, own if shape.domain is None else shape.domain
        if self.tree.is_full and (shape.pid, shape.tid) not in self.threads:
            return NO_ROW
        # The name that a program gives one of its threads is not a name of its process.
        comm = "" if shape.type == "annotation" else shape.comm or ""
        thread = self.thread(shape.pid, shape.tid, comm)
        row = thread.rows.get(layer, NO_ROW)
        if row == NO_ROW and not self.tree.is_full:
            row = thread.rows[layer] = self.new_row(self.tree.layer(thread.track, *layer))
            # Some layers of a thread may cause what happens in others.
            calls, system_calls, driver = (
                thread.rows.get((name, None), NO_ROW) for name in ("userspace", "syscall", "kernel")
            )
            if calls != NO_ROW:
                self.nesting.set_above(calls, NO_ROW, NO_ROW, FLOWS_OF_ALL)
            if system_calls != NO_ROW:
                self.nesting.set_above(system_calls, calls, NO_ROW, FLOWS_OF_IOCTLS)
            if driver != NO_ROW:
                self.nesting.set_above(driver, system_calls, calls, 0)
        return row

    def _beside_stream(self, gpu: int, stream: int | None, layer: str) -> Track:
        """The track of a layer of a GPU, below the stream to which it belongs, if any."""
        name = layer if stream is None else f"stream {stream}: {layer}"
        rank = RANK_STREAM if stream is None else min(RANK_STREAM + stream, RANK_OF_SM - 1)
        return self.tree.child(self.gpu(gpu), "slices", name, rank, layer)

    def gpu(self, index: int) -> Track:
        """The group of a GPU."""
        track = self._gpus.get(index)
        if track is None:
            named = f"GPU {index} {self._about_gpus.get(index, {}).get('name', '')}".rstrip()
            name = self._origins.gpus.get(index, named)
            track = self._gpus[index] = self.tree.group(
                name, min(RANK_GPU + index, RANK_PROCESS - 1), SUMMARY
            )
        return track

    def unit_of_warps(self, gpu: int) -> str:
        """The unit of the count of a GPU's warps, with the most that it can have where that is known."""
        about = self._about_gpus.get(gpu, {})
        limits, count = sm_limits(about), about.get("sm_count", about.get("sms"))
        limit = count * limits.warps if limits is not None and type(count) is int and count > 0 else None
        return ACTIVE_WARPS.unit if limit is None else f"{ACTIVE_WARPS.unit} of {limit}"

    def unit_of_series(self, gpu: int | None, name: str) -> str:
        """The unit of a sampled series, with its maximum where that is known."""
        about = self._about_counters.get((str(gpu), name), {})
        unit, most = str(about.get("unit", "")), about.get("max")
        return f"{unit} of {most:g}" if isinstance(most, (int, float)) and unit != "%" else unit

    def ranges_of_stream(
        self, gpu: int, stream: int, thread: tuple[int | None, int | None], domain: str | None
    ) -> int:
        """The row for the ranges of a thread on a stream, which is below the stream's own row."""
        if self.tree.is_full:
            return NO_ROW
        _, tid = thread
        name = f"stream {stream}: annotations of " + ("a thread" if tid is None else f"thread {tid}")
        rank = min(RANK_STREAM + stream, RANK_OF_SM - 1)
        name = name if domain is None else f"{name}: {domain}"
        return self.new_row(self.tree.beneath(self.gpu(gpu), thread, name, rank, "annotation"))

    def close(self, end_ns: int) -> None:
        """End what is still open, on host threads first, as they are drawn first."""
        for thread in self.threads.values():
            for row in thread.rows.values():
                self.nesting.close(row, end_ns)
        for row in self._ranges.values():
            self.nesting.close(row, end_ns)

    def close_streams(self, end_ns: int) -> None:
        """End what is still open on streams."""
        for row in self._streams.values():
            self.nesting.close(row, end_ns)

    def gpu_indices(self) -> list[int]:
        """The GPUs so far, in the order of their first events."""
        return list(self._gpus)
