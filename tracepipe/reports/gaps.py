"""When the GPUs did nothing, how long, and what the CPU was doing then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from tracepipe.reports.analyses.breakdown import HOOKED
from tracepipe.reports.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.reports.analyses.gpu_contexts import context_tables
from tracepipe.reports.analyses.gpu_work import BY_ORDER, Idle, gpu_work, idle_of
from tracepipe.reports.analyses.host_states import IN_CALL, STATES, USER, HostStates
from tracepipe.reports.analyses.idle_gaps import BETWEEN, FIRST, LAST, WHERE, doing_in, gaps_of
from tracepipe.reports.analyses.launch_gaps import launch_tables
from tracepipe.reports.frames.grouping import equal, grouped
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import parts
from tracepipe.reports.report import Column, Option, Report, Result, Table
from tracepipe.units import duration_ns, duration_text

_KEYS = ("state", "call", "syscall")
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
    idle = [idle_of(work, gpu) for gpu in work["gpu"].unique().sort()]
    has_copies = bool((work["what"] == "copy").any())
    contexts = context_tables(run, work, idle, options.top)
    del work
    states = HostStates(run)
    gaps = pl.concat([gaps_of(run, one) for one in idle])
    # The names of its rows are all that is still looked at.
    idle = [replace(one, work=one.work.select("name")) for one in idle]
    is_long = gaps["dur_ns"] >= least_ns
    kept = (gaps if is_long.all() else gaps.filter(is_long)).with_row_index("gap")
    doing = doing_in(states, kept)
    result.parts.append(_gpus(run, idle, gaps))
    if len(kept):
        result.parts += [
            _causes(kept, doing, states, options.top),
            _longest(run, idle, kept, doing, states, options),
        ]
    threads, more = _threads(run, idle, states, options.top)
    if len(threads.rows) > 1:
        result.parts.append(threads)
        result.notes += (
            [f"{more} more threads that use CUDA are not listed: --top 0 lists all"] if more else []
        )
    result.parts += contexts
    result.notes += _notes(run, gaps, kept, options, has_copies)
    return result


def _state(state: str, states: HostStates) -> str:
    """A state as it is shown: user code is known as such only where nothing else could be meant."""
    whole = {"ioctl", "off-CPU"} <= states.recorded
    return "user or unrecorded" if state == USER and not whole else _WORDS.get(state, state)


def _cause(state: str, call: str | None) -> str:
    """What a thread was doing, in words."""
    if state in (IN_CALL, HOOKED):
        return f"in {call}"
    if state == "system call" and call:
        return f"{state} ({call})"
    return f"{state} in {call}" if call and call != state else state


def _in_words(states: HostStates, state: int, call: int, syscall: int) -> tuple[str, str | None, str | None]:
    return STATES[state], states.name(call), states.name(syscall)


def _gpus(run: Run, idle: list[Idle], gaps: pl.DataFrame) -> Table:
    names = {gpu.get("index"): gpu.get("name") for gpu in (run.facts.footer or {}).get("gpus", [])}
    rows = []
    for one in idle:
        own = gaps.filter(gpu=one.gpu)
        lengths = {where: own.filter(where=where)["dur_ns"] for where in (BETWEEN, FIRST, LAST)}
        busy_ns = int((one.busy.end_ns - one.busy.start_ns).sum())
        total_ns, _, *spread = of_values(lengths[BETWEEN].to_numpy())
        idle_ns = total_ns or 0
        queued_ns = int(_queued(own.filter(where=BETWEEN)).sum())
        rows.append(
            (
                one.gpu,
                names.get(one.gpu),
                busy_ns,
                idle_ns,
                100 * idle_ns / (busy_ns + idle_ns),
                queued_ns,
                len(lengths[BETWEEN]),
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


def _queued(gaps: pl.DataFrame) -> pl.Series:
    """How much of each gap passed after the call for what came next had returned; null where unknown."""
    returned = pl.col("call_end_ns").clip(pl.col("start_ns"), pl.col("end_ns"))
    by_id = pl.col("told_by") != BY_ORDER
    return gaps.select(pl.when(by_id).then(pl.col("end_ns") - returned))["end_ns"]


def _causes(gaps: pl.DataFrame, doing: dict[str, Any], states: HostStates, top: int) -> Table:
    # Gaps are in the order of their numbers.
    gpu_of = gaps["gpu"].to_numpy()[doing["gap"]]
    is_where = {one: (gaps["where"] == one).to_numpy()[doing["gap"]] for one in WHERE}
    dur_ns = doing["dur_ns"]
    of, first = equal(*(doing[key] for key in _KEYS))
    rows = []
    for gpu in pl.Series(gpu_of).unique(maintain_order=True):
        own = np.flatnonzero(gpu_of == gpu)
        idle_ns = int(dur_ns[own][is_where[BETWEEN][own]].sum())
        of_gpu: list[tuple[Any, ...]] = []
        for number, places in grouped(of[own]):
            state, call, syscall = _in_words(states, *(int(doing[key][first[number]]) for key in _KEYS))
            at = {where: own[places][is_where[where][own[places]]] for where in WHERE}
            lengths = dur_ns[at[BETWEEN]]
            total_ns, _, *spread = of_values(lengths)
            outside = (int(dur_ns[at[where]].sum()) for where in (FIRST, LAST))
            share = 100 * (total_ns or 0) / idle_ns if idle_ns else None
            of_gpu.append(
                (
                    f"GPU {gpu}",
                    _state(state, states),
                    call or syscall,
                    len(lengths),
                    total_ns or 0,
                    share,
                    *spread,
                    *outside,
                )
            )
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
        f"{', and that before hooked functions' if HOOKED in states.states else ''}. "
        "Percentiles: of its time in one gap."
    )
    return Table("causes", "Idle time by what the CPU did", columns, rows, note, grouped=True)


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
    idle: list[Idle],
    gaps: pl.DataFrame,
    doing: dict[str, Any],
    states: HostStates,
    options: Options,
) -> Table:
    ordered = gaps.select("gap", "dur_ns", "start_ns").sort("dur_ns", "start_ns", descending=[True, False])
    shown = gaps[(ordered.head(options.top) if options.top > 0 else ordered)["gap"]]
    some = np.flatnonzero(np.isin(doing["gap"], shown["gap"].to_numpy()))
    most = pl.DataFrame({key: column[some] for key, column in doing.items()}).sort("dur_ns", descending=True)
    main = {row[0]: row[1:] for row in most.unique("gap", keep="first", maintain_order=True).iter_rows()}
    queued, work = _queued(shown), {one.gpu: one.work["name"] for one in idle}
    rows = []
    for at, gap in enumerate(shown.iter_rows(named=True)):
        *numbers, dur_ns = main[gap["gap"]]
        state, call, syscall = _in_words(states, *numbers)
        previous, following = (
            None if gap[key] is None else work[gap["gpu"]][gap[key]] for key in ("previous", "following")
        )
        share = 100 * dur_ns / gap["dur_ns"]
        ended_by = states.name(gap["call"]) if following and gap["call"] is not None else None
        rows.append(
            (
                gap["gpu"],
                gap["start_ns"] - run.facts.start_ns,
                gap["dur_ns"],
                previous or "(start of the recording)",
                following or "(end of the recording)",
                f"{ended_by} ?" if ended_by and gap["told_by"] == BY_ORDER else ended_by,
                gap["tid"],
                queued[at] if following else None,
                _cause(_state(state, states), call or syscall),
                share,
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
            for part in states.of((pid, tid), one.start_ns, one.end_ns):
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


def _notes(
    run: Run, gaps: pl.DataFrame, kept: pl.DataFrame, options: Options, has_copies: bool
) -> Iterator[str]:
    if len(kept) < len(gaps):
        short_ns = int(gaps["dur_ns"].sum()) - int(kept["dur_ns"].sum())
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
    nobody = kept["dur_ns"].filter(kept["call"].is_null())
    if len(nobody):
        length = duration_text(int(nobody.sum()))
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
    if unsure := int((kept["dur_ns"] < max(bounds, default=0)).sum()):
        yield (
            f"{unsure} gaps are shorter than the bound of the GPU's clock, "
            f"{duration_text(max(bounds))}: their lengths hold, what the CPU did is uncertain by as much"
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
