"""Finds the hosts, GPUs and captures of several recordings, and the numbers that distinguish them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import PurePath
from typing import Any

from tracepipe.clocks.anchors import Source, is_one_host, reference
from tracepipe.errors import InputError
from tracepipe.event.origins import HOSTS_MAX, IDS_APART, Numbers, Origins, id_on
from tracepipe.recording.survey import Survey

# Launches of each further capture count from a multiple of this, so that people can read their numbers.
_LAUNCHES_APART = 1_000_000
# Launch ids have 64 bits, so there is no room for more.
_LAUNCHES_MAX = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One of several recordings: its header, its survey, and the name of its format."""

    source: Source
    survey: Survey
    format: str

    @property
    def rank(self) -> int | None:
        """Its rank among the processes of a distributed run, where it states one."""
        return self.source.header.get("rank")

    @property
    def capture(self) -> object:
        """A key that the parts of one capture share. Each capture has its own launch numbers."""
        start = self.source.header.get("start")
        return (self.source.header.get("host"), self.rank, tuple(sorted(start.items()))) if start else self


def hosts_of(parts: Sequence[Part]) -> list[int]:
    """The number of the host of each recording. A recording that does not state its host is taken to be of
    the reference's host, unless the same tool recorded the same processes there at the same time.
    """
    first = reference([part.source for part in parts])
    order = [first, *(at for at in range(len(parts)) if at != first)]
    hosts: list[list[Part]] = []
    of = [0] * len(parts)
    for at in order:
        part = parts[at]
        number = next((host for host, members in enumerate(hosts) if _is_of(part, members)), len(hosts))
        if number == len(hosts):
            hosts.append([])
        hosts[number].append(part)
        of[at] = number
    return of


def _is_of(part: Part, members: Sequence[Part]) -> bool:
    stated = [is_one_host(part.source, one.source) for one in members]
    if True in stated or False in stated:
        return True in stated
    return not any(_is_elsewhere(part, one) for one in members)


def _is_elsewhere(part: Part, one: Part) -> bool:
    """Whether one tool recorded the same pids at the same time, but not as parts of one capture. Then they
    are pids of two hosts.
    """
    if one.format != part.format or one.capture == part.capture or not one.survey.pids & part.survey.pids:
        return False
    is_after = part.survey.first_ns > one.survey.last_ns or one.survey.first_ns > part.survey.last_ns
    return part.source.clock != one.source.clock or not is_after


@dataclass(slots=True)
class _Gpu:
    """A GPU: its number among all GPUs, what is known about it, and by format the ranks that ran on it."""

    number: int
    title: str
    uuid: str | None = None
    ranks: dict[str, int] = field(default_factory=dict)


def _title(index: int, stated: Mapping[str, Any]) -> str:
    return f"GPU {index} {stated.get('name') or ''}".rstrip()


class Gpus:
    """The GPUs of several recordings. A uuid identifies a GPU where both recordings state one; else the host
    and the index do. But two ranks that one tool recorded have different GPUs, as NCCL requires.
    """

    def __init__(self, *, names_ranks: bool) -> None:
        self._names_ranks = names_ranks
        self._of: dict[tuple[int, int], list[_Gpu]] = {}
        self._numbers: set[int] = set()

    def take(self, part: Part, host: int) -> dict[int, int]:
        """The numbers of a recording's GPUs, by their indices in it."""
        stated: dict[int, dict[str, Any]] = {}
        for gpu in part.source.header.get("gpus", []):
            if isinstance(gpu.get("index"), int):
                stated[gpu["index"]] = gpu
        return {
            index: self._one(part, host, index, stated.get(index, {})) for index in sorted(part.survey.gpus)
        }

    def _one(self, part: Part, host: int, index: int, stated: dict[str, Any]) -> int:
        uuid, rank = stated.get("uuid"), part.rank
        known = self._of.setdefault((host, index), [])
        for gpu in known:
            if uuid is not None and gpu.uuid is not None:
                is_same = uuid == gpu.uuid
            else:
                is_same = rank is None or gpu.ranks.get(part.format, rank) == rank
            if is_same:
                gpu.uuid = gpu.uuid or uuid
                gpu.title = max(gpu.title, _title(index, stated), key=len)
                break
        else:
            number = index if index not in self._numbers else max(self._numbers) + 1
            title = _title(index, stated)
            gpu = _Gpu(number, f"{title} of rank {rank}" if self._names_ranks else title, uuid)
            known.append(gpu)
            self._numbers.add(number)
        if rank is not None:
            gpu.ranks[part.format] = rank
        return gpu.number

    def titles(self, hosts: Sequence[str]) -> dict[int, str]:
        """The titles of the GPUs, by their numbers."""
        return {
            gpu.number: f"{gpu.title} {hosts[host]}" if hosts else gpu.title
            for (host, _), gpus in self._of.items()
            for gpu in gpus
        }


