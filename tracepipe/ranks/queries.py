"""What is asked of a dataset: a few expressions, each of which returns few rows however long the job was.

All are integers, so that every engine finds the same. A row of `collectives` is one kernel of one rank. The
ranks of a collective leave it together, so the one whose kernel is shortest came last: its length is the
transfer, and what others took longer they waited for it. That needs no common clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ibis.expr.types import IntegerColumn, Table

STEP_TIMES: Final = (
    "step_ns", "busy_ns", "compute_ns", "communication_ns", "exposed_ns", "copies_ns", "idle_ns",
    "loading_ns", "host_ns",
)  # fmt: skip
"""Times of a step. `loading_ns`: the GPU is idle, and data is loaded for so long; `host_ns`: the rest of the
idle time."""
COMPARED: Final = ("compute_ns", "loading_ns", "host_ns", "copies_ns")
"""Those in which a rank differs from its peers because of itself, not because it waits."""
KEY: Final = ("operation", "process_group", "is_numbered", "number")
"""What is the same on all ranks of a collective."""
# A length and a rank in one integer, so that the least of them also tells whose it is, the lowest rank of
# several. 2^39 ns are nine minutes; ranks are below ten million.
_RANKS: Final = 1 << 24
_LONGEST_NS: Final = (1 << 39) - 1
_PARTS_OF_RUN: Final = 100


def step_times(steps: Table) -> Table:
    """`steps` with the columns STEP_TIMES."""
    loading_ns = steps["data_loading_ns"].clip(upper=steps["idle_ns"])
    return steps.mutate(
        step_ns=steps["end_ns"] - steps["start_ns"],
        loading_ns=loading_ns,
        host_ns=steps["idle_ns"] - loading_ns,
    )


def by_rank(steps: Table) -> Table:
    """A row for each rank: `steps` (of all its GPUs), the sums of STEP_TIMES, and for COMPARED also the sums
    of whole µs, `compute_us`, and of their squares, `compute_us2`.
    """
    timed = step_times(steps)
    sums = {name: _sum(timed[name]) for name in STEP_TIMES}
    for name in COMPARED:
        us = timed[name] // 1_000
        sums |= {name.replace("_ns", "_us"): _sum(us), name.replace("_ns", "_us2"): _sum(us * us)}
    return timed.group_by("host", "rank").aggregate(steps=timed.count(), **sums)


def by_step(steps: Table) -> Table:
    """A row for each step: `ranks`, sums of STEP_TIMES, and `longest`, the packed length and rank."""
    timed = step_times(steps)
    sums = {name: _sum(timed[name]) for name in STEP_TIMES}
    return timed.group_by("step").aggregate(
        ranks=timed.count(), longest=_packed(timed["step_ns"], timed["rank"]).max(), **sums
    )


def by_part(steps: Table, first: int, last: int) -> Table:
    """A row for each rank and part of the run (`part`, of 0 to 99, by the steps `first` to `last`): `steps`,
    and sums of STEP_TIMES.
    """
    timed = step_times(steps)
    of_part = max(-(-(last - first + 1) // _PARTS_OF_RUN), 1)
    timed = timed.mutate(part=(timed["step"] - first) // of_part)
    sums = {name: _sum(timed[name]) for name in STEP_TIMES}
    return timed.group_by("rank", "part").aggregate(steps=timed.count(), **sums)


def members(collectives: Table) -> Table:
    """The collectives that ranks leave together, with KEY and `dur_ns`."""
    kept = collectives.filter(collectives["leaves_together"])
    return kept.select(
        "host", "rank", "operation", "process_group", "group_size", "elements", "step", "start_ns", "end_ns",
        is_numbered=kept["seq"].notnull(),
        number=kept["seq"].coalesce(kept["nth"]),
        work_ns=kept["work_ns"].coalesce(0),
        dur_ns=(kept["end_ns"] - kept["start_ns"]).clip(lower=0, upper=_LONGEST_NS),
    )  # fmt: skip


def meetings(members: Table) -> Table:
    """A row for each collective that two ranks or more recorded: KEY, `ranks`, `last` (the rank that came
    last), `transfer_ns`, `waited_ns` (how long the others waited for it, in the mean), `made_wait_ns` and
    `longest_wait_ns`.

    The rank that comes last may have left another collective late, because of a third rank. So `made_wait_ns`
    counts only the part of the waiting by which the last rank worked longer than the others since its last
    collective.
    """
    least = _packed(members["dur_ns"], members["rank"])
    met = members.group_by(KEY).aggregate(
        ranks=members.count(),
        least=least.min(),
        sum_ns=_sum(members["dur_ns"]),
        longest_ns=members["dur_ns"].max(),
        last_work_ns=members["work_ns"].argmin(least),
        work_ns=_sum(members["work_ns"]),
        group_size=members["group_size"].max(),
        elements=members["elements"].max(),
        step=members["step"].min(),
    )
    met = met.filter(met["ranks"] > 1)
    met = met.mutate(last=met["least"] % _RANKS, transfer_ns=met["least"] // _RANKS, others=met["ranks"] - 1)
    met = met.mutate(
        waited_ns=(met["sum_ns"] - met["transfer_ns"] * met["ranks"]) // met["others"],
        longest_wait_ns=met["longest_ns"] - met["transfer_ns"],
        more_ns=(met["last_work_ns"] - (met["work_ns"] - met["last_work_ns"]) // met["others"]).clip(lower=0),
    )
    made_wait_ns = (met["more_ns"] < met["waited_ns"]).ifelse(met["more_ns"], met["waited_ns"])
    return met.select(
        *KEY, "ranks", "last", "transfer_ns", "waited_ns", "longest_wait_ns", "group_size", "elements",
        "step", made_wait_ns=made_wait_ns, )  # fmt: skip


def by_group(meetings: Table) -> Table:
    """A row for each process group and operation: `collectives`, sums of what `meetings` has, and the
    shortest transfer.
    """
    return meetings.group_by("operation", "process_group").aggregate(
        collectives=meetings.count(),
        ranks=meetings["ranks"].max(),
        # The recordings do not state it for communicators that were split off others.
        group_size=meetings["group_size"].max().coalesce(meetings["ranks"].max()),
        elements=_sum(meetings["elements"]),
        transfer_ns=_sum(meetings["transfer_ns"]),
        shortest_ns=meetings["transfer_ns"].min(),
        waited_ns=_sum(meetings["waited_ns"]),
        longest_wait_ns=meetings["longest_wait_ns"].max(),
    )


def by_last(meetings: Table) -> Table:
    """A row for each process group, operation and rank that came last: how often, and `made_wait_ns`."""
    return meetings.group_by("operation", "process_group", "last").aggregate(
        came_last=meetings.count(), made_wait_ns=_sum(meetings["made_wait_ns"])
    )


def by_step_and_last(meetings: Table) -> Table:
    """A row for each step: `most`, the packed `made_wait_ns` of the rank that made others wait longest."""
    some = meetings.filter(meetings["step"].notnull())
    some = some.group_by("step", "last").aggregate(made_wait_ns=_sum(some["made_wait_ns"]))
    return some.group_by("step").aggregate(most=_packed(some["made_wait_ns"], some["last"]).max())


def by_member(members: Table, meetings: Table) -> Table:
    """A row for each rank, process group and operation: `collectives`, and how long it waited in them."""
    transfers = meetings.select(*KEY, "transfer_ns")
    joined = members.join(transfers, KEY)
    return joined.group_by("host", "rank", "operation", "process_group").aggregate(
        collectives=joined.count(),
        waited_ns=_sum(joined["dur_ns"] - joined["transfer_ns"]),
    )


def unpacked(value: int) -> tuple[int, int]:
    """A length in ns and a rank, of what `_packed` made."""
    return value // _RANKS, value % _RANKS


def _packed(ns: IntegerColumn, rank: IntegerColumn) -> IntegerColumn:
    return ns.clip(lower=0, upper=_LONGEST_NS) * _RANKS + rank


def _sum(column: IntegerColumn) -> IntegerColumn:
    # DuckDB's sum of 64 bits has 128.
    return column.sum().cast("int64")


def in_windows(rows: Table, windows: Iterable[tuple[int, int, int]]) -> Table:
    """The rows of a layer with `start_ns` and `end_ns` that are in one of `windows`: rank, start, end."""
    is_inside = [
        (rows["rank"] == rank) & (rows["start_ns"] < end_ns) & (rows["end_ns"] > start_ns)
        for rank, start_ns, end_ns in windows
    ]
    return rows.filter(reduce(or_, is_inside))
