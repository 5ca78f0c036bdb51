"""When and how long the GPUs were idle, and what the CPU did meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from tracepipe.analyses.breakdown import HOOKED, OFF_CPU
from tracepipe.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.analyses.gpu_contexts import context_tables
from tracepipe.analyses.gpu_work import COPY, KERNEL, Idle, Work, gpu_work, idle_of
from tracepipe.analyses.host_states import IN_CALL, STATES, USER, HostStates, Spent
from tracepipe.analyses.idle_gaps import (
    BETWEEN,
    FIRST,
    KEYS,
    LAST,
    STATE_WORDS,
    WHERE,
    Cause,
    IdleGaps,
    causes_of,
    gaps_of,
    in_words,
    state_text,
)
from tracepipe.analyses.idle_places import IdlePlaces, idle_places, with_others
from tracepipe.analyses.kernel_chains import NEAR_NS, SMALL_NS, chains_of, launching_ns, small_kernels
from tracepipe.analyses.launch_gaps import launch_tables
from tracepipe.analyses.parts import Part, PartOptions, part_of, titled
from tracepipe.event.columns import NONE, Ints
from tracepipe.event.groups import run_starts, sums_by
from tracepipe.options import Option
from tracepipe.reports.report import Column, Report, Result, Table, not_listed
from tracepipe.store.run import Run
from tracepipe.store.schema import INSTANT, IS_TIMED
from tracepipe.units import agree, counted, duration_ns, duration_text

# The most threads whose states are listed.
_THREADS_MAX = 64
_SPREAD = tuple(column for column in LENGTH_COLUMNS if column.key not in ("total_ns", "mean_ns"))
_OF_GPU = ("gpu_kernel", "gpu_warp", "gpu_thread", "transfer", "unknown layer")
_NEEDED = {
    "userspace": "CUDA calls: their time counts as user code",
    "syscall": "system calls: their time counts as the call or user code around them",
    "kernel": "driver functions: their time counts as the call around them",
    "scheduler": "off-CPU is unknown: sleep and waiting count as the call or user code around them",
}


@dataclass(frozen=True, slots=True)
class Options(PartOptions):
    """Options of `tracepipe gaps`."""

    top: Annotated[int, Option("Show the N gaps and causes with the most time; 0: all.", "N")] = 10
    min: Annotated[
        str,
        Option(
            "Show only gaps of at least this length: 20us, 1.5ms. A number without a unit is in seconds.",
            "TIME",
        ),
    ] = "0ns"


def run(run: Run, options: Options) -> Result:
    """The idle times of each GPU of one recording."""
    least_ns = duration_ns(options.min)
    part = part_of(run, options)
    result = Result(titled("WHEN THE GPUS WERE IDLE", part))
    work = gpu_work(run)
    if not len(work):
        tables, notes = launch_tables(run, options.top, least_ns)
        result.parts += [*tables, *context_tables(run, work, [], options.top)]
        known = "these figures are from calls alone" if tables else "so its idle time is not known"
        # Work on a clock that nothing relates to the host's was recorded, and is counted as left out.
        what = "could be placed in time" if run.facts.unplaced else "was recorded"
        result.notes += [f"no work of a GPU (kernel, copy, warp) {what}, {known}", *notes]
        if not run.facts.unplaced:
            result.notes.append("tracepipe capture --gpu kernels records when the GPU works")
        result.notes += _without_length(run)
        return result
    idle = [idle_of(work, gpu, rows) for gpu, rows in work.of_gpus()]
    if part is not None:
        idle = [one.within(part.spans) for one in idle]
    has_copies = bool((work.what == COPY).any())
    contexts = context_tables(run, work, idle, options.top)
    states = HostStates(run)
    gaps = gaps_of(run, work, idle)
    if part is not None:
        gaps = gaps.within(part.spans.start_ns, part.spans.end_ns)
    kept = gaps.select(np.flatnonzero(gaps.dur_ns() >= least_ns))
    places = idle_places(run, kept, states)
    result.parts.append(_gpus(run, idle, gaps, part))
    if len(kept):
        result.parts += [
            *_places(run, idle, kept, places, options.top),
            _causes(run, idle, kept, places.doing(), states, options.top),
            _longest(run, work, idle, kept, places, states, options),
        ]
    result.parts += _launching(run, work, idle, gaps, part, options.top)
    threads, notes = _threads(run, idle, states, options.top)
    if len(threads.rows) > 1:
        result.parts.append(threads)
        result.notes += notes
    result.parts += contexts
    result.notes += work.left_out()
    result.notes += _notes(run, gaps, kept, options, has_copies)
    return result


def _launching(
    run: Run, work: Work, idle: list[Idle], gaps: IdleGaps, part: Part | None, top: int
) -> Iterator[Table]:
    """What launching small kernels costs, and the chains of them that recur."""
    saved_ns = sums_by(gaps.gpu, launching_ns(run, work, gaps), len(idle))
    is_small, lengths_ns = small_kernels(work), work.end_ns - work.start_ns
    inside = np.ones(len(work), np.bool_)
    if part is not None:
        inside = part.spans.covered_ns(work.start_ns, work.start_ns + 1) > 0
    wanted = inside & (work.what == KERNEL)
    rows = []
    for one, graph_ns in zip(idle, saved_ns.tolist(), strict=True):
        own = one.rows.start + np.flatnonzero(wanted[one.rows])
        small = own[is_small[own]]
        if len(small):
            sums_ns = int(lengths_ns[small].sum()), int(lengths_ns[own].sum())
            shares = 100 * len(small) / len(own), 100 * sums_ns[0] / sums_ns[1]
            rows.append((one.gpu, len(own), len(small), *shares, graph_ns))
    if not rows:
        return
    yield Table(
        "small_kernels",
        f"Kernels shorter than {duration_text(SMALL_NS)}",
        (
            Column("gpu", "GPU", "id"),
            Column("kernels", "kernels", "count"),
            Column("small", "small", "count"),
            Column("small_percent", "share", "percent"),
            Column("small_time_percent", "of time", "percent"),
            Column("graph_saves_ns", "a graph saves", "ns"),
        ),
        rows,
        "A graph saves: the most that a CUDA graph could save, which is the idle time in steps before "
        "kernels that were launched too late, without loading data.",
    )
    chains, count = chains_of(run, work, np.flatnonzero(inside), top)
    if chains:
        more = f" {not_listed(count - len(chains), 'chain|chains')[0]}." if count > len(chains) else ""
        yield Table(
            "chains",
            "Chains of small kernels, which could be fused",
            (
                Column("kernels", "kernels"),
                Column("length", "length", "count"),
                Column("count", "times", "count"),
                Column("kernels_ns", "in kernels", "ns"),
                Column("gaps_ns", "between", "ns"),
                Column("launched_by", "launched by"),
            ),
            [astuple(chain) for chain in chains],
            "Each starts on the same stream at most "
            f"{duration_text(NEAR_NS)} after the end of the one before. In kernels, between: the sums of all "
            f"times that the chain occurs. Launched by: the first kernel.{more}",
        )


def _gpus(run: Run, idle: list[Idle], gaps: IdleGaps, part: Part | None) -> Table:
    about, rows = run.facts.gpus(), []
    bounds = np.searchsorted(gaps.gpu, np.arange(len(idle) + 1)).tolist()
    for one, own in zip(idle, pairwise(bounds), strict=True):
        every = np.arange(*own, dtype=np.int32)
        lengths = {where: gaps.dur_ns(every[gaps.where[slice(*own)] == where]) for where in WHERE}
        idle_ns = one.idle_ns
        whole_ns = one.last_ns - one.first_ns
        if part is not None:
            whole_ns = int(part.spans.covered_ns(np.array([one.first_ns]), np.array([one.last_ns]))[0])
        busy_ns = whole_ns - idle_ns
        _, _, *spread = of_values(lengths[BETWEEN])
        between = every[gaps.where[slice(*own)] == BETWEEN]
        queued_ns = int(gaps.queued_ns(run, between)[0].sum())
        rows.append(
            (
                one.gpu,
                about.get(one.gpu, {}).get("name"),
                busy_ns,
                idle_ns,
                100 * idle_ns / whole_ns if whole_ns else None,
                queued_ns,
                len(between),
                *spread,
                int(lengths[FIRST].sum()),
                int(lengths[LAST].sum()),
            )
        )
    columns = (
        Column("gpu", "GPU", "id"),
        Column("name", "name", spare=True),
        Column("busy_ns", "busy", "ns"),
        Column("idle_ns", "idle", "ns"),
        Column("idle_percent", "idle", "percent"),
        Column("queued_ns", "queued", "ns", spare=True),
        Column("gaps", "gaps", "count"),
        *_SPREAD,
        Column("before_ns", "before", "ns"),
        Column("after_ns", "after", "ns"),
    )
    note = (
        "Busy: any kernel, copy or warp runs. Idle, gaps and percentiles of their lengths: between the GPU's "
        "first work and its last. Before, after: idle from the start of the recording to the first work, and "
        "from the last work to the end. Queued: idle although the call for the next work had returned."
    )
    return Table("gpus", "Each GPU", columns, rows, note)


def _places(run: Run, idle: list[Idle], gaps: IdleGaps, places: IdlePlaces, top: int) -> Iterator[Table]:
    """The idle time between work by the program's range and line, where any were recorded."""
    rows = []
    for number, one in enumerate(idle):
        own = (gaps.gpu[places.gap] == number) & (gaps.where[places.gap] == BETWEEN)
        found, whole_ns = places.sums(run, np.flatnonzero(own)), one.idle_ns
        for range_, line, idle_ns in with_others(found, top):
            share = 100 * idle_ns / whole_ns if whole_ns else None
            rows.append((f"GPU {one.gpu}", range_, line, idle_ns, share))
    columns = (
        Column("gpu", "the program was in"),
        Column("range", "range"),
        Column("line", "line"),
        Column("idle_ns", "idle", "ns"),
        Column("share_percent", "share", "percent"),
    )
    note = (
        "The range and the line in which the thread was that launched the next work: the innermost range "
        "that the program marked, and the innermost line of Python outside of installed packages. If that "
        "work was launched before the GPU became idle, the thread that has the steps counts instead. All "
        "steps count as one range."
    )
    if any(row[1] or row[2] for row in rows):
        yield Table("places", "Idle time by range and line", columns, rows, note, grouped=True)


