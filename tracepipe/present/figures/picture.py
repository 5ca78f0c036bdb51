"""Writes panels as pictures: all in one PNG or SVG file, or each as SVG inside a page."""

from __future__ import annotations

import gc
import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from tracepipe.event.columns import Ints
from tracepipe.libraries import agg, figure, matplotlib, np
from tracepipe.present.figures.panel import SETTINGS, VARIABLES, WIDTH_IN, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
# The letters of a title that fit the width of a picture.
_TITLE_LETTERS = 112
_LINE_IN = 0.19
_PICTURE_MAX_IN = 400
_SVG_UNITS_PER_INCH = 96
# Metadata that matplotlib would write into an SVG.
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_COLOUR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})")


@contextmanager
def _settings(**more: object) -> Iterator[None]:
    with warnings.catch_warnings(), matplotlib.rc_context({**SETTINGS, **more}):
        # Letters that the font lacks are drawn as boxes, so a warning is not needed.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        # The collection before each figure then looks only at what figures are made of.
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()


def write_picture(panels: Sequence[Panel], to: str, out: BinaryIO) -> None:
    """Write all panels below each other, each under its title; `to` is "png" or "svg".

    Panels are drawn one after the other, as a picture may be very high. A PNG is in memory until it is whole.
    """
    panels = _as_many_as_fit(panels)
    titles = [textwrap.wrap(panel.title, _TITLE_LETTERS) for panel in panels]
    heights = [
        round(DOTS_PER_INCH * (_LINE_IN * len(title) + (panel.height_in + 0.25 if panel.draw else 0.15)))
        for panel, title in zip(panels, titles, strict=True)
    ]
    width, height = (round(size * _SVG_UNITS_PER_INCH) for size in (WIDTH_IN, sum(heights) / DOTS_PER_INCH))
    with _settings(**{"figure.facecolor": "white"}):
        figures = map(_titled, panels, titles, heights)
        if to == "png":
            from PIL import Image  # which matplotlib brings

            picture, above = Image.new("RGB", (round(WIDTH_IN * DOTS_PER_INCH), sum(heights))), 0
            for whole, own in zip(figures, heights, strict=True):
                picture.paste(Image.fromarray(_pixels(whole)), (0, above))
                above += own
            picture.save(out, "png", dpi=(DOTS_PER_INCH, DOTS_PER_INCH))
            return
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        out.write(f'<svg xmlns="http://www.w3.org/2000/svg" {size} version="1.1">\n'.encode())
        above = 0
        for whole, own in zip(figures, heights, strict=True):
            y = above * _SVG_UNITS_PER_INCH / DOTS_PER_INCH
            out.write(_svg(whole).replace("<svg", f'<svg y="{y:g}"', 1).encode())
            above += own
        out.write(b"</svg>\n")


def _titled(panel: Panel, title: list[str], height: int) -> Figure:
    """A matplotlib figure of a panel under its title."""
    whole = _blank(height / DOTS_PER_INCH)
    weight = "bold" if panel.draw else None
    whole.suptitle("\n".join(title), x=0.008, ha="left", fontsize=10, fontweight=weight)
    if panel.draw:
        panel.draw(whole)
    return whole


def _pixels(whole: Figure) -> Ints:
    """A figure as pixels: uint8, shape `(height, width, 3)`."""
    whole.set_dpi(DOTS_PER_INCH)
    canvas = agg.FigureCanvasAgg(whole)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]


def _svg(whole: Figure) -> str:
    """A figure as an `<svg>` element."""
    out = io.BytesIO()
    whole.savefig(out, format="svg", dpi=DOTS_PER_INCH, metadata=_NO_METADATA)
    svg = out.getvalue().decode()
    return svg[svg.index("<svg") :]


def _blank(height_in: float) -> Figure:
    # The parts of a figure refer to each other: without a collection the last figure would stay in memory.
    gc.collect()
    whole: Figure = figure.Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    engine: Any = whole.get_layout_engine()  # of the constrained layout, by the figure's own choice
    engine.set(hspace=0, h_pad=0.025)
    return whole


def _as_many_as_fit(panels: Sequence[Panel]) -> list[Panel]:
    """The panels that fit on the largest picture, and a panel that states how many do not."""
    fitting: list[Panel] = []
    height_in = 0.0
    for panel in panels:
        height_in += panel.height_in + 1
        if height_in > _PICTURE_MAX_IN:
            return [
                *fitting,
                Panel(f"{len(panels) - len(fitting)} more do not fit a picture: a page (HTML) shows all"),
            ]
        fitting.append(panel)
    return fitting


def inline_svg(panel: Panel) -> str:
    """One panel without its title as an `<svg>` element for a page, whose style sets the colours."""
    assert panel.draw
    # Letters are text in the page's font, which can be searched and copied.
    with _settings(**{"svg.fonttype": "none"}):
        whole = _blank(panel.height_in)
        panel.draw(whole)
        svg = _svg(whole)
    return _COLOUR.sub(lambda found: f"{found[1]}: {VARIABLES.get(found[2], found[2])}", svg)
