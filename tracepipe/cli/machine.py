"""The commands about this machine: what capture needs, what can be hooked, where CUDA's header is."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from typing import Annotated

import typer

from tracepipe.api.capture import CaptureOptions, complete_sets, request_of
from tracepipe.api.machine import (
    INCLUDE,
    LibrarySearch,
    can_capture,
    diagnosis_lines,
    examine,
    is_by_default,
    list_functions,
    list_kernels,
    list_sets,
    try_hooks,
)
from tracepipe.api.machine import as_json as findings_json
from tracepipe.cli.capture import Pids, check_source
from tracepipe.cli.options import COMMAND_LAST, Changed, as_misuse, json_option, with_options
from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.options import Option
from tracepipe.terminal.messages import status
from tracepipe.terminal.output import has_colours, is_ascii, put, put_json, say
from tracepipe.units import counted

app = typer.Typer()
hooks = typer.Typer(name="hooks", no_args_is_help=True)
app.add_typer(hooks)


@app.command()
def include() -> None:
    """Print the folder."""
    put(str(INCLUDE))


@app.command()
@with_options
def doctor(*, as_json: Annotated[bool, json_option("the findings")] = False) -> None:
    """Print what works on this machine."""
    with status(sys.stderr) as notify:
        found = examine(notify=notify)
    if as_json:
        put_json(findings_json(found))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        colours = has_colours(sys.stdout)
        for line in diagnosis_lines(found, width=width, colours=colours, ascii_only=is_ascii(sys.stdout)):
            put(line, colours=colours)
    if not can_capture(found):
        raise typer.Exit(CaptureUnavailable.exit_code)


@hooks.command("list")
@with_options
def list_command(
    *,
    pattern: Annotated[
        str,
        typer.Argument(
            help="A shell pattern of names, such as nv*ioctl*; PLACE:NAME; or any form that --hook accepts.",
            metavar="PATTERN",
            autocompletion=complete_sets,
        ),
    ] = "",
    kernels: Annotated[
        tuple[str, ...],
        Option(
            "List GPU kernels instead: those of a program, a library, a .cubin file or a folder of them.",
            "PATH",
            repeats=True,
        ),
    ] = (),
    options: Annotated[CaptureOptions, Changed("hooks list")],
) -> None:
    """List the shipped sets, or the functions and tracepoints of this machine that fit a pattern."""
    if kernels:
        _list_kernels(pattern, kernels)
        return
    libraries = LibrarySearch(given=tuple(options.libraries))
    if not pattern:
        for row in list_sets(libraries, say):
            found = f"{row.function_count} here" if row.function_count else f"none here: {row.reason}"
            put(f"{row.name:<16} {row.about} ({found})")
        return
    listing = list_functions(pattern, libraries)
    width = max((len(row.spec) for row in listing.rows), default=0)
    for function in listing.rows:
        sets = f"in {', '.join(function.sets)}" if function.sets else "in no set"
        if not is_by_default(function):
            sets += " (--calls all)"
        put(f"{function.spec:<{width}}  {sets}  {function.place}".rstrip())
    for note in listing.notes:
        say(f"note: {note}")
    if not listing.rows:
        hint = (
            f"Near: {', '.join(listing.near)}." if listing.near else "Patterns are shell patterns: nv*ioctl*."
        )
        if listing.reason:
            hint = f"{listing.reason[0].upper()}{listing.reason[1:]}."
        raise TracepipeError(f"Nothing here that can be hooked fits {pattern}.", hint)


def _list_kernels(pattern: str, paths: tuple[str, ...]) -> None:
    listing = list_kernels(pattern, paths)
    rows = [
        (
            row.name,
            row.architecture,
            "registers not known" if row.registers is None else counted(row.registers, "register|registers"),
            f"{row.shared_bytes} B shared",
            f"{row.stack_bytes} B stack" if row.stack_bytes else "",
            row.source,
            row.place,
        )
        for row in listing.rows
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        shown = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True) if width]
        put("  ".join(shown).rstrip())
    for note in listing.notes:
        say(f"note: {note}")
    if not rows:
        fits = f" that fits {pattern}" if pattern else ""
        near = f"Near: {', '.join(listing.near)}." if listing.near else ""
        hint = near or "--kernels takes programs, libraries, .cubin files, and folders of them."
        raise TracepipeError(f"There is no GPU kernel{fits} in {', '.join(paths)}.", hint)


@hooks.command("test", context_settings=COMMAND_LAST)
@with_options
def test_command(
    *,
    hook: Annotated[
        list[str],
        typer.Argument(
            help="Hooks in any form that --hook accepts, then -- and the command.", metavar="HOOK… -- COMMAND"
        ),
    ],
    pid: Pids = None,
    options: Annotated[CaptureOptions, Changed("hooks test")],
) -> None:
    """Record only some hooks, and print how often they were hit, with the arguments of the first hits."""
    at = hook.index("--") if "--" in hook else len(hook)
    command = hook[at + 1 :]
    check_source(command, pid, options)
    with as_misuse(CaptureOptions):
        request = request_of(
            command, tuple(pid or ()), replace(options, layers=(), hooks=hook[:at]), has_gpus=False
        )
    report, summary = try_hooks(request, say)
    for row in report.rows:
        put(f"{row.count:>10} × {row.name}, {row.rate_per_s:.0f} a second")
        for arguments in filter(None, row.first):
            put("             " + ", ".join(f"{name}={value}" for name, value in arguments.items()))
    total = counted(sum(row.count for row in report.rows), "hit|hits")
    put(f"{total} in {report.seconds:.2f} s, {report.lost_count} lost")
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)
