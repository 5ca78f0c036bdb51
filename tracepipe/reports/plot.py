"""Pictures of a recording: warps on the SMs over time, exit skew, latencies, idle GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from tracepipe.options import Option
from tracepipe.present.figures import FIGURES
from tracepipe.present.figures.panel import scope_of
from tracepipe.present.figures.picture import write_picture
from tracepipe.present.page.html_page import About, FigureGroup, write_page
from tracepipe.reports.kernel_choice import check_kernel
from tracepipe.reports.report import FROM, UNTIL, FileOutput, Report, Result
from tracepipe.store.run import Run

ALL = "all"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe plot`."""

    what: Annotated[str, Option("Draw this.", choices=(*FIGURES, ALL))] = ALL
    kernel: Annotated[
        str, Option("Draw warps of kernels whose name this regular expression finds.", "REGEX")
    ] = ""
    start: Annotated[str, FROM] = ""
    end: Annotated[str, UNTIL] = ""


def run(run: Run, options: Options) -> Result:
    """Return the pictures of one recording, with their titles as notes."""
    scope = scope_of(run, options.start, options.end, options.kernel)
    check_kernel(run, options.kernel)
    names = tuple(FIGURES) if options.what == ALL else (options.what,)
    groups = [FigureGroup(name, FIGURES[name][0], FIGURES[name][1](scope)) for name in names]
    panels = [panel for group in groups for panel in group.panels]
    result = Result("PICTURES", notes=[panel.title for panel in panels])
    result.files = {
        ".html": partial(write_page, About.of(run), "Pictures", groups),
        ".png": partial(write_picture, panels, "png"),
        ".svg": partial(write_picture, panels, "svg"),
    }
    return result


REPORT = Report("plot", Options, run, output=FileOutput((".html", ".png", ".svg")), needs=("matplotlib",))
