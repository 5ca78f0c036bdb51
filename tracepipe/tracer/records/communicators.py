"""Names of communicators (NCCL): the same name on all ranks for the group of ranks that one connects.

A rank knows its communicator by an address. All ranks of a group have the id in common with which the
communicator is made; the hook records its hash. A communicator that is split or shrunk off another one is
named after that one, with the number of those that were split off before, and the color: all ranks of a
communicator split it in the same order.

    ncclCommInitRank(id: 9f21c3a4d5e6f708)   9f21c3a4d5e6f708
    ncclCommSplit(that one, color: 0)        9f21c3a4d5e6f708/1.0
    ncclCommSplit(that one, color: 7)        9f21c3a4d5e6f708/2.7
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tracepipe.hooks.hook import Probe
from tracepipe.hooks.slots import values

MADE = frozenset({0, 7})
"""Results of calls that have made a communicator: success, and that it is still being made."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that a communicator connects: how many, and which of them this is; None where not known."""

    name: str
    ranks: int | None = None
    rank: int | None = None

    @property
    def members(self) -> str:
        """The members of `args` that say it."""
        known = f'"group":"{self.name}"'
        if self.ranks is not None:
            known += f',"group_ranks":{self.ranks}'
        return known if self.rank is None else f'{known},"group_rank":{self.rank}'


class Maker:
    """Reads what a function makes a communicator of from the words of a call."""

    def __init__(self, probe: Probe) -> None:
        self._values = {name: value.reader() for name, value in values(probe.signature).items()}

    def value(self, name: str, words: Sequence[int]) -> int | None:
        """An argument; None if the function has none of this name."""
        read = self._values.get(name)
        return None if read is None else read(words)


class Communicators:
    """The communicators of a recording, by process and address."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], Group] = {}
        self._made_of: Counter[tuple[int, int, str]] = Counter()

    def members(self, tgid: int, comm: int) -> str:
        """What is known of a communicator, as members of `args`; "" if nothing is."""
        group = self._groups.get((tgid, comm))
        return "" if group is None else group.members

    def make(self, tgid: int, comm: int, maker: Maker, words: Sequence[int]) -> str:
        """Note the communicator that a call has made (0: none for this rank), and return its members."""
        group = self._made(tgid, maker, words)
        if not comm:
            return ""
        # The address may be that of a communicator that was destroyed.
        self._groups.pop((tgid, comm), None)
        for kind in ("split", "shrink"):
            self._made_of.pop((tgid, comm, kind), None)
        if group is None:
            return ""
        self._groups[tgid, comm] = group
        return group.members

    def _made(self, tgid: int, maker: Maker, words: Sequence[int]) -> Group | None:
        digest = maker.value("id", words)
        if digest is not None:
            ranks, rank = maker.value("ranks", words), maker.value("rank", words)
            return Group(f"{digest:016x}", ranks, rank) if digest else None
        parent, color = maker.value("parent", words), maker.value("color", words)
        excluded = maker.value("excluded", words)
        if parent is None or (color is None and excluded is None):
            return None
        kind = "shrink" if color is None else "split"
        self._made_of[tgid, parent, kind] += 1
        of = self._groups.get((tgid, parent))
        if of is None:
            return None
        count = self._made_of[tgid, parent, kind]
        if excluded is not None:
            return Group(f"{of.name}/shrink {count}", None if of.ranks is None else of.ranks - excluded)
        return Group(f"{of.name}/{count}.{color}")