def _causes(run: Run, idle: list[Idle], gaps: IdleGaps, doing: Spent, states: HostStates, top: int) -> Table:
    def row(of: Cause) -> tuple[Any, ...]:
        share = 100 * of.between_ns / of.idle_ns if of.idle_ns else None
        cause: tuple[Any, ...]
        spread: tuple[int | None, ...]
        cause, spread = (of.state, of.call, of.gaps), (*(of.percentiles or ()), of.longest_ns)
        if of.others:
            cause = (counted(of.others, "other|others"), None, None)
        if of.others or not of.percentiles:
            spread = (None,) * len(_SPREAD)
        return f"GPU {idle[of.gpu].gpu}", *cause, of.between_ns, share, *spread, of.before_ns, of.after_ns

    rows = [*map(row, causes_of(run, gaps, doing, states, top))]
    columns = (
        Column("gpu", "the CPU was in"),
        Column("state", "state"),
        Column("call", "of call"),
        Column("gaps", "gaps", "count"),
        Column("total_ns", "idle", "ns"),
        Column("share_percent", "share", "percent"),
        *(Column(c.key, c.title, "ns", spare=c.key in ("p95_ns", "max_ns")) for c in _SPREAD),
        Column("before_ns", "before", "ns"),
        Column("after_ns", "after", "ns"),
    )
    note = (
        "States of the thread that launched the next work. Each ns counts once, for the innermost state. "
        "From the innermost: off-CPU, driver, system call, the call itself"
        f"{f', {states.hooked}' if HOOKED in states.states else ''}. "
        "Percentiles: of the time per gap."
    )
    return Table("causes", "Idle time by what the CPU did", columns, rows, note, grouped=True)


