"""`tracepipe live`: shows a recording while it is made, here or by another program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Annotated

import typer

from tracepipe.api.capture import CaptureOptions, request_of
from tracepipe.api.record import OutputNames, title_of, watch, watch_recording
from tracepipe.cli.capture import Pids, check_source
from tracepipe.cli.options import COMMAND_LAST, Changed, Force, Misuse, as_misuse, output_option, with_options
from tracepipe.options import SECONDS, STANDARD, TIME, Option, about
from tracepipe.terminal.live_table import SORTS
from tracepipe.terminal.live_view import live_view
from tracepipe.terminal.output import say
from tracepipe.units import duration_ns

app = typer.Typer()


@app.command(context_settings=COMMAND_LAST)
@with_options
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
    sort: Annotated[str, Option("Order the functions by this.", choices=SORTS)] = "total",
    top: Annotated[
        int | None,
        Option(
            "Show at most N functions, from 1. Default: as many as fit the screen, and all at the end.",
            "N",
            least=1,
        ),
    ] = None,
    interval: Annotated[
        str,
        Option(
            f"Update the view at this interval: 250ms, 1s. {SECONDS} Default: 250ms on a terminal; elsewhere "
            "only the last view is shown.",
            TIME,
            least=1,
        ),
    ] = "",
    pid: Pids = None,
    options: Annotated[CaptureOptions, Changed("live")],
) -> None:
    """Show a capture or a recording."""
    interval_s = duration_ns(interval) / 1e9 if interval else None
    view = partial(live_view, sort=sort, top=top, interval_s=interval_s)
    if command and command[0] == STANDARD:
        if (command[1:], output, force, pid, options) != ([], "", False, None, CaptureOptions()):
            raise Misuse(
                "A recording that is read takes no other options than --sort, --top and --interval.",
                "Write them before the -.",
            )
        with _counted_interrupts() as end:
            remarks = watch_recording(
                lambda totals, title: view(totals.snapshot, sys.stdout, title, on_unseen=end)
            )
        for line in remarks:
            say(line)
        return
    check_source(command, pid, options)
    with as_misuse(CaptureOptions):
        request = request_of(command or [], tuple(pid or ()), options, has_gpus=False)
        with about("output"):
            output = OutputNames(request).recording(output) if output else ""
    stream = sys.stderr if request.command else sys.stdout  # the command's output stays unchanged
    title = " ".join(request.command) or title_of(request)
    summary = watch(
        request, output, lambda totals: view(totals.snapshot, stream, title), force=force, notify=say
    )
    summary.check(bool(command))
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


@contextmanager
def _counted_interrupts() -> Iterator[Callable[[], None]]:
    """In this context, the first Ctrl-C is ignored: the terminal also sends it to the capture, and the end of
    its recording is still to come. Gives a function that ends the view now.
    """
    is_next_ours = False

    def count(number: int, _: FrameType | None) -> None:
        nonlocal is_next_ours
        if is_next_ours:
            raise KeyboardInterrupt
        is_next_ours = True

    def end() -> None:
        nonlocal is_next_ours
        is_next_ours = True
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, count)
    try:
        yield end
    finally:
        signal.signal(signal.SIGINT, before)
