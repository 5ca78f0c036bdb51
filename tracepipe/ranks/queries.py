"""The SQL that is asked of a dataset. Each answer has few rows, however long the job was.

DuckDB and Spark both understand it; `engine.py` spells what they write differently. All numbers are integers,
so that both find the same. A row of `collectives` is one kernel of one rank. The ranks of a collective leave
it together, so the one whose kernel is shortest came last: its length is the transfer, and what others took
longer they waited for it. That needs no common clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

STEP_TIMES: Final = (
    "step_ns", "busy_ns", "compute_ns", "communication_ns", "exposed_ns", "copies_ns", "idle_ns",
    "loading_ns", "host_ns",
)  # fmt: skip
"""Times of a step. `loading_ns`: the GPU idles while data is loaded; `host_ns`: the rest of the idle time."""
COMPARED: Final = ("compute_ns", "loading_ns", "host_ns", "copies_ns")
"""Those in which a rank differs from its peers because of itself, not because it waits."""
_KEY: Final = "operation, process_group, is_numbered, number"
"""What is the same on all ranks of a collective."""
# A length and a rank in one integer, so that the least of them also tells whose it is, the lowest rank of
# several. 2^39 ns are nine minutes; ranks are below ten million.
_RANKS: Final = 1 << 24
_LONGEST_NS: Final = (1 << 39) - 1
_PARTS_OF_RUN: Final = 100


def _packed(ns: str, rank: str) -> str:
    return f"(least(greatest({ns}, 0), {_LONGEST_NS}) * {_RANKS} + {rank})"


def _sums(columns: Iterable[str]) -> str:
    # DuckDB's sum of 64 bits has 128.
    return ", ".join(f"cast(sum({column}) as bigint) as {column}" for column in columns)


STEPS: Final = """
select host, rank, step, end_ns - start_ns as step_ns, busy_ns, compute_ns, communication_ns, exposed_ns,
    copies_ns, idle_ns, idle_loading_ns as loading_ns, idle_ns - idle_loading_ns as host_ns
from steps
"""
"""The view `step_times`: a row for each step and GPU of a rank with STEP_TIMES."""
MEMBERS: Final = f"""
select host, rank, operation, process_group, seq is not null as is_numbered, coalesce(seq, nth) as number,
    group_size, elements,
    least(greatest(end_ns - start_ns, 0), {_LONGEST_NS}) as dur_ns
