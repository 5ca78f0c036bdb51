"""What can be captured on this machine: the findings of `doctor`, the functions and kernels that can be
hooked, and the hits of hooks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracepipe.hooks.calls import CALL_RULES, CALL_SETS
from tracepipe.tracer.request import CaptureRequest, Notify

if TYPE_CHECKING:
    from tracepipe.doctor import Diagnosis
    from tracepipe.tracer.find.hook_list import FunctionRow, HitReport, Listing, SetRow
    from tracepipe.tracer.find.kernels import KernelListing
    from tracepipe.tracer.summary import CaptureSummary


@dataclass(frozen=True, slots=True)
class Findings:
    """What `doctor` found on this machine."""

    diagnoses: list[Diagnosis]

    @property
    def can_capture(self) -> bool:
        """Whether the default layers of a capture can be recorded by some method."""
        from tracepipe.doctor import can_capture

        return can_capture(self.diagnoses)

    def as_json(self) -> dict[str, Any]:
        """The findings as JSON values."""
        from tracepipe.doctor import as_json

        return as_json(self.diagnoses)

    def lines(self, *, width: int, colours: bool, ascii_only: bool) -> Iterator[str]:
        """The findings as text."""
        from tracepipe.doctor import diagnosis_lines

        return diagnosis_lines(self.diagnoses, width=width, colours=colours, ascii_only=ascii_only)


def examine(notify: Notify) -> Findings:
    """Try what a capture needs. `notify` gets the current step."""
    from tracepipe import doctor

    return Findings(doctor.examine(notify=notify))


def include_folder() -> Path:
    """The folder with the header for CUDA programs."""
    from tracepipe import marks

    return Path(marks.__file__).parent / "include"


def list_sets(libraries: Sequence[str], notify: Notify) -> list[SetRow]:
    """The shipped sets of hooks, with how many of their functions are on this machine."""
    from tracepipe.tracer.find import hook_list
    from tracepipe.tracer.find.library import LibrarySearch

    return hook_list.list_sets(LibrarySearch(given=tuple(libraries)), notify)


def list_functions(pattern: str, libraries: Sequence[str]) -> Listing:
    """The functions and tracepoints that fit a pattern. Raises TracepipeError."""
    from tracepipe.tracer.find import hook_list
    from tracepipe.tracer.find.library import LibrarySearch

    return hook_list.list_functions(pattern, LibrarySearch(given=tuple(libraries)))


def is_by_default(function: FunctionRow) -> bool:
    """Whether a capture without `calls` records a function of the sets that it is in."""
    return CALL_RULES["default"].takes(function.name) or set(function.sets).isdisjoint(CALL_SETS)


def list_kernels(pattern: str, files: Iterable[str]) -> KernelListing:
    """The GPU kernels of programs, libraries and folders that fit a pattern. Raises TracepipeError."""
    from tracepipe.tracer.find import kernels as kernel_list

    return kernel_list.list_kernels(pattern, files)


def try_hooks(request: CaptureRequest, notify: Notify) -> tuple[HitReport, CaptureSummary]:
    """Record the hooks of a request, and count their hits. Raises TracepipeError."""
    from tracepipe.hooks.sets import read_hooks
    from tracepipe.tracer import capture
    from tracepipe.tracer.find.hook_list import hits
    from tracepipe.tracer.find.library import LibrarySearch
    from tracepipe.tracer.find.resolve import resolve

    libraries = LibrarySearch(request.command or None, request.pids, request.libraries)
    names = {probe.name for probe in resolve(read_hooks(list(request.hooks)), libraries).probes}
    with tempfile.TemporaryFile(prefix="tracepipe-") as recording:
        summary = capture(request, recording, notify=notify)
        summary.check()
        recording.seek(0)
        return hits(recording, names), summary
