"""The command that records, and the one that tests whether recording works on this machine."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tracepipe import paths
from tracepipe.api.output_names import OutputNames
from tracepipe.api.record import record
from tracepipe.cli.gpu_options import OnGpus, with_gpus
from tracepipe.cli.groups import with_groups
from tracepipe.cli.last_options import OnlyLast, with_last
from tracepipe.cli.options import (
    COMMAND_LAST,
    Command,
    CommandOutput,
    MethodOption,
    RingBytes,
    UntilFull,
    Which,
    Whose,
    named,
    request_of,
)
from tracepipe.cli.output_options import (
    COMPRESSED,
    TO_STANDARD,
    Force,
    json_option,
    local_option,
    output_option,
)
from tracepipe.cli.values import Misuse
from tracepipe.cli.windows import InWindows
from tracepipe.converters import CONVERTERS
from tracepipe.errors import CaptureUnavailable, OutputError
from tracepipe.recording.files import STANDARD
from tracepipe.recording.outputs import default_output
from tracepipe.terminal.messages import status
from tracepipe.terminal.output import has_colours, put, put_json, say

app = typer.Typer()


@app.command(context_settings=COMMAND_LAST)
@with_groups
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
    command_output: CommandOutput = "",
    force: Force = False,
    which: Which,
    whose: Whose,
    in_windows: InWindows,
    until: UntilFull,
    only_last: OnlyLast,
    method: MethodOption = "auto",
    gpus: OnGpus,
    ring_bytes: RingBytes = "",
    then_open: Annotated[
        bool,
        typer.Option("--open", help="Convert the recording when it ends, and open it in the Perfetto UI."),
    ] = False,
    local: Annotated[bool, local_option("With --open: use")] = False,
) -> None:
    """Run a command, or attach to running processes, and record what they, the driver, the kernel and the
    GPUs do.
    """
    request = request_of(command, which, whose, until, method=method, ring_bytes=ring_bytes, has_gpus=True)
    request = with_gpus(request, gpus)
    request = replace(request, windows=in_windows.of(request))
    request = with_last(request, only_last)
    if command_output and not request.command:
        raise Misuse("There is no command after -- whose output could be written.", option="--command-output")
    names = OutputNames(request)
    target = named(names.recording, output, "--output")
    command_output = named(names.command_output, command_output, "--command-output")
    trace = default_output(target, CONVERTERS["perfetto"].suffix)
    if then_open and target == STANDARD:
        raise Misuse("A recording on standard output cannot be opened.", option="--open")
    if then_open and not force and paths.is_there(trace):  # reported now, not after the capture
        raise OutputError(f"{trace} exists", "Overwrite it with --force, or name another with -o.")
    summary = record(request, target, command_output=command_output, force=force, notify=say)
    from tracepipe.tracer.summary import summary_lines

    for line in summary_lines(target, summary):
        say(line)
    summary.check()
    if then_open:
        from tracepipe.cli.convert import convert_file
        from tracepipe.ui.serve import open_trace

        convert_file([target], "perfetto", trace, states_losses=False, force=force)
        open_trace(Path(trace), local=local, browser=True, notify=say)


@app.command()
def doctor(
    as_json: Annotated[bool, json_option("the findings")] = False,
) -> None:
    """Test what capture needs on this machine: what works, what does not and why, and how to fix it."""
    from tracepipe import doctor as examination

    with status(sys.stderr) as notify:
        diagnoses = examination.examine(notify=notify)
    if as_json:
        put_json(examination.as_json(diagnoses))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        colours = has_colours(sys.stdout)
        plain = not (sys.stdout.encoding or "").lower().startswith("utf")
        for line in examination.diagnosis_lines(diagnoses, width=width, colours=colours, ascii_only=plain):
            put(line, colours=colours)
    if not examination.can_capture(diagnoses):
        raise typer.Exit(CaptureUnavailable.exit_code)
