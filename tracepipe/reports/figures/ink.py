"""How figures look: colours that colour-blind people can tell apart, letters, axes of times with units."""

from __future__ import annotations

from typing import Any

from tracepipe.reports.frames.libraries import matplotlib, ticker

WIDTH_IN = 10.0
# Of Okabe and Ito; each also differs from the others by a mark or a place.
SERIES, LATE, ACCENT = "#0072b2", "#d55e00", "#e69f00"
INK, FAINT, RULE = "#1f2430", "#626a78", "#d4d8de"
# What a page may set by its own style in place of these colours.
VARIABLES = {
    SERIES: "var(--series)",
    LATE: "var(--late)",
    ACCENT: "var(--accent)",
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    RULE: "var(--rule)",
}
# Grey on white, and on black, where there is nothing.
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
    # Names are those of the recorded program: nothing in them is mathematics.
    "text.parse_math": False,
    "text.usetex": False,
    # Letters as outlines, as the fonts of whoever looks are not known; and the same file each time.
    "svg.fonttype": "path",
    # Without it an image that is not made smooth would not be left to whoever shows it.
    "image.composite_image": False,
    "svg.hashsalt": "tracepipe",
}


def unit_of(length_ns: float) -> tuple[int, str]:
    """The unit in which a stretch of that length reads well, in ns and by name."""
    for size_ns, unit in _SIZES_NS:
        if length_ns >= 2 * size_ns:
            return size_ns, unit
    return _SIZES_NS[-1]


def moment_text(ts_ns: int, length_ns: int) -> str:
    """A time with as many digits as tell it from one `length_ns` later."""
    size_ns, unit = unit_of(2 * abs(ts_ns))
    digits = 0
    while size_ns > length_ns * 10**digits and digits < 9:
        digits += 1
    return f"{ts_ns / size_ns:,.{digits}f} {unit}"


def heat() -> Any:
    """The colours of counts, pale grey for none."""
    return matplotlib.colormaps[HEAT].with_extremes(bad=NOTHING)


def log_time_axis(axis: Any) -> None:
    """Decades of ns, each with the unit that it reads well in; where there are few, twos and fives too."""
    axis.set_major_locator(ticker.LogLocator(base=10, numticks=20))
    axis.set_minor_locator(ticker.LogLocator(base=10, subs=range(2, 10), numticks=100))
    axis.set_major_formatter(ticker.FuncFormatter(lambda ns, _: decade_text(ns)))
    low, high = axis.get_view_interval()
    few = high / low <= 1000
    axis.set_minor_formatter(
        ticker.FuncFormatter(lambda ns, _: decade_text(ns) if few and f"{ns:.0e}"[0] in "25" else "")
    )


def decade_text(ns: float) -> str:
    """`100 µs`; three digits at most."""
    for size_ns, unit in _SIZES_NS:
        if ns >= size_ns * 0.999:
            return f"{ns / size_ns:.3g} {unit}"
    return f"{ns:.3g} ns"


def rule(axes: Any, axis: str) -> None:
    """Thin lines behind the data, across one axis."""
    axes.grid(axis=axis, color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
