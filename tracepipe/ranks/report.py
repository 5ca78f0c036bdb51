"""The report on a job: which rank is slow, at what, and what others lose by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

from tracepipe.errors import InputError
from tracepipe.libraries import np
from tracepipe.ranks.engine import rows
from tracepipe.ranks.job import Job
from tracepipe.ranks.stragglers import LINK, SLOWER, Straggler, longest_unjudged
from tracepipe.reports.report import Column, Result, Table, not_listed
from tracepipe.units import agree, counted, duration_text, steps_text

_NAMES_MAX: Final = 8
_PERSISTS: Final = 0.5
_RANK: Final = (Column("rank", "rank", "id"), Column("host", "host", spare=True))
# What takes longer where a rank is slow everywhere, and what may be the reason.
_EVERYWHERE: Final = {
    SLOWER["compute_ns"]: ("half of its work", "Its GPU is slower, or shared"),
    SLOWER["host_ns"]: (
        "half of its program",
        "Its processor is slower, shared, or has the interrupts of devices (often processor 0)",
    ),
}
_NO_COLLECTIVES: Final = "No collective was recorded by two ranks."


def report(job: Job, top: int, step: int | None = None) -> Result:
    """The tables about a job, with `top` rows each at most, 0: all.

    `step` is that of the critical path, by default the one of median length. Raises InputError where no rank
    has such a step.
    """
    if step is not None and step not in job.steps["step"]:
        numbers = _ranges(job.steps["step"].tolist())
        raise InputError(f"has no step {step}", f"Its steps: {numbers}.", path=str(job.dataset.folder))
    job.step = job.usual_step() if step is None else step
    found = [
        _slow(job),
        _on_path(job),
        _ranks(job),
        _collectives(job),
        _behaviours(job),
        _critical_path(job),
        _steps(job),
    ]
    notes = _notes(job)
    for table in found:
        every = list(table.rows)
        if top and len(every) > top:
            table.rows = every[:top]
            notes.append(f"{table.name}: {counted(len(every) - top, 'more row|rows')}; --top 0 lists all")
    return Result("RANKS", [*found], notes)


def steps(job: Job, top: int) -> Result:
    """The steps of a job, the `top` longest, or all for 0."""
    table, notes = _steps(job), _notes(job)
    every = list(table.rows)
    table.rows = every[: top or None]
    return Result("STEPS", [table], [*not_listed(len(every) - len(table.rows), "step|steps"), *notes])


# The steps and the slow ranks on the first screen.
_STEPS_SHOWN, _SLOW_SHOWN = 4, 3


def screen(job: Job, name: str) -> Result:
    """The first screen of a job: its steps, how the ranks spent them, and who is slow."""
    table, ranks = _steps(job), job.ranks
    hosts = counted(len(set(job.hosts.values())), "host|hosts")
    heading = (
        f"{name}   {counted(len(ranks['rank']), 'rank|ranks')} of {hosts}, "
        f"{steps_text(row[2] for row in table.rows)}"
    )
    whole_ns = max(sum(ranks["step_ns"].tolist()), 1)
    compute_ns, exposed_ns, idle_ns, loading_ns = (
        sum(ranks[name].tolist()) for name in ("compute_ns", "exposed_ns", "idle_ns", "loading_ns")
    )
    copies_ns = whole_ns - compute_ns - exposed_ns - idle_ns
    shares = ", ".join(
        f"{what} {100 * part_ns / whole_ns:.1f}%"
        for what, part_ns in (
            ("compute", compute_ns), ("communication alone", exposed_ns), ("copies alone", copies_ns),
            ("idle", idle_ns),
        )
    )  # fmt: skip
    lines = [f"The GPUs' time: {shares} (loading data {100 * loading_ns / whole_ns:.1f}%)."]
    for one in job.stragglers[:_SLOW_SHOWN]:
        who = (
            f"Rank {_ranges(one.ranks)}" if len(one.ranks) == 1 else f"One of the ranks {_ranges(one.ranks)}"
        )
        lines.append(
            f"{who} is slow ({one.slow}{', everywhere' if one.everywhere else ''}"
            f"{f', {one.at}' if one.at else ''}): "
            f"{duration_text(one.own_ns)} a step, usual "
            f"{duration_text(one.usual_ns)}"
            + (
                "."
                if one.costs_ns is None
                else f"; steps would be {duration_text(one.costs_ns)} shorter without that."
            )
        )
    if not job.stragglers:
        lines.append(_none_slow(job))
    lines.append("Next: tracepipe ranks|steps|open PATH")
    every = list(table.rows)
    table.title = f"The longest of {len(every)} steps" if len(every) > _STEPS_SHOWN else "Steps"
    table.rows, table.note = every[:_STEPS_SHOWN], ""
    verdict = Table("verdict", "", (Column("says", ""),), [(line,) for line in lines])
    return Result("", [table, verdict], _notes(job)[1:], heading=heading, notes_max=1)


def _notes(job: Job) -> list[str]:
    """Notes about what the dataset lacks, or has in a wrong form."""
    ranks = job.ranks["rank"].tolist()
    hosts = counted(len(set(job.hosts.values())), "host|hosts")
    notes = [f"{counted(len(ranks), 'rank|ranks')} of {hosts}"]
    world = max(job.ranks["world_size"].tolist(), default=0)
    if world > len(ranks):
        absent = sorted(set(range(world)) - set(ranks))
        names = _ranges(absent[:_NAMES_MAX]) + " …" * (len(absent) > _NAMES_MAX)
        notes.append(f"not in the dataset: {len(absent)} of {world} ranks: {names}")
    lost = sum(job.ranks["lost"].tolist())
    if lost:
        notes.append(f"lost: {lost:,} {agree(lost, 'event|events happened and was|were not recorded')}")
    if wrong := [rank for rank, is_wrong in rows(job.ranks, "rank", "impossible") if is_wrong]:
        names = _ranges(wrong[:_NAMES_MAX]) + " …" * (len(wrong) > _NAMES_MAX)
        notes.append(
            f"impossible: work of {agree(len(wrong), 'rank|ranks')} {names} lasts while later work of its "
            "stream begins and ends; the notes of the table ranks have its share of the time"
        )
    unplaced, clocks = len(job.aligned.refused), len(job.aligned.refused) + len(job.aligned.placements)
    if unplaced and clocks > 1:
        notes.append(
            f"{unplaced} of {clocks} clocks {agree(unplaced, 'is|are')} not placed on the common one"
        )
    notes += [f"rank {_ranges(one.ranks)} {text}" for one in job.stragglers if (text := _where(one))]
    notes += _clocks(job)
    if job.not_replayed:
        notes.append(f"{job.not_replayed} So it is not known what a slow rank costs")
    if (longest := longest_unjudged(job.ranks)) is not None:
        notes.append(
            "with one step of few ranks it is not known how much steps differ, so no rank is called slow; "
            f"longest: rank {longest.ranks[0]}, {longest.slow}, {duration_text(longest.own_ns)}, usual "
            f"{duration_text(longest.usual_ns)}. Record more steps, each in a range that is called step"
        )
    return notes


def _where(one: Straggler) -> str:
    """That all a slow rank does takes longer, or where most of the difference is; "" if neither is so."""
    if one.everywhere is not None:
        what, why = _EVERYWHERE[one.slow]
        return (
            f"is slow everywhere: {what} takes at least {one.everywhere:.2f} times as long as its peers'. "
            f"{why}"
        )
    more = " and elsewhere" if len(one.places) > 1 else ""
    return f"is slow ({one.slow}) {one.at}{more}" if one.at else ""


def _clocks(job: Job) -> list[str]:
    """The clocks of GPUs that are slow, where counters were recorded."""
    clocks = {one.rank: one.sm_clock_mhz for one in job.dataset.rank_rows() if one.sm_clock_mhz is not None}
    notes = []
    for one in job.stragglers:
        own = [clocks[rank] for rank in one.ranks if rank in clocks]
        others = [mhz for rank, mhz in clocks.items() if rank not in one.ranks]
        if one.slow == SLOWER["compute_ns"] and own and others:
            notes.append(
                f"rank {_ranges(one.ranks)}: its SMs ran at {np.mean(own):,.0f} MHz in its steps, those of "
                f"the other ranks at {np.median(others):,.0f} MHz"
            )
    return notes


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as a text: 0-7, 12."""
    parts = []
    for _, pairs in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)