def _longest(
    run: Run,
    work: Work,
    idle: list[Idle],
    gaps: IdleGaps,
    places: IdlePlaces,
    states: HostStates,
    options: Options,
) -> Table:
    doing = places.doing()
    order: Ints = np.lexsort((gaps.start_ns, -gaps.dur_ns()))
    shown = order[: options.top] if options.top > 0 else order
    main = _longest_of(doing["gap"], doing["dur_ns"], len(gaps))
    main_place = _longest_of(places.gap, places.dur_ns, len(gaps))
    queued_ns, is_known = gaps.queued_ns(run, shown)
    calls = run.layer("userspace")

    def row(at: int) -> tuple[Any, ...]:
        gap = int(shown[at])
        *numbers, most_ns = (int(doing[key][main[gap]]) for key in (*KEYS, "dur_ns"))
        state, call, syscall = in_words(states, *numbers)
        dur_ns, start_ns = int(gaps.dur_ns(gap)), int(gaps.start_ns[gap])
        previous, following = (
            None if place == NONE else work.name(run, place)
            for place in (int(gaps.previous[gap]), int(gaps.following[gap]))
        )
        asked = int(gaps.call[gap])
        name = tid = None
        if asked != NONE:
            shape = int(calls.shape[asked])
            name = run.shapes.value("name", int(run.shapes.column("name", shape)))
            _, tid = run.shapes.ids_of(shape)
        ended_by = name if following else None
        cause, inner = state_text(state, states), call or syscall
        place = places.name(run, int(main_place[gap]))
        if state == OFF_CPU and places.are_sampled and place:
            cause = f"{cause}: {place}"
        elif cause in (IN_CALL, states.hooked) and inner:
            cause = f"in {inner}"
        elif cause == "system call" and inner:
            cause = f"{cause} ({inner})"
        elif inner and inner != cause:
            cause = f"{cause} in {inner}"
        elif place and state in (USER, HOOKED):
            cause = place
        return (
            idle[int(gaps.gpu[gap])].gpu,
            start_ns - run.facts.start_ns,
            dur_ns,
            previous or "(start of the recording)",
            following or "(end of the recording)",
            f"{ended_by} ?" if ended_by and gaps.by_order[gap] else ended_by,
            tid,
            int(queued_ns[at]) if following and is_known[at] else None,
            cause,
            100 * most_ns / dur_ns,
        )

    columns = (
        Column("gpu", "GPU", "id"),
        Column("at_ns", "at", "at"),
        Column("dur_ns", "length", "ns"),
        Column("previous", "after"),
        Column("following", "before"),
        Column("ended_by", "ended by"),
        Column("tid", "thread", "pid", spare=True),
        Column("queued_ns", "queued", "ns", spare=True),
        Column("cause", "CPU, mostly"),
        Column("cause_percent", "", "percent"),
    )
    note = "After, before: the work around the gap. Ended by: the call that launched the work after it."
    if bool((gaps.by_order[shown] & (gaps.following[shown] != NONE)).any()):
        note += " “?”: that work has no launch id; this is the last such call that began before it."
    return Table("gaps", "The longest gaps", columns, [row(at) for at in range(len(shown))], note)


