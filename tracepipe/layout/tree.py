"""The tree of tracks: which there are, under what, in which order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from tracepipe.event.model import Header
from tracepipe.layout.timeline import DECLARE, Op, Track, TrackKind

LAYER_TITLES = {
    "userspace": "CUDA API",
    "syscall": "syscalls",
    "kernel": "driver",
    "scheduler": "scheduler",
    "memory": "memory",
    "transfer": "transfers",
}
_RANK = {layer: rank for rank, layer in enumerate(LAYER_TITLES)}


class Tree:
    """Makes each track once, and declares it in `ops` before its first use."""

    def __init__(self, header: Header) -> None:
        self.ops: list[Op] = []
        self._command = PurePath(header["command"][0]).name if header.get("command") else ""
        self._tracks: dict[tuple[object, ...], Track] = {}
        self._lanes = 0

    def _make(self, key: tuple[object, ...], make: Callable[[int], Track]) -> Track:
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = make(len(self._tracks) + 1)
            self.ops.append((DECLARE, track, 0, "", None, None))
        return track

    def new_lane(self) -> int:
        """The number of a writer's packet sequence that nobody has yet."""
        self._lanes += 1
        return self._lanes

    def process(self, pid: int | None, comm: str = "") -> Track:
        """The group of a process."""
        name = comm or self._command or "process"
        if pid is None:
            name = "process (pid not recorded)"
        return self._make(
            ("process", pid),
            lambda at: Track(at, None, "process", name, at, pid=pid or 0, lane=self.new_lane()),
        )

    def thread(self, pid: int | None, tid: int | None, comm: str = "") -> Track:
        """The group of a thread, inside that of its process."""
        process = self.process(pid, comm)
        name = comm or (process.name if pid else "thread")
        if tid is None:
            name = "thread (tid not recorded)"
        return self._make(
            ("thread", pid, tid),
            # The main thread first, the others in the order of their ids.
            lambda at: Track(
                at,
                process,
                "thread",
                name,
                0 if pid == tid else (tid or 0),
                "",
                pid or 0,
                tid or 0,
                "",
                self.new_lane(),
            ),
        )

    def rename_thread(self, pid: int | None, tid: int | None, comm: str) -> None:
        """Give a thread the name it has now, and its process too where it is the main thread."""
        renamed = [self._tracks.get(("thread", pid, tid))]
        if pid == tid and pid is not None:
            renamed.append(self._tracks.get(("process", pid)))
        for track in renamed:
            if track is not None and track.name != comm:
                track.name = comm
                self.ops.append((DECLARE, track, 0, "", None, None))

    def layer(self, thread: Track, layer: str) -> Track:
        """The track of one layer of a thread."""
        title = LAYER_TITLES[layer]
        return self.child(thread, "slices", title, _RANK[layer], layer)

    def child(
        self, parent: Track, kind: TrackKind, name: str, rank: int, category: str = "", unit: str = ""
    ) -> Track:
        """A track under `parent`; the same one for the same name and rank."""
        return self._make(
            ("child", parent.id, kind, name, rank),
            lambda at: Track(
                at, parent, kind, name, rank, category, parent.pid, parent.tid, unit, parent.lane
            ),
        )

    def beside(self, track: Track, number: int) -> Track:
        """The extra track for slices of `track` that overlap others."""
        assert track.parent is not None
        return self._make(
            ("beside", track.id, number),
            lambda at: Track(
                at,
                track.parent,
                "slices",
                f"{track.name} (overlap {number})",
                track.rank,
                track.category,
                track.pid,
                track.tid,
                "",
                track.lane,
                number,
            ),
        )

    def group(self, name: str, rank: int = 0) -> Track:
        """A group at the top."""
        return self._make(
            ("group", name), lambda at: Track(at, None, "group", name, rank or at, lane=self.new_lane())
        )
