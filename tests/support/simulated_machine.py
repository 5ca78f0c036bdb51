"""Processes with GPUs, simulated by letting time pass: what each thread and each stream does next, and when.

A thread goes through its program. Each stream runs what was asked of it, in order: a kernel begins when its
launch has reached the GPU, and a while after the one before. A collective ends some time after its last rank
has come, and while a rank is in one, the other kernels of its GPU are slower.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

LATENCY_NS, GAP_NS, RETURN_NS, CALL_NS, SHORT_NS = 4_000, 1_000, 6_000, 3_000, 1_000
_NEVER, _EPOCH_NS = 1 << 62, 1_795_000_000_000_000_000


class Do(NamedTuple):
    """What a thread does next: "host", "kernel", "collective", "record", "wait", "sync", "begin" or "end"."""

    what: str
    ns: float = 0
    name: str = ""
    stream: int = 7
    event: int = 0
    group: tuple[int, ...] = ()


class _Stream:
    """What was asked of it, with the time from which it may begin, and what runs."""

    def __init__(self) -> None:
        self.queue = deque[tuple[int, Do, int]]()
        self.running: tuple[int, Do, int] | None = None
        self.rest, self.free_ns = 0.0, 0


class _Rank:
    def __init__(self, number: int, program: Iterable[Do], slower: float) -> None:
        self.number, self.program, self.slower = number, iter(program), slower
        self.streams: dict[int, _Stream] = {}
        self.host_ns: int = 1_000
        self.waits: tuple[int, Do] | None = None
        self.last_ns = self.launches = self.communicates = 0
        self.recorded: dict[int, int] = {}
        self.happened: dict[int, int] = {}
        self.open: list[tuple[int, str]] = []
        self.records: list[dict[str, Any]] = []

    def put(self, layer: str, name: str, start_ns: int, end_ns: int, **fields: Any) -> None:
        one = {"ts_ns": start_ns, "type": layer, "name": name, "phase": "X", "dur_ns": end_ns - start_ns}
        self.records.append({**one, "pid": 100 + self.number, **fields})

    def call(self, name: str, start_ns: int, end_ns: int, **fields: Any) -> None:
        self.put("userspace", name, start_ns, end_ns, tid=100 + self.number, **fields)
        self.host_ns = end_ns

    def rate(self) -> float:
        return 1 / self.slower if self.communicates else 1.0


class Machines:
    """Runs the programs of some ranks. Each has a GPU, which is `slower` while the rank communicates."""

    def __init__(self, programs: Iterable[Iterable[Do]], slower: float = 1.0) -> None:
        self.ranks = [_Rank(number, program, slower) for number, program in enumerate(programs)]
        self._counts, self._came = Counter[Any](), Counter[Any]()
        self._ends: dict[Any, int] = {}
        due = [rank.host_ns for rank in self.ranks]
        while (now := min(due)) < _NEVER:
            for at, rank in enumerate(self.ranks):
                if due[at] <= now:
                    self._pass(rank, now)
            due = [self._due(rank) for rank in self.ranks]

    def write(self, folder: Path) -> Path:
        """Write the recording of each rank."""
        folder.mkdir(parents=True)
        for rank in self.ranks:
            header = {
                "type": "header", "schema": "tracepipe/1", "host": "vm", "clock": "monotonic",
                "clocks": ["monotonic"], "start": {"monotonic_ns": 1_000, "realtime_ns": _EPOCH_NS},
                "rank": rank.number, "world_size": len(self.ranks),
            }  # fmt: skip
            lines = [header, *sorted(rank.records, key=lambda one: one["ts_ns"])]
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (folder / f"{rank.number}.jsonl").write_text(text)
        return folder

    def steps_ns(self) -> list[float]:
        """The mean over the ranks of each step, from its begin to the next one."""
        found = []
        for rank in self.ranks:
            steps = [one for one in rank.records if one["type"] == "annotation" and one["name"][:4] == "step"]
            steps.sort(key=lambda one: one["ts_ns"])
            begins_ns = [one["ts_ns"] for one in steps] + [steps[-1]["ts_ns"] + steps[-1]["dur_ns"]]
            found.append([b - a for a, b in pairwise(begins_ns)])
        return [sum(ns) / len(ns) for ns in zip(*found, strict=True)]

    def _due(self, rank: _Rank) -> int:
        """When the next thing happens."""
        due = _NEVER if rank.waits else rank.host_ns
        for stream in rank.streams.values():
            if stream.running is None:
                if stream.queue:
                    ready_ns, do, number = stream.queue[0]
                    if do.what != "wait" or number in rank.happened:
                        due = min(due, max(ready_ns, stream.free_ns))
            elif stream.running[1].what == "collective":
                due = min(due, self._ends.get(self._key(stream.running), _NEVER))
            else:
                due = min(due, rank.last_ns + max(round(stream.rest / rank.rate()), 0))
        return due

    def _key(self, running: tuple[int, Do, int]) -> Any:
        _, do, number = running
        return do.name, do.group, number

    def _pass(self, rank: _Rank, now: int) -> None:
        for stream in rank.streams.values():
            stream.rest -= (now - rank.last_ns) * rank.rate()
        rank.last_ns = now
        happens = True
        while happens:
            happens = self._host(rank, now)
            for number, stream in rank.streams.items():
                happens |= self._stream(rank, number, stream, now)

    def _stream(self, rank: _Rank, number: int, stream: _Stream, now: int) -> bool:
        if stream.running is not None:
            began_ns, do, launch = stream.running
            is_over = stream.rest < 0.5
            if do.what == "collective":
                is_over = self._ends.get(self._key(stream.running), _NEVER) <= now
            if not is_over:
                return False
            rank.communicates -= do.what == "collective"
            args = {}
            if do.what == "collective":
                launch, args = do.event, {
                    "Collective name": do.name, "Process Group Name": str(do.group),
                    "Group size": len(do.group), "Seq": launch,
                }  # fmt: skip
            name = f"ncclDevKernel_{do.name}" if args else do.name
            more = {"args": args} if args else {}
            rank.put("gpu_kernel", name, began_ns, now, gpu=0, stream=number, launch=launch, **more)
            stream.running, stream.free_ns = None, now + GAP_NS
            return True
        if not stream.queue or max(stream.queue[0][0], stream.free_ns) > now:
            return False
        _, do, at = stream.queue[0]
        if do.what == "record":
            rank.happened[at] = max(stream.free_ns - GAP_NS, 0)
        elif do.what == "wait":
            if at not in rank.happened:
                return False
            stream.free_ns = max(stream.free_ns, rank.happened[at] + GAP_NS)
        elif do.what == "collective":
            count = (rank.number, do.name, do.group)
            self._counts[count] += 1
            stream.running = now, do._replace(event=at), self._counts[count]
            rank.communicates += 1
            key = self._key(stream.running)
            self._came[key] += 1
            if self._came[key] == len(do.group):
                self._ends[key] = now + round(do.ns)
        else:
            stream.running, stream.rest = (now, do, at), do.ns
        stream.queue.popleft()
        return True

    def _host(self, rank: _Rank, now: int) -> bool:
        if rank.waits is not None:
            called_ns, do = rank.waits
            some = [rank.streams[do.stream]] if do.stream in rank.streams else list(rank.streams.values())
            if any(one.queue or one.running for one in some):
                return False
            end_ns = max(called_ns + 2 * SHORT_NS, max(one.free_ns for one in some) - GAP_NS + RETURN_NS)
            name, args = (
                ("cudaStreamSynchronize", {"stream": do.stream})
                if do.stream
                else ("cudaDeviceSynchronize", {})
            )
            rank.call(name, called_ns, end_ns, args=args)
            rank.waits = None
            return True
        if rank.host_ns > now:
            return False
        do = next(rank.program, None)
        if do is None:
            rank.host_ns = _NEVER
            return False
        if do.what == "host":
            rank.host_ns += round(do.ns)
        elif do.what == "sync":
            rank.waits = now, do
        elif do.what == "begin":
            rank.open.append((now, do.name))
        elif do.what == "end":
            start_ns, name = rank.open.pop()
            rank.put("annotation", name, start_ns, now, tid=100 + rank.number)
        else:
            stream = rank.streams.setdefault(do.stream, _Stream())
            rank.launches += 1
            at = rank.launches
            if do.what == "record":
                rank.recorded[do.event] = at
                rank.call(
                    "cudaEventRecord", now, now + SHORT_NS, args={"event": do.event, "stream": do.stream}
                )
            elif do.what == "wait":
                at = rank.recorded[do.event]
                rank.call(
                    "cudaStreamWaitEvent", now, now + SHORT_NS, args={"stream": do.stream, "event": do.event}
                )
            else:
                rank.call("cudaLaunchKernel", now, now + CALL_NS, launch=at, args={"stream": do.stream})
            stream.queue.append((now + LATENCY_NS, do, at))
        return True


def run(programs: Iterable[Iterator[Do]], slower: float = 1.0) -> Machines:
    """What comes of it."""
    return Machines(programs, slower)
