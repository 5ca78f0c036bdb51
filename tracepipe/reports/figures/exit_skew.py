"""Exit skew: when the warps of a kernel leave after the first of their launch, and how lanes leave apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from tracepipe.reports.figures.ink import ACCENT, FAINT, LATE, SERIES, rule, unit_of
from tracepipe.reports.figures.panel import Panel, Scope, short
from tracepipe.reports.frames.libraries import collections, np, pl, ticker
from tracepipe.units import duration_text

KERNELS_MAX = 6
# Up to here each warp is drawn.
WARPS_MAX = 1000
BINS_MAX = 240
_IN_BIN = 16


@dataclass(frozen=True, slots=True)
class Exits:
    """A value for each warp: place on the grid, first and last exit, ns after the first of its launch."""

    warp: Any
    first_ns: Any
    last_ns: Any

    @property
    def apart_ns(self) -> Any:
        """From the first lane's exit to the last one's."""
        return self.last_ns - self.first_ns


def panels(scope: Scope) -> list[Panel]:
    """A panel for each kernel whose exits are known, those with most warps."""
    from tracepipe.reports.findings.grouping import kernels_of

    kernels = kernels_of(scope.run, scope.kernel, None)
    cut = [(kernel, _exits(kernel, scope)) for kernel in kernels if kernel.has_exits]
    some = [(kernel, exits) for kernel, exits in cut if len(exits.warp)]
    if not some:
        return [Panel(_none(scope, bool(kernels)))]
    names = Counter(kernel.kernel for kernel, _ in some)
    found = [_panel(_called(kernel, names), kernel, exits, scope) for kernel, exits in some[:KERNELS_MAX]]
    if len(some) > KERNELS_MAX:
        found.append(Panel(f"{len(some) - KERNELS_MAX} more kernels, with fewer warps, are not drawn"))
    return found


def _none(scope: Scope, any_warps: bool) -> str:
    if not len(scope.run.warp_table) and not len(scope.run.layer("gpu_thread")):
        return "No warps and no GPU threads were recorded"
    which = f" of a kernel that {scope.kernel!r} finds" if scope.kernel else ""
    return (
        f"No exit of a warp{which} was recorded{scope.place()}"
        if any_warps or which
        else "No exits were recorded"
    )


def _exits(kernel: Any, scope: Scope) -> Exits:
    """The exits of one kernel's warps that left in the stretch."""
    launch = np.searchsorted(kernel.launches, kernel.launch)
    starts = np.flatnonzero(np.r_[True, np.diff(launch) != 0])
    begin_ns = np.minimum.reduceat(kernel.first_exit_ns, starts)[launch]
    width = int(kernel.warp.max()) + 1
    inside = (kernel.last_exit_ns >= scope.start_ns) & (kernel.last_exit_ns <= scope.end_ns)
    columns = (
        kernel.block * width + kernel.warp,
        kernel.first_exit_ns - begin_ns,
        kernel.last_exit_ns - begin_ns,
    )
    return Exits(*(column[inside] for column in columns))


def _called(kernel: Any, names: Counter[str]) -> str:
    """The kernel's name, with its grid where another has the same."""
    if names[kernel.kernel] == 1 or kernel.grid is None:
        return short(kernel.kernel)
    return f"{short(kernel.kernel)} (grid {'×'.join(str(size) for size in kernel.grid)})"


def _panel(name: str, kernel: Any, exits: Exits, scope: Scope) -> Panel:
    count, apart = len(exits.warp), int(np.count_nonzero(exits.apart_ns))
    launches = int(kernel.launches.size)
    times = f" in {launches} launches" if launches > 1 else ""
    spread = duration_text(int(exits.last_ns.max()))
    if count == 1 and not apart:
        return Panel(f"{name}: its only warp leaves with all its lanes at once{scope.place()}")
    title = f"{name}: {count:,} warps{times} leave over {spread}{scope.place()}"
    if apart:
        title += f"; in {apart:,} the lanes leave apart, by up to {duration_text(int(exits.apart_ns.max()))}"
    else:
        title += ", each with all its lanes at once"
    how = "Time of each warp's last exit after the first exit of its launch"
    if count > WARPS_MAX:
        how += f", in {_bins(count)} groups of neighbours on the grid: range, 5 to 95 of 100, median"
    elif apart:
        how += ", as a dot, with a line from where its first lane left"
    if apart:
        how += "; below it, the time from the first lane's exit to the last one's"
    if kernel.lanes_timed:
        how += ". Each thread took its own time, so that lanes differ by noise too"
    draw = partial(_draw, exits, apart > 0)
    return Panel(title, f"{how}.", 3.9 if apart else 2.7, draw)


