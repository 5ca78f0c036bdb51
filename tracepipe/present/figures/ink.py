"""The style of figures: colours that colour-blind people can distinguish, fonts, axes of times with units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tracepipe.reports.frames.libraries import matplotlib, ticker

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