from collectives where leaves_together
"""
"""The view `members`: the collectives that ranks leave together."""
MEETINGS: Final = f"""
with met as (
    select {_KEY}, count(*) as ranks, min({_packed("dur_ns", "rank")}) as least_packed, {_sums(["dur_ns"])},
        max(dur_ns) as longest_ns, max(group_size) as group_size, max(elements) as elements
    from members group by {_KEY} having count(*) > 1
)
select {_KEY}, ranks, least_packed % {_RANKS} as last, least_packed // {_RANKS} as transfer_ns,
    (dur_ns - least_packed // {_RANKS} * ranks) // (ranks - 1) as waited_ns,
    longest_ns - least_packed // {_RANKS} as longest_wait_ns, group_size, elements
from met
"""
"""The table `meetings`: a row for each collective that two ranks or more recorded: `ranks`, `last` (the rank
that came last), `transfer_ns`, `waited_ns` (how long the others waited for it, in the mean) and
`longest_wait_ns`.
"""
WAITS: Final = f"""
select rank, operation, process_group, count(*) as collectives, cast(sum(dur_ns - transfer_ns) as bigint) as
    waited_ns
from members join meetings using ({_KEY}) group by rank, operation, process_group
"""
"""The table `waits`: a row for each rank, process group and operation: `collectives`, and how long it waited
in them.
"""
_SQUARES: Final = ", ".join(
    f"cast(sum({ns} // 1000) as bigint) as {us}, "
    # The squares of an hour have more than 64 bits.
    f"cast(sum(cast({ns} // 1000 as decimal(19)) * cast({ns} // 1000 as decimal(19))) as double) as {us}2"
    for ns, us in ((name, name.replace("_ns", "_us")) for name in COMPARED)
)
RANKS: Final = f"""
with own as (
    select host, rank, count(*) as steps, {_sums(STEP_TIMES)}, {_SQUARES} from step_times group by host, rank
), made as (
    select last as rank, count(*) as came_last from meetings group by last
), waited as (
    select rank, {_sums(["collectives", "waited_ns"])} from waits group by rank
)
select own.*, clock, coalesce(world_size, 0) as world_size, kernels, lost,
    case when cast(notes as string) like '%impossible: %' then 1 else 0 end as impossible,
    coalesce(came_last, 0) as came_last,
    coalesce(waited_ns, 0) as waited_ns, coalesce(waited.collectives, 0) as collectives
from own join ranks using (rank) left join made using (rank) left join waited using (rank) order by rank
"""
"""A row for each rank: `steps` (of all its GPUs), sums of STEP_TIMES, and for COMPARED also the sums of whole
µs, `compute_us`, and of their squares, `compute_us2`; its collectives, and how long it waited in them.
"""
BY_STEP: Final = f"""
select step, ranks, {", ".join(STEP_TIMES)}, longest // {_RANKS} as longest_ns, longest % {_RANKS} as rank
from (
    select step, count(*) as ranks, {_sums(STEP_TIMES)}, max({_packed("step_ns", "rank")}) as longest
    from step_times group by step
) order by step
"""
"""A row for each step: `ranks`, sums of STEP_TIMES, the longest one, and its rank."""
GROUPS: Final = f"""
with lasts as (
    select operation, process_group, last, count(*) as times from meetings
    group by operation, process_group, last
), most as (
    select operation, process_group, max(times) as last_times, max_by(last, times * {_RANKS} - last) as last
    from lasts group by operation, process_group
), met as (
    -- The recordings do not state the size of communicators that were split off others.
    select operation, process_group, count(*) as collectives, max(ranks) as ranks,
        coalesce(max(group_size), max(ranks)) as group_size,
        coalesce(cast(sum(elements) as bigint), 0) as elements, {_sums(["transfer_ns", "waited_ns"])},
        min(transfer_ns) as shortest_ns, max(longest_wait_ns) as longest_wait_ns
    from meetings group by operation, process_group
), of_size as (
    select operation, process_group, count(*) as times,
        cast(percentile_disc(0.5) within group (order by transfer_ns) as bigint) as median_ns
    from meetings group by operation, process_group, elements
), typical as (
    select operation, process_group, cast(sum(times * median_ns) as bigint) as sum_ns
    from of_size group by operation, process_group
)
select met.*, last, last_times, case when ranks < group_size then shortest_ns else sum_ns // collectives end
    as usual_ns
from met join most using (operation, process_group) join typical using (operation, process_group)
order by operation, process_group
"""
"""A row for each process group and operation: `collectives`, sums of `meetings`, the rank that came last most
often, and `usual_ns`: the mean of the median transfers of each size, or the shortest transfer, if ranks of
the group were not recorded.
"""
MEMBERS_OF_GROUPS: Final = """
select waits.*, group_size from waits join (
    select operation, process_group, coalesce(max(group_size), max(ranks)) as group_size from meetings
    group by operation, process_group
) as sizes using (operation, process_group) order by rank, operation, process_group
"""
"""The rows of `waits`, with the size of each group."""


def by_part(first: int, last: int, times: Iterable[str]) -> str:
    """A row for each rank and part of the run (`part`, of 0 to 99, by the steps `first` to `last`): `steps`,
    and sums of some of STEP_TIMES.
    """
    of_part = max(-(-(last - first + 1) // _PARTS_OF_RUN), 1)
    return f"""select rank, (step - {first}) // {of_part} as part, count(*) as steps, {_sums(times)}
        from step_times group by rank, (step - {first}) // {of_part} order by rank, part"""
