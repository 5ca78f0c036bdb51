"""The tables of the report on a job, each with all of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final

from tracepipe.libraries import pl
from tracepipe.ranks.job import Job
from tracepipe.ranks.queries import unpacked
from tracepipe.ranks.stragglers import LINK
from tracepipe.reports.report import Column, Table

_PERSISTS: Final = 0.5
_RANK: Final = (Column("rank", "rank", "id"), Column("host", "host", spare=True))
_NO_COLLECTIVES: Final = "No collective was recorded by two ranks."


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks as a text: 0-7, 12."""
    parts = []
    for _, pairs in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)


def slow(job: Job) -> Table:
    """Ranks that are slower than their peers."""
    columns = (
        Column("ranks", "rank"),
        Column("host", "host"),
        Column("slow", "slow"),
        Column("own_ns", "own", "ns"),
        Column("usual_ns", "usual", "ns"),
        Column("excess_ns", "more", "ns"),
        Column("peers", "peers", "count", True),
        Column("costs_ns", "costs", "ns"),
    )
    rows = [
        (
            rank_text(one.ranks),
            ", ".join(sorted({job.hosts[rank] for rank in one.ranks})),
            one.slow,
            one.own_ns,
            one.usual_ns,
            one.excess_ns,
            one.peers,
            one.costs_ns,
        )
        for one in job.stragglers
    ]
    note = (
        "Mean times of one step. usual: the median of the ranks that do the same work. GPU: its kernels take "
        "longer. data loading: the GPU idles while data is loaded. host: the GPU idles for another reason. "
        f"{LINK}: the time is the length of a transfer, and usual is the length in similar process groups. "
        "costs: how long others wait for this rank because of its own work; for a link, how much longer the "
        "transfers take."
    )
    empty = "No rank is slower than the ranks that do the same work."
    return Table("slow", "Slow ranks", columns, rows, note, empty=empty)


def waited_for(job: Job) -> Table:
    """The ranks that made others wait longest: in how many steps, and whether in early and late ones."""
    found, half = job.waited_for, len(job.waited_for) // 2
    rows = []
    for (rank,), steps in found.with_row_index("at").group_by("rank"):
        share = len(steps) / len(found)
        is_in_both = 0 < int((steps["at"] < half).sum()) < len(steps)
        kind = "persists" if share >= _PERSISTS and is_in_both else "moves"
        if len(found) == 1:
            kind = "not known"
        waited_ns = int(steps["waited_ns"].sum()) // len(steps)
        rows.append((rank, job.hosts.get(rank), len(steps), 100 * share, waited_ns, kind))
    rows.sort(key=lambda row: (-row[2], row[0]))
    columns = (
        *_RANK,
        Column("steps", "steps", "count"),
        Column("share", "of all", "percent"),
        Column("waited_ns", "others wait", "ns"),
        Column("kind", "straggler"),
    )
    note = (
        "steps: the number of steps in which the others waited longest because of this rank. persists: these "
        "are half of the steps or more, early and late ones; not known: there is one step only."
    )
    return Table(
        "waited_for", "Ranks that others waited for longest", columns, rows, note, empty=_NO_COLLECTIVES
    )