def _slow(job: Job) -> Table:
    columns = (
        Column("ranks", "rank"), Column("host", "host"), Column("slow", "slow"),
        Column("own_ns", "own", "ns"), Column("usual_ns", "usual", "ns"), Column("excess_ns", "more", "ns"),
        Column("peers", "peers", "count", True), Column("costs_ns", "costs", "ns"),
        Column("low_ns", "at least", "ns", True), Column("high_ns", "at most", "ns", True),
        Column("everywhere", "everywhere", "number", True), Column("at", "most of it", spare=True),
    )  # fmt: skip
    found = [
        (
            _ranges(one.ranks), ", ".join(sorted({job.hosts[rank] for rank in one.ranks})), one.slow,
            one.own_ns, one.usual_ns, one.excess_ns, one.peers, one.costs_ns,
            *(one.bounds_ns or (None, None)), one.everywhere, one.at or None,
        )
        for one in job.stragglers
    ]  # fmt: skip
    note = (
        "Mean times of one step. usual: the median of the ranks that do the same work. GPU: its kernels "
        "take longer, without what communication slows them by. data loading, host: its program takes "
        "longer, in ranges that load data and elsewhere; if it does so before a few calls, the times are "
        f"those of these. {LINK}: the time is the length of a transfer, and usual is the length in similar "
        "process groups. costs: by how much a step would be shorter if the rank did as the others do, by a "
        "replay of all ranks."
    )
    return Table("slow", "Slow ranks", columns, found, note, empty=_none_slow(job))


