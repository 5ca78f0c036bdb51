"""The warps of each kernel in numbers, the ranges that its source marks, and the problems that warps show:
divergence, strides, stragglers, waves, imbalance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from tracepipe.analyses.findings import FINDERS, Searched, find_all
from tracepipe.analyses.findings.finding import FALSE_ALARM_RATE
from tracepipe.analyses.findings.kernel_warps import NOT_RECORDED, KernelWarps
from tracepipe.analyses.findings.kernels import kernels_of, wanted_warps
from tracepipe.analyses.findings.waves import (
    MIN_FILLED,
    launch_waves,
    mean_active_warps,
    one_by_one,
    order_of_exits,
)
from tracepipe.analyses.occupancy import Achieved, achieved_table
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Floats, Int64s, Ints
from tracepipe.event.groups import RowsByNumber, number_rows, sums_by
from tracepipe.libraries import np
from tracepipe.options import OTHER_RUN, Option, regex
from tracepipe.reports.kernel_choice import no_such_kernel
from tracepipe.reports.report import Column, Drawing, Report, Result, Table, not_listed, sentences
from tracepipe.reports.stalls_and_warps import side_by_side
from tracepipe.store.run import Run
from tracepipe.units import agree, counted

BINS = 24
"""Parts of a launch's duration; active warps are averaged over each."""
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = ".:-=+*#@"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe warps`."""

    kernel: Annotated[str, Option("Show kernels whose name this regular expression finds.", "REGEX")] = ""
    launch: Annotated[int | None, Option("Show only the launch with this id.", "ID")] = None
    top: Annotated[
        int, Option("Show the N kernels with the most warps, and N findings in all kernels; 0: all.", "N")
    ] = 20
    stalls: Annotated[
        str, Option("Compare the findings with the stall reasons of this recording.", OTHER_RUN)
    ] = ""


def run(run: Run, options: Options, stalls: Run | None = None) -> Result:
    """The kernels' warps in numbers, and the findings; with `stalls`, a recording of the same kernels, what
    their warps wait for. Raises TracepipeError where the pattern is invalid, or nothing is selected.
    """
    kernels = kernels_of(run, options.kernel, options.launch)
    if not kernels:
        every = kernels_of(run, "", None).names()
        if options.kernel == "" and options.launch is None:
            return Result("WARPS", [_findings(find_all([]), Counter(), 0)], [_NO_WARPS])
        if not every:
            hint = f"{_NO_WARPS[0].upper()}{_NO_WARPS[1:]}."
            raise TracepipeError("There are no warps to choose from.", hint)
        if options.launch is None or not kernels_of(run, options.kernel, None):
            raise no_such_kernel("warps", options.kernel, every)
        of_kernel = f" of a kernel with {options.kernel!r} in its name" if options.kernel else ""
        message = f"No warps of launch {options.launch}{of_kernel} were recorded."
        raise TracepipeError(message, "Leave out --launch to see all.")
    called, rows, count = kernels.names(), list[_KernelRows](), options.top or len(kernels)

    def measure(kernel: KernelWarps) -> None:
        if len(rows) < count:
            rows.append(_kernel_rows(kernel, called[kernel.kernel] > 1))

    found = find_all(kernels, measure)
    ranges = ranges_table(run, options.kernel, options.launch, options.top)
    in_order = {
        one.kernel for one in found.findings if (one.kind, one.numbers.get("of")) == ("wave", "warps")
    }
    if len({one.gpu for one in rows}) > 1:
        same = Counter(one.kernel for one in rows)
        rows = [one.with_gpu() if same[one.kernel] > 1 else one for one in rows]
    # A finding already states their order.
    rows = [one._replace(order=None) if one.kernel_name in in_order else one for one in rows]
    occupancy = achieved_table(run, [one.achieved for one in rows if one.achieved])
    of_kernels = Table("kernels", "Kernels", _SHAPE_COLUMNS, [one.shape for one in rows], _SHAPE_NOTE)
    times = Table("times", "Warps", _TIME_COLUMNS, [one.time for one in rows], _TIME_NOTE)
    parts = (of_kernels, occupancy if occupancy.rows else None, times, ranges)
    drawn = (_occupancy(rows), *_few(rows), _findings(found, called, options.top))
    result = Result("WARPS", [part for part in (*parts, *drawn) if part])
    result.notes += not_listed(len(kernels) - len(rows), "kernel|kernels, which the findings include,")
    if stalls is not None:
        together, notes = side_by_side(stalls, run, called)
        result.parts += together
        result.notes += notes
    result.notes += _limits(found, rows, len(kernels))
    return result


_NO_WARPS = (
    "neither warps nor threads with their index were recorded: "
    "tracepipe capture --gpu warps -- COMMAND records warps"
)
_SHAPE_COLUMNS = (
    Column("kernel", "kernel"),
    Column("grid", "grid", spare=True),
    Column("launches", "launches", "count"),
    Column("blocks", "blocks", "count"),
    Column("warps", "warps", "count"),
    Column("duration_p50_ns", "duration", "ns"),
    Column("sms", "SMs", "count"),
    Column("blocks_per_sm", "blocks/SM", "count"),
    Column("waves", "waves", "number"),
    Column("active_warps_per_sm", "warps/SM", "number"),
)
_SHAPE_NOTE = (
    "Blocks: of the grid; warps: of all launches. Of one launch: duration (median), blocks/SM (the most "
    "that an SM held at a time), waves (of blocks), warps/SM (active warps, the mean over the duration)."
)
_TIME_NOTE = (
    "Lifetime of a warp: from its entry to the exit of its last lane. Spread of a warp: from the exit of "
    "its first lane to that of its last. Skew of a block: from the exit of its first warp to that of its "
    "last."
)
_TIME_COLUMNS = (
    Column("kernel", "kernel"),
    Column("life_p50_ns", "lifetime p50", "ns"),
    Column("life_p95_ns", "p95", "ns"),
    Column("life_p99_ns", "p99", "ns"),
    Column("life_max_ns", "max", "ns"),
    Column("skew_p50_ns", "skew p50", "ns"),
    Column("skew_p95_ns", "p95", "ns"),
    Column("spread_p50_ns", "spread p50", "ns"),
    Column("spread_max_ns", "max", "ns"),
)
_FEW_COLUMNS = (
    Column("kernel", "kernel"),
    Column("launch", "launch", "count", spare=True),
    Column("block", "block", "count"),
    Column("warp", "warp", "count"),
    Column("leaves_ns", "first exit", "ns"),
    Column("spread_ns", "spread", "ns"),
    Column("last_lane", "last lane", "count"),
    Column("first_thread_ns", "first thread", "ns"),
    Column("last_thread_ns", "last thread", "ns"),
)


class _KernelRows(NamedTuple):
    """The rows of a kernel in the tables, and its active warps over a launch."""

    kernel: str
    kernel_name: str
    gpu: int
    shape: tuple[Any, ...]
    time: tuple[Any, ...]
    few: list[tuple[Any, ...]]
    order: str | None
    active_warps: list[float]
    achieved: Achieved | None
    still_running: int
    rows_mixed: bool

    def with_gpu(self) -> _KernelRows:
        """The same rows, which name the GPU too."""
        name = f"{self.kernel} on GPU {self.gpu}"
        return self._replace(
            kernel=name,
            shape=(name, *self.shape[1:]),
            time=(name, *self.time[1:]),
            few=[(name, *warp) for _, *warp in self.few],
            achieved=self.achieved and self.achieved._replace(title=name),
        )


def _kernel_rows(kernel: KernelWarps, has_namesakes: bool) -> _KernelRows:
    """`has_namesakes`: another kernel has the same name, and the grid distinguishes them."""
    is_timed = kernel.has_entries and kernel.has_exits
    grid = _grid_text(kernel.grid)
    name = f"{kernel.kernel} {grid}" if has_namesakes and grid else kernel.kernel
    blocks = kernel.block_count if kernel.blocks_known else None
    duration = _whole(np.median(kernel.launch_ns)) if kernel.has_exits else None
    sms = blocks_per_sm = waves = active = achieved = None
    if is_timed and kernel.has_sms:
        of_first = launch_waves(kernel, 0)
        sms, active = of_first.sms, mean_active_warps(kernel)
        blocks_per_sm = of_first.blocks_per_sm if kernel.blocks_known else None
        # Blocks that end faster than they are launched never fill the SMs, so there are no waves to count.
        waves = of_first.waves if kernel.blocks_known and of_first.filled >= MIN_FILLED else None
    if active is not None:
        achieved = Achieved(kernel.kernel, name, kernel.gpu, kernel.block_size, blocks_per_sm, active)
    counts = (int(kernel.launches.size), blocks, int(kernel.launch.size))
    life: list[int | None] = [None] * 4
    skew: list[int | None] = [None] * 2
    spread: list[int | None] = [None] * 2
    if is_timed:
        life = [*map(_whole, np.quantile(kernel.life_ns, (0.5, 0.95, 0.99, 1.0)))]
    if kernel.has_exits and kernel.blocks_known:
        skew = [*map(_whole, np.quantile(kernel.blocks.skew_ns, (0.5, 0.95)))]
    known_ns = kernel.spread_ns[kernel.spread_ns != NOT_RECORDED] if kernel.has_exits else kernel.exit_ns
    if known_ns.size:
        spread = [_whole(np.median(known_ns)), int(known_ns.max())]
    return _KernelRows(
        name,
        kernel.kernel,
        kernel.gpu,
        (name, grid, *counts, duration, sms, blocks_per_sm, waves, active),
        (name, *life, *skew, *spread),
        [(name, *warp) for warp in one_by_one(kernel)],
        order_of_exits(kernel),
        [round(float(n), 1) for n in active_warps(kernel)] if is_timed else [],
        achieved,
        kernel.still_running,
        kernel.rows_mixed,
    )


def _grid_text(grid: Iterable[int] | None) -> str | None:
    return "×".join(map(str, grid)) if grid else None


def _whole(value: float | np.floating[Any]) -> int:
    return round(float(value))


def _few(kernels: list[_KernelRows]) -> Iterator[Table | Drawing]:
    """The warps of kernels that have only a few, one by one, and the order in which they exited."""
    rows = [row for one in kernels for row in one.few]
    if rows:
        note = (
            "First exit: of the warp, after the first exit of its launch. Last lane: the lane that exited "
            "last, where one lane alone did. First thread, last thread: when the first and the last thread "
            "of the grid exited, after the median lane of their warp."
        )
        yield Table("few_warps", "Kernels with few warps, warp by warp", _FEW_COLUMNS, rows, note)
    data = [{"kernel": one.kernel, "sentence": one.order} for one in kernels if one.order]

    heading = "Orders seen, with too little data to exclude chance"
    yield sentences("orders_seen", heading, data, "order, {0[kernel]}: {0[sentence]}".format)


def active_warps(kernel: KernelWarps) -> Floats:
    """The mean number of warps that ran at a time in each of BINS parts of a launch, over all launches.

    The result has the shape `(BINS,)`.
    """
    row, begin_ns = kernel.launch_row, kernel.begin_ns
    bin_ns = np.maximum(kernel.launch_ns, 1) / BINS
    # In bins of their launch.
    entry, leave = ((ns - begin_ns[row]) / bin_ns[row] for ns in (kernel.entry_ns, kernel.last_exit_ns))
    means = np.empty(BINS)
    for at in range(BINS):
        # A warp is active in a bin for the part of it between entry and exit.
        active = np.minimum(leave, at + 1) - np.maximum(entry, at)
        means[at] = np.maximum(active, 0, out=active).sum() / kernel.launches.size
    return means


def _occupancy(kernels: list[_KernelRows]) -> Drawing:
    """The active warps over the duration of a launch, one line for each kernel whose entries are known."""
    data = [{"kernel": one.kernel, "active_warps": one.active_warps} for one in kernels if one.active_warps]

    def draw(width: int, ascii_only: bool) -> Iterator[str]:
        if not data:
            return
        yield "Active warps over a launch"
        levels = _ASCII_LEVELS if ascii_only else _LEVELS
        for row in data:
            active: Any = row["active_warps"]
            peak = max(active) or 1
            bars = "".join(levels[min(int(n / peak * len(levels)), len(levels) - 1)] for n in active)
            yield f"{bars}  up to {peak:,.0f}  {row['kernel']}"[:width]

    return Drawing("occupancy", draw, lambda: data)


def _findings(found: Searched, called: Counter[str], top: int) -> Drawing:
    """The findings as data, and as text the first `top`, or all for 0. `called`: how many kernels have each
    name.
    """

    def text(finding: dict[str, Any]) -> str:
        grid = f" {_grid_text(finding['grid'])}" if finding["grid"] and called[finding["kernel"]] > 1 else ""
        return f"{finding['kind']}, {finding['kernel']}{grid}: {finding['sentence']}"

    none = "None: no difference in these warps is beyond noise and large enough."
    if sum(map(len, found.skipped.values())) == len(FINDERS) * called.total():
        none = "None: this recording lacks what the tests need; see the notes below."
    return sentences("findings", "Findings", [one.as_json() for one in found.findings], text, none, top)


def _limits(found: Searched, kernels: list[_KernelRows], count: int) -> Iterator[str]:
    """The kinds that could not be looked for in `count` kernels, and what else limits the findings."""
    rate = f"{FALSE_ALARM_RATE:.0%}"
    yield f"false alarms: at most {rate} of recordings of uniform kernels get a finding of any one kind"
    kinds: dict[tuple[str, str], list[str]] = {}
    for kind, skipped in found.skipped.items():
        by_reason: dict[str, set[str]] = {}
        for kernel_name, reason in skipped:
            by_reason.setdefault(reason, set()).add(kernel_name)
        for reason, names in by_reason.items():
            which = "" if len(skipped) == count == len(names) else f" in {_first(sorted(names))}"
            kinds.setdefault((which, reason), []).append(kind)
    for (which, reason), of_reason in kinds.items():
        yield f"not looked for{which}: {', '.join(of_reason)}: {reason}"
    for kernel in kernels:
        if kernel.still_running:
            yield (
                f"note: {counted(kernel.still_running, 'warp|warps')} of {kernel.kernel} had not exited at "
                f"the end of the recording: {agree(kernel.still_running, 'it|they is|are')} left out"
            )
        if kernel.rows_mixed:
            yield (
                f"note: the recording names no blocks, and thread indices of {kernel.kernel} recur in "
                "another order: threads of several blocks are mixed, so small effects are not found"
            )


def _first(names: list[str]) -> str:
    """The first names of a list."""
    more = [f"{len(names) - _NAMES} more"] if len(names) > _NAMES else []
    return ", ".join([*names[:_NAMES], *more])


_NAMES = 20
_RANGE_COLUMNS = (
    Column("kernel", "kernel"),
    Column("range", "range"),
    Column("grid", "grid", spare=True),
    Column("life_percent", "share", "percent"),
    Column("count", "ranges", "count"),
    Column("warps", "warps", "count", spare=True),
    Column("p50_ns", "p50", "ns"),
    Column("p95_ns", "p95", "ns", spare=True),
    Column("max_ns", "max", "ns"),
    Column("warp_p50_ns", "per warp", "ns"),
    Column("skew_p50_ns", "skew p50", "ns"),
    Column("skew_max_ns", "max", "ns"),
)
_RANGE_NOTE = (
    "Share: of the lifetimes of all warps of the kernel, without the ranges inside. p50, p95, max: of one "
    "range. Per warp: the sum of a warp's ranges of that name (median). Skew of a block: the difference of "
    "these sums between its warps with the most and the least."
)
NO_RANGE = "(none)"


def ranges_table(run: Run, pattern: str, launch: int | None, top: int) -> Table | None:
    """The ranges of the kernels that match `pattern`, those with the most warps first: `top` kernels, or all
    for 0. With `launch`, only of launches with that id. None where no warp has a range.
    """
    table, ranges = run.warp_table, run.warp_table.ranges
    if not len(ranges["name"]):
        return None
    names = table.range_names
    kernels, of_warp = table.kernels()
    wanted = wanted_warps(run, regex(pattern), launch)
    launches, has_launch = table.column("launch")
    last_ns, has_exit = table.column("last_exit_ns")
    lives_ns = np.where(has_exit, last_ns - table.column("entry_ns")[0], 0)
    # The block of each warp, by number; warps without one are together.
    blocks, has_block = table.column("block_index")
    of_block, _ = number_rows(
        np.where(has_launch, launches, 0), has_launch, np.where(has_block, blocks, 0), has_block
    )
    ranges_of = RowsByNumber(of_warp[ranges["warp_row"]])
    rows: list[tuple[Any, ...]] = []
    warps_of = sorted(RowsByNumber(of_warp[wanted], np.flatnonzero(wanted)), key=lambda one: -len(one[1]))
    for number, warps in warps_of[: top or None]:
        is_wanted = wanted[ranges["warp_row"][ranges_of.of(number)]]
        own = ranges_of.of(number)[is_wanted]
        if not len(own):
            continue
        kernel, life_ns = kernels[number], int(lives_ns[warps].sum())
        grid = _grid_text(kernel["grid"])
        called = RowsByNumber(ranges["name"][own], own)
        of_names = [(name, int(ranges["self_ns"][some].sum()), some) for name, some in called]
        for name, self_ns, some in sorted(of_names, key=lambda one: (-one[1], one[0])):
            times = _range_times(ranges["warp_row"][some], ranges["dur_ns"][some], of_block)
            share = 100 * self_ns / life_ns if life_ns else None
            rows.append((kernel["name"], names[name], grid, share, len(some), *times))
        outside_ns = max(life_ns - sum(self_ns for _, self_ns, _ in of_names), 0)
        share = 100 * outside_ns / life_ns if life_ns else None
        rows.append((kernel["name"], NO_RANGE, grid, share, *(None,) * 8))
    return Table("ranges", "Ranges", _RANGE_COLUMNS, rows, _RANGE_NOTE, grouped=True)


def _range_times(warp: Ints, dur_ns: Int64s, of_block: Ints) -> tuple[int, ...]:
    """The cells of a row from `warps` on, of ranges in these warps, shapes `(n,)`. `of_block` has the block
    of each warp of the recording.
    """
    number, first = number_rows(warp)
    warps_ns = sums_by(number, dur_ns, len(first))
    block, first_of_block = number_rows(of_block[warp[first]])
    most_ns, least_ns = np.zeros(len(first_of_block), np.int64), np.full(len(first_of_block), 1 << 62)
    np.maximum.at(most_ns, block, warps_ns)
    np.minimum.at(least_ns, block, warps_ns)
    skews_ns = most_ns - least_ns

    def nearest(values: Int64s, share: float) -> int:
        """The value that is nearest to a quantile."""
        return int(np.sort(values)[int((len(values) - 1) * share + 0.5)])

    spread = nearest(dur_ns, 0.5), nearest(dur_ns, 0.95), int(dur_ns.max())
    return len(first), *spread, nearest(warps_ns, 0.5), nearest(skews_ns, 0.5), int(skews_ns.max())


REPORT = Report(
    "warps",
    Options,
    run,
    needs=("scipy",),
    companions={"stalls": ()},
    of_one_clock=True,
    suits=lambda run: len(run.warp_table) > 0 or len(run.layer("gpu_thread")) > 0,
)
