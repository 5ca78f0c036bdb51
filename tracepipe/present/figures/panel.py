"""The parts of a figure: panels, whose titles state what they show, and the scope that they are drawn from;
their colours, which colour-blind people can distinguish, fonts, and axes of times with units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tracepipe.errors import TracepipeError
from tracepipe.libraries import matplotlib, ticker
from tracepipe.options import regex
from tracepipe.present.writing.rendering import shown
from tracepipe.store.run import Run
from tracepipe.units import duration_ns, duration_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis
    from matplotlib.colors import Colormap

WIDTH_IN = 10.0
# Colours of Okabe and Ito; a mark or a place also distinguishes each from the others.
SERIES, LATE, ACCENT = "#0072b2", "#d55e00", "#e69f00"
INK, FAINT, RULE = "#1f2430", "#626a78", "#d4d8de"
# The CSS variables that replace these colours on a page.
VARIABLES = {
    SERIES: "var(--series)",
    LATE: "var(--late)",
    ACCENT: "var(--accent)",
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    RULE: "var(--rule)",
}
# A grey for empty cells, which shows on white and on black.
NOTHING = (0.5, 0.5, 0.5, 0.13)
HEAT = "viridis"
_SIZES_NS = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))

SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    # Names come from the recorded program: they are not mathematics.
    "text.parse_math": False,
    "text.usetex": False,
    # Letters are outlines, as the viewer's fonts are not known.
    "svg.fonttype": "path",
    # Else matplotlib would resample images that a viewer should scale without smoothing.
    "image.composite_image": False,
    # The same figure gives the same file each time.
    "svg.hashsalt": "tracepipe",
}


def unit_of(length_ns: float) -> tuple[int, str]:
    """The unit for times of this length, as its size in ns and its name."""
    for size_ns, unit in _SIZES_NS:
        if length_ns >= 2 * size_ns:
            return size_ns, unit
    return _SIZES_NS[-1]


def moment_text(ts_ns: int, length_ns: int) -> str:
    """A time with enough digits to distinguish it from one `length_ns` later."""
    size_ns, unit = unit_of(2 * abs(ts_ns))
    digits = 0
    while size_ns > length_ns * 10**digits and digits < 9:
        digits += 1
    return f"{ts_ns / size_ns:,.{digits}f} {unit}"


def heat() -> Colormap:
    """The colour map of counts, with a pale grey for none."""
    found: Colormap = matplotlib.colormaps[HEAT].with_extremes(bad=NOTHING)
    return found


def log_time_axis(axis: XAxis) -> None:
    """Label decades of ns, each with a suitable unit; where there are few, label twos and fives too."""
    axis.set_major_locator(ticker.LogLocator(base=10, numticks=20))
    axis.set_minor_locator(ticker.LogLocator(base=10, subs=range(2, 10), numticks=100))
    axis.set_major_formatter(ticker.FuncFormatter(lambda ns, _: decade_text(ns)))
    low, high = axis.get_view_interval()
    few = high / low <= 1000
    axis.set_minor_formatter(
        ticker.FuncFormatter(lambda ns, _: decade_text(ns) if few and f"{ns:.0e}"[0] in "25" else "")
    )


def decade_text(ns: float) -> str:
    """A time with a suitable unit and at most three digits: `100 µs`."""
    for size_ns, unit in _SIZES_NS:
        if ns >= size_ns * 0.999:
            return f"{ns / size_ns:.3g} {unit}"
    return f"{ns:.3g} ns"


def rule(axes: Axes, axis: Literal["x", "y"]) -> None:
    """Draw thin lines behind the data, across one axis."""
    axes.grid(axis=axis, color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


GPUS_MAX = 16
_NAME_LETTERS = 60


@dataclass(slots=True)
class Panel:
    """One picture. `title` states what it shows, `how` explains how it was computed.

    `draw` draws into a matplotlib (sub)figure that is `height_in` inches high, without a title. It is None
    where there is nothing to draw; the title then states why.
    """

    title: str
    how: str = ""
    height_in: float = 0.0
    draw: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a recording that is drawn: a window on the trace clock, and the kernels whose names match
    `kernel`.

    `is_cut`: the window was given by options, and is not the whole run.
    """

    run: Run
    start_ns: int
    end_ns: int
    kernel: str = ""
    is_cut: bool = False

    def place(self) -> str:
        """The window as a phrase; empty for the whole run."""
        if not self.is_cut:
            return ""
        base_ns = self.run.facts.start_ns
        return f" from {duration_text(self.start_ns - base_ns)} to {duration_text(self.end_ns - base_ns)}"


def scope_of(run: Run, start: str, end: str, kernel: str) -> Scope:
    """Return the scope of options: times after the start of the run, and a regular expression; "" means all.

    Raises TracepipeError.
    """
    base_ns, last_ns = run.facts.start_ns, run.facts.end_ns
    start_ns = base_ns + duration_ns(start) if start else base_ns
    end_ns = base_ns + duration_ns(end) if end else last_ns
    if (start or end) and start_ns >= end_ns:
        raise empty_stretch(start_ns - base_ns, end_ns - base_ns, last_ns - base_ns)
    regex(kernel)
    return Scope(run, start_ns, max(end_ns, start_ns + 1), kernel, bool(start or end))


def empty_stretch(start_ns: int, end_ns: int, length_ns: int) -> TracepipeError:
    """The error for a stretch of time with nothing in it, of a run of this length."""
    return TracepipeError(
        f"The stretch from {duration_text(start_ns)} to {duration_text(end_ns)} of the run is empty.",
        f"The run lasts {duration_text(length_ns)}; a number without a unit is in seconds.",
    )


def gpu_name(run: Run, gpu: int) -> str:
    """A GPU's number, with its name where that was recorded."""
    return f"GPU {gpu} {short(str(run.facts.gpus().get(gpu, {}).get('name', '')))}".rstrip()


def gpus_of(counts: dict[int, int]) -> tuple[list[int], list[Panel]]:
    """The GPUs that are drawn, those with the highest counts, and a panel that states that others are not."""
    most = sorted(counts, key=lambda gpu: (-counts[gpu], gpu))
    more = len(most) - GPUS_MAX
    left_out = [Panel(f"{more} more GPUs, with less work, are not drawn")] if more > 0 else []
    return sorted(most[:GPUS_MAX]), left_out


def sm_count(run: Run, gpu: int) -> int | None:
    """How many SMs a GPU has; None where that was not recorded."""
    about = run.facts.gpus().get(gpu, {})
    count = about.get("sms", about.get("sm_count"))
    return count if isinstance(count, int) else None


def short(name: str, letters: int = _NAME_LETTERS) -> str:
    """A name that fits a label and can be drawn: a long one loses its middle."""
    name = shown(name)
    if len(name) <= letters:
        return name
    tail = (letters - 1) // 3
    return f"{name[: letters - 1 - tail]}…{name[-tail:]}"
