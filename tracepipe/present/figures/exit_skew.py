"""Exit skew: when the warps of a kernel exit after the first of their launch, and how far apart their lanes
exit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from tracepipe.event.groups import RowsByNumber
from tracepipe.present.figures.ink import ACCENT, FAINT, LATE, SERIES, rule, unit_of
from tracepipe.present.figures.panel import Panel, Scope, short
from tracepipe.reports.frames.arrays import Floats, Ints
from tracepipe.reports.frames.libraries import collections, np, ticker
from tracepipe.units import agree, counted, duration_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tracepipe.analyses.findings.kernel_warps import KernelWarps
    from tracepipe.analyses.findings.kernels import Kernels

KERNELS_MAX = 6
# Up to this number each warp is drawn.
WARPS_MAX = 1000
BINS_MAX = 240
_IN_BIN = 16


@dataclass(frozen=True, slots=True)
class Exits:
    """Columns of shape `(warps,)`: place on the grid, first and last exit in ns after the first exit of the
    launch, and the time from the first lane's exit to the last one's.
    """

    warp: Ints
    first_ns: Ints
    last_ns: Ints
    apart_ns: Ints

    def __len__(self) -> int:
        return len(self.warp)


@dataclass(frozen=True, slots=True)
class Groups:
    """The distribution of the values of groups of neighbours on the grid; nan where a group has no warp.
    `edges` has the shape `(groups + 1,)`, the others `(groups,)`.
    """

    edges: Floats
    least: Floats
    p5: Floats
    p50: Floats
    p95: Floats
    most: Floats


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn: each of a few warps (`each`), else groups of them; and the ranges of the axes."""

    warps: tuple[int, int]
    last_ns: tuple[int, int]
    apart_ns: tuple[int, int]
    each: Exits | None = None
    last: Groups | None = None
    apart: Groups | None = None


def panels(scope: Scope) -> list[Panel]:
    """A panel for each kernel whose exits are known, those with the most warps."""
    from tracepipe.analyses.findings.kernels import kernels_of

    kernels = kernels_of(scope.run, scope.kernel, None)
    names = Counter(kernel.kernel for kernel, _ in _timed(kernels, scope))
    if not names:
        return [Panel(_none(scope, bool(kernels)))]
    drawn = islice(_timed(kernels, scope), KERNELS_MAX)
    found = [_panel(_called(kernel, names), kernel, rows, scope) for kernel, rows in drawn]
    if names.total() > KERNELS_MAX:
        words = "more kernel|kernels, with fewer warps, is|are not drawn"
        found.append(Panel(counted(names.total() - KERNELS_MAX, words)))
    return found


def _timed(kernels: Kernels, scope: Scope) -> Iterator[tuple[KernelWarps, Ints]]:
    """The kernels with warps that exited in the window, and the rows of these warps."""
    for kernel in kernels:
        if kernel.has_exits and len(rows := _inside(kernel, scope)):
            yield kernel, rows


def _none(scope: Scope, any_warps: bool) -> str:
    if not len(scope.run.warp_table) and not len(scope.run.layer("gpu_thread")):
        return "No warps and no GPU threads were recorded"
    which = f" of a kernel matching {scope.kernel!r}" if scope.kernel else ""
    return (
        f"No exit of a warp{which} was recorded{scope.place()}"
        if any_warps or which
        else "No exits were recorded"
    )


def _inside(kernel: KernelWarps, scope: Scope) -> Ints:
    """The rows of the kernel's warps that exited in the window. Shape `(n,)`."""
    rows = np.flatnonzero((kernel.last_exit_ns >= scope.start_ns) & (kernel.last_exit_ns <= scope.end_ns))
    kernel.forget()
    return rows


def _exits(kernel: KernelWarps, rows: Ints) -> Exits:
    """The exits of some rows of a kernel's warps."""
    begin_ns = np.minimum.reduceat(kernel.first_exit_ns, kernel.launch_starts)[kernel.launch_row[rows]]
    first_ns, last_ns = kernel.first_exit_ns[rows] - begin_ns, kernel.last_exit_ns[rows] - begin_ns
    warp = kernel.block[rows] * (int(kernel.warp.max()) + 1) + kernel.warp[rows]
    kernel.forget()
    return Exits(warp, first_ns, last_ns, last_ns - first_ns)


def _called(kernel: KernelWarps, names: Counter[str]) -> str:
    """The kernel's name, with its grid where another kernel has the same name."""
    if names[kernel.kernel] == 1 or kernel.grid is None:
        return short(kernel.kernel)
    return f"{short(kernel.kernel)} (grid {'×'.join(str(size) for size in kernel.grid)})"


def _panel(name: str, kernel: KernelWarps, rows: Ints, scope: Scope) -> Panel:
    exits = _exits(kernel, rows)
    count, apart = len(exits), int(np.count_nonzero(exits.apart_ns))
    launches = int(kernel.launches.size)
    times = f" in {launches} launches" if launches > 1 else ""
    picture = _picture(exits, apart > 0)
    if count == 1 and not apart:
        return Panel(f"{name}: all lanes of its only warp exit together{scope.place()}")
    warps = f"{count:,} {agree(count, 'warp|warps')}{times} {agree(count, 'exits|exit')}"
    title = f"{name}: {warps} within {duration_text(picture.last_ns[1])}{scope.place()}"
    if apart:
        title += f"; in {apart:,} of them the lanes exit up to {duration_text(picture.apart_ns[1])} apart"
    else:
        title += "; the lanes of each exit together"
    how = "Time of each warp's last exit after the first exit of its launch"
    if count > WARPS_MAX:
        how += f", in {_bins(count)} groups of neighbours on the grid: range, 5% to 95%, median"
    elif apart:
        how += ", as a dot, with a line from the exit of its first lane"
    if apart:
        how += "; below it, the time from the first lane's exit to the last one's"
    if kernel.lanes_timed:
        how += ". Each thread was timed separately, so lanes also differ by noise"
    return Panel(title, f"{how}.", 3.9 if apart else 2.7, partial(_draw, picture, apart > 0))


