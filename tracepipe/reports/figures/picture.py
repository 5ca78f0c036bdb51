"""Writes panels as pictures: all in one PNG or SVG file, or each as SVG inside a page."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from tracepipe.reports.figures.ink import SETTINGS, VARIABLES, WIDTH_IN
from tracepipe.reports.figures.panel import Panel
from tracepipe.reports.frames.libraries import figure, matplotlib

_DOTS_PER_INCH = 150
# Of a title in a picture, at its size and width.
_TITLE_LETTERS = 112
_LINE_IN = 0.19
_PICTURE_MAX_IN = 400
# What a program would write about itself into an SVG.
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_COLOUR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})")


@contextmanager
def _settings(**more: Any) -> Iterator[None]:
    with warnings.catch_warnings(), matplotlib.rc_context({**SETTINGS, **more}):
        # Letters that the font lacks are drawn as boxes, which says it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def write_picture(panels: Sequence[Panel], to: str, out: BinaryIO) -> None:
    """Write all panels below each other, each under its title; `to` is what matplotlib calls the format."""
    panels = _as_many_as_fit(panels)
    titles = [textwrap.wrap(panel.title, _TITLE_LETTERS) for panel in panels]
    heights = [
        _LINE_IN * len(title) + (panel.height_in + 0.25 if panel.draw else 0.15)
        for panel, title in zip(panels, titles, strict=True)
    ]
    with _settings(**{"figure.facecolor": "white"}):
        whole = _blank(sum(heights))
        parts = whole.subfigures(len(panels), 1, squeeze=False, height_ratios=heights, hspace=0.04)[:, 0]
        for panel, title, part in zip(panels, titles, parts, strict=True):
            part.suptitle(
                "\n".join(title), x=0.008, ha="left", fontsize=10, fontweight="bold" if panel.draw else None
            )
            if panel.draw:
                panel.draw(part)
        metadata = _NO_METADATA if to == "svg" else {"Software": None}
        whole.savefig(out, format=to, dpi=_DOTS_PER_INCH, metadata=metadata)


def _blank(height_in: float) -> Any:
    whole = figure.Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    whole.get_layout_engine().set(hspace=0, h_pad=0.025)
    return whole


def _as_many_as_fit(panels: Sequence[Panel]) -> list[Panel]:
    """Those that fit on the largest picture, and how many do not."""
    kept: list[Panel] = []
    height_in = 0.0
    for panel in panels:
        height_in += panel.height_in + 1
        if height_in > _PICTURE_MAX_IN:
            return [
                *kept,
                Panel(f"{len(panels) - len(kept)} more are not drawn: a picture has an end, a page has not"),
            ]
        kept.append(panel)
    return kept


def inline_svg(panel: Panel) -> str:
    """One panel without its title as an `<svg>` element for a page, whose style sets the colours."""
    assert panel.draw
    out = io.BytesIO()
    # Letters as text, in the page's font, which can be searched and copied.
    with _settings(**{"svg.fonttype": "none"}):
        whole = _blank(panel.height_in)
        panel.draw(whole)
        whole.savefig(out, format="svg", dpi=_DOTS_PER_INCH, metadata=_NO_METADATA)
    svg = out.getvalue().decode()
    svg = svg[svg.index("<svg") :]
    return _COLOUR.sub(lambda found: f"{found[1]}: {VARIABLES.get(found[2], found[2])}", svg)
