"""Reports: analyses of a recording. A new one is a file here and a line in `REPORTS`, and is a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from tracepipe.reports.report import Report

__all__ = ["REPORTS"]

# What the page of a recording has, in its order, under which headings.
_GATHERED = {
    "summary": "Summary",
    "warps": "Warps and findings",
    "gaps": "Idle GPUs and what the CPU did",
    "memory": "Memory",
}


class _Reports(Mapping[str, Report]):
    """Reports by their names, each loaded when it is asked for: all of them take as long to load as 100 000
    events to read.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = {module.partition("_")[2] or module: module for module in modules}
        self._loaded: dict[str, Report] = {}

    def __getitem__(self, name: str) -> Report:
        if name not in self._loaded:
            module: Any = import_module(f"{__name__}.{self._modules[name]}")
            if name == "report":
                self._loaded[name] = module.report_of([(title, self[one]) for one, title in _GATHERED.items()])
            else:
                self._loaded[name] = module.REPORT
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


# The modules, in the order in which the help lists the reports.
REPORTS: Mapping[str, Report] = _Reports(
    "summary",
    "timeline",
    "layers",
    "gaps",
    "memory",
    "diff",
    "warps",
    "plot",
    "html_report",
    "export",
)