def ranks(job: Job) -> Table:
    """The time of each rank by what it did."""
    columns = (
        *_RANK,
        Column("behaviour", "group", "id"),
        Column("step_ns", "step", "ns"),
        Column("busy", "GPU busy", "percent"),
        Column("compute_ns", "compute", "ns"),
        Column("communication_ns", "communication", "ns"),
        Column("exposed_ns", "exposed", "ns"),
        Column("idle_ns", "idle", "ns"),
        Column("loading_ns", "loading", "ns"),
        Column("copies_ns", "copies", "ns", True),
        Column("waited_ns", "waits", "ns"),
        Column("came_last", "came last", "count", True),
        Column("made_wait_ns", "others wait", "ns"),
    )
    means = (
        "compute_ns", "communication_ns", "exposed_ns", "idle_ns", "loading_ns", "copies_ns", "waited_ns"
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for row in job.ranks.iter_rows(named=True):
        steps = max(row["steps"], 1)
        rows.append(
            (
                row["rank"],
                row["host"],
                row["behaviour"],
                row["step_ns"] // steps,
                100 * row["busy_ns"] / max(row["step_ns"], 1),
                *(row[name] // steps for name in means),
                row["came_last"],
                row["made_wait_ns"] // steps,
            )
        )
    rows.sort(key=lambda row: (-row[-1], row[0]))
    note = (
        "Mean times of one step. exposed: communication without compute at the same time. loading: the GPU "
        "idles while data is loaded. waits: in collectives, for the rank that came last. came last: how "
        "often. others wait: the time that others wait because this rank worked longer than they did, not "
        "because it was delayed itself."
    )
    return Table("ranks", "Ranks", columns, rows, note)


def collectives(job: Job) -> Table:
    """The collectives of each process group: transfers, waiting, and who came last."""
    columns = (
        Column("operation", "operation"),
        Column("process_group", "process group"),
        Column("ranks", "ranks", "count"),
        Column("which", "which", spare=True),
        Column("collectives", "collectives", "count"),
        Column("transfer_ns", "transfer", "ns"),
        Column("waited_ns", "waits", "ns"),
        Column("longest_wait_ns", "longest wait", "ns"),
        Column("last", "last", "id"),
        Column("last_share", "of all", "percent"),
    )
    of_groups = job.members.group_by("operation", "process_group").agg("rank")
    which = {(operation, group): rank_text(ranks) for operation, group, ranks in of_groups.iter_rows()}
    most: dict[tuple[str, str], tuple[int, int]] = {}
    for operation, group, rank, times, _ in job.by_last.iter_rows():
        if times > most.get((operation, group), (0, 0))[0]:
            most[operation, group] = times, rank
    rows = []
    for row in job.groups.iter_rows(named=True):
        count = row["collectives"]
        times, rank = most[row["operation"], row["process_group"]]
        means_ns = row["transfer_ns"] // count, row["waited_ns"] // count
        last = rank, 100 * times / count
        rows.append(
            (
                row["operation"],
                row["process_group"],
                row["ranks"],
                which[row["operation"], row["process_group"]],
                count,
                *means_ns,
                row["longest_wait_ns"],
                *last,
            )
        )
    rows.sort(key=lambda row: (-row[6] * row[4], row[0], row[1]))
    note = (
        "transfer: the time of the rank that came last. waits: how much longer the others took, in the mean. "
        "last: the rank that came last most often. which: the ranks that recorded the collective."
    )
    if rows and not any(job.groups["process_group"]):
        note += (
            " No recording names process groups, so all ranks are treated as one group. capture --hook nccl "
            "and PyTorch's profiler record the names."
        )
    return Table("collectives", "Collectives", columns, rows, note, empty=_NO_COLLECTIVES)


def behaviours(job: Job) -> Table:
    """Groups of ranks that do the same work."""
    columns = (
        Column("behaviour", "group", "id"),
        Column("count", "ranks", "count"),
        Column("ranks", "which"),
        Column("step_ns", "step", "ns"),
        Column("kernels", "kernels", "number"),
        Column("collectives", "collectives", "number"),
        Column("compute_ns", "compute", "ns"),
    )
    counts = job.members.group_by("rank").agg(pl.col("collectives").sum())
    of = job.ranks.join(counts, "rank", "left").with_columns(pl.col("collectives").fill_null(0))
    rows = []
    for (number,), part in sorted(of.group_by("behaviour"), key=lambda group: group[0]):
        sums = part.select("steps", "step_ns", "kernels", "collectives", "compute_ns").sum().row(0)
        steps, step_ns, kernels, met, compute_ns = sums
        which, steps = rank_text(part["rank"]), max(steps, 1)
        rows.append(
            (number, len(part), which, step_ns // steps, kernels / steps, met / steps, compute_ns // steps)
        )
    note = (
        "Only ranks of one group are compared: they run the same operations in process groups of the same "
        "sizes, and about as many kernels. Numbers and times are those of one step."
    )
    return Table("behaviours", "Ranks that do the same work", columns, rows, note)


def critical_path(job: Job, step: int) -> Table:
    """The critical path of a step, by rank and by what the rank did."""
    path = job.path(step)
    total_ns = sum(one.end_ns - one.start_ns for one in path)
    spent, times = Counter[tuple[int, str, str]](), Counter[tuple[int, str, str]]()
    for section, what, name, ns in job.causes(path) if path else ():
        spent[section.rank, what, name] += ns
        times[section.rank, what, name] += 1
    rows = [
        (
            rank,
            job.hosts.get(rank),
            what,
            name or None,
            ns,
            100 * ns / max(total_ns, 1),
            times[rank, what, name],
        )
        for (rank, what, name), ns in sorted(spent.items(), key=lambda item: (-item[1], item[0]))
    ]
    columns = (
        *_RANK,
        Column("what", "what"),
        Column("name", "kernel, copy, range or collective"),
        Column("ns", "time", "ns"),
        Column("share", "of the path", "percent"),
        Column("times", "times", "count", True),
    )
    note = (
        "The step takes as long as these take together. If one becomes shorter, so does the step, until "
        "another path is the longest. copies: while no kernel runs. GPU idle: while neither a kernel nor a "
        "copy runs, with the range of the program that was open."
    )
    empty = f"The path of step {step} is not known: it has too many collectives. Mark the steps as ranges."
    title = f"Critical path of step {step}"
    return Table("critical_path", title, columns, rows, note, empty=empty)


def steps(job: Job) -> Table:
    """The steps, the longest first."""
    columns = (
        Column("step", "step", "id"),
        Column("ranks", "ranks", "count", True),
        Column("mean_ns", "mean", "ns"),
        Column("longest_ns", "longest", "ns"),
        Column("rank", "of rank", "id"),
        Column("compute_ns", "compute", "ns"),
        Column("exposed_ns", "exposed", "ns"),
        Column("idle_ns", "idle", "ns"),
        Column("last", "waited for", "id"),
        Column("waited_ns", "others wait", "ns"),
    )
    waited = {step: (rank, ns) for step, rank, ns in job.waited_for.iter_rows()}
    rows: list[Sequence[Any]] = []
    for row in job.steps.iter_rows(named=True):
        count = max(row["ranks"], 1)
        means = (row[name] // count for name in ("compute_ns", "exposed_ns", "idle_ns"))
        last = waited.get(row["step"], (None, None))
        rows.append(
            (row["step"], row["ranks"], row["step_ns"] // count, *unpacked(row["longest"]), *means, *last)
        )
    rows.sort(key=lambda row: (-row[2], row[0]))
    note = (
        "The longest first. Times are means of all ranks. waited for: the rank that made others wait longest."
    )
    return Table("steps", "Steps", columns, rows, note)
