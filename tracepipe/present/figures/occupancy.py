"""Heat maps: the number of warps on each SM over time, a picture for each stretch in which a GPU works."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tracepipe.event.columns import Bools, Floats, Int64s, Ints, distinct
from tracepipe.event.groups import RowsByNumber, sorted_runs
from tracepipe.event.intervals import Stretches, most_at_once
from tracepipe.libraries import matplotlib, np, ticker
from tracepipe.present.figures.panel import (
    SERIES,
    Panel,
    Scope,
    gpu_name,
    gpus_of,
    heat,
    moment_text,
    rule,
    short,
    sm_count,
    unit_of,
)
from tracepipe.units import counted, duration_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS = 480
ROWS_MAX = 512
STRETCHES_MAX = 4


NOT_RECORDED = -1
"""The value of an unknown SM, of an unknown name, and of a launch id where `has_launch` is False."""


class DrawnWarps(NamedTuple):
    """Columns of shape `(warps,)`, in the order of the file. `name` is an index into `names`. `end_ns` is the
    end of the run for a warp that never exited.
    """

    sm: Ints
    entry_ns: Int64s
    end_ns: Int64s
    gpu: Ints
    launch: Ints
    has_launch: Bools
    name: Ints
    names: Sequence[str] = ()

    def select(self, some: Bools) -> DrawnWarps:
        """The warps with some flags."""
        columns: tuple[Any, ...] = self[:-1]
        return DrawnWarps._make([*(column[some] for column in columns), self.names])


def drawn_warps(scope: Scope) -> DrawnWarps:
    """The warps that touch the window, of the kernels that are drawn."""
    table = scope.run.warp_table
    every = slice(0, len(table))
    entry_ns, end_ns = table.times_ns(every, scope.run.facts.end_ns)
    is_drawn = (entry_ns <= scope.end_ns) & (end_ns >= scope.start_ns)
    if scope.kernel and len(table):
        wanted = re.compile(scope.kernel)
        flags = table.launches.flags_by_names(lambda name: wanted.search(name) is not None)
        is_drawn &= flags[table.launch_of(every)]
    rows = np.flatnonzero(is_drawn)
    (sm, has_sm), (gpu, has_gpu), (launch, has_launch), (name, has_name) = (
        table.column(of, rows) for of in ("sm", "gpu", "launch", "name")
    )
    numbers = distinct(name[has_name])
    return DrawnWarps(
        np.where(has_sm, sm, NOT_RECORDED),
        entry_ns[rows],
        end_ns[rows],
        np.where(has_gpu, gpu, 0),
        np.where(has_launch, launch, 0),
        has_launch,
        np.where(has_name, np.searchsorted(numbers, name), NOT_RECORDED),
        [*map(table.launches.name, numbers.tolist())],
    )


@dataclass(frozen=True, slots=True)
class Grid:
    """The mean number of active warps in each cell: `level`, shape `(rows, cells)`.

    `sms` has the SM of each row, shape `(rows,)`: the first one, where a row is the mean of `sms_in_row` SMs.
    """

    start_ns: int
    end_ns: int
    level: Floats
    sms: Ints
    sms_in_row: int

    @property
    def cell_ns(self) -> float:
        return float(self.end_ns - self.start_ns) / int(self.level.shape[1])


def panels(scope: Scope) -> list[Panel]:
    """A heat map for each GPU and each stretch of work, those with the most warp time."""
    warps = drawn_warps(scope)
    if not len(warps.sm):
        which = f" of a kernel matching {scope.kernel!r}" if scope.kernel else ""
        what = "No warps were recorded"
        if len(scope.run.warp_table):
            what = f"No warp{which} ran{scope.place()}"
        elif len(scope.run.layer("gpu_thread")):
            what = "Single threads were recorded, but no warps with their SMs: occupancy is not known"
        return [Panel(what)]
    found: list[Panel] = []
    gpus, counts = np.unique(warps.gpu, return_counts=True)
    drawn, left_out = gpus_of(dict(zip(gpus.tolist(), counts.tolist(), strict=True)))
    for gpu in drawn:
        of_gpu = warps.select(warps.gpu == gpu)
        times = (np.clip(of, scope.start_ns, scope.end_ns) for of in (of_gpu.entry_ns, of_gpu.end_ns))
        stretches = [(scope.start_ns, scope.end_ns)] if scope.is_cut else bursts(Stretches(*times))
        shown = stretches
        if len(stretches) > STRETCHES_MAX:
            # Those with the most warp time, in the order of time.
            starts_ns = [start_ns for start_ns, _ in stretches]
            of_stretch = (np.searchsorted(starts_ns, of_gpu.entry_ns, "right") - 1).clip(0)
            work = np.bincount(of_stretch, of_gpu.end_ns - of_gpu.entry_ns, len(stretches))
            shown = [stretches[at] for at in sorted(np.argsort(-work, kind="stable")[:STRETCHES_MAX])]
        found += [_panel(scope, gpu, of_gpu, start_ns, end_ns) for start_ns, end_ns in shown]
        if not stretches:
            found.append(Panel(f"{gpu_name(scope.run, gpu)}: no warp has a length"))
        if len(shown) < len(stretches):
            words = "more stretch|stretches, with less work, is|are not drawn"
            more = (
                f"{counted(len(stretches) - len(shown), words)}: tracepipe plot has --start, --end, --kernel"
            )
            found.append(Panel(f"{gpu_name(scope.run, gpu)}: {more}"))
    return found + left_out


def bursts(busy: Stretches) -> list[tuple[int, int]]:
    """Stretches of work as (start, end); two are joined if the gap between them is no longer than both."""
    found: list[tuple[int, int]] = []
    for start_ns, end_ns in zip(busy.start_ns.tolist(), busy.end_ns.tolist(), strict=True):
        if found and start_ns - found[-1][1] <= (found[-1][1] - found[-1][0]) + (end_ns - start_ns):
            found[-1] = (found[-1][0], end_ns)
        else:
            found.append((start_ns, end_ns))
    return found


def grid_of(warps: DrawnWarps, start_ns: int, end_ns: int, sms_known: int | None) -> Grid:
    """The number of warps on each SM in each cell of a stretch.

    All SMs of the GPU are rows, also idle ones. Where fewer than half of them hold warps, only those are.
    """
    sms = distinct(warps.sm)
    if sms_known and len(sms) * 2 >= sms_known > int(sms[-1]) and sms[0] != NOT_RECORDED:
        sms = np.arange(sms_known)
    in_row = -(-len(sms) // ROWS_MAX)
    cells = max(1, min(CELLS, end_ns - start_ns))
    rows = -(-len(sms) // in_row)
    row, cell_ns = np.searchsorted(sms, warps.sm) // in_row, (end_ns - start_ns) / cells

    def since_ns(times_ns: Int64s) -> Floats:
        """For each row and the end of each cell, the sum of the times since all events before it."""
        # Floats, as a sum of long times in ns exceeds 64 bits.
        after_ns = (np.clip(times_ns, start_ns, end_ns) - start_ns).astype(np.float64)
        place = row * cells + np.minimum((after_ns / cell_ns).astype(np.int64), cells - 1)
        count, total_ns = (
            np.bincount(place, weights, rows * cells).reshape(rows, cells).cumsum(axis=1)
            for weights in (None, after_ns)
        )
        found: Floats = count * (np.arange(1, cells + 1) * cell_ns) - total_ns
        return found

    spent_ns = since_ns(warps.entry_ns) - since_ns(warps.end_ns)
    # A tiny level is the rounding of a sum, not a warp.
    level = np.diff(spent_ns, axis=1, prepend=0.0) / cell_ns / in_row
    # float32 saves memory, as there may be many pictures.
    level = np.where(level > 1e-9, level, 0).astype(np.float32)
    return Grid(start_ns, end_ns, level, sms[::in_row], in_row)


def fullest_sm(warps: DrawnWarps) -> tuple[int, int]:
    """The most warps that one SM held at a time, and that SM."""
    stay = warps.select(warps.end_ns > warps.entry_ns)
    held = ((most_at_once(stay.entry_ns[own], stay.end_ns[own]), sm) for sm, own in RowsByNumber(stay.sm))
    return max(held, key=lambda one: one[0], default=(0, int(warps.sm[0])))


def _panel(scope: Scope, gpu: int, warps: DrawnWarps, start_ns: int, end_ns: int) -> Panel:
    part = warps.select((warps.entry_ns < end_ns) & (warps.end_ns > start_ns))
    where = gpu_name(scope.run, gpu)
    if not len(part.sm):
        return Panel(f"{where}: no warp ran{scope.place()}")
    grid = grid_of(part, start_ns, end_ns, sm_count(scope.run, gpu))
    after = moment_text(start_ns - scope.run.facts.start_ns, end_ns - start_ns)
    of_row = "an SM" if grid.sms_in_row == 1 else f"{grid.sms_in_row} SMs"
    how = (
        f"Each cell is the mean number of warps between their entry and last exit on {of_row} over "
        f"{duration_text(grid.cell_ns)}, grey where there are none. Above it: the sum over all SMs."
    )
    rows = int(grid.level.shape[0])
    title = f"{where}: {_what(part, scope, gpu, start_ns, end_ns)}"
    draw = partial(_draw, grid, f"after {after} of the run")
    return Panel(title, how, 1.25 + _map_in(rows), draw)


def _map_in(rows: int) -> float:
    """The height of a map of `rows` rows in inches."""
    return min(3.6, max(0.5, rows * 0.16))


def _what(warps: DrawnWarps, scope: Scope, gpu: int, start_ns: int, end_ns: int) -> str:
    names = [at for at in distinct(warps.name).tolist() if at != NOT_RECORDED]
    kernels = short(warps.names[names[0]]) if len(names) == 1 else f"{len(names)} kernels"
    launches = len(sorted_runs(warps.launch, warps.has_launch, warps.name)[1])
    times = "" if launches == len(names) else f" in {launches} launches"
    length = duration_text(end_ns - start_ns)
    if launches == 1 and warps.has_launch[0]:
        kernels = f"{kernels}, launch {warps.launch[0]}"
    most, sm = fullest_sm(warps)
    what = f"{kernels}{times}: {len(warps.sm):,} warps"
    if sm == NOT_RECORDED:
        return f"{what} in {length}, at most {most:,} at a time; their SMs were not recorded"
    used = len(distinct(warps.sm[warps.sm != NOT_RECORDED]))
    known = sm_count(scope.run, gpu)
    of_all = f" of {known}" if known and known >= used else ""
    return f"{what} on {used}{of_all} SMs in {length}, at most {most} at a time on one SM"


def _draw(grid: Grid, after: str, figure: Figure) -> None:
    size_ns, unit = unit_of(grid.end_ns - grid.start_ns)
    length = (grid.end_ns - grid.start_ns) / size_ns
    rows, cells = grid.level.shape
    heights = {"height_ratios": [0.55, _map_in(rows)]}
    above, axes = figure.subplots(2, 1, sharex=True, gridspec_kw=heights)
    total = grid.level.sum(axis=0) * grid.sms_in_row
    edges = np.linspace(0, length, cells + 1)
    above.stairs(total, edges, fill=True, color=SERIES, linewidth=0)
    above.set_ylim(0, float(total.max()) * 1.05 or 1)
    above.set_ylabel("warps,\nall SMs")
    above.yaxis.set_major_locator(ticker.MaxNLocator(3, integer=True))
    rule(above, "y")
    above.tick_params(labelbottom=False)
    # An SVG contains every cell. Colours computed here take a fifth of the time that matplotlib would take.
    level = np.ma.masked_equal(grid.level, 0)
    colours = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, level.max()), heat())
    extent = (0, length, rows - 0.5, -0.5)
    axes.imshow(colours.to_rgba(level, bytes=True), aspect="auto", interpolation="none", extent=extent)
    # All SMs are labelled, or as many as fit.
    steps = (1, 2, 4, 8, 12, 16, 24, 32, 64)
    step = next((step for step in steps if rows / step <= 24), 128)
    labels = ["?" if sm == NOT_RECORDED else str(sm) for sm in grid.sms[::step]]
    axes.set_yticks(range(0, rows, step), labels)
    axes.set_ylabel("SM")
    axes.set_xlabel(f"time {after} ({unit})")
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(colours, ax=[above, axes], pad=0.015, fraction=0.03, aspect=30)
    bar.set_label("active warps\non an SM")
    bar.outline.set_visible(False)
    bar.locator = ticker.MaxNLocator(6, integer=float(grid.level.max()) >= 1)
    bar.update_ticks()
