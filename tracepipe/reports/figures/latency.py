"""Latency: how the lengths of calls are spread, a row for each function, on one logarithmic axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tracepipe.reports.analyses.distribution import PERCENTS, of_values
from tracepipe.reports.figures.ink import ACCENT, INK, LATE, RULE, SERIES, log_time_axis, rule
from tracepipe.reports.figures.panel import Panel, Scope, short
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.nesting import first_of_their_kind
from tracepipe.units import duration_text

_LAYERS = (("userspace", "CUDA API calls"), ("syscall", "system calls"), ("kernel", "driver functions"))
_COLUMNS = ("name", "kind", "start_ns", "end_ns", "dur_ns", "parent")
FUNCTIONS_MAX = 9
# With fewer, each is a dot.
HISTOGRAM_MIN = 20
_BINS_A_DECADE = 12
# Of each percentile: its mark, its colour.
_MARKS = dict(zip(PERCENTS, (("o", INK), ("D", ACCENT), ("^", LATE)), strict=True))


@dataclass(frozen=True, slots=True)
class CallLengths:
    """Lengths of the calls of one name, ns."""

    name: str
    dur_ns: Any


def panels(scope: Scope) -> list[Panel]:
    """A panel for each layer."""
    return [_panel(scope, scope.run.some(layer, *_COLUMNS), title) for layer, title in _LAYERS]


def _panel(scope: Scope, frame: pl.DataFrame, title: str) -> Panel:
    is_timed = pl.col("dur_ns").is_not_null()
    spans = scope.spans(frame)
    timed = spans.filter(is_timed)
    if not len(timed):
        lengths = " with a known length" if len(spans) else ""
        return Panel(f"No {title}{lengths} were recorded{scope.place()}")
    # A call that never returned has no length to be in place of those inside it.
    of_all = scope.spans(first_of_their_kind(frame, frame.select(is_timed).to_series().to_numpy()))
    by_time = (
        timed.group_by("name").agg(pl.col("dur_ns").sum()).sort("dur_ns", "name", descending=[True, False])
    )
    names = by_time["name"][:FUNCTIONS_MAX].to_list()
    rows = [CallLengths("all", of_all["dur_ns"].to_numpy())]
    if len(by_time) > 1:
        rows += [
            CallLengths(name, timed.filter(pl.col("name") == name)["dur_ns"].to_numpy()) for name in names
        ]
    else:
        rows[0] = CallLengths(names[0], rows[0].dur_ns)
    text = f"{_upper(title)}: {_what(rows[0].dur_ns)}"
    how = (
        "Lengths from entry to return, on a log axis; each shape is a histogram, as high as its "
        f"fullest of {_BINS_A_DECADE} bins a decade; with fewer than {HISTOGRAM_MIN} calls each is a dot."
    )
    if len(by_time) > 1:
        left_out = (
            f"the {len(names)} of {len(by_time)} names with most time"
            if len(by_time) > len(names)
            else "by total time"
        )
        how += f" Functions: {left_out}; “all” leaves out calls inside others of known length."
    return Panel(text, how, 1.0 + 0.42 * len(rows), partial(_draw, rows))


def _what(dur_ns: Any) -> str:
    """The lengths in a sentence."""
    _, _, half, _, most, _ = (duration_text(length or 0) for length in of_values(dur_ns))
    if len(dur_ns) == 1:
        return f"the only one takes {half}"
    return f"half of {len(dur_ns):,} take at most {half}, 1 in 100 {most} or more"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _draw(rows: list[CallLengths], figure: Any) -> None:
    axes = figure.subplots()
    shortest = max(1, min(int(row.dur_ns.min()) for row in rows))
    longest = max(shortest + 1, *(int(row.dur_ns.max()) for row in rows))
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


def _draw_row(axes: Any, row: CallLengths, base: int, edges: Any) -> None:
    """The lengths of one name above their line: a histogram, or dots where they are few."""
    lengths = np.clip(row.dur_ns, edges[0], None)
    if len(lengths) >= HISTOGRAM_MIN:
        counts, _ = np.histogram(lengths, edges)
        heights = base + 0.72 * counts / counts.max()
        axes.stairs(heights, edges, baseline=base, fill=True, color=SERIES, alpha=0.6, linewidth=0)
    else:
        look = {"color": SERIES, "markersize": 3.5, "alpha": 0.6, "markeredgewidth": 0}
        axes.plot(lengths, np.full(len(lengths), base + 0.3), "o", **look)
    axes.plot((edges[0], edges[-1]), (base, base), color=RULE, linewidth=0.8)
    _mark(axes, row, base, edges[0])


def _mark(axes: Any, row: CallLengths, base: float, least: float) -> None:
    """The percentiles, by nearest rank, each with its own mark."""
    _, _, *percentiles, _ = of_values(row.dur_ns)
    for (percent, (mark, colour)), dur_ns in zip(_MARKS.items(), percentiles, strict=True):
        label = f"p{percent}" if base == 0 else None
        axes.plot(
            max(least, dur_ns or 0),
            base,
            mark,
            color=colour,
            markersize=5.5,
            markeredgewidth=0,
            label=label,
            clip_on=False,
            zorder=3,
        )
