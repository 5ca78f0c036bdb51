"""This machine: the findings of `doctor`, the functions and kernels that can be hooked, and hits of hooks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tracepipe import marks
from tracepipe.doctor import as_json, can_capture, diagnosis_lines, examine
from tracepipe.hooks.calls import CALL_RULES, CALL_SETS
from tracepipe.hooks.sets import read_hooks
from tracepipe.tracer import capture
from tracepipe.tracer.find.hook_list import FunctionRow, HitReport, hits, list_functions, list_sets
from tracepipe.tracer.find.kernels import list_kernels
from tracepipe.tracer.find.library import LibrarySearch
from tracepipe.tracer.find.resolve import resolve
from tracepipe.tracer.request import CaptureRequest, Notify

if TYPE_CHECKING:
    from tracepipe.tracer.summary import CaptureSummary

__all__ = [
    "INCLUDE", "LibrarySearch", "as_json", "can_capture", "diagnosis_lines", "examine", "is_by_default",
    "list_functions", "list_kernels", "list_sets", "try_hooks",
]  # fmt: skip

INCLUDE = Path(marks.__file__).parent / "include"
"""The folder with the header for CUDA programs."""


def is_by_default(function: FunctionRow) -> bool:
    """True for a function of a set that a capture records without an option."""
    return CALL_RULES["default"].allows(function.name) or set(function.sets).isdisjoint(CALL_SETS)


def try_hooks(request: CaptureRequest, notify: Notify) -> tuple[HitReport, CaptureSummary]:
    """Record the hooks of a request, and count their hits. Raises TracepipeError."""
    libraries = LibrarySearch(request.command or None, request.pids, request.libraries)
    names = {probe.name for probe in resolve(read_hooks(list(request.hooks)), libraries).probes}
    with tempfile.TemporaryFile(prefix="tracepipe-") as recording:
        summary = capture(request, recording, notify=notify)
        summary.check()
        recording.seek(0)
        return hits(recording, names), summary
