"""Communicators of NCCL: the group that all ranks know by the same name."""

from __future__ import annotations

import pytest

from tracepipe.hooks.hook import FilePlace, Probe
from tracepipe.hooks.names import HookIndex
from tracepipe.hooks.sets import load_set
from tracepipe.hooks.slots import values
from tracepipe.tracer.records.calls import Communicators

_ALL, _NEW, _OTHER = 0x1000, 0x2000, 0x3000
_PID = 42


class Rank:
    """The communicators of one process, and its calls."""

    def __init__(self) -> None:
        self.known = Communicators()

    def call(self, function: str, comm: int, **arguments: int) -> str:
        hooks = load_set("nccl")
        hook = HookIndex(hooks.hooks, hooks.variants).find(function)
        assert hook is not None
        probe = Probe(function, function, FilePlace("/lib/libnccl.so.2", 16), hook)
        words = [0] * 8
        for value in values(probe.signature).values():
            words[value.slot] |= (arguments.get(value.name, 0) & (1 << value.bits) - 1) << value.shift
        given = {name: value.reader()(words) for name, value in values(probe.signature).items()}
        return self.known.make(_PID, comm, given)


def test_all_ranks_name_their_groups_alike_wherever_their_communicators_are() -> None:
    found = []
    for rank, away in ((0, 0), (1, 0x70)):
        process = Rank()
        whole = process.call("ncclCommInitRank", _ALL + away, id=0xABC, ranks=2, rank=rank)
        process.call("ncclCommSplit", 0, parent=_ALL + away, color=-1)
        part = process.call("ncclCommSplit", _NEW + away, parent=_ALL + away, color=7, key=rank)
        deeper = process.call("ncclCommSplit", _OTHER + away, parent=_NEW + away, color=0)
        found.append((whole.replace(f'"group_rank":{rank}', ""), part, deeper))
    assert found[0] == found[1]
    name = f"{0xABC:016x}"
    assert found[0] == (
        f'"group":"{name}","group_ranks":2,',
        f'"group":"{name}/2.7"',
        f'"group":"{name}/2.7/1.0"',
    )


def test_a_shrunk_communicator_has_the_ranks_that_are_left() -> None:
    process = Rank()
    process.call("ncclCommInitRankConfig", _ALL, id=0xABC, ranks=8, rank=3)
    shrunk = process.call("ncclCommShrink", _NEW, parent=_ALL, excluded=2)
    assert shrunk == f'"group":"{0xABC:016x}/shrink 1","group_ranks":6'


@pytest.mark.parametrize("function", ["ncclCommInitAll", "ncclCommGrow", "ncclCommInitRank"])
def test_an_address_that_is_used_again_is_of_the_new_communicator(function: str) -> None:
    process = Rank()
    process.call("ncclCommInitRankScalable", _ALL, id=0xABC, ranks=2, rank=0)
    process.call("ncclCommSplit", _NEW, parent=_ALL, color=1)
    assert process.known.members(_PID, _ALL)
    assert process.call(function, _ALL, id=0) == ""  # its id could not be read, or it has none
    assert process.known.members(_PID, _ALL) == ""
    assert process.call("ncclCommSplit", _NEW, parent=_ALL, color=1) == ""
    assert process.known.members(_PID, _NEW) == ""
    process.call("ncclCommInitRank", _ALL, id=0xDEF, ranks=2)
    assert "/1.1" in process.call("ncclCommSplit", _NEW, parent=_ALL, color=1)


def test_another_process_has_others() -> None:
    process = Rank()
    process.call("ncclCommInitRank", _ALL, id=0xABC, ranks=2)
    assert process.known.members(_PID + 1, _ALL) == ""
