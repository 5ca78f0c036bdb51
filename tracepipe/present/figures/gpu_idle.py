"""Idle GPUs: when kernels and copies run on each, and how long the gaps between them are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tracepipe.analyses.gpu_work import gpu_work
from tracepipe.event.columns import Floats, Int64s
from tracepipe.event.intervals import Stretches
from tracepipe.libraries import matplotlib, np
from tracepipe.present.figures.panel import (
    FAINT,
    LATE,
    NOTHING,
    SERIES,
    Panel,
    Scope,
    gpu_name,
    gpus_of,
    log_time_axis,
    moment_text,
    rule,
    unit_of,
)
from tracepipe.units import agree, duration_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 960
_LEAST_SHADE = 0.15
_BINS_A_DECADE = (1, 2, 5)


def panels(scope: Scope) -> list[Panel]:
    """A panel for each GPU that worked."""
    work = gpu_work(scope.run)
    found = {gpu: _busy(scope, work.start_ns[rows], work.end_ns[rows]) for gpu, rows in work.of_gpus()}
    if not any(count for count, _ in found.values()):
        return [Panel(f"No work on a GPU was recorded{scope.place()}")]
    drawn, left_out = gpus_of({gpu: count for gpu, (count, _) in found.items() if count})
    return [_panel(scope, gpu, found[gpu][1]) for gpu in drawn] + left_out


def _busy(scope: Scope, start_ns: Int64s, end_ns: Int64s) -> tuple[int, Stretches]:
    """How many pieces of work touch the window, and the stretches in which there is any."""
    touch = (start_ns <= scope.end_ns) & (end_ns >= scope.start_ns)
    cut = (np.clip(of[touch], scope.start_ns, scope.end_ns) for of in (start_ns, end_ns))
    return int(np.count_nonzero(touch)), Stretches(*cut)


def _panel(scope: Scope, gpu: int, busy: Stretches) -> Panel:
    where = gpu_name(scope.run, gpu)
    if not len(busy.start_ns):
        return Panel(f"{where}: no work with a length{scope.place()}")
    gaps_ns = busy.gaps().lengths_ns()
    first_ns, last_ns = int(busy.start_ns[0]), int(busy.end_ns[-1])
    length_ns, idle_ns = last_ns - first_ns, int(gaps_ns.sum())
    title = f"{where}: busy without a gap for {duration_text(length_ns)}{scope.place()}"
    if len(gaps_ns):
        share = idle_ns / length_ns
        percent = "over 99.9%" if 0.999 < share < 1 else f"{share:.1%}"
        gaps, longest = agree(len(gaps_ns), "gap|gaps"), duration_text(int(gaps_ns.max()))
        title = (
            f"{where}: idle for {duration_text(idle_ns)} of the {duration_text(length_ns)} from its first to "
            f"its last work{scope.place()} ({percent}); {len(gaps_ns):,} {gaps}, longest {longest}"
        )
    how = (
        "A gap is a stretch in which no kernel, copy or warp ran on any stream. A darker cell of the "
        "strip was busy for more of its time"
    )
    if len(gaps_ns):
        how += ". Below it, the gaps by length: the total time of the gaps of each length, and their number"
    draw = partial(_draw, busy, gaps_ns, first_ns - scope.run.facts.start_ns)
    return Panel(title, f"{how}.", 3.1 if len(gaps_ns) else 0.95, draw)


def _draw(busy: Stretches, gaps_ns: Int64s, first_ns: int, figure: Figure) -> None:
    heights = [1, 5] if len(gaps_ns) else [1]
    rows = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    _draw_strip(rows[0][0], busy, first_ns)
    if len(gaps_ns):
        _draw_lengths(rows[1][0], gaps_ns)


def _draw_strip(axes: Axes, busy: Stretches, first_ns: int) -> None:
    start_ns, end_ns = int(busy.start_ns[0]), int(busy.end_ns[-1])
    shade = _shades(busy, start_ns, end_ns)
    rgba = np.empty((1, len(shade), 4))
    rgba[0] = np.where(shade[:, None] > 0, (*matplotlib.colors.to_rgb(SERIES), 1.0), NOTHING)
    rgba[0, :, 3] = np.where(shade > 0, shade, NOTHING[3])
    size_ns, unit = unit_of(end_ns - start_ns)
    axes.imshow(rgba, aspect="auto", interpolation="nearest", extent=(0, (end_ns - start_ns) / size_ns, 0, 1))
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_xlabel(
        f"time after {moment_text(first_ns, end_ns - start_ns)} of the run ({unit}); darker is busier"
    )


def _shades(busy: Stretches, start_ns: int, end_ns: int) -> Floats:
    """The shade of each cell, by how busy it is; work that is too short to be seen gets the lightest one."""
    cells = min(CELLS, end_ns - start_ns)
    edges = np.linspace(0, end_ns - start_ns, cells + 1).astype(np.int64) + start_ns
    share = busy.covered_ns(edges[:-1], edges[1:]) / np.maximum(1, np.diff(edges))
    touched = np.zeros(cells, bool)
    touched[np.minimum(np.searchsorted(edges, busy.start_ns, "right") - 1, cells - 1)] = True
    return np.where(touched | (share > 0), _LEAST_SHADE + (1 - _LEAST_SHADE) * share, 0)


def _draw_lengths(axes: Axes, gaps_ns: Int64s) -> None:
    low, high = (int(np.floor(np.log10(max(1, value)))) for value in (int(gaps_ns.min()), int(gaps_ns.max())))
    low = min(low, high - 2)  # else a single length would be a block across the picture
    edges = np.array(
        [step * 10.0**power for power in range(low, high + 1) for step in _BINS_A_DECADE]
        + [10.0 ** (high + 1)]
    )
    at = np.searchsorted(edges, gaps_ns, "right") - 1
    counts, total_ns = np.bincount(at, minlength=len(edges) - 1), np.bincount(at, gaps_ns, len(edges) - 1)
    size_ns, unit = unit_of(float(total_ns.max()))
    axes.stairs(total_ns / size_ns, edges, fill=True, color=LATE, alpha=0.85, linewidth=0)
    for place in np.flatnonzero(counts):
        at_top = float(np.sqrt(edges[place] * edges[place + 1])), total_ns[place] / size_ns
        look: dict[str, Any] = {"ha": "center", "fontsize": 8, "color": FAINT}
        axes.annotate(f"{counts[place]:,}", at_top, (0, 2), textcoords="offset points", **look)
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, float(total_ns.max()) / size_ns * 1.15)
    log_time_axis(axes.xaxis)
    rule(axes, "y")
    axes.set_xlabel("length of a gap")
    axes.set_ylabel(f"total idle ({unit}),\nand number of gaps")
