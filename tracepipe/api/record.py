"""A capture into a file, as both the command `tracepipe capture` and the library's recorder do it.

Names of its outputs may have parts that are filled in: a percent sign and a letter, as in Nsight's names and
in core(5), which no shell takes for its own.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tracepipe import paths
from tracepipe.errors import OutputError, TracepipeError
from tracepipe.launchers import place_of
from tracepipe.options import STANDARD
from tracepipe.recording.outputs import (
    free_name,
    free_of,
    is_taken,
    made_folder,
    named_at_once,
    written_recording,
)
from tracepipe.recording.remote import check_url, is_url
from tracepipe.recording.uploads import Uploads, check
from tracepipe.tracer.request import CaptureRequest, Control, Notify
from tracepipe.tracer.summary import CaptureSummary, summary_lines

if TYPE_CHECKING:
    from tracepipe.tracer.engines.engine import Store
    from tracepipe.tracer.live.recorded import RecordedTotals
    from tracepipe.tracer.live.totals import LiveSink

__all__ = [
    "Files", "NumberedOutputs", "Order", "OutputNames", "record", "summary_lines", "title_of", "watch",
    "watch_recording",
]  # fmt: skip

_STDOUT, _STDERR = 1, 2
_PARTS = re.compile(r"%(.?)", re.DOTALL)


def title_of(request: CaptureRequest) -> str:
    """The name that a recording's default name begins with."""
    if request.command:
        return Path(request.command[0]).name
    return request.comm or ("system" if request.system else f"pid-{request.pids[0]}")


class OutputNames:
    """Names of the outputs of one capture. A part has the same value in all of them."""

    def __init__(self, request: CaptureRequest) -> None:

        def world_size() -> str:
            size = place_of(request.command, request.pids).world_size
            if size is None:
                raise TracepipeError("The number of ranks is not known.", "Leave out %w, or set WORLD_SIZE.")
            return str(size)

        self._program = title_of(request).replace("/", "_")
        pid = request.pids[0] if request.pids else os.getpid()
        now = time.localtime()
        self._parts: dict[str, Callable[[], str]] = {
            "h": lambda: platform.node().replace("/", "_"),
            "r": lambda: str(place_of(request.command, request.pids).rank),
            "w": world_size,
            "p": lambda: str(pid),
            "e": lambda: self._program,
            "t": lambda: time.strftime("%Y%m%d-%H%M%S", now),
            "%": lambda: "%",
        }

    def recording(self, given: str) -> str:
        """The name of the recording. Its folder is made. Raises TracepipeError."""
        return self._named(given, ".jsonl") if given else free_name(self._program, ".jsonl")

    def command_output(self, given: str) -> str:
        """The name of the command's output, which has none by default."""
        if is_url(given):
            raise TracepipeError("The command's output does not go to a URL.", "Name a file for it.")
        return self._named(given, ".txt") if given else ""

    def _named(self, given: str, suffix: str) -> str:
        if given == STANDARD:
            return given
        for part in (part for part in _PARTS.findall(given) if part not in self._parts):
            known = ", ".join(f"%{one}" for one in self._parts if one != "%")
            hint = f"Use one of: {known}. Write a percent sign itself twice."
            raise TracepipeError(f"%{part} in {given} is not known.", hint)
        name = _PARTS.sub(lambda found: self._parts[found[1]](), given)
        if is_url(name):
            check_url(name)
            return f"{name}{self._program}{suffix}" if name.endswith("/") else name
        if name.endswith("/") or paths.is_folder(name):
            return free_name(self._program, suffix, made_folder(Path(name)))
        made_folder(Path(name).parent)
        return name


@dataclass(frozen=True, slots=True)
class Order:
    """A recording to make, and its files. `command_output` is one for the command's standard output. Without
    it, that goes to standard output, or to standard error where the recording goes to standard output.
    """

    request: CaptureRequest
    output: str
    force: bool
    command_output: str = ""


