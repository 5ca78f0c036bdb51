"""Lays out what happens on a GPU: kernels and copies by stream, warps by slot, lone threads by warp."""

from __future__ import annotations

from typing import Any

from tracepipe.event.model import Header, Record, Shape
from tracepipe.layout.host import HostLayout
from tracepipe.layout.launches import Launches
from tracepipe.layout.options import LayoutOptions
from tracepipe.layout.rows import Row, marked
from tracepipe.layout.timeline import INSTANT
from tracepipe.layout.tree import Tree
from tracepipe.layout.warps import RANK_GPU, RANK_SM, RANK_STREAM, WARP_LANES, Gpu, WarpLayout, kernel_group


class GpuLayout:
    """Appends its operations to the tree's."""

    def __init__(
        self, tree: Tree, host: HostLayout, launches: Launches, options: LayoutOptions, header: Header
    ) -> None:
        self._tree, self._host, self._launches, self._options = tree, host, launches, options
        self._warps = WarpLayout(tree, host, launches, options)
        self._names = {
            gpu.get("index"): str(gpu.get("name", ""))
            for gpu in header.get("gpus", [])
            if isinstance(gpu.get("index"), int)
        }
        self._gpus: dict[int, Gpu] = {}
        self._threads_inside: dict[tuple[Any, ...], int] = {}

    def place(self, ts_ns: int, shape: Shape) -> int:
        """Draw one event of a GPU layer; returns the end of what it drew, trace ns."""
        index = shape.record.get("gpu", 0)
        gpu = self._gpus.get(index)
        if gpu is None:
            name = f"GPU {index} {self._names.get(index, '')}".rstrip()
            gpu = self._gpus[index] = Gpu(self._tree.group(name, RANK_GPU + min(index, RANK_GPU)))
        if shape.type == "gpu_warp":
            return self._warps.place(gpu, ts_ns, shape.record)
        if shape.type == "gpu_thread":
            return self._thread(gpu, ts_ns, shape)
        return self._on_stream(gpu, ts_ns, shape)

    def _on_stream(self, gpu: Gpu, ts_ns: int, shape: Shape) -> int:
        record, stream = shape.record, shape.record.get("stream", 0)
        row = gpu.streams.get(stream)
        if row is None:
            rank = min(RANK_STREAM + stream, RANK_SM - 1)
            row = gpu.streams[stream] = Row(
                self._tree.child(gpu.track, "slices", f"stream {stream}", rank, "gpu")
            )
        flows = None
        if shape.launch is not None and shape.phase in ("B", "X"):
            flows = self._launches.kernel(shape.launch, ts_ns, record.get("bound_ns", 0))
        shown = {key: record[key] for key in ("launch", "grid", "block") if key in record}
        args = marked(shape.args, **shown) if shape.phase != "E" else shape.args
        self._host.draw(row, shape.phase, ts_ns, shape.dur_ns, shape.name, args, flows)
        return ts_ns + (shape.dur_ns or 0)

    def _thread(self, gpu: Gpu, ts_ns: int, shape: Shape) -> int:
        """Draw a thread's entry or exit on the track of its warp.

        A pair of B and E makes a slice for the warp, from its first thread's entry to its last thread's
        exit; a record of one end alone (I) is an instant.
        """
        record, phase = shape.record, shape.phase
        where = _warp_of(record)
        key = (record.get("launch"), shape.name, *where)
        row = gpu.threads.get(key)
        if row is None:
            group = kernel_group(self._tree, gpu, record)
            rank = len(gpu.threads)
            row = gpu.threads[key] = Row(self._tree.child(group, "slices", " ".join(where), rank, "warp"))
        args = marked(shape.args, **({"thread": record["thread"]} if "thread" in record else {}))
        if phase == "X":
            self._host.draw(row, phase, ts_ns, shape.dur_ns, shape.name, args, None)
            return ts_ns + (shape.dur_ns or 0)
        if phase == "I" or self._options.thread_exits:
            event = {"B": "entry", "E": "exit"}.get(phase) or args.pop("event", "event")
            self._tree.ops.append((INSTANT, row.track, ts_ns, f"thread {event}", args, None))
        if phase == "I":
            return ts_ns
        inside = self._threads_inside.get(key, 0)
        if (phase == "B" and inside == 0) or (phase == "E" and inside <= 1):
            self._host.draw(row, phase, ts_ns, None, " ".join((shape.name, *where)), None, None)
        self._threads_inside[key] = max(0, inside + (1 if phase == "B" else -1))
        return ts_ns

    def finish(self, end_ns: int) -> None:
        """Draw what waits for the end of the trace, and end what is still open."""
        self._warps.finish(list(self._gpus.values()), end_ns)
        for gpu in self._gpus.values():
            for row in (*gpu.threads.values(), *gpu.streams.values()):
                self._host.close(row, end_ns)


def _warp_of(record: Record) -> tuple[str, str]:
    """Block and warp of a thread, in words.

    With y = z = 0 lane 0 of a warp has x divisible by 32, whatever the block's size. Elsewhere the size
    decides, which such a record does not tell: 32 neighbours in x are named by what they are.
    """
    if "block" in record:
        where = "block ({},{},{})".format(*record["block"])
    else:
        args = record.get("args", {})
        known = "block_x" in args
        where = f"block {args['block_x']}" if known else f"occurrence {args.get('occurrence', 0)}"
    if "thread" not in record:
        return where, "warp not recorded"
    x, y, z = record["thread"]
    if y == z == 0:
        return where, f"warp {x // WARP_LANES}"
    first = x // WARP_LANES * WARP_LANES
    return where, f"threads ({first}–{first + WARP_LANES - 1},{y},{z})"