def _longest_of(gap: Ints, dur_ns: Ints, count: int) -> Ints:
    """For each gap the row with the longest time, the first among equal ones. Shape `(count,)`."""
    by_time = np.lexsort((-dur_ns, gap))
    longest = by_time[run_starts(gap[by_time])]
    found = np.zeros(count, np.int64)
    found[gap[longest]] = longest
    return found


def _threads(run: Run, idle: list[Idle], states: HostStates, top: int) -> tuple[Table, list[str]]:
    """What each thread that uses CUDA did while a GPU was idle between its first work and its last, and a
    note on other threads. The cost of each thread grows with the number of gaps, so only some are analyzed.
    """
    # Those that spent the longest time in calls come first.
    threads = run.store.rows(
        f"""select s.pid, s.tid, coalesce(sum(total_ns) filter ({IS_TIMED}), 0) as dur_ns
        from store.shape_sums x join store.shapes s using (shape)
        where x.layer = 'userspace' and x.is_outermost and x.kind <> {INSTANT} group by all
        order by dur_ns desc, s.tid, s.pid"""
    )
    most = min(top, _THREADS_MAX) if top > 0 else _THREADS_MAX
    ids = [(run.shapes.value("pid", pid), run.shapes.value("tid", tid)) for pid, tid, _ in threads[:most]]
    rows = []
    for one in idle:
        for pid, tid in ids:
            sums = np.zeros(len(STATES), np.int64)
            of_thread = states.of((pid, tid), one.gaps.start_ns, one.gaps.end_ns)
            np.add.at(sums, of_thread["state"], of_thread["dur_ns"])
            spent = dict(zip(STATES, sums.tolist(), strict=True))
            name = run.thread_name(pid, tid) or run.process_name(pid)
            rows.append((f"GPU {one.gpu}", name, tid, *(spent.get(state, 0) for state in states.states)))
    columns = (
        Column("gpu", "GPU"),
        Column("thread", "thread"),
        Column("tid", "id", "pid"),
        *(
            Column(
                f"{state.replace(' ', '_').replace('-', '_').lower()}_ns", STATE_WORDS.get(state, state), "ns"
            )
            for state in states.states
        ),
    )
    note = "Time of each thread while the GPU was idle, between its first work and its last."
    notes, more = [], len(threads) - len(ids)
    if more and 0 < top < _THREADS_MAX:
        others = "all" if top + more <= _THREADS_MAX else _THREADS_MAX
        words = "more thread|threads that uses|use CUDA is|are not listed"
        notes.append(f"{counted(more, words)}: --top 0 lists {others}")
    elif more:
        words = "more thread|threads that uses|use CUDA, which was|were in calls for a shorter time, "
        notes.append(counted(more, words) + agree(more, "is|are not listed"))
    return Table("threads", "All threads that use CUDA", columns, rows, note, True), notes


