"""The options of windows: when a command that runs longer is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tracepipe.cli.options import WHEN
from tracepipe.cli.values import SECONDS, Misuse, misuse_of, read, whole
from tracepipe.errors import TracepipeError
from tracepipe.tracer.request import API, TRIGGER_FORMS, CaptureRequest, Windows, check_windows
from tracepipe.units import duration_ns


@dataclass(frozen=True, slots=True)
class InWindows:
    """When events are recorded."""

    delay: Annotated[
        str,
        typer.Option(
            "--delay",
            metavar="TIME",
            help=f"Begin to record this time after the start: 5s, 500ms. {SECONDS}",
            rich_help_panel=WHEN,
        ),
    ] = ""
    start_on: Annotated[
        str,
        typer.Option(
            "--start-on",
            metavar="TRIGGER",
            help=f"Begin a window when this happens: {', '.join(TRIGGER_FORMS)}.",
            rich_help_panel=WHEN,
        ),
    ] = ""
    stop_on: Annotated[
        str,
        typer.Option(
            "--stop-on",
            metavar="TRIGGER",
            help="End the window when this happens, in the same forms. By default, profiler and signal "
            "end what they began.",
            rich_help_panel=WHEN,
        ),
    ] = ""
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat",
            parser=whole(1),
            metavar="N",
            help="Record up to N windows, each as above. Default: 1.",
            rich_help_panel=WHEN,
        ),
    ] = None

    def of(self, request: CaptureRequest) -> Windows:
        """The windows of a request. Raises Misuse."""
        if API in (self.start_on, self.stop_on):
            raise Misuse(
                "The trigger api is for programs that record themselves.",
                'In Python: tracepipe.CaptureOptions(start_on="api").',
            )
        delay_ns = read(self.delay, duration_ns, "--delay") or 0
        windows = Windows(delay_ns, self.start_on, self.stop_on, self.repeat)
        try:
            check_windows(windows, request.limits)
        except TracepipeError as error:
            raise misuse_of(error) from None
        return windows
