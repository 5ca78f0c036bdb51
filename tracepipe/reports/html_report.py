"""One HTML page about a recording: the results of other reports, and the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

from tracepipe.analyses.parts import PartOptions, part_of, titled
from tracepipe.errors import LibraryMissing, TracepipeError
from tracepipe.options import Option
from tracepipe.present.figures import FIGURES
from tracepipe.present.figures.panel import scope_of
from tracepipe.present.page.html_page import About, FigureGroup, Section, write_page
from tracepipe.reports.kernel_choice import check_kernel
from tracepipe.reports.report import FileOutput, Report, Result
from tracepipe.store.run import Run

# The section with the verdict, and the picture with a strip of the timeline, which comes after it.
_VERDICT, _STRIP = "summary", "gaps"


@dataclass(frozen=True, slots=True)
class Options(PartOptions):
    """Options of `tracepipe report`."""

    top: Annotated[
        int | None,
        Option(
            "List this many rows in each table; 0 lists all. By default each report has its own number.", "N"
        ),
    ] = None
    kernel: Annotated[
        str, Option("Draw the warps of kernels whose name this regular expression finds.", "REGEX")
    ] = ""


def report_of(gathered: Sequence[tuple[str, Report, Mapping[str, Any]]]) -> Report:
    """Return the report that shows others on one page, each under its heading and with these options, those
    of the page, or else its own defaults.
    """

    def run(run: Run, options: Options) -> Result:
        scope = scope_of(run, "", "", options.kernel)
        check_kernel(run, options.kernel)
        part = part_of(run, options)
        sections = [
            _section(run, heading, report, options, given)
            for heading, report, given in gathered
            if report.suits(run) and (part is None or issubclass(report.options, PartOptions))
        ]
        groups = [FigureGroup(name, heading, panels(scope)) for name, (heading, panels) in FIGURES.items()]
        strip = [group for group in groups if group.name == _STRIP]
        others = [group for group in groups if group.name != _STRIP]
        first = 1 if sections and sections[0].name == _VERDICT else 0
        blocks: list[Section | FigureGroup] = [*sections[:first], *strip, *sections[first:], *others]
        result = Result("REPORT", notes=[panel.title for group in groups for panel in group.panels])
        result.files[".html"] = partial(write_page, About.of(run), titled("Report", part), blocks)
        return result

    needs = ("jinja2", "matplotlib", "scipy")
    return Report("report", Options, run, output=FileOutput((".html",)), needs=needs)


def _section(run: Run, heading: str, report: Report, shared: Options, own: Mapping[str, Any]) -> Section:
    names = {field.name for field in fields(report.options)} - {"kernel"}
    given = {name: value for name in names if (value := getattr(shared, name, None)) not in (None, "")}
    options = report.options(**{**given, **own})
    name = heading.lower().replace(" ", "-") if "all" in own else report.name
    try:
        return Section(name, heading, report.run(run, options))
    except LibraryMissing:
        raise
    except TracepipeError:  # the recording lacks what this report needs
        return Section(name, heading, Result(""))
