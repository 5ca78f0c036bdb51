"""The tree of tracks: which there are, under what, in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath

from tracepipe.event.model import Header, Record
from tracepipe.event.origins import Origins
from tracepipe.layout.tracks import Track, TrackKind

LAYER_TITLES = {
    "annotation": "annotations",
    "userspace": "CUDA API",
    "hook": "hooks",
    "syscall": "syscalls",
    "kernel": "driver",
    "scheduler": "scheduler",
    "memory": "memory",
    "transfer": "transfers",
}
_RANK = {layer: rank for rank, layer in enumerate(LAYER_TITLES)}
# Under a process, behind its threads, whose ranks are their ids.
RANK_RANGES = 1 << 22
# Each takes about a kilobyte while the trace is written. Eight GPUs of 132 SMs with 64 slots have half as
# many.
TRACKS_MAX = 1 << 17


class Tree:
    """Makes each track once, and declares it before its first use. Where it `is_full`, no tracks are to be
    made for events: those are counted and not drawn.
    """

    def __init__(self, header: Header, origins: Origins | None = None) -> None:
        self._declared: list[Track] = []
        self._command = PurePath(header["command"][0]).name if header.get("command") else ""
        self._origins = origins or Origins()
        self._tracks: dict[tuple[object, ...], Track] = {}
        self._count = 0
        self._given: dict[tuple[object, ...], tuple[str, int | None]] = {}
        """The names and the places that the recording gives processes and threads."""

    @property
    def is_full(self) -> bool:
        """Whether there are as many tracks as there may be."""
        return self._count >= TRACKS_MAX

    def take_declared(self) -> list[Track]:
        """Tracks that are new, or have a new name, since the last call."""
        declared, self._declared = self._declared, []
        return declared

    def _make(self, key: tuple[object, ...], make: Callable[[int], Track]) -> Track:
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._new(lambda at: self._as_given(key, make(at)))
        return track

    def _as_given(self, key: tuple[object, ...], track: Track) -> Track:
        """A process or thread as the recording wants it."""
        name, order = self._given.get(key, ("", None))
        named = name + self._origins.host(track.pid) if name and track.kind == "process" else name
        return replace(track, name=named or track.name, rank=track.rank if order is None else order)

    def give_name(self, record: Record) -> None:
        """Take the name and the place of a process or a thread."""
        key = ("thread", record["pid"], record["tid"]) if "tid" in record else ("process", record["pid"])
        if key not in self._given and len(self._given) >= TRACKS_MAX:
            return
        name, order = self._given.get(key, ("", None))
        self._given[key] = record.get("name", name), record.get("order", order)
        if (track := self._tracks.get(key)) is not None:
            self._tracks[key] = given = self._as_given(key, track)
            self._declared.append(given)

    def _new(self, make: Callable[[int], Track]) -> Track:
        self._count += 1
        track = make(self._count)
        self._declared.append(track)
        return track

    def process(self, pid: int | None, comm: str = "") -> Track:
        """The group of a process."""
        name = comm or self._origins.programs.get(pid or 0) or self._command or "process"
        if pid is None:
            name = "process (pid not recorded)"
        name += self._origins.host(pid)
        return self._make(("process", pid), lambda at: Track(at, None, "process", name, at, pid=pid or 0))

    def thread(self, pid: int | None, tid: int | None, comm: str = "") -> Track:
        """The group of a thread, inside that of its process."""
        process = self.process(pid, comm)
        name = comm or (process.name.removesuffix(self._origins.host(pid)) if pid else "thread")
        if tid is None:
            name = "thread (tid not recorded)"
        # The main thread first, the others in the order of their ids.
        rank = 0 if pid == tid else (tid or 0)
        return self._make(
            ("thread", pid, tid),
            lambda at: Track(at, process, "thread", name, rank, pid=pid or 0, tid=tid or 0),
        )

    def rename_thread(self, pid: int | None, tid: int | None, name: str) -> None:
        """Give a thread the name it has now."""
        self._rename(("thread", pid, tid), name)

    def rename_process(self, pid: int | None, name: str) -> None:
        """Give a process the name it has now."""
        self._rename(("process", pid), name + self._origins.host(pid))

    def _rename(self, key: tuple[object, ...], name: str) -> None:
        track = self._tracks.get(key)
        if track is not None and track.name != name:
            self._tracks[key] = renamed = replace(track, name=name)
            self._declared.append(renamed)

    def layer(self, thread: Track, layer: str, own: str | None) -> Track:
        """The track of one layer of a thread; `own` is the name of a hook's layer, or a domain's."""
        title, rank = LAYER_TITLES[layer], _RANK[layer]
        if layer == "annotation":
            return self.child(thread, "slices", title if own is None else f"{title}: {own}", rank, layer)
        return self.child(thread, "slices", own or title, rank, own or layer)

    def ranges(self, process: Track, domain: str | None, number: int) -> Track:
        """The track of the ranges of a process that have a number."""
        title = "ranges" if domain is None else f"ranges: {domain}"
        name = f"{title} ({number + 1})" if number else title
        return self.child(process, "slices", name, RANK_RANGES + number, "annotation")

    def child(
        self, parent: Track, kind: TrackKind, name: str, rank: int, category: str = "", unit: str = ""
    ) -> Track:
        """A track under `parent`; the same one for the same name and rank."""
        return self._make(
            ("child", parent.id, kind, name, rank),
            lambda at: Track(at, parent, kind, name, rank, category, parent.pid, parent.tid, unit),
        )

    def beneath(
        self, parent: Track, thread: tuple[int | None, int | None], name: str, rank: int, category: str
    ) -> Track:
        """A track under `parent` that is of a thread; threads of several processes may share a name."""
        return self._make(
            ("of thread", parent.id, thread, name, rank),
            lambda at: Track(at, parent, "slices", name, rank, category, parent.pid, parent.tid),
        )

    def slot(self, parent: Track, slot: int) -> Track:
        """The track of a slot of an SM. There are thousands, each asked for once: none is looked up."""
        return self._new(lambda at: Track(at, parent, "slices", f"slot {slot}", slot, "warp"))

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
                number,
            ),
        )

    def group(self, name: str, rank: int = 0, category: str = "") -> Track:
        """A group at the top; the category is that of its own slices."""
        return self._make(("group", name), lambda at: Track(at, None, "group", name, rank or at, category))
