"""The options of a capture that keeps what came last alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from tracepipe.cli.values import SECONDS, misuse_of, read
from tracepipe.errors import TracepipeError
from tracepipe.tracer.request import LAST_BYTES, CaptureRequest, last_of
from tracepipe.tracer.watch import Conditions
from tracepipe.units import duration_ns, size_bytes

LAST = "Flight recorder"


@dataclass(frozen=True, slots=True)
class OnlyLast:
    """The events that a flight recorder keeps, and when it writes them."""

    last: Annotated[
        str,
        typer.Option(
            "--last",
            metavar="TIME",
            help="Keep only the events of the last 10s, 2m, … in memory. Write them at the end and on "
            f"SIGUSR2, each time to a separate file. {SECONDS}",
            rich_help_panel=LAST,
        ),
    ] = ""
    last_size: Annotated[
        str,
        typer.Option(
            "--last-size",
            metavar="SIZE",
            help=f"With --last: keep at most this much in memory. Default: {LAST_BYTES >> 20}M.",
            rich_help_panel=LAST,
        ),
    ] = ""
    when: Annotated[
        list[str] | None,
        typer.Option(
            "--when",
            metavar="CONDITION",
            help="With --last: also write when a call took too long: 'cudaStreamSynchronize > 50ms', "
            "'syscall:NAME > 50ms', 'nvtx:RANGE > 200ms' or 'kernel:REGEX > 5ms'. Repeat for more.",
            rich_help_panel=LAST,
        ),
    ] = None


def with_last(request: CaptureRequest, given: OnlyLast) -> CaptureRequest:
    """The request with the options of a flight recorder. Raises Misuse."""
    size = read(given.last_size, size_bytes, "--last-size", least=1)
    kept_ns = read(given.last, duration_ns, "--last", least=1)
    when, option = tuple(given.when or ()), "--when"
    try:
        Conditions(when)
        option = "--last"
        last = last_of(kept_ns, size, when, request.limits, request.windows)
    except TracepipeError as error:
        raise misuse_of(error, option) from None
    return replace(request, last=last)
