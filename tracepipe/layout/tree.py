"""The tree of tracks: which tracks there are, their parents, and their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath
from typing import NamedTuple

from tracepipe.event.counters import CounterTrack
from tracepipe.event.model import Header, Record
from tracepipe.event.origins import Origins
from tracepipe.layout.timeline import Track, TrackKind
from tracepipe.units import known_id

LAYER_TITLES = {
    "annotation": "annotations",
    "userspace": "CUDA API",
    "hook": "hooks",
    "syscall": "syscalls",
    "kernel": "driver",
    "scheduler": "scheduler",
    "host_sample": "stacks",
    "memory": "memory",
    "transfer": "transfers",
}
_RANK = {layer: rank for rank, layer in enumerate(LAYER_TITLES)}
# At the top: GPUs in the order of their numbers, processes, and what the recording says of itself.
RANK_GPU = 1
RANK_PROCESS = 1 << 21
RANK_RECORDING = 1 << 22
# Under a process, ranges are below its threads, of which there are fewer, and above counters.
RANK_RANGES = 1 << 20
# Each track takes about a kilobyte while the trace is written. Eight GPUs with 132 SMs and 64 slots each have
# half as many.
UNNAMED_PROCESS, UNNAMED_THREAD = "process", "thread"
"""The names of a process, and of a thread without a process, whose names are not known."""
TRACKS_MAX = 1 << 17

_Key = tuple[object, ...]
# A process or thread that does at least this part of the work of the first one is on the same level.
_PEERS_APART = 10


class Work(NamedTuple):
    """The work of a thread or a process: launches on GPUs, and nanoseconds on processors."""

    launches: int = 0
    ran_ns: int = 0

    def level(self, most: Work) -> int:
        """The level in the order, 0 at the top, where `most` is the most work that one of its kind did."""
        if self.launches * _PEERS_APART >= most.launches > 0:
            return 0
        return 1 if self.ran_ns * _PEERS_APART >= most.ran_ns > 0 else 2


def _pid(key: _Key) -> int | None:
    """The pid in the key of a process, also one that a reader made up, which its track does not have."""
    pid = key[1]
    return pid if isinstance(pid, int) else None


class Tree:
    """Makes each track once, before its first use. No more are made for events when it `is_full`."""

    def __init__(self, header: Header, origins: Origins | None = None) -> None:
        self._declared: list[Track] = []
        self._command = PurePath(header.command[0]).name if header.command else ""
        self._origins = origins or Origins()
        self._tracks: dict[_Key, Track] = {}
        self._count = 0
        self._given: dict[_Key, tuple[str, int | None]] = {}
        """The names and places of processes and threads that the recording states."""

    @property
    def is_full(self) -> bool:
        """Whether the most tracks that are allowed exist."""
        return self._count >= TRACKS_MAX

    def take_declared(self) -> list[Track]:
        """Tracks that are new, or have a new name, since the last call."""
        declared, self._declared = self._declared, []
        return declared

    def _make(self, key: _Key, make: Callable[[int], Track]) -> Track:
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._new(lambda at: self._as_given(key, make(at)))
        return track

    def _change(self, key: _Key, track: Track) -> None:
        """Give a track that exists a new name or place."""
        if track != self._tracks[key]:
            self._tracks[key] = track
            self._declared.append(track)

    def _as_given(self, key: _Key, track: Track) -> Track:
        """A process or thread with the name and place that the recording states."""
        name, _ = self._given.get(key, ("", None))
        named = self._origins.process(name, _pid(key)) if name and track.kind == "process" else name
        return replace(track, name=named or track.name, is_named=bool(named) or track.is_named)

    def give_name(self, record: Record) -> None:
        """Take a record with the name and the place of a process or a thread."""
        key = ("thread", record["pid"], record["tid"]) if "tid" in record else ("process", record["pid"])
        if key not in self._given and len(self._given) >= TRACKS_MAX:
            return
        name, order = self._given.get(key, ("", None))
        self._given[key] = record.get("name", name), record.get("order", order)
        if (track := self._tracks.get(key)) is not None:
            self._change(key, self._as_given(key, track))

    def _new(self, make: Callable[[int], Track]) -> Track:
        self._count += 1
        track = make(self._count)
        self._declared.append(track)
        return track

    def process(self, pid: int | None, comm: str = "") -> Track:
        """The group of a process."""
        known = comm or self._origins.programs.get(pid or 0) or self._command
        name = "process (pid not recorded)" if pid is None else known or UNNAMED_PROCESS
        named = self._origins.process(name, pid)
        is_named = pid is None or bool(known) or named != name
        return self._make(
            ("process", pid),
            lambda at: Track(
                at, None, "process", named, RANK_PROCESS, pid=known_id(pid) or 0, is_named=is_named
            ),
        )

    def thread(self, pid: int | None, tid: int | None, comm: str = "") -> Track:
        """The group of a thread, inside that of its process."""
        process = self.process(pid, comm if tid in (pid, None) else "")
        name = comm or (self._origins.plain(process.name, pid) if pid else UNNAMED_THREAD)
        if tid is None:
            name = "thread (tid not recorded)"
        return self._make(
            ("thread", pid, tid),
            lambda at: Track(
                at, process, "thread", name, pid=process.pid, tid=known_id(tid) or 0, is_named=bool(comm)
            ),
        )

    def rename(self, key: _Key, name: str) -> None:
        """Give a process, `("process", pid)`, or a thread, `("thread", pid, tid)`, the name it has now."""
        if (track := self._tracks.get(key)) is not None:
            name = self._origins.process(name, _pid(key)) if track.kind == "process" else name
            if name != track.name or not track.is_named:
                self._change(key, replace(track, name=name, is_named=True))

    def layer(self, thread: Track, layer: str, own: str | None) -> Track:
        """The track of one layer of a thread. `own` is the name of a hook's layer or of a domain."""
        title, rank = LAYER_TITLES[layer], _RANK[layer]
        if layer == "annotation":
            return self.child(thread, "slices", title if own is None else f"{title}: {own}", rank, layer)
        return self.child(thread, "slices", own or title, rank, own or layer)

    def ranges(self, process: Track, domain: str | None, number: int) -> Track:
        """The track of the ranges of a process with this number."""
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

    def counter(
        self, owner: Track, kind: CounterTrack, *, name: str = "", unit: str = "", rank: int | None = None
    ) -> Track:
        """A counter under its owner. What is not given is as the registry has it."""
        rank = kind.rank if rank is None else rank
        return self.child(owner, "counter", name or kind.name, rank, kind.category, unit or kind.unit)

    def beneath(
        self, parent: Track, thread: tuple[int | None, int | None], name: str, rank: int, category: str
    ) -> Track:
        """A track of a thread under `parent`. Threads of several processes may have the same name."""
        return self._make(
            ("of thread", parent.id, thread, name, rank),
            lambda at: Track(at, parent, "slices", name, rank, category, parent.pid, parent.tid),
        )

    def slot(self, parent: Track, slot: int) -> Track:
        """The track of a slot of an SM. There are thousands, and each is made once: none is looked up."""
        return self._new(lambda at: Track(at, parent, "slices", f"slot {slot}", slot, "warp"))

    def overlap_track(self, track: Track, number: int) -> Track:
        """The overlap track of `track` with this number."""
        assert track.parent is not None
        name = f"{track.name} (overlap {number})"
        return self._make(
            ("overlap", track.id, number),
            lambda at: replace(track, id=at, kind="slices", name=name, unit="", overlap=number),
        )

    def group(self, name: str, rank: int, category: str = "") -> Track:
        """A group at the top. The category is that of the slices on the group itself."""
        return self._make(("group", name), lambda at: Track(at, None, "group", name, rank, category))

    def recording(self) -> Track:
        """The group of tracks about the recording itself."""
        return self.group("tracepipe", RANK_RECORDING)

    def put_in_order(self, work: Callable[[int], Work]) -> None:
        """Put the processes, and the threads of each, in the order of their work, which `work` returns for a
        thread's number: first those that launch, then those that run. Those whose places the recording states
        come before them.
        """
        of_process: dict[int, dict[_Key, Work]] = {}
        for key, track in self._tracks.items():
            if track.kind == "thread" and track.parent is not None:
                of_process.setdefault(track.parent.id, {})[key] = work(track.id)
        processes = {
            key: Work(*map(sum, zip(Work(), *of_process.get(track.id, {}).values(), strict=True)))
            for key, track in self._tracks.items()
            if track.kind == "process"
        }
        self._rank(processes, RANK_PROCESS)
        for threads in of_process.values():
            self._rank(threads, 0)

    def _rank(self, works: dict[_Key, Work], first: int) -> None:
        """Give tracks ranks from `first` on. Threads with the same level of work keep the order of their ids,
        after the main thread. Such processes keep the order of their first events.
        """
        most = Work(*map(max, zip(Work(), *works.values(), strict=True)))

        def place(key: _Key) -> tuple[int, ...]:
            _, given = self._given.get(key, ("", None))
            own = (key[1] != key[2], key[2] or 0) if key[0] == "thread" else (self._tracks[key].id,)
            return (given is None, given or 0, works[key].level(most), *own)

        for rank, key in enumerate(sorted(works, key=place), first):
            self._change(key, replace(self._tracks[key], rank=rank))
