"""Heat maps: how many warps each SM holds over time, a picture for each stretch in which a GPU works."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from tracepipe.reports.figures.ink import RULE, SERIES, heat, moment_text, unit_of
from tracepipe.reports.figures.panel import Panel, Scope, gpu_name, gpus_of, short, sm_count
from tracepipe.reports.frames.grouping import sorted_by
from tracepipe.reports.frames.intervals import Stretches, nothing
from tracepipe.reports.frames.libraries import np, pl, ticker
from tracepipe.reports.frames.stored import ROWS_AT_ONCE
from tracepipe.units import duration_text

CELLS = 480
ROWS_MAX = 512
STRETCHES_MAX = 4
SM_NOT_RECORDED = -1
_TIMES = ("entry_ns", "end_ns")


@dataclass(frozen=True, slots=True)
class Grid:
    """Active warps: the mean of each cell, an array of (rows, cells).

    `sms`: the SM of each row, the first one where a row has the mean of several, `sms_in_row`.
    """

    start_ns: int
    end_ns: int
    level: Any
    sms: Any
    sms_in_row: int

    @property
    def cell_ns(self) -> float:
        return float(self.end_ns - self.start_ns) / int(self.level.shape[1])


def panels(scope: Scope) -> list[Panel]:
    """A heat map for each GPU and each stretch of work, those with most warp time."""
    warps = scope.warps()
    if not len(warps):
        return [Panel(_none(scope))]
    found: list[Panel] = []
    drawn, left_out = gpus_of(warps)
    for gpu in drawn:
        part = warps.filter(gpu=gpu)
        whole = nothing()
        for some in part.iter_slices(ROWS_AT_ONCE):
            times = (np.clip(some[key].to_numpy(), scope.start_ns, scope.end_ns) for key in _TIMES)
            whole = whole.joined(Stretches(*times))
        stretches = [(scope.start_ns, scope.end_ns)] if scope.is_cut else bursts(whole)
        shown = _most_work(part, stretches)
        found += [_panel(scope, gpu, part, start_ns, end_ns) for start_ns, end_ns in shown]
        if not stretches:
            found.append(Panel(f"{gpu_name(scope.run, gpu)}: no warp has a length"))
        if len(shown) < len(stretches):
            more = f"{len(stretches) - len(shown)} more stretches, with less work, are not drawn"
            found.append(Panel(f"{gpu_name(scope.run, gpu)}: {more}: --start, --end and --kernel choose"))
    return found + left_out


def _none(scope: Scope) -> str:
    if len(scope.run.warp_table):
        which = f" of a kernel that {scope.kernel!r} finds" if scope.kernel else ""
        return f"No warp{which} ran{scope.place()}"
    if len(scope.run.layer("gpu_thread")):
        return "The recording has single threads and no warps with their SM: there is no occupancy to draw"
    return "No warps were recorded"


def bursts(busy: Stretches) -> list[tuple[int, int]]:
    """Stretches of work, those joined that are nearer to each other than they are long."""
    found: list[tuple[int, int]] = []
    for start_ns, end_ns in zip(busy.start_ns.tolist(), busy.end_ns.tolist(), strict=True):
        if found and start_ns - found[-1][1] <= (found[-1][1] - found[-1][0]) + (end_ns - start_ns):
            found[-1] = (found[-1][0], end_ns)
        else:
            found.append((start_ns, end_ns))
    return found


def _most_work(warps: pl.DataFrame, stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stretches with most warp time, in the order of time."""
    if len(stretches) <= STRETCHES_MAX:
        return stretches
    of_stretch = (
        np.searchsorted([start_ns for start_ns, _ in stretches], warps["entry_ns"].to_numpy(), "right") - 1
    )
    stay_ns = (warps["end_ns"] - warps["entry_ns"]).to_numpy()
    work = np.bincount(of_stretch.clip(0), stay_ns, len(stretches))
    return [stretches[at] for at in sorted(np.argsort(-work, kind="stable")[:STRETCHES_MAX])]


