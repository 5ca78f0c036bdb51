"""When the GPUs did nothing, how long, and what the CPU was doing then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from tracepipe.event.columns import NONE
from tracepipe.reports.analyses.breakdown import HOOKED
from tracepipe.reports.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.reports.analyses.gpu_contexts import context_tables
from tracepipe.reports.analyses.gpu_work import COPY, Idle, Work, gpu_work, idle_of
from tracepipe.reports.analyses.host_states import IN_CALL, STATES, USER, HostStates
from tracepipe.reports.analyses.idle_gaps import BETWEEN, FIRST, LAST, IdleGaps, doing_in, gaps_of
from tracepipe.reports.analyses.launch_gaps import launch_tables
from tracepipe.reports.frames.grouping import Grouped, equal, greatest, one_number
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import flagged, made, parts
from tracepipe.reports.report import Column, Option, Report, Result, Table
from tracepipe.units import duration_ns, duration_text

_KEYS = ("state", "call", "syscall")
_WHERE = (BETWEEN, FIRST, LAST)
_SPREAD = tuple(column for column in LENGTH_COLUMNS if column.key not in ("total_ns", "mean_ns"))
_WORDS = {"other system calls": "system call"}
_OF_GPU = ("gpu_kernel", "gpu_warp", "gpu_thread", "transfer", "unknown layer")
_NEEDED = {
    "userspace": "CUDA calls: their time counts as user code",
    "syscall": "system calls: their time counts as the call or user code around them",
    "kernel": "driver functions: their time counts as the call around them",
    "scheduler": "off-CPU is unknown: sleep and waiting count as the call or user code around them",
}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe gaps`."""

    top: Annotated[int, Option("How many gaps and causes, those that count most; 0: all.", "N")] = 10
    min: Annotated[str, Option("Only gaps at least so long: 20us, 1.5ms.", "TIME")] = "0ns"


def run(run: Run, options: Options) -> Result:
    """The idle times of each GPU of one recording."""
    least_ns = duration_ns(options.min)
    result = Result("WHEN THE GPUS WERE IDLE")
    work = gpu_work(run)
    if not len(work):
        tables, notes = launch_tables(run, options.top, least_ns)
        result.parts += tables
        known = "this is what calls alone show" if tables else "so that idle time is not known"
        result.notes += [f"no kernel, copy or warp on a GPU was recorded, {known}", *notes]
        result.notes += ["tracepipe capture --gpu kernels records when the GPU works"]
        result.notes += _without_length(run)
        return result
    idle = [idle_of(work, gpu, rows) for gpu, rows in work.of_gpus()]
    has_copies = any(bool((work.what[part] == COPY).any()) for part in parts(len(work)))
    contexts = context_tables(run, work, idle, options.top)
    states = HostStates(run)
    gaps = gaps_of(run, work, idle)
    long = flagged(len(gaps), lambda part: gaps.dur_ns(part) >= least_ns)
    kept = gaps if len(long) == len(gaps) else gaps.take(long)
    doing = doing_in(run, states, kept)
    result.parts.append(_gpus(run, idle, gaps))
    if len(kept):
        result.parts += [
            _causes(idle, kept, doing, states, options.top),
            _longest(run, work, idle, kept, doing, states, options),
        ]
    threads, more = _threads(run, idle, states, options.top)
    if len(threads.rows) > 1:
        result.parts.append(threads)
        result.notes += (
            [f"{more} more threads that use CUDA are not listed: --top 0 lists all"] if more else []
        )
    result.parts += contexts
    result.notes += work.left_out()
    result.notes += _notes(run, gaps, kept, options, has_copies)
    return result


def _state(state: str, states: HostStates) -> str:
    """A state as it is shown: user code is known as such only where nothing else could be meant."""
    whole = {"ioctl", "off-CPU"} <= states.recorded
    if state == HOOKED:
        return states.hooked
    return "user or unrecorded" if state == USER and not whole else _WORDS.get(state, state)


def _cause(state: str, call: str | None, hooked: str) -> str:
    """What a thread was doing, in words."""
    if state in (IN_CALL, hooked):
        return f"in {call}"
    if state == "system call" and call:
        return f"{state} ({call})"
    return f"{state} in {call}" if call and call != state else state


