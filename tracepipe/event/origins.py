"""Several recordings that are read as one: where things come from, and the numbers that distinguish them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tracepipe.event.columns import Bools, Bytes, Int32s, Ints, TraceBatch, distinct, grown
from tracepipe.event.model import FLOW_LIMIT, FLOW_PHASES, HOST_LAYERS, ID_LIMIT, Record
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Others, PlacedWarps, WarpGroup
from tracepipe.units import MADE_UP

FILE: Final = "file"
"""The argument of a loss, a window or a problem that names its recording."""
IDS_PER_HOST: Final = 10_000_000
"""This is added to the ids of processes and threads for each further host. Ids of Linux are below
4,194,304."""
HOSTS_MAX: Final = 100
PIDS_MAX: Final = 1 << 22
"""Linux gives no process a higher pid."""


def is_process(pid: int | Ints) -> Bools:
    """Whether a pid, or which of several, can be one of a system's processes, on any host. Those of other
    tools' groups of tracks are higher.
    """
    return np.less(pid, MADE_UP) & np.less_equal(np.mod(pid, IDS_PER_HOST), PIDS_MAX)


def id_on(host: int, id: int, made_up_below: int = 0) -> int:
    """The id of a process or thread on the host of that number. Ids that were made up are `made_up_below`
    lower, as they mean nothing outside of their capture.
    """
    return id + host * IDS_PER_HOST if id < MADE_UP else id - host * IDS_PER_HOST - made_up_below


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of `count` recordings. `programs` are the programs of processes, by pid, and `ranks` the
    ranks of those of a distributed run, where several are read. `hosts` has for
    each host the text that follows the names of its processes, where there are several hosts: a pid's range
    is its host. `gpus` are the titles of GPUs by index. `files` are the names of the recordings, and
    `doubles` the pairs of them, by their places, that may have the same events.
    """

    count: int = 1
    programs: Mapping[int, str] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    gpus: Mapping[int, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    doubles: frozenset[tuple[int, int]] = frozenset()

    def alone(self, file: str) -> Origins:
        """The origins of one of the recordings that is drawn without the others."""
        return replace(self, count=1, files=(file,), doubles=frozenset())

    def host(self, pid: int | None) -> str:
        """The text that follows the name of a process: its host, where there are several."""
        id = pid or 0
        at = (id if id < MADE_UP else ID_LIMIT - id) // IDS_PER_HOST
        return f" {self.hosts[at]}" if at < len(self.hosts) else ""

    def process(self, name: str, pid: int | None) -> str:
        """The name of a process with its rank and its host."""
        return self._rank(pid) + name + self.host(pid)

    def plain(self, name: str, pid: int | None) -> str:
        """The name that `process` was given."""
        return name.removeprefix(self._rank(pid)).removesuffix(self.host(pid))

    def _rank(self, pid: int | None) -> str:
        rank = self.ranks.get(pid or 0)
        return "" if rank is None else f"rank {rank}: "


_UNKNOWN: Final = -9
_HAS_LAUNCH, _IS_FLOW = 1, 2


@dataclass(frozen=True, slots=True)
class Numbers:
    """The changes of a recording's numbers. `host` decides about ids of processes and threads, of which
    those that were made up become `made_up_below` lower. `cpus` is added to processors, `launches` to
    launches. `gpus` has the new index by the old one. A flow is multiplied by the first of `flows`, and the
    second is added.
    """

    host: int = 0
    cpus: int = 0
    launches: int = 0
    gpus: Mapping[int, int] = field(default_factory=dict)
    flows: tuple[int, int] = (1, 0)
    made_up_below: int = 0

    def _id(self, id: int) -> int:
        return id_on(self.host, id, self.made_up_below)

    def shape(self, shape: Shape) -> Shape:
        """A shape with its new numbers."""
        pid = None if shape.pid is None else self._id(shape.pid)
        if pid is None and self.host and shape.type in HOST_LAYERS and not shape.on_gpu:
            pid = id_on(self.host, 0)  # each further host has one for events without a pid
        return replace(
            shape,
            pid=pid,
            tid=None if shape.tid is None else self._id(shape.tid),
            cpu=None if shape.cpu is None else shape.cpu + self.cpus,
            gpu=shape.gpu if shape.gpu is None else self.gpus.get(shape.gpu, shape.gpu),
        )

    def record(self, record: Record) -> Record:
        """A record that is not an event, with its new numbers."""
        new: Record = {key: self._id(record[key]) for key in ("pid", "tid") if key in record}
        more = {"cpu": self.cpus, "launch": self.launches}
        new |= {key: record[key] + by for key, by in more.items() if key in record}
        if "gpu" in record:
            new["gpu"] = self.gpus.get(record["gpu"], record["gpu"])
        return record | new


class Renumbered:
    """Renumbers the batches of a recording whose tables are `own`. Its losses and windows get its `name`."""

    def __init__(self, name: str, own: Tables, shared: Tables, numbers: Numbers) -> None:
        self._name, self._own, self._shared, self._numbers = name, own, shared, numbers
        self._rounds = (0, 0)
        self._shapes: Int32s = np.empty(0, np.int32)
        self._args: Int32s = np.empty(0, np.int32)
        self._stacks: Int32s = np.empty(0, np.int32)
        """The shared number by the recording's own number, where it is known."""
        self._kinds: Bytes = np.empty(0, np.uint8)
        """What the events of a shape have in the column of launches, by the shape's own number."""

    def batch(self, batch: TraceBatch) -> TraceBatch:
        """A batch with numbers of the shared tables. It must be called before the next batch is read."""
        events = batch.events
        rounds = self._own.rounds, self._shared.rounds
        if rounds != self._rounds:
            self._rounds = rounds
            self._shapes, self._args = self._shapes[:0], self._args[:0]
        is_event = events.shape >= 0
        shape, args, launch = events.shape.copy(), events.args.copy(), events.launch
        self._shapes, shape[is_event] = self._found(self._shapes, shape[is_event], self._shape)
        has_args = is_event & (args >= 0)
        self._args, args[has_args] = self._found(self._args, args[has_args], self._args_number)
        kinds = np.where(is_event, self._kinds[np.maximum(events.shape, 0)], 0) if len(self._kinds) else None
        if kinds is not None and kinds.any():
            launch = np.where(kinds == _HAS_LAUNCH, launch + self._numbers.launches, launch)
            by, more = self._numbers.flows
            launch = np.where(kinds == _IS_FLOW, (launch * by + more) & FLOW_LIMIT, launch)
        stack = events.stack
        if stack is not None:
            has, take, own = stack >= 0, self._shared.stacks.take, self._own.stacks
            stack = stack.copy()
            self._stacks, stack[has] = self._found(self._stacks, stack[has], lambda at: take(own, at))
        events = replace(events, shape=shape, args=args, launch=launch, stack=stack)
        return TraceBatch(events, self._others(batch.others), batch.text_bytes)

    @staticmethod
    def _found(known: Int32s, numbers: Ints, number: Callable[[int], int]) -> tuple[Int32s, Ints]:
        """The extended table of known numbers, and the shared numbers of some own ones."""
        if not len(numbers):
            return known, numbers
        used = distinct(numbers)
        known = grown(known, int(used[-1]) + 1, _UNKNOWN)
        for own in used[known[used] == _UNKNOWN].tolist():
            known[own] = number(own)
        return known, known[numbers]

    def _shape(self, own: int) -> int:
        shape = self._own.shapes[own]
        assert shape is not None
        self._kinds = grown(self._kinds, own + 1, 0)
        self._kinds[own] = _IS_FLOW if shape.phase in FLOW_PHASES else _HAS_LAUNCH * shape.has_launch
        return self._shared.number_of(self._numbers.shape(shape))

    def _args_number(self, own: int) -> int:
        if self._own.is_odd(own):
            return self._shared.args_number(self._own.args(own))
        return self._shared.text_number(self._own.text(own))

    def _others(self, others: Others[PlacedWarps]) -> Others[PlacedWarps]:
        by, found = self._numbers.launches, Others[PlacedWarps]()
        for one in others.parts:
            if isinstance(one, WarpGroup):
                records = [self._numbers.record(record) for record in one.records]
                launch = [None if launch is None else launch + by for launch in one.launch]
                found.add(replace(one, records=records, launch=launch))
                continue
            new = self._numbers.record(one)
            named = {FILE: self._name} if self._name and one["type"] in ("loss", "window") else {}
            found.add(new | named)
        return found