def grid_of(warps: pl.DataFrame, start_ns: int, end_ns: int, sms_known: int | None) -> Grid:
    """How many warps there are on each SM in each cell of a stretch.

    All SMs of the GPU are rows, idle ones too; where fewer than half hold warps, those alone.
    """
    of_warp = warps["sm"].fill_null(SM_NOT_RECORDED).to_numpy()
    sms = np.unique(of_warp)
    if sms_known and len(sms) * 2 >= sms_known > int(sms[-1]) and sms[0] != SM_NOT_RECORDED:
        sms = np.arange(sms_known)
    in_row = -(-len(sms) // ROWS_MAX)
    cells = max(1, min(CELLS, end_ns - start_ns))
    rows = -(-len(sms) // in_row)
    entered, left = (_Since(rows, cells, end_ns - start_ns) for _ in _TIMES)
    for part in warps.iter_slices(ROWS_AT_ONCE):
        row = np.searchsorted(sms, part["sm"].fill_null(SM_NOT_RECORDED).to_numpy()) // in_row
        for key, since in zip(_TIMES, (entered, left), strict=True):
            since.add(row, np.clip(part[key].to_numpy(), start_ns, end_ns) - start_ns)
    # What is rounding of a sum is no warp.
    level = (
        np.diff(entered.time_ns() - left.time_ns(), axis=1, prepend=0.0)
        / ((end_ns - start_ns) / cells)
        / in_row
    )
    return Grid(start_ns, end_ns, np.where(level > 1e-9, level, 0), sms[::in_row], in_row)


class _Since:
    """For each row and the end of each cell: the time since every event before it, added up."""

    def __init__(self, rows: int, cells: int, length_ns: int) -> None:
        self._shape, self._length_ns = (rows, cells), length_ns
        self._count, self._total_ns = np.zeros(rows * cells, np.int64), np.zeros(rows * cells)

    def add(self, row: Any, ts_ns: Any) -> None:
        """Events in these rows at these times."""
        cells = self._shape[1]
        # As floats, as a long time in ns many times over is no 64-bit number.
        cell = np.minimum((ts_ns / (self._length_ns / cells)).astype(np.int64), cells - 1)
        place = row * cells + cell
        self._count += np.bincount(place, minlength=self._count.size)
        np.add.at(self._total_ns, place, ts_ns)

    def time_ns(self) -> Any:
        count, total_ns = (of.reshape(self._shape).cumsum(axis=1) for of in (self._count, self._total_ns))
        cells = self._shape[1]
        return count * (np.arange(1, cells + 1) * (self._length_ns / cells)) - total_ns


def most_at_once(warps: pl.DataFrame) -> tuple[int, int]:
    """The most warps that an SM held at a time, and that SM."""
    sm = warps["sm"].fill_null(SM_NOT_RECORDED).to_numpy()
    stays = np.flatnonzero((warps["end_ns"] > warps["entry_ns"]).to_numpy())
    most = 0, int(sm[0])
    if not len(stays):
        return most
    entry_ns, end_ns = (warps[key].to_numpy() for key in _TIMES)
    order, bounds = sorted_by(sm[stays] - SM_NOT_RECORDED)
    stays = stays[order]
    del order
    for first, last in pairwise(bounds.tolist()):
        own = stays[first:last]
        ts_ns = np.concatenate((entry_ns[own], end_ns[own]))
        change = np.repeat((1, -1), len(own))
        # One that leaves makes room for one that enters then.
        level = int(np.cumsum(change[np.lexsort((change, ts_ns))]).max())
        if level > most[0]:
            most = level, int(sm[own[0]])
    return most


def _panel(scope: Scope, gpu: int, warps: pl.DataFrame, start_ns: int, end_ns: int) -> Panel:
    part = warps.filter((pl.col("entry_ns") < end_ns) & (pl.col("end_ns") > start_ns))
    grid = grid_of(part, start_ns, end_ns, sm_count(scope.run, gpu)) if len(part) else None
    where = gpu_name(scope.run, gpu)
    if grid is None:
        return Panel(f"{where}: no warp ran{scope.place()}")
    after = moment_text(start_ns - scope.run.facts.start_ns, end_ns - start_ns)
    how = (
        f"Each cell is the mean number of warps between their entry and last exit on {_row_of(grid)} over "
        f"{duration_text(grid.cell_ns)}, grey where there is none; above it, their sum over all SMs."
    )
    rows = int(grid.level.shape[0])
    draw = partial(_draw, grid, f"after {after} of the run")
    return Panel(
        f"{where}: {_what(part, scope, gpu, start_ns, end_ns)}",
        how,
        1.25 + _map_in(rows),
        draw,
    )


def _map_in(rows: int) -> float:
    """How high so many rows are drawn, inches."""
    return min(3.6, max(0.5, rows * 0.16))


def _row_of(grid: Grid) -> str:
    return "an SM" if grid.sms_in_row == 1 else f"{grid.sms_in_row} SMs"


def _what(warps: pl.DataFrame, scope: Scope, gpu: int, start_ns: int, end_ns: int) -> str:
    names = warps["name"].drop_nulls().unique(maintain_order=True)
    kernels = short(names[0]) if len(names) == 1 else f"{len(names)} kernels"
    launches = warps.select("launch", "name").n_unique()
    times = "" if launches == len(names) else f" in {launches} launches"
    length = duration_text(end_ns - start_ns)
    launch = warps["launch"][0]
    if launches == 1 and launch is not None:
        kernels = f"{kernels}, launch {launch}"
    most, sm = most_at_once(warps)
    what = f"{kernels}{times}: {len(warps):,} warps"
    if sm == SM_NOT_RECORDED:
        return f"{what} in {length}, at most {most:,} at once, on SMs not recorded"
    known, used = sm_count(scope.run, gpu), warps["sm"].n_unique()
    of_all = f" of {known}" if known and known >= used else ""
    return f"{what} on {used}{of_all} SMs in {length}, at most {most} at once on an SM"


def _draw(grid: Grid, after: str, figure: Any) -> None:
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
    above.grid(axis="y", color=RULE, linewidth=0.6)
    above.set_axisbelow(True)
    above.tick_params(labelbottom=False)
    image = axes.imshow(
        np.ma.masked_equal(grid.level, 0),
        aspect="auto",
        interpolation="nearest",
        cmap=heat(),
        vmin=0,
        extent=(0, length, rows - 0.5, -0.5),
    )
    _label_rows(axes, grid.sms)
    axes.set_xlabel(f"time {after} ({unit})")
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=[above, axes], pad=0.015, fraction=0.03, aspect=30)
    bar.set_label("active warps\non an SM")
    bar.outline.set_visible(False)
    bar.locator = ticker.MaxNLocator(6, integer=float(grid.level.max()) >= 1)
    bar.update_ticks()


def _label_rows(axes: Any, sms: Any) -> None:
    """Each row by its SM while there is room, then some."""
    step = next(
        step for step in (1, 2, 4, 8, 12, 16, 24, 32, 64, 128) if len(sms) / step <= 24 or step == 128
    )
    axes.set_yticks(range(0, len(sms), step))
    axes.set_yticklabels(["?" if sm == SM_NOT_RECORDED else str(sm) for sm in sms[::step]])
    axes.set_ylabel("SM")