def _in_words(states: HostStates, state: int, call: int, syscall: int) -> tuple[str, str | None, str | None]:
    return STATES[state], states.name(call), states.name(syscall)


def _gpus(run: Run, idle: list[Idle], gaps: IdleGaps) -> Table:
    names = {gpu.get("index"): gpu.get("name") for gpu in (run.facts.footer or {}).get("gpus", [])}
    rows = []
    bounds = np.searchsorted(gaps.gpu, np.arange(len(idle) + 1)).tolist()
    for one, own in zip(idle, pairwise(bounds), strict=True):
        every = np.arange(*own, dtype=np.int32)
        lengths = {where: gaps.dur_ns(every[gaps.where[slice(*own)] == where]) for where in _WHERE}
        idle_ns = one.idle_ns
        busy_ns = one.last_ns - one.first_ns - idle_ns
        _, _, *spread = of_values(lengths[BETWEEN])
        between = every[gaps.where[slice(*own)] == BETWEEN]
        queued_ns = sum(int(gaps.queued_ns(run, between[part])[0].sum()) for part in parts(len(between)))
        rows.append(
            (
                one.gpu,
                names.get(one.gpu),
                busy_ns,
                idle_ns,
                100 * idle_ns / (busy_ns + idle_ns),
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
        "Busy: any kernel, copy or warp on it. Idle, gaps and their lengths: between its first work and its "
        "last; before and after: from the start of the recording, to its end. Queued: idle after the call "
        "for the next work had returned."
    )
    return Table("gpus", "Each GPU", columns, rows, note)


def _causes(idle: list[Idle], gaps: IdleGaps, doing: dict[str, Any], states: HostStates, top: int) -> Table:
    count = len(doing["gap"])
    keys = [_above_zero(doing[key]) for key in _KEYS]
    gpu_of = made(count, np.int32, lambda part: gaps.gpu[doing["gap"][part]])
    causes = Grouped(one_number(gpu_of, *keys), np.arange(count, dtype=np.int32))
    by_gpu: dict[int, list[tuple[Any, ...]]] = {}
    for _, places in causes:
        first = int(places[0])
        state, call, syscall = _in_words(states, *(int(doing[key][first]) for key in _KEYS))
        at = {where: places[gaps.where[doing["gap"][places]] == where] for where in _WHERE}
        lengths = doing["dur_ns"][at[BETWEEN]]
        total_ns, _, *spread = of_values(lengths)
        outside = (int(doing["dur_ns"][at[where]].sum()) for where in (FIRST, LAST))
        number = int(gpu_of[first])
        by_gpu.setdefault(number, []).append(
            (
                f"GPU {idle[number].gpu}",
                _state(state, states),
                call or syscall,
                len(lengths),
                total_ns or 0,
                None,
                *spread,
                *outside,
            )
        )
    rows = []
    for of_gpu in by_gpu.values():
        idle_ns = sum(row[4] for row in of_gpu)
        of_gpu = [(*row[:5], 100 * row[4] / idle_ns if idle_ns else None, *row[6:]) for row in of_gpu]
        of_gpu.sort(key=lambda row: (-row[4], -row[-2] - row[-1], row[1], row[2] or ""))
        rows += _with_the_rest(of_gpu, top)
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
        "Of the thread that asked for what came next. Each ns counts once, for the innermost: off-CPU before "
        "driver before system call before the call itself"
        f"{f', and that before {states.hooked}' if HOOKED in states.states else ''}. "
        "Percentiles: of its time in one gap."
    )
    return Table("causes", "Idle time by what the CPU did", columns, rows, note, grouped=True)


def _above_zero(numbers: Any) -> Any:
    """Numbers, of which -1 is none, that can be put in one with others."""
    return made(len(numbers), np.int32, lambda part: numbers[part].astype(np.int32) + 1)


def _with_the_rest(rows: list[tuple[Any, ...]], top: int) -> list[tuple[Any, ...]]:
    """The first rows of a GPU, and what all others sum up to."""
    if top <= 0 or len(rows) <= top + 1:
        return rows
    rest = rows[top:]
    share = sum(row[5] for row in rest) if rest[0][5] is not None else None
    sums = (None, sum(row[4] for row in rest), share, *(None,) * len(_SPREAD))
    outside = (sum(row[-2] for row in rest), sum(row[-1] for row in rest))
    return [*rows[:top], (rest[0][0], f"{len(rest)} others", None, *sums, *outside)]