def numbered(parts: Sequence[Part]) -> tuple[list[Numbers], Origins]:
    """The new numbers of each recording, and the origins of all. Raises InputError."""
    of_host, names_ranks = hosts_of(parts), _has_ranks(parts)
    gpus = Gpus(names_ranks=names_ranks)
    if max(of_host) >= HOSTS_MAX:
        raise InputError(
            f"the recordings come from {max(of_host) + 1} hosts",
            f"Merge those of {HOSTS_MAX} hosts at a time.",
        )
    cpus = [0] * (max(of_host) + 2)
    for part, host in zip(parts, of_host, strict=True):
        cpus[host + 1] = max(cpus[host + 1], part.survey.cpus)
    for host in range(1, len(cpus)):
        cpus[host] += cpus[host - 1]
    captures: dict[object, tuple[int, int]] = {}
    next_launch = 0
    for part in parts:
        if part.capture not in captures:
            captures[part.capture] = len(captures), next_launch
        base = captures[part.capture][1]
        if part.survey.launches < _LAUNCHES_MAX:
            end = base + part.survey.launches
            next_launch = max(next_launch, (end // _LAUNCHES_APART + 1) * _LAUNCHES_APART)
    numbers: list[Numbers] = []
    programs: dict[int, str] = {}
    for part, host in zip(parts, of_host, strict=True):
        at, launches = captures[part.capture]
        flows, made_up_apart = (len(captures), at), at * (IDS_APART // len(captures))
        numbers.append(Numbers(host, cpus[host], launches, gpus.take(part, host), flows, made_up_apart))
        if command := part.source.header.get("command"):
            programs |= {id_on(host, pid): PurePath(command[0]).name for pid in part.survey.pids}
    names = _names_of_hosts(parts, of_host)
    files = tuple(part.source.name for part in parts)
    titles = gpus.titles(names)
    ranks = _ranks(parts, of_host) if names_ranks else {}
    return numbers, Origins(len(parts), programs, ranks, names, titles, files, _doubles(parts, of_host))


def _has_ranks(parts: Sequence[Part]) -> bool:
    """Whether the recordings are of ranks that must be distinguished."""
    ranks = {part.rank for part in parts}
    return None not in ranks and len(ranks) == len(parts)


def _ranks(parts: Sequence[Part], of_host: Sequence[int]) -> dict[int, int]:
    """The rank of each process. One that is in the recordings of several, such as a launcher, has none."""
    ranks: dict[int, int] = {}
    shared = set()
    for part, host in zip(parts, of_host, strict=True):
        for pid in part.survey.pids:
            id = id_on(host, pid)
            if id in ranks:
                shared.add(id)
            ranks[id] = part.rank or 0
    return {id: rank for id, rank in ranks.items() if id not in shared}


def _doubles(parts: Sequence[Part], of_host: Sequence[int]) -> frozenset[tuple[int, int]]:
    """The pairs of recordings, by their places, that have the same processes and are of different
    captures, but not of different ranks.
    """
    return frozenset(
        (at, to)
        for at, to in combinations(range(len(parts)), 2)
        if of_host[at] == of_host[to]
        and parts[at].capture != parts[to].capture
        and (None in (parts[at].rank, parts[to].rank) or parts[at].rank == parts[to].rank)
        and parts[at].survey.pids & parts[to].survey.pids
    )


def _names_of_hosts(parts: Sequence[Part], of_host: Sequence[int]) -> tuple[str, ...]:
    """The text for each host, by its name or one of its files; none where there is only one host."""
    if max(of_host) == 0:
        return ()
    names = []
    for host in range(max(of_host) + 1):
        members = [part.source for part, of in zip(parts, of_host, strict=True) if of == host]
        stated = next((one.header["host"] for one in members if one.header.get("host")), None)
        names.append(f"on {stated}" if stated else f"of {members[0].name}")
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({at + 1})" for at, name in enumerate(names))
