"""`tracepipe live`: shows a recording while it is made, here or by another program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracepipe.api.output_names import OutputNames, title_of
from tracepipe.api.record import record
from tracepipe.cli.groups import with_groups
from tracepipe.cli.options import (
    COMMAND_LAST,
    MethodOption,
    RingBytes,
    Until,
    Which,
    Whose,
    named,
    request_of,
)
from tracepipe.cli.output_options import Force, output_option
from tracepipe.cli.values import SECONDS, Misuse, read, whole
from tracepipe.event.model import MONOTONIC
from tracepipe.recording.files import STANDARD
from tracepipe.terminal.live_table import SORTS
from tracepipe.terminal.live_view import live_view
from tracepipe.terminal.messages import choices, text_of
from tracepipe.terminal.output import say
from tracepipe.units import duration_ns

if TYPE_CHECKING:
    from tracepipe.tracer.request import CaptureRequest

_View = Callable[..., AbstractContextManager[None]]
app = typer.Typer()
Sort = choices("Sort", SORTS)


@app.command(context_settings=COMMAND_LAST)
@with_groups
def live(
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="The command to run and watch, after --; or - to read a recording from standard input "
            "while it is being written.",
            metavar="-- COMMAND | -",
        ),
    ] = None,
    output: Annotated[str, output_option("Also write the recording to this file.")] = "",
    force: Force = False,
    sort: Annotated[Sort, typer.Option("--sort", help="Order the functions by this.")] = "total",  # type: ignore[valid-type]
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            parser=whole(1),
            metavar="N",
            help="Show at most N functions, from 1. Default: as many as fit the screen, and all at the end.",
        ),
    ] = None,
    interval: Annotated[
        str,
        typer.Option(
            "--interval",
            metavar="TIME",
            help=f"Update the view at this interval: 250ms, 1s. {SECONDS} "
            "Default: 250ms on a terminal; elsewhere only the last view is shown.",
        ),
    ] = "",
    which: Which,
    whose: Whose,
    until: Until,
    method: MethodOption = "auto",
    ring_bytes: RingBytes = "",
) -> None:
    """Run a command, or attach to running processes, and show live counts, rates, latencies and losses."""
    interval_ns = read(interval, duration_ns, "--interval", least=1)
    view = partial(
        live_view, sort=text_of(sort), top=top, interval_s=interval_ns / 1e9 if interval_ns else None
    )
    if command and command[0] == STANDARD:
        asked = (which, whose, until, output, text_of(method), ring_bytes, force, command[1:])
        if asked != (Which(), Whose(), Until(), "", "auto", "", False, []):
            raise Misuse(
                "A recording that is read takes no other options than --sort, --top and --interval.",
                "Write them before the -.",
            )
        watch_recording(view)
        return
    request = request_of(command, which, whose, until, method=method, ring_bytes=ring_bytes)
    if output:
        output = named(OutputNames(request).recording, output, "--output")
    watch_capture(request, output, force, view)


def watch_capture(request: CaptureRequest, output: str, force: bool, view: _View) -> None:
    """Capture and show the totals until the capture ends."""
    from tracepipe.tracer import capture
    from tracepipe.tracer.live.sink import LiveSink

    totals = LiveSink()
    stream = sys.stderr if request.command else sys.stdout  # the command's output stays unchanged
    with view(totals, stream, " ".join(request.command) or title_of(request)):
        if output:
            summary = record(request, output, force=force, notify=say, watchers=[totals])
        else:
            summary = capture(request, totals, notify=say)
    summary.check()
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


def watch_recording(view: _View) -> None:
    """Show the recording on standard input until it ends."""
    from tracepipe.recording.open import open_recording
    from tracepipe.recording.reading import Reading
    from tracepipe.tracer.live.recorded import RecordedTotals

    interrupts = _Interrupts()
    with interrupts.taken(), open_recording(STANDARD, is_growing=True) as opened:
        header = opened.recording.header
        totals = RecordedTotals(header)
        reading = Reading(opened, STANDARD)
        title = " ".join(header.get("command", ())) or opened.source
        with view(totals, sys.stdout, title, on_unseen=interrupts.end), suppress(KeyboardInterrupt):
            for batch in reading.source():
                totals.add(batch, opened.recording.tables)
            end: Any = (reading.footer or {}).get("end", {})
            totals.finish(end.get(f"{header.get('clock', MONOTONIC)}_ns"))
    for line in reading.finish().remarks({}):
        say(line)


class _Interrupts:
    """Ignores the first Ctrl-C, which the terminal also sends to the capture, as the end of its recording is
    still to come.
    """

    def __init__(self) -> None:
        self._is_next_ours = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While the context is open, interrupts are counted."""
        before = signal.signal(signal.SIGINT, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def end(self) -> None:
        """End the view now."""
        self._is_next_ours = True
        os.kill(os.getpid(), signal.SIGINT)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self._is_next_ours:
            raise KeyboardInterrupt
        self._is_next_ours = True