def _longest(
    run: Run,
    work: Work,
    idle: list[Idle],
    gaps: IdleGaps,
    doing: dict[str, Any],
    states: HostStates,
    options: Options,
) -> Table:
    shown = _first(gaps, options.top)
    main = _mostly(doing, np.sort(shown))
    queued_ns, is_known = gaps.queued_ns(run, shown)
    calls = run.layer("userspace")
    rows = []
    for at, gap in enumerate(shown.tolist()):
        *numbers, most_ns = main[gap]
        state, call, syscall = _in_words(states, *numbers)
        dur_ns, start_ns = int(gaps.dur_ns(gap)), int(gaps.start_ns[gap])
        previous, following = (
            None if place == NONE else work.name(run, place)
            for place in (int(gaps.previous[gap]), int(gaps.following[gap]))
        )
        asked = int(gaps.call[gap])
        ids = ("name", "tid")
        name, tid = (
            None if asked == NONE else run.shapes.value(key, int(run.shapes.column(key, calls.shape[asked])))
            for key in ids
        )
        ended_by = name if following else None
        rows.append(
            (
                idle[int(gaps.gpu[gap])].gpu,
                start_ns - run.facts.start_ns,
                dur_ns,
                previous or "(start of the recording)",
                following or "(end of the recording)",
                f"{ended_by} ?" if ended_by and gaps.by_order[gap] else ended_by,
                tid,
                int(queued_ns[at]) if following and is_known[at] else None,
                _cause(_state(state, states), call or syscall, states.hooked),
                100 * most_ns / dur_ns,
            )
        )
    columns = (
        Column("gpu", "GPU", "id"),
        Column("at_ns", "at", "at"),
        Column("dur_ns", "length", "ns"),
        Column("previous", "after"),
        Column("following", "before"),
        Column("ended_by", "ended by"),
        Column("tid", "thread", "id", spare=True),
        Column("queued_ns", "queued", "ns", spare=True),
        Column("cause", "CPU, mostly"),
        Column("cause_percent", "", "percent"),
    )
    note = "Ended by: the call that asked for what came next."
    if "?" in "".join(str(row[5])[-1:] for row in rows):
        note += " “?”: work without a launch id, so the last such call that began before it."
    return Table("gaps", "The longest", columns, rows, note)


def _first(gaps: IdleGaps, top: int) -> Any:
    """The gaps that are shown: the longest, of equal ones the first."""
    dur_ns = made(len(gaps), np.int64, gaps.dur_ns)
    every = np.arange(len(gaps), dtype=np.int32)
    most = top if top > 0 else len(every)
    longest, as_long = greatest(dur_ns, every, most)
    as_long = as_long[np.argsort(gaps.start_ns[as_long], kind="stable")]
    shown = np.concatenate([longest, as_long[: most - len(longest)]])
    return shown[np.lexsort((gaps.start_ns[shown], -dur_ns[shown]))]


def _mostly(doing: dict[str, Any], shown: Any) -> dict[int, tuple[int, ...]]:
    """What was done the longest in each of some gaps, in order: state, call, syscall, dur_ns."""
    is_shown = np.zeros(int(shown[-1]) + 2, np.bool_)
    is_shown[shown] = True
    gaps = doing["gap"]
    some = flagged(len(gaps), lambda part: is_shown[np.minimum(gaps[part], len(is_shown) - 1)])
    columns = [doing[key][some].tolist() for key in ("gap", *_KEYS, "dur_ns")]
    found: dict[int, tuple[int, ...]] = {}
    for gap, *rest in zip(*columns, strict=True):
        if gap not in found or rest[-1] > found[gap][-1]:
            found[gap] = tuple(rest)
    return found


def _in_calls(run: Run) -> pl.DataFrame:
    """pid, tid, dur_ns: how long each thread that made calls was in them, as far as that is known."""
    calls, every = run.layer("userspace"), np.arange(len(run.shapes), dtype=np.int32)
    of_shape, first = equal(run.shapes.column("pid", every), run.shapes.column("tid", every))
    outermost, has_length = calls.is_outermost, calls.has_length
    dur_ns, seen = np.zeros(len(first), np.int64), np.zeros(len(first), np.bool_)
    for part in parts(len(calls)):
        of = of_shape[calls.shape[part]]
        seen[of[outermost[part]]] = True
        timed = outermost[part] & has_length[part]
        np.add.at(dur_ns, of[timed], (calls.end_ns[part] - calls.start_ns[part])[timed])
    ids = [run.shapes.series(key, every[first]) for key in ("pid", "tid")]
    return pl.DataFrame([*ids, pl.Series("dur_ns", dur_ns)]).filter(pl.Series(seen))


