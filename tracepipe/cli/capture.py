"""The command that records."""

from __future__ import annotations

from typing import Annotated

import typer

from tracepipe import paths
from tracepipe.api.capture import WHO, CaptureOptions, order_of
from tracepipe.cli.options import (
    COMMAND_LAST,
    COMPRESSED,
    TO_STANDARD,
    Force,
    Misuse,
    as_misuse,
    local_option,
    output_option,
    with_options,
)
from tracepipe.errors import OutputError
from tracepipe.options import STANDARD, Option
from tracepipe.terminal.messages import progress
from tracepipe.terminal.output import say

app = typer.Typer()
Command = Annotated[
    list[str] | None, typer.Argument(help="The command to run and record, after --.", metavar="-- COMMAND")
]
Pids = Annotated[
    list[int] | None,
    Option("Record this running process with all its threads.", "PID", least=1, panel=WHO, repeats=True),
]


@app.command(context_settings=COMMAND_LAST)
@with_options
def capture(
    *,
    command: Command = None,
    output: Annotated[
        str,
        output_option(
            f"Write the recording to this file, {COMPRESSED}; {TO_STANDARD} FOLDER/ makes a file in that "
            "folder. A URL, such as s3://BUCKET/RUN.jsonl, gets the recording when it is complete. The name "
            "may contain %h (host), %r (rank), %w (number of ranks), %p (process), %e (program) and %t "
            "(time). Default: PROGRAM.jsonl, numbered if it exists."
        ),
    ] = "",
    force: Force = False,
    pid: Pids = None,
    options: CaptureOptions,
    then_open: Annotated[
        bool, Option("Convert the recording when it ends, and open it in the Perfetto UI.", flags=("--open",))
    ] = False,
    local: Annotated[bool, local_option("With --open: use")] = False,
    exit_code: Annotated[
        str,
        Option(
            "Exit with the code of the command, or with that of the recording: 0 if it is complete, whatever "
            "the command returns.",
            choices=("command", "recording"),
        ),
    ] = "command",
) -> None:
    """Capture into a file."""
    check_source(command, pid, options)
    if "api" in (options.start_on, options.stop_on):
        raise Misuse(
            "The trigger api is for programs that record themselves.",
            'In Python: tracepipe.CaptureOptions(start_on="api").',
        )
    if options.command_output and not command:
        raise Misuse("There is no command after -- whose output could be written.", option="--command-output")
    from tracepipe.api.convert import output_of
    from tracepipe.api.record import record, summary_lines

    with as_misuse(CaptureOptions):
        order = order_of(command or [], tuple(pid or ()), options, output, force)
    if then_open and order.output == STANDARD:
        raise Misuse("A recording on standard output cannot be opened.", option="--open")
    trace = output_of([order.output], "perfetto")
    if then_open and not force and paths.is_there(trace):  # reported now, not after the capture
        raise OutputError(f"{trace} exists", "Overwrite it with --force, or name another with -o.")
    summary = record(order, notify=say)
    for line in summary_lines(order.output, summary):
        say(line)
    as_command = bool(command) and exit_code == "command"
    summary.check(as_command)
    if then_open:
        from tracepipe.api.convert import open_trace
        from tracepipe.cli.convert import convert_file

        convert_file([order.output], "perfetto", trace, states_losses=False, force=force)
        open_trace(trace, local=local, browser=True, notify=say, showing=progress)
    if as_command and summary.exit_code:
        raise typer.Exit(summary.exit_code)


def check_source(command: list[str] | None, pid: list[int] | None, options: CaptureOptions) -> None:
    """Raise Misuse unless exactly one option says whose events are recorded."""
    given = [bool(command), bool(pid), bool(options.comm), options.system]
    if sum(given) != 1:
        raise Misuse(
            "More than one source of events is given." if any(given) else "There is nothing to record.",
            "Give one of: a command after --, --pid, --comm, --system.",
        )