def _none_slow(job: Job) -> str:
    """Why no rank is called slow: none can be compared, or none is slower."""
    if len(set(job.ranks["behaviour"].tolist())) == len(job.ranks["behaviour"]):
        return "No other rank does the same work, so none is called slow."
    return "No rank is slower than the ranks that do the same work."


def _on_path(job: Job) -> Table:
    """The ranks with the most of the critical paths: in how many steps, and whether in early and late
    ones.
    """
    led = [max(of_rank.items(), key=lambda one: (one[1], -one[0])) for of_rank in job.led.values() if of_rank]
    found = []
    for rank, steps in Counter(rank for rank, _ in led).items():
        own_ns = [ns if one == rank else None for one, ns in led]
        early = sum(ns is not None for ns in own_ns[: len(led) // 2])
        persists = steps / len(led) >= _PERSISTS and 0 < early < steps
        kind = "not known" if len(led) == 1 else "persists" if persists else "moves"
        mean_ns = sum(ns or 0 for ns in own_ns) // steps
        found.append((rank, job.hosts.get(rank), steps, 100 * (steps / len(led)), mean_ns, kind))
    found.sort(key=lambda row: (-row[2], row[0]))
    columns = (
        *_RANK, Column("steps", "steps", "count"), Column("share", "of all", "percent"),
        Column("path_ns", "on the path", "ns"), Column("kind", "straggler"),
    )  # fmt: skip
    note = (
        "steps: the number of steps of whose critical path most is on this rank, and how much in the mean. "
        "persists: these are half of the steps or more, early and late ones; not known: there is one step "
        "only."
    )
    title = "Ranks that lead the critical path"
    return Table("on_path", title, columns, found, note, empty="No step is known of all ranks.")


def _ranks(job: Job) -> Table:
    """The time of each rank by what it did."""
    columns = (
        *_RANK, Column("behaviour", "group", "id"), Column("step_ns", "step", "ns"),
        Column("busy", "GPU busy", "percent"), Column("compute_ns", "compute", "ns"),
        Column("communication_ns", "communication", "ns"), Column("exposed_ns", "exposed", "ns"),
        Column("idle_ns", "idle", "ns"), Column("loading_ns", "loading", "ns"),
        Column("copies_ns", "copies", "ns", True), Column("waited_ns", "waits", "ns"),
        Column("came_last", "came last", "count", True), Column("path_ns", "on path", "ns"),
    )  # fmt: skip
    means = ("step_ns", *(column.key for column in columns[5:12]))
    paths, on_path = max(len(job.led), 1), Counter[int]()
    for of_rank in job.led.values():
        on_path.update(of_rank)
    found: list[tuple[Any, ...]] = []
    about = rows(job.ranks, "rank", "host", "behaviour", "steps", "busy_ns", "came_last")
    for (*rank, steps, busy_ns, came_last), sums in zip(about, rows(job.ranks, *means), strict=True):
        step_ns, *parts_ns = (ns // steps for ns in sums)
        busy = 100 * busy_ns / max(sums[0], 1)
        found.append((*rank, step_ns, busy, *parts_ns, came_last, on_path[rank[0]] // paths))
    found.sort(key=lambda row: (-row[-1], row[0]))
    note = (
        "Mean times of one step. exposed: communication without compute at the same time. loading: the GPU "
        "idles while data is loaded. waits: in collectives, for the rank that came last. came last: how "
        "often. on path: how much of the critical path of a step is on this rank, without transfers."
    )
    return Table("ranks", "Ranks", columns, found, note)


def _collectives(job: Job) -> Table:
    """The collectives of each process group: transfers, waiting, and who came last."""
    columns = (
        Column("operation", "operation"), Column("process_group", "process group"),
        Column("ranks", "ranks", "count"), Column("which", "which", spare=True),
        Column("collectives", "collectives", "count"), Column("transfer_ns", "transfer", "ns"),
        Column("waited_ns", "waits", "ns"), Column("longest_wait_ns", "longest wait", "ns"),
        Column("last", "last", "id"), Column("last_share", "of all", "percent"),
    )  # fmt: skip
    which: dict[tuple[str, str], list[int]] = {}
    for operation, group, rank in rows(job.members, "operation", "process_group", "rank"):
        which.setdefault((operation, group), []).append(rank)
    names = ("ranks", "collectives", "transfer_ns", "waited_ns", "longest_wait_ns", "last", "last_times")
    found = [
        (
            *key, ranks, _ranges(which[key]), count, transfer_ns // count, waited_ns // count, longest_ns,
            last, 100 * times / count,
        )
        for key, (ranks, count, transfer_ns, waited_ns, longest_ns, last, times) in zip(
            rows(job.groups, "operation", "process_group"), rows(job.groups, *names), strict=True
        )
    ]  # fmt: skip
    found.sort(key=lambda row: (-row[6] * row[4], row[0], row[1]))
    note = (
        "transfer: the time of the rank that came last. waits: how much longer the others took, in the mean. "
        "last: the rank that came last most often. which: the ranks that recorded the collective."
    )
    if found and not any(group for _, group, *_ in found):
        note += (
            " No recording names process groups, so all ranks are treated as one group. capture --hook nccl "
            "and PyTorch's profiler record the names."
        )
    return Table("collectives", "Collectives", columns, found, note, empty=_NO_COLLECTIVES)


def _behaviours(job: Job) -> Table:
    """Groups of ranks that do the same work."""
    columns = (
        Column("behaviour", "group", "id"), Column("count", "ranks", "count"), Column("ranks", "which"),
        Column("step_ns", "step", "ns"), Column("kernels", "kernels", "number"),
        Column("collectives", "collectives", "number"), Column("compute_ns", "compute", "ns"),
    )  # fmt: skip
    ranks, found = job.ranks, []
    for number in np.unique(ranks["behaviour"]).tolist():
        own = np.flatnonzero(ranks["behaviour"] == number)
        names = ("steps", "step_ns", "kernels", "collectives", "compute_ns")
        steps, step_ns, kernels, met, compute_ns = (int(ranks[name][own].sum()) for name in names)
        which = _ranges(ranks["rank"][own].tolist())
        found.append(
            (number, len(own), which, step_ns // steps, kernels / steps, met / steps, compute_ns // steps)
        )
    note = (
        "Only ranks of one group are compared: they run the same operations in process groups of the same "
        "sizes, and about as many kernels. Numbers and times are those of one step."
    )
    return Table("behaviours", "Ranks that do the same work", columns, found, note)


def _critical_path(job: Job) -> Table:
    """The critical path of a step, by rank and by what the rank did."""
    path, step = job.path, job.step
    total_ns = sum(one.ns for one in path)
    spent, times = Counter[tuple[int, str, str]](), Counter[tuple[int, str, str]]()
    for rank, what, name, ns in path:
        spent[rank, what, name] += ns
        times[rank, what, name] += 1
    found = [
        (key[0], job.hosts.get(key[0]), key[1], key[2] or None, ns, 100 * ns / max(total_ns, 1), times[key])
        for key, ns in sorted(spent.items(), key=lambda item: (-item[1], item[0]))
    ]
    columns = (
        *_RANK, Column("what", "what"), Column("name", "kernel, copy, range or collective"),
        Column("ns", "time", "ns"), Column("share", "of the path", "percent"),
        Column("times", "times", "count", True),
    )  # fmt: skip
    note = (
        "The step takes as long as these take together, as it is replayed. If one becomes shorter, so does "
        "the step, until another path is the longest. host: the program, from one call to the next, with "
        "the range that is open. latency: from a call, or from the work before, to the work. returns: from "
        "the end of work to the return of the call that waits for it."
    )
    reason = "the steps are not replayed" if job.not_replayed else "not all ranks have this step"
    empty = f"The path of step {step} is not known: {reason}."
    title = f"Critical path of step {step}"
    return Table("critical_path", title, columns, found, note, empty=empty)


def _steps(job: Job) -> Table:
    """The steps, the longest first."""
    columns = (
        Column("step", "step", "id"), Column("ranks", "ranks", "count", True),
        Column("mean_ns", "mean", "ns"), Column("longest_ns", "longest", "ns"),
        Column("rank", "of rank", "id"), Column("compute_ns", "compute", "ns"),
        Column("exposed_ns", "exposed", "ns"), Column("idle_ns", "idle", "ns"),
        Column("leads", "led by", "id"), Column("path_ns", "on its path", "ns"),
    )  # fmt: skip
    led = {
        step: max(of_rank.items(), key=lambda one: (one[1], -one[0]))
        for step, of_rank in job.led.items() if of_rank
    }  # fmt: skip
    names = ("step", "ranks", "step_ns", "longest_ns", "rank", "compute_ns", "exposed_ns", "idle_ns")
    found = [
        (step, count, step_ns // count, *longest, *(ns // count for ns in parts_ns),
         *led.get(step, (None, None)))
        for step, count, step_ns, *longest, compute_ns, exposed_ns, idle_ns in rows(job.steps, *names)
        for parts_ns in [(compute_ns, exposed_ns, idle_ns)]
    ]  # fmt: skip
    found.sort(key=lambda row: (-row[2], row[0]))
    note = "The longest first. Times are means of all ranks. led by: the rank with most of the critical path."
    return Table("steps", "Steps", columns, found, note)
