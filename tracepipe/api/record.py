"""A capture into a file: what the command `tracepipe capture` and the library's recorder both do."""

from __future__ import annotations

from pathlib import Path

from tracepipe.capture.request import CaptureRequest, Control, Notify
from tracepipe.capture.summary import CaptureSummary
from tracepipe.recording.files import free_name, keeping


def record(
    request: CaptureRequest, output: str, *, force: bool, notify: Notify, control: Control | None = None
) -> CaptureSummary:
    """Capture into a file, which keeps what it has whatever happens. Errors as `capture` and `keeping`."""
    from tracepipe.capture import capture

    with keeping(output, force=force) as sink:
        return capture(request, sink, notify=notify, control=control)


def title_of(request: CaptureRequest) -> str:
    """What a recording is called after."""
    if request.command:
        return Path(request.command[0]).name
    return request.comm or ("system" if request.system else f"pid-{request.pids[0]}")


def recording_name(request: CaptureRequest) -> str:
    """The name of a recording that was given none: PROGRAM.jsonl in the current folder, numbered if taken."""
    return free_name(title_of(request), ".jsonl")