def _picture(exits: Exits, apart: bool) -> Picture:
    """What a picture of exits needs, which stays small with any number of them."""
    warps, last_ns, apart_ns = (
        (int(of.min()), int(of.max())) for of in (exits.warp, exits.last_ns, exits.apart_ns)
    )
    if len(exits) <= WARPS_MAX:
        return Picture(warps, last_ns, apart_ns, each=exits)
    low, high = warps[0], warps[1] + 1
    bins = min(_bins(len(exits)), high - low)
    edges = low + np.arange(bins + 1) * ((high - low) / bins)
    rows_of = RowsByNumber(np.minimum((exits.warp - low) / ((high - low) / bins), bins - 1).astype(np.int32))
    values = (exits.last_ns, exits.apart_ns)[: 1 + apart]
    return Picture(warps, last_ns, apart_ns, None, *(_groups(edges, rows_of, of) for of in values))


def _groups(edges: Floats, rows_of: RowsByNumber, values: Ints) -> Groups:
    """Range, percentiles and median of the values in each group."""
    found = np.full((5, len(edges) - 1), np.nan)
    for at, rows in rows_of:
        own = np.sort(values[rows])
        five = round((len(own) - 1) * 0.05)
        found[:, at] = own[0], own[five], np.median(own), own[len(own) - 1 - five], own[-1]
    return Groups(edges, *found)


def _draw(picture: Picture, apart: bool, figure: Figure) -> None:
    heights = {"height_ratios": [3, 2] if apart else [1]}
    rows = figure.subplots(len(heights["height_ratios"]), 1, sharex=True, squeeze=False, gridspec_kw=heights)[
        :, 0
    ]
    many, each = picture.each is None, picture.each
    size_ns, unit = unit_of(float(picture.last_ns[1]))
    if picture.last:
        _draw_groups(rows[0], picture.last, size_ns)
        rows[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.1)
    elif each:
        _draw_each(rows[0], each.warp, each.first_ns / size_ns, each.last_ns / size_ns, (ACCENT, SERIES, "o"))
    least, most = (of / size_ns for of in picture.last_ns)
    _value_axis(rows[0], (least, most), many, f"last exit after the\nlaunch's first ({unit})", 5)
    if apart:
        size_ns, unit = unit_of(float(picture.apart_ns[1]))
        if picture.apart:
            _draw_groups(rows[1], picture.apart, size_ns)
        elif each:
            none = np.zeros(len(each))
            _draw_each(rows[1], each.warp, none, each.apart_ns / size_ns, (LATE, LATE, "D"))
        least, most = (of / size_ns for of in picture.apart_ns)
        _value_axis(rows[1], (least, most), many, f"first lane\nto last ({unit})", 3)
    _warp_axis(rows[-1], *picture.warps)


def _draw_each(axes: Axes, warp: Ints, first: Floats, last: Floats, look: tuple[str, str, str]) -> None:
    """A mark for the last value of each warp, and a line to it from the first."""
    line, dot, mark = look
    ends = np.stack((warp, first, warp, last), 1).reshape(-1, 2, 2)
    axes.add_collection(collections.LineCollection(ends, colors=line, linewidths=1.2))
    axes.plot(warp, last, mark, color=dot, markersize=_dot(len(warp)), markeredgewidth=0)


def _value_axis(axes: Axes, span: tuple[float, float], many: bool, label: str, ticks: int) -> None:
    """Set up the value axis, which begins at 0 unless the bands are far above it."""
    least, most = span
    axes.set_ylim(bottom=least - (most - least) * 0.1 if many and least > most / 2 else min(0.0, most - 0.5))
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(ticks))
    rule(axes, "y")


def _warp_axis(axes: Axes, low: int, high: int) -> None:
    room = max(0.5, (high - low) * 0.01)
    axes.set_xlim(low - room, high + room)
    # A single warp gets a single tick.
    whole = ticker.MaxNLocator(9, integer=True) if high > low else ticker.FixedLocator([low])
    axes.xaxis.set_major_locator(whole)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda at, _: f"{at:,.0f}"))
    axes.set_xlabel("warp on the grid (block × warps of a block + warp)")


def _bins(count: int) -> int:
    return min(BINS_MAX, -(-count // _IN_BIN))


def _dot(count: int) -> float:
    return 5 if count <= 60 else 3.2 if count <= 400 else 2.2


def _draw_groups(axes: Axes, groups: Groups, size_ns: int) -> None:
    """Draw range, percentiles and median of the groups. A group without warps breaks the bands."""
    for least, most, alpha, label in (
        (groups.least, groups.most, 0.25, "all"),
        (groups.p5, groups.p95, 0.55, "5% to 95%"),
    ):
        axes.stairs(
            most / size_ns,
            groups.edges,
            baseline=least / size_ns,
            fill=True,
            color=SERIES,
            alpha=alpha,
            linewidth=0,
            label=label,
        )
    axes.stairs(groups.p50 / size_ns, groups.edges, baseline=None, color=FAINT, linewidth=1.2, label="median")
