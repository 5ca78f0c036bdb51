"""Exit skew: when the warps of a kernel exit after their launch's first, and how far apart their lanes do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from tracepipe.analyses.findings.kernel_warps import KernelWarps
from tracepipe.analyses.findings.kernels import Kernels, kernels_of
from tracepipe.event.columns import Floats, Ints
from tracepipe.event.groups import RowsByNumber
from tracepipe.libraries import collections, np, ticker
from tracepipe.present.figures.panel import ACCENT, FAINT, LATE, SERIES, Panel, Scope, rule, short, unit_of
from tracepipe.units import agree, counted, duration_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KERNELS_MAX = 6
# Up to this number each warp is drawn.
WARPS_MAX = 1000
BINS_MAX = 240
_IN_BIN = 16


def panels(scope: Scope) -> list[Panel]:
    """A panel for each kernel whose exits are known, those with the most warps."""
    kernels = kernels_of(scope.run, scope.kernel, None)
    names = Counter(kernel.kernel for kernel, _ in _with_exits(kernels, scope))
    if not names:
        which = f" of a kernel matching {scope.kernel!r}" if scope.kernel else ""
        if not len(scope.run.warp_table) and not len(scope.run.layer("gpu_thread")):
            return [Panel("No warps and no GPU threads were recorded")]
        if not kernels and not which:
            return [Panel("No exits were recorded")]
        return [Panel(f"No exit of a warp{which} was recorded{scope.place()}")]
    found = []
    for kernel, rows in islice(_with_exits(kernels, scope), KERNELS_MAX):
        name = short(kernel.kernel)
        if names[kernel.kernel] > 1 and kernel.grid is not None:
            name += f" (grid {'×'.join(str(size) for size in kernel.grid)})"
        found.append(_panel(name, kernel, rows, scope))
    if names.total() > KERNELS_MAX:
        words = "more kernel|kernels, with fewer warps, is|are not drawn"
        found.append(Panel(counted(names.total() - KERNELS_MAX, words)))
    return found


def _with_exits(kernels: Kernels, scope: Scope) -> Iterator[tuple[KernelWarps, Ints]]:
    """The kernels with warps that exited in the window, and the rows of these warps."""
    for kernel in kernels:
        if kernel.has_exits:
            last_ns = kernel.last_exit_ns
            rows = np.flatnonzero((last_ns >= scope.start_ns) & (last_ns <= scope.end_ns))
            if len(rows):
                yield kernel, rows


def _panel(name: str, kernel: KernelWarps, rows: Ints, scope: Scope) -> Panel:
    begin_ns = np.minimum.reduceat(kernel.first_exit_ns, kernel.launch_starts)[kernel.launch_row[rows]]
    first_ns, last_ns = kernel.first_exit_ns[rows] - begin_ns, kernel.last_exit_ns[rows] - begin_ns
    warp = kernel.block[rows] * (int(kernel.warp.max()) + 1) + kernel.warp[rows]
    spread_ns = last_ns - first_ns
    count, split = len(warp), int(np.count_nonzero(spread_ns))
    if count == 1 and not split:
        return Panel(f"{name}: all lanes of its only warp exit together{scope.place()}")
    launches = int(kernel.launches.size)
    times = f" in {launches} launches" if launches > 1 else ""
    warps = f"{count:,} {agree(count, 'warp|warps')}{times} {agree(count, 'exits|exit')}"
    title = f"{name}: {warps} within {duration_text(int(last_ns.max()))}{scope.place()}"
    how = "Time of each warp's last exit after the first exit of its launch"
    if split:
        apart = duration_text(int(spread_ns.max()))
        title += f"; in {split:,} of them the lanes exit up to {apart} apart"
    else:
        title += "; the lanes of each exit together"
    if count > WARPS_MAX:
        how += f", in {_bins(count)} groups of neighbours on the grid: range, 5% to 95%, median"
    elif split:
        how += ", as a dot, with a line from the exit of its first lane"
    if split:
        how += "; below it, the time from the first lane's exit to the last one's"
    if kernel.lanes_timed:
        how += ". Each thread was timed separately, so lanes also differ by noise"
    return Panel(title, f"{how}.", 3.9 if split else 2.7, partial(_draw, warp, first_ns, last_ns))


def _bins(count: int) -> int:
    return min(BINS_MAX, -(-count // _IN_BIN))


def _draw(warp: Ints, first_ns: Ints, last_ns: Ints, figure: Figure) -> None:
    """Draw warps by their places on the grid: first and last exit, after the first one of the launch."""
    spread_ns = last_ns - first_ns
    heights = {"height_ratios": [3, 2] if spread_ns.any() else [1]}
    rows = figure.subplots(len(heights["height_ratios"]), 1, sharex=True, squeeze=False, gridspec_kw=heights)
    size_ns, unit = unit_of(float(last_ns.max()))
    look = (ACCENT, SERIES, "o")
    _draw_values(rows[0][0], warp, first_ns / size_ns, last_ns / size_ns, look)
    rows[0][0].set_ylabel(f"last exit after the\nlaunch's first ({unit})")
    rows[0][0].yaxis.set_major_locator(ticker.MaxNLocator(5))
    rule(rows[0][0], "y")
    if len(warp) > WARPS_MAX:
        rows[0][0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.1)
    if len(rows) > 1:
        size_ns, unit = unit_of(float(spread_ns.max()))
        _draw_values(rows[1][0], warp, np.zeros(len(warp)), spread_ns / size_ns, (LATE, LATE, "D"))
        rows[1][0].set_ylabel(f"first lane\nto last ({unit})")
        rows[1][0].yaxis.set_major_locator(ticker.MaxNLocator(3))
        rule(rows[1][0], "y")
    axes, low, high = rows[-1][0], int(warp.min()), int(warp.max())
    margin = max(0.5, (high - low) * 0.01)
    axes.set_xlim(low - margin, high + margin)
    # A single warp gets a single tick.
    whole = ticker.MaxNLocator(9, integer=True) if high > low else ticker.FixedLocator([low])
    axes.xaxis.set_major_locator(whole)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda at, _: f"{at:,.0f}"))
    axes.set_xlabel("warp on the grid (block × warps of a block + warp)")


def _draw_values(axes: Axes, warp: Ints, first: Floats, last: Floats, look: tuple[str, str, str]) -> None:
    """Draw a mark for the last value of each warp, and a line to it from the first. Of many warps, draw
    range, percentiles and median of groups of neighbours; a group without warps breaks the bands. The value
    axis begins at 0 unless the bands are far above it.
    """
    least, most = float(last.min()), float(last.max())
    count, low, high = len(warp), int(warp.min()), int(warp.max()) + 1
    if count <= WARPS_MAX:
        line, dot, mark = look
        ends = np.stack((warp, first, warp, last), 1).reshape(-1, 2, 2)
        axes.add_collection(collections.LineCollection(ends, colors=line, linewidths=1.2))
        size = 5 if count <= 60 else 3.2 if count <= 400 else 2.2
        axes.plot(warp, last, mark, color=dot, markersize=size, markeredgewidth=0)
        axes.set_ylim(bottom=min(0.0, most - 0.5))
        return
    bins = min(_bins(count), high - low)
    edges = low + np.arange(bins + 1) * ((high - low) / bins)
    groups = np.full((5, bins), np.nan)
    for at, rows in RowsByNumber(np.minimum((warp - low) / ((high - low) / bins), bins - 1).astype(np.int32)):
        own = np.sort(last[rows])
        five = round((len(own) - 1) * 0.05)
        groups[:, at] = own[0], own[five], np.median(own), own[len(own) - 1 - five], own[-1]
    lowest, p5, p50, p95, highest = groups
    for bottom, top, alpha, label in ((lowest, highest, 0.25, "all"), (p5, p95, 0.55, "5% to 95%")):
        axes.stairs(
            top, edges, baseline=bottom, fill=True, color=SERIES, alpha=alpha, linewidth=0, label=label
        )
    axes.stairs(p50, edges, baseline=None, color=FAINT, linewidth=1.2, label="median")
    axes.set_ylim(bottom=least - (most - least) * 0.1 if least > most / 2 else min(0.0, most - 0.5))
