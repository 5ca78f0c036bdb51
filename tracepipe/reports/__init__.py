"""Reports: analyses of a recording. A new one is a file here and a line in `REPORTS`, and is a command."""

from __future__ import annotations

from tracepipe.reports import (
    diff,
    export,
    gaps,
    html_report,
    layers,
    memory,
    plot,
    summary,
    timeline,
    warps,
)
from tracepipe.reports.report import Report

__all__ = ["REPORTS"]

# What the page of a recording has, in its order, under which headings.
_GATHERED = (
    ("Summary", summary.REPORT),
    ("Warps and findings", warps.REPORT),
    ("Idle GPUs and what the CPU did", gaps.REPORT),
    ("Memory", memory.REPORT),
)

# In the order in which the help lists them.
REPORTS: dict[str, Report] = {
    report.name: report
    for report in (
        summary.REPORT,
        timeline.REPORT,
        layers.REPORT,
        gaps.REPORT,
        memory.REPORT,
        diff.REPORT,
        warps.REPORT,
        plot.REPORT,
        html_report.report_of(_GATHERED),
        export.REPORT,
    )
}
