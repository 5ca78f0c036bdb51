"""The GPUs of a recording at a glance: sentences first, then the figures behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tracepipe.analyses.allocations import EVENTS_MAX, Group, Place, allocations_in, keeps_segments, peaks_of
from tracepipe.analyses.collectives import Collective, collectives_of
from tracepipe.analyses.cuda_calls import launching
from tracepipe.analyses.distribution import rank
from tracepipe.analyses.gpu_by_line import gpu_by_line
from tracepipe.analyses.gpu_by_range import Row as Range
from tracepipe.analyses.gpu_by_range import ranges_by_gpu_time
from tracepipe.analyses.gpu_work import COPY, Shares, delays_of, gpu_work, kinds_of, shares_of
from tracepipe.reports.report import COUNT, SHARE, Column, Table
from tracepipe.store.run import Run
from tracepipe.units import agree, counted, duration_text, size_text

# The most ranges that are analyzed: each takes some hundred bytes of memory.
RANGES_MAX = 100_000
# The most GPUs that get a sentence: the most idle ones, as a busy GPU is no news.
_GPUS_SAID = 8
_LISTED = 5
# The least ratio of recorded kernels to launches where none were left out: some may have been lost.
_FEWER = 0.9
# A GPU that is idle for less than this counts as busy.
_IDLE_PERCENT = 20
_GPU = Column("gpu", "GPU", "id")


@dataclass(slots=True)
class Glance:
    """The facts about the GPUs. Each part is empty where the recording lacks it."""

    shares: list[Shares] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    """By GPU, the name and pid of the process whose work it does, where that is a single process."""
    delays: list[tuple[float | None, ...]] = field(default_factory=list)
    """A row for each GPU: GPU, launches, p50, p99 and the longest of their delays, p50 and maximum of the
    queue."""
    peaks: list[tuple[Place, Group]] = field(default_factory=list)
    lines: list[tuple[str, int, int]] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    unmatched: int = 0
    """How many kernels of collectives could not be matched with those of other GPUs."""
    launches: int = 0
    kernels: int = 0
    """How many launches and how many kernels were recorded."""
    notes: list[str] = field(default_factory=list)

    @property
    def lacks_kernels(self) -> bool:
        """Whether kernels were left out, as with `--gpu-kernels`: a GPU may have been busy with those."""
        return self.kernels < _FEWER * self.launches


def glance_of(run: Run) -> Glance:
    """Analyze everything that a recording has about its GPUs."""
    found = Glance(launches=len(launching(run)))
    work = gpu_work(run)
    if len(work):
        kinds = kinds_of(run, work)
        found.shares = shares_of(run, work, kinds)
        found.processes = {
            one.gpu: f"{run.process_name(one.pid)} {one.pid}" for one in found.shares if one.pid is not None
        }
        found.collectives, found.unmatched = collectives_of(run, work, kinds)
        for gpu, rows in work.of_gpus():
            delays = delays_of(run, work, rows)
            if len(delays.depth):
                spread = (rank(delays.delay_ns, percent) for percent in (50, 99, 100))
                queue = (rank(delays.depth, percent) for percent in (50, 100))
                found.delays.append((gpu, len(delays.depth), *spread, *queue))
        found.notes += work.left_out()
        found.kernels = int(np.count_nonzero(work.what != COPY))
        del work, kinds
    if 0 < (allocated := allocations_in(run)) <= EVENTS_MAX:
        found.peaks = peaks_of(run)
    elif allocated:
        found.notes.append(
            f"peak memory is not shown, as there are over {EVENTS_MAX:,} allocations: tracepipe memory shows "
            "it"
        )
    found.lines = gpu_by_line(run) if found.shares else []
    if found.shares and not found.lines and len(run.layer("annotation")):
        if len(run.layer("annotation")) <= RANGES_MAX:
            found.ranges = [row for row in ranges_by_gpu_time(run, _LISTED, own=True)[0] if row[5]]
        else:
            found.notes.append(
                f"ranges are not shown, as there are over {RANGES_MAX:,}: tracepipe annotations shows them"
            )
    return found


def sentences(run: Run, found: Glance) -> Table:
    """The main results as sentences."""
    lines = (*_how_busy(found), *_communication(found), *_others(run, found))
    return Table("glance", "GPU at a glance", (Column("says", ""),), [(line,) for line in lines])


def _how_busy(found: Glance) -> Iterator[str]:
    """How busy each GPU was, the most idle first, and whether the CPU is the cause."""
    if found.shares and found.lacks_kernels:
        yield (
            f"Only {found.kernels:,} {agree(found.kernels, 'kernel|kernels')} of {found.launches:,} launches "
            f"{agree(found.kernels, 'was|were')} recorded: the GPUs were busy for longer than shown here."
        )
        return
    most_idle = sorted(found.shares, key=lambda one: (-(one.percent(one.idle_ns) or 0), one.gpu))
    for one in most_idle[:_GPUS_SAID]:
        idle = one.percent(one.idle_ns) or 0
        line = (
            f"GPU {one.gpu}: busy {_share(100 - idle)} of {duration_text(one.span_ns)}, idle {_share(idle)}"
        )
        unasked = one.percent(one.unasked_ns, one.idle_known_ns)
        if idle < _IDLE_PERCENT or unasked is None:
            yield f"{line}."
        elif unasked >= 50:
            yield f"{line}. For {_share(unasked)} of the idle time no work was launched: the CPU is late."
        else:
            yield f"{line}. For {_share(100 - unasked)} of the idle time the next work was already launched."
    if len(most_idle) > _GPUS_SAID:
        yield f"The other {len(most_idle) - _GPUS_SAID} GPUs were busier."


def _share(percent: float) -> str:
    return f"{percent:.1f}%"


def _communication(found: Glance) -> Iterator[str]:
    """How much of the communication overlaps with computation, and the GPU for which the others wait most."""
    communication_ns = sum(one.communication_ns for one in found.shares)
    if communication_ns and not found.lacks_kernels:
        span_ns = sum(one.span_ns for one in found.shares)
        hidden_ns = sum(one.communication_hidden_ns for one in found.shares)
        yield (
            f"Communication takes {_share(100 * communication_ns / span_ns)} of the time; kernels compute "
            f"during {_share(100 * hidden_ns / communication_ns)} of it."
        )
    waited: dict[int, list[int]] = {}
    count = 0
    for collective in found.collectives:
        count += collective.count
        for member in collective.members:
            sums = waited.setdefault(member.gpu, [0, 0])
            sums[0], sums[1] = sums[0] + member.last, sums[1] + member.made_wait_ns
    if waited:
        gpu, (last, waited_ns) = max(waited.items(), key=lambda one: (one[1][1], -one[0]))
        process = found.processes.get(gpu)
        of = f" ({process})" if process and len(set(found.processes.values())) > 1 else ""
        yield (
            f"GPU {gpu}{of} is the last to start {last} of {counted(count, 'collective|collectives')}; the "
            f"others wait {duration_text(waited_ns)} for it."
        )


def _others(run: Run, found: Glance) -> Iterator[str]:
    """The line or the range with the most GPU time, and the most memory that was allocated."""
    total_ns = sum(gpu_ns for _, gpu_ns, _ in found.lines)
    if total_ns:
        line, gpu_ns, _ = found.lines[0]
        yield f"{line} launches {_share(100 * gpu_ns / total_ns)} of the GPU's work."
    elif found.ranges:
        name, *_, busy_ns, _ = found.ranges[0]
        yield f"The range {name} keeps the GPU busy for {duration_text(busy_ns or 0)}."
    for place, of in found.peaks[:1]:
        line = f"Peak memory: {size_text(place.peak[0])}"
        if place.gpu is not None:
            line += f" on GPU {place.gpu}"
        if of.never_freed and keeps_segments(run):
            line += (
                f". PyTorch's caching allocator keeps its segments until the end: the {of.never_freed} of "
                f"{of.count} that are not freed are not a leak"
            )
        yield f"{line}."


def figures(run: Run, found: Glance) -> list[Table]:
    """The tables behind the sentences, without those that are empty."""
    lines_ns = sum(gpu_ns for _, gpu_ns, _ in found.lines)
    lines = [
        (line, gpu_ns, 100 * gpu_ns / lines_ns if lines_ns else None, count)
        for line, gpu_ns, count in found.lines[:_LISTED]
    ]
    ranges = [(name, count, wall, busy, idle) for name, count, wall, _, _, busy, idle in found.ranges]
    tables = (
        _collectives(found),
        Table("launch_delay", "From launch to start on the GPU", _DELAYS, found.delays, _DELAYS_NOTE),
        Table("python_lines", "Lines of Python by the GPU's time", _LINES, lines),
        Table("gpu_ranges", "Ranges by the GPU's time", _RANGES, ranges, _RANGES_NOTE),
        _peaks(run, found),
    )
    return [table for table in tables if table.rows]


_DELAYS = (
    _GPU,
    Column("launches", "launches", "count"),
    Column("p50_ns", "p50", "ns"),
    Column("p99_ns", "p99", "ns"),
    Column("max_ns", "max", "ns"),
    Column("queue_p50", "queue p50", "count"),
    Column("queue_max", "queue max", "count"),
)
_DELAYS_NOTE = (
    "From the return of a launch call to the start of its work on the GPU; 0 where the work started "
    "earlier. Queue: launches on the GPU that had not started when a call began, including its own."
)
_LINES = (
    Column("line", "line"),
    Column("gpu_ns", "on GPU", "ns"),
    SHARE,
    Column("count", "launched", "count"),
)
_RANGES = (
    Column("name", "range"),
    COUNT,
    Column("wall_ns", "wall", "ns"),
    Column("busy_ns", "GPU busy", "ns"),
    Column("idle_percent", "idle", "percent"),
)
_RANGES_NOTE = "Idle: between the first work of a range and its last. A range includes the ranges inside it."


def gpu_time(found: Glance) -> Table:
    """How each GPU spent its time."""
    rows = []
    for one in found.shares:
        parts = (one.span_ns - one.idle_ns, one.compute_ns, one.communication_ns, one.copies_ns, one.idle_ns)
        rows.append(
            (
                one.gpu,
                found.processes.get(one.gpu),
                one.span_ns,
                *(one.percent(part) for part in parts),
                one.percent(one.communication_hidden_ns, one.communication_ns),
                one.percent(one.copies_hidden_ns, one.copies_ns),
                one.percent(one.unasked_ns, one.idle_known_ns),
            )
        )
    columns = (
        _GPU,
        Column("process", "process", spare=True),
        Column("span_ns", "time", "ns"),
        *(
            Column(f"{key}_percent", title, "percent")
            for key, title in (
                ("busy", "busy"),
                ("compute", "compute"),
                ("communication", "comm."),
                ("copies", "copies"),
                ("idle", "idle"),
                ("communication_beside", "comm. hidden"),
                ("copies_beside", "copies hidden"),
                ("unasked", "not launched"),
            )
        ),
    )
    note = (
        "Shares of the time from a GPU's first work to its last. Comm. hidden: the share of the "
        "communication time during which kernels compute. Copies hidden: the share of the copy time during "
        "which any kernel runs. Not launched: the share of the idle time before the call that launched the "
        "next work."
    )
    return Table("gpu_time", "How the GPUs spent their time", columns, rows, note)


def _collectives(found: Glance) -> Table:
    rows = [
        (
            f"{one.name} ({one.count:,})",
            f"GPU {member.gpu}",
            found.processes.get(member.gpu),
            member.last,
            member.waiting_ns,
            member.transfer_ns,
            member.made_wait_ns,
        )
        for one in found.collectives[:_LISTED]
        for member in one.members
    ]
    columns = (
        Column("name", "collective"),
        Column("gpu", "GPU"),
        Column("process", "process"),
        Column("last", "last", "count"),
        Column("waiting_ns", "waiting", "ns"),
        Column("transfer_ns", "transfer", "ns"),
        Column("made_wait_ns", "made wait", "ns"),
    )
    note = (
        "The kernel of a collective waits until the last GPU has started its kernel, and then transfers. "
        "Last: how often this GPU was the last one; made wait: how long the others waited for it then, "
        "summed."
    )
    if found.unmatched:
        kernels = agree(found.unmatched, "kernel|kernels")
        note += f" {found.unmatched:,} {kernels} could not be matched with those of other GPUs."
    return Table("collectives", "Collectives, and which GPU is last", columns, rows, note, grouped=True)


def _peaks(run: Run, found: Glance) -> Table:
    rows = [
        (
            run.process_name(place.pid),
            place.pid,
            place.gpu,
            place.peak[0],
            place.peak[1] - run.facts.start_ns,
            of.count,
            of.never_freed,
            of.never_freed_bytes,
        )
        for place, of in found.peaks[:_GPUS_SAID]
    ]
    columns = (
        Column("process", "process"),
        Column("pid", "pid", "pid"),
        _GPU,
        Column("peak_bytes", "peak", "bytes"),
        Column("at_ns", "at", "at"),
        Column("allocations", "allocations", "count"),
        Column("kept", "not freed", "count"),
        Column("kept_bytes", "of these", "bytes"),
    )
    return Table("peak_memory", "Peak memory", columns, rows)