def _notes(run: Run, gaps: IdleGaps, kept: IdleGaps, options: Options, has_copies: bool) -> Iterator[str]:
    if len(kept) < len(gaps):
        short, short_ns = len(gaps) - len(kept), int(gaps.dur_ns().sum() - kept.dur_ns().sum())
        yield (
            f"{counted(short, 'gap|gaps')} shorter than {options.min} {agree(short, 'counts|count')} only in "
            f"the table of the GPUs: {duration_text(short_ns)} in total"
        )
    yield from not_listed(len(kept) - options.top if options.top > 0 else 0, "gap|gaps")
    counts = run.facts.counts
    reasons = run.facts.header.layers.missing
    for layer, meaning in _NEEDED.items():
        if not counts[layer]:
            why = f" ({reasons[layer]})" if layer in reasons else ""
            yield f"not recorded: {layer}{why}: {meaning}"
    nobody = np.flatnonzero(kept.call == NONE)
    if len(nobody):
        length = duration_text(int(kept.dur_ns(nobody).sum()))
        gaps_text = counted(len(nobody), "gap|gaps")
        yield f"{gaps_text} ({length}): the call that launched the next work is not known"
    if len(run.layer("transfer")) and not has_copies:
        yield "copies on the GPU were not recorded, only the calls for them: their time counts as idle"
    yield from _without_length(run)
    lost = sum(run.facts.losses[layer] for layer in _OF_GPU)
    if lost:
        words = counted(lost, "event|events of the GPU was|were")
        yield f"{words} lost: it may have worked where it counts as idle"
    bounds = [
        clock.get("bound_ns") or 0 for clock in run.facts.clocks if clock["clock"].startswith("globaltimer")
    ]
    bound_ns = max(bounds, default=0)
    if unsure := int(np.count_nonzero(kept.dur_ns() < bound_ns)):
        yield (
            f"{counted(unsure, 'gap|gaps is|are')} shorter than the error bound of the GPU's clock, "
            f"{duration_text(bound_ns)}: {agree(unsure, 'its|their length|lengths is|are')} right, but what "
            "the CPU did may be shifted by that"
        )


def _without_length(run: Run) -> Iterator[str]:
    """Notes about events of GPUs without a length."""
    if alone := len(run.layer("gpu_thread")):
        words = "entry|entries or exit|exits of single threads is|are left out: it|they does|do not show how "
        yield f"{counted(alone, words)}long the GPU worked"
    kernels = run.layer("gpu_kernel")
    if unknown := int(np.count_nonzero(kernels.end_ns <= kernels.start_ns)):
        yield counted(
            unknown, "kernel|kernels has|have no known length: the GPU counts as idle during it|them"
        )


REPORT = Report("gaps", Options, run)