def record(
    order: Order, *, notify: Notify, watchers: Sequence[Store] = (), control: Control | None = None
) -> CaptureSummary:
    """Capture into a file, which keeps what was recorded in every case.

    Raises what `capture` and `written_recording` raise. Errors of a capture that ran are in its summary.
    """
    from tracepipe.tracer import capture

    request, output, force, command_output = order.request, order.output, order.force, order.command_output
    if command_output and Path(command_output).resolve() == Path(output).resolve():
        raise OutputError(
            f"{output} cannot be both the recording and the command's output", "Name another file for one."
        )
    summary, failures = None, list[OutputError]()
    with Uploads(notify) as uploads, ExitStack() as stack:

        def complete() -> None:
            try:
                stack.close()
            except OutputError as error:
                failures.append(error)

        outputs: Files | Uploads = Files(notify)
        if is_url(output):
            check(output, force=force)
            outputs = uploads
        opened: AbstractContextManager[Any] = (
            outputs.written_recording(output, force=force)
            if request.last is None
            else NumberedOutputs(output, outputs, force=force)
        )
        sink = stack.enter_context(opened)
        of_command: AbstractContextManager[int] = (
            named_at_once(command_output, force=force, option="--command-output")
            if command_output
            else nullcontext(_STDERR if output == STANDARD else _STDOUT)
        )
        try:
            with of_command as stdout:
                request = replace(request, stdout=stdout)
                summary = capture(
                    request, sink, notify=notify, watchers=watchers, control=control, complete=complete
                )
        except OutputError as error:
            if summary is None:
                raise
            failures.append(error)
        complete()
        failures += uploads.wait()
    for failure in failures:
        both = " ".join(part for part in (summary.error, f"{failure.message}.") if part)
        summary = replace(summary, error=both, hint=summary.hint or failure.hint)
    return summary


@dataclass(frozen=True, slots=True)
class Files:
    """Recordings that are files, as `written_recording` writes them."""

    notify: Notify

    def written_recording(self, path: str, *, force: bool) -> AbstractContextManager[BinaryIO]:
        """The file of a recording, as `written_recording` opens it."""
        return written_recording(path, force=force, notify=self.notify)

    def another(self, path: str) -> str:
        """The first free name similar to one."""
        return str(next(name for name in free_of(Path(path)) if not is_taken(name)))


class NumberedOutputs(AbstractContextManager["NumberedOutputs"]):
    """The recordings of a flight recorder. The first has the name that was given, and the others have numbers
    after it. The name is reserved from the start.
    """

    def __init__(self, path: str, place: Files | Uploads, *, force: bool) -> None:
        if path == STANDARD:
            raise OutputError("--last may write more than one recording", "Name a file with -o.")
        self._path, self._place = path, place
        self._first = ExitStack()
        self._sink: BinaryIO | None = self._first.enter_context(place.written_recording(path, force=force))

    def __exit__(self, *_: object) -> None:
        self._first.close()

    @contextmanager
    def another(self) -> Iterator[tuple[str, BinaryIO]]:
        """The name of the next recording, and its file."""
        if self._sink is not None:
            sink, self._sink = self._sink, None
            with self._first:
                yield self._path, sink
            return
        path = self._place.another(self._path)
        with self._place.written_recording(path, force=False) as sink:
            yield path, sink


def watch(
    request: CaptureRequest,
    output: str,
    view: Callable[[LiveSink], AbstractContextManager[None]],
    *,
    force: bool,
    notify: Notify,
) -> CaptureSummary:
    """Capture in a view of the totals, and into a file too, if `output` names one. Raises as `record`."""
    from tracepipe.tracer import capture
    from tracepipe.tracer.live.totals import LiveSink

    totals = LiveSink()
    with view(totals):
        if output:
            return record(Order(request, output, force), notify=notify, watchers=[totals])
        return capture(request, totals, notify=notify)


def watch_recording(view: Callable[[RecordedTotals, str], AbstractContextManager[None]]) -> list[str]:
    """Read the recording on standard input while it grows, in a view of its totals and its title, and return
    what the user should know of it. Ctrl-C ends it.
    """
    from tracepipe.recording.reading import Reading, open_recording
    from tracepipe.tracer.live.recorded import RecordedTotals

    with open_recording(STANDARD, is_growing=True) as opened:
        header = opened.recording.header
        totals = RecordedTotals(header)
        reading = Reading(opened, STANDARD)
        with view(totals, " ".join(header.command) or opened.source), suppress(KeyboardInterrupt):
            for batch in reading.source():
                totals.add(batch, opened.recording.tables)
            totals.finish(reading.footer.end_ns(header.default_clock))
    return list(reading.finish().remarks({}))
