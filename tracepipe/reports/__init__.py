"""Reports: analyses of a recording. A file here and a line in `REPORTS` make a report and its command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from tracepipe.reports.report import Report

__all__ = ["REPORTS"]

# The reports that the page of a recording contains, in this order: their names, headings and own options.
_GATHERED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("summary", "Summary", {"top": 10}),  # as by default: with other options it has all tables
    ("steps", "Steps", {}),
    ("gaps", "Idle GPUs and what the CPU did", {}),
    ("lines", "Lines of Python", {}),
    ("annotations", "Annotations on the GPU", {}),
    ("warps", "Warps and findings", {}),
    ("stalls", "What warps wait for", {}),
    ("memory", "Memory", {}),
    ("summary", "All tables", {"all": True}),
)


class _Reports(Mapping[str, Report]):
    """Reports by name. Each is loaded when it is asked for: loading all of them takes as long as reading
    100 000 events.
    """

    def __init__(self, abouts: Mapping[str, str]) -> None:
        self._modules = {module.partition("_")[2] or module: module for module in abouts}
        self._abouts = dict(zip(self._modules, abouts.values(), strict=True))
        self._loaded: dict[str, Report] = {}

    def about(self, name: str) -> str:
        """The description of a report, one line."""
        return self._abouts[name]

    def __getitem__(self, name: str) -> Report:
        if name not in self._loaded:
            module: Any = import_module(f"{__name__}.{self._modules[name]}")
            if name == "report":
                self._loaded[name] = module.report_of(
                    [(title, self[one], given) for one, title, given in _GATHERED]
                )
            else:
                self._loaded[name] = module.REPORT
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


# The modules and the descriptions of their reports, in the order in which the help lists them.
REPORTS = _Reports(
    {
        "summary": "One screen: the steps, where the GPUs' time goes, and the largest cause; all tables with "
        "--all.",
        "steps": "How the GPUs spent each step: compute, communication, copies, idle; which are slow, why.",
        "whatif": "How long the steps would be without a range, call or kernel, or with faster ones.",
        "timeline": "The timeline on the terminal: layers of threads, streams of GPUs, running warps.",
        "layers": "Time of calls at each layer: in the call itself, in ioctls, in the driver, "
        "off-CPU, on the GPU.",
        "gaps": "Idle times of each GPU: how long, what the CPU did then, which call ended them.",
        "flame": "A flame graph of what threads executed, always or while a GPU was idle: SVG, speedscope.",
        "lines": "Which lines of Python use the GPU's time: kernels, copies, allocations by line.",
        "annotations": "What the GPU did for each range that the program marked (NVTX): wall, busy, idle.",
        "memory": "Allocations: peak, over time, by call; never freed, freed twice, freed and "
        "never allocated.",
        "diff": "Compare two runs, or two sets of runs: what differs, by how much, and whether by chance.",
        "warps": "Warps of each kernel: lifetimes, skew, occupancy; divergence, strides, stragglers, "
        "waves, imbalance.",
        "stalls": "Why the warps of each kernel waited: stall reasons, instructions, lines of the source.",
        "plot": "Pictures: warps on the SMs over time, exit skew, latencies, idle GPUs; PNG, SVG or HTML.",
        "html_report": "One HTML page with the reports and the pictures; it needs no network.",
        "export": "Tables for DuckDB, Polars, Spark, pandas: a Parquet file for each layer.",
    }
)
