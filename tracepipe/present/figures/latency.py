"""Latency: the distribution of the lengths of calls, a row for each function, on one logarithmic axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tracepipe.analyses.distribution import PERCENTS, of_values
from tracepipe.analyses.functions import names_by_time
from tracepipe.analyses.nesting import first_flagged
from tracepipe.event.columns import Floats, Int64s, Ints
from tracepipe.libraries import np
from tracepipe.present.figures.panel import (
    ACCENT,
    INK,
    LATE,
    RULE,
    SERIES,
    Panel,
    Scope,
    log_time_axis,
    rule,
    short,
)
from tracepipe.store.run import Layer
from tracepipe.units import duration_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LAYERS = (("userspace", "CUDA API calls"), ("syscall", "system calls"), ("kernel", "driver functions"))
FUNCTIONS_MAX = 9
# With fewer calls, each is a dot.
HISTOGRAM_MIN = 20
_BINS_A_DECADE = 12
# The mark and the colour of each percentile.
_MARKS = dict(zip(PERCENTS, (("o", INK), ("D", ACCENT), ("^", LATE)), strict=True))


@dataclass(frozen=True, slots=True)
class CallLengths:
    """The lengths of the calls of one name in ns, shape `(calls,)`, and the cells of `LENGTH_COLUMNS`."""

    name: str
    dur_ns: Int64s
    spread: tuple[int | None, ...]


def panels(scope: Scope) -> list[Panel]:
    """A panel for each layer."""
    return [_panel(scope, layer, title) for layer, title in _LAYERS]


def _panel(scope: Scope, name: str, title: str) -> Panel:
    layer, shapes = scope.run.layer(name), scope.run.shapes
    inside = (layer.start_ns <= scope.end_ns) & (layer.end_ns >= scope.start_ns)
    timed = np.flatnonzero(inside & layer.has_length)
    if not len(timed):
        lengths = " with a known length" if inside.any() else ""
        return Panel(f"No {title}{lengths} were recorded{scope.place()}")
    # A call that never returned has no length, so the calls inside it count instead.
    of_all = np.flatnonzero(inside & first_flagged(layer.parent, layer.has_length))
    of_call = shapes.column("name", layer.shape[timed])
    names, count = names_by_time(scope.run, layer, timed, FUNCTIONS_MAX)
    rows = [_called(layer, of_all, "all" if count > 1 else shapes.text(names[0]))]
    for number in names if count > 1 else ():
        rows.append(_called(layer, timed[of_call == number], shapes.text(number)))
    _, _, half, _, most, _ = (duration_text(length or 0) for length in rows[0].spread)
    calls = len(rows[0].dur_ns)
    what = f"half of {calls:,} take at most {half}, 1 in 100 {most} or more"
    text = f"{title[0].upper()}{title[1:]}: {f'the only one takes {half}' if calls == 1 else what}"
    how = (
        "Lengths from entry to return, on a logarithmic axis. Each area is a histogram with "
        f"{_BINS_A_DECADE} bins per decade, scaled to its fullest bin; with fewer than {HISTOGRAM_MIN} "
        "calls, each call is a dot."
    )
    if count > 1:
        some = f"the {len(names)} of {count} names with the most time"
        left_out = some if count > len(names) else "by total time"
        how += f" Functions: {left_out}; “all” excludes calls inside others of known length."
    return Panel(text, how, 1.0 + 0.42 * len(rows), partial(_draw, rows))


def _called(layer: Layer, calls: Ints, name: str) -> CallLengths:
    """The lengths of the calls at some rows of a layer."""
    dur_ns = layer.end_ns[calls] - layer.start_ns[calls]
    return CallLengths(name, dur_ns, of_values(dur_ns))


def _draw(rows: list[CallLengths], figure: Figure) -> None:
    axes = figure.subplots()
    shortest = max(1, min(int(row.dur_ns.min()) if len(row.dur_ns) else 0 for row in rows))
    longest = max(shortest + 1, *(row.spread[-1] or 0 for row in rows))
    low, high = int(np.floor(np.log10(shortest))), int(np.ceil(np.log10(longest)))
    high = max(high, low + 1)
    edges = np.logspace(low, high, (high - low) * _BINS_A_DECADE + 1)
    for place, row in enumerate(rows):
        _draw_row(axes, row, len(rows) - 1 - place, edges)
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(-0.25, len(rows) - 0.1)
    log_time_axis(axes.xaxis)
    rule(axes, "x")
    names = [f"{short(row.name, 34)}  ({len(row.dur_ns):,})" for row in reversed(rows)]
    axes.set_yticks([place + 0.22 for place in range(len(rows))], names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("length of a call")
    if len(rows) > 2:
        axes.set_ylabel("function (how many)")
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_MARKS), borderaxespad=0.1, handletextpad=0.2
    )


def _draw_row(axes: Axes, row: CallLengths, base: int, edges: Floats) -> None:
    """Draw the lengths of one name above their line: a histogram, or dots for a few."""
    look: dict[str, Any]
    if len(row.dur_ns) >= HISTOGRAM_MIN:
        counts, _ = np.histogram(np.clip(row.dur_ns, edges[0], None), edges)
        heights = base + 0.72 * counts / counts.max()
        axes.stairs(heights, edges, baseline=base, fill=True, color=SERIES, alpha=0.6, linewidth=0)
    else:
        lengths = np.clip(row.dur_ns, edges[0], None)
        look = {"color": SERIES, "markersize": 3.5, "alpha": 0.6, "markeredgewidth": 0}
        axes.plot(lengths, np.full(len(lengths), base + 0.3), "o", **look)
    axes.plot((edges[0], edges[-1]), (base, base), color=RULE, linewidth=0.8)
    _, _, *percentiles, _ = row.spread  # by nearest rank
    for (percent, (mark, colour)), dur_ns in zip(_MARKS.items(), percentiles, strict=True):
        label = f"p{percent}" if base == 0 else None
        look = {"color": colour, "markersize": 5.5, "markeredgewidth": 0, "clip_on": False, "zorder": 3}
        axes.plot(max(edges[0], dur_ns or 0), base, mark, label=label, **look)
