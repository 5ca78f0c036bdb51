"""A capture into a file, as both the command `tracepipe capture` and the library's recorder do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tracepipe.errors import OutputError
from tracepipe.recording.files import STANDARD
from tracepipe.recording.outputs import free_of, is_taken, keeping, named_at_once
from tracepipe.recording.remote import is_url
from tracepipe.recording.uploads import Uploads, check
from tracepipe.tracer.request import CaptureRequest, Control, Notify
from tracepipe.tracer.summary import CaptureSummary

if TYPE_CHECKING:
    from tracepipe.tracer.engines.engine import Collector

_STDOUT, _STDERR = 1, 2


def record(
    request: CaptureRequest,
    output: str,
    *,
    command_output: str = "",
    force: bool,
    notify: Notify,
    watchers: Sequence[Collector] = (),
    control: Control | None = None,
) -> CaptureSummary:
    """Capture into a file, which keeps what was recorded in every case.

    `command_output` is a file for the command's standard output. Without it, that goes to standard output, or
    to standard error where the recording goes to standard output.

    Raises what `capture` and `keeping` raise. Errors of a capture that ran are in its summary.
    """
    from tracepipe.tracer import capture

    if command_output and Path(command_output).resolve() == Path(output).resolve():
        raise OutputError(
            f"{output} cannot be both the recording and the command's output", "Name another file for one."
        )
    summary, failures = None, list[OutputError]()
    with Uploads(notify) as uploads, ExitStack() as kept:

        def complete() -> None:
            try:
                kept.close()
            except OutputError as error:
                failures.append(error)

        sink = kept.enter_context(_sink(request, output, uploads, force=force, notify=notify))
        try:
            with _stdout_of_command(output, command_output, force=force) as stdout:
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


def _sink(
    request: CaptureRequest, output: str, uploads: Uploads, *, force: bool, notify: Notify
) -> AbstractContextManager[Any]:
    """The output for the recording, or for those of a flight recorder."""
    place: Files | Uploads = Files(notify)
    if is_url(output):
        check(output, force=force)
        place = uploads
    if request.last is None:
        return place.keeping(output, force=force)
    return NumberedOutputs(output, place, force=force)


@dataclass(frozen=True, slots=True)
class Files:
    """Recordings that are files, as `keeping` writes them."""

    notify: Notify

    def keeping(self, path: str, *, force: bool) -> AbstractContextManager[BinaryIO]:
        """The file of a recording, as `keeping` opens it."""
        return keeping(path, force=force, notify=self.notify)

    def another(self, path: str) -> str:
        """The first free name similar to one."""
        return str(next(name for name in free_of(Path(path)) if not is_taken(name)))


class NumberedOutputs:
    """The recordings of a flight recorder. The first has the name that was given, and the others have numbers
    after it. The name is reserved from the start.
    """

    def __init__(self, path: str, place: Files | Uploads, *, force: bool) -> None:
        if path == STANDARD:
            raise OutputError("--last may write more than one recording", "Name a file with -o.")
        self._path, self._place = path, place
        self._first = ExitStack()
        self._sink: BinaryIO | None = self._first.enter_context(place.keeping(path, force=force))

    def __enter__(self) -> NumberedOutputs:
        return self

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
        with self._place.keeping(path, force=False) as sink:
            yield path, sink


def _stdout_of_command(output: str, command_output: str, *, force: bool) -> AbstractContextManager[int]:
    """The descriptor of the command's standard output."""
    if command_output:
        return named_at_once(command_output, force=force, option="--command-output")
    return nullcontext(_STDERR if output == STANDARD else _STDOUT)