def _threads(run: Run, idle: list[Idle], states: HostStates, top: int) -> tuple[Table, int]:
    """What each thread that uses CUDA did while a GPU was idle between its first work and its last."""
    busiest = _in_calls(run).sort("dur_ns", "tid", descending=[True, False])
    shown = busiest.head(top) if top > 0 else busiest
    rows = []
    for one in idle:
        for pid, tid, _ in shown.iter_rows():
            sums = np.zeros(len(STATES), np.int64)
            for part in states.of((pid, tid), one.gaps.start_ns, one.gaps.end_ns):
                np.add.at(sums, part["state"], part["dur_ns"])
            spent = dict(zip(STATES, sums.tolist(), strict=True))
            name = run.thread_name(pid, tid) or run.process_name(pid)
            rows.append((f"GPU {one.gpu}", name, tid, *(spent.get(state, 0) for state in states.states)))
    columns = (
        Column("gpu", "GPU"),
        Column("thread", "thread"),
        Column("tid", "id", "id"),
        *(
            Column(f"{state.replace(' ', '_').replace('-', '_').lower()}_ns", _WORDS.get(state, state), "ns")
            for state in states.states
        ),
    )
    note = "Time of each thread while the GPU was idle, between its first work and its last."
    return Table("threads", "All threads that use CUDA", columns, rows, note, True), len(busiest) - len(shown)


def _notes(run: Run, gaps: IdleGaps, kept: IdleGaps, options: Options, has_copies: bool) -> Iterator[str]:
    if len(kept) < len(gaps):
        short_ns = gaps.total_ns() - kept.total_ns()
        yield (
            f"{len(gaps) - len(kept)} gaps shorter than {options.min} are in the table of the GPUs alone: "
            f"{duration_text(short_ns)} in all"
        )
    if 0 < options.top < len(kept):
        yield f"{len(kept) - options.top} more gaps are not listed: --top 0 lists all"
    counts = run.facts.counts
    asked = run.facts.header.get("layers", {}).get("missing", {})
    for layer, meaning in _NEEDED.items():
        if not counts[layer]:
            why = f" ({asked[layer]})" if layer in asked else ""
            yield f"not recorded: {layer}{why}: {meaning}"
    nobody = flagged(len(kept), lambda part: kept.call[part] == NONE)
    if len(nobody):
        length = duration_text(int(kept.dur_ns(nobody).sum()))
        yield f"{len(nobody)} gaps, {length}: no call for what came next is known"
    if len(run.layer("transfer")) and not has_copies:
        yield "copies on the GPU are not recorded, only calls for them: their time counts as idle"
    yield from _without_length(run)
    lost = sum(run.facts.losses[layer] for layer in _OF_GPU)
    if lost:
        yield f"{lost} events of the GPU were lost: it may have worked where it counts as idle"
    bounds = [
        said.get("bound_ns") or 0 for said in run.facts.clocks if said["clock"].startswith("globaltimer")
    ]
    bound_ns = max(bounds, default=0)
    if unsure := len(flagged(len(kept), lambda part: kept.dur_ns(part) < bound_ns)):
        yield (
            f"{unsure} gaps are shorter than the bound of the GPU's clock, "
            f"{duration_text(bound_ns)}: their lengths hold, what the CPU did is uncertain by as much"
        )


def _without_length(run: Run) -> Iterator[str]:
    """What happened on a GPU and does not say how long."""
    if alone := len(run.layer("gpu_thread")):
        yield (
            f"{alone} entries and exits of single threads are left out: they do not say how "
            "long the GPU worked"
        )
    kernels = run.layer("gpu_kernel")
    if unknown := int(np.count_nonzero(kernels.end_ns <= kernels.start_ns)):
        yield f"{unknown} kernels have no known length: the GPU counts as idle then"


REPORT = Report(
    "gaps",
    Options,
    run,
)