def _draw(exits: Exits, apart: bool, figure: Any) -> None:
    heights = {"height_ratios": [3, 2] if apart else [1]}
    rows = figure.subplots(len(heights["height_ratios"]), 1, sharex=True, squeeze=False, gridspec_kw=heights)[
        :, 0
    ]
    many = len(exits.warp) > WARPS_MAX
    size_ns, unit = unit_of(float(exits.last_ns.max()))
    if many:
        _draw_bins(rows[0], exits.warp, exits.last_ns / size_ns)
        rows[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.1)
    else:
        _draw_each(
            rows[0], exits.warp, exits.first_ns / size_ns, exits.last_ns / size_ns, (ACCENT, SERIES, "o")
        )
    _value_axis(rows[0], exits.last_ns / size_ns, many, f"last exit after the\nlaunch's first ({unit})", 5)
    if apart:
        size_ns, unit = unit_of(float(exits.apart_ns.max()))
        if many:
            _draw_bins(rows[1], exits.warp, exits.apart_ns / size_ns)
        else:
            none = np.zeros(len(exits.warp))
            _draw_each(rows[1], exits.warp, none, exits.apart_ns / size_ns, (LATE, LATE, "D"))
        _value_axis(rows[1], exits.apart_ns / size_ns, many, f"first lane\nto last ({unit})", 3)
    _warp_axis(rows[-1], exits.warp)


def _draw_each(axes: Any, warp: Any, first: Any, last: Any, look: tuple[str, str, str]) -> None:
    """A mark for the last value of each warp, and a line to it from the first."""
    line, dot, mark = look
    ends = np.stack((warp, first, warp, last), 1).reshape(-1, 2, 2)
    axes.add_collection(collections.LineCollection(ends, colors=line, linewidths=1.2))
    axes.plot(warp, last, mark, color=dot, markersize=_dot(len(warp)), markeredgewidth=0)


def _value_axis(axes: Any, values: Any, many: bool, label: str, ticks: int) -> None:
    """Begins at 0, but not far below bands."""
    least, most = float(values.min()), float(values.max())
    axes.set_ylim(bottom=least - (most - least) * 0.1 if many and least > most / 2 else min(0.0, most - 0.5))
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(ticks))
    rule(axes, "y")


def _warp_axis(axes: Any, warp: Any) -> None:
    low, high = int(warp.min()), int(warp.max())
    room = max(0.5, (high - low) * 0.01)
    axes.set_xlim(low - room, high + room)
    # Of one warp no tick but its own.
    whole = ticker.MaxNLocator(9, integer=True) if high > low else ticker.FixedLocator([low])
    axes.xaxis.set_major_locator(whole)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda at, _: f"{at:,.0f}"))
    axes.set_xlabel("warp on the grid (block × warps of a block + warp)")


def _bins(count: int) -> int:
    return min(BINS_MAX, -(-count // _IN_BIN))


def _dot(count: int) -> float:
    return 5 if count <= 60 else 3.2 if count <= 400 else 2.2


def _draw_bins(axes: Any, warp: Any, value: Any) -> None:
    """Range, percentiles and median of the values of neighbours."""
    low, high = int(warp.min()), int(warp.max()) + 1
    bins = min(_bins(len(warp)), high - low)
    at = np.minimum(((warp - low) / ((high - low) / bins)).astype(np.int64), bins - 1)
    values = pl.col("value")
    parts = (
        pl.DataFrame({"at": at, "value": value})
        .group_by("at")
        .agg(
            values.min().alias("least"), values.max().alias("most"), values.median().alias("p50"),
            values.quantile(0.05).alias("p5"), values.quantile(0.95).alias("p95"),
        )
        .sort("at")
    )  # fmt: skip
    # A group that no warp is in breaks the bands.
    whole = pl.DataFrame({"at": np.arange(bins)}).join(parts, on="at", how="left", maintain_order="left")
    columns = {
        key: whole[key].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        for key in ("least", "p5", "p50", "p95", "most")
    }
    edges = low + np.arange(bins + 1) * ((high - low) / bins)
    for least, most, alpha, label in (("least", "most", 0.25, "all"), ("p5", "p95", 0.55, "5 to 95 of 100")):
        axes.stairs(
            columns[most],
            edges,
            baseline=columns[least],
            fill=True,
            color=SERIES,
            alpha=alpha,
            linewidth=0,
            label=label,
        )
    axes.stairs(columns["p50"], edges, baseline=None, color=FAINT, linewidth=1.2, label="median")
